//! Settings of the engine: one table. Names end in their unit; everything is checked once, at
//! open, and immutable after.

use std::time::Duration;

use crate::api::cipher::Cipher;
use crate::api::error::InvalidBatch;
use crate::api::record::{Retention, SyncMode};
use crate::api::replica::{MAX_REPLICA_LAG, ReplicaBounds};

/// Minimum space for sorting, in segments.
const LEAST_STEP: u64 = 4;

/// Maximum bytes of a run that is large because descriptions of logs take much space. Making a run takes 24
/// bytes of memory for each batch in it, and 200 for each log.
const LARGEST_FOR_LOGS: u64 = 1 << 30;

/// With the images of its logs a run stays below 4 GiB: file offsets in it are kept in 32 bits.
pub(crate) const LARGEST_RUN: u64 = 3 << 30;

/// Maximum number of files that one run is made of. Each log is searched for in each of them.
pub(crate) const MOST_SOURCES: u64 = 128;

/// Reaction of a start to damage below the proven end of the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnDamage {
    /// Quarantine exactly the damaged records and serve everything else. Default.
    Quarantine,
    /// Do not start.
    Refuse,
}

/// How finished segments are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadStrategy {
    /// By positional reads. Default.
    Pread,
    /// By maps. Each read has its pages brought in first, so that a sector that cannot be read is
    /// an error. Only a device that fails between these two steps ends the process (SIGBUS).
    Mmap,
}

/// Number of bytes, in the table of settings.
type Size = u64;

/// The settings of the engine. Each row has text for users, name, type, default, and the value
/// that is refused.
///
/// `engine_settings! { with MORE }` calls the macro `with` with MORE and the rows. This file
/// makes [`StorageConfig`] of them; a server makes keys of a file or options. A `Size` is a
/// number of bytes, for which each caller has a type of its own.
#[macro_export]
macro_rules! engine_settings {
    ($with:ident $($more:tt)*) => {
        $with! {
            $($more)*
            /// Whether a data directory without a store gets a new store. false: the start is refused
            /// (exit code 65), because the volume may not be mounted. Set false after the first start.
            create_store: bool = true;
            /// Durability of an append that names none, in logs without a mode of their own. strict:
            /// acknowledged after a flush, so a power cut loses nothing. batch: after a flush for
            /// AppendBatch, after a write for Append. interval: after a write, flushed within
            /// sync_interval. async: after a write, flushed when the kernel chooses. manual: once in
            /// memory, so a crash of the process loses every append since the last Sync. replicated: once
            /// the bucket of the replica has it too, so the loss of the machine loses nothing.
            sync_mode: SyncMode = SyncMode::Strict;
            /// Maximum time that written data stays unflushed if no caller asks for a flush, in all
            /// modes but async and manual. Bounds the loss of a power cut.
            sync_interval: Duration = Duration::from_millis(100), != Duration::ZERO;
            /// Maximum unflushed bytes before a flush is forced, in all modes but async and manual. At
            /// least 1.
            sync_bytes: Size = 16 << 20, != 0;
            /// Maximum bytes that all logs in mode manual hold in memory together. When they are full,
            /// all of them are written.
            buffer_bytes: Size = 8 << 20;
            /// Idle time after which the journal writes a marker, which proves that its newest records
            /// are durable.
            marker_delay: Duration = Duration::from_millis(50);
            /// Size of every new segment file: a multiple of 4KiB, at least 64KiB. An empty store takes
            /// 1 + pool_segments + reserve_segments of them.
            segment_bytes: Size = 16 << 20;
            /// Number of segments kept ready for the next roll. At least 1. Each takes segment_bytes.
            pool_segments: usize = 2, != 0;
            /// Number of further segments kept ready, which records never use. At least 1. On a full
            /// disk, trims and deletions continue in them, and a restart begins in one.
            reserve_segments: usize = 2, != 0;
            /// Maximum size of a record, data and headers together. At most max_batch_bytes, which
            /// lowers the default.
            max_record_bytes: Size = 1 << 20, != 0;
            /// Maximum size of a request over all its logs, in encoded bytes. At most 63MiB, and at
            /// most the room in half a segment, which lowers the default. The transport accepts twice
            /// this size, so that the server can answer a larger request with REQUEST_TOO_LARGE and its
            /// size.
            max_batch_bytes: Size = 4 << 20, != 0;
            /// Maximum number of records in one request, over all its logs.
            max_batch_records: u32 = 1000, != 0;
            /// Maximum bytes of appends in flight. New appends beyond it are answered BUSY. Bounds
            /// memory, and the wait for an ack. One connection may use as much as is still free for
            /// others, so at most half if it is alone: no connection can keep the others out.
            max_inflight_bytes: Size = 32 << 20, != 0;
            /// Number of newest batches of each producer whose repeats get the original answer. At
            /// least 1. Repeats of older batches are refused. Memory: about 40 bytes each.
            producer_window: u64 = 1024, != 0;
            /// Time after which an idle producer is forgotten (0 = never). A log then refuses the
            /// producer's epoch (PRODUCER_EXPIRED), so that no late retry is appended twice. The producer
            /// may begin again with the next epoch.
            producer_max_idle: Duration = Duration::from_secs(7 * 24 * 3600);
            /// Maximum number of producers of one log; at least 1. New ones beyond that are answered
            /// QUOTA. Idle ones are forgotten after producer_max_idle.
            max_producers_per_log: u64 = 10_000, != 0;
            /// Maximum number of cursors of one log; at least 1. New ones beyond that are answered
            /// QUOTA.
            max_cursors_per_log: u64 = 10_000, != 0;
            /// Maximum number of logs in the store; at least 1. New ones beyond that are answered
            /// QUOTA. A deleted log no longer counts, but at most 1/4 of this number and 1,024 more
            /// deleted logs may wait for the sorter. Memory: about 350 bytes a log, and its name.
            max_logs: u64 = 1_000_000, != 0;
            /// Maximum number of producers of all logs; at least 1. New ones beyond that are answered
            /// QUOTA. A producer that appends to two logs counts twice. Memory: about 450 bytes a
            /// producer, its id, and 40 bytes for each batch that producer_window remembers.
            max_producers: u64 = 100_000, != 0;
            /// Maximum number of cursors of all logs; at least 1. New ones beyond that are answered
            /// QUOTA. Memory: about 350 bytes a cursor, and its name.
            max_cursors: u64 = 100_000, != 0;
            /// Maximum size of the names of all logs, producers and cursors; at least 1. A request that
            /// needs a new name beyond it is answered QUOTA.
            max_name_bytes: Size = 64 << 20, != 0;
            /// Whether names of new logs, producers and cursors may have characters that people do not
            /// see: zero-width ones, bidirectional controls, blanks other than the plain space. false: such
            /// a name is refused (INVALID_LOG_NAME). Existing names stay usable.
            allow_invisible_names: bool = false;
            /// Maximum time by which a record's own timestamp may be ahead of the server's clock.
            max_timestamp_ahead: Duration = Duration::from_secs(60);
            /// Whether the first append to an unknown name creates the log.
            auto_create: bool = true;
            /// Reaction of a start to damage that it finds. quarantine: names the damaged records and serves
            /// everything else; refuse: does not start (exit code 65). A start finds missing
            /// and shortened files, and damaged frames that no index covers: mostly the newest. It does not read
            /// older records. Run `wald verify` before the start to check all of them.
            on_damage: OnDamage = OnDamage::Quarantine;
            /// Method of reading finished segments. pread: positional reads. mmap: memory maps. A read
            /// from a map first brings its pages in, so that an unreadable sector is an error. Only a
            /// device that fails between these two steps ends the process (SIGBUS).
            read_strategy: ReadStrategy = ReadStrategy::Pread;
            /// Maximum number of finished segments that are open, scans included; at least 1. Lowered at
            /// start, to 16 at least, where the limit of open files has no room for them.
            max_open_segments: usize = 256, != 0;
            /// Number of threads for reads that may wait for the disk. At least 1.
            reader_threads: usize = 4, != 0;
            /// Maximum bytes of sealed segments that scrubbing reads in a second (0 = no scrubbing). It
            /// finds data that the device has lost while a backup still has it. The default is little
            /// for any device and covers 337 GiB a day. Appends go first.
            scrub_bytes_per_second: Size = 4 << 20;
            /// Minimum time from the beginning of one scrubbing pass to the beginning of the next. The
            /// first pass begins with the start.
            scrub_interval: Duration = Duration::from_secs(24 * 3600);
            /// Default maximum age (0 = no limit). Logs without their own retention drop batches that
            /// arrived longer ago. The age follows a clock that adopts jumps of the system's clock
            /// slowly: back after 10 minutes, ahead at most twice as fast as time passes.
            retention_max_age: Duration = Duration::ZERO;
            /// Default maximum size in segments (0 = no limit). Logs without their own retention drop
            /// older batches once the newest ones reach it, so up to one batch more is kept.
            retention_max_bytes: Size = 0;
            /// Default maximum number of records (0 = no limit). Logs without their own retention drop
            /// the oldest records beyond it.
            retention_max_records: u64 = 0;
            /// Maximum size of the records of one log that only its cursors keep from retention (0 = no
            /// bound). Beyond it the oldest are dropped, although a cursor has not passed them: its consumer
            /// gets a gap (EXPIRED). Concerns logs with respect_cursors.
            cursor_hold_bytes: Size = 0;
            /// Pause between two retention passes (> 0). Records may outlive their bound by this long.
            retention_interval: Duration = Duration::from_secs(10), != Duration::ZERO;
            /// Whether sealed segments are sorted by log. Only sorting gives the space of trimmed and
            /// deleted records back. Versions that do not know sorting refuse a store that was sorted
            /// once.
            sorter_enabled: bool = true;
            /// Maximum disk space that sorting takes beyond 1.3 times the kept records: for segments
            /// that wait, and for a new run while the files it replaces still exist. Less than 4 segments
            /// counts as 4 segments.
            sorter_step_bytes: Size = 512 << 20;
            /// Maximum bytes that the sorter reads and writes in a second (0 = no bound). Appends go
            /// first.
            sorter_bytes_per_second: Size = 0;
        }
    };
}

macro_rules! storage_config {
    ($( $(#[doc = $doc:literal])+ $name:ident: $type:ty = $default:expr $(, != $refused:expr)?; )+) => {
        /// Settings of one engine.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct StorageConfig {
            $( $(#[doc = $doc])+ pub $name: $type, )+
            /// Bounds of the replica; `None`: there is none. The caller ships the journal.
            pub replica: Option<ReplicaBounds>,
            /// The keys that encrypt records. `None`: records are stored plain.
            pub cipher: Option<Cipher>,
        }

        impl Default for StorageConfig {
            fn default() -> Self {
                Self { $( $name: $default, )+ replica: None, cipher: None }
            }
        }

        impl StorageConfig {
            /// The first setting that has the value which its row refuses.
            fn refused(&self) -> Option<&'static str> {
                $( $( if self.$name == $refused {
                    return Some(stringify!($name));
                } )? )+
                None
            }
        }
    };
}

engine_settings!(storage_config);

/// Why a configuration cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A segment must hold its own bookkeeping, and a request must fit into half of it.
    #[error("segment_bytes is {0}; the least is {MIN_SEGMENT_BYTES} (64 KiB)")]
    SegmentTooSmall(u64),
    /// A sorted run of one segment stays below 4 GiB.
    #[error("segment_bytes is {0}; the most is 3221225472 (3 GiB)")]
    SegmentTooLarge(u64),
    /// Frames are aligned to 8 bytes, and so are segments.
    #[error("segment_bytes is {0}; it must be a multiple of 4096")]
    SegmentUnaligned(u64),
    /// Appends of this mode wait for a replica.
    #[error("sync_mode is replicated, which needs a replica; there is none")]
    NoReplica,
    /// The positions of the next owner must pass every position that was not replicated.
    #[error("replica_max_lag is {0}; the most is 1073741824 (1 GiB)")]
    ReplicaLag(u64),
    /// A setting that must not be zero is zero.
    #[error("{0} must be more than 0")]
    Zero(&'static str),
}

impl StorageConfig {
    /// Checks bounds.
    ///
    /// # Errors
    /// Names the first setting that is out of bounds, and the bound.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.segment_bytes < MIN_SEGMENT_BYTES {
            return Err(ConfigError::SegmentTooSmall(self.segment_bytes));
        }
        if self.segment_bytes > LARGEST_RUN {
            return Err(ConfigError::SegmentTooLarge(self.segment_bytes));
        }
        if !self.segment_bytes.is_multiple_of(4096) {
            return Err(ConfigError::SegmentUnaligned(self.segment_bytes));
        }
        match self.replica {
            None if self.sync_mode == SyncMode::Replicated => return Err(ConfigError::NoReplica),
            Some(ReplicaBounds { max_lag }) if max_lag > MAX_REPLICA_LAG => {
                return Err(ConfigError::ReplicaLag(max_lag));
            }
            None | Some(_) => {}
        }
        self.refused()
            .map_or(Ok(()), |name| Err(ConfigError::Zero(name)))
    }

    /// Retention of logs that have none of their own.
    pub fn retention(&self) -> Retention {
        Retention {
            max_age: Some(self.retention_max_age).filter(|age| !age.is_zero()),
            max_bytes: Some(self.retention_max_bytes).filter(|bytes| *bytes != 0),
            max_records: Some(self.retention_max_records).filter(|records| *records != 0),
            respect_cursors: false,
        }
    }

    /// Bounds on the totals of all logs together.
    pub(crate) fn bounds(&self) -> Bounds {
        Bounds {
            logs: self.max_logs,
            producers: self.max_producers,
            cursors: self.max_cursors,
            name_bytes: self.max_name_bytes,
            allow_invisible_names: self.allow_invisible_names,
        }
    }

    /// Maximum number of file descriptors that the store has open, without the finished segments that
    /// `max_open_segments` bounds.
    pub fn descriptors(&self, archives: bool) -> u64 {
        // One each: LOCK, the segment that is written, one that is made ready, its directory, one
        // whose name waits for its flush, one made of the reserve. Two segments that were just left.
        const JOURNAL: u64 = 8;
        // The directories of the store, which stay open.
        const DIRECTORIES: u64 = 8;
        // An index or a checkpoint, and its directory.
        const INDEXER: u64 = 2;
        // A run, its index, its directory, a source that is read, the index of one; retention: 2.
        const SORTER: u64 = 5 + 2;
        // Scrubbing and four verifications: through the cache, past it, an index.
        const CHECKS: u64 = 3 * 5;
        // Four backups: the file that is saved, through the cache and past it.
        const BACKUP: u64 = 4 * 2;
        // Its LOCK, a file, its directory.
        const ARCHIVE: u64 = 3;
        // A segment that was closed for others meanwhile, one that is opened, an index.
        const READER: u64 = 3;
        JOURNAL
            + DIRECTORIES
            + INDEXER
            + SORTER
            + CHECKS
            + BACKUP
            + if archives { ARCHIVE } else { 0 }
            + self.pool_segments as u64
            + self.reserve_segments as u64
            + READER * self.reader_threads as u64
    }

    fn sorter_step(&self) -> u64 {
        self.sorter_step_bytes
            .max(self.segment_bytes.saturating_mul(LEAST_STEP))
    }

    /// Maximum bytes of segments that one run is made of.
    pub(crate) fn sorter_backlog(&self) -> u64 {
        (self.sorter_step() / 8)
            .min(LARGEST_RUN)
            .min(self.segment_bytes.saturating_mul(MOST_SOURCES))
            .max(self.segment_bytes)
    }

    /// Maximum bytes of a run that is made of others, in a store with `live` bytes of records. Each run
    /// describes its logs once, so larger runs save space where descriptions take much. Then `described` is
    /// the bytes of all runs and of their indexes; otherwise it is 0.
    pub(crate) fn sorter_run(&self, live: u64, described: u64) -> u64 {
        let plain = (self.sorter_step() / 4).max(live / 10);
        let larger = described.min(LARGEST_FOR_LOGS);
        plain.max(larger).min(LARGEST_RUN)
    }

    /// Maximum bytes of a run made of the oldest runs, if this forgets many deleted logs.
    pub(crate) fn sorter_forgetting_run(&self, live: u64) -> u64 {
        (self.sorter_step() / 2).max(live / 10).min(LARGEST_RUN)
    }

    /// Maximum bytes of the body of a frame: a request, and all that a log may have in memory.
    pub(crate) fn largest_body(&self) -> u32 {
        let request = u64::from(self.limits().max_batch_bytes);
        let unit = crate::base::bounds::largest_unit(self.segment_bytes);
        let body = request.saturating_add(self.buffer_bytes).min(unit);
        u32::try_from(body).unwrap_or(u32::MAX)
    }

    /// Maximum bytes of a batch that segments of this size have room for.
    pub fn largest_batch(&self) -> u64 {
        // Frames take some bytes, too.
        crate::base::bounds::largest_unit(self.segment_bytes).saturating_sub(4096)
    }

    /// Limits of requests, lowered where the segment size leaves less room.
    pub fn limits(&self) -> Limits {
        let narrow = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
        let max_batch_bytes = self.max_batch_bytes.min(self.largest_batch());
        Limits {
            max_record_bytes: narrow(self.max_record_bytes.min(max_batch_bytes)),
            max_batch_bytes: narrow(max_batch_bytes),
            max_batch_records: self.max_batch_records,
            max_headers: 32,
            max_header_bytes: 16 << 10,
            max_inflight_bytes: self.max_inflight_bytes,
        }
    }
}

/// Limits of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Data and headers of one record, bytes.
    pub max_record_bytes: u32,
    /// Encoded records of one request, over all its logs, bytes.
    pub max_batch_bytes: u32,
    /// Records of one request, over all its logs.
    pub max_batch_records: u32,
    /// Headers of one record.
    pub max_headers: u32,
    /// Keys and values of one record's headers, bytes.
    pub max_header_bytes: u32,
    /// Appends in flight, bytes.
    pub max_inflight_bytes: u64,
}

impl Limits {
    /// Whether a request may have `count` parts of a kind: at most as many as records.
    ///
    /// # Errors
    /// [`InvalidBatch::TooMany`], with the kind `what`.
    pub fn check_number(&self, what: &'static str, count: usize) -> Result<(), InvalidBatch> {
        let (count, limit) = (count as u64, u64::from(self.max_batch_records));
        match count <= limit {
            true => Ok(()),
            false => Err(InvalidBatch::TooMany { what, count, limit }),
        }
    }
}

/// Minimum size of a segment file, in bytes.
pub const MIN_SEGMENT_BYTES: u64 = 64 << 10;

/// Maximum totals of all logs together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) logs: u64,
    pub(crate) producers: u64,
    pub(crate) cursors: u64,
    /// Bytes of the names of logs, producers and cursors, as UTF-8.
    pub(crate) name_bytes: u64,
    /// Whether new names may have characters that people do not see.
    pub(crate) allow_invisible_names: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_stays_below_4_gib_whatever_the_settings() {
        for segment_bytes in [MIN_SEGMENT_BYTES, 16 << 20, 512 << 20, LARGEST_RUN] {
            for sorter_step_bytes in [0, 1 << 29, 32 << 30, 48 << 30, 1 << 50, u64::MAX] {
                let config = StorageConfig {
                    segment_bytes,
                    sorter_step_bytes,
                    ..StorageConfig::default()
                };
                config.check().unwrap();
                let part = config.sorter_backlog();
                assert!(part >= segment_bytes && part <= LARGEST_RUN, "{part}");
                assert!(part / segment_bytes <= MOST_SOURCES, "{part}");
                assert!(config.sorter_run(u64::MAX, u64::MAX) <= LARGEST_RUN);
                assert!(config.sorter_forgetting_run(u64::MAX) <= LARGEST_RUN);
            }
        }
        let larger = StorageConfig {
            segment_bytes: LARGEST_RUN + 4096,
            ..StorageConfig::default()
        };
        assert!(larger.check().is_err());
    }
}
