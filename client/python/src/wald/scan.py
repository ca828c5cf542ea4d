"""A scan underway, which outlives its connections.

```text
           open                    message                    lost
  (closed) ─────▶ (open) ─────────────────────────▶ (open) ──────────▶ (closed)
     ▲        begin at the start,     its events are queued,              │
     │        or at the last cursor   its cursor is kept                  │
     └───────────────────────── pause, longer each time ──────────────────┘
```

A message becomes one event with the cursor that resumes after it. The next connection thus
begins exactly after the last event that the caller gets, and so does a program that stored
the cursor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from wald.errors import DeadlineExceeded, LogNotFound, Retry, WaldError, connection_lost
from wald.records import Batch, Gap, GapReason, StoredRecord, optional, records_from_proto
from wald.retry import Repeat
from wald.v1 import wal_pb2

if TYPE_CHECKING:
    from wald.client import Client


class _Place(Enum):
    """Place at which the next connection begins."""

    START = "where the caller said"
    CURSOR = "after the last message"
    LOST = "not known: going on could repeat or skip records"


@dataclass(frozen=True)
class ScanEvent:
    """A piece of a scan, in order. Store its cursor in one step with its effects: after a restart of the
    program nothing is applied twice, and nothing is skipped."""

    gaps: tuple[Gap, ...]
    """Missing records, before the batches."""
    batches: tuple[Batch, ...]
    """Records, in order."""
    caught_up: bool
    """Everything that was there has been delivered."""
    cursor: bytes
    """Covers exactly the events up to and including this one: resumes after it."""
    tail_lsn: int | None
    """The tail; of a scan of one log that exists."""
    durable_lsn: int | None
    """Every lsn below it is flushed to the device; of a scan of one log that exists."""
    replicated_lsn: int | None
    """Every lsn below it is in the bucket of a replica; of a scan of one log that exists."""

    def records(self) -> Iterator[tuple[str, StoredRecord]]:
        """The records of all batches, each with the name of its log."""
        for batch in self.batches:
            for record in batch.records:
                yield batch.log, record


class Scan:
    """The events of a scan: an async iterator of `ScanEvent`, in order. Ends after the last one, or
    raises. Entering it as an async context manager opens it (so that "from now on" is from
    then on), leaving closes it.
    """

    def __init__(self, client: Client, request: wal_pb2.ScanRequest):
        self._client = client
        self._request = request
        self._remaining = request.max_records or None
        self._call = None
        # The last connection, and the token of its call.
        self._connection = None
        self._token: str | None = None
        # The step underway, or done with a result that nobody has taken yet.
        self._stepping: asyncio.Task[None] | None = None
        self._event: ScanEvent | None = None
        self._place = _Place.START
        self._opened = False
        self._ended = False
        self._failures = 0
        self._failing_since: float | None = None
        self._pause = 0.0
        self.cursor: bytes | None = request.cursor or None
        """Resumes exactly after the last event that was handed out."""
        self._caught_up = False
        self.interruption: WaldError | None = None
        """The failure that broke the connection; None again once it is back."""

    async def __aenter__(self) -> Scan:
        try:
            await self.open()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *_) -> None:
        self.close()

    def __aiter__(self) -> Scan:
        return self

    async def __anext__(self) -> ScanEvent:
        while True:
            if self._event is not None:
                event, self._event = self._event, None
                self.cursor = event.cursor
                return event
            if self._is_over():
                raise StopAsyncIteration
            await self._advance()

    def _begin_behind(self, cursor: bytes) -> None:
        """Begins behind this cursor, instead of the place that the caller said."""
        self._request.cursor = cursor
        self.cursor = cursor

    def _take_back(self, event: ScanEvent, before: bytes | None) -> None:
        """Hands an event out again that no caller got. `before` is the cursor before it."""
        if self._event is None and self.cursor == event.cursor:
            self._event = event
            self.cursor = before

    async def open(self) -> None:
        """Connects now; otherwise the first event does it."""
        while self._call is None and not self._is_over():
            await self._advance()

    def close(self) -> None:
        """Ends it; received events that were not handed out are dropped."""
        self._ended = True
        self._event = None
        if self._stepping is not None:
            self._stepping.cancel()
            self._stepping = None
        self._disconnect()

    @property
    def caught_up(self) -> bool:
        """Everything that was there when the last message was sent has been handed out."""
        return self._caught_up and self._event is None

    def _is_over(self) -> bool:
        """No step follows, and a failure of the last one was raised."""
        return self._ended and self._stepping is None

    async def _advance(self) -> None:
        """One step, in a task of its own: a caller who loses patience neither breaks it off, nor begins its waits again."""
        if self._stepping is None:
            self._stepping = asyncio.ensure_future(self._step(self._open if self._call is None else self._receive))
            # A scan that is closed needs no caller who takes the failure of its last step.
            self._stepping.add_done_callback(lambda step: step.cancelled() or step.exception())
        stepping = self._stepping
        await asyncio.wait([stepping])
        if self._stepping is stepping:
            self._stepping = None
        # The end of the scan cancels the step.
        if not stepping.cancelled():
            stepping.result()

    async def _step(self, step) -> None:
        try:
            await step()
        except grpc.aio.AioRpcError as failure:
            self._survive(
                self._client._error(
                    failure.code(), failure.details() or "", failure.trailing_metadata(), self._connection
                )
            )
        except WaldError as error:
            self._survive(error)

    async def _open(self) -> None:
        now = asyncio.get_running_loop().time
        if self._failing_since is None:
            self._failing_since = now()
        if self._pause:
            await asyncio.sleep(self._pause)
            self._pause = 0.0
        await self._pin_tail_offset()
        if self._ended:
            return
        self._token = self._client._used_token()
        self._connection = self._client._open()
        call = self._client.wal.Scan(self._request)
        try:
            # Only the answer's headers say that the server has begun.
            headers = await asyncio.wait_for(call.initial_metadata(), self._client.silence_timeout)
            if not headers and call.done() and await call.code() is not grpc.StatusCode.OK:
                raise self._client._error(
                    await call.code(), await call.details(), await call.trailing_metadata(), self._connection
                )
        except asyncio.TimeoutError:
            call.cancel()
            raise self._silent() from None
        except asyncio.CancelledError:
            call.cancel()
            raise
        self._client._answered(self._connection, headers)
        if self._ended:
            # Closed while it connected.
            call.cancel()
            return
        self._call = call
        self._opened = True
        # From now on "the tail" is in the past, and only a cursor can name it.
        if self._place is _Place.START and self._request.WhichOneof("start") == "tail_offset":
            self._place = _Place.LOST

    async def _pin_tail_offset(self) -> None:
        """Turns "n before the tail" of one log into an lsn, so that a connection lost before
        the first message can be replaced without skipping records that arrived meanwhile. With
        `any_node` only the node knows the tail of its copy: the owner's tail may be above it."""
        request = self._request
        one_log = request.WhichOneof("selector") == "log"
        if not (request.follow and one_log and request.WhichOneof("start") == "tail_offset") or request.any_node:
            return
        try:
            tail = await self._client.tail(
                request.log, visibility=request.visibility, log_id=optional(request, "log_id")
            )
        except LogNotFound:
            # All that will ever be in it is still to come.
            request.ClearField("tail_offset")
            return
        request.lsn = max(tail.tail_lsn - request.tail_offset, tail.first_lsn)

    async def _receive(self) -> None:
        # In a task of its own, so that a broken call, which cancels its reads, does not look like the end of this scan.
        reading = asyncio.ensure_future(self._call.read())
        try:
            done, _ = await asyncio.wait([reading], timeout=self._client.silence_timeout)
        finally:
            reading.cancel()
        if not done:
            raise self._silent()
        if reading.cancelled():
            raise connection_lost("the stream was broken off")
        message = reading.result()
        if message is grpc.aio.EOF:
            self._end()
            return
        self._queue(message)

    def _queue(self, message: wal_pb2.ScanResponse) -> None:
        event = _event(message)
        if event.gaps or event.batches or (event.caught_up and not self._caught_up):
            self._event = event
        elif message.cursor:
            # A heartbeat, and everything before it was handed out.
            self.cursor = message.cursor
        if message.cursor or event.gaps or event.batches or event.caught_up:
            self._place = _Place.CURSOR if message.cursor else _Place.LOST
            self._request.cursor = message.cursor
        # Otherwise a heartbeat before the first piece: the next connection begins where this one began.
        if self._remaining is not None:
            self._remaining -= min(sum(len(batch.records) for batch in message.batches), self._remaining)
            self._request.max_records = self._remaining
            # Asked again it would be 0, which is: without bound.
            if self._remaining == 0:
                self._ended = True
                self._disconnect()
        self._caught_up = event.caught_up or (self._caught_up and not event.batches)
        self.interruption = None
        self._failures = 0
        self._failing_since = None

    def _end(self) -> None:
        """The server ended the stream in good order."""
        bounded = self._remaining is not None or self._request.HasField("until_lsn")
        if self._request.follow and not bounded:
            raise connection_lost("the server ended the stream")
        self._ended = True

    def _survive(self, error: WaldError) -> None:
        """Prepares the next connection, if there can be one."""
        self._disconnect()
        if self._client.closed:
            self._ended = True
            raise error.of_read()
        self._failures += 1
        policy = self._client.retry
        self._pause = policy.pause(self._failures, error)
        now = asyncio.get_running_loop().time()
        since = now if self._failing_since is None else self._failing_since
        self._failing_since = since
        tired = self._failures >= policy.max_attempts or now - since + self._pause >= self._client.timeout
        # A follow that has begun has no end to its patience; the caller may have.
        patient = self._request.follow and self._opened
        allowed = self._client._allows(Repeat.HARMLESS, error, self._token, waits=patient)
        if self._place is _Place.LOST or (tired and not patient) or not allowed:
            self._ended = True
            raise error.of_read()
        self.interruption = error

    def _silent(self) -> WaldError:
        return DeadlineExceeded(
            f"nothing came for {self._client.silence_timeout:g} s",
            code=grpc.StatusCode.DEADLINE_EXCEEDED,
            retry=Retry.SAFE_WITH_CONDITION,
        )

    def _disconnect(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None


def _event(message: wal_pb2.ScanResponse) -> ScanEvent:
    return ScanEvent(
        gaps=tuple(
            Gap(gap.log, gap.from_lsn, optional(gap, "to_lsn"), GapReason(gap.reason)) for gap in message.gaps
        ),
        batches=tuple(
            Batch(batch.log, batch.log_id, records_from_proto(batch)) for batch in message.batches
        ),
        caught_up=message.caught_up,
        cursor=message.cursor,
        tail_lsn=optional(message, "tail_lsn"),
        durable_lsn=optional(message, "durable_lsn"),
        replicated_lsn=optional(message, "replicated_lsn"),
    )
