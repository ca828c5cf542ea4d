//! CursorService: in the contract, not in this version.

use tonic::Request;
use wald_proto::v1;

use super::{Answer, Services, unbuilt};
use crate::status::Access;

#[tonic::async_trait]
impl v1::cursor_service_server::CursorService for Services {
    async fn commit_cursor(
        &self,
        _request: Request<v1::CommitCursorRequest>,
    ) -> Answer<v1::CommitCursorResponse> {
        Err(unbuilt("wald.v1.CursorService.CommitCursor", Access::Write))
    }

    async fn get_cursor(
        &self,
        _request: Request<v1::GetCursorRequest>,
    ) -> Answer<v1::GetCursorResponse> {
        Err(unbuilt("wald.v1.CursorService.GetCursor", Access::Read))
    }

    async fn list_cursors(
        &self,
        _request: Request<v1::ListCursorsRequest>,
    ) -> Answer<v1::ListCursorsResponse> {
        Err(unbuilt("wald.v1.CursorService.ListCursors", Access::Read))
    }

    async fn delete_cursor(
        &self,
        _request: Request<v1::DeleteCursorRequest>,
    ) -> Answer<v1::DeleteCursorResponse> {
        Err(unbuilt("wald.v1.CursorService.DeleteCursor", Access::Write))
    }
}
