"""Builds the conformance runner of each client of Wald.

It builds from any copy of the repository, so that a fault can be planted in one.
"""

from common import *

sys.path.insert(0, str(ROOT / "client" / "conformance"))
import harness

# Where each language's package is.
FOLDERS = {"rust": "client", "go": "client/go", "python": "client/python", "typescript": "client/typescript", "java": "client/java"}

# Made by the programs that measure a client.
BENCH_CLIENTS = SCRATCH / "bench-clients"


def build(*command, cwd, **more):
    """Runs one step of a build; its output is shown only if it fails."""
    done = run(*command, cwd=cwd, timeout=1800, env={**clean_environment(), **more})
    if done.returncode != 0:
        text = (done.stdout + done.stderr).decode(errors="replace")
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{text[-4000:]}")


def examples():
    """Builds the client's examples and the commands as `cargo test --workspace` does; it then builds nothing more. A run
    without the tests of the workspace has built none."""
    if not os.environ.get("CI_BUILT") or not (EXAMPLES / "conformance").exists():
        build("cargo", "build", "--workspace", "--bins", "--examples", cwd=ROOT)


def lend_libraries(target):
    """Gives a target directory the third-party libraries that the workspace built for debug builds. Cargo reuses each
    library with the right features, and compiles the rest."""
    for folder in "deps", "build", ".fingerprint":
        (target / "debug" / folder).mkdir(parents=True, exist_ok=True)
        for entry in (TARGET / "debug" / folder).glob("*-*"):
            copy = target / "debug" / folder / entry.name
            if re.match(r"(lib)?wald", entry.name) or copy.exists():
                continue
            try:
                if folder != "deps":
                    shutil.copytree(entry, copy)
                elif entry.name.startswith("lib") or entry.suffix == ".d":
                    os.link(entry, copy)
            except (FileNotFoundError, shutil.Error):
                # Another build writes there now. This folder compiles that library itself.
                shutil.rmtree(copy, ignore_errors=True)


def rust(root, made):
    if root == ROOT:
        return examples()
    # Never in the workspace's own target: cargo identifies packages by their place in the workspace, so it
    # would take the faulty ones for the workspace's packages.
    lend_libraries(made / "target")
    build("cargo", "build", "--workspace", "--example", "conformance", cwd=root, CARGO_TARGET_DIR=str(made / "target"))


def rust_appends():
    """Builds the program that makes appends through one Rust client, with optimisation."""
    build("cargo", "build", "--release", cwd=ROOT / "client/bench/appends", CARGO_TARGET_DIR=str(BENCH_CLIENTS / "rust"))
    return BENCH_CLIENTS / "rust/release/appends"


def go_stubs(root=ROOT):
    """Generates the stubs of the client for Go, which are not committed."""
    if not (root == ROOT and os.environ.get("CI_BUILT")):
        build("go", "generate", "./...", cwd=root / FOLDERS["go"])


def go(root, made):
    go_stubs(root)
    build("go", "build", "-o", made / "conformance", "./conformance", cwd=root / FOLDERS["go"])


# The oldest versions that the package accepts; pip installs the newest.
OLDEST_GRPCIO = "grpcio==1.69.0"
OLDEST_PROTOBUF = "protobuf==4.25.0", "googleapis-common-protos==1.62.0"


def python(root, made, *pinned):
    folder = root / FOLDERS["python"]
    if not (made / "venv/bin/pip").exists():
        build(sys.executable, "-m", "venv", "--clear", made / "venv", cwd=root)
    build(made / "venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade",
          f"{folder}[test]", *pinned, cwd=root)


def oldest_python():
    """The runner of Python with the oldest grpcio and protobuf."""
    made = SCRATCH / "clients" / "python-oldest"
    made.mkdir(parents=True, exist_ok=True)
    python(ROOT, made, OLDEST_GRPCIO, *OLDEST_PROTOBUF)
    return command_of("python", ROOT, made)


def typescript(root, made):
    build("npm", "ci", "--silent", "--no-audit", "--no-fund", cwd=root / FOLDERS["typescript"])


# Versions that the README of the client for TypeScript names, and the command that runs a program.
RUNTIMES = {"bun": ("1.4.5", ["run"]), "deno": ("2.9.6", ["run", "--quiet", "--allow-net", "--allow-env", "--allow-read", "--allow-write"])}


def runtime(name):
    """The command of another runtime for the client of TypeScript, installed from npm's registry."""
    version, arguments = RUNTIMES[name]
    folder = SCRATCH / "runtimes" / f"{name}-{version}"
    program = folder / "node_modules/.bin" / name
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        build("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, f"{name}@{version}", cwd=folder)
    return [str(program), *arguments]


def java(root, made):
    build("mvn", "--quiet", "--batch-mode", "-DskipTests", "package", cwd=root / FOLDERS["java"])


BUILDERS = {"rust": rust, "go": go, "python": python, "typescript": typescript, "java": java}


def command_of(language, root, made):
    """The command of a language's runner, built from `root` into `made`."""
    folder = root / FOLDERS[language]
    command = {"rust": [(EXAMPLES if root == ROOT else made / "target/debug/examples") / "conformance"],
               "go": [made / "conformance"],
               "python": [made / "venv/bin/python", folder / "conformance.py"],
               "typescript": ["node", folder / "dist/conformance/runner.js"],
               # A runner works for seconds, so it is compiled once only.
               "java": ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp",
                        ":".join(str(folder / "target" / part) for part in ("test-classes", "classes", "lib/*")),
                        "dev.wald.conformance.Runner"]}[language]
    return [str(part) for part in command]


def runner(language, root=ROOT):
    """Builds a language's runner from a copy of the repository; returns its command. In a whole run setup/builds:clients
    has built the runners of the repository."""
    made = SCRATCH / "clients" / (language if root == ROOT else f"{language}-faulty")
    made.mkdir(parents=True, exist_ok=True)
    if not (root == ROOT and os.environ.get("CI_BUILT")):
        BUILDERS[language](root, made)
    return command_of(language, root, made)


def fresh_copy(language):
    """The files of the repository, without build results, to plant a fault in. A language's copy always has the same
    path, so its dependencies need not be built again each time."""
    root = SCRATCH / "faulty" / language
    shutil.rmtree(root, ignore_errors=True)
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT, check=True).stdout
    for name in names.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    return root


__all__ = [name for name in dir() if not name.startswith("_")]
