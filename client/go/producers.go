package wald

import (
	"context"
	"iter"
	"time"

	"wald.dev/client/go/waldv1"
)

// LogProducer is a producer of a log as the server knows it.
type LogProducer struct {
	// ID is its id.
	ID string
	// Epoch is its newest epoch; lower ones are shut out (ErrProducerFenced).
	Epoch uint64
	// NextSequence is the sequence of its next batch in this epoch.
	NextSequence uint64
	// LastAppendTime is when its newest batch arrived. An idle producer is forgotten 7 days later
	// (setting producer_max_idle of the server).
	LastAppendTime time.Time
}

// ListProducers ranges over the producers of a log, by id; a failure is the last element.
// Producers that begin or are forgotten meanwhile may or may not be seen.
func (c *Client) ListProducers(ctx context.Context, log string, options ...TargetOption) iter.Seq2[LogProducer, error] {
	s := targetOptions(options)
	list := pages(func(token string) ([]*waldv1.LogProducer, string, *Error) {
		request := &waldv1.ListProducersRequest{Log: log, LogId: s.logID, PageSize: s.pageSize, PageToken: token}
		answer, failure := call(ctx, c, reading, c.logs.ListProducers, request)
		return answer.GetProducers(), answer.GetNextPageToken(), failure
	})
	return func(yield func(LogProducer, error) bool) {
		for found, err := range list {
			var element LogProducer
			if err == nil {
				element = LogProducer{
					ID:             found.GetId(),
					Epoch:          found.GetEpoch(),
					NextSequence:   found.GetNextSequence(),
					LastAppendTime: found.GetLastAppendTime().AsTime(),
				}
			}
			if !yield(element, err) || err != nil {
				return
			}
		}
	}
}

// ForgetProducer forgets a producer, durably, which makes room for another one. Its epoch is
// over: later batches of this epoch are refused with ErrProducerExpired, and are never appended
// twice.
func (c *Client) ForgetProducer(ctx context.Context, log, producerID string, options ...TargetOption) error {
	request := &waldv1.ForgetProducerRequest{
		Log:        log,
		ProducerId: producerID,
		LogId:      targetOptions(options).logID,
	}
	_, failure := call(ctx, c, writing(harmful), c.logs.ForgetProducer, request)
	if failure != nil {
		return failure
	}
	return nil
}
