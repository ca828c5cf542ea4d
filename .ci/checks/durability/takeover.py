"""Tests nodes that share a store in a bucket and take it over from each other. Owners are killed, sleep, end by plan, or are
cut off from the bucket, while clients of all nodes write and read. No REPLICATED ack may be lost, nothing may be there twice,
readers never go backwards, `survived_position` names the lost DURABLE acks exactly, and an old owner acks nothing that was
asked after the first ack of the next one. The store is the check's own; with --all also the Versity gateway.
"""

import bisect
import random
from collections import Counter, defaultdict

from clients import *
from replicas import *

SEED = int(sys.argv[2]) if sys.argv[2:] else random.randrange(1 << 32)
# In seconds; the values of the nodes.
TTL = 2
# `restarted` is killed and begins again at a random time, perhaps before anybody has taken over. An owner that is cut off has
# refused connections, no connection that works, or no answers. `all` cuts off all nodes, `slow` delays all of their requests.
KINDS = ["killed", "slept", "ended", "refused", "silent", "unanswered", "restarted", "all", "slow"]
ROUNDS = int(sys.argv[1]) if sys.argv[1:] else sized(100, len(KINDS))
CONTENDED = ["killed", "silent", "ended", "slept", "restarted", "refused", "unanswered", "all"]
CUTS = ["refused", "silent", "unanswered"]
# Each round waits until every node is there again.
PATIENCE = 60
# Most seconds of a pause. The aims are TTL + 2 and 1, on a quiet machine with optimised builds. These bounds only find a take-over
# that hangs: other checks run at the same time, the builds are not optimised, and with --all the store has many files.
LONGEST, LONGEST_PLANNED = TTL + 28, 30


class Clients:
    """The load, and the facts of its ledger."""

    def __init__(self, directory, nodes):
        interpreter, _ = runner("python")
        self.path = directory / "ledger"
        self.errors = (directory / "load.log").open("w")
        command = [interpreter, ROOT / ".ci/lib/takeover_load.py", self.path, *(f"{node.name}={node.listen}" for node in nodes)]
        self.process = subprocess.Popen([str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
                                        text=True, env=clean_environment())
        self.offset = 0
        self.acks, self.tails, self.seen, self.ended = [], [], [], []
        self.bad, self.held = Counter(), 0

    def ask(self, what, detail=None):
        self.process.stdin.write(json.dumps([what, detail]) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"the load has ended: {Path(self.errors.name).read_text()[-2000:]}")
        return json.loads(line)

    def read(self):
        """Takes the new lines of the ledger."""
        if not self.path.exists():
            return
        with self.path.open() as file:
            file.seek(self.offset)
            text = file.read()
        text = text[:text.rfind("\n") + 1]
        self.offset += len(text.encode())
        for line in text.splitlines():
            kind, *facts = json.loads(line)
            match kind:
                case "ack":
                    self.acks.append(Ack(*facts))
                case "tail":
                    self.tails.append(facts)
                case "seen":
                    self.seen.append(facts)
                case "bad":
                    writer, reason, outcome, begin, end = facts
                    self.bad[f"{reason}, {outcome}"] += 1
                    # An old owner has held it, asleep or without its bucket.
                    self.held += writer.startswith("n/") and end - begin > TTL / 2
                case "ended":
                    self.ended.append(facts)

    def acked_since(self, moment):
        """The writers of all nodes whose append began after a moment and was acknowledged."""
        self.read()
        last = bisect.bisect_left(self.acks, moment, key=lambda ack: ack.end)
        return {ack.writer for ack in self.acks[last:] if ack.begin > moment and not ack.writer.startswith("n/")}

    def close(self):
        self.process.kill()
        self.process.wait()
        self.errors.close()


class Ack:
    def __init__(self, writer, level, log, number, lsn, position, epoch, begin, end):
        self.writer, self.level, self.log, self.number, self.lsn = writer, level, log, number, lsn
        self.position, self.epoch, self.begin, self.end = position, epoch, begin, end
        self.payload = f"{writer} {number}"

    def __repr__(self):
        return f"{self.payload} at {self.log}/{self.lsn}, position {self.position}, epoch {self.epoch}, {self.begin:.3f} to {self.end:.3f}"


def late_acks(acks):
    """The acks of an epoch whose append began after the first ack of a later one: two owners at a time."""
    first = {}
    for ack in acks:
        first[ack.epoch] = min(first.get(ack.epoch, ack.end), ack.end)
    # The end of an epoch is the first ack of any later one.
    ends, end = {}, float("inf")
    for epoch in sorted(first, reverse=True):
        ends[epoch], end = end, min(end, first[epoch])
    return [ack for ack in acks if ack.begin > ends[ack.epoch]]


def backward_reads(tails, acks):
    """The questions for a tail that give less than an earlier answer, or than a REPLICATED ack before the question."""
    known = [(end, lsn) for _, _, lsn, _, end in tails]
    known += [(ack.end, ack.lsn + 1) for ack in acks if ack.log == "p/0" and ack.level == "REPLICATED"]
    known.sort()
    ends, most = [end for end, _ in known], []
    for _, lsn in known:
        most.append(max(lsn, most[-1] if most else 0))
    before = lambda begin: bisect.bisect_left(ends, begin)
    return [tail for tail in tails if (place := before(tail[3])) and tail[2] < most[place - 1]]


class Truth:
    """The records of the level REPLICATED, as an owner shows them. A record must stay."""

    def __init__(self):
        self.records, self.next = {}, {}

    def add(self, found):
        for log, lsn, payload in found:
            self.records[log, lsn] = payload
            self.next[log] = lsn + 1

    def faults(self):
        """Records that are there twice, holes, and producers' and writers' records that are out of order."""
        faults, where = [], {}
        tails, last = Counter(), defaultdict(lambda: -1)
        for (log, lsn), payload in sorted(self.records.items()):
            if (other := where.setdefault(payload, (log, lsn))) != (log, lsn):
                faults.append(f"{payload} is at {other} and at {log}/{lsn}")
            if lsn != tails[log]:
                faults.append(f"{log} has a hole below {lsn}")
            tails[log] = lsn + 1
            writer, _, number = payload.partition(" ")
            # A producer's records have no hole; others may have failed. Requests to one node are sent side by side.
            if not writer.startswith("n/") and (int(number) <= last[writer] or (writer.startswith("p/") and int(number) != lsn)):
                faults.append(f"{payload} is at {log}/{lsn}, after {last[writer]}")
            last[writer] = int(number)
        return faults


class Drill(Nodes):
    """Nodes, their clients, and the judgement of each round."""

    def __init__(self, check, directory, store, names):
        super().__init__(f"takeover-{check}", directory, store, names, TTL)
        self.draw = random.Random(SEED)
        self.truth, self.waiting, self.judged = Truth(), [], 0
        self.pauses, self.counts = defaultdict(list), Counter()
        self.clients, self.directory = None, directory

    def __enter__(self):
        try:
            self.begin(PATIENCE)
            self.clients = Clients(self.directory, self.nodes.values())
            self.settle(f"{len(self.nodes)} nodes begin")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.clients is not None:
            self.clients.close()
        self.close()

    def settle(self, what):
        """Waits until all nodes are there and every writer has an ack."""
        until = time.monotonic() + PATIENCE
        writers = {f"{kind}/{number}" for kind in "prd" for number in range(3)}
        while True:
            whole = wait_until(self.revive, until - time.monotonic())
            since = time.monotonic()
            acked = wait_until(lambda: self.clients.acked_since(since) >= writers, until - since)
            # An owner that just began may name nodes that begin again.
            if not whole or not acked or self.is_whole():
                break
        if not whole or not acked or self.clients.ended:
            lacking = writers - self.clients.acked_since(since)
            raise SystemExit(f"{what}: the store is {'' if whole else 'not '}whole; without an ack: {sorted(lacking)}; "
                             f"ended: {self.clients.ended[:3]}\n{self.said()}")

    def strike(self, kind, owner):
        """The fault of a round, until its end."""
        node, seconds = self.nodes[owner], self.draw.uniform(0.8, 2.5) * TTL

        def taken():
            expect(f"  another node than {owner} serves", wait_until(lambda: self.serves_other(owner), PATIENCE))

        def lasts():
            # Some end before another node serves, perhaps while it takes over.
            if self.draw.random() < 0.75:
                taken()
                # Old owners get requests while the new one acks.
                time.sleep(0.3)
            else:
                time.sleep(seconds)

        match kind:
            case "killed":
                node.kill()
                taken()
                node.start()
            case "restarted":
                node.kill()
                time.sleep(seconds)
                node.start()
            case "slept":
                node.signal(signal.SIGSTOP)
                lasts()
                node.signal(signal.SIGCONT)
            case "ended":
                node.signal(signal.SIGTERM)
                expect(f"  {owner} ends with 0", node.process.wait(PATIENCE) == 0, node.process.returncode)
                taken()
                node.start()
            case "all":
                for one in self.nodes.values():
                    one.way.mode = self.draw.choice(CUTS)
                time.sleep(seconds)
                for one in self.nodes.values():
                    one.way.mode = None
            case "slow":
                for one in self.nodes.values():
                    one.way.delay = 0.1
                time.sleep(seconds)
                for one in self.nodes.values():
                    one.way.delay = 0
            case _:
                node.way.mode = kind
                lasts()
                node.way.mode = None

    def round(self, number, kind):
        owner, began = self.record()["node"], time.monotonic()
        at = time.strftime("%T", time.gmtime())
        what = f"round {number}, {owner} {kind}"
        self.strike(kind, owner)
        self.settle(what)
        ended, next_owner = time.monotonic(), self.record()["node"]
        pauses = self.paused(began, ended)
        # A cut of all is a pause by itself.
        moved = next_owner != owner
        self.pauses[kind if kind in ("all", "slow", "ended") else "unplanned" if moved else "stayed"] += pauses
        lost = self.counts["lost"]
        self.judge(what)
        print(f"     {at} {what}: {next_owner} owns in term {self.record()['term']}; {ended - began:.1f} s; pauses of writers {pauses[0]:.2f} "
              f"to {pauses[-1]:.2f} s; {self.counts['lost'] - lost} DURABLE acks lost", flush=True)
        # A start ends with 69 if the bucket gives no answer; the init system tries again.
        cut = kind in (*CUTS, "all")
        self.counts.update(f"{name} ended by itself with {code}" for name, code in self.ends)
        codes = {code for _, code in self.ends}
        expect(f"{what}: no node ends by itself, except without the bucket", not codes or (cut and codes == {69}), self.ends)
        self.ends = []

    def paused(self, began, ended):
        """The longest time without an ack of each writer that knows all nodes."""
        last, longest = {}, Counter()
        for ack in self.clients.acks:
            if ack.writer.startswith("n/"):
                continue
            if began < ack.end <= ended:
                longest[ack.writer] = max(longest[ack.writer], ack.end - last.get(ack.writer, began))
            last[ack.writer] = ack.end
        return sorted(longest.values())

    def faults(self):
        """Each fact, and its faults since the last call. Counts the new acks, and the DURABLE ones that are lost."""
        clients, there = self.clients, self.truth.records
        clients.read()
        # The records are newer than these acks.
        self.truth.add(clients.ask("truth", self.truth.next))
        new, self.judged = clients.acks[self.judged:], len(clients.acks)
        missing, wrong, later, ends = [], [], [], {}
        current = max(ack.epoch for ack in clients.acks)
        self.counts.update(ack.level for ack in new)
        for ack in self.waiting + new:
            survived = there.get((ack.log, ack.lsn)) == ack.payload
            if ack.level == "REPLICATED":
                missing += [] if survived else [ack]
            elif ack.epoch == current:
                later.append(ack)
            else:
                if ack.epoch not in ends:
                    ends[ack.epoch] = clients.ask("survived", ack.epoch)
                self.counts["lost"] += not survived
                if ends[ack.epoch] is None or survived != (ack.position < ends[ack.epoch]):
                    wrong.append((ack, ends[ack.epoch], survived))
        self.waiting = later
        return {
            "every REPLICATED ack is there": missing,
            "survived_position names the lost DURABLE acks": wrong,
            "nothing is there twice or out of order": self.truth.faults(),
            "no two owners ack at a time": late_acks(clients.acks),
            "no reader goes backwards": backward_reads(clients.tails, clients.acks),
            "no writer or reader gives up": clients.ended,
        }

    def judge(self, what):
        for fact, found in self.faults().items():
            expect(f"{what}: {fact}", not found, f"{len(found)}: {found[:3]}" if found else "")

    def finish(self):
        """Ends the clients and nodes, and judges all acks and records once more."""
        clients = self.clients
        clients.ask("stop")
        self.judge("at the end")
        again = Truth()
        again.add(clients.ask("truth", {}))
        changed = sum(again.records.get(where) != payload for where, payload in self.truth.records.items())
        expect("at the end: each record is as it was seen first", not changed and len(again.records) == len(self.truth.records),
               f"{changed} of {len(self.truth.records)} differ")
        missing = [ack for ack in clients.acks if ack.level == "REPLICATED" and again.records.get((ack.log, ack.lsn)) != ack.payload]
        expect("at the end: every REPLICATED ack of all rounds is there", not missing, missing[:3] or self.counts["REPLICATED"])
        followed, wrong = Counter(), []
        for log, lsn, payload in clients.seen:
            if lsn != followed[log] or again.records.get((log, lsn)) != payload:
                wrong.append((log, lsn, payload))
            followed[log] = lsn + 1
        expect("the follower has seen each record once and in order", not wrong and followed == Counter(again.next), wrong[:3] or len(clients.seen))
        # The others first, so that nobody takes over.
        owner = self.record()["node"]
        for name in sorted(self.nodes, key=lambda name: name == owner):
            node = self.nodes[name]
            node.signal(signal.SIGTERM)
            # A stand-by that ends is not available: 69.
            code = node.process.wait(PATIENCE)
            expect(f"{name} ends by plan", code in (0, 69), code)
        print(f"     {self.counts['REPLICATED']} REPLICATED acks, {self.counts['DURABLE']} DURABLE ones, {self.counts['lost']} of them lost; "
              f"{len(clients.tails)} tails; {len(again.records)} records; appends without an ack: {dict(clients.bad)}, "
              f"{clients.held} of them held by one node for more than {TTL / 2:.0f} s", flush=True)

    def report(self):
        """Prints the pauses of the writers, and states their bounds."""
        for kind, pauses in sorted(self.pauses.items()):
            pauses.sort()
            at = lambda part: pauses[min(int(len(pauses) * part), len(pauses) - 1)]
            print(f"     pauses, {kind}: {len(pauses)}; p50 {at(0.5):.2f}, p99 {at(0.99):.2f}, longest {pauses[-1]:.2f} s", flush=True)
            if bound := {"unplanned": LONGEST, "ended": LONGEST_PLANNED}.get(kind):
                expect(f"pauses, {kind}: p99 is at most {bound} s", at(0.99) <= bound, f"{at(0.99):.2f} s")


def drill(name, directory, store, names, kinds):
    draw = random.Random(SEED)
    print(f"seed {SEED}: .ci/run durability/takeover:{name} -- {len(kinds)} {SEED}", flush=True)
    draw.shuffle(kinds)
    with Drill(name, directory, store, names) as rounds:
        for number, kind in enumerate(kinds):
            rounds.round(number, kind)
        rounds.finish()
        print(f"     {dict(rounds.counts)}", flush=True)
        print(f"     rounds: {dict(Counter(kinds))}", flush=True)
        rounds.report()


def repeated(kinds, count):
    return [kinds[number % len(kinds)] for number in range(count)]


@check("Owners are killed, sleep, end by plan, or lose the bucket: the other node takes over without loss")
def nodes(directory):
    with own(directory) as (store, _):
        drill("nodes", directory, store, "ab", repeated(KINDS, ROUNDS))


@check("The same with two stand-bys, which contend for the store")
def contenders(directory):
    with own(directory) as (store, _):
        drill("contenders", directory, store, "abc", repeated(CONTENDED, max(1, ROUNDS // 4)))


@check("The same with the Versity gateway as the store")
def gateway(directory):
    with versity(directory) as store:
        drill("gateway", directory, store, "abc", repeated(KINDS, ROUNDS))


@check("A store that forgets rows loses REPLICATED acks, and an old owner acks too late: the drill sees both")
def forgotten(directory):
    with own(directory) as (store, _), Drill("forgotten", directory, store, "ab") as rounds:
        owner = rounds.record()["node"]
        kept = lambda: sorted(path for path in (store.objects / BUCKET / PREFIX / "shards/0/db/wal").iterdir() if path.stat().st_size)
        before = len(kept())
        # The first rows make the logs.
        expect("there are more rows", wait_until(lambda: len(kept()) > before + 20, PATIENCE))
        rounds.nodes[owner].kill()
        for row in kept()[-5:]:
            row.unlink()
        expect("the other node takes over", wait_until(lambda: rounds.serves_other(owner), PATIENCE))
        expect("it acks", wait_until(lambda: rounds.clients.acked_since(time.monotonic() - 1), PATIENCE))
        faults = rounds.faults()
        missing = faults["every REPLICATED ack is there"]
        expect("the drill sees that REPLICATED acks are lost", missing, f"{len(missing)} acks")
        expect("the drill sees that a reader goes backwards", faults["no reader goes backwards"])
        expect("no owner acks too late", not faults["no two owners ack at a time"])
        acks = rounds.clients.acks
        late = next(ack for ack in reversed(acks) if ack.epoch == acks[0].epoch)
        late.begin, late.end = acks[-1].end, acks[-1].end + 0.1
        expect("the drill sees an ack that is too late", late_acks(acks) == [late], late)
