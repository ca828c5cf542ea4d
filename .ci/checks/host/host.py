"""Tests changes that the host may make to a store, on the built binaries.

It covers: modes under every umask; links, pipes, directories and devices in the place of each file and
directory of a store, an archive and a directory of backups; owners; numbers that no real store reaches,
in files with correct checksums; a frame that claims 900 MiB. Nothing may hang, panic, follow a
link, or allocate memory by a number it read. As root it also tries devices and other owners."""

import os
import re
import resource
import shutil
import stat
import struct
import subprocess
import threading
from pathlib import Path

from common import *  # noqa: F403


#: Maximum seconds of a step here.
SECONDS = 20
ROOT_USER = os.geteuid() == 0
TABLE = []
for number in range(256):
    for _ in range(8):
        number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
    TABLE.append(number)


def crc32c(data, seed=0):
    """CRC-32C of some bytes."""
    value = seed ^ 0xFFFFFFFF
    for byte in data:
        value = TABLE[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


def claim(what, holds, text=""):
    """Counts one check; prints the output if it does not hold."""
    expect(what, holds, "" if holds else str(text).strip()[-400:])


def wald(*arguments, **options):
    """Runs the daemon's binary to its end: exit code and output. 124 if it hangs."""
    try:
        done = run(WALD, *arguments, timeout=SECONDS, **options)
    except subprocess.TimeoutExpired:
        return 124, "it hangs"
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


def serve(data, *arguments, **options):
    """Starts the daemon, which must end or serve: exit code (0 = it served), output."""
    command = [WALD, "--data-dir", data, "--listen", ":0", "--http-listen", ":0", "--log-format", "json", *SMALL, *arguments]
    process = subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               text=True, env=clean_environment(), **options)
    lines = []

    def read():
        for line in process.stderr:
            lines.append(line)
            if "wald is serving" in line:
                process.terminate()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code = process.wait(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = 124
    reader.join(timeout=5)
    return code, "".join(lines)


SMALL = ["--segment-bytes", "1MiB", "--pool-segments", "1", "--reserve-segments", "1"]


def store(root):
    """A killed store with four large records, and a backup of it in root/saved; returns its directory."""
    good = root / "good"
    with Daemon(good, *SMALL) as daemon:
        for _ in range(4):
            assert daemon.walctl("append", "log", "-", "--format", "raw", input=b"y" * 400_000).returncode == 0
        assert daemon.walctl("backup", root / "saved").returncode == 0
        daemon.kill()
    shutil.rmtree(good / "pool")
    (good / "pool").mkdir(0o700)
    return good


def modes_of(root):
    """Paths below a directory, itself included, that others could use."""
    found = []
    for path in [root, *root.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o777 != (0o700 if path.is_dir() else 0o600):
            found.append(f"{path} {mode:04o}")
    return found


@check("Files of wald and walctl are for the owner only, under every umask")
def umasks(scratch):
    for umask in (0o000, 0o022, 0o077, 0o777):
        root = scratch / f"umask-{umask:03o}"
        root.mkdir(0o700)
        before = os.umask(umask)
        try:
            with Daemon(root / "new" / "data", *SMALL) as daemon:
                for number in range(3):
                    done = daemon.walctl("append", "log", "-", "--format", "raw", input=b"x" * 400_000)
                    assert done.returncode == 0, done.stderr
                saved = daemon.walctl("backup", root / "backups")
                stopped = daemon.stop()
            restored = wald("restore", root / "backups", "--data-dir", root / "restored")[0]
            drill = wald("restore", root / "backups", "--drill", "--drill-in", root)[0]
        finally:
            os.umask(before)
        for name in ("new", "backups", "restored"):
            bad = modes_of(root / name) if (root / name).exists() else [f"{name} is missing"]
            claim(f"umask {umask:03o}: {name} is for its owner only", not bad, ", ".join(bad[:3]))
        fine = (stopped, saved.returncode, restored, drill)
        claim(f"umask {umask:03o}: serve, backup, restore and drill work", fine == (0, 0, 0, 0), fine)


@check("With auth_file: modes under umask 000 and 022, and a data directory open to others is refused")
def secured(scratch):
    auth = scratch / "auth.toml"
    auth.write_text('[principal.app]\nallow = [{ do = ["append", "create"], logs = "" }, { do = ["backup"] }]\n')
    auth.chmod(0o600)
    for umask in (0o000, 0o022):
        root = scratch / f"umask-{umask:03o}"
        root.mkdir(0o700)
        before = os.umask(umask)
        try:
            made = wald("token", "create", "--principal", "app", "--expires", "1d", "--to", root / "token", "--auth-file", auth)
            with Daemon(root / "data", *SMALL, "--auth-file", auth, "--audit-log", root / "audit.log") as daemon:
                done = daemon.walctl("append", "log", "-", "--token-file", root / "token", input=b"x\n")
                saved = daemon.walctl("backup", root / "backups", "--token-file", root / "token")
                code = daemon.stop()
        finally:
            os.umask(before)
        bad = modes_of(root)
        claim(f"umask {umask:03o}: data, backup, audit log and token file are for their owner only", not bad, ", ".join(bad[:3]))
        mode = stat.S_IMODE(auth.stat().st_mode)
        claim(f"umask {umask:03o}: the rewritten auth_file keeps its mode", mode == 0o600, f"{mode:04o}")
        fine = (made[0], done.returncode, saved.returncode, code)
        claim(f"umask {umask:03o}: token, append, backup and stop work", fine == (0, 0, 0, 0), fine)
    data = scratch / "umask-000" / "data"
    for mode in (0o755, 0o701, 0o777):
        data.chmod(mode)
        code, text = serve(data, "--auth-file", auth)
        claim(f"a data directory {mode:04o} is refused with its path", code == 78 and str(data) in text and "chmod 700" in text, f"{code} {text}")
    # A group: Kubernetes gives it these rights for `fsGroup`.
    data.chmod(0o2770)
    code, text = serve(data, "--auth-file", auth)
    claim("one that its group can open is served with a warning", code == 0 and "chmod 700" in text, f"{code} {text}")
    data.chmod(0o700)
    code, text = serve(data, "--auth-file", auth)
    claim("a closed one is served without one", code == 0 and "chmod" not in text, f"{code} {text}")
    # Links to auth_file are allowed, as Kubernetes makes them; other kinds of files are not.
    for kind, served in (("link", True), ("dangling", False), ("pipe", False), ("directory", False)):
        place = scratch / f"auth-{kind}"
        put(kind, place, auth)
        code, text = serve(data, "--auth-file", place)
        claim(f"auth_file as {kind} is {'served' if served else 'refused in time'}",
              code == 0 if served else code == 78 and str(place) in text, f"{code} {text}")
    for kind in ("link", "dangling", "pipe", "directory"):
        place, target = scratch / f"audit-{kind}", scratch / "target"
        target.write_text("precious")
        put(kind, place, target)
        code, text = serve(data, "--audit-log", place)
        claim(f"audit_log as {kind} is refused in time, and its target unchanged",
              code == 78 and str(place) in text and target.read_text() == "precious", f"{code} {text}")


@check("A directory that others can open is served, with a warning and the remedy")
def open_directory(scratch):
    good = store(scratch)
    data = scratch / "open"
    shutil.copytree(good, data)
    data.chmod(0o755)
    code, text = serve(data)
    claim("a data directory that is open to others is warned of", code == 0 and f"chmod 700 {data.resolve()}" in text or f"chmod 700 {data}" in text, text[-300:])
    claim("its mode stays", stat.S_IMODE(data.stat().st_mode) == 0o755)
    data.chmod(0o700)
    code, text = serve(data)
    claim("a closed one is not", code == 0 and "chmod" not in text)
    link = scratch / "link"
    link.symlink_to(data)
    claim("the data directory itself may be a link", serve(link)[0] == 0)


KINDS = {"link": "a symbolic link", "dangling": "a symbolic link", "pipe": "a named pipe",
         "directory": "a directory", "file": "a regular file", "device": "a character device"}


def put(kind, path, target):
    """Puts a file of an odd kind there."""
    if kind == "link":
        path.symlink_to(target)
    elif kind == "dangling":
        path.symlink_to(target.with_name("nothing"))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "file":
        path.write_text("")
    else:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))


def tree(root):
    """Files below a directory, with their contents."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file() and not path.is_symlink()}


def odd(good, path, kind, scratch, commands):
    """One odd file in the place of `path`: each command names it, in time, and leaves its target alone."""
    data, targets = scratch / "odd", scratch / "targets"
    for directory in (data, targets):
        shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(good, data)
    targets.mkdir()
    place, target = data / path, targets / "target"
    if place.exists():
        place.rename(target)
    else:
        target.write_bytes(b"precious")
    put(kind, place, target)
    before = tree(targets)
    wrong = []
    for name, command in commands(data).items():
        code, text = command()
        if code in (0, 101, 124) or code < 0 or "panick" in text or f"{path} is {KINDS[kind]}" not in text:
            wrong.append(f"{name}: {code} {text.strip()[-200:]}")
    if tree(targets) != before:
        wrong.append("the target changed")
    return [f"{kind} at {path}: {what}" for what in wrong]


@check("Links, pipes, directories and devices in the place of each file of a store are named and not followed")
def special_files(scratch):
    good, backups = store(scratch), scratch / "saved"
    segment = min((good / "journal").iterdir()).name
    files = ["LOCK", "FORMAT", "FORMAT.new", "BEGUN", "BEGUN.new", "REPAIRS", "REPAIRS.new", "RESTORING", f"journal/{segment}"]
    directories = ["journal", "index", "pool"]
    kinds = ["link", "dangling", "pipe"] + (["device"] if ROOT_USER else [])

    def of_store(data):
        return {"serve": lambda: serve(data), "verify": lambda: wald("verify", data)}

    def all_of_store(data):
        return of_store(data) | {"repair": lambda: wald("repair", "--accept-loss", data), "dump": lambda: wald("dump", data)}

    wrong, tried = [], 0
    for path in files + directories:
        for kind in [*kinds, "file" if path in directories else "directory"]:
            wrong += odd(good, path, kind, scratch, all_of_store if kind == "link" else of_store)
            tried += 1
    claim(f"{tried} odd files of a store are named and left alone", not wrong, "; ".join(wrong[:4]))

    def of_backups(data):
        never = scratch / "never"
        shutil.rmtree(never, ignore_errors=True)
        return {"verify": lambda: wald("verify", data), "restore": lambda: wald("restore", data, "--data-dir", never)}

    content = min((backups / "files").iterdir()).name
    manifest = min((backups / "backups").iterdir()).name
    wrong, tried = [], 0
    for path in ("files", f"files/{content}", f"backups/{manifest}"):
        for kind in [*kinds, "file" if path == "files" else "directory"]:
            wrong += odd(backups, path, kind, scratch, of_backups)
            tried += 1
    claim(f"{tried} odd files of a directory of backups are named and left alone", not wrong, "; ".join(wrong[:4]))


@check("walctl does not write through links in a directory of backups")
def odd_backups(scratch):
    good = store(scratch)
    data = scratch / "served"
    shutil.copytree(good, data)
    with Daemon(data, *SMALL) as daemon:
        for path, kind in [("LOCK", "link"), ("LOCK", "pipe"), ("LOCK", "directory"), ("files", "link"), ("backups", "link")]:
            shelf, target = scratch / "shelf", scratch / "shelf-target"
            for directory in (shelf, target):
                shutil.rmtree(directory, ignore_errors=True)
            shelf.mkdir()
            target.mkdir()
            (target / "file").write_bytes(b"precious")
            put(kind, shelf / path, target / "file" if path == "LOCK" else target)
            done = daemon.walctl("backup", shelf, timeout=SECONDS)
            told = f"{path} is {KINDS[kind]}" in done.stderr.decode() and done.returncode not in (0, 101)
            claim(f"walctl backup: {kind} at {path} is named", told, done.stderr.decode().strip()[-200:])
            claim("and left alone", tree(target) == {"file": b"precious"})
        # A link in place of an earlier backup's unfinished file does not lead out of the directory either.
        shelf, precious = scratch / "shelf2", scratch / "precious"
        assert daemon.walctl("backup", shelf).returncode == 0
        precious.write_bytes(b"precious")
        for part in ("files", "backups"):
            (shelf / part / "00000000000000000000000000000000.new").symlink_to(precious)
        done = daemon.walctl("backup", shelf)
        claim("links that end in .new are not written through", precious.read_bytes() == b"precious", done.stderr.decode())


@check("Archives are for the owner only, and odd files in them cause no surprises")
def archives(scratch):
    kept, data = scratch / "archive", scratch / "archived"
    kept.mkdir(0o700)
    small = ["--segment-bytes", "64KiB", "--sorter-step-bytes", "256KiB", "--retention-max-records", "1", "--retention-interval", "200ms"]
    before = os.umask(0)
    try:
        with Daemon(data, *small, "--archive-dir", kept) as daemon:
            for _ in range(60):
                assert daemon.walctl("append", "log", "-", "--format", "raw", input=b"z" * 20_000).returncode == 0
            there = wait_until(lambda: any(path.suffix == ".seg" for path in kept.iterdir()), SECONDS)
            stopped = daemon.stop()
        restored = wald("archive", "restore", "--archive", kept, "--to", scratch / "of-archive")[0]
    finally:
        os.umask(before)
    claim("umask 000: retention fills an archive, which is restored", (there, stopped, restored) == (True, 0, 0), (there, stopped, restored))
    for root in (kept, data, scratch / "of-archive"):
        bad = modes_of(root)
        claim(f"umask 000: {root.name} is for its owner only", not bad, ", ".join(bad[:3]))
    name = min(path.name for path in kept.iterdir() if path.suffix == ".seg")
    wrong = []
    for kind in ("link", "dangling", "pipe", "directory"):
        wrong += odd(kept, name, kind, scratch, lambda data: {"list": lambda: wald("archive", "list", "--archive", data, "--verify")})
    claim("odd files of an archive are named and left alone", not wrong, "; ".join(wrong))


@check("Root creates no files in a directory of another user, unless a setting allows it")
def owners(scratch):
    good = store(scratch)
    if not ROOT_USER:
        return
    data = scratch / "foreign"
    shutil.copytree(good, data)
    for path in [data, *data.rglob("*")]:
        os.chown(path, 12345, 12345)
    before = tree(data)
    told = "belongs to user 12345"
    for name, (code, text) in {
        "serve": serve(data),
        "repair": wald("repair", "--accept-loss", data),
        "restore": wald("restore", scratch / "saved", "--data-dir", data),
        "archive restore": wald("archive", "restore", "--archive", scratch, "--to", data),
    }.items():
        claim(f"root: {name} refuses another user's directory", code != 0 and told in text and "--allow-foreign-owner" in text, text[-200:])
    claim("root: nothing changed there", tree(data) == before)
    claim("root: verify looks at it all the same", wald("verify", data)[0] == 0)
    claim("root: --allow-foreign-owner serves it", serve(data, "--allow-foreign-owner")[0] == 0)


@check("No crash writes memory to a file")
def core_files(scratch):
    good = store(scratch)
    data = scratch / "cores"
    shutil.copytree(good, data)
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
    with Daemon(data, *SMALL) as daemon:
        limits = Path(f"/proc/{daemon.pid}/limits").read_text()
    line = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
    claim("the daemon writes no core files", line.split()[4:6] == ["0", "0"], line)


def begun(epoch, segment, base):
    text = f"wald begun\nepoch {epoch}\nsegment {segment:016x}\nbase {base}\n".encode()
    return text + f"crc {crc32c(text):08x}\n".encode()


@check("Numbers in BEGUN that no real store reaches are reported and not used")
def numbers(scratch):
    good = store(scratch)
    most = 2**64 - 1
    cases = [(begun(most, 1, 0), "epoch 18446744073709551615 is above 8388607"),
             (begun(2**24, 1, 0), "epoch 16777216 is above 8388607"),
             (begun(2**24 + 5, 1, 0), "epoch 16777221 is above 8388607"),
             (begun(1, most, 0), "segment 18446744073709551615 is above 2146435071"),
             (begun(1, 1, most), "base 18446744073709551615 is above 4607182418800017408"),
             (begun(1, 1, most - 4096), "base 18446744073709547519 is above"),
             (begun(1, 1, 2**63), "base 9223372036854775808 is above")]
    for text, what in cases:
        data = scratch / "numbers"
        shutil.rmtree(data, ignore_errors=True)
        shutil.copytree(good, data)
        (data / "BEGUN").write_bytes(text)
        code, told = wald("verify", data)
        claim(f"verify: {what}", code == 5 and f"BEGUN: {what}" in told, told[-200:])
        repaired = scratch / "repaired"
        shutil.rmtree(repaired, ignore_errors=True)
        shutil.copytree(data, repaired)
        code, told = wald("repair", "--accept-loss", repaired)
        claim("repair: accepts that", code == 0 and "panick" not in told, told[-200:])
        claim("after it verify finds nothing", wald("verify", repaired)[0] == 0)
        with Daemon(data, *SMALL) as daemon:
            done = daemon.walctl("append", "new", "-", input=b"x")
            named = any(f"BEGUN: {what}" in line for line in daemon.lines)
            claim("serve: names it and continues", done.returncode == 0 and named and daemon.stop() == 0, done.stderr.decode())
    for text, what in [(begun(2**23 - 1, 1, 0), "recovery epoch 8388607")]:
        data = scratch / "numbers"
        (data / "BEGUN").write_bytes(text)
        before = tree(data)
        code, told = serve(data)
        after = tree(data)
        before.pop("LOCK"), after.pop("LOCK")
        claim(f"a store that cannot go on ({what}) is refused and left as it was", code == 65 and what in told and before == after, told[-300:])


def lz4_zeros(count):
    """`count` zeros as lz4 makes them: one literal, one match, five literals."""
    length = count - 6
    rest = length - 4 - 15
    return b"\x1f\0\x01\0" + b"\xff" * (rest // 255) + bytes([rest % 255]) + b"\x50" + bytes(5)


@check("A frame of 3.7 MB that claims to be 900 MiB is damage, and takes no memory")
def claims(scratch):
    data = scratch / "claims"
    arguments = ["--segment-bytes", "16MiB", "--pool-segments", "1", "--reserve-segments", "1",
                 "--max-batch-bytes", "6MiB", "--max-record-bytes", "6MiB"]
    with Daemon(data, *arguments) as daemon:
        made = daemon.walctl("log", "create", "packed", "--compression", "lz4")
        assert made.returncode == 0, made.stderr
        sent = daemon.walctl("append", "packed", "-", "--format", "raw", input=os.urandom(3_900_000))
        assert sent.returncode == 0, sent.stderr
        daemon.kill()
    plain = lz4_zeros(900 << 20)
    stored = struct.pack("<I", 900 << 20) + plain
    forged = 0
    for path in (data / "journal").iterdir():
        segment = bytearray(path.read_bytes())
        salt, at = bytes(segment[40:48]), 8192
        while at + 64 <= len(segment):
            crc, units, _, kind, length = struct.unpack_from("<IHBBI", segment, at)
            head = units * 8
            if head < 64 or fast_crc(salt + bytes(segment[at + 4:at + head])) != crc:
                break
            if kind == 1 and length > len(stored):
                end = at + head + (length + 7) // 8 * 8
                segment[at + head:] = bytes(len(segment) - at - head)
                segment[at + head:at + head + len(stored)] = stored
                struct.pack_into("<IIIB", segment, at + 8, len(stored), fast_crc(stored), 1, 1)
                struct.pack_into("<I", segment, at, fast_crc(salt + bytes(segment[at + 4:at + head])))
                path.write_bytes(segment)
                forged += 1
                break
            at += head + (length + 7) // 8 * 8
    claim("a frame could be forged", forged == 1)
    limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))}
    code, told = wald("verify", data, **limited)
    claim("verify names what it claims, in 1 GiB of addresses", code == 5 and "claims 943718400 bytes decompressed" in told, told[-300:])
    with Daemon(data, *arguments) as daemon:
        read = daemon.walctl("read", "packed", "--from", "0")
        peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{daemon.pid}/status").read_text())[1]) >> 10
        claim("serve: the record is damaged", read.returncode == 5, read.stderr.decode()[-200:])
        claim("and the daemon stays small", peak < 256, f"{peak} MiB")


def fast_crc(data):
    """CRC-32C of many bytes, by a table of 16 bits if there is no library."""
    try:
        import google_crc32c
        return google_crc32c.value(data)
    except ImportError:
        return crc32c(data)
