"""Tests the Helm chart on a real Kubernetes API (kubernetes.py). The objects of each values file pass strict
validation and Pod Security `restricted`. helm does install, test, upgrade from an earlier version, refusals,
stop and uninstall, and the claim is kept throughout. One pod becomes three that share a bucket, and one without a replica again.

kwok plays the nodes. The test covers the API, the controllers and helm with the
chart. The test hook's pod is created, admitted and waited for, but its commands do not run here:
image.py runs the same commands, from the same manifests, in real containers.
"""

import copy

from kubernetes import *

APPS = "/apis/apps/v1/namespaces/wald/statefulsets/wald"
# Fields that may change. The API refuses changes of all others, such as claim templates and selectors.
MUTABLE = {"replicas", "ordinals", "template", "updateStrategy", "revisionHistoryLimit",
           "persistentVolumeClaimRetentionPolicy", "minReadySeconds"}


def packaged(directory, version, change=None):
    """The chart as a package of a version, after an optional change."""
    source = directory / f"source-{version}"
    shutil.copytree(CHART, source / "wald", symlinks=False)
    if change:
        change(source / "wald")
    done = helm("package", source / "wald", "--version", version, "--app-version", version, "--destination", directory)
    if done.returncode:
        raise SystemExit(said(done))
    return directory / f"wald-{version}.tgz"


def as_a_pod(stateful_set):
    """The pod that a StatefulSet will make."""
    made = copy.deepcopy(stateful_set["template"])
    for claim in stateful_set.get("volumeClaimTemplates", []):
        name = claim["metadata"]["name"]
        made["spec"]["volumes"].append({"name": name, "persistentVolumeClaim": {"claimName": f"{name}-wald-0"}})
    made["metadata"]["name"] = "wald-0"
    made["spec"]["serviceAccountName"] = "default"
    return {"apiVersion": "v1", "kind": "Pod", **made}


def admission(cluster):
    """Every object of every values file, and the pods that follow from them."""
    for values in VALUES:
        objects = rendered("--values", values)
        pods = [o for o in objects if o["kind"] == "Pod"]
        pods.append(as_a_pod(only(objects, "StatefulSet")["spec"]))
        # A pod is only taken if its service account exists.
        accounts = [o for o in objects if o["kind"] == "ServiceAccount" and o["metadata"]["name"] != "wald"]
        cluster.must_create(*accounts)
        answers = [(o, *cluster.create(o, query="?dryRun=All&fieldValidation=Strict"))
                   for o in [*(o for o in objects if o["kind"] != "Pod" and o not in accounts), *pods]]
        wrong = [f"{o['kind']}: {message} {warnings}" for o, taken, message, warnings in answers if not taken or warnings]
        expect(f"{values.name}: the API takes {len(answers)} objects strictly, restricted and without a warning",
               not wrong, "; ".join(wrong))
    (text,) = re.findall(r"```yaml\n(apiVersion.*?name: wald-offline.*?)```", (CHART / "README.md").read_text(), re.S)
    taken, message, warnings = cluster.create(*documents(text.encode()), query="?dryRun=All&fieldValidation=Strict")
    expect("the README's pod for commands on a volume is taken, too", taken and not warnings, f"{message} {warnings}")
    for what, harm in [("root", lambda pod: pod["spec"]["securityContext"].update(runAsUser=0)),
                       ("a capability", lambda pod: pod["spec"]["containers"][0]["securityContext"]["capabilities"].update(add=["SYS_ADMIN"])),
                       ("no seccomp profile", lambda pod: pod["spec"]["securityContext"].pop("seccompProfile"))]:
        pod = copy.deepcopy(pods[-1])
        harm(pod)
        taken, message, _ = cluster.create(pod, query="?dryRun=All&fieldValidation=Strict")
        expect(f"the same pod with {what} is refused", not taken and 'violates PodSecurity "restricted' in message)


def pod(cluster):
    return cluster.get("/api/v1/namespaces/wald/pods/wald-0")


def claim(cluster):
    return cluster.get("/api/v1/namespaces/wald/persistentvolumeclaims/data-wald-0")


def succeeded(cluster, what, *arguments):
    began = time.monotonic()
    done = cluster.helm(*arguments)
    return expect(what, done.returncode == 0, f"{time.monotonic() - began:.1f} s" if done.returncode == 0 else said(done))


def life(cluster, directory):
    """Upgrades an older version to this one, and uninstalls it."""
    older, current = packaged(directory, "0.0.1"), packaged(directory, "0.0.2")
    switches = "serviceMonitor.enabled=true,prometheusRule.enabled=true,dashboards.enabled=true"
    never_ready(cluster, directory, older, current)
    succeeded(cluster, "helm install --wait", "install", "wald", older, "--wait", "--timeout", "2m", "--set", switches)
    before, kept = cluster.get(APPS), claim(cluster)
    expect("the pod is ready, its claim is bound", before["status"].get("readyReplicas") == 1 and kept["status"]["phase"] == "Bound")
    slices = cluster.get("/apis/discovery.k8s.io/v1/namespaces/wald/endpointslices")["items"]
    ports = {p["name"]: p.get("appProtocol") for s in slices for p in s["ports"]}
    expect("both services lead to it, gRPC as h2c", len(slices) == 2 and ports == {"grpc": "kubernetes.io/h2c", "http": "http"}, ports)
    budget = wait_for(lambda: cluster.get("/apis/policy/v1/namespaces/wald/poddisruptionbudgets/wald")["status"]["disruptionsAllowed"])
    expect("one disruption is allowed", budget == 1)
    succeeded(cluster, "helm test", "test", "wald", "--timeout", "1m")

    # As docs/src/upgrade.md has it.
    succeeded(cluster, "helm upgrade --wait from the version before", "upgrade", "wald", current, "--wait", "--timeout", "2m",
              "--reset-then-reuse-values")
    after = cluster.get(APPS)
    frozen = [{k: v for k, v in s["spec"].items() if k not in MUTABLE} for s in (before, after)]
    expect("nothing that is immutable has changed", frozen[0] == frozen[1] and "volumeClaimTemplates" in frozen[0], ", ".join(frozen[0]))
    settings = cluster.get("/api/v1/namespaces/wald/configmaps/wald")["data"]["wald.toml"]
    expect("a volume without a store is refused from then on", "create_store = false" in settings)
    image = pod(cluster)["spec"]["containers"][0]["image"]
    expect("the pod is of the new version", image == "wald:0.0.2", image)
    expect("its claim is the one before", claim(cluster)["metadata"]["uid"] == kept["metadata"]["uid"])
    succeeded(cluster, "helm test after it", "test", "wald", "--timeout", "1m")

    def version_in_claims(chart):
        path = chart / "templates" / "statefulset.yaml"
        text = path.read_text()
        head, tail = text[: (at := text.index("volumeClaimTemplates"))], text[at:]
        path.write_text(head + tail.replace("wald.selectorLabels", "wald.labels"))

    done = cluster.helm("upgrade", "wald", packaged(directory, "0.0.3", version_in_claims), "--reuse-values")
    expect("a chart with its version in the claims would be refused", done.returncode != 0 and "Forbidden" in said(done))
    refusal(cluster, current)
    uid = pod(cluster)["metadata"]["uid"]
    succeeded(cluster, "an upgrade of nothing", "upgrade", "wald", current, "--wait", "--timeout", "2m", "--reuse-values")
    expect("restarts nothing", pod(cluster)["metadata"]["uid"] == uid)
    succeeded(cluster, "a changed setting", "upgrade", "wald", current, "--wait", "--timeout", "2m", "--reuse-values",
              "--set", "config.auto_create=false")
    expect("restarts the pod", pod(cluster)["metadata"]["uid"] != uid)
    template = cluster.get(APPS)["spec"]["volumeClaimTemplates"]
    done = cluster.helm("upgrade", "wald", current, "--wait", "--timeout", "2m", "--reuse-values", "--set", "persistence.size=200Gi")
    expect("a larger persistence.size is taken, and the claim template stays", done.returncode == 0
           and cluster.get(APPS)["spec"]["volumeClaimTemplates"] == template, said(done)[-300:] if done.returncode else "")
    expect("the upgrade says how to grow the claim", "patch pvc data-wald-0" in said(done) and "200Gi" in said(done))
    several(cluster, current)
    end(cluster, current, kept)


def never_ready(cluster, directory, older, current):
    """The first upgrade of a release whose pod never ran: it has no store yet."""
    succeeded(cluster, "a release without a pod", "install", "early", older, "--set", "replicaCount=0")
    done = cluster.helm("upgrade", "early", current, "--reuse-values", "--dry-run=server")
    expect("its first upgrade may still make a store", done.returncode == 0 and "wald.toml: |" in said(done) and "create_store" not in said(done),
           said(done)[-300:] if done.returncode else "")

    def without_the_hour(chart):
        path = chart / "templates" / "_helpers.tpl"
        text = path.read_text()
        assert '"-1h"' in text
        path.write_text(text.replace('"-1h"', '"1h"'))

    # A pod that is not ready now may have been ready for weeks.
    later = packaged(directory, "0.0.4", without_the_hour)
    done = cluster.helm("upgrade", "early", later, "--reuse-values", "--dry-run=server")
    expect("after an hour a volume without a store is refused", done.returncode == 0 and "create_store = false" in said(done)
           and "config.create_store=true" in said(done), said(done)[-300:] if done.returncode else "")
    succeeded(cluster, "it goes", "uninstall", "early", "--wait")


def refusal(cluster, chart):
    before = cluster.get(APPS)["spec"]
    for number in 2, 3:
        done = cluster.helm("upgrade", "wald", chart, "--reuse-values", "--set", f"replicaCount={number}")
        line = next((line for line in said(done).splitlines() if "replicaCount is" in line), said(done))
        expect(f"replicaCount: {number} is refused", done.returncode != 0 and "needs replica.enabled" in line, line)
    expect("and changed nothing", cluster.get(APPS)["spec"] == before)


def several(cluster, chart):
    """One pod becomes three that share a store in a bucket, and one without a replica again."""
    replica = "replica.enabled=true,replica.url=s3://ledgers/wald"

    def upgraded(what, values):
        return succeeded(cluster, what, "upgrade", "wald", chart, "--wait", "--timeout", "2m", "--reuse-values", "--set", values)

    def refused(what, values, sentence):
        done = cluster.helm("upgrade", "wald", chart, "--reuse-values", "--set", values)
        expect(what, done.returncode != 0 and sentence in said(done), said(done)[-400:])

    refused("three pods are refused while the store is not in a bucket", f"{replica},replicaCount=3", "upgrade with replica.enabled and replicaCount 1 first")
    upgraded("a replica of one pod", replica)
    orphan = "kubectl -n wald delete statefulset wald --cascade=orphan"
    refused("three pods are refused while pods start one after the other", "replicaCount=3", orphan)
    first, policy = pod(cluster)["metadata"]["uid"], cluster.get(APPS)["spec"]["podManagementPolicy"]
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Orphan"}
    status, _, _ = cluster.request("DELETE", APPS, options)
    expect("the StatefulSet goes, and its pod stays", status == 200 and wait_for(lambda: cluster.get(APPS) is None)
           and pod(cluster)["metadata"]["uid"] == first, status)
    upgraded("three pods", "replicaCount=3")
    after = cluster.get(APPS)
    expect("all start at once, and are ready", (policy, after["spec"]["podManagementPolicy"]) == ("OrderedReady", "Parallel")
           and after["status"].get("readyReplicas") == 3, after["status"])
    expect("the first pod is the one before", pod(cluster)["metadata"]["uid"] == first)
    claims = cluster.get("/api/v1/namespaces/wald/persistentvolumeclaims")["items"]
    bound = sorted(item["metadata"]["name"] for item in claims if item["status"]["phase"] == "Bound")
    expect("each has a volume", bound == [f"data-wald-{number}" for number in range(3)], bound)
    budget = wait_for(lambda: cluster.get("/apis/policy/v1/namespaces/wald/poddisruptionbudgets/wald")["status"].get("expectedPods") == 3
                      and cluster.get("/apis/policy/v1/namespaces/wald/poddisruptionbudgets/wald")["status"]["disruptionsAllowed"])
    expect("one disruption is allowed", budget == 1, budget)
    upgraded("one pod again", "replicaCount=1")
    others = [f"/api/v1/namespaces/wald/pods/wald-{number}" for number in (1, 2)]
    expect("removes the others, and keeps the first", wait_for(lambda: not any(map(cluster.get, others))) and pod(cluster)["metadata"]["uid"] == first)
    kept = claim(cluster)["metadata"]["uid"]
    upgraded("no replica any more", "replica.enabled=false,replica.url=")
    settings = cluster.get("/api/v1/namespaces/wald/configmaps/wald")["data"]["wald.toml"]
    expect("keeps the claim, and names no bucket", claim(cluster)["metadata"]["uid"] == kept and "bucket_url" not in settings)
    policy = cluster.get(APPS)["spec"]["podManagementPolicy"]
    expect("the StatefulSet keeps its policy, which Kubernetes refuses to change", policy == "Parallel", policy)


def end(cluster, chart, kept):
    succeeded(cluster, "replicaCount: 0", "upgrade", "wald", chart, "--reuse-values", "--set", "replicaCount=0")
    expect("stops the pod", wait_for(lambda: pod(cluster) is None))
    expect("and keeps the claim", claim(cluster)["metadata"]["uid"] == kept["metadata"]["uid"])
    succeeded(cluster, "helm uninstall --wait", "uninstall", "wald", "--wait", "--timeout", "1m")
    expect("removes the StatefulSet", wait_for(lambda: cluster.get(APPS) is None))
    found = claim(cluster)
    expect("and keeps the claim", found and found["metadata"]["uid"] == kept["metadata"]["uid"]
           and "deletionTimestamp" not in found["metadata"])


@check("helm installs, tests, upgrades, refuses and uninstalls on a real Kubernetes API; the claim stays")
def install(directory):
    with Cluster(directory) as cluster:
        began = time.monotonic()
        cluster.start()
        cluster.must_create(namespace("wald", "restricted"), *definitions(), node("one"), node("two"), runtime_class("gvisor"),
                            *map(volume, ("one", "two", "three")))
        taken = wait_for(lambda: cluster.get("/apis/monitoring.coreos.com/v1") and cluster.get("/apis/cert-manager.io/v1")
                         and cluster.get("/apis/gateway.networking.k8s.io/v1")
                         and cluster.get("/api/v1/namespaces/wald/serviceaccounts/default"))
        version = json.loads(cluster.get("/version", plain=True))["gitVersion"]
        expect(f"Kubernetes {version} serves", taken, f"{time.monotonic() - began:.1f} s")
        admission(cluster)
        packages = Path(directory) / "packages"
        packages.mkdir()
        life(cluster, packages)
