//! One HTTP/2 connection, bare, in plaintext or inside TLS.
//!
//! The generated stubs call through it, not through tonic's channel and not through
//! `wald_client::Client`: those find a connection, repeat, bound and time calls, each by a
//! task or a queue more, and client and server share the processor that is measured.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::codegen::http::HeaderValue;
use tonic::codegen::{Service, http};
use wald_client::Dialer;
use wald_proto::echo::echo_service_client::EchoServiceClient;
use wald_proto::v1::wal_service_client::WalServiceClient;

/// Answers are larger where the server's limit on records was raised.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// A connection; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Connection {
    send: SendRequest<Body>,
    origin: http::Uri,
    /// The header `authorization` of each call.
    token: Option<HeaderValue>,
}

impl Connection {
    /// Connects; the runtime of the calling thread serves the connection.
    pub(crate) async fn open(dialer: &Dialer) -> anyhow::Result<Self> {
        let origin = dialer.endpoint().parse()?;
        let socket = dialer.connect().await?;
        let (send, connection) = Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            // The values of the client library.
            .initial_stream_window_size(4 << 20)
            .initial_connection_window_size(16 << 20)
            .handshake(TokioIo::new(socket))
            .await?;
        // Its failure shows in the calls.
        tokio::spawn(async move { connection.await.ok() });
        Ok(Self {
            send,
            origin,
            token: dialer.authorization(),
        })
    }

    pub(crate) fn wal(&self) -> WalServiceClient<Self> {
        WalServiceClient::with_origin(self.clone(), self.origin.clone())
            .max_decoding_message_size(MAX_ANSWER_BYTES)
    }

    pub(crate) fn grpc(&self) -> Grpc<Self> {
        Grpc::with_origin(self.clone(), self.origin.clone())
            .max_decoding_message_size(MAX_ANSWER_BYTES)
    }

    pub(crate) fn echo(&self) -> EchoServiceClient<Self> {
        EchoServiceClient::with_origin(self.clone(), self.origin.clone())
            .max_decoding_message_size(MAX_ANSWER_BYTES)
    }
}

impl Service<http::Request<Body>> for Connection {
    type Response = http::Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.send.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        if let Some(token) = &self.token {
            let headers = request.headers_mut();
            headers.insert(http::header::AUTHORIZATION, token.clone());
        }
        Box::pin(self.send.send_request(request))
    }
}
