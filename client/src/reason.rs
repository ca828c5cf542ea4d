//! The reasons that errors of Wald's carry.

use std::fmt;

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $text:literal,)*) => {
        /// The reason of a refusal: the `reason` of the server's ErrorInfo.
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Reason {
            $($(#[$doc])* $variant,)*
            /// A reason that this version of the client does not know.
            Unknown(String),
        }

        impl Reason {
            /// The reason as the contract spells it.
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$variant => $text,)*
                    Self::Unknown(text) => text,
                }
            }
        }

        impl From<&str> for Reason {
            fn from(text: &str) -> Self {
                match text {
                    $($text => Self::$variant,)*
                    _ => Self::Unknown(text.to_owned()),
                }
            }
        }
    };
}

reasons! {
    /// The log's name is empty, too long, reserved, or has control characters.
    InvalidLogName = "INVALID_LOG_NAME",
    /// A batch without records.
    EmptyBatch = "EMPTY_BATCH",
    /// A log named twice in one request.
    DuplicateLog = "DUPLICATE_LOG",
    /// A cursor named twice in one request.
    DuplicateCursor = "DUPLICATE_CURSOR",
    /// A record above the limit.
    RecordTooLarge = "RECORD_TOO_LARGE",
    /// A request above the limits.
    RequestTooLarge = "REQUEST_TOO_LARGE",
    /// The request does not follow gRPC's framing, or cannot be decoded (fact `field`).
    MalformedRequest = "MALFORMED_REQUEST",
    /// The request did not arrive in time: 10 s and 1 s for each 64 KiB. Nothing was applied.
    RequestTooSlow = "REQUEST_TOO_SLOW",
    /// The checksum given does not match the data that arrived.
    ChecksumMismatch = "CHECKSUM_MISMATCH",
    /// A record's time is too far ahead of the server's clock.
    TimestampInFuture = "TIMESTAMP_IN_FUTURE",
    /// Selector, start and bounds of a scan do not fit together.
    InvalidScan = "INVALID_SCAN",
    /// The expected lsn is not the log's tail.
    PositionMismatch = "POSITION_MISMATCH",
    /// The log had to exist.
    LogMissing = "LOG_MISSING",
    /// The log had not to exist.
    LogExists = "LOG_EXISTS",
    /// The log was deleted and created again.
    LogReplaced = "LOG_REPLACED",
    /// A newer writer has taken over (fact `writer_epoch`).
    Fenced = "FENCED",
    /// The producer left out a sequence number (fact `expected`).
    ProducerGap = "PRODUCER_GAP",
    /// A newer incarnation of the producer has taken over.
    ProducerFenced = "PRODUCER_FENCED",
    /// The batch is too old to be recognised (fact `oldest`), or the producer was forgotten (fact
    /// `first_epoch`). Nothing was appended now.
    ProducerExpired = "PRODUCER_EXPIRED",
    /// The sequence number was used before, with other content.
    ProducerConflict = "PRODUCER_CONFLICT",
    /// The epoch of a writer or a producer is more than 2^32 above the current one (facts
    /// `given_epoch`, `current_epoch`).
    EpochJump = "EPOCH_JUMP",
    /// The producer's name is empty, too long, or has control characters, or some batches of
    /// a request name a producer and others do not.
    InvalidProducer = "INVALID_PRODUCER",
    /// An earlier request of the session failed.
    SessionEnded = "SESSION_ENDED",
    /// No such log.
    LogNotFound = "LOG_NOT_FOUND",
    /// Below the first lsn kept (fact `first_lsn`).
    Trimmed = "TRIMMED",
    /// Beyond the tail (fact `tail_lsn`).
    BeyondTail = "BEYOND_TAIL",
    /// Damaged (facts `log`, `from_lsn`, `to_lsn`, exclusive: read on from there).
    Quarantined = "QUARANTINED",
    /// Too much is in flight.
    Busy = "BUSY",
    /// A bound of the log, the store or the caller is reached (facts `used`, `limit`,
    /// `setting`).
    Quota = "QUOTA",
    /// Too many requests or bytes a second.
    Rate = "RATE",
    /// The disk is full.
    DiskFull = "DISK_FULL",
    /// A write or flush of the journal failed.
    JournalFailed = "JOURNAL_FAILED",
    /// A read of the disk failed.
    ReadFailed = "READ_FAILED",
    /// The deadline passed before the server could do it.
    DeadlineExceeded = "DEADLINE_EXCEEDED",
    /// The server is starting.
    Starting = "STARTING",
    /// The server is shutting down.
    Draining = "DRAINING",
    /// Not built, or not on this engine (fact `field`).
    NotSupported = "NOT_SUPPORTED",
    /// A credential is needed.
    NoCredential = "NO_CREDENTIAL",
    /// The credential is not valid.
    BadCredential = "BAD_CREDENTIAL",
    /// The credential does not allow it.
    NotAllowed = "NOT_ALLOWED",
    /// The cursor's name is empty, too long, or has control characters.
    InvalidCursorName = "INVALID_CURSOR_NAME",
    /// No such cursor.
    CursorNotFound = "CURSOR_NOT_FOUND",
    /// The log does not know the producer.
    ProducerNotFound = "PRODUCER_NOT_FOUND",
    /// Not a page token of this list.
    InvalidPageToken = "INVALID_PAGE_TOKEN",
    /// A path that the configuration does not have.
    InvalidUpdateMask = "INVALID_UPDATE_MASK",
    /// A value of a log's configuration is outside the bounds of the contract or of the server.
    InvalidLogConfig = "INVALID_LOG_CONFIG",
    /// No such segment.
    SegmentNotFound = "SEGMENT_NOT_FOUND",
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
