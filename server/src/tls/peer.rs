//! TLS of connections to other nodes of the store.

use std::path::PathBuf;

use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::files::TlsFiles;
use super::{PemKind, TlsPort, roots_of, system_roots};
use crate::config::Config;

/// The files with which this node connects to others: its own certificate, and the CAs of theirs.
pub(crate) struct PeerTls {
    files: TlsFiles,
    /// `None`: the CAs of the system.
    ca: Option<PathBuf>,
}

impl PeerTls {
    /// The settings; `None` without TLS.
    pub(crate) fn new(config: &Config) -> Option<Self> {
        let files = TlsFiles::new(config)?;
        let ca = (!config.peer_ca.is_empty()).then(|| PathBuf::from(&config.peer_ca));
        Some(Self { files, ca })
    }

    /// Terms of one connection, of the files as they are now. Reading them may block.
    ///
    /// # Errors
    /// A sentence with the file that cannot be used.
    pub(crate) fn terms(&self) -> Result<ClientConfig, String> {
        let roots = match &self.ca {
            Some(path) => roots_of("peer_ca", path).map_err(|fault| fault.to_string())?,
            None => system_roots("peer_ca")?,
        };
        let contents = self.files.read_server();
        let contents = contents.map_err(|fault| fault.to_string())?;
        let chain = PemKind::Certificate.items::<CertificateDer<'static>>(&contents.certificate)?;
        let chain = chain.into_iter().map(|found| found.item).collect();
        let key: PrivateKeyDer<'static> = PemKind::Key.first(&contents.key)?;
        let mut terms = ClientConfig::builder_with_provider(self.files.provider.clone())
            .with_protocol_versions(self.files.versions)
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(|error| format!("tls_cert and tls_key: {error}"))?;
        terms.alpn_protocols = vec![TlsPort::Grpc.protocol().to_vec()];
        Ok(terms)
    }
}
