package wald

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
)

// refusal is an error as the server makes it.
func refusal(code codes.Code, reason Reason, facts map[string]string, more ...protoadapt.MessageV1) error {
	info := &errdetails.ErrorInfo{Domain: domain, Reason: string(reason), Metadata: facts}
	answer, err := status.New(code, "said by the server").WithDetails(append(more, info)...)
	if err != nil {
		panic(err)
	}
	return answer.Err()
}

func stated(outcome Outcome, retry Retry) map[string]string {
	return map[string]string{"outcome": string(outcome), "retry": string(retry)}
}

func parse(err error) *Error { return readError(context.Background(), err, true) }

func TestErrorOfWaldHasReasonFactsChecksAndDelay(t *testing.T) {
	facts := stated(NotApplied, Never)
	facts["actual_lsn"] = "12"
	e := parse(refusal(codes.FailedPrecondition, ErrPositionMismatch, facts,
		&errdetails.RetryInfo{RetryDelay: durationpb.New(30 * time.Millisecond)},
		&errdetails.PreconditionFailure{Violations: []*errdetails.PreconditionFailure_Violation{
			{Type: "POSITION_MISMATCH", Subject: "orders", Description: "expected 3, is 12"},
			{Type: "LOG_MISSING", Subject: "stock"},
		}}))
	if e.Code != codes.FailedPrecondition || e.Reason != ErrPositionMismatch || e.Message != "said by the server" {
		t.Errorf("got %#v", e)
	}
	if e.Outcome != NotApplied || e.Retry != Never || e.RetryAfter != 30*time.Millisecond {
		t.Errorf("got %s, %s, %v", e.Outcome, e.Retry, e.RetryAfter)
	}
	if lsn, given := e.Number("actual_lsn"); !given || lsn != 12 {
		t.Errorf("actual_lsn is %d (%v)", lsn, given)
	}
	if _, given := e.Number("first_lsn"); given {
		t.Error("a fact that was not given has a number")
	}
	want := []FailedCheck{
		{ErrPositionMismatch, "orders", "expected 3, is 12"},
		{ErrLogMissing, "stock", ""},
	}
	if len(e.Failed) != 2 || e.Failed[0] != want[0] || e.Failed[1] != want[1] {
		t.Errorf("got checks %v", e.Failed)
	}
}

func TestErrorIsItsReasonAndNoOther(t *testing.T) {
	var err error = parse(refusal(codes.Aborted, "MOON_PHASE", nil))
	if !errors.Is(err, Reason("MOON_PHASE")) || errors.Is(err, ErrFenced) || errors.Is(err, Reason("")) {
		t.Errorf("%v is not what it is", err)
	}
	var e *Error
	if !errors.As(err, &e) || status.Code(err) != codes.Aborted {
		t.Errorf("%v is no *Error of its code", err)
	}
	if errors.Is(lost("", true), Reason("")) {
		t.Error("an error without a reason is the empty reason")
	}
}

// The whole table: the outcome of a write for each error, and whether to send it again.
func TestOutcomeAndRetryOfErrors(t *testing.T) {
	elsewhere, _ := status.New(codes.Unavailable, "").WithDetails(
		&errdetails.ErrorInfo{Domain: "mesh.example", Reason: "STARTING", Metadata: stated(NotApplied, Safe)},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Hour)})
	for _, test := range []struct {
		name    string
		err     error
		sent    bool
		outcome Outcome
		retry   Retry
	}{
		{"busy", refusal(codes.ResourceExhausted, ErrBusy, stated(NotApplied, Safe)), true, NotApplied, Safe},
		{"busy, to a read", refusal(codes.ResourceExhausted, ErrBusy, nil), true, Unknown, Safe},
		{"starting", refusal(codes.Unavailable, ErrStarting, stated(NotApplied, Safe)), true, NotApplied, Safe},
		{"starting, without facts", refusal(codes.Unavailable, ErrStarting, nil), true, NotApplied, Safe},
		{"journal failed underway", refusal(codes.Internal, ErrJournalFailed, stated(Unknown, SafeWithCondition)), true, Unknown, SafeWithCondition},
		{"journal failed before", refusal(codes.Unavailable, ErrJournalFailed, stated(NotApplied, Safe)), true, NotApplied, Safe},
		{"fenced", refusal(codes.FailedPrecondition, ErrFenced, stated(NotApplied, Never)), true, NotApplied, Never},
		{"of a newer server", refusal(codes.Aborted, "MOON_PHASE", map[string]string{"retry": "MAYBE"}), true, Unknown, Never},
		{"of another domain", elsewhere.Err(), true, Unknown, SafeWithCondition},
		{"lost connection", status.Error(codes.Unavailable, "error reading from server: EOF"), true, Unknown, SafeWithCondition},
		{"no connection", status.Error(codes.Unavailable, "connection refused"), false, NotApplied, Safe},
		{"reset stream", status.Error(codes.Internal, "stream terminated by RST_STREAM with error code: INTERNAL_ERROR"), true, Unknown, SafeWithCondition},
		{"cut stream", status.Error(codes.Internal, "server closed the stream without sending trailers"), true, Unknown, SafeWithCondition},
		{"end of stream", io.EOF, true, Unknown, SafeWithCondition},
		{"foreign", status.Error(codes.Internal, "something in between"), true, Unknown, Never},
		{"foreign, not sent", status.Error(codes.Internal, "cannot marshal"), false, NotApplied, Never},
		{"full, by something in between", status.Error(codes.ResourceExhausted, ""), true, Unknown, Never},
		{"not wald", status.Error(codes.Unimplemented, "unknown service"), true, NotApplied, Never},
		{"deadline", status.Error(codes.DeadlineExceeded, ""), true, Unknown, SafeWithCondition},
		{"deadline of the other side", status.Error(codes.Canceled, "Timeout expired"), true, Unknown, SafeWithCondition},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := readError(context.Background(), test.err, test.sent)
			if e.Outcome != test.outcome || e.Retry != test.retry {
				t.Errorf("got %s, %s; want %s, %s", e.Outcome, e.Retry, test.outcome, test.retry)
			}
			if e.RetryAfter != 0 {
				t.Errorf("got a delay of %v", e.RetryAfter)
			}
		})
	}
}

func TestCallersOwnEndIsInTheChain(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	underway := readError(ctx, status.FromContextError(ctx.Err()).Err(), true)
	if !errors.Is(underway, context.Canceled) || underway.Code != codes.Canceled || underway.Outcome != Unknown {
		t.Errorf("got %v, %s", underway, underway.Outcome)
	}
	before := readError(ctx, status.FromContextError(ctx.Err()).Err(), false)
	if before.Outcome != NotApplied || before.Retry != Safe {
		t.Errorf("got %s, %s", before.Outcome, before.Retry)
	}
}

func TestDeadlineIsInTheChainWhoeverNoticedIt(t *testing.T) {
	for _, err := range []error{
		refusal(codes.DeadlineExceeded, ErrDeadlineExceeded, stated(Unknown, SafeWithCondition)),
		status.Error(codes.DeadlineExceeded, ""),
		status.Error(codes.Canceled, "Timeout expired"),
	} {
		if e := parse(err); !errors.Is(e, context.DeadlineExceeded) || e.Code != codes.DeadlineExceeded {
			t.Errorf("got %#v", e)
		}
	}
}

func TestErrorAfterAnUnknownAttemptClaimsNothing(t *testing.T) {
	refused := parse(refusal(codes.FailedPrecondition, ErrPositionMismatch, stated(NotApplied, Never)))
	e := refused.afterUnknown()
	if e.Outcome != Unknown || e.Retry != Never || e.Reason != ErrPositionMismatch {
		t.Errorf("got %s, %s, %s", e.Outcome, e.Retry, e.Reason)
	}
	if refused.Outcome != NotApplied {
		t.Error("the first error has changed")
	}
	busy := parse(refusal(codes.ResourceExhausted, ErrBusy, stated(NotApplied, Safe))).afterUnknown()
	if busy.Retry != SafeWithCondition {
		t.Errorf("got %s", busy.Retry)
	}
}
