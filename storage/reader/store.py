"""What a data directory holds, by the rules of recovery in storage/FORMAT.md. Changes nothing.

All segments are walked, also those that a start would not read. What index files and checkpoints say is used where
a segment is damaged, as a start uses it, and compared with the segments where it is not (derived.py).
"""

import re
from pathlib import Path

import xxhash

from derived import index_of, newest_checkpoint, read_checkpoint
from layout import (BATCH, CONFIGURED, CREATED, CURSOR, DELETED, DIRECTORY, FENCE, FIRST_FRAME, FORGOTTEN, LARGEST_BODY, LIFE_BLOCK, LINK, MARKER, NEVER,
                    SEAL, TRIM, Bad, Life, allow, bytes_digest, crc, directory, fields, frame_body, frame_header,
                    life_block, message, plain, producer, records, sealed, sent_digest, signed)
from runs import arrival_of, enter, find_runs
from state import Batch, Log, Producer, Segment, pushed

OF_LOGS = (BATCH, CREATED, CONFIGURED, DELETED, TRIM, FENCE, CURSOR, FORGOTTEN)
WINDOW = 1024


def text_file(path, title, keys):
    """A file of `key value` lines behind a title, with the checksum of all before in the last; None if it is not one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    at = data.rfind(b"crc ")
    match = re.fullmatch(rb"crc ([0-9a-f]{8})\n", data[max(at, 0):])
    if match is None or int(match[1], 16) != crc(data[:at]):
        return None
    lines = data[:at].decode().splitlines()
    found = dict(line.split(" ", 1) for line in lines[1:])
    if lines[0] != title or list(found) != keys:
        return None
    return found


def losses(body):
    """Accepted losses: the bound, whether all damage below it counts, and the places."""
    before, everything, places = 0, False, []
    for number, value in fields(body):
        if number == 1:
            before = value
        elif number == 2:
            everything = bool(value)
        elif number == 3:
            place = message(value)
            places.append((place.get(1, 0), place.get(2, 0)))
    return before, everything, places


class Store:
    """A data directory."""

    def __init__(self, path):
        self.path = Path(path)
        self.problems = []
        self.logs = {}
        self.damage = []
        self.torn = None
        # A log that no frame beyond this position names cannot prove its tail.
        # Positions from which on newest records may be gone.
        self.doubts = []
        self.epoch = 0
        # What the expiry clock showed last.
        self.expiry = None
        # The sealed segments that each log lay in before the one at hand.
        self.below = {}
        # Batches of producers: whose digest is another than that of the stored records, and whose is the same.
        self.digests = [0, 0]
        # The key of digests, of the newest segment that has one, and that segment.
        self.key = (0, None)
        self.after_segment = lambda segment, store: None
        form = text_file(self.path / "FORMAT", "wald store", ["version", "id"])
        if form is None:
            form = text_file(self.path / "FORMAT", "wald store", ["version", "id", "largest_body"])
        if form is None or form["version"] != ("2" if "largest_body" in form else "1"):
            raise Bad("FORMAT is missing, damaged or of another version")
        allow(int(form.get("largest_body", LARGEST_BODY)))
        self.id = int(form["id"], 16).to_bytes(16, "little")
        self.begun = text_file(self.path / "BEGUN", "wald begun", ["epoch", "segment", "base"])
        self.runs = find_runs(self.path, self.id, self.problem)
        self.checkpoint = newest_checkpoint(self.path, self.id, self.is_sorted)
        # Segments that the checkpoint covers: by name, with what it says of them.
        self.covered = {f"{one[0]:016x}.seg": one for one in self.checkpoint["segments"]} if self.checkpoint else {}
        self.segments = self.find_segments()
        # A last segment without a whole link: the journal had not begun it.
        while (self.segments and self.segments[-1].told_end is None and self.end_of_last() == FIRST_FRAME):
            self.segments.pop()

    # Which files there are

    def find_segments(self):
        found, self.unreadable = [], []
        for path in sorted((self.path / "journal").glob("*.seg")):
            if self.is_sorted(int(path.stem, 16)):
                # What a sorter that was cut off left.
                continue
            data = path.read_bytes()
            life = None
            for at in (0, LIFE_BLOCK):
                try:
                    life = life or life_block(data[at:at + LIFE_BLOCK])
                except Bad as why:
                    self.problem(f"{path.name}: life block at {at}: {why}")
            if life and life.store == self.id and life.key and life.segment >= self.key[0]:
                self.key = (life.segment, life.key)
            if path.name in self.covered:
                number, size, _, base, end, salt = self.covered[path.name]
                life = Life(1, 0, 0, 0, number, size, salt, self.id)
                segment = Segment(path, data, life, base, told_end=end)
                self.find_base(segment)
                found.append(segment)
                continue
            if life is None or life.store != self.id:
                if data[FIRST_FRAME:].strip(b"\0"):
                    self.problem(f"{path.name}: not a segment of this store")
                    self.unreadable.append(int(path.stem, 16))
                continue
            if life.version != 1 or life.incompatible & ~(2 | 8):
                raise Bad(f"{path.name}: version {life.version}, incompatible features {life.incompatible:#x}")
            segment = Segment(path, data, life)
            self.find_base(segment)
            if segment.base is not None:
                found.append(segment)
        return self.without_passed_over(sorted(found, key=lambda segment: segment.id))

    @staticmethod
    def without_passed_over(segments):
        """Where a link names an earlier segment than the one that lies before it, those between hold nothing whole."""
        kept = []
        for segment in segments:
            before = segment.link["before"] if segment.link else 0
            if any(one.id == before for one in kept):
                kept = [one for one in kept if one.id <= before]
            kept.append(segment)
        return kept

    def find_base(self, segment):
        """By the link, or else by any frame that verifies; None if there is none."""
        frame = next(self.headers(segment, FIRST_FRAME, segment.base), None)
        if frame is None:
            return
        segment.base = frame.position - frame.offset
        if frame.offset == FIRST_FRAME and frame.kind == LINK:
            segment.link = self.read_link(frame, frame_body(segment.data, frame))
            return
        # The link is damaged: the first directory of the segment tells of it.
        for frame in self.headers(segment, FIRST_FRAME, segment.base):
            if DIRECTORY in frame.extensions:
                first = directory(frame.extensions[DIRECTORY])[0]
                if first.kind == LINK:
                    segment.link = self.read_link(first, None)
                return

    @staticmethod
    def read_link(frame, body):
        """A link, or what its header or a directory tells of it."""
        link = {"closing": []}
        if body is None:
            return {"before": frame.log, "end": frame.first_lsn, "chain": None, "epoch": frame.count, "next_log": 0,
                    "complete": False, "closing": [], "before_that": 0, "unproven": None, "accepted": None, "expiry": None}
        for number, value in fields(body):
            if number == 7:
                link["closing"].append(message(value))
            else:
                link[number] = value
        return {"before": link.get(1, 0), "end": link.get(2, 0), "chain": link.get(3, 0), "epoch": link.get(4, 0),
                "next_log": link.get(5, 0), "complete": bool(link.get(6)), "closing": link["closing"],
                "before_that": link.get(8, 0), "unproven": link.get(9), "accepted": link.get(10), "expiry": link.get(11)}

    @staticmethod
    def headers(segment, offset, base):
        """Headers that verify at or behind an offset, at any multiple of 8."""
        data = segment.data
        for at in range(offset, len(data) - 63, 8):
            # Version, and the three zeros: cheap, before the checksum.
            if data[at + 6] == 1 and data[at + 21:at + 24] == b"\0\0\0":
                frame = frame_header(data, at, segment.life.salt, base)
                if frame is not None:
                    yield frame

    def end_of_last(self):
        """Where the last segment ends, as an offset; nothing of it is kept."""
        last, problems = self.segments[-1], list(self.problems)
        self.walk_last(last)
        end, last.items, last.damaged, last.sealed, last.clean = last.end, [], False, False, False
        self.problems, self.damage, self.torn = problems, [], None
        return end

    # The walk

    def read(self):
        """Walks the journal."""
        links = [segment.link for segment in self.segments if segment.link]
        self.accepted = [losses(link["accepted"]) for link in links if link["accepted"] is not None]
        before = None
        for run in self.runs:
            enter(run, self)
            before = Segment(run.path, b"", run.life, 0)
            before.number, before.arrival = run.last, arrival_of(run)
        for segment, after in zip(self.segments, [*self.segments[1:], None]):
            self.enter(segment, before)
            follows = after is not None and after.link is not None and after.link["before"] == segment.id
            if follows:
                segment.told_end, segment.told_chain = after.link["end"] - segment.base, after.link["chain"]
            if segment.told_end is not None:
                self.steps(segment, segment.told_end, None)
                if not segment.damaged and segment.told_chain not in (segment.chain, None):
                    self.problem(f"{segment.path.name}: the next link states another chain value")
            else:
                self.walk_last(segment)
                if after is not None and not segment.sealed and self.torn:
                    self.lost(f"the end of {segment.path.name}", segment.base + segment.end)
            arrivals = [item.arrival for item in segment.items if not isinstance(item, tuple)]
            segment.arrival = max([before.arrival if before else NEVER, *arrivals])
            self.drop_accepted(segment)
            self.apply(segment, after if follows else None)
            before = segment
        self.check_end()
        for log in list(self.logs.values()):
            log.batches = [batch for batch in log.batches if batch.first_lsn + batch.count > log.first]
        return self

    def enter(self, segment, before):
        """What the link tells of the segments before."""
        if segment.link is None:
            return
        link = segment.link
        self.shows(link["expiry"])
        self.epoch = max(self.epoch, link["epoch"])
        before_id = 0 if before is None else getattr(before, "number", before.id)
        if link["before"] != before_id:
            self.problem(f"segment {link['before']} is missing or cannot be used")
            self.close(link, None, link["end"])
            if not link["complete"] or link["before_that"] != before_id:
                # More than one is gone, and a link tells of one.
                self.lost("what lay before it", link["end"])
        if link["unproven"] is not None:
            self.lost("what an earlier start missed", link["unproven"])
        if link["accepted"] is not None:
            self.accept(link["accepted"])

    def walk_last(self, segment):
        """The last segment: damage or the torn tail, by what was proven flushed."""
        durable = segment.base + FIRST_FRAME
        for frame in self.headers(segment, FIRST_FRAME, segment.base):
            if frame.durable is not None:
                durable = max(durable, frame.durable)
        self.durable = durable
        self.steps(segment, segment.life.size, durable)

    def steps(self, segment, limit, durable):
        data, at, chain, unit = segment.data, FIRST_FRAME, 0, None
        while at < limit:
            frame = frame_header(data, at, segment.life.salt, segment.base)
            if frame is not None and (chain not in (None, frame.chain) or at + frame.size > limit):
                frame = None
            if frame is not None:
                frame.body = frame_body(data, frame)
            if frame is None or frame.body is None:
                proven = at + 1 if frame is None else at + frame.size
                if durable is not None and segment.base + proven > durable:
                    break
                if frame is not None:
                    after = at + frame.size
                else:
                    good = next(self.headers(segment, at + 8, segment.base), None)
                    after = min(good.offset if good else limit, limit)
                    if durable is not None:
                        after = min(after, durable - segment.base)
                segment.items.append((at, after) if frame is None else frame)
                segment.damaged = True
                self.damage.append({"segment": segment.path.name, "from": at, "to": after})
                chain, at, unit = (None if frame is None else frame.header_crc), after, None
                continue
            segment.items.append(frame)
            chain, segment.chain = frame.header_crc, frame.header_crc
            if not frame.goes_on:
                unit = None
            elif unit is None:
                unit = len(segment.items) - 1
            at += frame.size
            if frame.kind == SEAL:
                self.check_seal(segment, frame)
                break
        if durable is not None and unit is not None:
            at = segment.items[unit].offset
            del segment.items[unit:]
        segment.end = at
        if durable is not None and not segment.sealed and self.is_torn(segment, at):
            self.torn = {"segment": segment.path.name, "from": at}

    def is_torn(self, segment, at):
        """Whether something behind the end was meant to be there, and is not left of an earlier life of the file."""
        data = segment.data
        claims = int.from_bytes(data[at + 24:at + 32], "little") == segment.base + at and at + 64 <= len(data)
        meant = claims or next(self.headers(segment, at, segment.base), None) is not None
        return any(data[at:]) and (meant or not any(data[max(at, len(data) - 4096):]))

    def shows(self, expiry):
        """Keeps the newest value of the expiry clock. It may go back."""
        if expiry is not None:
            self.expiry = signed(expiry)

    def check_seal(self, segment, frame):
        segment.sealed = True
        seal = message(frame.body)
        segment.clean = bool(seal.get(4))
        segment.next_log = seal.get(5, 0)
        segment.successor = seal.get(6, 0)
        segment.expiry = seal.get(7)
        if segment.damaged:
            return
        frames = segment.items[:-1]
        if seal.get(1, 0) != len(frames):
            self.problem(f"{segment.path.name}: the seal counts {seal.get(1, 0)} frames instead of {len(frames)}")
        count = sum(item.count for item in frames if item.kind == BATCH)
        if seal.get(2, 0) != count:
            self.problem(f"{segment.path.name}: the seal counts {seal.get(2, 0)} records instead of {count}")
        if seal.get(3, b"")[::-1] != bytes_digest(segment.data[FIRST_FRAME:frame.offset]):
            self.problem(f"{segment.path.name}: the seal's digest is wrong")

    # What the frames say

    def apply(self, segment, after):
        told = {}
        for item in segment.items:
            if not isinstance(item, tuple) and DIRECTORY in item.extensions:
                told.update((entry.position, entry) for entry in directory(item.extensions[DIRECTORY]))
        # The first damage that no directory tells of.
        unknown = None
        unit = None
        for item in segment.items:
            if isinstance(item, tuple):
                at, end = segment.base + item[0], segment.base + item[1]
                # A directory tells of one group, and what lies before that in the hole stays unknown.
                for entry in sorted((one for one in told.values() if at < one.position + one.size and one.position < end),
                                    key=lambda one: one.position):
                    if at < entry.position:
                        unknown = at
                    self.damaged(segment, entry, entry.name)
                    at = entry.position + entry.size
                if at < end:
                    unknown = at
                unit = None
                continue
            unit = item.position if unit is None else unit
            if item.kind in (MARKER, SEAL) and item.body is not None:
                self.shows(message(item.body).get(1 if item.kind == MARKER else 7))
            if item.body is None:
                self.damaged(segment, item, told[item.position].name if item.position in told else None)
                if item.kind == BATCH:
                    self.remember(self.logs[item.log], item, unit, item.arrival)
            elif item.kind in OF_LOGS:
                self.frame(segment, item, unit)
            if not item.goes_on:
                unit = None
        images = index_of(segment, self) if segment.damaged and after is not None else None
        if images is not None:
            for _, places, image in images:
                self.adopt(segment, image, segment.base + places[-1][0] + places[-1][3] if places else image["created_end"])
            unknown = None
        elif after is not None and not (unknown is not None and self.went_on(unknown)):
            self.close(after.link, segment, segment.base + segment.end)
            unknown = None if after.link["complete"] else unknown
        if unknown is not None:
            self.lost(f"a part of {segment.path.name}", unknown)
        if self.checkpoint and self.checkpoint.get(7) == segment.id and self.damage:
            for image in self.checkpoint["images"]:
                self.adopt(segment, image, 0)
            # A start from there does not look at what lies before.
            self.doubts.clear()
        self.after_segment(segment, self)

    def lost(self, what, position):
        self.problem(f"{what} is lost: no log without records beyond {position} can prove its tail")
        self.doubts.append(position)

    @property
    def unproven(self):
        """Logs without records beyond this cannot prove their tails."""
        return max(self.doubts, default=None)

    def accept(self, body):
        """Losses that a link says were accepted are in doubt no more."""
        before, everything, places = losses(body)
        self.doubts = [at for at in self.doubts if at >= before or not (
            everything or any(start <= at < end for start, end in places))]

    def drop_accepted(self, segment):
        """Frames in accepted places are damage, also if they verify again: newer frames may have their lsns."""
        places = [place for _, everything, places in self.accepted if not everything for place in places]
        items = []
        for item in segment.items:
            if not isinstance(item, tuple) and item.body is not None and any(
                    start <= item.position and item.end <= end for start, end in places):
                self.damage.append({"segment": segment.path.name, "from": item.offset, "to": item.offset + item.size})
                segment.damaged, item = True, (item.offset, item.offset + item.size)
            if items and isinstance(item, tuple) and isinstance(items[-1], tuple) and items[-1][1] == item[0]:
                items[-1] = (items[-1][0], item[1])
            else:
                items.append(item)
        segment.items = items

    def went_on(self, position):
        """Whether nothing attributed damage here when it was accepted: the logs went on without later facts."""
        return any((position, position + 1) in places for _, _, places in self.accepted)

    def log(self, segment, number, name=None):
        """The log of a frame; made if its creation was lost."""
        log = self.logs.get(number)
        if log is None:
            log = self.logs[number] = Log(number, name)
            log.created_in = segment.id if segment else 0
        if log.name is None and name is not None:
            log.name = name
        return log

    def touch(self, segment, log, end):
        log.newest_end = end
        if log.touched != segment.id:
            log.touched = segment.id
            log.chain = pushed(log.chain, segment.base)

    def frame(self, segment, frame, unit):
        """A frame that verified."""
        log = self.log(segment, frame.log)
        self.touch(segment, log, frame.end)
        if frame.kind == CREATED:
            body = message(frame.body)
            log.name = body[1].decode()
            log.config = body.get(2, b"")
            log.create_time = log.change_time = signed(body.get(4, 0))
            log.created_end, log.created_in, log.proven = frame.end, segment.id, frame.end
        elif frame.kind == CONFIGURED:
            log.config, log.change_time = frame.body, frame.arrival
        elif frame.kind == DELETED:
            self.delete(log)
        elif frame.kind == TRIM:
            log.prove(frame.first_lsn)
            log.trim(frame.first_lsn, frame.count, message(frame.body).get(1, 0))
        elif frame.kind == FENCE:
            log.epoch = max(log.epoch, frame.first_lsn)
        elif frame.kind == CURSOR:
            log.prove(frame.first_lsn)
            body = message(frame.body)
            if body.get(2):
                log.cursors.pop(body[1].decode(), None)
            else:
                log.cursors[body[1].decode()] = (frame.first_lsn, frame.arrival)
        elif frame.kind == FORGOTTEN:
            self.forget(log, frame)
        elif frame.kind == BATCH:
            self.batch(segment, log, frame, unit)

    def batch(self, segment, log, frame, unit):
        found = records(frame)
        if frame.first_lsn < log.next:
            return self.problem(f"{log.name}: lsn {frame.first_lsn} at {frame.position}, but next is {log.next}")
        log.lose(log.next, frame.first_lsn)
        log.batches.append(Batch(segment.id, frame.offset, frame.first_lsn, frame.count, frame.size, found))
        log.next = frame.first_lsn + frame.count
        log.proven = frame.end
        log.newest_time = max(log.newest_time, *(one["time_us"] for one in found))
        log.stored += frame.size
        sent = producer(frame)
        if sent and not sealed(frame):
            # A digest differs if a record was stored with a later time than it was sent with.
            key = self.key[1] if len(sent.digest) == 16 else None
            self.digests[sent_digest(plain(frame), key) == sent.digest] += 1
        self.remember(log, frame, unit, found[0]["time_us"])

    @staticmethod
    def remember(log, frame, unit, time):
        sent = producer(frame)
        if sent is None:
            return
        known = log.producers.get(sent.producer)
        if known is None or sent.epoch > known.epoch:
            known = log.producers[sent.producer] = Producer(sent.epoch, 0)
        if sent.sequence != known.next:
            # One in between was damaged: what lies before it is older than the window.
            known.batches = []
        known.next = sent.sequence + 1
        known.batches.append((frame.first_lsn, frame.count, frame.arrival, time, unit, sent.digest))
        del known.batches[:-WINDOW]

    @staticmethod
    def forget(log, frame):
        """Producers that are forgotten, and the epoch that unknown ones begin with."""
        for number, value in fields(frame.body):
            if number == 1:
                told = message(value)
                name, epoch = told[1], told.get(2, 0)
                if name in log.producers and log.producers[name].epoch <= epoch:
                    del log.producers[name]
                log.gone[xxhash.xxh3_64_digest(name)[::-1]] = (epoch, frame.position)
            elif number == 2 and value > log.first_epoch:
                log.first_epoch = value
                log.replaced.update({name: told for name, told in log.gone.items() if told[0] < value})
                log.gone = {name: told for name, told in log.gone.items() if told[0] >= value}

    @staticmethod
    def delete(log):
        log.deleted, log.stored = True, 0
        log.cursors, log.producers, log.epoch, log.gone, log.replaced, log.first_epoch = {}, {}, 0, {}, {}, 0

    def damaged(self, segment, told, name):
        """A frame that is damaged, by its header or by a directory."""
        if told.kind not in OF_LOGS:
            return
        log = self.log(segment, told.log, name)
        if told.kind == BATCH:
            log.lose(log.next, told.first_lsn + told.count)
            log.next = told.first_lsn + told.count
            log.proven = max(log.proven, told.position)
        elif told.kind == DELETED:
            self.delete(log)
        elif told.kind == TRIM:
            log.prove(told.first_lsn)
            log.trim(told.first_lsn, told.count)
        elif told.kind == CURSOR:
            log.prove(told.first_lsn)
        elif told.kind == FENCE:
            log.epoch = max(log.epoch, told.first_lsn)

    def close(self, link, segment, position):
        """How the logs stood at the end of the segment before a link."""
        for state in link["closing"]:
            number, end = state[1], state.get(2, 0)
            known = number in self.logs
            log = self.log(segment, number, state[3].decode() if 3 in state else None)
            sound = segment is not None and not segment.damaged
            # A later trim, which a run knows of, says of all that lies below that it did not expire.
            forgot = (log.first, log.expired) == (state.get(5, 0), state.get(7, 0)) or log.ahead and (
                state.get(5, 0) == log.first or state.get(5, 0) <= log.first == log.ahead)
            if sound and (not known or log.next != end or log.deleted != bool(state.get(4))
                          or not (forgot and log.epoch == state.get(6, 0) or log.deleted)):
                found = (log.next, log.deleted, log.first, log.expired, log.epoch) if known else None
                self.problem(f"the link behind segment {link['before']} states {state} of log {number}, whose frames tell {found}")
            if state.get(4):
                self.delete(log)
                continue
            if log.next < end:
                log.lose(log.next, end)
                log.next = end
                log.proven = max(log.proven, position)
            if state.get(5, 0) > log.first:
                log.first, log.expired = state[5], state.get(7, 0)
            log.epoch = max(log.epoch, state.get(6, 0))

    def adopt(self, segment, image, proven):
        """How a log stood at the end of a segment, by an image."""
        log = self.log(segment, image["id"])
        log.name = image["name"] or log.name
        log.lose(log.next, image["next"])
        log.proven = max(log.proven, proven)
        for key in ("next", "first", "expired", "newest_time", "create_time", "change_time", "created_end", "newest_end", "stored",
                    "trimmed", "deleted", "config", "created_in", "epoch", "cursors"):
            setattr(log, key, image[key])
        if image["deleted"]:
            log.producers, log.gone, log.replaced, log.first_epoch = {}, {}, {}, 0
        log.first_epoch = max(log.first_epoch, image["first_epoch"])
        # An image holds the changes since some position, or all batches. Known batches may come again.
        for name, epoch in image["gone"].items():
            log.gone[name] = (epoch, 0)
            log.producers = {one: known for one, known in log.producers.items()
                             if xxhash.xxh3_64_digest(one)[::-1] != name or known.epoch > epoch}
        log.gone = {name: told for name, told in log.gone.items() if told[0] >= log.first_epoch}
        for name, (epoch, following, first, batches) in image["producers"].items():
            known = log.producers.get(name)
            if known is None or epoch > known.epoch or first > known.next:
                log.producers[name] = Producer(epoch, following, list(batches))
            elif epoch == known.epoch and following > known.next:
                known.batches += batches[known.next - first:]
                known.next = following
                del known.batches[:-WINDOW]

    def check_end(self):
        """What is known to have been there must be there, or something behind it."""
        last = self.segments[-1] if self.segments else None
        beyond = last.base + last.life.size if last else 0
        if any(number > (last.id if last else 0) for number in self.unreadable):
            self.lost("what lay behind the last good segment", beyond)
        # A seal names the segment that comes next: its file was ready. After a restore, which BEGUN tells by a base
        # beyond all of the journal, it is one that the backup did not have.
        restored = self.begun and int(self.begun["base"]) > beyond
        if last and last.sealed and last.successor and not restored and not self.has_file(last.successor):
            self.lost(f"segment {last.successor}, which segment {last.id} says comes next,", beyond)
        # BEGUN that is cut off, as by a full disk, is as if there were none.
        begun = int(self.begun["segment"], 16) if self.begun else 0
        for file in (self.path / "checkpoint").glob("*.ckp"):
            try:
                begun = max(begun, read_checkpoint(file).get(7, 0))
            except Bad:
                continue
        if begun > (last.id if last else 0):
            self.lost(f"segment {begun}, which the last start began or a checkpoint tells of,", beyond)

    def is_sorted(self, number):
        """Whether runs stand for a segment, also if it was missing when they were made."""
        return any(number <= run.last for run in self.runs)

    def has_file(self, number):
        return (self.path / "journal" / f"{number:016x}.seg").exists()

    def problem(self, what):
        self.problems.append(what)

    def live(self):
        """The logs that are there, by name."""
        return sorted((log for log in self.logs.values() if not log.deleted and log.name), key=lambda log: log.name)
