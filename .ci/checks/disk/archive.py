"""Tests the archive for expired records. Retention and the sorter work under appends, the daemon is killed
at each of its first renames and at random moments, and the archive runs out of space. Afterwards every
record is in exactly one of archive and store, a restored store returns the archived records as they
were appended, and damage in a file is found.
"""

import random

from common import *

KEPT = 200
LOGS = ["orders", "orders-eu", "trips"]
RECORDS = 1500
ROUNDS = 14
SETTINGS = ["--segment-bytes", "64KiB", "--sorter-step-bytes", "512KiB",
            "--retention-max-records", str(KEPT), "--retention-interval", "100ms"]


def wald(*arguments, **options):
    return run(WALD, *arguments, **options)


def text(log, lsn):
    return f"{log} {lsn} " + "x" * (lsn * 7919 % 400)


def append(daemon, appended):
    """Appends the next records to every log. Records acked before the daemon ended must be present."""
    for log in LOGS:
        lines = "".join(text(log, lsn) + "\n" for lsn in range(appended[log], appended[log] + RECORDS))
        done = daemon.walctl("append", log, "-", "--format", "lines", "--timeout", "3s", input=lines.encode())
        if done.returncode != 0:
            return False
        appended[log] += RECORDS
    return True


def tails(daemon):
    """Next lsn of each log: an interrupted append may be there in part. None if the daemon does not answer."""
    done = daemon.walctl("logs", "--output", "json")
    if done.returncode != 0:
        return None
    found = json.loads(done.stdout)
    return {log["name"]: log["tail_lsn"] for log in found}


def contents(daemon):
    """All records: log -> lsn -> text."""
    done = daemon.walctl("scan", "--all", "--output", "json")
    if done.returncode != 0:
        raise SystemExit(f"the scan failed: {done.stderr.decode()}")
    found = {}
    for line in done.stdout.decode().splitlines():
        record = json.loads(line)
        if "lsn" in record:
            found.setdefault(record["log"], {})[record["lsn"]] = record.get("text", record.get("value"))
    return found


def listed(archive, *arguments):
    """Runs `wald archive list`: (exit code, JSON)."""
    done = wald("archive", "list", "--archive", archive, "--output", "json", *arguments)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr.decode()


def held(listing):
    """Lsns of each log in an archive, in order: log -> [(from, to)]."""
    found = {log: [] for log in LOGS}
    for file in listing["files"]:
        for log in file["logs"]:
            found[log["log"]].append((log["from_lsn"], log["to_lsn"]))
    return {log: sorted(ranges) for log, ranges in found.items()}


def gapless(listing):
    """Whether each log starts at 0, without gaps or duplicates."""
    return all(ranges and ranges[0][0] == 0 and all(before[1] == after[0] for before, after in zip(ranges, ranges[1:]))
               for ranges in held(listing).values())


def killed_at(directory, number):
    """strace as a command that becomes the daemon. It kills the daemon at rename `number` of one of its threads.
    With its own filter strace could not send the signal."""
    return ["strace", "-D", "-f", "-o", directory / "killed.strace", "-e", "trace=renameat",
            "-e", f"inject=renameat:signal=KILL:when={number}"]


def at_work(directory, data, archive):
    """Runs retention, sorter and archive under appends and kills. Returns the tail that each log reached."""
    settings = [*SETTINGS, "--archive-dir", archive]
    appended = dict.fromkeys(LOGS, 0)
    seed = int(os.environ.get("WALD_SEED") or 11)
    print(f"WALD_SEED={seed}")
    rng = random.Random(seed)
    kills = 0
    for number in range(ROUNDS):
        # Renames publish a checkpoint, an index, an archive file, a run or a pool file.
        at_rename = number % 2 == 1
        try:
            with Daemon(data, *settings, under=killed_at(directory, 3 + number * 2) if at_rename else ()) as daemon:
                known = tails(daemon)
                if known is not None:
                    appended = {log: known.get(log, 0) for log in LOGS}
                    for _ in range(30 if at_rename else 1):
                        if not append(daemon, appended):
                            break
                if not at_rename:
                    time.sleep(rng.random() / 2)
                    daemon.kill()
                kills += wait_until(lambda: daemon.process.poll() is not None, 5)
        except Ended:
            kills += 1
        code, listing = listed(archive, "--verify")
        if not expect(f"round {number}: the archive is whole after a kill", code == 0, f"{len(listing['files'])} files"):
            print(listing)
    expect("kills", kills == ROUNDS, kills)
    with Daemon(data, *settings) as daemon:
        append(daemon, {log: tails(daemon)[log] for log in LOGS})
        return tails(daemon)


def settled(daemon, archive):
    """Waits until the sorter has no work left."""
    def quiet():
        before = sorted(os.listdir(archive))
        time.sleep(1.5)
        return before == sorted(os.listdir(archive)) and not any(name.endswith((".new", ".pending")) for name in before)
    return wait_until(quiet)


@check("Each expired record is in the store or in the archive, after kills and on a full archive too; damage is found")
def expired_records(directory):
    data, archive = directory / "data", directory / "archive"
    done = wald("config", "check", "--archive-dir", archive, "--sorter-enabled=false")
    expect("an archive without the sorter is refused", done.returncode == 78 and b"sorter_enabled" in done.stderr)
    link = directory / "link"
    (data / "sorted").mkdir(parents=True)
    link.symlink_to(data / "sorted")
    for wrong, code, word in [(archive, 74, "no such directory"), (data / "sorted", 78, "outside of data_dir"),
                              (link, 74, "in the data directory")]:
        try:
            with Daemon(data, *SETTINGS, "--archive-dir", wrong) as daemon:
                expect(f"archive_dir {word}", False, "it serves")
        except Ended as ended:
            expect(f"archive_dir {word}", ended.code == code and any(word in line for line in ended.lines), ended.code)
    archive.mkdir()
    ends = at_work(directory, data, archive)
    with Daemon(data, *SETTINGS, "--archive-dir", archive) as daemon:
        expect("the sorter comes to rest", settled(daemon, archive))
        # The next pass over runs, 10 s later, archives records that expired after the last one. A loss would remain.
        expect("no gap stays in the archive", wait_until(lambda: gapless(listed(archive)[1]), 60))
        expect("/metrics reports it", "wald_archive_written_bytes_total" in daemon.metrics()
               and daemon.metric("wald_archive_failures_total") == 0)
        live = contents(daemon)
        status = json.loads(daemon.walctl("status", "--output", "json").stdout)
        expect("status reports no failure", status.get("archive_failure") is None)
        expect("a clean end", daemon.stop() == 0)
    code, listing = listed(archive, "--verify")
    ranges = held(listing)
    expect("nothing is wrong with the archive", code == 0 and not listing["strangers"] and not listing["unfinished"],
           f"{len(listing['files'])} files, {sum(file['bytes'] for file in listing['files']) >> 10} KiB")
    for log in LOGS:
        apart = all(before[1] == after[0] for before, after in zip(ranges[log], ranges[log][1:]))
        expect(f"{log}: archived from 0 on, nothing twice, nothing left out",
               ranges[log] and ranges[log][0][0] == 0 and apart,
               f"{ranges[log][-1][1] if ranges[log] else 0} of {ends[log]}{'' if apart else f': {ranges[log]}'}")
        kept = sorted(live[log])
        expect(f"{log}: the newest {KEPT} are in the store", kept == list(range(ends[log] - KEPT, ends[log])),
               f"{len(kept)}, from {kept[0] if kept else None} of {ends[log]}")
    restored = directory / "restored"
    done = wald("archive", "restore", "--archive", archive, "--to", restored, "--output", "json")
    told = json.loads(done.stdout) if done.returncode == 0 else done.stderr.decode()
    expect("restore", done.returncode == 0 and told["duplicates"] == 0, told)
    done = wald("archive", "restore", "--archive", archive, "--to", restored)
    expect("a restore writes over nothing", done.returncode == 1 and b"not empty" in done.stderr)
    done = wald("verify", restored, "--output", "json")
    found = json.loads(done.stdout)
    expect("nothing is wrong with the restored store", done.returncode == 0 and found["findings"] == [], found["records"])
    # The daemon serves it with a retention that these logs must not have.
    with Daemon(restored, "--retention-max-records", "5", "--retention-interval", "50ms") as daemon:
        back = contents(daemon)
        for log in LOGS:
            end = ranges[log][-1][1]
            wanted = {lsn: text(log, lsn) for lsn in range(end)}
            found = back.get(log, {})
            wrong = sorted(lsn for lsn in found.keys() | wanted.keys() if found.get(lsn) != wanted.get(lsn))
            expect(f"{log}: all that was archived reads back as it was appended", not wrong,
                   f"{end}" if not wrong else f"{len(wrong)} of {end} do not, from {wrong[0]} to {wrong[-1]}: {found.get(wrong[0], '')[:40]}")
        known = tails(daemon)
        done = daemon.walctl("append", "orders", "-", "--format", "lines", input=b"more\n")
        expect("appends continue there", done.returncode == 0 and tails(daemon)["orders"] == known["orders"] + 1)
        expect("another store", json.loads(daemon.walctl("status", "--output", "json").stdout)["store_id"] != status["store_id"])
    done = wald("verify", restored, "--output", "json")
    expect("nor after it was served", done.returncode == 0, done.stdout.decode()[-200:])
    few = directory / "few"
    done = wald("archive", "restore", "--archive", archive, "--to", few, "--prefix", "orders-", "--output", "json")
    told = json.loads(done.stdout)
    expect("by prefix", done.returncode == 0 and told["logs"] == 1 and told["records"] == ranges["orders-eu"][-1][1], told["records"])
    done = wald("archive", "restore", "--archive", archive, "--to", directory / "none", "--log", "nobody")
    expect("nothing of that", done.returncode == 3, done.stderr.decode().strip())
    code, quick = listed(archive, "--log", "trips")
    names = {log["log"] for file in quick["files"] for log in file["logs"]}
    expect("by log, without reading all of it", code == 0 and names == {"trips"})

    full = directory / "full"
    full.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", full, check=True)
    try:
        store = directory / "beside"
        with Daemon(store, *SETTINGS, "--archive-dir", full) as daemon:
            appended = dict.fromkeys(LOGS, 0)
            for _ in range(20):
                append(daemon, appended)
                if wait_until(lambda: daemon.metric("wald_archive_failures_total") > 0, 1):
                    break
            expect("a full archive is counted", daemon.metric("wald_archive_failures_total") > 0)
            status = json.loads(daemon.walctl("status", "--output", "json").stdout)
            expect("status says why nothing is dropped", str(full) in (status.get("archive_failure") or ""), status.get("archive_failure"))
            expect("and the log", any("sorting was cut off" in line and str(full) in line for line in daemon.lines))
            expect("appends go on", append(daemon, appended))
            run("mount", "-o", "remount,size=64m", full, check=True)
            expect("it continues when there is space", wait_until(lambda: daemon.metric("wald_archive_written_bytes_total") > 0))
            # The daemon tries again after 10 s.
            failure = lambda: json.loads(daemon.walctl("status", "--output", "json").stdout).get("archive_failure")
            expect("status reports no failure any more", wait_until(lambda: failure() is None))
            expect("the sorter comes to rest there", settled(daemon, full))
        code, listing = listed(full, "--verify")
        some = [each for each in held(listing).values() if each]
        expect("the delayed records are there once", code == 0 and some and all(each[0][0] == 0 and all(
            before[1] == after[0] for before, after in zip(each, each[1:])) for each in some), held(listing))
    finally:
        run("umount", full, check=True)

    victim = archive / max(file["file"] for file in quick["files"])
    content = bytearray(victim.read_bytes())
    content[9000] ^= 1
    victim.write_bytes(content)
    code, listing = listed(archive, "--verify")
    named = sum(finding["to_lsn"] - finding["from_lsn"] for finding in listing["findings"] if finding["to_lsn"])
    expect("a flipped bit is found and the lost records named", code == 5 and named > 0, listing["findings"][:1])
    done = wald("archive", "restore", "--archive", archive, "--to", directory / "rest", "--output", "json")
    told = json.loads(done.stdout)
    everything = sum(ranges[log][-1][1] for log in LOGS)
    expect("all else is restored", done.returncode == 5 and told["records"] == everything - named, f"{told['records']} of {everything}")
