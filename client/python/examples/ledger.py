#!/usr/bin/env python3
"""usage: ledger.py DIR PREFIX COUNT

A ledger that may be killed at any moment, and started again: two producers append COUNT transfers exactly
once, and a follower keeps the balances. Each keeps its state in one file of DIR, always together with its
effects. Prints the balances when all transfers are applied.
"""

import asyncio
import json
import sys
from pathlib import Path

import wald


def transfer(number):
    """The transfers are the same in every run: a repeated transfer has the same content."""
    return {"from": f"account{number * 7 % 10}", "to": f"account{(number * 3 + 1) % 10}", "amount": number * 13 % 100 + 1}


def apply(ledger, move):
    balances = ledger["balances"]
    balances[move["from"]] = balances.get(move["from"], 0) - move["amount"]
    balances[move["to"]] = balances.get(move["to"], 0) + move["amount"]
    ledger["applied"] += 1


async def produce(client, state, log, half, count):
    async with client.durable_producer(log, state) as producer:
        for number in range(producer.next_sequence, count):
            await producer.append_batch([json.dumps(transfer(2 * number + half))])


async def follow(client, state, prefix, count):
    async with client.durable_follower(prefix=prefix, state=state) as follower:
        ledger = json.loads(follower.effects or '{"applied": 0, "balances": {}}')
        while ledger["applied"] < count:
            for batch in await anext(follower):
                for record in batch:
                    apply(ledger, json.loads(record.data))
            # Together with the cursor behind these records.
            await follower.keep(json.dumps(ledger).encode())
    return ledger


async def main(directory, prefix, count):
    async with wald.Client.from_env() as client:
        ledger, *_ = await asyncio.gather(
            follow(client, directory / "ledger.state", prefix, count),
            *(produce(client, directory / f"producer{half}.state", f"{prefix}{half}", half, count // 2) for half in range(2)),
        )
    print(json.dumps(ledger, sort_keys=True))


asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
