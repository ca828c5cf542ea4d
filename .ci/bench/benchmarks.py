"""Measures every published figure, and writes BENCHMARKS.md and the short table of README.md. Parts:

    suite      walbench suite: every row of the targets, each next to its echo; mixed loads
  load       latency over throughput, 1 to 1,024 appends in flight (a plot)
    fan-out    10,000 appends a second, alone and next to 1,000 followers of their log
  istio      the traffic of a service mesh: 16,186,000 items on sessions
  half-hour  thirty minutes of appends to 100 logs, with retention (a plot)
    servers    .ci/run bench/servers: the daemon next to other servers
    clients    .ci/run bench/languages: appends through each client, next to Redis through the client of that language
    cores      .ci/run bench/cores: instructions of an append by thread, and the use of more processors
    libraries  storage/benches/peers: the engine next to other engines

storage/benches/results keeps the measurements of every round, and both files are written from it. --only
measures some parts again and takes the others from there. --scale makes the workloads of libraries smaller.
--quick tests that everything works: its figures mean nothing, and it writes below target/ci. Run nothing else
meanwhile. It takes about two hours, and two more for libraries at their full size.
"""

import argparse

from common import *

PARTS = ("suite", "load", "fan-out", "istio", "half-hour", "servers", "clients", "cores", "libraries")
HALF_HOUR = 1800
WINDOWS = 6
PEERS = ROOT / "storage" / "benches" / "peers" / "Cargo.toml"
START, END = "<!-- benchmarks: written by .ci/run bench/benchmarks -->", "<!-- end of benchmarks -->"


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--scale", type=float, default=1)
    parser.add_argument("--s2", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--from-results", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.only = [part for part in options.only.split(",") if part]
    unknown = set(options.only) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if options.quick:
        options.rounds, options.seconds = 1, 0.2
    return options


# To measure.

def shown(*command, **options):
    """Runs a command whose output people may follow."""
    subprocess.run([str(part) for part in command], check=True, env=clean_environment(**options))


def bench(results, options, name, *flags, daemon_flags=(), rounds=None, seconds=None):
    """walbench against its own daemon. Returns the files and bytes of the data directory by folder."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as directory:
        data = Path(directory) / "data"
        with Daemon(data, "--echo", *daemon_flags) as daemon:
            daemon.ready()
            # A run with a count ends automatically.
            time = ["--duration", f"{seconds or options.seconds}s"] if "istio" not in flags else []
            shown(WALBENCH, "--endpoint", daemon.endpoint, *flags, "--metrics", f"http://{daemon.http}/metrics",
                  "--rounds", rounds or options.rounds, *time, "--json", results / f"{name}.json")
            daemon.stop()
        tree = {}
        for file in data.rglob("*"):
            if file.is_file():
                folder = tree.setdefault(str(file.parent.relative_to(data)), [0, 0])
                folder[0] += 1
                folder[1] += file.stat().st_size
        return tree


def measure(results, options):
    """Measures each selected part; a failed part does not stop the others. Returns the failed parts."""
    shown("cargo", "build", "--release")
    shown("cargo", "build", "--release", "-p", "wald-client", "-p", "walctl", "-p", "walbench", "--bins", "--examples")
    # Before anything is written here: the commit is the measured one, without the new results.
    commit = run("git", "-C", ROOT, "describe", "--always", "--dirty").stdout.decode().strip()
    failed = []
    for part in options.only:
        try:
            measure_part(part, results, options)
        except (OSError, subprocess.CalledProcessError) as error:
            failed.append(f"{part}: {error}")
        else:
            (results / f"{part}.commit").write_text(commit + "\n")
    return failed


def measure_part(part, results, options):
    if part == "suite":
        bench(results, options, "suite", "suite", *(["--filled", "20000"] if options.quick else []))
    if part == "load":
        bench(results, options, "load", "append", "--in-flight", "1,2,4,8,16,32,64,128,256,512,1024", "--echo",
              "--svg", results / "load.svg")
    if part == "fan-out":
        bench(results, options, part, "fan-out", seconds=None if options.quick else 10)
    if part == "istio":
        tree = bench(results, options, part, "istio", *(["--items", "20000"] if options.quick else []))
        (results / "istio-tree.json").write_text(json.dumps(tree, indent=1, sort_keys=True) + "\n")
    if part == "half-hour":
        bench(results, options, part, "append", "--logs", "100", "--time-series", results / "half-hour.svg",
              daemon_flags=["--retention-max-bytes", "16MiB"], rounds=1, seconds=12 if options.quick else HALF_HOUR)
        told = json.loads((results / "half-hour.json").read_text())
        # The series of seconds is the one of its only round.
        told["entries"][0]["wald"]["median"].pop("series")
        (results / "half-hour.json").write_text(json.dumps(told) + "\n")
    if part == "servers":
        shown(sys.executable, *script("bench/servers"), "--rounds", options.rounds, "--seconds", options.seconds,
              *(["--s2"] if options.s2 else []), "--json", results / "servers.json")
    if part == "clients":
        shown(sys.executable, *script("bench/languages"), "--rounds", options.rounds, "--seconds", options.seconds,
              *(["--in-flight", "1,16"] if options.quick else []), "--json", results / "clients.json")
    if part == "cores":
        shown(sys.executable, *script("bench/cores"), *(["--calls", "500"] if options.quick else []), "--json", results / "cores.json")
    if part == "libraries":
        shown("cargo", "run", "--release", "--manifest-path", PEERS, "--", "--rounds", options.rounds,
              "--scale", 0.005 if options.quick else options.scale, "--json", results / "libraries.json",
              CARGO_TARGET_DIR=str(TARGET / "peers"))


# Reports.

def number(value, unit=""):
    """A number with its significant digits."""
    if value is None:
        return ""
    size = abs(value)
    digits = 0 if size >= 100 or size == 0 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}{unit}"


def thousands(value):
    """A rate in records per second."""
    if value is None:
        return ""
    return number(value / 1e6, " M") if value >= 1e6 else number(value / 1e3, " k") if value >= 1e4 else number(value)


def seconds(value):
    for unit, size in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return number(value / size, f" {unit}")
    return number(value * 1e9, " ns")


def times(value):
    return "" if value is None else f"{value:.2f} ×"


def table(head, rows, texts=(0,)):
    """A Markdown table; columns of numbers are right-aligned."""
    line = lambda cells: "| " + " | ".join(cells) + " |"
    marks = ["---" if column in texts else "---:" for column in range(len(head))]
    return "\n".join([line(head), line(marks), *map(line, rows)]) + "\n"


def spread(rounds, index):
    """Minimum and maximum of the rounds, which show the noise of the machine."""
    rates = [one["figures"][index]["records_per_second"] for one in rounds]
    return f"{thousands(min(rates))} – {thousands(max(rates))}"


def loads(name, rounds, ratio=None):
    """A line for each load of an entry."""
    measured = rounds["median"]
    server = measured["server"] if len(measured["figures"]) == 1 else None
    for index, figure in enumerate(measured["figures"]):
        # Where followers are measured, their delay matters.
        latency = figure["delivery_us"] or figure["latency_us"] or {}
        level = {"durable": "", "written": ", written", "accepted": ", accepted"}[figure["load"]["durability"].lower()]
        more = f" ({figure['load']['work']}{level})" if len(measured["figures"]) > 1 else ""
        yield [name + more, thousands(figure["acks_per_second"]), thousands(figure["records_per_second"]),
               spread(rounds["rounds"], index),
               number(figure["bytes_per_second"] / 1e6), times(ratio), number(latency.get("p50")),
               number(latency.get("p99")), number(latency.get("p999")),
               number(measured["server_cpu_seconds_per_million_records"]) if server else "",
               number(server["rss_bytes"] / 1e6) if server else "",
               number(server["flushes"] / figure["seconds"]) if server else ""]


COLUMNS = ["", "acks/s", "records/s", "least – most", "MB/s", "of echo", "p50 µs", "p99 µs", "p99.9 µs", "CPU s/M", "RSS MB", "flushes/s"]


def checks(entry):
    for of in entry["checks"]:
        if of["least"] is None and of["most"] is None:
            continue
        bound = f"≥ {number(of['least'])}" if of["least"] is not None else f"≤ {number(of['most'])}"
        holds = {True: "yes", False: "**no**", None: "not known"}[of["holds"]]
        yield [entry["name"], of["what"], bound, number(of["reached"]), holds]


def suite(results):
    told = json.loads((results / "suite.json").read_text())
    rows = []
    for entry in told["entries"]:
        rows += loads(entry["name"], entry["wald"], entry["ratio"])
        if entry["echo"]:
            rows += loads("— its echo", entry["echo"])
    found = [row for entry in told["entries"] for row in checks(entry)]
    reached = sum(row[-1] == "yes" for row in found)
    server = told["server"]
    return f"""## The daemon beside its echo

Wald {server['version']} on {server['file_system']} by {server['sync_primitive']}; a flush took {number(server['flush_p50_us'])} µs (p99 {number(server['flush_p99_us'])} µs)
before the run; client and server on the same {told['cores']} cores; {told['rounds']} rounds of each, medians; {told['time'][:16]}Z. The echo is a service on the
daemon that answers what it is asked, through the same listener and client: what gRPC itself allows. Records of 128 B unless
the row says otherwise. Times are from sending a call to its answer; of W6, from sending an append to a follower having the record; of a
scan, the whole of it. CPU is the server's, in seconds for a million records.

{table(COLUMNS, rows)}
### Targets

{reached} of {len(found)} are reached.

{table(["workload", "what", "target", "measured", "reached"], found, texts=(0, 1))}"""


def load(results):
    told = json.loads((results / "load.json").read_text())
    rows = []
    for entry in told["entries"]:
        rows += loads(f"{entry['wald']['median']['figures'][0]['load']['in_flight']:,}", entry["wald"], entry["ratio"])
    return f"""## Latency over throughput

Durable appends of 128 B, by number in flight, over {told['entries'][0]['wald']['median']['figures'][0]['load']['connections']} connections.

![latency over throughput](storage/benches/results/load.svg)

{table(["in flight", *COLUMNS[1:]], rows)}"""


def fan_out(results):
    told = json.loads((results / "fan-out.json").read_text())
    entries = told["entries"]
    rows = [row for entry in entries for row in loads(entry["name"], entry["wald"])]
    found = [[of["what"], number(of["least"]) and f"≥ {number(of['least'])}", number(of["reached"])]
             for of in entries[-1]["checks"]]
    return f"""## Many followers of one log

An open loop; followers count what they get and decode none of it, on the same {told['cores']} cores.

{table(COLUMNS, rows)}
{table(["beside followers", "target", "measured"], found)}"""


def istio(results):
    told = json.loads((results / "istio.json").read_text())
    tree = json.loads((results / "istio-tree.json").read_text())
    entry = told["entries"][0]
    rows = list(loads("istio", entry["wald"]))
    folders = [[folder if folder != "." else "(top)", f"{files:,}", number(size / 1e6)] for folder, (files, size) in sorted(tree.items())]
    return f"""## The traffic of a service mesh

2,048 instances, items of 262 B, in bursts of 2,000 on each session, {told['rounds']} rounds into the same store.

{table(COLUMNS, rows)}
{told['remark'].strip().replace(chr(10), chr(10) * 2)}

{table(["after all rounds, below the data directory", "files", "MB"], folders)}"""


def half_hour(results):
    told = json.loads((results / "half-hour.json").read_text())
    entry = told["entries"][0]
    series = entry["wald"]["rounds"][0]["series"]
    middle = lambda found: sorted(found)[len(found) // 2] if found else None
    rows, length = [], max(len(series) // WINDOWS, 1)
    for begin in range(0, length * WINDOWS, length):
        window = series[begin:begin + length]
        if not window:
            continue
        of = lambda key: [second[key] for second in window if second[key] is not None]
        rows.append([f"{begin:,} – {begin + len(window):,}", thousands(middle(of("acks_per_second"))), number(middle(of("p50_us"))),
                     number(middle(of("p999_us"))), f"{number(min(of('rss_bytes')) / 1e6)} – {number(max(of('rss_bytes')) / 1e6)}",
                     f"{min(of('descriptors')):.0f} – {max(of('descriptors')):.0f}"])
    load = entry["wald"]["median"]["figures"][0]["load"]
    return f"""## Half an hour of load

Durable appends of {load['record_bytes']} B to {load['logs']} logs, {load['in_flight']} in flight, {number(entry['wald']['median']['figures'][0]['acks'] / 1e6)} million in all; of each log the newest 16 MiB are kept, so that
segments are sorted, expired and used again all the time. Medians of the seconds of each part:

{table(["seconds", "acks/s", "p50 µs", "p99.9 µs", "RSS MB", "descriptors"], rows)}
![half an hour](storage/benches/results/half-hour.svg)
"""


def servers(results):
    measured = json.loads((results / "servers.json").read_text())
    about, out = measured["about"], []
    columns = ["acks/s", "of Wald's", "p50 µs", "p99 µs", "p99.9 µs", "CPU s/M", "MB"]

    def figures(row):
        found = row["median"]
        if found is None:
            return ["failed", *[""] * 6]
        return [thousands(found["per_second"]), times(row["of_wald"]), number(found["p50_us"]), number(found["p99_us"]),
                number(found["p999_us"]) if "p999_us" in found else "", number(found["cpu_s_per_million"]),
                number(found["memory_bytes"] / 1e6)]

    for in_flight in dict.fromkeys(row["in_flight"] for row in measured["rows"]):
        rows = [[row["server"], *figures(row)] for row in measured["rows"] if row["in_flight"] == in_flight]
        generated = [[f"{row['server']} ({row['generator']})", *figures(row)]
                     for row in measured["generated"] if row["in_flight"] == in_flight]
        out.append(f"### {in_flight} in flight\n\n" + table(["server", *columns], rows)
                   + "\n" + table(["server (asked by)", *columns], generated))
    means = dict((row["server"], row["durability"]) for row in measured["rows"])
    absent = "".join(f"- {name} was not measured: {why.splitlines()[0]}\n" for name, why in measured["absent"].items())
    return f"""## Beside other servers

One closed-loop client program asks all of them in turn; {about['rounds']} rounds of {number(about['seconds'])} s, medians; records of {about['bytes']} B; a bare write and flush
of 128 B: {number(about['bare_flush']['per_second'])} a second, p50 {number(about['bare_flush']['p50_us'])} µs. Each server of weaker acks is compared with Wald's acks WRITTEN.

That program has the clients that programs in Go have, and shares the processors with the server: a call through gRPC's takes more of
them than the server does. So those whose protocol has a load generator are asked by that, too (second tables).

{chr(10).join(out)}
What an ack means:

{"".join(f"- {name}: {what}" + chr(10) for name, what in means.items())}{absent}"""


def clients(results):
    measured = json.loads((results / "clients.json").read_text())
    about = measured["about"]
    columns = ["in flight", "client", "acks/s", "a call each", "Redis", "of Redis", "of a call each", "p50 µs", "p99 µs"]
    rows = []
    for row in measured["rows"]:
        stream, calls, redis = (row[name]["per_second"] for name in ("stream", "calls", "redis"))
        rows.append([str(row["in_flight"]), f"{row['client']} ({row['peer']})", thousands(stream), thousands(calls), thousands(redis),
                     times(stream / redis), times(stream / calls), number(row["stream"]["p50_us"]), number(row["stream"]["p99_us"])])
    return f"""## Through the client of each language

Durable appends of 128 B by the ordinary `append` of each client, in a closed loop; Redis by the client in brackets (`XADD`, appendfsync always). *A call each*: Wald's
client with `share_appends` off. {about['rounds']} rounds of {number(about['seconds'])} s, all in turn, medians; a bare write and flush of 128 B:
{number(about['bare_flush']['per_second'])} a second. Client and server share {about['cores']} cores.

{table(columns, rows, texts=(0, 1))}"""


def cores(results):
    measured = json.loads((results / "cores.json").read_text())
    rows = [[row["load"], *(f"{row[turn]:,}" for turn in ("loops", "commit", "index", "others")), row["narrowest"], number(row["event_loops"])]
            for row in measured["rows"]]
    return f"""## More processors

The daemon's instructions outside the kernel for one record, by callgrind; {measured["calls"]:,} calls of each load over 8 connections. Event loops share the connections, and
each can have a processor of its own. The committing threads take turns at one journal, and one thread writes the indexes: neither gets faster than one
processor. *Event loops* is how many of them keep the narrower of the two busy; more processors than that serve reads and scans, and no more appends.

{table(["", "event loops", "committing", "indexes", "others", "the narrowest", "event loops"], rows, texts=(0, 5))}
A processor that does three instructions in a nanosecond does 1,000 instructions of a committing thread three million times a second, and a store takes no more records than
that. The kernel's part, a write and a flush for each group, comes on top: it bounds the groups, which grow with the load. Callers who need more than one journal takes run several
daemons, and divide their logs among them.
"""


def libraries(results):
    measured = json.loads((results / "libraries.json").read_text())
    rows, about = [], measured["about"]
    steps = dict.fromkeys((row["workload"], row["step"]) for row in measured["medians"])
    for workload, step in steps:
        found = [row for row in measured["medians"] if (row["workload"], row["step"]) == (workload, step) and row["median"] is not None]
        show = lambda row: seconds(row["median"]) if row["unit"] == "s" else number(row["median"] / 1e6, " MB")
        wald = next((show(row) for row in found if row["system"] == "wald"), "")
        others = ", ".join(f"{row['system']} {show(row)} ({times(row['of_wald'])})" for row in found if row["system"] != "wald")
        rows.append([f"{workload}: {step}", wald, others])
    notes = dict.fromkeys((row["system"], row["note"]) for row in measured["medians"] if row["note"])
    scaled = f" workloads at {about['scale']} of their size;" if about["scale"] != 1 else ""
    text = table(["workload", "Wald", "others (of Wald's; less is better)"], rows, texts=(0, 2))
    return f"""## Beside other engines

In process, without gRPC; each in a process of its own, {about['rounds']} rounds, medians;{scaled} {about['file_system']}; {about['at'][:16]}Z. What is shown
is the time of one operation, or bytes; *as published* has set-up and tear-down inside the timer, *steady* has not.

{text}
{"".join(f"- {system}: {note}" + chr(10) for system, note in notes)}"""


def told_or_not(part, results):
    """A part of the page, or a note that it is not measured yet."""
    name = part.__name__.replace("_", "-")
    if not (results / f"{name}.json").exists():
        return f"## {name.capitalize()}\n\nNot measured yet: `.ci/run bench/benchmarks -- --only {name}`.\n"
    return part(results)


def page(results):
    parts = [told_or_not(part, results) for part in (suite, load, fan_out, istio, half_hour, servers, clients, cores, libraries)]
    commits = {part: (results / f"{part}.commit") for part in PARTS}
    commits = ", ".join(f"{part} at {path.read_text().strip()}" for part, path in commits.items() if path.exists())
    return f"""# Benchmarks

Written by [`.ci/run bench/benchmarks`](.ci/bench/benchmarks.py) from its own measurements, which are kept round by round in
[storage/benches/results](storage/benches/results): not by hand. Where the least and the most of the rounds are far apart, the
machine did other things too, and the median says little: then only what was measured in turn compares, and only
differences that are larger than that. A percentile of few scans is one of them. On your machine, with nothing else running:

```sh
.ci/run bench/benchmarks
```

Measured: {commits}.

{chr(10).join(parts)}"""


def short(results):
    """The table of README.md."""
    if not all((results / f"{part}.json").exists() for part in ("servers", "suite")):
        return "Not measured yet: `.ci/run bench/benchmarks`.\n"
    told = json.loads((results / "servers.json").read_text())
    entries = {entry["name"]: entry for entry in json.loads((results / "suite.json").read_text())["entries"]}
    amounts = list(dict.fromkeys(row["in_flight"] for row in told["rows"]))
    named = [(row["server"], row) for row in told["rows"]]
    named += [(f"{row['server']}, by {row['generator']}", row) for row in told["generated"]]
    by = {(name, row["in_flight"]): row for name, row in named if row["level"] == "durable" and row["median"]}
    rows = []
    for name in dict.fromkeys(name for name, _ in by):
        cells = []
        for amount in amounts:
            row = by.get((name, amount))
            cells.append(f"{thousands(row['median']['per_second'])} ({times(row['of_wald'])})" if row else "")
        rows.append([name, *cells])
    widest = max(row["median"]["most_per_second"] / row["median"]["least_per_second"] for row in by.values())
    echo = [times(entries.get(f"W1, {amount}" + (" in flight" if amount == 1 else ""), {}).get("ratio")) for amount in amounts]
    rows.append(["wald, of its own gRPC echo: another client and run", *echo])
    return (f"Durable appends of {told['about']['bytes']} B per second, by number in flight, next to servers that install from registries. The loads\n"
            "come from each server's client for Go, and from the load generators of their protocols. A Go program's gRPC client\n"
            "takes more of the processor than the server, and shares it. One run\n"
            f"on {told['about']['cores']} shared cores ({told['about']['at'][:10]}; medians of {told['about']['rounds']}; "
            f"a bare flush took {number(told['about']['bare_flush']['p50_us'])} µs):\n\n"
            + table(["", *(f"{amount} in flight" for amount in amounts)], rows)
            + f"\nThe fastest round is up to {widest:.1f} times the slowest, because the machine was shared. All figures, with latencies and "
              "processor time:\n[BENCHMARKS.md](BENCHMARKS.md), written by `.ci/run bench/benchmarks`.\n")


def write(results, options):
    text, into = short(results), ROOT / "README.md"
    if options.quick:
        (results / "BENCHMARKS.md").write_text(page(results))
        (results / "short.md").write_text(text)
        return
    (ROOT / "BENCHMARKS.md").write_text(page(results))
    before, rest = into.read_text().split(START)
    _, after = rest.split(END)
    into.write_text(f"{before}{START}\n{text}{END}{after}")


@check("Every published figure, measured again; writes BENCHMARKS.md")
def benchmarks():
    options = arguments()
    results = SCRATCH / "results" if options.quick else ROOT / "storage" / "benches" / "results"
    results.mkdir(parents=True, exist_ok=True)
    failed = [] if options.from_results else measure(results, options)
    write(results, options)
    expect("every part is measured", not failed, "; ".join(map(str, failed)))
