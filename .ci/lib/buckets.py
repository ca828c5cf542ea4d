"""Servers of object stores, and programs that have the feature `object`, for the checks of backups and replicas."""

import base64
import contextlib
import email.utils
import functools
import hmac
import socket

import objects
from cargo import *

SHARED = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wald-ci"
BUCKET = "wald-backups"
# The prefix in the commands of docs/src/restore.md.
PREFIX = "daily"
# Bytes of manifest, record of the writer and probe beside the content of one run.
BESIDE = 512 << 10
# The tests of buckets: folder of the package, and name of the program.
TESTS_OF_BUCKETS = [("storage/bucket", "wald_bucket"), ("server", "replica"), ("client/walctl", "walctl")]
# Their build. With --workspace it shares all libraries, and the engine, with `cargo test --workspace`. Tests that start the
# programs let cargo build these.
TESTED = ["cargo", "test", "--workspace", "--features", "wald-server/object,walctl/object", "--lib", "--test", "replica", "--test", "walctl",
          "--no-run"]


def programs():
    """The directory of wald and walctl with the feature. In a whole run setup/builds:buckets has built them."""
    there = SCRATCH / "bucket"
    return there if os.environ.get("CI_BUILT") and (there / "wald").exists() else build_programs()


@functools.cache
def messages():
    """The messages of cargo about the build with the feature."""
    return parsed(linted(*TESTED))


@functools.cache
def build_programs():
    """Builds the programs. Returns the directory of copies, which no other build replaces."""
    programs = made(messages(), test=False)
    directory = SCRATCH / "bucket"
    directory.mkdir(parents=True, exist_ok=True)
    for name in "wald", "walctl":
        # A program that runs cannot be written to.
        shutil.copy2(programs[name], directory / f"{name}.new")
        (directory / f"{name}.new").rename(directory / name)
    return directory


# The optimised daemon, and a program that times PUTs. Of one command, so that both have the same libraries. In a directory of
# their own, because other checks take the daemon without object stores.
OPTIMISED = ["cargo", "build", "--release", "--target-dir", TARGET / "object", "-p", "wald-server", "-p", "wald-bucket", "--bin", "wald",
             "--example", "puts", "--features", "wald-server/object"]


def optimised():
    """The directory of the optimised programs. Builds them if they are missing."""
    there = TARGET / "object/release"
    if not (there / "examples/puts").exists():
        subprocess.run(OPTIMISED, cwd=ROOT, check=True)
    return there


class Bucket:
    """A bucket of a server. `variables` let a client in."""

    def __init__(self, directory, base, scheme="s3", variables=None):
        self.objects, self.base = directory / "objects", base
        self.url = f"{scheme}://{BUCKET}/{PREFIX}"
        self.variables = {"WALD_BUCKET_ENDPOINT": base, "WALD_BUCKET_INSECURE": "true", **(variables or {})}

    def environment(self, **more):
        kept = {name: value for name, value in clean_environment().items() if not name.startswith(("AWS_", "AZURE_", "GOOGLE_"))}
        return {**kept, **self.variables, **more}

    def wald(self, *arguments, **more):
        return run(programs() / "wald", *arguments, env=self.environment(**more))

    def walctl(self, daemon, *arguments, **more):
        endpoint = {"WALD_ENDPOINT": daemon.endpoint} if daemon else {}
        return run(programs() / "walctl", *arguments, env=self.environment(**endpoint, **more))

    def backup(self, daemon, *arguments, **more):
        """One backup: (exit code, its JSON or None, stderr)."""
        done = self.walctl(daemon, "backup", self.url, "--output", "json", *arguments, **more)
        return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr.decode().strip()

    def kept(self):
        return self.walctl(None, "backup", "list", self.url, "--output", "raw").stdout.decode().split()


class Store(Bucket):
    """The server of an object store, in a process of its own; a context that ends it."""

    def __init__(self, directory, command, scheme="s3", variables=None, **own):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        super().__init__(directory, f"http://127.0.0.1:{self.port}", scheme, variables)
        (self.objects / BUCKET).mkdir(parents=True)
        command = [str(part).format(port=self.port, objects=self.objects) for part in command]
        self.log = (directory / "store.log").open("w")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=clean_environment(**own))
        if not wait_until(self.answers, 60):
            raise SystemExit(f"{command[0]} does not listen: {(directory / 'store.log').read_text()[-2000:]}")

    def answers(self):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()


S3 = {"AWS_ACCESS_KEY_ID": objects.KEY, "AWS_SECRET_ACCESS_KEY": objects.SECRET}


@contextlib.contextmanager
def own(directory, **options):
    """The server of this check: (bucket, server)."""
    (directory / "objects" / BUCKET).mkdir(parents=True)
    with objects.Objects(directory / "objects", **options) as server:
        yield Bucket(directory, f"http://{server.server_address[0]}:{server.server_port}", variables=S3), server


def versity(directory):
    """The Versity gateway: a bucket is a directory, an object is a file."""
    command = [SHARED / "bin/versitygw", "--port", "127.0.0.1:{port}", "--quiet", "posix", "{objects}"]
    return Store(directory, command, variables=S3, ROOT_ACCESS_KEY=objects.KEY, ROOT_SECRET_KEY=objects.SECRET)


def minio(directory):
    command = [SHARED / "bin/minio", "server", "--quiet", "--address", "127.0.0.1:{port}", "{objects}"]
    return Store(directory, command, variables=S3, MINIO_ROOT_USER=objects.KEY, MINIO_ROOT_PASSWORD=objects.SECRET,
                 MINIO_BROWSER="off", MINIO_UPDATE="off")


ACCOUNT = "devstoreaccount1"
# The well-known key of the emulator's account.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def azurite(directory):
    (directory / "azurite").mkdir()
    command = [SHARED / "azurite/node_modules/.bin/azurite-blob", "--location", directory / "azurite", "--blobHost", "127.0.0.1",
               "--blobPort", "{port}", "--silent", "--skipApiVersionCheck"]
    store = Store(directory, command, "az", {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY})
    store.variables["WALD_BUCKET_ENDPOINT"] += f"/{ACCOUNT}"
    now = email.utils.formatdate(usegmt=True)
    signed = "PUT" + "\n" * 12 + f"x-ms-date:{now}\nx-ms-version:2021-08-06\n/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    mac = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), "sha256")).decode()
    request = urllib.request.Request(f"{store.base}/{ACCOUNT}/{BUCKET}?restype=container", method="PUT", headers={
        "x-ms-date": now, "x-ms-version": "2021-08-06", "Authorization": f"SharedKey {ACCOUNT}:{mac}"})
    urllib.request.urlopen(request, timeout=30)
    return store


def s3rver(directory):
    command = [SHARED / "s3rver/node_modules/.bin/s3rver", "-d", "{objects}", "-a", "127.0.0.1", "-p", "{port}", "--silent",
               "--configure-bucket", BUCKET]
    return Store(directory, command, variables={"AWS_ACCESS_KEY_ID": "S3RVER", "AWS_SECRET_ACCESS_KEY": "S3RVER"})


def gcs_emulator(directory):
    command = [SHARED / "gcs/bin/gcp-storage-emulator", "start", "--host=127.0.0.1", "--port={port}", "--in-memory",
               "--default-bucket=wald"]
    key = directory / "key.json"
    store = Store(directory, command, "gs", {"WALD_BUCKET_CREDENTIALS_FILE": str(key)})
    # Clients escape a dash in the name of a bucket, and this server does not decode it.
    store.url = f"gs://wald/{PREFIX}"
    key.write_text(json.dumps({"gcs_base_url": store.base, "disable_oauth": True, "client_email": "", "private_key": "",
                               "private_key_id": ""}))
    key.chmod(0o600)
    return store


__all__ = [name for name in dir() if not name.startswith("_")]
