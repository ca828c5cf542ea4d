//! The storage engine of Wald: one journal, many logs.
//!
//! `README.md` beside this crate is its design: the format to the byte, the commit
//! protocol, recovery, the fault model, and the decisions behind them.

mod clock;
mod config;
mod engine;
mod error;
mod ids;
mod journal;
mod metrics;
mod record;
mod ticket;

pub use clock::{Clock, SystemClock};
pub use config::{ConfigError, Limits, OnDamage, StorageConfig};
pub use engine::{
    Appended, BoxFuture, DurabilityTruth, LogAppended, LogEngine, LogStat, LogTarget, Ordered,
    Page, Profile, ReadRequest, ReadStart, Scan, ScanChunk, ScanRequest, ScanStart, SegmentInfo,
    Selector, Statistics, SyncTarget, Ticket,
};
pub use error::{
    AdminError, AppendError, FailedCheck, FailedCondition, InvalidBatch, OpenError, ReadError,
    SyncError,
};
pub use ids::{
    InvalidLogName, LogId, LogName, Lsn, MAX_LOG_NAME_BYTES, Position, RecoveryEpoch, SegmentId,
    Timestamp,
};
pub use journal::MIN_SEGMENT_BYTES;
pub use metrics::{ChecksumSite, NoObserver, Observer, Phase};
pub use record::{
    Batch, Durability, Gap, GapReason, Guard, Header, LogCheck, LogConfig, LogInfo, LogRecords,
    Record, StoredBatch, Visibility,
};
pub use ticket::block_on;
