"""Tests the meaning of an ack in each sync mode from outside: the level and the flush before the answer
for every requested durability, the records that a kill removes and keeps, the modes that flush
within the sync interval, and the modes that never do.
"""

from common import *

LEVELS = ["ACCEPTED", "WRITTEN", "DURABLE"]
# Default levels of an Append and an AppendBatch that request none.
MODES = {"strict": ("DURABLE", "DURABLE"), "batch": ("WRITTEN", "DURABLE"), "interval": ("WRITTEN", "WRITTEN"),
         "async": ("WRITTEN", "WRITTEN"), "manual": ("ACCEPTED", "ACCEPTED")}
TRACE = ["-T", "-e", "trace=fdatasync,pwrite64"]
WAL = "wald.v1.WalService/"


def flushed(trace):
    return [call for call in calls(trace) if call.name == "fdatasync" and call.result is not None]


def ask(daemon, single, durability=None):
    """Appends one record; returns the answer, and the number of flushes before it."""
    durability = {"durability": f"DURABILITY_{durability}"} if durability else {}
    before = len(flushed(daemon.trace))
    if single:
        method, request = "Append", {"log": "a", "record": {"text": "x"}, **durability}
    else:
        method, request = "AppendBatch", {"batches": [{"log": "a", "records": [{"text": "x"}]}], **durability}
    code, answer, text = daemon.call(WAL + method, request)
    if code != 0:
        raise SystemExit(text)
    return answer, len(flushed(daemon.trace)) - before


@check("Level and flush of each mode, call and requested level, as the tables of durability say")
def levels(directory):
    for mode, defaults in MODES.items():
        # No other flushes: no interval, no marker.
        with Daemon(directory / f"levels-{mode}", "--sync-mode", mode, "--sync-interval", "1h",
                    "--marker-delay", "1h", strace=TRACE) as daemon:
            ask(daemon.ready(), True, "DURABLE")
            for single, default in zip((True, False), defaults):
                name, got = "Append" if single else "AppendBatch", {}
                for wish in (None, *LEVELS):
                    answer, flushes = ask(daemon, single, wish)
                    got[wish or "nothing"] = answer["durability"].removeprefix("DURABILITY_"), flushes
                # Other modes never hold records back: the answer to ACCEPTED names the level reached.
                weakest = "ACCEPTED" if mode == "manual" else "WRITTEN"
                wanted = {"nothing": default, "ACCEPTED": weakest, "WRITTEN": "WRITTEN", "DURABLE": "DURABLE"}
                holds = all(got[wish][0] == level and (got[wish][1] > 0) == (level == "DURABLE")
                            for wish, level in wanted.items())
                expect(f"{mode}: {name} is answered at the level of the table, after a flush only if DURABLE",
                       holds, ", ".join(f"{wish} → {level} ({n} flushes)" for wish, (level, n) in got.items()))
            answer, flushes = ask(daemon, True, "DURABLE")
            expect(f"{mode}: DURABLE of one record is DURABLE of all before it",
                   flushes >= 1 and int(answer["durableLsn"]) == int(answer["lsn"]) + 1)


@check("Modes that flush within the interval without a request, and modes that do not")
def unasked(directory):
    for mode in MODES:
        with Daemon(directory / f"unasked-{mode}", "--sync-mode", mode, "--sync-interval", "100ms",
                    "--marker-delay", "1h", strace=TRACE) as daemon:
            ask(daemon.ready(), True, "DURABLE")
            ask(daemon, True, "WRITTEN")
            durable = lambda: daemon.call(WAL + "GetTail", {"log": "a"})[1].get("durableLsn") == "2"
            if mode in ("async", "manual"):
                # Twenty intervals; no event marks the end.
                before = len(flushed(daemon.trace))
                time.sleep(2)
                expect(f"{mode}: nothing is flushed unasked", len(flushed(daemon.trace)) == before and not durable())
                code, _, _ = daemon.call(WAL + "Sync", {})
                expect(f"{mode}: Sync flushes", len(flushed(daemon.trace)) > before and durable())
                ask(daemon, True)
                before = len(flushed(daemon.trace))
                daemon.stop()
                expect(f"{mode}: so does the shutdown", len(flushed(daemon.trace)) > before)
            else:
                expect(f"{mode}: a written record becomes durable automatically", wait_until(durable, 10))


@check("An append every few milliseconds does not postpone the flush forever")
def trickle(directory):
    interval = 0.3
    with Daemon(directory / "trickle", "--sync-mode", "interval", "--sync-interval", "300ms",
                strace=["-T", "-y", *TRACE[1:]]) as daemon:
        daemon.ready().load(appends=1, writers=1, logs=1).result()
        began = time.time()
        done = daemon.load(seconds=3, appends=10**6, writers=1, logs=1, pause_ms=10).result()
        ended = time.time()
        wait_until(lambda: flushed(daemon.trace)[-1].began > ended)
    seen = [call for call in calls(daemon.trace) if began < call.began and "/journal/" in call.arguments]
    # The marker of an idle journal may be written as the daemon ends.
    writes = [call for call in seen if call.name == "pwrite64" and call.began < ended]
    flushes = [call for call in seen if call.name == "fdatasync"]
    # A flush covers the writes that ended before it began.
    delays = [min((f.began for f in flushes if f.began >= w.ended), default=float("inf")) - w.ended for w in writes]
    # 100 ms for threads that wait for a processor.
    expect("a trickle in interval mode: every write is followed by a flush within the interval",
           len(writes) > 50 and max(delays) <= interval + 0.1,
           f"{done['acks']} appends, {len(writes)} writes, {len(flushes)} flushes, at most {max(delays) * 1000:.0f} ms")
    expect("and not by one each", len(flushes) < len(writes) / 5)


@check("After kill -9 every record acknowledged as WRITTEN or higher is there, in each mode")
def killed(directory):
    for mode in MODES:
        data = directory / f"killed-{mode}"
        with Daemon(data, "--sync-mode", mode) as daemon:
            epoch = daemon.start["recovery_epoch"]
            with daemon.load(seconds=60, appends=10**9, writers=16, logs=20, attempts=1, tolerate=True,
                             ledger=directory / f"{mode}.ledger") as load:
                wait_until(lambda: daemon.metric("wald_appended_records_total") > 2000)
                daemon.kill()
                load.result()
                entries = load.entries()
        with Daemon(data, "--sync-mode", mode) as daemon:
            found = stored(daemon)
            _, tail, _ = daemon.call(WAL + "GetTail", {"log": "load/0", "recovery_epoch": epoch})
            survived = int(tail["survivedPosition"])
        acked = {(entry.log, entry.lsn): entry for entry in entries if entry.acked}
        kept = {place: e for place, e in acked.items() if e.level != "ACCEPTED"}
        lost = [place for place, entry in kept.items() if found.get(place) != entry.number]
        expect(f"{mode}: kill -9 takes nothing acked as WRITTEN or DURABLE", not lost,
               f"{len(acked)} acks, {len(kept)} of them WRITTEN or more, {len(found)} records found, {len(lost)} lost")
        placed = {place: entry for place, entry in acked.items() if entry.position is not None}
        expect(f"{mode}: a record with a position exists if and only if that is below survived_position",
               all((entry.position < survived) == (place in found) for place, entry in placed.items()), len(placed))
        numbers = {(entry.log, entry.number) for entry in entries}
        strange = [place for place, number in found.items() if (place[0], number) not in numbers]
        twice = len(found) - len({(log, number) for (log, _), number in found.items()})
        # The driver's ledger is complete, so every stored record was requested.
        expect(f"{mode}: no record that was not sent, and no duplicate", not strange and not twice)
        logs = {log for log, _ in found}
        expect(f"{mode}: lsns are dense", all((log, lsn) in found for log in logs
                                              for lsn in range(sum(1 for place in found if place[0] == log))))


@check("manual loses exactly the records that were not synced, and survived_position says so")
def manual(directory):
    data = directory / "manual"
    with Daemon(data, "--sync-mode", "manual") as daemon:
        epoch = daemon.start["recovery_epoch"]
        append = lambda: daemon.call(WAL + "Append", {"log": "a", "record": {"text": "x"}})[1]
        # The first append makes the log, which is a frame of its own.
        append()
        before = [append() for _ in range(9)]
        _, synced, _ = daemon.call(WAL + "Sync", {})
        after = [append() for _ in range(7)]
        expect("manual: a record in memory has its lsn and no position",
               all("position" not in answer for answer in before + after), [answer["lsn"] for answer in after])
        daemon.kill()
    with Daemon(data, "--sync-mode", "manual") as daemon:
        _, tail, text = daemon.call(WAL + "GetTail", {"log": "a", "recovery_epoch": epoch})
        _, page, _ = daemon.call(WAL + "Read", {"log": "a", "view": "RECORD_VIEW_TEXT"})
        records = page["batch"]["records"]
        expect("manual: a kill leaves exactly the synced records", len(records) == 10 and tail["tailLsn"] == "10",
               f"{1 + len(before) + len(after)} acked, 10 synced, {len(records)} left")
        survived = int(tail["survivedPosition"])
        expect("manual: survived_position says that the Sync's position survived",
               survived >= int(synced["durablePosition"]), f"synced {synced['durablePosition']}, survived {survived}")
        _, answer, _ = daemon.call(WAL + "Append", {"log": "a", "record": {"text": "y"},
                                                    "durability": "DURABILITY_DURABLE"})
        expect("manual: the next append lies beyond it, at the first lost lsn",
               int(answer["position"]) > survived and answer["lsn"] == "10" and answer["recoveryEpoch"] == str(epoch + 1))
