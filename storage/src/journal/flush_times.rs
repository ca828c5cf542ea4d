//! Durations of the newest flushes of the journal: the price of DURABLE on this machine.

use std::collections::VecDeque;
use std::time::Duration;

/// Number of flushes that count.
const NEWEST: usize = 128;

/// The newest flushes, oldest first.
#[derive(Default)]
pub(super) struct FlushTimes(VecDeque<Duration>);

impl FlushTimes {
    pub(super) fn add(&mut self, took: Duration) {
        if self.0.len() == NEWEST {
            self.0.pop_front();
        }
        self.0.push_back(took);
    }

    /// Median and 99th percentile. Zero before the first flush.
    pub(super) fn percentiles(&self) -> (Duration, Duration) {
        let mut times: Vec<Duration> = self.0.iter().copied().collect();
        times.sort_unstable();
        let at = |share: usize| times.get(times.len() * share / 100).copied();
        (at(50).unwrap_or_default(), at(99).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_newest_flushes() {
        let mut times = FlushTimes::default();
        assert_eq!(times.percentiles(), (Duration::ZERO, Duration::ZERO));
        times.add(Duration::from_secs(1));
        assert_eq!(times.percentiles().0, Duration::from_secs(1));
        for micros in 1..=NEWEST as u64 {
            times.add(Duration::from_micros(micros));
        }
        let micros = Duration::from_micros;
        assert_eq!(times.percentiles(), (micros(65), micros(127)));
    }
}
