//! Metrics of the audit log.

use prometheus::{Error, IntCounterVec};

use super::Maker;

/// A failure of the audit log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AuditFailure {
    /// An attempt to open or to write it failed.
    Write,
    /// A line had no room in the queue.
    Lost,
}

impl AuditFailure {
    const ALL: [Self; 2] = [Self::Write, Self::Lost];

    fn label(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Lost => "lost",
        }
    }
}

/// Failures of the audit log.
#[derive(Debug, Clone)]
pub(crate) struct AuditMetrics {
    failures: IntCounterVec,
}

impl AuditMetrics {
    pub(super) fn new(make: &Maker<'_>) -> Result<Self, Error> {
        Ok(Self {
            failures: make.counters(
                "wald_audit_failures_total",
                "Failures of the audit log, by reason: write (an attempt to open or write it failed; its lines wait, and \
                 the next attempt follows after 1 second), lost (a line that had no room among 4 MiB of waiting lines). \
                 Above 0, the log names file and fault.",
                "reason",
                &AuditFailure::ALL.map(AuditFailure::label),
            )?,
        })
    }

    /// Counts a failure.
    pub(crate) fn failed(&self, failure: AuditFailure) {
        self.failures.with_label_values(&[failure.label()]).inc();
    }
}
