package main

import (
	"math/rand/v2"
)

// lie changes one answer in a history to one that a broken daemon could give.
type lie struct {
	name  string
	plant func(recording *recording, events []event, random *rand.Rand) ([]event, bool)
}

var lies = []lie{
	{"a tail that is older than an ack before the question", staleTail},
	{"an append of an older epoch, acked after a fence was answered", appendPastFence},
	{"half a batch in a read", halfBatch},
	{"half a batch over logs in two reads", halfOfLogs},
	{"a durable tail that is older than one told before the question", durableGoesBack},
}

// search tries the events in a random order.
func search(events []event, random *rand.Rand, suits func(at int) bool) (int, bool) {
	for _, at := range random.Perm(len(events)) {
		if suits(at) {
			return at, true
		}
	}
	return 0, false
}

func acked(event event) bool {
	return event.asked.kind == appends && event.told.refusal == nil && !event.undecided
}

// toldTail returns whether a caller got the log's tail, not one that may lag behind.
func toldTail(event event) bool {
	return (event.asked.kind == tails || event.asked.kind == reads) && event.told.refusal == nil && !event.asked.lagging
}

// shorten changes an answer to one from the time when the log had this tail.
func shorten(told output, tail uint64) output {
	keep := uint64(0)
	if tail > told.first {
		keep = min(tail-told.first, uint64(len(told.ids)))
	}
	told.ids = told.ids[:keep]
	told.first = min(told.first, tail)
	told.tail = tail
	return told
}

func staleTail(_ *recording, events []event, random *rand.Rand) ([]event, bool) {
	var before uint64
	at, is := search(events, random, func(at int) bool {
		question := events[at]
		if !toldTail(question) {
			return false
		}
		// An append that was acked before the question; the stale answer is the tail before it.
		for _, event := range events {
			if acked(event) && event.to < question.from {
				for i, part := range event.asked.parts {
					if len(part.ids) > 0 && part.log == question.asked.log {
						before = event.told.firsts[i]
						return true
					}
				}
			}
		}
		return false
	})
	if is {
		events[at].told, events[at].evidence = shorten(events[at].told, before), true
	}
	return events, is
}

func appendPastFence(_ *recording, events []event, random *rand.Rand) ([]event, bool) {
	which, epoch := 0, uint64(0)
	at, is := search(events, random, func(at int) bool {
		late := events[at]
		if !acked(late) {
			return false
		}
		for i, part := range late.asked.parts {
			if len(part.ids) == 0 || part.epoch == nil {
				continue
			}
			for _, event := range events {
				if event.asked.kind == fences && !event.undecided && event.told.refusal == nil &&
					event.asked.log == part.log && event.to < late.from {
					which, epoch = i, event.told.epoch-1
					return true
				}
			}
		}
		return false
	})
	if is {
		parts := append([]part{}, events[at].asked.parts...)
		parts[which].epoch = &epoch
		events[at].asked.parts = parts
	}
	return events, is
}

func halfBatch(_ *recording, events []event, random *rand.Rand) ([]event, bool) {
	var half uint64
	at, is := search(events, random, func(at int) bool {
		question := events[at]
		if !toldTail(question) {
			return false
		}
		for _, event := range events {
			if !acked(event) {
				continue
			}
			for i, part := range event.asked.parts {
				if len(part.ids) > 1 && part.log == question.asked.log && question.told.tail == event.told.firsts[i]+uint64(len(part.ids)) {
					half = question.told.tail - 1
					return true
				}
			}
		}
		return false
	})
	if is {
		events[at].told, events[at].evidence = shorten(events[at].told, half), true
	}
	return events, is
}

func halfOfLogs(_ *recording, events []event, random *rand.Rand) ([]event, bool) {
	first, second, before := 0, 0, uint64(0)
	_, is := search(events, random, func(at int) bool {
		batch := events[at]
		if !acked(batch) || len(batch.asked.parts) < 2 || len(batch.asked.parts[1].ids) == 0 {
			return false
		}
		for seen, one := range events {
			// A caller that has seen the first part, if possible while the batch was in flight.
			if !toldTail(one) || one.asked.log != batch.asked.parts[0].log || one.told.tail <= batch.told.firsts[0] {
				continue
			}
			for at, other := range events {
				if toldTail(other) && other.asked.log == batch.asked.parts[1].log && other.from > one.to {
					first, second, before = seen, at, batch.told.firsts[1]
					return true
				}
			}
		}
		return false
	})
	if is {
		events[first].evidence = true
		events[second].told, events[second].evidence = shorten(events[second].told, before), true
	}
	return events, is
}

func durableGoesBack(_ *recording, events []event, random *rand.Rand) ([]event, bool) {
	var before uint64
	at, is := search(events, random, func(at int) bool {
		late := events[at]
		if !late.asked.lagging {
			return false
		}
		for _, event := range events {
			if event.asked.lagging && event.asked.log == late.asked.log && event.to < late.from && event.told.tail > 0 {
				before = event.told.tail - 1
				return true
			}
		}
		return false
	})
	if is {
		events[at].told, events[at].evidence = shorten(events[at].told, before), true
	}
	return events, is
}
