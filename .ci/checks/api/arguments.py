"""The tests of the RPCs again, each start of the daemon with other arguments."""

from cargo import *

ARGUMENTS = "--segment-bytes 4MiB --read-strategy mmap --worker-threads 1 --reader-threads 1"


@check("Tests of appends, sessions, reads and administration pass with other arguments")
def other_arguments():
    files = "append", "session", "read", "trim", "producers", "fences", "administration"
    tested("server", "daemon", *(f"{name}::" for name in files), WALD_BINARY=str(WALD), WALD_TEST_ARGS=ARGUMENTS)
