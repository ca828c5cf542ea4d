//! Streams of reflection requests, checked before tonic's service reads them.
//!
//! tonic-reflection drops a message that it cannot read and ends its answers with OK. Here the fault is kept, and
//! takes the place of that OK:
//!
//! ```text
//! body ─▶ Requests: decodes each message ─▶ tonic-reflection ─▶ Answers: the trailers, or the fault ─▶ client
//!            └──────────────── first fault ──────────────────────┘
//! ```

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes, BytesMut};
use http::{HeaderMap, Request, Response};
use http_body::{Body, Frame};
use parking_lot::Mutex;
use prost::Message as _;
use tonic::Status;
use tonic::body::Body as TonicBody;
use tonic_reflection::pb::v1::ServerReflectionRequest;

use crate::admission::{PREFIX_BYTES, RequestBody, announced_length};
use crate::status::{self, Access};

/// The first fault of a stream of requests.
#[derive(Clone, Default)]
pub(crate) struct Fault(Arc<Mutex<Option<Status>>>);

impl Fault {
    /// The request with its messages checked.
    pub(crate) fn of(request: Request<RequestBody>) -> (Request<TonicBody>, Self) {
        let fault = Self::default();
        let request = request.map(|inner| {
            TonicBody::new(Requests {
                inner,
                pending: BytesMut::new(),
                has_ended: false,
                fault: fault.clone(),
            })
        });
        (request, fault)
    }

    /// The answer, ended by the fault if there is one.
    pub(crate) fn in_answer(self, answer: Response<TonicBody>) -> Response<TonicBody> {
        answer.map(|inner| TonicBody::new(Answers { inner, fault: self }))
    }
}

/// The messages of a client. They end with the first that cannot be read.
struct Requests {
    inner: RequestBody,
    /// Bytes of the message that has not arrived whole: admission bounds them.
    pending: BytesMut,
    has_ended: bool,
    fault: Fault,
}

impl Requests {
    /// Takes the whole messages out of the pending bytes, up to the first that cannot be read.
    fn check(&mut self) -> Result<(), Status> {
        while let Some(prefix) = self.pending.first_chunk::<PREFIX_BYTES>() {
            let length = announced_length(*prefix, Access::Read)?;
            let end = usize::try_from(length)
                .unwrap_or(usize::MAX)
                .saturating_add(PREFIX_BYTES);
            let Some(message) = self.pending.get(PREFIX_BYTES..end) else {
                break;
            };
            ServerReflectionRequest::decode(message)
                .map_err(|why| status::malformed("request", why, Access::Read))?;
            self.pending.advance(end);
        }
        Ok(())
    }

    /// Ends the messages with a fault. `before`: data of earlier messages, which are still answered.
    fn end(&mut self, why: Status, before: Bytes) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        *self.fault.0.lock() = Some(why);
        self.has_ended = true;
        Poll::Ready((!before.is_empty()).then(|| Ok(Frame::data(before))))
    }
}

impl Body for Requests {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if this.has_ended {
            return Poll::Ready(None);
        }
        match ready!(Pin::new(&mut this.inner).poll_frame(context)) {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    this.pending.extend_from_slice(data);
                    if let Err(why) = this.check() {
                        let before = data.len().saturating_sub(this.pending.len());
                        return this.end(why, data.slice(..before));
                    }
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(error)) => this.end(Status::from_error(error), Bytes::new()),
            None if this.pending.is_empty() => Poll::Ready(None),
            None => {
                let why = "its last message did not arrive whole";
                this.end(
                    status::malformed("request", why, Access::Read),
                    Bytes::new(),
                )
            }
        }
    }
}

/// The answers to them.
struct Answers {
    inner: TonicBody,
    fault: Fault,
}

impl Body for Answers {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(context));
        let Some(Ok(ended)) = &frame else {
            return Poll::Ready(frame);
        };
        if ended.is_trailers()
            && let Some(fault) = self.fault.0.lock().take()
        {
            let mut trailers = HeaderMap::new();
            fault.add_header(&mut trailers)?;
            return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }
}
