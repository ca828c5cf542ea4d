//! Building a run: from sealed segments of the journal, or from older runs.
//!
//! Logs are merged in order of their ids, from all sources at once, and the frames of each log oldest first.
//! Stored bodies are verified and copied; those that lack the newest key of their log are encrypted with it. Durably trimmed or deleted records are left out. A frame with one
//! kept record is kept whole.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::sort::Sorter;
use super::write::RunWriter;
use crate::api::cipher::Cipher;
use crate::api::pace::Stop;
use crate::base::bounds::LIFE_BYTES;
use crate::base::crc::crc32c;
use crate::base::ids::{LogId, Lsn, Position, SegmentId};
use crate::base::metrics::ChecksumSite;
use crate::disk::read_again;
use crate::format::active::Place;
use crate::format::address::base_of;
use crate::format::body::Closing;
use crate::format::frame;
use crate::format::frame::{FrameHeader, FrameKind};
use crate::format::life::Life;
use crate::format::pack::{Piece, pieces};
use crate::format::run_head::RunHead;
use crate::format::sealed;
use crate::format::sealed::BodyPlace;
use crate::index::run_file::stored;
use crate::index::{IndexBuilder, IndexFile, NewRow, Row, SealedIndex};
use crate::journal::pool::Claim;
use crate::journal::run::Run;
use crate::journal::segment::Segment;
use crate::logs::image::Image;
use crate::logs::image::put_images;
use crate::logs::producers::Producers;
use crate::logs::{FirstKept, Log, LogState, Lost, without};
use crate::upkeep::archive::{Archiving, UnpublishedFile};

/// Frames of one log that lie together are read together, up to these bytes.
const SPAN_BYTES: u64 = 256 << 10;

/// A file that a run is made of.
pub(super) struct SortSource {
    pub(super) segment: Arc<Segment>,
    pub(super) index: Arc<SealedIndex>,
}

impl SortSource {
    /// The header at the front of `bytes`, if the index lists it.
    fn header(&self, kind: FrameKind, place: &Place, bytes: &[u8]) -> Option<FrameHeader> {
        let told = (kind, place.position, place.first_lsn, place.count);
        frame::decode_header(bytes, self.segment.life.salt)
            .filter(|header| told == (header.kind, header.position, header.first_lsn, header.count))
    }

    /// The batch at the front of `bytes`, if it verifies.
    fn batch<'b>(&self, place: &Place, bytes: &'b [u8]) -> Option<(FrameHeader, &'b [u8])> {
        let header = self.header(FrameKind::Batch, place, bytes)?;
        Some((header, frame::verified_body(bytes, &header)?))
    }

    /// Header and pieces of the pack at the front of `bytes`, if its header verifies.
    fn pack(&self, place: &Place, bytes: &[u8]) -> Option<(FrameHeader, Vec<Piece>)> {
        let header = self.header(FrameKind::Pack, place, bytes)?;
        Some((header, pieces(bytes, &header)?))
    }

    fn is_run(&self) -> bool {
        crate::format::address::is_address(self.segment.base)
    }
}

/// A run that is on the device, still without its name.
pub(super) struct Built {
    pub(super) life: Life,
    pub(super) head: RunHead,
    pub(super) index: IndexFile,
    /// Bytes of its sources that were read, and bytes of the run that were written.
    pub(super) read: u64,
    pub(super) written: u64,
    /// The file with the expired records, which are not in the run.
    pub(super) archived: Option<UnpublishedFile>,
    /// Records in it that counted as lost: log, from, to.
    pub(super) found: Vec<(Arc<Log>, Lsn, Lsn)>,
}

/// Reasons why there is no run.
pub(super) enum Failed {
    Stop(Stop),
    /// Another run took the place of a source.
    Damaged,
    /// The file of a source is gone.
    Gone(Arc<Segment>),
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
    pub(super) sorter: &'a Sorter,
    pub(super) sources: &'a [SortSource],
    /// The runs before it, with their indexes.
    pub(super) earlier: &'a [(Arc<Run>, Arc<SealedIndex>)],
    /// Every checkpoint knows the deletions up to this segment.
    pub(super) known_deleted: Option<SegmentId>,
    /// The last segment with the deletion of a log that was left out of the run.
    pub(super) forgotten: Option<SegmentId>,
    /// State of the logs at the end of missing segments between the sources.
    pub(super) gone: BTreeMap<LogId, StateAfterLoss>,
    /// Records that counted as lost and can be read: log, from, to.
    pub(super) found: Vec<(Arc<Log>, Lsn, Lsn)>,
    pub(super) spend: &'a mut dyn FnMut(u64) -> Result<(), Stop>,
    pub(super) claim: &'a Claim<'a>,
}

impl Build<'_> {
    pub(super) fn run(&mut self, id: SegmentId, head: RunHead) -> Result<Built, Failed> {
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

    fn write(&mut self, id: SegmentId, head: RunHead) -> Result<Built, Failed> {
        let sorter = self.sorter;
        let mut writer = RunWriter::create(&*sorter.disk, id, sorter.store_id)?;
        let mut described = Described {
            builder: IndexBuilder::new(base_of(id), self.most_logs()),
            before: Vec::with_capacity(self.most_logs()),
        };
        let archive = sorter.archive.as_ref();
        let mut archiving = archive.map(|archive| archive.begin(id, head.first));
        let mut at = vec![0; self.sources.len()];
        let (mut read, mut written) = (0, 0);
        while let Some(log) = self.next_log(&at) {
            let gone = self.gone.remove(&log);
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
            let mut out = LogOutput {
                writer: &mut writer,
                cipher: sorter.config.cipher.as_ref(),
                archiving: archiving.as_mut(),
                next: Lsn::ZERO,
                at: head.first_base.advance(LIFE_BYTES),
                gaps: Vec::new(),
                found: Vec::new(),
            };
            let bytes = self.log(&mut out, &mut described, (log, gone), &rows, &head)?;
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
        let head = RunHead {
            forgotten: head.forgotten.max(self.forgotten),
            latest: described.builder.latest(),
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
        // This step is last: if it fails, nothing of the run is used.
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
            found: std::mem::take(&mut self.found),
        })
    }

    /// About the number of logs of the run.
    fn most_logs(&self) -> usize {
        let rows = self.sources.iter().map(|source| source.index.len());
        rows.sum::<usize>().min(self.sorter.logs.len())
    }

    fn next_log(&self, at: &[usize]) -> Option<LogId> {
        let rows = self.sources.iter().zip(at);
        let next = rows.filter(|(source, at)| **at < source.index.len());
        let next = next.map(|(source, at)| source.index.row_at(*at).log_id);
        next.chain(self.gone.keys().next().copied()).min()
    }

    /// Builds one log from these rows. Returns the bytes read.
    fn log(
        &mut self,
        out: &mut LogOutput<'_, '_>,
        described: &mut Described,
        (id, missing): (LogId, Option<StateAfterLoss>),
        rows: &[(usize, Row)],
        head: &RunHead,
    ) -> Result<u64, Failed> {
        let log = self.sorter.logs.by_id(id);
        let mut image = match rows.last() {
            Some((newest, row)) => self.sources[*newest].index.image(row),
            None => match self.earlier_row(id) {
                Some((index, row)) => index.image(&row),
                // Only the missing segment had the log, and its name is unknown.
                None if log.is_none() => return Ok(0),
                None => log.as_ref().map(|log| {
                    let image = log.state.read().image(id, Some(log.name.clone()));
                    Image {
                        next: Lsn::ZERO,
                        last_end: Position::ZERO,
                        ..image
                    }
                }),
            },
        }
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        let newest = rows.last().map(|(number, _)| *number);
        let missing = missing.filter(|missing| newest < Some(missing.before));
        // In this case the image has all producers.
        let is_newest = missing
            .as_ref()
            .is_some_and(|missing| missing.newest.is_some());
        if let Some(missing) = missing {
            missing.apply_to(&mut image);
        }
        let (gone, kept) = fate(self.sorter, log.as_deref());
        let known_to_checkpoints = image.touched_in <= self.known_deleted;
        if image.deleted && self.earlier.is_empty() && known_to_checkpoints {
            // From now on no file describes the log.
            self.forgotten = self.forgotten.max(image.touched_in);
            return Ok(0);
        }
        image.chain = self.chain(id, rows)?;
        if !image.deleted && !is_newest {
            let producers = self.producers(rows)?;
            if !producers.is_empty() || image.extras.is_some() {
                image.extras.get_or_insert_default().producers = producers;
            }
        }
        let before = self.next_before(id);
        // A trim behind the end of the run also counts here, up to the next lsn of the image.
        let kept = match gone {
            true => FirstKept {
                first: image.next,
                expired: 0,
                bytes: image.kept.bytes,
            },
            false => kept.up_to(image.next),
        };
        if kept.first > image.kept.first {
            image.kept = kept;
        }
        // Trimmed records are dropped. Expired records are archived first.
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
        if let Some(log) = log.as_ref().filter(|_| !gone) {
            out.pass_to(kept.first, image.next);
            self.learn_of_gaps(log, &out.gaps)?;
        }
        let places = out.writer.end_log()?;
        if places.is_empty() && image.next > before && !gone {
            let dropped = image.next.since(before);
            out.writer.drop_log(id, image.next, dropped, head.end)?;
        }
        if let Some(archiving) = &mut out.archiving {
            archiving.end_log(&image)?;
        }
        // The image lists all damage found by now, so that readers learn the cause of the gap.
        image.lost = match &log {
            Some(log) if !gone => {
                let from = before.max(kept.first);
                let state = log.state.read();
                let mut lost = state.damage.to_vec();
                for (first, next) in &out.found {
                    lost = without(&lost, *first, *next);
                }
                let within = |lost: &Lost| lost.to > from && lost.from < image.next;
                lost.into_iter().filter(within).collect()
            }
            _ => Vec::new(),
        };
        if let Some(log) = &log {
            let found = std::mem::take(&mut out.found).into_iter();
            self.found
                .extend(found.map(|(first, next)| (Arc::clone(log), first, next)));
        }
        described.before.push(before);
        described.builder.push(NewRow {
            image,
            places,
            below: None,
        });
        Ok(read)
    }

    /// Quarantines records that no source has, whatever the reason: no reader may skip them silently.
    ///
    /// # Errors
    /// If an index cannot be read: in that case the records of the sources are unknown.
    fn learn_of_gaps(&self, log: &Arc<Log>, gaps: &[(Lsn, Lsn, Position)]) -> io::Result<()> {
        if gaps.is_empty() {
            return Ok(());
        }
        self.check_reads()?;
        let missing = log.state.read().missing().to_vec();
        let mut any = false;
        for (from, to, position) in gaps {
            // The archive that the log was restored from lacked the records in `missing`.
            let mut lost = vec![Lost {
                from: *from,
                to: *to,
                position: *position,
                accepted: false,
            }];
            for missing in &missing {
                lost = without(&lost, missing.from, missing.to);
            }
            for lost in lost {
                any |= self.sorter.learn_of(log, lost);
            }
        }
        if any {
            self.sorter
                .forget_checkpoints(&mut self.sorter.indexing.hold());
        }
        Ok(())
    }

    /// The next lsn of a log before the run: 0 without an earlier row, since runs begin with the store.
    fn next_before(&self, id: LogId) -> Lsn {
        self.earlier_row(id)
            .map_or(Lsn::ZERO, |(_, row)| row.next_lsn)
    }

    fn earlier_row(&self, id: LogId) -> Option<(&SealedIndex, Row)> {
        let mut newest_first = self.earlier.iter().rev();
        newest_first.find_map(|(_, index)| Some((&**index, index.row(id)?)))
    }

    /// The segments that hold records of a log up to the end of the run. The rows of later segments are chained
    /// to them.
    fn chain(&self, id: LogId, rows: &[(usize, Row)]) -> io::Result<crate::format::chain::Chain> {
        let of = |index: &SealedIndex, row: &Row| -> io::Result<Image> {
            Ok(index.image(row).ok_or(io::ErrorKind::InvalidData)?)
        };
        let mut chain = match self.earlier_row(id) {
            Some((index, row)) => of(index, &row)?.chain,
            None => crate::format::chain::Chain::default(),
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
        let window = self.sorter.config.producer_window;
        let mut producers = Producers::default();
        for (number, row) in rows {
            let more = self.sources[*number].index.producers(row);
            let more = more.ok_or(io::ErrorKind::InvalidData)?;
            match self.earlier.is_empty() {
                true => producers.apply(more, window),
                false => producers.merge(more, window),
            }
        }
        Ok(producers)
    }

    /// Copies the kept records of a log from one source.
    fn copy(
        &self,
        out: &mut LogOutput<'_, '_>,
        source: &SortSource,
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
            let bytes = match self
                .sorter
                .open_segments
                .read(&source.segment, start, length)
            {
                Err(error) => return Err(failed_at(source, error)),
                Ok(bytes) => bytes,
            };
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
        out: &mut LogOutput<'_, '_>,
        source: &SortSource,
        place: &Place,
        bytes: &[u8],
        keep: &Keep<'_>,
    ) -> Result<(), Failed> {
        let again;
        let mut found = source.batch(place, bytes);
        if found.is_none() {
            again = self.read_again(source, place)?;
            found = source.batch(place, &again);
        }
        let Some((header, body)) = found else {
            let is_missed = out.misses(keep, place.next_lsn(), place.count);
            if is_missed || keep.has_lost(place.first_lsn, place.next_lsn()) {
                return Ok(());
            }
            return self.damaged(source, keep, place, place.position);
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
        out: &mut LogOutput<'_, '_>,
        source: &SortSource,
        place: &Place,
        bytes: &[u8],
        keep: &Keep<'_>,
    ) -> Result<(), Failed> {
        let mut again = None;
        let mut told = source.pack(place, bytes);
        if told.is_none() {
            let read = again.insert(self.read_again(source, place)?);
            told = source.pack(place, read);
        }
        let Some((header, pieces)) = told else {
            let is_missed = out.misses(keep, place.next_lsn(), place.count);
            if is_missed || keep.has_lost(place.first_lsn, place.next_lsn()) {
                return Ok(());
            }
            let start = self.sorter.journal.first_of_run(&source.segment);
            return self.damaged(source, keep, place, start);
        };
        for piece in pieces {
            if piece.next_lsn() <= keep.from {
                continue;
            }
            let body_at = header.header_len as usize;
            let mut body = stored(bytes, body_at, &piece);
            if body.is_none() {
                let read = match again.take() {
                    Some(read) => read,
                    None => self.read_again(source, place)?,
                };
                body = stored(again.insert(read), body_at, &piece);
            }
            let Some(body) = body else {
                let is_missed = out.misses(keep, piece.next_lsn(), piece.count);
                if is_missed || keep.has_lost(piece.first_lsn, piece.next_lsn()) {
                    continue;
                }
                let hit = Place {
                    first_lsn: piece.first_lsn,
                    count: piece.count,
                    ..*place
                };
                self.damaged(source, keep, &hit, piece.position)?;
                continue;
            };
            out.put(keep, piece, body)?;
        }
        Ok(())
    }

    /// Reads a frame again, from the device: the memory of the first read may be wrong, and no other
    /// copy is left when the run replaces its sources. Returns fewer bytes where the file is cut.
    fn read_again(&self, source: &SortSource, place: &Place) -> Result<Bytes, Failed> {
        let segment = &source.segment;
        let from = segment.offset(place.position);
        let length = u64::from(place.frame_len);
        read_again(&*self.sorter.disk, &segment.path(), from, length)
            .map_err(|error| failed_at(source, error))
    }

    /// Quarantines the records of a damaged frame of a source, as after any damage. The run lists them as lost.
    fn damaged(
        &self,
        source: &SortSource,
        keep: &Keep<'_>,
        place: &Place,
        position: Position,
    ) -> Result<(), Failed> {
        // An unreadable index leads to the wrong bytes.
        self.check_reads()?;
        match keep.log {
            Some(log) if !source.segment.is_retired() => {
                self.sorter
                    .quarantine_at(log, place, position, ChecksumSite::Scrub);
                Ok(())
            }
            _ => Err(Failed::Damaged),
        }
    }
}

/// The cause of a failed read of a source. If its file is gone there is no run: the file may come back, and the
/// next start reports the lost records.
fn failed_at(source: &SortSource, error: io::Error) -> Failed {
    match error.kind() == io::ErrorKind::NotFound && !source.segment.is_retired() {
        true => Failed::Gone(Arc::clone(&source.segment)),
        false => error.into(),
    }
}

/// State of a log at the end of a missing segment, as the link of the next segment records it.
pub(super) struct StateAfterLoss {
    pub(super) closing: Closing,
    pub(super) segment: SegmentId,
    pub(super) end: Position,
    /// The number of the source behind the segment.
    pub(super) before: usize,
    /// The whole image, if no later segment touched the log before the task was chosen. Clients append while
    /// the run is built, so the state of the log is not read again.
    pub(super) newest: Option<Box<Image>>,
}

impl StateAfterLoss {
    /// The state of a log that a missing segment, before a source, touched last. `None` if a frame behind
    /// `limit` touches it by now: the committer changes a log before it notes the segment.
    pub(super) fn of(
        (log, state): (&Log, &LogState),
        segment: SegmentId,
        before: usize,
        limit: Position,
    ) -> Option<Self> {
        let image = state.image(log.id, Some(log.name.clone()));
        (image.last_end <= limit).then(|| Self {
            closing: Closing {
                log_id: log.id,
                next_lsn: image.next,
                name: None,
                deleted: image.deleted,
                first_lsn: image.kept.first,
                expired: image.kept.expired,
                writer_epoch: state.writer_epoch(),
            },
            segment,
            end: image.last_end,
            before,
            newest: Some(Box::new(image)),
        })
    }

    fn apply_to(self, image: &mut Image) {
        if let Some(newest) = self.newest {
            *image = *newest;
        }
        image.next = image.next.max(self.closing.next_lsn);
        image.deleted |= self.closing.deleted;
        image.last_end = image.last_end.max(self.end);
        image.touched_in = Some(self.segment);
        if self.closing.deleted {
            image.extras = None;
        } else if self.closing.writer_epoch > 0 {
            let extras = image.extras.get_or_insert_default();
            extras.writer_epoch = extras.writer_epoch.max(self.closing.writer_epoch);
        }
    }
}

/// States of the logs of a run at its end and before it. The index and the run itself both need them, and they
/// are in memory once.
struct Described {
    builder: IndexBuilder,
    /// The next lsn of each log before the run.
    before: Vec<Lsn>,
}

/// The kept records of a log.
struct Keep<'a> {
    id: LogId,
    log: Option<&'a Arc<Log>>,
    /// Records below this lsn are dropped.
    from: Lsn,
    /// Records below this lsn go only to the archive.
    first: Lsn,
}

impl Keep<'_> {
    /// Whether damage is known to have taken these records.
    fn has_lost(&self, first: Lsn, next: Lsn) -> bool {
        self.log
            .is_some_and(|log| log.state.read().is_lost(first, next))
    }

    /// Whether damage is known to have taken any of these records.
    fn misses_some(&self, first: Lsn, next: Lsn) -> bool {
        self.log.is_some_and(|log| {
            let damage = log.state.read().damage_from(first);
            damage.is_some_and(|(from, _)| from < next)
        })
    }
}

/// Destination of the frames of a log.
struct LogOutput<'w, 'a> {
    writer: &'w mut RunWriter,
    cipher: Option<&'w Cipher>,
    archiving: Option<&'w mut Archiving<'a>>,
    /// The next lsn of the log.
    next: Lsn,
    /// Position of the previous piece, or the beginning of the run.
    at: Position,
    /// Missing records: from, to, and the position of the piece before them.
    gaps: Vec<(Lsn, Lsn, Position)>,
    /// Records that counted as lost and can be read: from, to.
    found: Vec<(Lsn, Lsn)>,
}

impl LogOutput<'_, '_> {
    fn put(&mut self, keep: &Keep<'_>, piece: Piece, body: &[u8]) -> Result<(), Failed> {
        // The bytes of a piece change only here.
        let bound = BodyPlace {
            log: keep.id,
            first_lsn: piece.first_lsn,
            count: piece.count,
            codec: piece.codec,
        };
        let renewed = self
            .cipher
            .and_then(|cipher| sealed::renew(&**cipher, bound, body, piece.arrival));
        let (piece, body) = match &renewed {
            Some((codec, bytes)) => {
                let renewed = Piece {
                    codec: *codec,
                    stored: u32::try_from(bytes.len()).map_err(io::Error::other)?,
                    crc: crc32c(bytes),
                    ..piece
                };
                (renewed, &bytes[..])
            }
            None => (piece, body),
        };
        if let Some(archiving) = &mut self.archiving
            && piece.next_lsn() <= keep.first
        {
            return Ok(archiving.take(keep.id, piece, body)?);
        }
        if piece.first_lsn < self.next {
            return Err(io::Error::from(io::ErrorKind::InvalidData).into());
        }
        if keep.misses_some(piece.first_lsn, piece.next_lsn()) {
            self.found.push((piece.first_lsn, piece.next_lsn()));
        }
        let dropped = piece.first_lsn.since(self.next);
        self.pass_to(keep.first, piece.first_lsn);
        self.next = piece.next_lsn();
        self.at = piece.position;
        Ok(self.writer.add(piece, body, dropped)?)
    }

    /// Notes a gap: records from `first` on are kept, and the next existing ones begin at `lsn`.
    fn pass_to(&mut self, first: Lsn, lsn: Lsn) {
        let from = self.next.max(first);
        if from < lsn {
            self.gaps.push((from, lsn, self.at));
        }
    }

    /// Whether damaged records were meant only for the archive, which does without them.
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

/// Whether no record of a log is kept, and the records that its durable trims left.
pub(super) fn fate(sorter: &Sorter, log: Option<&Log>) -> (bool, FirstKept) {
    let Some(log) = log else {
        return (true, FirstKept::default());
    };
    let state = log.state.read();
    (state.deleted, state.kept(sorter.journal.settled()))
}

/// The first of these places, as far as one read for all of them is efficient.
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
