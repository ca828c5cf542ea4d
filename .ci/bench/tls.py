"""Measures the price of TLS in one run: a daemon in plaintext and one over TLS with tokens, each in turn, in PAIRS (15) of
SECONDS (1). A ratio is the median of the ratios of the pairs, so that a slow minute of the machine meets both. Targets:
appends with 64 in flight 0.95, sessions 0.9, scans 0.7. Arguments: PAIRS and SECONDS.
"""

import statistics

from certificates import *

PAIRS = int(sys.argv[1]) if len(sys.argv) > 1 else 15
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 1
LOADS = [("appends, 64 in flight", ("append", "--in-flight", "64"), 0.95),
         ("sessions, 1,024 in flight", ("session",), 0.9),
         ("scans", ("scan", "--filled", "300000"), 0.7)]


def measured(daemon, load, *connection):
    """One round: records per second, and the processor time of the daemon and of walbench for a million records (s)."""
    done = run(WALBENCH, *load, *connection, "--metrics", f"http://{daemon.http}", "--duration", f"{SECONDS}s",
               "--warm-up", "500ms", "--output", "json", check=True)
    found = json.loads(done.stdout)["entries"][0]["wald"]["median"]
    figure = found["figures"][0]
    return (figure["records_per_second"], found["server_cpu_seconds_per_million_records"],
            found["client_cpu_seconds"] / figure["records"] * 1e6)


def medians(rounds):
    """The median of each figure of the rounds."""
    return [statistics.median(values) for values in zip(*rounds)]


@check("TLS and tokens cost at most 5 % of the appends, 10 % of the sessions, 30 % of the scans")
def price(directory):
    directory = Path(directory)
    authority = Authority(directory)
    pem, key = authority.issue(directory / "tls", "server")
    auth = directory / "auth.toml"
    auth.write_text('[principal.bench]\nallow = [{ do = ["append", "create", "read"], logs = "" }]\n')
    auth.chmod(0o600)
    run(WALD, "token", "create", "--principal", "bench", "--expires", "1d", "--to", directory / "token", "--auth-file", auth, check=True)
    secured = [*files(pem, key), "--auth-file", auth, "--metrics-open"]
    with Daemon(directory / "plain") as plain, Daemon(directory / "secured", *secured) as tls:
        over_tls = ["--endpoint", f"https://{tls.grpc.replace('127.0.0.1', 'localhost')}", "--tls-ca", authority.pem, "--token-file", directory / "token"]
        in_plaintext = ["--endpoint", plain.endpoint]
        plain.ready(), tls.ready()
        for name, load, target in LOADS:
            ratios, rounds = [], ([], [])
            for pair in range(PAIRS):
                turns = [(0, plain, in_plaintext), (1, tls, over_tls)]
                # Each goes first in every other pair: a machine that slows down treats both alike.
                for place, daemon, connection in turns if pair % 2 == 0 else reversed(turns):
                    rounds[place].append(measured(daemon, load, *connection))
                ratios.append(rounds[1][-1][0] / rounds[0][-1][0])
            for place, figures in zip(("plaintext", "TLS"), map(medians, rounds)):
                rate, server, client = figures
                print(f"{name}, {place}: {rate:,.0f} records/s; CPU of the daemon {server:.2f} s and of walbench {client:.2f} s for a million")
            ratio = statistics.median(ratios)
            expect(f"{name}: at least {target} of plaintext", ratio >= target, f"{ratio:.3f} ({min(ratios):.2f} to {max(ratios):.2f})")
