"""Rolling restarts under load: the daemon gets SIGTERM and starts again 10 times
on the same port, while 16 writers append without a pause. Every accepted append is
answered. Clients that state the lsn they expect see no error and no duplicate. Each start after the
first finds a clean end.
"""

import socket

from clients import examples
from common import *

examples()

ROLLING = EXAMPLES / "rolling"
# Appends between two restarts.
LOAD_BETWEEN = 500


def loaded(daemon):
    """Waits until the writers have appended."""
    return wait_until(lambda: daemon.metric("wald_appended_records_total") >= LOAD_BETWEEN)


def records(daemon, log):
    """The records of a log, as numbers."""
    return [int(line) for line in daemon.walctl("scan", log, "--output", "raw", check=True).stdout.split()]


def compare(daemon, writers):
    """Compares the writers' answers with the stored records."""
    guarded = [w for w in writers if w["conditional"]]
    plain = [w for w in writers if not w["conditional"]]
    errors = [error for w in guarded for error in w["errors"]]
    expect("writers that expect an lsn see no error", not errors, errors[:3] or f"{sum(w['tried'] for w in guarded)} appends")
    wrong = [w["log"] for w in guarded if records(daemon, w["log"]) != list(range(w["tried"]))]
    expect("each of their records is there, once and in order", not wrong, ", ".join(wrong))
    lost, silent, total = 0, 0, 0
    for writer in plain:
        found = records(daemon, writer["log"])
        failed = {*writer["unknown"], *writer["refused"]}
        acked = [n for n in range(writer["tried"]) if n not in failed]
        lost += [n for n in found if n not in failed] != acked
        silent += len(failed.intersection(found))
        total += len(acked)
    expect("of the other writers every acked record is there, once and in order", not lost, f"{total} appends")
    doubts = sum(len(w["unknown"]) for w in plain)
    kinds = sorted({error for w in plain for error in w["errors"]})
    expect("every stored record's append was answered", silent == 0,
           f"{doubts} appends of {total + doubts} left their writer in doubt, and were not applied{': ' + '; '.join(kinds) if kinds else ''}")


COUNT = int(sys.argv[1]) if sys.argv[1:] else sized(10, 5)


@check("Rolling restarts under load: every accepted append is answered, no duplicate, clean ends")
def rolling(data, count=COUNT):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    recoveries, codes, gaps = [], [], []
    daemon = Daemon(data, listen=address)
    load = subprocess.Popen([ROLLING, daemon.endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            env=clean_environment())
    try:
        for _ in range(count):
            if not expect("appends flow", loaded(daemon)):
                break
            began = time.monotonic()
            codes.append(daemon.stop())
            daemon = Daemon(data, listen=address)
            gaps.append(time.monotonic() - began)
            recoveries.append(daemon.start["recovery"])
        expect("appends flow", loaded(daemon))
        out, _ = load.communicate(timeout=90)
        expect(f"{count} times SIGTERM ended with 0", codes == [0] * count, codes)
        expect("each next start said clean", recoveries == ["clean"] * count, recoveries)
        print(f"     from SIGTERM to serving again: {min(gaps) * 1000:.0f} to {max(gaps) * 1000:.0f} ms")
        compare(daemon, json.loads(out))
    finally:
        load.kill()
        load.wait()
        daemon.kill()
