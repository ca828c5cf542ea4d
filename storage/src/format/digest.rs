//! Digests that distinguish a repeat of a producer's batch from another batch.
//!
//! Without a key anybody can make two batches with one digest, and the second would be answered
//! as a repeat and lost. Therefore each store draws a key, its [`Secret`]. The key lies in the
//! life block of every journal segment ([`crate::journal::segment`]). A start takes the key of the
//! newest segment and begins a segment that has the key, too. Therefore the key is durable before
//! any digest that it keys. Backups include the key, so a restored store recognises the repeats
//! that the old one did. Sorted runs and archives have digests and no key.

use std::fmt;

use highway::{HighwayHash, HighwayHasher, Key};

use crate::api::codec;
use crate::api::records::Records;
use crate::disk::Disk;

/// Digest of the records of a producer's batch, as they were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Digest {
    /// XXH3-64, without a key. Versions that did not key digests wrote it.
    Plain(u64),
    /// HighwayHash-128 with the key of the store.
    Keyed(u128),
}

impl Default for Digest {
    fn default() -> Self {
        Self::Plain(0)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(digest) => write!(f, "{digest:016x}"),
            Self::Keyed(digest) => write!(f, "{digest:032x}"),
        }
    }
}

/// Records of a producer's batch that has arrived, with their digest.
#[derive(Clone, Copy)]
pub(crate) struct ArrivedBatch<'a> {
    pub(crate) records: &'a Records,
    pub(crate) keyed: u128,
}

impl ArrivedBatch<'_> {
    /// Whether the batch with the digest `known` had the same records. XXH3-64 is computed only
    /// where it is compared.
    pub(crate) fn is(&self, known: Digest) -> bool {
        match known {
            Digest::Plain(digest) => digest == codec::digest(self.records),
            Digest::Keyed(digest) => digest == self.keyed,
        }
    }
}

/// The key of a store's digests, 256 bits. Nobody outside of the store knows it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Secret([u64; 4]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// Bytes of the key in a life block.
    pub(crate) const BYTES: usize = 32;

    /// Draws a key. It is not durable yet.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub(crate) fn draw(disk: &dyn Disk) -> std::io::Result<Self> {
        let mut bytes = [0; Self::BYTES];
        disk.draw(&mut bytes)?;
        Ok(Self::from_bytes(&bytes))
    }

    /// The four words of the key, each little endian.
    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (to, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(self.0) {
            *to = word.to_le_bytes();
        }
        bytes
    }

    /// The reverse of [`Secret::to_bytes`].
    pub(crate) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let mut words = [0; 4];
        for (word, from) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*from);
        }
        Self(words)
    }

    /// The digest of records as they were sent.
    pub(crate) fn digest(&self, records: &Records) -> u128 {
        let mut hash = HighwayHasher::new(Key(self.0));
        codec::sent_parts(records, |part| {
            hash.append(&(part.len() as u64).to_le_bytes());
            hash.append(part);
        });
        joined(hash.finalize128())
    }
}

/// The two words of a digest as one number, the first one low.
fn joined([low, high]: [u64; 2]) -> u128 {
    u128::from(low) | u128::from(high) << 64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::record::{Header, Record};
    use crate::base::ids::Timestamp;
    use crate::disk::SimDisk;

    /// The key of the vectors in the reference implementation: bytes 0 to 31.
    const PUBLISHED: Secret = Secret([
        0x0706_0504_0302_0100,
        0x0F0E_0D0C_0B0A_0908,
        0x1716_1514_1312_1110,
        0x1F1E_1D1C_1B1A_1918,
    ]);

    fn batch(parts: &[&'static [u8]]) -> Records {
        let record = |data: &&'static [u8]| Record {
            data: bytes::Bytes::from_static(data),
            ..Record::default()
        };
        parts.iter().map(record).collect()
    }

    /// The vectors come from `highwayhash_test.cc` in the reference implementation: the input is the bytes 0,
    /// 1, 2 and so on.
    #[test]
    fn the_hash_gives_the_published_vectors() {
        let vectors: [(u8, [u64; 2]); 9] = [
            (0, [0x0FED_268F_9D8F_FEC7, 0x3356_5E76_7F09_3E6F]),
            (1, [0xD6B0_A889_3681_E7A8, 0xDC29_1DF9_EB9C_DCB4]),
            (3, [0x0607_621B_295F_0BEB, 0xBFE6_9A0F_D9CE_DD79]),
            (15, [0x1422_37A5_2BC4_AF54, 0xE079_6C0B_6E26_BCD7]),
            (16, [0x4144_60FF_D5A4_01AD, 0x029E_A3D5_019F_18C8]),
            (31, [0x06E7_B465_E8A5_7C29, 0x5241_5E3A_07F5_D446]),
            (32, [0x1984_DF66_C143_4AAA, 0x16FC_1958_F9B3_E4B9]),
            (33, [0x1116_78AF_E0C6_C36C, 0xF958_B59D_E5A2_849D]),
            (63, [0x74BD_7018_022F_3EF0, 0x3AEA_94A8_AD5F_4BCB]),
        ];
        for (length, expected) in vectors {
            let data: Vec<u8> = (0..length).collect();
            for cut in 0..=data.len() {
                let mut hash = HighwayHasher::new(Key(PUBLISHED.0));
                hash.append(&data[..cut]);
                hash.append(&data[cut..]);
                assert_eq!(hash.finalize128(), expected, "{length} bytes, cut at {cut}");
            }
        }
    }

    #[test]
    fn a_digest_stays_as_it_is_stored() {
        let full = Record {
            data: bytes::Bytes::from_static(b"data"),
            headers: vec![Header {
                key: "key".to_owned(),
                value: bytes::Bytes::from_static(b"value"),
            }],
            timestamp: Some(Timestamp::from_micros(-7)),
            crc32c: Some(0x0102_0304),
        };
        let batch: Records = [full, Record::default()].into_iter().collect();
        // Computed by storage/reader/highway.py, which is written from FORMAT.md.
        let expected = 0xf294_c3ed_0ee5_45fe_f39c_7f56_d66a_cd23;
        assert_eq!(PUBLISHED.digest(&batch), expected);
    }

    #[test]
    fn digests_differ_by_key_and_by_every_part() {
        let other = Secret([1, 2, 3, 4]);
        let ab = batch(&[b"a", b"b"]);
        assert_eq!(other.digest(&ab), other.digest(&ab.clone()));
        assert_ne!(other.digest(&ab), PUBLISHED.digest(&ab));
        for parts in [&[&b"ab"[..], b""], &[b"", b"ab"], &[b"b", b"a"]] {
            assert_ne!(other.digest(&ab), other.digest(&batch(parts)));
        }
        assert_ne!(other.digest(&ab), other.digest(&batch(&[b"a"])));
    }

    #[test]
    fn a_key_reads_back_is_drawn_each_time_and_not_shown() {
        let disk = SimDisk::new();
        let [one, other] = [(); 2].map(|()| Secret::draw(&disk).unwrap());
        assert_ne!(one, other);
        assert_eq!(Secret::from_bytes(&one.to_bytes()), one);
        let bytes: [u8; Secret::BYTES] = std::array::from_fn(|at| u8::try_from(at).unwrap());
        assert_eq!(PUBLISHED.to_bytes(), bytes);
        assert_eq!(format!("{one:?}"), "Secret(..)");
    }
}
