//! Decides when the next part is stored.
//!
//! ```text
//! a request waits, or 4 MiB ─▶ at once ─┐
//! fewer bytes ─▶ after the interval ────┴▶ not before: the last start + gap, the last end + linger
//! ```
//!
//! The gap bounds the number of requests, and so their price. During the linger, clients that were just answered send
//! their next requests, so that one row holds all of them. It ends once as many requests wait as before the answers. Those that
//! came too late for the last PUT count, or two halves of the clients would take turns for ever, and each would wait for two
//! PUTs. Clients that do not send at once make lingers useless: after one that they missed, the next PUTs have none. An idle
//! tail has neither gap nor linger.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// Bytes that are stored at once, unless half of the lag is less.
const SOON_BYTES: u64 = 4 << 20;
/// Maximum linger, unless the last PUT took less: who comes too late waits for one. The next requests must be durable by then,
/// and a busy disk needs some milliseconds for a flush.
const LONGEST_LINGER: Duration = Duration::from_millis(10);
/// Number of missed lingers in a row that count: after them 2^6 - 1 PUTs have none.
const MOST_MISSES: u32 = 6;
/// Number of newest PUTs whose median is the automatic gap.
const MEASURED: usize = 64;

/// Minimum time between the starts of two PUTs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShipGap {
    /// This time.
    Fixed(Duration),
    /// The median time of the newest PUTs.
    Measured,
}

/// The next step of the shipper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ShipTurn {
    /// Nothing waits.
    Idle,
    /// The next part is due now.
    Now,
    /// It is due at this time, if nothing else happens.
    Gathering(Instant),
    /// It is due, and must not start before this time.
    Spaced(Instant),
    /// It is due, and starts at this time, or once more requests wait.
    Lingering(Instant),
}

/// The times of the PUTs so far.
#[derive(Debug)]
pub(super) struct ShipPace {
    gap: ShipGap,
    interval: Duration,
    soon_bytes: u64,
    /// Since when bytes wait.
    since: Option<Instant>,
    started: Option<Instant>,
    ended: Option<Instant>,
    /// Number of requests that waited before the last PUT answered its part of them.
    waited: usize,
    /// Whether a linger has begun since then.
    has_lingered: bool,
    /// Number of lingers in a row that ended before as many requests waited.
    misses: u32,
    /// Number of PUTs that have no linger.
    rests: u32,
    took: VecDeque<Duration>,
}

impl ShipPace {
    pub(super) fn new(gap: ShipGap, interval: Duration, max_lag: u64) -> Self {
        Self {
            gap,
            interval,
            // At the lag no request is accepted that could wait.
            soon_bytes: SOON_BYTES.min(max_lag / 2),
            since: None,
            started: None,
            ended: None,
            waited: 0,
            has_lingered: false,
            misses: 0,
            rests: 0,
            took: VecDeque::new(),
        }
    }

    /// Number of bytes that are stored at once.
    pub(super) fn soon_bytes(&self) -> u64 {
        self.soon_bytes
    }

    /// The next step, if `waiting_bytes` are durable and not stored, and `waiting` requests wait for them.
    pub(super) fn next(&mut self, now: Instant, waiting_bytes: u64, waiting: usize) -> ShipTurn {
        if waiting_bytes == 0 {
            self.since = None;
            return ShipTurn::Idle;
        }
        let since = *self.since.get_or_insert(now);
        let is_due =
            waiting > 0 || waiting_bytes >= self.soon_bytes || now >= since + self.interval;
        if !is_due {
            return ShipTurn::Gathering(since + self.interval);
        }
        let after = |time: Option<Instant>| time.filter(|time| now < *time);
        if let Some(spaced) = after(self.gap_end()) {
            return ShipTurn::Spaced(spaced);
        }
        match after(self.linger_end()) {
            Some(end) if waiting < self.waited => {
                self.has_lingered = true;
                ShipTurn::Lingering(end)
            }
            _ => ShipTurn::Now,
        }
    }

    /// A PUT starts, for which this number of requests wait.
    pub(super) fn starts(&mut self, now: Instant, waiting: usize) {
        self.started = Some(now);
        if self.has_lingered {
            self.misses = match waiting < self.waited {
                true => (self.misses + 1).min(MOST_MISSES),
                false => 0,
            };
            self.rests = (1 << self.misses) - 1;
        } else {
            self.rests = self.rests.saturating_sub(1);
        }
    }

    /// The PUT has ended, and this number of requests waited until then. Bytes that wait now may have waited since its start.
    pub(super) fn ends(&mut self, now: Instant, waited: usize) {
        self.since = self.started;
        self.ended = Some(now);
        self.waited = waited;
        self.has_lingered = false;
        if let Some(started) = self.started {
            self.took.truncate(MEASURED - 1);
            self.took.push_front(now - started);
        }
    }

    fn gap_end(&self) -> Option<Instant> {
        let gap = match self.gap {
            ShipGap::Fixed(gap) => gap,
            ShipGap::Measured => self.median(),
        };
        // Nothing has ended before the first PUT.
        self.ended.and(self.started).map(|started| started + gap)
    }

    fn linger_end(&self) -> Option<Instant> {
        let last = *self.took.front().filter(|_| self.rests == 0)?;
        self.ended.map(|ended| ended + last.min(LONGEST_LINGER))
    }

    fn median(&self) -> Duration {
        let mut took: Vec<Duration> = self.took.iter().copied().collect();
        took.sort_unstable();
        took.get(took.len() / 2).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const MAX_LAG: u64 = 64 << 20;
    const GAP: Duration = Duration::from_millis(50);
    const INTERVAL: Duration = Duration::from_secs(1);
    const PUT: Duration = Duration::from_millis(30);

    fn pace() -> ShipPace {
        ShipPace::new(ShipGap::Fixed(GAP), INTERVAL, MAX_LAG)
    }

    /// A PUT that takes this long.
    async fn put(pace: &mut ShipPace, took: Duration) -> Instant {
        let started = Instant::now();
        pace.starts(started, 2);
        advance(took).await;
        pace.ends(Instant::now(), 2);
        started
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_tail_stores_at_once_what_a_request_waits_for() {
        let mut pace = pace();
        assert_eq!(pace.next(Instant::now(), 0, 0), ShipTurn::Idle);
        assert_eq!(pace.next(Instant::now(), 1, 2), ShipTurn::Now);
        put(&mut pace, PUT).await;
        advance(GAP).await;
        assert_eq!(pace.next(Instant::now(), 0, 2), ShipTurn::Idle);
        assert_eq!(pace.next(Instant::now(), 1, 2), ShipTurn::Now);
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_for_nobody_wait_for_the_interval_or_for_4_mib() {
        let mut pace = pace();
        let begun = Instant::now();
        let gathering = ShipTurn::Gathering(begun + INTERVAL);
        assert_eq!(pace.next(begun, 1, 0), gathering);
        advance(INTERVAL / 2).await;
        assert_eq!(pace.next(Instant::now(), SOON_BYTES - 1, 0), gathering);
        assert_eq!(pace.next(Instant::now(), SOON_BYTES, 0), ShipTurn::Now);
        advance(INTERVAL / 2).await;
        assert_eq!(pace.next(Instant::now(), 1, 0), ShipTurn::Now);
        // Bytes that came during the PUT wait since its start.
        let started = put(&mut pace, PUT).await;
        let next = pace.next(Instant::now(), 1, 0);
        assert_eq!(next, ShipTurn::Gathering(started + INTERVAL));
        // An empty tail in between starts the interval again.
        assert_eq!(pace.next(Instant::now(), 0, 0), ShipTurn::Idle);
        let now = Instant::now();
        assert_eq!(pace.next(now, 1, 0), ShipTurn::Gathering(now + INTERVAL));
    }

    #[tokio::test(start_paused = true)]
    async fn half_of_a_small_lag_is_stored_at_once() {
        let mut pace = ShipPace::new(ShipGap::Fixed(GAP), INTERVAL, 1 << 20);
        assert!(matches!(
            pace.next(Instant::now(), (1 << 19) - 1, 0),
            ShipTurn::Gathering(_)
        ));
        assert_eq!(pace.next(Instant::now(), 1 << 19, 0), ShipTurn::Now);
    }

    #[tokio::test(start_paused = true)]
    async fn a_busy_tail_keeps_the_gap_between_two_starts() {
        let mut pace = pace();
        let started = put(&mut pace, PUT).await;
        for bytes in [1, SOON_BYTES] {
            let next = pace.next(Instant::now(), bytes, 2);
            assert_eq!(next, ShipTurn::Spaced(started + GAP));
        }
        advance(GAP - PUT).await;
        assert_eq!(pace.next(Instant::now(), 1, 2), ShipTurn::Now);
    }

    #[tokio::test(start_paused = true)]
    async fn a_linger_ends_once_as_many_requests_wait_as_before() {
        for (took, linger) in [(2, 2), (8, 8), (40, 10), (10_000, 10)] {
            let mut pace = ShipPace::new(ShipGap::Fixed(Duration::ZERO), INTERVAL, MAX_LAG);
            put(&mut pace, Duration::from_millis(took)).await;
            let now = Instant::now();
            let end = now + Duration::from_millis(linger);
            let turn = ShipTurn::Lingering(end);
            assert_eq!(pace.next(now, 1, 1), turn, "a PUT of {took} ms");
            // One of two was answered, and has sent its next request.
            assert_eq!(pace.next(now, 1, 2), ShipTurn::Now);
            assert_eq!(pace.next(end, 1, 1), ShipTurn::Now);
        }
    }

    /// Whether the next PUT has a linger. It starts with `came` of two requests.
    async fn lingers(pace: &mut ShipPace, came: usize) -> bool {
        let has_linger = matches!(pace.next(Instant::now(), 1, 1), ShipTurn::Lingering(_));
        pace.starts(Instant::now(), came);
        advance(PUT).await;
        pace.ends(Instant::now(), 2);
        has_linger
    }

    #[tokio::test(start_paused = true)]
    async fn lingers_that_clients_miss_become_rare_until_one_is_met() {
        let mut pace = ShipPace::new(ShipGap::Fixed(Duration::ZERO), INTERVAL, MAX_LAG);
        put(&mut pace, PUT).await;
        for rests in [1, 3, 7, 15, 31, 63, 63] {
            assert!(lingers(&mut pace, 1).await);
            for _ in 0..rests {
                assert!(!lingers(&mut pace, 1).await, "{rests}");
            }
        }
        for _ in 0..9 {
            assert!(lingers(&mut pace, 2).await);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_measured_gap_is_the_median_of_the_newest_puts() {
        let mut pace = ShipPace::new(ShipGap::Measured, INTERVAL, MAX_LAG);
        for _ in 0..MEASURED {
            put(&mut pace, Duration::from_millis(900)).await;
        }
        for _ in 0..MEASURED / 2 {
            put(&mut pace, Duration::from_millis(7)).await;
        }
        let started = put(&mut pace, Duration::from_millis(1)).await;
        let next = pace.next(Instant::now(), 1, 2);
        assert_eq!(next, ShipTurn::Spaced(started + Duration::from_millis(7)));
        assert_eq!(pace.took.len(), MEASURED);
    }
}
