package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/anishathalye/porcupine"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	client "wald.dev/client/go"
	wald "wald.dev/client/go/waldv1"
)

// Number of times that all callers stop, so that a history can be cut there.
const phases = 10

// plan gives the size of the recording.
type plan struct {
	histories, calls, clients, kills, faults int
	limit                                    time.Duration
}

// event is one call: request, answer, and start and end in nanoseconds of the recording.
type event struct {
	client    int
	asked     input
	told      output
	from, to  int64
	durable   bool
	undecided bool
	// An append to a store of two nodes that asked for DURABLE only: a takeover may lose it after its ack.
	weak bool
	// A planted lie rests on it.
	evidence bool
}

// recording drives callers against one set of logs, and keeps their calls.
type recording struct {
	names [logs]string
	// Appends are acked, and seen by plain reads, before they are durable. Otherwise everything is durable.
	early bool
	began time.Time
	// Times without calls: between the phases, and at the end.
	pauses []int64

	mutex  sync.Mutex
	events []event
	calls  atomic.Int64
	// Values of the latest answers: conditions made of them often hold.
	heardTail, heardEpoch [logs]atomic.Uint64
	ids                   atomic.Uint32

	// Contents of the logs at the end.
	stored [logs][]uint32
	// Answers that the contents contradict.
	trouble []string

	// Nil: one daemon.
	pair *pair
}

// way is the way of a caller to the daemon, or to the nodes of a store.
type way interface {
	// call sends a request.
	call(ctx context.Context, r *recording, event *event) (output, error)
	// page reads records of a log, and returns the lsn after them.
	page(ctx context.Context, r *recording, log int, from uint64) (ids []uint32, next uint64, err error)
	Close() error
}

// stubs is one connection. No client code repeats or hides a call.
type stubs struct{ *grpc.ClientConn }

func (r *recording) now() int64 { return time.Since(r.began).Nanoseconds() }

// failure is the content of a call's error.
type failure struct {
	refusal *refusal
	unknown bool
	// Not applied, for a temporary reason.
	passing bool
	reason  string
}

// failure takes an error apart. It returns an error for one that no call here should get. `changes`: the call may
// have changed a log.
func (r *recording) failure(err error, changes bool) (failure, error) {
	var reason, outcome string
	facts := map[string]string{}
	var mismatched []int
	var own *client.Error
	if errors.As(err, &own) {
		reason, outcome, facts = string(own.Reason), string(own.Outcome), own.Facts
		for _, one := range own.Failed {
			if one.Reason == client.ErrPositionMismatch {
				mismatched = append(mismatched, slices.Index(r.names[:], one.Log))
			}
		}
	} else {
		said, is := status.FromError(err)
		// A daemon with clients of its own alone answers within any deadline.
		if !is || (r.pair == nil && said.Code() == codes.DeadlineExceeded) {
			return failure{}, err
		}
		for _, detail := range said.Details() {
			switch detail := detail.(type) {
			case *errdetails.ErrorInfo:
				reason, facts = detail.GetReason(), detail.GetMetadata()
			case *errdetails.PreconditionFailure:
				for _, one := range detail.GetViolations() {
					if one.GetType() == "POSITION_MISMATCH" {
						mismatched = append(mismatched, slices.Index(r.names[:], one.GetSubject()))
					}
				}
			}
		}
		outcome = facts["outcome"]
	}
	number := func(name string) uint64 {
		value, bad := strconv.ParseUint(facts[name], 10, 64)
		if bad != nil {
			value = ^uint64(0)
		}
		return value
	}
	log := slices.Index(r.names[:], facts["log"])
	// Nothing was applied only if the error says so. Without a reason the connection was lost.
	unknown := reason == "" && own == nil || outcome == "UNKNOWN" || changes && outcome != "NOT_APPLIED"
	switch {
	case unknown:
		return failure{unknown: true, reason: reason}, nil
	case reason == "POSITION_MISMATCH":
		return failure{refusal: &refusal{reason, log, number("actual_lsn"), mismatched}}, nil
	case reason == "FENCED":
		return failure{refusal: &refusal{reason, log, number("writer_epoch"), nil}}, nil
	case reason == "STARTING" || reason == "DRAINING" || reason == "BUSY" || reason == "JOURNAL_FAILED":
		return failure{passing: true, reason: reason}, nil
	case r.pair != nil && (reason == "" || reason == "MOVED" || reason == "BUCKET_DOWN" || reason == "DEADLINE_EXCEEDED"):
		return failure{passing: true, reason: reason}, nil
	}
	return failure{}, fmt.Errorf("a call was answered with %w", err)
}

// record records one history, and resolves unknown outcomes.
func record(plan plan, number int, random *rand.Rand) (*recording, error) {
	r := &recording{began: time.Now(), early: number%4 == 3}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	main, err := connect()
	if err != nil {
		return nil, err
	}
	defer main.Close()
	config := &wald.LogConfig{}
	if r.early {
		config.SyncMode = wald.SyncMode_SYNC_MODE_INTERVAL
	}
	run := random.Uint64()
	for i := range r.names {
		r.names[i] = fmt.Sprintf("history/%x/%d/%d", run, number, i)
		request := &wald.CreateLogRequest{Log: r.names[i], Config: config}
		if _, err := wald.NewLogServiceClient(main).CreateLog(ctx, request); err != nil {
			return nil, err
		}
	}
	killer, killing := newGroup(ctx)
	schedule := random.Uint64()
	killer.run(func() error { return r.killer(killing, plan, schedule) })
	for phase := range phases {
		callers, calling := newGroup(killing)
		for client := range plan.clients {
			own := rand.New(rand.NewPCG(random.Uint64(), uint64(client)))
			more := func() bool { return r.calls.Load() < int64(plan.calls*(phase+1)/phases) }
			callers.run(func() error {
				connection, err := connect()
				if err != nil {
					return err
				}
				return r.caller(calling, stubs{connection}, more, client, own)
			})
		}
		if err := callers.wait(); err != nil {
			return nil, err
		}
		r.pauses = append(r.pauses, r.now())
	}
	if err := killer.wait(); err != nil {
		return nil, err
	}
	return r, r.resolve(ctx, stubs{main})
}

// killer kills the daemon plan.kills times, spread over the calls.
func (r *recording) killer(ctx context.Context, plan plan, seed uint64) error {
	random := rand.New(rand.NewPCG(seed, 0))
	for i := range plan.kills {
		each := plan.calls / plan.kills
		at := int64(i*each + random.IntN(each))
		for r.calls.Load() < at {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(time.Millisecond):
			}
		}
		if err := control(ctx, "kill", nil); err != nil {
			return err
		}
	}
	return nil
}

// caller makes one call after another while there are more to make, and closes its way.
func (r *recording) caller(ctx context.Context, way way, more func() bool, client int, random *rand.Rand) error {
	defer way.Close()
	for more() {
		event := event{client: client, asked: r.choose(random)}
		limit := callTimeout
		if r.pair != nil {
			r.pair.rest(ctx, random)
			limit = patience(random)
			preparing, cancel := context.WithTimeout(ctx, limit)
			made := r.pair.prepare(preparing, r, way, &event, random)
			cancel()
			if !made {
				continue
			}
		}
		// Fences always are durable in such a recording.
		event.durable = r.early && (event.asked.kind == fences || event.asked.kind == appends && random.IntN(4) == 0)
		event.from = r.now()
		calling, cancel := context.WithTimeout(ctx, limit)
		told, err := way.call(calling, r, &event)
		cancel()
		event.to = r.now()
		if err == nil {
			event.told = told
			r.heard(event)
			event.undecided = event.weak
		} else {
			changes := event.asked.kind != tails && event.asked.kind != reads
			failure, err := r.failure(err, changes)
			if err != nil {
				return err
			}
			if r.pair != nil {
				r.pair.failed(event, failure)
			}
			// A refusal of a weak append may rest on records that a takeover loses.
			if failure.passing || (failure.unknown && !changes) || (event.weak && failure.refusal != nil) {
				continue
			}
			event.told.refusal = failure.refusal
			event.undecided = failure.unknown
			r.heard(event)
		}
		r.mutex.Lock()
		r.events = append(r.events, event)
		r.mutex.Unlock()
		r.calls.Add(1)
	}
	return nil
}

// choose draws a request.
func (r *recording) choose(random *rand.Rand) input {
	log := random.IntN(logs)
	fresh := func() []uint32 {
		ids := make([]uint32, 1+random.IntN(3))
		for i := range ids {
			ids[i] = r.ids.Add(1)
		}
		return ids
	}
	tail := func(log int) *uint64 {
		value := r.heardTail[log].Load()
		return &value
	}
	epoch := func(log int) *uint64 {
		value := r.heardEpoch[log].Load()
		if value == 0 && random.IntN(2) == 0 {
			return nil
		}
		return &value
	}
	lagging := r.early && random.IntN(2) == 0
	switch dice := random.IntN(100); {
	case dice < 15:
		return input{kind: tails, log: log, lagging: lagging}
	case dice < 35:
		return input{kind: reads, log: log, lagging: lagging}
	case dice < 38:
		asked := input{kind: fences, log: 1 + random.IntN(logs-1)}
		if random.IntN(2) == 0 {
			explicit := r.heardEpoch[asked.log].Load() + random.Uint64N(3)
			asked.epoch = &explicit
		}
		return asked
	case dice < 42:
		// Without an epoch, even in a fenced log.
		return input{kind: appends, parts: []part{{log: log, ids: fresh()[:1]}}}
	case dice < 62:
		return input{kind: appends, parts: []part{{log: log, ids: fresh()[:1], epoch: epoch(log)}}}
	case dice < 76:
		return input{kind: appends, parts: []part{{log: log, ids: fresh()[:1], epoch: epoch(log), expected: tail(log)}}}
	default:
		order := random.Perm(logs)[:1+random.IntN(logs)]
		checked := len(order) > 1 && random.IntN(3) == 0
		asked := input{kind: appends}
		for i, log := range order {
			part := part{log: log}
			if checked && i == len(order)-1 {
				part.expected = tail(log)
			} else {
				part.ids, part.epoch = fresh(), epoch(log)
				if random.IntN(4) == 0 {
					part.expected = tail(log)
				}
			}
			asked.parts = append(asked.parts, part)
		}
		return asked
	}
}

// heard keeps the tails and epochs of an answer.
func (r *recording) heard(event event) {
	raise := func(known *atomic.Uint64, value uint64) {
		for now := known.Load(); now < value && !known.CompareAndSwap(now, value); now = known.Load() {
		}
	}
	told := event.told
	switch {
	case event.undecided:
	case told.refusal != nil && told.refusal.log >= 0:
		if told.refusal.reason == "FENCED" {
			raise(&r.heardEpoch[told.refusal.log], told.refusal.actual)
		} else {
			raise(&r.heardTail[told.refusal.log], told.refusal.actual)
		}
	case told.refusal != nil:
	case event.asked.kind == appends:
		for i, part := range event.asked.parts {
			if len(part.ids) > 0 {
				raise(&r.heardTail[part.log], told.firsts[i]+uint64(len(part.ids)))
			}
		}
	default:
		raise(&r.heardTail[event.asked.log], told.tail)
		raise(&r.heardEpoch[event.asked.log], told.epoch)
	}
}

func records(ids []uint32) []*wald.Record {
	made := make([]*wald.Record, len(ids))
	for i, id := range ids {
		made[i] = &wald.Record{Payload: &wald.Record_Data{Data: strconv.AppendUint(nil, uint64(id), 10)}}
	}
	return made
}

func numbers(batch *wald.RecordBatch) ([]uint32, error) {
	ids := make([]uint32, len(batch.GetRecords()))
	for i, record := range batch.GetRecords() {
		id, err := strconv.ParseUint(string(record.GetData()), 10, 32)
		if err != nil {
			return nil, err
		}
		ids[i] = uint32(id)
	}
	return ids, nil
}

// visibility is that of a tail or a read.
func (r *recording) visibility(event *event) wald.Visibility {
	switch {
	case r.pair != nil && r.pair.byMode:
	case r.pair != nil:
		return wald.Visibility_VISIBILITY_REPLICATED
	// Where records are durable before they are visible, this visibility makes no difference.
	case event.asked.lagging || (!r.early && event.from%2 == 0):
		return wald.Visibility_VISIBILITY_DURABLE
	}
	return wald.Visibility_VISIBILITY_UNSPECIFIED
}

// durability is that of an append.
func (r *recording) durability(event *event) wald.Durability {
	switch {
	case event.durable || event.weak:
		return wald.Durability_DURABILITY_DURABLE
	case r.pair != nil && !r.pair.byMode:
		return wald.Durability_DURABILITY_REPLICATED
	}
	return wald.Durability_DURABILITY_UNSPECIFIED
}

func (s stubs) call(ctx context.Context, r *recording, event *event) (output, error) {
	wal := wald.NewWalServiceClient(s)
	asked := event.asked
	visibility := r.visibility(event)
	switch asked.kind {
	case appends:
		return r.append(ctx, wal, event)
	case fences:
		answer, err := wal.Fence(ctx, &wald.FenceRequest{Log: r.names[asked.log], WriterEpoch: asked.epoch})
		return output{tail: answer.GetTailLsn(), epoch: answer.GetWriterEpoch()}, err
	case tails:
		answer, err := wal.GetTail(ctx, &wald.GetTailRequest{Log: r.names[asked.log], Visibility: visibility})
		return output{kept: answer.GetFirstLsn(), tail: answer.GetTailLsn(), epoch: answer.GetWriterEpoch()}, err
	case trims:
		answer, err := wal.Trim(ctx, &wald.TrimRequest{Log: r.names[asked.log], BeforeLsn: asked.before})
		return output{kept: answer.GetFirstLsn()}, err
	case reads:
		answer, err := wal.Read(ctx, &wald.ReadRequest{Log: r.names[asked.log], Start: &wald.ReadRequest_TailOffset{TailOffset: 5}, Visibility: visibility})
		if err != nil {
			return output{}, err
		}
		ids, err := numbers(answer.GetBatch())
		return output{kept: answer.GetFirstLsn(), tail: answer.GetTailLsn(), first: answer.GetNextLsn() - uint64(len(ids)), ids: ids}, err
	}
	return output{}, errors.New("not a call")
}

func (s stubs) page(ctx context.Context, r *recording, log int, from uint64) ([]uint32, uint64, error) {
	request := &wald.ReadRequest{Log: r.names[log], Start: &wald.ReadRequest_Lsn{Lsn: from}, MaxRecords: 10_000}
	if r.pair != nil {
		request.Visibility = wald.Visibility_VISIBILITY_REPLICATED
	}
	page, err := wald.NewWalServiceClient(s).Read(ctx, request)
	if err != nil {
		return nil, 0, err
	}
	ids, err := numbers(page.GetBatch())
	return ids, page.GetNextLsn(), err
}

func (r *recording) append(ctx context.Context, wal wald.WalServiceClient, event *event) (output, error) {
	parts := event.asked.parts
	durability := r.durability(event)
	condition := func(part part) *wald.AppendCondition {
		return &wald.AppendCondition{ExpectedLsn: part.expected, WriterEpoch: part.epoch}
	}
	if len(parts) == 1 && len(parts[0].ids) == 1 {
		answer, err := wal.Append(ctx, &wald.AppendRequest{Log: r.names[parts[0].log], Record: records(parts[0].ids)[0], Condition: condition(parts[0]), Durability: durability})
		return output{firsts: []uint64{answer.GetLsn()}}, err
	}
	request := &wald.AppendBatchRequest{Durability: durability}
	for _, part := range parts {
		if len(part.ids) == 0 {
			request.Checks = append(request.Checks, &wald.LogCheck{Log: r.names[part.log], ExpectedLsn: part.expected})
		} else {
			request.Batches = append(request.Batches, &wald.LogBatch{Log: r.names[part.log], Records: records(part.ids), Condition: condition(part)})
		}
	}
	answer, err := wal.AppendBatch(ctx, request)
	if err != nil {
		return output{}, err
	}
	told := output{firsts: make([]uint64, len(parts))}
	for i, one := range answer.GetAppends() {
		told.firsts[i] = one.GetFirstLsn()
	}
	return told, nil
}

// contents reads a log from an lsn to its tail.
func (r *recording) contents(ctx context.Context, way way, log int, from uint64) ([]uint32, error) {
	var all []uint32
	for {
		ids, next, err := way.page(ctx, r, log, from)
		if err != nil || len(ids) == 0 {
			return all, err
		}
		all, from = append(all, ids...), next
	}
}

// resolve finds unknown outcomes of appends. By now every connection on which one could still arrive is
// closed. A lost append that is in the log was applied, and its place shows when. Otherwise it never was,
// and the call is dropped. Unresolved, a judge would have to try each at every point of the history.
func (r *recording) resolve(ctx context.Context, way way) error {
	found := map[uint32]uint64{}
	where := map[uint32]int{}
	if r.pair != nil {
		if err := r.pair.gatherAll(ctx, r); err != nil {
			return err
		}
	}
	for log := range r.names {
		if r.pair == nil {
			ids, err := r.contents(ctx, way, log, 0)
			if err != nil {
				return err
			}
			r.stored[log] = ids
		}
		for lsn, id := range r.stored[log] {
			if _, twice := found[id]; twice {
				r.trouble = append(r.trouble, fmt.Sprintf("record %d is there twice", id))
			}
			found[id], where[id] = uint64(lsn), log
		}
	}
	end := r.now() + 1
	var kept []event
	acked := 0
	for _, event := range r.events {
		if event.undecided && event.asked.kind != appends {
			event.told.unknown, event.to = true, end
			if r.pair != nil && r.pair.neverApplied(event.asked) {
				continue
			}
		}
		if event.asked.kind == appends && event.told.refusal == nil {
			there, all := 0, 0
			firsts := make([]uint64, len(event.asked.parts))
			for i, part := range event.asked.parts {
				for n, id := range part.ids {
					all++
					lsn, is := found[id]
					if is && where[id] == part.log && (n == 0 || lsn == firsts[i]+uint64(n)) {
						there++
					}
					if n == 0 {
						firsts[i] = lsn
					}
					delete(found, id)
				}
			}
			if event.undecided && there == 0 {
				if event.told.firsts != nil {
					r.pair.lost++
				}
				continue
			}
			if there < all {
				r.trouble = append(r.trouble, fmt.Sprintf("%d of %d records are there of %s", there, all, describe(event.asked, event.told)))
			} else if event.told.firsts != nil && fmt.Sprint(firsts) != fmt.Sprint(event.told.firsts) {
				r.trouble = append(r.trouble, fmt.Sprintf("found at %v: %s", firsts, describe(event.asked, event.told)))
			}
			if event.told.firsts == nil {
				event.told.firsts = firsts
			}
			if event.undecided && r.pair != nil {
				// A node that sleeps may take it later, and hand it on.
				event.to = end
			}
			acked++
		}
		kept = append(kept, event)
	}
	for id := range found {
		r.trouble = append(r.trouble, fmt.Sprintf("record %d is there, and was refused", id))
	}
	if r.pair == nil && len(r.trouble) > 0 {
		return errors.New(r.trouble[0])
	}
	if acked == 0 {
		return errors.New("nothing was appended")
	}
	r.events = kept
	return nil
}

// operations converts the history for the judge, without separately judged calls.
func operations(events []event) []porcupine.Operation {
	var made []porcupine.Operation
	for _, event := range events {
		if !event.asked.lagging {
			made = append(made, porcupine.Operation{ClientId: event.client, Input: event.asked, Call: event.from, Output: event.told, Return: event.to})
		}
	}
	return made
}
