"""The daemon's instructions, counted by callgrind: nearly the same however busy the machine is."""

from collections import Counter

from common import *

SEGMENT = 64 << 20


class Counted(Daemon):
    """A daemon under callgrind."""

    def __init__(self, data_dir, *arguments):
        self.out = Path(f"{data_dir}.callgrind")
        super().__init__(data_dir, "--sorter-enabled=false", "--segment-bytes", SEGMENT, *arguments, under=(
            "valgrind", "--tool=callgrind", "--separate-threads=yes", f"--callgrind-out-file={self.out}", f"--log-file={self.out}.log"))

    def ready(self):
        """Not from /metrics: its reading of the processor's clock does not work under callgrind. A prepared
        segment is filled."""
        filled = lambda file: file.stat().st_blocks * 512 >= SEGMENT
        wait_until(lambda: sum(map(filled, (self.data_dir / "journal").iterdir())) >= 5)
        return self

    def counts(self):
        """Instructions of each thread since the last call, by the thread's name."""
        before = self.dumps()
        names = self.threads()
        run("callgrind_control", "--dump", self.pid, check=True)
        # One without a thread holds what all of them share.
        wait_until(lambda: len(self.dumps()) > len(before) + len(names))
        counts = Counter()
        for dump in self.dumps() - before:
            if thread := re.search(r"-(\d+)$", dump.name):
                wait_until(lambda dump=dump: "totals:" in dump.read_text())
                # A thread may have ended since.
                counts[names.get(int(thread[1]), "")] += int(re.search(r"^totals: (\d+)", dump.read_text(), re.M)[1])
        return counts

    def threads(self):
        """Names of the threads, by callgrind's numbers."""
        printed = run("vgdb", f"--pid={self.pid}", "v.info", "scheduler", check=True).stdout.decode()
        tasks = re.findall(r"^Thread (\d+): status = .*\(lwpid (\d+)\)", printed, re.M)
        names = {int(number): Path(f"/proc/{self.pid}/task/{task}/comm") for number, task in tasks}
        return {number: comm.read_text().strip() for number, comm in names.items() if comm.exists()}

    def count(self):
        """Instructions of all threads since the last call."""
        return self.counts().total()

    def dumps(self):
        return set(self.out.parent.glob(f"{self.out.name}.[0-9]*"))


def bench(daemon, workload, *flags):
    done = run(WALBENCH, workload, "--endpoint", daemon.endpoint, "--warm-up", "0s", *flags, env=clean_environment())
    if done.returncode:
        raise SystemExit(done.stderr.decode())
