"""Tests actions of the system on a daemon under load, other than failing calls: a limit on the size of files, a
file system that becomes read-only, a stop of some seconds (SIGSTOP), a limit on memory, once wide enough to
be kept and once so narrow that the process is killed, and a second daemon on its directory. No acked record
may be lost, no refused record stored, and each error must name its cause. .ci/run api/pressure tests the slow disk,
.ci/run durability/full the full one. Mounts a loop device and makes a group of processes, so it needs root.
"""

from contextlib import contextmanager

from common import *

# Records are numbers, padded with zeros to the requested size.
sys.set_int_max_str_digits(0)
MIB = 1 << 20
FULL = "ResourceExhausted DISK_FULL NotApplied"
IN_FLIGHT, LATER = "Internal JOURNAL_FAILED Unknown", "Unavailable JOURNAL_FAILED NotApplied"
LOAD_ = dict(appends=10**9, logs=10, attempts=1, tolerate=True)


@contextmanager
def loads(daemon, data, seconds, pause_ms=1, bytes=1000):
    """Durable and written appends at the same time."""
    with daemon.load(seconds=seconds, writers=6, bytes=bytes, pause_ms=pause_ms, durability="durable", prefix="durable",
                     ledger=f"{data}.durable", **LOAD_) as one, \
            daemon.load(seconds=seconds, writers=2, bytes=bytes, pause_ms=pause_ms, durability="written", prefix="written",
                        ledger=f"{data}.written", **LOAD_) as other:
        yield one, other


def entries_of(loads_):
    told = [load.result() for load in loads_]
    # The daemon may end before the driver has a connection.
    wrong = [it["error"] for it in told if "error" in it and "onnect" not in it["error"]]
    return [entry for load in loads_ for entry in load.entries()], wrong


def verify(what, data, entries, arguments=(), levels=("DURABLE", "WRITTEN")):
    """After a restart: every ack of these levels, no refused record, no duplicate."""
    with Daemon(data, *arguments) as daemon:
        found = {**stored(daemon, "durable/"), **stored(daemon, "written/")}
        quiet = not any('"level":"WARN"' in line or '"level":"ERROR"' in line for line in daemon.lines)
        ended = daemon.stop()
    acks = [entry for entry in entries if entry.acked and entry.level in levels]
    lost = [entry for entry in acks if found.get((entry.log, entry.lsn)) != entry.number]
    kept = {(log, number) for (log, _), number in found.items()}
    refused = [entry for entry in entries if not entry.acked and entry.outcome == "NotApplied" and (entry.log, entry.number) in kept]
    expect(f"{what}: a restart holds every ack ({' and '.join(levels).lower()}) once, and no refused record",
           acks and not lost and not refused and len(kept) == len(found) and ended == 0 and quiet,
           f"{len(acks)} acks, {len(lost)} lost, {len(refused)} refused and there")


def errors_of(entries):
    found = {}
    for entry in entries:
        if not entry.acked:
            found[entry.error] = found.get(entry.error, 0) + 1
    return found


def metric(daemon, name):
    """One value of /metrics; None if the daemon has ended."""
    try:
        return daemon.metric(name)
    except OSError:
        return None


@check("Writes beyond a limit on the size of files fail as a full disk does")
def file_size(directory):
    data, what = directory / "size", "RLIMIT_FSIZE"
    arguments = ["--segment-bytes", "1MiB"]
    with Daemon(data, *arguments) as daemon:
        with loads(daemon.ready(), data, 6) as running:
            wait_until(lambda: daemon.metric("wald_appended_records_total") > 100)
            run("prlimit", "--pid", daemon.pid, f"--fsize={256 << 10}:", check=True)
            refused = wait_until(lambda: metric(daemon, 'wald_rejected_total{operation="write",reason="DISK_FULL"}') != 0, 20)
            alive = daemon.process.poll() is None
            expect(f"{what}: writes beyond it do not end the daemon", refused and alive, daemon.process.poll())
            if alive:
                before = daemon.metric("wald_appended_records_total")
                run("prlimit", "--pid", daemon.pid, "--fsize=unlimited:", check=True)
                expect(f"{what}: appends resume automatically when it is lifted",
                       wait_until(lambda: daemon.metric("wald_appended_records_total") > before + 100, 20))
            entries, wrong = entries_of(running)
        errors = errors_of(entries)
        expect(f"{what}: appends meanwhile are refused for lack of space", not wrong and set(errors) == {FULL}, errors)
        expect(f"{what}: and it ends as always", daemon.process.poll() is None and daemon.stop() == 0)
    verify(what, data, entries, arguments)


@contextmanager
def mounted(directory, *options):
    """An ext4 file system of 64 MiB: (mount point, name of its device)."""
    image, mount = directory / "image", directory / "mount"
    mount.mkdir()
    with open(image, "wb") as file:
        file.truncate(64 * MIB)
    run("mkfs.ext4", "-q", image, check=True)
    done = run("mount", "-o", ",".join(["loop", *options]), image, mount)
    if done.returncode != 0:
        raise SystemExit(f"cannot mount {image}: {done.stderr.decode()}")
    try:
        source = run("findmnt", "-n", "-o", "SOURCE", mount, check=True).stdout.decode().strip()
        yield image, mount, Path(source).name
    finally:
        run("umount", mount)


def errored(directory, policy):
    """The kernel makes a file system read-only when it finds an error in it; here an error is reported to it."""
    what = f"read-only file system, {policy}"
    directory = directory / policy
    directory.mkdir()
    arguments = ["--segment-bytes", "1MiB", "--on-flush-failure", policy]
    with mounted(directory, "errors=remount-ro") as (image, mount, device):
        data = mount / "data"
        with Daemon(data, *arguments) as daemon:
            with loads(daemon.ready(), directory / "ledger", 30 if policy == "exit" else 5) as running:
                wait_until(lambda: daemon.metric("wald_appended_records_total") > 200)
                Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")
                if policy == "exit":
                    code = daemon.process.wait(timeout=60)
                    expect(f"{what}: the daemon ends with its own exit code", code == 70, code)
                entries, wrong = entries_of(running)
            errors = errors_of(entries)
            expect(f"{what}: appends in flight get UNKNOWN, later ones NOT_APPLIED",
                   not wrong and IN_FLIGHT in errors and (policy == "exit" or set(errors) == {IN_FLIGHT, LATER}), errors)
            expect(f"{what}: the log names the file and the reason",
                   any("journal failed" in line and "os error" in line for line in daemon.lines))
            if policy == "read_only":
                found = stored(daemon, "durable/")
                acks = [entry for entry in entries if entry.acked and entry.level == "DURABLE"]
                expect(f"{what}: the daemon stays, and serves every durable record",
                       acks and all(found.get((entry.log, entry.lsn)) == entry.number for entry in acks), len(acks))
                expect(f"{what}: its end by SIGTERM is no clean one", daemon.stop() == 70)
        try:
            with Daemon(data, *arguments) as daemon:
                expect(f"{what}: it does not start there", False)
        except Ended as ended:
            expect(f"{what}: a start there reports the reason", ended.code == 74 and "Read-only file system" in ended.lines[-1],
                   ended.lines[-1].strip())
        run("umount", mount, check=True)
        # A copy: the first image's loop device may stay for a moment, with its own view of the contents.
        mended = image.with_name("mended")
        shutil.copyfile(image, mended)
        run("fsck.ext4", "-f", "-y", mended)
        run("mount", "-o", "loop", mended, mount, check=True)
        # Records that were only written are gone with the page cache, as at a power cut.
        verify(what, data, entries, arguments, levels=["DURABLE"])


@check("SIGSTOP for some seconds loses nothing")
def stopped(directory):
    data, what = directory / "stopped", "SIGSTOP"
    with Daemon(data) as daemon:
        with loads(daemon.ready(), data, 9) as running:
            wait_until(lambda: daemon.metric("wald_appended_records_total") > 200)
            for _ in range(2):
                daemon.process.send_signal(signal.SIGSTOP)
                time.sleep(2)
                daemon.process.send_signal(signal.SIGCONT)
                before = daemon.metric("wald_appended_records_total")
                expect(f"{what} for two seconds: appends continue after it",
                       wait_until(lambda: daemon.metric("wald_appended_records_total") > before + 100, 20))
            entries, wrong = entries_of(running)
        longest = max(entry.got - entry.sent for entry in entries) / 1e6
        expect(f"{what}: appends that waited for it were acked", not wrong and not errors_of(entries)
               and longest > 1.5, f"{errors_of(entries)}, at most {longest:.1f} s")
        _, answer, _ = daemon.call("wald.v1.WalService/Append", {"log": "soon", "record": {"text": "x"}, "durability": "DURABILITY_WRITTEN"})
        # By its timer, which did not run while it was stopped.
        durable = lambda: (daemon.call("wald.v1.WalService/GetTail", {"log": "soon"})[1] or {}).get("durableLsn") == "1"
        expect(f"{what}: a written record becomes durable automatically afterwards", answer and wait_until(durable, 20))
        daemon.kill()
    verify(what, data, entries)


@contextmanager
def memory_group(limit):
    """A group of processes with this memory limit; none if the system has no such groups."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, most, now = (v1, "memory.limit_in_bytes", "memory.max_usage_in_bytes") if v1.is_dir() else (v2, "memory.max", "memory.peak")
    group = parent / f"wald-ci-{os.getpid()}"
    try:
        group.mkdir()
        (group / most).write_text(str(limit))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        yield None, str(error)
        return
    try:
        yield group, lambda: int((group / now).read_text())
    finally:
        # A process that has just ended stays in the group for a moment.
        wait_until(lambda: not (group / "cgroup.procs").read_text(), 20)
        group.rmdir()


def in_group(group):
    """A command that enters the group and becomes the command after it."""
    return ["/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]


@check("A memory limit that suits the settings is kept")
def memory(directory):
    limit, what = 96 * MIB, "memory limit"
    data = directory / "memory"
    arguments = ["--segment-bytes", "4MiB", "--max-inflight-bytes", "8MiB"]
    with memory_group(limit) as (group, peak):
        if group is None:
            print(f"skipped, because {peak}: a limit on memory")
            return
        with Daemon(data, *arguments, under=in_group(group)) as daemon:
            with loads(daemon, data, 6, pause_ms=0, bytes=20_000) as running:
                entries, wrong = entries_of(running)
            written = sum(entry.acked for entry in entries) * 20_000
            errors = errors_of(entries)
            expect(f"{what}: more is written than the limit, and memory stays within it", daemon.process.poll() is None
                   and written > limit and peak() <= limit and not wrong and set(errors) <= {"ResourceExhausted BUSY NotApplied"},
                   f"{written / MIB:.0f} MiB acked, at most {peak() / MIB:.0f} MiB of {limit // MIB} used, {errors}")
            daemon.stop()
        verify(what, data, entries, arguments)


@check("A daemon that the kernel kills for memory loses no acknowledged record")
def out_of_memory(directory):
    what = "out of memory"
    data = directory / "oom"
    with memory_group(40 * MIB) as (group, peak):
        if group is None:
            print(f"skipped, because {peak}: a process that the kernel kills for its memory")
            return
        with Daemon(data, "--max-inflight-bytes", "1GiB", "--segment-bytes", "16MiB", under=in_group(group)) as daemon:
            with loads(daemon, data, 30) as running:
                wait_until(lambda: daemon.metric("wald_appended_records_total") > 500)
                with daemon.load(seconds=20, writers=200, connections=4, bytes=1_000_000, prefix="greedy", **LOAD_) as greedy:
                    gone = wait_until(lambda: daemon.process.poll() is not None, 20)
                    daemon.kill()
                    greedy.result()
                entries, wrong = entries_of(running)
        expect(f"{what}: the kernel kills it under load", gone and daemon.process.returncode == -9 and not wrong,
               f"{daemon.process.returncode}, {wrong}")
        verify(what, data, entries)


@check("A second daemon on the directory of one under load is refused")
def second(directory):
    data, what = directory / "second", "second daemon"
    with Daemon(data) as daemon:
        with loads(daemon.ready(), data, 3) as running:
            for number in range(3):
                try:
                    with Daemon(data):
                        expect(f"{what}: it does not start", False)
                except Ended as ended:
                    expect(f"{what}: it is refused with the holder of the directory and a remedy", ended.code == 75
                           and all(word in ended.lines[-1] for word in (str(daemon.pid), str(data), "--data-dir")),
                           ended.lines[-1].strip() if not number else "")
            entries, wrong = entries_of(running)
        expect(f"{what}: the first does not notice", not wrong and not errors_of(entries), errors_of(entries))
        daemon.kill()
    verify(what, data, entries)


# On SIGTERM, too, mounts and processes are cleaned up.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
@check("A file system that becomes read-only: exit or reads, as the setting says")
def read_only(directory):
    for policy in ("exit", "read_only"):
        errored(directory, policy)
