"""Runs a real Kubernetes API: etcd, API server, controllers and scheduler, on free
ports below a directory. kwok plays the nodes: pods are scheduled and become ready, but nothing
runs in them.
"""

import secrets
import socket
import ssl
import urllib.error
import urllib.request

from deploy import *

KWOK = pinned("kwok")
OPERATOR = "v0.85.0"
CERT_MANAGER = "v1.19.1"
GATEWAY = "v1.4.0"
PLURALS = {"NetworkPolicy": "networkpolicies", "StorageClass": "storageclasses", "Ingress": "ingresses",
           "RuntimeClass": "runtimeclasses"}
CLUSTER_WIDE = {"RuntimeClass", "Namespace", "Node", "PersistentVolume", "CustomResourceDefinition"}


def module(name, version):
    """Path of a Go module of this version, fetched once."""
    done = run("go", "mod", "download", "-json", f"{name}@{version}", cwd=SCRATCH, check=True, env=dict(os.environ))
    return Path(json.loads(done.stdout)["Dir"])


class Cluster:
    """The API and its processes; a context that ends all of them."""

    def __init__(self, directory):
        self.directory = directory
        self.token = secrets.token_hex(16)
        self.processes = []
        self.etcd, peer, self.port, self.kwok = free_ports(4)
        (directory / "tokens").write_text(f"{self.token},admin,admin,system:masters\n")
        run("openssl", "genrsa", "-out", directory / "key", "2048", check=True)
        self.kubeconfig = directory / "kubeconfig"
        self.kubeconfig.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "it",
            "clusters": [{"name": "it", "cluster": {"server": f"https://127.0.0.1:{self.port}",
                                                    "insecure-skip-tls-verify": True}}],
            "users": [{"name": "it", "user": {"token": self.token}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it", "namespace": "wald"}}]}))
        (directory / "stages.yaml").write_text(stages())
        self.context = ssl.create_default_context()
        self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE
        self.peer = peer

    def start(self):
        etcd, api = f"http://127.0.0.1:{self.etcd}", BIN / "cluster"
        self._spawn("etcd", api, "etcd", "--data-dir", self.directory / "etcd", "--listen-client-urls", etcd,
                    "--advertise-client-urls", etcd, "--listen-peer-urls", f"http://127.0.0.1:{self.peer}",
                    "--initial-advertise-peer-urls", f"http://127.0.0.1:{self.peer}",
                    "--initial-cluster", f"default=http://127.0.0.1:{self.peer}", "--unsafe-no-fsync")
        self._spawn("apiserver", api, "apiserver", "--etcd-servers", etcd, "--bind-address", "127.0.0.1",
                    "--secure-port", self.port, "--cert-dir", self.directory / "certificates",
                    "--token-auth-file", self.directory / "tokens", "--service-cluster-ip-range", "10.96.0.0/16",
                    "--service-account-issuer", "https://kubernetes.default.svc",
                    "--service-account-key-file", self.directory / "key",
                    "--service-account-signing-key-file", self.directory / "key")
        if not wait_for(lambda: self.get("/readyz?verbose", plain=True), 120):
            raise SystemExit(f"the API does not get ready: {(self.directory / 'apiserver.log').read_text()[-3000:]}")
        common = ["--kubeconfig", self.kubeconfig, "--leader-elect=false", "--secure-port", "0"]
        self._spawn("controllers", api, "controllers", *common, "--service-account-private-key-file", self.directory / "key")
        self._spawn("scheduler", api, "scheduler", *common)
        self._spawn("kwok", BIN / "kwok", "--kubeconfig", self.kubeconfig, "--manage-all-nodes=true",
                    "--config", self.directory / "stages.yaml", "--server-address", f"127.0.0.1:{self.kwok}")
        return self

    def _spawn(self, name, *command):
        log = open(self.directory / f"{name}.log", "wb")
        self.processes.append(subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=log,
                                               stderr=log, cwd=self.directory, start_new_session=True))

    def request(self, method, path, body=None, kind="application/json"):
        """One request: (status, answer, warnings)."""
        request = urllib.request.Request(f"https://127.0.0.1:{self.port}{path}", method=method,
                                         data=None if body is None else json.dumps(body).encode(),
                                         headers={"Authorization": f"Bearer {self.token}", "Content-Type": kind})
        try:
            with urllib.request.urlopen(request, context=self.context, timeout=30) as answer:
                return answer.status, answer.read(), answer.headers.get_all("Warning") or []
        except urllib.error.HTTPError as error:
            return error.code, error.read(), error.headers.get_all("Warning") or []
        except OSError as error:
            return 0, str(error).encode(), []

    def get(self, path, plain=False):
        """The object or text at a path, or None."""
        status, answer, _ = self.request("GET", path)
        return (answer if plain else json.loads(answer)) if status == 200 else None

    def create(self, item, namespace="wald", query=""):
        """Creates an object: (whether it was accepted, message, warnings)."""
        status, answer, warnings = self.request("POST", collection(item, namespace) + query, item)
        # Without JSON it is no answer of a kind that the API knows.
        told = json.loads(answer).get("message", "") if answer.startswith(b"{") else answer.decode()
        return status in (200, 201), told, warnings

    def must_create(self, *items):
        for item in items:
            taken, message, _ = self.create(item)
            if not taken and "already exists" not in message:
                raise SystemExit(f"{item['kind']} is not taken: {message}")

    def helm(self, *arguments, **options):
        return helm(*arguments, "--kubeconfig", self.kubeconfig, "--namespace", "wald", **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Nothing in it needs a clean end, which would take half a minute.
        for process in reversed(self.processes):
            process.kill()
            process.wait()


def free_ports(count):
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def wait_for(condition, seconds=60):
    """Waits for a condition; returns its last value."""
    until = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def stages():
    """Settings of kwok for nodes and pods: its default, but pods of `helm test` succeed."""
    directory = module("sigs.k8s.io/kwok", KWOK) / "kustomize" / "stage"
    paths = ["node/fast/node-initialize", "node/heartbeat/node-heartbeat", "pod/fast/pod-ready", "pod/fast/pod-delete"]
    texts = [(directory / f"{path}.yaml").read_text() for path in paths]
    complete = (directory / "pod/fast/pod-complete.yaml").read_text()
    test = complete.replace("'.metadata.ownerReferences.[].kind'", "'.metadata.annotations[\"helm.sh/hook\"]'").replace("'Job'", "'test'")
    assert test.count("helm.sh/hook") == 1 and "'test'" in test
    return "\n---\n".join([*texts, test])


def definitions():
    """The Prometheus operator's monitors and PrometheusRule, cert-manager's Certificate, and the routes of the Gateway API."""
    operator = module("github.com/prometheus-operator/prometheus-operator", OPERATOR) / "example" / "prometheus-operator-crd"
    gateway = module("sigs.k8s.io/gateway-api", GATEWAY) / "config" / "crd" / "standard"
    issuer = module("github.com/cert-manager/cert-manager", CERT_MANAGER) / "deploy" / "crds"
    paths = [*(operator / f"monitoring.coreos.com_{kind}.yaml" for kind in ("servicemonitors", "podmonitors", "prometheusrules")),
             *(gateway / f"gateway.networking.k8s.io_{kind}.yaml" for kind in ("grpcroutes", "httproutes")),
             issuer / "cert-manager.io_certificates.yaml"]
    return [documents(path.read_bytes())[0] for path in paths]


def collection(item, namespace):
    """Path of objects of this kind."""
    version, kind = item["apiVersion"], item["kind"]
    plural = PLURALS.get(kind, kind.lower() + "s")
    start = "/api/v1" if version == "v1" else f"/apis/{version}"
    return f"{start}/{plural}" if kind in CLUSTER_WIDE else f"{start}/namespaces/{namespace}/{plural}"


def node(name):
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
            "status": {"allocatable": {"cpu": "8", "memory": "32Gi", "pods": "110"},
                       "capacity": {"cpu": "8", "memory": "32Gi", "pods": "110"}}}


def volume(name):
    """A volume for any claim without a class. No pod ever mounts it."""
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
            "spec": {"capacity": {"storage": "200Gi"}, "accessModes": ["ReadWriteOnce"],
                     "hostPath": {"path": "/nowhere"}, "persistentVolumeReclaimPolicy": "Retain"}}


def runtime_class(name):
    return {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": name}


def namespace(name, level):
    kinds = ("enforce", "warn", "audit")
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {
        "name": name, "labels": {f"pod-security.kubernetes.io/{kind}": level for kind in kinds}}}


__all__ = [name for name in dir() if not name.startswith("_")]
