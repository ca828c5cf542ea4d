//! Metrics of the replica. Only a daemon with a bucket has them.

use std::collections::VecDeque;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus::{Error, Gauge, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};
use wald_storage::{Position, ReplicaProgress};

use super::{Maker, signed};

/// Roles of a node, as `wald_replica_role` has them.
pub(crate) const ROLES: [&str; 3] = ["owner", "stand_by", "joining"];

/// Labels of results.
const RESULTS: [&str; 2] = ["ok", "failed"];

/// The kinds of things that go to the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UploadKind {
    /// A part of the journal.
    Rows,
    /// Files of the store, and their manifest.
    Files,
}

/// All metrics of a replica.
pub(crate) struct ReplicaMetrics {
    lag_bytes: IntGauge,
    lag_records: IntGauge,
    lag_limit: IntGauge,
    lag_seconds: Gauge,
    uploads: IntCounterVec,
    tail_rows: IntGauge,
    term: IntGauge,
    fenced: IntCounter,
    takeovers: IntCounter,
    takeover_seconds: Gauge,
    role: IntGaugeVec,
    stand_bys: IntGauge,
    lease_age: Gauge,
    copy_age: Gauge,
    requests: IntCounterVec,
    request_seconds: HistogramVec,
    bytes: IntCounterVec,
    progress: OnceLock<ReplicaSource>,
    age: Mutex<LagAge>,
    /// Durations of the newest writes of the journal to the bucket, newest first.
    puts: Mutex<VecDeque<Duration>>,
}

/// Number of the newest writes to the bucket whose percentiles are shown.
const MEASURED_PUTS: usize = 256;

/// The bound on the lag, and a function that gives the progress and the number of records of the lag.
type ReplicaSource = (u64, Box<dyn Fn() -> (ReplicaProgress, u64) + Send + Sync>);

/// The replica at a moment.
#[derive(Debug, Default)]
pub(crate) struct ReplicaFigures {
    /// Number of the term in which this node owns the store.
    pub(crate) term: u64,
    pub(crate) progress: ReplicaProgress,
    /// Records that are durable and not replicated.
    pub(crate) lag_records: u64,
    /// Age of the oldest byte that is durable and not replicated.
    pub(crate) lag_age: Duration,
    /// Bound on [`ReplicaFigures::lag_bytes`].
    pub(crate) max_lag: u64,
    /// Median and 99th percentile of the newest writes of the journal to the bucket; `None` without one.
    pub(crate) puts: Option<(Duration, Duration)>,
}

impl ReplicaFigures {
    /// Bytes that are durable and not replicated.
    pub(crate) fn lag_bytes(&self) -> u64 {
        self.progress.behind
    }
}

/// Finds the age of the replica's lag from samples of its progress.
struct LagAge {
    /// The journal was durable up to this position at this time.
    mark: (Position, Instant),
}

impl LagAge {
    /// The least age of the oldest byte that is durable and not replicated; 0 without one.
    fn of(&mut self, progress: &ReplicaProgress, now: Instant) -> Duration {
        if progress.replicated >= self.mark.0 {
            self.mark = (progress.durable, now);
        }
        match progress.durable > progress.replicated {
            true => now.duration_since(self.mark.1),
            false => Duration::ZERO,
        }
    }
}

impl ReplicaMetrics {
    pub(super) fn new(make: &Maker<'_>) -> Result<Self, Error> {
        let metrics = Self {
            lag_bytes: make.gauge(
                "wald_replica_lag_bytes",
                "Bytes of the journal that are durable and not in the bucket. The loss of the machine takes them. At wald_replica_lag_limit_bytes appends are answered BUSY.",
            )?,
            lag_records: make.gauge(
                "wald_replica_lag_records",
                "Records that are durable and not in the bucket. The loss of the machine takes them. Exact until they are in more than 1,024 groups of appends, then an upper bound until those are in the bucket.",
            )?,
            lag_limit: make.gauge(
                "wald_replica_lag_limit_bytes",
                "Bound on wald_replica_lag_bytes: the setting replica_max_lag.",
            )?,
            lag_seconds: make.float_gauge(
                "wald_replica_lag_seconds",
                "Age in seconds of the oldest byte that is durable and not in the bucket, to 1 second. Above 30: the bucket is slow or gives no answer.",
            )?,
            uploads: make.register(IntCounterVec::new(
                prometheus::Opts::new(
                    "wald_replica_uploads_total",
                    "Uploads to the bucket, by kind (rows of the journal; files of the store with their manifest) and result. Failed ones are repeated.",
                ),
                &["kind", "result"],
            )?)?,
            tail_rows: make.gauge(
                "wald_tail_rows",
                "Rows of the journal in the bucket that no file holds yet. Growing for long: no files are uploaded.",
            )?,
            term: make.gauge(
                "wald_term",
                "Term in which this node owns the store; it rises with each owner. 0: it does not own it yet.",
            )?,
            fenced: make.counter(
                "wald_fenced_total",
                "Times that another node has taken the store from this one. Above 0 this node ends, or begins again as a stand-by.",
            )?,
            takeovers: make.counter(
                "wald_takeovers_total",
                "Times that this process has taken the store over from another node that had not released it: as a stand-by, or by --take-over. Above 0: the node before ends, and DURABLE records that it had not shipped are lost.",
            )?,
            takeover_seconds: make.float_gauge(
                "wald_takeover_seconds",
                "Duration of the last take-over of this process in seconds, from the decision until the store was open. 0: it has taken nothing over. Above 30: the stand-by had to fetch files, or the bucket is slow.",
            )?,
            role: make.register(IntGaugeVec::new(
                prometheus::Opts::new(
                    "wald_replica_role",
                    "1 for the role of this node among the nodes of the store, else 0. Roles: owner, stand_by (has a current copy), joining (has none yet). All 0: the setting stand_by is off.",
                ),
                &["role"],
            )?)?,
            stand_bys: make.gauge(
                "wald_stand_bys",
                "Stand-bys that may take the store over now, as the record of the owner names them. 0: nobody follows when the owner dies.",
            )?,
            lease_age: make.float_gauge(
                "wald_lease_age_seconds",
                "Time in seconds since the last sign of life of this node that the bucket has taken began. At 4/5 of lease_ttl an owner with stand-bys answers nothing but REPLICATED.",
            )?,
            copy_age: make.float_gauge(
                "wald_copy_age_seconds",
                "Time in seconds since the copy of this stand-by was known to have everything; 0 without one. When it passes lease_ttl, reads of any_node go to the owner.",
            )?,
            requests: make.register(IntCounterVec::new(
                prometheus::Opts::new(
                    "wald_bucket_requests_total",
                    "Requests to the bucket of the replica, by operation and result: ok, condition, not_found, denied, failed, dropped. Retries count as one request.",
                ),
                &["op", "result"],
            )?)?,
            request_seconds: make.latencies(
                "wald_bucket_request_seconds",
                "Duration of requests to the bucket of the replica in seconds, with retries, by operation.",
                &["op"],
            )?,
            bytes: make.counters(
                "wald_bucket_bytes_total",
                "Bytes of objects to and from the bucket of the replica, by direction.",
                "direction",
                &["sent", "received"],
            )?,
            progress: OnceLock::new(),
            age: Mutex::new(LagAge {
                mark: (Position::ZERO, Instant::now()),
            }),
            puts: Mutex::default(),
        };
        for kind in ["rows", "files"] {
            for result in RESULTS {
                let labels = [kind, result];
                metrics.uploads.get_metric_with_label_values(&labels)?;
            }
        }
        for role in ROLES {
            metrics.role.get_metric_with_label_values(&[role])?;
        }
        // So that a metric without requests has its name.
        let put = ["put", "ok"];
        metrics.requests.get_metric_with_label_values(&put)?;
        metrics
            .request_seconds
            .get_metric_with_label_values(&["put"])?;
        Ok(metrics)
    }

    /// Shows the progress and the number of records of the lag that the function gives from now on. `max_lag`: bound on
    /// the bytes of the lag.
    pub(crate) fn watch(
        &self,
        max_lag: u64,
        progress: impl Fn() -> (ReplicaProgress, u64) + Send + Sync + 'static,
    ) {
        self.lag_limit.set(signed(max_lag));
        // There is one replica in a process.
        let _ = self.progress.set((max_lag, Box::new(progress)));
    }

    /// The replica now; zeros before it is watched. The age of the lag is known as exactly as calls are frequent.
    pub(crate) fn figures(&self) -> ReplicaFigures {
        let Some((max_lag, progress)) = self.progress.get() else {
            return ReplicaFigures::default();
        };
        let (progress, lag_records) = progress();
        ReplicaFigures {
            term: self.term(),
            progress,
            lag_records,
            lag_age: self.age.lock().of(&progress, Instant::now()),
            max_lag: *max_lag,
            puts: percentiles(&self.puts.lock()),
        }
    }

    /// Takes a sample.
    pub(crate) fn sample(&self) {
        let now = self.figures();
        self.lag_bytes.set(signed(now.lag_bytes()));
        self.lag_records.set(signed(now.lag_records));
        self.lag_seconds.set(now.lag_age.as_secs_f64());
    }

    /// A part of the journal was written to the bucket.
    pub(crate) fn stored(&self, took: Duration) {
        let mut puts = self.puts.lock();
        puts.truncate(MEASURED_PUTS - 1);
        puts.push_front(took);
    }

    /// Something was uploaded, or was not.
    pub(crate) fn uploaded(&self, kind: UploadKind, is_done: bool) {
        let kind = match kind {
            UploadKind::Rows => "rows",
            UploadKind::Files => "files",
        };
        let result = if is_done { "ok" } else { "failed" };
        self.uploads.with_label_values(&[kind, result]).inc();
    }

    /// Number of rows in the tail.
    pub(crate) fn has_rows(&self, rows: u64) {
        self.tail_rows.set(signed(rows));
    }

    /// This node owns the store in a term.
    pub(crate) fn owns(&self, term: u64) {
        self.term.set(signed(term));
    }

    /// The term in which this node owns the store; 0: it does not own it yet.
    pub(crate) fn term(&self) -> u64 {
        u64::try_from(self.term.get()).unwrap_or(0)
    }

    /// Another node owns the store.
    pub(crate) fn fenced(&self) {
        self.fenced.inc();
    }

    /// This node has taken the store over.
    pub(crate) fn took_over(&self) {
        self.takeovers.inc();
    }

    /// A take-over of this process has ended.
    pub(crate) fn takeover_took(&self, took: Duration) {
        self.takeover_seconds.set(took.as_secs_f64());
    }

    /// The nodes as they are now. `role`: one of [`ROLES`]. `ages`: of the lease, and of the copy of a stand-by.
    pub(crate) fn nodes(&self, role: &str, stand_bys: usize, ages: (Duration, Option<Duration>)) {
        let (lease_age, copy_age) = ages;
        for known in ROLES {
            let is_role = i64::from(known == role);
            self.role.with_label_values(&[known]).set(is_role);
        }
        self.stand_bys
            .set(i64::try_from(stand_bys).unwrap_or(i64::MAX));
        self.lease_age.set(lease_age.as_secs_f64());
        self.copy_age
            .set(copy_age.unwrap_or_default().as_secs_f64());
    }

    /// A request to the bucket has ended.
    pub(crate) fn requested(
        &self,
        (op, result): (&str, &str),
        took: Duration,
        (sent, received): (u64, u64),
    ) {
        self.requests.with_label_values(&[op, result]).inc();
        let seconds = self.request_seconds.with_label_values(&[op]);
        seconds.observe(took.as_secs_f64());
        self.bytes.with_label_values(&["sent"]).inc_by(sent);
        self.bytes.with_label_values(&["received"]).inc_by(received);
    }
}

/// Median and 99th percentile; `None` without a duration.
fn percentiles(puts: &VecDeque<Duration>) -> Option<(Duration, Duration)> {
    let mut sorted: Vec<Duration> = puts.iter().copied().collect();
    sorted.sort_unstable();
    let at = |hundredths: usize| sorted.get(sorted.len() * hundredths / 100).copied();
    Some((at(50)?, at(99)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_newest_writes() {
        let metrics = crate::metrics::Metrics::new().unwrap().replica().unwrap();
        metrics.watch(7, Default::default);
        assert_eq!(metrics.figures().puts, None);
        let millis = Duration::from_millis;
        metrics.stored(millis(5));
        assert_eq!(metrics.figures().puts, Some((millis(5), millis(5))));
        for took in 0..1000 {
            metrics.stored(millis(took % 100));
        }
        let (p50, p99) = metrics.figures().puts.unwrap();
        // 744 to 999: 100 durations twice, and 44 to 99 once more.
        assert!(p50 > millis(50) && p50 < millis(65), "{p50:?}");
        assert_eq!(p99, millis(99));
        assert_eq!(metrics.figures().max_lag, 7);
    }

    #[test]
    fn lag_is_as_old_as_the_mark_that_the_replica_has_not_reached() {
        let begin = Instant::now();
        let after = |seconds| begin + Duration::from_secs(seconds);
        let mut age = LagAge {
            mark: (Position::ZERO, begin),
        };
        let mut at = |durable, replicated, seconds| {
            let progress = ReplicaProgress {
                durable: Position::new(durable),
                replicated: Position::new(replicated),
                ..ReplicaProgress::default()
            };
            age.of(&progress, after(seconds)).as_secs()
        };
        // Nothing waits for an hour: new bytes are not an hour old.
        assert_eq!(at(10, 10, 0), 0);
        assert_eq!(at(10, 10, 3600), 0);
        assert_eq!(at(20, 10, 3601), 0);
        // It moves, but not as fast as the journal.
        assert_eq!(at(30, 15, 3604), 3);
        assert_eq!(at(40, 20, 3606), 0);
        assert_eq!(at(50, 39, 3608), 2);
        // It stands.
        assert_eq!(at(60, 39, 3700), 94);
        assert_eq!(at(60, 60, 3701), 0);
    }
}
