"""The appends of a client, which share one stream to each server.

```text
 append ──▶ [queue] ──writer──▶ stream ──▶ server
   ▲                              │
   └── future, by number ◀──reader┘      answers come in any order; a refused request ends nothing
```

A message on a stream of grpc.aio costs more than a unary call among many: each write and each read waits for a thread of gRPC,
one after another. Plain appends to one log that wait together therefore become one batch. A request that would wait behind others,
and cannot join them, is a call of its own. If a batch of several is refused, each of its appends becomes a call of its own and gets
its own answer.

The client repeats calls (`Client._call`); this module repeats nothing.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from wald.errors import NotSent, Outcome, Retry, WaldError, connection_lost
from wald.records import optional
from wald.session import SessionCall
from wald.v1 import types_pb2, wal_pb2

if TYPE_CHECKING:
    from wald.client import Client
    from wald.nodes import Connection

# Maximum encoded bytes of a request on the stream. A larger one would delay the small ones behind it, and the server's limit
# on messages can be low.
_MAX_BYTES = 64 << 10
# Maximum records of appends that become one batch. Their bytes have the bound of one request.
_MAX_RECORDS = 1000
# Maximum logs whose level is known to a stream.
_MAX_LOGS = 1000
# Seconds without a request in flight after which a stream is half-closed, and then given up if the server does not end it.
_IDLE_SECONDS = 1.0
# Seconds without an answer after which a stream takes no more requests once a caller gives up.
_SILENCE_SECONDS = 5.0
# Seconds without a stream to a server that ended one because of a message.
_ALONE_SECONDS = 60.0
# Statuses of a stream that are about the server or the caller, whichever request they name.
_WHOLE_STREAM = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Appends:
    """The streams of a client: the one that takes requests, and earlier ones that still have answers to deliver."""

    def __init__(self, client: Client):
        self._client = client
        self._current: AppendsStream | None = None
        self._streams: set[AppendsStream] = set()

    async def answer_of(self, connection: Connection, request, token: str | None, deadline: float):
        """The answer to an AppendRequest or AppendBatchRequest on the stream to this server. None: the request must be a call
        of its own, and nothing of it was applied. Raises WaldError."""
        size = request.ByteSize()
        if size > _MAX_BYTES or connection.appends_alone_until > asyncio.get_running_loop().time():
            return None
        stream = self._current
        if stream is None or not stream.takes_requests or stream.connection is not connection or stream.token != token:
            if stream is not None:
                stream.half_close()
            stream = self._current = AppendsStream(self._client, connection)
            self._streams.add(stream)
            stream.ended.add_done_callback(lambda _, ended=stream: self._streams.discard(ended))
        message = stream.place_for(request, size)
        return None if message is None else await stream.answer_of(message, request, deadline)

    async def close(self, grace: float | None) -> float | None:
        """Sends no more than the requests that wait, and waits until they are answered, at most `grace` seconds. Returns the rest
        of them. Closing a channel waits for these calls only in some versions of gRPC."""
        now = asyncio.get_running_loop().time
        began = now()
        for stream in self._streams:
            stream.half_close()
        if self._streams and grace:
            await asyncio.wait([stream.ended for stream in self._streams], timeout=grace)
            grace = max(grace - (now() - began), 0.0)
        return grace

    async def end(self) -> None:
        """Breaks off each stream that has not ended."""
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*(stream.ended for stream in self._streams), return_exceptions=True)


class _Message:
    """A message to the server: one request, or several plain appends to one log."""

    __slots__ = ("log", "durability", "size", "records", "requests", "number")

    def __init__(self, request):
        # The log; None: no other request can join this one.
        self.log = request.log if _is_plain(request) else None
        self.durability = request.durability if self.log is not None else None
        self.size = 0
        self.records = 0
        # The requests of the callers that wait, in order. Once it is sent, the place of each in it.
        self.requests: dict[asyncio.Future, Any] = {}
        # Its number on the stream; None: the transport does not have it yet.
        self.number: int | None = None

    def suits(self, request) -> bool:
        """Whether the request can be part of this message, if there is room."""
        same = request.durability == self.durability
        return self.log is not None and same and _is_plain(request) and request.log == self.log

    def has_room(self, size: int) -> bool:
        return self.size + size <= _MAX_BYTES and self.records < _MAX_RECORDS

    def to_proto(self, number: int) -> wal_pb2.AppendSessionRequest:
        """The message, in which the requests of callers that went away are no longer."""
        self.number = number
        requests = list(self.requests.values())
        self.requests = {future: place for place, future in enumerate(self.requests)}
        message = wal_pb2.AppendSessionRequest(request_id=number, independent=True)
        if len(requests) > 1:
            records = [request.record for request in requests]
            message.batch.batches.append(wal_pb2.LogBatch(log=self.log, records=records))
            message.batch.durability = self.durability
        elif isinstance(requests[0], wal_pb2.AppendRequest):
            message.append.CopyFrom(requests[0])
        else:
            message.batch.CopyFrom(requests[0])
        return message


def _is_plain(request) -> bool:
    """Whether a request is one record without a condition and without a time of its own, which an ack would repeat."""
    is_record = isinstance(request, wal_pb2.AppendRequest)
    return is_record and not request.HasField("condition") and not request.record.timestamp_us


def _part_of(ack: wal_pb2.AppendBatchResponse, place: int) -> wal_pb2.AppendResponse:
    """The ack of one of the appends that became a batch."""
    append = ack.appends[0]
    return wal_pb2.AppendResponse(
        lsn=append.first_lsn + place,
        timestamp_us=append.timestamp_us,
        durable_lsn=optional(append, "durable_lsn"),
        durability=ack.durability,
        position=optional(ack, "position"),
        recovery_epoch=ack.recovery_epoch,
        log_id=append.log_id,
        replicated_lsn=optional(append, "replicated_lsn"),
    )


class AppendsStream(SessionCall):
    """One stream of independent requests."""

    def __init__(self, client: Client, connection: Connection):
        super().__init__(client, connection)
        self.takes_requests = True
        self._loop = asyncio.get_running_loop()
        # Messages that the transport does not have yet, in order, and those whose answers are still to come.
        self._queue: deque[_Message] = deque()
        self._sent: dict[int, _Message] = {}
        self._next_number = 0
        # Logs whose plain appends are flushed although they name no durability.
        self._flushed: set[str] = set()
        # When the first request since the last answer was handed to the transport; None: none was.
        self._silent_since: float | None = None
        self._more = asyncio.Event()
        self._idle_since = self._loop.time()
        self._timer = self._loop.call_later(_IDLE_SECONDS, self._check_idle)
        self._writer = asyncio.create_task(self._write())
        self.ended = asyncio.create_task(self._read())

    def place_for(self, request, size: int) -> _Message | None:
        """The message that will have the request; None: it would wait behind others."""
        last = self._queue[-1] if self._queue else None
        if last is not None and not (last.suits(request) and self._may_join(request)):
            return None
        if last is None or not last.has_room(size):
            last = _Message(request)
            self._queue.append(last)
        last.size += size
        last.records += 1
        return last

    def _may_join(self, request) -> bool:
        """Whether a batch would be as durable as the plain append. In sync mode `batch` a batch without a durability is flushed,
        and a plain append is not."""
        return request.durability != types_pb2.DURABILITY_UNSPECIFIED or request.log in self._flushed

    async def answer_of(self, message: _Message, request, deadline: float):
        """The answer to a request in this message. None: it must be a call of its own, and nothing of it was applied. Raises
        WaldError."""
        future = self._loop.create_future()
        message.requests[future] = request
        self._more.set()
        timer = self._loop.call_at(deadline, self._expire, message, future)
        try:
            return await future
        finally:
            timer.cancel()
            self._forget(message, future)

    def _forget(self, message: _Message, future: asyncio.Future) -> None:
        message.requests.pop(future, None)
        if not message.requests and message.number is not None:
            self._sent.pop(message.number, None)
        self._idle_since = now = self._loop.time()
        if self._silent_since is not None and now - self._silent_since >= _SILENCE_SECONDS:
            # The stream may end at a proxy whose server is gone, and another one may reach the next server. Requests that wait keep
            # waiting: the server may only be slow.
            self.half_close()

    def _expire(self, message: _Message, future: asyncio.Future) -> None:
        """The deadline of a request has passed. A later answer finds no caller."""
        error = self._client._error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", (), self.connection)
        if message.number is None:
            error.outcome, error.retry = Outcome.NOT_APPLIED, Retry.SAFE
        _settle(future, error)
        self._forget(message, future)

    def half_close(self) -> None:
        """Takes no more requests. The stream ends when all are answered."""
        if self.takes_requests:
            self.takes_requests = False
            self._more.set()
            self._idle_since = self._loop.time()

    def cancel(self) -> None:
        """Breaks the stream off."""
        if not self.ended.done():
            self._call.cancel()

    def _check_idle(self) -> None:
        """Half-closes a stream that nobody used for a while, so that it keeps neither the server nor the program."""
        self._timer.cancel()
        in_flight = self._sent or any(message.requests for message in self._queue)
        left = _IDLE_SECONDS if in_flight else self._idle_since + _IDLE_SECONDS - self._loop.time()
        if left <= 0:
            if not self.takes_requests:
                # The server does not end it, and nobody waits.
                self.cancel()
                return
            self.half_close()
            left = _IDLE_SECONDS
        self._timer = self._loop.call_later(left, self._check_idle)

    async def _write(self) -> None:
        try:
            # A request waits here as long as there is no connection, and counts as not sent.
            await self._call.wait_for_connection()
            # Not before: a channel that cannot connect would go on with its attempts after it was given up.
            self._watch_status()
            while self.takes_requests or self._queue:
                while self._queue and not self._call.done():
                    if not await self._write_message(self._queue.popleft()):
                        return
                self._more.clear()
                if self._call.done():
                    return
                if self.takes_requests:
                    await self._more.wait()
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The reader learns why the stream has ended.
            pass

    async def _write_message(self, message: _Message) -> bool:
        """Hands a message to the transport. False: the stream had ended before."""
        # A caller that was cancelled may run after this task.
        message.requests = {future: request for future, request in message.requests.items() if not future.done()}
        if not message.requests:
            return True
        number = self._next_number
        self._next_number += 1
        self._sent[number] = message
        if self._silent_since is None:
            self._silent_since = self._loop.time()
        try:
            await self._call.write(message.to_proto(number))
        except asyncio.InvalidStateError:
            self._sent.pop(number, None)
            message.number = None
            self._queue.appendleft(message)
            return False
        return True

    async def _read(self) -> None:
        error = None
        try:
            error = await self._receive()
        except asyncio.CancelledError:
            # The call was cancelled, or this task with the event loop.
            pass
        finally:
            self.takes_requests = False
            self._timer.cancel()
            self._writer.cancel()
            self._call.cancel()
            # Errors keep this object in their tracebacks, and a call keeps a channel that was given up.
            del self._call
            self._end(error or connection_lost("the client was closed" if self._client.closed else "the stream was broken off"))

    async def _receive(self) -> WaldError:
        status = await self._take_answers(self._take)
        if status is None:
            return connection_lost("the stream ended without the server's status")
        code, message, metadata = status
        if code is grpc.StatusCode.OK:
            return connection_lost("the server ended the stream")
        return self._client._error(code, message, metadata, self.connection)

    def _take(self, answer: wal_pb2.AppendSessionResponse, metadata: tuple) -> None:
        self._client._answered(self.connection, metadata)
        self._silent_since = None
        message = self._sent.pop(answer.request_id, None)
        if message is None:
            # All of its callers went away.
            return
        if answer.HasField("append_ack"):
            result = answer.append_ack
            if message.durability == types_pb2.DURABILITY_UNSPECIFIED:
                self._note_level(message.log, result.durability)
        elif answer.HasField("ack"):
            result = answer.ack
        else:
            result = self._refusal(answer.error)
            if message.records > 1 and result.outcome is Outcome.NOT_APPLIED and result.retry is not Retry.SAFE:
                # The refusal may concern one of the appends: each gets its own.
                result = None
        for future, place in message.requests.items():
            if isinstance(result, wal_pb2.AppendBatchResponse) and message.log is not None:
                _settle(future, _part_of(result, place))
            else:
                _settle(future, result)

    def _note_level(self, log: str, level: int) -> None:
        """Notes the durability that the log's sync mode gives a plain append."""
        if level < types_pb2.DURABILITY_DURABLE or len(self._flushed) >= _MAX_LOGS:
            self._flushed.discard(log)
        else:
            self._flushed.add(log)

    def _refusal(self, encoded: bytes) -> WaldError:
        """The error of a request that was refused, as that of a call."""
        try:
            status = status_pb2.Status.FromString(encoded)
        except DecodeError:
            return WaldError("the answer breaks the contract: neither an ack nor a status")
        code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
        return self._client._error(code, status.message, (("grpc-status-details-bin", encoded),), self.connection)

    def _end(self, error: WaldError) -> None:
        """Settles all requests without an answer. The server has answered all that it read before a status of its own. A proxy
        does not know which requests those are: only Wald's own word about the outcome counts."""
        # A message that breaks the contract, or an older server that refused one of them as in an ordinary session.
        is_of_one = error.code is grpc.StatusCode.INVALID_ARGUMENT or (
            "request_id" in error.facts and error.code not in _WHOLE_STREAM
        )
        alone = error.code is grpc.StatusCode.UNIMPLEMENTED or (
            is_of_one and bool(error.reason) and error.outcome is Outcome.NOT_APPLIED
        )
        if alone:
            self.connection.appends_alone_until = self._loop.time() + _ALONE_SECONDS
        unsent = error if error.outcome is Outcome.NOT_APPLIED else _not_sent(error)
        for messages, result in ((self._sent.values(), error), (self._queue, unsent)):
            for message in messages:
                for future in message.requests:
                    _settle(future, None if alone else result)
        self._sent.clear()
        self._queue.clear()


def _settle(future: asyncio.Future, result) -> None:
    """Gives a caller its answer or error."""
    if future.done():
        return
    if isinstance(result, WaldError):
        # One for each caller: their tracebacks differ.
        future.set_exception(copy.copy(result))
    else:
        future.set_result(result)


def _not_sent(cause: WaldError) -> NotSent:
    return NotSent(
        f"not sent: {cause.message}", code=grpc.StatusCode.UNAVAILABLE, outcome=Outcome.NOT_APPLIED, retry=Retry.SAFE
    )
