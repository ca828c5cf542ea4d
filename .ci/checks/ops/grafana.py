"""Tests of grafana/ that need no long run of Wald. Dashboards match Grafana's own
types (@grafana/schema, checked by TypeScript), and are complete and findable. Alerts pass promtool and
its tests: each has one that fires, one that does not, and a runbook. /metrics is clean.
"""

import json
import re
import urllib.request

from common import *
from prometheus import *


# Grafana's types name options by enumerations; JSON has their values.
TYPES = """
import type { AnnotationQuery, Dashboard, DataQuery, Panel, RowPanel, VariableModel } from '@grafana/schema';
import type * as heat from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as time from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
type Plain<T> = T extends string ? `${T}` : T extends Array<infer U> ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
// What the plugin for Prometheus adds; its types are not in the package.
interface Query extends DataQuery { expr: string; legendFormat?: string; format?: 'heatmap'; range?: boolean; instant?: boolean; }
type Of<Kind extends string, Options, Custom> = Omit<Plain<Panel>, 'type' | 'options' | 'fieldConfig' | 'targets'> & {
  type: Kind; title: string; description: string; options: Plain<Options>; targets: Query[];
  fieldConfig: { defaults: Omit<Plain<NonNullable<Panel['fieldConfig']>['defaults']>, 'custom'> & { unit: string; custom?: Plain<Custom> };
    overrides: Plain<NonNullable<Panel['fieldConfig']>['overrides']> } };
type Shown = Of<'timeseries', time.Options, time.FieldConfig> | Of<'stat', stat.Options, never>
  | Of<'heatmap', heat.Options, heat.FieldConfig>;
type Annotation = Omit<Plain<AnnotationQuery>, 'target'> & { target?: Query; titleFormat?: string; textFormat?: string; tagKeys?: string };
type Board = Omit<Plain<Dashboard>, 'panels' | 'annotations' | 'templating'> & {
  uid: string; title: string; description: string; panels: (Shown | Plain<RowPanel>)[];
  annotations: { list: Annotation[] }; templating: { list: Plain<VariableModel>[] } };
"""
TESTS = ["wald.test.yaml", "wald.days.test.yaml"]
# The types must find each mistake, or they find nothing.
MISTAKES = [
    ("an unknown key", '"gridPos":', '"gridPosition":'),
    ("a value that is none", '"showPoints": "never"', '"showPoints": "nevr"'),
    ("a panel without a unit", '"unit": "reqps",', ""),
    ("a number as text", '"schemaVersion": 39', '"schemaVersion": "39"'),
]


def typed(name, text):
    """Whether a dashboard matches the types, and TypeScript's output."""
    (NODE / f"{name}.ts").write_text(f"{TYPES}\nconst board: Board = {text};\nexport default board;\n")
    done = run("node_modules/.bin/tsc", "--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext",
               "--moduleResolution", "nodenext", "--target", "es2022", f"{name}.ts", cwd=NODE)
    return done.returncode == 0, done.stdout.decode()[-2000:]


@check("Dashboards match Grafana's own types")
def dashboards_are_typed():
    packages()
    for path in DASHBOARDS:
        holds, said = typed(path.stem, path.read_text())
        expect(f"{path.name} matches Grafana's types", holds, "" if holds else said)
    text = DASHBOARDS[0].read_text()
    for what, right, wrong in MISTAKES:
        holds, said = typed("mistake", text.replace(right, wrong, 1))
        expect(f"they find {what}", not holds and "error TS" in said and right in text)


@check("Dashboards are complete and findable")
def dashboards_are_complete():
    uids = [json.loads(path.read_text())["uid"] for path in DASHBOARDS]
    expect("each dashboard has a uid of its own", len(set(uids)) == len(uids) and all(uids), uids)
    counted = {2: "two", 3: "three", 4: "four"}[len(DASHBOARDS)]
    expect(f"README.md counts {counted}", f"has {counted} dashboards" in " ".join((ROOT / "README.md").read_text().split()))
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        panels = [panel for panel in board["panels"] if panel["type"] != "row"]
        ids = [panel["id"] for panel in board["panels"]]
        expect(f"{path.name}: panels have ids and titles of their own", len(set(ids)) == len(ids)
               and len({panel["title"] for panel in panels}) == len(panels), f"{len(panels)} panels")
        bare = [panel["title"] for panel in panels if not re.search(r"\b[Ww]hen\b", panel["description"])]
        expect(f"{path.name}: each description says what to do when it changes", not bare, bare or "")
        heeded = ("$cluster", "$namespace", "$job", "$instance")
        exact = [query for _, query in queries(board) if not all(name in query for name in heeded)]
        expect(f"{path.name}: each query heeds the variables", not exact, exact or "")
        named = [query for _, query in queries(board) if re.search(r"\bon ?\(|\bby \((?!cluster, namespace)[^)]*\b(job|instance)\b", query)]
        expect(f"{path.name}: no query takes two clusters for one", not named, named or "")
        fixed = [query for title, query in queries(board) if re.search(r"(rate|increase)\([^[]*\[(?!\$__rate_interval)", query)]
        expect(f"{path.name}: each rate is over $__rate_interval", not fixed, fixed or "")
        taken = {}
        for panel in board["panels"]:
            at = panel["gridPos"]
            for cell in [(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]:
                taken.setdefault(cell, []).append(panel["title"])
        expect(f"{path.name}: no panel covers another", all(len(there) == 1 for there in taken.values())
               and max(x for x, _ in taken) < 24)
        expect(f"{path.name}: it leads to the other", any("wald" in link["tags"] for link in board["links"])
               and "wald" in board["tags"])
        named = set(re.findall(r"runbook(?:s)? (Wald\w+)", path.read_text())) | set(re.findall(r", (Wald\w+)\)", path.read_text()))
        expect(f"{path.name}: the runbooks it names are there", named <= anchors(), named - anchors() or len(named))


def anchors():
    """Headings of the runbooks that are names of alerts."""
    return set(re.findall(r"^### (Wald\w+)$", (ROOT / "grafana" / "README.md").read_text(), re.M))


def in_two_clusters(tests):
    """The tests with each series in two clusters, and each alert expected in both with all labels of the target."""
    clusters = [{"cluster": cluster, "namespace": "shop", "pod": "wald-0"} for cluster in CLUSTERS]
    lines, item = [], None
    source = tests.splitlines()
    for at, line in enumerate(source):
        # An expected alert ends with the first line that is not deeper.
        if item is not None and not line.startswith(" " * 12):
            for labels in clusters:
                more = [f"              {name}: {value}" for name, value in labels.items()]
                lines += [item[0], *more, *item[1:]]
            item = None
        if line == "          - exp_labels:":
            item = [line]
        elif item is not None:
            item.append(line)
        elif series := re.fullmatch(r"(      - series: '\w+\{)(.*\}')", line):
            for labels in clusters:
                more = "".join(f'{name}="{value}", ' for name, value in labels.items())
                lines += [f"{series[1]}{more}{series[2]}", *([source[at + 1]] if labels is clusters[0] else [])]
        else:
            lines.append(line)
    if item is not None:
        for labels in clusters:
            more = [f"              {name}: {value}" for name, value in labels.items()]
            lines += [item[0], *more, *item[1:]]
    return "\n".join(lines) + "\n"


@check("Each alert passes promtool: one test fires, one does not, and it has a runbook")
def alerts_hold():
    done = run(PROMTOOL, "check", "rules", RULES)
    expect("promtool check rules", done.returncode == 0, done.stdout.decode().strip().splitlines()[-1] if done.stdout else done.stderr.decode())
    tests = [RULES.with_name(name) for name in TESTS]
    # It takes 50 s of processor time. Other steps go first, so on a busy machine it waits for minutes.
    done = run(PROMTOOL, "test", "rules", *tests, timeout=1200)
    expect("promtool test rules", done.returncode == 0, (done.stdout + done.stderr).decode().strip()[-3000:])
    alerts = rules()
    expect("each alert has its runbook, and no runbook is left over", {rule["name"] for rule in alerts} == anchors(),
           {rule["name"] for rule in alerts} ^ anchors() or len(alerts))
    for rule in alerts:
        link = f"grafana/README.md#{rule['name'].lower()}"
        expect(f"{rule['name']} has severity, summary, description and runbook", rule["labels"].get("severity") in
               ("critical", "warning", "info") and {"summary", "description"} <= rule["annotations"].keys()
               and rule["annotations"].get("runbook_url") == link)
    # promtool fails a test whose alert differs from the list: an entry without alerts is one that must not fire.
    found = re.findall(r"alertname: (\w+)\s+exp_alerts:( \[\])?", "".join(test.read_text() for test in tests))
    for rule in alerts:
        kinds = {bool(empty) for name, empty in found if name == rule["name"]}
        expect(f"{rule['name']} has a test that fires and one that does not", kinds == {True, False}, "" if kinds == {True, False} else kinds)


@check("The tests of the alerts pass with namespace, pod and two clusters")
def alerts_hold_in_clusters():
    tests = [RULES.with_name(name) for name in TESTS]
    with scratch() as directory:
        copies = [Path(directory) / name for name in TESTS]
        rules_here = Path(directory) / RULES.name
        for test, copy in zip(tests, copies):
            copy.write_text(in_two_clusters(test.read_text()))
        rules_here.write_text(RULES.read_text())
        done = run(PROMTOOL, "test", "rules", *copies)
        expect("promtool test rules with namespace, pod and two clusters", done.returncode == 0,
               (done.stdout + done.stderr).decode().strip()[-3000:])
        rules_here.write_text(RULES.read_text().replace("ignoring (setting)", "on (job, instance)"))
        done = run(PROMTOOL, "test", "rules", copies[0])
        expect("these tests find an expression that takes two clusters for one", done.returncode != 0)


@check("promtool accepts /metrics")
def metrics_are_clean():
    with scratch() as directory, Daemon(Path(directory) / "data") as daemon:
        daemon.call("wald.v1.WalService/Append", {"log": "a", "record": {"text": "x"}})
        with urllib.request.urlopen(f"http://{daemon.http}/metrics") as page:
            text = page.read()
        done = run(PROMTOOL, "check", "metrics", input=text)
        expect("promtool check metrics has nothing to say", done.returncode == 0 and not done.stdout + done.stderr,
               (done.stdout + done.stderr).decode() or f"{len(text.splitlines())} lines")
        bounds = sorted(float(bound) for bound in re.findall(r'wald_flush_duration_seconds_bucket\{le="([\d.]+)"\}', text.decode()))
        expect("20 us is on the border of a bucket, and 10 ms exactly", bounds[0] < 20e-6 < bounds[1] and 0.01 in bounds, bounds[:3])
