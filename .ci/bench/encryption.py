"""Measures the price of encryption at rest in one run: a daemon with plain records and one that encrypts them, in PAIRS (15) of
SECONDS (1). Targets: appends with 64 in flight 0.95, sessions 0.85, scans 0.6. Arguments: PAIRS and SECONDS.
"""

from prices import *

LOADS = [("appends, 64 in flight", by_walbench("append", "--in-flight", "64"), 0.95),
         ("sessions, 1,024 in flight", by_walbench("session"), 0.85),
         ("scans", by_walbench("scan", "--filled", "300000"), 0.6)]


@check("Encryption at rest costs at most 5 % of the appends, 15 % of the sessions, 40 % of the scans")
def price(directory):
    directory = Path(directory)
    key = directory / "key"
    run(WALD, "key", "new", "--to", key, check=True)
    with Daemon(directory / "plain") as plain, Daemon(directory / "encrypted", "--encryption-key-file", key) as encrypted:
        priced(LOADS, Side("plain", plain), Side("encrypted", encrypted))
