//! Encrypted bodies of batches.
//!
//! An encrypted body is complete in itself: sorting, backups and replicas move it unchanged, and need no key.
//! Bit 2 of the codec says that a body is encrypted; bits 0 and 1 are the codec of the bytes inside.
//!
//! ```text
//! 0            8            16          24           28      40                  -16
//! +------------+------------+-----------+------------+-------+-------------------+-----+
//! | key number | first time | last time | plain size | nonce | encrypted, as     | tag |
//! |            | us         | us        |            |       | large as before   |     |
//! +------------+------------+-----------+------------+-------+-------------------+-----+
//! ```
//!
//! The times belong to the first and the last record. With them a start needs no key. The tag covers them, the
//! number of the key, the plain size, and the place of the body: log id, first lsn, record count, codec. The
//! position is not covered: a sorted run has another one.

use std::io;

use crate::api::cipher::{BodyCipher, BodyKey, NONCE_BYTES, TAG_BYTES, Unopened};
use crate::api::codec;
use crate::base::ids::{LogId, Lsn, Timestamp};
use crate::base::wire::{u32_at, u64_at};
use crate::disk::known_bad;
use crate::disk::known_bad::Mistake;
use crate::format::compress;

/// Bit of a codec: the body is encrypted.
pub(crate) const SEALED: u8 = 0b100;

/// Offset of the nonce: the bytes before it are bound to the body.
const NONCE_AT: usize = 28;

/// Offset of the encrypted bytes.
const HEAD_BYTES: usize = NONCE_AT + NONCE_BYTES;

/// Bytes that encryption adds to a body.
pub(crate) const SEALED_BYTES: usize = HEAD_BYTES + TAG_BYTES;

/// Whether bodies of this codec are encrypted.
pub(crate) fn is_sealed(codec: u8) -> bool {
    codec & SEALED != 0
}

/// The place of a body, which its tag covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BodyPlace {
    pub(crate) log: LogId,
    pub(crate) first_lsn: Lsn,
    pub(crate) count: u32,
    /// The codec as it is stored, with [`SEALED`].
    pub(crate) codec: u8,
}

impl BodyPlace {
    /// The bytes that the tag covers beside the body: the place, then the head.
    fn with(&self, head: &[u8; NONCE_AT]) -> [u8; 24 + NONCE_AT] {
        let mut bytes = [0; 24 + NONCE_AT];
        bytes[..8].copy_from_slice(&self.log.get().to_le_bytes());
        bytes[8..16].copy_from_slice(&self.first_lsn.get().to_le_bytes());
        bytes[16..20].copy_from_slice(&self.count.to_le_bytes());
        bytes[20] = self.codec;
        bytes[24..].copy_from_slice(head);
        bytes
    }
}

/// Times of the first and of the last record of a body.
pub(crate) type FirstAndLastTime = (Timestamp, Timestamp);

/// The times of a plain body whose records arrived at `arrival`. Times never go back within a log.
pub(crate) fn times_of(plain: &[u8], arrival: Timestamp) -> FirstAndLastTime {
    let mut times = codec::own_times(plain).map(|own| own.unwrap_or(arrival));
    let first = times.next().unwrap_or(arrival);
    (first, times.fold(first, Timestamp::max))
}

/// The times of a stored body, without a key. `None` if the body cannot be read, as far as that can be known
/// without one.
pub(crate) fn stored_times(
    codec: u8,
    stored: &[u8],
    count: u32,
    arrival: Timestamp,
) -> Option<FirstAndLastTime> {
    if is_sealed(codec) {
        let is_bounded = compress::too_large(codec, stored).is_none();
        return SealedBody::parse(stored)
            .filter(|_| is_bounded)
            .map(|sealed| sealed.times);
    }
    let plain = compress::decompress(codec, stored)?;
    codec::may_hold(&plain, count).then(|| times_of(&plain, arrival))
}

/// Encrypts the body at `at` in `out`, which is its end. `plain`: its size before compression, bytes. `bound` has
/// the codec with [`SEALED`].
pub(crate) fn seal(
    out: &mut Vec<u8>,
    at: usize,
    key: &dyn BodyKey,
    bound: &BodyPlace,
    plain: u32,
    times: FirstAndLastTime,
) {
    let mut head = [0; NONCE_AT];
    head[..8].copy_from_slice(&key.number().to_le_bytes());
    head[8..16].copy_from_slice(&times.0.micros().to_le_bytes());
    head[16..24].copy_from_slice(&times.1.micros().to_le_bytes());
    head[24..].copy_from_slice(&plain.to_le_bytes());
    let end = out.len();
    out.reserve(SEALED_BYTES);
    out.resize(end + HEAD_BYTES, 0);
    out.copy_within(at..end, at + HEAD_BYTES);
    let (nonce, tag) = key.seal(&bound.with(&head), &mut out[at + HEAD_BYTES..]);
    out[at..at + NONCE_AT].copy_from_slice(&head);
    out[at + NONCE_AT..at + HEAD_BYTES].copy_from_slice(&nonce);
    out.extend_from_slice(&tag);
}

/// An encrypted body, as it is stored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SealedBody<'a> {
    /// The number of its key.
    pub(crate) key: u64,
    pub(crate) times: FirstAndLastTime,
    /// Size when it is decrypted and decompressed, bytes.
    pub(crate) plain: u32,
    head: &'a [u8; NONCE_AT],
    nonce: &'a [u8; NONCE_BYTES],
    /// The encrypted bytes, and the tag.
    encrypted: &'a [u8],
}

/// Why an encrypted body cannot be read. Its bytes are as they were written, so it does not count as damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CannotOpen {
    /// The key with this number is missing.
    NoKey(u64),
    /// The key with this number does not open it.
    Altered(u64),
}

impl CannotOpen {
    /// The error of a read, for the records at `place`.
    pub(crate) fn error(self, place: impl std::fmt::Display) -> io::Error {
        let (Self::NoKey(key) | Self::Altered(key)) = self;
        let text = match self {
            Self::NoKey(key) => format!(
                "{place} are encrypted with key {key}, which the key ring does not have; put back the newest copy of the key ring"
            ),
            Self::Altered(key) => format!(
                "{place} do not open with key {key}: their bytes, or those of the key, were changed on purpose"
            ),
        };
        io::Error::new(io::ErrorKind::InvalidData, Unopened { key, text })
    }
}

impl<'a> SealedBody<'a> {
    /// The parts of a stored body; `None` if it is too short.
    pub(crate) fn parse(stored: &'a [u8]) -> Option<Self> {
        let (head, rest) = stored.split_first_chunk::<NONCE_AT>()?;
        let (nonce, encrypted) = rest.split_first_chunk::<NONCE_BYTES>()?;
        if encrypted.len() < TAG_BYTES {
            return None;
        }
        let time = |at| Timestamp::from_micros(u64_at(head, at).cast_signed());
        Some(Self {
            key: u64_at(head, 0),
            times: (time(8), time(16)),
            plain: u32_at(head, 24),
            head,
            nonce,
            encrypted,
        })
    }

    /// The decrypted bytes, which may be compressed.
    pub(crate) fn open(
        &self,
        cipher: Option<&dyn BodyCipher>,
        bound: &BodyPlace,
    ) -> Result<Vec<u8>, CannotOpen> {
        let key = cipher.and_then(|cipher| cipher.by_number(self.key));
        let key = key.ok_or(CannotOpen::NoKey(self.key))?;
        let mut bytes = self.encrypted.to_vec();
        let opened = key.open(self.nonce, &bound.with(self.head), &mut bytes);
        if !opened && !known_bad::makes(Mistake::TagNotChecked) {
            return Err(CannotOpen::Altered(self.key));
        }
        bytes.truncate(bytes.len() - TAG_BYTES);
        Ok(bytes)
    }
}

/// Encrypts a stored body with the newest key of its log. `None` if it has that key already, or cannot be read.
pub(crate) fn renew(
    cipher: &dyn BodyCipher,
    bound: BodyPlace,
    stored: &[u8],
    arrival: Timestamp,
) -> Option<(u8, Vec<u8>)> {
    let newest = cipher.newest(bound.log)?;
    let sealed = BodyPlace {
        codec: bound.codec | SEALED,
        ..bound
    };
    let (mut out, plain, times) = match is_sealed(bound.codec) {
        true => {
            let old = SealedBody::parse(stored)?;
            if old.key == newest.number() {
                return None;
            }
            (old.open(Some(cipher), &bound).ok()?, old.plain, old.times)
        }
        false => {
            let times = stored_times(bound.codec, stored, bound.count, arrival)?;
            let plain = match bound.codec {
                compress::PLAIN => u32::try_from(stored.len()).ok()?,
                codec => compress::decompressed_len(codec, stored),
            };
            (stored.to_vec(), plain, times)
        }
    };
    seal(&mut out, 0, &*newest, &sealed, plain, times);
    Some((sealed.codec, out))
}

/// The key with which a stored body is encrypted; 0 if it is not.
pub(crate) fn key_of(codec: u8, stored: &[u8]) -> u64 {
    match SealedBody::parse(stored) {
        Some(sealed) if is_sealed(codec) => sealed.key,
        _ => 0,
    }
}
