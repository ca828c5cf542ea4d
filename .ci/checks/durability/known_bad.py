"""A test that also passes on a broken build is worth nothing. Engines with one deliberate mistake each
(storage/src/disk/known_bad.rs), and shippers of the replica (storage/bucket/src/known_bad.rs, named replica:NAME), go through the layers of tests. The result is which layer catches which, and how
soon. A mistake that no layer catches fails this check. So does a layer that fails without any mistake, and one that
never ends: a test that hangs proves nothing. Sizes are small: a layer that catches nothing here may do so in a
longer run. Without --all a mistake goes through the layers in turn and stops at the first that catches it. With
`-- --all` also schedules of the threads, the layers that start a daemon (kills, failing calls, real power cuts: as root,
with loop devices) and the engine's other tests, which takes some minutes more.
"""

import collections
from concurrent.futures import ThreadPoolExecutor

from cargo import *
from clients import runner

MISTAKES = ["no_flush", "flush_result_ignored", "no_directory_flush", "no_salt", "no_chain", "truncate_on_any_error",
            "ack_before_flush", "producers_not_in_checkpoint", "last_good_frame", "sorter_ignores_space",
            "unreadable_ends_read", "leftovers_stay", "sorted_indexes_stay", "producers_never_expire",
            "damage_stops_checkpoints", "unproven_forgotten", "ack_before_replica", "ship_from_written", "skip_row", "tag_not_checked"]
# Mistakes of the shipper of the replica and of nodes that take over, which only their own tests can meet.
SHIP_MISTAKES = ["replica:" + name for name in [
    "ack_before_put", "publish_durable", "drain_before_upload", "skip_part", "manifest_before_content",
    "manifest_before_trims", "fence_ignored", "named_content_removed", "lease_for_fence", "stand_by_skips_row", "ring_late"]]
# Mistakes of the daemon's keys, which its own tests meet.
KEY_MISTAKES = ["nonce_reused", "key_in_frame"]
# A mistake of the daemon: tests with several daemons can meet it, and tests of the shipper cannot. Only with --all.
NODE_MISTAKES = ["replica:term_unchecked"]
# Tests of the daemon with several nodes.
NODES = ["forward::call_goes_on_once", "second_node_takes_over", "stand_by::"]
# Modules of the other layers of the engine's own tests.
SIMULATED, HISTORIES = ["power_cut", "simulation", "combined"], ["histories", "retries"]
DAMAGE = ["damage", "around_damage", "unreadable", "random_damage", "stale", "repair", "encryption"]
SPACE, MONTH, REPLICA = ["space"], ["month"], ["replica", "lost_machines"]
# Many times the duration of any layer, and longer than any internal wait.
PATIENCE = 240
WORKERS = 2
# Failing calls, as in .ci/run durability/syscalls: flushes of the journal, at the start and later, and one of its directory.
FAULTS = ["new:fdatasync:journal/0000000000000001.seg:2:EIO", "new:fdatasync:journal/0000000000000001.seg:6:EIO",
          "new:fsync:journal:1:EIO"]
# Line of a failing test, as soon as it is printed.
FAILED = re.compile(r"test (\S+) \.\.\. FAILED|FAIL (.+)")

Cell = collections.namedtuple("Cell", "end seconds by out")


def built(*arguments):
    """The binaries that cargo builds with these arguments, by target name."""
    command = ["cargo", *arguments, "--no-run", "--message-format", "json"]
    out = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    messages = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
    return {m["target"]["name"]: m["executable"] for m in messages if m.get("executable")}


def layers(directory, every):
    """For each layer: its command and its environment."""
    # The mistakes are in every build of the engine's own tests.
    engine = binaries()["wald_storage"]

    def modules(binary, names, **environment):
        return [binary, *(f"tests::{name}::" for name in names)], environment

    found = {
        "simulated": modules(engine, SIMULATED, WALD_CUTS="1500", WALD_FAILS="300", WALD_LIES="100",
                             WALD_COMBINED="200"),
        "histories": modules(engine, HISTORIES, WALD_HISTORIES="60", WALD_RETRIES="100"),
        "damage": modules(engine, DAMAGE, WALD_FUZZ="100"),
        "space": modules(engine, SPACE),
        "month": modules(engine, MONTH, WALD_MONTH="4"),
        "replica": modules(engine, REPLICA, WALD_MACHINES="200"),
        "shipper": ([built("test", "-p", "wald-bucket", "--features", "replica", "--lib")["wald_bucket"], "ship::"],
                    {"WALD_MACHINES": "30"}),
        "keys": ([built("test", "-p", "wald-server", "--bin", "wald")["wald"], "encryption::"], {}),
    }
    if not every:
        return found
    threads = built("test", "--workspace", "--lib", "--features", "wald-storage/known-bad,wald-storage/shuttle")["wald_storage"]
    tests = built("test", "-p", "wald-server", "--features", "known-bad,object", "--test", "kill", "--test", "power_cut",
                  "--test", "replica")
    # A separate path, so that the next build does not replace it.
    daemon = shutil.copy2(tests["wald"], directory / "wald")
    own = {"WALD_BINARY": str(daemon)}
    # Built once, before several layers use it at the same time.
    python, _ = runner("python")
    skipped = [word for name in SIMULATED + HISTORIES + DAMAGE + SPACE + MONTH + REPLICA
               for word in ("--skip", f"tests::{name}::")]
    return found | {
        "schedules": modules(threads, ["interleavings"], WALD_SCHEDULES="300"),
        "engine": ([engine, *skipped], {}),
        "kill -9": ([tests["kill"]], {**own, "WALD_KILLS": "6", "WALD_ACKS": "100"}),
        "syscalls": ([python, *script("durability/syscalls", *FAULTS)], own),
        "nodes": ([tests["replica"], *NODES], own),
        "power cut": ([tests["power_cut"], "--ignored", "ext4"], {**own, "WALD_CUTS": "8"}),
    }


def chosen_by(mistake):
    """The variable of the environment that chooses a mistake, and its value."""
    kind, _, name = mistake.rpartition(":")
    return ("WALD_KNOWN_BAD_REPLICA" if kind else "WALD_KNOWN_BAD"), name


def wrapped(daemon, mistake):
    """A daemon with the mistake: tests pass it in the environment."""
    path = Path(f"{daemon}-{mistake}")
    if not path.exists():
        # No process finds it half written, or still open for writing.
        temporary = Path(f"{path}.{threading.get_ident()}")
        variable, name = chosen_by(mistake)
        temporary.write_text(f'#!/bin/sh\nexec env {variable}={name} "{daemon}" "$@"\n')
        temporary.chmod(0o755)
        temporary.rename(path)
    return str(path)


def run(command, environment, mistake, directory):
    """How a layer ends, the seconds it takes, the failing test, and its last words. With a mistake a layer of the
    engine is stopped at its first failure. Its files stay in the directory."""
    environment = {**clean_environment(), **environment, "TMPDIR": str(directory)}
    # Tests of a crate run in its directory.
    place = ROOT / ("server" if "WALD_BINARY" in environment else "storage")
    if mistake:
        variable, name = chosen_by(mistake)
        environment[variable] = name
        if "WALD_BINARY" in environment:
            environment["WALD_BINARY"] = wrapped(environment["WALD_BINARY"], mistake)
    began = time.monotonic()
    process = subprocess.Popen([str(part) for part in command], cwd=place, env=environment, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    # Not waited for before, so the process group still exists.
    end = lambda: os.killpg(process.pid, signal.SIGKILL)
    gave_up = threading.Event()
    watchdog = threading.Timer(PATIENCE, lambda: (gave_up.set(), end()))
    watchdog.start()
    said, by = collections.deque(maxlen=200), None
    for line in process.stdout:
        said.append(line)
        told = FAILED.match(line)
        by = by or told and (told[1] or told[2])[:200]
        # A layer with a disk of its own must release it, so it runs to its end.
        if by and mistake and place.name == "storage":
            end()
            break
    watchdog.cancel()
    process.stdout.close()
    code = process.wait()
    outcome = "caught" if by or code else "passes"
    return Cell("hangs" if gave_up.is_set() else outcome, time.monotonic() - began, by or f"exit code {code}", "".join(said))


def layers_for(every, mistake):
    """The layers that can meet a mistake. Tests of the shipper and of several nodes use an engine without mistakes."""
    if not mistake:
        return every
    replica = {"nodes"} if mistake in NODE_MISTAKES else {"shipper", "nodes"}
    met = replica if mistake.startswith("replica:") else {"keys"} if mistake in KEY_MISTAKES else None
    is_met = lambda layer: layer in met if met else layer not in {"shipper", "nodes", "keys"}
    return {layer: how for layer, how in every.items() if is_met(layer)}


def until_caught(every, mistake, directory):
    """The layers' results for a mistake, up to the first that catches it."""
    cells = {}
    for layer, how in every.items():
        cells[layer] = run(*how, mistake, directory)
        if cells[layer].end != "passes":
            break
    return cells


def text(cell):
    return "hangs" if cell.end == "hangs" else f"{'caught' if cell.end == 'caught' else '-'} {cell.seconds:.1f} s"


@check("Each engine with a deliberate mistake is caught by a layer of tests; no mistake makes a test hang")
def mistakes():
    chosen = [argument for argument in sys.argv[1:] if argument != "--all"]
    began = time.monotonic()
    with scratch() as temporary, ThreadPoolExecutor(WORKERS) as pool:
        every = layers(Path(temporary), "--all" in sys.argv)
        print(f"built in {time.monotonic() - began:.0f} s", flush=True)
        few, rows = sized(False, "--all" not in sys.argv), {}
        known = MISTAKES + KEY_MISTAKES + SHIP_MISTAKES + (NODE_MISTAKES if "nodes" in every else [])

        def begin(mistake):
            """Starts the layers on a mistake; the result gives their cells."""
            tried = layers_for(every, mistake)
            if few and mistake:
                return pool.submit(until_caught, tried, mistake, temporary).result
            cells = {layer: pool.submit(run, *how, mistake, temporary) for layer, how in tried.items()}
            return lambda: {layer: cell.result() for layer, cell in cells.items()}

        for mistake, result in [(mistake, begin(mistake)) for mistake in [None, *(chosen or known)]]:
            row = rows[mistake] = result()
            endless = [layer for layer, cell in row.items() if cell.end == "hangs"]
            if mistake is None:
                for layer, cell in row.items():
                    if not expect(f"{layer} passes when nothing is wrong", cell.end == "passes", f"{cell.seconds:.1f} s"):
                        print(cell.out[-4000:])
                continue
            caught = {layer: cell for layer, cell in row.items() if cell.end == "caught"}
            expect(f"{mistake} is caught", caught, ", ".join(caught))
            for layer, cell in caught.items():
                print(f"     {layer}: {cell.by}")
            expect(f"{mistake} makes no test hang", not endless, ", ".join(endless))
    print(f"\n{'':28}" + "".join(f"{layer:>15}" for layer in every))
    for mistake, row in rows.items():
        print(f"{mistake or '(none)':28}" + "".join(f"{text(row[layer]) if layer in row else 'not tried':>15}" for layer in every))
    print(f"{time.monotonic() - began:.0f} s in all")
