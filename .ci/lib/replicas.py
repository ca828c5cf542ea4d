"""Daemons with a replica in a bucket, loads of all levels with ledgers, the judgement of the acks of a lost machine, and nodes
that share a store."""

from collections import Counter

from buckets import *
from proxies import Proxies

SEGMENTS = ["--segment-bytes", "1MiB"]
# A short gap: rounds are shorter than a second.
QUICK = ["--bucket-gap", "5ms", "--replica-interval", "200ms"]
# The loads of a machine: name -> level, number of logs of each append.
LOADS = {"durable": ("durable", 1), "replicated": ("replicated", 1),
         "durable-batches": ("durable", 3), "replicated-batches": ("replicated", 3)}


def encrypt(directory, store):
    """Lets all nodes of the store encrypt it, with a key for each log."""
    path = directory / "wrapping-key"
    run(programs() / "wald", "key", "new", "--to", path)
    store.keys = ["--encryption-key-file", path, "--encryption-scope", "log"]


def keys(store):
    """The arguments of a node that encrypts the store; none if it is plain."""
    return getattr(store, "keys", [])


def serve(store, data, *arguments, node="one", segments=SEGMENTS):
    """A daemon whose replica is in the bucket."""
    return Daemon(data, "--bucket-url", store.url, "--node-id", node, *segments, *QUICK, *keys(store), *arguments,
                  variables=store.variables, binary=programs() / "wald")


def load(daemon, directory, name, seconds, **more):
    """A load with a ledger. Its logs begin with its name and the directory's."""
    level, across = LOADS[name]
    options = dict(seconds=seconds, appends=10**9, writers=16 if across == 1 else 8, logs=20, bytes=200, across=across, durability=level,
                   attempts=1, tolerate=True) | more
    return daemon.load(prefix=f"{name}-{directory.name}", ledger=directory / f"{name}.ledger", **options)


def brief(said):
    """A message on one line."""
    return " ".join(said.split())[:300]


def begun(directory, name):
    """Whether a ledger has its first 8 KiB, about 70 lines. The rest is in the memory of the load program."""
    path = directory / f"{name}.ledger"
    return path.exists() and path.stat().st_size > 0


def acked(directory, name):
    """The acks of a ledger. A batch has one for each of its logs. The last line may be there in part."""
    path = directory / f"{name}.ledger"
    text = path.read_text() if path.exists() else ""
    entries = [Entry(line) for line in text[:text.rfind("\n") + 1].splitlines()]
    return [entry for entry in entries if entry.acked]


def epoch_of(daemon):
    _, info, _ = daemon.call("wald.v1.OpsService/GetServerInfo", {})
    return int(info["recoveryEpoch"])


def lost_acks(daemon, directory, name):
    """The acks of a load, the records that are there, and the acks whose records are not."""
    entries, found = acked(directory, name), stored(daemon, f"{name}-{directory.name}/")
    return entries, found, [entry for entry in entries if found.get((entry.log, entry.lsn)) != entry.number]


def judge(what, daemon, directory, epoch):
    """States the fate of the acks of a machine whose recovery epoch was `epoch`. A load that the machine sends on to its
    successor has acks of later epochs, too, and none of these may be lost."""
    for name, (level, across) in LOADS.items():
        entries, found, lost = lost_acks(daemon, directory, name)
        once = {(log, number) for (log, _), number in found.items()}
        expect(f"{what}: {name}: nothing is there twice", found and len(once) == len(found), f"{len(found)} records")
        if across > 1:
            parts = Counter(found.values())
            partial = [number for number, count in parts.items() if count != across]
            expect(f"{what}: {name}: each batch is there whole or not at all", parts and not partial, f"{len(partial)} of {len(parts)} in part")
        if level == "replicated":
            expect(f"{what}: {name}: every ack is there", entries and not lost, f"{len(entries) - len(lost)} of {len(entries)}")
        _, tail, said = daemon.call("wald.v1.WalService/GetTail", {"log": f"{name}-{directory.name}/0", "recoveryEpoch": epoch})
        position = int((tail or {}).get("survivedPosition", -1))
        gone = set(lost)
        wrong = [entry for entry in entries if (entry not in gone) != (entry.epoch > epoch or entry.position < position)]
        named = f"{len(lost)} of {len(entries)} lost, from position {position}" if position >= 0 else said
        expect(f"{what}: {name}: survived_position names exactly the lost acks", position >= 0 and not wrong,
               "; ".join([named, *(str(vars(entry)) for entry in wrong[:3])]))


class Here:
    """Places of nodes on this machine. Each has a proxy before the bucket."""

    def __init__(self, store, names):
        self.proxies = Proxies(store.base)
        self.ways = {name: self.proxies.way() for name in names}
        with contextlib.ExitStack() as free:
            sockets = [free.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
            self.addresses = {name: f"127.0.0.1:{one.getsockname()[1]}" for name, one in zip(names, sockets)}

    def bucket(self, name):
        return self.ways[name].url

    def inside(self, _):
        return contextlib.nullcontext()

    def close(self):
        self.proxies.close()


class Near(Here):
    """Places of nodes on this machine, with nothing before the bucket."""

    def __init__(self, store, names):
        super().__init__(store, names)
        self.base = store.base

    def bucket(self, _):
        return self.base


class Node:
    """One node: its process, its log, which is kept after the run, and its place. `variables` are added to its environment."""

    def __init__(self, name, log, data, store, places, ttl, *arguments, binary=None, variables=()):
        self.name, self.data, self.places, self.listen = name, data, places, places.addresses[name]
        self.log, self.process = log, None
        self.log.unlink(missing_ok=True)
        self.command = [binary or programs() / "wald", "--data-dir", self.data, "--listen", self.listen, "--http-listen", ":0",
                        "--log-format", "json", "--bucket-url", store.url, "--node-id", name, "--stand-by", "--lease-ttl", f"{ttl}s", *SEGMENTS,
                        "--replica-interval", "200ms", *keys(store), *arguments]
        self.environment = store.environment(WALD_BUCKET_ENDPOINT=places.bucket(name), **dict(variables))
        self.data.mkdir(mode=0o700)

    def start(self):
        with self.log.open("a") as log, self.places.inside(self.name):
            self.process = subprocess.Popen([str(part) for part in self.command], stdin=subprocess.DEVNULL, stderr=log, env=self.environment)

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def said(self):
        """The end of its log, for a failure."""
        lines = [line for line in self.log.read_text().splitlines() if "object_store::client::retry" not in line]
        return "\n".join([f"{self.name}, exit code {self.process.poll()}:", *lines[-10:]])


class Nodes:
    """Nodes that share a store, at these places. `logs` is the begin of the names of their logs, `ttl` their lease (s),
    `variables` gives more of each node's environment by its name, and `binary` is another build."""

    def __init__(self, logs, directory, store, places, ttl, *arguments, binary=None, variables=lambda _: {}):
        self.store, self.places, self.ttl = store, places, ttl
        self.nodes = {name: Node(name, SCRATCH / f"{logs}-{name}.log", directory / name, store, places, ttl, *arguments,
                                 binary=binary, variables=variables(name))
                      for name in places.addresses}
        # Name and exit code of each node that has ended by itself.
        self.ends = []

    def begin(self, seconds):
        """Starts all nodes, and waits until the store is whole."""
        for node in self.nodes.values():
            node.start()
        if not wait_until(self.is_whole, seconds):
            raise SystemExit("the nodes do not begin:\n" + self.said())

    def close(self):
        for node in self.nodes.values():
            node.kill()
        self.places.close()

    def said(self):
        return "\n".join(node.said() for node in self.nodes.values()) + f"\nowner: {self.record()}"

    def record(self):
        """The record of the owner, from the files of the store."""
        return self.value("shards/0/owner") or {"node": None, "term": 0, "state": None}

    def value(self, path):
        """The value of a record of the store, or None."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return json.loads((self.store.objects / BUCKET / PREFIX / path).read_text())["value"]

    def beats(self, name, state):
        """Whether a node has shown this state within half of its ttl."""
        with contextlib.suppress(FileNotFoundError):
            path = f"nodes/{name}"
            age = time.time() - (self.store.objects / BUCKET / PREFIX / path).stat().st_mtime
            return age < self.ttl / 2 and (self.value(path) or {}).get("state") == state
        return False

    def is_whole(self):
        """Whether an owner serves and names all others, and all live: a new owner names nodes that may have ended."""
        record = self.record()
        names = {record["node"], *record.get("stand_bys", ())}
        return record["state"] == "serving" and names == set(self.nodes) and all(
            self.beats(name, "owner" if name == record["node"] else "stand_by") for name in names)

    def serves_other(self, owner):
        record = self.record()
        return record["state"] == "serving" and record["node"] != owner

    def revive(self):
        """Starts nodes that have ended by themselves, as an init system does, and whether the store is whole."""
        for node in self.nodes.values():
            if (code := node.process.poll()) is not None:
                self.ends.append((node.name, code))
                node.start()
        return self.is_whole()


__all__ = [name for name in dir() if not name.startswith("_")]
