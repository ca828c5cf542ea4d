//! One pass over a part of the journal: frames of the selected logs, and gaps for the records missing between them.

mod border;
mod run;

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;

use self::border::header_at;
use crate::api::codec;
use crate::api::error::ReadError;
use crate::api::record::{Gap, GapReason, StoredBatch, Visibility};
use crate::base::ids::{LogName, Lsn, Position, Timestamp};
use crate::format::active::Place;
use crate::format::address::Hole;
use crate::format::frame;
use crate::format::frame::{FrameHeader, FrameKind};
use crate::index::SealedIndex;
use crate::journal::segment::Segment;
use crate::logs::damages::Damage;
use crate::logs::{FirstKept, Log};
use crate::read::frames::plain_body;
use crate::read::reach::{Reach, far, is_far};
use crate::read::store::Store;
use crate::read::{FrameFault, fitting, part};

/// Bytes of the journal in one read. A larger frame is read whole.
const PIECE_BYTES: u64 = 256 << 10;
const LARGE_PIECE_BYTES: u64 = 16 << 20;

/// Maximum bytes of the journal that one pass reads, give or take a frame.
#[cfg(not(test))]
const LOOK_BYTES: u64 = 16 << 20;
#[cfg(test)]
const LOOK_BYTES: u64 = 64 << 10;

/// A scan that is further behind than this reads on a reader thread, even if all bytes are in memory: it takes time
/// to pass many small frames of other logs.
const NEAR_BYTES: u64 = PIECE_BYTES;

/// Approximate bytes of a batch or a gap in a message, without names and bodies.
const BATCH_OVERHEAD: usize = 48;

/// One pass over a part of the journal.
#[derive(Clone)]
pub(super) struct JournalReadStep {
    pub(super) store: Arc<Store>,
    pub(super) prefix: Arc<str>,
    pub(super) at: Position,
    pub(super) skip: u64,
    pub(super) not_before: Option<Timestamp>,
    pub(super) published: Position,
    pub(super) visibility: Visibility,
    pub(super) remaining: u64,
    pub(super) bytes: usize,
    /// Bytes of the journal read so far.
    pub(super) looked: u64,
    pub(super) batches: Vec<StoredBatch>,
    pub(super) gaps: Vec<Gap>,
}

/// The records of one frame of the journal, or of a piece that was one.
#[derive(Clone, Copy)]
struct FrameRecords {
    first_lsn: Lsn,
    count: u32,
    arrival: Timestamp,
}

impl FrameRecords {
    fn next_lsn(&self) -> Lsn {
        let next = self.first_lsn.checked_advance(u64::from(self.count));
        next.unwrap_or(self.first_lsn)
    }
}

/// The gap of damage that no log is known to have.
fn of_nobody() -> Gap {
    Gap {
        log: None,
        from: None,
        to: None,
        reason: GapReason::Quarantined,
    }
}

/// Whether a gap begins where another one of its log ends, for the same reason.
fn follows(before: &Gap, gap: &Gap) -> bool {
    before.log == gap.log && before.reason == gap.reason && before.to == gap.from
}

/// Gaps of one log that follow each other as one: a hole may have many damaged frames of a few logs.
fn joined(gaps: impl Iterator<Item = Gap>) -> Vec<Gap> {
    let mut all: Vec<Gap> = Vec::new();
    let mut newest: HashMap<LogName, usize> = HashMap::new();
    for gap in gaps {
        let Some(log) = &gap.log else {
            all.push(gap);
            continue;
        };
        let before = newest.get(log).and_then(|at| all.get_mut(*at));
        match before.filter(|before| follows(before, &gap)) {
            Some(before) => before.to = gap.to,
            None => {
                newest.insert(log.clone(), all.len());
                all.push(gap);
            }
        }
    }
    all
}

/// Two upper bounds of the gone records of a log, each with the reason. `to` is the end of the records.
fn gone(deleted: bool, kept: FirstKept, to: Lsn) -> [(Lsn, GapReason); 2] {
    match deleted {
        true => [(to, GapReason::Deleted), (to, GapReason::Deleted)],
        false => [
            (kept.trimmed(), GapReason::Trimmed),
            (kept.first, GapReason::Expired),
        ],
    }
}

/// Outcome of taking a frame.
enum TakenFrame {
    Going(Continuation),
    Damaged,
}

/// How the pass continues.
#[derive(PartialEq, Eq)]
enum Continuation {
    On,
    /// From the same position again: the records there have moved.
    Again,
    /// The chunk is full, or must end before the next item.
    Full,
    CaughtUp,
}

impl JournalReadStep {
    /// Reads until the chunk is full, everything published is seen, or [`LOOK_BYTES`] were read. The second value is
    /// whether everything published is seen.
    pub(super) fn run(mut self, reach: Reach) -> Result<(Self, bool), ReadError> {
        if reach == Reach::Memory && self.published.get().saturating_sub(self.at.get()) > NEAR_BYTES
        {
            return Err(far().into());
        }
        loop {
            let going = match self.advance(reach) {
                // Return the records found so far. The next pass reads those that are not in memory.
                Err(ReadError::Io(error)) if is_far(&error) && self.found_something() => {
                    Continuation::Full
                }
                going => going?,
            };
            match going {
                // A scan that finds nothing must not occupy a reader thread.
                Continuation::On | Continuation::Again if self.looked >= LOOK_BYTES => {
                    return Ok((self, false));
                }
                Continuation::On | Continuation::Again => {}
                Continuation::Full => return Ok((self, false)),
                Continuation::CaughtUp => return Ok((self, true)),
            }
        }
    }

    fn found_something(&self) -> bool {
        !self.batches.is_empty() || !self.gaps.is_empty()
    }

    /// Advances by one piece of a segment, one hole, or one step between segments.
    fn advance(&mut self, reach: Reach) -> Result<Continuation, ReadError> {
        if self.at >= self.published {
            return Ok(Continuation::CaughtUp);
        }
        if let Some(run) = self.store.journal.run_at(self.at) {
            return self.advance_in_run(&run, reach);
        }
        let segment = self.segment();
        if self.is_sorted() {
            return Ok(Continuation::Again);
        }
        let Some(segment) = segment else {
            return Ok(Continuation::CaughtUp);
        };
        if self.at < segment.first() {
            return Ok(self.pass(segment.first()));
        }
        let end = segment
            .end
            .read()
            .unwrap_or(self.published)
            .min(self.published);
        if self.at >= end {
            let next = self.segment_after(&segment).map(|next| next.first());
            if self.is_sorted() {
                return Ok(Continuation::Again);
            }
            return Ok(match next {
                Some(first) if first < self.published => self.pass(first),
                _ => Continuation::CaughtUp,
            });
        }
        let hole = segment
            .holes
            .read()
            .iter()
            .find(|hole| hole.to > self.at)
            .copied();
        match hole {
            Some(hole) if hole.from <= self.at => Ok(self.pass(hole.to)),
            hole => {
                let stop = hole.map_or(end, |hole| hole.from.min(end));
                self.read_piece(&segment, stop, reach)
            }
        }
    }

    /// Whether the records at the current position were sorted just now. If so, the remaining segments do not show
    /// the next records.
    fn is_sorted(&self) -> bool {
        self.at < self.store.journal.sorted_end()
    }

    /// The segment at the current position, or the first after it.
    fn segment(&self) -> Option<Arc<Segment>> {
        if let Some(segment) = self.store.journal.segment_at(self.at) {
            return Some(segment);
        }
        let segments = self.store.journal.segments.read();
        segments
            .range(self.at..)
            .next()
            .map(|(_, segment)| Arc::clone(segment))
    }

    fn segment_after(&self, segment: &Segment) -> Option<Arc<Segment>> {
        let segments = self.store.journal.segments.read();
        segments
            .range(segment.base.advance(1)..)
            .next()
            .map(|(_, next)| Arc::clone(next))
    }

    /// Passes a range that holds nothing readable, up to `published` at most, and names the damaged records in it.
    fn pass(&mut self, to: Position) -> Continuation {
        let to = to.min(self.published);
        let damages = self.store.damages.between(self.at, to);
        let selected = damages.into_iter();
        let selected = selected.filter(|d| d.log.as_ref().is_none_or(|log| self.selects(log)));
        let gaps = joined(selected.flat_map(|damage| self.told_of(&damage)));
        if !gaps.is_empty() && !self.batches.is_empty() {
            // Gaps come before the batches of a message.
            return Continuation::Full;
        }
        self.gaps.extend(gaps);
        self.at = to;
        self.skip = 0;
        Continuation::On
    }

    /// The gaps to report for damage. Records that a trim, retention or a deletion had taken before count as taken,
    /// not as damaged.
    fn told_of(&self, damage: &Damage) -> Vec<Gap> {
        let Some(log) = &damage.log else {
            return vec![of_nobody()];
        };
        let (deleted, kept) = self.fate_of(log);
        let within = |lsn: Lsn| lsn.max(damage.from).min(damage.to);
        let (trimmed, kept) = (within(kept.trimmed()), within(kept.first));
        let mut parts = vec![
            (damage.from, trimmed, GapReason::Trimmed),
            (trimmed, kept, GapReason::Expired),
            (kept, damage.to, GapReason::Quarantined),
        ];
        if deleted {
            parts = vec![(damage.from, damage.to, GapReason::Deleted)];
        }
        if self.store.is_carried(damage) {
            // The run names all records that are gone for another reason.
            parts.retain(|(_, _, reason)| *reason == GapReason::Quarantined);
        }
        parts.retain(|(from, to, _)| from < to);
        let gap = |(from, to, reason)| Gap {
            log: Some(log.name.clone()),
            from: Some(from),
            to: Some(to),
            reason,
        };
        parts.into_iter().map(gap).collect()
    }

    /// Whether a log was deleted, and which of its records trims and retention kept.
    fn fate_of(&self, log: &Log) -> (bool, FirstKept) {
        let state = log.state.read();
        let seen = self.store.journal.trims_seen(self.visibility);
        (state.deleted, state.kept(seen))
    }

    fn selects(&self, log: &Log) -> bool {
        log.name.as_str().starts_with(&*self.prefix)
    }

    /// Reads a piece and takes its frames.
    fn read_piece(
        &mut self,
        segment: &Segment,
        stop: Position,
        reach: Reach,
    ) -> Result<Continuation, ReadError> {
        let rest = stop.since(self.at);
        for again in [false, true] {
            if again {
                if reach == Reach::Memory {
                    return Err(far().into());
                }
                if !self.is_border(segment, self.at, stop)? {
                    return Ok(Continuation::Again);
                }
            }
            let mut size = PIECE_BYTES;
            loop {
                let buffer = match again {
                    false => self.store.bytes(segment, self.at, size.min(rest), reach)?,
                    true => self.store.bytes_again(segment, self.at, size.min(rest))?,
                };
                self.looked += buffer.len() as u64;
                let (from, skip) = (self.at, self.skip);
                let going = self.take_frames(segment, &buffer, stop, reach)?;
                let moved = self.at > from || self.skip > skip || going != Continuation::On;
                if moved {
                    return Ok(going);
                }
                let longer = self.longer_read(segment, &buffer, size);
                let Some(longer) = longer.filter(|_| size < rest) else {
                    break;
                };
                size = longer;
            }
        }
        if segment.is_retired() {
            // The segment was sorted meanwhile, and its file may have another life. The run has the records.
            return Ok(Continuation::On);
        }
        self.lose_frame(segment, self.at, stop)?;
        Ok(Continuation::On)
    }

    /// Length of the next read, if a read of `size`, which returned `buffer`, did not show the frame at the current
    /// position. A client may have chosen the position, so only a header that verifies causes a long read.
    fn longer_read(&self, segment: &Segment, buffer: &Bytes, size: u64) -> Option<u64> {
        if header_at(segment, buffer, self.at).is_some() {
            return [LARGE_PIECE_BYTES, u64::MAX]
                .into_iter()
                .find(|longer| *longer > size);
        }
        // A header with many extensions is longer than a piece.
        let all = frame::MAX_HEADER_BYTES as u64;
        let claims = frame::claimed_position(buffer) == Some(self.at.get());
        (claims && size < all).then_some(all)
    }

    fn take_frames(
        &mut self,
        segment: &Segment,
        buffer: &Bytes,
        stop: Position,
        reach: Reach,
    ) -> Result<Continuation, ReadError> {
        let start = self.at;
        // Most ranges have no damage. Damage that a jump of lsns shows lies among good frames.
        let has_damage = !self.store.damages.between(start, stop).is_empty();
        // Frames there are lost, also if they verify again: newer records may have the same lsns.
        let accepted = self.store.damages.accepted_between(start, stop);
        while self.at < stop {
            let from = usize::try_from(self.at.since(start)).unwrap_or(usize::MAX);
            let Some(bytes) = buffer.get(from..) else {
                break;
            };
            let Some(header) = frame::decode_header(bytes, segment.life.salt) else {
                break;
            };
            // Padding may be cut off: no checksum covers it.
            let covered = u64::from(header.header_len) + u64::from(header.body_len);
            let whole = header.position == self.at && bytes.len() as u64 >= covered;
            if !whole {
                break;
            }
            let mut places = accepted.iter();
            let is_lost = places.any(|place| place.0 <= header.position && header.end() <= place.1);
            let going = if header.kind == FrameKind::Batch && !is_lost {
                self.take_batch(segment, &header, (buffer, from), reach)?
            } else {
                Continuation::On
            };
            if going != Continuation::On {
                return Ok(going);
            }
            if self.at != header.position {
                continue;
            }
            if !has_damage {
                self.at = header.end();
                self.skip = 0;
            } else if self.pass(header.end()) == Continuation::Full {
                // A gap comes next, in another message. These records were returned.
                self.skip = u64::from(header.count);
                return Ok(Continuation::Full);
            }
        }
        Ok(Continuation::On)
    }

    fn take_batch(
        &mut self,
        segment: &Segment,
        header: &FrameHeader,
        (buffer, from): (&Bytes, usize),
        reach: Reach,
    ) -> Result<Continuation, ReadError> {
        let Some(log) = self
            .store
            .logs
            .by_id(header.log_id)
            .filter(|log| self.selects(log))
        else {
            return Ok(Continuation::On);
        };
        let frame = FrameRecords {
            first_lsn: header.first_lsn,
            count: header.count,
            arrival: header.arrival,
        };
        let body = |work: &mut Self| {
            let bytes = buffer.get(from..).unwrap_or(&[]);
            let cipher = work.store.config.cipher.as_ref();
            match plain_body(cipher, header, bytes, buffer, from) {
                Err(FrameFault::Damaged) if reach == Reach::Memory => Err(FrameFault::Io(far())),
                Err(FrameFault::Damaged) => {
                    let again = work
                        .store
                        .bytes_again(segment, header.position, header.frame_len())
                        .map_err(FrameFault::Io)?;
                    plain_body(work.store.config.cipher.as_ref(), header, &again, &again, 0)
                }
                body => body,
            }
        };
        match self.take_records(&log, frame, body)? {
            TakenFrame::Going(going) => Ok(going),
            TakenFrame::Damaged => {
                // A client can have made up both the position and a header there.
                if !self.is_border(segment, header.position, header.end())? || segment.is_retired()
                {
                    return Ok(Continuation::Again);
                }
                let place = Place {
                    position: header.position,
                    first_lsn: header.first_lsn,
                    count: header.count,
                    frame_len: u32::try_from(header.frame_len()).unwrap_or(u32::MAX),
                };
                self.store.quarantine(&log, &place);
                Ok(self.pass(header.end()))
            }
        }
    }

    /// Takes the records of one former frame of the journal. The scan selects `log`.
    fn take_records(
        &mut self,
        log: &Arc<Log>,
        frame: FrameRecords,
        body: impl FnOnce(&mut Self) -> Result<Bytes, FrameFault>,
    ) -> Result<TakenFrame, ReadError> {
        let (deleted, kept) = self.fate_of(log);
        let mut first = frame
            .first_lsn
            .checked_advance(self.skip)
            .unwrap_or(frame.first_lsn);
        let to = frame.next_lsn();
        for (border, reason) in gone(deleted, kept, to) {
            let until = to.min(border);
            if first < until {
                let waits = self.batches.iter().any(|batch| batch.log_id == log.id);
                let going = self.note_gap(log, first, until, reason);
                if !waits {
                    // The scan has passed the records of this gap, so no later gap repeats them.
                    first = until;
                    self.skip = first.since(frame.first_lsn);
                }
                if going != Continuation::On {
                    return Ok(TakenFrame::Going(going));
                }
            }
        }
        if first >= to {
            return Ok(TakenFrame::Going(Continuation::On));
        }
        let body = match body(self) {
            Ok(body) => body,
            Err(FrameFault::Damaged) => return Ok(TakenFrame::Damaged),
            Err(FrameFault::Io(_)) if self.found_something() => {
                return Ok(TakenFrame::Going(Continuation::Full));
            }
            Err(FrameFault::Io(error)) => return Err(ReadError::Io(Arc::new(error))),
        };
        let batch = StoredBatch {
            log: log.name.clone(),
            log_id: log.id,
            first_lsn: frame.first_lsn,
            count: frame.count,
            arrival: frame.arrival,
            body,
        };
        let early = self.not_before.map_or(0, |time| {
            let times = codec::own_times(&batch.body);
            times
                .take_while(|own| own.unwrap_or(frame.arrival) < time)
                .count() as u64
        });
        let skip = self.skip.max(early);
        let going = match skip >= u64::from(frame.count) {
            true => Continuation::On,
            false => self.give(batch, skip),
        };
        Ok(TakenFrame::Going(going))
    }

    /// Adds as much of a batch as the chunk has room for.
    fn give(&mut self, batch: StoredBatch, skip: u64) -> Continuation {
        let count = u64::from(batch.count);
        let first = batch.first_lsn.advance(skip);
        let batch = part(batch, first, self.remaining);
        if !self.batches.is_empty() && batch.body.len() > self.bytes {
            return Continuation::Full;
        }
        let batch = fitting(batch, self.bytes);
        self.store
            .journal
            .observer
            .read(u64::from(batch.count), batch.body.len() as u64);
        let given = u64::from(batch.count);
        let cost = batch.body.len() + BATCH_OVERHEAD + batch.log.as_str().len();
        self.bytes = self.bytes.saturating_sub(cost);
        if self.remaining != u64::MAX {
            self.remaining -= given;
        }
        self.batches.push(batch);
        if skip + given < count {
            self.skip = skip + given;
            return Continuation::Full;
        }
        if self.remaining == 0 || self.bytes == 0 {
            self.skip = count;
            return Continuation::Full;
        }
        Continuation::On
    }

    /// Names records that the reader skips, and joins them to the gap directly before them. Gaps come before the
    /// batches of a message, so a gap after batches of its log must wait for the next message.
    fn note_gap(&mut self, log: &Log, from: Lsn, to: Lsn, reason: GapReason) -> Continuation {
        if self.batches.iter().any(|batch| batch.log_id == log.id) {
            return Continuation::Full;
        }
        let gap = Gap {
            log: Some(log.name.clone()),
            from: Some(from),
            to: Some(to),
            reason,
        };
        let mut last_first = self.gaps.iter_mut().rev();
        match last_first.find(|before| follows(before, &gap)) {
            Some(before) => before.to = gap.to,
            None => {
                self.bytes = self
                    .bytes
                    .saturating_sub(BATCH_OVERHEAD + log.name.as_str().len());
                self.gaps.push(gap);
            }
        }
        if self.bytes == 0 {
            Continuation::Full
        } else {
            Continuation::On
        }
    }

    /// Handles a header that was good once and does not verify now, not even when read again from the device: finds
    /// the next good header, and names every record between. [`JournalReadStep::is_border`] has shown that a frame
    /// begins at `from`.
    fn lose_frame(
        &self,
        segment: &Segment,
        from: Position,
        stop: Position,
    ) -> Result<(), ReadError> {
        let known = segment
            .holes
            .read()
            .iter()
            .map(|hole| hole.from)
            .find(|hole| *hole > from);
        let stop = known.map_or(stop, |known| known.min(stop));
        let to = self.resynchronise(segment, from.advance(8), stop)?;
        // Memory is read first: places that leave it meanwhile are in the index.
        let in_memory = (!segment.is_indexed()).then(|| self.lost_in_memory(from, to));
        let mut is_doubt = false;
        let lost: Vec<(Arc<Log>, Place)> = match self.store.sealed_index(segment)? {
            Some(index) => {
                let made = match index.is_partial() {
                    true => self.store.index_anew(segment)?,
                    false => None,
                };
                if segment.is_retired() {
                    // Its bytes may belong to another life.
                    return Ok(());
                }
                if made
                    .as_ref()
                    .is_some_and(|made| self.store.learn_lost(made))
                {
                    self.store
                        .forget_checkpoints(&mut self.store.indexing.hold());
                }
                let index = made.unwrap_or(index);
                is_doubt = index.is_partial();
                if is_doubt {
                    // The index does not describe the records here, so damage without a log stands for them.
                    self.store.damages.add(Damage::of_nobody(from, false));
                }
                self.lost_in_index(&index, from, to)
            }
            None => in_memory.unwrap_or_default(),
        };
        for (log, place) in lost {
            self.store.quarantine(&log, &place);
        }
        // The hole comes last: a reader that returns here after an error must not pass bytes that no gap names.
        segment.add_hole(Hole { from, to });
        // A complete index stays: with it the next start finds the same losses.
        if is_doubt {
            self.store.let_next_start_find(segment);
        }
        Ok(())
    }

    fn lost_in_memory(&self, from: Position, to: Position) -> Vec<(Arc<Log>, Place)> {
        let mut lost = Vec::new();
        for log in self.store.logs.all() {
            let state = log.state.read();
            let places = state.places.within(from, to);
            lost.extend(places.iter().map(|place| (Arc::clone(&log), *place)));
        }
        lost
    }

    fn lost_in_index(
        &self,
        index: &SealedIndex,
        from: Position,
        to: Position,
    ) -> Vec<(Arc<Log>, Place)> {
        let mut lost = Vec::new();
        for row in index.rows() {
            let Some(log) = self.store.logs.by_id(row.log_id) else {
                continue;
            };
            let entries = index.entries(&row);
            let first = entries.partition_point(|place| place.end() <= from);
            let within = entries.from(first).take_while(|place| place.position < to);
            lost.extend(within.map(|place| (Arc::clone(&log), place)));
        }
        lost
    }

    /// The first position from `from` on where a header verifies, or `stop`. The bytes are read from the device.
    fn resynchronise(
        &self,
        segment: &Segment,
        mut from: Position,
        stop: Position,
    ) -> std::io::Result<Position> {
        while from < stop {
            let size = LARGE_PIECE_BYTES.min(stop.since(from));
            let bytes = self.store.bytes_again(segment, from, size)?;
            let read = bytes.len();
            for offset in (0..read).step_by(8) {
                let position = from.advance(offset as u64);
                let rest = &bytes[offset..];
                if frame::claimed_position(rest) == Some(position.get())
                    && frame::decode_header(rest, segment.life.salt).is_some()
                {
                    return Ok(position);
                }
            }
            if read <= frame::MAX_HEADER_BYTES || size == stop.since(from) {
                break;
            }
            // A header at the very end of the piece may continue in the next.
            from = from.advance((read - frame::MAX_HEADER_BYTES) as u64);
        }
        Ok(stop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_of_a_hole_are_as_few_as_its_logs_and_reasons() {
        let gap = |log, from, to, reason| Gap {
            log: Some(LogName::new(log).unwrap()),
            from: Some(Lsn::new(from)),
            to: Some(Lsn::new(to)),
            reason,
        };
        let (lost, gone) = (GapReason::Quarantined, GapReason::Trimmed);
        let frames = (0..1000).flat_map(|at| {
            let reason = if at < 400 { gone } else { lost };
            [
                gap("a", at, at + 1, reason),
                gap("b", 2 * at, 2 * at + 2, lost),
            ]
        });
        let rest = [of_nobody(), of_nobody(), gap("a", 1001, 1002, lost)];
        let expected = [
            gap("a", 0, 400, gone),
            gap("b", 0, 2000, lost),
            gap("a", 400, 1000, lost),
            of_nobody(),
            of_nobody(),
            gap("a", 1001, 1002, lost),
        ];
        assert_eq!(joined(frames.chain(rest)), expected);
    }
}
