"""What the walk keeps: segments, and how each log stands."""

from dataclasses import dataclass, field
from pathlib import Path

from layout import NEVER, Life


@dataclass
class Batch:
    """One frame of records that verified."""
    segment: int
    offset: int
    first_lsn: int
    count: int
    size: int
    records: list


@dataclass
class Producer:
    """What is remembered of a producer: its newest batches, as (lsn, count, arrival, time, position, digest)."""
    epoch: int
    next: int
    batches: list = field(default_factory=list)


@dataclass
class Log:
    """One log, as far as the walk has come."""
    id: int
    name: str
    first: int = 0
    # How many records right below the first went by retention.
    expired: int = 0
    next: int = 0
    newest_time: int = NEVER
    create_time: int = NEVER
    change_time: int = NEVER
    created_end: int = 0
    newest_end: int = 0
    stored: int = 0
    # Stored bytes before the frame that holds the first record kept.
    trimmed: int = 0
    deleted: bool = False
    config: bytes = b""
    touched: int = 0
    created_in: int = 0
    chain: list = field(default_factory=list)
    epoch: int = 0
    cursors: dict = field(default_factory=dict)
    producers: dict = field(default_factory=dict)
    # Forgotten producers: the hash of the id, to the epoch that is over and the position where it was forgotten.
    gone: dict = field(default_factory=dict)
    # The epoch that unknown producers begin with.
    first_epoch: int = 0
    # Forgotten producers that this epoch stands for: the index of the segment where they were forgotten lists them.
    replaced: dict = field(default_factory=dict)
    batches: list = field(default_factory=list)
    quarantined: list = field(default_factory=list)
    # Up to this position what was found of its records proves its tail.
    proven: int = 0
    # The first lsn that a run tells, as of when it was made: frames behind the run may tell a lower one.
    ahead: int = 0

    def trim(self, first, by_retention, trimmed=0):
        """Records below `first` are forgotten. `trimmed` is the number of stored bytes before it."""
        if first > self.first:
            self.trimmed = max(self.trimmed, trimmed)
            self.expired = self.expired + first - self.first if by_retention else 0
            self.first = first

    def lose(self, start, end):
        """Records from `start` to before `end` are damaged."""
        if end > start:
            if self.quarantined and self.quarantined[-1][1] == start:
                self.quarantined[-1][1] = end
            else:
                self.quarantined.append([start, end])

    def prove(self, lsn):
        """A trim or a cursor proves that the records below `lsn` existed."""
        self.lose(self.next, lsn)
        self.next = max(self.next, lsn)

    def gaps(self):
        """What is damaged and not trimmed."""
        return [[max(start, self.first), end] for start, end in self.quarantined if end > self.first]


@dataclass
class Segment:
    """A file of the journal."""
    path: Path
    data: bytes
    life: Life
    base: int | None = None
    # Where it ends, as an offset, and the chain value there, if a checkpoint or the next link says so.
    told_end: int | None = None
    told_chain: int | None = None
    link: dict | None = None
    end: int = 0
    # Frames in order, and between them (start, end) of what does not verify, as offsets.
    items: list = field(default_factory=list)
    sealed: bool = False
    clean: bool = False
    damaged: bool = False
    chain: int = 0
    # Of the seal: the counter of the next log. Of all frames so far: the latest arrival.
    next_log: int = 0
    # The segment that the seal says comes next.
    successor: int = 0
    # What the seal says of the expiry clock.
    expiry: int | None = None
    arrival: int = NEVER

    @property
    def id(self):
        return self.life.segment


def pushed(chain, base):
    """A skew-binary list of (base, size) with one more row in front."""
    if len(chain) >= 2 and chain[0][1] == chain[1][1]:
        return [(base, 1 + chain[0][1] + chain[1][1]), *chain[2:]]
    return [(base, 1), *chain]
