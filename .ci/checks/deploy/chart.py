"""Checks the Helm chart without a cluster. It is linted and rendered with every file in its ci/, and the
objects are validated against the schemas of Kubernetes. The daemon accepts the settings, impossible values are
refused with a sentence, and dashboards and alerts are in the package. The settings in
values.schema.json come from the daemon, and the chart's README from the comments in values.yaml:
--write generates both again.

Also checks the parts of deploy/ that need no engine: Dockerfile, compose file, systemd unit. The unit
needs the static binaries, too (setup/builds:static).
"""

import functools
import operator
import tarfile

from deploy import *

SCHEMA = CHART / "values.schema.json"
WRITE = "--write" in sys.argv
# The chart sets these itself: an address, a directory, ports.
OURS = {"listen", "http_listen", "insecure_listen", "data_dir"}


def forms():
    """JSON values to try for each setting, from the daemon's default to nonsense."""
    reference = run(WALD, "config", "reference", check=True).stdout.decode()
    found = {}
    for paragraph in reference.split("\n\n")[1:]:
        *doc, last = [line.removeprefix("#").strip() for line in paragraph.strip().splitlines()]
        name, default = last.split(" = ", 1)
        if name in OURS:
            continue
        answer = run(WALD, "config", "check", f"--{name.replace('_', '-')}=?").stderr.decode()
        found[name] = {**form(answer), "default": json.loads(default), "description": " ".join(doc)}
    return found


def form(answer):
    """The form of a setting; "?" is none of its values."""
    if "expected true or false" in answer:
        return {"type": "boolean"}
    if number := re.search(r"expected a number from (\d+) to (\d+)", answer):
        # Beyond 2^53 a number in YAML loses precision.
        return {"type": "integer", "minimum": int(number[1]), "maximum": min(int(number[2]), 2**53)}
    if "expected a size" in answer:
        return {"type": ["string", "integer"], "pattern": r"^[0-9]+(\.[0-9]+)? *([KMGT]i?B|B)?$", "minimum": 0}
    if "expected a span" in answer:
        return {"type": "string", "pattern": r"^(0|([0-9]+(\.[0-9]+)? *(ns|us|ms|s|m|h|d|w) *)+)$"}
    if choices := re.search(r"expected ([a-z0-9_.]+(?:, [a-z0-9_.]+)+)\n", answer):
        return {"enum": choices[1].split(", ")}
    return {"type": "string"}


@check("values.schema.json lists the settings as the daemon has them")
def settings(write=WRITE):
    text = SCHEMA.read_text()
    schema = json.loads(text)
    schema["properties"]["config"]["properties"] = settings = forms()
    made = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
    if write:
        SCHEMA.write_text(made)
    expect("values.schema.json has every setting as the daemon has it", write or made == text,
           f"{len(settings)} settings" if write or made == text else "run .ci/run deploy/chart -- --write")


def documented():
    """Every value of values.yaml that has a comment: (path, default, comment)."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    values = documents("\n".join(lines).encode())[0]
    path, comment, found = [], [], []
    for line in lines:
        if text := re.match(r"\s*# ?(.*)", line):
            comment.append(text[1])
            continue
        if key := re.match(r"( *)([A-Za-z]\w*):", line):
            path[len(key[1]) // 2:] = [key[2]]
            if comment:
                found.append((tuple(path), functools.reduce(operator.getitem, path, values), " ".join(comment)))
        comment = []
    return values, found


def uncommented(value, known, path=()):
    """Values without a comment, neither their own nor at one of their parents."""
    if path in known:
        return []
    if isinstance(value, dict) and value:
        return list(itertools.chain(*(uncommented(v, known, (*path, k)) for k, v in value.items())))
    return [".".join(path)]


@check("The table of values in the chart's README matches values.yaml")
def readme(write=WRITE):
    values, found = documented()
    missing = uncommented(values, {path for path, _, _ in found})
    expect("every value has a comment", not missing, ", ".join(missing))
    rows = ["| value | default | what it is |", "|---|---|---|"]
    for path, default, comment in found:
        shown = json.dumps(default)
        rows.append(f"| `{'.'.join(path)}` | {f'`{shown}`' if len(shown) <= 40 else 'see values.yaml'} | {comment} |")
    text = (CHART / "README.md").read_text()
    made = re.sub(r"(<!-- values:.*?-->\n).*?(<!-- end -->)", lambda m: m[1] + "\n".join(rows) + "\n" + m[2], text, flags=re.S)
    if write:
        (CHART / "README.md").write_text(made)
    expect("the README's table is that of values.yaml", write or made == text,
           f"{len(found)} values" if write or made == text else "run .ci/run deploy/chart -- --write")


@check("The image's default tag is the daemon's version")
def version():
    said_version = run(WALD, "--version", check=True).stdout.decode().split()[-1]
    ours = documents((CHART / "Chart.yaml").read_bytes())[0]["appVersion"]
    expect("appVersion is the daemon's version", ours == said_version, ours)


@check("helm lint accepts the chart")
def lint():
    for values in VALUES:
        done = helm("lint", "--strict", CHART, "--values", values)
        expect(f"helm lint with {values.name}", done.returncode == 0, said(done) if done.returncode else "")


@check("Rendered objects match the schemas of Kubernetes, and the daemon accepts their settings")
def manifests(directory):
    version = pinned("kubernetes").rpartition(".")[0]
    for values in VALUES:
        objects = rendered("--values", values)
        own = [o for o in objects if "monitoring.coreos.com" not in o["apiVersion"]]
        paths = []
        for number, item in enumerate(own):
            paths.append(directory / f"{number}.json")
            paths[-1].write_text(json.dumps(item))
        done = run(PYTHON / "kubernetes-validate", "--strict", "-k", version, *paths)
        expect(f"{values.name}: {len(own)} objects of {len(objects)} are those of Kubernetes {version}", done.returncode == 0,
               said(done) if done.returncode else "")
        settings = directory / "wald.toml"
        settings.write_text(settings_file(objects))
        container = only(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
        variables = {item["name"]: item["value"] for item in container["env"]} | {"WALD_CONFIG": str(settings)}
        done = run(WALD, "config", "check", *container.get("args", []), env=clean_environment(**variables))
        expect(f"{values.name}: the daemon takes its settings", done.returncode == 0, said(done))


@check("A volume without a store is accepted at the installation only")
def stores():
    for arguments, expected in [([], None), (["--is-upgrade"], "false"), (["--is-upgrade", "--set", "config.create_store=true"], "true"),
                                (["--set", "config.create_store=false"], "false")]:
        found = re.findall(r"^create_store = (\w+)$", settings_file(rendered(*arguments)), re.M)
        expect(f"create_store with {' '.join(arguments) or 'an installation'}: {expected or 'the default'}",
               found == ([expected] if expected else []), found)


@check("Impossible values are refused with a sentence")
def refused():
    for arguments, sentence in [
        (["replicaCount=2"], 'more than one needs engine.kind "object"'),
        (["engine.kind=object"], 'only the engine "local"'),
        (["replicacount=1"], "replicacount"),
        (["config.drain_dely=5s"], "drain_dely"),
        (["config.drain_delay=5"], "want string"),
        (["config.drain_delay=5sec"], "does not match pattern"),
        (["config=null"], "missing property 'config'"),
        (["config.sync_mode=sometimes"], "strict"),
        (["config.listen=0.0.0.0:1"], "listen"),
        (["persistence.accessModes={ReadWriteMany}"], "ReadWriteOnce"),
    ]:
        text = said(done := helm("template", "wald", CHART, *itertools.chain(*(["--set", a] for a in arguments))))
        expect(f"{', '.join(arguments)} is refused", done.returncode != 0 and sentence in text,
               next((line.strip() for line in text.splitlines() if sentence in line), text))


@check("The grace period of the pod covers the drain of the daemon")
def grace_periods():
    for delay, finish, seconds in [("0", "30s", 40), ("5s", "30s", 45), ("1500ms", "2m", 132), ("1h", "1us", 3611)]:
        pod = only(rendered("--set-string", f"config.drain_delay={delay}", "--set", f"config.shutdown_timeout={finish}"),
                   "StatefulSet")["spec"]["template"]["spec"]
        found = pod["terminationGracePeriodSeconds"]
        expect(f"draining {delay} and {finish}: {seconds} s until SIGKILL", found == seconds, found)
    pod = only(rendered("--set", "config.drain_delay=null,config.shutdown_timeout=null"), "StatefulSet")["spec"]["template"]["spec"]
    expect("without either, the daemon's own defaults count", pod["terminationGracePeriodSeconds"] == 40)


@check("The package has dashboards and alerts, unchanged")
def package(directory):
    done = helm("package", CHART, "--destination", directory)
    (archive,) = directory.glob("*.tgz")
    with tarfile.open(archive) as packed:
        files = {m.name.removeprefix("wald/"): packed.extractfile(m).read() for m in packed.getmembers() if m.isfile()}
    sources = {f"dashboards/{p.name}": p for p in (ROOT / "grafana" / "dashboards").glob("*.json")}
    sources |= {f"alerts/{p.name}": p for p in (ROOT / "grafana" / "alerts").glob("*.rules.yaml")}
    expect("the package has the dashboards and alerts of grafana/", len(sources) >= 3
           and all(files.get(name) == path.read_bytes() for name, path in sources.items()), ", ".join(sorted(sources)))
    expect("and nothing that is only for checks", done.returncode == 0
           and not [name for name in files if name.startswith("ci/") or "test" in Path(name).parent.name])
    objects = rendered("--set", "dashboards.enabled=true,prometheusRule.enabled=true", chart=archive)
    maps = [o for o in objects if o["metadata"]["labels"].get("grafana_dashboard") == "1"]
    for item in maps:
        ((name, text),) = item["data"].items()
        expect(f"{name} arrives in its ConfigMap as it is", json.loads(text) == json.loads(sources[f"dashboards/{name}"].read_text()))
    rules = [o for o in objects if o["kind"] == "PrometheusRule"]
    expect("alerts arrive as they are", rules and [o["spec"] for o in rules]
           == [d for n, p in sorted(sources.items()) if n.startswith("alerts/") for d in documents(p.read_bytes())],
           sum(len(group["rules"]) for o in rules for group in o["spec"]["groups"]))


@check("Dockerfile, compose file and systemd unit are valid")
def rest():
    done = run(PYTHON / "hadolint", ROOT / "deploy" / "Dockerfile")
    expect("hadolint has nothing against the Dockerfile", done.returncode == 0, said(done))
    done = run(PYTHON / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", ROOT / "deploy" / "compose.yaml")
    expect("compose.yaml matches the schema of compose files", done.returncode == 0, said(done) if done.returncode else "")
    compose = documents((ROOT / "deploy" / "compose.yaml").read_bytes())[0]
    mounts = [v.split(":")[0] for s in compose["services"].values() for v in s.get("volumes", []) if v.startswith(".")]
    prometheus(compose)
    expect("the files it mounts exist", mounts and all((ROOT / "deploy" / m).exists() for m in mounts), ", ".join(mounts))
    systemd()


def promtool():
    """Path of promtool: from .ci/lib/tools, or any on the PATH."""
    ours = BIN / "promtool"
    return ours if ours.exists() else shutil.which("promtool")


def prometheus(compose):
    """promtool checks Prometheus' configuration in the container, alerts included."""
    with scratch() as directory:
        for volume in compose["services"]["prometheus"]["volumes"]:
            source, _, inside = volume.partition(":")
            if source.startswith("."):
                target = Path(directory) / inside.partition(":")[0].removeprefix("/etc/prometheus/")
                source = ROOT / "deploy" / source
                shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        done = run(promtool(), "check", "config", Path(directory) / "prometheus.yml")
        expect("promtool takes its Prometheus' configuration, with the alerts", done.returncode == 0
               and b"rules found" in done.stdout, said(done) if done.returncode else "")


def systemd():
    if not shutil.which("systemd-analyze"):
        return expect("systemd-analyze is there", False, "run .ci/lib/tools")
    unit = ROOT / "deploy" / "systemd" / "wald.service"
    with scratch() as directory:
        # The same unit with an existing daemon.
        copy = Path(directory) / "wald.service"
        copy.write_text(unit.read_text().replace("/usr/local/bin/wald", str(WALD.resolve())))
        done = run("systemd-analyze", "verify", "--man=no", copy)
        expect("systemd takes the unit", done.returncode == 0 and not said(done), said(done))
        done = run("systemd-analyze", "security", "--offline=true", "--threshold=15", copy)
        level = re.search(r"exposure level for \S+ ([\d.]+)", said(done))
        expect("its exposure level is at most 1.5", done.returncode == 0 and level, level and level[1])
        only_allowed_calls(Path(directory), WALD)
