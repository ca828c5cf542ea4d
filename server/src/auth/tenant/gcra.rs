//! A rate as one atomic number: the time up to which it is used up (the generic cell rate algorithm).
//!
//! ```text
//!            now            now + 1 s
//! ────────────┼────────────────┼──────────▶ time
//!             └── the burst ───┘
//!   used up to here: passes    used up to here: waits
//! ```
//!
//! A request passes while a part of the burst is left, and then costs its amount divided by the rate. It passes whatever
//! its size, and later requests wait until it is paid off. If it needed room for all of its amount, smaller requests
//! could keep it out for ever. In any window of time *t*, the requests before the last one have at most
//! *rate* × (*t* + 1 s) together.
//!
//! A request that can wait reserves its turn behind all that have passed or reserved before. The turn does not move when
//! others take more, so nobody can keep it out. Its amount is taken when it has come, so requests that cannot wait pass in
//! between. The bound grows by one of these, and by each reserved request that uses its turn late.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Nanoseconds of the rate that can be used at once.
const BURST: u64 = 1_000_000_000;

/// Maximum debt, nanoseconds: one year.
const MOST_DEBT: u64 = 365 * 24 * 3600 * 1_000_000_000;

static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// A moment, in nanoseconds since the process began to limit rates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RateClock(u64);

impl RateClock {
    pub(super) fn now() -> Self {
        Self(u64::try_from(BEGIN.elapsed().as_nanos()).unwrap_or(u64::MAX / 2))
    }
}

/// The use of one rate, which every call names: the rate may change.
#[derive(Debug, Default)]
pub(super) struct Gcra {
    /// Time up to which the rate is used up, nanoseconds as in [`RateClock`].
    used_until: AtomicU64,
    /// Time up to which the reserved turns use it up, too.
    reserved_until: AtomicU64,
}

/// The time that an amount takes, rounded up, so that the rate is never exceeded.
fn cost(amount: u64, rate: u64) -> u64 {
    let nanos = (u128::from(amount) * 1_000_000_000).div_ceil(u128::from(rate.max(1)));
    u64::try_from(nanos).map_or(MOST_DEBT, |nanos| nanos.min(MOST_DEBT))
}

impl Gcra {
    /// Takes an amount at once, if a part of the burst is left.
    ///
    /// # Errors
    /// The wait after which the request would pass if no other did meanwhile.
    pub(super) fn take(&self, now: RateClock, amount: u64, rate: u64) -> Result<(), Duration> {
        let cost = cost(amount, rate);
        let taken = (self.used_until).fetch_update(Ordering::Relaxed, Ordering::Relaxed, |until| {
            (until < now.0 + BURST).then(|| until.max(now.0) + cost)
        });
        match taken {
            Ok(_) => {
                change(&self.reserved_until, |until| later(now, until, cost));
                Ok(())
            }
            Err(until) => Err(until_passes(now, until)),
        }
    }

    /// Reserves a turn. Returns the time up to which those before it use up the rate. [`Gcra::take_more`] ends it when
    /// it has come, and [`Gcra::cancel`] before.
    pub(super) fn reserve(&self, now: RateClock, amount: u64, rate: u64) -> u64 {
        let cost = cost(amount, rate);
        let used = self.used_until.load(Ordering::Relaxed).max(now.0);
        let before = change(&self.reserved_until, |until| {
            later(now, until.max(used), cost)
        });
        before.max(used)
    }

    /// Gives back a reserved turn.
    pub(super) fn cancel(&self, amount: u64, rate: u64) {
        let cost = cost(amount, rate);
        change(&self.reserved_until, |until| until.saturating_sub(cost));
    }

    /// The wait until a request would pass. `None`: it would pass now.
    pub(super) fn wait(&self, now: RateClock) -> Option<Duration> {
        wait(now, self.used_until.load(Ordering::Relaxed))
    }

    /// Takes an amount, whatever is left.
    pub(super) fn take_more(&self, now: RateClock, amount: u64, rate: u64) {
        let cost = cost(amount, rate);
        change(&self.used_until, |until| later(now, until, cost));
    }

    /// Gives back an amount that was taken.
    pub(super) fn give_back(&self, amount: u64, rate: u64) {
        let cost = cost(amount, rate);
        for until in [&self.used_until, &self.reserved_until] {
            change(until, |until| until.saturating_sub(cost));
        }
    }

    /// Lets the amounts that are not paid off cost as if they had been taken at another rate. `None`: no limit.
    pub(super) fn change_rate(&self, now: RateClock, from: Option<u64>, to: Option<u64>) {
        for until in [&self.used_until, &self.reserved_until] {
            change(until, |until| at_rate(now, until, from, to));
        }
    }
}

/// Changes a time. Returns the time before.
fn change(until: &AtomicU64, next: impl Fn(u64) -> u64) -> u64 {
    let next = |until| Some(next(until));
    // Never fails: the closure always gives a value.
    let changed = until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
    changed.unwrap_or_else(|until| until)
}

/// The time up to which the rate is used up after another request.
fn later(now: RateClock, until: u64, cost: u64) -> u64 {
    (until.max(now.0).saturating_add(cost)).min(now.0 + MOST_DEBT)
}

/// The time up to which a rate is used up, as if its amounts had been taken at another rate. `None`: no limit.
pub(super) fn at_rate(now: RateClock, until: u64, from: Option<u64>, to: Option<u64>) -> u64 {
    let (Some(from), Some(to)) = (from, to) else {
        return 0;
    };
    let debt = u128::from(until.saturating_sub(now.0)) * u128::from(from);
    let debt = u64::try_from(debt / u128::from(to.max(1))).unwrap_or(MOST_DEBT);
    now.0 + debt.min(MOST_DEBT)
}

/// The wait of a request behind those that use up the rate up to then. `None`: it passes now.
pub(super) fn wait(now: RateClock, until: u64) -> Option<Duration> {
    (until >= now.0 + BURST).then(|| until_passes(now, until))
}

fn until_passes(now: RateClock, until: u64) -> Duration {
    Duration::from_nanos(until.saturating_sub(now.0 + BURST) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Numbers of a linear congruential generator.
    struct Numbers(u64);

    impl Numbers {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 = (self.0)
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % bound
        }
    }

    #[test]
    fn no_window_has_more_than_its_rate_and_the_burst_before_its_last_request() {
        let rates = [1, 100, 10_000, 100 * MIB].into_iter().cycle();
        for (seed, most) in (0..200).zip(rates) {
            let mut numbers = Numbers(seed);
            let rate = 1 + numbers.below(most);
            let largest = 1 + numbers.below(3 * rate);
            let pause = 1 + numbers.below(2_000_000_000);
            let (gcra, mut now) = (Gcra::default(), RateClock(numbers.below(1 << 40)));
            let mut granted = Vec::new();
            for _ in 0..300 {
                now.0 += numbers.below(pause);
                let amount = 1 + numbers.below(largest);
                if gcra.take(now, amount, rate).is_ok() {
                    granted.push((now.0, amount));
                }
            }
            for first in 0..granted.len() {
                let mut sum = 0u128;
                for (at, amount) in &granted[first..] {
                    // Those before this one.
                    let window = u128::from(at - granted[first].0 + BURST);
                    assert!(
                        sum * 1_000_000_000 <= window * u128::from(rate),
                        "seed {seed}: {sum} in {window} ns at {rate}/s"
                    );
                    sum += u128::from(*amount);
                }
            }
        }
    }

    #[test]
    fn named_wait_is_enough_and_a_nanosecond_less_is_not() {
        for seed in 0..1000 {
            let mut numbers = Numbers(seed);
            let rate = 1 + numbers.below(100 * MIB);
            let (gcra, now) = (Gcra::default(), RateClock(1 << 40));
            let wait = loop {
                if let Err(wait) = gcra.take(now, 1 + numbers.below(2 * rate), rate) {
                    break wait;
                }
            };
            let wait = u64::try_from(wait.as_nanos()).unwrap();
            let early = RateClock(now.0 + wait - 1);
            assert_eq!(gcra.take(early, 1, rate), Err(Duration::from_nanos(1)));
            assert_eq!(gcra.wait(early), Some(Duration::from_nanos(1)));
            let then = RateClock(now.0 + wait);
            assert!(gcra.wait(then).is_none() && gcra.take(then, 1, rate).is_ok());
        }
    }

    #[test]
    fn caller_that_obeys_gets_its_rate() {
        let (gcra, rate, mut now) = (Gcra::default(), 20 * MIB, RateClock(0));
        let mut granted = 0;
        while now.0 < 30 * BURST {
            match gcra.take(now, MIB, rate) {
                Ok(()) => granted += MIB,
                Err(wait) => now.0 += u64::try_from(wait.as_nanos()).unwrap(),
            }
        }
        // The burst of one second comes on top, and the last request may go beyond it.
        assert!(
            (31 * rate..=31 * rate + MIB).contains(&granted),
            "{granted}"
        );
    }

    #[test]
    fn request_larger_than_the_burst_passes_and_is_paid_off() {
        let (gcra, now) = (Gcra::default(), RateClock(0));
        assert!(gcra.take(now, 60, 1).is_ok());
        assert_eq!(
            gcra.take(now, 1, 1),
            Err(Duration::from_nanos(59 * BURST + 1))
        );
        assert!(gcra.take(RateClock(59 * BURST + 1), 1, 1).is_ok());
    }

    #[test]
    fn amount_given_back_can_be_taken_again() {
        let (gcra, now) = (Gcra::default(), RateClock(5));
        gcra.take_more(now, 30, 10);
        assert_eq!(gcra.wait(now), Some(Duration::from_nanos(2 * BURST + 1)));
        gcra.give_back(25, 10);
        assert!(gcra.wait(now).is_none());
    }

    #[test]
    fn debt_is_paid_off_at_a_changed_rate() {
        let (gcra, now) = (Gcra::default(), RateClock(7));
        gcra.take_more(now, 1000, 1);
        gcra.change_rate(now, Some(1), Some(100));
        assert_eq!(gcra.wait(now), Some(Duration::from_nanos(9 * BURST + 1)));
        gcra.change_rate(now, Some(100), None);
        assert!(gcra.wait(now).is_none());
    }

    #[test]
    fn extreme_amounts_and_rates_do_not_overflow() {
        let (gcra, now) = (Gcra::default(), RateClock(u64::MAX / 4));
        for (amount, rate) in [(u64::MAX, 1), (1, u64::MAX), (0, 1), (u64::MAX, u64::MAX)] {
            let _ = gcra.take(now, amount, rate);
            gcra.take_more(now, amount, rate);
            gcra.change_rate(now, Some(rate), Some(1));
        }
        assert_eq!(
            gcra.wait(now),
            Some(Duration::from_nanos(MOST_DEBT - BURST + 1))
        );
    }

    #[test]
    fn threads_together_take_no_more_than_one_alone() {
        let (gcra, now) = (Gcra::default(), RateClock(9));
        let granted: usize = std::thread::scope(|scope| {
            let take = || {
                (0..10_000)
                    .filter(|_| gcra.take(now, 1, 5000).is_ok())
                    .count()
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(take)).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .sum()
        });
        assert_eq!(granted, 5000);
    }
}
