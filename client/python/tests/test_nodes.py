"""Several servers that share a store: the client finds the owner, and goes on there."""

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest
from fake import DRAINING, LOST, NOT_APPLIED, REFUSED, Unanswered, message, moved, no_server, refusal, running, until

import wald
from wald import LogBatch, Outcome

STARTING = refusal(grpc.StatusCode.UNAVAILABLE, "STARTING", NOT_APPLIED)
# No call of a test can wait for such a pause.
NO_PAUSE = wald.RetryPolicy(first_pause=100.0, max_pause=100.0)


class Counting(wald.RetryPolicy):
    """Notes the failures before each pause."""

    seen = []

    def pause(self, failures, error):
        self.seen.append(failures)
        return 0.001


@pytest.fixture
def pauses():
    Counting.seen.clear()
    return Counting.seen


@contextlib.asynccontextmanager
async def cluster(count):
    """Fakes of one store, and their endpoints."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(running()) for _ in range(count)]
        fakes = [fake for fake, _ in nodes]
        for fake in fakes:
            fake.applied = fakes[0].applied
        yield fakes, [f"127.0.0.1:{port}" for _, port in nodes]


@pytest.fixture
def dead():
    """An endpoint that refuses connections."""
    with no_server() as endpoint:
        yield endpoint


def client_of(*endpoints, **settings):
    retry = wald.RetryPolicy(first_pause=0.001, max_pause=0.01)
    return wald.Client(",".join(endpoints), **{"retry": retry, **settings})


async def test_owner_is_asked_at_once_and_remembered():
    async with cluster(2) as ((a, b), (at_a, at_b)):
        a.refuses = moved(at_b)
        async with client_of(at_a, retry=NO_PAUSE) as client:
            assert client.endpoint == at_a
            # A plain append: nothing was applied, so that it is repeated.
            await client.append("log", "x")
            assert client.endpoint == at_b
            await client.append("log", "y")
            assert (await client.tail("log")).tail_lsn == 7
        assert (len(a.attempts), len(b.attempts)) == (1, 3)


async def test_servers_that_name_each_other_do_not_make_a_client_spin(pauses):
    async with cluster(2) as ((a, b), (at_a, at_b)):
        a.refuses, b.refuses = moved(at_b), moved(at_a)
        async with client_of(at_a, retry=Counting(max_attempts=6)) as client:
            with pytest.raises(wald.Unavailable) as failed:
                await client.append("log", "x")
        assert (failed.value.reason, failed.value.outcome) == ("MOVED", Outcome.NOT_APPLIED)
        assert (len(a.attempts), len(b.attempts)) == (3, 3)
        assert pauses == [2, 4, 6]


async def test_server_that_names_itself_is_not_asked_at_once(pauses):
    async with cluster(1) as ((a,), (at_a,)):
        a.script.extend([moved(at_a)] * 3)
        async with client_of(at_a, retry=Counting()) as client:
            await client.append("log", "x")
        assert pauses == [1, 2, 3]


@pytest.mark.parametrize("answer", [STARTING, DRAINING, moved("")], ids=["starting", "draining", "no owner"])
async def test_next_server_of_the_list_is_asked_in_a_ring(answer, dead, pauses):
    async with cluster(1) as ((a,), (at_a,)):
        async with client_of(dead, at_a, retry=Counting()) as client:
            await client.append("log", "x")
            assert client.endpoint == at_a
            a.script.append(answer)
            await client.append("log", "y")
            assert client.endpoint == at_a
        # The dead one, then the answer, then the dead one again.
        assert len(a.attempts) == 3 and pauses == [1, 1, 2]


async def test_lost_connection_leads_on_only_if_the_call_may_be_repeated():
    async with cluster(2) as ((a, b), (at_a, at_b)):
        a.script.extend([LOST])
        async with client_of(at_a, at_b) as client:
            with pytest.raises(wald.ConnectionLost):
                await client.append("log", "x")
            assert not b.attempts
            b.script.append(LOST)
            await client.append("log", "x", expected_lsn=3)
        assert (len(a.attempts), len(b.attempts)) == (2, 1)


async def test_refusal_of_the_owner_moves_nobody():
    busy = refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "BUSY", NOT_APPLIED)
    async with cluster(2) as ((a, b), (at_a, at_b)):
        a.script.extend([busy, busy])
        async with client_of(at_a, at_b) as client:
            await client.append("log", "x")
        assert (len(a.attempts), len(b.attempts)) == (3, 0)


async def test_server_without_its_bucket_is_left_for_the_next_one():
    down = refusal(grpc.StatusCode.UNAVAILABLE, "BUCKET_DOWN", NOT_APPLIED)
    async with cluster(2) as ((a, b), (at_a, at_b)):
        a.refuses = down
        async with client_of(at_a, at_b) as client:
            await client.append("log", "x")
            assert client.endpoint == at_b
        assert (len(a.attempts), len(b.attempts)) == (1, 1)


async def test_owner_outside_of_the_list_is_left_for_the_first_of_it():
    async with cluster(3) as ((a, b, outside), (at_a, at_b, at_outside)):
        async with client_of(at_a, at_b) as client:
            a.refuses = moved(at_outside)
            await client.append("log", "x")
            assert client.endpoint == at_outside
            a.refuses, outside.refuses = None, DRAINING
            await client.append("log", "y")
            assert client.endpoint == at_a
        assert [len(fake.attempts) for fake in (a, b, outside)] == [2, 0, 2]


async def test_at_most_one_channel_is_kept_beside_the_list(dead):
    async with cluster(4) as (fakes, (at_a, *others)):
        for fake, owner in zip(fakes, others):
            fake.refuses = moved(owner)
        async with client_of(at_a, dead) as client:
            await client.append("log", "x")
            assert client.endpoint == others[-1]
            assert set(client._nodes._connections) == {at_a, others[-1]}
        assert [len(fake.attempts) for fake in fakes] == [1, 1, 1, 1]


async def test_late_failures_do_not_move_away_from_a_newer_server(dead):
    async with cluster(3) as ((a, b, c), (at_a, at_b, at_c)):
        async with client_of(dead, at_b, at_c) as client:
            await asyncio.gather(*(client.append("log", "x") for _ in range(20)))
            assert client.endpoint == at_b and not c.attempts
        async with client_of(at_a) as client:
            # A stream that is still open at the old owner.
            a.open.clear()
            session = client.session()
            late = await session.send([LogBatch("log", ["x"])])
            a.refuses = moved(at_b)
            await client.append("log", "x")
            a.refuses = moved(at_c)
            a.open.set()
            with pytest.raises(wald.Unavailable):
                await late
            assert client.endpoint == at_b


async def test_session_after_one_that_moved_is_at_the_owner():
    async with cluster(2) as ((a, b), (at_a, at_b)):
        async with client_of(at_a) as client:
            a.script.extend([None, moved(at_b)])
            session = client.session()
            futures = [await session.send([LogBatch("log", [text])]) for text in ("r0", "r1")]
            with pytest.raises(wald.Unavailable) as failed:
                await session.close()
            assert (failed.value.reason, failed.value.outcome) == ("MOVED", Outcome.NOT_APPLIED)
            assert (await futures[0]).appends[0].first_lsn == 0
            async with client.session() as session:
                await (await session.send([LogBatch("log", ["r1"])]))
        assert a.data() == ["r0", "r1"] and len(b.attempts) == 1


async def test_producer_goes_on_at_the_owner_without_loss_or_double():
    async with cluster(2) as ((a, b), (at_a, at_b)):
        async with client_of(at_a, at_b) as client, client.producer("log") as producer:
            a.script.extend([None] * 5)
            a.refuses = moved(at_b)
            # The owner changes again: its last batch was applied, and its ack is lost.
            b.script.extend([None] * 5 + [Unanswered(LOST)])
            futures = [await producer.send([f"r{number}"]) for number in range(20)]
            await futures[4]
            await producer.flush()
            assert client.endpoint == at_b
        assert [(await future).first_lsn for future in futures] == list(range(20))
        assert b.data() == [f"r{number}" for number in range(20)]
        sequences = [request.batch.batches[0].condition.producer.sequence for request in b.attempts]
        assert sequences[:7] == [5, 6, 7, 8, 9, 10, 10]
        assert (await futures[10]).deduplicated


async def test_producer_opens_at_the_owner():
    async with cluster(2) as ((a, b), (at_a, at_b)):
        a.refuses = moved(at_b)
        async with client_of(at_a, retry=NO_PAUSE) as client, client.producer("log") as producer:
            await (await producer.append("r0"))
        assert b.log_exists and b.data() == ["r0"]
        assert not a.attempts


async def test_follower_goes_on_at_the_owner_from_its_cursor():
    async with cluster(2) as ((a, b), (at_a, at_b)):
        async with client_of(at_a) as client, client.follow("log") as follower:
            for item in (message(b"1", (0, ["a"])), moved(at_b)):
                a.messages.put_nowait(item)
            b.messages.put_nowait(message(b"2", (1, ["b"])))
            found = [[record.text for _, record in (await anext(follower)).records()] for _ in range(2)]
        assert found == [["a"], ["b"]]
        assert (len(a.scans), [scan.cursor for scan in b.scans]) == (1, [b"1"])


async def test_scan_that_begins_elsewhere_goes_to_the_owner():
    async with cluster(2) as ((a, b), (at_a, at_b)):
        a.refuses = moved(at_b)
        b.messages.put_nowait(message(b"1", (0, ["a"])))
        async with client_of(at_a) as client, client.scan("log", max_records=1) as scan:
            assert [record.text async for event in scan for _, record in event.records()] == ["a"]


async def test_owner_that_answers_through_another_server_is_called_itself():
    async with cluster(2) as ((a, b), (at_a, at_b)):
        for listed in ([at_a], [at_a, at_b]):
            a.speaks_for = at_b
            async with client_of(*listed, retry=NO_PAUSE) as client:
                await client.append("log", "x")
                await until(lambda: client.endpoint == at_b)
                before = (len(a.attempts), len(b.attempts) + 1)
                await client.append("log", "x")
                assert (len(a.attempts), len(b.attempts)) == before
                # The store moves, and is back at once.
                a.speaks_for, b.refuses = None, moved(at_a)
                await client.append("log", "x")
                assert client.endpoint == at_a
                a.speaks_for, b.refuses = at_b, None
                await a.end_streams(client)
                await client.append("log", "x")
                await until(lambda: client.endpoint == at_b)


async def test_stream_through_another_server_stays_and_the_next_is_direct():
    async with cluster(2) as ((a, b), (at_a, at_b)):
        a.speaks_for = at_b
        async with client_of(at_a) as client:
            async with client.session() as first:
                await (await first.send([LogBatch("log", ["r0"])]))
                await until(lambda: client.endpoint == at_b)
                await (await first.send([LogBatch("log", ["r1"])]))
            async with client.session() as second:
                await (await second.send([LogBatch("log", ["r2"])]))
            assert (len(a.attempts), len(b.attempts)) == (2, 1)
        async with client_of(at_a) as client:
            async with client.follow("log"):
                await until(lambda: client.endpoint == at_b)
            async with client.follow("log"):
                assert (len(a.scans), len(b.scans)) == (1, 1)


async def test_owner_out_of_reach_keeps_the_client_where_it_is_answered(dead):
    connections = []

    async def keep(reader, writer):
        connections.append(writer)

    # It takes connections and answers nothing, as a filter of packets in between.
    silent = await asyncio.start_server(keep, "127.0.0.1", 0)
    at_silent = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with silent, cluster(2) as ((a, b), (at_a, at_b)):
        # This is b, by an address that must not get the token in plaintext.
        exposed = at_b.replace("127.0.0.1", "0.0.0.0")
        for owner in (at_silent, dead, exposed, "a/b", ""):
            a.speaks_for = owner
            async with client_of(at_a, retry=NO_PAUSE, token="k7Qp", timeout=2.0) as client:
                for _ in range(20):
                    await client.append("log", "x")
                    await asyncio.sleep(0.002)
                assert client.endpoint == at_a, owner
        # All of these answers lead to one attempt.
        assert len(connections) == 1
        connections[0].close()


async def test_channel_of_ones_own_is_not_left(pauses):
    async with cluster(2) as ((a, b), (at_a, at_b)):
        async with grpc.aio.insecure_channel(at_a) as channel:
            async with wald.Client(channel=channel, retry=Counting()) as client:
                a.script.extend([moved(at_b), moved(""), DRAINING])
                await client.append("log", "x")
                a.speaks_for = at_b
                await client.append("log", "x")
                assert client._nodes._approaching is None
        assert (len(a.attempts), len(b.attempts), pauses) == (5, 0, [1, 2, 3])


@pytest.mark.parametrize(
    ("owner", "settings"),
    [
        # In plaintext, a token goes only to loopback.
        ("10.255.255.1:6925", {"token": "k7Qp"}),
        ("unix:80", {}),
        ("me@127.0.0.1:1", {}),
        ("http://127.0.0.1:1", {}),
        ("127.0.0.1:x", {}),
    ],
)
async def test_owner_that_must_not_be_called_is_named_and_not_called(owner, settings):
    async with cluster(2) as ((a, b), (at_a, at_b)):
        a.refuses = b.refuses = moved(owner)
        async with client_of(at_a, retry=Counting(max_attempts=3), **settings) as client:
            with pytest.raises(wald.Unavailable, match="does not call that owner") as failed:
                await client.append("log", "x")
            assert owner in str(failed.value) and "k7Qp" not in str(failed.value)
            assert client.endpoint == at_a and len(a.attempts) == 3
        # It counts as no owner.
        async with client_of(at_a, at_b, retry=Counting(max_attempts=2), **settings) as client:
            with pytest.raises(wald.Unavailable):
                await client.append("log", "x")
            assert len(b.attempts) == 1


async def test_error_names_the_server_if_there_are_several():
    missing = refusal(grpc.StatusCode.NOT_FOUND, "LOG_NOT_FOUND", REFUSED)
    async with cluster(2) as ((a, b), (at_a, at_b)):
        a.refuses = b.refuses = missing
        async with client_of(at_a) as alone, client_of(at_b, at_a) as client:
            with pytest.raises(wald.LogNotFound) as failed:
                await client.tail("log")
            assert str(failed.value) == f"LOG_NOT_FOUND: refused (server {at_b})"
            with pytest.raises(wald.LogNotFound) as failed:
                await alone.tail("log")
            assert str(failed.value) == "LOG_NOT_FOUND: refused"
            a.refuses = moved(at_b)
            with pytest.raises(wald.LogNotFound, match=at_b):
                await alone.tail("log")


def test_each_endpoint_of_a_list_is_completed(monkeypatch):
    client = wald.Client("localhost,http://[::1],localhost:6925,127.0.0.1:80/")
    assert client._nodes._listed == ("localhost:6925", "[::1]:6925", "127.0.0.1:80")
    monkeypatch.setenv("WALD_ENDPOINT", "https://a,https://b:80")
    client = wald.Client.from_env()
    assert client._nodes._listed == ("a:6925", "b:80") and client.endpoint == "a:6925"


@pytest.mark.parametrize(
    ("endpoints", "words"),
    [
        ("a:1,b:0", "`b:0` is not an endpoint .* port"),
        ("https://a,b", "`b` is not an endpoint .* https://"),
        ("a,https://b", "`https://b` is not an endpoint .* https://"),
        ("a,,b", "its part 2 is empty"),
        ("a,", "its part 2 is empty"),
        (",a", "its part 1 is empty"),
        ("a, b", "` b` is not an endpoint"),
        ("a,me:se,cret@b", "no user name"),
    ],
)
def test_list_with_a_bad_part_is_refused(endpoints, words):
    with pytest.raises(ValueError, match=words) as refused:
        wald.Client(endpoints)
    assert "cret" not in str(refused.value)


def test_token_does_not_cross_plaintext_to_any_server_of_the_list():
    with pytest.raises(wald.TokenError, match="plaintext to wald.internal:6925"):
        wald.Client("127.0.0.1,wald.internal", token="k7Qp")
