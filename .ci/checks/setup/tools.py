"""Installs the tools of the other checks, and builds a Kubernetes API."""

from common import *


@check("Tools of the distribution and of the registries at fixed versions; existing ones stay")
def tools():
    counted(ROOT / ".ci/lib/tools", cwd=ROOT)


@check("mdBook from its source, for docs/book")
def mdbook():
    counted(ROOT / ".ci/lib/tools", "mdbook", cwd=ROOT)


@check("Servers of object stores, for disk/bucket")
def stores():
    counted(ROOT / ".ci/lib/tools", "stores", cwd=ROOT)


@check("An emulator of arm64, and the maker of a Debian root, for deploy/release")
def release():
    counted(ROOT / ".ci/lib/tools", "release", cwd=ROOT)


@check("A Kubernetes API and kwok from Go modules, for deploy/install")
def cluster():
    counted(ROOT / ".ci/lib/cluster/build", cwd=ROOT)
