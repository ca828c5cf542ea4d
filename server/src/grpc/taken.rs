//! Messages for gRPC and of gRPC, where a part of the daemon is the client.

use std::future::poll_fn;
use std::pin::Pin;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Response};
use http_body::Body;
use tonic::Status;

use super::prefix::{self, PREFIX_BYTES};
use crate::status::Access;

/// A message with its prefix.
///
/// # Errors
/// If it is larger than gRPC can say.
pub(crate) fn framed(message: &[u8]) -> Result<Bytes, Status> {
    let mut framed = BytesMut::with_capacity(PREFIX_BYTES + message.len());
    prefix::put(message.len(), &mut framed)?;
    framed.extend_from_slice(message);
    Ok(framed.freeze())
}

/// The messages of an answer, one after the other.
pub(crate) struct AnswerMessages<B> {
    body: B,
    received: BytesMut,
    has_ended: bool,
}

impl<B: Body<Data = Bytes> + Unpin> AnswerMessages<B> {
    /// Begins to read an answer.
    ///
    /// # Errors
    /// With the status of an answer that has no messages.
    pub(crate) fn open(answer: Response<B>) -> Result<Self, Status> {
        let (head, body) = answer.into_parts();
        ended(&head.headers)?;
        Ok(Self {
            body,
            received: BytesMut::new(),
            has_ended: false,
        })
    }

    /// The next message; `None` behind the last. The room of a message is taken until this is called again.
    ///
    /// # Errors
    /// With the status of an answer that ends otherwise than OK. Nothing follows it.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if let Some(message) = self.whole()? {
                return Ok(Some(message));
            }
            if self.has_ended {
                return Ok(None);
            }
            let frame = poll_fn(|context| Pin::new(&mut self.body).poll_frame(context)).await;
            let Some(frame) = frame else {
                self.has_ended = true;
                return Err(Status::internal("the answer ended without a status"));
            };
            let frame = frame.map_err(|_| Status::internal("the answer broke off"))?;
            match frame.into_data() {
                Ok(data) => self.received.extend_from_slice(&data),
                Err(frame) => {
                    self.has_ended = true;
                    if let Ok(trailers) = frame.into_trailers() {
                        ended(&trailers)?;
                    }
                }
            }
        }
    }

    fn whole(&mut self) -> Result<Option<Bytes>, Status> {
        let length = prefix::length(&self.received, Access::Read)?;
        let whole =
            length.and_then(|length| usize::try_from(length).ok()?.checked_add(PREFIX_BYTES));
        match whole {
            Some(whole) if whole <= self.received.len() => {
                let message = self.received.split_to(whole).freeze();
                Ok(Some(message.slice(PREFIX_BYTES..)))
            }
            _ => Ok(None),
        }
    }
}

/// Reads the status in a head or in trailers.
fn ended(headers: &HeaderMap) -> Result<(), Status> {
    match Status::from_header_map(headers) {
        Some(status) if status.code() != tonic::Code::Ok => Err(status),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::task::{Context, Poll};

    use http_body::Frame;
    use tonic::Code;

    use super::*;

    struct Frames(VecDeque<Frame<Bytes>>);

    impl Body for Frames {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(self.0.pop_front().map(Ok))
        }
    }

    fn answer(data: &[u8], size: usize, end: Option<Status>) -> AnswerMessages<Frames> {
        let data = data.chunks(size).map(Bytes::copy_from_slice);
        let mut frames: VecDeque<_> = data.map(Frame::data).collect();
        if let Some(end) = end {
            let mut trailers = HeaderMap::new();
            end.add_header(&mut trailers).unwrap();
            frames.push_back(Frame::trailers(trailers));
        }
        AnswerMessages::open(Response::new(Frames(frames))).unwrap()
    }

    #[tokio::test]
    async fn messages_are_whole_however_they_were_cut() {
        let sent = [
            framed(b"one").unwrap(),
            framed(b"").unwrap(),
            framed(b"three").unwrap(),
        ];
        for size in 1..20 {
            let mut taken = answer(&sent.concat(), size, Some(Status::ok("")));
            for wanted in ["one", "", "three"] {
                assert_eq!(taken.next().await.unwrap().unwrap(), wanted);
            }
            assert!(taken.next().await.unwrap().is_none());
            assert!(taken.next().await.unwrap().is_none());
        }
    }

    #[tokio::test]
    async fn answer_that_fails_or_breaks_off_ends_with_an_error() {
        let sent = framed(b"one").unwrap();
        let mut failed = answer(&sent, 100, Some(Status::data_loss("bad")));
        assert!(failed.next().await.unwrap().is_some());
        assert_eq!(failed.next().await.unwrap_err().code(), Code::DataLoss);
        assert!(failed.next().await.unwrap().is_none());
        let mut cut = answer(&sent, 100, None);
        assert!(cut.next().await.unwrap().is_some());
        assert_eq!(cut.next().await.unwrap_err().code(), Code::Internal);
        let mut refusal = Response::new(Frames(VecDeque::new()));
        Status::not_found("none")
            .add_header(refusal.headers_mut())
            .unwrap();
        let refused = AnswerMessages::open(refusal).err().unwrap();
        assert_eq!(refused.code(), Code::NotFound);
    }
}
