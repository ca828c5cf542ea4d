"""A flush fails once: at start, and under load at each of the first calls of fdatasync of a
thread, and at the first of fsync (directories). After it no append is acked. Appends in flight get
UNKNOWN, later ones NOT_APPLIED, and the daemon ends with its own exit code. A restart holds every
acked record, and no record reported as NOT_APPLIED. A page cache also shows bytes that the device
never received, on a loop device whose backing file has no space: recovery does not trust them.
Unreadable sectors, too: a start, scans, verify, backup and repair pass them and name them.
"""

import urllib.error
from concurrent.futures import ThreadPoolExecutor

import interpose
from common import *

# A flush at start is of a file or directory that cannot be made durable; later it is of the journal.
CODES = (70, 74)
# Small, so that the pool and rolls come within the first 50 calls.
ARGUMENTS = ["--segment-bytes", "64KiB", "--sync-interval", "20ms"]
UNKNOWN = "Internal JOURNAL_FAILED Unknown"
# Answers of the server as it ends, and of the client after it has ended.
NOT_APPLIED = {"Unavailable JOURNAL_FAILED NotApplied", "Unavailable DRAINING NotApplied", "Unavailable - NotApplied"}
LOST = "Unavailable - Unknown"


class Outcome:
    """The result of one run with one failed call."""

    def __init__(self, what):
        self.what = what
        self.failed = None
        self.entries, self.wrong = [], []

    def expect(self, holds, what):
        if not holds:
            self.wrong.append(f"{self.what}: {what}")


def at_start(directory, number):
    """The n-th flush of the thread that opens the store fails; then the daemon starts."""
    run = Outcome(f"at start, fdatasync {number}")
    data = directory / f"start-{number}"
    with Daemon(data, *ARGUMENTS) as daemon:
        daemon.kill()
    trace = Path(f"{data}.strace")
    try:
        with Daemon(data, *ARGUMENTS, strace=["-e", "trace=fdatasync", "-e",
                                              f"inject=fdatasync:error=EIO:when={number}"]) as daemon:
            # Such a start has fewer flushes, or another thread made the call and ends the daemon soon.
            if "INJECTED" in trace.read_text():
                run.expect(daemon.process.wait(timeout=60) in CODES, "it served on")
    except Ended as ended:
        run.expect(ended.code in CODES, f"the exit code is {ended.code}")
    run.failed = "INJECTED" in trace.read_text()
    verify(run, data)
    return run


def serving(directory, name, number):
    """The n-th call of a thread fails, under load; then a restart."""
    run = Outcome(f"serving, {name} {number}")
    data = directory / f"{name}-{number}"
    with Daemon(data, *ARGUMENTS) as daemon:
        strace = Strace(daemon.ready(), "-ttt", "-T", "-y", "-e", f"trace={name}",
                        "-e", f"inject={name}:error=EIO:when={number}")
        loads = [daemon.load(seconds=30, appends=10**9, writers=writers, logs=10, bytes=1000, attempts=1, pause_ms=1,
                             tolerate=True, durability=level, prefix=level, ledger=f"{data}-{level}.ledger")
                 for level, writers in (("durable", 6), ("written", 2))]
        code = daemon.process.wait(timeout=60)
        for load in loads:
            told = load.result()
            # The daemon may end before the driver has a connection.
            run.expect("error" not in told or "onnect" in told["error"], told)
            run.entries += load.entries()
        strace.process.stderr.read()
        strace.process.wait()
    run.expect(code == 70, f"the exit code is {code}")
    seen = calls(strace.out)
    # An index or a checkpoint is written again.
    derived = lambda call: re.search(r"/(index|checkpoint)[/>]", call.arguments)
    failed = [call for call in seen if call.result is not None and call.injected and not derived(call)]
    # strace counts by thread: two may come to their n-th call before the process ends.
    run.expect(len({call.thread for call in failed}) == len(failed) > 0, f"{len(failed)} calls failed")
    if failed:
        (run.failed, *_) = failed
        run.path = re.search(r"<(.*?)>", run.failed.arguments)[1]
        # A directory is flushed for each of its files.
        again = [c for c in seen if c.began > run.failed.ended and run.path in c.arguments and name == "fdatasync"]
        run.expect(not again, "the flush was tried again")
        # The thread informs the others when strace releases it, after strace took the time. Until then an ack of an
        # append that did not wait for this flush may pass: only written, or flushed separately.
        waits = lambda entry: entry.log.startswith("durable") and "/journal/" in run.path
        over = lambda entry: run.failed.ended * 1e6 + (0 if waits(entry) else 50_000)
        late = [entry for entry in run.entries if entry.acked and entry.sent > over(entry)]
        run.expect(not late, f"sent after the failure and acked: {[entry.log for entry in late]}")
    for entry in run.entries:
        if not entry.acked:
            run.expect(entry.error in NOT_APPLIED | {UNKNOWN, LOST}, f"told {entry.error}")
    verify(run, data)
    return run


def verify(run, data):
    """After a restart: every ack, no refused record, no duplicate."""
    with Daemon(data, *ARGUMENTS) as daemon:
        found = {**stored(daemon, "durable/"), **stored(daemon, "written/")}
    lost = [e for e in run.entries if e.acked and found.get((e.log, e.lsn)) != e.number]
    run.expect(not lost, f"{len(lost)} acked records are lost")
    kept = {(log, number) for (log, _), number in found.items()}
    run.expect(len(kept) == len(found), "a record is there twice")
    refused = [e for e in run.entries if not e.acked and e.outcome == "NotApplied" and (e.log, e.number) in kept]
    run.expect(not refused, f"{len(refused)} records are there that were told to be NOT_APPLIED")
    # A connection may close before a request reaches the daemon, but not on one that did.
    silent = [e for e in run.entries if not e.acked and e.error == LOST and (e.log, e.number) in kept]
    run.expect(not silent, f"{len(silent)} records are there whose requests were not answered")


@check("A flush fails, each in turn, at start and under load: no acknowledgement after it, exit code, restart")
def injected(directory):
    # A few at once, since each mostly waits.
    with ThreadPoolExecutor(4) as pool:
        starts = list(pool.map(lambda number: at_start(directory, number), range(1, 31)))
        work = [("fdatasync", number) for number in range(1, 51)] + [("fsync", number) for number in range(1, 9)]
        runs = list(pool.map(lambda item: serving(directory, *item), work))
    for run in starts + runs:
        for line in run.wrong:
            print(f"     {line}")
    wrong = sum(bool(run.wrong) for run in starts)
    reached = sum(bool(run.failed) for run in starts)
    expect("a flush that fails at start, each in turn: it ends with a code of its own, and the next start is well",
           wrong == 0 and reached >= 5, f"{reached} starts, {wrong} wrong")
    files, errors, acks = {}, {}, 0
    for run in runs:
        place = Path(run.path) if run.failed else None
        what = "directory" if place and not place.suffix else place and f"file in {place.parent.name}/"
        files[what] = files.get(what, 0) + 1
        acks += sum(entry.acked for entry in run.entries)
        for entry in run.entries:
            if not entry.acked:
                errors[entry.error] = errors.get(entry.error, 0) + 1
    wrong = sum(bool(run.wrong) for run in runs)
    expect("under load, fdatasync fails at each of the first 50 calls of a thread, fsync at the first 8: no ack after "
           "it, the codes of the table, exit code 70, and a restart that holds every ack and nothing refused",
           wrong == 0, f"{len(runs)} runs, {acks} acks, {wrong} wrong; what failed: {files}")
    expect("appends that reached a write get INTERNAL JOURNAL_FAILED UNKNOWN", errors.get(UNKNOWN, 0) > 0, errors)


@check("on_flush_failure = read_only refuses writes and serves reads")
def later(directory):
    data = directory / "stays"
    with Daemon(data, "--on-flush-failure", "read_only", "--marker-delay", "1h") as daemon:
        append = {"log": "a", "record": {"text": "x"}}
        daemon.ready().call("wald.v1.WalService/Append", append)
        strace = Strace(daemon, "-e", "trace=fdatasync", "-e", "inject=fdatasync:error=EIO")
        code, _, text = daemon.call("wald.v1.WalService/Append", append)
        expect("appends that wait for the failing flush: INTERNAL JOURNAL_FAILED UNKNOWN",
               all(word in text for word in ("Code: Internal", '"JOURNAL_FAILED"', '"outcome": "UNKNOWN"')), code)
        strace.stop()
        code, _, text = daemon.call("wald.v1.WalService/Append", append)
        expect("later appends, though flushes would work again: UNAVAILABLE JOURNAL_FAILED NOT_APPLIED",
               all(word in text for word in ("Code: Unavailable", '"JOURNAL_FAILED"', '"outcome": "NOT_APPLIED"')), code)
        _, answer, text = daemon.call("wald.v1.WalService/Read", {"log": "a", "view": "RECORD_VIEW_TEXT"})
        expect("durable records can still be read", answer and len(answer["batch"]["records"]) == 1)
        code, _, text = daemon.call("wald.v1.WalService/Read", {"log": "a", "lsn": "1"})
        expect("a read beyond the durable lsn gets UNAVAILABLE and no lower tail", "Code: Unavailable" in text, text[:60])
        try:
            ready = urllib.request.urlopen(f"http://{daemon.http}/readyz").status
        except urllib.error.HTTPError as refused:
            ready = refused.code
        expect("it is not ready, and says so", ready == 503 and daemon.metric("wald_journal_failed") == 1, ready)


def device(directory, bytes_):
    """A file system on a loop device whose backing file lies on a small tmpfs: (mount point, image, tmpfs),
    or the reason why there is none."""
    tmpfs, image, mount = directory / "tmpfs", directory / "tmpfs" / "image", directory / "mount"
    tmpfs.mkdir(), mount.mkdir()
    for command in (["mount", "-t", "tmpfs", "-o", f"size={bytes_ // 2}", "tmpfs", tmpfs],
                    ["truncate", "-s", bytes_, image],
                    # Only data may fail: no journal, and every table is written now.
                    ["mkfs.ext4", "-q", "-b", "4096", "-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard", image],
                    ["mount", "-o", "loop,noatime", image, mount]):
        if shutil.which(command[0]) is None:
            return None, f"there is no {command[0]}"
        done = run(*command)
        if done.returncode != 0:
            return None, f"{command[0]}: {done.stderr.decode().strip()}"
    return (mount, image, tmpfs), None


@check("A page cache that shows bytes the device never received is not believed")
def lying(directory):
    found, why = device(directory, 128 << 20)
    try:
        if why:
            print(f"skipped, because {why}: a page cache that lies; the disk in memory stands in for it in the tests")
            return
        behind_the_cache(*found)
    finally:
        # The loop device releases its backing file some time after the unmount.
        run("umount", directory / "mount")
        run("umount", "--lazy", directory / "tmpfs")


def behind_the_cache(mount, image, tmpfs):
    data = mount / "data"
    arguments = ["--segment-bytes", "4MiB", "--marker-delay", "1h"]
    extra = 0
    with Daemon(data, *arguments) as daemon:
        daemon.ready()
        append = lambda text="x" * 60_000: daemon.call("wald.v1.WalService/Append", {"log": "a", "record": {"text": text}})
        acked = sum(append()[0] == 0 for _ in range(4))
        # The active segment is the one that differs from a pool file. Its frames are made to end with a
        # page: the loop device would report a partly failed write as a success.
        active = max((data / "journal").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        end = lambda: (len(active.read_bytes().rstrip(b"\0")) + 7) // 8 * 8
        for _ in range(5):
            if end() % 4096:
                # A frame takes some hundred bytes more than its text; the first try measures the number.
                start, text = end(), 20_000 + -(end() + 20_000) % 4096
                acked += append("x" * (text - extra))[0] == 0
                extra += end() - start - text
        expect("the journal's end is that of a page", end() % 4096 == 0, end())
        # Without the file system's knowledge the rest of the segment loses its space on the device; then
        # no space is left for a new one.
        page = end() // 4096
        for line in run("filefrag", "-e", "-b4096", active, check=True).stdout.decode().splitlines():
            extent = re.match(r"\s*\d+:\s+(\d+)\.\.\s*(\d+):\s+(\d+)\.\.", line)
            if extent:
                first, last, physical = map(int, extent.groups())
                skip = max(0, page - first)
                if last - first + 1 > skip:
                    run("fallocate", "-p", "-o", (physical + skip) << 12, "-l", (last - first + 1 - skip) << 12, image,
                        check=True)
        ballast = tmpfs / "ballast"
        with open(ballast, "wb", buffering=0) as out:
            try:
                while True:
                    out.write(bytes(1 << 20))
            except OSError:
                pass
        told = ""
        while not told and acked < 100:
            code, _, text = append()
            acked, told = acked + (code == 0), text if code else ""
        expect("a write-back that fails on the device is no ack", "Code: Internal" in told and '"outcome": "UNKNOWN"' in told,
               f"after {acked} acks")
        expect("the daemon ends", daemon.process.wait(timeout=60) == 70)
    ballast.unlink()
    direct = run("dd", f"if={active}", "bs=4096", "iflag=direct", "status=none", check=True).stdout
    expect("now the page cache shows records that the device lacks", active.read_bytes() != direct)
    with Daemon(data, *arguments) as daemon:
        _, answer, _ = daemon.call("wald.v1.WalService/GetTail", {"log": "a"})
        before = int(answer["tailLsn"])
        done = daemon.walctl("scan", "a", "--output", "jsonl")
        expect("a restart holds every ack", done.returncode == 0 and len(done.stdout.splitlines()) == before >= acked,
               f"{before} records")
        daemon.kill()
    # A remount drops the contents that only the page cache had.
    run("umount", mount, check=True)
    run("mount", "-o", "loop,noatime", image, mount, check=True)
    with Daemon(data, *arguments) as daemon:
        done = daemon.walctl("scan", "a", "--output", "jsonl")
        lines = done.stdout.decode().splitlines()
        expect("and reports the same without the page cache: recovery did not trust it",
               len(lines) == before and all(set(json.loads(line)) == {"x"} for line in lines), f"{len(lines)} records")


@check("Start, scan, verify, backup and repair pass an unreadable page and name it")
def unreadable(directory):
    data, page = directory / "unreadable", 4096
    arguments = ["--segment-bytes", "256KiB", "--sorter-enabled=false", "--scrub-bytes-per-second", "0"]
    word = lambda number: hashlib.sha256(str(number).encode()).hexdigest() * 100
    with Daemon(data, *arguments) as daemon:
        for number in range(150):
            daemon.call("wald.v1.WalService/Append", {"log": "a", "record": {"text": word(number)}})
        expect("a store to fail: it stops cleanly", daemon.stop() == 0)
    used = [path for path in sorted((data / "journal").iterdir()) if any(path.read_bytes()[8192:16384])]
    bad = f"journal/{used[1].name}"
    first, last = 20 * page, 21 * page
    stretch = f"bytes {first} to {last} of {bad}"

    def decide(call):
        hit = call.path == bad and call.span and call.span[0] < last and call.span[1] > first
        return ("error", 5) if hit else None

    for what in ("with an index", "without an index"):
        if what == "without an index":
            # As after a kill before they were written.
            shutil.rmtree(data / "index"), shutil.rmtree(data / "checkpoint")
        with interpose.Interposer(data, ["pread64"], decide) as calls:
            with Daemon(data, *arguments, under=calls.command) as daemon:
                done = daemon.walctl("scan", "a", "--output", "raw")
                lines = done.stdout.decode().splitlines()
                missing = {word(number) for number in range(150)} - set(lines)
                expect(f"unreadable, {what}: a scan gives all records but those of one page",
                       1 <= len(missing) <= 2 and len(lines) + len(missing) == 150,
                       f"{len(lines)} records, exit code {done.returncode}")
                said = daemon.walctl("status").stdout.decode()
                expect(f"unreadable, {what}: status names the file and the bytes", stretch in said, said[-300:])
                expect(f"unreadable, {what}: a metric counts it", daemon.metric("wald_unreadable_bytes") == page)
                done = daemon.walctl("backup", directory / f"backup {what}")
                expect(f"unreadable, {what}: a backup is taken", done.returncode == 0 or b"damage" in done.stdout + done.stderr,
                       (done.stdout + done.stderr).decode()[-300:])
                expect(f"unreadable, {what}: it stops cleanly", daemon.stop() == 0)
    with interpose.Interposer(data, ["pread64"], decide) as calls:
        done = run(*calls.command, WALD, "verify", "--data-dir", data)
        said = (done.stdout + done.stderr).decode()
        expect("unreadable: wald verify continues and names it", done.returncode not in (0, 74) and stretch in said,
               f"exit code {done.returncode}: {said[-300:]}")
    with interpose.Interposer(data, ["pread64"], decide) as calls:
        done = run(*calls.command, WALD, "repair", "--accept-loss", "--data-dir", data)
        expect("unreadable: wald repair accepts the loss", done.returncode == 0, done.stderr.decode()[-300:])
