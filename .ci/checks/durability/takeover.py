"""Tests nodes that share a store in a bucket and take it over from each other. Owners are killed, sleep, end by plan, or are
cut off, nodes get little processor time, and clocks jump, while clients of all nodes write and read. No REPLICATED ack may be
lost, nothing may be there twice, readers never go backwards, `survived_position` names the lost DURABLE acks exactly, and an
old owner acks nothing that was asked after the first ack of the next one. Producers and followers of all languages outlive all
rounds of `nodes`, `namespaces` and `gateway`: their records are there once and in order. A proxy before the bucket cuts off a node;
`namespaces` cuts networks of Linux, in one direction or both, and needs root. The store is the check's own; with --all also
the Versity gateway. Arguments: the number of rounds, a seed, and the nodes' `lease_ttl` in seconds.
"""

import bisect
import random
from collections import Counter, defaultdict

import loads

from clients import *
from clocks import Clock, compiled
from namespaces import Network
from replicas import *

SEED = int(sys.argv[2]) if sys.argv[2:] else random.randrange(1 << 32)
# In seconds; of the nodes. A starved machine needs a longer one.
TTL = int(sys.argv[3]) if sys.argv[3:] else 2
# `restarted` is killed and begins again at a random time, perhaps before anybody has taken over. An owner that is cut off has
# refused connections, no connection that works, or no answers. `all` cuts off all nodes, `slow` delays all of their requests.
# `stutters` lets one node after the other run for a part of the time only. `jumped` sets the clock of one node after the other.
# `alone` cuts off an owner that has named nobody, and which therefore goes on alone; the others begin again meanwhile.
KINDS = ["killed", "slept", "ended", "refused", "silent", "unanswered", "restarted", "all", "slow", "stutters", "jumped", "alone"]
ROUNDS = int(sys.argv[1]) if sys.argv[1:] else sized(100, len(KINDS))
# Cuts between network namespaces, of both directions or of one. The owner must lose the store if it is cut off from the bucket, and must keep
# it otherwise. If only the owner has trouble, the clients go on meanwhile.
BUCKET_CUTS = ["owner <-> bucket", "owner -> bucket", "bucket -> owner", "owner <-> all"]
OTHER_CUTS = ["clients <-> owner", "clients -> owner", "owner -> clients", "stand-by <-> owner", "stand-by -> owner", "owner -> stand-by"]
# The owner must stay.
KEEPERS = [*OTHER_CUTS, "jumped", "alone"]
# Half of the cuts, chosen by the seed, in a default run.
CUT_ROUNDS = int(sys.argv[1]) if sys.argv[1:] else sized(30, 5)
ENCRYPTED = ["killed", "slept", "ended", "silent"]
CONTENDED = ["killed", "silent", "ended", "slept", "restarted", "refused", "unanswered", "all"]
CUTS = ["refused", "silent", "unanswered"]
# Seconds of a node that stutters.
RUNS, STOPS = 0.05, 0.3
HOUR = 3600
# Records per second of each producer of a language.
RATE = 10
# Writers that know all nodes.
WRITERS = {f"{kind}/{number}" for kind in "prd" for number in range(3)}
# Each round waits until every node is there again.
PATIENCE = 60 * TTL
# Most seconds of a pause after an unplanned end and after a planned one, of optimised nodes on a quiet machine: `pauses`.
AIMS = {"unplanned": TTL + 2, "ended": 1}
# These bounds of the others only find a take-over that hangs: other checks run at the same time, the builds are not optimised,
# and with --all the store has many files.
LONGEST = {"unplanned": TTL + 28, "ended": 30}


class Apart:
    """Nodes with network namespaces of their own. The clients have one, too, and the bucket."""

    def __init__(self, network, store, names):
        self.network, self.base, self.inside = network, store.base, network.inside
        self.addresses = {name: f"{network.addresses[name]}:6925" for name in names}

    def bucket(self, _):
        return self.base

    def close(self):
        """The network ends with the check."""


class Clients:
    """The load, and the facts of its ledger."""

    def __init__(self, directory, places):
        interpreter, _ = runner("python")
        self.path = directory / "ledger"
        self.errors = (directory / "load.log").open("w")
        command = [interpreter, ROOT / ".ci/lib/takeover_load.py", self.path, *map("=".join, places.addresses.items())]
        with places.inside("clients"):
            self.process = subprocess.Popen([str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
                                            text=True, env=clean_environment())
        self.offset = 0
        self.acks, self.tails, self.seen, self.ended = [], [], [], []
        self.bad, self.held = Counter(), 0
        # The outcome of each append without an ack, by its payload.
        self.outcomes = {}

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
                    writer, number, reason, outcome, begin, end = facts
                    self.outcomes[f"{writer} {number}"] = outcome
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


class Languages:
    """A producer and a follower of each language. They know all nodes, not all in the same order, and have the level REPLICATED,
    which is the sync mode of the nodes."""

    PREFIX = "languages/"

    def __init__(self, check, places):
        # Kept after the run.
        directory = SCRATCH / f"takeover-{check}-languages"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        self.places, self.stop, self.scanned = places, directory / "stop", directory / "scanned"
        self.endpoints = list(places.addresses.values())
        self.logs = [f"{self.PREFIX}{language}" for language in BUILDERS]
        self.producers, self.followers = [], []
        with places.inside("clients"):
            for number, (language, log) in enumerate(zip(BUILDERS, self.logs)):
                self.producers.append(loads.producer(language, language, log, RATE, self.environment(number), directory))
                self.followers.append(loads.follower(language, f"follower-{language}", self.PREFIX, len(self.logs), self.environment(number + 1), directory))

    def environment(self, first):
        first %= len(self.endpoints)
        return clean_environment(WALD_ENDPOINT=",".join(self.endpoints[first:] + self.endpoints[:first]), WALD_STOP=str(self.stop))

    def marks(self):
        return [part.out.stat().st_size for part in self.followers]

    def lacking(self, marks):
        """Each follower that has not seen a new record of each producer since the marks, and these logs."""
        lacking = {}
        for part, mark in zip(self.followers, marks):
            with part.out.open() as file:
                file.seek(mark)
                seen = {line.partition(" ")[0] for line in file}
            if missing := [log for log in self.logs if log not in seen]:
                lacking[part.name] = missing
        return lacking

    def troubles(self):
        return [f"{part.name}: {part.trouble()}" for part in self.producers + self.followers if part.process.poll() is not None]

    def finish(self):
        self.stop.touch()
        loads.all_end(self.producers, PATIENCE)
        loads.all_end(self.followers, PATIENCE)
        with self.places.inside("clients"):
            found = loads.scanned({"WALD_ENDPOINT": ",".join(self.endpoints)}, self.PREFIX)
        self.scanned.write_text("".join(f"{line}\n" for line in found))
        loads.judge(self.producers, self.followers, found)

    def close(self):
        for part in self.producers + self.followers:
            harness.end_group(part.process)


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

    def faults(self, outcomes):
        """Records that are there twice, holes, and producers' and writers' records that are out of order. A cut network may deliver
        an append after its writer has given it up: with the outcome UNKNOWN it may be behind later ones."""
        faults, where = [], {}
        tails, last = Counter(), defaultdict(lambda: -1)
        for (log, lsn), payload in sorted(self.records.items()):
            if (other := where.setdefault(payload, (log, lsn))) != (log, lsn):
                faults.append(f"{payload} is at {other} and at {log}/{lsn}")
            if lsn != tails[log]:
                faults.append(f"{log} has a hole below {lsn}")
            tails[log] = lsn + 1
            if (parts := re.fullmatch(r"(.+)[ :](\d+)", payload)) is None:
                # The end of a runner.
                continue
            writer, number = parts[1], int(parts[2])
            # A producer's records have no hole; others may have failed. Requests to one node are sent side by side.
            is_producer = log.startswith(("p/", Languages.PREFIX))
            if outcomes.get(payload) == "UNKNOWN":
                continue
            if not writer.startswith("n/") and (number <= last[writer] or (is_producer and number != lsn)):
                faults.append(f"{payload} is at {log}/{lsn}, after {last[writer]}")
            last[writer] = number
        return faults


class Drill(Nodes):
    """Nodes, their clients, and the judgement of each round."""

    def __init__(self, check, directory, store, places, with_languages=False, keepers=KEEPERS, binary=None, longest=LONGEST):
        library = compiled(directory)
        self.clocks = {name: Clock(library, directory / f"{name}.clock") for name in places.addresses}
        super().__init__(f"takeover-{check}", directory, store, places, TTL, "--insecure-listen", "--sync-mode", "replicated",
                         binary=binary, variables=lambda name: self.clocks[name].variables)
        self.longest = longest
        self.check, self.keepers, self.draw = check, keepers, random.Random(SEED)
        self.truth, self.waiting, self.judged = Truth(), [], 0
        self.pauses, self.counts = defaultdict(list), Counter()
        self.kinds = defaultdict(lambda: (Counter(), []))
        self.clients, self.languages, self.with_languages, self.directory = None, None, with_languages, directory

    def __enter__(self):
        try:
            self.begin(PATIENCE)
            self.clients = Clients(self.directory, self.places)
            self.settle(f"{len(self.nodes)} nodes begin")
            if self.with_languages:
                # They do not begin without a server.
                self.languages = Languages(self.check, self.places)
                self.settle("the clients of all languages begin")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for load in self.languages, self.clients:
            if load is not None:
                load.close()
        self.close()

    def settle(self, what):
        """Waits until all nodes are there, every writer has an ack, and each follower has a new record of each producer."""
        until = time.monotonic() + PATIENCE
        marks = self.languages.marks() if self.languages else []
        lacking = lambda: self.languages.lacking(marks) if self.languages else {}
        whole = wait_until(self.revive, until - time.monotonic())
        since = time.monotonic()
        acked = wait_until(lambda: self.clients.acked_since(since) >= WRITERS, until - since)
        seen = wait_until(lambda: not lacking(), until - time.monotonic())
        ended = self.clients.ended + (self.languages.troubles() if self.languages else [])
        if not whole or not acked or not seen or ended:
            raise SystemExit(f"{what}: the store is {'' if whole else 'not '}whole; without an ack: {sorted(WRITERS - self.clients.acked_since(since))}; "
                             f"followers that see no new records: {lacking()}; ended: {ended[:3]}\n{self.said()}")

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

        ways = getattr(self.places, "ways", {})
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
                self.ask_to_end(owner)
                code = node.process.wait(PATIENCE)
                # A starved owner can lose its lease while it stops.
                names_another = code == 78 and "owns the store in term" in node.said()
                expect(f"  {owner} ends with 0, or names the node that was faster", code == 0 or names_another, node.said())
                taken()
                node.start()
            case "all":
                for way in ways.values():
                    way.mode = self.draw.choice(CUTS)
                time.sleep(seconds)
                for way in ways.values():
                    way.mode = None
            case "slow":
                for way in ways.values():
                    way.delay = 0.1
                time.sleep(seconds)
                for way in ways.values():
                    way.delay = 0
            case "stutters":
                for one in self.draw.sample(list(self.nodes.values()), len(self.nodes)):
                    until = time.monotonic() + 2 * TTL
                    while time.monotonic() < until:
                        one.signal(signal.SIGSTOP)
                        time.sleep(STOPS)
                        one.signal(signal.SIGCONT)
                        time.sleep(RUNS)
            case "jumped":
                for one in self.draw.sample(list(self.nodes.values()), len(self.nodes)):
                    for ahead in self.draw.sample([HOUR, -HOUR], 2):
                        self.clocks[one.name].set_ahead(ahead)
                        time.sleep(1.25 * TTL)
                    self.clocks[one.name].set_ahead(0)
            case "alone":
                others = [self.nodes[name] for name in self.nodes if name != owner]
                for one in others:
                    one.kill()
                expect("  the owner names nobody", wait_until(lambda: not self.record().get("stand_bys"), PATIENCE))
                ways[owner].mode = self.draw.choice(CUTS)
                for one in others:
                    one.start()
                expect("  the others have the store", wait_until(lambda: all(self.beats(one.name, "stand_by") for one in others), PATIENCE))
                time.sleep(1.5 * TTL)
                ways[owner].mode = None
            case _ if kind in BUCKET_CUTS:
                self.cut(kind, owner)
                lasts()
                self.places.network.heal()
            case _ if kind in OTHER_CUTS:
                since = time.monotonic()
                self.cut(kind, owner)
                time.sleep(1.25 * TTL)
                expect("  all writers go on", wait_until(lambda: self.clients.acked_since(since) >= WRITERS, PATIENCE))
                self.places.network.heal()
            case _:
                ways[owner].mode = kind
                lasts()
                ways[owner].mode = None

    def ask_to_end(self, owner):
        """By a signal, or by a command that names another node."""
        if self.draw.random() < 0.5:
            self.nodes[owner].signal(signal.SIGTERM)
            return
        other = self.draw.choice([name for name in self.nodes if name != owner])
        said = []

        def asked():
            done = run(programs() / "walctl", "--endpoint", self.places.addresses[other], "cluster", "hand-over")
            said.append(done.stderr.decode().strip()[-300:])
            return done.returncode == 0

        # It is refused until a stand-by has a current copy.
        with self.places.inside("clients"):
            expect(f"  walctl asks {other}, and {owner} hands over", wait_until(asked, PATIENCE), said[-1])

    def cut(self, kind, owner):
        """Cuts the network of one direction (`->`) or both."""
        one, arrow, other = kind.split(" ")
        network = self.places.network
        others = {"owner": [owner], "stand-by": [self.draw.choice([name for name in self.nodes if name != owner])],
                  "all": [name for name in network.addresses if name != owner]}
        for place in others.get(one, [one]):
            for target in others.get(other, [other]):
                network.cut(place, target)
                if arrow == "<->":
                    network.cut(target, place)

    def round(self, number, kind, again=False):
        if not wait_until(self.is_whole, PATIENCE):
            raise SystemExit(f"round {number}: the store is not whole any more\n{self.said()}")
        before = self.record()
        owner, began = before["node"], time.monotonic()
        at = time.strftime("%T", time.gmtime())
        what = f"round {number}, {owner} {kind}"
        self.strike(kind, owner)
        self.settle(what)
        ended, after = time.monotonic(), self.record()
        pauses = self.paused(began, ended)
        moved = after["term"] != before["term"]
        # Some faults are a pause by themselves.
        self.pauses[kind if kind in ("all", "slow", "ended", "stutters") else "unplanned" if moved else "stayed"] += pauses
        counts = self.counts.copy()
        self.judge(what)
        counts = self.counts - counts
        self.kinds[kind][0].update({**counts, "rounds": 1, "moved": moved})
        self.kinds[kind][1].extend(pauses)
        print(f"     {at} {what}: {after['node']} owns in term {after['term']}; {ended - began:.1f} s; pauses of writers {pauses[0]:.2f} "
              f"to {pauses[-1]:.2f} s; {counts['lost']} DURABLE acks lost", flush=True)
        # A start ends with 69 if the bucket gives no answer; the init system tries again.
        cut = kind in (*CUTS, *BUCKET_CUTS, "all", "alone") or (kind == "jumped" and "jumped" not in self.keepers)
        expect(f"{what}: no node ends by itself, except without the bucket", not self.ends or (cut and {code for _, code in self.ends} == {69}), self.ends)
        self.counts.update(f"{name} ended by itself with {code}" for name, code in self.ends)
        self.ends = []
        if kind in self.keepers and moved and not again:
            # A busy machine may have stopped the owner for its ttl.
            self.round(number, kind, again=True)
        elif kind in self.keepers:
            expect(f"{what}: the owner keeps the store, at least the second time", not moved, f"{after['node']} in term {after['term']}")

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
            "nothing is there twice or out of order": self.truth.faults(clients.outcomes),
            "no record of a NOT_APPLIED append is there": [payload for payload in there.values() if clients.outcomes.get(payload) == "NOT_APPLIED"],
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
        if self.languages:
            self.languages.finish()
        clients.ask("stop")
        self.judge("at the end")
        again = Truth()
        again.add(clients.ask("truth", {}))
        changed = sum(again.records.get(where) != payload for where, payload in self.truth.records.items())
        # An append that its client has given up may arrive at the very end.
        late = len(again.records) - len(self.truth.records)
        expect("at the end: each record is as it was seen first", not changed and late >= 0, f"{changed} of {len(self.truth.records)} differ, {late} came late")
        missing = [ack for ack in clients.acks if ack.level == "REPLICATED" and again.records.get((ack.log, ack.lsn)) != ack.payload]
        expect("at the end: every REPLICATED ack of all rounds is there", not missing, missing[:3] or self.counts["REPLICATED"])
        followed, wrong = Counter(), []
        for log, lsn, payload in clients.seen:
            if lsn != followed[log] or again.records.get((log, lsn)) != payload:
                wrong.append((log, lsn, payload))
            followed[log] = lsn + 1
        lacks = {log: end for log, end in self.truth.next.items() if followed[log] < end}
        expect("the follower has seen each record once and in order", not wrong and not lacks, wrong[:3] or lacks or len(clients.seen))
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
        """Prints the rounds and the pauses of the writers, and states bounds of the pauses."""
        print("     kind               rounds  taken over  REPLICATED   DURABLE      lost   p50    p99 (s)")
        for kind, (counts, pauses) in self.kinds.items():
            print(f"     {kind:18} {counts['rounds']:6} {counts['moved']:11} {counts['REPLICATED']:11} {counts['DURABLE']:9} {counts['lost']:9} "
                  f"{part_of(pauses, 0.5):5.2f} {part_of(pauses, 0.99):6.2f}", flush=True)
        for kind, pauses in sorted(self.pauses.items()):
            most = part_of(pauses, 0.99)
            print(f"     pauses, {kind}: {len(pauses)}; p50 {part_of(pauses, 0.5):.2f}, p99 {most:.2f}, longest {max(pauses):.2f} s", flush=True)
            if bound := self.longest.get(kind):
                expect(f"pauses, {kind}: p99 is at most {bound} s", most <= bound, f"{most:.2f} s")


def part_of(values, part):
    """The value below which this part of the values is."""
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


def drill(name, directory, store, places, kinds, **options):
    draw = random.Random(SEED)
    print(f"seed {SEED}: .ci/run durability/takeover:{name} -- {len(kinds)} {SEED} {TTL}", flush=True)
    draw.shuffle(kinds)
    with Drill(name, directory, store, places, **options) as rounds:
        for number, kind in enumerate(kinds):
            rounds.round(number, kind)
        rounds.finish()
        print(f"     {dict(rounds.counts)}", flush=True)
        rounds.report()


def repeated(kinds, count):
    return [kinds[number % len(kinds)] for number in range(count)]


@check("Owners are killed, sleep, end by plan, or lose the bucket: the other node takes over without loss")
def nodes(directory):
    with own(directory) as (store, _):
        drill("nodes", directory, store, Here(store, "ab"), repeated(KINDS, ROUNDS), with_languages=True)


@check("The same with encrypted records and a key for each log: each next owner has the keys from the bucket")
def encrypted(directory):
    with own(directory) as (store, _):
        encrypt(directory, store)
        drill("encrypted", directory, store, Here(store, "ab"), repeated(ENCRYPTED, sized(ROUNDS, min(ROUNDS, len(ENCRYPTED)))))


@check("Networks between owner, stand-by, clients and bucket are cut, in one or both directions: the same holds")
def namespaces(directory):
    names = sized("abc", "ab")
    with Network([*names, "clients", "bucket"]) as network, contextlib.ExitStack() as servers:
        network.cut("a", "b")
        expect("a cut has one direction", not network.passes("a", "b") and network.passes("b", "a"))
        network.heal()
        expect("a cut ends", network.passes("a", "b"))
        with network.inside("bucket"):
            store, _ = servers.enter_context(own(directory, host=network.addresses["bucket"]))
        drill("namespaces", directory, store, Apart(network, store, names), repeated(random.Random(SEED).sample(BUCKET_CUTS + OTHER_CUTS, len(BUCKET_CUTS + OTHER_CUTS)), CUT_ROUNDS), with_languages=True)


@check("The same with two stand-bys, which contend for the store")
def contenders(directory):
    with own(directory) as (store, _):
        drill("contenders", directory, store, Here(store, "abc"), repeated(CONTENDED, max(1, ROUNDS // 4)))


@check("The same with the Versity gateway as the store")
def gateway(directory):
    with versity(directory) as store:
        # As S3 does, the gateway refuses all requests of a node whose clock is off by more than 15 minutes. It is cut off.
        drill("gateway", directory, store, Here(store, "abc"), repeated(KINDS, ROUNDS), keepers=["alone"], with_languages=True)


@check("p99 of writers' pauses, optimised nodes: the lease and 2 s when an owner is killed, 1 s when it ends by plan")
def pauses(directory):
    with versity(directory) as store:
        drill("pauses", directory, store, Near(store, "ab"), repeated(["ended", "killed", "ended", "slept"], sized(ROUNDS, min(ROUNDS, 8))),
              binary=optimised() / "wald", longest=AIMS)


@check("A store that forgets rows loses REPLICATED acks, and an old owner acks too late: the drill sees both")
def forgotten(directory):
    with own(directory) as (store, _), Drill("forgotten", directory, store, Here(store, "ab")) as rounds:
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
