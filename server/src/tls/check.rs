//! Checks the contents of the files before they come into force.

use std::sync::Arc;
use std::time::SystemTime;

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::NoServerSessionStorage;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{RootCertStore, ServerConfig};
use x509_cert::Certificate;
use x509_cert::der::asn1::UintRef;
use x509_cert::der::{self, Decode as _, Reader as _, SliceReader};
use x509_cert::name::Name;
use x509_cert::spki::{ObjectIdentifier, SubjectPublicKeyInfoOwned};

use super::clients::ClientVerifier;
use super::files::{ClientContents, ServerContents, TlsFiles};
use super::pem::PemKind;
use super::revocation::{RevocationLists, is_version_1};
use super::{TlsPort, TlsState};
use crate::config::ClientAuth;
use crate::reload::Fault;

/// Minimum bits of an RSA key. rustls makes and verifies no signature with a shorter one.
const RSA_BITS: usize = 2048;

/// rsaEncryption (RFC 8017, A.1).
const RSA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");

/// The fault of a key that rustls does not load.
const BAD_KEY: &str = "the key is damaged or of another kind than RSA (2048 to 8192 bits), ECDSA (P-256, P-384, P-521) \
                       and Ed25519; `openssl pkey -noout -text` with -in and the file shows its kind";

/// The server's own files that passed: its chain with its key.
pub(super) struct CheckedServer {
    certified: Arc<SingleCertAndKey>,
    /// Time at which the first certificate of the chain expires.
    pub(super) expires: SystemTime,
    /// A sentence for each certificate that is of no use, with its setting.
    pub(super) warnings: Vec<String>,
}

/// The files about clients that passed.
pub(super) struct CheckedClients {
    /// `None`: no client is asked for a certificate.
    grpc: Option<ClientVerifier>,
    http: Option<ClientVerifier>,
    /// Time at which the first CA certificate expires.
    pub(super) ca_expires: Option<SystemTime>,
    /// Time by which the first revocation list promises a newer one.
    pub(super) crl_expires: Option<SystemTime>,
    /// A sentence for each certificate or list that is of no use, with its setting.
    pub(super) warnings: Vec<String>,
}

/// The roots for clients.
struct Roots {
    store: Arc<RootCertStore>,
    /// All CAs of the file, also those that are left out.
    cas: Vec<CertificateDer<'static>>,
    expires: SystemTime,
    /// A sentence for each that is left out.
    left_out: Vec<String>,
}

impl TlsFiles {
    /// The terms of new handshakes.
    ///
    /// # Errors
    /// If the settings allow no handshake.
    pub(super) fn state(
        &self,
        server: &CheckedServer,
        clients: &CheckedClients,
        generation: u64,
    ) -> Result<TlsState, Fault> {
        let config = |port, verifier: &Option<ClientVerifier>| {
            self.server_config(port, &server.certified, verifier.as_ref())
                .map_err(|error| Fault::new("tls_cert", &self.certificate, error))
        };
        Ok(TlsState {
            grpc: config(TlsPort::Grpc, &clients.grpc)?,
            http: config(TlsPort::Http, &clients.http)?,
            clients: clients.grpc.clone(),
            generation,
        })
    }

    /// Checks that the CA of clients is not empty, and that each revocation list is of use.
    ///
    /// # Errors
    /// With the first fault.
    pub(super) fn check_clients(
        &self,
        contents: &ClientContents,
        now: SystemTime,
    ) -> Result<CheckedClients, Fault> {
        let roots = match &self.client_ca {
            Some(path) => Some(
                roots(&contents.ca, now).map_err(|why| Fault::new("tls_client_ca", path, why))?,
            ),
            None => None,
        };
        let lists = match (&roots, &self.client_crl) {
            (Some(roots), Some(path)) => self
                .revocations(&contents.crl, roots)
                .map_err(|why| Fault::new("tls_client_crl", path, why))?,
            _ => RevocationLists::default(),
        };
        let lists = Arc::new(lists);
        let required = self.client_auth == ClientAuth::Require;
        let left_out = roots.iter().flat_map(|roots| &roots.left_out);
        let mut warnings: Vec<String> = left_out
            .map(|why| format!("tls_client_ca: {why}"))
            .collect();
        let mut crl_expires: Option<SystemTime> = None;
        for facts in &lists.facts {
            let Some(next) = facts.next_update else {
                continue;
            };
            crl_expires = Some(crl_expires.map_or(next, |first| first.min(next)));
            // To refuse all clients of the CA would be worse.
            if next <= now {
                warnings.push(format!(
                    "tls_client_crl: the list of {} is out of date since {}; certificates that were revoked \
                     since then are accepted",
                    facts.issuer,
                    shown(next)
                ));
            }
        }
        Ok(CheckedClients {
            grpc: self.verifier(roots.as_ref(), &lists, required)?,
            http: self.verifier(roots.as_ref(), &lists, false)?,
            ca_expires: roots.as_ref().map(|roots| roots.expires),
            crl_expires,
            warnings,
        })
    }

    /// Checks that the key belongs to the certificate, and that each certificate is valid now and issued by the next one.
    ///
    /// # Errors
    /// With the first fault.
    pub(super) fn check_server(
        &self,
        contents: &ServerContents,
        now: SystemTime,
    ) -> Result<CheckedServer, Fault> {
        let of_certificate = |why: String| Fault::new("tls_cert", &self.certificate, why);
        let of_key = |why: String| Fault::new("tls_key", &self.key, why);
        let chain = certificates(&contents.certificate).map_err(of_certificate)?;
        let (expires, warnings) = check_chain(&chain, now).map_err(of_certificate)?;
        let key = key(&contents.key).map_err(of_key)?;
        // The error of rustls says only that it is none of the three.
        let key = (self.provider.key_provider)
            .load_private_key(key)
            .map_err(|_| of_key(BAD_KEY.to_owned()))?;
        let chain = chain.into_iter().map(|certificate| certificate.der);
        let certified = CertifiedKey::new(chain.collect(), key);
        match certified.keys_match() {
            Ok(()) => Ok(CheckedServer {
                certified: Arc::new(certified.into()),
                expires,
                warnings,
            }),
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
        roots: Option<&Roots>,
        lists: &Arc<RevocationLists>,
        required: bool,
    ) -> Result<Option<ClientVerifier>, Fault> {
        let (Some(roots), Some(ca)) = (roots, &self.client_ca) else {
            return Ok(None);
        };
        let (store, provider) = (Arc::clone(&roots.store), Arc::clone(&self.provider));
        // The lists were parsed before, so a fault is one of the roots.
        let verifier = ClientVerifier::new(store, lists, provider, required)
            .map_err(|error| Fault::new("tls_client_ca", ca, error))?;
        Ok(Some(verifier))
    }

    /// The revocation lists of a PEM file.
    ///
    /// # Errors
    /// With a sentence about the first list that cannot be used.
    fn revocations(&self, pem: &[u8], roots: &Roots) -> Result<RevocationLists, String> {
        let items = PemKind::RevocationList.items::<CertificateRevocationListDer<'static>>(pem)?;
        let lists: Vec<_> = items.into_iter().map(|found| found.item).collect();
        if lists.iter().any(is_version_1) {
            let why = "a revocation list is of version 1, and must be of version 2: openssl ca writes one with \
                       crl_extensions in its configuration";
            return Err(why.to_owned());
        }
        // webpki refuses lists with parts that it does not support, such as a list of changes alone.
        let all = Arc::new(RevocationLists {
            others: lists.clone(),
            ..RevocationLists::default()
        });
        let (store, provider) = (Arc::clone(&roots.store), Arc::clone(&self.provider));
        ClientVerifier::new(store, &all, provider, false)
            .map_err(|error| format!("a revocation list cannot be used: {error}"))?;
        let algorithms = &self.provider.signature_verification_algorithms;
        RevocationLists::new(lists, &roots.cas, algorithms)
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
fn certificates(pem: &[u8]) -> Result<Vec<FileCertificate>, String> {
    let items = PemKind::Certificate.items::<CertificateDer<'static>>(pem)?;
    let read = (1..).zip(items).map(|(number, found)| {
        let facts = Facts::read(number, &found.item).map_err(|error| {
            format!(
                "{} is PEM, and no certificate: {error}; copy the whole file again from its source",
                found.block
            )
        })?;
        Ok(FileCertificate {
            der: found.item,
            facts,
        })
    });
    read.collect()
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
    PemKind::Key.first(pem)
}

/// The roots of a PEM file. Those that have expired or have a short key are left out: a bundle keeps them for a while.
fn roots(pem: &[u8], now: SystemTime) -> Result<Roots, String> {
    let mut store = RootCertStore::empty();
    let mut first: Option<SystemTime> = None;
    let (mut cas, mut left_out) = (Vec::new(), Vec::new());
    for FileCertificate { der, facts } in certificates(pem)? {
        cas.push(der.clone());
        let fault = match facts.short_key() {
            _ if facts.expires <= now => Some(format!("expired at {}", shown(facts.expires))),
            short => short,
        };
        if let Some(fault) = fault {
            left_out.push(format!(
                "{} {fault}; clients with certificates of this CA are refused",
                facts.place
            ));
            continue;
        }
        first = Some(first.map_or(facts.expires, |first| first.min(facts.expires)));
        (store.add(der))
            .map_err(|error| format!("{} is of no use as a CA: {error}", facts.place))?;
    }
    Ok(Roots {
        expires: first.ok_or_else(|| {
            let why = left_out.first().map_or("", String::as_str);
            format!("no CA certificate of the file is of use; replace them: {why}")
        })?,
        left_out,
        cas,
        store: Arc::new(store),
    })
}

/// A certificate of a file.
struct FileCertificate {
    der: CertificateDer<'static>,
    facts: Facts,
}

/// Facts of a certificate.
struct Facts {
    /// Its number in the file, and its subject.
    place: String,
    subject: Name,
    issuer: Name,
    begins: SystemTime,
    expires: SystemTime,
    /// Bits of an RSA key. `None`: the key is of another kind.
    rsa_bits: Option<usize>,
}

impl Facts {
    fn read(number: usize, certificate: &CertificateDer<'_>) -> Result<Self, der::Error> {
        let parsed = Certificate::from_der(certificate)?.tbs_certificate;
        Ok(Self {
            place: format!("certificate {number} of the file ({})", parsed.subject),
            begins: parsed.validity.not_before.to_system_time(),
            expires: parsed.validity.not_after.to_system_time(),
            rsa_bits: rsa_bits(&parsed.subject_public_key_info),
            subject: parsed.subject,
            issuer: parsed.issuer,
        })
    }

    /// The fault of an RSA key that rustls never verifies a signature with.
    fn short_key(&self) -> Option<String> {
        let bits = self.rsa_bits.filter(|bits| *bits < RSA_BITS)?;
        Some(format!(
            "has an RSA key of {bits} bits, and at least {RSA_BITS} are needed"
        ))
    }
}

/// Bits of the modulus of an RSA key. `None`: the key is of another kind, or damaged.
fn rsa_bits(key: &SubjectPublicKeyInfoOwned) -> Option<usize> {
    if key.algorithm.oid != RSA {
        return None;
    }
    let bytes = key.subject_public_key.as_bytes()?;
    let mut reader = SliceReader::new(bytes).ok()?;
    let modulus: UintRef<'_> = reader
        .sequence(|reader| {
            let modulus = reader.decode()?;
            let _exponent: UintRef<'_> = reader.decode()?;
            Ok(modulus)
        })
        .ok()?;
    let bytes = modulus.as_bytes();
    let zeros = bytes.first().map_or(0, |first| first.leading_zeros());
    Some(bytes.len() * 8 - zeros as usize)
}

/// Checks that each certificate is valid now and issued by the next one, and that the first one has a key of use. Returns
/// the time at which the first of them expires, and warnings.
fn check_chain(
    chain: &[FileCertificate],
    now: SystemTime,
) -> Result<(SystemTime, Vec<String>), String> {
    let facts: Vec<&Facts> = chain.iter().map(|certificate| &certificate.facts).collect();
    for facts in &facts {
        let place = &facts.place;
        if facts.expires <= now {
            return Err(format!(
                "{place} expired at {}; renew it",
                shown(facts.expires)
            ));
        }
        if facts.begins > now {
            return Err(format!(
                "{place} is not valid before {}; check the clock of this machine",
                shown(facts.begins)
            ));
        }
    }
    for pair in facts.windows(2) {
        if pair[0].issuer != pair[1].subject {
            return Err(format!(
                "{} was not issued by {}; put the server's own first, then each issuer",
                pair[0].place, pair[1].place
            ));
        }
    }
    let (Some(own), Some(expires)) = (facts.first(), facts.iter().map(|facts| facts.expires).min())
    else {
        return Err("the file holds no certificate".to_owned());
    };
    if let Some(fault) = own.short_key() {
        return Err(format!(
            "{} {fault}; make a longer key or one on the curve P-256, and a certificate for it",
            own.place
        ));
    }
    let issuers = facts.iter().skip(1);
    let warnings = issuers.filter_map(|facts| {
        let fault = facts.short_key()?;
        Some(format!(
            "tls_cert: {} {fault}; clients may refuse the chain: have the server's certificate issued by another CA",
            facts.place
        ))
    });
    Ok((expires, warnings.collect()))
}

/// A time as people write it, in UTC.
fn shown(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time)
        .map_or_else(|_| "an unknown time".to_owned(), |time| time.to_string())
}
