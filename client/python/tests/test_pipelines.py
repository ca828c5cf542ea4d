"""Sessions and producers: order, windows, and the error that each caller gets after a
failure."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from fake import DRAINING, LOST, REFUSED, endlessly, refusal, serving, turns, until
from grpc import StatusCode
from grpc.aio import AioRpcError

import wald
from wald.v1 import wal_pb2_grpc
from wald import LogBatch, Outcome
from wald.session import AppendStream


def mismatch(request):
    facts = {**REFUSED, "request_id": str(request)}
    return refusal(StatusCode.FAILED_PRECONDITION, "POSITION_MISMATCH", facts)


def one(data):
    return [LogBatch("log", [data])]


async def send_all(session, count):
    return [await session.send(one(f"r{number}")) for number in range(count)]


async def outcomes(futures):
    """For each future: the lsn, or the class of its error and the outcome."""
    results = await asyncio.gather(*futures, return_exceptions=True)
    return [
        (type(r).__name__, r.outcome.name) if isinstance(r, wald.WaldError) else r.appends[0].first_lsn
        for r in results
    ]


async def test_session_acks_in_order():
    async with serving() as (_, client):
        async with client.session() as session:
            futures = await send_all(session, 5)
        assert await outcomes(futures) == [0, 1, 2, 3, 4]


async def test_session_tells_what_was_not_applied_after_a_failure():
    async with serving() as (fake, client):
        fake.script.extend([None, mismatch(1)])
        session = client.session()
        futures = await send_all(session, 4)
        with pytest.raises(wald.PositionMismatch):
            await session.close()
        assert await outcomes(futures) == [
            0,
            ("PositionMismatch", "NOT_APPLIED"),
            ("EarlierFailure", "NOT_APPLIED"),
            ("EarlierFailure", "NOT_APPLIED"),
        ]
        with pytest.raises(wald.PositionMismatch):
            await session.send(one("later"))
        later = futures[3].exception()
        assert (later.facts["request_id"], later.retry) == ("1", wald.Retry.NEVER)


async def test_leaving_raises_the_first_failure_whatever_the_body_met():
    async with serving() as (fake, client):
        fake.script.append(mismatch(0))
        with pytest.raises(wald.PositionMismatch):
            async with client.session() as session:
                futures = await send_all(session, 2)
                await futures[1]
        fake.script.append(mismatch(0))
        with pytest.raises(wald.PositionMismatch):
            async with client.session() as session:
                await endlessly(lambda: session.send(one("x")))
        fenced = refusal(StatusCode.FAILED_PRECONDITION, "FENCED", {**REFUSED, "request_id": "0"})
        fake.script.append(fenced)
        with pytest.raises(wald.Fenced):
            async with client.producer("log") as producer:
                futures = [await producer.send([f"r{number}"]) for number in range(2)]
                await futures[1]
        fake.script.append(fenced)
        with pytest.raises(wald.Fenced):
            async with client.producer("log") as producer:
                await endlessly(lambda: producer.append("x"))


async def test_session_whose_connection_breaks_does_not_know():
    async with serving() as (fake, client):
        fake.script.extend([None, LOST])
        session = client.session()
        futures = await send_all(session, 3)
        with pytest.raises(wald.ConnectionLost):
            await session.close()
        told = await outcomes(futures)
        assert told[:2] == [0, ("ConnectionLost", "UNKNOWN")]
        # The last one may not have left this process yet.
        assert told[2] in [("EarlierFailure", "UNKNOWN"), ("EarlierFailure", "NOT_APPLIED")]


async def test_failure_of_a_session_is_the_servers_though_writes_fail_as_well():
    # grpc/grpc#36066: a write that comes too late must not hide the status.
    async with serving() as (fake, client):
        for _ in range(50):
            fake.script.append(mismatch(0))
            session = client.session()
            await session.send(one("x"))
            with contextlib.suppress(wald.PositionMismatch):
                await endlessly(lambda: session.send(one("x" * 1000)))
            fake.script.clear()
            with pytest.raises(wald.PositionMismatch):
                await session.close()


async def test_session_waits_while_its_window_is_full():
    async with serving() as (fake, client):
        fake.open.clear()
        async with client.session(window_bytes=100) as session:
            first = await session.send(one("x" * 200))
            waiting = asyncio.create_task(session.send(one("y" * 200)))
            done, _ = await asyncio.wait([waiting], timeout=0.05)
            assert not done
            fake.open.set()
            await first
            assert (await (await waiting)).appends[0].first_lsn == 1


async def test_producer_sends_everything_unacked_again_in_order():
    async with serving() as (fake, client):
        fake.script.extend([None, LOST, DRAINING, None, LOST])
        async with client.producer("log") as producer:
            futures = [await producer.send([f"r{number}"]) for number in range(20)]
        assert [(await future).first_lsn for future in futures] == list(range(20))
        assert fake.data() == [f"r{number}" for number in range(20)]
        sequences = [request.batch.batches[0].condition.producer.sequence for request in fake.attempts]
        # Each new stream begins with the first that was not acked.
        assert sequences[:7] == [0, 1, 1, 1, 2, 2, 3]
        conditions = [request.batch.batches[0].condition for request in fake.attempts]
        assert {condition.log_id for condition in conditions} == {42}


async def test_producer_needs_no_right_to_make_a_log_that_is_there():
    async with serving() as (fake, client):
        fake.log_exists = fake.makes_no_log = True
        async with client.producer("log") as producer:
            assert producer.log_id == 42
        assert fake.log_calls == ["GetLog"]


async def test_producer_makes_its_log_only_if_there_is_none():
    async with serving() as (fake, client):
        fake.makes_no_log = True
        with pytest.raises(wald.NotAllowed):
            await client.producer("log").open()
        fake.makes_no_log = False
        async with client.producer("log") as producer:
            assert producer.log_id == 42
        assert fake.log_calls == ["GetLog", "CreateLog"] * 2


async def test_producer_asks_again_for_a_log_that_another_client_has_made():
    async with serving() as (fake, client):
        fake.log_exists, fake.unseen = True, 1
        async with client.producer("log") as producer:
            assert producer.log_id == 42
        assert fake.log_calls == ["GetLog", "CreateLog", "GetLog"]


async def test_producer_ends_at_what_does_not_pass():
    fenced = refusal(StatusCode.FAILED_PRECONDITION, "PRODUCER_FENCED", {**REFUSED, "request_id": "1"})
    async with serving() as (fake, client):
        fake.script.extend([None, fenced])
        producer = client.producer("log")
        await producer.open()
        futures = [await producer.send([f"r{number}"]) for number in range(3)]
        with pytest.raises(wald.ProducerFenced):
            await producer.flush()
        assert (await futures[0]).first_lsn == 0
        for future, kind in zip(futures[1:], (wald.ProducerFenced, wald.EarlierFailure)):
            with pytest.raises(kind) as failed:
                await future
            assert (failed.value.reason, failed.value.outcome) == ("PRODUCER_FENCED", Outcome.NOT_APPLIED)
        with pytest.raises(wald.ProducerFenced):
            await producer.append("later")
        with pytest.raises(wald.ProducerFenced):
            await producer.close()
        assert fake.data() == ["r0"]


async def test_refusal_of_a_batch_lost_before_leaves_its_outcome_unknown():
    fenced = refusal(StatusCode.FAILED_PRECONDITION, "PRODUCER_FENCED", {**REFUSED, "request_id": "0"})
    async with serving() as (fake, client):
        fake.script.extend([LOST, fenced])
        producer = client.producer("log")
        await producer.open()
        future = await producer.send(["r0"])
        with pytest.raises(wald.ProducerFenced) as failed:
            await future
        assert failed.value.outcome is Outcome.UNKNOWN
        producer.abort()


async def test_producer_gives_up_when_its_patience_is_over():
    async with serving() as (fake, client):
        fake.script.extend([DRAINING] * 10_000)
        producer = client.producer("log", retry_for=0.5)
        await producer.open()
        refused = await producer.send(["r0"])
        with pytest.raises(wald.DeadlineExceeded) as failed:
            await producer.flush()
        assert failed.value.outcome is refused.exception().outcome
        fake.script.clear()
        fake.open.clear()
        producer = client.producer("log", retry_for=0.5)
        await producer.open()
        unanswered = await producer.send(["r0"])
        with pytest.raises(wald.DeadlineExceeded) as failed:
            await unanswered
        assert failed.value.outcome is Outcome.UNKNOWN
        producer.abort()
        fake.open.set()


async def test_producer_leaves_a_silent_session_for_another():
    async with serving() as (fake, client):
        fake.held_sessions = 1
        async with client.producer("log", retry_for=2.0) as producer:
            futures = [await producer.send([f"r{number}"]) for number in range(3)]
            await until(lambda: producer._interruption is not None)
            assert producer._interruption.message == "no ack for 1 s"
            assert isinstance(producer._interruption, wald.ConnectionLost)
        acks = [await future for future in futures]
        assert [(ack.first_lsn, ack.deduplicated) for ack in acks] == [(0, True), (1, True), (2, True)]
        assert fake.data() == ["r0", "r1", "r2"]


async def test_silence_of_a_session_counts_only_while_a_batch_is_due():
    async with serving() as (fake, client):
        async with client.producer("log") as producer:
            await (await producer.send(["r0"]))
            stream = producer._stream
            producer._last_progress = producer._connected = asyncio.get_running_loop().time() - 50
            producer._check_patience()
            fake.open.clear()
            last = await producer.send(["r1"])
            producer._check_patience()
            assert producer._stream is stream is not None
            fake.open.set()
            await last


async def test_producer_takes_nothing_more_once_it_is_closed():
    async with serving() as (fake, client):
        fake.open.clear()
        producer = client.producer("log", linger=30.0)
        await producer.open()
        acks = [await producer.send(["r0"]), await producer.append("r1")]
        closing = asyncio.create_task(producer.close())
        await turns()
        for hand_over in (producer.append, lambda record: producer.send([record])):
            with pytest.raises(RuntimeError, match="closed"):
                await hand_over("late")
        fake.open.set()
        await closing
        assert all(ack.exception() is None for ack in acks)
        assert fake.data() == ["r0", "r1"]


async def test_producer_gathers_what_comes_in_one_turn():
    async with serving() as (fake, client):
        async with client.producer("log") as producer:
            futures = [await producer.append(f"r{number}") for number in range(10)]
        assert [(await future).lsn for future in futures] == list(range(10))
        assert len(fake.attempts) == 1


async def test_producer_gathers_while_its_window_is_full_and_keeps_the_limits():
    async with serving() as (fake, client):
        fake.open.clear()
        async with client.producer("log", window_batches=1, batch_records=4) as producer:
            first = await producer.send(["r0"])
            futures = [await producer.append(f"r{number}") for number in range(1, 5)]
            full = asyncio.create_task(producer.append("r5"))
            done, _ = await asyncio.wait([full], timeout=0.05)
            assert not done
            fake.open.set()
            await first
            futures.append(await full)
        assert [(await future).lsn for future in futures] == [1, 2, 3, 4, 5]
        assert [len(request.batch.batches[0].records) for request in fake.attempts] == [1, 4, 1]


@pytest.mark.parametrize("window", [0, 1025])
async def test_producer_refuses_a_window_beyond_what_the_server_recognises(window):
    async with serving() as (fake, client):
        with pytest.raises(ValueError, match="between 1 and 1024"):
            client.producer("log", window_batches=window)
        assert fake.attempts == []


async def test_producer_lingers_for_more_records():
    async with serving() as (fake, client):
        async with client.producer("log", linger=30.0, batch_records=3) as producer:
            futures = []
            for number in range(3):
                futures.append(await producer.append(f"r{number}"))
                # A batch that had left would be at the server before the answer to this call.
                await client.get_log("log")
            assert (await futures[2]).lsn == 2
            await producer.append("r3")
        assert [len(request.batch.batches[0].records) for request in fake.attempts] == [3, 1]


async def test_large_record_begins_a_batch_of_its_own():
    async with serving() as (fake, client):
        async with client.producer("log", batch_bytes=1000) as producer:
            for size in (10, 900, 200, 2000):
                await producer.append("x" * size)
        assert [len(request.batch.batches[0].records) for request in fake.attempts] == [2, 1, 1]


async def test_cancelled_wait_for_an_ack_does_not_break_the_pipeline():
    async with serving() as (_, client):
        async with client.producer("log") as producer:
            first = await producer.append("r0")
            first.cancel()
            second = await producer.append("r1")
            assert (await second).lsn == 1


async def test_closing_the_client_ends_a_producer():
    async with serving() as (fake, client):
        fake.open.clear()
        producer = client.producer("log")
        await producer.open()
        future = await producer.send(["r0"])
        await client.close(grace=0)
        with pytest.raises(wald.ConnectionLost) as failed:
            await future
        assert failed.value.outcome is Outcome.UNKNOWN
        fake.open.set()


async def test_producer_appends_under_its_writer_epoch():
    async with serving() as (fake, client):
        async with client.producer("log", id="p", writer_epoch=3, log_id=7) as producer:
            await producer.append("r0")
            await producer.send(["r1"], writer_epoch=4)
        conditions = [request.batch.batches[0].condition for request in fake.attempts]
        assert [(c.writer_epoch, c.log_id) for c in conditions] == [(3, 7), (4, 7)]
        assert not fake.log_exists


async def test_random_id_begins_at_the_lowest_epoch_and_is_forgotten():
    async with serving() as (fake, client):
        fake.first_producer_epoch = 7
        async with client.producer("log") as drawn:
            await (await drawn.send(["a"]))
        async with client.producer("log", log_id=42) as unused:
            pass
        async with client.producer("log", id="p") as named:
            await (await named.send(["b"]))
        assert [drawn.epoch, unused.epoch, named.epoch] == [7, 7, 0]
        assert fake.forgotten == [(drawn.id, 42)]


async def test_producer_reports_a_quota_at_once():
    async with serving() as (fake, client):
        quota = refusal(StatusCode.RESOURCE_EXHAUSTED, "QUOTA", {**REFUSED, "retry": "SAFE"})
        fake.script.extend([quota, quota])
        producer = client.producer("log", id="p")
        await producer.open()
        ack = await producer.send(["a"])
        with pytest.raises(wald.Quota) as refused:
            await ack
        assert refused.value.outcome is Outcome.NOT_APPLIED
        assert len(fake.script) == 1


class LateStatus:
    """A session's call whose writes come too late: its status is made up, until the server's may come."""

    MADE_UP = (StatusCode.INTERNAL, "Internal error from Core", ())

    def __init__(self, *later):
        self.statuses = [self.MADE_UP, *later]
        self.looks = 0

    def _now(self):
        return self.statuses[min(self.looks // 3, len(self.statuses) - 1)]

    async def code(self):
        return self._now()[0]

    async def details(self):
        return self._now()[1]

    async def trailing_metadata(self):
        return self._now()[2]

    def add_done_callback(self, callback):
        callback(self)

    async def write(self, request):
        raise asyncio.InvalidStateError

    def cancel(self):
        self.looks += 1

    async def __aiter__(self):
        for _ in ():
            yield
        self.looks += 3
        raise AioRpcError(*self.MADE_UP[:1], (), (), self.MADE_UP[1])


async def ended(call, monkeypatch):
    """How a stream of this call ends."""
    monkeypatch.setattr("wald.session._STATUS_SECONDS", 0.05)
    found = asyncio.get_running_loop().create_future()
    client = wald.Client(channel=SimpleNamespace())
    client._open()._stubs[wal_pb2_grpc.WalServiceStub] = SimpleNamespace(AppendSession=lambda: call)
    stream = AppendStream(client, lambda ack: None, lambda error, handed: found.set_result(error))
    await stream.ended
    return found.result()


async def test_status_that_was_made_up_counts_as_a_lost_connection(monkeypatch):
    error = await ended(LateStatus(), monkeypatch)
    assert isinstance(error, wald.ConnectionLost)
    assert (error.outcome, error.retry) == (Outcome.UNKNOWN, wald.Retry.SAFE_WITH_CONDITION)


async def test_status_of_the_server_replaces_one_that_was_made_up(monkeypatch):
    later = (StatusCode.FAILED_PRECONDITION, *refusal(StatusCode.FAILED_PRECONDITION, "FENCED", REFUSED)[1:])
    error = await ended(LateStatus(later), monkeypatch)
    assert isinstance(error, wald.Fenced)
