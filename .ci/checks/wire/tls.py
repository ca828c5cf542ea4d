"""TLS of the released daemon, with certificates from the openssl command: versions and ciphers, ALPN, clients that stop in
a handshake, files that a start refuses, files that change under load, and the expiry in /metrics. openssl
s_client, grpcurl and raw sockets are the clients.
"""

import socket
import ssl

from certificates import *

EXPIRES = 'wald_tls_certificate_not_after_timestamp_seconds{kind="server"}'
FAILURES = 'wald_reload_failures_total{kind="tls"}'


def connect(daemon):
    host, port = daemon.grpc.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=20)


def handshake(daemon, *arguments):
    """The version and the cipher that s_client agrees on, or ""."""
    done = openssl("s_client", "-connect", daemon.grpc, "-servername", "localhost", "-alpn", "h2", *arguments, input=b"")
    found = re.search(rb"^New, (TLSv\S+), Cipher is (?!\(NONE\))(\S+)", done.stdout, re.M)
    return f"{found[1].decode()} {found[2].decode()}" if found else ""


@check("TLS 1.1, CBC and static RSA are refused; 1.2 and 1.3 work, and tls_min_version holds")
def versions(directory):
    authority = Authority(directory)
    pem, key = authority.issue(Path(directory) / "tls", "server")
    old = ["-cipher", "ALL:@SECLEVEL=0"]
    with Daemon(Path(directory) / "data", *files(pem, key)) as daemon:
        for what, arguments, expected in (
                ("TLS 1.3", ["-tls1_3"], "TLSv1.3"),
                ("TLS 1.2", ["-tls1_2"], "TLSv1.2"),
                ("TLS 1.1", ["-tls1_1", *old], ""),
                ("TLS 1.0", ["-tls1", *old], ""),
                ("CBC", ["-tls1_2", "-cipher", "ECDHE-RSA-AES128-SHA256:ECDHE-RSA-AES256-SHA:@SECLEVEL=0"], ""),
                ("static RSA", ["-tls1_2", "-cipher", "AES128-GCM-SHA256:AES256-SHA:@SECLEVEL=0"], "")):
            found = handshake(daemon, *arguments)
            expect(f"{what} is {'accepted' if expected else 'refused'}", found.startswith(expected) and bool(found) == bool(expected), found)
        done = authority.grpcurl("-d", '{"log":"a","record":{"text":"x"}}', daemon.grpc, "wald.v1.WalService/Append")
        expect("grpcurl appends over TLS", done.returncode == 0, done.stderr.decode()[:200])
        done = run(grpcurl(), "-plaintext", "-max-time", "5", daemon.grpc, "list")
        expect("grpcurl without TLS fails", done.returncode != 0)
        expect("the expiry in /metrics is that of openssl", daemon.metric(EXPIRES) == not_after(pem), daemon.metric(EXPIRES))
    with Daemon(Path(directory) / "data", *files(pem, key), "--tls-min-version", "1.3") as daemon:
        expect("with tls_min_version 1.3 TLS 1.2 is refused", handshake(daemon, "-tls1_2") == "")
        expect("and TLS 1.3 accepted", handshake(daemon, "-tls1_3").startswith("TLSv1.3"))


def until_closed(sock):
    """Reads until the daemon closes the connection."""
    try:
        while sock.recv(1 << 12):
            pass
    except ConnectionResetError:
        pass


@check("Without ALPN, with http/1.1 or in plaintext a connection is closed within 10 s, and the log stays calm")
def protocols(directory):
    authority = Authority(directory)
    pem, key = authority.issue(Path(directory) / "tls", "server")
    with Daemon(Path(directory) / "data", *files(pem, key)) as daemon:
        for what, alpn in (("no ALPN", ()), ("http/1.1", ("http/1.1",))):
            try:
                with authority.context(*alpn).wrap_socket(connect(daemon), server_hostname="localhost"):
                    refused = False
            except (ssl.SSLError, ConnectionResetError) as error:
                refused = str(error)
            expect(f"{what}: the handshake fails", refused, refused)
        with authority.context("h2").wrap_socket(connect(daemon), server_hostname="localhost") as sock:
            expect("h2 is agreed on", sock.selected_alpn_protocol() == "h2")
        peers = []
        for what, first in (("HTTP/2 in plaintext", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"),
                            ("HTTP/1.1 in plaintext", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"), ("SSH", b"SSH-2.0-x\r\n"),
                            ("half a record", b"\x16\x03\x01\x02\0"), ("nothing", b"")):
            peers.append((what, connect(daemon), time.monotonic()))
            peers[-1][1].sendall(first)
        for what, sock, began in peers:
            with sock:
                until_closed(sock)
            took = time.monotonic() - began
            expect(f"{what} is closed within 10 s", took < 10.5, f"{took:.1f} s")
        before, began = len(daemon.lines), time.monotonic()
        for _ in range(200):
            with connect(daemon) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                sock.recv(100)
            with connect(daemon) as sock:
                sock.sendall(b"\x16\x03\x01\0\x05hello")
                sock.recv(100)
        took = time.monotonic() - began
        lines = [line for line in daemon.lines[before:] if "suppressed" not in line]
        # Two places log: plaintext, and failed handshakes.
        expect("each place logs at most one line a second", len(lines) <= 2 * (took + 1), f"{len(lines)} lines in {took:.1f} s")


@check("1,000 clients that stop in the handshake delay no other one, and are gone within 15 s")
def stopped(directory):
    authority = Authority(directory)
    pem, key = authority.issue(Path(directory) / "tls", "server")
    outgoing = ssl.MemoryBIO()
    session = authority.context("h2").wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    try:
        session.do_handshake()
    except ssl.SSLWantReadError:
        hello = outgoing.read()
    with Daemon(Path(directory) / "data", *files(pem, key)) as daemon:
        memory, began, peers = daemon.anonymous(), time.monotonic(), []
        for _ in range(500):
            peers.append(connect(daemon))
            peers[-1].sendall(hello)
        slow = [connect(daemon) for _ in range(500)]
        over = threading.Event()

        def trickle():
            for byte in hello:
                for sock in slow:
                    try:
                        sock.send(bytes([byte]))
                    except OSError:
                        pass
                if over.wait(1):
                    return

        sender = threading.Thread(target=trickle)
        sender.start()
        times = []
        while time.monotonic() - began < 6:
            begin = time.monotonic()
            with authority.context("h2").wrap_socket(connect(daemon), server_hostname="localhost"):
                times.append(time.monotonic() - begin)
        grown = (daemon.anonymous() - memory) >> 20
        expect("they take less than 64 MiB", grown < 64, f"{grown} MiB")
        expect("other handshakes take less than 1 s", max(times) < 1, f"{len(times)}, at most {max(times):.3f} s")
        for sock in [*peers, *slow]:
            sock.settimeout(max(15 - (time.monotonic() - began), 0.01))
            try:
                until_closed(sock)
            except TimeoutError:
                break
        else:
            sock = None
        expect("all of them are gone within 15 s", sock is None and time.monotonic() - began < 15, f"{time.monotonic() - began:.1f} s")
        over.set()
        sender.join()
        for sock in [*peers, *slow]:
            sock.close()


@check("A start with faulty files ends with 78 and one sentence that has the path, and nothing listens")
def faults(directory):
    authority = Authority(directory)
    here = Path(directory)
    pem, key = authority.issue(here / "tls", "server")
    _, other = authority.issue(here / "tls", "other")
    expired, its_key = authority.issue(here / "tls", "expired", begin="230101")
    readable, encrypted, empty, huge = (here / name for name in ("readable.key", "encrypted.key", "empty.pem", "huge.pem"))
    readable.write_bytes(key.read_bytes())
    readable.chmod(0o644)
    openssl("pkcs8", "-topk8", "-in", key, "-out", encrypted, "-passout", "pass:x", check=True)
    encrypted.chmod(0o600)
    empty.write_text("")
    huge.write_text("#" * (1 << 20))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for what, arguments, path in (("a key that all can read", (pem, readable), readable), ("an encrypted key", (pem, encrypted), encrypted),
                                  ("the key of another certificate", (pem, other), other), ("an expired certificate", (expired, its_key), expired),
                                  ("an empty certificate", (empty, key), empty), ("a certificate of 1 MB", (huge, key), huge),
                                  ("a missing key", (pem, here / "none"), here / "none")):
        done = run(WALD, "--data-dir", here / "data", "--listen", f":{port}", "--http-listen", ":0", "--log-format", "text", *files(*arguments))
        lines = [line for line in done.stderr.decode().splitlines() if "WARN" not in line]
        expect(f"{what}: exit 78 and the path", done.returncode == 78 and len(lines) == 1 and str(path) in lines[0], f"{done.returncode} {lines}")
        with socket.socket() as sock:
            expect(f"{what}: nothing listens", sock.connect_ex(("127.0.0.1", port)) != 0)
    expect("no store was made", not (here / "data").exists())


@check("20 swaps through ..data under load: no call fails, bad files are never in force, and the metrics follow")
def swaps(directory):
    authority = Authority(directory)
    here = Path(directory) / "tls"
    made = {}
    for name, days in (("first", 30), ("second", 60), ("third", 90)):
        authority.issue(here / f"..{name}", "server", days)
        made[name] = not_after(here / f"..{name}" / "server.pem")
    authority.issue(here / "..expired", "server", begin="230101")
    for name, what in (("wrong", "server.key"), ("empty", "server.pem")):
        shutil.copytree(here / "..first", here / f"..{name}")
        (here / f"..{name}" / what).write_bytes((here / "..second" / what).read_bytes() if name == "wrong" else b"")
        (here / f"..{name}" / what).chmod(0o600)

    def swap(name):
        (here / "..new").symlink_to(f"..{name}")
        (here / "..new").rename(here / "..data")

    swap("first")
    pem, key = here / "server.pem", here / "server.key"
    pem.symlink_to("..data/server.pem")
    key.symlink_to("..data/server.key")
    over, failed_calls, called = threading.Event(), [], [0, 0]

    def calls(number, daemon):
        while not over.is_set():
            done = authority.grpcurl("-d", '{"log":"a","record":{"text":"x"}}', daemon.grpc, "wald.v1.WalService/Append")
            called[number] += 1
            if done.returncode != 0:
                failed_calls.append((done.stdout + done.stderr).decode())

    with Daemon(Path(directory) / "data", *files(pem, key)) as daemon:
        threads = [threading.Thread(target=calls, args=(number, daemon)) for number in range(2)]
        for thread in threads:
            thread.start()
        in_force, failures, right = "first", 0, True
        for number in range(20):
            name = ("second", "wrong", "third", "empty", "first", "expired")[number % 6]
            swap(name)
            daemon.process.send_signal(signal.SIGHUP)
            if name in made:
                in_force = name
                right &= wait_until(lambda: daemon.metric(EXPIRES) == made[name], 20)
            else:
                failures += 1
                right &= wait_until(lambda: daemon.metric(FAILURES) == failures, 20)
                right &= daemon.metric(EXPIRES) == made[in_force]
        over.set()
        for thread in threads:
            thread.join()
        expect("good files come into force, and bad ones never", right, f"{failures} bad ones")
        expect("no call failed", not failed_calls and min(called) > 5, f"{sum(called)} calls; {failed_calls[:1]}")
        faults_logged = [line for line in daemon.lines if "a file of TLS cannot be used" in line]
        expect("each fault is an error line with its file", len(faults_logged) >= 3 and all('"ERROR"' in line and "server." in line for line in faults_logged),
               len(faults_logged))
        # Without a signal, within 10 s.
        before = daemon.metric(EXPIRES)
        swap(next(name for name in made if made[name] != before))
        expect("a change is found without a signal", wait_until(lambda: daemon.metric(EXPIRES) != before, 15))
        expect("the daemon stops in order", daemon.stop() == 0)
