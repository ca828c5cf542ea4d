"""Compares the independent reader of data directories (storage/reader, written from storage/FORMAT.md alone) with the
engine. In each of 2 rounds a daemon with segments of 64 KiB gets a random load: all sync modes, lz4, batches
over several logs, producers, fences, cursors, trims, retention, deletions, kills and clean stops. In every other round
it sorts. The reader, and a daemon that starts on a copy, read its directory
unchanged, with its tail torn, with bytes flipped, with files missing, and after damage was sorted.
Both must report the same logs, records, cursors and missing ranges, and refuse the same
appends. Index files and checkpoints must match the segments. The golden directories
(storage/tests/golden) must match the files of expected contents next to them. Arguments: rounds and a seed.
"""

import base64
import random
import struct
import tarfile

from reading import *

SMALL = ["--segment-bytes", "64KiB"]
# With the sorter, which takes two segments at a time, and without.
SORTER = ["--sorter-enabled", "--sorter-step-bytes", "256KiB"]
UNSORTED = ["--sorter-enabled=false"]
# The kind of a frame of records.
BATCH = 1
SYNC_MODES = ["strict", "batch", "interval", "async", "manual"]


def text(data):
    """Bytes as the reader prints them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"hex:{data.hex()}"


def served(daemon):
    """The daemon's view of its logs, with the reader's names."""
    logs = {}
    _, answer, _ = daemon.call("wald.v1.LogService/ListLogs", {"page_size": 1000})
    for log in answer.get("logs", []):
        name, config = log["name"], log.get("config", {})
        logs[name] = {
            "log_id": int(log["logId"]), "first_lsn": int(log.get("firstLsn", 0)), "next_lsn": int(log.get("tailLsn", 0)),
            "writer_epoch": int(log.get("writerEpoch", 0)), "stored_bytes": int(log.get("storedBytes", 0)),
            "config": {key: config[name].removeprefix(prefix).lower() for key, name, prefix in
                       (("sync_mode", "syncMode", "SYNC_MODE_"), ("compression", "compression", "COMPRESSION_"))
                       if name in config}}
        retention = config.get("retention", {})
        logs[name]["config"].update({key: int(retention[theirs]) for key, theirs in
                                     (("max_bytes", "maxBytes"), ("max_records", "maxRecords")) if theirs in retention})
        found, gaps, expired = [], [], 0
        for message in stream(daemon.grpcurl("-d", json.dumps({"log": name, "lsn": 0}), daemon.grpc,
                                             "wald.v1.WalService/Scan")):
            for batch in message.get("batches", []):
                for at, record in enumerate(batch["records"]):
                    one = {"lsn": int(batch.get("firstLsn", 0)) + at,
                           "time_us": int(record.get("timestampUs", 0)) or int(batch["timestampUs"]),
                           "data": text(base64.b64decode(record.get("data", "")))}
                    if "headers" in record:
                        one["headers"] = [[header["key"], text(base64.b64decode(header.get("value", "")))]
                                          for header in record["headers"]]
                    if "crc32c" in record:
                        one["crc32c"] = record["crc32c"]
                    found.append(one)
            gaps += [(int(gap.get("fromLsn", 0)), int(gap["toLsn"]) if "toLsn" in gap else None)
                     for gap in message.get("gaps", []) if gap["reason"] == "GAP_REASON_QUARANTINED"]
            expired += sum(int(gap["toLsn"]) - int(gap.get("fromLsn", 0)) for gap in message.get("gaps", [])
                           if gap["reason"] == "GAP_REASON_EXPIRED")
        _, cursors, _ = daemon.call("wald.v1.CursorService/ListCursors", {"log": name})
        # An open gap: the number of records missing at the end is unknown.
        logs[name].update(found=found, expired=expired, quarantined=joined(gap for gap in gaps if gap[1] is not None),
                          tail_proven=all(end is not None for _, end in gaps), cursors=[
            {"name": cursor["name"], "lsn": int(cursor.get("lsn", 0))} for cursor in cursors.get("cursors", [])])
    return logs


def stream(done):
    """The messages of a streaming call: grpcurl prints one object after another."""
    if done.returncode:
        raise SystemExit(f"a scan failed: {done.stderr.decode()}")
    decoder, at, found, said = json.JSONDecoder(), 0, [], done.stdout.decode()
    while at < len(said.rstrip()):
        message, at = decoder.raw_decode(said, at)
        found.append(message)
        while at < len(said) and said[at].isspace():
            at += 1
    return found


def joined(ranges):
    """Sorted ranges of lsns; adjacent ranges are joined."""
    found = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1][1] = max(end, found[-1][1])
        else:
            found.append([start, end])
    return found


def told(logs):
    """The fields of the reader's results that a daemon reports, too."""
    same = ["log_id", "first_lsn", "expired", "next_lsn", "writer_epoch", "stored_bytes", "config", "tail_proven", "found"]
    return {name: {**{key: log[key] for key in same}, "quarantined": joined(log["quarantined"]),
                   "cursors": [{"name": one["name"], "lsn": one["lsn"]} for one in log["cursors"]]}
            for name, log in logs.items()}


class Totals:
    sorted = runs = back = directories = records = damaged = indexes = checkpoints = torn = unproven = same = other = 0


def compare(what, directory, sound, appends=False, sorter=UNSORTED, whole=None):
    """Reads a directory both ways; `sound`: nothing in it is damaged, `whole`: the results before the damage."""
    store, logs = read(directory)
    runs = len(list((directory / "sorted").glob("*.seg")))
    with tempfile.TemporaryDirectory(dir=SCRATCH) as temporary:
        copy = Path(temporary) / "data"
        shutil.copytree(directory, copy)
        with Daemon(copy, *SMALL, *sorter, "--retention-interval", "1h") as daemon:
            settle(daemon, sorter)
            engine = served(daemon)
            epochs = {name: log["writer_epoch"] for name, log in engine.items()}
            # In a damaged log stored_bytes depend on whether the start walked its segments or trusted their indexes.
            for name in logs if not sound else []:
                if name in engine:
                    engine[name]["stored_bytes"] = logs[name]["stored_bytes"]
                    # Settings, cursors and fences of a lost segment are in the index after it, which the reader does
                    # not use: the engine reports the reader's values, or the ones before the damage.
                    for key in ("config", "cursors", "writer_epoch"):
                        if whole and name in whole and engine[name][key] == whole[name][key]:
                            engine[name][key] = told(logs)[name][key]
            # A reader of later runs finds a trim that damage removed: this reader looks there, the engine does not.
            back = [name for name in logs if runs and not sound and name in engine and (
                engine[name]["first_lsn"] < logs[name]["first_lsn"] or engine[name]["expired"] > logs[name]["expired"])]
            # An index after a lost segment still has its trim. The engine then reports the state before the damage.
            back += [name for name in logs if whole and not sound and name in engine and name in whole and name not in back
                     and engine[name]["first_lsn"] == whole[name]["first_lsn"] != logs[name]["first_lsn"]]
            # A deletion is similar: a log that was deleted before the damage stays deleted.
            back += [name for name in logs if whole and not sound and name not in engine and name not in whole]
            Totals.back += len(back)
            wrong = difference(*({name: log for name, log in each.items() if name not in back} for each in (told(logs), engine)))
            refused = []
            if appends:
                for name in logs:
                    call = daemon.walctl("append", name, "--output", "json", "--timeout", "5s", "--writer-epoch",
                                         str(epochs.get(name, 0)), input=b"more\n")
                    refused.append((name, call.returncode == 0))
                differ = [name for name, taken in refused if name in epochs and taken != logs[name]["tail_proven"]]
                wrong = wrong or (f"proven tails of {differ}" if differ else "")
            daemon.stop() if sound else daemon.kill()
        after, later = read(copy)
        if not wrong and not appends:
            # The second start finds no record of the damage in index and checkpoint: the first start replaced them.
            for name in logs if not sound else []:
                for key in ("stored_bytes", "cursors", "config"):
                    if name in later:
                        later[name][key] = logs[name][key]
            wrong = difference(*({name: log for name, log in told(each).items() if name not in back} for each in (logs, later)))
            wrong = wrong and f"after the start: {wrong}"
        problems = store["problems"] + after["problems"] if sound else []
    Totals.directories += 1
    Totals.sorted, Totals.runs = Totals.sorted + (runs > 0), Totals.runs + runs
    Totals.records += sum(len(log["found"]) for log in logs.values())
    Totals.damaged += sum(end - start for log in logs.values() for start, end in log["quarantined"])
    Totals.indexes += store["indexes"] + after["indexes"]
    Totals.checkpoints += store["checkpoints"] + after["checkpoints"]
    Totals.torn += store["torn"] is not None
    Totals.same += store["digests"]["same"]
    Totals.other += store["digests"]["other"]
    Totals.unproven += sum(not log["tail_proven"] for log in logs.values())
    held = not wrong and not problems
    expect(what, held, wrong or "; ".join(problems) or f"{len(logs)} logs")
    if not held and os.environ.get("KEEP"):
        shutil.copytree(directory, Path(os.environ["KEEP"]) / re.sub(r"\W+", "-", what), dirs_exist_ok=True)


def settle(daemon, sorter):
    """Waits until the sorter, if enabled, has taken all it can."""
    # Segments that no checkpoint covers yet, and the last ones, stay.
    if sorter is SORTER and not wait_until(lambda: daemon.metric("wald_unsorted_bytes") < 6 * (64 << 10), 5):
        print("     not everything was sorted", flush=True)


def load(daemon, draw, state):
    """A random load: one session of batches, then single calls."""
    for mode in SYNC_MODES:
        daemon.call("wald.v1.LogService/CreateLog", {"log": f"mode/{mode}", "config": {
            "sync_mode": f"SYNC_MODE_{mode.upper()}", **({"compression": "COMPRESSION_LZ4"} if draw.random() < 0.5 else {})}})
    names = [*(f"mode/{mode}" for mode in SYNC_MODES), *(f"plain/{n}" for n in range(draw.randint(3, 12)))]
    requests = []
    for number in range(draw.randint(100, 250)):
        batches, own = [], draw.random() < 0.3
        for name in draw.sample(names, draw.choice([1, 1, 1, 2, 4])):
            records = []
            for _ in range(draw.choice([1, 1, 2, 10])):
                data = bytes(draw.randbytes(draw.randint(0, 60))) if draw.random() < 0.5 else b"again " * draw.randint(0, 200)
                record = {"data": base64.b64encode(data).decode()}
                if draw.random() < 0.2:
                    record["headers"] = [{"key": "k", "value": base64.b64encode(b"v").decode()}] * draw.randint(1, 3)
                if draw.random() < 0.03:
                    record["timestamp_us"] = str(int(time.time() * 1e6) - draw.randint(0, 10**7))
                records.append(record)
            batch, condition = {"log": name, "records": records}, {}
            if name in state["epochs"]:
                condition["writer_epoch"] = state["epochs"][name]
            if own:
                key = name, draw.choice("pq")
                sequence = state["sequences"].get(key, 0)
                condition["producer"] = {"id": key[1], "epoch": 1, "sequence": sequence}
                state["sequences"][key] = sequence + 1
            if condition:
                batch["condition"] = condition
            batches.append(batch)
        requests.append({"request_id": number + 1, "batch": {"batches": batches}})
    done = daemon.grpcurl("-d", "@", daemon.grpc, "wald.v1.WalService/AppendSession",
                          input="\n".join(map(json.dumps, requests)).encode())
    if done.returncode:
        raise SystemExit(f"the load failed: {done.stderr.decode()}")
    # A log that is created again begins without fences and producers; manual ones were not synced before.
    logs = daemon.walctl("logs", "--output", "json").stdout
    for log in json.loads(logs):
        name, tail, first = log["name"], log["durable_lsn"], log["first_lsn"]
        act = draw.random()
        if act < 0.2 and tail > first:
            daemon.walctl("trim", name, "--before", draw.randint(first, tail), check=True)
        elif act < 0.35:
            daemon.walctl("fence", name, check=True)
            state["epochs"][name] = log["writer_epoch"] + 1
        elif act < 0.6:
            daemon.walctl("cursor", "set", name, draw.choice("abc"), draw.randint(0, tail), check=True)
        elif act < 0.65:
            daemon.walctl("cursor", "delete", name, "a")
        elif act < 0.75:
            bound = draw.choice([["--max-records", draw.randint(1, 30)], ["--max-bytes", draw.randint(1, 20000)]])
            daemon.walctl("log", "update", name, *bound, check=True)
        elif act < 0.8:
            daemon.walctl("log", "update", name, "--compression", draw.choice(["none", "lz4"]), check=True)
        elif act < 0.9 and name.startswith("plain/"):
            daemon.walctl("log", "delete", name, check=True)
            state["epochs"].pop(name, None)
            for key in [key for key in state["sequences"] if key[0] == name]:
                del state["sequences"][key]
    if draw.random() < 0.5:
        daemon.walctl("sync", check=True)


def forget_unsynced(daemon, state):
    """After a kill logs in mode `manual` may have lost batches: deletes them, so that their producers start again."""
    for key in [key for key in state["sequences"] if key[0] == "mode/manual"]:
        daemon.walctl("log", "delete", key[0])
        del state["sequences"][key]
        state["epochs"].pop(key[0], None)


def used(directory):
    """The segments with frames, and the offset where the frames of each end."""
    store, _ = read(directory)
    paths = [directory / "journal" / name for name in store["segments"]]
    return [(path, frames(path)[1]) for path in paths]


def changed(directory, temporary, change):
    """A copy of a directory after `change`."""
    copy = Path(temporary) / f"changed-{random.random()}"
    shutil.copytree(directory, copy)
    change(copy)
    return copy


def flip(path, at, bit):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def cut(path, at, size):
    """Zeros from `at` on, as a power cut leaves unflushed writes."""
    with open(path, "r+b") as file:
        file.truncate(at)
        file.truncate(size)


def frames(path):
    """Offsets of the frames of a segment, and their end, from their lengths and chain only."""
    data, at, found, chain = path.read_bytes(), 8192, [], bytes(4)
    while at + 64 <= len(data) and data[at + 6] == 1 and data[at + 60:at + 64] == chain:
        found.append(at)
        chain = data[at:at + 4]
        head, body = struct.unpack_from("<H", data, at + 4)[0] * 8, struct.unpack_from("<I", data, at + 8)[0]
        at += head + (body + 7) // 8 * 8
    return found, at


def harm(directory, temporary, draw):
    """The directory in many damaged forms, each compared."""
    whole = told(read(directory)[1])
    segments = used(directory)
    last, end = segments[-1]
    size = last.stat().st_size
    for _ in range(3):
        at = draw.randint(8192, end)
        compare(f"cut at {at} of the last segment", changed(
            directory, temporary, lambda copy: cut(copy / "journal" / last.name, at, size)), False, draw.random() < 0.3, whole=whole)
    for _ in range(8):
        path, end = draw.choice(segments)
        places, _ = frames(path)
        where = draw.choice(["anywhere", "header", "link"])
        at = {"anywhere": draw.randrange(8192, end), "header": draw.choice(places) + draw.randrange(64),
              "link": 8192 + draw.randrange(80)}[where]
        compare(f"a flipped bit at {at} of {path.name}", changed(
            directory, temporary, lambda copy: flip(copy / "journal" / path.name, at, draw.randrange(8))),
            False, draw.random() < 0.4, whole=whole)
    path, end = draw.choice(segments)
    start = draw.randrange(8192, end)

    def zero(copy):
        with open(copy / "journal" / path.name, "r+b") as file:
            file.seek(start)
            file.write(bytes(min(draw.choice([512, 4096, 20000]), end - start)))

    compare(f"zeros from {start} of {path.name}", changed(directory, temporary, zero), False, True, whole=whole)
    for path in (last, draw.choice(segments)[0]):
        compare(f"{path.name} is gone", changed(
            directory, temporary, lambda copy: (copy / "journal" / path.name).unlink()), False, True, whole=whole)

    def lives(copy):
        for at in (0, 4096):
            flip(copy / "journal" / path.name, at + draw.randrange(104), draw.randrange(8))

    compare(f"both life blocks of {path.name} are damaged", changed(directory, temporary, lives), False, True, whole=whole)
    compare(f"one life block of {path.name} is damaged", changed(
        directory, temporary, lambda copy: flip(copy / "journal" / path.name, draw.randrange(104), 3)), False, whole=whole)


def sort_damage(directory, temporary, draw):
    """Damage that was sorted into runs: the runs verify, and their images name the lost records."""
    copy = changed(directory, temporary, lambda _: None)
    before = {path.name for path, _ in used(copy)}

    def fill(daemon):
        """About four segments of records that are never trimmed."""
        for number in range(24):
            data = f"{number} {draw.random()} ".encode() * 500
            daemon.walctl("append", f"lost/{number % 3}", input=data[:10000] + b"\n", check=True)

    with Daemon(copy, *SMALL, *UNSORTED) as daemon:
        fill(daemon)
        daemon.kill()
    damaged = [path for path, _ in used(copy) if path.name not in before][1:3]
    for path, in_header in zip(damaged, (False, True)):
        data = path.read_bytes()
        # Byte 7 of a frame is its kind. Another frame follows the chosen one, so a header can be lost.
        batches = [at for at in frames(path)[0][:-1] if data[at + 7] == BATCH]
        at = draw.choice(batches)
        flip(path, at + (40 if in_header else 100), draw.randrange(8))
    with Daemon(copy, *SMALL, *SORTER, "--retention-interval", "1h") as daemon:
        fill(daemon)
        gone = wait_until(lambda: not any(path.exists() for path in damaged), 30)
        expect("segments with damage are sorted", len(damaged) == 2 and gone, [path.name for path in damaged])
        daemon.stop() if draw.random() < 0.5 else daemon.kill()
    store, logs = read(copy)
    lost = {name: log["quarantined"] for name, log in logs.items() if log["quarantined"]}
    count = sum(end - start for gaps in lost.values() for start, end in gaps)
    # Each frame has one record.
    expect("runs name the lost records, and no others", count == 2 and all(name.startswith("lost/") for name in lost), lost)
    compare("sorted damage", copy, True)


@check("The reader reads each golden directory as the file next to it says")
def golden():
    archives = sorted(GOLDEN.glob("*/*.tar.gz"))
    expect("there are golden directories", archives, len(archives))
    for archive in archives:
        with tempfile.TemporaryDirectory(dir=SCRATCH) as temporary:
            with tarfile.open(archive) as packed:
                packed.extractall(temporary, filter="data")
            store, logs = read(temporary)
            kept = json.loads(archive.with_name(archive.name.replace(".tar.gz", ".json")).read_text())
            same = store["clean"] == kept["clean"] and (store["torn"] is not None) == kept["torn"]
            for log in kept["logs"].values():
                log["producers"].sort(key=lambda one: one["id"])
            wrong = difference(expected(logs), kept["logs"])
            expect(f"golden {archive.parent.name}/{archive.name} reads as it did", same and not wrong, wrong or f"{len(logs)} logs")


ROUNDS = int(sys.argv[1]) if sys.argv[1:] else sized(2, 1)
# The default run has the same load each time; --all draws one.
SEED = int(sys.argv[2]) if sys.argv[2:] else sized(random.randrange(1 << 32), 4180489125)


@check("The reader and the daemon read random stores alike: sound, torn, damaged, sorted")
def rounds(count=ROUNDS, seed=SEED):
    print(f"seed {seed}: .ci/run disk/reader -- {count} {seed}", flush=True)
    for number in range(count):
        draw = random.Random(f"{seed}-{number}")
        with scratch() as temporary:
            data, state = Path(temporary) / "data", {"epochs": {}, "sequences": {}}
            sorts = number % 2 == 0
            runs = draw.randint(1, 3)
            for run_number in range(runs):
                sorter = SORTER if sorts else UNSORTED
                with Daemon(data, *SMALL, *sorter, "--sync-mode", draw.choice(SYNC_MODES[:4]), "--retention-interval", "5ms") as daemon:
                    if run_number:
                        forget_unsynced(daemon, state)
                    load(daemon, draw, state)
                    settle(daemon, sorter)
                    # One load may be less than the sorter leaves unsorted: loads go on until there is a run to compare.
                    for _ in range(10):
                        if not sorts or any((data / "sorted").glob("*.seg")):
                            break
                        load(daemon, draw, state)
                        settle(daemon, sorter)
                    # The last directory is damaged: with a checkpoint at its end, and without.
                    clean = draw.random() < 0.5 if run_number + 1 < runs else number % 2 == 1
                    daemon.stop() if clean else daemon.kill()
                compare(f"round {number}: after {'a clean stop' if clean else 'a kill'}", data, True,
                        sorter=draw.choice([SORTER, UNSORTED]) if sorts else UNSORTED)
            harm(data, temporary, draw)
            if sorts:
                sort_damage(data, temporary, draw)
    if count:
        expect("digests of producers' batches match their records, unless times were moved",
               Totals.same > 2 * Totals.other, f"{Totals.same} of {Totals.same + Totals.other}")
        expect("there were sorted runs", Totals.runs, f"{Totals.runs}, in {Totals.sorted} directories")
    print(f"     {Totals.directories} directories, {Totals.records} records compared, {Totals.damaged} damaged, "
          f"{Totals.torn} torn tails, {Totals.unproven} tails not proven, {Totals.back} logs that damage took a trim of, {Totals.indexes} index files and {Totals.checkpoints} checkpoints")
