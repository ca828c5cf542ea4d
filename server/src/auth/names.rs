//! The names in the certificate of a client.

use std::fmt;

use rustls::pki_types::CertificateDer;
use x509_cert::Certificate;
use x509_cert::der::Decode as _;
use x509_cert::ext::pkix::SubjectAltName;
use x509_cert::ext::pkix::name::GeneralName;

/// The subjectAltNames of a certificate that a principal can have: URIs first, then DNS names. The common name
/// identifies nobody.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct CertNames(Vec<String>);

/// Beginning of a DNS name in `auth_file`.
pub(super) const DNS: &str = "dns:";

impl CertNames {
    /// The names of a certificate that a handshake has verified.
    pub(crate) fn of(certificate: &CertificateDer<'_>) -> Self {
        let parsed = Certificate::from_der(certificate).ok();
        let names = parsed.and_then(|parsed| {
            let names = parsed.tbs_certificate.get::<SubjectAltName>().ok()??;
            Some(names.1.0)
        });
        let (mut uris, mut dns) = (Vec::new(), Vec::new());
        for name in names.unwrap_or_default() {
            match name {
                // No URI stands for a DNS name: a CA may limit its DNS names alone.
                GeneralName::UniformResourceIdentifier(uri) if uri.as_str().starts_with(DNS) => {}
                GeneralName::UniformResourceIdentifier(uri) => uris.push(uri.as_str().to_owned()),
                GeneralName::DnsName(name) => {
                    dns.push(format!("{DNS}{}", name.as_str().to_ascii_lowercase()));
                }
                _ => {}
            }
        }
        uris.append(&mut dns);
        Self(uris)
    }

    /// The names as `auth_file` spells them.
    pub(super) fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

impl fmt::Display for CertNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_slice() {
            [] => f.write_str("the client certificate has no URI and no DNS name"),
            names => write!(
                f,
                "the client certificate has the names {}",
                names.join(", ")
            ),
        }
    }
}
