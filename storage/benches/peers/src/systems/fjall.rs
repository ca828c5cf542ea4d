//! fjall: a log-structured tree with a journal; a log is a range of keys.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode};

use crate::store::{Level, Scanned, Shape, Store, Unable, Writer, unable};

struct Fjall {
    database: Database,
    records: Keyspace,
    tails: Vec<AtomicU64>,
    level: Level,
}

pub fn flush(level: Level) -> Result<&'static str, Unable> {
    Ok(match level {
        Level::Accepted => "manual_journal_persist: in its buffer",
        Level::Written => "default: write; not flushed",
        Level::Durable => "persist(SyncData) by each append",
    })
}

pub fn open(directory: &Path, shape: &Shape) -> Result<Box<dyn Store>, Unable> {
    let database = Database::builder(directory).open()?;
    let manual = shape.level == Level::Accepted;
    let records = database.keyspace("records", || {
        KeyspaceCreateOptions::default().manual_journal_persist(manual)
    })?;
    let logs = shape.shards.map_or(shape.logs, u32::from);
    Ok(Box::new(Fjall {
        database,
        records,
        tails: (0..logs).map(|_| AtomicU64::new(0)).collect(),
        level: shape.level,
    }))
}

fn key(log: u32, number: u64) -> [u8; 12] {
    let mut key = [0; 12];
    key[..4].copy_from_slice(&log.to_be_bytes());
    key[4..].copy_from_slice(&number.to_be_bytes());
    key
}

impl Store for Fjall {
    fn writer(&self, _: Option<usize>) -> Box<dyn Writer + '_> {
        Box::new(FjallWriter(self))
    }

    fn get(&self, log: u32, number: u64) -> Result<usize, Unable> {
        match self.records.get(key(log, number))? {
            Some(record) => Ok(record.len()),
            None => unable("failed: a record is not there"),
        }
    }

    fn scan(&self, log: u32) -> Result<Scanned, Unable> {
        let mut scanned = Scanned::default();
        for record in self.records.prefix(log.to_be_bytes()) {
            scanned.records += 1;
            scanned.bytes += record.value()?.len() as u64;
        }
        Ok(scanned)
    }

    fn settle(&self) -> Result<(), Unable> {
        self.database.persist(PersistMode::SyncData)?;
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<(), Unable> {
        self.database.persist(PersistMode::SyncAll)?;
        Ok(())
    }
}

struct FjallWriter<'a>(&'a Fjall);

impl Writer for FjallWriter<'_> {
    fn append(&mut self, log: u32, records: &[Bytes]) -> Result<(), Unable> {
        let store = self.0;
        let [record] = records else {
            return self.append_many(&[(log, records)]);
        };
        // With shards, the key chooses the log.
        let log = log % u32::try_from(store.tails.len())?;
        let number = store.tails[log as usize].fetch_add(1, Ordering::Relaxed);
        store.records.insert(key(log, number), &record[..])?;
        if store.level == Level::Durable {
            store.database.persist(PersistMode::SyncData)?;
        }
        Ok(())
    }

    fn append_many(&mut self, parts: &[(u32, &[Bytes])]) -> Result<(), Unable> {
        let store = self.0;
        let mut batch = store.database.batch().durability(match store.level {
            Level::Accepted => None,
            Level::Written => Some(PersistMode::Buffer),
            Level::Durable => Some(PersistMode::SyncData),
        });
        let logs = u32::try_from(store.tails.len())?;
        for (log, records) in parts {
            let log = log % logs;
            for record in *records {
                let number = store.tails[log as usize].fetch_add(1, Ordering::Relaxed);
                batch.insert(&store.records, key(log, number), &record[..]);
            }
        }
        batch.commit()?;
        Ok(())
    }
}
