//! One message for all followers of the same log.
//!
//! Many followers of a log stand at the same place of it. The first follower reads records,
//! which are kept in their encoded form. The others continue with them, without a read of the
//! log and without a copy. The rest of a message (the end, and whether it is reached) describes
//! the moment in which each follower gets it.
//!
//! ```text
//!   A at 100 ── engine ──▶ 100..160 ── kept ──▶ B, C at 100: the same bytes
//!   D at 130 ── engine ──▶ 130..175, cut to 130..160: now it stands where the others do
//! ```

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use wald_proto::v1;
use wald_storage::{LogId, Lsn, Scan, ScanChunk, ScanEnd, ScanPlace, Timestamp, Visibility};

/// Number of followers of a log from which on they share messages.
pub(super) const MANY: usize = 20;

/// Messages that are kept of a log, and their bytes; a larger one is kept alone.
const KEPT: usize = 64;
const KEPT_BYTES: usize = 4 << 20;

/// Maximum bytes kept for all logs together: a quarter of the memory of answers, which contains
/// it.
const KEPT_IN_ALL: usize = 16 << 20;

/// Age after which a message is dropped when there is too much. No follower waits longer than a
/// part of it.
const OLD: Duration = Duration::from_secs(1);

/// Followers with the same key get the same messages.
type FanOutKey = (LogId, Visibility, v1::RecordView);

/// All logs that many follow.
#[derive(Default)]
pub(crate) struct FanOut {
    logs: Mutex<HashMap<FanOutKey, Weak<SharedMessages>>>,
    /// Bytes that are kept of all of them.
    bytes: AtomicUsize,
    /// Time of the last removal of old messages.
    swept: Mutex<Option<Instant>>,
}

impl FanOut {
    /// The messages that the followers of a log share, as long as there are any followers.
    pub(super) fn join(
        self: &Arc<Self>,
        place: &ScanPlace,
        view: v1::RecordView,
    ) -> Arc<SharedMessages> {
        let key = (place.log_id, place.visibility, view);
        let mut logs = self.logs.lock();
        if let Some(shared) = logs.get(&key).and_then(Weak::upgrade) {
            return shared;
        }
        let shared = Arc::new(SharedMessages {
            fan_out: Arc::clone(self),
            key,
            kept: Mutex::default(),
        });
        logs.insert(key, Arc::downgrade(&shared));
        shared
    }

    /// Counts `bytes` as kept, if there is room for them.
    fn reserve(&self, bytes: usize) -> bool {
        let more = |kept: usize| Some(kept + bytes).filter(|kept| *kept <= KEPT_IN_ALL);
        self.bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .is_ok()
    }

    /// Drops the old messages of all logs, unless that was done a moment ago.
    fn sweep(&self) {
        let now = Instant::now();
        {
            let mut swept = self.swept.lock();
            if swept.is_some_and(|swept| now.saturating_duration_since(swept) < OLD) {
                return;
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
            let is_old = |kept: &KeptMessage| now.saturating_duration_since(kept.made) >= OLD;
            let mut kept = shared.kept.lock();
            while kept.front().is_some_and(is_old) {
                shared.drop_oldest(&mut kept);
            }
        }
    }
}

/// Newest messages for the followers of one log.
pub(super) struct SharedMessages {
    fan_out: Arc<FanOut>,
    key: FanOutKey,
    kept: Mutex<VecDeque<KeptMessage>>,
}

/// The records of one message.
#[derive(Clone)]
pub(super) struct KeptMessage {
    /// The first of them.
    pub(super) from: Lsn,
    /// Place of a scan behind this message.
    pub(super) after: ScanPlace,
    /// Whether that was the end when they were taken.
    pub(super) to_end: bool,
    /// Arrival time of the first record.
    pub(super) arrival: Timestamp,
    /// The encoded records, in memory of their own.
    pub(super) batches: Bytes,
    pub(super) made: Instant,
}

impl SharedMessages {
    /// Returns the message that begins here, and the end of the log now. The scan then stands
    /// behind that message.
    pub(super) fn take(&self, from: Lsn, scan: &mut dyn Scan) -> Option<(KeptMessage, ScanEnd)> {
        let found = self
            .kept
            .lock()
            .iter()
            .rev()
            .find(|kept| kept.from == from)
            .cloned()?;
        let end = scan.go_on_at(&found.after)?;
        Some((found, end))
    }

    /// Cuts a chunk, which began at `from`, at the place of another follower, if it goes beyond
    /// it.
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
        if ends_there && let Some(end) = scan.go_on_at(&end) {
            chunk.batches.truncate(whole);
            chunk.caught_up = end.caught_up;
            chunk.cursor = scan.cursor();
            chunk.tail_lsn = Some(end.tail_lsn);
            chunk.durable_lsn = Some(end.durable_lsn);
        }
    }

    /// Keeps a message for the followers that stand where it begins. The oldest messages make
    /// room for it: first the log's own, then the old messages of all logs.
    pub(super) fn keep(&self, new: KeptMessage) {
        if !self.keep_here(&new) {
            self.fan_out.sweep();
            self.keep_here(&new);
        }
    }

    /// `false` if there is no room.
    fn keep_here(&self, new: &KeptMessage) -> bool {
        let size = new.batches.len();
        let mut kept = self.kept.lock();
        if kept.iter().any(|kept| kept.from == new.from) {
            return true;
        }
        let mut bytes: usize = kept.iter().map(|kept| kept.batches.len()).sum();
        loop {
            let fits = kept.len() < KEPT && (bytes + size <= KEPT_BYTES || kept.is_empty());
            if fits && self.fan_out.reserve(size) {
                kept.push_back(new.clone());
                return true;
            }
            if kept.is_empty() {
                return false;
            }
            bytes -= self.drop_oldest(&mut kept);
        }
    }

    /// Returns the number of bytes that it dropped.
    fn drop_oldest(&self, kept: &mut VecDeque<KeptMessage>) -> usize {
        let size = kept.pop_front().map_or(0, |oldest| oldest.batches.len());
        self.fan_out.bytes.fetch_sub(size, Ordering::Relaxed);
        size
    }
}

impl Drop for SharedMessages {
    fn drop(&mut self) {
        let kept = std::mem::take(self.kept.get_mut());
        let bytes = kept.iter().map(|kept| kept.batches.len()).sum();
        self.fan_out.bytes.fetch_sub(bytes, Ordering::Relaxed);
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
    use wald_storage::{BoxFuture, LogName, Position, ReadError, Room, StoredBatch};

    use super::*;

    fn place(next: u64) -> ScanPlace {
        ScanPlace {
            log_id: LogId::new(7),
            visibility: Visibility::Durable,
            next: Lsn::new(next),
            position: Position::new(next * 100),
        }
    }

    /// A scan at a fixed place. It moves where it is sent, unless records before that place are
    /// gone.
    struct Standing {
        place: ScanPlace,
        first: Lsn,
        tail: Lsn,
    }

    impl Standing {
        fn at(next: u64) -> Self {
            Self {
                place: place(next),
                first: Lsn::ZERO,
                tail: Lsn::new(25),
            }
        }
    }

    impl Scan for Standing {
        fn next(&mut self) -> BoxFuture<'_, Result<Option<ScanChunk>, ReadError>> {
            unreachable!("nobody asks it")
        }

        fn read_in(&mut self, _: Arc<dyn Room>) {}

        fn cursor(&self) -> Bytes {
            self.place.next.get().to_le_bytes().to_vec().into()
        }

        fn followers(&self) -> usize {
            MANY
        }

        fn place(&self) -> Option<ScanPlace> {
            Some(self.place)
        }

        fn go_on_at(&mut self, place: &ScanPlace) -> Option<ScanEnd> {
            if self.place.next.min(place.next) < self.first {
                return None;
            }
            self.place = *place;
            Some(ScanEnd {
                caught_up: place.next >= self.tail,
                tail_lsn: self.tail,
                durable_lsn: Lsn::ZERO,
            })
        }
    }

    fn shared() -> Arc<SharedMessages> {
        Arc::new(FanOut::default()).join(&place(0), v1::RecordView::default())
    }

    fn kept(from: u64, to: u64, bytes: usize) -> KeptMessage {
        KeptMessage {
            from: Lsn::new(from),
            after: place(to),
            to_end: true,
            arrival: Timestamp::from_micros(0),
            batches: vec![0; bytes].into(),
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
        let (kept, end) = shared.take(Lsn::new(10), &mut scan).unwrap();
        assert_eq!((kept.after, scan.place), (place(20), place(20)));
        // The current end, not the end when the message was made.
        assert!(!end.caught_up);
        assert_eq!(end.tail_lsn, Lsn::new(25));
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
        assert!(!longer.caught_up);
        assert_eq!(longer.tail_lsn, Some(Lsn::new(25)));
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
        assert_eq!(fan_out.bytes.load(Ordering::Relaxed), 10);
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
        // A log's own oldest makes room for its newest.
        all[0].keep(kept(2, 3, KEPT_BYTES / 2));
        let kept_of_first: Vec<_> = all[0]
            .kept
            .lock()
            .iter()
            .map(|one| one.from.get())
            .collect();
        assert_eq!(kept_of_first, [1, 2]);
        // Old messages make room.
        for shared in &all {
            for kept in shared.kept.lock().iter_mut() {
                kept.made -= OLD;
            }
        }
        *fan_out.swept.lock() = None;
        all[logs - 1].keep(kept(0, 1, KEPT_BYTES / 2));
        assert_eq!(bytes(), KEPT_BYTES / 2);
    }
}
