"""Index files and checkpoints, compared with what the segments say."""

import itertools
import struct

from layout import NONE, PRODUCER_CHANGES, Bad, crc, fields, message, signed, varint, zigzag

HEADER = struct.Struct("<8sIIQ8sQQIIII")
ROW = struct.Struct("<QQQqQQIIII")
ENTRY = struct.Struct("<IIII")


def image(data):
    """An image of a log, in words."""
    found = {"cursors": {}, "producers": {}, "missing": [], "gone": {}, "lost": []}
    for number, value in fields(data):
        if number == 17:
            cursor = message(value)
            found["cursors"][cursor[1].decode()] = (cursor.get(2, 0), signed(cursor.get(3, 0)))
        elif number == 18:
            producer, chunks = message(value), [remembered(part, 8 * (of - 3)) for of, part in fields(value) if of in (4, 5)]
            batches = [batch for _, part in chunks for batch in part]
            found["producers"][producer[1]] = (producer.get(2, 0), producer.get(3, 0), chunks[0][0], batches)
        elif number == 23:
            at = 0
            while at < len(value):
                name, at = value[at:at + 8], at + 8
                found["gone"][name], at = varint(value, at)
        elif number == 20:
            start, at = varint(value, 0)
            found["missing"].append((start, varint(value, at)[0]))
        elif number == 21:
            start, at = varint(value, 0)
            found["lost"].append((start, start + varint(value, at)[0]))
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
            "stored": found.get(10, 0), "trimmed": found.get(24, 0), "deleted": bool(found.get(11)), "config": found.get(12, b""),
            "touched": found.get(13, 0), "created_in": found.get(14, 0), "chain": chain,
            "epoch": found.get(16, 0), "cursors": found["cursors"], "producers": found["producers"],
            "expired": found.get(19, 0), "missing": found["missing"], "first_epoch": found.get(22, 0), "gone": found["gone"],
            "lost": found["lost"]}


def remembered(data, digest_bytes):
    """A chunk of remembered batches: the first sequence, and (lsn, count, arrival, time, position, digest) of each."""
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
                        data[at:at + digest_bytes]))
        at += digest_bytes
        next_lsn = lsn + values[1]
    return sequence, batches


def stood(log, with_chain, since=0):
    """How a log stands, in the words of `image`; of producers the changes since a position."""
    names = ["id", "name", "next", "first", "expired", "newest_time", "create_time", "change_time", "created_end", "newest_end",
             "stored", "trimmed", "deleted", "config", "touched", "created_in", "epoch", "cursors", "first_epoch"]
    found = {name: getattr(log, name) for name in names}
    found["chain"] = log.chain if with_chain else []
    found["producers"] = {}
    for name, known in log.producers.items():
        batches = [batch for batch in known.batches if batch[4] >= since]
        if batches:
            found["producers"][name] = (known.epoch, known.next, known.next - len(batches), batches)
    gone = log.gone if with_chain else {**log.replaced, **log.gone}
    found["gone"] = {name: epoch for name, (epoch, position) in gone.items() if position >= since}
    return found


def differences(what, told, log, with_chain, is_sorted=False, since=0):
    held = stood(log, with_chain, since)
    if is_sorted:
        # A run tells the first lsn kept as of when it was made.
        del held["first"], held["expired"], held["trimmed"]
    return [f"{what}: log {log.id}: {key} is {told[key]!r}, the segments say {held[key]!r}"
            for key in held if told[key] != held[key]]


def read_index(path):
    """An index file: what its header says, rows with their entries, images."""
    data = path.read_bytes()
    if len(data) < HEADER.size + 4 or crc(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise Bad("the checksum is wrong")
    magic, version, flags, number, salt, base, end, chain, rows, entries, zero = HEADER.unpack_from(data)
    if (magic, version, flags, zero) != (b"WALDIDX\0", 1, 0, 0):
        raise Bad("not an index of version 1")
    at = HEADER.size
    told = [ROW.unpack_from(data, at + ROW.size * row) for row in range(rows)]
    at += ROW.size * rows
    places = [ENTRY.unpack_from(data, at + ENTRY.size * entry) for entry in range(entries)]
    at += ENTRY.size * entries
    return (number, salt, base, end, chain), [
        (row[:6], places[row[6]:row[6] + row[7]], image(data[at + row[8]:at + row[8] + row[9]])) for row in told]


def index_of(segment, store):
    """Images of a segment that has a successor, if its index agrees with the link of that; else None."""
    try:
        header, rows = read_index(store.path / "index" / f"{segment.id:016x}.idx")
    except (Bad, FileNotFoundError):
        return None
    return rows if header == (segment.id, segment.life.salt, segment.base, segment.base + segment.end,
                              segment.told_chain) else None


def check_index(segment, store):
    """The index of a segment; gives back what is wrong with it, None without one."""
    path = store.path / "index" / f"{segment.id:016x}.idx"
    if not path.exists():
        return None
    what = f"index/{path.name}"
    try:
        header, rows = read_index(path)
    except Bad as why:
        return [f"{what}: {why}"]
    wrong = []
    held = (segment.id, segment.life.salt, segment.base, segment.base + segment.end, segment.chain)
    if header != held:
        wrong.append(f"{what}: {header} instead of {held}")
    touched = sorted((log for log in store.logs.values() if log.touched == segment.id), key=lambda log: log.id)
    if [row[0][0] for row in rows] != [log.id for log in touched]:
        return [*wrong, f"{what}: rows of logs {[row[0][0] for row in rows]} instead of {[log.id for log in touched]}"]
    for (row, places, told), log in zip(rows, touched):
        here = [batch for batch in log.batches if batch.segment == segment.id]
        start = here[0].first_lsn if here else log.next
        below = store.below[log.id][:2] if log.chain[0][1] > 1 else [(NONE, 0), (NONE, 0)]
        expected = (log.id, start, log.next, log.newest_time, below[0][0], below[1][0])
        if row != expected:
            wrong.append(f"{what}: row {row} instead of {expected}")
        held = [(batch.offset, batch.first_lsn - start, batch.count, batch.size) for batch in here]
        if places != held:
            wrong.append(f"{what}: entries of log {log.id} differ")
        found = differences(what, told, log, False, bool(store.runs), segment.base)
        if found and not segment.life.read_only & PRODUCER_CHANGES:
            # Versions without this feature listed all producers.
            found = differences(what, told, log, False, bool(store.runs))
        wrong += found
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


def newest_checkpoint(path, store, is_sorted):
    """The newest checkpoint that is whole and whose segments are all there by name, or sorted; or None."""
    for file in sorted((path / "checkpoint").glob("*.ckp"), reverse=True):
        try:
            found = read_checkpoint(file)
        except Bad:
            continue
        found["segments"] = [one for one in found["segments"] if not is_sorted(one[0])]
        named = [path / "journal" / f"{one[0]:016x}.seg" for one in found["segments"]]
        if found[1].to_bytes(8, "little") + found[2].to_bytes(8, "little") == store and all(
                name.exists() for name in named):
            return found
    return None


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
    before = walked[-2].id if len(walked) > 1 else store.runs[-1].last if store.runs else 0
    # A later process may write the checkpoint of the last segment of an earlier one.
    latest = int(store.begun["epoch"]) if store.begun else 0
    epoch = told.get(3, 0) if store.epoch <= told.get(3, 0) <= latest else store.epoch
    held = (store.id, epoch, segment.id, before, segment.chain)
    if header != held:
        wrong.append(f"{what}: {header} instead of {held}")
    if segment.sealed and told.get(4, 0) != segment.next_log:
        wrong.append(f"{what}: the next log is {told.get(4, 0)}, the seal says {segment.next_log}")
    if segment.sealed and told.get(13) != segment.expiry:
        wrong.append(f"{what}: the expiry clock shows {told.get(13)}, the seal says {segment.expiry}")
    if signed(told.get(6, 0)) != segment.arrival:
        wrong.append(f"{what}: latest arrival {signed(told.get(6, 0))}, the segments say {segment.arrival}")
    if bool(told.get(5)) != segment.clean:
        wrong.append(f"{what}: says {bool(told.get(5))} of the end of its run")
    entries = [entry for entry in told["segments"] if not store.is_sorted(entry[0])]
    for entry, one in itertools.zip_longest(entries, walked):
        # A start that came later may have given back what lies behind the frames.
        sizes = {len(one.data), one.life.size} if one and len(one.data) == -(-one.end // 4096) * 4096 else {one and len(one.data)}
        if not entry or not one or entry[2] not in sizes or (*entry[:2], *entry[3:]) != (
                one.id, one.life.size, one.base, one.end, one.life.salt):
            wrong.append(f"{what}: segment {entry} differs from {one and one.path.name}")
    logs = {log.id: log for log in store.logs.values()}
    images = sorted(one["id"] for one in told["images"])
    if store.runs:
        # Logs whose deletion is sorted are in some of both.
        logs = {number: log for number, log in logs.items() if not log.deleted}
        images = sorted(one["id"] for one in told["images"] if not one["deleted"])
    if images != sorted(logs):
        wrong.append(f"{what}: logs {images} instead of {sorted(logs)}")
    for one in told["images"]:
        if one["id"] in logs:
            found = differences(what, one, logs[one["id"]], True, bool(store.runs))
            # Right if the log was deleted behind this segment: the engine has forgotten its producers then, and the image
            # tells the changes of one segment.
            of_producers = [text for text in found if ": producers is " in text or ": gone is " in text]
            store.of_living += [(one["id"], text) for text in of_producers]
            wrong += [text for text in found if text not in of_producers]
    return wrong

