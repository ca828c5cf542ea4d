//! Messages of answers, and the body in which they leave.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Response};
use http_body::{Body, Frame};
use smallvec::SmallVec;
use tonic::Status;
use wald_proto::codec::{Encode, Encoded};

use super::prefix::{self, PREFIX_BYTES};
use crate::answers::Held;
use crate::rpc::Answers;

/// Pieces of fewer bytes are copied and gathered. A small piece may belong to a large allocation, such as a group of
/// appends or a buffer, which it would hold until the message is sent.
const LARGE_BYTES: usize = 64 << 10;

/// The answer to a call: these messages, then the status.
pub(crate) fn answer(messages: Answers<Framed>) -> Response<tonic::body::Body> {
    response(Reply {
        rest: ReplyRest::Messages(messages),
        pieces: SmallVec::new().into_iter(),
        held: None,
    })
}

/// The answer to a call: this message, then the status OK. Its room comes along.
///
/// # Errors
/// If the message is larger than gRPC can say.
pub(super) fn answer_one<M: Encode>(
    answer: tonic::Response<M>,
) -> Result<Response<tonic::body::Body>, Status> {
    let (metadata, message, extensions) = answer.into_parts();
    let mut response = response(Reply {
        rest: ReplyRest::Good,
        pieces: Framed::together(std::iter::once(message))?
            .pieces
            .into_iter(),
        held: None,
    });
    *response.extensions_mut() = extensions;
    response.headers_mut().extend(metadata.into_headers());
    Ok(response)
}

fn response(reply: Reply) -> Response<tonic::body::Body> {
    let mut response = Response::new(tonic::body::Body::new(reply));
    let grpc = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(CONTENT_TYPE, grpc);
    response
}

/// The messages of an answer that are not made yet, and its status.
enum ReplyRest {
    Messages(Answers<Framed>),
    /// No message is left, and the status is OK.
    Good,
    /// The status was sent.
    Nothing,
}

/// A body: messages in pieces, and the status at the end. The pieces go to the connection unchanged, while tonic's own
/// body copies every message into a buffer of the call.
struct Reply {
    rest: ReplyRest,
    /// Pieces of the message that is being sent.
    pieces: smallvec::IntoIter<Pieces>,
    /// Room of that message, until all of it has left.
    held: Option<Held>,
}

/// Never fails: a failure is sent as a status.
impl Body for Reply {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        loop {
            if let Some(piece) = self.pieces.next() {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            self.held = None;
            let status = match &mut self.rest {
                ReplyRest::Messages(stream) => match ready!(stream.as_mut().poll_next(context)) {
                    Some(Ok(Framed { pieces, held })) => {
                        self.pieces = pieces.into_iter();
                        self.held = held;
                        continue;
                    }
                    Some(Err(status)) => status,
                    None => Status::ok(""),
                },
                ReplyRest::Good => Status::ok(""),
                ReplyRest::Nothing => return Poll::Ready(None),
            };
            // The stream is not needed any more.
            self.rest = ReplyRest::Nothing;
            let mut trailers = HeaderMap::new();
            let added = status.add_header(&mut trailers);
            return Poll::Ready(Some(added.map(|()| Frame::trailers(trailers))));
        }
    }
}

type Pieces = [Bytes; 2];

/// A message as gRPC sends it, small pieces gathered; or several small ones.
#[derive(Debug)]
pub(crate) struct Framed {
    pieces: SmallVec<Pieces>,
    held: Option<Held>,
}

impl Framed {
    fn of(pieces: SmallVec<Pieces>) -> Self {
        Self { pieces, held: None }
    }

    /// Holds that room, or the part that the message needs, until it has been sent.
    pub(crate) fn in_room(mut self, mut held: Held) -> Self {
        held.set(self.pieces.iter().map(|piece| piece.len() as u64).sum());
        self.held = Some(held);
        self
    }

    /// One message, small pieces gathered.
    ///
    /// # Errors
    /// If it is larger than gRPC can say.
    pub(crate) fn new(message: Encoded) -> Result<Self, Status> {
        let mut pieces = SmallVec::new();
        let mut small = begun(message.length(), message.length().min(LARGE_BYTES))?;
        for piece in message.into_pieces() {
            if piece.len() < LARGE_BYTES {
                small.extend_from_slice(&piece);
            } else {
                if !small.is_empty() {
                    pieces.push(std::mem::take(&mut small).freeze());
                }
                pieces.push(piece);
            }
        }
        if !small.is_empty() {
            pieces.push(small.freeze());
        }
        Ok(Self::of(pieces))
    }

    /// Small messages, one after another.
    ///
    /// # Errors
    /// If one is larger than gRPC can say.
    pub(crate) fn together<M: Encode>(messages: impl Iterator<Item = M>) -> Result<Self, Status> {
        let mut together = BytesMut::new();
        for message in messages {
            let length = message.length();
            together.reserve(PREFIX_BYTES + length);
            prefix::put(length, &mut together)?;
            message.put(&mut together);
        }
        let pieces = [together.freeze()].into_iter();
        Ok(Self::of(pieces.filter(|piece| !piece.is_empty()).collect()))
    }

    /// Appends `next` to the same piece, if that is the only one and then takes no more than
    /// `most` bytes.
    pub(crate) fn join(&mut self, next: &Self, most: usize) -> bool {
        let ([piece], [more]) = (self.pieces.as_mut_slice(), next.pieces.as_slice()) else {
            return false;
        };
        if piece.len() + more.len() > most {
            return false;
        }
        let mut joined = BytesMut::from(std::mem::take(piece));
        joined.extend_from_slice(more);
        *piece = joined.freeze();
        true
    }
}

#[cfg(test)]
impl Framed {
    /// The one message in it.
    pub(crate) fn decoded<M: prost::Message + Default>(&self) -> M {
        M::decode(&self.pieces.concat()[PREFIX_BYTES..]).unwrap()
    }
}

/// The prefix of a message of `length` bytes, with room for `room` bytes of it.
fn begun(length: usize, room: usize) -> Result<BytesMut, Status> {
    let mut begun = BytesMut::with_capacity(PREFIX_BYTES + room);
    prefix::put(length, &mut begun)?;
    Ok(begun)
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;

    use futures_util::stream;

    use super::*;

    fn encoded(pieces: &[usize]) -> Encoded {
        let mut message = Encoded::default();
        for (number, length) in pieces.iter().enumerate() {
            message.push(vec![u8::try_from(number).unwrap(); *length]);
        }
        message
    }

    #[test]
    fn small_pieces_are_gathered_and_large_ones_are_not_copied() {
        let large = Bytes::from(vec![9; LARGE_BYTES]);
        let mut message = encoded(&[1, 2]);
        message.push(large.clone());
        message.push(vec![3; 4]);
        let Framed { pieces, .. } = Framed::new(message).unwrap();
        let length = u8::try_from(LARGE_BYTES >> 16).unwrap();
        assert_eq!(pieces[0][..], [0, 0, length, 0, 7, 0, 1, 1]);
        assert_eq!(pieces[1].as_ptr(), large.as_ptr());
        assert_eq!(pieces[2][..], [3; 4]);
        let Framed { pieces: empty, .. } = Framed::new(Encoded::default()).unwrap();
        assert_eq!(empty.concat(), [0; 5]);
    }

    #[test]
    fn small_messages_leave_in_one_piece() {
        let messages = [encoded(&[2]), encoded(&[]), encoded(&[0, 300])];
        let mut alone = Vec::new();
        for message in messages.clone() {
            alone.extend(Framed::new(message).unwrap().pieces.concat());
        }
        let Framed {
            pieces: together, ..
        } = Framed::together(messages.into_iter()).unwrap();
        assert_eq!(together.len(), 1);
        assert_eq!(together[0], alone);
        let message = || Framed::new(encoded(&[3, 4])).unwrap();
        let mut joined = message();
        assert!(joined.join(&message(), 24));
        assert_eq!(joined.pieces.concat(), message().pieces.concat().repeat(2));
        assert_eq!(joined.pieces.len(), 1);
        assert!(!joined.join(&message(), 35));
        let Framed { pieces: none, .. } =
            Framed::together(Vec::<Encoded>::new().into_iter()).unwrap();
        assert!(none.is_empty());
    }

    #[tokio::test]
    async fn body_ends_with_its_status() {
        let good = || Framed::new(encoded(&[3]));
        for (end, code) in [(None, "0"), (Some(Status::data_loss("bad")), "15")] {
            let messages = [good(), good()].into_iter().chain(end.map(Err));
            let stream: Answers<Framed> = Box::pin(stream::iter(messages.collect::<Vec<_>>()));
            let mut body = pin!(answer(stream).into_body());
            let (mut bytes, mut trailers) = (Vec::new(), None);
            while let Some(frame) = poll_fn(|context| body.as_mut().poll_frame(context)).await {
                let frame = frame.unwrap();
                assert!(trailers.is_none(), "nothing comes after the trailers");
                trailers = frame.trailers_ref().cloned();
                bytes.extend(frame.into_data().unwrap_or_default());
            }
            assert_eq!(bytes, [0, 0, 0, 0, 3, 0, 0, 0].repeat(2));
            assert_eq!(trailers.unwrap()["grpc-status"], code);
        }
    }
}
