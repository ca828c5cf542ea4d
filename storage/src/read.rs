//! Reads records: pages of one log here, scans in `scan`, and the state that readers share in `store`.
//!
//! Readers never wait for the committer: they look up places under a short lock, compare them with the published
//! positions, and read the file. Every frame is verified before its bytes leave. A frame that does not verify is
//! quarantined: exactly its records are named as damaged.

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

pub(crate) use self::frames::FrameFault;
use self::frames::{Bad, Frame, read_frames};
pub(crate) use self::open_segments::OpenSegments;
pub(crate) use self::reach::{Reach, far, is_retired, near_or_far};
use self::times::lsn_at;
use crate::api::codec;
use crate::api::engine::{Page, ReadRequest, ReadStart};
use crate::api::error::{ReadError, TargetError};
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

/// Maximum bytes that one read of several neighbouring frames covers.
const SPAN_BYTES: u64 = 256 << 10;

/// Maximum records of a page for which an event loop reads segment files, if it need not wait for the disk. Each
/// record may lie in a frame of its own.
const FEW_RECORDS: u32 = 16;

impl Store {
    /// Quarantines a frame that was good once and does not verify now, not even when read again from the device. From
    /// now on its records are named as damaged. Everything else is served.
    fn quarantine(&self, log: &Arc<Log>, place: &Place) {
        self.quarantine_found(log, place, ChecksumSite::Read);
    }

    /// Approximate position in the journal of the bytes at `address`. For a run it is the first position of the run,
    /// because a damaged frame of a run no longer records its own.
    pub(crate) fn position_of(&self, segment: &Segment, address: Position) -> Position {
        match address::is_address(address) {
            true => self.journal.first_of_run(segment),
            false => address,
        }
    }

    /// Quarantines a frame that the check at `site` found damaged. Known damage changes nothing but the holes of the
    /// segment.
    pub(crate) fn quarantine_found(&self, log: &Arc<Log>, place: &Place, site: ChecksumSite) {
        self.quarantine_at(log, place, place.position, site);
    }

    /// Quarantines records that were at `position` in the journal. In a sorted run their place is another.
    pub(crate) fn quarantine_at(
        &self,
        log: &Arc<Log>,
        place: &Place,
        position: Position,
        site: ChecksumSite,
    ) {
        let is_known = log.state.read().is_lost(place.first_lsn, place.next_lsn());
        if is_known {
            // An earlier process found this damage. Only the place of the bytes is new.
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

    /// Notes that damage took these records. Returns whether some of them were not known to be lost. If so, the
    /// caller forgets the checkpoints, which do not list them.
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

    /// Notes the lost records that the rebuilt index of a segment lists. Returns as [`Store::learn_of`].
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

    /// Whether a sorted run has replaced the damaged bytes. The run names the records that were in them.
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

/// The first whole records of a batch that fit `bytes`; at least one.
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
struct StepBounds {
    /// The first lsn not to read.
    until: Lsn,
    records: u64,
    bytes: usize,
    reach: Reach,
}

/// Result of one step over a log: batches up to `next`, then perhaps damage.
struct ReadStep {
    batches: Vec<StoredBatch>,
    next: Lsn,
    /// The damaged range that begins at `next`.
    damage: Option<(Lsn, Lsn)>,
}

/// Reads records of `log` from `from` on, within bounds, up to the first damage.
fn step(
    store: &Store,
    log: &Arc<Log>,
    from: Lsn,
    bounds: StepBounds,
) -> Result<ReadStep, ReadError> {
    let mut step = ReadStep {
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
        let left = StepBounds {
            records,
            bytes,
            ..bounds
        };
        let (places, damage) = match look_up(store, log, step.next, left) {
            // Return the batches found so far. The next step reads the batches that are not in memory.
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
            // The segment was sorted since the lookup: its records are in a run now.
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
            // The bytes in its file now belong to another life.
            _ if segment.is_retired() => {}
            // A reader thread reads the frame again from the device and names its records. Both may take long.
            FrameFault::Damaged if bounds.reach != Reach::Disk => return Err(reach::far().into()),
            FrameFault::Damaged => store.quarantine_at(log, &place, position, ChecksumSite::Read),
            FrameFault::Io(error) if reach::is_far(&error) && !step.batches.is_empty() => {
                return Ok(step);
            }
            FrameFault::Io(error) => return Err(ReadError::Io(Arc::new(error))),
        }
    }
    Ok(step)
}

/// Maximum lookups of one lsn in one step, while the sorter and damage move its records. A forged index could
/// otherwise send its readers to the same wrong place for ever.
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

/// The records of a log that only memory holds, if `lsn` is among them.
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

/// Places of frames and the next damage behind them, or no places and the damage at their lsn.
type LookedUp = (Vec<Place>, Option<(Lsn, Lsn)>);

/// Places of frames from `lsn` on for one read, or the damage at `lsn`.
fn look_up(store: &Store, log: &Log, lsn: Lsn, bounds: StepBounds) -> io::Result<LookedUp> {
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
    // A record below the tail that has no place is reported as damage, whatever the reason. It is never skipped.
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

/// The leading candidates for one read. They end at a missing record, where a longer read would not pay, and where
/// the bounds are reached.
fn together(
    store: &Store,
    candidates: impl Iterator<Item = Place>,
    (from, stop): (Lsn, Lsn),
    bounds: StepBounds,
) -> Vec<Place> {
    let mut places: Vec<Place> = Vec::new();
    let mut useful = 0;
    let mut limit = Position::ZERO;
    for place in candidates {
        // A rebuilt index has no place for a damaged frame.
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
            // Frames of other logs in between may take at most 3/4 of the bytes read.
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

/// Reports a failed journal to a reader at or beyond the durable tail. Records that it saw beyond the durable lsn may
/// be missing after a restart.
fn check_journal(store: &Store, lsn: Lsn, log: &Log) -> Result<(), ReadError> {
    match store.journal.failure() {
        Some(error) if lsn >= log.state.read().tail(store.journal.durable()) => {
            Err(ReadError::JournalFailed(error))
        }
        _ => Ok(()),
    }
}

/// How far an event loop goes for a page, before a reader thread reads the page.
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
    let page = page_now(store, request, reach);
    // A refusal says something about the log, too.
    store.check_lease()?;
    page
}

fn page_now(store: &Arc<Store>, request: &ReadRequest, reach: Reach) -> Result<Page, ReadError> {
    let visibility = store.visibility(request.visibility, Some(&request.log.name))?;
    let log = store.resolve(&request.log, visibility)?;
    let tail = store.tail(&log, visibility);
    let seen = store.journal.trims_seen(visibility);
    let first = log.state.read().first(seen);
    let start = start_lsn(store, &log, request.start, (first, tail), reach)?;
    if start < first {
        return Err(ReadError::Trimmed {
            log: log.name.clone(),
            first,
            asked: start,
        });
    }
    check_journal(store, start, &log)?;
    let bounds = StepBounds {
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
            // These records were forgotten, although the log keeps records before them.
            return Err(ReadError::Trimmed {
                log: log.name.clone(),
                first,
                asked: from,
            });
        }
        return Err(quarantined(&log, from, Some(to)));
    }
    let unproven = log.state.read().unproven;
    if start == tail && unproven {
        return Err(quarantined(&log, start, None));
    }
    let replicated_lsn = store.replicated_lsn(&log);
    Ok(Page {
        log_id: log.id,
        next_lsn: found.next,
        batches: found.batches,
        // A reader must not stop before it gets the gap of a tail that cannot be proven.
        tail_lsn: tail.advance(u64::from(unproven)),
        durable_lsn: log.state.read().tail(store.journal.durable()),
        replicated_lsn,
        first_lsn: first,
    })
}

/// The lsn at which a read of a log with these bounds begins.
fn start_lsn(
    store: &Store,
    log: &Arc<Log>,
    start: ReadStart,
    (first, tail): (Lsn, Lsn),
    reach: Reach,
) -> Result<Lsn, ReadError> {
    match start {
        ReadStart::First => Ok(first),
        ReadStart::Lsn(asked) if asked > tail => Err(ReadError::BeyondTail {
            log: log.name.clone(),
            tail,
            asked,
        }),
        ReadStart::Lsn(asked) => Ok(asked),
        ReadStart::TailOffset(back) => Ok(Lsn::new(tail.get().saturating_sub(back)).max(first)),
        // A search over the whole log may need the disk.
        ReadStart::Time(_) if reach != Reach::Disk => Err(reach::far().into()),
        ReadStart::Time(time) => Ok(lsn_at(store, log, time, tail)?.max(first)),
    }
}

/// Whether the log's tail is beyond `lsn`: `None` if not yet, an error if it cannot get there.
pub(crate) fn tail_is_beyond(
    store: &Store,
    log: &Arc<Log>,
    lsn: Lsn,
    visibility: Visibility,
) -> Option<Result<(), ReadError>> {
    let state = log.state.read();
    if state.deleted {
        let log = log.name.clone();
        return Some(Err(TargetError::NotFound { log }.into()));
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
