//! One handshake of TLS, on the event loop that serves the connection.
//!
//! A client may stop anywhere, so a handshake holds one of the loop's turns only while it computes.

use std::fmt;
use std::future::{Future as _, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use rustls::server::Acceptor;
use rustls::{CertificateError, HandshakeKind};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;

use super::stream::{ConnStream, CountedSocket};
use super::{CertificateWatch, TlsPort, TlsState};
use crate::audit::AuditLog;
use crate::linger;
use crate::metrics::{HandshakeResult, TlsMetrics};

/// Handshakes that compute before the other tasks of their event loop get a turn. The signature of the server is
/// most of the work, and takes many times as long with RSA as with ECDSA.
const HANDSHAKES_PER_TURN: usize = 8;

/// A record with the fatal alert no_application_protocol (RFC 7301, 3.2).
const NO_APPLICATION_PROTOCOL: [u8; 7] = [21, 3, 3, 0, 2, 2, 120];

/// TLS of one event loop. Clones share its turns.
#[derive(Clone)]
pub(crate) struct TlsAcceptor {
    port: TlsPort,
    state: watch::Receiver<Arc<TlsState>>,
    turns: Arc<Semaphore>,
    metrics: TlsMetrics,
    /// `None`: there is no audit log.
    audit: Option<Arc<AuditLog>>,
}

/// A connection after its handshake.
struct Handshaken {
    stream: TlsStream<CountedSocket>,
    watch: Option<CertificateWatch>,
}

/// The reason why a handshake failed, and the socket if its alert is still on the way.
struct HandshakeFailure {
    why: Why,
    socket: Option<TcpStream>,
}

enum Why {
    /// The client offers no protocol of the port by ALPN.
    NoProtocol,
    /// The certificate of the client is missing or refused.
    ClientCertificate(rustls::Error),
    /// Something else is wrong with the bytes of the client.
    Tls(rustls::Error),
    /// The socket failed, or the client closed it.
    Socket(io::Error),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoProtocol => f.write_str("the client offers no protocol of this port by ALPN"),
            // The words of Wald's own rules.
            Self::ClientCertificate(rustls::Error::InvalidCertificate(
                CertificateError::Other(rule),
            )) => rule.0.fmt(f),
            Self::ClientCertificate(error) | Self::Tls(error) => error.fmt(f),
            Self::Socket(error) => error.fmt(f),
        }
    }
}

impl From<rustls::Error> for Why {
    fn from(error: rustls::Error) -> Self {
        match error {
            rustls::Error::NoApplicationProtocol => Self::NoProtocol,
            rustls::Error::NoCertificatesPresented
            | rustls::Error::InvalidCertificate(_)
            | rustls::Error::InvalidCertRevocationList(_) => Self::ClientCertificate(error),
            other => Self::Tls(other),
        }
    }
}

impl From<io::Error> for Why {
    fn from(error: io::Error) -> Self {
        let inner = error.get_ref();
        match inner.and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(inner) => inner.clone().into(),
            None => Self::Socket(error),
        }
    }
}

impl Why {
    fn result(&self) -> HandshakeResult {
        match self {
            Self::NoProtocol => HandshakeResult::NoProtocol,
            Self::ClientCertificate(_) => HandshakeResult::ClientCertificate,
            Self::Tls(_) | Self::Socket(_) => HandshakeResult::Failed,
        }
    }
}

/// Counts a handshake when it ends, also if its task drops it.
struct Attempt<'a> {
    metrics: &'a TlsMetrics,
    begin: Instant,
    result: HandshakeResult,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        self.metrics.handshake(self.begin.elapsed(), self.result);
    }
}

impl TlsAcceptor {
    pub(super) fn new(
        port: TlsPort,
        state: watch::Receiver<Arc<TlsState>>,
        metrics: TlsMetrics,
        audit: Option<Arc<AuditLog>>,
    ) -> Self {
        Self {
            port,
            state,
            turns: Arc::new(Semaphore::new(HANDSHAKES_PER_TURN)),
            metrics,
            audit,
        }
    }

    /// Makes the handshake. `None` if it fails; the failure is counted and logged, and the audit log has a refused
    /// certificate. The caller bounds the time, and gets
    /// a value for each step of the server: the client waits for the server until it is dropped.
    pub(crate) async fn accept<T>(
        &self,
        socket: TcpStream,
        begin_step: impl Fn() -> T,
    ) -> Option<(ConnStream, Option<CertificateWatch>)> {
        let client = socket.peer_addr().ok();
        let mut attempt = Attempt {
            metrics: &self.metrics,
            begin: Instant::now(),
            result: HandshakeResult::Abandoned,
        };
        let failure = match self.handshake(socket, begin_step).await {
            Ok(Handshaken { stream, watch }) => {
                attempt.result = HandshakeResult::Done;
                return Some((ConnStream::secured(stream), watch));
            }
            Err(failure) => failure,
        };
        attempt.result = failure.why.result();
        drop(attempt);
        log(&failure.why, client);
        if let (Why::ClientCertificate(error), Some(audit)) = (&failure.why, &self.audit) {
            let has_certificate = !matches!(error, rustls::Error::NoCertificatesPresented);
            audit.refused_handshake(client, has_certificate, &failure.why);
        }
        if let Some(socket) = failure.socket {
            // A client that resets its socket has read the alert, or never will.
            let _ = linger::end(&socket).await;
        }
        None
    }

    async fn handshake<T>(
        &self,
        socket: TcpStream,
        begin_step: impl Fn() -> T,
    ) -> Result<Handshaken, HandshakeFailure> {
        let mut hello = LazyConfigAcceptor::new(Acceptor::default(), CountedSocket::new(socket));
        let begun = match (&mut hello).await {
            Ok(begun) => begun,
            Err(error) => {
                return Err(HandshakeFailure {
                    why: error.into(),
                    socket: hello.take_io().map(|counted| counted.socket),
                });
            }
        };
        let offered = begun.client_hello().alpn().map(|mut offered| {
            let own = self.port.protocol();
            offered.any(|protocol| protocol == own)
        });
        // HTTP/1.1 has no need of ALPN, and many of its clients do not send it. HTTP/2 requires it (RFC 9113, 3.2).
        if !offered.unwrap_or(self.port == TlsPort::Http) {
            let socket = begun.io.socket;
            let _ = socket.try_write(&NO_APPLICATION_PROTOCOL);
            return Err(HandshakeFailure {
                why: Why::NoProtocol,
                socket: Some(socket),
            });
        }
        let state = Arc::clone(&self.state.borrow());
        let config = match self.port {
            TlsPort::Grpc => &state.grpc,
            TlsPort::Http => &state.http,
        };
        let mut handshake = begun.into_stream(Arc::clone(config)).into_fallible();
        let stream = loop {
            let begun = begin_step();
            let turn = self.turns.acquire().await;
            // Those that have a turn run in the next round of the event loop, after its other tasks.
            tokio::task::yield_now().await;
            let step = poll_fn(|context| Poll::Ready(Pin::new(&mut handshake).poll(context))).await;
            drop((turn, begun));
            match step {
                Poll::Ready(Ok(stream)) => break stream,
                Poll::Ready(Err((error, counted))) => {
                    return Err(HandshakeFailure {
                        why: error.into(),
                        socket: Some(counted.socket),
                    });
                }
                Poll::Pending => woken().await,
            }
        };
        let watch = self
            .watch(&stream, &state)
            .map_err(|why| HandshakeFailure {
                why: Why::ClientCertificate(why),
                socket: None,
            })?;
        Ok(Handshaken { stream, watch })
    }

    /// Watches the certificate of the client, if it sent one.
    ///
    /// # Errors
    /// If the session is resumed and the certificate is not acceptable any more.
    fn watch(
        &self,
        stream: &TlsStream<CountedSocket>,
        state: &TlsState,
    ) -> Result<Option<CertificateWatch>, rustls::Error> {
        let (_, session) = stream.get_ref();
        let (Some(chain), Some(clients)) = (session.peer_certificates(), &state.clients) else {
            return Ok(None);
        };
        // rustls does not verify the certificate of a resumed session, which may have expired since.
        if session.handshake_kind() == Some(HandshakeKind::Resumed) {
            clients.verify(chain)?;
        }
        Ok(Some(CertificateWatch {
            chain: chain.iter().map(|der| der.clone().into_owned()).collect(),
            generation: state.generation,
            state: self.state.clone(),
        }))
    }
}

/// Resolves when the task is polled again: something woke it.
async fn woken() {
    let mut polled = false;
    poll_fn(|_| match std::mem::replace(&mut polled, true) {
        false => Poll::Pending,
        true => Poll::Ready(()),
    })
    .await;
}

fn log(why: &Why, client: Option<SocketAddr>) {
    let client = client.map(|client| client.to_string());
    match why {
        // Port scans and clients that go away are no news.
        Why::Socket(error) => tracing::debug!(client, %error, "a TLS handshake failed"),
        why => tracing::info!(client, %why, "a TLS handshake failed"),
    }
}
