//! Space for sorting: the part of the volume that is kept for it, and the size that runs may have.
//!
//! A run is written before the files that it replaces are removed. On a full disk that takes free space, so the pool
//! keeps some ([`Volume::sorting_reserve`]), which records, trims and retention do not use. It is enough to write any
//! run of the store again. Runs therefore grow only up to a part of the volume.

use std::io;
use std::sync::Arc;

use super::sort::Sorter;
use crate::base::sync::atomic::Ordering;
use crate::disk::is_out_of_space;
use crate::journal::segment::Segment;
use crate::journal::volume::{Volume, run_of_segment};

/// On a full disk the unused end of a finished segment goes back to the file system. It must have at least this
/// part of a segment (1/4).
const UNUSED_PART: u64 = 4;

impl Sorter {
    /// Measures the volume: the size of runs and the space for sorting follow it.
    pub(super) fn measure_volume(&self) {
        let (ready, free) = self.pool.counts();
        let journal: u64 = {
            let segments = self.journal.segments.read();
            segments.values().map(|segment| segment.file_bytes()).sum()
        };
        let segment_bytes = self.config.segment_bytes;
        let files = journal + (ready + free) * segment_bytes;
        let runs = self.journal.runs();
        let runs = || runs.iter().map(Arc::as_ref);
        let volume = Volume::of(&*self.disk, files, runs());
        let largest = volume.largest_run(segment_bytes);
        self.largest_run.store(largest, Ordering::Relaxed);
        let reserve = volume.sorting_reserve(segment_bytes, runs());
        self.pool.keep_for_sorting(reserve);
    }

    /// Bytes of segments that one run is made of, at most.
    pub(crate) fn sorter_part(&self) -> u64 {
        let largest = self.largest_run.load(Ordering::Relaxed);
        self.config.sorter_backlog().min(largest)
    }

    /// Bytes that a new run and its index may take now. On a full disk this counts space that the
    /// pool can lend.
    pub(super) fn room_for_run(&self, short: bool) -> u64 {
        let room = match self.pool.room_for_sorting() {
            Some(free) if short => free + self.pool.lendable(),
            Some(free) => free,
            // Only the lent space is known.
            None if short => self.config.segment_bytes,
            None => u64::MAX,
        };
        room.min(self.least_refused.load(Ordering::Relaxed))
    }

    /// Gives the unused ends of finished segments back to the file system, as a start does with the
    /// segment before its own. Segments that were left early have some.
    ///
    /// # Errors
    /// The error of the file system, unless it has no space for the change.
    pub(crate) fn give_ends_back(&self) -> io::Result<()> {
        let current = self.journal.current();
        // The link of the current segment records the end of its predecessor.
        if self.journal.durable() <= current.first() {
            return Ok(());
        }
        let finished: Vec<Arc<Segment>> = {
            let segments = self.journal.segments.read();
            let finished = segments.range(..current.base);
            finished.map(|(_, segment)| Arc::clone(segment)).collect()
        };
        for segment in finished {
            let Some(end) = *segment.end.read() else {
                continue;
            };
            let used = end.since(segment.base).next_multiple_of(4096);
            let unused = segment.file_bytes().saturating_sub(used);
            let is_whole = segment.holes.read().is_empty() && !segment.is_misnamed();
            // A file of the full size can have another life.
            if unused < self.config.segment_bytes / UNUSED_PART || !is_whole {
                continue;
            }
            match self.disk.open(&segment.path())?.set_size(used) {
                Err(error) if is_out_of_space(&error) => {}
                cut => {
                    cut?;
                    segment.cut(used);
                    // A map of the whole file would reach beyond its end.
                    self.open_segments.close([segment.life.id]);
                }
            }
        }
        Ok(())
    }

    /// The part of the room that a run may take if it is larger than its sources. On a nearly full disk such a
    /// run must not raise the space kept for sorting. Otherwise appends would have less, though nothing was
    /// appended.
    pub(super) fn room_without_growth(&self, room: u64) -> u64 {
        let of_segment = run_of_segment(self.config.segment_bytes);
        match self.pool.is_nearly_short() {
            true => room.min(self.pool.sorting_reserve().max(of_segment)),
            false => room,
        }
    }

    /// Notes that a run of about this number of bytes found no space, whatever the file system reports (quotas).
    pub(super) fn refuse_runs_of(&self, bytes: u64) {
        let least = &self.least_refused;
        let before = least.load(Ordering::Relaxed);
        least.store(before.min(bytes) / 2, Ordering::Relaxed);
    }

    /// Notes that a run was written: larger runs may succeed, too.
    pub(super) fn allow_larger_runs(&self) {
        let least = &self.least_refused;
        let before = least.load(Ordering::Relaxed);
        least.store(before.saturating_mul(2), Ordering::Relaxed);
    }
}
