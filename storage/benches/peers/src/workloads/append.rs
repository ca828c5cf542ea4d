//! Appends to one log, or to one log by each thread.

use super::{Patience, Twice, on_threads};
use crate::measure::{Bench, Random, record};
use crate::store::{Level, Shape};

pub fn single(bench: &mut Bench) {
    for (level, steady) in [(Level::Durable, 3_000), (Level::Written, 100_000)] {
        one_after_another(bench, &level.to_string(), level, 1, 256, steady);
    }
}

fn one_after_another(
    bench: &mut Bench,
    name: &str,
    level: Level,
    published: u64,
    bytes: usize,
    steady: u64,
) {
    let data = [record(bytes)];
    Twice {
        name: name.to_owned(),
        shape: Shape::new(level, 1),
        published,
        steady,
        each_bytes: bytes as u64,
        work: &|store, operations, latencies| {
            let mut writer = store.writer(None);
            for _ in 0..operations {
                latencies.time(|| writer.append(0, &data))?;
            }
            writer.finish()
        },
    }
    .run(bench);
}

pub fn batches(bench: &mut Bench) {
    const BATCH: usize = 100;
    for (level, steady) in [(Level::Durable, 200_000), (Level::Written, 1_000_000)] {
        let data = vec![record(256); BATCH];
        Twice {
            name: level.to_string(),
            shape: Shape::new(level, 1),
            published: BATCH as u64,
            steady,
            each_bytes: 256,
            work: &|store, operations, latencies| {
                let mut writer = store.writer(None);
                for _ in 0..operations.div_ceil(BATCH as u64) {
                    latencies.time(|| writer.append(0, &data))?;
                }
                writer.finish()
            },
        }
        .run(bench);
    }
}

pub fn threads(bench: &mut Bench) {
    for (level, steady) in [(Level::Written, 50_000), (Level::Durable, 10_000)] {
        for threads in [1, 4, 8, 16] {
            let data = [record(128)];
            Twice {
                name: format!("{level}, {threads} threads"),
                shape: Shape::new(level, threads),
                published: 100 * u64::from(threads),
                steady,
                each_bytes: 128,
                work: &|store, operations, _| {
                    on_threads(threads, |log| {
                        let mut writer = store.writer(None);
                        for _ in 0..operations.div_ceil(u64::from(threads)) {
                            writer.append(log, &data)?;
                        }
                        writer.finish()
                    })
                },
            }
            .run(bench);
        }
    }
}

/// RocksDB's manual flush is buffered in the process here, sync off is written, sync on is durable. Random
/// keys are random logs.
pub fn rocksdb(bench: &mut Bench) {
    const LOGS: u32 = 64;
    let cases = [
        ("manual flush", Level::Accepted, 1_000_000),
        ("no sync", Level::Written, 1_000_000),
        // At 0.15 ms or more each, a million would take minutes for the same figure.
        ("sync", Level::Durable, 3_000),
    ];
    for (name, level, operations) in cases {
        for (order, logs) in [("sequential", 1), ("random", LOGS)] {
            let data = [record(116)];
            let step = format!("{name}, {order}");
            bench.step(&step, level, |bench| {
                let directory = bench.directory()?;
                let store = bench.open(&directory, &Shape::new(level, logs))?;
                store.settle()?;
                let operations = bench.count(operations);
                let size = (operations, operations * 116);
                bench.time(&step, size, Some(&*store), |latencies| {
                    let patience = Patience::new();
                    let mut random = Random(1);
                    let mut writer = store.writer(None);
                    for _ in 0..operations {
                        let log = random.below(u64::from(logs)) as u32;
                        latencies.time(|| writer.append(log, &data))?;
                        patience.check()?;
                    }
                    writer.finish()
                })?;
                store.close()
            });
        }
    }
}

const MESSAGES: [u64; 5] = [100, 1_000, 10_000, 100_000, 1_000_000];

pub fn one_list(bench: &mut Bench) {
    for messages in MESSAGES {
        let level = bench.loose();
        let messages = bench.count(messages);
        let data = vec![record(12); messages as usize];
        let mut shape = Shape::new(level, 1);
        shape.batch_records = messages as u32;
        shape.batch_bytes = 12 * messages as u32;
        // The published and the steady way append the same list.
        Twice {
            name: messages.to_string(),
            shape,
            published: messages,
            steady: messages,
            each_bytes: 12,
            work: &|store, operations, _| {
                let mut writer = store.writer(None);
                writer.append(0, &data[..operations as usize])?;
                writer.finish()
            },
        }
        .run(bench);
    }
}

pub fn one_by_one(bench: &mut Bench) {
    for messages in MESSAGES {
        let level = bench.loose();
        if level == Level::Durable && messages > 10_000 {
            continue;
        }
        let messages = bench.count(messages);
        let data = [record(12)];
        Twice {
            name: messages.to_string(),
            shape: Shape::new(level, 1),
            published: messages,
            steady: messages,
            each_bytes: 12,
            work: &|store, operations, _| {
                let mut writer = store.writer(None);
                for _ in 0..operations {
                    writer.append(0, &data)?;
                }
                writer.finish()
            },
        }
        .run(bench);
    }
}
