package wald

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"wald.dev/client/go/waldv1"
)

// failing answers the calls in turn with these errors, then with acks. A nil error loses the
// connection instead of answering.
func failing(f *fake, errs ...error) *atomic.Int32 {
	calls := new(atomic.Int32)
	f.append = func(*waldv1.AppendRequest) (*waldv1.AppendResponse, error) {
		call := int(calls.Add(1))
		if call > len(errs) {
			return &waldv1.AppendResponse{Lsn: new(uint64(7))}, nil
		}
		if errs[call-1] == nil {
			f.listener.drop()
			return nil, errors.New("nobody hears this")
		}
		return nil, errs[call-1]
	}
	return calls
}

func TestPlainAppendWhoseConnectionBreaksIsNotRepeated(t *testing.T) {
	f := new(fake)
	calls := failing(f, nil)
	_, err := f.start(t).Append(soon(t), "a", Text("x"))
	var e *Error
	if !errors.As(err, &e) || e.Outcome != Unknown || e.Retry != SafeWithCondition || e.Code != codes.Unavailable {
		t.Errorf("got %#v", err)
	}
	if calls.Load() != 1 {
		t.Errorf("%d calls", calls.Load())
	}
}

func TestPlainAppendThatWasNotAppliedIsRepeated(t *testing.T) {
	f := new(fake)
	calls := failing(f,
		refusal(codes.Unavailable, ErrStarting, stated(NotApplied, Safe)),
		refusal(codes.ResourceExhausted, ErrBusy, stated(NotApplied, Safe)))
	ack, err := f.start(t).Append(soon(t), "a", Text("x"))
	if err != nil || ack.LSN != 7 || calls.Load() != 3 {
		t.Errorf("got %v, %v after %d calls", ack, err, calls.Load())
	}
}

func TestGuardedAppendIsRepeatedAfterALostConnection(t *testing.T) {
	f := new(fake)
	calls := failing(f, nil, refusal(codes.Internal, ErrJournalFailed, stated(Unknown, SafeWithCondition)))
	ack, err := f.start(t).Append(soon(t), "a", Text("x"), ExpectLSN(7))
	if err != nil || ack.LSN != 7 || calls.Load() != 3 {
		t.Errorf("got %v, %v after %d calls", ack, err, calls.Load())
	}
}

func TestMismatchAfterALostConnectionMayBeTheEchoOfOnesOwnSuccess(t *testing.T) {
	f := new(fake)
	failing(f, nil, refusal(codes.FailedPrecondition, ErrPositionMismatch, stated(NotApplied, Never)))
	_, err := f.start(t).Append(soon(t), "a", Text("x"), ExpectLSN(7))
	var e *Error
	if !errors.As(err, &e) || e.Reason != ErrPositionMismatch || e.Outcome != Unknown {
		t.Errorf("got %#v", err)
	}
}

func TestMismatchAtOnceIsNotApplied(t *testing.T) {
	f := new(fake)
	busy := refusal(codes.ResourceExhausted, ErrBusy, stated(NotApplied, Safe))
	failing(f, busy, refusal(codes.FailedPrecondition, ErrPositionMismatch, stated(NotApplied, Never)))
	_, err := f.start(t).Append(soon(t), "a", Text("x"), ExpectLSN(7))
	var e *Error
	if !errors.As(err, &e) || e.Outcome != NotApplied || e.Retry != Never {
		t.Errorf("got %#v", err)
	}
}

func TestAttemptsAreCounted(t *testing.T) {
	f := new(fake)
	busy := refusal(codes.ResourceExhausted, ErrBusy, stated(NotApplied, Safe))
	calls := failing(f, busy, busy, busy, busy)
	client := f.start(t, WithRetry(RetryPolicy{MaxAttempts: 3, FirstPause: time.Millisecond, MaxPause: time.Millisecond}))
	if _, err := client.Append(soon(t), "a", Text("x")); !errors.Is(err, ErrBusy) || calls.Load() != 3 {
		t.Errorf("got %v after %d calls", err, calls.Load())
	}
}

func TestNoAttemptBeginsThatTheDeadlineWouldCutOff(t *testing.T) {
	f := new(fake)
	busy := refusal(codes.ResourceExhausted, ErrBusy, stated(NotApplied, Safe))
	calls := failing(f, busy)
	client := f.start(t, WithTimeout(time.Minute),
		WithRetry(RetryPolicy{MaxAttempts: 9, FirstPause: time.Hour, MaxPause: time.Hour}))
	if _, err := client.Append(context.Background(), "a", Text("x")); !errors.Is(err, ErrBusy) || calls.Load() != 1 {
		t.Errorf("got %v after %d calls", err, calls.Load())
	}
}

func TestNobodyListeningIsNotApplied(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	endpoint := listener.Addr().String()
	listener.Close()
	_, err = dial(t, endpoint).Append(soon(t), "a", Text("x"))
	var e *Error
	if !errors.As(err, &e) || e.Outcome != NotApplied || e.Retry != Safe || e.Code != codes.Unavailable {
		t.Errorf("got %#v", err)
	}
}

func TestReadIsRepeatedAfterALostConnection(t *testing.T) {
	f := new(fake)
	var calls atomic.Int32
	f.tail = func(*waldv1.GetTailRequest) (*waldv1.GetTailResponse, error) {
		if calls.Add(1) == 1 {
			f.listener.drop()
		}
		return &waldv1.GetTailResponse{FirstLsn: new(uint64(0)), TailLsn: new(uint64(5))}, nil
	}
	tail, err := f.start(t).Tail(soon(t), "a")
	if err != nil || tail.TailLSN != 5 || calls.Load() != 2 {
		t.Errorf("got %v, %v after %d calls", tail, err, calls.Load())
	}
}

// expectAttempts checks a write whose first answer was lost: it is repeated, or its outcome is unknown.
func expectAttempts(t *testing.T, name string, err error, calls int32, repeated bool) {
	t.Helper()
	var e *Error
	switch {
	case repeated && (err != nil || calls != 2):
		t.Errorf("%s: got %v after %d calls", name, err, calls)
	case !repeated && (!errors.As(err, &e) || e.Outcome != Unknown || e.Retry != SafeWithCondition || calls != 1):
		t.Errorf("%s: got %#v after %d calls", name, err, calls)
	}
}

func TestCursorCommitIsRepeatedOnlyIfTheCursorMovesOn(t *testing.T) {
	for _, test := range []struct {
		name     string
		expected *LSN
		repeated bool
	}{
		{"from anywhere", nil, false},
		{"from where it stays", new(LSN(4)), false},
		{"from elsewhere", new(LSN(3)), true},
	} {
		f := new(fake)
		var calls atomic.Int32
		f.commit = func(*waldv1.CommitCursorRequest) (*waldv1.CommitCursorResponse, error) {
			if calls.Add(1) == 1 {
				f.listener.drop()
			}
			return &waldv1.CommitCursorResponse{Cursor: &waldv1.Cursor{Lsn: new(uint64(4))}}, nil
		}
		commit := CursorCommit{Log: "a", Cursor: "c", LSN: 4, ExpectedLSN: test.expected}
		_, err := f.start(t).Cursors().Commit(soon(t), commit)
		expectAttempts(t, test.name, err, calls.Load(), test.repeated)
	}
}

func TestFenceIsRepeatedOnlyWithAnEpochOrALogID(t *testing.T) {
	for _, test := range []struct {
		name     string
		options  []TargetOption
		repeated bool
	}{
		{"any log of the name", nil, false},
		{"this log", []TargetOption{WithLogID(9)}, true},
		{"this epoch", []TargetOption{ToEpoch(3)}, true},
		{"this epoch of this log", []TargetOption{ToEpoch(3), WithLogID(9)}, true},
	} {
		f := new(fake)
		var calls atomic.Int32
		f.fence = func(*waldv1.FenceRequest) (*waldv1.FenceResponse, error) {
			if calls.Add(1) == 1 {
				f.listener.drop()
			}
			return &waldv1.FenceResponse{TailLsn: new(uint64(5)), WriterEpoch: new(uint64(3))}, nil
		}
		_, err := f.start(t).Fence(soon(t), "a", test.options...)
		expectAttempts(t, test.name, err, calls.Load(), test.repeated)
	}
}

func TestClosedClientSaysSo(t *testing.T) {
	client := new(fake).start(t)
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Append(soon(t), "a", Text("x")); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v", err)
	}
	if _, err := client.Session(soon(t)); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v", err)
	}
}

func TestCloseWaitsForAppendsUnderWay(t *testing.T) {
	f := new(fake)
	arrived, answer := make(chan struct{}), make(chan struct{})
	f.append = func(*waldv1.AppendRequest) (*waldv1.AppendResponse, error) {
		close(arrived)
		<-answer
		return &waldv1.AppendResponse{Lsn: new(uint64(7))}, nil
	}
	client := f.start(t)
	result := make(chan error)
	go func() {
		_, err := client.Append(context.Background(), "a", Text("x"))
		result <- err
	}()
	<-arrived
	closing := make(chan struct{})
	go func() {
		client.Close()
		close(closing)
	}()
	close(answer)
	if err := <-result; err != nil {
		t.Error(err)
	}
	<-closing
}

func TestEndpointsGetTheDefaultPort(t *testing.T) {
	for endpoint, target := range map[string]string{
		"localhost": "localhost:6925", "http://localhost/": "localhost:6925", "[::1]": "[::1]:6925",
		"http://localhost:80": "localhost:80", "dns:///wald": "dns:///wald",
	} {
		got, err := parseEndpoint(endpoint, &settings{})
		if err != nil || got != target {
			t.Errorf("%q: %q, %v", endpoint, got, err)
		}
	}
}

func TestEndpointsAreUnderstood(t *testing.T) {
	for endpoint, good := range map[string]bool{
		"127.0.0.1:6925": true, "http://localhost:6925": true, "http://localhost:6925/": true,
		"": false, "http://": false, "https://localhost:6925": true, "https://": false, "127.0.0.1:179250": false,
		"localhost:0": false, "localhost:x": false, "me:secret@localhost": false,
	} {
		client, err := Dial(endpoint)
		if (err == nil) != good {
			t.Errorf("%q: %v", endpoint, err)
		}
		if client != nil {
			client.Close()
		}
	}
}
