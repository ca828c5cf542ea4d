#!/usr/bin/env python3
"""usage: harness.py --wald PATH [--tls] [--replica] [--stand-by] [--start ARGUMENTS] [--only NAMES] [--cases FILE] [--log FILE] -- RUNNER...
       harness.py --check-cases [--cases FILE]

Runs the conformance cases by a runner; README.md describes both. The harness starts the
daemon on an empty directory and stands between it and the runner as a proxy. It carries out
the requests of the cases at the control endpoint, and ends everything. ARGUMENTS, in one word,
are further arguments of each start of the daemon. NAMES are separated by commas. FILE of --log gets the daemons' log lines. The exit status is the runner's, or 1 if
the names it printed `ok` are not exactly the cases.

With --tls the daemon requires a client certificate, and the cases of TLS run as well. The proxy passes TLS on as it
is. Only where a case loses an answer, it has to see the frames, and is an end of both connections. The cases of TLS
have no proxy.

With --stand-by two daemons share the bucket of ARGUMENTS. The proxy leads to the one that does not own the store, and a
runner cannot reach the owner. Linux only.

With --check-cases no daemon runs: the file is checked to be well-formed.

Only the standard library: everyone who has Python can check a client. --tls needs the command openssl.
"""

import argparse
import asyncio
import contextlib
import http.server
import json
import os
import re
import resource
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import authority

HERE = Path(__file__).resolve().parent
CASES = HERE / "cases.json"
# HTTP/2 (RFC 9113): a client's first bytes, and the frames that matter here.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM = 0, 1, 3
END_STREAM = 1
CHUNK = 65536
# A case takes at most a minute (README.md); a runner needs some time to start and to end.
CASE_SECONDS, MORE_SECONDS = 60, 120
# Of two nodes: nobody may take the store over from an owner that is killed and starts again. Maximum time for a node to own the
# store or to stand by.
LEASE, ROLE_SECONDS = "60s", 60


def clean_environment(**more):
    """The environment without settings of Wald."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WALD_")}
    return {**kept, **more}


class Daemon:
    """The built daemon on one directory, which it keeps over as many processes as are asked for.

    Every process listens where the system likes; `address` says where, and is None while none serves.
    """

    def __init__(self, wald, data_dir, arguments=(), log=None, environment=None):
        self.command = [str(wald), "--data-dir", str(data_dir), "--listen", "127.0.0.1:0", "--http-listen",
                        "127.0.0.1:0", "--log-format", "json", *(str(a) for a in arguments)]
        self.environment = clean_environment() if environment is None else environment
        self.log = log
        self.process = None
        self.address = None
        self.starts = 0

    def start(self):
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE, text=True, env=self.environment)
        said = []
        for line in self.process.stderr:
            self._keep(line)
            said.append(line)
            if "wald is serving" in line:
                host, _, port = json.loads(line)["grpc"].rpartition(":")
                self.address = host.strip("[]"), int(port)
                self.starts += 1
                # Goes on reading, so that the daemon never waits for a full pipe.
                threading.Thread(target=self._drain, args=(self.process.stderr,), daemon=True).start()
                return
        raise RuntimeError(f"the daemon ended with {self.process.wait()} before it served: {''.join(said[-20:])}")

    def _keep(self, line):
        if self.log is not None:
            self.log.write(line)
            self.log.flush()

    def _drain(self, lines):
        for line in lines:
            self._keep(line)

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        """SIGKILL, and the end of it."""
        self.address = None
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def close(self):
        self.kill()

    def stop(self, seconds=60):
        """SIGTERM, and the end of it: the exit status."""
        # Serves until it ends: earlier requests are answered, so the address stays.
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=seconds)
        self.address = None
        return code


class Node(Daemon):
    """One of two daemons that share a store. `serving`: it owns the store; False: it stands by, and has the owner's address."""

    def __init__(self, wald, directory, name, arguments, log):
        # The address that the other node gets. It stays, as `kill` and `stop` need.
        self.gate = Proxy(lambda: self.address, admits=lambda port: is_of(port, self.other.process.pid))
        self.other = None
        own = ["--node-id", name, "--stand-by", "--lease-ttl", LEASE, "--advertise", f"127.0.0.1:{self.gate.port}"]
        data = Path(directory) / name
        super().__init__(wald, data, [*arguments, *own], log)
        self.serving = None
        self.changed = threading.Condition()

    def start(self):
        self.serving = None
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE, text=True, env=self.environment)
        threading.Thread(target=self._follow, args=(self.process,), daemon=True).start()
        self.await_role(True, False)
        self.starts += 1

    def _follow(self, process):
        for line in process.stderr:
            self._keep(line)
            if "wald is serving" in line or "wald is standing by" in line:
                host, _, port = json.loads(line)["grpc"].rpartition(":")
                # Before the gate opens: without an address it resets each connection.
                self.address = host.strip("[]"), int(port)
                self.gate.listen()
                with self.changed:
                    self.serving = "wald is serving" in line
                    self.changed.notify_all()

    def kill(self):
        super().kill()
        # Like a port at which nobody listens.
        self.gate.refuse()

    def stop(self, seconds=60):
        code = super().stop(seconds)
        self.gate.refuse()
        return code

    def await_role(self, *roles):
        """Waits until `serving` is one of these."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.serving in roles or self.process.poll() is not None, ROLE_SECONDS):
                raise RuntimeError(f"the node does not become {roles} within {ROLE_SECONDS} s")
        if self.serving not in roles:
            raise RuntimeError(f"the node ended with {self.process.wait()}")


def is_of(port, pid):
    """Whether a connection from this port of the machine is one of the process."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(entry))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(int(row[1].rpartition(":")[2], 16) == port and f"socket:[{row[9]}]" in found for row in rows)


class Pair:
    """The two nodes. `kill` and `stop` are about the owner; `address` is that of the other one, the stand-by."""

    def __init__(self, wald, directory, arguments, log, on_move):
        self.on_move = on_move
        first, second = (Node(wald, directory, name, arguments, log) for name in ("first", "second"))
        first.other, second.other = second, first
        self.owner, self.stand_by = first, second

    @property
    def address(self):
        return self.stand_by.address

    @property
    def starts(self):
        return self.owner.starts + self.stand_by.starts

    def start(self):
        """Starts the owner, and at first the stand-by. A plain end of the owner gives the store to the stand-by."""
        self.owner.start()
        if self.stand_by.process is None:
            self.stand_by.start()
        if not self.owner.serving:
            self.stand_by.await_role(True)
            self.owner, self.stand_by = self.stand_by, self.owner
            self.on_move()

    def signal(self, number):
        self.owner.signal(number)

    def kill(self):
        self.owner.kill()

    def stop(self):
        return self.owner.stop()

    def close(self):
        self.owner.kill()
        self.stand_by.kill()


class Certificates:
    """The files of a server and a client with TLS, by a CA, and of others that must be refused."""

    def __init__(self, directory):
        own, other = authority.Authority(directory / "own"), authority.Authority(directory / "other", "another CA")
        self.ca, self.other_ca = own.pem, other.pem
        self.server, self.client, self.expired = (
            own.issue(directory, name, begin=begin) for name, begin in (("server", None), ("client", None), ("expired", "230101")))
        self.other = other.issue(directory, "other")

    def arguments(self):
        """The arguments of the daemon."""
        return ["--tls-cert", self.server[0], "--tls-key", self.server[1], "--tls-client-auth", "require",
                "--tls-client-ca", self.ca]

    def context(self, pair, server):
        """Settings of one end of a connection, which sends a certificate and requires one."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.load_cert_chain(*pair)
        context.load_verify_locations(self.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(["h2"])
        return context


class Expired:
    """A server whose certificate is expired. Clients must not try more often than once a second."""

    def __init__(self, certificates, trouble):
        self.context = certificates.context(certificates.expired, server=True)
        self.trouble = trouble
        self.times = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer):
        try:
            with peer:
                # The attempt begins with the first byte: gRPC may open the connection before.
                if peer.recv(1, socket.MSG_PEEK):
                    self.times.append(time.monotonic())
                    # A client may need one more to find out why the first one failed: grpcio does not say it.
                    if len(self.times) > 3 and self.times[-1] - self.times[-4] < 1.5:
                        self.trouble.append("more than one handshake a second with a server that is refused")
                    self.context.wrap_socket(peer, server_side=True).close()
        except OSError:
            pass

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


class Frames:
    """Finds the frames in one direction of an HTTP/2 connection, however they are cut."""

    def __init__(self, preface):
        self.skip = len(preface)
        self.header = b""

    def feed(self, data):
        """The frames that begin in these bytes: (type, flags, stream, length)."""
        found = []
        at = 0
        while at < len(data):
            if self.skip:
                step = min(self.skip, len(data) - at)
                self.skip -= step
                at += step
                continue
            take = 9 - len(self.header)
            self.header += data[at:at + take]
            at += take
            if len(self.header) == 9:
                length = int.from_bytes(self.header[:3], "big")
                stream = int.from_bytes(self.header[5:], "big") & 0x7FFFFFFF
                found.append((self.header[3], self.header[4], stream, length))
                self.skip, self.header = length, b""
        return found


class Connection:
    """One connection through the proxy, with both of its ends."""

    def __init__(self, proxy, client, daemon):
        self.proxy = proxy
        self.writers = (client, daemon)
        # The stream whose next answer is not to arrive.
        self.losing = None

    def abort(self):
        for writer in self.writers:
            writer.transport.abort()

    async def up(self, reader, writer):
        """Bytes of the client: forwarded unchanged."""
        frames = Frames(PREFACE)
        while data := await reader.read(CHUNK):
            for kind, _, stream, length in frames.feed(data):
                if kind == DATA and length and self.losing is None and self.proxy.to_lose:
                    self.proxy.to_lose -= 1
                    self.losing = stream
                elif kind == RST_STREAM and stream == self.losing:
                    # Nobody waits for the answer any more: as lost as it can be.
                    self.proxy.lost += 1
                    return
            writer.write(data)
            await writer.drain()

    async def down(self, reader, writer):
        """Bytes of the daemon: forwarded later if there is a delay, or not at all.

        Of a lost answer not even the headers pass. They may come before the request is
        carried out, though, so that only the bytes behind them prove that it was.
        """
        frames = Frames(b"")
        holding = False
        while data := await reader.read(CHUNK):
            for kind, flags, stream, length in frames.feed(data):
                if stream and stream == self.losing:
                    if kind == RST_STREAM or (kind == DATA and length) or (kind == HEADERS and flags & END_STREAM):
                        self.proxy.lost += 1
                        return
                    holding = True
            if not holding:
                await self.proxy.pass_on(writer, data)


class Proxy:
    """TCP, from one port that stays to a daemon whose port changes."""

    def __init__(self, target, certificates=None, admits=lambda port: True):
        """`target()` is where the daemon serves now, or None. With certificates the proxy is an end of TLS. `admits(port)`:
        whether it serves a client at this port."""
        self.target, self.admits = target, admits
        self.near = certificates and certificates.context(certificates.server, server=True)
        self.far = {} if certificates is None else {
            "ssl": certificates.context(certificates.client, server=False), "server_hostname": "localhost"}
        self.to_lose = 0
        self.lost = 0
        self.delay = 0.0
        self.dropped = 0
        self.connections = set()
        self.loop = asyncio.new_event_loop()
        self.changed = asyncio.Event()
        self.port = self.held = None
        started = threading.Event()
        threading.Thread(target=self._run, args=(started,), daemon=True).start()
        started.wait()

    def _run(self, started):
        asyncio.set_event_loop(self.loop)

        self.loop.run_until_complete(self._listen())
        started.set()
        self.loop.run_forever()

    async def _listen(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port or 0, backlog=4096, ssl=self.near)
        self.port = self.server.sockets[0].getsockname()[1]

    def refuse(self):
        """Refuses connections, until `listen`."""
        def close():
            self.server.close()
            # Keeps the port from others.
            self.held = socket.socket()
            self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.held.bind(("127.0.0.1", self.port))

        self._call(close)

    def listen(self):
        if self.held is not None:
            asyncio.run_coroutine_threadsafe(self._listen(), self.loop).result()
            self.held.close()
            self.held = None

    async def _serve(self, reader, writer):
        target = self.target()
        try:
            if target is None or not self.admits(writer.get_extra_info("peername")[1]):
                raise ConnectionRefusedError
            daemon_reader, daemon_writer = await asyncio.open_connection(*target, **self.far)
        except OSError:
            writer.transport.abort()
            return
        connection = Connection(self, writer, daemon_writer)
        self.connections.add(connection)
        ways = [asyncio.ensure_future(connection.up(reader, daemon_writer)),
                asyncio.ensure_future(connection.down(daemon_reader, writer))]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if ways[1] in done and ways[1].exception() is None and connection.losing is None:
                # The daemon has ended it: its last bytes must not be cut off.
                writer.close()
                await writer.wait_closed()
        except OSError:
            pass
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            connection.abort()
            self.connections.discard(connection)

    async def pass_on(self, writer, data):
        until = self.loop.time() + self.delay
        while self.delay and (left := until - self.loop.time()) > 0:
            try:
                await asyncio.wait_for(self.changed.wait(), left)
            except asyncio.TimeoutError:
                break
            until = min(until, self.loop.time() + self.delay)
        writer.write(data)
        await writer.drain()

    def _call(self, function):
        """Calls a function in the proxy's thread, and waits for it."""
        async def call():
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result()

    def drop(self):
        """Closes every connection, now."""
        def close():
            for connection in self.connections:
                connection.abort()
            self.dropped += len(self.connections)
            return len(self.connections)

        return self._call(close)

    def lose_answer(self, count):
        def lose():
            self.to_lose = count

        self._call(lose)

    def set_delay(self, seconds):
        def change():
            self.delay = seconds
            # Wakes those who wait now, and nobody later.
            self.changed.set()
            self.changed.clear()

        self._call(change)


class Control:
    """Requests that a case can make, by HTTP."""

    def __init__(self, daemon, proxy):
        self.daemon, self.proxy = daemon, proxy
        self.lock = threading.Lock()
        self.done = {}
        self.trouble = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                code, answer = 200, {}
                try:
                    body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                    outer.act(self.path.strip("/"), json.loads(body or b"{}") or {})
                except (KeyError, TypeError, ValueError) as error:
                    code, answer = 400, {"error": f"{type(error).__name__}: {error}"}
                except Exception as error:  # whatever it is, the runner must not wait for ever
                    outer.trouble.append(f"{self.path}: {error}")
                    code, answer = 500, {"error": str(error)}
                text = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_):
                pass  # the runner has gone, so no reader is left

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def act(self, action, arguments):
        """Does one action of README.md's table; answers when it is done."""
        with self.lock:
            getattr(self, {"kill": "_kill", "stop": "_stop", "pause": "_pause", "resume": "_resume", "drop": "_drop",
                           "lose_answer": "_lose_answer", "delay": "_delay"}[action])(**arguments)
            self.done[action] = self.done.get(action, 0) + 1

    def reset(self):
        """Undoes the changes of a case that failed halfway."""
        with self.lock:
            self._resume()
            self._delay(0)
            self._lose_answer(0)

    def _kill(self):
        self.daemon.kill()
        self.daemon.start()

    def _stop(self):
        code = self.daemon.stop()
        self.daemon.start()
        if code != 0:
            raise RuntimeError(f"the daemon ended with {code} after SIGTERM")

    def _pause(self):
        self.daemon.signal(signal.SIGSTOP)

    def _resume(self):
        self.daemon.signal(signal.SIGCONT)

    def _drop(self):
        self.proxy.drop()

    def _lose_answer(self, count=1):
        self.proxy.lose_answer(int(count))

    def _delay(self, ms):
        self.proxy.set_delay(float(ms) / 1000)


class Served:
    """Daemon, proxy and control endpoint together; a context that ends them.

    `certificates`: with TLS. `sees_frames`: the proxy is an end of TLS then. `stand_by`: two daemons, and the runner is at
    the one that does not own the store.
    """

    def __init__(self, wald, directory, arguments=(), log=None, certificates=None, sees_frames=True, stand_by=False):
        allow_many_connections()
        self.certificates, self.plain, self.expired = certificates, None, None
        more = [] if certificates is None else certificates.arguments()
        if stand_by:
            self.daemon = Pair(wald, directory, arguments, log, lambda: self.proxy.drop())
        else:
            self.daemon = Daemon(wald, Path(directory) / "data", [*arguments, *more], log)
        self.proxy = Proxy(lambda: self.daemon.address, certificates if sees_frames else None)
        self.control = Control(self.daemon, self.proxy)
        self.daemon.start()
        if certificates is not None:
            self.plain = Daemon(wald, Path(directory) / "plain", arguments, log)
            self.plain.start()
            self.expired = Expired(certificates, self.control.trouble)

    def environment(self, direct=False):
        """The environment of every runner. `direct`: without the proxy, as long as the daemon is not started again."""
        # A proxy could lose the alert with which a server refuses a client.
        server = "{}:{}".format(*self.daemon.address) if direct else f"127.0.0.1:{self.proxy.port}"
        found = {"WALD_ENDPOINT": server, "WALD_CONTROL": f"http://127.0.0.1:{self.control.port}"}
        if self.certificates is None:
            return found
        files = self.certificates
        return {**found, "WALD_ENDPOINT": f"https://{server}", "WALD_TLS_CA": str(files.ca),
                "WALD_TLS_CERT": str(files.client[0]), "WALD_TLS_KEY": str(files.client[1]), "WALD_CASE_SERVER": server,
                "WALD_CASE_PLAIN_SERVER": "{}:{}".format(*self.plain.address),
                "WALD_CASE_EXPIRED_SERVER": f"127.0.0.1:{self.expired.port}", "WALD_CASE_OTHER_CA": str(files.other_ca),
                "WALD_CASE_OTHER_CERT": str(files.other[0]), "WALD_CASE_OTHER_KEY": str(files.other[1])}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self.control.lock:
            self.daemon.close()
        if self.certificates is not None:
            self.plain.kill()
            self.expired.close()


def allow_many_connections():
    """Every connection takes two descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def end_group(process):
    """Ends a runner and whatever it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


# Few, so that a case can reach the bound.
SETTINGS = ("--max-producers-per-log", "12")

# The tables of README.md: arguments of a step (a star marks required ones), members of its
# result.
SELECTION = "log prefix all lsn timestamp_us tail_offset cursor until_lsn max_records log_id"
STEPS = {
    "append": ("log* record* condition durability", "lsn deduplicated durability durable_lsn replicated_lsn log_id"),
    "append_batch": ("batches* checks cursors durability", "appends durability"),
    "session": ("requests*", "acks error"),
    "read": ("log* lsn timestamp_us tail_offset max_records wait_ms log_id",
             "records next_lsn tail_lsn first_lsn durable_lsn replicated_lsn"),
    "scan": (SELECTION, "records gaps cursor"),
    "follow": (f"{SELECTION} as*", ""),
    "followed": ("follower* count* gaps caught_up", "records gaps cursor caught_up"),
    "consume": (f"{SELECTION} count* counting", "applied twice skipped gaps lives"),
    "unfollow": ("follower*", ""),
    "tail": ("log* log_id", "first_lsn tail_lsn durable_lsn replicated_lsn writer_epoch log_id"),
    "fence": ("log* writer_epoch log_id", "tail_lsn writer_epoch log_id"),
    "trim": ("log* before_lsn* log_id", "first_lsn"),
    "sync": ("log", ""),
    "create_log": ("log*", "log_id"),
    "delete_log": ("log* log_id", ""),
    "commit_cursor": ("log* cursor* lsn* expected_lsn log_id", "lsn log_id"),
    "get_cursor": ("log* cursor* log_id", "lsn log_id"),
    "delete_cursor": ("log* cursor* log_id", ""),
    "list_cursors": ("log*", "cursors"),
    "update_log": ("log* max_record_bytes*", "max_record_bytes"),
    "get_log": ("log*", "log_id max_record_bytes"),
    "list_producers": ("log* log_id page_size", "producers"),
    "forget_producer": ("log* id* log_id", ""),
    "producer": ("log* id epoch log_id as*", ""),
    "close_producer": ("producer*", ""),
    "defaults": ("", "batches_in_flight bytes_in_flight linger_ms attempts timeout_ms retry_for_ms"),
    "produce": ("producer* records* writer_epoch expected_lsn", "first_lsn next_lsn deduplicated"),
    "produce_many": ("producer* prefix* count* in_flight*", "acked lsns_ascend"),
    "background": ("steps* as*", ""),
    "join": ("job*", ""),
    "repeat": ("times* steps*", ""),
    "control": ("action* count ms", ""),
    "wait_tail": ("log* at_least*", ""),
    "connect": ("endpoint* ca cert key server_name token", "connected"),
}
# Names that need no step: the harness gives them to a runner (--tls).
GIVEN = ("server", "plain_server", "expired_server", "other_ca", "other_cert", "other_key")
# Members of objects within arguments, results and failures.
INNER = {
    "condition": "expected_lsn must_exist must_not_exist writer_epoch log_id producer",
    "batches": "log* records* condition",
    "checks": "log* expected_lsn must_exist must_not_exist log_id",
    "cursors": "log cursor* lsn* expected_lsn log_id",
    "requests": "batches* checks cursors durability",
    "appends": "log first_lsn next_lsn deduplicated log_id",
    "acks": "appends durability",
    "error": "code reason outcome retry facts failed request",
    "gaps": "log from_lsn to_lsn reason",
    "failed": "log reason description",
    "producers": "id epoch next_sequence",
}
FAILS = "code reason outcome retry facts failed problem"
# The step that makes the object that an argument names.
MADE_BY = {"follower": "follow", "producer": "producer", "job": "background"}
CONTROL = {"kill": "", "stop": "", "pause": "", "resume": "", "drop": "", "lose_answer": "count", "delay": "ms*"}
# A list that is written out by the runner.
LIST = {"times", "each"}
MATCHES = ("add", "at_least", "below", "length")


class Checker:
    """Whether cases are well-formed: faults that a runner cannot find on its own."""

    def __init__(self):
        self.trouble = []
        self.where = ""

    def wrong(self, what):
        self.trouble.append(f"{self.where}: {what}")

    def members(self, given, known, what):
        """Only known members, and all that must be there."""
        allowed = {name.rstrip("*") for name in known.split()}
        needed = {name[:-1] for name in known.split() if name.endswith("*")}
        for name in sorted(set(given) - allowed):
            self.wrong(f"{what} has no {name}")
        for name in sorted(needed - set(given)):
            self.wrong(f"{what} needs {name}")

    def case(self, case):
        self.where = case.get("name", "?")
        self.members(case, "name* why* steps* needs", "a case")
        if case.get("needs", "tls") not in ("tls", "replica"):
            self.wrong("needs nothing that the harness has")
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", case["name"]):
            self.wrong("the name is no sentence in kebab-case")
        kept = {}
        self.steps(case["steps"], kept, within_repeat=False)
        for name, do in kept.items():
            if do in ("background", "follow"):
                self.wrong(f"{name} is never ended")

    def steps(self, steps, kept, within_repeat):
        for number, step in enumerate(steps):
            where = self.where
            self.where = f"{where} step {number + 1} ({step.get('do')})"
            self.step(step, kept, within_repeat)
            self.where = where

    def step(self, step, kept, within_repeat):
        do = step.get("do")
        if do not in STEPS:
            return self.wrong("unknown")
        arguments, result = STEPS[do]
        given = {name: value for name, value in step.items() if name not in ("do", "expect", "fails", "within_ms")}
        self.members(given, f"{arguments} as", do)
        if "expect" in step and "fails" in step:
            self.wrong("both expect and fails")
        if do == "control":
            self.members({k: v for k, v in given.items() if k != "action"}, CONTROL.get(given.get("action"), "?"),
                         f"action {given.get('action')}")
        if do in ("scan", "follow", "consume") and sum(name in given for name in ("log", "prefix", "all")) != 1:
            self.wrong("needs one of log, prefix and all")
        for argument, maker in MADE_BY.items():
            if argument in given and kept.get(given[argument]) != maker and not isinstance(given[argument], dict):
                self.wrong(f"no {maker} named {given[argument]}")
        for name, value in given.items():
            if name != "steps":
                self.value(value, kept, within_repeat)
                self.inner(name, value)
        for name in ("expect", "fails"):
            self.value(step.get(name), kept, within_repeat)
        self.members(step.get("expect") or {}, result, "the result")
        for name, value in (step.get("expect") or {}).items():
            # A list of cursors as a result is its own thing.
            if do != "list_cursors":
                self.inner(name, value, complete=False)
        self.members(step.get("fails") or {}, FAILS, "a failure")
        self.inner("failed", (step.get("fails") or {}).get("failed"))
        if do == "background":
            self.steps(given.get("steps", []), dict(kept), within_repeat)
        if do == "repeat":
            self.steps(given.get("steps", []), kept, within_repeat=True)
        if do in ("unfollow", "join"):
            kept[given.get("follower") or given.get("job")] = "ended"
        if "as" in step:
            kept[step["as"]] = do

    def inner(self, name, value, complete=True):
        """Members of inner objects, by the name of their parent."""
        if isinstance(value, dict) and value.keys() == LIST:
            value = value["each"]
        if name not in INNER or not isinstance(value, (dict, list)):
            return
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict) and not set(one) & set(MATCHES):
                known = INNER[name] if complete else INNER[name].replace("*", "")
                self.members(one, known, name)
                for inside, of_it in one.items():
                    self.inner(inside, of_it, complete)

    def value(self, value, kept, within_repeat):
        """Every reference leads to a result kept before."""
        if isinstance(value, dict):
            if value.keys() == LIST:
                within_repeat = True
            value = list(value.values())
        if isinstance(value, list):
            for one in value:
                self.value(one, kept, within_repeat)
        elif isinstance(value, str):
            for reference in re.findall(r"\$\{([^}]*)\}", value):
                name = reference.partition(".")[0]
                if reference.startswith("log:") or (name == "i" and within_repeat) or name in kept or name in GIVEN:
                    continue
                self.wrong(f"nothing kept as {name} before this")


def check_cases(cases):
    """Prints the faults of the cases, and the number of correct ones; the exit status."""
    checker, right = Checker(), 0
    names = [case.get("name") for case in cases]
    for case in cases:
        before = len(checker.trouble)
        checker.case(case)
        if names.count(case.get("name")) > 1:
            checker.wrong("the name is there more than once")
        right += len(checker.trouble) == before
    for trouble in checker.trouble:
        print(f"FAIL {trouble}")
    print(f"{right} passed, {len(cases) - right} failed")
    return 0 if cases and not checker.trouble else 1


def run(arguments, cases):
    """Runs the runner; the exit status."""
    names = [case["name"] for case in cases]
    only = [name for name in (arguments.only or "").split(",") if name]
    if unknown := set(only) - set(names):
        print(f"no such case: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    there = {None, *(["tls"] if arguments.tls else []), *(["replica"] if arguments.replica else [])}
    wanted = [case for case in cases if (not only or case["name"] in only) and case.get("needs") in there]
    if arguments.log:
        arguments.log.unlink(missing_ok=True)
    if not arguments.tls:
        return run_some(arguments, wanted)
    of_tls = [case for case in wanted if case.get("needs") == "tls"]
    seen = [case for case in wanted if case not in of_tls and "lose_answer" in json.dumps(case)]
    through = [case for case in wanted if case not in of_tls and case not in seen]
    parts = ((through, {"sees_frames": False}), (seen, {}), (of_tls, {"sees_frames": False, "direct": True}))
    statuses = [run_some(arguments, some, **how) for some, how in parts if some]
    return max(statuses, default=1)


def run_some(arguments, cases, sees_frames=True, direct=False):
    """Runs some cases with a daemon of their own; the exit status."""
    wanted = [case["name"] for case in cases]
    log = open(arguments.log, "a", encoding="utf-8") if arguments.log else None
    passed, failed = [], []
    with tempfile.TemporaryDirectory(prefix="wald-conformance-") as directory:
        certificates = Certificates(Path(directory) / "tls") if arguments.tls else None
        start = [*SETTINGS, *shlex.split(arguments.start)]
        with Served(arguments.wald, directory, start, log, certificates, sees_frames, arguments.stand_by) as served:
            environment = clean_environment(**served.environment(direct), WALD_CASES=str(arguments.cases.resolve()),
                                            WALD_ONLY=",".join(wanted))
            runner = subprocess.Popen(arguments.runner, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                                      env=environment, start_new_session=True)
            late = threading.Timer(len(wanted) * CASE_SECONDS + MORE_SECONDS, end_group, [runner])
            late.start()
            try:
                for line in runner.stdout:
                    print(line, end="", flush=True)
                    word, _, rest = line.strip().partition(" ")
                    if word == "ok":
                        passed.append(rest)
                    elif word == "FAIL":
                        failed.append(rest.partition(":")[0])
                        served.control.reset()
                status = runner.wait()
            finally:
                late.cancel()
                end_group(runner)
            trouble = served.control.trouble
            print(f"harness: {served.daemon.starts} starts of the daemon, {served.proxy.lost} answers lost, "
                  f"{served.proxy.dropped} connections dropped, asked for {served.control.done}", file=sys.stderr)
    wrong = [f"not run: {name}" for name in wanted if name not in passed and name not in failed]
    wrong += [f"not a case: {name}" for name in passed if name not in wanted]
    wrong += [f"passed more than once: {name}" for name in sorted(set(passed)) if passed.count(name) > 1]
    wrong += [f"failed, yet the exit status is 0: {name}" for name in failed if status == 0]
    wrong += [f"control endpoint: {what}" for what in trouble]
    wrong += [f"signal {-status} ended the runner"] if status < 0 else []
    wrong += [f"the runner ended with {status}, and no case failed"] if status > 0 and not failed else []
    for what in wrong:
        print(f"harness: {what}", file=sys.stderr)
    # A runner that a signal ended has a negative status here.
    return status if status > 0 else 1 if wrong or status < 0 or not passed else 0


def main():
    parser = argparse.ArgumentParser(usage=__doc__[7:].partition("\n\n")[0], description=__doc__.partition("\n\n")[2],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wald", type=Path)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--start", default="")
    parser.add_argument("--replica", action="store_true")
    parser.add_argument("--stand-by", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--check-cases", action="store_true")
    parser.add_argument("runner", nargs="*")
    arguments = parser.parse_args()
    cases = json.loads(arguments.cases.read_text(encoding="utf-8"))["cases"]
    if arguments.check_cases:
        sys.exit(check_cases(cases))
    if not arguments.wald or not arguments.runner:
        parser.error("--wald and a runner are needed")
    if arguments.tls and arguments.stand_by:
        parser.error("--tls and --stand-by exclude each other")
    # Everything ends in order, however it is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(run(arguments, cases))


if __name__ == "__main__":
    main()
