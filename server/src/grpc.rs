//! Messages of gRPC: bytes of a connection on one side, whole messages on the other.
//!
//! ```text
//! client ── frames ──▶ body: bounded, admitted, whole ── Message ──▶ rpc/, or tonic's generated service
//! client ◀─ frames ─── reply: Framed, status ◀────────────────────────┘
//! ```
//!
//! Rule: `prefix.rs` alone reads and writes the five bytes before a message. Only [`body`] knows when bytes of a request
//! are charged to a budget ([`crate::admission`]), and how long a client may take for them.

mod body;
mod prefix;
mod reply;

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use tonic::Status;
use tonic::body::Body;
use tower::Service;

use crate::answers::{AnswerShare, Counted, may_be_hurried};
use crate::status::{self, Access};
use crate::transport::HttpResult;
pub(crate) use body::{Admitted, Message, Messages, OneMessage, RequestBody};
pub(crate) use reply::{Framed, answer};

/// Receives the one message of a call and passes it on to `serve`. The call stays charged until it is answered. A call
/// that reads is BUSY while there is no room for answers.
pub(crate) async fn with_message<F>(
    request: Request<OneMessage>,
    access: Access,
    serve: impl FnOnce(Request<Message>) -> F,
) -> HttpResult
where
    F: Future<Output = HttpResult>,
{
    let (head, mut body) = request.into_parts();
    let message = match body.receive().await {
        Ok(message) => message,
        Err(status) => return Ok(status.into_http()),
    };
    if access == Access::Read
        && let Some(share) = head.extensions.get::<AnswerShare>()
        && let Err(busy) = share.room().await
    {
        return Ok(busy.into_http());
    }
    serve(Request::from_parts(head, message)).await
}

/// Receives the one message of a call, and has a service of tonic's answer the call. tonic alone would take two
/// messages for one, and blame the server for bytes that are no message.
pub(crate) async fn through_tonic<S>(
    mut service: S,
    request: Request<OneMessage>,
    access: Access,
) -> HttpResult
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    let share = request.extensions().get::<AnswerShare>().cloned();
    let serve = |request: Request<Message>| {
        service.call(request.map(|message| Body::new(Once(Some(message.framed())))))
    };
    let answer = with_message(request, access, serve).await?;
    let headers = answer.headers();
    // Every INTERNAL of Wald's has details.
    let is_tonics = (headers.get(Status::GRPC_STATUS)).is_some_and(|code| code == "13")
        && !headers.contains_key("grpc-status-details-bin");
    if is_tonics && let Some(status) = Status::from_header_map(headers) {
        return Ok(status::received(status, access).into_http());
    }
    let answer = Counted::answer(answer, share, None);
    Ok(match access {
        Access::Read => may_be_hurried(answer),
        // It tells its client whether the write was applied, and is never cut off.
        Access::Write => answer,
    })
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
