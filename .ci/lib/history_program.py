"""Builds and runs the program in .ci/checks/durability/history against a daemon that can be killed."""

from clients import *

PROGRAM = ROOT / ".ci" / "checks" / "durability" / "history"


def run_program(mode, flags, seconds):
    """Runs one mode of the program, for at most `seconds`. The arguments of the script take the place of the flags."""
    binary = SCRATCH / "history"
    go_stubs()
    subprocess.run(["go", "build", "-o", binary, "."], cwd=PROGRAM, check=True)
    with scratch() as directory, harness.Served(WALD, directory) as served:
        counted("timeout", seconds, binary, mode, *(sys.argv[1:] or flags), env=clean_environment(**served.environment()))
        if served.control.trouble:
            expect("the control endpoint works", False, served.control.trouble)
