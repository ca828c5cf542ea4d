"""usage: .ci/run [--all | --full | --rest] [--list] [NAME...] [-- ARGUMENT...]

Runs every check, on a machine with a Rust toolchain, a C compiler, Go and npm: the tests, lints, and the second
tier, which tests the released binaries with real tools and real input.

--all   runs each check at its full size: more kills, power cuts, damage, logs, faults; and the steps that lib/plan.py
        names in WITH_ALL (over two hours). Two commands do the same in parts:
--full  only the steps of a default run, each at its full size
--rest  only the steps of WITH_ALL, each at its full size, and the builds that they need
--list  prints all steps and checks with their purpose
NAME    a topic (durability), a step (durability/modes), or some of its checks (durability/modes:killed,manual).
        Only these run, one after the other, with the binaries that are there; missing ones are built first. A check
        that only runs by name has its full size, and builds with full optimisation.
--      the rest goes to the script, as in .ci/run clients/chaos -- SECONDS SEED

All steps run, also after a failure. A step of a default run that has not ended after half an hour is killed, and fails.
A step that judges times and fails runs once more at the end, with nothing beside it; the table then says "again", and only
the second result counts. lib/plan.py has their order. The last lines are a table with the time of each step, the failures,
and the counts.
"""

import ast
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from plan import BY_HAND, DEFAULT, FULL, PLAN, RELEASE, REST, WITH_ALL, Step

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / ".ci"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").absolute()
LOGS = TARGET / "ci" / "logs"
# Waiting steps at a time.
ROWS = 4
# Seconds after which a step of a default run hangs. The longest takes about ten minutes.
HANGS = 30 * 60
# Lines of a failed check's details that the end of the output repeats.
DETAIL = 20
# The kind of a step that runs once more at the end.
AGAIN = "again"
# The lock of steps that a busy machine can starve.
STARVES = "starve"


class File:
    """A file of checks, read without running it: its name as a step, its subject, its checks with their purposes."""

    def __init__(self, path):
        self.path = path
        self.name = str(path.relative_to(CI).with_suffix("")).removeprefix("checks/")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self.subject = re.split(r"(?<=\.)\s", " ".join((ast.get_docstring(tree) or "").split()))[0].rstrip(".:")
        self.checks = {function.name: decorator.args[0].value for function in tree.body
                       if isinstance(function, ast.FunctionDef) for decorator in function.decorator_list
                       if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "check"}


def files():
    """All files of checks: name -> file."""
    found = [File(path) for path in sorted([*CI.glob("checks/*/*.py"), *CI.glob("bench/*.py")])]
    return {file.name: file for file in found if file.checks}


def when(name):
    """A note behind the name of a file or a check that a default run leaves out."""
    return " (only by name)" if name in BY_HAND else " (only with --all)" if name in WITH_ALL else ""


def listing(known):
    """The text of --list."""
    lines = []
    for file in known.values():
        lines.append(f"{file.name}: {file.subject}{when(file.name)}")
        lines += [f"    {file.name}:{name}: {purpose}{when(f'{file.name}:{name}')}" for name, purpose in file.checks.items()]
    return "\n".join(lines)


def missing(known):
    """Checks that neither the plan nor the list of those by hand has."""
    covered = set(BY_HAND)
    for step in PLAN:
        name, _, checks = step.name.partition(":")
        covered |= {f"{name}:{check}" for check in checks.split(",")} if checks else {name}
    return [f"{file.name}:{check}" for file in known.values() for check in file.checks
            if file.name not in covered and f"{file.name}:{check}" not in covered]


def chosen(known, names):
    """The steps that names stand for."""
    steps = []
    for name in names:
        file, _, checks = name.partition(":")
        found = [one for one in known if one == file or one.startswith(f"{file}/")]
        unknown = [check for check in checks.split(",") if check and (len(found) != 1 or check not in known[found[0]].checks)]
        if not found or unknown:
            sys.exit(f"there is no {name}; .ci/run --list prints all names")
        steps += [Step(f"{one}:{checks}" if checks else one, "alone") for one in found]
    need = {step.name.partition(":")[0] for step in PLAN if RELEASE in step.after} | set(BY_HAND)
    if not (TARGET / "release" / "wald").exists() and any(step.name.partition(":")[0] in need for step in steps):
        steps.insert(0, Step(RELEASE, "alone"))
    return steps


def yield_to_others(kind):
    """Before a computing step begins: it gets the processor time that others leave. Processes of one session share
    their part, so each step has a session of its own."""
    if kind == "compute":
        try:
            Path("/proc/self/autogroup").write_text("19")
        except OSError:
            pass
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class Running:
    """A started step. Its output goes to a file; `ended` gets it when it ends."""

    def __init__(self, step, known, arguments, live, ended, limit=None):
        self.step, self.began = step, time.monotonic()
        name, _, checks = step.name.partition(":")
        self.log = LOGS / step.name.replace("/", "-").replace(":", "-")
        self.output = open(self.log, "wb")
        command = [sys.executable, "-B", CI / "lib" / "script.py", known[name].path, checks, *arguments]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True,
                                        stdout=subprocess.PIPE if live else self.output, stderr=subprocess.STDOUT,
                                        preexec_fn=lambda: yield_to_others(step.kind))
        self.hung = False
        self.timer = threading.Timer(limit, self._hangs) if limit else None
        if self.timer:
            self.timer.daemon = True
            self.timer.start()
        threading.Thread(target=self._wait, args=(live, ended), daemon=True).start()

    def _wait(self, live, ended):
        for line in self.process.stdout if live else ():
            self.output.write(line)
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
        # The time of the process and of all that it waited for.
        _, status, used = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        if self.timer:
            # If it hung, the others are killed before it counts as ended.
            self.timer.cancel()
            self.timer.join()
        self.seconds, self.cpu = time.monotonic() - self.began, used.ru_utime + used.ru_stime
        self.output.close()
        # On a full disk correct builds and daemons fail, too.
        self.free = shutil.disk_usage(TARGET).free >> 20
        lines = self.log.read_bytes().decode(errors="replace").splitlines()
        counts = re.fullmatch(r"(\d+) passed, (\d+) failed", lines[-1]) if lines else None
        self.passed, self.failed = (int(counts[1]), int(counts[2])) if counts else (0, 1)
        if self.process.returncode and not self.failed:
            self.failed = 1
        ended.put(self)

    def full_part(self):
        """From here on it has a full part of the processor time: nothing else is left to run."""
        try:
            (Path("/proc") / str(self.process.pid) / "autogroup").write_text("0")
        except OSError:
            pass
        group = subprocess.run(["ps", "-o", "pid=", "-s", str(self.process.pid)], capture_output=True, text=True).stdout
        for pid in group.split():
            subprocess.run(["chrt", "--other", "--pid", "0", pid], capture_output=True)

    def _hangs(self):
        """Kills the step and all that it has begun, and says where each process waits."""
        self.hung = True
        family = {self.process.pid: ""}
        while True:
            listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,sid=,wchan:24=,etimes=,args="], capture_output=True, text=True).stdout
            rows = [(*map(int, row.split()[:3]), row) for row in listed.splitlines()]
            # Children, and members of their sessions whose own parents have ended.
            new = {pid: row for pid, parent, session, row in rows if (parent in family or session in family) and not family.get(pid)}
            if not new:
                break
            family |= new
            # Nobody begins another process meanwhile.
            for pid in new:
                self._send(pid, signal.SIGSTOP)
        said = f"\nFAIL {self.step.name} has not ended in time; pid, parent, session, wait, seconds, command:\n"
        self.output.write((said + "".join(f"{row}\n" for row in family.values() if row)).encode())
        self.output.flush()
        for pid in family:
            self._send(pid, signal.SIGKILL)

    @staticmethod
    def _send(pid, number):
        try:
            os.kill(pid, number)
        except OSError:
            pass

    def kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def conflict(one, other):
    """Whether two steps have a lock in common that not both of them share."""
    return any(a.rstrip("*") == b.rstrip("*") and not a == b == f"{a.rstrip('*')}*" for a in one.locks for b in other.locks)


def may_start(step, pending, running, done):
    """Whether a step may start now. `pending`: the steps that have not started, in their order."""
    names = {one.name for one in (*pending, *(r.step for r in running))}
    if any(name in names for name in step.after) or any(conflict(step, r.step) for r in running):
        return False
    kinds = [r.step.kind for r in running]
    if step.kind == "build":
        return True
    if step.kind == "compute":
        return kinds.count("compute") < (1 if {"build", "wait"} & set(kinds) else 2)
    if step.kind == "wait":
        return "alone" not in kinds and kinds.count("wait") < ROWS
    if step.kind == AGAIN:
        return True
    # Alone, and only when no waiting step before it could start.
    return not {"alone", "wait", "build"} & set(kinds) and not any(
        one.kind in ("wait", "build") and may_start(one, pending, running, done) for one in pending[:pending.index(step)])


def perform(steps, known, arguments, live, limit=None):
    """Runs the steps; returns how each ended, in the order of the ends. A step of the kind alone, or with the lock of those that
    starve, judges times, which other steps and a shared machine stretch. If it fails, it runs once more at the end, with nothing beside it, and
    this result counts."""
    pending, running, done, again, ended = list(steps), [], [], [], queue.Queue()
    LOGS.mkdir(parents=True, exist_ok=True)
    try:
        while pending or running or again:
            if not pending and not running:
                pending.append(again.pop(0)._replace(kind=AGAIN, after=()))
            for step in list(pending):
                if may_start(step, pending, running, done):
                    pending.remove(step)
                    print(f".. {step.name} begins", flush=True)
                    running.append(Running(step, known, arguments, live, ended, limit))
            if not pending and all(one.step.kind == "compute" for one in running):
                for one in running:
                    one.full_part()
            if not running:
                sys.exit(f"these steps wait for each other: {', '.join(step.name for step in pending)}")
            one = ended.get()
            running.remove(one)
            judges_times = one.step.kind == "alone" or STARVES in one.step.locks
            if one.failed and judges_times and not live and not one.hung:
                again.append(one.step)
            else:
                done.append(one)
            if not live:
                print(f"\n== {one.step.name}", flush=True)
                with open(one.log, "rb") as log:
                    sys.stdout.flush()
                    shutil.copyfileobj(log, sys.stdout.buffer)
            print(f"== {row(one)}", flush=True)
    finally:
        for one in running:
            one.kill()
    return done


def row(one):
    """The row of a step in the table."""
    return (f"{one.step.name:32} {one.step.kind:7} {one.seconds:7.1f} s  {one.cpu:4.0f} s CPU  {one.passed:5} passed"
            f"  {one.failed:3} failed  {one.free:7} MiB free")


def failures(log):
    """The lines of a failed step that say what failed, with the details of a check, which stand in the lines below it."""
    lines, found, detail = log.read_bytes().decode(errors="replace").splitlines(), [], 0
    for line in lines:
        if re.match(r"FAIL|test .* FAILED$|error|Error", line):
            found.append(line)
            detail = DETAIL if line.startswith("FAIL") else 0
        elif re.match(r"ok  |\$ |test ", line):
            detail = 0
        elif detail:
            found.append(f"  {line}")
            detail -= 1
    return found or lines[-5:]


def main():
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    given, arguments = given[:at], given[at + 1:]
    names = [word for word in given if not word.startswith("-")]
    options = set(given) - set(names)
    sizes = options - {"--list"}
    if sizes - {"--all", "--full", "--rest"} or len(sizes) > 1:
        sys.exit(__doc__.strip())
    known = files()
    if "--list" in options:
        print(listing(known))
        return
    if missing(known):
        sys.exit(f"lib/plan.py does not name {', '.join(missing(known))}")
    os.environ["PATH"] = f"{TARGET / 'ci' / 'bin'}:{os.environ['PATH']}"
    # Nothing is built twice here: incremental builds would only take as much space again.
    os.environ["CARGO_INCREMENTAL"] = "0"
    # Clippy's driver is the compiler with more lints. So each build lints the workspace, and no library is compiled for
    # the lints alone (300 s of processor time).
    os.environ["RUSTC_WORKSPACE_WRAPPER"] = "clippy-driver"
    # A check that only runs by name has one size.
    light = not sizes and not (names and set(names) <= set(BY_HAND))
    if light:
        # Scripts take their smaller sizes from this: sized() in common.py.
        os.environ["CI_LIGHT"] = "1"
        # The optimiser works on each crate alone. On two cores the daemon then builds in 3.5 instead of 5.5 minutes, and
        # an append takes a third more instructions. The engine of the tests, which has the optimiser, then takes a
        # fifth less. The tests' backtraces lack lines; a panic still says where it was.
        os.environ |= {"CARGO_PROFILE_RELEASE_LTO": "off", "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "16",
                       "CARGO_PROFILE_DEV_LTO": "off", "CARGO_PROFILE_DEV_DEBUG": "none"}
    if not names:
        # The first steps build the binaries of the others, which then need not ask cargo whether they are new.
        os.environ["CI_BUILT"] = "1"
        (TARGET / "ci" / "tests.json").unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    parts = {"--all": PLAN, "--full": FULL, "--rest": REST}
    steps = chosen(known, names) if names else parts[sizes.pop()] if sizes else DEFAULT
    done = perform(steps, known, arguments, bool(names), None if names or steps is not DEFAULT else HANGS)
    passed, failed = sum(one.passed for one in done), sum(one.failed for one in done)
    print("\n" + "\n".join(row(one) for one in done))
    # Repeats the failures at the end of the output, where readers look first.
    if failed:
        print("what failed:")
        for one in done:
            if one.failed:
                print("\n".join(f"{one.step.name}: {line[:600]}" for line in failures(one.log)))
    print(f"{time.monotonic() - began:.0f} s in all")
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed or not passed else 0)


if __name__ == "__main__":
    main()
