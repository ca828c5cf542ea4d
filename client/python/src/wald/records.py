"""Records, conditions and acks: as they are given, and as they come back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum

from wald.times import to_datetime, to_microseconds
from wald.v1 import cursor_pb2, record_pb2, types_pb2, wal_pb2


class _Open(IntEnum):
    """An enumeration that keeps values of a newer server."""

    @classmethod
    def _missing_(cls, value):
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_, member._value_ = f"UNKNOWN_{value}", value
        return member


class Durability(_Open):
    """Safety of records. Ordered: each level includes the levels before it."""

    ACCEPTED = types_pb2.DURABILITY_ACCEPTED
    """In the daemon's memory: lost when the process is killed."""
    WRITTEN = types_pb2.DURABILITY_WRITTEN
    """In the operating system: survives a kill -9, not a power cut."""
    DURABLE = types_pb2.DURABILITY_DURABLE
    """Flushed to the device: survives a power cut."""
    REPLICATED = types_pb2.DURABILITY_REPLICATED
    """Also in the bucket of a replica: survives the loss of the machine."""


class Visibility(IntEnum):
    """Which records a reader sees. Unset: records that the log's sync mode acks."""

    REPLICATED = types_pb2.VISIBILITY_REPLICATED
    DURABLE = types_pb2.VISIBILITY_DURABLE
    WRITTEN = types_pb2.VISIBILITY_WRITTEN
    ACCEPTED = types_pb2.VISIBILITY_ACCEPTED


class GapReason(_Open):
    """Why records are missing from a scan."""

    TRIMMED = types_pb2.GAP_REASON_TRIMMED
    EXPIRED = types_pb2.GAP_REASON_EXPIRED
    QUARANTINED = types_pb2.GAP_REASON_QUARANTINED
    LOST = types_pb2.GAP_REASON_LOST
    DELETED = types_pb2.GAP_REASON_DELETED


@dataclass(frozen=True)
class Record:
    """A record to append. `bytes` or `str` (UTF-8) are accepted in its place."""

    data: bytes | str
    headers: Sequence[tuple[str, bytes | str]] = ()
    timestamp_us: int = 0
    """Microseconds since the Unix epoch, UTC; 0: the server's clock."""
    crc32c: int | None = None
    """CRC-32C of the data, verified on arrival and stored."""
    time: datetime | None = field(default=None, kw_only=True, compare=False)
    """The time as a datetime with a time zone, instead of `timestamp_us`, which it sets exactly."""

    def __post_init__(self) -> None:
        if self.time is None:
            return
        given = to_microseconds(self.time)
        if given == 0:
            raise ValueError("a record cannot have the time 1970-01-01T00:00:00Z: 0 asks for the server's clock")
        if self.timestamp_us not in (0, given):
            raise ValueError("time and timestamp_us differ: give one of them")
        object.__setattr__(self, "timestamp_us", given)


@dataclass(frozen=True)
class StoredRecord:
    """A record as it was read."""

    lsn: int
    data: bytes
    headers: tuple[tuple[str, bytes], ...]
    timestamp_us: int
    """Microseconds since the Unix epoch, UTC."""
    crc32c: int | None

    @property
    def time(self) -> datetime:
        """The record's time in UTC, exact."""
        return to_datetime(self.timestamp_us)

    @property
    def text(self) -> str:
        """The data as UTF-8 text."""
        return self.data.decode()


@dataclass(frozen=True)
class ProducerSequence:
    """Identifies the producer and the sequence number of a batch. `client.producer()` counts
    automatically."""

    id: str
    epoch: int
    sequence: int


@dataclass(frozen=True)
class Condition:
    """Conditions of an append. Every condition that is set must hold."""

    expected_lsn: int | None = None
    """The lsn that the first record must get, or PositionMismatch."""
    must_exist: bool = False
    must_not_exist: bool = False
    writer_epoch: int | None = None
    """Equals the log's writer epoch, or Fenced."""
    producer: ProducerSequence | None = None
    log_id: int | None = None
    """The log must have this number, or LogReplaced."""

    @property
    def guards(self) -> bool:
        """Whether a repeat cannot be applied a second time."""
        return self.expected_lsn is not None or self.must_not_exist or self.producer is not None

    def to_proto(self) -> wal_pb2.AppendCondition | None:
        if self == Condition():
            return None
        producer = None
        if self.producer is not None:
            producer = wal_pb2.Producer(
                id=self.producer.id, epoch=self.producer.epoch, sequence=self.producer.sequence
            )
        return wal_pb2.AppendCondition(
            expected_lsn=self.expected_lsn,
            must_exist=self.must_exist,
            must_not_exist=self.must_not_exist,
            writer_epoch=self.writer_epoch,
            producer=producer,
            log_id=self.log_id,
        )


@dataclass(frozen=True)
class LogBatch:
    """Records for one log."""

    log: str
    records: Iterable[Record | bytes | str]
    condition: Condition | None = None

    @property
    def guards(self) -> bool:
        """Whether a repeat cannot be applied a second time."""
        return self.condition is not None and self.condition.guards

    def to_proto(self) -> wal_pb2.LogBatch:
        condition = None if self.condition is None else self.condition.to_proto()
        return wal_pb2.LogBatch(log=self.log, records=records_to_proto(self.records), condition=condition)


@dataclass(frozen=True)
class Check:
    """A condition on a log that is not written. All that is set must hold."""

    log: str
    expected_lsn: int | None = None
    must_exist: bool = False
    must_not_exist: bool = False
    log_id: int | None = None

    def to_proto(self) -> wal_pb2.LogCheck:
        return wal_pb2.LogCheck(
            log=self.log,
            expected_lsn=self.expected_lsn,
            must_exist=self.must_exist,
            must_not_exist=self.must_not_exist,
            log_id=self.log_id,
        )


@dataclass(frozen=True)
class CursorCommit:
    """A wish to move a cursor."""

    log: str
    cursor: str
    lsn: int
    """The next lsn to read: all below it is done."""
    expected_lsn: int | None = None
    """The position that the cursor must have now, or PositionMismatch; 0 also matches one
    that does not exist yet."""
    log_id: int | None = None
    """The log must have this number, or LogReplaced."""

    @property
    def guards(self) -> bool:
        """Whether a repeat cannot be applied a second time: the cursor no longer stands where it must."""
        return self.expected_lsn is not None and self.expected_lsn != self.lsn

    def to_proto(self) -> cursor_pb2.CursorCommit:
        return cursor_pb2.CursorCommit(
            log=self.log,
            cursor=self.cursor,
            lsn=self.lsn,
            expected_lsn=self.expected_lsn,
            log_id=self.log_id,
        )


@dataclass(frozen=True)
class Ack:
    """A record is appended."""

    lsn: int
    timestamp_us: int
    durable_lsn: int | None
    """Every lsn of the log below it is flushed to the device."""
    replicated_lsn: int | None
    """Every lsn of the log below it is in the bucket of a replica; None without a replica."""
    durability: Durability
    """The durability reached; at least the requested one."""
    deduplicated: bool
    """A repeat of an append that was applied before."""
    position: int | None
    """Position in the journal; None while it is in the daemon's memory only."""
    recovery_epoch: int
    """Rises with every unclean start of the server."""
    log_id: int
    """The log's number, unique for ever."""

    @property
    def time(self) -> datetime:
        """The record's time in UTC, exact."""
        return to_datetime(self.timestamp_us)


@dataclass(frozen=True)
class LogAck:
    """The result of one log's batch: its records have the lsns from `first_lsn` on, below
    `next_lsn`."""

    log: str
    first_lsn: int
    next_lsn: int
    timestamp_us: int
    durable_lsn: int | None
    replicated_lsn: int | None
    deduplicated: bool
    log_id: int

    @property
    def time(self) -> datetime:
        """The time of the batch in UTC, exact."""
        return to_datetime(self.timestamp_us)


@dataclass(frozen=True)
class BatchAck:
    """Everything in the request is applied."""

    appends: tuple[LogAck, ...]
    """In the order of the request."""
    durability: Durability
    position: int | None
    recovery_epoch: int


@dataclass(frozen=True)
class Page:
    """A page of one log."""

    records: tuple[StoredRecord, ...]
    next_lsn: int
    """The lsn to read next."""
    tail_lsn: int
    durable_lsn: int
    replicated_lsn: int | None
    """Every lsn of the log below it is in the bucket of a replica; None without a replica."""
    first_lsn: int
    recovery_epoch: int

    def __iter__(self) -> Iterator[StoredRecord]:
        return iter(self.records)


@dataclass(frozen=True)
class Batch:
    """Consecutive records of one log, as a scan delivers them."""

    log: str
    log_id: int
    records: tuple[StoredRecord, ...]

    def __iter__(self) -> Iterator[StoredRecord]:
        return iter(self.records)


@dataclass(frozen=True)
class Gap:
    """Records that a reader does not get, named exactly."""

    log: str
    from_lsn: int
    to_lsn: int | None
    """The lsn after the last missing one. None: up to wherever the log ended."""
    reason: GapReason


@dataclass(frozen=True)
class Tail:
    """State of a log."""

    first_lsn: int
    tail_lsn: int
    """The next lsn."""
    durable_lsn: int
    replicated_lsn: int | None
    """Every lsn of the log below it is in the bucket of a replica; None without a replica."""
    writer_epoch: int
    recovery_epoch: int
    log_id: int
    survived_position: int | None
    """End of the survivors of the requested recovery epoch: an append acked in it survived if
    and only if its position is below this. None: no epoch was requested, or everything
    survives so far."""


@dataclass(frozen=True)
class Fence:
    """Older writers are shut out."""

    tail_lsn: int
    """The tail that no older writer can pass."""
    writer_epoch: int
    log_id: int


@dataclass(frozen=True)
class Cursor:
    """A cursor as it stands."""

    log: str
    name: str
    lsn: int
    """The next lsn to read."""
    log_id: int


def record_to_proto(record: Record | bytes | str) -> record_pb2.Record:
    if not isinstance(record, Record):
        return record_pb2.Record(data=_bytes(record))
    return record_pb2.Record(
        data=_bytes(record.data),
        headers=[record_pb2.Header(key=key, value=_bytes(value)) for key, value in record.headers],
        timestamp_us=record.timestamp_us,
        crc32c=record.crc32c,
    )


def records_to_proto(records: Iterable[Record | bytes | str]) -> list[record_pb2.Record]:
    if isinstance(records, (str, bytes, bytearray, memoryview, Record)):
        raise TypeError("records are asked for, and this is one: put it into a list")
    return [record_to_proto(record) for record in records]


def _bytes(value: bytes | str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"bytes or str make a record, not {type(value).__name__}")


def records_from_proto(batch: record_pb2.RecordBatch) -> tuple[StoredRecord, ...]:
    return tuple(
        StoredRecord(
            lsn=lsn,
            data=record.data,
            headers=tuple((header.key, header.value) for header in record.headers),
            timestamp_us=record.timestamp_us or batch.timestamp_us,
            crc32c=optional(record, "crc32c"),
        )
        for lsn, record in enumerate(batch.records, batch.first_lsn)
    )


def batch_request(
    batches: Iterable[LogBatch],
    checks: Iterable[Check] = (),
    cursors: Iterable[CursorCommit] = (),
    durability: Durability | None = None,
) -> wal_pb2.AppendBatchRequest:
    return wal_pb2.AppendBatchRequest(
        batches=[batch.to_proto() for batch in batches],
        checks=[check.to_proto() for check in checks],
        cursors=[cursor.to_proto() for cursor in cursors],
        durability=durability,
    )


def batch_ack(answer: wal_pb2.AppendBatchResponse) -> BatchAck:
    return BatchAck(
        appends=tuple(
            LogAck(
                log=append.log,
                first_lsn=append.first_lsn,
                next_lsn=append.next_lsn,
                timestamp_us=append.timestamp_us,
                durable_lsn=optional(append, "durable_lsn"),
                replicated_lsn=optional(append, "replicated_lsn"),
                deduplicated=append.deduplicated,
                log_id=append.log_id,
            )
            for append in answer.appends
        ),
        durability=Durability(answer.durability),
        position=optional(answer, "position"),
        recovery_epoch=answer.recovery_epoch,
    )


def cursor_from_proto(cursor: cursor_pb2.Cursor) -> Cursor:
    return Cursor(log=cursor.log, name=cursor.name, lsn=cursor.lsn, log_id=cursor.log_id)


def optional(message, field: str):
    """A field's value; None if it is absent."""
    return getattr(message, field) if message.HasField(field) else None
