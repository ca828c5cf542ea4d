//! OpsService: describes this server and its contents.

use std::time::Duration;

use futures_util::stream;
use tokio::sync::watch;
use tonic::{Request, Response, Status};
use wald_proto::v1::{self, Reason};
use wald_storage::{EngineKind, Position, Verification, VerifyProgress};

use super::{Answers, DrainOrder, RpcResult, Services, backup, caller};
use crate::auth::{Engine, HeldRight, ServerRight, leased};
use crate::convert;
use crate::drain::{Phase, draining};
use crate::status::{self, Access};

/// Least time from one message of a verification to the next.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// Most findings of one message: it stays well below the largest that clients take.
const FINDINGS: usize = 500;

/// A verification on its way to a client.
struct VerificationDelivery {
    verification: Verification,
    phase: watch::Receiver<Phase>,
    /// Silence after which the same is said again.
    heartbeat_interval: Duration,
    /// The newest progress; findings in it are still to be sent.
    last: VerifyProgress,
    ended: bool,
}

impl VerificationDelivery {
    /// One message and the rest, or the end.
    async fn step(mut self) -> Option<(Result<v1::VerifyResponse, Status>, Self)> {
        if self.ended {
            return None;
        }
        if self.last.findings.len() <= FINDINGS {
            let mut phase = self.phase.clone();
            let next = tokio::select! {
                biased;
                () = draining(&mut phase) => Some(Err(status::draining())),
                next = self.hear() => next,
            };
            match next {
                Some(Ok(())) => {}
                Some(Err(error)) => {
                    self.ended = true;
                    return Some((Err(error), self));
                }
                None => self.ended = self.last.findings.len() <= FINDINGS,
            }
        }
        let rest = self
            .last
            .findings
            .split_off(FINDINGS.min(self.last.findings.len()));
        let message = convert::verify_response(&self.last, self.ended);
        self.last.findings = rest;
        Some((Ok(message), self))
    }

    /// Waits for news, not too often; `None` = there will be no more.
    async fn hear(&mut self) -> Option<Result<(), Status>> {
        tokio::time::sleep(TELL_EVERY).await;
        let news = tokio::time::timeout(self.heartbeat_interval, self.verification.next());
        let Ok(news) = news.await else {
            return Some(Ok(()));
        };
        match news? {
            Ok(news) => {
                let mut findings = std::mem::take(&mut self.last.findings);
                findings.extend(news.findings.iter().cloned());
                self.last = VerifyProgress { findings, ..news };
                Some(Ok(()))
            }
            Err(error) => Some(Err(status::verify_failed(&error))),
        }
    }
}

/// The delay of an order to drain; `None`: the server's own.
fn drain_delay(request: &v1::DrainRequest) -> Result<Option<Duration>, Status> {
    let Some(delay) = request.delay else {
        return Ok(None);
    };
    match Duration::try_from(delay) {
        Ok(delay) => Ok(Some(delay)),
        Err(_) => Err(status::not_supported_value(
            "delay",
            "a negative time",
            Access::Write,
        )),
    }
}

#[tonic::async_trait]
impl v1::ops_service_server::OpsService for Services {
    type VerifyStream = Answers<v1::VerifyResponse>;
    type BackupStream = Answers<v1::BackupResponse>;

    async fn get_server_info(
        &self,
        request: Request<v1::GetServerInfoRequest>,
    ) -> RpcResult<v1::GetServerInfoResponse> {
        let node = &self.0;
        // A stand-by has no store. It answers for itself.
        let is_stand_by = node.owner.borrow().is_some();
        let store = match is_stand_by {
            true => node.store.get(),
            false => Some(node.store(Access::Read)?),
        };
        let engine = store.map(|store| &store.engine);
        let profile = engine.map(Engine::profile);
        let is_operator = caller(request.extensions())?
            .current()?
            .may_operate(ServerRight::Ops);
        let engine = engine.filter(|_| is_operator);
        let truth = engine.map(Engine::durability_truth);
        let now = engine.map(Engine::statistics);
        let limits = profile
            .as_ref()
            .map_or(&node.engine_limits, |profile| &profile.limits);
        let kind = (profile.as_ref()).map_or(EngineKind::Local, |profile| profile.kind);
        let (store_id, epoch) = match &profile {
            Some(profile) => (
                convert::uuid(profile.store_id),
                profile.recovery_epoch.get(),
            ),
            None => (String::new(), 0),
        };
        Ok(Response::new(v1::GetServerInfoResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            store_id,
            recovery_epoch: epoch,
            engine: convert::engine_kind(kind).into(),
            start_time: Some(convert::proto_timestamp(node.start_time)),
            limits: Some(convert::server_limits(limits, &node.limits)),
            sync_modes: convert::sync_modes(node.has_replica)
                .into_iter()
                .map(i32::from)
                .collect(),
            default_sync_mode: convert::proto_sync_mode(node.sync_mode).into(),
            sync_interval: Some(convert::proto_duration(node.sync_interval)),
            auto_create: node.auto_create,
            durability: truth.map(|truth| v1::DurabilityTruth {
                file_system: truth.file_system,
                sync_primitive: truth.sync_primitive.to_owned(),
                flush_p50: Some(convert::proto_duration(truth.flush_p50)),
                flush_p99: Some(convert::proto_duration(truth.flush_p99)),
                is_volatile: truth.volatile,
                caveats: truth.caveats,
            }),
            damage: now.as_ref().and_then(convert::damage_summary),
            archive_failure: now.and_then(|now| now.archive_failing),
            default_retention: Some(convert::proto_retention(&node.retention)),
            protection: Some(node.protection),
            replica: match (node.replica(), is_operator) {
                (Some(replica), true) => Some(replica.now()),
                _ => None,
            },
        }))
    }

    async fn get_caller(
        &self,
        request: Request<v1::GetCallerRequest>,
    ) -> RpcResult<v1::GetCallerResponse> {
        let caller = caller(request.extensions())?;
        Ok(Response::new(convert::caller(caller.identity())))
    }

    async fn list_segments(
        &self,
        request: Request<v1::ListSegmentsRequest>,
    ) -> RpcResult<v1::ListSegmentsResponse> {
        let engine = &self.0.store(Access::Read)?.engine;
        let allowed = caller(request.extensions())?.allow_server(ServerRight::Ops)?;
        let request = request.into_inner();
        let after = match convert::parse_page_token(&request.page_token)? {
            None => None,
            Some(token) => Some(token.parse().map(Position::new).map_err(|_| {
                status::invalid_field(
                    Reason::InvalidPageToken,
                    "page_token",
                    "it is not of ListSegments",
                    Access::Read,
                )
            })?),
        };
        let size = convert::page_size(request.page_size);
        let described = engine.describe_segments(&allowed, after, size + 1).await;
        let mut segments = convert::segments(&described);
        // Numbers do not give the order: a run has a higher number than the segments behind it.
        let next_page_token =
            convert::cut_to_page(&mut segments, size, |last| last.end_position().to_string());
        Ok(Response::new(v1::ListSegmentsResponse {
            segments,
            next_page_token,
        }))
    }

    async fn verify(&self, request: Request<v1::VerifyRequest>) -> RpcResult<Self::VerifyStream> {
        let engine = &self.0.store(Access::Read)?.engine;
        let caller = caller(request.extensions())?.clone();
        let allowed = caller.allow_server(ServerRight::Ops)?;
        let request = request.into_inner();
        let verification = engine
            .verify(&allowed, request.segment_id, request.max_bytes_per_second)
            .map_err(|error| status::verify(&error))?;
        let told = VerificationDelivery {
            verification,
            phase: self.0.phase.clone(),
            heartbeat_interval: self.0.heartbeat_interval,
            last: VerifyProgress::default(),
            ended: false,
        };
        let answers = Box::pin(stream::unfold(told, VerificationDelivery::step));
        let lease = caller.lease(HeldRight::Server(ServerRight::Ops));
        Ok(Response::new(leased(lease, answers)))
    }

    async fn backup(&self, request: Request<v1::BackupRequest>) -> RpcResult<Self::BackupStream> {
        let caller = caller(request.extensions())?.clone();
        let stream = backup::backup(&self.0, &caller, request.into_inner()).await?;
        Ok(Response::new(stream))
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> RpcResult<v1::DrainResponse> {
        // The message can come long after the head.
        caller(request.extensions())?.allow_server(ServerRight::Drain)?;
        let delay = drain_delay(request.get_ref())?;
        let is_first = self.0.drain.send_if_modified(|asked| {
            let is_first = asked.is_none();
            *asked = asked.or(Some(DrainOrder { delay }));
            is_first
        });
        Ok(Response::new(v1::DrainResponse {
            already_draining: !is_first,
        }))
    }
}
