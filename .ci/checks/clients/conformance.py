"""Every client runs each case of client/conformance/cases.json against the built daemon. Then a
fault is planted in a copy of each client, one at a time, and the cases of lost connections must find it.
Arguments name languages: rust, go, python, typescript, java; none: all. Only --all plants faults, which test the cases. Every RPC of the contract must be reachable in every language.
"""

from concurrent.futures import ThreadPoolExecutor

from buckets import *
from clients import *

# Cases that lose connections, answers and programs: typical mistakes of log clients.
ALL_CASES = json.loads(harness.CASES.read_text(encoding="utf-8"))["cases"]
LOST = [case["name"] for case in ALL_CASES
        if re.search(r"lost|repeated|loses|follow-goes-on|survives-restarts-between|effects-and-cursor|quota|random", case["name"])]

# Other arguments of the daemon, under which every case holds.
OTHER = "--segment-bytes 12MiB --read-strategy mmap --worker-threads 1 --reader-threads 1"

# Mistakes of log clients.
TWICE = "a plain append is repeated though nobody knows what became of it"
BACK = "a follower begins again where it began at first"
AGAIN = "nothing of a producer is sent again"
UNNUMBERED = "the batches of a producer carry no number"
EARLY = "a cursor does not cover exactly the events up to its own"
ENDLESS = "a quota is waited out"
LEFT = "random ids of producers are not forgotten"

# language: description, file, original code, faulty code.
FAULTS = {
    "rust": [
        (TWICE, "client/src/retry.rs", "Retry::SafeWithCondition => self != Self::Harmful,",
         "Retry::SafeWithCondition => true,"),
        (BACK, "client/src/scan_stream.rs", "self.request.start = Some(Start::Cursor(cursor));", "drop(cursor);"),
        (AGAIN, "client/src/pipeline/driver.rs", "if self.stamp.is_none() || give_up ||", "if std::hint::black_box(true) || self.stamp.is_none() || give_up ||"),
        (UNNUMBERED, "client/src/pipeline.rs", "condition.producer = Some(v1::Producer {", "drop(v1::Producer {"),
        (EARLY, "client/src/scan.rs", "    events.push(ScanEvent::Progress(Progress {", "    events.insert(0, ScanEvent::Progress(Progress {"),
        (ENDLESS, "client/src/retry.rs", "error.reason() == Some(Reason::Quota)", "false"),
        (LEFT, "client/src/producer.rs", "if let Some(client) = self.forgets {", "if let Some(client) = self.forgets.filter(|_| false) {"),
    ],
    "go": [
        (TWICE, "client/go/retry.go", "return r != harmful", "return true"),
        (BACK, "client/go/scan.go", "u.request.Start = &waldv1.ScanRequest_Cursor{Cursor: event.Cursor}", ""),
        (AGAIN, "client/go/producer.go", "if !p.client.allows(guarded, failure, attempt, true) || ctx.Err() != nil {", "if true {"),
        (UNNUMBERED, "client/go/producer.go", "message.Batch.Batches[0].Condition.Producer.Sequence = p.next",
         "message.Batch.Batches[0].Condition.Producer = nil"),
        (EARLY, "client/go/scan.go", "s.event, s.cursor = event, event.Cursor", "event.Cursor = nil\n\t\ts.event, s.cursor = event, event.Cursor"),
        (ENDLESS, "client/go/retry.go", "if e.Reason == ErrQuota {", "if false {"),
        (LEFT, "client/go/producer.go", "if forgets {", "if false {"),
    ],
    "python": [
        (TWICE, "client/python/src/wald/retry.py", "return self is not Repeat.HARMFUL", "return True"),
        (BACK, "client/python/src/wald/scan.py", "self._request.cursor = message.cursor", "pass"),
        (AGAIN, "client/python/src/wald/producer.py", "if not self._client._allows(Repeat.GUARDED, error, self._token, waits=True):", "if True:"),
        (UNNUMBERED, "client/python/src/wald/producer.py",
         "producer=ProducerSequence(self.id, self.epoch, self.sequence),", ""),
        (EARLY, "client/python/src/wald/scan.py", "records_from_proto(batch)) for batch in message.batches", "records_from_proto(batch)) for batch in message.batches[:1]"),
        (ENDLESS, "client/python/src/wald/retry.py", "if error.reason == QUOTA:", "if False:"),
        (LEFT, "client/python/src/wald/producer.py", "forgets = self._is_drawn and", "forgets = False and"),
    ],
    "typescript": [
        (TWICE, "client/typescript/src/retry.ts", '&& repeat !== "HARMFUL"', "&& repeat !== undefined"),
        (BACK, "client/typescript/src/scan.ts", 'this.#request.start = { case: "cursor", value: cursor };', ""),
        (AGAIN, "client/typescript/src/retry.ts", '  return error.retry === "SAFE" ||', "  return [repeat, error].length === 0 &&"),
        (UNNUMBERED, "client/typescript/src/producer.ts", "producer: { id: this.id, epoch: this.epoch, sequence },", ""),
        (EARLY, "client/typescript/src/scan.ts", "const batches = message.batches.map(storedBatch);", "const batches = message.batches.slice(0, 1).map(storedBatch);"),
        (ENDLESS, "client/typescript/src/retry.ts", 'if (failedFor(error, "QUOTA")) {', 'if (failedFor(error, "BUSY") && failedFor(error, "QUOTA")) {'),
        (LEFT, "client/typescript/src/producer.ts", "await this.#setup.forget?.(this.id).catch(() => {});", ""),
    ],
    "java": [
        (TWICE, "client/java/src/main/java/dev/wald/Repeat.java", "case SAFE_WITH_CONDITION -> this != HARMFUL;", "case SAFE_WITH_CONDITION -> true;"),
        (BACK, "client/java/src/main/java/dev/wald/Scan.java", "request.setCursor(event.cursor());", ""),
        (AGAIN, "client/java/src/main/java/dev/wald/Producer.java", "if (!core.allows(Repeat.GUARDED, trouble, stream.attempt, true) || isStopped()) {", "if (true) {"),
        (UNNUMBERED, "client/java/src/main/java/dev/wald/Producer.java", ".getProducerBuilder().setSequence(next);", ".clearProducer();"),
        (EARLY, "client/java/src/main/java/dev/wald/ScanEvent.java", "message.getBatchesList().stream().map", "message.getBatchesList().stream().limit(1).map"),
        (ENDLESS, "client/java/src/main/java/dev/wald/Repeat.java", "if (failure.reason == Reason.QUOTA) {", "if (false) {"),
        (LEFT, "client/java/src/main/java/dev/wald/Producer.java", "if (forgets) {", "if (false) {"),
    ],
}


# How each language defines a method of its client.
METHODS = {
    "Rust": ("client/src/*.rs", r"pub (?:async )?fn {}\b"),
    "Go": ("client/go/*.go", r"func \(c \*?(?:Client|Cursors)\) {}\("),
    "Python": ("client/python/src/wald/client.py", r"def {}\("),
    "TypeScript": ("client/typescript/src/client.ts", r"^  (?:async )?(?:readonly )?\*?{}[(:]"),
    "Java": ("client/java/src/main/java/dev/wald/WaldClient.java", r"^  public [\w<>]+ {}\("),
}


@check("Every RPC of the contract is reachable in every language")
def rpcs_are_reachable():
    contract = set()
    for file in (ROOT / "proto/wald/v1").glob("*.proto"):
        contract |= set(re.findall(r"^  rpc (\w+)\(", file.read_text(encoding="utf-8"), re.M))
    text = (harness.HERE / "README.md").read_text(encoding="utf-8")
    rows = {}
    for line in text[text.index("| RPC |"):].splitlines():
        if not line.startswith("|"):
            break
        name, *cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        rows[name] = cells
    languages = rows.pop("RPC", [])
    rows.pop("---", None)
    expect("the table has every RPC of the contract, and no other", rows.keys() == contract and contract,
           sorted(rows.keys() ^ contract))
    expect("the table has every language", languages == list(METHODS), languages)
    for index, (language, (files, definition)) in enumerate(METHODS.items()):
        source = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob(files))
        lacking = [name for name, cells in rows.items()
                   if not re.search(definition.format(re.escape(cells[index])), source, re.M)]
        expect(f"{language}: every RPC is reachable", not lacking, lacking)


def conform(command, log, only=(), start="", tls=False, replica=None, stand_by=False):
    """Runs the cases by a runner: exit status, names that passed, lines of the failed cases. `replica` is a bucket for the daemon,
    and with `stand_by` for two of them."""
    named = [*(["--tls"] if tls else []), *(["--replica"] if replica else []), *(["--stand-by"] if stand_by else []), *(["--only", ",".join(only)] if only else [])]
    variables = replica.environment() if replica else clean_environment()
    done = run(sys.executable, harness.HERE / "harness.py", "--wald", programs() / "wald" if replica else WALD, f"--start={start}", "--log", log,
               *named, "--", *command, timeout=3600, env={**variables, "TMPDIR": str(SCRATCH)})
    lines = done.stdout.decode(errors="replace").splitlines()
    passed = [line.split(" ", 1)[1] for line in lines if line.startswith("ok ")]
    failed = [line for line in lines if line.startswith("FAIL ")]
    return done.returncode, passed, failed, done.stderr.decode(errors="replace")


# At a stand-by: each kind of call, and the losses of both connections, that of the client and that of the owner. A start of a
# debug build on a bucket takes much processor time, so only one of these cases kills the owner.
FORWARDED = """right-log-id-is-accepted-everywhere weaker-acks-become-durable-by-sync read-waits-for-a-record
session-ends-at-the-first-failure cursor-is-committed-and-read configuration-of-a-log-is-changed
producers-are-listed-and-forgotten follow-delivers-what-comes-later follow-goes-on-after-drop
read-whose-answer-is-lost-is-repeated plain-append-whose-answer-is-lost-is-not-repeated session-whose-answer-is-lost-says-so
append-with-a-producer-is-repeated-and-acked two-producers-share-a-log replicated-ack-names-its-level""".split()

LANGUAGES = sys.argv[1:] or list(BUILDERS)
cases = [case["name"] for case in ALL_CASES if "needs" not in case]
# The cases over TLS in the default run: failures of TLS, and connections that break.
OVER_TLS = [case["name"] for case in ALL_CASES if case.get("needs") == "tls"] + ["append-then-read", "follow-goes-on-after-kill", "producer-in-flight-survives-kills"]


@check("The file of cases is well-formed")
def well_formed():
    done = run(harness.HERE / "harness.py", "--check-cases")
    expect("the cases are well-formed", done.returncode == 0, done.stdout.decode().strip().splitlines()[-1])


@check("The harness gives each start of the daemon the arguments of --start")
def start_arguments():
    status, _, _, said = conform(["true"], SCRATCH / "conformance-refused.log", start="--segment-bytes 1")
    expect("a wrong argument stops the daemon", status != 0 and "the least is 64KiB" in said, said[-300:])


def conformance(language):
    """Arguments of the checks that one language's client results in."""
    found = []

    def note(what, holds, detail=""):
        found.append((f"{language}: {what}", holds, detail))
        return holds

    began = time.monotonic()
    command = runner(language)
    built = time.monotonic()
    status, ok, failures, said = conform(command, SCRATCH / f"conformance-{language}.log")
    for case in cases:
        note(case, case in ok, next((line for line in failures if f" {case}:" in line), ""))
    if not note("the run is as it says", status == 0 or failures, said[-3000:] if status else
                f"{len(ok)} cases in {time.monotonic() - built:.0f} s, built in {built - began:.0f} s"):
        return found
    if language == "go" and sized(True, False):
        status, ok, failures, said = conform(command, SCRATCH / "conformance-other.log", start=OTHER)
        note(f"the same with {OTHER}", status == 0 and set(ok) == set(cases), "; ".join(failures) or said[-3000:])
    if language == "python":
        only = sized([], LOST)
        status, ok, failures, said = conform([*command, "--sync"], SCRATCH / "conformance-sync.log", only)
        note("the synchronous client", status == 0 and set(ok) == set(only or cases), "; ".join(failures) or said[-3000:])
    if language == "python" and sized(True, False):
        old = [case for case in cases if case in LOST or re.search("session|producer", case)]
        status, ok, failures, said = conform(oldest_python(), SCRATCH / "conformance-oldest.log", old)
        note(f"the same with {OLDEST_GRPCIO}", status == 0 and set(ok) == set(old), "; ".join(failures) or said[-3000:])
    faults = FAULTS[language]
    for what, file, old, _ in faults:
        count = (ROOT / file).read_text(encoding="utf-8").count(old)
        note(f"{file} has the place for a fault once: {what}", count == 1, count)
    for what, file, old, new in sized(faults, []):
        root = fresh_copy(language)
        text = (root / file).read_text(encoding="utf-8")
        (root / file).write_text(text.replace(old, new), encoding="utf-8")
        status, ok, failures, said = conform(runner(language, root), SCRATCH / f"fault-{language}.log", LOST)
        # A case must fail; a runner where nothing works does not count.
        note(f"found: {what}", status != 0 and failures and ok,
             f"{len(failures)} of {len(LOST)} cases failed: " + "; ".join(line[:120] for line in failures[:3]))
    return found


@check("Each client passes all cases; with --all the cases find faults that are planted in copies of it")
def clients():
    # All at once, since most cases wait.
    with ThreadPoolExecutor(len(LANGUAGES)) as pool:
        for found in pool.map(conformance, LANGUAGES):
            for one in found:
                expect(*one)


@check("Each client passes cases over TLS with client certificates; with --all it passes all")
def tls():
    def over_tls(language):
        only = sized([], OVER_TLS)
        began = time.monotonic()
        status, ok, failures, said = conform(runner(language), SCRATCH / f"conformance-tls-{language}.log", only, tls=True)
        wanted = only or [case["name"] for case in ALL_CASES if case.get("needs") != "replica"]
        holds = status == 0 and set(ok) == set(wanted)
        return f"{language}: {len(wanted)} cases over TLS", holds, "; ".join(failures) or said[-3000:] if not holds else f"{time.monotonic() - began:.0f} s"

    # Five at a time take as long on two processors, and each then needs more than its deadlines.
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(over_tls, LANGUAGES):
            expect(*found)


# Deno reports the code of an unknown CA for a certificate that is expired.
KNOWN = {"bun": [], "deno": ["tls-expired-server-is-refused"]}


@check("The client for TypeScript passes all cases, also over TLS, by Bun and Deno")
def runtimes():
    command = runner("typescript")[1:]
    wanted = {case["name"] for case in ALL_CASES if case.get("needs") != "replica"}
    for name in RUNTIMES:
        for title, tls, names in ("", False, set(cases)), (" over TLS", True, wanted):
            began = time.monotonic()
            _, ok, failures, said = conform([*runtime(name), *command], SCRATCH / f"conformance-{name}.log", tls=tls)
            known = KNOWN[name] if tls else []
            expect(f"{name}: {len(names) - len(known)} cases{title}", set(ok) == names - {*known} and len(failures) == len(known),
                   f"{time.monotonic() - began:.0f} s" if set(ok) == names - {*known} else "; ".join(failures) or said[-3000:])


def on_bucket(directory, what, some, stand_by):
    """Each client passes some cases on a bucket of its own; with --all every case."""
    every = [case["name"] for case in ALL_CASES if case.get("needs") != "tls"]
    wanted = sized(every, some)

    def of_language(language):
        here = Path(directory) / language
        here.mkdir()
        with own(here) as (bucket, _):
            start = f"--bucket-url {bucket.url} --bucket-endpoint {bucket.base} --bucket-insecure --bucket-gap 5ms"
            log = SCRATCH / f"conformance-{what.split()[-1]}-{language}.log"
            status, ok, failures, said = conform(runner(language), log, wanted, start, replica=bucket, stand_by=stand_by)
        return f"{language}: {len(wanted)} cases {what}", status == 0 and set(ok) == set(wanted), "; ".join(failures) or said[-3000:]

    with ThreadPoolExecutor(len(LANGUAGES)) as pool:
        for found in pool.map(of_language, LANGUAGES):
            expect(*found)


@check("Each client gets REPLICATED acks of a daemon with a replica; with --all it passes all cases on it")
def replica(directory):
    on_bucket(directory, "on a replica", [case["name"] for case in ALL_CASES if case.get("needs") == "replica"], stand_by=False)


@check("Each client is served by a node that does not own the store; with --all it passes all cases there")
def stand_by(directory):
    on_bucket(directory, "at a stand-by", FORWARDED, stand_by=True)


@check("A producer of each client goes on across a token that expires, once its file has another one")
def tokens(directory):
    here = Path(directory)
    auth_file, token, stop = here / "auth.toml", here / "token", here / "stop"
    auth_file.write_text('[principal.p]\nallow = [{ do = ["append", "create", "read", "list"], logs = "" }]\n')
    auth_file.chmod(0o600)

    def create(expires):
        made = here / f"token-{expires}"
        run(WALD, "token", "create", "--auth-file", auth_file, "--principal", "p", "--expires", expires, "--to", made, check=True)
        made.rename(token)

    create("8s")
    commands = {language: runner(language) for language in LANGUAGES}
    with Daemon(here / "data", "--auth-file", auth_file, "--metrics-open") as daemon:
        environment = clean_environment(WALD_ENDPOINT=daemon.endpoint, WALD_TOKEN_FILE=str(token), WALD_STOP=str(stop))
        producers = {language: subprocess.Popen([*command, "chaos-producer", f"log/{language}", language, "50"], env=environment, stdout=subprocess.PIPE,
                                                stderr=subprocess.PIPE, text=True, start_new_session=True) for language, command in commands.items()}
        try:
            # They ask again and again.
            refused = wait_until(lambda: daemon.metric('wald_auth_failures_total{reason="expired"}') >= 2 * len(producers))
            create("90d")
            daemon.process.send_signal(signal.SIGHUP)
            expect("the token expired while the producers appended", refused)

            def tail(language):
                done = run(WALCTL, "log", "get", f"log/{language}", "--output", "json", env=environment)
                return json.loads(done.stdout)[0]["tail_lsn"] if done.returncode == 0 else 0

            before = {language: None for language in producers}
            expect("there are records", wait_until(lambda: all(tail(language) for language in before)))
            before = {language: tail(language) for language in producers}
            expect("each producer appends again", wait_until(lambda: all(tail(language) > at for language, at in before.items())))
            stop.touch()
            for language, producer in producers.items():
                said, trouble = producer.communicate(timeout=60)
                records = run(WALCTL, "scan", f"log/{language}", "--output", "raw", env=environment, check=True).stdout.decode().split()
                total = int(said.split()[1]) if producer.returncode == 0 else -1
                wanted = [*(f"{language}:{number}" for number in range(total)), f"END:{language}"]
                expect(f"{language}: each record is there once, in order", records == wanted, f"{len(records)} records {trouble[-500:]}")
        finally:
            for producer in producers.values():
                harness.end_group(producer)
