"""Exactly-once producers: numbered batches, sent again until they are acked.

```text
            append                 room in the window
 records ──────────▶ (gathering) ─────────────────────▶ [unacked, numbered] ──▶ stream
                         send ───────────────────────▶        │      ▲             │
                                                         ack: gone   └── lost: all of it again,
                                                                         in order, same numbers
```

The server recognises a batch by producer, epoch and sequence, so a repeat is safe, whether or
not the first attempt was applied. Every batch carries the log's number: the producer never
creates a deleted log again, nor writes to a log created later under the name.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from wald.errors import (
    DeadlineExceeded,
    EarlierFailure,
    LogExists,
    LogNotFound,
    Outcome,
    Retry,
    TlsError,
    WaldError,
    connection_lost,
)
from wald.records import (
    Ack,
    BatchAck,
    Condition,
    Durability,
    LogAck,
    LogBatch,
    ProducerSequence,
    Record,
    batch_request,
    record_to_proto,
    records_to_proto,
)
from wald.retry import Repeat
from wald.session import AppendStream, fail, raise_first
from wald.v1 import record_pb2, wal_pb2

if TYPE_CHECKING:
    from wald.client import Client


_RECOGNISED_BATCHES = 1024
"""Number of newest batches of a producer whose repeats the server recognises."""


@dataclass
class _Batch:
    """One numbered batch, until it is acked."""

    request: wal_pb2.AppendBatchRequest
    size: int
    answer: Callable[[BatchAck], None]
    fail: Callable[[WaldError], None]
    # An attempt may have been applied.
    unknown: bool = False


@dataclass
class _Gathering:
    """Records that wait to become a batch."""

    records: list[record_pb2.Record] = field(default_factory=list)
    futures: list[asyncio.Future[Ack]] = field(default_factory=list)
    size: int = 0


class Producer:
    """A source of appends to one log; see `Client.producer`. An async context manager: entering makes
    the log if there is none, leaving waits until everything is acked.

    A batch is sent again after lost connections, restarts of the server and passing refusals,
    until it is acked or the producer's patience is over. A permanent refusal ends the
    producer: that batch gets the error, the later ones EarlierFailure. `append` and `send`
    from then on and leaving raise the first failure itself.

    A restarted program is another producer, unless it has stored the id and all batches without an ack.
    `Client.durable_producer` keeps them automatically.
    """

    def __init__(
        self,
        client: Client,
        log: str,
        *,
        id: str | None,
        epoch: int | None,
        sequence: int,
        log_id: int | None,
        writer_epoch: int | None,
        durability: Durability | None,
        retry_for: float,
        linger: float,
        batch_records: int,
        batch_bytes: int,
        window_batches: int,
        window_bytes: int,
    ):
        if not 1 <= window_batches <= _RECOGNISED_BATCHES:
            raise ValueError(f"{window_batches} batches in flight: between 1 and {_RECOGNISED_BATCHES} can be")
        self._client = client
        self._writer_epoch = writer_epoch
        self._durability = durability
        self._retry_for = retry_for
        self._linger = linger
        self._batch_records = batch_records
        self._batch_bytes = batch_bytes
        self._window_batches = window_batches
        self._window_bytes = window_bytes
        self.log = log
        self.id = str(uuid.uuid4()) if id is None else id
        # A random id is never used again.
        self._is_drawn = id is None
        self._asks = log_id is None or (id is None and epoch is None)
        self._first_epoch = id is None and epoch is None
        self.epoch = epoch or 0
        """The incarnation; of a random id known once the producer is open."""
        self.sequence = sequence
        """The number of the next batch."""
        self.log_id = log_id
        """The log's number, once the producer is open."""
        self.error: WaldError | None = None
        """The failure that ended it for good."""

        self._unacked: deque[_Batch] = deque()
        self._in_flight = 0
        self._gathering = _Gathering()
        self._flush_due = False
        self._flush_timer: asyncio.Handle | None = None
        # One caller at a time waits for room, so that order of calls is order of records.
        self._turn = asyncio.Lock()
        self._progress = asyncio.Event()
        self._closed = False

        self._stream: AppendStream | None = None
        # The token of the last stream, and the failure that ended it.
        self._token: str | None = None
        self._interruption: WaldError | None = None
        self._reconnect: asyncio.TimerHandle | None = None
        self._overdue: asyncio.TimerHandle | None = None
        self._failures = 0
        # Time of the last ack, or of the first batch that began to wait for one.
        self._last_progress = 0.0
        # Time at which the stream was opened.
        self._connected = 0.0

    async def __aenter__(self) -> Producer:
        await self.open()
        return self

    async def __aexit__(self, kind, raised, _) -> None:
        if kind is None:
            await self.close()
            return
        self.abort()
        raise_first(self.error, raised)

    async def open(self) -> None:
        """Makes the log if there is none, and learns its number. `async with` does it."""
        now = asyncio.get_running_loop().time
        deadline = now() + self._retry_for
        failures = 0
        while self._asks:
            try:
                timeout = min(max(deadline - now(), 0.0), self._client.timeout)
                log = await self._find_or_make(timeout)
                if self.log_id is None:
                    self.log_id = log.log_id
                if self._first_epoch:
                    self.epoch = log.first_producer_epoch
                self._asks = False
            except WaldError as error:
                failures += 1
                pause = self._client.retry.pause(failures, error)
                # Made by another client between the two questions, or by an attempt whose answer was lost.
                passes = isinstance(error, LogExists) or Repeat.HARMLESS.allows(error)
                if not passes or now() + pause >= deadline:
                    raise
                await asyncio.sleep(pause)

    async def _find_or_make(self, timeout: float):
        # In this order a caller needs the right to make logs only if there is none.
        try:
            return await self._client.get_log(self.log, timeout=timeout)
        except LogNotFound:
            return await self._client.create_log(self.log, timeout=timeout)

    # Methods for callers.

    async def append(self, record: Record | bytes | str) -> asyncio.Future[Ack]:
        """Hands over one record, to be sent together with others, and returns the future of its ack.
        Waits while the window is full."""
        proto = record_to_proto(record)
        size = proto.ByteSize()
        async with self._turn:
            gathered = self._gathering
            full = len(gathered.records) >= self._batch_records
            if full or (gathered.records and gathered.size + size > self._batch_bytes):
                await self._flush_when_room()
                gathered = self._gathering
            self._refuse_if_ended()
            future: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()
            gathered.records.append(proto)
            gathered.futures.append(future)
            gathered.size += size
            if len(gathered.records) >= self._batch_records:
                self._flush()
            else:
                self._schedule_flush()
            return future

    async def send(
        self,
        records: Iterable[Record | bytes | str],
        *,
        expected_lsn: int | None = None,
        writer_epoch: int | None = None,
    ) -> asyncio.Future[LogAck]:
        """Hands over one batch, which becomes visible as a whole, and returns the future of its ack.
        Waits while the window is full."""
        return await self._send(records_to_proto(records), expected_lsn, writer_epoch)

    async def _send(
        self,
        protos: Sequence[record_pb2.Record],
        expected_lsn: int | None = None,
        writer_epoch: int | None = None,
    ) -> asyncio.Future[LogAck]:
        """Hands over one batch. If it is cancelled, the batch is not handed over."""
        async with self._turn:
            await self._flush_when_room()
            size = sum(proto.ByteSize() for proto in protos)
            await self._room(size)
            future: asyncio.Future[LogAck] = asyncio.get_running_loop().create_future()

            def answer(ack: BatchAck) -> None:
                if not future.done():
                    future.set_result(ack.appends[0])

            def failed(error: WaldError) -> None:
                fail(future, error)

            self._submit(protos, size, answer, failed, expected_lsn, writer_epoch)
            return future

    async def flush(self) -> None:
        """Waits until everything handed over is acked. Raises the failure that ended the
        producer, if there was one."""
        await self._flush_all(closes=False)

    async def _flush_all(self, closes: bool) -> None:
        async with self._turn:
            if self.error is None and not self._closed:
                await self._flush_when_room()
            # Calls that wait for their turn come too late.
            self._closed = self._closed or closes
        handed_over = self.sequence
        while self.sequence - len(self._unacked) < handed_over and self._unacked:
            await self._next_progress()
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        """Waits until everything is acked, and takes no more. The server forgets a random id.
        Raises the failure that ended the producer, if there was one."""
        forgets = self._is_drawn and not self._closed
        try:
            await self._flush_all(closes=True)
            if self._stream is not None:
                # There is nothing underway, so that it ends at once.
                self._stream.half_close()
                await asyncio.wait([self._stream.ended], timeout=1.0)
            if forgets and self.sequence > 0 and not self._client.closed:
                # If it fails, the server forgets the id once it has been idle for long enough.
                with contextlib.suppress(WaldError):
                    await self._client.forget_producer(self.log, self.id, log_id=self.log_id, timeout=1.0)
        finally:
            self.abort()

    def abort(self) -> None:
        """Gives up. Batches without an ack have an unknown outcome."""
        self._closed = True
        if self.error is None and (self._unacked or self._gathering.records):
            self._end(connection_lost("the producer was broken off"), sent=True)
        self._disconnect()
        self._progress.set()

    def _keep_id(self) -> None:
        """Lets the server remember a random id, too: a state has it."""
        self._is_drawn = False

    # From records to numbered batches.

    def _refuse_if_ended(self) -> None:
        if self.error is not None:
            raise self.error
        if self._closed:
            raise RuntimeError("the producer is closed")
        if self._asks:
            raise RuntimeError("the producer is not open")

    def _has_room(self, size: int) -> bool:
        if not self._unacked:
            return True
        return len(self._unacked) < self._window_batches and self._in_flight + size <= self._window_bytes

    async def _room(self, size: int) -> None:
        self._refuse_if_ended()
        while not self._has_room(size):
            await self._next_progress()
            self._refuse_if_ended()

    async def _next_progress(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    def _schedule_flush(self) -> None:
        if self._flush_timer is not None or self._flush_due:
            return
        loop = asyncio.get_running_loop()
        if self._linger > 0:
            self._flush_timer = loop.call_later(self._linger, self._flush)
        else:
            # Records of the same turn of the loop are sent together.
            self._flush_timer = loop.call_soon(self._flush)

    async def _flush_when_room(self) -> None:
        self._refuse_if_ended()
        while self._gathering.records and not self._has_room(self._gathering.size):
            await self._next_progress()
            self._refuse_if_ended()
        self._flush()

    def _flush(self) -> None:
        """Makes a batch of the gathered records, now or as soon as there is room."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        gathered = self._gathering
        self._flush_due = bool(gathered.records) and not self._has_room(gathered.size)
        if self._flush_due or not gathered.records:
            return
        self._gathering = _Gathering()

        def answer(ack: BatchAck) -> None:
            append = ack.appends[0]
            for lsn, future in enumerate(gathered.futures, append.first_lsn):
                if not future.done():
                    future.set_result(_ack(lsn, append, ack))

        def failed(error: WaldError) -> None:
            for future in gathered.futures:
                fail(future, error)

        self._submit(gathered.records, gathered.size, answer, failed)

    def _submit(
        self,
        records: Sequence[record_pb2.Record],
        size: int,
        answer: Callable[[BatchAck], None],
        failed: Callable[[WaldError], None],
        expected_lsn: int | None = None,
        writer_epoch: int | None = None,
    ) -> None:
        condition = Condition(
            expected_lsn=expected_lsn,
            writer_epoch=self._writer_epoch if writer_epoch is None else writer_epoch,
            producer=ProducerSequence(self.id, self.epoch, self.sequence),
            log_id=self.log_id,
        )
        request = batch_request([LogBatch(self.log, (), condition)], durability=self._durability)
        request.batches[0].records.extend(records)
        self.sequence += 1
        if not self._unacked:
            self._last_progress = asyncio.get_running_loop().time()
        self._unacked.append(_Batch(request, size, answer, failed))
        self._in_flight += size
        if self._stream is not None:
            self._stream.send(request)
        elif self._reconnect is None:
            self._connect()
        self._watch()

    # The stream, and the state that survives it.

    def _connect(self) -> None:
        """A new stream, and everything without an ack once more, in order."""
        self._reconnect = None
        if self._client.closed:
            self._end(connection_lost("the client was closed"), sent=False)
            return
        try:
            stream = AppendStream(self._client, self._on_ack, self._on_end)
        except TlsError as error:
            # The last handshake failed less than a second ago.
            self._reconnect_later(error)
            return
        self._stream, self._token = stream, stream.token
        self._connected = asyncio.get_running_loop().time()
        for batch in self._unacked:
            self._stream.send(batch.request)
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        self._watch()

    def _on_ack(self, ack: BatchAck) -> None:
        batch = self._unacked.popleft()
        self._in_flight -= batch.size
        self._failures = 0
        self._interruption = None
        self._last_progress = asyncio.get_running_loop().time()
        batch.answer(ack)
        if self._flush_due:
            self._flush()
        self._progress.set()

    def _on_end(self, error: WaldError | None, handed: int) -> None:
        self._stream = None
        if not self._unacked:
            # The next batch makes a new stream.
            return
        error = error or connection_lost("the server ended the session")
        if not self._client._allows(Repeat.GUARDED, error, self._token, waits=True):
            self._end(error, sent=False)
            return
        if error.outcome is Outcome.UNKNOWN:
            for batch, _ in zip(self._unacked, range(handed)):
                batch.unknown = True
        self._reconnect_later(error)

    def _reconnect_later(self, error: WaldError) -> None:
        self._interruption = error
        self._failures += 1
        pause = self._client.retry.pause(self._failures, error)
        self._reconnect = asyncio.get_running_loop().call_later(pause, self._connect)

    def _watch(self) -> None:
        """Looks again when the patience, with the stream or with all of them, could be over."""
        if self._overdue is None and self._unacked:
            over = self._last_progress + self._retry_for
            at = over if self._stream is None else min(self._quiet_at(), over)
            self._overdue = asyncio.get_running_loop().call_at(at, self._check_patience)

    def _quiet_at(self) -> float:
        """When the stream is given up without an ack: a proxy may have lost the server behind it. Another one then needs time, too.
        Not much less than half: batches that are sent again count against the rate of a tenant again."""
        return max(self._last_progress, self._connected) + self._retry_for / 2

    def _check_patience(self) -> None:
        self._overdue = None
        now = asyncio.get_running_loop().time()
        over = self._last_progress + self._retry_for <= now
        cause = f": {self._interruption.message}" if self._interruption is not None else ""
        if self._unacked and over:
            error = DeadlineExceeded(
                f"no ack for {self._retry_for:g} s{cause}",
                code=grpc.StatusCode.DEADLINE_EXCEEDED,
                outcome=Outcome.NOT_APPLIED,
                retry=Retry.SAFE_WITH_CONDITION,
            )
            self._end(error, sent=self._stream is not None)
        elif self._unacked and self._stream is not None and self._quiet_at() <= now:
            self._leave_stream()
        self._watch()

    def _leave_stream(self) -> None:
        """Gives up a stream that brings no ack. If it brings one at this moment, the server recognises the batches that are sent again."""
        stream = self._stream
        stream.cancel()
        silence = f"no ack for {self._retry_for / 2:g} s"
        error = self._client._error(grpc.StatusCode.UNAVAILABLE, silence, (), stream.connection)
        self._on_end(error, stream.handed)

    def _end(self, error: WaldError, sent: bool) -> None:
        """Ends the producer for good. `sent`: unacked batches are underway, in addition to
        earlier attempts."""
        first = self._unacked[0] if self._unacked else None
        if first is not None and (first.unknown or sent):
            error = error.after_unknown()
        self.error = error
        self._disconnect()
        for batch in self._unacked:
            unknown = batch.unknown or sent or (error.outcome is Outcome.UNKNOWN and batch is not first)
            applied = Outcome.UNKNOWN if unknown else Outcome.NOT_APPLIED
            batch.fail(error if batch is first else EarlierFailure.of(error, applied))
        for future in self._gathering.futures:
            fail(future, EarlierFailure.of(error, Outcome.NOT_APPLIED))
        self._unacked.clear()
        self._gathering = _Gathering()
        self._in_flight = 0
        self._progress.set()

    def _disconnect(self) -> None:
        for timer in (self._flush_timer, self._reconnect, self._overdue):
            if timer is not None:
                timer.cancel()
        self._flush_timer = self._reconnect = self._overdue = None
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None


def _ack(lsn: int, append: LogAck, batch: BatchAck) -> Ack:
    return Ack(
        lsn=lsn,
        timestamp_us=append.timestamp_us,
        durable_lsn=append.durable_lsn,
        replicated_lsn=append.replicated_lsn,
        durability=batch.durability,
        deduplicated=append.deduplicated,
        position=batch.position,
        recovery_epoch=batch.recovery_epoch,
        log_id=append.log_id,
    )
