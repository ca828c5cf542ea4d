package wald

import (
	"math"
	"math/rand/v2"
	"time"
)

// RetryPolicy is how often and how fast a call is repeated, within its deadline.
type RetryPolicy struct {
	// MaxAttempts is the number of attempts in all, the first included. Default: 16, whose
	// pauses are longer than the default deadline, so that the deadline decides. 1 repeats
	// nothing. A scan gives up as well when it has failed for as long as the client's
	// timeout. A follower that was open once, and a producer, do not count.
	MaxAttempts int
	// FirstPause is the pause before the first repetition; doubles each time, with jitter
	// down to half of it. Default: 50 ms.
	FirstPause time.Duration
	// MaxPause is the longest pause. Default: 2 s. A pause that the server asks for is kept
	// even if longer. An attempt at an owner that a node has just named comes without a pause, at
	// most once between two pauses.
	MaxPause time.Duration
}

// DefaultRetryPolicy is the policy of a client that names none.
func DefaultRetryPolicy() RetryPolicy {
	return RetryPolicy{
		MaxAttempts: 16,
		FirstPause:  50 * time.Millisecond,
		MaxPause:    2 * time.Second,
	}
}

// patient is the policy of calls that retry until their deadline.
func (p RetryPolicy) patient() RetryPolicy {
	p.MaxAttempts = math.MaxInt
	return p
}

// pause is the time to wait after a number of failures in a row.
func (p RetryPolicy) pause(failures int, e *Error) time.Duration {
	full := p.MaxPause
	// Past 30 doublings of anything that matters, the bound is reached.
	if shift := failures - 1; shift < 30 {
		full = min(p.FirstPause<<shift, p.MaxPause)
	}
	jittered := time.Duration(float64(full) * (0.5 + rand.Float64()/2))
	return max(jittered, e.RetryAfter)
}

// pauses are the pauses between the attempts of a call.
type pauses struct {
	policy RetryPolicy
	// Failures in a row.
	failures int
	// The last attempt began without a pause.
	hurried bool
}

// next is the pause after a failed attempt. There is none if the server named the owner of the
// store; but not twice in a row, or two nodes that name each other would make the call spin.
func (p *pauses) next(e *Error, a *attempt) time.Duration {
	p.failures++
	p.hurried = a.named && !p.hurried
	if p.hurried {
		return 0
	}
	return p.policy.pause(p.failures, e)
}

// exhausted tells whether the last attempt of the policy has failed.
func (p *pauses) exhausted() bool { return p.failures >= p.policy.MaxAttempts }

// progress: an attempt was not in vain.
func (p *pauses) progress() { p.failures, p.hurried = 0, false }

// repeat is the effect of a request that is applied twice.
type repeat int

const (
	// harmless: none. Reads, and writes that name the final state, not a change.
	harmless repeat = iota
	// guarded: it cannot be, because a condition holds at most once.
	guarded
	// harmful: records twice, or the undoing of another client's change.
	harmful
)

// allows tells whether to send the request again after this error.
func (r repeat) allows(e *Error) bool {
	// A quota does not pass without a change: its reason is reported at once.
	if e.Reason == ErrQuota {
		return false
	}
	switch e.Retry {
	case Safe:
		return true
	case SafeWithCondition:
		return r != harmful
	}
	return false
}
