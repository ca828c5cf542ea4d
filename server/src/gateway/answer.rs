//! An answer of a call as JSON, as lines of JSON, or as server-sent events.
//!
//! ```text
//! call ── messages ──▶ AnswerForm ── text ──▶ TextSender ─▶ channel of one piece ─▶ TextBody ── socket
//!  (thread of the API)                        counted until it is taken       (thread of the HTTP port)
//! ```
//!
//! The next message is read when the text of the one before has been taken, so that a client that reads nothing costs
//! one message.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body::Frame;
use prost_reflect::{DynamicMessage, MessageDescriptor, SerializeOptions, Value};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use super::contract::descriptors;
use crate::answers::{AnswerShare, Held};
use crate::drain::Phase;
use crate::status::{self, Access};
use crate::transport::{Hurry, Patience};

/// The type of a stream of events.
pub(super) const EVENTS: &str = "text/event-stream";
/// The type of a stream of lines.
pub(super) const LINES: &str = "application/x-ndjson";
const JSON: &str = "application/json";

/// Bytes of text that are handed to the HTTP port at a time.
const PIECE_BYTES: usize = 64 << 10;
/// Seconds after which a piece must have moved when others wait for the memory of answers.
const HURRY_SECONDS: u64 = 4;
/// Longest wait for a client. The HTTP port has a bound of its own; only a server that drains has less time.
const UNTIL_DRAINING: Duration = Duration::from_secs(365 * 24 * 3600);
/// Bytes before each message of gRPC, which count with it.
const PREFIX_BYTES: usize = 5;
/// Least pause of a browser before it opens a stream of events again.
const RETRY: Duration = Duration::from_secs(1);

/// The form of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AnswerForm {
    /// One message.
    Json,
    /// Each message is a line.
    Lines,
    /// Each message is an event. Its id is the cursor behind the message.
    Events,
}

impl AnswerForm {
    /// The form of a stream, by the types that the client accepts.
    pub(super) fn of_stream(headers: &HeaderMap) -> Self {
        let accepted = headers.get_all(header::ACCEPT).iter();
        let takes_events = accepted
            .filter_map(|list| list.to_str().ok())
            .any(|list| list.contains(EVENTS));
        match takes_events {
            true => Self::Events,
            false => Self::Lines,
        }
    }

    fn content_type(self) -> &'static str {
        match self {
            Self::Json => JSON,
            Self::Lines => LINES,
            Self::Events => EVENTS,
        }
    }

    /// The text before the first message.
    pub(super) fn begin(self) -> Option<Bytes> {
        match self {
            Self::Json | Self::Lines => None,
            Self::Events => Some(format!("retry: {}\n\n", RETRY.as_millis()).into()),
        }
    }

    /// The text of a message.
    ///
    /// # Errors
    /// If the bytes are no such message, which is a bug.
    pub(super) fn message(self, kind: &MessageDescriptor, bytes: Bytes) -> Result<Bytes, Status> {
        let failed = |why: String| Status::internal(format!("an answer cannot be shown: {why}"));
        let message =
            DynamicMessage::decode(kind.clone(), bytes).map_err(|why| failed(why.to_string()))?;
        let text = json_of(&message).map_err(|why| failed(why.to_string()))?;
        Ok(match self {
            Self::Json | Self::Lines => format!("{text}\n"),
            Self::Events => match message.get_field_by_name("cursor").as_deref() {
                Some(Value::Bytes(cursor)) if !cursor.is_empty() => {
                    format!("id: {}\ndata: {text}\n\n", STANDARD.encode(cursor))
                }
                _ => format!("data: {text}\n\n"),
            },
        }
        .into())
    }

    /// The text behind the last message of a stream.
    pub(super) fn end(self, ended: &Result<(), Status>) -> Option<Bytes> {
        match (self, ended) {
            (Self::Json | Self::Lines, Ok(())) => None,
            (Self::Json | Self::Lines, Err(status)) => {
                Some(format!("{}\n", error(http_code(status.code()), status)).into())
            }
            (Self::Events, Ok(())) => Some("event: end\ndata: {}\n\n".into()),
            (Self::Events, Err(status)) => Some(failure(status)),
        }
    }

    /// The answer to a call that failed at once.
    pub(super) fn refusal(self, status: &Status) -> Response<Body> {
        let passes = matches!(status.code(), Code::Unavailable | Code::ResourceExhausted);
        if self == Self::Events && passes {
            // A browser tries again only after an answer of this kind.
            let mut response = Response::new(Body::from(failure(status)));
            set_type(&mut response, EVENTS);
            return response;
        }
        refused(http_code(status.code()), status)
    }

    /// The head of an answer with this body.
    pub(super) fn answer(self, body: Body) -> Response<Body> {
        let mut response = Response::new(body);
        set_type(&mut response, self.content_type());
        response
    }
}

/// An error as JSON, with this code.
pub(super) fn refused(code: StatusCode, status: &Status) -> Response<Body> {
    let mut response = Response::new(Body::from(format!("{}\n", error(code, status))));
    *response.status_mut() = code;
    set_type(&mut response, JSON);
    let headers = response.headers_mut();
    if let Some(pause) = pause(status) {
        let seconds = pause.as_secs() + u64::from(pause.subsec_nanos() > 0);
        headers.insert(header::RETRY_AFTER, seconds.into());
    }
    if status.code() == Code::Unauthenticated {
        let scheme = HeaderValue::from_static("Bearer");
        headers.insert(header::WWW_AUTHENTICATE, scheme);
    }
    response
}

fn set_type(response: &mut Response<Body>, kind: &'static str) {
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // nginx would gather events.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

/// The code of HTTP for a code of gRPC, by the comments in `google/rpc/code.proto`.
fn http_code(code: Code) -> StatusCode {
    match code {
        Code::Ok => StatusCode::OK,
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => {
            StatusCode::BAD_REQUEST
        }
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::AlreadyExists | Code::Aborted => StatusCode::CONFLICT,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::Cancelled | Code::Unknown | Code::Internal | Code::DataLoss => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    }
}

/// The error as <https://google.aip.dev/193> writes it in JSON.
fn error(code: StatusCode, status: &Status) -> serde_json::Value {
    json!({ "error": {
        "code": code.as_u16(),
        "status": status::code_name(status.code()),
        "message": status.message(),
        "details": details(status).unwrap_or_default(),
    }})
}

/// The details of a status. `None` if it has none.
fn details(status: &Status) -> Option<serde_json::Value> {
    if status.details().is_empty() {
        return None;
    }
    let kind = descriptors().get_message_by_name("google.rpc.Status")?;
    let message = DynamicMessage::decode(kind, status.details()).ok()?;
    let text = json_of(&message).ok()?;
    let mut parsed: serde_json::Value = serde_json::from_str(&text).ok()?;
    Some(parsed.get_mut("details")?.take())
}

/// The pause that the server asks for.
fn pause(status: &Status) -> Option<Duration> {
    status.get_details_retry_info()?.retry_delay
}

/// The event for a stream that fails. A browser opens the stream again afterwards.
fn failure(status: &Status) -> Bytes {
    // The pauses of other clients grow from a short first one. A browser pauses for this time again and again.
    let pause = pause(status).map_or(RETRY, |pause| pause.max(RETRY));
    let pause = pause.as_millis();
    let error = error(http_code(status.code()), status);
    format!("event: failure\nretry: {pause}\ndata: {error}\n\n").into()
}

/// The JSON of a message: names as in the contract, numbers of 64 bits as text.
fn json_of(message: &DynamicMessage) -> Result<String, serde_json::Error> {
    let options = SerializeOptions::new().use_proto_field_name(true);
    let mut text = Vec::new();
    message.serialize_with_options(&mut serde_json::Serializer::new(&mut text), &options)?;
    // The serializer writes UTF-8.
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The body of an answer: pieces of text from the thread of the API.
pub(super) struct TextBody {
    pieces: mpsc::Receiver<Bytes>,
    is_whole: Arc<AtomicBool>,
}

/// The text broke off: the connection must end, so that its client sees that.
#[derive(Debug, thiserror::Error)]
#[error("the answer broke off")]
pub(super) struct BrokenOff;

impl http_body::Body for TextBody {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        self.pieces.poll_recv(context).map(|piece| match piece {
            Some(piece) => Some(Ok(Frame::data(piece))),
            None if self.is_whole.load(Ordering::Acquire) => None,
            None => Some(Err(BrokenOff)),
        })
    }
}

/// Memory for the text of a message, before the text is made.
pub(super) struct TextRoom(Held);

impl TextRoom {
    /// The text, in the memory that it takes.
    pub(super) fn of(mut self, text: Bytes) -> HeldText {
        self.0.set(text.len() as u64);
        HeldText {
            bytes: text,
            _held: Some(self.0),
        }
    }
}

/// Text that counts until it is dropped.
pub(super) struct HeldText {
    pub(super) bytes: Bytes,
    _held: Option<Held>,
}

impl HeldText {
    /// A text that is too small to count.
    pub(super) fn small(bytes: Bytes) -> Self {
        Self { bytes, _held: None }
    }
}

/// Most bytes of the text of a message. Control characters of text take six, and data takes a third more as base64; the
/// names of fields take the rest.
fn most_text(message: &[u8]) -> u64 {
    let control = message.iter().filter(|byte| **byte < 0x20).count() as u64;
    message.len() as u64 * 2 + control * 6
}

/// The client is gone, or took too little while others waited for the memory of its answer or the server drained.
#[derive(Debug)]
pub(super) struct Gone;

/// Sends text to a [`TextBody`].
pub(super) struct TextSender {
    pieces: mpsc::Sender<Bytes>,
    is_whole: Arc<AtomicBool>,
    share: AnswerShare,
    /// `None`: the answer says whether a write was applied, and is never cut off because others wait.
    hurry: Option<Hurry>,
    patience: Patience,
}

impl TextSender {
    /// A sender whose text counts as that connection's, and its body.
    pub(super) fn new(
        share: &AnswerShare,
        phase: &watch::Receiver<Phase>,
        access: Access,
    ) -> (Self, TextBody) {
        let (pieces, taken) = mpsc::channel(1);
        let is_whole = Arc::new(AtomicBool::new(false));
        let body = TextBody {
            pieces: taken,
            is_whole: Arc::clone(&is_whole),
        };
        let sender = Self {
            pieces,
            is_whole,
            share: share.clone(),
            hurry: (access == Access::Read).then(Hurry::default),
            patience: Patience::new(phase),
        };
        (sender, body)
    }

    /// Waits for the memory of a message's text. `is_stream`: others follow the message.
    ///
    /// # Errors
    /// BUSY if there is no room for a second.
    pub(super) async fn room(&self, message: &[u8], is_stream: bool) -> Result<TextRoom, Status> {
        let held = (message.len() + PREFIX_BYTES) as u64;
        let room = self
            .share
            .hold_for_text(held, most_text(message), is_stream);
        room.await.map(TextRoom)
    }

    /// The memory of a message's text, whether or not it is free.
    pub(super) fn room_at_once(&self, message: &[u8]) -> TextRoom {
        TextRoom(self.share.count(most_text(message)))
    }

    /// Hands the text over. Resolves when the HTTP port has taken all of it.
    ///
    /// # Errors
    /// If the client is gone or too slow.
    pub(super) async fn send(&mut self, text: HeldText) -> Result<(), Gone> {
        let HeldText {
            bytes: mut text,
            _held,
        } = text;
        if let Some(hurry) = &mut self.hurry {
            hurry.begin();
        }
        while !text.is_empty() {
            let piece = text.split_to(text.len().min(PIECE_BYTES));
            let bytes = piece.len() as u64;
            self.pieces.try_send(piece).map_err(|_| Gone)?;
            self.taken().await?;
            if let Some(hurry) = &mut self.hurry {
                hurry.moved(bytes);
            }
        }
        Ok(())
    }

    /// Resolves when the last piece was taken.
    async fn taken(&mut self) -> Result<(), Gone> {
        let Self {
            pieces,
            share,
            hurry,
            patience,
            ..
        } = self;
        let mut room = pin!(pieces.reserve());
        poll_fn(|context| {
            if let Poll::Ready(room) = room.as_mut().poll(context) {
                patience.moved();
                return Poll::Ready(room.map(drop).map_err(|_| Gone));
            }
            if patience.poll_over(context, UNTIL_DRAINING).is_ready() {
                return Poll::Ready(Err(Gone));
            }
            let Some(hurry) = hurry else {
                return Poll::Pending;
            };
            (hurry.poll_late(context, HURRY_SECONDS, || share.must_hurry())).map(|()| Err(Gone))
        })
        .await
    }

    /// Resolves when the client is gone.
    pub(super) async fn closed(&self) {
        self.pieces.closed().await;
    }

    /// Ends the text.
    pub(super) fn finish(self) {
        self.is_whole.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests;
