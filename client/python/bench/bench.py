#!/usr/bin/env python3
"""usage: bench.py wald|redis ENDPOINT IN_FLIGHT SECONDS [--unary]

Appends records of 128 B, IN_FLIGHT at a time, to one log (Wald, DURABLE) or stream (Redis, XADD), and prints one line of JSON with
the number of acks and the latencies. The first second does not count. `--unary`: each append of Wald is a call of its own.

The Redis client is redis.asyncio with its usual pool: a connection for each command in flight. The pool has 100 connections by
default, and raises an error if a program needs more. It is as large as IN_FLIGHT here.
"""

import asyncio
import json
import sys
import time

WARM_UP_SECONDS = 1.0
DATA = b"x" * 128


async def measure(append, in_flight, seconds):
    """The latencies of all acks that came in time, in seconds, and the time that it took."""

    async def work(end, latencies):
        while (began := time.perf_counter()) < end:
            await append()
            latencies.append(time.perf_counter() - began)

    async def phase(length):
        latencies = []
        began = time.perf_counter()
        await asyncio.gather(*(work(began + length, latencies) for _ in range(in_flight)))
        return latencies, time.perf_counter() - began

    await phase(WARM_UP_SECONDS)
    return await phase(seconds)


async def wald_appends(endpoint, unary, in_flight, run):
    import wald

    async with wald.Client(endpoint, share_appends=not unary, timeout=60.0) as client:
        return await run(lambda: client.append("bench", DATA, durability=wald.Durability.DURABLE))


async def redis_appends(endpoint, unary, in_flight, run):
    import redis.asyncio

    host, _, port = endpoint.rpartition(":")
    async with redis.asyncio.Redis(host=host, port=int(port), max_connections=in_flight) as client:
        return await run(lambda: client.xadd("log", {"d": DATA}))


async def main(server, endpoint, in_flight, seconds, unary):
    appends = {"wald": wald_appends, "redis": redis_appends}[server]
    latencies, took = await appends(endpoint, unary, in_flight, lambda append: measure(append, in_flight, seconds))
    latencies.sort()

    def quantile(part):
        return round(latencies[min(int(len(latencies) * part), len(latencies) - 1)] * 1e6)

    print(
        json.dumps(
            {
                "client": "python",
                "server": server,
                "in_flight": in_flight,
                "acks": len(latencies),
                "seconds": round(took, 3),
                "p50_us": quantile(0.5),
                "p99_us": quantile(0.99),
            }
        )
    )


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "--unary"]
    if len(given) != 4 or given[0] not in ("wald", "redis"):
        raise SystemExit(__doc__.strip())
    asyncio.run(main(given[0], given[1], int(given[2]), float(given[3]), "--unary" in sys.argv))
