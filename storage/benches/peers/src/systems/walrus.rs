//! walrus: topics in blocks of 10 MB; reading a record consumes it.

use std::path::Path;

use bytes::Bytes;
use walrus_rust::{FsyncSchedule, ReadConsistency, Walrus};

use crate::store::{Level, Scanned, Shape, Store, Unable, Writer, unable};

/// Each topic has a block of 10 MB of its own.
const MOST_LOGS: u32 = 1000;
/// Maximum number of records in a batch.
const MOST_RECORDS: usize = 2000;

struct Topics {
    walrus: Walrus,
    logs: Vec<String>,
}

pub fn flush(level: Level) -> Result<&'static str, Unable> {
    match level {
        Level::Accepted => unable("always writes"),
        Level::Written => Ok("FsyncSchedule::NoFsync: write; never flushed"),
        Level::Durable => Ok("FsyncSchedule::SyncEach: write to a file opened with O_SYNC"),
    }
}

pub fn open(directory: &Path, shape: &Shape) -> Result<Box<dyn Store>, Unable> {
    if shape.shards.is_some() {
        return unable("no routing by key");
    }
    if shape.logs > MOST_LOGS {
        return unable("a block of 10 MB for each topic");
    }
    if shape.segment_bytes.is_some() || shape.segment_records.is_some() {
        return unable("files of 1 GB, whatever is in them");
    }
    let Some(key) = directory.file_name().and_then(|name| name.to_str()) else {
        return unable("failed: the directory has no name");
    };
    let walrus = Walrus::with_consistency_and_schedule_for_key(
        key,
        ReadConsistency::AtLeastOnce {
            persist_every: 100_000_000,
        },
        match shape.level {
            Level::Durable => FsyncSchedule::SyncEach,
            _ => FsyncSchedule::NoFsync,
        },
    )?;
    Ok(Box::new(Topics {
        walrus,
        logs: (0..shape.logs).map(|log| format!("log-{log:08}")).collect(),
    }))
}

impl Store for Topics {
    fn writer(&self, _: Option<usize>) -> Box<dyn Writer + '_> {
        Box::new(TopicWriter(self))
    }

    fn scan(&self, log: u32) -> Result<Scanned, Unable> {
        let mut scanned = Scanned::default();
        loop {
            let topic = &self.logs[log as usize];
            // This call consumes the records, so that the next call continues behind them.
            let records = self.walrus.batch_read_for_topic(topic, 256 << 10, true)?;
            if records.is_empty() {
                return Ok(scanned);
            }
            scanned.records += records.len() as u64;
            scanned.bytes += records
                .iter()
                .map(|record| record.data.len() as u64)
                .sum::<u64>();
        }
    }

    fn settle(&self) -> Result<(), Unable> {
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<(), Unable> {
        Ok(())
    }
}

struct TopicWriter<'a>(&'a Topics);

impl Writer for TopicWriter<'_> {
    fn append(&mut self, log: u32, records: &[Bytes]) -> Result<(), Unable> {
        let store = self.0;
        let topic = &store.logs[log as usize];
        match records {
            [record] => store.walrus.append_for_topic(topic, record)?,
            _ if records.len() > MOST_RECORDS => return unable("2,000 records a batch at most"),
            _ => {
                let records: Vec<&[u8]> = records.iter().map(|record| &record[..]).collect();
                store.walrus.batch_append_for_topic(topic, &records)?;
            }
        }
        Ok(())
    }
}
