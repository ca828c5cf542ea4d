"""The order of a whole run: which checks run next to each other, and which run alone.

The runner starts each `Step` as one process: a file, or some checks of a file. Kinds:

- build: compiles things that later steps need. Starts first, with a full part of the processor time.
- compute: only computes. One at a time, all through the run, with the processor time that others leave; two at a time
  when nothing else is left.
- wait: mostly waits, and judges no time that a busy machine changes. Several run next to each other.
- alone: judges times, or the speed of this machine. After the waiting steps, with computing steps only. If it fails, it
  runs once more at the end, with nothing beside it.

Steps start in the order of the list, those that take longest first. `after` names steps that must have ended.
Steps with one of their `locks` in common never run at the same time:

- debug, release: cargo holds its lock on that directory of builds for minutes.
- clients: docs/examples generates and installs things in the folders of the clients; others use them ("clients*") at the
  same time.
- ports: the default ports 6925 and 6926.
"""

from collections import namedtuple

Step = namedtuple("Step", "name kind after locks", defaults=((), ()))

TOOLS, RELEASE, CLIENTS = "setup/tools:tools", "setup/builds:release", "setup/builds:clients"
STATIC, CLUSTER, MDBOOK = "setup/builds:static", "setup/tools:cluster", "setup/tools:mdbook"
STORES, OBJECT = "setup/tools:stores", "setup/builds:object_stores"
TESTS = "rust/tests"
# Steps that most others need.
BINARIES = (TOOLS, RELEASE, TESTS)

FIRST = [
    Step(RELEASE, "build", (), ("release",)),
    Step(TESTS, "build", (), ("debug",)),
    Step(TOOLS, "build"),
    Step(CLIENTS, "build", (TOOLS,), ("clients",)),
    Step("rust/lint:format", "wait", (TESTS,)),
    Step("rust/lint:proto,compatible", "wait", (TOOLS,)),
]
COMPUTE = [
    Step(CLUSTER, "compute", (TOOLS,)),
    Step(MDBOOK, "compute", (TOOLS,)),
    Step(STORES, "compute", (TOOLS,)),
    Step("disk/bucket:units", "compute", BINARIES, ("debug",)),
    Step(OBJECT, "compute", BINARIES),
    Step(STATIC, "compute", (*BINARIES, "docs/examples"), ("release",)),
    Step("durability/engine:schedules", "compute", BINARIES, ("debug",)),
    Step("durability/known_bad", "compute", BINARIES, ("debug",)),
    Step("rust/lint:fuzz_targets", "compute", BINARIES, ("debug",)),
    Step("durability/engine:power", "compute", BINARIES),
    Step("durability/engine:damage", "compute", BINARIES),
    Step("durability/engine:sorting_memory", "compute", BINARIES),
]
WAIT = [Step(name, "wait", (*BINARIES, CLIENTS) if "clients" in " ".join(locks) else BINARIES, locks) for name, locks in [
    ("docs/start", ("release", "ports")),
    ("docs/examples", ("clients", "release")),
    ("ops/dashboards", ()),
    ("durability/full", ()),
    ("bench/guard", ()),
    ("clients/conformance:rpcs_are_reachable,well_formed,start_arguments,clients", ("clients*",)),
    ("clients/conformance:tls,tokens", ("clients*",)),
    ("durability/history", ("clients*",)),
    ("durability/fences", ("clients*",)),
    ("clients/chaos", ("clients*",)),
    ("wire/wire:sessions,neighbours,slow", ("clients*",)),
    ("clients/ledger", ("clients*",)),
    ("clients/rotation", ("clients*",)),
    ("durability/syscalls", ("clients*",)),
    ("ops/grafana:dashboards_are_typed,dashboards_are_complete,alerts_hold,metrics_are_clean", ()),
    ("disk/archive", ()),
    ("disk/sorting", ()),
    ("disk/reader", ()),
    ("disk/verify", ()),
    ("durability/crashes:kills", ()),
    ("durability/crashes:power_cuts", ()),
    ("durability/failures", ()),
    ("docs/readme", ("ports",)),
    ("api/bounds", ()),
    ("bench/bench", ()),
    ("api/grpcurl", ()),
    ("api/arguments", ()),
    ("api/flights", ()),
    ("api/names", ()),
    ("durability/flushes", ()),
    ("durability/modes:levels,unasked,killed,manual", ()),
    ("durability/limits:file_size,read_only,second", ()),
    ("host/host", ()),
    ("host/identity", ()),
    ("host/secrets", ()),
    ("host/clock", ()),
    ("durability/volumes:hundred,small,taken_before", ()),
    ("wire/h2spec", ()),
    ("wire/tls:versions,protocols,faults,swaps", ()),
    ("ops/settings", ()),
    ("ops/drain", ()),
    ("ops/restarts", ()),
    ("host/openfiles", ()),
    ("host/descriptors", ()),
    ("api/sessions:in_flight,slow", ()),
    ("api/followers:nothing_leaks", ()),
    ("api/pressure:large_ones", ()),
    ("api/people", ()),
]]
ALONE = [Step(name, "alone", BINARIES) for name in (
    "durability/volumes:fresh",
    "wire/wire:stops,standing,crowds,over_tls,floods,floods_over_tls,handshakes,refusals",
    "durability/modes:trickle",
    "wire/http_port",
    "wire/tls:stopped",
    "api/followers:a_crowd,busy,others_unchanged",
    "api/sessions:fast",
    "api/pressure:greedy_beside_small",
    "api/tenants",
    "ops/console:console",
    "ops/restart",
    "ops/grafana:alerts_hold_in_clusters",
    "bench/million",
    "bench/bounded",
    "bench/clustered",
    "disk/backup",
    "durability/limits:stopped,memory,out_of_memory",
)]
LAST = [
    Step("ops/traces", "wait", (*BINARIES, STATIC)),
    Step("deploy/chart", "wait", (*BINARIES, "disk/bucket:units")),
    Step("ops/console:replica", "wait", (*BINARIES, "disk/bucket:units")),
    Step("deploy/image", "wait", (*BINARIES, STATIC)),
    Step("deploy/install", "wait", (*BINARIES, CLUSTER)),
    Step("docs/book", "wait", (MDBOOK,)),
    Step("disk/bucket:lost_machine,faults,conditions", "wait", (*BINARIES, "disk/bucket:units")),
    Step("clients/conformance:replica,stand_by", "wait", (*BINARIES, CLIENTS, "disk/bucket:units"), ("clients*",)),
    Step("durability/replica:lost_machines", "wait", (*BINARIES, "disk/bucket:units")),
    Step("durability/replica:zombie,unfenced,costs,refused", "wait", (*BINARIES, "disk/bucket:units")),
    # Both install the packages of the reader.
    Step("durability/replica:upgrade", "wait", (*BINARIES, "disk/bucket:units", "disk/reader")),
    Step("durability/takeover:nodes", "wait", (*BINARIES, CLIENTS, "disk/bucket:units"), ("clients*",)),
    Step("durability/takeover:contenders,forgotten", "wait", (*BINARIES, CLIENTS, "disk/bucket:units"), ("clients*",)),
    Step("durability/outages:faults,away", "wait", (*BINARIES, "disk/bucket:units")),
    Step("durability/outages:silent", "wait", (*BINARIES, "disk/bucket:units")),
    Step("durability/outages:full", "wait", (*BINARIES, "disk/bucket:units")),
    Step("durability/outages:full_gateway", "wait", (*BINARIES, STORES, "disk/bucket:units")),
    Step("durability/replica:gateway", "wait", (*BINARIES, STORES, "disk/bucket:units")),
    Step("durability/takeover:gateway", "wait", (*BINARIES, STORES, CLIENTS, "disk/bucket:units"), ("clients*",)),
    Step("durability/replica:others", "wait", (*BINARIES, STORES, "disk/bucket:units")),
    Step("durability/replica:known", "wait", (*BINARIES, STORES, "disk/bucket:units")),
    Step("disk/bucket:gateway", "wait", (*BINARIES, STORES, "disk/bucket:units")),
    Step("disk/bucket:others", "wait", (*BINARIES, STORES, "disk/bucket:units")),
    Step("disk/bucket:refused", "wait", (*BINARIES, STORES, "disk/bucket:units")),
    Step("docs/testing", "wait", ()),
    Step("bench/replica", "alone", (*BINARIES, STORES, OBJECT, CLIENTS)),
]
PLAN = FIRST + COMPUTE + WAIT + ALONE + LAST
# Steps that a run without --all leaves out, because their builds or stores take a large part of its time:
#
# - a Kubernetes API from source (20 minutes of processor time) and the installation of the chart in it. deploy/chart
#   renders and judges each manifest in every run.
# - the static binaries, and the image and the exporter of traces that only they have. They are the same code with
#   another C library. disk/bucket:units builds their features in every run.
# - the engine under a scheduler of its own, which needs another build of the engine; the fuzz targets' builds; the book,
#   whose program is built from source.
# - servers of object stores from source (five minutes of processor time). disk/bucket, durability/replica,
#   durability/takeover and durability/outages have a server of their own in every run.
# - the speed of the replica, which needs a quiet machine and another build of the daemon.
# - engines with a deliberate mistake: they test the tests, and need eight minutes. A change of the engine's tests should run
#   them by name.
# - stores of 250,000 to 1,000,000 logs or of some GiB. The engine's tests hold the same bounds with smaller ones.
# - durations of starts, which need a quiet machine. The engine's tests bound the memory of a start, and its reads.
# - the tests of alerts once more with twice the series: all alerts have the same form of labels.
WITH_ALL = [CLUSTER, "deploy/install", STATIC, "deploy/image", "ops/traces", "durability/engine:schedules", "durability/known_bad",
            STORES, OBJECT, "durability/replica:gateway", "durability/replica:others", "durability/replica:known", "durability/takeover:gateway",
            "durability/outages:full_gateway", "bench/replica",
            "disk/bucket:gateway", "disk/bucket:others", "disk/bucket:refused", "rust/lint:fuzz_targets", MDBOOK, "docs/book",
            "bench/million", "bench/bounded", "bench/clustered", "ops/restart", "ops/grafana:alerts_hold_in_clusters"]
# Steps that judge the speed only with --all: in a default run they may have others next to them.
PATIENT = ["disk/backup"]
DEFAULT = [step._replace(kind="wait") if step.name in PATIENT else step for step in PLAN if step.name not in WITH_ALL]
# Checks that only run by name, because they take long or need a quiet machine.
BY_HAND = ["bench/benchmarks", "bench/servers", "bench/soak", "bench/tls", "disk/fuzz"]
