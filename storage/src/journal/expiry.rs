//! The clock that retention by age goes by.
//!
//! It follows the system's clock, with two rules: it never goes back, and it never goes more
//! than twice as fast as time passes. So where the system's clock jumps ahead by a year,
//! nothing goes at once: this one is behind then, and catches up within a year. Where it jumps
//! back, this one stands still until it is reached again.
//!
//! Nothing arrives at a time before the one that it shows (the committer sees to that). So a
//! record is never older by it than twice the time that has passed since it arrived, whatever
//! the system's clock does; and exactly as old as it is if that does not jump.
//!
//! What it shows is told by links, seals, some markers and checkpoints. A start goes on from
//! there: time in which no process ran counts as a jump ahead.

use std::time::{Duration, Instant};

use crate::ids::Timestamp;

/// Shows the time by which records are too old.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpiryClock {
    shows: Timestamp,
    /// When it was last looked at.
    at: Instant,
}

impl ExpiryClock {
    /// A clock that goes on from what it showed, at `at`.
    pub(crate) fn new(shows: Timestamp, at: Instant) -> Self {
        Self { shows, at }
    }

    /// What it shows when the system's clock shows `now`, and this much time has passed.
    pub(crate) fn advance(&mut self, now: Timestamp, progress: Instant) -> Timestamp {
        let passed = progress.saturating_duration_since(self.at);
        self.at = self.at.max(progress);
        let twice = micros(passed).saturating_mul(2);
        let fastest = self.shows.saturating_add_micros(twice);
        self.shows = self.shows.max(now).min(fastest);
        self.shows
    }
}

/// A span in microseconds, clamped to what can be said.
pub(crate) fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000;
    const YEAR: i64 = 365 * 24 * 3600 * SECOND;

    /// Lets so much time pass, while the system's clock goes to `now`.
    fn pass(clock: &mut ExpiryClock, seconds: u64, now: i64) -> i64 {
        let then = clock.at + Duration::from_secs(seconds);
        clock.advance(Timestamp::from_micros(now), then).micros()
    }

    fn clock() -> ExpiryClock {
        #[allow(clippy::disallowed_methods, reason = "an arbitrary beginning")]
        ExpiryClock::new(Timestamp::from_micros(0), Instant::now())
    }

    #[test]
    fn it_shows_what_the_clock_shows_that_does_not_jump() {
        let mut clock = clock();
        for second in 1..100 {
            assert_eq!(pass(&mut clock, 1, second * SECOND), second * SECOND);
        }
    }

    #[test]
    fn a_jump_ahead_is_followed_at_twice_the_pace_and_no_faster() {
        let mut clock = clock();
        let mut now = YEAR;
        for second in 1..1000 {
            now += SECOND;
            assert_eq!(pass(&mut clock, 1, now), 2 * second * SECOND);
        }
        // However often it is looked at.
        assert_eq!(pass(&mut clock, 0, now), 2 * 999 * SECOND);
        // And the system's clock once it is reached.
        let year = u64::try_from(YEAR / SECOND).unwrap();
        assert_eq!(pass(&mut clock, year, 2 * YEAR), 2 * YEAR);
        assert_eq!(
            pass(&mut clock, 5, 2 * YEAR + 5 * SECOND),
            2 * YEAR + 5 * SECOND
        );
    }

    #[test]
    fn a_jump_back_stops_it_until_it_is_reached_again() {
        let mut clock = clock();
        pass(&mut clock, 100, 100 * SECOND);
        for second in 0..100 {
            assert_eq!(pass(&mut clock, 1, second * SECOND), 100 * SECOND);
        }
        assert_eq!(pass(&mut clock, 1, -YEAR), 100 * SECOND);
        assert_eq!(pass(&mut clock, 300, 101 * SECOND), 101 * SECOND);
    }
}
