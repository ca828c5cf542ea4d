"""Builds and runs the program in .ci/checks/durability/history, against a daemon that can be killed or two nodes with a store."""

import random

from clients import *
from replicas import *

PROGRAM = ROOT / ".ci" / "checks" / "durability" / "history"
# Lease of the nodes, and the longest wait for a takeover, or until both work again (s).
TTL, PATIENCE = 2, 120


def build_program(mode):
    # Checks of different modes may run at the same time.
    binary = SCRATCH / f"history-{mode}"
    go_stubs()
    subprocess.run(["go", "build", "-o", binary, "."], cwd=PROGRAM, check=True)
    return binary


def run_program(mode, flags, seconds):
    """Runs one mode of the program, for at most `seconds`. The arguments of the script take the place of the flags."""
    binary = build_program(mode)
    with scratch() as directory, harness.Served(WALD, directory) as served:
        counted("timeout", seconds, binary, mode, *(sys.argv[1:] or flags), env=clean_environment(**served.environment()))
        if served.control.trouble:
            expect("the control endpoint works", False, served.control.trouble)


def run_on_nodes(directory, flags, seconds, always=()):
    """Runs the mode `nodes` of the program against two nodes, as `run_program`. No arguments take the place of the flags of `always`."""
    binary = build_program("nodes")
    with own(directory) as (store, _), contextlib.closing(Nodes("history", directory, store, Here(store, "ab"), TTL)) as nodes:
        nodes.begin(PATIENCE)
        faults = Faults(nodes)
        environment = clean_environment(WALD_ENDPOINT=",".join(node.listen for node in nodes.nodes.values()),
                                        WALD_CONTROL=f"http://127.0.0.1:{faults.port}")
        held = counted("timeout", seconds, binary, "nodes", *always, *(sys.argv[1:] or flags), env=environment)
        expect("each fault is made, and both nodes work afterwards", not faults.trouble, faults.trouble or dict(faults.done))
        # A start ends with 69 if the bucket gives no answer.
        expect("no node ends by itself, except without the bucket", {code for _, code in nodes.ends} <= {69}, nodes.ends)
        if not held or faults.trouble:
            print(nodes.said(), flush=True)


class Faults(harness.Control):
    """Faults of the owner, by HTTP. An answer comes when another node owns the store, except for `restart`, `nap` and `go_on`; to
    `whole`, when both nodes work. A fault begins then, too."""

    def __init__(self, nodes):
        self.nodes, self.old = nodes, None
        super().__init__(None, None)

    def act(self, action, arguments):
        with self.lock:
            if action in ("go_on", "whole"):
                getattr(self, action)()
                return
            self.whole()
            name = self.nodes.record()["node"]
            self.old = self.nodes.nodes[name]
            getattr(self, action)(self.old)
            self.done[action] = self.done.get(action, 0) + 1

    def taken(self):
        if not wait_until(lambda: self.nodes.serves_other(self.old.name), PATIENCE):
            raise RuntimeError(f"no other node than {self.old.name} serves")

    def kill(self, node):
        node.kill()
        self.taken()
        node.start()

    def forget(self, node):
        """The store forgets its newest rows, before the other node takes over."""
        node.kill()
        rows = self.nodes.store.objects / BUCKET / PREFIX / "shards/0/db/wal"
        for row in sorted(path for path in rows.iterdir() if path.stat().st_size)[-5:]:
            row.unlink()
        self.taken()

    def restart(self, node):
        node.kill()
        node.start()

    def sleep(self, node):
        node.signal(signal.SIGSTOP)
        self.taken()

    def nap(self, node):
        node.signal(signal.SIGSTOP)
        time.sleep(random.uniform(0.8, 2) * TTL)
        node.signal(signal.SIGCONT)

    def cut(self, node):
        self.nodes.places.ways[node.name].mode = random.choice(["refused", "silent", "unanswered"])
        self.taken()

    def go_on(self):
        """Ends a sleep or a cut."""
        self.old.signal(signal.SIGCONT)
        self.nodes.places.ways[self.old.name].mode = None

    def hand_over(self, node):
        # The owner looks for stand-bys three times in the lease.
        command = [programs() / "walctl", "--endpoint", f"http://{node.listen}", "cluster", "hand-over"]
        if not wait_until(lambda: run(*command).returncode == 0, PATIENCE):
            raise RuntimeError(f"walctl cluster hand-over fails: {run(*command).stderr.decode()}")
        self.ended(node)

    def ended(self, node):
        """A node that ends by plan; starts it again when the other one owns the store."""
        if (code := node.process.wait(PATIENCE)) != 0:
            raise RuntimeError(f"{node.name} ends with {code}")
        self.taken()
        node.start()

    def end(self, node):
        node.signal(signal.SIGTERM)
        self.ended(node)

    def whole(self):
        if not wait_until(lambda: self.nodes.revive(), PATIENCE):
            raise RuntimeError("the store is not whole")
