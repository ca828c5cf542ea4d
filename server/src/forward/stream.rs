//! The messages of one forwarded call.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use futures_util::future::BoxFuture;
use h2::{RecvStream, SendStream};
use http::HeaderMap;
use http_body::{Body, Frame};
use tokio::sync::watch;
use tonic::Status;

use super::link::{OpenOwnerLink, nothing};
use super::{ForwardSlot, GRPC_STATUS, broken};
use crate::admission::Passage;
use crate::drain::{Phase, draining};
use crate::grpc::{Message, Messages};
use crate::serve::StoreOwner;
use crate::status::{self, Access};

/// Bytes on their way to the owner. The room of a message is free once its last byte has left.
pub(super) struct ForwardedPiece {
    bytes: Bytes,
    _room: Option<Passage>,
}

impl ForwardedPiece {
    pub(super) fn new(bytes: Bytes, room: Option<Passage>) -> Self {
        Self { bytes, _room: room }
    }
}

impl Buf for ForwardedPiece {
    fn remaining(&self) -> usize {
        self.bytes.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.bytes
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
    }
}

/// The messages of a request before the owner has its head.
pub(super) struct ForwardedRequest {
    /// Bytes of the message that is sent, and its room.
    bytes: Bytes,
    room: Option<Passage>,
    /// The messages behind it; `None`: it is the only one.
    rest: Option<Box<Messages>>,
}

impl ForwardedRequest {
    pub(super) fn one(message: Message) -> Self {
        Self {
            bytes: message.framed(),
            room: None,
            rest: None,
        }
    }

    pub(super) fn many(messages: Box<Messages>) -> Self {
        Self {
            bytes: Bytes::new(),
            room: None,
            rest: Some(messages),
        }
    }

    /// Sends them to the owner.
    pub(super) fn to(self, sender: SendStream<ForwardedPiece>) -> ForwardedUpload {
        ForwardedUpload {
            messages: self,
            sender,
            is_cut_short: false,
        }
    }
}

/// The messages of a request on their way to the owner.
pub(super) struct ForwardedUpload {
    messages: ForwardedRequest,
    sender: SendStream<ForwardedPiece>,
    /// Whether no further message is taken from the client.
    is_cut_short: bool,
}

/// The end of an upload.
pub(super) enum UploadEnd {
    /// The owner has all messages, or takes no more: its answer has the reason.
    Whole,
    /// The owner has all whole messages, and the next one was refused. It may still apply the messages that it has, so its
    /// answers come first.
    Refused(Status),
}

impl ForwardedUpload {
    /// Resolves when the owner gets no more messages.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<UploadEnd> {
        loop {
            while !self.messages.bytes.is_empty() {
                if !ready!(self.poll_piece(context)) {
                    return Poll::Ready(UploadEnd::Whole);
                }
            }
            let Some(rest) = &mut self.messages.rest else {
                return Poll::Ready(UploadEnd::Whole);
            };
            let next = match self.is_cut_short {
                true => None,
                false => {
                    rest.take_in(context);
                    ready!(rest.poll_message(context))
                }
            };
            match next {
                Some(Ok((message, room))) => {
                    (self.messages.bytes, self.messages.room) = (message.framed(), Some(room));
                }
                Some(Err(status)) => {
                    // Fails only on a stream that has ended.
                    let _ = self.sender.send_data(nothing(), true);
                    return Poll::Ready(UploadEnd::Refused(status));
                }
                None => {
                    // Fails only on a stream that has ended.
                    let _ = self.sender.send_data(nothing(), true);
                    return Poll::Ready(UploadEnd::Whole);
                }
            }
        }
    }

    /// Sends as much of the message as the owner has room for. False: the owner takes no more.
    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<bool> {
        let messages = &mut self.messages;
        self.sender.reserve_capacity(messages.bytes.len());
        let capacity = loop {
            match self.sender.capacity() {
                0 => {}
                capacity => break capacity,
            }
            match ready!(self.sender.poll_capacity(context)) {
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return Poll::Ready(false),
            }
        };
        let piece = messages.bytes.split_to(capacity.min(messages.bytes.len()));
        let is_whole = messages.bytes.is_empty();
        let room = messages.room.take_if(|_| is_whole);
        let is_last = is_whole && messages.rest.is_none();
        let sent = self
            .sender
            .send_data(ForwardedPiece::new(piece, room), is_last);
        Poll::Ready(sent.is_ok())
    }
}

/// The answer of the owner, as its client takes it.
pub(super) struct ForwardedAnswer {
    /// `None` once the owner has the whole request.
    upload: Option<ForwardedUpload>,
    received: RecvStream,
    owner: StoreOwner,
    /// Bytes that were handed to the client, whose window the owner does not have back.
    unreleased: usize,
    /// Resolves when this node ends; `None`: the call may finish.
    drains: Option<BoxFuture<'static, ()>>,
    /// Whether the owner finishes the call when this node ends.
    is_session: bool,
    /// The status of a session that was cut short, once the owner has answered all requests that it has.
    cut: Option<Status>,
    has_ended: bool,
    _place: (OpenOwnerLink, ForwardSlot),
}

impl ForwardedAnswer {
    /// `phase`: the call ends when this node does. `cut`: the status of a session after a message was refused.
    pub(super) fn new(
        upload: Option<ForwardedUpload>,
        cut: Option<Status>,
        is_session: bool,
        received: RecvStream,
        owner: StoreOwner,
        phase: Option<watch::Receiver<Phase>>,
        place: (OpenOwnerLink, ForwardSlot),
    ) -> Self {
        let drains =
            |mut phase| Box::pin(async move { draining(&mut phase).await }) as BoxFuture<_>;
        Self {
            upload,
            received,
            owner,
            unreleased: 0,
            drains: phase.map(drains),
            is_session,
            cut,
            has_ended: false,
            _place: place,
        }
    }

    /// The end of the answer.
    fn end(&mut self, status: &Status) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.has_ended = true;
        let mut trailers = HeaderMap::new();
        let added = status.add_header(&mut trailers);
        Poll::Ready(Some(added.map(|()| Frame::trailers(trailers))))
    }
}

/// Never fails: a failure is sent as a status.
impl Body for ForwardedAnswer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        if let Some(drains) = &mut self.drains
            && drains.as_mut().poll(context).is_ready()
        {
            self.drains = None;
            let is_session = self.is_session;
            match &mut self.upload {
                // The owner answers the requests that it has.
                Some(upload) => {
                    upload.is_cut_short = true;
                    self.cut = Some(status::draining_call(Access::Write));
                }
                // It has all requests of the client, which waits for its last answers.
                None if is_session => {}
                None => return self.end(&status::draining()),
            }
        }
        if let Some(upload) = &mut self.upload
            && let Poll::Ready(end) = upload.poll(context)
        {
            self.upload = None;
            if let UploadEnd::Refused(status) = end {
                self.cut = Some(status);
            }
        }
        let taken = std::mem::take(&mut self.unreleased);
        // Fails only on a stream that has ended.
        let _ = self.received.flow_control().release_capacity(taken);
        match ready!(self.received.poll_data(context)) {
            Some(Ok(data)) => {
                self.unreleased = data.len();
                Poll::Ready(Some(Ok(Frame::data(data))))
            }
            Some(Err(error)) => {
                let status = broken(&self.owner, &error);
                self.end(&status)
            }
            None => match ready!(self.received.poll_trailers(context)) {
                Ok(Some(trailers)) => {
                    let is_good = trailers.get(&GRPC_STATUS).is_some_and(|code| code == "0");
                    if is_good && let Some(cut) = self.cut.take() {
                        return self.end(&cut);
                    }
                    self.has_ended = true;
                    Poll::Ready(Some(Ok(Frame::trailers(trailers))))
                }
                Ok(None) => Poll::Ready(None),
                Err(error) => {
                    let status = broken(&self.owner, &error);
                    self.end(&status)
                }
            },
        }
    }
}
