package wald

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"wald.dev/client/go/waldv1"
)

// fake is a server that follows a test's script, on a port of its own.
type fake struct {
	waldv1.UnimplementedWalServiceServer
	waldv1.UnimplementedLogServiceServer
	listener *breakable
	server   *grpc.Server
	options  []grpc.ServerOption

	append  func(*waldv1.AppendRequest) (*waldv1.AppendResponse, error)
	session func(waldv1.WalService_AppendSessionServer) error
	scan    func(*waldv1.ScanRequest, waldv1.WalService_ScanServer) error
	tail    func(*waldv1.GetTailRequest) (*waldv1.GetTailResponse, error)
	create  func(*waldv1.CreateLogRequest) (*waldv1.CreateLogResponse, error)
	get     func(*waldv1.GetLogRequest) (*waldv1.GetLogResponse, error)
	forget  func(*waldv1.ForgetProducerRequest) (*waldv1.ForgetProducerResponse, error)
}

func (f *fake) Append(_ context.Context, r *waldv1.AppendRequest) (*waldv1.AppendResponse, error) {
	return f.append(r)
}
func (f *fake) AppendSession(s waldv1.WalService_AppendSessionServer) error { return f.session(s) }
func (f *fake) Scan(r *waldv1.ScanRequest, s waldv1.WalService_ScanServer) error {
	return f.scan(r, s)
}
func (f *fake) GetTail(_ context.Context, r *waldv1.GetTailRequest) (*waldv1.GetTailResponse, error) {
	return f.tail(r)
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
