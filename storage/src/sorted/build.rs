//! Building a run: from sealed segments of the journal, or from older runs.
//!
//! Logs come by id, from all sources at once; of each its frames, the oldest first. Stored
//! bodies are verified and copied. What is trimmed or deleted, durably, is left out; a frame
//! that holds a record that is kept is kept whole.

use std::io;
use std::sync::Arc;

use super::head::Head;
use super::open::stored;
use super::pack::{Piece, pieces, put_images};
use super::write::Writer;
use super::{Run, base_of};
use crate::archive::{Archiving, Pending};
use crate::ids::{LogId, Lsn, Position, SegmentId};
use crate::index::{Image, IndexBuilder, IndexFile, NewRow, Place, Row, SealedIndex};
use crate::journal::frame::{self, Header, Kind};
use crate::journal::pool::Claim;
use crate::journal::segment::{Life, Segment};
use crate::local::{Core, Kept, Log, Producers};
use crate::metrics::ChecksumSite;
use crate::verify::pace::Stop;

/// Frames of one log that lie together are read together, up to this.
const SPAN_BYTES: u64 = 256 << 10;

/// What a run is made of.
pub(super) struct Source {
    pub(super) segment: Arc<Segment>,
    pub(super) index: Arc<SealedIndex>,
}

impl Source {
    /// The header at the front of `bytes`, if it is the one that the index tells of.
    fn header(&self, kind: Kind, place: &Place, bytes: &[u8]) -> Option<Header> {
        let told = (kind, place.position, place.first_lsn, place.count);
        frame::decode_header(bytes, self.segment.life.salt)
            .filter(|header| told == (header.kind, header.position, header.first_lsn, header.count))
    }

    fn is_run(&self) -> bool {
        super::is_address(self.segment.base)
    }
}

/// A run that is on the device, and has no name yet.
pub(super) struct Built {
    pub(super) life: Life,
    pub(super) head: Head,
    pub(super) index: IndexFile,
    /// Bytes of its sources that were read, and of its own.
    pub(super) read: u64,
    pub(super) written: u64,
    /// The file of what retention took, and is not in it.
    pub(super) archived: Option<Pending>,
}

/// Why there is no run.
pub(super) enum Failed {
    Stop(Stop),
    /// A source is damaged; readers know of it by now.
    Damaged,
}

impl From<Stop> for Failed {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Stop(Stop::Io(error))
    }
}

/// One run being built.
pub(super) struct Build<'a> {
    pub(super) core: &'a Core,
    pub(super) sources: &'a [Source],
    /// The runs before it, with their indexes.
    pub(super) earlier: &'a [(Arc<Run>, Arc<SealedIndex>)],
    /// Every checkpoint knows what was deleted up to this segment.
    pub(super) known_deleted: Option<SegmentId>,
    /// The last segment in which a log was deleted that is left out for this.
    pub(super) forgotten: Option<SegmentId>,
    pub(super) spend: &'a mut dyn FnMut(u64) -> Result<(), Stop>,
    pub(super) claim: &'a Claim<'a>,
}

impl Build<'_> {
    pub(super) fn run(&mut self, id: SegmentId, head: Head) -> Result<Built, Failed> {
        let built = self.write(id, head);
        if built.is_err() {
            // A part of an index that cannot be read looks like damage.
            self.check_reads()?;
        }
        built
    }

    /// Reports an error of a read of an index.
    fn check_reads(&self) -> io::Result<()> {
        let earlier = self.earlier.iter().map(|(_, index)| index);
        let sources = self.sources.iter().map(|source| &source.index);
        sources
            .chain(earlier)
            .try_for_each(|index| index.check_reads())
    }

    fn write(&mut self, id: SegmentId, head: Head) -> Result<Built, Failed> {
        let core = self.core;
        let mut writer = Writer::create(&*core.disk, id, core.store_id)?;
        let mut described = Described {
            builder: IndexBuilder::new(base_of(id), self.most_logs()),
            before: Vec::with_capacity(self.most_logs()),
        };
        let archive = core.archive.as_ref();
        let mut archiving = archive.map(|archive| archive.begin(id, head.first));
        let mut at = vec![0; self.sources.len()];
        let (mut read, mut written) = (0, 0);
        while let Some(log) = self.next_log(&at) {
            let mut rows: Vec<(usize, Row)> = Vec::new();
            for (number, source) in self.sources.iter().enumerate() {
                if at[number] < source.index.len() {
                    let row = source.index.row_at(at[number]);
                    if row.log_id == log {
                        rows.push((number, row));
                        at[number] += 1;
                    }
                }
            }
            let mut out = Out {
                writer: &mut writer,
                archiving: archiving.as_mut(),
                next: Lsn::ZERO,
            };
            let bytes = self.log(&mut out, &mut described, log, &rows, head.end)?;
            read += bytes;
            let mut wrote = writer.take_written();
            written += wrote;
            self.claim.wrote(wrote);
            wrote += archiving.as_mut().map_or(0, Archiving::take_written);
            if bytes + wrote > 0 {
                (self.spend)(bytes + wrote)?;
            }
        }
        self.check_reads()?;
        let head = Head {
            forgotten: head.forgotten.max(self.forgotten),
            ..head
        };
        let of_archive = head.clone();
        let Described { builder, before } = described;
        let mut images = std::iter::zip(builder.images(), before);
        let (life, head, end, chain) = writer.finish(head, |out| {
            let next = images.next();
            let put = next.map(|(image, before)| put_images(out, image, before, None));
            put.is_some()
        })?;
        drop(images);
        let base = base_of(id);
        // Last: as long as it fails nothing of the run has come of it.
        let archived = match archiving {
            Some(archiving) => archiving.finish(of_archive)?,
            None => None,
        };
        Ok(Built {
            life,
            head,
            index: builder.finish(&life, base.advance(end), chain),
            read,
            written: written.max(life.size),
            archived,
        })
    }

    /// About the number of logs of the run.
    fn most_logs(&self) -> usize {
        let rows = self.sources.iter().map(|source| source.index.len());
        rows.sum::<usize>().min(self.core.logs.len())
    }

    fn next_log(&self, at: &[usize]) -> Option<LogId> {
        let rows = self.sources.iter().zip(at);
        let next = rows.filter(|(source, at)| **at < source.index.len());
        next.map(|(source, at)| source.index.row_at(*at).log_id)
            .min()
    }

    /// One log, of which these are the rows. Returns the bytes read.
    fn log(
        &mut self,
        out: &mut Out<'_, '_>,
        described: &mut Described,
        id: LogId,
        rows: &[(usize, Row)],
        end: Position,
    ) -> Result<u64, Failed> {
        let Some((newest, row)) = rows.last() else {
            return Ok(0);
        };
        let image = self.sources[*newest].index.image(row);
        let mut image = image.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        let log = self.core.logs.by_id(id);
        let (gone, kept) = fate(self.core, log.as_deref());
        let known_to_checkpoints = image.touched_in <= self.known_deleted;
        if image.deleted && self.earlier.is_empty() && known_to_checkpoints {
            // Nobody tells of it any more.
            self.forgotten = self.forgotten.max(image.touched_in);
            return Ok(0);
        }
        image.chain = self.chain(id, rows)?;
        if !image.deleted {
            let producers = self.producers(rows)?;
            if !producers.is_empty() || image.extras.is_some() {
                image.extras.get_or_insert_default().producers = producers;
            }
        }
        let before = self.next_before(id, rows);
        // What is trimmed later than the run ends is trimmed all the same.
        let kept = match gone {
            true => Kept {
                first: image.next,
                expired: 0,
            },
            false => kept.up_to(image.next),
        };
        if kept.first > image.kept.first {
            image.kept = kept;
        }
        // What somebody's trim took is dropped; what retention took is archived first.
        let from = match out.archiving {
            Some(_) => kept.trimmed(),
            None => kept.first,
        };
        let mut read = 0;
        out.writer.begin_log(id);
        out.next = before;
        if !gone {
            for (number, row) in rows {
                let source = &self.sources[*number];
                let keep = Keep {
                    id,
                    log: log.as_ref(),
                    from,
                    first: kept.first,
                };
                read += self.copy(out, source, row, &keep)?;
            }
        }
        let places = out.writer.end_log()?;
        if places.is_empty() && image.next > before && !gone {
            let dropped = image.next.since(before);
            out.writer.drop_log(id, image.next, dropped, end)?;
        }
        if let Some(archiving) = &mut out.archiving {
            archiving.end_log(&image)?;
        }
        described.before.push(before);
        described.builder.push(NewRow {
            image,
            places,
            below: None,
        });
        Ok(read)
    }

    /// The next lsn of a log before the run.
    fn next_before(&self, id: LogId, rows: &[(usize, Row)]) -> Lsn {
        match rows.first() {
            Some((number, row)) if !self.sources[*number].is_run() => row.first_lsn,
            _ => self
                .earlier_row(id)
                .map_or(Lsn::ZERO, |(_, row)| row.next_lsn),
        }
    }

    fn earlier_row(&self, id: LogId) -> Option<(&SealedIndex, Row)> {
        let mut newest_first = self.earlier.iter().rev();
        newest_first.find_map(|(_, index)| Some((&**index, index.row(id)?)))
    }

    /// The segments that hold something of a log up to the end of the run, as the rows of
    /// later segments are chained to them.
    fn chain(&self, id: LogId, rows: &[(usize, Row)]) -> io::Result<crate::index::Chain> {
        let of = |index: &SealedIndex, row: &Row| -> io::Result<Image> {
            Ok(index.image(row).ok_or(io::ErrorKind::InvalidData)?)
        };
        let mut chain = match self.earlier_row(id) {
            Some((index, row)) => of(index, &row)?.chain,
            None => crate::index::Chain::default(),
        };
        for (number, row) in rows {
            let source = &self.sources[*number];
            match source.is_run() {
                true => chain = of(&source.index, row)?.chain,
                false => chain.push(source.segment.base),
            }
        }
        Ok(chain)
    }

    /// The changes of producers in all sources.
    fn producers(&self, rows: &[(usize, Row)]) -> io::Result<Producers> {
        let window = self.core.config.producer_window;
        let mut producers = Producers::default();
        for (number, row) in rows {
            let more = self.sources[*number].index.producers(row);
            producers.apply(more.ok_or(io::ErrorKind::InvalidData)?, window);
        }
        Ok(producers)
    }

    /// Copies what one source has of a log.
    fn copy(
        &self,
        out: &mut Out<'_, '_>,
        source: &Source,
        row: &Row,
        keep: &Keep<'_>,
    ) -> Result<u64, Failed> {
        let entries = source.index.entries(row);
        let mut at = entries.partition_point(|place| place.next_lsn() <= keep.from);
        let mut read = 0;
        while at < entries.len() {
            let places = together(entries.from(at));
            let (Some(first), Some(last)) = (places.first(), places.last()) else {
                return Err(io::Error::from(io::ErrorKind::InvalidData).into());
            };
            let (start, length) = (first.position, last.end().since(first.position));
            let bytes = self
                .core
                .open_segments
                .read(&source.segment, start, length)?;
            read += length;
            for place in &places {
                let from =
                    usize::try_from(place.position.since(start)).map_err(io::Error::other)?;
                let frame = bytes.get(from..).unwrap_or(&[]);
                match source.is_run() {
                    true => self.copy_pack(out, source, place, frame, keep)?,
                    false => self.copy_frame(out, source, place, frame, keep)?,
                }
            }
            at += places.len();
        }
        Ok(read)
    }

    fn copy_frame(
        &self,
        out: &mut Out<'_, '_>,
        source: &Source,
        place: &Place,
        bytes: &[u8],
        keep: &Keep<'_>,
    ) -> Result<(), Failed> {
        let header = source.header(Kind::Batch, place, bytes);
        let body = header.and_then(|header| Some((header, frame::verified_body(bytes, &header)?)));
        let Some((header, body)) = body else {
            if out.misses(keep, place.next_lsn(), place.count) {
                return Ok(());
            }
            return Err(self.damaged(source, keep, place, place.position));
        };
        let piece = Piece {
            first_lsn: header.first_lsn,
            count: header.count,
            arrival: header.arrival,
            position: header.position,
            codec: header.codec(),
            offset: 0,
            stored: header.body_len,
            crc: header.body_crc,
        };
        out.put(keep, piece, body)
    }

    fn copy_pack(
        &self,
        out: &mut Out<'_, '_>,
        source: &Source,
        place: &Place,
        bytes: &[u8],
        keep: &Keep<'_>,
    ) -> Result<(), Failed> {
        let header = source.header(Kind::Pack, place, bytes);
        let told = header.and_then(|header| Some((header, pieces(bytes, &header)?)));
        let Some((header, pieces)) = told else {
            if out.misses(keep, place.next_lsn(), place.count) {
                return Ok(());
            }
            let start = self.core.journal.first_of_run(&source.segment);
            return Err(self.damaged(source, keep, place, start));
        };
        for piece in pieces {
            if piece.next_lsn() <= keep.from {
                continue;
            }
            let Some(body) = stored(bytes, header.header_len as usize, &piece) else {
                if out.misses(keep, piece.next_lsn(), piece.count) {
                    continue;
                }
                let hit = Place {
                    first_lsn: piece.first_lsn,
                    count: piece.count,
                    ..*place
                };
                return Err(self.damaged(source, keep, &hit, piece.position));
            };
            out.put(keep, piece, body)?;
        }
        Ok(())
    }

    /// A frame of a source does not verify: that is told like any other damage, and nothing
    /// of the store is sorted any more.
    fn damaged(
        &self,
        source: &Source,
        keep: &Keep<'_>,
        place: &Place,
        position: Position,
    ) -> Failed {
        if let (Some(log), false) = (keep.log, source.segment.is_retired()) {
            self.core
                .quarantine_at(log, place, position, ChecksumSite::Scrub);
        }
        Failed::Damaged
    }
}

/// How the logs of a run stood at its end and before it. The index and the run itself tell it, and it
/// is in memory once.
struct Described {
    builder: IndexBuilder,
    /// The next lsn of each before the run.
    before: Vec<Lsn>,
}

/// What is kept of a log.
struct Keep<'a> {
    id: LogId,
    log: Option<&'a Arc<Log>>,
    /// Nothing below is kept anywhere.
    from: Lsn,
    /// What is below goes to the archive only.
    first: Lsn,
}

/// Where the frames of a log go.
struct Out<'w, 'a> {
    writer: &'w mut Writer,
    archiving: Option<&'w mut Archiving<'a>>,
    /// The lsn of the log that comes next.
    next: Lsn,
}

impl Out<'_, '_> {
    fn put(&mut self, keep: &Keep<'_>, piece: Piece, body: &[u8]) -> Result<(), Failed> {
        if let Some(archiving) = &mut self.archiving
            && piece.next_lsn() <= keep.first
        {
            return Ok(archiving.take(keep.id, piece, body)?);
        }
        if piece.first_lsn < self.next {
            return Err(io::Error::from(io::ErrorKind::InvalidData).into());
        }
        let dropped = piece.first_lsn.since(self.next);
        self.next = piece.next_lsn();
        Ok(self.writer.add(piece, body, dropped)?)
    }

    /// Whether records that do not verify are nobody's any more but the archive's, which does
    /// without.
    fn misses(&mut self, keep: &Keep<'_>, next: Lsn, count: u32) -> bool {
        match &mut self.archiving {
            Some(archiving) if next <= keep.first => {
                archiving.miss(count);
                true
            }
            _ => false,
        }
    }
}

/// Whether nothing is kept of a log, and what no trim took.
pub(super) fn fate(core: &Core, log: Option<&Log>) -> (bool, Kept) {
    let Some(log) = log else {
        return (true, Kept::default());
    };
    let state = log.state.read();
    (state.deleted, state.kept(core.journal.durable()))
}

/// The first of these places, as far as reading them in one go pays.
fn together(places: impl Iterator<Item = Place>) -> Vec<Place> {
    let mut found: Vec<Place> = Vec::new();
    let mut useful = 0;
    for place in places {
        useful += u64::from(place.frame_len);
        if let Some(first) = found.first() {
            let span = place.end().since(first.position);
            if span > SPAN_BYTES || span > useful * 4 {
                break;
            }
        }
        found.push(place);
    }
    found
}
