package main

import (
	"context"
	"sync"
)

// group runs functions side by side; the first that fails ends the others.
type group struct {
	running sync.WaitGroup
	once    sync.Once
	failure error
	cancel  context.CancelFunc
}

func newGroup(ctx context.Context) (*group, context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	return &group{cancel: cancel}, ctx
}

func (g *group) run(work func() error) {
	g.running.Go(func() {
		if err := work(); err != nil {
			g.once.Do(func() { g.failure = err })
			g.cancel()
		}
	})
}

func (g *group) wait() error {
	g.running.Wait()
	g.cancel()
	return g.failure
}
