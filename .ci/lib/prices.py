"""The price of a feature in one run: a daemon without it and one with it, each in turn, in pairs. A ratio is the median of the ratios of
the pairs, so that a slow minute of the machine meets both."""

import statistics

from common import *

PAIRS = int(sys.argv[1]) if len(sys.argv) > 1 else 15
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 1


class Side:
    """A daemon that is measured, and how clients reach it: at `endpoint`, if given over TLS with a CA and a token file."""

    def __init__(self, name, daemon, endpoint=None, ca=None, token=None):
        self.name, self.daemon, self.endpoint = name, daemon, endpoint or daemon.endpoint
        self.flags = ["--endpoint", self.endpoint, *(["--tls-ca", ca, "--token-file", token] if ca else [])]
        self.environment = {"WALD_TLS_CA": str(ca), "WALD_TOKEN_FILE": str(token)} if ca else {}


def by_walbench(*load):
    """Measures a load of walbench: records per second, and the seconds of processor time of the daemon and of walbench for a million."""
    def measure(side):
        done = run(WALBENCH, *load, *side.flags, "--metrics", f"http://{side.daemon.http}", "--duration", f"{SECONDS}s",
                   "--warm-up", "500ms", "--output", "json", check=True)
        found = json.loads(done.stdout)["entries"][0]["wald"]["median"]
        figure = found["figures"][0]
        return (figure["records_per_second"], found["server_cpu_seconds_per_million_records"],
                found["client_cpu_seconds"] / figure["records"] * 1e6)
    return measure


def by_client(program, in_flight):
    """Measures durable appends through one Rust client, as a program makes them (client/bench/appends): records per second."""
    def measure(side):
        done = run(program, "wald", side.endpoint, in_flight, SECONDS, check=True, env=clean_environment(**side.environment))
        found = json.loads(done.stdout)
        return (found["acks"] / found["seconds"],)
    return measure


def priced(loads, without, having):
    """Measures loads of (name, measure, least ratio) on two sides."""
    sides = without, having
    for side in sides:
        side.daemon.ready()
    for name, measure, least in loads:
        ratios, rounds = [], ([], [])
        for pair in range(PAIRS):
            # Each goes first in every other pair: a machine that slows down treats both alike.
            for place in (0, 1) if pair % 2 == 0 else (1, 0):
                rounds[place].append(measure(sides[place]))
            ratios.append(rounds[1][-1][0] / rounds[0][-1][0])
        for side, figures in zip(sides, rounds):
            rate, *times = map(statistics.median, zip(*figures))
            cpu = "; CPU of the daemon {:.2f} s and of walbench {:.2f} s for a million".format(*times) if times else ""
            print(f"{name}, {side.name}: {rate:,.0f} records/s{cpu}")
        ratio = statistics.median(ratios)
        expect(f"{name}: at least {least} of {without.name}", ratio >= least, f"{ratio:.3f} ({min(ratios):.2f} to {max(ratios):.2f})")
