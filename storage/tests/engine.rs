//! The engine as the service uses it: with its threads, on a real directory.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test, helpers included"
)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use wald_storage::{
    Administer as _, Append as _, Batch, Durability, Guard, LocalEngine, LogName, LogRecords,
    LogTarget, Lsn, NoObserver, OpenError, Operate as _, ReadLogs as _, ReadRequest, ReadStart,
    ReadStrategy, RealDisk, Record, ScanRequest, ScanStart, Selector, StorageConfig, SyncTarget,
    SystemClock, Visibility, block_on,
};

fn open(directory: &Path) -> Arc<LocalEngine> {
    let config = StorageConfig {
        segment_bytes: 1 << 20,
        ..StorageConfig::default()
    };
    let disk = RealDisk::open(directory).unwrap();
    LocalEngine::open(disk, config, Arc::new(SystemClock), Arc::new(NoObserver))
        .unwrap()
        .0
}

fn batch(log: &str, data: impl Into<Bytes>) -> Batch {
    let records = vec![Record {
        data: data.into(),
        ..Record::default()
    }];
    let log = LogName::new(log).unwrap();
    Batch::from(vec![LogRecords {
        log,
        records: records.into(),
        guard: Guard::default(),
        producer: None,
    }])
}

fn target(log: &str) -> LogTarget {
    LogTarget {
        name: LogName::new(log).unwrap(),
        log_id: None,
    }
}

fn count(engine: &LocalEngine, log: &str) -> u64 {
    let mut next = Lsn::ZERO;
    loop {
        let request = ReadRequest {
            log: target(log),
            start: ReadStart::Lsn(next),
            max_records: 1000,
            max_bytes: 1 << 20,
            visibility: None,
        };
        let page = block_on(engine.read(request)).unwrap();
        next = page.next_lsn;
        if next == page.tail_lsn {
            return next.get();
        }
    }
}

#[test]
fn many_writers_and_a_follower_agree_on_all_records() {
    let directory = tempfile::tempdir().unwrap();
    let engine = open(directory.path());
    let writers = 8;
    let each = 500u64;
    let total = writers * each;
    let following = {
        let engine = Arc::clone(&engine);
        std::thread::spawn(move || {
            let scan = engine.scan(ScanRequest {
                selector: Selector::All,
                start: ScanStart::First,
                until_lsn: None,
                max_records: total,
                follow: true,
                visibility: None,
                chunk_bytes: 64 << 10,
            });
            let mut scan = block_on(scan).unwrap();
            let mut seen = 0;
            while let Some(chunk) = block_on(scan.next()).unwrap() {
                assert!(chunk.gaps.is_empty());
                seen += chunk
                    .batches
                    .iter()
                    .map(|b| u64::from(b.count))
                    .sum::<u64>();
            }
            seen
        })
    };
    let highest = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for writer in 0..writers {
            let (engine, highest) = (&engine, &highest);
            scope.spawn(move || {
                let log = format!("log/{}", writer % 3);
                for index in 0..each {
                    let level = if index % 4 == 0 {
                        Durability::Durable
                    } else {
                        Durability::Written
                    };
                    let answer =
                        engine.submit(None, batch(&log, index.to_le_bytes().to_vec()), Some(level));
                    engine.write_gathered();
                    let answer = answer.wait().unwrap();
                    assert!(answer.durability >= level);
                    highest.fetch_max(answer.position.unwrap().get(), Ordering::SeqCst);
                }
            });
        }
    });
    let durable = block_on(engine.sync(SyncTarget::Device, None)).unwrap();
    assert!(durable.get() > highest.load(Ordering::SeqCst));
    assert_eq!(following.join().unwrap(), total);
    assert_eq!(engine.statistics().inflight_bytes, 0);
    let counts: u64 = (0..3)
        .map(|log| count(&engine, &format!("log/{log}")))
        .sum();
    assert_eq!(counts, total);
    block_on(engine.drain()).unwrap();
    drop(engine);
    let engine = open(directory.path());
    let counts: u64 = (0..3)
        .map(|log| count(&engine, &format!("log/{log}")))
        .sum();
    assert_eq!(counts, total);
}

#[test]
fn records_without_a_flush_request_are_durable_within_the_interval() {
    let directory = tempfile::tempdir().unwrap();
    let engine = open(directory.path());
    let ticket = engine.submit(None, batch("a", "x"), Some(Durability::Written));
    engine.write_gathered();
    let answer = ticket.wait().unwrap();
    assert_eq!(answer.durability, Durability::Written);
    // Only an automatic flush resolves this wait: nobody else requests a flush.
    block_on(engine.tail_beyond(target("a"), Lsn::ZERO, Some(Visibility::Written))).unwrap();
    while block_on(engine.stat(target("a"), None, None)).is_err() {
        std::thread::yield_now();
    }
    block_on(engine.tail_beyond(target("a"), Lsn::ZERO, Some(Visibility::Durable))).unwrap();
}

/// Descriptors of this process that are files under `directory`.
fn open_files(directory: &Path) -> usize {
    let directory = directory.canonicalize().unwrap();
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        // Directories are held open, too: one each.
        .filter(|target| target.starts_with(&directory) && target.is_file())
        .count()
}

#[test]
fn open_segments_are_bounded_while_many_scans_read_right() {
    for read_strategy in [ReadStrategy::Pread, ReadStrategy::Mmap] {
        let directory = tempfile::tempdir().unwrap();
        let config = StorageConfig {
            segment_bytes: 64 << 10,
            max_open_segments: 8,
            read_strategy,
            ..StorageConfig::default()
        };
        let open = || {
            let disk = RealDisk::open(directory.path()).unwrap();
            let clock = Arc::new(SystemClock);
            LocalEngine::open(disk, config.clone(), clock, Arc::new(NoObserver))
                .unwrap()
                .0
        };
        let engine = open();
        let records = 2000u64;
        let data = Bytes::from(vec![7; 2000]);
        let tickets: Vec<_> = (0..records)
            .map(|index| {
                engine.submit(
                    None,
                    batch(&format!("log/{}", index % 4), data.clone()),
                    Some(Durability::Written),
                )
            })
            .collect();
        engine.write_gathered();
        tickets
            .into_iter()
            .for_each(|ticket| drop(ticket.wait().unwrap()));
        block_on(engine.sync(SyncTarget::Device, None)).unwrap();
        assert!(engine.statistics().journal_segments > 60);
        // Only after a start does no read come from memory.
        block_on(engine.drain()).unwrap();
        drop(engine);
        let engine = open();
        std::thread::scope(|scope| {
            for reader in 0..16u64 {
                let engine = &engine;
                scope.spawn(move || {
                    let found = count(engine, &format!("log/{}", reader % 4));
                    assert_eq!(found, records / 4);
                });
            }
        });
        let statistics = engine.statistics();
        assert!(statistics.open_segments <= 8 && statistics.segment_evictions > 0);
        // The segment being written, the ready ones, the lock, and one per reader thread
        // at most that is being used while it is evicted.
        let open = open_files(directory.path());
        assert!(
            open <= 8 + 1 + 4 + 1 + 4,
            "{read_strategy:?}: {open} files are open"
        );
    }
}

#[test]
fn a_second_process_on_the_directory_is_refused_with_the_holder() {
    let directory = tempfile::tempdir().unwrap();
    let engine = open(directory.path());
    let disk = RealDisk::open(directory.path()).unwrap();
    let second = LocalEngine::open(
        disk,
        StorageConfig::default(),
        Arc::new(SystemClock),
        Arc::new(NoObserver),
    );
    match second {
        Err(OpenError::Locked { holder, .. }) => {
            assert!(holder.contains(&std::process::id().to_string()));
        }
        _ => panic!("locked"),
    }
    drop(engine);
    open(directory.path());
}

#[test]
fn every_waiting_client_is_answered_when_the_engine_goes_away() {
    let directory = tempfile::tempdir().unwrap();
    let engine = open(directory.path());
    let tickets: Vec<_> = (0..1000)
        .map(|_| engine.submit(None, batch("a", "x"), None))
        .collect();
    drop(engine);
    let answered = tickets
        .into_iter()
        .filter_map(|ticket| ticket.wait().ok())
        .count();
    assert_eq!(count(&open(directory.path()), "a"), answered as u64);
}

/// Number of records of each log in a scan of all logs, until it has caught up. Each log must be in order,
/// and only trimmed records may be missing.
fn scan_all(engine: &LocalEngine) -> std::collections::BTreeMap<String, u64> {
    let request = ScanRequest {
        selector: Selector::All,
        start: ScanStart::First,
        until_lsn: None,
        max_records: 0,
        follow: false,
        visibility: None,
        chunk_bytes: 256 << 10,
    };
    let mut scan = block_on(engine.scan(request)).unwrap();
    let mut next = std::collections::BTreeMap::<String, u64>::new();
    while let Some(chunk) = block_on(scan.next()).unwrap() {
        for gap in chunk.gaps {
            assert_eq!(gap.reason, wald_storage::GapReason::Trimmed, "{gap:?}");
            let log = gap.log.unwrap().as_str().to_owned();
            let next = next.entry(log).or_default();
            *next = (*next).max(gap.to.unwrap().get());
        }
        for batch in chunk.batches {
            let next = next.entry(batch.log.as_str().to_owned()).or_default();
            assert_eq!(batch.first_lsn.get(), *next, "{}", batch.log);
            *next = batch.next_lsn().get();
        }
    }
    next
}

#[test]
fn readers_miss_nothing_while_segments_are_sorted_under_them() {
    let directory = tempfile::tempdir().unwrap();
    let open = || {
        let config = StorageConfig {
            segment_bytes: 64 << 10,
            max_batch_bytes: 8 << 10,
            sorter_enabled: true,
            sorter_step_bytes: 1,
            max_open_segments: 3,
            ..StorageConfig::default()
        };
        let disk = RealDisk::open(directory.path()).unwrap();
        LocalEngine::open(disk, config, Arc::new(SystemClock), Arc::new(NoObserver)).unwrap()
    };
    let (engine, _) = open();
    let written = AtomicU64::new(0);
    let logs = ["a", "b", "c", "d"];
    let enough = |engine: &LocalEngine| {
        let now = engine.statistics();
        now.sorter_written_bytes > 8 << 20 || written.load(Ordering::Relaxed) > 400_000
    };
    std::thread::scope(|scope| {
        for log in logs {
            let (engine, written) = (&engine, &written);
            scope.spawn(move || {
                let mut appended = 0u64;
                while !enough(engine) {
                    let mut data = appended.to_le_bytes().to_vec();
                    data.resize(8 + (appended * 37 % 900) as usize, 1);
                    let ticket = engine.submit(None, batch(log, data), Some(Durability::Written));
                    engine.write_gathered();
                    block_on(ticket).unwrap();
                    written.fetch_add(1, Ordering::Relaxed);
                    appended += 1;
                    if appended.is_multiple_of(5000) && log != "a" {
                        let before = Lsn::new(appended - 2000);
                        block_on(engine.trim(target(log), before)).unwrap();
                    }
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                while !enough(&engine) {
                    scan_all(&engine);
                    let found = block_on(engine.list_logs("a".to_owned(), None, 1));
                    if found.unwrap().len() == 1 {
                        count(&engine, "a");
                    }
                }
            });
        }
    });
    assert!(engine.statistics().sorted_runs > 0, "something was sorted");
    assert_eq!(engine.statistics().quarantined_records, 0);
    block_on(engine.sync(SyncTarget::Device, None)).unwrap();
    let counts = scan_all(&engine);
    assert_eq!(
        counts.values().sum::<u64>(),
        written.load(Ordering::Relaxed)
    );
    block_on(engine.drain()).unwrap();
    drop(engine);
    let (engine, report) = open();
    assert_eq!(report.findings, Vec::<String>::new());
    assert_eq!(scan_all(&engine), counts);
}
