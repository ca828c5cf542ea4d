"""Appends 4 GiB over 10,000 logs, each with a retention of 20,000 bytes; arguments change both, in GiB and bytes. The store on the disk must
always stay within 1.3 times the kept bytes, plus the pool and the space that sorting needs. The 99th percentile of
appends with the sorter must be at most 1.5 times the one without. Both are measured in turns, in the same
run, with the same retention.
"""

import statistics

from common import *

LOGS, RECORD, SEGMENT = 10_000, 4_096, 64 << 20
STEP = 512 << 20  # sorter_step_bytes
POOL = 4 * SEGMENT  # two segments that are ready, two of the reserve
TURNS = sized(5, 3)
MOST_P99 = 1.5
MIB = 1 << 20


def occupied(directory):
    """Bytes on the disk, by subdirectory."""
    found = {}
    for entry in os.scandir(directory):
        if entry.is_dir():
            found[entry.name] = 0
            for file in os.scandir(entry):
                try:
                    found[entry.name] += file.stat().st_blocks * 512
                except FileNotFoundError:
                    pass  # gone since
    return found


class Watch:
    """Reads the size of a directory four times a second; a context."""

    def __init__(self, directory):
        self.directory, self.over, self.most, self.looks = directory, threading.Event(), {}, 0

    def look(self):
        while not self.over.wait(0.25):
            now = occupied(self.directory)
            self.most, self.looks = max(self.most, now, key=lambda each: sum(each.values())), self.looks + 1

    def __enter__(self):
        self.directory.mkdir()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


def turn(directory, sorter, kept, appends):
    """Makes this number of appends. Returns the load driver's result and the metrics after it."""
    with Daemon(directory, "--retention-max-bytes", kept, "--retention-interval", "1s",
                f"--sorter-enabled={str(sorter).lower()}", "--sorter-step-bytes", STEP) as daemon:
        with daemon.load(appends=appends, writers=64, connections=4, logs=LOGS, bytes=RECORD, durability="durable") as load:
            told = load.result(3600)
        metrics = daemon.metrics()
        expect("all is acked", told["acks"] == appends, told.get("error", ""))
        daemon.stop()
    print(f"     {'with' if sorter else 'without'} the sorter: {told['acks'] / told['seconds']:,.0f} appends/s, p50 {told['p50_us']} us, "
          f"p99 {told['p99_us']} us, at most {told['max_us']} us; {metrics['wald_sorter_read_bytes_total'] / MIB:,.0f} MiB read and "
          f"{metrics['wald_sorter_written_bytes_total'] / MIB:,.0f} MiB written by it, {metrics['wald_sorted_runs']:.0f} runs, "
          f"{metrics['wald_unsorted_bytes'] / MIB:,.0f} MiB not sorted", flush=True)
    return told["p99_us"], metrics["wald_sorter_written_bytes_total"]


@check("Disk space under retention stays within its bound, and the sorter costs appends little")
def bounded(directory):
    gib = float(sys.argv[1]) if sys.argv[1:] else sized(4, 2.4)
    kept = int(sys.argv[2]) if sys.argv[2:] else 20_000
    appends = int(gib * (1 << 30) / RECORD / TURNS)
    most = int(LOGS * kept * 1.3) + POOL + max(4 * SEGMENT, STEP)
    p99, written = {True: [], False: []}, 0
    with Watch(directory / "sorted") as watch:
        for _ in range(TURNS):
            # Without the sorter no space is freed: each turn has a new store, and fewer appends suffice.
            for sorter, many in ((True, appends), (False, appends // 4)):
                place = watch.directory if sorter else directory / "journal"
                took, wrote = turn(place, sorter, kept, many)
                p99[sorter].append(took)
                written += wrote
            shutil.rmtree(place)
    expect("the sorter was at work", written > gib * (1 << 30) / 4, f"{written / MIB:,.0f} MiB written")
    expect(f"{gib:g} GiB over {LOGS:,} logs that keep {kept:,} bytes each: at most {most / MIB:,.0f} MiB on the disk",
           watch.looks > 10 and sum(watch.most.values()) <= most,
           f"{sum(watch.most.values()) / MIB:,.0f} MiB (" + ", ".join(f"{name} {size // MIB}" for name, size in sorted(watch.most.items())) + ")")
    ratio = statistics.median(p99[True]) / statistics.median(p99[False])
    expect(f"p99 of appends with the sorter is at most {MOST_P99} times that without", ratio <= MOST_P99, f"{ratio:.2f}")
