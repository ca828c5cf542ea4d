//! Messages of requests: bounded, admitted and whole.
//!
//! ```text
//! connection ── frames ──▶ OneMessage ───▶ a call of one message
//!                │           charged as it arrives, BUSY if there is no room
//!                └───────▶ Messages ─────▶ a session or another stream of requests
//!                            waits for room: Window ◀── Passage, dropped with the answer
//! ```
//!
//! **The time**: one message arrives within 10 s and a second for each 64 KiB ([`message_time`]), and moves 64 KiB in
//! each second while others find no room ([`Wait`]), or its call ends.
//!
//! **One message**: a refusal waits for the end of the request, at most as long as a message may take. An earlier
//! refusal would reset the stream while its data is under way. The client's HTTP/2 layer counts such a reset as an
//! error of the client, and its connection ends over a few of them.
//!
//! **Messages** of a stream are never answered BUSY while they move: they wait. Their bytes are taken from the
//! connection as they come, joined, and admitted message by message. Only admitted bytes give the client room for more,
//! so HTTP/2 flow control holds the client back. The windows of the stream and the connection bound the bytes that
//! wait. Small frames cost no more than large ones.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use http::HeaderMap;
use tokio::sync::watch;
use tokio::time::Sleep;
use tonic::Status;
use wald_storage::AppendError;

use super::prefix::{self, PREFIX_BYTES};
use crate::admission::{Admission, Busy, Charge, Entry, Kind, Passage, Share, Window};
use crate::drain::Phase;
use crate::metrics::{Class, Rpc};
use crate::status::{self, Access};
use crate::transport::{Hurry, Incoming, Patience};

/// Memory of a request besides its head and message: names, places, its answer.
const REQUEST_OVERHEAD: u64 = 512;

/// Memory of a call whose request has not arrived whole: its task, its HTTP/2 stream and its buffers.
const WAITING_BYTES: u64 = 10 << 10;

/// A head that takes more bytes is charged before its call runs.
const SMALL_HEAD: u64 = 4 << 10;

/// Memory of a field of a head besides its name and value, and memory of each further field of that name. A
/// client can repeat a field for one byte.
const FIELD_OVERHEAD: u64 = 96;
const REPEATED_FIELD_OVERHEAD: u64 = 192;

/// Seconds after which a message must have moved when others wait for its room.
const HURRY_SECONDS: u64 = 1;

/// Largest message of a request without records, in bytes, and the exceptions: a backup names the files that exist
/// already, and a health check names one service.
const LARGEST_OTHER: u64 = 64 << 10;
const LARGEST_BACKUP: u64 = 1 << 20;
const LARGEST_HEALTH: u64 = 4 << 10;

/// Bytes of a refused request that are received and dropped. Beyond them the refusal is sent at once.
const MOST_DROPPED: u64 = 16 << 20;

/// Bytes for which a message takes memory at once. It takes more as more arrives.
const BELIEVED: u64 = 64 << 10;

/// A stream gives its client room for more when this many bytes were admitted, or when nothing is left to admit.
const RELEASE_BYTES: usize = 16 << 10;

/// Pause before the next check for room: answers of other connections wake nobody here.
const PAUSE: Duration = Duration::from_millis(5);

/// Time in which a message must arrive, by the length that it announces: at least 10 s, and 64 KiB/s.
fn message_time(length: u64) -> Duration {
    Duration::from_secs(10 + length / (64 << 10))
}

/// The body of a request, by the way in which its messages are bounded.
pub(crate) enum RequestBody {
    /// One message.
    One(OneMessage),
    /// A stream of messages. Boxed: other requests are moved often.
    Many(Box<Messages>),
    /// Messages without bounds, which the service reads.
    Unbounded(Incoming),
}

impl RequestBody {
    /// The body of a call of that RPC, from a connection with that share.
    ///
    /// # Errors
    /// BUSY if there is no room for the head of the request.
    pub(crate) fn new(
        incoming: Incoming,
        rpc: Rpc,
        head: &HeaderMap,
        admission: &Arc<Admission>,
        share: &Share,
    ) -> Result<Self, Status> {
        let (kind, largest) = match rpc.class {
            Class::Echo => return Ok(Self::Unbounded(incoming)),
            Class::AppendSession => {
                let window = Window::new(admission, share, Kind::Append);
                let largest = admission.largest_append;
                let messages = Messages::new(incoming, window, largest, rpc.access, None);
                return Ok(Self::Many(Box::new(messages)));
            }
            Class::Append | Class::AppendBatch => (Kind::Append, admission.largest_append),
            Class::Probe | Class::Health => (Kind::Health, LARGEST_HEALTH),
            Class::Backup => (Kind::Other, LARGEST_BACKUP),
            Class::Reflection | Class::Other => (Kind::Other, LARGEST_OTHER),
        };
        let mut charge = Charge::new(admission, share, kind);
        let head_bytes = head_bytes(head) + REQUEST_OVERHEAD;
        let mut uncharged = head_bytes;
        // Most calls read their body at once: it charges their head, too. That is one update of the counters less.
        if rpc.class == Class::Reflection || head_bytes > SMALL_HEAD {
            charge
                .grow(0, std::mem::take(&mut uncharged))
                .map_err(busy)?;
        }
        if rpc.class == Class::Reflection {
            let window = Window::new(admission, share, kind);
            let messages = Messages::new(incoming, window, largest, rpc.access, Some(charge));
            return Ok(Self::Many(Box::new(messages)));
        }
        let mut body = OneMessage::new(incoming, charge, largest, rpc.access);
        (body.head, body.uncharged) = (head_bytes, uncharged);
        Ok(Self::One(body))
    }

    /// Whether the first poll of the message charges the head.
    pub(crate) fn is_uncharged(&self) -> bool {
        matches!(self, Self::One(body) if body.uncharged > 0)
    }
}

/// Memory of a request's head.
fn head_bytes(headers: &HeaderMap) -> u64 {
    let texts: usize = (headers.iter())
        .map(|(name, value)| name.as_str().len() + value.len())
        .sum();
    let (names, fields) = (headers.keys_len() as u64, headers.len() as u64);
    texts as u64 + names * FIELD_OVERHEAD + (fields - names) * REPEATED_FIELD_OVERHEAD
}

/// The refusal of a request for which there is no room.
fn busy(busy: Busy) -> Status {
    let Busy {
        kind,
        inflight,
        limit,
    } = busy;
    match kind {
        Kind::Append => status::append(&AppendError::Busy { inflight, limit }),
        Kind::Health | Kind::Other => status::requests_busy(inflight, limit),
    }
}

/// Source of a request's bytes.
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

/// One whole message and its prefix, as the client has sent them.
#[derive(Debug, Clone)]
pub(crate) struct Message(Bytes);

impl Message {
    /// The message without its prefix.
    pub(crate) fn payload(mut self) -> Bytes {
        self.0.advance(PREFIX_BYTES);
        self.0
    }

    /// The message behind its prefix.
    pub(crate) fn framed(self) -> Bytes {
        self.0
    }
}

/// Received bytes that are not passed on.
struct Received {
    bytes: BytesMut,
    /// Largest message in bytes.
    largest: u64,
    access: Access,
}

impl Received {
    fn new(largest: u64, access: Access) -> Self {
        Self {
            bytes: BytesMut::new(),
            largest,
            access,
        }
    }

    /// The length that the first message announces; `None` while that is not known.
    ///
    /// # Errors
    /// If the bytes are no message, or the message is too large.
    fn length(&self) -> Result<Option<u64>, Status> {
        let length = prefix::length(&self.bytes, self.access)?;
        match length {
            Some(length) if length > self.largest => {
                Err(status::message_too_large(length, self.largest, self.access))
            }
            length => Ok(length),
        }
    }

    /// Takes the first message out, of that many bytes with its prefix.
    fn take(&mut self, whole: usize) -> Message {
        Message(self.bytes.split_to(whole).freeze())
    }

    /// The reason if the bytes end within a message.
    fn cut_off(&self) -> Status {
        let why = format_args!("its message is cut off after {} bytes", self.bytes.len());
        status::malformed("request", why, self.access)
    }
}

/// Bytes of a message with its prefix.
fn whole(length: u64) -> usize {
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    length.saturating_add(PREFIX_BYTES)
}

/// The wait for the client of a request.
struct Wait {
    patience: Patience,
    hurry: Hurry,
}

impl Wait {
    fn new(phase: &watch::Receiver<Phase>) -> Self {
        Self {
            patience: Patience::new(phase),
            hurry: Hurry::default(),
        }
    }

    /// Resolves when the client was waited for longer than a message of `length` bytes may take, or moved less than
    /// 64 KiB/s while others found no room.
    fn poll_over(
        &mut self,
        context: &mut Context<'_>,
        length: u64,
        is_short: impl Fn() -> bool,
    ) -> Poll<()> {
        let limit = message_time(length);
        if self.patience.poll_over(context, limit).is_ready() {
            return Poll::Ready(());
        }
        self.hurry.poll_late(context, HURRY_SECONDS, is_short)
    }
}

/// The one message of a request. It stays charged until this is dropped.
pub(crate) struct OneMessage<S = Incoming> {
    source: S,
    received: Received,
    /// Length of the message, once its prefix is here.
    length: Option<u64>,
    charge: Charge,
    /// Memory of the head, and the part of it that is not charged yet.
    head: u64,
    uncharged: u64,
    /// Whether [`WAITING_BYTES`] are charged.
    is_waiting: bool,
    refused: Option<Status>,
    dropped: u64,
    /// Made by the first wait for the client.
    wait: Option<Box<Wait>>,
}

impl<S: Source> OneMessage<S> {
    fn new(source: S, charge: Charge, largest: u64, access: Access) -> Self {
        Self {
            source,
            received: Received::new(largest, access),
            length: None,
            charge,
            head: 0,
            uncharged: 0,
            is_waiting: false,
            refused: None,
            dropped: 0,
            wait: None,
        }
    }

    /// The message, once the request has ended.
    ///
    /// # Errors
    /// - `MALFORMED_REQUEST` if there is no message, a part of one, or more than one.
    /// - `REQUEST_TOO_LARGE` if it is longer than the RPC permits.
    /// - `REQUEST_TOO_SLOW` if the client takes too long.
    /// - `BUSY` if there is no room.
    pub(crate) async fn receive(&mut self) -> Result<Message, Status> {
        poll_fn(|context| self.poll(context)).await
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Message, Status>> {
        loop {
            let Poll::Ready(data) = self.source.poll_bytes(context) else {
                self.begin_wait()?;
                return self.poll_over(context).map(Err);
            };
            let data = match data {
                Some(Ok(data)) => data,
                // Now a refusal can be sent.
                end => {
                    let refused = self.refused.take().map_or(Ok(()), Err);
                    return Poll::Ready(refused.and_then(|()| match end {
                        Some(Err(gone)) => Err(gone),
                        _ => self.end(),
                    }));
                }
            };
            self.source.release(data.len());
            if self.refused.is_none() {
                match self.take_in(&data) {
                    Ok(()) => continue,
                    Err(why) => self.refuse(why)?,
                }
            }
            self.dropped += data.len() as u64;
            if self.dropped > MOST_DROPPED
                && let Some(why) = self.refused.take()
            {
                return Poll::Ready(Err(why));
            }
        }
    }

    /// Takes and charges data of the request.
    ///
    /// # Errors
    /// If it is not the one message, or there is no room for it.
    fn take_in(&mut self, data: &[u8]) -> Result<(), Status> {
        let bytes = data.len() as u64;
        if let Some(wait) = &mut self.wait {
            wait.hurry.moved(bytes);
        }
        self.received.bytes.extend_from_slice(data);
        if self.length.is_none()
            && let Some(length) = self.received.length()?
        {
            self.length = Some(length);
            if let Some(wait) = &mut self.wait {
                wait.hurry.begin();
            }
            self.charge
                .look(self.charge.bytes(), length)
                .map_err(busy)?;
            // The length is only announced: the bytes that have arrived limit the memory taken for it.
            let believed = whole(length.min(BELIEVED));
            let more = believed.saturating_sub(self.received.bytes.len());
            self.received.bytes.reserve(more);
        }
        let has = self.charge.bytes();
        self.charge
            .grow(has, bytes + self.uncharged)
            .map_err(busy)?;
        self.uncharged = 0;
        let Some(length) = self.length else {
            return Ok(());
        };
        match whole(length).cmp(&self.received.bytes.len()) {
            std::cmp::Ordering::Less => {
                let why = format_args!(
                    "its message has {length} bytes, and more came behind it; the call takes one message"
                );
                Err(status::malformed("request", why, self.received.access))
            }
            std::cmp::Ordering::Equal if std::mem::take(&mut self.is_waiting) => {
                self.charge.shrink(WAITING_BYTES);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The message of a request that has ended.
    fn end(&mut self) -> Result<Message, Status> {
        match self.length.map(whole) {
            // Nothing else keeps the memory, so tonic takes it over instead of a copy.
            Some(whole) if whole == self.received.bytes.len() => {
                Ok(Message(std::mem::take(&mut self.received.bytes).freeze()))
            }
            None if self.received.bytes.is_empty() => {
                let why = "it has no message; the call takes one";
                Err(status::malformed("request", why, self.received.access))
            }
            _ => Err(self.received.cut_off()),
        }
    }

    /// Charges the memory of a call that waits for its client.
    ///
    /// # Errors
    /// If there is no room for it.
    fn begin_wait(&mut self) -> Result<(), Status> {
        if self.is_waiting {
            return Ok(());
        }
        let has = self.charge.bytes();
        let grown = self.charge.grow(has, WAITING_BYTES + self.uncharged);
        grown.map_err(|full| self.refused.take().unwrap_or_else(|| busy(full)))?;
        self.uncharged = 0;
        self.is_waiting = true;
        Ok(())
    }

    /// Notes that the request is refused. Only its head stays charged while the rest arrives.
    ///
    /// # Errors
    /// With the refusal, if there is no room for the head: then the request is answered at once.
    fn refuse(&mut self, why: Status) -> Result<(), Status> {
        self.received.bytes = BytesMut::new();
        self.charge.shrink(self.charge.bytes());
        self.is_waiting = false;
        if self.charge.grow(0, self.head).is_err() {
            return Err(why);
        }
        self.uncharged = 0;
        self.refused = Some(why);
        Ok(())
    }

    /// Resolves with the reason when the client was waited for long enough.
    fn poll_over(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        let phase = &self.charge.admission().phase;
        let wait = (self.wait).get_or_insert_with(|| Box::new(Wait::new(phase)));
        let is_short = || self.charge.is_short();
        ready!(wait.poll_over(context, self.length.unwrap_or_default(), is_short));
        let why = self.refused.take();
        Poll::Ready(why.unwrap_or_else(|| status::message_too_slow(self.received.access)))
    }
}

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
    fn new(source: S, window: Window, largest: u64, access: Access, head: Option<Charge>) -> Self {
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
    use std::collections::VecDeque;
    use std::task::Waker;

    use tonic::Code;

    use super::*;

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

    fn session(frames: Frames, admission: &Arc<Admission>) -> Messages<Frames> {
        let window = Window::new(admission, &Share::default(), Kind::Append);
        Messages::new(
            frames,
            window,
            admission.largest_append,
            Access::Write,
            None,
        )
    }

    fn used(admission: &Admission) -> u64 {
        admission.admitted_bytes().0
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
            let mut stream = session(frames(&messages, size), &admission);
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
        let mut stream = session(frames(&[&large, &large, b"x"], 700), &admission);
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
        let mut stream = session(frames(&many, 1), &admission);
        let (first, _) = given(&mut stream);
        assert_eq!(first.len(), 1);
        assert!(stream.source.frames.is_empty());
        assert_eq!(stream.source.released, 15);
        assert!(stream.received.bytes.capacity() < 64 << 10);
    }

    #[tokio::test]
    async fn announced_length_is_not_charged_and_holds_nobody_back() {
        let admission = admission(1 << 20, 1 << 20);
        let mut announced = frames(&[&[0; 500_000]], 1000);
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
        let mut half = frames(&[b"whole", b"never whole"], 12);
        half.frames.truncate(1);
        half.closes = false;
        let mut stream = session(half, &admission);
        let (first, _) = given(&mut stream);
        assert_eq!(first.len(), 1);
        let begin = tokio::time::Instant::now();
        let ended = poll_fn(|context| polled(&mut stream, context)).await;
        assert_eq!(ended.unwrap().err().unwrap().code(), Code::DeadlineExceeded);
        assert!(begin.elapsed() >= Duration::from_secs(10));
        let mut silent = frames(&[b"whole"], 12);
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
        let mut stream = session(frames(&[b"x", b"y"], 6), &admission);
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
        let mut others = Charge::new(&admission, &Share::default(), Kind::Append);
        others.grow(0, 4096).unwrap();
        let mut stream = session(frames(&[b"x"], 100), &admission);
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
            let frames = Frames {
                frames: [Bytes::from_static(bytes)].into(),
                closes: true,
                released: 0,
            };
            let mut stream = session(frames, &admission);
            let refused = poll_fn(|context| polled(&mut stream, context)).await;
            let refused = refused.unwrap().err().unwrap();
            assert_eq!(refused.code(), Code::InvalidArgument);
            assert!(refused.message().contains(text), "{refused}");
        }
    }

    /// With its prefix.
    fn sent(message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap();
        [&[0], &length.to_be_bytes()[..], message].concat()
    }

    /// A call of at most `largest` bytes whose client sends these frames.
    fn call(data: &[&[u8]], largest: u64, admission: &Arc<Admission>) -> OneMessage<Frames> {
        let frames = Frames {
            frames: data
                .iter()
                .map(|data| Bytes::copy_from_slice(data))
                .collect(),
            closes: true,
            released: 0,
        };
        let charge = Charge::new(admission, &Share::default(), Kind::Append);
        OneMessage::new(frames, charge, largest, Access::Write)
    }

    #[tokio::test]
    async fn one_message_is_whole_however_its_frames_are_cut() {
        let admission = admission(1 << 20, 1 << 20);
        for size in [0, 1, 7, 5000, 100_000] {
            let message: Vec<u8> = (0..=250).cycle().take(size).collect();
            let sent = sent(&message);
            let cuts = (0..sent.len().min(20)).chain([sent.len() / 2, sent.len()]);
            for (first, second) in cuts
                .clone()
                .flat_map(|cut| cuts.clone().map(move |c| (cut, c)))
            {
                let (first, second) = (first.min(second), first.max(second));
                let frames = [&sent[..first], &[], &sent[first..second], &sent[second..]];
                let mut call = call(&frames, 100_000, &admission);
                let received = call.receive().await.unwrap();
                assert_eq!(call.source.released, sent.len());
                assert_eq!(used(&admission), sent.len() as u64);
                assert_eq!(received.clone().framed(), sent);
                assert_eq!(
                    received.payload(),
                    message,
                    "{size} bytes cut at {first}, {second}"
                );
            }
        }
        assert_eq!(used(&admission), 0);
    }

    #[tokio::test]
    async fn nothing_else_keeps_the_memory_of_a_received_message() {
        let admission = admission(1 << 20, 1 << 20);
        let sent = sent(&[7; 5000]);
        let mut call = call(&[&sent[..100], &sent[100..]], 100_000, &admission);
        let message = call.receive().await.unwrap();
        assert!(message.framed().try_into_mut().is_ok());
    }

    #[tokio::test]
    async fn request_that_is_not_one_message_is_refused_at_its_end() {
        let admission = admission(1 << 20, 1 << 20);
        let two = sent(b"abc").repeat(2);
        let mut compressed = sent(b"abc");
        compressed[0] = 1;
        let mut odd = sent(b"abc");
        odd[0] = 2;
        let long = sent(b"abcd");
        let cases: [(&[&[u8]], &str); 10] = [
            (&[], "no message"),
            (&[b""], "no message"),
            (&[b"\0"], "cut off after 1 bytes"),
            (&[b"\0\0\0", b"\0\x02a"], "cut off after 6 bytes"),
            (&[&long[..5], &long[5..]], "has 4 bytes; at most 3"),
            (&[&long[..5]], "has 4 bytes; at most 3"),
            (&[&two], "takes one message"),
            (&[&two[..8], &two[8..9]], "takes one message"),
            (&[&compressed], "marked as compressed"),
            (&[&odd], "begins with '\\u{2}'"),
        ];
        for (frames, text) in cases {
            let mut call = call(frames, 3, &admission);
            let status = call.receive().await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{frames:?}");
            assert!(
                call.source.frames.is_empty(),
                "refused too early: {frames:?}"
            );
            assert!(status.message().contains(text), "{frames:?}: {status}");
        }
    }

    #[tokio::test]
    async fn call_without_room_is_busy_once_its_message_has_arrived() {
        let admission = admission(4096, 1 << 20);
        let mut others = Charge::new(&admission, &Share::default(), Kind::Append);
        others.grow(0, 4000).unwrap();
        let message = sent(&[7; 200]);
        let mut call = call(&[&message[..100], &message[100..]], 3000, &admission);
        let busy = call.receive().await.unwrap_err();
        assert_eq!(busy.code(), Code::ResourceExhausted);
        assert!(call.source.frames.is_empty() && used(&admission) == 4000);
        drop(others);
        assert_eq!(used(&admission), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn call_that_waits_for_its_client_is_charged_and_ends_in_time() {
        let admission = admission(1 << 20, 1 << 20);
        let mut call = call(&[&sent(&[7; 200_000])[..1000]], 1 << 20, &admission);
        call.source.closes = false;
        let begin = tokio::time::Instant::now();
        let mut receive = Box::pin(call.receive());
        assert!(
            tokio::time::timeout(Duration::from_secs(12), &mut receive)
                .await
                .is_err()
        );
        assert_eq!(used(&admission), 1000 + WAITING_BYTES);
        let late = receive.await.unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded);
        assert_eq!(begin.elapsed().as_secs(), 13);
    }
}
