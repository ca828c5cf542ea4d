//! Who may have how much under way: the bytes of appends that are being received or wait
//! for their ack, shared fairly by connections.
//!
//! A request is admitted by the length that stands before its message, before the message
//! itself is received: what comes of a request that is turned away is dropped as it comes.
//! So a connection that sends faster than the disk takes fills its share and not the server.
//!
//! The answer waits for the end of the message all the same. Given before, it resets the
//! stream, whose data is still under way; HTTP/2 counts that as misbehaviour of the client,
//! and soon ends its connection with all that was admitted on it.
//!
//! **The share**: a connection may have under way as much as is still free for others. Alone
//! it gets half of `max_inflight_bytes`; two greedy ones a third each; and whoever has
//! nothing under way finds room. The engine's own budget stands behind.
//!
//! Sessions take from the same budget, and wait instead of being turned away ([`session`]).

mod session;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use http::Request;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use pin_project_lite::pin_project;
use tonic::Status;
use tower::BoxError;
use wald_storage::AppendError;

use crate::metrics::Metrics;
use crate::status::{self, Access};
use crate::transport::Peer;
use session::SessionBody;
pub(crate) use session::{Passage, Window};

/// The RPCs that carry records.
const APPENDS: [&str; 2] = [
    "/wald.v1.WalService/Append",
    "/wald.v1.WalService/AppendBatch",
];

/// The RPC whose messages wait to be admitted.
const SESSION: &str = "/wald.v1.WalService/AppendSession";

/// What a request takes besides its message: names, places, its answer.
const REQUEST_OVERHEAD: u64 = 512;

/// A gRPC message begins with whether it is compressed, and its length in four bytes.
pub(crate) const PREFIX_BYTES: usize = 5;

/// What one connection has under way, in bytes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Share(Arc<AtomicU64>);

/// What all connections have under way.
pub(crate) struct Admission {
    limit: u64,
    total: AtomicU64,
    session_window: u64,
    largest_message: u64,
    metrics: Arc<Metrics>,
}

/// Bytes taken from the budget, given back when it is dropped.
pub(crate) struct Permit {
    admission: Arc<Admission>,
    share: Share,
    bytes: u64,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.admission.give_back(&self.share, self.bytes);
    }
}

impl Admission {
    /// A budget of so many bytes. A session may have `session_window` of them under way; of a
    /// message that is longer than `largest_message` nothing is kept.
    pub(crate) fn new(
        limit: u64,
        session_window: u64,
        largest_message: u64,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        Arc::new(Self {
            limit,
            total: AtomicU64::new(0),
            session_window,
            largest_message,
            metrics,
        })
    }

    /// Admits a message of so many bytes; who is turned away is counted.
    fn admit(self: &Arc<Self>, share: &Share, length: u64) -> Result<Permit, AppendError> {
        let bytes = self
            .take(share, length)
            .inspect_err(|error| self.metrics.write_failed(error))?;
        Ok(Permit {
            admission: Arc::clone(self),
            share: share.clone(),
            bytes,
        })
    }

    /// Takes a message of so many bytes into the budget: what it takes, to be given back. Or says
    /// what is in the way.
    fn take(&self, share: &Share, length: u64) -> Result<u64, AppendError> {
        let bytes = length + REQUEST_OVERHEAD;
        let total = self.total.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let own = share.0.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let free = self.limit.saturating_sub(total);
        // A request larger than the whole budget passes when it is alone.
        let first = own == bytes && (total <= self.limit || total == bytes);
        if first || own <= free {
            return Ok(bytes);
        }
        self.give_back(share, bytes);
        Err(AppendError::Busy {
            inflight: total - bytes,
            limit: self.limit,
        })
    }

    /// Takes more, whatever is free.
    fn take_more(&self, share: &Share, bytes: u64) {
        share.0.fetch_add(bytes, Ordering::Relaxed);
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    fn give_back(&self, share: &Share, bytes: u64) {
        share.0.fetch_sub(bytes, Ordering::Relaxed);
        self.total.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The call that `serve` makes of a request of that connection, whose appends are admitted
    /// before they are received.
    pub(crate) fn call<F>(
        self: &Arc<Self>,
        peer: &Peer,
        mut request: Request<Incoming>,
        serve: impl FnOnce(Request<RequestBody>) -> F,
    ) -> AdmittedCall<F> {
        if APPENDS.contains(&request.uri().path()) {
            let place = Arc::new(Place::default());
            let request = request.map(|inner| RequestBody::Append {
                inner: AdmittedBody {
                    inner,
                    prefix: [0; PREFIX_BYTES],
                    received: 0,
                    refused: None,
                    admission: Arc::clone(self),
                    share: peer.share.clone(),
                    place: Arc::clone(&place),
                },
            });
            return AdmittedCall {
                inner: serve(request),
                place: Some(place),
            };
        }
        let request = if request.uri().path() == SESSION {
            let window = Window::new(self, &peer.share);
            request.extensions_mut().insert(window.clone());
            request.extensions_mut().insert(peer.clone());
            request.map(|inner| {
                let inner = tonic::body::Body::new(inner);
                let inner = SessionBody::new(inner, window);
                RequestBody::Session { inner }
            })
        } else {
            request.map(|inner| RequestBody::Plain { inner })
        };
        AdmittedCall {
            inner: serve(request),
            place: None,
        }
    }
}

pin_project! {
    /// What services receive of a request.
    #[project = Received]
    pub(crate) enum RequestBody {
        Plain { #[pin] inner: Incoming },
        Append { #[pin] inner: AdmittedBody },
        Session { #[pin] inner: SessionBody },
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project() {
            Received::Plain { inner } => boxed(inner.poll_frame(context)),
            Received::Append { inner } => inner.poll_frame(context),
            Received::Session { inner } => boxed(inner.poll_frame(context)),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Plain { inner } => inner.is_end_stream(),
            Self::Append { inner } => inner.is_end_stream(),
            Self::Session { inner } => inner.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Plain { inner } => inner.size_hint(),
            Self::Append { inner } => inner.size_hint(),
            Self::Session { inner } => inner.size_hint(),
        }
    }
}

type Polled<E> = Poll<Option<Result<Frame<Bytes>, E>>>;

fn boxed<E: Into<BoxError>>(polled: Polled<E>) -> Polled<BoxError> {
    polled.map(|frame| frame.map(|frame| frame.map_err(Into::into)))
}

/// Where the body puts the permit, for the call to keep it until the answer.
type Place = std::sync::OnceLock<Permit>;

pin_project! {
    /// A call; what it took is given back with its answer.
    pub(crate) struct AdmittedCall<F> {
        #[pin]
        inner: F,
        place: Option<Arc<Place>>,
    }
}

impl<F, T> Future for AdmittedCall<F>
where
    F: Future<Output = T>,
{
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let this = self.project();
        let answer = ready!(this.inner.poll(context));
        *this.place = None;
        Poll::Ready(answer)
    }
}

pin_project! {
    /// The body of an append, which goes on after its prefix only if it is admitted.
    pub(crate) struct AdmittedBody {
        #[pin]
        inner: Incoming,
        prefix: [u8; PREFIX_BYTES],
        // How much of the prefix there is.
        received: usize,
        refused: Option<Status>,
        admission: Arc<Admission>,
        share: Share,
        place: Arc<Place>,
    }
}

impl Body for AdmittedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut this = self.project();
        loop {
            let frame = ready!(boxed(this.inner.as_mut().poll_frame(context)));
            let Some(Ok(data)) = frame
                .as_ref()
                .map(|frame| frame.as_ref().map(Frame::data_ref))
            else {
                // The end: now it can be told.
                let refused = this.refused.take().map(|status| Err(status.into()));
                return Poll::Ready(refused.or(frame));
            };
            let missing = &mut this.prefix[*this.received..];
            if !missing.is_empty()
                && let Some(data) = data
            {
                let part = missing.len().min(data.len());
                missing[..part].copy_from_slice(&data[..part]);
                *this.received += part;
                if *this.received == PREFIX_BYTES {
                    let length = u64::from((&this.prefix[1..]).get_u32());
                    let most = this.admission.largest_message;
                    // What no request may have takes no room from others while it comes.
                    let admitted = match length > most {
                        true => Err(status::message_too_large(length, most, Access::Write)),
                        false => (this.admission.admit(this.share, length))
                            .map_err(|error| status::append(&error)),
                    };
                    match admitted {
                        Ok(permit) => drop(this.place.set(permit)),
                        Err(status) => *this.refused = Some(status),
                    }
                }
            }
            if this.refused.is_none() {
                return Poll::Ready(frame);
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 1024 - REQUEST_OVERHEAD;

    fn admission(limit: u64) -> Arc<Admission> {
        Admission::new(limit, 1 << 20, 8 << 20, Arc::new(Metrics::new().unwrap()))
    }

    fn fill(admission: &Arc<Admission>, share: &Share) -> Vec<Permit> {
        std::iter::from_fn(|| admission.admit(share, BYTES).ok()).collect()
    }

    #[test]
    fn greedy_connections_leave_as_much_as_each_of_them_has() {
        let admission = admission(64 << 10);
        let (first, second, small) = (Share::default(), Share::default(), Share::default());
        let held = fill(&admission, &first);
        assert_eq!(held.len(), 32);
        let more = fill(&admission, &second);
        assert_eq!(more.len(), 16);
        assert!(fill(&admission, &first).is_empty());
        assert!(admission.admit(&small, BYTES).is_ok());
        drop((held, more));
        assert_eq!(admission.total.load(Ordering::Relaxed), 0);
        assert_eq!(fill(&admission, &first).len(), 32);
    }

    #[test]
    fn request_larger_than_the_budget_passes_alone_and_is_told_what_is_in_the_way() {
        let admission = admission(4096);
        let share = Share::default();
        let large = admission.admit(&share, 1 << 20).unwrap();
        let refused = admission.admit(&Share::default(), 1).map(|_| ());
        let inflight = (1 << 20) + REQUEST_OVERHEAD;
        assert!(matches!(
            refused,
            Err(AppendError::Busy { inflight: at, limit: 4096 }) if at == inflight
        ));
        drop(large);
        assert!(admission.admit(&Share::default(), 1).is_ok());
    }
}
