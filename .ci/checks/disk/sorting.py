"""The sorter of the built daemon, killed 20 times at random moments under load. It sorts segments of 64 KiB,
one or few at a time, into runs, which it merges and rewrites. Writers of a session each append to logs.
Some logs are trimmed, some are deleted and created again, some expire by bytes or records; the others keep
all. After each kill `wald verify` finds a sound store without orphaned files. The next start has every record that
was acked DURABLE and not removed, once, at its lsn and with its bytes, and nothing of a deleted log. Every fourth life
does not sort. Prints the seed. Arguments: the number of kills and a seed.
"""

import base64
import collections
import random

from common import *

WAL, LOG = "wald.v1.WalService", "wald.v1.LogService"
SMALL = ["--segment-bytes", "64KiB", "--pool-segments", "1"]
FORGETFUL = ["--retention-interval", "20ms"]
SORTER = ["--sorter-enabled", "--sorter-step-bytes", "400KiB"]
UNSORTED = ["--sorter-enabled=false"]
WRITERS = 4
# Purpose of each log of a writer.
KINDS = ["kept", "trimmed", "deleted", "bytes", "records", "idle"]
BOUNDS = {"bytes": {"maxBytes": "20000"}, "records": {"maxRecords": "50"}}


class Told:
    """The known state of one life of one log: each record that was sent, and how far it was trimmed."""

    def __init__(self):
        # `acked` by lsn; `unsure` are records that may exist, in the order of their lsns.
        self.acked, self.unsure = {}, []
        self.first, self.first_tried = 0, 0
        self.deleting = False


class Writer(threading.Thread):
    """One session until the daemon ends; every batch is answered before the next is sent, or never."""

    def __init__(self, ledger, name, daemon, seed):
        super().__init__(daemon=True)
        self.ledger, self.name, self.daemon, self.dice = ledger, name, daemon, random.Random(seed)
        self.start()

    def run(self):
        # grpcurl reads requests until its input ends: one session of a random length, then some single calls.
        while self.session() and self.rest():
            pass

    def session(self):
        requests = []
        for number in range(self.dice.randint(5, 60)):
            log = f"{self.name}/{self.dice.choice(KINDS[:-1] if self.dice.random() < 0.98 else KINDS)}"
            texts = [self.ledger.new(log, self.dice) for _ in range(self.dice.choice([1, 1, 2, 8]))]
            requests.append((log, texts, {"request_id": number + 1, "batch": {"batches": [
                {"log": log, "records": [{"data": base64.b64encode(text.encode()).decode()} for text in texts]}]}}))
        with self.ledger.lock:
            for log, texts, _ in requests:
                self.ledger.told[log].unsure += texts
        done = self.daemon.grpcurl("-d", "@", self.daemon.grpc, f"{WAL}/AppendSession",
                                   input="\n".join(json.dumps(request) for _, _, request in requests).encode())
        with self.ledger.lock:
            for message in messages(done.stdout.decode()):
                log, texts, _ = requests[int(message["requestId"]) - 1]
                told = self.ledger.told[log]
                first = int(message["ack"]["appends"][0].get("firstLsn", 0))
                for lsn, text in enumerate(texts, first):
                    told.acked[lsn] = text
        return done.returncode == 0

    def rest(self):
        """A trim, or a deletion."""
        act = self.dice.random()
        if act < 0.7:
            return self.trim(f"{self.name}/trimmed")
        if act < 0.9:
            return self.delete(f"{self.name}/deleted")
        return True

    def trim(self, log):
        with self.ledger.lock:
            told = self.ledger.told[log]
            if not told.acked:
                return True
            before = self.dice.randint(told.first, max(told.acked))
            told.first_tried = max(before, told.first_tried)
        code, _, _ = self.daemon.call(f"{WAL}/Trim", {"log": log, "beforeLsn": before})
        with self.ledger.lock:
            if code == 0:
                told.first = max(told.first, before)
        return code == 0

    def delete(self, log):
        with self.ledger.lock:
            if not self.ledger.told[log].acked:
                return True
            self.ledger.told[log].deleting = True
        code, _, _ = self.daemon.call(f"{LOG}/DeleteLog", {"log": log})
        with self.ledger.lock:
            if code == 0:
                self.ledger.told[log] = Told()
                self.ledger.deleted += 1
        return code == 0


def messages(said):
    """The complete messages of a stream: grpcurl prints one object after another."""
    decoder, at = json.JSONDecoder(), 0
    while (at := said.find("{", at)) >= 0:
        try:
            message, at = decoder.raw_decode(said, at)
        except json.JSONDecodeError:
            return
        yield message


class Ledger:
    """Requests and answers, kept outside the killed process."""

    def __init__(self):
        self.lock = threading.Lock()
        self.told = collections.defaultdict(Told)
        self.sent = self.deleted = self.compared = 0

    def new(self, log, dice):
        """A unique text for a record."""
        with self.lock:
            self.sent += 1
            return f"{self.sent} {log} " + dice.choice("abcdefgh") * dice.randint(0, 900)

    def compare(self, daemon):
        """Compares a start with all known state, and resolves unsure records. Returns the differences."""
        _, answer, _ = daemon.call(f"{LOG}/ListLogs", {"page_size": 1000})
        logs = {log["name"]: log for log in answer.get("logs", [])}
        done = daemon.walctl("scan", "--all", "--output", "json")
        if done.returncode:
            return [f"the scan failed: {done.stderr.decode()[:300]}"]
        found = collections.defaultdict(list)
        for line in done.stdout.splitlines():
            record = json.loads(line)
            found[record["log"]].append((record["lsn"], record.get("text", record.get("value"))))
        wrong = []
        for name in sorted(set(self.told) | set(logs)):
            told = self.told[name]
            if name not in logs:
                if told.acked and not told.deleting:
                    wrong.append(f"{name} is gone")
                self.told[name] = Told()
                continue
            log, there = logs[name], found[name]
            first, tail = int(log.get("firstLsn", 0)), int(log.get("tailLsn", 0))
            if [lsn for lsn, _ in there] != list(range(first, tail)):
                wrong.append(f"{name}: {first}..{tail} is not dense: {len(there)} records")
            kind = name.split("/")[1]
            forgets = kind in BOUNDS
            if kind == "records" and len(there) < min(int(BOUNDS[kind]["maxRecords"]), tail):
                wrong.append(f"{name} has {len(there)} records of {tail}")
            if not (told.first <= first <= told.first_tried or forgets):
                wrong.append(f"{name} begins at {first}, was trimmed to {told.first}, at most {told.first_tried}")
            if told.acked and tail <= max(told.acked):
                wrong.append(f"{name} ends at {tail}, {max(told.acked)} was acked")
            unsure = set(told.unsure)
            for lsn, text in there:
                if lsn in told.acked and told.acked[lsn] != text or lsn not in told.acked and text not in unsure:
                    wrong.append(f"{name} {lsn} is {text[:40]}, {str(told.acked.get(lsn))[:40]} was acked")
                    break
            texts = [text for _, text in there]
            if len(set(texts)) != len(texts):
                wrong.append(f"{name} has a record twice")
            self.compared += len(there)
            fresh = Told()
            fresh.acked, fresh.first, fresh.first_tried = dict(there), first, first
            self.told[name] = fresh
        return wrong


def create(daemon, writers):
    """The logs with retention; deleted ones are created again by the next append."""
    for writer in writers:
        for kind, bound in BOUNDS.items():
            code, _, said = daemon.call(f"{LOG}/CreateLog", {"log": f"{writer}/{kind}", "config": {"retention": bound}})
            if code:
                raise SystemExit(f"no log could be made: {said}")


def verified(data, tidy=False):
    """Findings of `wald verify` in a closed store; with `tidy` orphaned files count, too."""
    done = run(WALD, "verify", data, "--output", "json")
    if done.returncode:
        return [f"verify ended with {done.returncode}: {(done.stdout + done.stderr).decode()[:600]}"]
    return [json.dumps(finding) for finding in json.loads(done.stdout)["findings"] if tidy]


class Watch(threading.Thread):
    """Watches the sorter until the daemon ends: bytes written, maximum number of runs."""

    def __init__(self, daemon):
        super().__init__(daemon=True)
        self.daemon, self.written, self.runs = daemon, 0, 0
        self.start()

    def run(self):
        try:
            while True:
                metrics = self.daemon.metrics()
                self.written = metrics["wald_sorter_written_bytes_total"]
                self.runs = max(self.runs, sum(name.endswith(".seg") for name in sorted_files(self.daemon.data_dir)))
                time.sleep(0.05)
        except OSError:
            pass


def sorted_files(data):
    """Names of the files in sorted/."""
    try:
        return set(os.listdir(Path(data) / "sorted"))
    except FileNotFoundError:
        return set()


def live(data, ledger, dice, sorts, number):
    """One life under load, and its end. Returns the sorter's work, and whether the kill was aimed at it."""
    daemon = Daemon(data, *SMALL, *FORGETFUL, *(SORTER if sorts else UNSORTED))
    watch = Watch(daemon)
    writers = [Writer(ledger, f"writer-{at}", daemon, f"{seed}-{number}-{at}") for at in range(WRITERS)]
    time.sleep(dice.uniform(0, 0.8))
    aimed = sorts and dice.random() < 0.6
    if aimed:
        known, until = sorted_files(data), time.monotonic() + 20
        while sorted_files(data) <= known and time.monotonic() < until:
            time.sleep(0.0002)
        time.sleep(dice.uniform(0, 0.008))
    ended = [f"{writer.name} ended by itself" for writer in writers if not writer.is_alive()]
    daemon.kill()
    for writer in writers:
        writer.join()
    watch.join()
    return watch, aimed, ended + [line for line in daemon.lines if "panicked" in line]


kills = int(sys.argv[1]) if len(sys.argv) > 1 else sized(20, 8)
seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1_000_000)


@check("Kills while records are sorted: every acknowledged record once, sound stores, no orphaned files")
def kills_of_the_sorter(data):
    print(f"seed {seed}: .ci/run disk/sorting -- {kills} {seed}", flush=True)
    dice, ledger = random.Random(seed), Ledger()
    written, runs, aims, wrong, unsound, panics, stays = 0, 0, 0, [], [], [], []
    with Daemon(data, *SMALL, *UNSORTED) as daemon:
        create(daemon, [f"writer-{at}" for at in range(WRITERS)])
        daemon.stop()
    for number in range(kills):
        watch, aimed, said = live(data, ledger, dice, dice.random() < 0.75, number)
        written, runs, aims, panics = written + watch.written, max(runs, watch.runs), aims + aimed, panics + said
        unsound += [f"after kill {number + 1}: {what}" for what in verified(data)]
        with Daemon(data, *SMALL, "--retention-interval", "1h", *(SORTER if dice.random() < 0.5 else UNSORTED)) as daemon:
            wrong += [f"after kill {number + 1}: {what}" for what in ledger.compare(daemon)]
            stays.append(daemon.stop())
        # The start has removed the files that a kill left over.
        unsound += [f"after start {number + 1}: {what}" for what in verified(data, True)]
        if wrong or unsound or panics:
            break
    expect(f"{number + 1} kills, {aims} of them aimed at the sorter: every acked record is there, once, and nothing else",
           not wrong, "; ".join(wrong[:3]) or f"{ledger.sent} records sent, {ledger.compared} compared, {ledger.deleted} logs deleted")
    expect("every store is sound, without orphaned files", not unsound, "; ".join(unsound[:3]))
    expect("nothing panicked, writers continued until the kill, every stop was clean", not panics and set(stays) == {0}, "; ".join(panics[:3]))
    expect("the sorter sorted", written > 0 and runs > 1, f"{written / (1 << 20):.1f} MiB written, up to {runs} runs")
    expect("logs were deleted, and there were enough records", ledger.deleted and ledger.sent > 100 * kills, ledger.deleted)
    if (wrong or unsound) and os.environ.get("KEEP"):
        shutil.copytree(data, Path(os.environ["KEEP"]), dirs_exist_ok=True)
