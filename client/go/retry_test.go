package wald

import (
	"testing"
	"time"
)

func TestWhichErrorsAllowARepeat(t *testing.T) {
	for _, test := range []struct {
		retry                      Retry
		harmless, guarded, harmful bool
	}{
		{Safe, true, true, true},
		{SafeWithCondition, true, true, false},
		{Never, false, false, false},
	} {
		e := &Error{Retry: test.retry}
		if harmless.allows(e) != test.harmless || guarded.allows(e) != test.guarded || harmful.allows(e) != test.harmful {
			t.Errorf("%s: got %v, %v, %v", test.retry, harmless.allows(e), guarded.allows(e), harmful.allows(e))
		}
	}
}

func TestWhichAppendsAreGuarded(t *testing.T) {
	lsn, epoch, id := LSN(3), uint64(1), uint64(7)
	for _, test := range []struct {
		name      string
		condition Condition
		repeat    repeat
	}{
		{"nothing", Condition{}, harmful},
		{"must exist", Condition{MustExist: true}, harmful},
		{"writer epoch", Condition{WriterEpoch: &epoch}, harmful},
		{"log id", Condition{LogID: &id}, harmful},
		{"expected lsn", Condition{ExpectedLSN: &lsn}, guarded},
		{"must not exist", Condition{MustNotExist: true}, guarded},
		{"sequence", Condition{Sequence: &Sequence{ProducerID: "p"}}, guarded},
	} {
		if got := test.condition.repeat(); got != test.repeat {
			t.Errorf("%s: got %v", test.name, got)
		}
		batch := Batch{Logs: []LogBatch{{Log: "plain"}, {Log: "a", Condition: test.condition}}}
		if got := batch.repeat(); got != test.repeat {
			t.Errorf("batch, %s: got %v", test.name, got)
		}
	}
	plain := Batch{Logs: []LogBatch{{Log: "a"}}, Cursors: []CursorCommit{{LSN: 4, ExpectedLSN: &lsn}}}
	if plain.repeat() != guarded {
		t.Error("a cursor that moves on from where it is expected does not guard")
	}
	plain.Cursors[0].LSN = lsn
	if plain.repeat() != harmful {
		t.Error("a cursor that stays where it is guards")
	}
	if (Batch{Cursors: plain.Cursors}).repeat() != harmful {
		t.Error("a batch of unguarded cursors alone does no harm")
	}
	if (Batch{Checks: []Check{{Log: "a"}}}).repeat() != harmless {
		t.Error("a batch of checks alone does harm")
	}
}

func TestTheDeadlineDecidesUnlessToldOtherwise(t *testing.T) {
	policy := DefaultRetryPolicy()
	var pauses time.Duration
	for failures := 1; failures < policy.MaxAttempts; failures++ {
		pauses += policy.pause(failures, &Error{})
	}
	if pauses < DefaultTimeout {
		t.Errorf("the attempts end after %v", pauses)
	}
}

func TestPausesDoubleUpToTheirBoundWithJitter(t *testing.T) {
	policy := RetryPolicy{MaxAttempts: 5, FirstPause: 10 * time.Millisecond, MaxPause: 35 * time.Millisecond}
	for failures, full := range map[int]time.Duration{
		1: 10 * time.Millisecond, 2: 20 * time.Millisecond, 3: 35 * time.Millisecond, 1000: 35 * time.Millisecond,
	} {
		for range 100 {
			pause := policy.pause(failures, &Error{})
			if pause < full/2 || pause > full {
				t.Fatalf("after %d failures: %v", failures, pause)
			}
		}
	}
	if pause := policy.pause(1, &Error{RetryAfter: time.Second}); pause != time.Second {
		t.Errorf("the server asks for a second, got %v", pause)
	}
}
