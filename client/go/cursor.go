package wald

import (
	"context"
	"iter"
	"time"

	"wald.dev/client/go/waldv1"
)

// Cursors are named positions of consumers in logs: each consumer continues there after a
// restart. A cursor belongs to one log and goes with it. Moving one is always durable.
type Cursors struct{ client *Client }

// CursorCommit is a wish to move a cursor, or to make it.
type CursorCommit struct {
	// Log is the log that the cursor belongs to.
	Log string
	// Cursor is its name within the log.
	Cursor string
	// LSN is the next lsn to read: all below it is done.
	LSN LSN
	// ExpectedLSN is where the cursor must stand now, or POSITION_MISMATCH; 0 also matches a
	// cursor that does not exist yet. Nil: wherever it stands. If it differs from LSN, a repeat
	// cannot move the cursor twice, so the client repeats automatically.
	ExpectedLSN *LSN
	// LogID: the log must have this number, or LOG_REPLACED.
	LogID *uint64
}

// Cursor is a cursor as it stands.
type Cursor struct {
	// Log is the log that the cursor belongs to.
	Log string
	// Name is its name within the log.
	Name string
	// LSN is the next lsn to read.
	LSN LSN
	// LogID is the log's number, unique for ever.
	LogID uint64
	// UpdateTime is when it was last moved.
	UpdateTime time.Time
}

// Cursors are the calls about cursors.
func (c *Client) Cursors() Cursors { return Cursors{c} }

// Commit moves a cursor, or makes it.
func (c Cursors) Commit(ctx context.Context, commit CursorCommit) (Cursor, error) {
	// A late repeat would undo another client's commit in between.
	kind := writing(harmful)
	if commit.guards() {
		kind = writing(guarded)
	}
	request := &waldv1.CommitCursorRequest{Commit: commit.proto()}
	answer, failure := call(ctx, c.client, kind, c.client.cursors.CommitCursor, request)
	if failure != nil {
		return Cursor{}, failure
	}
	return readCursor(answer.GetCursor())
}

// Get is where a cursor stands.
func (c Cursors) Get(ctx context.Context, log, cursor string, options ...TargetOption) (Cursor, error) {
	request := &waldv1.GetCursorRequest{
		Log:    log,
		Cursor: cursor,
		LogId:  targetOptions(options).logID,
	}
	answer, failure := call(ctx, c.client, reading, c.client.cursors.GetCursor, request)
	if failure != nil {
		return Cursor{}, failure
	}
	return readCursor(answer.GetCursor())
}

// List ranges over the cursors of a log, by name; a failure is the last element.
func (c Cursors) List(ctx context.Context, log string, options ...TargetOption) iter.Seq2[Cursor, error] {
	id := targetOptions(options).logID
	list := pages(func(token string) ([]*waldv1.Cursor, string, *Error) {
		request := &waldv1.ListCursorsRequest{Log: log, LogId: id, PageToken: token}
		answer, failure := call(ctx, c.client, reading, c.client.cursors.ListCursors, request)
		return answer.GetCursors(), answer.GetNextPageToken(), failure
	})
	return func(yield func(Cursor, error) bool) {
		for cursor, err := range list {
			var element Cursor
			if err == nil {
				element, err = readCursor(cursor)
			}
			if !yield(element, err) || err != nil {
				return
			}
		}
	}
}

// Delete forgets a cursor, durably. Retention no longer waits for it.
func (c Cursors) Delete(ctx context.Context, log, cursor string, options ...TargetOption) error {
	request := &waldv1.DeleteCursorRequest{
		Log:    log,
		Cursor: cursor,
		LogId:  targetOptions(options).logID,
	}
	_, failure := call(ctx, c.client, writing(harmful), c.client.cursors.DeleteCursor, request)
	if failure != nil {
		return failure
	}
	return nil
}

// guards tells whether a repeat cannot be applied a second time: the cursor no longer stands
// where it must.
func (c CursorCommit) guards() bool {
	return c.ExpectedLSN != nil && *c.ExpectedLSN != c.LSN
}

func (c CursorCommit) proto() *waldv1.CursorCommit {
	return &waldv1.CursorCommit{
		Log:         c.Log,
		Cursor:      c.Cursor,
		Lsn:         uint64(c.LSN),
		ExpectedLsn: (*uint64)(c.ExpectedLSN),
		LogId:       c.LogID,
	}
}

func readCursor(cursor *waldv1.Cursor) (Cursor, error) {
	if cursor == nil || cursor.Lsn == nil {
		return Cursor{}, brokenContract("Cursor.lsn")
	}
	return Cursor{
		Log:        cursor.GetLog(),
		Name:       cursor.GetName(),
		LSN:        LSN(cursor.GetLsn()),
		LogID:      cursor.GetLogId(),
		UpdateTime: cursor.GetUpdateTime().AsTime(),
	}, nil
}
