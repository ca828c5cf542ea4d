//! Memory that requests may take before they are answered, shared fairly by connections.
//!
//! Three budgets: for appends, for health checks, and for all other requests. A request is charged for
//! the bytes that have **arrived**, not for the length that it announces, and is refused by that length
//! only if it could not be admitted now. So a connection that sends faster than the disk takes fills its
//! share and not the server, and announced lengths hold nothing.
//!
//! A refusal waits for the end of the message, at most as long as a message may take. An
//! earlier refusal would reset the stream while its data is still under way.
//!
//! **The share**: a connection may have under way as much as is still free for others. Alone it gets
//! half of the budget; two greedy ones a third each; a connection with nothing under way finds room.
//! The engine's own budget stands behind.
//!
//! **The time**: one message arrives within 10 s and a second for each 64 KiB ([`message_time`]), and moves
//! 64 KiB in each second while others find no room ([`Wait`]), or its
//! call ends.
//!
//! **The end**: an append is charged until the engine has let go of it, also if its client has gone.
//!
//! Sessions take from the same budget, and wait instead of being turned away ([`session`]).

mod session;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use http::{HeaderMap, Request};
use http_body::{Body, Frame};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tonic::Status;
use tower::BoxError;
use wald_storage::AppendError;

use crate::drain::Phase;
use crate::metrics::{Class, Rpc};
use crate::shortage::Shortage;
use crate::status::{self, Access};
use crate::transport::{HttpAnswer, HttpResult, Hurry, Incoming, Patience, Peer};
use session::Window;
pub(crate) use session::{Admitted, Intake, Passage};

/// Memory of a request besides its head and message: names, places, its answer.
const REQUEST_OVERHEAD: u64 = 512;

/// Memory of a call whose request has not arrived whole: its task, its HTTP/2 stream and its buffers.
const WAITING_BYTES: u64 = 10 << 10;

/// A head that takes more is charged before its call runs.
const SMALL_HEAD: u64 = 4 << 10;

/// Memory of a field of a head besides its name and value, and memory of each further field of that name. A
/// client can repeat a field for one byte.
const FIELD_OVERHEAD: u64 = 96;
const REPEATED_FIELD_OVERHEAD: u64 = 192;

/// Seconds after which a message must have moved when others wait for its room.
const HURRY_SECONDS: u64 = 1;

/// Bytes of all health checks together. They have a budget of their own, so that other requests cannot make a
/// healthy server look ill.
pub(crate) const HEALTH_BYTES: u64 = 1 << 20;

/// Bytes of all requests without records together, health checks aside.
pub(crate) const OTHERS_BYTES: u64 = 8 << 20;

/// The longest message of a request without records, and the exceptions: a backup names the files that
/// there are already, and a health check names one service.
const LARGEST_OTHER: u64 = 64 << 10;
const LARGEST_BACKUP: u64 = 1 << 20;
const LARGEST_HEALTH: u64 = 4 << 10;

/// Bytes of a refused request that are received and dropped. Beyond them the refusal is sent at once.
const MOST_DROPPED: u64 = 16 << 20;

/// A gRPC message begins with whether it is compressed, and its length in four bytes.
pub(crate) const PREFIX_BYTES: usize = 5;

/// The length of the message that a gRPC prefix announces.
///
/// # Errors
/// `MALFORMED_REQUEST` if the message is compressed, or if these bytes are no prefix. Clients
/// that know the content type and not the format send such bytes.
pub(crate) fn announced_length(prefix: [u8; PREFIX_BYTES], access: Access) -> Result<u64, Status> {
    let [flag, length @ ..] = prefix;
    match flag {
        0 => Ok(u32::from_be_bytes(length).into()),
        1 => {
            let why = "its message is marked as compressed, and no compression is supported";
            Err(status::malformed("request", why, access))
        }
        other => {
            let why = format_args!(
                "it begins with {:?} and not with a gRPC message, which has a zero byte and its length in 4 bytes before its Protobuf; grpcurl makes such messages of JSON",
                char::from(other)
            );
            Err(status::malformed("request", why, access))
        }
    }
}

/// Time in which a message must arrive, by the length that it announces: at least 10 s, and 64 KiB/s.
fn message_time(length: u64) -> Duration {
    Duration::from_secs(10 + length / (64 << 10))
}

/// Time between two messages of a stream of requests: no bound until the server drains.
const BETWEEN_MESSAGES: Duration = Duration::from_secs(365 * 24 * 3600);

/// Bytes that one connection has under way.
#[derive(Debug, Clone, Default)]
pub(crate) struct Share(Arc<Own>);

#[derive(Debug, Default)]
struct Own {
    appends: AtomicU64,
    others: AtomicU64,
    health: AtomicU64,
}

/// The budget that a request is charged to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Append,
    Health,
    Other,
}

/// Bytes that all connections have under way, of one kind.
struct Budget {
    limit: u64,
    total: AtomicU64,
    shortage: Shortage,
}

impl Budget {
    fn new(limit: u64) -> Self {
        Self {
            limit,
            total: AtomicU64::new(0),
            shortage: Shortage::new(),
        }
    }

    /// Whether a request may have `bytes` more, if it has `has` and its connection `own` in all.
    fn allows(&self, own: u64, total: u64, has: u64, bytes: u64) -> bool {
        let (request, own, total) = (has + bytes, own + bytes, total + bytes);
        // A request larger than the whole budget passes when it is alone.
        let is_first = own == request && (total <= self.limit || total == request);
        is_first || own <= self.limit.saturating_sub(total)
    }

    /// Whether a request that has `has` already could be admitted with `bytes` more. Takes nothing.
    ///
    /// # Errors
    /// With the bytes that are under way.
    fn look(&self, own: &AtomicU64, has: u64, bytes: u64) -> Result<(), u64> {
        let (own, total) = (
            own.load(Ordering::Relaxed),
            self.total.load(Ordering::Relaxed),
        );
        match self.allows(own, total, has, bytes) {
            true => Ok(()),
            false => Err(self.refused(total)),
        }
    }

    /// Takes `bytes` more for a request that has `has` already.
    ///
    /// # Errors
    /// With the bytes that are under way. Nothing is taken then.
    fn take(&self, own: &AtomicU64, has: u64, bytes: u64) -> Result<(), u64> {
        let total = self.total.fetch_add(bytes, Ordering::Relaxed);
        let own_before = own.fetch_add(bytes, Ordering::Relaxed);
        if self.allows(own_before, total, has, bytes) {
            return Ok(());
        }
        self.give_back(own, bytes);
        Err(self.refused(total))
    }

    fn refused(&self, total: u64) -> u64 {
        self.shortage.refused(self.limit, total);
        total
    }

    /// Takes more, whatever is free.
    fn take_more(&self, own: &AtomicU64, bytes: u64) {
        own.fetch_add(bytes, Ordering::Relaxed);
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    fn give_back(&self, own: &AtomicU64, bytes: u64) {
        own.fetch_sub(bytes, Ordering::Relaxed);
        self.total.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The budgets of a server, and the rules for its requests.
pub(crate) struct Admission {
    appends: Budget,
    others: Budget,
    health: Budget,
    session_window: u64,
    largest_append: u64,
    phase: watch::Receiver<Phase>,
}

impl Admission {
    /// A budget of `limit` bytes for appends. A session may have `session_window` of them under way; a
    /// message of an append that is longer than `largest_append` is dropped as it arrives.
    pub(crate) fn new(
        limit: u64,
        session_window: u64,
        largest_append: u64,
        phase: watch::Receiver<Phase>,
    ) -> Arc<Self> {
        Arc::new(Self {
            appends: Budget::new(limit),
            others: Budget::new(OTHERS_BYTES),
            health: Budget::new(HEALTH_BYTES),
            session_window,
            largest_append,
            phase,
        })
    }

    /// Bytes of appends and of other requests that are under way.
    pub(crate) fn admitted_bytes(&self) -> (u64, u64) {
        let total = |budget: &Budget| budget.total.load(Ordering::Relaxed);
        (
            total(&self.appends),
            total(&self.others) + total(&self.health),
        )
    }

    /// The call that `serve` makes of a request of that connection, which is admitted as it arrives.
    ///
    /// # Errors
    /// BUSY if there is no room for the head of the request.
    pub(crate) fn call(
        self: &Arc<Self>,
        peer: &Peer,
        request: Request<Incoming>,
        rpc: Rpc,
        serve: impl FnOnce(Request<RequestBody>) -> HttpAnswer,
    ) -> Result<AdmittedCall, Status> {
        let (kind, largest) = match rpc.class {
            Class::AppendSession => {
                let window = Window::new(self, &peer.share);
                let request = request.map(|inner| RequestBody::Session {
                    inner: Box::new(Intake::new(inner, window)),
                });
                return Ok(AdmittedCall::new(serve(request), None, false));
            }
            Class::Echo => {
                let request = request.map(|inner| RequestBody::Plain { inner });
                return Ok(AdmittedCall::new(serve(request), None, false));
            }
            Class::Append | Class::AppendBatch => (Kind::Append, self.largest_append),
            Class::Probe | Class::Health => (Kind::Health, LARGEST_HEALTH),
            Class::Backup => (Kind::Other, LARGEST_BACKUP),
            Class::Reflection | Class::Other => (Kind::Other, LARGEST_OTHER),
        };
        let held = Arc::new(Held {
            admission: Arc::clone(self),
            share: peer.share.clone(),
            kind,
            bytes: AtomicU64::new(0),
        });
        let (head, inner) = request.into_parts();
        let head_bytes = head_bytes(&head.headers) + REQUEST_OVERHEAD;
        let mut uncharged = head_bytes;
        // Most calls read their body at once: it charges their head, too. That is one update of the counters less.
        if rpc.class == Class::Reflection || head_bytes > SMALL_HEAD {
            held.grow(std::mem::take(&mut uncharged))?;
        }
        let inner = AdmittedBody {
            inner,
            prefix: [0; PREFIX_BYTES],
            received: 0,
            left: 0,
            length: 0,
            largest,
            access: rpc.access,
            may_pause: rpc.class == Class::Reflection,
            head: head_bytes,
            uncharged,
            is_waiting: false,
            refused: None,
            dropped: 0,
            wait: None,
            held: Arc::clone(&held),
        };
        let request = Request::from_parts(head, RequestBody::Admitted { inner });
        let goes_on = kind == Kind::Append;
        Ok(AdmittedCall::new(serve(request), Some(held), goes_on))
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

/// Bytes charged to a request, given back when it and its body are dropped.
struct Held {
    admission: Arc<Admission>,
    share: Share,
    kind: Kind,
    bytes: AtomicU64,
}

impl Held {
    fn budget(&self) -> (&Budget, &AtomicU64) {
        let (all, own) = (&self.admission, &self.share.0);
        match self.kind {
            Kind::Append => (&all.appends, &own.appends),
            Kind::Health => (&all.health, &own.health),
            Kind::Other => (&all.others, &own.others),
        }
    }

    /// Refuses a message of `length` bytes that could not be admitted now. Takes nothing.
    fn look(&self, length: u64) -> Result<(), Status> {
        let (budget, own) = self.budget();
        let looked = budget.look(own, self.bytes.load(Ordering::Relaxed), length);
        looked.map_err(|inflight| self.refuse(inflight))
    }

    fn grow(&self, bytes: u64) -> Result<(), Status> {
        (self.try_grow(bytes)).map_err(|inflight| self.refuse(inflight))
    }

    /// Charges `bytes` more.
    ///
    /// # Errors
    /// With the bytes that are under way. Nothing is charged or counted then.
    fn try_grow(&self, bytes: u64) -> Result<(), u64> {
        let (budget, own) = self.budget();
        let has = self.bytes.load(Ordering::Relaxed);
        budget.take(own, has, bytes)?;
        self.bytes.store(has + bytes, Ordering::Relaxed);
        Ok(())
    }

    fn refuse(&self, inflight: u64) -> Status {
        let limit = self.budget().0.limit;
        if self.kind != Kind::Append {
            return status::requests_busy(inflight, limit);
        }
        let error = AppendError::Busy { inflight, limit };
        status::append(&error)
    }

    fn shrink(&self, bytes: u64) {
        let (budget, own) = self.budget();
        budget.give_back(own, bytes);
        let has = self.bytes.load(Ordering::Relaxed);
        self.bytes.store(has - bytes, Ordering::Relaxed);
    }

    fn give_back(&self) {
        let (budget, own) = self.budget();
        budget.give_back(own, self.bytes.swap(0, Ordering::Relaxed));
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// The body of a request, as services receive it.
pub(crate) enum RequestBody {
    /// Without limits.
    Plain {
        /// The body as it comes from the connection.
        inner: Incoming,
    },
    /// Charged as it arrives.
    Admitted {
        /// Checks and charges it.
        inner: AdmittedBody,
    },
    /// A session takes its messages from [`Intake`] itself.
    Session {
        /// Holds messages back until there is room for them. Boxed: other requests are moved often.
        inner: Box<Intake>,
    },
}

impl RequestBody {
    /// The requests of an append session.
    pub(crate) fn into_session(self) -> Option<Box<Intake>> {
        match self {
            Self::Session { inner } => Some(inner),
            Self::Plain { .. } | Self::Admitted { .. } => None,
        }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.get_mut() {
            Self::Plain { inner } => Pin::new(inner).poll_frame(context).map_err(BoxError::from),
            Self::Admitted { inner } => Pin::new(inner).poll_frame(context),
            // Refused before its first message: nothing is read.
            Self::Session { .. } => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Plain { inner } => inner.is_end_stream(),
            Self::Admitted { inner } => inner.inner.is_end_stream(),
            Self::Session { .. } => false,
        }
    }
}

/// A call. Its charge comes back with its answer.
///
/// If the client gives up an append that the engine has, the call continues without it: the
/// append stays charged and is counted like all others.
pub(crate) struct AdmittedCall {
    inner: Option<HttpAnswer>,
    held: Option<Arc<Held>>,
    goes_on: bool,
}

impl AdmittedCall {
    fn new(inner: HttpAnswer, held: Option<Arc<Held>>, goes_on: bool) -> Self {
        Self {
            inner: Some(inner),
            held,
            goes_on,
        }
    }

    /// Whether its body charges it when that is read.
    pub(crate) fn is_uncharged(&self) -> bool {
        (self.held.as_ref()).is_some_and(|held| held.bytes.load(Ordering::Relaxed) == 0)
    }
}

impl Future for AdmittedCall {
    type Output = HttpResult;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<HttpResult> {
        let Some(inner) = &mut self.inner else {
            // It was answered: nobody asks again.
            return Poll::Pending;
        };
        let answer = ready!(inner.as_mut().poll(context));
        self.inner = None;
        self.held = None;
        Poll::Ready(answer)
    }
}

impl Drop for AdmittedCall {
    fn drop(&mut self) {
        if let (true, Some(inner), Ok(event_loop)) =
            (self.goes_on, self.inner.take(), Handle::try_current())
        {
            let held = self.held.take();
            event_loop.spawn(async move {
                drop(inner.await);
                drop(held);
            });
        }
    }
}

/// The body of a request that is charged as it arrives.
pub(crate) struct AdmittedBody {
    inner: Incoming,
    /// The prefix of the current message. `received` counts its bytes that are here.
    prefix: [u8; PREFIX_BYTES],
    received: usize,
    /// Bytes of the current message that are still to come, and all of them.
    left: u64,
    length: u64,
    largest: u64,
    access: Access,
    /// Whether its client may take its time between two messages.
    may_pause: bool,
    /// Memory of its head, and the part of it that is not charged yet.
    head: u64,
    uncharged: u64,
    /// Whether [`WAITING_BYTES`] are charged.
    is_waiting: bool,
    refused: Option<Status>,
    dropped: u64,
    /// Made by the first wait for the client.
    wait: Option<Box<Wait>>,
    held: Arc<Held>,
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

    /// Resolves when the client was waited for longer than `limit`, or moved less than 64 KiB/s while others
    /// found no room in `budget`.
    fn poll_over(
        &mut self,
        context: &mut Context<'_>,
        limit: Duration,
        budget: Option<&Budget>,
    ) -> Poll<()> {
        if self.patience.poll_over(context, limit).is_ready() {
            return Poll::Ready(());
        }
        match budget {
            Some(budget) => {
                let must = || budget.shortage.is_now();
                self.hurry.poll_late(context, HURRY_SECONDS, must)
            }
            None => Poll::Pending,
        }
    }
}

impl AdmittedBody {
    /// Charges data of the request.
    ///
    /// # Errors
    /// If the request is too long, or there is no room for it.
    fn charge(&mut self, data: &[u8]) -> Result<(), Status> {
        let mut bytes = data.len() as u64;
        if let Some(wait) = &mut self.wait {
            wait.hurry.moved(bytes);
        }
        let mut rest = data;
        while !rest.is_empty() {
            if self.left == 0 {
                let missing = &mut self.prefix[self.received..];
                let part = missing.len().min(rest.len());
                missing[..part].copy_from_slice(&rest[..part]);
                rest.advance(part);
                self.received += part;
                if self.received < PREFIX_BYTES {
                    break;
                }
                self.received = 0;
                self.length = announced_length(self.prefix, self.access)?;
                self.left = self.length;
                if self.length > self.largest {
                    let (length, largest) = (self.length, self.largest);
                    return Err(status::message_too_large(length, largest, self.access));
                }
                if self.may_pause {
                    // The message before was answered.
                    self.held.give_back();
                    bytes += REQUEST_OVERHEAD;
                }
                if let Some(wait) = &mut self.wait {
                    wait.hurry.begin();
                }
                self.held.look(self.length)?;
            }
            let part = (rest.len() as u64).min(self.left);
            self.left -= part;
            rest.advance(usize::try_from(part).unwrap_or(rest.len()));
        }
        self.held.grow(bytes + self.uncharged)?;
        self.uncharged = 0;
        if self.is_waiting && self.left == 0 && self.received == 0 {
            self.held.shrink(WAITING_BYTES);
            self.is_waiting = false;
        }
        Ok(())
    }

    /// Charges the memory of a call that waits for its client.
    ///
    /// # Errors
    /// If there is no room for it.
    fn begin_wait(&mut self) -> Result<(), Status> {
        if self.is_waiting || self.may_pause {
            return Ok(());
        }
        if let Err(inflight) = self.held.try_grow(WAITING_BYTES + self.uncharged) {
            let refused = self.refused.take();
            return Err(refused.unwrap_or_else(|| self.held.refuse(inflight)));
        }
        self.uncharged = 0;
        self.is_waiting = true;
        Ok(())
    }

    /// Notes that the request is refused. Only its head stays charged while the rest arrives.
    ///
    /// # Errors
    /// With the refusal, if there is no room for the head: then the request is answered at once.
    fn refuse(&mut self, why: Status) -> Result<(), Status> {
        self.held.give_back();
        self.is_waiting = false;
        if self.held.try_grow(self.head).is_err() {
            return Err(why);
        }
        self.uncharged = 0;
        self.refused = Some(why);
        Ok(())
    }

    /// Resolves with the reason when the client was waited for long enough. `None`: it waited between two messages, and
    /// the server drains.
    fn poll_over(&mut self, context: &mut Context<'_>) -> Poll<Option<Status>> {
        let between = self.may_pause && self.left == 0 && self.received == 0;
        let limit = match between {
            true => BETWEEN_MESSAGES,
            false => message_time(self.length),
        };
        let phase = &self.held.admission.phase;
        let wait = (self.wait).get_or_insert_with(|| Box::new(Wait::new(phase)));
        // Between two messages nothing is held.
        let budget = (!between).then(|| self.held.budget().0);
        ready!(wait.poll_over(context, limit, budget));
        let why = (self.refused.take()).unwrap_or_else(|| status::message_too_slow(self.access));
        Poll::Ready((!between).then_some(why))
    }
}

impl Body for AdmittedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        loop {
            let Poll::Ready(frame) = Pin::new(&mut this.inner).poll_frame(context) else {
                if let Err(busy) = this.begin_wait() {
                    return Poll::Ready(Some(Err(busy.into())));
                }
                let status = ready!(this.poll_over(context));
                return Poll::Ready(status.map(|status| Err(status.into())));
            };
            let Some(Ok(data)) = (frame.as_ref()).map(|frame| frame.as_ref().map(Frame::data_ref))
            else {
                // The end: now a refusal can be sent.
                let refused = this.refused.take().map(|status| Err(status.into()));
                return Poll::Ready(refused.or(frame.map(|frame| frame.map_err(Into::into))));
            };
            let Some(data) = data else {
                return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
            };
            if this.refused.is_none() {
                match this.charge(data) {
                    Ok(()) if this.may_pause => {
                        if let Some(wait) = &mut this.wait {
                            wait.patience.moved();
                        }
                        return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
                    }
                    Ok(()) => return Poll::Ready(frame.map(|frame| frame.map_err(Into::into))),
                    Err(status) => {
                        if let Err(refused) = this.refuse(status) {
                            return Poll::Ready(Some(Err(refused.into())));
                        }
                    }
                }
            }
            this.dropped += data.len() as u64;
            if this.dropped > MOST_DROPPED
                && let Some(status) = this.refused.take()
            {
                return Poll::Ready(Some(Err(status.into())));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream() && self.refused.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 1024;

    /// Admits requests until none fits; returns their bytes.
    fn fill(budget: &Budget, own: &AtomicU64) -> u64 {
        std::iter::from_fn(|| budget.take(own, 0, BYTES).ok())
            .map(|()| BYTES)
            .sum()
    }

    #[test]
    fn greedy_connections_leave_as_much_as_each_of_them_has() {
        let budget = Budget::new(64 << 10);
        let [first, second, small] = [const { AtomicU64::new(0) }; 3];
        let held = fill(&budget, &first);
        assert_eq!(held, 32 << 10);
        let more = fill(&budget, &second);
        assert_eq!(more, 16 << 10);
        assert_eq!(fill(&budget, &first), 0);
        assert!(budget.take(&small, 0, BYTES).is_ok());
        budget.give_back(&small, BYTES);
        budget.give_back(&first, held);
        budget.give_back(&second, more);
        assert_eq!(budget.total.load(Ordering::Relaxed), 0);
        assert_eq!(fill(&budget, &first), 32 << 10);
    }

    #[test]
    fn request_larger_than_the_budget_passes_alone() {
        let budget = Budget::new(4096);
        let [large, other] = [const { AtomicU64::new(0) }; 2];
        // In parts, as it arrives.
        for part in 0..16 {
            assert_eq!(budget.look(&large, 0, 64 << 10).is_ok(), part == 0);
            assert!(budget.take(&large, part << 16, 1 << 16).is_ok());
        }
        assert_eq!(budget.take(&other, 0, 1), Err(1 << 20));
        budget.give_back(&large, 1 << 20);
        assert!(budget.take(&other, 0, 1).is_ok());
    }
}
