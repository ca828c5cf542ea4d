"""Tests the image: buildah builds it FROM scratch with the static binaries (`setup/builds:static` comes
first), and runc runs it exactly as the chart's manifests say: user 65532, read-only root, no
capabilities. Appends and reads back by the commands of `helm test`, drains, starts again. Needs
root, for namespaces.

The Dockerfile's first stage, which compiles, is left out: its binaries are the ones built before.
"""

from deploy import *

END = "everything accepted is on the device"


def built(directory):
    """Builds the image and unpacks it; returns the runtime's bundle."""
    binaries = directory / "binaries"
    (binaries / "volume").mkdir(parents=True)
    (binaries / "volume" / "data").mkdir(0o700)
    (binaries / "licenses").mkdir()
    shutil.copy(ROOT / "LICENSE", binaries / "licenses")
    for name in "wald", "walctl":
        kind = run("file", "-b", STATIC / name, check=True).stdout.decode()
        expect(f"{name} is static", "static" in kind and "interpreter" not in kind, kind.split(",")[3].strip())
        shutil.copy(STATIC / name, binaries)
    for name, *arguments in ("wald", "verify"), ("walctl", "backup", "list"):
        done = run(STATIC / name, *arguments, "s3://bucket/x", env=clean_environment(AWS_ENDPOINT_URL="http://127.0.0.1"))
        expect(f"{name} knows buckets, and refuses one without TLS", done.returncode == 78, said(done).strip())
    store = ["buildah", "--root", directory / "store", "--runroot", directory / "run", "--storage-driver", "vfs"]
    done = run(*store, "build", "--isolation", "chroot", "--build-context", f"binaries={binaries}",
               "-f", ROOT / "deploy" / "Dockerfile", "-t", "wald:ci", ROOT)
    if not expect("buildah builds the image", done.returncode == 0, said(done)[-2000:] if done.returncode else ""):
        finish()
    run(*store, "push", "wald:ci", f"oci:{directory}/oci:wald", check=True)
    run("umoci", "unpack", "--image", f"{directory}/oci:wald", directory / "bundle", check=True)
    files = {str(p.relative_to(directory / "bundle" / "rootfs")) for p in (directory / "bundle" / "rootfs").rglob("*") if p.is_file()}
    size = sum((directory / "bundle" / "rootfs" / f).stat().st_size for f in files)
    expect("it holds two programs, their licence and no shell", files == {"usr/local/bin/wald", "usr/local/bin/walctl", "usr/share/doc/wald/LICENSE"}, f"{size / 2**20:.1f} MiB")
    mode = (directory / "bundle" / "rootfs" / "data").stat().st_mode & 0o777
    expect("its volume is for its owner only", mode == 0o700, f"{mode:04o}")
    return directory / "bundle"


class Container:
    """A container of a pod's manifest, under runc. Its data is in a directory; its network is its own or another's."""

    def __init__(self, directory, bundle, name, pod, container, network=None):
        self.name, self.directory = name, directory / name
        self.state = directory / "runc"
        self.directory.mkdir()
        config = json.loads((bundle / "config.json").read_text())
        process, security = config["process"], {**pod.get("securityContext", {}), **container.get("securityContext", {})}
        process["terminal"] = False
        process["user"] = {"uid": security["runAsUser"], "gid": security["runAsGroup"]}
        process["noNewPrivileges"] = not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        process["capabilities"] = {kind: [] for kind in process["capabilities"]}
        process["args"] = container.get("command", process["args"]) + container.get("args", [])
        # Of two variables with the same name the last counts, as in Kubernetes.
        variables = {item["name"]: item["value"] for item in container.get("env", [])}
        given = dict(item.split("=", 1) for item in process["env"])
        process["env"] = [f"{name}={value}" for name, value in {**given, **variables}.items()]
        config["root"] = {"path": str(bundle / "rootfs"), "readonly": security["readOnlyRootFilesystem"]}
        config["mounts"] = [m for m in config["mounts"] if m["destination"] in ("/proc", "/dev", "/dev/shm", "/sys")]
        for mount in container["volumeMounts"]:
            options = ["bind", "ro" if mount.get("readOnly") else "rw", "nosuid", "nodev"]
            config["mounts"].append({"destination": mount["mountPath"], "type": "bind", "options": options,
                                     "source": str(directory / "volumes" / mount["name"])})
        spaces = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]
        config["linux"]["namespaces"] = [*spaces, {"type": "network", **({"path": network} if network else {})}]
        config["linux"].pop("uidMappings", None)
        config["linux"].pop("gidMappings", None)
        (self.directory / "config.json").write_text(json.dumps(config))
        self.lines = []

    def runc(self, *arguments, **options):
        return run("runc", "--root", self.state, *arguments, **options)

    def run(self):
        """Runs it to its end: (exit code, output)."""
        done = self.runc("run", "--bundle", self.directory, self.name)
        return done.returncode, (done.stdout + done.stderr).decode()

    def start(self):
        """Runs it until it serves."""
        self.process = subprocess.Popen(["runc", "--root", self.state, "run", "--bundle", self.directory, self.name],
                                        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.start_line = None
        for line in self.process.stderr:
            self.lines.append(line)
            if "wald is serving" in line:
                self.start_line = json.loads(line)
                break
        if not expect(f"{self.name} serves", self.start_line, "" if self.start_line else "".join(self.lines)):
            finish()
        threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()
        self.pid = json.loads(self.runc("state", self.name, check=True).stdout)["pid"]
        return self

    def exec(self, *command):
        return self.runc("exec", self.name, *command)

    def end(self):
        if self.process.poll() is None:
            self.runc("kill", self.name, "KILL")
            self.process.wait(30)
        self.runc("delete", "--force", self.name)

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.end()


def volumes(directory, objects):
    """The pod's mounts: an empty directory of the pod's group, as fsGroup makes it, and the settings."""
    data, config = directory / "volumes" / "data", directory / "volumes" / "config"
    data.mkdir(parents=True)
    config.mkdir()
    group = only(objects, "StatefulSet")["spec"]["template"]["spec"]["securityContext"]["fsGroup"]
    os.chown(data, 0, group)
    data.chmod(0o2775)
    (config / "wald.toml").write_text(settings_file(objects))


def rights(daemon):
    """Rights of the process, read from the kernel."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines() if ":\t" in line)
    expect("it runs as 65532", set(status["Uid"].split()) == {"65532"} == set(status["Gid"].split()))
    held = {name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    expect("it has no capability, and cannot get one", not any(held.values()) and status["NoNewPrivs"] == "1", held)
    mounts = [line.split() for line in Path(f"/proc/{daemon.pid}/mountinfo").read_text().splitlines()]
    root = [m for m in mounts if m[4] == "/"][-1]
    expect("its root is read-only", "ro" in root[5].split(","))
    refused = daemon.exec("wald", "--data-dir", "/elsewhere", "--listen", "127.0.0.1:0", "--http-listen", ":0")
    expect("nothing can be written outside the volume", refused.returncode == 74 and b"Read-only file system" in refused.stderr,
           said(refused).strip())


def helm_test(directory, bundle, objects, daemon):
    """Runs the containers of the test's pod in order."""
    pod = only(objects, "Pod")["spec"]
    outputs = []
    for container in [*pod["initContainers"], *pod["containers"]]:
        # The service's name belongs to the cluster; here they share a network.
        near = {**container, "env": [{"name": "WALD_ENDPOINT", "value": "http://127.0.0.1:6925"}]}
        step = Container(directory, bundle, f"test-{container['name']}", pod, near, f"/proc/{daemon.pid}/ns/net")
        code, text = step.run()
        expect(f"helm test: {container['name']}", code == 0, text.strip())
        outputs.append(text)
    record = json.loads(outputs[1])
    expect("it read the records that it appended", record.get("text") == settings_file(objects))
    gone = daemon.exec("walctl", "read", "helm-test/wald")
    expect("and it leaves nothing behind", gone.returncode == 3)


# Prints the status of a GET in the network of a container.
GET = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1]).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


def asked(daemon, path, port=6926):
    """The status of a GET inside the container's network; 0 if nothing answers."""
    done = run("nsenter", f"--net=/proc/{daemon.pid}/ns/net", sys.executable, "-c", GET, f"http://127.0.0.1:{port}{path}")
    return int(done.stdout or 0)


def probed(daemon, container, kind):
    """The status that a probe of the manifest gets for the kubelet."""
    get = container[f"{kind}Probe"]["httpGet"]
    [port] = [one["containerPort"] for one in container["ports"] if one["name"] == get["port"]]
    return asked(daemon, get["path"], port)


def probes(daemon, container):
    """Every probe of the manifest."""
    answers = {kind: probed(daemon, container, kind) for kind in ("startup", "liveness", "readiness")}
    expect("all probes of the manifest succeed", set(answers.values()) == {200}, answers)


def notes(daemon):
    """The commands that helm prints after an installation."""
    done = daemon.exec("walctl", "status")
    expect("walctl status by exec", done.returncode == 0 and b"SERVING" in done.stdout, "" if done.returncode == 0 else said(done))
    done = daemon.exec("wald", "config", "show")
    expect("wald config show by exec has the chart's settings", done.returncode == 0
           and re.search(rb'drain_delay = "5s" *# file /etc/wald/wald.toml', done.stdout), said(done) if done.returncode else "")
    done = daemon.exec("wald", "config", "check", "--otlp-endpoint", "http://127.0.0.1:4317")
    expect("it can send traces", done.returncode == 0, said(done))


def appended(daemon):
    """Appends the settings file under exec, which has no standard input: (exit code, output)."""
    done = daemon.exec("walctl", "append", "kept", "--format", "raw", "/etc/wald/wald.toml", "--timeout", "5s")
    return done.returncode, said(done)


def drained(daemon, container):
    """SIGTERM: not ready at once, still accepting for drain_delay, then a clean end."""
    code, text = appended(daemon)
    expect("an append before it", code == 0, text)
    began = time.monotonic()
    daemon.runc("kill", daemon.name, "TERM", check=True)
    until = time.monotonic() + 4
    while (ready := probed(daemon, container, "readiness")) == 200 and time.monotonic() < until:
        time.sleep(0.01)
    alive = probed(daemon, container, "liveness")
    expect("after SIGTERM it is not ready, but lives", (ready, alive) == (503, 200), (ready, alive))
    code, text = appended(daemon)
    expect("and accepts for drain_delay", code == 0 and time.monotonic() - began < 5, text)
    code = daemon.process.wait(60)
    took = time.monotonic() - began
    expect("it ends with 0 after drain_delay", code == 0 and 5 <= took < 15, f"{took:.1f} s")
    expect("and says that everything is safe", any(END in line for line in daemon.lines))


def test_kit(directory, bundle, pod):
    """The image serves a test with the variables that the page about tests names, and no other option."""
    page = (ROOT / "docs/src/test-kit.md").read_text().partition("## A container\n")[2].partition("\n## ")[0]
    named = [dict(zip(("name", "value"), text.split("="))) for text in re.findall(r"`(WALD_\w+=\w+)`", page)]
    data = directory / "volumes" / "test-kit"
    data.mkdir(mode=0o700)
    os.chown(data, 65532, 65532)
    container = {"securityContext": pod["containers"][0]["securityContext"], "env": named, "volumeMounts": [{"name": "test-kit", "mountPath": "/data"}]}
    with Container(directory, bundle, "test-kit", pod, container) as daemon:
        statuses = [asked(daemon, path) for path in ("/readyz", "/v1/logs")]
        expect(f"with {', '.join(one['name'] for one in named)} it is ready, and has the HTTP API", statuses == [200, 200], statuses)


@check("The image runs as the chart says: no rights, read-only root, probes, drain and a clean restart")
def image(directory):
    bundle = built(directory)
    objects = rendered()
    volumes(directory, objects)
    pod = only(objects, "StatefulSet")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    code, text = Container(directory, bundle, "bare", pod, {**container, "env": []}).run()
    expect("without --insecure-listen the image refuses, and says why", code == 78 and "--insecure-listen" in text, text.strip())
    test_kit(directory, bundle, pod)
    with Container(directory, bundle, "first", pod, container) as daemon:
        rights(daemon)
        probes(daemon, container)
        notes(daemon)
        helm_test(directory, bundle, objects, daemon)
        drained(daemon, container)
    with Container(directory, bundle, "second", pod, container) as daemon:
        expect("the next start says clean", daemon.start_line["recovery"] == "clean", daemon.start_line["recovery"])
        page = daemon.exec("walctl", "read", "kept", "--output", "json")
        lines = [json.loads(line) for line in page.stdout.splitlines()]
        expect("both records are there", [r["lsn"] for r in lines] == [0, 1] and {r["text"] for r in lines} == {settings_file(objects)})


@check("The static binary makes only system calls that the unit of systemd allows")
def calls(directory):
    only_allowed_calls(directory, STATIC / "wald")
