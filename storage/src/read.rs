//! Reading: pages of one log, and the frames behind everything that is read.
//!
//! Readers never pass through the committer: they look up places under a short lock,
//! compare them with the published positions, and read the file. Every frame is
//! verified before its bytes leave; one that does not verify is quarantined, exactly.

mod buffers;
mod cursor;
mod frames;
pub(crate) mod held_back;
mod journal_scan;
mod log_scan;
mod open_segments;
mod reach;
pub(crate) mod rebuilt;
pub(crate) mod scan;
mod sealed;
pub(crate) mod store;
mod times;

use std::io;
use std::sync::Arc;

use bytes::Bytes;

pub(crate) use self::frames::Fault;
use self::frames::{Bad, Frame, read_frames};
pub(crate) use self::open_segments::OpenSegments;
pub(crate) use self::reach::{Reach, is_retired, near_or_far};
use self::times::lsn_at;
use crate::api::codec;
use crate::api::engine::{Page, ReadRequest, ReadStart};
use crate::api::error::ReadError;
use crate::api::record::{GapReason, StoredBatch, Visibility};
use crate::base::ids::{Lsn, Position};
use crate::base::metrics::ChecksumSite;
use crate::format::active::Place;
use crate::format::address;
use crate::format::address::Hole;
use crate::index::SealedIndex;
use crate::journal::segment::Segment;
use crate::logs::damages::Damage;
use crate::logs::{Log, Lost};
use crate::read::store::Store;

/// Frames that lie together are read together, up to this.
const SPAN_BYTES: u64 = 256 << 10;

/// A page of no more is read by the event loop that was asked for it, if it need not wait for the
/// disk: each may lie in a frame of its own.
const FEW_RECORDS: u32 = 16;

impl Store {
    /// A frame that was good once is not any more, although it was read again from the device: from now
    /// on its records are named as damaged, and everything else is served.
    fn quarantine(&self, log: &Arc<Log>, place: &Place) {
        self.quarantine_found(log, place, ChecksumSite::Read);
    }

    /// Where in the journal that was which lies at `address`, about: of what is in a run, and
    /// does not tell it any more, the beginning of that.
    pub(crate) fn position_of(&self, segment: &Segment, address: Position) -> Position {
        match address::is_address(address) {
            true => self.journal.first_of_run(segment),
            false => address,
        }
    }

    /// The same, whoever found it; what is known already changes nothing.
    pub(crate) fn quarantine_found(&self, log: &Arc<Log>, place: &Place, site: ChecksumSite) {
        self.quarantine_at(log, place, place.position, site);
    }

    /// The same of what was at `position` in the journal: in a sorted run its place is another.
    pub(crate) fn quarantine_at(
        &self,
        log: &Arc<Log>,
        place: &Place,
        position: Position,
        site: ChecksumSite,
    ) {
        let is_known = log.state.read().is_lost(place.first_lsn, place.next_lsn());
        if is_known {
            // Of an earlier run of the process. Only where the bytes are is new.
            if let Some(segment) = self.journal.segment_at(place.position) {
                segment.add_hole(Hole {
                    from: place.position,
                    to: place.end(),
                });
            }
            return;
        }
        self.journal.observer.checksum_failure(site);
        tracing::error!(
            log = log.name.as_str(),
            log_id = log.id.get(),
            from_lsn = place.first_lsn.get(),
            to_lsn = place.next_lsn().get(),
            position = position.get(),
            "records do not match their checksum; they are quarantined"
        );
        let lost = Lost {
            from: place.first_lsn,
            to: place.next_lsn(),
            position,
            accepted: false,
        };
        let new = {
            let mut state = log.state.write();
            state.places.remove(place.position);
            state.add_damage(lost)
        };
        for lost in new {
            self.damages.add(Damage::of(Arc::clone(log), &lost));
        }
        if let Some(segment) = self.journal.segment_at(place.position) {
            segment.add_hole(Hole {
                from: place.position,
                to: place.end(),
            });
            self.let_next_start_find(&segment);
        }
    }

    /// Damage took these records. Those that are not known to be lost become known. Returns whether
    /// there are any: then the caller forgets the checkpoints, which do not list them.
    pub(crate) fn learn_of(&self, log: &Arc<Log>, lost: Lost) -> bool {
        let new = log.state.write().add_damage(lost);
        let any = !new.is_empty();
        for lost in new {
            self.journal.observer.checksum_failure(ChecksumSite::Scrub);
            tracing::error!(
                log = log.name.as_str(),
                log_id = log.id.get(),
                from_lsn = lost.from.get(),
                to_lsn = lost.to.get(),
                position = lost.position.get(),
                "records are missing; they are quarantined"
            );
            self.damages.add(Damage::of(Arc::clone(log), &lost));
        }
        any
    }

    /// Damage took the records that the index of a segment lists, which was made again. Returns as
    /// [`Store::learn_of`].
    pub(crate) fn learn_lost(&self, index: &SealedIndex) -> bool {
        let mut any = false;
        for row in index.rows() {
            let lost = index.image(&row).map_or_else(Vec::new, |image| image.lost);
            if let Some(log) = self.logs.by_id(row.log_id).filter(|_| !lost.is_empty()) {
                for lost in lost {
                    any |= self.learn_of(&log, lost);
                }
            }
        }
        any
    }

    /// Whether the bytes of damage are gone, and a sorted run says which records were in them.
    pub(crate) fn is_carried(&self, damage: &Damage) -> bool {
        let run = self.journal.run_at(damage.position);
        run.is_some_and(|run| run.segment.holes.read().is_empty())
    }

    fn stored(&self, log: &Log, frame: Frame) -> StoredBatch {
        StoredBatch {
            log: log.name.clone(),
            log_id: log.id,
            first_lsn: frame.first_lsn,
            count: frame.count,
            arrival: frame.arrival,
            body: frame.body,
        }
    }
}

/// The part of a batch from `first` on, of at most `most` records.
pub(crate) fn part(batch: StoredBatch, first: Lsn, most: u64) -> StoredBatch {
    let skip = first.since(batch.first_lsn);
    let left = u64::from(batch.count).saturating_sub(skip);
    let take = left.min(most);
    if skip == 0 && take == u64::from(batch.count) {
        return batch;
    }
    StoredBatch {
        first_lsn: batch.first_lsn.advance(skip),
        count: u32::try_from(take).unwrap_or(u32::MAX),
        body: codec::slice(&batch.body, skip, take),
        ..batch
    }
}

/// As many whole records of a batch as fit `bytes`, but at least one.
fn fitting(batch: StoredBatch, bytes: usize) -> StoredBatch {
    if batch.body.len() <= bytes {
        return batch;
    }
    let fit = codec::ends(&batch.body)
        .take_while(|end| *end <= bytes)
        .count();
    let first = batch.first_lsn;
    part(batch, first, (fit as u64).max(1))
}

/// Bounds of one reading step.
#[derive(Clone, Copy)]
struct Bounds {
    /// Nothing at or beyond.
    until: Lsn,
    records: u64,
    bytes: usize,
    reach: Reach,
}

/// What one step over a log found: batches up to `next`, then perhaps damage.
struct Step {
    batches: Vec<StoredBatch>,
    next: Lsn,
    /// The damaged range that begins at `next`.
    damage: Option<(Lsn, Lsn)>,
}

/// Reads records of `log` from `from` on, within bounds, up to the first damage.
fn step(store: &Store, log: &Arc<Log>, from: Lsn, bounds: Bounds) -> Result<Step, ReadError> {
    let mut step = Step {
        batches: Vec::new(),
        next: from,
        damage: None,
    };
    let (mut records, mut bytes) = (bounds.records, bounds.bytes);
    let (mut before, mut tries) = (from, 0);
    while step.next < bounds.until && records > 0 {
        if step.next > before {
            (before, tries) = (step.next, 0);
        }
        tries += 1;
        if tries > MOST_TRIES {
            return Err(ReadError::Io(Arc::new(leads_nowhere(log, before))));
        }
        let left = Bounds {
            records,
            bytes,
            ..bounds
        };
        let (places, damage) = match look_up(store, log, step.next, left) {
            // What was found is given; what is not in memory comes with the next step.
            Err(error) if reach::is_far(&error) && !step.batches.is_empty() => return Ok(step),
            found => found?,
        };
        if places.is_empty() {
            step.damage = damage;
            if damage.is_none()
                && let Some(batch) = buffered(log, step.next)
            {
                let room = bounds.until.since(step.next).min(records);
                let batch = part(batch, step.next, room);
                if step.batches.is_empty() || batch.body.len() <= bytes {
                    let batch = fitting(batch, bytes);
                    step.next = batch.next_lsn();
                    step.batches.push(batch);
                }
            }
            break;
        }
        let Some(segment) = store.journal.segment_at(places[0].position) else {
            // It was sorted since it was looked up: it is in a run now.
            continue;
        };
        let wanted = (step.next, damage.map_or(bounds.until, |(from, _)| from));
        let (frames, bad) = read_frames(store, &segment, &places, wanted, bounds.reach);
        for frame in frames {
            let room = bounds.until.since(step.next).min(records);
            let batch = part(store.stored(log, frame), step.next, room);
            if !step.batches.is_empty() && batch.body.len() > bytes {
                return Ok(step);
            }
            let batch = fitting(batch, bytes);
            store
                .journal
                .observer
                .read(u64::from(batch.count), batch.body.len() as u64);
            step.next = batch.next_lsn();
            records -= u64::from(batch.count);
            bytes = bytes.saturating_sub(batch.body.len());
            step.batches.push(batch);
            if records == 0 || bytes == 0 || step.next >= bounds.until {
                return Ok(step);
            }
        }
        let Some(Bad {
            place,
            position,
            fault,
        }) = bad
        else {
            continue;
        };
        match fault {
            // What is in its file now is of another life.
            _ if segment.is_retired() => {}
            // It is read again from the device first, and to name it may take long.
            Fault::Damaged if bounds.reach != Reach::Disk => return Err(reach::far().into()),
            Fault::Damaged => store.quarantine_at(log, &place, position, ChecksumSite::Read),
            Fault::Io(error) if reach::is_far(&error) && !step.batches.is_empty() => {
                return Ok(step);
            }
            Fault::Io(error) => return Err(ReadError::Io(Arc::new(error))),
        }
    }
    Ok(step)
}

/// So often is one lsn looked up while a sorter and damage move what is there. An index that was
/// made up may send its readers to the same wrong place for ever.
const MOST_TRIES: u32 = 100;

fn leads_nowhere(log: &Log, lsn: Lsn) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!(
            "the index of lsn {lsn} of log {:?} leads to other frames; `walctl verify` finds the \
             segment, and the next start makes its index again",
            log.name
        ),
    )
}

/// The records a log has in memory only, if `lsn` is among them.
fn buffered(log: &Log, lsn: Lsn) -> Option<StoredBatch> {
    let state = log.state.read();
    let buffered = state
        .buffered
        .as_ref()
        .filter(|buffered| buffered.first_lsn <= lsn)?;
    Some(StoredBatch {
        log: log.name.clone(),
        log_id: log.id,
        first_lsn: buffered.first_lsn,
        count: buffered.count,
        arrival: buffered.arrival,
        body: Bytes::copy_from_slice(&buffered.body),
    })
}

/// Places of frames, and the next damage behind; or none, and that where they should be.
type LookedUp = (Vec<Place>, Option<(Lsn, Lsn)>);

/// Places of frames from `lsn` on that are read in one go, or the damage at `lsn`.
fn look_up(store: &Store, log: &Log, lsn: Lsn, bounds: Bounds) -> io::Result<LookedUp> {
    let until = bounds.until;
    let (stop, known, chain, damage) = {
        let state = log.state.read();
        let damage = state.damage_from(lsn);
        if let Some((from, to)) = damage
            && from <= lsn
        {
            return Ok((Vec::new(), Some((lsn, to.min(until)))));
        }
        let stop = damage.map_or(until, |(from, _)| from.min(until));
        let candidates = state.places.from(state.places.index_of(lsn));
        let buffered = state.buffered.as_ref().map(|buffered| buffered.first_lsn);
        let known = candidates.first().map(|place| place.first_lsn).or(buffered);
        if known.is_some_and(|known| known <= lsn) {
            let places = together(store, candidates.iter().copied(), (lsn, stop), bounds);
            return Ok((places, damage));
        }
        (stop, known, state.chain.clone(), damage)
    };
    if bounds.reach == Reach::Memory {
        return Err(reach::far());
    }
    // Below the tail, yet nowhere: whatever the reason, it is named and not skipped.
    let nowhere = |known: Option<Lsn>| {
        let to = known.unwrap_or(until).min(stop);
        Ok((Vec::new(), Some((lsn, to))))
    };
    let found = store.sealed_row(log.id, &chain, bounds.reach, |_, row| row.next_lsn > lsn)?;
    let Some((index, row)) = found else {
        return nowhere(known);
    };
    let entries = index.entries(&row);
    let first = entries.partition_point(|place| place.next_lsn() <= lsn);
    if row.next_lsn < stop && bounds.reach == Reach::Disk {
        store.read_ahead(log.id, &index, stop);
    }
    match entries.get(first).map(|place| place.first_lsn) {
        Some(found) if found <= lsn => {
            let places = together(store, entries.from(first), (lsn, stop), bounds);
            Ok((places, damage))
        }
        found => nowhere(found.or(Some(row.next_lsn))),
    }
}

/// The first of these places, in order, as far as no record is missing between them, reading
/// them in one go pays, and as much is asked for.
fn together(
    store: &Store,
    candidates: impl Iterator<Item = Place>,
    (from, stop): (Lsn, Lsn),
    bounds: Bounds,
) -> Vec<Place> {
    let mut places: Vec<Place> = Vec::new();
    let mut useful = 0;
    let mut limit = Position::ZERO;
    for place in candidates {
        // An index that was made anew knows no place of a frame that is damaged.
        let goes_on = |last: &Place| last.next_lsn() == place.first_lsn;
        if place.first_lsn >= stop || !places.last().is_none_or(goes_on) {
            break;
        }
        let is_enough = |last: &Place| last.next_lsn().since(from) >= bounds.records;
        if useful >= bounds.bytes as u64 || places.last().is_some_and(is_enough) {
            break;
        }
        useful += u64::from(place.frame_len);
        if let Some(first) = places.first() {
            let span = place.end().since(first.position);
            // Frames of other logs between are not worth reading for long.
            if span > SPAN_BYTES || span > useful * 4 || place.end() > limit {
                break;
            }
        } else if let Some(segment) = store.journal.segment_at(place.position) {
            limit = segment.limit();
        }
        places.push(place);
    }
    places
}

/// The error for a range that cannot be served.
fn quarantined(log: &Log, from: Lsn, to: Option<Lsn>) -> ReadError {
    ReadError::Quarantined {
        log: log.name.clone(),
        from,
        to,
    }
}

/// Readers of what is not durable are told when the journal has failed: what they saw
/// beyond the durable lsn may not be there after a restart.
fn check_journal(store: &Store, lsn: Lsn, log: &Log) -> Result<(), ReadError> {
    match store.journal.failure() {
        Some(error) if lsn >= log.state.read().tail(store.journal.durable()) => {
            Err(ReadError::JournalFailed(error))
        }
        _ => Ok(()),
    }
}

/// How far to go for a page before another thread is asked for it.
pub(crate) fn near(request: &ReadRequest) -> Reach {
    match request.max_records {
        ..=FEW_RECORDS => Reach::Cached,
        _ => Reach::Memory,
    }
}

/// One page of one log.
pub(crate) fn page(
    store: &Arc<Store>,
    request: &ReadRequest,
    reach: Reach,
) -> Result<Page, ReadError> {
    let visibility = store.visibility(request.visibility, Some(&request.log.name));
    let log = store.resolve(&request.log, visibility)?;
    let tail = store.tail(&log, visibility);
    let first = log.state.read().first(store.journal.durable());
    let start = start_lsn(store, &log, request.start, tail, reach)?;
    if start < first {
        return Err(ReadError::Trimmed {
            log: log.name.clone(),
            first,
            asked: start,
        });
    }
    check_journal(store, start, &log)?;
    let bounds = Bounds {
        until: tail,
        records: u64::from(request.max_records),
        bytes: request.max_bytes as usize,
        reach,
    };
    let found = step(store, &log, start, bounds)?;
    if let Some((from, to)) = found.damage.filter(|_| found.batches.is_empty()) {
        let mut first = from;
        while first < to {
            match log.state.read().gap_from(first, to) {
                (_, GapReason::Quarantined) => break,
                (until, _) => first = until,
            }
        }
        if first > from {
            // It was forgotten, and others before it are there.
            return Err(ReadError::Trimmed {
                log: log.name.clone(),
                first,
                asked: from,
            });
        }
        return Err(quarantined(&log, from, Some(to)));
    }
    if start == tail && log.state.read().unproven {
        return Err(quarantined(&log, start, None));
    }
    Ok(Page {
        log_id: log.id,
        next_lsn: found.next,
        batches: found.batches,
        tail_lsn: tail,
        durable_lsn: log.state.read().tail(store.journal.durable()),
        first_lsn: first,
    })
}

/// Where a read of a log begins.
fn start_lsn(
    store: &Store,
    log: &Arc<Log>,
    start: ReadStart,
    tail: Lsn,
    reach: Reach,
) -> Result<Lsn, ReadError> {
    let first = log.state.read().first(store.journal.durable());
    match start {
        ReadStart::First => Ok(first),
        ReadStart::Lsn(asked) if asked > tail => Err(ReadError::BeyondTail {
            log: log.name.clone(),
            tail,
            asked,
        }),
        ReadStart::Lsn(asked) => Ok(asked),
        ReadStart::TailOffset(back) => Ok(Lsn::new(tail.get().saturating_sub(back)).max(first)),
        // A search over the whole log goes far.
        ReadStart::Time(_) if reach != Reach::Disk => Err(reach::far().into()),
        ReadStart::Time(time) => Ok(lsn_at(store, log, time, tail)?.max(first)),
    }
}

/// Whether the log's tail is beyond `lsn`, or cannot get there.
pub(crate) fn tail_is_beyond(
    store: &Store,
    log: &Arc<Log>,
    lsn: Lsn,
    visibility: Visibility,
) -> Option<Result<(), ReadError>> {
    let state = log.state.read();
    if state.deleted {
        return Some(Err(ReadError::LogNotFound {
            log: log.name.clone(),
        }));
    }
    drop(state);
    if store.tail(log, visibility) > lsn {
        return Some(Ok(()));
    }
    store
        .journal
        .failure()
        .map(|error| Err(ReadError::JournalFailed(error)))
}
