"""The appends of a client, which share one stream to each server.

```text
 append ──▶ [queue] ──writer──▶ stream ──▶ server
   ▲                              │
   └── future, by number ◀──reader┘      answers come in any order; a refused request ends nothing
```

Each attempt of a call is one request. The client repeats calls (`Client._call`); this module repeats nothing.
"""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from wald.errors import NotSent, Outcome, Retry, WaldError, connection_lost
from wald.session import SessionCall
from wald.v1 import wal_pb2

if TYPE_CHECKING:
    from wald.client import Client
    from wald.nodes import Connection

# Maximum encoded bytes of a request on the stream. A larger one would delay the small ones behind it, and the server's limit
# on messages can be low.
_MAX_BYTES = 64 << 10
# Seconds without a request in flight after which a stream is half-closed, and then given up if the server does not end it.
_IDLE_SECONDS = 1.0
# Seconds without a stream to a server that ended one because of a message.
_ALONE_SECONDS = 60.0
# A stream ends with one of these if a message breaks the contract, or if the server is older than independent requests.
_WRONG_MESSAGE = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
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
        now = asyncio.get_running_loop().time
        if connection.appends_alone_until > now() or request.ByteSize() > _MAX_BYTES:
            return None
        stream = self._current
        if stream is None or not stream.takes_requests or stream.connection is not connection or stream.token != token:
            if stream is not None:
                stream.half_close()
            stream = self._current = AppendsStream(self._client, connection)
            self._streams.add(stream)
            stream.ended.add_done_callback(lambda _, ended=stream: self._streams.discard(ended))
        return await stream.answer_of(request, deadline)

    def half_close(self) -> None:
        """Sends no more than the requests that wait. The streams end once these are answered."""
        for stream in self._streams:
            stream.half_close()

    async def end(self) -> None:
        """Breaks off each stream that has not ended."""
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*(stream.ended for stream in self._streams), return_exceptions=True)


class AppendsStream(SessionCall):
    """One stream of independent requests."""

    def __init__(self, client: Client, connection: Connection):
        super().__init__(client, connection)
        self.takes_requests = True
        self._loop = asyncio.get_running_loop()
        self._next_number = 0
        # Callers that wait for an answer, and the requests of those whose request the transport does not have yet, in order.
        self._waiting: dict[int, asyncio.Future] = {}
        self._queue: OrderedDict[int, wal_pb2.AppendSessionRequest] = OrderedDict()
        self._more = asyncio.Event()
        self._idle_since = self._loop.time()
        self._timer = self._loop.call_later(_IDLE_SECONDS, self._check_idle)
        self._writer = asyncio.create_task(self._write())
        self.ended = asyncio.create_task(self._read())

    async def answer_of(self, request, deadline: float):
        """The answer to a request. None: it must be a call of its own, and nothing of it was applied. Raises WaldError."""
        number = self._next_number
        self._next_number += 1
        message = wal_pb2.AppendSessionRequest(request_id=number, independent=True)
        content = message.append if isinstance(request, wal_pb2.AppendRequest) else message.batch
        content.CopyFrom(request)
        future = self._loop.create_future()
        self._waiting[number] = future
        self._queue[number] = message
        self._more.set()
        timer = self._loop.call_at(deadline, self._expire, number)
        try:
            return await future
        finally:
            timer.cancel()
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._waiting.pop(number, None)
        self._queue.pop(number, None)
        if not self._waiting:
            self._idle_since = self._loop.time()

    def _expire(self, number: int) -> None:
        """The deadline of a request has passed. It stays in the queue no longer; a later answer finds nobody."""
        error = self._client._error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", (), self.connection)
        if number in self._queue:
            error.outcome, error.retry = Outcome.NOT_APPLIED, Retry.SAFE
        self._settle(number, error)
        self._forget(number)

    def _settle(self, number: int, result) -> None:
        """Gives the caller of a request its answer or error."""
        future = self._waiting.get(number)
        if future is None or future.done():
            return
        if isinstance(result, WaldError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def half_close(self) -> None:
        """Takes no more requests. The stream ends when all are answered."""
        if self.takes_requests:
            self.takes_requests = False
            self._more.set()
            self._idle_since = max(self._idle_since, self._loop.time())

    def cancel(self) -> None:
        """Breaks the stream off."""
        if not self.ended.done():
            self._call.cancel()

    def _check_idle(self) -> None:
        """Half-closes a stream that nobody used for a while, so that it keeps neither the server nor the program."""
        self._timer.cancel()
        left = _IDLE_SECONDS if self._waiting else self._idle_since + _IDLE_SECONDS - self._loop.time()
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
            while self.takes_requests or self._queue:
                while self._queue and not self._call.done():
                    number, message = self._queue.popitem(last=False)
                    if self._waiting[number].done():
                        # Its caller was cancelled, and runs after this task.
                        continue
                    try:
                        await self._call.write(message)
                    except asyncio.InvalidStateError:
                        # The stream had ended before.
                        if number in self._waiting:
                            self._queue[number] = message
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
        if answer.HasField("append_ack"):
            self._settle(answer.request_id, answer.append_ack)
        elif answer.HasField("ack"):
            self._settle(answer.request_id, answer.ack)
        elif answer.request_id in self._waiting:
            self._settle(answer.request_id, self._refusal(answer.error))

    def _refusal(self, encoded: bytes) -> WaldError:
        """The error of a request that was refused, as that of a call."""
        try:
            status = status_pb2.Status.FromString(encoded)
        except DecodeError:
            return WaldError("the answer breaks the contract: neither an ack nor a status")
        code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
        return self._client._error(code, status.message, (("grpc-status-details-bin", encoded),), self.connection)

    def _end(self, error: WaldError) -> None:
        """Settles all requests without an answer. The server has answered all that it read before a status of its own."""
        alone = error.code in _WRONG_MESSAGE or (
            # An older server, which refused one of them as in an ordinary session.
            "request_id" in error.facts and error.outcome is Outcome.NOT_APPLIED and error.code not in _WHOLE_STREAM
        )
        if alone:
            self.connection.appends_alone_until = self._loop.time() + _ALONE_SECONDS
        for number in self._waiting:
            if alone:
                self._settle(number, None)
            elif number in self._queue and error.outcome is not Outcome.NOT_APPLIED:
                self._settle(number, _not_sent(error))
            else:
                # One error for each caller: their tracebacks differ.
                self._settle(number, copy.copy(error))
        self._queue.clear()


def _not_sent(cause: WaldError) -> NotSent:
    return NotSent(
        f"not sent: {cause.message}", code=grpc.StatusCode.UNAVAILABLE, outcome=Outcome.NOT_APPLIED, retry=Retry.SAFE
    )
