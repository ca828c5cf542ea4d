//! raft-engine: one log file for all regions, an index of all entries in memory.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use raft::eraftpb::Entry;
use raft_engine::env::DefaultFileSystem;
use raft_engine::{Config, Engine, LogBatch, MessageExt, ReadableSize};

use crate::store::{Level, Scanned, Shape, Store, Unable, Writer, unable};

struct RaftEngine {
    engine: Engine<DefaultFileSystem>,
    /// Entries of each region so far. Its first index is 1.
    tails: Vec<AtomicU64>,
    durable: bool,
}

#[derive(Clone)]
struct Entries;

impl MessageExt for Entries {
    type Entry = Entry;

    fn index(entry: &Entry) -> u64 {
        entry.index
    }
}

pub fn flush(level: Level) -> Result<&'static str, Unable> {
    match level {
        Level::Accepted => unable("always writes"),
        Level::Written => Ok("write(sync = false): write; not flushed"),
        Level::Durable => Ok("write(sync = true): fdatasync, shared by threads that wait"),
    }
}

pub fn open(directory: &Path, shape: &Shape) -> Result<Box<dyn Store>, Unable> {
    let mut config = Config {
        dir: directory.to_string_lossy().into_owned(),
        batch_compression_threshold: ReadableSize(0),
        ..Config::default()
    };
    if let Some(bytes) = shape.segment_bytes {
        config.target_file_size = ReadableSize(bytes);
        config.purge_threshold = ReadableSize(bytes);
    }
    let engine = Engine::open(config)?;
    let tail = |log: u32| AtomicU64::new(engine.last_index(u64::from(log) + 1).unwrap_or(0));
    Ok(Box::new(RaftEngine {
        tails: (0..shape.shards.map_or(shape.logs, u32::from))
            .map(tail)
            .collect(),
        engine,
        durable: shape.level == Level::Durable,
    }))
}

impl Store for RaftEngine {
    fn writer(&self, _: Option<usize>) -> Box<dyn Writer + '_> {
        Box::new(RaftWriter(self))
    }

    fn get(&self, log: u32, number: u64) -> Result<usize, Unable> {
        let region = u64::from(log) + 1;
        match self.engine.get_entry::<Entries>(region, number + 1)? {
            Some(entry) => Ok(entry.data.len()),
            None => unable("failed: a record is not there"),
        }
    }

    fn scan(&self, log: u32) -> Result<Scanned, Unable> {
        let tail = self.tails[log as usize].load(Ordering::Relaxed);
        let mut scanned = Scanned::default();
        let mut entries = Vec::new();
        let mut from = 1;
        while from <= tail {
            let to = (from + 1000).min(tail + 1);
            entries.clear();
            self.engine.fetch_entries_to::<Entries>(
                u64::from(log) + 1,
                from,
                to,
                None,
                &mut entries,
            )?;
            scanned.records += entries.len() as u64;
            scanned.bytes += entries
                .iter()
                .map(|entry| entry.data.len() as u64)
                .sum::<u64>();
            from = to;
        }
        Ok(scanned)
    }

    fn settle(&self) -> Result<(), Unable> {
        self.engine.sync()?;
        Ok(())
    }

    fn forget(&self, tails: &[u64]) -> Result<(), Unable> {
        for (log, tail) in (0u64..).zip(tails).filter(|(_, tail)| **tail > 0) {
            self.engine.compact_to(log + 1, *tail);
        }
        self.engine.purge_expired_files()?;
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<(), Unable> {
        Ok(())
    }
}

struct RaftWriter<'a>(&'a RaftEngine);

impl RaftWriter<'_> {
    fn add(&self, batch: &mut LogBatch, log: u32, records: &[Bytes]) -> Result<(), Unable> {
        // With shards, the key chooses the log.
        let log = log as usize % self.0.tails.len();
        let first = self.0.tails[log].fetch_add(records.len() as u64, Ordering::Relaxed) + 1;
        let entry = |(index, data): (u64, &Bytes)| {
            let mut entry = Entry::default();
            entry.index = index;
            entry.data = data.to_vec().into();
            entry
        };
        let entries: Vec<Entry> = (first..).zip(records).map(entry).collect();
        batch.add_entries::<Entries>(log as u64 + 1, &entries)?;
        Ok(())
    }
}

impl Writer for RaftWriter<'_> {
    fn append(&mut self, log: u32, records: &[Bytes]) -> Result<(), Unable> {
        self.append_many(&[(log, records)])
    }

    fn append_many(&mut self, parts: &[(u32, &[Bytes])]) -> Result<(), Unable> {
        let mut batch = LogBatch::default();
        for (log, records) in parts {
            self.add(&mut batch, *log, records)?;
        }
        self.0.engine.write(&mut batch, self.0.durable)?;
        Ok(())
    }
}
