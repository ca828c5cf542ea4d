"""Formats and lints of Rust and of the contract."""

from common import *


@check("cargo fmt finds nothing to change")
def format():
    counted("cargo", "fmt", "--all", "--check", cwd=ROOT)


@check("buf lint accepts the contract")
def proto():
    counted("buf", "lint", "proto", cwd=ROOT)


@check("buf breaking finds no change of the contract that breaks a client of an earlier commit")
def compatible(directory):
    # The contract before this check existed. A release takes its place.
    old = Path(directory) / "old"
    old.mkdir()
    commit = "6deeef5f"
    packed = subprocess.run(["git", "archive", commit, "proto"], cwd=ROOT, stdout=subprocess.PIPE)
    if expect(f"the clone has the commit {commit}", packed.returncode == 0):
        run("tar", "-x", "-C", old, input=packed.stdout, check=True)
        counted("buf", "breaking", "proto", "--against", old / "proto", cwd=ROOT)


@check("The fuzz targets compile, with the locked versions")
def fuzz_targets():
    for crate in "storage", "server":
        # The profile of the workspace, as far as it affects libraries.
        counted("cargo", "check", "--locked", "--bins", "--manifest-path", f"{crate}/fuzz/Cargo.toml", "--target-dir", TARGET,
                cwd=ROOT, env={"CARGO_PROFILE_DEV_DEBUG": "line-tables-only", **os.environ})
