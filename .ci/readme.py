#!/usr/bin/env python3
"""usage: .ci/readme.py [--update]

Runs every `console` block of README.md, in order, in an empty directory with the daemon on its
default ports, and compares what it prints with what README says. Times, rates, cursors and the
like may differ. A line `...` stands for any lines. --update writes what was printed into README,
except into answers with such a line.
"""

import re

from common import *
from typed import blocks

if sys.argv[1:] not in ([], ["--update"]):
    usage()
README = ROOT / "README.md"
VOLATILE = [
    (r'"timestampUs": "\d+"', '"timestampUs": "T"'),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?Z?", "T"),
    # A marker lies between two appends, or not: it depends on how fast they were typed.
    (r'"position": "\d+"', '"position": "P"'),
    # Each store begins with numbers of its own.
    (r'"recoveryEpoch": "\d+"', '"recoveryEpoch": "E"'),
    (r'"logId": "\d+"', '"logId": "I"'),
    (r'"cursor": "[^"]+"', '"cursor": "C"'),
    (r"in [\d.]+ \w+, \d+ records/s", "in T, N records/s"),
]


def same(said, printed):
    """Whether what was printed is what README says."""
    said, printed = "\n".join(said), "\n".join(printed)
    for pattern, name in VOLATILE:
        said, printed = re.sub(pattern, name, said), re.sub(pattern, name, printed)
    pattern = re.escape(said).replace(r"\.\.\.", r"[\s\S]*")
    # An ellipsis within a line is part of it; only whole lines of it stand for others.
    return re.fullmatch(pattern, printed) is not None


def perform(command, directory):
    environment = clean_environment()
    environment["PATH"] = f"{SCRATCH / 'bin'}:{TARGET / 'release'}:{environment['PATH']}"
    done = run("bash", "-c", f"{command} 2>&1", cwd=directory, env=environment, stdin=subprocess.DEVNULL)
    return done.stdout.decode().rstrip("\n").expandtabs(8).splitlines()


text = README.read_text()
for what in ("cargo run --release", "cargo test --workspace", ".ci/run"):
    check(f"README says {what}", what in text)
for link in re.findall(r"\]\(([^)#:]+)\)", text):
    check(f"README's link {link} leads somewhere", (ROOT / link).exists())
updated = text
with scratch() as directory:
    daemon = subprocess.Popen([WALD], cwd=directory, env=clean_environment(), stderr=subprocess.PIPE, text=True)
    try:
        first = next((line for line in daemon.stderr if "wald is serving" in line), "")
        check("wald serves on its default ports", "127.0.0.1:6925" in first, first if not first else "")
        for found, steps in blocks(text):
            shown = []
            for command, said in steps:
                printed = perform(command, directory)
                check(f"$ {command.splitlines()[0][:90]}", same(said, printed),
                      "" if same(said, printed) else "\n".join(["it printed", *printed[:60]]))
                shown += [f"$ {command}", *(said if "..." in said else printed)]
            updated = updated.replace(found[0], "```console\n" + "\n".join(shown) + "\n```")
        daemon.send_signal(signal.SIGTERM)
        check("SIGTERM ends it with 0", daemon.wait(timeout=60) == 0)
    finally:
        daemon.kill()
if "--update" in sys.argv:
    README.write_text(updated)
finish()
