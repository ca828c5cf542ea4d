"""Fuzzes the readers of foreign bytes: files of a data directory, scan cursors, requests, configuration.

Builds the targets of storage/fuzz and server/fuzz with libFuzzer and AddressSanitizer (a stable
compiler does, by RUSTC_BOOTSTRAP). Runs each from its corpus, for WALD_FUZZ_SECONDS (8) or
WALD_FUZZ_RUNS executions. A panic, more than 10 s or 1 GiB for one input, or an allocation of
256 MiB at once fails, and the script prints the line that repeats it. New inputs stay in the target
directory; the next run there begins with them.

WALD_FUZZ_SANITIZER=none makes it about three times as fast, without the check of single allocations."""

from common import *

BUILD = TARGET / "fuzz"
TARGETS = {
    "storage": ["frame", "body", "checkpoint", "index", "recovery", "backup", "cursor"],
    "server": ["request", "config", "manifest"],
}
SECONDS = os.environ.get("WALD_FUZZ_SECONDS", "8")
RUNS = os.environ.get("WALD_FUZZ_RUNS")
SANITIZER = os.environ.get("WALD_FUZZ_SANITIZER", "address")
BOUNDS = ["-timeout=10", "-rss_limit_mb=1024", "-malloc_limit_mb=256"]
TRIPLE = next(
    line.split()[1]
    for line in subprocess.check_output(["rustc", "-vV"], text=True).splitlines()
    if line.startswith("host:")
)
# The flags that cargo-fuzz sets; they save its installation.
FLAGS = [
    "--cfg fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cdebug-assertions",
    "-Ccodegen-units=16",
]


def environment() -> dict[str, str]:
    flags = list(FLAGS)
    if SANITIZER != "none":
        flags.append(f"-Zsanitizer={SANITIZER}")
    return {
        **os.environ,
        "RUSTC_BOOTSTRAP": "1",
        "RUSTFLAGS": " ".join(flags),
        "CARGO_TARGET_DIR": str(BUILD),
    }


def build(crate: str, targets: list[str]) -> None:
    command = ["cargo", "build", "--release", "--locked", "--target", TRIPLE]
    command += [word for target in targets for word in ("--bin", target)]
    subprocess.run(command, cwd=ROOT / crate / "fuzz", env=environment(), check=True)


def fuzzed(crate: str, target: str) -> bool:
    """Runs one target; prints its statistics, and how to repeat a failure."""
    program = BUILD / TRIPLE / "release" / target
    found, failed = BUILD / "corpus" / target, BUILD / "artifacts" / target
    for directory in (found, failed):
        directory.mkdir(parents=True, exist_ok=True)
    limit = f"-runs={RUNS}" if RUNS else f"-max_total_time={SECONDS}"
    seeds = ROOT / crate / "fuzz" / "corpus" / target
    command = [program, limit, *BOUNDS, "-print_final_stats=1", f"-artifact_prefix={failed}/", found, seeds]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    stats = dict(re.findall(r"^stat::(\w+):\s+(\d+)$", done.stderr, re.M))
    executions = int(stats.get("number_of_executed_units", 0))
    print(
        f"{target:10} {executions:>10,} executions, {stats.get('average_exec_per_sec', '?')} a second,"
        f" {stats.get('peak_rss_mb', '?')} MiB",
        flush=True,
    )
    if done.returncode == 0 and executions:
        return True
    print(done.stderr[-6000:])
    for name in re.findall(r"Test unit written to (\S+)", done.stderr):
        print(f"repeat it with: {program} {name}")
    return False


@check("Readers of files, requests and configuration survive mutated input")
def fuzz():
    for crate, targets in TARGETS.items():
        chosen = [target for target in targets if target in (sys.argv[1:] or targets)]
        if chosen:
            build(crate, chosen)
        for target in chosen:
            expect(f"{crate}: {target}", fuzzed(crate, target))
