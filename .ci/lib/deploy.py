"""Shared parts of the checks of deploy/: the chart, and tools that .ci/lib/tools and .ci/lib/cluster/build install."""

import itertools
import json
import re

from common import *

BIN = SCRATCH / "bin"
PYTHON = SCRATCH / "deploy" / "bin"
CHART = ROOT / "deploy" / "helm" / "wald"
# Results of setup/builds:static.
STATIC = TARGET / f"{os.uname().machine}-unknown-linux-musl" / "release"
VALUES = sorted((CHART / "ci").glob("*-values.yaml"))


def pinned(name):
    """A version that .ci/lib/cluster/build fixes."""
    return re.search(rf"^{name}=(\S+)$", (ROOT / ".ci" / "lib" / "cluster" / "build").read_text(), re.M)[1]


def helm(*arguments, **options):
    """helm without the user's plugins and repositories."""
    own = {f"HELM_{kind}_HOME": str(SCRATCH / "helm") for kind in ("CACHE", "CONFIG", "DATA")}
    return run(BIN / "helm", *arguments, env=clean_environment(**own), **options)


def said(done):
    """The output of a command, without helm's notes about links."""
    text = (done.stdout + done.stderr).decode()
    return "\n".join(line for line in text.splitlines() if "symbolic link" not in line)


def documents(text):
    """The objects in a stream of YAML, by the parser that kubernetes-validate brings."""
    code = "import json, sys, yaml; json.dump([d for d in yaml.safe_load_all(sys.stdin) if d], sys.stdout)"
    return json.loads(run(PYTHON / "python", "-c", code, input=text, check=True).stdout)


def rendered(*arguments, release="wald", chart=CHART):
    """The objects of a release with these values."""
    done = helm("template", release, chart, "--kube-version", pinned("kubernetes"), *arguments)
    if done.returncode:
        raise SystemExit(said(done))
    return documents(done.stdout)


def only(objects, kind, name=None):
    """The only object of a kind."""
    (found,) = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    return found


def settings_file(objects):
    """The text of wald.toml in a release."""
    (text,) = [o["data"]["wald.toml"] for o in objects if o["kind"] == "ConfigMap" and "wald.toml" in o["data"]]
    return text


def only_allowed_calls(directory, binary):
    """The unit of systemd allows every system call that strace sees of a daemon under load."""
    sets = re.findall(r"^SystemCallFilter=(\S.*)$", (ROOT / "deploy/systemd/wald.service").read_text(), re.M)
    allowed = set()
    for words in sets:
        names = set(itertools.chain(*(listed(word.lstrip("~")) for word in words.split())))
        allowed = allowed - names if words.startswith("~") else allowed | names
    trace = directory / "strace.out"
    process = subprocess.Popen(["strace", "-f", "-qq", "-o", trace, binary, "--data-dir", directory / "data", "--listen", ":0",
                                "--http-listen", ":0", "--log-format", "json"], stderr=subprocess.PIPE, text=True,
                               env=clean_environment())
    start = json.loads(next(line for line in process.stderr if "wald is serving" in line))
    run(WALCTL, "append", "a", "-", input=b"1\n2\n", env=clean_environment(WALD_ENDPOINT=f"http://{start['grpc']}"), check=True)
    urllib.request.urlopen(f"http://{start['http']}/metrics").read()
    child = int((Path("/proc") / str(process.pid) / "task" / str(process.pid) / "children").read_text().split()[0])
    os.kill(child, signal.SIGTERM)
    expect(f"{binary.relative_to(TARGET)} under strace ends with 0", process.wait(60) == 0)
    used = set(re.findall(r"^\d+\s+(?:<\.\.\. )?([a-z_0-9]+)(?:\(| resumed)", trace.read_text(), re.M)) - {"execve"}
    expect("every system call that it makes is allowed by the unit", len(used) > 20 and used <= allowed,
           f"{len(used)} calls{', not: ' + ', '.join(sorted(used - allowed)) if used - allowed else ''}")


def listed(name):
    """The system calls in one of systemd's sets."""
    if not name.startswith("@"):
        return {name}
    lines = run("systemd-analyze", "syscall-filter", name, check=True).stdout.decode().splitlines()[1:]
    words = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    return set(itertools.chain(*(listed(word) for word in words)))


__all__ = [name for name in dir() if not name.startswith("_")]
