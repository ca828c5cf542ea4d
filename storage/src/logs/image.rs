//! State of one log at a place of the journal: the closing state in the index of a segment that touched
//! the log, and the entry of the log in a checkpoint.

use std::sync::Arc;

use crate::api::record::LogConfig;
use crate::base::bounds;
use crate::base::ids::{LogId, LogName, Lsn, Position, SegmentId, Timestamp};
use crate::base::wire;
use crate::base::wire::Value;
use crate::format::body;
use crate::format::chain::{Chain, SegmentNode};
use crate::format::pack::Archived;
use crate::logs::extras::ExtrasImage;
use crate::logs::producers::Producers;
use crate::logs::{FirstKept, Lost};

/// Everything that a start needs to know about a log.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Image {
    pub(crate) id: LogId,
    /// `None` if damage removed the name.
    pub(crate) name: Option<LogName>,
    pub(crate) next: Lsn,
    /// The first record kept, and the number of records below it that retention expired.
    pub(crate) kept: FirstKept,
    /// Stored time of the newest record.
    pub(crate) last_time: Timestamp,
    pub(crate) created_end: Position,
    pub(crate) last_end: Position,
    pub(crate) create_time: Timestamp,
    pub(crate) update_time: Timestamp,
    pub(crate) stored_bytes: u64,
    pub(crate) deleted: bool,
    pub(crate) config: Arc<LogConfig>,
    /// The segment that touched the log last.
    pub(crate) touched_in: Option<SegmentId>,
    pub(crate) created_in: Option<SegmentId>,
    /// The sealed segments that hold records of the log.
    pub(crate) chain: Chain,
    /// Writer epoch, producers, cursors.
    pub(crate) extras: Option<Box<ExtrasImage>>,
    /// Records that damage removed, in order. The index of a segment or run lists its own losses, a
    /// checkpoint lists all.
    pub(crate) lost: Vec<Lost>,
}

/// Field of the records that damage removed.
const LOST: u32 = 21;

impl Image {
    /// Keeps only the changes of producers since a position, as indexes do. Returns all producers, if
    /// there are any.
    pub(crate) fn keep_changes(&mut self, since: Position) -> Option<Producers> {
        let extras = self.extras.as_deref_mut()?;
        let changes = extras.producers.since(since);
        Some(std::mem::replace(&mut extras.producers, changes))
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        wire::put_uint(out, 1, self.id.get());
        if let Some(name) = &self.name {
            wire::put_bytes(out, 2, name.as_str().as_bytes());
        }
        wire::put_uint(out, 3, self.next.get());
        wire::put_uint(out, 4, self.kept.first.get());
        for (field, time) in [
            (5, self.last_time),
            (6, self.create_time),
            (7, self.update_time),
        ] {
            wire::put_fixed64(out, field, time.micros().cast_unsigned());
        }
        wire::put_uint(out, 8, self.created_end.get());
        wire::put_uint(out, 9, self.last_end.get());
        wire::put_uint(out, 10, self.stored_bytes);
        wire::put_uint(out, 11, u64::from(self.deleted));
        let mut part = Vec::new();
        body::put_config(&mut part, &self.config);
        if !part.is_empty() {
            wire::put_bytes(out, 12, &part);
        }
        wire::put_uint(out, 13, self.touched_in.map_or(0, SegmentId::get));
        wire::put_uint(out, 14, self.created_in.map_or(0, SegmentId::get));
        part.clear();
        for node in self.chain.roots() {
            wire::put_varint(&mut part, node.base.get());
            wire::put_varint(&mut part, u64::from(node.size));
        }
        if !part.is_empty() {
            wire::put_bytes(out, 15, &part);
        }
        if let Some(extras) = &self.extras {
            extras.encode(out);
        }
        wire::put_uint(out, 19, self.kept.expired);
        wire::put_uint(out, 24, self.kept.bytes);
        for lost in &self.lost {
            part.clear();
            lost.put(&mut part);
            wire::put_bytes(out, LOST, &part);
        }
    }

    pub(crate) fn decode(input: &[u8]) -> Option<Self> {
        let mut image = Self {
            id: LogId::new(0),
            name: None,
            next: Lsn::ZERO,
            kept: FirstKept::default(),
            last_time: Timestamp::default(),
            created_end: Position::ZERO,
            last_end: Position::ZERO,
            create_time: Timestamp::default(),
            update_time: Timestamp::default(),
            stored_bytes: 0,
            deleted: false,
            config: LogConfig::default().shared(),
            touched_in: None,
            created_in: None,
            chain: Chain::default(),
            extras: None,
            lost: Vec::new(),
        };
        let mut extras = ExtrasImage::default();
        let segment = |id| Some(Some(bounds::segment(id)?).filter(|id| id.get() != 0));
        let time = |bits: u64| Timestamp::from_micros(bits.cast_signed());
        for field in wire::fields(input) {
            match field? {
                (1, Value::Varint(id)) => image.id = bounds::log(id)?,
                (2, Value::Bytes(name)) => {
                    image.name = Some(LogName::new(std::str::from_utf8(name).ok()?).ok()?);
                }
                (3, Value::Varint(lsn)) => image.next = bounds::lsn(lsn)?,
                (4, Value::Varint(lsn)) => image.kept.first = bounds::lsn(lsn)?,
                (5, Value::Fixed64(bits)) => image.last_time = time(bits),
                (6, Value::Fixed64(bits)) => image.create_time = time(bits),
                (7, Value::Fixed64(bits)) => image.update_time = time(bits),
                (8, Value::Varint(end)) => image.created_end = bounds::place(end)?,
                (9, Value::Varint(end)) => image.last_end = bounds::place(end)?,
                (10, Value::Varint(bytes)) => image.stored_bytes = bounds::records(bytes)?,
                (11, Value::Varint(flag)) => image.deleted = flag != 0,
                (12, Value::Bytes(config)) => image.config = body::config(config)?.shared(),
                (13, Value::Varint(id)) => image.touched_in = segment(id)?,
                (14, Value::Varint(id)) => image.created_in = segment(id)?,
                (15, Value::Bytes(roots)) => image.chain = chain(roots)?,
                (19, Value::Varint(records)) => image.kept.expired = bounds::records(records)?,
                (24, Value::Varint(bytes)) => image.kept.bytes = bounds::records(bytes)?,
                (LOST, Value::Bytes(lost)) => image.lost.push(Lost::decode(lost)?),
                (field, value) => extras.take(field, value)?,
            }
        }
        image.extras = (!extras.is_empty()).then(|| Box::new(extras));
        Some(image)
    }
}

/// Stored bytes in an encoded image, read without the rest.
pub(crate) fn stored_bytes(input: &[u8]) -> Option<u64> {
    let mut found = 0;
    for field in wire::fields(input) {
        if let (10, Value::Varint(bytes)) = field? {
            found = bounds::records(bytes)?;
        }
    }
    Some(found)
}

fn chain(mut input: &[u8]) -> Option<Chain> {
    let mut chain = Chain::default();
    while !input.is_empty() {
        chain.put_root(SegmentNode {
            base: bounds::place(wire::take_varint(&mut input)?)?,
            // Two trees of the same size form one of twice that size plus one.
            size: u32::try_from(bounds::segment(wire::take_varint(&mut input)?)?.get()).ok()?,
        });
    }
    Some(chain)
}

/// State of one log at the end of a run, and its next lsn before the run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Images {
    pub(crate) image: Image,
    /// Its next lsn before the run.
    pub(crate) before: Lsn,
    /// The records that a file of an archive has of the log. `None` in a run.
    pub(crate) archived: Option<Archived>,
}

/// Appends the entry of one log in a frame of images: its encoded image, its next lsn before the run, and its
/// records in a file of an archive.
pub(crate) fn put_images(
    out: &mut Vec<u8>,
    image: &[u8],
    before: Lsn,
    archived: Option<&Archived>,
) {
    let (mut part, mut told) = (Vec::with_capacity(image.len() + 16), Vec::new());
    wire::put_bytes(&mut part, 1, image);
    wire::put_uint(&mut part, 2, before.get());
    if let Some(archived) = archived {
        archived.put(&mut told);
        wire::put_bytes(&mut part, 3, &told);
    }
    wire::put_bytes(out, 1, &part);
}

impl Images {
    /// Decodes the images in the body of a frame.
    pub(crate) fn decode(body: &[u8]) -> Option<Vec<Self>> {
        let mut found = Vec::new();
        for field in wire::fields(body) {
            let (1, Value::Bytes(part)) = field? else {
                continue;
            };
            let (mut image, mut before, mut archived) = (None, Lsn::ZERO, None);
            for field in wire::fields(part) {
                match field? {
                    (1, Value::Bytes(bytes)) => image = Some(Image::decode(bytes)?),
                    (2, Value::Varint(lsn)) => before = bounds::lsn(lsn)?,
                    (3, Value::Bytes(bytes)) => archived = Some(Archived::decode(bytes)?),
                    _ => {}
                }
            }
            found.push(Self {
                image: image?,
                before,
                archived,
            });
        }
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::record::{Compression, Producer, SyncMode};
    use crate::base::ids::Name;
    use crate::format::digest::Digest;
    use crate::logs::extras::Mark;
    use crate::logs::producers::Remembered;

    fn extras() -> ExtrasImage {
        let mut extras = ExtrasImage {
            writer_epoch: 9,
            ..ExtrasImage::default()
        };
        let mark = Mark {
            lsn: Lsn::new(4),
            time: Timestamp::from_micros(-9),
        };
        extras.cursors.insert(Name::new("c").unwrap(), mark);
        let producer = Producer {
            id: Name::new("p").unwrap(),
            epoch: 2,
            sequence: 0,
        };
        let batch = Remembered {
            digest: Digest::Keyed(7),
            ..Remembered::default()
        };
        extras.producers.remember(&producer, batch, 10);
        extras
    }

    #[test]
    fn an_image_reads_back() {
        let mut chain = Chain::default();
        for base in 0..11 {
            chain.push(Position::new(base << 40));
        }
        let image = Image {
            id: LogId::new(7 << 40 | 9),
            name: Some(LogName::new("flights/é").unwrap()),
            next: Lsn::new(bounds::LSNS - 1),
            kept: FirstKept {
                first: Lsn::new(3),
                expired: 2,
                bytes: 50,
            },
            last_time: Timestamp::from_micros(i64::MIN),
            created_end: Position::new(1),
            last_end: Position::new(2),
            create_time: Timestamp::from_micros(-5),
            update_time: Timestamp::from_micros(5),
            stored_bytes: 99,
            deleted: true,
            config: Arc::new(LogConfig {
                sync_mode: Some(SyncMode::Manual),
                compression: Some(Compression::Lz4),
                max_record_bytes: Some(10),
                retention: Some(Box::default()),
            }),
            touched_in: Some(SegmentId::new(4)),
            created_in: None,
            chain,
            extras: Some(Box::new(extras())),
            lost: vec![Lost {
                from: Lsn::new(5),
                to: Lsn::new(9),
                position: Position::new(1 << 40),
                accepted: true,
            }],
        };
        let mut bytes = Vec::new();
        image.encode(&mut bytes);
        assert_eq!(Image::decode(&bytes), Some(image));
        assert_eq!(stored_bytes(&bytes), Some(99));
        for end in 0..bytes.len() {
            // A shortened image is refused or decoded with fewer fields, and never causes a panic.
            let _shorter = Image::decode(&bytes[..end]);
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_decoded_without_panic(bytes: Vec<u8>) {
            let _images = Images::decode(&bytes);
        }
    }
}
