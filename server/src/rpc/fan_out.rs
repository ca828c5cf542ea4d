//! One message for all who follow the same log.
//!
//! Many followers of a log stand at the same place of it. What the first of them is given is
//! kept for the others, as it is sent: they go on after it without a look at the log, and
//! without a copy of their own.
//!
//! ```text
//!   A at 100 ── engine ──▶ 100..160 ── kept ──▶ B, C at 100: the same bytes
//!   D at 130 ── engine ──▶ 130..175, cut to 130..160: now it stands where the others do
//! ```

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wald_proto::v1;
use wald_storage::{LogId, Lsn, Scan, ScanChunk, ScanPlace, Timestamp, Visibility};

use super::direct::Framed;

/// From so many followers of a log on.
pub(super) const MANY: usize = 20;

/// Messages that are kept of a log, and their bytes; the newest is kept whatever its size.
const KEPT: usize = 64;
const KEPT_BYTES: usize = 4 << 20;

/// Of all logs together. Bytes of messages: what lies in a group or a buffer that is larger
/// holds all of that.
const KEPT_IN_ALL: usize = 64 << 20;

/// Nobody waits longer than a part of that: what is older goes when there is too much.
const OLD: Duration = Duration::from_secs(1);

/// What messages are the same for.
type Key = (LogId, Visibility, v1::RecordView);

/// All logs that many follow.
#[derive(Default)]
pub(crate) struct FanOut {
    logs: Mutex<HashMap<Key, Weak<Shared>>>,
    /// Bytes that are kept of all of them.
    bytes: AtomicUsize,
    /// When what is old went the last time.
    swept: Mutex<Option<Instant>>,
}

impl FanOut {
    /// What the followers of a log share, for as long as there are any.
    pub(super) fn join(self: &Arc<Self>, place: &ScanPlace, view: v1::RecordView) -> Arc<Shared> {
        let key = (place.log_id, place.visibility, view);
        let mut logs = self.logs.lock();
        if let Some(shared) = logs.get(&key).and_then(Weak::upgrade) {
            return shared;
        }
        let shared = Arc::new(Shared {
            fan_out: Arc::clone(self),
            key,
            kept: Mutex::default(),
        });
        logs.insert(key, Arc::downgrade(&shared));
        shared
    }

    /// Whether there is room for so many bytes more.
    fn has_room(&self, bytes: usize) -> bool {
        let fits = || self.bytes.load(Ordering::Relaxed) + bytes <= KEPT_IN_ALL;
        if fits() {
            return true;
        }
        let now = Instant::now();
        {
            let mut swept = self.swept.lock();
            if swept.is_some_and(|swept| now.saturating_duration_since(swept) < OLD) {
                return false;
            }
            *swept = Some(now);
        }
        let logs: Vec<_> = self
            .logs
            .lock()
            .values()
            .filter_map(Weak::upgrade)
            .collect();
        for shared in logs {
            let is_old = |kept: &Kept| now.saturating_duration_since(kept.made) >= OLD;
            shared.drop_while(&mut shared.kept.lock(), |kept| {
                kept.front().is_some_and(is_old)
            });
        }
        fits()
    }
}

/// What was given last to those who follow one log.
pub(super) struct Shared {
    fan_out: Arc<FanOut>,
    key: Key,
    kept: Mutex<VecDeque<Kept>>,
}

/// One message.
#[derive(Clone)]
pub(super) struct Kept {
    /// The first record in it.
    pub(super) from: Lsn,
    /// Where who is given it stands then.
    pub(super) after: ScanPlace,
    /// When the first record arrived.
    pub(super) arrival: Timestamp,
    pub(super) message: Framed,
    pub(super) made: Instant,
}

impl Shared {
    /// What was given to who stood here; the scan then stands behind it.
    pub(super) fn take(&self, from: Lsn, scan: &mut dyn Scan) -> Option<Kept> {
        let found = self
            .kept
            .lock()
            .iter()
            .rev()
            .find(|kept| kept.from == from)
            .cloned();
        found.filter(|kept| scan.go_on_at(&kept.after))
    }

    /// Ends a chunk, which began at `from`, where somebody stands, if it goes beyond that.
    pub(super) fn align(&self, from: Lsn, chunk: &mut ScanChunk, scan: &mut dyn Scan) {
        let Some(here) = scan.place() else { return };
        let between = |end: &ScanPlace| from < end.next && end.next < here.next;
        let end = {
            let kept = self.kept.lock();
            kept.iter().rev().map(|kept| kept.after).find(between)
        };
        let Some(end) = end else { return };
        let whole = chunk
            .batches
            .partition_point(|batch| batch.next_lsn() <= end.next);
        let ends_there = whole > 0 && chunk.batches[whole - 1].next_lsn() == end.next;
        // There is more.
        let end = ScanPlace {
            caught_up: false,
            ..end
        };
        if ends_there && scan.go_on_at(&end) {
            chunk.batches.truncate(whole);
            chunk.caught_up = false;
            chunk.cursor = scan.cursor();
        }
    }

    /// Keeps a message for those who stand where it begins.
    pub(super) fn keep(&self, new: Kept) {
        let size = new.message.length();
        if !self.fan_out.has_room(size) {
            return;
        }
        let mut kept = self.kept.lock();
        if kept.iter().any(|kept| kept.from == new.from) {
            return;
        }
        self.fan_out.bytes.fetch_add(size, Ordering::Relaxed);
        kept.push_back(new);
        let mut bytes: usize = kept.iter().map(|kept| kept.message.length()).sum();
        self.drop_while(&mut kept, |kept| {
            let too_much = kept.len() > KEPT || (bytes > KEPT_BYTES && kept.len() > 1);
            bytes -= kept.front().map_or(0, |oldest| oldest.message.length());
            too_much
        });
    }

    /// Drops the oldest while it is to go.
    fn drop_while(&self, kept: &mut VecDeque<Kept>, mut goes: impl FnMut(&VecDeque<Kept>) -> bool) {
        while goes(kept) {
            let Some(oldest) = kept.pop_front() else {
                return;
            };
            let size = oldest.message.length();
            self.fan_out.bytes.fetch_sub(size, Ordering::Relaxed);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.drop_while(&mut self.kept.lock(), |kept| !kept.is_empty());
        let mut logs = self.fan_out.logs.lock();
        // Another may have been made meanwhile.
        if logs
            .get(&self.key)
            .is_some_and(|shared| shared.strong_count() == 0)
        {
            logs.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use wald_proto::codec::Encoded;
    use wald_storage::{BoxFuture, LogName, Position, ReadError, StoredBatch};

    use super::*;

    fn place(next: u64) -> ScanPlace {
        ScanPlace {
            log_id: LogId::new(7),
            visibility: Visibility::Durable,
            next: Lsn::new(next),
            position: Position::new(next * 100),
            caught_up: true,
        }
    }

    /// Stands somewhere, and goes where it is told unless that is before what is kept.
    struct Standing {
        place: ScanPlace,
        first: Lsn,
    }

    impl Standing {
        fn at(next: u64) -> Self {
            Self {
                place: place(next),
                first: Lsn::ZERO,
            }
        }
    }

    impl Scan for Standing {
        fn next(&mut self) -> BoxFuture<'_, Result<Option<ScanChunk>, ReadError>> {
            unreachable!("nobody asks it")
        }

        fn cursor(&self) -> Bytes {
            self.place.next.get().to_le_bytes().to_vec().into()
        }

        fn followers(&self) -> usize {
            MANY
        }

        fn place(&self) -> Option<ScanPlace> {
            Some(self.place)
        }

        fn go_on_at(&mut self, place: &ScanPlace) -> bool {
            let given = self.first <= self.place.next.min(place.next);
            if given {
                self.place = *place;
            }
            given
        }
    }

    fn shared() -> Arc<Shared> {
        Arc::new(FanOut::default()).join(&place(0), v1::RecordView::default())
    }

    fn kept(from: u64, to: u64, bytes: usize) -> Kept {
        let mut message = Encoded::default();
        message.push(vec![0; bytes]);
        Kept {
            from: Lsn::new(from),
            after: place(to),
            arrival: Timestamp::from_micros(0),
            message: Framed::new(message).unwrap(),
            made: Instant::now(),
        }
    }

    fn chunk(first: u64, counts: &[u32]) -> ScanChunk {
        let mut next = Lsn::new(first);
        let batches = counts.iter().map(|count| {
            let first_lsn = next;
            next = next.advance(u64::from(*count));
            StoredBatch {
                log: LogName::new("a").unwrap(),
                log_id: LogId::new(7),
                first_lsn,
                count: *count,
                arrival: Timestamp::from_micros(0),
                body: Bytes::new(),
            }
        });
        ScanChunk {
            gaps: Vec::new(),
            batches: batches.collect(),
            caught_up: true,
            cursor: Bytes::new(),
            tail_lsn: None,
            durable_lsn: None,
        }
    }

    #[test]
    fn who_stands_where_another_stood_is_given_the_same() {
        let shared = shared();
        shared.keep(kept(10, 20, 1));
        let mut scan = Standing::at(10);
        assert_eq!(
            shared.take(Lsn::new(10), &mut scan).unwrap().after,
            place(20)
        );
        assert_eq!(scan.place, place(20));
        assert!(shared.take(Lsn::new(20), &mut scan).is_none());
        // Trimmed meanwhile.
        let mut scan = Standing {
            first: Lsn::new(11),
            ..Standing::at(10)
        };
        assert!(shared.take(Lsn::new(10), &mut scan).is_none());
        assert_eq!(scan.place, place(10));
    }

    #[test]
    fn who_stands_between_is_led_to_where_the_others_stand() {
        let shared = shared();
        shared.keep(kept(10, 20, 1));
        let mut scan = Standing::at(25);
        let mut longer = chunk(15, &[5, 3, 2]);
        shared.align(Lsn::new(15), &mut longer, &mut scan);
        assert_eq!(longer.batches.len(), 1);
        assert!(!longer.caught_up && !scan.place.caught_up);
        assert_eq!(scan.place.next, Lsn::new(20));
        assert_eq!(longer.cursor, scan.cursor());
        // No batch ends there.
        let mut scan = Standing::at(25);
        let mut across = chunk(15, &[4, 6]);
        shared.align(Lsn::new(15), &mut across, &mut scan);
        assert_eq!((across.batches.len(), scan.place), (2, place(25)));
        // It goes no further.
        let mut scan = Standing::at(20);
        let mut same = chunk(15, &[5]);
        shared.align(Lsn::new(15), &mut same, &mut scan);
        assert!(same.caught_up);
        assert_eq!(scan.place, place(20));
    }

    #[test]
    fn few_messages_are_kept_and_few_bytes() {
        let shared = shared();
        for from in 0..2 * KEPT as u64 {
            shared.keep(kept(from, from + 1, 1));
        }
        assert_eq!(shared.kept.lock().len(), KEPT);
        shared.keep(kept(1000, 1001, KEPT_BYTES * 2));
        assert_eq!(shared.kept.lock().len(), 1);
        shared.keep(kept(1001, 1002, 1));
        assert_eq!(shared.kept.lock().len(), 1, "the larger one went");
    }

    #[test]
    fn nothing_is_left_of_a_log_that_nobody_follows() {
        let fan_out = Arc::new(FanOut::default());
        let join = || fan_out.join(&place(0), v1::RecordView::default());
        let (one, other) = (join(), join());
        assert!(Arc::ptr_eq(&one, &other));
        drop(one);
        assert_eq!(fan_out.logs.lock().len(), 1);
        other.keep(kept(0, 1, 10));
        assert_eq!(fan_out.bytes.load(Ordering::Relaxed), 15);
        drop(other);
        assert_eq!(fan_out.logs.lock().len(), 0);
        assert_eq!(fan_out.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn of_all_logs_together_no_more_is_kept_than_there_is_room_for() {
        let fan_out = Arc::new(FanOut::default());
        let logs = 2 * KEPT_IN_ALL / KEPT_BYTES;
        let of_log = |number: usize| {
            let place = ScanPlace {
                log_id: LogId::new(number as u64),
                ..place(0)
            };
            fan_out.join(&place, v1::RecordView::default())
        };
        let bytes = || fan_out.bytes.load(Ordering::Relaxed);
        let all: Vec<_> = (0..logs).map(of_log).collect();
        for shared in &all {
            shared.keep(kept(0, 1, KEPT_BYTES / 2));
            shared.keep(kept(1, 2, KEPT_BYTES / 2));
            assert!(bytes() <= KEPT_IN_ALL);
        }
        assert!(bytes() > KEPT_IN_ALL / 2);
        assert!(all[logs - 1].kept.lock().is_empty());
        // What is old makes room.
        for shared in &all {
            for kept in shared.kept.lock().iter_mut() {
                kept.made -= OLD;
            }
        }
        *fan_out.swept.lock() = None;
        all[logs - 1].keep(kept(0, 1, KEPT_BYTES / 2));
        assert_eq!(bytes(), KEPT_BYTES / 2 + 5);
    }
}
