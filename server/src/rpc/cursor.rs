//! CursorService: named positions of consumers.

use tonic::{Request, Response, Status};
use wald_proto::v1;
use wald_storage::CursorError;

use super::{Node, RpcResult, Services, caller, refuse_late};
use crate::convert;
use crate::status::{self, Access};

#[tonic::async_trait]
impl v1::cursor_service_server::CursorService for Services {
    async fn commit_cursor(
        &self,
        request: Request<v1::CommitCursorRequest>,
    ) -> RpcResult<v1::CommitCursorResponse> {
        let store = self.0.store(Access::Write)?;
        refuse_late(request.extensions())?;
        let caller = caller(request.extensions())?.clone();
        let commit = request.into_inner().commit.unwrap_or_default();
        let commit = convert::cursor_commit(format_args!("commit"), commit)?;
        let log = commit.log.clone();
        caller.note(|facts| facts.cursor(commit.cursor.as_str()));
        let cursor = store
            .engine
            .commit_cursor(caller.allow(commit)?)
            .await
            .map_err(|error| self.0.cursor_failed(&error))?;
        Ok(Response::new(v1::CommitCursorResponse {
            cursor: Some(convert::cursor(&log, &cursor)),
        }))
    }

    async fn get_cursor(
        &self,
        request: Request<v1::GetCursorRequest>,
    ) -> RpcResult<v1::GetCursorResponse> {
        let store = self.0.store(Access::Read)?;
        let caller = caller(request.extensions())?;
        let request = request.get_ref();
        let target = convert::target(&request.log, request.log_id, Access::Read)?;
        let log = target.name.clone();
        let name = convert::cursor_name(format_args!("cursor"), &request.cursor, Access::Read)?;
        caller.note(|facts| facts.cursor(name.as_str()));
        let cursor = store
            .engine
            .cursor(caller.allow(target)?, name)
            .await
            .map_err(|error| status::cursor(&error, Access::Read))?;
        Ok(Response::new(v1::GetCursorResponse {
            cursor: Some(convert::cursor(&log, &cursor)),
        }))
    }

    async fn list_cursors(
        &self,
        request: Request<v1::ListCursorsRequest>,
    ) -> RpcResult<v1::ListCursorsResponse> {
        let store = self.0.store(Access::Read)?;
        let caller = caller(request.extensions())?;
        let request = request.get_ref();
        let target = convert::target(&request.log, request.log_id, Access::Read)?;
        let log = target.name.clone();
        let size = convert::page_size(request.page_size);
        let after = convert::parse_page_token(&request.page_token)?;
        // One more than asked tells whether there is a next page.
        let mut found = store
            .engine
            .list_cursors(&caller.allow(target)?, after, size + 1)
            .await
            .map_err(|error| status::cursor(&error, Access::Read))?;
        let next_page_token = convert::cut_to_page(&mut found, size, |last| last.name.to_string());
        Ok(Response::new(v1::ListCursorsResponse {
            cursors: found
                .iter()
                .map(|cursor| convert::cursor(&log, cursor))
                .collect(),
            next_page_token,
        }))
    }

    async fn delete_cursor(
        &self,
        request: Request<v1::DeleteCursorRequest>,
    ) -> RpcResult<v1::DeleteCursorResponse> {
        let store = self.0.store(Access::Write)?;
        refuse_late(request.extensions())?;
        let caller = caller(request.extensions())?.clone();
        let request = request.into_inner();
        let target = convert::target(&request.log, request.log_id, Access::Write)?;
        let name = convert::cursor_name(format_args!("cursor"), &request.cursor, Access::Write)?;
        caller.note(|facts| facts.cursor(name.as_str()));
        store
            .engine
            .delete_cursor(caller.allow(target)?, name)
            .await
            .map_err(|error| self.0.cursor_failed(&error))?;
        Ok(Response::new(v1::DeleteCursorResponse {}))
    }
}

impl Node {
    /// Answers a change of a cursor that was not carried out.
    fn cursor_failed(&self, error: &CursorError) -> Status {
        if let CursorError::Append(error) = error {
            self.metrics.append_failed(error);
        }
        status::cursor(error, Access::Write)
    }
}
