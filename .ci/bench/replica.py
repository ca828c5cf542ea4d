"""Measures the replica against its targets. In each check both sides use one bucket of the Versity gateway, in turn, in ROUNDS
(7) of SECONDS (2), and a ratio is the median of the ratios of the rounds. The daemon and the bare PUTs are built with
object stores, below target/object. s2-lite is measured if `s2` is the third argument, or if it is installed already: its
build takes about 15 minutes. Arguments: ROUNDS, SECONDS, `s2`.
"""

import statistics
from types import SimpleNamespace

from peers import PEERS, S2Lite, Unavailable, Wald, built_client, free_port, measure, program, table
from replicas import *

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 7
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 2
WITH_S2 = "s2" in sys.argv[3:] or (PEERS / "s2-lite/bin/server").exists()
MIB = 1 << 20


def wald():
    """The optimised daemon with object stores."""
    return optimised() / "wald"


def owner(store, data, *arguments):
    """A daemon at its default settings, with a prefix of its own in the bucket."""
    return Daemon(data, "--bucket-url", f"s3://{BUCKET}/{data.name}", "--node-id", "one", *arguments, variables=store.variables, binary=wald())


def bench(daemon, in_flight, *more, seconds=SECONDS, level="durable"):
    """One run of walbench: its figure."""
    done = run(WALBENCH, "append", "--endpoint", daemon.endpoint, "--in-flight", in_flight, "--durability", level, "--duration", f"{seconds}s",
               "--warm-up", "500ms", "--output", "json", *more, check=True)
    return json.loads(done.stdout)["entries"][0]["wald"]["median"]["figures"][0]


def bare_put(store, name, number, size):
    """Median time of a PUT, one after the other (µs)."""
    done = run(optimised() / "examples/puts", f"s3://{BUCKET}/{name}", store.base, number, size, env=store.environment(), check=True)
    return int(done.stdout)


def spread(values, form="{:.2f}"):
    """Median, smallest and largest, for people."""
    return f"{form} ({form} to {form})".format(statistics.median(values), min(values), max(values))


def in_turn(number, *measures):
    """Runs each of the measures; each is first in every other round, so that a machine that slows down treats both alike."""
    found = {one: one() for one in (measures if number % 2 == 0 else measures[::-1])}
    return [found[one] for one in measures]


@check("DURABLE appends of a daemon that ships: at least 0.7 of the rate without a replica, at most 1.2 times the p50")
def beside(directory):
    rates, waits = [], []
    with versity(directory) as store, owner(store, directory / "ships") as ships, Daemon(directory / "alone", binary=wald()) as alone:
        ships.ready(), alone.ready()
        for number in range(ROUNDS):
            one, other = in_turn(number, lambda: bench(ships, 64), lambda: bench(alone, 64))
            rates.append((one["acks_per_second"], other["acks_per_second"]))
            one, other = in_turn(number, lambda: bench(ships, 1), lambda: bench(alone, 1))
            waits.append((one["latency_us"]["p50"], other["latency_us"]["p50"]))
        print(f"64 in flight: {spread([one for one, _ in rates], '{:,.0f}')} acks/s, without a replica {spread([one for _, one in rates], '{:,.0f}')}")
        print(f"1 in flight: p50 {spread([one for one, _ in waits], '{:,.0f}')} µs, without a replica {spread([one for _, one in waits], '{:,.0f}')}")
    ratios = [one / other for one, other in rates]
    expect("at least 0.7 of the rate", statistics.median(ratios) >= 0.7, spread(ratios))
    ratios = [one / other for one, other in waits]
    expect("at most 1.2 times the p50", statistics.median(ratios) <= 1.2, spread(ratios))


@check("One REPLICATED append at a time, without a gap: p50 at most 1.15 times a bare PUT, and 1 ms")
def latency(directory):
    found = []
    with versity(directory) as store, owner(store, directory / "data", "--bucket-gap", "0s") as daemon:
        daemon.ready()
        for number in range(ROUNDS):
            # An append of 128 bytes makes an object of about this size.
            put, ack = in_turn(number, lambda: bare_put(store, f"bare-{number}", 500, 512), lambda: bench(daemon, 1, level="replicated"))
            found.append((put, ack["latency_us"]["p50"]))
    print(f"p50 of a bare PUT {spread([put for put, _ in found], '{:,.0f}')} µs, of an append {spread([ack for _, ack in found], '{:,.0f}')} µs")
    beyond = [ack - 1.15 * put for put, ack in found]
    expect("at most 1 ms above 1.15 PUTs", statistics.median(beyond) <= 1000, f"{spread(beyond, '{:,.0f}')} µs")


class WaldReplicated(Wald):
    name, level = "wald, replicated", "replicated"
    durability = "REPLICATED: an object of the bucket and fdatasync, shared by all in flight; no gap"
    store = None

    def start(self):
        self.http = f"127.0.0.1:{free_port()}"
        self.spawn(wald(), "--data-dir", self.directory / "data", "--listen", self.address(), "--http-listen", self.http,
                   "--bucket-url", f"s3://{BUCKET}/wald", "--node-id", "one", "--bucket-gap", "0s", env=self.store.environment())
        # The ports answer before the bucket has passed its probe.
        if not wait_until(self.is_ready):
            raise Unavailable("the daemon is not ready")

    def is_ready(self):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{self.http}/readyz") as answer:
            return answer.status == 200
        return False


class S2Bucket(S2Lite):
    interval = "5ms"
    durability = "an object of the bucket for all of its 5 ms flush interval"
    store = None

    def start(self):
        environment = self.store.environment(AWS_ENDPOINT_URL_S3=self.store.base, AWS_REGION="us-east-1", SL8_FLUSH_INTERVAL=self.interval)
        self.spawn(self.program(), "--port", self.port, "--bucket", BUCKET, "--path", f"s2-{self.interval}", env=environment)


class S2Default(S2Bucket):
    name = "s2-lite, by default"
    interval = "50ms"
    durability = "the same, with the flush interval that it has by default"


@check("64 REPLICATED appends in flight, without a gap: at least 3 times the acks of s2-lite on the same bucket")
def acks(directory):
    options = SimpleNamespace(rounds=ROUNDS, seconds=SECONDS, bytes=128)
    servers = []
    with versity(directory) as store:
        try:
            for kind in (WaldReplicated, S2Bucket, S2Default) if WITH_S2 else (WaldReplicated,):
                kind.store = store
                servers.append(kind(directory))
            rows = measure(program(built_client()), servers, 64, options)
            table(rows, "64 in flight")
        except Unavailable as why:
            expect("the servers run", False, why)
            return
        finally:
            for server in servers:
                server.stop()
    rates = [[one.get("per_second", 0) for one in row["runs"]] for row in rows]
    if expect("REPLICATED appends are acknowledged", min(rates[0]) > 0, f"{spread(rates[0], '{:,.0f}')} acks/s") and WITH_S2:
        ratios = [ours / theirs for ours, theirs in zip(*rates[:2]) if theirs]
        expect("at least 3 times s2-lite", ratios and statistics.median(ratios) >= 3, spread(ratios) if ratios else rows[1]["runs"])


@check("60 s of REPLICATED appends at 20 MiB/s: none takes more than a second")
def steady(directory):
    size = 10 << 10
    rate = 20 * MIB // size
    with versity(directory) as store, owner(store, directory / "data") as daemon:
        daemon.ready()
        found = bench(daemon, 4096, "--rate", rate, "--record-bytes", size, seconds=60, level="replicated")
        times = found["latency_us"]
        expect("all are acknowledged", not found["errors"] and found["acks_per_second"] > rate * 0.99,
               f"{found['acks_per_second'] * size / MIB:.1f} MiB/s, {found['errors']}")
        expect("no ack takes more than a second", times["max"] <= 1e6,
               ", ".join(f"{name} {times[name] / 1000:,.1f} ms" for name in ("p50", "p99", "p999", "max")))


@check("64 REPLICATED appends in flight on a store that adds 30 ms: p50 at most 1.3 times a PUT")
def delayed(directory):
    found = []
    with own(directory) as (store, server), owner(store, directory / "data", "--bucket-gap", "0s") as daemon:
        daemon.ready()
        server.fault = lambda request: time.sleep(0.03)
        for number in range(ROUNDS):
            put, ack = in_turn(number, lambda: bare_put(store, f"bare-{number}", 50, 16 << 10), lambda: bench(daemon, 64, level="replicated"))
            found.append((put, ack["latency_us"]["p50"]))
    print(f"p50 of a PUT {spread([put / 1000 for put, _ in found], '{:.1f}')} ms, of an append {spread([ack / 1000 for _, ack in found], '{:.1f}')} ms")
    ratios = [ack / put for put, ack in found]
    expect("p50 is at most 1.3 PUTs", statistics.median(ratios) <= 1.3, spread(ratios))
