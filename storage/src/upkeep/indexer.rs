//! The indexer: builds and writes the index of each segment in `index::queue`, removes the places of its frames from
//! memory, and from time to time writes a checkpoint of all logs.
//!
//! No promise depends on this work: a start that lacks an index or a checkpoint reads the segments
//! instead. An error therefore delays the work and stops nothing, not even the failed flush of a
//! directory: each attempt writes a new file under a new name, and trusts no earlier one. Meanwhile
//! indexes stay in memory, up to a bound. Beyond the bound, appends that need a new segment are
//! refused.

use std::io;
use std::sync::Arc;

use crate::base::ids::Position;
use crate::base::sync::atomic::Ordering;
use crate::disk;
use crate::disk::memory;
use crate::format::body::AcceptedLosses;
use crate::index::checkpoint::{CheckpointWriter, SegmentEntry, Summary};
use crate::index::queue::IndexWriteFailure;
use crate::index::queue::Newest;
use crate::index::queue::{IndexProgress, RunningMark};
use crate::index::{NewRow, SealedIndex, index_path};
use crate::journal::run::Run;
use crate::journal::seal::Sealed;
use crate::journal::segment::Segment;
use crate::logs::extras::ExtrasImage;
use crate::logs::image::Image;
use crate::logs::{Log, Lost};
use crate::read::store::Store;

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
enum CheckpointResult {
    Done,
    /// More losses became known during the attempt: some logs in the checkpoint do not list them.
    Learned,
}

/// Indexes sealed segments and writes checkpoints.
pub(crate) struct Indexer {
    store: Arc<Store>,
}

impl Indexer {
    pub(crate) fn new(store: &Arc<Store>) -> Self {
        Self {
            store: Arc::clone(store),
        }
    }

    /// Body of the indexing thread, until stopped.
    pub(crate) fn run(&self) {
        let _running = RunningMark::new(&self.store.indexing);
        // Temporary memory of the start.
        memory::give_back(self.store.logs.len() as u64 * START_BYTES_PER_LOG);
        loop {
            // Segments that the start found without an index come first.
            self.work(Wanted::WhenDue);
            if !self.store.indexing.wait() {
                return;
            }
        }
    }

    /// Indexes all waiting segments, writes unwritten indexes, and writes a checkpoint if one is
    /// `wanted`. An error is logged, and the thread tries again.
    pub(crate) fn work(&self, wanted: Wanted) {
        let mut progress = self.store.indexing.progress.lock();
        // Approximate memory used: images and places of logs, indexes, checkpoints.
        let mut used = 0;
        loop {
            let sealed = {
                let mut queue = self.store.indexing.queue.lock();
                let sealed = queue.take();
                self.store.indexing.changed.notify_all();
                sealed
            };
            let Some(sealed) = sealed else { break };
            progress.since_checkpoint += sealed.segment.file_bytes();
            used += self.index_sealed(sealed, &mut progress);
        }
        let result = self.write_indexes(&mut progress).and_then(|()| {
            let share = CHECKPOINT_SHARE * progress.checkpoint_bytes;
            let least = match wanted {
                Wanted::WhenDue => share.max(CHECKPOINT_SEGMENTS * self.store.config.segment_bytes),
                Wanted::ForBackup => share.max(1),
                Wanted::AtRest | Wanted::AtEnd => 1,
            };
            let all = self.store.indexing.queue.lock().waiting.is_empty();
            let ends = wanted == Wanted::AtEnd && all;
            let due = ends || progress.since_checkpoint >= least;
            if due && !self.store.is_in_doubt() {
                self.write_checkpoint(ends, &mut progress)?;
                used += progress.checkpoint_bytes;
            }
            Ok(())
        });
        let unwritten = progress
            .unwritten
            .iter()
            .map(|index| index.bytes().len() as u64);
        let unwritten = unwritten.sum();
        self.store
            .indexing
            .unwritten_bytes
            .store(unwritten, Ordering::Relaxed);
        let mut queue = self.store.indexing.queue.lock();
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
                queue.stuck = Some(IndexWriteFailure { error, tries });
            }
        }
        drop(queue);
        self.store.indexing.changed.notify_all();
        drop(progress);
        memory::give_back(used);
    }

    /// Builds the index of a segment, which from then on lists its frames. Returns the size of the
    /// index in bytes.
    fn index_sealed(&self, sealed: Sealed, progress: &mut IndexProgress) -> u64 {
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
        self.store.indexes.pin(Arc::clone(&index));
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

    /// Makes the indexes of damaged segments again, with the damage.
    fn remake_damaged(&self, progress: &mut IndexProgress) -> io::Result<()> {
        while let Some(base) = progress.damaged.first_key_value().map(|(base, _)| *base) {
            // No index is written for a segment that is no longer served.
            if let Some(segment) = self
                .store
                .journal
                .segment_at(base)
                .filter(|s| s.base == base)
                && let Some(index) = self.whole_index(&segment)?
            {
                let lost = |log| self.store.lost_within(log, &segment);
                let made = index.with_lost(&segment.life, lost);
                index.check_reads()?;
                progress.unwritten.retain(|index| index.base != base);
                match made.map(Arc::new) {
                    Some(made) => {
                        self.store.indexes.pin(Arc::clone(&made));
                        progress.unwritten.push_back(made);
                    }
                    // The index does not describe a log, so it is not written.
                    None => self.store.indexes.forget([segment.life.id]),
                }
            }
            progress.damaged.remove(&base);
        }
        Ok(())
    }

    fn write_indexes(&self, progress: &mut IndexProgress) -> io::Result<()> {
        self.remake_damaged(progress)?;
        let mut result = Ok(());
        let mut written = Vec::new();
        while let Some(index) = progress.unwritten.front() {
            let path = index_path(index.segment);
            let new = format!("{path}.new");
            result = disk::write_new(&*self.store.disk, &new, &[index.bytes()])
                .and_then(|()| self.store.held_files.put(&new, &path));
            if result.is_err() {
                break;
            }
            written.extend(progress.unwritten.pop_front());
        }
        if written.is_empty() {
            return result;
        }
        if let Err(error) = self.store.disk.sync_directory("index") {
            // A later flush may succeed without these names, so the files are written again.
            written.extend(progress.unwritten.drain(..));
            progress.unwritten = written.into();
            return Err(error);
        }
        for index in written {
            self.store.indexes.unpin(index.segment);
        }
        result
    }

    /// Writes the state of all logs at the end of the newest indexed segment.
    fn write_checkpoint(&self, ends: bool, progress: &mut IndexProgress) -> io::Result<()> {
        // Each further attempt has one more index in memory.
        while self.try_checkpoint(ends, progress)? == CheckpointResult::Learned {
            self.store.forget_checkpoints(progress);
        }
        Ok(())
    }

    fn try_checkpoint(
        &self,
        ends: bool,
        progress: &mut IndexProgress,
    ) -> io::Result<CheckpointResult> {
        let Some(newest) = &progress.newest else {
            return Ok(CheckpointResult::Done);
        };
        let started = self.store.journal.clock.monotonic();
        let mut writer = CheckpointWriter::new(&*self.store.disk, &self.summary(newest, ends))?;
        let mut moved = Vec::new();
        let sorted_end = self.store.journal.sorted_end();
        for log in self.store.logs.all_known() {
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
                    let segment = base.and_then(|base| self.store.journal.segment_at(base));
                    let (index, learned) = match segment {
                        Some(segment) => self.store.index_or_anew(&segment)?,
                        None => (None, false),
                    };
                    if learned {
                        return Ok(CheckpointResult::Learned);
                    }
                    of_base = index;
                    of_base.as_slice()
                }
            };
            while let Some((_, id, chain)) = moved.next_if(|(other, ..)| *other == base) {
                let image = |index: &Arc<SealedIndex>| index.image(&index.row(id)?);
                match told.iter().rev().find_map(image) {
                    Some(image) => {
                        let log = self.store.logs.by_id(id);
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
                        if let Some(log) = self.store.logs.by_id(id) {
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
                        return Ok(CheckpointResult::Done);
                    }
                }
            }
            for index in told {
                index.check_reads()?;
            }
        }
        progress.checkpoint_bytes = writer.finish(&self.store.held_files)?;
        progress.covered = Some(newest.id);
        progress.since_checkpoint = 0;
        let took = self.store.journal.clock.monotonic().duration_since(started);
        progress.checkpoint_took = took;
        self.store.journal.observer.checkpoint(took);
        Ok(CheckpointResult::Done)
    }

    /// Completes an image from the newest index that lists the log with all producers of the log.
    fn whole_image(&self, mut image: Image) -> Image {
        if let Some(log) = self.store.logs.by_id(image.id).filter(|_| !image.deleted)
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
        let index = self.store.indexes.stream(segment)?;
        Ok(index.filter(|index| !index.is_partial()))
    }

    /// Indexes of all runs, oldest first; empty if one of them has no good index.
    fn runs_told(&self) -> io::Result<Vec<Arc<SealedIndex>>> {
        let runs = self.store.journal.runs();
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
        let segments = self.store.journal.segments.read();
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
            store_id: self.store.store_id,
            epoch: self.store.journal.recovery_epoch,
            next_log_counter: newest.next_log_counter,
            clean,
            arrival: newest.arrival,
            expiry: Some(newest.expiry),
            last: newest.id,
            before: newest.before,
            chain: newest.chain,
            history: self.store.history.clone(),
            sorted: self.store.journal.runs().last().map(|run| run.head.last),
            segments,
            accepted: self.accepted_still(),
        }
    }

    /// Accepted losses whose damage may still exist.
    fn accepted_still(&self) -> Vec<AcceptedLosses> {
        let runs = self.store.journal.runs();
        let sorted_end = self.store.journal.sorted_end();
        let damaged = |run: &Arc<Run>| !run.segment.holes.read().is_empty();
        let last_damaged = runs
            .iter()
            .filter(|run| damaged(run))
            .map(|run| run.head.first_base);
        let from = last_damaged.min().unwrap_or(sorted_end);
        let accepted = self.store.damages.accepted().iter();
        accepted
            .filter(|accepted| accepted.before > from)
            .cloned()
            .collect()
    }
}
