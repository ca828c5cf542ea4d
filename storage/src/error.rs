//! Errors, per operation. Each variant says what happened to the data and who acts.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::config::ConfigError;
use crate::disk::Shortage;
use crate::ids::{LogId, LogName, Lsn, Name, Position, Timestamp, records_in_words};

/// Why an append was not acknowledged.
#[derive(Debug, Clone, thiserror::Error)]
pub enum AppendError {
    /// The request itself is wrong; nothing was written.
    #[error(transparent)]
    Invalid(#[from] InvalidBatch),
    /// Conditions did not hold, all that failed; nothing was written.
    #[error("{}", ConditionList(.0))]
    ConditionsFailed(Vec<FailedCondition>),
    /// The log does not exist and is not created by appending; nothing was written.
    #[error("log {log:?} does not exist and is not made by this request; create it with CreateLog")]
    LogNotFound {
        /// The unknown log.
        log: LogName,
    },
    /// The producer left batches out; nothing was written.
    #[error("producer {producer:?} of log {log:?} {}", match expected {
        0 => format!("is new there, or its epoch is: sequence {given}, the first is 0"),
        _ => format!("left out batches: sequence {given}, the next is {expected}"),
    })]
    ProducerGap {
        /// The log.
        log: LogName,
        /// The producer.
        producer: Name,
        /// The sequence given.
        given: u64,
        /// The sequence that may come next.
        expected: u64,
    },
    /// A newer incarnation of the producer has appended; nothing was written.
    #[error("producer {producer:?} of log {log:?} has epoch {current}; epoch {given} is shut out")]
    ProducerFenced {
        /// The log.
        log: LogName,
        /// The producer.
        producer: Name,
        /// The epoch given.
        given: u64,
        /// The newest epoch.
        current: u64,
    },
    /// The batch is older than those whose answers are remembered; nothing was written,
    /// now. Whether it was applied once is not known any more.
    #[error(
        "producer {producer:?}, log {log:?}: sequence {given} is too old to check for duplicates (oldest known: {oldest}); nothing was appended now, and the batch may have been appended before"
    )]
    ProducerExpired {
        /// The log.
        log: LogName,
        /// The producer.
        producer: Name,
        /// The sequence given.
        given: u64,
        /// The oldest sequence that is remembered.
        oldest: u64,
    },
    /// The producer was forgotten, or the log does not know the producer and its epoch is over;
    /// nothing was written, now. Whether the batch was applied once is not known any more.
    #[error(
        "producer {producer:?}, log {log:?}: the log does not know the producer, or forgot it, and its epochs below {first_epoch} are over (given: {given}); nothing was appended now. Begin with epoch {first_epoch} and sequence 0"
    )]
    ProducerForgotten {
        /// The log.
        log: LogName,
        /// The producer.
        producer: Name,
        /// The epoch given.
        given: u64,
        /// The lowest epoch that the producer may begin with.
        first_epoch: u64,
    },
    /// The producer used the sequence for other records, or for another batch; nothing was
    /// written.
    #[error(
        "producer {producer:?} of log {log:?} used sequence {sequence} for something else: {what}"
    )]
    ProducerConflict {
        /// The log.
        log: LogName,
        /// The producer.
        producer: Name,
        /// The sequence.
        sequence: u64,
        /// How it differs.
        what: &'static str,
    },
    /// The epoch of a writer or a producer is too far above the current one; nothing was
    /// written.
    #[error("{}", epoch_jump(log, producer.as_ref(), *given, *current))]
    EpochJump {
        /// The log.
        log: LogName,
        /// The producer; `None` if the log's writer epoch was to rise.
        producer: Option<Name>,
        /// The epoch given.
        given: u64,
        /// The current epoch; 0 if there was none.
        current: u64,
    },
    /// The log or the store has as many of something as a setting allows; nothing was written.
    #[error("{}", quota(log, *what, *used, *limit))]
    Quota {
        /// The log of the request; the first if there are several.
        log: LogName,
        /// What there are too many of.
        what: Bounded,
        /// How many there are now.
        used: u64,
        /// How many are allowed.
        limit: u64,
    },
    /// A new name has a character that people do not see; nothing was written.
    #[error(
        "the name {name:?} of a new {} has the character U+{:04X}, which people do not see; take it out (the server's setting allow_invisible_names permits it)",
        what.name(),
        u32::from(*character)
    )]
    InvisibleName {
        /// The log of the request; the first if there are several.
        log: LogName,
        /// The kind of the thing that has the name.
        what: Named,
        /// The name.
        name: Box<str>,
        /// Its first such character.
        character: char,
    },
    /// A cursor was to go beyond the tail; nothing was written.
    #[error("cursor {cursor:?} was to move to lsn {asked}, beyond the tail of log {log:?}, {tail}")]
    CursorBeyondTail {
        /// The log.
        log: LogName,
        /// The cursor.
        cursor: Name,
        /// The log's tail.
        tail: Lsn,
        /// The lsn asked for.
        asked: Lsn,
    },
    /// An earlier batch of the session was refused; nothing was written.
    #[error("an earlier batch of the session was refused; nothing after it is applied")]
    SessionEnded,
    /// Damage may have taken the newest records of this log, so the next lsn cannot
    /// be proven; nothing was written. An operator must repair the store.
    #[error(
        "the tail of log {log:?} cannot be proven after damage; appends are refused from lsn {from} on until the store is repaired (`wald repair`)"
    )]
    TailUnproven {
        /// The log.
        log: LogName,
        /// The first lsn that may be missing.
        from: Lsn,
    },
    /// Too many bytes are in flight; nothing was written. Retry with backoff.
    #[error("{inflight} bytes of appends are in flight, the limit is {limit}; retry with backoff")]
    Busy {
        /// Bytes in flight now.
        inflight: u64,
        /// The most allowed.
        limit: u64,
    },
    /// No segment could be prepared; nothing was written. Appends resume by
    /// themselves when space is back.
    #[error("no space for another segment in the data directory{0}")]
    DiskFull(FreeSpace),
    /// No file descriptor was left to make a segment ready; nothing was written. Appends resume
    /// without a restart when descriptors are free again.
    #[error(
        "no file descriptor is left for the next segment; nothing was written; retry later, and raise the limit of open files (`ulimit -n`, LimitNOFILE) if this lasts"
    )]
    NoDescriptors,
    /// The engine is shutting down; nothing was written.
    #[error("the engine is draining; nothing was written")]
    Draining,
    /// The journal had failed before; nothing was written. It refuses appends until
    /// the process restarts and recovers.
    #[error("the journal failed earlier and refuses appends until a restart: {0}")]
    JournalFailed(#[source] Arc<io::Error>),
    /// The journal failed under this request: it may or may not survive a restart.
    #[error("the journal failed while this request was in flight: {0}")]
    Unknown(#[source] Arc<io::Error>),
}

/// How far the epoch of a writer or a producer may rise at a time: 2^32.
pub const MAX_EPOCH_RISE: u64 = crate::local::MAX_EPOCH_RISE;

fn epoch_jump(log: &LogName, producer: Option<&Name>, given: u64, current: u64) -> String {
    let whose = match producer {
        Some(producer) => format!("producer {producer:?} of log {log:?}: epoch"),
        None => format!("log {log:?}: writer epoch"),
    };
    format!(
        "{whose} {given} is too far above the current epoch, {current}: an epoch rises by at most {MAX_EPOCH_RISE} at a time; nothing was written"
    )
}

/// Free space of the volume, in bytes, when a request was refused for want of space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FreeSpace {
    /// Free bytes. `None` if the file system does not report them.
    pub free_bytes: Option<u64>,
    /// Free bytes with which the request succeeds. `None` if a write failed for another reason than
    /// the bytes that the file system reports, such as a quota.
    pub needed_bytes: Option<u64>,
}

impl std::fmt::Display for FreeSpace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.free_bytes, self.needed_bytes) {
            (Some(free), Some(needed)) => {
                write!(f, ": {free} bytes are free, {needed} bytes must be free")
            }
            (None, Some(needed)) => write!(f, ": {needed} bytes must be free"),
            (_, None) => Ok(()),
        }
    }
}

/// Something that a client names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named {
    /// A log.
    Log,
    /// A producer of a log.
    Producer,
    /// A cursor of a log.
    Cursor,
}

impl Named {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::Producer => "producer",
            Self::Cursor => "cursor",
        }
    }
}

/// Something that a setting bounds the number of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bounded {
    /// Producers of one log.
    ProducersOfLog,
    /// Cursors of one log.
    CursorsOfLog,
    /// Logs of the store.
    Logs,
    /// Logs of the store and deleted ones that the sorter has not forgotten yet.
    DeletedLogs,
    /// Producers of all logs.
    Producers,
    /// Cursors of all logs.
    Cursors,
    /// Bytes of the names of logs, producers and cursors.
    NameBytes,
    /// The same, with the names of deleted logs that the sorter has not forgotten yet.
    DeletedNameBytes,
}

impl Bounded {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::ProducersOfLog | Self::Producers => "producers",
            Self::CursorsOfLog | Self::Cursors => "cursors",
            Self::Logs => "logs",
            Self::DeletedLogs => "logs and deleted logs",
            Self::NameBytes => "bytes of names",
            Self::DeletedNameBytes => "bytes of names and names of deleted logs",
        }
    }

    /// The setting that bounds it.
    pub fn setting(self) -> &'static str {
        match self {
            Self::ProducersOfLog => "max_producers_per_log",
            Self::CursorsOfLog => "max_cursors_per_log",
            Self::Logs | Self::DeletedLogs => "max_logs",
            Self::Producers => "max_producers",
            Self::Cursors => "max_cursors",
            Self::NameBytes | Self::DeletedNameBytes => "max_name_bytes",
        }
    }
}

fn quota(log: &LogName, what: Bounded, used: u64, limit: u64) -> String {
    let whose = match what {
        Bounded::ProducersOfLog | Bounded::CursorsOfLog => format!("log {log:?}"),
        _ => "the store".to_owned(),
    };
    let remedy = match what {
        // Producers are forgotten with their log only.
        Bounded::ProducersOfLog => "use fewer producers",
        Bounded::Producers => "use fewer producers, delete logs",
        Bounded::CursorsOfLog | Bounded::Cursors => "delete cursors",
        Bounded::Logs => {
            "delete logs (many at once, while the daemon is stopped: `wald delete-logs`)"
        }
        Bounded::DeletedLogs | Bounded::DeletedNameBytes => {
            "wait until the sorter has forgotten deleted logs"
        }
        Bounded::NameBytes => "delete logs or cursors, use shorter names",
    };
    let (name, setting) = (what.name(), what.setting());
    format!(
        "{whose} has {used} {name} and may have at most {limit}; nothing was written; {remedy}, or raise {setting}"
    )
}

impl AppendError {
    /// The shortage of the host that refused the append, if one did: it ends without a restart.
    pub(crate) fn shortage(&self) -> Option<Shortage> {
        match self {
            Self::DiskFull(_) => Some(Shortage::Space),
            Self::NoDescriptors => Some(Shortage::Descriptors),
            _ => None,
        }
    }
}

impl From<Shortage> for AppendError {
    fn from(shortage: Shortage) -> Self {
        match shortage {
            Shortage::Space => Self::DiskFull(FreeSpace::default()),
            Shortage::Descriptors => Self::NoDescriptors,
        }
    }
}

struct ConditionList<'a>(&'a [FailedCondition]);

impl std::fmt::Display for ConditionList<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, condition) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("; ")?;
            }
            write!(f, "log {:?}: {}", condition.log.as_str(), condition.check)?;
        }
        Ok(())
    }
}

/// One condition that did not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedCondition {
    /// The log it was about.
    pub log: LogName,
    /// What failed.
    pub check: FailedCheck,
}

/// What about a log was not as the request wanted it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FailedCheck {
    /// The tail is elsewhere.
    #[error("expected lsn {expected}, the next is {actual}")]
    PositionMismatch {
        /// What the request expected.
        expected: Lsn,
        /// The log's tail.
        actual: Lsn,
    },
    /// A writer is shut out.
    #[error("the writer epoch is {current}, {}", match given {
        Some(given) => format!("not {given}"),
        None => "and the append names none".to_owned(),
    })]
    Fenced {
        /// The epoch given.
        given: Option<u64>,
        /// The log's writer epoch.
        current: u64,
    },
    /// A cursor is elsewhere.
    #[error("cursor {cursor:?} was expected at lsn {expected}, it is at {actual}")]
    CursorMismatch {
        /// The cursor.
        cursor: Name,
        /// Where the request expected it.
        expected: Lsn,
        /// Where it is; 0 if it does not exist.
        actual: Lsn,
    },
    /// It does not exist.
    #[error("it must exist and does not")]
    LogMissing,
    /// It exists.
    #[error("it must not exist and does")]
    LogExists {
        /// The existing log's identity.
        log_id: LogId,
    },
    /// The name belongs to another log now, or to none.
    #[error("expected log id {expected}, {}", match actual {
        Some(actual) => format!("the name now belongs to {actual}"),
        None => "no log has this name now".to_owned(),
    })]
    LogReplaced {
        /// The identity the request names.
        expected: LogId,
        /// The identity of the log that has the name now.
        actual: Option<LogId>,
    },
}

/// What is wrong with a request, whatever the state of the logs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidBatch {
    /// Neither records nor checks, or a log without records.
    #[error("{}", match log {
        Some(log) => format!("no records are given for log {:?}", log.as_str()),
        None => "the batch is empty".to_owned(),
    })]
    Empty {
        /// The log without records; `None` if the batch names no log at all.
        log: Option<LogName>,
    },
    /// A log appears twice.
    #[error("log {log:?} is named twice in one batch")]
    DuplicateLog {
        /// The log.
        log: LogName,
    },
    /// A cursor appears twice.
    #[error("cursor {cursor:?} of log {log:?} is named twice in one batch")]
    DuplicateCursor {
        /// The log.
        log: LogName,
        /// The cursor.
        cursor: Name,
    },
    /// Some logs of the batch name a producer and this one does not: a repeat of it could
    /// not be recognised.
    #[error("log {log:?} names no producer, and others of the batch do; name one for each log")]
    ProducerMissing {
        /// The log without.
        log: LogName,
    },
    /// A record is over the limit.
    #[error(
        "record {index} of log {log:?} has {bytes} bytes; at most {limit} are allowed (max_record_bytes)"
    )]
    RecordTooLarge {
        /// The log.
        log: LogName,
        /// Index of the record among the log's records in this request.
        index: usize,
        /// Its data and headers.
        bytes: u64,
        /// The limit that applies.
        limit: u64,
    },
    /// A record has too many or too large headers.
    #[error(
        "record {index} of log {log:?} has {headers} headers of {bytes} bytes; at most {max_headers} of {max_bytes} bytes are allowed"
    )]
    HeadersTooLarge {
        /// The log.
        log: LogName,
        /// Index of the record.
        index: usize,
        /// How many headers it has.
        headers: usize,
        /// Bytes of their keys and values.
        bytes: u64,
        /// The most headers.
        max_headers: u32,
        /// The most bytes.
        max_bytes: u32,
    },
    /// The whole request is over a limit.
    #[error(
        "the request has {records} records of {bytes} encoded bytes; at most {max_records} of {max_bytes} bytes are allowed"
    )]
    RequestTooLarge {
        /// Records in all logs.
        records: u64,
        /// Their encoded size.
        bytes: u64,
        /// The most records.
        max_records: u64,
        /// The most bytes.
        max_bytes: u64,
    },
    /// Too many logs, checks or cursors.
    #[error("the request has {count} {what}; at most {limit} are allowed")]
    TooMany {
        /// `batches`, `checks` or `cursors`.
        what: &'static str,
        /// How many there are.
        count: u64,
        /// The most: as many as records.
        limit: u64,
    },
    /// The producer's checksum does not match the data that arrived.
    #[error(
        "record {index} of log {log:?}: crc32c given is {given:#010x}, of the data that arrived {actual:#010x}"
    )]
    ChecksumMismatch {
        /// The log.
        log: LogName,
        /// Index of the record.
        index: usize,
        /// The producer's checksum.
        given: u32,
        /// The checksum of the data.
        actual: u32,
    },
    /// A record's own time is too far ahead.
    #[error(
        "record {index} of log {log:?} is dated {ahead_micros} us ahead of the server's clock; at most {max_micros} us are allowed"
    )]
    TimestampInFuture {
        /// The log.
        log: LogName,
        /// Index of the record.
        index: usize,
        /// The record's time.
        timestamp: Timestamp,
        /// The server's clock.
        now: Timestamp,
        /// How far it is ahead, microseconds.
        ahead_micros: i64,
        /// How far it may be, microseconds.
        max_micros: i64,
    },
}

/// Why a read was not answered.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ReadError {
    /// No such log.
    #[error("log {log:?} does not exist")]
    LogNotFound {
        /// The unknown log.
        log: LogName,
    },
    /// The name belongs to another log now.
    #[error(
        "log {log:?} has id {actual}, not {expected}: an earlier log of this name may have had that id"
    )]
    LogReplaced {
        /// The log.
        log: LogName,
        /// The identity asked for.
        expected: LogId,
        /// The identity of the log that has the name now.
        actual: LogId,
    },
    /// The start lies below the first record kept.
    #[error("lsn {asked} is below the first kept of log {log:?}, {first}")]
    Trimmed {
        /// The log.
        log: LogName,
        /// Where to read instead.
        first: Lsn,
        /// The lsn asked for.
        asked: Lsn,
    },
    /// The start lies beyond the tail.
    #[error("lsn {asked} is beyond the tail of log {log:?}, {tail}")]
    BeyondTail {
        /// The log.
        log: LogName,
        /// The tail at the visibility asked for.
        tail: Lsn,
        /// The lsn asked for.
        asked: Lsn,
    },
    /// The records are damaged on disk.
    #[error("damage in log {log:?}: {}", match to {
        Some(to) => records_in_words(*from, *to),
        None => format!("records from {from} on"),
    })]
    Quarantined {
        /// The log.
        log: LogName,
        /// The first damaged lsn.
        from: Lsn,
        /// Read on from there; `None` if unknown.
        to: Option<Lsn>,
    },
    /// The cursor was not made by this store for this selection.
    #[error("the cursor cannot be used: {0}")]
    BadCursor(&'static str),
    /// The start or bound does not go with the selection.
    #[error("{0}")]
    InvalidScan(&'static str),
    /// The answer rests on changes that cannot be made durable now.
    #[error("the changes that the answer rests on cannot be made durable now: {0}")]
    Refused(#[source] AppendError),
    /// The journal failed: what lies beyond the durable lsn cannot be told now.
    #[error(
        "the journal failed; records beyond the durable lsn cannot be read until a restart: {0}"
    )]
    JournalFailed(#[source] Arc<io::Error>),
    /// The disk did not give the bytes, without saying that they are damaged
    /// (for example: no file descriptors). Try again.
    #[error("reading a segment failed: {0}")]
    Io(#[source] Arc<io::Error>),
}

/// Why an administrative call was not carried out.
#[derive(Debug, Clone, thiserror::Error)]
pub enum AdminError {
    /// CreateLog of an existing name; nothing was changed.
    #[error("log {log:?} exists already, with id {log_id}")]
    LogExists {
        /// The log.
        log: LogName,
        /// Its identity.
        log_id: LogId,
    },
    /// No such log.
    #[error("log {log:?} does not exist")]
    LogNotFound {
        /// The unknown log.
        log: LogName,
    },
    /// The name belongs to another log now.
    #[error(
        "log {log:?} has id {actual}, not {expected}: an earlier log of this name may have had that id"
    )]
    LogReplaced {
        /// The log.
        log: LogName,
        /// The identity asked for.
        expected: LogId,
        /// The identity of the log that has the name now.
        actual: LogId,
    },
    /// The log does not know the producer.
    #[error("log {log:?} does not know producer {producer:?}; nothing was forgotten")]
    ProducerNotFound {
        /// The log.
        log: LogName,
        /// The unknown producer.
        producer: Name,
    },
    /// What stopped the change is what stops appends.
    #[error(transparent)]
    Append(#[from] AppendError),
}

/// Why a trim was not carried out; nothing was forgotten.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TrimError {
    /// No such log.
    #[error("log {log:?} does not exist")]
    LogNotFound {
        /// The unknown log.
        log: LogName,
    },
    /// The name belongs to another log now.
    #[error(
        "log {log:?} has id {actual}, not {expected}: an earlier log of this name may have had that id"
    )]
    LogReplaced {
        /// The log.
        log: LogName,
        /// The identity asked for.
        expected: LogId,
        /// The identity of the log that has the name now.
        actual: LogId,
    },
    /// Records that do not exist yet cannot be forgotten.
    #[error("lsn {asked} is beyond the tail of log {log:?}, {tail}")]
    BeyondTail {
        /// The log.
        log: LogName,
        /// Its tail.
        tail: Lsn,
        /// The lsn asked for.
        asked: Lsn,
    },
    /// What stopped the trim is what stops appends.
    #[error(transparent)]
    Append(#[from] AppendError),
}

/// Why a fence was not raised; nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum FenceError {
    /// No such log, and none is made.
    #[error("log {log:?} does not exist, and auto_create is off; create it with CreateLog")]
    LogNotFound {
        /// The unknown log.
        log: LogName,
    },
    /// The name belongs to another log now, or to none.
    #[error("log {log:?}: expected log id {expected}, {}", match actual {
        Some(actual) => format!("the name now belongs to {actual}"),
        None => "no log has this name now".to_owned(),
    })]
    LogReplaced {
        /// The log.
        log: LogName,
        /// The identity asked for.
        expected: LogId,
        /// The identity of the log that has the name now.
        actual: Option<LogId>,
    },
    /// The epoch given does not exceed the log's: another writer was faster.
    #[error("log {log:?} has writer epoch {current}; {given} does not exceed it")]
    Fenced {
        /// The log.
        log: LogName,
        /// The epoch given; one more than the highest there is, if none was.
        given: u64,
        /// The log's writer epoch.
        current: u64,
    },
    /// What stopped the fence is what stops appends.
    #[error(transparent)]
    Append(#[from] AppendError),
}

/// Why a cursor was not moved, forgotten or found; nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CursorError {
    /// No such log.
    #[error("log {log:?} does not exist")]
    LogNotFound {
        /// The unknown log.
        log: LogName,
    },
    /// The name belongs to another log now.
    #[error(
        "log {log:?} has id {actual}, not {expected}: an earlier log of this name may have had that id"
    )]
    LogReplaced {
        /// The log.
        log: LogName,
        /// The identity asked for.
        expected: LogId,
        /// The identity of the log that has the name now.
        actual: LogId,
    },
    /// No such cursor.
    #[error("log {log:?} has no cursor {cursor:?}")]
    NotFound {
        /// The log.
        log: LogName,
        /// The cursor.
        cursor: Name,
    },
    /// What stopped the change is what stops appends.
    #[error(transparent)]
    Append(#[from] AppendError),
}

/// Why a flush that was asked for did not happen.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SyncError {
    /// No such log.
    #[error("log {log:?} does not exist")]
    LogNotFound {
        /// The unknown log.
        log: LogName,
    },
    /// The cause also refuses appends. Records of `manual` logs that were not written stay buffered.
    #[error("the flush was refused: {0}")]
    Refused(#[source] AppendError),
    /// The journal failed; what was not durable before may or may not be.
    #[error("the journal failed; it refuses to flush until a restart: {0}")]
    JournalFailed(#[source] Arc<io::Error>),
}

impl From<AppendError> for SyncError {
    fn from(error: AppendError) -> Self {
        match error {
            AppendError::JournalFailed(error) | AppendError::Unknown(error) => {
                Self::JournalFailed(error)
            }
            other => Self::Refused(other),
        }
    }
}

/// Why a backup was not made, or not finished.
#[derive(Debug, Clone, thiserror::Error)]
pub enum BackupError {
    /// As many backups run as may.
    #[error("{running} backups run, which is the most; wait for the end of one")]
    Busy {
        /// Number of backups that run.
        running: usize,
    },
    /// The journal failed: what was not durable before may or may not be.
    #[error("the journal failed; nothing is saved until a restart: {0}")]
    JournalFailed(#[source] Arc<io::Error>),
    /// A file cannot be read.
    #[error("reading {path} for the backup: {source}")]
    Io {
        /// The file.
        path: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// Nobody took a part of the backup for this long, so it ended and holds no file any more.
    #[error("nobody read the backup for {} s, so it ended; begin another one", limit.as_secs())]
    Unread {
        /// Longest pause between two parts.
        limit: Duration,
    },
    /// A file changed after its digest was taken: it was found damaged meanwhile, or the
    /// device gives other bytes each time.
    #[error("{path} is not what it was when the backup began; verify the store")]
    Changed {
        /// The file.
        path: String,
    },
}

/// Why a backup was not read or restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The manifest says what no backup of ours does.
    #[error("the manifest is not one of a backup: {0}")]
    Manifest(String),
    /// A file of the backup is missing, or is not what the manifest says.
    #[error("{path}: {what}; `wald verify` tells what else is damaged in the backup")]
    Damaged {
        /// The file, as the store calls it.
        path: String,
        /// What is wrong with it.
        what: String,
    },
    /// The backup does not reach so far.
    #[error("the backup ends at position {end}; it does not reach {asked}")]
    Beyond {
        /// The position asked for.
        asked: Position,
        /// The position of the backup.
        end: Position,
    },
    /// There is nothing of the store at or below the position.
    #[error("the store begins at position {first}; nothing of it ends at or below {asked}")]
    Before {
        /// The position asked for.
        asked: Position,
        /// The first that can be asked for.
        first: Position,
    },
    /// There is something where the store is to be.
    #[error("{directory} is not empty: {name} is there; a restore needs an empty directory")]
    NotEmpty {
        /// The directory.
        directory: String,
        /// What was found.
        name: String,
    },
    /// The archive holds nothing of what was asked for.
    #[error("{directory} holds nothing of that; `wald archive list` shows what there is")]
    NothingArchived {
        /// The directory.
        directory: String,
    },
    /// The archive is of more than one store.
    #[error("{directory} holds archives of several stores; choose one with --store: {stores}")]
    SeveralStores {
        /// The directory.
        directory: String,
        /// Their ids.
        stores: String,
    },
    /// What was restored, or is to be, cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The file system said no.
    #[error("{action}: {source}")]
    Io {
        /// What was being done, to what.
        action: String,
        /// What the system said.
        source: io::Error,
    },
}

impl RestoreError {
    pub(crate) fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }
}

/// Why a data directory cannot be opened. Nothing in it was changed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A setting is out of bounds.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Another process has it.
    #[error("the data directory {directory} is in use by {holder}; stop it, or choose another with --data-dir", directory = directory.display())]
    Locked {
        /// The directory.
        directory: PathBuf,
        /// Who holds it, as written into its lock file.
        holder: String,
    },
    /// The directory holds something, but not a store of ours.
    #[error("{what}")]
    NotAStore {
        /// What was found, and what to do.
        what: String,
    },
    /// The directory has no store, and none may be made there.
    #[error("the data directory {directory} has no store, and create_store is false: mount the volume that holds the store, or set create_store = true to start with an empty one", directory = directory.display())]
    NoStore {
        /// The directory.
        directory: PathBuf,
    },
    /// Written by a version this one cannot read.
    #[error("the store has format version {found}; this version reads {supported}")]
    Version {
        /// Version in FORMAT.
        found: u32,
        /// Newest version known.
        supported: u32,
    },
    /// Something in it is of a newer version, of which this one may not even write next to.
    #[error(
        "{what}; a newer version of Wald, or another build, wrote that and must go on with this store; nothing was changed"
    )]
    TooNew {
        /// What, and where.
        what: String,
    },
    /// The device cannot read the end of the journal, where the newest acknowledged records may be.
    #[error(
        "the device cannot read bytes {from} to {to} of {file}, where the newest acknowledged records may be; nothing was changed: start again when the device can read them, or give them up with `wald repair --accept-loss`"
    )]
    UnreadEnd {
        /// The segment, below the data directory.
        file: String,
        /// The first byte.
        from: u64,
        /// The byte behind the last one.
        to: u64,
    },
    /// Damage was found and `on_damage = refuse`.
    #[error("the store is damaged and on_damage is refuse: {0}")]
    Damaged(String),
    /// The file system said no.
    #[error("{action}: {source}")]
    Io {
        /// What was being done, to what.
        action: String,
        /// What the system said.
        source: io::Error,
    },
}

/// Why nothing is shown of what is stored.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// What was asked for is not there; in words.
    #[error("{0}")]
    NotFound(String),
    /// The directory cannot be read.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// Why nothing is verified.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// There is no such segment.
    #[error("there is no segment {segment:016x}")]
    SegmentNotFound {
        /// The segment asked for.
        segment: u64,
    },
    /// It was sorted, and is gone.
    #[error("segment {segment:016x} was sorted: what it held is in the sorted run {run:016x}")]
    SegmentSorted {
        /// The segment asked for.
        segment: u64,
        /// The run that stands for it.
        run: u64,
    },
    /// As many verifications as are allowed run already.
    #[error("{running} verifications run already, the most allowed")]
    Busy {
        /// How many.
        running: usize,
    },
    /// No thread could be started for it.
    #[error("starting a thread for the verification: {0}")]
    Io(#[source] io::Error),
}

impl OpenError {
    pub(crate) fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }
}
