"""100,000 followers of 1,000 logs: the memory of each, and their delay. 1,000 followers
of one busy log get all records, in few messages. Then 1,000 followers without appends, followers
that read nothing, and clients that die during a stream or a request: writers do not notice, and after
1,000 rounds the daemon has nothing left of them.
"""

import selectors
import socket
import struct

from common import *

IDLE = 1_000
ROUNDS = sized(1_000, 240)
CROWD, CROWD_CONNECTIONS = sized(100_000, 20_000), 50
CROWD_LOGS = CROWD // 100
BUSY, BUSY_CONNECTIONS, BUSY_APPENDS = 1_000, 10, sized(10_000, 3_000)
# Followers share few connections here.
MANY_CALLS = ["--max-concurrent-streams", "4096", "--max-calls", "200000"]
# Minimum seconds between two messages to one of the 1,000 followers: 50 us for each follower.
BUSY_PAUSE = 0.05
# The delay of a flush is nearly all of an append's time, so the comparison is not of the machine's noise.
SLOW = ["-e", "trace=fdatasync", "-e", "inject=fdatasync:delay_enter=150000"]
LOAD_OF_OTHERS = dict(appends=10**9, writers=16, connections=4, pause_ms=5, logs=16, bytes=1000, prefix="small", attempts=1,
                      tolerate=True)


class Rude:
    """A client that speaks just enough HTTP/2 to misbehave: it reads only when the test calls `receive`, answers no
    ping, and ends without closing."""

    def __init__(self, daemon):
        host, port = daemon.grpc.rsplit(":", 1)
        self.authority, self.streams = daemon.grpc, 0
        self.socket = socket.create_connection((host, int(port)))
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self._frame(4, 0, 0, b""))

    @staticmethod
    def _frame(kind, flags, stream, payload):
        return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload

    def call(self, method, message, missing=0):
        """Begins a call; `missing` bytes of its message never come."""
        stream = 2 * self.streams + 1
        self.streams += 1
        fields = {":method": "POST", ":scheme": "http", ":path": f"/wald.v1.WalService/{method}",
                  ":authority": self.authority, "te": "trailers", "content-type": "application/grpc"}
        head = b"".join(b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
                        for name, value in fields.items())
        body = struct.pack(">BI", 0, len(message) + missing) + message
        end_stream = 0 if missing else 1
        self.socket.sendall(self._frame(1, 4, stream, head) + self._frame(0, end_stream, stream, body))

    def receive(self, count):
        """Reads at least `count` bytes."""
        left = count
        while left > 0:
            data = self.socket.recv(65536)
            if not data:
                raise SystemExit("the server closed the connection")
            left -= len(data)

    def die(self):
        """Ends at once: the server gets a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


class Crowd(Rude):
    """Many well-behaved followers on one connection: it reads all data and answers pings."""

    def __init__(self, daemon, selector):
        super().__init__(daemon)
        # The maximum, so no window needs an update later.
        self.socket.sendall(self._frame(4, 0, 0, struct.pack(">HI", 4, 2**31 - 1))
                            + self._frame(8, 0, 0, struct.pack(">I", 2**31 - 1 - 65535)))
        self.rest, self.answers, self.bytes, self.left = b"", {}, {}, {}
        selector.register(self.socket, selectors.EVENT_READ, self)

    def take(self):
        """Reads the received bytes: counts messages and their bytes by stream."""
        data = self.socket.recv(1 << 20)
        if not data:
            raise SystemExit("the server closed a connection of followers")
        data, at = self.rest + data, 0
        while len(data) - at >= 9:
            length = int.from_bytes(data[at:at + 3], "big")
            if len(data) - at < 9 + length:
                break
            kind, flags, stream = struct.unpack_from(">BBI", data, at + 3)
            if kind == 6 and not flags & 1:
                self.socket.sendall(self._frame(6, 1, 0, data[at + 9:at + 9 + length]))
            elif kind == 4 and not flags & 1:
                self.socket.sendall(self._frame(4, 1, 0, b""))
            elif kind == 0 and length:
                # No frame has parts of two messages; the length precedes the first.
                left = self.left.get(stream, 0)
                if left == 0:
                    self.answers[stream] = self.answers.get(stream, 0) + 1
                    left = 5 + int.from_bytes(data[at + 10:at + 14], "big")
                self.left[stream] = left - length
                self.bytes[stream] = self.bytes.get(stream, 0) + length
            elif kind in (3, 7) or kind == 1 and flags & 1:
                raise SystemExit(f"the server ended a follower: frame {kind}, {data[at:at + 9 + length]!r}")
            at += 9 + length
        self.rest = data[at:]


def listen(selector, until, seconds=120):
    """Reads for all followers until a condition holds; returns whether it does."""
    deadline = time.monotonic() + seconds
    while not until():
        for key, _ in selector.select(0.05):
            key.data.take()
        if time.monotonic() > deadline:
            return False
    return True


def follow(prefix):
    """ScanRequest: prefix, follow."""
    return b"\x12" + bytes([len(prefix)]) + prefix.encode() + b"\x50\x01"


def follow_one(log):
    """ScanRequest: log, from the tail on, follow."""
    return b"\x0a" + bytes([len(log)]) + log.encode() + b"\x30\x00\x50\x01"


def append(log, size):
    """AppendRequest: log, record with data."""
    def field(number, data):
        length, varint = len(data), b""
        while length > 127:
            varint, length = varint + bytes([length & 127 | 128]), length >> 7
        return bytes([number << 3 | 2]) + varint + bytes([length]) + data
    return field(1, log.encode()) + field(2, field(1, b"x" * size))


def one_round(daemon, number):
    """Clients that die: during a large scan, while following, during a request, before an answer."""
    client = Rude(daemon)
    kind = number % 4
    if kind == 0:
        client.call("Scan", follow("small/"))
        client.receive(30_000)
    elif kind == 1:
        for _ in range(5):
            client.call("Scan", follow("idle/"))
        client.receive(100)
    elif kind == 2:
        client.call("Append", append("dying", 1_000), missing=15_000)
        client.receive(20)
    else:
        client.call("Append", append("dying", 1_000))
    client.die()


def state(daemon):
    metrics = daemon.metrics()
    return {"fds": len(daemon.descriptors()), "followers": int(metrics["wald_followers"]),
            "inflight": int(metrics["wald_inflight_bytes"])}


def at_rest(daemon, idle):
    now = state(daemon)
    return now["fds"] <= idle["fds"] and now["followers"] == now["inflight"] == 0


@check("Writers notice neither idle followers nor followers that read nothing")
def others_unchanged(data):
    with Daemon(data, *MANY_CALLS, strace=SLOW) as daemon:
        daemon.ready().load(seconds=1, **LOAD_OF_OTHERS).result()
        alone = [daemon.load(seconds=6, **LOAD_OF_OTHERS).result()]
        before = daemon.anonymous()
        with daemon.load(appends=0, writers=0, followers=IDLE, connections=10, prefix="idle"):
            expect(f"{IDLE:,} followers are there", wait_until(lambda: daemon.metric("wald_followers") == IDLE))
            each = (daemon.anonymous() - before) / IDLE
            stuck = [Rude(daemon) for _ in range(5)]
            for client in stuck:
                client.call("Scan", follow("small/"))
            over, rounds = threading.Event(), 0

            def dying():
                nonlocal rounds
                while not over.wait(0.02):
                    one_round(daemon, rounds)
                    rounds += 1

            thread = threading.Thread(target=dying)
            thread.start()
            beside = daemon.load(seconds=8, **LOAD_OF_OTHERS).result()
            over.set()
            thread.join()
            expect("an idle follower costs little", each < 64 << 10, f"{each / 1024:.1f} KiB resident, connection included")
            for client in stuck:
                client.die()
        expect("the gauge of followers returns to 0", wait_until(lambda: daemon.metric("wald_followers") == 0))
        # Before and after, because the machine's speed varies.
        alone.append(daemon.load(seconds=6, **LOAD_OF_OTHERS).result())
    print(f"     alone: {alone}\n     beside: {beside}")
    p99 = max(told["p99_us"] for told in alone)
    expect("idle followers, 5 that read nothing, and clients that die: writers' p99 is the same",
           beside["p99_us"] <= 1.25 * p99 and not beside["errors"],
           f"{beside['p99_us'] / 1000:.0f} ms, {p99 / 1000:.0f} ms alone; {rounds} clients died")
    rate, least = beside["acks"] / beside["seconds"], min(told["acks"] / told["seconds"] for told in alone)
    expect("and so is their throughput", rate >= 0.9 * least, f"{rate:.0f}/s, {least:.0f}/s alone")


@check("1,000 followers of one busy log get all records, in few messages")
def busy(data):
    with Daemon(data, *MANY_CALLS) as daemon:
        daemon.ready().load(appends=1, writers=1, logs=1, bytes=100, prefix="busy").result()
        selector = selectors.DefaultSelector()
        crowds = [Crowd(daemon, selector) for _ in range(BUSY_CONNECTIONS)]
        for number in range(BUSY):
            crowds[number % BUSY_CONNECTIONS].call("Scan", follow_one("busy/0"))
        total = lambda what: sum(sum(getattr(crowd, what).values()) for crowd in crowds)
        caught_up = listen(selector, lambda: sum(len(crowd.answers) for crowd in crowds) == BUSY)
        expect(f"{BUSY:,} followers of one log are there", caught_up)
        answers, before, began = total("answers"), [dict(crowd.bytes) for crowd in crowds], time.monotonic()
        load = daemon.load(appends=BUSY_APPENDS, writers=16, connections=4, logs=1, bytes=100, prefix="busy")
        least = lambda: min(min(crowd.bytes[stream] - had[stream] for stream in had) for crowd, had in zip(crowds, before))
        all_there = listen(selector, lambda: least() >= BUSY_APPENDS * 100)
        took, told = time.monotonic() - began, load.result()
        expect("each gets all records", all_there and told["acks"] == BUSY_APPENDS,
               f"{BUSY * BUSY_APPENDS:,} records in {took:.1f} s, appended in {told['seconds']:.1f} s")
        each = (total("answers") - answers) / BUSY
        expect("in few messages", each <= took / BUSY_PAUSE + 3, f"{each:.0f} each")
        for crowd in crowds:
            crowd.die()
        expect("nothing is left of them", wait_until(lambda: daemon.metric("wald_followers") == 0))


@check("Clients that die during a stream or a request leave nothing behind")
def nothing_leaks(data):
    with Daemon(data, "--max-inflight-bytes", "1MiB", *MANY_CALLS) as daemon:
        daemon.ready().load(appends=2_000, writers=16, logs=16, bytes=1000, prefix="small").result()
        idle = state(daemon)
        # Caches of allocator and engine fill first.
        for number in range(ROUNDS // 2):
            one_round(daemon, number)
        wait_until(lambda: at_rest(daemon, idle))
        memory = daemon.anonymous()
        for number in range(ROUNDS):
            one_round(daemon, number)
        expect(f"after {ROUNDS:,} rounds of clients that die no file, follower or byte in flight is left",
               wait_until(lambda: at_rest(daemon, idle)), f"{idle} before, {state(daemon)} after")
        grown = daemon.anonymous() - memory
        expect("nor memory", grown < 2 << 20, f"{grown >> 10} KiB more, {memory >> 20} MiB before")
        # If any part of the budget were lost, this would be BUSY.
        client = daemon.load(appends=1, writers=1, logs=1, bytes=900_000, prefix="after", attempts=1).result()
        expect("and all of the budget is free", client["acks"] == 1, client.get("error", ""))
        # Two kinds of rounds append nothing: in one of them the request never arrived whole.
        _, tail, _ = daemon.call("wald.v1.WalService/GetTail", {"log": "dying"})
        whole = ROUNDS // 4 + ROUNDS // 8
        expect("no part of an interrupted request is there", tail and 0 < int(tail["tailLsn"]) <= whole,
               f"{tail and tail['tailLsn']} of {whole} whole ones")
        expect("SIGTERM ends it with 0", daemon.stop() == 0)


def cpu_seconds(daemon):
    """Processor time of user and system until now, in seconds."""
    fields = Path(f"/proc/{daemon.pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@check("Memory and delay of a crowd of idle followers of many logs")
def a_crowd(data):
    with Daemon(data, *MANY_CALLS) as daemon:
        daemon.ready().load(appends=CROWD_LOGS * 4, writers=16, logs=CROWD_LOGS, bytes=100, prefix="crowd").result()
        listed = daemon.walctl("logs", "--prefix", "crowd/", "--limit", CROWD_LOGS, "--output", "json").stdout.decode()
        names = re.findall(r'"name": ?"([^"]+)"', listed)
        before, began = daemon.anonymous(), time.monotonic()
        selector = selectors.DefaultSelector()
        crowds, of_log = [Crowd(daemon, selector) for _ in range(CROWD_CONNECTIONS)], {}
        for number in range(CROWD):
            crowd, name = crowds[number % CROWD_CONNECTIONS], names[number // CROWD_CONNECTIONS % len(names)]
            of_log.setdefault(name, []).append((crowd, 2 * crowd.streams + 1))
            crowd.call("Scan", follow_one(name))
            if number % 500 == 0:
                listen(selector, lambda: True)
        there = listen(selector, lambda: daemon.metric("wald_followers") == CROWD)
        # Each gets one message when it has caught up.
        caught_up = listen(selector, lambda: sum(len(crowd.answers) for crowd in crowds) == CROWD)
        expect(f"{CROWD:,} followers of {len(names):,} logs are there", there and caught_up,
               f"after {time.monotonic() - began:.1f} s")
        each = (daemon.anonymous() - before) / CROWD
        expect("each takes few bytes", each < 16 << 10, f"{each / 1024:.2f} KiB resident, its stream included")
        spent, began = cpu_seconds(daemon), time.monotonic()
        listen(selector, lambda: time.monotonic() - began > sized(30, 16), 40)
        share = (cpu_seconds(daemon) - spent) / (time.monotonic() - began)
        expect("idle, they take no processor time but for their heartbeats", share < 0.25,
               f"{share:.1%} of a core, with one heartbeat each in 15 s")
        took, line = [], Path(f"{data}.line")
        line.write_text("x" * 5000 + "\n")
        for name in names[::len(names) // 50]:
            told = [(crowd, stream, crowd.bytes.get(stream, 0)) for crowd, stream in of_log[name]]
            began = time.monotonic()
            done = subprocess.Popen([WALCTL, "append", name, line], env=clean_environment(WALD_ENDPOINT=daemon.endpoint),
                                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            # More than any heartbeat.
            heard = lambda: all(crowd.bytes.get(stream, 0) - had > 5000 for crowd, stream, had in told)
            if not listen(selector, heard, 20):
                took = None
                break
            took.append(time.monotonic() - began)
            done.wait()
        expect(f"an append reaches all {CROWD // len(names)} followers of its log at once", took and sorted(took)[len(took) // 2] < 0.2,
               took and f"median {sorted(took)[len(took) // 2] * 1000:.0f} ms, slowest {max(took) * 1000:.0f} ms, "
                        "the start of walctl included")
        for crowd in crowds:
            crowd.die()
        expect("nothing is left of them", wait_until(lambda: daemon.metric("wald_followers") == 0))
