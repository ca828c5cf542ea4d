"""Builds and runs the program in .ci/checks/durability/history against a daemon that can be killed."""

import sys

from common import *

sys.path.insert(0, str(ROOT / "client" / "conformance"))
import harness

PROGRAM = ROOT / ".ci" / "checks" / "durability" / "history"


def run_program(usage, mode, seconds):
    """Runs one mode of the program, for at most `seconds`, and ends the script with its status."""
    if "-h" in sys.argv[1:] or "--help" in sys.argv[1:]:
        print(usage.strip())
        sys.exit(0)
    binary = SCRATCH / "history"
    SCRATCH.mkdir(parents=True, exist_ok=True)
    # The stubs are generated, not committed.
    subprocess.run(["go", "generate", "./..."], cwd=ROOT / "client" / "go", check=True)
    subprocess.run(["go", "build", "-o", binary, "."], cwd=PROGRAM, check=True)
    with scratch() as directory, harness.Served(WALD, directory) as served:
        program = subprocess.Popen([binary, mode, *sys.argv[1:]], stdin=subprocess.DEVNULL,
                                   env=clean_environment(**served.environment()))
        try:
            status = program.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            print(f"FAIL it takes longer than {seconds} s\n0 passed, 1 failed")
            status = 1
        finally:
            program.kill()
            program.wait()
        if served.control.trouble:
            print(f"the control endpoint failed: {served.control.trouble}")
            status = 1
    sys.exit(status)
