#!/usr/bin/env python3
"""usage: conformance.py [--sync]
       conformance.py chaos-producer LOG ID RATE
       conformance.py chaos-follower PREFIX COUNT

Carries out the conformance cases with this package; with --sync with its synchronous client. ../conformance/README.md describes the
environment, the cases, the output, and the two modes for chaos.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import json
import os
import re
import sys
import time
import urllib.request
import uuid
from collections import ChainMap
from pathlib import Path

import wald
from wald.client import settings_of_env

CASE_SECONDS = 60
WAIT_SECONDS = 20
GIVEN = ("server", "plain_server", "expired_server", "other_ca", "other_cert", "other_key")
REFERENCE = re.compile(r"\$\{([^}]*)\}")


class Failed(Exception):
    """The expected and the actual value."""


# Cases: references, expectations.


class Names:
    """The values of `${...}`."""

    def __init__(self, prefix):
        self.prefix = prefix
        # The harness gives these to every case.
        self.kept = {name: os.environ[f"WALD_CASE_{name.upper()}"] for name in GIVEN if f"WALD_CASE_{name.upper()}" in os.environ}

    def turn(self, count):
        """These names where `${i}` is the count."""
        names = Names(self.prefix)
        names.kept = ChainMap({"i": count}, self.kept)
        return names

    def look_up(self, reference):
        if reference.startswith("log:"):
            return self.prefix + reference.removeprefix("log:")
        first, *path = reference.split(".")
        value = self.kept[first]
        for part in path:
            value = value[int(part)] if isinstance(value, list) else value[part]
        return value

    def resolve(self, value):
        if isinstance(value, str):
            if whole := REFERENCE.fullmatch(value):
                return self.look_up(whole[1])
            return REFERENCE.sub(lambda found: str(self.look_up(found[1])), value)
        if isinstance(value, list):
            return [self.resolve(item) for item in value]
        if isinstance(value, dict):
            if value.keys() == {"add"}:
                return sum(self.resolve(value["add"]))
            if value.keys() == {"times", "each"}:
                return [self.turn(index).resolve(value["each"]) for index in range(value["times"])]
            return {key: self.resolve(item) for key, item in value.items()}
        return value


def compare(expected, actual, where="result"):
    """Raises Failed if the actual value differs from the expected one."""

    def wrong(what):
        raise Failed(f"{where}: expected {str(what)[:300]}, came {str(actual)[:300]}")

    if expected == "*":
        if actual is None or actual == "":
            wrong("anything")
    elif isinstance(expected, dict):
        if expected.keys() <= {"at_least", "below"} and expected:
            if not isinstance(actual, int):
                wrong("a number")
            if actual < expected.get("at_least", actual) or actual >= expected.get("below", actual + 1):
                wrong(expected)
        elif expected.keys() == {"length"}:
            if not isinstance(actual, list) or len(actual) != expected["length"]:
                length = len(actual) if isinstance(actual, list) else type(actual).__name__
                raise Failed(f"{where}: expected length {expected['length']}, came {length}")
        elif not isinstance(actual, dict):
            wrong(expected)
        else:
            for name, value in expected.items():
                compare(value, actual.get(name), f"{where}.{name}")
    elif isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            wrong(expected)
        for index, value in enumerate(expected):
            compare(value, actual[index], f"{where}.{index}")
    elif isinstance(expected, bool) != isinstance(actual, bool) or expected != actual:
        wrong(expected)


def compare_error(expected, error):
    expected = dict(expected)
    if "facts" in expected:
        expected["facts"] = {name: str(value) for name, value in expected["facts"].items()}
    compare(expected, show_error(error), f"error ({error})")


# Translates the package's words to the words of the cases.


def show_error(error):
    shown = {
        "code": error.code.name,
        "reason": error.reason,
        "outcome": error.outcome.value,
        "retry": error.retry.value,
        "facts": dict(error.facts),
        "problem": "TOKEN" if isinstance(error, wald.TokenError) else getattr(error, "failure", ""),
        "failed": [{"reason": c.reason, "log": c.log, "description": c.description} for c in error.failed],
    }
    if "request_id" in error.facts:
        shown["request"] = int(error.facts["request_id"])
    return shown


def show_record(record, **more):
    return {
        **more,
        "lsn": record.lsn,
        "data": record.text,
        "headers": [[key, value.decode()] for key, value in record.headers],
        "timestamp_us": record.timestamp_us,
    }


def show_gap(gap):
    return {"log": gap.log, "from_lsn": gap.from_lsn, "to_lsn": gap.to_lsn, "reason": gap.reason.name}


def show_ack(ack):
    shown = {
        name: getattr(ack, name)
        for name in ("lsn", "first_lsn", "next_lsn", "deduplicated", "durable_lsn", "replicated_lsn", "log_id", "log")
        if hasattr(ack, name)
    }
    if hasattr(ack, "durability"):
        shown["durability"] = ack.durability.name
    return shown


def show_batch_ack(ack):
    return {"appends": [show_ack(append) for append in ack.appends], "durability": ack.durability.name}


def show(value, *names):
    return {name: getattr(value, name) for name in names}


def to_records(given):
    """Records to append: strings, objects, or a number of records of one size."""
    for record in given:
        if isinstance(record, dict) and "repeat" in record:
            for number in range(record["repeat"]):
                yield str(number).ljust(record["bytes"], ".")
        else:
            yield one_record(record)


def one_record(given):
    if isinstance(given, str):
        return given
    return wald.Record(
        given["data"],
        headers=[(key, value) for key, value in given.get("headers", ())],
        timestamp_us=given.get("timestamp_us", 0),
        crc32c=given.get("crc32c"),
    )


def to_condition(given):
    given = dict(given or {})
    if "producer" in given:
        given["producer"] = wald.ProducerSequence(**given["producer"])
    return wald.Condition(**given)


def durability(step):
    return wald.Durability[step["durability"]] if "durability" in step else None


def batch_arguments(step):
    return {
        "batches": [
            wald.LogBatch(batch["log"], list(to_records(batch["records"])), to_condition(batch.get("condition")))
            for batch in step.get("batches", ())
        ],
        "checks": [wald.Check(**check) for check in step.get("checks", ())],
        "cursors": [wald.CursorCommit(**cursor) for cursor in step.get("cursors", ())],
        "durability": durability(step),
    }


def in_time(began, within):
    took = (time.monotonic() - began) * 1000
    if within is not None and took > within:
        raise Failed(f"took {took:.0f} ms, at most {within} are allowed")


def selection(more):
    """The logs to follow, without the place to begin."""
    return {name: value for name, value in more.items() if name in ("log", "prefix", "all", "log_id")}


class Stored:
    """The state that a consumer has stored: effects and cursor, always together."""

    def __init__(self, counting):
        self.counting = counting
        self.cursor = None
        self.applied = 0
        self.next = {}
        self.twice, self.skipped, self.gaps = [], [], []

    def store(self, event):
        self.cursor = event.cursor
        for gap in event.gaps:
            if gap.log.startswith(self.counting):
                self.gaps.append(show_gap(gap))
                self.next[gap.log] = max(self.next.get(gap.log, 0), gap.to_lsn or 0)
        for log, record in event.records():
            if not log.startswith(self.counting):
                continue
            due = self.next.get(log, 0)
            if record.lsn < due:
                self.twice.append(f"{log} {record.lsn}")
            elif record.lsn > due:
                self.skipped.append(f"{log} {record.lsn}")
            self.next[log] = max(due, record.lsn + 1)
            self.applied += 1


class Follower:
    """A follower in the background, and the events it has seen."""

    def __init__(self, scan):
        self.scan = scan
        self.records, self.gaps = [], []
        self.caught_up = False
        self.more = asyncio.Event()
        self.task = asyncio.create_task(self.run())
        self.task.add_done_callback(lambda _: self.more.set())

    async def run(self):
        async for event in self.scan:
            self.gaps += map(show_gap, event.gaps)
            self.records += [show_record(record, log=log) for log, record in event.records()]
            self.caught_up = self.caught_up or event.caught_up
            self.more.set()

    async def wait_for(self, count, gaps, caught_up):
        while len(self.records) < count or len(self.gaps) < gaps or (caught_up and not self.caught_up):
            if self.task.done():
                raise Failed(f"the follower ended: {self.task.exception()}")
            self.more.clear()
            await self.more.wait()

    async def close(self):
        self.task.cancel()
        await asyncio.wait([self.task])
        self.scan.close()


class Blocking:
    """An object of the synchronous client with the form of the asyncio client: each call runs on a thread of its own."""

    # A follower occupies a thread.
    threads = concurrent.futures.ThreadPoolExecutor(64)

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        member = getattr(self.inner, name)
        if not callable(member):
            return member
        if name in ("session", "producer", "scan", "follow", "abort") or name.startswith("list_") or (
            name == "close" and isinstance(self.inner, wald.sync.Scan)
        ):
            # Plain methods of the asyncio client, too.
            return lambda *args, **kwargs: Blocking(self.threads.submit(member, *args, **kwargs).result())
        return functools.partial(self.call, member)

    async def call(self, function, *args, **kwargs):
        result = await asyncio.get_running_loop().run_in_executor(self.threads, functools.partial(function, *args, **kwargs))
        return asyncio.wrap_future(result) if isinstance(result, wald.sync.Future) else result

    async def __aenter__(self):
        await self.call(self.inner.__enter__)
        return self

    async def __aexit__(self, *raised):
        return await self.call(self.inner.__exit__, *raised)

    def __aiter__(self):
        return self

    async def __anext__(self):
        # StopIteration cannot leave the thread.
        item = await self.call(next, self.inner, self)
        if item is self:
            raise StopAsyncIteration
        return item


def make_client(*args, **settings):
    return wald.Client(*args, **settings)


def make_sync_client(*args, **settings):
    return Blocking(wald.sync.Client(*args, **settings))


class Case:
    """One case underway. Each `do` is a method."""

    def __init__(self, name, run, client):
        self.names = Names(f"conformance/{name}/{run}/")
        self.client = client
        self.jobs, self.followers, self.producers = {}, {}, {}
        # The step that began last, for the error of a case that takes too long.
        self.last = ""

    async def close(self):
        for job in self.jobs.values():
            job.cancel()
        for follower in self.followers.values():
            await follower.close()
        for producer in self.producers.values():
            producer.abort()

    async def carry_out(self, steps):
        for index, step in enumerate(steps):
            self.last = f"step {index} ({step['do']})"
            try:
                await self.carry_out_step(step)
            except Failed as failed:
                raise Failed(f"step {index} ({step['do']}): {failed}") from None
            except wald.WaldError as error:
                raise Failed(f"step {index} ({step['do']}): expected success, came {show_error(error)}") from None

    async def carry_out_step(self, step):
        # Steps within a step are resolved when it is their turn.
        inner = {"steps": step["steps"]} if "steps" in step else {}
        resolved = self.names.resolve({key: value for key, value in step.items() if key != "steps"}) | inner
        wanted = resolved.pop("fails", None)
        kept = resolved.pop("as", None)
        expected = resolved.pop("expect", None)
        within = resolved.pop("within_ms", None)
        action = getattr(self, "do_" + resolved.pop("do"))
        arguments = {"name": kept, **resolved} if kept and action.__name__ in NAMING else resolved
        began = time.monotonic()
        try:
            result = await action(**arguments)
        except wald.WaldError as error:
            if wanted is None:
                raise
            compare_error(wanted, error)
            in_time(began, within)
            return
        in_time(began, within)
        if wanted is not None:
            raise Failed(f"expected failure {wanted}, came {str(result)[:300]}")
        if expected is not None:
            compare(expected, result)
        if kept and action.__name__ not in NAMING:
            self.names.kept[kept] = result

    async def do_connect(self, endpoint, ca=None, cert=None, key=None, server_name=None, token=None):
        files = {}
        if endpoint.startswith("https://"):
            found = {"tls_ca": ca, "tls_cert": cert, "tls_key": key}
            files = {n: os.environ[f"WALD_{n.upper()}"] if v is None else v or None for n, v in found.items()}
            files["server_name"] = server_name
        async with make_client(endpoint, timeout=1.9, token=token, **files) as client:
            with contextlib.suppress(wald.LogNotFound):
                await client.tail("conformance/none")
        return {"connected": True}

    async def do_append(self, log, record, condition=None, **more):
        how = {"condition": to_condition(condition), "durability": durability(more)}
        return show_ack(await self.client.append(log, one_record(record), **how))

    async def do_append_batch(self, **step):
        return show_batch_ack(await self.client.append_batch(**batch_arguments(step)))

    async def do_session(self, requests):
        result = {"acks": []}
        session = self.client.session()
        futures = []
        try:
            for request in requests:
                futures.append(await session.send(**batch_arguments(request)))
        except wald.WaldError:
            # It ended while the last requests were on their way to it.
            pass
        try:
            await session.close()
        except wald.WaldError as error:
            result["error"] = show_error(error)
        for future in futures:
            if future.exception() is None:
                result["acks"].append(show_batch_ack(future.result()))
        return result

    async def do_read(self, log, wait_ms=0, **more):
        page = await self.client.read(log, wait=wait_ms / 1000, **more)
        return {
            "records": [show_record(record) for record in page],
            **show(page, "next_lsn", "tail_lsn", "first_lsn", "durable_lsn", "replicated_lsn"),
        }

    async def do_scan(self, **more):
        result = {"records": [], "gaps": []}
        scan = self.client.scan(**more)
        async for event in scan:
            result["gaps"] += map(show_gap, event.gaps)
            result["records"] += [show_record(record, log=log) for log, record in event.records()]
        return {**result, "cursor": scan.cursor}

    async def do_consume(self, count, counting="", **more):
        stored = Stored(counting)
        length, lives = 1, 0
        while stored.applied < count:
            lives += 1
            before = stored.cursor
            start = more if before is None else {**selection(more), "cursor": before}
            async with self.client.follow(**start) as follower:
                for taken in range(1, length + 1):
                    event = await asyncio.wait_for(anext(follower), WAIT_SECONDS)
                    if taken == length and lives % 2 == 0:
                        break
                    stored.store(event)
                    if stored.applied >= count:
                        break
            length = 1 if stored.cursor != before else length + 1
        return {**show(stored, "applied", "twice", "skipped", "gaps"), "lives": lives}

    async def do_follow(self, name, **more):
        scan = self.client.follow(**more)
        await scan.open()
        self.followers[name] = Follower(scan)

    async def do_followed(self, follower, count, gaps=0, caught_up=False):
        seen = self.followers[follower]
        try:
            await asyncio.wait_for(seen.wait_for(count, gaps, caught_up), WAIT_SECONDS)
        except asyncio.TimeoutError:
            raise Failed(f"saw {len(seen.records)} records and {len(seen.gaps)} gaps, not {count}") from None
        return {
            "records": list(seen.records),
            "gaps": list(seen.gaps),
            "cursor": seen.scan.cursor,
            "caught_up": seen.caught_up,
        }

    async def do_unfollow(self, follower):
        await self.followers[follower].close()

    async def do_tail(self, log, **more):
        tail = await self.client.tail(log, **more)
        return show(tail, "first_lsn", "tail_lsn", "durable_lsn", "replicated_lsn", "writer_epoch", "log_id")

    async def do_fence(self, log, **more):
        return show(await self.client.fence(log, **more), "tail_lsn", "writer_epoch", "log_id")

    async def do_trim(self, log, before_lsn, **more):
        return {"first_lsn": await self.client.trim(log, before_lsn, **more)}

    async def do_sync(self, log=""):
        await self.client.sync(log)

    async def do_create_log(self, log):
        return show(await self.client.create_log(log), "log_id")

    async def do_delete_log(self, log, **more):
        await self.client.delete_log(log, **more)

    async def do_commit_cursor(self, log, cursor, lsn, **more):
        return show(await self.client.commit_cursor(log, cursor, lsn, **more), "lsn", "log_id")

    async def do_get_cursor(self, log, cursor, **more):
        return show(await self.client.get_cursor(log, cursor, **more), "lsn", "log_id")

    async def do_delete_cursor(self, log, cursor, **more):
        await self.client.delete_cursor(log, cursor, **more)

    async def do_list_cursors(self, log):
        return {"cursors": [{"cursor": c.name, "lsn": c.lsn} async for c in self.client.list_cursors(log)]}

    async def do_update_log(self, log, max_record_bytes):
        config = wald.LogConfig(max_record_bytes=max_record_bytes)
        updated = await self.client.update_log(log, config, ["max_record_bytes"])
        return {"max_record_bytes": updated.config.max_record_bytes}

    async def do_get_log(self, log):
        found = await self.client.get_log(log)
        return {"log_id": found.log_id, "max_record_bytes": found.config.max_record_bytes}

    async def do_list_producers(self, log, **more):
        found = [show(p, "id", "epoch", "next_sequence") async for p in self.client.list_producers(log, **more)]
        return {"producers": found}

    async def do_forget_producer(self, log, id, **more):
        await self.client.forget_producer(log, id, **more)

    async def do_defaults(self):
        producer = inspect.signature(wald.Client.producer).parameters
        client = inspect.signature(wald.Client).parameters
        return {
            "batches_in_flight": producer["window_batches"].default,
            "bytes_in_flight": producer["window_bytes"].default,
            "linger_ms": round(producer["linger"].default * 1000),
            "attempts": wald.RetryPolicy().max_attempts,
            "timeout_ms": round(client["timeout"].default * 1000),
            "retry_for_ms": round(producer["retry_for"].default * 1000),
        }

    async def do_producer(self, name, log, **more):
        producer = self.client.producer(log, **more)
        await producer.open()
        self.producers[name] = producer

    async def do_close_producer(self, producer):
        await self.producers[producer].close()

    async def do_produce(self, producer, records, **more):
        ack = await self.producers[producer].send(to_records(records), **more)
        return show_ack(await ack)

    async def do_produce_many(self, producer, prefix, count, in_flight):
        room = asyncio.Semaphore(in_flight)
        acks = []
        for number in range(count):
            await room.acquire()
            ack = await self.producers[producer].send([f"{prefix}{number}"])
            ack.add_done_callback(lambda _: room.release())
            acks.append(ack)
        lsns = [(await ack).first_lsn for ack in acks]
        ascend = all(one < next for one, next in zip(lsns, lsns[1:]))
        return {"acked": len(lsns), "lsns_ascend": ascend}

    async def do_background(self, name, steps):
        self.jobs[name] = asyncio.create_task(self.carry_out(steps))

    async def do_join(self, job):
        await self.jobs[job]

    async def do_repeat(self, times, steps):
        for number in range(times):
            self.names.kept["i"] = number
            await self.carry_out(steps)

    async def do_control(self, action, **arguments):
        await asyncio.to_thread(control, action, arguments)

    async def do_wait_tail(self, log, at_least):
        async def reached():
            while True:
                try:
                    if (await self.client.tail(log)).tail_lsn >= at_least:
                        return
                except wald.WaldError as error:
                    if error.retry is wald.Retry.NEVER and not isinstance(error, wald.LogNotFound):
                        raise
                await asyncio.sleep(0.01)

        try:
            await asyncio.wait_for(reached(), WAIT_SECONDS)
        except asyncio.TimeoutError:
            raise Failed(f"the tail of {log} did not reach {at_least}") from None


# In these steps `as` does not name their result.
NAMING = {"do_follow", "do_producer", "do_background"}


def control(action, arguments):
    request = urllib.request.Request(
        f"{os.environ['WALD_CONTROL']}/{action}",
        data=json.dumps(arguments).encode(),
        headers={"Content-Type": "application/json"},
    )
    # Never by way of a proxy of the environment.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=CASE_SECONDS) as answer:
        answer.read()


async def run_case(case, run):
    async with make_client(**settings_of_env({})) as client:
        underway = Case(case["name"], run, client)
        try:
            await asyncio.wait_for(underway.carry_out(case["steps"]), CASE_SECONDS)
        except asyncio.TimeoutError:
            raise Failed(f"not done after {CASE_SECONDS} seconds; began last: {underway.last}") from None
        finally:
            await underway.close()
            await client.close(grace=0)


async def run_cases():
    cases = json.loads(Path(os.environ["WALD_CASES"]).read_text())["cases"]
    only = os.environ.get("WALD_ONLY")
    if only:
        cases = [case for case in cases if case["name"] in only.split(",")]
    run = uuid.uuid4().hex[:8]
    passed = failed = 0
    for case in cases:
        try:
            await run_case(case, run)
        except Exception as error:
            failed += 1
            what = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
            print(f"FAIL {case['name']}: {' '.join(what.split())}", flush=True)
        else:
            passed += 1
            print(f"ok {case['name']}", flush=True)
    print(f"{passed} passed, {failed} failed", flush=True)
    return 0 if passed and not failed else 1


# Chaos.


async def chaos_producer(log, id, rate):
    stop = Path(os.environ["WALD_STOP"])
    loop = asyncio.get_running_loop()
    total = 0
    async with wald.Client.from_env() as client:
        async with client.producer(log, id=id, epoch=1, window_batches=32) as producer:
            due = loop.time()
            while not stop.exists():
                await producer.send([f"{id}:{total}"])
                total += 1
                due = max(due + 1 / rate, loop.time())
                await asyncio.sleep(due - loop.time())
            await producer.flush()
            await (await producer.send([f"END:{id}"]))
    print(f"{id} {total}", flush=True)


async def chaos_follower(prefix, count):
    ended = 0
    async with wald.Client.from_env() as client, client.follow(prefix=prefix) as follower:
        async for event in follower:
            for gap in event.gaps:
                print("GAP", gap.log, gap.from_lsn, gap.to_lsn, gap.reason.name, flush=True)
            for log, record in event.records():
                print(log, record.lsn, record.text, flush=True)
                ended += record.text.startswith("END:")
            if ended >= count:
                return


def main():
    global make_client
    match sys.argv[1:]:
        case ["--sync"]:
            make_client = make_sync_client
            sys.exit(asyncio.run(run_cases()))
        case []:
            sys.exit(asyncio.run(run_cases()))
        case ["chaos-producer", log, id, rate]:
            asyncio.run(chaos_producer(log, id, float(rate)))
        case ["chaos-follower", prefix, count]:
            asyncio.run(chaos_follower(prefix, int(count)))
        case _:
            print(__doc__.strip())
            sys.exit(2)


if __name__ == "__main__":
    main()
