//! Schedules of calls: the closed loop asks a [`Gate`], the open loop follows a pacer.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use crate::spec::{Extent, MeasureWindow};

/// A call that must be sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Due {
    pub(crate) at: Instant,
    /// Whether the call counts; calls of a warm-up do not.
    pub(crate) counts: bool,
}

/// Begin and end of a load.
#[derive(Debug)]
pub(crate) struct Gate {
    begin: Instant,
    end: Option<Instant>,
    left: Option<AtomicU64>,
}

impl Gate {
    pub(crate) fn new(begin: Instant, extent: Extent) -> Self {
        match extent {
            Extent::For(time) => Self {
                begin,
                end: Some(begin + time),
                left: None,
            },
            Extent::Count(count) => Self {
                begin,
                end: None,
                left: Some(AtomicU64::new(count)),
            },
        }
    }

    pub(crate) fn window(&self, by_due: bool) -> MeasureWindow {
        MeasureWindow {
            begin: self.begin,
            end: self.end,
            by_due,
        }
    }

    pub(crate) fn end(&self) -> Option<Instant> {
        self.end
    }

    /// Whether the time is over; a count never is.
    pub(crate) fn is_over(&self, at: Instant) -> bool {
        self.end.is_some_and(|end| at >= end)
    }

    /// The call that is due at that time; `None` if there are none any more.
    pub(crate) fn next(&self, at: Instant) -> Option<Due> {
        let counts = match &self.left {
            None => true,
            Some(_) if at < self.begin => false,
            Some(left) => {
                let taken = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                    left.checked_sub(1)
                });
                taken.ok()?;
                true
            }
        };
        (!self.is_over(at)).then_some(Due { at, counts })
    }
}

/// Time at which call number `number` of an open loop is due.
pub(crate) fn due(start: Instant, rate: f64, number: u64) -> Instant {
    start + Duration::from_secs_f64(number as f64 / rate)
}

/// Sends due calls to the threads in turn, from a thread of its own: an event loop's timers
/// count milliseconds. Ends with the gate.
pub(crate) fn pace(gate: &Gate, start: Instant, rate: f64, threads: &[UnboundedSender<Due>]) {
    for number in 0.. {
        let at = due(start, rate, number);
        let now = Instant::now();
        if at > now {
            std::thread::sleep(at - now);
        }
        let Some(due) = gate.next(at) else { return };
        let turn = usize::try_from(number).unwrap_or(0) % threads.len();
        if threads[turn].send(due).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_due_at_a_steady_rate_without_drift() {
        let start = Instant::now();
        assert_eq!(due(start, 1000.0, 0), start);
        assert_eq!(due(start, 1000.0, 1), start + Duration::from_millis(1));
        let hour = due(start, 3.0, 3 * 3600) - start;
        assert_eq!(hour, Duration::from_secs(3600));
    }

    #[test]
    fn count_gives_out_exactly_so_many_after_the_warm_up() {
        let begin = Instant::now() + Duration::from_secs(1);
        let gate = Gate::new(begin, Extent::Count(2));
        assert!(!gate.next(begin - Duration::from_millis(1)).unwrap().counts);
        assert!(gate.next(begin).unwrap().counts);
        assert!(gate.next(begin).unwrap().counts);
        assert!(gate.next(begin).is_none());
    }

    #[test]
    fn time_gives_out_until_its_end() {
        let begin = Instant::now();
        let gate = Gate::new(begin, Extent::For(Duration::from_secs(1)));
        assert!(gate.next(begin + Duration::from_millis(999)).is_some());
        assert!(gate.next(begin + Duration::from_secs(1)).is_none());
    }
}
