#!/usr/bin/env python3
"""usage: .ci/known_bad.py [MISTAKE...]

A test that would also pass on a broken build is worth nothing. Engines that are wrong on purpose, one mistake
each (storage/src/known_bad.rs), go through the layers of tests: which layer catches which, and how soon. A
mistake that no layer catches fails this; so does a layer that fails without any mistake. Sizes are small: a
layer that catches nothing here may do so in a longer run.
"""

import time

from common import *

MISTAKES = ["no_flush", "flush_result_ignored", "no_directory_flush", "no_salt", "no_chain", "truncate_on_any_error",
            "ack_before_flush", "producers_not_in_checkpoint", "last_good_frame"]
# What the other layers of the engine's own tests are: their modules.
SIMULATED, HISTORIES = ["power_cut"], ["histories", "retries"]
DAMAGE = ["damage", "random_damage", "stale", "repair"]
# Of a mistake that makes the engine hang, nobody can wait for the end.
PATIENCE = 60


def built(*arguments):
    """The binaries that cargo makes of this, by name of their target."""
    command = ["cargo", *arguments, "--message-format", "json"]
    out = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    messages = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
    return {m["target"]["name"]: m["executable"] for m in messages if m.get("executable")}


def layers():
    """For each layer: its command, and what it finds in its environment."""
    engine = built("test", "-p", "wald-storage", "--features", "known-bad", "--lib", "--no-run")["wald_storage"]
    threads = built("test", "-p", "wald-storage", "--features", "known-bad,shuttle", "--lib", "--no-run")["wald_storage"]
    tests = built("test", "-p", "wald-server", "--no-run", "--test", "kill", "--test", "power_cut")
    # After the tests, which build the right one, and out of the way of the next build.
    daemon = SCRATCH / "wald-known-bad"
    shutil.copy2(built("build", "-p", "wald-server", "--features", "known-bad")["wald"], daemon)
    own = {"WALD_BINARY": str(daemon)}

    def module(binary, names, **environment):
        return [binary, *(f"tests::{name}" for name in names)], environment

    skipped = [word for name in SIMULATED + HISTORIES + DAMAGE for word in ("--skip", f"tests::{name}")]
    return {
        "engine": ([engine, *skipped], {}),
        "simulated": module(engine, SIMULATED, WALD_CUTS="1500"),
        "histories": module(engine, HISTORIES, WALD_HISTORIES="60", WALD_RETRIES="100"),
        "damage": module(engine, DAMAGE, WALD_FUZZ="100"),
        "schedules": module(threads, ["interleavings"], WALD_SCHEDULES="300"),
        "kill -9": ([tests["kill"]], {**own, "WALD_KILLS": "6", "WALD_ACKS": "100"}),
        "power cut": ([tests["power_cut"], "--ignored", "ext4"], {**own, "WALD_CUTS": "8"}),
    }


def wrapped(daemon, mistake):
    """A daemon that makes the mistake: tests take the environment from theirs."""
    path = SCRATCH / f"wald-{mistake}"
    path.write_text(f'#!/bin/sh\nexec env WALD_KNOWN_BAD={mistake} "{daemon}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def run(command, environment, mistake):
    """How a layer ends: whether it found anything, in which time, and its last words."""
    environment = {**os.environ, **environment}
    if mistake:
        environment["WALD_KNOWN_BAD"] = mistake
        if "WALD_BINARY" in environment:
            environment["WALD_BINARY"] = wrapped(environment["WALD_BINARY"], mistake)
    began = time.monotonic()
    # Tests of a crate run in its directory.
    place = ROOT / ("server" if "WALD_BINARY" in environment else "storage")
    process = subprocess.Popen([str(part) for part in command], cwd=place, env=environment, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    try:
        out, _ = process.communicate(timeout=PATIENCE)
        end = "fails" if process.returncode else "passes"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        out, _ = process.communicate()
        end = "hangs"
    return end, time.monotonic() - began, out


def main():
    chosen = sys.argv[1:]
    if set(chosen) - set(MISTAKES):
        usage()
    every = layers()
    rows = []
    for mistake in [None, *(chosen or MISTAKES)]:
        row, caught = [], []
        for layer, (command, environment) in every.items():
            end, seconds, out = run(command, environment, mistake)
            if mistake is None:
                if not check(f"{layer} passes when nothing is wrong", end == "passes", f"{seconds:.1f} s"):
                    print(out[-4000:])
            elif end != "passes":
                caught.append(layer)
            row.append((end, seconds))
        rows.append((mistake or "(none)", row))
        if mistake:
            check(f"{mistake} is caught", caught, ", ".join(caught))
    print(f"\n{'':28}" + "".join(f"{layer:>14}" for layer in every))
    for name, row in rows:
        cells = [f"{'caught ' if end != 'passes' else ''}{seconds:.1f} s" for end, seconds in row]
        print(f"{name:28}" + "".join(f"{cell:>14}" for cell in cells))
    finish()


main()
