"""The first tier: all tests of the workspace."""

from cargo import *


@check("clippy has no warning in any target, and cargo test --workspace passes")
def workspace():
    binaries()
    # --no-fail-fast: one failed program does not hide the others.
    counted("cargo", "test", "--workspace", "--no-fail-fast", cwd=ROOT)
