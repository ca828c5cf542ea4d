//! Keys and values of the tail's rows. Numbers are big-endian, so that rows sort by segment and position.
//!
//! ```text
//! 01 segment(8) position(8)  ─▶ bytes of the journal
//! 02 0(8)                    ─▶ position(8) name          the newest manifest
//! ```

use bytes::Bytes;
use slatedb::prefix_extractor::{PrefixExtractor, PrefixTarget};

const PART: u8 = 1;
const MANIFEST: u8 = 2;
/// Bytes of a key that choose its segment in the database.
const PREFIX: usize = 9;
const PART_KEY: usize = 17;

/// Maximum bytes of one row.
pub const LARGEST_PART: usize = 8 << 20;
/// Maximum bytes of the name of a manifest.
pub const LONGEST_MANIFEST_NAME: usize = 100;

/// Consecutive bytes of one segment of the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TailPart {
    /// Number of the segment.
    pub segment: u64,
    /// Position of the first byte in the journal.
    pub position: u64,
    /// The bytes, at least 1 and at most [`LARGEST_PART`].
    pub bytes: Bytes,
}

/// The newest manifest that counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TailManifest {
    /// Name below the directory of manifests, at most [`LONGEST_MANIFEST_NAME`] bytes.
    pub name: String,
    /// Files hold the journal below this position.
    pub position: u64,
}

/// First key of the parts.
pub(super) const FIRST_PART: &[u8] = &[PART];
/// First key behind the parts.
pub(super) const BEHIND_PARTS: &[u8] = &[MANIFEST];

/// The prefix of the rows of a segment.
pub(super) fn prefix(segment: u64) -> [u8; PREFIX] {
    let mut prefix = [PART; PREFIX];
    prefix[1..].copy_from_slice(&segment.to_be_bytes());
    prefix
}

/// The segment whose rows have this prefix; `None` if it is not a prefix of parts.
pub(super) fn segment_of(prefix: &[u8]) -> Option<u64> {
    let (&PART, rest) = prefix.split_first()? else {
        return None;
    };
    Some(u64::from_be_bytes(rest.try_into().ok()?))
}

pub(super) fn part_key(segment: u64, position: u64) -> Bytes {
    let mut key = prefix(segment).to_vec();
    key.extend_from_slice(&position.to_be_bytes());
    key.into()
}

pub(super) fn read_part(key: &[u8], bytes: Bytes) -> Result<TailPart, String> {
    let refused = || format!("a row has the key {key:02x?} and {} bytes", bytes.len());
    if key.len() != PART_KEY || bytes.is_empty() || bytes.len() > LARGEST_PART {
        return Err(refused());
    }
    let (prefix, position) = key.split_at(PREFIX);
    let segment = segment_of(prefix).ok_or_else(refused)?;
    let position = u64::from_be_bytes(position.try_into().map_err(|_| refused())?);
    Ok(TailPart {
        segment,
        position,
        bytes,
    })
}

pub(super) const MANIFEST_KEY: [u8; PREFIX] = [MANIFEST, 0, 0, 0, 0, 0, 0, 0, 0];

/// The value of the manifest's row; `None` if the name is empty or too long.
pub(super) fn manifest_value(name: &str, position: u64) -> Option<Bytes> {
    if name.is_empty() || name.len() > LONGEST_MANIFEST_NAME {
        return None;
    }
    let mut value = position.to_be_bytes().to_vec();
    value.extend_from_slice(name.as_bytes());
    Some(value.into())
}

pub(super) fn read_manifest(value: &[u8]) -> Result<TailManifest, String> {
    let refused = || format!("the row of the manifest has {} bytes", value.len());
    let (position, name) = value.split_first_chunk().ok_or_else(refused)?;
    if name.is_empty() || name.len() > LONGEST_MANIFEST_NAME {
        return Err(refused());
    }
    Ok(TailManifest {
        name: String::from_utf8(name.to_vec()).map_err(|_| refused())?,
        position: u64::from_be_bytes(*position),
    })
}

/// Rows of one segment of the journal are one segment of the database, so that they leave together. The name is stored
/// when the database is created, and never changes.
#[derive(Debug)]
pub(super) struct FirstNineBytes;

impl PrefixExtractor for FirstNineBytes {
    fn name(&self) -> &str {
        "wald-first-9"
    }

    fn prefix_len(&self, target: &PrefixTarget) -> Option<usize> {
        let (PrefixTarget::Point(key) | PrefixTarget::Prefix(key)) = target;
        (key.len() >= PREFIX).then_some(PREFIX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_sort_by_segment_and_position() {
        let keys = [(0, 0), (0, 256), (1, 7), (256, 1), (u64::MAX, u64::MAX)];
        let keys = keys.map(|(segment, position)| part_key(segment, position));
        assert!(keys.is_sorted());
        assert!(&keys[0][..] > FIRST_PART && &keys[4][..] < BEHIND_PARTS);
        assert!(MANIFEST_KEY[..] > *BEHIND_PARTS);
        let part = read_part(&keys[3], "x".into()).unwrap();
        assert_eq!((part.segment, part.position), (256, 1));
        assert_eq!(segment_of(&prefix(77)), Some(77));
        assert_eq!(segment_of(&MANIFEST_KEY), None);
    }

    #[test]
    fn rows_of_another_form_are_refused() {
        let key = part_key(1, 2);
        assert!(read_part(&key[..16], "x".into()).is_err());
        assert!(read_part(&key, Bytes::new()).is_err());
        assert!(read_part(&key, vec![0; LARGEST_PART + 1].into()).is_err());
        assert!(read_part(&[&MANIFEST_KEY[..], &[0; 8]].concat(), "x".into()).is_err());
        let value = manifest_value("3-17", 99).unwrap();
        let expected = TailManifest {
            name: "3-17".to_owned(),
            position: 99,
        };
        assert_eq!(read_manifest(&value), Ok(expected));
        assert!(read_manifest(&value[..8]).is_err());
        assert!(read_manifest(&[&value[..8], &[0xff]].concat()).is_err());
        assert!(manifest_value(&"x".repeat(101), 1).is_none() && manifest_value("", 1).is_none());
    }
}
