//! Reads a sorted run in the commit order of its records, which the run stores.
//!
//! Each step stands at a position where a frame of the journal began. A cursor therefore means the same to a store in
//! which these records are not sorted yet (a store restored from an earlier backup).

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::{Continuation, FrameRecords, JournalReadStep, TakenFrame, of_nobody};
use crate::api::error::ReadError;
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::{Lsn, Position};
use crate::base::metrics::ChecksumSite;
use crate::format::active::Place;
use crate::format::address::Hole;
use crate::format::frame;
use crate::format::frame::FrameKind;
use crate::format::pack;
use crate::format::pack::PACK_HEADER_BYTES;
use crate::format::pack::{OrderEntry, Piece};
use crate::index::run_file;
use crate::journal::run::Run;
use crate::logs::damages::Damage;
use crate::logs::{Log, Lost};
use crate::read::FrameFault;
use crate::read::reach::{Reach, far};

/// Maximum number of packs whose pieces one step remembers.
const MOST_PACKS: usize = 4096;

/// Where the body of a pack begins, and its pieces.
type LoadedPack = Arc<(u64, Vec<Piece>)>;

/// Packs by their offset.
type Packs = HashMap<u64, LoadedPack>;

impl JournalReadStep {
    /// Advances by one frame of a run's order, or by one step between runs.
    pub(super) fn advance_in_run(
        &mut self,
        run: &Run,
        reach: Reach,
    ) -> Result<Continuation, ReadError> {
        let first = run.head.first_base.advance(LIFE_BYTES);
        if self.at < first {
            return Ok(self.pass(first));
        }
        if reach == Reach::Memory {
            return Err(far().into());
        }
        // The first frame of the order that may describe the current position. Several may begin with one position.
        let order = &run.head.order;
        let at = order.partition_point(|(first, _)| *first < self.at);
        let mut packs = Packs::new();
        let mut told = 0;
        let begun = (self.at, self.skip);
        // A pass begins again with the first frame of this position, and reads up to the place where it goes on.
        let mut read_again = 0;
        for number in at.saturating_sub(1)..order.len() {
            let Some(entries) = self.order(run, number)? else {
                if run.segment.is_retired() {
                    return Ok(Continuation::Again);
                }
                return self.lose_order(run, number);
            };
            let behind = order
                .get(number + 1)
                .map_or(run.head.end, |(first, _)| *first);
            for (index, entry) in entries.iter().enumerate() {
                if entry.position < self.at {
                    continue;
                }
                if entry.position >= self.published {
                    // A plain scan may end within a run that was sorted after the scan began.
                    return Ok(self.pass(self.published));
                }
                let next = entries.get(index + 1).map_or(behind, |next| next.position);
                let going = match entry.at {
                    Ok(piece) => self.take_piece(run, entry, piece, next, &mut packs)?,
                    Err(goes_on) => {
                        told += 1;
                        self.take_dropped(entry, goes_on, told)
                    }
                };
                if going != Continuation::On {
                    return Ok(going);
                }
            }
            if (self.at, self.skip) == begun {
                read_again = self.looked;
            }
            if self.looked - read_again >= super::LOOK_BYTES {
                return Ok(Continuation::On);
            }
        }
        Ok(self.pass(run.head.limit))
    }

    /// The entries of one frame of the order; `None` if it is damaged.
    fn order(&mut self, run: &Run, number: usize) -> Result<Option<Vec<OrderEntry>>, ReadError> {
        let order = &run.head.order;
        let Some((_, from)) = order.get(number) else {
            return Ok(Some(Vec::new()));
        };
        let to = order
            .get(number + 1)
            .map_or(run.head.order_end, |(_, to)| *to);
        let position = run.segment.base.advance(*from);
        let length = to.saturating_sub(*from);
        for again in [false, true] {
            let bytes = self.read(run, position, length, again)?;
            self.looked += bytes.len() as u64;
            let header = frame::decode_header(&bytes, run.segment.life.salt)
                .filter(|header| header.kind == FrameKind::Order && header.position == position);
            let body = header.and_then(|header| frame::verified_body(&bytes, &header));
            let entries = body.and_then(|body| pack::entries(body).collect());
            if entries.is_some() {
                return Ok(entries);
            }
        }
        Ok(None)
    }

    /// Bytes of the file of a run. With `again` they are read from the device.
    fn read(&self, run: &Run, from: Position, length: u64, again: bool) -> io::Result<Bytes> {
        match again {
            false => self.store.bytes_of_file(&run.segment, from, length),
            true => self.store.bytes_again(&run.segment, from, length),
        }
    }

    /// Handles a damaged frame of the order: the commit order of its records is lost. A scan of one log still finds
    /// each record. A scan of many logs reports a gap that names no log.
    fn lose_order(&mut self, run: &Run, number: usize) -> Result<Continuation, ReadError> {
        let order = &run.head.order;
        let behind = order
            .get(number + 1)
            .map_or(run.head.limit, |(first, _)| *first);
        // A client can choose the current position. One damaged frame must be one damage, from wherever it is read.
        let first = order.get(number).map_or(self.at, |(first, _)| *first);
        let named_before = first < self.at;
        if named_before && !self.batches.is_empty() {
            // Gaps come before the batches of a message.
            return Ok(Continuation::Full);
        }
        self.store.damages.add(Damage::of_nobody(first, true));
        // No record is lost, so the next start needs no trace of it. The sorter writes the run again.
        if let Some((_, offset)) = order.get(number) {
            let from = run.segment.base.advance(*offset);
            let to = from.advance(8);
            run.segment.add_hole(Hole { from, to });
        }
        let going = self.pass(behind.max(self.at.advance(8)));
        if named_before && going == Continuation::On {
            self.gaps.push(of_nobody());
        }
        Ok(going)
    }

    /// Moves to the next entry, which may be at the same position.
    fn on_to(&mut self, next: Position) -> Continuation {
        if next > self.at {
            return self.pass(next);
        }
        Continuation::On
    }

    fn take_piece(
        &mut self,
        run: &Run,
        entry: &OrderEntry,
        (pack, number): (u64, u32),
        next: Position,
        packs: &mut Packs,
    ) -> Result<Continuation, ReadError> {
        if entry.position > self.at {
            let going = self.pass(entry.position);
            if going != Continuation::On {
                return Ok(going);
            }
        }
        let log = self.store.logs.by_id(entry.log);
        let Some(log) = log.filter(|log| self.selects(log)) else {
            return Ok(self.on_to(next));
        };
        let Some(found) = self.pack(run, pack, packs)? else {
            return self.lose_pack(run, entry, pack, &log, next);
        };
        let Some(piece) = found.1.get(number as usize).copied() else {
            return self.lose_pack(run, entry, pack, &log, next);
        };
        if entry.dropped == 0 || self.skip > 0 {
            return self.take_found(run, entry, (pack, found.0), (&log, piece), next);
        }
        // The gap before a piece is reported together with the piece: no cursor could record that only the gap was
        // reported.
        let (gaps, bytes, at) = (self.gaps.clone(), self.bytes, self.at);
        let from = Lsn::new(piece.first_lsn.get().saturating_sub(entry.dropped));
        if self.waits(&log) {
            return Ok(Continuation::Full);
        }
        self.note_dropped(&log, from, piece.first_lsn);
        let going = self.take_found(run, entry, (pack, found.0), (&log, piece), next)?;
        if going != Continuation::On && self.at == at && self.skip == 0 {
            (self.gaps, self.bytes) = (gaps, bytes);
            if !self.found_something() {
                // The chunk is still empty, so a lack of room is not the cause: the piece could not be read.
                self.stored(run, found.0, &piece, false)
                    .map_err(|error| ReadError::Io(Arc::new(error)))?;
                return Ok(Continuation::Again);
            }
        }
        Ok(going)
    }

    /// The stored body of a piece, where its pack's body begins at `body_at`.
    fn stored(&mut self, run: &Run, body_at: u64, piece: &Piece, again: bool) -> io::Result<Bytes> {
        let position = run.segment.base.advance(body_at + u64::from(piece.offset));
        let length = u64::from(piece.stored);
        let bytes = self.read(run, position, length, again)?;
        self.looked += length;
        Ok(bytes)
    }

    /// Takes a piece of a known pack, whose body begins at `body_at`.
    fn take_found(
        &mut self,
        run: &Run,
        entry: &OrderEntry,
        (pack, body_at): (u64, u64),
        (log, piece): (&Arc<Log>, Piece),
        next: Position,
    ) -> Result<Continuation, ReadError> {
        let is_lost = log.state.read().is_lost(piece.first_lsn, piece.next_lsn());
        if is_lost {
            // Known damage names these records.
            return Ok(self.on_to(next));
        }
        let records = FrameRecords {
            first_lsn: piece.first_lsn,
            count: piece.count,
            arrival: piece.arrival,
        };
        let body = |work: &mut Self| {
            let mut body = |again| {
                let bytes = work
                    .stored(run, body_at, &piece, again)
                    .map_err(FrameFault::Io)?;
                let cipher = work.store.config.cipher.as_ref();
                let piece = Piece { offset: 0, ..piece };
                crate::read::frames::piece_body(cipher, log.id, &piece, &bytes, 0)
            };
            match body(false) {
                Err(FrameFault::Damaged) => body(true),
                body => body,
            }
        };
        match self.take_records(log, records, body)? {
            TakenFrame::Going(Continuation::On) => {
                let going = self.on_to(next);
                if going == Continuation::Full {
                    // A gap comes next, in another message. This piece was given.
                    self.skip = u64::from(piece.count);
                }
                Ok(going)
            }
            TakenFrame::Going(going) => Ok(going),
            TakenFrame::Damaged if run.segment.is_retired() => Ok(Continuation::Again),
            TakenFrame::Damaged => {
                let place = Place {
                    position: run.segment.base.advance(pack),
                    first_lsn: piece.first_lsn,
                    count: piece.count,
                    frame_len: 8,
                };
                self.store
                    .quarantine_at(log, &place, entry.position, ChecksumSite::Read);
                Ok(self.on_to(next))
            }
        }
    }

    /// Whether a gap of the log must wait for the next message: this message has batches of the log, and gaps come
    /// before batches.
    fn waits(&self, log: &Log) -> bool {
        self.batches.iter().any(|batch| batch.log_id == log.id)
    }

    /// Names dropped records of a log, each range with its reason. The message must not have batches of the log.
    fn note_dropped(&mut self, log: &Log, from: Lsn, to: Lsn) -> Continuation {
        let (deleted, kept) = self.fate_of(log);
        let (mut first, mut all) = (from, Continuation::On);
        for (border, reason) in super::gone(deleted, kept, to) {
            let until = to.min(border);
            if first < until {
                all = self.note_gap(log, first, until, reason);
                first = until;
            }
        }
        let missing = log.state.read().missing().to_vec();
        for hole in missing {
            let (from, until) = (first.max(hole.from), to.min(hole.to));
            if from < until {
                all = self.note_gap(log, from, until, hole.reason());
            }
        }
        all
    }

    /// Takes an entry of a log that keeps nothing in this run: the entry is number `told` of these, from 1.
    fn take_dropped(&mut self, entry: &OrderEntry, goes_on: Lsn, told: u64) -> Continuation {
        if entry.position > self.at {
            let going = self.pass(entry.position);
            if going != Continuation::On {
                return going;
            }
        }
        if told <= self.skip {
            return Continuation::On;
        }
        self.skip = told;
        let log = self.store.logs.by_id(entry.log);
        let Some(log) = log.filter(|log| self.selects(log)) else {
            return Continuation::On;
        };
        let from = Lsn::new(goes_on.get().saturating_sub(entry.dropped));
        if self.waits(&log) {
            self.skip = told - 1;
            return Continuation::Full;
        }
        self.note_dropped(&log, from, goes_on)
    }

    /// The pieces of a pack; `None` if its header does not verify.
    fn pack(
        &mut self,
        run: &Run,
        offset: u64,
        packs: &mut Packs,
    ) -> Result<Option<LoadedPack>, ReadError> {
        if let Some(known) = packs.get(&offset) {
            return Ok(Some(Arc::clone(known)));
        }
        let position = run.segment.base.advance(offset);
        let all = frame::MAX_HEADER_BYTES as u64;
        for (bytes, again) in [(PACK_HEADER_BYTES, false), (all, false), (all, true)] {
            let bytes = self.read(run, position, bytes, again)?;
            let header = frame::decode_header(&bytes, run.segment.life.salt)
                .filter(|header| header.kind == FrameKind::Pack && header.position == position);
            let pieces = header.and_then(|header| pack::pieces(&bytes, &header));
            if let (Some(header), Some(pieces)) = (header, pieces) {
                let body = offset + u64::from(header.header_len);
                let found = Arc::new((body, pieces));
                if packs.len() >= MOST_PACKS {
                    packs.clear();
                }
                packs.insert(offset, Arc::clone(&found));
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Handles a pack whose header does not verify: all records in it are lost.
    fn lose_pack(
        &mut self,
        run: &Run,
        entry: &OrderEntry,
        pack: u64,
        log: &Arc<Log>,
        next: Position,
    ) -> Result<Continuation, ReadError> {
        let index = self.store.sealed_index(&run.segment)?;
        if run.segment.is_retired() {
            return Ok(Continuation::Again);
        }
        let position = run.segment.base.advance(pack);
        let place = index.and_then(|index| {
            let row = index.row(log.id)?;
            let entries = index.entries(&row);
            let at = entries.partition_point(|place| place.position < position);
            entries.get(at).filter(|place| place.position == position)
        });
        if let Some(place) = place {
            let is_known = log.state.read().is_lost(place.first_lsn, place.next_lsn());
            if !is_known {
                self.store
                    .quarantine_at(log, &place, entry.position, ChecksumSite::Read);
            }
        } else {
            self.lose_unlisted(run, (entry, position), log)?;
        }
        Ok(self.on_to(next))
    }

    /// No index lists a pack whose header is lost: it was made again from the run. The records around
    /// the pack show which are missing. A walk over the run finds them, and is remembered.
    fn lose_unlisted(
        &self,
        run: &Run,
        (entry, pack): (&OrderEntry, Position),
        log: &Arc<Log>,
    ) -> Result<(), ReadError> {
        let found = match self.store.damages.walk_of(run.id(), pack) {
            Some(found) => found,
            None => {
                let found = Arc::new(run_file::lost_in(&*self.store.disk, &run.segment)?);
                self.store.damages.remember_walk(run.id(), &found);
                found
            }
        };
        let lost = found.of(log.id);
        let mut any = lost.is_none();
        if any {
            let doubt = Damage::of_nobody(entry.position, false);
            self.store.damages.add(doubt);
        }
        for (from, to) in lost.unwrap_or_default() {
            let lost = Lost {
                from: *from,
                to: *to,
                position: entry.position,
                accepted: false,
            };
            any |= self.store.learn_of(log, lost);
        }
        if any {
            self.store.let_next_start_find(&run.segment);
        }
        Ok(())
    }
}
