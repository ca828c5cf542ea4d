package wald

import (
	"context"
	"time"

	"wald.dev/client/go/waldv1"
)

// Durability is how safe records are. The levels are ordered, each includes those before it.
type Durability = waldv1.Durability

const (
	// Accepted: in the daemon's memory.
	Accepted = waldv1.Durability_DURABILITY_ACCEPTED
	// Written: handed to the operating system; survives a kill -9, not a power cut.
	Written = waldv1.Durability_DURABILITY_WRITTEN
	// Durable: flushed to the device.
	Durable = waldv1.Durability_DURABILITY_DURABLE
	// Replicated: also in the bucket of a replica; survives the loss of the machine.
	Replicated = waldv1.Durability_DURABILITY_REPLICATED
)

// Condition holds the conditions of an append. Every condition that is set must hold; otherwise
// nothing is written.
type Condition struct {
	// ExpectedLSN is the lsn that the first record must get, or POSITION_MISMATCH. With it a
	// repeat cannot append twice, so the client repeats automatically.
	ExpectedLSN *LSN
	// MustExist: the log must exist, or LOG_MISSING.
	MustExist bool
	// MustNotExist: the log must not exist, or LOG_EXISTS.
	MustNotExist bool
	// WriterEpoch equals the log's, or FENCED.
	WriterEpoch *uint64
	// Sequence makes retries exactly-once. A [Producer] sets it automatically.
	Sequence *Sequence
	// LogID: the log must have this number, or LOG_REPLACED.
	LogID *uint64
}

// Sequence identifies the producer and the sequence number of a batch.
type Sequence struct {
	// ProducerID is the name of the source.
	ProducerID string
	// Epoch is the incarnation of the source; a higher one takes over.
	Epoch uint64
	// Number counts the batches of the source in this log from 0, again from 0 in a higher
	// epoch.
	Number uint64
}

// LogBatch is records for one log.
type LogBatch struct {
	Log       string
	Records   []Record
	Condition Condition
}

// Check is a condition on a log that is not written. All that is set must hold.
type Check struct {
	Log          string
	ExpectedLSN  *LSN
	MustExist    bool
	MustNotExist bool
	LogID        *uint64
}

// Batch is an append to one or more logs, all or nothing.
type Batch struct {
	// Logs are the records, each log at most once.
	Logs []LogBatch
	// Checks are conditions on logs that are not written.
	Checks []Check
	// Cursors are moved in the same step.
	Cursors []CursorCommit
	// Durability is how durable all must be before the answer. Zero: as the sync modes of
	// the logs say.
	Durability Durability
}

// Ack is the answer to an append of one record.
type Ack struct {
	// LSN is the record's number in its log.
	LSN LSN
	// Time is the record's stored time.
	Time time.Time
	// DurableLSN: every lsn of the log below it is flushed to the device.
	DurableLSN LSN
	// ReplicatedLSN: every lsn of the log below it is in the bucket of a replica; 0 without a replica.
	ReplicatedLSN LSN
	// Durability is the durability reached.
	Durability Durability
	// Deduplicated: a repeat of an append that was applied before.
	Deduplicated bool
	// Position is where the record lies in the journal; nil while it is only accepted.
	Position *uint64
	// RecoveryEpoch rises with every unclean start of the server.
	RecoveryEpoch uint64
	// LogID is the log's number, unique for ever.
	LogID uint64
}

// BatchAck is the answer to an append of a batch.
type BatchAck struct {
	// Appends answers Batch.Logs, in its order.
	Appends []LogAck
	// Durability is the durability reached.
	Durability Durability
	// Position is where the whole lies in the journal; nil while it is only accepted, and if
	// nothing was written.
	Position *uint64
	// RecoveryEpoch rises with every unclean start of the server.
	RecoveryEpoch uint64
}

// LogAck is the result of one log's part of a batch.
type LogAck struct {
	// Log is the log's name.
	Log string
	// FirstLSN is the lsn of the first record.
	FirstLSN LSN
	// NextLSN is the lsn after the last record.
	NextLSN LSN
	// Time is when the batch arrived.
	Time time.Time
	// DurableLSN: every lsn of the log below it is flushed to the device.
	DurableLSN LSN
	// ReplicatedLSN: every lsn of the log below it is in the bucket of a replica; 0 without a replica.
	ReplicatedLSN LSN
	// Deduplicated: a repeat of a batch that was applied before.
	Deduplicated bool
	// LogID is the log's number, unique for ever.
	LogID uint64
}

type appendSettings struct {
	condition  Condition
	durability Durability
}

// AppendOption is a setting of one append.
type AppendOption func(*appendSettings)

// If sets the conditions of an append. It replaces the conditions of earlier options.
func If(condition Condition) AppendOption {
	return func(s *appendSettings) { s.condition = condition }
}

// ExpectLSN is the lsn that the record must get, or POSITION_MISMATCH. With it a repeat cannot
// append twice, so the client repeats automatically.
func ExpectLSN(lsn LSN) AppendOption {
	return func(s *appendSettings) { s.condition.ExpectedLSN = &lsn }
}

// AsWriter is the writer epoch that the log must have, or FENCED.
func AsWriter(epoch uint64) AppendOption {
	return func(s *appendSettings) { s.condition.WriterEpoch = &epoch }
}

// WithDurability is how durable the record must be before the answer. Default: as the log's
// sync mode says.
func WithDurability(durability Durability) AppendOption {
	return func(s *appendSettings) { s.durability = durability }
}

func appendOptions(options []AppendOption) appendSettings {
	var s appendSettings
	for _, option := range options {
		option(&s)
	}
	return s
}

// Append appends one record to a log. It answers when the record is as durable as asked; the
// default is: flushed to the device.
func (c *Client) Append(ctx context.Context, log string, record Record, options ...AppendOption) (Ack, error) {
	s := appendOptions(options)
	request := &waldv1.AppendRequest{
		Log:        log,
		Record:     record.proto(),
		Condition:  s.condition.proto(),
		Durability: s.durability,
	}
	answer, failure := call(ctx, c, writing(s.condition.repeat()), c.sendAppend, request)
	if failure != nil {
		return Ack{}, failure
	}
	if answer.Lsn == nil {
		return Ack{}, brokenContract("AppendResponse.lsn")
	}
	return Ack{
		LSN:           LSN(answer.GetLsn()),
		Time:          time.UnixMicro(answer.GetTimestampUs()).UTC(),
		DurableLSN:    LSN(answer.GetDurableLsn()),
		ReplicatedLSN: LSN(answer.GetReplicatedLsn()),
		Durability:    answer.GetDurability(),
		Deduplicated:  answer.GetDeduplicated(),
		Position:      answer.Position,
		RecoveryEpoch: answer.GetRecoveryEpoch(),
		LogID:         answer.GetLogId(),
	}, nil
}

// AppendBatch appends to one or more logs, all or nothing, with conditions; may move cursors
// in the same step. Readers see each log's part whole or not at all.
func (c *Client) AppendBatch(ctx context.Context, batch Batch) (BatchAck, error) {
	answer, failure := call(ctx, c, writing(batch.repeat()), c.sendBatch, batch.proto())
	if failure != nil {
		return BatchAck{}, failure
	}
	ack, failure := readBatchAck(answer)
	if failure != nil {
		return BatchAck{}, failure
	}
	return ack, nil
}

// guards tells whether a repeat cannot be applied a second time.
func (c Condition) guards() bool {
	return c.ExpectedLSN != nil || c.MustNotExist || c.Sequence != nil
}

func (c Condition) repeat() repeat {
	if c.guards() {
		return guarded
	}
	return harmful
}

// repeat: the batch is all or nothing, so one guard is enough.
func (b Batch) repeat() repeat {
	for _, part := range b.Logs {
		if part.Condition.guards() {
			return guarded
		}
	}
	for _, cursor := range b.Cursors {
		if cursor.guards() {
			return guarded
		}
	}
	// Checks alone change nothing.
	if len(b.Logs) == 0 && len(b.Cursors) == 0 {
		return harmless
	}
	return harmful
}

func (c Condition) proto() *waldv1.AppendCondition {
	if c == (Condition{}) {
		return nil
	}
	condition := &waldv1.AppendCondition{
		ExpectedLsn:  (*uint64)(c.ExpectedLSN),
		MustExist:    c.MustExist,
		MustNotExist: c.MustNotExist,
		WriterEpoch:  c.WriterEpoch,
		LogId:        c.LogID,
	}
	if c.Sequence != nil {
		condition.Producer = &waldv1.Producer{
			Id:       c.Sequence.ProducerID,
			Epoch:    c.Sequence.Epoch,
			Sequence: c.Sequence.Number,
		}
	}
	return condition
}

func (b Batch) proto() *waldv1.AppendBatchRequest {
	request := &waldv1.AppendBatchRequest{Durability: b.Durability}
	for _, part := range b.Logs {
		request.Batches = append(request.Batches, &waldv1.LogBatch{
			Log:       part.Log,
			Records:   protoRecords(part.Records),
			Condition: part.Condition.proto(),
		})
	}
	for _, check := range b.Checks {
		request.Checks = append(request.Checks, &waldv1.LogCheck{
			Log:          check.Log,
			ExpectedLsn:  (*uint64)(check.ExpectedLSN),
			MustExist:    check.MustExist,
			MustNotExist: check.MustNotExist,
			LogId:        check.LogID,
		})
	}
	for _, cursor := range b.Cursors {
		request.Cursors = append(request.Cursors, cursor.proto())
	}
	return request
}

func readBatchAck(answer *waldv1.AppendBatchResponse) (BatchAck, *Error) {
	ack := BatchAck{
		Appends:       make([]LogAck, len(answer.GetAppends())),
		Durability:    answer.GetDurability(),
		Position:      answer.Position,
		RecoveryEpoch: answer.GetRecoveryEpoch(),
	}
	for i, part := range answer.GetAppends() {
		if part.FirstLsn == nil || part.NextLsn == nil {
			return BatchAck{}, brokenContract("LogAppend.first_lsn or next_lsn")
		}
		ack.Appends[i] = LogAck{
			Log:           part.GetLog(),
			FirstLSN:      LSN(part.GetFirstLsn()),
			NextLSN:       LSN(part.GetNextLsn()),
			Time:          time.UnixMicro(part.GetTimestampUs()).UTC(),
			DurableLSN:    LSN(part.GetDurableLsn()),
			ReplicatedLSN: LSN(part.GetReplicatedLsn()),
			Deduplicated:  part.GetDeduplicated(),
			LogID:         part.GetLogId(),
		}
	}
	return ack, nil
}
