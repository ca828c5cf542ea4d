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
        let found: Vec<_> = each(file).collect::<Result<_, _>>()?;
        match found.is_empty() {
            true => Err(self.missing(file)),
            false => Ok(found),
        }
    }

    /// The first item. Later blocks are not looked at.
    ///
    /// # Errors
    /// As [`PemKind::items`].
    pub(crate) fn first<T: PemObject>(self, file: &[u8]) -> Result<T, String> {
        let found = each(file).next().transpose()?;
        found
            .map(|found| found.item)
            .ok_or_else(|| self.missing(file))
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

/// The items of one kind, each read when it is asked for. A fault has the place of its block.
fn each<T: PemObject>(file: &[u8]) -> impl Iterator<Item = Result<PemItem<'_, T>, String>> {
    blocks(file)
        .into_iter()
        .filter_map(|block| match T::from_pem_slice(block.bytes) {
            Ok(item) => Some(Ok(PemItem { block, item })),
            Err(pem::Error::NoItemsFound) => None,
            Err(_) => Some(Err(block.fault())),
        })
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::PrivateKeyDer;

    use super::*;

    #[test]
    fn first_item_counts_although_a_later_block_is_damaged() {
        let key = rcgen::KeyPair::generate().unwrap().serialize_pem();
        let file = format!("{key}-----BEGIN PRIVATE KEY-----\n!\n-----END PRIVATE KEY-----\n");
        let file = file.as_bytes();
        let first: PrivateKeyDer<'_> = PemKind::Key.first(file).unwrap();
        let alone = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
        assert_eq!(first.secret_der(), alone.secret_der());
        assert!(PemKind::Key.items::<PrivateKeyDer<'_>>(file).is_err());
    }
}
