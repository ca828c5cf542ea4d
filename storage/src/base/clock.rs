//! Time, behind a trait, so that tests and simulations have their own.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::base::ids::Timestamp;

/// The engine's only source of time.
pub trait Clock: Send + Sync + 'static {
    /// Wall-clock time; may jump.
    fn now(&self) -> Timestamp;
    /// Time that only goes forward, for durations.
    fn monotonic(&self) -> Instant;
}

/// The system's clocks.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[allow(clippy::disallowed_methods, reason = "this is the one place")]
    fn now(&self) -> Timestamp {
        let micros = match SystemTime::now().duration_since(UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_micros()).unwrap_or(i64::MAX),
            Err(before) => i64::try_from(before.duration().as_micros()).map_or(i64::MIN, |m| -m),
        };
        Timestamp::from_micros(micros)
    }

    #[allow(clippy::disallowed_methods, reason = "this is the one place")]
    fn monotonic(&self) -> Instant {
        Instant::now()
    }
}
