"""Tests the replica of a store in a bucket. Machines are lost with their disk while appends and batches of both levels are
under way: no REPLICATED ack may be missing afterwards, nothing may be there twice or in part, and `survived_position` must
say exactly which DURABLE records are lost. An old owner that wakes gets no ack, unless the store has lost its fences. The
server of the object store is the check's own; with --all the Versity gateway, MinIO and Azurite are others. A store of an
earlier version gets a replica.
"""

import base64
import random
import tarfile

from reading import GOLDEN, difference, expected, read
from replicas import *

SEED = int(sys.argv[2]) if sys.argv[2:] else random.randrange(1 << 32)
LOST = int(sys.argv[1]) if sys.argv[1:] else sized(50, 4)
# Lost machines for each of the other stores.
OTHERS = min(LOST, 10)
# Segments of the golden directories.
SMALL = ["--segment-bytes", "64KiB"]
# Golden directories of a default run: both ends, sorted runs, retention, keyed digests, forgotten producers.
UPGRADED = ["everything-killed", "sorted-clean", "retention-killed"]


def lines(path, number):
    """The input of a producer."""
    if not path.exists():
        path.write_text("".join(f"{path.name} {line}\n" for line in range(number)))
    return path


def produce(daemon, path, level="replicated"):
    """Appends a file as a producer to a log of its own: (exit code, next lsn of the log, stderr of walctl)."""
    log = f"produced/{path.parent.name}"
    done = daemon.walctl("append", log, "--producer", path.name, "--durability", level, path)
    _, tail, said = daemon.call("wald.v1.WalService/GetTail", {"log": log})
    return done.returncode, int((tail or {}).get("tailLsn", 0)), (done.stderr.decode() or said).strip()


def lose(directory, store, number, draw):
    """One machine: load, kill -9, its directory removed, a copy by restore, and a successor with an empty directory."""
    what, here, data = f"round {number}", directory / f"round-{number}", directory / f"data-{number}"
    here.mkdir()
    log = f"fenced/{number}"
    with serve(store, data, node=f"node-{number}", *([] if number == 0 else ["--take-over"])) as daemon:
        epoch = epoch_of(daemon)
        code, tail, said = produce(daemon, lines(here / "orders", 500))
        expect(f"{what}: a producer's batches are acknowledged", (code, tail) == (0, 500), brief(said))
        code, _, said = daemon.call("wald.v1.WalService/Fence", {"log": log, "writerEpoch": 7})
        expect(f"{what}: a fence is acknowledged", code == 0, brief(said) if code else "")
        running = [load(daemon, here, name, 10) for name in LOADS]
        # The machine is lost at a random moment.
        expect(f"{what}: all loads run", wait_until(lambda: all(begun(here, name) for name in LOADS), 30))
        time.sleep(draw.uniform(0, 1.3))
        daemon.kill()
        for one in running:
            one.result()
    shutil.rmtree(data)
    copy = here / "copy"
    done = run(programs() / "wald", "restore", store.url, "--data-dir", copy, env=store.environment())
    if expect(f"{what}: wald restore makes a store of the bucket", done.returncode == 0, done.stderr.decode().strip()[-300:]):
        # The copy has the key ring of the bucket.
        with Daemon(copy, *SEGMENTS, *keys(store)) as daemon:
            judge(f"{what}, restored", daemon, here, epoch)
            code, tail, said = produce(daemon, here / "orders", "durable")
            expect(f"{what}, restored: the producer's repetition adds nothing", (code, tail) == (0, 500), brief(said))
            code, _, said = daemon.call("wald.v1.WalService/Append", {"log": log, "record": {"text": "old"}, "condition": {"writerEpoch": 6}})
            expect(f"{what}, restored: the fence holds", code != 0 and "FENCED" in said, brief(said))
        shutil.rmtree(copy)
    return here, epoch


def lost(directory, store, count, name="lost_machines"):
    draw, rounds = random.Random(SEED), []
    print(f"seed {SEED}: .ci/run durability/replica:{name} -- {count} {SEED}", flush=True)
    for number in range(count):
        rounds.append(lose(directory, store, number, draw))
    with serve(store, directory / "last", "--take-over", node="last") as daemon:
        for here, epoch in rounds:
            judge(f"the last successor, {here.name}", daemon, here, epoch)
        expect("it stops cleanly", daemon.stop() == 0)
    acks = {level: [acked(here, name) for here, _ in rounds for name in LOADS if LOADS[name][0] == level] for level in ("replicated", "durable")}
    print(f"     {count} machines; acks: " + ", ".join(f"{sum(map(len, found))} {level}" for level, found in acks.items()), flush=True)


@check("Machines are lost with their disk: a copy and a successor have every REPLICATED ack, and name the lost records")
def lost_machines(directory):
    with own(directory) as (store, _):
        lost(directory, store, LOST)


@check("The same with encrypted records and a key for each log: successors and copies have the keys from the bucket")
def encrypted(directory):
    with own(directory) as (store, _):
        encrypt(directory, store)
        lost(directory, store, sized(LOST, min(LOST, 2)), "encrypted")
        ring = store.objects / BUCKET / PREFIX / "keys/ring"
        expect("the bucket has the key ring of the last term", f'"term": {sized(LOST, min(LOST, 2)) + 1}' in ring.read_text())


@check("The same with the Versity gateway as the store")
def gateway(directory):
    with versity(directory) as store:
        lost(directory, store, LOST, "gateway")


@check("The same with MinIO and with the emulator of Azure")
def others(directory):
    for make in minio, azurite:
        (directory / make.__name__).mkdir()
        with make(directory / make.__name__) as store:
            lost(directory / make.__name__, store, OTHERS, "others")


def awakened(directory, loses_fences):
    """An owner is stopped under load, another node takes the store over, and the first one wakes. With `loses_fences` the
    store then has no fences any more, as if SlateDB had collected them; returns the REPLICATED acks that are lost."""
    here = directory / "round"
    here.mkdir()
    with own(directory) as (store, server), serve(store, directory / "old", node="old") as old:
        epoch = epoch_of(old)
        running = [load(old, here, name, 60 if loses_fences else 30) for name in LOADS]
        expect("all loads run on the old owner", wait_until(lambda: all(begun(here, name) for name in LOADS), 30))
        old.process.send_signal(signal.SIGSTOP)
        with serve(store, directory / "new", "--take-over", node="new") as new:
            if loses_fences:
                rows = store.objects / BUCKET / PREFIX / "shards/0/db/wal"
                fences = [path for path in rows.iterdir() if path.stat().st_size == 0]
                for fence in fences:
                    fence.unlink()
                expect("the fences are gone", fences, len(fences))
                # The new manifest would stop the old owner, too, if it came first.
                server.fault = lambda request: time.sleep(6) if request.command == "GET" and "manifest" in request.path else None
            old.process.send_signal(signal.SIGCONT)
            expect("the old owner ends with 78", old.process.wait(60) == 78, old.process.returncode)
            said = "".join(old.lines)
            expect("it names the owner and the term", 'the node \\"new\\"' in said and "owns the store in term" in said, brief(said[-300:]))
            for one in running:
                one.result()
            server.fault = lambda request: None
            if loses_fences:
                return [entry for name, (level, _) in LOADS.items() if level == "replicated" for entry in lost_acks(new, here, name)[2]]
            judge("the new owner", new, here, epoch)
        try:
            serve(store, directory / "old", node="old").kill()
            expect("the old directory is refused", False)
        except Ended as ended:
            said = "".join(ended.lines)
            expect("the old directory is refused with 78, and the owner is named", ended.code == 78 and "new" in said, brief(said[-300:]))


@check("An old owner that wakes after a take-over: no REPLICATED ack is lost, and it ends with the owner's name")
def zombie(directory):
    awakened(directory, loses_fences=False)


@check("The same drill loses REPLICATED acks if the store has lost its fences: it would see such a loss")
def unfenced(directory):
    # The old owner loses nothing if it meets a row of the new one first: then its own write is refused.
    for number in range(3):
        here = directory / str(number)
        here.mkdir()
        lost = awakened(here, loses_fences=True)
        if lost:
            break
    expect("the drill sees that REPLICATED acks are lost", lost, f"{len(lost)} acks in round {number + 1}")


@check("An idle owner needs at most five requests a second; appends of the level DURABLE do not wait for the store")
def costs(directory):
    with own(directory) as (store, server), serve(store, directory / "data") as daemon:
        daemon.load(appends=500, writers=4, logs=4, bytes=100, durability="replicated").result()
        requests = lambda: sum(value for name, value in daemon.metrics().items() if name.startswith("wald_bucket_requests_total"))
        # The first pass of the collector comes 10 s after the open, and looks at all objects.
        time.sleep(13)
        before, began = requests(), time.monotonic()
        time.sleep(10)
        rate = (requests() - before) / (time.monotonic() - began)
        expect("an idle owner sends at most 5 requests a second", 0 < rate <= 5, f"{rate:.1f}/s")
        server.fault = lambda request: time.sleep(0.3)
        told = daemon.load(appends=2_000, writers=8, logs=4, bytes=100, durability="durable", prefix="quick").result()
        expect("beside a store with 300 ms DURABLE appends are answered in less than 150 ms", told["acks"] == 2_000 and told["p50_us"] < 150_000, told)


def refuses(what, store, data):
    """States that the daemon does not start with this store."""
    try:
        serve(store, data).kill()
        expect(f"{what}: the start is refused", False)
    except Ended as ended:
        said = "".join(ended.lines)
        expect(f"{what}: the start is refused with 78, and the failed check is named", ended.code == 78 and "the check" in said, brief(said[-300:]))


@check("Servers that ignore conditions, or check them without a lock, stop the start with exit code 78")
def refused(directory):
    for kind in "ignored", "racy":
        (directory / kind).mkdir()
        with own(directory / kind, conditions=kind) as (store, _):
            refuses(f"conditions are {kind}", store, directory / kind / "data")


@check("Known servers without atomic conditional writes stop the start with exit code 78")
def known(directory):
    for make in s3rver, gcs_emulator:
        (directory / make.__name__).mkdir()
        with make(directory / make.__name__) as store:
            refuses(make.__name__, store, directory / make.__name__ / "data")


def guarded(daemon, logs):
    """Repeats the newest batch of each producer, and appends with a fenced epoch: (repeats, refused appends)."""
    repeats = fenced = 0
    for name, log in logs.items():
        epoch = {"writer_epoch": log["writer_epoch"]} if log["writer_epoch"] else {}
        for one in log["producers"]:
            sequence = one["next_sequence"] - 1
            records = [{"data": base64.b64encode(f"{one['id']} {one['epoch']} {sequence} {index}".encode()).decode()} for index in range(2)]
            batch = {"log": name, "records": records, "condition": epoch | {
                "producer": {"id": one["id"], "epoch": one["epoch"], "sequence": sequence}}}
            _, answer, said = daemon.call("wald.v1.WalService/AppendBatch", {"batches": [batch]})
            first = (answer or {"appends": [{}]})["appends"][0]
            if expect(f"  {name}: the repeat of {one['id']} is recognised", first.get("deduplicated") and
                      int(first.get("firstLsn", 0)) == one["newest_lsn"], first or brief(said)):
                repeats += 1
        if log["writer_epoch"]:
            _, _, said = daemon.call("wald.v1.WalService/Append", {"log": name, "record": {"text": "old"}, "condition": {
                "writer_epoch": log["writer_epoch"] - 1}})
            fenced += expect(f"  {name}: a fenced epoch is refused", "FENCED" in said, brief(said))
    return repeats, fenced


@check("A store of an earlier version gets a replica: a restore has its records, producers, fences, trims, cursors")
def upgrade(directory):
    archives = [path for path in sorted(GOLDEN.glob("*/*.tar.gz")) if sized(True, path.name.removesuffix(".tar.gz") in UPGRADED)]
    totals = Counter()
    for archive in archives:
        name = archive.name.removesuffix(".tar.gz")
        kept = json.loads(archive.with_name(f"{name}.json").read_text())["logs"]
        if any(log["quarantined"] or not log["tail_proven"] for log in kept.values()):
            continue
        here = directory / name
        (here / "data").mkdir(parents=True)
        with tarfile.open(archive) as packed:
            packed.extractall(here / "data", filter="data")
        # Retention must leave the logs as they are.
        still = ["--sorter-enabled=false", "--retention-interval", "1h"]
        with own(here) as (store, _):
            with serve(store, here / "data", *still, segments=SMALL) as daemon:
                code, _, said = daemon.call("wald.v1.WalService/Append", {"log": "upgraded", "record": {"text": "x"},
                                                                         "durability": "DURABILITY_REPLICATED"})
                expect(f"{name}: an append is REPLICATED", code == 0, brief(said) if code else "")
                daemon.kill()
            shutil.rmtree(here / "data")
            done = run(programs() / "wald", "restore", store.url, "--data-dir", here / "copy", env=store.environment())
            if not expect(f"{name}: wald restore makes a store of the bucket", done.returncode == 0, done.stderr.decode().strip()[-300:]):
                continue
        logs = expected(read(here / "copy")[1])
        new = logs.pop("upgraded", {"records": 0})
        for log in kept.values():
            log["producers"].sort(key=lambda one: one["id"])
        wrong = difference(logs, kept)
        expect(f"{name}: each log is as its version wrote it, and the new one is there", not wrong and new["records"] == 1,
               wrong or f"{len(kept)} logs, {sum(log['records'] for log in kept.values())} records")
        with Daemon(here / "copy", *SMALL, *still, binary=programs() / "wald") as daemon:
            repeats, fenced = guarded(daemon, kept)
        totals.update(producers=repeats, fences=fenced, trims=sum(log["first_lsn"] > 0 for log in kept.values()),
                      cursors=sum(len(log["cursors"]) for log in kept.values()))
    expect("there were producers, fences, trims and cursors", all(totals[one] for one in ("producers", "fences", "trims", "cursors")), dict(totals))
