#!/usr/bin/env python3
"""Preprocessor of mdBook: brings pages of the repository into the book, and keeps their links.

Pages of docs/ link to READMEs and programs as they lie in the repository. The book appends these READMEs as chapters. A link
to another file of the repository becomes its text and the path of the file.
"""

import json
import os
import posixpath
import re
import sys

# Chapters that follow the ones of SUMMARY.md: path in the repository. Titles are their first headings.
PAGES = [
    "README.md", "CHANGELOG.md", "BENCHMARKS.md",
    "client/README.md", "client/bench/README.md", "client/walctl/README.md",
    "client/go/README.md", "client/python/README.md", "client/typescript/README.md",
    "client/java/README.md",
    "client/conformance/README.md", "proto/README.md", "server/README.md", "deploy/README.md",
    "deploy/helm/wald/README.md", "grafana/README.md", "ARCHITECTURE.md", "HACKING.md", "storage/README.md",
    "storage/FORMAT.md", "storage/DECISIONS.md", "storage/reader/README.md",
]
# Fenced and inline code stays; links of the form [text](target).
PARTS = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)|\[((?:[^\[\]`]|`[^`]*`)*)\]\(([^)\s]+)\)", re.M | re.S)


def chapter_path(file):
    """The path in the book of a file of the repository; None if the book has no such chapter."""
    if file == "docs/src/SUMMARY.md":
        return "quickstart.md"
    if file.startswith("docs/src/"):
        return file.removeprefix("docs/src/")
    return f"repository/{file}" if file in PAGES else None


def relink(text, file):
    """The text of a file with its links as the book needs them."""
    here = posixpath.dirname(chapter_path(file))

    def link(found):
        target = found[3]
        if found[1] or target is None or re.match(r"[a-z]+:|#", target):
            return found[0]
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
        there = chapter_path(path)
        if there is None:
            return found[2] if found[2].strip("`") == path else f"{found[2]} (`{path}`)"
        return f"[{found[2]}]({posixpath.relpath(there, here or '.')}{'#' if anchor else ''}{anchor})"

    return PARTS.sub(link, text)


def main():
    if sys.argv[1:2] == ["supports"]:
        return
    context, book = json.load(sys.stdin)
    root = posixpath.dirname(context["root"].rstrip("/"))

    def visit(chapters):
        for item in chapters:
            if "Chapter" in item:
                chapter = item["Chapter"]
                chapter["content"] = relink(chapter["content"], f"docs/src/{chapter['path']}")
                visit(chapter["sub_items"])

    items = book["items"]
    visit(items)
    items.append({"PartTitle": "Pages of the repository"})
    for file in PAGES:
        with open(os.path.join(root, file), encoding="utf-8") as page:
            text = page.read()
        title = re.search(r"^# (.*)$", text, re.M)[1]
        name = "README" if title == "Wald" else title
        path = chapter_path(file)
        items.append({"Chapter": {"name": name, "content": relink(text, file), "number": None, "sub_items": [],
                                  "path": path, "source_path": path, "parent_names": []}})
    json.dump(book, sys.stdout)


main()
