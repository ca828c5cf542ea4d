//! Description of one load: everything that a figure must be published with.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use wald_client::Durability;

/// Work of the callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LoadKind {
    /// Unary appends of one record.
    Append,
    /// Unary AppendBatch.
    Batch,
    /// Pipelined batches on sessions.
    Session,
    /// Whole scans of a log.
    Scan,
    /// Reads of one record at a random lsn.
    Read,
    /// Unary appends, timed until a follower has the record.
    Follow,
    /// Scans that follow the log of appends.
    Followers,
}

/// One load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) work: LoadKind,
    /// Whether it goes to the echo service instead.
    pub(crate) echo: bool,
    /// Calls, messages of sessions or followers at a time, over all connections.
    pub(crate) in_flight: usize,
    pub(crate) connections: usize,
    pub(crate) logs: usize,
    pub(crate) record_bytes: u32,
    /// Records of one call or message.
    pub(crate) batch: u32,
    pub(crate) durability: Level,
    /// Open loop: calls per second, whether or not earlier ones were answered.
    pub(crate) rate: Option<f64>,
    /// Sessions send as many messages as may be in flight, then wait for all their acks.
    pub(crate) burst: bool,
    /// Records of the log that is scanned and read.
    pub(crate) filled: u64,
    /// Prefix of the logs' names, before a slash.
    pub(crate) prefix: String,
}

/// Durability of acks, as figures spell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Level {
    /// In the daemon's memory.
    Accepted,
    /// In the operating system.
    Written,
    /// On the device.
    Durable,
    /// In the bucket of the daemon's replica.
    Replicated,
}

impl Level {
    pub(crate) fn number(self) -> i32 {
        match self {
            Self::Accepted => Durability::Accepted as i32,
            Self::Written => Durability::Written as i32,
            Self::Durable => Durability::Durable as i32,
            Self::Replicated => Durability::Replicated as i32,
        }
    }

    /// Visibility that shows records once they are acked at this level.
    pub(crate) fn visibility(self) -> i32 {
        use wald_client::Visibility;
        match self {
            Self::Accepted => Visibility::Accepted as i32,
            Self::Written => Visibility::Written as i32,
            Self::Durable => Visibility::Durable as i32,
            Self::Replicated => Visibility::Replicated as i32,
        }
    }
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            work: LoadKind::Append,
            echo: false,
            in_flight: 64,
            connections: 4,
            logs: 1,
            record_bytes: 128,
            batch: 1,
            durability: Level::Durable,
            rate: None,
            burst: false,
            filled: 1_000_000,
            prefix: "bench".to_owned(),
        }
    }
}

impl Spec {
    /// Returns this load for the echo service.
    pub(crate) fn echoed(&self) -> Self {
        Self {
            echo: true,
            ..self.clone()
        }
    }

    /// Whether the echo service has something like it.
    pub(crate) fn has_echo(&self) -> bool {
        !matches!(self.work, LoadKind::Follow | LoadKind::Followers)
    }

    pub(crate) fn log(&self, number: usize) -> String {
        match self.work {
            // Another size is another log.
            LoadKind::Scan => format!("{}/filled-{}", self.prefix, self.record_bytes),
            LoadKind::Read => format!("{}/read-{}", self.prefix, self.record_bytes),
            LoadKind::Follow => format!("{}/followed", self.prefix),
            _ => format!("{}/{number}", self.prefix),
        }
    }

    /// Connections that are made: never more than calls, but a follower has its own.
    pub(crate) fn used_connections(&self) -> usize {
        match self.work {
            LoadKind::Follow => self.connections.max(1),
            _ => self.connections.clamp(1, self.in_flight.max(1)),
        }
    }
}

/// Duration of a load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Extent {
    For(Duration),
    Count(u64),
}

/// Time in which answers count.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MeasureWindow {
    pub(crate) begin: Instant,
    pub(crate) end: Option<Instant>,
    /// Open loop: calls that were due within the window count, whenever they are answered.
    /// Otherwise a server that falls behind would look well.
    pub(crate) by_due: bool,
}

impl MeasureWindow {
    fn holds(&self, at: Instant) -> bool {
        at >= self.begin && self.end.is_none_or(|end| at < end)
    }

    /// Whether a call counts that was due and answered then.
    pub(crate) fn counts(&self, due: Instant, answered: Instant) -> bool {
        self.holds(if self.by_due { due } else { answered })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_answers_count_in_an_open_loop_only() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut window = MeasureWindow {
            begin: at(1),
            end: Some(at(3)),
            by_due: false,
        };
        assert!(window.counts(at(0), at(2)));
        assert!(!window.counts(at(2), at(5)));
        window.by_due = true;
        assert!(!window.counts(at(0), at(2)));
        assert!(window.counts(at(2), at(5)));
    }
}
