"""Writes 1,000 logs of 1 MB each in turn (an argument changes their number), then reads single ones with cold system caches. After sorting a read must
be at least ten times as fast as before, and take at most 1.5 times as long as a log that is alone in its
store. With fewer logs there is less to gain: the factor of ten is required from 5,000 logs on. Drops caches,
so it needs root.
"""

import statistics

from common import *

EACH, RECORD = 1_000_000, 4_000
SAMPLES = sized(21, 11)
OFF = "--sorter-enabled=false"
READING = TARGET / "release" / "reading"


def cold():
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def fill(directory, logs):
    with Daemon(directory, OFF) as daemon:
        appends = logs * EACH // RECORD
        with daemon.load(appends=appends, logs=logs, writers=64, connections=4, bytes=RECORD, durability="written") as load:
            told = load.result(3600)
        expect(f"{logs:,} logs are written, a record of each in turn", told["acks"] == appends, f"{told['seconds']:.0f} s")
        daemon.stop()


def sort(directory):
    """Waits until the sorter has no more work."""
    began = time.monotonic()
    with Daemon(directory) as daemon:
        seen, since = None, began
        # The sorter waits for 20 s before work that is not urgent.
        while time.monotonic() < since + sized(35, 25):
            metrics = daemon.metrics()
            now = metrics["wald_sorter_written_bytes_total"]
            if now != seen:
                seen, since = now, time.monotonic()
            time.sleep(0.5)
        daemon.stop()
    expect("all of it is sorted", metrics["wald_unsorted_bytes"] <= 2 * (64 << 20) and metrics["wald_sorted_runs"] > 0,
           f"{since - began:.0f} s, {seen / (1 << 20):,.0f} MiB written, {metrics['wald_sorted_runs']:.0f} runs")


def read(what, directory, logs):
    """Cold reading time of each of these logs; the median, in ms."""
    times, whole = [], True
    with Daemon(directory, OFF) as daemon:
        for log in logs:
            cold()
            told = json.loads(run(READING, daemon.endpoint, log, check=True).stdout)
            whole &= told["bytes"] == EACH and told["gaps"] == 0
            times.append(told["micros"] / 1000)
        daemon.stop()
    median = statistics.median(times)
    expect(f"{what}: read whole", whole, f"{median:.1f} ms ({min(times):.1f} to {max(times):.1f})")
    return median


@check("After sorting, one of many logs reads nearly as fast as a log that is alone")
def clustered(directory):
    logs = int(sys.argv[1]) if sys.argv[1:] else 1_000
    chosen = [f"load/{logs * number // SAMPLES}" for number in range(SAMPLES)]
    many, alone = directory / "many", directory / "alone"
    fill(many, logs)
    fill(alone, 1)
    before = read("before sorting", many, chosen)
    sort(many)
    # In turns, because the machine's speed may vary.
    rounds = [(read("after sorting", many, chosen), read("a log that is alone", alone, ["load/0"] * SAMPLES)) for _ in range(3)]
    after = statistics.median(sorted_ for sorted_, _ in rounds)
    least = 10 if logs >= 5_000 else 2
    expect(f"sorted, a log is read at least {least} times as fast", before >= least * after, f"{before / after:.1f}")
    ratio = statistics.median(sorted_ / lone for sorted_, lone in rounds)
    expect("and takes at most 1.5 times as long as one that is alone", ratio <= 1.5, f"{ratio:.2f}")
