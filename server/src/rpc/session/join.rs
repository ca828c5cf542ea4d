//! Requests of a session that become one request for the engine, and their acks.
//!
//! Requests that have arrived together are joined if no client can see the difference ([`Append::join`](wald_storage::Append::join)). Their acks
//! are made and sent together: most of a request's cost is the same for one and for many.

use std::time::Instant;

use bytes::Bytes;
use prost::Message as _;
use tonic::Status;
use wald_proto::v1;
use wald_storage::{Appended, Batch, Durability, LogAppended, LogName, LogRecords, RecoveryEpoch};

use crate::admission::Passage;
use crate::auth::{Engine, Permitted};
use crate::convert::{self, SessionAck};
use crate::grpc::Framed;

/// A request as it was read, or several that are one for the engine.
pub(super) struct TakenRequest {
    pub(super) requests: JoinedRequests,
    pub(super) batch: Permitted<Batch>,
    pub(super) durability: Option<Durability>,
    /// Time at which the first was read.
    pub(super) at: Instant,
    pub(super) room: Passage,
}

/// Requests that are one for the engine.
pub(super) struct JoinedRequests {
    /// Number of the first: where it fails, it is the first that failed.
    pub(super) first: u64,
    /// Whether the requests are appends of one record, not batches.
    pub(super) is_record: bool,
    /// The number of each request and its count of records, if there is more than one request.
    each: Vec<(u64, u64)>,
}

impl TakenRequest {
    /// Takes in the request that came next, or gives it back if it cannot be part of this one. An independent request that
    /// expects an lsn stands alone: it may hold although the one before it fails.
    pub(super) fn join(
        &mut self,
        engine: &Engine,
        mut next: Self,
        is_independent: bool,
    ) -> Option<Self> {
        let expects = |log: &LogRecords| log.guard.expected_lsn.is_some();
        if is_independent && next.batch.get().logs.iter().any(expects) {
            return Some(next);
        }
        if self.durability != next.durability || self.requests.is_record != next.requests.is_record
        {
            return Some(next);
        }
        let records =
            |batch: &Permitted<Batch>| batch.get().logs.first().map_or(0, |log| log.records.len());
        let (before, more) = (records(&self.batch), records(&next.batch));
        if let Err(batch) = engine.join(&mut self.batch, next.batch) {
            next.batch = batch;
            return Some(next);
        }
        let requests = &mut self.requests;
        if requests.each.is_empty() {
            requests.each.push((requests.first, before));
        }
        requests.each.push((next.requests.first, more));
        self.room.join(next.room);
        None
    }
}

impl JoinedRequests {
    pub(super) fn of(request_id: u64, is_record: bool) -> Self {
        Self {
            first: request_id,
            is_record,
            each: Vec::new(),
        }
    }

    /// Number of requests.
    pub(super) fn count(&self) -> u64 {
        self.each.len().max(1) as u64
    }

    /// The acks of the requests, made from the engine's one answer to all of them.
    pub(super) fn acks(
        &self,
        names: &[LogName],
        appended: &Appended,
        epoch: RecoveryEpoch,
    ) -> Result<Framed, Status> {
        let (false, [log]) = (self.each.is_empty(), appended.appends.as_slice()) else {
            if self.is_record {
                let ack = convert::append_response(appended, epoch);
                return Framed::together([record_ack(self.first, ack)].into_iter());
            }
            let ack = SessionAck::new(self.first, names, appended, epoch);
            return Framed::together([ack].into_iter());
        };
        let mut next_lsn = log.first_lsn;
        let mut position = appended.position;
        let parts: Vec<_> = (self.each.iter())
            .map(|(request_id, records)| {
                let first_lsn = next_lsn;
                next_lsn = first_lsn.advance(*records);
                let append = LogAppended {
                    first_lsn,
                    next_lsn,
                    ..*log
                };
                let at = position;
                position = at.map(|at| at.advance(1));
                (*request_id, append, at)
            })
            .collect();
        if self.is_record {
            return Framed::together(parts.iter().map(|(request_id, append, position)| {
                let ack = convert::record_response(Some(append), *position, appended, epoch);
                record_ack(*request_id, ack)
            }));
        }
        Framed::together(parts.iter().map(|(request_id, append, position)| {
            let mut ack = SessionAck::new(*request_id, names, appended, epoch);
            ack.appends = std::slice::from_ref(append);
            ack.position = *position;
            ack
        }))
    }

    /// The answers to independent requests that were not acked.
    pub(super) fn refusals(&self, status: &Status) -> Result<Framed, Status> {
        let error = encoded(status);
        let each = self.each.iter().map(|(request_id, _)| *request_id);
        let first = self.each.is_empty().then_some(self.first);
        Framed::together(first.into_iter().chain(each).map(|request_id| {
            v1::AppendSessionResponse {
                request_id,
                error: error.clone(),
                ..v1::AppendSessionResponse::default()
            }
        }))
    }
}

fn record_ack(request_id: u64, ack: v1::AppendResponse) -> v1::AppendSessionResponse {
    v1::AppendSessionResponse {
        request_id,
        append_ack: Some(ack),
        ..v1::AppendSessionResponse::default()
    }
}

/// The `google.rpc.Status` of a status. Its details are one, unless it has none.
fn encoded(status: &Status) -> Bytes {
    if !status.details().is_empty() {
        return Bytes::copy_from_slice(status.details());
    }
    let bare = tonic_types::pb::Status {
        code: status.code().into(),
        message: status.message().to_owned(),
        details: Vec::new(),
    };
    bare.encode_to_vec().into()
}
