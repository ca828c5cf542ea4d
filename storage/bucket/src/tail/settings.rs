//! All settings of SlateDB, each with its reason. They are values of the program: no file and no variable of the
//! environment (`SLATEDB_*`) changes them, because nothing calls the functions that read those.

use std::time::Duration;

use slatedb::config::{
    CompactionWorkerOptions, CompactorOptions, DbReaderOptions, DurabilityLevel,
    GarbageCollectorDirectoryOptions, GarbageCollectorOptions, ObjectStoreCacheOptions,
    ScanOptions, Settings,
};

use super::keys::LARGEST_PART;

/// Maximum time of one open, with the replay of at most 256 objects and 256 MiB.
pub(super) const OPEN_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time until a row is stored. The row stays on its way after it.
pub(super) const PUT_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time until the next row is read.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time of a close, with the upload of at most 192 MiB.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause before merges and drains begin again after an error.
pub(super) const COMPACTOR_PAUSE: Duration = Duration::from_secs(5);

/// Number of stored rows after which the memtable is written as a file. Each row is one object of the write-ahead log (the
/// rows of a large group together are one), and an open reads all of them: 256 take 0.2 s on a store with 30 ms, 1,570 take 1.2 s. The setting of the database
/// for this begins at 4,096.
pub(super) const ROWS_PER_FILE: u32 = 256;
/// Minimum age of an object of the write-ahead log that is removed, and pause between two passes. A stand-by holds no checkpoint
/// and needs the time.
pub(super) const LOG_KEPT: Duration = Duration::from_secs(60);
/// Minimum age of other objects that are removed, and pause between two passes.
pub(super) const OTHERS_KEPT: Duration = Duration::from_secs(300);
/// Number of files of a segment that are merged. A slow log otherwise fills the 64 files with a few rows each.
pub(super) const MERGE_AT: usize = 4;

const MIB: usize = 1 << 20;
const MOST_FILES: usize = 64;

/// Settings of an owner.
pub(super) fn owner() -> Settings {
    Settings {
        // The shipper flushes each row: p50 0.6 instead of 6.2 ms.
        flush_interval: None,
        // Stops an owner that was fenced while it waited. Costs 2 GET each second.
        manifest_poll_interval: Duration::from_secs(1),
        // The claim of a term is a part of the open.
        manifest_update_timeout: OPEN_TIMEOUT,
        // Files have a few large rows, and nothing looks up a single part.
        min_filter_keys: u32::MAX,
        l0_sst_size_bytes: 32 * MIB,
        max_wal_flushes_before_l0_flush: 4096,
        l0_max_ssts: MOST_FILES,
        // The row of the manifest is in each file of its segment, and an upload counts for all keys.
        l0_max_ssts_per_key: MOST_FILES,
        // One memtable touches a few segments of the journal. Each upload holds parts of its file in memory.
        l0_flush_parallelism: 2,
        // Rows wait in memory while the store is slow. The default is 1 GiB.
        max_unflushed_bytes: 192 * MIB,
        // The compactor starts after the open. An embedded one can delay the open by 20 minutes.
        compactor_options: None,
        // Groups are compressed by their writers.
        compression_codec: None,
        // The local disk has the journal already.
        object_store_cache_options: ObjectStoreCacheOptions {
            root_folder: None,
            ..ObjectStoreCacheOptions::default()
        },
        // The collector has a task of its own (`collect.rs`).
        garbage_collector_options: None,
        default_ttl_millis: None,
        // A call of the owner has a time limit of its own. A bound here would stop the database after a short outage.
        object_store_max_retries: None,
        ..Settings::default()
    }
}

fn kept(min_age: Duration) -> Option<GarbageCollectorDirectoryOptions> {
    Some(GarbageCollectorDirectoryOptions {
        // Not used: the passes have their own pauses.
        interval: None,
        min_age,
        dry_run: false,
    })
}

/// Removal of objects of the write-ahead log whose rows are in files.
pub(super) fn log_collector() -> GarbageCollectorOptions {
    GarbageCollectorOptions {
        wal_options: kept(LOG_KEPT),
        manifest_options: None,
        compacted_options: None,
        compactions_options: None,
        ..collector()
    }
}

/// Removal of other objects that no manifest of the database names.
pub(super) fn collector() -> GarbageCollectorOptions {
    GarbageCollectorOptions {
        manifest_options: kept(OTHERS_KEPT),
        wal_options: None,
        // Never: a fence that was removed lets an old owner store rows that no later owner sees.
        wal_fence_options: None,
        compacted_options: kept(OTHERS_KEPT),
        compactions_options: kept(OTHERS_KEPT),
        // The database is no clone of another.
        detach_options: None,
        metric_level: None,
        // Stops an owner that wakes after its manifests were removed.
        boundary_files_enabled: true,
        object_store_max_retries: None,
    }
}

/// Settings of merges and drains.
pub(super) fn compactor() -> CompactorOptions {
    CompactorOptions {
        // Half a GET each second when idle. Drained rows leave within this time after they are in a file.
        poll_interval: Duration::from_secs(5),
        manifest_update_timeout: OPEN_TIMEOUT,
        // Drains need no worker, and one poll proposes at most this number.
        max_concurrent_compactions: MOST_FILES,
        // Merges exist to reduce the number of files.
        enable_trivial_move: false,
        // A read that has begun needs the files that a merge replaced.
        checkpoint_lifetime: Duration::from_secs(300),
        worker: Some(CompactionWorkerOptions {
            // Reads ahead 2 × 2 MiB for each of 4 files: 16 MiB in all.
            max_concurrent_compactions: 1,
            max_fetch_tasks: 2,
            bytes_to_fetch: 2 * MIB,
            max_subcompactions: 1,
            max_sst_size: 64 * MIB,
            // As the owner's.
            min_filter_keys: u32::MAX,
            compression_codec: None,
            ..CompactionWorkerOptions::default()
        }),
        object_store_max_retries: None,
        ..CompactorOptions::default()
    }
}

/// Settings of a copy that is read once.
pub(super) fn reader() -> DbReaderOptions {
    DbReaderOptions {
        // The copy is of one moment. It never looks for newer rows.
        manifest_poll_interval: Duration::from_secs(24 * 3600),
        max_memtable_bytes: 64 << 20,
        skip_wal_replay: false,
        object_store_cache_options: ObjectStoreCacheOptions {
            root_folder: None,
            ..ObjectStoreCacheOptions::default()
        },
        object_store_max_retries: None,
        ..DbReaderOptions::default()
    }
}

/// Settings of a stand-by, which reads rows as they come.
pub(super) fn follower() -> DbReaderOptions {
    DbReaderOptions {
        // Two requests each time.
        manifest_poll_interval: Duration::from_secs(1),
        ..reader()
    }
}

/// Settings of a read of all rows.
pub(super) fn scan() -> ScanOptions {
    ScanOptions {
        // A row on its way may never be stored.
        durability_filter: DurabilityLevel::Remote,
        // One request for the largest row, and one row ahead.
        read_ahead_bytes: LARGEST_PART,
        max_fetch_tasks: 2,
        cache_blocks: false,
        ..ScanOptions::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names a process that this test starts.
    const CHILD: &str = "WALD_TEST_SETTINGS_CHILD";

    #[test]
    fn settings_are_the_design_s_and_fences_are_kept() {
        let settings = owner();
        settings.validate().unwrap();
        assert!(settings.garbage_collector_options.is_none());
        for collector in [log_collector(), collector()] {
            assert!(collector.wal_fence_options.is_none());
            assert!(collector.boundary_files_enabled);
        }
        assert_eq!(settings.flush_interval, None);
        assert_eq!(settings.manifest_poll_interval, Duration::from_secs(1));
        assert_eq!(settings.max_unflushed_bytes, 201_326_592);
        assert!(settings.compactor_options.is_none());
        assert!(settings.object_store_cache_options.root_folder.is_none());
        let age = |kept: Option<GarbageCollectorDirectoryOptions>| kept.unwrap().min_age.as_secs();
        assert_eq!(age(log_collector().wal_options), 60);
        assert!(log_collector().compacted_options.is_none());
        assert_eq!(age(collector().compacted_options), 300);
        assert!(collector().wal_options.is_none());
    }

    #[test]
    fn variables_of_the_environment_change_nothing() {
        let shown = || {
            let settings = owner();
            let reader = reader();
            let compactor = compactor();
            format!("{settings:?} {compactor:?} {reader:?}").replace(['\n', '\r'], " ")
        };
        if std::env::var_os(CHILD).is_some() {
            // The variables are ones that SlateDB knows.
            let read = Settings::from_env_with_default("SLATEDB_", owner()).unwrap();
            assert_eq!(read.l0_max_ssts, 1);
            println!("settings: {}", shown());
            return;
        }
        let name = std::thread::current().name().unwrap().to_owned();
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name, "--nocapture"])
            .env(CHILD, "1")
            .env("SLATEDB_FLUSH_INTERVAL", "1h")
            .env("SLATEDB_MANIFEST_POLL_INTERVAL", "1h")
            .env("SLATEDB_L0_MAX_SSTS", "1")
            .output()
            .unwrap();
        let output = String::from_utf8(child.stdout).unwrap();
        let theirs = output
            .lines()
            .find_map(|line| line.split_once("settings: "));
        assert_eq!(theirs.unwrap().1, shown());
    }
}
