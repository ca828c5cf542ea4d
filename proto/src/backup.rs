//! How backups lie in a directory: `walctl backup` writes them, `wald verify` and
//! `wald restore` read them.
//!
//! ```text
//! DIR/LOCK                        locked by whoever writes here
//! DIR/backups/<id>.manifest       one for each backup; a backup is there when this is
//! DIR/files/<32 hex>              content, by its digest; shared by all backups
//! ```
//!
//! A manifest file is the magic `WALDBKP\0`, a version (u32, little endian), a
//! `wald.v1.BackupManifest`, and the XXH3-128 of all before (16 bytes, big endian).

use prost::Message;
use xxhash_rust::xxh3::xxh3_128;

use crate::v1::BackupManifest;

/// The directory of manifests.
pub const MANIFESTS: &str = "backups";
/// The directory of content.
pub const FILES: &str = "files";
/// What a manifest's name ends in.
pub const MANIFEST_SUFFIX: &str = ".manifest";
/// What a store's data directory has and a directory of backups has not.
pub const OF_A_STORE: [&str; 2] = ["FORMAT", "journal"];
/// Bytes of a digest.
pub const DIGEST_BYTES: usize = 16;
/// No manifest file is larger: some ten million files.
pub const LARGEST_MANIFEST: u64 = 1 << 30;

const MAGIC: &[u8; 8] = b"WALDBKP\0";
const VERSION: u32 = 1;
const HEAD: usize = MAGIC.len() + 4;

/// Why a manifest cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BadManifest {
    /// It is not what was written.
    Damaged,
    /// It is of a version that this one does not know.
    Version(u32),
}

impl std::fmt::Display for BadManifest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Damaged => f.write_str("the manifest is damaged"),
            Self::Version(found) => write!(
                f,
                "the manifest has version {found}; this program reads {VERSION}"
            ),
        }
    }
}

impl std::error::Error for BadManifest {}

/// The bytes of a manifest file.
pub fn encode(manifest: &BackupManifest) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&manifest.encode_to_vec());
    let digest = xxh3_128(&bytes);
    bytes.extend_from_slice(&digest.to_be_bytes());
    bytes
}

/// Reads the bytes of a manifest file. Whoever wrote it is not trusted with what it names.
///
/// # Errors
/// If it is damaged, or of a newer version.
pub fn decode(bytes: &[u8]) -> Result<BackupManifest, BadManifest> {
    let (whole, digest) = bytes
        .len()
        .checked_sub(DIGEST_BYTES)
        .map(|at| bytes.split_at(at))
        .ok_or(BadManifest::Damaged)?;
    if xxh3_128(whole).to_be_bytes() != digest || whole.len() < HEAD || !whole.starts_with(MAGIC) {
        return Err(BadManifest::Damaged);
    }
    let (head, message) = whole.split_at(HEAD);
    let version = head[MAGIC.len()..].try_into().map(u32::from_le_bytes);
    match version {
        Ok(VERSION) => BackupManifest::decode(message).map_err(|_| BadManifest::Damaged),
        Ok(newer) => Err(BadManifest::Version(newer)),
        Err(_) => Err(BadManifest::Damaged),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_reads_back_and_every_flipped_byte_is_seen() {
        let manifest = BackupManifest {
            store_id: "here".to_owned(),
            position: Some(77),
            ..BackupManifest::default()
        };
        let bytes = encode(&manifest);
        assert_eq!(decode(&bytes), Ok(manifest));
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert_eq!(decode(&bad), Err(BadManifest::Damaged), "byte {at}");
            assert_eq!(
                decode(&bytes[..at]),
                Err(BadManifest::Damaged),
                "cut at {at}"
            );
        }
    }

    #[test]
    fn a_newer_version_is_said() {
        let mut bytes = encode(&BackupManifest::default());
        bytes.truncate(bytes.len() - DIGEST_BYTES);
        bytes[8] = 9;
        let digest = xxh3_128(&bytes);
        bytes.extend_from_slice(&digest.to_be_bytes());
        assert_eq!(decode(&bytes), Err(BadManifest::Version(9)));
    }
}
