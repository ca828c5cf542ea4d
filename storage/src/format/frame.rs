//! Frames in a segment file: encoding and decoding only.
//!
//! A frame is one batch of one log, or one act of administration: a fixed header,
//! extensions, a body; padded with zeros to a multiple of 8. All numbers are little
//! endian. The header's checksum covers header and extensions, and is verified before
//! any length in it is believed:
//!
//! ```text
//!  0             4       6    7     8             12            16            20   21       24
//! +-------------+-------+----+-----+-------------+-------------+-------------+----+--------+
//! | header crc  | hlen  | ver| kind| body_len    | body crc    | record count|flag| zero   |
//! +-------------+-------+----+-----+-------------+-------------+-------------+----+--------+
//! | position                  24..32 | log id                  32..40 | first lsn    40..48 |
//! | arrival, us               48..56 | durable lag  56..60 | chain   60..64                 |
//! +---------------------------------------------------------------------------------------+
//! | extensions, each: type u16, zero u16, length u32, bytes, zeros to a multiple of 8      |
//! | body, zeros to a multiple of 8                                                         |
//! ```
//!
//! - `hlen` is header and extensions in units of 8 bytes.
//! - The header checksum is CRC-32C seeded with the segment's salt. Each entry of a file into the pool
//!   draws a new salt, so zeros and frames of an earlier life never pass.
//! - `body crc` is plain CRC-32C of the body. The header's checksum covers it, so it is copied and
//!   never computed again.
//! - `chain` is the header checksum of the frame before, 0 in a segment's first frame.
//! - `durable lag`: distance from `position` back to the durable position when the frame was written,
//!   in units of 8 bytes. The maximum value (32 GiB) means unknown.
//!
//! This module is pure: bytes in, bytes out. It must never panic on any input.

use crate::api::error::OpenError;
use crate::api::record::Producer;
use crate::base::bounds;
use crate::base::crc::crc32c;
use crate::base::crc::low32;
use crate::base::ids::{LogId, Lsn, Name, Position, Timestamp};
use crate::base::wire;
use crate::base::wire::{u32_at, u64_at};
use crate::format::compress::ZSTD;
use crate::format::digest::Digest;

/// Bytes of the fixed header.
pub(crate) const HEADER_BYTES: usize = 64;
/// The version written in each header.
const HEADER_VERSION: u8 = 1;
/// Maximum length of header and extensions, in bytes.
pub(crate) const MAX_HEADER_BYTES: usize = u16::MAX as usize * 8;

/// Kind of a frame. Segments of the journal hold 1 to 9, 11 and 15; sorted runs hold 10 and 12
/// to 14.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum FrameKind {
    /// Records of one log.
    Batch = 1,
    /// A log was created.
    Created = 2,
    /// A log's settings changed.
    Configured = 3,
    /// A log was deleted with all its records.
    Deleted = 4,
    /// The records below `first lsn` were trimmed.
    Trim = 5,
    /// The writer epoch was raised.
    Fence = 6,
    /// Consumers' positions.
    Cursor = 7,
    /// First frame of a segment: describes the segments before.
    Link = 8,
    /// Written when the journal has been idle: proves that everything before was flushed.
    Marker = 9,
    /// Last frame of a sorted run: names the segments that the run replaces.
    Run = 10,
    /// Last frame of a segment.
    Seal = 11,
    /// State of each log at the end of a sorted run.
    Images = 12,
    /// Records of one log in a sorted run.
    Pack = 13,
    /// Commit order of the records of a sorted run.
    Order = 14,
    /// Producers of a log were forgotten.
    Forgotten = 15,
}

impl FrameKind {
    /// Name of the kind, for people.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::Created => "created",
            Self::Configured => "configured",
            Self::Deleted => "deleted",
            Self::Trim => "trim",
            Self::Fence => "fence",
            Self::Cursor => "cursor",
            Self::Link => "link",
            Self::Marker => "marker",
            Self::Run => "run",
            Self::Seal => "seal",
            Self::Images => "images",
            Self::Pack => "pack",
            Self::Order => "order",
            Self::Forgotten => "forgotten",
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Batch,
            2 => Self::Created,
            3 => Self::Configured,
            4 => Self::Deleted,
            5 => Self::Trim,
            6 => Self::Fence,
            7 => Self::Cursor,
            8 => Self::Link,
            9 => Self::Marker,
            10 => Self::Run,
            11 => Self::Seal,
            12 => Self::Images,
            13 => Self::Pack,
            14 => Self::Order,
            15 => Self::Forgotten,
            _ => return None,
        })
    }
}

/// Bits 0 to 2 of the flags: codec of the body. 0: not compressed.
const CODEC_MASK: u8 = 0b111;
/// The atomic unit continues in the next frame.
pub(crate) const CONTINUES: u8 = 0x80;

/// A verified header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FrameHeader {
    pub(crate) kind: FrameKind,
    pub(crate) flags: u8,
    /// Header and extensions, bytes.
    pub(crate) header_len: u32,
    pub(crate) body_len: u32,
    pub(crate) body_crc: u32,
    pub(crate) count: u32,
    pub(crate) position: Position,
    pub(crate) log_id: LogId,
    pub(crate) first_lsn: Lsn,
    pub(crate) arrival: Timestamp,
    /// Everything below was flushed when the frame was written; 0 if unknown.
    pub(crate) durable_mark: Position,
    pub(crate) chain: u32,
    /// This header's own checksum: the chain value of the next frame.
    pub(crate) crc: u32,
}

impl FrameHeader {
    /// Bytes of the whole frame, padding included.
    pub(crate) fn frame_len(&self) -> u64 {
        u64::from(self.header_len) + u64::from(self.body_len).next_multiple_of(8)
    }

    /// Position of the byte after the frame.
    pub(crate) fn end(&self) -> Position {
        self.position.advance(self.frame_len())
    }

    pub(crate) fn continues(&self) -> bool {
        self.flags & CONTINUES != 0
    }

    /// The lsn after the last record.
    pub(crate) fn next_lsn(&self) -> Option<Lsn> {
        self.first_lsn.checked_advance(u64::from(self.count))
    }

    /// The number of the codec that compressed the body.
    pub(crate) fn codec(&self) -> u8 {
        self.flags & CODEC_MASK
    }
}

/// Fields of a frame that the writer chooses. The other fields follow from the frame's place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FrameHead {
    pub(crate) kind: FrameKind,
    pub(crate) flags: u8,
    pub(crate) count: u32,
    pub(crate) position: Position,
    pub(crate) log_id: LogId,
    pub(crate) first_lsn: Lsn,
    pub(crate) arrival: Timestamp,
    pub(crate) durable_mark: Position,
    pub(crate) chain: u32,
}

/// CRC-32C of `bytes`, seeded with a segment's salt.
pub(crate) fn salted_crc32c(salt: u64, bytes: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    digest.update(&salt.to_le_bytes());
    digest.update(bytes);
    low32(digest.finalize())
}

/// A running CRC-32C.
pub(crate) struct RunningCrc(crc_fast::Digest);

impl Default for RunningCrc {
    fn default() -> Self {
        Self(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi))
    }
}

impl RunningCrc {
    /// Takes the next bytes.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Checksum of all bytes so far.
    pub(crate) fn value(&self) -> u32 {
        low32(self.0.finalize())
    }
}

/// A running CRC-32C of a file whose last four bytes are the checksum of all bytes before.
#[derive(Default)]
pub(crate) struct Crc {
    before: RunningCrc,
    /// The last bytes so far, up to four.
    last: Vec<u8>,
}

impl Crc {
    /// Takes the next bytes.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        let (front, last) = bytes.split_at(bytes.len().saturating_sub(4));
        self.last.extend_from_slice(last);
        let passed = self.last.len().saturating_sub(4);
        // Earlier bytes that now have at least four bytes after them.
        let passed: Vec<u8> = self.last.drain(..passed).collect();
        self.before.feed(&passed);
        self.before.feed(front);
    }

    /// Whether nothing more comes and the checksum is right.
    pub(crate) fn is_good(&self) -> bool {
        self.last == self.before.value().to_le_bytes()
    }
}

/// Starts a frame at the end of `out`: room for the header, then the encoded extensions. The caller
/// appends the body, then calls [`finish`] with the returned offset.
pub(crate) fn begin(out: &mut Vec<u8>, extensions: &[u8]) -> usize {
    let start = out.len();
    debug_assert!(start.is_multiple_of(8) && extensions.len().is_multiple_of(8));
    out.resize(start + HEADER_BYTES, 0);
    out.extend_from_slice(extensions);
    start
}

/// Completes the frame begun at `start`: header, checksums, padding. `header_len` counts header and
/// extensions, in bytes. Returns the header as a reader will see it.
///
/// # Panics
/// If a length does not fit its field: callers bound bodies and extensions.
pub(crate) fn finish(
    out: &mut Vec<u8>,
    start: usize,
    header_len: usize,
    salt: u64,
    head: &FrameHead,
) -> FrameHeader {
    let body_start = start + header_len;
    let body_crc = crc32c(&out[body_start..]);
    let body_len = u32::try_from(out.len() - body_start).expect("body fits 32 bits");
    let hlen = u16::try_from(header_len / 8).expect("extensions fit their field");
    let lag = head.position.since(head.durable_mark) / 8;
    let lag = u32::try_from(lag).unwrap_or(u32::MAX);
    let h = &mut out[start..start + HEADER_BYTES];
    h[4..6].copy_from_slice(&hlen.to_le_bytes());
    h[6] = HEADER_VERSION;
    h[7] = head.kind as u8;
    h[8..12].copy_from_slice(&body_len.to_le_bytes());
    h[12..16].copy_from_slice(&body_crc.to_le_bytes());
    h[16..20].copy_from_slice(&head.count.to_le_bytes());
    h[20] = head.flags;
    h[24..32].copy_from_slice(&head.position.get().to_le_bytes());
    h[32..40].copy_from_slice(&head.log_id.get().to_le_bytes());
    h[40..48].copy_from_slice(&head.first_lsn.get().to_le_bytes());
    h[48..56].copy_from_slice(&head.arrival.micros().to_le_bytes());
    h[56..60].copy_from_slice(&lag.to_le_bytes());
    h[60..64].copy_from_slice(&head.chain.to_le_bytes());
    let crc = salted_crc32c(salt, &out[start + 4..body_start]);
    out[start..start + 4].copy_from_slice(&crc.to_le_bytes());
    let padded = out.len().next_multiple_of(8);
    out.resize(padded, 0);
    FrameHeader {
        kind: head.kind,
        flags: head.flags,
        header_len: u32::from(hlen) * 8,
        body_len,
        body_crc,
        count: head.count,
        position: head.position,
        log_id: head.log_id,
        first_lsn: head.first_lsn,
        arrival: head.arrival,
        durable_mark: mark(head.position, lag),
        chain: head.chain,
        crc,
    }
}

fn mark(position: Position, lag: u32) -> Position {
    match lag {
        u32::MAX => Position::ZERO,
        lag => Position::new(position.get().saturating_sub(u64::from(lag) * 8)),
    }
}

/// Position that the bytes of a possible header claim, unverified.
pub(crate) fn claimed_position(bytes: &[u8]) -> Option<u64> {
    (bytes.len() >= HEADER_BYTES).then(|| u64_at(bytes, 24))
}

/// Bytes of header and extensions that a possible header claims, unverified.
pub(crate) fn claimed_header_len(bytes: &[u8]) -> Option<u64> {
    let units = bytes.get(4..6)?.try_into().ok()?;
    Some(u64::from(u16::from_le_bytes(units)) * 8)
}

/// Reads and verifies the header at the front of `bytes`, which may continue beyond the frame and must
/// include all extensions. `None` if this is not a header of the segment with this salt.
pub(crate) fn decode_header(bytes: &[u8], salt: u64) -> Option<FrameHeader> {
    if bytes.len() < HEADER_BYTES || bytes[6] != HEADER_VERSION {
        return None;
    }
    let kind = FrameKind::from_byte(bytes[7])?;
    let header_len = usize::from(u16::from_le_bytes([bytes[4], bytes[5]])) * 8;
    if header_len < HEADER_BYTES || header_len > bytes.len() {
        return None;
    }
    let crc = u32_at(bytes, 0);
    if salted_crc32c(salt, &bytes[4..header_len]) != crc {
        return None;
    }
    let position = bounds::place(u64_at(bytes, 24))?;
    let (first_lsn, count) = (u64_at(bytes, 40), u32_at(bytes, 16));
    let sound = match kind {
        // The field holds a writer epoch, which clients choose.
        FrameKind::Fence => true,
        // The fields hold the end of the segment before, and the recovery epoch.
        FrameKind::Link => {
            bounds::position(first_lsn).is_some() && bounds::epoch(u64::from(count)).is_some()
        }
        _ => bounds::lsn(first_lsn).is_some(),
    };
    if !sound {
        return None;
    }
    let header = FrameHeader {
        kind,
        flags: bytes[20],
        header_len: u32::try_from(header_len).ok()?,
        body_len: u32_at(bytes, 8),
        body_crc: u32_at(bytes, 12),
        count,
        position,
        log_id: bounds::log(u64_at(bytes, 32))?,
        first_lsn: Lsn::new(first_lsn),
        arrival: Timestamp::from_micros(u64_at(bytes, 48).cast_signed()),
        durable_mark: mark(position, u32_at(bytes, 56)),
        chain: u32_at(bytes, 60),
        crc,
    };
    bounds::offset(header.frame_len())?;
    Some(header)
}

/// Part of a frame that this version does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Newer {
    Version(u8),
    Kind(u8),
    Codec(u8),
}

impl Newer {
    /// The error that refuses to open the store.
    pub(crate) fn refused(self, path: &str, offset: u64) -> OpenError {
        let what = match self {
            Self::Version(version) => format!("is of version {version}"),
            Self::Kind(kind) => format!("is of the unknown kind {kind}"),
            Self::Codec(ZSTD) if cfg!(not(any(test, feature = "zstd"))) => {
                "is compressed with zstd, which this build does not have".to_owned()
            }
            Self::Codec(codec) => format!("is compressed with the unknown codec {codec}"),
        };
        OpenError::TooNew {
            what: format!("the frame at offset {offset} of {path} {what}"),
        }
    }
}

/// Recognises a header of the segment with this salt whose version or kind is unknown. All versions
/// keep checksum, length, version, kind and position at the same offsets.
pub(crate) fn newer(bytes: &[u8], salt: u64) -> Option<Newer> {
    if bytes.len() < HEADER_BYTES {
        return None;
    }
    let newer = match (bytes[6], bytes[7]) {
        (HEADER_VERSION, kind) if FrameKind::from_byte(kind).is_some() => return None,
        (HEADER_VERSION, kind) => Newer::Kind(kind),
        (version, _) => Newer::Version(version),
    };
    let length = usize::from(u16::from_le_bytes([bytes[4], bytes[5]])) * 8;
    let header = bytes.get(..length).filter(|_| length >= HEADER_BYTES)?;
    (salted_crc32c(salt, &header[4..]) == u32_at(header, 0)).then_some(newer)
}

/// Returns the body of a frame with a verified header, whose bytes are at the front of `frame`. `None`
/// if the body is incomplete or does not match its checksum.
pub(crate) fn verified_body<'a>(frame: &'a [u8], header: &FrameHeader) -> Option<&'a [u8]> {
    let from = header.header_len as usize;
    let body = frame.get(from..from.checked_add(header.body_len as usize)?)?;
    (crc32c(body) == header.body_crc).then_some(body)
}

/// Kinds of extensions. Readers skip unknown ones.
const EXTENSION_PRODUCER: u16 = 1;
/// Producer with a keyed digest.
const EXTENSION_KEYED_PRODUCER: u16 = 2;
const EXTENSION_DIRECTORY: u16 = 3;
/// Directory of a pack.
pub(crate) const EXTENSION_PIECES: u16 = 4;

pub(crate) fn put_extension(out: &mut Vec<u8>, kind: u16, payload: &[u8]) {
    let length = u32::try_from(payload.len()).expect("extensions are bounded by their caller");
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&[0, 0]);
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(payload);
    out.resize(out.len().next_multiple_of(8), 0);
}

/// Returns the payload of an extension of this kind in a verified frame, if there is one.
pub(crate) fn extension_of<'a>(
    frame: &'a [u8],
    header: &FrameHeader,
    wanted: u16,
) -> Option<&'a [u8]> {
    let mut rest = frame.get(HEADER_BYTES..header.header_len as usize)?;
    while rest.len() >= 8 {
        let kind = u16::from_le_bytes([rest[0], rest[1]]);
        let length = u32_at(rest, 4) as usize;
        let payload = rest.get(8..8usize.checked_add(length)?)?;
        if kind == wanted {
            return Some(payload);
        }
        rest = rest.get((8 + length).next_multiple_of(8)..).unwrap_or(&[]);
    }
    None
}

/// The directory in the extensions of a verified frame, if there is one.
pub(crate) fn directory_of(frame: &[u8], header: &FrameHeader) -> Option<Directory> {
    Directory::decode(extension_of(frame, header, EXTENSION_DIRECTORY)?)
}

/// Returns the producer of a frame, and the digest of its records as they were sent.
pub(crate) fn producer_of(frame: &[u8], header: &FrameHeader) -> Option<(Producer, Digest)> {
    let keyed = extension_of(frame, header, EXTENSION_KEYED_PRODUCER);
    let (numbers, id, digest) = match keyed {
        Some(payload) => {
            let (numbers, id) = payload.split_at_checked(32)?;
            let (low, high) = (u64_at(numbers, 16), u64_at(numbers, 24));
            let digest = Digest::Keyed(u128::from(low) | u128::from(high) << 64);
            (numbers, id, digest)
        }
        None => {
            let payload = extension_of(frame, header, EXTENSION_PRODUCER)?;
            let (numbers, id) = payload.split_at_checked(24)?;
            (numbers, id, Digest::Plain(u64_at(numbers, 16)))
        }
    };
    let producer = Producer {
        id: Name::new(std::str::from_utf8(id).ok()?).ok()?,
        epoch: u64_at(numbers, 0),
        sequence: u64_at(numbers, 8),
    };
    Some((producer, digest))
}

/// Appends the extension that [`producer_of`] reads.
pub(crate) fn put_producer(out: &mut Vec<u8>, producer: &Producer, digest: Digest) {
    let mut payload = Vec::with_capacity(32 + producer.id.as_str().len());
    payload.extend_from_slice(&producer.epoch.to_le_bytes());
    payload.extend_from_slice(&producer.sequence.to_le_bytes());
    let extension = match digest {
        Digest::Plain(digest) => {
            payload.extend_from_slice(&digest.to_le_bytes());
            EXTENSION_PRODUCER
        }
        Digest::Keyed(digest) => {
            payload.extend_from_slice(&digest.to_le_bytes());
            EXTENSION_KEYED_PRODUCER
        }
    };
    payload.extend_from_slice(producer.id.as_str().as_bytes());
    put_extension(out, extension, &payload);
}

/// Maximum size of the extension of a producer, in bytes.
pub(crate) fn producer_len(producer: &Producer) -> usize {
    (8 + 32 + producer.id.as_str().len()).next_multiple_of(8)
}

/// Describes one frame of a group. The first frame of the next group stores it, so that damage to the
/// frame itself is still attributed exactly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DirectoryEntry {
    pub(crate) kind: FrameKind,
    /// Bytes of the frame.
    pub(crate) frame_len: u64,
    pub(crate) log_id: LogId,
    pub(crate) first_lsn: Lsn,
    pub(crate) count: u32,
    /// Name of the log, if the frame created the log.
    pub(crate) name: Option<String>,
}

/// The frames of one group, without holes, beginning at `start`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Directory {
    pub(crate) start: Position,
    pub(crate) entries: Vec<DirectoryEntry>,
}

impl Directory {
    fn decode(mut input: &[u8]) -> Option<Self> {
        let start = bounds::place(wire::take_varint(&mut input)?)?;
        let mut entries = Vec::new();
        while let Some((&kind, rest)) = input.split_first() {
            input = rest;
            let kind = FrameKind::from_byte(kind)?;
            let frame_len = wire::take_varint(&mut input)?.checked_mul(8)?;
            let frame_len = bounds::offset(frame_len)?;
            let log_id = bounds::log(wire::take_varint(&mut input)?)?;
            let first_lsn = wire::take_varint(&mut input)?;
            let first_lsn = match kind {
                FrameKind::Fence => Lsn::new(first_lsn),
                _ => bounds::lsn(first_lsn)?,
            };
            let count = u32::try_from(wire::take_varint(&mut input)?).ok()?;
            let name_len = wire::take_varint(&mut input)?;
            let name = wire::take_bytes(&mut input, name_len)?;
            let name = (!name.is_empty())
                .then(|| String::from_utf8(name.to_vec()))
                .transpose()
                .ok()?;
            entries.push(DirectoryEntry {
                kind,
                frame_len,
                log_id,
                first_lsn,
                count,
                name,
            });
        }
        Some(Self { start, entries })
    }
}

/// Collects the directory of a group while the group is encoded.
#[derive(Debug, Default)]
pub(crate) struct DirectoryBuilder {
    payload: Vec<u8>,
    entries: usize,
}

impl DirectoryBuilder {
    /// Maximum number of bytes that [`DirectoryBuilder::push`] adds.
    pub(crate) fn entry_len(name: Option<&str>) -> usize {
        1 + 5 + 10 + 10 + 5 + 2 + name.map_or(0, str::len)
    }

    /// Begins a new directory at `start`.
    pub(crate) fn reset(&mut self, start: Position) {
        self.payload.clear();
        self.entries = 0;
        wire::put_varint(&mut self.payload, start.get());
    }

    pub(crate) fn push(&mut self, header: &FrameHeader, name: Option<&str>) {
        self.entries += 1;
        self.payload.push(header.kind as u8);
        wire::put_varint(&mut self.payload, header.frame_len() / 8);
        wire::put_varint(&mut self.payload, header.log_id.get());
        wire::put_varint(&mut self.payload, header.first_lsn.get());
        wire::put_varint(&mut self.payload, u64::from(header.count));
        let name = name.unwrap_or("");
        wire::put_varint(&mut self.payload, name.len() as u64);
        self.payload.extend_from_slice(name.as_bytes());
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries == 0
    }

    /// Current length of the encoded extension, in bytes.
    pub(crate) fn extension_len(&self) -> usize {
        if self.is_empty() {
            0
        } else {
            (8 + self.payload.len()).next_multiple_of(8)
        }
    }

    /// The encoded extension; empty for an empty directory.
    pub(crate) fn extension(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.extension_len());
        if !self.is_empty() {
            put_extension(&mut out, EXTENSION_DIRECTORY, &self.payload);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SALT: u64 = 0x5EED_5A17;

    fn head() -> FrameHead {
        FrameHead {
            kind: FrameKind::Batch,
            flags: CONTINUES,
            count: 3,
            position: Position::new(8192 + 640),
            log_id: LogId::new(7),
            first_lsn: Lsn::new(41),
            arrival: Timestamp::from_micros(1_700_000_000_000_000),
            durable_mark: Position::new(8192),
            chain: 99,
        }
    }

    fn producer() -> Producer {
        Producer {
            id: Name::new("billing").unwrap(),
            epoch: 3,
            sequence: u64::MAX,
        }
    }

    const KEYED: Digest = Digest::Keyed(77 << 64 | 78);

    fn frame(body: &[u8]) -> (Vec<u8>, FrameHeader) {
        frame_with(KEYED, body)
    }

    fn frame_with(digest: Digest, body: &[u8]) -> (Vec<u8>, FrameHeader) {
        let mut directory = DirectoryBuilder::default();
        directory.reset(Position::new(8192));
        let mut out = Vec::new();
        let start = begin(&mut out, &[]);
        let created = FrameHead {
            kind: FrameKind::Created,
            count: 0,
            ..head()
        };
        let header = finish(&mut out, start, HEADER_BYTES, SALT, &created);
        directory.push(&header, Some("flights"));
        let mut extension = directory.extension();
        assert_eq!(extension.len(), directory.extension_len());
        put_producer(&mut extension, &producer(), digest);
        let producer_bytes = extension.len() - directory.extension_len();
        assert!(producer_bytes <= producer_len(&producer()));
        out.clear();
        let start = begin(&mut out, &extension);
        out.extend_from_slice(body);
        let header = finish(
            &mut out,
            start,
            HEADER_BYTES + extension.len(),
            SALT,
            &head(),
        );
        (out, header)
    }

    #[test]
    fn a_frame_reads_back_as_it_was_written() {
        let (bytes, written) = frame(b"hello");
        let read = decode_header(&bytes, SALT).unwrap();
        assert_eq!(read, written);
        assert_eq!(read.durable_mark, Position::new(8192));
        assert_eq!(read.frame_len(), bytes.len() as u64);
        assert_eq!(verified_body(&bytes, &read), Some(&b"hello"[..]));
        assert_eq!(producer_of(&bytes, &read), Some((producer(), KEYED)));
        let plain = Digest::Plain(77);
        let (old, written) = frame_with(plain, b"hello");
        assert_eq!(producer_of(&old, &written), Some((producer(), plain)));
        let directory = directory_of(&bytes, &read).unwrap();
        assert_eq!(directory.start, Position::new(8192));
        assert_eq!(directory.entries[0].name.as_deref(), Some("flights"));
        assert_eq!(directory.entries[0].frame_len, 64);
    }

    #[test]
    fn every_single_bit_flip_is_seen() {
        let (bytes, header) = frame(b"a body of some bytes");
        let body = header.header_len as usize..header.header_len as usize + 20;
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            match decode_header(&flipped, SALT) {
                None => assert!(bit / 8 < body.start),
                Some(read) => {
                    assert_eq!(read, header, "bit {bit}");
                    let good = verified_body(&flipped, &read).is_some();
                    assert_eq!(good, !body.contains(&(bit / 8)), "bit {bit}");
                }
            }
        }
    }

    #[test]
    fn every_truncation_is_seen() {
        let (bytes, header) = frame(b"a body of some bytes");
        for length in 0..bytes.len() {
            let cut = &bytes[..length];
            let whole = decode_header(cut, SALT)
                .is_some_and(|header| verified_body(cut, &header).is_some());
            assert_eq!(whole, length >= header.header_len as usize + 20, "{length}");
        }
    }

    #[test]
    fn zeros_and_frames_of_another_life_are_no_frames() {
        assert_eq!(decode_header(&[0; 128], 0), None);
        let (bytes, _) = frame(b"x");
        assert_eq!(decode_header(&bytes, SALT + 1), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_without_panic(mut bytes: Vec<u8>, hlen in 8u16..40) {
            bytes.resize(bytes.len().max(80), 0);
            bytes[4..6].copy_from_slice(&hlen.to_le_bytes());
            bytes[6] = HEADER_VERSION;
            bytes[7] = 1 + bytes[7] % 14;
            let reach = (usize::from(hlen) * 8).min(bytes.len());
            let crc = salted_crc32c(SALT, &bytes[4..reach]);
            bytes[..4].copy_from_slice(&crc.to_le_bytes());
            if let Some(header) = decode_header(&bytes, SALT) {
                let _ = verified_body(&bytes, &header);
                let _ = directory_of(&bytes, &header);
                let _ = producer_of(&bytes, &header);
            }
        }
    }
}
