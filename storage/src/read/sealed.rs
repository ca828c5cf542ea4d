//! Looks up logs in sorted runs and in the indexes of sealed segments.
//!
//! A damaged index is made again from its run or segment, and the lookup continues.

use std::cell::Cell;
use std::io;
use std::sync::Arc;

use super::reach::{Reach, far};
use crate::base::ids::{LogId, Lsn, Position};
use crate::base::metrics::ChecksumSite;
use crate::format::address;
use crate::format::chain::{Below, Chain};
use crate::index;
use crate::index::rebuild;
use crate::index::run_file;
use crate::index::{FoundRow, Row, SealedIndex};
use crate::journal::segment::Segment;
use crate::read::store::Store;

/// Maximum bytes to read ahead in later runs.
const READ_AHEAD: u64 = 1 << 20;

/// Why a row could not be read.
enum RowError {
    /// No file descriptor is left to read an index.
    Io(io::Error),
    /// The chain leads through an index that is not good.
    Damaged,
    /// The index is not in memory.
    Far,
}

/// Whether an index describes all of a log. An index made from frames alone lacks the lsns of logs without records in
/// them.
fn knows((index, row): &FoundRow) -> bool {
    !index.is_partial() || index.entries(row).len() > 0
}

impl Store {
    /// The oldest sealed row of a log for which `holds` returns true. It must be false for all rows up to some row,
    /// and true for all after. Indexes are read only with [`Reach::Disk`].
    pub(crate) fn sealed_row(
        &self,
        log: LogId,
        chain: &Chain,
        reach: Reach,
        holds: impl Fn(&SealedIndex, &Row) -> bool,
    ) -> io::Result<Option<FoundRow>> {
        // Runs are older than all segments. If `holds` is false for one row of a segment, it is false for all rows of
        // runs.
        let in_segments = Cell::new(false);
        let fetch = |base| self.fetch_row(log, base, reach);
        let found = chain.oldest(fetch, |found: &Option<FoundRow>| {
            let Some((index, row)) = found else {
                return false;
            };
            let holds = holds(index, row);
            in_segments.set(in_segments.get() || !holds);
            holds
        });
        let found = match found {
            Ok(found) => found,
            Err(RowError::Far) => return Err(far()),
            Err(RowError::Io(error)) => return Err(error),
            Err(RowError::Damaged) => return self.sealed_row_without_chain(log, holds),
        };
        if !in_segments.get()
            && let Some(older) = self.row_in_runs(log, reach, &holds)?
        {
            return Ok(Some(older));
        }
        Ok(found.flatten())
    }

    /// The oldest row of a log in sorted runs for which `holds` returns true.
    fn row_in_runs(
        &self,
        log: LogId,
        reach: Reach,
        holds: impl Fn(&SealedIndex, &Row) -> bool,
    ) -> io::Result<Option<FoundRow>> {
        'again: loop {
            for run in self.journal.runs() {
                let found = match reach {
                    Reach::Disk => self.row_in(&run.segment, log)?,
                    _ => self
                        .indexes
                        .find_in_memory(&run.segment, log)
                        .ok_or_else(far)?
                        .filter(knows),
                };
                // The sorter has taken its index. Its records are in another run, and a later one of this list is not
                // the oldest.
                if found.is_none() && run.segment.is_retired() {
                    continue 'again;
                }
                if let Some((index, row)) = found.filter(|(index, row)| holds(index, row)) {
                    return Ok(Some((index, row)));
                }
            }
            return Ok(None);
        }
    }

    /// Announces reads of the runs after the run of index `at`, so that the disk may begin. Each run has a small part
    /// of the log, and the reader would wait for each alone.
    pub(super) fn read_ahead(&self, log: LogId, at: &SealedIndex, until: Lsn) {
        if !address::is_address(at.base) {
            return;
        }
        let runs = self.journal.runs();
        let mut later = runs.iter().skip_while(|run| run.id() != at.segment);
        later.next();
        let mut bytes = 0;
        for run in later {
            let Ok(Some(Some((index, row)))) = self.indexes.find(&run.segment, log) else {
                continue;
            };
            let entries = index.entries(&row);
            let last = entries.len().checked_sub(1).and_then(|at| entries.get(at));
            if let (Some(first), Some(last)) = (entries.get(0), last) {
                if first.first_lsn >= until {
                    return;
                }
                let length = last.end().since(first.position).min(READ_AHEAD - bytes);
                self.open_segments
                    .will_read(&run.segment, first.position, length);
                bytes += length;
                if bytes == READ_AHEAD {
                    return;
                }
            }
        }
    }

    /// The row of a log in a run or a sealed segment, as far as its index knows.
    fn row_in(&self, segment: &Segment, log: LogId) -> io::Result<Option<FoundRow>> {
        if !segment.is_indexed() {
            return Ok(None);
        }
        let found = match self.indexes.find(segment, log)? {
            Some(found) => found,
            None => self.sealed_index(segment)?.and_then(|index| {
                let row = index.row(log)?;
                Some((index, row))
            }),
        };
        Ok(found.filter(knows))
    }

    /// The row in the segment at `base`, and where the next older row is. Neither if the segment is sorted.
    fn fetch_row(
        &self,
        log: LogId,
        base: Position,
        reach: Reach,
    ) -> Result<(Option<FoundRow>, Option<Below>), RowError> {
        let sorted = || base < self.journal.sorted_end();
        if sorted() {
            return Ok((None, None));
        }
        let segment = self.journal.segment_at(base);
        let found = match (segment, reach) {
            (None, _) => None,
            (Some(segment), Reach::Disk) => {
                self.indexes.find(&segment, log).map_err(RowError::Io)?
            }
            (Some(segment), _) => match self.indexes.find_in_memory(&segment, log) {
                None => return Err(RowError::Far),
                found => found,
            },
        };
        let found = found.flatten().filter(|(index, _)| !index.is_partial());
        match found {
            Some((index, row)) => Ok((Some((index, row)), row.below)),
            None if sorted() => Ok((None, None)),
            // A reader thread makes a damaged index again.
            None if reach != Reach::Disk => Err(RowError::Far),
            None => Err(RowError::Damaged),
        }
    }

    /// The oldest row for which `holds` returns true, when the chain leads through a damaged index. Passes over all
    /// runs and sealed segments, oldest first, and makes damaged indexes again from their files.
    pub(crate) fn sealed_row_without_chain(
        &self,
        log: LogId,
        holds: impl Fn(&SealedIndex, &Row) -> bool,
    ) -> io::Result<Option<FoundRow>> {
        'again: loop {
            // Taken before the runs: a segment that is sorted meanwhile is in one of the two lists.
            let segments: Vec<_> = self.journal.segments.read().values().cloned().collect();
            if let Some(found) = self.row_in_runs(log, Reach::Disk, &holds)? {
                return Ok(Some(found));
            }
            for segment in segments {
                let found = self.row_in(&segment, log)?;
                if found.is_none() && segment.is_retired() {
                    continue 'again;
                }
                if let Some((index, row)) = found.filter(|(index, row)| holds(index, row)) {
                    return Ok(Some((index, row)));
                }
            }
            return Ok(None);
        }
    }

    /// The index of a segment, made from its frames if necessary. `None` for a segment that is being written, has all
    /// its places in memory, or is sorted.
    pub(crate) fn sealed_index(&self, segment: &Segment) -> io::Result<Option<Arc<SealedIndex>>> {
        if !segment.is_indexed() {
            return Ok(None);
        }
        if let Some(index) = self.indexes.get(segment)? {
            return Ok(Some(index));
        }
        if segment.is_retired() {
            return Ok(None);
        }
        let made = match address::is_address(segment.base) {
            true => run_file::index_of(&*self.disk, segment),
            false => rebuild::index_from_frames(&*self.disk, segment),
        };
        if segment.is_retired() {
            return Ok(None);
        }
        self.journal.observer.checksum_failure(ChecksumSite::Read);
        tracing::warn!(
            segment = %segment.life.id,
            "the index of a segment is damaged; it is made anew from the segment, and until the next start reads of old records may be slow"
        );
        let index = Arc::new(made?);
        self.indexes.keep_made(Arc::clone(&index));
        // A start writes missing indexes. It does not open those that a checkpoint spares it.
        if let Err(error) = self.set_index_aside(segment) {
            tracing::warn!(segment = %segment.life.id, %error, "a damaged index cannot be set aside");
        }
        Ok(Some(index))
    }

    /// Sets the index of a segment or run aside, durably. The next start begins without a checkpoint,
    /// reads the frames and writes the index.
    pub(crate) fn set_index_aside(&self, segment: &Segment) -> io::Result<()> {
        match index::set_aside(&self.held_files, segment.life.id)? {
            true => self.disk.sync_directory("index"),
            false => Ok(()),
        }
    }
}
