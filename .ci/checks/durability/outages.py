"""Tests the replica of a store in a bucket that fails. A slow store, refused requests and lost answers delay REPLICATED
appends. While the store refuses everything, gives no answer, or has no space, none is acknowledged, DURABLE appends go on
until the bound of the lag, and memory is bounded. All resumes without help, and no owner is fenced. A successor has every ack.
The store is the check's own; with --all also the Versity gateway on a full file system.
"""

from replicas import *

# Longer than the 10 s after which requests hear that the bucket is down.
SECONDS = sized(60, 12)
MAX_LAG = 8 << 20
# A part of 8 MiB, its encoding and requests, rows of SlateDB, and appends of the load under way.
MOST_MEMORY = 64 << 20
# Every second request that was held is done without an answer.
NUMBERS = iter(range(1 << 30))


def once(daemon, level):
    """One append: the error, or "" for an ack."""
    code, _, said = daemon.call("wald.v1.WalService/Append", {"log": "once", "record": {"text": "x"}, "durability": f"DURABILITY_{level}"})
    return said if code else ""


def whole(what, daemon, prefix, **more):
    """A load all of whose appends must be acknowledged; clients repeat refused ones."""
    done = daemon.load(**dict(appends=1_000, writers=16, logs=20, bytes=200, prefix=prefix, attempts=1000) | more).result()
    expect(what, done["acks"] == more.get("appends", 1_000), done)


def memory_until(daemon, holds):
    """The largest memory of the daemon until a condition holds."""
    most = daemon.anonymous()
    while not holds():
        time.sleep(0.1)
        most = max(most, daemon.anonymous())
    return most


def outage(directory, store, begin, end):
    """A daemon whose store fails between `begin` and `end`, and a successor."""
    here = directory / "round"
    here.mkdir()
    with serve(store, directory / "data", "--replica-max-lag", f"{MAX_LAG >> 20}MiB") as daemon:
        term, before = daemon.metric("wald_term"), daemon.anonymous()
        running = [load(daemon, here, name, SECONDS * 3) for name in ("replicated", "replicated-batches")]
        expect("before: REPLICATED appends are acknowledged", wait_until(lambda: all(begun(here, name) for name in LOADS if "replicated" in name), 30))
        begin()
        # Requests that have arrived are answered, on a busy machine a second later.
        time.sleep(3)
        began, started = time.time(), time.monotonic()
        whole("during: DURABLE appends go on", daemon, "away", appends=2_000, durability="durable", attempts=1)
        most = memory_until(daemon, lambda: time.monotonic() > started + SECONDS)
        said = []
        expect("during: REPLICATED appends are refused with BUCKET_DOWN",
               wait_until(lambda: said.append(once(daemon, "REPLICATED")) or "BUCKET_DOWN" in said[-1], 60), brief(said[-1]))
        filling = daemon.load(appends=4_000, writers=16, logs=20, bytes=10_000, durability="durable", prefix="full", attempts=1, tolerate=True)
        most = max(most, memory_until(daemon, lambda: filling.process.poll() is not None))
        filled, lag = filling.result(), daemon.metric("wald_replica_lag_bytes")
        expect("during: at the bound of the lag appends are BUSY", any("BUSY" in error for error in filled["errors"]) and
               MAX_LAG / 2 < lag <= MAX_LAG + (1 << 20), f"{filled['errors']}, {lag / (1 << 20):.1f} MiB")
        ended = time.time()
        end()
        whole("after: REPLICATED appends are acknowledged again", daemon, "again-replicated", durability="replicated")
        took = time.time() - ended
        whole("after: DURABLE appends are acknowledged again", daemon, "again-durable", durability="durable")
        print(f"     {ended - began:.0f} s away, back after {took:.1f} s; memory {before >> 20} MiB before, at most {most >> 20} MiB", flush=True)
        expect("memory is bounded", most <= before + MOST_MEMORY, f"{most - before >> 20} MiB more")
        for one in running:
            one.result()
        acks = [entry for name in ("replicated", "replicated-batches") for entry in acked(here, name)]
        false = [entry for entry in acks if began < entry.got / 1e6 < ended]
        expect("during: no REPLICATED append was acknowledged", not false, f"{len(false)} in {ended - began:.0f} s")
        metrics = daemon.metrics()
        expect("no owner was fenced", metrics["wald_term"] == term and metrics["wald_fenced_total"] == 0, f"{metrics['wald_term']:.0f}")
        expect("it stops cleanly", daemon.stop() == 0)
    shutil.rmtree(directory / "data")
    with serve(store, directory / "next", "--take-over", node="next") as successor:
        for name in "replicated", "replicated-batches":
            entries, _, lost = lost_acks(successor, here, name)
            expect(f"a successor has every ack of {name}", entries and not lost, f"{len(entries) - len(lost)} of {len(entries)}")
        for prefix, number in ("away", 2_000), ("again-replicated", 1_000), ("again-durable", 1_000):
            # A repeated append may be there twice.
            found = len(set(stored(successor, f"{prefix}/").values()))
            expect(f"a successor has the records of {prefix}", found == number, found)


@check("A store that is slow, refuses requests or loses answers: REPLICATED appends are acknowledged")
def faults(directory):
    here, numbers = directory / "round", iter(range(1 << 30))
    here.mkdir()

    def sometimes(request):
        number = next(numbers)
        return 503 if number % 5 == 1 else "lost" if number % 5 == 3 else None

    with own(directory) as (store, server), serve(store, directory / "data") as daemon:
        for what, fault in [("slow", lambda request: time.sleep(0.1)), ("every fifth request refused, every fifth answer lost", sometimes)]:
            server.fault = fault
            done = load(daemon, here, "replicated", sized(30, 5)).result()
            expect(f"{what}: REPLICATED appends are acknowledged", done["acks"] >= 50 and not done["errors"], done)
            daemon_lost = lost_acks(daemon, here, "replicated")[2]
            expect(f"{what}: each is there", not daemon_lost, len(daemon_lost))
        server.fault = lambda request: None


@check("A store that refuses every request: no false ack, no false fence, bounded memory, and all resumes")
def away(directory):
    with own(directory) as (store, server):
        outage(directory, store, lambda: setattr(server, "fault", lambda request: 503), lambda: setattr(server, "fault", lambda request: None))


@check("A store that gives no answer: no false ack, no false fence, bounded memory, and all resumes")
def silent(directory):
    over = threading.Event()

    def held(request):
        over.wait()
        # Late, a request is done or lost. With --all the daemon must give up connections that stay open for ever.
        return "lost" if next(NUMBERS) % 2 else threading.Event().wait() if sized(True, False) else None

    with own(directory) as (store, server):
        def end():
            server.fault = lambda request: None
            over.set()

        outage(directory, store, lambda: setattr(server, "fault", held), end)


@check("A store without space for writes: no false ack, no false fence, bounded memory, and all resumes")
def full(directory):
    def refused(request):
        return 507 if request.command in ("PUT", "POST") else None

    with own(directory) as (store, server):
        outage(directory, store, lambda: setattr(server, "fault", refused), lambda: setattr(server, "fault", lambda request: None))


@check("The same with the Versity gateway on a file system without space")
def full_gateway(directory):
    volume = directory / "volume"
    volume.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", volume, check=True)
    ballast = volume / "ballast"

    def fill():
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(64 << 10))

    try:
        with versity(volume) as store:
            outage(directory, store, fill, ballast.unlink)
    finally:
        run("umount", "--lazy", volume, check=True)
