"""The first tier: all tests of the workspace."""

from cargo import *


@check("cargo test --workspace")
def workspace():
    counted("cargo", "test", "--workspace", cwd=ROOT)
    binaries()
