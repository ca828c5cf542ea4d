"""Append sessions on the built daemon. 10,000 batches in flight are acked in order. A failure in the
middle leaves exactly the batches before it. A slow server bounds the memory of client and server,
and a client that reads no acks is held back.
"""

from clients import *

examples()
# Speed does not matter here, so it is the one of the tests' build.
SESSION = EXAMPLES / "session"
# Each flush takes 300 ms, so that batches pile up in flight.
SLOW = ["-e", "trace=fdatasync", "-e", "inject=fdatasync:delay_enter=300000"]
BATCHES = 10_000


def session(daemon, **options):
    """Runs client/examples/session.rs to its end; returns its output."""
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    done = run(SESSION, daemon.endpoint, *flags)
    if done.returncode:
        raise SystemExit(done.stderr.decode())
    return json.loads(done.stdout)


def contents(daemon, log):
    """The numbers of the records of a log, in order."""
    lines = daemon.walctl("scan", log, "--output", "raw").stdout.split(b"\n")
    return [int(line[-18:]) for line in lines if line]


@check("10,000 batches in flight are acknowledged in order; a failure leaves exactly the batches before it")
def in_flight(data):
    with Daemon(data, "--session-window-bytes", "16MiB", "--max-inflight-bytes", "64MiB", strace=SLOW) as daemon:
        daemon.ready()
        told = session(daemon, batches=BATCHES, window_bytes=16 << 20)
        expect(f"{BATCHES:,} batches in flight are acked in order", told["acked"] == BATCHES and told["in_order"]
               and told["most_underway"] > BATCHES * 0.9, told)
        expect("and are there in order", contents(daemon, "session") == list(range(BATCHES)))
        wrong = BATCHES * 6 // 10
        told = session(daemon, batches=BATCHES, wrong=wrong, log="half", window_bytes=16 << 20)
        expect("a failure in the middle: every ack before it arrived, in order", told["acked"] == wrong and told["in_order"], told)
        expect("it names its batch", told["failed"] == [wrong, "LOG_EXISTS NotApplied"], told["failed"])
        expect("and exactly the records before it are there", contents(daemon, "half") == list(range(wrong)))


@check("A session without a slow disk reports its rate")
def fast(data):
    with Daemon(data) as daemon:
        daemon.ready()
        told = session(daemon, batches=50_000, log="fast")
        unary = daemon.load(appends=5_000, writers=1, logs=1, prefix="unary").result()
        expect("one session is many times as fast as a writer that waits for each ack", told["acked"] == 50_000
               and told["acked"] / told["seconds"] > 3 * unary["acks"] / unary["seconds"],
               f"{told['acked'] / told['seconds']:,.0f}/s, {unary['acks'] / unary['seconds']:,.0f}/s one by one")


@check("A slow server bounds the memory of client and server")
def slow(data):
    sent = 500 << 20
    with Daemon(data, strace=SLOW) as daemon:
        daemon.ready()
        before = daemon.anonymous()
        client = subprocess.Popen([str(SESSION), daemon.endpoint, "--batches", str(sent >> 16), "--bytes", str(1 << 16)],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=clean_environment())
        most, client_most, until = 0, 0, time.monotonic() + 10
        while time.monotonic() < until and client.poll() is None:
            most = max(most, daemon.anonymous() - before)
            status = Path(f"/proc/{client.pid}/status").read_text()
            client_most = max(client_most, int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10)
            time.sleep(0.02)
        expect("a slow server is still at it", client.poll() is None)
        taken = daemon.metric("wald_inflight_bytes")
        client.kill()
        client.wait()
        expect(f"of {sent >> 20} MiB to send, little is in the client's memory", client_most < 64 << 20, f"{client_most >> 20} MiB at most")
        expect("and little in the server's", most < 64 << 20, f"{most >> 20} MiB more at most, {int(taken) >> 10} KiB in flight")
        expect("nothing is left of the session", wait_until(lambda: daemon.metric("wald_append_sessions") == 0
                                                            and daemon.metric("wald_inflight_bytes") == 0))
        numbers = contents(daemon, "session")
        expect("the accepted batches are there, as a prefix", numbers == list(range(len(numbers))), len(numbers))
