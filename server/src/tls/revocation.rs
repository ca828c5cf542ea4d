//! Checks the signatures of revocation lists when they are loaded. webpki checks them in each handshake, so a list
//! with a wrong signature would refuse every client of its CA.

use std::time::SystemTime;

use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use x509_cert::Certificate;
use x509_cert::crl::CertificateList;
use x509_cert::der::asn1::AnyRef;
use x509_cert::der::{self, Decode as _, Encode, Reader as _, SliceReader, Tag};
use x509_cert::name::Name;

/// Checks the signature of a list with the keys of its issuer among the CAs. A list of another issuer passes: its
/// certificate comes with that of a client.
///
/// # Errors
/// With a sentence, if no key of the issuer made the signature.
pub(super) fn check_signature(
    list: &CertificateRevocationListDer<'_>,
    cas: &[CertificateDer<'_>],
    algorithms: &WebPkiSupportedAlgorithms,
) -> Result<(), String> {
    let (Ok(parsed), Ok(signed)) = (CertificateList::from_der(list), signed_part(list)) else {
        return Ok(());
    };
    let signature = parsed.signature.as_bytes().unwrap_or_default();
    let by = content(&parsed.signature_algorithm).map_err(|error| error.to_string())?;
    let issuer = &parsed.tbs_cert_list.issuer;
    let mut is_known = false;
    for ca in cas {
        let Ok(ca) = Certificate::from_der(ca) else {
            continue;
        };
        if ca.tbs_certificate.subject != *issuer {
            continue;
        }
        is_known = true;
        let key = ca.tbs_certificate.subject_public_key_info;
        let of = content(&key.algorithm).map_err(|error| error.to_string())?;
        let key = key.subject_public_key.as_bytes().unwrap_or_default();
        let is_valid = algorithms.all.iter().any(|algorithm| {
            algorithm.signature_alg_id().as_ref() == by
                && algorithm.public_key_alg_id().as_ref() == of
                && algorithm.verify_signature(key, signed, signature).is_ok()
        });
        if is_valid {
            return Ok(());
        }
    }
    match is_known {
        true => Err(format!(
            "the signature of the revocation list of {issuer} is not valid by its certificate in tls_client_ca"
        )),
        false => Ok(()),
    }
}

/// The issuer of a list, and the time by which it promises a newer one. `None`: it promises none.
pub(super) fn next_update(list: &CertificateRevocationListDer<'_>) -> Option<(Name, SystemTime)> {
    let parsed = CertificateList::from_der(list).ok()?.tbs_cert_list;
    let next = parsed.next_update?.to_system_time();
    Some((parsed.issuer, next))
}

/// Whether a list has the old form, which has no number of a version before its algorithm.
pub(super) fn is_version_1(list: &CertificateRevocationListDer<'_>) -> bool {
    let part = signed_part(list).and_then(AnyRef::from_der);
    part.is_ok_and(|part| part.value().first() == Some(&u8::from(Tag::Sequence)))
}

/// The bytes that the signature is for: the first element of the list.
fn signed_part<'a>(list: &'a CertificateRevocationListDer<'_>) -> der::Result<&'a [u8]> {
    let whole = AnyRef::from_der(list)?;
    SliceReader::new(whole.value())?.tlv_bytes()
}

/// The encoding without the tag and the length of its sequence, as rustls has algorithms.
fn content(value: &impl Encode) -> der::Result<Vec<u8>> {
    let encoded = value.to_der()?;
    Ok(AnyRef::from_der(&encoded)?.value().to_vec())
}
