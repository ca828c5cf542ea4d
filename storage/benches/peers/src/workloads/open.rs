//! Opening existing stores.

use tempfile::TempDir;

use super::fill;
use crate::measure::{Bench, copy_tree, record};
use crate::store::{Level, Shape, Unable};

/// Number of openings by each process: its figure is the mean.
const OPENINGS: u64 = 5;

pub fn two_gigabytes(bench: &mut Bench) {
    let records = bench.count(2_000_000);
    opening(
        bench,
        &Case {
            shape: Shape::new(bench.loose(), 1),
            records,
            bytes: 1000,
            batch: 1000,
            kill: false,
        },
    );
}

pub fn thousand_segments(bench: &mut Bench) {
    let records = bench.count(1000) * 10;
    let mut shape = Shape::new(bench.loose(), 1);
    // Ten records of 5,300 bytes fit, and no eleventh.
    shape.segment_bytes = Some(64 << 10);
    shape.segment_records = Some(10);
    opening(
        bench,
        &Case {
            shape,
            records,
            bytes: 5300,
            batch: 1,
            kill: true,
        },
    );
}

pub fn active(bench: &mut Bench) {
    let records = bench.count(200_000);
    opening(
        bench,
        &Case {
            shape: Shape::new(bench.loose(), 1),
            records,
            bytes: 128,
            batch: 100,
            kill: true,
        },
    );
}

struct Case {
    shape: Shape,
    records: u64,
    bytes: usize,
    batch: u64,
    /// Whether the store is also opened as a kill leaves it.
    kill: bool,
}

fn opening(bench: &mut Bench, case: &Case) {
    let level: Level = case.shape.level;
    let step = "as published";
    bench.step(step, level, |bench| {
        let root = bench.directory()?;
        let system = bench.system;
        bench.time(step, (1, 0), None, |_| {
            let directory = tempfile::tempdir_in(root.path())?;
            let store = (system.open)(directory.path(), &case.shape)?;
            fill(&*store, 0, case.records, &record(case.bytes), case.batch)?;
            store.close()?;
            (system.open)(directory.path(), &case.shape)?.close()
        })?;
        bench.note(Some("filled, opened, removed".to_owned()));
        Ok(())
    });
    let step = "steady, after a clean end";
    bench.step(step, level, |bench| steady(bench, case, step));
    let step = "steady, after a kill";
    if case.kill {
        bench.step(step, level, |bench| after_a_kill(bench, case, step));
    }
}

fn steady(bench: &mut Bench, case: &Case, step: &str) -> Result<(), Unable> {
    let directory = bench.directory()?;
    let store = bench.open(&directory, &case.shape)?;
    fill(&*store, 0, case.records, &record(case.bytes), case.batch)?;
    store.settle()?;
    store.close()?;
    let mut openings = Vec::new();
    let mut took = 0.0;
    for _ in 0..OPENINGS {
        let began = std::time::Instant::now();
        let store = bench.open(&directory, &case.shape)?;
        took += began.elapsed().as_secs_f64();
        openings.push(store.opening());
        store.settle()?;
        store.close()?;
    }
    bench.seconds(step, took, OPENINGS);
    bench.note(openings.pop().flatten());
    in_order(bench, case, &directory)
}

/// Opens the store and reads all records in order.
fn in_order(bench: &mut Bench, case: &Case, directory: &TempDir) -> Result<(), Unable> {
    let store = bench.open(directory, &case.shape)?;
    let step = "steady, a record, all in order";
    let size = (case.records, case.records * case.bytes as u64);
    bench.step(step, case.shape.level, |bench| {
        bench.time(step, size, None, |_| {
            let found = store.scan(0)?.records;
            (found == case.records)
                .then_some(())
                .ok_or_else(|| Unable(format!("failed: {found} of {} records", case.records)))
        })
    });
    store.close()
}

fn after_a_kill(bench: &mut Bench, case: &Case, step: &str) -> Result<(), Unable> {
    let directory = bench.directory()?;
    let store = bench.open(&directory, &case.shape)?;
    fill(&*store, 0, case.records, &record(case.bytes), case.batch)?;
    store.settle()?;
    // A kill leaves the directory as it is now.
    let copy = bench.directory()?;
    copy_tree(directory.path(), copy.path())?;
    store.close()?;
    let began = std::time::Instant::now();
    let store = bench.open(&copy, &case.shape)?;
    let took = began.elapsed().as_secs_f64();
    bench.seconds(step, took, 1);
    bench.note(store.opening());
    store.close()
}
