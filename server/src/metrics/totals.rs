//! Sums since the start, for callers that show rates themselves: the difference of two sums is
//! the growth in between.

use prometheus::Histogram;
use prometheus::core::Metric as _;

use super::Metrics;

/// Sums since the process started.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Totals {
    /// Records appended and acked.
    pub(crate) append_records: u64,
    /// Bytes of data and headers appended and acked.
    pub(crate) append_bytes: u64,
    /// Records given to readers.
    pub(crate) read_records: u64,
    /// Bytes of stored bodies given to readers.
    pub(crate) read_bytes: u64,
    /// Writes that the state of the server refused.
    pub(crate) rejected: u64,
    /// Appends by the durability they reached: replicated, durable, written, accepted.
    pub(crate) appends: [Buckets; 4],
    /// Flushes of the journal.
    pub(crate) flush: Buckets,
}

/// A histogram of times at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Buckets {
    /// Upper bounds in seconds, each with the number of observations not above it.
    cumulative: Vec<(f64, u64)>,
    /// Number of all observations.
    pub(crate) count: u64,
}

impl Buckets {
    pub(super) fn of(histogram: &Histogram) -> Self {
        let metric = histogram.metric();
        let histogram = metric.get_histogram();
        Self {
            cumulative: histogram
                .get_bucket()
                .iter()
                .map(|bucket| (bucket.upper_bound(), bucket.cumulative_count()))
                .collect(),
            count: histogram.get_sample_count(),
        }
    }

    /// The time in seconds below which a share `quantile` of the observations after `earlier`
    /// stayed. Exact to the bucket, and between its bounds as if evenly spread, as in
    /// `histogram_quantile`. `None` if there was no observation.
    pub(crate) fn quantile_since(&self, earlier: &Self, quantile: f64) -> Option<f64> {
        let before = |index: usize| earlier.cumulative.get(index).map_or(0, |(_, count)| *count);
        let came = self.count.checked_sub(earlier.count).filter(|n| *n > 0)?;
        let rank = quantile * float(came);
        let mut below = (0.0, 0.0);
        for (index, (bound, count)) in self.cumulative.iter().enumerate() {
            let up_to = float(count.saturating_sub(before(index)));
            if up_to >= rank && up_to > below.1 {
                let share = (rank - below.1) / (up_to - below.1);
                return Some(below.0 + (bound - below.0) * share);
            }
            below = (*bound, up_to);
        }
        // Beyond the last bound: no more is known.
        Some(below.0)
    }
}

/// Counts are far below 2^53, up to which this is exact.
#[allow(clippy::cast_precision_loss, reason = "see above")]
pub(crate) fn float(number: u64) -> f64 {
    number as f64
}

impl Metrics {
    /// Returns the sums of everything counted so far.
    pub(crate) fn totals(&self) -> Totals {
        // Only a replica has such appends.
        #[cfg(any(feature = "object", test))]
        let replicated = (self.replica.get())
            .map(|_| Buckets::of(&self.replicated_appends()))
            .unwrap_or_default();
        #[cfg(not(any(feature = "object", test)))]
        let replicated = Buckets::default();
        let mut totals = Totals {
            append_records: self.appended_records.get(),
            append_bytes: self.appended_bytes.get(),
            rejected: self.calls.refused_writes(),
            appends: [
                replicated,
                Buckets::of(&self.append_durable),
                Buckets::of(&self.append_written),
                Buckets::of(&self.append_accepted),
            ],
            ..Totals::default()
        };
        self.engine.add_to(&mut totals);
        totals
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use wald_storage::Durability;

    use super::*;

    fn appended(metrics: &Metrics, millis: u64, times: u32) {
        for _ in 0..times {
            metrics.appended(
                Durability::Durable,
                Duration::from_millis(millis),
                1,
                (1, 10),
            );
        }
    }

    #[test]
    fn quantiles_are_of_what_came_in_between() {
        let metrics = Metrics::new().unwrap();
        appended(&metrics, 5000, 1000);
        let before = metrics.totals();
        appended(&metrics, 3, 98);
        appended(&metrics, 100, 2);
        let now = metrics.totals();
        assert_eq!(now.append_records - before.append_records, 100);
        let [_, durable, written, _] = &now.appends;
        // The buckets around 3 ms end at 2.5 and 5 ms, around 100 ms at 80 and 160.
        let quantile = |q| durable.quantile_since(&before.appends[1], q).unwrap();
        assert!((0.0025..=0.005).contains(&quantile(0.5)));
        assert!((0.08..=0.16).contains(&quantile(0.99)));
        assert_eq!(written.quantile_since(&before.appends[2], 0.5), None);
        assert_eq!(durable.quantile_since(durable, 0.5), None);
    }

    #[test]
    fn quantile_beyond_the_last_bound_is_the_last_bound() {
        let metrics = Metrics::new().unwrap();
        appended(&metrics, 60_000, 1);
        let durable = &metrics.totals().appends[1];
        let highest = durable.quantile_since(&Buckets::default(), 0.5).unwrap();
        assert!((highest - 10.24).abs() < 1e-9);
    }
}
