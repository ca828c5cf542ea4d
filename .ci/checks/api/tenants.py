"""A tenant sends ten times its rate over one and over many connections. It gets its rate, and another tenant is served as if
it were alone. `WALD_RATE_SECONDS=30 cargo test -p wald-server --test daemon auth::limits` measures rates for longer, too.
"""

from common import *

SECONDS = sized(30, 5)
CROWD = sized(200, 50)
# Far below the speed of any machine, so that only the limit holds the tenant back.
RATE = 100
FILE = """
[tenant.greedy]
prefix = "greedy/"
limits = { appends_per_second = %d, append_bytes_per_second = "4MiB" }
[tenant.other]
prefix = "other/"
[principal.greedy]
tenant = "greedy"
allow = [{ do = ["append", "create"], logs = "greedy/" }]
[principal.other]
tenant = "other"
allow = [{ do = ["append", "create"], logs = "other/" }]
""" % RATE
OTHER = dict(appends=10**9, writers=8, connections=2, rate=100, logs=8, prefix="other", attempts=1, tolerate=True)


def prepared(directory):
    """The arguments of a daemon with these tenants, and the file with the token of each."""
    auth = Path(directory) / "auth.toml"
    auth.write_text(FILE)
    auth.chmod(0o600)
    tokens = {name: Path(directory) / f"{name}.token" for name in ("greedy", "other")}
    for name, to in tokens.items():
        run(WALD, "token", "create", "--principal", name, "--expires", "1d", "--to", to, "--auth-file", auth, check=True)
    return ["--auth-file", auth, "--metrics-open"], tokens


@check("A tenant at ten times its rate gets its rate and exact waits, and another tenant is served")
def beyond_the_rate(directory, seconds=SECONDS):
    arguments, tokens = prepared(directory)
    with Daemon(Path(directory) / "data", *arguments) as daemon:
        daemon.ready()
        alone = daemon.load(seconds=seconds, token_file=tokens["other"], **OTHER).result()
        for connections in (1, CROWD):
            # The burst of the load before is full again.
            time.sleep(1.5)
            with daemon.load(appends=10**9, seconds=seconds, rate=10 * RATE, writers=max(20, connections), connections=connections,
                             logs=8, prefix="greedy", attempts=1, tolerate=True, token_file=tokens["greedy"]) as greedy:
                beside = daemon.load(seconds=seconds, token_file=tokens["other"], **OTHER).result()
                told = greedy.result()
            print(f"     greedy: {told}\n     alone: {alone}\n     beside: {beside}")
            of = f"over {connections} connection{'s' * (connections > 1)}"
            refused = told.get("errors", {})
            expect(f"{of} the tenant gets RATE and nothing else", list(refused) == ["ResourceExhausted RATE NotApplied"], refused)
            # The burst of one second comes on top, and the client waits for its last answers.
            share = told["acks"] / (RATE * (told.get("seconds", seconds) + 1))
            expect(f"{of} it gets 0.9 to 1.1 of its rate", 0.9 <= share <= 1.1, f"{share:.3f}")
            expect(f"{of} the other tenant is never refused", not beside["errors"] and not alone["errors"], beside["errors"])
            kept = beside["acks"] / beside["seconds"] / (alone["acks"] / alone["seconds"])
            expect(f"{of} the other tenant has at least 0.9 of its throughput", kept >= 0.9, f"{kept:.3f}")
            most = 2 * alone["p99_us"] if seconds >= 30 else 4 * alone["p99_us"] + 60_000
            expect(f"{of} its p99 is below {'twice' if seconds >= 30 else 'four times'} its p99 alone", beside["p99_us"] < most,
                   f"{beside['p99_us'] / 1000:.1f} ms, alone {alone['p99_us'] / 1000:.1f} ms")
        refusals = daemon.metric('wald_tenant_rate_refusals_total{kind="append",tenant="greedy"}')
        expect("the metric counts the refusals", refusals > 0, refusals)
