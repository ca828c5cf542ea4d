package wald

// Reason is why the server refused: the reason of its ErrorInfo. It is an error, so that
// errors.Is(err, wald.ErrFenced) works. A reason that this package does not name compares
// as wald.Reason("NEW_REASON").
type Reason string

// Error is the reason as the contract spells it.
func (r Reason) Error() string { return string(r) }

// The reasons of the contract.
const (
	// ErrInvalidLogName: the log's name is empty, too long, reserved, or has control characters.
	ErrInvalidLogName = Reason("INVALID_LOG_NAME")
	// ErrEmptyBatch: a batch without records.
	ErrEmptyBatch = Reason("EMPTY_BATCH")
	// ErrDuplicateLog: a log named twice in one request.
	ErrDuplicateLog = Reason("DUPLICATE_LOG")
	// ErrDuplicateCursor: a cursor named twice in one request.
	ErrDuplicateCursor = Reason("DUPLICATE_CURSOR")
	// ErrRecordTooLarge: a record above the limit.
	ErrRecordTooLarge = Reason("RECORD_TOO_LARGE")
	// ErrRequestTooLarge: a request above the limits.
	ErrRequestTooLarge = Reason("REQUEST_TOO_LARGE")
	// ErrMalformedRequest: the request does not follow gRPC's framing, or cannot be decoded (fact field).
	ErrMalformedRequest = Reason("MALFORMED_REQUEST")
	// ErrRequestTooSlow: the request did not arrive in time: 10 s and 1 s for each 64 KiB. Nothing was
	// applied.
	ErrRequestTooSlow = Reason("REQUEST_TOO_SLOW")
	// ErrChecksumMismatch: the checksum given does not match the data that arrived.
	ErrChecksumMismatch = Reason("CHECKSUM_MISMATCH")
	// ErrTimestampInFuture: a record's time is too far ahead of the server's clock.
	ErrTimestampInFuture = Reason("TIMESTAMP_IN_FUTURE")
	// ErrInvalidScan: selector, start and bounds of a scan do not fit together.
	ErrInvalidScan = Reason("INVALID_SCAN")
	// ErrPositionMismatch: the expected lsn is not the log's tail, or not the cursor's place.
	ErrPositionMismatch = Reason("POSITION_MISMATCH")
	// ErrLogMissing: the log had to exist.
	ErrLogMissing = Reason("LOG_MISSING")
	// ErrLogExists: the log had not to exist.
	ErrLogExists = Reason("LOG_EXISTS")
	// ErrLogReplaced: the log was deleted and created again.
	ErrLogReplaced = Reason("LOG_REPLACED")
	// ErrFenced: a newer writer has taken over (fact writer_epoch).
	ErrFenced = Reason("FENCED")
	// ErrInvalidProducer: the producer's id is empty, too long, or has control characters, or
	// some logs of a batch have a producer and others have none.
	ErrInvalidProducer = Reason("INVALID_PRODUCER")
	// ErrProducerGap: the producer left out a sequence number (fact expected).
	ErrProducerGap = Reason("PRODUCER_GAP")
	// ErrProducerFenced: a newer incarnation of the producer has taken over.
	ErrProducerFenced = Reason("PRODUCER_FENCED")
	// ErrProducerExpired: the batch is too old to be recognised (fact oldest), or the producer was
	// forgotten (fact first_epoch). Nothing was appended now.
	ErrProducerExpired = Reason("PRODUCER_EXPIRED")
	// ErrProducerConflict: the same sequence number with other content.
	ErrProducerConflict = Reason("PRODUCER_CONFLICT")
	// ErrEpochJump: the epoch of a writer or a producer is more than 2^32 above the current one
	// (facts given_epoch, current_epoch).
	ErrEpochJump = Reason("EPOCH_JUMP")
	// ErrLogNotFound: no such log.
	ErrLogNotFound = Reason("LOG_NOT_FOUND")
	// ErrTrimmed: below the first lsn kept (fact first_lsn).
	ErrTrimmed = Reason("TRIMMED")
	// ErrBeyondTail: beyond the tail (fact tail_lsn).
	ErrBeyondTail = Reason("BEYOND_TAIL")
	// ErrQuarantined: damaged (facts log, from_lsn, to_lsn, exclusive: read on from there).
	ErrQuarantined = Reason("QUARANTINED")
	// ErrBusy: too much is in flight.
	ErrBusy = Reason("BUSY")
	// ErrQuota: a bound of the log, the store or the caller is reached (facts used, limit,
	// setting).
	ErrQuota = Reason("QUOTA")
	// ErrRate: too many requests or bytes a second.
	ErrRate = Reason("RATE")
	// ErrDiskFull: the disk is full.
	ErrDiskFull = Reason("DISK_FULL")
	// ErrJournalFailed: a write or flush of the journal failed.
	ErrJournalFailed = Reason("JOURNAL_FAILED")
	// ErrStarting: the server is starting.
	ErrStarting = Reason("STARTING")
	// ErrDraining: the server is shutting down.
	ErrDraining = Reason("DRAINING")
	// ErrNotSupported: not built, or not on this engine (fact field).
	ErrNotSupported = Reason("NOT_SUPPORTED")
	// ErrNoCredential: a credential is needed.
	ErrNoCredential = Reason("NO_CREDENTIAL")
	// ErrBadCredential: the credential is not valid.
	ErrBadCredential = Reason("BAD_CREDENTIAL")
	// ErrNotAllowed: the credential does not allow it.
	ErrNotAllowed = Reason("NOT_ALLOWED")
	// ErrInvalidCursorName: the cursor's name is empty, too long, or has control characters.
	ErrInvalidCursorName = Reason("INVALID_CURSOR_NAME")
	// ErrCursorNotFound: no such cursor.
	ErrCursorNotFound = Reason("CURSOR_NOT_FOUND")
	// ErrProducerNotFound: the log does not know the producer.
	ErrProducerNotFound = Reason("PRODUCER_NOT_FOUND")
	// ErrInvalidPageToken: not a page token of this list.
	ErrInvalidPageToken = Reason("INVALID_PAGE_TOKEN")
	// ErrInvalidUpdateMask: a path that the configuration does not have.
	ErrInvalidUpdateMask = Reason("INVALID_UPDATE_MASK")
	// ErrInvalidLogConfig: a log's configuration that the server's does not allow.
	ErrInvalidLogConfig = Reason("INVALID_LOG_CONFIG")
	// ErrSegmentNotFound: no such segment.
	ErrSegmentNotFound = Reason("SEGMENT_NOT_FOUND")
	// ErrReadFailed: the store could not be read; it may pass.
	ErrReadFailed = Reason("READ_FAILED")
	// ErrDeadlineExceeded: the call's deadline passed on the server.
	ErrDeadlineExceeded = Reason("DEADLINE_EXCEEDED")
)
