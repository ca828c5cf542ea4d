//! The one message of a request that came to another port as text.
//!
//! ```text
//! client ── text ──▶ TranslatedBody ── message ──▶ OneMessage
//!                      charged as it arrives, and for its translation
//! ```
//!
//! The caller is known before the first byte of the text is read, as with a message of gRPC.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use tonic::Status;

use super::{Arrival, busy};
use crate::admission::Charge;
use crate::status::{self, Access};

/// Most bytes of text for each byte that the message may have: base64 takes a third more, names of fields and
/// escapes take the rest.
const TEXT_PER_BYTE: u64 = 2;

/// Makes the message of a request of its text.
pub(crate) trait Translation: Send {
    /// Bytes of memory that the translation takes besides the text.
    ///
    /// # Errors
    /// If no request needs so much.
    fn memory(&self, text: &[u8]) -> Result<u64, Status>;

    /// The message as gRPC sends it, with its prefix.
    ///
    /// # Errors
    /// If the text is no such message.
    fn translate(&self, text: &[u8]) -> Result<Bytes, Status>;
}

/// The text of a request, and the message that it becomes.
pub(crate) struct TranslatedBody {
    body: Body,
    text: BytesMut,
    /// Bytes of text, if the client says how many.
    announced: Option<u64>,
    /// Bytes that arrived since the last look.
    moved: u64,
    /// Most bytes of text.
    most: u64,
    /// `None` until the caller is known, and once the message is made.
    charge: Option<Charge>,
    /// `None` once the message is made.
    translation: Option<Box<dyn Translation>>,
    access: Access,
}

impl fmt::Debug for TranslatedBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TranslatedBody")
            .field("bytes", &self.text.len())
            .finish_non_exhaustive()
    }
}

impl TranslatedBody {
    /// A body without a byte so far.
    pub(crate) fn new(body: Body, translation: Box<dyn Translation>, access: Access) -> Self {
        Self {
            announced: body.size_hint().exact(),
            body,
            text: BytesMut::new(),
            moved: 0,
            most: 0,
            charge: None,
            translation: Some(translation),
            access,
        }
    }

    /// Charges the text, whose message may have `largest` bytes.
    pub(super) fn charge_to(&mut self, charge: Charge, largest: u64) {
        self.charge = Some(charge);
        self.most = largest.saturating_mul(TEXT_PER_BYTE);
    }

    /// The message, once the text is whole; then nothing.
    pub(crate) fn poll_message(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Status>>> {
        if self.translation.is_none() {
            return Poll::Ready(None);
        }
        let made = ready!(self.poll_made(context));
        // Nothing more is taken of a refused request.
        self.translation = None;
        self.charge = None;
        self.text = BytesMut::new();
        self.body = Body::empty();
        Poll::Ready(Some(made))
    }

    fn poll_made(&mut self, context: &mut Context<'_>) -> Poll<Result<Bytes, Status>> {
        if let Some(announced) = self.announced {
            self.check(announced)?;
        }
        while let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(context)) {
            let frame = frame.map_err(|why| {
                let why = format_args!("its body broke off: {why}");
                status::malformed("request", why, self.access)
            })?;
            if let Ok(data) = frame.into_data() {
                self.check((self.text.len() + data.len()) as u64)?;
                self.charge(data.len() as u64)?;
                self.moved += data.len() as u64;
                self.text.extend_from_slice(&data);
            }
        }
        let Some(translation) = self.translation.take() else {
            return Poll::Ready(Err(Status::internal("the message was made before")));
        };
        self.charge(translation.memory(&self.text)?)?;
        Poll::Ready(translation.translate(&self.text))
    }

    fn check(&self, bytes: u64) -> Result<(), Status> {
        match bytes > self.most {
            true => Err(status::message_too_large(bytes, self.most, self.access)),
            false => Ok(()),
        }
    }

    fn charge(&mut self, bytes: u64) -> Result<(), Status> {
        let Some(charge) = &mut self.charge else {
            return Err(Status::internal("the request is charged to nobody"));
        };
        charge.grow(charge.bytes(), bytes).map_err(busy)
    }

    /// Whether the message is made.
    pub(crate) fn has_ended(&self) -> bool {
        self.translation.is_none()
    }

    /// The text that has arrived.
    pub(super) fn arrival(&mut self) -> Arrival {
        Arrival {
            announced: self.announced.unwrap_or(self.text.len() as u64),
            moved: std::mem::take(&mut self.moved),
        }
    }
}
