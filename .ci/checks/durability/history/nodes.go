package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/anishathalye/porcupine"

	client "wald.dev/client/go"
	wald "wald.dev/client/go/waldv1"
)

// Two nodes share a store. One owns it; the other one forwards calls and takes over. Appends ask for REPLICATED, and
// reads see REPLICATED. Their answers must have one order, no matter which node gave them.
//
// Some appends ask for DURABLE. A takeover may lose their records after the ack. They count as calls of unknown
// outcome, and their refusals are dropped. Still, no call of the level REPLICATED may show a record that is
// lost later. No history has reads below REPLICATED.
//
// In every second history the sync mode of the logs gives the level; in the others each call asks for it.

// Faults of the owner. A fault begins when both nodes work.
var faults = []string{
	"kill",      // killed; starts again when the other node owns the store
	"restart",   // killed, and starts again at once in its directory
	"sleep",     // stopped until the other node has answered
	"nap",       // stopped for about the lease, perhaps while the other node takes over
	"cut",       // without the bucket, but not without callers, until the other node has answered
	"hand_over", // ended by walctl; starts again when the other node owns the store
	"end",       // ended by SIGTERM; starts again when the other node owns the store
}

// The owner is killed, and the store loses its newest rows. A history of it must be rejected.
const forget = "forget"

// Calls of a phase: before its fault (from half to one and a half times the number), while the old owner sleeps or is
// cut off, and after the fault.
const callsBefore, callsMeanwhile, callsAfter = 100, 120, 60

// takeover has the times of a fault: it began, the next owner served, and the old owner went on after a sleep or a cut (else 0).
type takeover struct {
	kind                 string
	began, taken, wentOn int64
}

// during says whether a call began when the next owner was there, and ended when the old one had gone on.
func (t takeover) during(event event) bool {
	return t.wentOn > 0 && event.from > t.taken && event.from < t.wentOn && event.to > t.wentOn
}

// pair is the part of a recording of two nodes.
type pair struct {
	endpoints []string
	// The sync mode of the logs gives the levels, not the calls.
	byMode    bool
	main      library
	takeovers []takeover
	mutex     sync.Mutex
	// Calls that were not applied for a temporary reason, by name.
	passed     map[string]int
	turnedAway []event
	// Records that a trim may remove, from lsn 0 on.
	gathering [logs]sync.Mutex
	gathered  [logs][]uint32
	// At the end.
	epochs, kept [logs]uint64
	// Number of acks of DURABLE whose records are not there.
	lost int
}

// library is a client that knows both nodes. It goes to the owner and repeats calls.
type library struct{ *client.Client }

func checkNodes(size plan, seed uint64) error {
	// Shuffled decks deal the faults, so that all kinds occur. The first one of a history has a takeover, because lies need one.
	random := rand.New(rand.NewPCG(seed, ^uint64(0)))
	var deck []string
	deal := func() []string {
		for len(deck) < size.faults {
			more := slices.Clone(faults)
			random.Shuffle(len(more), func(i, j int) { more[i], more[j] = more[j], more[i] })
			deck = append(deck, more...)
		}
		dealt := slices.Clone(deck[:size.faults])
		deck = deck[size.faults:]
		moves := func(kind string) bool { return kind != "restart" && kind != "nap" }
		if first := slices.IndexFunc(dealt, moves); first > 0 {
			dealt[0], dealt[first] = dealt[first], dealt[0]
		}
		return dealt
	}
	counts, late, refused := map[string]int{}, 0, 0
	recordOne := func(plan plan, number int, random *rand.Rand) (*recording, error) {
		kinds := deal()
		fmt.Printf("     history %d: %s\n", number, strings.Join(kinds, ", "))
		r, err := recordNodes(plan, number, kinds, random)
		if err != nil {
			return nil, err
		}
		counts["acks of DURABLE that a takeover has lost"] += r.pair.lost
		entries := [3]int{}
		for _, event := range r.events {
			entries[event.client%3]++
		}
		for name, count := range map[string]int{"at the first node": entries[0], "at the second node": entries[1], "with both nodes": entries[2]} {
			counts[name] += count
		}
		for _, one := range r.pair.takeovers {
			counts["fault: "+one.kind]++
			for _, event := range r.events {
				// The old owner may have got it late.
				if one.during(event) {
					late++
				}
			}
			for _, event := range r.pair.turnedAway {
				if one.during(event) {
					refused++
				}
			}
		}
		return r, nil
	}
	err := judgeHistories(size, seed, nodeLies, recordOne, []string{"append acked", "append that asked for less", "append POSITION_MISMATCH",
		"append FENCED", "fence acked", "fence FENCED", "tail acked", "read acked", "trim acked"})
	for _, name := range slices.Sorted(keys(counts)) {
		fmt.Printf("  %6d %s\n", counts[name], name)
	}
	fmt.Printf("  %6d calls began after a takeover while the old owner slept or had no bucket, and ended when it went on; %d others were not applied\n", late, refused)
	for _, name := range []string{"at the first node", "at the second node", "with both nodes"} {
		check(counts[name] > 0, "there were callers %s", name)
	}
	return err
}

// checkForgetful has a store lose acknowledged records, which the judge must see.
func checkForgetful(size plan, seed uint64) error {
	r, err := recordNodes(size, 0, []string{forget}, rand.New(rand.NewPCG(seed, 0)))
	if err != nil {
		return err
	}
	check(len(r.trouble) > 0, "of %d calls, some have answers that the logs contradict in the end%s", len(r.events), some(r.trouble))
	verdict, _ := judge(r, r.events, size.limit)
	check(verdict == porcupine.Illegal, "the history of a store that lost its newest rows is rejected: %s", verdict)
	return nil
}

func dial(endpoints []string) (library, error) {
	made, err := client.Dial(strings.Join(endpoints, ","), client.WithConnectTimeout(time.Second),
		client.WithRetry(client.RetryPolicy{MaxAttempts: 1000, FirstPause: 20 * time.Millisecond, MaxPause: 200 * time.Millisecond}))
	return library{made}, err
}

// recordNodes records one history with a phase for each fault, and resolves unknown outcomes.
func recordNodes(plan plan, number int, kinds []string, random *rand.Rand) (*recording, error) {
	r := &recording{began: time.Now(), pair: &pair{byMode: number%2 == 1, passed: map[string]int{}}}
	p := r.pair
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if p.endpoints = strings.Split(os.Getenv("WALD_ENDPOINT"), ","); len(p.endpoints) != 2 {
		return nil, fmt.Errorf("WALD_ENDPOINT has the addresses of two nodes, not %q", os.Getenv("WALD_ENDPOINT"))
	}
	var err error
	if p.main, err = dial(p.endpoints); err != nil {
		return nil, err
	}
	defer p.main.Close()
	config := &wald.LogConfig{}
	if p.byMode {
		config.SyncMode = wald.SyncMode_SYNC_MODE_REPLICATED
	}
	run := random.Uint64()
	for i := range r.names {
		r.names[i] = fmt.Sprintf("history/%x/%d/%d", run, number, i)
		if _, err := p.main.CreateLog(ctx, r.names[i], config); err != nil {
			return nil, err
		}
	}
	for _, kind := range kinds {
		var over atomic.Bool
		callers, calling := newGroup(ctx)
		for client := range plan.clients {
			own := rand.New(rand.NewPCG(random.Uint64(), uint64(client)))
			way, err := p.way(client)
			if err != nil {
				return nil, err
			}
			callers.run(func() error { return r.caller(calling, way, func() bool { return !over.Load() }, client, own) })
		}
		own := rand.New(rand.NewPCG(random.Uint64(), 0))
		callers.run(func() error {
			defer over.Store(true)
			return r.strike(calling, kind, own)
		})
		if err := callers.wait(); err != nil {
			return nil, fmt.Errorf("%s: %w", kind, err)
		}
		r.pauses = append(r.pauses, r.now())
	}
	return r, r.resolve(ctx, p.main)
}

// way is that of a caller: to one node for good, or by a client that knows both.
func (p *pair) way(caller int) (way, error) {
	if place := caller % 3; place < 2 {
		connection, err := connectTo(p.endpoints[place])
		return stubs{connection}, err
	}
	first := caller / 3 % 2
	return dial([]string{p.endpoints[first], p.endpoints[1-first]})
}

// patience is the time that a caller waits for an answer. Some give up while a node sleeps, so that the node has newer calls
// when it goes on.
func patience(random *rand.Rand) time.Duration {
	return time.Duration(300+random.IntN(2700)) * time.Millisecond
}

// strike makes one fault among the calls, and waits until both nodes work again.
func (r *recording) strike(ctx context.Context, kind string, random *rand.Rand) error {
	if err := r.more(ctx, int64(callsBefore/2+random.IntN(callsBefore))); err != nil {
		return err
	}
	one := takeover{kind: kind, began: r.now()}
	if err := control(ctx, kind, nil); err != nil {
		return err
	}
	one.taken = r.now()
	if kind == "sleep" || kind == "cut" {
		if err := r.more(ctx, callsMeanwhile); err != nil {
			return err
		}
		one.wentOn = r.now()
		if err := control(ctx, "go_on", nil); err != nil {
			return err
		}
	}
	r.pair.takeovers = append(r.pair.takeovers, one)
	if kind == forget {
		return r.more(ctx, callsAfter)
	}
	if err := control(ctx, "whole", nil); err != nil {
		return err
	}
	return r.more(ctx, callsAfter)
}

// more waits until this number of further calls has been answered.
func (r *recording) more(ctx context.Context, calls int64) error {
	for at := r.calls.Load() + calls; r.calls.Load() < at; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
	return nil
}

// prepare completes a request for two nodes. False: choose another.
func (p *pair) prepare(ctx context.Context, r *recording, way way, event *event, random *rand.Rand) bool {
	asked := &event.asked
	switch dice := random.IntN(100); {
	case dice < 3:
		log := random.IntN(logs)
		*asked = input{kind: trims, log: log, before: r.heardTail[log].Load() - min(r.heardTail[log].Load(), random.Uint64N(12))}
		// A record that was trimmed unread could not be looked up.
		return p.gather(ctx, r, way, log, asked.before)
	case asked.kind == appends:
		event.weak = random.IntN(8) == 0
	case asked.kind == fences && asked.epoch == nil:
		// After a lost answer this client sends the fence again. Both may count, except with a given epoch.
		if _, repeats := way.(library); repeats {
			next := r.heardEpoch[asked.log].Load() + 1
			asked.epoch = &next
		}
	}
	return true
}

// rest is the pause of a caller before its next call. The nodes take less processor time, and a node that cannot answer
// gets fewer calls.
func (p *pair) rest(ctx context.Context, random *rand.Rand) {
	select {
	case <-ctx.Done():
	case <-time.After(time.Duration(random.IntN(100)) * time.Millisecond):
	}
}

// failed counts a call that got no answer to judge.
func (p *pair) failed(event event, failure failure) {
	if !failure.passing && !failure.unknown {
		return
	}
	name := failure.reason
	if name == "" {
		name = "without an answer"
	}
	if failure.passing {
		name += ", not applied"
	}
	p.mutex.Lock()
	p.passed[event.asked.kind.String()+" "+name]++
	p.turnedAway = append(p.turnedAway, event)
	p.mutex.Unlock()
}

func (p *pair) turned() map[string]int {
	if p == nil {
		return nil
	}
	return p.passed
}

// gather reads a log up to an lsn on the way of a caller. False: it has not been possible.
func (p *pair) gather(ctx context.Context, r *recording, way way, log int, before uint64) bool {
	if !p.gathering[log].TryLock() {
		return false
	}
	defer p.gathering[log].Unlock()
	for uint64(len(p.gathered[log])) < before {
		ids, _, err := way.page(ctx, r, log, uint64(len(p.gathered[log])))
		if err != nil || len(ids) == 0 {
			return false
		}
		p.gathered[log] = append(p.gathered[log], ids...)
	}
	return true
}

// gatherAll reads all logs until two readings are equal. A node may still hand on a call whose caller has given up.
func (p *pair) gatherAll(ctx context.Context, r *recording) error {
	for before := ""; ; {
		for log, name := range r.names {
			state, err := p.main.Tail(ctx, name, client.TailVisible(client.VisibleReplicated))
			if err != nil {
				return err
			}
			p.epochs[log], p.kept[log] = state.WriterEpoch, uint64(state.FirstLSN)
			ids, err := r.contents(ctx, p.main, log, p.kept[log])
			if err != nil {
				return err
			}
			if most := uint64(len(p.gathered[log])); p.kept[log] > most {
				return fmt.Errorf("log%d is trimmed up to %d, but no trim went beyond %d", log, p.kept[log], most)
			}
			all := append(slices.Clone(p.gathered[log][:p.kept[log]]), ids...)
			if seen := p.gathered[log]; len(all) < len(seen) || !slices.Equal(all[:len(seen)], seen) {
				r.trouble = append(r.trouble, fmt.Sprintf("log%d has other records than a caller has seen", log))
			}
			r.stored[log] = all
		}
		now := fmt.Sprint(r.stored, p.epochs, p.kept)
		if now == before {
			return nil
		}
		before = now
	}
}

// neverApplied says whether the end shows that a fence or a trim of unknown outcome was not applied.
func (p *pair) neverApplied(asked input) bool {
	if asked.kind == trims {
		return asked.before > p.kept[asked.log]
	}
	return asked.epoch != nil && *asked.epoch > p.epochs[asked.log]
}

func (l library) call(ctx context.Context, r *recording, event *event) (output, error) {
	asked := event.asked
	name, visible := r.names[asked.log], r.visibility(event)
	switch asked.kind {
	case appends:
		return l.append(ctx, r, event)
	case fences:
		answer, err := l.Fence(ctx, name, client.ToEpoch(*asked.epoch))
		return output{tail: uint64(answer.TailLSN), epoch: answer.WriterEpoch}, err
	case tails:
		answer, err := l.Tail(ctx, name, client.TailVisible(visible))
		return output{kept: uint64(answer.FirstLSN), tail: uint64(answer.TailLSN), epoch: answer.WriterEpoch}, err
	case trims:
		kept, err := l.Trim(ctx, name, client.LSN(asked.before))
		return output{kept: uint64(kept)}, err
	case reads:
		answer, err := l.Read(ctx, name, client.Last(5), client.Visible(visible))
		if err != nil {
			return output{}, err
		}
		ids, err := parsed(answer.Records)
		return output{kept: uint64(answer.FirstLSN), tail: uint64(answer.TailLSN), first: uint64(answer.NextLSN) - uint64(len(ids)), ids: ids}, err
	}
	return output{}, errors.New("not a call")
}

func (l library) append(ctx context.Context, r *recording, event *event) (output, error) {
	parts, level := event.asked.parts, r.durability(event)
	condition := func(part part) client.Condition {
		return client.Condition{ExpectedLSN: (*client.LSN)(part.expected), WriterEpoch: part.epoch}
	}
	data := func(ids []uint32) []client.Record {
		var made []client.Record
		for _, id := range ids {
			made = append(made, client.Bytes(strconv.AppendUint(nil, uint64(id), 10)))
		}
		return made
	}
	if len(parts) == 1 && len(parts[0].ids) == 1 {
		answer, err := l.Append(ctx, r.names[parts[0].log], data(parts[0].ids)[0], client.If(condition(parts[0])), client.WithDurability(level))
		return output{firsts: []uint64{uint64(answer.LSN)}}, err
	}
	batch := client.Batch{Durability: level}
	for _, part := range parts {
		if len(part.ids) == 0 {
			batch.Checks = append(batch.Checks, client.Check{Log: r.names[part.log], ExpectedLSN: (*client.LSN)(part.expected)})
		} else {
			batch.Logs = append(batch.Logs, client.LogBatch{Log: r.names[part.log], Records: data(part.ids), Condition: condition(part)})
		}
	}
	answer, err := l.AppendBatch(ctx, batch)
	if err != nil {
		return output{}, err
	}
	told := output{firsts: make([]uint64, len(parts))}
	for i, one := range answer.Appends {
		told.firsts[i] = uint64(one.FirstLSN)
	}
	return told, nil
}

func (l library) page(ctx context.Context, r *recording, log int, from uint64) ([]uint32, uint64, error) {
	page, err := l.Read(ctx, r.names[log], client.FromLSN(client.LSN(from)), client.MaxRecords(10_000), client.Visible(client.VisibleReplicated))
	if err != nil {
		return nil, 0, err
	}
	ids, err := parsed(page.Records)
	return ids, uint64(page.NextLSN), err
}

func parsed(records []client.Record) ([]uint32, error) {
	ids := make([]uint32, len(records))
	for i, record := range records {
		id, err := strconv.ParseUint(string(record.Data), 10, 32)
		if err != nil {
			return nil, err
		}
		ids[i] = uint32(id)
	}
	return ids, nil
}
