"""Measures the price of TLS in one run: a daemon in plaintext and one over TLS with tokens, in PAIRS (15) of SECONDS (1). Targets:
appends with 64 in flight 0.95, on the stream that a client shares and by a call each, sessions 0.9, scans 0.7. Arguments: PAIRS and SECONDS.
"""

from certificates import *
from clients import rust_appends
from prices import *

LOADS = [("appends by a call each, 64 in flight", by_walbench("append", "--in-flight", "64"), 0.95),
         ("sessions, 1,024 in flight", by_walbench("session"), 0.9),
         ("scans", by_walbench("scan", "--filled", "300000"), 0.7)]


@check("TLS and tokens cost at most 5 % of the appends, 10 % of the sessions, 30 % of the scans")
def price(directory):
    directory = Path(directory)
    authority = Authority(directory)
    pem, key = authority.issue(directory / "tls", "server")
    auth = directory / "auth.toml"
    auth.write_text('[principal.bench]\nallow = [{ do = ["append", "create", "read"], logs = "" }]\n')
    auth.chmod(0o600)
    token = directory / "token"
    run(WALD, "token", "create", "--principal", "bench", "--expires", "1d", "--to", token, "--auth-file", auth, check=True)
    secured = [*files(pem, key), "--auth-file", auth, "--metrics-open"]
    appends = ("appends of a client, 64 in flight", by_client(rust_appends(), 64), 0.95)
    with Daemon(directory / "plain") as plain, Daemon(directory / "secured", *secured) as tls:
        over_tls = f"https://{tls.grpc.replace('127.0.0.1', 'localhost')}"
        priced([appends, *LOADS], Side("plaintext", plain), Side("TLS", tls, over_tls, authority.pem, token))
