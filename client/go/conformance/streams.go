package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	wald "wald.dev/client/go"
)

// seen holds the events that a scan has delivered.
type seen struct {
	records []any
	gaps    []any
	cursor  []byte
	// Whether it has caught up once.
	caughtUp bool
}

func describeGap(gap wald.Gap) object {
	described := object{
		"log":      gap.Log,
		"from_lsn": num(gap.FromLSN),
		"reason":   shortName(gap.Reason, "GAP_REASON_"),
	}
	if gap.ToLSN != nil {
		described["to_lsn"] = num(*gap.ToLSN)
	}
	return described
}

func (s *seen) add(event wald.Event) {
	for _, gap := range event.Gaps {
		s.gaps = append(s.gaps, describeGap(gap))
	}
	for log, record := range event.Records() {
		s.records = append(s.records, describeRecord(log, record))
	}
	s.cursor = event.Cursor
	s.caughtUp = s.caughtUp || event.CaughtUp
}

func (s *seen) describe() object {
	return object{
		"records":   append([]any{}, s.records...),
		"gaps":      append([]any{}, s.gaps...),
		"cursor":    s.cursor,
		"caught_up": s.caughtUp,
	}
}

// follower collects in the background the events that a wald.Follower delivers.
type follower struct {
	following *wald.Follower
	done      chan struct{}

	mutex   sync.Mutex
	seen    seen
	changed chan struct{}
	err     error
}

func follow(ctx context.Context, r *run, a *arguments) (object, error) {
	selector, options := scanArguments(a)
	f := &follower{
		following: r.client.Follow(ctx, selector, options...),
		done:      make(chan struct{}),
		changed:   make(chan struct{}, 1),
	}
	go f.collect(ctx)
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.followers[a.text("as")] = f
	return object{}, nil
}

func (f *follower) collect(ctx context.Context) {
	defer close(f.done)
	for f.following.Next(ctx) {
		f.mutex.Lock()
		f.seen.add(f.following.Event())
		f.mutex.Unlock()
		select {
		case f.changed <- struct{}{}:
		default:
		}
	}
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.err = f.following.Err()
}

func (f *follower) close() {
	f.following.Close()
	<-f.done
}

func followed(ctx context.Context, r *run, a *arguments) (object, error) {
	r.mutex.Lock()
	f := r.followers[a.text("follower")]
	r.mutex.Unlock()
	count, gaps := int(a.number("count")), int(a.number("gaps"))
	late := time.After(patience)
	for {
		f.mutex.Lock()
		described, err := f.seen.describe(), f.err
		enough := len(f.seen.records) >= count && len(f.seen.gaps) >= gaps &&
			(f.seen.caughtUp || !a.flag("caught_up"))
		f.mutex.Unlock()
		if enough {
			return described, nil
		}
		select {
		case <-f.changed:
		case <-f.done:
			if err != nil {
				return nil, err
			}
			return nil, fmt.Errorf("the follower ended with %s", show(described))
		case <-late:
			return nil, fmt.Errorf("%v over, and only %s", patience, show(described))
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func unfollow(_ context.Context, r *run, a *arguments) (object, error) {
	r.mutex.Lock()
	f := r.followers[a.text("follower")]
	delete(r.followers, a.text("follower"))
	r.mutex.Unlock()
	f.close()
	return object{}, nil
}

// Number of batches whose repeats the server recognises.
const inFlight = 1024

func producer(ctx context.Context, r *run, a *arguments) (object, error) {
	options := []wald.ProducerOption{wald.WithInFlight(inFlight, 8<<20)}
	if a.has("id") {
		options = append(options, wald.WithProducerID(a.text("id"), a.number("epoch")))
	}
	if a.has("log_id") {
		options = append(options, wald.WithProducerLogID(a.number("log_id")))
	}
	opened, err := r.client.Producer(ctx, a.text("log"), options...)
	if err != nil {
		return nil, err
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.producers[a.text("as")] = opened
	return object{}, nil
}

func closeProducer(ctx context.Context, r *run, a *arguments) (object, error) {
	return object{}, r.producer(a.text("producer")).Close(ctx)
}

func (r *run) producer(name string) *wald.Producer {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.producers[name]
}

func produce(ctx context.Context, r *run, a *arguments) (object, error) {
	list, _ := a.members["records"].([]any)
	records := records(a, list)
	if a.err != nil {
		return nil, a.err
	}
	var options []wald.AppendOption
	if a.has("writer_epoch") {
		options = append(options, wald.AsWriter(a.number("writer_epoch")))
	}
	if a.has("expected_lsn") {
		options = append(options, wald.ExpectLSN(wald.LSN(a.number("expected_lsn"))))
	}
	ack, err := r.producer(a.text("producer")).Append(ctx, records, options...)
	return object{
		"first_lsn":    num(ack.FirstLSN),
		"next_lsn":     num(ack.NextLSN),
		"deduplicated": ack.Deduplicated,
	}, err
}

func produceMany(ctx context.Context, r *run, a *arguments) (object, error) {
	producer := r.producer(a.text("producer"))
	count, window := a.number("count"), int(a.number("in_flight"))
	var pending []*wald.Pending[wald.LogAck]
	acked, ascend, next := 0, true, wald.LSN(0)
	take := func() error {
		ack, err := pending[0].Wait(ctx)
		if err != nil {
			return fmt.Errorf("after %d acks: %w", acked, err)
		}
		ascend = ascend && (acked == 0 || ack.FirstLSN >= next)
		acked, next, pending = acked+1, ack.NextLSN, pending[1:]
		return nil
	}
	for i := range count {
		if len(pending) == window {
			if err := take(); err != nil {
				return nil, err
			}
		}
		sent, err := producer.Send(ctx, []wald.Record{wald.Text(fmt.Sprintf("%s%d", a.text("prefix"), i))})
		if err != nil {
			return nil, err
		}
		pending = append(pending, sent)
	}
	for len(pending) > 0 {
		if err := take(); err != nil {
			return nil, err
		}
	}
	return object{"acked": num(acked), "lsns_ascend": ascend}, nil
}
