//! TLS of both ports: its files, its handshakes, and the certificates of clients.
//!
//! ```text
//! files ──every 10 s, SIGHUP──▶ thread wald-reload: changed? ─▶ checked ─▶ TlsState in force
//!                                                       │ a fault: the earlier files stay,
//!                                                       ▼ a log line and a metric
//! connection: ClientHello ─▶ a turn (8 at a time on an event loop) ─▶ handshake with the state in force
//!             open, with a client certificate: verified again with each new CA and CRL, and when it expires
//! ```
//!
//! | file | purpose |
//! |---|---|
//! | `files.rs` | reads the files |
//! | `check.rs` | checks their contents before they come into force |
//! | `clients.rs` | verifies the certificate of a client |
//! | `handshake.rs` | one handshake |
//! | `pem.rs` | items of PEM files, and faults with their place |
//! | `peer.rs`, `roots.rs` | connections to other nodes, and CAs of other servers |
//! | `reload.rs` | puts changed files in force |
//! | `revocation.rs` | revocation lists |
//! | `stream.rs` | the bytes of a connection, in plaintext or inside TLS |

mod check;
mod clients;
mod files;
mod handshake;
#[cfg(feature = "object")]
mod peer;
mod pem;
mod reload;
mod revocation;
mod roots;
mod stream;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;
use x509_cert::Certificate;
use x509_cert::der::Decode as _;

use crate::auth::CertNames;
use clients::ClientVerifier;
pub(crate) use handshake::TlsAcceptor;
#[cfg(feature = "object")]
pub(crate) use peer::PeerTls;
pub(crate) use pem::{PemItem, PemKind};
pub(crate) use reload::{TlsSource, start};
pub(crate) use roots::{roots_of, system_roots};
pub(crate) use stream::ConnStream;

/// First byte of a connection that begins with a handshake of TLS.
pub(crate) const HANDSHAKE_RECORD: u8 = 22;

/// Maximum memory of TLS for one connection, bytes: its keys, a record that arrives, its data until HTTP reads them,
/// and [`stream::UNSENT_BYTES`].
pub(crate) const CONNECTION_BYTES: u64 = 112 << 10;

/// Time that a connection has to end after the certificate of its client has expired, or a new CA or CRL refused it. With
/// the second read of the files and the verification of all open connections it is below 1 second.
pub(crate) const REFUSED_GRACE: Duration = Duration::from_millis(700);

/// Longest wait before the expiry of a client certificate is looked at again: the system's clock can jump.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// Terms of new handshakes, made of the files that passed the last check.
pub(crate) struct TlsState {
    grpc: Arc<ServerConfig>,
    http: Arc<ServerConfig>,
    /// `None`: no client is asked for a certificate.
    clients: Option<ClientVerifier>,
    /// Rises with each new CA or CRL.
    generation: u64,
}

/// The port that a handshake is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TlsPort {
    /// gRPC over HTTP/2.
    Grpc,
    /// Probes, metrics and the console over HTTP/1.1. It never requires a client certificate, because a kubelet
    /// sends none.
    Http,
}

impl TlsPort {
    /// The one protocol that the port offers by ALPN.
    fn protocol(self) -> &'static [u8] {
        match self {
            Self::Grpc => b"h2",
            Self::Http => b"http/1.1",
        }
    }
}

/// Watches whether the certificate of an open connection stays acceptable.
pub(crate) struct CertificateWatch {
    /// The certificate and its issuers, as the client sent them.
    chain: Vec<CertificateDer<'static>>,
    generation: u64,
    state: watch::Receiver<Arc<TlsState>>,
}

impl CertificateWatch {
    /// The names in the certificate.
    pub(crate) fn names(&self) -> CertNames {
        self.chain.first().map(CertNames::of).unwrap_or_default()
    }

    /// Resolves when the certificate is no longer accepted, with the reason: it has expired, or a new CA or CRL refuses it.
    pub(crate) async fn refused(mut self) -> rustls::Error {
        let mut expiry = self.next_expiry();
        loop {
            let state = Arc::clone(&self.state.borrow_and_update());
            let has_expired = expiry.is_some_and(|at| at <= SystemTime::now());
            if state.generation != self.generation || has_expired {
                self.generation = state.generation;
                if let Some(clients) = &state.clients
                    && let Err(error) = clients.verify(&self.chain)
                {
                    return error;
                }
                // The client may have sent a certificate that nobody needs.
                expiry = self.next_expiry();
            }
            let left = expiry.map_or(LOOK_AGAIN, |at| {
                let left = at.duration_since(SystemTime::now());
                left.unwrap_or_default().min(LOOK_AGAIN)
            });
            // The sender goes only when the process ends.
            if let Ok(Err(_)) = tokio::time::timeout(left, self.state.changed()).await {
                std::future::pending::<()>().await;
            }
        }
    }

    /// The first moment from now on at which a certificate of the chain is no longer valid.
    fn next_expiry(&self) -> Option<SystemTime> {
        let now = SystemTime::now();
        let expires = self.chain.iter().filter_map(|der| {
            let parsed = Certificate::from_der(der).ok()?;
            let last = parsed.tbs_certificate.validity.not_after.to_system_time();
            // It is valid for all of its last second.
            Some(last + Duration::from_secs(1)).filter(|at| *at > now)
        });
        expires.min()
    }
}
