"""The console sessions of a README: blocks of commands and their answers."""

import re
import shlex


def goes_on(command):
    """Whether a command continues after this line."""
    try:
        shlex.split(command)
    except ValueError:
        return True
    return command.endswith("\\")


def blocks(text):
    """The console blocks of a text: their place in it, and their commands with answers."""
    for found in re.finditer(r"^```console\n(.*?)^```$", text, re.M | re.S):
        steps = []
        for line in found[1].splitlines():
            if line.startswith("$ "):
                steps.append((line[2:], []))
            elif not steps[-1][1] and goes_on(steps[-1][0]):
                steps[-1] = (f"{steps[-1][0]}\n{line}", [])
            else:
                steps[-1][1].append(line)
        yield found, steps
