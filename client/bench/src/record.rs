//! Counting acks and their times.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use tonic::Status;

use crate::spec::MeasureWindow;

/// Longest time that is distinguished: ten minutes, in nanoseconds.
const LONGEST: u64 = 600_000_000_000;

/// Times in nanoseconds, with three digits.
fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LONGEST, 3).expect("bounds that are in order")
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(LONGEST)
}

/// Calls and records acked within a window.
#[derive(Debug)]
pub(crate) struct WindowCounts {
    pub(crate) calls: u64,
    pub(crate) records: u64,
    pub(crate) bytes: u64,
    pub(crate) times: Histogram<u64>,
    /// Delay of the calls after they were due.
    pub(crate) lags: Histogram<u64>,
    pub(crate) last: Option<Instant>,
}

impl WindowCounts {
    pub(crate) fn new() -> Self {
        Self {
            calls: 0,
            records: 0,
            bytes: 0,
            times: histogram(),
            lags: histogram(),
            last: None,
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        self.records += other.records;
        self.bytes += other.bytes;
        // Both histograms have the same bounds.
        let _ = self.times.add(&other.times);
        let _ = self.lags.add(&other.lags);
        self.last = self.last.max(other.last);
    }
}

/// One answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AnswerTimes {
    /// Time at which the call was due; in a closed loop, at which it was sent.
    pub(crate) due: Instant,
    pub(crate) sent: Instant,
    pub(crate) answered: Instant,
    pub(crate) records: u64,
    pub(crate) bytes: u64,
    /// Whether it is one of those to count.
    pub(crate) counts: bool,
}

/// Results of the callers of one thread.
#[derive(Debug)]
pub(crate) struct Recorder {
    window: MeasureWindow,
    pub(crate) counted: WindowCounts,
    /// Counts of the current second, if seconds are wanted.
    second: Option<WindowCounts>,
    /// All acked records, in the warm-up and too late as well: the server must hold them.
    pub(crate) all_records: u64,
    pub(crate) errors: BTreeMap<String, u64>,
}

/// Shared by the callers of one thread and the reader of each second.
#[derive(Debug, Clone)]
pub(crate) struct SharedRecorder(Arc<Mutex<Recorder>>);

impl SharedRecorder {
    pub(crate) fn new(window: MeasureWindow, seconds: bool) -> Self {
        Self(Arc::new(Mutex::new(Recorder {
            window,
            counted: WindowCounts::new(),
            second: seconds.then(WindowCounts::new),
            all_records: 0,
            errors: BTreeMap::new(),
        })))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Recorder> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recorder {
    /// Counts an answer.
    pub(crate) fn answered(&mut self, answer: &AnswerTimes) {
        self.all_records += answer.records;
        if !answer.counts || !self.window.counts(answer.due, answer.answered) {
            return;
        }
        let time = nanos(answer.answered - answer.due);
        let lag = nanos(answer.sent - answer.due);
        for counted in [Some(&mut self.counted), self.second.as_mut()]
            .into_iter()
            .flatten()
        {
            counted.calls += 1;
            counted.records += answer.records;
            counted.bytes += answer.bytes;
            counted.times.saturating_record(time.max(1));
            if answer.sent != answer.due {
                counted.lags.saturating_record(lag.max(1));
            }
            counted.last = Some(answer.answered);
        }
    }

    /// Counts a part of a call that continues, such as a message of a scan, and the age of its
    /// first record, if that must be timed.
    pub(crate) fn arrived(&mut self, at: Instant, records: u64, bytes: u64, age: Option<Duration>) {
        self.all_records += records;
        if self.window.counts(at, at) {
            for counted in [Some(&mut self.counted), self.second.as_mut()]
                .into_iter()
                .flatten()
            {
                counted.records += records;
                counted.bytes += bytes;
                if let Some(age) = age {
                    counted.times.saturating_record(nanos(age).max(1));
                }
                counted.last = Some(at);
            }
        }
    }

    pub(crate) fn failed(&mut self, status: &Status) {
        let what = format!("{:?}: {}", status.code(), status.message());
        *self.errors.entry(what).or_default() += 1;
    }

    /// Returns the counts since the last call.
    pub(crate) fn take_second(&mut self) -> Option<WindowCounts> {
        self.second
            .as_mut()
            .map(|second| std::mem::replace(second, WindowCounts::new()))
    }
}

/// Percentiles of times, in microseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Percentiles {
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) max: f64,
}

impl Percentiles {
    /// `None` if nothing was timed.
    pub(crate) fn of(histogram: &Histogram<u64>) -> Option<Self> {
        let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
        (!histogram.is_empty()).then(|| Self {
            mean: histogram.mean() / 1e3,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: histogram.max() as f64 / 1e3,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorder(begin: Instant, by_due: bool) -> SharedRecorder {
        let window = MeasureWindow {
            begin,
            end: Some(begin + Duration::from_secs(1)),
            by_due,
        };
        SharedRecorder::new(window, true)
    }

    #[test]
    fn open_loop_times_run_from_when_a_call_was_due_not_from_when_it_was_sent() {
        // Due every millisecond; the server stands still for 100 ms and then answers at once.
        let begin = Instant::now();
        let shared = recorder(begin, true);
        let ms = Duration::from_millis(1);
        for call in 0..100 {
            let (due, sent) = (begin + call * ms, begin + 100 * ms);
            shared.lock().answered(&AnswerTimes {
                due,
                sent,
                answered: sent + ms / 10,
                records: 1,
                bytes: 8,
                counts: true,
            });
        }
        let recorder = shared.lock();
        let times = Percentiles::of(&recorder.counted.times).unwrap();
        // From the sending all would have taken 100 us.
        assert!((50_000.0..52_000.0).contains(&times.p50), "{times:?}");
        assert!((100_000.0..101_000.0).contains(&times.max), "{times:?}");
        let lags = Percentiles::of(&recorder.counted.lags).unwrap();
        assert!((99_000.0..101_000.0).contains(&lags.max), "{lags:?}");
    }

    #[test]
    fn answers_outside_the_window_are_held_against_the_server_and_not_timed() {
        let begin = Instant::now() + Duration::from_secs(5);
        let shared = recorder(begin, false);
        for offset in [0, 5_500, 6_500] {
            let at = begin - Duration::from_secs(5) + Duration::from_millis(offset);
            shared.lock().answered(&AnswerTimes {
                due: at,
                sent: at,
                answered: at,
                records: 2,
                bytes: 8,
                counts: true,
            });
        }
        let mut recorder = shared.lock();
        assert_eq!(recorder.all_records, 6);
        assert_eq!((recorder.counted.calls, recorder.counted.records), (1, 2));
        assert_eq!(recorder.take_second().unwrap().calls, 1);
        assert_eq!(recorder.take_second().unwrap().calls, 0);
        assert_eq!(recorder.counted.calls, 1);
    }
}
