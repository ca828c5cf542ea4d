"""Checks that concurrent callers get answers that one caller at a time could get. Records 8
histories of 5,000 calls each (appends plain and conditional, batches over logs, fences, tails and
reads, by 12 callers, under kills of the daemon) and has Porcupine judge them. Then it plants a false answer
in each, which must be rejected. Prints the seed, calls, histories and time.

`histories_of_two_nodes` records histories of two nodes that share a store in a bucket, with trims. Some callers enter at the owner, some at
the stand-by, and some with a client that knows both. In each history the owner is killed, sleeps, loses the bucket, or hands over,
several times. The calls have the level REPLICATED.

Lower levels have no such order over a takeover, by design: a takeover may lose records that were DURABLE, after their acks. No
history has reads with the visibility DURABLE. DURABLE appends count as calls whose outcome is unknown, and no caller may see a
record that a takeover loses.
"""

from common import *
from history_program import run_on_nodes, run_program


@check("Concurrent callers get answers that one caller at a time could get; planted false answers are rejected")
def histories():
    run_program("check", ["--histories", sized("8", "4")], seconds=900)


@check("Answers of two nodes have one order through takeovers, at the level REPLICATED")
def histories_of_two_nodes(directory):
    run_on_nodes(directory, ["--histories", sized("8", "2"), "--faults", sized("4", "3")], seconds=1500)


@check("A store that forgets rows loses REPLICATED acks: the history of its nodes is rejected")
def forgetful_store(directory):
    run_on_nodes(directory, [], seconds=300, always=["--forgetful"])
