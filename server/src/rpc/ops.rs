//! OpsService: what this server is and holds.

use tonic::{Request, Response};
use wald_proto::v1;

use super::{Answer, Answers, Services, backup, unbuilt};
use crate::convert;
use crate::status::{self, Access};

#[tonic::async_trait]
impl v1::ops_service_server::OpsService for Services {
    type VerifyStream = Answers<v1::VerifyResponse>;
    type BackupStream = Answers<v1::BackupResponse>;

    async fn get_server_info(
        &self,
        _request: Request<v1::GetServerInfoRequest>,
    ) -> Answer<v1::GetServerInfoResponse> {
        let node = &self.0;
        let engine = &node.store(Access::Read)?.engine;
        let profile = engine.profile();
        let truth = engine.durability_truth();
        Ok(Response::new(v1::GetServerInfoResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            store_id: convert::uuid(profile.store_id),
            recovery_epoch: profile.recovery_epoch.get(),
            engine: v1::EngineKind::Local.into(),
            start_time: Some(convert::proto_timestamp(node.start_time)),
            limits: Some(convert::server_limits(&profile.limits, &node.limits)),
            sync_modes: convert::sync_modes().map(i32::from).to_vec(),
            default_sync_mode: convert::proto_sync_mode(node.sync_mode).into(),
            sync_interval: Some(convert::proto_duration(node.sync_interval)),
            auto_create: node.auto_create,
            durability: Some(v1::DurabilityTruth {
                file_system: truth.file_system,
                sync_primitive: truth.sync_primitive.to_owned(),
                flush_p50: Some(convert::proto_duration(truth.flush_p50)),
                flush_p99: Some(convert::proto_duration(truth.flush_p99)),
                is_volatile: truth.volatile,
                caveats: truth.warning.into_iter().collect(),
            }),
        }))
    }

    async fn list_segments(
        &self,
        request: Request<v1::ListSegmentsRequest>,
    ) -> Answer<v1::ListSegmentsResponse> {
        let engine = &self.0.store(Access::Read)?.engine;
        let request = request.into_inner();
        let after = match convert::parse_page_token(&request.page_token)? {
            None => None,
            Some(token) => Some(token.parse::<u64>().map_err(|_| {
                status::invalid_field(
                    "INVALID_PAGE_TOKEN",
                    "page_token",
                    "it is not of ListSegments",
                    Access::Read,
                )
            })?),
        };
        let size = convert::page_size(request.page_size);
        let mut segments = convert::segments(&engine.segments(), after, size + 1);
        let more = segments.len() > size;
        segments.truncate(size);
        let next_page_token = match segments.last() {
            Some(last) if more => convert::page_token(&last.segment_id.to_string()),
            _ => String::new(),
        };
        Ok(Response::new(v1::ListSegmentsResponse {
            segments,
            next_page_token,
        }))
    }

    async fn verify(&self, _request: Request<v1::VerifyRequest>) -> Answer<Self::VerifyStream> {
        Err(unbuilt("wald.v1.OpsService.Verify", Access::Read))
    }

    async fn backup(&self, request: Request<v1::BackupRequest>) -> Answer<Self::BackupStream> {
        let stream = backup::backup(&self.0, request.into_inner()).await?;
        Ok(Response::new(stream))
    }

    async fn drain(&self, _request: Request<v1::DrainRequest>) -> Answer<v1::DrainResponse> {
        Err(unbuilt("wald.v1.OpsService.Drain", Access::Write))
    }
}
