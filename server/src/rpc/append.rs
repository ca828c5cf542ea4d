//! Append, AppendBatch, Sync, Trim, Fence.
//!
//! Once submitted, an append is finished even if its client goes away. The future here is then
//! dropped with its ticket, which cancels nothing.

use std::time::Instant;

use tonic::{Request, Response, Status};
use wald_proto::codec::Sent;
use wald_proto::v1;
use wald_storage::{
    AppendError, Appended, Batch, LogName, LogTarget, Lsn, OneOrMore, ReadError, Records,
    TargetError,
};

use super::{Node, OpenStore, RpcResult, refuse_late};
use crate::auth::{Amount, Caller, LogRight, Permitted};
use crate::convert;
use crate::status::{self, Access};
use crate::trace;
use crate::wakes::together;

pub(super) async fn append(
    node: &Node,
    caller: &Caller,
    request: Request<Sent<v1::AppendRequest>>,
) -> RpcResult<v1::AppendResponse> {
    let taken = Instant::now();
    let store = node.store(Access::Write)?;
    refuse_late(request.extensions())?;
    let limits = store.engine.profile().limits;
    let (batch, durability) = convert::append(&request.into_inner(), &limits)?;
    let batch = caller.allow(batch)?;
    if let Some(tenant) = caller.tenant() {
        tenant.append(charge(batch.get()))?;
    }
    let submitted = Submitted::new(batch.get(), taken);
    let settled = together(store.engine.submit(None, batch, durability)).await;
    let (appended, acked) = submitted.settled(node, caller, settled)?;
    trace::phases(&appended.times);
    let response = Response::new(convert::append_response(&appended, store.epoch));
    node.metrics.replied(acked.elapsed(), 1);
    Ok(response)
}

pub(super) async fn append_batch(
    node: &Node,
    caller: &Caller,
    request: Request<Sent<v1::AppendBatchRequest>>,
) -> RpcResult<v1::AppendBatchResponse> {
    let taken = Instant::now();
    let store = node.store(Access::Write)?;
    refuse_late(request.extensions())?;
    let limits = store.engine.profile().limits;
    let (batch, durability) = convert::append_batch(&request.into_inner(), &limits)?;
    let batch = caller.allow(batch)?;
    if let Some(tenant) = caller.tenant() {
        tenant.append(charge(batch.get()))?;
    }
    let submitted = SubmittedBatch::new(batch.get(), taken);
    let settled = together(store.engine.submit(None, batch, durability)).await;
    if let Ok(appended) = &settled {
        trace::phases(&appended.times);
    }
    let answer = |names: &[LogName], appended: &Appended| {
        convert::append_batch_response(names, appended, store.epoch)
    };
    let response = submitted.ack(node, caller, settled, answer);
    response.map(Response::new)
}

/// The part of a batch that the rates of its tenant count: its records and cursors, or one change if it has neither.
pub(super) fn charge(batch: &Batch) -> Amount {
    let Amount { bytes, records } = amount(batch);
    let cursors = batch.cursors.len() as u64;
    let changes = Amount::of_changes(if records == 0 {
        cursors.max(1)
    } else {
        cursors
    });
    Amount {
        bytes: bytes + changes.bytes,
        records: records + changes.records,
    }
}

/// The records of a batch, and the bytes of their data and headers.
fn amount(batch: &Batch) -> Amount {
    let sum = |of: fn(&Records) -> u64| batch.logs.iter().map(|log| of(&log.records)).sum();
    Amount {
        bytes: sum(Records::bytes),
        records: sum(Records::len),
    }
}

/// A request that the engine has, with the numbers to count when it is answered.
struct Submitted {
    taken: Instant,
    requests: u32,
    records: u64,
    /// Bytes of their data and headers.
    bytes: u64,
}

impl Submitted {
    fn new(batch: &Batch, taken: Instant) -> Self {
        let Amount { bytes, records } = amount(batch);
        Self {
            taken,
            requests: batch.requests(),
            records,
            bytes,
        }
    }

    /// Counts the engine's last answer; also says when it came.
    fn settled(
        &self,
        node: &Node,
        caller: &Caller,
        settled: Result<Appended, AppendError>,
    ) -> Result<(Appended, Instant), Status> {
        match settled {
            Ok(appended) => {
                let acked = Instant::now();
                let repeat = appended.appends.iter().any(|log| log.deduplicated);
                let size = match repeat {
                    true => (0, 0),
                    false => (self.records, self.bytes),
                };
                let time = acked - self.taken;
                node.metrics
                    .appended(appended.durability, time, self.requests, size);
                if repeat {
                    node.metrics.deduplicated();
                }
                caller.note(|facts| {
                    let is_session = caller.is_session();
                    facts.appended(self.requests, size.0, is_session, &appended);
                });
                Ok((appended, acked))
            }
            Err(error) => {
                node.metrics.append_failed(&error);
                Err(caller.append_failed(&error))
            }
        }
    }
}

/// A batch that the engine has, with the parts of its answer.
pub(super) struct SubmittedBatch {
    submitted: Submitted,
    names: OneOrMore<LogName>,
}

impl SubmittedBatch {
    pub(super) fn new(batch: &Batch, taken: Instant) -> Self {
        Self {
            submitted: Submitted::new(batch, taken),
            names: batch.logs.iter().map(|log| log.log.clone()).collect(),
        }
    }

    /// The answer to the batch, which `answer` makes of the logs' names and results.
    pub(super) fn ack<R>(
        &self,
        node: &Node,
        caller: &Caller,
        settled: Result<Appended, AppendError>,
        answer: impl FnOnce(&[LogName], &Appended) -> R,
    ) -> Result<R, Status> {
        let (appended, acked) = self.submitted.settled(node, caller, settled)?;
        let response = answer(&self.names, &appended);
        node.metrics
            .replied(acked.elapsed(), self.submitted.requests);
        Ok(response)
    }
}

pub(super) async fn sync(
    node: &Node,
    caller: &Caller,
    request: Request<v1::SyncRequest>,
) -> RpcResult<v1::SyncResponse> {
    let store = node.store(Access::Write)?;
    refuse_late(request.extensions())?;
    let request = request.into_inner();
    let target = convert::sync_target(request.target)?;
    let log = match request.log.as_str() {
        "" => None,
        name => Some(convert::log_name(format_args!("log"), name, Access::Write)?),
    };
    let position = store
        .engine
        .sync(target, caller.allow(log)?)
        .await
        .map_err(|error| status::sync(&error))?;
    Ok(Response::new(v1::SyncResponse {
        durable_position: Some(position.get()),
    }))
}

pub(super) async fn trim(
    node: &Node,
    caller: &Caller,
    request: Request<v1::TrimRequest>,
) -> RpcResult<v1::TrimResponse> {
    let store = node.store(Access::Write)?;
    refuse_late(request.extensions())?;
    let request = request.into_inner();
    let target = convert::target(&request.log, request.log_id, Access::Write)?;
    caller.note(|facts| facts.before(request.before_lsn));
    let target = caller.allow(target)?;
    let first = store
        .engine
        .trim(target, Lsn::new(request.before_lsn))
        .await
        .map_err(|error| status::trim(&error))?;
    caller.note(|facts| facts.range(Some(first), None));
    Ok(Response::new(v1::TrimResponse {
        first_lsn: Some(first.get()),
    }))
}

pub(super) async fn fence(
    node: &Node,
    caller: &Caller,
    request: Request<v1::FenceRequest>,
) -> RpcResult<v1::FenceResponse> {
    let store = node.store(Access::Write)?;
    refuse_late(request.extensions())?;
    let current = caller.current()?;
    let caller = &*current;
    let request = request.into_inner();
    let target = convert::target(&request.log, request.log_id, Access::Write)?;
    let mut target = caller.allow(target)?;
    if !caller.may(LogRight::Create, target.get().name.as_str()) {
        target = existing(store, caller, target).await?;
    }
    let fenced = store
        .engine
        .fence(target, request.writer_epoch)
        .await
        .map_err(|error| status::fence(&error))?;
    caller.note(|facts| {
        facts.found(fenced.log_id);
        facts.range(None, Some(fenced.tail_lsn));
        facts.epoch(fenced.writer_epoch);
    });
    Ok(Response::new(convert::fence_response(&fenced)))
}

/// The log that has the name now: a caller who may not create logs fences no other.
async fn existing(
    store: &OpenStore,
    caller: &Caller,
    target: Permitted<LogTarget>,
) -> Result<Permitted<LogTarget>, Status> {
    match store.engine.stat(&target, None, None).await {
        Ok(stat) => Ok(target.pinned(stat.info.log_id)),
        Err(ReadError::Target(TargetError::NotFound { log })) => {
            let asked = Some(("log", log.as_str()));
            Err(caller.denied(LogRight::Create.into(), asked))
        }
        Err(error) => Err(status::read_before_write(&error)),
    }
}
