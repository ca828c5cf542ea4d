//! The files of TLS, and the settings of rustls made from them.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use wald_text::pem::{PemBlock, blocks, is_der};

use super::problem::{TlsFailure, TlsProblem};
use super::{CaSource, TlsOptions};
use crate::small_file::read_small;

/// Maximum size of a file, bytes. The CAs of a system take about 250 KB.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The settings in force, which follow the files.
pub(crate) struct TlsSettings {
    options: TlsOptions,
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
    /// Reads all files.
    ///
    /// # Errors
    /// If a file cannot be used.
    pub(crate) fn new(options: TlsOptions) -> Result<Self, TlsProblem> {
        let contents = options.read()?;
        let config = Arc::new(options.config(&contents)?);
        Ok(Self {
            options,
            loaded: Mutex::new(LoadedFiles { contents, config }),
        })
    }

    /// Name that the certificate of the server at `host` must have.
    ///
    /// # Errors
    /// If a certificate cannot have such a name.
    pub(crate) fn name(&self, host: &str) -> Result<ServerName<'static>, TlsProblem> {
        let name = self.options.server_name.as_deref().unwrap_or(host);
        // A URI has the address of IPv6 in brackets, and a certificate has it without them.
        let bare = name
            .strip_prefix('[')
            .and_then(|name| name.strip_suffix(']'));
        ServerName::try_from(bare.unwrap_or(name).to_owned())
            .map_err(|_| fault(format!("{name:?} is not a server name of a certificate")))
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
                for (block, certificate) in certificates(&contents.ca, &place)? {
                    roots.add(certificate).map_err(|_| {
                        fault(format!(
                            "{place}: {block} is PEM, and no certificate of a CA; copy the whole file again from its source"
                        ))
                    })?;
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
                let der =
                    private_key(&contents.key).map_err(|why| fault(format!("{key}: {why}")))?;
                builder
                    .with_client_auth_cert(
                        chain.into_iter().map(|(_, certificate)| certificate).collect(),
                        der,
                    )
                    .map_err(|error| match error {
                        rustls::Error::InconsistentKeys(_) => fault(format!(
                            "{key} is not the key of the certificate {certificate}"
                        )),
                        rustls::Error::InvalidCertificate(error) => fault(format!(
                            "{certificate}: the first block is PEM, and no certificate ({error:?}); copy the whole file \
                             again from its source"
                        )),
                        // The error of rustls says only that it is none of the three.
                        _ => fault(format!(
                            "{key}: the key is damaged or of another kind than RSA (2048 to 8192 bits), ECDSA (P-256, P-384, \
                             P-521) and Ed25519; make such a key, and a certificate for it"
                        )),
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

/// The certificates of a file, each with the block that it was read from.
fn certificates<'a>(
    file: &'a [u8],
    place: &str,
) -> Result<Vec<(PemBlock<'a>, CertificateDer<'static>)>, TlsProblem> {
    let found: Result<Vec<_>, _> = items(file).collect();
    let found = found.map_err(|why| fault(format!("{place}: {why}")))?;
    match found.is_empty() {
        true if is_der(file) => Err(fault(format!(
            "{place}: the file is DER, and must be PEM; convert it: openssl x509 -inform DER -in FILE -out NEW"
        ))),
        true => Err(fault(format!("{place}: no certificate in PEM"))),
        false => Ok(found),
    }
}

/// The first key of a file. The error has nothing of its content.
fn private_key(file: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    let found = items(file).next().transpose()?;
    found
        .map(|(_, key)| key)
        .ok_or_else(|| "no private key in PEM without a password".to_owned())
}

/// The items of one kind, each read when it is asked for. A fault has the place of its block.
fn items<T: PemObject>(file: &[u8]) -> impl Iterator<Item = Result<(PemBlock<'_>, T), String>> {
    blocks(file)
        .into_iter()
        .filter_map(|block| match T::from_pem_slice(block.bytes) {
            Ok(item) => Some(Ok((block, item))),
            Err(pem::Error::NoItemsFound) => None,
            Err(_) => Some(Err(block.fault())),
        })
}

fn read(path: &Path) -> Result<Vec<u8>, TlsProblem> {
    read_small(path, MAX_FILE_BYTES).map_err(fault)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(options: TlsOptions) -> String {
        let made = TlsSettings::new(options);
        made.map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn fault_of_a_file_has_its_block_and_the_remedy() {
        let junk = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
        for (pem, words) in [
            (
                &b"-----BEGIN CERTIFICATE-----\nMIIB\n"[..],
                "(line 1: CERTIFICATE) is cut off",
            ),
            (
                b"\n-----BEGIN CERTIFICATE-----\nM!B\n-----END CERTIFICATE-----\n",
                "damaged: line 3",
            ),
            (
                junk.as_bytes(),
                "(line 1: CERTIFICATE) is PEM, and no certificate of a CA",
            ),
            (
                b"0\x82\x01\x02",
                "is DER, and must be PEM; convert it: openssl x509",
            ),
            (b"", "no certificate in PEM"),
        ] {
            let said = refused(TlsOptions::new().ca_pem(pem));
            assert!(
                said.starts_with("the PEM of the CA: ") && said.contains(words),
                "{said}"
            );
        }
        let path = |name: &str| {
            std::env::temp_dir().join(format!("wald-{}-{name}.pem", std::process::id()))
        };
        let (certificate, key) = (path("certificate"), path("key"));
        std::fs::write(&certificate, junk).unwrap();
        for (text, words) in [
            (
                "-----BEGIN PRIVATE KEY-----\nSE!RET\n-----END PRIVATE KEY-----\n",
                "damaged: line 2",
            ),
            (
                "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
                "RSA (2048 to 8192 bits)",
            ),
            ("", "no private key in PEM without a password"),
        ] {
            std::fs::write(&key, text).unwrap();
            let said = refused(TlsOptions::new().identity_files(&certificate, &key));
            let place = key.display().to_string();
            assert!(said.starts_with(&place) && said.contains(words), "{said}");
            assert!(!said.contains("RET"), "{said}");
        }
        std::fs::remove_file(certificate).unwrap();
        std::fs::remove_file(key).unwrap();
    }
}
