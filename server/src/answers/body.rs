//! Bodies of services that count nothing themselves.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tonic::Status;

use super::{AnswerShare, Held, SMALL_BYTES};

/// A body whose data counts until the transport polls for the next: then it was sent.
pub(crate) struct Counted {
    inner: tonic::body::Body,
    share: AnswerShare,
    held: Option<Held>,
    /// Room that the body holds as long as it is open.
    _open: Option<Held>,
}

impl Counted {
    /// The answer with its body counted as that connection's, and `open` tied to it.
    pub(crate) fn answer(
        answer: http::Response<tonic::body::Body>,
        share: Option<AnswerShare>,
        open: Option<Held>,
    ) -> http::Response<tonic::body::Body> {
        match share {
            Some(share) if !answer.body().is_end_stream() => answer.map(|inner| {
                tonic::body::Body::new(Self {
                    inner,
                    share,
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
            if bytes >= SMALL_BYTES {
                self.held = Some(self.share.count(bytes));
            }
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
