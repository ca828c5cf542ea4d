package wald

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"wald.dev/client/go/waldv1"
)

// appended acks each append at this lsn.
func appended(lsn uint64) func(*waldv1.AppendRequest) (*waldv1.AppendResponse, error) {
	return func(*waldv1.AppendRequest) (*waldv1.AppendResponse, error) {
		return &waldv1.AppendResponse{Lsn: &lsn}, nil
	}
}

// ackAt acks one independent request.
func ackAt(request *waldv1.AppendSessionRequest, lsn uint64) *waldv1.AppendSessionResponse {
	return &waldv1.AppendSessionResponse{RequestId: request.GetRequestId(), AppendAck: &waldv1.AppendResponse{Lsn: &lsn}}
}

// failureOf is the error of a call; empty: it succeeded.
func failureOf(err error) *Error {
	e := new(Error)
	errors.As(err, &e)
	return e
}

// tried is the result of an append.
type tried struct {
	lsn LSN
	err *Error
}

// appendEach appends these records at the same time, and gives the results in their order.
func appendEach(t *testing.T, client *Client, records []string, options ...AppendOption) []tried {
	t.Helper()
	results := make([]tried, len(records))
	var calls sync.WaitGroup
	for i, record := range records {
		calls.Go(func() {
			ack, err := client.Append(soon(t), "a", Text(record), options...)
			results[i].lsn = ack.LSN
			if err != nil && !errors.As(err, &results[i].err) {
				t.Error(err)
			}
		})
	}
	calls.Wait()
	return results
}

// sharedOf is the stream of a client's current server.
func sharedOf(client *Client) *sharedStream {
	client.nodes.mutex.Lock()
	defer client.nodes.mutex.Unlock()
	return client.nodes.current.stream
}

// isDue waits until the stream of a client has this number of requests without an answer.
func isDue(t *testing.T, client *Client, count int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		stream, due := sharedOf(client), -1
		if stream != nil {
			stream.mutex.Lock()
			due = len(stream.due)
			stream.mutex.Unlock()
		}
		if due == count {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d requests are due", due)
		}
	}
}

func expectCalls(t *testing.T, f *fake, streams, unary int32) {
	t.Helper()
	if f.streams.Load() != streams || f.unary.Load() != unary {
		t.Errorf("%d streams, %d unary calls", f.streams.Load(), f.unary.Load())
	}
}

func TestConcurrentAppendsShareAStreamAndGetTheirOwnAnswers(t *testing.T) {
	f := new(fake)
	f.append = func(r *waldv1.AppendRequest) (*waldv1.AppendResponse, error) {
		lsn := uint64(len(r.GetRecord().GetData()))
		if lsn%10 == 3 {
			return nil, refusal(codes.FailedPrecondition, ErrPositionMismatch, stated(NotApplied, Never))
		}
		return &waldv1.AppendResponse{Lsn: &lsn}, nil
	}
	f.batch = func(r *waldv1.AppendBatchRequest) (*waldv1.AppendBatchResponse, error) {
		part := r.GetBatches()[0]
		return &waldv1.AppendBatchResponse{Appends: []*waldv1.LogAppend{
			{Log: part.GetLog(), FirstLsn: new(uint64(5)), NextLsn: new(5 + uint64(len(part.GetRecords())))},
		}}, nil
	}
	client := f.start(t)
	records := make([]string, 200)
	for i := range records {
		records[i] = strings.Repeat("x", i)
	}
	for i, got := range appendEach(t, client, records) {
		switch {
		case i%10 == 3:
			if got.err == nil || got.err.Reason != ErrPositionMismatch || got.err.Outcome != NotApplied || got.err.Retry != Never {
				t.Errorf("%d: got %v", i, got.err)
			}
		case got.err != nil || got.lsn != LSN(i):
			t.Errorf("%d: got %d, %v", i, got.lsn, got.err)
		}
	}
	batch := Batch{Logs: []LogBatch{{Log: "b", Records: []Record{Text("x"), Text("y")}}}}
	ack, err := client.AppendBatch(soon(t), batch)
	if err != nil || ack.Appends[0].Log != "b" || ack.Appends[0].FirstLSN != 5 || ack.Appends[0].NextLSN != 7 {
		t.Errorf("got %v, %v", ack, err)
	}
	expectCalls(t, f, 1, 0)
}

func TestAnswersOfASharedStreamComeInAnyOrder(t *testing.T) {
	f := &fake{shared: func(stream sessionStream) error {
		requests, err := receive(stream, 3)
		if err != nil {
			return err
		}
		for _, request := range slices.Backward(requests) {
			stream.Send(ackAt(request, uint64(len(request.GetAppend().GetRecord().GetData()))))
		}
		return ackAll(stream, 0)
	}}
	for i, got := range appendEach(t, f.start(t), []string{"", "x", "xx"}) {
		if got.err != nil || got.lsn != LSN(i) {
			t.Errorf("%d: got %d, %v", i, got.lsn, got.err)
		}
	}
}

// breaking loses the connection of the first stream with its requests, and acks the requests of later ones.
func breaking(f *fake, requests int) {
	f.append = appended(7)
	f.shared = func(stream sessionStream) error {
		if f.streams.Load() > 1 {
			return f.answerAll(stream)
		}
		if _, err := receive(stream, requests); err != nil {
			return err
		}
		f.listener.drop()
		return nil
	}
}

func TestBrokenStreamMakesPlainAppendsUnknown(t *testing.T) {
	f := new(fake)
	breaking(f, 3)
	for i, got := range appendEach(t, f.start(t), []string{"x", "y", "z"}) {
		if e := got.err; e == nil || e.Outcome != Unknown || e.Retry != SafeWithCondition || e.Code != codes.Unavailable {
			t.Errorf("%d: got %v", i, e)
		}
	}
	expectCalls(t, f, 1, 0)
}

func TestGuardedAppendsOfABrokenStreamAreRepeated(t *testing.T) {
	f := new(fake)
	breaking(f, 3)
	for i, got := range appendEach(t, f.start(t), []string{"x", "y", "z"}, ExpectLSN(7)) {
		if got.err != nil || got.lsn != 7 {
			t.Errorf("%d: got %d, %v", i, got.lsn, got.err)
		}
	}
	expectCalls(t, f, 2, 0)
}

func TestStreamOfALeavingServerIsFollowedByAnother(t *testing.T) {
	f := &fake{append: appended(7)}
	f.shared = func(stream sessionStream) error {
		if f.streams.Load() > 1 {
			return f.answerAll(stream)
		}
		requests, err := receive(stream, 3)
		if err != nil {
			return err
		}
		stream.Send(ackAt(requests[1], 7))
		return refusal(codes.Unavailable, ErrDraining, stated(NotApplied, Safe))
	}
	// Plain appends: nothing was applied.
	for i, got := range appendEach(t, f.start(t), []string{"x", "y", "z"}) {
		if got.err != nil || got.lsn != 7 {
			t.Errorf("%d: got %d, %v", i, got.lsn, got.err)
		}
	}
	expectCalls(t, f, 2, 0)
}

func TestStreamThatABusyServerRefusesIsFollowedByAnother(t *testing.T) {
	f := &fake{append: appended(7)}
	f.shared = func(stream sessionStream) error {
		if f.streams.Load() > 1 {
			return f.answerAll(stream)
		}
		if _, err := receive(stream, 3); err != nil {
			return err
		}
		return refusal(codes.ResourceExhausted, ErrBusy, stated(NotApplied, Safe))
	}
	for i, got := range appendEach(t, f.start(t), []string{"x", "y", "z"}) {
		if got.err != nil || got.lsn != 7 {
			t.Errorf("%d: got %d, %v", i, got.lsn, got.err)
		}
	}
	expectCalls(t, f, 2, 0)
}

func TestStreamThatEndsWithoutAStatusLeavesItsRequestsUnknown(t *testing.T) {
	f := &fake{shared: func(stream sessionStream) error {
		_, err := receive(stream, 1)
		return err
	}}
	_, err := f.start(t).Append(soon(t), "a", Text("x"))
	if e := failureOf(err); e.Outcome != Unknown || e.Retry != SafeWithCondition {
		t.Errorf("got %v", err)
	}
}

func TestTimedOutAppendFreesItsPlaceAndItsLateAnswerIsIgnored(t *testing.T) {
	late := make(chan struct{})
	f := &fake{shared: func(stream sessionStream) error {
		first, err := receive(stream, 1)
		if err != nil {
			return err
		}
		<-late
		second, err := receive(stream, 1)
		if err != nil {
			return err
		}
		stream.Send(ackAt(first[0], 1))
		stream.Send(ackAt(second[0], 2))
		return ackAll(stream, 0)
	}}
	client := f.start(t)
	for _, given := range []error{context.DeadlineExceeded, context.Canceled} {
		var ctx context.Context
		var cancel context.CancelFunc
		if given == context.Canceled {
			ctx, cancel = context.WithCancel(context.Background())
			go func() {
				isDue(t, client, 1)
				time.Sleep(20 * time.Millisecond)
				cancel()
			}()
		} else {
			ctx, cancel = context.WithTimeout(context.Background(), 50*time.Millisecond)
		}
		_, err := client.Append(ctx, "a", Text("x"))
		cancel()
		if e := failureOf(err); !errors.Is(err, given) || e.Outcome != Unknown || e.Retry != SafeWithCondition {
			t.Errorf("got %#v", err)
		}
		isDue(t, client, 0)
		if given == context.DeadlineExceeded {
			close(late)
			if ack, err := client.Append(soon(t), "a", Text("x")); err != nil || ack.LSN != 2 {
				t.Errorf("got %v, %v", ack, err)
			}
			f.shared = func(stream sessionStream) error {
				receive(stream, 1)
				<-stream.Context().Done()
				return nil
			}
			endStream(t, client)
		}
	}
}

// giveUp makes an append, and gives it up once the server has it and the stream has brought no
// answer for this long.
func giveUp(t *testing.T, client *Client, arrived <-chan struct{}, silence time.Duration) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	result := make(chan error)
	go func() {
		_, err := client.Append(ctx, "a", Text("given up"))
		result <- err
	}()
	<-arrived
	stream := sharedOf(client)
	stream.mutex.Lock()
	stream.silentSince = stream.silentSince.Add(-silence)
	stream.mutex.Unlock()
	cancel()
	if e := failureOf(<-result); e.Outcome != Unknown || e.Code != codes.Canceled {
		t.Errorf("got %v", e)
	}
}

func TestSilentSharedStreamTakesNoMoreAppends(t *testing.T) {
	arrived, late := make(chan struct{}), make(chan struct{})
	f := new(fake)
	f.append = appended(7)
	f.shared = func(stream sessionStream) error {
		if f.streams.Load() > 1 {
			return f.answerAll(stream)
		}
		requests, err := receive(stream, 1)
		if err != nil {
			return err
		}
		arrived <- struct{}{}
		if _, err := receive(stream, 1); err != nil {
			return err
		}
		arrived <- struct{}{}
		<-late
		return stream.Send(ackAt(requests[0], 9))
	}
	client := f.start(t)
	waiting := make(chan LSN)
	go func() {
		ack, err := client.Append(soon(t), "a", Text("x"))
		if err != nil {
			t.Error(err)
		}
		waiting <- ack.LSN
	}()
	<-arrived
	giveUp(t, client, arrived, sharedSilence)
	appends(t, client)
	expectCalls(t, f, 2, 0)
	// An append that waits keeps its place on the silent stream.
	close(late)
	if lsn := <-waiting; lsn != 9 {
		t.Errorf("got %d", lsn)
	}
}

func TestSharedStreamThatAnswersOthersStays(t *testing.T) {
	arrived := make(chan struct{})
	f := new(fake)
	f.shared = func(stream sessionStream) error {
		for {
			requests, err := receive(stream, 1)
			if err != nil {
				return nil
			}
			if string(requests[0].GetAppend().GetRecord().GetData()) == "given up" {
				arrived <- struct{}{}
			} else {
				stream.Send(ackAt(requests[0], 7))
			}
		}
	}
	client := f.start(t)
	giveUp(t, client, arrived, sharedSilence*3/5)
	// Its answer begins the time again.
	appends(t, client)
	giveUp(t, client, arrived, sharedSilence*3/5)
	appends(t, client)
	expectCalls(t, f, 1, 0)
}

func TestAppendThatTimesOutBeforeItIsSentIsNotApplied(t *testing.T) {
	// It takes connections and answers nothing.
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	client := dial(t, silent.Addr().String())
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err = client.Append(ctx, "a", Text("x"))
	if e := failureOf(err); !errors.Is(err, context.DeadlineExceeded) || e.Outcome != NotApplied || e.Retry != Safe {
		t.Errorf("got %#v", err)
	}
	isDue(t, client, 0)
}

func TestAppendWhoseContextHasEndedIsNotSent(t *testing.T) {
	f := &fake{append: appended(7)}
	client := f.start(t)
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	for range 20 {
		if _, err := client.Append(ended, "a", Text("x")); failureOf(err).Outcome != NotApplied || !errors.Is(err, context.Canceled) {
			t.Errorf("got %#v", err)
		}
	}
	if sharedOf(client) != nil {
		t.Error("a stream was opened")
	}
}

func TestStreamThatEndsForOneMessageMakesEachAppendAUnaryCall(t *testing.T) {
	old := refusal(codes.FailedPrecondition, ErrPositionMismatch, stated(NotApplied, Never))
	for _, end := range []error{
		refusal(codes.InvalidArgument, ErrMalformedRequest, stated(NotApplied, Never)),
		// A server that does not know independent requests ends the stream with this one.
		old,
		waldv1.UnimplementedWalServiceServer{}.AppendSession(nil),
	} {
		f := new(fake)
		f.append = func(r *waldv1.AppendRequest) (*waldv1.AppendResponse, error) {
			if string(r.GetRecord().GetData()) == "bad" {
				return nil, refusal(codes.InvalidArgument, ErrMalformedRequest, stated(NotApplied, Never))
			}
			return &waldv1.AppendResponse{Lsn: new(uint64(7))}, nil
		}
		f.shared = func(stream sessionStream) error {
			requests, err := receive(stream, 3)
			if err != nil {
				return err
			}
			stream.Send(ackAt(requests[0], 7))
			return end
		}
		client := f.start(t, WithRetry(RetryPolicy{MaxAttempts: 1}))
		bad := 0
		for _, got := range appendEach(t, client, []string{"x", "bad", "y"}) {
			if got.err != nil {
				bad++
			}
		}
		// The refused one may be the one that the stream acked.
		if bad > 1 {
			t.Errorf("%v: %d appends failed", end, bad)
		}
		expectCalls(t, f, 1, 2)
		if _, err := client.Append(soon(t), "a", Text("x")); err != nil {
			t.Error(err)
		}
		expectCalls(t, f, 1, 3)
		// Later the stream is tried again.
		client.nodes.mutex.Lock()
		if left := time.Until(client.nodes.current.unaryUntil); left < 50*time.Second || left > time.Minute {
			t.Errorf("unary for %v", left)
		}
		client.nodes.current.unaryUntil = time.Now()
		client.nodes.mutex.Unlock()
		f.shared = nil
		if _, err := client.Append(soon(t), "a", Text("x")); err != nil {
			t.Error(err)
		}
		expectCalls(t, f, 2, 3)
	}
}

func TestSomeAppendsAreCallsOfTheirOwn(t *testing.T) {
	var seen atomic.Int32
	interceptor := WithGRPC(grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, request, answer any,
		conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
		seen.Add(1)
		return invoke(ctx, method, request, answer, conn, options...)
	}))
	plain := context.Background()
	tagged := metadata.AppendToOutgoingContext(plain, "trace", "1")
	for name, one := range map[string]struct {
		ctx     context.Context
		options []DialOption
		bytes   int
		shared  bool
	}{
		"a small one":                   {plain, nil, 60 << 10, true},
		"a large one":                   {plain, nil, 64 << 10, false},
		"with metadata":                 {tagged, nil, 1, false},
		"without sharing":               {plain, []DialOption{WithSharedAppends(false)}, 1, false},
		"with an interceptor":           {plain, []DialOption{interceptor}, 1, false},
		"with an option, and shared":    {plain, []DialOption{WithGRPC(grpc.WithUserAgent("me")), WithSharedAppends(true)}, 1, true},
		"with sharing, which is normal": {plain, []DialOption{WithSharedAppends(true)}, 1, true},
	} {
		f := &fake{append: appended(7)}
		if _, err := f.start(t, one.options...).Append(one.ctx, "a", Text(strings.Repeat("x", one.bytes))); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := f.streams.Load() == 1; got != one.shared || f.unary.Load() == 1 == one.shared {
			t.Errorf("%s: %d streams, %d unary calls", name, f.streams.Load(), f.unary.Load())
		}
	}
	if seen.Load() != 1 {
		t.Errorf("the interceptor saw %d calls", seen.Load())
	}
}

func TestRecordThatCannotBeEncodedStopsNoOtherAppend(t *testing.T) {
	f := &fake{append: appended(7)}
	client := f.start(t)
	bad := Record{Headers: []Header{{Key: "\xff"}}}
	appends(t, client)
	if _, err := client.Append(soon(t), "a", bad); err == nil {
		t.Error("it was encoded")
	}
	appends(t, client)
	expectCalls(t, f, 1, 0)
}

func TestIdleStreamIsHalfClosedAndTheNextAppendOpensAnother(t *testing.T) {
	f := &fake{append: appended(7)}
	ends := make(chan error, 2)
	f.shared = func(stream sessionStream) error {
		err := f.answerAll(stream)
		ends <- err
		return err
	}
	client := f.start(t)
	appends(t, client)
	began := time.Now()
	// The stream stays while it is used.
	for range 3 {
		time.Sleep(sharedIdle / 2)
		appends(t, client)
	}
	select {
	case err := <-ends:
		if took := time.Since(began); err != nil || took < sharedIdle*5/2 {
			t.Errorf("ended with %v after %v", err, took)
		}
	case <-soon(t).Done():
		t.Fatal("the stream stays open")
	}
	expectCalls(t, f, 1, 0)
	appends(t, client)
	expectCalls(t, f, 2, 0)
}

func TestIdleStreamThatTheServerKeepsIsCancelled(t *testing.T) {
	ends := make(chan struct{})
	f := &fake{shared: func(stream sessionStream) error {
		receive(stream, 1)
		<-stream.Context().Done()
		close(ends)
		return nil
	}}
	client := f.start(t, WithTimeout(20*time.Millisecond))
	if _, err := client.Append(context.Background(), "a", Text("x")); failureOf(err).Outcome != Unknown {
		t.Errorf("got %v", err)
	}
	select {
	case <-ends:
	case <-soon(t).Done():
		t.Error("the stream stays open")
	}
}

func TestStreamToAnEarlierServerDeliversItsAnswers(t *testing.T) {
	a, b := newNode(t), newNode(t)
	answer := make(chan struct{})
	half := make(chan error, 1)
	a.shared = func(stream sessionStream) error {
		requests, err := receive(stream, 2)
		if err != nil {
			return err
		}
		stream.Send(&waldv1.AppendSessionResponse{RequestId: requests[1].RequestId, Error: encoded(movedTo(b.address))})
		_, err = stream.Recv()
		half <- err
		<-answer
		return stream.Send(ackAt(requests[0], 9))
	}
	client := dial(t, a.address, withoutPauses())
	first := make(chan LSN)
	go func() {
		ack, err := client.Append(soon(t), "a", Text("x"))
		if err != nil {
			t.Error(err)
		}
		first <- ack.LSN
	}()
	isDue(t, client, 1)
	appends(t, client)
	if err := <-half; !errors.Is(err, io.EOF) {
		t.Errorf("the old stream got %v", err)
	}
	close(answer)
	if lsn := <-first; lsn != 9 {
		t.Errorf("got %d", lsn)
	}
	if b.streams.Load() != 1 {
		t.Errorf("%d streams at the owner", b.streams.Load())
	}
}

func TestCloseWaitsForSharedAppendsAndHalfClosesTheirStream(t *testing.T) {
	answer, end := make(chan struct{}), make(chan error, 1)
	f := &fake{shared: func(stream sessionStream) error {
		requests, err := receive(stream, 1)
		if err != nil {
			return err
		}
		<-answer
		stream.Send(ackAt(requests[0], 7))
		_, err = stream.Recv()
		end <- err
		return nil
	}}
	client := f.start(t)
	result := make(chan error)
	go func() {
		_, err := client.Append(context.Background(), "a", Text("x"))
		result <- err
	}()
	isDue(t, client, 1)
	closing := make(chan struct{})
	go func() {
		client.Close()
		close(closing)
	}()
	select {
	case <-closing:
		t.Error("Close did not wait")
	case <-time.After(50 * time.Millisecond):
	}
	began := time.Now()
	close(answer)
	if err := <-result; err != nil {
		t.Error(err)
	}
	<-closing
	// The end of an idle stream comes later.
	if took := time.Since(began); took >= sharedIdle {
		t.Errorf("Close took %v", took)
	}
	if err := <-end; !errors.Is(err, io.EOF) {
		t.Errorf("the stream ended with %v", err)
	}
}

func TestSharedStreamsLeaveNoGoroutine(t *testing.T) {
	f := &fake{append: appended(7)}
	f.serve(t, "127.0.0.1")
	hanging := &fake{shared: func(stream sessionStream) error {
		<-stream.Context().Done()
		return nil
	}}
	hanging.serve(t, "127.0.0.1")
	before := runtime.NumGoroutine()
	client := f.dial(t)
	appendEach(t, client, make([]string, 50))
	endStream(t, client)
	appendEach(t, client, make([]string, 50))
	client.Close()
	client = hanging.dial(t, WithTimeout(20*time.Millisecond))
	client.Append(context.Background(), "a", Text("x"))
	stream := sharedOf(client)
	client.Close()
	stream.mutex.Lock()
	if !stream.ended {
		t.Error("Close did not wait for the stream")
	}
	stream.mutex.Unlock()
	for end := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
		}
	}
}

func TestNumberOfARequestComesBehindItsContent(t *testing.T) {
	for _, id := range []uint64{0, 1, 1 << 40, 1<<64 - 1} {
		body := encodeShared(&waldv1.AppendSessionRequest{Independent: true, Append: &waldv1.AppendRequest{Log: "a"}})
		room := cap(body)
		body = numbered(body, id)
		got := new(waldv1.AppendSessionRequest)
		if err := proto.Unmarshal(body, got); err != nil || got.GetRequestId() != id || got.GetAppend().GetLog() != "a" || !got.GetIndependent() {
			t.Errorf("%d: got %v, %v", id, got, err)
		}
		if cap(body) != room {
			t.Errorf("the body moved: room for %d bytes, then %d", room, cap(body))
		}
	}
}
