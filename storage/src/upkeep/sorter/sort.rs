//! The sorter: takes sealed segments, and older runs with many dead bytes, makes a run of them, and gives their
//! space back.
//!
//! ```text
//!  write <id>.new, flush ─▶ write its index ─▶ rename: published ─▶ readers go there
//!                                                                 ─▶ old indexes, old files go
//! ```
//!
//! A crash before the rename leaves files that the next start removes. A crash after it leaves the old files
//! next to the run, and the next start removes those. Only segments that the newest checkpoint covers are
//! sorted. Damage costs only its own records: the run lists the lost records, and readers learn them from it.
//! If nothing identifies the records that damage took, nothing is sorted until an operator accepts the loss.

use std::collections::BTreeSet;
use std::io;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::build::{Build, Built, Failed};
use super::choose::{Activity, RunSources, SortTask};
use crate::api::pace::{Control, Pace, Stop};
use crate::base::ids::{Position, SegmentId};
use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::disk;
use crate::disk::known_bad;
use crate::disk::known_bad::Mistake;
use crate::disk::{is_out_of_descriptors, is_out_of_space, memory};
use crate::format::address::base_of;
use crate::format::life::journal_path;
use crate::index::checkpoint;
use crate::index::{index_path, old_path};
use crate::journal::inbox::Inbox;
use crate::journal::pool::Claim;
use crate::journal::pool::Pool;
use crate::journal::run::{Run, new_path, path};
use crate::journal::segment::Segment;
use crate::logs::damages::Damage;
use crate::read::held_back::UnusablePart;
use crate::read::store::Store;
use crate::upkeep::archive::Archive;
use crate::upkeep::indexer::Indexer;

/// Bytes that are read and written between two checks whether others wait.
const STRETCH: u64 = 1 << 20;

/// Pause for appends that are under way, each time. It is shorter while segments wait, and zero when more
/// segments wait: otherwise the sorter would never keep up.
const GIVE_WAY: Duration = Duration::from_millis(20);
const GIVE_WAY_BEHIND: Duration = Duration::from_millis(4);

/// Pause between two checks of the runs, if nothing was sorted meanwhile. A check reads all their indexes, so
/// it takes at most 1/50 of the time.
const LOOK_AT_RUNS: Duration = Duration::from_secs(10);
const LOOK_SHARE: u32 = 50;

/// Time without segments to sort after which more is done about runs.
const AT_REST: Duration = Duration::from_secs(20);

/// Pause between leaving two segments that are not full, to forget deleted logs or to make room.
const LEAVE: Duration = Duration::from_secs(5);

/// Pause of the sorter when there is nothing to do, and after an error.
const REST: Duration = Duration::from_secs(1);
const REST_AFTER_ERROR: Duration = Duration::from_secs(10);

/// First pause of a step that finds no file descriptor. It doubles, up to [`REST`].
const FIRST_PAUSE: Duration = Duration::from_millis(10);

/// Progress of sorting.
pub(crate) struct Sorter {
    store: Arc<Store>,
    pub(crate) pool: Arc<Pool>,
    pub(super) inbox: Inbox,
    pub(super) indexer: Arc<Indexer>,
    /// Archive of expired records, if there is one.
    pub(crate) archive: Option<Archive>,
    pub(crate) control: Control,
    /// Bytes read and written since the start.
    pub(crate) read: AtomicU64,
    pub(crate) written: AtomicU64,
    /// Bytes of removed files, less the bytes of the runs that replaced them.
    pub(crate) freed: AtomicU64,
    /// Bytes of packs with and without kept records, as of the last check.
    pub(crate) live: AtomicU64,
    pub(crate) dead: AtomicU64,
    /// Maximum bytes of a run, by the size of the volume.
    pub(super) largest_run: AtomicU64,
    /// Upper bound on the bytes of a run since one found no space; `u64::MAX` without one.
    pub(super) least_refused: AtomicU64,
    /// On a full disk: state of the store when nothing was worth sorting.
    pub(super) idle_at: Mutex<Option<CheckBasis>>,
    /// Whether the log warned an operator that no run fits the free space.
    pub(super) is_stuck: AtomicBool,
    /// The runs that were made to encrypt their records with keys from this number on.
    pub(super) renewed: Mutex<(u64, BTreeSet<SegmentId>)>,
}

/// Facts that must change before another check of segments can find more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CheckBasis {
    pub(super) settled: Position,
    pub(super) covered: Option<SegmentId>,
    pub(super) room: u64,
}

impl Sorter {
    pub(crate) fn new(
        store: &Arc<Store>,
        pool: Arc<Pool>,
        inbox: Inbox,
        indexer: Arc<Indexer>,
        archive: Option<Archive>,
    ) -> Self {
        Self {
            store: Arc::clone(store),
            pool,
            inbox,
            indexer,
            archive,
            control: Control::new(store.config.sorter_bytes_per_second),
            read: AtomicU64::new(0),
            written: AtomicU64::new(0),
            freed: AtomicU64::new(0),
            live: AtomicU64::new(0),
            dead: AtomicU64::new(0),
            largest_run: AtomicU64::new(u64::MAX),
            least_refused: AtomicU64::new(u64::MAX),
            idle_at: Mutex::new(None),
            is_stuck: AtomicBool::new(false),
            renewed: Mutex::default(),
        }
    }

    fn moved(&self) -> u64 {
        self.read.load(Ordering::Relaxed) + self.written.load(Ordering::Relaxed)
    }
}

impl Deref for Sorter {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.store
    }
}

/// Facts that must change before another check of runs at rest can find more.
#[derive(Debug, PartialEq, Eq)]
struct RunsBasis {
    settled: Position,
    /// Number of the oldest key that records may stay under; `None` without encryption.
    oldest_key: Option<u64>,
    /// Number of damaged places in runs.
    holes: usize,
}

/// State that the sorter keeps from one turn to the next.
#[derive(Default)]
pub(crate) struct Turns {
    /// Time at which segments were sorted last.
    busy_at: Option<Instant>,
    /// The end of the last check of runs that found nothing to do, and its duration.
    looked: Option<(Instant, Duration)>,
    /// Whether there are runs that did not exist then.
    news: bool,
    /// State of the runs when nothing was left to do about them at rest.
    seen: Option<RunsBasis>,
    /// Time at which segments were left last, to forget deleted logs or to make room.
    left: Option<Instant>,
}

impl Turns {
    /// Whether it is time to check runs: at once when no segment waits, and seldom between segments. There
    /// a check takes longer in a larger store. In a larger store the bytes that die meanwhile also matter less.
    fn is_due(&self, now: Instant, between: bool, short: bool) -> bool {
        let Some((at, took)) = self.looked else {
            return true;
        };
        let least = match (self.news, between) {
            (true, false) => return true,
            (true, true) => Duration::ZERO,
            (false, _) if short => Duration::ZERO,
            (false, _) => LOOK_AT_RUNS,
        };
        now.duration_since(at) >= least.max(took * LOOK_SHARE)
    }
}

impl Sorter {
    /// Body of the sorter's thread, until it is stopped.
    pub(crate) fn sort(&self) {
        let now = || self.journal.clock.monotonic();
        let control = &self.control;
        let mut pace = Pace::new(control, &now);
        let mut spent = 0;
        let mut spend = |bytes: u64| {
            spent += bytes;
            if spent < STRETCH {
                return Ok(());
            }
            pace.spend(std::mem::take(&mut spent))?;
            match self.backlog() {
                0 => self.give_way(control, GIVE_WAY),
                1 => self.give_way(control, GIVE_WAY_BEHIND),
                _ => {}
            }
            Ok(())
        };
        let mut turns = Turns::default();
        while !control.is_stopped() && self.journal.failure().is_none() {
            match self.sort_turn(&mut turns, &mut spend) {
                Ok(true) => {}
                Ok(false) => control.wait(REST),
                Err(Stop::Stopped) => return,
                Err(Stop::Io(error)) => {
                    tracing::warn!(%error, "sorting was cut off; it is tried again");
                    control.wait(REST_AFTER_ERROR);
                }
            }
        }
    }

    /// Sorts segments, then runs: dead bytes in runs must be given back too, however fast segments keep coming.
    /// Returns whether there was anything to do.
    pub(crate) fn sort_turn(
        &self,
        turns: &mut Turns,
        spend: &mut dyn FnMut(u64) -> Result<(), Stop>,
    ) -> Result<bool, Stop> {
        let now = || self.journal.clock.monotonic();
        let began = now();
        let rests = |at: Instant| began.duration_since(at) >= AT_REST;
        let mut load = match turns.busy_at.is_none_or(rests) {
            true => Activity::AtRest,
            false => Activity::Busy,
        };
        let may_leave = |at: Instant| began.duration_since(at) >= LEAVE;
        if self.is_crowded() && turns.left.is_none_or(may_leave) && self.must_leave() {
            self.inbox.leave_to_sorter();
            turns.left = Some(began);
        }
        if self.pool.is_short() {
            self.give_ends_back()?;
        }
        let sorted = self.sort_step(RunSources::Segments, load, spend)?;
        if sorted {
            load = Activity::Busy;
            turns.busy_at = Some(now());
            turns.news = true;
        }
        // As of before the check: it may miss a later change.
        let basis = self.runs_basis();
        // On a full disk the room for a run changes, too.
        let short = self.pool.is_short();
        let due = turns.is_due(now(), sorted, short);
        let looks = due && (short || turns.seen.as_ref() != Some(&basis));
        let (mut made, mut spent) = (false, 0);
        // Runs get as much work as the segments did, not one run: there may be many runs to rewrite.
        while looks && spent < 2 * self.sorter_part() {
            let (began, before) = (now(), self.moved());
            let more = self.sort_step(RunSources::Runs, load, spend)?;
            spent += self.moved() - before;
            made |= more;
            turns.news = more;
            if !more {
                let ended = now();
                turns.looked = Some((ended, ended.duration_since(began)));
                turns.seen = (load == Activity::AtRest).then_some(basis);
                break;
            }
            turns.looked = None;
        }
        if sorted || looks {
            // The check had the rows and images of all runs in memory.
            let runs = self.journal.runs();
            memory::give_back(runs.iter().map(|run| run.image_bytes()).sum());
        }
        if short && !sorted && !made && turns.left.is_none_or(may_leave) && self.hides_dead()? {
            self.inbox.leave_on_reserve();
            turns.left = Some(began);
        }
        if !sorted && !made {
            // A quota may have been raised.
            self.allow_larger_runs();
        }
        Ok(sorted || made)
    }

    fn runs_basis(&self) -> RunsBasis {
        let runs = self.journal.runs();
        let cipher = self.config.cipher.as_ref();
        RunsBasis {
            settled: self.journal.settled(),
            oldest_key: cipher.map(|cipher| cipher.renewed().0),
            holes: runs.iter().map(|run| run.segment.holes.read().len()).sum(),
        }
    }

    /// Makes one run of these sources, if that is worth it. `spend` receives the bytes read and written.
    /// Returns whether there was something to do.
    pub(crate) fn sort_step(
        &self,
        of: RunSources,
        load: Activity,
        spend: &mut dyn FnMut(u64) -> Result<(), Stop>,
    ) -> Result<bool, Stop> {
        if self.journal.failure().is_some() {
            // Only a start can find out whether the run that was published last exists.
            return Ok(false);
        }
        self.held_files.remove_left();
        self.measure_volume();
        let runs = self.journal.runs();
        let Some(archive) = &self.archive else {
            return self.sort_next(&runs, of, load, spend);
        };
        archive.settle(&runs)?;
        let sorted = self.sort_next(&runs, of, load, spend)?;
        archive.went_well();
        Ok(sorted)
    }

    fn sort_next(
        &self,
        runs: &[Arc<Run>],
        of: RunSources,
        load: Activity,
        spend: &mut dyn FnMut(u64) -> Result<(), Stop>,
    ) -> Result<bool, Stop> {
        if self.waits_for_file() {
            return Ok(false);
        }
        let task = match of {
            RunSources::Segments => self.next_segments(runs, load)?,
            RunSources::Runs => self.next_runs(runs, load)?,
        };
        let Some(task) = task.filter(|_| self.unusable.gone.lock().is_none()) else {
            return Ok(false);
        };
        if of == RunSources::Segments {
            return self.make_run(&task, spend);
        }
        // Segments do not wait for runs, which may take long. A check goes over all segments, and there may be
        // many small ones. After a check without result, the next one comes when as much as a segment has been
        // read and written.
        let between_looks = self.config.segment_bytes.max(STRETCH);
        let mut since_look = 0;
        let mut spend_and_sort = |bytes| {
            spend(bytes)?;
            since_look += bytes;
            if since_look < between_looks {
                return Ok(());
            }
            if self.backlog() == 0 || !self.sort_step(RunSources::Segments, load, spend)? {
                since_look = 0;
            }
            Ok(())
        };
        self.make_run(&task, &mut spend_and_sort)
    }

    /// Whether a file is missing without which a run would drop good records.
    fn waits_for_file(&self) -> bool {
        let mut gone = self.unusable.gone.lock();
        let is_gone = |segment: &Arc<Segment>| {
            let opened = self.disk.open(&segment.path());
            !segment.is_retired() && opened.is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
        };
        if let Some(back) = gone.take_if(|segment| !is_gone(segment)) {
            self.unusable.pass(back.life.id, UnusablePart::File);
        }
        gone.is_some()
    }

    /// Makes the run of the task, unless damage is found.
    fn make_run(
        &self,
        task: &SortTask,
        spend: &mut dyn FnMut(u64) -> Result<(), Stop>,
    ) -> Result<bool, Stop> {
        let pool = &self.pool;
        let room = pool.room_for_sorting();
        let claim = pool.claim(task.bytes);
        let is_refused = self.least_refused.load(Ordering::Relaxed) < u64::MAX;
        if pool.is_short() && (is_refused || room.is_none_or(|room| room < task.bytes)) {
            pool.lend()?;
        }
        let id = pool.draw_id();
        if let Some(cipher) = self.config.cipher.as_ref().filter(|_| task.renews) {
            let (floor, _) = cipher.renewed();
            let mut renewed = self.renewed.lock();
            if renewed.0 != floor {
                *renewed = (floor, BTreeSet::new());
            }
            renewed.1.insert(id);
        }
        let built = self.build_run(id, task, &claim, spend);
        match built {
            Ok(built) => {
                self.read.fetch_add(built.read, Ordering::Relaxed);
                self.written.fetch_add(built.written, Ordering::Relaxed);
                let published = self.publish_run(built, task);
                self.after_run(task, published.as_ref().err());
                published.map(|()| true).map_err(Stop::Io)
            }
            Err(failed) => {
                self.forget_unpublished(id);
                match failed {
                    Failed::Stop(stop) => {
                        if let Stop::Io(error) = &stop {
                            self.after_run(task, Some(error));
                        }
                        Err(stop)
                    }
                    Failed::Damaged => Ok(false),
                    Failed::Gone(segment) => {
                        self.unusable.note_gone(&segment);
                        Ok(false)
                    }
                }
            }
        }
    }

    /// Learns from a run that was written, or from the error that ended it.
    fn after_run(&self, task: &SortTask, error: Option<&io::Error>) {
        let archive_failed = || {
            let archive = self.archive.as_ref();
            archive.is_some_and(|archive| archive.failing().is_some())
        };
        match error {
            None => {
                self.allow_larger_runs();
                self.measure_volume();
                self.is_stuck.store(false, Ordering::Relaxed);
            }
            Some(error) if is_out_of_space(error) && !archive_failed() => {
                self.refuse_runs_of(task.bytes);
            }
            Some(_) => {}
        }
    }

    /// Removes the files of an unfinished run. A file whose removal fails is removed later.
    fn forget_unpublished(&self, id: SegmentId) {
        let index = index_path(id);
        let paths = [format!("{index}.new"), index, new_path(id)];
        if let Err(error) = self.held_files.remove_all(&paths) {
            tracing::warn!(%error, run = %id, "a run that was not finished stays for now");
        }
    }

    fn build_run(
        &self,
        id: SegmentId,
        task: &SortTask,
        claim: &Claim<'_>,
        spend: &mut dyn FnMut(u64) -> Result<(), Stop>,
    ) -> Result<Built, Failed> {
        let mut earlier = Vec::with_capacity(task.earlier);
        for run in &self.journal.runs()[..task.earlier] {
            let index = self.sound_index(&run.segment)?.ok_or(Failed::Damaged)?;
            earlier.push((Arc::clone(run), index));
        }
        let known_deleted = checkpoint::list(&*self.disk)?.first().copied();
        let mut build = Build {
            sorter: self,
            sources: &task.sources,
            earlier: &earlier,
            known_deleted,
            forgotten: None,
            gone: task.gone(self),
            found: Vec::new(),
            spend,
            claim,
        };
        build.run(id, task.head.clone())
    }

    /// Publishes a run that is on the device: it gets its name, readers switch to it, and the files that it
    /// replaces are removed.
    fn publish_run(&self, built: Built, task: &SortTask) -> io::Result<()> {
        let Built {
            life,
            head,
            index,
            archived,
            found,
            ..
        } = built;
        let id = life.id;
        // If its name is not flushed, the index could outlive the run.
        let path_of_index = index_path(id);
        let new = format!("{path_of_index}.new");
        let written = self
            .flush_names("sorted")
            .and_then(|()| disk::replace_file(&*self.disk, &new, &path_of_index, &index.parts()))
            .and_then(|()| self.flush_names("index"));
        let segment = Segment::finished(life, base_of(id), Some(path(id)), life.size);
        *segment.end.write() = Some(index.end());
        segment.set_indexed();
        // The memory is not needed while the next steps run.
        drop(index);
        let live = written.and_then(|()| {
            let index = self.with_descriptor(|| self.indexes.stream(&segment))?;
            let index = index.ok_or(io::ErrorKind::InvalidData)?;
            let live = self.live_bytes(&index);
            index.check_reads()?;
            Ok(live)
        });
        let unpublish = |archived, error| {
            self.indexes.forget([id]);
            self.forget_unpublished(id);
            if let (Some(archive), Some(pending)) = (&self.archive, archived) {
                archive.forget(pending);
            }
            Err(error)
        };
        let live = match live {
            Ok(live) => live,
            Err(error) => return unpublish(archived, error),
        };
        let published = match self.disk.rename(&new_path(id), &path(id)) {
            // The name has not changed.
            Err(error) if is_out_of_space(&error) => return unpublish(archived, error),
            renamed => renamed.and_then(|()| self.flush_names("sorted")),
        };
        match published {
            // The engine ends. The next start sees whether the run is there.
            Err(error) if is_out_of_descriptors(&error) => return Ok(()),
            Err(error) => {
                // The next start finds out whether the run exists.
                self.journal.fail("publishing a sorted run", &error);
                return Ok(());
            }
            Ok(()) => {}
        }
        if let (Some(archive), Some(pending)) = (&self.archive, archived) {
            archive.keep(pending);
        }
        let run = Arc::new(Run {
            segment: Arc::new(segment),
            straddling: head.pack_bytes.saturating_sub(live),
            head,
        });
        // No other thread changes these runs. Newer runs may have been added behind the runs of the task.
        let mut runs = self.journal.runs();
        let before = task.earlier.checked_sub(1).and_then(|at| runs.get(at));
        let from = before.map_or(Position::ZERO, |run| run.head.limit);
        let to = run.head.limit;
        // Some of this damage is forgotten with the files.
        let damaged = self.damages.between(from, to);
        runs.splice(task.earlier..task.earlier + task.replaced, [run]);
        let retired = {
            // Indexes and checkpoints are written from one consistent state.
            let mut indexing = self.indexing.hold();
            let retired = self.journal.enter_runs(runs);
            let ids: Vec<SegmentId> = retired.iter().map(|segment| segment.life.id).collect();
            self.made.lock().retain(|id, _| !ids.contains(id));
            self.unusable.forget(&ids);
            self.indexes.forget(ids.iter().copied());
            self.open_segments.close(ids);
            self.logs.forget_deleted(self.journal.sorted_end());
            for (log, from, to) in &found {
                log.state.write().find_again(*from, *to);
                self.damages.find_again(log.id, *from, *to);
            }
            if !found.is_empty() {
                // The checkpoints list these records as lost.
                self.forget_checkpoints(&mut indexing);
            }
            retired
        };
        self.forget_damage(from, to);
        let gone: u64 = retired.iter().map(|file| file.file_bytes()).sum();
        let freed = gone.saturating_sub(life.size);
        self.freed.fetch_add(freed, Ordering::Relaxed);
        match self.give_back(&retired, &damaged) {
            // The engine ends. The next start gives back the rest.
            Err(error) if is_out_of_descriptors(&error) => {}
            Err(error) => self.journal.fail("giving back sorted segments", &error),
            Ok(()) => {}
        }
        Ok(())
    }

    /// Makes the names in a directory durable; waits for a file descriptor if none is left.
    ///
    /// # Errors
    /// The error of the flush, which is final. Lack of a descriptor only if the sorter must stop.
    fn flush_names(&self, directory: &str) -> io::Result<()> {
        self.with_descriptor(|| self.disk.sync_directory(directory))
    }

    /// Repeats a call until there is a file descriptor for it, or the sorter must stop. A call that
    /// finds none has changed nothing.
    fn with_descriptor<T>(&self, call: impl Fn() -> io::Result<T>) -> io::Result<T> {
        let control = &self.control;
        let mut pause = FIRST_PAUSE;
        loop {
            match call() {
                Err(error) if is_out_of_descriptors(&error) && !control.is_stopped() => {
                    if pause == FIRST_PAUSE {
                        tracing::warn!(%error, "no file descriptor for the sorter; it waits for one");
                    }
                    control.wait(pause);
                    pause = (pause * 2).min(REST);
                }
                result => return result,
            }
        }
    }

    /// Gives back the space of the files that a run replaces. `damaged` is known damage in them.
    fn give_back(&self, retired: &[Arc<Segment>], damaged: &[Damage]) -> io::Result<()> {
        let kept_for_backup = match self.give_back_indexes(retired) {
            Err(error) if is_out_of_descriptors(&error) => return Err(error),
            Err(error) => {
                // No reader uses these indexes. They are removed later.
                tracing::warn!(%error, "indexes of sorted segments cannot be removed now");
                true
            }
            Ok(kept) => kept,
        };
        let (runs, segments): (Vec<_>, Vec<_>) = retired
            .iter()
            .partition(|segment| crate::format::address::is_address(segment.base));
        let mut doomed: Vec<String> = runs.iter().map(|run| run.path()).collect();
        let room = match kept_for_backup {
            true => 0,
            false => self.pool.room(),
        };
        // A file that was damaged once may lie on bad sectors. A start that goes by indexes notes no holes.
        let whole = |segment: &&Arc<Segment>| {
            let within = segment.base..segment.limit();
            let is_hit = damaged
                .iter()
                .any(|damage| within.contains(&damage.position));
            let sound = segment.holes.read().is_empty() && !is_hit;
            sound && segment.file_bytes() == self.config.segment_bytes
        };
        let (again, rest): (Vec<&Arc<Segment>>, Vec<_>) =
            segments.into_iter().partition(|segment| whole(segment));
        let again_ids: Vec<SegmentId> = again.iter().map(|s| s.life.id).collect();
        let (again_ids, over) = again_ids.split_at(room.min(again_ids.len()));
        doomed.extend(rest.iter().map(|segment| segment.path()));
        let paths = |ids: &[SegmentId]| ids.iter().map(|id| journal_path(*id)).collect::<Vec<_>>();
        doomed.extend(paths(over));
        let again_paths = paths(again_ids);
        let recycled = self
            .held_files
            .unless_held(&again_paths, || self.pool.retire(again_ids))?;
        if recycled && !again_ids.is_empty() {
            self.flush_names("pool")?;
            self.flush_names("journal")?;
            self.pool.reuse(again_ids);
        } else {
            doomed.extend(again_paths);
        }
        match self.held_files.remove_all(&doomed) {
            // A later step tries again.
            Err(error) if is_out_of_space(&error) => {
                tracing::warn!(%error, "files that were sorted cannot be removed now");
            }
            removed => {
                removed?;
            }
        }
        self.flush_names("sorted")?;
        self.flush_names("journal")
    }

    /// Removes the indexes of retired files. Returns whether a backup holds one.
    ///
    /// # Errors
    /// The error of the file system. Remaining indexes do no harm.
    fn give_back_indexes(&self, retired: &[Arc<Segment>]) -> io::Result<bool> {
        if known_bad::makes(Mistake::SortedIndexesStay) {
            return Ok(false);
        }
        let indexes = self.with_descriptor(|| self.disk.list("index"))?;
        let indexes: BTreeSet<String> = indexes.into_iter().collect();
        let is_there = |path: &String| {
            let name = path.strip_prefix("index/");
            name.is_some_and(|name| indexes.contains(name))
        };
        let paths = retired.iter().map(|segment| segment.life.id);
        let paths = paths.flat_map(|id| [index_path(id), old_path(id)]);
        let doomed: Vec<String> = paths.filter(is_there).collect();
        let kept = self.held_files.remove_all(&doomed)?;
        self.flush_names("index")?;
        Ok(kept)
    }
}
