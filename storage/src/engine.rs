//! The seam above: what the service knows of an engine, and nothing else.
//!
//! An engine answers an append with a [`Ticket`] at once. The ticket resolves twice:
//! *ordered* (lsns are assigned, or the request is refused) and *settled* (the level
//! asked for is reached, or it is known that it cannot be). Refused means: provably
//! nothing was written. Dropping a ticket cancels nothing.
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

use crate::config::Limits;
use crate::error::{
    AdminError, BackupError, CursorError, FenceError, ReadError, SyncError, TrimError, VerifyError,
};
use crate::ids::{LogId, LogName, Lsn, Name, Position, RecoveryEpoch, SegmentId, Timestamp};
use crate::record::{
    Batch, Cursor, CursorCommit, Durability, Gap, LogConfig, LogConfigChange, LogInfo,
    ProducerInfo, StoredBatch, Visibility,
};
pub use crate::session::Session;
pub use crate::ticket::Ticket;
use crate::verify::Verification;

/// A future without a runtime.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What kind of engine this is and what it promises.
#[derive(Debug, Clone)]
pub struct Profile {
    /// `local` or the like, for people.
    pub kind: &'static str,
    /// The strongest durability it can acknowledge.
    pub strongest: Durability,
    /// Whether positions of different logs compare.
    pub ordered_across_logs: bool,
    /// What a request may be at most.
    pub limits: Limits,
    /// Identity of the store, for ever.
    pub store_id: u128,
    /// Unclean starts so far, from 1.
    pub recovery_epoch: RecoveryEpoch,
}

/// Of the logs of a batch, of which most have one: that takes no allocation.
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
    /// Time of arrival: what records without a time of their own get, unless the log's
    /// newest record is later.
    pub arrival: Timestamp,
    /// Whether this is a repeat of a batch applied before, and the answer that one got.
    pub deduplicated: bool,
}

/// A batch that has its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ordered {
    /// One for each of the batch's logs, in the order given.
    pub appends: OneOrMore<LogAppended>,
    /// The batch's place in the journal; `None` for a batch of checks only.
    pub position: Option<Position>,
}

/// A batch that is as safe as was asked, or safer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Appended {
    /// One for each of the batch's logs, in the order given.
    pub appends: OneOrMore<LogAppended>,
    /// For each of them, the lsn below which the log is on the device.
    pub durable_lsns: OneOrMore<Lsn>,
    /// The level reached when this was answered.
    pub durability: Durability,
    /// The batch's place in the journal; `None` for a batch of checks only.
    pub position: Option<Position>,
    /// Where its time went in the engine.
    pub times: AppendTimes,
}

/// A log whose older writers are shut out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fenced {
    /// The log's identity.
    pub log_id: LogId,
    /// The tail that no older writer can pass.
    pub tail_lsn: Lsn,
    /// The epoch from now on.
    pub writer_epoch: u64,
}

/// Where the time of one append went in the engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AppendTimes {
    /// From submit until the committer took it.
    pub queue: Duration,
    /// Until its group was put together, that of others in the group included.
    pub encode: Duration,
    /// The write of its group; zero if it is in memory only.
    pub write: Duration,
    /// From written until the flush that it waited for; zero if it waited for none.
    pub flush: Duration,
}

/// How far a [`LogEngine::sync`] goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncTarget {
    /// Handed to the operating system.
    Os,
    /// Flushed to the device.
    Device,
}

/// A log by name, and by identity if the caller knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogTarget {
    /// The name.
    pub name: LogName,
    /// If given, the log must have this identity.
    pub log_id: Option<LogId>,
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
    /// The last so many records.
    TailOffset(u64),
}

/// A bounded read of one log.
#[derive(Debug, Clone)]
pub struct ReadRequest {
    /// The log.
    pub log: LogTarget,
    /// Where to begin.
    pub start: ReadStart,
    /// Most records to return, at least 1.
    pub max_records: u32,
    /// Most bytes of bodies to return; one record is returned even if it is larger.
    pub max_bytes: u32,
    /// What to see; `None` = what the log's sync mode acknowledges.
    pub visibility: Option<Visibility>,
}

/// What a read found.
#[derive(Debug, Clone)]
pub struct Page {
    /// The log's identity.
    pub log_id: LogId,
    /// Consecutive stored batches; their records are dense in lsn.
    pub batches: Vec<StoredBatch>,
    /// Where to read on.
    pub next_lsn: Lsn,
    /// The tail at the visibility asked for.
    pub tail_lsn: Lsn,
    /// All below it are on the device.
    pub durable_lsn: Lsn,
    /// The first record kept.
    pub first_lsn: Lsn,
}

/// Which logs a scan delivers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// One log.
    Log(LogTarget),
    /// All logs whose name starts so; also those created later.
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
    /// The last so many records (one log only), or with 0: from now on.
    TailOffset(u64),
    /// Exactly after the message that carried this cursor.
    Cursor(Bytes),
}

/// A range of one or more logs.
#[derive(Debug, Clone)]
pub struct ScanRequest {
    /// Which logs.
    pub selector: Selector,
    /// Where to begin.
    pub start: ScanStart,
    /// Stop before this lsn (one log only).
    pub until_lsn: Option<Lsn>,
    /// Stop after so many records; 0 = no bound.
    pub max_records: u64,
    /// Go on with records that are appended later. A scan that does not follow ends at the tail of the
    /// moment it began.
    pub follow: bool,
    /// What to see; `None` = what the sync mode acknowledges.
    pub visibility: Option<Visibility>,
    /// About how many bytes of bodies a chunk should carry.
    pub chunk_bytes: u32,
}

/// One step of a scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanChunk {
    /// Records that are missing before the batches.
    pub gaps: Vec<Gap>,
    /// Records, per log in lsn order, over logs in commit order.
    pub batches: Vec<StoredBatch>,
    /// Whether the end is reached: of a scan that follows, the tail when this chunk was made, of
    /// a plain scan, the tail when the scan began.
    pub caught_up: bool,
    /// Resumes exactly after this chunk.
    pub cursor: Bytes,
    /// The tail at the visibility asked for (one log only).
    pub tail_lsn: Option<Lsn>,
    /// All below it are on the device (one log only).
    pub durable_lsn: Option<Lsn>,
}

/// Where a scan stands that follows one log without a bound. Scans that stand at the same
/// place, but for `position`, are given the same next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanPlace {
    /// The log's identity.
    pub log_id: LogId,
    /// Which of its records are given.
    pub visibility: Visibility,
    /// The next record.
    pub next: Lsn,
    /// Every record before that lies below it.
    pub position: Position,
}

/// The end of a log, as a scan that stands somewhere in it sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanEnd {
    /// Whether it stands there.
    pub caught_up: bool,
    /// The tail at the visibility of the scan.
    pub tail_lsn: Lsn,
    /// All below it are on the device.
    pub durable_lsn: Lsn,
}

/// Memory that a scan reads into. Whoever asks for the scan gives it out.
pub trait Room: Send + Sync {
    /// Resolves when the scan may read so many bytes. Bytes that it has not used count.
    fn reserve(&self, bytes: u64) -> BoxFuture<'_, ()>;

    /// The scan has found nothing to read, and waits.
    fn give_back(&self);
}

/// A scan in progress. Holds no file and no memory of records between steps.
pub trait Scan: Send {
    /// From now on the scan reserves room for each chunk before it reads it. Without that it reads
    /// whenever it is asked.
    fn read_in(&mut self, room: Arc<dyn Room>);

    /// The next chunk; waits for data when following; `None` at the end. Dropping the
    /// future before it is done loses nothing: the next call gives the same chunk.
    fn next(&mut self) -> BoxFuture<'_, Result<Option<ScanChunk>, ReadError>>;

    /// The cursor that resumes after the last chunk delivered.
    fn cursor(&self) -> Bytes;

    /// How many scans follow the same log, or the same prefix, this one included; 0 before it
    /// has reached the end for the first time.
    fn followers(&self) -> usize;

    /// Where it stands; `None` if it does not follow one log, has not begun, or ends somewhere.
    fn place(&self) -> Option<ScanPlace>;

    /// Goes on at a place where a scan of the same log was or is: what lies between was given
    /// by somebody else, or is to be given again. Tells the end as it is now; `None`, and it
    /// stays where it is, if that is not its log, or what lies between is not to be given any
    /// more.
    fn go_on_at(&mut self, place: &ScanPlace) -> Option<ScanEnd>;
}

/// Tail and durability of one log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogStat {
    /// The log.
    pub info: LogInfo,
    /// Where what was written in the recovery epoch asked for stopped surviving:
    /// an ack of it survived if and only if its position is below. `None` if nothing
    /// of that epoch was lost, because it is the current one.
    pub survived_position: Option<Position>,
}

/// One file of a backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackupFile {
    /// Its path below the data directory, with `/` between the parts.
    pub path: String,
    /// Bytes of it that the backup holds: those of a segment up to the end of its frames.
    pub bytes: u64,
    /// XXH3-128 of these.
    pub digest: u128,
    /// The caller holds it: its content is not sent.
    pub known: bool,
}

/// Something that does not verify in what a backup holds.
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

/// What a backup consists of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackupManifest {
    /// Identity of the store.
    pub store_id: u128,
    /// Its recovery epoch.
    pub recovery_epoch: RecoveryEpoch,
    /// Everything in the journal below this is in the backup.
    pub position: Position,
    /// When the backup began.
    pub created: Timestamp,
    /// The files.
    pub files: Vec<BackupFile>,
    /// What does not verify. It is saved as it is.
    pub damage: Vec<BackupDamage>,
}

/// One step of a backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackupPart {
    /// So many bytes were read and verified; nothing is to be sent.
    Read(u64),
    /// What the backup consists of: once, before any content.
    Manifest(Arc<BackupManifest>),
    /// Content of a file, by its index in the manifest.
    Chunk {
        /// Index of the file.
        file: usize,
        /// Where in it this begins.
        offset: u64,
        /// The content.
        data: Bytes,
    },
}

/// A backup in progress.
pub trait Backup: Send {
    /// The next step; `None` at the end. Each reads half a megabyte at most, so that whoever asks
    /// decides how fast it goes. A future that is dropped before it is done ends the backup.
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
    /// The most logs.
    pub max_logs: u64,
    /// The most producers of all logs.
    pub max_producers: u64,
    /// The most producers of one log.
    pub max_producers_per_log: u64,
    /// The most cursors of all logs.
    pub max_cursors: u64,
    /// The most bytes of names.
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
    /// How many of these were closed to make room for others.
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
    /// Places of the journal where something is lost that nothing attributes to a log.
    pub unattributed_damages: u64,
    /// Bytes of files that the device could not read since the start.
    pub unreadable_bytes: u64,
    /// Whether the last index or checkpoint could not be written.
    pub indexing_failed: bool,
    /// Why checkpoints, sorting and the return of space are held back, in sentences. Empty:
    /// nothing is.
    pub held_back: Vec<String>,
    /// Bytes read by scrubbing since the start.
    pub scrubbed_bytes: u64,
    /// When scrubbing last came through all that was sealed; `None` if it has not yet.
    pub last_scrub: Option<Timestamp>,
    /// Logs with records that go past a bound of retention and that only cursors keep.
    pub held_logs: u64,
    /// Bytes of these records.
    pub held_bytes: u64,
    /// Age of the oldest of them.
    pub held_age: Duration,
    /// When the last whole backup ended, also before this start; `None` if none is known.
    pub last_backup: Option<Timestamp>,
    /// How far the expiry clock is behind the system's, in microseconds; below 0: ahead.
    pub expiry_lag_micros: i64,
    /// Jumps of the system's clock ahead since the start.
    pub clock_jumps_ahead: u64,
    /// Jumps of the system's clock back since the start.
    pub clock_jumps_back: u64,
    /// Size of the last jump in microseconds; below 0: back. 0: none since the start.
    pub last_clock_jump_micros: i64,
    /// Sorted runs. What they stand for is in no segment of the journal.
    pub sorted_runs: u64,
    /// Bytes of their files.
    pub sorted_bytes: u64,
    /// Bytes that the sorter read since the start.
    pub sorter_read_bytes: u64,
    /// Bytes that it wrote.
    pub sorter_written_bytes: u64,
    /// Bytes of files that went by sorting, less those of the runs that took their place.
    pub sorter_freed_bytes: u64,
    /// Bytes in sorted runs that hold records that are kept, by the last look at all of them.
    pub sorted_live_bytes: u64,
    /// Likewise, those that do not and can come back.
    pub sorted_dead_bytes: u64,
    /// Bytes of sealed segments that are not sorted yet.
    pub unsorted_bytes: u64,
    /// So many of them are sorted in one go; 0: nothing is sorted.
    pub sorter_part_bytes: u64,
    /// Bytes that were written to the archive since the start.
    pub archive_written_bytes: u64,
    /// How often something failed there.
    pub archive_failures: u64,
    /// Why nothing can be archived now, and so nothing is dropped; `None` if it can.
    pub archive_failing: Option<String>,
    /// Scans that are waiting for data.
    pub followers: u64,
    /// Whether the journal has failed.
    pub journal_failed: bool,
}

/// One segment file, or sorted run, for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Its number.
    pub id: u64,
    /// Position of its first byte; of a sorted run, of that of the segments it stands for.
    pub base: Position,
    /// Size of the file.
    pub bytes: u64,
    /// Where its frames end so far; of a sorted run, those of the segments it stands for.
    pub end: Position,
    /// Whether it is finished.
    pub sealed: bool,
    /// Whether frames in it cannot be read.
    pub damaged: bool,
    /// The first and the last segment that it stands for, if it is a sorted run.
    pub sorted: Option<(u64, u64)>,
    /// What its index tells; `None` while it has none, or where that was not looked up.
    pub contents: Option<SegmentContents>,
}

/// What a finished segment or sorted run holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentContents {
    /// Records that can be read or could be, trimmed ones included.
    pub records: u64,
    /// Logs that have anything in it, be it a trim.
    pub logs: u64,
    /// When the journal went on in the next segment; `None` if there is none yet, and of a
    /// sorted run.
    pub left: Option<Timestamp>,
    /// Bytes in a sorted run that hold a record that is kept, by now at least; `None` of a
    /// segment, where nobody counts them.
    pub live_bytes: Option<u64>,
}

/// What the device and its file system really promise, measured at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DurabilityTruth {
    /// Name of the file system under the data directory.
    pub file_system: String,
    /// The call that flushes, for example `fdatasync`.
    pub sync_primitive: &'static str,
    /// Median of the flushes measured at start.
    pub flush_p50: Duration,
    /// Slowest of 100.
    pub flush_p99: Duration,
    /// Memory that a power cut or reboot empties, whatever is flushed.
    pub volatile: bool,
    /// Caveats of the device and its file system now, in sentences.
    pub caveats: Vec<String>,
}

/// Keeps logs. See the module for the ticket's contract.
pub trait LogEngine: Send + Sync + 'static {
    /// What kind of engine this is and what it promises.
    fn profile(&self) -> Profile;

    /// Takes a batch in. `durability` `None` = what the logs' sync modes say. Batches of one
    /// `session` are applied in the order of the calls, and none after one that is refused.
    fn submit(
        &self,
        session: Option<&Session>,
        batch: Batch,
        durability: Option<Durability>,
    ) -> Ticket;

    /// The same for a caller that takes in more before it waits, and then calls
    /// [`LogEngine::write_gathered`]: until then, perhaps, nobody writes what waits for no flush.
    fn gather(
        &self,
        session: Option<&Session>,
        batch: Batch,
        durability: Option<Durability>,
    ) -> Ticket;

    /// Puts `next` behind `batch`, so that they are submitted as one, if nobody can tell: both are
    /// nothing but records of one log, neither is wrong by itself, and what is asked of the log
    /// before `next` follows from what is asked before `batch`. Both must be of one session, in this
    /// order, and ask for one durability. They are applied together or not at all; what they are
    /// refused for is the first one's.
    ///
    /// # Errors
    /// Gives `next` back where that is not so.
    fn join(&self, batch: &mut Batch, next: Batch) -> Result<(), Batch>;

    /// Writes on this thread what was gathered by anyone, unless that could take long, which
    /// then other threads do: it may be called where nothing may block.
    fn write_gathered(&self);

    /// Makes everything accepted before it as safe as `target` says; answers the
    /// position below which everything is durable.
    fn sync(
        &self,
        target: SyncTarget,
        log: Option<&LogName>,
    ) -> BoxFuture<'_, Result<Position, SyncError>>;

    /// One page of one log.
    fn read(&self, request: ReadRequest) -> BoxFuture<'_, Result<Page, ReadError>>;

    /// Resolves when the log's tail at the visibility is beyond `lsn`, or at once with
    /// the reason why that will not come.
    fn tail_beyond(
        &self,
        log: LogTarget,
        lsn: Lsn,
        visibility: Option<Visibility>,
    ) -> BoxFuture<'_, Result<(), ReadError>>;

    /// Begins a scan.
    ///
    /// # Errors
    /// If the start does not go with the selection, or names what is not there. A
    /// following scan of an unknown log is not an error: it waits for the log.
    fn scan(&self, request: ScanRequest) -> Result<Box<dyn Scan>, ReadError>;

    /// Tail and durability of one log.
    ///
    /// # Errors
    /// If there is no such log.
    fn stat(
        &self,
        log: LogTarget,
        visibility: Option<Visibility>,
        of_epoch: Option<RecoveryEpoch>,
    ) -> Result<LogStat, ReadError>;

    /// Creates a log, durably.
    fn create_log(
        &self,
        name: LogName,
        config: LogConfig,
    ) -> BoxFuture<'_, Result<LogInfo, AdminError>>;

    /// Changes some of a log's settings, durably. What it does not change stays as those
    /// before it left it, also where several come at a time.
    fn update_log(
        &self,
        name: LogName,
        change: LogConfigChange,
    ) -> BoxFuture<'_, Result<LogInfo, AdminError>>;

    /// Deletes a log and all its records, durably.
    fn delete_log(&self, log: LogTarget) -> BoxFuture<'_, Result<(), AdminError>>;

    /// Forgets the records below `before`, durably; answers the first lsn kept. Below
    /// what is forgotten already it changes nothing.
    fn trim(&self, log: LogTarget, before: Lsn) -> BoxFuture<'_, Result<Lsn, TrimError>>;

    /// Raises a log's writer epoch, durably: by one, or to `epoch`, which must exceed it.
    /// Creates the log if there is none (and `auto_create` is on).
    fn fence(
        &self,
        log: LogTarget,
        epoch: Option<u64>,
    ) -> BoxFuture<'_, Result<Fenced, FenceError>>;

    /// Moves a cursor, or makes it, durably.
    fn commit_cursor(&self, commit: CursorCommit) -> BoxFuture<'_, Result<Cursor, CursorError>>;

    /// Forgets a cursor, durably.
    fn delete_cursor(&self, log: LogTarget, cursor: Name)
    -> BoxFuture<'_, Result<(), CursorError>>;

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

    /// Up to `limit` producers of a log, in the byte order of their ids, those after `after` only.
    /// Everything that the answer shows is flushed to the device before it resolves.
    ///
    /// # Errors
    /// If there is no such log, or the journal has failed.
    fn list_producers(
        &self,
        log: LogTarget,
        after: Option<String>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<ProducerInfo>, ReadError>>;

    /// Where a cursor stands, as far as that is on the device.
    ///
    /// # Errors
    /// If there is no such log, or no such cursor.
    fn cursor(&self, log: LogTarget, cursor: &Name) -> Result<Cursor, CursorError>;

    /// Up to `limit` cursors of a log, by name, those after `after` only, as far as they are
    /// on the device.
    ///
    /// # Errors
    /// If there is no such log.
    fn list_cursors(
        &self,
        log: LogTarget,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<Cursor>, CursorError>;

    /// Up to `limit` logs whose names start with `prefix`, in name order, those after
    /// `after` only.
    fn list_logs(&self, prefix: &str, after: Option<&str>, limit: usize) -> Vec<LogInfo>;

    /// Numbers for metrics.
    fn statistics(&self) -> Statistics;

    /// Sorted runs and segment files, oldest first, without their contents.
    fn segments(&self) -> Vec<SegmentInfo>;

    /// Begins a backup: everything accepted before it is made durable and put in finished
    /// files. The files it lists are not removed before the backup is dropped. Of files whose
    /// digest is `known` only that is told.
    ///
    /// # Errors
    /// If 4 backups run, or the journal has failed.
    fn backup(&self, known: HashSet<u128>) -> BoxFuture<'_, Result<Box<dyn Backup>, BackupError>>;

    /// Up to `limit` sorted runs and segment files, oldest first, those that end behind
    /// `after` only, with their contents. Reads indexes that were not looked at yet.
    fn describe_segments(
        &self,
        after: Option<Position>,
        limit: usize,
    ) -> BoxFuture<'_, Vec<SegmentInfo>>;

    /// Checks all that is stored, or one segment, beside normal work, reading at most so
    /// many bytes a second (0: no bound). What is found is known to the engine at once.
    ///
    /// # Errors
    /// If there is no such segment, or too many such checks run.
    fn verify(
        &self,
        segment: Option<u64>,
        max_bytes_per_second: u64,
    ) -> Result<Verification, VerifyError>;

    /// What the device really promises.
    fn durability_truth(&self) -> DurabilityTruth;

    /// Resolves when the journal has failed, with the reason.
    fn failed(&self) -> BoxFuture<'_, Arc<io::Error>>;

    /// Refuses new work, finishes what was accepted, flushes, marks the shutdown as
    /// clean. Following scans end.
    fn drain(&self) -> BoxFuture<'_, Result<(), SyncError>>;
}
