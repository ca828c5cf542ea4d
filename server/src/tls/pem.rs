//! Items of PEM files, and faults with their place.

use rustls::pki_types::pem::{self, PemObject};
use wald_text::pem::{PemBlock, blocks, is_der};

/// A kind of items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PemKind {
    Certificate,
    RevocationList,
    Key,
}

/// An item, and the block that it was read from.
pub(crate) struct PemItem<'a, T> {
    pub(crate) block: PemBlock<'a>,
    pub(crate) item: T,
}

impl PemKind {
    /// Its name in sentences, the line that its blocks begin with, and the command of openssl that converts it.
    fn words(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Certificate => ("certificate", "-----BEGIN CERTIFICATE-----", "x509"),
            Self::RevocationList => ("revocation list", "-----BEGIN X509 CRL-----", "crl"),
            Self::Key => ("private key", "-----BEGIN PRIVATE KEY-----", "pkey"),
        }
    }

    /// The items of a file, at least one. Blocks of other kinds are skipped.
    ///
    /// # Errors
    /// A sentence with the place: a block is damaged, or the file has no item.
    pub(crate) fn items<T: PemObject>(self, file: &[u8]) -> Result<Vec<PemItem<'_, T>>, String> {
        let mut found = Vec::new();
        for block in blocks(file) {
            match T::from_pem_slice(block.bytes) {
                Ok(item) => found.push(PemItem { block, item }),
                Err(pem::Error::NoItemsFound) => {}
                Err(_) => return Err(block.fault()),
            }
        }
        match found.is_empty() {
            true => Err(self.missing(file)),
            false => Ok(found),
        }
    }

    fn missing(self, file: &[u8]) -> String {
        let (name, begin, command) = self.words();
        match is_der(file) {
            true => format!(
                "the file is DER, and must be PEM; convert it: openssl {command} -inform DER -in FILE -out NEW"
            ),
            false => format!("the file holds no {name} ({begin})"),
        }
    }
}
