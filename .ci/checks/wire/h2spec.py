"""Runs every case of h2spec, strict ones included, against a daemon, in plaintext and over TLS. A failing case must be
listed here with its reason, and a listed one must fail.
"""

import xml.etree.ElementTree

from certificates import *

KNOWN = {
    "Sends invalid connection preface":
        "its text begins like HTTP/1.1, and is answered in HTTP/1.1 with what speaks here, then closed",
}

# This case races with the answer. h2spec sends a GET, and the server refuses it at once. Later frames of an ended
# stream have no effect, and h2spec waits for one.
MAY_FAIL = {"Sends multiple WINDOW_UPDATE frames increasing the flow control window to above 2^31-1 on a stream"}


@check("Every case of h2spec passes, or is listed with its reason")
def h2spec(temporary):
    judged(temporary, KNOWN, [], [])


@check("Every case of h2spec passes over TLS")
def over_tls(temporary):
    pem, key = Authority(temporary).issue(temporary / "tls", "server")
    # Inside TLS an invalid preface gets the answer of HTTP/2.
    judged(temporary, {}, files(pem, key), ["-t", "-k"])


def judged(temporary, known, arguments, flags):
    """Runs h2spec with these flags against a daemon with these arguments. The cases of `known` must fail."""
    with Daemon(temporary / "data", *arguments) as daemon:
        host, _, port = daemon.ready().grpc.rpartition(":")
        report = Path(temporary) / "report.xml"
        command = [TARGET / "ci/bin/h2spec", "--strict", *flags, "-h", host, "-p", port, "-P", "/grpc.health.v1.Health/Check", "-j", report]
        subprocess.run([str(part) for part in command], stdout=subprocess.DEVNULL, timeout=300)
        cases = list(xml.etree.ElementTree.parse(report).getroot().iter("testcase"))
        failed = {}
        for case in cases:
            for fault in case:
                failed[case.get("classname")] = f"{case.get('package')}: {' '.join((fault.text or fault.tag).split())}"[:300]
        for name, why in failed.items():
            if name not in known and name not in MAY_FAIL:
                expect(f"h2spec: {name}", False, why)
        for name, reason in known.items():
            expect(f"h2spec: {name}: fails as it must: {reason}", name in failed, failed.get(name))
        expect("h2spec: all other cases pass", len(cases) >= 146 and set(failed) <= set(known) | MAY_FAIL,
               f"{len(cases) - len(failed)} of {len(cases)}")
        expect("h2spec: the daemon stops with 0", daemon.stop() == 0)
