"""The event loop under `wald.sync`, and the waits of its callers.

```text
 threads of the program            the thread of the client
   append ── function ────────────▶ event loop ──▶ wald.Client
     └─ waits ◀── result, error ───────┘
```

`sync.py` has the methods; it is generated from the asyncio client. This module has the common part: where a coroutine runs, how a
caller waits for it, and the end of both.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import grpc.aio

from wald.client import Client as AsyncClient
from wald.durable_follower import DurableFollower as AsyncDurableFollower
from wald.errors import connection_lost
from wald.records import LogBatch, Record
from wald.scan import Scan as AsyncScan
from wald.times import Seconds, to_seconds

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, Self

    P = ParamSpec("P")

T = TypeVar("T")
A = TypeVar("A")
S = TypeVar("S", bound="AsyncScan | AsyncDurableFollower")

# Maximum wait for the end of a call whose caller was interrupted.
_CANCEL_SECONDS = 1.0
# Maximum wait for the end of a client that the program did not close.
_ABANDONED_SECONDS = 2.0
# The end of an iterator: StopIteration cannot leave a coroutine.
_END = object()
# The process in which the first loop of this module began; its children inherit the value.
_grpc_began_in: int | None = None


class Future(concurrent.futures.Future[T]):
    """The ack of a request that was sent. `result` waits for it; `concurrent.futures.wait` and `as_completed` take it.

    Callbacks of `add_done_callback` run on the thread of the client: they must be short, and cannot call the client.
    `cancel` returns False, because a request that was sent cannot be called back.
    """

    def __init__(self, loop: Loop, keeps: object) -> None:
        super().__init__()
        self.__loop = loop
        # An unreferenced client ends, and this needs it.
        self.__keeps = keeps
        self.set_running_or_notify_cancel()

    def result(self, timeout: Seconds | None = None) -> T:
        """The ack. Blocks until it comes, or for `timeout` seconds, and raises TimeoutError then; the request stays
        underway. Raises the error of the request."""
        self._refuse_to_wait()
        try:
            return super().result(None if timeout is None else to_seconds(timeout))
        except concurrent.futures.TimeoutError:
            # Before Python 3.11 it is another class.
            if self.done():
                raise
            raise TimeoutError("the ack did not come in time") from None

    def exception(self, timeout: Seconds | None = None) -> BaseException | None:
        """The error of the request; None if it is acked. Blocks as `result` does."""
        self._refuse_to_wait()
        try:
            return super().exception(None if timeout is None else to_seconds(timeout))
        except concurrent.futures.TimeoutError:
            raise TimeoutError("the ack did not come in time") from None

    def _refuse_to_wait(self) -> None:
        if not self.done():
            self.__loop.refuse_to_wait()


class Loop:
    """An event loop on a thread of its own, which begins with the first call. It belongs to one client."""

    def __init__(self, began: Callable[[], None]) -> None:
        # Called once on the loop, in the first call.
        self._began = began
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process: int | None = None
        self._has_begun = False
        self.closed = False
        self._ended = False
        self._ending: asyncio.Task[None] | None = None
        # Calls whose callers wait, and acks that did not come yet.
        self._waits: set[concurrent.futures.Future[Any]] = set()
        self._futures: weakref.WeakSet[Future[Any]] = weakref.WeakSet()

    @property
    def forked(self) -> bool:
        """This process is a child of the one that the loop runs in."""
        return self._process is not None and self._process != os.getpid()

    def refuse_to_wait(self) -> None:
        """Raises RuntimeError if this caller must not wait for the loop."""
        if self.forked:
            raise RuntimeError(
                f"this client was used in process {self._process}, before a fork: gRPC does not survive that;"
                " make and use clients in the child only"
            )
        if threading.current_thread() is self._thread:
            raise RuntimeError("this is the thread of the client: a callback that waits for the client would wait for itself")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        if not _in_notebook():
            raise RuntimeError(
                "this thread runs an event loop, which a call of wald.sync would block:"
                " use wald.Client with await, or asyncio.to_thread"
            )

    def _open(self, outcome: concurrent.futures.Future[Any]) -> asyncio.AbstractEventLoop:
        """The loop, on which this call will run; begins it if there is none."""
        global _grpc_began_in
        self.refuse_to_wait()
        with self._lock:
            if self.closed:
                raise RuntimeError("the client is closed")
            if self._loop is not None:
                self._waits.add(outcome)
                return self._loop
            if _grpc_began_in not in (None, os.getpid()):
                raise RuntimeError(
                    f"process {_grpc_began_in} used a client, and was forked to this one: gRPC does not survive that;"
                    " use the first client after the fork, or start processes by spawn"
                )
            _grpc_began_in = self._process = os.getpid()
            loop = asyncio.new_event_loop()
            loop.set_exception_handler(_without_noise)
            self._thread = threading.Thread(target=self._run, args=(loop,), name="wald.sync", daemon=True)
            self._thread.start()
            self._loop = loop
            self._waits.add(outcome)
            return loop

    def wait(
        self,
        function: Callable[[], Awaitable[T]],
        timeout: float | None = None,
        take_back: Callable[[T], None] | None = None,
    ) -> T:
        """Runs a function on the loop, and waits for its result. KeyboardInterrupt, and every other exception that a signal
        raises in the wait, cancels the call. Raises TimeoutError after `timeout` seconds. `take_back` gets a result that
        no caller gets."""
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        loop = self._open(outcome)
        tasks: list[asyncio.Task[None]] = []

        async def run() -> None:
            try:
                if not self._has_begun:
                    self._began()
                    self._has_begun = True
                value = await function()
            except asyncio.CancelledError:
                # Only the end of the client cancels a call whose caller still waits.
                fail(connection_lost("the client was closed"))
            except BaseException as error:
                fail(error)
            else:
                if outcome.set_running_or_notify_cancel():
                    outcome.set_result(value)
                elif take_back is not None:
                    take_back(value)

        def fail(error: BaseException) -> None:
            if outcome.set_running_or_notify_cancel():
                outcome.set_exception(error)

        def begin() -> None:
            if not self._ended:
                tasks.append(loop.create_task(run()))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        try:
            self._hand_over(loop, begin)
            error = outcome.exception(timeout)
            if error is None:
                return outcome.result()
        except BaseException as interruption:
            if not outcome.done():
                self._hand_over(loop, cancel)
                # A second interruption ends this wait.
                concurrent.futures.wait([outcome], _CANCEL_SECONDS)
            # From here on `run` takes a result back.
            came = not outcome.cancel() and outcome.exception() is None
            if isinstance(interruption, concurrent.futures.TimeoutError):
                if came:
                    return outcome.result()
                raise TimeoutError("nothing came in time") from None
            if came and take_back is not None:
                self._hand_over(loop, take_back, outcome.result())
            raise
        finally:
            self._waits.discard(outcome)
        try:
            raise error
        finally:
            # A traceback that refers to itself would keep its frames.
            del error

    def _hand_over(self, loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # Closed meanwhile.
            raise RuntimeError("the client is closed") from None

    def post(self, function: Callable[[], object]) -> None:
        """Runs a function on the loop soon. Does nothing if the loop has ended, or runs in another process."""
        loop = self._loop
        if loop is not None and not self.closed and not self.forked:
            try:
                loop.call_soon_threadsafe(function)
            except RuntimeError:
                pass

    def future_of(self, ack: asyncio.Future[T], keeps: object) -> Future[T]:
        """The future of an ack, for other threads. Called on the loop."""
        future: Future[T] = Future(self, keeps)
        self._futures.add(future)

        def done(ack: asyncio.Future[T]) -> None:
            if future.done():
                return
            error = connection_lost("the client was closed") if ack.cancelled() else ack.exception()
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(ack.result())

        ack.add_done_callback(done)
        return future

    def close(self, last: Callable[[], Awaitable[None]], patience: float | None = None) -> None:
        """Runs `last` on the loop, cancels all calls, and ends the thread. Waits for it, at most `patience` seconds."""
        with self._lock:
            first, self.closed = not self.closed, True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return

        async def end() -> None:
            try:
                await last()
            finally:
                await self._end()
                loop.stop()

        def begin() -> None:
            self._ending = loop.create_task(end())

        if first:
            loop.call_soon_threadsafe(begin)
        if threading.current_thread() is not thread:
            thread.join(patience)

    async def _end(self) -> None:
        self._ended = True
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for future in list(self._futures):
            if not future.done():
                future.set_exception(connection_lost("the client was closed"))
        loop = asyncio.get_running_loop()
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread."""
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()
            for outcome in list(self._waits):
                # Handed over when the loop was about to end. The caller may give up meanwhile.
                if not outcome.done() and outcome.set_running_or_notify_cancel():
                    outcome.set_exception(RuntimeError("the client is closed"))


def _without_noise(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Before grpcio 1.85 each of several loops in a process logs an error if another one has read an event first. In all versions a
    loop logs an error if it reads the last event of a loop that was closed, such as the end of a stream."""
    error = context.get("exception")
    late = isinstance(error, RuntimeError) and "PollerCompletionQueue" in str(context.get("handle"))
    if not late and not isinstance(error, BlockingIOError):
        loop.default_exception_handler(context)


def _in_notebook() -> bool:
    """IPython runs cells on a thread with an event loop, which every cell blocks."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class Part(Generic[A]):
    """An object of the asyncio client, used from other threads."""

    def __init__(self, client: BlockingClient, inner: A) -> None:
        self._client = client
        self._inner = inner

    @property
    def _loop(self) -> Loop:
        return self._client._loop

    def _wait(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a coroutine function, called on the loop."""
        return self._loop.wait(lambda: function(*args, **kwargs))

    def _wait_for_future(
        self, function: Callable[P, Awaitable[asyncio.Future[T]]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """The future that a coroutine function returns."""

        async def send() -> Future[T]:
            return self._loop.future_of(await function(*args, **kwargs), self._client)

        return self._loop.wait(send)

    def _call_unless_closed(self, function: Callable[[], None]) -> None:
        """Calls a function on the loop. Without a client there is nothing left to end."""
        if self._loop.closed or self._loop.forked:
            return

        async def call() -> None:
            function()

        self._loop.wait(call)

    def _leave(
        self, leave: Callable[..., Awaitable[None]], kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves a context. Does nothing in a child process; the parent has the object, too."""
        if self._loop.forked or (raised is not None and self._loop.closed):
            return
        self._wait(leave, kind, raised, trace)


async def _next_of(items: Any, turn: asyncio.Lock) -> object:
    """The next item, or _END. Several threads may iterate: each item goes to one of them."""
    async with turn:
        try:
            return await items.__anext__()
        except StopAsyncIteration:
            return _END


class _Raised:
    """An error in the place of an item. It must come to a caller, as an item must."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class BlockingIterator(Part[S], Generic[S, T]):
    """An iterator over a scan, which any thread can close."""

    def __init__(self, client: BlockingClient, inner: S) -> None:
        super().__init__(client, inner)
        self._ended = False
        # Calls underway, which the end of the iterator ends.
        self._underway: set[asyncio.Task[Any]] = set()
        self._turn = asyncio.Lock()
        # Errors that no caller got.
        self._missed: deque[_Raised] = deque()
        client._iterators.add(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        return self.next()

    def next(self, timeout: Seconds | None = None) -> T:
        """The next item. Blocks until it comes. Raises TimeoutError after `timeout` seconds, which loses nothing: call it
        again. Raises StopIteration at the end, and once another thread has closed this."""
        before = self._inner.cursor if isinstance(self._inner, AsyncScan) else None
        item = self._loop.wait(
            lambda: self._until_ended(self._item),
            None if timeout is None else to_seconds(timeout),
            lambda item: self._take_back(item, before),
        )
        if item is _END:
            raise StopIteration
        if isinstance(item, _Raised):
            try:
                raise item.error
            finally:
                # A traceback that refers to itself would keep its frames.
                del item
        return cast(T, item)

    async def _item(self) -> object:
        """The next item, _END, or an error in its place."""
        if self._missed:
            return self._missed.popleft()
        try:
            return await self._step()
        except Exception as error:
            return _Raised(error)

    async def _step(self) -> object:
        return await _next_of(self._inner, self._turn)

    def _take_back(self, item: object, before: bytes | None) -> None:
        """Hands an item out again that no caller got."""
        if isinstance(item, _Raised):
            self._missed.append(item)
        elif item is not _END:
            self._inner._take_back(cast(Any, item), before)

    async def _until_ended(self, step: Callable[[], Awaitable[object]]) -> object:
        """Makes a step, which the end of the iterator ends."""
        if self._ended:
            return _END
        task = asyncio.current_task()
        assert task is not None
        self._underway.add(task)
        try:
            return await step()
        except asyncio.CancelledError:
            if not self._ended:
                raise
            return _END
        finally:
            self._underway.discard(task)

    def _end(self) -> None:
        """Ends it, and the waits for it. Called on the loop."""
        self._ended = True
        for task in self._underway:
            task.cancel()
        scan = self._inner if isinstance(self._inner, AsyncScan) else self._inner._scan
        scan.close()

    def __del__(self) -> None:
        # A loop over it that ended early leaves no stream behind.
        client = getattr(self, "_client", None)
        if client is not None and not self._ended:
            inner = self._inner
            client._loop.post(inner.close if isinstance(inner, AsyncScan) else inner._scan.close)


class Listing(Generic[T]):
    """An iterator over a list of the server, which it reads page by page. Each page blocks for at most the `timeout` of the
    call (default: that of the client). `close`, and leaving its `with`, end it."""

    def __init__(self, loop: Loop, items: AsyncIterator[T]) -> None:
        self._loop = loop
        self._items = items
        self._turn = asyncio.Lock()
        self._ended = False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        item = self._loop.wait(self._step)
        if item is _END:
            raise StopIteration
        return cast(T, item)

    async def _step(self) -> object:
        return await _next_of(self._items, self._turn)

    def close(self) -> None:
        """Ends it: no further page is read."""
        self._ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class BlockingClient:
    """The event loop and the end of a client."""

    _inner: AsyncClient
    _loop: Loop

    def _begin(self, inner: AsyncClient, channel: Callable[[], grpc.aio.Channel] | None) -> None:
        def began() -> None:
            if channel is not None:
                inner._own = channel()

        async def last() -> None:
            await inner.close(0)

        self._inner = inner
        self._loop = Loop(began)
        self._makes_channel = channel is not None
        self._iterators: weakref.WeakSet[BlockingIterator[Any, Any]] = weakref.WeakSet()
        # If the program does not close the client: when it is collected, or the program ends.
        self._abandoned = weakref.finalize(self, _abandon, self._loop, last)

    def __enter__(self) -> Self:
        self._loop.refuse_to_wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self, grace: Seconds | None = 10.0) -> None:
        """Ends the connections, and the thread of the client. Calls underway have `grace` seconds to end, and this blocks
        until they have ended. Scans and followers end at once; sessions and producers should have been closed before."""
        if self._loop.forked:
            # The connections are the parent's.
            self._inner._closed = True
            return
        if not self._loop.closed:
            self._loop.refuse_to_wait()
        self._loop.close(lambda: self._close(grace))
        self._inner._closed = True
        self._abandoned.detach()

    async def _close(self, grace: Seconds | None) -> None:
        for iterator in list(self._iterators):
            iterator._end()
        await self._inner.close(grace)
        if self._makes_channel and isinstance(self._inner._own, grpc.aio.Channel):
            await self._inner._own.close(None if grace is None else to_seconds(grace))

    def run(self, function: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Calls a function with the asyncio client on the event loop of this client, and blocks until its awaitable is done.
        It reaches generated stubs: `client.run(lambda client: client.ops.GetServerInfo(request))`."""

        async def call() -> T:
            return await function(self._inner)

        return self._loop.wait(call)

    def _wait(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.wait(lambda: function(*args, **kwargs))

    def _make(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a plain function on the loop, to which its result belongs."""

        async def call() -> T:
            return function(*args, **kwargs)

        return self._loop.wait(call)


def _abandon(loop: Loop, last: Callable[[], Awaitable[None]]) -> None:
    if not loop.forked:
        loop.close(last, _ABANDONED_SECONDS)


def taken(items: Iterable[T]) -> Iterable[T]:
    """These items as a list, so that a generator of the program runs on its own thread. One record in place of many is
    refused later."""
    if isinstance(items, (str, bytes, bytearray, memoryview, Record)):
        return cast("Iterable[T]", items)
    return [_taken_batch(item) for item in items]


def _taken_batch(item: T) -> T:
    if isinstance(item, LogBatch):
        return cast(T, replace(item, records=taken(item.records)))
    return item
