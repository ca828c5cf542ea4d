package wald

import (
	"context"
	"sync"
)

// Pending is an append underway: of a [Session] or a [Producer].
type Pending[A any] struct {
	done    chan struct{}
	ack     A
	failure *Error
}

func newPending[A any]() *Pending[A] { return &Pending[A]{done: make(chan struct{})} }

// Done is closed once there is an answer.
func (p *Pending[A]) Done() <-chan struct{} { return p.done }

// Wait waits for the answer. If ctx ends before, the append continues; Wait again.
func (p *Pending[A]) Wait(ctx context.Context) (A, error) {
	select {
	case <-p.done:
	case <-ctx.Done():
		var none A
		return none, gaveUp(ctx, true)
	}
	if p.failure != nil {
		return p.ack, p.failure
	}
	return p.ack, nil
}

func (p *Pending[A]) resolve(ack A) {
	p.ack = ack
	close(p.done)
}

func (p *Pending[A]) fail(failure *Error) {
	p.failure = failure
	close(p.done)
}

// signal wakes all waiters for a change. Guarded by the mutex of its owner.
type signal struct{ changed chan struct{} }

func (s *signal) raise() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// awaitChange gives the mutex back until the signal is raised. False: ctx ended.
func awaitChange(ctx context.Context, mutex *sync.Mutex, s *signal) bool {
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	changed := s.changed
	mutex.Unlock()
	defer mutex.Lock()
	select {
	case <-changed:
		return true
	case <-ctx.Done():
		return false
	}
}
