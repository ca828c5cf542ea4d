//! Errors, per operation. Each variant says whether data was written, and who must act.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::api::config::ConfigError;
use crate::api::record::{Durability, Visibility};
use crate::base::ids::{LogId, LogName, Lsn, Name, Position, Timestamp, records_in_words};

/// Why an append was not acknowledged.
#[derive(Debug, Clone, thiserror::Error)]
pub enum AppendError {
    /// The request itself is wrong; nothing was written.
    #[error(transparent)]
    Invalid(#[from] InvalidBatch),
    /// All conditions that did not hold. Nothing was written.
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
    /// The batch is too old to check for duplicates: its answer is no longer remembered. Nothing was written
    /// now. The batch may have been applied before.
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
    /// The log forgot the producer, or does not know it and its epoch is over. Nothing was written now. The
    /// batch may have been applied before.
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
    /// The producer used the sequence for other records or for another batch. Nothing was written.
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
        /// The difference, in words.
        what: &'static str,
    },
    /// The epoch of a writer or a producer is too far above the current one; nothing was
    /// written.
    #[error("{}", epoch_jump(log, producer.as_ref(), *given, *current))]
    EpochJump {
        /// The log.
        log: LogName,
        /// The producer; `None` if the epoch is the log's writer epoch.
        producer: Option<Name>,
        /// The epoch given.
        given: u64,
        /// The current epoch; 0 if there was none.
        current: u64,
    },
    /// The log, the store or a tenant has reached a limit. Nothing was written.
    #[error("{}", quota(log, tenant.as_deref(), *what, *used, *limit))]
    Quota {
        /// The log of the request; the first if there are several.
        log: LogName,
        /// The kind of thing whose number has reached the limit.
        what: Bounded,
        /// Their number now.
        used: u64,
        /// Their maximum number.
        limit: u64,
        /// The tenant whose quota has no room. `None`: a setting of the server is the limit.
        tenant: Option<Arc<str>>,
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
    /// The new lsn of a cursor exceeds the tail. Nothing was written.
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
    /// The engine cannot reach this durability, because it has no replica; nothing was written.
    #[error(
        "this server has no replica, so it cannot reach the durability {0:?}; nothing was written; ask for DURABLE"
    )]
    NotSupported(Durability),
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
        /// Maximum bytes in flight.
        limit: u64,
    },
    /// The replica is too far behind; nothing was written. Retry with backoff.
    #[error(
        "the replica is {behind} bytes and {segments} finished segments behind; at most {limit} bytes (replica_max_lag) and {most} segments are allowed; retry with backoff",
        most = crate::api::replica::MOST_UNRELEASED
    )]
    ReplicaBehind {
        /// Durable bytes that are not replicated.
        behind: u64,
        /// Maximum bytes of them.
        limit: u64,
        /// Finished segments that the replica has no file of.
        segments: u64,
    },
    /// The replica cannot be reached; nothing was written.
    #[error(
        "the bucket of the replica cannot be reached, so nothing can be REPLICATED; nothing was written; retry later"
    )]
    BucketDown,
    /// Another node owns the store; nothing was written.
    #[error("node {owner:?} owns this store since term {term}; nothing was written; ask that node")]
    Moved {
        /// The node that owns the store, as clients reach it.
        owner: String,
        /// Number of its term, which rises with each owner.
        term: u64,
    },
    /// The replica was lost while the request was in flight. The request is durable on this machine, and may or may not
    /// be on another.
    #[error(
        "the replica was lost while this request was in flight: the request may or may not survive the loss of this machine; repeat it only with the same producer or condition"
    )]
    ReplicationUnknown,
    /// No segment could be prepared; nothing was written. Appends resume automatically when space is free
    /// again.
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
    /// The journal failed earlier; nothing was written. It refuses appends until the process restarts and
    /// recovers.
    #[error("the journal failed earlier and refuses appends until a restart: {0}")]
    JournalFailed(#[source] Arc<io::Error>),
    /// The journal failed under this request. The request may or may not survive a restart.
    #[error("the journal failed while this request was in flight: {0}")]
    Unknown(#[source] Arc<io::Error>),
}

/// Maximum rise of the epoch of a writer or a producer at a time: 2^32.
pub const MAX_EPOCH_RISE: u64 = 1 << 32;

fn epoch_jump(log: &LogName, producer: Option<&Name>, given: u64, current: u64) -> String {
    let whose = match producer {
        Some(producer) => format!("producer {producer:?} of log {log:?}: epoch"),
        None => format!("log {log:?}: writer epoch"),
    };
    format!(
        "{whose} {given} is too far above the current epoch, {current}: an epoch rises by at most {MAX_EPOCH_RISE} at a time; nothing was written"
    )
}

/// Free space of the volume, in bytes, when a request was refused for lack of space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FreeSpace {
    /// Free bytes. `None` if the file system does not report them.
    pub free_bytes: Option<u64>,
    /// Free bytes with which the request succeeds. `None` if a write failed for a reason that free bytes do
    /// not show, such as a quota.
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

/// Kind of a thing that a client names.
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

/// Kind of a thing whose number a setting bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bounded {
    /// Producers of one log.
    ProducersOfLog,
    /// Cursors of one log.
    CursorsOfLog,
    /// Logs of the store.
    Logs,
    /// Logs of the store, and deleted logs that the sorter has not forgotten yet.
    DeletedLogs,
    /// Producers of all logs.
    Producers,
    /// Cursors of all logs.
    Cursors,
    /// Bytes of the names of logs, producers and cursors.
    NameBytes,
    /// Bytes of all these names and of the names of deleted logs that the sorter has not forgotten yet.
    DeletedNameBytes,
    /// Logs of a tenant.
    TenantLogs,
    /// Producers of all logs of a tenant.
    TenantProducers,
    /// Cursors of all logs of a tenant.
    TenantCursors,
    /// Stored bytes of all logs of a tenant.
    TenantBytes,
}

impl Bounded {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::ProducersOfLog | Self::Producers | Self::TenantProducers => "producers",
            Self::CursorsOfLog | Self::Cursors | Self::TenantCursors => "cursors",
            Self::Logs | Self::TenantLogs => "logs",
            Self::TenantBytes => "stored bytes",
            Self::DeletedLogs => "logs and deleted logs",
            Self::NameBytes => "bytes of names",
            Self::DeletedNameBytes => "bytes of names and names of deleted logs",
        }
    }

    /// The setting that sets the bound; of a tenant, the key in its `limits`.
    pub fn setting(self) -> &'static str {
        match self {
            Self::ProducersOfLog => "max_producers_per_log",
            Self::CursorsOfLog => "max_cursors_per_log",
            Self::Logs | Self::DeletedLogs => "max_logs",
            Self::Producers => "max_producers",
            Self::Cursors => "max_cursors",
            Self::NameBytes | Self::DeletedNameBytes => "max_name_bytes",
            Self::TenantLogs => "logs",
            Self::TenantProducers => "producers",
            Self::TenantCursors => "cursors",
            Self::TenantBytes => "stored_bytes",
        }
    }
}

fn quota(log: &LogName, tenant: Option<&str>, what: Bounded, used: u64, limit: u64) -> String {
    let whose = match (what, tenant) {
        (_, Some(tenant)) => format!("tenant {tenant:?}"),
        (Bounded::ProducersOfLog | Bounded::CursorsOfLog, None) => format!("log {log:?}"),
        (_, None) => "the store".to_owned(),
    };
    let remedy = match what {
        Bounded::ProducersOfLog => "use fewer producers",
        Bounded::Producers | Bounded::TenantProducers => "use fewer producers, delete logs",
        Bounded::CursorsOfLog | Bounded::Cursors | Bounded::TenantCursors => "delete cursors",
        Bounded::TenantLogs => "delete logs",
        Bounded::TenantBytes => "trim or delete logs",
        Bounded::Logs => {
            "delete logs (many at once, while the daemon is stopped: `wald delete-logs`)"
        }
        Bounded::DeletedLogs | Bounded::DeletedNameBytes => {
            "wait until the sorter has forgotten deleted logs"
        }
        Bounded::NameBytes => "delete logs or cursors, use shorter names",
    };
    let (name, setting) = (what.name(), what.setting());
    let raised = match tenant {
        Some(_) => format!("{setting} in the limits of the tenant"),
        None => setting.to_owned(),
    };
    let over = match what {
        Bounded::TenantBytes => ", which the request would exceed",
        _ => "",
    };
    format!(
        "{whose} has {used} {name} and may have at most {limit}{over}; nothing was written; {remedy}, or raise {raised}"
    )
}

impl AppendError {
    /// The shortage of the host that refused the append, if one did: it ends without a restart.
    pub(crate) fn shortage(&self) -> Option<HostShortage> {
        match self {
            Self::DiskFull(_) => Some(HostShortage::Space),
            Self::NoDescriptors => Some(HostShortage::Descriptors),
            _ => None,
        }
    }
}

impl From<HostShortage> for AppendError {
    fn from(shortage: HostShortage) -> Self {
        match shortage {
            HostShortage::Space => Self::DiskFull(FreeSpace::default()),
            HostShortage::Descriptors => Self::NoDescriptors,
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
    /// The log of the condition.
    pub log: LogName,
    /// The failed check.
    pub check: FailedCheck,
}

/// Difference between a log and a condition of the request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FailedCheck {
    /// The tail is another lsn.
    #[error("expected lsn {expected}, the next is {actual}")]
    PositionMismatch {
        /// The lsn that the request expected.
        expected: Lsn,
        /// The log's tail.
        actual: Lsn,
    },
    /// The writer is fenced.
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
    /// The cursor is at another lsn.
    #[error("cursor {cursor:?} was expected at lsn {expected}, it is at {actual}")]
    CursorMismatch {
        /// The cursor.
        cursor: Name,
        /// The lsn that the request expected.
        expected: Lsn,
        /// The lsn of the cursor; 0 if it does not exist.
        actual: Lsn,
    },
    /// The log does not exist.
    #[error("it must exist and does not")]
    LogMissing,
    /// The log exists.
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

/// Fault of a request itself, in any state of the logs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidBatch {
    /// The batch has neither records nor checks, or a log of it has no records.
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
    /// Some logs of the batch name a producer and this one does not. A repeat of it could not be recognised.
    #[error("log {log:?} names no producer, and others of the batch do; name one for each log")]
    ProducerMissing {
        /// The log without a producer.
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
        /// Bytes of its data and headers.
        bytes: u64,
        /// Maximum bytes.
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
        /// Number of its headers.
        headers: usize,
        /// Bytes of their keys and values.
        bytes: u64,
        /// Maximum number of headers.
        max_headers: u32,
        /// Maximum bytes of headers.
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
        /// Maximum number of records.
        max_records: u64,
        /// Maximum bytes.
        max_bytes: u64,
    },
    /// Too many logs, checks or cursors.
    #[error("the request has {count} {what}; at most {limit} are allowed")]
    TooMany {
        /// `batches`, `checks` or `cursors`.
        what: &'static str,
        /// Their number.
        count: u64,
        /// Their maximum number, which is the maximum number of records.
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
        /// Microseconds that the record's time is ahead.
        ahead_micros: i64,
        /// Maximum microseconds that it may be ahead.
        max_micros: i64,
    },
}

/// Why a request did not find the log that it names; nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// No log has the name.
    #[error("log {log:?} does not exist")]
    NotFound {
        /// The unknown log.
        log: LogName,
    },
    /// The name belongs to another log now, or to none.
    #[error("log {log:?} {}", match actual {
        Some(actual) => format!("has id {actual}, not {expected}: an earlier log of this name may have had that id"),
        None => format!("has no id {expected}: no log has this name now"),
    })]
    Replaced {
        /// The log.
        log: LogName,
        /// The identity asked for.
        expected: LogId,
        /// The identity of the log that has the name now.
        actual: Option<LogId>,
    },
}

/// Why a read was not answered.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ReadError {
    /// The request names no log that exists.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The start lies below the first record kept.
    #[error("lsn {asked} is below the first kept of log {log:?}, {first}")]
    Trimmed {
        /// The log.
        log: LogName,
        /// The first lsn that can be read.
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
        /// The first lsn behind the damage; `None` if unknown.
        to: Option<Lsn>,
    },
    /// The cursor was not made by this store for this selection.
    #[error("the cursor cannot be used: {0}")]
    BadCursor(&'static str),
    /// The start or bound does not fit the selection.
    #[error("{0}")]
    InvalidScan(&'static str),
    /// The engine has no replica, so no record is visible at this level.
    #[error(
        "this server has no replica, so no record has the visibility {0:?}; ask for VISIBILITY_DURABLE"
    )]
    NotSupported(Visibility),
    /// Another node may own the store by now, and may have newer records.
    #[error(
        "another node may own the store: this node has lost it, or has not reached the bucket of its replica for too long; \
         nothing is read here until the bucket answers"
    )]
    LeaseLost,
    /// The answer depends on changes that cannot be made durable now.
    #[error("the changes that the answer rests on cannot be made durable now: {0}")]
    Refused(#[source] AppendError),
    /// The journal failed. Records beyond the durable lsn cannot be read now.
    #[error(
        "the journal failed; records beyond the durable lsn cannot be read until a restart: {0}"
    )]
    JournalFailed(#[source] Arc<io::Error>),
    /// The disk did not return the bytes, but did not report damage either (for example: no file
    /// descriptors). Try again.
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
    /// The request names no log that exists.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The log does not know the producer.
    #[error("log {log:?} does not know producer {producer:?}; nothing was forgotten")]
    ProducerNotFound {
        /// The log.
        log: LogName,
        /// The unknown producer.
        producer: Name,
    },
    /// The change failed for a reason that also stops appends.
    #[error(transparent)]
    Append(#[from] AppendError),
}

/// Why a trim was not carried out; nothing was forgotten.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TrimError {
    /// The request names no log that exists.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The lsn exceeds the tail; records that do not exist cannot be forgotten.
    #[error("lsn {asked} is beyond the tail of log {log:?}, {tail}")]
    BeyondTail {
        /// The log.
        log: LogName,
        /// Its tail.
        tail: Lsn,
        /// The lsn asked for.
        asked: Lsn,
    },
    /// The trim failed for a reason that also stops appends.
    #[error(transparent)]
    Append(#[from] AppendError),
}

/// Why a fence was not raised; nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum FenceError {
    /// The name belongs to another log now, or to none.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The epoch given does not exceed the log's epoch: another writer was faster.
    #[error("log {log:?} has writer epoch {current}; {given} does not exceed it")]
    Fenced {
        /// The log.
        log: LogName,
        /// The epoch given, or the log's epoch plus 1 if none was given.
        given: u64,
        /// The log's writer epoch.
        current: u64,
    },
    /// The fence failed for a reason that also stops appends.
    #[error(transparent)]
    Append(#[from] AppendError),
}

/// Why a cursor was not moved, forgotten or found; nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CursorError {
    /// The request names no log that exists.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// No such cursor.
    #[error("log {log:?} has no cursor {cursor:?}")]
    NotFound {
        /// The log.
        log: LogName,
        /// The cursor.
        cursor: Name,
    },
    /// The change failed for a reason that also stops appends.
    #[error(transparent)]
    Append(#[from] AppendError),
}

/// Why a requested flush did not happen.
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
    /// The journal failed. Records that were not durable before may or may not survive.
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
    /// The maximum number of backups runs already.
    #[error("{running} backups run, which is the most; wait for the end of one")]
    Busy {
        /// Number of backups that run.
        running: usize,
    },
    /// The journal failed. Records that were not durable before may or may not survive.
    #[error("the journal failed; nothing is saved until a restart: {0}")]
    JournalFailed(#[source] Arc<io::Error>),
    /// A file cannot be read.
    #[error("reading {path} for the backup: {source}")]
    Io {
        /// The file.
        path: String,
        /// The error of the system.
        source: Arc<io::Error>,
    },
    /// No part of the backup was read for this long, so the backup ended and holds no file any more.
    #[error("nobody read the backup for {} s, so it ended; begin another one", limit.as_secs())]
    Unread {
        /// Longest pause between two parts.
        limit: Duration,
    },
    /// A file changed after its digest was taken: damage was found in it meanwhile, or the device returns
    /// other bytes each time.
    #[error("{path} changed after the backup began; verify the store")]
    Changed {
        /// The file.
        path: String,
    },
}

/// Why a backup was not read or restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The manifest is not one that Wald writes.
    #[error("the manifest is not one of a backup: {0}")]
    Manifest(String),
    /// A file of the backup is missing, or differs from the manifest.
    #[error("{path}: {what}; `wald verify` lists all damage in the backup")]
    Damaged {
        /// The file, by its name in the store.
        path: String,
        /// The fault, in words.
        what: String,
    },
    /// The position lies beyond the end of the backup.
    #[error("the backup ends at position {end}; it does not reach {asked}")]
    Beyond {
        /// The position asked for.
        asked: Position,
        /// The position of the backup.
        end: Position,
    },
    /// No part of the store ends at or below the position.
    #[error("the store begins at position {first}; nothing of it ends at or below {asked}")]
    Before {
        /// The position asked for.
        asked: Position,
        /// The lowest position that can be asked for.
        first: Position,
    },
    /// The directory for the restored store is not empty.
    #[error("{directory} is not empty: {name} is there; a restore needs an empty directory")]
    NotEmpty {
        /// The directory.
        directory: String,
        /// The name of an entry found there.
        name: String,
    },
    /// The archive holds no record that was asked for.
    #[error("{directory} holds nothing of that; `wald archive list` shows its records")]
    NothingArchived {
        /// The directory.
        directory: String,
    },
    /// The archive holds records of more than one store.
    #[error("{directory} holds archives of several stores; choose one with --store: {stores}")]
    SeveralStores {
        /// The directory.
        directory: String,
        /// Their ids.
        stores: String,
    },
    /// The restored store, or the store to restore, cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The file system returned an error.
    #[error("{action}: {source}")]
    Io {
        /// The action that failed, and its object.
        action: String,
        /// The error of the system.
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
        /// The holder, as written into the lock file.
        holder: String,
    },
    /// The directory has files, but they are not a store of Wald.
    #[error("{what}")]
    NotAStore {
        /// The finding, and the remedy, in words.
        what: String,
    },
    /// The directory has no store, and none may be made there.
    #[error("the data directory {directory} has no store, and create_store is false: mount the volume that holds the store, or set create_store = true to start with an empty one", directory = directory.display())]
    NoStore {
        /// The directory.
        directory: PathBuf,
    },
    /// This version of Wald cannot read the format of the store.
    #[error("the store has format version {found}; this version reads {supported}")]
    Version {
        /// Version in FORMAT.
        found: u32,
        /// Newest version known.
        supported: u32,
    },
    /// A newer version of Wald wrote a part of the store. This version must not even write next to it.
    #[error(
        "{what}; a newer version of Wald, or another build, wrote that and must go on with this store; nothing was changed"
    )]
    TooNew {
        /// The part of the store, and its place.
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
    /// The keys of the store's records are missing, or are not the newest ones.
    #[error("{0}; nothing was changed")]
    Keys(String),
    /// Damage was found and `on_damage = refuse`.
    #[error("the store is damaged and on_damage is refuse: {0}")]
    Damaged(String),
    /// The file system returned an error.
    #[error("{action}: {source}")]
    Io {
        /// The action that failed, and its object.
        action: String,
        /// The error of the system.
        source: io::Error,
    },
}

/// Why a dump shows nothing.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// The store does not hold the thing asked for; in words.
    #[error("{0}")]
    NotFound(String),
    /// The directory cannot be read.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// Why a verification did not start.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// There is no such segment.
    #[error("there is no segment {segment:016x}")]
    SegmentNotFound {
        /// The id of the segment.
        segment: u64,
    },
    /// The segment was sorted, and is gone.
    #[error("segment {segment:016x} was sorted: what it held is in the sorted run {run:016x}")]
    SegmentSorted {
        /// The id of the segment.
        segment: u64,
        /// The id of the run that replaced it.
        run: u64,
    },
    /// The maximum number of verifications runs already.
    #[error("{running} verifications run already, the most allowed")]
    Busy {
        /// Number of verifications that run.
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

/// A resource of the host that ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostShortage {
    /// Space in the file system.
    Space,
    /// File descriptors of the process or of the system.
    Descriptors,
}
