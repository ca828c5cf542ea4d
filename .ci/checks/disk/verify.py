"""Flips a byte in the middle of a journal of 1,000 logs, in a body, in a header, in a life block,
under a daemon that serves it. `walctl verify` names exactly the records it touches, and so do reads
and scans; all else reads and appends. `wald verify` names the same once the daemon is killed, and
so does the next start. `wald dump` finds the place to flip. A store that is whole has no finding.
"""

from common import *

LOGS = 1000
ROUNDS = 15
# Scrubbing would find it first.
QUIET = ("--segment-bytes", "1MiB", "--scrub-bytes-per-second", "0")


def name(log):
    return f"log/{log:04}"


def fill(daemon):
    """Appends ROUNDS records to each log."""
    lines = "".join(json.dumps({"log": name(log), "round": number, "pad": "x" * 150}) + "\n"
                    for number in range(ROUNDS) for log in range(LOGS))
    done = daemon.walctl("append", "--log-from-field", "log", input=lines.encode())
    expect(f"{LOGS} logs are filled", done.returncode == 0, done.stderr.decode().strip())


def named(text):
    """The records that a verification names as lost: {log: {lsn}}."""
    lost = {}
    for finding in json.loads(text)["findings"]:
        if finding["severity"] == "loss" and finding["log"] is not None:
            lost.setdefault(finding["log"], set()).update(range(finding["from_lsn"], finding["to_lsn"]))
    return lost


def offline(directory):
    """`wald verify`: exit code, damaged records, whole output."""
    done = run(WALD, "verify", directory, "--output", "json")
    return done.returncode, named(done.stdout) if done.stdout else None, done.stdout.decode()


def frames(directory):
    """Every frame: a dictionary as `wald dump` gives it."""
    done = run(WALD, "dump", directory, "--output", "jsonl")
    expect("wald dump reads the whole store", done.returncode == 0, done.stderr.decode())
    pieces = [json.loads(line) for line in done.stdout.splitlines()]
    segments = {piece["segment"]["id"]: piece["segment"] for piece in pieces if "segment" in piece}
    return segments, [piece["frame"] for piece in pieces if "frame" in piece]


def scanned(daemon):
    """The records of a scan of all logs: {log: {lsn}}."""
    done = daemon.walctl("scan", "--prefix", "log/", "--output", "json")
    found = {}
    for line in done.stdout.splitlines():
        record = json.loads(line)
        if "lsn" in record:
            found.setdefault(record["log"], set()).add(record["lsn"])
    return found


def readers_see(daemon, lost, appended, where):
    """Readers get errors for exactly the lost records, and all others."""
    everything = {name(log): set(range(ROUNDS + appended.get(name(log), 0))) for log in range(LOGS)}
    expected = {log: lsns - lost.get(log, set()) for log, lsns in everything.items()}
    expect(f"{where}: a scan gives everything else", scanned(daemon) == expected)
    for log, lsns in list(lost.items())[:3]:
        lsn = min(lsns)
        done = daemon.walctl("read", log, "--from", lsn)
        expect(f"{where}: reading {log} at {lsn} is data loss", done.returncode == 5, done.stderr.decode().strip())
    records = sum(len(lsns) for lsns in lost.values())
    expect(f"{where}: wald_quarantined_records", daemon.metric("wald_quarantined_records") == records,
           daemon.metric("wald_quarantined_records"))
    status = json.loads(daemon.walctl("status", "--output", "json").stdout)["damage"]
    counted = status and (status["quarantined_records"], status["log_count"])
    expect(f"{where}: walctl status", counted == ((records, len(lost)) if lost else None), counted)


def append(daemon, logs, appended, where):
    """All logs accept appends."""
    lines = "".join(json.dumps({"log": log, "after": True}) + "\n" for log in logs)
    done = daemon.walctl("append", "--log-from-field", "log", input=lines.encode())
    expect(f"{where}: {len(logs)} logs go on", done.returncode == 0, done.stderr.decode().strip())
    for log in logs:
        appended[log] = appended.get(log, 0) + 1


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


@check("A flipped byte among 1,000 logs: verify, reads and scans name exactly the lost records")
def flipped_bytes(directory):
    base = directory / "base"
    with Daemon(base, *QUIET) as daemon:
        fill(daemon)
        done = daemon.walctl("verify")
        expect("walctl verify of a whole store", done.returncode == 0, done.stdout.decode().strip())
        refused = run(WALD, "verify", base)
        expect("wald verify leaves a served directory alone", refused.returncode == 4, refused.stderr.decode().strip())
    code, lost, said = offline(base)
    expect("wald verify of a killed store", code == 0 and not lost, said)

    segments, all_frames = frames(base)
    middle = sorted(segments)[len(segments) // 2]
    path = segments[middle]["file"]
    batches = [frame for frame in all_frames if frame["segment"] == middle and frame["kind"] == "batch"]
    expect("the journal has several segments", len(segments) >= 3 and len(batches) > 100,
           f"{len(segments)} segments, {len(batches)} batches in the middle one")
    batch = batches[len(batches) // 2]
    touched = {batch["log"]: set(range(batch["first_lsn"], batch["first_lsn"] + batch["count"]))}
    cases = [("body", batch["offset"] + batch["header_bytes"] + batch["body_bytes"] // 2, touched),
             ("header", batch["offset"] + 41, touched),
             ("life block", 40, {})]
    for where, offset, lost in cases:
        copy = Path(directory) / where.replace(" ", "-")
        shutil.copytree(base, copy)
        appended = {}
        with Daemon(copy, *QUIET) as daemon:
            flip(copy / path, offset)
            done = daemon.walctl("verify", "--output", "json")
            expect(f"{where}: walctl verify finds it, exit 5", done.returncode == 5, done.stderr.decode().strip())
            expect(f"{where}: walctl verify names exactly the lost records", named(done.stdout) == lost, lost)
            failures = daemon.metric('wald_checksum_failures_total{where="verify"}')
            expect(f"{where}: counted once", failures == 1, failures)
            readers_see(daemon, lost, appended, where)
            append(daemon, [name(log) for log in range(LOGS)], appended, where)
            again = daemon.walctl("verify", "--output", "json")
            expect(f"{where}: a second time the same, not counted again", named(again.stdout) == lost
                   and daemon.metric('wald_checksum_failures_total{where="verify"}') == 1)
        code, found, said = offline(copy)
        expect(f"{where}: wald verify names the same", code == 5 and found == lost, said[:600])
        with Daemon(copy, *QUIET) as daemon:
            readers_see(daemon, lost, appended, f"{where}, after a restart")
            append(daemon, [name(log) for log in range(LOGS)], appended, f"{where}, after a restart")
        shutil.rmtree(copy)

    # No client reads it: scrubbing finds it.
    flip(base / path, cases[0][1])
    with Daemon(base, "--segment-bytes", "1MiB") as daemon:
        found = 'wald_checksum_failures_total{where="scrub"}'
        until = time.monotonic() + 60
        while daemon.metric(found) == 0 and time.monotonic() < until:
            time.sleep(0.1)
        expect("scrubbing finds it without a read", daemon.metric(found) == 1, daemon.metric(found))
        expect("scrubbing counts the bytes that it reads", daemon.metric("wald_scrubbed_bytes_total") > 0)
        readers_see(daemon, touched, {}, "scrubbing")
