//! okaywal: one log; entries of chunks, read back by position or by replaying all at a start.

use std::io;
use std::path::Path;
use std::sync::Mutex;

use bytes::Bytes;
use okaywal::{
    Configuration, Entry, EntryId, LogManager, LogPosition, ReadChunkResult, SegmentReader,
    WriteAheadLog,
};
use std::io::Read;

use crate::store::{Level, Scanned, Shape, Store, Unable, Writer, unable};

struct OkayWal {
    log: WriteAheadLog,
    /// Position of each record. okaywal leaves this to its caller.
    positions: Mutex<Vec<LogPosition>>,
}

/// Reads every chunk at a start.
#[derive(Debug)]
struct Replay;

impl LogManager for Replay {
    fn recover(&mut self, entry: &mut Entry<'_>) -> io::Result<()> {
        while let ReadChunkResult::Chunk(mut chunk) = entry.read_chunk()? {
            chunk.read_all()?;
        }
        Ok(())
    }

    fn checkpoint_to(
        &mut self,
        _: EntryId,
        _: &mut SegmentReader,
        _: &WriteAheadLog,
    ) -> io::Result<()> {
        Ok(())
    }
}

pub fn flush(level: Level) -> Result<&'static str, Unable> {
    match level {
        Level::Accepted | Level::Written => unable("every commit flushes"),
        Level::Durable => Ok("commit: fdatasync, shared by threads that wait"),
    }
}

pub fn open(directory: &Path, shape: &Shape) -> Result<Box<dyn Store>, Unable> {
    if shape.logs > 1 || shape.shards.is_some() {
        return unable("one log only");
    }
    if shape.segment_bytes.is_some() || shape.segment_records.is_some() {
        return unable("what is finished is checkpointed and gone: no many segments");
    }
    let log = Configuration::default_for(directory)
        .preallocate_bytes(64 << 20)
        .checkpoint_after_bytes(u64::MAX)
        .open(Replay)?;
    Ok(Box::new(OkayWal {
        log,
        positions: Mutex::default(),
    }))
}

impl Store for OkayWal {
    fn writer(&self, _: Option<usize>) -> Box<dyn Writer + '_> {
        Box::new(OkayWriter(self))
    }

    fn get(&self, _: u32, number: u64) -> Result<usize, Unable> {
        let index = usize::try_from(number)?;
        let position = self
            .positions
            .lock()
            .map_err(|_| poisoned())?
            .get(index)
            .copied();
        let Some(position) = position else {
            return unable("records are read by a position that the caller keeps in memory");
        };
        let mut reader = self.log.read_at(position)?;
        let mut data = Vec::with_capacity(reader.bytes_remaining() as usize);
        reader.read_to_end(&mut data)?;
        if !reader.crc_is_valid()? {
            return unable("failed: a checksum does not match");
        }
        Ok(data.len())
    }

    fn scan(&self, _: u32) -> Result<Scanned, Unable> {
        unable("is read in order at a start only: its opening replays all")
    }

    fn settle(&self) -> Result<(), Unable> {
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<(), Unable> {
        self.log.shutdown()?;
        Ok(())
    }
}

fn poisoned() -> Unable {
    Unable("failed: a thread panicked".to_owned())
}

struct OkayWriter<'a>(&'a OkayWal);

impl Writer for OkayWriter<'_> {
    fn append(&mut self, _: u32, records: &[Bytes]) -> Result<(), Unable> {
        let mut entry = self.0.log.begin_entry()?;
        let mut positions = Vec::with_capacity(records.len());
        for record in records {
            positions.push(entry.write_chunk(record)?.position);
        }
        // Positions are kept in the order of the entries.
        let mut kept = self.0.positions.lock().map_err(|_| poisoned())?;
        kept.extend(positions);
        drop(kept);
        entry.commit()?;
        Ok(())
    }
}
