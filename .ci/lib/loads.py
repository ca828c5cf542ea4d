"""Endless producers and followers of the runners of all languages, and the judgement of their records."""

from collections import Counter

from clients import *


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


def producer(language, name, log, rate, environment, directory):
    """A runner that appends to a log until the file of WALD_STOP is there."""
    part = Part(name, [*runner(language), "chaos-producer", log, name, str(rate)], environment, directory)
    part.log = log
    return part


def follower(language, name, prefix, ends, environment, directory):
    """A runner that follows all logs with a prefix until it has seen the ends of this number of producers."""
    return Part(name, [*runner(language), "chaos-follower", prefix, str(ends)], environment, directory)


def all_end(parts, seconds):
    """States that each part ends well within this number of seconds."""
    until = time.monotonic() + seconds
    for part in parts:
        if not part.ended(until - time.monotonic()):
            expect(f"{part.name} ends", False, part.trouble())


def scanned(environment, prefix):
    """The records that walctl scans, in the format of the followers' output."""
    done = run(WALCTL, "scan", "--prefix", prefix, "--output", "json", env=clean_environment(**environment), timeout=600, check=True)
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


def by_producer(truth):
    """Producer and log -> its records in order. States that no log has a hole."""
    there, tails = {}, Counter()
    for line in truth:
        where, lsn, data = line.split(" ", 2)
        if int(lsn) != tails[where]:
            expect(f"{where} has no hole", False, f"{lsn} after {tails[where]} records")
        tails[where] += 1
        name = data.removeprefix("END:") if data.startswith("END:") else data.rpartition(":")[0]
        there.setdefault((where, name), []).append(data)
    return there


def judge(producers, followers, truth):
    """States that each record that a producer reports as appended exists once and in order, that nothing else exists, and
    that each follower has seen exactly that."""
    there, total = by_producer(truth), 0
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


__all__ = [name for name in dir() if not name.startswith("_")]
