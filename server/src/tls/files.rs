//! The files of TLS: their settings, and their contents as bytes.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
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

/// Contents of all files.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(super) certificate: Vec<u8>,
    pub(super) key: Vec<u8>,
    pub(super) client_ca: Vec<u8>,
    pub(super) client_crl: Vec<u8>,
}

impl Contents {
    /// The digest of each file that there is. The one of a key gives nothing away: a key has too many bits to guess.
    pub(super) fn digests(&self) -> Vec<(Cow<'static, str>, String)> {
        let files = [
            ("tls_cert", &self.certificate),
            ("tls_key", &self.key),
            ("tls_client_ca", &self.client_ca),
            ("tls_client_crl", &self.client_crl),
        ];
        let present = files.into_iter().filter(|(_, bytes)| !bytes.is_empty());
        present
            .map(|(setting, bytes)| (setting.into(), digest(bytes)))
            .collect()
    }

    /// Whether the certificates of clients are verified by the same CA and CRL.
    pub(super) fn verifies_clients_as(&self, other: &Self) -> bool {
        self.client_ca == other.client_ca && self.client_crl == other.client_crl
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
    ///
    /// # Errors
    /// With the first file that cannot be read, is too large, or is a key that every user can read.
    pub(super) fn read(&self) -> Result<Contents, Fault> {
        let public = |setting, path: &Path, most| read_file(setting, path, most, Secrecy::Public);
        let optional = |setting, path: &Option<PathBuf>, most| match path {
            Some(path) => public(setting, path, most),
            None => Ok(Vec::new()),
        };
        Ok(Contents {
            certificate: public("tls_cert", &self.certificate, CERTIFICATE_BYTES)?,
            key: read_file("tls_key", &self.key, CERTIFICATE_BYTES, Secrecy::Secret)?,
            client_ca: optional("tls_client_ca", &self.client_ca, CERTIFICATE_BYTES)?,
            client_crl: optional("tls_client_crl", &self.client_crl, CRL_BYTES)?,
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
