"""The clients of durability/takeover, one process with the Python client: takeover_load.py LEDGER NODE=HOST:PORT...

Writers and readers that know all nodes outlive every take-over. For each node there are also writers and readers that call
only this node, so that an owner which does not know its end is asked. All times are of CLOCK_MONOTONIC, in seconds.

Each line of the ledger is a JSON list:

    ack WRITER LEVEL LOG NUMBER LSN POSITION EPOCH BEGIN END
    bad WRITER NUMBER REASON OUTCOME BEGIN END     an append without an ack
    tail READER LOG REPLICATED_LSN BEGIN END       a question for the tail of the level REPLICATED
    seen LOG LSN PAYLOAD                           the follower got a record, or a gap: then PAYLOAD is null
    ended WRITER ERROR                             a writer or reader that must not end has ended

Commands are lines of standard input, and each has one line of answer: `truth` with the next lsn of each log (all newer
records of the level REPLICATED), `survived` with a recovery epoch, `stop` (the writers end, and the follower
gets the last records). The program ends with its input.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter

import grpc
import wald
from wald import Durability, Visibility

REPLICATED, DURABLE = Durability.REPLICATED, Durability.DURABLE
PACE = 0.04
# Unacknowledged records of a producer.
WINDOW = 8
# Requests of a writer to one node that may wait while the node sleeps.
MOST_WAITING = 500


class Load:
    def __init__(self, path, nodes):
        self.ledger, self.nodes, self.stopping = open(path, "w"), nodes, False
        self.tasks = []

    def everywhere(self, first=0):
        """A client of all nodes, which begins with one of them."""
        named, first = list(self.nodes.values()), first % len(self.nodes)
        return wald.Client(",".join(named[first:] + named[:first]), keepalive=1.0, keepalive_timeout=1.0, connect_timeout=1.0,
                           retry=wald.RetryPolicy(max_attempts=1000, first_pause=0.02, max_pause=0.2))

    @contextlib.asynccontextmanager
    async def only(self, node):
        """A client of one node. It repeats nothing, goes nowhere else, and keeps its connection while the node sleeps."""
        pauses = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200), ("grpc.min_reconnect_backoff_ms", 1000)]
        async with grpc.aio.insecure_channel(self.nodes[node], [*pauses, ("grpc.use_local_subchannel_pool", 1)]) as channel:
            async with wald.Client(channel=channel, retry=wald.RetryPolicy(max_attempts=1)) as client:
                yield client

    def note(self, *entry):
        self.ledger.write(json.dumps(entry) + "\n")

    def acked(self, writer, log, number, ack, begin):
        self.note("ack", writer, ack.durability.name, log, number, ack.lsn, ack.position, ack.recovery_epoch, begin, time.monotonic())

    def failed(self, writer, number, error, begin):
        self.note("bad", writer, number, error.reason or error.code.name, error.outcome.name, begin, time.monotonic())

    async def producer(self, number):
        """Records with the level REPLICATED, each once and in order."""
        name = f"p/{number}"
        async with self.everywhere(number) as client, client.producer(name, id=name, durability=REPLICATED, retry_for=300) as producer:
            room, waiting = asyncio.Semaphore(WINDOW), set()

            async def settle(number, begin, ack):
                self.acked(name, name, number, await ack, begin)
                room.release()

            count = 0
            while not self.stopping:
                # A producer that has failed releases nothing any more.
                while room.locked() and producer.error is None:
                    await asyncio.sleep(0.005)
                await room.acquire()
                begin = time.monotonic()
                task = asyncio.ensure_future(settle(count, begin, await producer.append(f"{name} {count}")))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
                count += 1
                await asyncio.sleep(PACE)

    async def writer(self, name, level, number):
        """Appends with one request at a time."""
        async with self.everywhere(number) as client:
            count = 0
            while not self.stopping:
                begin = time.monotonic()
                try:
                    self.acked(name, name, count, await client.append(name, f"{name} {count}", durability=level, timeout=5), begin)
                except wald.WaldError as error:
                    self.failed(name, count, error, begin)
                    await asyncio.sleep(PACE)
                count += 1
                await asyncio.sleep(PACE)

    async def writer_of(self, node):
        """DURABLE appends to one node, at times that do not depend on its answers."""
        name, waiting, count = f"n/{node}", set(), 0
        async with self.only(node) as client:

            async def append(number):
                begin = time.monotonic()
                try:
                    self.acked(name, name, number, await client.append(name, f"{name} {number}", durability=DURABLE, timeout=30), begin)
                except wald.WaldError as error:
                    self.failed(name, number, error, begin)

            while not self.stopping:
                if len(waiting) < MOST_WAITING:
                    task = asyncio.ensure_future(append(count))
                    waiting.add(task)
                    task.add_done_callback(waiting.discard)
                    count += 1
                await asyncio.sleep(2 * PACE)

    async def reader(self, name, node=None):
        """Asks for the tail of a log at the level REPLICATED, all nodes or one of them."""
        log = "p/0"
        async with self.everywhere() if node is None else self.only(node) as client:
            while not self.stopping:
                begin = time.monotonic()
                try:
                    tail = await client.tail(log, visibility=Visibility.REPLICATED, timeout=5)
                    self.note("tail", name, log, tail.replicated_lsn, begin, time.monotonic())
                except wald.WaldError:
                    pass
                await asyncio.sleep(2 * PACE)

    async def follower(self):
        async with self.everywhere(1) as client, client.follow(all=True, visibility=Visibility.REPLICATED) as follower:
            self.follows = Counter()
            async for event in follower:
                for gap in event.gaps:
                    self.note("seen", str(gap), 0, None)
                for log, record in event.records():
                    self.note("seen", log, record.lsn, record.text)
                    self.follows[log] = record.lsn + 1

    def starts(self, name, coroutine):
        async def whole():
            try:
                await coroutine
            except Exception as error:
                self.note("ended", name, f"{type(error).__name__}: {error}")
                self.ledger.flush()

        self.tasks.append(asyncio.ensure_future(whole()))

    async def truth(self, client, following):
        """The records of the level REPLICATED from these lsns on."""
        found = []
        async for log in client.list_logs(timeout=120):
            lsn = following.get(log.name, 0)
            while True:
                page = await client.read(log.name, lsn=lsn, visibility=Visibility.REPLICATED, timeout=120)
                found += [[log.name, record.lsn, record.text] for record in page.records]
                lsn = page.next_lsn
                if not page.records:
                    break
        return found

    async def commands(self):
        lines = asyncio.StreamReader(limit=1 << 24)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        async with self.everywhere() as client:
            while line := await lines.readline():
                what, detail = json.loads(line)
                # The acks before the question.
                self.ledger.flush()
                answer = None
                if what == "truth":
                    answer = await self.truth(client, detail)
                elif what == "survived":
                    answer = (await client.tail("p/0", recovery_epoch=detail, timeout=120)).survived_position
                elif what == "stop":
                    self.stopping = True
                    *writers, follower = self.tasks
                    await asyncio.wait(writers, timeout=60)
                    # The follower gets the last records.
                    until = time.monotonic() + 60
                    tails = {log.name: (await client.tail(log.name, visibility=Visibility.REPLICATED)).replicated_lsn
                             async for log in client.list_logs()}
                    while any(self.follows[log] < tail for log, tail in tails.items()) and time.monotonic() < until:
                        await asyncio.sleep(0.02)
                    follower.cancel()
                    self.ledger.flush()
                print(json.dumps(answer), flush=True)

    async def run(self):
        for number in range(3):
            self.starts(f"p/{number}", self.producer(number))
            self.starts(f"r/{number}", self.writer(f"r/{number}", REPLICATED, number))
            self.starts(f"d/{number}", self.writer(f"d/{number}", DURABLE, number))
        for node in self.nodes:
            self.starts(f"n/{node}", self.writer_of(node))
            self.starts(f"tail of {node}", self.reader(f"tail of {node}", node))
        self.starts("tail", self.reader("tail"))
        self.starts("follower", self.follower())
        flushing = asyncio.ensure_future(self.flushes())
        await self.commands()
        flushing.cancel()

    async def flushes(self):
        while True:
            await asyncio.sleep(0.1)
            self.ledger.flush()


if __name__ == "__main__":
    asyncio.run(Load(sys.argv[1], dict(node.split("=") for node in sys.argv[2:])).run())
