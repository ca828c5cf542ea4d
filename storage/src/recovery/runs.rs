//! Sorted runs at a start: their list, their effect on the logs, and the leftovers of a crash of the sorter.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::files::{base_of, read_head};
use super::history::add_end;
use super::witness::any_index;
use super::{OldTail, Recovered, Trust};
use crate::api::error::OpenError;
use crate::base::bounds;
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::{Position, SegmentId};
use crate::base::zeros::are_zeros;
use crate::disk::directory;
use crate::disk::known_bad;
use crate::disk::known_bad::Mistake;
use crate::disk::{Disk, DiskFile, is_out_of_space};
use crate::format::address;
use crate::format::address::Hole;
use crate::format::content::Content;
use crate::format::frame::FrameKind;
use crate::format::life::{Life, journal_path};
use crate::format::walk::{Bytes, WalkItem};
use crate::index::checkpoint::Summary;
use crate::index::run_file;
use crate::index::run_file::{BadRun, OpenedRun};
use crate::index::{SealedIndex, base_of_index, index_id, old_id, read_index};
use crate::journal::run;
use crate::journal::run::Run;
use crate::journal::segment::Segment;
use crate::logs::Lost;
use crate::logs::damages;

/// Size of the pieces in which a file is compared with zeros, bytes.
const LOOK: usize = 1 << 20;

/// The runs of a store, and leftovers of the sorter.
#[derive(Default)]
pub(super) struct Runs {
    /// Valid runs, oldest first.
    pub(super) found: Vec<FoundRun>,
    /// Unusable runs, and why.
    pub(super) bad: Vec<(SegmentId, String)>,
    /// Whether they follow each other from the beginning of the journal on, and none is bad.
    pub(super) whole: bool,
    /// Positions at which a run does not follow its predecessor.
    gaps: Vec<Position>,
    /// Runs that were begun and never published.
    unfinished: Vec<SegmentId>,
    /// Runs within a larger run that was made of them.
    stale: Vec<SegmentId>,
    /// Segments of the journal that runs replace.
    sorted: Vec<SegmentId>,
    /// Files in `journal/` below the end of the runs that no run was made of, by their paths. They may hold the
    /// only copy of some records.
    strays: Vec<String>,
}

/// A run and its file.
pub(crate) struct FoundRun {
    pub(crate) opened: OpenedRun,
    pub(crate) run: Arc<Run>,
}

impl Runs {
    /// The last segment that a run replaces.
    pub(super) fn last(&self) -> Option<SegmentId> {
        self.found.last().map(|found| found.run.head.last)
    }

    /// The position behind the last run.
    pub(super) fn end(&self) -> Position {
        self.found
            .last()
            .map_or(Position::ZERO, |found| found.run.head.limit)
    }

    /// Files that the next start removes: leftovers of a crash of the sorter.
    pub(super) fn leftovers(&self) -> Vec<String> {
        let unfinished = self.unfinished.iter().map(|id| run::new_path(*id));
        let stale = self.stale.iter().map(|id| run::path(*id));
        let sorted = self.sorted.iter().map(|id| journal_path(*id));
        unfinished.chain(stale).chain(sorted).collect()
    }

    /// Positions that the run with this segment replaces, including missing segments before it.
    fn reach_of(&self, id: SegmentId) -> Option<Range<Position>> {
        let of = |found: &FoundRun| found.run.head.first <= id && id <= found.run.head.last;
        let at = self.found.iter().position(of)?;
        let before = at.checked_sub(1).map(|before| &self.found[before]);
        let from = before.map_or(Position::ZERO, |before| before.run.head.limit);
        Some(from..self.found[at].run.head.limit)
    }

    /// Whether `sorted/` has a file of this number, finished or not.
    pub(super) fn has_file(&self, id: SegmentId) -> bool {
        let found = self.found.iter().map(|found| found.run.id());
        let bad = self.bad.iter().map(|(id, _)| *id);
        let others = self.unfinished.iter().chain(&self.stale).copied();
        found.chain(bad).chain(others).any(|other| other == id)
    }

    /// Whether runs replace this segment, even if it was missing when they were made.
    pub(super) fn hold(&self, id: SegmentId) -> bool {
        Some(id) <= self.last()
    }
}

impl Recovered {
    /// Finds the runs. Removes the segments that they replace from `ids`.
    pub(super) fn list_runs(
        &mut self,
        disk: &dyn Disk,
        ids: &mut Vec<SegmentId>,
    ) -> Result<(), OpenError> {
        let listed = run_file::list(disk).map_err(OpenError::io("listing sorted"))?;
        let mut runs = Runs {
            whole: true,
            unfinished: listed.unfinished,
            ..Runs::default()
        };
        for name in listed.strangers {
            self.notes
                .push(format!("sorted/{name} is not one of Wald's files"));
        }
        for id in listed.runs.iter().chain(&runs.unfinished) {
            self.next_id = self.next_id.max(id.next());
        }
        let mut opened = Vec::new();
        for id in listed.runs {
            match run_file::open(disk, id, self.store.id) {
                Ok(run) => opened.push(run),
                Err(BadRun::Newer(what)) => return Err(OpenError::TooNew { what }),
                Err(BadRun::Damaged(what)) => {
                    self.findings.push(what.clone());
                    runs.bad.push((id, what));
                    runs.whole = false;
                }
                Err(BadRun::Io(error)) => {
                    return Err(OpenError::io(format!("reading {}", run::path(id)))(error));
                }
            }
        }
        // If two runs begin at one position, the larger was made of the other. If they cover the same
        // positions, the newer one counts.
        opened.sort_by_key(|run| {
            let (head, id) = (&run.head, run.life.id);
            (head.first_base, std::cmp::Reverse((head.limit, id)))
        });
        let mut end = Position::ZERO;
        for opened in opened {
            let head = opened.head.clone();
            if head.limit <= end {
                runs.stale.push(opened.life.id);
                continue;
            }
            if head.before_first != runs.last() {
                runs.whole = false;
                runs.gaps.push(head.first_base);
            }
            end = head.limit;
            let base = address::base_of(opened.life.id);
            let path = run::path(opened.life.id);
            let segment = Segment::finished(opened.life, base, Some(path), opened.life.size);
            *segment.end.write() = Some(base.advance(opened.end));
            segment.set_indexed();
            let segment = Arc::new(segment);
            let run = Arc::new(Run {
                segment,
                head,
                straddling: 0,
            });
            runs.found.push(FoundRun { opened, run });
        }
        let (sorted, rest): (Vec<_>, Vec<_>) = ids.iter().partition(|id| runs.hold(**id));
        *ids = rest;
        self.runs = runs;
        for id in sorted {
            let path = journal_path(id);
            let fail = || OpenError::io(format!("reading {path}"));
            let file = disk.open(&path).map_err(fail())?;
            let head = read_head(disk, &path, &*file).map_err(fail())?;
            match Life::decode(&head) {
                // The name of the file is wrong.
                Ok(life) if life.store_id == self.store.id && !self.runs.hold(life.id) => {
                    ids.push(id);
                }
                _ => self.runs.sorted.push(id),
            }
        }
        ids.sort_unstable();
        Ok(())
    }

    /// Finds the files of segments below the end of the runs that no run was made of: they were missing or
    /// unreadable then, and are there again. Files that a crash of the sorter left are different: all their
    /// records are in a run.
    pub(super) fn look_for_strays(&mut self, disk: &dyn Disk) -> Result<(), OpenError> {
        let sorted = std::mem::take(&mut self.runs.sorted);
        for id in sorted {
            let path = journal_path(id);
            let fail = || OpenError::io(format!("reading {path}"));
            match self.why_stray(disk, id, &path).map_err(fail())? {
                Some(why) => self.find_stray(&path, why),
                None => self.runs.sorted.push(id),
            }
        }
        Ok(())
    }

    /// Notes and reports a file that no run was made of.
    pub(super) fn find_stray(&mut self, path: &str, why: &str) {
        self.findings.push(format!(
            "{path} {why}; no run was made of it; the start keeps the file in quarantine/"
        ));
        self.runs.strays.push(path.to_owned());
    }

    /// Why the file of a replaced segment must be kept; `None` if it may be removed.
    fn why_stray(
        &self,
        disk: &dyn Disk,
        id: SegmentId,
        path: &str,
    ) -> io::Result<Option<&'static str>> {
        let file = disk.open(path)?;
        let head = read_head(disk, path, &*file)?;
        let life = match Life::decode(&head) {
            Ok(life) if life.store_id == self.store.id && life.id == id => life,
            Ok(_) => return Ok(Some("is not the segment that its name says")),
            Err(_) if is_empty(&*file)? => return Ok(None),
            Err(_) => return Ok(Some("has no good life block")),
        };
        if !self.drafts.misses_known_records() {
            return Ok(None);
        }
        let Some(base) = base_of(&life, &*file)? else {
            return Ok(None);
        };
        let content = Content::from_device(disk, path, life.size)?;
        let bytes = &content;
        let walked = Bytes {
            life: &life,
            base,
            bytes,
        }
        .walk_last();
        content.check()?;
        let is_lost = |item: &WalkItem| match item {
            WalkItem::Frame {
                header,
                body_good: true,
            } if header.kind == FrameKind::Batch => {
                let next = header.next_lsn().unwrap_or(header.first_lsn);
                self.drafts.misses(header.log_id, header.first_lsn, next)
            }
            _ => false,
        };
        let holds = walked.items.iter().any(is_lost);
        Ok(
            holds
                .then_some("holds records that count as lost, and sorted runs stand for its place"),
        )
    }

    /// Whether a checkpoint matches the runs: all runs that it lists are there, and it knows the logs that they
    /// leave out.
    pub(super) fn goes_with_runs(&self, summary: &Summary) -> bool {
        let forgotten = |found: &FoundRun| found.run.head.forgotten > Some(summary.last);
        let of_runs = self
            .runs
            .found
            .iter()
            .flat_map(|found| &found.run.head.accepted);
        let accepted: Vec<_> = of_runs.chain(&summary.accepted).collect();
        let is_accepted = |at: &Position| accepted.iter().any(|a| a.covers(*at, at.advance(1)));
        let whole = self.runs.bad.is_empty() && self.runs.gaps.iter().all(is_accepted);
        whole && summary.sorted <= self.runs.last() && !self.runs.found.iter().any(forgotten)
    }

    /// Applies the runs that a checkpoint does not cover. They follow each other.
    pub(super) fn apply_runs(&mut self, disk: &dyn Disk) -> Result<(), OpenError> {
        let found = std::mem::take(&mut self.runs.found);
        let lost_at = match self.last {
            Some(_) => self.drafts.lost_at(),
            None => BTreeSet::new(),
        };
        let mut before = Position::ZERO;
        for FoundRun { opened, run } in &found {
            let stands_for = before..run.head.limit.max(before);
            let applied = match Some(run.head.last) > self.last {
                true => self.apply_run(disk, opened, run),
                false if lost_at.range(stands_for).next().is_none() => Ok(()),
                false => find_holes(disk, run),
            };
            applied.map_err(OpenError::io(format!("reading {}", run.segment.path())))?;
            before = run.head.limit;
        }
        self.runs.found = found;
        Ok(())
    }

    fn apply_run(&mut self, disk: &dyn Disk, opened: &OpenedRun, run: &Run) -> io::Result<()> {
        let head = &run.head;
        let begins_behind = self.last.is_none_or(|last| last < head.first);
        if begins_behind && head.before_first != self.last {
            self.findings.push(format!(
                "sorted segments are missing before segment {}; which of their records are gone is only known of logs that have later ones",
                head.first
            ));
            self.drafts.mark_uncertain(head.first_base);
        }
        for accepted in &head.accepted {
            self.accept(accepted);
        }
        let is_same = |index: &SealedIndex| {
            let same =
                index.end == run.segment.base.advance(opened.end) && index.chain == opened.chain;
            same && index.is_of(&run.segment.life, run.segment.base)
        };
        let index = read_index(disk, run.id())?.filter(is_same);
        let trusted = self.trust >= Trust::Indexes && self.runs.whole;
        match index.filter(|_| trusted) {
            Some(index) => {
                note_holes(&run.segment, &index);
                for row in index.rows() {
                    self.highest_epoch = self.highest_epoch.max(row.log_id.epoch());
                    if let Some(image) = index.image(&row) {
                        self.drafts.apply_sorted(image, head.end);
                    }
                }
            }
            None => {
                let life = (&run.segment.life, run.segment.base);
                let index = any_index(disk, life)?.filter(is_same);
                self.walk_run(disk, opened, run, index)?;
            }
        }
        self.drafts.arrival = self.drafts.arrival.max(head.arrival);
        for (epoch, end) in &head.history {
            if *epoch >= self.epoch {
                add_end(&mut self.history, *epoch, *end);
            }
        }
        if head.epoch > self.epoch {
            self.epoch = head.epoch;
            self.next_log_counter = 1;
        }
        self.next_log_counter = self.next_log_counter.max(head.next_log_counter);
        self.last = Some(head.last);
        self.before = head.before_last;
        self.next_base = head.limit;
        self.clean = false;
        self.tail = Some(OldTail {
            id: head.last,
            before: head.before_last,
            path: None,
            base: head.limit,
            end: head.end,
            chain: head.chain,
            torn: 0,
            debris: bytes::Bytes::new(),
            copy: None,
        });
        Ok(())
    }

    /// Reads a whole run, and counts its unreadable records as lost. Its index describes logs whose images are damaged.
    fn walk_run(
        &mut self,
        disk: &dyn Disk,
        opened: &OpenedRun,
        run: &Run,
        index: Option<SealedIndex>,
    ) -> io::Result<()> {
        let mut walked = run_file::walk(disk, opened)?;
        self.lacks_facts |= !walked.holes.is_empty();
        if let Some(index) = index.filter(|_| walked.lost_images) {
            walked.learn_images(&index);
        }
        for hole in &walked.holes {
            run.segment.add_hole(*hole);
        }
        let head = &run.head;
        let first = head.first_base.advance(crate::base::bounds::LIFE_BYTES);
        for images in &walked.images {
            let id = images.image.id;
            self.highest_epoch = self.highest_epoch.max(id.epoch());
            // These records belong to missing runs.
            self.drafts.lose_before(head.first_base, id, images.before);
            self.drafts.apply_sorted(images.image.clone(), head.end);
            for (from, to) in walked.lost_of(images) {
                self.drafts
                    .lose(walked.position_of(id, from).unwrap_or(first), id, from, to);
            }
        }
        if walked.lost_images {
            self.drafts.mark_uncertain(head.end);
            self.findings.push(format!(
                "{} does not tell of all of its logs any more",
                run.segment.path()
            ));
        } else if !walked.holes.is_empty() && !walked.lost_records() {
            // No record is lost, but the run is damaged.
            self.drafts.mark_damaged(first);
        }
        if !self.only_looks {
            let index = walked.index(opened);
            let from = self.last_limit(head.first_base);
            let lost = |log| self.drafts.lost_between(log, from, head.limit);
            let with_lost = match walked.holes.is_empty() {
                true => None,
                false => index.with_lost(&opened.life, lost),
            };
            let index = with_lost.unwrap_or(index);
            // If the header of a pack is lost, no index shows the damage of the run.
            let places = walked.packs.iter().map(|pack| pack.place.position);
            let places: BTreeSet<Position> = places.collect();
            let listed = walked.holes.iter().all(|hole| places.contains(&hole.from));
            let is_sure = !walked.lost_images && listed;
            self.keep_index(index, is_sure, run.segment.life.size);
        }
        Ok(())
    }

    /// End of the run right before the one that begins at `base`.
    fn last_limit(&self, base: Position) -> Position {
        match self.last {
            Some(_) => self.next_base.min(base),
            None => Position::ZERO,
        }
    }

    /// Moves the files of unusable runs whose loss was accepted. No start searches for runs there, and only
    /// operators remove them.
    pub(crate) fn set_bad_runs_aside(&mut self, disk: &dyn Disk) -> io::Result<()> {
        if self.runs.bad.is_empty() {
            return Ok(());
        }
        for (id, _) in std::mem::take(&mut self.runs.bad) {
            disk.rename(&run::path(id), &damages::run_path(id))?;
        }
        disk.sync_directory("quarantine")?;
        disk.sync_directory("sorted")
    }

    /// Removes files that nothing names any more: leftovers of a crash of the sorter, and indexes of replaced
    /// files. A file that cannot be removed is noted in `left`.
    pub(super) fn clear_sorting(&mut self, disk: &dyn Disk) -> io::Result<()> {
        // The loss of missing runs was accepted.
        self.runs.whole |= self.runs.bad.is_empty() && !self.drafts.is_uncertain();
        self.clear_indexes(disk)?;
        let runs = &mut self.runs;
        if !runs.whole || known_bad::makes(Mistake::LeftoversStay) {
            // Each leftover may be the only copy of some records.
            return Ok(());
        }
        for path in std::mem::take(&mut runs.strays) {
            match damages::keep_file(disk, &path) {
                // The next start finds it again.
                Err(error) if is_out_of_space(&error) => {}
                kept => kept?,
            }
        }
        let (unfinished, stale) = (
            std::mem::take(&mut runs.unfinished),
            std::mem::take(&mut runs.stale),
        );
        let sorted = std::mem::take(&mut runs.sorted);
        // A file that was damaged once may lie on bad sectors.
        let lost_at = match sorted.is_empty() {
            true => BTreeSet::new(),
            false => self.drafts.lost_at(),
        };
        let is_sound = |id: &SegmentId| {
            let reach = runs.reach_of(*id).filter(|_| !lost_at.is_empty());
            reach.is_none_or(|reach| lost_at.range(reach).next().is_none())
        };
        let (sorted, damaged): (Vec<_>, Vec<_>) = sorted.into_iter().partition(is_sound);
        if unfinished.is_empty() && stale.is_empty() && sorted.is_empty() && damaged.is_empty() {
            return Ok(());
        }
        let unfinished = unfinished.iter().map(|id| run::new_path(*id));
        let stale = stale.iter().map(|id| run::path(*id));
        let damaged = damaged.iter().map(|id| journal_path(*id));
        for path in unfinished.chain(stale).chain(damaged) {
            self.remove_or_leave(disk, path);
        }
        disk.sync_directory("sorted")?;
        disk.sync_directory("journal")?;
        self.unused.extend(sorted);
        self.unused.sort_unstable();
        Ok(())
    }

    /// Removes unfinished indexes, and indexes of replaced segments and runs. The index of a missing segment
    /// stays: it may be the only description of the segment.
    fn clear_indexes(&mut self, disk: &dyn Disk) -> io::Result<()> {
        let served = self.segments.values().map(|segment| segment.life.id);
        let runs = self.runs.found.iter().map(|found| found.run.id());
        let served: HashSet<SegmentId> = served.chain(runs).collect();
        let sorted_end = self.runs.found.last().map(|found| found.run.head.limit);
        let last_sorted = self.runs.last();
        let mut doomed = Vec::new();
        directory::visit(disk, "index", &mut |name| {
            let is_half = bounds::named(name, ".idx.new").or(bounds::named(name, ".old.new"));
            let id = index_id(name).or_else(|| old_id(name));
            let path = format!("index/{name}");
            match is_half {
                Some(id) if self.unnamed_indexes.ids().contains(&id) => {}
                Some(_) => doomed.push((path, None)),
                None if id.is_some_and(|id| !served.contains(&id)) => doomed.push((path, id)),
                None => {}
            }
        })?;
        let mut any = false;
        for (path, id) in doomed {
            let is_sorted = || {
                let base = base_of_index(disk, &path)?;
                let is_old = |base| address::is_address(base) || Some(base) < sorted_end;
                // An unreadable index is judged by its name.
                Ok::<_, io::Error>(base.map_or(id <= last_sorted, is_old))
            };
            if id.is_none() || (self.runs.whole && is_sorted()?) {
                any = true;
                self.remove_or_leave(disk, path);
            }
        }
        match any {
            true => disk.sync_directory("index"),
            false => Ok(()),
        }
    }

    fn remove_or_leave(&mut self, disk: &dyn Disk, path: String) {
        match disk.remove(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path, %error, "a file that nothing needs cannot be removed; this is tried again");
                self.left.push(path);
            }
            _ => {}
        }
    }
}

/// Whether a file without a life block contains only zeros.
fn is_empty(file: &dyn DiskFile) -> io::Result<bool> {
    let content = Content::of_file(file, u64::MAX)?;
    let mut at = LIFE_BYTES;
    while at < content.size() {
        if !are_zeros(&content.piece(at, LOOK)) {
            return Ok(false);
        }
        at += LOOK as u64;
    }
    content.check()?;
    Ok(true)
}

/// Notes the damage of a run that a checkpoint covers, so that the sorter rewrites it.
fn find_holes(disk: &dyn Disk, run: &Run) -> io::Result<()> {
    let segment = &run.segment;
    let index = read_index(disk, run.id())?;
    match index.filter(|index| index.is_of(&segment.life, segment.base)) {
        Some(index) => note_holes(segment, &index),
        None => {
            for hole in run_file::holes_of(disk, segment)? {
                segment.add_hole(hole);
            }
        }
    }
    Ok(())
}

/// Notes the damaged places of a run, by its index. Lost records with a place were lost in the run. The others
/// were lost before the run was made.
fn note_holes(segment: &Segment, index: &SealedIndex) {
    for row in index.rows() {
        let Some(image) = index.image(&row).filter(|image| !image.lost.is_empty()) else {
            continue;
        };
        for place in index.entries(&row).from(0) {
            let hit = |lost: &Lost| lost.from < place.next_lsn() && place.first_lsn < lost.to;
            if image.lost.iter().any(hit) {
                segment.add_hole(Hole {
                    from: place.position,
                    to: place.end(),
                });
            }
        }
    }
}
