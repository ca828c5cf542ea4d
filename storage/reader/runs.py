"""Sorted runs: which there are, what is in them."""

from dataclasses import dataclass, field

from derived import image
from layout import (FIRST_FRAME, IMAGES, LIFE_BLOCK, ORDER, PACK, PIECES, RUN, Bad, Frame, crc, fields, frame_body, frame_header,
                    life_block, message, records, signed, varint, zigzag)
from state import Batch

ADDRESSES = 1 << 63


@dataclass
class Run:
    """A run, and what its last frame says."""
    path: object
    data: bytes
    life: object
    head: dict
    # Log id: (image, next lsn before the run); log id: batches.
    images: dict = field(default_factory=dict)
    batches: dict = field(default_factory=dict)
    problems: list = field(default_factory=list)

    @property
    def base(self):
        return ADDRESSES + (self.life.segment << 32)

    @property
    def first(self):
        return self.head.get(1, 0)

    @property
    def last(self):
        return self.head.get(4, 0)


def find_runs(path, store, problem):
    """The runs of a store, in order; those that are contained in another are left out."""
    found = []
    for file in sorted((path / "sorted").glob("*.seg")):
        try:
            found.append(open_run(file, store))
        except Bad as why:
            problem(f"sorted/{file.name}: {why}")
    found.sort(key=lambda run: (run.head.get(3, 0), -run.head.get(7, 0), -run.life.segment))
    kept = []
    for run in found:
        if not kept or run.head.get(7, 0) > kept[-1].head.get(7, 0):
            if run.head.get(2, 0) != (kept[-1].last if kept else 0):
                problem(f"the run before segment {run.first} is missing")
            kept.append(run)
    return kept


def open_run(file, store):
    data, life = file.read_bytes(), None
    for at in (0, LIFE_BLOCK):
        try:
            life = life or life_block(data[at:at + LIFE_BLOCK])
        except Bad:
            pass
    if life is None or life.store != store or f"{life.segment:016x}" != file.stem:
        raise Bad("no run of this store")
    if life.version != 1 or life.incompatible & ~8 != 1:
        raise Bad(f"version {life.version}, incompatible features {life.incompatible:#x}")
    if len(data) < life.size:
        raise Bad("it is shorter than it was")
    run = Run(file, data, life, {})
    last = int.from_bytes(data[life.size - 8:life.size], "little")
    for at in (last, *range(life.size // 8 * 8 - 8, FIRST_FRAME - 8, -8)):
        frame = frame_header(data, at, life.salt, run.base) if data[at + 6:at + 8] == bytes((1, RUN)) else None
        if frame is not None and frame_body(data, frame) is not None:
            run.head = message(frame_body(data, frame))
            return run
    raise Bad("it does not say what it holds")


def read_run(run, journal):
    """All that is in a run: fills images and batches. `journal`: the records are wanted."""
    data, at, chain, end, kinds = run.data, FIRST_FRAME, 0, run.life.size - 8, []
    placed, told = [], []
    while at < end:
        frame = frame_header(data, at, run.life.salt, run.base)
        if frame is None or frame.chain != chain or at + frame.size > end:
            run.problems.append(f"bytes from {at} on do not verify")
            return run
        frame.body = frame_body(data, frame)
        if frame.body is None:
            run.problems.append(f"the body of the frame at {at} does not verify")
        elif frame.kind == PACK:
            pack(run, frame, placed)
        elif frame.kind == IMAGES:
            for _, one in fields(frame.body):
                one = message(one)
                held = image(one[1])
                run.images[held["id"]] = (held, one.get(2, 0))
        elif frame.kind == ORDER:
            told += order(frame.body)
        kinds.append(frame.kind)
        chain, at = frame.header_crc, at + frame.size
    check(run, placed, told)
    return run


def pack(run, frame, placed):
    """The pieces of a pack as batches."""
    data, at, arrival, position, offset, lsn = frame.extensions[PIECES], 0, 0, 0, 0, frame.first_lsn
    number = 0
    while at < len(data):
        count, at = varint(data, at)
        moved, at = varint(data, at)
        further, at = varint(data, at)
        codec, at = data[at], at + 1
        stored, at = varint(data, at)
        checksum, at = int.from_bytes(data[at:at + 4], "little"), at + 4
        arrival, position = arrival + zigzag(moved), position + further
        body = frame.body[offset:offset + stored]
        if len(body) < stored or crc(body) != checksum:
            run.problems.append(f"piece {number} of the pack at {frame.offset} does not verify")
        piece = Frame(frame.offset, PACK, position, frame.log, lsn, count, arrival, 0, 0, None, False, codec, 0, stored,
                      checksum, {}, body)
        batch = Batch(run.life.segment, frame.offset, lsn, count, 0, records(piece))
        run.batches.setdefault(frame.log, []).append(batch)
        placed.append((position, frame.log, frame.offset, number))
        lsn, offset, number = lsn + count, offset + stored, number + 1
    if lsn != frame.first_lsn + frame.count or offset != len(frame.body):
        run.problems.append(f"the pack at {frame.offset} tells other records than it has")


def order(data):
    """Entries of one frame of order: position, log, offset of the pack, number of the piece (or next lsn), dropped."""
    at, position, found = 0, 0, []
    while at < len(data):
        values = []
        for _ in range(5):
            value, at = varint(data, at)
            values.append(value)
        position += values[0]
        found.append((position, values[1], values[2] * 8, values[3], values[4]))
    return found


def check(run, placed, told):
    """What the frames of a run say of each other."""
    if [one[:4] for one in told if one[2]] != sorted(placed):
        run.problems.append("the order tells other pieces than there are")
    if sorted(told, key=lambda one: one[:2]) != told:
        run.problems.append("the order is none")
    # Records before the first piece of a log. Later entries count records that damage took between two pieces.
    dropped = {one[1]: one[4] for one in reversed(told)}
    for log, (held, before) in run.images.items():
        batches = run.batches.get(log, [])
        first = batches[0].first_lsn if batches else held["next"]
        if before + dropped.get(log, 0) != first and not held["deleted"] and held["first"] < held["next"]:
            run.problems.append(f"log {log}: lsns {before} to {first} are neither there nor told to be dropped")
        for one, other in zip(batches, batches[1:]):
            next_lsn = one.first_lsn + one.count
            for start, end in sorted(held["missing"] + held["lost"]):
                # A restored log may lack records that its archive did not hold, and any log may lack records that damage took.
                next_lsn = end if start <= next_lsn < end else next_lsn
            if next_lsn != other.first_lsn:
                run.problems.append(f"log {log}: lsns between {one.first_lsn} and {other.first_lsn} are missing")
        ends = batches[-1].first_lsn + batches[-1].count if batches else held["next"]
        for start, end in sorted(held["lost"]):
            ends = end if start <= ends < end else ends
        if batches and ends != held["next"]:
            run.problems.append(f"log {log}: ends at another lsn than its image says")
    if run.head.get(18, 0) != len(run.images):
        run.problems.append(f"it has {len(run.images)} images and says {run.head.get(18, 0)}")
    count = sum(batch.count for batches in run.batches.values() for batch in batches)
    if run.head.get(15, 0) != count:
        run.problems.append(f"it has {count} records and says {run.head.get(15, 0)}")


def enter(run, store):
    """Logs as a run leaves them."""
    read_run(run, store)
    for what in run.problems:
        store.problem(f"sorted/{run.path.name}: {what}")
    for number, (held, before) in run.images.items():
        log = store.log(None, number)
        # Records of runs that are missing.
        log.lose(log.next, before)
        # The run has the records that the image adds to the log, or names them as lost.
        known = [list(lost) for lost in log.quarantined]
        store.adopt(None, held, run.head.get(6, 0))
        log.quarantined, log.ahead = known, held["first"]
        for start, end in held["lost"]:
            log.lose(start, end)
        log.chain, log.touched = held["chain"], held["touched"]
        log.batches += run.batches.get(number, [])
        store.below[number] = log.chain
    store.epoch = max(store.epoch, run.head.get(11, 0))


def arrival_of(run):
    return signed(run.head.get(10, 0))
