//! The HTTP side port: /livez, /readyz, /metrics; the console and the API add their own. Its own port, so that
//! probes and scrapes work whatever the gRPC side is configured to demand.
//!
//! ```text
//! thread wald-http: accept ─▶ place ─▶ protocol ─▶ hyper, HTTP/1 ─▶ checks ─▶ routes
//!                              (http/places.rs)       │                        │ /metrics:
//!                                      TLS, HTTP/2: an answer that names       ▼ http/render.rs
//!                                      the right port (http/foreign.rs)     a blocking thread
//! ```
//!
//! It runs on a thread and an event loop of its own, so that no peer of this port delays an
//! append, a new gRPC connection or the life cycle. Every connection has a bounded place, and
//! every state of it a bounded time (`http/places.rs`).

mod conn;
mod foreign;
mod hosts;
mod places;
mod render;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Uri, Version, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{Domain, Protocol as Transport, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tower::Service as _;

use crate::answers::AnswerShare;
use crate::audit::{AuditLog, AuditedPeer, Trail};
use crate::auth::{Authority, CertNames, ServerRight};
use crate::config::{Config, LEAST_HTTP_CONNECTIONS};
use crate::console;
use crate::drain::{Phase, draining};
use crate::gateway::{self, ApiConnection, ApiThread};
use crate::methods;
use crate::reload::Reloader;
use crate::rpc::Node;
use crate::tls::{
    CertificateWatch, ConnStream, HANDSHAKE_RECORD, REFUSED_GRACE, TlsAcceptor, TlsPort, TlsSource,
};
use crate::transport::{SidePort, pause_after_failed_accept};
use conn::{HttpConn, PeerProtocol};
pub(crate) use hosts::{Hosts, UNKNOWN, asked, is_same_origin};
use places::{ConnPlace, ConnPlaces, Holder, Overdue, RequestAtWork, TimeBounds, UNREAD};
use render::Renderer;

/// Most bytes of a request head. Longer ones are answered 431.
const HEAD_BYTES: usize = 16 << 10;
/// Most bytes of a request body. Only a login has one, and requests to the API, which have bounds of their own.
const BODY_BYTES: u64 = 64 << 10;
/// Connections that the system completes before they are accepted: a burst of them must not
/// make a probe try again, a second later.
const BACKLOG: i32 = 1024;
/// Bytes that the system keeps for a connection in each direction; it doubles them.
const RECEIVE_BYTES: usize = 32 << 10;
const SEND_BYTES: usize = 64 << 10;
/// Threads for work that may block, such as to render /metrics.
const BLOCKING_THREADS: usize = 2;

/// Longest time that the end of the port waits for work that may block.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// Takes the port.
///
/// # Errors
/// If the system does not give it, usually because another process has it.
pub(crate) fn bind(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Transport::TCP),
    )?;
    socket.set_nonblocking(true)?;
    socket.set_reuse_address(true)?;
    // Connections take these over. The system may give less.
    let _ = socket.set_recv_buffer_size(RECEIVE_BYTES);
    let _ = socket.set_send_buffer_size(SEND_BYTES);
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// The port at work. Dropping it ends the port and lets go of the engine, which must be dropped
/// before the process ends: the sorter removes its unfinished files then.
pub(crate) struct Http {
    /// Dropped to end the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    /// `None`: the port has no API. Ends behind the port.
    _api: Option<ApiThread>,
}

impl Drop for Http {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the HTTP port had panicked");
        }
    }
}

/// Starts the thread that serves the port. `side`: the way of the API into the services. When draining begins, idle connections close and event
/// streams end; probes are answered until the value is dropped.
///
/// # Errors
/// If the thread or its event loop cannot be made.
pub(crate) fn start(
    listener: std::net::TcpListener,
    node: &Arc<Node>,
    config: &Config,
    grpc: SocketAddr,
    tls: Option<&Reloader<TlsSource>>,
    (authority, audit): (&Authority, Option<&Arc<AuditLog>>),
    side: SidePort,
) -> io::Result<Http> {
    let tls = tls
        .filter(|_| config.http_tls)
        .map(|tls| tls.acceptor(TlsPort::Http));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .build()?;
    let listener = {
        let _entered = runtime.enter();
        TcpListener::from_std(listener)?
    };
    let (node, config, authority) = (Arc::clone(node), config.clone(), authority.clone());
    let audit = audit.cloned();
    let answers = side.answers();
    let api = config.has_http_api().then(ApiThread::start).transpose()?;
    let api_handle = api.as_ref().map(|api| (api.handle(), side));
    let (stop, stopped) = oneshot::channel::<()>();
    let thread = std::thread::Builder::new()
        .name("wald-http".to_owned())
        .spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = serve(listener, node, &config, grpc, (tls, api_handle), (authority, audit, answers)) => {}
                    // The other end was dropped.
                    _ = stopped => {}
                }
            });
            runtime.shutdown_timeout(LAST_ANSWERS);
        })?;
    Ok(Http {
        stop: Some(stop),
        thread: Some(thread),
        _api: api,
    })
}

/// State that all connections share.
struct Port {
    router: Router,
    phase: watch::Receiver<Phase>,
    grpc: SocketAddr,
    /// Whether the gRPC port speaks TLS.
    has_grpc_tls: bool,
    /// `None`: this port speaks plaintext.
    tls: Option<TlsAcceptor>,
    bounds: TimeBounds,
    /// `None`: there is no audit log.
    audit: Option<Arc<AuditLog>>,
    /// Requests at work, probes and the API aside: three eighths of the places. The API has as many, so a quarter of the
    /// places is always free or idle.
    at_work: Arc<Semaphore>,
}

/// Accepts connections and serves them.
async fn serve(
    listener: TcpListener,
    node: Arc<Node>,
    config: &Config,
    grpc: SocketAddr,
    (tls, api): (Option<TlsAcceptor>, Option<(Handle, SidePort)>),
    (authority, audit, answers): (Authority, Option<Arc<AuditLog>>, AnswerShare),
) {
    let http = listener.local_addr().ok();
    let hosts = Arc::new(Hosts::new(&config.console_hosts));
    let open = config.metrics_open.then_some(Authority::Open);
    let scrapers = open.unwrap_or_else(|| authority.clone());
    let mut router = router(
        Arc::clone(&node),
        &hosts,
        (config.has_console(), config.has_http_api()),
        grpc,
        scrapers,
    );
    let most = config.http_max_connections.max(LEAST_HTTP_CONNECTIONS);
    if let Some((handle, side)) = api {
        let hosts = Arc::clone(&hosts);
        let places = most * 3 / 8;
        let api = gateway::router((side, handle), config, hosts, &authority, places);
        router = router.merge(api);
    }
    if config.has_console() {
        let console = console::router(
            Arc::clone(&node),
            config,
            hosts,
            (authority, answers),
            most / 8,
            (grpc, http),
        );
        router = router.merge(console);
    }
    let port = Arc::new(Port {
        router,
        phase: node.phase.clone(),
        grpc,
        has_grpc_tls: config.has_tls(),
        tls,
        bounds: TimeBounds {
            head: config.http_head_timeout,
            idle: config.http_idle_timeout,
        },
        audit,
        at_work: Arc::new(Semaphore::new(most * 3 / 8)),
    });
    let own = &node.metrics.ports.http;
    let places = ConnPlaces::new(most, own.clone());
    loop {
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(error) => {
                // A descriptor of an idle connection may be all that is missing.
                places.make_room();
                pause_after_failed_accept(&error, own).await;
                continue;
            }
        };
        let (holder, made_room) = places.take().await;
        if made_room {
            tracing::warn!(
                http_max_connections = most,
                "all connections of the HTTP port are taken; the one idle longest ends"
            );
        }
        // Without these an answer is slower, or a connection lives longer.
        let _ = socket.set_nodelay(true);
        let _ = SockRef::from(&socket).set_tcp_user_timeout(Some(UNREAD));
        tokio::spawn(connection(socket, holder, Arc::clone(&port)));
    }
}

/// Serves one connection until it is closed or overdue.
async fn connection(socket: TcpStream, holder: Holder, port: Arc<Port>) {
    let place = holder.place();
    let overdue = tokio::select! {
        biased;
        () = talk(socket, place, &port) => return,
        overdue = place.overdue(port.bounds) => overdue,
    };
    let why = match overdue {
        Overdue::Head => "no request came in time",
        Overdue::Idle => "no further request came",
        Overdue::Unread => "its answer was not read",
        Overdue::GaveWay => "another one needed its place",
    };
    tracing::debug!(why, "an HTTP connection ends");
}

/// Serves one connection, whatever its peer speaks.
async fn talk(socket: TcpStream, place: &Arc<ConnPlace>, port: &Arc<Port>) {
    let audited = (port.audit.as_ref()).map(|audit| audit.peer(socket.peer_addr().ok()));
    let mut phase = port.phase.clone();
    let greeted = tokio::select! {
        greeted = greet(socket, place, port) => greeted,
        // No request has begun.
        () = after_draining(&mut phase) => return,
    };
    match greeted {
        Ok(Some(Greeted {
            conn,
            watch,
            protocol,
        })) => match protocol {
            PeerProtocol::Http1 if port.tls.is_some() && !conn.is_tls() => {
                foreign::plaintext(conn).await;
            }
            PeerProtocol::Http1 => http1(conn, watch, audited, place, (port, phase)).await,
            PeerProtocol::Http2 => foreign::http2(conn, port.grpc).await,
            PeerProtocol::Tls => foreign::tls(conn, port.grpc, port.has_grpc_tls).await,
        },
        // The handshake of TLS failed.
        Ok(None) => {}
        Err(error) => tracing::debug!(%error, "an HTTP connection was lost"),
    }
}

/// A connection whose protocol is known.
struct Greeted {
    conn: HttpConn,
    /// Watches the certificate of the client, if it sent one.
    watch: Option<CertificateWatch>,
    protocol: PeerProtocol,
}

/// Makes the handshake of TLS, if the port has TLS and the peer begins one, and recognises the protocol. `None` if the
/// handshake fails.
async fn greet(
    socket: TcpStream,
    place: &Arc<ConnPlace>,
    port: &Port,
) -> io::Result<Option<Greeted>> {
    let (stream, watch) = match &port.tls {
        Some(tls) if begins_tls(&socket).await? => match tls.accept(socket, || ()).await {
            Some(secured) => secured,
            None => return Ok(None),
        },
        _ => (ConnStream::Plain(socket), None),
    };
    let mut conn = HttpConn::new(stream, Arc::clone(place));
    let protocol = conn.protocol().await?;
    Ok(Some(Greeted {
        conn,
        watch,
        protocol,
    }))
}

/// Awaits the first byte of a connection, and returns whether it begins a handshake of TLS. The byte stays unread.
async fn begins_tls(socket: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    let length = socket.peek(&mut first).await?;
    Ok(first[..length] == [HANDSHAKE_RECORD])
}

/// Resolves when draining begins; for connections that come later, never: a probe may ask up to
/// the end of the process.
async fn after_draining(phase: &mut watch::Receiver<Phase>) {
    if *phase.borrow_and_update() == Phase::Draining {
        return std::future::pending().await;
    }
    draining(phase).await;
}

/// Serves HTTP/1, one request after the other.
async fn http1(
    conn: HttpConn,
    watch: Option<CertificateWatch>,
    audited: Option<Arc<AuditedPeer>>,
    place: &Arc<ConnPlace>,
    (port, mut phase): (&Arc<Port>, watch::Receiver<Phase>),
) {
    let names = watch.as_ref().map(|watch| Arc::new(watch.names()));
    let address = conn.address();
    let api = Arc::new(ApiConnection {
        names: names.clone(),
        audited: audited.clone(),
        calls: OnceLock::new(),
    });
    let service = service_fn(|mut request: Request<Incoming>| {
        let work = place.work();
        if let Some(names) = &names {
            request.extensions_mut().insert(Arc::clone(names));
        }
        request.extensions_mut().insert(address);
        request.extensions_mut().insert(Arc::clone(&api));
        if let Some(audited) = &audited {
            request.extensions_mut().insert(Arc::clone(audited));
        }
        async move { Ok::<_, Infallible>(answer(request, work, port).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        // `places` has the time, which also tells an idle connection from a slow head.
        .header_read_timeout(None)
        .max_header_size(HEAD_BYTES)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(conn), service);
    let mut connection = pin!(connection);
    let refused = async {
        match watch {
            Some(watch) => watch.refused().await,
            None => std::future::pending().await,
        }
    };
    let ended = tokio::select! {
        biased;
        ended = connection.as_mut() => ended,
        () = draining(&mut phase) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
        why = refused => {
            tracing::info!(%why, "the certificate of a client is no longer accepted; its HTTP connection ends");
            connection.as_mut().graceful_shutdown();
            match tokio::time::timeout(REFUSED_GRACE, connection).await {
                Ok(ended) => ended,
                Err(_) => return,
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(
            error = &error as &dyn std::error::Error,
            "an HTTP connection ended"
        );
    }
}

/// Answers a request, and holds its place among those at work until the answer is sent.
async fn answer(request: Request<Incoming>, work: RequestAtWork, port: &Port) -> Response<Body> {
    if let Some(refusal) = refusal(&request) {
        return refusal.into_response();
    }
    let probe = matches!(request.uri().path(), "/livez" | "/readyz");
    // The API counts its own.
    let permit = if probe || gateway::has(request.uri()) {
        None
    } else if let Ok(permit) = Arc::clone(&port.at_work).try_acquire_owned() {
        Some(permit)
    } else {
        let busy = "too many requests are at work on this port; try again\n";
        return (StatusCode::SERVICE_UNAVAILABLE, busy).into_response();
    };
    let place = Arc::clone(&work.0);
    let request = request.map(|body| match body.is_end_stream() {
        true => Body::new(body),
        false => Body::new(ArrivingBody { body, place }),
    });
    let Ok(response) = port.router.clone().call(request).await;
    response.map(|body| {
        Body::new(AnswerBody {
            body,
            _work: work,
            _permit: permit,
        })
    })
}

/// Requests that are refused before any route sees them.
fn refusal(request: &Request<Incoming>) -> Option<(StatusCode, HeaderMap, &'static str)> {
    let mut headers = HeaderMap::new();
    let hosts = request.headers().get_all(header::HOST).iter().count();
    if hosts > 1 || (hosts == 0 && request.version() == Version::HTTP_11) {
        let sentence = "an HTTP/1.1 request names its host in one Host header\n";
        return Some((StatusCode::BAD_REQUEST, headers, sentence));
    }
    if request.method() == Method::CONNECT {
        headers.insert(header::ALLOW, HeaderValue::from_static("GET,HEAD"));
        let sentence = "this port is no proxy\n";
        return Some((StatusCode::METHOD_NOT_ALLOWED, headers, sentence));
    }
    // hyper has checked the length. It reads no more of a body than has come with the head.
    let length = request.body().size_hint().exact();
    if length.is_some_and(|length| length > BODY_BYTES) && !gateway::has(request.uri()) {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        let sentence = "no request to this port needs a body\n";
        return Some((StatusCode::PAYLOAD_TOO_LARGE, headers, sentence));
    }
    None
}

/// The body of an answer, at work until its last byte was handed to the transport.
struct AnswerBody {
    body: Body,
    _work: RequestAtWork,
    _permit: Option<OwnedSemaphorePermit>,
}

impl http_body::Body for AnswerBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of a request, which notes its end: bytes that come later are not of this request.
struct ArrivingBody {
    body: Incoming,
    place: Arc<ConnPlace>,
}

impl http_body::Body for ArrivingBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() || self.body.is_end_stream() {
            self.place.request_is_whole();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// State that the routes need.
struct HttpRoutes {
    node: Arc<Node>,
    renderer: Renderer,
    hosts: Arc<Hosts>,
}

/// The routes, but for the console's.
fn router(
    node: Arc<Node>,
    hosts: &Arc<Hosts>,
    (has_console, has_api): (bool, bool),
    grpc: SocketAddr,
    scrapers: Authority,
) -> Router {
    let port = grpc.port();
    let console = match has_console {
        true => ", /console/",
        false => " (the console is off: see the setting `console`)",
    };
    let api = match has_api {
        true => " and the API: /v1/openapi.json describes it",
        false => " (the API is off: see the setting `http_api`)",
    };
    let nothing = Bytes::from(format!(
        "nothing here; there are /livez, /readyz, /metrics{console}{api}. gRPC is on port {port}.\n"
    ));
    Router::new()
        .route("/metrics", get(metrics))
        .route_layer(from_fn_with_state(
            (scrapers, ServerRight::Metrics),
            authenticated,
        ))
        .route("/livez", get(|| async { "live\n" }))
        .route("/readyz", get(ready))
        .fallback(move || async move {
            let kind = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
            (StatusCode::NOT_FOUND, kind, nothing)
        })
        .with_state(Arc::new(HttpRoutes {
            renderer: Renderer::new(Arc::clone(&node)),
            node,
            hosts: Arc::clone(hosts),
        }))
}

/// Lets requests through whose caller has a right to operate the server, and puts the caller beside them.
async fn authenticated(
    State((authority, right)): State<(Authority, ServerRight)>,
    mut request: Request<Body>,
    next: Next,
) -> Response {
    let names = request.extensions().get::<Arc<CertNames>>();
    let trail = Trail::of(request.extensions().get(), request.headers());
    match authority.identify(request.headers(), names, methods::of_http(right), trail) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(refusal) => refused(&refusal),
    }
}

/// The answer to a caller without a credential, or without the right.
pub(crate) fn refused(status: &tonic::Status) -> Response {
    let text = format!("{}\n", status.message());
    match status.code() {
        tonic::Code::Unauthenticated => {
            let scheme = [(header::WWW_AUTHENTICATE, "Bearer")];
            (StatusCode::UNAUTHORIZED, scheme, text).into_response()
        }
        _ => (StatusCode::FORBIDDEN, text).into_response(),
    }
}

async fn ready(State(routes): State<Arc<HttpRoutes>>) -> Response {
    let phase = *routes.node.phase.borrow();
    match phase.not_ready() {
        None => "ready\n".into_response(),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

/// Whether the client names gzip among its encodings, and does not refuse it by a weight of zero.
fn takes_gzip(headers: &HeaderMap) -> bool {
    let lists = headers.get_all(header::ACCEPT_ENCODING).iter();
    let encodings = lists
        .filter_map(|list| list.to_str().ok())
        .flat_map(|list| list.split(','));
    let mut words = encodings.map(|encoding| encoding.split(';').map(str::trim));
    words.any(|mut encoding| {
        let is_gzip = encoding
            .next()
            .is_some_and(|name| name.eq_ignore_ascii_case("gzip"));
        let weight = encoding.find_map(|word| word.strip_prefix("q=")?.parse::<f32>().ok());
        is_gzip && weight != Some(0.0)
    })
}

/// For scrapers, which come by an address, or by the name of a service. A browser always names a
/// host; of HTTP/1.0 no header is required.
async fn metrics(State(routes): State<Arc<HttpRoutes>>, uri: Uri, headers: HeaderMap) -> Response {
    let unnamed = uri.authority().is_none() && !headers.contains_key(header::HOST);
    let known = asked(&uri, &headers).is_some_and(|host| routes.hosts.knows_or_is_one_word(&host));
    if !known && !unnamed {
        return (StatusCode::FORBIDDEN, UNKNOWN).into_response();
    }
    match routes.renderer.render().await {
        Ok(made) => {
            let described = [
                (header::CONTENT_TYPE, prometheus::TEXT_FORMAT),
                (header::VARY, "accept-encoding"),
            ];
            match takes_gzip(&headers) {
                true => {
                    (described, [(header::CONTENT_ENCODING, "gzip")], made.gzip).into_response()
                }
                false => (described, made.text).into_response(),
            }
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings_without_gzip_and_gzip_of_no_weight_get_text() {
        for (list, wanted) in [
            ("gzip", true),
            ("br, GZIP; q=0.2", true),
            ("identity", false),
            ("gzip;q=0.000, br", false),
            ("x-gzip", false),
        ] {
            let headers =
                HeaderMap::from_iter([(header::ACCEPT_ENCODING, HeaderValue::from_static(list))]);
            assert_eq!(takes_gzip(&headers), wanted, "{list}");
        }
        assert!(!takes_gzip(&HeaderMap::new()));
    }
}
