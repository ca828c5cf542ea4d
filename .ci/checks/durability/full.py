"""A full disk: a 64 MiB ext4 image, filled until appends are refused. Reads, trims and deletions
continue, also after kill -9 and a restart on the full disk. Appends resume automatically when a
ballast file is removed; after 20 rounds every acked record is there, byte for byte. Without a removal, too: when
logs are deleted or trimmed on the full disk, their space returns and appends
resume. At its default settings on volumes of several sizes, with runs larger than a segment, the daemon also frees the
space of a fifth of the logs, repeatedly, after a restart, and where the sorter was just enabled.
On a full btrfs, where each overwrite needs new space, appends are refused, the journal may fail, and every
later start works. Mounts loop devices, so it needs root.
"""

from contextlib import contextmanager

from common import *

ROUNDS = sized(20, 3)
MIB = 1 << 20
# Bytes that each round can fill: 64 MiB hold 20 of these, a pool and a first fill.
BALLAST = 2 * MIB
# Bytes of a record: large, because each append is a process. Of one that a load program appends: small.
RECORD = 240_000
LOADED = 60_000
SECONDS = 60


# Volumes at the defaults: MiB, settings. The larger ones take some minutes.
DEFAULTS = sized([(320, []), (1000, []), (1500, []), (1500, ["--segment-bytes", "64MiB"]), (1000, ["--segment-bytes", "4MiB"])],
                 [(320, [])])
LOGS = 40
# Attempts to fill a volume again.
FILLS = 4


@contextmanager
def mounted(directory, size=64, make=("mkfs.ext4", "-q", "-m", "0")):
    """A file system of `size` MiB; by default ext4, none of it kept for root."""
    image, mount = directory / "image", directory / "mount"
    mount.mkdir()
    with open(image, "wb") as file:
        file.truncate(size * MIB)
    run(*make, image, check=True)
    done = run("mount", "-o", "loop", image, mount)
    if done.returncode != 0:
        raise SystemExit(f"cannot mount {image}: {done.stderr.decode()}")
    try:
        yield mount
    finally:
        run("umount", mount, check=True)


def text(number):
    """A unique record for each number."""
    word = hashlib.sha256(str(number).encode()).hexdigest()
    return (word * (RECORD // len(word) + 1))[:RECORD]


class Ledger:
    """Acked records by log, and the records that may exist in addition."""

    def __init__(self, may_fail=False):
        # Whether the journal may fail for lack of space.
        self.may_fail = may_fail
        self.acked = []
        self.unknown = None
        self.trimmed = 0
        self.refusals = 0

    def append(self, daemon):
        """One append to the kept log. False if the disk is full; None if the daemon has ended."""
        number = len(self.acked)
        code, answer, said = daemon.call("wald.v1.WalService/Append",
                                         {"log": "kept", "record": {"text": text(number)}})
        if code == 0:
            # No lsn is reused, and none is left out.
            if int(answer.get("lsn", 0)) != number:
                raise SystemExit(f"record {number} was given lsn {answer.get('lsn')}")
            self.acked.append(text(number))
            return True
        if "ResourceExhausted" in said and "DISK_FULL" in said and "NOT_APPLIED" in said:
            self.refusals += 1
            return False
        if self.may_fail and "JOURNAL_FAILED" in said:
            self.unknown = text(number)
            return None
        # A killed process loses its port before it ends.
        if daemon.process.poll() is None and "Unavailable" not in said and "Failed to dial" not in said:
            raise SystemExit(f"an append failed: {said}")
        self.unknown = text(number)
        return None

    def fill(self, daemon):
        """Appends until two refusals a second apart, so that just freed space is used too."""
        before = len(self.acked)
        refused = 0
        while refused < 2:
            if self.append(daemon):
                refused = 0
            else:
                refused += 1
                time.sleep(1)
        return len(self.acked) - before

    def resume(self, daemon):
        """Waits until an append passes again. Returns the seconds that took, or None."""
        began = time.monotonic()
        while time.monotonic() < began + SECONDS:
            if self.append(daemon):
                return time.monotonic() - began
            time.sleep(0.05)
        return None

    def is_whole(self, daemon):
        """Whether the log holds the acked records, and at most the interrupted append besides."""
        done = daemon.walctl("scan", "kept", "--output", "raw")
        lines = done.stdout.decode().splitlines()
        if self.unknown is not None and lines == [*self.acked, self.unknown]:
            self.acked.append(self.unknown)
        self.unknown = None
        return done.returncode == 0 and digest(lines) == digest(self.acked)


def make_room(daemon, ledger, number):
    """Whether a trim and a deletion succeed and take effect."""
    ledger.trimmed += 1
    code, answer, said = daemon.call("wald.v1.WalService/Trim",
                                     {"log": "trimmed", "before_lsn": ledger.trimmed})
    deleted, _, told = daemon.call("wald.v1.LogService/DeleteLog", {"log": f"gone/{number}"})
    gone, _, _ = daemon.call("wald.v1.WalService/GetTail", {"log": f"gone/{number}"})
    _, tail, _ = daemon.call("wald.v1.WalService/GetTail", {"log": "trimmed"})
    good = code == 0 and deleted == 0 and gone != 0 and tail["firstLsn"] == str(ledger.trimmed)
    return good or print(said, told, tail)


def cut_off(daemon, ledger):
    """Kills the daemon while it takes appends."""
    killer = threading.Timer(0.25, daemon.process.kill)
    killer.start()
    while ledger.append(daemon) is not None:
        pass
    killer.join()
    daemon.process.wait()


def start(data):
    return Daemon(data, "--segment-bytes", "1MiB")


def is_spotless(daemon):
    """Whether the start found no damage."""
    return not any("damage" in line or "quarantine" in line for line in daemon.lines
                   if '"level":"ERROR"' in line or '"level":"WARN"' in line)


def filled_again(data, ballast):
    ledger = Ledger()
    with start(data) as daemon:
        for number in range(2 * ROUNDS + 2):
            for log in ("trimmed", f"gone/{number}"):
                daemon.call("wald.v1.WalService/Append", {"log": log, "record": {"text": str(number)}})
        filled = ledger.fill(daemon)
        expect("appends fill the disk until RESOURCE_EXHAUSTED, DISK_FULL, NOT_APPLIED", filled > 20, filled)
        expect("reads go on", ledger.is_whole(daemon))
        # A pod that is not ready would lose reads, and the trims that make room.
        with urllib.request.urlopen(f"http://{daemon.http}/readyz") as ready:
            expect("it stays ready", ready.status == 200, ready.read())
        expect("trims and deletions go on", make_room(daemon, ledger, 0))
        # A file that was removed late may leave room for a few.
        expect("appends do not", any(ledger.append(daemon) is False for _ in range(20)))
        daemon.kill()
    for number in range(1, ROUNDS + 1):
        with start(data) as daemon:
            expect(f"round {number}: after kill -9 it starts on the full disk, without damage", is_spotless(daemon))
            expect(f"round {number}: reads continue, every acked record is there", ledger.is_whole(daemon),
                   len(ledger.acked))
            expect(f"round {number}: trims and deletions go on", make_room(daemon, ledger, 2 * number - 1))
            ballast.pop().unlink()
            took = ledger.resume(daemon)
            expect(f"round {number}: appends resume automatically", took is not None,
                   took is not None and f"{took:.2f} s")
            cut_off(daemon, ledger)
        with start(data) as daemon:
            expect(f"round {number}: killed under load, every acked record is there", ledger.is_whole(daemon),
                   len(ledger.acked))
            filled = ledger.fill(daemon)
            expect(f"round {number}: the disk is full again, trims and deletions go on",
                   make_room(daemon, ledger, 2 * number), filled)
            daemon.kill()
    with start(data) as daemon:
        expect("in the end every acked record is there", ledger.is_whole(daemon), digest(ledger.acked))
        expect("and a stop is a clean one", daemon.stop() == 0)


def overwritten(data, ballast):
    """Fills a copy-on-write disk repeatedly, with kills in between."""
    ledger = Ledger(may_fail=True)
    failed = 0
    for number in range(ROUNDS):
        with start(data) as daemon:
            expect(f"btrfs, round {number}: it starts", is_spotless(daemon))
            if number == 0:
                _, info, _ = daemon.call("wald.v1.OpsService/GetServerInfo", {})
                caveats = " ".join(info["durability"].get("caveats", []))
                expect("status says that it copies on write", "copies on write" in caveats, caveats)
            if ledger.acked:
                expect(f"btrfs, round {number}: every acked record is there", ledger.is_whole(daemon), len(ledger.acked))
            filled = ledger.fill(daemon)
            failed += daemon.process.poll() is not None
            print(f"     {filled} records until it is full")
            daemon.kill()
        if number % 2 and len(ballast) > 1:
            ballast.pop().unlink()
    for path in ballast:
        path.unlink()
    with start(data) as daemon:
        expect("btrfs: appends resume when there is space", ledger.resume(daemon) is not None, f"{failed} journals failed")
        expect("btrfs: in the end every acked record is there", ledger.is_whole(daemon), digest(ledger.acked))
        expect("btrfs: it stops cleanly", daemon.stop() == 0)


@check("Deleted and trimmed logs give back their space on a full disk")
def makes_room(directory):
    with mounted(directory) as mount:
        room_made(mount / "data")


def room_made(data):
    """Fills the disk with records that are then dropped, and some that are kept."""
    with start(data) as daemon:
        for number, drop in enumerate(["DeleteLog", "Trim", "DeleteLog"]):
            kept, gone = f"kept/{number}", f"gone/{number}"
            keep = lambda: daemon.call("wald.v1.WalService/Append", {"log": kept, "record": {"text": text(number)}})[0] == 0
            acked = refused = 0
            while refused < 2:
                code, answer, said = daemon.call("wald.v1.WalService/Append",
                                                 {"log": gone, "record": {"text": text(refused)}})
                if code == 0:
                    refused = 0
                    acked += int(answer.get("lsn", 0)) % 10 == 0 and keep()
                else:
                    refused += 1
                    # Space of the earlier round may still come back.
                    time.sleep(1)
            _, tail, _ = daemon.call("wald.v1.WalService/GetTail", {"log": gone})
            if drop == "Trim":
                code, _, said = daemon.call("wald.v1.WalService/Trim", {"log": gone, "before_lsn": tail["tailLsn"]})
            else:
                code, _, said = daemon.call("wald.v1.LogService/DeleteLog", {"log": gone})
            began = time.monotonic()
            came = wait_until(keep, SECONDS)
            expect(f"{drop} on a full disk: appends resume without other removals", code == 0 and came,
                   f"{int(tail['tailLsn'])} records dropped, {time.monotonic() - began:.1f} s")
            done = daemon.walctl("scan", kept, "--output", "raw")
            lines = done.stdout.decode().splitlines()
            expect("the kept records are there", acked > 1 and lines == [text(number)] * (acked + came), f"{len(lines)} of {acked + came}")
        expect("it stops cleanly", daemon.stop() == 0)
    done = run(WALD, "verify", "--data-dir", data)
    expect("the store is sound", done.returncode == 0, done.stdout.decode()[-200:] if done.returncode else "")


def fill(daemon, prefix, logs, seconds=120):
    """Appends until the disk stays full for some seconds. Returns the acknowledged bytes."""
    until, acked, idle = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until and idle < 3:
        with daemon.load(seconds=1, appends=10**9, writers=8, pause_ms=2, logs=logs, prefix=prefix, bytes=LOADED,
                         attempts=1, tolerate=True) as load:
            result = load.result()
        if not all("DISK_FULL" in error for error in result["errors"]):
            raise SystemExit(f"appends failed: {result}")
        acked += result["acks"] * LOADED
        idle = 0 if result["acks"] else idle + 1
    return acked


def delete(daemon, numbers):
    """Deletes logs of the first fill, which all have the same size. Returns their share of the fill."""
    numbers = list(numbers)
    for number in numbers:
        code, _, said = daemon.call("wald.v1.LogService/DeleteLog", {"log": f"many/{number}"})
        if code != 0:
            raise SystemExit(f"many/{number} is not deleted: {said}")
    return len(numbers) / LOGS


def refilled(data, size, settings):
    """Fills a volume, deletes a fifth of the logs, and fills it again, in several rounds."""
    what = f"{size} MiB {' '.join(settings)}".strip()
    daemon = Daemon(data, *settings)
    try:
        segment = MIB * int(settings[1].removesuffix("MiB")) if settings else 16 * MIB
        filled = fill(daemon, "many", LOGS)
        # The sorter keeps room for a run as soon as there is one. It counts as given back.
        free = lambda: shutil.disk_usage(data).free
        room = free()
        runs = [path.stat().st_size for path in (data / "sorted").iterdir() if path.suffix == ".seg"]
        expect(f"{what}: appends fill the volume, and a run is larger than a segment",
               filled > size * MIB / 4 and max(runs, default=0) > segment,
               f"{filled >> 20} MiB appended, runs {sorted(run >> 20 for run in runs)} MiB")
        dead = again = 0
        for number in range(sized(3, 2)):
            dead += int(filled * delete(daemon, range(number, LOGS, 5)))
            if number == 1:
                expect(f"{what}: it stops on the full volume", daemon.stop() == 0)
                daemon = Daemon(data, *settings)
            began = time.monotonic()
            # Space returns in whole segments, and the newest records are not sorted yet.
            back = dead - 3 * segment
            # A busy machine can sort for longer than a fill waits.
            for _ in range(FILLS):
                again += fill(daemon, "kept", 1)
                came = again + free() - room
                if came > back:
                    break
            expect(f"{what}: round {number + 1}: the space of deleted logs comes back", came > back,
                   f"{dead >> 20} MiB deleted, {again >> 20} MiB appended since, {(free() - room) / MIB:+.0f} MiB free, {time.monotonic() - began:.0f} s")
        expect(f"{what}: it stops cleanly", daemon.stop() == 0)
    finally:
        if daemon.process.poll() is None:
            daemon.kill()
    done = run(WALD, "verify", "--data-dir", data)
    expect(f"{what}: the store is sound", done.returncode == 0, done.stdout.decode()[-200:] if done.returncode else "")


@check("A sorter that is enabled on a full volume gives back the space of deleted logs")
def enabled_late(directory):
    with mounted(directory, 200) as mount:
        sorted_late(mount / "data")


def sorted_late(data):
    """Fills a volume without the sorter, deletes five sixths of the logs, and enables it."""
    with Daemon(data, "--sorter-enabled=false") as daemon:
        filled = fill(daemon, "many", LOGS)
        dead = int(filled * delete(daemon, (log for log in range(LOGS) if log % 6)))
        expect("without the sorter no space comes back", fill(daemon, "kept", 1, seconds=2) < 16 * MIB,
               f"{dead >> 20} of {filled >> 20} MiB")
        daemon.stop()
    with Daemon(data) as daemon:
        again = fill(daemon, "kept", 1)
        expect("the sorter is enabled on the full volume: the space comes back", again > dead - 48 * MIB, f"{again >> 20} MiB")
        expect("it stops cleanly", daemon.stop() == 0)


@check("Space of deleted logs comes back on full volumes of several sizes, with runs larger than a segment")
def gives_back():
    for size, settings in DEFAULTS:
        with scratch() as directory, mounted(Path(directory), size) as mount:
            refilled(mount / "data", size, settings)


@check("A disk that fills up again and again, with kills: reads, trims and deletions go on, no record is lost")
def rounds(directory):
    with mounted(directory) as mount:
        ballast = [mount / f"ballast-{number}" for number in range(ROUNDS)]
        for path in ballast:
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, BALLAST)
        filled_again(mount / "data", ballast)


@check("A full btrfs, where each overwrite needs space: appends are refused, and every later start works")
def copies(directory):
    if shutil.which("mkfs.btrfs") is None:
        print("skipped, because there is no mkfs.btrfs: a disk that copies; the disk in memory stands in for it in the tests")
        return
    with mounted(directory, 256, ("mkfs.btrfs", "-q", "--mixed")) as mount:
        ballast = [mount / f"ballast-{number}" for number in range(ROUNDS + 1)]
        for number, path in enumerate(ballast):
            # Copies would not use fallocated space. The first file goes last: it exceeds the space that sorting keeps
            # free.
            path.write_bytes(os.urandom(BALLAST if number else 80 * MIB))
        overwritten(mount / "data", ballast)
