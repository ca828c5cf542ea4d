//! One HTTP/2 connection, bare.
//!
//! The generated stubs call through it, not through tonic's channel and not through
//! `wald_client::Client`: those find a connection, repeat, bound and time calls, each by a
//! task or a queue more, and client and server share the processor that is measured.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use anyhow::Context as _;
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::codegen::{Service, http};
use wald_proto::echo::echo_service_client::EchoServiceClient;
use wald_proto::v1::wal_service_client::WalServiceClient;

/// Answers are larger where the server's limit on records was raised.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// A connection; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Connection {
    send: SendRequest<Body>,
    origin: http::Uri,
}

impl Connection {
    /// Connects; the runtime of the calling thread serves the connection.
    pub(crate) async fn open(endpoint: &str) -> anyhow::Result<Self> {
        let authority = endpoint.strip_prefix("http://").unwrap_or(endpoint);
        let authority = authority.trim_end_matches('/');
        let origin = format!("http://{authority}").parse()?;
        let socket = TcpStream::connect(authority)
            .await
            .with_context(|| format!("cannot connect to {endpoint}"))?;
        socket.set_nodelay(true)?;
        let (send, connection) = Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            // The values of the client library.
            .initial_stream_window_size(4 << 20)
            .initial_connection_window_size(16 << 20)
            .handshake(TokioIo::new(socket))
            .await?;
        // Its failure shows in the calls.
        tokio::spawn(async move { connection.await.ok() });
        Ok(Self { send, origin })
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

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.send.send_request(request))
    }
}
