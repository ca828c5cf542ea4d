"""Followers: the end of a stream when its caller or its connection gives up."""

import asyncio

import pytest
from fake import DRAINING, LOST, REFUSED, message, refusal, serving, turns, until
from grpc import StatusCode

import wald


async def lines(follower, count):
    """The records of the next events, as text."""
    return [[record.text for _, record in (await anext(follower)).records()] for _ in range(count)]


async def test_impatient_caller_loses_nothing():
    async with serving() as (fake, client), client.follow("log") as follower:
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(follower), 0.02)
        fake.messages.put_nowait(message(b"1", (0, ["a", "b"])))
        assert await lines(follower, 1) == [["a", "b"]]
        assert len(fake.scans) == 1


async def polled(follower, patience):
    """The next event, for a caller who never waits long."""
    deadline = asyncio.get_running_loop().time() + 20
    while asyncio.get_running_loop().time() < deadline:
        try:
            return await asyncio.wait_for(anext(follower), patience)
        except asyncio.TimeoutError:
            continue
    raise AssertionError("no event came")


async def test_impatient_caller_does_not_hold_up_a_new_connection():
    retry = wald.RetryPolicy(first_pause=0.2, max_pause=0.2)
    async with serving(retry=retry) as (fake, client), client.follow("log") as follower:
        for item in (LOST, LOST, message(b"1", (0, ["a"]))):
            fake.messages.put_nowait(item)
        event = await polled(follower, 0.02)
        assert [record.text for _, record in event.records()] == ["a"]
        assert len(fake.scans) == 3


async def test_impatient_caller_notices_a_silent_stream():
    async with serving(silence_timeout=0.3) as (fake, client), client.follow("log") as follower:
        polling = asyncio.create_task(polled(follower, 0.05))
        await until(lambda: len(fake.scans) >= 2)
        fake.messages.put_nowait(message(b"1", (0, ["a"])))
        assert (await polling).cursor == b"1"


async def test_failure_that_comes_between_two_calls_is_raised():
    async with serving() as (fake, client), client.follow("log") as follower:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(follower), 0.02)
        fake.messages.put_nowait(refusal(StatusCode.INVALID_ARGUMENT, "INVALID_SCAN", REFUSED))
        await until(lambda: follower._ended)
        with pytest.raises(wald.InvalidRequest):
            await anext(follower)
        with pytest.raises(StopAsyncIteration):
            await anext(follower)


async def test_cursor_of_an_event_covers_it_and_nothing_after_it():
    async with serving() as (fake, client), client.follow("log", cursor=b"0") as follower:
        fake.messages.put_nowait(message(b"1", (0, ["a"]), (1, ["b"])))
        fake.messages.put_nowait(message(b"2", (2, ["c"])))
        assert follower.cursor == b"0"
        for records, cursor in ((["a", "b"], b"1"), (["c"], b"2")):
            event = await anext(follower)
            assert [record.text for _, record in event.records()] == records
            assert event.cursor == follower.cursor == cursor


async def test_heartbeat_moves_the_cursor_and_caught_up_is_told_once():
    async with serving() as (fake, client), client.follow("log") as follower:
        caught_up = message(b"1")
        caught_up.caught_up = True
        for item in (caught_up, message(b"2"), caught_up, message(b"3", (0, ["a"]))):
            fake.messages.put_nowait(item)
        first = await anext(follower)
        assert first.caught_up and not first.batches and first.cursor == b"1"
        assert await lines(follower, 1) == [["a"]]
        assert follower.cursor == b"3"


async def test_lost_stream_goes_on_at_the_cursor():
    async with serving() as (fake, client), client.follow("log", lsn=5) as follower:
        for item in (message(b"1", (5, ["a"])), LOST, DRAINING, message(b"2", (6, ["b"]))):
            fake.messages.put_nowait(item)
        assert await lines(follower, 2) == [["a"], ["b"]]
        assert [request.WhichOneof("start") for request in fake.scans] == ["lsn", "cursor", "cursor"]
        assert [request.cursor for request in fake.scans[1:]] == [b"1", b"1"]


async def test_follow_that_got_only_heartbeats_begins_again_at_its_start():
    async with serving() as (fake, client), client.follow("log", lsn=5) as follower:
        for item in (message(b""), DRAINING, message(b"1", (5, ["a"]))):
            fake.messages.put_nowait(item)
        assert await lines(follower, 1) == [["a"]]
        assert [request.lsn for request in fake.scans] == [5, 5]


async def test_follow_that_was_open_goes_on_without_end():
    async with serving() as (fake, client), client.follow("log") as follower:
        for _ in range(20):
            fake.messages.put_nowait(LOST)
        fake.messages.put_nowait(message(b"1", (0, ["a"])))
        assert await lines(follower, 1) == [["a"]]
        assert follower.interruption is None


async def test_silent_stream_counts_as_lost():
    async with serving(silence_timeout=0.3) as (fake, client), client.follow("log") as follower:
        waiting = asyncio.create_task(anext(follower))
        await until(lambda: len(fake.scans) >= 3)
        assert isinstance(follower.interruption, wald.DeadlineExceeded)
        waiting.cancel()


async def test_scan_that_does_not_begin_leaves_no_stream():
    async with serving(silence_timeout=0.05) as (fake, client):
        fake.answers.clear()
        follower = client.follow("log")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(follower.open(), 0.2)
        await until(lambda: follower.interruption is not None)
        follower.close()
        await until(lambda: fake.underway == 0)


async def test_scan_that_was_not_entered_leaves_no_stream():
    async with serving() as (fake, client):
        fake.answers.clear()
        follower = client.follow("log")
        entering = asyncio.create_task(follower.__aenter__())
        await until(lambda: fake.underway == 1)
        entering.cancel()
        await until(lambda: fake.underway == 0)


async def test_now_in_many_logs_is_not_moved_by_a_lost_connection():
    # Nothing records where "now" was, and continuing would skip the records since then.
    async with serving() as (fake, client), client.follow(prefix="l", tail_offset=0) as follower:
        fake.messages.put_nowait(LOST)
        with pytest.raises(wald.ConnectionLost):
            await anext(follower)
        assert len(fake.scans) == 1


async def test_now_in_one_log_becomes_an_lsn():
    async with serving() as (fake, client), client.follow("log", tail_offset=2) as follower:
        fake.messages.put_nowait(LOST)
        fake.messages.put_nowait(message(b"1", (5, ["a"])))
        assert await lines(follower, 1) == [["a"]]
        assert [request.lsn for request in fake.scans] == [5, 5]


async def test_now_of_any_node_is_left_to_the_node():
    # The owner's tail is above that of a copy, which would refuse it.
    async with serving() as (fake, client), client.follow("log", tail_offset=2, any_node=True) as follower:
        fake.messages.put_nowait(message(b"1", (3, ["a"])))
        assert await lines(follower, 1) == [["a"]]
        assert [(request.WhichOneof("start"), request.tail_offset) for request in fake.scans] == [("tail_offset", 2)]
        assert not fake.attempts


async def test_another_task_closes_a_follower():
    async with serving() as (fake, client):
        follower = client.follow("log")

        async def all_events():
            return [event async for event in follower]

        await follower.open()
        waiting = asyncio.create_task(all_events())
        await turns()
        follower.close()
        assert await waiting == []
        await until(lambda: fake.underway == 0)


async def test_scan_that_is_closed_while_it_connects_leaves_no_stream():
    async with serving() as (fake, client):
        for _ in range(20):
            follower = client.follow("log")
            opening = asyncio.create_task(follower.open())
            await until(lambda: fake.underway == 1)
            follower.close()
            await opening
            await until(lambda: fake.underway == 0)
            with pytest.raises(StopAsyncIteration):
                await anext(follower)


async def test_refused_scan_ends():
    async with serving() as (fake, client), client.follow("log") as follower:
        fake.messages.put_nowait(refusal(StatusCode.INVALID_ARGUMENT, "INVALID_SCAN", REFUSED))
        with pytest.raises(wald.InvalidRequest):
            await anext(follower)
        with pytest.raises(StopAsyncIteration):
            await anext(follower)
