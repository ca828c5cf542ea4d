//! A call of one message and one answer.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue};
use http_body::{Body, Frame};
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};
use tower::BoxError;
use wald_proto::codec::{Decode, Encode};

use super::framed::framed;
use crate::admission::{PREFIX_BYTES, announced_length};
use crate::answers::{AnswerShare, Counted, Held, SMALL_BYTES, may_be_hurried};
use crate::status::{self, Access};
use crate::transport::HttpResult;

/// A shorter message is copied: it may be a small part of a buffer of the connection, which it
/// would hold as long as it waits for a flush.
const KEPT: usize = 4 << 10;

/// Bytes of an announced message that memory is taken for at once; for more of it when that has come.
const BELIEVED: usize = 64 << 10;

/// Takes the request's message, of at most `largest` bytes, and sends the answer that `serve` gives.
///
/// The answer counts among those that wait for their clients, in the room that `serve` has reserved for
/// it. One without a room is sent whatever waits: it says that a write was applied.
///
/// The captured values move into the future once, because the size of this future is allocated
/// for each call.
pub(super) fn unary<B, M, R>(
    request: http::Request<B>,
    access: Access,
    largest: usize,
    serve: impl AsyncFnOnce(Request<M>) -> Result<(Response<R>, Option<Held>), Status>,
) -> impl Future<Output = HttpResult>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
    M: Decode,
    R: Encode,
{
    let (head, mut body) = request.into_parts();
    let metadata = MetadataMap::from_headers(head.headers);
    let extensions = head.extensions;
    let share = extensions.get::<AnswerShare>().cloned();
    async move {
        let message = match receive(&mut body, access, largest).await {
            Ok(message) => message,
            Err(status) => return Ok(status.into_http()),
        };
        let message = match M::take(message) {
            Ok(message) => message,
            Err(status) => return Ok(status::received(status, access).into_http()),
        };
        let answer = serve(Request::from_parts(metadata, extensions, message)).await;
        let answer = answer.and_then(|(answer, held)| respond(answer, held, share.as_ref()));
        let answer = answer.unwrap_or_else(Status::into_http);
        Ok(hurried_if_read(answer, access))
    }
}

/// Takes the request's message, of at most `largest` bytes, and passes the call on to a service
/// of tonic's. Without this check, tonic takes two messages for one, and blames the server for
/// bytes that are no message. A call that reads is BUSY while there is no room for answers.
pub(crate) fn checked<B, F>(
    request: http::Request<B>,
    access: Access,
    largest: usize,
    serve: impl FnOnce(http::Request<tonic::body::Body>) -> F,
) -> impl Future<Output = HttpResult>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
    F: Future<Output = HttpResult>,
{
    let (head, mut body) = request.into_parts();
    let share = head.extensions.get::<AnswerShare>().cloned();
    async move {
        let message = match receive(&mut body, access, largest).await {
            Ok(message) => message,
            Err(status) => return Ok(status.into_http()),
        };
        if let (Access::Read, Some(share)) = (access, &share)
            && let Err(busy) = share.room().await
        {
            return Ok(busy.into_http());
        }
        let message = match framed(&AsItCame(message)) {
            Ok(message) => tonic::body::Body::new(One {
                left: Left::Message(message),
                _held: None,
            }),
            Err(status) => return Ok(status.into_http()),
        };
        let answer = serve(http::Request::from_parts(head, message)).await?;
        let headers = answer.headers();
        // Every INTERNAL of Wald's has details.
        let is_tonics = (headers.get(Status::GRPC_STATUS)).is_some_and(|code| code == "13")
            && !headers.contains_key("grpc-status-details-bin");
        match Status::from_header_map(headers).filter(|_| is_tonics) {
            Some(status) => Ok(status::received(status, access).into_http()),
            None => Ok(hurried_if_read(
                Counted::answer(answer, share, None),
                access,
            )),
        }
    }
}

/// Marks the answer to a read. The answer to a write is never cut off: it tells its client whether the write was
/// applied.
fn hurried_if_read(
    answer: http::Response<tonic::body::Body>,
    access: Access,
) -> http::Response<tonic::body::Body> {
    match access {
        Access::Read => may_be_hurried(answer),
        Access::Write => answer,
    }
}

fn respond<R: Encode>(
    answer: Response<R>,
    held: Option<Held>,
    share: Option<&AnswerShare>,
) -> Result<http::Response<tonic::body::Body>, Status> {
    let (metadata, message, extensions) = answer.into_parts();
    let message = framed(&message)?;
    let bytes = message.len() as u64;
    let held = match held {
        Some(mut held) => {
            held.set(bytes);
            Some(held)
        }
        None => share
            .filter(|_| bytes >= SMALL_BYTES)
            .map(|share| share.count(bytes)),
    };
    let body = tonic::body::Body::new(One {
        left: Left::All(message),
        _held: held,
    });
    let mut response = http::Response::new(body);
    *response.extensions_mut() = extensions;
    *response.headers_mut() = metadata.into_headers();
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    Ok(response)
}

/// The one message of a request.
///
/// # Errors
/// `MALFORMED_REQUEST` if there is none, or not all of it, or more than one; `REQUEST_TOO_LARGE` if it
/// has more than `largest` bytes. The answer waits until all has come: a stream that is reset while
/// its client still sends counts as misbehaviour of the client, whose connection ends over a few of
/// them.
async fn receive<B>(body: &mut B, access: Access, largest: usize) -> Result<Bytes, Status>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
{
    let mut received = Ok(Received::default());
    while !body.is_end_stream() {
        match poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await {
            Some(Ok(frame)) => {
                // Trailers of a request mean nothing here.
                if let Ok(data) = frame.into_data() {
                    received = received.and_then(|so_far| so_far.go_on(data, access, largest));
                }
            }
            Some(Err(error)) => return Err(Status::from_error(error.into())),
            None => break,
        }
    }
    received?.message(access)
}

/// The received part of a message and its prefix.
#[derive(Default)]
struct Received {
    /// The bytes that came first.
    first: Bytes,
    /// All of it, once there is more than that.
    joined: BytesMut,
}

impl Received {
    fn bytes(&self) -> &[u8] {
        if self.joined.is_empty() {
            &self.first
        } else {
            &self.joined
        }
    }

    fn go_on(mut self, data: Bytes, access: Access, largest: usize) -> Result<Self, Status> {
        if self.bytes().is_empty() {
            self.first = data;
        } else if !data.is_empty() {
            if self.joined.is_empty() {
                // The length is only announced: the bytes that have arrived limit the memory
                // taken for it.
                let length = length(&self.first, access)?.unwrap_or_default();
                let believed = length.min(BELIEVED.max(2 * self.first.len()));
                self.joined.reserve(PREFIX_BYTES + believed);
                self.joined.extend_from_slice(&self.first);
                self.first = Bytes::new();
            }
            self.joined.extend_from_slice(&data);
        }
        match length(self.bytes(), access)? {
            Some(length) if length > largest => Err(status::message_too_large(
                length as u64,
                largest as u64,
                access,
            )),
            Some(length) if self.bytes().len() > PREFIX_BYTES + length => {
                let why = format_args!(
                    "its message has {length} bytes, and more came behind it; the call takes one message"
                );
                Err(status::malformed("request", why, access))
            }
            _ => Ok(self),
        }
    }

    fn message(self, access: Access) -> Result<Bytes, Status> {
        let bytes = self.bytes();
        if bytes.is_empty() {
            let why = "it has no message; the call takes one";
            return Err(status::malformed("request", why, access));
        }
        if length(bytes, access)?.is_none_or(|length| bytes.len() < PREFIX_BYTES + length) {
            let why = format_args!("its message is cut off after {} bytes", bytes.len());
            return Err(status::malformed("request", why, access));
        }
        Ok(if !self.joined.is_empty() {
            self.joined.freeze().split_off(PREFIX_BYTES)
        } else if self.first.len() < KEPT {
            Bytes::copy_from_slice(&self.first[PREFIX_BYTES..])
        } else {
            self.first.slice(PREFIX_BYTES..)
        })
    }
}

/// Length of the message that begins with these bytes; `None` if that is not known yet.
fn length(received: &[u8], access: Access) -> Result<Option<usize>, Status> {
    let Some(&prefix) = received.first_chunk::<PREFIX_BYTES>() else {
        return Ok(None);
    };
    let length = announced_length(prefix, access)?;
    Ok(Some(usize::try_from(length).unwrap_or(usize::MAX)))
}

/// A message that stays as it came.
struct AsItCame(Bytes);

impl Encode for AsItCame {
    fn length(&self) -> usize {
        self.0.len()
    }

    fn put(&self, buffer: &mut impl BufMut) {
        buffer.put_slice(&self.0);
    }
}

/// A body of one message.
struct One {
    left: Left,
    /// Its place among the answers that wait for their clients.
    _held: Option<Held>,
}

/// The rest of a body.
enum Left {
    All(Bytes),
    /// The message of a request, which ends without a status.
    Message(Bytes),
    Status,
    Nothing,
}

impl Body for One {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let (frame, left) = match std::mem::replace(&mut self.left, Left::Nothing) {
            Left::All(message) => (Frame::data(message), Left::Status),
            Left::Message(message) => (Frame::data(message), Left::Nothing),
            Left::Status => {
                let mut trailers = HeaderMap::with_capacity(1);
                trailers.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
                (Frame::trailers(trailers), Left::Nothing)
            }
            Left::Nothing => return Poll::Ready(None),
        };
        self.left = left;
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.left, Left::Nothing)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use tonic::Code;
    use wald_proto::codec::Sent;
    use wald_proto::v1::{AppendRequest, AppendResponse};

    use super::*;

    /// A request in the frames it came in.
    struct Frames(VecDeque<Frame<Bytes>>);

    impl Frames {
        fn of(data: &[&[u8]]) -> Self {
            let frame = |data: &&[u8]| Frame::data(Bytes::copy_from_slice(data));
            Self(data.iter().map(frame).collect())
        }
    }

    impl Body for Frames {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(self.0.pop_front().map(Ok))
        }
    }

    /// With its prefix.
    fn sent(message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap();
        [&[0], &length.to_be_bytes()[..], message].concat()
    }

    #[tokio::test]
    async fn message_is_whole_however_its_frames_are_cut() {
        for size in [0, 1, 7, KEPT - PREFIX_BYTES - 1, KEPT, 3 * KEPT] {
            let message: Vec<u8> = (0..=250).cycle().take(size).collect();
            let sent = sent(&message);
            let cuts = (0..sent.len().min(20)).chain([sent.len() / 2, sent.len()]);
            for (first, second) in cuts
                .clone()
                .flat_map(|cut| cuts.clone().map(move |c| (cut, c)))
            {
                let (first, second) = (first.min(second), first.max(second));
                let frames = [&sent[..first], &[], &sent[first..second], &sent[second..]];
                let received = receive(&mut Frames::of(&frames), Access::Read, 3 * KEPT)
                    .await
                    .unwrap();
                assert_eq!(received, message, "{size} bytes cut at {first}, {second}");
            }
        }
    }

    #[tokio::test]
    async fn large_message_is_not_copied() {
        let sent = Bytes::from(sent(&[7; KEPT]));
        // Many clients end a request with an empty frame.
        let frames = [sent.clone(), Bytes::new()].map(Frame::data);
        let mut frames = Frames(frames.into());
        let received = receive(&mut frames, Access::Write, KEPT).await.unwrap();
        assert_eq!(received.as_ptr(), sent[PREFIX_BYTES..].as_ptr());
    }

    #[tokio::test]
    async fn trailers_of_a_request_are_passed_over() {
        let mut frames = Frames::of(&[&sent(b"abc")]);
        frames.0.push_back(Frame::trailers(HeaderMap::new()));
        assert_eq!(
            receive(&mut frames, Access::Read, 3).await.unwrap(),
            b"abc"[..]
        );
    }

    #[tokio::test]
    async fn what_is_not_one_message_is_refused() {
        let two = sent(b"abc").repeat(2);
        let mut compressed = sent(b"abc");
        compressed[0] = 1;
        let mut odd = sent(b"abc");
        odd[0] = 2;
        let long = sent(b"abcd");
        let cases: [(&[&[u8]], Code, &str); 10] = [
            (&[], Code::InvalidArgument, "no message"),
            (&[b""], Code::InvalidArgument, "no message"),
            (&[b"\0"], Code::InvalidArgument, "cut off after 1 bytes"),
            (
                &[b"\0\0\0", b"\0\x02a"],
                Code::InvalidArgument,
                "cut off after 6 bytes",
            ),
            (
                &[&long[..5], &long[5..]],
                Code::InvalidArgument,
                "has 4 bytes; at most 3",
            ),
            (
                &[&long[..5]],
                Code::InvalidArgument,
                "has 4 bytes; at most 3",
            ),
            (&[&two], Code::InvalidArgument, "takes one message"),
            (
                &[&two[..8], &two[8..9]],
                Code::InvalidArgument,
                "takes one message",
            ),
            (
                &[&compressed],
                Code::InvalidArgument,
                "marked as compressed",
            ),
            (&[&odd], Code::InvalidArgument, "begins with '\\u{2}'"),
        ];
        for (frames, code, text) in cases {
            let mut body = Frames::of(frames);
            let status = receive(&mut body, Access::Write, 3).await.unwrap_err();
            assert_eq!(status.code(), code, "{frames:?}");
            assert!(body.0.is_empty(), "told before all had come: {frames:?}");
            assert!(status.message().contains(text), "{frames:?}: {status}");
        }
    }

    async fn call(
        serve: impl AsyncFnOnce(
            Request<Sent<AppendRequest>>,
        ) -> super::super::super::Answer<AppendResponse>,
    ) -> http::Response<tonic::body::Body> {
        let mut request = http::Request::new(Frames::of(&[&sent(b"xyz")]));
        request
            .headers_mut()
            .insert("x-asked", HeaderValue::from_static("yes"));
        request.extensions_mut().insert(7_u8);
        let serve = async |request| Ok((serve(request).await?, None));
        unary(request, Access::Write, 3, serve).await.unwrap()
    }

    #[tokio::test]
    async fn answer_is_one_message_and_its_status() {
        let message = AppendResponse {
            position: Some(300),
            ..AppendResponse::default()
        };
        let mut response = call(async |request: Request<Sent<AppendRequest>>| {
            assert_eq!(request.metadata().get("x-asked").unwrap(), "yes");
            assert_eq!(request.extensions().get(), Some(&7_u8));
            assert_eq!(request.into_inner().bytes, b"xyz"[..]);
            let mut answer = Response::new(message);
            answer
                .metadata_mut()
                .insert("x-told", "too".parse().unwrap());
            Ok(answer)
        })
        .await;
        assert_eq!(response.headers()[CONTENT_TYPE], "application/grpc");
        assert_eq!(response.headers()["x-told"], "too");
        let mut body = Pin::new(response.body_mut());
        let mut frames = Vec::new();
        while let Some(frame) = poll_fn(|context| body.as_mut().poll_frame(context)).await {
            frames.push(frame.unwrap());
        }
        let [data, trailers] = &frames[..] else {
            panic!("{frames:?}");
        };
        let mut encoded = Vec::new();
        message.put(&mut encoded);
        assert_eq!(data.data_ref().unwrap()[..], sent(&encoded));
        assert_eq!(trailers.trailers_ref().unwrap()["grpc-status"], "0");
        assert!(body.is_end_stream());
    }

    #[tokio::test]
    async fn refusal_is_told_in_the_head() {
        let refused = async |_: Request<Sent<AppendRequest>>| Err(Status::aborted("no"));
        let response = call(refused).await;
        assert_eq!(response.headers()["grpc-status"], "10");
        assert_eq!(response.headers()["grpc-message"], "no");
        assert!(response.body().is_end_stream());
    }
}
