"""Appends through the client of each language, beside Redis through the client that users of that language take. Each program
(client/*/bench) makes 128 B appends in a closed loop, through one client, durable: Wald with DURABLE, Redis with `appendfsync
always`. Wald is measured twice: as its clients work, where appends share a stream, and with a call for each append.

The servers are started once. Each round measures all of them in turn, so that a drift of the machine affects all. Prints medians of the
rounds, and the ratios to Redis.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from clients import BENCH_CLIENTS, FOLDERS, build, go_stubs, rust_appends
from common import ROOT, SCRATCH, check, expect, run
from peers import Redis, Wald, bare_flushes

# Redis's client in each language.
PEERS = {"rust": "redis-rs", "go": "go-redis", "python": "redis.asyncio", "typescript": "ioredis", "java": "Lettuce"}
SERVERS = {"stream": ("wald", []), "calls": ("wald", ["--unary"]), "redis": ("redis", [])}


def rust():
    return [rust_appends()]


def go():
    go_stubs()
    build("go", "build", "-o", BENCH_CLIENTS / "go", ".", cwd=ROOT / "client/go/bench")
    return [BENCH_CLIENTS / "go"]


def python():
    venv = BENCH_CLIENTS / "python"
    build(sys.executable, "-m", "venv", "--clear", venv, cwd=ROOT)
    folder = ROOT / FOLDERS["python"]
    build(venv / "bin/python", "-m", "pip", "install", "--quiet", "-r", folder / "bench/requirements.txt", folder, cwd=ROOT)
    return [venv / "bin/python", folder / "bench/bench.py"]


def typescript():
    folder = ROOT / FOLDERS["typescript"]
    build("npm", "ci", "--silent", "--no-audit", "--no-fund", cwd=folder)
    build("npm", "ci", "--silent", "--no-audit", "--no-fund", cwd=folder / "bench")
    build("npm", "run", "--silent", "build", cwd=folder / "bench")
    return ["node", folder / "bench/dist/bench.js"]


def java():
    folder = ROOT / FOLDERS["java"]
    build("mvn", "--quiet", "--batch-mode", "-DskipTests", "install", cwd=folder)
    build("mvn", "--quiet", "--batch-mode", "package", cwd=folder / "bench")
    return ["java", "-cp", f"{folder}/bench/target/classes:{folder}/bench/target/lib/*", "dev.wald.bench.Bench"]


BUILDERS = {"rust": rust, "go": go, "python": python, "typescript": typescript, "java": java}


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--in-flight", default="1,16,64,256")
    parser.add_argument("--only", default=",".join(BUILDERS))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measured(program, server, in_flight, options, flags):
    """One run of a program: acks per second, and latencies."""
    kind = {Wald: "wald", Redis: "redis"}[type(server)]
    done = run(*program, kind, server.address(), in_flight, options.seconds, *flags, check=True, timeout=options.seconds + 120)
    told = json.loads(done.stdout.decode().strip().splitlines()[-1])
    return {"per_second": told["acks"] / told["seconds"], "p50_us": told["p50_us"], "p99_us": told["p99_us"]}


@check("Appends through each client, beside Redis through that language's usual client")
def languages():
    options = arguments()
    BENCH_CLIENTS.mkdir(parents=True, exist_ok=True)
    programs = {language: [str(part) for part in BUILDERS[language]()] for language in options.only.split(",")}
    rows = []
    with tempfile.TemporaryDirectory(dir=SCRATCH) as directory:
        running = {}
        try:
            running = {"wald": Wald(directory), "redis": Redis(directory)}
            flushes = bare_flushes(directory)
            print(f"{platform.platform()}, {os.cpu_count()} cores; 128 B and fdatasync into a file that is there: "
                  f"{flushes['per_second']:.0f}/s; {options.seconds} s a run, medians of {options.rounds}")
            print(f"{'client':12}{'in flight':>10}{'stream/s':>12}{'calls/s':>12}{'redis/s':>12}{'of redis':>10}{'of calls':>10}{'p50':>8}{'p99':>8}")
            for in_flight in (int(number) for number in options.in_flight.split(",")):
                runs = {(language, name): [] for language in programs for name in SERVERS}
                for _ in range(options.rounds):
                    for language, name in runs:
                        server, flags = SERVERS[name]
                        runs[language, name].append(measured(programs[language], running[server], in_flight, options, flags))
                for language in programs:
                    row = {"client": language, "in_flight": in_flight, "peer": PEERS[language]}
                    for name in SERVERS:
                        row[name] = {key: statistics.median(one[key] for one in runs[language, name])
                                     for key in ("per_second", "p50_us", "p99_us")}
                    rate = lambda name: row[name]["per_second"]
                    print(f"{language:12}{in_flight:10}{rate('stream'):12.0f}{rate('calls'):12.0f}{rate('redis'):12.0f}"
                          f"{rate('stream') / rate('redis'):10.2f}{rate('stream') / rate('calls'):10.2f}"
                          f"{row['stream']['p50_us']:8.0f}{row['stream']['p99_us']:8.0f}", flush=True)
                    rows.append(row)
        finally:
            for server in running.values():
                server.stop()
    if options.json:
        about = {"platform": platform.platform(), "cores": os.cpu_count(), "seconds": options.seconds, "rounds": options.rounds,
                 "bare_flush": flushes, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    expect("clients are measured", len(rows) == len(programs) * len(options.in_flight.split(",")), len(rows))
