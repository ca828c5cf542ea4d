package wald

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"

	"wald.dev/client/go/waldv1"
)

// movedTo is the answer of a node that does not own the store.
func movedTo(owner string) error {
	facts := stated(NotApplied, Safe)
	facts["owner"], facts["term"] = owner, "7"
	return refusal(codes.Unavailable, ErrMoved, facts)
}

// testNode is a fake whose appends and tails fail with an error that changes; nil: they succeed.
type testNode struct {
	fake
	address string

	mutex sync.Mutex
	err   error
	calls int
	// The owner that answers through this node; empty: this node answers.
	speaks string
}

func newNode(t *testing.T) *testNode { return newNodeOn(t, "127.0.0.1") }

func newNodeOn(t *testing.T, host string, options ...grpc.ServerOption) *testNode {
	t.Helper()
	n := new(testNode)
	n.options = append(options, grpc.UnaryInterceptor(
		func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			answer, err := handler(ctx, request)
			if err == nil {
				grpc.SetHeader(ctx, n.header())
			}
			return answer, err
		}), grpc.StreamInterceptor(
		func(server any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			stream.SetHeader(n.header())
			return handler(server, stream)
		}))
	n.append = func(*waldv1.AppendRequest) (*waldv1.AppendResponse, error) {
		return &waldv1.AppendResponse{Lsn: new(uint64(7))}, n.answer()
	}
	n.tail = func(*waldv1.GetTailRequest) (*waldv1.GetTailResponse, error) {
		return &waldv1.GetTailResponse{FirstLsn: new(uint64(0)), TailLsn: new(uint64(5))}, n.answer()
	}
	n.address = n.serve(t, host)
	return n
}

func (n *testNode) answer() error {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.calls++
	return n.err
}

// header is that of the node's answers.
func (n *testNode) header() metadata.MD {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	if n.speaks == "" {
		return nil
	}
	return metadata.Pairs("wald-owner", n.speaks)
}

func (n *testNode) speakFor(owner string) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.speaks = owner
}

func (n *testNode) fail(err error) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.err = err
}

// called gives the number of calls since the last time.
func (n *testNode) called() int {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	calls := n.calls
	n.calls = 0
	return calls
}

// calledEach gives the number of calls of each node since the last time.
func calledEach(nodes ...*testNode) []int {
	var calls []int
	for _, n := range nodes {
		calls = append(calls, n.called())
	}
	return calls
}

// deadAddress is an address where nobody listens.
func deadAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

// withoutPauses lets a call be repeated only where there is no pause: any would pass the deadline.
func withoutPauses() DialOption {
	return WithRetry(RetryPolicy{MaxAttempts: 9, FirstPause: time.Hour, MaxPause: time.Hour})
}

func appends(t *testing.T, client *Client) {
	t.Helper()
	if ack, err := client.Append(soon(t), "a", Text("x")); err != nil || ack.LSN != 7 {
		t.Errorf("got %v, %v", ack, err)
	}
}

func TestNamedOwnerIsFollowedAtOnceAndRemembered(t *testing.T) {
	a, b := newNode(t), newNode(t)
	a.fail(movedTo(b.address))
	client := dial(t, a.address, withoutPauses())
	// Plain appends: nothing was applied, so that they are repeated.
	appends(t, client)
	appends(t, client)
	if got := calledEach(a, b); !slices.Equal(got, []int{1, 2}) {
		t.Errorf("calls %v", got)
	}
	// Back again, although the client was there before.
	a.fail(nil)
	b.fail(movedTo(a.address))
	appends(t, client)
	if tail, err := client.Tail(soon(t), "a"); err != nil || tail.TailLSN != 5 {
		t.Errorf("got %v, %v", tail, err)
	}
	if got := calledEach(a, b); !slices.Equal(got, []int{2, 1}) {
		t.Errorf("calls %v", got)
	}
}

// at is the target of a client's current server.
func at(client *Client) string {
	client.nodes.mutex.Lock()
	defer client.nodes.mutex.Unlock()
	return client.nodes.current.target
}

// goesTo waits until a client has gone to a server.
func goesTo(t *testing.T, client *Client, address string) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); at(client) != address; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the client is still at %s", at(client))
		}
	}
}

// endStream ends the stream that the client's appends share, and waits for its end.
func endStream(t *testing.T, client *Client) {
	t.Helper()
	client.nodes.mutex.Lock()
	stream := client.nodes.current.stream
	client.nodes.mutex.Unlock()
	stream.finish()
	select {
	case <-stream.ctx.Done():
	case <-soon(t).Done():
		t.Fatal("the stream does not end")
	}
}

func TestOwnerThatAnswersThroughAnotherNodeIsCalledItself(t *testing.T) {
	a, b := newNode(t), newNode(t)
	for _, list := range []string{a.address, a.address + "," + b.address} {
		a.speakFor(b.address)
		client := dial(t, list, withoutPauses())
		appends(t, client)
		goesTo(t, client, b.address)
		appends(t, client)
		if got := calledEach(a, b); !slices.Equal(got, []int{1, 1}) {
			t.Errorf("calls %v", got)
		}
		// The store moves, and is back at once.
		a.speakFor("")
		b.fail(movedTo(a.address))
		appends(t, client)
		b.fail(nil)
		a.speakFor(b.address)
		// The header comes with the answers of the next stream.
		endStream(t, client)
		appends(t, client)
		if got := calledEach(a, b); !slices.Equal(got, []int{2, 1}) {
			t.Errorf("calls %v", got)
		}
		goesTo(t, client, b.address)
	}
}

func TestStreamThroughAnotherNodeStaysAndTheNextIsDirect(t *testing.T) {
	a, b := newNode(t), newNode(t)
	a.speakFor(b.address)
	for _, n := range []*testNode{a, b} {
		n.session = func(stream sessionStream) error {
			n.answer()
			return ackAll(stream, 0)
		}
		n.scan = func(_ *waldv1.ScanRequest, stream scanStream) error {
			n.answer()
			return stream.Send(messageOf(0, "one"))
		}
	}
	client := dial(t, a.address)
	opens := func() *Session {
		session, err := client.Session(soon(t))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(session.Close)
		return session
	}
	sends := func(session *Session) {
		t.Helper()
		sent, err := session.Send(soon(t), oneRecord("x"))
		if err == nil {
			_, err = sent.Wait(soon(t))
		}
		if err != nil {
			t.Error(err)
		}
	}
	first := opens()
	sends(first)
	goesTo(t, client, b.address)
	sends(first)
	sends(opens())
	if got := calledEach(a, b); !slices.Equal(got, []int{1, 1}) {
		t.Errorf("sessions %v", got)
	}
	client = dial(t, a.address)
	for range 2 {
		if _, err := collect(t, client.Scan(context.Background(), Log("a"))); err != nil {
			t.Error(err)
		}
		goesTo(t, client, b.address)
	}
	if got := calledEach(a, b); !slices.Equal(got, []int{1, 1}) {
		t.Errorf("scans %v", got)
	}
}

func TestEachAnswerOfASharedStreamCanLeadToTheOwner(t *testing.T) {
	a, b := newNode(t), newNode(t)
	a.speakFor(b.address)
	client := dial(t, a.address)
	wait := func(pause time.Duration) {
		client.nodes.mutex.Lock()
		defer client.nodes.mutex.Unlock()
		client.nodes.nextApproach = time.Now().Add(pause)
	}
	wait(time.Hour)
	appends(t, client)
	wait(0)
	appends(t, client)
	goesTo(t, client, b.address)
	expectCalls(t, &a.fake, 1, 0)
}

func TestLateAnswerThroughAnOldServerMovesNothing(t *testing.T) {
	a, b, c := newNode(t), newNode(t), newNode(t)
	arrived, answer := make(chan struct{}), make(chan struct{})
	a.tail = func(*waldv1.GetTailRequest) (*waldv1.GetTailResponse, error) {
		close(arrived)
		<-answer
		return &waldv1.GetTailResponse{FirstLsn: new(uint64(0)), TailLsn: new(uint64(9))}, nil
	}
	client := dial(t, a.address)
	late := make(chan error)
	go func() {
		_, err := client.Tail(context.Background(), "a")
		late <- err
	}()
	<-arrived
	a.fail(movedTo(b.address))
	appends(t, client)
	a.speakFor(c.address)
	close(answer)
	if err := <-late; err != nil {
		t.Error(err)
	}
	time.Sleep(50 * time.Millisecond)
	if at(client) != b.address {
		t.Errorf("the client is at %s", at(client))
	}
}

func TestOwnerOutOfReachKeepsTheClientWhereItIsAnswered(t *testing.T) {
	a, b := newNode(t), newNode(t)
	// This is b, by an address that must not get the token in plaintext.
	exposed := strings.Replace(b.address, "127.0.0.1", "0.0.0.0", 1)
	// It takes connections and answers nothing, as a filter of packets in between.
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for _, owner := range []string{silent.Addr().String(), deadAddress(t), exposed, "a/b"} {
		a.speakFor(owner)
		client := dial(t, a.address, withoutPauses(), WithToken("k7Qp2mXa"), WithTimeout(2*time.Second))
		for range 20 {
			if _, err := client.Append(context.Background(), "a", Text("x")); err != nil {
				t.Errorf("%s: %v", owner, err)
			}
			time.Sleep(2 * time.Millisecond)
		}
		if at(client) != a.address {
			t.Errorf("the client is at %s", at(client))
		}
	}
	// All of these answers lead to one attempt.
	if _, err := silent.Accept(); err != nil {
		t.Error(err)
	}
	silent.(*net.TCPListener).SetDeadline(time.Now().Add(100 * time.Millisecond))
	if _, err := silent.Accept(); err == nil {
		t.Error("there was a second attempt")
	}
}

func TestNodesThatNameEachOtherDoNotMakeACallSpin(t *testing.T) {
	a, b := newNode(t), newNode(t)
	a.fail(movedTo(b.address))
	b.fail(movedTo(a.address))
	_, err := dial(t, a.address, withoutPauses()).Append(soon(t), "a", Text("x"))
	var e *Error
	if !errors.As(err, &e) || e.Reason != ErrMoved || e.Outcome != NotApplied || e.Server != b.address {
		t.Errorf("got %#v", err)
	}
	if !strings.Contains(err.Error(), b.address) {
		t.Errorf("%q does not name the server", err)
	}
	if got := calledEach(a, b); !slices.Equal(got, []int{1, 1}) {
		t.Errorf("calls %v", got)
	}
	policy := RetryPolicy{MaxAttempts: 5, FirstPause: 10 * time.Millisecond, MaxPause: time.Second}
	began := time.Now()
	_, err = dial(t, a.address, WithRetry(policy)).Append(soon(t), "a", Text("x"))
	// Pauses follow the second and the fourth attempt, each at least half of the full one.
	if took := time.Since(began); !errors.Is(err, ErrMoved) || took < 50*time.Millisecond {
		t.Errorf("got %v after %v", err, took)
	}
	if got := calledEach(a, b); !slices.Equal(got, []int{3, 2}) {
		t.Errorf("calls %v", got)
	}
}

func TestListIsTriedInARing(t *testing.T) {
	dead, b, c := deadAddress(t), newNode(t), newNode(t)
	b.fail(refusal(codes.Unavailable, ErrStarting, nil))
	client := dial(t, strings.Join([]string{dead, b.address, c.address}, ","))
	appends(t, client)
	appends(t, client)
	if got := calledEach(b, c); !slices.Equal(got, []int{1, 2}) {
		t.Errorf("calls %v", got)
	}
	// From the last over the dead first one.
	b.fail(nil)
	c.fail(refusal(codes.Unavailable, ErrDraining, stated(NotApplied, Safe)))
	appends(t, client)
	if got := calledEach(b, c); !slices.Equal(got, []int{1, 1}) {
		t.Errorf("calls %v", got)
	}
	// A node that knows no owner.
	b.fail(movedTo(""))
	c.fail(nil)
	appends(t, client)
	if got := calledEach(b, c); !slices.Equal(got, []int{1, 1}) {
		t.Errorf("calls %v", got)
	}
}

func TestFailureOfTheOwnerItselfKeepsTheServer(t *testing.T) {
	a, b := newNode(t), newNode(t)
	a.fail(refusal(codes.ResourceExhausted, ErrBusy, stated(NotApplied, Safe)))
	_, err := dial(t, a.address+","+b.address).Append(soon(t), "a", Text("x"))
	if !errors.Is(err, ErrBusy) || b.called() != 0 {
		t.Errorf("got %v", err)
	}
}

func TestServerWithoutItsBucketIsLeftForTheNextOne(t *testing.T) {
	a, b := newNode(t), newNode(t)
	a.fail(refusal(codes.Unavailable, ErrBucketDown, stated(NotApplied, Safe)))
	appends(t, dial(t, a.address+","+b.address))
	if b.called() != 1 {
		t.Errorf("calls %d", b.called())
	}
}

func TestNodeThatNamesItselfIsTreatedAsOneThatKnowsNoOwner(t *testing.T) {
	a, b := newNode(t), newNode(t)
	a.fail(movedTo(a.address))
	appends(t, dial(t, a.address+","+b.address))
	if got := calledEach(a, b); !slices.Equal(got, []int{1, 1}) {
		t.Errorf("calls %v", got)
	}
}

func TestOwnerOutsideOfTheListIsLeftForTheFirstOfIt(t *testing.T) {
	a, b, owner := newNode(t), newNode(t), newNode(t)
	a.fail(movedTo(""))
	b.fail(movedTo(owner.address))
	client := dial(t, a.address+","+b.address)
	appends(t, client)
	if got := calledEach(a, b, owner); !slices.Equal(got, []int{1, 1, 1}) {
		t.Errorf("calls %v", got)
	}
	a.fail(nil)
	owner.server.Stop()
	if _, err := client.Tail(soon(t), "a"); err != nil {
		t.Error(err)
	}
	if got := calledEach(a, b, owner); !slices.Equal(got, []int{1, 0, 0}) {
		t.Errorf("calls %v", got)
	}
}

func TestLateFailureOfAnOldServerMovesNothing(t *testing.T) {
	a, b, c := newNode(t), newNode(t), newNode(t)
	arrived, answer := make(chan struct{}), make(chan struct{})
	a.tail = func(*waldv1.GetTailRequest) (*waldv1.GetTailResponse, error) {
		close(arrived)
		<-answer
		return nil, refusal(codes.Unavailable, ErrDraining, nil)
	}
	client := dial(t, strings.Join([]string{a.address, b.address, c.address}, ","))
	late := make(chan error)
	go func() {
		_, err := client.Tail(context.Background(), "a")
		late <- err
	}()
	<-arrived
	a.fail(movedTo(c.address))
	appends(t, client)
	close(answer)
	if err := <-late; err != nil {
		t.Error(err)
	}
	appends(t, client)
	if got := calledEach(a, b, c); !slices.Equal(got, []int{1, 0, 3}) {
		t.Errorf("calls %v", got)
	}
}

// connectionEnds reports each end of a connection of a server.
type connectionEnds chan struct{}

func (connectionEnds) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (connectionEnds) HandleRPC(context.Context, stats.RPCStats)                         {}
func (connectionEnds) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (e connectionEnds) HandleConn(_ context.Context, event stats.ConnStats) {
	if _, ended := event.(*stats.ConnEnd); ended {
		e <- struct{}{}
	}
}

func TestConnectionToAServerThatWasLeftEndsAfterItsLastCall(t *testing.T) {
	ends := make(connectionEnds, 1)
	a, b := newNodeOn(t, "127.0.0.1", grpc.StatsHandler(ends)), newNode(t)
	arrived, answer := make(chan struct{}), make(chan struct{})
	a.tail = func(*waldv1.GetTailRequest) (*waldv1.GetTailResponse, error) {
		close(arrived)
		<-answer
		return &waldv1.GetTailResponse{FirstLsn: new(uint64(0)), TailLsn: new(uint64(9))}, nil
	}
	a.scan = func(_ *waldv1.ScanRequest, stream scanStream) error {
		stream.Send(messageOf(0, "one"))
		<-answer
		return stream.Send(messageOf(1, "two"))
	}
	client := dial(t, a.address)
	scanner := client.Scan(context.Background(), Log("a"))
	t.Cleanup(scanner.Close)
	if !scanner.Next(soon(t)) {
		t.Fatal(scanner.Err())
	}
	underway := make(chan LSN)
	go func() {
		tail, err := client.Tail(context.Background(), "a")
		if err != nil {
			t.Error(err)
		}
		underway <- tail.TailLSN
	}()
	<-arrived
	a.fail(movedTo(b.address))
	appends(t, client)
	select {
	case <-ends:
		t.Error("the connection ended under its calls")
	default:
	}
	close(answer)
	if tail := <-underway; tail != 9 {
		t.Errorf("the tail is %d", tail)
	}
	if lsns, err := collect(t, scanner); err != nil || !slices.Equal(lsns, []LSN{1}) {
		t.Errorf("got %v, %v", lsns, err)
	}
	select {
	case <-ends:
	case <-soon(t).Done():
		t.Error("the connection is still open")
	}
}

func TestStubsOfTheCallerUseTheCurrentServer(t *testing.T) {
	a, b := newNode(t), newNode(t)
	a.fail(movedTo(b.address))
	client := dial(t, a.address)
	stub := waldv1.NewWalServiceClient(client.Conn())
	if _, err := stub.GetTail(soon(t), new(waldv1.GetTailRequest)); parse(err).Reason != ErrMoved {
		t.Errorf("got %v", err)
	}
	appends(t, client)
	if _, err := stub.GetTail(soon(t), new(waldv1.GetTailRequest)); err != nil {
		t.Error(err)
	}
	if got := calledEach(a, b); !slices.Equal(got, []int{2, 2}) {
		t.Errorf("calls %v", got)
	}
}

func TestProducerFollowsTheOwnerWithoutLossOrRepeat(t *testing.T) {
	b, j := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		return applyAll(j, stream, always)
	})
	owner := b.serve(t, "127.0.0.1")
	// The first owner applies three, acks one, and leaves.
	a, streams := new(fake), 0
	a.create, a.get = b.create, b.get
	a.session = func(stream sessionStream) error {
		streams++
		requests, err := receive(stream, 4)
		if err != nil {
			return err
		}
		for i, request := range requests[:3] {
			answer, _ := j.apply(request)
			if i == 0 {
				stream.Send(answer)
			}
		}
		return movedTo(owner)
	}
	var interruptions []error
	producer, err := a.start(t, withoutPauses()).Producer(soon(t), "a",
		OnProducerInterruption(func(err error) { interruptions = append(interruptions, err) }))
	if err != nil {
		t.Fatal(err)
	}
	for i, sent := range produceAll(t, producer, 10) {
		ack, err := sent.Wait(soon(t))
		if err != nil || ack.FirstLSN != LSN(i) {
			t.Errorf("%d: got %v, %v", i, ack, err)
		}
	}
	if err := producer.Close(soon(t)); err != nil {
		t.Error(err)
	}
	if want := []string{"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"}; !slices.Equal(j.applied, want) {
		t.Errorf("the log has %v", j.applied)
	}
	if streams != 1 || len(interruptions) != 1 || !errors.Is(interruptions[0], ErrMoved) {
		t.Errorf("%d streams at the first owner, interrupted by %v", streams, interruptions)
	}
}

func TestProducerComesBackFromAnOwnerOutOfReach(t *testing.T) {
	a, j := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		return applyAll(j, stream, always)
	})
	a.serve(t, "127.0.0.1")
	dead, session := deadAddress(t), a.session
	a.session = func(stream sessionStream) error {
		a.session = session
		return movedTo(dead)
	}
	producer, err := a.dial(t).Producer(soon(t), "a")
	if err != nil {
		t.Fatal(err)
	}
	if ack, err := producer.Append(soon(t), []Record{Text("0")}); err != nil || ack.FirstLSN != 0 {
		t.Errorf("got %v, %v", ack, err)
	}
	if err := producer.Close(soon(t)); err != nil || !slices.Equal(j.applied, []string{"0"}) {
		t.Errorf("the log has %v, %v", j.applied, err)
	}
}

func TestIdleProducerFollowsTheOwner(t *testing.T) {
	b, j := producing(func(_ *fake, j *journal, stream sessionStream, _ int) error {
		return applyAll(j, stream, always)
	})
	owner, leave, ends := b.serve(t, "127.0.0.1"), make(chan struct{}), make(connectionEnds, 1)
	a := newNodeOn(t, "127.0.0.1", grpc.StatsHandler(ends))
	a.create, a.get = b.create, b.get
	a.session = func(stream sessionStream) error {
		if err := applyAll(j, stream, 1); err != nil {
			return err
		}
		<-leave
		return movedTo(owner)
	}
	// No batch is due, so that no interruption is reported.
	producer, err := dial(t, a.address, withoutPauses()).Producer(soon(t), "a",
		OnProducerInterruption(func(err error) { t.Errorf("interrupted by %v", err) }))
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		if ack, err := producer.Append(soon(t), []Record{Text(fmt.Sprint(i))}); err != nil || ack.FirstLSN != LSN(i) {
			t.Fatalf("%d: got %v, %v", i, ack, err)
		}
		if i == 0 {
			close(leave)
			<-ends
		}
	}
	if err := producer.Close(soon(t)); err != nil {
		t.Error(err)
	}
	if !slices.Equal(j.applied, []string{"0", "1", "2"}) {
		t.Errorf("the log has %v", j.applied)
	}
}

func TestFollowerResumesAtTheOwnerByItsCursor(t *testing.T) {
	var first, second string
	a, askedFirst := scanning(func(_ *fake, stream scanStream) error {
		stream.Send(messageOf(0, "one"))
		return movedTo(second)
	}, func(_ *fake, stream scanStream) error {
		stream.Send(messageOf(2, "three"))
		return refusal(codes.DataLoss, ErrQuarantined, nil)
	})
	b, askedSecond := scanning(func(_ *fake, stream scanStream) error {
		stream.Send(messageOf(1, "two"))
		return movedTo(first)
	})
	first, second = a.serve(t, "127.0.0.1"), b.serve(t, "127.0.0.1")
	// A message between two moves: the second one needs no pause either.
	follower := a.dial(t, withoutPauses()).Follow(soon(t), Log("a"), FromLSN(0))
	lsns, err := collect(t, &follower.Scanner)
	if !errors.Is(err, ErrQuarantined) || !slices.Equal(lsns, []LSN{0, 1, 2}) {
		t.Errorf("got %v, %v", lsns, err)
	}
	var cursors []string
	for _, request := range slices.Concat(*askedFirst, *askedSecond) {
		cursors = append(cursors, string(request.GetCursor()))
	}
	if !slices.Equal(cursors, []string{"", "two", "one"}) {
		t.Errorf("asked at %q", cursors)
	}
}

func TestSilentFollowerGoesToTheNextServer(t *testing.T) {
	b, asked := scanning(func(*fake, scanStream) error { return refusal(codes.DataLoss, ErrQuarantined, nil) })
	next := b.serve(t, "127.0.0.1")
	a, _ := scanning(func(_ *fake, stream scanStream) error {
		stream.Send(messageOf(0, "one"))
		<-stream.Context().Done()
		return nil
	})
	client := dial(t, a.serve(t, "127.0.0.1")+","+next, WithSilenceTimeout(time.Second))
	follower := client.Follow(soon(t), Log("a"))
	if lsns, err := collect(t, &follower.Scanner); !errors.Is(err, ErrQuarantined) || !slices.Equal(lsns, []LSN{0}) {
		t.Errorf("got %v, %v", lsns, err)
	}
	if len(*asked) != 1 || string((*asked)[0].GetCursor()) != "one" {
		t.Errorf("asked %v", *asked)
	}
}

func TestSessionAfterOneThatEndedWithMovedIsOpenedAtTheOwner(t *testing.T) {
	b := &fake{session: func(stream sessionStream) error { return ackAll(stream, 5) }}
	owner := b.serve(t, "127.0.0.1")
	a := &fake{session: func(stream sessionStream) error {
		requests, err := receive(stream, 3)
		if err != nil {
			return err
		}
		stream.Send(ackOf(requests[0], 4))
		return movedTo(owner)
	}}
	client := a.start(t)
	pending, err := sendThree(t, client)
	if !errors.Is(err, ErrMoved) {
		t.Errorf("the session ended with %v", err)
	}
	failed := errorsOf(t, pending)
	if failed[0] != nil {
		t.Errorf("the first got %v", failed[0])
	}
	for _, e := range failed[1:] {
		if e == nil || e.Outcome != NotApplied || e.Retry != Safe || e.Server != a.listener.Addr().String() {
			t.Errorf("got %#v", e)
		}
	}
	pending, err = sendThree(t, client)
	if err != nil {
		t.Error(err)
	}
	for _, e := range errorsOf(t, pending) {
		if e != nil {
			t.Error(e)
		}
	}
}

func TestStreamThatEndsInGoodOrderKeepsTheServer(t *testing.T) {
	a, b := newNode(t), newNode(t)
	a.session = func(stream sessionStream) error { return ackAll(stream, 0) }
	client := dial(t, a.address+","+b.address)
	if _, err := sendThree(t, client); err != nil {
		t.Error(err)
	}
	appends(t, client)
	if got := calledEach(a, b); !slices.Equal(got, []int{1, 0}) {
		t.Errorf("calls %v", got)
	}
}

func TestCertificateOfTheOwnerMustNameItsHost(t *testing.T) {
	authority := newAuthority(t)
	cert, key := authority.issued("server")
	creds, err := credentials.NewServerTLSFromFile(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	// The certificate is for localhost and 127.0.0.1.
	a, b := newNodeOn(t, "127.0.0.1", grpc.Creds(creds)), newNodeOn(t, "127.0.0.2", grpc.Creds(creds))
	a.fail(movedTo(b.address))
	policy := WithRetry(RetryPolicy{MaxAttempts: 2})
	_, err = dial(t, "https://"+a.address, WithTLSCA(authority.ca), policy).Append(soon(t), "a", Text("x"))
	var e *Error
	if !errors.As(err, &e) || e.TLS != TLSWrongName || e.Server != b.address || b.called() != 0 {
		t.Errorf("got %v", err)
	}
	appends(t, dial(t, "https://"+a.address, WithTLSCA(authority.ca), WithServerName("localhost"), policy))
	if b.called() != 1 {
		t.Error("the owner was not called")
	}
}

func TestTokenGoesToTheOwnerButNotInPlaintextToAnotherMachine(t *testing.T) {
	d, owner := &door{token: "secret", reason: ErrBadCredential}, new(fake)
	d.guard(owner)
	a := newNode(t)
	a.fail(movedTo(owner.serve(t, "127.0.0.1")))
	appends(t, dial(t, a.address, WithToken("secret"), withoutPauses()))
	if d.seen() != 1 {
		t.Errorf("%d calls", d.seen())
	}
	// An address for documentation.
	a.fail(movedTo("192.0.2.1:6925"))
	_, err := dial(t, a.address, WithToken("secret")).Append(soon(t), "a", Text("x"))
	var e *Error
	if !errors.As(err, &e) || e.Reason != ErrMoved || !strings.Contains(e.Message, "a token must not cross plaintext to 192.0.2.1:6925") {
		t.Errorf("got %v", err)
	}
}

func TestOwnerThatIsNoAddressIsNotFollowed(t *testing.T) {
	for _, owner := range []string{"unix:/x", "dns:80", "dns:///b", "http://b:80", "me@b:80", "b:0", "b:x", ":80", "b/c:80"} {
		a, b := newNode(t), newNode(t)
		a.fail(movedTo(owner))
		client := dial(t, a.address, withoutPauses())
		_, err := client.Append(soon(t), "a", Text("x"))
		if !errors.Is(err, ErrMoved) || !strings.Contains(err.Error(), fmt.Sprintf("does not follow to %q", owner)) {
			t.Errorf("%s: got %v", owner, err)
		}
		appends(t, dial(t, a.address+","+b.address))
	}
}

func TestListsOfEndpointsAreUnderstood(t *testing.T) {
	for endpoints, targets := range map[string][]string{
		"a":                         {"a:6925"},
		"a,b:80":                    {"a:6925", "b:80"},
		"http://a/,b,http://[::1]":  {"a:6925", "b:6925", "[::1]:6925"},
		"https://a,https://b:80/":   {"a:6925", "b:80"},
		"static:///a:80,b:80":       {"static:///a:80,b:80"},
		"unix:/run/wald,with comma": {"unix:/run/wald,with comma"},
	} {
		if got, failure := parseEndpoints(endpoints, new(settings)); failure != nil || !slices.Equal(got, targets) {
			t.Errorf("%q: got %q, %v", endpoints, got, failure)
		}
	}
	t.Setenv("WALD_ENDPOINT", "a,b")
	client, err := FromEnv()
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if !slices.Equal(client.nodes.list, []string{"a:6925", "b:6925"}) {
		t.Errorf("the list is %q", client.nodes.list)
	}
}

func TestListsThatCannotBeUsedAreRefusedWithTheirPart(t *testing.T) {
	for endpoints, words := range map[string]string{
		",":                "part 1",
		"a,":               "part 2",
		"a,,b":             "part 2",
		"a,b:0":            `"b:0"`,
		"a,b c":            `"b c`,
		"a, b":             `" b`,
		"a,https://b":      `"https://b" is not an endpoint such as a`,
		"https://a,b":      `"b" is not an endpoint such as https://a`,
		"https://a,http:/": `"http:/"`,
		"a,dns:///b":       `"dns:///b"`,
		"a,ftp://b":        `"ftp://b"`,
	} {
		client, err := Dial(endpoints)
		if client != nil {
			client.Close()
		}
		var e *Error
		if !errors.As(err, &e) || e.Code != codes.InvalidArgument || !strings.Contains(e.Message, words) {
			t.Errorf("%q: got %v", endpoints, err)
		}
	}
	_, err := Dial("localhost,wald.internal", WithToken("secret"))
	if !errors.Is(err, ErrToken) || !strings.Contains(err.Error(), "wald.internal") {
		t.Errorf("got %v", err)
	}
}
