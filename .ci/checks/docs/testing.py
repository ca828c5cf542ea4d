"""The table of all checks in docs/src/testing.md, the time limit of a step, and the report of failures."""

import contextlib
import io
from types import SimpleNamespace

from common import *
from plan import Step
from runner import failures, files, missing, perform, when

PAGE = ROOT / "docs" / "src" / "testing.md"
START, END = "<!-- checks: written by .ci/run docs/testing -- --update -->", "<!-- end of checks -->"


def made():
    """The table: a row for each step, then one for each of its checks."""
    rows = ["| check | subject |", "|---|---|"]
    for file in files().values():
        path = file.path.relative_to(ROOT)
        rows.append(f"| **[{file.name}](../../{path})** | {file.subject}{when(file.name)} |")
        rows += [f"| `{file.name}:{name}` | {purpose}{when(f'{file.name}:{name}')} |" for name, purpose in file.checks.items()]
    return "\n".join(rows)


@check("The table of docs/src/testing.md is the list of .ci/run")
def table():
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    old, after = rest.split(END)
    if "--update" in sys.argv:
        PAGE.write_text(f"{before}{START}\n{made()}\n{END}{after}", encoding="utf-8")
        old = made()
    expect("the table is as the list", old.strip() == made(), "run .ci/run docs/testing -- --update")


@check("Each purpose is one line, and each check has its place in the plan")
def purposes():
    for file in files().values():
        for name, purpose in file.checks.items():
            expect(f"{file.name}:{name}", "\n" not in purpose and 10 < len(purpose) <= 110, len(purpose))
    expect("the plan has every check", not missing(files()), ", ".join(missing(files())))


@check("A step that hangs is killed with all that it has begun, and fails")
def hangs(directory):
    directory.mkdir(parents=True, exist_ok=True)
    pids = directory / "pids"
    (directory / "hanging.py").write_text(f"""
import os
from common import *

@check("It waits for ever; its child has a session of its own, and its grandchild no parent")
def waits():
    child = subprocess.Popen(["sh", "-c", "sleep 1001 & echo $!; exec sleep 1000"], start_new_session=True, stdout=subprocess.PIPE, text=True)
    orphan = subprocess.run(["sh", "-c", "sleep 1002 >&2 & echo $!"], stdout=subprocess.PIPE, text=True).stdout
    Path({str(pids)!r}).write_text(f"{{os.getpid()}} {{child.pid}} {{child.stdout.readline()}} {{orphan}}")
    child.wait()
""")
    known = {"hanging": SimpleNamespace(path=directory / "hanging.py")}
    # The log of that step has a line of a failure, which is not one of this check.
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
        [ended] = perform([Step("hanging", "wait")], known, [], False, limit=20)
    expect("it fails", ended.failed == 1, ended.failed)
    text = ended.log.read_text()
    is_named = "FAIL hanging has not ended" in text and all(f"sleep {number}" in text for number in (1000, 1001, 1002))
    expect("its log says so, and names what waits", is_named, "" if is_named else text[-500:])
    # On a busy machine a process takes a moment to die. One that nobody has waited for is a zombie, and has no arguments.
    begun = pids.read_text().split()
    left = lambda: subprocess.run(["ps", "-o", "args=", "-p", ",".join(begun)], capture_output=True, text=True).stdout
    is_left = lambda: "sleep 100" in left() or "hanging.py" in left()
    expect("none of its processes is left", wait_until(lambda: not is_left(), 10), left())


@check("The report of a failed step has the details of what failed, and nothing of what passed")
def report(directory):
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "log"
    log.write_text("ok   first\npassed with\nFAIL second: status 1\nthe reason\nok   third\nmore of the third\n2 passed, 1 failed\n")
    said = failures(log)
    expect("the failure and its detail", said == ["FAIL second: status 1", "  the reason"], said)
