"""Builds the binaries that the other checks run."""

from clients import *


@check("The daemon and walctl, as `cargo run --release` builds them with --all, and the load programs")
def release():
    # The daemon with its own features: with the workspace as a whole, libraries get other ones. Each program takes half
    # a minute to link. The tests' build has the other examples, whose speed does not matter.
    counted("cargo", "build", "--release", cwd=ROOT)
    examples = [word for name in ("load", "forest", "reading") for word in ("--example", name)]
    counted("cargo", "build", "--release", "-p", "wald-client", "-p", "walctl", "-p", "walbench", "--bins", *examples, cwd=ROOT)


@check("The static binaries, as deploy/Dockerfile builds them")
def static():
    counted("cargo", "build", "--release", "--locked", "--target", f"{os.uname().machine}-unknown-linux-musl",
            "-p", "wald-server", "-p", "walctl", "--bins", "--features",
            "wald-server/otlp,wald-server/zstd,wald-server/object,walctl/object", cwd=ROOT)


@check("The runners of the clients for Go, Python and TypeScript; the tests' build has Rust's")
def clients():
    os.environ.pop("CI_BUILT", None)
    for language in BUILDERS.keys() - {"rust"}:
        expect(f"the runner of {language} is built", runner(language))
