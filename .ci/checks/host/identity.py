"""Tests a data directory that disappears, on the built binary.

The directory of a running daemon is deleted; renamed away and replaced by an empty directory; or
replaced by another store. Each time the journal fails within seconds, the daemon ends with exit
code 70 or refuses appends, and the log line names the cause. A daemon whose directory is only
renamed and renamed back continues. With create_store = false a missing or an empty directory is
refused and left unchanged, and an existing store is served."""

import shutil
import threading

from common import *  # noqa: F403


SMALL = ["--segment-bytes", "1MiB", "--pool-segments", "1", "--reserve-segments", "1"]
#: Two checks, a second apart, and time for a slow machine.
SECONDS = 8
#: The exit code after a failed journal, and for a directory without a store.
JOURNAL_FAILED, BAD_DATA = 70, 65


def append(daemon):
    """Whether an append is acknowledged, and its text."""
    done = daemon.walctl("append", "log", "-", "--durability", "durable", "--timeout", "1s", input=b"x")
    return done.returncode == 0, done.stderr.decode().strip()


def ended(daemon):
    """Waits for the daemon's end: exit code (None = it still runs), seconds until then."""
    began = time.monotonic()
    wait_until(lambda: daemon.process.poll() is not None, SECONDS)
    return daemon.process.poll(), time.monotonic() - began


def names(directory):
    """Everything below a directory; None if it does not exist."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*")) if directory.exists() else None


def lost(what, change, scratch):
    """Changes the directory of a running daemon, once idle and once under appends."""
    # The line names the first missing file. That depends on the moment of the check.
    named = ": the directory was deleted or replaced"
    for busy in (False, True):
        data = scratch / f"{what.split()[0]}-{busy}" / "data"
        data.parent.mkdir()
        with Daemon(data, *SMALL) as daemon:
            acked, text = append(daemon)
            expect(f"{what}: an append before is acknowledged", acked, text)
            over = threading.Event()

            def appends():
                while not over.is_set():
                    append(daemon)

            load = threading.Thread(target=appends, daemon=True)
            if busy:
                load.start()
            change(data)
            left = names(data)
            code, seconds = ended(daemon)
            over.set()
            how = "under appends" if busy else "idle"
            expect(f"{what}, {how}: the daemon ends with exit code 70", code == JOURNAL_FAILED, f"{code} after {seconds:.1f} s")
            wait_until(lambda: any(named in line for line in daemon.lines), 2)
            expect("  its log names the cause", any(named in line for line in daemon.lines), " ".join(daemon.lines[-4:]))
            expect("  it wrote nothing to the new place", names(data) == left, names(data))
            if busy:
                load.join(timeout=10)


@check("If a failed journal does not end the daemon, reads continue and appends are refused")
def read_only(scratch):
    data = scratch / "read-only" / "data"
    data.parent.mkdir()
    with Daemon(data, *SMALL, "--on-flush-failure", "read_only") as daemon:
        append(daemon)
        shutil.rmtree(data)
        failed = wait_until(lambda: daemon.metric("wald_journal_failed") == 1, SECONDS)
        acked, text = append(daemon)
        expect("read only: wald_journal_failed is 1 and an append is refused", failed and not acked, text[-200:])


@check("A directory that is renamed and renamed back has no effect")
def back_again(scratch):
    data = scratch / "renamed" / "data"
    data.parent.mkdir()
    with Daemon(data, *SMALL) as daemon:
        append(daemon)
        data.rename(data.with_name("away"))
        data.with_name("away").rename(data)
        time.sleep(4)
        code = daemon.process.poll()
        acked, text = append(daemon)
        expect("renamed and renamed back: the daemon continues", code is None and acked and daemon.metric("wald_journal_failed") == 0, text)


def refused(what, data):
    """Starts that may not create a store: the end and the text."""
    before = names(data)
    try:
        with Daemon(data, *SMALL, "--create-store=false"):
            code, text = 0, "it serves"
    except Ended as end:
        code, text = end.code, "".join(end.lines)
    clear = f"{data} has no store, and create_store is false" in text and "create_store = true" in text
    expect(f"create_store = false: {what} is refused with exit code 65", code == BAD_DATA and clear, text[-300:])
    expect("  it stays as it is", names(data) == before, names(data))


def replaced(data, copy=None):
    data.rename(data.with_name("away"))
    shutil.copytree(copy, data) if copy else data.mkdir()


def delete(data):
    # The daemon may create a file in a directory that is about to be removed.
    while data.exists():
        shutil.rmtree(data, ignore_errors=True)


def other_store(place):
    """A store for the place of another."""
    other = place / "other"
    with Daemon(other, *SMALL) as daemon:
        append(daemon)
    return other


@check("A deleted directory ends the daemon with 70, idle and under appends")
def deleted(place):
    lost("deleted directory", delete, place)


@check("A directory that was replaced by an empty one ends the daemon with 70")
def emptied(place):
    lost("emptied place", replaced, place)


@check("A directory that was replaced by another store ends the daemon with 70")
def exchanged(place):
    other = other_store(place)
    lost("other store there", lambda data: replaced(data, other), place)


@check("create_store = false refuses places without a store, leaves them unchanged, and serves a store")
def not_created(place):
    refused("a missing directory", place / "missing")
    (place / "empty").mkdir()
    refused("an empty directory", place / "empty")
    (place / "mount" / "lost+found").mkdir(parents=True)
    refused("an empty volume", place / "mount")
    with Daemon(other_store(place), *SMALL, "--create-store=false") as daemon:
        expect("create_store = false: a store is served", *append(daemon))
