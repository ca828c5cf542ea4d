"""Index files and checkpoints, compared with what the segments say."""

import itertools
import struct

from layout import NONE, Bad, crc, fields, message, signed, varint, zigzag
from store import NEVER

HEADER = struct.Struct("<8sIIQ8sQQIIII")
ROW = struct.Struct("<QQQqQQIIII")
ENTRY = struct.Struct("<IIII")


def image(data):
    """An image of a log, in words."""
    found = {"cursors": {}, "producers": {}}
    for number, value in fields(data):
        if number == 17:
            cursor = message(value)
            found["cursors"][cursor[1].decode()] = (cursor.get(2, 0), signed(cursor.get(3, 0)))
        elif number == 18:
            producer = message(value)
            first, batches = remembered(producer[4])
            found["producers"][producer[1]] = (producer.get(2, 0), producer.get(3, 0), first, batches)
        else:
            found[number] = value
    chain, at, data = [], 0, found.get(15, b"")
    while at < len(data):
        base, at = varint(data, at)
        size, at = varint(data, at)
        chain.insert(0, (base, size))
    return {"id": found.get(1, 0), "name": found.get(2, b"").decode(), "next": found.get(3, 0),
            "first": found.get(4, 0), "newest_time": signed(found.get(5, 0)), "create_time": signed(found.get(6, 0)),
            "change_time": signed(found.get(7, 0)), "created_end": found.get(8, 0), "newest_end": found.get(9, 0),
            "stored": found.get(10, 0), "deleted": bool(found.get(11)), "config": found.get(12, b""),
            "touched": found.get(13, 0), "created_in": found.get(14, 0), "chain": chain,
            "epoch": found.get(16, 0), "cursors": found["cursors"], "producers": found["producers"]}


def remembered(data):
    """Remembered batches: the first sequence, and (lsn, count, arrival, time, position, digest) of each."""
    sequence, at = varint(data, 0)
    number, at = varint(data, at)
    batches, next_lsn, arrival, position = [], 0, 0, 0
    for _ in range(number):
        values = []
        for _ in range(5):
            value, at = varint(data, at)
            values.append(value)
        lsn = next_lsn + values[0]
        arrival += zigzag(values[2])
        position += values[4]
        batches.append((lsn, values[1], arrival, arrival + zigzag(values[3]), position,
                        int.from_bytes(data[at:at + 8], "little")))
        at += 8
        next_lsn = lsn + values[1]
    return sequence, batches


def stood(log, with_chain):
    """How a log stands, in the words of `image`."""
    names = ["id", "name", "next", "first", "newest_time", "create_time", "change_time", "created_end", "newest_end",
             "stored", "deleted", "config", "touched", "created_in", "epoch", "cursors"]
    found = {name: getattr(log, name) for name in names}
    found["chain"] = log.chain if with_chain else []
    found["producers"] = {name: (known.epoch, known.next, known.next - len(known.batches), known.batches)
                          for name, known in log.producers.items()}
    return found


def differences(what, told, log, with_chain):
    held = stood(log, with_chain)
    return [f"{what}: log {log.id}: {key} is {told[key]!r}, the segments say {held[key]!r}"
            for key in held if told[key] != held[key]]


def check_index(segment, store):
    """The index of a segment, if it has one and no damage; gives back what is wrong with it, None without one."""
    path = store.path / "index" / f"{segment.id:016x}.idx"
    if not path.exists():
        return None
    data, what = path.read_bytes(), f"index/{path.name}"
    if len(data) < HEADER.size + 4 or crc(data[:-4]) != int.from_bytes(data[-4:], "little"):
        return [f"{what}: the checksum is wrong"]
    magic, version, flags, number, salt, base, end, chain, rows, entries, zero = HEADER.unpack_from(data)
    if (magic, version, flags, zero) != (b"WALDIDX\0", 1, 0, 0):
        return [f"{what}: not an index of version 1"]
    wrong = []
    held = (segment.id, segment.life.salt, segment.base, segment.base + segment.end, segment.chain)
    if (number, salt, base, end, chain) != held:
        wrong.append(f"{what}: {(number, salt, base, end, chain)} instead of {held}")
    touched = sorted((log for log in store.logs.values() if log.touched == segment.id), key=lambda log: log.id)
    at = HEADER.size
    told = [ROW.unpack_from(data, at + ROW.size * row) for row in range(rows)]
    at += ROW.size * rows
    places = [ENTRY.unpack_from(data, at + ENTRY.size * entry) for entry in range(entries)]
    images = at + ENTRY.size * entries
    if [row[0] for row in told] != [log.id for log in touched]:
        return [*wrong, f"{what}: rows of logs {[row[0] for row in told]} instead of {[log.id for log in touched]}"]
    for row, log in zip(told, touched):
        number, first, next_lsn, newest, newer, older, entry, count, image_at, image_bytes = row
        here = [batch for batch in log.batches if batch.segment == segment.id]
        start = here[0].first_lsn if here else log.next
        size = log.chain[0][1]
        expected = (start, log.next, log.newest_time,
                    *((store.below[log.id][0][0], store.below[log.id][1][0]) if size > 1 else (NONE, NONE)))
        if (first, next_lsn, newest, newer, older) != expected:
            wrong.append(f"{what}: row of log {number}: {(first, next_lsn, newest, newer, older)} instead of {expected}")
        held = [(batch.offset, batch.first_lsn - start, batch.count, batch.size) for batch in here]
        if places[entry:entry + count] != held:
            wrong.append(f"{what}: entries of log {number} differ")
        wrong += differences(what, image(data[images + image_at:images + image_at + image_bytes]), log, False)
    return wrong


def read_checkpoint(path):
    data = path.read_bytes()
    if len(data) < 16 or crc(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise Bad("the checksum is wrong")
    if data[:8] != b"WALDCKP\0" or int.from_bytes(data[8:12], "little") != 1:
        raise Bad("not a checkpoint of version 1")
    found = {"segments": [], "images": [], "ended": []}
    for number, value in fields(data[12:-4]):
        if number == 11:
            at, values = 0, []
            for _ in range(5):
                part, at = varint(value, at)
                values.append(part)
            found["segments"].append((*values, value[at:at + 8]))
        elif number == 12:
            found["images"].append(image(value))
        elif number == 10:
            epoch, at = varint(value, 0)
            found["ended"].append((epoch, varint(value, at)[0]))
        else:
            found[number] = value
    return found


def check_checkpoint(segment, store, walked):
    """The checkpoint at the end of a segment, if there is one; gives back what is wrong with it, None without one."""
    path = store.path / "checkpoint" / f"{segment.id:016x}.ckp"
    if not path.exists():
        return None
    what = f"checkpoint/{path.name}"
    try:
        told = read_checkpoint(path)
    except Bad as why:
        return [f"{what}: {why}"]
    wrong = []
    header = (told.get(1, 0).to_bytes(8, "little") + told.get(2, 0).to_bytes(8, "little"), told.get(3, 0), told.get(7, 0),
              told.get(8, 0), told.get(9, 0))
    before = walked[-2].id if len(walked) > 1 else 0
    held = (store.id, store.epoch, segment.id, before, segment.chain)
    if header != held:
        wrong.append(f"{what}: {header} instead of {held}")
    if segment.sealed and told.get(4, 0) != segment.next_log:
        wrong.append(f"{what}: the next log is {told.get(4, 0)}, the seal says {segment.next_log}")
    if signed(told.get(6, 0)) != segment.arrival:
        wrong.append(f"{what}: latest arrival {signed(told.get(6, 0))}, the segments say {segment.arrival}")
    if bool(told.get(5)) != segment.clean:
        wrong.append(f"{what}: says {bool(told.get(5))} of the end of its run")
    for entry, one in itertools.zip_longest(told["segments"], walked):
        # A start that came later may have given back what lies behind the frames.
        sizes = {len(one.data), one.life.size} if one and len(one.data) == -(-one.end // 4096) * 4096 else {one and len(one.data)}
        if not entry or not one or entry[2] not in sizes or (*entry[:2], *entry[3:]) != (
                one.id, one.life.size, one.base, one.end, one.life.salt):
            wrong.append(f"{what}: segment {entry} differs from {one and one.path.name}")
    logs = {log.id: log for log in store.logs.values()}
    if sorted(one["id"] for one in told["images"]) != sorted(logs):
        wrong.append(f"{what}: logs {sorted(one['id'] for one in told['images'])} instead of {sorted(logs)}")
    for one in told["images"]:
        if one["id"] in logs:
            wrong += differences(what, one, logs[one["id"]], True)
    return wrong


__all__ = ["check_checkpoint", "check_index", "NEVER"]
