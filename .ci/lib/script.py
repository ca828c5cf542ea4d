"""Runs checks of one file: script.py FILE NAME,... [ARGUMENT...]. Without names it runs all, in the order of the file."""

import importlib
import inspect
import traceback

import common
from common import *


def performed(function):
    """Runs one check. An error fails this check only."""
    print(f"-- {function.__name__}", flush=True)
    began = time.monotonic()
    try:
        needed = [name for name, one in inspect.signature(function).parameters.items() if one.default is one.empty]
        if needed:
            with scratch() as directory:
                function(Path(directory) / "data" if needed == ["data"] else Path(directory))
        else:
            function()
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        expect(f"{function.__name__} runs to its end", False, error)
    print(f"     {function.__name__}: {time.monotonic() - began:.1f} s", flush=True)


def main():
    _, file, names, *arguments = sys.argv
    sys.argv = [file, *arguments]
    sys.path.insert(0, str(Path(file).parent))
    SCRATCH.mkdir(parents=True, exist_ok=True)
    importlib.import_module(Path(file).stem)
    wanted = [name for name in names.split(",") if name]
    unknown = set(wanted) - {function.__name__ for function in common.CHECKS}
    for name in sorted(unknown):
        expect(f"{file} has a check {name}", False)
    for function in common.CHECKS:
        if not wanted or function.__name__ in wanted:
            performed(function)
    finish()


if __name__ == "__main__":
    main()
