"""Features outside the default build, of the static daemon."""

from cargo import *
from deploy import STATIC


@check("Traces go to a collector by OTLP")
def otlp():
    tested("server", "otlp", "--ignored", WALD_BINARY=str(STATIC / "wald"))
