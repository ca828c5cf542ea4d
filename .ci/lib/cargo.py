"""Shared parts of the checks that cargo builds."""

from common import *

# Messages of the build of all tests: the path of each test binary.
TESTS = SCRATCH / "tests.json"


def linted(*command):
    """Builds by a command of cargo, and states that neither the compiler nor clippy has a warning. Returns the messages of
    cargo, as text. In .ci/run, clippy's driver is the compiler of the workspace."""
    done = subprocess.run([*command, "--message-format", "json"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    said = [message["message"]["rendered"] for message in parsed(done.stdout) if message["reason"] == "compiler-message"]
    if not expect(f"{' '.join(command)}: it builds, and clippy has no warning", done.returncode == 0 and not said):
        print("\n".join(said), flush=True)
    done.check_returncode()
    return done.stdout


def parsed(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def made(messages, test=True):
    """The programs of a build by the name of their target: those with tests, or the others."""
    return {m["target"]["name"]: m["executable"] for m in messages if m.get("executable") and m["profile"]["test"] == test}


def binaries():
    """The test binaries of the workspace, by the name of their target. Builds them unless this run has done so."""
    if not TESTS.exists():
        TESTS.write_text(linted("cargo", "test", "--workspace", "--no-run"))
    return made(parsed(TESTS.read_text()))


def tested(folder, name, *arguments, **environment):
    """Runs a test binary in the folder of its package, without cargo, whose lock a build may hold. Variables that the
    caller of .ci/run has set, such as WALD_SEED, come first."""
    return counted(binaries()[name], *arguments, cwd=ROOT / folder, env={**environment, **os.environ})


__all__ = [name for name in dir() if not name.startswith("_")]
