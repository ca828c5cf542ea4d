//! Requests of an append session, received as there is room for them.
//!
//! A session is never answered BUSY while it works: it waits. Its bytes are taken from the connection as
//! they come, put together, and admitted message by message; only bytes that are admitted give the
//! client room for more, so that HTTP/2 flow control holds the client back. The windows of the stream and the
//! connection bound the bytes that wait, and small frames cost no more than large ones.
//!
//! ```text
//! connection ── frames ──▶ Intake ── messages ──▶ the session ── acks ──▶ client
//!                             │ waits for room                         │
//!                             └──────────────── Window ◀── Passage ────┘ dropped
//! ```

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::time::Sleep;
use tonic::Status;
use wald_storage::AppendError;

use super::{
    Admission, PREFIX_BYTES, REQUEST_OVERHEAD, Share, Wait, announced_length, message_time,
};
use crate::status::{self, Access};
use crate::transport::Incoming;

/// The client gets room for more when this many bytes were admitted, or when nothing is left to admit.
const RELEASE_BYTES: usize = 16 << 10;

/// Pause before the next check for room: acks of other connections wake nobody here.
const PAUSE: Duration = Duration::from_millis(5);

/// Bytes that the session has received and not acked, and how it waits for room.
#[derive(Clone)]
pub(super) struct Window(Arc<Shared>);

struct Shared {
    admission: Arc<Admission>,
    /// The share of the session's connection.
    share: Share,
    used: Mutex<u64>,
    /// The session, while it waits for room.
    waiting: AtomicWaker,
}

/// The room that messages take, given back when it is dropped.
pub(crate) struct Passage {
    window: Window,
    bytes: u64,
}

impl Passage {
    /// Takes more room than the encoded messages: the decoded requests are larger.
    pub(crate) fn enlarge(&mut self, bytes: u64) {
        let Shared {
            admission,
            share,
            used,
            ..
        } = &*self.window.0;
        self.bytes += bytes;
        *used.lock() += bytes;
        admission.appends.take_more(&share.0.appends, bytes);
    }

    /// Takes the room of others along.
    pub(crate) fn join(&mut self, mut other: Self) {
        debug_assert!(Arc::ptr_eq(&self.window.0, &other.window.0));
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let shared = &*self.window.0;
        *shared.used.lock() -= self.bytes;
        let Shared {
            admission, share, ..
        } = shared;
        admission.appends.give_back(&share.0.appends, self.bytes);
        shared.waiting.wake();
    }
}

impl Window {
    pub(super) fn new(admission: &Arc<Admission>, share: &Share) -> Self {
        Self(Arc::new(Shared {
            admission: Arc::clone(admission),
            share: share.clone(),
            used: Mutex::default(),
            waiting: AtomicWaker::new(),
        }))
    }

    /// Makes room for `bytes` more of a message that has `passage` already, in the window and then in
    /// the budget of the server. A message of `announced` bytes begins only where all of it has room.
    fn enter(&self, passage: &mut Passage, bytes: u64, announced: u64) -> Entry {
        let Shared {
            admission,
            share,
            used,
            ..
        } = &*self.0;
        let mut used = used.lock();
        // One message has room, however large it is.
        if *used > passage.bytes && *used + bytes > admission.session_window {
            return Entry::WindowFull;
        }
        let (budget, own) = (&admission.appends, &share.0.appends);
        if passage.bytes == 0 && budget.look(own, 0, announced).is_err() {
            return Entry::BudgetFull;
        }
        if let Err(inflight) = budget.take(own, passage.bytes, bytes) {
            return match passage.bytes {
                0 => Entry::BudgetFull,
                _ => Entry::StuckIn(inflight),
            };
        }
        *used += bytes;
        passage.bytes += bytes;
        Entry::Granted
    }

    fn nothing(&self) -> Passage {
        let window = self.clone();
        Passage { window, bytes: 0 }
    }
}

/// Whether bytes may be received.
enum Entry {
    Granted,
    /// An ack of the session makes room.
    WindowFull,
    /// An ack of any connection makes room.
    BudgetFull,
    /// An ack makes room, but perhaps none comes: others may have begun messages, too, that cannot end.
    /// With the bytes in flight.
    StuckIn(u64),
}

fn truncated() -> Status {
    status::malformed("request", "it was cut off within a message", Access::Write)
}

/// Source of a session's bytes.
pub(crate) trait Source {
    /// The next bytes, or `None` at the end.
    fn poll_bytes(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>>;

    /// Gives the client room for `bytes` more bytes.
    fn release(&mut self, bytes: usize);
}

impl Source for Incoming {
    fn poll_bytes(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
        self.poll_unreleased(context)
            .map(|data| data.map(|data| data.map_err(|error| Status::from_error(error.into()))))
    }

    fn release(&mut self, bytes: usize) {
        Self::release(self, bytes);
    }
}

/// The requests of a session.
pub(crate) struct Intake<S = Incoming> {
    source: S,
    /// End of the client's half: it was closed, or it is gone.
    ended: Option<Result<(), Status>>,
    /// Received and not passed on.
    held: BytesMut,
    window: Window,
    /// Room of the first message there, as far as it was received and admitted.
    passage: Passage,
    /// Bytes of that message that were admitted.
    admitted: usize,
    /// Admitted bytes for which the client was given no room yet: many messages get it together.
    unreleased: usize,
    pause: Option<Pin<Box<Sleep>>>,
    /// Made by the first wait for the client within a message.
    wait: Option<Wait>,
    /// Whether the message has waited for room. The client does not answer for that time.
    waited: bool,
}

/// A message of a session, and its room.
pub(crate) type Admitted = (Bytes, Passage);

impl<S: Source> Intake<S> {
    pub(super) fn new(source: S, window: Window) -> Self {
        Self {
            source,
            ended: None,
            held: BytesMut::new(),
            passage: window.nothing(),
            window,
            admitted: 0,
            unreleased: 0,
            pause: None,
            wait: None,
            waited: false,
        }
    }

    /// Receives all bytes that are there, and is woken by more. Bytes that stay in the HTTP/2 layer
    /// cost there as much for each frame as a large frame does.
    pub(crate) fn take_in(&mut self, context: &mut Context<'_>) {
        while self.ended.is_none() {
            let Poll::Ready(bytes) = self.source.poll_bytes(context) else {
                return;
            };
            match bytes {
                Some(Ok(bytes)) => self.held.extend_from_slice(&bytes),
                Some(Err(status)) => self.ended = Some(Err(status)),
                None => self.ended = Some(Ok(())),
            }
        }
    }

    /// The next message of the bytes that [`Self::take_in`] has received, once it is whole and
    /// has room; `None` at the end. A caller that polls for several messages calls `take_in`
    /// once before.
    pub(crate) fn poll_message(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Admitted, Status>>> {
        let message = self.poll_admitted(context).map(Result::transpose);
        let is_one = matches!(message, Poll::Ready(Some(Ok(_))));
        if self.unreleased >= RELEASE_BYTES || !is_one {
            self.source.release(std::mem::take(&mut self.unreleased));
        }
        message
    }

    fn poll_admitted(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<Admitted>, Status>> {
        let Some(&prefix) = self.held.first_chunk::<PREFIX_BYTES>() else {
            return match (&self.ended, self.held.is_empty()) {
                (None, true) => Poll::Pending,
                (None, false) => self.poll_over(0, context).map(Err),
                (Some(Ok(())), false) => Poll::Ready(Err(truncated())),
                (Some(Ok(())), true) => Poll::Ready(Ok(None)),
                (Some(Err(status)), _) => Poll::Ready(Err(status.clone())),
            };
        };
        let length = match announced_length(prefix, Access::Write) {
            Ok(length) => length,
            Err(malformed) => return Poll::Ready(Err(malformed)),
        };
        let most = self.window.0.admission.largest_append;
        if length > most {
            return Poll::Ready(Err(status::message_too_large(length, most, Access::Write)));
        }
        let whole = PREFIX_BYTES + usize::try_from(length).unwrap_or(usize::MAX);
        let there = self.held.len().min(whole);
        if there > self.admitted {
            ready!(self.poll_entry(there, length, context))?;
        }
        if there == whole {
            self.held.advance(PREFIX_BYTES);
            let message = self.held.split_to(whole - PREFIX_BYTES).freeze();
            let passage = std::mem::replace(&mut self.passage, self.window.nothing());
            self.admitted = 0;
            if let Some(wait) = &mut self.wait {
                wait.hurry.begin();
                wait.patience.moved();
            }
            return Poll::Ready(Ok(Some((message, passage))));
        }
        match &self.ended {
            None => self.poll_over(length, context).map(Err),
            Some(Ok(())) => Poll::Ready(Err(truncated())),
            Some(Err(status)) => Poll::Ready(Err(status.clone())),
        }
    }

    /// Resolves when the first `there` bytes of the message there are admitted.
    fn poll_entry(
        &mut self,
        there: usize,
        length: u64,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Status>> {
        let is_first = self.admitted == 0;
        let overhead = if is_first { REQUEST_OVERHEAD } else { 0 };
        let bytes = (there - self.admitted) as u64 + overhead;
        let mut is_registered = false;
        loop {
            let entry = self
                .window
                .enter(&mut self.passage, bytes, length + overhead);
            match entry {
                Entry::Granted => {
                    self.pause = None;
                    let more = there - self.admitted;
                    self.unreleased += more;
                    self.admitted = there;
                    let waited = std::mem::take(&mut self.waited);
                    if let Some(wait) = &mut self.wait {
                        wait.hurry.moved(more as u64);
                        if waited {
                            wait.patience.moved();
                        }
                    }
                    return Poll::Ready(Ok(()));
                }
                // Then once more, so that no ack between the two is missed.
                _ if !is_registered => {
                    self.window.0.waiting.register(context.waker());
                    (is_registered, self.waited) = (true, true);
                }
                Entry::WindowFull => return Poll::Pending,
                Entry::StuckIn(inflight) if self.poll_over(length, context).is_ready() => {
                    let limit = self.window.0.admission.appends.limit;
                    let error = AppendError::Busy { inflight, limit };
                    return Poll::Ready(Err(status::append(&error)));
                }
                Entry::BudgetFull | Entry::StuckIn(_) => {
                    let pause = || Box::pin(tokio::time::sleep(PAUSE));
                    ready!(self.pause.get_or_insert_with(pause).as_mut().poll(context));
                    self.pause = None;
                }
            }
        }
    }

    /// Resolves when the rest of a message of that length was waited for long enough.
    fn poll_over(&mut self, length: u64, context: &mut Context<'_>) -> Poll<Status> {
        let admission = &self.window.0.admission;
        let wait = (self.wait).get_or_insert_with(|| Wait::new(&admission.phase));
        ready!(wait.poll_over(context, message_time(length), Some(&admission.appends)));
        Poll::Ready(status::message_too_slow(Access::Write))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::future::poll_fn;
    use std::sync::atomic::Ordering;
    use std::task::Waker;

    use tokio::sync::watch;

    use super::*;
    use crate::drain::Phase;

    /// Bytes that come in these frames; afterwards the client waits or has closed.
    struct Frames {
        frames: VecDeque<Bytes>,
        closes: bool,
        released: usize,
    }

    impl Source for Frames {
        fn poll_bytes(&mut self, _: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
            match self.frames.pop_front() {
                Some(frame) => Poll::Ready(Some(Ok(frame))),
                None if self.closes => Poll::Ready(None),
                None => Poll::Pending,
            }
        }

        fn release(&mut self, bytes: usize) {
            self.released += bytes;
        }
    }

    /// A budget with a window of `window` bytes for each session.
    fn admission(limit: u64, window: u64) -> Arc<Admission> {
        let (phase, receiver) = watch::channel(Phase::Serving);
        std::mem::forget(phase);
        Admission::new(limit, window, 1 << 20, receiver)
    }

    /// Messages with their prefixes, cut into frames of `size` bytes.
    fn frames(messages: &[&[u8]], size: usize) -> Frames {
        let mut bytes = Vec::new();
        for message in messages {
            bytes.push(0);
            bytes.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
            bytes.extend_from_slice(message);
        }
        Frames {
            frames: bytes.chunks(size).map(Bytes::copy_from_slice).collect(),
            closes: true,
            released: 0,
        }
    }

    fn session(frames: Frames, admission: &Arc<Admission>) -> Intake<Frames> {
        Intake::new(frames, Window::new(admission, &Share::default()))
    }

    fn used(admission: &Admission) -> u64 {
        admission.appends.total.load(Ordering::Relaxed)
    }

    /// The next message, of everything that is there.
    fn polled(
        intake: &mut Intake<Frames>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Admitted, Status>>> {
        intake.take_in(context);
        intake.poll_message(context)
    }

    /// Messages until the session waits or ends, and whether it has ended.
    fn given(intake: &mut Intake<Frames>) -> (Vec<Admitted>, bool) {
        let mut given = Vec::new();
        let mut context = Context::from_waker(Waker::noop());
        loop {
            match polled(intake, &mut context) {
                Poll::Ready(Some(message)) => given.push(message.unwrap()),
                Poll::Ready(None) => return (given, true),
                Poll::Pending => return (given, false),
            }
        }
    }

    #[tokio::test]
    async fn messages_come_through_unchanged_however_they_are_cut() {
        let messages: [&[u8]; 4] = [b"first", b"", b"a longer one than the others", b"x"];
        let whole = 4 * PREFIX_BYTES + 5 + 28 + 1;
        for size in 1..=whole {
            let admission = admission(1 << 20, 1 << 20);
            let mut intake = session(frames(&messages, size), &admission);
            let (given, ended) = given(&mut intake);
            assert!(ended, "{size}");
            let bytes: Vec<_> = given.iter().map(|(bytes, _)| &bytes[..]).collect();
            assert_eq!(bytes, messages, "{size}");
            assert_eq!(intake.source.released, whole);
            assert_eq!(used(&admission), (4 * REQUEST_OVERHEAD) + whole as u64);
            drop((given, intake));
            assert_eq!(used(&admission), 0);
        }
    }

    #[tokio::test]
    async fn message_beyond_the_window_waits_for_an_ack_and_the_first_never_waits() {
        let large = [7; 2000];
        let admission = admission(1 << 20, 1000);
        let mut intake = session(frames(&[&large, &large, b"x"], 700), &admission);
        for _ in 0..2 {
            let (first, ended) = given(&mut intake);
            assert!(first.len() == 1 && first[0].0.len() == 2000 && !ended);
            // Received, and still under way: only its end makes room.
            assert_eq!(given(&mut intake).0.len(), 0);
            drop(first);
        }
        let (last, ended) = given(&mut intake);
        assert!(ended && last[0].0[..] == b"x"[..]);
        drop((last, intake));
        assert_eq!(used(&admission), 0);
    }

    #[tokio::test]
    async fn small_frames_are_taken_in_whether_or_not_there_is_room() {
        let admission = admission(1 << 20, 600);
        let many = vec![&b"0123456789"[..]; 1000];
        let mut intake = session(frames(&many, 1), &admission);
        let (first, _) = given(&mut intake);
        assert_eq!(first.len(), 1);
        assert!(intake.source.frames.is_empty());
        assert_eq!(intake.source.released, 15);
        assert!(intake.held.capacity() < 64 << 10);
    }

    #[tokio::test]
    async fn announced_length_is_not_charged_and_holds_nobody_back() {
        let admission = admission(1 << 20, 1 << 20);
        let mut announced = frames(&[&[0; 500_000]], 1000);
        announced.frames.truncate(1);
        announced.closes = false;
        let mut intake = session(announced, &admission);
        assert_eq!(given(&mut intake).0.len(), 0);
        assert_eq!(used(&admission), 1000 + REQUEST_OVERHEAD);
        drop(intake);
        assert_eq!(used(&admission), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn unfinished_message_ends_the_session_and_silence_between_does_not() {
        let admission = admission(1 << 20, 1 << 20);
        let mut half = frames(&[b"whole", b"never whole"], 12);
        half.frames.truncate(1);
        half.closes = false;
        let mut intake = session(half, &admission);
        let (first, _) = given(&mut intake);
        assert_eq!(first.len(), 1);
        let begin = tokio::time::Instant::now();
        let ended = poll_fn(|context| polled(&mut intake, context)).await;
        assert_eq!(
            ended.unwrap().err().unwrap().code(),
            tonic::Code::DeadlineExceeded
        );
        assert!(begin.elapsed() >= Duration::from_secs(10));
        let mut silent = frames(&[b"whole"], 12);
        silent.closes = false;
        let mut intake = session(silent, &admission);
        let (_first, _) = given(&mut intake);
        let next = poll_fn(|context| polled(&mut intake, context));
        let waited = tokio::time::timeout(Duration::from_secs(3600), next).await;
        assert!(waited.is_err());
    }

    #[tokio::test]
    async fn room_that_was_enlarged_is_given_back_whole() {
        let admission = admission(1 << 20, 2000);
        let mut intake = session(frames(&[b"x", b"y"], 6), &admission);
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(Some(Ok((_, mut room)))) = polled(&mut intake, &mut context) else {
            panic!("the first message has room");
        };
        room.enlarge(2000);
        assert_eq!(given(&mut intake).0.len(), 0);
        drop(room);
        assert_eq!(given(&mut intake).0.len(), 1);
        drop(intake);
        assert_eq!(used(&admission), 0);
    }

    #[tokio::test]
    async fn message_waits_for_other_connections_to_leave_room() {
        let admission = admission(4096, 1 << 20);
        let others = Share::default();
        let own = &others.0.appends;
        admission.appends.take(own, 0, 4096).unwrap();
        let mut intake = session(frames(&[b"x"], 100), &admission);
        let next = poll_fn(|context| polled(&mut intake, context));
        let mut next = std::pin::pin!(next);
        let waited = tokio::time::timeout(4 * PAUSE, next.as_mut()).await;
        assert!(waited.is_err());
        admission.appends.give_back(own, 4096);
        assert!(next.await.unwrap().is_ok());
    }

    #[tokio::test]
    async fn message_that_is_too_long_or_cut_off_is_refused() {
        let admission = admission(1 << 20, 1 << 20);
        let cases: [(&'static [u8], &str); 4] = [
            (&[0, 0, 0x10, 0, 1], "at most 1048576"),
            (&[1, 0, 0, 0, 1, 0], "compress"),
            (&[0, 0, 0, 0, 2, 7], "cut off"),
            (&[0, 0], "cut off"),
        ];
        for (bytes, text) in cases {
            let frames = Frames {
                frames: [Bytes::from_static(bytes)].into(),
                closes: true,
                released: 0,
            };
            let mut intake = session(frames, &admission);
            let refused = poll_fn(|context| polled(&mut intake, context)).await;
            let refused = refused.unwrap().err().unwrap();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument);
            assert!(refused.message().contains(text), "{refused}");
        }
    }
}
