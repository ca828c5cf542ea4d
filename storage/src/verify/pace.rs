//! How far a verification is, how fast it may go, and whether it is to stop.

use std::io;
use std::time::{Duration, Instant};

use super::Finding;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex};

/// What a verification says while it runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes checked so far.
    pub checked_bytes: u64,
    /// Bytes to check in all; may grow.
    pub total_bytes: u64,
    /// What was found since the last time.
    pub findings: Vec<Finding>,
}

/// Steers a verification from outside.
#[derive(Debug, Default)]
pub struct Control {
    stopped: AtomicBool,
    bytes_per_second: AtomicU64,
    /// For whoever waits out the rate.
    sleeping: Mutex<()>,
    woken: Condvar,
}

impl Control {
    /// Reads at most so many bytes a second; 0 = no bound.
    pub fn new(bytes_per_second: u64) -> Self {
        Self {
            bytes_per_second: AtomicU64::new(bytes_per_second),
            ..Self::default()
        }
    }

    /// Ends it within one step.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        let _awake = self.sleeping.lock();
        self.woken.notify_all();
    }

    /// Whether it is to end.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Waits, unless it is to end first.
    pub(crate) fn wait(&self, time: Duration) {
        let mut sleeping = self.sleeping.lock();
        if !self.is_stopped() {
            self.woken.wait_for(&mut sleeping, time);
        }
    }
}

/// Why a verification did not come to its end.
#[derive(Debug)]
pub(crate) enum Stop {
    Stopped,
    Io(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Keeps to a rate: what was read is paid for by waiting.
pub(crate) struct Pace<'a> {
    control: &'a Control,
    /// When all that was read so far is paid for.
    due: Option<Instant>,
    now: &'a dyn Fn() -> Instant,
}

impl<'a> Pace<'a> {
    pub(crate) fn new(control: &'a Control, now: &'a dyn Fn() -> Instant) -> Self {
        Self {
            control,
            due: None,
            now,
        }
    }

    /// Waits until what was read before is paid for, then charges `bytes` more.
    pub(crate) fn spend(&mut self, bytes: u64) -> Result<(), Stop> {
        let rate = self.control.bytes_per_second.load(Ordering::Relaxed);
        if rate > 0 {
            let mut now = (self.now)();
            let due = self.due.unwrap_or(now);
            while now < due && !self.control.is_stopped() {
                self.control.wait(due - now);
                now = (self.now)();
            }
            // Time that was not used is not made up for.
            let micros = u128::from(bytes) * 1_000_000 / u128::from(rate);
            let cost = Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX));
            self.due = due.max(now).checked_add(cost);
        }
        match self.control.is_stopped() {
            true => Err(Stop::Stopped),
            false => Ok(()),
        }
    }
}
