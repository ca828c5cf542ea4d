"""Runs every example of every README and of docs/ in reading order on one store, as a reader would. The
quickstart's session comes first. The code of docs/ is quoted from programs that are run. The script fails for a fenced
block that no part runs, unless this file names the step that runs it. A new block fails, too, until it is run.
"""

import atexit
import contextlib
import functools
import random

from certificates import *
from clients import *
from typed import blocks

WORK = SCRATCH / "examples"
QUICKSTART = "docs/src/quickstart.md"
# Programs that checks run, by language; docs/ quotes them. READMEs of Python and TypeScript are run directly.
QUOTED = {
    "rust": ["client/examples/*.rs", "client/tests/client/administration.rs"],
    "go": ["client/go/example_test.go", "client/go/examples/*/main.go", "client/go/examples/*/*_test.go"],
    "python": ["client/python/README.md", "client/python/examples/*.py"],
    "ts": ["client/typescript/README.md", "client/typescript/examples/*.ts"],
    "java": ["client/java/src/test/java/dev/wald/examples/*.java"],
}
# Build directory of users' Rust programs.
PROGRAMS = WORK / "rust" / "target"
# Their debug information is that of the workspace, whose libraries they share.
DEBUG = os.environ.get("CARGO_PROFILE_DEV_DEBUG", "line-tables-only")
# The SDK that the example of a trace needs.
TRACING = "opentelemetry-sdk==1.45.2"
# Blocks that other checks run: file, text in the block, check.
ELSEWHERE = [
    ("README.md", "$ ", "docs/readme"),
    ("README.md", "cargo run --release", "docs/start, rust/tests"),
    ("docs/src/quickstart.md", "$ ", "docs/readme"),
    ("docs/src/quickstart.md", "cargo install", "this check, which runs the same lines of README.md"),
    ("docs/src/quickstart.md", "tar -xzf wald-", "deploy/release:programs"),
    ("docs/src/quickstart.md", "sudo apt install", "deploy/release:debian"),
    ("docs/src/quickstart.md", "skopeo copy", "nothing has skopeo and an engine (deploy/release:image runs the image)"),
    ("docs/src/quickstart.md", "helm install", "deploy/install"),
    ("docs/src/languages.md", "$ ", "docs/readme"),
    ("docs/src/http.md", "$ ", "docs/readme"),
    ("docs/src/upgrade.md", "$ ", "docs/readme"),
    ("docs/src/upgrade.md", "helm upgrade", "deploy/install"),
    ("docs/src/http.md", "EventSource", "clients/http_api:browser"),
    ("docs/src/http.md", "follow()", "clients/http_api:curl"),
    ("docs/src/csharp.md", "", "nothing: no .NET SDK is in reach (the generator for C# has made the names of messages)"),
    ("docs/src/http.md", "[sinks.wald]", "nothing: no registry in reach has Vector (clients/http_api:shippers sends its requests)"),
    ("docs/src/http.md", "json_lines", "nothing: no registry in reach has Fluent Bit (clients/http_api:shippers sends its requests)"),
    ("docs/src/restore.md", "$ ", "docs/readme"),
    ("docs/src/security.md", "$ ", "docs/readme"),
    ("docs/src/test-kit.md", "wald --ephemeral", "clients/testkit"),
    ("docs/src/encryption.md", "wald key new --to", "rust/tests"),
    ("docs/src/encryption.md", "--shred", "rust/tests"),
    ("docs/src/encryption.md", "--key-ring", "rust/tests"),
    ("docs/src/restore.md", "wald verify /backups/wald", "disk/backup"),
    ("docs/src/restore.md", "s3://", "disk/bucket"),
    ("server/README.md", "--bucket-url s3://", "durability/replica"),
    ("docs/src/operations.md", "$ wald verify /var/lib/wald", "disk/verify"),
    ("docs/src/operations.md", "systemd-run", "nothing: it needs systemd as process 1"),
    ("client/bench/README.md", "$ walbench append", "bench/bench"),
    ("client/walctl/README.md", "$ ", "docs/readme"),
    ("client/typescript/bench/README.md", "node dist/bench.js", "bench/languages, by hand"),
    ("client/conformance/README.md", "-- RUNNER...", "clients/conformance"),
    ("client/java/README.md", "dev.wald.conformance.Runner", "clients/conformance"),
    ("storage/reader/README.md", "$ pip install", "disk/reader"),
    ("docs/src/release.md", "deploy/release --out", "deploy/release"),
    ("docs/src/release.md", "ssh-keygen -Y verify", "deploy/release:digests"),
    ("docs/src/release.md", "helm install", "deploy/release and deploy/install"),
    ("docs/src/release.md", "npm install", "deploy/release"),
    ("docs/src/release.md", "crates/*.crate", "deploy/release:rust_crates"),
    ("docs/src/release.md", "[patch.crates-io]", "deploy/release:rust_crates"),
    ("docs/src/migration.md", "async def kafka(", "nothing: no check starts a broker. It was run once by hand with Kafka 4.0.0; :migration runs the copy with a file"),
    ("docs/src/migration.md", "async def nats(", "nothing: no check starts a server. It was run once by hand with NATS 2.15.2; :migration runs the copy with a file"),
    ("docs/src/migration.md", "async def kurrent(", "nothing: no server of KurrentDB is in reach; :migration runs the copy with a file"),
    ("client/README.md", "walctl context add", "rust/tests (client/walctl/tests/walctl/contexts.rs)"),
    ("docs/src/security.md", "[jwt.k8s]", "rust/tests (server/tests/daemon/auth/jwt.rs)"),
    ("docs/src/security.md", "serviceAccountToken", "deploy/chart, which renders the same volume"),
    ("deploy/helm/wald/README.md", "name: wald-offline", "deploy/install, whose API takes it"),
    ("deploy/helm/wald/README.md", "[tenant.shop]", "rust/tests (server/tests/daemon/auth/limits.rs)"),
    ("deploy/helm/wald/README.md", "kind: Certificate", "nothing: it needs cert-manager (server/tests/daemon/tls/principals.rs has such a certificate)"),
    ("deploy/helm/wald/README.md", "[jwt.k8s]", "rust/tests (server/tests/daemon/auth/jwt.rs)"),
]
# Commands that are not run, and the reason. The rest of their block is.
SKIPPED = {
    r"docker compose ": "needs a container engine and a registry; deploy/chart checks the file",
    r"docker ": "needs a container engine and a registry; deploy/image builds and runs the image",
    r"rustup target add ": "setup/tools does it",
    r"cargo build --release --target ": "setup/builds does it",
    r"(sudo|journalctl|systemctl) ": "needs systemd as process 1; deploy/chart checks the unit",
    r"helm test ": "needs a cluster; deploy/install does it",
    r"wald token check ": "docs/readme does it",
    r"(helm upgrade|kubectl) ": "needs a cluster; deploy/install upgrades with a larger size",
}


class Block:
    """A fenced block of a README."""

    def __init__(self, file, language, text):
        self.file, self.language, self.text = file, language, text
        self.run = False

    def __str__(self):
        return f"{self.file}: {self.language}: {self.text.strip().splitlines()[0][:60]}"


def find_blocks():
    names = run("git", "ls-files", "*README.md", "docs/src/*.md", cwd=ROOT, check=True).stdout.decode().split()
    for name in names:
        text = (ROOT / name).read_text(encoding="utf-8")
        for found in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.M | re.S):
            yield Block(name, found[2], re.sub(f"^{found[1]}", "", found[3], flags=re.M))


def take(file, language, containing=""):
    """Returns the blocks of a file and marks them as run; at least one must exist."""
    taken = [b for b in BLOCKS if (b.file, b.language) == (file, language) and containing in b.text]
    if not taken:
        raise SystemExit(f"{file} has no block of {language} with {containing!r} any more")
    for block in taken:
        block.run = True
    return [block.text for block in taken]


def elsewhere(block):
    """The step that runs a block instead of a part of this file; None if there is none."""
    return next((step for file, text, step in ELSEWHERE if block.file == file and text in block.text), None)


def take_one(file, language, containing=""):
    (text,) = take(file, language, containing)
    return text


def environment(daemon=None, **more):
    """A user's environment: the binaries on the PATH, and a daemon."""
    if daemon is not None:
        more["WALD_ENDPOINT"] = daemon.grpc
    path = f"{SCRATCH / 'bin'}:{TARGET / 'release'}:{os.environ['PATH']}"
    return clean_environment(**{"PATH": path, "CARGO_TARGET_DIR": str(TARGET), **more})


@contextlib.contextmanager
def secured():
    """A daemon with TLS that requires client certificates, and the directory with a client's files."""
    with scratch() as directory:
        authority = Authority(directory)
        pem, key = authority.issue(Path(directory) / "server", "server")
        authority.issue(Path(directory), "client")
        (Path(directory) / "token").write_text("example\n")
        (Path(directory) / "token").chmod(0o600)
        with Daemon(f"{directory}/data", *files(pem, key), "--tls-client-auth", "require", "--tls-client-ca", authority.pem) as daemon:
            yield directory, f"https://{daemon.grpc}"


def succeeds(what, *command, prints="", daemon=None, cwd=ROOT, timeout=900, **more):
    """One check: a command ends with 0 and has printed a text; returns its standard output."""
    done = run(*command, cwd=cwd, timeout=timeout, env=environment(daemon, **more), stdin=subprocess.DEVNULL)
    out = done.stdout.decode(errors="replace")
    holds = done.returncode == 0 and prints in out
    said = "" if holds else f"status {done.returncode}\n{(out + done.stderr.decode(errors='replace'))[-3000:]}"
    expect(what, holds, said)
    return out


def shell(line, said=None, but="", **options):
    """One check: runs a line of a README. If the README has the other line `said`, `but` names the difference."""
    what = f"$ {(said or line).strip().splitlines()[0][:110]}{f'  ({but})' if but else ''}"
    return succeeds(what, "bash", "-euo", "pipefail", "-c", line, **options)


def endless(line, shows, daemon, cwd):
    """One check: a command that follows shows a text, and Ctrl-C ends it."""
    # In the background Ctrl-C is ignored, also by child processes.
    process = subprocess.Popen(["bash", "-c", f"exec {line}"], cwd=cwd, env=environment(daemon), text=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    deadline = threading.Timer(60, process.kill)
    deadline.start()
    said = []
    for text in process.stdout:
        said.append(text)
        if shows in text:
            break
    shown = said and shows in said[-1]
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    status = process.wait()
    deadline.cancel()
    expect(f"$ {line.splitlines()[0][:110]}", shown and status != -signal.SIGKILL, "" if shown else "".join(said)[-2000:])


def lines_of(block):
    """The commands of a shell block, without comments and skipped commands."""
    for line in block.replace("\\\n", " ").splitlines():
        line = re.sub(r"\s+#.*", "", line)
        wanted = []
        for part in line.split(" && "):
            why = next((why for pattern, why in SKIPPED.items() if re.match(pattern, part)), None)
            if why is None:
                wanted.append(part)
            else:
                print(f"skip $ {part[:80]}: {why}", flush=True)
        if wanted:
            yield " && ".join(wanted)


def program(language):
    """An empty folder for a user's program, with the checkout next to it as ../wald."""
    folder = WORK / language / "program"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    checkout = folder.parent / "wald"
    checkout.unlink(missing_ok=True)
    checkout.symlink_to(ROOT)
    return folder


def bare(code):
    """Code without the parts that rustfmt decides."""
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s+", "", code))


def with_harness(line, debug="target/debug", release="../../target/release", **options):
    """A line of a README that builds or runs a runner of the conformance cases."""
    made = line.replace("harness.py --wald", "harness.py --only append-then-read --wald")
    but = "one case; clients/conformance has them all" if made != line else ""
    made = made.replace(f" {release}", f" {TARGET / 'release'}").replace(f" {debug}", f" {TARGET / 'debug'}")
    return shell(made, said=line, but=but, **options)


STORE = []


@contextlib.contextmanager
def the_store():
    """The one store of all examples, with a directory of this part. The quickstart was typed there first."""
    if not STORE:
        directory = Path(HOLD.enter_context(scratch()))
        STORE.append(HOLD.enter_context(Daemon(f"{directory}/data")))
        session(directory, STORE[0])
    with scratch() as directory:
        yield directory, STORE[0]


def session(directory, daemon):
    """Types the quickstart. docs/readme compares its answers; here its logs are needed."""
    (directory / "package").symlink_to(vega_file("flights-200k.json").parent.parent)
    for _, steps in blocks((ROOT / QUICKSTART).read_text()):
        for command, _ in steps:
            if not command.startswith(("npm ", "tar ")):
                line = command.replace("127.0.0.1:6925", daemon.grpc)
                run("bash", "-c", line, cwd=directory, env=environment(daemon), stdin=subprocess.DEVNULL)
    logs = run(WALCTL, "logs", "--output", "raw", env=environment(daemon)).stdout.decode().split()
    expected = {"greetings", "orders", "audit", "jobs", "flights"}
    expect("the quickstart has made its logs", expected <= set(logs), expected - set(logs) or len(logs))


@check("The examples of the Rust client run")
@functools.cache
def rust():
    readme = "client/README.md"
    tour = (ROOT / "client/examples/tour.rs").read_text()
    others = bare((ROOT / "client/examples/readme.rs").read_text())
    first, *rest = take(readme, "rust")
    expect("the first Rust example is client/examples/tour.rs", bare(tour).endswith(bare(first)))
    for block in rest:
        expect(f"client/examples/readme.rs has the Rust example that begins {block.splitlines()[0]}", bare(block) in others)
    examples()

    def example(name, **options):
        """`cargo run` of one; without --all as it was built with the workspace, where libraries have other features."""
        alone = ["cargo", "run", "--quiet", "-p", "wald-client", "--example", name]
        return succeeds(" ".join(alone), *sized(alone, [EXAMPLES / name]), timeout=300, **options)

    with the_store() as (directory, daemon):
        example("tour", daemon=daemon, prints=' b"third"\n')
        out = example("readme", daemon=daemon)
        for name in ("producer", "producer over restarts", "follower over restarts", "appender", "follower", "cursor", "errors", "tls"):
            expect(f"the Rust example of the {name} does what it says", f"ok {name}\n" in out)

        # A separate program, with the tested versions.
        folder = program("rust")
        (folder / "src").mkdir()
        (folder / "src/main.rs").write_text(first)
        (folder / "Cargo.toml").write_text('[package]\nname = "program"\nversion = "1.0.0"\nedition = "2024"\n[workspace]\n')
        shutil.copy2(ROOT / "Cargo.lock", folder)
        for line in lines_of(take_one(readme, "sh", "cargo add")):
            shell(line, cwd=folder)
        # It is client/examples/tour.rs, which has run above. Its libraries have other features, and compile once more.
        if not os.environ.get("CI_LIGHT"):
            lend_libraries(PROGRAMS)
            succeeds("the first Rust example builds and runs as a program of its own", "cargo", "run", "--quiet", cwd=folder,
                     daemon=daemon, CARGO_TARGET_DIR=str(PROGRAMS), CARGO_PROFILE_DEV_DEBUG=DEBUG,
                     prints="records, the tail is ")
    for line in lines_of(take_one(readme, "sh", "cargo build")):
        if "cargo build" not in line:
            with_harness(line)
        elif os.environ.get("CI_LIGHT"):
            made = [TARGET / "debug" / "wald", EXAMPLES / "conformance"]
            expect(f"$ {line}  (built with the workspace)", all(path.exists() for path in made))
        else:
            shell(line)


@check("The examples of the Go client run")
@functools.cache
def go():
    folder = ROOT / FOLDERS["go"]
    readme = "client/go/README.md"
    shell(take_one(readme, "sh", "cd client/go"))
    # A test of the package compares them with the commands below.
    blocks = take(readme, "go")
    with the_store() as (directory, daemon):
        for line in lines_of(take_one(readme, "sh", "go vet")):
            line = line.replace("go test -tags", "go test -v -count=1 -tags")
            out = with_harness(line, cwd=folder, daemon=daemon,
                               prints=": greeting 0\n" if line.startswith("go run") else "")
            if "-tags daemon -run" in line:
                ran = re.findall(r"^--- PASS: (Example\w*)", out, re.M)
                there = re.findall(r"^func (Example\w*)", (folder / "example_test.go").read_text(), re.M)
                expect(f"the Go examples are run, {len(blocks)} blocks", ran and ran == there, ran)
        own = program("go")
        shutil.copy2(folder / "examples/tour/main.go", own)
        succeeds("go mod init", "go", "mod", "init", "example.org/program", cwd=own)
        for line in lines_of(take_one(readme, "sh", "go mod edit")):
            shell(line, cwd=own)
        succeeds("the first Go example runs as a program of its own", "go", "run", ".", cwd=own, daemon=daemon,
                 prints=": greeting 2\n")


@check("The examples of the Python client run")
@functools.cache
def python():
    folder = ROOT / FOLDERS["python"]
    readme = "client/python/README.md"
    expect("the README installs ./client/python", take_one(readme, "sh").strip() == "pip install ./client/python")
    # The environment of step conformance; the package is installed into it again.
    interpreter = Path(runner("python")[0])
    succeeds("pytest client/python", interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder, prints=" passed")
    with the_store() as (directory, daemon), secured() as (files_of_client, https):
        for block in take(readme, "python"):
            # From an empty directory, so that only the installed package is imported.
            name = next(line for line in block.splitlines() if "readme/" in line).strip()
            where = {"cwd": files_of_client, "WALD_ENDPOINT": https} if "tls_ca=" in block else {"cwd": directory, "daemon": daemon}
            out = succeeds(f"Python example with {name[:80]}", interpreter, "-W", "error", "-c", block, **where)
            expect("it prints something", out.strip(), out.strip()[:200])
        succeeds("a library of OpenTelemetry is installed", interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", TRACING)
        program = ROOT / FOLDERS["python"] / "examples/tracing.py"
        succeeds("tracing.py links each record to the span that sent it", interpreter, program, daemon=daemon, prints="continues trace")


@check("The examples of the TypeScript client run")
@functools.cache
def typescript():
    folder = ROOT / FOLDERS["typescript"]
    readme = "client/typescript/README.md"
    for line in lines_of(take_one(readme, "sh")):
        shell(line, cwd=folder)
    examples = take(readme, "ts")
    with the_store() as (directory, daemon):
        out = succeeds("npm run readme", "npm", "run", "readme", cwd=folder, daemon=daemon)
        for number, block in enumerate(examples, 1):
            name = next(line for line in block.splitlines() if line and not line.startswith(("import", "//")))
            expect(f"TypeScript example {number}: {name[:80]}", f"ok example {number}\n" in out)
        own = program("typescript")
        (own / "package.json").write_text('{"type": "module"}')
        (own / "program.js").write_text(examples[0])
        line = "npm install ../wald/client/typescript"
        expect("the README says how a program depends on the package", f"`{line}`" in (ROOT / readme).read_text())
        shell(line, cwd=own)
        succeeds("the first TypeScript example runs as a program of its own", "node", "program.js", cwd=own,
                 daemon=daemon, prints="DURABLE")


@check("The Java example of the contract runs")
@functools.cache
def java():
    readme = "client/README.md"
    folder = WORK / "java"
    shutil.rmtree(folder / "src", ignore_errors=True)
    (folder / "src/main/java").mkdir(parents=True)
    shutil.copytree(ROOT / "proto/wald", folder / "src/main/proto/wald")
    (folder / "pom.xml").write_text(take_one(readme, "xml"))
    (folder / "src/main/java/Orders.java").write_text(take_one(readme, "java"))
    command = 'mvn compile exec:java -Dexec.mainClass=Orders -Dexec.args="127.0.0.1:6925 3"'
    text = re.sub(r"\s+", " ", (ROOT / readme).read_text())
    expect("the README says how the Java example is run", f"`{command}`" in text)
    with the_store() as (directory, daemon):
        line = command.replace("127.0.0.1:6925", daemon.grpc).replace("mvn", "mvn -q -B")
        out = shell(line, said=command, cwd=folder)
        expected = ["appended 0 to 0", "appended 1 to 2", "0 one", "1 two", "2 three"]
        # Maven sets the terminal's colours even without a terminal.
        shown = re.sub(r"\x1b\[[0-9;]*m", "", out).strip().splitlines()
        expect("the Java example appends and follows", shown == expected, shown if shown != expected else "")


@check("The examples of the Java client run")
@functools.cache
def java_client():
    folder = ROOT / FOLDERS["java"]
    readme = "client/java/README.md"
    # A test of the package compares the blocks with the sources of the programs below.
    blocks = take(readme, "java")
    for line in lines_of(take_one(readme, "sh", "mvn")):
        shell(line, cwd=folder)
    classes = ":".join(str(folder / "target" / part) for part in ("test-classes", "classes", "lib/*"))
    with the_store() as (directory, daemon):
        out = succeeds("the Java examples", "java", "-cp", classes, "dev.wald.examples.Readme", daemon=daemon, cwd=directory)
        for name in ("records", "conditions", "batches", "producers", "sessions", "followers", "durable", "administration", "tls", "settings",
                     "errors"):
            expect(f"the Java example of {name} does what it says", f"ok {name}\n" in out)
        own = program("java")
        (own / "src/main/java").mkdir(parents=True)
        (own / "src/main/java/Tour.java").write_text(blocks[0])
        (own / "pom.xml").write_text(f"""<project>
            <modelVersion>4.0.0</modelVersion><groupId>example</groupId><artifactId>program</artifactId><version>1</version>
            <properties><maven.compiler.source>17</maven.compiler.source><maven.compiler.target>17</maven.compiler.target></properties>
            <dependencies>{take_one(readme, "xml")}</dependencies></project>""")
        succeeds("the first Java example runs as a program of its own", "mvn", "-q", "-B", "compile", "exec:java", "-Dexec.mainClass=Tour",
                 cwd=own, daemon=daemon, prints=": greeting 2\n")


def walctl_examples(directory, daemon):
    """The commands of client/README.md, which does not show their output."""
    home = Path(directory) / "home"
    (home / ".local/share/bash-completion/completions").mkdir(parents=True)
    for name in ("flights-200k.json", "flights-20k.json"):
        shutil.copy2(vega_file(name), home)
    for line in take_one("client/README.md", "console", "flights-200k.json").splitlines():
        line = line.removeprefix("$ ")
        if line.startswith("walctl tail "):
            endless(line, "new", daemon, home)
        else:
            # Backups of another store must not be there, and none may stay.
            shell(line.replace("/backups/", f"{home}/backups/"), said=line, cwd=home, daemon=daemon, HOME=str(home))
    with scratch() as copy, Daemon(f"{copy}/data") as other:
        line = take_one("client/README.md", "sh", "--output delimited").strip()
        shell(line.replace("OTHER", other.grpc), said=line, cwd=home, daemon=daemon)
        contents = []
        for each in (daemon, other):
            names = run(WALCTL, "logs", "--limit", "0", "--output", "raw", env=environment(each)).stdout.decode().splitlines()
            contents.append({name: run(WALCTL, "read", name, "--last", "100", "--output", "jsonl", env=environment(each)).stdout
                             for name in names})
        kept = {name: records for name, records in contents[0].items() if records}
        expect("the copy of all logs on another server has their newest records", contents[1] == kept, f"{len(kept)} logs")
    completions = home / ".local/share/bash-completion/completions/walctl"
    expect("the completions are a script", run("bash", "-n", completions).returncode == 0 and completions.stat().st_size > 0)


def helm_line(line, values=None):
    """Renders the chart of a line; deploy/install shows that it can be installed."""
    made = line.replace("helm install", "helm template").replace(" --wait", "")
    more = "" if values is None else f" --values {values}"
    shell(made + more, said=line + more, but="rendered; step install installs", prints="kind: StatefulSet")


@check("The shell commands of the READMEs run")
@functools.cache
def shells():
    with the_store() as (directory, daemon):
        walctl_examples(directory, daemon)
        # Of the logs that begin with ord, orders exists.
        endless(take_one(QUICKSTART, "sh", "grpcurl").replace("127.0.0.1:6925", daemon.grpc).strip(), '"orders"', daemon, directory)
    for line in lines_of(take_one("README.md", "sh", "cargo install")):
        # `cargo build --release` has built the server like this. walctl alone has other features: it builds without the
        # optimiser, which would only cost minutes, and where a program that uses the client was built.
        name, how, more = ("wald", "", {}) if "--path server" in line else ("walctl", "--debug", {"CARGO_TARGET_DIR": str(PROGRAMS)})
        if name == "walctl" and os.environ.get("CI_LIGHT"):
            expect(f"$ {line}  (built with the workspace)", (TARGET / "release" / name).exists())
            continue
        shell(f"{line} {how} --quiet --force --root {WORK / 'installed'}", said=line, but=how, timeout=1800, **more)
        succeeds(f"the installed {name} runs", WORK / "installed/bin" / name, "--version", prints=f"{name} ")
    # SKIPPED says why none of these is run.
    for containing in ("helm upgrade", "kubectl"):
        for block in take("deploy/helm/wald/README.md", "sh", containing):
            list(lines_of(block))
    for block in [*take("README.md", "sh", "helm"), *take("deploy/helm/wald/README.md", "sh", "helm install")]:
        for line in lines_of(block):
            helm_line(line)
    values = WORK / "values.yaml"
    for containing in ("segment_bytes", "audit_log", "networkPolicy", "replica:"):
        for text in take("deploy/helm/wald/README.md", "yaml", containing):
            values.write_text(text)
            helm_line("helm install wald deploy/helm/wald", values)
    for block in take("deploy/README.md", "sh"):
        for line in lines_of(block):
            # The lines that are not skipped: commands for an installed daemon.
            with scratch() as directory, Daemon(f"{directory}/data") as daemon:
                shell(line, daemon=daemon)
    sketch = take_one("client/conformance/README.md", "json")
    expect("the form of the conformance cases is JSON", json.loads(sketch.replace("[ ... ]", "[]"))["cases"])


# Kills of the copy, and records of its source for each: more than a life of 0.8 s copies, so that the last kill finds work.
KILLS, RECORDS = sized(20, 3), 30_000


def old_records(count, dice):
    """Records of a system whose offsets have holes and whose times go back: offset, key, value, time."""
    offset = 0
    for number in range(count):
        offset += dice.choice((1, 1, 1, 1, 7))
        value = dice.choice((None, "v" * dice.randrange(300)))
        yield offset, dice.choice((None, f"key{number % 7}")), value, 1_700_000_000_000_000 + 1000 * number - dice.randrange(5000)


@check("The copy of docs/src/migration.md has each record once after kills, and finds differences")
@functools.cache
def migration():
    program = ROOT / "client/python/examples/migrate.py"
    interpreter = Path(runner("python")[0])
    copy, compare, cursor = take_one("docs/src/migration.md", "sh", "migrate.py copy").strip().splitlines()
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    records = list(old_records(KILLS * RECORDS, dice))
    with scratch() as directory, Daemon(f"{directory}/data") as daemon:
        source = Path(directory) / "orders-0.jsonl"
        names = "offset", "key", "value", "timestamp_us"
        source.write_text("".join(json.dumps(dict(zip(names, record))) + "\n" for record in records))
        line = lambda text: text.replace("python migrate.py", f"{interpreter} -W error {program}")
        killed = 0
        while killed < KILLS:
            process = subprocess.Popen(["bash", "-c", f"exec {line(copy)}"], cwd=directory, env=environment(daemon), stdin=subprocess.DEVNULL)
            try:
                process.wait(dice.uniform(0.05, 0.8))
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                killed += 1
        expect(f"it is killed {KILLS} times before its end", killed == KILLS, killed)
        here = {"daemon": daemon, "cwd": directory}
        shell(line(copy), said=copy, **here)
        last = records[-1][0]
        shell(line(compare), said=compare, prints=f"{len(records)} records are equal; the next offset is {last + 1}\n", **here)
        # Not by the code that copied.
        text = run(WALCTL, "scan", "orders/0", "--output", "json", env=environment(daemon)).stdout.decode()
        found = []
        for record in map(json.loads, text.splitlines()):
            headers = {header["key"]: header["value"] for header in record["headers"]}
            found.append((int(headers["offset"]), headers.get("key"), None if "deleted" in headers else record["text"]))
        wanted = [record[:3] for record in records]
        expect("the log has each record once and in order", found == wanted, len(found) if found != wanted else "")
        lsn = next(lsn for lsn, record in enumerate(records) if record[0] >= 1000)
        shell(line(cursor), said=cursor, prints=f"is at lsn {lsn}\n", **here)

        def refused(title, text):
            done = run("bash", "-c", line(text), cwd=directory, env=environment(daemon))
            expect(title, done.returncode == 1, done.stderr.decode()[-200:].strip())

        refused("a copy with another state is refused", copy.replace("orders-0.state", "other.state"))
        lines = source.read_text().splitlines(keepends=True)
        middle = len(lines) // 2
        source.write_text("".join(lines[:middle] + lines[middle + 1:]))
        refused("a record that the old system does not have is found", compare)


@check("The code of docs/ is quoted from programs that run")
@functools.cache
def book():
    for language, patterns in QUOTED.items():
        sources = [bare(path.read_text()) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
        quotes = [block for block in BLOCKS if block.language == language and block.file.startswith("docs/src/") and not elsewhere(block)]
        expect(f"docs/ has examples in {language}", quotes)
        for block in quotes:
            block.run = True
            expect(f"{block} is quoted from a program that is run", any(bare(block.text) in source for source in sources))


HOLD = contextlib.ExitStack()
atexit.register(HOLD.close)
WORK.mkdir(parents=True, exist_ok=True)
BLOCKS = list(find_blocks())


@check("No code block of a README or of docs/ is left out")
def every_block():
    for part in (rust, go, python, typescript, java, java_client, shells, migration, book):
        part()
    for block in BLOCKS:
        step = elsewhere(block)
        # Blocks of text are pictures.
        if not block.run and block.language != "text" and not expect(f"{block} is run", step is not None):
            continue
        if not block.run and step:
            print(f"     by step {step}", flush=True)
