//! Streams of reflection requests, checked before tonic's service reads them.
//!
//! tonic-reflection drops a message that it cannot read and ends its answers with OK. Here the fault is kept, and
//! takes the place of that OK:
//!
//! ```text
//! body ─▶ CheckedRequests: decode each message ─▶ tonic-reflection ─▶ CheckedAnswers: trailers or fault ─▶ client
//!            └──────────────── first fault ──────────────────────────────┘
//! ```

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Response};
use http_body::{Body, Frame};
use parking_lot::Mutex;
use prost::Message as _;
use tonic::Status;
use tonic::body::Body as TonicBody;
use tonic_reflection::pb::v1::ServerReflectionRequest;

use crate::admission::Passage;
use crate::auth::Lease;
use crate::grpc::Messages;
use crate::status::{self, Access};
use crate::transport::Patience;

/// Time between two messages: no bound until the server drains.
const BETWEEN_MESSAGES: Duration = Duration::from_secs(365 * 24 * 3600);

/// The first fault of a stream of requests.
#[derive(Clone, Default)]
pub(crate) struct FirstFault(Arc<Mutex<Option<Status>>>);

impl FirstFault {
    /// The body for tonic's service, with its messages checked.
    pub(crate) fn in_requests(&self, requests: Box<Messages>) -> TonicBody {
        TonicBody::new(CheckedRequests {
            patience: requests.patience(),
            inner: requests,
            room: None,
            fault: self.clone(),
        })
    }

    /// The answer, ended by the fault if there is one, and by the end of the lease.
    pub(crate) fn in_answer(
        self,
        answer: Response<TonicBody>,
        lease: Option<Lease>,
    ) -> Response<TonicBody> {
        answer.map(|inner| {
            TonicBody::new(CheckedAnswers {
                inner: Some(inner),
                fault: self,
                lease,
            })
        })
    }
}

/// The messages of a client. They end with the first that cannot be read.
struct CheckedRequests {
    inner: Box<Messages>,
    /// Room of the message before, until the next is polled for: then the message was answered.
    room: Option<Passage>,
    /// Ends the messages when the server drains.
    patience: Patience,
    fault: FirstFault,
}

impl Body for CheckedRequests {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if this.fault.0.lock().is_some() {
            return Poll::Ready(None);
        }
        this.room = None;
        this.inner.take_in(context);
        let Poll::Ready(next) = this.inner.poll_message(context) else {
            return this
                .patience
                .poll_over(context, BETWEEN_MESSAGES)
                .map(|()| None);
        };
        this.patience.moved();
        let checked = next.transpose().and_then(|next| {
            let Some((message, room)) = next else {
                return Ok(None);
            };
            this.room = Some(room);
            let framed = message.clone().framed();
            ServerReflectionRequest::decode(message.payload())
                .map_err(|why| status::malformed("request", why, Access::Read))?;
            Ok(Some(framed))
        });
        Poll::Ready(match checked {
            Ok(framed) => framed.map(|framed| Ok(Frame::data(framed))),
            Err(why) => {
                *this.fault.0.lock() = Some(why);
                None
            }
        })
    }
}

/// The answers to them.
struct CheckedAnswers {
    /// `None` once the lease has ended them.
    inner: Option<TonicBody>,
    fault: FirstFault,
    /// `None`: no right is needed.
    lease: Option<Lease>,
}

impl Body for CheckedAnswers {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let Some(inner) = &mut this.inner else {
            return Poll::Ready(None);
        };
        if let Some(lease) = &mut this.lease
            && let Poll::Ready(status) = lease.poll_ended(context)
        {
            this.inner = None;
            let mut trailers = HeaderMap::new();
            status.add_header(&mut trailers)?;
            return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
        }
        let frame = ready!(Pin::new(inner).poll_frame(context));
        let Some(Ok(ended)) = &frame else {
            return Poll::Ready(frame);
        };
        if ended.is_trailers()
            && let Some(fault) = this.fault.0.lock().take()
        {
            let mut trailers = HeaderMap::new();
            fault.add_header(&mut trailers)?;
            return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        (self.inner.as_ref()).is_none_or(TonicBody::is_end_stream)
    }
}
