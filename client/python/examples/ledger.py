#!/usr/bin/env python3
"""usage: ledger.py DIR PREFIX COUNT

A ledger that may be killed at any moment, and started again: two producers append COUNT transfers exactly
once, and a follower keeps the balances. Each keeps its state in one file of DIR, always together with its
effects. Prints the balances when all transfers are applied.
"""

import asyncio
import base64
import json
import os
import sys
from collections import deque
from pathlib import Path

import wald


def transfer(number):
    """The transfers are the same in every run: a repeated transfer has the same content."""
    return {"from": f"account{number * 7 % 10}", "to": f"account{(number * 3 + 1) % 10}", "amount": number * 13 % 100 + 1}


def load(path, first):
    return json.loads(path.read_text()) if path.exists() else first


def store(path, state):
    """All of it or nothing, and on the device."""
    new = path.with_suffix(".new")
    with open(new, "w") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


async def produce(client, directory, log, half, count):
    path = directory / f"producer{half}.json"
    state = load(path, {"id": os.urandom(8).hex(), "log_id": None, "acked": 0})
    async with client.producer(log, id=state["id"], sequence=state["acked"], log_id=state["log_id"]) as producer:
        # Before the first batch: without it the next start would be another producer.
        state["log_id"] = producer.log_id
        store(path, state)
        acks = deque()
        for number in range(state["acked"], count):
            acks.append(await producer.send([json.dumps(transfer(2 * number + half))]))
            await asyncio.sleep(0.001)
            while len(acks) > 32 or (acks and number == count - 1):
                await acks.popleft()
                state["acked"] += 1
                if state["acked"] % 20 == 0 or not acks:
                    store(path, state)


async def follow(client, directory, prefix, count):
    path = directory / "ledger.json"
    state = load(path, {"cursor": None, "applied": 0, "balances": {}})
    cursor = state["cursor"] and base64.b64decode(state["cursor"])
    if state["applied"] < count:
        async with client.follow(prefix=prefix, cursor=cursor) as follower:
            async for event in follower:
                if event.gaps:
                    raise RuntimeError(f"records are missing: {event.gaps}")
                balances = state["balances"]
                for _, record in event.records():
                    move = json.loads(record.text)
                    balances[move["from"]] = balances.get(move["from"], 0) - move["amount"]
                    balances[move["to"]] = balances.get(move["to"], 0) + move["amount"]
                    state["applied"] += 1
                state["cursor"] = base64.b64encode(event.cursor).decode()
                # Effects and cursor together.
                store(path, state)
                if state["applied"] >= count:
                    break
    return state


async def main(directory, prefix, count):
    async with wald.Client.from_env() as client:
        halves = [produce(client, directory, f"{prefix}{half}", half, count // 2) for half in range(2)]
        state, *_ = await asyncio.gather(follow(client, directory, prefix, count), *halves)
    print(json.dumps({"applied": state["applied"], "balances": state["balances"]}, sort_keys=True))


asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
