package main

import (
	"math/rand/v2"
)

// nodeLies are the lies of one daemon that fit two nodes, and lies that need a takeover.
var nodeLies = []lie{
	{"a tail that is older than an ack before the question", staleTail},
	{"an append of an older epoch, acked after a fence was answered", appendPastFence},
	{"half a batch in a read", halfBatch},
	{"half a batch over logs in two reads", halfOfLogs},
	{"the old owner answers with its tail after the next one has acked", staleOwner},
	{"both nodes ack an append at one lsn", bothAck},
	{"a takeover undoes a fence: an append of the older epoch is acked", fenceUndone},
	{"a takeover undoes a fence: a tail has the older epoch", epochUndone},
	{"a takeover undoes a trim", trimUndone},
}

// thinned leaves out the calls that changed nothing, except those on which a lie rests. If no order exists without
// them, none exists with them. A judge that finds no order tries all orders, and these calls have most of them.
func thinned(events []event) []event {
	var made []event
	for _, event := range events {
		changes := event.asked.kind != tails && event.asked.kind != reads && event.told.refusal == nil
		if changes || event.evidence {
			made = append(made, event)
		}
	}
	return made
}

// across calls try for takeovers of a recording in a random order, until one suits.
func across(recording *recording, random *rand.Rand, try func(takeover) bool) bool {
	for _, at := range random.Perm(len(recording.pair.takeovers)) {
		if try(recording.pair.takeovers[at]) {
			return true
		}
	}
	return false
}

func staleOwner(recording *recording, events []event, random *rand.Rand) ([]event, bool) {
	return events, across(recording, random, func(one takeover) bool {
		// The old owner's last answers.
		var seen [logs]output
		for _, event := range events {
			if toldTail(event) && event.to < one.began {
				old := &seen[event.asked.log]
				old.tail, old.epoch, old.kept = max(old.tail, event.told.tail), max(old.epoch, event.told.epoch), max(old.kept, event.told.kept)
			}
		}
		at, is := search(events, random, func(at int) bool {
			question := events[at]
			if !toldTail(question) || question.from < one.taken {
				return false
			}
			for _, event := range events {
				if acked(event) && event.from > one.taken && event.to < question.from {
					for _, part := range event.asked.parts {
						if len(part.ids) > 0 && part.log == question.asked.log {
							return true
						}
					}
				}
			}
			return false
		})
		if is {
			old := seen[events[at].asked.log]
			events[at].told = shorten(events[at].told, old.tail)
			events[at].told.kept, events[at].evidence = old.kept, true
			if events[at].asked.kind == tails {
				events[at].told.epoch = old.epoch
			}
		}
		return is
	})
}

func bothAck(recording *recording, events []event, random *rand.Rand) ([]event, bool) {
	var other event
	is := across(recording, random, func(one takeover) bool {
		at, is := search(events, random, func(at int) bool {
			event := events[at]
			return acked(event) && event.from > one.taken && len(event.asked.parts) == 1
		})
		if is {
			other = events[at]
			// The old owner got its append before the takeover.
			other.client, other.from = len(events), one.began
			changed := other.asked.parts[0]
			changed.ids = []uint32{recording.ids.Load() + 1}
			other.asked.parts = []part{changed}
		}
		return is
	})
	if is {
		events = append(events, other)
	}
	return events, is
}

// afterFence finds a later answer about the log of a fence that was acked before a takeover.
func afterFence(recording *recording, events []event, random *rand.Rand, suits func(fence event, at int) bool) bool {
	return across(recording, random, func(one takeover) bool {
		_, is := search(events, random, func(at int) bool {
			if events[at].from < one.taken {
				return false
			}
			for _, fence := range events {
				if fence.asked.kind == fences && !fence.undecided && fence.told.refusal == nil && fence.to < one.began && suits(fence, at) {
					return true
				}
			}
			return false
		})
		return is
	})
}

func fenceUndone(recording *recording, events []event, random *rand.Rand) ([]event, bool) {
	return events, afterFence(recording, events, random, func(fence event, at int) bool {
		late := &events[at]
		if !acked(*late) {
			return false
		}
		for i, one := range late.asked.parts {
			if one.log == fence.asked.log && one.epoch != nil {
				older := fence.told.epoch - 1
				late.asked.parts = append([]part{}, late.asked.parts...)
				late.asked.parts[i].epoch = &older
				return true
			}
		}
		return false
	})
}

func epochUndone(recording *recording, events []event, random *rand.Rand) ([]event, bool) {
	return events, afterFence(recording, events, random, func(fence event, at int) bool {
		late := &events[at]
		is := late.asked.kind == tails && late.asked.log == fence.asked.log
		if is {
			late.told.epoch, late.evidence = fence.told.epoch-1, true
		}
		return is
	})
}

func trimUndone(recording *recording, events []event, random *rand.Rand) ([]event, bool) {
	return events, across(recording, random, func(one takeover) bool {
		_, is := search(events, random, func(at int) bool {
			late := &events[at]
			if !toldTail(*late) || late.from < one.taken {
				return false
			}
			for _, trim := range events {
				if trim.asked.kind == trims && !trim.undecided && trim.told.kept > 0 && trim.asked.log == late.asked.log && trim.to < one.began {
					late.told.kept, late.evidence = trim.told.kept-1, true
					return true
				}
			}
			return false
		})
		return is
	})
}
