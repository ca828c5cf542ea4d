//! The index of one sealed segment, as its file holds it: the logs that the segment touches, the places
//! of their frames, and their state at the end of the segment.
//!
//! ```text
//! 0       8         12      16           24     32     40    48      52     56        60      64
//! +-------+---------+-------+------------+------+------+-----+-------+------+---------+-------+
//! | magic | version | flags | segment id | salt | base | end | chain | rows | entries | zeros |
//! +-------+---------+-------+------------+------+------+-----+-------+------+---------+-------+
//! +------------------+---------------------+--------+-----+
//! | rows, 64 B each, | entries, 16 B each, | images | crc |
//! | by log id        | by log id and lsn   |        |     |
//! +------------------+---------------------+--------+-----+
//!
//! row:   log id, first lsn, next lsn, last time, newer, older (8 B each; see the chain),
//!        first entry, entries, image at, image bytes (4 B each)
//! entry: offset in the segment, lsn less the row's first lsn, records, frame bytes (4 B each)
//! ```

use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::large::LargeIndex;
use super::pages::{Pages, Part, Readers};
use crate::base::bounds;
use crate::base::crc::crc32c;
use crate::base::ids::{LogId, Lsn, Position, SegmentId, Timestamp};
use crate::base::wire::{u32_at, u64_at};
use crate::disk::Disk;
use crate::format::active::Place;
use crate::format::address;
use crate::format::chain::{Below, Chain};
use crate::format::frame::RunningCrc;
use crate::format::life::Life;
use crate::logs::Lost;
use crate::logs::extras::producers_in;
use crate::logs::image::Image;
use crate::logs::producers::Producers;

const MAGIC: [u8; 8] = *b"WALDIDX\0";
const VERSION: u32 = 1;
pub(super) const HEADER: usize = 64;
pub(super) const ROW: usize = 64;
pub(super) const ENTRY: usize = 16;
/// Value for "nothing below": no segment has this base.
const NONE: u64 = u64::MAX;

/// Name of a segment's index file. Its directory is separate, and no start lists it.
pub(crate) fn index_path(id: SegmentId) -> String {
    format!("index/{id}.idx")
}

/// Name of an index file while it is written.
pub(crate) fn unfinished_path(id: SegmentId) -> String {
    format!("index/{id}.idx.new")
}

/// Name of an index that was set aside because its segment is damaged. It keeps lost facts.
pub(crate) fn old_path(id: SegmentId) -> String {
    format!("index/{id}.old")
}

/// The id in the name of an index that was set aside.
pub(crate) fn old_id(name: &str) -> Option<SegmentId> {
    bounds::named(name, ".old")
}

/// The id in an index file's name.
pub(crate) fn index_id(name: &str) -> Option<SegmentId> {
    bounds::named(name, ".idx")
}

/// Decodes an index file; `None` if it is damaged, or of another version.
pub(crate) fn decode_index(bytes: Vec<u8>) -> Option<SealedIndex> {
    SealedIndex::decode(Bytes::from(bytes))
}

/// One log's part of a segment, for a new index.
pub(crate) struct NewRow {
    pub(crate) image: Image,
    pub(crate) places: Vec<Place>,
    pub(crate) below: Option<Below>,
}

/// One log's part of a segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) log_id: LogId,
    /// First lsn of the log in the segment; the log's next lsn if the segment holds none.
    pub(crate) first_lsn: Lsn,
    /// The log's next lsn at the end of the segment.
    pub(crate) next_lsn: Lsn,
    /// Stored time of the log's newest record at the end of the segment.
    pub(crate) last_time: Timestamp,
    pub(crate) below: Option<Below>,
    first_entry: u32,
    entries: u32,
    image_at: u32,
    image_bytes: u32,
}

/// Reads a row.
pub(super) fn row(bytes: &[u8]) -> Row {
    let long = |field: usize| u64_at(bytes, field * 8);
    let short = |field: usize| u32_at(bytes, 48 + field * 4);
    // Sums of these must not overflow, whatever the file says. Values out of range find nothing.
    let lsn = |field| Lsn::new(long(field).min(bounds::LSNS));
    let base = |field| bounds::place(long(field)).unwrap_or(Position::ZERO);
    let below = (long(4) != NONE).then(|| Below {
        newer: base(4),
        older: base(5),
    });
    Row {
        log_id: LogId::new(long(0)),
        first_lsn: lsn(1),
        next_lsn: lsn(2),
        last_time: Timestamp::from_micros(long(3).cast_signed()),
        below,
        first_entry: short(0),
        entries: short(1),
        image_at: short(2),
        image_bytes: short(3),
    }
}

impl Row {
    /// Replaces a row that could not be read: of no log, without entries.
    const UNREAD: Self = Self {
        log_id: LogId::new(u64::MAX),
        first_lsn: Lsn::ZERO,
        next_lsn: Lsn::ZERO,
        last_time: Timestamp::from_micros(0),
        below: None,
        first_entry: 0,
        entries: 0,
        image_at: u32::MAX,
        image_bytes: u32::MAX,
    };

    /// The row's entries, as indexes into all entries.
    pub(super) fn entries_at(&self) -> Range<usize> {
        let first = self.first_entry as usize;
        first..first + self.entries as usize
    }

    /// The row's image, as a range of the bytes of all images.
    pub(super) fn image_at(&self) -> Range<usize> {
        let from = self.image_at as usize;
        from..from + self.image_bytes as usize
    }
}

/// The bytes of an index.
#[derive(Debug, Clone)]
enum Data {
    Whole(Bytes),
    Paged(Arc<Pages>),
}

/// The header of an index file.
#[derive(Debug, Clone, Copy)]
pub(super) struct IndexHead {
    segment: SegmentId,
    salt: u64,
    pub(super) base: Position,
    end: Position,
    chain: u32,
    rows: usize,
    entries: usize,
}

impl IndexHead {
    /// Decodes the header of a file; `None` if it is invalid or of another version.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < HEADER || bytes[..8] != MAGIC {
            return None;
        }
        let number = |at| u32_at(bytes, at);
        if number(8) != VERSION || number(12) != 0 {
            return None;
        }
        Some(Self {
            segment: bounds::segment(u64_at(bytes, 16))?,
            salt: u64_at(bytes, 24),
            base: bounds::place(u64_at(bytes, 32))?,
            end: bounds::place(u64_at(bytes, 40))?,
            chain: number(48),
            rows: number(52) as usize,
            entries: number(56) as usize,
        })
    }

    pub(super) fn segment(&self) -> SegmentId {
        self.segment
    }

    /// Whether the index belongs to this life of a segment.
    pub(super) fn is_of(&self, life: &Life, base: Position) -> bool {
        (self.segment, self.salt, self.base) == (life.id, life.salt, base)
    }

    /// Offset of the entries in the file.
    pub(super) fn entries(&self) -> usize {
        HEADER + self.rows * ROW
    }

    /// Offset of the images in the file.
    pub(super) fn images(&self) -> usize {
        self.entries() + self.entries * ENTRY
    }
}

/// The index of one sealed segment, in memory or read from its file part by part.
#[derive(Debug, Clone)]
pub(crate) struct SealedIndex {
    data: Data,
    pub(crate) segment: SegmentId,
    salt: u64,
    pub(crate) base: Position,
    /// End of the segment's frames.
    pub(crate) end: Position,
    /// Header checksum of the segment's last frame.
    pub(crate) chain: u32,
    rows: usize,
    entries: usize,
    /// Whether it was made from its segment's frames alone, without the trees below its rows.
    partial: bool,
}

impl SealedIndex {
    /// Builds the index of a segment from rows by log id. Takes one row at a time, since there may be
    /// hundreds of thousands.
    ///
    /// # Panics
    /// Never for a segment of at most 4 GiB: its contents are counted in 32 bits.
    pub(crate) fn build(
        life: &Life,
        base: Position,
        end: Position,
        chain: u32,
        new: impl ExactSizeIterator<Item = NewRow>,
    ) -> Self {
        let mut builder = IndexBuilder::new(base, new.len());
        let mut before = None;
        for mut row in new {
            debug_assert!(before.replace(row.image.id) < Some(row.image.id));
            if !address::is_address(base) {
                // Indexes of earlier segments list their own losses.
                let limit = base.advance(life.size);
                let lost = &mut row.image.lost;
                lost.retain(|lost| base <= lost.position && lost.position < limit);
            }
            builder.push(row);
        }
        builder.finish(life, end, chain).into_index()
    }

    /// Returns this index with further lost records of each log, as `lost` lists them. `None` if an
    /// image cannot be read.
    pub(crate) fn with_lost(&self, life: &Life, lost: impl Fn(LogId) -> Vec<Lost>) -> Option<Self> {
        let rows = self.rows().map(|row| {
            let image = self.image(&row)?;
            let mut all = lost(row.log_id);
            for old in &image.lost {
                let is_new = !all.iter().any(|l| l.from <= old.from && old.to <= l.to);
                all.extend(is_new.then_some(*old));
            }
            all.sort_unstable_by_key(|lost| lost.from);
            Some(NewRow {
                image: Image { lost: all, ..image },
                places: self.entries(&row).from(0).collect(),
                below: row.below,
            })
        });
        let rows = rows.collect::<Option<Vec<_>>>()?;
        let (base, end, chain) = (self.base, self.end, self.chain);
        Some(Self::build(life, base, end, chain, rows.into_iter()))
    }

    /// Marks the index as made from the frames of its segment alone.
    pub(crate) fn into_partial(self) -> Self {
        Self {
            partial: true,
            ..self
        }
    }

    /// Whether the index knows only its own segment, so that it must not be written.
    pub(crate) fn is_partial(&self) -> bool {
        self.partial
    }

    /// Decodes an index; `None` if it is damaged, or of another version.
    pub(crate) fn decode(bytes: Bytes) -> Option<Self> {
        let (whole, crc) = bytes.split_at_checked(bytes.len().checked_sub(4)?)?;
        let head = IndexHead::decode(whole)?;
        if head.images() > whole.len() || crc32c(whole).to_le_bytes() != *crc {
            return None;
        }
        Some(Self::with(&head, Data::Whole(bytes)))
    }

    /// Makes an index of a file that was found good. Only windows of the file are in memory. Callers
    /// read log by log, in the order of their ids.
    pub(super) fn paged(
        large: Arc<LargeIndex>,
        disk: Arc<dyn Disk>,
        readers: Arc<Readers>,
    ) -> Self {
        let head = *large.head();
        let pages = Pages::new(large, disk, readers);
        Self::with(&head, Data::Paged(Arc::new(pages)))
    }

    fn with(head: &IndexHead, data: Data) -> Self {
        Self {
            data,
            segment: head.segment,
            salt: head.salt,
            base: head.base,
            end: head.end,
            chain: head.chain,
            rows: head.rows,
            entries: head.entries,
            partial: false,
        }
    }

    /// Makes an index of one log alone, for reading only: one row, its entries, its image.
    pub(super) fn of_one(
        head: &IndexHead,
        raw: &[u8],
        entries: &[u8],
        image: &[u8],
    ) -> (Self, Row) {
        let row = Row {
            first_entry: 0,
            image_at: 0,
            ..row(raw)
        };
        let mut bytes = vec![0; HEADER];
        bytes.extend_from_slice(raw);
        for (field, at) in [48, 56].into_iter().zip([row.first_entry, row.image_at]) {
            bytes[HEADER + field..][..4].copy_from_slice(&at.to_le_bytes());
        }
        bytes.extend_from_slice(entries);
        bytes.extend_from_slice(image);
        bytes.extend_from_slice(&[0; 4]);
        let head = IndexHead {
            rows: 1,
            entries: entries.len() / ENTRY,
            ..*head
        };
        (Self::with(&head, Data::Whole(bytes.into())), row)
    }

    /// The bytes of the file.
    ///
    /// # Panics
    /// If the index is not in memory: such an index is only read.
    pub(crate) fn bytes(&self) -> &Bytes {
        match &self.data {
            Data::Whole(bytes) => bytes,
            Data::Paged(_) => panic!("an index that is read part by part is not in memory"),
        }
    }

    /// Size of the file in bytes.
    pub(crate) fn file_bytes(&self) -> u64 {
        match &self.data {
            Data::Whole(bytes) => bytes.len() as u64,
            Data::Paged(pages) => pages.file_bytes(),
        }
    }

    /// Reports whether all reads since the file was opened succeeded. A part that could not be read
    /// looks like a log that the index does not have.
    ///
    /// # Errors
    /// The first error; `InvalidData` if the file changed.
    pub(crate) fn check_reads(&self) -> io::Result<()> {
        match &self.data {
            Data::Whole(_) => Ok(()),
            Data::Paged(pages) => pages.check(),
        }
    }

    fn part(&self, part: Part, from: usize, length: usize) -> Option<Bytes> {
        match &self.data {
            Data::Whole(bytes) => {
                let end = from.checked_add(length)?;
                (end <= bytes.len()).then(|| bytes.slice(from..end))
            }
            Data::Paged(pages) => pages.get(part, from, length),
        }
    }

    /// Whether the index belongs to this life of a segment.
    pub(crate) fn is_of(&self, life: &Life, base: Position) -> bool {
        (self.segment, self.salt, self.base) == (life.id, life.salt, base)
    }

    /// Number of rows.
    pub(crate) fn len(&self) -> usize {
        self.rows
    }

    /// Number of entries of all rows.
    pub(crate) fn entries_len(&self) -> usize {
        self.entries
    }

    /// Returns a row by its number.
    ///
    /// # Panics
    /// If the number is beyond the last row.
    pub(crate) fn row_at(&self, index: usize) -> Row {
        assert!(index < self.rows, "a row that there is");
        match &self.data {
            Data::Whole(bytes) => row(&bytes[HEADER + index * ROW..][..ROW]),
            Data::Paged(pages) => match pages.get(Part::Rows, HEADER + index * ROW, ROW) {
                Some(bytes) => row(&bytes),
                None => Row::UNREAD,
            },
        }
    }

    /// All rows, by log id.
    pub(crate) fn rows(&self) -> impl ExactSizeIterator<Item = Row> + '_ {
        (0..self.rows).map(|index| self.row_at(index))
    }

    /// Returns the row of a log, if there is one.
    pub(crate) fn row(&self, log: LogId) -> Option<Row> {
        let (mut low, mut high) = match &self.data {
            Data::Whole(_) => (0, self.rows),
            Data::Paged(pages) => pages.rows_near(log),
        };
        let end = high;
        while low < high {
            let middle = low + (high - low) / 2;
            if self.row_at(middle).log_id < log {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        (low < end)
            .then(|| self.row_at(low))
            .filter(|row| row.log_id == log)
    }

    /// Returns the places of a row's frames.
    pub(crate) fn entries(&self, row: &Row) -> Entries {
        let at = row.entries_at();
        let (first, end) = (at.start.min(self.entries), at.end.min(self.entries));
        let all = HEADER + self.rows * ROW;
        let bytes = self.part(
            Part::Entries,
            all + first * ENTRY,
            end.saturating_sub(first) * ENTRY,
        );
        Entries {
            bytes: bytes.unwrap_or_default(),
            base: self.base,
            first_lsn: row.first_lsn,
        }
    }

    /// Returns the state of a row's log at the end of the segment.
    pub(crate) fn image(&self, row: &Row) -> Option<Image> {
        Image::decode(&self.image_bytes(row)?)
    }

    /// Returns the stored bytes of a row's log at the end of the segment.
    pub(crate) fn stored_bytes(&self, row: &Row) -> Option<u64> {
        crate::logs::image::stored_bytes(&self.image_bytes(row)?)
    }

    /// Returns the changes of producers in the segment or run of a row. `None` if they cannot be read.
    pub(crate) fn producers(&self, row: &Row) -> Option<Producers> {
        producers_in(&self.image_bytes(row)?)
    }

    fn image_bytes(&self, row: &Row) -> Option<Bytes> {
        let images = HEADER + self.rows * ROW + self.entries * ENTRY;
        let end = usize::try_from(self.file_bytes()).ok()?.checked_sub(4)?;
        let at = row.image_at();
        let (from, to) = (images.checked_add(at.start)?, images.checked_add(at.end)?);
        (to <= end).then(|| self.part(Part::Images, from, to - from))?
    }
}

/// An index that is being built row by row.
pub(crate) struct IndexBuilder {
    base: Position,
    rows: Vec<u8>,
    entries: Vec<u8>,
    images: Vec<u8>,
}

impl IndexBuilder {
    /// An index of about `rows` rows. Mostly the room made here suffices: buffers that grow leave holes
    /// in memory.
    pub(crate) fn new(base: Position, rows: usize) -> Self {
        Self {
            base,
            rows: Vec::with_capacity(rows * ROW),
            entries: Vec::with_capacity(rows * ENTRY),
            images: Vec::with_capacity(rows * 96),
        }
    }

    /// Adds the next row. Rows come in the order of their log ids.
    pub(crate) fn push(&mut self, mut row: NewRow) {
        let count = |number: usize| u32::try_from(number).expect("a segment is at most 4 GiB");
        let image_at = self.images.len();
        if !address::is_address(self.base) {
            // The rows themselves form the chain.
            row.image.chain = Chain::default();
        }
        row.image.encode(&mut self.images);
        let first = row
            .places
            .first()
            .map_or(row.image.next, |place| place.first_lsn);
        let last_time = row.image.last_time.micros().cast_unsigned();
        for number in [
            row.image.id.get(),
            first.get(),
            row.image.next.get(),
            last_time,
            row.below.map_or(NONE, |below| below.newer.get()),
            row.below.map_or(NONE, |below| below.older.get()),
        ] {
            self.rows.extend_from_slice(&number.to_le_bytes());
        }
        let image_bytes = self.images.len() - image_at;
        let entry = self.entries.len() / ENTRY;
        for number in [entry, row.places.len(), image_at, image_bytes] {
            self.rows.extend_from_slice(&count(number).to_le_bytes());
        }
        for place in &row.places {
            let offset = u32::try_from(place.position.since(self.base)).unwrap_or(u32::MAX);
            let lsn = u32::try_from(place.first_lsn.since(first)).unwrap_or(u32::MAX);
            for number in [offset, lsn, place.count, place.frame_len] {
                self.entries.extend_from_slice(&number.to_le_bytes());
            }
        }
    }

    /// The encoded images, in order of the rows.
    pub(crate) fn images(&self) -> impl Iterator<Item = &[u8]> {
        let rows = self.rows.chunks_exact(ROW);
        rows.filter_map(|bytes| self.images.get(row(bytes).image_at()))
    }

    /// The latest stored time of its logs.
    pub(crate) fn latest(&self) -> Option<Timestamp> {
        let rows = self.rows.chunks_exact(ROW);
        rows.map(|bytes| row(bytes).last_time).max()
    }

    /// Completes the index after its last row.
    pub(crate) fn finish(self, life: &Life, end: Position, chain: u32) -> IndexFile {
        let count = |number: usize| u32::try_from(number).expect("a segment is at most 4 GiB");
        let (rows, entries) = (self.rows.len() / ROW, self.entries.len() / ENTRY);
        let mut out = Vec::with_capacity(HEADER);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&0u32.to_le_bytes());
        for number in [life.id.get(), life.salt, self.base.get(), end.get()] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        for number in [chain, count(rows), count(entries), 0] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        debug_assert_eq!(out.len(), HEADER);
        let mut crc = RunningCrc::default();
        for part in [&out, &self.rows, &self.entries, &self.images] {
            crc.feed(part);
        }
        let head = IndexHead {
            segment: life.id,
            salt: life.salt,
            base: self.base,
            end,
            chain,
            rows,
            entries,
        };
        let crc = crc.value().to_le_bytes().to_vec();
        IndexFile {
            head,
            parts: [out, self.rows, self.entries, self.images, crc],
        }
    }
}

/// The bytes of an index file, in parts. The file of a run with a million logs has hundreds of
/// megabytes, and joining the parts would take as much again.
pub(crate) struct IndexFile {
    head: IndexHead,
    parts: [Vec<u8>; 5],
}

impl IndexFile {
    /// The bytes, in order.
    pub(crate) fn parts(&self) -> [&[u8]; 5] {
        self.parts.each_ref().map(Vec::as_slice)
    }

    /// End of the frames of the segment or run.
    pub(crate) fn end(&self) -> Position {
        self.head.end
    }

    /// The index in memory.
    pub(crate) fn into_index(self) -> SealedIndex {
        let bytes = self.parts.concat();
        SealedIndex::with(&self.head, Data::Whole(bytes.into()))
    }
}

/// Places of one log's frames in one sealed segment.
#[derive(Debug, Clone)]
pub(crate) struct Entries {
    bytes: Bytes,
    base: Position,
    first_lsn: Lsn,
}

impl Entries {
    pub(crate) fn len(&self) -> usize {
        self.bytes.len() / ENTRY
    }

    pub(crate) fn get(&self, index: usize) -> Option<Place> {
        let at = index * ENTRY;
        let entry = self.bytes.get(at..at + ENTRY)?;
        let position = self.base.get().checked_add(u64::from(u32_at(entry, 0)))?;
        Some(Place {
            position: Position::new(position),
            first_lsn: self
                .first_lsn
                .checked_advance(u64::from(u32_at(entry, 4)))?,
            count: u32_at(entry, 8),
            frame_len: u32_at(entry, 12),
        })
    }

    pub(crate) fn from(&self, index: usize) -> impl Iterator<Item = Place> + '_ {
        (index..self.len()).filter_map(|index| self.get(index))
    }

    /// Index of the first place for which `before` is false. It must be false from there on.
    pub(crate) fn partition_point(&self, before: impl Fn(&Place) -> bool) -> usize {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.get(middle) {
                Some(place) if before(&place) => low = middle + 1,
                _ => high = middle,
            }
        }
        low
    }
}

#[cfg(test)]
impl SealedIndex {
    /// The index of a segment with one place of each of the logs from 1 to `logs`.
    pub(crate) fn of_logs(segment: u64, logs: u64) -> (Life, Position, Self) {
        let life = Life {
            id: SegmentId::new(segment),
            size: 1 << 30,
            salt: 9,
            store_id: 1,
        };
        let base = Position::new(segment << 33);
        let rows: Vec<NewRow> = (1..=logs)
            .map(|log| {
                let mut image = Vec::new();
                crate::base::wire::put_uint(&mut image, 1, log);
                crate::base::wire::put_uint(&mut image, 3, 1);
                NewRow {
                    image: Image::decode(&image).unwrap(),
                    places: vec![Place {
                        position: base.advance(8192 + log * 64),
                        first_lsn: Lsn::ZERO,
                        count: 1,
                        frame_len: 64,
                    }],
                    below: None,
                }
            })
            .collect();
        let index = Self::build(&life, base, base.advance(1 << 30), 77, rows.into_iter());
        (life, base, index)
    }

    /// An index of one log with this number of places, which take 16 bytes or more each.
    pub(crate) fn of_places(segment: u64, places: u32) -> Self {
        let life = Life {
            id: SegmentId::new(segment),
            size: 1 << 30,
            salt: 9,
            store_id: 1,
        };
        let base = Position::new(segment << 33);
        let mut image = Vec::new();
        crate::base::wire::put_uint(&mut image, 1, 7);
        crate::base::wire::put_uint(&mut image, 3, u64::from(places));
        let places = (0..places).map(|number| Place {
            position: base.advance(8192 + u64::from(number) * 1024),
            first_lsn: Lsn::new(u64::from(number)),
            count: 1,
            frame_len: 64,
        });
        let row = NewRow {
            image: Image::decode(&image).unwrap(),
            places: places.collect(),
            below: None,
        };
        Self::build(&life, base, base.advance(1 << 30), 77, std::iter::once(row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> SealedIndex {
        let life = Life {
            id: SegmentId::new(3),
            size: 65536,
            salt: 9,
            store_id: 1,
        };
        let base = Position::new(1 << 33);
        let rows = [2u64, 5, 9].map(|id| {
            let mut bytes = Vec::new();
            crate::base::wire::put_uint(&mut bytes, 1, id);
            crate::base::wire::put_uint(&mut bytes, 3, 100 + id);
            let places = (0..id).map(|index| Place {
                position: base.advance(8192 + id * 64 + index * 1024),
                first_lsn: Lsn::new(100 + index),
                count: 1,
                frame_len: 64,
            });
            NewRow {
                image: Image::decode(&bytes).unwrap(),
                places: places.collect(),
                below: (id == 9).then_some(Below {
                    newer: Position::new(8),
                    older: Position::ZERO,
                }),
            }
        });
        SealedIndex::build(&life, base, base.advance(60_000), 77, rows.into_iter())
    }

    #[test]
    fn an_index_finds_each_log_and_each_lsn_also_when_read_back() {
        let built = index();
        let read = SealedIndex::decode(built.bytes().clone()).unwrap();
        assert_eq!((read.end, read.chain), (built.end, 77));
        let ids: Vec<u64> = read.rows().map(|row| row.log_id.get()).collect();
        assert_eq!(ids, [2, 5, 9]);
        assert!(read.row(LogId::new(4)).is_none());
        let row = read.row(LogId::new(9)).unwrap();
        assert_eq!(row.below.unwrap().older, Position::ZERO);
        assert_eq!(read.image(&row).unwrap().next, Lsn::new(109));
        let entries = read.entries(&row);
        assert_eq!(entries.len(), 9);
        let index = entries.partition_point(|place| place.next_lsn() <= Lsn::new(104));
        assert_eq!(entries.get(index).unwrap().first_lsn, Lsn::new(104));
        assert_eq!(entries.from(7).count(), 2);
    }

    #[test]
    fn no_flipped_bit_and_no_cut_passes() {
        let bytes = index().bytes().to_vec();
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            assert!(SealedIndex::decode(flipped.into()).is_none(), "byte {at}");
            let cut = bytes[..at].to_vec();
            assert!(SealedIndex::decode(cut.into()).is_none(), "cut at {at}");
        }
    }
}
