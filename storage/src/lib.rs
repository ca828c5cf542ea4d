//! The storage engine of Wald: one journal, many logs.
//!
//! Three pages next to this crate are its design. `README.md` has the commit protocol, recovery,
//! sorting and faults; `FORMAT.md` every byte of a store; `DECISIONS.md` the reasons.

mod api;
mod base;
mod engine;
mod format;
mod logs;
mod tools;
mod upkeep;

mod disk;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod index;
mod journal;
mod read;
mod recovery;
#[cfg(test)]
mod tests;

pub use crate::api::cipher::{
    BodyCipher, BodyKey, Cipher, LogsExist, NONCE_BYTES, TAG_BYTES, Unopened,
};
pub use crate::api::config::MIN_SEGMENT_BYTES;
pub use crate::api::config::{ConfigError, Limits, OnDamage, ReadStrategy, StorageConfig};
pub use crate::api::content::ContentDigest;
pub use crate::api::engine::{
    Administer, Append, AppendTimes, Appended, Backup, BackupDamage, BackupFile, BackupManifest,
    BackupPart, BoxFuture, DurabilityTruth, EngineKind, Fenced, LogAppended, LogEngine, LogStat,
    LogTarget, OneOrMore, Operate, Page, Profile, ReadLogs, ReadRequest, ReadStart, Room, Scan,
    ScanChunk, ScanRequest, ScanStart, SegmentContents, SegmentInfo, Selector, Session, Statistics,
    SyncTarget, Ticket,
};
pub use crate::api::error::{
    AdminError, AppendError, BackupError, Bounded, CursorError, DumpError, FailedCheck,
    FailedCondition, FenceError, FreeSpace, InvalidBatch, MAX_EPOCH_RISE, Named, OpenError,
    ReadError, RestoreError, SyncError, TargetError, TrimError, VerifyError,
};
pub use crate::api::finding::{Finding, FindingKind, Severity};
pub use crate::api::pace::{Control, VerifyProgress};
pub use crate::api::quota::{Quota, QuotaCounts, QuotaError, QuotaLimits, QuotaUse};
pub use crate::api::record::{
    Batch, Compression, CursorCommit, Durability, Gap, GapReason, Guard, Header, LogCheck,
    LogConfig, LogConfigChange, LogInfo, LogRecords, NamedCursor, Producer, ProducerInfo, Record,
    Retention, RetentionBounds, RetentionChange, StoredBatch, SyncMode, Visibility,
};
pub use crate::api::records::Records;
pub use crate::api::replica::{
    JournalPart, MAX_REPLICA_LAG, MOST_UNRELEASED, OwnerLease, Replica, ReplicaBounds,
    ReplicaProgress, ReplicaState, Unreplicated,
};
pub use crate::api::ticket::{TicketAnswer, block_on};
pub use crate::api::verification::{Reports, Verification};
pub use crate::api::watch::{Until, Watch, WatchFollower, Watched};
pub use crate::base::clock::{Clock, SystemClock};
pub use crate::base::ids::{
    InvalidLogName, InvalidName, LogId, LogName, Lsn, MAX_LOG_NAME_BYTES, Name, Position,
    RecoveryEpoch, SegmentId, Timestamp, records_in_words,
};
pub use crate::base::metrics::{
    AppendPhase, ChecksumSite, NoObserver, Observer, RetentionPass, Worker,
};
pub use crate::disk::directory::{ENCRYPTED, ENCRYPTED_NEW, KEYS, KeptTerm, is_own_name};
pub use crate::engine::LocalEngine;
pub use crate::engine::copy::{CopyReader, StoreCopy};
pub use crate::engine::expiry_clock::{expiry_clock, reset_expiry_clock};
pub use crate::engine::repair::{accept_loss, examine, logs};
pub use crate::format::digest::Digest;
pub use crate::index::drafts::UnnamedLog;
pub use crate::recovery::Loss;
pub use crate::tools::archive::list::list as list_archive;
pub use crate::tools::archive::list::{
    ArchiveFile, ArchiveFilter, ArchiveFinding, ArchiveListing, ArchivedLog,
};
pub use crate::tools::archive::restore::restore as restore_archive;
pub use crate::tools::archive::restore::{ArchiveRestored, SkippedLog};
pub use crate::tools::backup::{
    BackupCheck, BackupView, CopyTail, KeptContent, ReplicaCheck, ReplicaContent, Restored,
    RestoredAs, SetAside, clear_unfinished_take_over, content_path, open_kept, refuse_if_locked,
    refuse_if_used, remove_kept_content, set_aside,
};
pub use crate::tools::dump::{
    DumpFilter, Dumped, DumpedBody, DumpedCheckpoint, DumpedEntry, DumpedFrame, DumpedLog,
    DumpedRecord, DumpedRow, DumpedRun, DumpedSegment, Enough,
};
pub use crate::tools::verify::{Offline, OfflineReport};
pub use disk::{
    CallKind, CutPoint, Disk, DiskCall, DiskFile, DiskLock, DiskMap, FileIdentity, FileSystem,
    Filter, Lie, Owner, RealDisk, SimDisk, Strangers, Unreadable, give_back_memory,
    keep_little_free_memory, make_directories, owner, strangers,
};
pub use recovery::{RecoveryReport, RecoveryTimes};
