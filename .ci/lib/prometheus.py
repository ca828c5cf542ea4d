"""Shared parts of the checks of grafana/: the files, their queries, a real Prometheus."""

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request

from common import *

DASHBOARDS = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
RULES = ROOT / "grafana" / "alerts" / "wald.rules.yaml"
PROMETHEUS = SCRATCH / "bin" / "prometheus"
PROMTOOL = SCRATCH / "bin" / "promtool"
NODE = SCRATCH / "node"
# Each target is scraped as if it were in two clusters with the same pod addresses.
CLUSTERS = ["east", "west"]
TARGET_LABELS = {"job", "instance", "cluster", "namespace", "pod"}
# Types of dashboards, their compiler, the plots and the driver of the browser.
NPM = ["@grafana/schema@13.2.3", "typescript@5.9.3", "uplot@1.6.32", "playwright-core@1.65.1"]


def packages():
    """Installs the packages of npm, once."""
    done = NODE / "installed"
    if done.exists() and done.read_text().split() == NPM:
        return
    NODE.mkdir(parents=True, exist_ok=True)
    (NODE / "package.json").write_text("{}\n")
    run("npm", "install", "--silent", "--no-save", "--no-package-lock", "--ignore-scripts", *NPM, cwd=NODE, check=True)
    done.write_text("\n".join(NPM))


def queries(board):
    """Each query of a dashboard, with the title of its panel or annotation."""
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for annotation in board["annotations"]["list"]:
        if "target" in annotation:
            yield f"annotation {annotation['name']}", annotation["target"]["expr"]


def rules():
    """The alerts as Prometheus itself reads them."""
    with Prometheus([], rules=True) as prometheus:
        groups = prometheus.get("rules")["groups"]
    return [rule for group in groups for rule in group["rules"]]


class Prometheus:
    """A real Prometheus on a free port that scrapes each second; targets may change while it runs."""

    def __init__(self, targets, rules=False):
        self.directory = scratch()
        here = Path(self.directory.name)
        self.targets = here / "targets.json"
        self.scrape(targets)
        (here / "prometheus.yml").write_text(json.dumps({
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "5s"},
            "rule_files": [str(RULES)] if rules else [],
            "scrape_configs": [{"job_name": "wald", "file_sd_configs": [{"files": [str(self.targets)], "refresh_interval": "1s"}]}],
        }))
        self.process = subprocess.Popen(
            [str(PROMETHEUS), f"--config.file={here}/prometheus.yml", f"--storage.tsdb.path={here}/data",
             "--web.listen-address=127.0.0.1:0"], stderr=subprocess.PIPE, text=True)
        self.said = []
        address, ready = None, False
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r'msg="Listening on" address=(\S+)', line):
                address = found[1]
            ready |= "Server is ready" in line
            # In either order.
            if address and ready:
                break
        threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True).start()
        if address is None or self.process.poll() is not None:
            raise SystemExit(f"Prometheus does not start: {self.said[-3:]}")
        self.address = address

    def scrape(self, targets):
        """Scrapes these targets from now on, in each cluster: address, job and instance of each."""
        text = json.dumps([
            {"targets": [address], "labels": {"job": job, "instance": instance, "cluster": cluster, "namespace": "shop", "pod": f"{instance}-0"}}
            for address, job, instance in targets for cluster in CLUSTERS])
        new = self.targets.with_suffix(".new")
        new.write_text(text)
        new.rename(self.targets)

    def get(self, what, **parameters):
        """One call of the API."""
        address = f"http://{self.address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=60) as page:
                return json.load(page)["data"]
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{parameters}: {error.read().decode()}") from error

    def range(self, query, start, end, step):
        """Series of a query over a time."""
        return self.get("query_range", query=query, start=start, end=end, step=step)["result"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.directory.cleanup()


__all__ = [name for name in dir() if not name.startswith("_")]
