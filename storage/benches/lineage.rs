//! The workloads of Wald's predecessors that are about many logs and many segments, on the
//! engine as a library and a real directory.
//!
//! ```text
//! cargo bench -p wald-storage --bench lineage [-- [--runs 3] [NAME...]]
//! ```
//!
//! Each is timed twice: *as published*, with making the store, filling it and removing it
//! inside the timer, and *steady*, what a store that is there takes. Every figure is the median of the
//! runs, with the least and the most beside it. Directories lie below `target`, so the
//! device is that of the build.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a benchmark ends at the first error"
)]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tempfile::TempDir;
use wald_storage::{
    Batch, Durability, Guard, LocalEngine, LogEngine, LogName, LogRecords, LogTarget, Lsn,
    NoObserver, ReadRequest, ReadStart, RealDisk, Record, StorageConfig, SyncTarget, SystemClock,
    Ticket, block_on,
};

type Workload = fn() -> Vec<Measured>;

/// One figure of one run.
struct Measured {
    what: String,
    took: Duration,
    /// How many operations that were; what is printed is the time of one and their rate.
    operations: u64,
}

const WORKLOADS: [(&str, Workload); 4] = [
    ("100-logs-10-handles", a_hundred_logs_over_ten_handles),
    ("1000-segments", a_thousand_segments_of_ten_entries),
    ("active-segment", an_active_segment_of_200_000_records),
    ("rotation", rotation_and_deletion),
];

fn main() {
    let mut runs = 3;
    let mut wanted = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--runs" => runs = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(0),
            // What cargo says to every benchmark.
            "--bench" => {}
            name if WORKLOADS.iter().any(|(known, _)| *known == name) => {
                wanted.push(name.to_owned());
            }
            _ => runs = 0,
        }
    }
    if runs == 0 {
        let names: Vec<_> = WORKLOADS.iter().map(|(name, _)| *name).collect();
        eprintln!("usage: lineage [--runs N] [{}]", names.join("|"));
        std::process::exit(2);
    }
    println!(
        "{:52} {:>12} {:>12} {:>12} {:>14}",
        "", "median", "least", "most", "a second"
    );
    for (name, workload) in WORKLOADS {
        if !wanted.is_empty() && !wanted.iter().any(|wanted| wanted == name) {
            continue;
        }
        let measured: Vec<Vec<Measured>> = (0..runs).map(|_| workload()).collect();
        for column in 0..measured[0].len() {
            let mut each: Vec<f64> = measured
                .iter()
                .map(|run| run[column].took.as_secs_f64() / run[column].operations as f64)
                .collect();
            each.sort_by(f64::total_cmp);
            let middle = each[each.len() / 2];
            println!(
                "{:52} {:>12} {:>12} {:>12} {:>14.0}",
                format!("{name}: {}", measured[0][column].what),
                time(middle),
                time(each[0]),
                time(each[each.len() - 1]),
                1.0 / middle
            );
        }
    }
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.2} us", s * 1e6),
    }
}

fn directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn open(directory: &Path, config: &StorageConfig) -> Arc<LocalEngine> {
    let disk = RealDisk::open(directory).unwrap();
    let seams = (Arc::new(SystemClock), Arc::new(NoObserver));
    LocalEngine::open(disk, config.clone(), seams.0, seams.1)
        .unwrap()
        .0
}

fn close(engine: Arc<LocalEngine>) {
    block_on(engine.drain()).unwrap();
}

fn batch(log: &LogName, records: &[Bytes]) -> Batch {
    let record = |data: &Bytes| Record {
        data: data.clone(),
        ..Record::default()
    };
    Batch {
        single: records.len() == 1,
        logs: vec![LogRecords {
            log: log.clone(),
            records: records.iter().map(record).collect(),
            guard: Guard::default(),
            producer: None,
        }],
        ..Batch::default()
    }
}

fn append(engine: &LocalEngine, log: &LogName, records: &[Bytes], level: Durability) -> Ticket {
    engine.submit(None, batch(log, records), Some(level))
}

fn names(count: usize) -> Vec<LogName> {
    let name = |number| LogName::new(&format!("log/{number:08}")).unwrap();
    (0..count).map(name).collect()
}

fn since(what: impl Into<String>, began: Instant, operations: usize) -> Measured {
    Measured {
        what: what.into(),
        took: began.elapsed(),
        operations: operations as u64,
    }
}

/// 100 logs, written by ten threads, ten logs each (IronWal: 575 ms for one append to each).
fn a_hundred_logs_over_ten_handles() -> Vec<Measured> {
    const LOGS: usize = 100;
    const HANDLES: usize = 10;
    const STEADY: usize = 200_000;
    let names = names(LOGS);
    let data = Bytes::from(vec![7; 128]);
    let config = StorageConfig::default();
    let write = |engine: &Arc<LocalEngine>, appends: usize| {
        std::thread::scope(|scope| {
            for logs in names.chunks(LOGS / HANDLES) {
                let data = &data;
                scope.spawn(move || {
                    // One after another, the acks taken as they come.
                    let mut under_way = std::collections::VecDeque::new();
                    for number in 0..appends / HANDLES {
                        let log = &logs[number % logs.len()];
                        let one = std::slice::from_ref(data);
                        under_way.push_back(append(engine, log, one, Durability::Written));
                        if under_way.len() > 256 {
                            under_way.pop_front().unwrap().wait().unwrap();
                        }
                    }
                    for ticket in under_way {
                        ticket.wait().unwrap();
                    }
                });
            }
        });
    };
    let began = Instant::now();
    {
        let directory = directory();
        let engine = open(directory.path(), &config);
        write(&engine, LOGS);
        close(engine);
    }
    let published = since("as published, the 100", began, 1);
    let directory = directory();
    let engine = open(directory.path(), &config);
    write(&engine, LOGS);
    let began = Instant::now();
    write(&engine, STEADY);
    let steady = since("steady, an append", began, STEADY);
    close(engine);
    vec![published, steady]
}

/// One log, 1,000 segments with ten entries each: opening it (IronWal: 0.7 ms).
fn a_thousand_segments_of_ten_entries() -> Vec<Measured> {
    const SEGMENTS: usize = 1_000;
    let config = StorageConfig {
        segment_bytes: 64 << 10,
        ..StorageConfig::default()
    };
    // Ten of these and no eleventh fit the 56 KiB that a segment has for frames.
    let data = Bytes::from(vec![7; 5_300]);
    let log = &names(1)[0];
    let directory = directory();
    let began = Instant::now();
    let engine = open(directory.path(), &config);
    for _ in 0..SEGMENTS {
        for _ in 0..10 {
            append(
                &engine,
                log,
                std::slice::from_ref(&data),
                Durability::Written,
            )
            .wait()
            .unwrap();
        }
    }
    let segments = engine.statistics().journal_segments;
    assert!(
        (SEGMENTS as u64..=SEGMENTS as u64 + 2).contains(&segments),
        "{segments} segments"
    );
    close(engine);
    let reopened = Instant::now();
    let engine = open(directory.path(), &config);
    let clean = since("steady, opening after a clean end", reopened, 1);
    let reading = Instant::now();
    let read = read_all(&engine, log);
    assert_eq!(read, 10 * SEGMENTS as u64);
    let reading = since(
        "steady, reading an entry, all in order",
        reading,
        10 * SEGMENTS,
    );
    close(engine);
    drop(directory);
    vec![
        since("as published, filled, opened, removed", began, 1),
        clean,
        reading,
    ]
}

/// 200,000 records in the active segment: opening after a kill (IronWal: 1.08 s), and
/// finding one of them.
fn an_active_segment_of_200_000_records() -> Vec<Measured> {
    const RECORDS: usize = 200_000;
    const GETS: usize = 10_000;
    let config = StorageConfig::default();
    let data = Bytes::from(vec![7; 128]);
    let log = &names(1)[0];
    let directory = directory();
    let began = Instant::now();
    let engine = open(directory.path(), &config);
    let hundred = vec![data; 100];
    let tickets: Vec<Ticket> = (0..RECORDS / 100)
        .map(|_| append(&engine, log, &hundred, Durability::Written))
        .collect();
    for ticket in tickets {
        ticket.wait().unwrap();
    }
    block_on(engine.sync(SyncTarget::Device, None)).unwrap();
    let random = Instant::now();
    // A full-period sequence: every lsn looks random, no generator is timed.
    let mut lsn = 12_345u64;
    for _ in 0..GETS {
        lsn = (lsn * 1_103_515_245 + 12_345) % RECORDS as u64;
        let page = page(&engine, log, Lsn::new(lsn), 1);
        assert_eq!(page.1, 1);
    }
    let random = since("steady, getting a random record", random, GETS);
    // What a kill leaves: the directory as it is, without a clean end.
    let copy = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    copy_tree(directory.path(), copy.path());
    let reopened = Instant::now();
    let engine_of_copy = open(copy.path(), &config);
    let killed = since("steady, opening after a kill", reopened, 1);
    assert_eq!(read_all(&engine_of_copy, log), RECORDS as u64);
    drop((engine_of_copy, copy));
    close(engine);
    let reopened = Instant::now();
    let engine = open(directory.path(), &config);
    let clean = since("steady, opening after a clean end", reopened, 1);
    close(engine);
    drop(directory);
    vec![
        since("as published, filled, opened, removed", began, 1),
        killed,
        clean,
        random,
    ]
}

/// 1,000 series, small values in batches; what was written is dropped whenever 16, 32 or 64 MB of it have
/// gathered (BanyanDB: 1.6 us an operation, whichever).
fn rotation_and_deletion() -> Vec<Measured> {
    const SERIES: usize = 1_000;
    const BYTES: usize = 14;
    const BATCH: usize = 100;
    let names = names(SERIES);
    let batch = vec![Bytes::from(vec![7; BYTES]); BATCH];
    let mut measured = Vec::new();
    for rotate in [16usize, 32, 64] {
        let config = StorageConfig {
            segment_bytes: (rotate as u64) << 20,
            ..StorageConfig::default()
        };
        let began = Instant::now();
        let directory = directory();
        let engine = open(directory.path(), &config);
        // As many values as make three rotations with their keys and times, 32 bytes each.
        let operations = 3 * (rotate << 20) / 32;
        let steady = Instant::now();
        let mut tails = vec![0u64; SERIES];
        let mut under_way = std::collections::VecDeque::new();
        let mut gathered = 0;
        for number in 0..operations / BATCH {
            let series = number % SERIES;
            under_way.push_back(append(&engine, &names[series], &batch, Durability::Written));
            tails[series] += BATCH as u64;
            gathered += BATCH * 32;
            if under_way.len() > 64 {
                under_way.pop_front().unwrap().wait().unwrap();
            }
            if gathered >= rotate << 20 {
                gathered = 0;
                for ticket in under_way.drain(..) {
                    ticket.wait().unwrap();
                }
                drop_all(&engine, &names, &tails);
            }
        }
        for ticket in under_way {
            ticket.wait().unwrap();
        }
        measured.push(since(
            format!("steady, a value, every {rotate} MB"),
            steady,
            operations,
        ));
        close(engine);
        drop(directory);
        measured.push(since(
            format!("as published, a value, every {rotate} MB"),
            began,
            operations,
        ));
    }
    measured
}

/// Trims every log to its tail: all at a time, since a flush carries them all.
fn drop_all(engine: &LocalEngine, names: &[LogName], tails: &[u64]) {
    let trims = names.iter().zip(tails).filter(|(_, tail)| **tail > 0);
    let trims = trims.map(|(name, tail)| {
        let log = LogTarget {
            name: name.clone(),
            log_id: None,
        };
        engine.trim(log, Lsn::new(*tail))
    });
    for trim in trims.collect::<Vec<_>>() {
        block_on(trim).unwrap();
    }
}

/// Where to read on, how many records came, and the tail.
fn page(engine: &LocalEngine, log: &LogName, from: Lsn, most: u32) -> (Lsn, u64, Lsn) {
    let request = ReadRequest {
        log: LogTarget {
            name: log.clone(),
            log_id: None,
        },
        start: ReadStart::Lsn(from),
        max_records: most,
        max_bytes: 1 << 20,
        visibility: None,
    };
    let page = block_on(engine.read(request)).unwrap();
    let count = page
        .batches
        .iter()
        .map(|batch| u64::from(batch.count))
        .sum();
    (page.next_lsn, count, page.tail_lsn)
}

fn read_all(engine: &LocalEngine, log: &LogName) -> u64 {
    let (mut next, mut read) = (Lsn::ZERO, 0);
    loop {
        let (to, count, tail) = page(engine, log, next, 10_000);
        (next, read) = (to, read + count);
        if next >= tail {
            return read;
        }
    }
}

fn copy_tree(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            std::fs::create_dir_all(&target).unwrap();
            copy_tree(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), &target).unwrap();
        }
    }
}
