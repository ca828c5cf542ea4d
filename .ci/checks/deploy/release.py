"""What `deploy/release` makes, used as its users do: an empty project in each language installs the package from the release,
starts a server and appends. With --all: the release of two folders is equal to the byte; the programs and the Debian package
run in a root without anything else; and a library with a licence that is not allowed stops the release.
"""

import functools
import resource
import zipfile

from certificates import *
from clients import *
from deploy import *

WORK = SCRATCH / "release"
PARTS = ["chart", "crates", "python", "npm", "go", "java", "proto"]
# The programs run without variables, so without a PATH.
CHROOT = shutil.which("chroot", path="/usr/sbin:/sbin:/usr/bin:/bin")
# Crates that a user of the Rust client gets with it.
MOST_CRATES = 75
# Maximum seconds from the start of an installation to the first append, without downloads.
PROGRAM_SECONDS, PACKAGE_SECONDS = 10, 30
# Maximum seconds with all libraries compiled before: only a hang takes as long.
COMPILE_SECONDS = 900


@functools.cache
def checkout():
    """A clone whose last commit has the tracked files as they are here: a release has no others."""
    folder = project("checkout")
    index = {**os.environ, "GIT_INDEX_FILE": str(WORK / "index"), "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
    git = lambda *words: run("git", "-c", "user.name=x", "-c", "user.email=x@localhost", *words, cwd=ROOT, env=index, check=True).stdout.decode().strip()
    (WORK / "index").unlink(missing_ok=True)
    git("read-tree", "HEAD")
    # Other files may come and go: checks that run at the same time make some.
    git("add", "--update")
    made = git("commit-tree", "-p", "HEAD", "-m", "the tree", git("write-tree"))
    run("git", "clone", "--quiet", "--shared", "--no-checkout", ROOT, folder, check=True)
    run("git", "checkout", "--quiet", made, cwd=folder, check=True)
    return folder


def head():
    return run("git", "rev-parse", "HEAD", cwd=checkout(), check=True).stdout.decode().strip()


def released(out, *parts, root=None, umask=0o022):
    """Makes the release of a checkout; `parts` are its arguments. Returns how it ended."""
    shutil.rmtree(out, ignore_errors=True)
    return run((root or checkout()) / "deploy/release", "--out", out, *parts, timeout=3600, umask=umask,
               env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"})


@functools.cache
def packages():
    """The packages of a release, signed. No part of them is compiled by rustc."""
    WORK.mkdir(parents=True, exist_ok=True)
    key = WORK / "key"
    if not key.exists():
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "release", "-f", key, check=True)
    done = released(WORK / "dist", "--key", key, *PARTS)
    if done.returncode:
        raise SystemExit(said(done)[-4000:])
    return WORK / "dist"


def project(name):
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def works(title, *command, cwd, **more):
    """Whether the command of a user succeeds; prints its output if not."""
    began = time.monotonic()
    done = run(*command, cwd=cwd, timeout=2400, stdin=subprocess.DEVNULL,
               env={**clean_environment(), "WALD_BINARY": str(WALD), "TMPDIR": str(WORK), **more})
    fine = done.returncode == 0
    expect(title, fine, f"{time.monotonic() - began:.1f} s" if fine else said(done)[-2000:])
    return done.stdout.decode()


@check("Its digests and its signature are right, and each file is in its provenance")
def digests():
    dist = packages()
    done = run("sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS", cwd=dist)
    expect("sha256sum finds every file as listed", done.returncode == 0, said(done))
    listed = {line.split("  ")[1] for line in (dist / "SHA256SUMS").read_text().splitlines()}
    there = {str(path.relative_to(dist)) for path in dist.rglob("*") if path.is_file()}
    expect("every file is listed", there - listed == {"SHA256SUMS", "SHA256SUMS.sig"}, there ^ listed)
    (WORK / "signers").write_text(f"release {(WORK / 'key.pub').read_text()}")
    verify = ["ssh-keygen", "-Y", "verify", "-f", WORK / "signers", "-I", "release", "-n", "wald-release", "-s", dist / "SHA256SUMS.sig"]
    sums = (dist / "SHA256SUMS").read_bytes()
    expect("the signature is right", run(*verify, input=sums).returncode == 0)
    expect("that of other digests is not", run(*verify, input=sums.replace(b"a", b"b")).returncode != 0)
    [path] = dist.glob("*.provenance.json")
    statement = json.loads(path.read_text())
    named = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    expect("the provenance names all others, and the commit", {*named} == listed - {path.name}
           and head() in path.read_text(), len(named))


@check("Each client's package has its components with their licences")
def components():
    for package, component in [("python", "grpcio"), ("npm", "connect"), ("go", "google.golang.org/grpc"), ("java", "grpc-netty-shaded")]:
        [path] = packages().glob(f"wald-client-{package}-*.cdx.json")
        found = {one["name"].rpartition("/")[2] if package == "npm" else one["name"]: one for one in json.loads(path.read_text())["components"]}
        licences = {one["licenses"][0]["expression"] for one in found.values()}
        expect(f"{package}: {component} is among the components", component in found and all(licences), f"{len(found)} components, {sorted(licences)}")


@check("Python: an empty project installs the wheel, and the sdist, and appends")
def python():
    dist, folder = packages() / "python", project("python")
    run(sys.executable, "-m", "venv", folder / "venv", check=True)
    bin = folder / "venv" / "bin"
    pip = [bin / "pip", "install", "--quiet", "--disable-pip-version-check"]
    works("the wheel is installed", *pip, *dist.glob("*.whl"), "pytest", "pytest-asyncio", cwd=folder)
    shutil.copy(ROOT / "client/python/examples/testkit.py", folder / "test_orders.py")
    works("its test passes", bin / "python", "-m", "pytest", "-q", folder / "test_orders.py", cwd=folder)
    if os.environ.get("CI_LIGHT"):
        return
    works("the sdist is installed", *pip, "--force-reinstall", "--no-deps", *dist.glob("*.tar.gz"), cwd=folder)
    works("its test passes with it", bin / "python", "-m", "pytest", "-q", folder / "test_orders.py", cwd=folder)


@check("Node: an empty project installs the tarball; modules, CommonJS and TypeScript append")
def npm():
    dist, folder = packages() / "npm", project("npm")
    # An empty project, as `npm init -y` makes one.
    (folder / "package.json").write_text('{"name": "orders", "version": "1.0.0"}')
    works("the tarball is installed", "npm", "install", "--silent", *dist.glob("*.tgz"), cwd=folder)
    example = (ROOT / "client/typescript/examples/testkit.ts").read_text()
    example = example.replace("../src/index.js", "wald-client").replace("../src/testing.js", "wald-client/testing")
    (folder / "orders.test.mjs").write_text(example)
    works("a module's test passes", "node", "--test", "orders.test.mjs", cwd=folder)
    body = re.sub(r"^import (.+) from (.+);$", r"const \1 = require(\2);", example, flags=re.M)
    (folder / "orders.test.cjs").write_text(body)
    works("a test in CommonJS passes", "node", "--test", "orders.test.cjs", cwd=folder)
    # The compiler and the types that the client's own build uses.
    versions = json.loads((ROOT / "client/typescript/package.json").read_text())["devDependencies"]
    works("TypeScript is installed", "npm", "install", "--silent", "--save-dev",
          *(f"{name}@{versions[name]}" for name in ("typescript", "@types/node")), cwd=folder)
    (folder / "orders.mts").write_text(example)
    works("its types fit a strict project", "npx", "tsc", "--strict", "--noEmit", "--target", "es2022", "--module", "nodenext",
          "--types", "node", "orders.mts", cwd=folder)


@check("Bun and Deno: each runs a program on the tarball, with and without TLS, as Node does")
def runtimes():
    folder = project("runtimes")
    (folder / "package.json").write_text('{"name": "orders", "version": "1.0.0", "type": "module"}')
    works("the tarball is installed", "npm", "install", "--silent", *(packages() / "npm").glob("*.tgz"), cwd=folder)
    example = (ROOT / "client/typescript/examples/runtimes.ts").read_text().replace("../src/index.js", "wald-client")
    # Node 20 runs no TypeScript, and the example has no types.
    (folder / "program.js").write_text(example)
    page = (ROOT / "client/typescript/README.md").read_text()
    for name, (version, _) in RUNTIMES.items():
        expect(f"the README names {name} {version}", f"{name.capitalize()} {version}" in page)
    with scratch() as place:
        authority = Authority(place)
        pem, key = authority.issue(f"{place}/tls", "server")
        own, secret = authority.issue(f"{place}/tls", "client")
        secured = [*files(pem, key), "--tls-client-auth", "require", "--tls-client-ca", authority.pem]
        named = {"WALD_TLS_CA": str(authority.pem), "WALD_TLS_CERT": str(own), "WALD_TLS_KEY": str(secret)}
        for name, command in {"node": ["node"], **{name: runtime(name) for name in RUNTIMES}}.items():
            for title, scheme, arguments, more in ("", "http", [], {}), (" over TLS", "https", secured, named):
                with Daemon(f"{place}/{name}-{scheme}", *arguments) as daemon:
                    works(f"{name}: each kind of call{title}", *command, "program.js", cwd=folder, WALD_ENDPOINT=f"{scheme}://{daemon.grpc}", **more)


@check("Go: an empty module gets the client from the release without a generator, and appends")
def go():
    dist, folder = packages() / "go", project("go")
    proxies = run("go", "env", "GOPROXY", check=True).stdout.decode().strip()
    environment = {"GOPROXY": f"file://{dist},{proxies}", "GONOSUMDB": "wald.dev", "GOFLAGS": "-mod=mod",
                   # The caches may have the module of an earlier commit with this version, and the index of its files.
                   "GODEBUG": "goindex=0"}
    cache = Path(run("go", "env", "GOMODCACHE", check=True).stdout.decode().strip())
    for old in cache / "cache/download/wald.dev", cache / "wald.dev":
        if old.exists():
            run("chmod", "-R", "u+w", old, check=True)
            shutil.rmtree(old)
    version = next(dist.rglob("*.zip")).stem
    works("a module is made", "go", "mod", "init", "example.org/orders", cwd=folder, **environment)
    works("go get finds it", "go", "get", f"wald.dev/client/go@{version}", cwd=folder, **environment)
    example = (ROOT / "client/go/examples/testkit/orders_test.go").read_text()
    (folder / "orders_test.go").write_text(example.replace("//go:build daemon\n\n", ""))
    works("its test passes", "go", "test", "./...", cwd=folder, **environment)


@check("Java: an empty project takes the client from the release as from a repository, and its test appends")
def java():
    folder = project("java")
    (folder / "src/test/java").mkdir(parents=True)
    example = (ROOT / "client/java/src/test/java/dev/wald/examples/OrdersExample.java").read_text()
    (folder / "src/test/java/OrdersTest.java").write_text(re.sub(r"^package .+;$", "", example, flags=re.M).replace("OrdersExample", "OrdersTest"))
    versions = (ROOT / "client/java/pom.xml").read_text()
    junit, surefire = (re.search(pattern, versions, re.S)[1] for pattern in (r"<junit.version>(.+?)<", r"maven-surefire-plugin</artifactId>\s*<version>(.+?)<"))
    [version] = [path.name for path in (packages() / "java/dev/wald/wald-client").iterdir()]
    (folder / "pom.xml").write_text(f"""<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>org.example</groupId>
  <artifactId>orders</artifactId>
  <version>1</version>
  <properties>
    <maven.compiler.source>17</maven.compiler.source>
    <maven.compiler.target>17</maven.compiler.target>
    <project.build.sourceEncoding>UTF-8</project.build.sourceEncoding>
  </properties>
  <repositories>
    <repository>
      <id>release</id>
      <url>file://{packages()}/java</url>
    </repository>
  </repositories>
  <dependencies>
    <dependency>
      <groupId>dev.wald</groupId>
      <artifactId>wald-client</artifactId>
      <version>{version}</version>
    </dependency>
    <dependency>
      <groupId>org.junit.jupiter</groupId>
      <artifactId>junit-jupiter</artifactId>
      <version>{junit}</version>
      <scope>test</scope>
    </dependency>
  </dependencies>
  <build>
    <plugins>
      <plugin>
        <artifactId>maven-surefire-plugin</artifactId>
        <version>{surefire}</version>
      </plugin>
    </plugins>
  </build>
</project>
""")
    # Maven would take an earlier jar of this version from its cache.
    shutil.rmtree(Path.home() / ".m2/repository/dev/wald", ignore_errors=True)
    works("its test passes", "mvn", "--quiet", "--batch-mode", "test", cwd=folder)
    ran = [path.read_text() for path in folder.glob("target/surefire-reports/*.txt")]
    expect("a test ran", len(ran) == 1 and "Failures: 0, Errors: 0, Skipped: 0" in ran[0], ran)
    with zipfile.ZipFile(next((packages() / "java").rglob(f"wald-client-{version}.jar"))) as jar:
        expect("the jar has its licence", "META-INF/LICENSE" in jar.namelist())
    for kind, name in ("sources", "dev/wald/WaldClient.java"), ("javadoc", "dev/wald/WaldClient.html"):
        with zipfile.ZipFile(next((packages() / "java").rglob(f"wald-client-{version}-{kind}.jar"))) as jar:
            # The tool puts the pages below the name of the module.
            expect(f"the jar of {kind} has {name}", any(path.endswith(name) for path in jar.namelist()), f"{len(jar.namelist())} files")


def unpacked(dist, folder):
    """Unpacks the crates of a release as docs/src/release.md does; returns the folder of each by its name."""
    page = (ROOT / "docs/src/release.md").read_text()
    [commands] = [block for block in re.findall(r"```sh\n(.*?)```", page, re.S) if "crates/*.crate" in block]
    (folder / "crates").symlink_to(dist)
    works("the commands of the page unpack them", "sh", "-euc", commands, cwd=folder, RELEASE=str(folder))
    return {re.fullmatch(r"(.+)-\d+\.\d+\.\d+", path.name)[1]: path for path in sorted((folder / "vendor").iterdir())}


def rust_project(folder):
    """An empty project in a folder, with a program that appends. Returns the crates of the release, and the patches that name them."""
    crates = unpacked(packages() / "crates", folder)
    expect("the release has a crate for each package of the workspace", len(crates) == 9, sorted(crates))
    (folder / "orders" / "src").mkdir(parents=True)
    shutil.copy(ROOT / "client/examples/testkit.rs", folder / "orders" / "src" / "main.rs")
    # A registry would find the crates by their versions.
    patches = "[patch.crates-io]\n" + "".join(f'{name} = {{ path = "{path}" }}\n' for name, path in crates.items())
    version = crates["wald-client"].name.removeprefix("wald-client-")
    (folder / "orders" / "Cargo.toml").write_text(f"""
[package]
name = "orders"
edition = "2024"

[dependencies]
tokio = {{ version = "1", features = ["macros", "rt-multi-thread"] }}
wald-client = "{version}"

[features]
testing = ["wald-client/testing"]

[workspace]

{patches}""")
    return crates, patches


@check("Rust: an empty project takes the client's crates of the release, no more than it says, and with --all appends")
def rust_crates():
    folder = project("rust")
    crates, patches = rust_project(folder)
    tree = works("its libraries are found", "cargo", "tree", "--quiet", "--package", "wald-client", "--edges", "normal", "--prefix", "none",
                 "--no-dedupe", cwd=folder / "orders")
    count = len({" ".join(line.split()[:2]) for line in tree.splitlines() if line.strip()}) - 1
    expect(f"the client brings at most {MOST_CRATES} crates", 10 < count <= MOST_CRATES, count)
    if os.environ.get("CI_LIGHT"):
        return
    works("its program appends", "cargo", "run", "--quiet", "--features", "testing", cwd=folder / "orders", CARGO_TARGET_DIR=str(folder / "target"))
    for name, binary in ("wald-server", "wald"), ("walctl", "walctl"):
        # `cargo install` reads a patch from the configuration only.
        (folder / ".cargo").mkdir(exist_ok=True)
        (folder / ".cargo" / "config.toml").write_text(patches)
        works(f"cargo install {name}", "cargo", "install", "--quiet", "--debug", "--path", crates[name], "--root", folder / "root",
              cwd=folder, CARGO_TARGET_DIR=str(folder / "target"))
        works(f"{binary} runs", folder / "root" / "bin" / binary, "--version", cwd=folder)
    shutil.rmtree(folder / "target")


def processor_time():
    """Seconds that processes used which this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def again(title, *steps, cwd, most=PACKAGE_SECONDS, **more):
    """One check: the commands of a user, from the installation to a test that starts a server and appends, end in time. Caches
    have all downloads."""
    began, used = time.monotonic(), processor_time()
    for step in steps:
        done = run(*step, cwd=cwd, timeout=2400, stdin=subprocess.DEVNULL,
                   env={**clean_environment(), "WALD_BINARY": str(WALD), "TMPDIR": str(WORK), **more})
        if done.returncode:
            return expect(f"{title}: {step[0]} ends with 0", False, said(done)[-2000:])
    took = time.monotonic() - began
    return expect(f"{title}: from the installation to the first append in {most} s", took <= most,
                  f"{took:.1f} s, {processor_time() - used:.0f} s of processor time")


@check("Each package is installed and appends within 30 s; downloads and compiled libraries are there before")
def first_appends():
    dist = packages()
    # They fill the caches.
    python(), npm(), go(), java()
    folder = project("first-python")
    [wheel] = (dist / "python").glob("*.whl")
    works("Python: everything is downloaded", WORK / "python/venv/bin/pip", "download", "--quiet", "--disable-pip-version-check", "--dest", "wheels", wheel, "pytest", "pytest-asyncio", cwd=folder)
    shutil.copy(ROOT / "client/python/examples/testkit.py", folder / "test_orders.py")
    again("Python", [sys.executable, "-m", "venv", "venv"], ["venv/bin/pip", "install", "--quiet", "--no-index", "--find-links", "wheels", wheel, "pytest", "pytest-asyncio"],
          ["venv/bin/python", "-m", "pytest", "-q", "test_orders.py"], cwd=folder)
    folder = project("first-node")
    (folder / "package.json").write_text('{"name": "orders", "version": "1.0.0"}')
    shutil.copy(WORK / "npm/orders.test.mjs", folder)
    again("Node", ["npm", "install", "--silent", "--offline", *(dist / "npm").glob("*.tgz")], ["node", "--test", "orders.test.mjs"], cwd=folder)
    folder = project("first-go")
    shutil.copy(WORK / "go/orders_test.go", folder)
    version = next((dist / "go").rglob("*.zip")).stem
    offline = {"GOPROXY": "off", "GONOSUMDB": "wald.dev", "GOFLAGS": "-mod=mod", "GODEBUG": "goindex=0"}
    steps = ["go", "mod", "init", "example.org/orders"], ["go", "get", f"wald.dev/client/go@{version}"], ["go", "test", "-vet=off", "./..."]
    # On two processors the compilers of Go and Rust need about the bound, or more, for all libraries: that is not judged.
    again("Go, with an empty cache of builds", *steps, cwd=folder, most=COMPILE_SECONDS, GOCACHE=str(project("first-go-cache")), **offline)
    for name in "go.mod", "go.sum":
        (folder / name).unlink()
    again("Go, with libraries that are compiled", *steps, cwd=folder, GOCACHE=str(WORK / "first-go-cache"), **offline)
    shutil.rmtree(WORK / "first-go-cache")
    folder = project("first-java")
    shutil.copy(WORK / "java/pom.xml", folder)
    shutil.copytree(WORK / "java/src", folder / "src")
    shutil.rmtree(Path.home() / ".m2/repository/dev/wald", ignore_errors=True)
    again("Java", ["mvn", "--quiet", "--batch-mode", "test"], cwd=folder)
    folder = project("first-rust")
    rust_project(folder)
    works("Rust: everything is downloaded", "cargo", "fetch", "--quiet", cwd=folder / "orders")
    steps = [["cargo", "run", "--quiet", "--offline", "--features", "testing"]]
    again("Rust, with an empty directory of builds", *steps, cwd=folder / "orders", most=COMPILE_SECONDS, CARGO_TARGET_DIR=str(folder / "target"))
    shutil.copytree(folder / "orders", folder / "later")
    again("Rust, with libraries that are compiled", *steps, cwd=folder / "later", CARGO_TARGET_DIR=str(folder / "target"))
    shutil.rmtree(folder / "target")


@check("The chart's package renders as the folder does")
def chart():
    [package] = (packages() / "chart").glob("*.tgz")
    expect("its objects are those of the folder", rendered(chart=package) == rendered(), package.name)


@functools.cache
def everything():
    """A whole release."""
    WORK.mkdir(parents=True, exist_ok=True)
    done = released(WORK / "whole")
    if done.returncode:
        raise SystemExit(said(done)[-4000:])
    return WORK / "whole"


def first_append(title, root, wald, walctl, *before, began, user="0:0"):
    """Starts the daemon in a root of its own and appends. `began`: the start of the installation. `before`: words before each command,
    such as an emulator."""
    line = [CHROOT, f"--userspec={user}", root, *before]
    daemon = subprocess.Popen([*line, wald, "--data-dir", "/data", "--listen", "127.0.0.1:0", "--http-listen", ":0", "--log-format", "json"],
                              stderr=subprocess.PIPE, text=True, env={})
    try:
        start = next((json.loads(text) for text in daemon.stderr if "wald is serving" in text), None)
        if not expect(f"{title}: the daemon serves", start):
            return
        endpoint = f"http://{start['grpc']}"
        done = run(*line, walctl, "--endpoint", endpoint, "append", "orders", "--text", "tea", env={})
        # An emulator may take longer.
        took, most = time.monotonic() - began, PROGRAM_SECONDS * (6 if before else 1)
        expect(f"{title}: a first append is acked, within {most} s from the start of the installation", done.returncode == 0 and took <= most,
               f"{took:.1f} s" if done.returncode == 0 else said(done))
        done = run(*line, walctl, "--endpoint", endpoint, "read", "orders", "--output", "raw", env={})
        expect(f"{title}: it is read back", done.stdout == b"tea\n", said(done))
    finally:
        daemon.send_signal(signal.SIGTERM)
        code = daemon.wait(60)
    expect(f"{title}: the daemon ends with 0", code == 0, code)


def bare(name):
    """A root with nothing but a directory for data and one for temporary files."""
    root = project(name)
    for folder in "data", "tmp":
        (root / folder).mkdir()
    (root / "data").chmod(0o700)
    return root


@check("With --all: the programs of both processors run in a root that has nothing else, and name their commit")
def programs():
    dist, commit = everything(), head()[:12]
    archives = sorted(dist.glob("wald-*-linux.tar.gz"))
    expect("there are two archives", len(archives) == 2, archives)
    for path in archives:
        processor = path.name.removesuffix("-linux.tar.gz").rsplit("-", 1)[1]
        root, folder = bare(f"root-{processor}"), "/" + path.name.removesuffix(".tar.gz")
        began = time.monotonic()
        run("tar", "-xzf", path, "-C", root, check=True)
        unpacked = time.monotonic() - began
        emulator = []
        if processor != os.uname().machine:
            shutil.copy(shutil.which(f"qemu-{processor}-static"), root / "emulator")
            emulator = ["/emulator"]
        for name in "wald", "walctl", "walbench":
            shown = run(CHROOT, root, *emulator, f"{folder}/{name}", "--version", env={}).stdout.decode().strip()
            expect(f"{processor}: {name} names its commit", f"(commit {commit}, " in shown, shown)
        first_append(processor, root, f"{folder}/wald", f"{folder}/walctl", *emulator, began=time.monotonic() - unpacked)
        for name in "NOTICE", "LICENSE", "wald.toml", "wald.service", "man/man1/walctl.1", "completions/walctl.bash":
            expect(f"{processor}: it has {name}", (root / folder[1:] / name).stat().st_size > 100)
    notice = (root / folder[1:] / "NOTICE").read_text()
    missing = [name for name in ("tonic", "slatedb", "aws-lc-sys", "musl", "standard library of Rust") if name not in notice]
    expect("the notice names libraries of every kind", not missing, missing or f"{len(notice) >> 10} KiB")
    # components() reads the files of the clients.
    bills = sorted(path for path in dist.glob("*.cdx.json") if not path.name.startswith("wald-client-"))
    expect("each program has its components for each processor", len(bills) == 6, bills)
    for path in bills:
        bill = json.loads(path.read_text())
        names = {component["name"] for component in bill["components"]}
        expect(f"{path.name} names its components", len(names) > 60 and "tokio" in names and bill["bomFormat"] == "CycloneDX", len(names))


def later_version(package, root):
    """Makes /later.deb in a root: the package as of a version that has one more setting."""
    tree = root / "later"
    run("dpkg-deb", "--raw-extract", package, tree, check=True)
    control = tree / "DEBIAN/control"
    control.write_text(re.sub(r"^Version: .*$", "Version: 9.9.9", control.read_text(), flags=re.M))
    reference = (ROOT / "deploy/wald.toml").read_text()
    listed = [path for path in tree.rglob("wald.toml") if path.read_text() == reference]
    expect("the package lists all settings", listed, listed)
    for path in listed:
        path.write_text(f'{reference}\n# A setting that is new.\n# new = ""\n')
    run("dpkg-deb", "--root-owner-group", "--build", tree, root / "later.deb", check=True)


@check("With --all: the Debian package installs into a bare Debian, is upgraded unattended, and removes itself")
def debian():
    [package] = everything().glob(f"wald_*_{'amd64' if os.uname().machine == 'x86_64' else 'arm64'}.deb")
    root = project("debian")
    run("debootstrap", "--variant=minbase", "stable", root, check=True, timeout=900)
    shutil.copy(package, root)
    began = time.monotonic()
    done = run(CHROOT, root, "dpkg", "--install", f"/{package.name}")
    expect("dpkg installs it", done.returncode == 0, f"{time.monotonic() - began:.1f} s" if done.returncode == 0 else said(done))
    (root / "data").mkdir(0o700)
    first_append("Debian", root, "/usr/bin/wald", "/usr/bin/walctl", began=began)
    unit = root / "usr/lib/systemd/system/wald.service"
    expect("its unit starts the program of the package", "ExecStart=/usr/bin/wald --config /etc/wald/wald.toml" in unit.read_text())
    (root / "etc/wald/wald.toml").write_text("# mine\n")
    later_version(package, root)
    # Without a terminal a question of dpkg ends the upgrade.
    done = run(CHROOT, root, "dpkg", "--install", "/later.deb", stdin=subprocess.DEVNULL)
    state = run(CHROOT, root, "dpkg-query", "--show", "--showformat=${Version} ${db:Status-Status}", "wald").stdout
    expect("a later version with other settings is installed without a question, and keeps a changed file of settings", done.returncode == 0
           and state == b"9.9.9 installed" and (root / "etc/wald/wald.toml").read_text() == "# mine\n", said(done)[-500:] if done.returncode else state)
    done = run(CHROOT, root, "dpkg", "--remove", "wald")
    expect("it is removed; settings stay", done.returncode == 0 and not (root / "usr/bin/wald").exists()
           and (root / "etc/wald/wald.toml").exists(), said(done) if done.returncode else "")
    shutil.rmtree(root)


@check("With --all: the image has both processors, and its own appends")
def image():
    [archive] = everything().glob("*-image.tar")
    folder = project("image")
    began = time.monotonic()
    run("tar", "-xf", archive, "-C", folder, check=True)
    index = json.loads((folder / "index.json").read_text())
    blob = lambda digest: json.loads((folder / "blobs" / digest.replace(":", "/")).read_text())
    # The index of the layout names one image, which is a list of two.
    listed = blob(index["manifests"][0]["digest"])["manifests"]
    found = {one["platform"]["architecture"]: one for one in listed}
    expect("it has both processors", found.keys() == {"amd64", "arm64"}, sorted(found))
    own = found["amd64" if os.uname().machine == "x86_64" else "arm64"]
    manifest = blob(own["digest"])
    labels = blob(manifest["config"]["digest"])["config"]["Labels"]
    expect("its labels name version and commit", labels.get("org.opencontainers.image.revision") == head(), labels)
    root = bare("image-root")
    shutil.rmtree(root / "data")
    for layer in manifest["layers"]:
        run("tar", "-xf", folder / "blobs" / layer["digest"].replace(":", "/"), "-C", root, check=True)
    first_append("image", root, "/usr/local/bin/wald", "/usr/local/bin/walctl", began=began, user="65532:65532")


@check("With --all: a second release of the commit in another folder is equal to the byte")
def twice():
    first, other = everything(), project("elsewhere")
    run("git", "clone", "--quiet", checkout(), other / "a longer name", check=True)
    done = released(other / "dist", root=other / "a longer name", umask=0o002)
    expect("the second release is made", done.returncode == 0, said(done)[-2000:] if done.returncode else "")
    one, two = [{line.split("  ")[1]: line for line in (dist / "SHA256SUMS").read_text().splitlines()} for dist in (first, other / "dist")]
    expect("each file is the same", one == two, f"{len(one)} files" if one == two else [name for name in one if one[name] != two.get(name)])


ADVISORY = """```toml
[advisory]
id = "RUSTSEC-2099-0001"
package = "h2"
date = "2026-01-01"

[versions]
patched = [">= 99.0.0"]
```

# Planted
"""


def commit(folder):
    run("git", "add", "--all", cwd=folder, check=True)
    run("git", "-c", "user.name=x", "-c", "user.email=x@localhost", "commit", "--quiet", "--message", "planted", cwd=folder, check=True)


@check("With --all: a refused licence, a banned library and a vulnerability stop the release")
def gates():
    for title, old, new, word in [("licence", '    "ISC",\n', "", "rejected"),
                                  ("ban", 'deny = [\n', 'deny = [\n    { crate = "h2", reason = "planted" },\n', "banned")]:
        copy = project(f"planted-{title}")
        run("git", "clone", "--quiet", checkout(), copy, check=True)
        file = copy / "deploy/deny.toml"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        commit(copy)
        done = released(WORK / f"planted-{title}-dist", "binaries", root=copy)
        expect(f"a planted {title} stops it", done.returncode != 0 and word in said(done), said(done)[-300:])
        shutil.rmtree(copy)
    copy = project("planted-client")
    run("git", "clone", "--quiet", checkout(), copy, check=True)
    file = copy / "deploy/deny.toml"
    file.write_text(file.read_text().replace('    "BSD-3-Clause",\n', ""))
    commit(copy)
    for part in "python", "npm", "go", "java":
        done = released(WORK / "planted-client-dist", part, root=copy)
        expect(f"a licence that is not allowed stops the client for {part}", done.returncode != 0 and "BSD-3-Clause" in said(done), said(done)[-300:])
    shutil.rmtree(copy)
    database = project("advisories")
    (database / "crates/h2").mkdir(parents=True)
    (database / "crates/h2/RUSTSEC-2099-0001.md").write_text(ADVISORY)
    run("git", "init", "--quiet", database, check=True)
    commit(database)
    done = released(WORK / "planted-advisory", "--advisories", database, "binaries")
    expect("a planted vulnerability stops it", done.returncode != 0 and "RUSTSEC-2099-0001" in said(done), said(done)[-300:])
