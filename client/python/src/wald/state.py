"""State that a program keeps over its restarts."""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections.abc import Callable
from typing import IO, Any, Protocol, TypeVar, Union

from wald.errors import StateError
from wald.v1 import state_pb2

try:
    import fcntl
except ImportError:
    # Windows has none.
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")
M = TypeVar("M", state_pb2.ProducerState, state_pb2.FollowerState)

_KINDS = {
    state_pb2.ProducerState: (state_pb2.STATE_KIND_PRODUCER, "a producer"),
    state_pb2.FollowerState: (state_pb2.STATE_KIND_FOLLOWER, "a follower"),
}


class State(Protocol):
    """The place of the state of one producer or one follower: a file (`FileState`), or a row in the database of
    the program.

    The calls come one after another, on threads that may block. An exception of a call becomes the cause of a
    StateError. The bytes are a message of the contract: `ProducerState` or `FollowerState` of `wald.v1.state_pb2`.

    One producer or follower may use it at a time, in all processes. `load` is the first call, and should refuse a
    second user. A State may also have a method `close()`: it is the last call, when the producer or follower is
    closed, and comes only if `load` has succeeded.
    """

    def load(self) -> bytes | None:
        """The state that was kept last; None if none was."""
        ...

    def save(self, state: bytes) -> None:
        """Keeps this state instead of the one before: all of it or nothing, over a crash of the machine, too, once
        this has returned."""
        ...


def lock_for_java(file: IO[bytes]) -> None:
    """Also takes the kind of lock that sees the locks of Java, which has only fcntl. Raises BlockingIOError or
    PermissionError if a Java program has the file.

    This kind belongs to the open file, as that of flock does: a close of the file elsewhere in the process does not
    release it. A kernel or file system without it is no error, because the lock of flock is held then.
    """
    command = getattr(fcntl, "F_OFD_SETLK", None)
    if command is None or sys.platform != "linux":
        return
    try:
        # struct flock: kind, base, start, length (0: the whole file), process (0).
        fcntl.fcntl(file, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except (BlockingIOError, PermissionError):
        raise
    except OSError:
        pass


class FileState:
    """State in a file, which only its owner can read.

    One process may use it at a time, and one producer or follower in it. `load` locks the file `path + ".lock"`, which
    stays, and raises BlockingIOError if it is locked; `close` unlocks it. The end of the process unlocks it, too. The
    lock is `flock`, so there is none on Windows, and on a network file system only if that has it. On Linux a lock of
    `fcntl` keeps programs in Java out, too.

    Each save writes a new file next to it, flushes it, and renames it. If the path is a symbolic link, all of this
    concerns the file that the link names, and the link stays. The directory must exist. All calls raise OSError.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._lock: IO[bytes] | None = None

    def load(self) -> bytes | None:
        # Otherwise a save would replace a link, and users of different names would have different locks.
        self.path = os.path.realpath(self.path)
        lock = self._locked()
        try:
            with open(self.path, "rb") as file:
                found: bytes | None = file.read()
        except FileNotFoundError:
            found = None
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        self._lock = lock
        return found

    def close(self) -> None:
        """Unlocks it. It may be loaded again then."""
        if self._lock is not None:
            # Closing the file unlocks it.
            self._lock.close()
            self._lock = None

    def _locked(self) -> IO[bytes] | None:
        if fcntl is None:
            return None
        path = self.path + ".lock"
        # A new open file each time: the lock then refuses a second user in this process, too.
        lock = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock_for_java(lock)
        except (BlockingIOError, PermissionError) as error:
            lock.close()
            raise BlockingIOError(error.errno, "another process or producer uses it", path) from None
        except BaseException:
            lock.close()
            raise
        return lock

    def save(self, state: bytes) -> None:
        try:
            self._replace(state)
        except OSError as error:
            # Errors of writes and flushes have no path of their own.
            raise OSError(error.errno, error.strerror, self.path) from error

    def _replace(self, state: bytes) -> None:
        new = self.path + ".new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
        with open(os.open(new, flags, 0o600), "wb") as file:
            file.write(state)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path)
        # Only POSIX can flush a directory.
        if os.name == "posix":
            directory = os.open(os.path.dirname(self.path) or ".", os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)


StateOrPath = Union[State, str, "os.PathLike[str]"]


class KeptState:
    """A state that is loaded, saved and closed off the event loop."""

    def __init__(self, state: StateOrPath):
        self._state: State = FileState(state) if isinstance(state, (str, os.PathLike)) else state
        self._turn = asyncio.Lock()
        self._underway: asyncio.Future[Any] | None = None
        # It was loaded, so this one may close it.
        self._is_held = False
        self._closing: asyncio.Task[None] | None = None

    async def load(self, message: type[M]) -> M | None:
        """The message that was kept last. Raises StateError."""

        def load() -> bytes | None:
            found = self._state.load()
            # Noted on the thread, because the caller may be cancelled meanwhile.
            self._is_held = True
            return found

        found = await self._work(load)
        if found is None:
            return None
        kind, owner = _KINDS[message]
        try:
            state = message.FromString(found)
        except Exception as error:
            raise failed(f"it is not the state of {owner}: {error}") from error
        if state.kind != kind:
            # The kind is the last field: a state that was cut off has none.
            raise failed(f"it is not the state of {owner}")
        return state

    async def save(self, message: state_pb2.ProducerState | state_pb2.FollowerState) -> None:
        """Keeps a message. Raises StateError, and RuntimeError once it is closed. A caller that is cancelled does not
        learn whether it is kept."""
        if self._closing is not None:
            raise RuntimeError("the producer or follower is closed")
        state = message.SerializeToString()
        await self._work(lambda: self._state.save(state))

    async def settled(self) -> None:
        """Waits for all calls until now, also if their callers were cancelled."""
        async with self._turn:
            await self._idle()

    async def close(self) -> None:
        """Takes no more, waits for all calls until now, and lets the next user in, also if its caller is cancelled.
        Raises StateError."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self.settled()
        close = getattr(self._state, "close", None)
        if self._is_held and close is not None:
            await self._work(close)

    async def _idle(self) -> None:
        """Waits for the call of a caller that was cancelled."""
        if self._underway is not None:
            await asyncio.wait([self._underway])

    async def _work(self, work: Callable[[], T]) -> T:
        async with self._turn:
            await self._idle()
            # A thread goes on when its caller is cancelled, and two threads must not write at once.
            self._underway = underway = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(underway)
            except Exception as error:
                raise failed(str(error) or type(error).__name__) from error


def failed(detail: str) -> StateError:
    """The error of a state."""
    return StateError(f"state: {detail}")
