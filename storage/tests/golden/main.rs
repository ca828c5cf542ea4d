//! Golden directories: data of earlier versions opens, reads as it did, and goes on.
//!
//! `tests/golden/<version>/<name>.tar.gz` is a data directory that this version wrote, and `<name>.json` its
//! content. They are never changed, only added to:
//! `WALD_GOLDEN=<version> cargo test -p wald-storage --test golden -- --ignored` adds the directories of
//! [`write`]. The reader in `storage/reader` reads them too, in `.ci/run disk/reader`.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test, helpers included"
)]

mod observe;
mod write;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use wald_storage::{
    Append as _, AppendError, Batch, Digest, DumpFilter, Dumped, Durability, Guard, LocalEngine,
    LogName, LogRecords, Name, NoObserver, Offline, Operate as _, Producer, RealDisk, Record,
    RecoveryReport, StorageConfig, SystemClock, block_on,
};

/// Tests run one by one: a `tar` that one of them starts holds the open locks of the others until it
/// is executed.
static ALONE: Mutex<()> = Mutex::new(());

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn open(directory: &Path) -> (Arc<LocalEngine>, RecoveryReport) {
    // Retention must leave the logs as they are.
    open_with(directory, Duration::from_secs(3600))
}

/// Opens with this pause between two passes of retention.
fn open_with(directory: &Path, retention: Duration) -> (Arc<LocalEngine>, RecoveryReport) {
    open_as(
        directory,
        StorageConfig {
            retention_interval: retention,
            ..config()
        },
    )
}

fn config() -> StorageConfig {
    StorageConfig {
        segment_bytes: 64 << 10,
        // No marker may prove the bytes that must look like a torn tail.
        marker_delay: Duration::from_secs(3600),
        sorter_enabled: false,
        ..StorageConfig::default()
    }
}

fn open_as(directory: &Path, config: StorageConfig) -> (Arc<LocalEngine>, RecoveryReport) {
    let disk = RealDisk::open(directory).unwrap();
    LocalEngine::open(disk, config, Arc::new(SystemClock), Arc::new(NoObserver)).unwrap()
}

/// One batch of one log that can be repeated: its records follow from the producer's name, its epoch and the
/// sequence.
fn sent(log: &str, producer: &str, epoch: u64, sequence: u64) -> Batch {
    let records = (0..2)
        .map(|index| Record {
            data: format!("{producer} {epoch} {sequence} {index}").into(),
            ..Record::default()
        })
        .collect();
    Batch::from(vec![LogRecords {
        log: LogName::new(log).unwrap(),
        records,
        guard: Guard::default(),
        producer: Some(Producer {
            id: Name::new(producer).unwrap(),
            epoch,
            sequence,
        }),
    }])
}

/// Name and archive of every golden directory.
fn archives() -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for version in fs::read_dir(golden()).unwrap() {
        let version = version.unwrap().path();
        if !version.is_dir() {
            continue;
        }
        for file in fs::read_dir(&version).unwrap() {
            let path = file.unwrap().path();
            let file = path.file_name().unwrap().to_str().unwrap().to_owned();
            if let Some(name) = file.strip_suffix(".tar.gz") {
                let version = version.file_name().unwrap().to_str().unwrap();
                found.push((format!("{version}/{name}"), path));
            }
        }
    }
    found.sort();
    found
}

fn unpack(archive: &Path) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let done = Command::new("tar")
        .arg("-xzf")
        .arg(archive)
        .arg("-C")
        .arg(directory.path())
        .status()
        .unwrap();
    assert!(done.success());
    directory
}

/// Content of the directory at the time when it was written.
fn kept(archive: &Path) -> Value {
    let name = archive.to_str().unwrap().replace(".tar.gz", ".json");
    serde_json::from_str(&fs::read_to_string(name).unwrap()).unwrap()
}

/// Appends to every log, and expects a refusal if its tail cannot be proven. Returns the number of records
/// appended to each.
fn append_to_all(engine: &LocalEngine, logs: &serde_json::Map<String, Value>) -> Vec<u64> {
    let append = |(log, told): (&String, &Value)| {
        let batch = Batch::from(vec![LogRecords {
            log: LogName::new(log).unwrap(),
            records: vec![Record::default()].into(),
            guard: Guard {
                writer_epoch: told["writer_epoch"].as_u64().filter(|epoch| *epoch > 0),
                ..Guard::default()
            },
            producer: None,
        }]);
        let ticket = engine.submit(None, batch, Some(Durability::Durable));
        match (ticket.wait(), told["tail_proven"].as_bool().unwrap()) {
            (Ok(appended), true) => {
                let first = appended.appends[0].first_lsn.get();
                assert_eq!(first, told["next_lsn"].as_u64().unwrap(), "{log}");
                1
            }
            (Err(AppendError::TailUnproven { .. }), false) => 0,
            (result, proven) => panic!("{log}, tail proven {proven}: {result:?}"),
        }
    };
    logs.iter().map(append).collect()
}

/// Checks that the newest batch of every producer is known, and that the next one is accepted.
fn producers_go_on(engine: &LocalEngine, name: &str, logs: &serde_json::Map<String, Value>) -> u64 {
    let mut found = 0;
    for (log, told) in logs {
        for producer in told["producers"].as_array().unwrap() {
            let id = producer["id"].as_str().unwrap();
            let epoch = producer["epoch"].as_u64().unwrap();
            let next = producer["next_sequence"].as_u64().unwrap();
            let newest = producer["newest_lsn"].as_u64().unwrap();
            let submit = |sequence| {
                let mut batch = sent(log, id, epoch, sequence);
                batch.logs[0].guard.writer_epoch =
                    told["writer_epoch"].as_u64().filter(|epoch| *epoch > 0);
                engine.submit(None, batch, None).wait().unwrap().appends[0]
            };
            let repeat = submit(next - 1);
            assert!(repeat.deduplicated, "{name}: {log} {id}");
            assert_eq!(repeat.first_lsn.get(), newest, "{name}: {log} {id}");
            assert!(!submit(next).deduplicated, "{name}: {log} {id}");
            found += 1;
        }
    }
    found
}

#[test]
fn golden_directories_open_read_as_they_did_and_go_on() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut damaged, mut unproven, mut producers, mut torn) = (0, 0, 0, 0);
    let mut runs = 0;
    let archives = archives();
    for (name, archive) in &archives {
        let kept = kept(archive);
        let logs = kept["logs"].as_object().unwrap();
        let directory = unpack(archive);
        let (engine, report) = open(directory.path());
        assert_eq!(report.clean, kept["clean"].as_bool().unwrap(), "{name}");
        assert_eq!(report.torn_bytes > 0, kept["torn"].as_bool().unwrap());
        let seen = observe::store(&engine);
        observe::assert_same(name, &seen, logs);
        torn += u64::from(report.torn_bytes > 0);
        runs += engine.statistics().sorted_runs;
        damaged += observe::quarantined(&seen);
        let appended = append_to_all(&engine, logs);
        unproven += appended.iter().filter(|count| **count == 0).count();
        let new = producers_go_on(&engine, name, logs);
        producers += new;
        let before = observe::store(&engine);
        block_on(engine.drain()).unwrap();
        drop(engine);
        let (engine, report) = open(directory.path());
        assert!(report.clean, "{name}");
        let after = observe::store(&engine);
        observe::assert_same(name, &after, before.as_object().unwrap());
        let records: u64 = observe::records(&after) - observe::records(&seen);
        assert_eq!(records, appended.iter().sum::<u64>() + 2 * new, "{name}");
    }
    assert!(archives.len() >= 6);
    assert!(runs > 0);
    assert!(damaged > 0 && unproven > 0 && producers > 0 && torn > 0);
}

/// The digests of producers' batches in the segments of a directory: plain ones, keyed ones.
fn digests(directory: &Path) -> (usize, usize) {
    let disk = RealDisk::open(directory).unwrap();
    let offline = Offline::open(disk).unwrap();
    let (mut plain, mut keyed) = (0, 0);
    offline
        .dump_frames(&DumpFilter::default(), &mut |dumped| {
            if let Dumped::Frame(frame) = dumped {
                match frame.producer {
                    Some((_, Digest::Plain(_))) => plain += 1,
                    Some((_, Digest::Keyed(_))) => keyed += 1,
                    None => {}
                }
            }
            Ok(())
        })
        .unwrap();
    (plain, keyed)
}

#[test]
fn a_producer_that_an_earlier_version_forgot_appends_nothing_twice() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for name in ["forgotten-killed", "forgotten-clean"] {
        let archive = golden().join(format!("0.1.0/{name}.tar.gz"));
        let directory = unpack(&archive);
        let (engine, _) = open(directory.path());
        let submit = |producer: &str, epoch: u64, sequence: u64| {
            let batch = sent("devices", producer, epoch, sequence);
            engine.submit(None, batch, None).wait()
        };
        for sequence in [0, 3, 4] {
            let refused = submit("gone", 3, sequence);
            assert!(
                matches!(
                    refused,
                    Err(AppendError::ProducerForgotten { first_epoch: 4, .. })
                ),
                "{refused:?}"
            );
        }
        assert!(!submit("gone", 4, 0).unwrap().appends[0].deduplicated);
    }
}

#[test]
fn a_store_of_plain_digests_goes_on_with_keyed_ones() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let archive = golden().join("0.1.0/everything-killed.tar.gz");
    let kept = kept(&archive);
    let logs = kept["logs"].as_object().unwrap();
    let directory = unpack(&archive);
    let (old, none) = digests(directory.path());
    assert!(old > 0 && none == 0);
    let (mut engine, _) = open(directory.path());
    let submit = |engine: &LocalEngine, sequence: u64, of: u64| {
        let mut batch = sent("payments", "p-1", 1, of);
        batch.logs[0].guard.writer_epoch = logs["payments"]["writer_epoch"].as_u64();
        batch.logs[0].producer.as_mut().unwrap().sequence = sequence;
        let answer = engine.submit(None, batch, None).wait();
        answer.map(|appended| appended.appends[0].deduplicated)
    };
    assert!(!submit(&engine, 20, 20).unwrap());
    for _ in 0..2 {
        for sequence in 0..=20 {
            assert!(submit(&engine, sequence, sequence).unwrap(), "{sequence}");
            let other = submit(&engine, sequence, sequence + 1).unwrap_err();
            let conflict = matches!(other, AppendError::ProducerConflict { .. });
            assert!(conflict, "{sequence}: {other}");
        }
        drop(engine);
        engine = open(directory.path()).0;
    }
    drop(engine);
    assert_eq!(digests(directory.path()), (old, 1));
}

#[test]
#[ignore = "adds golden directories: run once for a version, with WALD_GOLDEN=<version>"]
fn write_golden_directories() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let version = std::env::var("WALD_GOLDEN").expect("WALD_GOLDEN names the version");
    write::all(&golden().join(version));
}
