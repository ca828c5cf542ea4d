//! Verifies the certificates of clients: the rules of webpki, and three more. A certificate must have a name in its
//! subjectAltName, because the common name identifies no client. If it has key usages, digitalSignature must be
//! among them (RFC 8446, 4.4.2.4). No list of its issuer has its serial number (`revocation.rs`).

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    SignatureScheme,
};
use x509_cert::der::Decode as _;
use x509_cert::ext::pkix::{KeyUsage, SubjectAltName};
use x509_cert::{Certificate, TbsCertificate};

use super::revocation::RevocationLists;

/// The verifier of client certificates. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct ClientVerifier(Arc<dyn ClientCertVerifier>);

/// A certificate that webpki accepts and Wald does not.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("the client certificate cannot be parsed: {0}")]
    Malformed(x509_cert::der::Error),
    #[error("the client certificate has no subjectAltName; the common name identifies no client")]
    NoName,
    #[error("the key usage of the client certificate lacks digitalSignature")]
    NoSignature,
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(refusal))))
    }
}

impl ClientVerifier {
    /// Trusts the roots. The lists cover the certificates of clients, not of their issuers; a certificate whose
    /// issuer has no list passes. `required`: a client without a certificate is refused.
    ///
    /// # Errors
    /// If a root or a list cannot be used.
    pub(super) fn new(
        roots: Arc<RootCertStore>,
        lists: &Arc<RevocationLists>,
        provider: Arc<CryptoProvider>,
        required: bool,
    ) -> Result<Self, VerifierBuilderError> {
        let mut builder = WebPkiClientVerifier::builder_with_provider(roots, provider);
        if !lists.others.is_empty() {
            builder = builder
                .with_crls(lists.others.clone())
                .only_check_end_entity_revocation()
                .allow_unknown_revocation_status();
        }
        if !required {
            builder = builder.allow_unauthenticated();
        }
        Ok(Self(Arc::new(StrictVerifier {
            webpki: builder.build()?,
            lists: Arc::clone(lists),
        })))
    }

    /// The verifier for handshakes.
    pub(super) fn for_handshakes(&self) -> Arc<dyn ClientCertVerifier> {
        Arc::clone(&self.0)
    }

    /// Verifies a chain, the client's certificate first, at the time of the call.
    ///
    /// # Errors
    /// If a handshake with it would fail now.
    pub(super) fn verify(&self, chain: &[CertificateDer<'_>]) -> Result<(), Error> {
        let (leaf, issuers) = (chain.split_first()).ok_or(Error::NoCertificatesPresented)?;
        let verified = (self.0).verify_client_cert(leaf, issuers, UnixTime::now());
        verified.map(|_| ())
    }
}

/// webpki's verifier with the rules of the module.
#[derive(Debug)]
struct StrictVerifier {
    webpki: Arc<dyn ClientCertVerifier>,
    lists: Arc<RevocationLists>,
}

fn check(leaf: &TbsCertificate) -> Result<(), Refusal> {
    let names = leaf.get::<SubjectAltName>().map_err(Refusal::Malformed)?;
    if names.is_none_or(|(_, names)| names.0.is_empty()) {
        return Err(Refusal::NoName);
    }
    let usage = leaf.get::<KeyUsage>().map_err(Refusal::Malformed)?;
    if usage.is_some_and(|(_, usage)| !usage.digital_signature()) {
        return Err(Refusal::NoSignature);
    }
    Ok(())
}

impl ClientCertVerifier for StrictVerifier {
    fn offer_client_auth(&self) -> bool {
        self.webpki.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.webpki.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.webpki.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.webpki.verify_client_cert(leaf, issuers, now)?;
        let leaf = Certificate::from_der(leaf).map_err(Refusal::Malformed)?;
        if self.lists.revoked.has(&leaf.tbs_certificate) {
            return Err(Error::InvalidCertificate(CertificateError::Revoked));
        }
        check(&leaf.tbs_certificate)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        (self.webpki).verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        (self.webpki).verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.webpki.supported_verify_schemes()
    }
}
