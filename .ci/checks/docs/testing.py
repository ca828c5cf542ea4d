"""The table of all checks in docs/src/testing.md."""

from common import *
from runner import files, missing, when

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
