//! Messages of gRPC: bytes of a connection on one side, whole messages on the other.
//!
//! ```text
//! client ── frames ──▶ body: bounded, admitted, whole ── Message ──▶ rpc/ (WalService), or tonic's generated service
//! client ◀─ frames ─── reply: Framed, status ◀────────────────────────┘
//! ```
//!
//! Rule: `prefix.rs` alone reads and writes the five bytes before a message. Only [`body`] knows when bytes of a request
//! are charged to a budget ([`crate::admission`]), and how long a client may take for them.

mod body;
mod prefix;
mod reply;
mod taken;

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body::Frame;
use tonic::Status;
use tonic::body::Body;
use tonic::metadata::MetadataMap;
use tower::Service;
use wald_proto::codec::{Decode, Encode};

use crate::answers::{AnswerShare, Counted, may_be_hurried};
use crate::status::{self, Access};
use crate::transport::HttpResult;
pub(crate) use body::{
    Admitted, Message, Messages, OneMessage, RequestBody, TranslatedBody, Translation,
};
use reply::answer_one;
pub(crate) use reply::{Framed, answer};
pub(crate) use taken::{AnswerMessages, framed};

/// Receives the one message of a call. The call stays charged while `body` is there. A call that reads is BUSY while
/// there is no room for answers.
///
/// # Errors
/// The refusal of the call.
pub(crate) async fn receive(
    head: &Parts,
    body: &mut OneMessage,
    access: Access,
) -> Result<Message, Status> {
    let message = body.receive().await?;
    if access == Access::Read
        && let Some(share) = head.extensions.get::<AnswerShare>()
    {
        share.room().await?;
    }
    Ok(message)
}

/// Receives the one message of a call, and sends the message with which `serve` answers it.
#[expect(
    clippy::manual_async_fn,
    reason = "an async fn moves its arguments, which would take their place twice"
)]
pub(crate) fn unary<M: Decode, R: Encode>(
    head: Parts,
    mut body: OneMessage,
    access: Access,
    serve: impl AsyncFnOnce(tonic::Request<M>) -> Result<tonic::Response<R>, Status>,
) -> impl Future<Output = HttpResult> {
    async move {
        let message = match receive(&head, &mut body, access).await {
            Ok(message) => M::take(message.payload()),
            Err(status) => return Ok(status.into_http()),
        };
        let message = match message {
            Ok(message) => message,
            Err(status) => return Ok(status::received(status, access).into_http()),
        };
        let share = head.extensions.get::<AnswerShare>().cloned();
        let metadata = MetadataMap::from_headers(head.headers);
        let request = tonic::Request::from_parts(metadata, head.extensions, message);
        // Boxed: a call that waits for its message is smaller without it.
        let answer = Box::pin(serve(request)).await.and_then(answer_one);
        Ok(match answer {
            Ok(answer) => sent(answer, share, access),
            Err(status) => status.into_http(),
        })
    }
}

/// An answer on its way to its client, counted as its connection's.
fn sent(answer: Response<Body>, share: Option<AnswerShare>, access: Access) -> Response<Body> {
    let answer = Counted::answer(answer, share, None);
    match access {
        Access::Read => may_be_hurried(answer),
        // It tells its client whether the write was applied, and is never cut off.
        Access::Write => answer,
    }
}

/// Receives the one message of a call, and has a service of tonic's answer the call. tonic alone would take two
/// messages for one, and blame the server for bytes that are no message.
#[expect(
    clippy::manual_async_fn,
    reason = "an async fn moves its arguments, which would take their place twice"
)]
pub(crate) fn through_tonic<S>(
    mut service: S,
    head: Parts,
    mut body: OneMessage,
    access: Access,
) -> impl Future<Output = HttpResult>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    async move {
        let message = match receive(&head, &mut body, access).await {
            Ok(message) => Body::new(Once(Some(message.framed()))),
            Err(status) => return Ok(status.into_http()),
        };
        let share = head.extensions.get::<AnswerShare>().cloned();
        let answer = service.call(Request::from_parts(head, message)).await?;
        let headers = answer.headers();
        // Every INTERNAL of Wald's has details.
        let is_tonics = (headers.get(Status::GRPC_STATUS)).is_some_and(|code| code == "13")
            && !headers.contains_key("grpc-status-details-bin");
        if is_tonics && let Some(status) = Status::from_header_map(headers) {
            return Ok(status::received(status, access).into_http());
        }
        Ok(sent(answer, share, access))
    }
}

/// A body of one frame.
struct Once(Option<Bytes>);

impl http_body::Body for Once {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.take().map(|data| Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}

#[cfg(test)]
mod tests {
    use wald_proto::v1::log_service_server::LogServiceServer;
    use wald_proto::v1::{AppendRequest, AppendResponse};

    use super::*;
    use crate::rpc::Services;

    #[test]
    fn call_that_waits_for_its_message_takes_less_than_a_kilobyte() {
        type Served = Result<tonic::Response<AppendResponse>, Status>;
        fn bytes<A, B, C, D, F>(_: fn(A, B, C, D) -> F) -> usize {
            size_of::<F>()
        }
        async fn serve(_: tonic::Request<AppendRequest>) -> Served {
            Err(Status::ok(""))
        }
        let here = bytes(|head, body, access, ()| unary(head, body, access, serve));
        let tonics = bytes(through_tonic::<LogServiceServer<Services>>);
        assert!(here < 1024 && tonics < 1024, "{here}, {tonics}");
    }
}
