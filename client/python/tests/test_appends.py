"""The appends of a client share a stream, and keep the results, errors and rules of calls."""

import asyncio
import concurrent.futures
import functools
import gc
import socket
import weakref

import grpc
import grpc.aio
import pytest
from fake import (
    DRAINING,
    LOST,
    NOT_APPLIED,
    REFUSED,
    UNKNOWN,
    Elsewhere,
    moved,
    no_server,
    records_of,
    refusal,
    running,
    serving,
    until,
)
from grpc import StatusCode

import wald
from wald import LogBatch, Outcome, Retry, appends
from wald.v1 import wal_pb2

DURABLE = wald.Durability.DURABLE
MISSING = refusal(StatusCode.FAILED_PRECONDITION, "LOG_MISSING", REFUSED, failed=[("LOG_MISSING", "log", "no such log")])
BUSY = refusal(StatusCode.RESOURCE_EXHAUSTED, "BUSY", NOT_APPLIED, delay_ms=1)
WRONG = refusal(StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST", {**REFUSED, "request_id": "0"})
OLDER = refusal(StatusCode.FAILED_PRECONDITION, "POSITION_MISMATCH", {**REFUSED, "request_id": "0"})
FAILED = refusal(StatusCode.INTERNAL, "JOURNAL_FAILED", UNKNOWN)
UNIMPLEMENTED = (StatusCode.UNIMPLEMENTED, "no such method", ())
EXPIRED = refusal(StatusCode.UNAUTHENTICATED, "CREDENTIAL_EXPIRED", NOT_APPLIED)


@pytest.fixture
def soon_idle(monkeypatch):
    monkeypatch.setattr(appends, "_IDLE_SECONDS", 0.05)


def append(client, data="x", durability=DURABLE, **more):
    return asyncio.create_task(client.append("log", data, durability=durability, **more))


async def many(client, count=50):
    return await asyncio.gather(*(client.append("log", str(number), durability=DURABLE) for number in range(count)))


async def result(task):
    [outcome] = await asyncio.gather(task, return_exceptions=True)
    return outcome


async def sent(fake, client, data="x", **more):
    """An append of its own message that has arrived at the server."""
    count = len(fake.attempts)
    task = append(client, data, **more)
    await until(lambda: len(fake.attempts) > count)
    return task


# One stream.


async def test_appends_share_one_stream():
    async with serving() as (fake, client):
        fake.answers.clear()
        tasks = [await sent(fake, client, str(number)) for number in range(5)]
        tasks.append(await sent(fake, client, "guarded", expected_lsn=7))
        batch = asyncio.create_task(client.append_batch([LogBatch("log", ["a", "b"]), LogBatch("other", ["c"])]))
        await until(lambda: len(fake.attempts) == 7)
        fake.answers.set()
        assert all([isinstance(await task, wald.Ack) for task in tasks])
        ack = await batch
        assert [append.log for append in ack.appends] == ["log", "other"]
        assert ack.appends[0].next_lsn == ack.appends[0].first_lsn + 2
        await client.append("log", "z")
        assert fake.calls == ["AppendSession"]
        kinds = [type(request).__name__ for request in fake.attempts]
        assert kinds == ["AppendRequest"] * 6 + ["AppendBatchRequest", "AppendRequest"]


async def test_refused_request_gets_its_error_and_the_others_their_acks():
    async with serving() as (fake, client):
        fake.held["a"] = asyncio.Event()
        fake.script.extend([None, MISSING, None])
        a = await sent(fake, client, "a")
        b = await sent(fake, client, "b")
        error = await result(b)
        assert type(error) is wald.LogMissing
        assert (error.code, error.reason, str(error)) == (StatusCode.FAILED_PRECONDITION, "LOG_MISSING", "LOG_MISSING: refused")
        assert (error.outcome, error.retry, error.facts) == (Outcome.NOT_APPLIED, Retry.NEVER, REFUSED)
        assert error.failed == (wald.FailedCheck("LOG_MISSING", "log", "no such log"),)
        await client.append("log", "c")
        fake.held["a"].set()
        assert isinstance(await a, wald.Ack) and fake.calls == ["AppendSession"]


async def test_refused_request_is_repeated_as_a_refused_call():
    async with serving() as (fake, client):
        fake.script.extend([BUSY, BUSY])
        await client.append("log", "x")
        assert len(fake.attempts) == 3 and fake.calls == ["AppendSession"]
        fake.script.append(BUSY)
        client.retry = wald.RetryPolicy(max_attempts=1)
        with pytest.raises(wald.Overloaded) as busy:
            await client.append("log", "x")
        assert busy.value.retry_after == 0.001


async def test_answers_come_in_any_order():
    async with serving() as (fake, client):
        fake.held["first"] = asyncio.Event()
        first = await sent(fake, client, "first")
        assert [(await client.append("log", "x")).lsn for _ in range(3)] == [2, 3, 4]
        assert not first.done()
        fake.held["first"].set()
        await first
        assert fake.calls == ["AppendSession"]


# Several appends in one message.


async def test_plain_appends_that_wait_together_become_one_batch():
    async with serving() as (fake, client):
        acks = await asyncio.gather(*(client.append("log", str(number), durability=DURABLE) for number in range(50)))
        assert len(fake.attempts) == 1 and fake.calls == ["AppendSession"]
        assert fake.sent() == [str(number) for number in range(50)]
        assert [ack.lsn for ack in acks] == list(range(1, 51))
        assert {ack.durability for ack in acks} == {wald.Durability.DURABLE}
        assert [(ack.timestamp_us, ack.durable_lsn, ack.position, ack.log_id) for ack in acks[:2]] == [(9, 51, 77, 42)] * 2
        fake.attempts.clear()
        settings = {"durability": wald.Durability.WRITTEN}
        await asyncio.gather(*(client.append("log", wald.Record("x", headers=[("a", "b")]), **settings) for _ in range(2)))
        [request] = fake.attempts
        assert (request.durability, len(request.batches), request.batches[0].log) == (wald.Durability.WRITTEN, 1, "log")
        assert all(record.headers[0].key == "a" for record in request.batches[0].records)


async def test_batch_of_appends_has_bounds():
    async with serving() as (fake, client):
        await asyncio.gather(*(client.append("log", "x", durability=DURABLE) for _ in range(1500)))
        assert [len(records_of(request)) for request in fake.attempts] == [1000, 500]
        fake.attempts.clear()
        await asyncio.gather(*(client.append("log", "x" * 30_000, durability=DURABLE) for _ in range(4)))
        assert [len(records_of(request)) for request in fake.attempts] == [2, 2]
        assert fake.calls == ["AppendSession"]


@pytest.mark.parametrize(
    "other",
    [
        lambda client: client.append("other", "x"),
        lambda client: client.append("log", "x", expected_lsn=3),
        lambda client: client.append("log", "x", durability=wald.Durability.WRITTEN),
        lambda client: client.append("log", wald.Record("x", timestamp_us=5)),
        lambda client: client.append_batch([LogBatch("log", ["x"])]),
    ],
)
async def test_request_that_cannot_join_those_that_wait_is_a_call_of_its_own(other):
    async with serving() as (fake, client):
        plain = functools.partial(client.append, "log", "x", durability=DURABLE)
        for first, second in ((plain, functools.partial(other, client)), (functools.partial(other, client), plain)):
            await asyncio.gather(first(), second())
        kinds = {len(records_of(request)) for request in fake.attempts}
        assert kinds == {1} and len(fake.attempts) == 4
        assert len(fake.calls) == 3 and fake.calls.count("AppendSession") == 1


async def test_refused_batch_of_appends_gives_each_its_own_answer():
    async with serving() as (fake, client):
        fake.script.extend([MISSING, None, MISSING, None])
        outcomes = await asyncio.gather(*(client.append("log", str(n), durability=DURABLE) for n in range(3)), return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Ack", "Ack", "LogMissing"]
        assert sorted(fake.calls) == ["Append"] * 3 + ["AppendSession"]
        # The next ones share the stream again.
        await client.append("log", "x", durability=DURABLE)
        assert fake.calls.count("Append") == 3


async def test_batch_of_appends_that_may_have_been_applied_is_not_sent_again():
    async with serving() as (fake, client):
        fake.script.append(FAILED)
        outcomes = await asyncio.gather(*(client.append("log", str(n), durability=DURABLE) for n in range(3)), return_exceptions=True)
        assert {(type(error), error.outcome) for error in outcomes} == {(wald.WaldError, Outcome.UNKNOWN)}
        assert len(fake.attempts) == 1
        # Each caller has an error of its own.
        assert len({id(error) for error in outcomes}) == 3


async def test_caller_that_is_cancelled_leaves_the_batch():
    async with serving() as (fake, client):
        tasks = [append(client, str(number)) for number in range(5)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        acks = [await task for task in tasks if task is not tasks[1]]
        assert fake.sent() == ["0", "2", "3", "4"] and [ack.lsn for ack in acks] == [1, 2, 3, 4]


async def test_ack_without_a_known_number_harms_nobody():
    async with serving() as (fake, client):
        fake.held["slow"] = asyncio.Event()
        slow = append(client, "slow")
        await until(lambda: fake.attempts)
        fake.streams[0].put_nowait(wal_pb2.AppendSessionResponse(request_id=77, error=b"\xff"))
        fake.streams[0].put_nowait(wal_pb2.AppendSessionResponse(request_id=0, error=b"\xff"))
        with pytest.raises(wald.WaldError, match="breaks the contract") as broken:
            await slow
        assert broken.value.outcome is Outcome.UNKNOWN
        await client.append("log", "x", durability=DURABLE)


# The end of a stream.


async def test_broken_stream_repeats_only_guarded_appends():
    async with serving() as (fake, client):
        fake.answers.clear()
        plain = [await sent(fake, client, f"p{number}") for number in range(3)]
        guarded = [await sent(fake, client, f"g{number}", expected_lsn=number) for number in range(3)]
        fake.answers.set()
        fake.streams[0].put_nowait(LOST)
        for task in plain:
            error = await result(task)
            assert type(error) is wald.ConnectionLost
            assert (error.outcome, error.retry) == (Outcome.UNKNOWN, Retry.SAFE_WITH_CONDITION)
        for task in guarded:
            assert isinstance(await task, wald.Ack)
        assert sorted(fake.sent()[6:]) == ["g0", "g1", "g2"]
        assert fake.calls.count("AppendSession") == 2


async def test_end_without_a_status_counts_as_a_lost_connection():
    async with serving() as (fake, client):
        fake.answers.clear()
        plain = append(client)
        await until(lambda: fake.attempts)
        fake.streams[0].put_nowait(None)
        assert type(await result(plain)) is wald.ConnectionLost


async def test_leaving_server_lets_plain_appends_be_repeated():
    async with serving() as (fake, client):
        fake.held["0"] = asyncio.Event()
        tasks = [await sent(fake, client, str(number)) for number in range(3)]
        fake.script.append(DRAINING)
        tasks.append(append(client, "3"))
        await until(lambda: len(fake.calls) == 2)
        fake.held["0"].set()
        for task in tasks:
            assert isinstance(await task, wald.Ack)
        # Those that were acked before are not sent again.
        assert sorted(fake.sent()) == ["0", "0", "1", "2", "3", "3"]
        assert fake.calls == ["AppendSession"] * 2


async def test_request_that_was_never_sent_is_repeated_after_a_lost_connection(monkeypatch):
    async with serving() as (fake, client):
        await client.append("log", "x", durability=DURABLE)
        stream = client._appends._current
        # The transport takes no more.
        taken = asyncio.Event()
        monkeypatch.setattr(type(stream._call), "write", lambda *_: taken.wait(), raising=True)
        handed = append(client, "handed")
        await until(lambda: stream._sent)
        kept = append(client, "kept")
        await until(lambda: stream._queue)
        monkeypatch.undo()
        fake.streams[0].put_nowait(LOST)
        error = await result(handed)
        assert (type(error), error.outcome) == (wald.ConnectionLost, Outcome.UNKNOWN)
        assert isinstance(await kept, wald.Ack)
        assert fake.sent() == ["x", "kept"]


async def test_appends_go_to_the_owner_and_earlier_streams_deliver_their_answers():
    async with running() as (a, at_a), running() as (b, at_b):
        async with wald.Client(f"127.0.0.1:{at_a}", retry=wald.RetryPolicy(first_pause=100, max_pause=100)) as client:
            a.held["slow"] = asyncio.Event()
            slow = await sent(a, client, "slow")
            old = client._appends._current
            client._nodes.current = f"127.0.0.1:{at_b}"
            await many(client, 5)
            assert not old.takes_requests
            assert len(b.sent()) == 5 and not slow.done()
            a.held["slow"].set()
            assert isinstance(await slow, wald.Ack)
            await until(lambda: not a.streams)
            assert b.calls == ["AppendSession"]
            # The store moves back.
            b.refuses = moved(f"127.0.0.1:{at_a}")
            await many(client, 5)
            assert client.endpoint == f"127.0.0.1:{at_a}" and len(a.sent()) == 6
            assert a.calls == ["AppendSession"] * 2


async def test_owner_in_the_header_of_the_stream_is_called_itself():
    async with running() as (a, at_a), running() as (b, at_b):
        a.speaks_for = f"127.0.0.1:{at_b}"
        async with wald.Client(f"127.0.0.1:{at_a}") as client:
            await client.append("log", "x", durability=DURABLE)
            await until(lambda: client.endpoint == a.speaks_for)
            await client.append("log", "x", durability=DURABLE)
            assert (len(a.attempts), len(b.attempts)) == (1, 1)
            await until(lambda: not a.streams)


@pytest.mark.parametrize("status", [WRONG, OLDER, UNIMPLEMENTED])
async def test_wrong_message_makes_each_append_a_call_of_its_own(status):
    async with serving() as (fake, client):
        fake.answers.clear()
        tasks = [await sent(fake, client, str(number)) for number in range(4)]
        batch = asyncio.create_task(client.append_batch([LogBatch("log", ["b"])]))
        await until(lambda: len(fake.attempts) == 5)
        fake.script.extend([None, MISSING])
        fake.streams[0].put_nowait(status)
        await until(lambda: len(fake.attempts) == 10)
        fake.answers.set()
        outcomes = await asyncio.gather(*tasks, batch, return_exceptions=True)
        # A plain append too: nothing of it was applied. Each has an answer of its own.
        assert sum(isinstance(outcome, (wald.Ack, wald.BatchAck)) for outcome in outcomes) == 4
        assert sum(isinstance(outcome, wald.LogMissing) for outcome in outcomes) == 1
        assert not set(fake.sent()[5:]) ^ {"0", "1", "2", "3", "b"}
        assert sorted(fake.calls) == ["Append"] * 4 + ["AppendBatch", "AppendSession"]
        await client.append("log", "x", durability=DURABLE)
        assert fake.calls.count("AppendSession") == 1
        # A minute later.
        client._open().appends_alone_until = asyncio.get_running_loop().time()
        await client.append("log", "x", durability=DURABLE)
        assert fake.calls.count("AppendSession") == 2


@pytest.mark.parametrize(
    "status",
    [
        (StatusCode.INVALID_ARGUMENT, "wrong", ()),
        refusal(StatusCode.INVALID_ARGUMENT, "NO", {**REFUSED, "request_id": "0"}, domain="mesh.example"),
        refusal(StatusCode.INVALID_ARGUMENT, "NEW_REASON", UNKNOWN),
    ],
)
async def test_wrong_message_without_walds_word_leaves_appends_unknown(status):
    async with serving() as (fake, client):
        fake.answers.clear()
        plain = [await sent(fake, client, str(number)) for number in range(3)]
        fake.streams[0].put_nowait(status)
        for task in plain:
            error = await result(task)
            assert isinstance(error, wald.WaldError), error
            assert (error.code, error.outcome) == (StatusCode.INVALID_ARGUMENT, Outcome.UNKNOWN)
        # Nothing was sent again.
        assert fake.sent() == ["0", "1", "2"] and fake.calls == ["AppendSession"]
        fake.answers.set()


async def test_call_after_a_wrong_message_is_one_of_the_current_server():
    async with running() as (a, at_a), running() as (b, at_b):
        settings = {"retry": wald.RetryPolicy(first_pause=0.001)}
        async with wald.Client(f"127.0.0.1:{at_a},127.0.0.1:{at_b}", **settings) as client:
            a.answers.clear()
            task = await sent(a, client)
            client._nodes.current = f"127.0.0.1:{at_b}"
            # The failure of b leads on to a.
            b.script.append(DRAINING)
            a.streams[0].put_nowait(WRONG)
            a.answers.set()
            assert isinstance(await task, wald.Ack)
            assert (a.calls, b.calls) == (["AppendSession", "Append"], ["Append"])


async def test_expired_token_of_the_stream_is_read_again(tmp_path):
    file = tmp_path / "token"
    file.write_text("first")
    async with serving(token_file=file) as (fake, client):
        fake.answers.clear()
        tasks = [await sent(fake, client, str(number)) for number in range(3)]
        file.write_text("second")
        fake.streams[0].put_nowait(EXPIRED)
        fake.answers.set()
        for task in tasks:
            assert isinstance(await task, wald.Ack)
        assert [metadata["authorization"] for metadata in fake.metadata] == ["Bearer first", "Bearer second"]
        await fake.end_streams(client, EXPIRED)
        fake.refuses = EXPIRED
        with pytest.raises(wald.CredentialExpired):
            await client.append("log", "x", durability=DURABLE)
        assert len(fake.metadata) == 3


async def test_replaced_token_counts_for_the_next_append(tmp_path):
    file = tmp_path / "token"
    file.write_text("first")
    async with serving(token_file=file) as (fake, client):
        await client.append("log", "x", durability=DURABLE)
        file.write_text("second")
        client._token._read_again()
        await client.append("log", "x", durability=DURABLE)
        assert [metadata["authorization"] for metadata in fake.metadata] == ["Bearer first", "Bearer second"]


# Deadlines and cancellation.


async def test_append_that_was_sent_ends_at_its_deadline_with_an_unknown_outcome():
    async with serving() as (fake, client):
        fake.held["slow"] = asyncio.Event()
        slow = append(client, "slow", timeout=0.1)
        error = await result(slow)
        assert type(error) is wald.DeadlineExceeded and error.code is StatusCode.DEADLINE_EXCEEDED
        assert (error.outcome, error.retry) == (Outcome.UNKNOWN, Retry.SAFE_WITH_CONDITION)
        stream = client._appends._current
        assert not stream._sent and not any(message.requests for message in stream._queue)
        # Its answer comes late, among others.
        fake.held["slow"].set()
        await many(client)
        assert fake.calls == ["AppendSession"]


async def give_up(fake, client, silence):
    """Cancels an append that the server has, once its stream has brought no answer for that many seconds."""
    task = await sent(fake, client, "given up")
    client._appends._current._silent_since -= silence
    task.cancel()
    await asyncio.wait([task])


async def test_stream_without_any_answer_takes_no_more_appends():
    async with serving() as (fake, client):
        fake.held["waits"] = fake.held["given up"] = asyncio.Event()
        waiting = await sent(fake, client, "waits")
        await give_up(fake, client, appends._SILENCE_SECONDS)
        await client.append("log", "x", durability=DURABLE)
        assert fake.calls == ["AppendSession"] * 2
        # An append that waits keeps its place on the silent stream.
        fake.held["waits"].set()
        assert isinstance(await waiting, wald.Ack)


async def test_stream_that_answers_others_stays():
    async with serving() as (fake, client):
        fake.held["given up"] = asyncio.Event()
        for _ in range(2):
            await give_up(fake, client, appends._SILENCE_SECONDS * 3 / 5)
            # Its answer begins the time again.
            await client.append("log", "x", durability=DURABLE)
        assert fake.calls == ["AppendSession"]


async def test_append_that_was_not_sent_ends_at_its_deadline_as_not_applied():
    # It takes connections, and answers nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with wald.Client(f"127.0.0.1:{silent.getsockname()[1]}") as client:
            error = await result(append(client, timeout=0.1))
            assert type(error) is wald.DeadlineExceeded
            assert (error.outcome, error.retry) == (Outcome.NOT_APPLIED, Retry.SAFE)
            assert not any(message.requests for message in client._appends._current._queue)


async def test_cancelled_append_is_forgotten():
    async with serving() as (fake, client):
        fake.held["slow"] = asyncio.Event()
        slow = append(client, "slow")
        await until(lambda: fake.attempts)
        # This one is cancelled before it is sent.
        never = append(client, "never")
        await asyncio.sleep(0)
        for task in (never, slow):
            task.cancel()
        for task in (never, slow):
            with pytest.raises(asyncio.CancelledError):
                await task
        stream = client._appends._current
        assert not stream._sent and not any(message.requests for message in stream._queue)
        fake.held["slow"].set()
        await many(client, 5)
        assert "never" not in fake.sent()
        assert fake.calls == ["AppendSession"]


# Calls of their own.


async def test_large_request_is_a_call_of_its_own():
    async with serving() as (fake, client):
        await client.append("log", b"x" * (64 << 10))
        await client.append_batch([LogBatch("log", [b"x" * 40_000] * 2)])
        assert fake.calls == ["Append", "AppendBatch"]
        await client.append("log", b"x" * (63 << 10))
        assert fake.calls == ["Append", "AppendBatch", "AppendSession"]


async def test_some_clients_append_by_calls_of_their_own():
    class Interceptor(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation, details, request):
            return await continuation(details, request)

    for settings in ({"share_appends": False}, {"metadata": [("x-team", "a")]}, {"interceptors": [Interceptor()]}):
        async with running() as (fake, port), wald.Client(f"127.0.0.1:{port}", **settings) as client:
            await many(client, 3)
            await client.append_batch([LogBatch("log", ["x"])])
            assert fake.calls == ["Append"] * 3 + ["AppendBatch"]
    async with running() as (fake, port), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        async with wald.Client(channel=channel) as client:
            await client.append("log", "x", durability=DURABLE)
            assert fake.calls == ["Append"]


# The end.


async def test_idle_stream_closes_and_the_next_append_opens_another(monkeypatch):
    async with serving() as (fake, client):
        await client.append("log", "x", durability=DURABLE)
        # It was in use a moment ago.
        client._appends._current._check_idle()
        assert client._appends._current.takes_requests
        # A request is in flight for longer than the stream may be idle.
        fake.held["slow"] = asyncio.Event()
        slow = append(client, "slow")
        await asyncio.sleep(0)
        client._appends._current._idle_since -= 10 * appends._IDLE_SECONDS
        client._appends._current._check_idle()
        assert fake.calls == ["AppendSession"] and client._appends._current.takes_requests
        # The server has as long again for its end of the stream.
        monkeypatch.setattr(appends, "_IDLE_SECONDS", 1)
        fake.held["slow"].set()
        await slow
        await until(lambda: not fake.streams and not client._appends._streams)
        assert fake.ended_well == 1
        await client.append("log", "x", durability=DURABLE)
        assert fake.calls == ["AppendSession"] * 2


async def test_stream_that_the_server_does_not_end_is_given_up(soon_idle):
    async with serving() as (fake, client):
        fake.held["slow"] = asyncio.Event()
        assert type(await result(append(client, "slow", timeout=0.05))) is wald.DeadlineExceeded
        # The server still works on the request.
        await until(lambda: not client._appends._streams)
        await until(lambda: not fake.streams)


async def test_close_waits_for_the_appends_underway(monkeypatch):
    # The stream does not end because it is idle.
    monkeypatch.setattr(appends, "_IDLE_SECONDS", 100.0)
    async with running() as (fake, port):
        client = wald.Client(f"127.0.0.1:{port}")
        fake.answers.clear()
        tasks = [await sent(fake, client, str(number)) for number in range(5)]
        closing = asyncio.create_task(client.close(60))
        # From here on it can only wait for the answers.
        await until(lambda: fake.half_closed == 1)
        assert not closing.done()
        fake.answers.set()
        assert all(isinstance(ack, wald.Ack) for ack in await asyncio.gather(*tasks))
        await asyncio.wait_for(closing, 20)
        assert fake.ended_well == 1 and not client._appends._streams


async def test_close_without_patience_ends_the_appends_underway():
    async with running() as (fake, port):
        client = wald.Client(f"127.0.0.1:{port}")
        fake.answers.clear()
        plain = append(client)
        await until(lambda: fake.attempts)
        await client.close(0)
        error = await result(plain)
        assert (type(error), error.outcome) == (wald.ConnectionLost, Outcome.UNKNOWN)
        assert "closed" in str(error)
        await until(lambda: not fake.streams)


async def test_close_ends_the_streams_of_channels_that_were_given_up():
    async with running() as (fake, port):
        client = wald.Client(f"127.0.0.1:{port}")
        fake.answers.clear()
        plain = await sent(fake, client)
        client._nodes.give_up(client.endpoint)
        await client.close(0)
        assert type(await asyncio.wait_for(result(plain), 5)) is wald.ConnectionLost
        assert not client._appends._streams


async def test_closed_client_leaves_no_task():
    async with running() as (fake, port):
        before = asyncio.all_tasks()
        async with wald.Client(f"127.0.0.1:{port}") as client:
            await many(client, 5)
            await fake.end_streams(client)
            await many(client, 5)
        await until(lambda: not fake.streams)
        await until(lambda: not [task for task in asyncio.all_tasks() - before if "wald" in repr(task.get_coro())])
    with no_server() as endpoint:
        async with wald.Client(endpoint, retry=wald.RetryPolicy(max_attempts=1)) as client:
            await result(append(client))
            assert not client._appends._streams
        assert not [task for task in asyncio.all_tasks() - before if "wald" in repr(task.get_coro())]


async def test_forgotten_client_is_collected(soon_idle):
    async with running() as (fake, port):
        client = wald.Client(f"127.0.0.1:{port}")
        await client.append("log", "x", durability=DURABLE)
        gone = weakref.ref(client)
        del client
        await until(lambda: not fake.streams)
        await until(lambda: gc.collect() >= 0 and gone() is None)


def test_threads_share_the_stream_of_a_synchronous_client():
    with Elsewhere() as server, server.client() as client:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            acks = list(pool.map(lambda number: client.append("log", str(number), durability=DURABLE), range(80)))
        assert len(acks) == len(server.fake.sent()) == 80
        assert server.fake.calls == ["AppendSession"]
        client.append_batch([LogBatch("log", ["x"])])
        assert server.fake.calls == ["AppendSession"]
    with Elsewhere() as server, server.client(share_appends=False) as client:
        client.append("log", "x", durability=DURABLE)
        assert server.fake.calls == ["Append"]


async def test_appends_without_a_durability_are_joined_once_an_ack_shows_a_flush():
    async with serving() as (fake, client):
        await asyncio.gather(*(client.append("log", str(n)) for n in range(3)))
        assert len(fake.attempts) == 3
        fake.attempts.clear()
        # The ack said DURABLE.
        await asyncio.gather(*(client.append("log", str(n)) for n in range(3)))
        assert [len(records_of(request)) for request in fake.attempts] == [3]
        fake.attempts.clear()
        await asyncio.gather(*(client.append("other", str(n)) for n in range(3)))
        assert len(fake.attempts) == 3
