"""Formats and lints of Rust and of the contract."""

from common import *


@check("cargo fmt finds nothing to change")
def format():
    counted("cargo", "fmt", "--all", "--check", cwd=ROOT)


@check("buf lint accepts the contract")
def proto():
    counted("buf", "lint", "proto", cwd=ROOT)


@check("clippy has no warning in any target")
def clippy():
    # The other builds lack these features.
    counted("cargo", "clippy", "--workspace", "--all-targets", "--features",
            "wald-server/otlp,wald-server/zstd,wald-server/object,walctl/object", "--", "-D", "warnings", cwd=ROOT)


@check("The fuzz targets compile, with the locked versions")
def fuzz_targets():
    for crate in "storage", "server":
        # The profile of the workspace, as far as it affects libraries.
        counted("cargo", "check", "--locked", "--bins", "--manifest-path", f"{crate}/fuzz/Cargo.toml", "--target-dir", TARGET,
                cwd=ROOT, env={"CARGO_PROFILE_DEV_DEBUG": "line-tables-only", **os.environ})
