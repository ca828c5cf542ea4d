"""The system's clock of single processes, which jumps."""

import struct

from common import *


def compiled(directory):
    """The library that gives a process its own clock."""
    library = directory / "clock.so"
    run("cc", "-shared", "-fPIC", "-O2", "-o", library, ROOT / ".ci/lib/clock.c", check=True)
    return library


class Clock:
    """The clock of a process that has `variables` in its environment. The file of a path has its setting."""

    def __init__(self, library, path):
        self.path = path
        path.write_bytes(struct.pack("<q", 0))
        self.variables = {"LD_PRELOAD": str(library), "CLOCK_AHEAD": str(path)}

    def set_ahead(self, seconds):
        """The clock jumps: it is ahead of the real time by this from now on, or behind it."""
        with open(self.path, "r+b") as file:
            file.write(struct.pack("<q", seconds))
