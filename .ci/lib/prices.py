"""The price of a feature in one run: a daemon without it and one with it, each in turn, in pairs. A ratio is the median of the ratios of
the pairs, so that a slow minute of the machine meets both."""

import statistics

from common import *

PAIRS = int(sys.argv[1]) if len(sys.argv) > 1 else 15
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 1


def measured(daemon, load, connection):
    """One round: records per second, and the processor time of the daemon and of walbench for a million records (s)."""
    done = run(WALBENCH, *load, *connection, "--metrics", f"http://{daemon.http}", "--duration", f"{SECONDS}s",
               "--warm-up", "500ms", "--output", "json", check=True)
    found = json.loads(done.stdout)["entries"][0]["wald"]["median"]
    figure = found["figures"][0]
    return (figure["records_per_second"], found["server_cpu_seconds_per_million_records"],
            found["client_cpu_seconds"] / figure["records"] * 1e6)


def priced(loads, without, having):
    """Measures loads of (name, flags of walbench, least ratio). Each side is (name, daemon, flags of walbench for its connection)."""
    sides = without, having
    for side in sides:
        side[1].ready()
    for name, load, least in loads:
        ratios, rounds = [], ([], [])
        for pair in range(PAIRS):
            # Each goes first in every other pair: a machine that slows down treats both alike.
            for place in (0, 1) if pair % 2 == 0 else (1, 0):
                rounds[place].append(measured(sides[place][1], load, sides[place][2]))
            ratios.append(rounds[1][-1][0] / rounds[0][-1][0])
        for (side, *_), figures in zip(sides, rounds):
            rate, server, client = map(statistics.median, zip(*figures))
            print(f"{name}, {side}: {rate:,.0f} records/s; CPU of the daemon {server:.2f} s and of walbench {client:.2f} s for a million")
        ratio = statistics.median(ratios)
        expect(f"{name}: at least {least} of {without[0]}", ratio >= least, f"{ratio:.3f} ({min(ratios):.2f} to {max(ratios):.2f})")
