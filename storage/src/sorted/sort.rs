//! The sorter: takes sealed segments, and older runs of which much is dead, makes a run of
//! them, and gives their space back.
//!
//! ```text
//!  write <id>.new, flush ─▶ write its index ─▶ rename: published ─▶ readers go there
//!                                                                 ─▶ old indexes, old files go
//! ```
//!
//! A crash before the rename leaves files that the next start removes; one after it leaves
//! the old files beside the run, and the next start removes those. Only what the newest
//! checkpoint covers is sorted, and nothing of a store with damage: recovery is to find that
//! where it is.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::build::{Build, Built, Failed, Source, fate};
use super::head::Head;
use super::{Run, base_of, new_path, path};
use crate::checkpoint;
use crate::ids::{RecoveryEpoch, SegmentId};
use crate::index::{SealedIndex, index_path};
use crate::indexer::Wanted;
use crate::journal::body::Link;
use crate::journal::frame::{self, Header, Kind};
use crate::journal::segment::Segment;
use crate::local::Core;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::verify::pace::{Control, Pace, Stop};

/// So many bytes are read and written between two looks whether others wait.
const STRETCH: u64 = 1 << 20;

/// How long it gives way to appends that are under way, each time: so it goes on at some
/// 50 MiB a second at least, or it would never keep up with them.
const GIVE_WAY: Duration = Duration::from_millis(20);

/// How often runs are looked at, when nothing was sorted meanwhile: all their indexes are
/// read for that.
const LOOK_AT_RUNS: Duration = Duration::from_secs(300);

/// How long the sorter rests when there is nothing to do, or something is in its way.
const REST: Duration = Duration::from_secs(1);
const REST_AFTER_ERROR: Duration = Duration::from_secs(10);

/// A run is rewritten when more than one part in so many is dead.
const DEAD_PART: u64 = 4;

/// How far sorting is.
pub(crate) struct Sorter {
    pub(crate) control: Control,
    /// Bytes read and written since the start.
    pub(crate) read: AtomicU64,
    pub(crate) written: AtomicU64,
}

impl Sorter {
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        Self {
            control: Control::new(bytes_per_second),
            read: AtomicU64::new(0),
            written: AtomicU64::new(0),
        }
    }
}

/// What is sorted next.
struct Task {
    sources: Vec<Source>,
    head: Head,
    /// How many runs lie before.
    earlier: usize,
    /// How many runs are replaced.
    replaced: usize,
}

impl Core {
    /// Body of the sorter's thread, until it is stopped.
    pub(crate) fn sort(&self) {
        let now = || self.journal.clock.monotonic();
        let control = &self.sorter.control;
        let mut pace = Pace::new(control, &now);
        let mut spent = 0;
        let mut spend = |bytes: u64| {
            spent += bytes;
            if spent < STRETCH {
                return Ok(());
            }
            pace.spend(std::mem::take(&mut spent))?;
            self.give_way(control, GIVE_WAY);
            Ok(())
        };
        let mut looked = None;
        while !control.is_stopped() && self.journal.failure().is_none() {
            let due = |at: Instant| now().duration_since(at) >= LOOK_AT_RUNS;
            let runs_too = looked.is_none_or(due);
            match self.sort_step(runs_too, &mut spend) {
                Ok(true) => looked = None,
                Ok(false) => {
                    if runs_too {
                        looked = Some(now());
                    }
                    control.wait(REST);
                }
                Err(Stop::Stopped) => return,
                Err(Stop::Io(error)) => {
                    tracing::warn!(%error, "sorting was cut off; it is tried again");
                    control.wait(REST_AFTER_ERROR);
                }
            }
        }
    }

    /// Makes one run of what is there to be sorted, or, if these are to be looked at, of runs
    /// where that is worth it. `spend` is told of bytes read and written. Tells whether there
    /// was something to do.
    pub(crate) fn sort_step(
        &self,
        runs_too: bool,
        spend: &mut dyn FnMut(u64) -> Result<(), Stop>,
    ) -> Result<bool, Stop> {
        let runs = self.journal.runs();
        let task = match self.next_segments(&runs)? {
            Some(task) => task,
            None if !runs_too => return Ok(false),
            None => match self.next_runs(&runs)? {
                Some(task) => task,
                None => return Ok(false),
            },
        };
        let id = self.pool().draw_id();
        match self.build_run(id, &task, &runs, spend) {
            Ok(built) => {
                self.sorter.read.fetch_add(built.read, Ordering::Relaxed);
                self.sorter
                    .written
                    .fetch_add(built.written, Ordering::Relaxed);
                self.publish_run(built, &task, runs)?;
                Ok(true)
            }
            Err(failed) => {
                self.forget_unpublished(id);
                match failed {
                    Failed::Stop(stop) => Err(stop),
                    Failed::Damaged => Ok(false),
                }
            }
        }
    }

    /// What was begun is of no use. The index goes first: a start knows by the run that there may
    /// be one. What stays because this fails too, the next start removes.
    fn forget_unpublished(&self, id: SegmentId) {
        let index = index_path(id);
        let paths = [format!("{index}.new"), index];
        let gone = self.backups.remove_all(&paths).and_then(|_| {
            self.disk.sync_directory("index")?;
            self.backups.remove_all(&[new_path(id)])
        });
        if let Err(error) = gone {
            tracing::warn!(%error, run = %id, "a run that was not finished stays until the next start");
        }
    }

    /// The oldest segments that are not sorted, if they are enough to be worth it.
    fn next_segments(&self, runs: &[Arc<Run>]) -> io::Result<Option<Task>> {
        let step = self.config.sorter_step();
        let mut sealed: Vec<Arc<Segment>> = {
            let current = self.journal.current().base;
            let segments = self.journal.segments.read();
            segments
                .range(..current)
                .map(|(_, s)| Arc::clone(s))
                .collect()
        };
        // The newest is left: a backup ends with a segment.
        let newest = sealed.pop();
        let bytes: u64 = sealed.iter().map(|segment| segment.file_bytes()).sum();
        if bytes < step || sealed.is_empty() || !self.damages.is_empty() {
            return Ok(None);
        }
        // Segments that do not tell of runs are the last that an older version would take
        // for all there is.
        if self.journal.current().life.id < self.pool().mark() {
            return Ok(None);
        }
        let mut covered = self.indexer.covered();
        let enough = |covered: Option<SegmentId>| {
            let below = |segment: &&Arc<Segment>| Some(segment.life.id) <= covered;
            let bytes = sealed.iter().take_while(below).map(|s| s.file_bytes());
            bytes.sum::<u64>() >= step
        };
        if !enough(covered) {
            if let Err(error) = self.indexer.work(self, Wanted::ForBackup) {
                self.journal
                    .fail("writing an index or a checkpoint", &error);
            }
            covered = self.indexer.covered();
        }
        if !enough(covered) {
            return Ok(None);
        }
        let mut sources = Vec::new();
        let mut bytes = 0;
        let mut successor = None;
        for segment in sealed {
            if Some(segment.life.id) > covered || bytes >= step {
                successor = Some(segment);
                break;
            }
            let Some(index) = self.sound_index(&segment) else {
                return Ok(None);
            };
            bytes += segment.file_bytes();
            sources.push(Source { segment, index });
        }
        let Some(successor) = successor.or(newest) else {
            return Ok(None);
        };
        let Some(head) = self.head_of(&sources, &successor, runs)? else {
            return Ok(None);
        };
        Ok(Some(Task {
            sources,
            head,
            earlier: runs.len(),
            replaced: 0,
        }))
    }

    /// The index of a segment or run that nothing is wrong with.
    fn sound_index(&self, segment: &Segment) -> Option<Arc<SealedIndex>> {
        let sound = segment.is_indexed() && segment.holes.read().is_empty();
        let index = self.indexes.get(segment).filter(|_| sound)?;
        (!index.is_partial() && !segment.is_misnamed()).then_some(index)
    }

    /// What the run of these segments will say of itself; `None` if they do not tell.
    fn head_of(
        &self,
        sources: &[Source],
        successor: &Segment,
        runs: &[Arc<Run>],
    ) -> io::Result<Option<Head>> {
        let (Some(first), Some(last)) = (sources.first(), sources.last()) else {
            return Ok(None);
        };
        let (Some((_, own)), Some((header, link))) =
            (self.link_of(&last.segment)?, self.link_of(successor)?)
        else {
            return Ok(None);
        };
        let before = runs.last().map(|run| &run.head);
        let told = link.predecessor == Some(last.segment.life.id)
            && link.predecessor_end == last.index.end
            && link.predecessor_chain == last.index.chain;
        if !told {
            return Ok(None);
        }
        let since = before.map_or(RecoveryEpoch::new(0), |head| head.epoch);
        let ended =
            |(epoch, _): &&(RecoveryEpoch, _)| *epoch >= since && *epoch < own.recovery_epoch;
        Ok(Some(Head {
            first: first.segment.life.id,
            before_first: before.map(|head| head.last),
            first_base: before.map_or(first.segment.base, |head| head.limit),
            last: last.segment.life.id,
            before_last: link.second,
            end: last.index.end,
            limit: last.segment.limit(),
            chain: last.index.chain,
            next_log_counter: match link.recovery_epoch == own.recovery_epoch {
                true => link.next_log_counter,
                false => 1,
            },
            // Of a later frame: nothing before arrived later.
            arrival: header.arrival,
            epoch: own.recovery_epoch,
            history: self.history.iter().filter(ended).copied().collect(),
            order: Vec::new(),
            order_end: 0,
            logs: 0,
            records: 0,
            pack_bytes: 0,
            forgotten: None,
        }))
    }

    fn link_of(&self, segment: &Segment) -> io::Result<Option<(Header, Link)>> {
        // A link tells of all logs that the segment before touched: an eighth of a segment.
        let most = (segment.life.size / 4).max(64 << 10);
        let bytes = self.open_segments.read(segment, segment.first(), most)?;
        let header = frame::decode_header(&bytes, segment.life.salt)
            .filter(|header| header.kind == Kind::Link && header.position == segment.first());
        Ok(header.and_then(|header| {
            let body = frame::verified_body(&bytes, &header)?;
            Some((header, Link::decode(body)?))
        }))
    }

    /// Runs that are worth to be written anew: one of which much is dead, or two that
    /// together are no larger than a run may be.
    fn next_runs(&self, runs: &[Arc<Run>]) -> io::Result<Option<Task>> {
        if !self.damages.is_empty() || self.indexer.covered().is_none() {
            return Ok(None);
        }
        let mut live = Vec::with_capacity(runs.len());
        for run in runs {
            let Some(index) = self.sound_index(&run.segment) else {
                return Ok(None);
            };
            live.push(self.live_bytes(&index));
        }
        for (at, run) in runs.iter().enumerate() {
            let dead = run.head.pack_bytes - live[at].min(run.head.pack_bytes);
            if dead > run.head.pack_bytes / DEAD_PART {
                return self.task_of_runs(runs, at, 1);
            }
        }
        for at in 1..runs.len() {
            let (older, younger) = (live[at - 1], live[at]);
            let fit = older + younger <= self.config.sorter_run_bytes;
            if fit && (older <= 2 * younger || younger == 0) {
                return self.task_of_runs(runs, at - 1, 2);
            }
        }
        Ok(None)
    }

    /// Bytes of packs that hold a record that is kept.
    fn live_bytes(&self, index: &SealedIndex) -> u64 {
        let mut live = 0;
        for row in index.rows() {
            let log = self.logs.by_id(row.log_id);
            let (gone, kept) = fate(self, log.as_deref());
            if gone {
                continue;
            }
            let entries = index.entries(&row);
            let from = entries.partition_point(|place| place.next_lsn() <= kept.first);
            live += entries
                .from(from)
                .map(|place| u64::from(place.frame_len))
                .sum::<u64>();
        }
        live
    }

    fn task_of_runs(&self, runs: &[Arc<Run>], at: usize, count: usize) -> io::Result<Option<Task>> {
        let chosen = &runs[at..at + count];
        let (Some(first), Some(last)) = (chosen.first(), chosen.last()) else {
            return Ok(None);
        };
        let mut sources = Vec::with_capacity(count);
        for run in chosen {
            let Some(index) = self.sound_index(&run.segment) else {
                return Ok(None);
            };
            let segment = Arc::clone(&run.segment);
            sources.push(Source { segment, index });
        }
        let history = chosen.iter().flat_map(|run| run.head.history.clone());
        let head = Head {
            first: first.head.first,
            before_first: first.head.before_first,
            first_base: first.head.first_base,
            history: history.collect(),
            order: Vec::new(),
            forgotten: chosen.iter().filter_map(|run| run.head.forgotten).max(),
            ..last.head.clone()
        };
        Ok(Some(Task {
            sources,
            head,
            earlier: at,
            replaced: count,
        }))
    }

    fn build_run(
        &self,
        id: SegmentId,
        task: &Task,
        runs: &[Arc<Run>],
        spend: &mut dyn FnMut(u64) -> Result<(), Stop>,
    ) -> Result<Built, Failed> {
        let mut earlier = Vec::with_capacity(task.earlier);
        for run in &runs[..task.earlier] {
            let index = self.sound_index(&run.segment).ok_or(Failed::Damaged)?;
            earlier.push((Arc::clone(run), index));
        }
        let known_deleted = checkpoint::list(&*self.disk)?.first().copied();
        let mut build = Build {
            core: self,
            sources: &task.sources,
            earlier: &earlier,
            known_deleted,
            forgotten: None,
            spend,
        };
        build.run(id, task.head.clone())
    }

    /// The run is on the device: it gets its name, readers go there, and what it stands for
    /// goes.
    fn publish_run(&self, built: Built, task: &Task, mut runs: Vec<Arc<Run>>) -> io::Result<()> {
        let Built {
            life, head, index, ..
        } = built;
        let id = life.id;
        // Without its name flushed, the index could outlive it.
        let path_of_index = index_path(id);
        let new = format!("{path_of_index}.new");
        let written = self
            .disk
            .sync_directory("sorted")
            .and_then(|()| checkpoint::replace(&*self.disk, &new, &path_of_index, index.bytes()))
            .and_then(|()| self.disk.sync_directory("index"));
        if let Err(error) = written {
            self.forget_unpublished(id);
            return Err(error);
        }
        let published = self
            .disk
            .rename(&new_path(id), &path(id))
            .and_then(|()| self.disk.sync_directory("sorted"));
        if let Err(error) = published {
            // Whether it is there, the next start sees.
            self.journal.fail("publishing a sorted run", &error);
            return Ok(());
        }
        let segment = Segment::finished(life, base_of(id), Some(path(id)), life.size);
        *segment.end.write() = Some(index.end);
        segment.set_indexed();
        let run = Arc::new(Run {
            segment: Arc::new(segment),
            head,
        });
        runs.splice(task.earlier..task.earlier + task.replaced, [run]);
        let retired = {
            // Indexes and checkpoints are written of what is there as a whole.
            let _indexing = self.indexer.hold();
            let retired = self.journal.enter_runs(runs);
            let ids: Vec<SegmentId> = retired.iter().map(|segment| segment.life.id).collect();
            self.indexes.forget(ids.iter().copied());
            self.open_segments.close(ids);
            self.logs.forget_deleted(self.journal.sorted_end());
            retired
        };
        if let Err(error) = self.give_back(&retired) {
            self.journal.fail("giving back sorted segments", &error);
        }
        Ok(())
    }

    /// The space of what a run took the place of: indexes first, since a start knows by the
    /// segments that there may be some.
    fn give_back(&self, retired: &[Arc<Segment>]) -> io::Result<()> {
        let indexes: BTreeSet<String> = self.disk.list("index")?.into_iter().collect();
        let mut doomed = Vec::new();
        for segment in retired {
            let path = index_path(segment.life.id);
            if path
                .strip_prefix("index/")
                .is_some_and(|name| indexes.contains(name))
            {
                doomed.push(path);
            }
        }
        let kept_for_backup = self.backups.remove_all(&doomed)?;
        self.disk.sync_directory("index")?;
        let (runs, segments): (Vec<_>, Vec<_>) = retired
            .iter()
            .partition(|segment| super::is_address(segment.base));
        let mut doomed: Vec<String> = runs.iter().map(|run| run.path()).collect();
        let room = match kept_for_backup {
            true => 0,
            false => self.pool().room(),
        };
        let whole = |segment: &&Arc<Segment>| segment.file_bytes() == self.config.segment_bytes;
        let (again, rest): (Vec<&Arc<Segment>>, Vec<_>) =
            segments.into_iter().partition(|segment| whole(segment));
        let again_ids: Vec<SegmentId> = again.iter().map(|s| s.life.id).collect();
        let (again_ids, over) = again_ids.split_at(room.min(again_ids.len()));
        doomed.extend(rest.iter().map(|segment| segment.path()));
        doomed.extend(
            over.iter()
                .map(|id| crate::journal::segment::journal_path(*id)),
        );
        if !self
            .backups
            .unless_running(|| self.pool().recycle(again_ids))?
        {
            doomed.extend(
                again_ids
                    .iter()
                    .map(|id| crate::journal::segment::journal_path(*id)),
            );
        }
        self.backups.remove_all(&doomed)?;
        self.disk.sync_directory("sorted")?;
        self.disk.sync_directory("journal")
    }
}
