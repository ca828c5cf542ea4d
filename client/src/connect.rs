//! Connections to the server, in plaintext or inside TLS.
//!
//! The first bytes of the server decide some failures: in TLS 1.3 a server refuses a client's certificate after the
//! client's handshake, and a TLS server answers plaintext with an alert or an error of HTTP/1.1. The stream reads both
//! there. From then on it passes bytes through.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::codegen::{BoxFuture, Service, StdError};
use tonic::transport::Uri;

use crate::tls::{TlsProblem, TlsSettings};

/// Minimum time between two connections to a server after a TLS failure, over all calls of a client.
pub(crate) const TLS_PAUSE: Duration = Duration::from_secs(1);

/// First byte of a TLS record with an alert. The first frame of an HTTP/2 server begins with 0.
const ALERT: u8 = 21;

/// Answers in HTTP/1.1 to plaintext on a port with TLS, as Wald, nginx and Go give them.
const WANTS_TLS: [&[u8]; 3] = [b"use https://", b"HTTPS port", b"HTTPS server"];

/// Whether these are the first bytes of a server that speaks TLS, in answer to plaintext.
fn wants_tls(bytes: &[u8]) -> bool {
    let says = |words: &[u8]| bytes.windows(words.len()).any(|window| window == words);
    bytes.first() == Some(&ALERT)
        || (bytes.starts_with(b"HTTP/1.") && WANTS_TLS.into_iter().any(says))
}

/// The last TLS failure with a server; `None` once the server has answered.
#[derive(Debug, Default)]
pub(crate) struct LastTlsProblem(Mutex<Option<(Instant, TlsProblem)>>);

impl LastTlsProblem {
    fn lock(&self) -> MutexGuard<'_, Option<(Instant, TlsProblem)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, problem: &TlsProblem) {
        *self.lock() = Some((Instant::now(), problem.clone()));
    }

    /// The failure of the last second: too recent for another attempt.
    pub(crate) fn recent(&self) -> Option<TlsProblem> {
        let last = self.lock();
        let (at, problem) = last.as_ref()?;
        (at.elapsed() < TLS_PAUSE).then(|| problem.clone())
    }

    pub(crate) fn get(&self) -> Option<TlsProblem> {
        self.lock().as_ref().map(|(_, problem)| problem.clone())
    }

    /// The failure with this text. HTTP/2 passes only the text of an error of the stream on.
    pub(crate) fn with_text(&self, text: &str) -> Option<TlsProblem> {
        self.get().filter(|problem| problem.detail == text)
    }
}

/// Makes the connections of a client to one server.
#[derive(Clone)]
pub(crate) struct ServerConnector {
    http: HttpConnector,
    tls: Option<(Arc<TlsSettings>, ServerName<'static>)>,
    last: Arc<LastTlsProblem>,
}

impl ServerConnector {
    /// `tls`: the settings, and the name that the certificate must have; none = plaintext.
    pub(crate) fn new(
        tls: Option<(Arc<TlsSettings>, ServerName<'static>)>,
        connect_timeout: Duration,
        last: Arc<LastTlsProblem>,
    ) -> Self {
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(connect_timeout));
        Self { http, tls, last }
    }
}

impl Service<Uri> for ServerConnector {
    type Response = TokioIo<ServerStream>;
    type Error = StdError;
    type Future = BoxFuture<Self::Response, StdError>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StdError>> {
        self.http.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        if let Some(problem) = self.last.recent() {
            return Box::pin(async move { Err(problem.into()) });
        }
        let connecting = self.http.call(uri);
        let (tls, last) = (self.tls.clone(), Arc::clone(&self.last));
        Box::pin(async move {
            let socket = connecting.await?.into_inner();
            let transport = match tls {
                None => ServerSocket::Plain(socket),
                Some((tls, name)) => match secured(socket, tls, name).await {
                    Ok(stream) => ServerSocket::Tls(Box::new(stream)),
                    Err(problem) => {
                        last.set(&problem);
                        return Err(problem.into());
                    }
                },
            };
            Ok(TokioIo::new(ServerStream {
                transport,
                answered: false,
                last,
            }))
        })
    }
}

/// Makes the handshake.
async fn secured(
    socket: TcpStream,
    tls: Arc<TlsSettings>,
    name: ServerName<'static>,
) -> Result<TlsStream<TcpStream>, TlsProblem> {
    let config = tokio::task::spawn_blocking(move || tls.current())
        .await
        .map_err(|error| TlsProblem::new(crate::TlsFailure::Settings, error.to_string()))?;
    let stream = TlsConnector::from(config)
        .connect(name.clone(), socket)
        .await
        .map_err(|error| TlsProblem::of_handshake(&error, &name))?;
    match stream.get_ref().1.alpn_protocol() {
        Some(b"h2") => Ok(stream),
        _ => Err(TlsProblem::no_http2()),
    }
}

enum ServerSocket {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// The bytes of a connection.
pub(crate) struct ServerStream {
    transport: ServerSocket,
    /// Whether the server has sent HTTP/2.
    answered: bool,
    last: Arc<LastTlsProblem>,
}

impl ServerStream {
    /// Judges the first bytes of the server.
    fn first(&mut self, read: io::Result<()>, bytes: &[u8]) -> io::Result<()> {
        let problem = match (&self.transport, &read) {
            (ServerSocket::Plain(_), Ok(())) if wants_tls(bytes) => TlsProblem::server_with_tls(),
            (_, Ok(())) => {
                if !bytes.is_empty() {
                    self.answered = true;
                    *self.last.lock() = None;
                }
                return read;
            }
            (ServerSocket::Tls(_), Err(error)) => match TlsProblem::after_handshake(error) {
                Some(problem) => problem,
                None => return read,
            },
            (ServerSocket::Plain(_), Err(_)) => return read,
        };
        self.last.set(&problem);
        Err(io::Error::other(problem))
    }

    /// The reason of a failed write. A server that refuses a connection may close it before the client has written
    /// all, and its answer is then still to be read.
    fn write_failed(&mut self, cx: &mut Context<'_>, error: io::Error) -> io::Error {
        let mut bytes = [0; 512];
        let mut buf = ReadBuf::new(&mut bytes);
        let read = match &mut self.transport {
            _ if self.answered => return error,
            ServerSocket::Plain(socket) => Pin::new(socket).poll_read(cx, &mut buf),
            ServerSocket::Tls(stream) => Pin::new(stream).poll_read(cx, &mut buf),
        };
        match read {
            Poll::Ready(read) => match self.first(read, buf.filled()) {
                Err(refusal) if refusal.kind() == io::ErrorKind::Other => refusal,
                _ => error,
            },
            Poll::Pending => error,
        }
    }

    fn written<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        written.map_err(|error| self.write_failed(cx, error))
    }
}

impl AsyncRead for ServerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = ready!(match &mut self.transport {
            ServerSocket::Plain(socket) => Pin::new(socket).poll_read(cx, buf),
            ServerSocket::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        });
        if self.answered {
            return Poll::Ready(read);
        }
        Poll::Ready(self.first(read, buf.filled().get(before..).unwrap_or_default()))
    }
}

impl AsyncWrite for ServerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = match &mut self.transport {
            ServerSocket::Plain(socket) => Pin::new(socket).poll_write(cx, bytes),
            ServerSocket::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        };
        self.written(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = match &mut self.transport {
            ServerSocket::Plain(socket) => Pin::new(socket).poll_write_vectored(cx, parts),
            ServerSocket::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
        };
        self.written(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.transport {
            ServerSocket::Plain(socket) => socket.is_write_vectored(),
            ServerSocket::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let written = match &mut self.transport {
            ServerSocket::Plain(socket) => Pin::new(socket).poll_flush(cx),
            ServerSocket::Tls(stream) => Pin::new(stream).poll_flush(cx),
        };
        self.written(cx, written)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.transport {
            ServerSocket::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            ServerSocket::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
