//! What every workload asks of every system, so that all do the same work.

use std::fmt;
use std::path::Path;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// How safe an append is when it returns.
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

/// What a store is opened for. What is not said is the system's default.
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
    /// If given, what is appended to is a key, and the logs are so many shards.
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

/// What a scan gave.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Scanned {
    pub records: u64,
    /// Of their data, of which every record was looked at.
    pub bytes: u64,
}

/// A system with a directory open.
pub trait Store: Send + Sync {
    /// Appends, from one thread. `in_flight` is how many may be under way where the system
    /// takes them in without waiting; every other one ignores it.
    fn writer(&self, in_flight: Option<usize>) -> Box<dyn Writer + '_>;

    /// Length of the data of one record.
    fn get(&self, _log: u32, _number: u64) -> Result<usize, Unable> {
        unable("no read by number")
    }

    /// Reads a log from its first record to its last.
    fn scan(&self, log: u32) -> Result<Scanned, Unable>;

    /// Makes what was appended so far durable, and waits for what goes on in the background.
    fn settle(&self) -> Result<(), Unable>;

    /// Forgets of each log the records before the number given.
    fn forget(&self, _tails: &[u64]) -> Result<(), Unable> {
        unable("nothing can be dropped by number")
    }

    /// Names, durably, where all shards stand.
    fn checkpoint(&self, _id: &str) -> Result<(), Unable> {
        unable("no checkpoints over logs")
    }

    /// How many shards the newest such checkpoint names.
    fn load_checkpoint(&self) -> Result<usize, Unable> {
        unable("no checkpoints over logs")
    }

    /// Flushes of the log so far, where that is counted.
    fn flushes(&self) -> Option<u64> {
        None
    }

    /// Where the time of opening went, where that is told.
    fn opening(&self) -> Option<String> {
        None
    }

    /// Ends as the system wants to be ended.
    fn close(self: Box<Self>) -> Result<(), Unable>;
}

/// Appends of one thread.
pub trait Writer {
    /// One request for one log; returns when it is as safe as the store's shape says, or
    /// earlier if more may be in flight.
    fn append(&mut self, log: u32, records: &[Bytes]) -> Result<(), Unable>;

    /// One request for several logs.
    fn append_many(&mut self, _parts: &[(u32, &[Bytes])]) -> Result<(), Unable> {
        unable("no batch over several logs")
    }

    /// Waits for everything in flight.
    fn finish(&mut self) -> Result<(), Unable> {
        Ok(())
    }
}

/// What a variant of a system is compared in.
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
    /// How it reaches a level, in its own words.
    pub flush: fn(Level) -> Result<&'static str, Unable>,
    pub open: fn(&Path, &Shape) -> Result<Box<dyn Store>, Unable>,
}
