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

mod many;
mod one;
mod translated;

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use http::HeaderMap;
use tokio::sync::watch;
use tonic::Status;
use wald_storage::AppendError;

use super::prefix::{self, PREFIX_BYTES};
use crate::admission::{Admission, Busy, Charge, GroupShare, Kind, Share, Window};
use crate::drain::Phase;
use crate::methods::{Class, Rpc};
use crate::status::{self, Access};
use crate::transport::{Hurry, Incoming, Patience};
pub(crate) use many::{Admitted, Messages};
pub(crate) use one::OneMessage;
pub(crate) use translated::{TranslatedBody, Translation};

/// Memory of a request besides its head and message: names, places, its answer.
const REQUEST_OVERHEAD: u64 = 512;

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
    /// The body of a call of that RPC, from a connection and a holder with these shares.
    ///
    /// # Errors
    /// BUSY if there is no room for the head of the request.
    pub(crate) fn new(
        incoming: Incoming,
        rpc: Rpc,
        head: &HeaderMap,
        admission: &Arc<Admission>,
        share: (&Share, Option<&Arc<GroupShare>>),
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
        let mut incoming = incoming;
        if let Incoming::Translated(body) = &mut incoming {
            body.charge_to(Charge::new(admission, share, kind), largest);
        }
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
        holder,
        inflight,
        limit,
    } = busy;
    if let Some(holder) = holder {
        return status::share_busy(&holder, inflight, limit);
    }
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

    /// Bytes that have arrived behind those that were returned.
    fn arrival(&mut self) -> Arrival {
        Arrival::default()
    }
}

/// Bytes of a request that arrive before any of them can be passed on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Arrival {
    /// Bytes that the request has, as far as its client says so.
    announced: u64,
    /// Bytes that arrived since the last look.
    moved: u64,
}

impl Source for Incoming {
    fn poll_bytes(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
        self.poll_unreleased(context)
    }

    fn release(&mut self, bytes: usize) {
        Self::release(self, bytes);
    }

    fn arrival(&mut self) -> Arrival {
        match self {
            Self::Http2(_) => Arrival::default(),
            Self::Translated(body) => body.arrival(),
        }
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

#[cfg(test)]
mod fixtures {
    use std::collections::VecDeque;

    use super::*;

    /// Bytes that come in these frames; afterwards the client waits or has closed.
    pub(super) struct Frames {
        pub(super) frames: VecDeque<Bytes>,
        pub(super) closes: bool,
        pub(super) released: usize,
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
    pub(super) fn admission(limit: u64, window: u64) -> Arc<Admission> {
        let (phase, receiver) = watch::channel(Phase::Serving);
        std::mem::forget(phase);
        Admission::new(limit, window, 1 << 20, receiver)
    }

    /// A message with its prefix.
    pub(super) fn sent(message: &[u8]) -> Vec<u8> {
        let mut sent = Vec::new();
        prefix::put(message.len(), &mut sent).unwrap();
        sent.extend_from_slice(message);
        sent
    }

    impl Frames {
        /// Frames of a client that closes afterwards.
        pub(super) fn new<'a>(frames: impl IntoIterator<Item = &'a [u8]>) -> Self {
            Self {
                frames: frames.into_iter().map(Bytes::copy_from_slice).collect(),
                closes: true,
                released: 0,
            }
        }

        /// Messages with their prefixes, cut into frames of `size` bytes.
        pub(super) fn of(messages: &[&[u8]], size: usize) -> Self {
            let bytes: Vec<_> = messages.iter().flat_map(|message| sent(message)).collect();
            Self::new(bytes.chunks(size))
        }
    }

    pub(super) fn used(admission: &Admission) -> u64 {
        admission.admitted_bytes().0
    }
}
