"""Append sessions: pipelined batches on one stream, acked in order.

```text
 send ──▶ [outbox] ──writer──▶ stream ──▶ server
                                  │
 on_ack, in order ◀────reader─────┘      on_end, once: what ended it
```
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from wald.errors import EarlierFailure, Outcome, WaldError, connection_lost
from wald.records import BatchAck, Check, CursorCommit, Durability, LogBatch, batch_ack, batch_request
from wald.v1 import wal_pb2, wal_pb2_grpc

if TYPE_CHECKING:
    from wald.client import Client
    from wald.nodes import Connection

# Maximum wait for the server's status after the end of its answers, and the pause between two checks for it.
_STATUS_SECONDS = 1.0
_STATUS_POLL_SECONDS = 0.005


class SessionCall:
    """One AppendSession call on a connection, and the status with which the server ends it."""

    def __init__(self, client: Client, connection: Connection):
        self._client = client
        self.connection = connection
        self.token = client._used_token()
        """The token that the call carries."""
        self._call = connection.stub(wal_pb2_grpc.WalServiceStub).AppendSession()
        self._status: tuple | None = None

    def _watch_status(self) -> None:
        """Takes note of the status as soon as the call ends. Before grpcio 1.85 the call then stays until a garbage collection, and
        its channel with it."""
        self._call.add_done_callback(self._note_status)

    async def _take_answers(self, take: Callable[[wal_pb2.AppendSessionResponse, tuple], None]) -> tuple | None:
        """Passes each answer on, with the metadata before the first one. Returns the server's status; None: the stream ended
        without one."""
        metadata = None
        try:
            # Not `read()`, which drops answers that have arrived once it takes the call for
            # ended.
            async for answer in self._call:
                if metadata is None:
                    metadata = tuple(await self._call.initial_metadata())
                take(answer, metadata)
        except grpc.aio.AioRpcError:
            pass
        await self._wait_for_status()
        return self._status

    async def _wait_for_status(self) -> None:
        """Waits for the server's status, which may come on top of one that was made up."""
        now = asyncio.get_running_loop().time
        deadline = now() + _STATUS_SECONDS
        self._note_status(self._call)
        while self._status is None and now() < deadline:
            await asyncio.sleep(_STATUS_POLL_SECONDS)
            self._note_status(self._call)

    def _note_status(self, call: grpc.aio.Call) -> None:
        """Keeps the status that the server sent.

        A write that fails because the server has ended the stream gives the call a status of its
        own, before the server's arrives or on top of it (grpc/grpc#36066). Done callbacks are called for
        the first of them, and in some versions for both.
        """
        code, message = _now(call.code()), _now(call.details())
        made_up = code is grpc.StatusCode.INTERNAL and message == "Internal error from Core"
        if not made_up and self._status is None:
            self._status = (code, message, _now(call.trailing_metadata()))


class AppendStream(SessionCall):
    """A call whose requests are answered in order: the common part of sessions and producers.

    Requests are numbered 0, 1, 2 and so on. `on_ack` gets each ack in order. Then `on_end` is
    called once, with the error that ended the stream (None: in good order) and the number of
    requests without an ack that had been handed to the transport. The others were not
    applied.
    """

    def __init__(
        self,
        client: Client,
        on_ack: Callable[[BatchAck], None],
        on_end: Callable[[WaldError | None, int], None],
    ):
        self._on_ack = on_ack
        self._on_end = on_end
        self._sent = 0
        self._handed = 0
        self._acked = 0
        # A separate writer task: a cancelled sender must not break the stream.
        self._outbox: asyncio.Queue[wal_pb2.AppendSessionRequest | None] = asyncio.Queue()
        super().__init__(client, client._open())
        self._watch_status()
        self._writer = asyncio.create_task(self._write())
        self.ended = asyncio.create_task(self._read())

    def send(self, batch: wal_pb2.AppendBatchRequest) -> None:
        self._outbox.put_nowait(wal_pb2.AppendSessionRequest(request_id=self._sent, batch=batch))
        self._sent += 1

    @property
    def handed(self) -> int:
        """Number of requests without an ack that were handed to the transport."""
        return self._handed - self._acked

    def half_close(self) -> None:
        """No more requests. The stream ends when all are acked."""
        self._outbox.put_nowait(None)

    def cancel(self) -> None:
        """Breaks the stream off; reports nothing."""
        self._on_ack = lambda ack: None
        self._on_end = lambda error, handed: None
        self._call.cancel()

    async def _write(self) -> None:
        try:
            while (request := await self._outbox.get()) is not None:
                self._handed += 1
                await self._call.write(request)
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream has ended; the reader learns why.
            pass

    async def _read(self) -> None:
        error = connection_lost("the stream was broken off")
        try:
            error = await self._receive()
        except asyncio.CancelledError:
            # The call was cancelled, or this task with the event loop.
            pass
        finally:
            self._writer.cancel()
            self._call.cancel()
            self._on_end(error, self.handed)

    async def _receive(self) -> WaldError | None:
        try:
            status = await self._take_answers(self._take)
        except _BrokenContract as broken:
            return WaldError(str(broken))
        if status is None:
            return connection_lost("the session ended without the server's status")
        code, message, metadata = status
        if code is grpc.StatusCode.OK:
            return None if self._acked == self._sent else connection_lost("the server ended the session")
        error = self._client._error(code, message, metadata, self.connection)
        # Every ack due before a failure comes before it.
        in_order = error.number("request_id") in (None, self._acked)
        return error if in_order else error.after_unknown()

    def _take(self, answer: wal_pb2.AppendSessionResponse, metadata: tuple) -> None:
        if answer.request_id != self._acked:
            raise _BrokenContract(f"the answer breaks the contract: ack of {answer.request_id}, due was {self._acked}")
        self._acked += 1
        self._client._answered(self.connection, metadata if self._acked == 1 else ())
        self._on_ack(batch_ack(answer.ack))


class _BrokenContract(Exception):
    """An answer that the contract does not allow."""


def _now(ready):
    """The result of a coroutine that has nothing to wait for."""
    try:
        ready.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the status of a call that has ended was not there")


class Session:
    """Pipelined batches, acked in order. An async context manager; leaving it waits for all acks.

    The first failure ends it. Acks before it are delivered, the failing request gets its
    error, the later ones EarlierFailure: not applied, or unknown if the failure's outcome is.
    `send` from then on and leaving raise the first failure itself, even if a caller has
    handled the error of an awaited ack.
    """

    def __init__(self, client: Client, window_bytes: int):
        self._window = window_bytes
        self._in_flight = 0
        self._unacked: deque[tuple[int, asyncio.Future[BatchAck]]] = deque()
        self._turn = asyncio.Lock()
        self._room = asyncio.Event()
        self._closed = False
        self._failed_requests = False
        self.error: WaldError | None = None
        """The failure that ended it."""
        self._stream = AppendStream(client, self._on_ack, self._on_end)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, kind, raised, _) -> None:
        if kind is None:
            await self.close()
            return
        self.abort()
        raise_first(self.error, raised)

    async def send(
        self,
        batches: Iterable[LogBatch],
        *,
        checks: Iterable[Check] = (),
        cursors: Iterable[CursorCommit] = (),
        durability: Durability | None = None,
    ) -> asyncio.Future[BatchAck]:
        """Sends one request, as `append_batch` would, and returns the future of its ack. Waits while the
        window is full. Once the session has failed it sends nothing, and raises that failure."""
        request = batch_request(batches, checks, cursors, durability)
        size = request.ByteSize()
        async with self._turn:
            while not self._closed and self._unacked and self._in_flight + size > self._window:
                self._room.clear()
                await self._room.wait()
            if self.error is not None:
                raise self.error
            if self._closed:
                raise RuntimeError("the session is closed")
            future: asyncio.Future[BatchAck] = asyncio.get_running_loop().create_future()
            self._unacked.append((size, future))
            self._in_flight += size
            self._stream.send(request)
            return future

    async def close(self) -> None:
        """Sends no more, and waits for every ack due. Raises the failure that ended the session, if
        requests failed with it."""
        if not self._closed:
            self._closed = True
            self._room.set()
            self._stream.half_close()
        try:
            await asyncio.shield(self._stream.ended)
        except asyncio.CancelledError:
            self.abort()
            raise
        if self.error is not None and self._failed_requests:
            raise self.error

    def abort(self) -> None:
        """Breaks the session off. Requests without an ack have an unknown outcome."""
        if not self._stream.ended.done():
            self._stream.cancel()
            self._on_end(connection_lost("the session was broken off"), len(self._unacked))

    def _on_ack(self, ack: BatchAck) -> None:
        size, future = self._unacked.popleft()
        self._in_flight -= size
        self._room.set()
        if not future.done():
            future.set_result(ack)

    def _on_end(self, error: WaldError | None, handed: int) -> None:
        self._closed = True
        self._room.set()
        self.error = error
        self._failed_requests = error is not None and bool(self._unacked)
        for index, (_, future) in enumerate(self._unacked):
            applied = error.outcome if index < handed else Outcome.NOT_APPLIED
            first = index == 0 and handed > 0
            fail(future, error if first else EarlierFailure.of(error, applied))
        self._unacked.clear()


def raise_first(error: WaldError | None, raised: BaseException) -> None:
    """Raises the error that ended a session or producer instead of its consequence, which
    only points at it."""
    if error is not None and isinstance(raised, EarlierFailure) and raised.__cause__ is error:
        raise error from None


def fail(future: asyncio.Future, error: WaldError) -> None:
    """Gives a future its error. A caller that does not look gets the error when the session
    or producer is closed."""
    if not future.done():
        future.set_exception(error)
        future.exception()
