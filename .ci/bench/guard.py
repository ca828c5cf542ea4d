"""Counts the daemon's instructions of an append, without and with a token, a read, a scan and a start after a kill, by
callgrind. They are nearly the same however busy the machine is. Each must be within its tolerance of .ci/bench/guard.json, above and below: --renew
records a change that makes something cheaper, too. The file has the figures of both builds: the quick one of a default
run, without the start, and that of --all. A newer compiler or another processor changes all of them a little.
"""

from common import *
from instructions import Counted, SEGMENT, bench

BASELINE = ROOT / ".ci" / "bench" / "guard.json"
BUILD = sized("whole", "quick")
FILLED = 20_000
ONE = ["--connections", 1]
# Measurements: name, workload of walbench, its flags, number of records.
LOADS = [
    ("append", "append", [*ONE, "--in-flight", 1, "--count", 1_500], 1_500),
    ("append in a batch of 100", "batch", [*ONE, "--in-flight", 1, "--count", 150], 15_000),
    ("append in a session", "session", [*ONE, "--in-flight", 64, "--count", 5_000], 5_000),
    ("read of one record", "read", [*ONE, "--in-flight", 1, "--count", 1_500, "--filled", FILLED], 1_500),
    ("record of a scan", "scan", [*ONE, "--in-flight", 1, "--count", 3, "--filled", FILLED], 3 * FILLED),
]
# Batches behind the checkpoint at a start, each a group of its own in one segment; and records of a batch.
FEW, MANY = 1_000, 3_000
BATCH = 100
# The grouping of a session's messages depends on time, and so does the cost of each. For a batch, background
# work is a larger part of the whole: its count varies by some 6 %, the count of an append by 0.1 %.
# The cost of a recovered record is the difference of two starts; each start varies by some 2 %.
TOLERANCE = {"append in a session": 0.25, "record that a start finds": 0.25}
MOST = 0.1
# A load is counted again if its count is too high: on a busy machine a client that lags behind costs the daemon more, and
# the smallest count has the least of that.
TRIES = 3
# The part of an append that the check of credential and right may add. Without the caller that a connection remembers, the part is
# about 6 %.
RIGHTS = 0.02
# The threads that check them begin with this name. The counts of the others vary by more than the check costs.
EVENT_LOOP = "wald-grpc-"
# A principal of walbench.
AUTH = """[principal.bench]
allow = [{ do = ["append", "create", "read"], logs = "" }]
"""


def killed(data, batches):
    """Instructions of a start behind this number of batches."""
    with Daemon(data, "--sorter-enabled=false", "--segment-bytes", SEGMENT) as daemon:
        daemon.ready()
        bench(daemon, "batch", *ONE, "--in-flight", 1, "--batch", BATCH, "--count", batches)
        daemon.kill()
    with Counted(data) as daemon:
        return daemon.count()


def load(daemon, workload, flags):
    """Instructions of a load, by thread."""
    # The first run prepares memory, connections and stored records; the second one is counted.
    bench(daemon, workload, *flags)
    daemon.count()
    bench(daemon, workload, *flags)
    return daemon.counts()


def rights(directory):
    """The part of an append that the check of credential and right adds. The client sends its token to both daemons: one
    without auth_file ignores it, so the cost of a longer head is in both counts."""
    auth, token = directory / "auth.toml", directory / "token"
    auth.touch(mode=0o600)
    auth.write_text(AUTH, encoding="utf-8")
    run(WALD, "token", "create", "--principal", "bench", "--to", token, "--auth-file", auth, check=True)
    _, workload, flags, _ = LOADS[0]
    counts = []
    for name, arguments in ("open", []), ("guarded", ["--auth-file", auth]):
        with Counted(directory / name, *arguments) as daemon:
            counts.append(load(daemon.ready(), workload, [*flags, "--token-file", token]))
    loops = [sum(count for thread, count in each.items() if thread.startswith(EVENT_LOOP)) for each in counts]
    return (loops[1] - loops[0]) / counts[0].total()


def highest(baseline, name):
    """The highest count that passes."""
    return baseline.get(name, 0) * (1 + TOLERANCE.get(name, MOST))


def measure(directory, baseline):
    """Name -> instructions for each record."""
    found = {}
    with Counted(directory / "store") as daemon:
        daemon.ready()
        for name, workload, flags, records in LOADS:
            counts = []
            while len(counts) < TRIES and (not counts or counts[-1] > highest(baseline, name)):
                counts.append(load(daemon, workload, flags).total() / records)
            found[name] = min(counts)
    # The engine's tests bound the reads and the memory of a start in every run.
    if BUILD == "whole":
        few, many = (killed(directory / f"killed-{batches}", batches) for batches in (FEW, MANY))
        found[f"start after a kill, behind {FEW:,} batches"] = few
        found["record that a start finds"] = (many - few) / (MANY - FEW) / BATCH
    return {name: round(count) for name, count in found.items()}


@check("Instructions of an append, a read, a scan and a start stay near the figures of guard.json")
def instructions(directory):
    if not os.environ.get("CI_BUILT"):
        # Another command may have left the other build.
        counted("cargo", "build", "--release", cwd=ROOT)
    baselines = json.loads(BASELINE.read_text(encoding="utf-8"))
    found = measure(directory, baselines[BUILD])
    if "--renew" in sys.argv:
        baselines[BUILD] = found
        BASELINE.write_text(json.dumps(baselines, indent=2) + "\n", encoding="utf-8")
    baseline = baselines[BUILD]
    for name, count in found.items():
        change, most = count / baseline[name] - 1, TOLERANCE.get(name, MOST)
        expect(f"{name}: within {most:.0%} of {baseline[name]:,} instructions", abs(change) <= most, f"{count:,}, {change:+.1%}")
    added = rights(directory)
    for number in range(1, TRIES):
        if added > RIGHTS:
            again = directory / f"again-{number}"
            again.mkdir()
            added = min(added, rights(again))
    expect(f"credential and right add at most {RIGHTS:.0%} to an append", added <= RIGHTS, f"{added:+.1%}")
