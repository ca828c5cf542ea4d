//! Append, AppendBatch, Sync, Trim.
//!
//! Once submitted, an append is finished whoever still listens: a client that goes away
//! drops the future here and with it the ticket, which cancels nothing.

use std::time::Instant;

use tonic::{Request, Response, Status};
use wald_proto::v1;
use wald_storage::{Appended, Batch, Durability, LogName, Lsn, TrimError};

use super::{Answer, Node, Store, refuse_late};
use crate::convert;
use crate::status::{self, Access};
use crate::trace;

pub(super) async fn append(
    node: &Node,
    request: Request<v1::AppendRequest>,
) -> Answer<v1::AppendResponse> {
    let taken = Instant::now();
    let store = node.store_to_write()?;
    refuse_late(&request)?;
    let (batch, durability) = convert::append(request.into_inner())?;
    let (appended, acked) = submit(node, store, batch, durability, taken).await?;
    let response = Response::new(convert::append_response(&appended, store.epoch));
    node.metrics.replied(acked.elapsed());
    Ok(response)
}

pub(super) async fn append_batch(
    node: &Node,
    request: Request<v1::AppendBatchRequest>,
) -> Answer<v1::AppendBatchResponse> {
    let taken = Instant::now();
    let store = node.store_to_write()?;
    refuse_late(&request)?;
    let (batch, durability) = convert::append_batch(request.into_inner())?;
    let names: Vec<LogName> = batch.logs.iter().map(|log| log.log.clone()).collect();
    let (appended, acked) = submit(node, store, batch, durability, taken).await?;
    let response = convert::append_batch_response(&names, &appended, store.epoch);
    node.metrics.replied(acked.elapsed());
    Ok(Response::new(response))
}

/// Hands the batch to the engine and waits for its last answer; also says when that came.
async fn submit(
    node: &Node,
    store: &Store,
    batch: Batch,
    durability: Option<Durability>,
    taken: Instant,
) -> Result<(Appended, Instant), Status> {
    let (records, bytes) = size(&batch);
    match store.engine.submit(batch, durability).await {
        Ok(appended) => {
            let acked = Instant::now();
            trace::phases(&appended.times);
            node.metrics
                .appended(appended.durability, acked - taken, records, bytes);
            Ok((appended, acked))
        }
        Err(error) => {
            node.metrics.write_failed(&error);
            Err(status::append(&error))
        }
    }
}

/// Records of a batch, and bytes of their data and headers.
fn size(batch: &Batch) -> (u64, u64) {
    let (mut records, mut bytes) = (0, 0);
    for record in batch.logs.iter().flat_map(|log| &log.records) {
        records += 1;
        bytes += record.data.len();
        for header in &record.headers {
            bytes += header.key.len() + header.value.len();
        }
    }
    (records, u64::try_from(bytes).unwrap_or(u64::MAX))
}

pub(super) async fn sync(
    node: &Node,
    request: Request<v1::SyncRequest>,
) -> Answer<v1::SyncResponse> {
    let store = node.store_to_write()?;
    refuse_late(&request)?;
    let request = request.into_inner();
    let target = convert::sync_target(request.target)?;
    let log = match request.log.as_str() {
        "" => None,
        name => Some(convert::log_name("log", name, Access::Write)?),
    };
    let position = store
        .engine
        .sync(target, log.as_ref())
        .await
        .map_err(|error| status::sync(&error))?;
    Ok(Response::new(v1::SyncResponse {
        durable_position: Some(position.get()),
    }))
}

pub(super) async fn trim(
    node: &Node,
    request: Request<v1::TrimRequest>,
) -> Answer<v1::TrimResponse> {
    let store = node.store_to_write()?;
    refuse_late(&request)?;
    let request = request.into_inner();
    let target = convert::target(&request.log, request.log_id, Access::Write)?;
    let first = store
        .engine
        .trim(target, Lsn::new(request.before_lsn))
        .await
        .map_err(|error| {
            if let TrimError::Append(error) = &error {
                node.metrics.write_failed(error);
            }
            status::trim(&error)
        })?;
    Ok(Response::new(v1::TrimResponse {
        first_lsn: Some(first.get()),
    }))
}
