//! Sorting many active logs takes little memory and little disk, however many runs there are.
//!
//! `WALD_LOGS` sets the number of logs, `WALD_ROUNDS` how often each gets a record, and `WALD_HISTORY`
//! the number of times that this is done. The first time takes as much memory as the last, except for
//! caches. Memory for each log is checked from 100,000 logs on: with fewer, caches are most of it.
//! `WALD_STEP_MIB` sets the step of the sorter.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "a test, helpers included"
)]
#![cfg(target_os = "linux")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wald_storage::{
    Append as _, Batch, Durability, Guard, LocalEngine, LogName, LogRecords, NoObserver,
    Operate as _, RealDisk, Record, StorageConfig, SystemClock, block_on,
};

const KIB: u64 = 1 << 10;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// Memory of caches that do not depend on the number of logs, in KiB. Besides, a run in the making holds the records of a
/// step, and its image.
const CACHES: u64 = 24 << 10;
/// Memory by which a longer history may exceed a shorter one, in KiB: chance decides when the caches are full.
const CHANCE: u64 = 32 << 10;
/// Memory that sorting may take for each log, in bytes: 1 million logs take less than 512 MiB.
const PER_LOG: u64 = 384;
/// Bytes of a frame with a record of 100 bytes.
const FRAME: u64 = 64 + 104;
const SEGMENT: u64 = 1 << 20;
/// More than what reading the files of `/proc` takes.
const PAGE: u64 = 4 << 10;

fn step() -> u64 {
    setting("WALD_STEP_MIB", 32) << 20
}

/// Resident memory of this process in KiB, and its peak since the last call.
fn resident() -> (u64, u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let of = |name: &str| -> u64 {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let found = (of("VmRSS:"), of("VmHWM:"));
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    found
}

/// Bytes that this process has read and written.
fn transferred() -> u64 {
    let counts = std::fs::read_to_string("/proc/self/io").unwrap();
    let counts = counts.lines().filter_map(|line| line.split_once("char: "));
    counts.map(|(_, bytes)| bytes.parse::<u64>().unwrap()).sum()
}

fn bytes_below(directory: &Path) -> u64 {
    let mut sum = 0;
    let Ok(entries) = std::fs::read_dir(directory) else {
        return 0;
    };
    for entry in entries.flatten() {
        // Files come and go meanwhile.
        let Ok(kind) = entry.metadata() else { continue };
        sum += match kind.is_dir() {
            true => bytes_below(&entry.path()),
            false => kind.len(),
        };
    }
    sum
}

struct Store {
    directory: tempfile::TempDir,
    engine: Arc<LocalEngine>,
    logs: u64,
}

impl Store {
    fn open(logs: u64) -> Self {
        let base = std::env::var("WALD_DIRECTORY").map_or(std::env::temp_dir(), Into::into);
        let directory = tempfile::tempdir_in(base).unwrap();
        let config = StorageConfig {
            segment_bytes: SEGMENT,
            sorter_enabled: true,
            sorter_step_bytes: step(),
            scrub_bytes_per_second: 0,
            ..StorageConfig::default()
        };
        let disk = RealDisk::open(directory.path()).unwrap();
        let (engine, _) =
            LocalEngine::open(disk, config, Arc::new(SystemClock), Arc::new(NoObserver)).unwrap();
        Self {
            directory,
            engine,
            logs,
        }
    }

    /// One record of 100 bytes for each log, 500 logs a batch.
    fn round(&self) {
        let names: Vec<LogName> = (0..self.logs)
            .map(|number| LogName::new(&format!("sensors/{number:08}")).unwrap())
            .collect();
        for names in names.chunks(500) {
            let parts: Vec<LogRecords> = names
                .iter()
                .map(|log| LogRecords {
                    log: log.clone(),
                    records: vec![Record {
                        data: vec![7; 100].into(),
                        ..Record::default()
                    }]
                    .into(),
                    guard: Guard::default(),
                    producer: None,
                })
                .collect();
            let append = self
                .engine
                .submit(None, Batch::from(parts), Some(Durability::Written));
            self.engine.write_gathered();
            block_on(append).unwrap();
        }
    }

    /// Polls until nothing was read or written for 4 seconds: the sorter looks for work every second. With more logs
    /// each search takes longer. Its own counters rise at the end of a run only, which takes minutes on a busy machine.
    fn rest(&self) {
        let deadline = Instant::now() + Duration::from_secs(1800);
        let mut still = 0;
        let mut before = 0;
        while still < 40 + self.logs / 1500 {
            std::thread::sleep(Duration::from_millis(100));
            assert!(
                Instant::now() < deadline,
                "the sorter does not come to rest"
            );
            let now = transferred();
            still = if now < before + PAGE { still + 1 } else { 0 };
            before = now;
        }
    }

    /// Bytes of everything but the pool.
    fn bytes(&self) -> u64 {
        let below = |name| bytes_below(&self.directory.path().join(name));
        let parts = ["sorted", "index", "checkpoint"].map(|name| (name, below(name)));
        let journal = self.engine.statistics().journal_bytes;
        eprintln!("bytes: {parts:?}, journal {journal}");
        parts.iter().map(|(_, bytes)| bytes).sum::<u64>() + journal
    }

    /// Gives each log a record this number of times. Returns the most memory meanwhile, in KiB.
    fn rounds(&self, rounds: u64) -> u64 {
        let mut most = 0;
        for round in 0..rounds {
            self.round();
            let (now, peak) = resident();
            most = most.max(peak);
            let runs = self.engine.statistics().sorted_runs;
            eprintln!("round {round}: {now} KiB resident, {peak} at most; {runs} runs");
        }
        self.rest();
        let runs = self.engine.statistics().sorted_runs;
        let (now, peak) = resident();
        eprintln!("at rest: {now} KiB resident, {peak} at most; {runs} runs");
        most.max(peak)
    }
}

#[test]
fn sorting_many_active_logs_takes_little_memory_and_disk() {
    let (logs, rounds) = (setting("WALD_LOGS", 30_000), setting("WALD_ROUNDS", 12));
    let times = setting("WALD_HISTORY", 2);
    let store = Store::open(logs);
    store.round();
    store.rest();
    let (idle, _) = resident();
    let most = store.rounds(rounds);
    let kept = (rounds + 1) * logs * FRAME / KIB;
    let disk = store.bytes() / KIB;
    eprintln!("idle {idle} KiB, {most} at most; {disk} KiB on disk of {kept} appended");
    if logs >= 100_000 {
        let bound = CACHES + (2 * step() + logs * PER_LOG) / KIB;
        assert!(
            most <= idle + bound,
            "{most} KiB, {idle} idle, {bound} allowed"
        );
    }
    // The room of a step is for images and indexes of two or three runs, too.
    let bound = kept * 13 / 10 + (step() + 6 * SEGMENT) / KIB;
    assert!(disk <= bound, "{disk} KiB on disk, {bound} allowed");
    if times > 1 {
        let later = store.rounds(rounds * (times - 1));
        let disk = store.bytes() / KIB;
        eprintln!("after {times} times the history {later} KiB at most, {disk} KiB on disk");
        let bound = most + CHANCE;
        assert!(later <= bound, "{later} KiB, {bound} allowed");
    }
}
