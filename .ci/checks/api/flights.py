"""Real input: the flights of the npm package vega-datasets, loaded by walctl from a JSON array and
from JSON lines on stdin, read back equal and in order, again after kill -9; then split into one
log per airport and read back by prefix. Digests are compared with a rendering made here.
"""

import json
from collections import Counter, defaultdict

from common import *


def scanned(daemon, log):
    done = daemon.walctl("scan", log, "--output", "jsonl")
    return done.stdout.decode().splitlines() if done.returncode == 0 else [done.stderr.decode()]


@check("Flights of vega-datasets come back equal and in order, after kill -9 too, and split by airport")
def flights(directory):
    big, small = vega_file("flights-200k.json"), vega_file("flights-20k.json")
    lines = elements(big)
    wanted = digest(lines)
    expect("the elements are the same as in the whole file", json.loads(big.read_text()) == [json.loads(line) for line in lines],
           f"{len(lines)} records, sha256 {wanted[:16]}")
    data = directory / "data"
    with Daemon(data) as daemon:
        began = time.monotonic()
        terminal = Terminal(WALCTL, "append", "flights", "--format", "json-array", big,
                            env=clean_environment(WALD_ENDPOINT=daemon.endpoint, COLUMNS="100", TERM="xterm"))
        code = terminal.ended(600)
        expect("walctl append loads a JSON array", code == 0,
               f"{time.monotonic() - began:.1f} s; {terminal.text.replace(chr(27) + '[2K', chr(10)).split(chr(10))[-2].strip()}")
        expect("it shows a progress bar on a terminal", "%" in terminal.text and "left" in terminal.text)
        done = daemon.walctl("append", "flights-lines", "--format", "jsonl", "-",
                             input="".join(f"{line}\n" for line in lines).encode())
        expect("walctl append loads JSON lines from stdin", done.returncode == 0, done.stderr.decode().strip())
        for log in ("flights", "flights-lines"):
            found = scanned(daemon, log)
            expect(f"{log} comes back equal and in order", digest(found) == wanted, f"{len(found)} records")
        epoch = daemon.start["recovery_epoch"]
        daemon.kill()
    with Daemon(data) as daemon:
        expect("it restarts after kill -9", daemon.start["recovery_epoch"] == epoch + 1, f"{daemon.start['recovery_ms']} ms")
        for log in ("flights", "flights-lines"):
            found = scanned(daemon, log)
            expect(f"{log} comes back equal after kill -9", digest(found) == wanted, f"{len(found)} records")

        rows = elements(small)
        done = daemon.walctl("append", "--log-from-field", "origin", "--log-prefix", "airport/", small)
        expect("walctl splits a file into one log per airport", done.returncode == 0, done.stderr.decode().strip())
        by_airport = defaultdict(list)
        for row in rows:
            by_airport["airport/" + json.loads(row)["origin"]].append(row)
        daemon.kill()
    with Daemon(data) as daemon:
        done = daemon.walctl("scan", "--prefix", "airport/", "--output", "jsonl")
        found = done.stdout.decode().splitlines()
        expect("a scan by prefix gives every record once", Counter(found) == Counter(rows), f"{len(found)} records")
        order, dense = defaultdict(list), True
        for line in daemon.walctl("scan", "--prefix", "airport/", "--output", "json").stdout.splitlines():
            record = json.loads(line)
            dense = dense and record["lsn"] == len(order[record["log"]])
            order[record["log"]].append(record["value"])
        same = {log: [json.loads(row) for row in rows] for log, rows in by_airport.items()}
        expect("each airport's flights are in the order of the file", dict(order) == same, f"{len(order)} logs")
        expect("lsns are dense from 0", dense)
        log, of_one = max(by_airport.items(), key=lambda item: len(item[1]))
        expect("one airport's log is its flights", digest(scanned(daemon, log)) == digest(of_one),
               f"{log}, {len(of_one)} records")
        expect("SIGTERM ends it with 0", daemon.stop() == 0)
