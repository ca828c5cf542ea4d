//! Lines on their way to the output: a queue of bounded bytes, and the one thread that may block.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::output::AuditOutput;
use crate::metrics::{AuditFailure, AuditMetrics};

/// Most bytes of lines that wait.
const QUEUE_BYTES: usize = 4 << 20;

/// Bytes above which calls that must be recorded are refused: the rest is for lines of calls that have begun.
const FULL_BYTES: usize = QUEUE_BYTES / 2;

/// Pause before a failed output is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Lines that wait for the thread.
pub(super) struct Queue {
    state: Mutex<QueueState>,
    /// There is something for the thread to do.
    more: Condvar,
    /// Everything is written.
    empty: Condvar,
    metrics: AuditMetrics,
}

#[derive(Default)]
struct QueueState {
    /// Whole lines.
    waiting: Vec<u8>,
    /// Bytes that the thread has taken and not written.
    taken: usize,
    must_reopen: bool,
    is_failing: bool,
}

/// Work that comes from elsewhere: the counts of refusals.
pub(super) trait Counts {
    /// Whether there are counts to report.
    fn has_counts(&self) -> bool;

    /// Queues their lines.
    fn report(&self);

    /// The output was opened again.
    fn reopened(&self);
}

impl Queue {
    pub(super) fn new(metrics: AuditMetrics) -> Self {
        Self {
            state: Mutex::default(),
            more: Condvar::new(),
            empty: Condvar::new(),
            metrics,
        }
    }

    /// Queues a line, or counts it as lost if there is no room. Never waits for the output.
    pub(super) fn push(&self, line: &str) {
        let mut state = self.state.lock();
        if state.waiting.len() + state.taken + line.len() > QUEUE_BYTES {
            drop(state);
            self.metrics.failed(AuditFailure::Lost);
            return;
        }
        state.waiting.extend_from_slice(line.as_bytes());
        drop(state);
        self.more.notify_one();
    }

    /// Lets the thread look whether there are counts.
    pub(super) fn wake(&self) {
        // With the lock: the thread has not looked yet, or it waits.
        let _state = self.state.lock();
        self.more.notify_one();
    }

    /// Lets the thread open the output again.
    pub(super) fn reopen(&self) {
        self.state.lock().must_reopen = true;
        self.more.notify_one();
    }

    /// Whether a further line may be lost: the last write failed, or too much waits.
    pub(super) fn is_unsafe(&self) -> bool {
        let state = self.state.lock();
        state.is_failing || state.waiting.len() + state.taken > FULL_BYTES
    }

    /// Waits until everything is written, for so long at most. A failing output is not waited for.
    pub(super) fn flush(&self, most: Duration) {
        let until = Instant::now() + most;
        let mut state = self.state.lock();
        while !state.is_failing && (state.must_reopen || state.taken + state.waiting.len() > 0) {
            if self.empty.wait_until(&mut state, until).timed_out() {
                return;
            }
        }
    }

    /// Writes the lines, for ever. After a failure the lines wait, and the output is tried again each second.
    pub(super) fn write(&self, mut output: AuditOutput, counts: &impl Counts, pause: Duration) {
        let mut taken = Vec::new();
        // Times of the next report of counts, and of the next attempt after a failure.
        let (mut report_at, mut retry_at) = (None, None);
        loop {
            let reopens = self.wait(&mut taken, counts, pause, &mut report_at, retry_at);
            let now = Instant::now();
            if report_at.is_some_and(|at| now >= at) {
                report_at = None;
                counts.report();
            }
            if reopens {
                output.close();
                retry_at = None;
            }
            let is_retry = retry_at.is_some_and(|at| now >= at);
            if !(reopens || is_retry || (retry_at.is_none() && !taken.is_empty())) {
                continue;
            }
            match output.write(&taken) {
                Ok(()) => {
                    taken.clear();
                    retry_at = None;
                    let mut state = self.state.lock();
                    state.taken = 0;
                    let recovered = std::mem::take(&mut state.is_failing);
                    if state.waiting.is_empty() {
                        self.empty.notify_all();
                    }
                    drop(state);
                    if recovered {
                        tracing::info!(audit_log = output.name(), "the audit log is written again");
                    }
                    if reopens {
                        counts.reopened();
                    }
                }
                Err(error) => {
                    output.close();
                    retry_at = Some(Instant::now() + RETRY);
                    self.metrics.failed(AuditFailure::Write);
                    let was_failing = {
                        let mut state = self.state.lock();
                        self.empty.notify_all();
                        std::mem::replace(&mut state.is_failing, true)
                    };
                    if !was_failing {
                        tracing::error!(
                            audit_log = output.name(),
                            %error,
                            "the audit log cannot be written; its lines wait, and the newest are lost once 4 MiB wait"
                        );
                    }
                }
            }
        }
    }

    /// Waits for something to do, and takes the lines unless some are taken already. Returns whether to open the output
    /// again.
    fn wait(
        &self,
        taken: &mut Vec<u8>,
        counts: &impl Counts,
        pause: Duration,
        report_at: &mut Option<Instant>,
        retry_at: Option<Instant>,
    ) -> bool {
        let mut state = self.state.lock();
        loop {
            if report_at.is_none() && counts.has_counts() {
                *report_at = Some(Instant::now() + pause);
            }
            let has_lines = retry_at.is_none() && !state.waiting.is_empty();
            if state.must_reopen || has_lines {
                break;
            }
            match [*report_at, retry_at].into_iter().flatten().min() {
                None => self.more.wait(&mut state),
                Some(at) => {
                    if self.more.wait_until(&mut state, at).timed_out() {
                        break;
                    }
                }
            }
        }
        if taken.is_empty() {
            *taken = std::mem::take(&mut state.waiting);
            state.taken = taken.len();
        }
        std::mem::take(&mut state.must_reopen)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::metrics::Metrics;

    /// No refusals; counts how often the output was opened again.
    #[derive(Default)]
    struct Reopened(AtomicU64);

    impl Counts for Reopened {
        fn has_counts(&self) -> bool {
            false
        }

        fn report(&self) {}

        fn reopened(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn failures(metrics: &Metrics, reason: &str) -> u64 {
        let text = String::from_utf8(metrics.encode(None, &[]).unwrap()).unwrap();
        let name = format!("wald_audit_failures_total{{reason=\"{reason}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&name));
        line.unwrap().parse().unwrap()
    }

    #[test]
    fn full_queue_loses_the_newest_lines_without_blocking_the_caller() {
        let directory = tempfile::tempdir().unwrap();
        let missing = directory.path().join("missing");
        let metrics = Metrics::new().unwrap();
        let queue = Arc::new(Queue::new(metrics.audit.clone()));
        let output = AuditOutput::File {
            path: missing.join("audit.log"),
            file: None,
        };
        let (writer, reopened) = (Arc::clone(&queue), Arc::new(Reopened::default()));
        let counts = Arc::clone(&reopened);
        std::thread::spawn(move || writer.write(output, &*counts, RETRY));
        assert!(!queue.is_unsafe());
        let line = format!("{}\n", "x".repeat(1023));
        let pushed = 5000_u64;
        for _ in 0..pushed {
            queue.push(&line);
        }
        let room = (QUEUE_BYTES / line.len()) as u64;
        assert_eq!(failures(&metrics, "lost"), pushed - room);
        // Does not wait for an output that fails.
        queue.flush(Duration::from_secs(60));
        assert!(queue.is_unsafe());
        assert!(failures(&metrics, "write") > 0);
        fs::create_dir(&missing).unwrap();
        queue.reopen();
        while queue.is_unsafe() || reopened.0.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        queue.flush(Duration::from_secs(60));
        let written = fs::read(missing.join("audit.log")).unwrap();
        assert_eq!(written.len() as u64, room * line.len() as u64);
    }
}
