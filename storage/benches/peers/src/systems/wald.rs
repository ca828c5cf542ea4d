//! Wald's engine as a library.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Buf, Bytes};
use prost::Message;
use wald_proto::v1::RecordBatch;
use wald_proto::v1::record::Payload;
use wald_storage::{
    Administer as _, Append as _, Batch, Durability, Guard, LocalEngine, LogName, LogRecords,
    LogTarget, Lsn, Observer, Operate as _, ReadLogs as _, ReadRequest, ReadStart, ReadStrategy,
    RealDisk, Record, ScanRequest, ScanStart, Selector, StorageConfig, SyncTarget, SystemClock,
    Ticket, Visibility, block_on,
};

use crate::store::{Level, Scanned, Shape, Store, Unable, Writer, unable};

/// Maximum bytes in flight for one thread, below the limit at which the engine refuses.
const IN_FLIGHT_BYTES: usize = 4 << 20;

struct Wald {
    engine: Arc<LocalEngine>,
    logs: Vec<LogName>,
    checkpoints: LogName,
    level: Durability,
    sharded: bool,
    in_flight: usize,
    stored: bool,
    flushes: Arc<Flushes>,
    opening: String,
}

#[derive(Default)]
struct Flushes(AtomicU64);

impl Observer for Flushes {
    fn flush(&self, _: Duration) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

pub fn flush(level: Level) -> Result<&'static str, Unable> {
    Ok(match level {
        Level::Accepted => "ACCEPTED: in the engine's buffer",
        Level::Written => "WRITTEN: write; fdatasync within 100 ms",
        Level::Durable => "DURABLE: fdatasync, shared by all in flight",
    })
}

pub fn open(directory: &Path, shape: &Shape) -> Result<Box<dyn Store>, Unable> {
    with(directory, shape, 1, ReadStrategy::Pread, false)
}

pub fn open_pipelined(directory: &Path, shape: &Shape) -> Result<Box<dyn Store>, Unable> {
    with(directory, shape, 256, ReadStrategy::Pread, false)
}

pub fn open_mapped(directory: &Path, shape: &Shape) -> Result<Box<dyn Store>, Unable> {
    with(directory, shape, 1, ReadStrategy::Mmap, false)
}

pub fn open_stored(directory: &Path, shape: &Shape) -> Result<Box<dyn Store>, Unable> {
    with(directory, shape, 1, ReadStrategy::Pread, true)
}

fn with(
    directory: &Path,
    shape: &Shape,
    in_flight: usize,
    read_strategy: ReadStrategy,
    stored: bool,
) -> Result<Box<dyn Store>, Unable> {
    let defaults = StorageConfig::default();
    let config = StorageConfig {
        segment_bytes: shape.segment_bytes.unwrap_or(defaults.segment_bytes),
        max_batch_records: shape.batch_records.max(defaults.max_batch_records),
        // A record takes some bytes besides its data.
        max_batch_bytes: u64::from(shape.batch_bytes + 8 * shape.batch_records)
            .max(defaults.max_batch_bytes),
        read_strategy,
        ..defaults
    };
    let flushes = Arc::new(Flushes::default());
    let disk = RealDisk::open(directory)?;
    let observer = Arc::clone(&flushes) as Arc<dyn Observer>;
    let (engine, report) = LocalEngine::open(disk, config, Arc::new(SystemClock), observer)?;
    let name = |number| LogName::new(&format!("log/{number:08}"));
    let logs = shape.shards.map_or(shape.logs, u32::from);
    Ok(Box::new(Wald {
        engine,
        logs: (0..logs).map(name).collect::<Result<_, _>>()?,
        checkpoints: LogName::new("checkpoints")?,
        level: durability(shape.level),
        sharded: shape.shards.is_some(),
        in_flight,
        stored,
        flushes,
        opening: format!(
            "{:?} in all: checkpoint {:?}, segments {:?}, begin {:?}",
            report.duration,
            report.times.checkpoint,
            report.times.segments,
            report.times.begin
        ),
    }))
}

fn durability(level: Level) -> Durability {
    match level {
        Level::Accepted => Durability::Accepted,
        Level::Written => Durability::Written,
        Level::Durable => Durability::Durable,
    }
}

impl Wald {
    fn log(&self, number: u32) -> &LogName {
        let number = number as usize;
        if self.sharded {
            &self.logs[number % self.logs.len()]
        } else {
            &self.logs[number]
        }
    }

    fn read(&self, log: &LogName, start: ReadStart) -> Result<Bytes, Unable> {
        let request = ReadRequest {
            log: target(log),
            start,
            max_records: 1,
            max_bytes: 1 << 20,
            visibility: Some(Visibility::Accepted),
        };
        let page = block_on(self.engine.read(request))?;
        let Some(batch) = page.batches.into_iter().next() else {
            return unable("failed: a record is not there");
        };
        let mut records = RecordBatch::decode(batch.body)?.records;
        Ok(data(records.swap_remove(0).payload))
    }
}

/// Data of a record that this program appended.
fn data(payload: Option<Payload>) -> Bytes {
    match payload {
        Some(Payload::Data(data)) => data,
        _ => Bytes::new(),
    }
}

fn target(log: &LogName) -> LogTarget {
    LogTarget {
        name: log.clone(),
        log_id: None,
    }
}

fn records(log: &LogName, records: &[Bytes]) -> LogRecords {
    let record = |data: &Bytes| Record {
        data: data.clone(),
        ..Record::default()
    };
    LogRecords {
        log: log.clone(),
        records: records.iter().map(record).collect(),
        guard: Guard::default(),
        producer: None,
    }
}

impl Store for Wald {
    fn writer(&self, in_flight: Option<usize>) -> Box<dyn Writer + '_> {
        Box::new(WaldWriter {
            store: self,
            in_flight: in_flight.unwrap_or(self.in_flight),
            under_way: VecDeque::new(),
            bytes: 0,
        })
    }

    fn get(&self, log: u32, number: u64) -> Result<usize, Unable> {
        let data = self.read(self.log(log), ReadStart::Lsn(Lsn::new(number)))?;
        Ok(data.len())
    }

    fn scan(&self, log: u32) -> Result<Scanned, Unable> {
        let scan = self.engine.scan(ScanRequest {
            selector: Selector::Log(target(self.log(log))),
            start: ScanStart::First,
            until_lsn: None,
            max_records: 0,
            follow: false,
            visibility: Some(Visibility::Accepted),
            chunk_bytes: 256 << 10,
        });
        let mut scan = block_on(scan)?;
        let mut scanned = Scanned::default();
        while let Some(chunk) = block_on(scan.next())? {
            for batch in chunk.batches {
                scanned.records += u64::from(batch.count);
                if self.stored {
                    // Every byte was read and verified.
                    scanned.bytes += batch.body.remaining() as u64;
                    continue;
                }
                for record in RecordBatch::decode(batch.body)?.records {
                    scanned.bytes += data(record.payload).len() as u64;
                }
            }
        }
        Ok(scanned)
    }

    fn settle(&self) -> Result<(), Unable> {
        block_on(self.engine.sync(SyncTarget::Device, None))?;
        // The engine sorts sealed segments and makes new ones ready in the background.
        let defaults = StorageConfig::default();
        let ready = (defaults.pool_segments + defaults.reserve_segments) as u64;
        loop {
            let now = self.engine.statistics();
            let sorted = now.unsorted_bytes <= now.sorter_part_bytes;
            if sorted && now.ready_segments >= ready {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn forget(&self, tails: &[u64]) -> Result<(), Unable> {
        // Sends all trims together, since one flush carries them all.
        let trims = self.logs.iter().zip(tails).filter(|(_, tail)| **tail > 0);
        let trims = trims.map(|(log, tail)| self.engine.trim(target(log), Lsn::new(*tail)));
        for trim in trims.collect::<Vec<_>>() {
            block_on(trim)?;
        }
        Ok(())
    }

    fn checkpoint(&self, id: &str) -> Result<(), Unable> {
        let mut tails = id.as_bytes().to_vec();
        tails.resize(32, 0);
        for log in &self.logs {
            let stat = self
                .engine
                .stat(target(log), Some(Visibility::Accepted), None);
            let tail = block_on(stat).map_or(0, |stat| stat.info.tail_lsn.get());
            tails.extend_from_slice(&tail.to_le_bytes());
        }
        // All logs share one journal, so this flush covers all earlier appends.
        let mut batch = Batch::from(vec![records(&self.checkpoints, &[Bytes::from(tails)])]);
        batch.single = true;
        let ticket = self.engine.submit(None, batch, Some(Durability::Durable));
        ticket.wait()?;
        Ok(())
    }

    fn load_checkpoint(&self) -> Result<usize, Unable> {
        let checkpoint = self.read(&self.checkpoints, ReadStart::TailOffset(1))?;
        let tails = &checkpoint[32..];
        Ok(tails
            .chunks_exact(8)
            .filter(|tail| tail.iter().any(|byte| *byte != 0))
            .count())
    }

    fn flushes(&self) -> Option<u64> {
        Some(self.flushes.0.load(Ordering::Relaxed))
    }

    fn opening(&self) -> Option<String> {
        Some(self.opening.clone())
    }

    fn close(self: Box<Self>) -> Result<(), Unable> {
        block_on(self.engine.drain())?;
        Ok(())
    }
}

struct WaldWriter<'a> {
    store: &'a Wald,
    in_flight: usize,
    under_way: VecDeque<(Ticket, usize)>,
    bytes: usize,
}

impl WaldWriter<'_> {
    fn submit(&mut self, logs: Vec<LogRecords>, bytes: usize) -> Result<(), Unable> {
        while !self.under_way.is_empty() && self.bytes + bytes > IN_FLIGHT_BYTES {
            self.take()?;
        }
        let mut batch = Batch::from(logs);
        batch.single = batch.logs.len() == 1 && batch.logs[0].records.len() == 1;
        let ticket = self
            .store
            .engine
            .submit(None, batch, Some(self.store.level));
        self.under_way.push_back((ticket, bytes));
        self.bytes += bytes;
        while self.under_way.len() >= self.in_flight {
            self.take()?;
        }
        Ok(())
    }

    fn take(&mut self) -> Result<(), Unable> {
        if let Some((ticket, bytes)) = self.under_way.pop_front() {
            self.bytes -= bytes;
            self.store.engine.write_gathered();
            ticket.wait()?;
        }
        Ok(())
    }
}

impl Writer for WaldWriter<'_> {
    fn append(&mut self, log: u32, data: &[Bytes]) -> Result<(), Unable> {
        let bytes = data.iter().map(Bytes::len).sum();
        self.submit(vec![records(self.store.log(log), data)], bytes)
    }

    fn append_many(&mut self, parts: &[(u32, &[Bytes])]) -> Result<(), Unable> {
        let mut logs: Vec<(&LogName, Vec<Bytes>)> = Vec::new();
        let mut bytes = 0;
        for (log, data) in parts {
            let log = self.store.log(*log);
            bytes += data.iter().map(Bytes::len).sum::<usize>();
            // A shard may occur several times. There are few shards.
            match logs
                .iter_mut()
                .find(|(there, _)| self.store.sharded && *there == log)
            {
                Some((_, there)) => there.extend_from_slice(data),
                None => logs.push((log, data.to_vec())),
            }
        }
        let logs = logs
            .into_iter()
            .map(|(log, data)| records(log, &data))
            .collect();
        self.submit(logs, bytes)
    }

    fn finish(&mut self) -> Result<(), Unable> {
        while !self.under_way.is_empty() {
            self.take()?;
        }
        Ok(())
    }
}
