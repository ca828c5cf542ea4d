//! The files of TLS: their settings, and their contents as bytes.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::{SupportedCipherSuite, SupportedProtocolVersion, version};

use crate::config::{ClientAuth, Config, TlsVersion};
use crate::reload::{Fault, Secrecy, digest, read_file};

/// Maximum size of a file with certificates or a key, bytes.
const CERTIFICATE_BYTES: u64 = 512 << 10;
/// Maximum size of the file of CRLs, bytes. A CRL takes about 40 bytes for each revoked certificate.
const CRL_BYTES: u64 = 16 << 20;

static FROM_TLS12: [&SupportedProtocolVersion; 2] = [&version::TLS12, &version::TLS13];
static FROM_TLS13: [&SupportedProtocolVersion; 1] = [&version::TLS13];

/// The settings of TLS.
#[derive(Debug, Clone)]
pub(super) struct TlsFiles {
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
    /// `None`: no client is asked for a certificate.
    pub(super) client_ca: Option<PathBuf>,
    pub(super) client_crl: Option<PathBuf>,
    pub(super) client_auth: ClientAuth,
    pub(super) provider: Arc<CryptoProvider>,
    pub(super) versions: &'static [&'static SupportedProtocolVersion],
}

/// Contents of all files. A fault in one half has no effect on the other one: a certificate of the server that cannot be
/// renewed must not keep a revoked client in.
#[derive(PartialEq, Eq)]
pub(crate) struct Contents {
    pub(super) server: Result<ServerContents, Fault>,
    pub(super) clients: Result<ClientContents, Fault>,
}

/// Contents of the server's own files.
#[derive(PartialEq, Eq)]
pub(super) struct ServerContents {
    pub(super) certificate: Vec<u8>,
    pub(super) key: Vec<u8>,
}

/// Contents of the files that decide about clients. They are empty without a setting.
#[derive(PartialEq, Eq)]
pub(super) struct ClientContents {
    pub(super) ca: Vec<u8>,
    pub(super) crl: Vec<u8>,
}

impl Contents {
    /// The digest of each file that there is. The one of a key gives nothing away: a key has too many bits to guess.
    pub(super) fn digests(&self) -> Vec<(Cow<'static, str>, String)> {
        let server = self
            .server
            .iter()
            .flat_map(|files| [("tls_cert", &files.certificate), ("tls_key", &files.key)]);
        let clients = self
            .clients
            .iter()
            .flat_map(|files| [("tls_client_ca", &files.ca), ("tls_client_crl", &files.crl)]);
        let present = server.chain(clients).filter(|(_, bytes)| !bytes.is_empty());
        present
            .map(|(setting, bytes)| (setting.into(), digest(bytes)))
            .collect()
    }
}

/// The name of a cipher suite at IANA.
fn name(suite: &SupportedCipherSuite) -> String {
    format!("{:?}", suite.suite()).replacen("TLS13_", "TLS_", 1)
}

impl TlsFiles {
    /// The settings; `None` without a certificate. The configuration was checked before.
    pub(super) fn new(config: &Config) -> Option<Self> {
        let path = |text: &str| (!text.is_empty()).then(|| PathBuf::from(text));
        let mut provider = aws_lc_rs::default_provider();
        if !config.tls_cipher_suites.is_empty() {
            let names: Vec<&str> = config.tls_cipher_suites.split(',').map(str::trim).collect();
            (provider.cipher_suites).retain(|suite| names.contains(&name(suite).as_str()));
        }
        Some(Self {
            certificate: path(&config.tls_cert)?,
            key: path(&config.tls_key)?,
            client_ca: path(&config.tls_client_ca),
            client_crl: path(&config.tls_client_crl),
            client_auth: config.tls_client_auth,
            provider: Arc::new(provider),
            versions: match config.tls_min_version {
                TlsVersion::Tls12 => &FROM_TLS12,
                TlsVersion::Tls13 => &FROM_TLS13,
            },
        })
    }

    /// Reads all files.
    pub(super) fn read(&self) -> Contents {
        Contents {
            server: self.read_server(),
            clients: self.read_clients(),
        }
    }

    /// Reads the server's own files.
    ///
    /// # Errors
    /// With the first file that cannot be read, is too large, or is a key that every user can read.
    pub(super) fn read_server(&self) -> Result<ServerContents, Fault> {
        let (path, most) = (&self.certificate, CERTIFICATE_BYTES);
        Ok(ServerContents {
            certificate: read_file("tls_cert", path, most, Secrecy::Public)?,
            key: read_file("tls_key", &self.key, most, Secrecy::Secret)?,
        })
    }

    fn read_clients(&self) -> Result<ClientContents, Fault> {
        let read = |setting, path: &Option<PathBuf>, most| match path {
            Some(path) => read_file(setting, path, most, Secrecy::Public),
            None => Ok(Vec::new()),
        };
        Ok(ClientContents {
            ca: read("tls_client_ca", &self.client_ca, CERTIFICATE_BYTES)?,
            crl: read("tls_client_crl", &self.client_crl, CRL_BYTES)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CIPHER_SUITES;

    #[test]
    fn cipher_suites_of_the_setting_are_all_that_the_library_has() {
        let suites: Vec<_> = aws_lc_rs::DEFAULT_CIPHER_SUITES.iter().collect();
        assert_eq!(
            suites.iter().map(|suite| name(suite)).collect::<Vec<_>>(),
            CIPHER_SUITES
        );
        for suite in suites {
            let is_tls12 = name(suite).starts_with("TLS_ECDHE_");
            assert_eq!(suite.tls13().is_none(), is_tls12, "{suite:?}");
        }
    }
}
