"""Tests a ledger in each language, written as its client's README shows: durable producers, and a durable follower with
balances. Each is killed KILLS times (50; 3 in the default run), at random moments, and started again. In the end its
balances are exact, and its logs hold every transfer once. One more ledger is started in another language each time.
Arguments: KILLS and a seed.
"""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from clients import *

KILLS = int(sys.argv[1]) if sys.argv[1:] else sized(50, 3)
SEED = int(sys.argv[2]) if sys.argv[2:] else random.randrange(1 << 32)
# Transfers per kill: more than a life of half a second appends, so that the last kill finds work.
TRANSFERS = 1200
# Range of seconds after which a life ends: some die before they have connected.
LIFE = 0.05, 0.8


def program(language):
    """Builds the ledger of a language; returns its command."""
    made = SCRATCH / "clients" / language
    command = runner(language)
    if language == "rust":
        return [EXAMPLES / "ledger"]
    if language == "go":
        build("go", "build", "-o", made / "ledger", "./examples/ledger", cwd=ROOT / FOLDERS["go"])
        return [made / "ledger"]
    if language == "python":
        return [command[0], ROOT / FOLDERS["python"] / "examples/ledger.py"]
    if language == "java":
        return [*command[:-1], "dev.wald.examples.Ledger"]
    return ["node", ROOT / FOLDERS["typescript"] / "dist/examples/ledger.js"]


def transfer(number):
    return f"account{number * 7 % 10}", f"account{(number * 3 + 1) % 10}", number * 13 % 100 + 1


def exact(count):
    """The balances after this number of transfers."""
    balances = Counter()
    for source, target, amount in map(transfer, range(count)):
        balances[source] -= amount
        balances[target] += amount
    return dict(balances)


def transfers(served, log):
    """The transfers in a log, in order."""
    done = run(TARGET / "release" / "walctl", "scan", log, "--output", "raw",
               env=clean_environment(WALD_ENDPOINT=served.environment()["WALD_ENDPOINT"]), timeout=120)
    return [tuple(json.loads(line)[name] for name in ("from", "to", "amount")) for line in done.stdout.splitlines()]


def ledger(name, commands, served, directory):
    """Runs one ledger to its end, each life with the next of these commands: number of kills, output, status."""
    dice = random.Random(f"{SEED} {name}")
    folder = Path(directory) / name
    folder.mkdir()
    count = max(2, KILLS * TRANSFERS)
    killed = 0
    while True:
        command = commands[killed % len(commands)]
        arguments = [*map(str, command), str(folder), f"ledger/{name}/", str(count)]
        process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, env=clean_environment(**served.environment()))
        try:
            out, err = process.communicate(timeout=dice.uniform(*LIFE) if killed < KILLS else 600)
            return count, killed, out, err, process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            killed += 1
            if killed > KILLS:
                return count, killed, "", "it does not end", 1


@check("A ledger in each language, and one that changes its language, has exact balances after kills")
def ledgers(directory):
    with open(SCRATCH / "ledger.log", "w") as log, harness.Served(WALD, directory, log=log) as served:
        print(f"seed {SEED}")
        commands = {language: program(language) for language in BUILDERS}
        lives = {language: [command] for language, command in commands.items()}
        # The state that one language leaves is read by the next.
        lives["relay"] = list(commands.values())
        with ThreadPoolExecutor(len(lives)) as pool:
            runs = {name: pool.submit(ledger, name, commands, served, directory) for name, commands in lives.items()}
        for language, done in runs.items():
            count, killed, out, err, status = done.result()
            expect(f"{language}: the ledger ends well after {KILLS} kills", status == 0 and killed == KILLS,
                   f"status {status}, {killed} kills: {err[-1000:]}")
            found = json.loads(out) if out.strip() else {}
            expect(f"{language}: every one of {count:,} transfers is applied once", found.get("applied") == count,
                   found.get("applied"))
            expect(f"{language}: the balances are exact", found.get("balances") == exact(count), found.get("balances"))
            for half in range(2):
                wanted = [transfer(2 * number + half) for number in range(count // 2)]
                appended = transfers(served, f"ledger/{language}/{half}")
                expect(f"{language}: log {half} has every transfer once and in order", appended == wanted, "" if appended == wanted else len(appended))


# Languages whose clients lock the file of a state. The locks of Rust and Java do not see each other; TypeScript has none.
LOCKING = ["rust", "go", "python", "java"]
APART = {"rust", "java"}


@check("A ledger keeps ledgers in other languages from its state; Rust and Java do not see each other")
def states(directory):
    commands = {language: program(language) for language in LOCKING}
    with open(SCRATCH / "states.log", "w") as log, harness.Served(WALD, directory, log=log) as served:
        environment = clean_environment(**served.environment())
        for holder in LOCKING:
            folder = Path(directory) / f"held-by-{holder}"
            folder.mkdir()
            start = lambda language: subprocess.Popen([*map(str, commands[language]), str(folder), f"states/{holder}/", "10000000"], stdin=subprocess.DEVNULL,
                                                      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
            process = start(holder)
            try:
                names = "producer0.state", "producer1.state", "ledger.state"
                expect(f"{holder} has its states", wait_until(lambda: all((folder / name).exists() for name in names)))
                for language in LOCKING:
                    if {language, holder} == APART:
                        continue
                    other = start(language)
                    try:
                        said = other.communicate(timeout=60)[1]
                    except subprocess.TimeoutExpired:
                        other.kill()
                        said = f"it goes on: {other.communicate()[1]}"
                    refused = other.returncode not in (0, -signal.SIGKILL) and re.search("another (process or producer|producer or follower) uses it", said)
                    expect(f"{language} is refused a state that {holder} uses", refused, "" if refused else said[-1000:])
                expect(f"{holder} goes on", process.poll() is None)
            finally:
                process.kill()
                process.communicate()
