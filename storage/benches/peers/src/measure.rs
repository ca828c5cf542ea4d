//! Measures one workload on one system in a process of its own: time, CPU, writes, memory, flushes.

use std::path::{Path, PathBuf};
use std::time::Instant;

use bytes::Bytes;
use cpu_time::ProcessTime;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::store::{Level, Shape, Store, System, Unable};

/// One figure.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    pub step: String,
    /// Unit of `value`: `s` for seconds per operation, or `bytes` each.
    pub unit: String,
    /// `None`: the system cannot do this; `note` says why.
    pub value: Option<f64>,
    pub operations: u64,
    pub flush: String,
    pub note: Option<String>,
    /// Throughput of record data, in bytes per second.
    pub bytes_per_second: Option<f64>,
    /// Latency at 50 %, 99 %, 99.9 % and at most, in seconds, if each operation was timed.
    pub latency: Option<[f64; 4]>,
    /// CPU time of all threads, in seconds per operation.
    pub cpu: Option<f64>,
    /// Bytes that became dirty, per operation.
    pub written: Option<f64>,
    /// Peak of resident memory, in bytes, maps included.
    pub peak_bytes: Option<u64>,
    pub flushes: Option<u64>,
}

impl Row {
    fn new(step: &str, unit: &str, value: f64, operations: u64) -> Self {
        Self {
            step: step.to_owned(),
            unit: unit.to_owned(),
            value: Some(value),
            operations,
            flush: String::new(),
            note: None,
            bytes_per_second: None,
            latency: None,
            cpu: None,
            written: None,
            peak_bytes: None,
            flushes: None,
        }
    }
}

/// Times of single operations.
pub struct Latencies(Histogram<u64>);

impl Latencies {
    pub fn new() -> Self {
        // 10 ns to a minute.
        Self(Histogram::new_with_bounds(10, 60_000_000_000, 3).expect("bounds are in order"))
    }

    /// Times one operation.
    pub fn time<T>(&mut self, operation: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = operation();
        self.0
            .saturating_record(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
        result
    }

    fn seconds(&self) -> Option<[f64; 4]> {
        let at = |quantile| self.0.value_at_quantile(quantile) as f64 / 1e9;
        (!self.0.is_empty()).then(|| [at(0.5), at(0.99), at(0.999), at(1.0)])
    }
}

/// The work of one child process.
pub struct Bench {
    pub system: &'static System,
    pub rows: Vec<Row>,
    root: PathBuf,
    scale: f64,
}

impl Bench {
    pub fn new(system: &'static System, root: &Path, scale: f64) -> Self {
        Self {
            system,
            rows: Vec::new(),
            root: root.to_owned(),
            scale,
        }
    }

    /// Number of operations at the requested scale, at least 100 of them.
    pub fn count(&self, full: u64) -> u64 {
        ((full as f64 * self.scale) as u64).clamp(full.min(100), full)
    }

    pub fn directory(&self) -> Result<TempDir, Unable> {
        Ok(tempfile::tempdir_in(&self.root)?)
    }

    pub fn open(&self, directory: &TempDir, shape: &Shape) -> Result<Box<dyn Store>, Unable> {
        (self.system.open)(directory.path(), shape)
    }

    /// The weakest level of this system: written, or durable if it offers nothing weaker.
    pub fn loose(&self) -> Level {
        match (self.system.flush)(Level::Written) {
            Ok(_) => Level::Written,
            Err(_) => Level::Durable,
        }
    }

    /// Runs one step. If the system cannot do it, its row says so.
    pub fn step(
        &mut self,
        step: &str,
        level: Level,
        run: impl FnOnce(&mut Self) -> Result<(), Unable>,
    ) {
        let first = self.rows.len();
        let flush = (self.system.flush)(level);
        let outcome = flush.clone().and_then(|_| run(self));
        if let Err(Unable(why)) = outcome {
            let mut row = Row::new(step, "s", 0.0, 0);
            row.value = None;
            row.note = Some(why);
            self.rows.push(row);
        }
        for row in &mut self.rows[first..] {
            row.flush = flush.clone().unwrap_or_default().to_owned();
        }
    }

    /// Times `work`, which does `operations` on `bytes` of data.
    pub fn time(
        &mut self,
        step: &str,
        (operations, bytes): (u64, u64),
        store: Option<&dyn Store>,
        work: impl FnOnce(&mut Latencies) -> Result<(), Unable>,
    ) -> Result<(), Unable> {
        let flushes = || store.and_then(Store::flushes);
        let mut latencies = Latencies::new();
        let flushes_before = flushes();
        let written_before = written_bytes();
        forget_peak();
        let cpu = ProcessTime::now();
        let began = Instant::now();
        work(&mut latencies)?;
        let took = began.elapsed().as_secs_f64();
        let cpu = cpu.elapsed().as_secs_f64();
        let each = 1.0 / operations as f64;
        let mut row = Row::new(step, "s", took * each, operations);
        row.bytes_per_second = (bytes > 0).then_some(bytes as f64 / took);
        row.latency = latencies.seconds();
        row.cpu = Some(cpu * each);
        row.written = Some((written_bytes() - written_before) as f64 * each);
        row.peak_bytes = Some(status_bytes("VmHWM:"));
        row.flushes = flushes()
            .zip(flushes_before)
            .map(|(now, before)| now - before);
        self.rows.push(row);
        Ok(())
    }

    /// Adds a row for operations that the caller timed, in seconds.
    pub fn seconds(&mut self, step: &str, took: f64, operations: u64) {
        let value = took / operations as f64;
        self.rows.push(Row::new(step, "s", value, operations));
    }

    /// Adds a row in bytes.
    pub fn bytes(&mut self, step: &str, bytes: f64, each_of: u64) {
        let value = bytes / each_of as f64;
        self.rows.push(Row::new(step, "bytes", value, each_of));
    }

    /// Adds a note for readers to the newest row.
    pub fn note(&mut self, note: Option<String>) {
        if let (Some(row), Some(note)) = (self.rows.last_mut(), note) {
            row.note = Some(note);
        }
    }
}

/// A record of `bytes` random bytes, so that compression does not shrink it.
pub fn record(bytes: usize) -> Bytes {
    let mut random = Random(bytes as u64);
    (0..bytes).map(|_| random.below(256) as u8).collect()
}

/// A sequence that looks random and is the same in every run.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: u64) -> u64 {
        // Steele, Lea, Flood: SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(mixed ^ (mixed >> 31)) * u128::from(bound)) >> 64) as u64
    }
}

/// A line of /proc/self/status, in bytes.
pub fn status_bytes(field: &str) -> u64 {
    proc_number("/proc/self/status", field) << 10
}

fn written_bytes() -> u64 {
    proc_number("/proc/self/io", "write_bytes:")
}

fn proc_number(file: &str, field: &str) -> u64 {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.unwrap_or(0)
}

/// Resets the peak of resident memory.
fn forget_peak() {
    // Where the system forbids this, peaks count from the start of the process.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// Bytes that a directory takes on its device, and its number of files.
pub fn disk_bytes(directory: &Path) -> Result<(u64, u64), Unable> {
    use std::os::unix::fs::MetadataExt;
    let mut sum = (0, 0);
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let found = entry.metadata()?;
        sum.0 += found.blocks() * 512;
        if found.is_dir() {
            let (bytes, files) = disk_bytes(&entry.path())?;
            sum = (sum.0 + bytes, sum.1 + files);
        } else {
            sum.1 += 1;
        }
    }
    Ok(sum)
}

pub fn copy_tree(from: &Path, to: &Path) -> Result<(), Unable> {
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            std::fs::create_dir_all(&target)?;
            copy_tree(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}
