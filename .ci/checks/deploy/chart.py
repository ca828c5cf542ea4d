"""Checks the Helm chart without a cluster. It is linted and rendered with every file in its ci/, and the
objects are validated against the schemas of Kubernetes. The daemon accepts the settings, and serves with them and
with real certificates and tokens. Daemons of several pods share a store, and one follows the other. Impossible values
are refused with a sentence, and dashboards and alerts are in the package. The settings in values.schema.json come from the daemon, and the chart's README from the comments in values.yaml:
--write generates both again.

Also checks the parts of deploy/ that need no engine: Dockerfile, compose files, systemd unit. The unit
needs the static binaries, too (setup/builds:static).
"""

import functools
import operator
import socket
import ssl
import tarfile
import urllib.error

from buckets import BUCKET, PREFIX, own, programs
from certificates import *
from deploy import *

SCHEMA = CHART / "values.schema.json"
WRITE = "--write" in sys.argv
# The chart sets these itself: addresses, a directory, and the settings that must agree with Secrets and probes.
OURS = {"listen", "http_listen", "insecure_listen", "insecure_tokens", "data_dir", "tls_cert", "tls_key", "tls_client_auth",
        "tls_client_ca", "tls_client_crl", "http_tls", "bucket_url", "bucket_endpoint", "bucket_region", "bucket_credentials_file",
        "bucket_insecure", "stand_by", "peer_ca", "node_id", "advertise", "auth_file", "metrics_open", "backup_signing_key_file",
        "backup_trust",
        "encryption_key_file", "encryption_key_command", "encryption_scope"}
PROBES = ("startup", "liveness", "readiness")
# Kinds of volumes that the Pod Security Standard `restricted` permits.
VOLUMES_ALLOWED = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def forms():
    """JSON values to try for each setting, from the daemon's default to nonsense."""
    reference = run(WALD, "config", "reference", check=True).stdout.decode()
    found = {}
    for paragraph in reference.split("\n\n")[1:]:
        # A heading.
        if paragraph.startswith("# ----"):
            continue
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
        auto = "auto|" if ", or auto" in answer else ""
        return {"type": "string", "pattern": rf"^({auto}0|([0-9]+(\.[0-9]+)? *(ns|us|ms|s|m|h|d|w) *)+)$"}
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


def environment(container, pod="wald-0"):
    """The variables of a container in a manifest. Names of variables before are replaced in values, as the kubelet does it."""
    found = {}
    for item in container.get("env", []):
        field = item.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        value = {"metadata.name": pod}[field] if field else item["value"]
        found[item["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found.get(name[1], name[0]), value)
    return found


@functools.cache
def of_values(values):
    """The objects that a file in ci/ makes. Nobody changes them."""
    return rendered("--values", values)


@check("Rendered objects match the schemas of Kubernetes, and the daemon accepts their settings")
def manifests(directory):
    version = pinned("kubernetes").rpartition(".")[0]
    for values in VALUES:
        objects = of_values(values)
        own = [o for o in objects if not re.search("monitoring.coreos.com|cert-manager.io|gateway.networking.k8s.io", o["apiVersion"])]
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
        variables = environment(container) | {"WALD_CONFIG": str(settings)}
        # A take-over is no setting.
        arguments = [argument for argument in container.get("args", []) if not argument.startswith("--take-over=")]
        binary = programs() / "wald" if re.search("^bucket_url", settings.read_text(), re.M) else WALD
        done = run(binary, "config", "check", *arguments, env=clean_environment(**variables))
        expect(f"{values.name}: the daemon takes its settings", done.returncode == 0, said(done))


def unrestricted(pod):
    """The rules of the Pod Security Standard `restricted` that a pod breaks."""
    broken = {key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)}
    broken |= {f"volume {volume['name']}" for volume in pod.get("volumes", []) if not set(volume) - {"name"} <= VOLUMES_ALLOWED}
    whole = pod.get("securityContext", {})
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        own = {**whole, **container.get("securityContext", {})}
        capabilities = own.get("capabilities", {})
        for rule, kept in [("privileged", not own.get("privileged")),
                           ("allowPrivilegeEscalation", own.get("allowPrivilegeEscalation") is False),
                           ("runAsNonRoot", own.get("runAsNonRoot") is True and own.get("runAsUser") != 0),
                           ("seccompProfile", own.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost")),
                           ("capabilities", "ALL" in capabilities.get("drop", []) and set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"}),
                           ("hostPort", not any("hostPort" in port for port in container.get("ports", []))),
                           ("procMount", own.get("procMount", "Default") == "Default")]:
            if not kept:
                broken.add(f"{container['name']}: {rule}")
    return sorted(broken)


@check("Pods keep the Pod Security Standard `restricted`, and mount Secrets as directories for their group only")
def pods():
    for values in VALUES:
        objects = of_values(values)
        specs = [only(objects, "StatefulSet")["spec"]["template"]["spec"], *(o["spec"] for o in objects if o["kind"] == "Pod"),
                 *(o["spec"]["jobTemplate"]["spec"]["template"]["spec"] for o in objects if o["kind"] == "CronJob")]
        broken = list(itertools.chain(*map(unrestricted, specs)))
        expect(f"{values.name}: {len(specs)} pods are restricted", not broken, ", ".join(broken))
        secrets = [v["secret"] for spec in specs for v in spec.get("volumes", []) if "secret" in v]
        paths = [m for spec in specs for c in [*spec.get("initContainers", []), *spec["containers"]] for m in c.get("volumeMounts", [])]
        expect(f"{values.name}: its {len(secrets)} volumes of Secrets have mode 0440, and no mount is a single file",
               all(s["defaultMode"] == 0o440 for s in secrets) and not any("subPath" in m for m in paths))
        # Every pod without an account would share rights of the default one.
        accounts = {o["metadata"]["name"] for o in objects if o["kind"] == "ServiceAccount"}
        senders = [o["spec"] for o in objects if o["kind"] == "Pod" and "serviceAccountToken" in json.dumps(o["spec"])]
        expect(f"{values.name}: {len(senders)} pods that send a token have an account of the chart",
               all(spec.get("serviceAccountName") in accounts for spec in senders))
    for harm in [{"runAsUser": 0}, {"runAsNonRoot": False}, {"seccompProfile": {"type": "Unconfined"}}]:
        harmed = {**specs[0], "securityContext": {**specs[0]["securityContext"], **harm}}
        expect(f"a pod with {harm} is not restricted", unrestricted(harmed))


# Longest names by kind. Kubernetes adds to them for pods, jobs and labels, which have 63 characters.
LONGEST = {"CronJob": 52, "StatefulSet": 52, "Service": 63, "Job": 63, "Pod": 63}


@check("Objects of a release with a long name have names and labels that Kubernetes takes")
def long_names():
    # helm takes 53 characters. At 45 the name of the chart ends with a dash that is cut.
    for release in "x" * 53, f"{'x' * 44}-{'y' * 8}":
        for values in VALUES:
            objects = rendered("--values", values, release=release)
            long = [(o["kind"], o["metadata"]["name"]) for o in objects if len(o["metadata"]["name"]) > LONGEST.get(o["kind"], 253)]
            long += [label for o in objects for label in o["metadata"].get("labels", {}).items() if len(label[1]) > 63]
            wrong = [o["metadata"]["name"] for o in objects if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", o["metadata"]["name"]) or "--" in o["metadata"]["name"]]
            expect(f"{values.name}: {len(objects)} objects of {release}", not long and not wrong, long + wrong)


@check("A volume without a store is accepted at the installation only")
def stores():
    for arguments, expected in [([], None), (["--is-upgrade"], "false"), (["--is-upgrade", "--set", "config.create_store=true"], "true"),
                                (["--set", "config.create_store=false"], "false")]:
        found = re.findall(r"^create_store = (\w+)$", settings_file(rendered(*arguments)), re.M)
        expect(f"create_store with {' '.join(arguments) or 'an installation'}: {expected or 'the default'}",
               found == ([expected] if expected else []), found)


# Values that turn TLS on.
TLS = ["tls.enabled=true", "tls.existingSecret=cert"]
BACKUP = ["backup.enabled=true", "backup.url=s3://wald/orders"]
LOGS = ["logs.items[0].name=orders"]
REPLICA = ["replica.enabled=true", "replica.url=s3://wald/orders"]
ONLY_BUCKET = ["persistence.enabled=false", "config.sync_mode=replicated"]
# Values that give the scraper a token.
SCRAPER = ["serviceMonitor.enabled=true", "serviceMonitor.authorization.credentials.name=scraper", "serviceMonitor.authorization.credentials.key=token"]


@check("Impossible values are refused with a sentence")
def refused():
    for arguments, sentence in [
        (["replicaCount=2"], "more than one pod needs replica.enabled and replica.url"),
        (["engine.kind=object"], 'only the engine "local"'),
        (["replicacount=1"], "replicacount"),
        (["config.drain_dely=5s"], "drain_dely"),
        (["config.drain_delay=5"], "want string"),
        (["config.drain_delay=5sec"], "does not match pattern"),
        (["config=null"], "missing property 'config'"),
        (["config.sync_mode=sometimes"], "strict"),
        (["config.listen=0.0.0.0:1"], "listen"),
        (["persistence.accessModes={ReadWriteMany}"], "ReadWriteOnce"),
        (["config.tls_cert=/tls.crt"], "tls_cert"),
        (["tls.enabled=true"], "set either tls.existingSecret"),
        (["encryption.scope=log"], "no effect without encryption.existingSecret"),
        (["encryption.scope=tenant", "encryption.existingSecret=key"], "tenants are in auth.toml"),
        ([*TLS, "tls.certManager.enabled=true"], "set either tls.existingSecret"),
        (["tls.enabled=true", "tls.certManager.enabled=true"], "set tls.certManager.issuerRef.name"),
        (["tls.existingSecret=cert"], "tls.existingSecret has no effect without tls.enabled"),
        (["http.tls=true"], "http.tls has no effect without tls.enabled"),
        (["tls.clientAuth=require"], "tls.clientAuth has no effect without tls.enabled"),
        ([*TLS, "tls.clientAuth=sometimes"], "optional"),
        ([*TLS, "tls.clientAuth=require"], "set tls.clientCASecret"),
        ([*TLS, "tls.clientAuth=require", "tls.clientCASecret=ca"], "set tests.certSecret"),
        ([*TLS, "tls.clientCASecret=ca"], "have no effect while tls.clientAuth is off"),
        (TLS, "set auth.existingSecret, or tls.clientAuth=require"),
        (["auth.existingSecret=auth"], "tokens would cross the network in plaintext"),
        (["networkPolicy.enabled=false"], "every program that reaches the port could read and append everything"),
        ([*TLS, "networkPolicy.enabled=false"], "every client that reaches the port could read and append everything"),
        (["auth.kubernetes.enabled=true"], "auth.kubernetes has no effect without auth.existingSecret"),
        ([*TLS, "auth.existingSecret=auth", "auth.kubernetes.enabled=true"], "keeps the daemon from the API server"),
        (["metricsOpen=true"], "metricsOpen has no effect without auth.existingSecret"),
        ([*TLS, "auth.existingSecret=auth", "serviceMonitor.enabled=true"], "set http.tls=true and serviceMonitor.authorization"),
        ([*TLS, "auth.existingSecret=auth", *SCRAPER], "with each scrape"),
        ([*TLS, "auth.existingSecret=auth", *SCRAPER, "metricsOpen=true"], "with each scrape"),
        ([*TLS, "auth.existingSecret=auth", "config.echo=true"], "config.echo"),
        ([*TLS, "auth.existingSecret=auth", "config.console=on"], "config.console is on"),
        ([*TLS, "auth.existingSecret=auth", "config.http_api=on"], "config.http_api is on"),
        ([*TLS, "tls.clientAuth=require", "tls.clientCASecret=ca", "tests.enabled=false", "config.http_api=on"], "config.http_api is on"),
        (["tls.certManager.duration=90d"], "does not match pattern"),
        (["ingress.enabled=true", "ingress.hosts={a}"], "every caller from outside"),
        (["grpcRoute.enabled=true"], "every caller from outside"),
        ([*TLS, "tls.clientAuth=require", "tls.clientCASecret=ca", "tests.enabled=false", "ingress.enabled=true", "ingress.hosts={a}"], "every caller from outside"),
        (["service.labels.app\\.kubernetes\\.io/name=x"], "app.kubernetes.io/name"),
        (["insecure=true", "ingress.enabled=true"], "set ingress.hosts"),
        (["insecure=true", "grpcRoute.enabled=true"], "set grpcRoute.parentRefs"),
        (["insecure=true", "httpRoute.enabled=true", "httpRoute.parentRefs[0].name=a"], "set config.http_api=on"),
        (["serviceMonitor.enabled=true", "podMonitor.enabled=true"], "choose one"),
        ([*TLS, "auth.existingSecret=auth", "podMonitor.enabled=true"], "set http.tls=true and serviceMonitor.authorization"),
        (["prometheusRule.disabled={WaldDown}"], "no effect without prometheusRule.enabled"),
        (["prometheusRule.enabled=true", "prometheusRule.disabled={WaldDwon}"], 'the alert "WaldDwon"'),
        (["prometheusRule.enabled=true", "prometheusRule.overrides.WaldDown.severity=x"], "severity"),
        (["updateStrategy.type=Recreate"], "OnDelete"),
        (["service.spec.type=NodePort"], "service"),
        (["backup.enabled=true"], "set backup.url"),
        ([*BACKUP[:1], "backup.url=/backups"], "does not match pattern"),
        ([*BACKUP, "backup.endpoint=http://objects"], "backup.endpoint has no TLS"),
        ([*BACKUP, *TLS, "auth.existingSecret=auth"], "set backup.tokenSecret"),
        ([*BACKUP, *TLS, "tls.clientAuth=require", "tls.clientCASecret=ca", "tests.enabled=false"], "set backup.certSecret"),
        ([*BACKUP, "backup.certSecret=cert"], "backup.certSecret has no effect"),
        ([*BACKUP, "backup.keep=0"], "minimum"),
        ([*LOGS, *TLS, "auth.existingSecret=auth"], "set logs.tokenSecret"),
        ([*LOGS, *TLS, "tls.clientAuth=require", "tls.clientCASecret=ca", "tests.enabled=false"], "set logs.certSecret"),
        ([*LOGS, "logs.certSecret=cert"], "logs.certSecret has no effect"),
        ([*LOGS, "logs.items[0].sync=batch"], "additional properties 'sync'"),
        (["logs.prune=shop/"], "which is empty"),
        (["replica.enabled=true"], "set replica.url"),
        (["replica.enabled=true", "replica.url=/replica"], "does not match pattern"),
        (["replica.url=s3://wald/orders"], "replica.url has no effect without replica.enabled"),
        (["replica.takeOverTerm=7"], "replica.takeOverTerm has no effect without replica.enabled"),
        (["config.sync_mode=replicated"], "set replica.enabled and replica.url"),
        ([*REPLICA, "config.bucket_url=s3://wald/orders"], "bucket_url"),
        ([*REPLICA, "replica.endpoint=http://objects"], "replica.endpoint has no TLS"),
        ([*REPLICA, "replica.advertise=here"], "does not match pattern"),
        ([*REPLICA, "replica.nodeId=a b"], "does not match pattern"),
        ([*REPLICA, "replica.takeOverTerm=-1"], "minimum"),
        ([*REPLICA, *BACKUP], "neither may contain the other"),
        ([*REPLICA, *BACKUP[:1], "backup.url=s3://wald/orders/backups"], "neither may contain the other"),
        ([*REPLICA, "serviceAccountName=wald", "replica.serviceAccountAnnotations.role=wald"], "replica.serviceAccountAnnotations makes"),
        ([*REPLICA, "extraArgs={--take-over}"], "set replica.takeOverTerm"),
        (["extraArgs={--shutdown-timeout=2m}"], "set config.shutdown_timeout"),
        (["extraArgs={--drain-delay,1m}"], "set config.drain_delay"),
        (["extraEnv[0].name=WALD_SHUTDOWN_TIMEOUT", "extraEnv[0].value=2m"], "set config.shutdown_timeout"),
        ([*REPLICA, "replicaCount=4"], "set 2 or 3"),
        ([*REPLICA, "replicaCount=2", "persistence.existingClaim=mine"], "each pod needs a volume of its own"),
        ([*REPLICA, "replicaCount=2", "replica.nodeId=eu-1"], "put $(POD_NAME) into it"),
        ([*REPLICA, "replicaCount=3", "replica.advertise=ledgers.example.com:443"], "put $(POD_NAME) into it"),
        ([*REPLICA, "config.stand_by=false"], "stand_by"),
        ([*REPLICA, "config.lease_ttl=10"], "want string"),
        (["persistence.enabled=false"], "the records would end with the pod"),
        ([*REPLICA, "persistence.enabled=false"], "set config.sync_mode=replicated"),
        ([*REPLICA, *ONLY_BUCKET, "persistence.existingClaim=mine"], "persistence.existingClaim has no effect"),
    ]:
        text = said(done := helm("template", "wald", CHART, *itertools.chain(*(["--set", a] for a in arguments))))
        expect(f"{', '.join(arguments)} is refused", done.returncode != 0 and sentence in text,
               next((line.strip() for line in text.splitlines() if sentence in line), text))


# Values that let only clients with certificates in.
CERTIFICATES = [*TLS, "tls.clientAuth=require", "tls.clientCASecret=ca", "tests.enabled=false"]
TOKENS = [*TLS, "auth.existingSecret=auth"]
# Values that the chart refuses without `insecure`, by the beginning of a line of the README.
INSECURE = {
    "tokens without TLS": [["auth.existingSecret=auth"], [*TOKENS, *SCRAPER]],
    "TLS without tokens": [TLS],
    "neither TLS nor a NetworkPolicy": [["networkPolicy.enabled=false"]],
    "`console:": [[*who, f"config.{name}=on"] for who in (TOKENS, CERTIFICATES, [*CERTIFICATES, "http.tls=true"]) for name in ("console", "http_api")],
    "an Ingress or a route": [[*who, *route] for who in ([], CERTIFICATES) for route in (
        ["ingress.enabled=true", "ingress.hosts={a}"], ["grpcRoute.enabled=true", "grpcRoute.parentRefs[0].name=a"],
        ["httpRoute.enabled=true", "httpRoute.parentRefs[0].name=a", "config.http_api=on"])],
}


@check("The chart refuses without `insecure` what its README lists, and its notes name an open console and API")
def insecure(directory):
    listed = (CHART / "README.md").read_text().partition("**The chart refuses**")[2].split("\n\n")[1]
    lines = [line.removeprefix("- ") for line in listed.splitlines()]
    expect("the README has a line for each kind, and no other", len(lines) == len(INSECURE)
           and all(line.startswith(begin) for line, begin in zip(lines, INSECURE)), lines)
    for begin, cases in INSECURE.items():
        for values in cases:
            without, permitted = (helm("template", "wald", CHART, *sets(*values, *more)) for more in ([], ["insecure=true"]))
            expect(f"{begin}: {', '.join(values)} needs insecure", without.returncode != 0 and permitted.returncode == 0, said(permitted)[-300:] if permitted.returncode else "")
    notes = said(helm("install", "wald", CHART, "--dry-run=client", *sets("config.console=on", "config.http_api=on"))).partition("\nNOTES:\n")[2]
    is_named = "The console is on: everyone who reaches the HTTP port reads every record" in notes and "The HTTP API is on, for everyone" in notes
    expect("in plaintext without tokens both are accepted, and the notes say who reads", is_named, "" if is_named else notes)


@check("The daemon gets its consent to insecure ports only where the chart allows them, and then starts")
def consents(directory):
    auth = "auth.existingSecret=auth"
    for arguments, names in [
        ([], {"LISTEN"}),
        (["networkPolicy.enabled=false", "insecure=true"], {"LISTEN"}),
        ([*TLS, auth], set()),
        ([*TLS, auth, "networkPolicy.enabled=false", "insecure=true"], {"TOKENS"}),
        ([*TLS, auth, "http.tls=true", "insecure=true"], set()),
        ([*TLS, auth, "http.tls=true", *SCRAPER], set()),
        ([*TLS, auth, "insecure=true", *SCRAPER], {"TOKENS"}),
        ([*TLS, auth, "http.tls=true", "config.console=on"], set()),
        ([*TLS, auth, "http.tls=true", "config.http_api=on"], set()),
        ([*TLS, auth, "insecure=true", "config.http_api=on"], {"TOKENS"}),
        ([*TLS, auth, "insecure=true", "config.console=on"], {"TOKENS"}),
        ([*TLS, "tls.clientAuth=require", "tls.clientCASecret=ca", "tests.enabled=false", "insecure=true", "config.console=on"], {"LISTEN"}),
        ([*TLS, "insecure=true"], {"LISTEN"}),
        ([*TLS, "tls.clientAuth=require", "tls.clientCASecret=ca", "tests.enabled=false"], set()),
        ([*TLS, "tls.clientAuth=optional", "tls.clientCASecret=ca", auth], set()),
        ([auth, "insecure=true"], {"LISTEN", "TOKENS"}),
    ]:
        objects = rendered(*itertools.chain(*(["--set", a] for a in arguments)))
        container = only(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
        given = {name.removeprefix("WALD_INSECURE_") for name in environment(container) if name.startswith("WALD_INSECURE_")}
        (directory / "wald.toml").write_text(settings_file(objects))
        done = run(WALD, "config", "check", env=clean_environment(**environment(container) | {"WALD_CONFIG": str(directory / "wald.toml")}))
        expect(f"{', '.join(arguments) or 'the default'}: {', '.join(sorted(given)) or 'no consent'}, and the daemon takes it",
               given == names and done.returncode == 0, said(done))


@check("Only the namespace reaches the ports by default, probes use the HTTP port, and Services follow TLS")
def ports():
    peers = '[{"namespaceSelector": {"matchLabels": {"team": "a"}}}]'
    for arguments, grpc, http in [([], [{}], [{}]),
                                  ([f"networkPolicy.monitors={peers}"], [{}], [None]),
                                  ([f"networkPolicy.clients={peers}"], [None, "test"], [{}])]:
        policy = only(rendered(*itertools.chain(*(["--set-json", a] for a in arguments))), "NetworkPolicy")["spec"]
        found = {rule["ports"][0]["port"]: [labels(peer) for peer in rule["from"]] for rule in policy["ingress"]}
        expect(f"{', '.join(arguments) or 'the default'}: these pods reach the ports", found == {"grpc": grpc, "http": http}
               and policy["policyTypes"] == ["Ingress", "Egress"] and "egress" not in policy, found)
    for name, protocols in [("default", ["kubernetes.io/h2c", "http"]), ("cert-manager", ["https", "http"]), ("tls", ["https", "https"])]:
        objects = of_values(CHART / "ci" / f"{name}-values.yaml")
        found = [[port["appProtocol"] for port in o["spec"]["ports"]] for o in objects if o["kind"] == "Service"]
        expect(f"{name}-values.yaml: the Services name {' and '.join(protocols)}", found == [protocols] * 2, found)
    # A probe of gRPC fails while clients use all of max_connections, and the kubelet would kill a healthy pod.
    for values in VALUES:
        objects = of_values(values)
        container = only(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
        scheme = "HTTPS" if "http_tls = true" in settings_file(objects) else "HTTP"
        found = {kind: container[f"{kind}Probe"].get("httpGet", {}) for kind in PROBES}
        reached = {(get.get("port"), get.get("scheme", "HTTP")) for get in found.values()}
        paths = [get.get("path") for get in found.values()]
        start = "/livez" if "stand_by = true" in settings_file(objects) else "/readyz"
        expect(f"{values.name}: all probes go to the HTTP port by {scheme}", reached == {("http", scheme)} and paths == [start, "/livez", "/readyz"], found)


def labels(peer):
    """The pods of the namespace that a peer of a NetworkPolicy admits: {} for all, "test" for helm's test. None: others."""
    selector = peer.get("podSelector")
    return selector and selector["matchLabels"].get("app.kubernetes.io/component") or selector


@check("The bucket of a replica is reached: egress, credentials, and the account with an identity")
def replica_pods():
    for name, account, rules in [
        ("replica", None, [([4317], 1), ([6925], 1), ([53, 53], 0), ([9000], 1)]),
        ("replica-identity", "wald", [([6925], 1), ([53, 53], 0), ([443], 0), ([80, 988], 2)]),
    ]:
        objects = of_values(CHART / "ci" / f"{name}-values.yaml")
        egress = only(objects, "NetworkPolicy")["spec"]["egress"]
        found = [([port["port"] for port in rule["ports"]], len(rule.get("to", []))) for rule in egress]
        expect(f"{name}-values.yaml: the pod reaches names and the bucket", found == rules, found)
        pod = only(objects, "StatefulSet")["spec"]["template"]["spec"]
        made = [(o["metadata"]["name"], o["automountServiceAccountToken"]) for o in objects if o["kind"] == "ServiceAccount"]
        expect(f"{name}-values.yaml: its account is {account}", pod.get("serviceAccountName") == account
               and made == ([(account, False)] if account else []), made)
    narrow = ["replica.peers[0].ipBlock.cidr=10.0.8.0/24"]
    for values, is_named in [(narrow, True), ([], False), ([*narrow, "replica.credentialsSecret=bucket"], False), ([*narrow, "networkPolicy.egress[0].ports[0].port=443"], False)]:
        notes = said(helm("install", "wald", CHART, "--dry-run=client", *sets(*REPLICA, *values))).partition("\nNOTES:\n")[2]
        expect(f"with {', '.join(values) or 'the bucket at every address'} the notes say {'how' if is_named else 'nothing about how'} the pod gets an identity over https",
               notes and ("fetches its identity over https" in notes) == is_named, "" if notes else "no notes")
    for endpoint, port in [("https://objects.example.com", 443), ("https://objects.example.com:8443/base", 8443), ("http://[fd00::9]:9000/", 9000),
                           ("http://objects", 80)]:
        policy = only(rendered(*sets(*REPLICA, f"replica.endpoint={endpoint}", "replica.insecure=true", "replica.credentialsSecret=bucket")), "NetworkPolicy")
        found = [port["port"] for port in policy["spec"]["egress"][-1]["ports"]]
        expect(f"{endpoint}: the pod reaches port {port}", found == [port], found)


def sets(*values):
    """Arguments of helm that set values."""
    return itertools.chain(*(["--set", value] for value in values))


@check("Pods that share a store start at once, keep apart, and reach each other; their number changes nothing in them")
def several():
    one, three = (rendered("--is-upgrade", *sets(*REPLICA, f"replicaCount={number}")) for number in (1, 3))
    changed = [new["kind"] for old, new in zip(one, three, strict=True) if old != new]
    specs = [only(objects, "StatefulSet")["spec"] for objects in (one, three)]
    expect("a larger replicaCount changes the StatefulSet alone, and not its pods", changed == ["StatefulSet"]
           and [spec.pop("replicas") for spec in specs] == [1, 3] and specs[0] == specs[1], changed)
    alone = only(of_values(CHART / "ci/default-values.yaml"), "StatefulSet")["spec"]
    expect("the default has neither a policy for several pods nor an affinity", "podManagementPolicy" not in alone and "affinity" not in alone["template"]["spec"])
    objects = of_values(CHART / "ci/nodes-values.yaml")
    spec = only(objects, "StatefulSet")["spec"]
    expect("three pods start at once", (spec["replicas"], spec.get("podManagementPolicy")) == (3, "Parallel"))
    affinity = spec["template"]["spec"]["affinity"]
    terms = [term["podAffinityTerm"] for term in affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]]
    expect("they prefer other zones and other nodes, and keep the affinity of the values", "nodeAffinity" in affinity
           and [term["topologyKey"] for term in terms] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
           and all(term["labelSelector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items() for term in terms), affinity)
    theirs = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "rack", "labelSelector": {}}]}
    given = rendered(*sets(*REPLICA), "--set-json", f"affinity.podAntiAffinity={json.dumps(theirs)}")
    found = only(given, "StatefulSet")["spec"]["template"]["spec"]["affinity"]
    expect("a podAntiAffinity of the values stands", found == {"podAntiAffinity": theirs}, found)
    variables = [environment(spec["template"]["spec"]["containers"][0], f"wald-{number}") for number in range(3)]
    found = [(one["WALD_NODE_ID"], one["WALD_ADVERTISE"]) for one in variables]
    expect("each has its own name and address", found == [(f"eu-wald-{n}", f"wald-{n}.ledgers.example.com:6925") for n in range(3)], found)
    policy = only(objects, "NetworkPolicy")["spec"]
    grpc = [labels(peer) for peer in policy["ingress"][0]["from"]]
    expect("the policy lets them in beside the clients", grpc == [{"matchLabels": {"app": "orders"}}, "daemon", "test"], grpc)
    names = only(objects, "Certificate")["spec"]["dnsNames"]
    expect("the certificate has their names, and the advertised ones", {"*.wald-headless.default.svc", *(f"wald-{n}.wald-headless" for n in range(3)),
           *(f"wald-{n}.ledgers.example.com" for n in range(3))} <= set(names), names)
    for advertise in "10.0.0.7:6925", "[fd00::7]:6925":
        values = ["tls.enabled=true", "tls.certManager.enabled=true", "tls.certManager.issuerRef.name=ca", "auth.existingSecret=auth"]
        names = only(rendered(*sets(*REPLICA, *values, f"replica.advertise={advertise}")), "Certificate")["spec"]["dnsNames"]
        expect(f"an address, {advertise}, is no name in it", not any("7" in name for name in names), names)
    expect("stand-bys verify the owner", 'peer_ca = "/etc/wald-tls/ca.crt"' in settings_file(objects) and "peer_ca" not in settings_file(given))
    values = [*TLS[:1], "tls.certManager.enabled=true", "tls.certManager.issuerRef.name=ca", "tls.clientAuth=require", "tls.clientCASecret=ca",
              "tests.enabled=false"]
    usages = [only(made, "Certificate")["spec"]["usages"] for made in (objects, rendered(*sets(*REPLICA, *values)))]
    expect("their certificate is one of a client, too, if the owner asks for one", ["client auth" in used for used in usages] == [False, True], usages)
    budget = only(objects, "PodDisruptionBudget")["spec"]
    expect("one may go at a time", budget["maxUnavailable"] == 1 and budget["selector"] == spec["selector"], budget)
    spec = only(of_values(CHART / "ci/nodes-bucket-values.yaml"), "StatefulSet")["spec"]
    (data,) = [volume for volume in spec["template"]["spec"]["volumes"] if volume["name"] == "data"]
    place = environment(spec["template"]["spec"]["containers"][0])["WALD_DATA_DIR"]
    expect("without persistence a pod has a directory in an emptyDir, and no claim", data == {"name": "data", "emptyDir": {"sizeLimit": "20Gi"}}
           and place == "/data/store" and "volumeClaimTemplates" not in spec, (data, place))


SERVES, STANDS_BY = "wald is serving", "wald is standing by"


class Pods:
    """Daemons of the chart's pods on volumes, and the bucket that they share."""

    def __init__(self, directory, store):
        self.directory, self.store, self.numbers = directory, store, itertools.count()
        names = {name: value for name, value in store.variables.items() if name.startswith("AWS_")}
        self.secret = "".join(f"{name} = {value}\n" for name, value in names.items()).encode()

    def start(self, pod, volume, *values):
        """The daemon of a pod. It serves or stands by, and is killed at the end."""
        bucket = [f"replica.url={self.store.url}", f"replica.endpoint={self.store.base}", "replica.insecure=true", "replica.credentialsSecret=bucket"]
        objects = rendered("--is-upgrade", *sets(*REPLICA[:1], *bucket, "replicaCount=2", "config.lease_ttl=2s", "config.drain_delay=0s", *values))
        made = only(objects, "StatefulSet")["spec"]["template"]["spec"]
        mounts = Mounts(self.directory / f"mounts-{next(self.numbers)}", made, settings_file(objects), {"bucket": {"credentials": self.secret}})
        self.container = made["containers"][0]
        variables = environment(self.container, pod) | {"WALD_CONFIG": f"{mounts.directory}/etc/wald/wald.toml"}
        return Daemon(self.directory / volume, *self.container.get("args", []), variables=variables, binary=programs() / "wald",
                      begins=(SERVES, STANDS_BY))

    def owner(self):
        """The record of the owner in the bucket."""
        return json.loads((self.store.objects / BUCKET / PREFIX / "shards/0/owner").read_text())["value"]

    def named(self):
        """The stand-bys that the owner names."""
        return self.owner().get("stand_bys", [])


def has_begun(daemon, message):
    """Whether a daemon logs a message within a minute."""
    return wait_until(lambda: any(message in line for line in daemon.lines), 60)


def has_record(daemon):
    """Whether a daemon answers a read with the record of this check."""
    _, answer, said_of_it = daemon.call("wald.v1.WalService/Read", {"log": "a", "lsn": 0})
    return "batch" in (answer or {}) or said_of_it


def appended(daemon):
    """Appends the record of this check, and waits for the bucket."""
    code, _, text = daemon.call("wald.v1.WalService/Append", {"log": "a", "record": {"text": "x"}, "durability": "DURABILITY_REPLICATED"})
    return code == 0 or text


@check("Pods share a store: one owns it, another lives and follows, and an empty volume is filled again")
def nodes(directory):
    with own(directory) as (store, _):
        pods = Pods(directory, store)
        try:
            with pods.start("wald-1", "second") as daemon:
                expect("an upgrade makes no store in an empty bucket", False, daemon.start["message"])
        except Ended as ended:
            expect("an upgrade makes no store in an empty bucket", ended.code == 65, ended.code)
        with pods.start("wald-0", "first", "config.create_store=true") as first:
            expect("the first pod makes the store, and owns it by its name", first.start["message"] == SERVES and pods.owner()["node"] == "wald-0.default",
                   first.start["message"])
            expect("an append is acknowledged from the bucket", (text := appended(first)) is True, text)
            with pods.start("wald-1", "second") as second:
                address = "wald-0.wald-headless.default.svc:6925"
                expect("the second pod stands by, and names the owner", (second.start["message"], second.start.get("owner")) == (STANDS_BY, address), second.start["message"])
                # It is not ready, because the owner's name leads nowhere here.
                started, alive, _ = probed(second, pods.container)
                expect("its probes of start and life succeed", (started, alive) == (200, 200), (started, alive))
                expect("the owner names it", wait_until(lambda: pods.named() == ["wald-1.default"], 60), pods.named())
                first.kill()
                expect("it serves when the owner has died", has_begun(second, SERVES) and pods.owner()["node"] == "wald-1.default", pods.owner()["node"])
                expect("and has the record", (text := has_record(second)) is True, text)
                with pods.start("wald-0", "first") as first:
                    expect("the pod of the old owner stands by then", first.start["message"] == STANDS_BY, first.start["message"])
                    expect("the new owner names it", wait_until(lambda: pods.named() == ["wald-0.default"], 60), pods.named())
                    code = second.stop()
                    expect("it serves when the owner is stopped", code == 0 and has_begun(first, SERVES) and has_record(first) is True, code)
        with pods.start("wald-0", "empty", f"replica.takeOverTerm={pods.owner()['term']}") as first:
            expect("the owner's pod with an empty volume fetches the store of the term in the values", first.start["message"] == SERVES
                   and has_record(first) is True, first.start["message"])


@check("Pods of another name take the store over from the owner of the term in the values, and from no other")
def take_overs(directory):
    with own(directory) as (store, _):
        pods = Pods(directory, store)
        with pods.start("wald-0", "first", "config.create_store=true") as first:
            expect("an append is acknowledged from the bucket", (text := appended(first)) is True, text)
            term = pods.owner()["term"]
        moved = "replica.nodeId=moved-$(POD_NAME)"
        for what, values, message in [("without a term the pod waits", [], STANDS_BY), ("so it does with another term", [f"replica.takeOverTerm={term + 1}"], STANDS_BY),
                                      ("with its term it serves", [f"replica.takeOverTerm={term}"], SERVES)]:
            with pods.start("wald-0", "second", moved, *values) as daemon:
                expect(what, daemon.start["message"] == message, daemon.start["message"])
                if message == STANDS_BY:
                    expect("and its log names the owner's term", daemon.start["term"] == term, term)
                else:
                    found = daemon.metric("wald_takeovers_total"), has_record(daemon), pods.owner()["node"]
                    expect("it has taken the store over once, and has the record", found == (1, True, "moved-wald-0"), found)
        with pods.start("wald-0", "second", moved, f"replica.takeOverTerm={term}") as daemon:
            found = daemon.start["message"], daemon.metric("wald_takeovers_total")
            expect("the value that stayed takes nothing over again", found == (SERVES, 0), found)
            with pods.start("wald-0", "first", f"replica.takeOverTerm={term}") as first:
                expect("and takes nothing from the new owner", first.start["message"] == STANDS_BY and pods.owner()["node"] == "moved-wald-0", first.start["message"])


@check("walctl accepts the command line of the backup job, and the policy lets its pod in")
def backup_jobs():
    objects = of_values(CHART / "ci" / "backup-values.yaml")
    container = only(objects, "CronJob")["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]
    # The binaries without the feature `object` refuse the URL, after all arguments and variables were read.
    # There are no such files here.
    variables = {name: value for name, value in environment(container).items() if not name.startswith(("WALD_T", "WALD_ENDPOINT"))}
    done = run(WALCTL, *container["args"], env=clean_environment(**variables))
    expect("walctl reads every argument", done.returncode == 2 and "object stores" in done.stderr.decode(), said(done))
    policy = only(objects, "NetworkPolicy")["spec"]["ingress"][0]
    expect("its pod reaches gRPC", "backup" in map(labels, policy["from"]), policy)
    # A pod without its image never fails by itself.
    job = only(objects, "CronJob")["spec"]["jobTemplate"]["spec"]
    expect("a job that cannot begin ends before the next one", job["activeDeadlineSeconds"] < 24 * 3600)
    ended = [rule for rule in job.get("podFailurePolicy", {}).get("rules", []) if rule["onExitCodes"]["containerName"] == container["name"]]
    codes = [code for rule in ended if rule["action"] == "FailJob" for code in rule["onExitCodes"]["values"]]
    expect("a backup of a damaged store, and one with the exit code above, is not repeated", {5, done.returncode} <= set(codes), codes)


@check("The job of `logs` makes them once, deletes below its prefix, and may reach the daemon")
def log_jobs(directory):
    objects = of_values(CHART / "ci" / "logs-values.yaml")
    job = only(objects, "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "logs.yaml"
    file.write_text(only(objects, "ConfigMap", job["metadata"]["name"])["data"]["logs.yaml"])
    [mount] = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "logs"]
    arguments = [one.replace(f"{mount}/logs.yaml", str(file)) for one in container["args"]]
    with Daemon(directory / "data") as daemon:
        daemon.walctl("log", "create", "shop/old", check=True)
        daemon.walctl("log", "create", "other", check=True)
        first, second = daemon.walctl(*arguments), daemon.walctl(*arguments)
        expect("it makes and deletes logs", first.returncode == 0 and b"created shop/orders" in first.stdout and b"deleted shop/old" in first.stdout, said(first))
        expect("its second run changes nothing", second.returncode == 0 and b"created" not in second.stdout and b"deleted" not in second.stdout, said(second))
        names = daemon.walctl("logs", "--output", "jsonl").stdout.decode()
        expect("other logs stay", '"other"' in names and "shop/audit" in names and "shop/old" not in names, names)
    # As `helm upgrade --reuse-values` has them after a chart without this value.
    expect("without the value nothing changes", rendered("--set", "logs=null") == rendered())
    policy = only(objects, "NetworkPolicy")["spec"]["ingress"][0]
    expect("its pod reaches gRPC", "logs" in map(labels, policy["from"]), policy)


@check("A certificate of cert-manager has every name of the Services and of the pod")
def names(directory):
    objects = of_values(CHART / "ci" / "cert-manager-values.yaml")
    authority = Authority(directory)
    wanted = only(objects, "Certificate")["spec"]["dnsNames"]
    pair = authority.issue(directory / "issued", "wald", san=",".join(f"DNS:{name}" for name in wanted))
    services = [o["metadata"]["name"] for o in objects if o["kind"] == "Service"]
    hosts = [*services, f"wald-0.{only(objects, 'StatefulSet')['spec']['serviceName']}"]
    with Daemon(directory / "data", *files(*pair)) as daemon:
        for name in [host + domain for host in hosts for domain in ("", ".default", ".default.svc", ".default.svc.cluster.local")]:
            done = health(daemon, authority, name)
            expect(f"a client that connects to {name} verifies the certificate", done.returncode == 0, said(done) if done.returncode else "")
        done = health(daemon, authority, "wald.other.svc")
        expect("a client that connects to wald.other.svc refuses it", done.returncode != 0 and "wald.default.svc" in said(done), said(done))


def health(daemon, authority, name):
    """The answer to a client that knows the daemon by this name."""
    return run(WALCTL, "health", env=clean_environment(WALD_ENDPOINT=f"https://{daemon.grpc}", WALD_TLS_CA=str(authority.pem), WALD_TLS_SERVER_NAME=name))


@check("The notes of an installation say which credentials belong together, and each example of the README is accepted")
def texts(directory):
    tls = CHART / "ci" / "tls-values.yaml"
    for mode, sentence in [("off", None), ("optional", "sends a certificate and a token"), ("require", "each principal that sends a token needs both")]:
        without = ["--set", "tls.clientCASecret=,tls.clientCRLKey="] if mode == "off" else []
        notes = said(helm("install", "wald", CHART, "--dry-run=client", "--values", tls, "--set-string", f"tls.clientAuth={mode}", *without))
        notes = notes.partition("\nNOTES:\n")[2]
        expect(f"the notes with tls.clientAuth {mode}", notes and (sentence in notes if sentence else "tls.clientAuth" not in notes), "" if notes else "no notes")
    blocks = re.findall(r"^```yaml\n(.*?)^```$", (CHART / "README.md").read_text(), re.M | re.S)
    values = [block for block in blocks if "apiVersion:" not in block]
    for number, block in enumerate(values):
        (directory / "values.yaml").write_text(block)
        done = helm("template", "wald", CHART, "--values", directory / "values.yaml")
        expect(f"the chart takes the README's example {number + 1} of {len(values)}", done.returncode == 0, said(done) if done.returncode else "")


@check("The grace period of the pod covers the drain of the daemon")
def grace_periods():
    for delay, finish, seconds in [("0", "30s", 40), ("5s", "30s", 45), ("1500ms", "2m", 132), ("1h", "1us", 3611)]:
        pod = only(rendered("--set-string", f"config.drain_delay={delay}", "--set", f"config.shutdown_timeout={finish}"),
                   "StatefulSet")["spec"]["template"]["spec"]
        found = pod["terminationGracePeriodSeconds"]
        expect(f"draining {delay} and {finish}: {seconds} s until SIGKILL", found == seconds, found)
    for values, seconds, what in [
        ("config.drain_delay=null,config.shutdown_timeout=null", 40, "without either, the daemon's own defaults count"),
        ("lifecycle.preStop.sleep.seconds=30", 75, "Kubernetes counts a preStop that sleeps for 30 s, too"),
        ("terminationGracePeriodSeconds=120,lifecycle.preStop.httpGet.path=/leave", 120, "a value replaces it"),
        ("lifecycle=null,terminationGracePeriodSeconds=null", 45, "values of an earlier chart have it computed"),
    ]:
        found = only(rendered("--set", values), "StatefulSet")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        expect(f"{what}: {seconds} s", found == seconds, found)
    for values in VALUES:
        objects = of_values(values)
        pod = only(objects, "StatefulSet")["spec"]["template"]["spec"]
        times = dict(re.findall(r'^(drain_delay|shutdown_timeout) = "(\w+)"$', settings_file(objects), re.M))
        stop = sum(int(text[:-1]) * {"s": 1, "m": 60}[text[-1]] for text in times.values())
        hook = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        expect(f"{values.name}: a stop of {hook + stop} s has 10 s to spare", len(times) == 2 and pod["terminationGracePeriodSeconds"] >= hook + stop + 10,
               pod["terminationGracePeriodSeconds"])


class Mounts:
    """The Secrets and settings of a pod in a directory, as the kubelet mounts them: each file is a link through ..data."""

    def __init__(self, directory, pod, settings, secrets):
        self.directory = directory
        self.secrets = secrets
        self.pod = pod
        for volume in pod["volumes"]:
            if "secret" in volume:
                self.write(volume["name"])
        (directory / "etc/wald").mkdir(parents=True)
        (directory / "etc/wald/wald.toml").write_text(self.inside(settings))

    def write(self, name):
        """Writes the files of a Secret again, and swaps the link."""
        (volume,) = [volume["secret"] for volume in self.pod["volumes"] if volume["name"] == name]
        (mount,) = [mount for mount in self.pod["containers"][0]["volumeMounts"] if mount["name"] == name]
        where = self.directory / mount["mountPath"].lstrip("/")
        new = where / f"..{time.monotonic_ns()}"
        new.mkdir(parents=True)
        wanted = [item["key"] for item in volume["items"]] if "items" in volume else list(self.secrets[volume["secretName"]])
        for key in wanted:
            (new / key).write_bytes(self.secrets[volume["secretName"]][key])
            (new / key).chmod(volume["defaultMode"])
            if not (where / key).is_symlink():
                (where / key).symlink_to(f"..data/{key}")
        (where / "..new").symlink_to(new.name)
        (where / "..new").rename(where / "..data")

    def inside(self, text):
        """A text whose paths lead into the directory."""
        return re.sub(r"(?<![\w/])/etc/wald", f"{self.directory}/etc/wald", text)


def asked(url, context=None, token=None):
    """The status of a GET."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        return urllib.request.urlopen(request, context=context, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code


def token_for(auth_file, principal):
    """A new token of a principal."""
    return run(WALD, "token", "create", "--auth-file", auth_file, "--principal", principal, check=True).stdout


def credentials(directory):
    """The Secrets of the values files, by name."""
    (directory / "server").mkdir()
    (directory / "clients").mkdir()
    server, clients = Authority(directory / "server"), Authority(directory / "clients")
    pem, key = server.issue(directory / "issued", "wald", san="DNS:wald.default.svc")
    cert, cert_key = clients.issue(directory / "issued", "tester", san="URI:spiffe://cluster/helm-test")
    auth = directory / "auth.toml"
    auth.write_text("""
        [principal.helm-test]
        cert = ["spiffe://cluster/helm-test"]
        allow = [{ do = ["append", "create", "read", "list", "delete"], logs = "helm-test/" }]
        [principal.scraper]
        allow = [{ do = ["metrics"] }]
        """)
    auth.chmod(0o600)
    tokens = {name: {"token": token_for(auth, name)} for name in ("helm-test", "scraper")}
    tls = {"tls.crt": pem.read_bytes(), "tls.key": key.read_bytes(), "ca.crt": server.pem.read_bytes()}
    tester = {"tls.crt": cert.read_bytes(), "tls.key": cert_key.read_bytes(), **tokens["helm-test"]}
    return server, {"wald-tls": tls, "wald-auth": {"auth.toml": auth.read_bytes()}, "helm-test": tester, "scraper": tokens["scraper"],
                    "clients": {"ca.crt": clients.pem.read_bytes(), "ca.crl": clients.crl()}}


def probed(daemon, container):
    """The statuses that the kubelet gets from the probes. It verifies no certificate, and sends none."""
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    gets = [container[f"{kind}Probe"]["httpGet"] for kind in PROBES]
    return [asked(f"{get.get('scheme', 'HTTP').lower()}://{daemon.http}{get['path']}", trusting if "scheme" in get else None) for get in gets]


def scraped(daemon, endpoint, secrets):
    """The statuses of a scrape as the ServiceMonitor describes it, and of one without its token."""
    context = None
    if endpoint.get("scheme") == "https":
        ca = endpoint["tlsConfig"]["ca"]["secret"]
        context = ssl.create_default_context(cadata=secrets[ca["name"]][ca["key"]].decode())
        # The name is another than that of the URL; `helm test` checks it.
        context.check_hostname = False
    url = f"{endpoint.get('scheme', 'http')}://{daemon.http}/metrics"
    token = endpoint.get("authorization") and secrets[endpoint["authorization"]["credentials"]["name"]]["token"].decode().strip()
    return asked(url, context, token), asked(url, context)


def helm_test(daemon, mounts):
    """The output of the first container of helm's test that fails, or ""."""
    for container in [*mounts.pod.get("initContainers", []), *mounts.pod["containers"]]:
        variables = {name: mounts.inside(value) for name, value in environment(container).items()}
        arguments = [mounts.inside(argument) for argument in container["args"]]
        done = run(WALCTL, *arguments, env=clean_environment(**variables | {"WALD_ENDPOINT": f"https://{daemon.grpc}"}))
        if done.returncode:
            return f"{container['name']}: {said(done)}"
    return ""


@check("With the rendered settings and real certificates the daemon serves; probes, scrapes and helm's test get in")
def secured(directory):
    authority, secrets = credentials(directory)
    for values, scrapes in [("tls", (200, 401)), ("cert-manager", (200, 200))]:
        objects = of_values(CHART / "ci" / f"{values}-values.yaml")
        pod, settings = only(objects, "StatefulSet")["spec"]["template"]["spec"], settings_file(objects)
        mounts = Mounts(directory / values, pod, settings, secrets)
        container = pod["containers"][0]
        variables = environment(container) | {"WALD_CONFIG": f"{mounts.directory}/etc/wald/wald.toml"}
        with Daemon(directory / f"{values}-data", listen="0.0.0.0:0", variables=variables) as daemon:
            daemon.grpc = daemon.grpc.replace("0.0.0.0", "127.0.0.1")
            expect(f"{values}: the daemon serves without a consent", not any("INSECURE" in name for name in variables))
            found = probed(daemon, container)
            expect(f"{values}: all probes succeed", found == [200] * 3, found)
            (endpoint,) = only(objects, "ServiceMonitor")["spec"]["endpoints"]
            found = scraped(daemon, endpoint, secrets)
            expect(f"{values}: a scrape, and one without a token, get {scrapes}", found == scrapes, found)
            failed_step = helm_test(daemon, Mounts(directory / f"{values}-test", only(objects, "Pod")["spec"], settings, secrets))
            expect(f"{values}: helm's test succeeds", not failed_step, failed_step)
            renewed(daemon, authority, mounts)


def renewed(daemon, authority, mounts):
    """A renewal of the certificate comes into force in the running daemon."""
    pem, key = authority.issue(authority.directory / "renewed", "wald", days=60, san="DNS:wald.default.svc")
    made = {"tls.crt": pem.read_bytes(), "tls.key": key.read_bytes(), "ca.crt": authority.pem.read_bytes()}
    mounts.secrets = {**mounts.secrets, "wald-tls": made}
    mounts.write("tls")
    daemon.process.send_signal(signal.SIGHUP)
    expect("a renewed certificate is in force without a restart",
           wait_until(lambda: served(daemon, authority) == ssl.PEM_cert_to_DER_cert(pem.read_text()), 15))


def served(daemon, authority):
    """The certificate that a client inside the cluster gets and verifies."""
    with socket.create_connection(tuple(daemon.grpc.split(":")), timeout=10) as plain, \
            authority.context("h2").wrap_socket(plain, server_hostname="wald.default.svc") as sock:
        return sock.getpeercert(binary_form=True)


@check("Routes lead to the Service, the HTTP route to the API alone, and a monitor of pods scrapes their port")
def routes():
    objects = of_values(CHART / "ci" / "routes-values.yaml")
    ports = {port["name"]: port["port"] for port in next(o for o in objects if o["kind"] == "Service" and not o["metadata"]["name"].endswith("-headless"))["spec"]["ports"]}
    backend = only(objects, "Ingress")["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    expect("the Ingress leads to gRPC of the Service", backend == {"name": "wald", "port": {"name": "grpc"}}, backend)
    for kind, port, paths in [("GRPCRoute", "grpc", None), ("HTTPRoute", "http", ["/v1"])]:
        (rule,) = only(objects, kind)["spec"]["rules"]
        found = [match["path"]["value"] for match in rule["matches"]] if "matches" in rule else None
        expect(f"the {kind} leads to its port", rule["backendRefs"] == [{"name": "wald", "port": ports[port]}] and found == paths, rule)
    pod = only(objects, "StatefulSet")["spec"]["template"]
    monitor = only(objects, "PodMonitor")["spec"]
    expect("the PodMonitor selects the pods and their port", monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
           and {end["port"] for end in monitor["podMetricsEndpoints"]} <= {p["name"] for p in pod["spec"]["containers"][0]["ports"]}, monitor)


@check("Alerts are left out and changed by the values, and all others stay as they are")
def alerts():
    def rules(*arguments):
        made = rendered("--set", "prometheusRule.enabled=true", *arguments)
        return {rule["alert"]: rule for o in made if o["kind"] == "PrometheusRule" for group in o["spec"]["groups"] for rule in group["rules"]}

    plain = rules()
    several = rules(*sets(*REPLICA, "replicaCount=2"))
    expect("only a store of several pods misses its stand-by", several.keys() - plain.keys() == {"WaldNoStandBy"}, len(several))
    values = ["disabled={WaldBackupOld}", "overrides.WaldDown.for=9m", "overrides.WaldDown.labels.severity=warning", "alertLabels.team=a"]
    changed = rules(*sets(*(f"prometheusRule.{value}" for value in values)))
    expect("one is left out", plain.keys() - changed.keys() == {"WaldBackupOld"}, len(changed))
    wanted = {**plain["WaldDown"], "for": "9m", "labels": {"severity": "warning", "team": "a"}}
    expect("one has another time and severity, and the rest of it stays", changed["WaldDown"] == wanted, changed["WaldDown"])
    others = {name: {**rule, "labels": {**rule["labels"], "team": "a"}} for name, rule in plain.items() if name not in ("WaldBackupOld", "WaldDown")}
    expect("every other one has the new label alone", {name: changed[name] for name in others} == others, len(others))


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
    objects = rendered("--set", "dashboards.enabled=true,prometheusRule.enabled=true", *sets(*REPLICA, "replicaCount=2"), chart=archive)
    maps = [o for o in objects if o["metadata"]["labels"].get("grafana_dashboard") == "1"]
    for item in maps:
        ((name, text),) = item["data"].items()
        expect(f"{name} arrives in its ConfigMap as it is", json.loads(text) == json.loads(sources[f"dashboards/{name}"].read_text()))
    rules = [o for o in objects if o["kind"] == "PrometheusRule"]
    expect("alerts arrive as they are", rules and [o["spec"] for o in rules]
           == [d for n, p in sorted(sources.items()) if n.startswith("alerts/") for d in documents(p.read_bytes())],
           sum(len(group["rules"]) for o in rules for group in o["spec"]["groups"]))


@check("Dockerfile, compose files and systemd unit are valid")
def rest():
    done = run(PYTHON / "hadolint", ROOT / "deploy" / "Dockerfile")
    expect("hadolint has nothing against the Dockerfile", done.returncode == 0, said(done))
    for name in "compose.yaml", "compose.replica.yaml":
        done = run(PYTHON / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", ROOT / "deploy" / name)
        expect(f"{name} matches the schema of compose files", done.returncode == 0, said(done) if done.returncode else "")
    compose = documents((ROOT / "deploy" / "compose.yaml").read_bytes())[0]
    mounts = [v.split(":")[0] for s in compose["services"].values() for v in s.get("volumes", []) if v.startswith(".")]
    prometheus(compose)
    expect("the files it mounts exist", mounts and all((ROOT / "deploy" / m).exists() for m in mounts), ", ".join(mounts))
    systemd()


@check("The daemons of compose.replica.yaml share a store, and one follows the other")
def compose_nodes(directory):
    services = documents((ROOT / "deploy" / "compose.replica.yaml").read_bytes())[0]["services"]
    published = {port.partition(":")[2] for port in services["bucket"]["ports"]}
    with own(directory) as (store, _):

        def start(name):
            """A daemon of the file, with the bucket of this check and with free ports."""
            variables = services[name]["environment"] | store.variables | {"WALD_BUCKET_URL": store.url}
            return Daemon(directory / name, "--lease-ttl", "2s", variables=variables, binary=programs() / "wald", begins=(SERVES, STANDS_BY))

        for name in "one", "two":
            settings = services[name]["environment"]
            ports = {settings[key].partition(":")[2] for key in ("WALD_LISTEN", "WALD_HTTP_LISTEN")}
            expect(f"{name}: its ports are published, and it advertises one", {f"{port}:{port}" for port in ports} <= published
                   and settings["WALD_ADVERTISE"] == f"127.0.0.1:{min(ports)}", ports)
        with start("one") as one:
            text = appended(one)
            expect("one serves, and acknowledges from the bucket", one.start["message"] == SERVES and text is True, text)
            with start("two") as two:
                expect("two stands by, and names the address of one", (two.start["message"], two.start.get("owner")) == (STANDS_BY, "127.0.0.1:6925"), two.start)
                record = store.objects / BUCKET / PREFIX / "shards/0/owner"
                expect("one names two", wait_until(lambda: '"stand_bys":["two"]' in re.sub(r"\s", "", record.read_text()), 60))
                one.kill()
                text = has_begun(two, SERVES) and has_record(two)
                expect("two serves when one has died, and has the record", text is True, text)


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


def created(unit):
    """The step of the unit after a start says whether a directory must have a store, and ends in any case."""
    step = re.search(r"^ExecStartPost=/bin/sh -c '(.*)'$", unit, re.M)[1].replace("$$", "$").replace("sleep 0.1", "sleep 0.001")
    for names, is_noted in [(["FORMAT"], True), (["FORMAT", "standby"], True), (["standby"], False), (["RESTORING", "FORMAT"], False), ([], False)]:
        with scratch() as directory:
            data, note = Path(directory) / "data", Path(directory) / "env"
            data.mkdir()
            for name in names:
                (data / name).touch()
            run("sh", "-c", step.replace("/var/lib/wald-created/env", str(note)).replace("/var/lib/wald;", f"{data};"), timeout=20, check=True)
            expect(f"the unit, with {names or 'nothing'}: a store is {'' if is_noted else 'not '}required from then on", note.exists() == is_noted)


def systemd():
    if not shutil.which("systemd-analyze"):
        return expect("systemd-analyze is there", False, "run .ci/lib/tools")
    unit = ROOT / "deploy" / "systemd" / "wald.service"
    created(unit.read_text())
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
