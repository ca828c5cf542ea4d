//! The last minutes of the server: a point each second, from the histograms and counters that
//! /metrics shows. They are kept so that a page can show a chart at once.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use wald_proto::v1;
use wald_storage::{Clock, Statistics, SystemClock};

use crate::metrics::{Buckets, Totals, float};
use crate::rpc::Node;

/// Time between two points.
const STEP: Duration = Duration::from_secs(1);
/// Points kept: ten minutes, about 120 KiB.
const POINTS: usize = 600;
/// Number of steps before a point that its rates and percentiles cover: enough for a p99 at
/// some hundred appends a second, and still recent.
const WINDOW: usize = 5;

/// Names of the numbers of a point, in order. Rates are per second, times in seconds.
pub(super) const COLUMNS: [&str; 24] = [
    "time_ms",
    "append_records",
    "append_bytes",
    "read_records",
    "read_bytes",
    "rejected",
    "replicated_acks",
    "replicated_p50",
    "replicated_p99",
    "durable_acks",
    "durable_p50",
    "durable_p99",
    "written_acks",
    "written_p50",
    "written_p99",
    "accepted_acks",
    "accepted_p50",
    "accepted_p99",
    "flushes",
    "flush_p50",
    "flush_p99",
    "records_per_flush",
    "lag_bytes",
    "lag_seconds",
];

/// Not a number where there was nothing to measure: null in JSON.
pub(super) type Point = [f64; COLUMNS.len()];

/// The last minutes.
pub(super) struct History {
    points: Mutex<VecDeque<Point>>,
    /// The newest point with the state of that moment, as the event that pages get.
    newest: watch::Sender<Arc<str>>,
}

impl History {
    pub(super) fn new() -> Self {
        Self {
            points: Mutex::new(VecDeque::with_capacity(POINTS)),
            newest: watch::Sender::new(Arc::from("")),
        }
    }

    /// All points, oldest first.
    pub(super) fn points(&self) -> Vec<Point> {
        let points = self.points.lock().unwrap_or_else(PoisonError::into_inner);
        points.iter().copied().collect()
    }

    /// Wakes at each point. A reader that is slow misses some.
    pub(super) fn newest(&self) -> watch::Receiver<Arc<str>> {
        self.newest.subscribe()
    }

    fn add(&self, point: Point, event: String) {
        {
            let mut points = self.points.lock().unwrap_or_else(PoisonError::into_inner);
            if points.len() == POINTS {
                points.pop_front();
            }
            points.push_back(point);
        }
        self.newest.send_replace(event.into());
    }
}

/// The event of a point.
#[derive(Serialize)]
struct Sample {
    point: Point,
    state: EngineView,
}

/// Contents of the engine at a moment; zeros while it starts.
#[derive(Serialize)]
pub(super) struct EngineView {
    phase: &'static str,
    logs: u64,
    followers: u64,
    inflight_bytes: u64,
    buffered_bytes: u64,
    journal_segments: u64,
    ready_segments: u64,
    open_segments: u64,
    journal_bytes: u64,
    sorted_bytes: u64,
    pool_bytes: u64,
    quarantine_bytes: u64,
    free_bytes: Option<u64>,
    quarantined_records: u64,
    journal_failed: bool,
    /// `None`: the store has no replica.
    replica: Option<ReplicaView>,
}

/// The replica at a moment. The page names its place for people with the right ops alone.
#[derive(Serialize)]
struct ReplicaView {
    /// serving, `bucket_down` or fenced.
    state: String,
    term: u64,
    lag_bytes: u64,
    lag_records: u64,
    lag_seconds: f64,
    max_lag_bytes: u64,
    replicated_position: u64,
    put_p50: Option<f64>,
    put_p99: Option<f64>,
}

impl ReplicaView {
    fn new(now: &v1::ReplicaStatus) -> Self {
        let seconds = |span: Option<prost_types::Duration>| {
            let span = Duration::try_from(span?).ok()?;
            Some(span.as_secs_f64())
        };
        let state = now.state().as_str_name();
        let state = state.trim_start_matches("REPLICA_STATE_");
        Self {
            state: state.to_ascii_lowercase(),
            term: now.term,
            lag_bytes: now.lag_bytes,
            lag_records: now.lag_records,
            lag_seconds: seconds(now.lag_age).unwrap_or_default(),
            max_lag_bytes: now.max_lag_bytes,
            replicated_position: now.replicated_position,
            put_p50: seconds(now.put_p50),
            put_p99: seconds(now.put_p99),
        }
    }
}

impl EngineView {
    pub(super) fn of(node: &Node) -> Self {
        Self::new(node, &statistics(node))
    }

    fn new(node: &Node, now: &Statistics) -> Self {
        Self {
            phase: node.phase.borrow().not_ready().unwrap_or("serving"),
            logs: now.logs,
            followers: now.followers,
            inflight_bytes: now.inflight_bytes,
            buffered_bytes: now.buffered_bytes,
            journal_segments: now.journal_segments,
            ready_segments: now.ready_segments,
            open_segments: now.open_segments,
            journal_bytes: now.journal_bytes,
            sorted_bytes: now.sorted_bytes,
            pool_bytes: now.pool_bytes,
            quarantine_bytes: now.quarantine_bytes,
            free_bytes: now.free_bytes,
            quarantined_records: now.quarantined_records,
            journal_failed: now.journal_failed,
            replica: node
                .replica()
                .map(|replica| ReplicaView::new(&replica.now())),
        }
    }
}

fn statistics(node: &Node) -> Statistics {
    let store = node.store.get();
    store.map_or_else(Statistics::default, |store| store.engine.statistics())
}

/// Takes a point each second, for ever.
pub(super) async fn sample(node: Arc<Node>, history: Arc<History>) {
    let mut ticks = interval(STEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut window: VecDeque<(Instant, Totals)> = VecDeque::with_capacity(WINDOW + 1);
    loop {
        ticks.tick().await;
        let (now, totals, statistics) = (Instant::now(), node.metrics.totals(), statistics(&node));
        if let Some((since, before)) = window.front() {
            let point = point(before, &totals, now - *since, &statistics);
            let state = EngineView::new(&node, &statistics);
            let event = serde_json::to_string(&Sample { point, state });
            history.add(point, event.unwrap_or_default());
        }
        if window.len() == WINDOW {
            window.pop_front();
        }
        window.push_back((now, totals));
    }
}

fn point(before: &Totals, now: &Totals, time: Duration, state: &Statistics) -> Point {
    let seconds = time.as_secs_f64().max(1e-3);
    let rate = |now: u64, before: u64| float(now.saturating_sub(before)) / seconds;
    let times = |now: &Buckets, before: &Buckets| {
        let quantile = |q| now.quantile_since(before, q).unwrap_or(f64::NAN);
        [rate(now.count, before.count), quantile(0.5), quantile(0.99)]
    };
    let [replicated, durable, written, accepted] =
        [0, 1, 2, 3].map(|level: usize| times(&now.appends[level], &before.appends[level]));
    let flush = times(&now.flush, &before.flush);
    let records = float(now.append_records.saturating_sub(before.append_records));
    let flushes = float(now.flush.count.saturating_sub(before.flush.count));
    let columns = [
        rate(now.append_records, before.append_records),
        rate(now.append_bytes, before.append_bytes),
        rate(now.read_records, before.read_records),
        rate(now.read_bytes, before.read_bytes),
        rate(now.rejected, before.rejected),
        replicated[0],
        replicated[1],
        replicated[2],
        durable[0],
        durable[1],
        durable[2],
        written[0],
        written[1],
        written[2],
        accepted[0],
        accepted[1],
        accepted[2],
        flush[0],
        flush[1],
        flush[2],
        records / flushes,
        float(state.durable_lag_bytes),
        state.durable_lag.as_secs_f64(),
    ];
    let mut point = [f64::NAN; COLUMNS.len()];
    let micros = u64::try_from(SystemClock.now().micros()).unwrap_or(0);
    point[0] = float(micros / 1000);
    for (place, number) in point.iter_mut().skip(1).zip(columns) {
        *place = short(number);
    }
    point
}

/// Three digits: more would be a claim, and take room on the way to the page.
fn short(number: f64) -> f64 {
    if number == 0.0 || !number.is_finite() {
        return number;
    }
    format!("{number:.2e}").parse().unwrap_or(number)
}

#[cfg(test)]
mod tests {
    use wald_storage::Durability;

    use super::*;
    use crate::metrics::Metrics;

    #[test]
    fn point_has_rates_of_the_time_between_and_nothing_where_nothing_was() {
        let metrics = Metrics::new().unwrap();
        let before = metrics.totals();
        for _ in 0..100 {
            metrics.appended(Durability::Written, Duration::from_millis(3), 1, (2, 50));
        }
        let point = point(
            &before,
            &metrics.totals(),
            Duration::from_secs(4),
            &Statistics::default(),
        );
        let of = |name: &str| point[COLUMNS.iter().position(|c| *c == name).unwrap()];
        assert_eq!(of("append_records"), 50.0);
        assert_eq!(of("append_bytes"), 1250.0);
        assert_eq!(of("written_acks"), 25.0);
        assert!((0.0025..=0.005).contains(&of("written_p99")));
        assert!(of("durable_p99").is_nan());
        assert!(of("flush_p50").is_nan());
        assert_eq!(of("lag_bytes"), 0.0);
        let json = serde_json::to_string(&point).unwrap();
        assert!(json.contains("null") && !json.contains("NaN"));
    }

    #[test]
    fn history_forgets_its_oldest_point_and_wakes_those_who_wait() {
        let history = History::new();
        let mut newest = history.newest();
        newest.mark_unchanged();
        for index in 0..=POINTS {
            let mut point = [0.0; COLUMNS.len()];
            point[0] = float(index as u64);
            history.add(point, index.to_string());
        }
        let points = history.points();
        assert_eq!(points.len(), POINTS);
        assert_eq!(points[0][0], 1.0);
        assert!(newest.has_changed().unwrap());
        assert_eq!(&**newest.borrow(), "600");
    }

    #[test]
    fn numbers_are_shortened_to_three_digits() {
        assert_eq!(short(123_456.0), 123_000.0);
        assert_eq!(short(0.000_123_456), 0.000_123);
        assert_eq!(short(0.0), 0.0);
        assert!(short(f64::NAN).is_nan());
    }
}
