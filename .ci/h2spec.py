#!/usr/bin/env python3
"""usage: .ci/h2spec.py

HTTP/2 by the book: every case of h2spec, strict ones included, against a daemon. A case that fails must be
listed here with its reason, and a listed one must fail.
"""

import xml.etree.ElementTree

from common import *

usage()
KNOWN = {
    "Sends invalid connection preface":
        "its text begins like HTTP/1.1, and is answered in HTTP/1.1 with what speaks here, then closed",
}

# The server may answer a request before h2spec has sent all of a case's frames; what it then sees is not the answer to
# the frame in question. A fault fails every time.
TRIES = 3


def tried(daemon, report, section=None):
    """Runs the cases of a section, or all: how many there were, and those that failed with their section and reason."""
    host, _, port = daemon.grpc.rpartition(":")
    command = [TARGET / "ci/bin/h2spec", *([section] if section else []), "--strict", "-h", host, "-p", port,
               "-P", "/grpc.health.v1.Health/Check", "-j", report]
    subprocess.run([str(part) for part in command], stdout=subprocess.DEVNULL, timeout=300)
    cases = [case for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase")
             if not section or case.get("package") == section]
    return len(cases), {case.get("classname"): (case.get("package"), " ".join((fault.text or fault.tag).split())[:300])
                        for case in cases for fault in case}


with scratch() as temporary, Daemon(Path(temporary) / "data") as daemon:
    daemon.ready()
    report = Path(temporary) / "report.xml"
    total, failed = tried(daemon, report)
    for attempt in range(1, TRIES):
        for section in sorted({section for name, (section, _) in failed.items() if name not in KNOWN}):
            _, again = tried(daemon, report, section)
            failed = {name: fault for name, fault in failed.items() if fault[0] != section or name in KNOWN or name in again}
    for name, (section, why) in failed.items():
        if name not in KNOWN:
            check(f"h2spec: {name}", False, f"{section}: {why}")
    for name, reason in KNOWN.items():
        check(f"h2spec: {name}: fails as it must: {reason}", name in failed, failed.get(name))
    check("h2spec: all other cases pass", total >= 146 and set(failed) <= set(KNOWN), f"{total - len(failed)} of {total}")
    check("h2spec: the daemon stops with 0", daemon.stop() == 0)
finish()
