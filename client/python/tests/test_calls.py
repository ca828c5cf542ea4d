"""Calls are repeated when that is safe, and never otherwise."""

import asyncio

import pytest
from fake import DRAINING, LOST, NOT_APPLIED, REFUSED, UNKNOWN, no_server, refusal, serving, until
from grpc import StatusCode

import wald
from wald import Outcome, Retry

BUSY = refusal(StatusCode.RESOURCE_EXHAUSTED, "BUSY", NOT_APPLIED)
FAILED = refusal(StatusCode.INTERNAL, "JOURNAL_FAILED", UNKNOWN)
MISMATCH = refusal(StatusCode.FAILED_PRECONDITION, "POSITION_MISMATCH", REFUSED)


async def test_plain_append_is_repeated_if_the_server_says_not_applied():
    async with serving() as (fake, client):
        fake.script.extend([DRAINING, BUSY])
        assert (await client.append("log", "x")).lsn == 3
        assert len(fake.attempts) == 3


@pytest.mark.parametrize("failure", [LOST, FAILED])
async def test_plain_append_is_not_repeated_if_it_may_have_been_applied(failure):
    async with serving() as (fake, client):
        fake.script.append(failure)
        with pytest.raises(wald.WaldError) as failed:
            await client.append("log", "x")
        assert (failed.value.outcome, failed.value.retry) == (Outcome.UNKNOWN, Retry.SAFE_WITH_CONDITION)
        assert len(fake.attempts) == 1


@pytest.mark.parametrize("failure", [LOST, FAILED])
async def test_guarded_append_is_repeated_as_it_was(failure):
    async with serving() as (fake, client):
        fake.script.append(failure)
        await client.append("log", "x", expected_lsn=3)
        assert len(fake.attempts) == 2
        assert fake.attempts[0] == fake.attempts[1]


async def test_refusal_after_an_unknown_outcome_leaves_it_unknown():
    async with serving() as (fake, client):
        fake.script.extend([LOST, MISMATCH, MISMATCH])
        with pytest.raises(wald.PositionMismatch) as echo:
            await client.append("log", "x", expected_lsn=3)
        assert echo.value.outcome is Outcome.UNKNOWN
        with pytest.raises(wald.PositionMismatch) as first:
            await client.append("log", "x", expected_lsn=3)
        assert first.value.outcome is Outcome.NOT_APPLIED


async def test_call_gives_up_after_the_attempts_of_its_policy():
    few = wald.RetryPolicy(max_attempts=5, first_pause=0.001)
    async with serving(retry=few) as (fake, client):
        fake.script.extend([DRAINING] * 9)
        with pytest.raises(wald.Unavailable):
            await client.tail("log")
        assert len(fake.attempts) == 5


async def test_deadline_and_not_the_attempts_ends_a_call_by_default():
    async with serving() as (fake, client):
        fake.script.extend([DRAINING] * 14)
        await client.append("log", "x")
        assert len(fake.attempts) == 15
    # The pauses alone outlast the default deadline.
    policy = wald.RetryPolicy()
    assert sum(policy.pause(n, wald.Unavailable("")) for n in range(1, policy.max_attempts)) > 10


async def test_call_does_not_outlast_its_deadline():
    async with serving() as (fake, client):
        fake.script.append(refusal(StatusCode.UNAVAILABLE, "DRAINING", NOT_APPLIED, delay_ms=900))
        with pytest.raises(wald.Unavailable):
            await client.append("log", "x", timeout=0.5)
        assert len(fake.attempts) == 1


async def test_connection_that_was_never_made_means_not_applied():
    with no_server() as endpoint:
        async with wald.Client(endpoint, retry=wald.RetryPolicy(max_attempts=2)) as client:
            with pytest.raises(wald.NotSent) as failed:
                await client.append("log", "x")
    assert (failed.value.outcome, failed.value.retry) == (Outcome.NOT_APPLIED, Retry.SAFE)


@pytest.mark.parametrize("failure", [LOST, DRAINING])
async def test_failed_read_may_be_asked_again(failure):
    async with serving(retry=wald.RetryPolicy(max_attempts=2, first_pause=0.001)) as (fake, client):
        fake.script.extend([LOST, failure])
        with pytest.raises(wald.WaldError) as failed:
            await client.tail("log")
    assert (failed.value.outcome, failed.value.retry) == (Outcome.NOT_APPLIED, Retry.SAFE)


def test_call_that_was_sent_before_is_not_called_not_sent():
    not_sent = wald.NotSent("no connection", outcome=Outcome.NOT_APPLIED, retry=Retry.SAFE)
    error = not_sent.after_unknown()
    assert type(error) is wald.ConnectionLost
    assert (error.outcome, error.retry) == (Outcome.UNKNOWN, Retry.SAFE_WITH_CONDITION)


async def test_batch_without_a_condition_is_plain():
    async with serving() as (fake, client):
        async with client.session() as session:
            await session.send([wald.LogBatch("log", ["x"], None)])
        assert not fake.attempts[0].batch.batches[0].HasField("condition")
    assert not wald.LogBatch("log", ["x"], None).guards


async def test_call_on_a_channel_that_was_given_up_is_repeated(monkeypatch):
    monkeypatch.setattr("wald.nodes._OLD_CHANNEL_SECONDS", 0.05)
    async with serving() as (fake, client):
        fake.answers.clear()
        reading = asyncio.create_task(client.read("log", lsn=0))
        await until(lambda: fake.underway == 1)
        client._nodes.give_up(client.endpoint)
        await until(lambda: reading.done() or len(fake.attempts) == 2)
        fake.answers.set()
        assert (await reading).records == ()


@pytest.mark.parametrize("name", ["append", "read"])
async def test_cancelled_caller_of_a_client_that_closes_is_cancelled(name):
    async with serving() as (fake, client):
        fake.answers.clear()
        call = client.append("log", "x") if name == "append" else client.read("log", lsn=0)
        calling = asyncio.create_task(call)
        await until(lambda: fake.underway == 1)
        closing = asyncio.create_task(client.close(grace=20))
        await until(lambda: client.closed)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        fake.answers.set()
        await closing


async def test_closed_client_says_so():
    async with serving() as (_, client):
        await client.append("log", "x")
    with pytest.raises(RuntimeError, match="closed"):
        await client.append("log", "x")


@pytest.mark.parametrize(
    ("endpoint", "complete"),
    [
        ("localhost", "localhost:6925"),
        ("http://localhost/", "localhost:6925"),
        ("[::1]", "[::1]:6925"),
        ("http://localhost:80", "localhost:80"),
        ("dns:///wald", "dns:///wald"),
    ],
)
def test_endpoint_without_a_port_gets_the_default_one(endpoint, complete):
    assert wald.Client(endpoint).endpoint == complete


@pytest.mark.parametrize("endpoint", ["127.0.0.1:179250", "localhost:0", "localhost:x", "me:secret@localhost", ""])
def test_endpoint_that_would_connect_elsewhere_is_refused(endpoint):
    with pytest.raises(ValueError) as refused:
        wald.Client(endpoint)
    assert "secret" not in str(refused.value)


async def test_only_one_start_is_taken():
    async with serving() as (_, client):
        with pytest.raises(ValueError, match="at most one"):
            await client.read("log", lsn=1, tail_offset=2)
        with pytest.raises(ValueError, match="exactly one"):
            client.scan("log", prefix="l")


async def test_one_record_is_not_taken_for_many():
    async with serving() as (fake, client):
        with pytest.raises(TypeError, match="list"):
            await client.append_batch([wald.LogBatch("log", "text")])
        with pytest.raises(TypeError, match="int"):
            await client.append("log", 5)
        assert not fake.attempts
