package main

import (
	"fmt"
	"slices"
)

// Answers about durable records may lag behind the acks of appends, so they have no place
// in one order of all calls. Their rules: a durable tail never goes back. It covers every record that was
// acked as durable before the question, and none requested after the answer. It is never
// within a batch.

// sighting is one answer about the durable tail of a log.
type sighting struct {
	from, to int64
	value    uint64
	// The caller requested durability: the value bounds other answers and is not judged.
	ack bool
}

// lagBreaks finds an answer that breaks the rules; empty if there is none.
func lagBreaks(recording *recording, events []event) string {
	for log := range logs {
		var durable, epochs []sighting
		// Earliest time of a call that appended each record or fenced to each epoch.
		asked := make([]int64, len(recording.stored[log])+1)
		within := make([]bool, len(asked))
		unset, explicit := int64(-1), map[uint64]int64{}
		for _, event := range events {
			told := event.told
			switch event.asked.kind {
			case appends:
				for i, part := range event.asked.parts {
					if part.log != log || len(part.ids) == 0 || told.refusal != nil {
						continue
					}
					next := told.firsts[i] + uint64(len(part.ids))
					for lsn := told.firsts[i] + 1; lsn <= next; lsn++ {
						asked[lsn], within[lsn] = event.from, lsn < next
					}
					if event.durable && !event.undecided {
						durable = append(durable, sighting{event.from, event.to, next, true})
					}
				}
			case fences:
				if event.asked.log != log || told.refusal != nil {
					continue
				}
				if event.asked.epoch != nil {
					if at, is := explicit[*event.asked.epoch]; !is || event.from < at {
						explicit[*event.asked.epoch] = event.from
					}
				} else if unset < 0 || event.from < unset {
					unset = event.from
				}
				if !event.undecided {
					epochs = append(epochs, sighting{event.from, event.to, told.epoch, true})
				}
			case tails, reads:
				if event.asked.log != log {
					continue
				}
				if event.asked.lagging {
					durable = append(durable, sighting{event.from, event.to, told.tail, false})
					if event.asked.kind == tails {
						epochs = append(epochs, sighting{event.from, event.to, told.epoch, false})
					}
					first := told.first
					for i, id := range told.ids {
						if stored := recording.stored[log]; first+uint64(i) >= uint64(len(stored)) || stored[first+uint64(i)] != id {
							return fmt.Sprintf("another record was read at %d than was there in the end", first+uint64(i))
						}
					}
				}
			}
		}
		for _, seen := range durable {
			if seen.value >= uint64(len(asked)) || asked[seen.value] > seen.to || (!seen.ack && within[seen.value]) {
				return fmt.Sprintf("log%d was told to be durable up to %d, before that was asked for or within a batch", log, seen.value)
			}
		}
		for _, seen := range epochs {
			at, is := explicit[seen.value]
			if seen.value > 0 && !(is && at <= seen.to) && !(unset >= 0 && unset <= seen.to) {
				return fmt.Sprintf("log%d was told to have the epoch %d before that was asked for", log, seen.value)
			}
		}
		for _, all := range [][]sighting{durable, epochs} {
			if text := goesBack(all); text != "" {
				return fmt.Sprintf("log%d: %s", log, text)
			}
		}
	}
	return ""
}

// goesBack finds an answer below one that ended before its question.
func goesBack(all []sighting) string {
	byEnd := slices.Clone(all)
	slices.SortFunc(byEnd, func(a, b sighting) int { return int(a.to - b.to) })
	slices.SortFunc(all, func(a, b sighting) int { return int(a.from - b.from) })
	most, next := sighting{}, 0
	for _, seen := range all {
		for ; next < len(byEnd) && byEnd[next].to < seen.from; next++ {
			if byEnd[next].value > most.value {
				most = byEnd[next]
			}
		}
		if !seen.ack && seen.value < most.value {
			return fmt.Sprintf("%d was told at %d, after %d at %d", seen.value, seen.to, most.value, most.to)
		}
	}
	return ""
}
