"""Tests of the engine at larger sizes, and under a scheduler of its own."""

from cargo import *


@check("Schedules of the committing threads: no ack before its flush, no caller left waiting")
def schedules():
    # An engine for which another library chooses the order of the threads. durability/known_bad takes the same build.
    # With --workspace most libraries have the same features as for the tests.
    counted("cargo", "test", "--workspace", "--lib", "--features", "wald-storage/known-bad,wald-storage/shuttle",
            "--", "--nocapture", "interleavings", cwd=ROOT, env={"WALD_SCHEDULES": "3000", **os.environ})


@check("Every byte of a segment and of every message of the contract flipped, files cut at every offset")
def damage():
    # The damage of other files at full size, `WALD_DAMAGE=all ... damaged_files`, takes some minutes more.
    tested("proto", "wald_proto", "--nocapture", "every_flipped", WALD_DAMAGE="all")
    tested("storage", "wald_storage", "--nocapture", "tests::damage::", "every_flipped", WALD_DAMAGE="all")


@check("Simulated power cuts, lost machines, all faults combined, and months of logs that come and go")
def power():
    tested("storage", "wald_storage", "--nocapture", "power_cut", "tests::lost_machines::", "tests::combined::", "tests::month::",
           WALD_CUTS=sized("10000", "4000"), WALD_MACHINES=sized("2000", "800"), WALD_COMBINED=sized("1000", "300"), WALD_MONTH=sized("40", "12"))


@check("Crashes, power cuts, damage, sorting, backups and replicas of stores with encrypted records")
def encrypted():
    # All tests of the engine: those about plain bytes turn encryption off themselves, and say why.
    tested("storage", "wald_storage", WALD_TEST_ENCRYPTED="1")


@check("Memory of the sorter stays within its bound")
def sorting_memory():
    tested("storage", "sorting_memory", WALD_HISTORY="1", WALD_LOGS=sized("200000", "100000"))
    tested("storage", "sorting_memory", WALD_HISTORY="4")
