//! The interface between workloads and systems, so that all systems do the same work.

use std::fmt;
use std::path::Path;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Durability of an append when it returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// In the process: a crash of it loses the append.
    Accepted,
    /// Given to the operating system: survives a crash of the process, not a power cut.
    Written,
    /// Flushed to the device before it returns.
    Durable,
}

impl fmt::Display for Level {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Accepted => "accepted",
            Self::Written => "written",
            Self::Durable => "durable",
        })
    }
}

/// Why a system has no figure for a workload.
#[derive(Debug, Clone)]
pub struct Unable(pub String);

pub fn unable<T>(why: &str) -> Result<T, Unable> {
    Err(Unable(why.to_owned()))
}

impl<E: std::error::Error> From<E> for Unable {
    fn from(error: E) -> Self {
        Self(format!("failed: {error}"))
    }
}

/// Requirements of a workload for its store. A missing value means the system's default.
#[derive(Debug, Clone)]
pub struct Shape {
    pub level: Level,
    /// Logs by number, from 0.
    pub logs: u32,
    pub segment_bytes: Option<u64>,
    /// Records after which a segment ends, for systems that count them.
    pub segment_records: Option<u64>,
    /// The largest request, in records.
    pub batch_records: u32,
    /// The largest request, in bytes of data.
    pub batch_bytes: u32,
    /// Number of shards. If given, an append names a key instead of a log.
    pub shards: Option<u16>,
}

impl Shape {
    pub fn new(level: Level, logs: u32) -> Self {
        Self {
            level,
            logs,
            segment_bytes: None,
            segment_records: None,
            batch_records: 1000,
            batch_bytes: 1 << 20,
            shards: None,
        }
    }
}

/// Result of a scan.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Scanned {
    pub records: u64,
    /// Bytes of record data. The scan read every record.
    pub bytes: u64,
}

/// A system with a directory open.
pub trait Store: Send + Sync {
    /// Appends, from one thread. `in_flight` is the maximum number of requests under way, for systems that
    /// accept requests without waiting. Other systems ignore it.
    fn writer(&self, in_flight: Option<usize>) -> Box<dyn Writer + '_>;

    /// Length of the data of one record.
    fn get(&self, _log: u32, _number: u64) -> Result<usize, Unable> {
        unable("no read by number")
    }

    /// Reads a log from its first record to its last.
    fn scan(&self, log: u32) -> Result<Scanned, Unable>;

    /// Makes all earlier appends durable, and waits for background work.
    fn settle(&self) -> Result<(), Unable>;

    /// Drops the records of each log before the given number.
    fn forget(&self, _tails: &[u64]) -> Result<(), Unable> {
        unable("nothing can be dropped by number")
    }

    /// Stores the positions of all shards durably under this name.
    fn checkpoint(&self, _id: &str) -> Result<(), Unable> {
        unable("no checkpoints over logs")
    }

    /// Returns the number of shards in the newest checkpoint.
    fn load_checkpoint(&self) -> Result<usize, Unable> {
        unable("no checkpoints over logs")
    }

    /// Number of flushes so far, if the system counts them.
    fn flushes(&self) -> Option<u64> {
        None
    }

    /// Phases of the time that opening took, if the system reports them.
    fn opening(&self) -> Option<String> {
        None
    }

    /// Closes the store in the system's regular way.
    fn close(self: Box<Self>) -> Result<(), Unable>;
}

/// Appends of one thread.
pub trait Writer {
    /// Sends one request for one log. Returns when it is as durable as the store's shape demands, or earlier
    /// if more requests may be in flight.
    fn append(&mut self, log: u32, records: &[Bytes]) -> Result<(), Unable>;

    /// One request for several logs.
    fn append_many(&mut self, _parts: &[(u32, &[Bytes])]) -> Result<(), Unable> {
        unable("no batch over several logs")
    }

    /// Waits for all requests in flight.
    fn finish(&mut self) -> Result<(), Unable> {
        Ok(())
    }
}

/// Operations in which a variant of a system is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Append,
    Get,
    Scan,
    Open,
}

/// A system, or a variant of one.
pub struct System {
    pub name: &'static str,
    pub about: &'static str,
    pub roles: &'static [Role],
    /// Describes how the system reaches a level, in the system's terms.
    pub flush: fn(Level) -> Result<&'static str, Unable>,
    pub open: fn(&Path, &Shape) -> Result<Box<dyn Store>, Unable>,
}
