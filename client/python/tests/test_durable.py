"""Durable producers and followers: the end of a program at any moment, and its next start."""

import asyncio
import contextlib
import os
import stat
import sys
import threading

import pytest
from fake import DRAINING, LOST, REFUSED, Unanswered, expired, message, refusal, serving, turns, until
from grpc import StatusCode

import wald
from wald.v1 import record_pb2, state_pb2, types_pb2, wal_pb2

PRODUCER, FOLLOWER = state_pb2.STATE_KIND_PRODUCER, state_pb2.STATE_KIND_FOLLOWER
ProducerState, FollowerState = state_pb2.ProducerState, state_pb2.FollowerState
TOO_LARGE = refusal(StatusCode.INVALID_ARGUMENT, "RECORD_TOO_LARGE", {**REFUSED, "request_id": "0"})


class Memory:
    """A state that the next start of the program finds."""

    def __init__(self):
        self.state = None
        self.saves = 0
        self.fails = False
        self.calls = 0
        # Saves wait for it.
        self.open = threading.Event()
        self.open.set()

    def load(self):
        return self.state

    def save(self, state):
        self.calls += 1
        assert self.calls == 1, "two saves at once"
        try:
            assert self.open.wait(20)
            if self.fails:
                raise OSError("the disk is full")
            self.state = state
            self.saves += 1
        finally:
            self.calls -= 1

    def producer(self):
        return ProducerState.FromString(self.state)

    def follower(self):
        return FollowerState.FromString(self.state)


class Killed(Exception):
    """The end of a program."""


@contextlib.asynccontextmanager
async def life(durable):
    """A producer or follower whose program ends, whatever is underway."""
    with contextlib.suppress(Killed):
        async with durable:
            yield durable
            raise Killed


def numbers(*bounds):
    return [str(number) for number in range(*bounds)]


def sequences(fake):
    return [request.batch.batches[0].condition.producer.sequence for request in fake.attempts]


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_batches_in_doubt_are_sent_again_by_the_next_start():
    state = Memory()
    async with serving() as (fake, client):
        fake.first_producer_epoch = 7
        for start in range(0, 50, 5):
            # The server applies three batches of the five. This life sees no ack.
            fake.refuses = None
            async with life(client.durable_producer("log", state)) as producer:
                assert producer.next_sequence == start
                for number in range(start, start + 5):
                    if number == start + 3:
                        await until(lambda: len(fake.applied) == start + 3)
                        fake.refuses = LOST
                    assert await producer.append_batch([str(number)]) == number
        assert (len(state.producer().batches), len(fake.applied)) == (50 - state.producer().sequence, 48)
        assert state.producer().batches, "nothing was in doubt"
        fake.refuses = None
        async with client.durable_producer("log", state) as producer:
            name = producer.id
            # No call asks for it.
            await until(lambda: len(fake.applied) == 50)
        assert fake.data() == numbers(50)
        kept = state.producer()
        assert (kept.sequence, len(kept.batches), kept.id) == (50, 0, name)
        conditions = [request.batch.batches[0].condition for request in fake.attempts]
        assert {(c.producer.id, c.producer.epoch, c.log_id) for c in conditions} == {(name, 7, 42)}
        assert len(fake.attempts) > 50


async def test_random_id_is_not_forgotten_when_the_producer_is_closed():
    async with serving() as (fake, client):
        async with client.durable_producer("log", Memory()) as producer:
            await producer.append_batch(["a"])
        # The next start would be an unknown producer.
        assert fake.data() == ["a"] and fake.forgotten == []


async def test_state_is_saved_before_the_first_batch():
    state = Memory()
    async with serving() as (fake, client):
        fake.first_producer_epoch = 7
        async with life(client.durable_producer("log", state)) as producer:
            new = ProducerState(log="log", log_id=42, id=producer.id, epoch=7, kind=PRODUCER)
            assert state.state == new.SerializeToString()
            assert fake.attempts == []
            fake.open.clear()
            record = wald.Record("a", headers=[("k", b"v")], timestamp_us=5, crc32c=3)
            await producer.append_batch([record, "b"])
            first = record_pb2.Record(
                data=b"a", headers=[record_pb2.Header(key="k", value=b"v")], timestamp_us=5, crc32c=3
            )
            new.batches.add(records=[first, record_pb2.Record(data=b"b")])
            assert state.producer() == new
            fake.open.set()


async def test_first_state_that_cannot_be_saved_is_an_error():
    state = Memory()
    state.fails = True
    async with serving() as (fake, client):
        with pytest.raises(wald.StateError, match="the disk is full") as failed:
            async with client.durable_producer("log", state):
                pass
        assert isinstance(failed.value.__cause__, OSError)
        assert fake.attempts == []


async def test_state_keeps_at_most_64_batches():
    state = Memory()
    async with serving() as (fake, client):
        async with client.durable_producer("log", state) as producer:
            fake.open.clear()
            for number in range(64):
                await producer.append_batch([str(number)])
            waiting = asyncio.create_task(producer.append_batch(["64"]))
            done, _ = await asyncio.wait([waiting], timeout=0.05)
            assert not done
            await cancelled(waiting)
            assert producer.next_sequence == 64
            fake.open.set()
            for number in range(64, 300):
                await producer.append_batch([str(number)])
                assert len(state.producer().batches) <= 64
            await producer.flush()
            assert (state.producer().sequence, len(state.producer().batches)) == (300, 0)
        assert fake.data() == numbers(300)


async def test_state_of_another_log_is_refused():
    state = Memory()
    async with serving() as (fake, client):
        async with client.durable_producer("log", state):
            pass
        with pytest.raises(wald.StateError, match="of the log 'log', not of 'other'"):
            async with client.durable_producer("other", state):
                pass
        assert fake.attempts == []


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("producer", ProducerState(log="log", log_id=42, id="p", sequence=3, kind=PRODUCER)),
        ("follower", FollowerState(cursor=b"c", effects=b"e", kind=FOLLOWER)),
    ],
)
async def test_state_of_another_kind_or_cut_off_is_refused(kind, state):
    own, memory = state.SerializeToString(), Memory()
    others = [own[:length] for length in range(len(own))]
    others += [b"nonsense", b"\x0a\x00"]
    for other in sorted({0, PRODUCER, FOLLOWER, 3} - {state.kind}):
        state.kind = other
        others.append(state.SerializeToString())
    async with serving() as (fake, client):

        def durable():
            if kind == "producer":
                return client.durable_producer("log", memory)
            return client.durable_follower("log", state=memory)

        for memory.state in others:
            with pytest.raises(wald.StateError, match=f"^state: it is not the state of a {kind}"):
                async with durable():
                    pass
        assert fake.attempts == fake.scans == [] and memory.saves == 0
        memory.state = own
        async with durable():
            pass


async def test_batch_that_cannot_be_kept_is_not_sent_and_ends_the_producer():
    state = Memory()
    async with serving() as (fake, client):
        with pytest.raises(wald.StateError, match="the disk is full") as left:
            async with client.durable_producer("log", state) as producer:
                await producer.append_batch(["0"])
                state.fails = True
                with pytest.raises(wald.StateError, match="the disk is full") as failed:
                    await producer.append_batch(["1"])
                # A save that fails may have replaced the state nevertheless.
                assert failed.value.outcome is wald.Outcome.UNKNOWN
                state.fails = False
                for call in (producer.append_batch(["2"]), producer.flush()):
                    with pytest.raises(wald.EarlierFailure, match="the disk is full") as behind:
                        await call
                    assert behind.value.__cause__ is failed.value
        assert left.value is failed.value
        # The program gives the batch again, since its sequence is the next one.
        async with client.durable_producer("log", state) as producer:
            assert producer.next_sequence == 1
            await producer.append_batch(["1"])
        assert fake.data() == ["0", "1"]


async def test_refused_batch_ends_the_producer_and_stays_in_the_state():
    state = Memory()
    async with serving() as (fake, client):
        for _ in range(2):
            fake.script.append(TOO_LARGE)
            with pytest.raises(wald.InvalidRequest):
                async with client.durable_producer("log", state) as producer:
                    if producer.next_sequence == 0:
                        await producer.append_batch(["x"])
                    with pytest.raises(wald.InvalidRequest) as failed:
                        await producer.flush()
                    with pytest.raises(wald.EarlierFailure) as behind:
                        await producer.append_batch(["y"])
                    assert behind.value.__cause__ is failed.value
        kept = state.producer()
        assert [batch.records[0].data for batch in kept.batches] == [b"x"]


async def test_batch_that_is_kept_behind_a_failure_has_an_unknown_outcome():
    state = Memory()
    async with serving() as (fake, client):
        fake.script.append(TOO_LARGE)
        with pytest.raises(wald.InvalidRequest):
            async with client.durable_producer("log", state) as producer:
                fake.open.clear()
                await producer.append_batch(["x"])
                state.open.clear()
                saving = asyncio.create_task(producer.append_batch(["y"]))
                await until(lambda: state.calls == 1)
                fake.open.set()
                await until(lambda: producer._acks[0].done())
                state.open.set()
                with pytest.raises(wald.EarlierFailure) as behind:
                    await saving
                assert behind.value.outcome is wald.Outcome.UNKNOWN
        assert [batch.records[0].data for batch in state.producer().batches] == [b"x", b"y"]


async def test_batch_behind_a_failure_that_is_known_is_not_kept():
    state = Memory()
    async with serving() as (fake, client):
        fake.script.append(TOO_LARGE)
        with pytest.raises(wald.InvalidRequest) as left:
            async with client.durable_producer("log", state) as producer:
                await producer.append_batch(["x"])
                await until(lambda: producer._acks[0].done())
                for _ in range(2):
                    with pytest.raises(wald.EarlierFailure) as behind:
                        await producer.append_batch(["y"])
                    assert behind.value.outcome is wald.Outcome.NOT_APPLIED
                    assert producer.next_sequence == 1
                raise behind.value
        assert left.value is behind.value.__cause__
        assert [batch.records[0].data for batch in state.producer().batches] == [b"x"]


async def keep_64(state, producer):
    """Calls that are cancelled while they save."""
    while producer.next_sequence < 64:
        before = producer.next_sequence
        saving = asyncio.create_task(producer.append_batch([str(before)]))
        await until(lambda: producer.next_sequence > before)
        await cancelled(saving)


async def test_batch_behind_a_save_that_fails_is_not_kept():
    state = Memory()
    async with serving() as (fake, client):
        with pytest.raises(wald.StateError):
            async with client.durable_producer("log", state) as producer:
                state.open.clear()
                await keep_64(state, producer)
                state.fails = True
                state.open.set()
                with pytest.raises(wald.EarlierFailure, match="the disk is full") as behind:
                    await producer.append_batch(["64"])
                assert behind.value.outcome is wald.Outcome.NOT_APPLIED
                assert isinstance(behind.value.__cause__, wald.StateError)
                assert producer.next_sequence == 64
        assert fake.attempts == []


async def test_call_that_waits_while_the_producer_is_closed_comes_too_late():
    state = Memory()
    async with serving() as (fake, client):
        producer = client.durable_producer("log", state)
        await producer.open()
        fake.open.clear()
        await producer.append_batch(["0"])
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0)
        late = [asyncio.create_task(call) for call in (producer.append_batch(["1"]), producer.flush())]
        await turns()
        fake.open.set()
        await closing
        kept, saves = state.state, state.saves
        for call in late:
            with pytest.raises(RuntimeError, match="closed"):
                await call
        assert (state.state, state.saves, fake.data(), producer.next_sequence) == (kept, saves, ["0"], 1)
        assert len(state.producer().batches) == 0


async def test_batch_that_is_kept_while_its_program_ends_has_an_unknown_outcome():
    state = Memory()
    async with serving() as (fake, client):
        async with life(client.durable_producer("log", state)) as producer:
            state.open.clear()
            saving = asyncio.create_task(producer.append_batch(["0"]))
            behind = asyncio.create_task(producer.append_batch(["1"]))
            await until(lambda: state.calls == 1)
            asyncio.get_running_loop().call_later(0.05, state.open.set)
        # The producer is closed, and the save is done.
        assert (state.calls, len(state.producer().batches)) == (0, 1)
        with pytest.raises(wald.EarlierFailure) as failed:
            await saving
        assert failed.value.outcome is wald.Outcome.UNKNOWN
        with pytest.raises(RuntimeError, match="closed"):
            await behind
        assert (len(state.producer().batches), fake.attempts) == (1, [])
        async with client.durable_producer("log", state) as producer:
            await producer.append_batch(["1"])
        assert fake.data() == ["0", "1"]


@pytest.mark.parametrize("acked", [False, True])
async def test_batch_that_waits_for_room_is_not_kept_once_the_program_ends(acked):
    state = Memory()
    async with serving() as (fake, client):
        async with life(client.durable_producer("log", state)) as producer:
            fake.open.clear()
            for number in range(64):
                await producer.append_batch([str(number)])
            waiting = asyncio.create_task(producer.append_batch(["64"]))
            await turns()
            first = producer._acks[0]
            if acked:
                # There is room at the same moment.
                first.set_result(None)
        kept, saves = state.state, state.saves
        if acked:
            with pytest.raises(RuntimeError, match="closed"):
                await waiting
        else:
            with pytest.raises(wald.EarlierFailure) as failed:
                await waiting
            assert failed.value.outcome is wald.Outcome.NOT_APPLIED
            assert isinstance(failed.value.__cause__, wald.ConnectionLost)
        assert (state.state, state.saves, producer.next_sequence) == (kept, saves, 64)
        fake.open.set()


def in_doubt():
    """The state of a producer with one batch."""
    state = ProducerState(log="log", log_id=42, id="p", kind=PRODUCER)
    state.batches.add().records.add(data=b"0")
    return state.SerializeToString()


async def test_state_that_was_loaded_is_saved_before_its_batches_are_sent():
    state = Memory()
    async with serving() as (fake, client):
        state.state = found = in_doubt()
        state.open.clear()
        fake.log_exists = True
        producer = client.durable_producer("log", state)
        opening = asyncio.create_task(producer.open())
        await until(lambda: state.calls == 1)
        # The connection is there, and each task has come to its next wait.
        await client.get_log("log")
        await turns()
        # A batch that had left would be at the server before the answer to this call.
        await client.get_log("log")
        assert fake.attempts == [] and not opening.done()
        state.open.set()
        await opening
        assert (state.state, state.saves) == (found, 1)
        await producer.close()
        assert fake.data() == ["0"]
        # Without batches there is nothing to save.
        saves = state.saves
        async with client.durable_producer("log", state):
            assert state.saves == saves


async def test_state_that_cannot_be_saved_again_sends_nothing():
    state = Memory()
    state.state = in_doubt()
    state.fails = True
    async with serving() as (fake, client):
        with pytest.raises(wald.StateError, match="the disk is full"):
            async with client.durable_producer("log", state):
                pass
        assert fake.attempts == []


async def test_batch_without_records_is_refused_before_it_is_kept():
    state = Memory()
    async with serving() as (_, client), client.durable_producer("log", state) as producer:
        with pytest.raises(ValueError):
            await producer.append_batch([])
        with pytest.raises(TypeError):
            await producer.append_batch("one")
        assert producer.next_sequence == 0


async def test_batch_of_a_cancelled_call_is_sent_by_the_next_one():
    state = Memory()
    async with serving() as (fake, client):
        async with client.durable_producer("log", state) as producer:
            for last in (lambda: producer.append_batch(["1"]), producer.flush):
                state.open.clear()
                first = producer.next_sequence
                await until(lambda: len(fake.attempts) == first)
                saving = asyncio.create_task(producer.append_batch(["0"]))
                await until(lambda: state.calls == 1)
                await cancelled(saving)
                assert producer.next_sequence == first + 1
                # The next save waits for the one that is underway.
                next_call = asyncio.create_task(last())
                done, _ = await asyncio.wait([next_call], timeout=0.05)
                assert not done and len(fake.attempts) == first
                state.open.set()
                await next_call
        assert fake.data() == ["0", "1", "0"]
        assert sequences(fake) == [0, 1, 2]


async def test_batch_whose_cancelled_save_failed_is_not_sent_by_flush():
    state = Memory()
    async with serving() as (fake, client):
        with pytest.raises(wald.StateError):
            async with client.durable_producer("log", state) as producer:
                state.open.clear()
                state.fails = True
                saving = asyncio.create_task(producer.append_batch(["0"]))
                await until(lambda: state.calls == 1)
                await cancelled(saving)
                state.open.set()
                await producer.flush()
        assert fake.attempts == []


async def test_many_cancelled_saves_leave_a_producer_that_goes_on():
    state = Memory()
    async with serving() as (fake, client):
        async with client.durable_producer("log", state) as producer:
            state.open.clear()
            await keep_64(state, producer)
            state.open.set()
            assert await asyncio.wait_for(producer.append_batch(["64"]), 20) == 64
        assert fake.data() == numbers(65)


async def test_leaving_waits_for_the_save_of_a_cancelled_call():
    state = Memory()
    async with serving() as (_, client):
        async with life(client.durable_producer("log", state)) as producer:
            state.open.clear()
            saving = asyncio.create_task(producer.append_batch(["0"]))
            await until(lambda: state.calls == 1)
            await cancelled(saving)
            asyncio.get_running_loop().call_later(0.05, state.open.set)
        assert (state.calls, len(state.producer().batches)) == (0, 1)


async def test_forgotten_producer_with_nothing_in_doubt_goes_on_in_a_new_epoch():
    state = Memory()
    async with serving() as (fake, client):
        for start in range(0, 60, 20):
            async with client.durable_producer("log", state) as producer:
                # In one run of the program, and over its restarts.
                for first in (start, start + 10):
                    assert producer.next_sequence == first
                    for number in range(first, first + 10):
                        assert await producer.append_batch([str(number)]) == number
                    await producer.flush()
                    fake.forget()
        async with client.durable_producer("log", state) as producer:
            assert await producer.append_batch(["60"]) == 60
        assert fake.data() == numbers(61)
        assert state.producer() == ProducerState(
            log="log", log_id=42, id=producer.id, epoch=6, earlier_batches=60, sequence=1, kind=PRODUCER
        )


@pytest.mark.parametrize(("count", "acked"), [(60, 1), (200, 0)])
async def test_batches_behind_a_refused_one_follow_it_into_the_new_epoch(count, acked):
    state, early = Memory(), []
    # The batch in doubt is acked before the refusal.
    state.state = in_doubt()

    def arrived(request):
        batch, kept = request.batch.batches[0].condition.producer, state.producer()
        saved = (kept.epoch, kept.sequence + len(kept.batches)) > (batch.epoch, batch.sequence)
        if not saved or len(kept.batches) > 64:
            early.append(batch)

    async with serving() as (fake, client):
        fake.arrived = arrived
        fake.forgets_at = 1 + acked
        async with client.durable_producer("log", state) as producer:
            await producer.flush()
            # The refusal comes when many batches are under way.
            fake.open.clear()
            for number in range(1, min(count, 65)):
                await producer.append_batch([str(number)])
            fake.open.set()
            for number in range(65, count):
                assert await producer.append_batch([str(number)]) == number
            await producer.flush()
            assert producer.next_sequence == count
        assert (fake.data(), early) == (numbers(count), [])
        kept = state.producer()
        assert (kept.epoch, kept.earlier_batches, kept.sequence) == (1, 1 + acked, count - 1 - acked)


async def test_forgotten_producer_with_a_batch_in_doubt_is_refused():
    # The batch was sent by an earlier run of the program.
    state = Memory()
    async with serving() as (fake, client):
        async with life(client.durable_producer("log", state)) as producer:
            fake.script.append(Unanswered(LOST))
            fake.refuses = LOST
            await producer.append_batch(["0"])
            await until(lambda: fake.applied)
        fake.refuses = None
        fake.forget()
        for _ in range(2):
            with pytest.raises(wald.ProducerExpired):
                async with client.durable_producer("log", state) as producer:
                    await producer.flush()
            assert (state.producer().epoch, len(state.producer().batches), fake.data()) == (0, 1, ["0"])
    # Or by this run, on a connection that broke.
    state = Memory()
    async with serving() as (fake, client):
        fake.script.extend([Unanswered(LOST), expired(7, 0)])
        with pytest.raises(wald.ProducerExpired) as refused:
            async with client.durable_producer("log", state) as producer:
                await producer.append_batch(["0"])
                await producer.flush()
        assert refused.value.outcome is wald.Outcome.UNKNOWN
        assert (state.producer().epoch, len(state.producer().batches), fake.data()) == (0, 1, ["0"])


async def test_new_epoch_of_a_cancelled_call_is_begun_by_the_next_one():
    state = Memory()
    async with serving() as (fake, client):
        async with client.durable_producer("log", state) as producer:
            fake.forget()
            await producer.append_batch(["0"])
            await until(lambda: producer._acks[0].done())
            state.open.clear()
            flushing = asyncio.create_task(producer.flush())
            await until(lambda: state.calls == 1)
            await cancelled(flushing)
            state.open.set()
            assert await producer.append_batch(["1"]) == 1
        assert (fake.data(), state.producer().epoch) == (["0", "1"], 1)


async def test_new_epoch_sends_nothing_once_the_program_ends():
    state = Memory()
    async with serving() as (fake, client):
        async with life(client.durable_producer("log", state)) as producer:
            fake.forget()
            await producer.append_batch(["0"])
            await until(lambda: producer._acks[0].done())
            state.open.clear()
            flushing = asyncio.create_task(producer.flush())
            await until(lambda: state.calls == 1)
            asyncio.get_running_loop().call_later(0.05, state.open.set)
        with pytest.raises(wald.ConnectionLost, match="closed"):
            await flushing
        assert (state.producer().epoch, len(state.producer().batches), fake.data()) == (1, 1, [])


async def test_calls_at_once_keep_their_order():
    state = Memory()
    async with serving() as (fake, client):
        async with client.durable_producer("log", state) as producer:
            calls = [producer.append_batch([number]) for number in numbers(20)]
            assert await asyncio.gather(*calls) == list(range(20))
        assert fake.data() == numbers(20)


async def test_producer_that_is_not_open_or_closed_says_so():
    async with serving() as (_, client):
        producer = client.durable_producer("log", Memory())
        with pytest.raises(RuntimeError, match="not open"):
            await producer.append_batch(["0"])
        await producer.open()
        await producer.close()
        await producer.close()
        with pytest.raises(RuntimeError, match="closed"):
            await producer.append_batch(["0"])


def test_file_has_the_last_state_and_belongs_to_its_owner_alone(tmp_path, monkeypatch):
    path = tmp_path / "producer.state"
    state = wald.FileState(path)
    assert state.load() is None
    for text in (b"first", b"second, longer", b"3"):
        state.save(text)
        state.close()
        assert state.load() == path.read_bytes() == text
    state.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["producer.state", "producer.state.lock"]
    assert stat.S_IMODE((tmp_path / "producer.state.lock").stat().st_mode) == 0o600

    def fails(*_):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fails)
            with pytest.raises(OSError, match="No space left on device: .*producer.state"):
                state.save(b"4")
            assert path.read_bytes() == b"3"
    with pytest.raises(FileNotFoundError, match="missing"):
        wald.FileState(str(tmp_path / "missing" / "a")).save(b"x")


def test_link_stays_and_its_target_has_the_state_and_the_lock(tmp_path):
    pytest.importorskip("fcntl")
    (tmp_path / "link").symlink_to("middle")
    (tmp_path / "middle").symlink_to(tmp_path / "target")
    # Once without a target, once with one.
    for text in (b"1", b"2"):
        state = wald.FileState(tmp_path / "link")
        state.load()
        state.save(text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "target").read_bytes() == text
        with pytest.raises(BlockingIOError, match=IN_USE):
            wald.FileState(tmp_path / "target").load()
        state.close()


def test_file_is_flushed_before_it_is_renamed_and_its_directory_afterwards(tmp_path, monkeypatch):
    steps = []
    fsync, replace = os.fsync, os.replace

    def flushed(descriptor):
        steps.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def renamed(*paths):
        steps.append("rename")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.chdir(tmp_path)
    wald.FileState("a.state").save(b"x")
    assert steps == ["file", "rename", "directory"]


async def test_path_stands_for_a_file(tmp_path):
    async with serving() as (fake, client):
        for path in (str(tmp_path / "p"), tmp_path / "p"):
            async with client.durable_producer("log", path) as producer:
                await producer.append_batch(["a"])
        assert ProducerState.FromString((tmp_path / "p").read_bytes()).sequence == 2
        async with client.durable_follower("log", state=tmp_path / "f") as follower:
            fake.messages.put_nowait(message(b"1", (0, ["a"])))
            await anext(follower)
            await follower.keep(b"e")
        assert FollowerState.FromString((tmp_path / "f").read_bytes()) == FollowerState(
            cursor=b"1", effects=b"e", kind=FOLLOWER
        )


IN_USE = "another process or producer uses it"


async def test_file_has_one_user_until_it_is_closed(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "p"
    shared = wald.FileState(path)
    async with serving() as (_, client):
        for state in (path, shared, path):
            async with client.durable_producer("log", state) as producer:
                # A user that is refused leaves the lock with the first one.
                for other in (path, shared, path):
                    with pytest.raises(wald.StateError, match=IN_USE):
                        await client.durable_producer("log", other).open()
                    refused = client.durable_follower("log", state=other)
                    with pytest.raises(wald.StateError, match=IN_USE):
                        await refused.open()
                    await refused.close()
                await producer.append_batch(["a"])
        for state in (path, tmp_path / "f"):
            # Openings that fail, and programs that end, let go of it.
            for _ in range(2):
                with pytest.raises(wald.StateError, match="of the log|not the state"):
                    async with client.durable_producer("other", path):
                        pass
                with pytest.raises(wald.StateError, match="not the state"):
                    async with client.durable_follower("log", state=path):
                        pass
                async with life(client.durable_producer("log", path)):
                    pass
        async with client.durable_follower("log", state=tmp_path / "f") as follower:
            await follower.keep("e")
            with pytest.raises(wald.StateError, match=IN_USE):
                await client.durable_follower("log", state=tmp_path / "f").open()
        # The clients of other languages lock this file, too.
        with open(tmp_path / "f.lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with pytest.raises(wald.StateError, match=IN_USE) as failed:
                await client.durable_follower("log", state=tmp_path / "f").open()
            assert isinstance(failed.value.__cause__, BlockingIOError)
        async with client.durable_follower("log", state=tmp_path / "f") as follower:
            assert follower.effects == b"e"
    assert sorted(os.listdir(tmp_path)) == ["f", "f.lock", "p", "p.lock"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs locks that belong to an open file")
def test_state_is_not_shared_with_java(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    with open(tmp_path / "s.lock", "wb") as java:
        # Java has only this kind of lock.
        fcntl.lockf(java, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError, match=IN_USE):
            wald.FileState(tmp_path / "s").load()
    state = wald.FileState(tmp_path / "s")
    assert state.load() is None
    # A user that is refused leaves the locks with the first one.
    with pytest.raises(BlockingIOError, match=IN_USE):
        wald.FileState(tmp_path / "s").load()
    with open(tmp_path / "s.lock", "wb") as java:
        with pytest.raises(BlockingIOError):
            fcntl.lockf(java, fcntl.LOCK_EX | fcntl.LOCK_NB)
        state.close()
        fcntl.lockf(java, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.skipif(sys.platform != "linux", reason="needs locks that belong to an open file")
def test_system_without_such_locks_has_those_of_flock(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    # A command that no kernel knows.
    monkeypatch.setattr(fcntl, "F_OFD_SETLK", 9999)
    state = wald.FileState(tmp_path / "s")
    assert state.load() is None
    with pytest.raises(BlockingIOError, match=IN_USE):
        wald.FileState(tmp_path / "s").load()
    state.close()


async def test_file_that_cannot_be_read_is_not_locked(tmp_path):
    (tmp_path / "p").mkdir()
    async with serving() as (_, client):
        with pytest.raises(wald.StateError, match="directory"):
            await client.durable_producer("log", tmp_path / "p").open()
        (tmp_path / "p").rmdir()
        async with client.durable_producer("log", tmp_path / "p"):
            pass


async def test_file_without_locks_of_the_system_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr("wald.state.fcntl", None)
    async with serving() as (_, client), client.durable_producer("log", tmp_path / "p"):
        async with client.durable_producer("log", tmp_path / "p"):
            pass
    assert os.listdir(tmp_path) == ["p"]


class Closable(Memory):
    """A state with the optional method."""

    def __init__(self):
        super().__init__()
        self.closed = 0
        self.unreadable = False

    def load(self):
        if self.unreadable:
            raise OSError("unreadable")
        return super().load()

    def close(self):
        assert self.calls == 0, "a save is underway"
        self.closed += 1


async def test_state_is_closed_once_if_it_was_loaded():
    async with serving() as (_, client):
        for durable in (client.durable_producer, lambda log, state: client.durable_follower(log, state=state)):
            state = Closable()
            state.unreadable = True
            refused = durable("log", state)
            with pytest.raises(wald.StateError, match="unreadable"):
                await refused.open()
            await refused.close()
            assert state.closed == 0
            state.unreadable = False
            user = durable("log", state)
            await user.open()
            with pytest.raises(RuntimeError, match="opened before"):
                await user.open()
            assert state.closed == 0
            await user.close()
            await user.close()
            assert state.closed == 1


async def test_producer_that_is_closed_while_it_is_opened_does_not_open():
    state = Closable()
    state.state = ProducerState(log="log", log_id=42, id="p", kind=PRODUCER).SerializeToString()
    async with serving() as (_, client):
        producer = client.durable_producer("log", state)
        opening = asyncio.create_task(producer.open())
        await asyncio.sleep(0)
        await producer.close()
        with pytest.raises(RuntimeError, match="closed"):
            await opening
        assert (state.closed, state.saves) == (1, 0)


async def test_state_is_closed_also_if_its_user_does_not_wait():
    state = Closable()
    async with serving() as (_, client):
        follower = client.durable_follower("log", state=state)
        await follower.open()
        state.open.clear()
        keeping = asyncio.create_task(follower.keep("1"))
        await until(lambda: state.calls == 1)
        closing = asyncio.create_task(follower.close())
        await turns()
        await cancelled(closing)
        assert state.closed == 0
        state.open.set()
        await keeping
        await until(lambda: state.closed == 1)


@pytest.mark.parametrize("kind", [Memory, Closable])
async def test_closing_waits_for_all_that_is_kept_before_it_and_takes_no_more(kind):
    state = kind()
    async with serving() as (_, client):
        async with client.durable_follower("log", state=state) as follower:
            state.open.clear()
            keeping = [asyncio.create_task(follower.keep(effects)) for effects in "abc"]
            await until(lambda: state.calls == 1)
            asyncio.get_running_loop().call_later(0.05, state.open.set)
        assert (state.calls, state.saves, state.follower().effects) == (0, 3, b"c")
        await asyncio.gather(*keeping)
        with pytest.raises(RuntimeError, match="closed"):
            await follower.keep("d")
        assert state.saves == 3


async def test_effects_may_be_text():
    state = Memory()
    async with serving() as (_, client):
        async with client.durable_follower("log", state=state) as follower:
            await follower.keep("é")
            assert follower.effects == "é".encode()
        async with client.durable_follower("log", state=state) as follower:
            assert follower.effects == "é".encode()


def texts(batches):
    return [record.text for batch in batches for record in batch]


async def test_follower_goes_on_behind_the_effects_that_it_has_kept():
    state = Memory()
    async with serving() as (fake, client):
        seen = []
        for start in range(5):
            async with life(client.durable_follower(prefix="l", state=state, lsn=3)) as follower:
                request = fake.scans[-1]
                effects = follower.effects
                if start == 0:
                    assert (effects, follower.cursor, request.lsn) == (None, None, 3)
                else:
                    assert (effects, follower.cursor) == (str(start).encode(), f"{start}".encode())
                    assert (request.WhichOneof("start"), request.cursor) == ("cursor", follower.cursor)
                # The records of the second step are not kept, and come again.
                for step in (start + 1, start + 2):
                    fake.messages.put_nowait(message(str(step).encode(), (step, [f"r{step}"]), (step, ["x"])))
                    seen.append(texts(await anext(follower)))
                    if step == start + 1:
                        await follower.keep(str(step).encode())
                        assert follower.effects == str(step).encode()
        assert seen == [[f"r{s + step}", "x"] for s in range(5) for step in (1, 2)]
        assert state.follower() == FollowerState(cursor=b"5", effects=b"5", kind=FOLLOWER)


async def test_keep_before_the_first_step_keeps_the_cursor():
    state = Memory()
    state.state = FollowerState(cursor=b"7", effects=b"old", kind=FOLLOWER).SerializeToString()
    async with serving() as (_, client), client.durable_follower("log", state=state) as follower:
        await follower.keep(b"new")
    assert state.follower() == FollowerState(cursor=b"7", effects=b"new", kind=FOLLOWER)


async def test_follower_skips_heartbeats_and_events_without_records():
    state = Memory()
    async with serving() as (fake, client), client.durable_follower("log", state=state) as follower:
        caught_up = message(b"1")
        caught_up.caught_up = True
        for item in (caught_up, message(b"2"), LOST, DRAINING, message(b"3", (0, ["a"]))):
            fake.messages.put_nowait(item)
        async for batches in follower:
            assert texts(batches) == ["a"]
            break
        assert follower.cursor == b"3"
        fake.messages.put_nowait(message(b"4"))
        waiting = asyncio.create_task(anext(follower))
        await until(lambda: follower.cursor == b"4")
        await cancelled(waiting)
        await follower.keep(b"")
        assert state.follower().cursor == b"4"


def missing(event, first, last):
    event.gaps.add(log="log", from_lsn=first, to_lsn=last, reason=types_pb2.GAP_REASON_EXPIRED)
    return event


async def test_gap_is_an_error_and_the_next_step_goes_on_behind_it():
    state = Memory()
    async with serving() as (fake, client), client.durable_follower("log", state=state) as follower:
        fake.messages.put_nowait(message(b"1", (0, ["a"])))
        fake.messages.put_nowait(missing(missing(message(b"2", (9, ["b"])), 1, 7), 7, 9))
        fake.messages.put_nowait(missing(wal_pb2.ScanResponse(cursor=b"3"), 10, 12))
        fake.messages.put_nowait(message(b"4", (12, ["c"])))
        found = []
        while len(found) < 6:
            try:
                found.append((texts(await asyncio.wait_for(anext(follower), 20)), follower.cursor))
            except wald.RecordsMissing as error:
                gap = error.gap
                assert (gap.log, gap.reason) == ("log", wald.GapReason.EXPIRED)
                assert error.outcome is wald.Outcome.NOT_APPLIED
                found.append(((gap.from_lsn, gap.to_lsn), follower.cursor))
        assert found == [
            (["a"], b"1"),
            ((1, 7), b"1"),
            ((7, 9), b"1"),
            (["b"], b"2"),
            ((10, 12), b"2"),
            (["c"], b"4"),
        ]


async def test_follower_state_that_cannot_be_read_or_kept_is_an_error():
    state = Memory()
    async with serving() as (_, client):
        state.fails = True
        async with client.durable_follower("log", state=state) as follower:
            with pytest.raises(wald.StateError, match="the disk is full"):
                await follower.keep(b"1")
            assert follower.effects is None
            state.fails = False
            await follower.keep(b"1")
        assert state.follower().effects == b"1"


async def test_follower_ends_with_its_scan():
    async with serving() as (fake, client):
        async with client.durable_follower("log", state=Memory(), max_records=2) as follower:
            fake.messages.put_nowait(message(b"1", (0, ["a", "b"])))
            assert [texts(batches) async for batches in follower] == [["a", "b"]]
        follower = client.durable_follower("log", state=Memory())
        with pytest.raises(RuntimeError, match="not open"):
            await anext(follower)
