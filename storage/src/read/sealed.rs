//! Looking a log up in the indexes of sealed segments.

use std::io;
use std::sync::Arc;

use crate::ids::{LogId, Position};
use crate::index::{Below, Chain, Row, SealedIndex};
use crate::journal::segment::Segment;
use crate::local::Core;
use crate::metrics::ChecksumSite;
use crate::recovery;

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
        let fetch = |base| self.fetch_row(log, base);
        match chain.oldest(fetch, |(index, row)| holds(index, row)) {
            Ok(found) => Ok(found),
            Err(Missing) => self.sealed_row_without_chain(log, holds),
        }
    }

    fn fetch_row(&self, log: LogId, base: Position) -> Result<(Found, Option<Below>), Missing> {
        let segment = self.journal.segment_at(base).ok_or(Missing)?;
        let index = self.indexes.get(&segment);
        let index = index.filter(|index| !index.is_partial()).ok_or(Missing)?;
        let row = index.row(log).ok_or(Missing)?;
        let below = row.below;
        Ok(((index, row), below))
    }

    /// The same where an index is damaged that the chain leads through: over all sealed
    /// segments, the oldest first. What was damaged is made anew from its segment.
    fn sealed_row_without_chain(
        &self,
        log: LogId,
        holds: impl Fn(&SealedIndex, &Row) -> bool,
    ) -> io::Result<Option<Found>> {
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
        Ok(None)
    }

    /// The index of a segment, made from its frames if need be; `None` for one that is
    /// written, or whose places are all in memory.
    pub(crate) fn sealed_index(&self, segment: &Segment) -> io::Result<Option<Arc<SealedIndex>>> {
        if !segment.is_indexed() {
            return Ok(None);
        }
        if let Some(index) = self.indexes.get(segment) {
            return Ok(Some(index));
        }
        self.journal.observer.checksum_failure(ChecksumSite::Read);
        tracing::warn!(
            segment = %segment.life.id,
            "the index of a segment is damaged; it is made anew from the segment, and until the next start reads of old records may be slow"
        );
        let index = Arc::new(recovery::index_from_frames(&*self.disk, segment)?);
        self.indexes.pin(Arc::clone(&index));
        Ok(Some(index))
    }
}
