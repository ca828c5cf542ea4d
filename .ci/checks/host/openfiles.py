"""2,000 segments (600 in the default run) with at most 16 of them open. 64 concurrent scans (of single logs, by prefix and of
everything) return every record once and in order, with both read strategies, and the process never
exceeds its limits of open and mapped files.
"""

import collections

from common import *

SEGMENTS = sized(2_000, 600)
MOST = 16
READERS = 4
LOGS = 40
# Four records to a request, two requests to a segment: walctl fills requests by their records, and frames of
# four logs must also fit into half a segment.
RECORD_BYTES = 6_800
RECORDS = SEGMENTS * 6


def line(number):
    """A record names its log and its number."""
    return f'{{"log":"scan/{number % LOGS:02}","number":{number},"rest":"'.ljust(RECORD_BYTES, "x") + '"}'


def log_of(text):
    return text[13:15]


def fill(daemon):
    """Appends the records in order, over the logs in turn, in the largest requests allowed."""
    rows = "".join(f"{line(number)}\n" for number in range(RECORDS))
    done = daemon.walctl("append", "--log-from-field", "log", "--log-prefix", "", "--format", "jsonl", "-",
                         input=rows.encode(), timeout=600)
    if done.returncode != 0:
        raise SystemExit(done.stderr.decode()[-500:])


class Watch(threading.Thread):
    """Samples open files and maps of the daemon, until stopped."""

    def __init__(self, daemon):
        super().__init__(daemon=True)
        self.daemon_, self.over = daemon, threading.Event()
        self.samples = self.segments = self.files = self.maps = 0
        self.start()

    def run(self):
        # Counting uses a processor, too: not more often than needed.
        while not self.over.wait(0.02):
            opened = [target for target in self.daemon_.descriptors() if target.startswith("/")]
            segments = sum(target.endswith((".seg", ".idx")) for target in opened)
            maps = sum(".seg" in line for line in Path(f"/proc/{self.daemon_.pid}/maps").read_text().splitlines())
            self.samples += 1
            self.files = max(self.files, len(opened))
            self.segments = max(self.segments, segments)
            self.maps = max(self.maps, maps)

    def stop(self):
        self.over.set()
        self.join()
        return self


def scanned(daemon, selector):
    """One scan: for each log the number of records, and a digest of them in the order received."""
    command = [WALCTL, "scan", *selector, "--output", "raw"]
    process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=clean_environment(WALD_ENDPOINT=daemon.endpoint))
    found = collections.defaultdict(hashlib.sha256)
    counts = collections.Counter()
    for text in process.stdout:
        log = log_of(text)
        counts[log] += 1
        found[log].update(text)
    error = process.stderr.read().decode()
    if process.wait() != 0:
        return error
    return {log: (counts[log], found[log].hexdigest()) for log in counts}


def scans(daemon):
    """64 scans at a time: each log once and some twice, prefixes of ten logs, everything."""
    selectors = [[f"scan/{number % LOGS:02}"] for number in range(56)]
    selectors += [["--prefix", f"scan/{tens}"] for tens in range(4)] + [["--prefix", "scan/"]] * 2 + [["--all"]] * 2
    results = [None] * len(selectors)

    def one(index):
        results[index] = scanned(daemon, selectors[index])

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(selectors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return selectors, results


def wanted():
    found = collections.defaultdict(hashlib.sha256)
    counts = collections.Counter()
    for number in range(RECORDS):
        text = f"{line(number)}\n".encode()
        counts[log_of(text)] += 1
        found[log_of(text)].update(text)
    return {log: (counts[log], found[log].hexdigest()) for log in counts}


def expected(selector, all_):
    if selector[0].startswith("--"):
        digits = selector[-1].removeprefix("scan/").encode() if selector[0] == "--prefix" else b""
        return {log: it for log, it in all_.items() if log.startswith(digits)}
    return {selector[0][-2:].encode(): all_[selector[0][-2:].encode()]}


@check("Many segments with 16 open at a time: 64 scans return every record once, within all limits")
def bounded_files(data):
    arguments = ["--segment-bytes", "64KiB", "--sorter-enabled=false", "--max-open-segments", MOST, "--reader-threads", READERS]
    began = time.monotonic()
    with Daemon(data, *arguments, "--sync-mode", "async") as daemon:
        fill(daemon)
        daemon.stop()
    count = len(list((data / "journal").glob("*.seg")))
    expect(f"there are {SEGMENTS:,} segments", count >= SEGMENTS, f"{count}, {RECORDS} records, "
           f"{time.monotonic() - began:.1f} s")
    all_ = wanted()
    for strategy in ("pread", "mmap"):
        with Daemon(data, *arguments, "--read-strategy", strategy) as daemon:
            idle = len([target for target in daemon.ready().descriptors() if target.startswith("/")])
            watch = Watch(daemon)
            began = time.monotonic()
            selectors, results = scans(daemon)
            took = time.monotonic() - began
            watch.stop()
            wrong = [(selector, found if isinstance(found, str) else "other records")
                     for selector, found in zip(selectors, results) if found != expected(selector, all_)]
            expect(f"{strategy}: 64 scans at a time give every record once, in order", not wrong,
                   f"{sum(sum(n for n, _ in found.values()) for found in results if isinstance(found, dict))} records, "
                   f"{took:.1f} s{f'; {wrong[:2]}' if wrong else ''}")
            # Each reader may hold one file that was closed for others meanwhile, and one that is being opened.
            bound = idle + MOST + 2 * READERS
            expect(f"{strategy}: files open are bounded all the time", watch.samples > SEGMENTS // 40 and watch.files <= bound,
                   f"at most {watch.files} ({watch.segments} of segments), {idle} before, {watch.samples} samples, "
                   f"bound {bound}")
            held = MOST + 2 * READERS if strategy == "mmap" else 0
            expect(f"{strategy}: so are maps of segments", watch.maps <= held and (watch.maps > 0) == (strategy == "mmap"),
                   f"at most {watch.maps}, bound {held}")
            opened = daemon.metric("wald_open_segments")
            expect(f"{strategy}: the daemon counts the same", opened <= MOST
                   and daemon.metric("wald_segment_cache_evictions_total") > SEGMENTS, f"{opened:.0f} open")
