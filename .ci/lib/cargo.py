"""Shared parts of the checks that cargo builds."""

from common import *

# Messages of the build of all tests: the path of each test binary.
TESTS = SCRATCH / "tests.json"


def binaries():
    """The test binaries of the workspace, by the name of their target. Builds them unless this run has done so."""
    if not TESTS.exists():
        out = subprocess.run(["cargo", "test", "--workspace", "--no-run", "--message-format", "json"], cwd=ROOT, check=True,
                             stdout=subprocess.PIPE, text=True).stdout
        TESTS.write_text(out)
    messages = (json.loads(line) for line in TESTS.read_text().splitlines() if line.startswith("{"))
    return {m["target"]["name"]: m["executable"] for m in messages if m.get("executable") and m["profile"]["test"]}


def tested(folder, name, *arguments, **environment):
    """Runs a test binary in the folder of its package, without cargo, whose lock a build may hold. Variables that the
    caller of .ci/run has set, such as WALD_SEED, come first."""
    return counted(binaries()[name], *arguments, cwd=ROOT / folder, env={**environment, **os.environ})


__all__ = [name for name in dir() if not name.startswith("_")]
