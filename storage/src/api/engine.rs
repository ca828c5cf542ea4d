//! The interface between the service and an engine. The service knows nothing else of an engine.
//!
//! An engine answers an append with a [`Ticket`] at once. The ticket resolves when the requested level is
//! reached, or known to be out of reach. A refusal means that provably nothing was written. Dropping a ticket
//! cancels nothing.
//!
//! Methods return plain futures, tied to no runtime; the trait is object-safe; no
//! engine's own types appear in it.

use std::collections::HashSet;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use smallvec::SmallVec;

use crate::api::config::Limits;
use crate::api::content::ContentDigest;
use crate::api::error::{
    AdminError, BackupError, CursorError, FenceError, ReadError, SyncError, TargetError, TrimError,
    VerifyError,
};
use crate::api::quota::{Quota, QuotaError, QuotaUse};
use crate::api::record::{
    Batch, CursorCommit, Durability, Gap, LogConfig, LogConfigChange, LogInfo, NamedCursor,
    ProducerInfo, StoredBatch, Visibility,
};
pub use crate::api::session::Session;
pub use crate::api::ticket::Ticket;
use crate::api::verification::Verification;
use crate::base::ids::{LogId, LogName, Lsn, Name, Position, RecoveryEpoch, SegmentId, Timestamp};

/// A future without a runtime.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Kind of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// One journal on a local disk.
    Local,
    /// Records in an object store.
    Object,
}

/// Kind, identity and limits of an engine.
#[derive(Debug, Clone)]
pub struct Profile {
    /// Kind of the engine.
    pub kind: EngineKind,
    /// Limits of a request.
    pub limits: Limits,
    /// Identity of the store, for ever.
    pub store_id: u128,
    /// Number that rises by one with each unclean start.
    pub recovery_epoch: RecoveryEpoch,
}

/// A list with one entry for each log of a batch. Most batches have one log, which takes no allocation.
pub type OneOrMore<T> = SmallVec<[T; 1]>;

/// Lsns assigned to one log of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogAppended {
    /// The log's identity.
    pub log_id: LogId,
    /// Lsn of the first record of the request.
    pub first_lsn: Lsn,
    /// The lsn after its last.
    pub next_lsn: Lsn,
    /// Stored time of the first record.
    pub timestamp: Timestamp,
    /// Time of arrival: the stored time of records without a time of their own, unless the log's newest
    /// record is later.
    pub arrival: Timestamp,
    /// Whether this batch repeats one applied before. If so, this is the answer of the first.
    pub deduplicated: bool,
}

/// A batch that has reached the requested level or a stronger one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Appended {
    /// One entry for each of the batch's logs, in the order given.
    pub appends: OneOrMore<LogAppended>,
    /// For each of them, the lsn below which the log is on the device.
    pub durable_lsns: OneOrMore<Lsn>,
    /// For each of them, the lsn below which the log is on another machine. Empty without a replica.
    pub replicated_lsns: OneOrMore<Lsn>,
    /// The level reached when this was answered.
    pub durability: Durability,
    /// The batch's place in the journal; `None` for a batch of checks only.
    pub position: Option<Position>,
    /// Durations of its phases in the engine.
    pub times: AppendTimes,
}

/// A log after a fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fenced {
    /// The log's identity.
    pub log_id: LogId,
    /// The tail that no older writer can pass.
    pub tail_lsn: Lsn,
    /// The epoch from now on.
    pub writer_epoch: u64,
}

/// Durations of the phases of one append in the engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AppendTimes {
    /// From submit until the committer took the append.
    pub queue: Duration,
    /// Until its group was put together, with the other appends of the group.
    pub encode: Duration,
    /// The write of its group; zero if it is in memory only.
    pub write: Duration,
    /// From the write until the end of the flush that the append waited for; zero if it waited for none.
    pub flush: Duration,
    /// From the end of that flush until the replica had the append; zero if it did not wait for the replica.
    pub replicate: Duration,
}

/// Extent of a [`Append::sync`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncTarget {
    /// Handed to the operating system.
    Os,
    /// Flushed to the device.
    Device,
    /// Also stored on another machine.
    Replica,
}

/// A log by name, and by identity if the caller knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogTarget {
    /// The name.
    pub name: LogName,
    /// If given, the log must have this identity.
    pub log_id: Option<LogId>,
}

impl LogTarget {
    /// Compares the identity of the log that has the name.
    pub(crate) fn check(&self, actual: LogId) -> Result<(), TargetError> {
        match self.log_id {
            Some(expected) if expected != actual => Err(TargetError::Replaced {
                log: self.name.clone(),
                expected,
                actual: Some(actual),
            }),
            _ => Ok(()),
        }
    }

    /// The error if no log has the name.
    pub(crate) fn not_found(&self) -> TargetError {
        TargetError::NotFound {
            log: self.name.clone(),
        }
    }
}

/// Where a read of one log begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadStart {
    /// The first record kept.
    First,
    /// This record.
    Lsn(Lsn),
    /// The first record whose stored time is not before this.
    Time(Timestamp),
    /// This number of records before the tail.
    TailOffset(u64),
}

/// A bounded read of one log.
#[derive(Debug, Clone)]
pub struct ReadRequest {
    /// The log.
    pub log: LogTarget,
    /// Where to begin.
    pub start: ReadStart,
    /// Maximum number of records to return, at least 1.
    pub max_records: u32,
    /// Maximum bytes of bodies to return; one record is returned even if it is larger.
    pub max_bytes: u32,
    /// Visibility; `None` = the level that the log's sync mode acknowledges.
    pub visibility: Option<Visibility>,
}

/// Result of a read.
#[derive(Debug, Clone)]
pub struct Page {
    /// The log's identity.
    pub log_id: LogId,
    /// Consecutive stored batches; their records are dense in lsn.
    pub batches: Vec<StoredBatch>,
    /// The lsn to read on from.
    pub next_lsn: Lsn,
    /// The tail at the visibility asked for. One more if the tail cannot be proven, so that a reader meets the gap.
    pub tail_lsn: Lsn,
    /// All records below this are on the device.
    pub durable_lsn: Lsn,
    /// All records below this are on another machine. `None` without a replica.
    pub replicated_lsn: Option<Lsn>,
    /// The first record kept.
    pub first_lsn: Lsn,
}

/// Logs that a scan delivers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// One log.
    Log(LogTarget),
    /// All logs whose name starts with this, also those created later.
    Prefix(String),
    /// All logs.
    All,
}

/// Where a scan begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScanStart {
    /// The first record kept.
    First,
    /// This record (one log only).
    Lsn(Lsn),
    /// The first record of each log whose stored time is not before this.
    Time(Timestamp),
    /// This number of records before the tail (one log only). 0 = from now on, for any selection.
    TailOffset(u64),
    /// Exactly after the message that carried this cursor.
    Cursor(Bytes),
}

/// A range of one or more logs.
#[derive(Debug, Clone)]
pub struct ScanRequest {
    /// Logs to deliver.
    pub selector: Selector,
    /// Where to begin.
    pub start: ScanStart,
    /// Stop before this lsn (one log only).
    pub until_lsn: Option<Lsn>,
    /// Maximum number of records; 0 = no bound.
    pub max_records: u64,
    /// Whether to go on with records that are appended later. A scan that does not follow ends at the tail of
    /// the moment it began.
    pub follow: bool,
    /// Visibility; `None` = the level that the sync mode acknowledges.
    pub visibility: Option<Visibility>,
    /// Approximate bytes of bodies in a chunk.
    pub chunk_bytes: u32,
}

/// One step of a scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanChunk {
    /// Records that are missing before the batches.
    pub gaps: Vec<Gap>,
    /// Records, per log in lsn order, over logs in commit order.
    pub batches: Vec<StoredBatch>,
    /// Whether the end is reached. For a scan that follows: the tail when this chunk was made. For a plain
    /// scan: the tail when the scan began.
    pub caught_up: bool,
    /// Resumes exactly after this chunk.
    pub cursor: Bytes,
    /// The tail at the visibility asked for (one log only).
    pub tail_lsn: Option<Lsn>,
    /// All records below this are on the device (one log only).
    pub durable_lsn: Option<Lsn>,
    /// All records below this are on another machine (one log only). `None` without a replica.
    pub replicated_lsn: Option<Lsn>,
}

/// Memory that a scan reads into. The caller of the scan grants it.
pub trait Room: Send + Sync {
    /// Resolves when the scan may read `bytes` bytes. Unused bytes of earlier grants count.
    fn reserve(&self, bytes: u64) -> BoxFuture<'_, ()>;

    /// The scan has found nothing to read, and waits.
    fn give_back(&self);

    /// A value that a thread keeps while it reads for the scan, also when the scan has gone away meanwhile.
    fn at_work(&self) -> Option<Arc<dyn Send + Sync>>;
}

/// A scan in progress. Holds no file and no memory of records between steps.
pub trait Scan: Send {
    /// From now on the scan reserves room for each chunk before it reads the chunk. Without this call, it
    /// reads whenever a chunk is requested.
    fn read_in(&mut self, room: Arc<dyn Room>);

    /// The next chunk; `None` at the end. A scan that follows waits for data. Dropping an unfinished future
    /// loses nothing: the next call returns the same chunk.
    ///
    /// # Errors
    /// If the log does not exist, was deleted, or is another one; if the cursor or the start does not fit the log; if
    /// the journal failed; or if the disk returns an error. Damaged and removed records are gaps, not errors.
    fn next(&mut self) -> BoxFuture<'_, Result<Option<ScanChunk>, ReadError>>;

    /// The cursor that resumes after the last chunk delivered.
    fn cursor(&self) -> Bytes;

    /// Number of scans that follow the same log or the same prefix, this one included. 0 before this scan has
    /// reached the end for the first time.
    fn followers(&self) -> usize;
}

/// Tail and durability of one log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogStat {
    /// The log.
    pub info: LogInfo,
    /// End of the records of the requested recovery epoch that survived: an ack of that epoch survived if and
    /// only if its position is below. `None` if nothing of that epoch was lost, because it is the current
    /// one.
    pub survived_position: Option<Position>,
}

/// One file of a backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackupFile {
    /// Its path below the data directory, with `/` between the parts.
    pub path: String,
    /// Bytes of the file in the backup. A segment is saved up to the end of its frames.
    pub bytes: u64,
    /// Digest of these bytes.
    pub digest: ContentDigest,
    /// Whether the caller holds the file, so that its content is not sent.
    pub known: bool,
}

/// Damage in the content of a backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackupDamage {
    /// The segment; `None` = not known, or gone.
    pub segment: Option<SegmentId>,
    /// The first position touched.
    pub from: Position,
    /// The position after the last touched, if that is known.
    pub to: Option<Position>,
    /// The records touched, if these are known.
    pub records: Option<(LogName, Lsn, Lsn)>,
}

/// Contents of a backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackupManifest {
    /// Identity of the store.
    pub store_id: u128,
    /// Its recovery epoch.
    pub recovery_epoch: RecoveryEpoch,
    /// Everything in the journal below this is in the backup.
    pub position: Position,
    /// Time at which the backup began.
    pub created: Timestamp,
    /// The files.
    pub files: Vec<BackupFile>,
    /// Damage in the content. Damaged bytes are saved as they are.
    pub damage: Vec<BackupDamage>,
    /// The public key of Ed25519 whose signature a stored manifest has, verified by its reader; `None` = it is not signed.
    pub signed_by: Option<[u8; 32]>,
}

/// One step of a backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackupPart {
    /// Number of bytes that were read and verified; there is nothing to send.
    Read(u64),
    /// The contents of the backup: once, before any content of a file.
    Manifest(Arc<BackupManifest>),
    /// Content of a file, by its index in the manifest.
    Chunk {
        /// Index of the file.
        file: usize,
        /// Offset in the file at which this begins, in bytes.
        offset: u64,
        /// The content.
        data: Bytes,
    },
}

/// A backup in progress.
pub trait Backup: Send {
    /// The next step; `None` at the end. Each step reads at most half a megabyte, so the caller sets the
    /// pace. Dropping an unfinished future ends the backup.
    ///
    /// # Errors
    /// If a file cannot be read, or changed after its digest was taken; if the journal failed; or if the backup ended
    /// because its caller made too long a pause.
    fn next(&mut self) -> BoxFuture<'_, Result<Option<BackupPart>, BackupError>>;
}

/// Numbers for metrics, taken at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Logs that exist.
    pub logs: u64,
    /// Deleted logs that the sorter has not forgotten yet.
    pub deleted_logs: u64,
    /// Producers of all logs.
    pub producers: u64,
    /// Producers of the log that has the most.
    pub producers_of_log: u64,
    /// Cursors of all logs.
    pub cursors: u64,
    /// Bytes of the names of logs, producers and cursors.
    pub name_bytes: u64,
    /// Maximum number of logs.
    pub max_logs: u64,
    /// Maximum number of producers of all logs.
    pub max_producers: u64,
    /// Maximum number of producers of one log.
    pub max_producers_per_log: u64,
    /// Maximum number of cursors of all logs.
    pub max_cursors: u64,
    /// Maximum bytes of names.
    pub max_name_bytes: u64,
    /// Bytes of appends in flight.
    pub inflight_bytes: u64,
    /// Bytes of records in memory only (sync mode `manual`).
    pub buffered_bytes: u64,
    /// Bytes written and not flushed.
    pub durable_lag_bytes: u64,
    /// Age of the oldest unflushed byte.
    pub durable_lag: Duration,
    /// Segments of the journal that hold frames.
    pub journal_segments: u64,
    /// Segments ready for a roll.
    pub ready_segments: u64,
    /// Finished segments that are open for reading.
    pub open_segments: u64,
    /// Number of finished segments that were closed to make room for others.
    pub segment_evictions: u64,
    /// Bytes of journal segments.
    pub journal_bytes: u64,
    /// Bytes of ready segments.
    pub pool_bytes: u64,
    /// Bytes kept in quarantine.
    pub quarantine_bytes: u64,
    /// Free bytes of the file system for appends, without the space that is kept for sorting.
    /// `None` if the file system does not report them.
    pub free_bytes: Option<u64>,
    /// Records that are known to be damaged.
    pub quarantined_records: u64,
    /// Logs that lost records to damage.
    pub damaged_logs: u64,
    /// Places of the journal with losses that cannot be attributed to a log.
    pub unattributed_damages: u64,
    /// Bytes of files that the device could not read since the start.
    pub unreadable_bytes: u64,
    /// Whether the last index or checkpoint could not be written.
    pub indexing_failed: bool,
    /// Why checkpoints, sorting and the return of space are held back, in sentences. Empty if they are not.
    pub held_back: Vec<String>,
    /// Bytes read by scrubbing since the start.
    pub scrubbed_bytes: u64,
    /// End of the last scrubbing pass over all sealed segments; `None` before the first.
    pub last_scrub: Option<Timestamp>,
    /// Logs with records that exceed a bound of retention and that only cursors keep.
    pub held_logs: u64,
    /// Bytes of these records.
    pub held_bytes: u64,
    /// Age of the oldest of these records.
    pub held_age: Duration,
    /// End of the last complete backup, also before this start; `None` if none is known.
    pub last_backup: Option<Timestamp>,
    /// Microseconds that the expiry clock is behind the system's clock; below 0: ahead.
    pub expiry_lag_micros: i64,
    /// Jumps of the system's clock ahead since the start.
    pub clock_jumps_ahead: u64,
    /// Jumps of the system's clock back since the start.
    pub clock_jumps_back: u64,
    /// Size of the last jump in microseconds; below 0: back. 0: none since the start.
    pub last_clock_jump_micros: i64,
    /// Sorted runs. They replace segments of the journal.
    pub sorted_runs: u64,
    /// Bytes of the files of sorted runs.
    pub sorted_bytes: u64,
    /// Bytes that the sorter read since the start.
    pub sorter_read_bytes: u64,
    /// Bytes that the sorter wrote since the start.
    pub sorter_written_bytes: u64,
    /// Bytes of files that sorting removed since the start, less the bytes of the runs that replaced them.
    pub sorter_freed_bytes: u64,
    /// Bytes in sorted runs that hold kept records, as of the last examination of all runs.
    pub sorted_live_bytes: u64,
    /// Bytes in sorted runs that hold no kept record and can be freed, as of the same examination.
    pub sorted_dead_bytes: u64,
    /// Bytes of files with records that are not under the newest key of their log; 0 without encryption.
    pub unrenewed_bytes: u64,
    /// Bytes of sealed segments that are not sorted yet.
    pub unsorted_bytes: u64,
    /// Bytes of unsorted segments that are sorted in one go; 0: nothing is sorted.
    pub sorter_part_bytes: u64,
    /// Bytes that were written to the archive since the start.
    pub archive_written_bytes: u64,
    /// Number of failures of the archive since the start.
    pub archive_failures: u64,
    /// Why records cannot be archived now, and so none is dropped; `None` if they can.
    pub archive_failing: Option<String>,
    /// Scans that are waiting for data.
    pub followers: u64,
    /// Quotas of tenants with their use, in the order of their prefixes.
    pub quotas: Vec<QuotaUse>,
    /// Whether the journal has failed.
    pub journal_failed: bool,
}

/// One segment file, or sorted run, for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Its number.
    pub id: u64,
    /// Position of its first byte. A sorted run has the base of the first segment that it replaced.
    pub base: Position,
    /// Size of the file.
    pub bytes: u64,
    /// End of its frames so far. A sorted run has the end of the last segment that it replaced.
    pub end: Position,
    /// Whether it is finished.
    pub sealed: bool,
    /// Whether frames in it cannot be read.
    pub damaged: bool,
    /// First and last segment that it replaced, if it is a sorted run.
    pub sorted: Option<(u64, u64)>,
    /// Contents from its index; `None` while it has no index, or if they were not looked up.
    pub contents: Option<SegmentContents>,
}

/// Contents of a finished segment or sorted run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentContents {
    /// Records that can be read, or could be before they were trimmed.
    pub records: u64,
    /// Logs with at least one frame in it, if only a trim.
    pub logs: u64,
    /// Time at which the journal went on in the next segment; `None` if there is no next segment yet, and for
    /// a sorted run.
    pub left: Option<Timestamp>,
    /// Bytes in a sorted run that hold kept records at the time of the call; `None` for a segment, where
    /// nothing counts them.
    pub live_bytes: Option<u64>,
}

/// Promises of the device and its file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DurabilityTruth {
    /// Name of the file system under the data directory.
    pub file_system: String,
    /// The call that flushes, for example `fdatasync`.
    pub sync_primitive: &'static str,
    /// Median of the newest flushes of the journal, at most 128. Each start makes two.
    pub flush_p50: Duration,
    /// 99th percentile of the same flushes.
    pub flush_p99: Duration,
    /// Whether the storage is memory that a power cut or reboot empties, even after a flush.
    pub volatile: bool,
    /// Caveats of the device and its file system now, in sentences.
    pub caveats: Vec<String>,
}

/// Takes batches in. The module describes the contract of tickets.
pub trait Append: Send + Sync + 'static {
    /// Takes a batch in. Without `durability`, the sync modes of its logs decide. Batches of one `session`
    /// are applied in the order of the calls, and none after a refused one. Batches that need no flush may
    /// stay unwritten until [`Append::write_gathered`], so call it before you wait.
    fn submit(
        &self,
        session: Option<&Session>,
        batch: Batch,
        durability: Option<Durability>,
    ) -> Ticket;

    /// Takes a batch in as [`Append::submit`], for a caller that then calls [`Append::write_gathered`]. The batch may stay
    /// unwritten until then, whatever its durability.
    fn gather(
        &self,
        session: Option<&Session>,
        batch: Batch,
        durability: Option<Durability>,
    ) -> Ticket {
        self.submit(session, batch, durability)
    }

    /// Puts `next` behind `batch`, so that they are submitted as one, if no client can see the difference.
    /// Both must hold only records of one log, and each must be valid alone. The conditions of `next` must
    /// follow from the conditions of `batch`. Both must belong to one session, in this order, and ask for one
    /// durability. They are applied together or not at all. A refusal is that of the first.
    ///
    /// # Errors
    /// Returns `next` if these conditions do not hold.
    fn join(&self, batch: &mut Batch, next: Batch) -> Result<(), Batch>;

    /// Writes, on this thread, all batches that were taken in. If a batch waits alone for a flush, and flushes are short on
    /// this device, this thread flushes it, too: to wake another thread would take about as long. All other work is left to
    /// other threads, so this may be called where nothing may block for long.
    fn write_gathered(&self);

    /// Makes everything accepted before as safe as `target`. Returns the position below which everything is
    /// durable.
    ///
    /// # Errors
    /// If there is no such log, if the journal failed, if the write or flush fails, or for a reason that also refuses
    /// appends, for example a full disk.
    fn sync(
        &self,
        target: SyncTarget,
        log: Option<&LogName>,
    ) -> BoxFuture<'_, Result<Position, SyncError>>;
}

/// Reads logs.
pub trait ReadLogs: Send + Sync + 'static {
    /// One page of one log.
    ///
    /// # Errors
    /// If there is no such log; if the start is below the first record kept or beyond the tail; if the first record of
    /// the page is damaged; if the journal failed and the page would begin beyond the durable records; or if the disk
    /// returns an error.
    fn read(&self, request: ReadRequest) -> BoxFuture<'_, Result<Page, ReadError>>;

    /// Resolves when the log's tail at the visibility exceeds `lsn`, or at once with the reason why it never
    /// will.
    ///
    /// # Errors
    /// If there is no such log, if it is deleted, or if the journal failed.
    fn tail_beyond(
        &self,
        log: LogTarget,
        lsn: Lsn,
        visibility: Option<Visibility>,
    ) -> BoxFuture<'_, Result<(), ReadError>>;

    /// Begins a scan.
    ///
    /// # Errors
    /// If the start does not fit the selection, or names a record or log that does not exist. A
    /// following scan of an unknown log is not an error: it waits for the log.
    fn scan(&self, request: ScanRequest) -> BoxFuture<'_, Result<Box<dyn Scan>, ReadError>>;

    /// Tail and durability of one log.
    ///
    /// # Errors
    /// If there is no such log.
    fn stat(
        &self,
        log: LogTarget,
        visibility: Option<Visibility>,
        of_epoch: Option<RecoveryEpoch>,
    ) -> BoxFuture<'_, Result<LogStat, ReadError>>;
}

/// Changes logs, their cursors and their producers, and lists them.
pub trait Administer: Send + Sync + 'static {
    /// Creates a log, durably.
    ///
    /// # Errors
    /// If the name exists, or for a reason that also refuses appends: a bound of the store, a full disk, a drain, a
    /// failed journal.
    fn create_log(
        &self,
        name: LogName,
        config: LogConfig,
    ) -> BoxFuture<'_, Result<LogInfo, AdminError>>;

    /// Changes some of a log's settings, durably. The other settings keep the results of earlier changes,
    /// also if several changes come at a time.
    ///
    /// # Errors
    /// If there is no such log, or for a reason that also refuses appends.
    fn update_log(
        &self,
        name: LogName,
        change: LogConfigChange,
    ) -> BoxFuture<'_, Result<LogInfo, AdminError>>;

    /// Deletes a log and all its records, durably.
    ///
    /// # Errors
    /// If there is no such log, or for a reason that also refuses appends.
    fn delete_log(&self, log: LogTarget) -> BoxFuture<'_, Result<(), AdminError>>;

    /// At most `limit` logs after `after` whose names start with `prefix`, in name order.
    ///
    /// # Errors
    /// If the engine cannot read the list.
    fn list_logs(
        &self,
        prefix: String,
        after: Option<String>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<LogInfo>, ReadError>>;

    /// Forgets the records below `before`, durably. Returns the first lsn kept. Changes nothing if these
    /// records are forgotten already.
    ///
    /// # Errors
    /// If there is no such log, if `before` is beyond the tail, or for a reason that also refuses appends.
    fn trim(&self, log: LogTarget, before: Lsn) -> BoxFuture<'_, Result<Lsn, TrimError>>;

    /// Raises a log's writer epoch, durably: by one, or to `epoch`, which must exceed it.
    /// Creates the log if there is none (and `auto_create` is on).
    ///
    /// # Errors
    /// If the name belongs to another log than the request names, if `epoch` does not exceed the epoch of the log, if
    /// the log does not exist and is not created, or for a reason that also refuses appends.
    fn fence(
        &self,
        log: LogTarget,
        epoch: Option<u64>,
    ) -> BoxFuture<'_, Result<Fenced, FenceError>>;

    /// Moves or creates a cursor, durably.
    ///
    /// # Errors
    /// If there is no such log, or for a reason that also refuses appends: a condition of the commit that does not hold,
    /// an lsn beyond the tail, a bound of the store, a full disk.
    fn commit_cursor(
        &self,
        commit: CursorCommit,
    ) -> BoxFuture<'_, Result<NamedCursor, CursorError>>;

    /// Forgets a cursor, durably.
    ///
    /// # Errors
    /// If there is no such log, if it has no such cursor, or for a reason that also refuses appends.
    fn delete_cursor(&self, log: LogTarget, cursor: Name)
    -> BoxFuture<'_, Result<(), CursorError>>;

    /// Lsn of a cursor, as far as it is on the device.
    ///
    /// # Errors
    /// If there is no such log, or no such cursor.
    fn cursor(
        &self,
        log: LogTarget,
        cursor: Name,
    ) -> BoxFuture<'_, Result<NamedCursor, CursorError>>;

    /// At most `limit` cursors of a log after `after`, by name, as far as they are on the device.
    ///
    /// # Errors
    /// If there is no such log.
    fn list_cursors(
        &self,
        log: LogTarget,
        after: Option<String>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<NamedCursor>, CursorError>>;

    /// At most `limit` producers of a log after `after`, in the byte order of their ids. Everything that the
    /// answer shows is flushed to the device before it resolves.
    ///
    /// # Errors
    /// If there is no such log, or the journal has failed.
    fn list_producers(
        &self,
        log: LogTarget,
        after: Option<String>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<ProducerInfo>, ReadError>>;

    /// Forgets a producer, durably. The log refuses its epoch from then on, so that no late retry
    /// appends a batch twice. The producer may begin again with the next epoch.
    ///
    /// # Errors
    /// If there is no such log, or the log does not know the producer.
    fn forget_producer(
        &self,
        log: LogTarget,
        producer: Name,
    ) -> BoxFuture<'_, Result<(), AdminError>>;
}

/// Describes, checks, saves and ends an engine.
pub trait Operate: Send + Sync + 'static {
    /// Kind, identity and limits of this engine.
    fn profile(&self) -> Profile;

    /// Numbers for metrics.
    fn statistics(&self) -> Statistics;

    /// Replaces the quotas of all tenants, and returns them with their present use. A request that would exceed one
    /// is refused from then on. Existing logs, producers and cursors stay usable, and records stay, even above a
    /// limit. A log belongs to the quota whose prefix its name begins with.
    ///
    /// # Errors
    /// If one prefix begins with another, or there are too many. The quotas before stay in force.
    fn set_quotas(&self, quotas: Vec<Quota>) -> BoxFuture<'_, Result<Vec<QuotaUse>, QuotaError>>;

    /// Sorted runs and segment files, oldest first, without their contents.
    fn segments(&self) -> Vec<SegmentInfo>;

    /// At most `limit` sorted runs and segment files that end behind `after`, oldest first, with their
    /// contents. Reads indexes that were not read yet.
    fn describe_segments(
        &self,
        after: Option<Position>,
        limit: usize,
    ) -> BoxFuture<'_, Vec<SegmentInfo>>;

    /// Begins a backup. Makes everything accepted before durable and puts it in finished files. The files
    /// that the backup lists are not removed before the backup is dropped. Files whose digest is in `known`
    /// are listed without content.
    ///
    /// # Errors
    /// If 4 backups run, or the journal has failed.
    fn backup(
        &self,
        known: HashSet<ContentDigest>,
    ) -> BoxFuture<'_, Result<Box<dyn Backup>, BackupError>>;

    /// Checks all stored data, or one segment, during normal work. Reads at most `max_bytes_per_second` bytes
    /// per second (0: no bound). The engine takes note of damage at once.
    ///
    /// # Errors
    /// If there is no such segment, or too many such checks run.
    fn verify(
        &self,
        segment: Option<u64>,
        max_bytes_per_second: u64,
    ) -> Result<Verification, VerifyError>;

    /// Promises of the device, as measured.
    fn durability_truth(&self) -> DurabilityTruth;

    /// Resolves when the journal has failed, with the reason.
    fn failed(&self) -> BoxFuture<'_, Arc<io::Error>>;

    /// Refuses new work, finishes accepted work, flushes, and marks the shutdown as clean. Following scans
    /// end.
    ///
    /// # Errors
    /// If the journal failed, if the last write or flush fails, or if the disk has no space for records that are in
    /// memory only.
    fn drain(&self) -> BoxFuture<'_, Result<(), SyncError>>;
}

/// Stores logs. Every type that implements the four traits is an engine.
pub trait LogEngine: Append + ReadLogs + Administer + Operate {}

impl<T: Append + ReadLogs + Administer + Operate> LogEngine for T {}
