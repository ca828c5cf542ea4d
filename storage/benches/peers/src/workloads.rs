//! All workloads. Names with `W` mark Wald's own targets; the others are the headline workloads of the
//! systems that Wald comes from.

mod append;
mod many;
mod open;
mod read;
mod series;
mod shards;

use std::time::Instant;

use bytes::Bytes;

use crate::measure::{Bench, Latencies};
use crate::store::{Role, Shape, Store, Unable};

/// A workload, run once on one system by each process.
pub struct Workload {
    pub name: &'static str,
    pub what: &'static str,
    pub role: Role,
    pub run: fn(&mut Bench),
}

const fn workload(
    name: &'static str,
    role: Role,
    run: fn(&mut Bench),
    what: &'static str,
) -> Workload {
    Workload {
        name,
        what,
        role,
        run,
    }
}

pub static WORKLOADS: [Workload; 21] = [
    workload(
        "w4-scan",
        Role::Scan,
        read::scan,
        "W4: all of one log in order, from cache, a record",
    ),
    workload(
        "w5-get",
        Role::Get,
        read::get,
        "W5: one record of 128 B by its number, from cache",
    ),
    workload(
        "w7-open",
        Role::Open,
        open::two_gigabytes,
        "W7: opening a store of 2 GB",
    ),
    workload(
        "w8-handles",
        Role::Append,
        many::handles,
        "W8, IronWal: 100 logs over 10 handles, 128 B",
    ),
    workload(
        "w9-new-logs",
        Role::Append,
        many::new_logs,
        "W9: 100,000 new logs, one append of 128 B each",
    ),
    workload(
        "single",
        Role::Append,
        append::single,
        "IronWal: one record of 256 B after another",
    ),
    workload(
        "batch-100",
        Role::Append,
        append::batches,
        "IronWal: batches of 100 records of 256 B, a record",
    ),
    workload(
        "threads",
        Role::Append,
        append::threads,
        "IronWal: each thread appends 128 B to its own log",
    ),
    workload(
        "get-10000",
        Role::Get,
        read::ten_thousand_gets,
        "IronWal: random gets of 10,000 records of 128 B",
    ),
    workload(
        "scan-10000",
        Role::Scan,
        read::ten_thousand_in_order,
        "IronWal: 10,000 records of 128 B in order, a record",
    ),
    workload(
        "open-1000-segments",
        Role::Open,
        open::thousand_segments,
        "IronWal, W7: opening 1,000 segments of 10 entries",
    ),
    workload(
        "open-200000-active",
        Role::Open,
        open::active,
        "IronWal: opening 200,000 records of 128 B in the active segment",
    ),
    workload(
        "shards",
        Role::Append,
        shards::appends,
        "IronWal: 256 B routed by key over 4, 16, 64 shards, a record",
    ),
    workload(
        "shard-checkpoints",
        Role::Append,
        shards::checkpoints,
        "IronWal: checkpoints over shards",
    ),
    workload(
        "series",
        Role::Append,
        series::series,
        "BanyanDB: 8 to 20 bytes of each series, flushed whenever 64 kB have gathered, a value",
    ),
    workload(
        "series-buffers",
        Role::Append,
        series::buffers,
        "BanyanDB: 1,000 series, other buffers, flushed and not, a value",
    ),
    workload(
        "rotation",
        Role::Append,
        series::rotation,
        "BanyanDB: 1,000 series, dropped whenever 16, 32, 64 MB have gathered, a value",
    ),
    workload(
        "rocksdb-wal",
        Role::Append,
        append::rocksdb,
        "RocksDB: 1 M records of 16 B + 100 B, a record",
    ),
    workload(
        "tlog-list",
        Role::Append,
        append::one_list,
        "tlog: so many messages of 12 B as one list, a message",
    ),
    workload(
        "tlog-each",
        Role::Append,
        append::one_by_one,
        "tlog: so many messages of 12 B one by one, a message",
    ),
    workload(
        "tlog-memory",
        Role::Append,
        many::memory,
        "tlog: memory held for so many records, a record",
    ),
];

/// Fills a log quickly, for workloads that read.
fn fill(store: &dyn Store, log: u32, records: u64, data: &Bytes, batch: u64) -> Result<(), Unable> {
    let mut writer = store.writer(Some(64));
    let whole = vec![data.clone(); batch as usize];
    for first in (0..records).step_by(batch as usize) {
        let count = batch.min(records - first) as usize;
        writer.append(log, &whole[..count])?;
    }
    writer.finish()
}

/// One workload in two ways: as published, on a store made and removed inside the timer, and steady.
struct Twice<'a> {
    name: String,
    shape: Shape,
    /// Number of operations in each way, then bytes of data of one operation.
    published: u64,
    steady: u64,
    each_bytes: u64,
    work: &'a (dyn Fn(&dyn Store, u64, &mut Latencies) -> Result<(), Unable> + Sync),
}

impl Twice<'_> {
    fn run(&self, bench: &mut Bench) {
        let level = self.shape.level;
        let step = format!("{}, as published", self.name);
        bench.step(&step, level, |bench| self.as_published(bench, &step));
        let step = format!("{}, steady", self.name);
        bench.step(&step, level, |bench| self.in_a_steady_state(bench, &step));
    }

    fn as_published(&self, bench: &mut Bench, step: &str) -> Result<(), Unable> {
        let root = bench.directory()?;
        let system = bench.system;
        bench.time(step, (self.published, 0), None, |_| {
            let directory = tempfile::tempdir_in(root.path())?;
            let store = (system.open)(directory.path(), &self.shape)?;
            (self.work)(&*store, self.published, &mut Latencies::new())?;
            store.close()
        })
    }

    fn in_a_steady_state(&self, bench: &mut Bench, step: &str) -> Result<(), Unable> {
        let directory = bench.directory()?;
        let store = bench.open(&directory, &self.shape)?;
        // Creates logs, and the first blocks of files.
        (self.work)(&*store, self.published, &mut Latencies::new())?;
        store.settle()?;
        let operations = bench.count(self.steady);
        let size = (operations, operations * self.each_bytes);
        bench.time(step, size, Some(&*store), |latencies| {
            (self.work)(&*store, operations, latencies)
        })?;
        store.close()
    }
}

/// Runs each thread's part. Returns the first failure.
fn on_threads(threads: u32, work: impl Fn(u32) -> Result<(), Unable> + Sync) -> Result<(), Unable> {
    std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = (0..threads).map(|n| scope.spawn(move || work(n))).collect();
        running.into_iter().try_for_each(|thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err(Unable("failed: a thread panicked".to_owned())))
        })
    })
}

/// Time limit for workloads that would take hours on systems that were not made for them.
struct Patience(Instant);

impl Patience {
    const SECONDS: u64 = 30;

    fn new() -> Self {
        Self(Instant::now())
    }

    fn check(&self) -> Result<(), Unable> {
        if self.0.elapsed().as_secs() < Self::SECONDS {
            return Ok(());
        }
        Err(Unable(format!("not done after {} s", Self::SECONDS)))
    }
}
