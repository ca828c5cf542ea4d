//! Every metric of Wald, in one place. Names are API: dashboards and alerts hold on to
//! them. Help texts are the questions that the metrics answer.
//!
//! Children are looked up once, here, and kept: on the hot path a metric is one or two
//! atomic additions. Every combination of labels starts at 0, so that a rate over the
//! first event of a kind is seen; labels are bounded, and never the name of a log.

mod audit;
mod auth;
mod calls;
mod deadline;
mod followers;
#[cfg(any(feature = "object", test))]
#[cfg_attr(
    not(feature = "object"),
    allow(dead_code, reason = "builds without object stores forward nothing")
)]
mod forward;
mod lag;
mod observer;
mod ports;
mod process;
mod quotas;
mod refusals;
#[cfg(any(feature = "object", test))]
#[cfg_attr(
    not(feature = "object"),
    allow(dead_code, reason = "tests compare its names with the dashboards")
)]
mod replica;
mod tenants;
mod tls;
mod totals;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{
    Encoder, Error, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter,
    IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};
use wald_proto::v1::Reason;
use wald_storage::{AppendError, Durability, RecoveryReport, Statistics, Timestamp};

use crate::auth::TenantUsage;
use crate::logging;
use crate::status;

pub(crate) use audit::{AuditFailure, AuditMetrics};
pub(crate) use auth::{AuthFailure, AuthMetrics, FileKind, ReloadMetrics};
pub(crate) use calls::{CallBody, CallCounter, CallFuture, RequestHead, code_in, code_name};
pub(crate) use deadline::Deadline;
#[cfg(test)]
pub(crate) use deadline::MalformedTimeout;
pub(crate) use followers::{FollowerWait, FollowerWaits};
#[cfg(feature = "object")]
pub(crate) use forward::{ForwardMetrics, ForwardResult};
pub(crate) use lag::{Lag, lags};
use ports::BothPorts;
pub(crate) use ports::{CountedConnection, PortMetrics};
use quotas::QuotaGauges;
#[cfg(feature = "object")]
pub(crate) use replica::{ReplicaFigures, ReplicaMetrics, UploadKind};
use tenants::TenantMetrics;
pub(crate) use tenants::{RateFigures, TenantFigures};
pub(crate) use tls::{HandshakeResult, TlsMetrics};
pub(crate) use totals::{Buckets, Totals, float};

/// 10 ms times a power of two: from 20 us (a flush of battery-backed memory) to 10 s (a
/// disk in trouble), with 10 ms, the usual objective, exactly on a bound.
fn latency_buckets() -> Vec<f64> {
    (-9..=10).map(|power| 0.01 * 2f64.powi(power)).collect()
}

/// Latency buckets from 2.4 us on, for the parts of a time that itself starts at 20 us.
fn phase_buckets() -> Vec<f64> {
    (-12..=10).map(|power| 0.01 * 2f64.powi(power)).collect()
}

/// Powers of two from 1: groups are small numbers that grow with the load.
fn count_buckets() -> Vec<f64> {
    (0..=14).map(|power| 2f64.powi(power)).collect()
}

/// Powers of four from 64 bytes (one small frame) to 64 MiB.
fn byte_buckets() -> Vec<f64> {
    (3..=13).map(|power| 4f64.powi(power)).collect()
}

/// Reasons for which a condition fails.
const CONDITIONS: [Reason; 9] = [
    Reason::PositionMismatch,
    Reason::LogMissing,
    Reason::LogExists,
    Reason::LogReplaced,
    Reason::Fenced,
    Reason::ProducerGap,
    Reason::ProducerFenced,
    Reason::ProducerExpired,
    Reason::ProducerConflict,
];

/// Seconds since 1970; 0 before.
fn seconds_since_1970(time: std::time::SystemTime) -> f64 {
    time.duration_since(std::time::SystemTime::UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

/// Registers each metric that it makes, and remembers the first failure.
struct Maker<'a>(&'a Registry);

impl Maker<'_> {
    fn register<C: Collector + Clone + 'static>(&self, collector: C) -> Result<C, Error> {
        self.0.register(Box::new(collector.clone()))?;
        Ok(collector)
    }

    fn histogram(&self, name: &str, help: &str, buckets: Vec<f64>) -> Result<Histogram, Error> {
        self.register(Histogram::with_opts(
            HistogramOpts::new(name, help).buckets(buckets),
        )?)
    }

    fn latencies(&self, name: &str, help: &str, labels: &[&str]) -> Result<HistogramVec, Error> {
        self.histograms(name, help, labels, latency_buckets())
    }

    fn histograms(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
        buckets: Vec<f64>,
    ) -> Result<HistogramVec, Error> {
        let options = HistogramOpts::new(name, help).buckets(buckets);
        self.register(HistogramVec::new(options, labels)?)
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, Error> {
        self.register(IntCounter::new(name, help)?)
    }

    fn counters(
        &self,
        name: &str,
        help: &str,
        label: &str,
        values: &[&str],
    ) -> Result<IntCounterVec, Error> {
        let counters = self.register(IntCounterVec::new(Opts::new(name, help), &[label])?)?;
        for value in values {
            counters.get_metric_with_label_values(&[value])?;
        }
        Ok(counters)
    }

    fn gauge(&self, name: &str, help: &str) -> Result<IntGauge, Error> {
        self.register(IntGauge::new(name, help)?)
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, Error> {
        self.register(IntGaugeVec::new(Opts::new(name, help), labels)?)
    }

    /// Gauges with the label `kind`.
    fn gauges_by_kind(&self, name: &str, help: &str, kinds: &[&str]) -> Result<GaugeVec, Error> {
        let gauges = self.register(GaugeVec::new(Opts::new(name, help), &["kind"])?)?;
        for kind in kinds {
            gauges.get_metric_with_label_values(&[kind])?;
        }
        Ok(gauges)
    }

    fn float_gauge(&self, name: &str, help: &str) -> Result<Gauge, Error> {
        self.register(Gauge::new(name, help)?)
    }
}

/// Kind of a read from a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadOp {
    /// One page.
    Read,
    /// One step of a scan.
    Scan,
}

/// All metrics, with their children at hand.
pub(crate) struct Metrics {
    registry: Registry,
    calls: calls::CallMetrics,
    engine: observer::EngineMetrics,
    append: HistogramVec,
    append_accepted: Histogram,
    append_written: Histogram,
    append_durable: Histogram,
    read_page: Histogram,
    read_scan: Histogram,
    delivery_lag: Histogram,
    appended_records: IntCounter,
    appended_bytes: IntCounter,
    deduplicated: IntCounter,
    sessions: IntGauge,
    pub(crate) ports: BothPorts,
    /// Messages of followers that wait for their clients.
    pub(crate) follower_waits: FollowerWaits,
    slow_followers: IntGauge,
    pub(crate) tls: TlsMetrics,
    pub(crate) auth: AuthMetrics,
    pub(crate) audit: AuditMetrics,
    pub(crate) reloads: ReloadMetrics,
    admitted: IntGaugeVec,
    memory: OnceLock<MemoryParts>,
    tenants: TenantMetrics,
    condition_failures: IntCounterVec,
    state: StateGauges,
    recovery_seconds: GaugeVec,
    recovery_epoch: IntGauge,
    backup_seconds: Gauge,
    backup_bytes: IntGauge,
    lost_log_lines: IntCounterVec,
    cursor_lag: IntGaugeVec,
    #[cfg(any(feature = "object", test))]
    replica: OnceLock<Arc<replica::ReplicaMetrics>>,
}

/// Parts of the memory that calls hold, as labels.
const PARTS: [&str; 4] = ["appends", "requests", "answers", "queued"];

/// Reports the bytes of each of [`PARTS`].
type MemoryParts = Box<dyn Fn() -> [u64; PARTS.len()] + Send + Sync>;

/// An append session that is counted as open.
pub(crate) struct OpenSession(IntGauge);

impl Drop for OpenSession {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Phases of a start; the first is all of it.
const RECOVERY_PHASES: [&str; 4] = ["total", "checkpoint", "segments", "begin"];

/// A metric of a number that the engine counts.
trait StateMetric: Sized {
    /// Type of the number.
    type Number;

    fn make(make: &Maker<'_>, name: &str, help: &str) -> Result<Self, Error>;

    fn show(&self, number: Self::Number);
}

impl StateMetric for IntGauge {
    type Number = u64;

    fn make(make: &Maker<'_>, name: &str, help: &str) -> Result<Self, Error> {
        make.gauge(name, help)
    }

    fn show(&self, number: u64) {
        self.set(signed(number));
    }
}

impl StateMetric for Gauge {
    type Number = f64;

    fn make(make: &Maker<'_>, name: &str, help: &str) -> Result<Self, Error> {
        make.float_gauge(name, help)
    }

    fn show(&self, number: f64) {
        self.set(number);
    }
}

impl StateMetric for IntCounter {
    type Number = u64;

    fn make(make: &Maker<'_>, name: &str, help: &str) -> Result<Self, Error> {
        make.counter(name, help)
    }

    /// The engine counts. One thread at a time scrapes, so nothing is counted twice.
    fn show(&self, number: u64) {
        self.inc_by(number.saturating_sub(self.get()));
    }
}

/// Makes the metrics without labels that are read from the engine when someone scrapes. Each row has the help text,
/// field, type, name, and the number in [`Statistics`].
macro_rules! state_metrics {
    ($now:ident: $($(#[doc = $help:literal])+ $field:ident: $type:ident = $name:literal, $number:expr;)+) => {
        struct StateMetrics {
            $($field: $type,)+
        }

        impl StateMetrics {
            fn new(make: &Maker<'_>) -> Result<Self, Error> {
                Ok(Self {
                    $($field: StateMetric::make(make, $name, concat!($($help),+).trim_start())?,)+
                })
            }

            fn show(&self, $now: &Statistics) {
                $(self.$field.show($number);)+
            }
        }
    };
}

state_metrics! {
    now:
    /// Logs of the store. At max_logs new ones are refused with QUOTA.
    logs: IntGauge = "wald_logs", now.logs;
    /// Producers of all logs. At max_producers new ones are refused with QUOTA.
    producers: IntGauge = "wald_producers", now.producers;
    /// Producers of the log that has the most. At wald_log_producers_limit that log refuses new ones with QUOTA.
    producers_of_log: IntGauge = "wald_log_producers_max", now.producers_of_log;
    /// Bound on the producers of one log: the setting max_producers_per_log.
    producers_of_log_limit: IntGauge = "wald_log_producers_limit", now.max_producers_per_log;
    /// Cursors of all logs. At max_cursors new ones are refused with QUOTA.
    cursors: IntGauge = "wald_cursors", now.cursors;
    /// Bytes of the names of all logs, producers and cursors. At max_name_bytes new ones are refused with QUOTA.
    name_bytes: IntGauge = "wald_name_bytes", now.name_bytes;
    /// Bytes of appends that wait for their ack. Near max_inflight_bytes new ones are refused with BUSY.
    inflight_bytes: IntGauge = "wald_inflight_bytes", now.inflight_bytes;
    /// Bytes that a power cut would take now: written or in memory only (manual), and not flushed.
    durable_lag_bytes: IntGauge = "wald_durable_lag_bytes", now.durable_lag_bytes + now.buffered_bytes;
    /// Age in seconds of the oldest byte that is written and not flushed. A power cut would reach back this far.
    durable_lag_seconds: Gauge = "wald_durable_lag_seconds", now.durable_lag.as_secs_f64();
    /// Finished segments that are open for reading. At most max_open_segments.
    open_segments: IntGauge = "wald_open_segments", now.open_segments;
    /// Segments that were closed to open another. Above 1 a second raise max_open_segments.
    segment_cache_evictions: IntCounter = "wald_segment_cache_evictions_total", now.segment_evictions;
    /// Free bytes of the file system for appends, without those that the sorter keeps. NaN if unknown.
    disk_free_bytes: Gauge = "wald_disk_free_bytes", now.free_bytes.map_or(f64::NAN, float);
    /// Records that are known to be damaged, and neither trimmed nor accepted as lost. Above 0 restore them from a
    /// backup, or accept the loss.
    quarantined_records: IntGauge = "wald_quarantined_records", now.quarantined_records;
    /// Reasons why no checkpoint is written, nothing is sorted and no space comes back. 0: all of it goes on. Above
    /// 0, `walctl status` names the reasons.
    held_back: IntGauge = "wald_held_back", now.held_back.len() as u64;
    /// Bytes of files that the device could not read since the start. Above 0 the device is failing: take a backup,
    /// and move the store.
    unreadable_bytes: IntGauge = "wald_unreadable_bytes", now.unreadable_bytes;
    /// 1 after an index or a checkpoint could not be written, 0 after the next one that could. At 1 for long, starts
    /// take longer and appends may be refused.
    indexing_failed: IntGauge = "wald_indexing_failed", now.indexing_failed.into();
    /// Places of the journal where something is lost that nothing attributes to a log. Above 0: records or whole logs
    /// may be gone without a name.
    unattributed_losses: IntGauge = "wald_unattributed_losses", now.unattributed_damages;
    /// Bytes of sealed segments that scrubbing read again. Flat for longer than scrub_interval: scrubbing does not
    /// run.
    scrubbed_bytes: IntCounter = "wald_scrubbed_bytes_total", now.scrubbed_bytes;
    /// Time of the end of the last whole scrubbing pass in seconds since 1970. 0: none since the start.
    last_scrub: Gauge = "wald_scrub_last_pass_timestamp_seconds", now.last_scrub.map_or(0.0, seconds);
    /// Time in seconds since 1970 at which the last whole backup of this store was sent; it survives restarts. Only the exit code of walctl backup says that the backup is kept. 0: none.
    last_backup: Gauge = "wald_backup_last_success_timestamp_seconds", now.last_backup.map_or(0.0, seconds);
    /// Logs whose cursors keep records that retention would drop. 0: cursors hold nothing back.
    held_logs: IntGauge = "wald_retention_held_logs", now.held_logs;
    /// Bytes of segments of the records that only cursors keep from retention. Growing: a consumer is gone; `walctl
    /// cursor list` names it.
    held_bytes: IntGauge = "wald_retention_held_bytes", now.held_bytes;
    /// Age in seconds of the oldest record that only a cursor keeps from retention. 0: none. Above 86400 the consumer
    /// may be gone.
    held_age: Gauge = "wald_retention_held_seconds", now.held_age.as_secs_f64();
    /// Seconds by which the clock of retention by age is behind the system's clock. Below 0: ahead, so records do not
    /// expire. Below -86400 for longer than 10 minutes: `wald reset-clock`.
    expiry_lag: Gauge = "wald_retention_clock_lag_seconds", seconds(Timestamp::from_micros(now.expiry_lag_micros));
    /// Size of the last jump of the system's clock, in seconds; below 0: back. 0: none since the start.
    clock_jump: Gauge = "wald_clock_last_jump_seconds", seconds(Timestamp::from_micros(now.last_clock_jump_micros));
    /// Sorted runs.
    sorted_runs: IntGauge = "wald_sorted_runs", now.sorted_runs;
    /// Bytes that the sorter read.
    sorter_read_bytes: IntCounter = "wald_sorter_read_bytes_total", now.sorter_read_bytes;
    /// Bytes that the sorter wrote. Above 10 times the appended bytes raise sorter_step_bytes: runs are rewritten too
    /// often.
    sorter_written_bytes: IntCounter = "wald_sorter_written_bytes_total", now.sorter_written_bytes;
    /// Bytes of disk space that the sorter gave back: removed files less the runs that replace them.
    sorter_freed_bytes: IntCounter = "wald_sorter_freed_bytes_total", now.sorter_freed_bytes;
    /// Bytes in sorted runs of records that are kept, by the sorter's last pass. 0 before the first.
    sorted_live_bytes: IntGauge = "wald_sorted_live_bytes", now.sorted_live_bytes;
    /// Bytes in sorted runs that hold no live record. Above 1/8 of live bytes for long: the sorter lags.
    sorted_dead_bytes: IntGauge = "wald_sorted_dead_bytes", now.sorted_dead_bytes;
    /// Bytes of files with records that are plain, or under an older key than the newest one. The sorter encrypts them
    /// with the newest. 0 without encryption.
    unrenewed_bytes: IntGauge = "wald_encryption_unrenewed_bytes", now.unrenewed_bytes;
    /// Bytes of segments that are sorted in one pass: 1/8 of sorter_step_bytes. 0: sorting is off. At least this much
    /// normally waits.
    sorter_part_bytes: IntGauge = "wald_sorter_part_bytes", now.sorter_part_bytes;
    /// Bytes of sealed segments that are not sorted yet. Growing beyond sorter_step_bytes: the sorter lags, or is
    /// off.
    unsorted_bytes: IntGauge = "wald_unsorted_bytes", now.unsorted_bytes;
    /// Bytes of records that retention dropped and the archive has.
    archive_written_bytes: IntCounter = "wald_archive_written_bytes_total", now.archive_written_bytes;
    /// Failed writes to the archive. As long as it grows, nothing is dropped and the data directory fills up.
    archive_failures: IntCounter = "wald_archive_failures_total", now.archive_failures;
    /// Scans that wait for new records.
    followers: IntGauge = "wald_followers", now.followers;
    /// 1 after a flush or write of the journal failed, else 0. At 1 appends are refused until a restart.
    journal_failed: IntGauge = "wald_journal_failed", now.journal_failed.into();
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Exact: microseconds of this century are below 2^53.
#[allow(clippy::cast_precision_loss, reason = "see above")]
fn seconds(time: Timestamp) -> f64 {
    time.micros() as f64 / 1e6
}

/// Metrics that are read from the engine when someone scrapes.
struct StateGauges {
    single: StateMetrics,
    store_limits: IntGaugeVec,
    segments: IntGaugeVec,
    disk_bytes: IntGaugeVec,
    clock_jumps: IntCounterVec,
    quotas: QuotaGauges,
}

impl StateGauges {
    fn new(make: &Maker<'_>) -> Result<Self, Error> {
        Ok(Self {
            single: StateMetrics::new(make)?,
            store_limits: make.gauges(
                "wald_store_limit",
                "Bound of the whole store, by setting: max_logs, max_producers, max_cursors, max_name_bytes (bytes). Above 0.8 of one delete, or raise the setting.",
                &["setting"],
            )?,
            segments: make.gauges(
                "wald_segments",
                "Segment files, by state: active, sealed, ready. With 0 ready the next roll waits.",
                &["state"],
            )?,
            disk_bytes: make.gauges(
                "wald_disk_bytes",
                "Bytes of the data directory, by kind: journal, sorted, pool, quarantine.",
                &["kind"],
            )?,
            clock_jumps: make.counters(
                "wald_clock_jumps_total",
                "Jumps of the system's clock by more than 1 second, by direction. Above 0: check its synchronisation.",
                "direction",
                &["ahead", "back"],
            )?,
            quotas: QuotaGauges::new(make)?,
        })
    }

    fn set(&self, now: &Statistics) {
        self.single.show(now);
        self.quotas.show(now);
        let active = now.journal_segments.min(1);
        for (gauges, label, number) in [
            (&self.store_limits, "max_logs", now.max_logs),
            (&self.store_limits, "max_producers", now.max_producers),
            (&self.store_limits, "max_cursors", now.max_cursors),
            (&self.store_limits, "max_name_bytes", now.max_name_bytes),
            (&self.segments, "active", active),
            (&self.segments, "sealed", now.journal_segments - active),
            (&self.segments, "ready", now.ready_segments),
            (&self.disk_bytes, "journal", now.journal_bytes),
            (&self.disk_bytes, "sorted", now.sorted_bytes),
            (&self.disk_bytes, "pool", now.pool_bytes),
            (&self.disk_bytes, "quarantine", now.quarantine_bytes),
        ] {
            gauges.with_label_values(&[label]).set(signed(number));
        }
        for (direction, jumps) in [
            ("ahead", now.clock_jumps_ahead),
            ("back", now.clock_jumps_back),
        ] {
            self.clock_jumps.with_label_values(&[direction]).show(jumps);
        }
    }
}

impl Metrics {
    /// Makes and registers everything; only a name used twice fails.
    ///
    /// # Errors
    /// If two metrics have one name, which is a bug that the first test finds.
    pub(crate) fn new() -> Result<Self, Error> {
        let registry = Registry::new();
        registry.register(Box::new(process::Process::new()))?;
        let make = Maker(&registry);
        let append = make.latencies(
            "wald_append_duration_seconds",
            "Duration of appends in the server in seconds, from the decoded request to the answer, by the durability reached.",
            &["durability"],
        )?;
        let read = make.latencies(
            "wald_read_duration_seconds",
            "Time of the engine in seconds for a page or a step of a scan, without waiting for new records.",
            &["op"],
        )?;
        let build = make.gauges(
            "wald_build_info",
            "Version of the daemon as a label. Always 1.",
            &["version"],
        )?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let recovery = make.register(GaugeVec::new(
            Opts::new(
                "wald_recovery_duration_seconds",
                "Duration of the last recovery in seconds, by phase: total, checkpoint, segments read since it, begin of a new segment.",
            ),
            &["phase"],
        )?)?;
        for phase in RECOVERY_PHASES {
            recovery.with_label_values(&[phase]).set(0.0);
        }
        let state = StateGauges::new(&make)?;
        state.set(&Statistics::default());
        let admitted = make.gauges(
                    "wald_admitted_bytes",
                    "Bytes of memory that calls hold now, by part: appends, other requests, answers \
                     that wait for their clients, and parts of them queued for sockets. Each part has a bound; at its bound calls wait or \
                     are answered BUSY.",
                &["part"],
            )?;
        for part in PARTS {
            admitted.get_metric_with_label_values(&[part])?;
        }
        Ok(Self {
            calls: calls::CallMetrics::new(&make)?,
            engine: observer::EngineMetrics::new(&make)?,
            append_accepted: append.with_label_values(&["accepted"]),
            append_written: append.with_label_values(&["written"]),
            append_durable: append.with_label_values(&["durable"]),
            append,
            read_page: read.with_label_values(&["read"]),
            read_scan: read.with_label_values(&["scan"]),
            delivery_lag: make.histogram(
                "wald_scan_delivery_lag_seconds",
                "Time in seconds from a record's arrival until followers are sent it.",
                latency_buckets(),
            )?,
            appended_records: make.counter(
                "wald_appended_records_total",
                "Records that were appended and acked.",
            )?,
            appended_bytes: make.counter(
                "wald_appended_bytes_total",
                "Bytes of data and headers that were appended and acked.",
            )?,
            deduplicated: make.counter(
                "wald_deduplicated_total",
                "Appends that repeat an earlier batch of their producer: answered, and not applied again.",
            )?,
            sessions: make.gauge("wald_append_sessions", "Open append sessions.")?,
            ports: BothPorts::new(&make)?,
            follower_waits: FollowerWaits::default(),
            slow_followers: make.gauge(
                "wald_slow_followers",
                "Followers whose clients have taken nothing for 10 s while a message waits for them. Their messages hold memory of answers.",
            )?,
            tls: TlsMetrics::new(&make)?,
            auth: AuthMetrics::new(&make)?,
            audit: AuditMetrics::new(&make)?,
            reloads: ReloadMetrics::new(&make)?,
            admitted,
            memory: OnceLock::new(),
            tenants: TenantMetrics::new(&make, state.quotas.limits())?,
            condition_failures: make.counters(
                "wald_condition_failures_total",
                "Conditions of appends that did not hold, by reason.",
                "reason",
                &CONDITIONS.map(Reason::as_str),
            )?,
            state,
            recovery_seconds: recovery,
            recovery_epoch: make.gauge(
                "wald_recovery_epoch",
                "Recovery epoch of the store. It rises with every start after an unclean end, every restore and every accepted loss.",
            )?,
            backup_seconds: make.float_gauge(
                "wald_backup_last_duration_seconds",
                "Duration of the last backup since the start in seconds.",
            )?,
            backup_bytes: make.gauge(
                "wald_backup_last_sent_bytes",
                "Bytes that the last backup since the start sent, without content that the client had.",
            )?,
            cursor_lag: make.gauges(
                "wald_cursor_lag_records",
                "Durable records of a log from its cursor on, for logs of the setting cursor_lag_logs. Growing: the consumer is too slow or gone.",
                &["log", "cursor"],
            )?,
            lost_log_lines: make.counters(
                "wald_log_lines_dropped_total",
                "Log lines that were not written, by reason. unread: stderr was not read fast enough. repeated: one place in the code logged more than one line in a second.",
                "reason",
                &["unread", "repeated"],
            )?,
            #[cfg(any(feature = "object", test))]
            replica: OnceLock::new(),
            registry,
        })
    }

    /// Counts `requests` appends that were acked after `time`, with their records and bytes.
    pub(crate) fn appended(
        &self,
        level: Durability,
        time: Duration,
        requests: u32,
        (records, bytes): (u64, u64),
    ) {
        let replicated;
        let histogram = match level {
            Durability::Accepted => &self.append_accepted,
            Durability::Written => &self.append_written,
            Durability::Durable => &self.append_durable,
            // Only an engine that replicates gets this series.
            Durability::Replicated => {
                replicated = self.replicated_appends();
                &replicated
            }
        };
        observer::observe_each(histogram, time, requests);
        self.appended_records.inc_by(records);
        self.appended_bytes.inc_by(bytes);
    }

    /// Durations of REPLICATED appends.
    fn replicated_appends(&self) -> Histogram {
        self.append.with_label_values(&["replicated"])
    }

    /// The append was a repeat of one that was applied before.
    pub(crate) fn deduplicated(&self) {
        self.deduplicated.inc();
    }

    /// From now on `memory` reports the bytes that calls hold: of appends, of other requests, of
    /// answers that wait for their clients, and of their parts that wait for sockets.
    pub(crate) fn watch_memory(
        &self,
        memory: impl Fn() -> [u64; PARTS.len()] + Send + Sync + 'static,
    ) {
        // There is one server in a process.
        let _ = self.memory.set(Box::new(memory));
    }

    /// An append session began; it is open until the answer is dropped.
    pub(crate) fn session_opened(&self) -> OpenSession {
        self.sessions.inc();
        OpenSession(self.sessions.clone())
    }

    /// Records the time from the engine's answer to the finished responses of this number of
    /// requests.
    pub(crate) fn replied(&self, time: Duration, requests: u32) {
        self.engine.replied(time, requests);
    }

    /// Counts independent requests of a session that were answered with this status; `None`: with an ack.
    pub(crate) fn requests_answered(
        &self,
        is_record: bool,
        refusal: Option<&tonic::Status>,
        count: u64,
    ) {
        self.calls.requests_answered(is_record, refusal, count);
    }

    /// Counts the conditions of an append that did not hold. Refusals are counted where calls end.
    pub(crate) fn append_failed(&self, error: &AppendError) {
        let condition = |reason: Reason| {
            self.condition_failures
                .with_label_values(&[reason.as_str()])
                .inc();
        };
        match error {
            AppendError::ConditionsFailed(failed) => {
                for failed in failed {
                    condition(status::condition_reason(&failed.check));
                }
            }
            AppendError::ProducerGap { .. } => condition(Reason::ProducerGap),
            AppendError::ProducerFenced { .. } => condition(Reason::ProducerFenced),
            AppendError::ProducerExpired { .. } | AppendError::ProducerForgotten { .. } => {
                condition(Reason::ProducerExpired);
            }
            AppendError::ProducerConflict { .. } => condition(Reason::ProducerConflict),
            AppendError::Quota { .. }
            | AppendError::TailUnproven { .. }
            | AppendError::Busy { .. }
            | AppendError::ReplicaBehind { .. }
            | AppendError::BucketDown
            | AppendError::Moved { .. }
            | AppendError::ReplicationUnknown
            | AppendError::NoDescriptors
            | AppendError::DiskFull(_)
            | AppendError::Draining
            | AppendError::JournalFailed(_)
            | AppendError::Invalid(_)
            | AppendError::EpochJump { .. }
            | AppendError::InvisibleName { .. }
            | AppendError::LogNotFound { .. }
            | AppendError::CursorBeyondTail { .. }
            | AppendError::NotSupported(_)
            | AppendError::SessionEnded
            | AppendError::Unknown(_) => {}
        }
    }

    /// A backup was taken by its client to the end.
    pub(crate) fn backed_up(&self, took: Duration, bytes: u64) {
        self.backup_seconds.set(took.as_secs_f64());
        self.backup_bytes.set(signed(bytes));
    }

    /// The engine served a reader.
    pub(crate) fn read(&self, op: ReadOp, time: Duration) {
        match op {
            ReadOp::Read => &self.read_page,
            ReadOp::Scan => &self.read_scan,
        }
        .observe(time.as_secs_f64());
    }

    /// Records the time from a record's arrival to its delivery to a waiting follower.
    pub(crate) fn delivered(&self, lag: Duration) {
        self.delivery_lag.observe(lag.as_secs_f64());
    }

    /// The store is open.
    pub(crate) fn recovered(&self, report: &RecoveryReport) {
        let times = &report.times;
        let seconds = [
            report.duration,
            times.checkpoint,
            times.segments,
            times.begin,
        ];
        for (phase, time) in RECOVERY_PHASES.iter().zip(seconds) {
            self.recovery_seconds
                .with_label_values(&[phase])
                .set(time.as_secs_f64());
        }
        self.recovery_epoch.set(signed(report.recovery_epoch.get()));
    }

    /// Shows the tenants that the function gives from now on.
    pub(crate) fn watch_tenants(
        &self,
        tenants: impl Fn() -> Vec<Arc<TenantUsage>> + Send + Sync + 'static,
    ) {
        self.tenants.watch(tenants);
    }

    /// The metrics of a replica, which are shown from now on.
    ///
    /// # Errors
    /// If two metrics have one name, which is a bug that the first test finds.
    #[cfg(any(feature = "object", test))]
    pub(crate) fn replica(&self) -> Result<Arc<replica::ReplicaMetrics>, Error> {
        let made = Arc::new(replica::ReplicaMetrics::new(&Maker(&self.registry))?);
        Ok(Arc::clone(self.replica.get_or_init(|| made)))
    }

    /// The metric of forwarded calls, which is shown from now on. To be called once.
    ///
    /// # Errors
    /// If two metrics have one name, which is a bug that the first test finds.
    #[cfg(any(feature = "object", test))]
    pub(crate) fn forwards(&self) -> Result<forward::ForwardMetrics, Error> {
        forward::ForwardMetrics::new(&Maker(&self.registry))
    }

    /// All metrics in the text format, with the engine's current state.
    ///
    /// # Errors
    /// If a metric has no value, which is a bug.
    pub(crate) fn encode(&self, now: Option<&Statistics>, lags: &[Lag]) -> Result<Vec<u8>, Error> {
        // Before the state, which adds the limits that the engine checks.
        self.tenants.show();
        if let Some(now) = now {
            self.state.set(now);
        }
        // Cursors come and go, and so do their labels.
        self.cursor_lag.reset();
        for lag in lags {
            let labels = [lag.log.as_str(), lag.cursor.as_str()];
            let gauge = self.cursor_lag.with_label_values(&labels);
            gauge.set(signed(lag.records));
        }
        #[cfg(any(feature = "object", test))]
        if let Some(replica) = self.replica.get() {
            replica.sample();
        }
        let slow = self.follower_waits.slow();
        self.slow_followers.set(signed(slow as u64));
        let memory = self.memory.get().map(|memory| memory()).unwrap_or_default();
        for (part, bytes) in PARTS.into_iter().zip(memory) {
            let gauge = self.admitted.with_label_values(&[part]);
            gauge.set(signed(bytes));
        }
        let lost = logging::lost();
        for (reason, lines) in [("unread", lost.unread), ("repeated", lost.repeated)] {
            let counter = self.lost_log_lines.with_label_values(&[reason]);
            counter.show(lines);
        }
        let mut text = Vec::with_capacity(64 << 10);
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }

    /// Returns the layer that counts calls, and ends unary ones after `ceiling` at the latest.
    pub(crate) fn call_counter(&self, ceiling: Option<Duration>) -> CallCounter {
        self.calls.counter(ceiling)
    }
}

#[cfg(test)]
mod shown;
#[cfg(test)]
mod tests;
