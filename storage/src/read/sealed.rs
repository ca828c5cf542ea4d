//! Looking a log up in sorted runs and in the indexes of sealed segments.

use std::cell::Cell;
use std::io;
use std::sync::Arc;

use crate::ids::{LogId, Position};
use crate::index::{Below, Chain, Row, SealedIndex};
use crate::journal::segment::Segment;
use crate::local::Core;
use crate::metrics::ChecksumSite;
use crate::recovery;
use crate::sorted;

/// A row, and the index it is in.
pub(crate) type Found = (Arc<SealedIndex>, Row);

/// A row could not be had: an index that the chain leads through is not good.
struct Missing;

impl Core {
    /// The oldest sealed row of a log for which `holds`; it must be false for all rows up
    /// to some row, and true for all after.
    pub(crate) fn sealed_row(
        &self,
        log: LogId,
        chain: &Chain,
        holds: impl Fn(&SealedIndex, &Row) -> bool,
    ) -> io::Result<Option<Found>> {
        // Everything in runs is older than what is not: one row that does not hold, and is in
        // none, says that nothing in them does.
        let in_segments = Cell::new(false);
        let fetch = |base| self.fetch_row(log, base);
        let found = chain.oldest(fetch, |found: &Option<Found>| {
            let Some((index, row)) = found else {
                return false;
            };
            let holds = holds(index, row);
            in_segments.set(in_segments.get() || !holds);
            holds
        });
        let Ok(found) = found else {
            return self.sealed_row_without_chain(log, holds);
        };
        if !in_segments.get()
            && let Some(older) = self.row_in_runs(log, &holds)?
        {
            return Ok(Some(older));
        }
        Ok(found.flatten())
    }

    /// The same in sorted runs.
    fn row_in_runs(
        &self,
        log: LogId,
        holds: impl Fn(&SealedIndex, &Row) -> bool,
    ) -> io::Result<Option<Found>> {
        for run in self.journal.runs() {
            let Some(index) = self.sealed_index(&run.segment)? else {
                continue;
            };
            let knows = |row: &Row| !index.is_partial() || index.entries(row).len() > 0;
            if let Some(row) = index
                .row(log)
                .filter(|row| knows(row) && holds(&index, row))
            {
                return Ok(Some((index, row)));
            }
        }
        Ok(None)
    }

    /// The row in the segment at `base`; none of one that is sorted, and so has nothing below
    /// it either.
    fn fetch_row(
        &self,
        log: LogId,
        base: Position,
    ) -> Result<(Option<Found>, Option<Below>), Missing> {
        let sorted = || base < self.journal.sorted_end();
        let found = || {
            let segment = self.journal.segment_at(base)?;
            let index = self.indexes.get(&segment);
            let index = index.filter(|index| !index.is_partial())?;
            let row = index.row(log)?;
            Some((index, row))
        };
        if sorted() {
            return Ok((None, None));
        }
        match found() {
            Some((index, row)) => Ok((Some((index, row)), row.below)),
            None if sorted() => Ok((None, None)),
            None => Err(Missing),
        }
    }

    /// The same where an index is damaged that the chain leads through: over all runs and
    /// sealed segments, the oldest first. What was damaged is made anew from its segment.
    fn sealed_row_without_chain(
        &self,
        log: LogId,
        holds: impl Fn(&SealedIndex, &Row) -> bool,
    ) -> io::Result<Option<Found>> {
        loop {
            let end = self.journal.sorted_end();
            if let Some(found) = self.row_in_runs(log, &holds)? {
                return Ok(Some(found));
            }
            let segments: Vec<_> = self.journal.segments.read().values().cloned().collect();
            for segment in segments {
                let Some(index) = self.sealed_index(&segment)? else {
                    continue;
                };
                // One made from frames alone knows no lsns of a log without records in them.
                let knows = |row: &Row| !index.is_partial() || index.entries(row).len() > 0;
                if let Some(row) = index
                    .row(log)
                    .filter(|row| knows(row) && holds(&index, row))
                {
                    return Ok(Some((index, row)));
                }
            }
            // What was passed over because it was being sorted is in a run by now.
            if end == self.journal.sorted_end() {
                return Ok(None);
            }
        }
    }

    /// The index of a segment, made from its frames if need be; `None` for one that is
    /// written, or whose places are all in memory, or that is sorted.
    pub(crate) fn sealed_index(&self, segment: &Segment) -> io::Result<Option<Arc<SealedIndex>>> {
        if !segment.is_indexed() {
            return Ok(None);
        }
        if let Some(index) = self.indexes.get(segment) {
            return Ok(Some(index));
        }
        if segment.is_retired() {
            return Ok(None);
        }
        let made = match sorted::is_address(segment.base) {
            true => sorted::index_of(&*self.disk, segment),
            false => recovery::index_from_frames(&*self.disk, segment),
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
        self.indexes.pin(Arc::clone(&index));
        Ok(Some(index))
    }
}
