"""Tests the dashboards and alerts with a real Prometheus. It scrapes daemons under load and with
faults for two minutes. Then every query of every panel and alert must answer with data,
alerts must have fired for exactly the faulty daemons, and a browser draws each dashboard
to a picture (target/ci/pictures). Needs root, for a file system of its own.
"""

import json
import math
import re

from certificates import Authority, files
from common import *
from prometheus import *

SECONDS = 115
# As Grafana computes them for a scrape each second and a step of 2 s.
STEP, RATE_SECONDS = 2, 4
SMALL = ["--segment-bytes", "1MiB", "--max-batch-bytes", "256KiB", "--max-record-bytes", "128KiB"]
# Each alert's condition is provoked; these alerts also have enough time to fire.
FIRE = {
    "WaldDown": "gone", "WaldJournalFailed": "failed", "WaldDamage": "damaged", "WaldChecksumFailure": "damaged",
    "WaldDurableLag": "stalled", "WaldDiskFull": "full", "WaldRestarts": "restarted", "WaldUncleanStart": "restarted",
    "WaldErrorBudgetBurn": "failed",
}
# No daemon here has these faults. Their alerts fire in the tests of grafana/alerts; here their metrics must exist.
UNSEEN = {"WaldUnattributedLoss", "WaldHeldBack", "WaldClockAhead", "WaldUnreadable", "WaldIndexingFailed", "WaldArchiveFails", "WaldBackupOld", "WaldCursorHolds", "WaldAcceptsWait",
          "WaldCertificateExpires", "WaldCertificateExpiresSoon", "WaldRevocationListOld", "WaldReloadFails", "WaldCredentialsFail", "WaldRequestsDenied", "WaldAuditFails", "WaldTenantNearQuota", "WaldTenantRateRefused"}
# Its query compares with the day before.
OF_DAYS = {"WaldEncryptionStuck"}
# No daemon here has a bucket, so these have no data.
REPLICA = "wald-replica"
OF_REPLICA = {"WaldReplicaLag", "WaldReplicaTakenOver", "WaldNoStandBy", "WaldLeaseOld"}
# Panels about faults: a constant 0 counts as no data here.
FAULTS = ["Journal", "Damaged records", "Error ratio", "Errors", "Refused calls", "Conditions that did not hold",
          "Durable lag", "Checksum failures", "Quarantined records", "Answers with data loss",
          "Calls refused by damage", "Journal failed", "Segments closed to open others", "Delivery lag"]


def waited(what, holds):
    """Waits for a condition that all later steps need."""
    if not wait_until(holds):
        raise SystemExit(f"{what} never came")


def append(daemon, log, text="x", **more):
    return daemon.call("wald.v1.WalService/Append", {"log": log, "record": {"text": text}, **more})


class Fleet:
    """Daemons by name. Prometheus scrapes them under that name, also after a restart on another port."""

    def __init__(self, directory, prometheus):
        self.directory, self.prometheus = Path(directory), prometheus
        self.daemons, self.helpers, self.threads, self.over = {}, [], [], threading.Event()

    def start(self, name, *arguments, data=None):
        data = data or self.directory / name
        data.mkdir(exist_ok=True)
        daemon = self.daemons[name] = Daemon(data / "data", *arguments)
        self.prometheus.scrape([(each.http, "well" if label == "load" else "hurt", label) for label, each in self.daemons.items()])
        return daemon

    def seen(self, name, query):
        """Waits until Prometheus has a sample of a daemon, in each cluster: it scrapes them at different times."""
        query = query.replace("{", f'{{instance="{name}", ' if "{" in query else "{", 1)
        query = query if "{" in query else re.sub(r"^(\w+)", rf'\1{{instance="{name}"}}', query)
        clusters = lambda: {one["metric"]["cluster"] for one in self.prometheus.get("query", query=query)["result"]}
        waited(f"{query} of {name}", lambda: clusters() == set(CLUSTERS))

    def strace(self, name, *arguments):
        daemon = self.daemons[name]
        tracer = Strace(daemon, "-e", "trace=fdatasync", "-e", *arguments)
        self.helpers.append(tracer.process)
        return tracer

    def behind(self, work):
        """Repeats an action until the time is over."""
        def go():
            while not self.over.is_set():
                work()
        self.threads.append(threading.Thread(target=go, daemon=True))
        self.threads[-1].start()

    def end(self):
        self.over.set()
        # strace first: it holds a daemon in the call that it delays.
        for helper in self.helpers:
            if helper.poll() is None:
                helper.kill()
                helper.wait()
        for daemon in self.daemons.values():
            if daemon.process.poll() is None:
                daemon.kill()
        for thread in self.threads:
            thread.join()


def load(daemon, appends, writers, durability="unspecified", size=200):
    return run(LOAD, daemon.endpoint, "--appends", appends, "--writers", writers, "--logs", 50,
               "--bytes", size, "--durability", durability)


def busy(fleet):
    """The healthy daemon: appends of all levels, scans, followers, trims, mistakes of callers."""
    daemon = fleet.start("load", *SMALL, "--max-open-segments", "2", "--retention-interval", "1s",
                         "--cursor-lag-logs", "load/*")
    load(daemon, 100, 4)
    daemon.walctl("log", "update", "load/6", "--max-records", "100")
    # A consumer that never returns.
    daemon.walctl("log", "update", "load/7", "--max-records", "100", "--respect-cursors")
    daemon.walctl("cursor", "set", "load/7", "gone", "1")
    for log in ("load/1", "load/2"):
        fleet.helpers.append(subprocess.Popen([WALCTL, "tail", log, "--output", "jsonl", "--endpoint", daemon.endpoint],
                                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=clean_environment()))
    # Each of RATE_SECONDS has a part of each load.
    fleet.behind(lambda: (load(daemon, 1500, 8), fleet.over.wait(2)))
    fleet.behind(lambda: (load(daemon, 400, 2, "written", 2000), fleet.over.wait(2)))
    fleet.behind(lambda: (load(daemon, 100, 1, "accepted"), fleet.over.wait(2)))

    def reader():
        daemon.walctl("scan", "--prefix", "load/1", "--output", "jsonl")
        daemon.call("wald.v1.WalService/Read", {"log": "load/3", "lsn": 0})
        daemon.call("wald.v1.WalService/Read", {"log": "nobody"})
        daemon.call("wald.v1.WalService/AppendBatch", {"batches": [{"log": "two", "records": [{"text": "x"}, {"text": "y"}]}]})
        append(daemon, "load/4", condition={"expected_lsn": 0})
        append(daemon, "two", condition={"must_not_exist": True})
        daemon.walctl("trim", "load/5", "--before", "10")
        daemon.walctl("sync")
        daemon.walctl("status")
        daemon.walctl("backup", f"{daemon.data_dir}.backups", "--keep", "1")
        fleet.over.wait(2)

    fleet.behind(reader)


def secured(fleet):
    """A port with TLS, a revocation list and a tenant with limits, which nobody uses."""
    authority = Authority(fleet.directory)
    pem, key = authority.issue(fleet.directory / "tls", "server")
    revoked = fleet.directory / "revoked.pem"
    revoked.write_bytes(authority.crl())
    rules = fleet.directory / "auth.toml"
    rules.touch(mode=0o600)
    limits = ", ".join(f"{name} = 1000" for name in (
        "append_bytes_per_second", "appends_per_second", "read_bytes_per_second", "reads_per_second", "logs", "producers",
        "cursors", "stored_bytes", "followers", "connections", "inflight_bytes"))
    rules.write_text(f'[tenant.team]\nprefix = "team/"\nlimits = {{ {limits} }}\n')
    clients = ["--tls-client-auth", "optional", "--tls-client-ca", authority.pem, "--tls-client-crl", revoked]
    fleet.start("secured", *SMALL, *files(pem, key), *clients, "--auth-file", rules, "--metrics-open")


def stalled(fleet):
    """A flush that does not return."""
    daemon = fleet.start("stalled", *SMALL)
    append(daemon, "a")
    fleet.seen("stalled", "wald_flush_duration_seconds_count")
    fleet.strace("stalled", f"inject=fdatasync:delay_enter={10 * SECONDS}000000")
    append(daemon, "a", durability="DURABILITY_WRITTEN")


def slow(fleet):
    """A slow disk, a small queue, and a sorter with a low limit."""
    daemon = fleet.start("slow", *SMALL, "--max-inflight-bytes", "256KiB",
                         "--sorter-step-bytes", "4MiB", "--sorter-bytes-per-second", "64KiB")
    load(daemon, 50, 2)
    fleet.strace("slow", "inject=fdatasync:delay_exit=200000")
    # A stream of appends waits for room before it is read. Calls of their own are refused.
    calls = [WALBENCH, "append", "--endpoint", daemon.endpoint, "--in-flight", "40", "--record-bytes", "20000", "--duration", "1s", "--warm-up", "0s"]
    fleet.behind(lambda: (run(*calls), fleet.over.wait(0.2)))


def failed(fleet):
    """A flush that returns an error, and readers that stay."""
    daemon = fleet.start("failed", *SMALL, "--on-flush-failure", "read_only", "--marker-delay", "1h")
    append(daemon, "a")
    fleet.seen("failed", "wald_journal_failed")
    fleet.strace("failed", "inject=fdatasync:error=EIO")
    code, _, text = append(daemon, "a")
    expect("a flush that fails is no ack", code != 0 and "JOURNAL_FAILED" in text)
    fleet.behind(lambda: (append(daemon, "a"), fleet.over.wait(0.5)))


def full(fleet, mount):
    """A small disk that fills."""
    daemon = fleet.start("full", *SMALL, "--pool-segments", "1", data=mount)
    fleet.seen("full", "wald_disk_free_bytes")

    def fill():
        load(daemon, 100, 2, size=20_000)
        fleet.over.wait(0.5)

    fleet.behind(fill)


def damaged(fleet):
    """One byte flipped in a finished segment, found by a reader."""
    settings = ["--segment-bytes", "64KiB", "--max-batch-bytes", "16KiB", "--max-record-bytes", "8KiB", "--max-open-segments", "1",
                # Scrubbing would find it before the first sample.
                "--scrub-bytes-per-second", "0",
                # The store is at its bounds: one log (WaldStoreNearBound), one producer (WaldLogProducersNearBound).
                "--max-logs", "1", "--max-producers-per-log", "1"]
    daemon = fleet.start("damaged", *settings)
    for number in range(20):
        append(daemon, "a", f"record number {number} " + "x" * 7000,
               condition={"producer": {"id": "p", "sequence": number}})
    # Recent appends are read from memory, not from the disk; a restart clears it.
    daemon.stop()
    flipped = 0
    for path in (fleet.directory / "damaged" / "data").rglob("*"):
        at = path.read_bytes().find(b"record number 3 ") if path.is_file() else -1
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"R")
            flipped += 1
    daemon = fleet.start("damaged", *settings)
    # The counter needs a sample from before, or there is no increase.
    fleet.seen("damaged", f'timestamp(wald_build_info{{job="hurt"}}) > {time.time()}')
    code, _, text = daemon.call("wald.v1.WalService/Read", {"log": "a", "lsn": 3})
    expect("a flipped byte is data loss, never data", flipped == 1 and code != 0 and "DataLoss" in text, flipped)
    fleet.behind(lambda: (daemon.call("wald.v1.WalService/Read", {"log": "a", "lsn": 3}), fleet.over.wait(1)))


def restarted(fleet):
    """Killed three times."""
    first = None
    for starts in range(4):
        if starts > 0:
            fleet.daemons["restarted"].kill()
        daemon = fleet.start("restarted", *SMALL)
        first = first or daemon.start["recovery_epoch"]
        append(daemon, "a")
        fleet.seen("restarted", f"wald_recovery_epoch == {first + starts}")


def gone(fleet):
    fleet.start("gone", *SMALL)
    fleet.seen("gone", "wald_build_info")
    fleet.daemons["gone"].kill()


def numbers(series):
    """The values of an answer that are numbers."""
    return [float(value) for one in series for _, value in one["values"] if math.isfinite(float(value))]


def substituted(query):
    """A query as Grafana sends it with everything selected."""
    query = query.replace("$__rate_interval_ms", str(1000 * RATE_SECONDS)).replace("$__rate_interval", f"{RATE_SECONDS}s")
    for name, everything in (("$cluster", ".*"), ("$namespace", ".*"), ("$job", ".+"), ("$instance", ".+")):
        query = query.replace(name, everything)
    return query


def panels_answer(prometheus, began, ended):
    """Runs every query of every dashboard; returns the answers for the pictures."""
    asked, empty, idle, boards = 0, [], [], {}
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        answers = {}
        for title, query in queries(board):
            series = prometheus.range(substituted(query), began, ended, STEP)
            answers[query] = series
            asked += 1
            # A query that Prometheus does not understand has ended the check.
            if path.stem == REPLICA:
                continue
            found = numbers(series)
            if not found:
                empty.append(f"{path.name}: {title}: {query}")
            # No thread panics here.
            elif title in FAULTS and not any(found) and "wald_engine_panics_total" not in query:
                idle.append(f"{path.name}: {title}: {query}")
        if path.stem != REPLICA:
            boards[path.stem] = (board, answers)
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
                values = {one["metric"].get(label) for one in prometheus.get("query", query=substituted(metric))["result"]}
                expect(f"{path.name}: the variable {variable['name']} has values", values and None not in values, len(values))
    expect("every query of every panel and annotation answers with data", not empty, "\n".join(empty) or f"{asked} queries")
    expect("panels about faults show the faults", not idle, "\n".join(idle) or f"{len(FAULTS)} panels")
    return boards


def firing(prometheus):
    """Names of the alerts that fire now."""
    return {one["metric"]["alertname"] for one in prometheus.get("query", query='ALERTS{alertstate="firing"}')["result"]}


def rules(prometheus):
    return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]


def unanswered(prometheus, began, ended, asked=None):
    """The alerts of `asked`, or all, whose query had no answer yet."""
    def is_empty(rule):
        query = re.sub(r" (==|<|>) -?[\d.e+]+$", "", rule["query"]) if rule["name"] in UNSEEN else rule["query"]
        return not numbers(prometheus.range(query, began, ended, 1))
    return [rule for rule in asked or rules(prometheus) if rule["name"] not in OF_REPLICA | OF_DAYS and is_empty(rule)]


def alerts_fire(prometheus, began, ended):
    """Every alert's query must answer; the expected alerts fire, and none fires for a healthy daemon."""
    empty = [f"{rule['name']}: {rule['query']}" for rule in unanswered(prometheus, began, ended)]
    expect("every alert's query has answered", not empty, "\n".join(empty) or f"{len(rules(prometheus))} alerts")
    states = {"firing": {}, "pending": {}}
    well, bare, clusters = set(), set(), {}
    for one in prometheus.range("ALERTS", began, ended, 1):
        metric = one["metric"]
        states[metric["alertstate"]].setdefault(metric["alertname"], set()).add(metric.get("instance", metric["job"]))
        if metric["job"] == "well" and metric["alertstate"] == "firing":
            well.add(metric["alertname"])
        if not TARGET_LABELS <= metric.keys():
            bare.add(metric["alertname"])
        elif metric["alertstate"] == "firing":
            clusters.setdefault((metric["alertname"], metric["instance"]), set()).add(metric["cluster"])
    for alert, name in FIRE.items():
        expect(f"{alert} fired for {name}", name in states["firing"].get(alert, ()), states["firing"].get(alert, "never"))
    expect("no alert fired for the daemon that is well", not well, well or "")
    expect("each alert has all labels of its target", not bare, bare or "")
    alone = {alert for alert, seen in clusters.items() if alert[0] in FIRE and len(seen) < len(CLUSTERS)}
    expect("each alert fired in every cluster", not alone, alone or f"{len(clusters)} in {len(CLUSTERS)} clusters")
    print(f"pending: {json.dumps({alert: sorted(names) for alert, names in states['pending'].items()})}")


def beginnings(values):
    """Start of an answer, also after a pause."""
    times = [at for at, _ in values]
    return [at for at, before in zip(times, [None, *times]) if before is None or at - before > STEP]


def short(metric, legend):
    """Name of a series as in a legend."""
    name = re.sub(r"\{\{(\w+)\}\}", lambda found: metric.get(found[1], ""), legend)
    return name or ", ".join(f"{k}={v}" for k, v in metric.items() if k != "__name__")


def draw(boards, began, ended):
    """Draws each dashboard from the answers."""
    packages()
    pictures = SCRATCH / "pictures"
    pictures.mkdir(exist_ok=True)
    for name, (board, answers) in boards.items():
        panels = []
        for panel in board["panels"]:
            shown = {key: panel.get(key) for key in ("type", "title", "gridPos", "fieldConfig", "options")}
            shown["series"] = [{"name": short(one["metric"], target["legendFormat"]), "values": one["values"], "le": one["metric"].get("le")}
                               for target in panel.get("targets", []) for one in answers[target["expr"]]]
            panels.append(shown)
        marks = [at for annotation in board["annotations"]["list"] if "target" in annotation
                 for one in answers[annotation["target"]["expr"]] for at in beginnings(one["values"])]
        file = SCRATCH / f"{name}.drawing.json"
        file.write_text(json.dumps({"title": board["title"], "from": began, "to": ended, "step": STEP, "marks": marks, "panels": panels}))
        picture = pictures / f"{name}.png"
        done = run("node", ROOT / ".ci" / "checks" / "ops" / "draw.mjs", NODE, file, picture)
        blank = json.loads(done.stdout)["blank"] if done.returncode == 0 else done.stderr.decode()[-1000:]
        expect(f"{name} is drawn, and no panel is blank", blank == [], blank or f"{picture.relative_to(TARGET.parent)}, {picture.stat().st_size} bytes")


def small_disk(directory):
    """A file system of 48 MiB in a file."""
    image, mount = Path(directory) / "disk.img", Path(directory) / "disk"
    with image.open("wb") as file:
        file.truncate(48 << 20)
    mount.mkdir()
    run("mkfs.ext4", "-q", "-m", "0", image, check=True)
    run("mount", "-o", "loop", image, mount, check=True)
    return mount


@check("Every query of dashboards and alerts has data, and alerts fire for exactly the faulty daemons")
def dashboards(directory):
    with Prometheus([], rules=True) as prometheus:
        fleet = Fleet(directory, prometheus)
        mount = small_disk(directory)
        try:
            began = time.time()
            busy(fleet)
            stalled(fleet)
            gone(fleet)
            secured(fleet)
            for trouble in (slow, failed, damaged, restarted):
                trouble(fleet)
            full(fleet, mount)
            # Rates and trends need time; alerts that must hold for a minute, and a busy machine, may need more.
            while time.time() < began + SECONDS:
                time.sleep(1)
            # An alert that has answered is not asked again: its query over the whole time costs the processor much.
            silent = None
            while time.time() < began + 2 * SECONDS and (
                    set(FIRE) - firing(prometheus) or (silent := unanswered(prometheus, began, time.time(), silent))):
                time.sleep(1)
            ended = time.time()
            boards = panels_answer(prometheus, began, ended)
            alerts_fire(prometheus, began, ended)
        finally:
            fleet.end()
            run("umount", mount)
        draw(boards, began, ended)
