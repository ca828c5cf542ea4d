"""Shared parts of the checks: the built binaries, a daemon for a test, counted facts.

It uses only the standard library. A check is a function with `@check`. It states facts with `expect`, and script.py
runs it and prints the counts.
"""

import hashlib
import json
import os
import pty
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
WALD = Path(os.environ.get("WALD_BINARY") or TARGET / "release" / "wald")
WALCTL = TARGET / "release" / "walctl"
WALBENCH = TARGET / "release" / "walbench"
LOAD = TARGET / "release" / "load"
# Examples of the client whose speed does not matter, as `cargo test --workspace` builds them.
EXAMPLES = TARGET / "debug" / "examples"
# On the same file system as the build, not on a tmpfs, where a flush costs nothing.
SCRATCH = TARGET / "ci"
VEGA = "2.11.0"

passed = 0
failed = 0


# The functions with @check, in the order of the file.
CHECKS = []


def check(purpose):
    """Makes a function a check. Each gets a new directory if it has a parameter: `data` is the path of a data
    directory in it, and any other name is the directory. runner.py reads the purpose from the source."""
    def register(function):
        CHECKS.append(function)
        return function
    return register


def expect(what, holds, detail=""):
    """Counts and prints one fact; returns whether it holds."""
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"{'ok  ' if holds else 'FAIL'} {what}{f': {detail}' if detail != '' else ''}", flush=True)
    return holds


def counted(*command, **options):
    """Runs a program and adds its counts; a program without counts is one fact. Returns whether all passed."""
    global passed, failed
    print(f"$ {' '.join(map(str, command))}", flush=True)
    process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors="replace", **options)
    well = bad = 0
    for line in process.stdout:
        print(line, end="", flush=True)
        found = re.match(r"test result: \S+ (\d+) passed; (\d+) failed|(\d+) passed, (\d+) failed$", line)
        if found:
            well, bad = well + int(found[1] or found[3] or 0), bad + int(found[2] or found[4] or 0)
    status = process.wait()
    if status and not bad:
        print(f"FAIL {command[0]} ends with {status}", flush=True)
        bad = 1
    passed, failed = passed + (well or not bad), failed + bad
    return not bad


def sized(whole, light):
    """Returns the size of a check: `light` in `.ci/run` without --all, which sets CI_LIGHT, else `whole`."""
    return light if os.environ.get("CI_LIGHT") else whole


def script(name, *arguments):
    """The arguments of Python that run all checks of a file, such as script("bench/servers", "--rounds", 1)."""
    file = ROOT / ".ci" / (name if name.startswith("bench/") else f"checks/{name}")
    return ["-B", ROOT / ".ci" / "lib" / "script.py", file.with_suffix(".py"), "", *arguments]


def finish():
    """Prints the counts and ends the script."""
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed or not passed else 0)


def scratch():
    """A directory that is removed when the script ends."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=SCRATCH)


def clean_environment(**more):
    """The environment without settings of Wald."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WALD_")}
    return {**kept, **more}


def run(*command, **options):
    """Runs a command to its end; returns the completed process with its output."""
    options.setdefault("timeout", 300)
    options.setdefault("env", clean_environment())
    return subprocess.run([str(c) for c in command], capture_output=True, **options)


class Ended(Exception):
    """The daemon ended before it served."""

    def __init__(self, code, lines):
        super().__init__(f"the daemon ended with {code} before it served: {lines}")
        self.code = code
        self.lines = lines


class Daemon:
    """The built daemon on a directory; a context that kills it at the end.

    `strace` are arguments for strace, which then sees every call from the first on; its output
    is in `trace`. The process is still the daemon's. `under` is a command that becomes
    the command after it. `variables` are added to its environment. `binary` is another build. `begins` are the
    messages that may end its start.
    """

    def __init__(self, data_dir, *arguments, listen=":0", strace=None, under=(), variables=None, binary=None, begins=("wald is serving",)):
        self.data_dir = data_dir
        command = [binary or WALD, "--data-dir", data_dir, "--listen", listen, "--http-listen", ":0",
                   "--log-format", "json", *arguments]
        if strace is not None:
            self.trace = Path(f"{data_dir}.strace")
            # With -D strace is a child of the daemon, not its parent. With the filter
            # only the traced calls cost anything.
            command = ["strace", "-D", "-f", "--seccomp-bpf", "-ttt", "-o", self.trace, *strace, *command]
        self.process = subprocess.Popen([str(c) for c in [*under, *command]], stdin=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE, text=True, env=clean_environment(**variables or {}))
        self.lines = []
        self.start = None
        for line in self.process.stderr:
            self.lines.append(line)
            if any(message in line for message in begins):
                self.start = json.loads(line)
                break
        if self.start is None:
            raise Ended(self.process.wait(), self.lines)
        # Keeps reading, so the daemon never waits for a full pipe.
        threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()
        self.grpc = self.start["grpc"]
        self.http = self.start["http"]
        self.endpoint = f"http://{self.grpc}"
        self.pid = self.process.pid

    def walctl(self, *arguments, **options):
        return run(WALCTL, *arguments, env=clean_environment(WALD_ENDPOINT=self.endpoint), **options)

    def grpcurl(self, *arguments, **options):
        return run(grpcurl(), "-plaintext", *arguments, **options)

    def call(self, method, request):
        """One call by grpcurl: (exit code, answer as JSON or None, text)."""
        # An argument has at most 128 KiB.
        done = self.grpcurl("-d", "@", self.grpc, method, input=json.dumps(request).encode())
        answer = json.loads(done.stdout) if done.returncode == 0 and done.stdout else None
        return done.returncode, answer, (done.stdout + done.stderr).decode()

    def load(self, **options):
        """Starts client/bench/src/bin/load.rs on it."""
        return Load(self, **options)

    def metrics(self):
        """/metrics: name with labels -> value."""
        with urllib.request.urlopen(f"http://{self.http}/metrics") as page:
            lines = page.read().decode().splitlines()
        return {name: float(value) for name, value in
                (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    def metric(self, name):
        """One value of /metrics."""
        return self.metrics()[name]

    def ready(self):
        """Waits until the segments that a start prepares in the background are ready:
        by default two of the pool and two of the reserve."""
        wait_until(lambda: self.metric('wald_segments{state="ready"}') >= 4)
        return self

    def anonymous(self):
        """Resident memory without a file behind it, in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10

    def descriptors(self):
        """Open descriptors of the process: a list of targets."""
        found = []
        for entry in os.scandir(f"/proc/{self.pid}/fd"):
            try:
                found.append(os.readlink(entry.path))
            except FileNotFoundError:
                pass  # closed since
        return found

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.kill()


def wait_until(holds, seconds=60):
    """Waits until a condition holds; returns whether it does."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


class Load:
    """client/bench/src/bin/load.rs at work; options are its flags. A context that ends it."""

    def __init__(self, daemon, **options):
        command = [LOAD, daemon.endpoint]
        for name, value in options.items():
            if value is not False:
                command += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
        self.ledger = options.get("ledger")
        self.process = subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment())

    def result(self, seconds=300):
        """The result printed at the end; after a failure `acks` is 0 and `error` gives the reason."""
        out, err = self.process.communicate(timeout=seconds)
        return json.loads(out) if self.process.returncode == 0 else {"error": err.strip()[:500], "acks": 0}

    def entries(self):
        """The ledger's contents, one `Entry` for each append; empty if the driver never connected."""
        if not Path(self.ledger).exists():
            return []
        return [Entry(line) for line in Path(self.ledger).read_text().splitlines()]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Entry:
    """One line of a ledger. Times are microseconds since the Unix epoch."""

    def __init__(self, line):
        sent, got, self.log, number, kind, *rest = line.split(" ")
        self.sent, self.got, self.number = int(sent), int(got), int(number)
        self.acked = kind == "ack"
        if self.acked:
            self.lsn, self.level = int(rest[0]), rest[1].removeprefix("DURABILITY_")
            self.position = None if rest[2] == "-" else int(rest[2])
            self.epoch = int(rest[3])
        else:
            self.code, self.reason, self.outcome = rest
            self.error = " ".join(rest)


def stored(daemon, prefix="load/"):
    """The records of a scan: (log, lsn) -> number of the append, as the load driver wrote it."""
    done = daemon.walctl("scan", "--prefix", prefix, "--output", "json")
    if done.returncode != 0:
        raise SystemExit(f"the scan failed: {done.stderr.decode()}")
    found = {}
    for line in done.stdout.splitlines():
        record = json.loads(line)
        payload = next(record[key] for key in ("value", "text") if key in record)
        found[record["log"], record["lsn"]] = int(payload)
    return found


class Strace:
    """strace on a running daemon and all of its threads, until stopped."""

    def __init__(self, daemon, *arguments):
        self.out = Path(f"{daemon.data_dir}.strace")
        self.process = subprocess.Popen(["strace", "-f", "-o", str(self.out), *arguments, "-p", str(daemon.pid)],
                                        stderr=subprocess.PIPE, text=True)
        line = self.process.stderr.readline()
        if "attached" not in line:
            raise SystemExit(f"strace cannot attach: {line}")

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        self.process.stderr.read()
        self.process.wait()
        return self.out.read_text()


class Call:
    """A system call of a trace: its name, arguments, result, and when it began and ended (s)."""

    def __init__(self, thread, began, text):
        self.thread, self.began, self.ended = thread, began, began
        self.name, _, self.arguments = text.partition("(")
        self.result = None

    def finish(self, at, text):
        self.ended = at
        self.injected = "INJECTED" in text or "INJECTED" in self.arguments
        self.result = text.rpartition(" = ")[2]
        self.failed = self.result.startswith("-1 ")


def calls(trace):
    """The calls in a trace that strace -f -ttt wrote, in the order in which they began."""
    found, open_calls = [], {}
    for line in Path(trace).read_text().splitlines():
        match = re.match(r"(\d+) +([\d.]+) (.*)", line)
        if not match:
            continue
        thread, at, text = match[1], float(match[2]), match[3]
        if text.startswith("<... ") and thread in open_calls:
            open_calls.pop(thread).finish(at, text)
        elif re.match(r"\w+\(", text):
            call = Call(thread, at, text)
            found.append(call)
            if text.endswith("<unfinished ...>"):
                open_calls[thread] = call
            else:
                took = re.search(r" <([\d.]+)>$", text)
                call.finish(at + float(took[1]) if took else at, text)
    return found


def grpcurl():
    """Path of grpcurl: from .ci/lib/tools, or any on the PATH."""
    ours = SCRATCH / "bin" / "grpcurl"
    return ours if ours.exists() else shutil.which("grpcurl")


def vega_file(name):
    """A file of the npm package vega-datasets, fetched once."""
    package = SCRATCH / f"vega-datasets-{VEGA}"
    if not package.exists():
        with scratch() as temporary:
            run("npm", "pack", "--silent", f"vega-datasets@{VEGA}", cwd=temporary, check=True)
            (archive,) = Path(temporary).glob("*.tgz")
            run("tar", "-xzf", archive, "-C", temporary, check=True)
            (Path(temporary) / "package").rename(package)
    return package / "data" / name


def elements(path):
    """The elements of a JSON array, each exactly as the file has it. Independent of walctl."""
    text = path.read_text(encoding="utf-8")
    decoder = json.JSONDecoder()
    found = []
    at = text.index("[") + 1
    while True:
        while text[at] in " \t\r\n,":
            at += 1
        if text[at] == "]":
            return found
        _, end = decoder.raw_decode(text, at)
        found.append(text[at:end])
        at = end


def digest(lines):
    """SHA-256 of lines, each with its newline."""
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


class Terminal:
    """A command on a terminal of its own, as a person would run it."""

    def __init__(self, *command, **options):
        master, slave = pty.openpty()
        self.process = subprocess.Popen([str(c) for c in command], stdin=slave, stdout=slave,
                                        stderr=slave, start_new_session=True, **options)
        os.close(slave)
        self.master = master
        self.text = ""
        self.arrived = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                data = b""
            self.arrived.put(data)
            if not data:
                return

    def wait_for(self, what, seconds):
        """Waits until the terminal shows a text. False if the command ends or the time is over."""
        until = time.monotonic() + seconds
        while what not in self.text:
            try:
                data = self.arrived.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                return False
            if not data:
                return False
            self.text += data.decode(errors="replace")
        return True

    def ended(self, seconds=60):
        code = self.process.wait(timeout=seconds)
        self.wait_for("\0 never shown \0", 2)
        return code


__all__ = [name for name in dir() if not name.startswith("_")]
