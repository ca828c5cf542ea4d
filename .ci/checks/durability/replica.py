"""Tests the replica of a store in a bucket. Machines are lost with their disk while appends of both levels are underway: no
REPLICATED ack may be missing afterwards, nothing may be there twice, and `survived_position` must say exactly which DURABLE
records are lost. An old owner that wakes gets no ack. A store that answers slowly, refuses, or loses answers causes no false
ack, and DURABLE appends go on until the bound of the lag. The server of the object store is the check's own; with --all the
Versity gateway is another one.
"""

import random

from buckets import *

SEED = int(sys.argv[2]) if sys.argv[2:] else random.randrange(1 << 32)
LOST = int(sys.argv[1]) if sys.argv[1:] else sized(50, 4)
SEGMENTS = ["--segment-bytes", "1MiB"]
# A short gap: rounds are shorter than a second.
QUICK = ["--bucket-gap", "5ms", "--replica-interval", "200ms"]
DOWN_SECONDS = sized(60, 8)
LEVELS = "durable", "replicated"


def serve(store, data, *arguments, node="one"):
    """A daemon whose replica is in the bucket."""
    return Daemon(data, "--bucket-url", store.url, "--node-id", node, *SEGMENTS, *QUICK, *arguments,
                  variables=store.variables, binary=programs() / "wald")


def lines(path, number):
    """The input of a producer."""
    if not path.exists():
        path.write_text("".join(f"{path.name} {line}\n" for line in range(number)))
    return path


def produce(daemon, path, level="replicated"):
    """Appends a file as a producer to a log of its own: (exit code, next lsn of the log, what walctl said)."""
    log = f"produced/{path.parent.name}"
    done = daemon.walctl("append", log, "--producer", path.name, "--durability", level, path)
    _, tail, said = daemon.call("wald.v1.WalService/GetTail", {"log": log})
    return done.returncode, int((tail or {}).get("tailLsn", 0)), (done.stderr.decode() or said).strip()


def load(daemon, directory, level, seconds, **more):
    """A load with a ledger. Its logs begin with the level and the directory's name."""
    options = dict(seconds=seconds, appends=10**9, writers=16, logs=20, bytes=200, durability=level, attempts=1, tolerate=True) | more
    return daemon.load(prefix=f"{level}-{directory.name}", ledger=directory / f"{level}.ledger", **options)


def acked(directory, level):
    """The acks of a ledger. A kill may have cut its last line."""
    path, entries = directory / f"{level}.ledger", []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, IndexError):
            entries.append(Entry(line))
    return [entry for entry in entries if entry.acked]


def epoch_of(daemon):
    _, info, _ = daemon.call("wald.v1.OpsService/GetServerInfo", {})
    return int(info["recoveryEpoch"])


def judge(what, daemon, directory, epoch):
    """States what became of the acks of a machine whose recovery epoch was `epoch`."""
    for level in LEVELS:
        entries, found = acked(directory, level), stored(daemon, f"{level}-{directory.name}/")
        survivors = [entry for entry in entries if found.get((entry.log, entry.lsn)) == entry.number]
        expect(f"{what}: {level}: nothing is there twice", found and len(set(found.values())) == len(found), f"{len(found)} records")
        if level == "replicated":
            expect(f"{what}: every REPLICATED ack is there", entries and len(survivors) == len(entries),
                   f"{len(survivors)} of {len(entries)}")
        _, tail, said = daemon.call("wald.v1.WalService/GetTail", {"log": f"{level}-{directory.name}/0", "recoveryEpoch": epoch})
        position = int((tail or {}).get("survivedPosition", -1))
        wrong = [entry for entry in entries if (entry in survivors) != (entry.position < position)]
        expect(f"{what}: {level}: survived_position names exactly the lost acks", position >= 0 and not wrong,
               f"{len(entries) - len(survivors)} of {len(entries)} lost, from position {position}" if position >= 0 else said)


def lose(directory, store, number, draw):
    """One machine: load, kill -9, its directory removed, a copy by restore, and a successor with an empty directory."""
    what, here, data = f"round {number}", directory / f"round-{number}", directory / f"data-{number}"
    here.mkdir()
    log = f"fenced/{number}"
    with serve(store, data, node=f"node-{number}", *([] if number == 0 else ["--take-over"])) as daemon:
        epoch = epoch_of(daemon)
        code, tail, said = produce(daemon, lines(here / "orders", 500))
        expect(f"{what}: a producer's batches are acknowledged", (code, tail) == (0, 500), said)
        code, _, said = daemon.call("wald.v1.WalService/Fence", {"log": log, "writerEpoch": 7})
        expect(f"{what}: a fence is acknowledged", code == 0, said)
        running = [load(daemon, here, level, 10) for level in LEVELS]
        # The machine is lost at a random moment.
        time.sleep(draw.uniform(0.2, 1.5))
        daemon.kill()
        for one in running:
            one.result()
    shutil.rmtree(data)
    copy = here / "copy"
    done = run(programs() / "wald", "restore", store.url, "--data-dir", copy, env=store.environment())
    if expect(f"{what}: wald restore makes a store of the bucket", done.returncode == 0, done.stderr.decode().strip()[-300:]):
        with Daemon(copy, *SEGMENTS) as daemon:
            judge(f"{what}, restored", daemon, here, epoch)
            code, tail, said = produce(daemon, here / "orders", "durable")
            expect(f"{what}, restored: the producer's repetition adds nothing", (code, tail) == (0, 500), f"{tail} {said}")
            code, _, said = daemon.call("wald.v1.WalService/Append", {"log": log, "record": {"text": "old"}, "condition": {"writerEpoch": 6}})
            expect(f"{what}, restored: the fence holds", code != 0 and "FENCED" in said, said[:200])
        shutil.rmtree(copy)
    return here, epoch


def lost(directory, store, count):
    draw, rounds = random.Random(SEED), []
    print(f"seed {SEED}: .ci/run durability/replica:lost_machines -- {count} {SEED}", flush=True)
    for number in range(count):
        rounds.append(lose(directory, store, number, draw))
    with serve(store, directory / "last", "--take-over", node="last") as daemon:
        for here, epoch in rounds:
            judge(f"the last successor, {here.name}", daemon, here, epoch)
        expect("it stops cleanly", daemon.stop() == 0)


@check("Machines are lost with their disk: a copy and a successor have every REPLICATED ack, and name the lost records")
def lost_machines(directory):
    with own(directory) as (store, _):
        lost(directory, store, LOST)


@check("The same with the Versity gateway as the store")
def gateway(directory):
    with versity(directory) as store:
        lost(directory, store, LOST)


@check("An old owner that wakes after a take-over: no REPLICATED ack is lost, and it ends with the owner's name")
def zombie(directory):
    here = directory / "round"
    here.mkdir()
    with own(directory) as (store, _), serve(store, directory / "old", node="old") as old:
        epoch = epoch_of(old)
        running = [load(old, here, level, 30) for level in LEVELS]
        expect("the old owner acknowledges", wait_until(lambda: all(len(acked(here, level)) > 100 for level in LEVELS) or
                                                         any(one.process.poll() is not None for one in running), 20))
        old.process.send_signal(signal.SIGSTOP)
        with serve(store, directory / "new", "--take-over", node="new") as new:
            old.process.send_signal(signal.SIGCONT)
            expect("the old owner ends with 78", old.process.wait(60) == 78, old.process.returncode)
            said = "".join(old.lines)
            expect("it names the owner and the term", 'the node \\"new\\"' in said and "owns the store in term" in said, said[-400:])
            for one in running:
                one.result()
            judge("the new owner", new, here, epoch)
        try:
            serve(store, directory / "old", node="old").kill()
            expect("the old directory is refused", False)
        except Ended as ended:
            said = "".join(ended.lines)
            expect("the old directory is refused with 78, and the owner is named", ended.code == 78 and "new" in said, said[-400:])


@check("A store that is slow, refuses, loses answers or is away: no false ack, DURABLE goes on, all resumes")
def faults(directory):
    here, numbers = directory / "round", iter(range(1 << 30))
    here.mkdir()

    def sometimes(request):
        number = next(numbers)
        return 503 if number % 5 == 1 else "lost" if number % 5 == 3 else None

    with own(directory) as (store, server), serve(store, directory / "data", "--replica-max-lag", "8MiB") as daemon:
        epoch = epoch_of(daemon)
        running = load(daemon, here, "replicated", DOWN_SECONDS * 3)
        count = lambda: len(acked(here, "replicated"))
        server.fault = lambda request: time.sleep(0.1)
        before = count()
        expect("slow: REPLICATED appends are acknowledged", wait_until(lambda: count() > before + 100, 30), count() - before)
        server.fault = sometimes
        before = count()
        expect("every fifth request refused, every fifth answer lost: they are acknowledged", wait_until(lambda: count() > before + 100, 60),
               count() - before)
        server.fault = lambda request: 503
        # Requests that have arrived are answered.
        time.sleep(0.5)
        began = time.time()
        durable = daemon.load(appends=2_000, writers=16, logs=20, bytes=200, durability="durable", prefix="away").result()
        expect("away: DURABLE appends go on", durable["acks"] == 2_000, durable)
        time.sleep(DOWN_SECONDS)
        filled = daemon.load(appends=4_000, writers=16, logs=20, bytes=10_000, durability="durable", prefix="full", attempts=1, tolerate=True).result()
        lag = daemon.metric("wald_replica_lag_bytes")
        expect("at the bound of the lag appends are BUSY", any("BUSY" in error for error in filled["errors"]) and lag <= 9 << 20,
               f"{filled['errors']}, {lag / (1 << 20):.1f} MiB")
        ended = time.time()
        server.fault = lambda request: None
        again = load(daemon, here, "again", 120, durability="replicated", appends=500, attempts=1000, tolerate=False).result()
        expect("it is back: REPLICATED appends are acknowledged again", again["acks"] == 500, again)
        # Its ledger is whole once it has ended.
        running.result()
        false = [entry for entry in acked(here, "replicated") if began < entry.got / 1e6 < ended]
        expect("away: no REPLICATED append was acknowledged", not false, f"{len(false)} in {ended - began:.0f} s")
        expect("it stops cleanly", daemon.stop() == 0)
        shutil.rmtree(directory / "data")
        with serve(store, directory / "next", "--take-over", node="next") as successor:
            found = stored(successor, "replicated-round/") | stored(successor, "again-round/")
            entries = acked(here, "replicated") + acked(here, "again")
            missing = [entry for entry in entries if found.get((entry.log, entry.lsn)) != entry.number]
            expect("a successor has every ack", entries and not missing, f"{len(entries) - len(missing)} of {len(entries)}")


@check("An idle owner needs at most five requests a second; appends of the level DURABLE do not wait for the store")
def costs(directory):
    with own(directory) as (store, server), serve(store, directory / "data") as daemon:
        daemon.load(appends=500, writers=4, logs=4, bytes=100, durability="replicated").result()
        requests = lambda: sum(value for name, value in daemon.metrics().items() if name.startswith("wald_bucket_requests_total"))
        time.sleep(2)
        before, began = requests(), time.monotonic()
        time.sleep(10)
        rate = (requests() - before) / (time.monotonic() - began)
        expect("an idle owner sends at most 5 requests a second", 0 < rate <= 5, f"{rate:.1f}/s")
        server.fault = lambda request: time.sleep(0.3)
        told = daemon.load(appends=2_000, writers=8, logs=4, bytes=100, durability="durable", prefix="quick").result()
        expect("beside a store with 300 ms DURABLE appends are answered in less than 150 ms", told["acks"] == 2_000 and told["p50_us"] < 150_000, told)


@check("Servers that ignore conditions, or check them without a lock, stop the start with exit code 78")
def refused(directory):
    for kind in "ignored", "racy":
        (directory / kind).mkdir()
        with own(directory / kind, conditions=kind) as (store, _):
            try:
                serve(store, directory / kind / "data").kill()
                expect(f"conditions are {kind}: the start is refused", False)
            except Ended as ended:
                said = "".join(ended.lines)
                expect(f"conditions are {kind}: the start is refused with 78, and the failed check is named",
                       ended.code == 78 and "the check" in said, said[-300:])
