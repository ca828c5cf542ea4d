"""strace shows the cost of an ack and the flush it waits for: group commit over many
logs, no flush for appends that request none, a flush before every durable answer, and no ack
after a failed flush.
"""

import json
import re

from common import *

FLUSHES = "fdatasync,fsync,sync_file_range,msync,sync,syncfs"
DELAY_US = 300_000


def counted(table):
    """Calls in the table that `strace -c` prints."""
    rows = [line.split() for line in table.splitlines() if re.match(r"\s*[\d.]+\s+[\d.]+\s+\d+\s+\d+\s", line)]
    return {row[-1]: int(row[3]) for row in rows if row[-1] != "total"}


def load(daemon, appends=10_000, writers=64, logs=1_000, durability="unspecified"):
    return daemon.load(appends=appends, writers=writers, logs=logs, durability=durability).result()


def flushes(daemon):
    """Number of journal flushes that the daemon counts."""
    return int(daemon.metric("wald_flush_duration_seconds_count"))


@check("10,000 strict appends by 64 writers over 1,000 logs cost at most 1,500 flushes")
def at_most_1500(data):
    with Daemon(data) as daemon:
        strace = Strace(daemon.ready(), "-c", "-e", f"trace={FLUSHES}")
        before = flushes(daemon)
        done = load(daemon)
        table = strace.stop()
        calls, own = counted(table), flushes(daemon) - before
        print(table.rstrip())
        expect("10,000 strict appends by 64 writers over 1,000 logs are acked", done["acks"] == 10_000, json.dumps(done))
        total = sum(calls.values())
        expect("they cost at most 1,500 flushes", 0 < total <= 1_500, total)
        expect("the daemon's own metric counts the same", abs(own - total) <= 2, own)
        before = flushes(daemon)
        done = load(daemon)
        own = flushes(daemon) - before
        # Without strace writers return sooner than a fast flush ends, so groups are smaller.
        expect("without strace in the way a flush still carries four appends and more", 0 < own <= 2_500,
               f"{own}; {json.dumps(done)}")
        expect("SIGTERM ends it with 0", daemon.stop() == 0)


@check("WRITTEN appends cost no flush until Sync or the interval")
def none_until_sync(data):
    with Daemon(data, "--sync-interval", "1h") as daemon:
        strace = Strace(daemon.ready(), "-c", "-e", f"trace={FLUSHES}")
        done = load(daemon, durability="written")
        # Longer than the journal's other timers; no event marks the end.
        time.sleep(1)
        calls = counted(strace.stop())
        expect("10,000 appends with WRITTEN are acked", done["acks"] == 10_000, json.dumps(done))
        expect("they cost no flush at all", not calls, calls)
        tail = {"log": "load/7", "visibility": "VISIBILITY_DURABLE"}
        code, _, text = daemon.call("wald.v1.WalService/GetTail", tail)
        expect("for a reader of durable records not even the log exists", "LOG_NOT_FOUND" in text)
        strace = Strace(daemon, "-c", "-e", f"trace={FLUSHES}")
        code, _, text = daemon.call("wald.v1.WalService/Sync", {})
        calls = counted(strace.stop())
        expect("Sync flushes", code == 0 and sum(calls.values()) >= 1, calls)
        _, answer, _ = daemon.call("wald.v1.WalService/GetTail", tail)
        expect("and then they are durable", answer and answer["durableLsn"] == "10")
    with Daemon(data) as daemon:
        daemon.call("wald.v1.WalService/Append", {"log": "soon", "record": {"text": "x"}, "durability": "DURABILITY_WRITTEN"})
        until, durable = time.monotonic() + 10, None
        while durable != "1" and time.monotonic() < until:
            _, answer, _ = daemon.call("wald.v1.WalService/GetTail", {"log": "soon"})
            durable = answer and answer["durableLsn"]
        expect("with the default interval it becomes durable automatically", durable == "1")


@check("DURABLE waits for its flush, WRITTEN does not")
def flush_before_answer(data):
    with Daemon(data) as daemon:
        load(daemon, appends=2, writers=1, logs=2)
        strace = Strace(daemon, "-e", "trace=fdatasync", "-e", f"inject=fdatasync:delay_exit={DELAY_US}")
        written = load(daemon, appends=1, writers=1, logs=1, durability="written")
        expect("WRITTEN does not wait for a flush", written["acks"] == 1 and written["max_us"] < DELAY_US, json.dumps(written))
        durable = load(daemon, appends=1, writers=1, logs=1, durability="durable")
        expect(f"DURABLE waits for a flush that takes {DELAY_US // 1000} ms", durable["acks"] == 1
               and durable["p50_us"] >= DELAY_US, json.dumps(durable))
        slow = daemon.load(appends=4, writers=1, logs=1)
        many = load(daemon, appends=200, writers=1, logs=2, durability="written")
        expect("WRITTEN is answered while a flush runs", slow.process.poll() is None and many["acks"] == 200
               and many["max_us"] < DELAY_US, json.dumps(many))
        slow.result()
        strace.stop()


@check("A failed flush is no acknowledgement, and is not tried again")
def no_ack_after_failure(data):
    # Without markers: the failing flush is the append's.
    with Daemon(data, "--marker-delay", "1h") as daemon:
        for text in ("one", "two"):
            daemon.call("wald.v1.WalService/Append", {"log": "kept", "record": {"text": text}})
        strace = Strace(daemon.ready(), "-e", "trace=fdatasync", "-e", "inject=fdatasync:error=EIO")
        code, _, text = daemon.call("wald.v1.WalService/Append", {"log": "kept", "record": {"text": "three"}})
        expect("a failed flush is no ack", code != 0 and "Internal" in text and '"JOURNAL_FAILED"' in text,
               "" if "JOURNAL_FAILED" in text else text)
        expect("its outcome is unknown", '"outcome": "UNKNOWN"' in text and '"retry": "SAFE_WITH_CONDITION"' in text)
        expect("the daemon ends so that a restart recovers", daemon.process.wait(timeout=60) == 70)
        trace = strace.stop()
        expect("the flush was not tried again", trace.count("INJECTED") == 1, trace.count("INJECTED"))
    with Daemon(data) as daemon:
        _, answer, _ = daemon.call("wald.v1.WalService/Read", {"log": "kept", "view": "RECORD_VIEW_TEXT"})
        kept = [record["text"] for record in answer["batch"]["records"]]
        expect("after it every acked record is there", kept[:2] == ["one", "two"], kept)
