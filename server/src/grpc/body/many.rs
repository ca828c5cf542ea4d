//! The messages of a stream of requests.
//!
//! Messages are never answered BUSY while they move: they wait. Their bytes are taken from the connection as they come,
//! joined, and admitted message by message. Only admitted bytes give the client room for more, so HTTP/2 flow control
//! holds the client back. The windows of the stream and the connection bound the bytes that wait. Small frames cost no
//! more than large ones.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::Sleep;
use tonic::Status;

use super::{Message, REQUEST_OVERHEAD, Received, Source, Wait, busy, whole};
use crate::admission::{Charge, Entry, Passage, Window};
use crate::status::{self, Access};
use crate::transport::{Incoming, Patience};

/// A stream gives its client room for more when this many bytes were admitted, or when nothing is left to admit.
const RELEASE_BYTES: usize = 16 << 10;

/// Pause before the next check for room: answers of other connections wake nobody here.
const PAUSE: Duration = Duration::from_millis(5);

/// A message of a stream, and its room.
pub(crate) type Admitted = (Message, Passage);

/// The messages of a stream of requests.
pub(crate) struct Messages<S = Incoming> {
    source: S,
    /// End of the client's half: it was closed, or it is gone.
    ended: Option<Result<(), Status>>,
    received: Received,
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
    _head: Option<Charge>,
}

impl<S: Source> Messages<S> {
    /// Messages of at most `largest` bytes each. `head` is the room of the request's head, if something keeps it.
    pub(super) fn new(
        source: S,
        window: Window,
        largest: u64,
        access: Access,
        head: Option<Charge>,
    ) -> Self {
        Self {
            source,
            ended: None,
            received: Received::new(largest, access),
            passage: window.nothing(),
            window,
            admitted: 0,
            unreleased: 0,
            pause: None,
            wait: None,
            waited: false,
            _head: head,
        }
    }

    /// The time that the client has between two messages, which the caller bounds.
    pub(crate) fn patience(&self) -> Patience {
        (self.window).with_charge(|charge| Patience::new(&charge.admission().phase))
    }

    /// Begins the time of the client again: the server has not asked for messages for a while.
    pub(crate) fn restart_wait(&mut self) {
        if let Some(wait) = &mut self.wait {
            wait.hurry.begin();
            wait.patience.moved();
        }
    }

    /// Receives all bytes that are there, and is woken by more. Bytes that stay in the HTTP/2 layer cost there as much
    /// for each frame as a large frame does.
    pub(crate) fn take_in(&mut self, context: &mut Context<'_>) {
        while self.ended.is_none() {
            let Poll::Ready(bytes) = self.source.poll_bytes(context) else {
                return;
            };
            match bytes {
                Some(Ok(bytes)) => self.received.bytes.extend_from_slice(&bytes),
                Some(Err(status)) => self.ended = Some(Err(status)),
                None => self.ended = Some(Ok(())),
            }
        }
    }

    /// The next message of the bytes that [`Self::take_in`] has received, once it is whole and has room; `None` at the
    /// end. A caller that polls for several messages calls `take_in` once before.
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
        let length = self.received.length()?;
        if let Some(length) = length {
            let whole = whole(length);
            let there = self.received.bytes.len().min(whole);
            if there > self.admitted {
                ready!(self.poll_entry(there, length, context))?;
            }
            if there == whole {
                let passage = std::mem::replace(&mut self.passage, self.window.nothing());
                self.admitted = 0;
                if let Some(wait) = &mut self.wait {
                    wait.hurry.begin();
                    wait.patience.moved();
                }
                return Poll::Ready(Ok(Some((self.received.take(whole), passage))));
            }
        }
        match &self.ended {
            None if self.received.bytes.is_empty() => Poll::Pending,
            None => self.poll_over(length.unwrap_or_default(), context).map(Err),
            Some(Err(status)) => Poll::Ready(Err(status.clone())),
            Some(Ok(())) if self.received.bytes.is_empty() => Poll::Ready(Ok(None)),
            Some(Ok(())) => Poll::Ready(Err(self.received.cut_off())),
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
            let entry = (self.window).enter(&mut self.passage, bytes, length + overhead);
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
                // Then once more, so that no answer between the two is missed.
                _ if !is_registered => {
                    self.window.wake_at_room(context.waker());
                    (is_registered, self.waited) = (true, true);
                }
                Entry::WindowFull => return Poll::Pending,
                Entry::StuckIn(full) if self.poll_over(length, context).is_ready() => {
                    return Poll::Ready(Err(busy(full)));
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
        let window = &self.window;
        let new = || window.with_charge(|charge| Wait::new(&charge.admission().phase));
        let wait = self.wait.get_or_insert_with(new);
        let is_short = || window.with_charge(Charge::is_short);
        ready!(wait.poll_over(context, length, is_short));
        Poll::Ready(status::message_too_slow(self.received.access))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::Arc;
    use std::task::Waker;

    use tonic::Code;

    use super::super::PREFIX_BYTES;
    use super::super::fixtures::*;
    use super::*;
    use crate::admission::{Admission, Kind, Share};

    fn session(frames: Frames, admission: &Arc<Admission>) -> Messages<Frames> {
        let window = Window::new(admission, (&Share::default(), None), Kind::Append);
        Messages::new(
            frames,
            window,
            admission.largest_append,
            Access::Write,
            None,
        )
    }

    /// The next message, of everything that is there.
    fn polled(
        stream: &mut Messages<Frames>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Admitted, Status>>> {
        stream.take_in(context);
        stream.poll_message(context)
    }

    /// Messages until the session waits or ends, and whether it has ended.
    fn given(stream: &mut Messages<Frames>) -> (Vec<Admitted>, bool) {
        let mut given = Vec::new();
        let mut context = Context::from_waker(Waker::noop());
        loop {
            match polled(stream, &mut context) {
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
            let mut stream = session(Frames::of(&messages, size), &admission);
            let (given, ended) = given(&mut stream);
            assert!(ended, "{size}");
            let bytes: Vec<_> = given
                .iter()
                .map(|(bytes, _)| bytes.clone().payload())
                .collect();
            assert_eq!(bytes, messages, "{size}");
            assert_eq!(stream.source.released, whole);
            assert_eq!(used(&admission), (4 * REQUEST_OVERHEAD) + whole as u64);
            drop((given, stream));
            assert_eq!(used(&admission), 0);
        }
    }

    #[tokio::test]
    async fn message_beyond_the_window_waits_for_an_ack_and_the_first_never_waits() {
        let large = [7; 2000];
        let admission = admission(1 << 20, 1000);
        let mut stream = session(Frames::of(&[&large, &large, b"x"], 700), &admission);
        for _ in 0..2 {
            let (first, ended) = given(&mut stream);
            assert!(first.len() == 1 && first[0].0.clone().payload().len() == 2000 && !ended);
            // Received, and still under way: only its end makes room.
            assert_eq!(given(&mut stream).0.len(), 0);
            drop(first);
        }
        let (last, ended) = given(&mut stream);
        assert!(ended && last[0].0.clone().payload() == b"x"[..]);
        drop((last, stream));
        assert_eq!(used(&admission), 0);
    }

    #[tokio::test]
    async fn small_frames_are_taken_in_whether_or_not_there_is_room() {
        let admission = admission(1 << 20, 600);
        let many = vec![&b"0123456789"[..]; 1000];
        let mut stream = session(Frames::of(&many, 1), &admission);
        let (first, _) = given(&mut stream);
        assert_eq!(first.len(), 1);
        assert!(stream.source.frames.is_empty());
        assert_eq!(stream.source.released, 15);
        assert!(stream.received.bytes.capacity() < 64 << 10);
    }

    #[tokio::test]
    async fn announced_length_is_not_charged_and_holds_nobody_back() {
        let admission = admission(1 << 20, 1 << 20);
        let mut announced = Frames::of(&[&[0; 500_000]], 1000);
        announced.frames.truncate(1);
        announced.closes = false;
        let mut stream = session(announced, &admission);
        assert_eq!(given(&mut stream).0.len(), 0);
        assert_eq!(used(&admission), 1000 + REQUEST_OVERHEAD);
        drop(stream);
        assert_eq!(used(&admission), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn unfinished_message_ends_the_session_and_silence_between_does_not() {
        let admission = admission(1 << 20, 1 << 20);
        let mut half = Frames::of(&[b"whole", b"never whole"], 12);
        half.frames.truncate(1);
        half.closes = false;
        let mut stream = session(half, &admission);
        let (first, _) = given(&mut stream);
        assert_eq!(first.len(), 1);
        let begin = tokio::time::Instant::now();
        let ended = poll_fn(|context| polled(&mut stream, context)).await;
        assert_eq!(ended.unwrap().err().unwrap().code(), Code::DeadlineExceeded);
        assert!(begin.elapsed() >= Duration::from_secs(10));
        let mut silent = Frames::of(&[b"whole"], 12);
        silent.closes = false;
        let mut stream = session(silent, &admission);
        let (_first, _) = given(&mut stream);
        let next = poll_fn(|context| polled(&mut stream, context));
        let waited = tokio::time::timeout(Duration::from_secs(3600), next).await;
        assert!(waited.is_err());
    }

    #[tokio::test]
    async fn room_that_was_enlarged_is_given_back_whole() {
        let admission = admission(1 << 20, 2000);
        let mut stream = session(Frames::of(&[b"x", b"y"], 6), &admission);
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(Some(Ok((_, mut room)))) = polled(&mut stream, &mut context) else {
            panic!("the first message has room");
        };
        room.enlarge(2000);
        assert_eq!(given(&mut stream).0.len(), 0);
        drop(room);
        assert_eq!(given(&mut stream).0.len(), 1);
        drop(stream);
        assert_eq!(used(&admission), 0);
    }

    #[tokio::test]
    async fn message_waits_for_other_connections_to_leave_room() {
        let admission = admission(4096, 1 << 20);
        let mut others = Charge::new(&admission, (&Share::default(), None), Kind::Append);
        others.grow(0, 4096).unwrap();
        let mut stream = session(Frames::of(&[b"x"], 100), &admission);
        let next = poll_fn(|context| polled(&mut stream, context));
        let mut next = std::pin::pin!(next);
        let waited = tokio::time::timeout(4 * PAUSE, next.as_mut()).await;
        assert!(waited.is_err());
        drop(others);
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
            let mut stream = session(Frames::new([bytes]), &admission);
            let refused = poll_fn(|context| polled(&mut stream, context)).await;
            let refused = refused.unwrap().err().unwrap();
            assert_eq!(refused.code(), Code::InvalidArgument);
            assert!(refused.message().contains(text), "{refused}");
        }
    }
}
