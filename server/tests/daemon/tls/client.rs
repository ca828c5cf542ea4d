//! Clients that speak TLS to a daemon of a test.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint};
use wald_proto::v1::wal_service_client::WalServiceClient;

use crate::support::Daemon;

/// Address of the gRPC port.
pub(crate) fn grpc(daemon: &Daemon) -> String {
    daemon.start["grpc"].as_str().unwrap().to_owned()
}

/// Address of the HTTP port.
pub(crate) fn http(daemon: &Daemon) -> String {
    daemon.start["http"].as_str().unwrap().to_owned()
}

/// Connects and makes the handshake.
pub(crate) async fn connect(
    address: &str,
    config: impl Into<Arc<ClientConfig>>,
) -> io::Result<TlsStream<TcpStream>> {
    let socket = TcpStream::connect(address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(config.into())
        .connect(name, socket)
        .await
}

/// A connection over TLS for tonic.
#[derive(Clone)]
struct Connector {
    address: String,
    config: Arc<ClientConfig>,
}

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self { address, config } = self.clone();
        Box::pin(async move { connect(&address, config).await.map(TokioIo::new) })
    }
}

/// One connection of gRPC.
///
/// # Errors
/// If the handshake fails.
pub(crate) async fn channel(
    address: &str,
    config: ClientConfig,
) -> Result<Channel, tonic::transport::Error> {
    let connector = Connector {
        address: address.to_owned(),
        config: Arc::new(config),
    };
    Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
}

/// The client of `WalService` on a connection of its own.
pub(crate) async fn wal(address: &str, config: ClientConfig) -> WalServiceClient<Channel> {
    WalServiceClient::new(channel(address, config).await.unwrap())
}

/// Begins HTTP/2, and reads the first frame of the server. With it come session tickets, or the alert of a handshake
/// that the server refuses at its end.
///
/// # Errors
/// If the server refuses the connection.
pub(crate) async fn settings(stream: &mut TlsStream<TcpStream>) -> io::Result<()> {
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    stream.write_all(preface).await?;
    let mut frame = [0; 9];
    stream.read_exact(&mut frame).await?;
    Ok(())
}
