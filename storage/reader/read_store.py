#!/usr/bin/env python3
"""usage: read_store.py [--records] DIRECTORY

Reads a data directory of Wald, changes nothing in it, and prints what it holds as JSON lines: one for the
store, one for each log in the order of their names. --records adds each log's records behind its line.

The digest of a log's records is XXH3-128 of, for each: lsn (8 bytes), time in microseconds (8), then behind their
lengths (8 bytes each) data, key and value of each header, and checksum (4 bytes, or none).

Written from storage/FORMAT.md and from nothing else, so that the document and the engine can be held against each other.
Wants the packages of requirements.txt. Ends with 0 if nothing is wrong, 1 if something is damaged, 2 if the
directory cannot be read.
"""

import json
import sys

from derived import check_checkpoint, check_index
from layout import Bad, bytes_digest, message
from store import Store

SYNC_MODES = [None, "strict", "batch", "interval", "async", "manual", "replicated"]
COMPRESSIONS = [None, "none", "lz4", "zstd"]


def config(data):
    """A LogConfig, with what is not set left out."""
    found = message(data)
    retention = message(found.get(2, b""))
    age = message(retention.get(1, b""))
    told = {"sync_mode": SYNC_MODES[found.get(1, 0)], "compression": COMPRESSIONS[found.get(3, 0)],
            "max_record_bytes": found.get(4),
            "max_age_ns": age.get(1, 0) * 10**9 + age.get(2, 0) if 1 in retention else None,
            "max_bytes": retention.get(2), "max_records": retention.get(3), "respect_cursors": retention.get(4)}
    return {key: value for key, value in told.items() if value}


def text(data):
    """Bytes as JSON has them: text if they are UTF-8, else hexadecimal behind `hex:`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"hex:{data.hex()}"


def record(told):
    if "key" in told:
        return {"lsn": told["lsn"], "encrypted_with_key": told["key"]}
    found = {"lsn": told["lsn"], "time_us": told["time_us"], "data": text(told["data"])}
    if told["headers"]:
        found["headers"] = [[key, text(value)] for key, value in told["headers"]]
    if "crc32c" in told:
        found["crc32c"] = told["crc32c"]
    return found


def records(log):
    return [record(one) for batch in log.batches for one in batch.records if one["lsn"] >= log.first]


def digest_of(log):
    data = bytearray()
    for batch in log.batches:
        for one in batch.records:
            if one["lsn"] >= log.first:
                data += one["lsn"].to_bytes(8, "little") + one["time_us"].to_bytes(8, "little", signed=True)
                parts = [one["data"], *(part for key, value in one["headers"] for part in (key.encode(), value)),
                         one["crc32c"].to_bytes(4, "little") if "crc32c" in one else b""]
                data += b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return bytes_digest(bytes(data)).hex()


def describe(log, store):
    held = records(log)
    return {"log": log.name, "log_id": log.id, "first_lsn": log.first, "expired": log.expired, "next_lsn": log.next,
            "writer_epoch": log.epoch, "config": config(log.config), "create_time_us": log.create_time,
            "update_time_us": log.change_time, "stored_bytes": log.stored - log.trimmed,
            "cursors": [{"name": name, "lsn": lsn, "time_us": time}
                        for name, (lsn, time) in sorted(log.cursors.items())],
            "producers": [{"id": text(name), "epoch": known.epoch, "next_sequence": known.next,
                           "remembered": [{"lsn": lsn, "count": count, "digest": digest[::-1].hex()}
                                          for lsn, count, _, _, _, digest in known.batches]}
                          for name, known in sorted(log.producers.items())],
            "tail_proven": store.unproven is None or log.proven > store.unproven,
            "quarantined": log.gaps(), "records": len(held), "digest": digest_of(log)}, held


def read(directory):
    """A store with index files and checkpoints compared: (Store, indexes, checkpoints)."""
    store = Store(directory)
    walked, counts = [], {"indexes": 0, "checkpoints": 0}

    def after_segment(segment, _):
        walked.append(segment)
        if not segment.damaged:
            for kind, wrong in (("indexes", check_index(segment, store)),
                                ("checkpoints", check_checkpoint(segment, store, walked))):
                counts[kind] += wrong is not None
                store.problems += wrong or []
        for log in store.logs.values():
            store.below[log.id] = log.chain

    store.after_segment, store.of_living = after_segment, []
    found = store.read()
    living = {log.id for log in store.logs.values() if not log.deleted}
    store.problems += [text for log, text in store.of_living if log in living]
    return found, counts


def main():
    arguments = sys.argv[1:]
    with_records = "--records" in arguments
    paths = [one for one in arguments if one != "--records"]
    if len(paths) != 1 or paths[0].startswith("-"):
        print(__doc__.strip())
        return 0 if paths in (["-h"], ["--help"]) else 2
    try:
        store, counts = read(paths[0])
    except (Bad, OSError) as why:
        print(f"cannot read {paths[0]}: {why}", file=sys.stderr)
        return 2
    print(json.dumps({"store": store.id[::-1].hex(), "recovery_epoch": store.epoch,
                      "segments": [segment.path.name for segment in store.segments],
                      "clean": bool(store.segments) and store.segments[-1].clean, "torn": store.torn,
                      "damage": store.damage, **counts, "digests": {"same": store.digests[1], "other": store.digests[0]}, "problems": store.problems}))
    for log in store.live():
        line, held = describe(log, store)
        print(json.dumps(line))
        if with_records:
            for one in held:
                print(json.dumps({"of": log.name, **one}))
    return 1 if store.problems or store.damage else 0


if __name__ == "__main__":
    sys.exit(main())
