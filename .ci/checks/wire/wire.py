"""Well-behaved clients are held back and never cut off; hostile or idle clients stop and
fill nothing. Real clients (grpc-go, grpc-java, grpc-js, the client for Go) and raw HTTP/2 by the programs in
.ci/checks/wire: small messages, cancelled calls, deadlines, slow links, stuck peers at a stop, silent connections,
announced lengths, endless messages, crowds, unread answers, and floods of every kind of frame.
"""

import functools
import json
import signal
import statistics
import subprocess
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

from certificates import *
from clients import *

PROGRAM = ROOT / ".ci" / "checks" / "wire" / "go"
WIRE = SCRATCH / "wire"
MIB = 1 << 20
FLAT = 64 * MIB


def built():
    """Builds the program of grpc-go, which also has the hostile clients."""
    go_stubs()
    subprocess.run(["go", "build", "-o", WIRE, "."], cwd=PROGRAM, check=True)


@functools.cache
def clients():
    """Builds the programs of well-behaved clients. Returns their commands by library, with the same words, flags and results.
    grpc-java has part with --all only: Maven takes longer for it than all cases take."""
    script = ROOT / ".ci/checks/wire/js"
    subprocess.run(["npm", "ci", "--silent", "--no-audit", "--no-fund"], cwd=script, check=True)
    commands = {"grpc-go": [WIRE], "grpc-js": ["node", script / "clients.mjs"]}
    if os.environ.get("CI_LIGHT"):
        return commands
    # The project that client/README.md gives for plain stubs.
    project = SCRATCH / "wire-java"
    shutil.rmtree(project / "src", ignore_errors=True)
    (project / "src/main/java").mkdir(parents=True)
    shutil.copytree(ROOT / "proto/wald", project / "src/main/proto/wald")
    shutil.copy(ROOT / ".ci/checks/wire/java/Clients.java", project / "src/main/java")
    readme = (ROOT / "client/README.md").read_text()
    (project / "pom.xml").write_text(re.search(r"^```xml\n(.*?)^```$", readme, re.M | re.S)[1])
    command = ["mvn", "-q", "-B", "compile", "dependency:build-classpath", f"-Dmdep.outputFile={project / 'classpath'}"]
    subprocess.run(command, cwd=project, check=True)
    classes = f"{project / 'target/classes'}:{(project / 'classpath').read_text()}"
    return {**commands, "grpc-java": ["java", "-cp", classes, "Clients"]}


def wire(*arguments, command=(WIRE,), seconds=60):
    """Runs a client's program; returns its output, one object per line."""
    done = run(*command, *arguments, timeout=seconds)
    if done.returncode != 0:
        return [{"error": done.stderr.decode()[-300:]}]
    return [json.loads(line) for line in done.stdout.splitlines()]


def nice(*arguments):
    """Like `wire`, with the processor time that the daemon and others leave: an attack comes from elsewhere."""
    done = run("nice", "-n", "19", WIRE, *arguments, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()] or [{"error": done.stderr.decode()[-300:]}]


class Door:
    """The way to a daemon: in plaintext, or over TLS if there is a CA."""

    def __init__(self, authority=None):
        self.authority = authority
        # Flags of the programs, and words for the results.
        self.flags, self.words = (["-ca", authority.pem], " over TLS") if authority else ([], "")

    def daemon(self, *arguments):
        return Secured(self.authority, *arguments) if self.authority else Daemon(*arguments)

    def held(self, what, *arguments):
        return Held(what, *self.flags, *arguments)


PLAIN = Door()


class Held:
    """A peer that the program holds until released."""

    def __init__(self, *arguments):
        command = [str(part) for part in (WIRE, *arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)
        self.ready = "ready" in self.process.stdout.readline()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


@check("Small messages, which arrive as many small frames, end no session")
def sessions(directory):
    for size in sized((1, 20), (1,)):
        with Daemon(directory / f"session-{size}") as daemon:
            (told,) = wire("sessions", "-bytes", size, daemon.grpc)
            expect(f"a session of grpc-go with 100,000 records of {size} B is acked whole",
                   told.get("acked") == 100_000 and not told.get("failures"), told)
    with Daemon(directory / "session-slow") as daemon:
        strace = Strace(daemon, "-e", "trace=fdatasync", "-e", "inject=fdatasync:delay_enter=20000")
        each = sized(10_000, 3_000)
        for own in ([], ["-client"]):
            (told,) = wire("sessions", "-sessions", 8, "-messages", each, "-bytes", 128, *own, daemon.grpc)
            what = "the client for Go" if own else "grpc-go"
            expect(f"8 sessions of {what} with 128 B and flushes of 20 ms are acked whole",
                   told.get("acked") == 8 * each and not told.get("failures"), told)
        messages = sized(100_000, 20_000)
        for client, command in clients().items():
            (told,) = wire("sessions", "-messages", messages, daemon.grpc, command=command)
            expect(f"a session of {client} with {messages} records of 1 B and flushes of 20 ms is acked whole",
                   told.get("acked") == messages and not told.get("failures"), told)
        strace.stop()


@check("Calls that end early do not disturb a follower and a session on their connection")
def neighbours(directory):
    for client, command in clients().items():
        with Daemon(directory / f"cancels-{client}") as daemon:
            (told,) = wire("cancels", "-calls", 4000, "-group", 200, daemon.grpc, command=command)
            fine = not told.get("session") and not told.get("follower") and told.get("acks_after", 0) > 0
            expect(f"{client}: 4,000 calls cancelled by 200 at once leave the follower and the session alone", fine, told)
        with Daemon(directory / f"deadlines-{client}") as daemon:
            process = subprocess.Popen([*map(str, command), "deadlines", daemon.grpc], stdout=subprocess.PIPE, text=True)
            wait_until(lambda: daemon.metric("wald_appended_records_total") > 1000, 10)
            daemon.process.send_signal(signal.SIGSTOP)
            time.sleep(1.5)  # the pause itself
            daemon.process.send_signal(signal.SIGCONT)
            told = json.loads(process.communicate(timeout=60)[0])
            fine = not told.get("session") and not told.get("follower") and told.get("acks_after", 0) > 0
            expect(f"{client}: 64 callers with deadlines of 300 ms in a pause of 1.5 s leave them alone", fine, told)


@check("A slow link is served")
def slow(directory):
    with Daemon(directory / "slow", "--keepalive-interval", "1s", "--keepalive-timeout", "5s",
                "--stream-progress-timeout", "8s") as daemon:
        # Each on its own connection.
        with ThreadPoolExecutor(2) as pool:
            one, many = pool.map(lambda scans: wire("slow", "-seconds", "15s", "-scans", scans, daemon.grpc)[0], (1, 20))
        for told, what in (one, "a scan at 50 kB/s lives on, though its pings are answered late"), \
                          (many, "20 scans that share 50 kB/s live on, though most wait for their turn"):
            expect(what, told.get("ended") in ("", None, "time") and told.get("bytes", 0) > 300_000, told)


@check("A stop next to one stuck peer of each kind")
def stops(directory, door=PLAIN):
    (kinds,) = wire("stuck", "-list")

    def stopped(kind):
        with door.daemon(directory / f"stop-{kind}") as daemon, door.held("stuck", kind, daemon.grpc) as peer:
            began = time.monotonic()
            code = daemon.stop()
            return kind, peer.ready, code, time.monotonic() - began

    with ThreadPoolExecutor(6) as pool:
        for kind, ready, code, took in pool.map(stopped, kinds):
            expect(f"a stop with `{kind}` takes less than 4 s{door.words}", ready and code == 0 and took < 4, f"{took:.1f} s")


@check("Connections and messages that stop midway fill nothing")
def standing(directory, door=PLAIN):
    short = ["--handshake-timeout", "1s", "--max-connections", "20"]
    for kind in ("silent", "half-preface", "preface"):
        with door.daemon(directory / f"idle-{kind}", *short) as daemon:
            with door.held("idle", "-count", 20, "-seconds", "8s", kind, daemon.grpc) as peers:
                began = time.monotonic()
                done = daemon.walctl("--timeout", "5s", "health")
                took = time.monotonic() - began
                told = json.loads(peers.process.stdout.readline() or "{}")
            expect(f"20 connections of `{kind}` keep nobody out of 20 places{door.words}", done.returncode == 0 and took < 3,
                   f"{took:.1f} s")
            expect(f"connections of `{kind}` are closed{door.words}", told.get("closed") == 20 and told.get("last_s", 99) < 5, told)
    with door.daemon(directory / "announced") as daemon:
        with door.held("idle", "-count", 14, "-announce", 4_000_000, "-seconds", "20s", "announce", daemon.grpc):
            appends = [daemon.walctl("--timeout", "3s", "append", "a", "-", input=b"x\n").returncode for _ in range(10)]
            held = daemon.metric('wald_admitted_bytes{part="appends"}')
        # A call that waits for its message is charged 10 KiB and its header.
        expect(f"14 announced messages of 4 MB hold no more than their calls{door.words}", appends == [0] * 10 and held < 200_000, f"{held:.0f} bytes")
    for path in ("/wald.v1.WalService/Read", "/wald.v1.WalService/GetTail", "/wald.v1.LogService/ListLogs",
                 "/grpc.health.v1.Health/Check"):
        with door.daemon(directory / ("bodies" + path.replace("/", "-"))) as daemon:
            before = daemon.anonymous()
            told = wire("idle", *door.flags, "-count", 200, "-announce", 8_000_000, "-bytes", 4_000_000, "-seconds", "3s",
                        "-path", path, "bodies", daemon.grpc)
            grown = daemon.anonymous() - before
            expect(f"200 messages of {path} that never end take less than 64 MiB{door.words}", grown < FLAT,
                   f"{grown / MIB:.0f} MiB; {told[-1]}")


@check("Many connections that each hold little of a shared resource")
def crowds(directory, door=PLAIN):
    with door.daemon(directory / "halves") as daemon:
        with door.held("idle", "-count", 900, "-seconds", "12s", "halves", daemon.grpc) as peers:
            done = [daemon.walctl("--timeout", "4s", "append", "a", "-", input=b"x\n").returncode for _ in range(10)]
        expect(f"900 messages without their last byte keep no append out{door.words}", peers.ready and done == [0] * 10, done)
    with door.daemon(directory / "others") as daemon:
        daemon.walctl("append", "a", "-", input=b"x\n", check=True)
        path = "/wald.v1.WalService/GetTail"
        with door.held("idle", "-count", 400, "-seconds", "12s", "-path", path, "halves", daemon.grpc) as peers:
            done = [daemon.walctl("--timeout", "4s", "health").returncode for _ in range(10)]
        expect(f"nor do 400 of another call keep a health check out{door.words}", peers.ready and done == [0] * 10, done)
    with door.daemon(directory / "calls", "--max-calls", "100") as daemon:
        session = ["-path", "/wald.v1.WalService/AppendSession", "half-open", daemon.grpc]
        with door.held("idle", "-count", 2, "-seconds", "12s", *session) as peers:
            done = daemon.walctl("--timeout", "4s", "append", "a", "-", input=b"x\n").returncode
            # The peers have sent their calls; the daemon may not have read all of them yet.
            refused = 'wald_rejected_total{operation="write",reason="BUSY"}'
            wait_until(lambda: daemon.metric(refused) > 400, 10)
            calls = daemon.metric(refused)
        expect(f"beyond max_calls calls are refused, and other clients are served{door.words}", peers.ready and done == 0 and calls > 400, calls)
        with door.held("idle", "-count", 64, "-seconds", "12s", *session) as peers:
            done = [daemon.walctl("--timeout", "4s", "health").returncode for _ in range(5)]
        expect(f"without a free call a health check is still answered{door.words}", peers.ready and done == [0] * 5, done)
    append, tail = "/wald.v1.WalService/Append", "/wald.v1.WalService/GetTail"
    for kind, count, path in ("heads", 20, append), ("half-open", 100, append), ("half-open", 100, tail), ("reflections", 20, ""):
        with door.daemon(directory / f"{kind}{len(path)}") as daemon:
            before = daemon.anonymous()
            with door.held("idle", "-count", count, "-seconds", "3s", "-path", path, kind, daemon.grpc) as peers:
                end, grown = time.monotonic() + 2, 0
                while time.monotonic() < end:
                    grown = max(grown, daemon.anonymous() - before)
                    time.sleep(0.02)
                done = daemon.walctl("--timeout", "5s", "append", "a", "-", input=b"x\n")
            expect(f"{count} connections with 256 `{kind}` {path} each take less than 64 MiB{door.words}",
                   peers.ready and grown < FLAT and done.returncode == 0, f"{grown / MIB:.0f} MiB")
            rest = wait_until(lambda: not any(daemon.metric(f'wald_admitted_bytes{{part="{part}"}}')
                                              for part in ("appends", "requests", "answers", "queued")), 15)
            expect(f"and then nothing stays charged{door.words}", rest)
    with door.daemon(directory / "slow-scans") as daemon:
        daemon.walctl("append", "big", "-", input=(b"x" * 1_000_000 + b"\n") * 12, check=True)
        daemon.walctl("append", "small", "-", input=b"x\n", check=True)
        with door.held("idle", "-count", 100, "-seconds", "20s", "slow-scans", daemon.grpc) as peers:
            wait_until(lambda: daemon.metric('wald_admitted_bytes{part="answers"}') > 40 * MIB, 10)
            codes = [daemon.call("wald.v1.WalService/Read", {"log": "small"})[0] for _ in range(50)]
        expect(f"100 scans at 80 KB/s make no read BUSY{door.words}", peers.ready and codes == [0] * 50, codes)


@check("The same over TLS: stuck peers at a stop, messages that stop midway, crowds")
def over_tls(directory):
    door = Door(Authority(directory / "ca"))
    for attack in sized((stops, standing, crowds), (standing,)):
        place = directory / attack.__name__
        place.mkdir()
        attack(place, door)


class Watch:
    """Effects of an attack on a daemon and on a well-behaved client with its own connection. `over` are flags of both."""

    def __init__(self, daemon, *over):
        self.daemon = daemon
        self.bystander = subprocess.Popen([str(part) for part in (WIRE, "bystander", "-window", "250ms", *over, daemon.grpc)],
                                          stdout=subprocess.PIPE, text=True)
        self.windows, self.most, self.over = [], 0, threading.Event()
        self.threads = [threading.Thread(target=self._listen), threading.Thread(target=self._look)]
        for thread in self.threads:
            thread.start()
        # The first windows cover the start.
        wait_until(lambda: len(self.windows) >= 6, 10)
        self.before, self.began = daemon.anonymous(), time.time()

    def _listen(self):
        for line in self.bystander.stdout:
            self.windows.append(json.loads(line))

    def _look(self):
        while not self.over.wait(0.1):
            self.most = max(self.most, self.daemon.anonymous())

    def end(self):
        """p99 alone and during the attack in microseconds, failures, and memory gained."""
        ended = time.time()
        self.over.set()
        self.bystander.kill()
        for thread in self.threads:
            thread.join()
        alone = [one for one in self.windows[2:] if one["began"] + 0.25 < self.began]
        during = [one for one in self.windows if self.began < one["began"] and one["began"] + 0.25 < ended]
        p99 = [statistics.median(one["p99_us"] for one in some) if some else 0 for some in (alone, during)]
        return *p99, [one["failures"] for one in during if one["failures"]], self.most - self.before


# The floods of a shorter run: one for each way to flood a server.
TELLING = ("window-update", "ping-ack", "ping-ack-calls", "empty-data", "reset-append", "hpack-bomb", "settings-unread", "unknown-service", "priority")
# One for each frame that the acceptance over TLS names.
OVER_TLS = ("reset-append", "continuation", "empty-data", "hpack-bomb", "settings", "ping")
# A bystander shares two processors with the attack and other load: a late wake-up is no fault.
CALM_US = 5_000


def flooded(directory, kind, door):
    """One flood: results of daemon, attacker and bystander, and whether the bystander was served as before."""
    with door.daemon(directory) as daemon:
        watch = Watch(daemon, *door.flags)
        (told,) = nice("flood", "-seconds", "1500ms", *door.flags, kind, daemon.grpc)
        alone, during, failures, grown = watch.end()
        done = daemon.walctl("--timeout", "5s", "append", "after", "-", input=b"x\n")
        lines = len("".join(daemon.lines))
        holds = done.returncode == 0 and daemon.process.poll() is None and grown < FLAT and lines < 20_000
        saw = f"{told.get('frames')} frames, {grown / MIB:.0f} MiB more, {lines} bytes of log; {str(told.get('ended'))[:80]}"
        calm = not failures and 0 < during < max(2 * alone, CALM_US)
        return holds, saw, calm, f"p99 {alone:.0f} us alone, {during:.0f} us beside it; {failures[:1]}"


def judged(directory, kinds, door=PLAIN):
    """States for each flood that the daemon and a bystander are well."""
    for kind in kinds:
        # Other load on the machine only makes the bystander slower: the best of three counts.
        for attempt in range(3):
            holds, saw, calm, times = flooded(directory / f"flood-{kind}-{attempt}", kind, door)
            if not holds or calm:
                break
        what = f"flood `{kind}`{door.words}"
        expect(f"{what}: the daemon serves, is flat and writes little", holds, saw)
        expect(f"{what}: a bystander is served as before", calm, times)


@check("Floods of every kind of frame next to a well-behaved client")
def floods(directory):
    (all_kinds,) = wire("flood", "-list")
    judged(directory, sized(all_kinds, [kind for kind in all_kinds if kind in TELLING]))


@check("Floods over TLS: resets, CONTINUATION, empty DATA, HPACK, SETTINGS, PING")
def floods_over_tls(directory):
    (all_kinds,) = wire("flood", "-list")
    judged(directory, sized(all_kinds, [kind for kind in all_kinds if kind in OVER_TLS]), Door(Authority(directory / "ca")))


@check("2,000 handshakes of TLS at once (1,000 in the default run) next to appends: none fails")
def handshakes(directory):
    door = Door(Authority(directory / "ca"))
    count = sized(2000, 1000)
    # Clients that other load delays for a second give way to others, as they should: the best of three counts.
    for attempt in range(3):
        with door.daemon(directory / f"data-{attempt}") as daemon:
            watch = Watch(daemon.ready(), *door.flags)
            (told,) = wire("handshakes", "-count", count, *door.flags, daemon.grpc)
            alone, during, failures, grown = watch.end()
        # The keys are computed on the two processors that the bystander has, too.
        calm = 0 < during < max(2 * alone, 10 * CALM_US)
        if told.get("done") == count and not failures and calm:
            break
    expect("no handshake fails", told.get("done") == count, told)
    expect("no append fails", not failures, failures[:1])
    expect("a connection takes less than 64 KiB", grown < count * (64 << 10), f"{grown / MIB:.0f} MiB")
    expect("a bystander is served", calm, f"p99 {alone:.0f} us alone, {during:.0f} us beside them")


DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def token(identity, secret):
    """A token with a good checksum."""
    number, check = zlib.crc32((identity + secret).encode()), ""
    for _ in range(6):
        number, digit = divmod(number, 62)
        check = DIGITS[digit] + check
    return f"wald1_{identity}{secret}_{check}"


@check("An unknown id, a wrong secret and a revoked token get the same bytes in the same time")
def refusals(directory):
    auth = directory / "auth.toml"
    auth.write_text('[principal.app]\nallow = [{ do = ["append", "create"], logs = "" }]\n')
    auth.chmod(0o600)
    made = []
    for name in "kept", "revoked":
        run(WALD, "token", "create", "--principal", "app", "--expires", "1d", "--to", directory / name, "--auth-file", auth, check=True)
        made.append((directory / name).read_text().strip())
    kept, revoked = made
    run(WALD, "token", "revoke", revoked[6:14], "--auth-file", auth, check=True)
    expect("a token is made as here", token(kept[6:14], kept[14:57]) == kept)
    with Daemon(directory / "data", "--auth-file", auth, "--metrics-open") as daemon:
        # Other load changes medians of few calls: the best of three counts.
        for attempt in range(3):
            (told,) = wire("refusals", "-calls", sized(10_000, 1_500), daemon.grpc,
                           token("zzzzzzzz", kept[14:57]), token(kept[6:14], revoked[14:57]), revoked, seconds=300)
            medians = told.get("medians_ns", [0, 1])
            apart = max(medians) / max(1, min(medians)) - 1
            if apart <= 0.02:
                break
        expect("the answers have the same bytes", told.get("same") and "not valid" in told.get("text", ""), told)
        expect(f"medians are within {sized(2, 10)} %", apart <= sized(0.02, 0.10), f"{100 * apart:.2f} %: {medians}")
        refused = 'wald_auth_failures_total{reason="bad"}'
        expect("each call is counted", daemon.metric(refused) == (attempt + 1) * 3 * sized(10_000, 1_500), daemon.metric(refused))


built()
