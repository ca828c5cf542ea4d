//! `WalService`: its unary calls go through tonic, its streams past it.
//!
//! tonic's own body copies every message into a buffer of the call before it is sent. A scan's messages consist of
//! stored bytes, and the acks of a session are joined into one piece where they are made. Both leave in
//! [`crate::grpc::Framed`], unchanged. A session also takes its requests itself, since it waits for room for them.

use std::future::ready;
use std::sync::Arc;

use http::{Extensions, Request};
use prost::Message as _;
use tonic::Status;
use tonic::server::NamedService;
use wald_proto::unary::wal_service_server::WalServiceServer;
use wald_proto::v1;

use super::session::append_session;
use super::{Answers, Node, Services, scan};
use crate::answers::{AnswerShare, may_be_hurried};
use crate::grpc::{Framed, Message, RequestBody, answer, receive};
use crate::metrics::Rpc;
use crate::status::{self, Access};
use crate::transport::{Generated, HttpAnswer, HttpResult, Serve};

/// `WalService`, with its streams.
pub(crate) struct WalCalls {
    node: Arc<Node>,
    unary: Generated<WalServiceServer<Services>>,
}

impl WalCalls {
    /// Serves the calls of `WalService`.
    pub(crate) fn new(services: Services) -> Self {
        let node = Arc::clone(&services.0);
        // Admission bounds the messages.
        let unary = WalServiceServer::new(services).max_decoding_message_size(usize::MAX);
        Self {
            node,
            unary: Generated(unary),
        }
    }
}

impl NamedService for WalCalls {
    const NAME: &'static str = WalServiceServer::<Services>::NAME;
}

impl Serve for WalCalls {
    fn serve(&self, request: Request<RequestBody>, rpc: Rpc) -> HttpAnswer {
        let (head, body) = request.into_parts();
        match body {
            RequestBody::Many(requests) => {
                let acks = append_session(&self.node, &head.extensions, requests);
                Box::pin(ready(sent(acks)))
            }
            RequestBody::One(mut body) if head.uri.path() == "/wald.v1.WalService/Scan" => {
                let node = Arc::clone(&self.node);
                Box::pin(async move {
                    let messages = match receive(&head, &mut body, rpc.access).await {
                        Ok(message) => begin_scan(&node, &head.extensions, message).await,
                        Err(status) => Err(status),
                    };
                    sent(messages).map(may_be_hurried)
                })
            }
            body => self.unary.serve(Request::from_parts(head, body), rpc),
        }
    }
}

async fn begin_scan(
    node: &Arc<Node>,
    extensions: &Extensions,
    message: Message,
) -> Result<Answers<Framed>, Status> {
    let request = v1::ScanRequest::decode(message.payload())
        .map_err(|why| status::malformed("request", why, Access::Read))?;
    scan::scan(node, request, extensions.get::<AnswerShare>().cloned()).await
}

fn sent(messages: Result<Answers<Framed>, Status>) -> HttpResult {
    Ok(messages.map_or_else(Status::into_http, answer))
}
