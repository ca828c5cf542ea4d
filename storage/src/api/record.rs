//! Records and batches, as the engine takes them in and returns them.
//!
//! A stored body is the protobuf encoding of `wald.v1.RecordBatch.records`, field 3. Readers receive the
//! stored bytes.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;

use crate::api::records::Records;
use crate::base::ids::{LogId, LogName, Lsn, Name, Timestamp};

/// One record to append.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Record {
    /// The payload.
    pub data: Bytes,
    /// Application metadata, in the order given.
    pub headers: Vec<Header>,
    /// The producer's time; `None` = the engine's clock.
    pub timestamp: Option<Timestamp>,
    /// The producer's checksum of `data`, CRC-32C; verified on arrival, stored, returned.
    pub crc32c: Option<u32>,
}

/// One header of a record.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Header {
    /// The key; may repeat.
    pub key: String,
    /// The value.
    pub value: Bytes,
}

/// Conditions that a log must meet for a request to be applied. They are checked together with the assignment
/// of lsns, so nothing comes between.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Guard {
    /// The log's tail must be exactly this. An unknown log's tail is 0.
    pub expected_lsn: Option<Lsn>,
    /// The log must exist.
    pub must_exist: bool,
    /// The log must not exist.
    pub must_not_exist: bool,
    /// The log must have this id, so a re-created log of the same name does not pass.
    pub log_id: Option<LogId>,
    /// The log's writer epoch must be this (0 until the first fence). A log that was fenced takes no records
    /// from a batch without a writer epoch.
    pub writer_epoch: Option<u64>,
}

impl Guard {
    /// The conditions that hold once `records` records were appended under these; `None` if there are none.
    fn after(mut self, records: u64) -> Option<Self> {
        if let Some(expected) = &mut self.expected_lsn {
            // A client may expect any lsn, so the sum may overflow.
            *expected = Lsn::new(expected.get().checked_add(records)?);
        }
        (!self.must_not_exist).then_some(self)
    }
}

/// Identifies the producer and the sequence number of a batch, so that a repeat is recognised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Producer {
    /// Name of the producer, within the log.
    pub id: Name,
    /// Its incarnation; a higher one takes over.
    pub epoch: u64,
    /// Counts its batches in this log from 0, again from 0 in a higher epoch.
    pub sequence: u64,
}

/// A cursor to move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CursorCommit {
    /// The log it belongs to.
    pub log: LogName,
    /// Its name within the log.
    pub cursor: Name,
    /// The next lsn to read; at most the tail.
    pub lsn: Lsn,
    /// The lsn that it must have now; a cursor that does not exist counts as 0.
    pub expected_lsn: Option<Lsn>,
    /// The log must be this one.
    pub log_id: Option<LogId>,
}

/// State of a cursor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedCursor {
    /// Its name within the log.
    pub name: Name,
    /// Identity of the log.
    pub log_id: LogId,
    /// The next lsn to read.
    pub lsn: Lsn,
    /// Time of its last move.
    pub update_time: Timestamp,
}

/// State of a producer of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProducerInfo {
    /// Its id.
    pub id: Name,
    /// Its newest epoch.
    pub epoch: u64,
    /// The sequence of its next batch.
    pub next_sequence: u64,
    /// Arrival of its newest batch.
    pub last_append: Timestamp,
}

/// The records of one log in a [`Batch`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRecords {
    /// The log; created if unknown (and `auto_create` is on).
    pub log: LogName,
    /// At least one record.
    pub records: Records,
    /// Conditions on this log.
    pub guard: Guard,
    /// If given, a repeat is recognised and gets the original answer.
    pub producer: Option<Producer>,
}

/// Conditions on a log that the batch does not write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogCheck {
    /// The log.
    pub log: LogName,
    /// Conditions on it.
    pub guard: Guard,
}

/// A request to append: all of it becomes visible and durable together, or nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// Whether this is one plain append. Sync mode `batch` acknowledges plain appends as WRITTEN, and all
    /// others as DURABLE.
    pub single: bool,
    /// Records to append; no log twice, here and in `checks` together.
    pub logs: Vec<LogRecords>,
    /// Conditions on other logs.
    pub checks: Vec<LogCheck>,
    /// Cursors to move in the same step; none twice.
    pub cursors: Vec<CursorCommit>,
    /// Number of requests that [`Append::join`](crate::Append::join) has put behind the first. Each has
    /// its own position; they follow each other from the position of the batch on.
    pub(crate) joined: u32,
}

impl From<Vec<LogRecords>> for Batch {
    /// Records of logs, without checks and cursors; not a plain append.
    fn from(logs: Vec<LogRecords>) -> Self {
        Self {
            logs,
            ..Self::default()
        }
    }
}

impl Batch {
    /// Number of requests in it.
    pub fn requests(&self) -> u32 {
        self.joined + 1
    }

    /// Whether it holds only records of one log.
    fn is_plain(&self) -> bool {
        let alone = self.checks.is_empty() && self.cursors.is_empty();
        alone && self.logs.len() == 1 && self.logs[0].producer.is_none()
    }

    /// Whether this and `next` hold only records of one log, and the conditions of `next` follow from the
    /// conditions of this.
    pub(crate) fn leads_to(&self, next: &Self) -> bool {
        if !self.is_plain() || !next.is_plain() || self.single != next.single {
            return false;
        }
        let single = self.single;
        let (first, next) = (&self.logs[0], &next.logs[0]);
        // The answer to a plain append has the stored time of its record, and an answer to several has one time.
        if single && (first.records.have_times() || next.records.have_times()) {
            return false;
        }
        first.log == next.log && first.guard.after(first.records.len()) == Some(next.guard)
    }
}

/// Consecutive records of one log as they are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredBatch {
    /// The log's name.
    pub log: LogName,
    /// The log's identity.
    pub log_id: LogId,
    /// Lsn of the first record.
    pub first_lsn: Lsn,
    /// Number of records.
    pub count: u32,
    /// Time of arrival; also the time of each record without a time of its own.
    pub arrival: Timestamp,
    /// Encoded `wald.v1.RecordBatch.records`, verified against its checksum.
    pub body: Bytes,
}

impl StoredBatch {
    /// The lsn after the last record.
    pub fn next_lsn(&self) -> Lsn {
        self.first_lsn.advance(u64::from(self.count))
    }
}

/// Records that a reader does not get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gap {
    /// The log; `None` if the damage cannot be attributed to one.
    pub log: Option<LogName>,
    /// First missing lsn; `None` where no lsn can be named.
    pub from: Option<Lsn>,
    /// First lsn after the missing ones; `None` if it cannot be known.
    pub to: Option<Lsn>,
    /// The reason.
    pub reason: GapReason,
}

/// Why records are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GapReason {
    /// Forgotten by a trim.
    Trimmed,
    /// Forgotten by the log's retention.
    Expired,
    /// Damaged on disk.
    Quarantined,
    /// Taken back by a crash; they had never been durable.
    Lost,
    /// Their log was deleted.
    Deleted,
}

/// How safe an ack is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Durability {
    /// In the daemon's memory.
    Accepted,
    /// Handed to the operating system: survives a kill, not a power cut.
    Written,
    /// Flushed to the device.
    Durable,
    /// Also stored on another machine. An engine without a replica refuses this level.
    Replicated,
}

/// Which records a reader sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Visibility {
    /// Everything accepted.
    Accepted,
    /// Everything handed to the operating system.
    Written,
    /// Only records on the device.
    Durable,
    /// Only records that are also on another machine.
    Replicated,
}

impl Visibility {
    /// Whether a reader of this visibility sees records that a restart may take back.
    pub(crate) fn sees_unflushed(self) -> bool {
        matches!(self, Self::Accepted | Self::Written)
    }
}

/// Event after which an append that names no durability is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SyncMode {
    /// The copy on another machine. The loss of this machine takes back nothing acknowledged. Only with a replica.
    Replicated,
    /// A flush. A power cut takes back nothing acknowledged.
    Strict,
    /// A flush for batches, a write for single appends. Single appends are flushed with the next batch of any
    /// log, or within the sync interval.
    Batch,
    /// A write; flushed within the sync interval.
    Interval,
    /// A write; flushed when the kernel chooses, at a roll, at shutdown, on Sync.
    Async,
    /// The intake; written on Sync, when the buffer is full, or when a stronger request touches the log. A
    /// process crash loses records that were not written.
    Manual,
}

impl SyncMode {
    /// Durability after which an append is answered.
    pub fn durability(self, single: bool) -> Durability {
        match self {
            Self::Replicated => Durability::Replicated,
            Self::Strict => Durability::Durable,
            Self::Batch if !single => Durability::Durable,
            Self::Batch | Self::Interval | Self::Async => Durability::Written,
            Self::Manual => Durability::Accepted,
        }
    }

    /// Visibility of a reader that names none: everything that plain appends were acknowledged for.
    pub fn visibility(self) -> Visibility {
        match self {
            Self::Replicated => Visibility::Replicated,
            Self::Strict => Visibility::Durable,
            Self::Batch | Self::Interval | Self::Async => Visibility::Written,
            Self::Manual => Visibility::Accepted,
        }
    }

    /// Whether written records are flushed within the sync interval automatically.
    pub fn flushes_by_itself(self) -> bool {
        !matches!(self, Self::Async | Self::Manual)
    }
}

/// Compression of the bodies of frames, whole batches at a time, kept only if smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compression {
    /// No compression.
    None,
    /// LZ4: fast.
    Lz4,
    /// Zstandard: smaller. Only in builds with the feature `zstd`.
    Zstd,
}

impl Compression {
    /// Whether this build can write and read it.
    pub const fn is_built(self) -> bool {
        match self {
            Self::None | Self::Lz4 => true,
            Self::Zstd => cfg!(any(test, feature = "zstd")),
        }
    }
}

/// Bounds beyond which a log forgets its oldest records automatically. `None` or 0 = no such bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// Maximum time since the arrival of a batch, by the expiry clock.
    pub max_age: Option<Duration>,
    /// Bytes in segments: the newest batches that together take at least this are kept.
    pub max_bytes: Option<u64>,
    /// Maximum number of records.
    pub max_records: Option<u64>,
    /// Whether cursors keep records: nothing at or beyond the log's lowest cursor is forgotten, and nothing
    /// at all while the log has no cursor.
    pub respect_cursors: bool,
}

impl Retention {
    /// Whether any bound is set.
    pub fn is_bounded(&self) -> bool {
        self.age().is_some() || self.bytes().is_some() || self.records().is_some()
    }

    pub(crate) fn age(&self) -> Option<Duration> {
        self.max_age.filter(|age| !age.is_zero())
    }

    pub(crate) fn bytes(&self) -> Option<u64> {
        self.max_bytes.filter(|bytes| *bytes != 0)
    }

    pub(crate) fn records(&self) -> Option<u64> {
        self.max_records.filter(|records| *records != 0)
    }
}

/// Settings of one log. `None` = the server's setting.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogConfig {
    /// Event after which an append that names no durability is answered.
    pub sync_mode: Option<SyncMode>,
    /// Retention. It replaces all retention defaults of the server. Boxed, since few logs of a million have
    /// one of their own.
    pub retention: Option<Box<Retention>>,
    /// Compression of its frames from now on; older frames stay as they are. The server's default is no
    /// compression.
    pub compression: Option<Compression>,
    /// Maximum bytes of a record of this log; at most the server's limit.
    pub max_record_bytes: Option<u32>,
}

impl LogConfig {
    /// These settings behind a shared pointer. Nearly all logs have the default settings, and all of them
    /// share one copy.
    pub(crate) fn shared(self) -> Arc<Self> {
        static SERVERS: LazyLock<Arc<LogConfig>> = LazyLock::new(Arc::default);
        if self == **SERVERS {
            Arc::clone(&SERVERS)
        } else {
            Arc::new(self)
        }
    }
}

/// Changes of a log's settings. `None` keeps a setting.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogConfigChange {
    /// The sync mode from now on; `Some(None)` = the server's setting.
    pub sync_mode: Option<Option<SyncMode>>,
    /// The compression from now on.
    pub compression: Option<Option<Compression>>,
    /// The maximum bytes of a record from now on.
    pub max_record_bytes: Option<Option<u32>>,
    /// The retention from now on.
    pub retention: Option<RetentionChange>,
}

impl LogConfigChange {
    /// Returns `current` with these changes.
    pub fn apply(&self, current: &LogConfig) -> LogConfig {
        let max_record_bytes = self.max_record_bytes;
        let own = current.retention.as_ref();
        LogConfig {
            sync_mode: self.sync_mode.unwrap_or(current.sync_mode),
            retention: match &self.retention {
                None => own.cloned(),
                Some(RetentionChange::Whole(retention)) => retention.clone(),
                Some(RetentionChange::Bounds(bounds)) => {
                    let own = own.map(|own| **own).unwrap_or_default();
                    Some(Box::new(bounds.apply(own)))
                }
            },
            compression: self.compression.unwrap_or(current.compression),
            max_record_bytes: max_record_bytes.unwrap_or(current.max_record_bytes),
        }
    }
}

/// Change of the retention of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RetentionChange {
    /// Replaces all bounds; `None` = the server's retention from now on.
    Whole(Option<Box<Retention>>),
    /// Changes single bounds. From now on the log has its own retention, without any bound of the server's.
    Bounds(RetentionBounds),
}

/// Changes of bounds. `None` keeps a bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RetentionBounds {
    /// [`Retention::max_age`] from now on; `Some(None)` = no bound.
    pub max_age: Option<Option<Duration>>,
    /// [`Retention::max_bytes`] from now on.
    pub max_bytes: Option<Option<u64>>,
    /// [`Retention::max_records`] from now on.
    pub max_records: Option<Option<u64>>,
    /// [`Retention::respect_cursors`] from now on.
    pub respect_cursors: Option<bool>,
}

impl RetentionBounds {
    fn apply(&self, current: Retention) -> Retention {
        Retention {
            max_age: self.max_age.unwrap_or(current.max_age),
            max_bytes: self.max_bytes.unwrap_or(current.max_bytes),
            max_records: self.max_records.unwrap_or(current.max_records),
            respect_cursors: self.respect_cursors.unwrap_or(current.respect_cursors),
        }
    }
}

/// State of a log, for administration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogInfo {
    /// The name.
    pub name: LogName,
    /// The identity.
    pub log_id: LogId,
    /// The settings.
    pub config: Arc<LogConfig>,
    /// The first record kept.
    pub first_lsn: Lsn,
    /// Number of records directly below `first_lsn` that retention expired. Trims removed everything below
    /// those.
    pub expired: u64,
    /// The next lsn, at the visibility asked for.
    pub tail_lsn: Lsn,
    /// All records below this are on the device.
    pub durable_lsn: Lsn,
    /// All records below this are on another machine. `None` without a replica.
    pub replicated_lsn: Option<Lsn>,
    /// Raised by each fence; 0 until the first.
    pub writer_epoch: u64,
    /// Bytes of the whole frames that hold the kept records, as they were written. Records in memory only count as
    /// the frame that they will get.
    pub stored_bytes: u64,
    /// When it was created.
    pub create_time: Timestamp,
    /// When its settings were last changed.
    pub update_time: Timestamp,
    /// The epoch that a producer with an unknown id begins at.
    pub first_producer_epoch: u64,
}
