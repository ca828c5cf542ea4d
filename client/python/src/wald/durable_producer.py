"""A producer that goes on after a restart of its program.

```text
             kept, saved                 sent
 records ───────────────▶ [the state] ─────────▶ the producer
                            ▲      │                  │
                          load     └── taken off ◀── ack
```
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from wald.errors import EarlierFailure, Outcome, ProducerExpired, WaldError, connection_lost
from wald.producer import Producer
from wald.records import Durability, LogAck, Record, records_to_proto
from wald.session import raise_first
from wald.state import KeptState, StateOrPath, failed
from wald.v1 import state_pb2

if TYPE_CHECKING:
    from wald.client import Client

# Most batches that are kept and not acked. Each save writes all of them.
_BATCHES_KEPT = 64


class DurableProducer:
    """Appends to one log exactly once, over restarts of the server **and of the program**; see
    `Client.durable_producer`. An async context manager: entering makes the log if there is none, and sends the
    batches in doubt again; leaving waits until everything is acked.

    Each batch is kept in the state before it is sent. Once `append_batch` has returned, the batch will be in the log
    once, and in its place: if the program ends before the ack, the next durable producer with this state sends it
    again. `next_sequence` says where the program goes on in its own input.

    A save costs about two flushes of the state's device, so larger batches go faster. **A failure ends the producer**:
    the call that meets it and leaving raise it, and other calls raise EarlierFailure. A batch that the server refuses
    for good, such as one with a record that is too large, stays in the state, and every later start fails with it:
    check the size of records before.

    An ack counts at the durability that the log or the argument `durability` asks for. With less than DURABLE a crash
    of the server can lose acked batches, which the state does not have any more; the producer is then refused
    (ProducerGap), unless the server has also forgotten it since: the new epoch begins behind the hole, and nobody notices.

    The server forgets a producer that has been idle for longer than `producer_max_idle` (7 days unless configured
    otherwise). If no batch is in doubt, the producer goes on in a new epoch, and nobody notices. If the state has
    batches that an earlier run may have appended, nobody can tell whether they are in the log, and every start is
    refused (ProducerExpired) until somebody decides it with `walctl state settle`. For the same reason, never go back
    to an old copy of a state.

    One producer may use a state at a time, in all processes: a second one would send other batches with the same
    sequences. The lock of FileState refuses it (StateError) until the first one is closed.
    """

    def __init__(
        self,
        client: Client,
        log: str,
        state: StateOrPath,
        *,
        writer_epoch: int | None,
        durability: Durability | None,
        retry_for: float,
        window_bytes: int,
    ):
        self._client = client
        self._state = KeptState(state)
        self._writer_epoch = writer_epoch
        self._durability = durability
        self._retry_for = retry_for
        self._window_bytes = window_bytes
        self.log = log
        self.error: WaldError | None = None
        """The failure that ended it for good."""

        self._producer: Producer | None = None
        # The batches without a known ack, the first of them not yet taken off after its ack.
        self._kept = state_pb2.ProducerState()
        # Number of batches at the beginning of the state that an earlier run may have sent.
        self._loaded = 0
        # Sequences of the first and of the next batch in the state that was saved last.
        self._saved = (0, 0)
        # Acks of the first batches of the state: those that were sent.
        self._acks: deque[asyncio.Future[LogAck]] = deque()
        # One caller at a time, so that order of calls is order of batches.
        self._turn = asyncio.Lock()
        self._begun = False
        self._opened = False
        self._closed = False

    async def __aenter__(self) -> DurableProducer:
        await self.open()
        return self

    async def __aexit__(self, kind, raised, _) -> None:
        if kind is None:
            await self.close()
            return
        await self._stop()
        raise_first(self.error, raised)

    async def open(self) -> None:
        """Goes on as the producer of the state; without a state begins as a new one, and saves it. `async with` does
        it. Raises StateError if the state cannot be read or saved, belongs to another log, or is used by another
        producer."""
        if self._begun or self._closed:
            raise RuntimeError("the producer was opened before")
        self._begun = True
        try:
            found = await self._state.load(state_pb2.ProducerState)
            if found is not None and (found.log != self.log or not found.id):
                raise failed(f"it is the state of a producer of the log {found.log!r}, not of {self.log!r}")
            producer = self._producer_of(found)
            self._producer = producer
            await producer.open()
            self._refuse_if_closed()
            producer._keep_id()
            if found is None:
                self._kept = state_pb2.ProducerState(
                    log=self.log,
                    log_id=producer.log_id,
                    id=producer.id,
                    epoch=producer.epoch,
                    kind=state_pb2.STATE_KIND_PRODUCER,
                )
                # Before the first batch: without it the next start would be another producer.
                await self._save()
            else:
                self._kept = found
                self._loaded = len(found.batches)
                if found.batches:
                    # The save of the last run may have ended between its rename and the flush of the directory.
                    await self._save()
                self._saved = self._span
            await self._send_kept()
            self._opened = True
        except BaseException:
            await self._stop()
            raise

    def _producer_of(self, found: state_pb2.ProducerState | None) -> Producer:
        return self._client.producer(
            self.log,
            id=None if found is None else found.id,
            epoch=None if found is None else found.epoch,
            sequence=0 if found is None else found.sequence,
            log_id=None if found is None else found.log_id,
            writer_epoch=self._writer_epoch,
            durability=self._durability,
            retry_for=self._retry_for,
            window_batches=_BATCHES_KEPT,
            window_bytes=self._window_bytes,
        )

    @property
    def id(self) -> str:
        """The producer's id, which stays over restarts. Raises RuntimeError before the producer is open."""
        self._refuse_if_not_open()
        return self._kept.id

    @property
    def log_id(self) -> int:
        """The log's number. Raises RuntimeError before the producer is open."""
        self._refuse_if_not_open()
        return self._kept.log_id

    @property
    def next_sequence(self) -> int:
        """Number of batches that it was given so far, in all runs of the program: the sequence of the next one. Raises
        RuntimeError before the producer is open."""
        self._refuse_if_not_open()
        return self._span[1]

    async def append_batch(self, records: Iterable[Record | bytes | str]) -> int:
        """Keeps these records as one batch, at least one, and sends them. Returns the sequence of the batch once it is
        kept and sent; the ack may come later. Waits while 64 batches are not acked.

        If it is cancelled, the batch is kept or not: `next_sequence` says so. A kept batch is sent by the next call.
        Raises EarlierFailure if an earlier batch has failed (`__cause__`), or if the producer is closed meanwhile: with
        outcome NOT_APPLIED this batch is not kept; with UNKNOWN it is kept, and the next start sends it. Raises
        StateError if this batch could not be kept, with outcome UNKNOWN, because the state may have it nevertheless;
        ValueError if there is no record.
        """
        protos = records_to_proto(records)
        if not protos:
            # The server would refuse it at every start.
            raise ValueError("a batch needs at least one record")
        async with self._turn:
            self._refuse_if_ended()
            try:
                await self._make_room()
            except WaldError as error:
                first = self.error or error
                raise EarlierFailure.of(first, Outcome.NOT_APPLIED) from first
            # It may have ended meanwhile.
            self._refuse_if_ended()
            sequence = self._span[1]
            self._kept.batches.add(records=protos)
            await self._save()
            try:
                await self._send_kept()
            except WaldError as error:
                # The batch is kept, so the next start sends it.
                raise EarlierFailure.of(error, Outcome.UNKNOWN) from error
            return sequence

    async def flush(self) -> None:
        """Waits for the acks of all batches. Raises the first failure."""
        async with self._turn:
            self._refuse_if_ended()
            await self._flush()

    async def _flush(self) -> None:
        while self._kept.batches:
            await self._send_kept()
            await self._take_ack()
        if self._saved != self._span:
            await self._save()

    async def close(self) -> None:
        """Waits for the acks of all batches, and takes no more. The next start goes on as the same producer. Raises the
        failure that ended the producer, if there was one."""
        try:
            async with self._turn:
                if self.error is not None:
                    raise self.error
                if not self._closed and self._opened:
                    await self._flush()
                    # Calls that wait for their turn come too late.
                    self._closed = True
                    assert self._producer is not None
                    await self._producer.close()
        finally:
            await self._stop()

    async def _stop(self) -> None:
        """Ends the session now. The state has the batches without an ack."""
        self._closed = True
        if self._producer is not None:
            self._producer.abort()
        # No call saves from now on, and the next producer may use this state at once.
        await self._state.close()

    @property
    def _span(self) -> tuple[int, int]:
        """The sequences of the first batch that is kept, and of the next one, over all epochs."""
        first = self._kept.earlier_batches + self._kept.sequence
        return first, first + len(self._kept.batches)

    def _is_full(self) -> bool:
        return len(self._kept.batches) >= _BATCHES_KEPT

    async def _make_room(self) -> None:
        """Takes the acks that have come, and waits until one more batch may be kept."""
        while self._acks and self._acks[0].done():
            self._taken()
        while self._is_full():
            # Calls that were cancelled, or an epoch that is over, may have left all of them.
            await self._send_kept()
            await self._take_ack()

    async def _take_ack(self) -> None:
        """Takes the next ack when it comes."""
        # Unlike an await of the future itself, this cancels no ack.
        await asyncio.wait([self._acks[0]])
        self._taken()

    def _taken(self) -> None:
        error = self._acks[0].exception()
        if error is None:
            self._acks.popleft()
            del self._kept.batches[0]
            self._kept.sequence += 1
            self._loaded = max(self._loaded - 1, 0)
            return
        epoch = self._next_epoch(error)
        if epoch is None:
            raise self._ended(error)
        self._begin_again(epoch)

    def _next_epoch(self, error: BaseException) -> int | None:
        """The epoch in which this producer goes on after the failure of its first batch in doubt. The server has
        forgotten the producer, and has applied none of the batches: each was sent once, and refused."""
        if not isinstance(error, ProducerExpired):
            return None
        applied_none = self._loaded == 0 and error.outcome is Outcome.NOT_APPLIED
        return error.number("first_epoch") if applied_none else None

    def _begin_again(self, epoch: int) -> None:
        """Begins a new epoch, whose batches are not sent yet."""
        self._acks.clear()
        self._kept.earlier_batches += self._kept.sequence
        self._kept.sequence = 0
        self._kept.epoch = epoch

    async def _save(self) -> None:
        span = self._span
        try:
            await self._state.save(self._kept)
        except WaldError as error:
            raise self._ended(error)
        self._saved = span

    async def _send_kept(self) -> None:
        """Sends the batches that were not sent, and saves them before."""
        if self._saved[1] < self._span[1]:
            await self._save()
        while len(self._acks) < len(self._kept.batches):
            assert self._producer is not None
            try:
                if self._producer.epoch != self._kept.epoch:
                    await self._save()
                    self._refuse_if_closed()
                    self._producer = self._producer_of(self._kept)
                    await self._producer.open()
                self._acks.append(await self._producer._send(self._kept.batches[len(self._acks)].records))
            except WaldError as error:
                if not self._acks:
                    raise self._ended(error)
                # The first failure is in an ack.
                await self._take_ack()
            except RuntimeError as error:
                # Closed meanwhile. This ends no producer: the next start sends the batches.
                raise connection_lost(str(error)) from error

    def _ended(self, error: BaseException) -> BaseException:
        """Notes the failure that ends the producer."""
        if self.error is None and isinstance(error, WaldError):
            self.error = error
        return error

    def _refuse_if_not_open(self) -> None:
        if not self._opened:
            raise RuntimeError("the producer is not open")

    def _refuse_if_ended(self) -> None:
        self._refuse_if_not_open()
        if self.error is not None:
            raise EarlierFailure.of(self.error, Outcome.NOT_APPLIED)
        self._refuse_if_closed()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the producer is closed")
