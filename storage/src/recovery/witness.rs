//! Facts that damage took from the frames, and that index files and checkpoints still have.
//!
//! A start reads the frames of a damaged segment. Names of logs, settings, cursors, trims and
//! deletions may be gone with them. Derived files repeat all of these:
//!
//! ```text
//!  frames ─▶ directories ─▶ index of the segment ─▶ link of the next segment ─▶ checkpoint
//!                           (.idx, or .old)                                     (.ckp, or .old)
//! ```
//!
//! A start that uses an index does not see damage in its segment. Therefore a file whose segment is known to be
//! damaged is *set aside*: its name ends in `.old` from then on. No start uses such a file in place of frames,
//! and every start that reads the frames reads it too.
//!
//! The index of a segment behind the damage is whole, and repeats the state of each log that it lists. A start that
//! found damage therefore reads the index next to the frames of each later segment, too. The name of a log counts as
//! lost only if no index and no checkpoint has it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use super::Recovered;
use super::files::UsedSegment;
use crate::api::error::OpenError;
use crate::base::ids::{LogId, Position, SegmentId};
use crate::disk::Disk;
use crate::disk::directory;
use crate::disk::held_files::Backups;
use crate::format::address::Hole;
use crate::format::body::{AcceptedLosses, Link};
use crate::format::life::Life;
use crate::format::walk::{WalkItem, Walked};
use crate::index::checkpoint;
use crate::index::checkpoint::{SegmentEntry, Summary};
use crate::index::{self, SealedIndex};
use crate::logs::image::Image;

/// A checkpoint that a start does not begin with.
pub(super) struct Witness {
    /// The last segment that it covers.
    last: SegmentId,
    path: String,
    /// Segments that it covers, in order.
    segments: Vec<SegmentEntry>,
}

impl Walked {
    /// Bytes that do not verify: between frames, and in frames with bad bodies.
    pub(super) fn holes(&self) -> Vec<Hole> {
        let hole = |item: &WalkItem| match *item {
            WalkItem::Hole { from, to } => Some(Hole { from, to }),
            WalkItem::Frame {
                body_good: true, ..
            } => None,
            WalkItem::Frame { header, .. } => Some(Hole {
                from: header.position,
                to: header.end(),
            }),
        };
        self.items.iter().filter_map(hole).collect()
    }

    /// Returns the walk of the segment at `base` with whole frames in accepted places as holes. These frames did not
    /// verify when an operator accepted their loss, and newer records may have the lsns of their records since.
    pub(super) fn without_accepted(self, base: Position, accepted: &[AcceptedLosses]) -> Self {
        let places = accepted
            .iter()
            .flat_map(|accepted| accepted.places_between(base, self.end));
        let places: Vec<(Position, Position)> = places.collect();
        if places.is_empty() {
            return self;
        }
        let is_lost = |from: Position, to: Position| {
            places.iter().any(|place| place.0 <= from && to <= place.1)
        };
        let mut items: Vec<WalkItem> = Vec::with_capacity(self.items.len());
        for item in self.items {
            let (from, to) = match item {
                WalkItem::Frame {
                    header,
                    body_good: true,
                } if is_lost(header.position, header.end()) => (header.position, header.end()),
                WalkItem::Frame { .. } => {
                    items.push(item);
                    continue;
                }
                WalkItem::Hole { from, to } => (from, to),
            };
            match items.last_mut() {
                Some(WalkItem::Hole { to: end, .. }) if *end == from => *end = to,
                _ => items.push(WalkItem::Hole { from, to }),
            }
        }
        Self { items, ..self }
    }
}

impl Recovered {
    /// Returns the index of a segment that is damaged or lies behind damage, if one is good and ends where the segment
    /// ends. It may have facts that the frames lack.
    pub(super) fn index_with_facts(
        &mut self,
        disk: &dyn Disk,
        used: &UsedSegment,
        link: Option<&Link>,
        walked: &Walked,
    ) -> Result<Option<SealedIndex>, OpenError> {
        self.lacks_facts |= !walked.holes().is_empty();
        if !self.lacks_facts {
            return Ok(None);
        }
        let end = link.map_or(walked.end, |link| link.predecessor_end);
        let index = any_index(disk, (&used.life, used.base))
            .map_err(OpenError::io("reading the index of a segment"))?;
        Ok(index.filter(|index| index.end == end))
    }

    /// Returns the index of the segment before `link`, whose file is gone.
    pub(super) fn index_of_missing(
        &mut self,
        disk: &dyn Disk,
        id: SegmentId,
        link: &Link,
    ) -> Result<Option<SealedIndex>, OpenError> {
        self.lacks_facts = true;
        for path in [index::index_path(id), index::old_path(id)] {
            let index = index::read_index_at(disk, &path)
                .map_err(OpenError::io(format!("reading {path}")))?;
            let agrees = |index: &SealedIndex| {
                let chain = link.predecessor_chain;
                index.segment == id && index.end == link.predecessor_end && index.chain == chain
            };
            if let Some(index) = index.filter(agrees).filter(is_readable) {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    /// Notes a checkpoint that the start does not begin with. The newest counts.
    pub(super) fn note_witness(&mut self, summary: &Summary, path: String) {
        self.witness.get_or_insert_with(|| Witness {
            last: summary.last,
            path,
            segments: summary.segments.clone(),
        });
    }

    /// End of the frames of a segment, if a checkpoint records it. The link of its successor, which also records it,
    /// may be damaged.
    pub(super) fn checkpointed_end(&self, used: &UsedSegment) -> Option<Position> {
        let segments = &self.witness.as_ref()?.segments;
        let at = segments.binary_search_by_key(&used.life.id, |entry| entry.life.id);
        let entry = segments.get(at.ok()?)?;
        (entry.life == used.life && entry.base == used.base).then_some(entry.end)
    }

    /// Finds a checkpoint that was set aside.
    pub(super) fn find_old_checkpoint(&mut self, disk: &dyn Disk) -> Result<(), OpenError> {
        let fail = || OpenError::io("reading a checkpoint");
        for id in checkpoint::list_old(disk)
            .map_err(fail())?
            .into_iter()
            .rev()
        {
            let path = checkpoint::old_path(id);
            let summary = read_checkpoint(disk, &path, |_| {});
            if let Some(summary) = summary.filter(|summary| summary.store_id == self.store.id) {
                self.note_witness(&summary, path);
            }
        }
        Ok(())
    }

    /// Learns from the checkpoint if it describes the logs as of here: frames are applied up to `next`, or to
    /// the end. If its last segment is gone, or in the middle of a run, the checkpoint has fewer facts.
    pub(super) fn ask_checkpoint(&mut self, disk: &dyn Disk, next: Option<SegmentId>) {
        let last = self.last;
        let is_due = |witness: &mut Witness| {
            Some(witness.last) == last || next.is_none_or(|next| witness.last < next)
        };
        let Some(witness) = self.witness.take_if(is_due) else {
            return;
        };
        if !self.lacks_facts && Some(witness.last) <= last {
            return;
        }
        let is_here = Some(witness.last) == last;
        let newest = self.segments.values().next_back();
        let end = match (newest, &self.tail) {
            (Some(newest), _) => newest.end.read().unwrap_or(newest.base),
            (None, Some(tail)) => tail.end,
            (None, None) => Position::ZERO,
        };
        let drafts = &mut self.drafts;
        let summary = read_checkpoint(disk, &witness.path, |image| match is_here {
            true => drafts.learn_whole(image, end),
            false => drafts.learn_old(image),
        });
        let Some(summary) = summary.filter(|_| is_here) else {
            return;
        };
        for accepted in summary.accepted {
            self.drafts.accept(accepted);
        }
        // All doubts up to here are resolved.
        self.doubts.clear();
        self.drafts.end_doubt(end);
        self.expiry = summary.expiry.or(self.expiry);
        self.drafts.arrival = self.drafts.arrival.max(summary.arrival);
        if self.history.len() < summary.history.len() {
            self.history = summary.history;
        }
        if summary.epoch > self.epoch {
            self.epoch = summary.epoch;
            self.next_log_counter = 1;
        }
        if summary.epoch == self.epoch {
            self.next_log_counter = self.next_log_counter.max(summary.next_log_counter);
        }
    }

    /// Names logs whose names neither a frame nor a file read so far has, if any index or checkpoint has them. The newest
    /// file counts: it knows of a deletion. Other facts depend on the place of the file in the journal, so this takes
    /// none of them.
    pub(super) fn look_for_names(&mut self, disk: &dyn Disk) -> Result<(), OpenError> {
        let mut wanted = self.drafts.without_name();
        if wanted.is_empty() {
            return Ok(());
        }
        let mut files = Vec::new();
        for (directory, kinds) in [
            ("index", [index::index_id, index::old_id]),
            (
                checkpoint::DIRECTORY,
                [checkpoint::id_of, checkpoint::old_id],
            ),
        ] {
            directory::visit(disk, directory, &mut |name| {
                let id = kinds.iter().find_map(|id| id(name));
                files.extend(id.map(|id| (id, directory, format!("{directory}/{name}"))));
            })
            .map_err(OpenError::io(format!("listing {directory}")))?;
        }
        files.sort_unstable();
        let mut found = BTreeMap::new();
        while let Some((id, directory, path)) = files.pop().filter(|_| !wanted.is_empty()) {
            let images = match directory == checkpoint::DIRECTORY {
                true => self.checkpointed(disk, &path, &wanted),
                false => self.indexed(disk, (id, &path), &wanted)?,
            };
            for image in images.into_iter().filter(|i| i.deleted || i.name.is_some()) {
                wanted.remove(&image.id);
                found.insert(image.id, image.name.filter(|_| !image.deleted));
            }
        }
        self.drafts.name_found(found);
        Ok(())
    }

    /// The images of these logs in the checkpoint at a path.
    fn checkpointed(&self, disk: &dyn Disk, path: &str, logs: &BTreeSet<LogId>) -> Vec<Image> {
        let mut images = Vec::new();
        let summary = read_checkpoint(disk, path, |image| {
            images.extend(logs.contains(&image.id).then_some(image));
        });
        match summary.is_some_and(|summary| summary.store_id == self.store.id) {
            true => images,
            false => Vec::new(),
        }
    }

    /// The images of these logs in the index at a path.
    fn indexed(
        &self,
        disk: &dyn Disk,
        (id, path): (SegmentId, &str),
        logs: &BTreeSet<LogId>,
    ) -> Result<Vec<Image>, OpenError> {
        let index =
            index::read_index_at(disk, path).map_err(OpenError::io(format!("reading {path}")))?;
        let Some(index) = index.filter(|index| !self.is_foreign(id, index)) else {
            return Ok(Vec::new());
        };
        let image = |log: &LogId| index.image(&index.row(*log)?).filter(|i| i.id == *log);
        Ok(logs.iter().filter_map(image).collect())
    }

    /// Whether an index in the file of this number cannot be of this store: the number belongs to a segment or run with
    /// another salt. Of a missing file nothing but the ids of its logs shows the store.
    fn is_foreign(&self, id: SegmentId, index: &SealedIndex) -> bool {
        let runs = self.runs.found.iter().map(|found| &found.run.segment);
        let mut known = self.segments.values().chain(runs);
        let known = known.find(|segment| segment.life.id == id);
        index.segment != id || known.is_some_and(|s| !index.is_of(&s.life, s.base))
    }

    /// Sets aside the indexes of segments and of damaged runs, and all checkpoints, so that later
    /// starts find the damage.
    pub(crate) fn forget_indexes(&self, disk: &Arc<dyn Disk>) -> io::Result<()> {
        // No backup of a closed store runs.
        let backups = Backups::new(Arc::clone(disk));
        checkpoint::set_aside(&**disk, &backups)?;
        let runs = self.runs.found.iter().map(|found| &found.run.segment);
        let mut any = false;
        // An index may list records that the logs no longer have.
        for segment in self.segments.values() {
            any |= index::set_aside(&backups, segment.life.id)?;
        }
        for segment in runs {
            if !segment.holes.read().is_empty() {
                any |= index::set_aside(&backups, segment.life.id)?;
            }
        }
        match any {
            true => disk.sync_directory("index"),
            false => Ok(()),
        }
    }
}

/// The index of a segment or run, whether it was set aside or not; `None` if none is good.
pub(super) fn any_index(
    disk: &dyn Disk,
    (life, base): (&Life, Position),
) -> io::Result<Option<SealedIndex>> {
    for path in [index::index_path(life.id), index::old_path(life.id)] {
        let index = index::read_index_at(disk, &path)?;
        let index = index.filter(|index| index.is_of(life, base));
        if let Some(index) = index.filter(is_readable) {
            return Ok(Some(index));
        }
    }
    Ok(None)
}

/// Whether every image can be read.
fn is_readable(index: &SealedIndex) -> bool {
    let is_good = |row| {
        index
            .image(&row)
            .is_some_and(|image| image.id == row.log_id)
    };
    index.rows().all(is_good)
}

/// Gives every log of a checkpoint to `log`. `None` if it cannot be read.
fn read_checkpoint(disk: &dyn Disk, path: &str, log: impl FnMut(Image)) -> Option<Summary> {
    match checkpoint::read_at(disk, path) {
        Ok(bytes) => checkpoint::decode(&bytes?, log),
        Err(error) => {
            tracing::warn!(path, %error, "a checkpoint cannot be read");
            None
        }
    }
}
