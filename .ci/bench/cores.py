"""The use of more processors for appends: counts the daemon's instructions of an append by thread, with 64 calls in flight over 8
connections. Event loops share the connections, so their work grows with their number. The committing threads take turns at one journal,
and one thread writes indexes: each of these is as fast as one processor. The bench says how many event loops keep such a
turn busy. It counts instructions outside the kernel, so a flush costs nothing here; the size of the groups does count.
"""

import argparse
from collections import Counter

from common import *
from instructions import Counted, bench

WARM_UP = 1_000
# Loads: name, workload of walbench, its flags, records of a call.
LOADS = [
    ("append", "append", ["--in-flight", 64], 1),
    ("append on a session", "session", ["--in-flight", 1_024], 1),
    ("record of a batch of 100", "batch", ["--in-flight", 16], 100),
]
# Threads that take turns at one thing: more processors do not make them faster.
SHARED = {"commit": "the committing threads", "index": "the thread of the indexes"}


def turn(name):
    """The threads that a thread shares its work with."""
    return "loops" if name.startswith("wald-grpc") else next((turn for turn in SHARED if name.startswith(f"wald-{turn}")), "others")


def load(daemon, workload, flags, calls, records):
    """Instructions for each record, by turn."""
    flags = ["--connections", 8, *flags]
    bench(daemon, workload, *flags, "--count", WARM_UP)
    daemon.counts()
    bench(daemon, workload, *flags, "--count", calls)
    found = Counter()
    for name, count in daemon.counts().items():
        found[turn(name)] += count / calls / records
    return found


@check("Counts the instructions of an append by thread, and how many event loops keep the journal busy")
def cores(directory):
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=sized(20_000, 5_000))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with Counted(directory / "store") as daemon:
        daemon.ready()
        for name, workload, flags, records in LOADS:
            found = load(daemon, workload, flags, options.calls, records)
            narrow = max(SHARED, key=lambda turn: found[turn])
            rows.append({"load": name, **{turn: round(found[turn]) for turn in ("loops", *SHARED, "others")},
                         "narrowest": SHARED[narrow], "event_loops": round(found["loops"] / found[narrow], 1)})
            expect(f"{name}: event loops that keep {SHARED[narrow]} busy", found["loops"] > found[narrow] > 0, rows[-1])
    if options.json:
        options.json.write_text(json.dumps({"calls": options.calls, "rows": rows}, indent=1) + "\n", encoding="utf-8")
