//! What of an append session is received, and when.
//!
//! A session is never answered BUSY: it waits. Its messages are admitted one by one, as
//! other appends are, by the length that stands before them; one that is not admitted yet
//! is not taken from the connection, so that HTTP/2 flow control holds the client back.
//!
//! ```text
//! connection ── frames ──▶ SessionBody ── messages ──▶ the session ── acks ──▶ client
//!                             │ waits for room                         │
//!                             └──────────────── Window ◀── Passage ────┘ dropped
//! ```

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use futures_util::task::AtomicWaker;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::Sleep;
use tonic::Status;

use super::{Admission, PREFIX_BYTES, REQUEST_OVERHEAD, Share};
use crate::status::{self, Access};

/// When to look again whether other connections have left room: their acks wake nobody
/// here.
const PAUSE: Duration = Duration::from_millis(5);

/// How long what a client still sends is dropped after the session has ended, at most, and
/// how much silence means that nothing is under way any more. Then the stream is reset,
/// which ends those clients, too, that go on sending after they were told.
const FAREWELL: Duration = Duration::from_secs(2);
const SILENCE: Duration = Duration::from_millis(300);

/// What a session has received and not acked; in the extensions of its request.
#[derive(Clone)]
pub(crate) struct Window(Arc<Shared>);

struct Shared {
    admission: Arc<Admission>,
    /// Of its connection.
    share: Share,
    state: Mutex<State>,
    /// The body, while it waits for room.
    waiting: AtomicWaker,
}

#[derive(Default)]
struct State {
    used: u64,
    /// What each message takes that the session has not taken yet, in order.
    admitted: VecDeque<u64>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        let left = self.state.get_mut().admitted.iter().sum();
        self.admission.give_back(&self.share, left);
    }
}

/// The room that messages take, given back when it is dropped.
pub(crate) struct Passage {
    window: Window,
    bytes: u64,
}

impl Passage {
    /// Takes more room than the messages themselves: what is made of them is larger.
    pub(crate) fn enlarge(&mut self, bytes: u64) {
        let Shared {
            admission,
            share,
            state,
            ..
        } = &*self.window.0;
        self.bytes += bytes;
        state.lock().used += bytes;
        admission.take_more(share, bytes);
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
        shared.state.lock().used -= self.bytes;
        shared.admission.give_back(&shared.share, self.bytes);
        shared.waiting.wake();
    }
}

impl Window {
    pub(super) fn new(admission: &Arc<Admission>, share: &Share) -> Self {
        Self(Arc::new(Shared {
            admission: Arc::clone(admission),
            share: share.clone(),
            state: Mutex::default(),
            waiting: AtomicWaker::new(),
        }))
    }

    /// The room of the message that was received next; `None` if none was.
    pub(crate) fn next(&self) -> Option<Passage> {
        let bytes = self.0.state.lock().admitted.pop_front()?;
        let window = self.clone();
        Some(Passage { window, bytes })
    }

    /// Makes room for a message of so many bytes, in the window and then in the budget of the
    /// server.
    fn enter(&self, length: u64) -> Entry {
        let Shared {
            admission,
            share,
            state,
            ..
        } = &*self.0;
        let mut state = state.lock();
        // One message has room, however large it is.
        let most = admission.session_window;
        if state.used > 0 && state.used + length + REQUEST_OVERHEAD > most {
            return Entry::WindowFull;
        }
        let Ok(bytes) = admission.take(share, length) else {
            return Entry::BudgetFull;
        };
        state.used += bytes;
        state.admitted.push_back(bytes);
        Entry::Granted
    }
}

/// Whether a message may be received.
enum Entry {
    Granted,
    /// An ack of the session makes room.
    WindowFull,
    /// An ack of any connection makes room.
    BudgetFull,
}

/// The requests of a session, each received only when there is room for it.
pub(super) struct SessionBody {
    inner: tonic::body::Body,
    /// The client has ended its half, or is gone.
    ended: bool,
    /// Received and not passed on: begins with the rest of a message, or with a prefix.
    held: Bytes,
    /// What is left of the message that was granted.
    granted: u64,
    window: Window,
    pause: Option<Pin<Box<Sleep>>>,
}

impl SessionBody {
    pub(super) fn new(inner: tonic::body::Body, window: Window) -> Self {
        Self {
            inner,
            ended: false,
            held: Bytes::new(),
            granted: 0,
            window,
            pause: None,
        }
    }

    /// Lets those pass, too, that are there behind the first and that there is room for.
    fn grant_more(&mut self) {
        let behind = |granted: u64| {
            let from = usize::try_from(granted).ok()?;
            self.held.get(from..)?.get(1..PREFIX_BYTES)
        };
        let mut granted = self.granted;
        while let Some(mut prefix) = behind(granted) {
            let length = u64::from(prefix.get_u32());
            if length > self.window.0.admission.largest_message
                || !matches!(self.window.enter(length), Entry::Granted)
            {
                break;
            }
            granted += length + PREFIX_BYTES as u64;
        }
        self.granted = granted;
    }

    /// Resolves when the message with the prefix `held` begins with may be received.
    fn poll_entry(&mut self, context: &mut Context<'_>) -> Poll<Result<u64, Status>> {
        let length = u64::from((&self.held[1..PREFIX_BYTES]).get_u32());
        let most = self.window.0.admission.largest_message;
        if length > most {
            return Poll::Ready(Err(status::message_too_large(length, most, Access::Write)));
        }
        loop {
            // Before the look, so that no ack between the two is missed.
            self.window.0.waiting.register(context.waker());
            match self.window.enter(length) {
                Entry::Granted => {
                    self.pause = None;
                    return Poll::Ready(Ok(length));
                }
                Entry::WindowFull => return Poll::Pending,
                Entry::BudgetFull => {
                    let pause = || Box::pin(tokio::time::sleep(PAUSE));
                    ready!(self.pause.get_or_insert_with(pause).as_mut().poll(context));
                    self.pause = None;
                }
            }
        }
    }
}

impl Body for SessionBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        loop {
            let begins = this.granted == 0;
            if begins && this.held.len() >= PREFIX_BYTES {
                match ready!(this.poll_entry(context)) {
                    Ok(length) => this.granted = length + PREFIX_BYTES as u64,
                    Err(status) => return Poll::Ready(Some(Err(status))),
                }
                this.grant_more();
            } else if begins || this.held.is_empty() {
                let frame = ready!(Pin::new(&mut this.inner).poll_frame(context));
                this.ended |= !matches!(frame, Some(Ok(_)));
                match frame.map(|frame| frame.map(Frame::into_data)) {
                    Some(Ok(Ok(data))) if this.held.is_empty() => this.held = data,
                    Some(Ok(Ok(data))) => {
                        let mut joined = BytesMut::from(&this.held[..]);
                        joined.extend_from_slice(&data);
                        this.held = joined.freeze();
                    }
                    Some(Ok(Err(trailers))) => return Poll::Ready(Some(Ok(trailers))),
                    Some(Err(status)) => return Poll::Ready(Some(Err(status))),
                    // Cut off within a prefix: the decoder says so.
                    None if !this.held.is_empty() => this.granted = this.held.len() as u64,
                    None => return Poll::Ready(None),
                }
            } else {
                let fits = usize::try_from(this.granted).unwrap_or(usize::MAX);
                let part = this.held.split_to(fits.min(this.held.len()));
                this.granted -= part.len() as u64;
                return Poll::Ready(Some(Ok(Frame::data(part))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.held.is_empty() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl Drop for SessionBody {
    /// A session that has failed reads no more, and its client may have sent more before it
    /// learns of that. Unread, that would be taken for an error of the client's, and end the
    /// connection if there are many: so it is dropped as it comes, for a while.
    fn drop(&mut self) {
        if self.ended || self.inner.is_end_stream() {
            return;
        }
        if let Ok(event_loop) = Handle::try_current() {
            let rest = std::mem::take(&mut self.inner);
            event_loop.spawn(tokio::time::timeout(FAREWELL, drop_rest(rest)));
        }
    }
}

/// Drops what comes until nothing does any more.
async fn drop_rest(mut rest: tonic::body::Body) {
    loop {
        let next = poll_fn(|context| Pin::new(&mut rest).poll_frame(context));
        match tokio::time::timeout(SILENCE, next).await {
            Ok(Some(Ok(_))) => {}
            Ok(None | Some(Err(_))) | Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;
    use crate::metrics::Metrics;

    /// A body of these frames.
    struct Frames(VecDeque<Bytes>);

    impl Body for Frames {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(self.0.pop_front().map(|data| Ok(Frame::data(data))))
        }
    }

    /// A budget of which a session may use so much.
    fn admission(limit: u64, window: u64) -> Arc<Admission> {
        Admission::new(limit, window, 1 << 20, Arc::new(Metrics::new().unwrap()))
    }

    /// Messages with their prefixes, cut into frames of `size` bytes.
    fn frames(messages: &[&[u8]], size: usize) -> tonic::body::Body {
        let mut bytes = Vec::new();
        for message in messages {
            bytes.push(0);
            bytes.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
            bytes.extend_from_slice(message);
        }
        let frames = bytes.chunks(size).map(Bytes::copy_from_slice).collect();
        tonic::body::Body::new(Frames(frames))
    }

    fn session(body: tonic::body::Body, admission: &Arc<Admission>) -> SessionBody {
        SessionBody::new(body, Window::new(admission, &Share::default()))
    }

    /// What the body gives until it waits or ends, and whether it has ended.
    fn given(body: &mut SessionBody) -> (Vec<u8>, bool) {
        let mut given = Vec::new();
        let mut context = Context::from_waker(Waker::noop());
        loop {
            match Pin::new(&mut *body).poll_frame(&mut context) {
                Poll::Ready(Some(frame)) => given.extend(frame.unwrap().into_data().unwrap()),
                Poll::Ready(None) => return (given, true),
                Poll::Pending => return (given, false),
            }
        }
    }

    #[test]
    fn messages_come_through_unchanged_however_they_are_cut() {
        let messages: [&[u8]; 4] = [b"first", b"", b"a longer one than the others", b"x"];
        let whole = 4 * PREFIX_BYTES + 5 + 28 + 1;
        for size in 1..=whole {
            let admission = admission(1 << 20, 1 << 20);
            let mut body = session(frames(&messages, size), &admission);
            let (bytes, ended) = given(&mut body);
            assert!(ended && bytes.len() == whole, "{size}");
            let (expected, _) = given(&mut session(frames(&messages, whole), &admission));
            assert_eq!(bytes, expected, "{size}");
            let rooms: Vec<_> = std::iter::from_fn(|| body.window.next()).collect();
            assert_eq!(rooms.len(), 4);
        }
    }

    #[test]
    fn message_beyond_the_window_waits_for_an_ack_and_the_first_never_waits() {
        let large = [7; 2000];
        let admission = admission(1 << 20, 1000);
        let mut body = session(frames(&[&large, &large, b"x"], 700), &admission);
        let message = large.len() + PREFIX_BYTES;
        for left in [message, message] {
            let (bytes, ended) = given(&mut body);
            assert_eq!((bytes.len(), ended), (left, false));
            // Received, and still under way: only its end makes room.
            let room = body.window.next().unwrap();
            assert_eq!(given(&mut body).0.len(), 0);
            drop(room);
        }
        assert_eq!(given(&mut body), (vec![0, 0, 0, 0, 1, b'x'], true));
        drop(body);
        assert!(admission.take(&Share::default(), 500_000).is_ok());
    }

    #[test]
    fn room_that_was_enlarged_is_given_back_whole() {
        let admission = admission(1 << 20, 2000);
        let message = 1 + PREFIX_BYTES;
        let mut body = session(frames(&[b"x", b"y"], message), &admission);
        let mut context = Context::from_waker(Waker::noop());
        let first = Pin::new(&mut body).poll_frame(&mut context);
        assert!(
            matches!(first, Poll::Ready(Some(Ok(frame))) if frame.data_ref().unwrap().len() == message)
        );
        let mut room = body.window.next().unwrap();
        room.enlarge(2000);
        assert_eq!(given(&mut body), (vec![], false));
        drop(room);
        assert_eq!(given(&mut body).0.len(), message);
        drop((body.window.next(), body));
        assert_eq!(
            admission.total.load(std::sync::atomic::Ordering::Relaxed),
            0
        );
    }

    #[test]
    fn messages_that_are_there_and_fit_are_given_together() {
        let message = 1 + PREFIX_BYTES;
        let room = 2 * (message as u64 + REQUEST_OVERHEAD);
        let admission = admission(1 << 20, room);
        let mut body = session(frames(&[b"x", b"y", b"z"], 100), &admission);
        let mut context = Context::from_waker(Waker::noop());
        let first = Pin::new(&mut body).poll_frame(&mut context);
        assert!(
            matches!(first, Poll::Ready(Some(Ok(frame))) if frame.data_ref().unwrap().len() == 2 * message)
        );
        assert_eq!(given(&mut body), (vec![], false));
        drop(body.window.next().unwrap());
        assert_eq!(given(&mut body), (vec![0, 0, 0, 0, 1, b'z'], true));
    }

    #[tokio::test]
    async fn message_waits_for_other_connections_to_leave_room() {
        let admission = admission(4096, 1 << 20);
        let others = Share::default();
        let taken = admission.take(&others, 4096).unwrap();
        let mut body = session(frames(&[b"x"], 100), &admission);
        let next = poll_fn(|context| Pin::new(&mut body).poll_frame(context));
        let mut next = std::pin::pin!(next);
        let waited = tokio::time::timeout(4 * PAUSE, next.as_mut()).await;
        assert!(waited.is_err());
        admission.give_back(&others, taken);
        assert!(next.await.unwrap().is_ok());
    }

    #[tokio::test]
    async fn message_that_is_too_long_is_refused_by_its_prefix() {
        let admission = admission(1 << 20, 1 << 20);
        let prefix = Bytes::from_static(&[0, 0, 0x10, 0, 1]);
        let body = tonic::body::Body::new(Frames([prefix].into()));
        let mut body = session(body, &admission);
        let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
        let refused = frame.unwrap().unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    }
}
