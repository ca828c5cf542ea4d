//! State that the calls of one connection share, and the parts that others may read.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_util::task::AtomicWaker;
use http::Response;
use http_body::Body as _;
use http_body_util::BodyExt as _;
use parking_lot::Mutex;
use tokio::time::Instant;
use tonic::body::Body;

use super::suspects::Suspects;
use super::window::LEAST_WINDOW;
use crate::admission::Share;
use crate::answers::{ANSWERS_BYTES, AnswerBudget, AnswerShare};
use crate::status::TooManyCalls;

/// Most bytes of answers that wait in the HTTP/2 layer for the socket of one connection: two messages of
/// a scan, each with 128 KiB of records and their heads. With less room each second message is cut
/// once more, and a scan is 5 % slower.
pub(super) const QUEUE_BYTES: usize = 288 << 10;

/// Maximum queue of one connection while all connections together have more than
/// [`ALL_QUEUES_BYTES`] in their queues.
pub(crate) const SHORT_QUEUE_BYTES: usize = 16 << 10;

/// Bytes in the queues of all connections above which each gets a short one.
pub(crate) const ALL_QUEUES_BYTES: u64 = 32 << 20;

/// Most calls whose rest is received after they have ended, and the memory of one.
const MOST_FAREWELLS: usize = 4096;
const FAREWELL_BYTES: u64 = 4 << 10;
pub(crate) const ALL_FAREWELLS_BYTES: u64 = MOST_FAREWELLS as u64 * FAREWELL_BYTES;

/// Bytes in addition to its heads and data that a call may need: a reset, updates of windows.
const CALL_BYTES: u64 = 128;

/// Bytes by which those for calls may be more than all that were received: the data of a frame counts
/// when its head is here.
const USEFUL_AHEAD: u64 = 64 << 10;

/// Maximum number of calls for which nobody needs a credential, of all connections, and the memory of one in bytes. They end
/// when their clients end them. Each connection may have one in any case, so that no client keeps others out.
const MOST_FREE_CALLS: usize = 2048;
pub(crate) const FREE_CALL_BYTES: u64 = 4 << 10;
pub(crate) const ALL_FREE_CALLS_BYTES: u64 = MOST_FREE_CALLS as u64 * FREE_CALL_BYTES;

/// Time without a call after which a connection leaves if another one needs its window.
pub(super) const IDLE: Duration = Duration::from_secs(10);

/// Time between two looks for such a connection.
const LOOKS: Duration = Duration::from_secs(1);

/// State of one connection that its calls, its socket and the acceptor share.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    /// Bytes that its requests have under way.
    pub(crate) share: Share,
    /// Bytes of its answers that it has not taken.
    pub(crate) answers: AnswerShare,
    state: Arc<PeerState>,
}

#[derive(Debug, Default)]
struct PeerState {
    cut: AtomicBool,
    /// Whether the connection should give way to another once its client agrees.
    asked_to_leave: AtomicBool,
    connection: AtomicWaker,
    /// Bytes that the socket gave and took since it was accepted.
    received: AtomicU64,
    sent: AtomicU64,
    /// Bytes of `received` that a client needs for its calls.
    useful: AtomicU64,
    /// Bytes that the client may send before they are taken in.
    window: AtomicU64,
    /// Calls that have not ended.
    calls: AtomicUsize,
    /// Those for which nobody needs a credential.
    free: AtomicUsize,
    /// Calls that the client gave up, since the connection was accepted.
    cancelled: AtomicU64,
    /// Whether a request head has arrived whole.
    known: AtomicBool,
    /// Whether the client waits for the server, whose step of the handshake of TLS is due.
    awaits_server: AtomicBool,
    /// Time at which the last call that needs a credential ended, in milliseconds since [`Connections::begin`].
    idle_since: AtomicU64,
    queued: AtomicUsize,
    farewells: AtomicUsize,
    waiting: Mutex<WaitingCalls>,
    connections: Arc<Connections>,
}

/// Calls that wait for the queue of their connection, in the order in which they began to wait.
#[derive(Debug, Default)]
struct WaitingCalls {
    next: u64,
    wakers: BTreeMap<u64, Waker>,
}

/// Place of a call among those that wait, until the call is served or ends.
#[derive(Debug)]
pub(super) struct Turn {
    number: u64,
    state: Arc<PeerState>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.state.waiting.lock().wakers.remove(&self.number);
    }
}

/// All connections of a server, and sums over them.
#[derive(Debug)]
pub(crate) struct Connections {
    begin: Instant,
    /// The served connections, in the order in which they were accepted.
    open: Mutex<BTreeMap<u64, Peer>>,
    accepted: AtomicU64,
    /// Time of the last look for an idle connection with a large window, in milliseconds since `begin`.
    looked: AtomicU64,
    /// Connections on which no request head has arrived whole.
    silent: AtomicUsize,
    /// Most of those; the oldest gives way to one more.
    max_silent: usize,
    /// Age at which a connection gives way.
    grace: Duration,
    /// Calls that have not ended.
    calls: AtomicUsize,
    /// Those for which nobody needs a credential.
    free: AtomicUsize,
    /// Most calls that need a credential; further ones are refused.
    max_calls: usize,
    /// Calls whose rest is received after they have ended.
    farewells: AtomicUsize,
    queued: AtomicU64,
    answers: Arc<AnswerBudget>,
    suspects: Suspects,
}

impl Default for Connections {
    fn default() -> Self {
        Self::new(usize::MAX, usize::MAX)
    }
}

impl Connections {
    /// Makes an empty set. At most `max_silent` connections without a request and `max_calls` calls may be open.
    pub(crate) fn new(max_silent: usize, max_calls: usize) -> Self {
        Self {
            begin: Instant::now(),
            open: Mutex::default(),
            accepted: AtomicU64::default(),
            looked: AtomicU64::default(),
            silent: AtomicUsize::default(),
            max_silent,
            grace: Duration::ZERO,
            calls: AtomicUsize::default(),
            free: AtomicUsize::default(),
            max_calls,
            farewells: AtomicUsize::default(),
            queued: AtomicU64::default(),
            answers: AnswerBudget::new(ANSWERS_BYTES),
            suspects: Suspects::default(),
        }
    }

    /// Lets a connection without a request stay for this long although there are too many of them. Many clients that
    /// connect at once can be ahead of the event loops, which compute handshakes of TLS.
    pub(super) fn with_grace(self, grace: Duration) -> Self {
        Self { grace, ..self }
    }

    /// Takes in a connection that was accepted, until the value is dropped. Closes the oldest one that
    /// has sent no request, if there are too many of those.
    pub(super) fn enter(self: &Arc<Self>) -> (Peer, OpenConnection) {
        let id = self.accepted.fetch_add(1, Ordering::Relaxed);
        let peer = Peer::new(self);
        let mut open = self.open.lock();
        if self.silent.fetch_add(1, Ordering::Relaxed) >= self.max_silent {
            let (now, grace) = (self.now(), millis(self.grace));
            let is_old =
                |peer: &&Peer| peer.state.idle_since.load(Ordering::Relaxed) + grace <= now;
            let silent = open.values().filter(|peer| peer.is_silent());
            // Two, so that more than may stay become fewer.
            let most = if grace == 0 { 1 } else { 2 };
            for peer in silent.take_while(is_old).take(most) {
                peer.cut_off();
            }
        }
        open.insert(id, peer.clone());
        let opened = OpenConnection {
            peer: peer.clone(),
            id,
        };
        (peer, opened)
    }

    /// Makes room for another connection: closes the oldest one that has sent no request, or else asks
    /// the one to leave that has had no call for longest.
    pub(super) fn make_room(&self) {
        let open = self.open.lock();
        if let Some(silent) = open.values().find(|peer| peer.is_silent()) {
            return silent.cut_off();
        }
        let idle = open
            .values()
            .filter(|peer| peer.state.known.load(Ordering::Relaxed) && !peer.is_asked_to_leave())
            .filter_map(|peer| Some((peer.idle_since()?, peer)))
            .min_by_key(|(since, _)| *since);
        if let Some((_, longest)) = idle {
            longest.ask_to_leave();
        }
    }

    /// Asks a connection with more than the least window to leave: the one that has had no call for longest,
    /// if that is [`IDLE`] or more.
    fn make_room_for_windows(&self) {
        let now = self.now();
        let next = self.looked.load(Ordering::Relaxed) + millis(LOOKS);
        if now < next {
            return;
        }
        self.looked.store(now, Ordering::Relaxed);
        let open = self.open.lock();
        let idle = open
            .values()
            .filter(|peer| peer.window() > LEAST_WINDOW.into() && !peer.is_asked_to_leave())
            .filter_map(|peer| Some((peer.idle_since()?, peer)))
            .filter(|(since, _)| since + millis(IDLE) <= now)
            .min_by_key(|(since, _)| *since);
        if let Some((_, longest)) = idle {
            longest.ask_to_leave();
        }
    }

    /// Milliseconds since `begin`.
    fn now(&self) -> u64 {
        millis(self.begin.elapsed())
    }

    /// Asks the clients of all connections to leave.
    pub(super) fn ask_all_to_leave(&self) {
        for peer in self.open.lock().values() {
            peer.ask_to_leave();
        }
    }

    /// Bytes of answers that wait for sockets.
    pub(crate) fn queued_bytes(&self) -> u64 {
        self.queued.load(Ordering::Relaxed)
    }

    /// Bytes that were read for clients and that these have not taken.
    pub(crate) fn answer_bytes(&self) -> u64 {
        self.answers.bytes()
    }

    /// The memory of answers.
    pub(super) fn answers(&self) -> &Arc<AnswerBudget> {
        &self.answers
    }

    /// Open gRPC connections.
    pub(crate) fn number(&self) -> usize {
        self.open.lock().len()
    }

    /// Calls that have not ended.
    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Peer {
    pub(super) fn new(connections: &Arc<Connections>) -> Self {
        let state = PeerState {
            connections: Arc::clone(connections),
            window: AtomicU64::new(LEAST_WINDOW.into()),
            ..PeerState::default()
        };
        state.rest();
        Self {
            share: Share::default(),
            answers: AnswerShare::new(&connections.answers),
            state: Arc::new(state),
        }
    }

    /// A connection of another port. It is in no set of connections, so it is not counted as silent.
    pub(super) fn of_another_port(connections: &Arc<Connections>) -> Self {
        let peer = Self::new(connections);
        peer.state.known.store(true, Ordering::Relaxed);
        peer
    }

    /// Addresses whose connections broke the rules.
    pub(super) fn suspects(&self) -> &Suspects {
        &self.state.connections.suspects
    }

    /// Ends the connection with all calls that run on it.
    pub(crate) fn cut_off(&self) {
        self.state.cut.store(true, Ordering::Release);
        self.state.connection.wake();
    }

    /// Asks the client to close the connection when its calls have ended.
    pub(super) fn ask_to_leave(&self) {
        self.state.asked_to_leave.store(true, Ordering::Release);
        self.state.connection.wake();
    }

    /// Whether the client must be asked to leave.
    pub(super) fn is_asked_to_leave(&self) -> bool {
        self.state.asked_to_leave.load(Ordering::Acquire)
    }

    /// Resolves once the connection was cut off.
    pub(super) fn poll_cut(&self, context: &Context<'_>) -> Poll<()> {
        self.state.connection.register(context.waker());
        match self.state.cut.load(Ordering::Acquire) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }

    pub(super) fn received(&self, bytes: usize) {
        let received = &self.state.received;
        received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes that the socket took so far.
    pub(super) fn sent_so_far(&self) -> u64 {
        self.state.sent.load(Ordering::Relaxed)
    }

    /// Whether answers wait for the queue of the connection.
    pub(super) fn has_full_queue(&self) -> bool {
        self.state.room().is_none()
    }

    pub(super) fn sent(&self, bytes: usize) {
        self.state.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes that the socket gave so far.
    pub(super) fn received_so_far(&self) -> u64 {
        self.state.received.load(Ordering::Relaxed)
    }

    /// Counts bytes of `received` that a client needs for its calls.
    /// More than was received are not credited for later.
    pub(super) fn useful(&self, bytes: u64) {
        let most = self.received_so_far() + USEFUL_AHEAD;
        let useful = self.state.useful.load(Ordering::Relaxed) + bytes;
        self.state.useful.store(useful.min(most), Ordering::Relaxed);
    }

    /// Bytes for calls that have arrived so far.
    pub(super) fn useful_so_far(&self) -> u64 {
        self.state.useful.load(Ordering::Relaxed)
    }

    /// Bytes for no call that have arrived so far.
    pub(super) fn useless_so_far(&self) -> u64 {
        self.received_so_far().saturating_sub(self.useful_so_far())
    }

    /// Sets the number of bytes that the client may send before they are taken in.
    pub(super) fn set_window(&self, bytes: u32) {
        self.state.window.store(bytes.into(), Ordering::Relaxed);
    }

    /// Bytes that the client may send before they are taken in.
    pub(super) fn window(&self) -> u64 {
        self.state.window.load(Ordering::Relaxed)
    }

    /// Asks an idle connection with a large window to leave.
    pub(super) fn make_room_for_windows(&self) {
        self.state.connections.make_room_for_windows();
    }

    /// Bytes that the socket gave and took so far.
    pub(super) fn moved_so_far(&self) -> u64 {
        self.received_so_far() + self.sent_so_far()
    }

    /// Counts a call until the value is dropped.
    pub(super) fn begin_call(&self) -> OpenCall {
        if !self.state.known.swap(true, Ordering::Relaxed) {
            self.state
                .connections
                .silent
                .fetch_sub(1, Ordering::Relaxed);
        }
        self.useful(CALL_BYTES);
        self.state.calls.fetch_add(1, Ordering::Relaxed);
        let all = &self.state.connections.calls;
        all.fetch_add(1, Ordering::Relaxed);
        OpenCall(Arc::clone(&self.state))
    }

    /// The calls of the connection that have ended before their requests.
    pub(super) fn farewells(&self) -> LateBodies {
        LateBodies(Arc::clone(&self.state))
    }

    /// Counts the call that began last as one for which nobody needs a credential, until the value is dropped: it takes
    /// nothing of `max_calls`, and its connection gives way like one without calls. A client that holds such calls open
    /// would keep others out.
    ///
    /// # Errors
    /// With the numbers of such calls if the connection has more than are free for others.
    pub(super) fn free_call(&self) -> Result<FreeCall, TooManyCalls> {
        let all = &self.state.connections.free;
        let open = all.fetch_add(1, Ordering::Relaxed) + 1;
        let own = self.state.free.fetch_add(1, Ordering::Relaxed) + 1;
        let call = FreeCall(Arc::clone(&self.state));
        if self.state.is_idle() {
            self.state.rest();
        }
        let limit = MOST_FREE_CALLS;
        match own <= limit.saturating_sub(open).max(1) {
            true => Ok(call),
            false => Err(TooManyCalls { open, own, limit }),
        }
    }

    /// Checks that the call that began last may stay: its connection has at most as many calls as are free
    /// for other connections.
    ///
    /// # Errors
    /// With the numbers of calls.
    pub(crate) fn check_calls(&self) -> Result<(), TooManyCalls> {
        let all = &self.state.connections;
        let limit = all.max_calls;
        let open = (all.calls()).saturating_sub(all.free.load(Ordering::Relaxed));
        let own = self.state.calls_with_credential();
        match own <= limit.saturating_sub(open).max(1) && open <= limit {
            true => Ok(()),
            false => Err(TooManyCalls { open, own, limit }),
        }
    }

    /// Whether the server waits for the client, and no request head has arrived whole since the connection was
    /// accepted.
    fn is_silent(&self) -> bool {
        let flags = [
            &self.state.known,
            &self.state.cut,
            &self.state.awaits_server,
        ];
        !flags.iter().any(|flag| flag.load(Ordering::Relaxed))
    }

    /// Counts a connection without a request as not silent until the value is dropped: its client waits for the
    /// server. Without this, of many clients that connect at once each would end the handshake of an earlier one.
    pub(super) fn awaits_server(&self) -> AwaitedServer {
        self.state.awaits_server.store(true, Ordering::Relaxed);
        (self.state.connections.silent).fetch_sub(1, Ordering::Relaxed);
        AwaitedServer(Arc::clone(&self.state))
    }

    /// Time at which its last call ended, or it was accepted, as a number that rises with time;
    /// `None` while a call is open for which a credential is needed.
    pub(super) fn idle_since(&self) -> Option<u64> {
        let idle = self.state.is_idle();
        idle.then(|| self.state.idle_since.load(Ordering::Relaxed))
    }

    /// Since when it has had nothing but calls for which nobody needs a credential. `None` if it has no such call, has
    /// others, or sends an answer.
    pub(super) fn only_free_calls_since(&self) -> Option<Instant> {
        let state = &self.state;
        let has_free = state.free.load(Ordering::Relaxed) > 0;
        let sends = state.queued.load(Ordering::Relaxed) > 0;
        let since = self.idle_since().filter(|_| has_free && !sends)?;
        Some(state.connections.begin + Duration::from_millis(since))
    }

    pub(super) fn call_was_cancelled(&self) {
        self.state.cancelled.fetch_add(1, Ordering::Relaxed);
    }

    /// Calls that the client gave up so far.
    pub(super) fn cancelled_so_far(&self) -> u64 {
        self.state.cancelled.load(Ordering::Relaxed)
    }

    /// Resolves with the number of bytes that may be sent when the queue of the connection has
    /// room. A call that waits has its turn in `turn`, and is woken before calls that began to wait later.
    pub(super) fn poll_room(&self, turn: &mut Option<Turn>, context: &Context<'_>) -> Poll<usize> {
        if let Some(room) = self.state.room() {
            *turn = None;
            return Poll::Ready(room);
        }
        let mut waiting = self.state.waiting.lock();
        // Bytes that left the queue meanwhile have woken no task here.
        if let Some(room) = self.state.room() {
            drop(waiting);
            *turn = None;
            return Poll::Ready(room);
        }
        let turn = turn.get_or_insert_with(|| {
            waiting.next += 1;
            Turn {
                number: waiting.next,
                state: Arc::clone(&self.state),
            }
        });
        waiting.wakers.insert(turn.number, context.waker().clone());
        Poll::Pending
    }

    /// A piece of an answer, counted in the queue until it was written or dropped.
    pub(super) fn piece(&self, bytes: Bytes) -> AnswerPiece {
        let length = bytes.len();
        self.state.queued.fetch_add(length, Ordering::Relaxed);
        let all = &self.state.connections.queued;
        all.fetch_add(length as u64, Ordering::Relaxed);
        AnswerPiece {
            bytes,
            length,
            state: Arc::clone(&self.state),
        }
    }
}

/// Calls of one connection whose rest is received after they have ended.
#[derive(Debug, Clone)]
pub(crate) struct LateBodies(Arc<PeerState>);

impl LateBodies {
    /// Counts one until the value is dropped. `None` if the connection has as many as are free for others.
    pub(super) fn begin(&self) -> Option<LateBody> {
        let all = &self.0.connections.farewells;
        let open = all.fetch_add(1, Ordering::Relaxed) + 1;
        let own = self.0.farewells.fetch_add(1, Ordering::Relaxed) + 1;
        let farewell = LateBody(Arc::clone(&self.0));
        (own <= MOST_FAREWELLS.saturating_sub(open)).then_some(farewell)
    }
}

/// One of [`LateBodies`].
pub(super) struct LateBody(Arc<PeerState>);

impl Drop for LateBody {
    fn drop(&mut self) {
        self.0.farewells.fetch_sub(1, Ordering::Relaxed);
        let all = &self.0.connections.farewells;
        all.fetch_sub(1, Ordering::Relaxed);
    }
}

impl PeerState {
    /// Notes the moment from which on the connection has no call.
    fn rest(&self) {
        self.idle_since
            .store(self.connections.now(), Ordering::Relaxed);
    }

    /// Calls that have not ended and for which a credential is needed.
    fn calls_with_credential(&self) -> usize {
        let free = self.free.load(Ordering::Relaxed);
        self.calls.load(Ordering::Relaxed).saturating_sub(free)
    }

    fn is_idle(&self) -> bool {
        self.calls_with_credential() == 0
    }

    /// Most bytes that the queue takes now.
    fn most(&self) -> usize {
        if self.connections.queued_bytes() > ALL_QUEUES_BYTES {
            SHORT_QUEUE_BYTES
        } else {
            QUEUE_BYTES
        }
    }

    fn room(&self) -> Option<usize> {
        let room = (self.most()).saturating_sub(self.queued.load(Ordering::Relaxed));
        (room > 0).then_some(room)
    }
}

/// A call that has not ended.
pub(super) struct OpenCall(Arc<PeerState>);

impl Drop for OpenCall {
    fn drop(&mut self) {
        let state = &self.0;
        state.connections.calls.fetch_sub(1, Ordering::Relaxed);
        state.calls.fetch_sub(1, Ordering::Relaxed);
        if state.is_idle() {
            state.rest();
        }
    }
}

/// A call for which nobody needs a credential.
pub(super) struct FreeCall(Arc<PeerState>);

impl FreeCall {
    /// The answer, which stays such a call until it is sent.
    pub(super) fn in_answer(self, answer: Response<Body>) -> Response<Body> {
        held_until_sent(answer, self)
    }
}

/// The answer, which keeps `held` until it is sent.
pub(super) fn held_until_sent(answer: Response<Body>, held: impl Send + 'static) -> Response<Body> {
    if answer.body().is_end_stream() {
        return answer;
    }
    answer.map(|body| {
        Body::new(body.map_frame(move |frame| {
            let _kept = &held;
            frame
        }))
    })
}

impl Drop for FreeCall {
    fn drop(&mut self) {
        self.0.free.fetch_sub(1, Ordering::Relaxed);
        (self.0.connections.free).fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection among those that are open.
pub(super) struct OpenConnection {
    peer: Peer,
    id: u64,
}

/// A step of the handshake of TLS that the server owes to a client.
pub(super) struct AwaitedServer(Arc<PeerState>);

impl Drop for AwaitedServer {
    fn drop(&mut self) {
        (self.0.connections.silent).fetch_add(1, Ordering::Relaxed);
        self.0.awaits_server.store(false, Ordering::Relaxed);
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let state = &self.peer.state;
        if !state.known.load(Ordering::Relaxed) {
            state.connections.silent.fetch_sub(1, Ordering::Relaxed);
        }
        state.connections.open.lock().remove(&self.id);
    }
}

/// A piece of an answer in the queue of its connection.
pub(super) struct AnswerPiece {
    bytes: Bytes,
    length: usize,
    state: Arc<PeerState>,
}

impl Buf for AnswerPiece {
    fn remaining(&self) -> usize {
        self.bytes.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.bytes
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
    }
}

impl Drop for AnswerPiece {
    fn drop(&mut self) {
        let all = &self.state.connections.queued;
        all.fetch_sub(self.length as u64, Ordering::Relaxed);
        let before = self.state.queued.fetch_sub(self.length, Ordering::Relaxed);
        // Many calls may wait: each wake-up is for more than a few bytes.
        if before - self.length > self.state.most() / 2 {
            return;
        }
        let waiting = std::mem::take(&mut self.state.waiting.lock().wakers);
        for waker in waiting.into_values() {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use super::*;

    #[test]
    fn queue_is_full_until_a_piece_has_left_it() {
        let peer = Peer::new(&Arc::default());
        let context = Context::from_waker(Waker::noop());
        let mut turn = None;
        assert_eq!(
            peer.poll_room(&mut turn, &context),
            Poll::Ready(QUEUE_BYTES)
        );
        let first = peer.piece(Bytes::from(vec![0; 100]));
        let second = peer.piece(Bytes::from(vec![0; QUEUE_BYTES - 100]));
        assert_eq!(peer.poll_room(&mut turn, &context), Poll::Pending);
        drop(first);
        assert_eq!(peer.poll_room(&mut turn, &context), Poll::Ready(100));
        drop(second);
        assert_eq!(peer.state.connections.queued_bytes(), 0);
    }

    /// Writes its number down when it is woken.
    struct Woken(usize, Arc<Mutex<Vec<usize>>>);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.1.lock().push(self.0);
        }
    }

    #[test]
    fn calls_that_wait_for_the_queue_take_turns_and_leave_nothing() {
        let peer = Peer::new(&Arc::default());
        let woken = Arc::default();
        let wakers = [0, 1, 2].map(|call| Waker::from(Arc::new(Woken(call, Arc::clone(&woken)))));
        let poll = |call: usize, turn: &mut Option<Turn>| {
            peer.poll_room(turn, &Context::from_waker(&wakers[call]))
        };
        let [mut first, mut second, mut third] = [None, None, None];
        let full = peer.piece(Bytes::from(vec![0; QUEUE_BYTES]));
        // A call that is polled often is woken once.
        for _ in 0..3 {
            assert!(poll(0, &mut first).is_pending());
        }
        assert!(poll(1, &mut second).is_pending());
        assert!(poll(2, &mut third).is_pending());
        drop(third);
        drop(full);
        assert_eq!(std::mem::take(&mut *woken.lock()), [0, 1]);
        // The first one fills the queue, and waits behind the second one from now on.
        assert!(poll(0, &mut first).is_ready());
        let full = peer.piece(Bytes::from(vec![0; QUEUE_BYTES]));
        assert!(poll(0, &mut first).is_pending());
        assert!(poll(1, &mut second).is_pending());
        drop(full);
        assert_eq!(*woken.lock(), [1, 0]);
        drop((first, second));
        assert!(peer.state.waiting.lock().wakers.is_empty());
    }

    #[test]
    fn queues_are_short_while_all_together_hold_much() {
        let all = Arc::new(Connections::default());
        let peers: Vec<_> = (0..200).map(|_| Peer::new(&all)).collect();
        let context = Context::from_waker(Waker::noop());
        let mut pieces = Vec::new();
        for peer in &peers {
            while let Poll::Ready(room) = peer.poll_room(&mut None, &context) {
                pieces.push(peer.piece(Bytes::from(vec![0; room])));
            }
        }
        let most = ALL_QUEUES_BYTES + (QUEUE_BYTES + 200 * SHORT_QUEUE_BYTES) as u64;
        assert!(all.queued_bytes() <= most, "{}", all.queued_bytes());
    }

    #[test]
    fn connection_is_idle_when_its_last_call_has_ended() {
        let peer = Peer::new(&Arc::default());
        assert!(peer.idle_since().is_some());
        let (first, second) = (peer.begin_call(), peer.begin_call());
        assert!(peer.idle_since().is_none());
        drop(first);
        assert!(peer.idle_since().is_none());
        drop(second);
        assert!(peer.idle_since().is_some());
        assert_eq!(peer.state.connections.calls(), 0);
    }

    #[test]
    fn calls_of_one_connection_leave_room_for_other_connections() {
        let all = Arc::new(Connections::new(usize::MAX, 100));
        let [greedy, second, modest] = [(); 3].map(|()| Peer::new(&all));
        let fill = |peer: &Peer| {
            let mut calls = vec![peer.begin_call()];
            while peer.check_calls().is_ok() {
                calls.push(peer.begin_call());
            }
            // The last one is refused, and ends.
            calls.pop();
            calls
        };
        let (first, others) = (fill(&greedy), fill(&second));
        assert_eq!((first.len(), others.len()), (50, 25));
        let one = modest.begin_call();
        assert_eq!(modest.check_calls(), Ok(()));
        drop((first, others, one));
        assert_eq!(all.calls(), 0);
    }

    #[test]
    fn free_calls_take_nothing_of_the_bound_on_calls() {
        let all = Arc::new(Connections::new(usize::MAX, 2));
        let [holder, other] = [(); 2].map(|()| Peer::new(&all));
        let held: Vec<_> = (0..10)
            .map(|_| (holder.free_call().ok().unwrap(), holder.begin_call()))
            .collect();
        let call = other.begin_call();
        assert_eq!(other.check_calls(), Ok(()));
        drop((held, call));
        assert_eq!((all.calls(), all.free.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn free_calls_have_a_bound_of_their_own_that_keeps_no_connection_out() {
        let all = Arc::new(Connections::default());
        let open = |peer: &Peer| peer.free_call().map(|free| (free, peer.begin_call()));
        let mut held = Vec::new();
        let connections = 1_000;
        for _ in 0..connections {
            let peer = Peer::new(&all);
            let own = held.len();
            while let Ok(call) = open(&peer) {
                held.push(call);
            }
            assert!(held.len() > own, "a connection was kept out");
        }
        assert!(held.len() <= MOST_FREE_CALLS + connections);
        let peer = Peer::new(&all);
        let _first = open(&peer).ok().unwrap();
        let refused = open(&peer).err().unwrap();
        assert_eq!((refused.own, refused.limit), (2, MOST_FREE_CALLS));
        drop(held);
        assert!(open(&peer).is_ok());
    }

    #[test]
    fn connection_with_nothing_but_free_calls_gives_way() {
        let all = Arc::new(Connections::default());
        let (watching, _watching) = all.enter();
        let _stream = (watching.begin_call(), watching.free_call().ok().unwrap());
        assert!(watching.only_free_calls_since().is_some());
        let call = watching.begin_call();
        assert!(watching.only_free_calls_since().is_none());
        all.make_room();
        assert!(!watching.is_asked_to_leave());
        let answer = watching.piece(Bytes::from_static(b"answer"));
        drop(call);
        assert!(watching.only_free_calls_since().is_none(), "it sends");
        drop(answer);
        assert!(watching.only_free_calls_since().is_some());
        all.make_room();
        assert!(watching.is_asked_to_leave());
    }

    #[test]
    fn calls_of_another_port_do_not_change_the_number_of_silent_connections() {
        let all = Arc::new(Connections::new(4, usize::MAX));
        for _ in 0..2 {
            drop(Peer::of_another_port(&all).begin_call());
        }
        let open: Vec<_> = (0..4).map(|_| all.enter()).collect();
        assert_eq!(all.silent.load(Ordering::Relaxed), 4);
        let is_cut = |peer: &Peer| peer.state.cut.load(Ordering::Relaxed);
        assert!(!open.iter().any(|(peer, _)| is_cut(peer)));
    }

    #[test]
    fn oldest_silent_connection_gives_way() {
        let all = Arc::new(Connections::new(2, usize::MAX));
        let (speaking, _first) = all.enter();
        drop(speaking.begin_call());
        let (second, second_open) = all.enter();
        let (third, _third) = all.enter();
        let (fourth, _fourth) = all.enter();
        let cut = |peer: &Peer| peer.state.cut.load(Ordering::Relaxed);
        assert_eq!(
            [&speaking, &second, &third, &fourth].map(cut),
            [false, true, false, false]
        );
        drop(second_open);
        assert_eq!((all.number(), all.silent.load(Ordering::Relaxed)), (3, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn silent_connection_may_stay_for_its_grace() {
        const GRACE: Duration = Duration::from_secs(1);
        let all = Arc::new(Connections::new(1, usize::MAX).with_grace(GRACE));
        let open: Vec<_> = (0..4).map(|_| all.enter()).collect();
        let cut = || {
            let cut = |peer: &Peer| peer.state.cut.load(Ordering::Relaxed);
            open.iter().filter(|(peer, _)| cut(peer)).count()
        };
        assert_eq!(cut(), 0);
        tokio::time::advance(GRACE).await;
        let _fifth = all.enter();
        assert_eq!(cut(), 2);
        let _sixth = all.enter();
        assert_eq!(cut(), 4);
    }

    #[test]
    fn client_that_waits_for_the_server_does_not_give_way() {
        let all = Arc::new(Connections::new(1, usize::MAX));
        let (waiting, _waiting) = all.enter();
        let awaited = waiting.awaits_server();
        let (second, _second) = all.enter();
        assert!(!waiting.state.cut.load(Ordering::Relaxed));
        let (_third, _open) = all.enter();
        assert!(!waiting.state.cut.load(Ordering::Relaxed));
        assert!(second.state.cut.load(Ordering::Relaxed));
        drop(awaited);
        let (_fourth, _open) = all.enter();
        assert!(waiting.state.cut.load(Ordering::Relaxed));
        assert_eq!((all.number(), all.silent.load(Ordering::Relaxed)), (4, 4));
    }

    #[test]
    fn room_is_made_by_a_silent_connection_or_the_one_idle_for_longest() {
        let all = Arc::new(Connections::default());
        let opened: Vec<_> = (0..3).map(|_| all.enter()).collect();
        let busy = opened[0].0.begin_call();
        for (peer, _) in &opened[1..] {
            drop(peer.begin_call());
        }
        opened[1].0.state.idle_since.store(7, Ordering::Relaxed);
        opened[2].0.state.idle_since.store(6, Ordering::Relaxed);
        let (silent, _silent) = all.enter();
        all.make_room();
        assert!(silent.state.cut.load(Ordering::Relaxed));
        let asked = || opened.iter().map(|(peer, _)| peer.is_asked_to_leave());
        all.make_room();
        assert_eq!(asked().collect::<Vec<_>>(), [false, false, true]);
        all.make_room();
        assert_eq!(asked().collect::<Vec<_>>(), [false, true, true]);
        drop(busy);
    }
}
