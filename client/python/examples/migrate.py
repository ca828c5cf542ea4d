#!/usr/bin/env python3
"""usage: migrate.py copy FILE LOG STATE
       migrate.py compare FILE LOG
       migrate.py cursor LOG NAME OFFSET

Moves records of another system to a log of Wald. `copy` appends each record once, wherever the program is killed.
`compare` reads both sides. `cursor` puts a cursor where a reader of the old system is. FILE stands for a partition of
the old system: each line is JSON with `offset`, `key`, `value` and `timestamp_us`. docs/src/migration.md has the
sources for Kafka, NATS JetStream and KurrentDB.
"""

import asyncio
import json
import sys

import wald


def moved(offset, key, value, timestamp_us, headers=()):
    """The record of Wald for one of the old system. Records of Wald have no key and no offset of their own."""
    facts = [("offset", b"%d" % offset)]
    if key is not None:
        facts.append(("key", key))
    if value is None:
        # A tombstone of Kafka.
        facts.append(("deleted", b""))
    return wald.Record(value or b"", (*facts, *headers), timestamp_us)


def offset_of(record):
    """The old offset is the first header; a header of the old system may have that name, too."""
    return int(record.headers[0][1])


async def batches(records, most=500, most_bytes=1 << 20):
    """Groups records that come without a pause: the producer flushes its state for each batch."""
    batch, size, source = [], 0, aiter(records)
    coming = asyncio.ensure_future(anext(source, None))
    try:
        while True:
            ready, _ = await asyncio.wait([coming], timeout=0.1 if batch else None)
            record = moved(*coming.result()) if ready and coming.result() else None
            if batch and (record is None or len(batch) == most or size + len(record.data) > most_bytes):
                yield batch
                batch, size = [], 0
            if ready:
                if record is None:
                    return
                batch.append(record)
                size += len(record.data)
                coming = asyncio.ensure_future(anext(source, None))
    finally:
        coming.cancel()


async def copy(client, log, state, source):
    """Appends all records of `source(offset)`, which yields those from an offset on."""
    async with client.durable_producer(log, state, durability=wald.Durability.DURABLE) as producer:
        # First the batches in doubt: then the last record says where the copy goes on.
        await producer.flush()
        last = list(await client.read(log, tail_offset=1))
        if bool(last) != (producer.next_sequence > 0):
            sys.exit(f"{log} and {state} do not belong together: delete both, and begin again")
        async for batch in batches(source(offset_of(last[0]) + 1 if last else 0)):
            await producer.append_batch(batch)


async def compare(client, log, source):
    """Reads the log and the old system. Returns the number of equal records, and the next offset."""
    count, offset, time, old = 0, 0, 0, None
    async for event in client.scan(log):
        if event.gaps:
            sys.exit(f"records are missing: {event.gaps}")
        for _, found in event.records():
            old = old or source(offset_of(found))
            wanted = await anext(old, None)
            if wanted is None:
                sys.exit(f"the old system has no record like {found}")
            wanted = moved(*wanted)
            # Within a log times never go back.
            time = max(time, wanted.timestamp_us)
            if (found.data, found.headers, found.timestamp_us) != (wanted.data, wanted.headers, time):
                sys.exit(f"{log} has {found}, and not {wanted}")
            count, offset = count + 1, offset_of(found) + 1
    return count, offset


async def place(client, log, offset):
    """The lsn of the first record with this offset or a later one, by bisection: offsets rise, and may have holes."""
    tail = await client.tail(log)
    low, high = tail.first_lsn, tail.tail_lsn
    while low < high:
        middle = (low + high) // 2
        [record] = await client.read(log, lsn=middle, max_records=1)
        low, high = (middle + 1, high) if offset_of(record) < offset else (low, middle)
    return low


async def lines(path, offset):
    """Yields the records of a file from an offset on."""
    with open(path, encoding="utf-8") as file:
        for line in map(json.loads, file):
            if line["offset"] >= offset:
                key, value = (text if text is None else text.encode() for text in (line["key"], line["value"]))
                yield line["offset"], key, value, line["timestamp_us"]


async def main(command, *arguments):
    async with wald.Client.from_env() as client:
        if command == "copy":
            path, log, state = arguments
            await copy(client, log, state, lambda offset: lines(path, offset))
        elif command == "compare":
            path, log = arguments
            count, offset = await compare(client, log, lambda offset: lines(path, offset))
            print(f"{count} records are equal; the next offset is {offset}")
        else:
            log, name, offset = arguments
            lsn = await place(client, log, int(offset))
            await client.commit_cursor(log, name, lsn)
            print(f"cursor {name} of {log} is at lsn {lsn}")


if sys.argv[1:2] not in (["copy"], ["compare"], ["cursor"]):
    sys.exit(__doc__)
asyncio.run(main(*sys.argv[1:]))
