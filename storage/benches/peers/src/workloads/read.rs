//! Reading: single records, and all in order.

use std::time::{Duration, Instant};

use super::fill;
use crate::measure::{Bench, Random, record};
use crate::store::{Scanned, Shape, Store, Unable, unable};

/// Time limits of gets: before they are timed, and while they are timed.
const WARM: Duration = Duration::from_secs(1);
const MOST: Duration = Duration::from_secs(10);

/// Two logs: the first is read to warm up, the second is timed.
pub fn scan(bench: &mut Bench) {
    let cases = [("128 B", 128, 2_000_000), ("1 KiB", 1024, 500_000)];
    for (name, bytes, records) in cases {
        for batch in [1, 100] {
            let step = format!("{name}, appended {batch} at a time");
            let records = bench.count(records);
            all_in_order(bench, &step, bytes, records, batch, true);
        }
    }
}

fn all_in_order(
    bench: &mut Bench,
    step: &str,
    bytes: usize,
    records: u64,
    batch: u64,
    reopen: bool,
) {
    let level = bench.loose();
    bench.step(step, level, |bench| {
        let shape = Shape::new(level, 2);
        let directory = bench.directory()?;
        let mut store = bench.open(&directory, &shape)?;
        let data = record(bytes);
        fill(&*store, 0, records / 10 + 1, &data, batch)?;
        fill(&*store, 1, records, &data, batch)?;
        store.settle()?;
        if reopen {
            store.close()?;
            store = bench.open(&directory, &shape)?;
            store.settle()?;
        }
        store.scan(0)?;
        let size = (records, records * bytes as u64);
        bench.time(step, size, None, |_| scan_all(&*store, records))?;
        store.close()
    });
}

fn scan_all(store: &dyn Store, records: u64) -> Result<(), Unable> {
    let Scanned { records: found, .. } = store.scan(1)?;
    if found == records {
        return Ok(());
    }
    Err(Unable(format!("failed: {found} of {records} records")))
}

pub fn get(bench: &mut Bench) {
    const GETS: u64 = 200_000;
    // These records do not fill the active segment of 64 MB, appended one by one or in batches.
    let cases = [
        (
            "finished segments, appended 1 at a time",
            1_000_000,
            1,
            true,
        ),
        (
            "finished segments, appended 100 at a time",
            1_000_000,
            100,
            true,
        ),
        ("active segment, appended 1 at a time", 200_000, 1, false),
        (
            "active segment, appended 100 at a time",
            200_000,
            100,
            false,
        ),
    ];
    for (step, records, batch, reopen) in cases {
        let (records, gets) = (bench.count(records), bench.count(GETS));
        random_gets(bench, step, (records, gets), batch, reopen);
    }
}

fn random_gets(
    bench: &mut Bench,
    step: &str,
    (records, gets): (u64, u64),
    batch: u64,
    reopen: bool,
) {
    let level = bench.loose();
    bench.step(step, level, |bench| {
        let shape = Shape::new(level, 1);
        let directory = bench.directory()?;
        let mut store = bench.open(&directory, &shape)?;
        fill(&*store, 0, records, &record(128), batch)?;
        store.settle()?;
        if reopen {
            store.close()?;
            store = bench.open(&directory, &shape)?;
            store.settle()?;
        }
        // Without the newest half, all records are in finished segments if any are.
        let among = if reopen { records.div_ceil(2) } else { records };
        let mut random = Random(7);
        let warm = Instant::now();
        let mut tried = 0;
        while tried < gets.div_ceil(10) && warm.elapsed() < WARM {
            get_one(&*store, random.below(among))?;
            tried += 1;
        }
        // A system that reads the whole store for each get does fewer gets.
        let each = warm.elapsed().as_secs_f64() / tried as f64;
        let gets = gets.min((MOST.as_secs_f64() / each) as u64).max(1);
        bench.time(step, (gets, gets * 128), None, |latencies| {
            (0..gets).try_for_each(|_| latencies.time(|| get_one(&*store, random.below(among))))
        })?;
        store.close()
    });
}

fn get_one(store: &dyn Store, number: u64) -> Result<(), Unable> {
    match store.get(0, number)? {
        128 => Ok(()),
        _ => unable("failed: another record"),
    }
}

pub fn ten_thousand_gets(bench: &mut Bench) {
    const RECORDS: u64 = 10_000;
    let records = bench.count(RECORDS);
    let level = bench.loose();
    let step = "as published";
    bench.step(step, level, |bench| {
        let root = bench.directory()?;
        let system = bench.system;
        bench.time(step, (1, 0), None, |_| {
            let directory = tempfile::tempdir_in(root.path())?;
            let store = (system.open)(directory.path(), &Shape::new(level, 1))?;
            fill(&*store, 0, records, &record(128), 100)?;
            let mut random = Random(7);
            for _ in 0..100 {
                get_one(&*store, random.below(records))?;
            }
            store.close()
        })?;
        bench.note(Some("filled, 100 random gets, removed".to_owned()));
        Ok(())
    });
    random_gets(
        bench,
        "steady, active segment",
        (records, 10_000),
        100,
        false,
    );
    random_gets(
        bench,
        "steady, finished segments",
        (records, 10_000),
        100,
        true,
    );
}

pub fn ten_thousand_in_order(bench: &mut Bench) {
    const RECORDS: u64 = 10_000;
    let records = bench.count(RECORDS);
    let level = bench.loose();
    let step = "as published";
    bench.step(step, level, |bench| {
        let root = bench.directory()?;
        let system = bench.system;
        bench.time(step, (1, 0), None, |_| {
            let directory = tempfile::tempdir_in(root.path())?;
            let store = (system.open)(directory.path(), &Shape::new(level, 2))?;
            fill(&*store, 1, records, &record(128), 100)?;
            scan_all(&*store, records)?;
            store.close()
        })?;
        bench.note(Some("filled, read once, removed".to_owned()));
        Ok(())
    });
    all_in_order(bench, "steady, active segment", 128, records, 100, false);
    all_in_order(bench, "steady, finished segments", 128, records, 100, true);
}
