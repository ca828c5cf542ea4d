"""Runs every command of the block of client/bench/README.md for a short time. Its daemon runs with the echo
service. Each command must succeed and report counts, and the requested files must exist. Speed is not
checked here. With `.ci/run --all` it also checks the number of system calls per group of appends. How
appends fall into groups depends on the machine; a quiet one has 3 to 7 calls.
"""

import shlex

from common import *


def commands():
    text = (ROOT / "client" / "bench" / "README.md").read_text()
    block = next(found for found in re.findall(r"^```console\n(.*?)^```$", text, re.M | re.S) if "walbench" in found)
    lines = [re.sub(r"\s+#.*", "", line[2:]) for line in block.splitlines() if line.startswith("$ ")]
    return [line for line in lines if line.startswith("walbench")]


def short(line):
    """The command with the smallest sizes that make sense."""
    words = shlex.split(re.sub(r"--(duration|rounds) \S+", "", line))[1:]
    return [*words, *(["--items", "20000"] if "istio" in words else ["--duration", "300ms", "--warm-up", "100ms", "--filled", "20000"])]


@check("Each command of the README about measuring runs for a short time, and writes its files")
def commands_run(temporary):
    with Daemon(Path(temporary) / "data", "--echo") as daemon:
        lines = commands()
        expect("the README has enough commands", len(lines) >= 5, len(lines))
        for line in lines:
            words = short(line)
            if "--json" not in words:
                words += ["--json", "report.json"]
            files = [Path(temporary) / after for word, after in zip(words, words[1:]) if word in ("--json", "--svg", "--time-series")]
            done = run(WALBENCH, *words, "--endpoint", daemon.endpoint, "--metrics", f"http://{daemon.http}/metrics",
                       cwd=temporary, env=clean_environment(), timeout=240)
            written = [file.name for file in files if file.is_file() and file.stat().st_size > 100]
            expect(f"$ {line}", done.returncode == 0 and len(written) == len(files), done.stderr.decode()[-500:] or ", ".join(written))
            for file in files:
                if file.suffix == ".svg":
                    expect(f"{file.name} is a drawing", b"<svg" in file.read_bytes()[:300])
                file.unlink(missing_ok=True)
    with Daemon(Path(temporary) / "plain") as daemon:
        # A timer that wakes its own event loop costs calls per append instead of per group: 12 a group, once.
        if sized(True, False):
            run(WALBENCH, "append", "--in-flight", "256", "--duration", "2s", "--endpoint", daemon.endpoint, env=clean_environment())
            written = int(re.search(r"syscw: (\d+)", Path(f"/proc/{daemon.pid}/io").read_text())[1])
            groups = daemon.metric("wald_group_requests_count")
            expect("a group of 256 appends in flight costs less than 8 calls that write", 0 < written < 8 * groups, f"{written} calls, {groups:.0f} groups")
        done = run(WALBENCH, "append", "--echo", "--duration", "200ms", "--endpoint", daemon.endpoint, env=clean_environment())
        expect("a daemon without echo says how to have it", done.returncode != 0 and b"--echo" in done.stderr, done.stderr.decode().strip()[-200:])
