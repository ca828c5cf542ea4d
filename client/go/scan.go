package wald

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"wald.dev/client/go/waldv1"
)

// Selector selects the logs to scan.
type Selector struct{ apply func(*waldv1.ScanRequest) }

// Log selects the log with this name.
func Log(name string) Selector {
	return Selector{func(r *waldv1.ScanRequest) { r.Selector = &waldv1.ScanRequest_Log{Log: name} }}
}

// Prefix selects all logs whose names start with this.
func Prefix(prefix string) Selector {
	return Selector{func(r *waldv1.ScanRequest) { r.Selector = &waldv1.ScanRequest_Prefix{Prefix: prefix} }}
}

// AllLogs selects all logs.
func AllLogs() Selector {
	return Selector{func(r *waldv1.ScanRequest) { r.Selector = &waldv1.ScanRequest_All{All: &waldv1.AllLogs{}} }}
}

type scanSettings struct {
	request     *waldv1.ScanRequest
	interrupted func(error)
}

type scanOption func(*scanSettings)

func (o scanOption) applyScan(s *scanSettings) { o(s) }

// After begins exactly where a scan with the same selector and visibility gave this cursor,
// also in another process and after a restart of the server.
func After(cursor []byte) ScanOption {
	return scanOption(func(s *scanSettings) { s.request.Start = &waldv1.ScanRequest_Cursor{Cursor: cursor} })
}

// UntilLSN ends before this lsn; one log only.
func UntilLSN(lsn LSN) ScanOption {
	return scanOption(func(s *scanSettings) { s.request.UntilLsn = (*uint64)(&lsn) })
}

// OnInterruption calls back when a connection was lost and the scan is going to resume. For
// logs and metrics; must not block.
func OnInterruption(notice func(error)) ScanOption {
	return scanOption(func(s *scanSettings) { s.interrupted = notice })
}

// GapReason is why records are missing.
type GapReason = waldv1.GapReason

const (
	// GapTrimmed: forgotten by Trim.
	GapTrimmed = waldv1.GapReason_GAP_REASON_TRIMMED
	// GapExpired: forgotten by the log's retention.
	GapExpired = waldv1.GapReason_GAP_REASON_EXPIRED
	// GapQuarantined: damaged on the disk and set aside.
	GapQuarantined = waldv1.GapReason_GAP_REASON_QUARANTINED
	// GapLost: acked as less than durable, and gone after a restart.
	GapLost = waldv1.GapReason_GAP_REASON_LOST
	// GapDeleted: the log was deleted; one created later under the name is another.
	GapDeleted = waldv1.GapReason_GAP_REASON_DELETED
)

// Gap is records that a scan does not deliver, named exactly. As the error of a
// [DurableFollower] it is found by [errors.As].
type Gap struct {
	// Log is the log's name.
	Log string
	// FromLSN is the first missing lsn.
	FromLSN LSN
	// ToLSN is the lsn after the last missing one. Nil: up to wherever the log ended.
	ToLSN *LSN
	// Reason is why they are missing.
	Reason GapReason
}

// Error names the records that are missing, and why.
func (g Gap) Error() string {
	to := "the end of the log"
	if g.ToLSN != nil {
		to = fmt.Sprintf("before %d", *g.ToLSN)
	}
	return fmt.Sprintf("records of log %q are missing, from %d to %s: %v", g.Log, g.FromLSN, to, g.Reason)
}

// Event is a piece of a scan.
type Event struct {
	// Gaps are the missing records before the batches.
	Gaps []Gap
	// Batches are records, in order.
	Batches []RecordBatch
	// CaughtUp: everything that was there has been delivered.
	CaughtUp bool
	// Cursor resumes exactly after this event: keep it with the results of the event.
	Cursor []byte
	// TailLSN is the tail; of a scan of one log.
	TailLSN LSN
	// DurableLSN: every lsn below it is flushed to the device; of a scan of one log.
	DurableLSN LSN
	// ReplicatedLSN: every lsn below it is in the bucket of a replica; of a scan of one log; 0 without a replica.
	ReplicatedLSN LSN
	// RecoveryEpoch rises with every unclean start of the server.
	RecoveryEpoch uint64
}

// Records ranges over the records of the event, with the names of their logs.
func (e Event) Records() iter.Seq2[string, Record] {
	return func(yield func(string, Record) bool) {
		for _, batch := range e.Batches {
			for _, record := range batch.Records {
				if !yield(batch.Log, record) {
					return
				}
			}
		}
	}
}

// Scanner is a scan underway. It outlives its connections:
//
//	          open                     message                   lost
//	(closed) ─────▶ (open) ──────────────────────────▶ (open) ──────────▶ (closed)
//	   ▲        begin at the start,   becomes an event                       │
//	   │        or at the last cursor with its cursor                        │
//	   └──────────────────────── pause, longer each time ────────────────────┘
//
// A message becomes one event, with the cursor that resumes after it. So nothing comes twice
// and nothing is skipped, whatever the caller does with the cursor.
//
// It is for one goroutine; Close may be called by any.
type Scanner struct {
	client *Client
	events chan Event
	// The reason of its end; read once events is closed.
	failure *Error
	cancel  context.CancelFunc
	done    chan struct{}

	event  Event
	cursor []byte
	err    error
}

// Follower is a scan that continues with records that are appended later, without end, over
// lost connections and restarts of the server. A [DurableFollower] also goes on after a restart
// of the program.
type Follower struct{ Scanner }

// Scan delivers the records that exist now. Close it, or end ctx.
func (c *Client) Scan(ctx context.Context, selector Selector, options ...ScanOption) *Scanner {
	scanner := new(Scanner)
	scanner.start(ctx, c, selector, options, false)
	return scanner
}

// Follow delivers existing records, and then records that are appended later. It waits for a
// log that does not exist. Close it, or end ctx.
func (c *Client) Follow(ctx context.Context, selector Selector, options ...ScanOption) *Follower {
	follower := new(Follower)
	follower.start(ctx, c, selector, options, true)
	return follower
}

// Next waits for the next event. False: the scan has ended, failed, or ctx has ended;
// [Scanner.Err] reports which. After ctx has ended, a Next with another context continues.
func (s *Scanner) Next(ctx context.Context) bool {
	s.err = nil
	select {
	case event, open := <-s.events:
		if !open {
			s.event = Event{}
			if s.failure != nil {
				s.err = s.failure
			}
			return false
		}
		s.event, s.cursor = event, event.Cursor
		return true
	case <-ctx.Done():
		s.err = gaveUp(ctx, true).ofRead()
		return false
	}
}

// Event is the event that Next waited for.
func (s *Scanner) Event() Event { return s.event }

// Cursor resumes exactly after the last event; nil before the first.
func (s *Scanner) Cursor() []byte { return s.cursor }

// Err is why Next returned false; nil if the scan came to its end.
func (s *Scanner) Err() error { return s.err }

// Events ranges over the events; a failure is the last element.
func (s *Scanner) Events(ctx context.Context) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		for s.Next(ctx) {
			if !yield(s.event, nil) {
				return
			}
		}
		if s.err != nil {
			yield(Event{}, s.err)
		}
	}
}

// Close ends the scan and frees its resources.
func (s *Scanner) Close() {
	s.cancel()
	<-s.done
}

// place is where the next connection would begin.
type place int

const (
	// atStart: where the caller said.
	atStart place = iota
	// atCursor: after the last message; the request holds its cursor.
	atCursor
	// nowhere: not known; going on could repeat or skip records.
	nowhere
)

// scanUnderway is the state of a scanner's goroutine.
type scanUnderway struct {
	scanner *Scanner
	scanSettings
	bounded  bool
	caughtUp bool
	place    place
	// Whether a message has come, also a heartbeat.
	begun bool
	// Counts the failures since the last message.
	pauses pauses
	// When the attempt began that failed first since the last message.
	failingSince time.Time
	attempt      *attempt
}

func (s *Scanner) start(ctx context.Context, c *Client, selector Selector, options []ScanOption, follow bool) {
	ctx, cancel := context.WithCancel(ctx)
	s.client, s.cancel = c, cancel
	s.events, s.done = make(chan Event), make(chan struct{})
	request := &waldv1.ScanRequest{Follow: follow}
	underway := &scanUnderway{
		scanner:      s,
		scanSettings: scanSettings{request: request},
		pauses:       pauses{policy: c.settings.retry},
	}
	for _, option := range options {
		option.applyScan(&underway.scanSettings)
	}
	if selector.apply != nil {
		selector.apply(request)
	}
	underway.bounded = request.MaxRecords > 0
	stop := context.AfterFunc(c.ctx, cancel)
	go func() {
		defer close(s.done)
		defer close(s.events)
		defer stop()
		defer cancel()
		s.failure = underway.run(ctx)
	}()
}

// run delivers until the end (nil) or a failure that cannot be survived.
func (u *scanUnderway) run(ctx context.Context) *Error {
	for {
		ended, failure := u.connection(ctx)
		if ended {
			return nil
		}
		if ctx.Err() != nil {
			if u.scanner.client.ctx.Err() != nil {
				return closed("the client").ofRead()
			}
			return gaveUp(ctx, true).ofRead()
		}
		pause, survives := u.survive(failure)
		if !survives {
			return failure.ofRead()
		}
		if u.interrupted != nil {
			u.interrupted(failure.ofRead())
		}
		u.scanner.client.sleep(ctx, pause)
	}
}

// connection opens one stream and delivers its events.
func (u *scanUnderway) connection(ctx context.Context) (ended bool, failure *Error) {
	c := u.scanner.client
	if u.failingSince.IsZero() {
		u.failingSince = time.Now()
	}
	streaming, cancel := context.WithCancel(ctx)
	defer cancel()
	watched, attempt := watchSending(streaming)
	u.attempt = attempt
	if failure := u.pinTailOffset(ctx); failure != nil {
		return false, failure
	}
	// Ends the stream when nothing, not even a heartbeat, has come for too long.
	silent := false
	silence := time.AfterFunc(c.settings.silenceTimeout, cancel)
	defer silence.Stop()
	receive := func(err error) *Error {
		if silent {
			return c.failedAt(attempt, lost("nothing came for "+c.settings.silenceTimeout.String(), true))
		}
		return c.readError(context.Background(), err, attempt, attempt.sent.Load())
	}
	stream, err := c.wal.Scan(watched, proto.CloneOf(u.request))
	for {
		var message *waldv1.ScanResponse
		if err == nil {
			message, err = stream.Recv()
		}
		// A process that was frozen finds the stream cancelled, and messages that came before. Reset
		// starts the timer again, so only the first Stop tells.
		if !silence.Stop() {
			silent = true
		}
		if err == nil {
			// The messages count: the end of the stream must not take one away.
			ended, failure := u.take(ctx, message)
			if ended || failure != nil {
				return ended, failure
			}
			silence.Reset(c.settings.silenceTimeout)
			continue
		}
		if wasOpen(stream) {
			u.forgetTail()
		}
		if errors.Is(err, io.EOF) {
			return u.end()
		}
		return false, receive(err)
	}
}

// pinTailOffset turns "n before the tail" of one log into an lsn, so that a connection lost
// before the first message can be replaced without skipping records that arrived meanwhile.
// With AnyNode only the node knows the tail of its copy, and the lsn of another tail may be
// above it.
func (u *scanUnderway) pinTailOffset(ctx context.Context) *Error {
	log, one := u.request.Selector.(*waldv1.ScanRequest_Log)
	start, offset := u.request.Start.(*waldv1.ScanRequest_TailOffset)
	if !one || !offset || !u.request.Follow || u.request.AnyNode {
		return nil
	}
	tail, failure := u.scanner.client.tail(ctx, &waldv1.GetTailRequest{
		Log:        log.Log,
		Visibility: u.request.Visibility,
		LogId:      u.request.LogId,
	})
	if failure != nil && failure.Reason == ErrLogNotFound {
		// All that will ever be in it is still to come.
		u.request.Start = nil
		return nil
	}
	if failure != nil {
		return failure
	}
	first, next := uint64(tail.FirstLSN), uint64(tail.TailLSN)
	from := next - min(start.TailOffset, next)
	u.request.Start = &waldv1.ScanRequest_Lsn{Lsn: max(from, first)}
	return nil
}

// wasOpen tells whether the server had begun to answer; a refusal has no headers.
func wasOpen(stream grpc.ClientStream) bool {
	if stream == nil {
		return false
	}
	header, err := stream.Header()
	return err == nil && header != nil
}

// forgetTail: once a stream was open, "the tail" is in the past, and only a cursor can name
// it.
func (u *scanUnderway) forgetTail() {
	if _, offset := u.request.Start.(*waldv1.ScanRequest_TailOffset); offset && u.place == atStart {
		u.place = nowhere
	}
}

// take makes an event of a message and hands it over.
func (u *scanUnderway) take(ctx context.Context, message *waldv1.ScanResponse) (ended bool, failure *Error) {
	event, count, failure := readEvent(message)
	if failure != nil {
		return false, failure
	}
	// The request moves on only when the event is the caller's.
	news := count > 0 || len(event.Gaps) > 0 || event.CaughtUp && !u.caughtUp
	if news {
		select {
		case u.scanner.events <- event:
		case <-ctx.Done():
			return false, gaveUp(ctx, true)
		}
	}
	u.begun = true
	u.caughtUp = event.CaughtUp || u.caughtUp && count == 0
	// A heartbeat before the first piece has no cursor: the next stream begins where this one began.
	if len(event.Cursor) > 0 || len(event.Batches) > 0 || len(event.Gaps) > 0 || event.CaughtUp {
		u.place = atCursor
		if len(event.Cursor) == 0 {
			u.place = nowhere
		}
		u.request.Start = &waldv1.ScanRequest_Cursor{Cursor: event.Cursor}
	}
	u.pauses.progress()
	u.failingSince = time.Time{}
	if u.bounded {
		u.request.MaxRecords -= min(count, u.request.MaxRecords)
		// Asked again it would be 0, which is: without bound.
		return u.request.MaxRecords == 0, nil
	}
	return false, nil
}

// end: the server ended the stream in good order.
func (u *scanUnderway) end() (bool, *Error) {
	if u.request.Follow && !u.bounded && u.request.UntilLsn == nil {
		return false, lost("the server ended the stream", true)
	}
	return true, nil
}

// survive prepares the next connection, if there can be one.
func (u *scanUnderway) survive(failure *Error) (time.Duration, bool) {
	c := u.scanner.client
	pause := u.pauses.next(failure, u.attempt)
	// A follower that has begun has no end to its patience; its owner may have.
	patient := u.request.Follow && u.begun
	if u.failingSince.IsZero() {
		u.failingSince = time.Now()
	}
	tired := u.pauses.exhausted() ||
		time.Since(u.failingSince)+pause >= c.settings.timeout
	if u.place == nowhere || tired && !patient || !c.allows(harmless, failure, u.attempt, patient) {
		return 0, false
	}
	return pause, true
}

// readEvent takes a message apart, and counts the records in it.
func readEvent(message *waldv1.ScanResponse) (Event, uint64, *Error) {
	event := Event{
		CaughtUp:      message.GetCaughtUp(),
		Cursor:        message.GetCursor(),
		TailLSN:       LSN(message.GetTailLsn()),
		DurableLSN:    LSN(message.GetDurableLsn()),
		ReplicatedLSN: LSN(message.GetReplicatedLsn()),
		RecoveryEpoch: message.GetRecoveryEpoch(),
	}
	for _, gap := range message.GetGaps() {
		event.Gaps = append(event.Gaps, Gap{
			Log:     gap.GetLog(),
			FromLSN: LSN(gap.GetFromLsn()),
			ToLSN:   (*LSN)(gap.ToLsn),
			Reason:  gap.GetReason(),
		})
	}
	var count uint64
	for _, batch := range message.GetBatches() {
		records, failure := readBatch(batch)
		if failure != nil {
			return Event{}, 0, failure
		}
		event.Batches = append(event.Batches, records)
		count += uint64(len(records.Records))
	}
	return event, count, nil
}
