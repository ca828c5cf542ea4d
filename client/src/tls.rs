//! TLS to the server: settings of a client, and failures as one sentence each.
//!
//! ```text
//! TlsOptions ─▶ files (read for each connection) ─▶ rustls ─▶ handshake ─▶ ServerStream
//!                                                                │
//!                                              TlsProblem ─▶ ErrorKind::Tls
//! ```
//!
//! tonic's own TLS reads no files again, and reports an unknown CA, a wrong name and a plaintext server by the same error.

mod files;
mod problem;

use std::fmt;
use std::path::PathBuf;

pub(crate) use files::TlsSettings;
pub use problem::TlsFailure;
pub(crate) use problem::TlsProblem;

/// Settings of TLS for an endpoint that begins with `https://`.
///
/// The server's certificate is always verified. The default trusts the CAs of the system, expects the host of the
/// endpoint in the certificate, and sends no certificate of the client. Files are PEM, at most 1 MiB each. Each new
/// connection reads them again; files with a fault are ignored then, and the earlier ones stay in force.
#[derive(Clone, Default)]
pub struct TlsOptions {
    ca: Option<CaSource>,
    identity: Option<IdentityFiles>,
    server_name: Option<String>,
}

#[derive(Clone)]
enum CaSource {
    File(PathBuf),
    Pem(Vec<u8>),
}

#[derive(Debug, Clone)]
struct IdentityFiles {
    certificate: PathBuf,
    key: PathBuf,
}

impl TlsOptions {
    /// Default settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// File with the CAs to trust instead of the system's.
    pub fn ca_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.ca = Some(CaSource::File(path.into()));
        self
    }

    /// The CAs to trust instead of the system's, in PEM.
    pub fn ca_pem(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.ca = Some(CaSource::Pem(pem.into()));
        self
    }

    /// Files with the certificate of the client, followed by its issuers, and with its key.
    pub fn identity_files(
        mut self,
        certificate: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
    ) -> Self {
        self.identity = Some(IdentityFiles {
            certificate: certificate.into(),
            key: key.into(),
        });
        self
    }

    /// Name or address that the server's certificate must have, instead of the host of the endpoint.
    pub fn server_name(mut self, name: impl Into<String>) -> Self {
        self.server_name = Some(name.into());
        self
    }
}

impl fmt::Debug for TlsOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ca = match &self.ca {
            None => "the system's".to_owned(),
            Some(CaSource::File(path)) => path.display().to_string(),
            Some(CaSource::Pem(pem)) => format!("{} bytes of PEM", pem.len()),
        };
        f.debug_struct("TlsOptions")
            .field("ca", &ca)
            .field("identity", &self.identity)
            .field("server_name", &self.server_name)
            .finish()
    }
}
