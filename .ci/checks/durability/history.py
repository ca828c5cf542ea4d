"""Checks that concurrent callers get answers that one caller at a time could get. Records 8
histories of 5,000 calls each (appends plain and conditional, batches over logs, fences, tails and
reads, by 12 callers, under kills of the daemon) and has Porcupine judge them. Then it plants a false answer
in each, which must be rejected. Prints the seed, calls, histories and time.
"""

from common import *
from history_program import run_program

@check("Concurrent callers get answers that one caller at a time could get; planted false answers are rejected")
def histories():
    run_program("check", ["--histories", sized("8", "4")], seconds=900)
