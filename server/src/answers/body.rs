//! Bodies of services that count nothing themselves.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tonic::Status;

use super::{AnswerShare, Held, SMALL_BYTES};

/// A body whose data counts until the transport polls for the next: then it was sent.
pub(crate) struct Counted {
    inner: tonic::body::Body,
    share: AnswerShare,
    /// Room that the RPC has reserved for its one message.
    reserved: Option<Held>,
    held: Option<Held>,
    /// Room that the body holds as long as it is open.
    _open: Option<Held>,
}

impl Counted {
    /// The answer with its body counted as that connection's, and `open` tied to it.
    pub(crate) fn answer(
        mut answer: http::Response<tonic::body::Body>,
        share: Option<AnswerShare>,
        open: Option<Held>,
    ) -> http::Response<tonic::body::Body> {
        let reserved = answer.extensions_mut().remove::<Arc<Held>>();
        match share {
            Some(share) if !answer.body().is_end_stream() => answer.map(|inner| {
                tonic::body::Body::new(Self {
                    inner,
                    share,
                    reserved: reserved.and_then(Arc::into_inner),
                    held: None,
                    _open: open,
                })
            }),
            _ => answer,
        }
    }
}

impl Body for Counted {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.held = None;
        let polled = Pin::new(&mut self.inner).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &polled {
            let bytes = frame.data_ref().map_or(0, Bytes::len) as u64;
            self.held = match self.reserved.take() {
                Some(mut held) => {
                    held.set(bytes);
                    Some(held)
                }
                None => (bytes >= SMALL_BYTES).then(|| self.share.count(bytes)),
            };
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
