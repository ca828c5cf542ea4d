"""Kills and real power cuts of the released daemon under load, with a ledger outside."""

from cargo import *


@check("The power of ext4 and XFS is cut: as root, with loop devices")
def power_cuts():
    tested("server", "power_cut", "--ignored", "--nocapture", "--test-threads", "1", WALD_BINARY=str(WALD),
           WALD_CUTS=sized("40", "12"))


@check("kill -9 under load, at least a fifth of the kills in the middle of a roll")
def kills():
    tested("server", "kill", "--nocapture", WALD_BINARY=str(WALD), WALD_ACKS="200",
           WALD_KILLS=sized("60", "20"))
