//! Work on sealed segments: builds and writes the index, removes the places of frames from memory, and
//! from time to time writes a checkpoint of all logs.
//!
//! No promise depends on this work: a start that lacks an index or a checkpoint reads the segments
//! instead. An error therefore delays the work and stops nothing, not even the failed flush of a
//! directory: each attempt writes a new file under a new name, and trusts no earlier one. Meanwhile
//! indexes stay in memory, up to a bound. Beyond the bound, appends that need a new segment are
//! refused.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::checkpoint::{self, SegmentEntry, Summary, Writer};
use crate::disk::{Shortage, memory, shortage};
use crate::ids::{LogId, Position, SegmentId, Timestamp};
use crate::index::{Image, NewRow, SealedIndex, index_path};
use crate::journal::body::Accepted;
use crate::journal::segment::Segment;
use crate::local::{Core, ExtrasImage, Log, Lost};
use crate::sorted::{self, Run};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// Maximum number of sealed segments without an index. Beyond it a roll waits, because a start has to
/// read these segments.
const MOST_WAITING: usize = 2;

/// A checkpoint is due after this many segments were sealed since the last one, and this many times its
/// size. Its cost is therefore a bounded share of all writes.
const CHECKPOINT_SEGMENTS: u64 = 8;
const CHECKPOINT_SHARE: u64 = 4;

/// Approximate temporary memory of a start for each log, in bytes.
const START_BYTES_PER_LOG: u64 = 128;

/// Condition for writing a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// If one is due.
    WhenDue,
    /// For a backup: if [`CHECKPOINT_SHARE`] times the last one's size was sealed since.
    ForBackup,
    /// If any segment was sealed since the last one: there is time.
    AtRest,
    /// Always: the run ends.
    AtEnd,
}

/// Pause after a failed write of an index or a checkpoint. It doubles with each failure, up to
/// [`LONGEST_PAUSE`].
const RETRY_AFTER: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Maximum bytes of unwritten indexes in memory. Beyond it no segment is begun for records.
const MOST_UNWRITTEN_BYTES: u64 = 128 << 20;
/// Maximum size of unwritten indexes in memory, in segments.
const MOST_UNWRITTEN_SEGMENTS: u64 = 2;

/// Maximum bytes of indexes of damaged segments that wait in memory until they are written with the
/// damage. Beyond it readers make an index from the frames of its segment.
const MOST_DAMAGED_BYTES: u64 = 64 << 20;

/// Pause before the indexes of damaged segments and a checkpoint are written, because damage often
/// affects several places. At least 10 times as long as the last checkpoint took.
const AFTER_DAMAGE: Duration = Duration::from_secs(1);
const AFTER_DAMAGE_SHARE: u32 = 10;

/// A segment that the journal just left, with its state and the state of its logs at that time.
pub(crate) struct Sealed {
    pub(crate) segment: Arc<Segment>,
    pub(crate) end: Position,
    /// Header checksum of the segment's last frame.
    pub(crate) chain: u32,
    pub(crate) before: Option<SegmentId>,
    pub(crate) next_log_counter: u64,
    pub(crate) arrival: Timestamp,
    pub(crate) expiry: Timestamp,
    /// Every log that the segment touches.
    pub(crate) logs: Vec<(Arc<Log>, Image)>,
}

/// Progress of indexes and checkpoints.
#[derive(Default)]
pub(crate) struct Progress {
    /// Indexes that were built and not yet written.
    pub(crate) unwritten: VecDeque<Arc<SealedIndex>>,
    /// Bases of segments and runs with damage found since their index was made. Each has the bytes of
    /// the index that is kept in memory for it.
    damaged: BTreeMap<Position, u64>,
    /// Bytes of segments whose indexes a start would read.
    pub(crate) since_checkpoint: u64,
    pub(crate) checkpoint_bytes: u64,
    /// Time that the last checkpoint took.
    checkpoint_took: Duration,
    /// The last segment that the newest checkpoint covers.
    pub(crate) covered: Option<SegmentId>,
    /// State of the journal at the end of the newest segment with an index.
    pub(crate) newest: Option<Newest>,
}

impl Progress {
    /// Notes a damaged segment, whose index takes `bytes` of memory. Returns whether the index stays in
    /// memory until it is written again.
    fn note_damaged(&mut self, base: Position, bytes: u64) -> bool {
        let others = self.damaged.iter().filter(|(other, _)| **other != base);
        let others: u64 = others.map(|(_, bytes)| bytes).sum();
        let is_kept = bytes > 0 && others + bytes <= MOST_DAMAGED_BYTES;
        self.damaged.insert(base, if is_kept { bytes } else { 0 });
        is_kept
    }
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Sealed>,
    /// Whether a thread works on the queue.
    running: bool,
    /// The failure of the last index or checkpoint.
    stuck: Option<Stuck>,
    /// Whether damage invalidated the checkpoints, and none was written since.
    has_damage: bool,
    checkpoint_took: Duration,
    stopped: bool,
}

impl Queue {
    /// Maximum rest of the thread while no segment waits. `None`: until a segment waits.
    fn rest(&self) -> Option<Duration> {
        let after_damage = AFTER_DAMAGE.max(self.checkpoint_took * AFTER_DAMAGE_SHARE);
        match &self.stuck {
            Some(stuck) => Some(stuck.pause()),
            None => self.has_damage.then_some(after_damage),
        }
    }
}

/// An index or a checkpoint cannot be written.
struct Stuck {
    error: io::Error,
    /// Failures in a row.
    tries: u32,
}

impl Stuck {
    /// Pause before the next attempt.
    fn pause(&self) -> Duration {
        let doubled = RETRY_AFTER.saturating_mul(1 << (self.tries - 1).min(6));
        doubled.min(LONGEST_PAUSE)
    }
}

/// Indexes sealed segments.
#[derive(Default)]
pub(crate) struct Indexer {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Held while working: segments are indexed one at a time, in order.
    progress: Mutex<Progress>,
    /// Bytes of indexes that no file holds yet.
    unwritten_bytes: AtomicU64,
}

/// The newest segment with an index, as a checkpoint describes it.
pub(crate) struct Newest {
    pub(crate) id: SegmentId,
    pub(crate) before: Option<SegmentId>,
    pub(crate) end: Position,
    pub(crate) chain: u32,
    pub(crate) next_log_counter: u64,
    pub(crate) arrival: Timestamp,
    pub(crate) expiry: Timestamp,
}

impl Indexer {
    pub(crate) fn new(progress: Progress) -> Self {
        Self {
            progress: Mutex::new(progress),
            ..Self::default()
        }
    }

    /// The last segment that a checkpoint covers.
    pub(crate) fn covered(&self) -> Option<SegmentId> {
        self.progress.lock().covered
    }

    /// Stops indexing and checkpoints while the returned guard is held.
    pub(crate) fn hold(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock()
    }

    /// The reason why the last index or checkpoint could not be written, if it failed.
    pub(crate) fn trouble(&self) -> Option<String> {
        let queue = self.queue.lock();
        queue.stuck.as_ref().map(|stuck| stuck.error.to_string())
    }

    /// # Errors
    /// If indexes cannot be written, and no more indexes fit into memory.
    pub(crate) fn has_room(&self, segment_bytes: u64) -> Result<(), Shortage> {
        let most = MOST_UNWRITTEN_BYTES.min(MOST_UNWRITTEN_SEGMENTS * segment_bytes);
        if self.unwritten_bytes.load(Ordering::Relaxed) <= most {
            return Ok(());
        }
        match &self.queue.lock().stuck {
            Some(stuck) => Err(shortage(&stuck.error).unwrap_or(Shortage::Space)),
            None => Ok(()),
        }
    }

    /// Takes over a sealed segment. Waits while too many segments have no index.
    pub(crate) fn take_over(&self, sealed: Sealed) {
        let mut queue = self.queue.lock();
        queue.waiting.push_back(sealed);
        self.changed.notify_all();
        while queue.running
            && queue.stuck.is_none()
            && !queue.stopped
            && queue.waiting.len() > MOST_WAITING
        {
            self.changed.wait(&mut queue);
        }
    }

    /// Body of the indexing thread, until stopped.
    pub(crate) fn run(&self, core: &Core) {
        let _running = Running::new(self);
        // Temporary memory of the start.
        memory::give_back(core.logs.len() as u64 * START_BYTES_PER_LOG);
        loop {
            // Segments that the start found without an index come first.
            self.work(core, Wanted::WhenDue);
            if !self.wait() {
                return;
            }
        }
    }

    /// Waits for a segment, the next attempt, or the write after damage. `false`: stop.
    fn wait(&self) -> bool {
        let mut queue = self.queue.lock();
        while queue.waiting.is_empty() && !queue.stopped {
            match queue.rest() {
                None => self.changed.wait(&mut queue),
                Some(pause) if self.changed.wait_for(&mut queue, pause).timed_out() => break,
                Some(_) => {}
            }
        }
        !queue.stopped
    }

    /// Damage invalidated the checkpoints: the thread writes another, even in an idle store.
    fn wake(&self) {
        let mut queue = self.queue.lock();
        if !std::mem::replace(&mut queue.has_damage, true) {
            self.changed.notify_all();
        }
    }

    pub(crate) fn stop(&self) {
        self.queue.lock().stopped = true;
        self.changed.notify_all();
    }

    /// Indexes all waiting segments, writes unwritten indexes, and writes a checkpoint if one is
    /// `wanted`. An error is logged, and the thread tries again.
    pub(crate) fn work(&self, core: &Core, wanted: Wanted) {
        let mut progress = self.progress.lock();
        // Approximate memory used: images and places of logs, indexes, checkpoints.
        let mut used = 0;
        loop {
            let sealed = {
                let mut queue = self.queue.lock();
                let sealed = queue.waiting.pop_front();
                self.changed.notify_all();
                sealed
            };
            let Some(sealed) = sealed else { break };
            progress.since_checkpoint += sealed.segment.file_bytes();
            used += core.index_sealed(sealed, &mut progress);
        }
        let result = core.write_indexes(&mut progress).and_then(|()| {
            let share = CHECKPOINT_SHARE * progress.checkpoint_bytes;
            let least = match wanted {
                Wanted::WhenDue => share.max(CHECKPOINT_SEGMENTS * core.config.segment_bytes),
                Wanted::ForBackup => share.max(1),
                Wanted::AtRest | Wanted::AtEnd => 1,
            };
            let ends = wanted == Wanted::AtEnd;
            let due = ends || progress.since_checkpoint >= least;
            if due && !core.is_in_doubt() {
                core.write_checkpoint(ends, &mut progress)?;
                used += progress.checkpoint_bytes;
            }
            Ok(())
        });
        let unwritten = progress
            .unwritten
            .iter()
            .map(|index| index.bytes().len() as u64);
        let unwritten = unwritten.sum();
        self.unwritten_bytes.store(unwritten, Ordering::Relaxed);
        let mut queue = self.queue.lock();
        queue.has_damage = false;
        queue.checkpoint_took = progress.checkpoint_took;
        let before = queue.stuck.take();
        match (result, before) {
            (Ok(()), None) => {}
            (Ok(()), Some(_)) => tracing::info!("indexes and checkpoints are written again"),
            (Err(error), before) => {
                if before.is_none() {
                    tracing::warn!(%error, "an index or a checkpoint cannot be written; it is tried again, after at most a minute, and until then a start takes longer");
                }
                let tries = before.map_or(0, |before| before.tries).saturating_add(1);
                queue.stuck = Some(Stuck { error, tries });
            }
        }
        drop(queue);
        self.changed.notify_all();
        drop(progress);
        memory::give_back(used);
    }
}

/// A roll waits for the thread only while the thread runs, however the thread ends.
struct Running<'a>(&'a Indexer);

impl<'a> Running<'a> {
    fn new(indexer: &'a Indexer) -> Self {
        indexer.queue.lock().running = true;
        Self(indexer)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.queue.lock().running = false;
        self.0.changed.notify_all();
    }
}

/// The image of a log at `end` that no index describes: only damage shows that the log was there.
fn first_image(log: &Log, end: Position) -> Image {
    let state = log.state.read();
    let image = state.image(log.id, Some(log.name.clone()));
    let next = state.tail(end);
    let extras = ExtrasImage {
        writer_epoch: state.writer_epoch(),
        ..ExtrasImage::default()
    };
    Image {
        next,
        kept: image.kept.up_to(next),
        last_end: image.last_end.min(end),
        extras: (!extras.is_empty()).then(|| Box::new(extras)),
        lost: state.lost_between(Position::ZERO, end),
        ..image
    }
}

/// Outcome of an attempt to write a checkpoint.
#[derive(PartialEq, Eq)]
enum Tried {
    Done,
    /// More losses became known during the attempt: some logs in the checkpoint do not list them.
    Learned,
}

impl Core {
    /// Builds the index of a segment, which from then on lists its frames. Returns the size of the
    /// index in bytes.
    fn index_sealed(&self, sealed: Sealed, progress: &mut Progress) -> u64 {
        let Sealed {
            segment,
            end,
            chain,
            before,
            next_log_counter,
            arrival,
            expiry,
            mut logs,
        } = sealed;
        let (from, limit) = (segment.first(), segment.limit());
        logs.sort_unstable_by_key(|(log, _)| log.id);
        let mut touched = Vec::with_capacity(logs.len());
        let rows = logs.into_iter().map(|(log, mut image)| {
            let (places, below) = {
                let state = log.state.read();
                let places = state.places.within(from, limit).to_vec();
                if !image.deleted {
                    // Some losses may have been found since the segment was left.
                    image.lost = state.lost_between(segment.base, limit);
                }
                (places, state.chain.below_next())
            };
            touched.push((log, image.keep_changes(segment.base)));
            NewRow {
                image,
                places,
                below,
            }
        });
        let index = SealedIndex::build(&segment.life, segment.base, end, chain, rows);
        let index = Arc::new(index);
        self.indexes.pin(Arc::clone(&index));
        segment.set_indexed();
        for (log, producers) in touched {
            let mut state = log.state.write();
            state.seal(segment.base, limit);
            if let Some(producers) = producers {
                state.index_producers(limit, producers);
            }
        }
        let bytes = index.bytes().len() as u64;
        progress.unwritten.push_back(index);
        progress.newest = Some(Newest {
            id: segment.life.id,
            before,
            end,
            chain,
            next_log_counter,
            arrival,
            expiry,
        });
        bytes
    }

    /// Makes the next start read a damaged segment, and find the damage too, by removing its index and
    /// all checkpoints. The index stays in memory, up to [`MOST_DAMAGED_BYTES`] of all, and is written
    /// again with the damage before the next checkpoint.
    pub(crate) fn let_next_start_find(&self, segment: &Segment) {
        // An index that is being written now is removed too, and later ones include the damage.
        let mut progress = self.indexer.progress.lock();
        if !segment.is_indexed() {
            return;
        }
        progress.damaged.entry(segment.base).or_insert(0);
        let index = self.indexes.get(segment).map(|index| {
            let index = index.filter(|index| !index.is_partial());
            let bytes = index.as_ref().map_or(0, |index| index.file_bytes());
            match index {
                Some(index) if progress.note_damaged(segment.base, bytes) => {
                    self.indexes.pin(index);
                }
                _ => self.indexes.close(segment.life.id),
            }
        });
        let forget = || index.and_then(|()| self.set_index_aside(segment));
        if let Err(error) = forget() {
            tracing::warn!(segment = %segment.life.id, %error, "the next start may not find this damage before it is read again");
        }
        self.forget_checkpoints(&mut progress);
    }

    /// Invalidates the checkpoints, because they list other losses than there are. No start begins with
    /// them, and another is written soon.
    pub(crate) fn forget_checkpoints(&self, progress: &mut Progress) {
        progress.covered = None;
        // A start after a crash has to read everything now.
        progress.since_checkpoint = u64::MAX / 2;
        if let Err(error) = checkpoint::set_aside(&*self.disk, &self.backups) {
            tracing::warn!(%error, "the next start may begin with a checkpoint that does not know of all damage");
        }
        self.indexer.wake();
    }

    /// Makes the indexes of damaged segments again, with the damage.
    fn remake_damaged(&self, progress: &mut Progress) -> io::Result<()> {
        while let Some(base) = progress.damaged.first_key_value().map(|(base, _)| *base) {
            // No index is written for a segment that is no longer served.
            if let Some(segment) = self.journal.segment_at(base).filter(|s| s.base == base)
                && let Some(index) = self.whole_index(&segment)?
            {
                let lost = |log| self.lost_within(log, &segment);
                let made = index.with_lost(&segment.life, lost);
                index.check_reads()?;
                progress.unwritten.retain(|index| index.base != base);
                match made.map(Arc::new) {
                    Some(made) => {
                        self.indexes.pin(Arc::clone(&made));
                        progress.unwritten.push_back(made);
                    }
                    // The index does not describe a log, so it is not written.
                    None => self.indexes.forget([segment.life.id]),
                }
            }
            progress.damaged.remove(&base);
        }
        Ok(())
    }

    /// Records of a log that damage removed in a segment or run.
    pub(crate) fn lost_within(&self, log: LogId, segment: &Segment) -> Vec<Lost> {
        let Some(log) = self.logs.by_id(log) else {
            return Vec::new();
        };
        let (from, to) = self.reach_of(segment);
        log.state.read().lost_between(from, to)
    }

    /// Positions that a segment covers. A run also covers missing segments directly before it.
    pub(crate) fn reach_of(&self, segment: &Segment) -> (Position, Position) {
        if !sorted::is_address(segment.base) {
            return (segment.base, segment.limit());
        }
        let runs = self.journal.runs();
        let at = runs.iter().position(|run| run.segment.base == segment.base);
        let Some(at) = at else {
            return (Position::ZERO, Position::ZERO);
        };
        let before = at.checked_sub(1).and_then(|before| runs.get(before));
        let from = before.map_or(Position::ZERO, |run| run.head.limit);
        (from, runs[at].head.limit)
    }

    fn write_indexes(&self, progress: &mut Progress) -> io::Result<()> {
        self.remake_damaged(progress)?;
        let mut result = Ok(());
        let mut written = Vec::new();
        while let Some(index) = progress.unwritten.front() {
            let path = index_path(index.segment);
            let new = format!("{path}.new");
            result = checkpoint::replace(&*self.disk, &new, &path, &[index.bytes()]);
            if result.is_err() {
                break;
            }
            self.backups.replaced(&path);
            written.extend(progress.unwritten.pop_front());
        }
        if written.is_empty() {
            return result;
        }
        if let Err(error) = self.disk.sync_directory("index") {
            // A later flush may succeed without these names, so the files are written again.
            written.extend(progress.unwritten.drain(..));
            progress.unwritten = written.into();
            return Err(error);
        }
        for index in written {
            self.indexes.unpin(index.segment);
        }
        result
    }

    /// Writes the state of all logs at the end of the newest indexed segment.
    fn write_checkpoint(&self, ends: bool, progress: &mut Progress) -> io::Result<()> {
        // Each further attempt has one more index in memory.
        while self.try_checkpoint(ends, progress)? == Tried::Learned {
            self.forget_checkpoints(progress);
        }
        Ok(())
    }

    fn try_checkpoint(&self, ends: bool, progress: &mut Progress) -> io::Result<Tried> {
        let Some(newest) = &progress.newest else {
            return Ok(Tried::Done);
        };
        let started = self.journal.clock.monotonic();
        let mut writer = Writer::new(&*self.disk, &self.summary(newest, ends))?;
        let mut moved = Vec::new();
        let sorted_end = self.journal.sorted_end();
        for log in self.logs.all_known() {
            let image = {
                let state = log.state.read();
                if state.created_end > newest.end {
                    continue;
                }
                // A deletion touches the log first, and takes effect when it is flushed.
                let touched_since = state.touched_in.get().is_some_and(|id| id > newest.id);
                if state.last_end <= newest.end && !touched_since {
                    Ok(state.image(log.id, Some(log.name.clone())))
                } else {
                    Err(state.chain.clone())
                }
            };
            match image {
                Ok(image) => writer.add(&image)?,
                // The log has changed since: the newest index that lists it has its earlier state.
                Err(chain) => {
                    // All runs share one key: their indexes are read together, front to back.
                    let in_runs = |base| {
                        if base < sorted_end {
                            Position::ZERO
                        } else {
                            base
                        }
                    };
                    moved.push((chain.newest().map(in_runs), log.id, chain));
                }
            }
        }
        // One index at a time: there may be hundreds of thousands of logs, and hardly more than one
        // large index is kept in memory.
        moved.sort_unstable_by_key(|(base, id, _)| (*base, *id));
        let mut runs = None::<Vec<_>>;
        let mut moved = moved.into_iter().peekable();
        while let Some((base, ..)) = moved.peek() {
            let base = *base;
            let of_base;
            let told: &[Arc<SealedIndex>] = match base {
                // The state is that at the end of the newest run that lists the log.
                Some(base) if base < sorted_end => match &mut runs {
                    Some(runs) => runs,
                    none => none.insert(self.runs_told()?),
                },
                _ => {
                    let segment = base.and_then(|base| self.journal.segment_at(base));
                    let (index, learned) = match segment {
                        Some(segment) => self.index_or_anew(&segment)?,
                        None => (None, false),
                    };
                    if learned {
                        return Ok(Tried::Learned);
                    }
                    of_base = index;
                    of_base.as_slice()
                }
            };
            while let Some((_, id, chain)) = moved.next_if(|(other, ..)| *other == base) {
                let image = |index: &Arc<SealedIndex>| index.image(&index.row(id)?);
                match told.iter().rev().find_map(image) {
                    Some(image) => {
                        let log = self.logs.by_id(id);
                        let lost = log.map_or_else(Vec::new, |log| {
                            let state = log.state.read();
                            let mut lost = state.lost_between(Position::ZERO, newest.end);
                            // Later frames reused these lsns.
                            let again = |lost: &&Lost| !state.is_lost(lost.from, lost.to);
                            lost.extend(image.lost.iter().filter(again));
                            lost.sort_unstable_by_key(|lost| lost.from);
                            lost
                        });
                        writer.add(&self.whole_image(Image {
                            chain,
                            lost,
                            ..image
                        }))?;
                    }
                    // Only a missing segment held the log at that time.
                    None if base.is_none() => {
                        if let Some(log) = self.logs.by_id(id) {
                            writer.add(&first_image(&log, newest.end))?;
                        }
                    }
                    // The index is damaged, which the next start will notice, or unreadable now.
                    None => {
                        told.iter().try_for_each(|index| index.check_reads())?;
                        tracing::warn!(
                            log_id = id.get(),
                            "no checkpoint is written: no index describes this log, and the next start makes the index again"
                        );
                        return Ok(Tried::Done);
                    }
                }
            }
            for index in told {
                index.check_reads()?;
            }
        }
        progress.checkpoint_bytes = writer.finish(&self.backups)?;
        progress.covered = Some(newest.id);
        progress.since_checkpoint = 0;
        let took = self.journal.clock.monotonic().duration_since(started);
        progress.checkpoint_took = took;
        self.journal.observer.checkpoint(took);
        Ok(Tried::Done)
    }

    /// Completes an image from the newest index that lists the log with all producers of the log.
    fn whole_image(&self, mut image: Image) -> Image {
        if let Some(log) = self.logs.by_id(image.id).filter(|_| !image.deleted)
            && let Some(extras) = log.state.read().extras.as_deref()
        {
            let producers = extras.indexed_producers();
            if !producers.is_empty() {
                image.extras.get_or_insert_default().producers = producers.clone();
            }
        }
        image
    }

    /// The index of a segment or run, if there is a good one. An index made from the segment's frames
    /// alone is incomplete, and does not count.
    ///
    /// # Errors
    /// If no file descriptor is left to read the index.
    fn whole_index(&self, segment: &Segment) -> io::Result<Option<Arc<SealedIndex>>> {
        let index = self.indexes.stream(segment)?;
        Ok(index.filter(|index| !index.is_partial()))
    }

    /// Indexes of all runs, oldest first; empty if one of them has no good index.
    fn runs_told(&self) -> io::Result<Vec<Arc<SealedIndex>>> {
        let runs = self.journal.runs();
        let mut told = Vec::with_capacity(runs.len());
        for run in &runs {
            match self.whole_index(&run.segment)? {
                Some(index) => told.push(index),
                None => return Ok(Vec::new()),
            }
        }
        Ok(told)
    }

    fn summary(&self, newest: &Newest, clean: bool) -> Summary {
        let segments = self.journal.segments.read();
        let segments = segments
            .values()
            .filter(|segment| segment.base <= newest.end)
            .map(|segment| SegmentEntry {
                life: segment.life,
                base: segment.base,
                end: segment.end.read().unwrap_or(newest.end),
                bytes: segment.file_bytes(),
            })
            .collect();
        Summary {
            store_id: self.store_id,
            epoch: self.journal.recovery_epoch,
            next_log_counter: newest.next_log_counter,
            clean,
            arrival: newest.arrival,
            expiry: Some(newest.expiry),
            last: newest.id,
            before: newest.before,
            chain: newest.chain,
            history: self.history.clone(),
            sorted: self.journal.runs().last().map(|run| run.head.last),
            segments,
            accepted: self.accepted_still(),
        }
    }

    /// Accepted losses whose damage may still exist.
    fn accepted_still(&self) -> Vec<Accepted> {
        let runs = self.journal.runs();
        let sorted_end = self.journal.sorted_end();
        let damaged = |run: &Arc<Run>| !run.segment.holes.read().is_empty();
        let last_damaged = runs
            .iter()
            .filter(|run| damaged(run))
            .map(|run| run.head.first_base);
        let from = last_damaged.min().unwrap_or(sorted_end);
        let accepted = self.damages.accepted().iter();
        accepted
            .filter(|accepted| accepted.before > from)
            .cloned()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indexes_of_damaged_segments_take_bounded_memory_until_written() {
        let mut progress = Progress::default();
        let (base, part) = (Position::new, MOST_DAMAGED_BYTES / 4);
        assert!(!progress.note_damaged(base(1), MOST_DAMAGED_BYTES + 1));
        for number in 1..=4 {
            assert!(progress.note_damaged(base(number), part), "{number}");
            assert!(progress.note_damaged(base(number), part), "{number} again");
        }
        assert!(!progress.note_damaged(base(5), 1), "the bound is reached");
        // All indexes that can be read are written later.
        assert_eq!(progress.damaged.len(), 5);
        progress.damaged.remove(&base(1));
        assert!(progress.note_damaged(base(6), part));
    }

    #[test]
    fn damage_wakes_the_thread_after_a_pause_that_follows_the_checkpoint() {
        let indexer = Indexer::default();
        assert_eq!(indexer.queue.lock().rest(), None);
        indexer.wake();
        assert_eq!(indexer.queue.lock().rest(), Some(AFTER_DAMAGE));
        indexer.queue.lock().checkpoint_took = 2 * AFTER_DAMAGE;
        let rest = indexer.queue.lock().rest();
        assert_eq!(rest, Some(2 * AFTER_DAMAGE_SHARE * AFTER_DAMAGE));
        let (error, tries) = (io::ErrorKind::StorageFull.into(), 1);
        indexer.queue.lock().stuck = Some(Stuck { error, tries });
        assert_eq!(indexer.queue.lock().rest(), Some(RETRY_AFTER));
    }
}
