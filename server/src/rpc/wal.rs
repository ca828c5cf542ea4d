//! `WalService`, without tonic's generated server.
//!
//! That server copies every message into a buffer of the call, on the way in and on the way out. Here a message of a
//! request is decoded where it was received. The answer leaves as it was encoded: the bytes of a scan are stored bytes, and
//! the acks of a session are joined where they are made. A session takes its requests itself, since it waits for room for
//! them.

use std::future::ready;
use std::sync::Arc;

use http::{Extensions, Request};
use prost::Message as _;
use tonic::Status;
use tonic::server::NamedService;
use wald_proto::v1;
use wald_proto::v1::wal_service_server::SERVICE_NAME;

use super::session::append_session;
use super::{Answers, Node, append, read, scan};
use crate::answers::{AnswerShare, may_be_hurried};
use crate::auth::Caller;
use crate::grpc::{Framed, Message, RequestBody, answer, receive, unary};
use crate::methods::Rpc;
use crate::status::{self, Access};
use crate::transport::{HttpAnswer, HttpResult, Serve};

/// `WalService`.
pub(crate) struct WalCalls(pub(crate) Arc<Node>);

impl NamedService for WalCalls {
    const NAME: &'static str = SERVICE_NAME;
}

impl Serve for WalCalls {
    fn serve(&self, request: Request<RequestBody>, rpc: Rpc, caller: Caller) -> HttpAnswer {
        let (head, body) = request.into_parts();
        let node = Arc::clone(&self.0);
        let mut body = match body {
            RequestBody::One(body) => body,
            RequestBody::Many(requests) => {
                let acks = append_session(&node, caller, &head.extensions, requests);
                return Box::pin(ready(sent(acks)));
            }
            RequestBody::Unbounded(_) => return unknown(head.uri.path()),
        };
        let access = rpc.access;
        /// Answers with the message of that function.
        macro_rules! call {
            ($function:path) => {
                Box::pin(unary(head, body, access, async move |request| {
                    $function(&node, &caller, request).await
                }))
            };
        }
        match head.uri.path().rsplit('/').next() {
            Some("Append") => call!(append::append),
            Some("AppendBatch") => call!(append::append_batch),
            Some("Read") => call!(read::read),
            Some("Sync") => call!(append::sync),
            Some("GetTail") => call!(read::get_tail),
            Some("Trim") => call!(append::trim),
            Some("Fence") => call!(append::fence),
            Some("Scan") => Box::pin(async move {
                let messages = match receive(&head, &mut body, access).await {
                    Ok(message) => begin_scan(&node, &caller, &head.extensions, message).await,
                    Err(status) => Err(status),
                };
                sent(messages).map(may_be_hurried)
            }),
            _ => unknown(head.uri.path()),
        }
    }
}

fn unknown(path: &str) -> HttpAnswer {
    Box::pin(ready(Ok(status::unknown_method(path).into_http())))
}

async fn begin_scan(
    node: &Arc<Node>,
    caller: &Caller,
    extensions: &Extensions,
    message: Message,
) -> Result<Answers<Framed>, Status> {
    let request = v1::ScanRequest::decode(message.payload())
        .map_err(|why| status::malformed("request", why, Access::Read))?;
    let share = extensions.get::<AnswerShare>().cloned();
    scan::scan(node, caller, request, share).await
}

fn sent(messages: Result<Answers<Framed>, Status>) -> HttpResult {
    Ok(messages.map_or_else(Status::into_http, answer))
}
