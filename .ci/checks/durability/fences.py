#!/usr/bin/env python3
"""usage: .ci/checks/durability/fences.py [FLAGS of .ci/checks/durability/history fences, such as --seed N]

Two writers fence each other out of one log 400 times, and 60 times more under kills of the daemon. Each appends
as fast as it can until it is fenced out. After a fence has returned an epoch and a
tail, no record of an older epoch may lie at or beyond that tail. Prints the seed and counts.
"""

from history_program import run_program

run_program(__doc__, "fences", seconds=600)
