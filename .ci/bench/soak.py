"""All kinds of calls at once for half an hour: appends to 2,000 logs, batches over several, trims,
deletions of logs that the next append creates again, cursors, reads, scans that end and scans that follow, clients
that die. The daemon's memory and open files must not grow: the last third of the run is compared with the third
before it; in the first minutes caches fill. Prints the seed, the number of calls, and both over time.
Arguments: SECONDS and a seed.
"""

import collections
import random
import statistics

from common import *

LOGS, RATE, FOLLOWERS = 2_000, 500, 4
# Growth that allocators and caches may cause between two thirds of a run.
MORE, MORE_BYTES, MORE_FILES = 1.1, 8 << 20, 5
WAL, LOG, CURSOR = "wald.v1.WalService", "wald.v1.LogService", "wald.v1.CursorService"


class Callers:
    """Callers that work until stopped; each repeats one kind of call, at random logs."""

    def __init__(self, daemon, seed):
        self.daemon, self.over = daemon, threading.Event()
        self.done, self.refused = collections.Counter(), collections.Counter()
        each = [self.trim, self.delete, self.cursor, self.read, self.scan, self.batch, self.die]
        self.threads = [threading.Thread(target=self.go_on, args=(what, random.Random(f"{seed} {what.__name__}")), daemon=True)
                        for what in each]
        for thread in self.threads:
            thread.start()

    def stop(self):
        self.over.set()
        for thread in self.threads:
            thread.join()

    def go_on(self, what, dice):
        while not self.over.wait(dice.uniform(0.02, 0.2)):
            code, reason = what(dice, f"soak/{dice.randrange(LOGS)}")
            # A log may be deleted, or its tail moved, meanwhile.
            (self.refused if code else self.done)[f"{what.__name__} {reason}".strip()] += 1

    def call(self, method, **request):
        code, answer, said = self.daemon.call(method, request)
        reason = re.search(r'"reason": "(\w+)"', said) if code else None
        return code, answer, reason[1] if reason else ""

    def trim(self, dice, log):
        code, tail, reason = self.call(f"{WAL}/GetTail", log=log)
        if code:
            return code, reason
        first, tail = int(tail["firstLsn"]), int(tail["tailLsn"])
        code, _, reason = self.call(f"{WAL}/Trim", log=log, beforeLsn=dice.randint(first, tail))
        return code, reason

    def delete(self, dice, log):
        code, _, reason = self.call(f"{LOG}/DeleteLog", log=log)
        return code, reason

    def cursor(self, dice, log):
        code, _, reason = self.call(f"{CURSOR}/CommitCursor",
                                    commit={"log": log, "cursor": f"consumer-{dice.randrange(3)}", "lsn": 0})
        return code, reason

    def read(self, dice, log):
        code, _, reason = self.call(f"{WAL}/Read", log=log, maxRecords=dice.randint(1, 500))
        return code, reason

    def scan(self, dice, log):
        done = self.daemon.walctl("scan", "--prefix", log, "--output", "json")
        return done.returncode, ""

    def batch(self, dice, log):
        logs = [log] + [f"soak/{LOGS + number}" for number in range(dice.randint(1, 5))]
        parts = [{"log": each, "records": [{"text": "x" * dice.randint(1, 600)}] * dice.randint(1, 20)} for each in logs]
        code, _, reason = self.call(f"{WAL}/AppendBatch", batches=parts)
        return code, reason

    def die(self, dice, log):
        """A client that follows and disconnects without closing."""
        with self.daemon.load(appends=0, followers=dice.randint(1, 20), prefix="soak"):
            self.over.wait(dice.uniform(0.1, 2))
        return 0, ""


def thirds(values):
    """The medians of the second and of the last third."""
    third = len(values) // 3
    return statistics.median(values[third:2 * third]), statistics.median(values[2 * third:])


seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 1800
seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1_000_000)
print(f"seed {seed}: .ci/run bench/soak -- {seconds} {seed}", flush=True)


@check("Half an hour of all that callers do: memory and open files do not grow")
def soak(temporary):
    with Daemon(temporary / "data", "--segment-bytes", "4MiB") as daemon:
        load = dict(seconds=seconds, appends=10**9, writers=16, connections=4, logs=LOGS, bytes=200, rate=RATE, prefix="soak",
                    attempts=5, tolerate=True)
        memory, files = [], []
        with daemon.load(**load) as writers, daemon.load(appends=0, followers=FOLLOWERS, prefix="soak"):
            began = time.monotonic()
            callers = Callers(daemon, seed)
            while (now := time.monotonic() - began) < seconds:
                memory.append(daemon.anonymous())
                files.append(len(daemon.descriptors()))
                if len(memory) % max(1, seconds // 20) == 0:
                    disk = sum(value for name, value in daemon.metrics().items() if name.startswith("wald_disk_bytes"))
                    print(f"     {now:5.0f} s  {memory[-1] / (1 << 20):7.1f} MiB  {files[-1]:4} files  {disk / (1 << 20):7.0f} MiB of disk",
                          flush=True)
                callers.over.wait(max(0, began + len(memory) - time.monotonic()))
            callers.stop()
            told = writers.result()
        print(f"     appends: {told}")
        print("     done: " + ", ".join(f"{count} {what}" for what, count in sorted(callers.done.items())))
        print("     refused: " + ", ".join(f"{count} {what}" for what, count in sorted(callers.refused.items())))
        expect("appends continued", told["acks"] > RATE * seconds / 4, told["acks"])
        for what in "trim", "delete", "cursor", "read", "scan", "batch", "die":
            expect(f"there was every kind of call: {what}", callers.done[what], callers.done[what])
        expect("only calls on deleted logs and trimmed records were refused", all(what.split()[-1] in ("LOG_NOT_FOUND", "TRIMMED", "LOG_REPLACED")
               for what in callers.refused), "; ".join(what for what in callers.refused))
        before, after = thirds(memory)
        expect("memory does not grow", after <= before * MORE + MORE_BYTES,
               f"{before / (1 << 20):.1f} MiB, then {after / (1 << 20):.1f} MiB; most {max(memory) / (1 << 20):.1f} MiB")
        before, after = thirds(files)
        expect("open files do not", after <= before + MORE_FILES, f"{before:.0f}, then {after:.0f}; most {max(files)}")
        expect("it ends in order", daemon.stop() == 0)
