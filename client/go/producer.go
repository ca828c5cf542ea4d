package wald

import (
	"context"
	"crypto/rand"
	"errors"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"wald.dev/client/go/waldv1"
)

// Producer appends to one log exactly once, over any failure of connections, the server and
// answers. Every batch carries the producer's id and a sequence number, by which the server
// distinguishes a repeat from a new batch. Batches that are not acked are sent again, in order,
// with the same numbers, on a new connection, until they are acked or no ack has come for the
// delivery timeout.
//
//	Send ─▶ unacked: [ 7 8 9 | 10 11 ] ──stream──▶ server
//	                     ▲     ▲    lost? a new stream begins again at 7
//	         ack of 7 ───┘     └ not sent yet
//
// A failure that repeating cannot heal (FENCED, PRODUCER_FENCED, LOG_REPLACED, a condition that
// does not hold, ...) ends the producer: batches are in order, so nothing after it is applied.
// Open another one then. A failure while all batches are acked ends only the stream: the next
// batch opens another one.
//
// A program that starts again is another producer, unless it names its producer
// ([WithProducerID]) and stores the batches. A [DurableProducer] does both.
//
// It may be used by many goroutines at once.
type Producer struct {
	client   *Client
	settings producerSettings
	// An id that was drawn at random is never used again.
	drawn  bool
	log    string
	logID  uint64
	cancel context.CancelFunc
	done   chan struct{}
	// Ends the producer when no ack has come for too long.
	expiry *time.Timer
	// Ends the stream after half of that time, while another one can still bring acks.
	silence *time.Timer

	mutex  sync.Mutex
	change signal
	// Not acked, in order; the first `out` of them are sent on the stream that is open.
	unacked []*producerBatch
	out     int
	bytes   int
	next    uint64
	// When the producer ends, unless an ack comes before.
	overdue time.Time
	closing bool
	// Ends the stream that is open.
	endStream context.CancelCauseFunc
	failure   *Error
	// The reason why the last stream broke.
	interruption *Error
}

type producerBatch struct {
	*Pending[LogAck]
	message *waldv1.AppendSessionRequest
	bytes   int
	// An earlier stream may have brought it to be applied.
	unknown bool
}

type producerSettings struct {
	id          *string
	epoch       uint64
	sequence    uint64
	logID       uint64
	windowBytes int
	inFlight    int
	timeout     time.Duration
	durability  Durability
	writerEpoch *uint64
	interrupted func(error)
}

// ProducerOption is a setting of a producer.
type ProducerOption func(*producerSettings)

// WithProducerID names the producer. A [DurableProducer] is exactly-once over restarts of the
// program as well; with this option a program can keep the state in its own way: if it opens
// the producer again with the same id and epoch, and sends the same batches again, none of them
// is appended twice. Only the last 1,024 batches are recognised
// (ErrProducerExpired): see [WithFirstSequence]. A higher epoch takes over from a lower one,
// which is fenced, counts from 0 again, and recognises no batch of the lower one. The first
// is 0. Default: an id drawn at random, which Close makes the server forget, with the lowest
// epoch that the log takes.
func WithProducerID(id string, epoch uint64) ProducerOption {
	return func(s *producerSettings) { s.id, s.epoch = &id, epoch }
}

// WithFirstSequence is the number of the first batch: for a program that starts again without a
// [DurableProducer], the one after the last whose ack it has stored. Default: 0.
func WithFirstSequence(number uint64) ProducerOption {
	return func(s *producerSettings) { s.sequence = number }
}

// WithProducerLogID is the number that the log must have, or LOG_REPLACED. Default: the log's
// number when the producer is opened; the log is created if there is none.
func WithProducerLogID(id uint64) ProducerOption {
	return func(s *producerSettings) { s.logID = id }
}

// WithInFlight is the maximum that is sent and not acked before Send blocks. Default:
// [DefaultBatchesInFlight] batches, [DefaultBytesInFlight] bytes. More than 1,024 batches is
// refused: the server may not recognise the repeats of more. One batch is let through even if
// it alone is larger.
func WithInFlight(batches, bytes int) ProducerOption {
	return func(s *producerSettings) { s.inFlight, s.windowBytes = batches, bytes }
}

// WithDeliveryTimeout is the longest time without an ack while a batch is not acked, over all
// repeats. Default: [DefaultDeliveryTimeout]. When it is over, the producer ends. Each ack begins it
// again, so the queue in front of a batch does not count. A stream that brings no ack for half of
// it is given up, and its batches are sent again on another one.
func WithDeliveryTimeout(timeout time.Duration) ProducerOption {
	return func(s *producerSettings) { s.timeout = timeout }
}

// WithProducerDurability is how durable batches must be before they are acked. Default: as
// the log's sync mode says.
func WithProducerDurability(durability Durability) ProducerOption {
	return func(s *producerSettings) { s.durability = durability }
}

// WithProducerWriterEpoch is the writer epoch that the log must have, or FENCED. It goes with
// every batch. A log that was fenced takes no batch without it. The state of a
// [DurableProducer] does not have it: give it at every start.
func WithProducerWriterEpoch(epoch uint64) ProducerOption {
	return func(s *producerSettings) { s.writerEpoch = &epoch }
}

// OnProducerInterruption calls back when a stream broke and everything unacked is going to be
// sent again. For logs and metrics; must not block.
func OnProducerInterruption(notice func(error)) ProducerOption {
	return func(s *producerSettings) { s.interrupted = notice }
}

// Number of newest batches of a producer whose repeats the server recognises.
const recognisedBatches = 1024

const (
	// DefaultBatchesInFlight is the maximum number of batches that a producer has in flight.
	DefaultBatchesInFlight = 512
	// DefaultBytesInFlight is the maximum number of bytes that a producer has in flight.
	DefaultBytesInFlight = 8 << 20
	// DefaultDeliveryTimeout is the longest time of a producer without an ack.
	DefaultDeliveryTimeout = 60 * time.Second
	// Maximum time that Close waits for the server to forget a random id.
	forgetTimeout = time.Second
	// Maximum time that Close waits for the server to end a stream whose batches are all acked.
	streamEndTimeout = time.Second
)

// errSilent: the producer has given up a stream that brought no ack.
var errSilent = errors.New("no ack for too long")

// Producer opens a producer of a log, which is created if there is none. It needs the rights
// append and list, and create only if there is no log. It keeps to that log: if it is deleted,
// appends fail with LOG_REPLACED or LOG_MISSING, and create no other. Waits
// for a server for as long as the delivery timeout, unless ctx ends before. Later calls do not
// depend on ctx; Close the producer.
func (c *Client) Producer(ctx context.Context, log string, options ...ProducerOption) (*Producer, error) {
	s := producerSettings{
		windowBytes: DefaultBytesInFlight,
		inFlight:    DefaultBatchesInFlight,
		timeout:     DefaultDeliveryTimeout,
	}
	for _, option := range options {
		option(&s)
	}
	if s.inFlight < 1 || s.inFlight > recognisedBatches {
		return nil, invalid("%d batches in flight: between 1 and %d can be", s.inFlight, recognisedBatches)
	}
	drawn := s.id == nil
	if s.logID == 0 || drawn {
		found, failure := c.ensureLog(ctx, log, s.timeout)
		if failure != nil {
			return nil, failure
		}
		if s.logID == 0 {
			s.logID = found.GetLogId()
		}
		if drawn {
			id := rand.Text()
			s.id, s.epoch = &id, found.GetFirstProducerEpoch()
		}
	}
	return c.newProducer(log, s, drawn), nil
}

// newProducer is a producer with these settings, whose id and log id are known.
func (c *Client) newProducer(log string, s producerSettings, drawn bool) *Producer {
	running, cancel := context.WithCancel(c.ctx)
	producer := &Producer{
		client:   c,
		settings: s,
		drawn:    drawn,
		log:      log,
		logID:    s.logID,
		cancel:   cancel,
		done:     make(chan struct{}),
		next:     s.sequence,
	}
	producer.expiry = time.AfterFunc(s.timeout, producer.expire)
	producer.expiry.Stop()
	producer.silence = time.AfterFunc(s.timeout/2, producer.endSilent)
	producer.silence.Stop()
	go producer.run(running)
	return producer
}

// ensureLog finds the log, or makes it if there is none. It asks first: only a log that is not
// there needs the right to create it.
func (c *Client) ensureLog(ctx context.Context, log string, timeout time.Duration) (*waldv1.Log, *Error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	patient := c.settings.retry.patient()
	create := callKind{repeat: harmless, policy: &patient}
	get := callKind{repeat: harmless, reads: true, policy: &patient}
	for {
		found, failure := call(ctx, c, get, c.logs.GetLog, &waldv1.GetLogRequest{Log: log})
		if failure == nil {
			return found.GetLog(), nil
		}
		if failure.Reason != ErrLogNotFound {
			return nil, failure
		}
		created, failure := call(ctx, c, create, c.logs.CreateLog, &waldv1.CreateLogRequest{Log: log})
		if failure == nil {
			return created.GetLog(), nil
		}
		// Created in between: by another client, or by an attempt whose answer was lost.
		if failure.Reason != ErrLogExists {
			return nil, failure
		}
	}
}

// ID is the producer's id.
func (p *Producer) ID() string { return *p.settings.id }

// Epoch is the producer's incarnation.
func (p *Producer) Epoch() uint64 { return p.settings.epoch }

// LogID is the number of the log that the producer keeps to.
func (p *Producer) LogID() uint64 { return p.logID }

// Send queues records as one batch and returns at once, unless too much is in flight: then it
// blocks. If ctx ends before there is room, nothing was sent. A batch that cannot be encoded,
// such as one with a header key that is not UTF-8, is refused, and the producer goes on. Send
// copies the records: the caller may use their buffers again. Of the options' condition, the
// sequence and the log's number are the producer's.
func (p *Producer) Send(ctx context.Context, records []Record, options ...AppendOption) (*Pending[LogAck], error) {
	s := appendSettings{durability: p.settings.durability}
	for _, option := range options {
		option(&s)
	}
	message := p.message(protoRecords(records), s)
	owned, failure := own(message.Batch)
	if failure != nil {
		return nil, failure
	}
	message.Batch = owned
	pending, failure := p.queue(ctx, message)
	if failure != nil {
		return nil, failure
	}
	return pending, nil
}

// message is a batch of these records. Its sequence is set when it is queued.
func (p *Producer) message(records []*waldv1.Record, s appendSettings) *waldv1.AppendSessionRequest {
	if s.condition.WriterEpoch == nil {
		s.condition.WriterEpoch = p.settings.writerEpoch
	}
	s.condition.LogID = &p.logID
	s.condition.Sequence = &Sequence{ProducerID: p.ID(), Epoch: p.settings.epoch}
	return &waldv1.AppendSessionRequest{Batch: &waldv1.AppendBatchRequest{
		Batches:    []*waldv1.LogBatch{{Log: p.log, Records: records, Condition: s.condition.proto()}},
		Durability: s.durability,
	}}
}

// queue numbers a message, which is the producer's own, and queues it as soon as there is room.
func (p *Producer) queue(ctx context.Context, message *waldv1.AppendSessionRequest) (*Pending[LogAck], *Error) {
	bytes := proto.Size(message)
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if failure := p.awaitRoom(ctx, bytes); failure != nil {
		return nil, failure
	}
	message.RequestId = p.next
	message.Batch.Batches[0].Condition.Producer.Sequence = p.next
	p.next++
	added := &producerBatch{
		Pending: newPending[LogAck](),
		message: message,
		bytes:   bytes,
	}
	p.unacked = append(p.unacked, added)
	p.bytes += bytes
	if len(p.unacked) == 1 {
		p.awaitAck()
	}
	p.change.raise()
	return added.Pending, nil
}

// awaitRoom waits until a batch of this size can be queued. The caller has the mutex.
func (p *Producer) awaitRoom(ctx context.Context, bytes int) *Error {
	for !p.hasRoom(bytes) && p.failure == nil && !p.closing {
		if !awaitChange(ctx, &p.mutex, &p.change) {
			return gaveUp(ctx, false)
		}
	}
	switch {
	case p.failure != nil:
		return p.afterFailure(false)
	case p.closing:
		return closed("the producer")
	}
	return nil
}

// Append sends records as one batch and waits for the ack.
func (p *Producer) Append(ctx context.Context, records []Record, options ...AppendOption) (LogAck, error) {
	pending, err := p.Send(ctx, records, options...)
	if err != nil {
		return LogAck{}, err
	}
	return pending.Wait(ctx)
}

// Close waits until all sent batches are acked, and ends the producer. The server forgets an id
// that was drawn at random. Its error is the failure that ended the producer, if there was one.
// If ctx ends before, the producer ends at once, and the outcome of batches without an ack is
// unknown.
func (p *Producer) Close(ctx context.Context) error {
	p.mutex.Lock()
	p.closing = true
	p.change.raise()
	p.endStreamSoon()
	p.mutex.Unlock()
	select {
	case <-p.done:
	case <-ctx.Done():
		p.fail(gaveUp(ctx, true), nil)
		<-p.done
	}
	p.mutex.Lock()
	failure, forgets := p.failure, p.drawn && p.next > p.settings.sequence
	p.drawn = p.drawn && !forgets
	p.mutex.Unlock()
	if failure != nil {
		return failure
	}
	if forgets {
		// If it fails, the server forgets the id once it has been idle for long enough.
		ctx, cancel := context.WithTimeout(ctx, forgetTimeout)
		defer cancel()
		_ = p.client.ForgetProducer(ctx, p.log, p.ID(), WithLogID(p.logID))
	}
	return nil
}

func (p *Producer) hasRoom(bytes int) bool {
	if len(p.unacked) == 0 {
		return true
	}
	return len(p.unacked) < p.settings.inFlight && p.bytes+bytes <= p.settings.windowBytes
}

// afterFailure is the error of batches after the end of the producer. It carries the reason.
func (p *Producer) afterFailure(sent bool) *Error { return behind(p.failure, sent) }

// behind is the error of a batch after the failure that ended its producer.
func behind(failure *Error, sent bool) *Error {
	e := earlierFailure(failure, sent)
	e.Reason, e.Facts, e.Retry = failure.Reason, failure.Facts, failure.Retry
	return e
}

// run opens streams, one after the other, for as long as there is something to send.
func (p *Producer) run(ctx context.Context) {
	defer close(p.done)
	defer p.cancel()
	defer p.expiry.Stop()
	defer p.silence.Stop()
	pauses := pauses{policy: p.client.settings.retry}
	for p.waitForWork(ctx) {
		watched, attempt := watchSending(ctx)
		acked, failure := p.deliver(watched, attempt)
		if acked {
			pauses.progress()
		}
		if failure == nil {
			continue
		}
		if !p.client.allows(guarded, failure, attempt, true) || ctx.Err() != nil {
			p.fail(failure, failingRequest(failure))
			return
		}
		pause := pauses.next(failure, attempt)
		if p.settings.interrupted != nil {
			p.settings.interrupted(failure)
		}
		p.interrupt(failure)
		p.client.sleep(ctx, pause)
	}
	if ctx.Err() != nil {
		p.fail(closed("the client"), nil)
	}
}

// waitForWork: false means that there will be none.
func (p *Producer) waitForWork(ctx context.Context) bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for {
		if p.failure != nil {
			return false
		}
		if len(p.unacked) > 0 {
			return ctx.Err() == nil
		}
		if p.closing || !awaitChange(ctx, &p.mutex, &p.change) {
			return false
		}
	}
}

// deliver sends all unacked batches, and later ones, on one stream, and takes the acks. No
// failure: the stream ended with nothing due.
func (p *Producer) deliver(running context.Context, a *attempt) (acked bool, failure *Error) {
	ctx, cancel := context.WithCancelCause(running)
	p.mutex.Lock()
	p.out = 0
	p.endStream = cancel
	p.silence.Reset(p.settings.timeout / 2)
	p.mutex.Unlock()
	stream, err := p.client.wal.AppendSession(ctx)
	if err != nil {
		defer cancel(nil)
		return false, p.broken(ctx, err, a, false)
	}
	sender := make(chan struct{})
	go func() {
		defer close(sender)
		p.send(ctx, stream)
	}()
	defer func() {
		cancel(nil)
		<-sender
	}()
	for {
		answer, err := stream.Recv()
		if err != nil {
			failure := p.broken(ctx, err, a, true)
			p.mutex.Lock()
			idle := len(p.unacked) == 0
			p.mutex.Unlock()
			if idle {
				// Nothing has failed. The next batch opens a stream, and gets a failure that lasts.
				return acked, nil
			}
			return acked, failure
		}
		if failure := p.acked(answer); failure != nil {
			return acked, failure
		}
		acked = true
	}
}

// broken is the failure of a stream that ended with this error.
func (p *Producer) broken(ctx context.Context, err error, a *attempt, sent bool) *Error {
	if context.Cause(ctx) == errSilent {
		return p.client.failedAt(a, lost("no ack for "+(p.settings.timeout/2).String(), sent))
	}
	return p.client.readError(ctx, err, a, sent)
}

// send brings the unacked batches onto the stream, and then later ones.
func (p *Producer) send(ctx context.Context, stream appendStream) {
	for {
		message := p.nextToSend(ctx)
		if message == nil {
			// Recv returns the error.
			_ = stream.CloseSend()
			return
		}
		if stream.Send(message) != nil {
			return
		}
	}
}

// nextToSend waits for a batch. Nil: there will be none on this stream.
func (p *Producer) nextToSend(ctx context.Context) *waldv1.AppendSessionRequest {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for p.out == len(p.unacked) {
		if p.closing || p.failure != nil || !awaitChange(ctx, &p.mutex, &p.change) {
			return nil
		}
	}
	if p.failure != nil || ctx.Err() != nil {
		return nil
	}
	p.out++
	return p.unacked[p.out-1].message
}

func (p *Producer) acked(answer *waldv1.AppendSessionResponse) *Error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.out == 0 || p.unacked[0].message.GetRequestId() != answer.GetRequestId() {
		return brokenContract("the ack of a batch in its order")
	}
	ack, failure := readBatchAck(answer.GetAck())
	if failure != nil {
		return failure
	}
	if len(ack.Appends) != 1 {
		return brokenContract("AppendBatchResponse.appends")
	}
	batch := p.unacked[0]
	p.unacked[0] = nil
	p.unacked = p.unacked[1:]
	p.out--
	p.bytes -= batch.bytes
	if len(p.unacked) > 0 {
		p.awaitAck()
	} else {
		p.expiry.Stop()
		p.silence.Stop()
	}
	batch.resolve(ack.Appends[0])
	p.change.raise()
	p.endStreamSoon()
	return nil
}

// awaitAck begins the time until the next ack. The caller has the mutex.
func (p *Producer) awaitAck() {
	p.overdue = time.Now().Add(p.settings.timeout)
	p.expiry.Reset(p.settings.timeout)
	p.silence.Reset(p.settings.timeout / 2)
}

// endSilent gives up a stream that has brought no ack for too long. An ack that comes at the same
// time does no harm: the server recognises the batches that are sent again.
func (p *Producer) endSilent() {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.endStream != nil {
		p.endStream(errSilent)
	}
}

// endStreamSoon ends the stream of a closing producer if the server does not: nothing else is due.
func (p *Producer) endStreamSoon() {
	if p.closing && len(p.unacked) == 0 && p.endStream != nil {
		end := p.endStream
		time.AfterFunc(streamEndTimeout, func() { end(nil) })
	}
}

// interrupt handles a broken stream. Its batches may have been applied, unless the server
// reports that they were not.
func (p *Producer) interrupt(failure *Error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if failure.Outcome == Unknown {
		for _, batch := range p.unacked[:p.out] {
			batch.unknown = true
		}
	}
	p.out = 0
	p.interruption = failure
}

// expire: there may have been no ack for too long.
func (p *Producer) expire() {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if len(p.unacked) == 0 || time.Now().Before(p.overdue) {
		// An ack came a moment ago, and has set the timer.
		return
	}
	failure := &Error{
		Code:    codes.DeadlineExceeded,
		Message: "no ack within " + p.settings.timeout.String(),
		Outcome: NotApplied,
		Retry:   Safe,
		cause:   context.DeadlineExceeded,
	}
	if last := p.interruption; last != nil {
		failure.Server = last.Server
		failure.Message += ": " + last.Message
		failure.cause = errors.Join(context.DeadlineExceeded, last)
	}
	if p.out > 0 || p.unacked[0].unknown {
		failure = failure.afterUnknown()
	}
	p.failLocked(failure, nil)
}

// fail ends the producer, and gives every batch that is not acked its error.
func (p *Producer) fail(failure *Error, failing *uint64) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.failLocked(failure, failing)
}

func (p *Producer) failLocked(failure *Error, failing *uint64) {
	if p.failure != nil {
		return
	}
	p.failure = failure
	for i, batch := range p.unacked {
		id, sent := batch.message.GetRequestId(), i < p.out
		e := errorOf(failure, failing, id, i == 0, sent)
		switch {
		case i == 0 && failing == nil:
			e = failure
		case e.cause == ErrEarlierFailure:
			e = p.afterFailure(sent)
		}
		if batch.unknown {
			e = e.afterUnknown()
		}
		batch.fail(e)
	}
	p.unacked, p.out, p.bytes = nil, 0, 0
	p.change.raise()
	p.cancel()
}
