//! Digests that name the content of backups and replicas.

use std::fmt;

use xxhash_rust::xxh3::Xxh3;

/// Digest of the content of one file of a backup or replica. It also names the content there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContentDigest {
    /// XXH3-128, in manifests of version 1. It finds damage. It finds no forgery, because anyone can make two contents
    /// with one digest.
    Xxh3(u128),
    /// BLAKE3, 256 bits. Nobody can make two contents with one digest.
    Blake3([u8; 32]),
}

impl ContentDigest {
    /// The digest of new content: BLAKE3.
    pub fn of(content: &[u8]) -> Self {
        Self::Blake3(*blake3::hash(content).as_bytes())
    }

    /// Reads the bytes of a digest; `None` unless there are 16 or 32.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let plain = bytes.try_into().map(u128::from_be_bytes).map(Self::Xxh3);
        plain.or_else(|_| bytes.try_into().map(Self::Blake3)).ok()
    }

    /// The bytes of the digest: 16 (big endian) or 32.
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Xxh3(digest) => digest.to_be_bytes().to_vec(),
            Self::Blake3(digest) => digest.to_vec(),
        }
    }

    /// Reads the name of content: 32 or 64 lower-case hexadecimal digits.
    pub fn from_name(name: &str) -> Option<Self> {
        let mut bytes = Vec::with_capacity(name.len() / 2);
        for pair in name.as_bytes().chunks(2) {
            let pair = std::str::from_utf8(pair).ok()?;
            bytes.push(u8::from_str_radix(pair, 16).ok()?);
        }
        // The comparison refuses signs, capitals and an odd number of digits.
        Self::from_bytes(&bytes).filter(|digest| digest.to_string() == name)
    }

    /// Begins a digest of the same kind.
    pub(crate) fn hasher(&self) -> ContentHasher {
        match self {
            Self::Xxh3(_) => ContentHasher::Xxh3(Box::default()),
            Self::Blake3(_) => ContentHasher::new(),
        }
    }
}

impl fmt::Display for ContentDigest {
    /// The name of the content.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Xxh3(digest) => write!(f, "{digest:032x}"),
            Self::Blake3(digest) => digest.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
        }
    }
}

/// Computes a digest of content that comes in pieces.
pub(crate) enum ContentHasher {
    Xxh3(Box<Xxh3>),
    Blake3(Box<blake3::Hasher>),
}

impl ContentHasher {
    /// Begins the digest of new content.
    pub(crate) fn new() -> Self {
        Self::Blake3(Box::default())
    }

    pub(crate) fn update(&mut self, piece: &[u8]) {
        match self {
            Self::Xxh3(hasher) => hasher.update(piece),
            Self::Blake3(hasher) => drop(hasher.update(piece)),
        }
    }

    pub(crate) fn digest(&self) -> ContentDigest {
        match self {
            Self::Xxh3(hasher) => ContentDigest::Xxh3(hasher.digest128()),
            Self::Blake3(hasher) => ContentDigest::Blake3(*hasher.finalize().as_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_the_published_ones_and_read_back_from_bytes_and_names() {
        // Of the README of BLAKE3's reference implementation, and of XXH3 for no bytes.
        let blake3 = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        let xxh3 = "99aa06d3014798d86001c324468d497f";
        for name in [blake3, xxh3] {
            let digest = ContentDigest::from_name(name).unwrap();
            assert_eq!(digest.to_string(), name);
            assert_eq!(digest.hasher().digest(), digest);
            assert_eq!(ContentDigest::from_bytes(&digest.to_bytes()), Some(digest));
            for other in [
                name.to_uppercase(),
                name[1..].to_owned(),
                name[2..].to_owned(),
                format!("+{}", &name[1..]),
                format!("{name}00"),
                format!("ä{}", &name[2..]),
            ] {
                assert_eq!(ContentDigest::from_name(&other), None, "{other}");
            }
        }
        assert_eq!(
            ContentDigest::of(b""),
            ContentDigest::from_name(blake3).unwrap()
        );
        assert_eq!(ContentDigest::from_bytes(&[0; 24]), None);
    }
}
