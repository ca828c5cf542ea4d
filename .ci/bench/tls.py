"""Measures the price of TLS in one run: a daemon in plaintext and one over TLS with tokens, in PAIRS (15) of SECONDS (1). Targets:
appends with 64 in flight 0.95, sessions 0.9, scans 0.7. Arguments: PAIRS and SECONDS.
"""

from certificates import *
from prices import priced

LOADS = [("appends, 64 in flight", ("append", "--in-flight", "64"), 0.95),
         ("sessions, 1,024 in flight", ("session",), 0.9),
         ("scans", ("scan", "--filled", "300000"), 0.7)]


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
        priced(LOADS, ("plaintext", plain, ["--endpoint", plain.endpoint]), ("TLS", tls, over_tls))
