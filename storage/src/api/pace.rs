//! Progress of a verification, its rate limit, and its stop signal.

use std::io;
use std::time::{Duration, Instant};

use crate::api::finding::Finding;
use crate::base::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::base::sync::{Condvar, Mutex};

/// Report of a verification while it runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VerifyProgress {
    /// Bytes checked so far.
    pub checked_bytes: u64,
    /// Bytes to check in all; may grow.
    pub total_bytes: u64,
    /// Findings since the last report.
    pub findings: Vec<Finding>,
}

/// Steers a verification from outside.
#[derive(Debug, Default)]
pub struct Control {
    stopped: AtomicBool,
    bytes_per_second: AtomicU64,
    /// For the thread that waits for the rate.
    sleeping: Mutex<()>,
    woken: Condvar,
}

impl Control {
    /// Creates a control that allows at most this number of bytes per second; 0 = no bound.
    pub fn new(bytes_per_second: u64) -> Self {
        Self {
            bytes_per_second: AtomicU64::new(bytes_per_second),
            ..Self::default()
        }
    }

    /// Ends the verification within one step.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        let _awake = self.sleeping.lock();
        self.woken.notify_all();
    }

    /// Whether the verification must end.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Waits for this time, or until the verification must end.
    pub(crate) fn wait(&self, time: Duration) {
        let mut sleeping = self.sleeping.lock();
        if !self.is_stopped() {
            self.woken.wait_for(&mut sleeping, time);
        }
    }
}

/// Reason why a verification did not finish.
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

/// Keeps to a rate: waits in proportion to the bytes read.
pub(crate) struct Pace<'a> {
    control: &'a Control,
    /// Time at which all bytes so far fit the rate.
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

    /// Waits until the earlier bytes fit the rate, then charges `bytes` more.
    pub(crate) fn spend(&mut self, bytes: u64) -> Result<(), Stop> {
        let rate = self.control.bytes_per_second.load(Ordering::Relaxed);
        if rate > 0 {
            let mut now = (self.now)();
            let due = self.due.unwrap_or(now);
            while now < due && !self.control.is_stopped() {
                self.control.wait(due - now);
                now = (self.now)();
            }
            // Unused time is not credited.
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
