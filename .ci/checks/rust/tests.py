"""The first tier: all tests of the workspace."""

from cargo import *


@check("All tests of the workspace build, and clippy has no warning in any target")
def build():
    binaries()


@check("cargo test --workspace")
def workspace():
    counted("cargo", "test", "--workspace", cwd=ROOT)
