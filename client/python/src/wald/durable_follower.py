"""A follower that goes on after a restart of its program."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from wald.errors import RecordsMissing
from wald.records import Batch, Gap
from wald.state import KeptState, StateOrPath
from wald.v1 import state_pb2

if TYPE_CHECKING:
    from wald.scan import Scan


class DurableFollower:
    """Follows logs over restarts of the server **and of the program**; see `Client.durable_follower`. It keeps the
    effects of records together with the cursor behind them, so each record takes effect once.

    An async context manager: entering loads the state and opens the scan, leaving closes it. An async iterator: each
    step yields the next batches, all up to a cursor. Records that are missing, because retention or a loss took them,
    raise RecordsMissing; the next step goes on behind them. Any other error ends it.

    The effects are bytes in a form of the program's own, and each `keep` writes all of them. A program whose effects are
    in a database stores `cursor` in the same transaction instead, and begins with `client.follow(..., cursor=...)`.

    Without a state it begins as the arguments say. A start at the tail therefore holds only from the first `keep` on: a
    program that ends before it begins at a later tail the next time, and skips the records in between.

    One follower may use a state at a time, in all processes. The lock of FileState refuses a second one (StateError)
    until the first one is closed.
    """

    def __init__(self, scan: Scan, state: StateOrPath):
        self._scan = scan
        self._state = KeptState(state)
        self._begun = False
        self._opened = False
        self._effects: bytes | None = None
        # The parts of the last event that were not handed out yet.
        self._gaps: deque[Gap] = deque()
        self._batches: tuple[Batch, ...] = ()
        # The cursor before the last event, in force until the caller has all of the event.
        self._before: bytes | None = None
        self._is_partial = False

    async def __aenter__(self) -> DurableFollower:
        await self.open()
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def open(self) -> None:
        """Loads the state, and connects. `async with` does it. Raises StateError if the state cannot be read, or is
        used by another follower."""
        if self._begun:
            raise RuntimeError("the follower was opened before")
        self._begun = True
        try:
            found = await self._state.load(state_pb2.FollowerState)
            if found is not None:
                self._effects = found.effects
                if found.cursor:
                    self._scan._begin_behind(found.cursor)
            await self._scan.open()
            self._opened = True
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends it. The state has the effects that were kept last."""
        self._scan.close()
        # The next follower may use this state at once.
        await self._state.close()

    @property
    def effects(self) -> bytes | None:
        """The effects that were kept last; None if there are none yet."""
        self._refuse_if_not_open()
        return self._effects

    @property
    def cursor(self) -> bytes | None:
        """Resumes behind the last record that was handed out. None before the first record of all runs."""
        self._refuse_if_not_open()
        return self._before if self._is_partial else self._scan.cursor

    def __aiter__(self) -> DurableFollower:
        return self

    async def __anext__(self) -> tuple[Batch, ...]:
        self._refuse_if_not_open()
        while True:
            if self._gaps:
                raise RecordsMissing(self._gaps.popleft())
            self._is_partial = False
            if self._batches:
                batches, self._batches = self._batches, ()
                return batches
            before = self._scan.cursor
            event = await anext(self._scan)
            self._gaps.extend(event.gaps)
            self._batches = event.batches
            self._before, self._is_partial = before, True

    def _take_back(self, batches: tuple[Batch, ...], _: bytes | None) -> None:
        """Hands batches out again that no caller got."""
        if not self._batches and not self._is_partial:
            self._batches, self._is_partial = batches, True

    async def keep(self, effects: bytes | str) -> None:
        """Keeps the effects of all records that were handed out, together with their cursor; a str as UTF-8.
        Raises StateError; this state or the one before may be in force then."""
        state = state_pb2.FollowerState(
            cursor=self.cursor or b"",
            effects=effects.encode() if isinstance(effects, str) else effects,
            kind=state_pb2.STATE_KIND_FOLLOWER,
        )
        await self._state.save(state)
        self._effects = state.effects

    def _refuse_if_not_open(self) -> None:
        if not self._opened:
            raise RuntimeError("the follower is not open")
