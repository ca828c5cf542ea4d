//! The files of TLS, and the settings of rustls made from them.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};

use super::problem::{TlsFailure, TlsProblem};
use super::{CaSource, TlsOptions};
use crate::small_file::read_small;

/// Maximum size of a file, bytes. The CAs of a system take about 250 KB.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The settings in force, which follow the files.
pub(crate) struct TlsSettings {
    options: TlsOptions,
    name: ServerName<'static>,
    loaded: Mutex<LoadedFiles>,
}

#[derive(Clone)]
struct LoadedFiles {
    contents: FileContents,
    config: Arc<ClientConfig>,
}

/// Contents of the files. There is no `Debug`, because one of them is a key.
#[derive(Clone, Default, PartialEq, Eq)]
struct FileContents {
    ca: Vec<u8>,
    certificate: Vec<u8>,
    key: Vec<u8>,
}

fn fault(why: impl Into<String>) -> TlsProblem {
    TlsProblem::new(TlsFailure::Settings, why)
}

impl TlsSettings {
    /// Reads all files. `host` is the host of the endpoint.
    ///
    /// # Errors
    /// If a file or the server's name cannot be used.
    pub(crate) fn new(options: TlsOptions, host: &str) -> Result<Self, TlsProblem> {
        let name = options.server_name.as_deref().unwrap_or(host);
        // A URI has the address of IPv6 in brackets, and a certificate has it without them.
        let bare = name
            .strip_prefix('[')
            .and_then(|name| name.strip_suffix(']'));
        let name = ServerName::try_from(bare.unwrap_or(name).to_owned())
            .map_err(|_| fault(format!("{name:?} is not a server name of a certificate")))?;
        let contents = options.read()?;
        let config = Arc::new(options.config(&contents)?);
        Ok(Self {
            options,
            name,
            loaded: Mutex::new(LoadedFiles { contents, config }),
        })
    }

    /// Name that the server's certificate must have.
    pub(crate) fn name(&self) -> &ServerName<'static> {
        &self.name
    }

    /// The settings of the next connection. Reads the files, and so blocks.
    ///
    /// A certificate and its key are replaced one after the other, so a fault may last for a moment only: the earlier
    /// settings stay in force.
    pub(crate) fn current(&self) -> Arc<ClientConfig> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(contents) = self.options.read()
            && contents != loaded.contents
            && let Ok(config) = self.options.config(&contents)
        {
            *loaded = LoadedFiles {
                contents,
                config: Arc::new(config),
            };
        }
        Arc::clone(&loaded.config)
    }
}

impl TlsOptions {
    fn read(&self) -> Result<FileContents, TlsProblem> {
        let mut contents = FileContents::default();
        match &self.ca {
            None => {}
            Some(CaSource::File(path)) => contents.ca = read(path)?,
            Some(CaSource::Pem(pem)) => contents.ca.clone_from(pem),
        }
        if let Some(identity) = &self.identity {
            contents.certificate = read(&identity.certificate)?;
            contents.key = read(&identity.key)?;
        }
        Ok(contents)
    }

    fn config(&self, contents: &FileContents) -> Result<ClientConfig, TlsProblem> {
        let roots = match &self.ca {
            None => system_roots()?,
            Some(source) => {
                let place = match source {
                    CaSource::File(path) => path.display().to_string(),
                    CaSource::Pem(_) => "the PEM of the CA".to_owned(),
                };
                let mut roots = RootCertStore::empty();
                for certificate in certificates(&contents.ca, &place)? {
                    roots
                        .add(certificate)
                        .map_err(|error| fault(format!("{place}: not a CA: {error}")))?;
                }
                roots
            }
        };
        let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| fault(error.to_string()))?
            .with_root_certificates(roots);
        let mut config = match &self.identity {
            None => builder.with_no_client_auth(),
            Some(identity) => {
                let certificate = identity.certificate.display().to_string();
                let key = identity.key.display();
                let chain = certificates(&contents.certificate, &certificate)?;
                // The error of rustls has no contents of the key.
                let der = PrivateKeyDer::from_pem_slice(&contents.key).map_err(|_| {
                    fault(format!("{key}: no private key in PEM without a password"))
                })?;
                builder
                    .with_client_auth_cert(chain, der)
                    .map_err(|error| match error {
                        rustls::Error::InconsistentKeys(_) => fault(format!(
                            "{key} is not the key of the certificate {certificate}"
                        )),
                        error => fault(format!("{certificate} and {key}: {error}")),
                    })?
            }
        };
        // HTTP/2 over TLS requires it (RFC 9113, 3.2).
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }
}

/// The CAs of the system.
///
/// rustls-native-certs reads them on Linux with one more crate, openssl-probe, and obeys `SSL_CERT_FILE` and
/// `SSL_CERT_DIR`. rustls-platform-verifier does the same on Linux through rustls-native-certs, and needs more crates
/// on other systems.
fn system_roots() -> Result<RootCertStore, TlsProblem> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    // Systems keep some certificates that no TLS library accepts.
    roots.add_parsable_certificates(found.certs);
    match roots.is_empty() {
        true => Err(fault(
            "this system has no CA certificates; name the file with the CA of the server",
        )),
        false => Ok(roots),
    }
}

fn certificates(pem: &[u8], place: &str) -> Result<Vec<CertificateDer<'static>>, TlsProblem> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(found) if found.is_empty() => Err(fault(format!("{place}: no certificate in PEM"))),
        Ok(found) => Ok(found),
        Err(error) => Err(fault(format!("{place}: damaged PEM: {error}"))),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsProblem> {
    read_small(path, MAX_FILE_BYTES).map_err(fault)
}
