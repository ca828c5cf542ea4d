"""State that a program keeps over its restarts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, Union

from google.protobuf.message import Message

from wald.errors import StateError

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class State(Protocol):
    """The place of the state of one producer or one follower: a file (`FileState`), or a row in the database of
    the program.

    The calls come one after another, on threads that may block. An exception of either becomes the cause of a
    StateError. The bytes are a message of the contract: `ProducerState` or `FollowerState` of `wald.v1.state_pb2`.
    """

    def load(self) -> bytes | None:
        """The state that was kept last; None if none was."""
        ...

    def save(self, state: bytes) -> None:
        """Keeps this state instead of the one before: all of it or nothing, over a crash of the machine, too, once
        this has returned."""
        ...


class FileState:
    """State in a file, which only its owner can read. One process may use it at a time.

    Each save writes a new file next to it, flushes it, and renames it. The directory must exist. Both calls raise
    OSError.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)

    def load(self) -> bytes | None:
        try:
            with open(self.path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

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
    """A state that is loaded and saved off the event loop."""

    def __init__(self, state: StateOrPath):
        self._state: State = FileState(state) if isinstance(state, (str, os.PathLike)) else state
        self._turn = asyncio.Lock()
        self._underway: asyncio.Future[Any] | None = None

    async def load(self, kind: type[M]) -> M | None:
        """The message that was kept last. Raises StateError."""
        found = await self._work(self._state.load)
        if found is None:
            return None
        try:
            message = kind()
            message.ParseFromString(found)
            return message
        except Exception as error:
            raise failed(f"it is not the state of a producer or follower: {error}") from error

    async def save(self, message: Message) -> None:
        """Keeps a message. Raises StateError. A caller that is cancelled does not learn whether it is kept."""
        state = message.SerializeToString()
        await self._work(lambda: self._state.save(state))

    async def settled(self) -> None:
        """Waits for the call of a caller that was cancelled."""
        if self._underway is not None:
            await asyncio.wait([self._underway])

    async def _work(self, work: Callable[[], T]) -> T:
        async with self._turn:
            await self.settled()
            # A thread goes on when its caller is cancelled, and two threads must not write at once.
            self._underway = underway = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(underway)
            except Exception as error:
                raise failed(str(error) or type(error).__name__) from error


def failed(detail: str) -> StateError:
    """The error of a state."""
    return StateError(f"state: {detail}")
