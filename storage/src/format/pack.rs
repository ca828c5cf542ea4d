//! Packs, images and order of a run: encoding and decoding.
//!
//! The header of a pack has its pieces in extension 4. Each piece has these varints: records, arrival less the
//! previous arrival (zigzag), position less the previous position, codec, stored bytes. The CRC-32C of the
//! stored bytes follows (4 bytes). Therefore each piece is verified separately.
//!
//! The body of an order frame has varints. For each piece: position less the previous position, log id, offset
//! of its pack in the run over 8, number of the piece in the pack, and number of records of the log that were
//! dropped right before it. Where nothing of a log is kept, the pack is 0, and the lsn follows at which it continues.

use crate::base::bounds;
use crate::base::ids::{LogId, Lsn, Position, Timestamp};
use crate::base::wire;
use crate::base::wire::Value;
use crate::format::frame;
use crate::format::frame::FrameHeader;

/// A piece of a pack: one former frame of the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) first_lsn: Lsn,
    pub(crate) count: u32,
    pub(crate) arrival: Timestamp,
    /// Position in the journal.
    pub(crate) position: Position,
    pub(crate) codec: u8,
    /// Offset of its stored bytes in the body of the pack.
    pub(crate) offset: u32,
    pub(crate) stored: u32,
    pub(crate) crc: u32,
}

impl Piece {
    pub(crate) fn next_lsn(&self) -> Lsn {
        self.first_lsn.advance(u64::from(self.count))
    }
}

fn zigzag(value: i64) -> u64 {
    (value << 1 ^ value >> 63).cast_unsigned()
}

fn unzigzag(value: u64) -> i64 {
    (value >> 1).cast_signed() ^ -(value & 1).cast_signed()
}

/// Appends the extension that describes the pieces of a pack.
pub(crate) fn put_pieces(out: &mut Vec<u8>, pieces: &[Piece]) {
    let mut payload = Vec::with_capacity(pieces.len() * 20);
    let (mut arrival, mut position) = (0, 0);
    for piece in pieces {
        wire::put_varint(&mut payload, u64::from(piece.count));
        let micros = piece.arrival.micros();
        wire::put_varint(&mut payload, zigzag(micros.wrapping_sub(arrival)));
        wire::put_varint(&mut payload, piece.position.get() - position);
        payload.push(piece.codec);
        wire::put_varint(&mut payload, u64::from(piece.stored));
        payload.extend_from_slice(&piece.crc.to_le_bytes());
        (arrival, position) = (micros, piece.position.get());
    }
    frame::put_extension(out, frame::EXTENSION_PIECES, &payload);
}

/// The pieces of a verified pack, whose bytes are at the front of `bytes`.
pub(crate) fn pieces(bytes: &[u8], header: &FrameHeader) -> Option<Vec<Piece>> {
    let mut input = frame::extension_of(bytes, header, frame::EXTENSION_PIECES)?;
    let mut pieces = Vec::new();
    let (mut arrival, mut position, mut offset) = (0i64, 0u64, 0u32);
    let mut first_lsn = header.first_lsn;
    while !input.is_empty() {
        let count = u32::try_from(wire::take_varint(&mut input)?).ok()?;
        arrival = arrival.wrapping_add(unzigzag(wire::take_varint(&mut input)?));
        position = position.checked_add(wire::take_varint(&mut input)?)?;
        let (codec, rest) = input.split_first()?;
        input = rest;
        let stored = u32::try_from(wire::take_varint(&mut input)?).ok()?;
        let crc = wire::take_bytes(&mut input, 4)?;
        pieces.push(Piece {
            first_lsn,
            count,
            arrival: Timestamp::from_micros(arrival),
            position: bounds::position(position)?,
            codec: *codec,
            offset,
            stored,
            crc: wire::u32_at(crc, 0),
        });
        first_lsn = first_lsn.checked_advance(u64::from(count))?;
        offset = offset.checked_add(stored)?;
    }
    let whole = offset == header.body_len && Some(first_lsn) == header.next_lsn();
    whole.then_some(pieces)
}

/// Records of one log in a file of an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Archived {
    /// The first lsn, and the lsn behind the last. Some between them may be missing.
    pub(crate) first: Lsn,
    pub(crate) next: Lsn,
    pub(crate) records: u64,
    /// Bytes of the bodies as stored.
    pub(crate) bytes: u64,
    /// Arrival of the first and of the last batch.
    pub(crate) from: Timestamp,
    pub(crate) to: Timestamp,
}

impl Archived {
    /// Starts with the first piece.
    pub(crate) fn of(piece: &Piece) -> Self {
        Self {
            first: piece.first_lsn,
            next: piece.next_lsn(),
            records: u64::from(piece.count),
            bytes: u64::from(piece.stored),
            from: piece.arrival,
            to: piece.arrival,
        }
    }

    /// Adds the next piece.
    pub(crate) fn add(&mut self, piece: &Piece) {
        self.next = piece.next_lsn();
        self.records += u64::from(piece.count);
        self.bytes += u64::from(piece.stored);
        self.to = piece.arrival;
    }

    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        wire::put_uint(out, 1, self.first.get());
        wire::put_uint(out, 2, self.next.get());
        wire::put_uint(out, 3, self.records);
        wire::put_uint(out, 4, self.bytes);
        wire::put_fixed64(out, 5, self.from.micros().cast_unsigned());
        wire::put_fixed64(out, 6, self.to.micros().cast_unsigned());
    }

    pub(crate) fn decode(input: &[u8]) -> Option<Self> {
        let mut found = Self {
            first: Lsn::ZERO,
            next: Lsn::ZERO,
            records: 0,
            bytes: 0,
            from: Timestamp::default(),
            to: Timestamp::default(),
        };
        let time = |bits: u64| Timestamp::from_micros(bits.cast_signed());
        for field in wire::fields(input) {
            match field? {
                (1, Value::Varint(lsn)) => found.first = bounds::lsn(lsn)?,
                (2, Value::Varint(lsn)) => found.next = bounds::lsn(lsn)?,
                (3, Value::Varint(records)) => found.records = bounds::offset(records)?,
                (4, Value::Varint(bytes)) => found.bytes = bounds::offset(bytes)?,
                (5, Value::Fixed64(bits)) => found.from = time(bits),
                (6, Value::Fixed64(bits)) => found.to = time(bits),
                _ => {}
            }
        }
        (found.first <= found.next).then_some(found)
    }
}

/// One entry of the order of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OrderEntry {
    /// Position of the piece in the journal.
    pub(crate) position: Position,
    pub(crate) log: LogId,
    /// Offset of its pack, and its number there. `Err`: nothing of the log is kept, and the log continues at this lsn.
    pub(crate) at: Result<(u64, u32), Lsn>,
    /// Number of dropped records of the log right before it.
    pub(crate) dropped: u64,
}

impl OrderEntry {
    /// Appends the entry to a body whose previous entry has `position`.
    pub(crate) fn put(&self, out: &mut Vec<u8>, position: Position) {
        wire::put_varint(out, self.position.since(position));
        wire::put_varint(out, self.log.get());
        match self.at {
            Ok((pack, number)) => {
                wire::put_varint(out, pack / 8);
                wire::put_varint(out, u64::from(number));
                wire::put_varint(out, self.dropped);
            }
            Err(next) => {
                wire::put_varint(out, 0);
                wire::put_varint(out, next.get());
                wire::put_varint(out, self.dropped);
            }
        }
    }
}

/// The entries in the body of a frame of order.
pub(crate) fn entries(mut body: &[u8]) -> impl Iterator<Item = Option<OrderEntry>> {
    let mut position = 0u64;
    let mut next = move |body: &mut &[u8]| {
        position = position.checked_add(wire::take_varint(body)?)?;
        let log = bounds::log(wire::take_varint(body)?)?;
        let pack = bounds::offset(wire::take_varint(body)?.checked_mul(8)?)?;
        let number = wire::take_varint(body)?;
        let at = match pack {
            0 => Err(bounds::lsn(number)?),
            pack => Ok((pack, u32::try_from(number).ok()?)),
        };
        Some(OrderEntry {
            position: bounds::position(position)?,
            log,
            at,
            dropped: wire::take_varint(body)?,
        })
    };
    std::iter::from_fn(move || {
        if body.is_empty() {
            return None;
        }
        let entry = next(&mut body);
        if entry.is_none() {
            body = &[];
        }
        Some(entry)
    })
}

/// Bytes that suffice for the header of almost any pack, including its pieces.
pub(crate) const PACK_HEADER_BYTES: u64 = 8192;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::frame::{FrameHead, FrameKind, HEADER_BYTES, begin, decode_header, finish};
    use proptest::prelude::*;

    fn piece(first: u64, offset: u32) -> Piece {
        Piece {
            first_lsn: Lsn::new(first),
            count: 2,
            arrival: Timestamp::from_micros(-(i64::from(offset))),
            position: Position::new(8192 + u64::from(offset)),
            codec: 1,
            offset,
            stored: 3,
            crc: 0xDEAD_BEEF - offset,
        }
    }

    #[test]
    fn a_pack_tells_its_pieces() {
        let told = [piece(7, 0), piece(9, 3), piece(11, 6)];
        let (mut out, mut extension) = (Vec::new(), Vec::new());
        put_pieces(&mut extension, &told);
        let start = begin(&mut out, &extension);
        out.extend_from_slice(b"abcdefghi");
        let head = FrameHead {
            kind: FrameKind::Pack,
            flags: 0,
            count: 6,
            position: Position::new(1 << 63),
            log_id: LogId::new(5),
            first_lsn: Lsn::new(7),
            arrival: Timestamp::default(),
            durable_mark: Position::ZERO,
            chain: 0,
        };
        finish(&mut out, start, HEADER_BYTES + extension.len(), 9, &head);
        let header = decode_header(&out, 9).unwrap();
        assert_eq!(pieces(&out, &header).unwrap(), told);
    }

    #[test]
    fn order_reads_back() {
        let told = [
            OrderEntry {
                position: Position::new(8192),
                log: LogId::new(1 << 40),
                at: Ok((8192, 3)),
                dropped: 0,
            },
            OrderEntry {
                position: Position::new(9000),
                log: LogId::new(2),
                at: Err(Lsn::new(12)),
                dropped: 12,
            },
        ];
        let (mut body, mut position) = (Vec::new(), Position::ZERO);
        for entry in &told {
            entry.put(&mut body, position);
            position = entry.position;
        }
        let read: Option<Vec<OrderEntry>> = entries(&body).collect();
        assert_eq!(read.unwrap(), told);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes: Vec<u8>) {
            entries(&bytes).for_each(drop);
        }

        #[test]
        fn zigzag_reads_back(value: i64) {
            prop_assert_eq!(unzigzag(zigzag(value)), value);
        }
    }
}
