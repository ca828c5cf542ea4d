package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	wald "wald.dev/client/go"
)

// stored holds the effects and the cursor of a consumer, stored together.
type stored struct {
	counting string
	cursor   []byte
	applied  int
	// The lsn that is due in each log.
	next    map[string]wald.LSN
	twice   []any
	skipped []any
	gaps    []any
}

func (s *stored) store(event wald.Event) {
	s.cursor = event.Cursor
	for _, gap := range event.Gaps {
		if !strings.HasPrefix(gap.Log, s.counting) {
			continue
		}
		s.gaps = append(s.gaps, describeGap(gap))
		if gap.ToLSN != nil {
			s.next[gap.Log] = max(s.next[gap.Log], *gap.ToLSN)
		}
	}
	for log, record := range event.Records() {
		if !strings.HasPrefix(log, s.counting) {
			continue
		}
		name := fmt.Sprintf("%s %d", log, record.LSN)
		switch due := s.next[log]; {
		case record.LSN < due:
			s.twice = append(s.twice, name)
		case record.LSN > due:
			s.skipped = append(s.skipped, name)
		}
		s.next[log] = max(s.next[log], record.LSN+1)
		s.applied++
	}
}

// consume is a program that stores effects and cursor together, and is killed again and again.
func consume(ctx context.Context, r *run, a *arguments) (object, error) {
	selector, options := scanArguments(a)
	s := &stored{
		counting: a.text("counting"),
		next:     make(map[string]wald.LSN),
		twice:    []any{},
		skipped:  []any{},
		gaps:     []any{},
	}
	count, length, lives := int(a.number("count")), 1, 0
	for s.applied < count {
		lives++
		before := s.cursor
		if before != nil {
			options = []wald.ScanOption{wald.After(before)}
		}
		if err := s.life(ctx, r.client.Follow(ctx, selector, options...), count, length, lives%2 == 1); err != nil {
			return nil, err
		}
		if bytes.Equal(before, s.cursor) {
			length++
		} else {
			length = 1
		}
	}
	return object{
		"applied": num(s.applied),
		"twice":   s.twice,
		"skipped": s.skipped,
		"gaps":    s.gaps,
		"lives":   num(lives),
	}, nil
}

// life takes a number of events. The caller says whether it stores the last one.
func (s *stored) life(ctx context.Context, follower *wald.Follower, count, length int, last bool) error {
	defer follower.Close()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for taken := 1; taken <= length && s.applied < count; taken++ {
		if !follower.Next(ctx) {
			if err := follower.Err(); err != nil {
				return err
			}
			return errors.New("the follower has ended")
		}
		if taken < length || last {
			s.store(follower.Event())
		}
	}
	return nil
}
