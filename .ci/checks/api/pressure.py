"""A producer is faster than the disk for a minute (an argument changes the seconds). Memory stays bounded, other clients wait
little longer than without it, and every request is answered. strace makes the disk slow by
delaying every flush. The measured times are then mainly the disk's and the daemon's, not the
machine's or the driver's: at these rates the driver mostly sleeps.
"""

from common import *

SECONDS = int(sys.argv[1]) if sys.argv[1:] else sized(60, 24)
DELAY = 0.3
SLOW = ["-e", "trace=fdatasync", "-e", f"inject=fdatasync:delay_enter={DELAY * 1e6:.0f}"]
BOUND = 64 << 20
SMALL = dict(appends=10**9, writers=16, connections=8, pause_ms=5, logs=16, prefix="small", attempts=1, tolerate=True)


class Peak(threading.Thread):
    """Samples bounded quantities until stopped."""

    def __init__(self, daemon):
        super().__init__(daemon=True)
        self.daemon_, self.memory, self.inflight, self.over = daemon, 0, 0, threading.Event()
        self.start()

    def run(self):
        while not self.over.wait(0.05):
            self.memory = max(self.memory, self.daemon_.anonymous())
            self.inflight = max(self.inflight, self.daemon_.metric("wald_inflight_bytes"))

    def stop(self):
        self.over.set()
        self.join()
        return self


@check("A producer faster than the disk: bounded memory, little delay for others, an answer to each request")
def greedy_beside_small(data, seconds=SECONDS):
    limit = 4 << 20
    # Large enough that none is filled: a new segment takes a flush of its own, so a client that meets one
    # waits for three flushes instead of two, with or without other clients.
    with Daemon(data, "--max-inflight-bytes", limit, "--segment-bytes", "256MiB", "--pool-segments", 1,
                strace=SLOW) as daemon:
        wait_until(lambda: daemon.metric('wald_segments{state="ready"}') >= 1)
        alone = daemon.load(seconds=seconds / 4, **SMALL).result()
        peak = Peak(daemon)
        with daemon.load(seconds=seconds, appends=10**9, writers=256, bytes=64 << 10, logs=8, prefix="greedy", attempts=1,
                         tolerate=True, ledger=f"{data}.ledger") as greedy:
            wait_until(lambda: daemon.metric('wald_rejected_total{operation="write",reason="BUSY"}') > 0)
            beside = daemon.load(seconds=seconds - 5, **SMALL).result()
            told = greedy.result()
            entries = greedy.entries()
        peak.stop()
        print(f"     alone: {alone}\n     beside: {beside}\n     greedy: {told}")
        busy = told["errors"].get("ResourceExhausted BUSY NotApplied", 0)
        expect(f"a producer offers more than the disk takes, for {seconds} s", busy > 100 and told["acks"] > 100,
               f"{told['acks'] * 64 / 1024 / told['seconds']:.1f} MiB/s acked, {busy} times BUSY")
        expect("resident anonymous memory is at most 64 MiB above max_inflight_bytes", peak.memory <= limit + BOUND,
               f"{peak.memory / 2**20:.1f} MiB, limit {limit >> 20} MiB")
        expect("the bytes in flight stay within max_inflight_bytes", 0 < peak.inflight <= limit, f"{peak.inflight / 2**20:.1f} MiB")
        expect("the others' p99 is at most 1.5 times their p99 alone", beside["p99_us"] <= 1.5 * alone["p99_us"],
               f"{beside['p99_us'] / 1000:.0f} ms beside it, {alone['p99_us'] / 1000:.0f} ms alone")
        expect("none of the others is refused", not beside["errors"] and not alone["errors"])
        expect("and every request of the producer is answered, by an ack or by BUSY", set(told["errors"])
               == {"ResourceExhausted BUSY NotApplied"} and told["acks"] + busy == len(entries) , len(entries))
        expect("nothing is in flight when it is over", daemon.metric("wald_inflight_bytes") == 0)
        verify(daemon, entries)


def verify(daemon, entries):
    """Acked records are there, records answered with BUSY are not."""
    done = daemon.walctl("logs", "--prefix", "greedy/", "--output", "json")
    logs = json.loads(done.stdout)
    rows = logs if isinstance(logs, list) else next(value for value in logs.values() if isinstance(value, list))
    there = sum(int(row.get("tail_lsn", row.get("tailLsn", 0))) for row in rows)
    acked = {(entry.log, entry.lsn) for entry in entries if entry.acked}
    expect("the number of stored records is the number of acks", there == len(acked) == sum(e.acked for e in entries), there)


@check("Records of a megabyte that are not admitted take no memory")
def large_ones(data):
    limit = 32 << 20
    with Daemon(data, strace=SLOW) as daemon:
        peak = Peak(daemon.ready())
        with daemon.load(seconds=6, appends=10**9, writers=256, connections=2, bytes=1_000_000, logs=8, prefix="greedy",
                         attempts=1, tolerate=True) as greedy:
            told = greedy.result()
        peak.stop()
        expect("256 records of a megabyte offered at a time: memory at most 64 MiB above max_inflight_bytes",
               peak.memory <= limit + BOUND, f"{peak.memory / 2**20:.1f} MiB, limit {limit >> 20} MiB; {told}")
        expect("every one is answered", set(told["errors"]) == {"ResourceExhausted BUSY NotApplied"} and told["acks"] > 0)
