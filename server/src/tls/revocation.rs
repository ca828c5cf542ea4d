//! Revocation lists. Lists of the CAs in `tls_client_ca` are checked when they are loaded, and their serial numbers are
//! looked up here: webpki would take only the first list of an issuer, and verify its signature for each certificate.
//!
//! The certificate of another issuer comes with that of a client, so webpki verifies its lists.

use std::collections::HashSet;
use std::time::SystemTime;

use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use x509_cert::crl::{CertificateList, TbsCertList};
use x509_cert::der::asn1::AnyRef;
use x509_cert::der::{self, Decode as _, Encode, Reader as _, SliceReader, Tag};
use x509_cert::name::Name;
use x509_cert::spki::ObjectIdentifier;
use x509_cert::{Certificate, TbsCertificate};

/// issuingDistributionPoint (RFC 5280, 5.2.5).
const DISTRIBUTION_POINT: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.5.29.28");

/// The lists of a file.
#[derive(Debug, Default)]
pub(super) struct RevocationLists {
    /// Certificates that lists of the CAs revoke.
    pub(super) revoked: RevokedSerials,
    /// Lists of other issuers.
    pub(super) others: Vec<CertificateRevocationListDer<'static>>,
    /// The facts of all lists. Lists for the same certificates have one entry.
    pub(super) facts: Vec<ListFacts>,
}

/// Facts of a list.
#[derive(Debug)]
pub(super) struct ListFacts {
    pub(super) issuer: Name,
    /// The part of its issuer's certificates that the list is for. `None`: all of them.
    part: Option<Vec<u8>>,
    /// Time by which it promises a newer one.
    pub(super) next_update: Option<SystemTime>,
}

impl ListFacts {
    fn read(list: &TbsCertList) -> Self {
        let mut extensions = list.crl_extensions.iter().flatten();
        let point = extensions.find(|extension| extension.extn_id == DISTRIBUTION_POINT);
        Self {
            issuer: list.issuer.clone(),
            part: point.map(|point| point.extn_value.as_bytes().to_vec()),
            next_update: list.next_update.map(|next| next.to_system_time()),
        }
    }

    /// Whether another list is for certificates of this one.
    fn overlaps(&self, other: &Self) -> bool {
        let has_all = self.part.is_none() || other.part.is_none();
        self.issuer == other.issuer && (has_all || self.part == other.part)
    }
}

/// Serial numbers of revoked certificates, by their issuer. Issuers are few: each has its certificate in `tls_client_ca`.
#[derive(Debug, Default)]
pub(super) struct RevokedSerials(Vec<(Name, HashSet<Box<[u8]>>)>);

impl RevokedSerials {
    /// Adds a list to the earlier lists of its issuer. A certificate that one of them has stays revoked.
    fn add(&mut self, list: TbsCertList) {
        let revoked = list.revoked_certificates.into_iter().flatten();
        let serials = revoked.map(|revoked| Box::<[u8]>::from(revoked.serial_number.as_bytes()));
        match (self.0.iter_mut()).find(|(issuer, _)| *issuer == list.issuer) {
            Some((_, known)) => known.extend(serials),
            None => self.0.push((list.issuer, serials.collect())),
        }
    }

    /// Whether a list of the certificate's issuer has its serial number.
    pub(super) fn has(&self, certificate: &TbsCertificate) -> bool {
        let serials = (self.0.iter()).find(|(issuer, _)| *issuer == certificate.issuer);
        serials.is_some_and(|(_, serials)| serials.contains(certificate.serial_number.as_bytes()))
    }
}

impl RevocationLists {
    /// Sorts the lists of a file by their issuers: CAs of the file, and others.
    ///
    /// # Errors
    /// With a sentence, if a list has a wrong signature, or one of two lists would have no effect.
    pub(super) fn new(
        lists: Vec<CertificateRevocationListDer<'static>>,
        cas: &[CertificateDer<'_>],
        algorithms: &WebPkiSupportedAlgorithms,
    ) -> Result<Self, String> {
        let mut sorted = Self::default();
        for der in lists {
            let Ok(list) = CertificateList::from_der(&der) else {
                sorted.others.push(der);
                continue;
            };
            let is_signed = is_signed(&der, &list, cas, algorithms)?;
            let list = list.tbs_cert_list;
            let facts = ListFacts::read(&list);
            if is_signed {
                sorted.revoked.add(list);
            } else if sorted.facts.iter().any(|other| other.overlaps(&facts)) {
                return Err(format!(
                    "two revocation lists of {} are for the same certificates, and only the first would count; keep the \
                     newest, or add the certificate of this CA to tls_client_ca: then both count",
                    facts.issuer
                ));
            } else {
                sorted.others.push(der);
            }
            let mut others = sorted.facts.iter_mut();
            match others.find(|other| other.issuer == facts.issuer && other.part == facts.part) {
                Some(other) => other.next_update = other.next_update.max(facts.next_update),
                None => sorted.facts.push(facts),
            }
        }
        Ok(sorted)
    }
}

/// Whether a CA has signed the list. A list of another issuer is not checked: its certificate comes with that of a client.
///
/// # Errors
/// With a sentence, if no key of the issuer made the signature.
fn is_signed(
    der: &CertificateRevocationListDer<'_>,
    list: &CertificateList,
    cas: &[CertificateDer<'_>],
    algorithms: &WebPkiSupportedAlgorithms,
) -> Result<bool, String> {
    let signed = signed_part(der).map_err(|error| error.to_string())?;
    let signature = list.signature.as_bytes().unwrap_or_default();
    let by = content(&list.signature_algorithm).map_err(|error| error.to_string())?;
    let issuer = &list.tbs_cert_list.issuer;
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
            return Ok(true);
        }
    }
    match is_known {
        true => Err(format!(
            "the signature of the revocation list of {issuer} is not valid by its certificate in tls_client_ca"
        )),
        false => Ok(false),
    }
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
