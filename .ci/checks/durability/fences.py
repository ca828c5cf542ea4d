"""Two writers fence each other out of one log 400 times, and 60 times more under kills of the daemon. Each appends
as fast as it can until it is fenced out. After a fence has returned an epoch and a
tail, no record of an older epoch may lie at or beyond that tail. Prints the seed and counts.
"""

from common import *
from history_program import run_program

@check("Two writers fence each other out of one log: no record of an older epoch at or beyond the fence")
def fences():
    run_program("fences", ["--fences", sized("400", "150"), "--killed", sized("60", "25")], seconds=600)
