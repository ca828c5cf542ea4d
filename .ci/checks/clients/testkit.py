"""The server for tests, `wald --ephemeral`: a test in each language starts it with the helper of its client, and it ends with
the process that started it, however that one ends.
"""

from clients import *

LINE = re.compile(r"grpc=(127\.0\.0\.1:\d+) http=(127\.0\.0\.1:\d+)\n")
# Seconds for a start or an end.
PATIENCE = 60


def command(language):
    """The test of a language, and the folder where it runs."""
    folder = ROOT / FOLDERS[language]
    given = runner(language)
    return {
        "rust": ([EXAMPLES / "testkit"], ROOT),
        "go": (["go", "test", "-count=1", "-tags", "daemon", "./examples/testkit"], folder),
        "python": ([given[0], "-m", "pytest", "-q", "-p", "no:cacheprovider", folder / "examples/testkit.py"], folder),
        "typescript": (["node", "--test", folder / "dist/examples/testkit.js"], folder),
        "java": (["mvn", "--quiet", "--batch-mode", "surefire:test", "-Dtest=OrdersExample"], folder),
    }[language]


def stores(directory):
    return [path.name for path in directory.iterdir() if path.name.startswith("wald-")]


@check("A test in each language starts a server of its own, which leaves nothing")
def languages(directory):
    directory.mkdir(parents=True, exist_ok=True)
    for language in BUILDERS:
        line, folder = command(language)
        for binary, works in (WALD, True), (directory / "no-wald", False):
            environment = {**clean_environment(), "WALD_BINARY": str(binary), "TMPDIR": str(directory)}
            done = run(*line, cwd=folder, env=environment, stdin=subprocess.DEVNULL, timeout=300)
            said = (done.stdout + done.stderr).decode(errors="replace")
            if works:
                expect(f"{language}: the test passes", done.returncode == 0, "" if done.returncode == 0 else said[-2000:])
            else:
                refused = done.returncode != 0 and "set WALD_BINARY" in said
                expect(f"{language}: without the program it fails and names WALD_BINARY", refused, "" if refused else said[-2000:])
        expect(f"{language}: no store is left", not stores(directory), stores(directory))


@check("The server ends with the process that started it, also after kill -9")
def parent(directory):
    directory.mkdir(parents=True, exist_ok=True)
    # A shell that waits for it.
    starter = subprocess.Popen(["sh", "-c", f"{WALD} --ephemeral; true"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True, env={**clean_environment(), "TMPDIR": str(directory)})
    line = starter.stdout.readline()
    if not (found := LINE.fullmatch(line)):
        raise SystemExit(f"it does not print its ports: {line!r}")
    ready = lambda: run("curl", "-sf", f"http://{found[2]}/readyz").returncode == 0
    expect("it is ready", ready())
    expect("its store is in TMPDIR", len(stores(directory)) == 1, stores(directory))
    starter.kill()
    starter.wait()
    expect("it ends with its parent", wait_until(lambda: not ready(), PATIENCE))
    expect("it removes its store", wait_until(lambda: not stores(directory), PATIENCE), stores(directory))
    starter.stdout.close()
