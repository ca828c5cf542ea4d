package wald

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The domain of ErrorInfo that is believed. A status without it comes from a proxy or the
// transport, and does not report the server's work.
const domain = "wald.dev"

// Outcome says whether a write that failed was applied.
type Outcome string

const (
	// NotApplied: nothing was written, and nothing will be.
	NotApplied Outcome = "NOT_APPLIED"
	// Unknown: it may or may not have been applied, or may still be.
	Unknown Outcome = "UNKNOWN"
)

// Retry is whether the same request may be sent again. The client has done so already, as
// far as its policy and the deadline go.
type Retry string

const (
	// Safe: yes, with backoff.
	Safe Retry = "SAFE"
	// SafeWithCondition: only if it cannot be applied twice, with the same expected lsn or
	// producer. Reads always may.
	SafeWithCondition Retry = "SAFE_WITH_CONDITION"
	// Never: it would fail again.
	Never Retry = "NEVER"
)

// ErrClosed is in the chain of errors of calls on a client, session or producer that its
// owner has closed.
var ErrClosed = errors.New("closed")

// ErrEarlierFailure is in the chain of errors of requests that failed because one before
// them in the same session or producer did.
var ErrEarlierFailure = errors.New("an earlier request failed")

// Error is why a call failed.
type Error struct {
	// Code is the status code; of failures that never left this process, the one that fits.
	Code codes.Code
	// Reason is the server's reason. Empty: the server did not answer, or it is not Wald.
	Reason Reason
	// TLS is why there is no TLS connection. Empty: another failure.
	TLS TLSFailure
	// Server is the server that answered, or was not reached. Empty: the client knows only one.
	Server string
	// Message is the text of the server or the transport, for people.
	Message string
	// Outcome says whether a write was applied. A read has nothing to apply: NotApplied. If an
	// earlier attempt of the same call may have been applied, it is Unknown even if the last
	// attempt was refused: a POSITION_MISMATCH after a lost connection can be the echo of one's
	// own success.
	Outcome Outcome
	// Retry is whether the same request may be sent again.
	Retry Retry
	// Facts is every fact that the server gave, by name, such as first_lsn.
	Facts map[string]string
	// Failed lists the checks that failed, of FAILED_PRECONDITION.
	Failed []FailedCheck
	// RetryAfter is how long the server asks to wait before the next attempt.
	RetryAfter time.Duration

	cause error
}

// FailedCheck is one condition that did not hold.
type FailedCheck struct {
	// Reason is the cause, such as POSITION_MISMATCH.
	Reason Reason
	// Log is the log that was checked.
	Log string
	// Description has the values, for people.
	Description string
}

// Error describes the failure, and if it matters, that the outcome is unknown.
func (e *Error) Error() string {
	name := string(e.Reason)
	if name == "" {
		name = code.Code(e.Code).String()
	}
	if e.Server != "" {
		name = e.Server + ": " + name
	}
	text := fmt.Sprintf("wald: %s: %s", name, e.Message)
	if e.Outcome == Unknown {
		text += " (it may have been applied)"
	}
	return text
}

// Is makes errors.Is(err, wald.ErrFenced) compare reasons.
func (e *Error) Is(target error) bool {
	reason, ok := target.(Reason)
	return ok && reason != "" && reason == e.Reason
}

// Unwrap is the cause, such as context.DeadlineExceeded.
func (e *Error) Unwrap() error { return e.cause }

// GRPCStatus lets status.Code(err) work.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Message) }

// Number is one fact that is a number, such as first_lsn.
func (e *Error) Number(fact string) (uint64, bool) {
	number, err := strconv.ParseUint(e.Facts[fact], 10, 64)
	return number, err == nil
}

// afterUnknown is the error of a call whose earlier attempt may have been applied.
func (e *Error) afterUnknown() *Error {
	changed := *e
	changed.Outcome = Unknown
	if changed.Retry == Safe {
		changed.Retry = SafeWithCondition
	}
	return &changed
}

// ofRead is the error of a call that writes nothing, so that there is nothing to be unsure of.
func (e *Error) ofRead() *Error {
	changed := *e
	changed.Outcome = NotApplied
	return &changed
}

// readError reads the error that a stub returned. `sent` reports whether the request left this
// process, `ctx` is the context that the call ran under.
func readError(ctx context.Context, err error, sent bool) *Error {
	if err == io.EOF {
		return lost("the server ended the stream", sent)
	}
	// FromError finds a status in the chain too, but then puts its own text around it.
	answer, _ := status.FromError(err)
	failure := &Error{Code: answer.Code(), Message: answer.Message()}
	var info *errdetails.ErrorInfo
	for _, detail := range answer.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.GetDomain() == domain {
				info = detail
			}
		case *errdetails.RetryInfo:
			failure.RetryAfter = detail.GetRetryDelay().AsDuration()
		case *errdetails.PreconditionFailure:
			for _, violation := range detail.GetViolations() {
				failure.Failed = append(failure.Failed, FailedCheck{
					Reason:      Reason(violation.GetType()),
					Log:         violation.GetSubject(),
					Description: violation.GetDescription(),
				})
			}
		}
	}
	if info == nil {
		return foreign(ctx, failure, sent)
	}
	failure.Reason = Reason(info.GetReason())
	failure.Facts = maps.Clone(info.GetMetadata())
	failure.Outcome = statedOutcome(failure)
	failure.Retry = statedRetry(failure)
	if failure.Code == codes.DeadlineExceeded {
		failure.cause = context.DeadlineExceeded
	}
	return failure
}

// statedOutcome is the outcome that Wald's error states.
func statedOutcome(e *Error) Outcome {
	switch outcome := e.Facts["outcome"]; {
	case outcome == string(NotApplied):
		return NotApplied
	// The server's promise, whatever the facts say.
	case outcome == "" && e.Code == codes.Unavailable:
		return NotApplied
	}
	return Unknown
}

// statedRetry is the retry that Wald's error states.
func statedRetry(e *Error) Retry {
	switch retry := e.Facts["retry"]; {
	case retry == string(Safe), retry == string(SafeWithCondition):
		return Retry(retry)
	// Errors of reads do not say; these two pass by themselves.
	case retry == "" && (e.Code == codes.Unavailable || e.Code == codes.ResourceExhausted):
		return Safe
	}
	return Never
}

// foreign completes an error that is not Wald's.
func foreign(ctx context.Context, e *Error, sent bool) *Error {
	// Details of a status that is not the server's are not believed either.
	e.Failed, e.RetryAfter = nil, 0
	if ctx.Err() != nil {
		return gaveUp(ctx, sent)
	}
	switch {
	case e.Code == codes.Unimplemented:
		// The method was not even found.
		e.Outcome, e.Retry = NotApplied, Never
		return e
	case e.Code == codes.Unavailable, brokenStream(e):
		return lost(e.Message, sent)
	// The transport on the other side calls its timer's end CANCELLED.
	case e.Code == codes.DeadlineExceeded, e.Code == codes.Canceled && e.Message == "Timeout expired":
		e.Code, e.cause = codes.DeadlineExceeded, context.DeadlineExceeded
		e.Outcome, e.Retry = Unknown, SafeWithCondition
	default:
		e.Outcome, e.Retry = Unknown, Never
	}
	if !sent {
		e.Outcome = NotApplied
	}
	return e
}

// brokenStream tells whether a status was made by the transport on this side, of a stream
// that ended without one.
func brokenStream(e *Error) bool {
	switch e.Code {
	case codes.Canceled, codes.Internal, codes.Unknown:
		return strings.HasPrefix(e.Message, "stream terminated by RST_STREAM") ||
			strings.HasPrefix(e.Message, "server closed the stream without sending trailers")
	}
	return false
}

// lost is the error of a connection that could not be made, or broke.
func lost(detail string, sent bool) *Error {
	if !sent {
		return &Error{
			Code:    codes.Unavailable,
			Message: "not sent: " + detail,
			Outcome: NotApplied,
			Retry:   Safe,
		}
	}
	return &Error{
		Code:    codes.Unavailable,
		Message: "the connection was lost: " + detail,
		Outcome: Unknown,
		Retry:   SafeWithCondition,
	}
}

// gaveUp is the error of a call whose context ended.
func gaveUp(ctx context.Context, sent bool) *Error {
	e := &Error{
		Code:    codes.Canceled,
		Message: "given up by the caller",
		Outcome: Unknown,
		Retry:   SafeWithCondition,
		cause:   ctx.Err(),
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		e.Code, e.Message = codes.DeadlineExceeded, "no answer before the deadline"
	}
	if !sent {
		e.Outcome, e.Retry = NotApplied, Safe
	}
	return e
}

// closed is the error of a call on something that its owner has closed.
func closed(what string) *Error {
	return &Error{
		Code:    codes.Canceled,
		Message: what + " is closed",
		Outcome: NotApplied,
		Retry:   Never,
		cause:   ErrClosed,
	}
}

// invalid is the error of a request that this package refuses to send.
func invalid(format string, args ...any) *Error {
	return &Error{
		Code:    codes.InvalidArgument,
		Message: fmt.Sprintf(format, args...),
		Outcome: NotApplied,
		Retry:   Never,
	}
}

// brokenContract is the error of an answer that lacks a field that the contract promises.
func brokenContract(field string) *Error {
	return &Error{
		Code:    codes.Internal,
		Message: "the answer breaks the contract: " + field + " is missing",
		Outcome: Unknown,
		Retry:   Never,
	}
}
