//! IronWal: a directory of segments for each stream, each flushed separately.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use ironwal::sharded::ShardedWal;
use ironwal::{ReadStrategy, SyncMode, Wal, WalOptions};

use crate::store::{Level, Scanned, Shape, Store, Unable, Writer, unable};

struct IronWal {
    wal: Wal,
    sharded: Option<ShardedWal>,
    logs: Vec<String>,
    level: Level,
    /// The newest checkpoint, which is found by its name.
    checkpoints: AtomicU64,
}

pub fn flush(level: Level) -> Result<&'static str, Unable> {
    match level {
        Level::Accepted => unable("always writes"),
        Level::Written => Ok("SyncMode::Async: write; never flushed"),
        Level::Durable => Ok("SyncMode::Strict: fdatasync of the stream's file by each append"),
    }
}

pub fn open(directory: &Path, shape: &Shape) -> Result<Box<dyn Store>, Unable> {
    with(directory, shape, ReadStrategy::StandardIo)
}

pub fn open_mapped(directory: &Path, shape: &Shape) -> Result<Box<dyn Store>, Unable> {
    with(directory, shape, ReadStrategy::Mmap)
}

fn with(
    directory: &Path,
    shape: &Shape,
    read_strategy: ReadStrategy,
) -> Result<Box<dyn Store>, Unable> {
    let mut options = WalOptions::new(directory);
    options.sync_mode = match shape.level {
        Level::Durable => SyncMode::Strict,
        _ => SyncMode::Async,
    };
    options.read_strategy = read_strategy;
    if let Some(bytes) = shape.segment_bytes {
        options.max_segment_size = bytes;
    }
    if let Some(records) = shape.segment_records {
        options.max_entries_per_segment = records;
    }
    let sharded = shape
        .shards
        .map(|count| ShardedWal::new(options.clone(), count))
        .transpose()?;
    let wal = match &sharded {
        Some(sharded) => sharded.inner().clone(),
        None => Wal::new(options)?,
    };
    let name = |number: u32| format!("log-{number:08}");
    Ok(Box::new(IronWal {
        wal,
        sharded,
        logs: (0..shape.logs).map(name).collect(),
        level: shape.level,
        checkpoints: AtomicU64::new(0),
    }))
}

impl Store for IronWal {
    fn writer(&self, _: Option<usize>) -> Box<dyn Writer + '_> {
        Box::new(IronWriter(self))
    }

    fn get(&self, log: u32, number: u64) -> Result<usize, Unable> {
        match self.wal.get(&self.logs[log as usize], number)? {
            Some(record) => Ok(record.len()),
            None => unable("failed: a record is not there"),
        }
    }

    fn scan(&self, log: u32) -> Result<Scanned, Unable> {
        let mut scanned = Scanned::default();
        for record in self.wal.iter(&self.logs[log as usize], 0)? {
            scanned.records += 1;
            scanned.bytes += record?.len() as u64;
        }
        Ok(scanned)
    }

    fn settle(&self) -> Result<(), Unable> {
        // There is no flush call, and no background work.
        Ok(())
    }

    fn forget(&self, tails: &[u64]) -> Result<(), Unable> {
        for (log, tail) in self.logs.iter().zip(tails).filter(|(_, tail)| **tail > 0) {
            self.wal.truncate(log, *tail)?;
        }
        Ok(())
    }

    fn checkpoint(&self, id: &str) -> Result<(), Unable> {
        let Some(sharded) = &self.sharded else {
            return unable("not opened in shards");
        };
        if self.level != Level::Durable {
            sharded.flush_all()?;
        }
        sharded.create_checkpoint(id.as_bytes())?;
        self.checkpoints.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn load_checkpoint(&self) -> Result<usize, Unable> {
        let Some(sharded) = &self.sharded else {
            return unable("not opened in shards");
        };
        let (_, data) = sharded.load_latest_checkpoint()?;
        Ok(data.offsets.iter().filter(|offset| **offset > 0).count())
    }

    fn close(self: Box<Self>) -> Result<(), Unable> {
        Ok(())
    }
}

struct IronWriter<'a>(&'a IronWal);

impl Writer for IronWriter<'_> {
    fn append(&mut self, log: u32, records: &[Bytes]) -> Result<(), Unable> {
        let store = self.0;
        match (&store.sharded, records) {
            (Some(sharded), [record]) => {
                sharded.append(&log.to_le_bytes(), record)?;
            }
            (Some(sharded), _) => {
                let records: Vec<&[u8]> = records.iter().map(|record| &record[..]).collect();
                sharded.append_batch_for_key(&log.to_le_bytes(), &records)?;
            }
            (None, [record]) => {
                store.wal.append(&store.logs[log as usize], record)?;
            }
            (None, _) => {
                let records: Vec<&[u8]> = records.iter().map(|record| &record[..]).collect();
                store
                    .wal
                    .append_batch(&store.logs[log as usize], &records)?;
            }
        }
        Ok(())
    }

    fn append_many(&mut self, parts: &[(u32, &[Bytes])]) -> Result<(), Unable> {
        let Some(sharded) = &self.0.sharded else {
            return unable("no batch over several logs");
        };
        let entries: Vec<(Vec<u8>, Vec<u8>)> = parts
            .iter()
            .flat_map(|(key, records)| records.iter().map(move |record| (key, record)))
            .map(|(key, record)| (key.to_le_bytes().to_vec(), record.to_vec()))
            .collect();
        sharded.append_batch(&entries)?;
        Ok(())
    }
}
