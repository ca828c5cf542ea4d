"""The reader of storage/reader at work: the content of data directories, and comparisons of it."""

import functools

from common import *

READER = ROOT / "storage" / "reader"
GOLDEN = ROOT / "storage" / "tests" / "golden"


@functools.cache
def python():
    """An interpreter with the packages that the reader needs."""
    made = SCRATCH / "reader-venv"
    if not (made / "bin/pip").exists():
        run(sys.executable, "-m", "venv", "--clear", made, check=True)
    run(made / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "-r", READER / "requirements.txt",
        check=True)
    return made / "bin/python"


def read(directory):
    """The reader's results: (store, name -> log, with its records)."""
    done = run(python(), READER / "read_store.py", "--records", directory)
    if done.returncode not in (0, 1):
        raise SystemExit(f"the reader failed: {done.stderr.decode()}")
    store, *lines = [json.loads(line) for line in done.stdout.splitlines()]
    logs = {}
    for line in lines:
        if "of" in line:
            logs[line.pop("of")]["found"].append(line)
        else:
            logs[line["log"]] = {**line, "found": []}
    return store, logs


def difference(left, right):
    """Differences of two answers, in a few words."""
    for name in sorted(set(left) | set(right)):
        if name not in left or name not in right:
            return f"log {name} is only told by the {'reader' if name in left else 'engine'}"
        for key in left[name]:
            ours, theirs = left[name][key], right[name][key]
            if ours != theirs:
                if key == "found":
                    pairs = enumerate(zip(ours, theirs))
                    at = next((at for at, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
                    return f"records of {name}, from the {at}. of {len(ours)} and {len(theirs)}: {ours[at:at + 1]}, {theirs[at:at + 1]}"
                return f"{key} of {name}: {ours} and {theirs}"
    return ""


def expected(logs):
    """The part of each log that the file next to a golden directory expects."""
    keys = ["log_id", "first_lsn", "next_lsn", "writer_epoch", "config", "create_time_us", "update_time_us", "stored_bytes",
            "cursors", "tail_proven", "quarantined", "records", "digest"]
    return {name: {**{key: log[key] for key in keys}, **({"expired": log["expired"]} if log["expired"] else {}), "producers": [
        {"id": one["id"], "epoch": one["epoch"], "next_sequence": one["next_sequence"],
         "newest_lsn": one["remembered"][-1]["lsn"]} for one in sorted(log["producers"], key=lambda one: one["id"])]}
        for name, log in logs.items()}


__all__ = [name for name in dir() if not name.startswith("_")]
