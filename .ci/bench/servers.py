"""Compares the daemon with servers that install from registries, under the same work. The number of callers is fixed,
and each sends one append after another, through one client program, on one device, in one run. Every server is
started once and stays; each round measures all of them in turn, so that any drift of the machine affects all. Prints
medians of the rounds as ratios to the daemon's, with the processor time and memory of the server.

Redis and PostgreSQL come from the distribution's packages, unpacked and not installed; NATS and etcd from Go
modules; s2-lite, with --s2, from crates.io, which takes about 15 minutes to build. The output names servers that are
not available, and the others are measured. All files are below target/ci.

Through gRPC that program uses more processor time than the server. Therefore independent load generators of three
protocols measure their servers, too: h2load, redis-benchmark and pgbench.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path

from common import SCRATCH, check, expect
from peers import *


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--in-flight", default="1,16,64,256")
    parser.add_argument("--bytes", type=int, default=128)
    parser.add_argument("--only", default="")
    parser.add_argument("--s2", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


@check("The daemon next to Redis, PostgreSQL, NATS, etcd and s2-lite under one client")
def servers():
    options = arguments()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    client = built_client()
    only = [name for name in options.only.split(",") if name]
    wanted = [kind for kind in SERVERS if (options.s2 or kind is not S2Lite)
              and (not only or kind.system.startswith("wald") or any(name in kind.name for name in only))]
    servers, absent, rows, generated = [], {}, [], []
    kinds = {kind.name: kind for kind in wanted}
    with tempfile.TemporaryDirectory(dir=SCRATCH) as directory:
        if not os.getuid():
            # PostgreSQL's owner needs access to its own directory.
            os.chmod(directory, 0o755)
        try:
            for kind in wanted:
                try:
                    servers.append(kind(directory))
                except Unavailable as why:
                    absent[kind.name] = str(why)
                    print(f"{kind.name}: not measured: {why}")
            flushes = bare_flushes(directory)
            print(f"{platform.platform()}, {os.cpu_count()} cores; 128 B and fdatasync into a file that is there: "
                  f"{flushes['per_second']:.0f}/s, p50 {flushes['p50_us']:.0f} us; "
                  f"{options.bytes} B a record, {options.seconds} s a run, medians of {options.rounds}")
            for in_flight in (int(number) for number in options.in_flight.split(",")):
                found = measure(program(client), servers, in_flight, options)
                table(found, f"{in_flight} in flight")
                rows += found
                found = measure(generator, [server for server in servers if server.generator], in_flight, options)
                table(found, f"{in_flight} in flight, by the load generators of the protocols")
                generated += ({**row, "generator": kinds[row["server"]].generator} for row in found)
        finally:
            for server in servers:
                server.stop()
    if options.json:
        about = {"platform": platform.platform(), "cores": os.cpu_count(), "bytes": options.bytes,
                 "seconds": options.seconds, "rounds": options.rounds, "bare_flush": flushes,
                 "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        options.json.write_text(json.dumps({"about": about, "absent": absent, "rows": rows, "generated": generated},
                                           indent=1) + "\n")
    expect("servers are measured", rows, len(rows))
