#!/usr/bin/env python3
"""usage: .ci/checks/durability/history.py [FLAGS of .ci/checks/durability/history check, such as --seed N]

Checks that concurrent callers get answers that one caller at a time could get. Records 8
histories of 5,000 calls each (appends plain and conditional, batches over logs, fences, tails and
reads, by 12 callers, under kills of the daemon) and has Porcupine judge them. Then it plants a false answer
in each, which must be rejected. Prints the seed, calls, histories and time.
"""

from history_program import run_program

run_program(__doc__, "check", seconds=900)
