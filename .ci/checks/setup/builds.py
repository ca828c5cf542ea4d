"""Builds the binaries that the other checks run."""

from buckets import OPTIMISED, build_programs
from clients import *


@check("The daemon and walctl, as `cargo run --release` builds them with --all, and the load programs")
def release():
    # The daemon as a newcomer builds it. The second command names it too, so that its libraries have the same features
    # and are not built again. The tests' build has the client's examples, whose speed does not matter.
    counted("cargo", "build", "--release", cwd=ROOT)
    counted("cargo", "build", "--release", "-p", "wald-server", "-p", "walctl", "-p", "walbench", "--bins", cwd=ROOT)


@check("The static binaries, as deploy/Dockerfile builds them")
def static():
    counted("cargo", "build", "--release", "--locked", "--target", f"{os.uname().machine}-unknown-linux-musl",
            "-p", "wald-server", "-p", "walctl", "--bins", "--features",
            "wald-server/otlp,wald-server/zstd,wald-server/object,walctl/object", cwd=ROOT)


@check("The daemon and walctl with object stores, and their tests; clippy has no warning")
def buckets():
    build_programs()


@check("The daemon with object stores and a program that times PUTs, for bench/replica")
def object_stores():
    counted(*OPTIMISED, cwd=ROOT)


@check("The runners of the clients for Go, Python, TypeScript and Java; the tests' build has Rust's")
def clients():
    os.environ.pop("CI_BUILT", None)
    for language in BUILDERS.keys() - {"rust"}:
        expect(f"the runner of {language} is built", runner(language))
