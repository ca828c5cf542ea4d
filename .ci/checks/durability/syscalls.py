"""In one story each system call of the daemon on its directory fails in turn: with
EIO, with ENOSPC, with EINTR, or by a half-finished write; or the process is killed in it. The
story: a first start, appends at every level, a batch, a producer, trim, fence, cursor, deletion, Sync,
rolls, a checkpoint, a clean stop; and more calls after such a stop and after kill -9. After each
fault the documented behaviour must hold. After a restart no acked record may be missing and no refused record
may exist. Then faults are planted in the daemon's calls, which the check must find.

With `-- --all` it runs each fault, else a sample: the first and the last call of each kind on each kind of file, and random
others. The default run takes one call of each kind on each kind of file, and plants no faults.
Prints its seed, and for each failure the fault that repeats it: new:fdatasync:journal/….seg:2:EIO.
"""

import argparse
import errno
import importlib.util
import multiprocessing
import pickle
import random
import urllib.error
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor

from clients import *

if importlib.util.find_spec("wald") is None:
    # The stubs come with the Python client, so its interpreter must run this script.
    command, _ = runner("python")
    os.execv(command, [command, *sys.orig_argv[1:]])

import interpose
from story import *

# Scrubbing reads at any time, and not in the order of the story.
ARGUMENTS = ["--segment-bytes", "64KiB", "--sync-interval", "20ms", "--worker-threads", "2", "--scrub-bytes-per-second", "0"]
# Minimum number of runs in the sample.
RUNS = sized(600, 0)
WORKERS = 4
# Seconds from the failure of a flush until all threads know of it.
GRACE = 0.1
PATIENCE = 90
KILLED, CLEAN, FAILED, IO = -9, 0, 70, 74
LIVES = ("new", "killed", "clean")
KINDS = {"EIO": ("error", errno.EIO), "ENOSPC": ("error", errno.ENOSPC), "EINTR": ("error", errno.EINTR),
         "half": ("short",), "kill": ("kill",)}
FLUSHES = ("fsync", "fdatasync")
CHANGES = ("pwrite64", "renameat", "mkdirat", "unlinkat", "ftruncate", "fallocate", *FLUSHES)
# Questions about the file system: the daemon uses the answers only for better messages.
ASKS = ("statfs", "fstatfs")
IN_FLIGHT, LATER = "INTERNAL JOURNAL_FAILED UNKNOWN", "UNAVAILABLE JOURNAL_FAILED NOT_APPLIED"
BEYOND = "UNAVAILABLE JOURNAL_FAILED -"
FULL, ABSENT = "RESOURCE_EXHAUSTED DISK_FULL NOT_APPLIED", "NOT_FOUND LOG_NOT_FOUND NOT_APPLIED"
UNREAD = "UNAVAILABLE READ_FAILED -"
BEYOND_TAIL = "OUT_OF_RANGE BEYOND_TAIL NOT_APPLIED"
# Each answer of the table, and the fault that brings it while the daemon serves.
BRINGS = {IN_FLIGHT: ("fdatasync", "journal/*.seg", "EIO", "exit"), LATER: ("fdatasync", "journal/*.seg", "EIO", "read_only"),
          FULL: ("pwrite64", "journal/*.seg", "ENOSPC", "exit"), UNREAD: ("openat", "journal/*.seg", "EIO", "exit")}
PLANTED = {"flush ignored": ("fdatasync", "EIO"), "flush again": ("fdatasync", "EIO"), "write ignored": ("pwrite64", "ENOSPC"),
           "short write ignored": ("pwrite64", "half"), "read ignored": ("pread64", "EIO")}


class Fault:
    """A call, and its fault."""

    def __init__(self, life, call, path, number, kind, policy="exit"):
        self.life, self.call, self.path, self.number, self.kind, self.policy = life, call, path, int(number), kind, policy
        self.preload = self.planted = None

    def __str__(self):
        stay = "" if self.policy == "exit" else f":{self.policy}"
        return f"{self.life}:{self.call}:{self.path}:{self.number}:{self.kind}{stay}"

    @property
    def file(self):
        """The kind of file."""
        folder, _, name = self.path.rpartition("/")
        if not folder:
            return name if name[0].isupper() else "directory"
        return f"{folder}/*{name[name.index('.'):]}"

    @property
    def group(self):
        return self.call, self.file, self.kind, self.policy


class Run:
    """The result of one run with one fault."""

    def __init__(self, fault):
        self.fault = fault
        self.hit = self.phase = self.code = None
        # Whether the call opens a file around the page cache.
        self.direct = False
        self.refusals, self.wrong, self.lines, self.calls = [], [], [], []
        self.acks, self.late, self.again = 0, [], []

    def told(self):
        """The answers that are not acks, except the transport's when the daemon has ended."""
        return {str(refusal) for refusal in self.refusals if refusal.is_told()}


def tell(life, story, data):
    if life == "new":
        checkpoints = data / "checkpoint"
        story.begin(lambda: any(name.endswith(".ckp") for name in os.listdir(checkpoints)))
    else:
        story.go_on()


def ended(daemon, story, fault, run):
    """The end of a run: without a signal if the journal has failed, otherwise by SIGTERM."""
    gone = any(refusal.reason == "JOURNAL_FAILED" or not refusal.is_told() for refusal in story.refusals)
    if fault.policy == "exit" and gone:
        return daemon.process.wait(timeout=PATIENCE)
    if gone:
        run.wrong += stays(daemon, story)
    elif fault.kind == "ENOSPC" and run.hit and not story.resumes():
        run.wrong.append("appends do not resume by themselves")
    return daemon.stop()


def one(directory, fault, names):
    """One run: the story with the fault, and a restart. `names`: the calls to intercept."""
    run, ledger, story = Run(fault), Ledger(), None
    data = Path(directory) / "data"
    if fault.life != "new":
        template = Path(directory).parent / fault.life
        shutil.copytree(template, data)
        ledger = pickle.loads(Path(f"{template}.ledger").read_bytes())

    def decide(call):
        if call.key == (fault.call, fault.path, fault.number):
            run.hit, run.direct = call.at, call.direct
            return KINDS[fault.kind]
        return None

    def give_up():
        run.wrong.append("it hangs")
        interposer.kill()

    serving = stopping = float("inf")
    with interpose.Interposer(data, names, decide) as interposer:
        watchdog = threading.Timer(PATIENCE, give_up)
        watchdog.start()
        under = list(interposer.command)
        if fault.planted:
            under += ["/usr/bin/env", f"LD_PRELOAD={fault.preload}", f"PLANTED={fault.planted}"]
        try:
            with Daemon(data, *ARGUMENTS, "--on-flush-failure", fault.policy, under=under) as daemon:
                serving = time.time()
                with Story(daemon.grpc, ledger, lambda: daemon.process.poll() is None) as story:
                    tell(fault.life, story, data)
                    stopping = time.time()
                    run.code = ended(daemon, story, fault, run)
                run.lines = daemon.lines
        except Ended as end:
            run.code, run.lines = end.code, end.lines
        finally:
            watchdog.cancel()
    run.calls = [(call.key, call.creates) for call in interposer.calls]
    if run.hit:
        run.phase = "start" if run.hit < serving else "stop" if run.hit > stopping else "serving"
        run.again = [call.number for call in interposer.calls
                     if (call.name, call.path) == (fault.call, fault.path) and call.number > fault.number]
    if story:
        run.refusals, run.acks = story.refusals, len(story.acks)
        run.wrong += story.wrong
        run.late = [what for what, sent in story.acks if run.hit and sent > run.hit + GRACE]
    restart(run, data, ledger)
    return run


def readiness(daemon):
    try:
        return urllib.request.urlopen(f"http://{daemon.http}/readyz").status
    except urllib.error.HTTPError as refused:
        return refused.code


def stays(daemon, story):
    """Errors after a failure of the journal, with on_flush_failure = read_only."""
    if daemon.process.poll() is not None:
        return ["it did not stay"]
    wrong = []
    # The answers to the calls in flight can arrive before readiness changes.
    if not wait_until(lambda: readiness(daemon) == 503, 5) or daemon.metric("wald_journal_failed") != 1:
        wrong.append(f"readiness is {readiness(daemon)}")
    try:
        missed = story.misses()
        if missed:
            wrong.append(f"durable records are not read: {missed}")
    except Refused as refused:
        wrong.append(f"what is durable cannot be read: {refused}")
    before = len(story.refusals)
    story.append("a")
    if [str(refusal) for refusal in story.refusals[before:]] != [LATER]:
        wrong.append(f"a later append is told {[str(refusal) for refusal in story.refusals[before:]]}")
    return wrong


def restart(run, data, ledger):
    """A start without any fault: everything acked is there, no refused record, and it continues."""
    try:
        with Daemon(data, *ARGUMENTS) as daemon:
            with Story(daemon.grpc, ledger) as story:
                try:
                    story.verify()
                except Refused as refused:
                    story.wrong.append(f"a scan after the restart is told {refused}")
                run.wrong += story.wrong
            code = daemon.stop()
            if code != CLEAN:
                run.wrong.append(f"the stop after the restart gives {code}")
            run.wrong += [f"the restart says {line.strip()}" for line in daemon.lines if '"level":"INFO"' not in line]
    except Ended as end:
        run.wrong.append(f"it does not start again: {end}")


def row(run):
    """The row of a run in the table of faults."""
    fault = run.fault
    if fault.kind == "kill":
        return "process killed"
    if fault.kind in ("half", "EINTR"):
        return "short write, interrupted call"
    if fault.call in FLUSHES and (fault.kind == "EIO" or fault.file == "journal/*.seg"):
        return "flush fails"
    if fault.kind == "ENOSPC":
        return "no space"
    return "other write error" if fault.call in CHANGES else "read or open fails"


def judged(run):
    """Errors of a run that reached its call."""
    fault, told, wrong = run.fault, run.told(), list(run.wrong)
    reads = run.phase == "serving" and fault.call in ("openat", "statx") and fault.file == "journal/*.seg"
    # These include the flush of a directory of derived files; the text in LOCK is for people.
    helps = (fault.file.startswith(("index/", "checkpoint/")) or fault.call in ASKS or (fault.call in FLUSHES and fault.path in ("index", "checkpoint"))
             or (fault.file == "LOCK" and fault.call in ("pwrite64", "ftruncate")))
    # The daemon repeats the checks of ownership and existence of the store.
    asked_again = fault.call == "statx" and fault.file in ("FORMAT", "LOCK", "journal/*.seg")
    # A segment that was begun is known here by its name in the pool: then it is a check or a read that is repeated.
    perhaps_begun = fault.call in ("openat", "statx") and fault.file == "pool/*.seg"
    # Possible effects of one failing call: exit codes and answers.
    if fault.kind == "kill":
        codes, answers = {KILLED}, set()
    elif fault.kind in ("half", "EINTR") or fault.call == "pread64":
        # A read that fails once is repeated in small pieces.
        codes, answers = {CLEAN}, set()
    elif fault.kind == "ENOSPC" and not (fault.call in FLUSHES and fault.file == "journal/*.seg"):
        codes, answers = {CLEAN}, {FULL, ABSENT}
        if FULL in told:
            # The answer to a trim up to a refused record.
            answers.add(BEYOND_TAIL)
        if run.phase == "start" and not helps:
            codes = {CLEAN, IO}
    elif run.phase == "start":
        # The pool and the indexer start before the daemon serves.
        codes, answers = {IO, FAILED}, {LATER, IN_FLIGHT, BEYOND}
        if helps or (fault.file == "directory" and fault.call not in CHANGES):
            codes.add(CLEAN)
        if asked_again or perhaps_begun or run.direct:
            # A read around the page cache that fails once is repeated in small pieces, and each opens the file.
            codes.add(CLEAN)
    elif reads:
        codes, answers = {CLEAN}, {UNREAD}
        # The indexer reads segments, too, and tries again a second later.
        if told != answers and fault.call != "statx":
            wrong.append("the read that failed was not told so")
    elif helps or asked_again:
        # An index or a checkpoint is written again later; a start works without it.
        codes, answers = {CLEAN}, set()
    else:
        codes, answers = {FAILED}, {LATER, IN_FLIGHT, BEYOND}
        if fault.policy == "read_only":
            # Calls after a refused creation, or before the creation was visible to all, may find no log.
            answers |= {ABSENT, "NOT_FOUND LOG_NOT_FOUND -"}
        if run.phase == "stop" and not fault.path.startswith(("journal/", "pool/")):
            # An index or checkpoint of the end: without it the next start takes longer.
            codes.add(CLEAN)
        if perhaps_begun:
            codes.add(CLEAN)
            answers.add(UNREAD)
        # The size of free space is read by opening the directory.
        if fault.call in ("openat", "getdents64", "newfstatat") and fault.file == "directory":
            codes.add(CLEAN)
    if run.code not in codes:
        wrong.append(f"the exit code is {run.code}, not {' or '.join(map(str, sorted(codes)))}")
    if told - answers:
        wrong.append(f"answers are {sorted(told - answers)}")
    if run.code == FAILED:
        if run.late:
            wrong.append(f"acked after it: {run.late}")
        if fault.call in FLUSHES and run.again:
            wrong.append("the flush was tried again")
    if run.code in (IO, FAILED):
        last = json.loads(run.lines[-1]) if run.lines else {}
        if last.get("level") != "ERROR" or len(last.get("message", "")) < 20:
            wrong.append(f"it ends without saying why: {run.lines[-1:]}")
        said = f"os error {KINDS[fault.kind][1]})" if fault.kind in ("EIO", "ENOSPC") else ""
        if not any(said in line or "no storage space" in line for line in run.lines):
            wrong.append(f"it does not say what the system said: {run.lines[-1:]}")
    elif run.code == CLEAN and run.phase == "start" and not run.acks:
        wrong.append("nothing was acked")
    for refusal in run.refusals:
        if refusal.is_told() and refusal.code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE") and not refusal.retry_after:
            wrong.append(f"{refusal} does not say when to come back")
    return wrong


def template(directory, life):
    """A directory to begin with, and its ledger."""
    ledger, data = Ledger(), directory / life
    with Daemon(data, *ARGUMENTS) as daemon:
        with Story(daemon.grpc, ledger) as story:
            tell("new", story, data)
            if story.refusals or story.wrong:
                raise SystemExit(f"the story does not go well by itself: {story.wrong} {[*map(str, story.refusals)]}")
        daemon.kill() if life == "killed" else daemon.stop()
    Path(f"{data}.ledger").write_bytes(pickle.dumps(ledger))


def job(argument):
    directory, fault, names = argument
    with tempfile.TemporaryDirectory(dir=directory) as own:
        return one(own, fault, names)


def faults_of(keys):
    """Every fault to try: keys are calls, and whether each creates a file."""
    found = []
    for (life, call, path, number), creates in sorted(keys.items()):
        kinds = ["EIO", "kill"]
        if call in CHANGES or creates:
            kinds.append("ENOSPC")
        if call in ("pwrite64", "pread64", "preadv2"):
            kinds.append("EINTR")
        if call == "pwrite64":
            kinds.append("half")
        found += [Fault(life, call, path, number, kind) for kind in kinds]
        if call in ("pwrite64", *FLUSHES):
            found.append(Fault(life, call, path, number, "EIO", "read_only"))
    return found


def sample(faults, dice):
    """The first and the last of each kind, or any one of it; some that bring each answer of the table, and random others."""
    groups = defaultdict(list)
    for fault in faults:
        groups[fault.group].append(fault)
    chosen = {id(fault): fault for group in groups.values() for fault in sized((group[0], group[-1]), (dice.choice(group),))}
    # The first and the last of a kind are often calls of the start and of the stop.
    for kind in BRINGS.values():
        group = groups[kind]
        chosen |= {id(fault): fault for fault in (group[len(group) * part // 6] for part in range(1, 6))}
    rest = [fault for fault in faults if id(fault) not in chosen]
    return [*chosen.values(), *dice.sample(rest, max(0, min(RUNS - len(chosen), len(rest))))]


def report(runs):
    """A line for each row of the table and each kind of outcome, and a check for each row."""
    rows = defaultdict(list)
    for run in runs:
        if run.hit:
            rows[row(run)].append(run)
    for name in sorted(rows):
        happened = Counter()
        for run in rows[name]:
            fault = run.fault
            stay = "" if fault.policy == "exit" else ", read_only"
            told = ", ".join(sorted(run.told())) or "no error told"
            happened[f"{run.phase}: {fault.call} of {fault.file}, {fault.kind}{stay} → {run.code}", told] += 1
        lines = defaultdict(list)
        for (what, told), count in happened.items():
            lines[what].append(f"{count} × {told}")
        print(f"\n{name}")
        for what in sorted(lines):
            print(f"  {what}: {'; '.join(lines[what])}")
    print()
    for name in sorted(rows):
        wrong = [(run, judged(run)) for run in rows[name]]
        wrong = [(run, what) for run, what in wrong if what]
        for run, what in wrong[:20]:
            print(f"     .ci/run durability/syscalls -- '{run.fault}': {run.phase}, {'; '.join(what)[:600]}")
        expect(f"{name}: the answers, exit codes and restarts are as promised", not wrong,
               f"{len(rows[name])} runs, {len(wrong)} wrong, {sum(run.acks for run in rows[name])} acks"
               + "".join(f"; {run.fault}: {'; '.join(what)[:200]}" for run, what in wrong[:3]))
    reached = sum(map(len, rows.values()))
    expect("nearly every chosen call is reached in its run", reached >= 0.9 * len(runs), f"{reached} of {len(runs)}")
    answers = Counter(str(refusal) for run in runs for refusal in run.refusals if refusal.is_told())
    expect("every answer of the table was seen", {IN_FLIGHT, LATER, FULL, UNREAD} <= set(answers), dict(answers))


def planted(directory, faults, pool):
    """Runs a daemon with deliberately wrong calls: the check must find them."""
    library = directory / "planted.so"
    run("cc", "-shared", "-fPIC", "-O1", "-o", library, ROOT / ".ci" / "checks" / "durability" / "planted.c", check=True)
    for what, (call, kind) in PLANTED.items():
        chosen = [fault for fault in faults if (fault.call, fault.kind, fault.file, fault.policy)
                  == (call, kind, "journal/*.seg", "exit")][:40:4]
        for fault in chosen:
            fault.preload, fault.planted = library, what
        runs = [run for run in pool.map(job, [(directory, fault, [fault.call]) for fault in chosen]) if run.hit]
        found = [(run, judged(run)) for run in runs]
        found = [(run, wrong) for run, wrong in found if wrong]
        expect(f"planted, {what}: it is found", found,
               f"{len(found)} of {len(runs)} runs; {found[0][1][0][:150] if found else ''}")


@check("Each kind of system call fails or is cut short, or the process dies in it: the documented behaviour holds")
def faults():
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--seed", type=int, default=sized(random.randrange(1_000_000), 1))
    parser.add_argument("faults", nargs="*")
    options = parser.parse_args()
    with scratch() as temporary, ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        directory = Path(temporary)
        for life in LIVES[1:]:
            template(directory, life)
        keys, counts = {}, Counter()
        listings = pool.map(job, [(directory, Fault(life, "", ".", 0, "EIO"), list(interpose.CALLS))
                                  for life in LIVES for _ in range(3)])
        for listing in listings:
            if listing.wrong or listing.refusals or listing.code != CLEAN:
                raise SystemExit(f"the story does not go well by itself: {listing.wrong} {listing.code}")
            for key, creates in listing.calls:
                keys[listing.fault.life, *key] = creates
        for (_, call, _, _), _ in keys.items():
            counts[call] += 1
        print(f"{len(keys)} calls: {', '.join(f'{call} {count}' for call, count in counts.most_common())}")
        faults = faults_of(keys)
        chosen = [Fault(*text.split(":")) for text in options.faults]
        if not chosen:
            chosen = faults if options.all else sample(faults, random.Random(options.seed))
        print(f"{len(chosen)} of {len(faults)} faults; seed {options.seed}", flush=True)
        began = time.monotonic()
        runs = list(pool.map(job, [(directory, fault, [fault.call]) for fault in chosen]))
        print(f"{time.monotonic() - began:.0f} s")
        if options.faults:
            for run in runs:
                expect(run.fault, run.hit and not judged(run), f"{run.phase}, {run.code}, {judged(run)}")
                print(*run.lines, sep="")
        else:
            report(runs)
            # It tests this check.
            if not os.environ.get("CI_LIGHT"):
                planted(directory, faults, pool)
