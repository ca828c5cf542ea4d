"""Other servers next to the daemon, under the same work: how each is installed, started and measured."""

import json
import os
import pwd
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from common import ROOT, SCRATCH, WALD, clean_environment, wait_until

PROGRAM = ROOT / ".ci" / "bench" / "servers"
PEERS = SCRATCH / "peers"
S2_LITE = "0.43.4"
LOOKS = 3


class Unavailable(Exception):
    """A server that is not available here, and the reason."""


def command(*arguments, **options):
    """Runs a command that must succeed; returns its output."""
    done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise Unavailable(f"{arguments[0]}: {(done.stderr or done.stdout).strip()[-400:]}")
    return done.stdout


def debian(*packages):
    """Unpacks packages and their missing dependencies; returns the directory."""
    root = PEERS / packages[0]
    if not (root / "complete").exists():
        for tool in ("apt-get", "dpkg"):
            if not shutil.which(tool):
                raise Unavailable(f"no {tool}")
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        plan = command("apt-get", "--simulate", "--no-install-recommends", "--reinstall", "install", *packages)
        names = sorted({line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")})
        command("apt-get", "download", "--quiet", *names, cwd=root)
        for archive in root.glob("*.deb"):
            command("dpkg", "-x", archive, root)
            archive.unlink()
        (root / "complete").touch()
    return root


def go_tool(name, package):
    """A server among the tools of the client program's module."""
    binary = PEERS / name
    if not binary.exists():
        PEERS.mkdir(parents=True, exist_ok=True)
        command("go", "build", "-o", binary, package, cwd=PROGRAM)
    return binary


def varint(number):
    return bytes([number & 127 | (number > 127) << 7]) + (varint(number >> 7) if number > 127 else b"")


def libraries(root):
    """The environment for a program that was unpacked there."""
    found = [str(path) for path in (root / "usr" / "lib").glob("*-linux-gnu*")]
    return clean_environment(LD_LIBRARY_PATH=":".join(found))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server on its own directory. Subclasses name it and start it."""

    name = durability = system = None
    level = "durable"
    # Its protocol has a load generator of that name.
    generator = None

    def __init__(self, directory):
        self.directory = Path(directory) / self.name.replace(" ", "-").replace(",", "")
        self.directory.mkdir()
        self.log = open(f"{self.directory}.log", "w+")
        self.port = free_port()
        self.process = None
        self.start()

    def spawn(self, *arguments, **options):
        options.setdefault("env", clean_environment())
        self.process = subprocess.Popen([str(a) for a in arguments], stdin=subprocess.DEVNULL, stdout=self.log,
                                        stderr=subprocess.STDOUT, **options)

        def listens():
            if self.process.poll() is not None:
                return True
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        if not wait_until(listens) or self.process.poll() is not None:
            self.log.seek(0)
            raise Unavailable(f"does not start: {self.log.read().strip()[-400:]}")

    def address(self):
        return f"127.0.0.1:{self.port}"

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()

    def generate(self, in_flight, options):
        """Runs the load generator of its protocol; returns the rate of acks and their latency."""

    def processes(self):
        """The server's process and all below it."""
        found, parents = {self.process.pid}, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                except (FileNotFoundError, ProcessLookupError):
                    continue
        while True:
            more = {pid for pid, parent in parents.items() if parent in found} - found
            if not more:
                return found
            found |= more

    def usage(self):
        """Processor seconds until now, and bytes of memory of its own. The maximum of a few samples counts: a process
        that ends during a sample, after its parent was read, is missing in both."""
        looks = []
        for _ in range(LOOKS):
            looks.append(self.look())
            time.sleep(0.05)
        return tuple(max(found) for found in zip(*looks))

    def look(self):
        ticks = memory = 0
        for pid in self.processes():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                # Includes children that have ended: PostgreSQL has a process per connection.
                ticks += sum(int(field) for field in fields[11:15])
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        memory += int(line.split()[1]) << 10
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return ticks / os.sysconf("SC_CLK_TCK"), memory


class Wald(Server):
    name, system = "wald", "wald"
    durability = "DURABLE: fdatasync, shared by all in flight"
    generator = "h2load"

    def start(self):
        self.http = f"127.0.0.1:{free_port()}"
        self.spawn(WALD, "--data-dir", self.directory / "data", "--listen", self.address(), "--http-listen", self.http)

    def handled(self):
        """Answered appends until now: acked ones, and failed ones. When its time is over, the generator leaves some
        in flight, which are neither."""
        with urllib.request.urlopen(f"http://{self.http}/metrics") as answer:
            text = answer.read().decode()
        found = re.findall(r'^grpc_server_handled_total{grpc_code="(\w+)",grpc_method="Append",.*} (\d+)$', text, re.M)
        good = sum(int(count) for code, count in found if code == "OK")
        return good, sum(int(count) for code, count in found if code not in ("OK", "Canceled"))

    def generate(self, in_flight, options):
        root = debian("nghttp2-client")
        field = lambda number, content: bytes([number << 3 | 2]) + varint(len(content)) + content
        message = field(1, b"bench") + field(2, field(1, b"x" * options.bytes))
        if self.level == "written":
            message += bytes([4 << 3, 2])
        body, log = self.directory / "request", self.directory / "answers"
        body.write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
        log.unlink(missing_ok=True)
        connections = min(4, in_flight)
        before, refused = self.handled()
        command(root / "usr" / "bin" / "h2load", "--duration", max(1, round(options.seconds)), "--warm-up-time", "500ms",
                "--clients", connections, "--max-concurrent-streams", in_flight // connections, "--data", body,
                "--log-file", log, "--header", "content-type: application/grpc", "--header", "te: trailers",
                f"http://{self.address()}/wald.v1.WalService/Append", env=libraries(root), timeout=options.seconds + 120)
        good, bad = self.handled()
        if bad != refused:
            raise Unavailable(f"{bad - refused} appends were not acknowledged")
        answers = sorted(int(line.split("\t")[2]) for line in log.read_text().splitlines())
        at = lambda part: answers[int(len(answers) * part)]
        return {"per_second": len(answers) / max(1, round(options.seconds)), "all_acks": good - before,
                "p50_us": at(0.5), "p99_us": at(0.99), "p999_us": at(0.999)}


class WaldSessions(Wald):
    name, system, generator = "wald, sessions", "wald-session", None
    durability = "DURABLE: fdatasync, shared by all in flight; a session for each of 4 connections, shared by callers"


class WaldWritten(Wald):
    name, level = "wald, written", "written"
    durability = "WRITTEN: write; fdatasync within 100 ms"


class Redis(Server):
    name, system = "redis, always", "redis"
    appendfsync = "always"
    durability = "appendfsync always: fdatasync, shared by all of a turn of its loop"
    generator = "redis-benchmark"

    def start(self):
        root = debian("redis-server", "redis-tools")
        self.spawn(root / "usr" / "bin" / "redis-server", "--port", self.port, "--bind", "127.0.0.1",
                   "--dir", self.directory, "--appendonly", "yes", "--appendfsync", self.appendfsync, "--save", "",
                   env=libraries(root))

    def generate(self, in_flight, options):
        root = debian("redis-server", "redis-tools")

        def run(count):
            out = command(root / "usr" / "bin" / "redis-benchmark", "-p", self.port, "-c", in_flight, "-n", count, "--csv",
                          "XADD", "bench", "*", "d", "x" * options.bytes, env=libraries(root), timeout=options.seconds + 120)
            names, values = (line.replace('"', "").split(",") for line in out.strip().splitlines()[-2:])
            return {name: float(value) for name, value in list(zip(names, values))[1:]}

        warm = in_flight * 100
        count = max(warm, round(run(warm)["rps"] * options.seconds))
        found = run(count)
        return {"per_second": found["rps"], "all_acks": warm + count, "p50_us": found["p50_latency_ms"] * 1e3,
                "p99_us": found["p99_latency_ms"] * 1e3}


class RedisEverySecond(Redis):
    name, appendfsync = "redis, everysec", "everysec"
    level = "written"
    durability = "appendfsync everysec: write; fdatasync within a second or two"


class PostgreSQL(Server):
    name, system = "postgresql", "postgresql"
    durability = "synchronous_commit on: fdatasync, shared by commits that wait"
    generator = "pgbench"

    def start(self):
        versions = command("apt-cache", "depends", "--important", "postgresql").split()
        root = debian(next(name for name in versions if name.startswith("postgresql-")))
        programs = next((root / "usr" / "lib" / "postgresql").glob("*/bin"), None)
        if programs is None:
            raise Unavailable("its package holds no server")
        # The server refuses to run as root.
        owner = {} if os.getuid() else {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid, "extra_groups": []}
        if owner:
            shutil.chown(self.directory, "nobody")
        data = self.directory / "data"
        command(programs / "initdb", "--pgdata", data, "--username", "bench", "--auth", "trust", "--encoding", "UTF8",
                "--locale", "C", env=libraries(root), cwd=self.directory, **owner)
        self.spawn(programs / "postgres", "-D", data, "-p", self.port, "-c", "listen_addresses=127.0.0.1",
                   "-c", f"unix_socket_directories={self.directory}", "-c", "max_connections=300", "-c", "max_wal_size=4GB",
                   "-c", "shared_buffers=512MB", env=libraries(root), cwd=self.directory, **owner)

    def address(self):
        return f"postgres://bench@127.0.0.1:{self.port}/postgres"

    def generate(self, in_flight, options):
        program = next(iter(PEERS.glob("postgresql-*/usr/lib/postgresql/*/bin/pgbench")), None)
        if program is None:
            raise Unavailable("its package holds no pgbench")
        root = program.parents[5]
        script = self.directory / "append.sql"
        script.write_text(f"INSERT INTO bench (data) VALUES ('{'x' * options.bytes}');\n")
        prefix = self.directory / "transactions"
        out = command(program, "--no-vacuum", "--protocol", "prepared", "--client", in_flight, "--time",
                      max(1, round(options.seconds)), "--log", "--log-prefix", prefix, "--file", script, self.address(),
                      env=libraries(root), timeout=options.seconds + 120)
        times = []
        for log in self.directory.glob("transactions.*"):
            times += (int(line.split()[2]) for line in log.read_text().splitlines())
            log.unlink()
        times.sort()
        at = lambda part: times[int(len(times) * part)]
        return {"per_second": float(re.search(r"^tps = ([\d.]+)", out, re.M)[1]), "all_acks": len(times),
                "p50_us": at(0.5), "p99_us": at(0.99), "p999_us": at(0.999)}


class NATS(Server):
    name, system = "nats, sync always", "nats"
    durability = "JetStream, sync_interval always: fsync by each message"
    sync = "always"

    def start(self):
        config = self.directory / "nats.conf"
        config.write_text(f'listen: "127.0.0.1:{self.port}"\n'
                          f'jetstream {{ store_dir: "{self.directory}", sync_interval: {self.sync} }}\n')
        self.spawn(go_tool("nats-server", "github.com/nats-io/nats-server/v2"), "--config", config)

    def address(self):
        return f"nats://127.0.0.1:{self.port}"


class NATSWritten(NATS):
    name, sync, level = "nats, default", "2m", "written"
    durability = "JetStream, sync_interval 2m: write; fsync within two minutes"


class Etcd(Server):
    name, system = "etcd", "etcd"
    durability = "fdatasync of its log, shared by proposals that wait"

    def start(self):
        peer = f"http://127.0.0.1:{free_port()}"
        self.spawn(go_tool("etcd", "go.etcd.io/etcd/server/v3"), "--data-dir", self.directory / "data",
                   "--listen-client-urls", self.address(), "--advertise-client-urls", self.address(),
                   "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                   "--initial-cluster", f"default={peer}", "--log-level", "error")

    def address(self):
        return f"http://127.0.0.1:{self.port}"


class S2Lite(Server):
    name, system = "s2-lite", "s2-lite"
    durability = "an object in a local directory, with fsync, for all of its 5 ms flush interval"

    def program(self):
        root = PEERS / "s2-lite"
        if not (root / "bin" / "server").exists():
            command("cargo", "install", "--quiet", "s2-lite", "--version", S2_LITE, "--root", root)
        return root / "bin" / "server"

    def start(self):
        self.spawn(self.program(), "--port", self.port, "--local-root", self.directory)

    def address(self):
        return f"http://127.0.0.1:{self.port}"


# Wald first: each other server is compared with Wald at its own durability level.
SERVERS = [Wald, WaldSessions, Redis, PostgreSQL, NATS, Etcd, S2Lite, WaldWritten, RedisEverySecond, NATSWritten]


def bare_flushes(directory, seconds=1.0):
    """Speed of the device: writes of 128 B into an existing file, each with fdatasync, per second."""
    path = Path(directory) / "flushes"
    with open(path, "w+b", buffering=0) as file:
        file.write(bytes(16 << 20))
        os.fsync(file.fileno())
        times, until = [], time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            os.pwrite(file.fileno(), b"x" * 128, len(times) * 128 % (16 << 20))
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    path.unlink()
    return {"per_second": len(times) / seconds, "p50_us": statistics.median(times) * 1e6}


def built_client():
    """The client program."""
    # The stubs are generated, not committed.
    command("go", "generate", "./...", cwd=ROOT / "client" / "go")
    command("go", "build", "-o", SCRATCH / "servers", ".", cwd=PROGRAM)
    return SCRATCH / "servers"


def program(client):
    """Measures a server with our client program; returns its result."""
    def drive(server, in_flight, options):
        out = command(client, server.system, server.address(), "--in-flight", in_flight, "--bytes", options.bytes,
                      "--measured", f"{options.seconds}s", "--level", server.level, timeout=options.seconds + 120)
        return json.loads(out)
    return drive


def generator(server, in_flight, options):
    """Measures a server with the load generator of its protocol."""
    return server.generate(in_flight, options)


def watched(drive, server, in_flight, options):
    """One run on one server, with the server's processor time and memory."""
    before, _ = server.usage()
    try:
        found = drive(server, in_flight, options)
    except Unavailable as why:
        return {"error": str(why)[:400]}
    after, memory = server.usage()
    found["cpu_s_per_million"] = (after - before) / found["all_acks"] * 1e6
    found["memory_bytes"] = memory
    return found


def median_of(runs):
    """The run with the median rate, and the minimum and maximum rate of all."""
    good = sorted((run for run in runs if "error" not in run), key=lambda run: run["per_second"])
    if not good:
        return None
    return {**good[len(good) // 2], "least_per_second": good[0]["per_second"], "most_per_second": good[-1]["per_second"]}


def table(rows, title):
    print(f"\n{title}\n{'':20}{'acks/s':>10}{'least':>10}{'most':>10}{'of Wald':>9}{'p50 us':>9}"
          f"{'p99 us':>9}{'p99.9 us':>10}{'cpu s/M':>9}{'MB':>7}  an ack means")
    for row in rows:
        found = row["median"]
        if found is None:
            print(f"{row['server']:20}failed: {row['runs'][0]['error']}")
            continue
        p999 = f"{found['p999_us']:.0f}" if "p999_us" in found else "-"
        ratio = f"{row['of_wald']:.2f} x" if row["of_wald"] else "-"
        print(f"{row['server']:20}{found['per_second']:>10.0f}{found['least_per_second']:>10.0f}"
              f"{found['most_per_second']:>10.0f}{ratio:>9}{found['p50_us']:>9.0f}{found['p99_us']:>9.0f}"
              f"{p999:>10}{found['cpu_s_per_million']:>9.1f}{found['memory_bytes'] / 1e6:>7.0f}"
              f"  {row['durability']}")


def measure(drive, servers, in_flight, options):
    runs = {server.name: [] for server in servers}
    for number in range(options.rounds):
        for server in servers:
            print(f"\r\033[K{in_flight} in flight, round {number + 1}, {server.name}", end="", file=sys.stderr, flush=True)
            runs[server.name].append(watched(drive, server, in_flight, options))
    print("\r\033[K", end="", file=sys.stderr)
    medians = {name: median_of(found) for name, found in runs.items()}
    rows = []
    for server in servers:
        found = medians[server.name]
        wald = medians.get("wald" if server.level == "durable" else "wald, written")
        rows.append({"server": server.name, "in_flight": in_flight, "level": server.level, "durability": server.durability,
                     "of_wald": found["per_second"] / wald["per_second"] if found and wald else None,
                     "median": found, "runs": runs[server.name]})
    return rows


__all__ = [name for name in dir() if not name.startswith("_")]
