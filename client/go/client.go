package wald

import (
	"cmp"
	"context"
	"io"
	"net"
	"os"
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
	"google.golang.org/grpc/status"

	"wald.dev/client/go/waldv1"
)

// DefaultEndpoint is where a server listens unless configured otherwise.
const DefaultEndpoint = "127.0.0.1:6925"

// DefaultPort is the port of an endpoint that names none.
const DefaultPort = "6925"

// Answers stay below 1 MiB unless one record alone is larger; the server's limit on
// records can be raised, so leave room.
const maxAnswerBytes = 64 << 20

// Client is a client of one Wald server, or of several nodes that share a store. Calls go to one
// node at a time. It may be used by many goroutines at once; they share one connection, which is
// made again when it breaks.
type Client struct {
	settings settings
	nodes    *nodes
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
	// Nil: the default.
	sharedAppends *bool
	tls           tlsFiles
	// Nil: calls carry no token.
	token              *tokenSource
	allowInsecureToken bool
	lastTLS            *lastTLSProblem
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

// WithTransportCredentials secures the connection by credentials of the caller's own. Default: an
// endpoint that begins with https:// gets TLS by the other options, and another one plaintext.
func WithTransportCredentials(creds credentials.TransportCredentials) DialOption {
	return func(s *settings) { s.credentials = creds }
}

// WithGRPC hands options to grpc.NewClient, such as interceptors. Each append is then a call of its
// own, unless [WithSharedAppends] is given as well.
func WithGRPC(options ...grpc.DialOption) DialOption {
	return func(s *settings) { s.dial = append(s.dial, options...) }
}

// DefaultTimeout is the deadline of calls whose context has none.
const DefaultTimeout = 10 * time.Second

// Dial makes a client of the server at endpoint, such as DefaultEndpoint, "http://localhost" or
// "https://wald.internal". The port is DefaultPort unless the endpoint names another. Dial reads
// the files of TLS and of the token now, and connects with the first call.
//
// The endpoint may list several nodes that share a store, with commas: "a:6925,b:6925" or
// "https://a,https://b". All have the same scheme. Calls go to one of them, first to the first.
// When it is not reached, starts or stops, the next attempt goes to the next of the list. When a
// node names another as the owner of the store (MOVED), the client goes there at once, whether
// the owner is in the list or not. When a node answers for the owner, the client goes there as soon
// as it has a connection. It sends its token to the owner, too, and checks the owner's
// certificate as always: without [WithServerName] it must name the owner's host.
func Dial(endpoint string, options ...DialOption) (*Client, error) {
	s := settings{
		connectTimeout:    5 * time.Second,
		keepaliveInterval: 10 * time.Second,
		keepaliveTimeout:  5 * time.Second,
		timeout:           DefaultTimeout,
		silenceTimeout:    60 * time.Second,
		retry:             DefaultRetryPolicy(),
		lastTLS:           new(lastTLSProblem),
	}
	for _, option := range options {
		option(&s)
	}
	targets, failure := parseEndpoints(endpoint, &s)
	if failure != nil {
		return nil, failure
	}
	if err := s.secure(endpoint, targets); err != nil {
		return nil, err
	}
	servers, failure := newNodes(targets, &s)
	if failure != nil {
		return nil, failure
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &Client{
		settings: s,
		nodes:    servers,
		wal:      waldv1.NewWalServiceClient(servers),
		logs:     waldv1.NewLogServiceClient(servers),
		cursors:  waldv1.NewCursorServiceClient(servers),
		ctx:      ctx,
		cancel:   cancel,
	}, nil
}

// FromEnv makes a client of the server that the environment names. An empty variable counts as
// absent, and options come after the environment.
//
//   - WALD_ENDPOINT: the endpoint, or several with commas, as in [Dial]. Default: DefaultEndpoint.
//   - WALD_TLS_CA, WALD_TLS_CERT, WALD_TLS_KEY, WALD_TLS_SERVER_NAME: as [WithTLSCA], [WithTLSCert],
//     [WithServerName].
//   - WALD_TOKEN_FILE, WALD_TOKEN: as [WithTokenFile], [WithToken]; the file comes first.
func FromEnv(options ...DialOption) (*Client, error) {
	var found []DialOption
	if ca := os.Getenv("WALD_TLS_CA"); ca != "" {
		found = append(found, WithTLSCA(ca))
	}
	if cert, key := os.Getenv("WALD_TLS_CERT"), os.Getenv("WALD_TLS_KEY"); cert != "" || key != "" {
		found = append(found, WithTLSCert(cert, key))
	}
	if name := os.Getenv("WALD_TLS_SERVER_NAME"); name != "" {
		found = append(found, WithServerName(name))
	}
	if path, token := os.Getenv("WALD_TOKEN_FILE"), os.Getenv("WALD_TOKEN"); path != "" {
		found = append(found, WithTokenFile(path))
	} else if token != "" {
		found = append(found, WithToken(token))
	}
	return Dial(cmp.Or(os.Getenv("WALD_ENDPOINT"), DefaultEndpoint), append(found, options...)...)
}

// secure chooses the credentials of the connection and of the calls.
func (s *settings) secure(endpoint string, targets []string) error {
	overTLS := isHTTPS(endpoint)
	given := s.credentials != nil
	switch {
	case given && s.tls != (tlsFiles{}):
		return invalid("WithTransportCredentials and other settings of TLS exclude each other")
	case !given && !overTLS && s.tls != (tlsFiles{}):
		return invalid("%q is not an endpoint for TLS: with settings of TLS it must begin with https://", endpoint)
	case !given:
		door := &doorCredentials{last: s.lastTLS}
		if overTLS {
			files, problem := loadFiles(s.tls)
			if problem != nil {
				return problem.asError()
			}
			door.files = files
		}
		s.credentials = door
	}
	if s.token == nil {
		return nil
	}
	if failure := s.token.load(); failure != nil {
		return failure
	}
	for _, target := range targets {
		if failure := s.mayCarryToken(target); failure != nil {
			return failure
		}
	}
	return nil
}

// mayCarryToken is nil if the calls to a target may carry the token, or if there is none.
func (s *settings) mayCarryToken(target string) *Error {
	plaintext := s.credentials.Info().SecurityProtocol == insecure.NewCredentials().Info().SecurityProtocol
	if s.token != nil && plaintext && !s.allowInsecureToken && !isLoopback(target) {
		return badToken("a token must not cross plaintext to %s: use https://, or AllowInsecureToken", target)
	}
	return nil
}

// parseEndpoint takes the scheme off, if there is one that fits the credentials.
func parseEndpoint(endpoint string, s *settings) (string, *Error) {
	if scheme, rest, found := strings.Cut(endpoint, "://"); found {
		switch {
		case scheme == "http" && s.credentials != nil:
			return "", invalid("%q is plain text, but there are credentials", endpoint)
		case scheme == "http", scheme == "https":
			return completed(strings.TrimSuffix(rest, "/"))
		}
	}
	if isGRPCName(endpoint) {
		return endpoint, nil
	}
	return completed(endpoint)
}

// completed gives an endpoint without a port the default one. gRPC would take 443.
func completed(target string) (string, *Error) {
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
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(s.credentials),
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
	if s.token != nil {
		options = append(options, grpc.WithPerRPCCredentials(s.token))
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
	return c.nodes.close()
}

// Conn is the connection, for stubs of waldv1, health and reflection that this package does not
// wrap. Each call on it goes to the server that is the current one when the call begins. Nothing
// is repeated on it, and its failures do not choose another server.
func (c *Client) Conn() grpc.ClientConnInterface { return c.nodes }

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
	pauses := pauses{policy: c.settings.retry}
	if kind.policy != nil {
		pauses.policy = *kind.policy
	}
	unknown := false
	for {
		watched, attempt := watchSending(ctx)
		answer, err := send(watched, request)
		if err == nil {
			return answer, nil
		}
		failure := c.readError(ctx, err, attempt, attempt.sent.Load())
		pause := pauses.next(failure, attempt)
		deadline, _ := ctx.Deadline()
		last := !c.allows(kind.repeat, failure, attempt, false) ||
			pauses.exhausted() ||
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
	c.nodes.hasten()
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// allows tells whether to send a request again after this failure of an attempt. A server that
// refused the token applied nothing: the request is sent again once there is another token.
// `waits`: producers and followers also wait until an expired one is replaced in its file.
func (c *Client) allows(r repeat, e *Error, a *attempt, waits bool) bool {
	switch e.Reason {
	case ErrBadCredential:
		return c.renewed(a)
	case ErrCredentialExpired:
		return c.renewed(a) || waits && c.settings.token != nil && !c.settings.token.fixed
	}
	return r.allows(e)
}

// renewed tells whether there is another token than that of a failed attempt.
func (c *Client) renewed(a *attempt) bool {
	used := a.token.Load()
	return c.settings.token != nil && used != nil && c.settings.token.changed(*used)
}

// readError reads the error of an attempt, knows the failures of TLS, and hands the failure to
// failedAt.
func (c *Client) readError(ctx context.Context, err error, a *attempt, sent bool) *Error {
	answer, _ := status.FromError(err)
	failure := c.settings.lastTLS.explain(readError(ctx, err, sent), answer.Message())
	if err == io.EOF {
		// A stream that ended in good order is no reason to leave its server.
		return failure
	}
	return c.failedAt(a, failure)
}

// failedAt names the server in the failure of an attempt, and chooses the server of the next one.
func (c *Client) failedAt(a *attempt, failure *Error) *Error {
	if a.at != nil {
		a.named = c.nodes.failed(a.at, failure)
		if c.nodes.several() {
			failure.Server = a.at.target
		}
	}
	return failure
}

// sentHandler notes which calls have left: a call that failed before may be repeated
// whatever it does. It also notes which answers came through a server that is not the owner.
type sentHandler struct{}

type attemptKey struct{}

// attempt is one attempt of a call.
type attempt struct {
	// Rises when it goes out.
	sent atomic.Bool
	// The token that it carries; nil: none.
	token atomic.Pointer[string]
	// The server that it goes to; nil before it begins.
	at *node
	// Its failure named the server that is the current one now.
	named bool
}

// watchSending makes a context for one attempt.
func watchSending(ctx context.Context) (context.Context, *attempt) {
	a := new(attempt)
	return context.WithValue(ctx, attemptKey{}, a), a
}

func (sentHandler) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

func (sentHandler) HandleRPC(ctx context.Context, event stats.RPCStats) {
	a, ok := ctx.Value(attemptKey{}).(*attempt)
	if !ok {
		return
	}
	switch event := event.(type) {
	// Comes once a connection has taken the request's headers.
	case *stats.OutHeader:
		a.sent.Store(true)
	case *stats.InHeader:
		if owner := event.Header.Get(ownerHeader); len(owner) > 0 {
			a.at.of.approach(a.at, owner[0])
		}
	}
}

func (sentHandler) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

func (sentHandler) HandleConn(context.Context, stats.ConnStats) {}
