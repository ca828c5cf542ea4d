package wald

import (
	"context"
	"sync"

	"google.golang.org/grpc/codes"

	"wald.dev/client/go/waldv1"
)

// DurableFollower follows logs over restarts of the server and of the program. It keeps the
// effects of records together with the cursor behind them, so each record takes effect once.
//
//	for follower.Next(ctx) {
//		for log, record := range follower.Event().Records() {
//			...
//		}
//		if err := follower.Keep(effects); err != nil {
//			return err
//		}
//	}
//	return follower.Err()
//
// The effects are bytes in a form of the program's own, and each Keep writes all of them. A
// program whose effects are in a database stores the cursor in the same transaction instead,
// and begins with [After].
//
// It is for one goroutine; Close may be called by any.
type DurableFollower struct {
	follower *Follower
	effects  []byte
	cursor   []byte
	// The event that comes next, once its gaps are reported.
	waiting Event
	event   Event
	err     error

	// Close waits for a Keep underway.
	mutex  sync.Mutex
	state  heldState
	closed bool
}

// DurableFollower opens a follower, as [Client.Follow] does, behind the cursor in the state; if
// there is none, where the options say. A start at the tail holds only from the first Keep of
// records on: if the program ends before, the next start begins at the tail of its own time, and
// the records in between are left out.
//
// The error is [ErrState] if the state cannot be loaded, is in use, or is not the state of a
// follower. Close the follower: the state is in use until then, even if ctx ends.
func (c *Client) DurableFollower(ctx context.Context, selector Selector, state State, options ...ScanOption) (*DurableFollower, error) {
	kept := new(waldv1.FollowerState)
	held, failure := loadState(state, kept, waldv1.StateKind_STATE_KIND_FOLLOWER, "a follower")
	if failure != nil {
		return nil, failure
	}
	d := &DurableFollower{state: held}
	if held.found {
		d.effects = notNil(kept.GetEffects())
	}
	if len(kept.GetCursor()) > 0 {
		d.cursor = kept.GetCursor()
		options = append(options[:len(options):len(options)], After(d.cursor))
	}
	d.follower = c.Follow(ctx, selector, options...)
	return d, nil
}

// Effects are the effects that were kept last; nil if none were.
func (d *DurableFollower) Effects() []byte { return d.effects }

// Next waits for the next records. Events without records are skipped. False: the scan has
// ended, failed, come upon a gap, or ctx has ended; [DurableFollower.Err] reports which. After
// a gap or the end of ctx, the next call goes on.
//
// A gap is a [Gap] in the chain of the error. It is reported again after a restart of the
// program, unless records behind it were kept.
func (d *DurableFollower) Next(ctx context.Context) bool {
	d.event, d.err = Event{}, nil
	for {
		if gaps := d.waiting.Gaps; len(gaps) > 0 {
			d.waiting.Gaps = gaps[1:]
			d.err = missing(gaps[0])
			return false
		}
		event := d.waiting
		d.waiting = Event{}
		if event.Cursor != nil {
			d.cursor = event.Cursor
		}
		if len(event.Batches) > 0 {
			d.event = event
			return true
		}
		if !d.follower.Next(ctx) {
			d.err = d.follower.Err()
			return false
		}
		d.waiting = d.follower.Event()
	}
}

// Event has the records that Next waited for. It has no gaps.
func (d *DurableFollower) Event() Event { return d.event }

// Err is why Next returned false; nil if the scan came to its end.
func (d *DurableFollower) Err() error { return d.err }

// Cursor resumes exactly after the last record that Next has returned; nil before the first.
func (d *DurableFollower) Cursor() []byte { return d.cursor }

// Keep saves the effects of all records that Next has returned, together with their cursor. The
// error is [ErrState]; the state before may be in force then, or this one. After Close it is
// [ErrClosed], and nothing was saved.
func (d *DurableFollower) Keep(effects []byte) error {
	kept := &waldv1.FollowerState{
		Cursor:  d.cursor,
		Effects: effects,
		Kind:    waldv1.StateKind_STATE_KIND_FOLLOWER,
	}
	d.mutex.Lock()
	defer d.mutex.Unlock()
	if d.closed {
		return closed("the follower")
	}
	if failure := saveState(d.state, kept); failure != nil {
		return failure
	}
	d.effects = notNil(effects)
	return nil
}

// Close ends the follower and frees its resources. Another one may use the state from now on.
func (d *DurableFollower) Close() {
	d.follower.Close()
	d.mutex.Lock()
	defer d.mutex.Unlock()
	d.closed = true
	d.state.release()
}

// notNil is a copy that is not nil: nil means that there is no state.
func notNil(effects []byte) []byte { return append([]byte{}, effects...) }

// missing is the error of a gap.
func missing(gap Gap) *Error {
	return &Error{
		Code:    codes.DataLoss,
		Message: gap.Error(),
		Outcome: NotApplied,
		Retry:   Never,
		cause:   gap,
	}
}
