//! The life block at the beginning of each segment file, and the names of these files.
//!
//! ```text
//! 0          4096        8192
//! +----------+-----------+--------+---------+-- ... --+------+-----------------+
//! | life     | life      | link   | frame   |         | seal | zeros or stale  |
//! | block    | again     | frame  |         |         |      | bytes           |
//! +----------+-----------+--------+---------+-- ... --+------+-----------------+
//! ```
//!
//! The life block is written and flushed when the file enters the pool, so a roll flushes nothing
//! extra. Each copy has its own 4 KiB. One good copy is enough:
//!
//! ```text
//! 0        8         12        16         20         24       32     40     48        64
//! +--------+---------+---------+----------+----------+--------+------+------+---------+-----+
//! | magic  | version | compat  | ro compat| incompat | id     | size | salt | store id| crc |
//! +--------+---------+---------+----------+----------+--------+------+------+---------+-----+
//! ```
//!
//! With the read-only-compatible feature 0, the key of the store's digests follows. It has its own
//! checksum, since versions without the feature read only 68 bytes:
//!
//! ```text
//! 68        100                  104
//! +---------+--------------------+-------+
//! | key     | crc of bytes 0–99  | zeros |
//! +---------+--------------------+-------+
//! ```

use crate::api::error::OpenError;
use crate::base::bounds;
use crate::base::crc::crc32c;
use crate::base::ids::SegmentId;
use crate::base::wire::u32_at;
use crate::base::wire::u64_at;
use crate::base::zeros::are_zeros;
use crate::format::digest::Secret;

pub(crate) const MAGIC: [u8; 8] = *b"WALDSEG\0";

pub(crate) const LIFE_VERSION: u32 = 1;

pub(crate) const COPY_BYTES: usize = 4096;

pub(crate) const LIFE_LEN: usize = 68;

/// Offset at which the key ends and its checksum begins.
pub(crate) const KEY_END: usize = LIFE_LEN + Secret::BYTES;

pub(crate) const KEYED_LEN: usize = KEY_END + 4;

/// Known features that a version must know before it may write the store.
pub(crate) const KNOWN_READ_ONLY: u32 = KEYED_DIGESTS | PRODUCER_CHANGES;

/// Read-only-compatible: the life block has the key of digests, and frames may have keyed digests. A
/// version that does not know this would append repeats again.
pub(crate) const KEYED_DIGESTS: u32 = 1;

/// Read-only-compatible: indexes and runs record changes of producers, and producers may be forgotten.
/// A version that does not know this would append repeats again.
pub(crate) const PRODUCER_CHANGES: u32 = 2;

/// Known features that a version must know before it may read the store. Compatible features need no
/// list: versions that do not know them ignore them.
pub(crate) const KNOWN_INCOMPATIBLE: u32 = SORTED_RUN | HAS_RUNS | ENCRYPTED;

/// Incompatible: the file is a sorted run.
pub(crate) const SORTED_RUN: u32 = 1;

/// Incompatible: sorted runs replace earlier segments.
pub(crate) const HAS_RUNS: u32 = 2;

/// Incompatible: the file belongs to an archive. No store reads such a file.
pub(crate) const ARCHIVED: u32 = 4;

/// Incompatible: this file, or one before it, may have encrypted bodies.
pub(crate) const ENCRYPTED: u32 = 8;

/// Name of a segment of the journal.
pub(crate) fn journal_path(id: SegmentId) -> String {
    format!("journal/{id}.seg")
}

/// Name of a file in the pool.
pub(crate) fn pool_path(id: SegmentId) -> String {
    format!("pool/{id}.seg")
}

/// The id in a segment's file name.
pub(crate) fn id_of(name: &str) -> Option<SegmentId> {
    bounds::named(name, ".seg")
}

/// One life of a segment file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Life {
    pub(crate) id: SegmentId,
    /// Size of the file during this life, in bytes.
    pub(crate) size: u64,
    /// Seeds all checksums of this life.
    pub(crate) salt: u64,
    pub(crate) store_id: u128,
}

/// State of the key of the store's digests in the life blocks of one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DigestKey {
    Good(Secret),
    /// A version without keyed digests wrote the file.
    None,
    /// The file should have a key, but neither copy has a good one.
    Damaged,
    /// Neither life block is good and belongs to this store.
    Unknown,
}

/// Why a life block cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BadLife {
    /// Neither copy is valid.
    Damaged,
    /// Valid, with a newer format version.
    Version(u32),
    /// Valid, with features (bits) that forbid this version to write.
    ReadOnly(u32),
    /// Valid, with features (bits) that forbid this version to read.
    Incompatible(u32),
}

impl BadLife {
    /// Describes the newer part in words; `None` if the life block is damaged.
    pub(crate) fn newer(self) -> Option<String> {
        Some(match self {
            Self::Damaged => return None,
            Self::Version(found) => {
                format!("has format version {found}, and this version reads {LIFE_VERSION}")
            }
            Self::ReadOnly(bits) => format!(
                "uses {}, without which a store may not be written",
                named("read-only-compatible", bits)
            ),
            Self::Incompatible(bits) => format!(
                "uses {}, without which a store cannot be read",
                named("incompatible", bits)
            ),
        })
    }

    /// The error for a store with the segment at `path`, if the segment is newer than this version.
    pub(crate) fn too_new(self, path: &str) -> Option<OpenError> {
        self.newer().map(|what| OpenError::TooNew {
            what: format!("segment {path} {what}"),
        })
    }
}

/// Names unknown feature bits.
pub(crate) fn named(kind: &str, bits: u32) -> String {
    let bits: Vec<String> = (0..32)
        .filter(|bit| bits >> bit & 1 == 1)
        .map(|bit| bit.to_string())
        .collect();
    format!("the unknown {kind} features {}", bits.join(", "))
}

impl Life {
    /// Both copies for a sorted run or a file of an archive, which have no key. Sets the given
    /// incompatible features.
    pub(crate) fn encode(&self, incompatible: u32) -> Vec<u8> {
        self.encode_with(None, incompatible)
    }

    /// Both copies for a segment of the journal, with the key of the store's digests.
    pub(crate) fn encode_with(&self, secret: Option<&Secret>, incompatible: u32) -> Vec<u8> {
        let read_only = secret.map_or(0, |_| KEYED_DIGESTS | PRODUCER_CHANGES);
        let mut copy = Vec::with_capacity(COPY_BYTES);
        copy.extend_from_slice(&MAGIC);
        copy.extend_from_slice(&LIFE_VERSION.to_le_bytes());
        for features in [0, read_only, incompatible] {
            copy.extend_from_slice(&features.to_le_bytes());
        }
        for number in [self.id.get(), self.size, self.salt] {
            copy.extend_from_slice(&number.to_le_bytes());
        }
        copy.extend_from_slice(&self.store_id.to_le_bytes());
        copy.extend_from_slice(&crc32c(&copy).to_le_bytes());
        debug_assert_eq!(copy.len(), LIFE_LEN);
        if let Some(secret) = secret {
            copy.extend_from_slice(&secret.to_bytes());
            copy.extend_from_slice(&crc32c(&copy).to_le_bytes());
            debug_assert_eq!(copy.len(), KEYED_LEN);
        }
        copy.resize(COPY_BYTES, 0);
        copy.repeat(2)
    }

    /// The incompatible features in the first good copy.
    pub(crate) fn features(bytes: &[u8]) -> u32 {
        let mut copies = bytes.chunks(COPY_BYTES).take(2);
        let known = KNOWN_INCOMPATIBLE | ARCHIVED;
        let good = copies.find(|copy| Self::decode_copy(copy, known).is_ok());
        good.map_or(0, |copy| u32_at(copy, 20))
    }

    /// The key of the store's digests, from the first good copy whose key is good.
    pub(crate) fn key(bytes: &[u8], store_id: u128) -> DigestKey {
        let mut key = DigestKey::Unknown;
        for copy in bytes.chunks(COPY_BYTES).take(2) {
            match Self::decode_copy(copy, KNOWN_INCOMPATIBLE) {
                Ok(life) if life.store_id == store_id => {}
                _ => continue,
            }
            if !is_keyed(copy) {
                return DigestKey::None;
            }
            if let Some(secret) = secret_in(copy) {
                return DigestKey::Good(secret);
            }
            key = DigestKey::Damaged;
        }
        key
    }

    /// Reads the first good copy.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, BadLife> {
        Self::decode_known(bytes, KNOWN_INCOMPATIBLE)
    }

    /// Reads the first good copy of a file of an archive.
    pub(crate) fn decode_archived(bytes: &[u8]) -> Result<Self, BadLife> {
        Self::decode_known(bytes, KNOWN_INCOMPATIBLE | ARCHIVED)
    }

    fn decode_known(bytes: &[u8], known: u32) -> Result<Self, BadLife> {
        let mut bad = BadLife::Damaged;
        for copy in bytes.chunks(COPY_BYTES).take(2) {
            match Self::decode_copy(copy, known) {
                Ok(life) => return Ok(life),
                Err(BadLife::Damaged) => {}
                Err(newer) => bad = newer,
            }
        }
        Err(bad)
    }

    fn decode_copy(copy: &[u8], known: u32) -> Result<Self, BadLife> {
        let fields = copy.get(..LIFE_LEN).ok_or(BadLife::Damaged)?;
        let (u32_at, u64_at) = (|at| u32_at(fields, at), |at| u64_at(fields, at));
        if fields[..8] != MAGIC || crc32c(&fields[..64]) != u32_at(64) {
            return Err(BadLife::Damaged);
        }
        if u32_at(8) != LIFE_VERSION {
            return Err(BadLife::Version(u32_at(8)));
        }
        match (u32_at(20) & !known, u32_at(16) & !KNOWN_READ_ONLY) {
            (0, 0) => {}
            (0, read_only) => return Err(BadLife::ReadOnly(read_only)),
            (incompatible, _) => return Err(BadLife::Incompatible(incompatible)),
        }
        let (id, size) = (bounds::segment(u64_at(24)), bounds::offset(u64_at(32)));
        Ok(Self {
            id: id.ok_or(BadLife::Damaged)?,
            size: size.ok_or(BadLife::Damaged)?,
            salt: u64_at(40),
            store_id: u128::from(u64_at(48)) | u128::from(u64_at(56)) << 64,
        })
    }
}

/// Whether a good copy declares a key.
pub(crate) fn is_keyed(copy: &[u8]) -> bool {
    u32_at(copy, 16) & KEYED_DIGESTS != 0
}

/// The key in a copy that declares one, if the key's checksum is right.
pub(crate) fn secret_in(copy: &[u8]) -> Option<Secret> {
    let fields = copy.get(..KEYED_LEN)?;
    if crc32c(&fields[..KEY_END]) != u32_at(fields, KEY_END) {
        return None;
    }
    let key = fields.get(LIFE_LEN..KEY_END)?.try_into().ok()?;
    Some(Secret::from_bytes(key))
}

/// For each of the two copies at the start of a file, the reason why it is not a good copy of this
/// life. `None` if it is good.
pub(crate) fn bad_copies(bytes: &[u8], life: &Life) -> [Option<&'static str>; 2] {
    let copies = [0, COPY_BYTES].map(|at| {
        let copy = bytes.get(at..).unwrap_or(&[]);
        &copy[..copy.len().min(COPY_BYTES)]
    });
    let mut bad = copies.map(|copy| match Life::decode_copy(copy, KNOWN_INCOMPATIBLE) {
        Ok(found) if found == *life => {
            let used = if is_keyed(copy) { KEYED_LEN } else { LIFE_LEN };
            if is_keyed(copy) && secret_in(copy).is_none() {
                return Some("has a key of digests that does not match its checksum");
            }
            let zeros = copy.get(used..COPY_BYTES).is_some_and(are_zeros);
            (!zeros).then_some("has something behind it that does not belong there")
        }
        Ok(_) => Some("is of another life of the file"),
        Err(BadLife::Damaged) => Some("does not match its checksum"),
        Err(_) => Some("is of a newer format"),
    });
    if bad == [None; 2] && copies[0] != copies[1] {
        bad[1] = Some("differs from the first one");
    }
    bad
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::bounds::LIFE_BYTES;

    const LIFE: Life = Life {
        id: SegmentId::new(5),
        size: 65536,
        salt: 77,
        store_id: 1 << 100,
    };

    #[test]
    fn one_good_life_block_is_enough_and_every_flip_is_seen() {
        let bytes = LIFE.encode(HAS_RUNS);
        assert_eq!(bytes.len() as u64, LIFE_BYTES);
        assert_eq!(Life::features(&bytes), HAS_RUNS);
        assert_eq!(Life::key(&bytes, LIFE.store_id), DigestKey::None);
        for bit in 0..LIFE_LEN * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Life::decode(&flipped), Ok(LIFE), "the second copy serves");
            flipped[COPY_BYTES + bit / 8] ^= 1 << (bit % 8);
            assert!(Life::decode(&flipped).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn one_good_key_is_enough_and_every_flip_of_it_is_seen() {
        let secret = Secret::from_bytes(&std::array::from_fn(|byte| {
            u8::try_from(200 + byte).unwrap()
        }));
        let bytes = LIFE.encode_with(Some(&secret), HAS_RUNS);
        assert_eq!(bytes.len() as u64, LIFE_BYTES);
        let key = |bytes: &[u8]| Life::key(bytes, LIFE.store_id);
        assert_eq!(key(&bytes), DigestKey::Good(secret));
        assert_eq!(Life::key(&bytes, 1), DigestKey::Unknown, "of another store");
        assert_eq!(bad_copies(&bytes, &LIFE), [None; 2]);
        for bit in 0..COPY_BYTES * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let bad = bad_copies(&flipped, &LIFE);
            assert!(bad[0].is_some() && bad[1].is_none(), "bit {bit}");
            assert_eq!(Life::decode(&flipped), Ok(LIFE));
            assert_eq!(
                key(&flipped),
                DigestKey::Good(secret),
                "the second copy serves"
            );
            flipped[COPY_BYTES + bit / 8] ^= 1 << (bit % 8);
            match bit / 8 {
                0..LIFE_LEN => assert_eq!(key(&flipped), DigestKey::Unknown, "bit {bit}"),
                LIFE_LEN..KEYED_LEN => {
                    assert_eq!(Life::decode(&flipped), Ok(LIFE), "bit {bit}");
                    assert_eq!(key(&flipped), DigestKey::Damaged, "bit {bit}");
                }
                _ => assert_eq!(key(&flipped), DigestKey::Good(secret), "bit {bit}"),
            }
        }
    }

    #[test]
    fn two_copies_with_different_keys_are_damage() {
        let secret = |byte| Secret::from_bytes(&[byte; Secret::BYTES]);
        let mut bytes = LIFE.encode_with(Some(&secret(1)), 0);
        let other = LIFE.encode_with(Some(&secret(2)), 0);
        bytes[COPY_BYTES..].copy_from_slice(&other[COPY_BYTES..]);
        assert_eq!(
            bad_copies(&bytes, &LIFE),
            [None, Some("differs from the first one")]
        );
    }
}
