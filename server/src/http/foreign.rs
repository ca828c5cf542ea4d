//! Answers to peers that speak another protocol than HTTP/1: each names the right port.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::sync::Notify;
use tokio::time::timeout;
use tracing::instrument::WithSubscriber as _;
use tracing::subscriber::NoSubscriber;

use super::conn::HttpConn;
use crate::status;

/// Maximum bytes that are read of an HTTP/2 connection: one request head, and the bytes that
/// arrive with it.
const MOST_BYTES: usize = 64 << 10;
/// Longest time from the preface of HTTP/2 to the end of the answer.
const MOST_TIME: Duration = Duration::from_secs(5);
/// Calls on such a connection that are answered before it ends.
const MOST_CALLS: u32 = 8;

/// Answers a handshake of TLS in plaintext: clients report to their users that the server speaks
/// plaintext HTTP. An alert would read like a fault of a certificate.
pub(super) async fn tls(conn: HttpConn, grpc: SocketAddr, has_grpc_tls: bool) {
    let form = if has_grpc_tls {
        "over TLS"
    } else {
        "in plaintext too"
    };
    refuse(
        conn,
        &format!(
            "This port speaks HTTP/1.1 in plaintext, not TLS. gRPC is on port {}, {form}.\n",
            grpc.port()
        ),
    )
    .await;
}

/// Answers a request in plaintext on a port with TLS.
pub(super) async fn plaintext(conn: HttpConn) {
    refuse(
        conn,
        "This port speaks HTTP/1.1 over TLS: use https:// instead of http://.\n",
    )
    .await;
}

async fn refuse(conn: HttpConn, sentence: &str) {
    let answer = format!(
        "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{sentence}",
        sentence.len()
    );
    if let Err(error) = conn.answer(answer.as_bytes()).await {
        tracing::debug!(%error, "a client of another protocol was not answered");
    }
}

/// Answers calls over HTTP/2 with a status that names the port of gRPC. A GOAWAY alone would
/// not do: most clients show no debug data, and connect again.
pub(super) async fn http2(mut conn: HttpConn, grpc: SocketAddr) {
    conn.read_at_most(MOST_BYTES);
    let answered = Notify::new();
    let service = service_fn(|request: Request<Incoming>| {
        answered.notify_one();
        let response = wrong_port(&request, grpc);
        async { Ok::<_, Infallible>(response) }
    });
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(MOST_CALLS)
        .max_header_list_size(16 << 10)
        .initial_stream_window_size(1 << 10)
        .initial_connection_window_size(64 << 10)
        .serve_connection(TokioIo::new(conn), service);
    let mut connection = std::pin::pin!(connection);
    let both = async {
        tokio::select! {
            biased;
            ended = connection.as_mut() => return ended,
            () = answered.notified() => {}
        }
        connection.as_mut().graceful_shutdown();
        connection.await
    }
    // h2 writes a line for each odd frame, and peers can send any number of them.
    .with_subscriber(NoSubscriber::default());
    match timeout(MOST_TIME, both).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "an HTTP/2 client on the HTTP port"),
        Err(_) => tracing::debug!("an HTTP/2 client on the HTTP port did not close in time"),
    }
}

fn wrong_port<B>(request: &Request<B>, grpc: SocketAddr) -> Response<Body> {
    let kind = request.headers().get(header::CONTENT_TYPE);
    if kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc")) {
        return status::wrong_port(grpc.port()).into_http();
    }
    let mut response = Response::new(Body::from(format!(
        "This port speaks HTTP/1.1, not HTTP/2. gRPC is on port {}.\n",
        grpc.port()
    )));
    *response.status_mut() = StatusCode::HTTP_VERSION_NOT_SUPPORTED;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}
