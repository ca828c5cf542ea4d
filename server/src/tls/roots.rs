//! CAs that verify other servers.

use std::path::Path;

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;

use super::{PemItem, PemKind};
use crate::reload::{Fault, Secrecy, read_file};

/// Maximum size of a file of CA certificates, bytes.
const CA_BYTES: u64 = 512 << 10;

/// The CAs of the file that a setting names.
///
/// # Errors
/// If the file cannot be read or holds no CA.
pub(crate) fn roots_of(setting: &'static str, path: &Path) -> Result<RootCertStore, Fault> {
    let fault = |why: String| Fault::new(setting, path, why);
    let pem = read_file(setting, path, CA_BYTES, Secrecy::Public)?;
    let mut roots = RootCertStore::empty();
    let items = PemKind::Certificate.items::<CertificateDer<'static>>(&pem);
    for PemItem { block, item } in items.map_err(fault)? {
        (roots.add(item))
            .map_err(|error| fault(format!("{block} is of no use as a CA: {error}")))?;
    }
    Ok(roots)
}

/// The CAs of the system: `SSL_CERT_FILE`, `SSL_CERT_DIR`, or the usual places.
///
/// # Errors
/// If the system has none. The sentence names the setting for a file of CAs.
pub(crate) fn system_roots(setting: &str) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    // Systems keep some certificates that no TLS library accepts.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    match roots.is_empty() {
        true => Err(format!(
            "the system has no CA certificates; name a file with {setting}, or set SSL_CERT_FILE"
        )),
        false => Ok(roots),
    }
}
