package wald

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	encodingproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"wald.dev/client/go/waldv1"
)

// WithSharedAppends selects whether [Client.Append] and [Client.AppendBatch] share one stream for
// each server. Turn sharing off for a proxy that handles streams badly, and for instrumentation that
// must see one call for each append. Default: true. With [WithGRPC] the default is false, because
// interceptors must see each call. Appends of more than 64 KiB, and appends whose context has
// outgoing metadata, are always calls of their own.
func WithSharedAppends(share bool) DialOption {
	return func(s *settings) { s.sharedAppends = &share }
}

const (
	// Maximum encoded size of a request on a shared stream. A larger one would delay small ones.
	maxSharedBytes = 64 << 10
	// Time without a request in flight after which a shared stream is half-closed.
	sharedIdle = time.Second
	// Time without an answer after which a shared stream takes no more requests once a caller gives up.
	sharedSilence = 5 * time.Second
	// Time during which a server gets unary calls only, after it refused a shared stream.
	unaryPeriod = time.Minute
	// Maximum wait of Close for servers to end the streams that are half-closed.
	closePatience = time.Second
)

// errUnary: the request must be a unary call.
var errUnary = errors.New("this append is a call of its own")

// sharedStream is an append session that the appends of a client share. Its requests are
// independent of each other:
//
//	Append: add ──▶ due, by number ──▶ write, in order ──▶ server
//	        ◀────── answer or error ◀── read, in any order ◀──┘
//
// A node has one stream that takes requests. Older ones are half-closed, and deliver their answers.
type sharedStream struct {
	at *node
	// The opening of the stream, with its token.
	attempt *attempt
	ctx     context.Context
	cancel  context.CancelFunc

	// Guards all below. No caller locks the mutex of nodes while it holds this one.
	mutex sync.Mutex
	// Wakes the writer.
	work *sync.Cond
	// Requests without an answer, by number. Numbers below `out` were handed to gRPC.
	due  map[uint64]*sharedRequest
	next uint64
	out  uint64
	// It takes no more requests.
	closing bool
	ended   bool
	// When the first request since the last answer was handed to gRPC; zero: none was.
	silentSince time.Time
	// The time since which no request is due, if none is.
	idleSince time.Time
	idle      *time.Timer
}

// sharedRequest is one attempt of an append. All but the body is written before `done` is closed.
type sharedRequest struct {
	body   []byte
	done   chan struct{}
	answer *waldv1.AppendSessionResponse
	err    error
	sent   bool
	// The stream ended, and each of its requests becomes a unary call.
	unary bool
}

// sendAppend makes one attempt of an append.
func (c *Client) sendAppend(ctx context.Context, request *waldv1.AppendRequest, options ...grpc.CallOption) (*waldv1.AppendResponse, error) {
	answer, err := c.share(ctx, &waldv1.AppendSessionRequest{Independent: true, Append: request})
	switch {
	case err == errUnary:
		return c.wal.Append(ctx, request, options...)
	case err != nil:
		return nil, err
	case answer.AppendAck == nil:
		return nil, brokenContract("AppendSessionResponse.append_ack")
	}
	return answer.AppendAck, nil
}

// sendBatch makes one attempt of an append of a batch.
func (c *Client) sendBatch(ctx context.Context, request *waldv1.AppendBatchRequest, options ...grpc.CallOption) (*waldv1.AppendBatchResponse, error) {
	answer, err := c.share(ctx, &waldv1.AppendSessionRequest{Independent: true, Batch: request})
	switch {
	case err == errUnary:
		return c.wal.AppendBatch(ctx, request, options...)
	case err != nil:
		return nil, err
	case answer.Ack == nil:
		return nil, brokenContract("AppendSessionResponse.ack")
	}
	return answer.Ack, nil
}

// share makes one attempt on the stream of the current server. Its error is errUnary if the request
// must be a unary call.
func (c *Client) share(ctx context.Context, message *waldv1.AppendSessionRequest) (*waldv1.AppendSessionResponse, error) {
	if !c.settings.sharesAppends() {
		return nil, errUnary
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if _, found := metadata.FromOutgoingContext(ctx); found {
		return nil, errUnary
	}
	a, _ := ctx.Value(attemptKey{}).(*attempt)
	body := encodeShared(message)
	if body == nil {
		return nil, errUnary
	}
	request := &sharedRequest{body: body, done: make(chan struct{})}
	token := ""
	if c.settings.token != nil {
		token = c.settings.token.current()
	}
	stream, id := c.nodes.share(request, token)
	if stream == nil {
		return nil, errUnary
	}
	a.at = stream.at
	select {
	case <-request.done:
	case <-ctx.Done():
		if found, sent := stream.forget(id); found {
			a.sent.Store(sent)
			return nil, ctx.Err()
		}
		// The answer came at the same time.
		<-request.done
	}
	if request.unary {
		return nil, errUnary
	}
	a.sent.Store(request.sent)
	a.token.Store(stream.attempt.token.Load())
	return request.answer, request.err
}

func (s *settings) sharesAppends() bool {
	if s.sharedAppends != nil {
		return *s.sharedAppends
	}
	return len(s.dial) == 0
}

// encodeShared encodes a request, with room for its number. Nil: it is too large, or gRPC will
// refuse it.
func encodeShared(message *waldv1.AppendSessionRequest) []byte {
	size := proto.Size(message)
	if size > maxSharedBytes {
		return nil
	}
	options := proto.MarshalOptions{UseCachedSize: true}
	body, err := options.MarshalAppend(make([]byte, 0, size+1+protowire.SizeVarint(1<<63)), message)
	if err != nil {
		return nil
	}
	return body
}

// numbered completes an encoded request.
func numbered(body []byte, id uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(body, 1, protowire.VarintType), id)
}

// sharedCodec sends requests that are already encoded. The goroutine of a caller encodes its own
// request: an error stops no other request, and the caller's data is not read after its call.
type sharedCodec struct{ encoding.CodecV2 }

func (sharedCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}

var (
	sharedDesc   = &grpc.StreamDesc{StreamName: "AppendSession", ServerStreams: true, ClientStreams: true}
	sharedFormat = grpc.ForceCodecV2(sharedCodec{encoding.GetCodecV2(encodingproto.Name)})
)

// share queues a request on the stream of the current server. `token` is the current one, or empty. A nil
// stream: the server gets unary calls.
func (n *nodes) share(request *sharedRequest, token string) (stream *sharedStream, id uint64) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	at := n.current
	if n.closed || !at.unaryUntil.IsZero() && time.Now().Before(at.unaryUntil) {
		return nil, 0
	}
	if at.stream != nil {
		// A stream has the token with which it was opened. Another token needs another stream.
		if used := at.stream.attempt.token.Load(); used != nil && *used != token {
			at.stream.finish()
		}
		if id, added := at.stream.add(request); added {
			return at.stream, id
		}
	}
	at.stream = at.openShared()
	// The stream has its first request before it can fail.
	id, _ = at.stream.add(request)
	go at.stream.write()
	return at.stream, id
}

// openShared makes a stream to a server. The caller holds the mutex of nodes, and starts `write`.
func (at *node) openShared() *sharedStream {
	ctx, cancel := context.WithCancel(context.Background())
	watched, attempt := watchSending(ctx)
	attempt.at = at
	s := &sharedStream{
		at:        at,
		attempt:   attempt,
		ctx:       watched,
		cancel:    cancel,
		due:       map[uint64]*sharedRequest{},
		idleSince: time.Now(),
	}
	s.work = sync.NewCond(&s.mutex)
	s.mutex.Lock()
	s.idle = time.AfterFunc(sharedIdle, s.tick)
	s.mutex.Unlock()
	at.calls++
	at.of.streams.Add(1)
	return s
}

// add queues a request. False: the stream takes no more requests.
func (s *sharedStream) add(request *sharedRequest) (id uint64, added bool) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.closing || s.ended {
		return 0, false
	}
	id = s.next
	s.next++
	s.due[id] = request
	s.work.Signal()
	return id, true
}

// forget drops a request whose caller has given up. False: the request has its answer. A silent
// stream takes no more requests then: it may end at a proxy whose server is gone, and another
// stream may reach the next server. Requests that wait keep waiting: the server may only be slow.
func (s *sharedStream) forget(id uint64) (found, sent bool) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	found = s.take(id) != nil
	if found && !s.silentSince.IsZero() && time.Since(s.silentSince) >= sharedSilence {
		s.closing = true
		s.work.Signal()
	}
	return found, id < s.out
}

// take removes a request from those that are due. Nil: it is not due.
func (s *sharedStream) take(id uint64) *sharedRequest {
	request := s.due[id]
	if request != nil {
		delete(s.due, id)
		if len(s.due) == 0 {
			s.idleSince = time.Now()
		}
	}
	return request
}

// write opens the stream, and brings the requests onto it.
func (s *sharedStream) write() {
	stream, err := s.at.conn.NewStream(s.ctx, sharedDesc, waldv1.WalService_AppendSession_FullMethodName, sharedFormat)
	if err != nil {
		s.end(err)
		return
	}
	go s.read(stream)
	for {
		id, request := s.nextOut()
		if request == nil {
			// RecvMsg returns the error.
			_ = stream.CloseSend()
			return
		}
		if stream.SendMsg(numbered(request.body, id)) != nil {
			// The transport has not taken this one. RecvMsg returns the reason.
			s.mutex.Lock()
			s.out = id
			s.mutex.Unlock()
			return
		}
	}
}

// nextOut waits for a request. Nil: there will be none.
func (s *sharedStream) nextOut() (uint64, *sharedRequest) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	for !s.ended {
		for s.out < s.next {
			id := s.out
			s.out++
			if request := s.due[id]; request != nil {
				if s.silentSince.IsZero() {
					s.silentSince = time.Now()
				}
				return id, request
			}
		}
		if s.closing {
			break
		}
		s.work.Wait()
	}
	return 0, nil
}

// read takes the answers, until the end.
func (s *sharedStream) read(stream grpc.ClientStream) {
	owner, first := "", true
	for {
		answer := new(waldv1.AppendSessionResponse)
		if err := stream.RecvMsg(answer); err != nil {
			s.end(err)
			return
		}
		if first {
			first = false
			if header, err := stream.Header(); err == nil && len(header.Get(ownerHeader)) > 0 {
				owner = header.Get(ownerHeader)[0]
			}
		}
		if owner != "" {
			s.at.of.approach(s.at, owner)
		}
		s.mutex.Lock()
		request := s.take(answer.GetRequestId())
		s.silentSince = time.Time{}
		s.mutex.Unlock()
		if request != nil {
			request.answer, request.err, request.sent = answer, errorIn(answer), true
			close(request.done)
		}
	}
}

// errorIn is the error of a refused request, as a unary call returns it.
func errorIn(answer *waldv1.AppendSessionResponse) error {
	if len(answer.GetError()) == 0 {
		return nil
	}
	refusal := new(status.Status)
	if err := proto.Unmarshal(answer.GetError(), refusal); err != nil || refusal.GetCode() == int32(codes.OK) {
		return brokenContract("a status in AppendSessionResponse.error")
	}
	return grpcstatus.FromProto(refusal).Err()
}

// end gives every request that is due its error.
func (s *sharedStream) end(err error) {
	n := s.at.of
	unary := isForOne(err)
	if unary {
		n.mutex.Lock()
		s.at.unaryUntil = time.Now().Add(unaryPeriod)
		n.mutex.Unlock()
	}
	s.mutex.Lock()
	due, out := s.due, s.out
	s.due, s.ended = nil, true
	s.idle.Stop()
	s.work.Signal()
	s.mutex.Unlock()
	s.cancel()
	for id, request := range due {
		request.err, request.sent, request.unary = err, id < out, unary
		close(request.done)
	}
	n.end(s.at)
	n.streams.Done()
}

// isForOne tells whether a stream ended because of one request, or because the server or a proxy
// does not know independent requests. Nothing of the requests that are due was applied, and each
// gets its own answer by a unary call.
func isForOne(err error) bool {
	if err == io.EOF {
		return false
	}
	failure := readError(context.Background(), err, true)
	switch failure.Code {
	case codes.Unimplemented:
		return true
	// The state of the server or the credential ended the stream.
	case codes.Unavailable, codes.Unauthenticated, codes.ResourceExhausted:
		return false
	}
	return failure.Reason != "" && failure.Outcome == NotApplied
}

// finish half-closes the stream behind the requests that are queued.
func (s *sharedStream) finish() {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.closing = true
	s.work.Signal()
}

// tick half-closes an idle stream. If the server does not end the stream then, tick cancels it.
func (s *sharedStream) tick() {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	rest := sharedIdle - time.Since(s.idleSince)
	switch {
	case s.ended:
	case len(s.due) > 0:
		s.idle.Reset(sharedIdle)
	case rest > 0:
		s.idle.Reset(rest)
	case s.closing:
		s.cancel()
	default:
		s.closing = true
		s.work.Signal()
		s.idle.Reset(sharedIdle)
	}
}
