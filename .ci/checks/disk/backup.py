"""Tests backup and restore of built binaries: a full backup during at least 5,000 appends per second; an
incremental backup after 10 % more records, which sends at most 10 % of a full one; three positions
restored elsewhere, where every log has the digest of the source at that position; damage, which the check
finds without restoring and a restore refuses; and kills of either side during the transfer.
"""

from common import *

# Other checks run beside this one in the default run.
LEAST_RATE = sized(5_000, 1_000)
MOST_INCREMENTAL = 0.10
RECORD = 500
SEED_APPENDS = 120_000
LIVE_SECONDS = 12
# A backup sends segments again if they are sorted meanwhile, so the sorter is off.
SEGMENTS = ["--segment-bytes", "2MiB", "--sorter-enabled=false"]


def backup(daemon, directory, *arguments, **options):
    """Runs walctl backup: (exit code, its JSON or None, stderr)."""
    done = daemon.walctl("backup", directory, "--output", "json", *arguments, **options)
    told = json.loads(done.stdout) if done.stdout else None
    return done.returncode, told, done.stderr.decode()


def kept(directory):
    """Ids of the backups of a directory."""
    done = run(WALCTL, "backup", "list", directory, "--output", "raw")
    return done.stdout.decode().split()


def wald(*arguments, **options):
    return run(WALD, *arguments, **options)


def position(daemon):
    """A position at or above the end of every acked record."""
    return json.loads(daemon.walctl("sync", "--output", "json").stdout)["durable_position"]


def contents(daemon):
    """All records as walctl prints them: log -> lsn -> line."""
    done = daemon.walctl("scan", "--all", "--output", "json")
    if done.returncode != 0:
        raise SystemExit(f"the scan failed: {done.stderr.decode()}")
    found = {}
    for line in done.stdout.decode().splitlines():
        record = json.loads(line)
        found.setdefault(record["log"], {})[record["lsn"]] = line
    return found


def digests(found):
    return {log: digest(lines[lsn] for lsn in sorted(lines)) for log, lines in found.items()}


def as_of(found, entries, until):
    """The part of the contents below a position."""
    below = {(entry.log, entry.lsn) for entry in entries if entry.acked and entry.position < until}
    cut = {log: {lsn: line for lsn, line in lines.items() if (log, lsn) in below} for log, lines in found.items()}
    return {log: lines for log, lines in cut.items() if lines}


def percent(part, whole):
    return f"{part / whole * 100:.1f} %"


def mib(count):
    return f"{count / (1 << 20):.1f} MiB"


def under_load(directory, data, shelf):
    """Makes a full and an incremental backup: (source daemon's contents, entries, positions). Three positions
    are recorded."""
    ledgers = [directory / name for name in ("seed", "live", "change")]
    options = dict(writers=64, logs=100, bytes=RECORD, durability="written")
    with Daemon(data, *SEGMENTS) as daemon:
        daemon.ready()
        seed = daemon.load(appends=SEED_APPENDS, prefix="seed", ledger=ledgers[0], **options).result()
        positions = [position(daemon)]
        with daemon.load(seconds=LIVE_SECONDS, appends=10**9, prefix="live", ledger=ledgers[1], **options) as live:
            wait_until(lambda: daemon.metric("wald_appended_records_total") > SEED_APPENDS + 1_000)
            # The rate is low, so the backup takes some seconds: its files are read twice.
            began = time.time()
            code, full, said = backup(daemon, shelf, "--max-bytes-per-second", str(40 << 20))
            ended = time.time()
            running = live.process.poll() is None
            positions.append(position(daemon))
            result = live.result()
        if not expect("a full backup during the load", code == 0, said or f"{mib(full['bytes'])}, {full['files']} files"):
            finish()
        entries = [entry for ledger in ledgers[:2] for entry in map(Entry, ledger.read_text().splitlines())]
        during = sum(1 for entry in entries if entry.acked and began <= entry.got / 1e6 <= ended)
        rate = during / (ended - began)
        expect(f"at least {LEAST_RATE} appends a second go on during the backup",
               running and rate >= LEAST_RATE, f"{rate:.0f}/s over {ended - began:.1f} s, the load's own {result}")
        expect("all of the store as it stood is in it", full["sent_bytes"] == full["bytes"] and full["sent_files"] == full["files"])
        expect("/metrics reports it", daemon.metric("wald_backup_last_sent_bytes") == full["sent_bytes"]
               and abs(daemon.metric("wald_backup_last_success_timestamp_seconds") - ended) < 5)
        # Saves all records after the full backup, then changes another tenth.
        code, _, said = backup(daemon, shelf)
        expect("an incremental backup", code == 0, said)
        records = seed["acks"] + result["acks"]
        change = daemon.load(appends=records // 10, prefix="change", ledger=ledgers[2], **options).result()
        code, more, said = backup(daemon, shelf)
        _, whole, _ = backup(daemon, directory / "fresh")
        positions.append(whole["position"])
        expect(f"after 10 % more an incremental backup sends at most {MOST_INCREMENTAL:.0%} of a full one",
               code == 0 and more["sent_bytes"] <= MOST_INCREMENTAL * whole["sent_bytes"],
               f"{change['acks']} appends beside {records}: {mib(more['sent_bytes'])} in {more['sent_files']} files of "
               f"{mib(whole['sent_bytes'])} in {whole['sent_files']}, {percent(more['sent_bytes'], whole['sent_bytes'])}")
        code, nothing, _ = backup(daemon, shelf)
        expect("of a store that does not change nothing is sent", code == 0 and nothing["sent_bytes"] == 0,
               f"{nothing['sent_files']} files")
        entries = [entry for ledger in ledgers for entry in map(Entry, ledger.read_text().splitlines())]
        return contents(daemon), entries, positions


def restored_elsewhere(directory, shelf, source, entries, positions):
    # The default run has the position of the load.
    for number, at in enumerate(sized(positions, positions[1:2])):
        target = directory / f"restored-{number}"
        began = time.monotonic()
        done = wald("restore", shelf, "--data-dir", target, "--at-position", str(at), "--output", "json")
        took = time.monotonic() - began
        if not expect(f"a store restored at position {at}", done.returncode == 0, done.stderr.decode()):
            continue
        told = json.loads(done.stdout)
        expected = as_of(source, entries, at)
        with Daemon(target, *SEGMENTS) as daemon:
            found = contents(daemon)
            same = digests(found) == digests(expected)
            count = sum(map(len, found.values()))
            expect("  every log has its digest at that position, and nothing else exists", same and told["records"] == count,
                   f"{count} records of {len(found)} logs, restored in {took:.1f} s")
            ledger = directory / f"on-{number}"
            daemon.load(appends=1, writers=1, logs=1, bytes=RECORD, prefix="seed", ledger=ledger).result()
            (on,) = map(Entry, ledger.read_text().splitlines())
            epoch = daemon.metric("wald_recovery_epoch")
            expect("  it continues in a higher epoch, beyond every position of the old one",
                   on.acked and epoch == told["recovery_epoch"] > 1 and on.position > positions[-1] + (1 << 40),
                   f"epoch {epoch:.0f}, position {on.position}")
    done = wald("restore", shelf, "--data-dir", directory / "beyond", "--at-position", str(positions[-1] + (1 << 30)))
    expect("a position beyond the backup is refused", done.returncode == 2, done.stderr.decode().strip())
    done = wald("restore", shelf, "--data-dir", directory / "restored-0")
    expect("a directory that is not empty is refused", done.returncode == 1, done.stderr.decode().strip())
    began = time.monotonic()
    done = wald("restore", "--drill", shelf, "--drill-in", directory)
    left = list(directory.glob("wald-drill-*"))
    expect("a drill is one command, and leaves nothing", done.returncode == 0 and not left,
           f"{done.stdout.decode().strip()}{done.stderr.decode().strip()}, {time.monotonic() - began:.1f} s")


def damaged(directory, shelf):
    done = wald("verify", shelf)
    expect("verify finds nothing wrong with a backup", done.returncode == 0, (done.stdout + done.stderr).decode().strip())
    content = max((shelf / "files").iterdir(), key=lambda path: path.stat().st_size)
    good = content.read_bytes()
    for at in (0, len(good) // 2, len(good) - 1):
        content.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1:])
        done = wald("verify", shelf)
        found = done.returncode == 5 and "digest" in done.stderr.decode()
        target = directory / f"damaged-{at}"
        refused = wald("restore", shelf, "--data-dir", target)
        try:
            with Daemon(target):
                served = True
        except Ended:
            served = False
        expect(f"a flipped byte at {at} of {len(good)} is found by verify, and refused by restore and by a start",
               found and refused.returncode == 5 and not served, refused.stderr.decode().strip())
    content.write_bytes(good)
    manifest = max((shelf / "backups").iterdir())
    good = manifest.read_bytes()
    manifest.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    done = wald("verify", shelf, "--backup", manifest.name.removesuffix(".manifest"))
    expect("so is one in the manifest", done.returncode == 5, done.stderr.decode().strip())
    done = wald("verify", shelf)
    expect("the latest is one that can be read then", done.returncode == 0 and manifest.name in done.stderr.decode(),
           (done.stdout + done.stderr).decode().strip())
    manifest.write_bytes(good)


def killed(directory, data, shelf):
    """Kills either side during a transfer."""
    other = directory / "killed"
    slow = ["--max-bytes-per-second", str(30 << 20)]
    with Daemon(data, *SEGMENTS) as daemon:
        def received(shelf):
            return sum(1 for path in (shelf / "files").iterdir() if path.suffix != ".new") if (shelf / "files").exists() else 0

        def begun(shelf, *more):
            return subprocess.Popen([str(c) for c in (WALCTL, "backup", shelf, "--endpoint", daemon.endpoint, *more)],
                                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=clean_environment())

        process = begun(other, *slow)
        began = wait_until(lambda: received(other) >= 8)
        # On a busy machine the second takes longer than the first has left.
        second = begun(directory / "second")
        both = wait_until(lambda: received(directory / "second") >= 1 or second.poll() is not None) and process.poll() is None
        process.kill()
        process.communicate()
        said = second.communicate()[1].decode()
        expect("a second backup at the same time is taken as well", both and second.returncode == 0, said.strip())
        expect("a walctl that is killed leaves no backup", began and kept(other) == [], f"{received(other)} files")
        done = wald("verify", other)
        expect("nothing there looks whole", done.returncode == 3, done.stderr.decode().strip())
        held = received(other)
        # The server notices that its client has disconnected.
        ready = []
        wait_until(lambda: ready.append(backup(daemon, other)) or ready[-1][0] == 0, 30)
        code, told, said = ready[-1]
        expect("the next one continues after the received part", code == 0 and told["sent_files"] <= told["files"] - held,
               said or f"{told['sent_files']} of {told['files']} files")
        process = begun(directory / "cut", *slow)
        cut = directory / "cut" / "files"
        wait_until(lambda: cut.exists() and len(list(cut.iterdir())) >= 8)
        daemon.kill()
        said = process.communicate(timeout=60)[1].decode()
        expect("a kill of the daemon fails the backup and leaves none",
               process.returncode not in (0, None) and kept(directory / "cut") == [], said.strip())
    with Daemon(data, *SEGMENTS) as daemon:
        code, told, said = backup(daemon, directory / "cut")
        expect("after its start a backup succeeds", code == 0 and wald("verify", directory / "cut").returncode == 0, said)
        before = kept(shelf)
        code, told, said = backup(daemon, shelf, "--keep", "2")
        after = kept(shelf)
        expect("older backups are removed, and the files that only they had", code == 0 and after == [*before[-1:], told["id"]]
               and sorted(told["removed"]) == before[:-1], f"{len(before)} before, {len(after)} after")
        done = run(WALCTL, "backup", "prune", shelf, "--keep", "1", "--output", "json")
        expect("prune alone does the same", done.returncode == 0 and len(kept(shelf)) == 1, done.stdout.decode().strip())
        done = wald("verify", shelf)
        expect("the remaining backups are whole", done.returncode == 0, (done.stdout + done.stderr).decode().strip())


@check("Backups under load, restores as of any position, damage that is found, kills of either side")
def backups(directory):
    data, shelf = directory / "data", directory / "backups"
    source, entries, positions = under_load(directory, data, shelf)
    restored_elsewhere(directory, shelf, source, entries, positions)
    damaged(directory, shelf)
    killed(directory, data, shelf)
