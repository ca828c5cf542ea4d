//! The storage engine of Wald: one journal, many logs.
//!
//! Three pages next to this crate are its design. `README.md` has the commit protocol, recovery,
//! sorting and faults; `FORMAT.md` every byte of a store; `DECISIONS.md` the reasons.

mod archive;
mod backup;
mod bounds;
mod checkpoint;
mod clock;
mod codec;
mod config;
mod digest;
mod directory;
mod disk;
mod dump;
mod engine;
mod error;
mod expiry_clock;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod ids;
mod index;
mod indexer;
mod journal;
mod known_bad;
mod local;
mod metrics;
mod quarantine;
mod read;
mod record;
mod records;
mod recovery;
mod repair;
mod session;
mod sorted;
mod sync;
#[cfg(test)]
mod tests;
mod threads;
mod ticket;
mod verify;
mod watch;
mod wire;
mod zeros;

pub use archive::{
    ArchiveFile, ArchiveFilter, ArchiveFinding, ArchiveListing, ArchiveRestored, ArchivedLog,
    SkippedLog, list as list_archive, restore as restore_archive,
};
pub use backup::{BackupCheck, BackupView, Restored, content_path};
pub use clock::{Clock, SystemClock};
pub use config::{ConfigError, Limits, OnDamage, ReadStrategy, StorageConfig};
pub use digest::Digest;
pub use directory::is_own_name;
pub use disk::{
    Call, CallKind, CutPoint, Disk, DiskFile, DiskLock, DiskMap, FileIdentity, FileSystem, Filter,
    Lie, Owner, RealDisk, SimDisk, Strangers, Unreadable, give_back_memory,
    keep_little_free_memory, make_directories, owner, strangers,
};
pub use dump::{
    DumpFilter, Dumped, DumpedBody, DumpedCheckpoint, DumpedEntry, DumpedFrame, DumpedLog,
    DumpedRecord, DumpedRow, DumpedRun, DumpedSegment, Enough,
};
pub use engine::{
    AppendTimes, Appended, Backup, BackupDamage, BackupFile, BackupManifest, BackupPart, BoxFuture,
    DurabilityTruth, Fenced, LogAppended, LogEngine, LogStat, LogTarget, OneOrMore, Ordered, Page,
    Profile, ReadRequest, ReadStart, Room, Scan, ScanChunk, ScanEnd, ScanPlace, ScanRequest,
    ScanStart, SegmentContents, SegmentInfo, Selector, Session, Statistics, SyncTarget, Ticket,
};
pub use error::{
    AdminError, AppendError, BackupError, Bounded, CursorError, DumpError, FailedCheck,
    FailedCondition, FenceError, FreeSpace, InvalidBatch, MAX_EPOCH_RISE, Named, OpenError,
    ReadError, RestoreError, SyncError, TrimError, VerifyError,
};
pub use expiry_clock::{expiry_clock, reset_expiry_clock};
pub use ids::{
    InvalidLogName, InvalidName, LogId, LogName, Lsn, MAX_LOG_NAME_BYTES, Name, Position,
    RecoveryEpoch, SegmentId, Timestamp, records_in_words,
};
pub use journal::MIN_SEGMENT_BYTES;
pub use local::LocalEngine;
pub use metrics::{ChecksumSite, NoObserver, Observer, Phase, RetentionPass, Worker};
pub use record::{
    Batch, Compression, Cursor, CursorCommit, Durability, Gap, GapReason, Guard, Header, LogCheck,
    LogConfig, LogConfigChange, LogInfo, LogRecords, Producer, ProducerInfo, Record, Retention,
    RetentionBounds, RetentionChange, StoredBatch, SyncMode, Visibility,
};
pub use records::Records;
pub use recovery::{RecoveryReport, RecoveryTimes};
pub use repair::{Loss, UnnamedLog, accept_loss, examine, logs};
pub use ticket::block_on;
pub use verify::{
    Control, Finding, FindingKind, Offline, OfflineReport, Progress, Severity, Verification,
};
