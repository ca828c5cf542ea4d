//! Values of many series, gathered in a buffer: one request for all of it.

use bytes::Bytes;

use super::Twice;
use crate::measure::{Bench, Random, record};
use crate::store::{Level, Shape, Store, Unable, Writer};

/// Bytes of the series and the time of a value.
const KEY_BYTES: usize = 16;

const SERIES: u32 = 1_000;
const BATCH: u64 = 100;
/// Bytes of a value with its key and its time.
const VALUE: u64 = 32;

pub fn series(bench: &mut Bench) {
    for count in [1, 20, 100, 500, 1_000] {
        gathered(
            bench,
            &format!("{count} series"),
            count,
            64 << 10,
            Level::Durable,
        );
    }
}

pub fn buffers(bench: &mut Bench) {
    for kilobytes in [64, 128, 512, 1024, 2048] {
        for level in [Level::Durable, Level::Written] {
            let name = format!("{level}, {kilobytes} kB");
            gathered(bench, &name, SERIES, kilobytes << 10, level);
        }
    }
}

/// Gathers values by series until the buffer is full, then appends them all.
struct Buffer<'a> {
    writer: Box<dyn Writer + 'a>,
    full: usize,
    gathered: usize,
    values: Vec<Vec<Bytes>>,
    touched: Vec<u32>,
}

impl<'a> Buffer<'a> {
    fn new(store: &'a dyn Store, series: u32, full: usize) -> Self {
        Self {
            writer: store.writer(None),
            full,
            gathered: 0,
            values: vec![Vec::new(); series as usize],
            touched: Vec::new(),
        }
    }

    fn add(&mut self, series: u32, value: Bytes) -> Result<(), Unable> {
        self.gathered += value.len() + KEY_BYTES;
        let values = &mut self.values[series as usize];
        if values.is_empty() {
            self.touched.push(series);
        }
        values.push(value);
        if self.gathered < self.full {
            return Ok(());
        }
        self.append()
    }

    fn append(&mut self) -> Result<(), Unable> {
        if self.touched.is_empty() {
            return Ok(());
        }
        let values = &self.values;
        let part = |series: &u32| (*series, &values[*series as usize][..]);
        let parts: Vec<(u32, &[Bytes])> = self.touched.iter().map(part).collect();
        self.writer.append_many(&parts)?;
        for series in self.touched.drain(..) {
            self.values[series as usize].clear();
        }
        self.gathered = 0;
        Ok(())
    }

    fn finish(mut self) -> Result<(), Unable> {
        self.append()?;
        self.writer.finish()
    }
}

fn values() -> Vec<Bytes> {
    (8..=20).map(record).collect()
}

fn gathered(bench: &mut Bench, name: &str, series: u32, full: usize, level: Level) {
    let mut shape = Shape::new(level, series);
    shape.batch_records = (full / KEY_BYTES) as u32;
    shape.batch_bytes = full as u32;
    let values = values();
    Twice {
        name: name.to_owned(),
        shape,
        published: bench.count(500_000),
        steady: 1_000_000,
        each_bytes: 14,
        work: &|store, operations, _| {
            let mut buffer = Buffer::new(store, series, full);
            let mut random = Random(5);
            for number in 0..operations {
                let series = random.below(u64::from(series)) as u32;
                buffer.add(series, values[(number % 13) as usize].clone())?;
            }
            buffer.finish()
        },
    }
    .run(bench);
}

/// Appends batches of 100 values of one series. Drops written values whenever `rotate` bytes have
/// gathered.
pub fn rotation(bench: &mut Bench) {
    for megabytes in [16u64, 32, 64] {
        let level = Level::Written;
        let mut shape = Shape::new(level, SERIES);
        shape.segment_bytes = Some(megabytes << 20);
        let rotate = bench.count(megabytes << 20);
        let values = 3 * rotate / VALUE;
        let step = format!("every {megabytes} MB, as published");
        bench.step(&step, level, |bench| {
            let root = bench.directory()?;
            let system = bench.system;
            bench.time(&step, (values, 0), None, |_| {
                let directory = tempfile::tempdir_in(root.path())?;
                let store = (system.open)(directory.path(), &shape)?;
                rotate_and_drop(&*store, values, rotate)?;
                store.close()
            })
        });
        let step = format!("every {megabytes} MB, steady");
        bench.step(&step, level, |bench| {
            let directory = bench.directory()?;
            let store = bench.open(&directory, &shape)?;
            store.settle()?;
            bench.time(&step, (values, values * 14), Some(&*store), |_| {
                rotate_and_drop(&*store, values, rotate)
            })?;
            store.close()
        });
    }
}

fn rotate_and_drop(store: &dyn Store, values: u64, rotate: u64) -> Result<(), Unable> {
    // A system that cannot drop records reports that before it is filled.
    store.forget(&[])?;
    let batch = vec![record(14); BATCH as usize];
    let mut tails = vec![0; SERIES as usize];
    let mut writer = store.writer(None);
    let mut since = 0;
    for number in 0..values / BATCH {
        let series = (number % u64::from(SERIES)) as u32;
        writer.append(series, &batch)?;
        tails[series as usize] += BATCH;
        since += BATCH * VALUE;
        if since >= rotate {
            since = 0;
            writer.finish()?;
            store.forget(&tails)?;
        }
    }
    writer.finish()
}
