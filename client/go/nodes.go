package wald

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
)

// nodes are the servers of a client. Every call goes to the current one, at first the first of the
// list. A failed call may choose another one:
//
//	list: a, b, c
//	not reached, starting, stopping, or knows no owner:  a ─▶ b ─▶ c ─▶ a
//	names the owner d, in the list or not:               a ─▶ d
//	answers for the owner d, which can be reached:       a ─▶ d
//	the same failures of an owner outside of the list:   d ─▶ a
//
// The connection to a server that was left is closed when its last call has ended. Stubs use nodes
// as their connection.
type nodes struct {
	list []string
	dial func(target string) (*grpc.ClientConn, error)
	// Gives the target of a named owner, or the reason why the owner gets no calls.
	vet            func(owner string) (target, refusal string)
	connectTimeout time.Duration
	lastTLS        *lastTLSProblem
	// Ends when the client is closed.
	ctx  context.Context
	stop context.CancelFunc

	mutex   sync.Mutex
	current *node
	// The current server has changed.
	moved  bool
	closed bool
	// Servers that were left and have calls underway.
	left map[*node]struct{}
	// The time from which on an owner may be approached.
	nextApproach time.Time
	// Counts the streams that appends share.
	streams sync.WaitGroup
}

// ownerHeader is the owner of the store, in the header of an answer that came through another node.
const ownerHeader = "wald-owner"

// approachPause is the time between two attempts to reach such an owner, if the first one fails.
const approachPause = time.Minute

// node is a server since it became the current one.
type node struct {
	of     *nodes
	target string
	// Index in the list; -1: outside.
	place int
	conn  *grpc.ClientConn
	// Number of calls underway.
	calls int
	// The stream that appends share; nil before the first.
	stream *sharedStream
	// Appends are unary calls until then.
	unaryUntil time.Time
}

// newNodes begins at the first server of the list. It checks that each one can be dialled.
func newNodes(list []string, s *settings) (*nodes, *Error) {
	n := &nodes{
		list:           list,
		dial:           func(target string) (*grpc.ClientConn, error) { return grpc.NewClient(target, s.dialOptions()...) },
		vet:            s.vetOwner,
		connectTimeout: s.connectTimeout,
		lastTLS:        s.lastTLS,
		left:           map[*node]struct{}{},
	}
	n.ctx, n.stop = context.WithCancel(context.Background())
	for place, target := range list {
		conn, err := n.dial(target)
		if err != nil {
			n.close()
			return nil, invalid("%q is not an endpoint such as %s: %v", target, DefaultEndpoint, err)
		}
		if place > 0 {
			conn.Close()
			continue
		}
		n.current = &node{of: n, target: target, place: place, conn: conn}
	}
	return n, nil
}

// failed chooses the server of the next attempt, after an attempt at this server has failed. True:
// the failure named the owner, and the next attempt need not wait. A late failure of a server that
// the client has left changes nothing.
func (n *nodes) failed(at *node, e *Error) (named bool) {
	owner := ""
	switch {
	case e.Reason == ErrMoved:
		owner = e.Facts["owner"]
	case !elsewhere(e):
		return false
	}
	if owner != "" {
		target, refusal := n.vet(owner)
		if refusal != "" {
			e.Message += fmt.Sprintf("; the client does not follow to %q: %s", owner, refusal)
		}
		owner = target
	}
	if owner == at.target {
		// Useless: the server does not know the owner.
		owner = ""
	}
	n.mutex.Lock()
	defer n.mutex.Unlock()
	if at == n.current && !n.closed {
		if owner != "" {
			n.move(owner)
		} else if next := (at.place + 1) % len(n.list); next != at.place {
			n.move(n.list[next])
		}
	}
	return owner != "" && n.current != at
}

// elsewhere tells whether another server of the list may answer: this one was not reached, is
// starting or stopping, or has lost its bucket and perhaps the store with it.
func elsewhere(e *Error) bool {
	switch e.Reason {
	case "":
		return e.Code == codes.Unavailable
	case ErrStarting, ErrDraining, ErrBucketDown:
		return true
	}
	return false
}

// approach: a server has answered for the owner, which it names. Later calls go to the owner itself,
// once there is a connection to it. Until then they stay: the owner may be out of this client's
// reach, behind a balancer or a tunnel.
func (n *nodes) approach(through *node, owner string) {
	n.mutex.Lock()
	now := time.Now()
	due := through == n.current && !n.closed && !now.Before(n.nextApproach)
	if due {
		n.nextApproach = now.Add(approachPause)
	}
	n.mutex.Unlock()
	if !due {
		return
	}
	target, refusal := n.vet(owner)
	if refusal != "" || target == through.target {
		return
	}
	conn, err := n.dial(target)
	if err != nil {
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(n.ctx, n.connectTimeout)
		defer cancel()
		conn.Connect()
		for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
			if state == connectivity.TransientFailure || !conn.WaitForStateChange(ctx, state) {
				conn.Close()
				// It stops no call: the current server answers.
				n.lastTLS.set(nil)
				return
			}
		}
		n.mutex.Lock()
		defer n.mutex.Unlock()
		n.nextApproach = now
		if through != n.current || n.closed {
			go conn.Close()
			return
		}
		n.goTo(target, conn)
	}()
}

// move makes a server the current one, unless it cannot be dialled.
func (n *nodes) move(target string) {
	if conn, err := n.dial(target); err == nil {
		n.goTo(target, conn)
	}
}

// goTo makes the server of a connection the current one.
func (n *nodes) goTo(target string, conn *grpc.ClientConn) {
	old := n.current
	n.current, n.moved = &node{of: n, target: target, place: slices.Index(n.list, target), conn: conn}, true
	if old.stream != nil {
		old.stream.finish()
	}
	if old.calls > 0 {
		n.left[old] = struct{}{}
	} else {
		go old.conn.Close()
	}
}

// several tells whether the client knows more than one server.
func (n *nodes) several() bool {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return n.moved || len(n.list) > 1
}

// hasten makes the current server's connection try again now, if it is waiting to.
func (n *nodes) hasten() {
	n.mutex.Lock()
	conn := n.current.conn
	n.mutex.Unlock()
	conn.ResetConnectBackoff()
}

// begin counts a call to the current server, and notes the server with the attempt.
func (n *nodes) begin(ctx context.Context) *node {
	n.mutex.Lock()
	at := n.current
	at.calls++
	n.mutex.Unlock()
	if a, ok := ctx.Value(attemptKey{}).(*attempt); ok {
		a.at = at
	}
	return at
}

// end: a call to the server has ended.
func (n *nodes) end(at *node) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	at.calls--
	if _, left := n.left[at]; left && at.calls == 0 {
		delete(n.left, at)
		go at.conn.Close()
	}
}

// Invoke makes a unary call to the current server.
func (n *nodes) Invoke(ctx context.Context, method string, request, answer any, options ...grpc.CallOption) error {
	at := n.begin(ctx)
	defer n.end(at)
	return at.conn.Invoke(ctx, method, request, answer, options...)
}

// NewStream opens a stream to the current server.
func (n *nodes) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, options ...grpc.CallOption) (grpc.ClientStream, error) {
	at := n.begin(ctx)
	end := sync.OnceFunc(func() { n.end(at) })
	options = append(slices.Clip(options), grpc.OnFinish(func(error) { end() }))
	stream, err := at.conn.NewStream(ctx, desc, method, options...)
	if err != nil {
		// An interceptor may have failed before gRPC began.
		end()
	}
	return stream, err
}

// close half-closes the stream of appends, closes all connections, and ends the calls on them.
func (n *nodes) close() error {
	n.stop()
	n.mutex.Lock()
	current, left := n.current, n.left
	n.closed, n.left = true, nil
	if current != nil && current.stream != nil {
		current.stream.finish()
	}
	n.mutex.Unlock()
	ended := make(chan struct{})
	go func() {
		n.streams.Wait()
		close(ended)
	}()
	patience := time.NewTimer(closePatience)
	defer patience.Stop()
	select {
	case <-ended:
	case <-patience.C:
	}
	// No goroutine of a stream outlives its connection.
	defer func() { <-ended }()
	for old := range left {
		old.conn.Close()
	}
	if current == nil {
		return nil
	}
	return current.conn.Close()
}

// parseEndpoints gives the targets of a list of endpoints with commas between them. The commas of a
// name of gRPC's own are its own.
func parseEndpoints(endpoints string, s *settings) ([]string, *Error) {
	parts := strings.Split(endpoints, ",")
	if isGRPCName(parts[0]) {
		parts = []string{endpoints}
	}
	var targets []string
	for i, part := range parts {
		switch {
		case part == "" && len(parts) > 1:
			return nil, invalid("part %d of %q is empty, and must be an endpoint such as %s", i+1, endpoints, DefaultEndpoint)
		case len(parts) > 1 && strings.ContainsFunc(part, unicode.IsSpace):
			return nil, invalid("%q is not an endpoint such as %s: it has white space", part, DefaultEndpoint)
		case len(parts) > 1 && isGRPCName(part):
			return nil, invalid("%q is a name of gRPC's own, which cannot be part of a list", part)
		case isHTTPS(part) != isHTTPS(parts[0]):
			return nil, invalid("%q is not an endpoint such as %s: all servers of a list have the same scheme", part, parts[0])
		}
		target, failure := parseEndpoint(part, s)
		if failure != nil {
			return nil, failure
		}
		targets = append(targets, target)
	}
	return targets, nil
}

func isHTTPS(endpoint string) bool { return strings.HasPrefix(endpoint, "https://") }

// isGRPCName tells whether gRPC has the name resolved by itself, such as dns:///wald:6925.
func isGRPCName(endpoint string) bool {
	scheme, _, found := strings.Cut(endpoint, "://")
	return found && scheme != "http" && scheme != "https" ||
		strings.HasPrefix(endpoint, "unix:") || strings.HasPrefix(endpoint, "dns:")
}

// vetOwner gives the target of an owner that a server named as HOST:PORT, or the reason why the
// client must not send its calls there.
func (s *settings) vetOwner(owner string) (target, refusal string) {
	if isGRPCName(owner) {
		return "", "it is not HOST:PORT"
	}
	target, failure := completed(owner)
	if failure == nil {
		failure = s.mayCarryToken(target)
	}
	if failure != nil {
		return "", failure.Message
	}
	return target, ""
}
