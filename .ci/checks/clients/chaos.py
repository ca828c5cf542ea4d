"""20 producers and 10 followers (four and two of each language) use four logs of one daemon for SECONDS (75).
At random the daemon is killed or stopped, connections are dropped, and answers are lost or delayed. In the end
each record that a producer reports as appended must exist exactly once and in order, and nothing else.
Every follower must have seen exactly these records in the same order. Prints the seed and counts.
Arguments: SECONDS and a seed.
"""

import random

from loads import *

LOGS = [f"chaos/{number}" for number in range(4)]
# Records per second of each producer. Two followers in each language can keep up with it on two cores.
RATE = 50
PATIENCE = 180


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


seconds = int(sys.argv[1]) if len(sys.argv) > 1 else sized(75, 30)
seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1_000_000)
print(f"seed {seed}: .ci/run clients/chaos -- {seconds} {seed}", flush=True)


@check("Producers and followers of all languages under kills, drops and delays: each record once, in order")
def chaos(directory):
    with open(SCRATCH / "chaos.log", "w") as log, harness.Served(WALD, directory, log=log) as served:
        dice = random.Random(seed)
        languages = list(BUILDERS)
        parts = []
        stop = directory / "stop"
        environment = clean_environment(**served.environment(), WALD_STOP=str(stop))
        try:
            followers = [follower(language, f"follower-{language}-{number}", "chaos/", len(LOGS) * len(languages), environment, directory)
                         for number in range(2) for language in languages]
            parts += followers
            producers = [producer(language, f"{language}-{number}", where, RATE, environment, directory)
                         for number, where in enumerate(LOGS) for language in languages]
            parts += producers
            began = time.monotonic()
            done = disturb(served, dice, seconds)
            for part in parts:
                if part.process.poll() is not None:
                    expect(f"{part.name} works until stopped", False, part.trouble())
            stop.touch()
            all_end(producers, PATIENCE)
            all_end(followers, PATIENCE)
            took = time.monotonic() - began
            truth = scanned({"WALD_ENDPOINT": f"http://127.0.0.1:{served.proxy.port}"}, "chaos/")
        finally:
            for part in parts:
                harness.end_group(part.process)
        expect("there was harm of every kind" if seconds >= 40 else "there was harm", len(done) == 5 or (seconds < 40 and done),
               ", ".join(f"{action} {count}" for action, count in sorted(done.items())) +
               f"; {served.proxy.lost} answers lost, {served.proxy.dropped} connections dropped, {served.daemon.starts} starts")

        judge(producers, followers, truth)
        print(f"seed {seed}; {took:.0f} s, {len(producers)} producers, {len(followers)} followers, {sum(done.values())} disturbances, "
              f"{len(truth)} records, {len(truth) / took:.0f} a second")
