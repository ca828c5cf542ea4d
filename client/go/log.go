package wald

import (
	"context"
	"iter"

	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"wald.dev/client/go/waldv1"
)

// LogInfo is a log: its configuration and where it stands.
type LogInfo = waldv1.Log

// LogConfig holds the settings of one log. Unset fields mean the server's defaults.
type LogConfig = waldv1.LogConfig

// TailInfo is where a log stands.
type TailInfo struct {
	// FirstLSN is the first lsn kept.
	FirstLSN LSN
	// TailLSN is the next lsn.
	TailLSN LSN
	// DurableLSN: every lsn below it is flushed to the device.
	DurableLSN LSN
	// ReplicatedLSN: every lsn below it is in the bucket of a replica; 0 without a replica.
	ReplicatedLSN LSN
	// WriterEpoch is 0 until the first fence.
	WriterEpoch uint64
	// RecoveryEpoch rises with every unclean start of the server.
	RecoveryEpoch uint64
	// LogID is the log's number, unique for ever.
	LogID uint64
	// SurvivedPosition is the end of the survivors of the requested recovery epoch: an append
	// acked in that epoch survived if and only if its position is below. Nil: no epoch was
	// requested, or it is the current one.
	SurvivedPosition *uint64
}

// FenceInfo is where a log stands once older writers are shut out.
type FenceInfo struct {
	// TailLSN is the tail that no older writer can pass.
	TailLSN LSN
	// WriterEpoch is the writer epoch now.
	WriterEpoch uint64
	// LogID is the log's number, unique for ever.
	LogID uint64
}

type targetSettings struct {
	logID         *uint64
	visibility    Visibility
	recoveryEpoch *uint64
	writerEpoch   *uint64
	pageSize      uint32
}

// TargetOption is a setting of calls about one log: Tail, Trim, Fence, DeleteLog and the ones
// about cursors and producers.
type TargetOption func(*targetSettings)

// WithLogID: the log must have this number, or LOG_REPLACED.
func WithLogID(id uint64) TargetOption {
	return func(s *targetSettings) { s.logID = &id }
}

// PageSize is the number of elements that [Client.ListProducers] requests at a time. Default:
// the server's (100), at most 1,000.
func PageSize(count uint32) TargetOption {
	return func(s *targetSettings) { s.pageSize = count }
}

// TailVisible is which tail [Client.Tail] tells. Default: of the records that the log's sync
// mode acks.
func TailVisible(visibility Visibility) TargetOption {
	return func(s *targetSettings) { s.visibility = visibility }
}

// SurvivedSince makes [Client.Tail] report the survivors of this recovery epoch.
func SurvivedSince(recoveryEpoch uint64) TargetOption {
	return func(s *targetSettings) { s.recoveryEpoch = &recoveryEpoch }
}

// ToEpoch is the writer epoch that [Client.Fence] sets. Default: the current and one.
func ToEpoch(epoch uint64) TargetOption {
	return func(s *targetSettings) { s.writerEpoch = &epoch }
}

func targetOptions(options []TargetOption) targetSettings {
	var s targetSettings
	for _, option := range options {
		option(&s)
	}
	return s
}

// Tail is where a log stands.
func (c *Client) Tail(ctx context.Context, log string, options ...TargetOption) (TailInfo, error) {
	s := targetOptions(options)
	tail, failure := c.tail(ctx, &waldv1.GetTailRequest{
		Log:           log,
		Visibility:    s.visibility,
		RecoveryEpoch: s.recoveryEpoch,
		LogId:         s.logID,
	})
	if failure != nil {
		return TailInfo{}, failure
	}
	return tail, nil
}

func (c *Client) tail(ctx context.Context, request *waldv1.GetTailRequest) (TailInfo, *Error) {
	answer, failure := call(ctx, c, reading, c.wal.GetTail, request)
	if failure != nil {
		return TailInfo{}, failure
	}
	if answer.FirstLsn == nil || answer.TailLsn == nil {
		return TailInfo{}, brokenContract("GetTailResponse.first_lsn or tail_lsn").ofRead()
	}
	return TailInfo{
		FirstLSN:         LSN(answer.GetFirstLsn()),
		TailLSN:          LSN(answer.GetTailLsn()),
		DurableLSN:       LSN(answer.GetDurableLsn()),
		ReplicatedLSN:    LSN(answer.GetReplicatedLsn()),
		WriterEpoch:      answer.GetWriterEpoch(),
		RecoveryEpoch:    answer.GetRecoveryEpoch(),
		LogID:            answer.GetLogId(),
		SurvivedPosition: answer.SurvivedPosition,
	}, nil
}

// Trim forgets the records below an lsn, durably, and returns the first lsn kept. A repeated
// trim changes nothing.
func (c *Client) Trim(ctx context.Context, log string, before LSN, options ...TargetOption) (LSN, error) {
	s := targetOptions(options)
	// A repeat has no further effect, except on a log that was created later under the name.
	kind := writing(harmful)
	if s.logID != nil {
		kind = writing(harmless)
	}
	answer, failure := call(ctx, c, kind, c.wal.Trim, &waldv1.TrimRequest{
		Log:       log,
		BeforeLsn: uint64(before),
		LogId:     s.logID,
	})
	if failure != nil {
		return 0, failure
	}
	if answer.FirstLsn == nil {
		return 0, brokenContract("TrimResponse.first_lsn")
	}
	return LSN(answer.GetFirstLsn()), nil
}

// Fence raises a log's writer epoch, durably: from then on only appends with that epoch are
// applied. Creates the log where logs are created automatically. Without [ToEpoch] and without
// [WithLogID] it is not repeated after a lost connection: the log could be another one by then.
func (c *Client) Fence(ctx context.Context, log string, options ...TargetOption) (FenceInfo, error) {
	s := targetOptions(options)
	// It could shut out the writer of a log that was created later under the name.
	kind := writing(harmful)
	switch {
	case s.writerEpoch != nil:
		// The second time the epoch no longer exceeds the current one.
		kind = writing(guarded)
	case s.logID != nil:
		// A repeat raises the epoch twice; the caller still holds the newest.
		kind = writing(harmless)
	}
	answer, failure := call(ctx, c, kind, c.wal.Fence, &waldv1.FenceRequest{
		Log:         log,
		WriterEpoch: s.writerEpoch,
		LogId:       s.logID,
	})
	if failure != nil {
		return FenceInfo{}, failure
	}
	if answer.TailLsn == nil || answer.WriterEpoch == nil {
		return FenceInfo{}, brokenContract("FenceResponse.tail_lsn or writer_epoch")
	}
	return FenceInfo{
		TailLSN:     LSN(answer.GetTailLsn()),
		WriterEpoch: answer.GetWriterEpoch(),
		LogID:       answer.GetLogId(),
	}, nil
}

// Sync waits until everything accepted before, of one log or (with an empty name) of all, is
// flushed to the device.
func (c *Client) Sync(ctx context.Context, log string) error {
	_, failure := call(ctx, c, writing(harmless), c.wal.Sync, &waldv1.SyncRequest{Log: log})
	if failure != nil {
		return failure
	}
	return nil
}

// CreateLog makes a log. A nil config means the server's defaults.
func (c *Client) CreateLog(ctx context.Context, log string, config *LogConfig) (*LogInfo, error) {
	request := &waldv1.CreateLogRequest{Log: log, Config: config}
	answer, failure := call(ctx, c, writing(harmful), c.logs.CreateLog, request)
	if failure != nil {
		return nil, failure
	}
	if answer.GetLog() == nil {
		return nil, brokenContract("CreateLogResponse.log")
	}
	return answer.GetLog(), nil
}

// GetLog is one log: its configuration and where it stands.
func (c *Client) GetLog(ctx context.Context, log string) (*LogInfo, error) {
	answer, failure := call(ctx, c, reading, c.logs.GetLog, &waldv1.GetLogRequest{Log: log})
	if failure != nil {
		return nil, failure
	}
	if answer.GetLog() == nil {
		return nil, brokenContract("GetLogResponse.log").ofRead()
	}
	return answer.GetLog(), nil
}

// ListLogs ranges over the logs whose names start with prefix, by name; a failure is the last
// element. Logs made or deleted meanwhile may or may not be seen.
func (c *Client) ListLogs(ctx context.Context, prefix string) iter.Seq2[*LogInfo, error] {
	return pages(func(token string) ([]*LogInfo, string, *Error) {
		request := &waldv1.ListLogsRequest{Prefix: prefix, PageToken: token}
		answer, failure := call(ctx, c, reading, c.logs.ListLogs, request)
		return answer.GetLogs(), answer.GetNextPageToken(), failure
	})
}

// pages ranges over the elements of a list that comes in pages.
func pages[T any](page func(token string) ([]T, string, *Error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		for token := ""; ; {
			elements, next, failure := page(token)
			if failure != nil {
				yield(none, failure)
				return
			}
			for _, element := range elements {
				if !yield(element, nil) {
					return
				}
			}
			if next == "" {
				return
			}
			token = next
		}
	}
}

// UpdateLog changes the configuration of a log: the fields that paths name, such as
// "sync_mode" or "retention.max_age"; none: all that are set in config.
func (c *Client) UpdateLog(ctx context.Context, log string, config *LogConfig, paths ...string) (*LogInfo, error) {
	request := &waldv1.UpdateLogRequest{
		Log:        log,
		Config:     config,
		UpdateMask: &fieldmaskpb.FieldMask{Paths: paths},
	}
	answer, failure := call(ctx, c, writing(harmless), c.logs.UpdateLog, request)
	if failure != nil {
		return nil, failure
	}
	if answer.GetLog() == nil {
		return nil, brokenContract("UpdateLogResponse.log")
	}
	return answer.GetLog(), nil
}

// DeleteLog forgets a log with all its records, cursors and producers.
func (c *Client) DeleteLog(ctx context.Context, log string, options ...TargetOption) error {
	return c.deleteLog(ctx, &waldv1.DeleteLogRequest{Log: log, LogId: targetOptions(options).logID})
}

// ShredLog deletes a log and destroys its key, so that no copy of its records can be read: in backups, archives and
// snapshots, too. The server needs encryption with a key for each log; without one, it answers NO_OWN_KEY and deletes
// nothing.
func (c *Client) ShredLog(ctx context.Context, log string, options ...TargetOption) error {
	return c.deleteLog(ctx, &waldv1.DeleteLogRequest{Log: log, LogId: targetOptions(options).logID, Shred: true})
}

func (c *Client) deleteLog(ctx context.Context, request *waldv1.DeleteLogRequest) error {
	_, failure := call(ctx, c, writing(harmful), c.logs.DeleteLog, request)
	if failure != nil {
		return failure
	}
	return nil
}
