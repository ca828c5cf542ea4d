//! Settings of the engine. Names end in their unit; everything is checked once, at
//! open, and immutable after.

use std::time::Duration;

use crate::api::error::InvalidBatch;
use crate::api::record::{Retention, SyncMode};

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

/// Settings of one engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StorageConfig {
    /// Size of every new segment file, zeroed when it enters the pool. Default: 16 MiB. Minimum: 64 KiB. A
    /// request must fit into half a segment, so a small segment lowers [`Limits::max_batch_bytes`]. Existing
    /// segments keep their size.
    pub segment_bytes: u64,
    /// Segments kept ready for the next roll. Default: 2. Minimum: 1.
    pub pool_segments: usize,
    /// Further segments kept ready that take no records. On a full disk, trims and deletions go on in them,
    /// and a restart begins in one. Default: 2. Minimum: 1.
    pub reserve_segments: usize,
    /// The sync mode of logs that have none of their own. Default: strict.
    pub sync_mode: SyncMode,
    /// Maximum time that written data stays unflushed when no request asks for a flush, outside `async` and
    /// `manual`. Default: 100 ms. Bounds the WRITTEN acks that a power cut can take back.
    pub sync_interval: Duration,
    /// Maximum unflushed bytes before a flush is forced, outside `async` and `manual`. Default: 16 MiB.
    pub sync_bytes: u64,
    /// Maximum bytes that all logs in sync mode `manual` together hold in memory. Default: 8 MiB. A full
    /// buffer is written as a whole.
    pub buffer_bytes: u64,
    /// Idle time after which a marker frame is written, so that the newest records
    /// are proven durable in the journal itself. Default: 50 ms.
    pub marker_delay: Duration,
    /// Maximum bytes of appends in flight. Default: 32 MiB. Beyond it, new appends are refused with BUSY.
    /// Bounds memory and the wait for an ack.
    pub max_inflight_bytes: u64,
    /// Maximum bytes of a record: data and headers. Default: 1 MiB.
    pub max_record_bytes: u32,
    /// Maximum encoded bytes of a request over all its logs. Default: 4 MiB.
    pub max_batch_bytes: u32,
    /// Maximum number of records in one request. Default: 1,000.
    pub max_batch_records: u32,
    /// Maximum time that a record's own time may be ahead of the clock. Default: one minute.
    pub max_future: Duration,
    /// Number of newest batches of each producer whose repeats get the original answer. Default: 1,024.
    /// Repeats of older batches are refused. Memory: some 40 bytes each.
    pub producer_window: u64,
    /// Time after which an idle producer is forgotten, by the expiry clock. Default: 7 days; 0 =
    /// never. A late retry of a forgotten producer is refused.
    pub producer_max_idle: Duration,
    /// Maximum number of producers of one log. Default: 10,000. Further new producers are refused.
    pub max_producers_per_log: u64,
    /// Maximum number of cursors of one log. Default: 10,000.
    pub max_cursors_per_log: u64,
    /// Maximum number of logs. Default: 1,000,000. Deleted logs do not count, but logs and deleted logs that
    /// wait for the sorter are together at most 5/4 of this plus 1,024. Memory: some 350 bytes each, and the
    /// name.
    pub max_logs: u64,
    /// Maximum number of producers of all logs; a producer of two logs counts twice. Default: 100,000.
    /// Memory: some 450 bytes each with one batch, up to 40 bytes for each further batch that is remembered,
    /// and the id.
    pub max_producers: u64,
    /// Maximum number of cursors of all logs. Default: 100,000. Memory: some 350 bytes each, and the name.
    pub max_cursors: u64,
    /// Maximum bytes of the names of all logs, producers and cursors. Default: 64 MiB.
    pub max_name_bytes: u64,
    /// Whether names of new logs, producers and cursors may have invisible characters. Default:
    /// no.
    pub allow_invisible_names: bool,
    /// Whether the first append to an unknown name creates the log. Default: yes.
    pub auto_create: bool,
    /// Whether a directory without a store gets a new store. Default: yes.
    pub create_store: bool,
    /// Reaction of a start to damage. Default: quarantine.
    pub on_damage: OnDamage,
    /// How finished segments are read. Default: pread.
    pub read_strategy: ReadStrategy,
    /// Maximum number of finished segments open at a time, scans included. Default: 256. Minimum: 1.
    pub max_open_segments: usize,
    /// Number of threads for reads that may wait for the disk. Default: 4.
    pub reader_threads: usize,
    /// Bytes of sealed segments read again per second, to find data that the device has lost. Default: 4 MiB,
    /// which is 1 % of a modest SSD and covers 337 GiB in a day. 0: none.
    pub scrub_bytes_per_second: u64,
    /// Minimum time from the beginning of one such pass to the beginning of the next. Default: a day.
    pub scrub_interval: Duration,
    /// Retention of logs that have none of their own. Default: no bound.
    pub retention: Retention,
    /// Maximum bytes of one log that only its cursors keep from being forgotten. Default: 0, no bound. Beyond
    /// it the oldest records are forgotten, although a cursor has not passed them.
    pub cursor_hold_bytes: u64,
    /// Pause between two retention passes. Default: 10 s. Minimum: more than 0. Records may outlive their
    /// bound by this long.
    pub retention_interval: Duration,
    /// Whether sealed segments are sorted by log, which returns the space of trimmed and deleted records.
    /// Default: yes.
    pub sorter_enabled: bool,
    /// Disk space for sorting, in bytes, beyond 1.3 times the live data: for segments that wait, and for new
    /// runs while the files they replace still exist. Default: 512 MiB. Minimum: lower values count as 4
    /// segments. A run is at most 3 GiB, so values above 24 GiB change nothing.
    pub sorter_step_bytes: u64,
    /// Maximum bytes that the sorter reads and writes per second. Default: 0, no bound. Appends always go
    /// first.
    pub sorter_bytes_per_second: u64,
}

impl Default for StorageConfig {
    fn default() -> Self {
        Self {
            segment_bytes: 16 << 20,
            pool_segments: 2,
            reserve_segments: 2,
            sync_mode: SyncMode::Strict,
            sync_interval: Duration::from_millis(100),
            sync_bytes: 16 << 20,
            buffer_bytes: 8 << 20,
            marker_delay: Duration::from_millis(50),
            max_inflight_bytes: 32 << 20,
            max_record_bytes: 1 << 20,
            max_batch_bytes: 4 << 20,
            max_batch_records: 1000,
            max_future: Duration::from_secs(60),
            producer_window: 1024,
            producer_max_idle: Duration::from_secs(7 * 24 * 3600),
            max_producers_per_log: 10_000,
            max_cursors_per_log: 10_000,
            max_logs: 1_000_000,
            max_producers: 100_000,
            max_cursors: 100_000,
            max_name_bytes: 64 << 20,
            allow_invisible_names: false,
            auto_create: true,
            create_store: true,
            on_damage: OnDamage::Quarantine,
            read_strategy: ReadStrategy::Pread,
            max_open_segments: 256,
            reader_threads: 4,
            scrub_bytes_per_second: 4 << 20,
            scrub_interval: Duration::from_secs(24 * 3600),
            retention: Retention::default(),
            cursor_hold_bytes: 0,
            retention_interval: Duration::from_secs(10),
            sorter_enabled: true,
            sorter_step_bytes: 512 << 20,
            sorter_bytes_per_second: 0,
        }
    }
}

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
    /// A setting that must not be zero is zero.
    #[error("{0} must be at least 1")]
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
        for (name, zero) in [
            ("pool_segments", self.pool_segments == 0),
            ("reserve_segments", self.reserve_segments == 0),
            ("max_inflight_bytes", self.max_inflight_bytes == 0),
            ("max_record_bytes", self.max_record_bytes == 0),
            ("max_batch_bytes", self.max_batch_bytes == 0),
            ("max_batch_records", self.max_batch_records == 0),
            ("producer_window", self.producer_window == 0),
            ("max_producers_per_log", self.max_producers_per_log == 0),
            ("max_cursors_per_log", self.max_cursors_per_log == 0),
            ("max_logs", self.max_logs == 0),
            ("max_producers", self.max_producers == 0),
            ("max_cursors", self.max_cursors == 0),
            ("max_name_bytes", self.max_name_bytes == 0),
            ("max_open_segments", self.max_open_segments == 0),
            ("reader_threads", self.reader_threads == 0),
            ("retention_interval", self.retention_interval.is_zero()),
        ] {
            if zero {
                return Err(ConfigError::Zero(name));
            }
        }
        Ok(())
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
        let fits = u32::try_from(self.largest_batch()).unwrap_or(u32::MAX);
        let max_batch_bytes = self.max_batch_bytes.min(fits);
        Limits {
            max_record_bytes: self.max_record_bytes.min(max_batch_bytes),
            max_batch_bytes,
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
