"""Times and spans: datetime and timedelta, and their exact forms."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from fake import message, serving

import wald
from wald.times import to_datetime, to_microseconds
from wald.v1 import record_pb2

EXACT = 1_732_881_600_123_457
TIME = datetime(2024, 11, 29, 12, 0, 0, 123_457, tzinfo=timezone.utc)


def test_times_are_exact_in_both_directions():
    for timestamp_us in (EXACT, 0, -1, 253_402_300_799_999_999):
        assert to_microseconds(to_datetime(timestamp_us)) == timestamp_us
    assert to_datetime(EXACT) == TIME
    elsewhere = TIME.astimezone(timezone(timedelta(hours=-5, minutes=-30)))
    assert to_microseconds(elsewhere) == EXACT
    with pytest.raises(OverflowError):
        to_datetime(1 << 62)


def test_record_takes_a_time():
    record = wald.Record("a", time=TIME)
    assert record.timestamp_us == EXACT
    assert record == wald.Record("a", timestamp_us=EXACT)
    assert replace(record, data="b").timestamp_us == EXACT
    for wrong, words in (
        ({"time": TIME.replace(tzinfo=None)}, "no time zone"),
        ({"time": TIME, "timestamp_us": 1}, "differ"),
        ({"time": to_datetime(0)}, "server's clock"),
    ):
        with pytest.raises(ValueError, match=words):
            wald.Record("a", **wrong)
    with pytest.raises(TypeError, match="int"):
        wald.Record("a", time=EXACT)


async def test_records_and_acks_have_times():
    async with serving() as (fake, client):
        ack = await client.append("log", wald.Record("a", time=TIME))
        assert fake.attempts[0].record.timestamp_us == EXACT
        assert ack.time == to_datetime(ack.timestamp_us)
        event = message(b"1")
        event.batches.add(log="log", first_lsn=0, timestamp_us=EXACT, records=[record_pb2.Record(data=b"a")])
        fake.messages.put_nowait(event)
        async with client.follow("log", time=TIME) as follower:
            [(_, record)] = (await anext(follower)).records()
        assert record.time == TIME and record.time.tzinfo is timezone.utc
        assert fake.scans[0].timestamp_us == EXACT


async def test_read_and_scan_begin_at_a_time():
    async with serving() as (fake, client):
        await client.read("log", time=TIME, wait=timedelta(milliseconds=1500))
        request = fake.attempts[0]
        assert request.WhichOneof("start") == "timestamp_us" and request.timestamp_us == EXACT
        assert request.wait.ToTimedelta() == timedelta(seconds=1.5)
        assert client.scan("log", time=TIME)._request.timestamp_us == EXACT
        with pytest.raises(ValueError, match="no time zone"):
            await client.read("log", time=TIME.replace(tzinfo=None))
        with pytest.raises(ValueError, match="at most one"):
            await client.read("log", time=TIME, timestamp_us=EXACT)
        with pytest.raises(ValueError, match="at most one"):
            client.scan("log", time=TIME, lsn=1)
        assert len(fake.attempts) == 1


async def test_spans_are_seconds_or_timedeltas():
    policy = wald.RetryPolicy(first_pause=timedelta(milliseconds=1), max_pause=timedelta(milliseconds=10))
    spans = {name: timedelta(seconds=7) for name in ("connect_timeout", "keepalive", "keepalive_timeout", "silence_timeout")}
    async with serving(timeout=timedelta(seconds=3), retry=policy, **spans) as (fake, client):
        assert client.timeout == 3.0 and client.silence_timeout == 7.0
        assert ("grpc.keepalive_time_ms", 7000) in client._options
        assert ("grpc.max_reconnect_backoff_ms", 10) in client._options
        assert policy.pause(9, wald.WaldError("refused")) <= 0.01
        await client.append("log", "a", timeout=timedelta(seconds=5))
        async with client.producer("log", retry_for=timedelta(seconds=5), linger=timedelta(milliseconds=1)) as producer:
            await (await producer.append("b"))
        await client.close(grace=timedelta(seconds=1))
