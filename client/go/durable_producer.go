package wald

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"wald.dev/client/go/waldv1"
)

// Maximum number of batches that are kept and not acked. Each save writes all of them.
const batchesKept = 64

// DurableProducer appends to one log exactly once, over restarts of the server and of the
// program.
//
// It keeps each batch in its state before it sends the batch. Once AppendBatch has returned,
// the batch will be in the log once, and in its place: if the program ends before the ack, the
// next [Client.DurableProducer] with the same state sends the batch again. NextSequence says
// where the program goes on in its own input.
//
//	AppendBatch ─▶ state: [ 7 8 9 ] ──Producer──▶ server
//	                  ▲       ack of 7 ◀─────────────┘
//	                  └ the next start begins at 7
//
// A save costs about two flushes of the state's device, so larger batches go faster. A failure
// ends it as it ends a [Producer]. A batch that the server refuses for good, such as one with a
// record that is too large, stays in the state, and every later start fails with it: check the
// size of records before.
//
// A batch leaves the state when it is acked, at the durability that the log's sync mode or
// [WithProducerDurability] asks for. If this is less than [Durable], a crash of the server can
// lose acked batches. The server then refuses the producer (ErrProducerGap), unless it has also
// forgotten the producer since: the new epoch begins behind the hole, and nobody notices.
//
// The server forgets a producer that is idle for longer than its setting producer_max_idle, 7
// days by default. If no batch is in doubt, the producer goes on in a new epoch, and nobody
// notices. If the state has batches that an earlier run may have appended, nobody can tell
// whether they are in the log, and every start is refused (ErrProducerExpired) until somebody
// decides it with "walctl state settle". For the same reason, never go back to an old copy of a
// state.
//
// It is for one goroutine at a time.
type DurableProducer struct {
	producer *Producer
	state    heldState
	// The batches without a known ack, in order.
	kept *waldv1.ProducerState
	// Number of batches at the beginning of kept that an earlier run may have sent.
	loaded int
	// Acks of the first batches of kept: those that were sent.
	acks []*Pending[LogAck]
	// Acks have come since the last save.
	unsaved bool
	// The first failure, or the error of calls after Close.
	ended  *Error
	closed bool
}

// DurableProducer opens a producer of a log, as [Client.Producer] does, and keeps its state. If
// there is a state, the producer of that state goes on, and batches whose acks it has not seen
// are sent again. Id, epoch, first sequence and log id of the options count only if there is no
// state. At most 64 batches are kept and not acked, whatever [WithInFlight] says. Close the
// producer, after a failure too: the state is in use until then.
//
// The error is [ErrState] if the state cannot be loaded or saved, is in use, or is not the state
// of a producer of this log. If ctx ends before the kept batches are queued, they stay in the state.
func (c *Client) DurableProducer(ctx context.Context, log string, state State, options ...ProducerOption) (*DurableProducer, error) {
	kept := new(waldv1.ProducerState)
	held, failure := loadState(state, kept, waldv1.StateKind_STATE_KIND_PRODUCER, "a producer")
	if failure != nil {
		return nil, failure
	}
	if held.found && (kept.GetLog() != log || kept.GetId() == "") {
		held.release()
		return nil, stateRefused(fmt.Errorf("it is the state of a producer of the log %q, not of %q", kept.GetLog(), log))
	}
	options = append(options[:len(options):len(options)], func(s *producerSettings) {
		s.inFlight = min(s.inFlight, batchesKept)
		if held.found {
			s.id, s.epoch, s.logID, s.sequence = &kept.Id, kept.Epoch, kept.LogId, kept.Sequence
		}
	})
	producer, err := c.Producer(ctx, log, options...)
	if err != nil {
		held.release()
		return nil, err
	}
	// The state has the id, so the server must not forget it.
	producer.drawn = false
	d := &DurableProducer{producer: producer, state: held, kept: kept, loaded: len(kept.GetBatches())}
	if err := d.begin(ctx); err != nil {
		d.abort()
		return nil, err
	}
	return d, nil
}

// begin saves the first state, or sends the batches of the one that was found.
func (d *DurableProducer) begin(ctx context.Context) error {
	if !d.state.found {
		p := d.producer
		d.kept.Log, d.kept.LogId, d.kept.Id, d.kept.Epoch = p.log, p.logID, p.ID(), p.Epoch()
		d.kept.Sequence, d.kept.Kind = p.settings.sequence, waldv1.StateKind_STATE_KIND_PRODUCER
		// Before the first batch: without it the next start would be another producer.
		return d.save()
	}
	if len(d.kept.GetBatches()) > 0 {
		// Its last save may have ended before the flush: a crash of the machine could still
		// take the state away, after its batches were sent.
		if err := d.save(); err != nil {
			return err
		}
	}
	return d.sendKept(ctx)
}

// ID is the producer's id, which stays over restarts.
func (d *DurableProducer) ID() string { return d.producer.ID() }

// LogID is the number of the log that the producer keeps to.
func (d *DurableProducer) LogID() uint64 { return d.producer.LogID() }

// NextSequence is the sequence of the next batch: the number of batches so far, in all runs of
// the program. After a failure, open the producer again before you rely on it.
func (d *DurableProducer) NextSequence() uint64 {
	return d.kept.GetEarlierBatches() + d.kept.GetSequence() + uint64(len(d.kept.GetBatches()))
}

// AppendBatch keeps the records as one batch, sends it, and returns its sequence. The ack may
// come later. While 64 batches, or as many as [WithInFlight] allows, are not acked, it blocks.
// If ctx ends before there is room, or a record cannot be encoded, such as one with a header key
// that is not UTF-8, nothing was kept, and the producer goes on.
//
// Any other error ends the producer. If its outcome is [NotApplied], the batch was not kept. If
// it is [Unknown], do not append the batch elsewhere: it is in the state, from which the next
// start sends it, or may be (NextSequence of the next start says so). The error is [ErrState] if
// the batch could not be saved; it was not sent then. [ErrEarlierFailure] has the failure of an
// earlier batch in its chain.
func (d *DurableProducer) AppendBatch(ctx context.Context, records ...Record) (sequence uint64, err error) {
	if err := d.check(); err != nil {
		return 0, err
	}
	if len(records) == 0 {
		// The server would refuse the batch at every start.
		return 0, invalid("a batch has at least 1 record")
	}
	// A copy, because later saves write the batch again.
	batch := proto.CloneOf(&waldv1.LogBatch{Records: protoRecords(records)})
	if _, err := proto.Marshal(batch); err != nil {
		return 0, invalid("the batch cannot be encoded: %v", err)
	}
	if err := d.makeRoom(ctx, batch); err != nil {
		if d.ended != nil {
			// Not the outcome of the batch that failed.
			return 0, d.check()
		}
		return 0, err
	}
	sequence = d.NextSequence()
	d.kept.Batches = append(d.kept.Batches, batch)
	if err := d.save(); err != nil {
		return 0, err
	}
	// If ctx ends now, the batch is kept nevertheless, and the next call sends it.
	if d.sendKept(ctx) != nil && d.ended != nil {
		return 0, keptBehind(d.ended)
	}
	return sequence, nil
}

// Flush waits until all batches are acked, and saves the state. The error is the first failure.
// If ctx ends before, the producer goes on.
func (d *DurableProducer) Flush(ctx context.Context) error {
	if err := d.check(); err != nil {
		return err
	}
	for len(d.kept.GetBatches()) > 0 {
		if err := d.sendKept(ctx); err != nil {
			if d.ended == nil {
				return gaveUp(ctx, true)
			}
			return err
		}
		if len(d.acks) == 0 {
			break
		}
		select {
		case <-d.acks[0].Done():
		case <-ctx.Done():
			return gaveUp(ctx, true)
		}
		if err := d.takeAcks(); err != nil {
			return err
		}
	}
	if d.unsaved {
		return d.save()
	}
	return nil
}

// Close waits until all batches are acked, saves the state, and ends the producer. Its error is
// the failure that ended the producer, if there was one. If ctx ends before, the producer ends
// at once. The next start goes on as the same producer, and sends batches without an ack again.
// In every case another producer may use the state from now on.
func (d *DurableProducer) Close(ctx context.Context) error {
	if d.closed {
		return nil
	}
	d.closed = true
	failure := d.ended
	if failure == nil {
		if err := d.Flush(ctx); err != nil {
			d.abort()
			return err
		}
		// A later call must not save over the state of the next start.
		d.ended = closed("the producer")
		defer d.state.release()
		return d.producer.Close(ctx)
	}
	d.abort()
	return failure
}

// abort ends the producer at once. Batches without an ack stay in the state.
func (d *DurableProducer) abort() {
	if d.ended == nil {
		d.ended = closed("the producer")
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	// The failure has been reported.
	_ = d.producer.Close(ended)
	d.state.release()
}

func (d *DurableProducer) message(batch *waldv1.LogBatch) *waldv1.AppendSessionRequest {
	return d.producer.message(batch.GetRecords(), appendSettings{durability: d.producer.settings.durability})
}

// makeRoom waits until the batch can be queued at once, behind all that are kept.
func (d *DurableProducer) makeRoom(ctx context.Context, batch *waldv1.LogBatch) error {
	for {
		// Batches of an epoch that is over are sent again: their acks make room.
		if err := d.sendKept(ctx); err != nil {
			return err
		}
		if err := d.awaitRoom(ctx, batch); err != nil {
			return err
		}
		if !d.isBehind() {
			return nil
		}
	}
}

// sendKept sends the batches that are kept and were not sent, each as soon as there is room.
// Only the end of ctx does not end the producer.
func (d *DurableProducer) sendKept(ctx context.Context) error {
	for len(d.acks) < len(d.kept.GetBatches()) {
		if d.isBehind() {
			if err := d.save(); err != nil {
				return err
			}
			settings := d.producer.settings
			settings.epoch, settings.sequence = d.kept.GetEpoch(), 0
			d.producer = d.producer.client.newProducer(d.producer.log, settings, false)
		}
		pending, failure := d.producer.queue(ctx, d.message(d.kept.GetBatches()[len(d.acks)]))
		if failure == nil {
			d.acks = append(d.acks, pending)
		} else if err := d.afterWait(failure); err != nil {
			return err
		}
	}
	return nil
}

// isBehind reports whether the producer is of an epoch that is over.
func (d *DurableProducer) isBehind() bool { return d.producer.Epoch() != d.kept.GetEpoch() }

// awaitRoom waits until the batch can be queued at once, or the epoch is over. Only the end of
// ctx does not end the producer.
func (d *DurableProducer) awaitRoom(ctx context.Context, batch *waldv1.LogBatch) error {
	p, bytes := d.producer, proto.Size(d.message(batch))
	p.mutex.Lock()
	failure := p.awaitRoom(ctx, bytes)
	p.mutex.Unlock()
	return d.afterWait(failure)
}

// afterWait takes the acks that have come, after a wait for room with this failure, or none.
func (d *DurableProducer) afterWait(failure *Error) error {
	// Before the acks: a failure that comes later is in the first ack of the next wait, where a
	// forgotten producer begins again.
	p := d.producer
	p.mutex.Lock()
	first := p.failure
	p.mutex.Unlock()
	// The first failure is in the first ack.
	if err := d.takeAcks(); err != nil || d.isBehind() {
		return err
	}
	switch {
	case first != nil:
		return d.fail(first)
	case failure != nil:
		return failure
	}
	return nil
}

// takeAcks takes batches whose acks have come off the front of the state.
func (d *DurableProducer) takeAcks() error {
	for len(d.acks) > 0 {
		first := d.acks[0]
		select {
		case <-first.Done():
		default:
			return nil
		}
		if first.failure != nil {
			epoch, goesOn := d.nextEpoch(first.failure)
			if !goesOn {
				return d.fail(first.failure)
			}
			d.beginAgain(epoch)
			return nil
		}
		d.acks = d.acks[1:]
		d.kept.Batches[0] = nil
		d.kept.Batches = d.kept.Batches[1:]
		d.kept.Sequence++
		d.loaded = max(d.loaded-1, 0)
		d.unsaved = true
	}
	return nil
}

// nextEpoch is the epoch in which the producer goes on after the failure of its first batch in
// doubt, if it does. The server has forgotten the producer then, and has applied none of the
// batches: each was sent once, and refused.
func (d *DurableProducer) nextEpoch(failure *Error) (epoch uint64, goesOn bool) {
	epoch, named := failure.Number("first_epoch")
	forgotten := named && failure.Reason == ErrProducerExpired
	return epoch, forgotten && d.loaded == 0 && failure.Outcome == NotApplied
}

// beginAgain begins a new epoch, whose batches are not sent yet.
func (d *DurableProducer) beginAgain(epoch uint64) {
	d.acks = nil
	d.kept.EarlierBatches += d.kept.GetSequence()
	d.kept.Sequence, d.kept.Epoch = 0, epoch
}

func (d *DurableProducer) save() error {
	if failure := saveState(d.state, d.kept); failure != nil {
		return d.fail(failure)
	}
	d.unsaved = false
	return nil
}

func (d *DurableProducer) fail(failure *Error) error {
	d.ended = failure
	return failure
}

// check is the error of calls after the end.
func (d *DurableProducer) check() error {
	switch {
	case d.ended == nil:
		return nil
	case errors.Is(d.ended, ErrClosed):
		// The call has sent nothing, unlike perhaps the batch that failed.
		return d.ended.ofRead()
	}
	e := behind(d.ended, false)
	e.cause = errors.Join(ErrEarlierFailure, d.ended)
	return e
}

// keptBehind is the error of a batch that was kept, but not sent because of the failure of an
// earlier one.
func keptBehind(failure *Error) *Error {
	return &Error{
		Code:    failure.Code,
		Reason:  failure.Reason,
		Server:  failure.Server,
		Facts:   failure.Facts,
		Message: "the next start sends the batch; an earlier request failed: " + failure.Message,
		Outcome: Unknown,
		Retry:   SafeWithCondition,
		cause:   errors.Join(ErrEarlierFailure, failure),
	}
}
