package wald

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"wald.dev/client/go/waldv1"
)

// fake is a server that follows a test's script, on a port of its own.
type fake struct {
	waldv1.UnimplementedWalServiceServer
	waldv1.UnimplementedLogServiceServer
	waldv1.UnimplementedCursorServiceServer
	listener *breakable
	server   *grpc.Server
	options  []grpc.ServerOption

	append func(*waldv1.AppendRequest) (*waldv1.AppendResponse, error)
	batch  func(*waldv1.AppendBatchRequest) (*waldv1.AppendBatchResponse, error)
	// Serves a stream of independent requests. Nil: each gets the answer of append or batch.
	shared func(sessionStream) error
	// Numbers of unary appends and of streams of independent requests.
	unary, streams atomic.Int32

	session func(waldv1.WalService_AppendSessionServer) error
	scan    func(*waldv1.ScanRequest, waldv1.WalService_ScanServer) error
	tail    func(*waldv1.GetTailRequest) (*waldv1.GetTailResponse, error)
	fence   func(*waldv1.FenceRequest) (*waldv1.FenceResponse, error)
	create  func(*waldv1.CreateLogRequest) (*waldv1.CreateLogResponse, error)
	get     func(*waldv1.GetLogRequest) (*waldv1.GetLogResponse, error)
	forget  func(*waldv1.ForgetProducerRequest) (*waldv1.ForgetProducerResponse, error)
	commit  func(*waldv1.CommitCursorRequest) (*waldv1.CommitCursorResponse, error)
}

func (f *fake) Append(_ context.Context, r *waldv1.AppendRequest) (*waldv1.AppendResponse, error) {
	f.unary.Add(1)
	return f.append(r)
}
func (f *fake) AppendBatch(_ context.Context, r *waldv1.AppendBatchRequest) (*waldv1.AppendBatchResponse, error) {
	f.unary.Add(1)
	return f.batch(r)
}

// AppendSession reads the first request: it knows the kind of the session.
func (f *fake) AppendSession(s sessionStream) error {
	if f.append == nil && f.batch == nil && f.shared == nil {
		return f.session(s)
	}
	first, err := s.Recv()
	if err == nil {
		s = &rewound{sessionStream: s, first: first}
	}
	if !first.GetIndependent() && f.session != nil {
		return f.session(s)
	}
	if err != nil {
		return err
	}
	f.streams.Add(1)
	if f.shared != nil {
		return f.shared(s)
	}
	return f.answerAll(s)
}

// answerAll answers independent requests as calls of their own, each as soon as it can.
func (f *fake) answerAll(s sessionStream) error {
	var answers sync.WaitGroup
	defer answers.Wait()
	var sending sync.Mutex
	for {
		request, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		answers.Go(func() {
			answer := f.answerOf(request)
			sending.Lock()
			defer sending.Unlock()
			s.Send(answer)
		})
	}
}

func (f *fake) answerOf(request *waldv1.AppendSessionRequest) *waldv1.AppendSessionResponse {
	answer := &waldv1.AppendSessionResponse{RequestId: request.GetRequestId()}
	var err error
	if request.Append != nil {
		answer.AppendAck, err = f.append(request.Append)
	} else {
		answer.Ack, err = f.batch(request.Batch)
	}
	if err != nil {
		answer.AppendAck, answer.Ack, answer.Error = nil, nil, encoded(err)
	}
	return answer
}

// encoded is an error as the field of an answer has it.
func encoded(err error) []byte {
	refusal, _ := status.FromError(err)
	bytes, _ := proto.Marshal(refusal.Proto())
	return bytes
}

// rewound is a stream whose first request comes again.
type rewound struct {
	sessionStream
	first *waldv1.AppendSessionRequest
}

func (r *rewound) Recv() (*waldv1.AppendSessionRequest, error) {
	if first := r.first; first != nil {
		r.first = nil
		return first, nil
	}
	return r.sessionStream.Recv()
}
func (f *fake) Scan(r *waldv1.ScanRequest, s waldv1.WalService_ScanServer) error {
	return f.scan(r, s)
}
func (f *fake) GetTail(_ context.Context, r *waldv1.GetTailRequest) (*waldv1.GetTailResponse, error) {
	return f.tail(r)
}
func (f *fake) Fence(_ context.Context, r *waldv1.FenceRequest) (*waldv1.FenceResponse, error) {
	return f.fence(r)
}
func (f *fake) CreateLog(_ context.Context, r *waldv1.CreateLogRequest) (*waldv1.CreateLogResponse, error) {
	return f.create(r)
}
func (f *fake) GetLog(_ context.Context, r *waldv1.GetLogRequest) (*waldv1.GetLogResponse, error) {
	return f.get(r)
}
func (f *fake) ForgetProducer(_ context.Context, r *waldv1.ForgetProducerRequest) (*waldv1.ForgetProducerResponse, error) {
	if f.forget == nil {
		return new(waldv1.ForgetProducerResponse), nil
	}
	return f.forget(r)
}
func (f *fake) CommitCursor(_ context.Context, r *waldv1.CommitCursorRequest) (*waldv1.CommitCursorResponse, error) {
	return f.commit(r)
}

// breakable is a listener whose connections can be closed.
type breakable struct {
	net.Listener
	mutex       sync.Mutex
	connections []net.Conn
}

func (b *breakable) Accept() (net.Conn, error) {
	connection, err := b.Listener.Accept()
	if err == nil {
		b.mutex.Lock()
		defer b.mutex.Unlock()
		b.connections = append(b.connections, connection)
	}
	return connection, err
}

// drop closes every connection.
func (b *breakable) drop() {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	for _, connection := range b.connections {
		connection.Close()
	}
	b.connections = nil
}

// start serves the fake and dials it, with short pauses.
func (f *fake) start(t *testing.T, options ...DialOption) *Client {
	t.Helper()
	f.serve(t, "127.0.0.1")
	return f.dial(t, options...)
}

// serve serves the fake on a port of this host, and gives its address.
func (f *fake) serve(t *testing.T, host string) string {
	t.Helper()
	listener, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	f.listener = &breakable{Listener: listener}
	f.server = grpc.NewServer(f.options...)
	waldv1.RegisterWalServiceServer(f.server, f)
	waldv1.RegisterLogServiceServer(f.server, f)
	waldv1.RegisterCursorServiceServer(f.server, f)
	go f.server.Serve(f.listener)
	t.Cleanup(f.server.Stop)
	return listener.Addr().String()
}

// dial makes another client of the fake.
func (f *fake) dial(t *testing.T, options ...DialOption) *Client {
	t.Helper()
	return dial(t, f.listener.Addr().String(), options...)
}

func dial(t *testing.T, endpoint string, options ...DialOption) *Client {
	t.Helper()
	policy := RetryPolicy{MaxAttempts: 5, FirstPause: 10 * time.Millisecond, MaxPause: 100 * time.Millisecond}
	client, err := Dial(endpoint, append([]DialOption{WithRetry(policy)}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// soon is a context for calls that must not take long.
func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}
