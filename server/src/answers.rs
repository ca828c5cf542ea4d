//! The memory of answers: one budget for the bytes that are read for clients and that clients have not
//! taken yet.
//!
//! ```text
//! Read, Scan ─▶ reserve the most ─▶ the engine reads ─▶ shrink to the message ─▶ sent
//!               (waits for room)                                                  │
//!          room ◀───────── its last byte has left, or the call has ended ◀────────┘
//! ```
//!
//! **The share**: a connection may hold as much as is still free for others. Alone it gets half of the
//! budget: 32 reads of 1 MiB at work; two greedy ones get a third each; a connection with nothing under
//! way finds room.
//!
//! **Without room** a scan waits before it reads, and a read waits for [`PATIENCE`] and then is BUSY. A scan
//! of the HTTP API that holds a message waits for the room of its text as long as a read. Calls that hold room
//! and whose clients take less than 64 KiB/s of a waiting message end then ([`crate::transport::Hurry`]).
//! Scans leave [`FOR_ONE_ANSWER`] to calls of one answer: those are many, and soon over.
//!
//! **Answers to writes** are counted and never refused or cut off: they tell whether the write was applied.

mod body;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tonic::Status;
use wald_storage::{BoxFuture, Room};

use crate::auth::TenantUsage;
use crate::shortage::Shortage;
use crate::status;
pub(crate) use body::Counted;

/// Bytes of all answers together.
pub(crate) const ANSWERS_BYTES: u64 = 64 << 20;

/// Messages of fewer bytes are not counted: `max_concurrent_streams` of them are little.
pub(crate) const SMALL_BYTES: u64 = 4 << 10;

/// Default maximum size of a record. A scan returns at least one record of this size; the
/// excess of a larger record is counted once it is read.
const RECORD_BYTES: u64 = 1 << 20;

/// Longest time that a call of one answer waits for room.
const PATIENCE: Duration = Duration::from_secs(1);

/// Maximum time between two checks for room, whatever was given back meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Streams of answers leave one part in this many of the budget to calls of one answer.
const FOR_ONE_ANSWER: u64 = 8;

/// Bytes that a reflection stream reserves while it is open.
const STREAM_BYTES: u64 = 128 << 10;

/// Marks an answer that holds room for which others may wait. One without it is never cut off for being
/// taken slowly.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MayBeHurried;

/// Marks an answer so.
pub(crate) fn may_be_hurried<B>(mut answer: http::Response<B>) -> http::Response<B> {
    answer.extensions_mut().insert(MayBeHurried);
    answer
}

/// The budget of a server.
#[derive(Debug)]
pub(crate) struct AnswerBudget {
    limit: u64,
    total: AtomicU64,
    /// Connections that wait for room.
    waiting: AtomicUsize,
    room: Notify,
    shortage: Shortage,
}

impl AnswerBudget {
    /// A budget of `limit` bytes.
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self {
            limit,
            total: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            room: Notify::new(),
            shortage: Shortage::new(),
        })
    }

    /// Bytes that are read and not taken.
    pub(crate) fn bytes(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// The part of the budget that streams of answers may take.
    fn limit_of_streams(&self) -> u64 {
        self.limit - self.limit / FOR_ONE_ANSWER
    }
}

/// The share of one connection in the budget.
#[derive(Debug, Clone)]
pub(crate) struct AnswerShare(Arc<OwnAnswers>);

#[derive(Debug)]
struct OwnAnswers {
    answers: Arc<AnswerBudget>,
    bytes: AtomicU64,
    /// Held by the call of the connection that waits for room; the others wait for it.
    first: tokio::sync::Mutex<()>,
}

impl AnswerShare {
    /// A connection that holds nothing yet.
    pub(crate) fn new(answers: &Arc<AnswerBudget>) -> Self {
        Self(Arc::new(OwnAnswers {
            answers: Arc::clone(answers),
            bytes: AtomicU64::new(0),
            first: tokio::sync::Mutex::default(),
        }))
    }

    /// Reserves `bytes` if that many are free of the first `limit` bytes of the budget.
    fn try_hold(&self, bytes: u64, limit: u64) -> Option<Held> {
        self.try_hold_beside(0, bytes, limit)
    }

    /// Reserves `bytes` for the text of a message that holds `message` bytes itself, if that many are free of the first
    /// `limit` bytes of the budget.
    fn try_hold_beside(&self, message: u64, bytes: u64, limit: u64) -> Option<Held> {
        let answers = &self.0.answers;
        // A message may be larger than the budget. Then it waits for all of it.
        let limit = limit.max(message);
        let bytes = bytes.min(limit - message);
        let mut held = self.count(bytes);
        let own = self.0.bytes.load(Ordering::Relaxed);
        let free = limit.checked_sub(answers.bytes());
        // The first of a connection need not leave as much as it takes.
        let has_room = free.is_some_and(|free| own <= (message + bytes).max(free));
        if has_room {
            return Some(held);
        }
        answers
            .shortage
            .refused(limit, answers.bytes() - held.bytes);
        // Nobody is woken: no room is free that was not before.
        held.change(0);
        None
    }

    /// Reserves `bytes` beside a message as soon as that many are free of the first `limit` bytes of the budget.
    async fn hold_beside(&self, message: u64, bytes: u64, limit: u64) -> Held {
        if let Some(held) = self.try_hold_beside(message, bytes, limit) {
            return held;
        }
        let answers = &self.0.answers;
        let _first = self.0.first.lock().await;
        let _waiting = WaitingConnection::new(answers);
        loop {
            // Made before the check, so that bytes that are returned in between wake it.
            let room = answers.room.notified();
            if let Some(held) = self.try_hold_beside(message, bytes, limit) {
                return held;
            }
            let _ = tokio::time::timeout(LOOK_AGAIN, room).await;
        }
    }

    /// Reserves bytes for an answer of one message.
    ///
    /// # Errors
    /// BUSY if there is no room for a second.
    pub(crate) async fn hold_soon(&self, bytes: u64) -> Result<Held, Status> {
        self.hold_in_time(0, bytes, self.0.answers.limit).await
    }

    /// Reserves bytes for the text of a message that is held meanwhile. `is_stream`: others follow it. If all streams
    /// waited here until there is room, none would ever make any.
    ///
    /// # Errors
    /// BUSY if there is no room for a second.
    pub(crate) async fn hold_for_text(
        &self,
        message: u64,
        bytes: u64,
        is_stream: bool,
    ) -> Result<Held, Status> {
        let limit = match is_stream {
            true => self.0.answers.limit_of_streams(),
            false => self.0.answers.limit,
        };
        self.hold_in_time(message, bytes, limit).await
    }

    /// Reserves the memory of a reflection stream.
    ///
    /// # Errors
    /// BUSY if there is no room for a second.
    pub(crate) async fn hold_for_stream(&self) -> Result<Held, Status> {
        let limit = self.0.answers.limit_of_streams();
        self.hold_in_time(0, STREAM_BYTES, limit).await
    }

    async fn hold_in_time(&self, message: u64, bytes: u64, limit: u64) -> Result<Held, Status> {
        if let Some(held) = self.try_hold_beside(message, bytes, limit) {
            return Ok(held);
        }
        // Boxed: most calls do not wait, and are smaller without it.
        let room = Box::pin(self.hold_beside(message, bytes, limit));
        let answers = &self.0.answers;
        (tokio::time::timeout(PATIENCE, room).await)
            .map_err(|_| status::answers_busy(answers.bytes(), answers.limit))
    }

    /// Waits until there is room for a small answer, and takes none.
    ///
    /// # Errors
    /// BUSY if there is no room for a second.
    pub(crate) async fn room(&self) -> Result<(), Status> {
        self.hold_soon(SMALL_BYTES).await.map(drop)
    }

    /// Counts `bytes`, whether or not they are free.
    pub(crate) fn count(&self, bytes: u64) -> Held {
        self.0.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.0.answers.total.fetch_add(bytes, Ordering::Relaxed);
        Held {
            answers: Arc::clone(&self.0.answers),
            own: Arc::clone(&self.0),
            bytes,
        }
    }

    /// Whether calls of the connection must take their answers fast: others need the room that it holds.
    pub(crate) fn must_hurry(&self) -> bool {
        self.0.bytes.load(Ordering::Relaxed) > 0 && self.0.answers.shortage.is_now()
    }
}

/// Counts a connection that waits for room.
struct WaitingConnection<'a>(&'a AtomicUsize);

impl<'a> WaitingConnection<'a> {
    fn new(answers: &'a AnswerBudget) -> Self {
        answers.waiting.fetch_add(1, Ordering::Relaxed);
        Self(&answers.waiting)
    }
}

impl Drop for WaitingConnection<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Bytes of the budget; they come back when it is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    answers: Arc<AnswerBudget>,
    own: Arc<OwnAnswers>,
    bytes: u64,
}

impl Held {
    /// Takes the bytes of the message instead of the most it could have had.
    pub(crate) fn set(&mut self, bytes: u64) {
        let less = bytes < self.bytes;
        self.change(bytes);
        if less {
            self.tell();
        }
    }

    fn change(&mut self, bytes: u64) {
        for sum in [&self.own.bytes, &self.answers.total] {
            // The sums wrap around, so that this adds or takes away.
            sum.fetch_add(bytes.wrapping_sub(self.bytes), Ordering::Relaxed);
        }
        self.bytes = bytes;
    }

    /// Puts the room into the extensions of an answer, whose body takes it ([`Counted`]).
    pub(crate) fn travel_with(self, extensions: &mut http::Extensions) {
        extensions.insert(Arc::new(self));
    }

    /// Wakes one connection that waits for room.
    fn tell(&self) {
        if self.answers.waiting.load(Ordering::Relaxed) > 0 {
            self.answers.room.notify_one();
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.set(0);
        }
    }
}

/// The room of one scan, and its place among the reads of its tenant.
pub(crate) struct ScanRoom {
    share: AnswerShare,
    held: Mutex<Option<Held>>,
    /// `None`: its caller has no tenant.
    tenant: Option<Arc<TenantUsage>>,
    /// Shared with the thread that reads.
    place: Mutex<Option<Arc<OwnedSemaphorePermit>>>,
    /// Whether it waits for its place, or for the rate of its tenant.
    waits: AtomicBool,
}

impl ScanRoom {
    /// A scan of a client on that connection, which counts for a tenant if there is one.
    pub(crate) fn new(share: AnswerShare, tenant: Option<Arc<TenantUsage>>) -> Arc<Self> {
        Arc::new(Self {
            share,
            held: Mutex::new(None),
            tenant,
            place: Mutex::new(None),
            waits: AtomicBool::new(false),
        })
    }

    /// Whether it waits for its turn or for the rate of its tenant.
    pub(crate) fn waits_for_rate(&self) -> bool {
        self.waits.load(Ordering::Relaxed)
    }

    /// Returns the reserved room, for the message that was read, and leaves its place to another read of the tenant.
    pub(crate) fn take(&self) -> Option<Held> {
        drop(self.place.lock().take());
        self.waits.store(false, Ordering::Relaxed);
        self.held.lock().take()
    }
}

impl Room for ScanRoom {
    fn reserve(&self, bytes: u64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let (bytes, limit) = (
                bytes.max(RECORD_BYTES),
                self.share.0.answers.limit_of_streams(),
            );
            loop {
                // First: a scan that waits here holds no memory.
                if let Some(tenant) = &self.tenant
                    && self.place.lock().is_none()
                {
                    self.waits.store(true, Ordering::Relaxed);
                    let place = tenant.read_place_in_turn().await;
                    self.waits.store(false, Ordering::Relaxed);
                    *self.place.lock() = place.map(Arc::new);
                }
                if self.held.lock().is_some() {
                    return;
                }
                if let Some(held) = self.share.try_hold(bytes, limit) {
                    *self.held.lock() = Some(held);
                    return;
                }
                // A scan that waits for memory holds no place: other reads of the tenant may find theirs.
                drop(self.place.lock().take());
                let held = self.share.hold_beside(0, bytes, limit).await;
                if self.tenant.is_none() {
                    *self.held.lock() = Some(held);
                    return;
                }
            }
        })
    }

    fn give_back(&self) {
        drop(self.take());
    }

    fn at_work(&self) -> Option<Arc<dyn Send + Sync>> {
        let place = self.place.lock().clone();
        place.map(|place| place as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    impl AnswerShare {
        fn hold_now(&self, bytes: u64) -> Option<Held> {
            self.try_hold(bytes, self.0.answers.limit)
        }
    }

    fn fill(share: &AnswerShare) -> Vec<Held> {
        std::iter::from_fn(|| share.hold_now(KIB)).collect()
    }

    #[test]
    fn one_connection_gets_half_and_leaves_room_for_others() {
        let answers = AnswerBudget::new(64 * KIB);
        let [greedy, second, small] = [(); 3].map(|()| AnswerShare::new(&answers));
        let held = fill(&greedy);
        assert_eq!(held.len(), 32);
        assert!(!answers.shortage.is_now(), "its own share");
        let more = fill(&second);
        assert_eq!(more.len(), 16);
        assert!(small.hold_now(KIB).is_some());
        drop((held, more));
        assert_eq!(answers.bytes(), 0);
        assert_eq!(fill(&greedy).len(), 32);
    }

    #[test]
    fn connections_with_one_answer_each_do_not_exceed_the_budget() {
        let answers = AnswerBudget::new(64 * KIB);
        let shares: Vec<_> = (0..1000).map(|_| AnswerShare::new(&answers)).collect();
        let held: Vec<_> = shares
            .iter()
            .filter_map(|share| share.hold_now(KIB))
            .collect();
        assert_eq!((held.len(), answers.bytes()), (64, 64 * KIB));
        assert!(answers.shortage.is_now());
        assert!(shares[0].must_hurry() && !shares[999].must_hurry());
    }

    #[test]
    fn streams_leave_room_to_calls_of_one_answer() {
        let answers = AnswerBudget::new(64 * KIB);
        let shares: Vec<_> = (0..100).map(|_| AnswerShare::new(&answers)).collect();
        let limit = answers.limit_of_streams();
        let streams: Vec<_> = (shares.iter())
            .filter_map(|share| share.try_hold(KIB, limit))
            .collect();
        assert_eq!(streams.len(), 56);
        assert!(answers.shortage.is_now(), "for streams");
        assert!(shares[99].hold_now(8 * KIB).is_some());
    }

    #[test]
    fn reservation_shrinks_to_its_message() {
        let answers = AnswerBudget::new(64 * KIB);
        let share = AnswerShare::new(&answers);
        let mut held = share.hold_now(8 * KIB).unwrap();
        held.set(10);
        assert_eq!(answers.bytes(), 10);
        held.set(3 * KIB);
        assert_eq!(answers.bytes(), 3 * KIB);
        drop(held);
        assert_eq!(answers.bytes(), 0);
    }

    #[test]
    fn message_larger_than_the_budget_passes_alone() {
        let answers = AnswerBudget::new(KIB);
        let [one, other] = [(); 2].map(|()| AnswerShare::new(&answers));
        let mut large = one.hold_now(8 * KIB).unwrap();
        large.set(8 * KIB);
        assert!(other.hold_now(1).is_none());
        drop(large);
        assert!(other.hold_now(1).is_some());
    }

    #[test]
    fn text_beside_a_large_message_passes_alone() {
        let answers = AnswerBudget::new(64 * KIB);
        let [one, other] = [(); 2].map(|()| AnswerShare::new(&answers));
        for message in [12 * KIB, 40 * KIB, 70 * KIB] {
            let message = one.count(message);
            let small = other.count(KIB);
            let text = || one.try_hold_beside(message.bytes, 2 * message.bytes, 64 * KIB);
            let has_room = message.bytes * 3 < 64 * KIB;
            assert_eq!(text().is_some(), has_room, "{}", message.bytes);
            drop(small);
            assert!(text().is_some(), "{}", message.bytes);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn calls_of_one_answer_wait_a_second_and_are_busy() {
        let answers = AnswerBudget::new(64 * KIB);
        let share = AnswerShare::new(&answers);
        let mut held = fill(&share);
        let began = tokio::time::Instant::now();
        let busy = share.hold_soon(KIB).await.err().unwrap();
        assert_eq!(busy.code(), tonic::Code::ResourceExhausted);
        assert_eq!(began.elapsed(), PATIENCE);
        // Room that comes back is taken at once.
        let (reserved, ()) = tokio::join!(share.hold_soon(KIB), async {
            tokio::time::sleep(LOOK_AGAIN / 2).await;
            held.truncate(30);
        });
        assert!(reserved.is_ok());
        assert_eq!(began.elapsed(), PATIENCE + LOOK_AGAIN / 2);
    }

    #[tokio::test]
    async fn thread_that_reads_keeps_the_place_of_its_scan() {
        let answers = AnswerBudget::new(64 << 20);
        let tenant = Arc::new(TenantUsage::new("a", 1));
        let room = ScanRoom::new(AnswerShare::new(&answers), Some(Arc::clone(&tenant)));
        room.reserve(KIB).await;
        let at_work = room.at_work();
        // The scan sends a heartbeat, or goes away.
        drop(room.take());
        let mut other = Box::pin(tenant.read_place_if_paid());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(other.as_mut().poll(&mut context).is_pending());
        drop(at_work);
        assert!(other.await.unwrap().is_some());
    }

    #[tokio::test]
    async fn scan_that_waits_for_memory_leaves_its_place_to_other_reads() {
        let answers = AnswerBudget::new(64 << 20);
        let other = AnswerShare::new(&answers);
        let full = other.count(64 << 20);
        let tenant = Arc::new(TenantUsage::new("a", 1));
        let room = ScanRoom::new(AnswerShare::new(&answers), Some(Arc::clone(&tenant)));
        let mut reserved = room.reserve(KIB);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(reserved.as_mut().poll(&mut context).is_pending());
        let mut other = Box::pin(tenant.read_place_if_paid());
        assert!(other.as_mut().poll(&mut context).is_ready());
        drop((other, full));
        reserved.await;
        assert_eq!(answers.bytes(), RECORD_BYTES);
        assert!(room.at_work().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn stream_that_waits_for_room_for_a_text_is_busy() {
        let answers = AnswerBudget::new(64 * KIB);
        let share = AnswerShare::new(&answers);
        let _full = AnswerShare::new(&answers).count(64 * KIB);
        let busy = share.hold_for_text(0, KIB, true).await.err().unwrap();
        assert_eq!(busy.code(), tonic::Code::ResourceExhausted);
    }

    #[tokio::test]
    async fn scan_reserves_once_until_its_message_is_taken() {
        let answers = AnswerBudget::new(64 << 20);
        let room = ScanRoom::new(AnswerShare::new(&answers), None);
        room.reserve(KIB).await;
        room.reserve(KIB).await;
        assert_eq!(answers.bytes(), RECORD_BYTES);
        room.give_back();
        assert_eq!(answers.bytes(), 0);
        room.reserve(KIB).await;
        let held = room.take().unwrap();
        room.reserve(KIB).await;
        assert_eq!(answers.bytes(), 2 * RECORD_BYTES);
        drop((held, room));
        assert_eq!(answers.bytes(), 0);
    }
}
