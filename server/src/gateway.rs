//! HTTP/JSON on the HTTP port: each request becomes a call of gRPC inside the daemon.
//!
//! ```text
//! HTTP port ── request ──▶ origins ─▶ request: path, query, body ─▶ message ─┐ transport/side
//!                                                                          ▼
//!                                             the calls of gRPC: caller, rights, budgets, limits, metrics, audit
//!                                                                          │
//!           ◀── JSON, lines or server-sent events ── answer ◀── messages ──┘
//! ```
//!
//! Rule: nothing here decides about a request. A call of this port passes all that a call of gRPC passes, and its errors
//! are the same. The descriptors of the contract ([`contract`]) translate messages, and describe the port in OpenAPI.
//!
//! Translation takes time, so it has a thread of its own: probes and scrapes never wait for it, and it takes at most one
//! processor.

mod answer;
mod contract;
mod openapi;
mod origins;
mod request;

use std::io;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{RawPathParams, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::from_fn_with_state;
use axum::response::Response;
use axum::routing::{MethodFilter, on};
use bytes::Bytes;
use prost_reflect::MethodDescriptor;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tonic::Status;

use crate::audit::AuditedPeer;
use crate::auth::{Authority, CertNames};
use crate::config::Config;
use crate::grpc::{AnswerMessages, TranslatedBody};
use crate::http::Hosts;
use crate::status::{self, Access};
use crate::transport::{Incoming, SideConnection, SidePort};
use crate::wakes;
use answer::{AnswerForm, HeldText, TextSender, refused};
use contract::{ApiRoute, ROUTES};
use origins::Origins;
use request::{ApiRequest, HeadFault};

/// Headers of a request that the call gets, too.
const PASSED: [&str; 4] = ["authorization", "grpc-timeout", "traceparent", "tracestate"];

/// The thread that translates. Dropping it ends its calls.
pub(crate) struct ApiThread {
    handle: Handle,
    /// Dropped to end the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ApiThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// If it or its event loop cannot be made.
    pub(crate) fn start() -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new()
            .name("wald-http-api".to_owned())
            .spawn(move || {
                runtime.spawn(wakes::run());
                // The other end was dropped.
                let _ = runtime.block_on(stopped);
                runtime.shutdown_background();
            })?;
        Ok(Self {
            handle,
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl ApiThread {
    /// Starts tasks on the thread.
    pub(crate) fn handle(&self) -> Handle {
        self.handle.clone()
    }
}

impl Drop for ApiThread {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the HTTP API had panicked");
        }
    }
}

/// A connection of the HTTP port. Its first call connects it to the services.
pub(crate) struct ApiConnection {
    /// The names in the certificate of the client, if it sent one.
    pub(crate) names: Option<Arc<CertNames>>,
    /// `None`: there is no audit log.
    pub(crate) audited: Option<Arc<AuditedPeer>>,
    pub(crate) calls: OnceLock<Arc<SideConnection>>,
}

/// State of all requests.
struct Gateway {
    side: SidePort,
    handle: Handle,
    places: usize,
    at_work: Arc<Semaphore>,
}

/// One route, with its descriptor.
struct RouteState {
    route: &'static ApiRoute,
    /// Known since the first request: a start has no time to read the contract.
    method: OnceLock<Option<MethodDescriptor>>,
    gateway: Arc<Gateway>,
}

/// Whether the API answers requests to this address.
pub(crate) fn has(uri: &Uri) -> bool {
    uri.path().starts_with("/v1/") || uri.path() == "/v1"
}

/// The routes. The event loop of `handle` translates. At most `places` requests are at work.
pub(crate) fn router(
    (side, handle): (SidePort, Handle),
    config: &Config,
    hosts: Arc<Hosts>,
    authority: &Authority,
    places: usize,
) -> Router {
    let gateway = Arc::new(Gateway {
        side,
        handle,
        places,
        at_work: Arc::new(Semaphore::new(places)),
    });
    let mut router = Router::new().route("/v1/openapi.json", axum::routing::get(openapi::document));
    for route in &ROUTES {
        let Ok(filter) = MethodFilter::try_from(route.method.clone()) else {
            continue;
        };
        let state = Arc::new(RouteState {
            route,
            method: OnceLock::new(),
            gateway: Arc::clone(&gateway),
        });
        router = router.route(route.path, on(filter, call).with_state(state));
    }
    let origins = Origins {
        allowed: config
            .http_api_origins()
            .filter_map(|origin| origin.parse().ok())
            .collect(),
        hosts: matches!(authority, Authority::Open).then_some(hosts),
    };
    for path in ["/v1", "/v1/", "/v1/{*path}"] {
        router = router.route(path, axum::routing::any(unknown));
    }
    router
        .method_not_allowed_fallback(not_allowed)
        .layer(from_fn_with_state(Arc::new(origins), origins::guarded))
}

async fn unknown(request: Request) -> Response {
    let status = status::unknown_request(request.method(), request.uri().path());
    refused(StatusCode::NOT_FOUND, &status)
}

async fn not_allowed(request: Request) -> Response {
    let status = status::unknown_request(request.method(), request.uri().path());
    refused(StatusCode::METHOD_NOT_ALLOWED, &status)
}

/// Answers a request.
async fn call(
    State(state): State<Arc<RouteState>>,
    path: Result<RawPathParams, RawPathParamsRejection>,
    request: Request,
) -> Response {
    let RouteState {
        route,
        method,
        gateway,
    } = &*state;
    let form = match route.is_stream() {
        true => AnswerForm::of_stream(request.headers()),
        false => AnswerForm::Json,
    };
    let access = route.row().access;
    let Ok(path) = path else {
        return form.refusal(&status::malformed("path", "it is not UTF-8", access));
    };
    let Some(method) = method.get_or_init(|| route.descriptor()) else {
        return form.refusal(&status::unknown_method(route.rpc.path()));
    };
    let Ok(place) = Arc::clone(&gateway.at_work).try_acquire_owned() else {
        return form.refusal(&status::api_busy(gateway.places, access));
    };
    let (head, body) = request.into_parts();
    let fields = ApiRequest::read(route, method, path.iter(), &head.uri, &head.headers);
    let fields = match fields {
        Ok(fields) => fields,
        Err(HeadFault::Fields(status)) => return form.refusal(&status),
        Err(HeadFault::Form(status)) => {
            return refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, &status);
        }
    };
    let Some(connection) = head.extensions.get::<Arc<ApiConnection>>() else {
        return form.refusal(&Status::internal("the request has no connection"));
    };
    let connection = connection.calls.get_or_init(|| {
        let (names, audited) = (connection.names.clone(), connection.audited.clone());
        Arc::new(gateway.side.connect(names, audited))
    });
    let translated = TranslatedBody::new(body, Box::new(fields), access);
    let call = ApiCall {
        connection: Arc::clone(connection),
        request: grpc(route, &head.headers, translated),
        form,
        method: method.clone(),
        is_stream: route.is_stream(),
        access,
        _place: place,
    };
    let (reply, answer) = oneshot::channel();
    gateway.handle.spawn(call.serve(reply));
    match answer.await {
        Ok(answer) => answer,
        // The thread has ended, or has panicked.
        Err(_) => form.refusal(&Status::internal(
            "the request broke off; its outcome is unknown",
        )),
    }
}

/// The request of gRPC.
fn grpc(route: &ApiRoute, headers: &HeaderMap, body: TranslatedBody) -> http::Request<Incoming> {
    let mut request = http::Request::new(Incoming::Translated(Box::new(body)));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = Uri::from_static(route.rpc.path());
    let passed = request.headers_mut();
    let kind = HeaderValue::from_static("application/grpc");
    passed.insert(header::CONTENT_TYPE, kind);
    for name in PASSED.map(HeaderName::from_static) {
        for value in headers.get_all(&name) {
            passed.append(name.clone(), value.clone());
        }
    }
    request
}

/// A call on its way to its answer.
struct ApiCall {
    connection: Arc<SideConnection>,
    request: http::Request<Incoming>,
    form: AnswerForm,
    method: MethodDescriptor,
    is_stream: bool,
    access: Access,
    _place: OwnedSemaphorePermit,
}

impl ApiCall {
    /// Answers the call, unless its client goes away before: then an append goes on, and all else ends.
    async fn serve(self, mut reply: oneshot::Sender<Response>) {
        let Self {
            connection,
            request,
            form,
            method,
            is_stream,
            access,
            _place,
        } = self;
        let answered = tokio::select! {
            answered = connection.call(request, access) => answered,
            () = reply.closed() => return,
        };
        let opened = answered.and_then(|answered| {
            let messages = AnswerMessages::open(answered.response)?;
            Ok((messages, answered.open))
        });
        let (mut messages, _open) = match opened {
            Ok(opened) => opened,
            Err(status) => {
                // Fails only if the client is gone.
                let _ = reply.send(form.refusal(&status));
                return;
            }
        };
        let kind = method.output();
        let (mut sender, body) = TextSender::new(connection.answers(), &connection.phase(), access);
        if !is_stream {
            let show = |bytes| form.message(&kind, bytes);
            let text = one(&mut messages, &sender, access, show).await;
            let text = match text {
                Ok(text) => text,
                Err(status) => {
                    let _ = reply.send(form.refusal(&status));
                    return;
                }
            };
            let mut answer = form.answer(Body::new(body));
            let length = HeaderValue::from(text.bytes.len());
            answer.headers_mut().insert(header::CONTENT_LENGTH, length);
            if reply.send(answer).is_ok() && sender.send(text).await.is_ok() {
                sender.finish();
            }
            return;
        }
        if reply.send(form.answer(Body::new(body))).is_err() {
            return;
        }
        let mut text = form.begin().map(HeldText::small);
        let ended = loop {
            if let Some(text) = text
                && sender.send(text).await.is_err()
            {
                return;
            }
            let next = async {
                match messages.next().await? {
                    None => Ok(None),
                    Some(bytes) => {
                        let room = sender.room(&bytes, true).await?;
                        form.message(&kind, bytes).map(|text| Some(room.of(text)))
                    }
                }
            };
            let next = tokio::select! {
                next = next => next,
                () = sender.closed() => return,
            };
            match next {
                Ok(Some(next)) => text = Some(next),
                Ok(None) => break Ok(()),
                Err(status) => break Err(status),
            }
        };
        // Others may wait for the room of its last message.
        drop(messages);
        let sent = match form.end(&ended) {
            Some(text) => sender.send(HeldText::small(text)).await,
            None => Ok(()),
        };
        if sent.is_ok() {
            sender.finish();
        }
    }
}

/// The text of the only message of an answer.
async fn one<B>(
    messages: &mut AnswerMessages<B>,
    sender: &TextSender,
    access: Access,
    show: impl FnOnce(Bytes) -> Result<Bytes, Status>,
) -> Result<HeldText, Status>
where
    B: http_body::Body<Data = Bytes> + Unpin,
{
    let Some(message) = messages.next().await? else {
        return Err(Status::internal("the answer has no message"));
    };
    let room = match access {
        // It was applied: its answer is never refused.
        Access::Write => sender.room_at_once(&message),
        Access::Read => sender.room(&message, false).await?,
    };
    let text = room.of(show(message)?);
    match messages.next().await? {
        None => Ok(text),
        Some(_) => Err(Status::internal("the answer has two messages")),
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use http_body::Frame;
    use tokio::sync::watch;

    use super::*;
    use crate::answers::{AnswerBudget, AnswerShare};
    use crate::drain::Phase;

    const BYTES: u64 = 1 << 10;

    /// The body of an answer of one message.
    struct GoodAnswer(Vec<Frame<Bytes>>);

    impl GoodAnswer {
        fn new() -> Self {
            let ok = HeaderMap::from_iter([(Status::GRPC_STATUS, HeaderValue::from_static("0"))]);
            let message = Bytes::from_static(b"\0\0\0\0\x06answer");
            Self(vec![Frame::trailers(ok), Frame::data(message)])
        }
    }

    impl http_body::Body for GoodAnswer {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(self.0.pop().map(Ok))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn answer_to_a_write_is_never_refused_for_want_of_room() {
        let answers = AnswerBudget::new(BYTES);
        let _full = AnswerShare::new(&answers).count(BYTES);
        let (_phase, phase) = watch::channel(Phase::Serving);
        let answered = async |access| {
            let (sender, _body) = TextSender::new(&AnswerShare::new(&answers), &phase, access);
            let answer = http::Response::new(GoodAnswer::new());
            let mut messages = AnswerMessages::open(answer).unwrap();
            one(&mut messages, &sender, access, Ok).await
        };
        let text = answered(Access::Write).await.ok().unwrap();
        assert_eq!(&text.bytes[..], b"answer");
        let busy = answered(Access::Read).await.err().unwrap();
        assert_eq!(busy.code(), tonic::Code::ResourceExhausted);
    }
}
