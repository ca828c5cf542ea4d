package main

import (
	"fmt"
	"strings"

	"github.com/anishathalye/porcupine"
)

// Logs of one history. Batches connect them, so they are one state. The first is never fenced.
const logs = 3

type kind int

const (
	appends kind = iota // records to one or more logs
	fences
	tails
	reads
	trims
)

func (k kind) String() string {
	return [...]string{appends: "append", fences: "fence", tails: "tail", reads: "read", trims: "trim"}[k]
}

// part is the request of a call for one log: records, or without records a check.
type part struct {
	log      int
	ids      []uint32
	expected *uint64
	epoch    *uint64
}

// input is one request.
type input struct {
	kind  kind
	parts []part
	// For all but appends. Fences without an epoch raise the current one by 1.
	log   int
	epoch *uint64
	// For trims.
	before uint64
	// For tails and reads: the durable part, in a log whose appends are acked earlier. The answer
	// may lag behind and is judged separately (lag.go).
	lagging bool
}

// output is one answer.
type output struct {
	// Its outcome is unknown. Only fences and trims stay unknown; other calls are looked up (resolve).
	unknown bool
	// lsn of the first record of each part.
	firsts []uint64
	// The refusal, nil if the call succeeded.
	refusal *refusal
	tail    uint64
	epoch   uint64
	// For tails, reads and trims: the first lsn kept.
	kept uint64
	// For reads: the records from this lsn on.
	first uint64
	ids   []uint32
}

// refusal is a condition that did not hold, with the actual value.
type refusal struct {
	reason string
	log    int
	actual uint64
	// Logs of all conditions on an lsn that failed.
	mismatched []int
}

// node is the end of a log: its last record and all before it. Shared, never changed.
type node struct {
	id     uint32
	before *node
	// Digest of all records up to this one.
	digest uint64
}

func (n *node) sum() uint64 {
	if n == nil {
		return 14695981039346656037
	}
	return n.digest
}

func (n *node) and(ids []uint32) *node {
	for _, id := range ids {
		n = &node{id: id, before: n, digest: (n.sum() ^ uint64(id)) * 1099511628211}
	}
	return n
}

type logState struct {
	kept, tail, epoch uint64
	last              *node
}

type state [logs]logState

// model gives the answers of one caller at a time.
var model = porcupine.Model{
	Init: func() any { return state{} },
	Step: func(before, asked, told any) (bool, any) {
		after := before.(state)
		holds := step(&after, asked.(input), told.(output))
		return holds, after
	},
	Equal: func(a, b any) bool {
		one, other := a.(state), b.(state)
		for i := range one {
			x, y := one[i], other[i]
			if x.kept != y.kept || x.tail != y.tail || x.epoch != y.epoch || x.last.sum() != y.last.sum() {
				return false
			}
		}
		return true
	},
	Hash: func(a any) uint64 {
		sum := uint64(0)
		for _, log := range a.(state) {
			sum = (sum ^ log.last.sum() ^ log.tail<<32 ^ log.epoch<<16 ^ log.kept) * 1099511628211
		}
		return sum
	},
	DescribeOperation: func(asked, told any) string { return describe(asked.(input), told.(output)) },
}

func step(now *state, asked input, told output) bool {
	log := &now[asked.log]
	switch asked.kind {
	case appends:
		if told.refusal != nil {
			return refused(now, asked, told.refusal)
		}
		for _, part := range asked.parts {
			if mismatched(now, part) || fencedOut(now, part) {
				return false
			}
		}
		for i, part := range asked.parts {
			log := &now[part.log]
			if len(part.ids) > 0 && log.tail != told.firsts[i] {
				return false
			}
			log.tail += uint64(len(part.ids))
			log.last = log.last.and(part.ids)
		}
		return true
	case fences:
		next := log.epoch + 1
		if asked.epoch != nil {
			next = *asked.epoch
		}
		if told.unknown {
			log.epoch = max(log.epoch, next)
			return true
		}
		if told.refusal != nil {
			return next <= log.epoch && told.refusal.actual == log.epoch
		}
		holds := next > log.epoch && told.epoch == next && told.tail == log.tail
		log.epoch = next
		return holds
	case tails:
		return told.tail == log.tail && told.epoch == log.epoch && told.kept == log.kept
	case reads:
		return told.tail == log.tail && told.kept == log.kept && readable(log, told)
	case trims:
		holds := asked.before <= log.tail
		if holds {
			log.kept = max(log.kept, asked.before)
		}
		return told.unknown || holds && told.kept == log.kept
	}
	panic("unknown kind")
}

// mismatched says whether a condition on the lsn does not hold.
func mismatched(now *state, part part) bool {
	return part.expected != nil && *part.expected != now[part.log].tail
}

// fencedOut says whether a writer's epoch differs from the log's.
func fencedOut(now *state, part part) bool {
	epoch := now[part.log].epoch
	if len(part.ids) == 0 {
		return false
	}
	return (part.epoch == nil && epoch > 0) || (part.epoch != nil && *part.epoch != epoch)
}

// refused says whether the refusal names a failing condition. A POSITION_MISMATCH must list all mismatches.
func refused(now *state, asked input, told *refusal) bool {
	named := false
	var failing []int
	for _, part := range asked.parts {
		if mismatched(now, part) {
			failing = append(failing, part.log)
		}
		if part.log != told.log {
			continue
		}
		switch told.reason {
		case "POSITION_MISMATCH":
			named = mismatched(now, part) && told.actual == now[part.log].tail
		case "FENCED":
			named = fencedOut(now, part) && told.actual == now[part.log].epoch
		}
	}
	if told.reason == "POSITION_MISMATCH" && fmt.Sprint(failing) != fmt.Sprint(told.mismatched) {
		return false
	}
	return named
}

// readable says whether the records of a page are the log's, if the page's tail is the log's.
func readable(log *logState, told output) bool {
	if len(told.ids) > 0 && told.first < log.kept {
		return false
	}
	last := log.last
	for at := told.tail; at > told.first+uint64(len(told.ids)); at-- {
		last = last.before
	}
	for i := len(told.ids) - 1; i >= 0; i-- {
		if last == nil || last.id != told.ids[i] {
			return false
		}
		last = last.before
	}
	return true
}

func describe(asked input, told output) string {
	var text strings.Builder
	number := func(name string, value *uint64) {
		if value != nil {
			fmt.Fprintf(&text, " %s=%d", name, *value)
		}
	}
	switch asked.kind {
	case appends:
		text.WriteString("append")
		for _, part := range asked.parts {
			fmt.Fprintf(&text, " log%d%v", part.log, part.ids)
			number("expected", part.expected)
			number("epoch", part.epoch)
		}
	case fences:
		fmt.Fprintf(&text, "fence log%d", asked.log)
		number("epoch", asked.epoch)
	case tails:
		fmt.Fprintf(&text, "tail log%d lagging=%v", asked.log, asked.lagging)
	case reads:
		fmt.Fprintf(&text, "read log%d lagging=%v", asked.log, asked.lagging)
	case trims:
		fmt.Fprintf(&text, "trim log%d before=%d", asked.log, asked.before)
	}
	if told.refusal != nil {
		fmt.Fprintf(&text, " -> %+v", *told.refusal)
	} else {
		told.refusal = nil
		fmt.Fprintf(&text, " -> firsts=%v kept=%d tail=%d epoch=%d first=%d ids=%v unknown=%v", told.firsts, told.kept, told.tail, told.epoch, told.first, told.ids, told.unknown)
	}
	return text.String()
}
