"""The HTTP port with hostile and misdirected peers: hundreds of silent sockets, slow and huge heads, bodies,
pipelined requests, unread answers and event streams, TLS and gRPC, foreign host names, a lack of file
descriptors, and a stop with all of them open. Probes answer within a second throughout, also while no gRPC connection is free.
Raw sockets, and grpcurl.
"""

import resource
import socket
import ssl

from certificates import *

HEAD, IDLE = 2, 3
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
# The settings of a client for each address that speaks TLS.
SECURED = {}


def connect(address, receive=None, timeout=10):
    """A connection to HOST:PORT; `receive`: bytes of the receive buffer."""
    host, port = address.rsplit(":", 1)
    sock = socket.socket()
    if receive:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    sock.settimeout(timeout)
    sock.connect((host, int(port)))
    return SECURED[address].wrap_socket(sock, server_hostname="localhost") if address in SECURED else sock


def rest(sock):
    """Everything until the daemon closes."""
    found = []
    try:
        while data := sock.recv(1 << 16):
            found.append(data)
    except (ConnectionResetError, ssl.SSLEOFError):
        pass
    return b"".join(found)


def answered(sock):
    """Answers of 200 until the daemon closes; keeps none of them."""
    count, before = 0, b""
    while data := sock.recv(1 << 18):
        count += (before + data).count(b"HTTP/1.1 200")
        before = data[-11:]
    return count


def said(daemon, request, **options):
    """Sends a request and reads until the daemon closes: (status, text)."""
    with connect(daemon.http, **options) as sock:
        try:
            sock.sendall(request)
        except (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
            pass  # answered before all was sent
        answer = rest(sock)
    status = answer.split(b" ", 2)[1:2]
    return int(status[0]) if answer.startswith(b"HTTP/1") else 0, answer.decode(errors="replace")


def get(daemon, path, host="127.0.0.1", more=""):
    return said(daemon, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}Connection: close\r\n\r\n".encode())


def probe(daemon, path="/livez"):
    """Seconds for one probe on its own connection; None if it is not 200."""
    began = time.monotonic()
    try:
        return time.monotonic() - began if get(daemon, path)[0] == 200 else None
    except OSError:
        return None


def probe_grpc(daemon, timeout=10):
    """Seconds until a new gRPC connection has the daemon's settings."""
    began = time.monotonic()
    with connect(daemon.grpc, timeout=timeout) as sock:
        sock.sendall(PREFACE + SETTINGS)
        return time.monotonic() - began if sock.recv(9)[3:4] == b"\4" else None


def probes(daemon, seconds=None, busy=None, of=probe):
    """The slowest and the median of probes for some time, or as long as threads are busy; None if one failed."""
    found = []
    until = time.monotonic() + (seconds or 60)
    while time.monotonic() < until and (busy is None or any(thread.is_alive() for thread in busy)):
        found.append(of(daemon))
        time.sleep(0.02)
    if None in found:
        return None
    found.sort()
    return found[-1], found[len(found) // 2], len(found)


def fine(what, found, limit=1.0):
    detail = "a probe failed" if found is None else f"slowest {found[0] * 1e3:.1f} ms, median {found[1] * 1e3:.1f} ms of {found[2]}"
    expect(what, found is not None and found[0] < limit, detail)


def ended(socks, seconds):
    """Seconds until the daemon has closed all of them; None if it takes longer."""
    began = time.monotonic()
    for sock in socks:
        sock.settimeout(max(0.01, began + seconds - time.monotonic()))
        try:
            rest(sock)
        except OSError:
            return None
    return time.monotonic() - began


def close(socks):
    for sock in socks:
        sock.close()


def background(target):
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def silent(daemon):
    """Hundreds of sockets that send nothing, or half of a head."""
    before = len(daemon.descriptors())
    socks, found = [], []
    for number in range(300):
        socks.append(connect(daemon.http))
        if number % 3 == 0:
            socks[-1].sendall(b"GET /livez HTTP/1.1\r\nHost: ")
        if number % 20 == 0:
            found += [probe(daemon), probe(daemon, "/readyz")]
    expect("probes answer while 300 silent connections come", None not in found and max(found) < 1,
           f"slowest {max((f for f in found if f), default=0) * 1e3:.1f} ms of {len(found)}")
    expect("at most 256 of them have a place", len(daemon.descriptors()) - before <= 257, f"{len(daemon.descriptors()) - before} descriptors")
    fine("probes answer while they are there", probes(daemon, 1))
    took = ended(socks, HEAD + 3)
    expect("they end by time", took is not None, f"{took} s after the last one came" if took is None else f"{took:.1f} s")
    close(socks)


@check("Idle connections do not take the descriptors of the store")
def descriptors(directory):
    with Daemon(directory, "--segment-bytes", "4MiB", under=["prlimit", "--nofile=1024:1024"]) as daemon:
        socks = []
        for _ in range(1100):
            socks.append(connect(daemon.http))
        codes = [daemon.walctl("append", "big", "--format", "raw", input=b"x" * 900_000).returncode for _ in range(24)]
        expect("appends continue next to 1,100 connections to the HTTP port", codes == [0] * 24, f"{len(daemon.descriptors())} descriptors of 1,024")
        expect("and probes", (took := probe(daemon, "/readyz")) is not None and took < 1, took)
        expect("a stop is clean", daemon.stop() == 0)
        close(socks)


@check("Without descriptors the daemon logs one line per second and recovers")
def lack(directory):
    with Daemon(directory) as daemon:
        daemon.ready()
        limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir(f"/proc/{daemon.pid}/fd"))
        before = len(daemon.lines)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (highest + 3, limits[1]))
        socks = [connect(daemon.http) for _ in range(40)]
        time.sleep(3)
        lines = [line for line in daemon.lines[before:] if "accepting connections failed" in line and '"port":"http"' in line]
        expect("without descriptors there is at most a line a second", 1 <= len(lines) <= 4,
               f"{len(lines)} lines in 3 s")
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
        took = probe(daemon)
        expect("it recovers when there are some", took is not None, took)
        close(socks)


def heads(daemon):
    trickle = [connect(daemon.http) for _ in range(20)]
    began = time.monotonic()
    open_ = set(trickle)
    for sock in trickle:
        sock.sendall(b"GET /livez HTTP/1.1\r\nX: ")
    while open_ and time.monotonic() - began < HEAD + 3:
        for sock in list(open_):
            try:
                sock.sendall(b"x")
            except OSError:
                open_.discard(sock)
        time.sleep(0.1)
    expect("a head that trickles in ends by time", not open_ and time.monotonic() - began >= HEAD - 0.1, f"{time.monotonic() - began:.1f} s")
    close(trickle)
    for what, request, status in [
        ("a head of 3 MB", b"GET /livez HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"a" * 1000) for n in range(3000)) + b"\r\n", 431),
        ("one header line of 100 KB", b"GET /livez HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        ("a head of 15 KB", b"GET /livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX: " + b"a" * 15_000 + b"\r\n\r\n", 200),
        ("no HTTP at all", b"hello\r\n\r\n", 400),
        ("a binary greeting", bytes(range(1, 20)) + b"\r\n\r\n", 400),
    ]:
        got = said(daemon, request)[0]
        expect(f"{what} is answered {status}", got == status, got)
    idle = connect(daemon.http)
    idle.sendall(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
    idle.recv(1000)
    took = ended([idle], IDLE + 3)
    expect("an idle connection ends by time", took is not None and took > IDLE - 0.5, took if took is None else f"{took:.1f} s")


def methods(daemon):
    def line(text, more="Host: a\r\n"):
        return said(daemon, f"{text}\r\n{more}Connection: close\r\n\r\n".encode())

    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"]:
        for path in ["/livez", "/metrics", "/console/"]:
            status, text = line(f"{method} {path} HTTP/1.1", "Host: localhost\r\n")
            if not expect(f"{method} {path} is answered 405 with Allow", status == 405 and "allow: get,head" in text.lower(), status if status != 405 else ""):
                print(text)
    for what, status, answer in [
        ("CONNECT", 405, line("CONNECT a:1 HTTP/1.1")),
        ("absolute form", 200, line("GET http://127.0.0.1/livez HTTP/1.1")),
        ("HEAD", 200, line("HEAD /metrics HTTP/1.1")),
        ("no Host", 400, line("GET /livez HTTP/1.1", "")),
        ("two Hosts", 400, line("GET /livez HTTP/1.1", "Host: a\r\nHost: b\r\n")),
        ("HTTP/1.0 without Host", 200, line("GET /livez HTTP/1.0", "")),
        ("HTTP/1.0 without Host on /metrics", 200, line("GET /metrics HTTP/1.0", "")),
        ("an unknown path", 404, line("GET /wald.v1.WalService/Append HTTP/1.1")),
        ("an upgrade to h2c", 200, line("GET /livez HTTP/1.1", "Host: a\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n")),
        ("a length that is none", 400, line("POST /livez HTTP/1.1", "Host: a\r\nContent-Length: x\r\n")),
        ("a body of 1 GB", 413, line("POST /livez HTTP/1.1", "Host: a\r\nContent-Length: 1000000000\r\n")),
        ("100 Continue", 405, line("POST /livez HTTP/1.1", "Host: a\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n")),
    ]:
        expect(f"{what} is answered {status}", answer[0] == status and "100 Continue" not in answer[1][:30], answer[0] if answer[0] != status else "")
    expect("an unknown path names the port of gRPC", f"port {daemon.grpc.split(':')[1]}" in line("GET /x HTTP/1.1")[1])

    with connect(daemon.http) as sock:
        answers = []
        for _ in range(3):
            sock.sendall(b"GET /livez HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            answers.append(sock.recv(1000))
        expect("HTTP/1.0 keeps the connection if asked", all(a.startswith(b"HTTP/1.0 200") and b"connection: keep-alive" in a.lower() for a in answers))
    with connect(daemon.http) as sock:
        # A body without end: answered, and never read.
        sock.sendall(b"POST /livez HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent = 0
        began = time.monotonic()
        try:
            while time.monotonic() - began < 10:
                sent += sock.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        except OSError:
            pass
        took = time.monotonic() - began
        expect("a body without end ends by time and size", took < 5 and sent < 64 << 20, f"{took:.1f} s, {sent >> 10} KiB")


def hosts(daemon, named):
    for host, status in [("127.0.0.1:1", 200), ("10.1.2.3:6926", 200), ("[::1]:6926", 200), ("localhost:6926", 200), ("wald:6926", 200),
                         ("evil.example", 403), ("127.0.0.1.evil.example:6926", 403), ("wald.example", 403)]:
        got = get(daemon, "/metrics", host)[0]
        expect(f"/metrics under the name {host} is answered {status}", got == status, got)
    status, text = get(daemon, "/metrics", "evil.example")
    expect("and says which setting to change", "console_hosts" in text)
    expect("nor by a target under such a name", said(daemon, b"GET http://evil.example/metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[0] == 403)
    for host, status in [("wald.example:6926", 200), ("pod-0.wald.svc:6926", 200), ("evil.example", 403)]:
        expect(f"with console_hosts, {host} is answered {status}", get(named, "/metrics", host)[0] == status)
    expect("probes need no name", get(daemon, "/livez", "evil.example")[0] == get(daemon, "/readyz", "evil.example")[0] == 200)


def pipelined(daemon):
    """Thousands of requests in one write delay no other client."""
    done = {}

    def ask(path, times):
        with connect(daemon.http, timeout=60) as sock:
            request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode() * (times - 1)
            last = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
            background(lambda: pour(sock, request + last))
            began = time.monotonic()
            done[path, threading.get_ident()] = answered(sock), time.monotonic() - began

    alone = probes(daemon, 1)
    busy = [background(lambda: ask("/metrics", 1000)), *(background(lambda: ask("/livez", 20_000)) for _ in range(3))]
    found = probes(daemon, busy=busy)
    grpc = probes(daemon, 1, of=probe_grpc)
    counts = sorted(count for count, _ in done.values())
    expect("all pipelined requests are answered", counts == [1000, 20_000, 20_000, 20_000], counts)
    fine(f"/livez answers meanwhile (alone: {alone[0] * 1e3:.1f} ms)", found)
    fine("gRPC connections are accepted afterwards", grpc)
    busy = [background(lambda: ask("/metrics", 300)) for _ in range(20)]
    grpc = probes(daemon, 2, of=probe_grpc)
    fine("gRPC connections are accepted while 20 connections ask for /metrics without end", grpc)
    fine("and /livez answers", probes(daemon, 2))
    for thread in busy:
        thread.join()


def streams(daemon):
    """Pages that stay open leave room for others."""
    request = b"GET /console/api/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    socks = []
    for _ in range(32):
        socks.append(connect(daemon.http))
        socks[-1].sendall(request)
        socks[-1].recv(100)
    status, text = get(daemon, "/console/api/live", "localhost")
    expect("the 33rd event stream is answered 503 with a sentence", status == 503 and "too many pages are open" in text, status)
    fine("probes answer beside 32 streams", probes(daemon, 1))
    expect("and the console", get(daemon, "/console/api/logs", "localhost")[0] == 200)
    idle = [connect(daemon.http) for _ in range(300)]
    fine("also beside 300 silent connections", probes(daemon, 1))
    data = socks[0].recv(1 << 16)
    expect("streams go on", len(data) > 0)
    close(socks + idle)
    expect("a closed stream gives its place back", wait_until(lambda: live(daemon) == 200, 10))


def live(daemon):
    with connect(daemon.http) as sock:
        sock.sendall(b"GET /console/api/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return int(sock.recv(100).split(b" ")[1])


def unread(daemon):
    """Answers and streams that no client reads end 30 s later; runs next to the others."""
    daemon.walctl("append", "much", "--format", "raw", input=b"x" * 1000)
    answers = connect(daemon.http, receive=4096)
    background(lambda: pour(answers, b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 2000))
    stream = connect(daemon.http, receive=4096)
    stream.sendall(b"GET /console/api/live?log=much&from=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    line = b"y" * 1000 + b"\n"
    for _ in range(8):
        daemon.walctl("append", "much", "--format", "lines", input=line * 900)
    began = time.monotonic()
    gone = {}
    while time.monotonic() - began < 45 and len(gone) < 2:
        for name, sock in [("answers", answers), ("stream", stream)]:
            if name not in gone and not established(sock):
                gone[name] = time.monotonic() - began
        time.sleep(0.2)
    close([answers, stream])
    return gone


def established(sock):
    """Whether the daemon has not closed or reset the connection, without reading from it."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\1"


def pour(sock, data):
    try:
        sock.settimeout(60)
        sock.sendall(data)
    except OSError:
        pass


def foreign(daemon):
    """TLS and gRPC on the HTTP port get an answer that names the right port."""
    port = daemon.grpc.split(":")[1]
    done = daemon.grpcurl("-d", '{"log":"a","record":{"text":"x"}}', daemon.http, "wald.v1.WalService/Append", timeout=30)
    text = (done.stdout + done.stderr).decode()
    expect("grpcurl on the HTTP port is given the port of gRPC", done.returncode != 0 and f"gRPC is on port {port}" in text, text.strip()[-150:])
    done = run(WALCTL, "append", "a", "--format", "raw", input=b"x", env=clean_environment(WALD_ENDPOINT=f"http://{daemon.http}"), timeout=60)
    text = (done.stdout + done.stderr).decode()
    expect("so is walctl", done.returncode != 0 and f"gRPC is on port {port}" in text, text.strip()[-150:])
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(connect(daemon.http))
        expect("TLS is refused", False)
    except ssl.SSLError as error:
        expect("TLS is refused at once", True, error.reason)
    client = ssl.MemoryBIO(), ssl.MemoryBIO()
    shake = context.wrap_bio(*client)
    try:
        shake.do_handshake()
    except ssl.SSLWantReadError:
        pass
    status, text = said(daemon, client[1].read())
    expect("a TLS handshake is answered 400 with the port of gRPC", status == 400 and f"gRPC is on port {port}" in text, text.splitlines()[-1])
    done = run(grpcurl(), "-insecure", "-max-time", "5", daemon.http, "list", timeout=30)
    text = (done.stdout + done.stderr).decode()
    expect("grpcurl over TLS reports that the port has no TLS", "first record does not look like a TLS handshake" in text, text.strip()[-120:])

    # A flood of each: no line in the log, no connection left.
    before = len(daemon.lines)
    socks = []
    for number in range(600):
        sock = connect(daemon.http)
        try:
            sock.sendall([b"\x16\x03\x01\x02\x00\x01", PREFACE + SETTINGS + (b"\0\0\x08\x06\x01\0\0\0\0" + b"12345678") * 500,
                          b"\0\xff\r\n\r\n", b"PRI * HTTP/2.0\r\n"][number % 4])
        except OSError:
            pass
        socks.append(sock)
    fine("probes answer during a flood of wrong protocols", probes(daemon, 1))
    took = ended(socks, 12)
    expect("all of them end", took is not None, took if took is None else f"{took:.1f} s")
    close(socks)
    lines = len(daemon.lines) - before
    expect("they write at most a line a second", lines <= 20, f"{lines} lines")


@check("Probes answer while calls use all of max_connections, and a new gRPC connection gets no answer")
def full(directory):
    with Daemon(directory, "--max-connections", "8") as daemon:
        followers = [subprocess.Popen([str(WALCTL), "scan", "--all", "--follow"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                      env=clean_environment(WALD_ENDPOINT=daemon.endpoint)) for _ in range(8)]
        try:
            # A connection without a call would give way to a new one.
            is_full = wait_until(lambda: daemon.metric("wald_followers") == 8)
            expect("8 followers have all places", is_full, daemon.metric('wald_connections{port="grpc"}'))
            try:
                took = probe_grpc(daemon, timeout=2)
            except TimeoutError:
                took = None
            expect("a ninth connection gets no answer", took is None, took)
            for path in "/livez", "/readyz":
                fine(f"{path} answers within a second", probes(daemon, 1, of=lambda daemon: probe(daemon, path)))
        finally:
            for follower in followers:
                follower.kill()
                follower.wait()


@check("No connection to the HTTP port delays a stop")
def stop(directory):
    with Daemon(directory) as daemon:
        daemon.walctl("append", "much", "--format", "lines", input=(b"y" * 1000 + b"\n") * 900)
        socks = [connect(daemon.http, receive=4096) for _ in range(12)]
        for sock in socks[:2]:
            sock.sendall(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
            sock.recv(1000)
        socks[2].sendall(b"GET /livez HTTP/1.1\r\nHost")
        for sock in socks[3:6]:
            sock.sendall(b"GET /console/api/live?log=much&from=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for sock in socks[6:9]:
            background(lambda sock=sock: pour(sock, b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 500))
        socks[9].sendall(PREFACE + SETTINGS)
        socks[10].sendall(b"POST /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
        time.sleep(0.5)
        began = time.monotonic()
        code = daemon.stop()
        took = time.monotonic() - began
        expect("a stop takes less than 2 s with such connections open", code == 0 and took < 2, f"exit {code}, {took:.2f} s")
        close(socks)


@check("Silent sockets, slow heads, pipelines, unread answers, foreign protocols: probes answer within a second")
def hostile(directory):
    # With the defaults: slow heads of acceptance row 12, and answers that no client reads.
    with Daemon(f"{directory}/defaults") as defaults, \
            Daemon(f"{directory}/data", "--http-head-timeout", f"{HEAD}s", "--http-idle-timeout", f"{IDLE}s") as daemon, \
            Daemon(f"{directory}/named", "--console-hosts", "wald.example, .wald.svc") as named:
        gone = {}
        slow = [connect(defaults.http) for _ in range(50)]
        since = time.monotonic()
        for sock in slow:
            sock.sendall(b"GET /livez HTTP/1.1\r\nX: ")
        took = {}
        waiting = [background(lambda: gone.update(unread(defaults))),
                   background(lambda: took.update(heads=(ended(slow, 15), time.monotonic() - since)))]
        rss = daemon.anonymous()
        methods(daemon)
        hosts(daemon, named)
        heads(daemon)
        silent(daemon)
        pipelined(daemon)
        streams(daemon)
        foreign(daemon)
        grown = (daemon.anonymous() - rss) >> 20
        expect("memory rises by less than 64 MiB", grown < 64, f"{grown} MiB")
        expect("the daemons live", all(one.process.poll() is None for one in (defaults, daemon, named)))
        for thread in waiting:
            thread.join()
        expect("slow heads end within 15 s by default", took["heads"][0] is not None, f"{took['heads'][1]:.1f} s")
        expect("an answer that no client reads ends", 25 < gone.get("answers", 0) < 45, f"{gone.get('answers', 0):.0f} s")
        expect("an event stream that no client reads ends", "stream" in gone, f"{gone.get('stream', 0):.0f} s")


@check("Over TLS: slow and huge heads, silent sockets, event streams")
def hostile_over_tls(directory):
    authority = Authority(f"{directory}/ca")
    times = ["--http-head-timeout", f"{HEAD}s", "--http-idle-timeout", f"{IDLE}s"]
    with Secured(authority, f"{directory}/data", "--http-tls", *times) as daemon:
        SECURED.update({daemon.http: authority.context("http/1.1"), daemon.grpc: authority.context("h2")})
        rss = daemon.anonymous()
        heads(daemon)
        silent(daemon)
        streams(daemon)
        grown = (daemon.anonymous() - rss) >> 20
        expect("memory rises by less than 64 MiB", grown < 64, f"{grown} MiB")
        expect("the daemon lives", daemon.process.poll() is None)
