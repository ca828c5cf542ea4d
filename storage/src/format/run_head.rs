//! The description of a run, in its last frame.

use crate::base::bounds;
use crate::base::ids::{Position, RecoveryEpoch, SegmentId, Timestamp};
use crate::base::wire;
use crate::base::wire::Value;
use crate::format::body::AcceptedLosses;

/// The segments that a run replaces, and the state of the journal at their end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RunHead {
    /// The first segment, its predecessor, and its base.
    pub(crate) first: SegmentId,
    pub(crate) before_first: Option<SegmentId>,
    pub(crate) first_base: Position,
    /// The last segment, and its predecessor.
    pub(crate) last: SegmentId,
    pub(crate) before_last: Option<SegmentId>,
    /// End of the frames of the last segment.
    pub(crate) end: Position,
    /// The position after the last byte of the last segment.
    pub(crate) limit: Position,
    /// Header checksum of the last frame of the last segment.
    pub(crate) chain: u32,
    pub(crate) next_log_counter: u64,
    pub(crate) arrival: Timestamp,
    /// The latest stored time of its logs; `None`: unknown. It may be later than any arrival.
    pub(crate) latest: Option<Timestamp>,
    pub(crate) epoch: RecoveryEpoch,
    /// Epochs that ended in these segments, and the end of the surviving part of each.
    pub(crate) history: Vec<(RecoveryEpoch, Position)>,
    /// The order frames: the first position in each, and its offset.
    pub(crate) order: Vec<(Position, u64)>,
    /// End of the last order frame.
    pub(crate) order_end: u64,
    /// Number of logs with an image, number of records, and bytes of the packs.
    pub(crate) logs: u64,
    pub(crate) records: u64,
    pub(crate) pack_bytes: u64,
    /// Offset of the first frame of images; 0: unknown.
    pub(crate) images_at: u64,
    /// Logs that were deleted up to this segment may be left out. A checkpoint that ends before it would restore them.
    pub(crate) forgotten: Option<SegmentId>,
    /// Accepted losses that links of these segments list, as far as they still matter.
    pub(crate) accepted: Vec<AcceptedLosses>,
    /// The lowest and the highest number of a key of its pieces; 0 is a piece that is not encrypted.
    pub(crate) oldest_key: u64,
    pub(crate) newest_key: u64,
}

impl RunHead {
    /// Bytes of the order frames.
    pub(crate) fn order_bytes(&self) -> u64 {
        let first = self.order.first().map_or(self.order_end, |(_, at)| *at);
        self.order_end.saturating_sub(first)
    }

    /// The head of no segments, which sets no field.
    pub(crate) fn empty() -> Self {
        Self {
            first: SegmentId::new(0),
            before_first: None,
            first_base: Position::ZERO,
            last: SegmentId::new(0),
            before_last: None,
            end: Position::ZERO,
            limit: Position::ZERO,
            chain: 0,
            next_log_counter: 0,
            arrival: Timestamp::default(),
            latest: None,
            epoch: RecoveryEpoch::FIRST,
            history: Vec::new(),
            order: Vec::new(),
            order_end: 0,
            logs: 0,
            records: 0,
            pack_bytes: 0,
            images_at: 0,
            forgotten: None,
            accepted: Vec::new(),
            oldest_key: 0,
            newest_key: 0,
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        wire::put_uint(&mut out, 1, self.first.get());
        wire::put_uint(&mut out, 2, self.before_first.map_or(0, SegmentId::get));
        wire::put_uint(&mut out, 3, self.first_base.get());
        wire::put_uint(&mut out, 4, self.last.get());
        wire::put_uint(&mut out, 5, self.before_last.map_or(0, SegmentId::get));
        wire::put_uint(&mut out, 6, self.end.get());
        wire::put_uint(&mut out, 7, self.limit.get());
        wire::put_fixed32(&mut out, 8, self.chain);
        wire::put_uint(&mut out, 9, self.next_log_counter);
        wire::put_fixed64(&mut out, 10, self.arrival.micros().cast_unsigned());
        wire::put_uint(&mut out, 11, self.epoch.get());
        let mut part = Vec::new();
        for (epoch, end) in &self.history {
            part.clear();
            wire::put_varint(&mut part, epoch.get());
            wire::put_varint(&mut part, end.get());
            wire::put_bytes(&mut out, 12, &part);
        }
        part.clear();
        let (mut position, mut offset) = (0, 0);
        for (first, at) in &self.order {
            wire::put_varint(&mut part, first.get() - position);
            wire::put_varint(&mut part, at - offset);
            (position, offset) = (first.get(), *at);
        }
        wire::put_bytes(&mut out, 13, &part);
        wire::put_uint(&mut out, 14, self.order_end);
        wire::put_uint(&mut out, 15, self.records);
        wire::put_uint(&mut out, 16, self.pack_bytes);
        wire::put_uint(&mut out, 18, self.logs);
        wire::put_uint(&mut out, 19, self.images_at);
        wire::put_uint(&mut out, 17, self.forgotten.map_or(0, SegmentId::get));
        for accepted in &self.accepted {
            wire::put_bytes(&mut out, 20, &accepted.encode());
        }
        wire::put_uint(&mut out, 21, self.oldest_key);
        wire::put_uint(&mut out, 22, self.newest_key);
        if let Some(latest) = self.latest {
            wire::put_fixed64(&mut out, 23, latest.micros().cast_unsigned());
        }
        out
    }

    pub(crate) fn decode(input: &[u8]) -> Option<Self> {
        let mut head = Self::empty();
        for field in wire::fields(input) {
            match field? {
                (1, Value::Varint(id)) => head.first = bounds::segment(id)?,
                (2, Value::Varint(id)) => head.before_first = Some(bounds::segment(id)?),
                (3, Value::Varint(base)) => head.first_base = bounds::position(base)?,
                (4, Value::Varint(id)) => head.last = bounds::segment(id)?,
                (5, Value::Varint(id)) => head.before_last = Some(bounds::segment(id)?),
                (6, Value::Varint(end)) => head.end = bounds::position(end)?,
                (7, Value::Varint(limit)) => head.limit = bounds::position(limit)?,
                (8, Value::Fixed32(chain)) => head.chain = chain,
                (9, Value::Varint(counter)) => head.next_log_counter = bounds::counter(counter)?,
                (10, Value::Fixed64(time)) => {
                    head.arrival = Timestamp::from_micros(time.cast_signed());
                }
                (11, Value::Varint(epoch)) => head.epoch = bounds::epoch(epoch)?,
                (12, Value::Bytes(mut part)) => {
                    let epoch = bounds::epoch(wire::take_varint(&mut part)?)?;
                    let end = bounds::position(wire::take_varint(&mut part)?)?;
                    head.history.push((epoch, end));
                }
                (13, Value::Bytes(part)) => head.order = order(part)?,
                (14, Value::Varint(end)) => head.order_end = bounds::offset(end)?,
                (15, Value::Varint(records)) => head.records = bounds::records(records)?,
                (16, Value::Varint(bytes)) => head.pack_bytes = bounds::offset(bytes)?,
                (18, Value::Varint(logs)) => head.logs = bounds::records(logs)?,
                (19, Value::Varint(at)) => head.images_at = bounds::offset(at)?,
                (17, Value::Varint(id)) => head.forgotten = Some(bounds::segment(id)?),
                (20, Value::Bytes(part)) => head.accepted.push(AcceptedLosses::decode(part)?),
                (21, Value::Varint(key)) => head.oldest_key = key,
                (22, Value::Varint(key)) => head.newest_key = key,
                (23, Value::Fixed64(time)) => {
                    head.latest = Some(Timestamp::from_micros(time.cast_signed()));
                }
                _ => {}
            }
        }
        let sound = head.first <= head.last && head.first_base < head.limit;
        (sound && head.end <= head.limit).then_some(head)
    }
}

fn order(mut part: &[u8]) -> Option<Vec<(Position, u64)>> {
    let mut order = Vec::new();
    let (mut position, mut offset) = (0u64, 0u64);
    while !part.is_empty() {
        position = position.checked_add(wire::take_varint(&mut part)?)?;
        offset = offset.checked_add(wire::take_varint(&mut part)?)?;
        order.push((bounds::position(position)?, bounds::offset(offset)?));
    }
    Some(order)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ids::{LogId, Lsn};

    #[test]
    fn a_head_reads_back() {
        let head = RunHead {
            first: SegmentId::new(4),
            before_first: Some(SegmentId::new(2)),
            first_base: Position::new(1 << 33),
            last: SegmentId::new(9),
            before_last: Some(SegmentId::new(8)),
            end: Position::new((1 << 34) - 9),
            limit: Position::new(1 << 34),
            chain: 77,
            next_log_counter: 12,
            arrival: Timestamp::from_micros(-4),
            latest: Some(Timestamp::from_micros(-3)),
            epoch: RecoveryEpoch::new(3),
            history: vec![(RecoveryEpoch::new(2), Position::new(1 << 33))],
            order: vec![(Position::new(5), 8192), (Position::new(900), 9000)],
            order_end: 9100,
            logs: 8,
            records: 17,
            pack_bytes: 4000,
            images_at: 9000,
            forgotten: Some(SegmentId::new(3)),
            accepted: vec![AcceptedLosses {
                before: Position::new(1 << 33),
                lost: vec![(LogId::new(7), Lsn::new(1), Lsn::new(4))],
                ..AcceptedLosses::default()
            }],
            oldest_key: 3,
            newest_key: 1 << 40,
        };
        let bytes = head.encode();
        assert_eq!(RunHead::decode(&bytes), Some(head));
        for end in 0..bytes.len() {
            // A cut head is refused or read as a shorter one. It never panics.
            let _shorter = RunHead::decode(&bytes[..end]);
        }
    }
}
