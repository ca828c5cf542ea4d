//! Read and GetTail.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::OwnedSemaphorePermit;
use tonic::{Request, Response, Status};
use wald_proto::v1;
use wald_storage::{LogTarget, Page, ReadRequest, ReadStart, RecoveryEpoch, Selector};

use super::{Node, OpenReads, RpcResult};
use crate::answers::{AnswerShare, Held};
use crate::auth::{Amount, Caller, HeldRight, LogRight, Permitted, TenantUsage};
use crate::convert;
use crate::drain::draining;
use crate::metrics::{Deadline, ReadOp};
use crate::status::{self, Access};
use crate::wakes::together;

/// The answer. It carries the room that is reserved for it ([`AnswerShare`]).
pub(super) async fn read(
    node: &Arc<Node>,
    caller: &Caller,
    request: Request<v1::ReadRequest>,
) -> RpcResult<v1::ReadResponse> {
    let any_node = request.get_ref().any_node;
    let store = node.reads(any_node)?;
    let (domain, view, wait) = convert::read(request.get_ref())?;
    let mut domain = caller.allow(domain)?;
    let until = wait_until(&request, wait);
    let share = request.extensions().get::<AnswerShare>();
    let tenant = caller.tenant();
    let (page, held) = loop {
        // First: a read that waits here holds no memory.
        let counted = match tenant {
            // Boxed: callers without a tenant have smaller calls without it.
            Some(tenant) => Some((tenant, Box::pin(tenant.read_place_if_paid()).await?)),
            None => None,
        };
        let held = match share {
            Some(share) => Some(share.hold_soon(domain.get().max_bytes.into()).await?),
            None => None,
        };
        caller.check_again(LogRight::Read, &domain.get().log.name)?;
        let (page, held) = match counted {
            Some((tenant, place)) => {
                let place = (place, held);
                Box::pin(page_of_tenant(node, tenant, place, &domain, any_node)).await?
            }
            None => (page(node, &store, &domain).await?, held),
        };
        if !page.batches.is_empty() {
            break (page, held);
        }
        // A waiting read holds nothing.
        drop(held);
        // Boxed: most calls do not wait, and are smaller without it.
        if !Box::pin(wait_for_more(
            node,
            &store,
            caller,
            &mut domain,
            &page,
            until,
        ))
        .await?
        {
            break (page, None);
        }
    };
    caller.note(|facts| {
        facts.found(page.log_id);
        let first = page.batches.first();
        facts.range(first.map(|batch| batch.first_lsn), Some(page.next_lsn));
    });
    // A newer copy has all replicated records of the epochs before.
    let epoch = node.reads(any_node).map_or(store.epoch, |now| now.epoch);
    let answer = convert::read_response(&page, view, epoch)?;
    let mut response = Response::new(answer);
    if let Some(held) = held {
        held.travel_with(response.extensions_mut());
    }
    Ok(response)
}

/// Time until which to wait for a first record: the requested wait, but early enough that the
/// empty page still reaches the caller within its deadline.
fn wait_until(request: &Request<v1::ReadRequest>, wait: Duration) -> Option<Instant> {
    if wait.is_zero() {
        return None;
    }
    let now = Instant::now();
    let wait = match request.extensions().get::<Deadline>() {
        Some(deadline) => wait.min(deadline.at.saturating_duration_since(now) * 9 / 10),
        None => wait,
    };
    now.checked_add(wait)
}

async fn page(
    node: &Node,
    store: &OpenReads<'_>,
    request: &Permitted<ReadRequest>,
) -> Result<Page, Status> {
    let asked = Instant::now();
    let page = together(store.engine.read(request)).await;
    node.metrics.read(ReadOp::Read, asked.elapsed());
    page.map_err(|error| status::read(&error))
}

/// A page that counts for a tenant, and its memory. The engine finishes a read whose client has gone away, so the read
/// keeps its place and is charged then, too.
async fn page_of_tenant(
    node: &Arc<Node>,
    tenant: &Arc<TenantUsage>,
    (place, held): (Option<OwnedSemaphorePermit>, Option<Held>),
    request: &Permitted<ReadRequest>,
    any_node: bool,
) -> Result<(Page, Option<Held>), Status> {
    let (node, tenant, request) = (Arc::clone(node), Arc::clone(tenant), request.clone());
    let read = tokio::spawn(async move {
        let page = page(&node, &node.reads(any_node)?, &request).await?;
        tenant.delivered(Amount::of(&page.batches));
        drop(place);
        Ok((page, held))
    });
    // Only a panic ends the task without a result.
    (read.await).unwrap_or_else(|_| Err(Status::internal("the read was broken off")))
}

/// Waits behind an empty page. Answers whether another try is worth it: not when the
/// time is over, or the server is leaving.
async fn wait_for_more(
    node: &Node,
    store: &OpenReads<'_>,
    caller: &Caller,
    request: &mut Permitted<ReadRequest>,
    page: &Page,
    until: Option<Instant>,
) -> Result<bool, Status> {
    let Some(until) = until else {
        return Ok(false);
    };
    // From now on it is this log, not one that was created later under its name. A place that
    // was found once is kept, so that no record appended meanwhile is skipped. Only a start by
    // time has not been found yet, because all records were older.
    request.pin_log(page.log_id);
    match request.get().start {
        ReadStart::Time(_) => {}
        ReadStart::First | ReadStart::Lsn(_) | ReadStart::TailOffset(_) => {
            request.start_at(ReadStart::Lsn(page.next_lsn));
        }
    }
    let _follower = match caller.tenant() {
        Some(tenant) => Some(tenant.follow()?),
        None => None,
    };
    let mut phase = node.phase.clone();
    let selector = Selector::Log(request.get().log.clone());
    let mut lease = caller.lease(HeldRight::Logs(LogRight::Read, selector));
    let ended = async {
        match &mut lease {
            Some(lease) => lease.ended().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        status = ended => Err(status),
        beyond = store.engine.tail_beyond(request, page.tail_lsn) => {
            beyond.map(|()| true).map_err(|error| status::read(&error))
        }
        () = tokio::time::sleep_until(until.into()) => Ok(false),
        () = draining(&mut phase) => Ok(false),
    }
}

pub(super) async fn get_tail(
    node: &Node,
    caller: &Caller,
    request: Request<v1::GetTailRequest>,
) -> RpcResult<v1::GetTailResponse> {
    let store = node.store(Access::Read)?;
    let request = request.into_inner();
    let target: LogTarget = convert::target(&request.log, request.log_id, Access::Read)?;
    let stat = store
        .engine
        .stat(
            &caller.allow(target)?,
            convert::visibility(request.visibility)?,
            request.recovery_epoch.map(RecoveryEpoch::new),
        )
        .await
        .map_err(|error| status::read(&error))?;
    caller.note(|facts| facts.found(stat.info.log_id));
    let tail = convert::tail_response(&stat, store.epoch);
    Ok(Response::new(tail))
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::super::tests::Fixture;
    use super::*;

    #[tokio::test]
    async fn read_without_its_client_keeps_its_place_and_is_charged() {
        let mut fixture = Fixture::beating(Duration::from_secs(15)).await;
        fixture.append("a").await.unwrap();
        let tenant = Arc::new(TenantUsage::new("a", 1));
        let place = tenant.read_place_if_paid().await.unwrap();
        let (request, ..) = convert::read(&v1::ReadRequest {
            log: "a".to_owned(),
            ..v1::ReadRequest::default()
        })
        .unwrap();
        let request = Caller::anyone().allow(request).unwrap();
        let mut read = Box::pin(page_of_tenant(
            &fixture.node,
            &tenant,
            (place, None),
            &request,
            false,
        ));
        let mut context = Context::from_waker(Waker::noop());
        assert!(read.as_mut().poll(&mut context).is_pending());
        drop(read);
        let next = tenant.read_place_if_paid().await;
        assert!(next.unwrap().is_some());
        assert_eq!(tenant.figures().reads.records, 1);
    }
}
