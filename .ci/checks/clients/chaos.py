"""16 producers and 8 followers (four and two of each language) use four logs of one daemon for SECONDS (75).
At random the daemon is killed or stopped, connections are dropped, and answers are lost or delayed. In the end
each record that a producer reports as appended must exist exactly once and in order, and nothing else.
Every follower must have seen exactly these records in the same order. Prints the seed and counts.
Arguments: SECONDS and a seed.
"""

import random
from collections import Counter

from clients import *

LOGS = [f"chaos/{number}" for number in range(4)]
# Records per second of each producer. Eight followers in four languages can keep up with it on two cores.
RATE = 50
PATIENCE = 180


class Part:
    """A runner in one of its modes of chaos; its output goes to a file."""

    def __init__(self, name, command, environment, directory):
        self.name = name
        self.out, self.err = directory / f"{name}.out", directory / f"{name}.err"
        with open(self.out, "w") as out, open(self.err, "w") as err:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                            env=environment, start_new_session=True)

    def ended(self, seconds):
        """Whether it ended with status 0, within this number of seconds."""
        try:
            return self.process.wait(timeout=max(0, seconds)) == 0
        except subprocess.TimeoutExpired:
            return False

    def lines(self):
        return self.out.read_text(encoding="utf-8").splitlines()

    def trouble(self):
        return f"status {self.process.poll()}: {self.err.read_text(errors='replace')[-500:].strip()}"


def disturb(served, dice, seconds):
    """Injects faults at random moments, each kind at least once. Counts each kind."""
    weights = {"kill": 5, "stop": 1, "drop": 3, "lose_answer": 3, "delay": 2}
    first = dice.sample(list(weights), len(weights))
    done = Counter()
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, dice.uniform(3, 8)))
        action = first.pop() if first else dice.choices(list(weights), list(weights.values()))[0]
        arguments = {"lose_answer": {"count": dice.randint(1, 4)}, "delay": {"ms": dice.choice([5, 20, 100])}}
        served.control.act(action, arguments.get(action, {}))
        done[action] += 1
        if action == "delay":
            time.sleep(1)
            served.control.act("delay", {"ms": 0})
    return done


def scanned(endpoint):
    """The records that walctl scans, in the format of the followers' output."""
    done = run(WALCTL, "scan", "--prefix", "chaos/", "--output", "json", env=clean_environment(
        WALD_ENDPOINT=f"http://{endpoint}"), timeout=600, check=True)
    found = []
    for line in done.stdout.splitlines():
        record = json.loads(line)
        payload = next(record[key] for key in ("value", "text") if key in record)
        found.append(f"{record['log']} {record['lsn']} {payload}")
    return found


def first_difference(one, other):
    for number, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return f"line {number + 1} is {a!r}, not {b!r}"
    return f"{len(one)} lines, not {len(other)}"


seconds = int(sys.argv[1]) if len(sys.argv) > 1 else sized(75, 42)
seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1_000_000)
print(f"seed {seed}: .ci/run clients/chaos -- {seconds} {seed}", flush=True)


@check("Producers and followers of all languages under kills, drops and delays: each record once, in order")
def chaos(directory):
    with open(SCRATCH / "chaos.log", "w") as log, harness.Served(WALD, directory, log=log) as served:
        dice = random.Random(seed)
        languages = list(BUILDERS)
        commands = {language: runner(language) for language in languages}
        parts = []
        stop = directory / "stop"
        environment = clean_environment(**served.environment(), WALD_STOP=str(stop))
        try:
            followers = [Part(f"follower-{language}-{number}", [*commands[language], "chaos-follower", "chaos/", "16"],
                              environment, directory) for number in range(2) for language in languages]
            parts += followers
            producers = []
            for number, where in enumerate(LOGS):
                for language in languages:
                    name = f"{language}-{number}"
                    part = Part(name, [*commands[language], "chaos-producer", where, name, str(RATE)], environment, directory)
                    part.log = where
                    producers.append(part)
            parts += producers
            began = time.monotonic()
            done = disturb(served, dice, seconds)
            for part in parts:
                if part.process.poll() is not None:
                    expect(f"{part.name} works until stopped", False, part.trouble())
            stop.touch()
            until = time.monotonic() + PATIENCE
            for part in producers:
                if not part.ended(until - time.monotonic()):
                    expect(f"{part.name} ends", False, part.trouble())
            until = time.monotonic() + PATIENCE
            for part in followers:
                if not part.ended(until - time.monotonic()):
                    expect(f"{part.name} ends", False, part.trouble())
            took = time.monotonic() - began
            truth = scanned(f"127.0.0.1:{served.proxy.port}")
        finally:
            for part in parts:
                harness.end_group(part.process)
        expect("there was harm of every kind" if seconds >= 40 else "there was harm", len(done) == 5 or (seconds < 40 and done),
               ", ".join(f"{action} {count}" for action, count in sorted(done.items())) +
               f"; {served.proxy.lost} answers lost, {served.proxy.dropped} connections dropped, {served.daemon.starts} starts")

        # Compare the appends that each producer reports with the stored records.
        there, tails = {}, Counter()
        for line in truth:
            where, lsn, data = line.split(" ", 2)
            if int(lsn) != tails[where]:
                expect(f"{where} has no hole", False, f"{lsn} after {tails[where]} records")
            tails[where] += 1
            name = data.removeprefix("END:") if data.startswith("END:") else data.rpartition(":")[0]
            there.setdefault((where, name), []).append(data)
        total = 0
        for part in producers:
            said = part.lines()
            if not expect(f"{part.name} says how much it has appended", len(said) == 1 and said[0].split(" ")[0] == part.name,
                          said[0] if said else part.trouble()):
                continue
            count = int(said[0].split(" ")[1])
            wanted = [f"{part.name}:{number}" for number in range(count)] + [f"END:{part.name}"]
            got = there.pop((part.log, part.name), [])
            total += len(wanted)
            expect(f"{part.name}: every record once and in order", got == wanted and count > 0,
                   len(got) if got == wanted else first_difference(got, wanted))
        expect("nothing else is there", not there and total == len(truth), f"{len(truth)} records" if not there else list(there)[:5])
        for part in followers:
            said = part.lines()
            expect(f"{part.name} has seen exactly that", said == truth, len(said) if said == truth else first_difference(said, truth))
        print(f"seed {seed}; {took:.0f} s, {len(producers)} producers, {len(followers)} followers, {sum(done.values())} disturbances, "
              f"{len(truth)} records, {len(truth) / took:.0f} a second")
