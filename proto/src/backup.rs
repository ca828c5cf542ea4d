//! Layout of backups in a directory: `walctl backup` writes them, `wald verify` and `wald
//! restore` read them.
//!
//! ```text
//! DIR/LOCK                        locked by whoever writes here
//! DIR/backups/<id>.manifest       one for each backup; a backup is there when this is
//! DIR/files/<64 hex>              content, by its BLAKE3 digest; shared by all backups
//! DIR/files/<32 hex>              content of manifests of version 1, by its XXH3-128
//! ```
//!
//! A manifest file of version 2:
//!
//! ```text
//! ┌ signed ───────────────────────────────────────────────────────┐
//! magic WALDBKP\0, version (u32), bytes of the message (u64), message, [public key (32), signature (64)], checksum (16)
//! ```
//!
//! Numbers are little endian. The message is a `wald.v1.BackupManifest`. The key and the signature are of Ed25519, and
//! absent in an unsigned backup. The checksum is the XXH3-128 of all before (big endian): it finds damage, and older programs
//! check it before they refuse the version. Version 1 has no number of bytes and no signature.

use std::collections::HashSet;

use prost::Message;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
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
/// Bytes of a digest of content: BLAKE3.
pub const DIGEST_BYTES: usize = 32;
/// Bytes of a digest of content in a manifest of version 1: XXH3-128.
pub const OLD_DIGEST_BYTES: usize = 16;
/// Maximum bytes of a manifest file: some ten million files.
pub const LARGEST_MANIFEST: u64 = 1 << 30;
/// Maximum number of findings in a manifest.
const MOST_FINDINGS: usize = 1 << 16;
/// Bytes of a public key.
pub const KEY_BYTES: usize = 32;
/// Bytes of a signature.
pub const SIGNATURE_BYTES: usize = 64;

const MAGIC: &[u8; 8] = b"WALDBKP\0";
/// Version of new manifests.
const VERSION: u32 = 2;
/// Version without signatures, whose digests are XXH3-128.
const OLD_VERSION: u32 = 1;
const CHECKSUM: usize = 16;

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
                "the manifest has version {found}; this program reads {OLD_VERSION} and {VERSION}"
            ),
        }
    }
}

impl std::error::Error for BadManifest {}

/// The signature of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestSignature {
    /// The public key of Ed25519 that belongs to the signature.
    pub public_key: [u8; KEY_BYTES],
    /// The signature of the bytes before it.
    pub signature: [u8; SIGNATURE_BYTES],
}

/// A manifest that was read. Nothing of it was verified but its checksum, which anyone can make.
#[derive(Debug, Clone, PartialEq)]
pub struct ManifestFile<'a> {
    /// The files of the backup.
    pub manifest: BackupManifest,
    /// The bytes that a signature covers.
    pub signed: &'a [u8],
    /// `None` = the backup is not signed.
    pub signature: Option<ManifestSignature>,
    version: u32,
}

impl ManifestFile<'_> {
    /// Checks the fields of the manifest before anything uses them. Rejects numbers that no store reaches, file names
    /// that no store has, and digests of another length than its version has.
    ///
    /// # Errors
    /// Names the field or the file, and the bound.
    pub fn check(&self) -> Result<(), String> {
        check(&self.manifest, self.version)
    }
}

/// The bytes of a manifest file up to its signature. A signature covers them.
pub fn encode(manifest: &BackupManifest) -> Vec<u8> {
    begin(&manifest.encode_to_vec())
}

fn begin(message: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(message.len() as u64).to_le_bytes());
    bytes.extend_from_slice(message);
    bytes
}

/// Completes the bytes of a manifest file with its signature, if it has one, and its checksum.
pub fn seal(mut bytes: Vec<u8>, signature: Option<&ManifestSignature>) -> Vec<u8> {
    if let Some(signature) = signature {
        bytes.extend_from_slice(&signature.public_key);
        bytes.extend_from_slice(&signature.signature);
    }
    let checksum = xxh3_128(&bytes);
    bytes.extend_from_slice(&checksum.to_be_bytes());
    bytes
}

/// Reads the bytes of a manifest file. [`ManifestFile::check`] checks its fields, because anyone may have written it.
///
/// # Errors
/// If it is damaged, or of a newer version.
pub fn decode(bytes: &[u8]) -> Result<ManifestFile<'_>, BadManifest> {
    let damaged = BadManifest::Damaged;
    let (whole, checksum) = (bytes.split_last_chunk::<CHECKSUM>()).ok_or(damaged.clone())?;
    if xxh3_128(whole).to_be_bytes() != *checksum || !whole.starts_with(MAGIC) {
        return Err(damaged);
    }
    let (version, rest) = (whole[MAGIC.len()..].split_first_chunk()).ok_or(damaged.clone())?;
    let version = u32::from_le_bytes(*version);
    let message = |bytes: &[u8]| match has_plausible_entries(bytes) {
        true => BackupManifest::decode(bytes).map_err(|_| damaged.clone()),
        false => Err(damaged.clone()),
    };
    match version {
        OLD_VERSION => Ok(ManifestFile {
            manifest: message(rest)?,
            signed: whole,
            signature: None,
            version,
        }),
        VERSION => {
            let (length, rest) = rest.split_first_chunk().ok_or(damaged.clone())?;
            let length = usize::try_from(u64::from_le_bytes(*length));
            let length = length.map_err(|_| damaged.clone())?;
            let (body, block) = rest.split_at_checked(length).ok_or(damaged.clone())?;
            let signature = match block.split_first_chunk() {
                None if block.is_empty() => None,
                Some((public_key, signature)) => Some(ManifestSignature {
                    public_key: *public_key,
                    signature: signature.try_into().map_err(|_| damaged.clone())?,
                }),
                None => return Err(damaged),
            };
            Ok(ManifestFile {
                manifest: message(body)?,
                signed: &whole[..whole.len() - block.len()],
                signature,
                version,
            })
        }
        newer => Err(BadManifest::Version(newer)),
    }
}

/// Whether each file of a manifest has room for its digest, and whether there are few findings: the object of an empty file takes
/// 36 times its two bytes, and a bucket may have any bytes.
fn has_plausible_entries(mut message: &[u8]) -> bool {
    const FILES: u32 = 4;
    const FINDINGS: u32 = 6;
    let mut findings = 0;
    while !message.is_empty() {
        let Ok((number, wire_type)) = decode_key(&mut message) else {
            return false;
        };
        if wire_type != WireType::LengthDelimited {
            if skip_field(wire_type, number, &mut message, DecodeContext::default()).is_err() {
                return false;
            }
            continue;
        }
        let length = decode_varint(&mut message).ok();
        let length = length.and_then(|length| usize::try_from(length).ok());
        let Some((entry, rest)) = length.and_then(|length| message.split_at_checked(length)) else {
            return false;
        };
        findings += usize::from(number == FINDINGS);
        if (number == FILES && entry.len() < OLD_DIGEST_BYTES) || findings > MOST_FINDINGS {
            return false;
        }
        message = rest;
    }
    true
}

/// Recovery epochs are below this.
pub const EPOCHS: u64 = 1 << 23;
/// Positions are below this.
pub const POSITIONS: u64 = 1 << 62;
/// No file of a store is larger, bytes.
pub const LARGEST_FILE: u64 = 1 << 40;

fn check(manifest: &BackupManifest, version: u32) -> Result<(), String> {
    let digest_bytes = match version {
        OLD_VERSION => OLD_DIGEST_BYTES,
        _ => DIGEST_BYTES,
    };
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
        if file.digest.len() != digest_bytes {
            return refused(&format!("has no digest of {digest_bytes} bytes"));
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
        let check = |manifest: &BackupManifest| check(manifest, VERSION);
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
        for length in [0, 16, 31, 33] {
            let short = refused(&|m| m.files[2].digest = vec![1; length].into());
            assert!(short.ends_with("has no digest of 32 bytes"), "{short}");
        }
        let same = refused(&|m| m.files[3].digest = m.files[2].digest.clone());
        assert!(same.contains("index/0000000000000001.idx"), "{same}");
    }

    fn signed() -> (BackupManifest, ManifestSignature, Vec<u8>) {
        let manifest = BackupManifest {
            store_id: "here".to_owned(),
            position: Some(77),
            ..BackupManifest::default()
        };
        let signature = ManifestSignature {
            public_key: [3; KEY_BYTES],
            signature: [4; SIGNATURE_BYTES],
        };
        let bytes = seal(encode(&manifest), Some(&signature));
        (manifest, signature, bytes)
    }

    #[test]
    fn a_manifest_reads_back_and_every_flipped_byte_is_seen() {
        let (manifest, signature, signed) = signed();
        let read = decode(&signed).unwrap();
        assert_eq!(
            (&read.manifest, &read.signature),
            (&manifest, &Some(signature))
        );
        assert_eq!(read.signed, encode(&manifest));
        let unsigned = seal(encode(&manifest), None);
        let read = decode(&unsigned).unwrap();
        assert_eq!((&read.manifest, &read.signature), (&manifest, &None));
        for bytes in [signed, unsigned] {
            for at in 0..bytes.len() {
                let mut bad = bytes.clone();
                bad[at] ^= 1;
                assert_eq!(decode(&bad), Err(BadManifest::Damaged), "byte {at}");
                let cut = decode(&bytes[..at]);
                assert_eq!(cut, Err(BadManifest::Damaged), "cut at {at}");
            }
        }
    }

    /// Bytes with the checksum that belongs to them, as an attacker makes it.
    fn with_checksum(bytes: &[u8]) -> Vec<u8> {
        seal(bytes.to_vec(), None)
    }

    #[test]
    fn a_signature_of_another_length_is_damage_and_not_none() {
        let (manifest, _, signed) = signed();
        let begun = encode(&manifest).len();
        let end = signed.len() - CHECKSUM;
        for length in begun + 1..end {
            let cut = with_checksum(&signed[..length]);
            assert_eq!(decode(&cut), Err(BadManifest::Damaged), "{length}");
        }
        let long = with_checksum(&[&signed[..end], &[0]].concat());
        assert_eq!(decode(&long), Err(BadManifest::Damaged));
        // The number of bytes of the message decides where the signature begins.
        for length in [0, 1, 1 << 40, u64::MAX] {
            let mut bad = signed[..end].to_vec();
            let at = MAGIC.len() + 4;
            bad[at..at + 8].copy_from_slice(&u64::to_le_bytes(length));
            let bad = with_checksum(&bad);
            assert_eq!(decode(&bad), Err(BadManifest::Damaged), "{length}");
        }
    }

    #[test]
    fn many_empty_entries_are_damage_before_they_are_decoded() {
        let (manifest, _, _) = signed();
        let read = |more: Vec<u8>| {
            let mut message = manifest.encode_to_vec();
            message.extend(more);
            let bytes = seal(begin(&message), None);
            decode(&bytes).map(|read| read.manifest.findings.len())
        };
        let [file, finding] = [0x22, 0x32].map(|key| [key, 0]);
        assert_eq!(read(file.to_vec()), Err(BadManifest::Damaged));
        assert_eq!(read(finding.repeat(MOST_FINDINGS)), Ok(MOST_FINDINGS));
        let more = finding.repeat(MOST_FINDINGS + 1);
        assert_eq!(read(more), Err(BadManifest::Damaged));
    }

    #[test]
    fn an_older_manifest_is_read_and_a_newer_version_is_said() {
        let (mut manifest, _, signed) = signed();
        manifest.files = vec![crate::v1::BackupFile {
            path: "FORMAT".to_owned(),
            file_bytes: 70,
            digest: vec![7; OLD_DIGEST_BYTES].into(),
            known: false,
        }];
        let mut old = MAGIC.to_vec();
        old.extend_from_slice(&OLD_VERSION.to_le_bytes());
        old.extend_from_slice(&manifest.encode_to_vec());
        let old = with_checksum(&old);
        let read = decode(&old).unwrap();
        assert_eq!((&read.manifest, &read.signature), (&manifest, &None));
        assert_eq!(read.check(), Ok(()));
        // New digests do not count in an old manifest, and old ones do not in a new one.
        let sealed = seal(encode(&manifest), None);
        let refused = decode(&sealed).unwrap().check().unwrap_err();
        assert!(refused.contains("has no digest of 32 bytes"), "{refused}");
        manifest.files[0].digest = vec![7; DIGEST_BYTES].into();
        let refused = check(&manifest, OLD_VERSION).unwrap_err();
        assert!(refused.contains("has no digest of 16 bytes"), "{refused}");

        let mut newer = signed[..signed.len() - CHECKSUM].to_vec();
        newer[MAGIC.len()] = 9;
        assert_eq!(decode(&with_checksum(&newer)), Err(BadManifest::Version(9)));
    }

    /// The reader of version 1 compares the last 16 bytes first, and then the version.
    #[test]
    fn an_older_program_refuses_a_new_manifest_by_its_version() {
        let (.., signed) = signed();
        let (whole, checksum) = signed.split_last_chunk::<16>().unwrap();
        assert_eq!(xxh3_128(whole).to_be_bytes(), *checksum);
        assert!(whole.starts_with(b"WALDBKP\0") && whole[8..12] != 1_u32.to_le_bytes());
    }
}
