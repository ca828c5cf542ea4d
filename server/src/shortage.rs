//! Shortage of a budget: a request found no room a moment ago.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Duration of a shortage after the last refusal.
const LASTS: Duration = Duration::from_secs(2);

/// Time at which a request found no room.
#[derive(Debug)]
pub(crate) struct Shortage {
    begin: Instant,
    /// In milliseconds since `begin`; 0 = never.
    at: AtomicU64,
}

impl Shortage {
    pub(crate) fn new() -> Self {
        Self {
            begin: Instant::now(),
            at: AtomicU64::new(0),
        }
    }

    /// Notes a refusal by a budget of `limit` bytes with `total` in use, if less than an eighth is free. Otherwise the
    /// connection has used up its own share, and nobody else is in want.
    pub(crate) fn refused(&self, limit: u64, total: u64) {
        if limit.saturating_sub(total) < limit / 8 {
            self.at.store(self.now().max(1), Ordering::Relaxed);
        }
    }

    /// Whether holders of the budget must hurry.
    pub(crate) fn is_now(&self) -> bool {
        let at = self.at.load(Ordering::Relaxed);
        at > 0 && self.now().saturating_sub(at) < millis(LASTS)
    }

    fn now(&self) -> u64 {
        millis(self.begin.elapsed())
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
