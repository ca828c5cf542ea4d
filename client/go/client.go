package wald

import (
	"context"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/stats"

	"wald.dev/client/go/waldv1"
)

// DefaultEndpoint is where a server listens unless configured otherwise.
const DefaultEndpoint = "127.0.0.1:6925"

// DefaultPort is the port of an endpoint that names none.
const DefaultPort = "6925"

// Answers stay below 1 MiB unless one record alone is larger; the server's limit on
// records can be raised, so leave room.
const maxAnswerBytes = 64 << 20

// Client is a client of one Wald server. It may be used by many goroutines at once; they
// share one connection, which is made again when it breaks.
type Client struct {
	endpoint string
	settings settings
	conn     *grpc.ClientConn
	wal      waldv1.WalServiceClient
	logs     waldv1.LogServiceClient
	cursors  waldv1.CursorServiceClient

	// Ends calls without an end of their own: scans, followers, sessions.
	ctx    context.Context
	cancel context.CancelFunc

	mutex    sync.Mutex
	closed   bool
	underway sync.WaitGroup
}

type settings struct {
	connectTimeout    time.Duration
	keepaliveInterval time.Duration
	keepaliveTimeout  time.Duration
	timeout           time.Duration
	silenceTimeout    time.Duration
	retry             RetryPolicy
	credentials       credentials.TransportCredentials
	dial              []grpc.DialOption
}

// DialOption is a setting of a client.
type DialOption func(*settings)

// WithConnectTimeout bounds the time to make a connection. Default: 5 s.
func WithConnectTimeout(timeout time.Duration) DialOption {
	return func(s *settings) { s.connectTimeout = timeout }
}

// WithKeepalive pings the server this often, also when idle, and gives the connection up if
// no answer comes within timeout. Default: 10 s (the least that gRPC allows), 5 s. Without it
// a client would never notice that the network is gone.
func WithKeepalive(interval, timeout time.Duration) DialOption {
	return func(s *settings) { s.keepaliveInterval, s.keepaliveTimeout = interval, timeout }
}

// WithTimeout is the deadline of calls whose context has none, over all their attempts.
// Default: 10 s. Scans have none.
func WithTimeout(timeout time.Duration) DialOption {
	return func(s *settings) { s.timeout = timeout }
}

// WithSilenceTimeout is how long a scan may be silent before it counts as lost. Default:
// 60 s; the server sends a heartbeat after 15 s.
func WithSilenceTimeout(timeout time.Duration) DialOption {
	return func(s *settings) { s.silenceTimeout = timeout }
}

// WithRetry is how calls are repeated.
func WithRetry(policy RetryPolicy) DialOption {
	return func(s *settings) { s.retry = policy }
}

// WithTransportCredentials secures the connection, as to a proxy that speaks TLS. Default:
// plain text.
func WithTransportCredentials(creds credentials.TransportCredentials) DialOption {
	return func(s *settings) { s.credentials = creds }
}

// WithGRPC hands options to grpc.NewClient, such as interceptors.
func WithGRPC(options ...grpc.DialOption) DialOption {
	return func(s *settings) { s.dial = append(s.dial, options...) }
}

// DefaultTimeout is the deadline of calls whose context has none.
const DefaultTimeout = 10 * time.Second

// Dial makes a client of the server at endpoint, such as DefaultEndpoint or
// "http://localhost". The port is DefaultPort unless the endpoint names another. Dial connects
// with the first call.
func Dial(endpoint string, options ...DialOption) (*Client, error) {
	s := settings{
		connectTimeout:    5 * time.Second,
		keepaliveInterval: 10 * time.Second,
		keepaliveTimeout:  5 * time.Second,
		timeout:           DefaultTimeout,
		silenceTimeout:    60 * time.Second,
		retry:             DefaultRetryPolicy(),
	}
	for _, option := range options {
		option(&s)
	}
	target, err := parseEndpoint(endpoint, &s)
	if err != nil {
		return nil, err
	}
	conn, failure := grpc.NewClient(target, s.dialOptions()...)
	if failure != nil {
		return nil, invalid("%q is not an endpoint such as %s: %v", endpoint, DefaultEndpoint, failure)
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &Client{
		endpoint: endpoint,
		settings: s,
		conn:     conn,
		wal:      waldv1.NewWalServiceClient(conn),
		logs:     waldv1.NewLogServiceClient(conn),
		cursors:  waldv1.NewCursorServiceClient(conn),
		ctx:      ctx,
		cancel:   cancel,
	}, nil
}

// parseEndpoint takes the scheme off, if there is one that fits the credentials.
func parseEndpoint(endpoint string, s *settings) (string, error) {
	target := endpoint
	if scheme, rest, found := strings.Cut(endpoint, "://"); found {
		switch {
		case scheme == "https" && s.credentials == nil:
			return "", invalid("%q asks for TLS: give WithTransportCredentials", endpoint)
		case scheme == "http" && s.credentials != nil:
			return "", invalid("%q is plain text, but there are credentials", endpoint)
		case scheme == "http", scheme == "https":
			target = strings.TrimSuffix(rest, "/")
		}
	}
	if strings.Contains(target, "://") || strings.HasPrefix(target, "unix:") || strings.HasPrefix(target, "dns:") {
		// A name of gRPC's own, such as dns:///wald:6925.
		return target, nil
	}
	return completed(target)
}

// completed gives an endpoint without a port the default one. gRPC would take 443.
func completed(target string) (string, error) {
	if strings.Contains(target, "@") {
		return "", invalid("an endpoint has no user name: give one such as %s", DefaultEndpoint)
	}
	host, port, failure := net.SplitHostPort(target)
	if failure != nil {
		bare := strings.TrimSuffix(strings.TrimPrefix(target, "["), "]")
		host, port, failure = net.SplitHostPort(net.JoinHostPort(bare, DefaultPort))
	}
	number, wrong := strconv.ParseUint(port, 10, 16)
	if failure != nil || host == "" || strings.Contains(host, "/") {
		return "", invalid("%q is not an endpoint such as %s", target, DefaultEndpoint)
	}
	if wrong != nil || number == 0 {
		return "", invalid("%q is not an endpoint such as %s: its port is not a number from 1 to 65535", target, DefaultEndpoint)
	}
	return net.JoinHostPort(host, port), nil
}

func (s *settings) dialOptions() []grpc.DialOption {
	creds := s.credentials
	if creds == nil {
		creds = insecure.NewCredentials()
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithUserAgent("wald-client-go"),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time:                s.keepaliveInterval,
			Timeout:             s.keepaliveTimeout,
			PermitWithoutStream: true,
		}),
		// The pauses between attempts are this package's; the transport must be ready again
		// as soon as the server is.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay:  20 * time.Millisecond,
				Multiplier: 2,
				Jitter:     0.3,
				MaxDelay:   s.retry.MaxPause,
			},
			MinConnectTimeout: s.connectTimeout,
		}),
		// A scan's messages are up to 1 MiB: a few must be underway for full speed, and one
		// slow stream must not hold up the others of the connection.
		grpc.WithInitialWindowSize(4 << 20),
		grpc.WithInitialConnWindowSize(16 << 20),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswerBytes)),
		// A policy of the method's name cannot know which appends are safe to repeat.
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
		grpc.WithStatsHandler(sentHandler{}),
	}
	return append(options, s.dial...)
}

// Close ends reads, scans and followers, waits for the other calls under way, and closes the
// connection. Close producers and sessions before: their unsent batches fail otherwise.
func (c *Client) Close() error {
	c.mutex.Lock()
	already := c.closed
	c.closed = true
	c.mutex.Unlock()
	if already {
		return nil
	}
	c.cancel()
	c.underway.Wait()
	return c.conn.Close()
}

// Conn is the connection, for stubs of waldv1, health and reflection that this package does not
// wrap. Nothing is repeated on it.
func (c *Client) Conn() grpc.ClientConnInterface { return c.conn }

// begin counts a call that Close waits for.
func (c *Client) begin() *Error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.closed {
		return closed("the client")
	}
	c.underway.Add(1)
	return nil
}

// callKind describes how a call may be repeated, and the meaning of its failure.
type callKind struct {
	repeat repeat
	reads  bool
	policy *RetryPolicy
	// Comes on top of the default deadline.
	extra time.Duration
}

var reading = callKind{repeat: harmless, reads: true}

func writing(repeat repeat) callKind { return callKind{repeat: repeat} }

// call makes a unary call, and repeats it as far as that is safe and the deadline reaches.
func call[Q, A any](
	ctx context.Context,
	c *Client,
	kind callKind,
	send func(context.Context, Q, ...grpc.CallOption) (A, error),
	request Q,
) (A, *Error) {
	var none A
	if err := c.begin(); err != nil {
		return none, err
	}
	defer c.underway.Done()
	if _, given := ctx.Deadline(); !given {
		bounded, cancel := context.WithTimeout(ctx, c.settings.timeout+kind.extra)
		defer cancel()
		ctx = bounded
	}
	if kind.reads {
		bounded, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(c.ctx, cancel)()
		ctx = bounded
	}
	policy := c.settings.retry
	if kind.policy != nil {
		policy = *kind.policy
	}
	unknown := false
	for failures := 1; ; failures++ {
		attempt, sent := watchSending(ctx)
		answer, err := send(attempt, request)
		if err == nil {
			return answer, nil
		}
		failure := readError(ctx, err, sent.Load())
		pause := policy.pause(failures, failure)
		deadline, _ := ctx.Deadline()
		last := !kind.repeat.allows(failure) ||
			failures >= policy.MaxAttempts ||
			time.Now().Add(pause).After(deadline)
		if !last {
			unknown = unknown || failure.Outcome == Unknown
			last = !c.sleep(ctx, pause)
		}
		if last {
			if unknown {
				failure = failure.afterUnknown()
			}
			if kind.reads {
				failure = failure.ofRead()
			}
			return none, failure
		}
	}
}

// sleep pauses before the next attempt, while the transport tries to connect. False: the
// context ended.
func (c *Client) sleep(ctx context.Context, pause time.Duration) bool {
	c.conn.ResetConnectBackoff()
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// sentHandler notes which calls have left: a call that failed before may be repeated
// whatever it does.
type sentHandler struct{}

type sentKey struct{}

// watchSending makes a context for one attempt, and a flag that rises when it goes out.
func watchSending(ctx context.Context) (context.Context, *atomic.Bool) {
	sent := new(atomic.Bool)
	return context.WithValue(ctx, sentKey{}, sent), sent
}

func (sentHandler) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

func (sentHandler) HandleRPC(ctx context.Context, event stats.RPCStats) {
	// Comes once a connection has taken the request's headers.
	if _, ok := event.(*stats.OutHeader); !ok {
		return
	}
	if sent, ok := ctx.Value(sentKey{}).(*atomic.Bool); ok {
		sent.Store(true)
	}
}

func (sentHandler) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

func (sentHandler) HandleConn(context.Context, stats.ConnStats) {}
