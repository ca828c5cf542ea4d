"""The first tier: all tests of the workspace."""

from cargo import *


@check("cargo test --workspace passes")
def workspace():
    # --no-fail-fast: one failed program does not hide the others.
    counted("cargo", "test", "--workspace", "--no-fail-fast", cwd=ROOT)
