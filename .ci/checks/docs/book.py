"""Builds the book of docs/ with mdBook. Every link inside of the built pages must lead to a page and a heading of the book.
docs/readme checks that the summary has every page.
"""

import re
from urllib.parse import unquote

from common import *


@check("mdBook builds docs/ without warnings, and each link leads to a page and a heading")
def book(directory):
    if not expect("mdbook is there", shutil.which("mdbook"), "" if shutil.which("mdbook") else "run .ci/run setup/tools:mdbook"):
        return
    built = run("mdbook", "build", "docs", "--dest-dir", directory, cwd=ROOT)
    said = built.stderr.decode(errors="replace")
    good = built.returncode == 0 and "WARN" not in said
    expect("mdbook builds docs/ without warnings", good, "" if good else said[-2000:])
    pages = {page: page.read_text(encoding="utf-8") for page in Path(directory).rglob("*.html")}
    names = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    links, lost = 0, set()
    for page, text in pages.items():
        for link in re.findall(r'\bhref="([^"]+)"', text):
            if re.match(r"[a-z]+:", link):
                continue
            links += 1
            file, _, anchor = link.partition("#")
            there = (page.parent / unquote(file)).resolve() if file else page
            if not there.exists() or anchor and there in names and unquote(anchor) not in names[there]:
                lost.add(f"{page.relative_to(directory)}: {link}")
    expect("the book has links", links > 500, links)
    expect("each link of the book leads to a page and a heading", not lost, "\n".join(["", *sorted(lost)]) if lost else "")
