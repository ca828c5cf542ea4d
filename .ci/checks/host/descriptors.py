"""File descriptors: 2,200 idle sockets next to appends under a limit of 1,024; all phases of a daemon under a limit of
256; a refused start; and a limit that falls below the number in use and rises again. No append is lost,
sockets never take the store's share, and the daemon stops with 0.
"""

import resource
import socket

from common import *

_, HARD = resource.getrlimit(resource.RLIMIT_NOFILE)
# This process holds the idle sockets.
resource.setrlimit(resource.RLIMIT_NOFILE, (HARD, HARD))
RESERVE = 64
BUSY = "ResourceExhausted BUSY NotApplied"
# Records are numbers, padded with zeros to the requested size.
sys.set_int_max_str_digits(0)


def limit(soft, hard):
    """The command that gives a daemon its limit of open files."""
    return ["prlimit", f"--nofile={soft}:{hard}"]


def idle(address, count):
    """Sockets that connect and then send nothing."""
    host, _, port = address.rpartition(":")
    sockets = []
    for _ in range(count):
        sockets.append(socket.socket())
        sockets[-1].setblocking(False)
        try:
            sockets[-1].connect((host, int(port)))
        except BlockingIOError:
            pass
        if len(sockets) % 100 == 0:
            time.sleep(0.02)  # The backlog of a port is shorter than the number of sockets.
    return sockets


def close(sockets):
    for one in sockets:
        one.close()


class Peak(threading.Thread):
    """Maximum number of open descriptors of a daemon, sampled until stopped."""

    def __init__(self, daemon):
        super().__init__(daemon=True)
        self.daemon_, self.over, self.most = daemon, threading.Event(), 0
        self.start()

    def run(self):
        while not self.over.wait(0.02):
            try:
                self.most = max(self.most, len(self.daemon_.descriptors()))
            except FileNotFoundError:
                return

    def stop(self):
        self.over.set()
        self.join()
        return self.most


def said(daemon, text):
    return [json.loads(line) for line in daemon.lines if text in line]


def suppressed(daemon):
    """Number of suppressed lines about failed accepts."""
    told = said(daemon, "log lines were suppressed")
    return sum(line["lines"] for line in told if line["at"].endswith("/transport.rs"))


def soft_limit(pid):
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]


def restart(what, data, entries, *arguments, under=()):
    """After a restart: every ack once, and no refused record."""
    with Daemon(data, *arguments, under=under) as daemon:
        found = stored(daemon)
        ended = daemon.stop()
    acks = [entry for entry in entries if entry.acked]
    lost = [entry for entry in acks if found.get((entry.log, entry.lsn)) != entry.number]
    kept = {(log, number) for (log, _), number in found.items()}
    refused = [entry for entry in entries if not entry.acked and (entry.log, entry.number) in kept]
    expect(f"{what}: a restart holds every ack once, and no refused record",
           acks and not lost and not refused and len(kept) == len(found) and ended == 0,
           f"{len(acks)} acks, {len(lost)} lost, {len(refused)} refused and there, exit {ended}")


@check("2,200 idle sockets under a limit of 1,024 files take nothing from the store")
def crowd(directory):
    data, what = directory / "crowd", "1,100 idle sockets on each port, limit 1,024"
    arguments = ["--segment-bytes", "4MiB", "--shutdown-timeout", "10s"]
    with Daemon(data, *arguments, under=limit(512, 1024)) as daemon:
        lowered = said(daemon, "hard limit of open files is 1024")
        expect(f"{what}: the start raises the soft limit and prints the lowered bounds",
               soft_limit(daemon.pid) == 1024 and lowered and "max_connections is" in lowered[0]["message"]
               and wait_until(lambda: said(daemon, "limits of this process")), lowered and lowered[0]["message"])
        daemon.ready()
        with daemon.load(appends=150, writers=4, logs=4, bytes=900_000, rate=25, durability="durable",
                         ledger=f"{data}.ledger") as load:
            wait_until(lambda: daemon.metric("wald_appended_records_total") > 3)
            peak = Peak(daemon)
            sockets = idle(daemon.http, 1100) + idle(daemon.grpc, 1100)
            result = load.result()
            entries = load.entries()
        most = peak.stop()
        expect(f"{what}: every append is acked", result["acks"] == 150, result)
        expect(f"{what}: the reserve is never touched", 300 < most <= 1024 - RESERVE, f"{most} open at most")
        began = time.monotonic()
        code = daemon.stop()
        expect(f"{what}: it stops with 0", code == 0, f"{time.monotonic() - began:.1f} s")
        close(sockets)
    restart(what, data, entries, *arguments)


@check("Start, load and stop with a limit of 256 files")
def small(directory):
    data, what, under = directory / "small", "limit 256", limit(256, 256)
    arguments = ["--segment-bytes", "256KiB", "--max-record-bytes", "64KiB", "--sorter-step-bytes", "1MiB"]
    with Daemon(data, *arguments, under=under) as daemon:
        expect(f"{what}: the start prints the lowered bounds", said(daemon, "hard limit of open files is 256"),
               said(daemon, "hard limit")[0]["message"])
        peak = Peak(daemon.ready())
        with daemon.load(appends=6_000, writers=8, logs=20, bytes=9_000, ledger=f"{data}.ledger") as load:
            result = load.result()
            entries = load.entries()
        expect(f"{what}: it takes appends over {result['acks'] * 9_000 >> 18} segments", result["acks"] == 6_000, result)
        read = stored(daemon)
        expect(f"{what}: it reads old segments", len(read) == 6_000, len(read))
        expect(f"{what}: it sorts", wait_until(lambda: daemon.metric("wald_sorter_written_bytes_total") > 0, 30))
        backup = directory / "backup"
        done = daemon.walctl("backup", backup)
        expect(f"{what}: it saves a backup", done.returncode == 0, done.stderr.decode()[-200:])
        done = daemon.walctl("verify")
        expect(f"{what}: it verifies itself", done.returncode == 0, done.stderr.decode()[-200:])
        expect(f"{what}: the reserve is never touched", peak.stop() <= 256 - RESERVE, f"{peak.most} open at most")
        expect(f"{what}: it stops with 0", daemon.stop() == 0)
    restart(what, data, entries, *arguments, under=under)


@check("A limit below the minimum is refused with the number that suffices")
def refused(directory):
    data = directory / "refused"
    try:
        with Daemon(data, under=limit(64, 64)):
            expect("limit 64: the start is refused", False)
    except Ended as ended:
        text = "".join(ended.lines)
        needed = re.search(r"to at least (\d+)", text)
        expect("limit 64: the start is refused with 78 and the number needed", ended.code == 78 and needed, text.strip())
    if needed:
        least = int(needed[1])
        with Daemon(data, under=limit(least, least)) as daemon:
            done = daemon.walctl("append", "a", "--format", "raw", "-", input=b"x")
            expect(f"limit {least}: this number is enough", done.returncode == 0 and daemon.stop() == 0, done.stderr.decode())


@check("The limit falls below the number in use and rises again")
def taken(directory):
    data, what = directory / "taken", "descriptors taken away"
    arguments = ["--segment-bytes", "256KiB", "--max-record-bytes", "64KiB", "--sorter-step-bytes", "1MiB"]
    with Daemon(data, *arguments) as daemon:
        before = resource.prlimit(daemon.ready().pid, resource.RLIMIT_NOFILE)
        with daemon.load(appends=10**9, seconds=12, writers=4, logs=10, bytes=9_000, pause_ms=1, attempts=1, tolerate=True,
                         ledger=f"{data}.ledger") as load:
            wait_until(lambda: daemon.metric("wald_appended_records_total") > 500)
            fell = time.time()
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (8, before[1]))
            warned = wait_until(lambda: said(daemon, "no file descriptor for another segment"), 20)
            sockets = idle(daemon.grpc, 20)
            logged = wait_until(lambda: len(said(daemon, "accepting connections failed")) >= 3, 20)
            seconds = time.time() - fell
            accepts = len(said(daemon, "accepting connections failed"))
            expect(f"{what}: failed accepts are logged once a second, with their count",
                   logged and accepts <= seconds + 1 and wait_until(lambda: suppressed(daemon) > 1, 20),
                   f"{accepts} lines in {seconds:.1f} s, {suppressed(daemon)} suppressed")
            alive = daemon.process.poll() is None
            expect(f"{what}: the daemon reports it and survives", warned and alive, daemon.process.poll())
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
            rose = time.time()
            close(sockets)
            result = load.result()
            entries = load.entries()
        errors = {}
        for entry in entries:
            if not entry.acked:
                errors[entry.error] = errors.get(entry.error, 0) + 1
        expect(f"{what}: appends are refused, to be retried, and nothing else", set(errors) == {BUSY}, errors)
        back = [entry.got / 1e6 - rose for entry in entries if entry.acked and entry.got / 1e6 > rose]
        expect(f"{what}: appends continue when they are back", len(back) > 100, f"after {min(back, default=-1):.2f} s, {result}")
        failed = daemon.metric("wald_journal_failed")
        expect(f"{what}: the journal has not failed", failed == 0)
        done = daemon.walctl("verify")
        expect(f"{what}: nothing counts as damaged", done.returncode == 0, done.stdout.decode()[-300:])
        read = stored(daemon)
        expect(f"{what}: old records are read again", len(read) == sum(entry.acked for entry in entries), len(read))
        expect(f"{what}: it stops with 0", daemon.stop() == 0)
        bad = [line for line in daemon.lines if '"level":"ERROR"' in line]
        expect(f"{what}: no error is logged", not bad, bad[:2])
    restart(what, data, entries, *arguments)
