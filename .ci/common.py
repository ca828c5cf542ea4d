"""What the checks share: the built binaries, a daemon of one's own, counted checks.

Only the standard library. Every check prints a line, and `finish` the counts.
"""

import hashlib
import json
import os
import pty
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
WALD = TARGET / "release" / "wald"
WALCTL = TARGET / "release" / "walctl"
LOAD = TARGET / "release" / "examples" / "load"
# On the same file system as the build: not a tmpfs, where a flush is nothing.
SCRATCH = TARGET / "ci"
VEGA = "2.11.0"

passed = 0
failed = 0


def usage():
    """Prints the script's own documentation if asked, or if given what it does not take."""
    if len(sys.argv) > 1:
        print(sys.modules["__main__"].__doc__.strip())
        sys.exit(0 if sys.argv[1] in ("-h", "--help") else 2)


def check(what, holds, detail=""):
    """Counts and prints one check."""
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"{'ok  ' if holds else 'FAIL'} {what}{f': {detail}' if detail != '' else ''}", flush=True)
    return holds


def finish():
    """Prints the counts and ends the script."""
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed or not passed else 0)


def scratch():
    """A directory that goes away with the script."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=SCRATCH)


def clean_environment(**more):
    """The environment without settings of Wald."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WALD_")}
    return {**kept, **more}


def run(*command, **options):
    """Runs a command to its end; gives back what it said."""
    options.setdefault("timeout", 300)
    options.setdefault("env", clean_environment())
    return subprocess.run([str(c) for c in command], capture_output=True, **options)


class Daemon:
    """The built daemon on a directory; a context that kills it at the end."""

    def __init__(self, data_dir, *arguments):
        self.data_dir = data_dir
        command = [WALD, "--data-dir", data_dir, "--listen", ":0", "--http-listen", ":0",
                   "--log-format", "json", *arguments]
        self.process = subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE, text=True, env=clean_environment())
        self.lines = []
        self.start = None
        for line in self.process.stderr:
            self.lines.append(line)
            if "wald is serving" in line:
                self.start = json.loads(line)
                break
        if self.start is None:
            raise SystemExit(f"the daemon ended before it served: {self.lines}")
        # Goes on reading, so that the daemon never waits for a full pipe.
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
        done = self.grpcurl("-d", json.dumps(request), self.grpc, method)
        answer = json.loads(done.stdout) if done.returncode == 0 and done.stdout else None
        return done.returncode, answer, (done.stdout + done.stderr).decode()

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


def grpcurl():
    """Path of grpcurl: the one that .ci/tools installs, or any."""
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
        """Waits until the terminal shows a text; False if it ends or the time is over."""
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
