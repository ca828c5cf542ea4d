//! Calls that the state of the server refused, by operation and reason.
//!
//! They are counted at one place, where calls end, so that no RPC is left out. The reason is read
//! from the details of the status, as clients do.

use http::HeaderMap;
use prometheus::{Error, IntCounter, IntCounterVec, Opts};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;
use wald_proto::v1::Reason;

use super::Maker;
use crate::status::Access;

/// Reasons for which the server refuses a call whatever the call asks for.
const REASONS: [Reason; 11] = [
    Reason::Busy,
    Reason::Quota,
    Reason::DiskFull,
    Reason::Draining,
    Reason::JournalFailed,
    Reason::Starting,
    Reason::Quarantined,
    Reason::ReadFailed,
    Reason::AuditFailed,
    Reason::Moved,
    Reason::BucketDown,
];

/// Counters of the refused calls of one operation, in the order of [`REASONS`].
#[derive(Debug, Clone)]
pub(super) struct Refusals([IntCounter; REASONS.len()]);

impl Refusals {
    /// Counts a call that ended with this code and these trailers, if they name one of [`REASONS`].
    pub(super) fn count(&self, code: usize, trailers: &HeaderMap) {
        // INTERNAL is no refusal: the call may have been carried out.
        let is_refusal = [Code::ResourceExhausted, Code::Unavailable, Code::DataLoss]
            .iter()
            .any(|refused| *refused as usize == code);
        if !is_refusal {
            return;
        }
        if let Some(status) = Status::from_header_map(trailers) {
            self.count_status(&status, 1);
        }
    }

    /// Counts requests that were refused with this status, if the status names one of [`REASONS`].
    pub(super) fn count_status(&self, status: &Status, count: u64) {
        let Some(info) = status.get_details_error_info() else {
            return;
        };
        let known = REASONS
            .iter()
            .position(|reason| reason.as_str() == info.reason);
        if let Some(counter) = known.and_then(|known| self.0.get(known)) {
            counter.inc_by(count);
        }
    }
}

/// Refused calls of both operations.
#[derive(Debug)]
pub(super) struct AllRefusals {
    reads: Refusals,
    writes: Refusals,
}

impl AllRefusals {
    pub(super) fn new(make: &Maker<'_>) -> Result<Self, Error> {
        let counters = make.register(IntCounterVec::new(
            Opts::new(
                "wald_rejected_total",
                "Calls that were refused because of the server's state, by operation (read, write) and reason. A session counts once, when it ends. Each refused independent request also counts. A stopping server ends each session and follower with DRAINING.",
            ),
            &["operation", "reason"],
        )?)?;
        let of = |operation: &str| {
            Refusals(
                REASONS.map(|reason| counters.with_label_values(&[operation, reason.as_str()])),
            )
        };
        Ok(Self {
            reads: of("read"),
            writes: of("write"),
        })
    }

    pub(super) fn of(&self, access: Access) -> &Refusals {
        match access {
            Access::Read => &self.reads,
            Access::Write => &self.writes,
        }
    }

    /// Refused writes since the process started.
    pub(super) fn writes(&self) -> u64 {
        self.writes.0.iter().map(IntCounter::get).sum()
    }
}
