"""The order of a whole run: which checks run next to each other, and which run alone.

The runner starts each `Step` as one process: a file, or some checks of a file. Kinds:

- build: compiles things that later steps need. Starts first, with a full part of the processor time.
- compute: only computes. One at a time, all through the run, with the processor time that others leave; two at a time
  beside a step that runs alone, and when nothing else is left.
- wait: mostly waits, and judges no time that a busy machine changes. Several run next to each other.
- alone: judges times, or the speed of this machine. Before the waiting steps, with computing steps only, which use the time
  that it waits. If it fails, it runs once more at the end, with nothing beside it.

Steps start in the order of the list, those that take longest first. `after` names steps that must have ended.
Steps with one of their `locks` in common never run at the same time:

- debug, release: cargo holds its lock on that directory of builds for minutes.
- clients: docs/examples generates and installs things in the folders of the clients; others use them ("clients*") at the
  same time.
- starve: a busy machine would keep nodes with a lease of two seconds, or clients with deadlines of two, from the processors. These
  steps, too, run once more if they fail.
- maven: the Java client in Maven's cache. docs/examples installs it there, and deploy/release takes it from a release.
- ports: the default ports 6925 and 6926.
"""

from collections import namedtuple

Step = namedtuple("Step", "name kind after locks", defaults=((), ()))

TOOLS, RELEASE, CLIENTS = "setup/tools:tools", "setup/builds:release", "setup/builds:clients"
STATIC, CLUSTER, MDBOOK = "setup/builds:static", "setup/tools:cluster", "setup/tools:mdbook"
STORES, OBJECT = "setup/tools:stores", "setup/builds:object_stores"
WHOLE, EMULATOR = "deploy/release:programs,debian,image,twice,gates", "setup/tools:release"
BUCKETS, TESTS = "setup/builds:buckets", "rust/tests"
# Steps that most others need.
BINARIES = (TOOLS, RELEASE, TESTS)

FIRST = [
    Step(RELEASE, "build", (), ("release",)),
    Step(TESTS, "build", (), ("debug",)),
    Step(TOOLS, "build"),
    Step(CLIENTS, "build", (TOOLS,), ("clients",)),
    Step("rust/lint:format,proto,compatible", "wait", (TOOLS,)),
]
COMPUTE = [
    Step(CLUSTER, "compute", (TOOLS,)),
    Step(MDBOOK, "compute", (TOOLS,)),
    Step(STORES, "compute", (TOOLS,)),
    Step(EMULATOR, "compute", (TOOLS,)),
    # The build of the tests takes the longest, and their run leaves time.
    Step("bench/guard", "compute", (TOOLS, RELEASE)),
    Step("ops/grafana:dashboards_are_typed,dashboards_are_complete,alerts_hold,metrics_are_clean", "compute", (TOOLS, RELEASE)),
    Step(BUCKETS, "compute", BINARIES, ("debug",)),
    Step("docs/examples", "compute", (*BINARIES, CLIENTS), ("clients", "release", "maven")),
    Step("deploy/release:digests,components,python,npm,runtimes,go,java,rust_crates,chart", "compute", BINARIES, ("maven",)),
    Step("disk/reader", "compute", BINARIES),
    Step("deploy/chart:settings,readme,version,lint,manifests,pods,long_names,stores,refused,insecure,ports,replica_pods,several,backup_jobs,log_jobs,texts,routes,alerts,package,rest",
         "compute", (*BINARIES, BUCKETS)),
    Step(OBJECT, "compute", BINARIES),
    Step(STATIC, "compute", (*BINARIES, "docs/examples"), ("release",)),
    Step("durability/engine:schedules", "compute", BINARIES, ("debug",)),
    Step("durability/known_bad", "compute", BINARIES, ("debug",)),
    Step("rust/lint:fuzz_targets", "compute", BINARIES, ("debug",)),
    Step("durability/engine:power", "compute", BINARIES),
    Step("durability/engine:damage", "compute", BINARIES),
    Step("durability/engine:encrypted", "compute", BINARIES),
    Step("durability/engine:sorting_memory", "compute", BINARIES),
]
WAIT = [Step(name, "wait", (*BINARIES, CLIENTS) if "clients" in " ".join(locks) else BINARIES, locks) for name, locks in [
    ("docs/start", ("release", "ports")),
    ("ops/dashboards", ()),
    ("durability/full:makes_room,rounds", ()),
    ("durability/full:gives_back", ()),
    ("durability/full:copies", ()),
    ("durability/full:enabled_late", ()),
    ("clients/conformance:rpcs_are_reachable,well_formed,start_arguments,clients", ("clients*",)),
    ("clients/conformance:tls,tokens", ("clients*", "starve")),
    ("clients/conformance:runtimes", ("clients*",)),
    ("durability/history:histories", ("clients*",)),
    ("durability/fences", ("clients*",)),
    ("clients/chaos", ("clients*",)),
    ("wire/wire:sessions,neighbours,slow", ("clients*",)),
    ("clients/ledger", ("clients*",)),
    ("clients/rotation", ("clients*",)),
    ("clients/testkit", ("clients*",)),
    ("clients/http_api", ()),
    ("durability/syscalls", ("clients*",)),
    ("disk/archive", ()),
    ("disk/sorting", ()),
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
    "wire/wire:stops,standing,crowds,over_tls,floods,handshakes,refusals",
    "wire/wire:floods_over_tls",
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
    "durability/limits:stopped,memory,out_of_memory",
    "disk/backup",
)] + [Step("deploy/release:first_appends", "alone", BINARIES, ("maven",))]
LAST = [
    # Its nodes have leases of two seconds, and its commands short timeouts.
    Step("disk/bucket:units", "wait", (BUCKETS,), ("debug", "starve")),
    Step("durability/takeover:nodes", "wait", (*BINARIES, CLIENTS, BUCKETS), ("clients*", "starve")),
    Step("disk/bucket:lost_machine,faults,conditions", "wait", (*BINARIES, BUCKETS)),
    Step("durability/replica:zombie,costs,refused", "wait", (*BINARIES, BUCKETS)),
    Step("durability/takeover:contenders", "wait", (*BINARIES, CLIENTS, BUCKETS), ("clients*",)),
    Step("deploy/chart:consents,nodes,take_overs,names,grace_periods,secured,compose_nodes", "wait", (*BINARIES, BUCKETS)),
    Step("ops/traces", "wait", (*BINARIES, STATIC)),
    Step("ops/console:replica", "wait", (*BINARIES, BUCKETS)),
    Step("deploy/image", "wait", (*BINARIES, STATIC)),
    Step(WHOLE, "wait", (*BINARIES, EMULATOR)),
    Step("deploy/install", "wait", (*BINARIES, CLUSTER)),
    Step("docs/book", "wait", (MDBOOK,)),
    Step("clients/conformance:replica,stand_by", "wait", (*BINARIES, CLIENTS, BUCKETS), ("clients*",)),
    Step("durability/replica:lost_machines", "wait", (*BINARIES, BUCKETS)),
    Step("durability/replica:encrypted", "wait", (*BINARIES, BUCKETS)),
    Step("durability/takeover:encrypted", "wait", (*BINARIES, CLIENTS, BUCKETS), ("clients*",)),
    Step("durability/replica:unfenced", "wait", (*BINARIES, BUCKETS)),
    # Both install the packages of the reader.
    Step("durability/replica:upgrade", "wait", (*BINARIES, BUCKETS, "disk/reader")),
    Step("durability/takeover:namespaces", "wait", (*BINARIES, CLIENTS, BUCKETS), ("clients*", "starve")),
    Step("durability/history:forgetful_store", "wait", (*BINARIES, CLIENTS, BUCKETS), ("clients*",)),
    Step("durability/history:histories_of_two_nodes", "wait", (*BINARIES, CLIENTS, BUCKETS), ("clients*",)),
    Step("durability/takeover:forgotten", "wait", (*BINARIES, CLIENTS, BUCKETS), ("clients*",)),
    Step("durability/outages:faults,away", "wait", (*BINARIES, BUCKETS)),
    Step("durability/outages:silent", "wait", (*BINARIES, BUCKETS)),
    Step("durability/outages:full", "wait", (*BINARIES, BUCKETS)),
    Step("durability/outages:full_gateway", "wait", (*BINARIES, STORES, BUCKETS)),
    Step("durability/replica:gateway", "wait", (*BINARIES, STORES, BUCKETS)),
    Step("durability/takeover:gateway", "wait", (*BINARIES, STORES, CLIENTS, BUCKETS), ("clients*", "starve")),
    Step("durability/replica:others", "wait", (*BINARIES, STORES, BUCKETS)),
    Step("durability/replica:known", "wait", (*BINARIES, STORES, BUCKETS)),
    Step("disk/bucket:gateway", "wait", (*BINARIES, STORES, BUCKETS)),
    Step("disk/bucket:others", "wait", (*BINARIES, STORES, BUCKETS)),
    Step("disk/bucket:refused", "wait", (*BINARIES, STORES, BUCKETS)),
    Step("docs/testing", "wait", ()),
    Step("bench/replica", "alone", (*BINARIES, STORES, OBJECT, CLIENTS)),
    Step("durability/takeover:pauses", "alone", (*BINARIES, STORES, OBJECT, CLIENTS, BUCKETS), ("clients*",)),
]
PLAN = FIRST + COMPUTE + ALONE + WAIT + LAST
# Steps that a run without --all leaves out, because their builds or stores take a large part of its time:
#
# - a Kubernetes API from source (20 minutes of processor time) and the installation of the chart in it. deploy/chart
#   renders and judges each manifest in every run.
# - the static binaries, and the image and the exporter of traces that only they have. They are the same code with
#   another C library. Of their features, the tests of wald-storage have Zstandard in every run.
# - the engine under a scheduler of its own, which needs another build of the engine; the fuzz targets' builds; the book,
#   whose program is built from source.
# - servers of object stores from source (five minutes of processor time). disk/bucket, durability/replica,
#   durability/takeover and durability/outages have a server of their own in every run.
# - the speed of the replica and of take-overs, which need a quiet machine and another build of the daemon.
# - engines with a deliberate mistake, and stores that lose rows or fences: they test the tests, and need nine minutes. A change
#   of these tests should run them by name.
# - the drill with three nodes. The tests of wald-bucket and the daemon's (stand_by::) have contenders, and the drill of two nodes is in
#   every run.
# - the engine's simulations, the memory of the sorter, and kills of the daemon at larger sizes. The tests of the workspace have
#   them at their sizes.
# - a bucket without space. In every run another bucket refuses all requests, and one gives no answer.
# - full disks that copy on write, of several sizes, and with a sorter that is enabled late. The engine's tests copy_on_write and
#   space have them on the simulated disk.
# - floods over TLS. The same code judges the frames in plaintext, and handshakes and stuck peers have TLS in every run.
# - certificates, tokens and rights that change under the load of all clients. wire/tls and clients/conformance:tokens change
#   them one at a time, and server/tests/daemon has each change.
# - dashboards and alerts of a real Prometheus for two minutes. ops/grafana has each alert that fires and does not, and a test of
#   the daemon (server/src/metrics/shown.rs) has each metric of a panel.
# - stores of 250,000 to 1,000,000 logs or of some GiB. The engine's tests hold the same bounds with smaller ones.
# - durations of starts, which need a quiet machine. The engine's tests bound the memory of a start, and its reads.
# - the time from the installation of each package to its first append, which needs a quiet machine and compiles all libraries.
#   deploy/release installs each of them and appends in every run.
# - the tests of alerts once more with twice the series: all alerts have the same form of labels.
# - take-overs of an encrypted store: durability/replica:encrypted loses machines of one in every run, and the tests of the daemon take one over.
# - all cases of the client for TypeScript by Bun and Deno. deploy/release:runtimes runs a program of every kind of call by them.
# - the programs of a release for two processors, built twice, with tools from source. The packages of a release are made and used
#   in every run.
WITH_ALL = [EMULATOR, WHOLE, CLUSTER, "deploy/install", STATIC, "deploy/image", "ops/traces", "durability/engine:schedules", "durability/known_bad",
            "durability/engine:power", "durability/engine:damage", "durability/engine:encrypted", "durability/engine:sorting_memory", "durability/full:gives_back",
            "durability/full:copies", "durability/full:enabled_late", "durability/replica:unfenced", "durability/takeover:forgotten", "durability/takeover:contenders", "durability/takeover:encrypted",
            "durability/history:forgetful_store", "wire/wire:floods_over_tls",
            "clients/rotation", "clients/conformance:runtimes", "ops/dashboards", "durability/crashes:kills", "durability/outages:full",
            STORES, OBJECT, "durability/replica:gateway", "durability/replica:others", "durability/replica:known", "durability/takeover:gateway",
            "durability/outages:full_gateway", "bench/replica", "durability/takeover:pauses",
            "disk/bucket:gateway", "disk/bucket:others", "disk/bucket:refused", "rust/lint:fuzz_targets", MDBOOK, "docs/book",
            "bench/million", "bench/bounded", "bench/clustered", "deploy/release:first_appends", "ops/restart", "ops/grafana:alerts_hold_in_clusters"]
FULL = [step for step in PLAN if step.name not in WITH_ALL]


def rest():
    """The steps of WITH_ALL in the order of the plan, and the builds that they need. The first tier is none of them, so BUCKETS
    builds the programs of the tests. Steps that need them wait for it, or cargo would keep them waiting for longer than they
    may take."""
    needed, names = [step for step in PLAN if step.name in WITH_ALL], {BUCKETS}
    while needed:
        names |= {step.name for step in needed}
        needed = [step for step in PLAN if step.name.startswith("setup/") and step.name not in names
                  and any(step.name in one.after for one in needed)]

    def adapted(step):
        if step.name == BUCKETS:
            return step._replace(kind="build", after=())
        after = [BUCKETS if name == TESTS else name for name in step.after]
        return step._replace(after=tuple(dict.fromkeys(after)))
    return [adapted(step) for step in PLAN if step.name in names]


REST = rest()
# Steps that judge the speed only at full size: in a default run they may have others next to them.
PATIENT = ["disk/backup"]
DEFAULT = [step._replace(kind="wait") if step.name in PATIENT else step for step in FULL]
# Checks that only run by name, because they take long or need a quiet machine.
BY_HAND = ["bench/benchmarks", "bench/cores", "bench/encryption", "bench/languages", "bench/servers", "bench/soak", "bench/tls", "disk/fuzz"]
