"""SIGTERM under load, in every sync mode: after the restart every acked append exists, and every refused one
does not. The exit code is 0, and the next start reports a clean end and keeps the epoch.
"""

from common import *

MODES = ("strict", "batch", "interval", "async", "manual")


def terminated(directory, mode, slow):
    data = directory / f"{mode}-{slow}"
    # With a slow disk many appends wait for a flush when the signal comes.
    strace = ["-e", "trace=fdatasync", "-e", "inject=fdatasync:delay_enter=100000"] if slow else None
    with Daemon(data, "--sync-mode", mode, strace=strace) as daemon:
        epoch = daemon.start["recovery_epoch"]
        with daemon.load(seconds=60, appends=10**9, writers=64, connections=4, logs=50, attempts=1, tolerate=True,
                         ledger=f"{data}.ledger") as load:
            wait_until(lambda: daemon.metric("wald_appended_records_total") > (300 if slow else 3000))
            code = daemon.stop()
            told = load.result()
        entries = load.entries()
        said = "everything accepted is on the device" in "".join(daemon.lines)
    what = f"{mode}{', slow disk' if slow else ''}"
    expect(f"{what}: SIGTERM under load ends it with 0", code == 0 and said and "error" not in told, code)
    with Daemon(data, "--sync-mode", mode) as daemon:
        expect(f"{what}: the next start says clean and keeps the recovery epoch",
               daemon.start["recovery"] == "clean" and daemon.start["recovery_epoch"] == epoch,
               f"{daemon.start['recovery']}, {epoch} → {daemon.start['recovery_epoch']}, {daemon.start['recovery_ms']} ms")
        found = {(log, number) for (log, _), number in stored(daemon).items()}
        places = stored(daemon)
    acks = [entry for entry in entries if entry.acked]
    errors = told.get("errors", {})
    lost = [entry for entry in acks if places.get((entry.log, entry.lsn)) != entry.number]
    expect(f"{what}: every acked append is there", len(acks) > 200 and not lost, f"{len(acks)} acks, {len(lost)} lost")
    silent = found - {(entry.log, entry.number) for entry in acks}
    expect(f"{what}: every accepted append was acked: nothing is there without an ack", not silent,
           f"{len(silent)} of {len(found)}; told otherwise: {errors}")


@check("SIGTERM under load in every mode: acknowledged appends are there, refused ones are not, a clean end")
def every_mode(directory):
    for mode in MODES:
        terminated(directory, mode, False)


@check("The same with a slow disk, where many appends wait for a flush")
def slow_disk(directory):
    terminated(directory, "strict", True)
