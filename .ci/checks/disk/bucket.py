"""Tests backups in a bucket, with programs that have the feature `object`: a full drill with a lost machine, damaged and
missing objects, failing stores, a killed walctl, and clear errors, on a server of the check's own. With --all also on real
servers of object stores. Servers without atomic conditional writes are refused.
"""

from buckets import *

RECORD = 500
SEGMENTS = ["--segment-bytes", "2MiB", "--sorter-enabled=false"]


def produced(daemon, directory, file):
    """Appends a file as a producer, which a repeated run recognises: (exit code, tail of the log)."""
    path = directory / file
    if not path.exists():
        path.write_text("".join(f"{file} {number}\n" for number in range(5_000)))
    done = run(WALCTL, "append", "orders/produced", "--producer", file, path, env=clean_environment(WALD_ENDPOINT=daemon.endpoint))
    tail = json.loads(run(WALCTL, "log", "get", "orders/produced", "--output", "json",
                          env=clean_environment(WALD_ENDPOINT=daemon.endpoint)).stdout)
    return done.returncode, tail[0]["durable_lsn"]


def contents(daemon):
    """All records as walctl prints them."""
    done = daemon.walctl("scan", "--all", "--output", "json")
    if done.returncode != 0:
        raise SystemExit(f"the scan failed: {done.stderr.decode()}")
    return set(done.stdout.decode().splitlines())


def drill(directory, store, appends):
    """Load, backup, more load, a second backup, a lost machine, and a store made of the bucket."""
    data = directory / "data"
    private, public = directory / "signing.pem", directory / "signing.pub"
    public.write_bytes(store.wald("backup-key", "new", private).stdout)
    options = dict(writers=64, logs=50, bytes=RECORD, durability="written")
    with Daemon(data, *SEGMENTS, "--backup-signing-key-file", private) as daemon:
        daemon.load(appends=appends, prefix="first", **options).result()
        code, _ = produced(daemon, directory, "before")
        began = time.monotonic()
        first, full, told = store.backup(daemon)
        if not expect("a backup to a bucket", (code, first) == (0, 0), told or f"{full['bytes'] >> 20} MiB, {full['files']} files, "
                      f"{time.monotonic() - began:.1f} s"):
            return None
        expect("  all of the store is sent, and little beside it", full["sent_bytes"] == full["bytes"]
               and full["bytes"] <= full["bucket"]["sent_bytes"] <= full["bytes"] + BESIDE, full["bucket"]["sent_bytes"])
        daemon.load(appends=appends // 10, prefix="second", **options).result()
        code, produced_tail = produced(daemon, directory, "after")
        began = time.monotonic()
        second, more, told = store.backup(daemon)
        changed = appends // 10 * (RECORD + 100) + (4 << 20)
        expect("the second backup sends the difference only", (code, second) == (0, 0)
               and more["sent_bytes"] <= min(changed, full["bytes"] // 2)
               and more["sent_bytes"] <= more["bucket"]["sent_bytes"] <= more["sent_bytes"] + BESIDE,
               told or f"{more['sent_bytes'] >> 10} KiB of {more['bytes'] >> 10} KiB, {more['bucket']['sent_bytes'] >> 10} KiB through "
               f"the network, {time.monotonic() - began:.1f} s")
        code, nothing, told = store.backup(daemon)
        expect("of a store that does not change nothing is sent", code == 0 and nothing["sent_bytes"] == 0, told)
        source = contents(daemon)
        daemon.kill()
    shutil.rmtree(data)
    began = time.monotonic()
    other = store.wald("backup-key", "new", directory / "other.pem").stderr.decode().split()[-1]
    done = store.wald("verify", store.url, "--trust", other)
    expect("a backup that no trusted key has signed is refused", done.returncode == 5 and "which is not trusted" in done.stderr.decode(),
           done.stderr.decode().strip())
    done = store.wald("restore", store.url, "--trust", public, "--data-dir", data, "--output", "json")
    if not expect("the store is restored from the bucket", done.returncode == 0, done.stderr.decode() or f"{time.monotonic() - began:.1f} s"):
        return None
    with Daemon(data, *SEGMENTS) as daemon:
        found = contents(daemon)
        expect("  every record of the backup is there", found == source, f"{len(found)} of {len(source)} records")
        again = [produced(daemon, directory, file) for file in ("before", "after")]
        expect("  the producers are still exact: both inputs are recognised", again == [(0, produced_tail)] * 2, again)
    done = store.wald("restore", "--drill", store.url, "--drill-in", directory)
    expect("wald restore --drill reads every record back", done.returncode == 0, (done.stdout + done.stderr).decode().strip())
    return data


def damaged(directory, store):
    """Flips a byte of an object and removes one: verify names it, restore refuses."""
    done = store.wald("verify", store.url)
    expect("verify finds nothing wrong", done.returncode == 0, (done.stdout + done.stderr).decode().strip())
    files = store.objects / BUCKET / PREFIX / "files"
    content = max(files.iterdir(), key=lambda path: path.stat().st_size)
    good = content.read_bytes()

    def found(what, name):
        verified = store.wald("verify", store.url)
        refused = store.wald("restore", store.url, "--data-dir", directory / name)
        said = refused.stderr.decode().strip()
        try:
            with Daemon(directory / name):
                served = True
        except Ended:
            served = False
        expect(f"{what} is named by verify, and refused by restore and by a start", verified.returncode == 5
               and content.name in verified.stderr.decode() and refused.returncode == 5 and content.name in said and not served, said)

    at = len(good) // 2
    with content.open("r+b") as file:
        file.seek(at)
        file.write(bytes([good[at] ^ 1]))
    found(f"a flipped byte at {at} of {len(good)}", "flipped")
    with content.open("r+b") as file:
        file.write(good)
    content.rename(directory / "aside")
    found("a missing object", "missing")
    (directory / "aside").rename(content)
    manifest = max((store.objects / BUCKET / PREFIX / "backups").iterdir())
    whole = manifest.read_bytes()
    with manifest.open("r+b") as file:
        file.seek(100)
        file.write(bytes([whole[100] ^ 1]))
    done = store.wald("verify", store.url, "--backup", manifest.name.removesuffix(".manifest"))
    expect("so is a damaged manifest", done.returncode == 5, done.stderr.decode().strip())
    with manifest.open("r+b") as file:
        file.write(whole)
    expect("and all is well again", store.wald("verify", store.url).returncode == 0)


def killed(store, daemon):
    """A walctl that is killed while it sends, and a second one meanwhile. Returns the number of files that are there."""
    files = store.objects / BUCKET / PREFIX / "files"
    before, kept = set(files.iterdir()), store.kept()
    received = lambda: len(set(files.iterdir()) - before)
    daemon.load(appends=30_000, writers=64, logs=10, bytes=RECORD, prefix="killed", durability="written").result()
    command = [programs() / "walctl", "backup", store.url, "--endpoint", daemon.endpoint, "--max-bytes-per-second", 1 << 20]
    process = subprocess.Popen([str(c) for c in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=store.environment())
    began = wait_until(lambda: received() >= 1)
    code, _, told = store.backup(daemon)
    expect("a second walctl at the same time is refused, with the name of the first", code == 1 and str(process.pid) in told, told)
    process.kill()
    process.wait()
    expect("a walctl that is killed leaves no backup", began and store.kept() == kept, f"{received()} files")
    done = store.wald("verify", store.url)
    expect("  and the backup before it is whole", done.returncode == 0, done.stderr.decode().strip())
    return received()


def continued(directory, store, data):
    """The run after a killed one, and what retention removes."""
    with Daemon(data, *SEGMENTS) as daemon:
        # After a restore the first run reads every file again, to know its digest.
        store.backup(daemon)
        held = killed(store, daemon)
        began = time.monotonic()
        code, told, said = store.backup(daemon)
        took = time.monotonic() - began
        expect("the next one waits for the dead writer, and continues after the part that is there",
               code == 0 and held >= 1 and told["sent_files"] <= told["files"] - held and 25 < took, f"{said} {took:.0f} s")
        pruned(store, daemon, told["id"])


def pruned(store, daemon, first):
    """What retention removes. `first` is the newest backup."""
    ids = [first]
    for _ in range(3):
        daemon.load(appends=20, writers=4, logs=2, bytes=RECORD, prefix="next").result()
        code, told, said = store.backup(daemon, "--keep", "2")
        ids.append(told["id"])
    expect("--keep removes older backups, and the content that only they had", code == 0 and store.kept() == ids[-2:]
           and all(store.wald("verify", store.url, "--backup", one).returncode == 0 for one in ids[-2:]), said)
    done = store.walctl(None, "backup", "prune", store.url, "--keep", "1", "--output", "json")
    expect("prune alone does the same", done.returncode == 0 and json.loads(done.stdout)["removed"] == ids[-2:-1]
           and store.kept() == ids[-1:] and store.wald("verify", store.url).returncode == 0, done.stdout.decode().strip())
    expect("the probe leaves nothing", not list((store.objects / BUCKET / PREFIX).glob("probe/*/*")))


def errors(directory, store):
    """Each mistake has its exit code and a sentence."""
    aside = {"WALD_BUCKET_ENDPOINT": store.base}
    missing = "s3://no-such-bucket/orders"
    for what, arguments, more, code, sentence in [
        ("a missing bucket", ["verify", missing], {}, 1, "no such bucket"),
        ("a prefix without a backup", ["verify", f"s3://{BUCKET}/elsewhere"], {}, 3, "has no backup"),
        ("a restore of it", ["restore", f"s3://{BUCKET}/elsewhere", "--data-dir", directory / "none"], {}, 3, "has no backup"),
        ("wrong credentials", ["verify", store.url], {"AWS_SECRET_ACCESS_KEY": "x" * 12}, 1, "refuses the credentials"),
        ("plain http without consent", ["verify", store.url], {"WALD_BUCKET_INSECURE": "false"}, 78, "plaintext"),
        ("plain http of another variable", ["verify", store.url],
         {"WALD_BUCKET_INSECURE": "false", "WALD_BUCKET_ENDPOINT": "", "AWS_ENDPOINT_URL": store.base}, 78, "has no TLS"),
        ("another scheme", ["verify", "ftp://bucket/x"], aside, 2, "expected s3://"),
    ]:
        done = store.wald(*arguments, **more)
        said = done.stderr.decode().strip()
        expect(f"wald: {what} is exit code {code}", done.returncode == code and sentence in said, said)
    secret = directory / "credentials"
    secret.write_text(f"[default]\naws_access_key_id = {objects.KEY}\naws_secret_access_key = {objects.SECRET}\n")
    secret.chmod(0o600)
    for what, arguments, more, code, sentence in [
        ("a missing bucket", ["list", missing], {}, 3, "no such bucket"),
        ("wrong credentials", ["list", store.url], {"AWS_SECRET_ACCESS_KEY": "x" * 12}, 6, "refuses the credentials"),
        ("plain http without consent", ["list", store.url, "--bucket-endpoint", store.base], {"WALD_BUCKET_INSECURE": "false"}, 78, "has no TLS"),
        ("another scheme", ["list", "ftp://bucket/x"], aside, 2, "expected s3://"),
        ("a machine without root certificates", ["list", store.url], {"SSL_CERT_FILE": "/dev/null", "SSL_CERT_DIR": "/dev/null"}, 0, ""),
        ("a file of credentials", ["list", store.url, "--bucket-credentials-file", secret], {"AWS_SECRET_ACCESS_KEY": "", "AWS_ACCESS_KEY_ID": ""}, 0, ""),
    ]:
        done = store.walctl(None, "backup", *arguments, **more)
        said = done.stderr.decode().strip()
        expect(f"walctl: {what} is exit code {code}", done.returncode == code and sentence in said, said)


def documented(directory, store, data):
    """The commands of docs/src/restore.md."""
    text = (ROOT / "docs/src/restore.md").read_text(encoding="utf-8")
    (commands,) = [block for block in re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S) if "s3://" in block]
    with Daemon(data, *SEGMENTS) as daemon:
        path = f"{programs()}:{os.environ['PATH']}"
        done = run("bash", "-exc", commands, cwd=directory, env=store.environment(PATH=path, WALD_ENDPOINT=daemon.endpoint))
    expect("the commands of docs/src/restore.md run", done.returncode == 0, (done.stdout + done.stderr).decode()[-1500:])


@check("The tests of the crate, of the replica, and of walctl, by programs with the feature")
def units():
    tests = made(messages())
    for folder, name in TESTS_OF_BUCKETS:
        counted(tests[name], cwd=ROOT / folder)
    if not os.environ.get("CI_LIGHT"):
        counted("cargo", "test", "--workspace", "--features", "wald-server/otlp,wald-server/zstd,wald-server/object", "--bin", "wald",
                "backups::bucket", cwd=ROOT)


@check("A lost machine is restored from a bucket; damage is found; a killed run is no backup; errors name the cause")
def lost_machine(directory):
    with own(directory) as (store, _):
        data = drill(directory, store, sized(100_000, 20_000))
        damaged(directory, store)
        errors(directory, store)
        documented(directory, store, data)
        with Daemon(data, *SEGMENTS) as daemon:
            pruned(store, daemon, store.kept()[-1])
            killed(store, daemon)


@check("A store that answers 503 or not at all loses nothing, and a backup without its manifest is none")
def faults(directory):
    data = directory / "data"
    # Segments that are sent in several parts.
    segments = ["--segment-bytes", "32MiB", "--sorter-enabled=false"]
    numbers = iter(range(1 << 30))

    def sometimes(request):
        if "/probe/" in request.path:
            return None
        number = next(numbers)
        return 503 if number % 4 == 1 else "lost" if number % 4 == 3 else None

    load = dict(writers=64, logs=20, bytes=RECORD, durability="written")
    with own(directory) as (store, server):
        server.fault = sometimes
        with Daemon(data, *segments) as daemon:
            daemon.load(appends=20_000, **load).result()
            code, told, said = store.backup(daemon)
            expect("with every fourth request refused and every fourth answer lost a backup is whole",
                   code == 0 and told["sent_bytes"] == told["bytes"], said or f"{told['bytes'] >> 20} MiB")
            before = store.kept()
            daemon.load(appends=20_000, prefix="more", **load).result()
            server.fault = lambda request: 403 if request.command == "PUT" and "/backups/" in request.path else None
            code, _, said = store.backup(daemon)
            expect("a refused manifest leaves no backup", code == 6 and store.kept() == before, said)
            server.fault = sometimes
            parts = sum(len(parts) for parts in server.uploads.values())
            code, told, said = store.backup(daemon)
            expect("the next run counts on the content that is there", code == 0 and told["sent_bytes"] < told["bytes"] // 20,
                   said or f"{told['sent_bytes'] >> 10} of {told['bytes'] >> 10} KiB")
            expect("  a large file had several parts", parts > 2, parts)
            source = contents(daemon)
        done = store.wald("restore", store.url, "--data-dir", directory / "restored")
        expect("a restore under the same faults", done.returncode == 0, done.stderr.decode().strip())
    with Daemon(directory / "restored", *segments) as daemon:
        expect("  has every record", contents(daemon) == source, f"{len(source)} records")


@check("Servers that ignore conditions, or check them without a lock, are refused with exit code 78")
def conditions(directory):
    with Daemon(directory / "data") as daemon:
        for kind in "ignored", "racy":
            (directory / kind).mkdir()
            with own(directory / kind, conditions=kind) as (store, _):
                code, _, said = store.backup(daemon)
                expect(f"conditions are {kind}: the failed check is named", code == 78 and "the check" in said, f"{code}, {said}")
                expect("  there is no backup", store.kept() == [])


@check("The drill of a lost machine, damage, kills and errors, on the Versity gateway")
def gateway(directory):
    with versity(directory) as store:
        data = drill(directory, store, sized(100_000, 30_000))
        damaged(directory, store)
        errors(directory, store)
        continued(directory, store, data)


@check("The same drill on MinIO and on the emulator of Azure")
def others(directory):
    for make in minio, azurite:
        (directory / make.__name__).mkdir()
        with make(directory / make.__name__) as store:
            drill(directory / make.__name__, store, 20_000)


@check("Known servers without atomic conditional writes are refused with exit code 78")
def refused(directory):
    with Daemon(directory / "data") as daemon:
        for make in s3rver, gcs_emulator:
            (directory / make.__name__).mkdir()
            with make(directory / make.__name__) as store:
                code, _, said = store.backup(daemon)
                expect(f"{make.__name__}: the failed check is named", code == 78 and "the check" in said, f"{code}, {said}")
                expect(f"{make.__name__}: there is no backup", store.kept() == [])
