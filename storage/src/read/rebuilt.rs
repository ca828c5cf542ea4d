//! Rebuilds the index of a segment whose index file is damaged, from frames and older indexes.
//!
//! Indexes made here stay in memory until their segments are sorted, up to a bound. Lookups of readers do not use
//! them: their rows do not lead to older rows.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::held_back::UnusablePart;
use super::store::Store;
use crate::base::ids::{LogId, Lsn, SegmentId};
use crate::format::address::is_address;
use crate::format::body::Link;
use crate::format::frame;
use crate::format::frame::FrameHeader;
use crate::format::frame::FrameKind;
use crate::index::SealedIndex;
use crate::journal::segment::Segment;
use crate::recovery;

/// Maximum bytes of indexes that were made again and wait for their segments to be sorted. An index beyond the bound
/// is made at each use, and no index of a later segment can be made. The sorter takes the segments before it first.
const MOST_MADE_BYTES: u64 = 64 << 20;

impl Store {
    /// The index of a segment or run, read from its file or rebuilt.
    ///
    /// # Errors
    /// If there is no file descriptor to read the index or its segment.
    pub(crate) fn sound_index(&self, segment: &Segment) -> io::Result<Option<Arc<SealedIndex>>> {
        let (index, learned) = self.index_or_anew(segment)?;
        if learned {
            self.forget_checkpoints(&mut self.indexing.hold());
        }
        Ok(index)
    }

    /// The index of a segment or run, as [`Store::sound_index`] finds it, and whether more records are known to
    /// be lost since. In that case the caller forgets the checkpoints.
    ///
    /// # Errors
    /// The errors of [`Store::sound_index`].
    pub(crate) fn index_or_anew(
        &self,
        segment: &Segment,
    ) -> io::Result<(Option<Arc<SealedIndex>>, bool)> {
        if !segment.is_indexed() || segment.is_misnamed() {
            return Ok((None, false));
        }
        let mut index = self.indexes.stream(segment)?;
        if index.is_none() && !segment.is_retired() {
            index = match self.sealed_index(segment) {
                // The file is gone, too.
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                index => index?,
            };
        }
        let mut learned = false;
        if index.as_ref().is_some_and(|index| index.is_partial()) {
            index = self.index_anew(segment)?;
            learned = index.as_ref().is_some_and(|index| self.learn_lost(index));
        }
        match index {
            Some(_) => self.unusable.pass(segment.life.id, UnusablePart::Index),
            None if segment.is_retired() => {}
            None => self.unusable.stop_at(
                segment.life.id,
                UnusablePart::Index,
                format!(
                    "the index of {} is damaged, and cannot be made again now; restart the daemon",
                    segment.path()
                ),
            ),
        }
        Ok((index, learned))
    }

    /// The index of a journal segment, made from its frames and from images in older indexes. The caller learns
    /// which records are lost. Readers do not use this index: its rows do not lead to older rows.
    pub(crate) fn index_anew(&self, segment: &Segment) -> io::Result<Option<Arc<SealedIndex>>> {
        if is_address(segment.base) {
            return Ok(None);
        }
        if let Some(made) = self.made.lock().get(&segment.life.id) {
            return Ok(Some(Arc::clone(made)));
        }
        let (runs, segments) = self.journal.runs_and_segments();
        let (older, newer): (Vec<_>, Vec<_>) = segments
            .into_iter()
            .filter(|other| other.base != segment.base)
            .partition(|other| other.base < segment.base);
        let runs = runs.iter().map(|run| Arc::clone(&run.segment));
        let mut told = Vec::new();
        for file in runs.chain(older) {
            let made = self.made.lock().get(&file.life.id).cloned();
            let index = match made {
                Some(made) => Some(made),
                // The index of a run can always be made again.
                None => match self.indexes.stream(&file)? {
                    None if is_address(file.base) => self.sealed_index(&file)?,
                    index => index,
                },
            };
            told.push(index.filter(|index| !index.is_partial()));
        }
        let before = |log: LogId| {
            for index in told.iter().rev() {
                // This index is damaged too.
                let Some(index) = index else {
                    return Err(io::ErrorKind::NotFound.into());
                };
                let row = index.row(log);
                let image = row.map(|row| index.image(&row));
                index.check_reads()?;
                if let Some(image) = image {
                    return Ok(image);
                }
            }
            Ok(None)
        };
        // After an operator accepted the loss of all records from some lsn on, the log continued from there.
        let goes_on = |log: LogId| {
            for segment in newer.iter().filter(|segment| segment.is_indexed()) {
                let index = self.indexes.stream(segment)?;
                let Some(index) = index.filter(|index| !index.is_partial()) else {
                    return Err(io::ErrorKind::NotFound.into());
                };
                let row = index.row(log);
                index.check_reads()?;
                if let Some(row) = row {
                    return Ok(row.first_lsn);
                }
            }
            let log = self.logs.by_id(log);
            Ok(log.map_or(Lsn::new(u64::MAX), |log| {
                let state = log.state.read();
                let newest = state.places.from(0).first();
                newest.map_or(state.next, |place| place.first_lsn)
            }))
        };
        let link = match newer.first() {
            Some(next) => self.link_of(next)?.map(|(_, link)| link),
            None => None,
        };
        let link = link.filter(|link| link.predecessor == Some(segment.life.id));
        let known = (self.damages.accepted(), self.config.producer_window);
        let logs = recovery::Around {
            before: &before,
            goes_on: &goes_on,
        };
        let made = recovery::index_anew(&self.disk, segment, link.as_ref(), known, &logs);
        if segment.is_retired() {
            // The segment was sorted meanwhile, and its file may have another life.
            return Ok(None);
        }
        match made {
            Ok(Some(index)) => {
                let index = Arc::new(index);
                let mut made = self.made.lock();
                if !segment.is_retired() {
                    keep_made(&mut made, &index);
                }
                drop(made);
                Ok(Some(index))
            }
            Ok(None) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The header and body of the link, the first frame of a segment. `None` if it does not verify.
    pub(crate) fn link_of(
        &self,
        segment: &Arc<Segment>,
    ) -> io::Result<Option<(FrameHeader, Link)>> {
        // Most links are small. A link can describe all logs that the previous segment touched.
        let first = segment.first();
        let mut bytes = self.read_link(segment, 64 << 10)?;
        let header = frame::decode_header(&bytes, segment.life.salt)
            .filter(|header| header.kind == FrameKind::Link && header.position == first);
        let Some(header) = header else {
            return Ok(None);
        };
        if header.frame_len() > bytes.len() as u64 {
            bytes = self.read_link(segment, header.frame_len())?;
        }
        let link = frame::verified_body(&bytes, &header).and_then(Link::decode);
        Ok(link.map(|link| (header, link)))
    }

    /// The first bytes of the first frame of a segment. Empty if its file is gone, which ends the step. Reads nothing behind
    /// the frames of a finished segment, whose file may be cut there while it is mapped.
    pub(crate) fn read_link(&self, segment: &Arc<Segment>, bytes: u64) -> io::Result<Bytes> {
        let end = (*segment.end.read()).filter(|end| *end > segment.first());
        let bytes = end.map_or(bytes, |end| bytes.min(end.since(segment.first())));
        match self.open_segments.read(segment, segment.first(), bytes) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.unusable.note_gone(segment);
                Ok(Bytes::new())
            }
            read => read,
        }
    }
}

/// Keeps an index that was made again, unless all of them would exceed [`MOST_MADE_BYTES`].
fn keep_made(made: &mut HashMap<SegmentId, Arc<SealedIndex>>, index: &Arc<SealedIndex>) {
    let bytes: u64 = made.values().map(|index| index.file_bytes()).sum();
    if bytes + index.file_bytes() <= MOST_MADE_BYTES {
        made.insert(index.segment, Arc::clone(index));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rebuilt_indexes_take_bounded_memory() {
        let mut made = HashMap::new();
        let index = SealedIndex::of_places(1, 500_000);
        let most = usize::try_from(MOST_MADE_BYTES / index.file_bytes()).unwrap();
        for id in 1..=most as u64 + 8 {
            keep_made(&mut made, &Arc::new(SealedIndex::of_places(id, 500_000)));
            let bytes: u64 = made.values().map(|index| index.file_bytes()).sum();
            assert!(bytes <= MOST_MADE_BYTES, "{id}: {bytes} bytes");
        }
        assert_eq!(made.len(), most, "the bound is reached");
        assert!(made.contains_key(&SegmentId::new(1)), "the oldest stay");
    }
}
