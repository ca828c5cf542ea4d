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

/// Most bytes of text for two bytes that the message may have: base64 takes a third more. The message may be twice as
/// large as a batch, so that names of fields and escapes find room.
const TEXT_PER_TWO_BYTES: u64 = 3;

/// Bytes of a refused text that are received and dropped, so that its client can read the refusal. Beyond them the
/// connection ends.
const MOST_DROPPED: u64 = 16 << 20;

/// Makes the message of a request of its text.
pub(crate) trait Translation: Send {
    /// Checks that the translation takes no more memory than one may.
    ///
    /// # Errors
    /// If no request needs so much.
    fn check(&self, text: &[u8]) -> Result<(), Status>;

    /// Whether the text is the content of records, without anything around it.
    fn is_encoded(&self) -> bool;

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
    /// The refusal of a text whose rest is dropped.
    refused: Option<Status>,
    dropped: u64,
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
            refused: None,
            dropped: 0,
            access,
        }
    }

    /// Charges the text, whose message may have `largest` bytes.
    pub(super) fn charge_to(&mut self, charge: Charge, largest: u64) {
        self.charge = Some(charge);
        let is_encoded = self
            .translation
            .as_ref()
            .is_some_and(|made| made.is_encoded());
        self.most = match is_encoded {
            true => largest,
            false => largest.saturating_mul(TEXT_PER_TWO_BYTES) / 2,
        };
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
        if self.refused.is_none()
            && let Some(announced) = self.announced
            && let Err(why) = self.check(announced)
        {
            if announced > MOST_DROPPED {
                return Poll::Ready(Err(why));
            }
            self.refuse(why);
        }
        while let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(context)) {
            let frame = frame.map_err(|why| {
                let why = format_args!("its body broke off: {why}");
                status::malformed("request", why, self.access)
            })?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            self.moved += data.len() as u64;
            if self.refused.is_none()
                && let Err(why) = self.take_in(&data)
            {
                self.refuse(why);
            }
            if self.refused.is_some() {
                self.dropped += data.len() as u64;
                if self.dropped > MOST_DROPPED {
                    break;
                }
            }
        }
        if let Some(why) = self.refused.take() {
            return Poll::Ready(Err(why));
        }
        let Some(translation) = self.translation.take() else {
            return Poll::Ready(Err(Status::internal("the message was made before")));
        };
        translation.check(&self.text)?;
        Poll::Ready(translation.translate(&self.text))
    }

    fn take_in(&mut self, data: &[u8]) -> Result<(), Status> {
        self.check((self.text.len() + data.len()) as u64)?;
        self.charge(data.len() as u64)?;
        self.text.extend_from_slice(data);
        Ok(())
    }

    /// Lets go of the text, and notes why.
    fn refuse(&mut self, why: Status) {
        self.text = BytesMut::new();
        if let Some(charge) = &mut self.charge {
            charge.shrink(charge.bytes());
        }
        self.refused = Some(why);
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
        // A refused text has the time of a short one.
        let announced = self.announced.filter(|_| self.refused.is_none());
        Arrival {
            announced: announced.unwrap_or(self.text.len() as u64),
            moved: std::mem::take(&mut self.moved),
        }
    }
}
