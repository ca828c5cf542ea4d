//! LogService: making, listing, configuring, deleting logs; listing and forgetting their producers.

use tonic::{Request, Response};
use wald_proto::v1;

use super::{RpcResult, Services, caller, refuse_late};
use crate::convert;
use crate::status::{self, Access};

#[tonic::async_trait]
impl v1::log_service_server::LogService for Services {
    async fn create_log(
        &self,
        request: Request<v1::CreateLogRequest>,
    ) -> RpcResult<v1::CreateLogResponse> {
        let store = self.0.store(Access::Write)?;
        refuse_late(request.extensions())?;
        let caller = caller(request.extensions())?.clone();
        let request = request.into_inner();
        let name = convert::log_name(format_args!("log"), &request.log, Access::Write)?;
        let config = convert::log_config(request.config, &store.engine.profile().limits)?;
        let info = store
            .engine
            .create_log(caller.allow(name)?, config)
            .await
            .map_err(|error| status::admin(&error))?;
        caller.note(|facts| facts.found(info.log_id));
        Ok(Response::new(v1::CreateLogResponse {
            log: Some(convert::log(&info)),
        }))
    }

    async fn get_log(&self, request: Request<v1::GetLogRequest>) -> RpcResult<v1::GetLogResponse> {
        let store = self.0.store(Access::Read)?;
        let target = convert::target(&request.get_ref().log, None, Access::Read)?;
        let target = caller(request.extensions())?.allow(target)?;
        let stat = store.engine.stat(&target, None, None).await;
        let stat = stat.map_err(|error| status::read(&error))?;
        Ok(Response::new(v1::GetLogResponse {
            log: Some(convert::log(&stat.info)),
        }))
    }

    async fn list_logs(
        &self,
        request: Request<v1::ListLogsRequest>,
    ) -> RpcResult<v1::ListLogsResponse> {
        let store = self.0.store(Access::Read)?;
        let caller = caller(request.extensions())?.clone();
        let request = request.into_inner();
        let size = convert::page_size(request.page_size);
        let after = convert::parse_page_token(&request.page_token)?;
        // One more than asked tells whether there is a next page.
        let mut found = store
            .engine
            .list_logs(caller.listed(request.prefix)?, after, size + 1)
            .await
            .map_err(|error| status::read(&error))?;
        let next_page_token = convert::cut_to_page(&mut found, size, |last| last.name.to_string());
        Ok(Response::new(v1::ListLogsResponse {
            logs: found.iter().map(convert::log).collect(),
            next_page_token,
        }))
    }

    async fn update_log(
        &self,
        request: Request<v1::UpdateLogRequest>,
    ) -> RpcResult<v1::UpdateLogResponse> {
        let store = self.0.store(Access::Write)?;
        refuse_late(request.extensions())?;
        let caller = caller(request.extensions())?.clone();
        let request = request.into_inner();
        let name = convert::log_name(format_args!("log"), &request.log, Access::Write)?;
        let change = convert::log_config_change(&request, &store.engine.profile().limits)?;
        let info = store
            .engine
            .update_log(caller.allow(name)?, change)
            .await
            .map_err(|error| status::admin(&error))?;
        caller.note(|facts| facts.found(info.log_id));
        Ok(Response::new(v1::UpdateLogResponse {
            log: Some(convert::log(&info)),
        }))
    }

    async fn delete_log(
        &self,
        request: Request<v1::DeleteLogRequest>,
    ) -> RpcResult<v1::DeleteLogResponse> {
        let store = self.0.store(Access::Write)?;
        let caller = caller(request.extensions())?.clone();
        let (_, extensions, request) = request.into_parts();
        let target = convert::target(&request.log, request.log_id, Access::Write)?;
        let target = caller.allow(target)?;
        if request.shred {
            let (keys, deadline) = (store.keys.as_ref(), extensions.get().cloned());
            let shredded = store.engine.shred_log(target, &caller, keys, deadline);
            let log_id = shredded.await?;
            caller.note(|facts| facts.shredded(log_id));
            return Ok(Response::new(v1::DeleteLogResponse {}));
        }
        refuse_late(&extensions)?;
        store
            .engine
            .delete_log(target)
            .await
            .map_err(|error| status::admin(&error))?;
        Ok(Response::new(v1::DeleteLogResponse {}))
    }

    async fn list_producers(
        &self,
        request: Request<v1::ListProducersRequest>,
    ) -> RpcResult<v1::ListProducersResponse> {
        let store = self.0.store(Access::Read)?;
        let caller = caller(request.extensions())?.clone();
        let request = request.into_inner();
        let target = convert::target(&request.log, request.log_id, Access::Read)?;
        let size = convert::page_size(request.page_size);
        let after = convert::parse_page_token(&request.page_token)?;
        // One more than the page tells whether there is a next page.
        let mut found = store
            .engine
            .list_producers(caller.allow(target)?, after, size + 1)
            .await
            .map_err(|error| status::read(&error))?;
        let next_page_token = convert::cut_to_page(&mut found, size, |last| last.id.to_string());
        Ok(Response::new(v1::ListProducersResponse {
            producers: found.iter().map(convert::log_producer).collect(),
            next_page_token,
        }))
    }

    async fn forget_producer(
        &self,
        request: Request<v1::ForgetProducerRequest>,
    ) -> RpcResult<v1::ForgetProducerResponse> {
        let store = self.0.store(Access::Write)?;
        refuse_late(request.extensions())?;
        let caller = caller(request.extensions())?.clone();
        let request = request.into_inner();
        let target = convert::target(&request.log, request.log_id, Access::Write)?;
        let id = convert::producer_id(&request.producer_id)?;
        caller.note(|facts| facts.producer(id.as_str()));
        store
            .engine
            .forget_producer(caller.allow(target)?, id)
            .await
            .map_err(|error| status::admin(&error))?;
        Ok(Response::new(v1::ForgetProducerResponse {}))
    }
}
