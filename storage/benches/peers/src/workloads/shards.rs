//! Keyed routing over shards, and checkpoints over all of them.

use bytes::Bytes;

use super::on_threads;
use crate::measure::{Bench, Random, record};
use crate::store::{Level, Shape};

const KEYS: u64 = 10_000;

pub fn appends(bench: &mut Bench) {
    for shards in [4, 16, 64] {
        for batch in [1usize, 100] {
            let level = Level::Written;
            let step = format!("steady, {shards} shards, {batch} at a time");
            let data = record(256);
            bench.step(&step, level, |bench| {
                let directory = bench.directory()?;
                let mut shape = Shape::new(level, KEYS as u32);
                shape.shards = Some(shards);
                let store = bench.open(&directory, &shape)?;
                let records = bench.count(if batch == 1 { 50_000 } else { 200_000 });
                let one = [data.clone()];
                let mut random = Random(3);
                let mut work = |records: u64| {
                    let mut writer = store.writer(None);
                    for _ in 0..records / batch as u64 {
                        if batch == 1 {
                            writer.append(random.below(KEYS) as u32, &one)?;
                            continue;
                        }
                        let parts: Vec<(u32, &[Bytes])> = (0..batch)
                            .map(|_| (random.below(KEYS) as u32, &one[..]))
                            .collect();
                        writer.append_many(&parts)?;
                    }
                    writer.finish()
                };
                work(1_000)?;
                store.settle()?;
                let size = (records, records * 256);
                bench.time(&step, size, Some(&*store), |_| work(records))?;
                store.close()
            });
        }
    }
}

pub fn checkpoints(bench: &mut Bench) {
    for shards in [4, 16, 64] {
        let level = Level::Written;
        let create = format!("create, {shards} shards");
        bench.step(&create, level, |bench| {
            let directory = bench.directory()?;
            let mut shape = Shape::new(level, KEYS as u32);
            shape.shards = Some(shards);
            let store = bench.open(&directory, &shape)?;
            let data = [record(128)];
            let mut writer = store.writer(None);
            for key in 0..1_000 {
                writer.append(key, &data)?;
            }
            writer.finish()?;
            drop(writer);
            store.settle()?;
            bench.time(&create, (50, 0), Some(&*store), |latencies| {
                (0..50).try_for_each(|id| latencies.time(|| store.checkpoint(&format!("at-{id}"))))
            })?;
            let load = format!("load, {shards} shards");
            bench.time(&load, (1_000, 0), Some(&*store), |latencies| {
                (0..1_000).try_for_each(|_| {
                    let found = latencies.time(|| store.load_checkpoint())?;
                    assert_eq!(found, usize::from(shards), "shards in the checkpoint");
                    Ok(())
                })
            })?;
            let race = format!("500 appends beside 10 checkpoints, {shards} shards");
            bench.time(&race, (1, 0), Some(&*store), |_| {
                on_threads(2, |side| {
                    if side == 1 {
                        return (0..10)
                            .try_for_each(|id| store.checkpoint(&format!("beside-{id}")));
                    }
                    let mut writer = store.writer(None);
                    for key in 0..500 {
                        writer.append(key, &data)?;
                    }
                    writer.finish()
                })
            })?;
            store.close()
        });
    }
}
