//! Finds the first record of a log at or after a time.

use std::sync::Arc;

use super::frames::{ALL, Bad, Frame, FrameFault, read_frames};
use super::reach::{Reach, is_retired, retired};
use crate::api::codec;
use crate::api::error::ReadError;
use crate::base::ids::{Lsn, Timestamp};
use crate::base::metrics::ChecksumSite;
use crate::format::active::Place;
use crate::format::chain::Chain;
use crate::index::Row;
use crate::logs::Log;
use crate::read::store::Store;

/// The first lsn whose stored time is not before `time`, or `tail`. Stored time never goes back, so this is a binary
/// search over sealed segments or over frames in memory. Then it reads one frame.
pub(super) fn lsn_at(
    store: &Store,
    log: &Arc<Log>,
    time: Timestamp,
    tail: Lsn,
) -> Result<Lsn, ReadError> {
    loop {
        match try_lsn_at(store, log, time, tail) {
            Err(ReadError::Io(error)) if is_retired(&error) => {}
            found => return found,
        }
    }
}

fn try_lsn_at(store: &Store, log: &Arc<Log>, time: Timestamp, tail: Lsn) -> Result<Lsn, ReadError> {
    let (chain, places, in_memory) = {
        let state = log.state.read();
        // At most 256 KiB.
        let in_memory = state.buffered.as_ref().map(|buffered| {
            let times = codec::own_times(&buffered.body);
            let before = times.take_while(|own| own.unwrap_or(buffered.arrival) < time);
            buffered.first_lsn.advance(before.count() as u64)
        });
        (state.chain.clone(), state.places.clone(), in_memory)
    };
    let place = match sealed_at(store, log, &chain, time)? {
        Some(place) => Some(place),
        None => first_not_before(store, log, time, places.len(), |index| {
            places
                .get(index)
                .copied()
                .filter(|place| place.first_lsn < tail)
        })?,
    };
    let Some(place) = place else {
        return Ok(in_memory.map_or(tail, |lsn| lsn.min(tail)));
    };
    let Some(segment) = store.journal.segment_at(place.position) else {
        return Err(retired().into());
    };
    let (frames, _) = read_frames(store, &segment, &[place], ALL, Reach::Disk);
    let mut found = frames
        .first()
        .map_or(place.first_lsn, |frame| frame.first_lsn);
    for frame in &frames {
        let before = codec::own_times(&frame.body)
            .take_while(|own| own.unwrap_or(frame.arrival) < time)
            .count() as u64;
        found = frame.first_lsn.advance(before);
        if before < u64::from(frame.count) {
            break;
        }
    }
    Ok(found.min(tail))
}

/// The first place in sealed segments whose frame holds a record that is not before `time`.
fn sealed_at(
    store: &Store,
    log: &Arc<Log>,
    chain: &Chain,
    time: Timestamp,
) -> Result<Option<Place>, ReadError> {
    let mut after = Lsn::ZERO;
    loop {
        let wanted = |row: &Row| row.last_time >= time && row.next_lsn > after;
        let Some((index, row)) =
            store.sealed_row(log.id, chain, Reach::Disk, |_, row| wanted(row))?
        else {
            return Ok(None);
        };
        let entries = index.entries(&row);
        let place = first_not_before(store, log, time, entries.len(), |index| entries.get(index))?;
        if place.is_some() {
            return Ok(place);
        }
        // Records of that time in the segment were found damaged before the segment was indexed.
        after = row.next_lsn;
    }
}

/// The first of `count` places whose frame holds a record that is not before `time`. Where `get` returns `None`, no
/// visible records are left.
fn first_not_before(
    store: &Store,
    log: &Arc<Log>,
    time: Timestamp,
    count: usize,
    get: impl Fn(usize) -> Option<Place>,
) -> Result<Option<Place>, ReadError> {
    let (mut low, mut high) = (0, count);
    // Invariant: every record of frames below `low` is earlier; frame `high` is not.
    while low < high {
        let middle = low + (high - low) / 2;
        let earlier = match get(middle) {
            Some(place) => last_time(store, log, &place)?.is_some_and(|last| last < time),
            None => false,
        };
        if earlier {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    Ok(get(low))
}

/// Stored time of a frame's last record; `None` if the frame is damaged.
fn last_time(store: &Store, log: &Arc<Log>, place: &Place) -> Result<Option<Timestamp>, ReadError> {
    let Some(segment) = store.journal.segment_at(place.position) else {
        return Err(retired().into());
    };
    let (frames, bad) = read_frames(store, &segment, &[*place], ALL, Reach::Disk);
    let last = |frames: &[Frame]| {
        let frame = frames.last()?;
        let last = codec::own_times(&frame.body).last()?;
        Some(last.unwrap_or(frame.arrival))
    };
    match bad {
        None => Ok(last(&frames)),
        Some(_) if segment.is_retired() => Err(retired().into()),
        Some(Bad {
            place,
            position,
            fault: FrameFault::Damaged,
        }) => {
            store.quarantine_at(log, &place, position, ChecksumSite::Read);
            // The rest of a pack is good.
            Ok(last(&frames))
        }
        Some(Bad {
            fault: FrameFault::Io(error),
            ..
        }) => Err(ReadError::Io(Arc::new(error))),
    }
}
