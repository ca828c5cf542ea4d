//! Memory of a start. One test, since it measures its whole process.

#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test, helpers included"
)]

use std::path::Path;
use std::sync::Arc;

use wald_storage::{
    Append as _, Batch, Durability, Guard, LocalEngine, LogName, LogRecords, NoObserver, RealDisk,
    Record, StorageConfig, SystemClock,
};

const SEGMENT: u64 = 96 << 20;

fn open(directory: &Path) -> Arc<LocalEngine> {
    let config = StorageConfig {
        segment_bytes: SEGMENT,
        pool_segments: 1,
        reserve_segments: 1,
        scrub_bytes_per_second: 0,
        ..StorageConfig::default()
    };
    let disk = RealDisk::open(directory).unwrap();
    let (engine, _) =
        LocalEngine::open(disk, config, Arc::new(SystemClock), Arc::new(NoObserver)).unwrap();
    engine
}

fn append(engine: &LocalEngine, bytes: usize, number: u64) {
    let data: Vec<u8> = (0..bytes as u64)
        .map(|at| (at.wrapping_mul(number + 7) >> 3 & 0xFF) as u8)
        .collect();
    let record = Record {
        data: data.into(),
        ..Record::default()
    };
    let records = LogRecords {
        log: LogName::new("a").unwrap(),
        records: vec![record].into(),
        guard: Guard::default(),
        producer: None,
    };
    let ticket = engine.submit(None, Batch::from(vec![records]), Some(Durability::Durable));
    ticket.wait().unwrap();
}

/// A line of `/proc/self/status`, bytes.
fn status(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    let kib = line.split_whitespace().nth(1).unwrap();
    kib.parse::<u64>().unwrap() << 10
}

#[test]
fn start_after_a_kill_needs_a_few_windows_of_a_large_segment() {
    let directory = tempfile::tempdir().unwrap();
    let engine = open(directory.path());
    for number in 0..60 {
        append(&engine, 1 << 20, number);
    }
    // Ends without a shutdown: the next start reads the whole segment.
    drop(engine);
    wald_storage::give_back_memory();
    // Resets the highest value so far.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status("VmRSS");
    let engine = open(directory.path());
    let most = status("VmHWM").saturating_sub(before);
    append(&engine, 10, 0);
    assert!(most < SEGMENT / 3, "a start took {} KiB", most >> 10);
    drop(engine);
}
