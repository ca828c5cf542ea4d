//! Reports of the working engine, as histograms.

use std::time::Duration;

use prometheus::{Error, Histogram, HistogramVec, IntCounter, IntCounterVec};
use wald_storage::{AppendPhase, ChecksumSite, Observer, RetentionPass, Worker};

use super::totals::{Buckets, Totals, float};
use super::{Maker, Metrics, byte_buckets, count_buckets, latency_buckets, phase_buckets};

/// The engine's histograms and counters.
pub(super) struct EngineMetrics {
    queue: Histogram,
    encode: Histogram,
    write: Histogram,
    flush_phase: Histogram,
    phases: HistogramVec,
    reply: Histogram,
    flush: Histogram,
    group_requests: Histogram,
    group_records: Histogram,
    group_bytes: Histogram,
    roll: Histogram,
    checkpoint: Histogram,
    retention: Histogram,
    retention_trims: IntCounter,
    expired_records: IntCounter,
    expired_bytes: IntCounter,
    read_records: IntCounter,
    read_bytes: IntCounter,
    checksums_in_recovery: IntCounter,
    checksums_in_reads: IntCounter,
    checksums_in_verify: IntCounter,
    checksums_in_scrub: IntCounter,
    panics: IntCounterVec,
}

impl EngineMetrics {
    pub(super) fn new(make: &Maker<'_>) -> Result<Self, Error> {
        let phases = make.histograms(
            "wald_append_phase_seconds",
            "Time of appends in seconds, by phase: queue, encode, write, flush, replicate (only with a replica), and reply (from the engine's answer to the finished response).",
            &["phase"],
            phase_buckets(),
        )?;
        let checksums = make.counters(
            "wald_checksum_failures_total",
            "Checksums of stored bytes that failed, by the place that noticed it. Above 0 the device or the memory changes data.",
            "where",
            &["recovery", "read", "verify", "scrub"],
        )?;
        Ok(Self {
            queue: phases.with_label_values(&["queue"]),
            encode: phases.with_label_values(&["encode"]),
            write: phases.with_label_values(&["write"]),
            flush_phase: phases.with_label_values(&["flush"]),
            reply: phases.with_label_values(&["reply"]),
            phases,
            flush: make.histogram(
                "wald_flush_duration_seconds",
                "Duration of one flush of the journal in seconds. A p99 above 0.1 is a slow disk.",
                latency_buckets(),
            )?,
            group_requests: make.histogram(
                "wald_group_requests",
                "Requests that share one write of the journal.",
                count_buckets(),
            )?,
            group_records: make.histogram(
                "wald_group_records",
                "Records that share one write of the journal.",
                count_buckets(),
            )?,
            group_bytes: make.histogram(
                "wald_group_bytes",
                "Bytes of one write of the journal.",
                byte_buckets(),
            )?,
            roll: make.histogram(
                "wald_segment_roll_duration_seconds",
                "Time in seconds that the journal takes to change to the next segment. Above 0.1 the pool ran dry.",
                latency_buckets(),
            )?,
            checkpoint: make.histogram(
                "wald_checkpoint_duration_seconds",
                "Duration of one checkpoint in seconds. Checkpoints make the next start quick.",
                latency_buckets(),
            )?,
            retention: make.histogram(
                "wald_retention_pass_duration_seconds",
                "Duration of one retention pass in seconds, including its trims.",
                latency_buckets(),
            )?,
            retention_trims: make.counter(
                "wald_retention_trims_total",
                "Trims by retention.",
            )?,
            expired_records: make.counter(
                "wald_retention_expired_records_total",
                "Records that retention dropped.",
            )?,
            expired_bytes: make.counter(
                "wald_retention_expired_bytes_total",
                "Bytes of segments of the records that retention dropped.",
            )?,
            read_records: make.counter(
                "wald_read_records_total",
                "Records that readers were given.",
            )?,
            read_bytes: make.counter(
                "wald_read_bytes_total",
                "Bytes of stored bodies that readers were given.",
            )?,
            checksums_in_recovery: checksums.with_label_values(&["recovery"]),
            checksums_in_reads: checksums.with_label_values(&["read"]),
            checksums_in_verify: checksums.with_label_values(&["verify"]),
            checksums_in_scrub: checksums.with_label_values(&["scrub"]),
            panics: make.counters(
                "wald_engine_panics_total",
                "Panics of the engine's threads, by thread. Above 0: a bug; the log has its text. A panic of a reader or a verification fails one request, any other fails the journal.",
                "thread",
                &Worker::ALL.map(Worker::name),
            )?,
        })
    }

    /// Adds the sums that the console shows.
    pub(super) fn add_to(&self, totals: &mut Totals) {
        totals.flush = Buckets::of(&self.flush);
        totals.read_records = self.read_records.get();
        totals.read_bytes = self.read_bytes.get();
    }

    pub(super) fn replied(&self, time: Duration, requests: u32) {
        observe_each(&self.reply, time, requests);
    }
}

/// Counts `count` observations of the same time.
pub(super) fn observe_each(histogram: &Histogram, time: Duration, count: u32) {
    let seconds = time.as_secs_f64();
    if count == 1 {
        return histogram.observe(seconds);
    }
    // Added up here, and then added once.
    let here = histogram.local();
    for _ in 0..count {
        here.observe(seconds);
    }
}

impl Observer for Metrics {
    fn phase(&self, phase: AppendPhase, time: Duration, requests: u32) {
        let replicate;
        let histogram = match phase {
            AppendPhase::Queue => &self.engine.queue,
            AppendPhase::Encode => &self.engine.encode,
            AppendPhase::Write => &self.engine.write,
            AppendPhase::Flush => &self.engine.flush_phase,
            // Only an engine with a replica gets this series.
            AppendPhase::Replicate => {
                replicate = self.engine.phases.with_label_values(&["replicate"]);
                &replicate
            }
        };
        observe_each(histogram, time, requests);
    }

    fn flush(&self, time: Duration) {
        self.engine.flush.observe(time.as_secs_f64());
    }

    fn group(&self, requests: u64, records: u64, bytes: u64) {
        self.engine.group_requests.observe(float(requests));
        self.engine.group_records.observe(float(records));
        self.engine.group_bytes.observe(float(bytes));
    }

    fn roll(&self, time: Duration) {
        self.engine.roll.observe(time.as_secs_f64());
    }

    fn checkpoint(&self, time: Duration) {
        self.engine.checkpoint.observe(time.as_secs_f64());
    }

    fn retention(&self, pass: &RetentionPass) {
        self.engine.retention.observe(pass.time.as_secs_f64());
        self.engine.retention_trims.inc_by(pass.trims);
        self.engine.expired_records.inc_by(pass.records);
        self.engine.expired_bytes.inc_by(pass.bytes);
    }

    fn read(&self, records: u64, bytes: u64) {
        self.engine.read_records.inc_by(records);
        self.engine.read_bytes.inc_by(bytes);
    }

    fn panicked(&self, worker: Worker) {
        self.engine.panics.with_label_values(&[worker.name()]).inc();
    }

    fn checksum_failure(&self, site: ChecksumSite) {
        match site {
            ChecksumSite::Recovery => &self.engine.checksums_in_recovery,
            ChecksumSite::Read => &self.engine.checksums_in_reads,
            ChecksumSite::Verify => &self.engine.checksums_in_verify,
            ChecksumSite::Scrub => &self.engine.checksums_in_scrub,
        }
        .inc();
    }
}
