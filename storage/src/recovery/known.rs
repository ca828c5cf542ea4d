//! Checkpoints and index files, which spare a start from reading segments, and the indexes that a start makes
//! of the segments that it does read.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use super::files::UsedSegment;
use super::history::bound_ends;
use super::{OldTail, Recovered};
use crate::api::error::OpenError;
use crate::base::ids::{LogId, Lsn, Position, SegmentId};
use crate::base::metrics::NoObserver;
use crate::disk::directory;
use crate::disk::directory::StoreIdentity;
use crate::disk::{Disk, DiskFile, create_anew};
use crate::format::address::Hole;
use crate::format::body::{AcceptedLosses, Link};
use crate::format::content::Content;
use crate::format::frame;
use crate::format::life;
use crate::format::life::Life;
use crate::format::walk::{Bytes, WalkItem, Walked};
use crate::index::checkpoint;
use crate::index::checkpoint::{SegmentEntry, Summary};
use crate::index::drafts::Drafts;
use crate::index::{SealedIndex, index_id, index_path, read_index, unfinished_path};
use crate::journal::segment::Segment;
use crate::logs::image::Image;

/// Maximum bytes of unwritten indexes that a start keeps in memory, and at most the size of a segment. Indexes that it
/// cannot write take as much as indexes that it must not write, besides.
const MOST_UNWRITTEN_BYTES: u64 = 32 << 20;

impl Recovered {
    /// Begins with the newest good checkpoint whose segments and their indexes are there, if that is `wanted`.
    /// A start without it rebuilds a missing index; nothing else does. If segments or runs that the checkpoint
    /// names are absent, the start notices this in any case.
    pub(super) fn read_checkpoint(
        &mut self,
        disk: &dyn Disk,
        ids: &[SegmentId],
        wanted: bool,
    ) -> Result<(), OpenError> {
        let fail = || OpenError::io("reading a checkpoint");
        let mut indexed = Vec::new();
        if wanted {
            directory::visit(disk, "index", &mut |name| indexed.extend(index_id(name)))
                .map_err(fail())?;
        }
        indexed.sort_unstable();
        let mut runs = self.runs.found.iter().map(|found| found.run.id());
        let runs_are_indexed = runs.all(|id| indexed.binary_search(&id).is_ok());
        for id in checkpoint::list(disk).map_err(fail())?.into_iter().rev() {
            let bytes = match checkpoint::read(disk, id) {
                Ok(Some(bytes)) => bytes,
                Ok(None) => {
                    tracing::warn!(checkpoint = %id, "a checkpoint is damaged; an older one serves, or the segments themselves");
                    continue;
                }
                Err(error) => {
                    tracing::warn!(checkpoint = %id, %error, "a checkpoint cannot be read; an older one serves, or the segments themselves");
                    continue;
                }
            };
            let mut drafts = Drafts::new(self.drafts.producer_window());
            let mut images = Vec::new();
            let summary = checkpoint::take_apart(&bytes, |image| {
                images.push(image);
                Some(())
            });
            let Some(summary) = summary.filter(|summary| summary.store_id == self.store.id) else {
                continue;
            };
            if !drafts.apply_images(&images) {
                continue;
            }
            self.note_checkpoint(&summary);
            if !wanted {
                self.note_witness(&summary, checkpoint::path(id));
                return Ok(());
            }
            // All are in order, and there may be many.
            let (mut listed, mut indexed) = (ids.iter().peekable(), indexed.iter().peekable());
            let there = |s: &SegmentEntry| {
                let id = s.life.id;
                while listed.next_if(|listed| **listed < id).is_some() {}
                while indexed.next_if(|indexed| **indexed < id).is_some() {}
                let is_here = listed.peek() == Some(&&id) && indexed.peek() == Some(&&id);
                is_here || self.runs.hold(id)
            };
            let goes_with_runs = runs_are_indexed && self.goes_with_runs(&summary);
            if !goes_with_runs || !summary.segments.iter().all(there) {
                self.note_witness(&summary, checkpoint::path(id));
                continue;
            }
            self.witness = None;
            self.progress.covered = Some(summary.last);
            self.progress.checkpoint_bytes = bytes.len() as u64;
            self.drafts = drafts;
            self.apply_summary(summary);
            return Ok(());
        }
        self.find_old_checkpoint(disk)
    }

    /// Notes the ids, positions and epochs of a checkpoint: they were used once, whether their files are there
    /// or not. None of them is given out again.
    fn note_checkpoint(&mut self, summary: &Summary) {
        let last = summary.segments.last();
        let limit = last.map_or(Position::ZERO, |s| s.base.advance(s.life.size));
        self.checkpointed = self.checkpointed.max(Some((summary.last, limit)));
        self.highest_epoch = self.highest_epoch.max(summary.epoch);
        self.next_id = self.next_id.max(summary.last.next());
    }

    fn apply_summary(&mut self, summary: Summary) {
        self.epoch = summary.epoch;
        self.next_log_counter = summary.next_log_counter;
        self.history = summary.history;
        bound_ends(&mut self.history);
        self.clean = summary.clean;
        self.drafts.arrival = summary.arrival;
        self.expiry = summary.expiry;
        self.drafts.accepted_before(summary.accepted);
        self.last = Some(summary.last);
        self.before = summary.before;
        let mut segments = Vec::with_capacity(summary.segments.len());
        for entry in summary.segments {
            self.next_id = self.next_id.max(entry.life.id.next());
            if entry.life.id == summary.last {
                self.tail = Some(OldTail {
                    id: entry.life.id,
                    before: summary.before,
                    path: (!self.runs.hold(entry.life.id))
                        .then(|| life::journal_path(entry.life.id)),
                    base: entry.base,
                    end: entry.end,
                    chain: summary.chain,
                    torn: 0,
                    debris: bytes::Bytes::new(),
                    copy: None,
                });
                self.next_base = entry.base.advance(entry.life.size);
            }
            if self.runs.hold(entry.life.id) {
                continue;
            }
            let segment = Segment::finished(entry.life, entry.base, None, entry.bytes);
            *segment.end.write() = Some(entry.end);
            segment.set_indexed();
            segments.push((entry.base, Arc::new(segment)));
        }
        // All at once: nothing was read before.
        self.segments = segments.into_iter().collect();
    }

    /// Applies the index of a finished segment, if it agrees with the link of its successor and with the
    /// segments before it.
    pub(super) fn enter_by_index(
        &mut self,
        disk: &dyn Disk,
        used: &UsedSegment,
        link: &Link,
    ) -> Result<bool, OpenError> {
        let fail = || OpenError::io(format!("reading {}", index_path(used.life.id)));
        let index = read_index(disk, used.life.id).map_err(fail())?;
        let agrees = |index: &SealedIndex| {
            index.is_of(&used.life, used.base)
                && index.end == link.predecessor_end
                && index.chain == link.predecessor_chain
                && used.misnamed().is_none()
        };
        let Some(index) = index.filter(agrees) else {
            return Ok(false);
        };
        let file = disk
            .open(&used.path)
            .map_err(OpenError::io(format!("opening {}", used.path)))?;
        let bytes = file.size().map_err(fail())?;
        if bytes < index.end.since(used.base) {
            // The file has shrunk: its frames must be read to name the lost records.
            return Ok(false);
        }
        if !self.drafts.apply_index(&index) {
            return Ok(false);
        }
        for row in index.rows() {
            self.highest_epoch = self.highest_epoch.max(row.log_id.epoch());
        }
        self.progress.since_checkpoint += bytes;
        let segment = Segment::finished(used.life, used.base, None, bytes);
        *segment.end.write() = Some(index.end);
        segment.set_indexed();
        self.segments.insert(used.base, Arc::new(segment));
        Ok(true)
    }

    /// Makes the index of a walked segment: from now on it has the places of the frames, and the records that
    /// damage took.
    pub(super) fn seal(
        &mut self,
        used: &UsedSegment,
        segment: &Segment,
        walked: &Walked,
        bytes: u64,
    ) {
        let index = self
            .drafts
            .seal(&used.life, used.base, walked.end, walked.chain);
        if self.only_looks {
            return;
        }
        segment.set_indexed();
        self.progress.since_checkpoint += bytes;
        // Some missing records may not be in any index.
        let doubt = self
            .drafts
            .has_doubt(used.base, used.base.advance(used.life.size));
        let is_sure = used.misnamed().is_none() && !doubt;
        self.keep_index(index, is_sure, used.life.size);
    }

    /// Keeps an index of this start, which will be written if it `is_sure`. Beyond a bound the indexes lie in
    /// unfinished files. Indexes whose files cannot be written have the bound of indexes that are not sure. Readers make
    /// an index beyond its bound from the frames, and the next start writes it. The indexer writes the others.
    pub(super) fn keep_index(&mut self, index: SealedIndex, is_sure: bool, segment_bytes: u64) {
        let index = Arc::new(index);
        if !is_sure {
            self.indexes.keep_made(index);
            return;
        }
        self.unwritten_bytes += index.file_bytes();
        self.indexes.pin(Arc::clone(&index));
        self.progress.unwritten.push_back(index);
        let most = MOST_UNWRITTEN_BYTES.min(segment_bytes);
        if self.unwritten_bytes <= most || self.only_shows {
            return;
        }
        while let Some(index) = self.progress.unwritten.front() {
            if let Err(error) = self.unnamed_indexes.write(index) {
                tracing::warn!(%error, "an index cannot be written; it is tried again");
                break;
            }
            self.unwritten_bytes -= index.file_bytes();
            self.indexes.unpin(index.segment);
            self.progress.unwritten.pop_front();
        }
        while self.unwritten_bytes > most
            && let Some(index) = self.progress.unwritten.pop_front()
        {
            self.unwritten_bytes -= index.file_bytes();
            self.indexes.forget([index.segment]);
            self.progress.damaged.insert(index.base, 0);
            self.indexes.keep_made(index);
        }
    }
}

/// Indexes that a start wrote as unfinished files, because its memory for them is bounded. They get their names
/// after the new segment has begun. Those without a name are removed at the end.
pub(super) struct UnnamedIndexes {
    disk: Arc<dyn Disk>,
    ids: BTreeSet<SegmentId>,
}

impl UnnamedIndexes {
    pub(super) fn new(disk: &Arc<dyn Disk>) -> Self {
        Self {
            disk: Arc::clone(disk),
            ids: BTreeSet::new(),
        }
    }

    /// Segments with an index here.
    pub(super) fn ids(&self) -> &BTreeSet<SegmentId> {
        &self.ids
    }

    /// Writes an index as an unfinished file, and flushes it.
    fn write(&mut self, index: &SealedIndex) -> io::Result<()> {
        // It may be missing, with all indexes.
        self.disk.create_directory("index")?;
        self.ids.insert(index.segment);
        let file = create_anew(&*self.disk, &unfinished_path(index.segment))?;
        file.write_all_at(index.bytes(), 0)?;
        file.sync()
    }

    /// Names all indexes, durably. Readers make an index without a name from the frames.
    pub(super) fn name(&mut self) -> io::Result<()> {
        let any = !self.ids.is_empty();
        while let Some(id) = self.ids.first().copied() {
            match self.disk.rename(&unfinished_path(id), &index_path(id)) {
                // A start on a full disk gave it up.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                named => named?,
            }
            self.ids.pop_first();
        }
        match any {
            true => self.disk.sync_directory("index"),
            false => Ok(()),
        }
    }
}

impl Drop for UnnamedIndexes {
    fn drop(&mut self) {
        for id in &self.ids {
            // The next start removes the rest.
            let _gone = self.disk.remove(&unfinished_path(*id));
        }
    }
}

/// Bytes of a segment, whose frames end at `end`, that do not verify. They are read from the device.
pub(crate) fn damage_in(
    disk: &dyn Disk,
    segment: &Segment,
    end: Position,
) -> io::Result<Vec<Hole>> {
    let content = Content::from_device(disk, &segment.path(), segment.life.size)?;
    let bytes = Bytes {
        life: &segment.life,
        base: segment.base,
        bytes: &content,
    };
    let walked = bytes.walk_finished(end);
    content.check()?;
    Ok(walked.holes())
}

/// End of the last atomic unit that ends at or below `until`, in a segment whose frames end at `end` and do not
/// all verify.
///
/// # Errors
/// If the file cannot be read.
pub(crate) fn last_whole_unit(
    (life, base): (&Life, Position),
    file: &dyn DiskFile,
    end: Position,
    until: Position,
) -> io::Result<Option<Position>> {
    let content = Content::of_file(file, u64::MAX)?;
    let bytes = &content;
    let walked = Bytes { life, base, bytes }.walk_finished(end);
    content.check()?;
    let ends = walked.items.iter().filter_map(|item| match item {
        WalkItem::Frame { header, .. } if !header.continues() => Some(header.end()),
        _ => None,
    });
    Ok(ends.filter(|end| *end <= until).max())
}

/// The logs of a segment in older and newer segments.
pub(crate) struct Around<'a> {
    /// State of a log before the segment.
    pub(crate) before: &'a dyn Fn(LogId) -> io::Result<Option<Image>>,
    /// The lsn with which a log continues behind the segment.
    pub(crate) goes_on: &'a dyn Fn(LogId) -> io::Result<Lsn>,
}

/// The complete index of a sealed segment, made from its frames, from its successor's link, and from older and
/// newer segments with its `logs`. `None` if unaccepted damage leaves some of it in doubt.
///
/// # Errors
/// If the segment cannot be read, or if `logs` fails.
pub(crate) fn index_anew(
    disk: &Arc<dyn Disk>,
    segment: &Segment,
    link: Option<&Link>,
    (accepted, producer_window): (&[AcceptedLosses], u64),
    logs: &Around<'_>,
) -> io::Result<Option<SealedIndex>> {
    let store = StoreIdentity {
        id: segment.life.store_id,
        created: false,
    };
    let content = Content::from_device(&**disk, &segment.path(), segment.life.size)?;
    let bytes = Bytes {
        life: &segment.life,
        base: segment.base,
        bytes: &content,
    };
    let walked = match (link, *segment.end.read()) {
        (Some(link), _) => bytes.walk_before(link),
        (None, Some(end)) => bytes.walk_finished(end),
        (None, None) => return Ok(None),
    };
    let walked = walked.without_accepted(segment.base, accepted);
    let closings = link.and_then(|link| link.closings.as_deref());
    let mut touched = BTreeSet::new();
    for item in &walked.items {
        if let WalkItem::Frame { header, .. } = item {
            touched.insert(header.log_id);
            let directory = frame::directory_of(&bytes.frame(header), header);
            let entries = directory.iter().flat_map(|directory| &directory.entries);
            touched.extend(entries.map(|entry| entry.log_id));
        }
    }
    touched.extend(
        closings
            .iter()
            .copied()
            .flatten()
            .map(|closing| closing.log_id),
    );
    let mut recovered = Recovered::new(disk, store, producer_window);
    for log in touched.iter().copied() {
        if let Some(image) = (logs.before)(log)? {
            let end = image.last_end;
            recovered.drafts.apply_sorted(image, end);
        }
    }
    let holes = recovered.apply_segment(bytes, &walked, &NoObserver);
    recovered.drafts.accepted_before(accepted.to_vec());
    recovered.explain(segment.life.id, &holes, closings, accepted);
    content.check()?;
    if recovered.drafts.has_doubt(segment.base, segment.limit()) {
        return Ok(None);
    }
    for log in touched {
        recovered.drafts.give_again(log, (logs.goes_on)(log)?);
    }
    let (end, chain) = (walked.end, walked.chain);
    let drafts = &mut recovered.drafts;
    Ok(Some(drafts.seal(&segment.life, segment.base, end, chain)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::SimDisk;

    #[test]
    fn indexes_of_a_start_that_cannot_write_take_bounded_memory() {
        const SEGMENT: u64 = 64 << 20;
        let sim = SimDisk::new();
        sim.set_full(true);
        let disk: Arc<dyn Disk> = Arc::new(sim);
        let store = StoreIdentity {
            id: 1,
            created: false,
        };
        let mut start = Recovered::new(&disk, store, 1);
        let bytes = SealedIndex::of_places(1, 500_000).file_bytes();
        // The second part is the bound of indexes that a start must not write.
        let most = MOST_UNWRITTEN_BYTES + (64 << 20);
        let number = 2 * most / bytes;
        for id in 1..=number {
            start.keep_index(SealedIndex::of_places(id, 500_000), true, SEGMENT);
            let held = start.indexes.pinned_bytes();
            assert!(held <= most, "{held} bytes after {id} indexes of {bytes}");
        }
        assert!(
            start.indexes.pinned_bytes() > most - 2 * bytes,
            "the bound is reached"
        );
        let waiting = start.progress.unwritten.iter();
        let waiting: u64 = waiting.map(|index| index.file_bytes()).sum();
        assert_eq!(waiting, start.unwritten_bytes);
    }
}
