//! Many logs, and memory held.

use super::{Patience, Twice, on_threads};
use crate::measure::{Bench, disk_bytes, record, status_bytes};
use crate::store::{Level, Shape};

pub fn handles(bench: &mut Bench) {
    const LOGS: u32 = 100;
    const HANDLES: u32 = 10;
    for (level, steady) in [(Level::Written, 200_000), (Level::Durable, 10_000)] {
        let data = [record(128)];
        Twice {
            name: level.to_string(),
            shape: Shape::new(level, LOGS),
            published: u64::from(LOGS),
            steady,
            each_bytes: 128,
            work: &|store, operations, _| {
                on_threads(HANDLES, |handle| {
                    let logs = LOGS / HANDLES;
                    let mut writer = store.writer(None);
                    for number in 0..operations / u64::from(HANDLES) {
                        let log = handle * logs + (number % u64::from(logs)) as u32;
                        writer.append(log, &data)?;
                    }
                    writer.finish()
                })
            },
        }
        .run(bench);
    }
}

pub fn new_logs(bench: &mut Bench) {
    let logs = bench.count(100_000);
    let level = Level::Written;
    let step = "steady, a log";
    bench.step(step, level, |bench| {
        let directory = bench.directory()?;
        let store = bench.open(&directory, &Shape::new(level, logs as u32))?;
        let data = [record(128)];
        store.settle()?;
        let disk = disk_bytes(directory.path())?;
        let memory = status_bytes("RssAnon:");
        bench.time(step, (logs, logs * 128), Some(&*store), |_| {
            let patience = Patience::new();
            let mut writer = store.writer(None);
            for log in 0..logs {
                writer.append(log as u32, &data)?;
                patience.check()?;
            }
            writer.finish()
        })?;
        let held = status_bytes("RssAnon:").saturating_sub(memory);
        store.settle()?;
        let now = disk_bytes(directory.path())?;
        bench.note(Some(format!("{} files more", now.1.saturating_sub(disk.1))));
        bench.bytes("memory held, a log", held as f64, logs);
        bench.bytes("device taken, a log", now.0 as f64 - disk.0 as f64, logs);
        store.close()
    });
}

pub fn memory(bench: &mut Bench) {
    let level = bench.loose();
    for records in [1_000, 10_000, 100_000, 1_000_000] {
        for bytes in [12, 128, 1024] {
            let records = bench.count(records);
            let step = format!("{records} of {bytes} B");
            bench.step(&step, level, |bench| {
                let directory = bench.directory()?;
                let store = bench.open(&directory, &Shape::new(level, 1))?;
                let data = record(bytes);
                store.settle()?;
                let memory = status_bytes("RssAnon:");
                super::fill(&*store, 0, records, &data, 100)?;
                store.settle()?;
                let held = status_bytes("RssAnon:").saturating_sub(memory);
                bench.bytes(&step, held as f64, records);
                store.close()
            });
        }
    }
}
