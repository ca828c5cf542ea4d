//! Checks the contents of the files before they come into force.

use std::sync::Arc;
use std::time::SystemTime;

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::NoServerSessionStorage;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{RootCertStore, ServerConfig};
use x509_cert::Certificate;
use x509_cert::der::Decode as _;
use x509_cert::name::Name;

use super::clients::ClientVerifier;
use super::files::{Contents, TlsFiles};
use super::revocation::{check_signature, is_version_1};
use super::{TlsPort, TlsState};
use crate::config::ClientAuth;
use crate::reload::Fault;

/// Contents that passed, ready for handshakes.
pub(super) struct CheckedFiles {
    pub(super) state: TlsState,
    /// Time at which the first certificate of the server's chain expires.
    pub(super) server_expires: SystemTime,
    /// Time at which the first CA certificate for clients expires.
    pub(super) client_ca_expires: Option<SystemTime>,
    /// A sentence for each CA certificate for clients that has expired.
    pub(super) expired: Vec<String>,
}

/// The roots for clients.
struct Roots {
    store: Arc<RootCertStore>,
    expires: SystemTime,
    /// A sentence for each that has expired.
    expired: Vec<String>,
}

impl TlsFiles {
    /// Checks the contents: the key belongs to the certificate, each certificate is valid now and issued by the next
    /// one, and the CA of clients is not empty.
    ///
    /// # Errors
    /// With the first fault.
    pub(super) fn check(
        &self,
        contents: &Contents,
        generation: u64,
        now: SystemTime,
    ) -> Result<CheckedFiles, Fault> {
        let (certified, server_expires) = self.certified(contents, now)?;
        let roots = match &self.client_ca {
            Some(path) => Some(
                roots(&contents.client_ca, now)
                    .map_err(|why| Fault::new("tls_client_ca", path, why))?,
            ),
            None => None,
        };
        let for_grpc = self.verifier(
            contents,
            roots.as_ref(),
            self.client_auth == ClientAuth::Require,
        )?;
        let for_http = self.verifier(contents, roots.as_ref(), false)?;
        let config = |port, clients: Option<&ClientVerifier>| {
            (self.server_config(port, &certified, clients))
                .map_err(|error| Fault::new("tls_cert", &self.certificate, error))
        };
        Ok(CheckedFiles {
            state: TlsState {
                grpc: config(TlsPort::Grpc, for_grpc.as_ref())?,
                http: config(TlsPort::Http, for_http.as_ref())?,
                clients: for_grpc,
                generation,
            },
            server_expires,
            client_ca_expires: roots.as_ref().map(|roots| roots.expires),
            expired: roots.map(|roots| roots.expired).unwrap_or_default(),
        })
    }

    /// The chain of the server with its key, and the time at which its first certificate expires.
    fn certified(
        &self,
        contents: &Contents,
        now: SystemTime,
    ) -> Result<(Arc<SingleCertAndKey>, SystemTime), Fault> {
        let of_certificate = |why: String| Fault::new("tls_cert", &self.certificate, why);
        let of_key = |why: String| Fault::new("tls_key", &self.key, why);
        let chain = certificates(&contents.certificate).map_err(of_certificate)?;
        let expires = check_chain(&chain, now).map_err(of_certificate)?;
        let key = key(&contents.key).map_err(of_key)?;
        let key = (self.provider.key_provider)
            .load_private_key(key)
            .map_err(|error| of_key(format!("the key cannot be used: {error}")))?;
        let certified = CertifiedKey::new(chain, key);
        match certified.keys_match() {
            Ok(()) => Ok((Arc::new(certified.into()), expires)),
            Err(rustls::Error::InconsistentKeys(_)) => Err(of_key(format!(
                "the key does not belong to the first certificate of {}",
                self.certificate.display()
            ))),
            Err(error) => Err(of_certificate(format!(
                "the first certificate cannot be used: {error}"
            ))),
        }
    }

    /// The verifier of client certificates; `None` if clients are not asked for one.
    fn verifier(
        &self,
        contents: &Contents,
        roots: Option<&Roots>,
        required: bool,
    ) -> Result<Option<ClientVerifier>, Fault> {
        let (Some(roots), Some(ca)) = (roots, &self.client_ca) else {
            return Ok(None);
        };
        let fault = |setting, path, why: String| Fault::new(setting, path, why);
        let crls = match &self.client_crl {
            Some(path) => revocations(&contents.client_crl)
                .map_err(|why| fault("tls_client_crl", path, why))?,
            None => Vec::new(),
        };
        let (store, provider) = (Arc::clone(&roots.store), Arc::clone(&self.provider));
        let verifier = ClientVerifier::new(store, crls.clone(), provider, required);
        let Some(path) = &self.client_crl else {
            return verifier
                .map(Some)
                .map_err(|error| fault("tls_client_ca", ca, error.to_string()));
        };
        let of_list = |why| fault("tls_client_crl", path, why);
        if crls.iter().any(is_version_1) {
            let why = "a revocation list is of version 1, and must be of version 2: openssl ca writes one with \
                       crl_extensions in its configuration";
            return Err(of_list(why.to_owned()));
        }
        // Roots were parsed before, so a fault is one of the CRLs.
        let verifier = verifier
            .map_err(|error| of_list(format!("a revocation list cannot be used: {error}")))?;
        let cas =
            certificates(&contents.client_ca).map_err(|why| fault("tls_client_ca", ca, why))?;
        let algorithms = &self.provider.signature_verification_algorithms;
        for list in &crls {
            check_signature(list, &cas, algorithms).map_err(of_list)?;
        }
        Ok(Some(verifier))
    }

    fn server_config(
        &self,
        port: TlsPort,
        certified: &Arc<SingleCertAndKey>,
        clients: Option<&ClientVerifier>,
    ) -> Result<Arc<ServerConfig>, rustls::Error> {
        let builder = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(self.versions)?;
        let builder = match clients {
            Some(clients) => builder.with_client_cert_verifier(clients.for_handshakes()),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(Arc::clone(certified) as _);
        config.alpn_protocols = vec![port.protocol().to_vec()];
        // Tickets resume sessions without state in the server. The ticketer changes its keys every 6 hours. Each
        // configuration has its own, so no ticket passes from one port, or one CA, to another.
        config.ticketer = aws_lc_rs::Ticketer::new()?;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Arc::new(config))
    }
}

/// The certificates of a PEM file, at least one.
fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| format!("the file is not PEM: {error}"))?;
    if found.is_empty() {
        return Err("the file holds no certificate (-----BEGIN CERTIFICATE-----)".to_owned());
    }
    Ok(found)
}

/// The CRLs of a PEM file, at least one.
fn revocations(pem: &[u8]) -> Result<Vec<CertificateRevocationListDer<'static>>, String> {
    let found: Result<Vec<_>, pem::Error> =
        CertificateRevocationListDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| format!("the file is not PEM: {error}"))?;
    if found.is_empty() {
        return Err("the file holds no revocation list (-----BEGIN X509 CRL-----)".to_owned());
    }
    Ok(found)
}

/// The private key of a PEM file.
fn key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    let has = |words: &[u8]| pem.windows(words.len()).any(|window| window == words);
    if has(b"BEGIN ENCRYPTED PRIVATE KEY") || has(b"Proc-Type: 4,ENCRYPTED") {
        return Err(
            "the key is encrypted, and Wald asks for no password; store it decrypted, readable by the daemon's \
             user alone"
                .to_owned(),
        );
    }
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| match error {
        pem::Error::NoItemsFound => {
            "the file holds no private key (-----BEGIN PRIVATE KEY-----)".to_owned()
        }
        error => format!("the file is not PEM: {error}"),
    })
}

/// The roots of a PEM file. Those that have expired are left out: a bundle keeps them for a while.
fn roots(pem: &[u8], now: SystemTime) -> Result<Roots, String> {
    let mut store = RootCertStore::empty();
    let mut first: Option<SystemTime> = None;
    let mut expired = Vec::new();
    for (number, root) in (1..).zip(certificates(pem)?) {
        let facts = facts(&root)?;
        if facts.expires <= now {
            expired.push(format!(
                "certificate {number} of the file ({}) expired at {}; clients with certificates of this CA are refused",
                facts.subject,
                shown(facts.expires)
            ));
            continue;
        }
        first = Some(first.map_or(facts.expires, |first| first.min(facts.expires)));
        (store.add(root)).map_err(|error| format!("a CA certificate cannot be used: {error}"))?;
    }
    Ok(Roots {
        expired,
        expires: first.ok_or("every CA certificate of the file has expired; renew it")?,
        store: Arc::new(store),
    })
}

/// Facts of a certificate.
struct Facts {
    subject: Name,
    issuer: Name,
    begins: SystemTime,
    expires: SystemTime,
}

fn facts(certificate: &CertificateDer<'_>) -> Result<Facts, String> {
    let parsed = Certificate::from_der(certificate)
        .map_err(|error| format!("a certificate cannot be parsed: {error}"))?;
    let parsed = parsed.tbs_certificate;
    Ok(Facts {
        begins: parsed.validity.not_before.to_system_time(),
        expires: parsed.validity.not_after.to_system_time(),
        subject: parsed.subject,
        issuer: parsed.issuer,
    })
}

/// Checks that each certificate is valid now and issued by the next one. Returns the time at which the first of them
/// expires.
fn check_chain(chain: &[CertificateDer<'_>], now: SystemTime) -> Result<SystemTime, String> {
    let facts = chain.iter().map(facts).collect::<Result<Vec<_>, _>>()?;
    for (number, facts) in (1..).zip(&facts) {
        let subject = &facts.subject;
        if facts.expires <= now {
            return Err(format!(
                "certificate {number} of the file ({subject}) expired at {}; renew it",
                shown(facts.expires)
            ));
        }
        if facts.begins > now {
            return Err(format!(
                "certificate {number} of the file ({subject}) is not valid before {}; check the clock of this machine",
                shown(facts.begins)
            ));
        }
    }
    for (number, pair) in (1..).zip(facts.windows(2)) {
        if pair[0].issuer != pair[1].subject {
            return Err(format!(
                "certificate {number} of the file ({}) was not issued by certificate {} ({}); put the server's own \
                 first, then each issuer",
                pair[0].subject,
                number + 1,
                pair[1].subject
            ));
        }
    }
    let expires = facts.iter().map(|facts| facts.expires).min();
    expires.ok_or_else(|| "the file holds no certificate".to_owned())
}

/// A time as people write it, in UTC.
fn shown(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time)
        .map_or_else(|_| "an unknown time".to_owned(), |time| time.to_string())
}
