//! The RPCs that are called most, without tonic's streams of messages around them.
//!
//! **Unary calls** ([`mod@unary`]): tonic makes a stream of the request and another of the answer,
//! each with buffers, boxes and states of its own. Here the one message is taken from the body as
//! it came, and the answer is a body of one message.
//!
//! **Streams** are sent without a copy. tonic's own body copies every message into a buffer of
//! the call before it is sent. A scan's messages consist of stored bytes, and many followers of
//! a log get the same ones: here their pieces go to the connection unchanged. The acks of a
//! session are put together in one piece where they are made. tonic sees an empty answer with
//! the stream in its extensions, which takes the body's place on the way out. tonic still sends
//! everything before the first message (metadata, refusals).

mod framed;
mod unary;

use std::sync::Arc;

use futures_util::future::FutureExt as _;
use futures_util::stream;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Request};
use parking_lot::Mutex;
use tonic::server::NamedService;
use tonic::{Response, Status};
use tower::Service as _;
use wald_proto::codec::Encoded;
use wald_proto::stored::wal_service_server::WalServiceServer;

use super::session::append_session;
use super::{Answer, Answers, Node, Services, append, read};
use crate::admission::RequestBody;
use crate::answers::may_be_hurried;
use crate::metrics::Rpc;
use crate::status::Access;
use crate::transport::{HttpAnswer, HttpResult, Serve};
pub(super) use framed::Framed;
use framed::Messages;
pub(crate) use unary::checked;
use unary::unary;

/// The stream of an answer, on its way from the RPC to the body.
#[derive(Clone)]
struct Beside(Arc<Mutex<Option<Answers<Framed>>>>);

/// An answer whose messages bypass tonic's body.
pub(super) fn answer(messages: Answers<Framed>) -> Answer<Answers<Encoded>> {
    let unserved = async { Err(Status::internal("nobody sends these messages")) };
    let mut response: Response<Answers<Encoded>> = Response::new(Box::pin(stream::once(unserved)));
    let beside = Beside(Arc::new(Mutex::new(Some(messages))));
    response.extensions_mut().insert(beside);
    Ok(response)
}

/// `WalService`: its calls go directly, or through tonic.
pub(crate) struct Direct {
    services: Services,
    through_tonic: WalServiceServer<Services>,
    /// Bytes of a message that is still decoded.
    largest: usize,
}

impl Direct {
    /// Serves these; a message of more than `largest` bytes is not decoded.
    pub(crate) fn new(services: Services, largest: usize) -> Self {
        Self {
            through_tonic: WalServiceServer::new(services.clone())
                .max_decoding_message_size(largest),
            services,
            largest,
        }
    }
}

impl NamedService for Direct {
    const NAME: &'static str = WalServiceServer::<Services>::NAME;
}

impl Serve for Direct {
    fn serve(&self, request: Request<RequestBody>, rpc: Rpc) -> HttpAnswer {
        // Not as the trait has them: that is a box more for each call, 2 % of an append.
        let node = Arc::clone(&self.services.0);
        let largest = self.largest;
        match request.uri().path() {
            "/wald.v1.WalService/Append" => Box::pin(unary(
                request,
                Access::Write,
                largest,
                async move |request| Ok((append::append(&node, request).await?, None)),
            )),
            "/wald.v1.WalService/AppendBatch" => Box::pin(unary(
                request,
                Access::Write,
                largest,
                async move |request| Ok((append::append_batch(&node, request).await?, None)),
            )),
            "/wald.v1.WalService/Read" => Box::pin(unary(
                request,
                Access::Read,
                largest,
                async move |request| read::read(&node, request).await,
            )),
            "/wald.v1.WalService/AppendSession" => {
                Box::pin(std::future::ready(Ok(session(&node, request))))
            }
            _ => {
                let mut tonic = self.through_tonic.clone();
                checked(request, rpc.access, largest, move |request| {
                    tonic.call(request)
                })
                .map(with_its_stream)
                .boxed()
            }
        }
    }
}

/// The answer to an append session, which takes the messages from the body itself.
fn session(node: &Arc<Node>, request: Request<RequestBody>) -> http::Response<tonic::body::Body> {
    let (head, body) = request.into_parts();
    let acks = match body.into_session() {
        Some(received) => append_session(node, &head.extensions, received),
        None => Err(Status::internal("the body is not that of a session")),
    };
    match acks {
        Ok(acks) => {
            let body = tonic::body::Body::new(Messages::new(acks));
            let mut response = http::Response::new(body);
            let headers = response.headers_mut();
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
            response
        }
        Err(status) => status.into_http(),
    }
}

fn with_its_stream(answer: HttpResult) -> HttpResult {
    let mut response = answer?;
    let beside = response.extensions_mut().remove::<Beside>();
    let stream = beside.and_then(|Beside(stream)| stream.lock().take());
    Ok(match stream {
        Some(stream) => {
            may_be_hurried(response.map(|_| tonic::body::Body::new(Messages::new(stream))))
        }
        None => response,
    })
}
