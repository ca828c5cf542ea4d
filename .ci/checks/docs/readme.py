"""Runs every `console` block of README.md, of the quickstart, of the pages on languages, HTTP, restores, security and upgrades and of walctl's README, in order. Each page
gets an empty directory with a daemon on the default ports, unless it starts the daemon. Compares the output with the page. Times, rates, cursors and the like may
differ. A line `...` stands for any lines. --update writes the output into the page, except into answers with such a line.
Also checks the links of all Markdown files.
"""

import re

from common import *
from typed import blocks

README = ROOT / "README.md"
BOOK = ROOT / "docs" / "src"
# Pages that start the daemon themselves.
ALONE = [BOOK / "security.md", BOOK / "upgrade.md"]
TYPED = [README, BOOK / "quickstart.md", BOOK / "languages.md", BOOK / "http.md", BOOK / "restore.md", *ALONE, ROOT / "client" / "walctl" / "README.md"]
VOLATILE = [
    (r'"timestamp_?[uU]s": ?"\d+"', '"timestampUs": "T"'),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?Z?", "T"),
    # Whether a marker lies between two appends depends on how fast they were typed.
    (r'"position": ?"\d+"', '"position": "P"'),
    # Each store begins with its own numbers.
    (r'"recovery_?[eE]poch": ?"\d+"', '"recoveryEpoch": "E"'),
    (r'"log_?[iI]d": ?"\d+"', '"logId": "I"'),
    (r'"cursor": ?"[^"]+"', '"cursor": "C"'),
    (r"in [\d.]+ \w+, \d+ records/s", "in T, N records/s"),
    # Backups: each has its own name, place and sizes.
    (r"backup [-.\w]+", "backup B"),
    (r"position \d+", "position P"),
    (r"recovery epoch \d+", "recovery epoch E"),
    (r"[\d.]+ [KM]?i?B( in| of it| checked|; the next)", r"SIZE\1"),
    (r"in \d+ files", "in N files"),
    (r"\d+ files,", "N files,"),
    (r"in \d+ seconds?", "in T"),
    # Ids of tokens.
    (r"\b\w{8}(  orders  )|(token )\w{8}( of principal)", r"\1\2K\3"),
    (r"\b(wald|walctl) \d+\.\d+\.\d+\S*( \(\w+\))?", r"\1 V"),
    # Lines of the audit log.
    (r'"peer":"127\.0\.0\.1:\d+"', '"peer":"P"'),
    (r'"token_id":"\w{8}"', '"token_id":"K"'),
]


def same(said, printed):
    """Whether the printed output matches the page."""
    said, printed = "\n".join(said), "\n".join(printed)
    for pattern, name in VOLATILE:
        said, printed = re.sub(pattern, name, said), re.sub(pattern, name, printed)
    pattern = re.escape(said).replace(r"\.\.\.", r"[\s\S]*")
    # An ellipsis within a line is literal; only lines of dots stand for other lines.
    return re.fullmatch(pattern, printed) is not None


def perform(command, directory):
    environment = clean_environment()
    environment["PATH"] = f"{SCRATCH / 'bin'}:{TARGET / 'release'}:{environment['PATH']}"
    done = run("bash", "-c", f"exec 2>&1\n{command}", cwd=directory, env=environment, stdin=subprocess.DEVNULL)
    return done.stdout.decode().rstrip("\n").expandtabs(8).splitlines()


def prefixed(page):
    return page.relative_to(ROOT)


def links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        there = (page.parent / link) if link else page
        expect(f"{prefixed(page)}: the link {link or '#' + anchor} leads somewhere", there.exists())
        if anchor and there.suffix == ".md" and there.exists():
            expect(f"{prefixed(page)}: {link}#{anchor} names a heading", anchor in anchors(there))


def anchors(page):
    """Names of the headings of a page, as GitHub and mdBook make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def typed(page, directory):
    """Types the sessions of one page into a directory; returns the page with the printed answers. What a command
    exports holds for the later ones."""
    updated = text = page.read_text()
    exports = []
    for found, steps in blocks(text):
        shown = []
        for command, said in steps:
            printed = perform("\n".join([*exports, command]), directory)
            if command.startswith("export "):
                exports.append(command)
            expect(f"$ {command.splitlines()[0][:90]}", same(said, printed),
                   "" if same(said, printed) else "\n".join(["it printed", *printed[:60]]))
            shown += [f"$ {command}", *(said if "..." in said else printed)]
        updated = updated.replace(found[0], "```console\n" + "\n".join(shown) + "\n```")
    return updated


def typed_with_daemon(page, directory):
    """Types the sessions of a page that needs a daemon."""
    daemon = subprocess.Popen([WALD], cwd=directory, env=clean_environment(), stderr=subprocess.PIPE, text=True)
    try:
        first = next((line for line in daemon.stderr if "wald is serving" in line), "")
        expect(f"{prefixed(page)}: wald serves on its default ports", "127.0.0.1:6925" in first, first if not first else "")
        updated = typed(page, directory)
        daemon.send_signal(signal.SIGTERM)
        expect("SIGTERM ends it with 0", daemon.wait(timeout=60) == 0)
    finally:
        daemon.kill()
    return updated


def typed_alone(page, directory):
    """Types the sessions of a page that starts the daemon, and ends it."""
    pid = Path(directory) / "wald.pid"
    try:
        updated = typed(page, directory)
        ended = wait_until(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists(), 30)
        expect(f"{prefixed(page)}: the daemon ends", ended, "" if ended else (Path(directory) / "wald.log").read_text())
    finally:
        if pid.exists() and Path(f"/proc/{pid.read_text().strip()}/exe").exists():
            os.kill(int(pid.read_text()), signal.SIGKILL)
    return updated


@check("README names the first commands, and links of all Markdown files lead somewhere")
def links():
    text = README.read_text()
    for command in ("cargo run --release", "cargo test --workspace", ".ci/run"):
        expect(f"README says {command}", command in text)
    summary = (BOOK / "SUMMARY.md").read_text()
    for page in sorted(BOOK.glob("*.md")):
        expect(f"the book's summary has {page.name}", page.name == "SUMMARY.md" or f"({page.name})" in summary)
    for name in run("git", "ls-files", "*.md", cwd=ROOT, check=True).stdout.decode().split():
        links_lead_somewhere(ROOT / name)


@check("Each command of README, walctl's README and six pages of docs/ prints the answer of the page")
def sessions():
    for page in TYPED:
        with scratch() as directory:
            updated = typed_alone(page, directory) if page in ALONE else typed_with_daemon(page, directory)
        if "--update" in sys.argv:
            page.write_text(updated)
