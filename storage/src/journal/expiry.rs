//! The clocks for stored times and for retention by age.
//!
//! ```text
//!                        system's clock     time clock            expiry clock
//! no jump                shows t            t                     t
//! jumps ahead            + a year           goes on, 1 h long     twice as fast, until reached
//! jumps back             - a year           goes on, 10 min long  stands still, 10 min long
//! then                   believed           t again               t again, or still behind
//! ```
//!
//! **The expiry clock** gives the age of records. It never goes more than twice as fast as time
//! passes. When the system's clock jumps ahead by a year, nothing expires at once: the expiry clock
//! catches up within a year.
//!
//! **The time clock** gives records their times. For each step of the system's clock it knows from
//! the monotonic clock how long the step should be. Where they differ by more than a second (and
//! 1/8 of the step) the system's clock has jumped. The time clock then follows the monotonic clock
//! for 1 hour after a jump ahead and for 10 minutes after a jump back. A fault that is repaired
//! within that time leaves no trace. A correction of a wrong clock takes effect after that time.
//!
//! **Back.** Both clocks go back only when the system's clock has been steadily behind for 10
//! minutes, and shows 2026 or later: a clock that lost its time shows 1970 or 2000. One moment of a
//! wrong clock therefore stops neither clock for years. The committer keeps the times within a log
//! from going back.
//!
//! No record arrives before the time that the expiry clock shows. Its age by the expiry clock is
//! therefore at most twice the time since its arrival, and exact while the system's clock does not
//! jump.
//!
//! Links, seals, some markers and checkpoints store the expiry clock. A start continues from the
//! newest of these; the time without a process counts as a jump ahead. The time clock believes the
//! system's clock at a start, because a long rest cannot be distinguished from a jump. A system's
//! clock that is behind the expiry clock at a start has jumped back.

use std::time::{Duration, Instant};

use crate::base::ids::Timestamp;

/// A smaller difference between two clocks is no jump.
const JUMP: i64 = 1_000_000;

/// Time for which a jump ahead, or back, is not believed.
const DOUBT_AHEAD: Duration = Duration::from_secs(3600);
const DOUBT_BACK: Duration = Duration::from_secs(600);

/// 2026-01-01. A system's clock before it is wrong: this version is younger.
const EARLIEST: Timestamp = Timestamp::from_micros(1_767_225_600_000_000);

/// Times that the two clocks show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClockTimes {
    /// The time by which records are too old.
    pub(crate) expiry: Timestamp,
    /// Arrival time of records that arrive now. Not before `expiry`.
    pub(crate) arrival: Timestamp,
    /// Jump of the system's clock since the last reading, in microseconds; below 0: back.
    pub(crate) jumped: Option<i64>,
}

/// Jumps of the system's clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Jumps {
    pub(crate) ahead: u64,
    pub(crate) back: u64,
    /// Size of the last jump in microseconds; below 0: back. 0: there was none.
    pub(crate) last: i64,
}

/// The expiry clock and the time clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clocks {
    expiry: Timestamp,
    times: Timestamp,
    /// Last reading of the system's clock, and its time on the monotonic clock.
    system: Timestamp,
    at: Instant,
    /// The system's clock is not believed until then.
    doubted: Option<Instant>,
    jumps: Jumps,
}

impl Clocks {
    /// Clocks that begin at `at`, when the system's clock shows `now`. The expiry clock continues from
    /// `expiry`.
    pub(crate) fn new(expiry: Timestamp, now: Timestamp, at: Instant) -> Self {
        let mut clocks = Self {
            expiry,
            times: now,
            system: now,
            at,
            doubted: None,
            jumps: Jumps::default(),
        };
        let behind = now.micros().saturating_sub(expiry.micros());
        if behind < -JUMP {
            clocks.jump(behind, at);
        }
        clocks
    }

    fn jump(&mut self, by: i64, at: Instant) {
        let doubt = match by > 0 {
            true => DOUBT_AHEAD,
            false => DOUBT_BACK,
        };
        self.doubted = Some(at + doubt);
        let count = match by > 0 {
            true => &mut self.jumps.ahead,
            false => &mut self.jumps.back,
        };
        *count += 1;
        self.jumps.last = by;
    }

    /// Advances both clocks to the moment at which the system's clock shows `now`.
    pub(crate) fn advance(&mut self, now: Timestamp, progress: Instant) -> ClockTimes {
        let passed = micros(progress.saturating_duration_since(self.at));
        self.at = self.at.max(progress);
        let expected = self.system.saturating_add_micros(passed);
        let by = now.micros().saturating_sub(expected.micros());
        self.system = now;
        let jumped = (by.saturating_abs() > JUMP + passed / 8).then_some(by);
        if let Some(by) = jumped {
            self.jump(by, progress);
        }
        self.doubted = self.doubted.filter(|until| progress < *until);
        let is_ahead = |shown: Timestamp| shown.micros().saturating_sub(now.micros()) > JUMP;
        let believed = self.doubted.is_none();
        let goes_back = |shown| believed && now >= EARLIEST && is_ahead(shown);
        self.times = if goes_back(self.times) {
            now
        } else if believed && !is_ahead(self.times) {
            self.times.max(now)
        } else {
            self.times.saturating_add_micros(passed)
        };
        let fastest = self.expiry.saturating_add_micros(passed.saturating_mul(2));
        self.expiry = match goes_back(self.expiry) {
            true => now,
            false => self.expiry.max(now).min(fastest),
        };
        ClockTimes {
            expiry: self.expiry,
            arrival: self.times.max(self.expiry),
            jumped,
        }
    }

    pub(crate) fn jumps(&self) -> Jumps {
        self.jumps
    }
}

/// A span in microseconds, at most `i64::MAX`.
pub(crate) fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000;
    const YEAR: i64 = 365 * 24 * 3600 * SECOND;
    const BEGIN: i64 = EARLIEST.micros() + 2 * YEAR;

    /// The clocks, and the system's clock as if it had never jumped.
    struct World {
        clocks: Clocks,
        now: i64,
        wrong: i64,
    }

    impl World {
        fn new() -> Self {
            Self::after(BEGIN)
        }

        /// Begins with an expiry clock that last showed `expiry`.
        fn after(expiry: i64) -> Self {
            let (expiry, now) = [expiry, BEGIN].map(Timestamp::from_micros).into();
            #[allow(clippy::disallowed_methods, reason = "an arbitrary beginning")]
            let at = Instant::now();
            Self {
                clocks: Clocks::new(expiry, now, at),
                now: BEGIN,
                wrong: 0,
            }
        }

        /// Lets `seconds` pass in steps of a second. Returns by how much expiry and arrival are ahead
        /// of the right time at the end.
        fn pass(&mut self, seconds: u64) -> (i64, i64) {
            let mut shown = self.step(0);
            for _ in 0..seconds {
                shown = self.step(1);
            }
            shown
        }

        fn step(&mut self, seconds: u64) -> (i64, i64) {
            let then = self.clocks.at + Duration::from_secs(seconds);
            self.now += i64::try_from(seconds).unwrap() * SECOND;
            let system = Timestamp::from_micros(self.now + self.wrong);
            let shown = self.clocks.advance(system, then);
            (
                shown.expiry.micros() - self.now,
                shown.arrival.micros() - self.now,
            )
        }
    }

    #[test]
    fn both_clocks_follow_a_system_clock_that_does_not_jump() {
        let mut world = World::new();
        for _ in 0..100 {
            assert_eq!(world.pass(1), (world.wrong, world.wrong));
            // A gradual adjustment.
            world.wrong += SECOND / 20;
            let (expiry, arrival) = world.pass(10);
            assert_eq!((expiry, arrival), (world.wrong, world.wrong));
        }
        assert_eq!(world.clocks.jumps(), Jumps::default());
    }

    #[test]
    fn a_jump_ahead_that_is_taken_back_changes_no_time() {
        let mut world = World::new();
        world.wrong = YEAR;
        let (expiry, arrival) = world.pass(1800);
        // The expiry clock runs twice as fast as time.
        assert_eq!((expiry, arrival), (1800 * SECOND, 1800 * SECOND));
        world.wrong = 0;
        let jumps = Jumps {
            ahead: 1,
            back: 1,
            last: -YEAR,
        };
        assert_eq!(world.pass(1), (1799 * SECOND, 1799 * SECOND));
        assert_eq!(world.clocks.jumps(), jumps);
        assert_eq!(world.pass(600), (0, 0));
        assert_eq!(world.pass(600), (0, 0));
        assert_eq!(world.clocks.jumps(), jumps);
    }

    #[test]
    fn a_lasting_jump_ahead_is_believed_after_an_hour_and_expires_nothing() {
        let mut world = World::new();
        world.wrong = YEAR;
        let (expiry, _) = world.pass(3599);
        assert!(expiry < 3600 * SECOND);
        let (expiry, arrival) = world.pass(1);
        assert_eq!((expiry, arrival), (3600 * SECOND, YEAR));
    }

    #[test]
    fn a_jump_back_that_stays_is_believed_after_ten_minutes() {
        let mut world = World::new();
        world.wrong = -YEAR;
        let (expiry, arrival) = world.pass(599);
        assert_eq!((expiry, arrival), (-599 * SECOND, 0));
        assert_eq!(world.pass(1), (-YEAR, -YEAR));
        // A clock that shows a time before this version was made is never believed.
        let mut world = World::new();
        world.wrong = -BEGIN;
        let (expiry, arrival) = world.pass(3600);
        assert_eq!(expiry, -3600 * SECOND);
        assert_eq!(arrival, 0);
    }

    #[test]
    fn a_start_with_a_clock_far_ahead_recovers_once_it_is_mended() {
        // A new store.
        let mut world = World::after(BEGIN + YEAR);
        world.wrong = YEAR;
        world.clocks = Clocks::new(
            Timestamp::from_micros(BEGIN + YEAR),
            Timestamp::from_micros(BEGIN + YEAR),
            world.clocks.at,
        );
        assert_eq!(world.pass(10), (YEAR, YEAR));
        world.wrong = 0;
        world.pass(599);
        assert_eq!(world.pass(2), (0, 0));
        // A start after a run with such a clock.
        let mut world = World::after(BEGIN + YEAR);
        assert_eq!(world.clocks.jumps().back, 1);
        let (_, arrival) = world.pass(599);
        assert_eq!(arrival, YEAR - 599 * SECOND);
        assert_eq!(world.pass(1), (0, 0));
    }

    #[test]
    fn a_record_is_never_older_than_twice_the_time_that_passed() {
        let mut world = World::new();
        let mut seed = 7_u64;
        let mut arrived: Vec<(u64, i64)> = Vec::new();
        for second in 0..20_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if seed >> 56 == 0 {
                world.wrong =
                    i64::try_from(seed >> 20 & 0xFFFF).unwrap() * YEAR / 10_000 - 3 * YEAR;
            }
            let (expiry, arrival) = world.step(1);
            let (expiry, arrival) = (expiry + world.now, arrival + world.now);
            assert!(arrival >= expiry);
            for (then, arrival) in &arrived {
                let passed = i64::try_from(second - then).unwrap() * SECOND;
                assert!(expiry - arrival <= 2 * passed);
            }
            if second % 100 == 0 {
                arrived.push((second, arrival));
            }
        }
        assert!(world.clocks.jumps().ahead > 10);
    }
}
