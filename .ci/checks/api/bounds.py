"""A client creates logs without end, at the default bounds and with memory_limit at 512 MiB. A million logs are
created, more are refused with QUOTA, existing logs keep working, and memory stays within 512 MiB, also in a restart
after a kill. `wald delete-logs` then makes room while no daemon serves the store. Logs that are created and deleted
never use up their bound for good.
"""

from common import *

FOREST = TARGET / "release" / "forest"
MIB = 1 << 20
MOST_MIB = 512
BOUND = sized(1_000_000, 100_000)
ATTEMPTS = 2 * BOUND


def peak(daemon):
    """Maximum resident memory until now, in MiB."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


def append(daemon, log):
    return daemon.call("wald.v1.WalService/Append", {"log": log, "record": {"text": "x"}})


def flat(daemon, when):
    expect(f"{when}: at most {MOST_MIB} MiB were resident", peak(daemon) <= MOST_MIB, f"{peak(daemon):.0f} MiB")


@check("Logs that come and go never use up max_logs for good")
def come_and_go(data):
    with Daemon(data, "--max-logs", 1) as daemon:
        done, made = None, 0
        while made < sized(2000, 1100):
            done = daemon.ready().walctl("log", "create", "comes")
            done = done if done.returncode else daemon.walctl("log", "delete", "comes", "--yes")
            if done.returncode:
                break
            made += 1
        said = done.stderr.decode()
        expect("deleted logs are bounded, too, or forgotten in time", done.returncode == 0 or "deleted logs" in said,
               f"{made} logs; {said[-200:]}")
        fine = wait_until(lambda: append(daemon, "stays")[0] == 0, 20)
        expect("they are removed within seconds, though there is nothing else to sort", fine)


@check("A client that makes logs without end gets QUOTA; memory stays within 512 MiB; delete-logs makes room")
def endless(data):
    arguments = ["--memory-limit", f"{MOST_MIB}MiB", "--max-logs", BOUND]
    with Daemon(data, *arguments) as daemon:
        append(daemon, "ours")
        done = run(FOREST, "make", daemon.endpoint, "--logs", ATTEMPTS, "--prefix", "stranger", "--tolerate", check=True)
        made = json.loads(done.stdout)
        expect(f"{ATTEMPTS:,} attempts to make logs: the bound holds", made["logs"] < BOUND and daemon.metric("wald_logs") <= BOUND
               and made["logs"] + made["refused"] == ATTEMPTS and made["refused"] > 0, made)
        # A batch takes all of its logs or none, so a few places may be left.
        left = (daemon.walctl("append", f"one/{number}", "-", input=b"x\n").returncode for number in range(600))
        any(left)
        code, _, said = append(daemon, "one/more")
        fine = "QUOTA" in said and "max_logs" in said and str(BOUND) in said
        expect("another log is refused with the setting, the limit and the use", code != 0 and fine, said[-400:])
        code, answer, said = append(daemon, "ours")
        expect("existing logs accept appends", code == 0 and answer["lsn"] == "1", said)
        flat(daemon, "while they are made")
        daemon.process.kill()
    with Daemon(data, *arguments) as daemon:
        expect("a restart finds them all", daemon.ready().start["logs"] == BOUND, daemon.start)
        flat(daemon, "in a restart after a kill")
        expect("it stops with 0", daemon.stop() == 0)
    began = time.monotonic()
    done = run(WALD, "delete-logs", data, "--prefix", "stranger/", "--yes", "--max-logs", BOUND)
    said = (done.stdout + done.stderr).decode()
    expect("wald delete-logs deletes the stranger's", done.returncode == 0 and f"deleted {made['logs']} logs" in said,
           f"{time.monotonic() - began:.1f} s, {said.strip().splitlines()[-1:]}")
    with Daemon(data, *arguments) as daemon:
        code, _, said = append(daemon.ready(), "new")
        expect("then there is room for new logs", code == 0, said)
        code, answer, said = append(daemon, "ours")
        expect("and our records are there", code == 0 and answer["lsn"] == "2", said)
        expect("it stops with 0", daemon.stop() == 0)
