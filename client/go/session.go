package wald

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"wald.dev/client/go/waldv1"
)

type appendStream = grpc.BidiStreamingClient[waldv1.AppendSessionRequest, waldv1.AppendSessionResponse]

// Session sends batches without waiting for acks. They are applied and acked in the order of
// Send. It ends at the first failure: earlier batches keep their acks, the failing batch gets
// its error, and no later batch is applied (unless the failure's own outcome is unknown; then
// later outcomes are unknown as well). A session does not repeat anything; a [Producer] does.
//
// It may be used by many goroutines at once.
type Session struct {
	window  int
	client  *Client
	stream  appendStream
	attempt *attempt
	cancel  context.CancelFunc
	done    chan struct{}

	mutex  sync.Mutex
	change signal
	// Sent or to be sent, not acked, in order; the first `out` of them are sent.
	unacked []*sessionRequest
	out     int
	bytes   int
	nextID  uint64
	closing bool
	failure *Error
}

type sessionRequest struct {
	*Pending[BatchAck]
	message *waldv1.AppendSessionRequest
	bytes   int
}

type sessionSettings struct{ window int }

// SessionOption is a setting of a session.
type SessionOption func(*sessionSettings)

// WithWindow is the maximum number of bytes that are sent and not acked before Send blocks.
// Default: 8 MiB. One batch is let through even if it alone is larger.
func WithWindow(bytes int) SessionOption {
	return func(s *sessionSettings) { s.window = bytes }
}

// Session opens a session. When ctx ends, so does the session; acks still due are then
// unknown.
func (c *Client) Session(ctx context.Context, options ...SessionOption) (*Session, error) {
	s := sessionSettings{window: 8 << 20}
	for _, option := range options {
		option(&s)
	}
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(c.ctx, cancel)
	stream, attempt, failure := c.openAppends(ctx)
	if failure != nil {
		stop()
		cancel()
		return nil, failure
	}
	session := &Session{
		window:  s.window,
		client:  c,
		stream:  stream,
		attempt: attempt,
		cancel:  cancel,
		done:    make(chan struct{}),
	}
	go session.send()
	go func() {
		defer close(session.done)
		defer stop()
		defer cancel()
		session.receive(ctx)
	}()
	return session, nil
}

// openAppends opens a stream of appends. Nothing was appended yet, so that any failure to
// open it may be repeated.
func (c *Client) openAppends(ctx context.Context) (appendStream, *attempt, *Error) {
	if failure := c.begin(); failure != nil {
		return nil, nil, failure
	}
	defer c.underway.Done()
	pauses := pauses{policy: c.settings.retry}
	for {
		watched, attempt := watchSending(ctx)
		stream, err := c.wal.AppendSession(watched)
		if err == nil {
			return stream, attempt, nil
		}
		failure := c.readError(ctx, err, attempt, false)
		pause := pauses.next(failure, attempt)
		last := !c.allows(harmful, failure, attempt, false) || pauses.exhausted()
		if last || !c.sleep(ctx, pause) {
			return nil, nil, failure
		}
	}
}

// Send queues a batch and returns at once, unless the window is full: then it blocks. If ctx
// ends before there is room, nothing was sent. A batch that cannot be encoded, such as one with
// a header key that is not UTF-8, is refused, and the session goes on. Send copies the batch:
// the caller may use its buffers again.
func (s *Session) Send(ctx context.Context, batch Batch) (*Pending[BatchAck], error) {
	owned, failure := own(batch.proto())
	if failure != nil {
		return nil, failure
	}
	message := &waldv1.AppendSessionRequest{Batch: owned}
	bytes := proto.Size(message)
	s.mutex.Lock()
	defer s.mutex.Unlock()
	for s.bytes > 0 && s.bytes+bytes > s.window && s.failure == nil && !s.closing {
		if !awaitChange(ctx, &s.mutex, &s.change) {
			return nil, gaveUp(ctx, false)
		}
	}
	switch {
	case s.failure != nil:
		return nil, earlierFailure(s.failure, false)
	case s.closing:
		return nil, closed("the session")
	}
	message.RequestId = s.nextID
	s.nextID++
	request := &sessionRequest{newPending[BatchAck](), message, bytes}
	s.unacked = append(s.unacked, request)
	s.bytes += bytes
	s.change.raise()
	return request.Pending, nil
}

// own copies a batch that is encoded after the call that gave it, perhaps more than once. It
// refuses one that cannot be encoded, which would end the stream under the batches of others.
func own(batch *waldv1.AppendBatchRequest) (*waldv1.AppendBatchRequest, *Error) {
	if _, err := proto.Marshal(batch); err != nil {
		return nil, invalid("the batch cannot be encoded: %v", err)
	}
	return proto.CloneOf(batch), nil
}

// CloseSend says that nothing more will be sent, and waits until everything is acked. Its
// error is the session's first failure.
func (s *Session) CloseSend(ctx context.Context) error {
	s.mutex.Lock()
	s.closing = true
	s.change.raise()
	s.mutex.Unlock()
	select {
	case <-s.done:
	case <-ctx.Done():
		return gaveUp(ctx, true)
	}
	if s.failure != nil {
		return s.failure
	}
	return nil
}

// Close ends the session now. Batches that were sent and not acked have an unknown outcome.
func (s *Session) Close() {
	s.cancel()
	<-s.done
}

// send brings the queue onto the stream.
func (s *Session) send() {
	for {
		request := s.nextToSend()
		if request == nil {
			// Recv returns the error.
			_ = s.stream.CloseSend()
			return
		}
		if s.stream.Send(request.message) != nil {
			return
		}
	}
}

// nextToSend waits for a request. Nil: there will be none.
func (s *Session) nextToSend() *sessionRequest {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	for s.out == len(s.unacked) {
		if s.closing || s.failure != nil || !awaitChange(s.stream.Context(), &s.mutex, &s.change) {
			return nil
		}
	}
	if s.failure != nil {
		return nil
	}
	s.out++
	return s.unacked[s.out-1]
}

// receive takes the acks, until the end.
func (s *Session) receive(ctx context.Context) {
	for {
		message, err := s.stream.Recv()
		if err != nil {
			s.end(ctx, err)
			return
		}
		if failure := s.acked(message); failure != nil {
			s.fail(failure)
			return
		}
	}
}

func (s *Session) acked(message *waldv1.AppendSessionResponse) *Error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.out == 0 || s.unacked[0].message.GetRequestId() != message.GetRequestId() {
		return brokenContract("the ack of a request in its order")
	}
	ack, failure := readBatchAck(message.GetAck())
	if failure != nil {
		return failure
	}
	request := s.unacked[0]
	s.unacked[0] = nil
	s.unacked = s.unacked[1:]
	s.out--
	s.bytes -= request.bytes
	request.resolve(ack)
	s.change.raise()
	return nil
}

// end: the stream has ended, in good order or not.
func (s *Session) end(ctx context.Context, err error) {
	s.mutex.Lock()
	complete := s.closing && len(s.unacked) == 0
	s.mutex.Unlock()
	failure := s.client.readError(ctx, err, s.attempt, s.attempt.sent.Load())
	if complete && failure.Reason == "" {
		// Nothing is due any more, so nothing can have failed.
		return
	}
	s.fail(failure)
}

// fail gives every request that is not acked its error.
func (s *Session) fail(failure *Error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	failing := failingRequest(failure)
	for i, request := range s.unacked {
		request.fail(errorOf(failure, failing, request.message.GetRequestId(), i == 0, i < s.out))
	}
	s.failure = failure
	s.unacked, s.out, s.bytes = nil, 0, 0
	s.change.raise()
}

// failingRequest is the request that the failing status names, if it does.
func failingRequest(failure *Error) *uint64 {
	if failure.Reason == "" {
		return nil
	}
	id, err := strconv.ParseUint(failure.Facts["request_id"], 10, 64)
	if err != nil {
		return nil
	}
	return &id
}

// errorOf is the error of one of the requests that were not acked when the stream failed.
func errorOf(failure *Error, failing *uint64, id uint64, first, sent bool) *Error {
	switch {
	// The connection broke, or something in between answered: nothing is said about any.
	case failure.Reason == "" && sent:
		return failure
	case failing != nil && id == *failing:
		return failure
	// Acks come before the failure: one that is missing was due and is lost.
	case failing != nil && id < *failing:
		return lost("no ack came before a later request failed", true)
	case failing == nil && first && sent:
		return failure
	}
	return earlierFailure(failure, sent)
}

// earlierFailure is the error of a request that was not applied because one before it failed.
func earlierFailure(failure *Error, sent bool) *Error {
	e := &Error{
		Code:    failure.Code,
		Server:  failure.Server,
		Message: fmt.Sprintf("not applied, because an earlier request failed: %s", failure.Message),
		Outcome: NotApplied,
		Retry:   Safe,
		cause:   ErrEarlierFailure,
	}
	if sent && failure.Outcome == Unknown {
		e.Outcome, e.Retry = Unknown, SafeWithCondition
		e.Message = fmt.Sprintf("an earlier request failed: %s", failure.Message)
	}
	return e
}
