//! Finds the lsn at which a log would begin if it forgot all records that exceed a bound.

use std::io;

use super::Retainer;
use crate::base::ids::{Lsn, Position, Timestamp};
use crate::format::active::Place;
use crate::format::address;
use crate::format::frame;
use crate::format::frame::{FrameHeader, HEADER_BYTES};
use crate::logs::Log;
use crate::read::{Reach, is_retired};

/// Places visited under a log's lock in one go.
const PLACES: usize = 4096;

impl Retainer {
    /// The first record of the fewest newest frames that take at least `bytes` together; `None` if all frames
    /// of the log take less.
    pub(super) fn border_by_bytes(
        &self,
        log: &Log,
        bytes: u64,
        durable: Position,
    ) -> io::Result<Option<Lsn>> {
        let (mut sum, mut above) = (0, None);
        let (total, chain) = loop {
            let state = log.state.read();
            let places = state.places.from(0);
            let flushed = places.partition_point(|place| place.end() <= durable);
            let end = above.map_or(flushed, |lsn| state.places.index_of(lsn).min(flushed));
            let start = end.saturating_sub(PLACES);
            for place in places[start..end].iter().rev() {
                sum += u64::from(place.frame_len);
                if sum >= bytes {
                    return Ok(Some(place.first_lsn));
                }
                above = Some(place.first_lsn);
            }
            if start == 0 {
                let unflushed = sum_of(&places[flushed..]);
                break (
                    state.stored_bytes.saturating_sub(unflushed),
                    state.chain.clone(),
                );
            }
        };
        // Bytes that lie behind the segment of a row.
        let behind = |stored: u64| total.saturating_sub(stored);
        let found = self.sealed_row(log.id, &chain, Reach::Disk, |index, row| {
            index
                .stored_bytes(row)
                .is_some_and(|stored| behind(stored) < bytes)
        })?;
        let Some((index, row)) = found else {
            return Ok(None);
        };
        let Some(stored) = index.stored_bytes(&row).filter(|_| !index.is_partial()) else {
            return Ok(None);
        };
        let entries = index.entries(&row);
        let mut sum = behind(stored);
        for at in (0..entries.len()).rev() {
            let Some(place) = entries.get(at) else {
                return Ok(None);
            };
            sum += u64::from(place.frame_len);
            if sum >= bytes {
                return Ok(Some(place.first_lsn));
            }
        }
        Ok(None)
    }

    /// The lsn behind the newest frame that arrived at `newest` or before, among the frames from `first` on
    /// that begin before `limit`; `first` if there is none.
    ///
    /// Records that arrived before that frame are as old, even if the system's clock jumped meanwhile and the
    /// times are in no order. In that case this may find fewer old records, and never more.
    pub(super) fn border_by_age(
        &self,
        log: &Log,
        (first, limit): (Lsn, Lsn),
        (newest, now): (Timestamp, Timestamp),
    ) -> io::Result<Lsn> {
        let start = self.behind_wrong_clock(log, (first, limit), now)?;
        let (mut low, mut high) = (start, limit);
        while low < high {
            let middle = low.advance(high.since(low) / 2);
            let frame = self.arrived(log, middle)?;
            let frame = frame.filter(|(place, _)| place.first_lsn < high);
            let old = frame.is_some_and(|(_, arrival)| arrival.is_some_and(|at| at <= newest));
            match frame.map(|(place, _)| place) {
                Some(place) if old => low = place.next_lsn(),
                // Earlier records of the same frame are no older.
                Some(place) => high = middle.min(place.first_lsn).max(low),
                None => high = middle,
            }
        }
        // Records before the first right time go with the first old record behind them.
        Ok(if low > start { low } else { first })
    }

    /// The first record behind those that seem to have arrived later than `now`: they came earlier than that
    /// record, while the clock was ahead. `first` if it has a right time.
    fn behind_wrong_clock(
        &self,
        log: &Log,
        (first, limit): (Lsn, Lsn),
        now: Timestamp,
    ) -> io::Result<Lsn> {
        let (mut low, mut high, mut middle) = (first, limit, first);
        while low < high {
            match self.arrived(log, middle)? {
                Some((place, Some(arrival))) if arrival > now => low = place.next_lsn(),
                _ if middle == first => return Ok(first),
                Some((place, _)) => high = middle.min(place.first_lsn).max(low),
                None => high = middle,
            }
            middle = low.advance(high.get().saturating_sub(low.get()) / 2);
        }
        Ok(low.min(limit))
    }

    /// Arrival of the frame that holds a record, or of the next frame that is not damaged; `None` if its
    /// header cannot be read.
    pub(super) fn arrival(&self, log: &Log, lsn: Lsn) -> io::Result<Option<Timestamp>> {
        Ok(self.arrived(log, lsn)?.and_then(|(_, arrival)| arrival))
    }

    /// The frame that holds a record, or the next frame if none holds it, and its arrival. In a sorted run, a
    /// former frame is a piece of a pack.
    fn arrived(&self, log: &Log, lsn: Lsn) -> io::Result<Option<(Place, Option<Timestamp>)>> {
        loop {
            let Some(place) = self.frame_of(log, lsn)? else {
                return Ok(None);
            };
            if !address::is_address(place.position) {
                let header = self.header(&place)?;
                return Ok(Some((place, header.map(|header| header.arrival))));
            }
            let pieces = match self.pieces_at(&place) {
                // The run was rewritten meanwhile.
                Err(error) if is_retired(&error) => continue,
                pieces => pieces?,
            };
            let piece = pieces.iter().find(|piece| piece.next_lsn() > lsn);
            return Ok(Some(match piece {
                Some(piece) => {
                    let place = Place {
                        first_lsn: piece.first_lsn,
                        count: piece.count,
                        ..place
                    };
                    (place, Some(piece.arrival))
                }
                None => (place, None),
            }));
        }
    }

    /// [`Self::stored_before`] for a trim, which does not need the number.
    pub(crate) fn known_before(&self, log: &Log, lsn: Lsn) -> Option<u64> {
        let found = self.stored_before(log, lsn).inspect_err(|error| {
            let log = log.name.as_str();
            tracing::warn!(log, %error, "the bytes that a trim frees could not be looked up; they count until the next trim");
        });
        found.ok().flatten()
    }

    /// Bytes of all frames that the log ever had before the frame that holds `lsn`; `None` where that is not
    /// known any more.
    pub(crate) fn stored_before(&self, log: &Log, lsn: Lsn) -> io::Result<Option<u64>> {
        let (mut sum, mut from) = (0, lsn);
        let chain = loop {
            let state = log.state.read();
            let start = state.places.index_of(from);
            let places = state.places.from(start);
            let part = &places[..places.len().min(PLACES)];
            let known = state
                .places
                .get(0)
                .map_or(state.next, |place| place.first_lsn);
            if from == lsn && known > lsn {
                break state.chain.clone();
            }
            sum += sum_of(part);
            match part.last() {
                Some(last) if part.len() < places.len() => from = last.next_lsn(),
                _ => return Ok(Some(state.stored_bytes.saturating_sub(sum))),
            }
        };
        let found = self.sealed_row(log.id, &chain, Reach::Disk, |_, row| row.next_lsn > lsn)?;
        let Some((index, row)) = found.filter(|(index, _)| !index.is_partial()) else {
            return Ok(None);
        };
        let entries = index.entries(&row);
        let first = entries.partition_point(|place| place.next_lsn() <= lsn);
        let here: u64 = entries
            .from(first)
            .map(|place| u64::from(place.frame_len))
            .sum();
        Ok(index
            .stored_bytes(&row)
            .map(|stored| stored.saturating_sub(here)))
    }

    /// The frame that holds a record, or the next frame if none holds it.
    fn frame_of(&self, log: &Log, lsn: Lsn) -> io::Result<Option<Place>> {
        let (in_memory, chain) = {
            let state = log.state.read();
            let place = state.places.get(state.places.index_of(lsn)).copied();
            (place, state.chain.clone())
        };
        if in_memory.is_some_and(|place| place.first_lsn <= lsn) {
            return Ok(in_memory);
        }
        let mut from = lsn;
        while let Some((index, row)) =
            self.sealed_row(log.id, &chain, Reach::Disk, |_, row| row.next_lsn > from)?
        {
            let entries = index.entries(&row);
            let at = entries.partition_point(|place| place.next_lsn() <= lsn);
            if let Some(place) = entries.get(at) {
                return Ok(Some(place));
            }
            // All frames of the row from there on were damaged.
            from = row.next_lsn;
        }
        Ok(in_memory)
    }

    /// The header of the frame at a place; `None` if it does not verify.
    fn header(&self, place: &Place) -> io::Result<Option<FrameHeader>> {
        let Some(segment) = self.journal.segment_at(place.position) else {
            return Ok(None);
        };
        let mut length = HEADER_BYTES as u64;
        loop {
            let bytes = self.bytes(&segment, place.position, length, Reach::Disk)?;
            if let Some(header) = frame::decode_header(&bytes, segment.life.salt) {
                let this = header.position == place.position && header.first_lsn == place.first_lsn;
                return Ok(Some(header).filter(|_| this));
            }
            // The header states its own length, with extensions.
            let claimed = frame::claimed_header_len(&bytes).unwrap_or(0);
            if claimed <= length || claimed > u64::from(place.frame_len) {
                return Ok(None);
            }
            length = claimed;
        }
    }
}

fn sum_of(places: &[Place]) -> u64 {
    places.iter().map(|place| u64::from(place.frame_len)).sum()
}
