//! Layout of backups in a directory: `walctl backup` writes them, `wald verify` and `wald
//! restore` read them.
//!
//! ```text
//! DIR/LOCK                        locked by whoever writes here
//! DIR/backups/<id>.manifest       one for each backup; a backup is there when this is
//! DIR/files/<32 hex>              content, by its digest; shared by all backups
//! ```
//!
//! A manifest file is the magic `WALDBKP\0`, a version (u32, little endian), a
//! `wald.v1.BackupManifest`, and the XXH3-128 of all before (16 bytes, big endian).

use std::collections::HashSet;

use prost::Message;
use xxhash_rust::xxh3::xxh3_128;

use crate::v1::BackupManifest;

/// The directory of manifests.
pub const MANIFESTS: &str = "backups";
/// The directory of content.
pub const FILES: &str = "files";
/// Ending of a manifest's name.
pub const MANIFEST_SUFFIX: &str = ".manifest";
/// Names that a store's data directory has and a directory of backups does not.
pub const OF_A_STORE: [&str; 2] = ["FORMAT", "journal"];
/// Bytes of a digest.
pub const DIGEST_BYTES: usize = 16;
/// Maximum bytes of a manifest file: some ten million files.
pub const LARGEST_MANIFEST: u64 = 1 << 30;

const MAGIC: &[u8; 8] = b"WALDBKP\0";
const VERSION: u32 = 1;
const HEAD: usize = MAGIC.len() + 4;

/// The reason why a manifest cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BadManifest {
    /// The content differs from the content that was written.
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

/// Reads the bytes of a manifest file. Names in it are checked, because anyone may have written
/// it.
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

/// Recovery epochs are below this.
pub const EPOCHS: u64 = 1 << 23;
/// Positions are below this.
pub const POSITIONS: u64 = 1 << 62;
/// No file of a store is larger, bytes.
pub const LARGEST_FILE: u64 = 1 << 40;

/// Checks the fields of a manifest before anything uses them. Rejects numbers that no store
/// reaches, and file names that no store has.
///
/// # Errors
/// Names the field or the file, and the bound.
pub fn check(manifest: &BackupManifest) -> Result<(), String> {
    let beyond = |what: &str, number: u64, end: u64| match number < end {
        true => Ok(()),
        false => Err(format!("{what} {number} is above {}", end - 1)),
    };
    beyond("recovery epoch", manifest.recovery_epoch, EPOCHS)?;
    beyond("position", manifest.position.unwrap_or(0), POSITIONS)?;
    let mut digests = HashSet::new();
    for file in &manifest.files {
        let refused = |what: &str| Err(format!("the file {:?} {what}", file.path));
        if !is_path(&file.path) {
            return refused("is none that a store has");
        }
        if file.digest.len() != DIGEST_BYTES {
            return refused("has no digest of 16 bytes");
        }
        if file.file_bytes > LARGEST_FILE {
            return refused(&format!("of {} bytes is too large", file.file_bytes));
        }
        // Each has an id or a name of its own in it.
        if !digests.insert(file.digest.as_ref()) {
            return refused("has the same content as another");
        }
    }
    Ok(())
}

/// Whether a path is written as a store writes it.
fn is_path(path: &str) -> bool {
    let Some((directory, name)) = path.split_once('/') else {
        return path == "FORMAT";
    };
    let suffix = match directory {
        "journal" | "sorted" => ".seg",
        "index" => ".idx",
        "checkpoint" => ".ckp",
        _ => return false,
    };
    let lower = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    name.strip_suffix(suffix)
        .is_some_and(|digits| digits.len() == 16 && digits.bytes().all(lower))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_up_manifests_are_refused_with_what_is_wrong() {
        let file = |path: &str, digest: u8| crate::v1::BackupFile {
            path: path.to_owned(),
            file_bytes: 8192,
            digest: vec![digest; DIGEST_BYTES].into(),
            known: false,
        };
        let good = BackupManifest {
            recovery_epoch: 3,
            position: Some(1 << 40),
            files: vec![
                file("FORMAT", 1),
                file("journal/0000000000000001.seg", 2),
                file("sorted/0000000000000002.seg", 3),
                file("index/0000000000000001.idx", 4),
                file("checkpoint/0000000000000001.ckp", 5),
            ],
            ..BackupManifest::default()
        };
        assert_eq!(check(&good), Ok(()));
        for path in [
            "../../evil",
            "/etc/evil",
            "",
            "LOCK",
            "journal/../../evil",
            "journal/0000000000000001.seg/..",
            "index/..",
            "journal/000000000000000A.seg",
            "journal/+00000000000001.seg",
            "sorted/0000000000000001.seg\0",
            "journal/0000000000000001.idx",
        ] {
            let mut bad = good.clone();
            bad.files[1].path = path.to_owned();
            let refused = check(&bad).unwrap_err();
            assert!(refused.contains(&format!("{path:?}")), "{refused}");
        }
        let refused = |edit: &dyn Fn(&mut BackupManifest)| {
            let mut bad = good.clone();
            edit(&mut bad);
            check(&bad).unwrap_err()
        };
        let epoch = refused(&|m| m.recovery_epoch = u64::MAX);
        assert_eq!(
            epoch,
            "recovery epoch 18446744073709551615 is above 8388607"
        );
        assert!(
            refused(&|m| m.position = Some(1 << 63)).starts_with("position 9223372036854775808")
        );
        assert!(refused(&|m| m.files[2].file_bytes = 1 << 63).contains("sorted/"));
        assert!(refused(&|m| m.files[2].digest = vec![1; 15].into()).contains("digest"));
        let same = refused(&|m| m.files[3].digest = m.files[2].digest.clone());
        assert!(same.contains("index/0000000000000001.idx"), "{same}");
    }

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
