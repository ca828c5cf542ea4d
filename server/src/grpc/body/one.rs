//! The one message of a request.
//!
//! A refusal waits for the end of the request, at most as long as a message may take. An earlier refusal would reset the
//! stream while its data is under way. The client's HTTP/2 layer counts such a reset as an error of the client, and its
//! connection ends over a few of them.

use std::future::poll_fn;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use tonic::Status;

use super::{Message, Received, Source, Wait, busy, whole};
use crate::admission::Charge;
use crate::status::{self, Access};
use crate::transport::Incoming;

/// Memory of a call whose request has not arrived whole: its task, its HTTP/2 stream and its buffers.
const WAITING_BYTES: u64 = 10 << 10;

/// Bytes of a refused request that are received and dropped. Beyond them the refusal is sent at once.
const MOST_DROPPED: u64 = 16 << 20;

/// Bytes for which a message takes memory at once. It takes more as more arrives.
const BELIEVED: u64 = 64 << 10;

/// The one message of a request. It stays charged until this is dropped.
pub(crate) struct OneMessage<S = Incoming> {
    source: S,
    received: Received,
    /// Length of the message, once its prefix is here.
    length: Option<u64>,
    charge: Charge,
    /// Memory of the head, and the part of it that is not charged yet.
    pub(super) head: u64,
    pub(super) uncharged: u64,
    /// Whether [`WAITING_BYTES`] are charged.
    is_waiting: bool,
    refused: Option<Status>,
    /// The message, if it was received and put back.
    again: Option<Message>,
    dropped: u64,
    /// Made by the first wait for the client.
    wait: Option<Box<Wait>>,
}

impl<S: Source> OneMessage<S> {
    pub(super) fn new(source: S, charge: Charge, largest: u64, access: Access) -> Self {
        Self {
            source,
            received: Received::new(largest, access),
            length: None,
            charge,
            head: 0,
            uncharged: 0,
            is_waiting: false,
            refused: None,
            again: None,
            dropped: 0,
            wait: None,
        }
    }

    /// The message, once the request has ended.
    ///
    /// # Errors
    /// - `MALFORMED_REQUEST` if there is no message, a part of one, or more than one.
    /// - `REQUEST_TOO_LARGE` if it is longer than the RPC permits.
    /// - `REQUEST_TOO_SLOW` if the client takes too long.
    /// - `BUSY` if there is no room.
    pub(crate) async fn receive(&mut self) -> Result<Message, Status> {
        if let Some(message) = self.again.take() {
            return Ok(message);
        }
        poll_fn(|context| self.poll(context)).await
    }

    /// Gives a message back that was received, for another receiver.
    #[cfg(feature = "object")]
    pub(crate) fn put_back(&mut self, message: Message) {
        self.again = Some(message);
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Message, Status>> {
        loop {
            let Poll::Ready(data) = self.source.poll_bytes(context) else {
                self.begin_wait()?;
                return self.poll_over(context).map(Err);
            };
            let data = match data {
                Some(Ok(data)) => data,
                // Now a refusal can be sent.
                end => {
                    let refused = self.refused.take().map_or(Ok(()), Err);
                    return Poll::Ready(refused.and_then(|()| match end {
                        Some(Err(gone)) => Err(gone),
                        _ => self.end(),
                    }));
                }
            };
            self.source.release(data.len());
            if self.refused.is_none() {
                match self.take_in(&data) {
                    Ok(()) => continue,
                    Err(why) => self.refuse(why)?,
                }
            }
            self.dropped += data.len() as u64;
            if self.dropped > MOST_DROPPED
                && let Some(why) = self.refused.take()
            {
                return Poll::Ready(Err(why));
            }
        }
    }

    /// Takes and charges data of the request.
    ///
    /// # Errors
    /// If it is not the one message, or there is no room for it.
    fn take_in(&mut self, data: &[u8]) -> Result<(), Status> {
        let bytes = data.len() as u64;
        if let Some(wait) = &mut self.wait {
            wait.hurry.moved(bytes);
        }
        self.received.bytes.extend_from_slice(data);
        if self.length.is_none()
            && let Some(length) = self.received.length()?
        {
            self.length = Some(length);
            if let Some(wait) = &mut self.wait {
                wait.hurry.begin();
            }
            self.charge
                .look(self.charge.bytes(), length)
                .map_err(busy)?;
            // The length is only announced: the bytes that have arrived limit the memory taken for it.
            let believed = whole(length.min(BELIEVED));
            let more = believed.saturating_sub(self.received.bytes.len());
            self.received.bytes.reserve(more);
        }
        let has = self.charge.bytes();
        self.charge
            .grow(has, bytes + self.uncharged)
            .map_err(busy)?;
        self.uncharged = 0;
        let Some(length) = self.length else {
            return Ok(());
        };
        match whole(length).cmp(&self.received.bytes.len()) {
            std::cmp::Ordering::Less => {
                let why = format_args!(
                    "its message has {length} bytes, and more came behind it; the call takes one message"
                );
                Err(status::malformed("request", why, self.received.access))
            }
            std::cmp::Ordering::Equal if std::mem::take(&mut self.is_waiting) => {
                self.charge.shrink(WAITING_BYTES);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The message of a request that has ended.
    fn end(&mut self) -> Result<Message, Status> {
        match self.length.map(whole) {
            // Nothing else keeps the memory, so tonic takes it over instead of a copy.
            Some(whole) if whole == self.received.bytes.len() => {
                Ok(Message(std::mem::take(&mut self.received.bytes).freeze()))
            }
            None if self.received.bytes.is_empty() => {
                let why = "it has no message; the call takes one";
                Err(status::malformed("request", why, self.received.access))
            }
            _ => Err(self.received.cut_off()),
        }
    }

    /// Charges the memory of a call that waits for its client.
    ///
    /// # Errors
    /// If there is no room for it.
    fn begin_wait(&mut self) -> Result<(), Status> {
        if self.is_waiting {
            return Ok(());
        }
        let has = self.charge.bytes();
        let grown = self.charge.grow(has, WAITING_BYTES + self.uncharged);
        grown.map_err(|full| self.refused.take().unwrap_or_else(|| busy(full)))?;
        self.uncharged = 0;
        self.is_waiting = true;
        Ok(())
    }

    /// Notes that the request is refused. Only its head stays charged while the rest arrives.
    ///
    /// # Errors
    /// With the refusal, if there is no room for the head: then the request is answered at once.
    fn refuse(&mut self, why: Status) -> Result<(), Status> {
        self.received.bytes = BytesMut::new();
        self.charge.shrink(self.charge.bytes());
        self.is_waiting = false;
        if self.charge.grow(0, self.head).is_err() {
            return Err(why);
        }
        self.uncharged = 0;
        self.refused = Some(why);
        Ok(())
    }

    /// Resolves with the reason when the client was waited for long enough.
    fn poll_over(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        let phase = &self.charge.admission().phase;
        let wait = (self.wait).get_or_insert_with(|| Box::new(Wait::new(phase)));
        let is_short = || self.charge.is_short();
        let arrival = self.source.arrival();
        wait.hurry.moved(arrival.moved);
        let length = self.length.unwrap_or(arrival.announced);
        ready!(wait.poll_over(context, length, is_short));
        let why = self.refused.take();
        Poll::Ready(why.unwrap_or_else(|| status::message_too_slow(self.received.access)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tonic::Code;

    use super::super::fixtures::*;
    use super::*;
    use crate::admission::{Admission, Kind, Share};

    /// A call of at most `largest` bytes whose client sends these frames.
    fn call(data: &[&[u8]], largest: u64, admission: &Arc<Admission>) -> OneMessage<Frames> {
        let frames = Frames::new(data.iter().copied());
        let charge = Charge::new(admission, (&Share::default(), None), Kind::Append);
        OneMessage::new(frames, charge, largest, Access::Write)
    }

    #[tokio::test]
    async fn one_message_is_whole_however_its_frames_are_cut() {
        let admission = admission(1 << 20, 1 << 20);
        for size in [0, 1, 7, 5000, 100_000] {
            let message: Vec<u8> = (0..=250).cycle().take(size).collect();
            let sent = sent(&message);
            let cuts = (0..sent.len().min(20)).chain([sent.len() / 2, sent.len()]);
            for (first, second) in cuts
                .clone()
                .flat_map(|cut| cuts.clone().map(move |c| (cut, c)))
            {
                let (first, second) = (first.min(second), first.max(second));
                let frames = [&sent[..first], &[], &sent[first..second], &sent[second..]];
                let mut call = call(&frames, 100_000, &admission);
                let received = call.receive().await.unwrap();
                assert_eq!(call.source.released, sent.len());
                assert_eq!(used(&admission), sent.len() as u64);
                assert_eq!(received.clone().framed(), sent);
                assert_eq!(
                    received.payload(),
                    message,
                    "{size} bytes cut at {first}, {second}"
                );
            }
        }
        assert_eq!(used(&admission), 0);
    }

    #[tokio::test]
    async fn nothing_else_keeps_the_memory_of_a_received_message() {
        let admission = admission(1 << 20, 1 << 20);
        let sent = sent(&[7; 5000]);
        let mut call = call(&[&sent[..100], &sent[100..]], 100_000, &admission);
        let message = call.receive().await.unwrap();
        assert!(message.framed().try_into_mut().is_ok());
    }

    #[tokio::test]
    async fn request_that_is_not_one_message_is_refused_at_its_end() {
        let admission = admission(1 << 20, 1 << 20);
        let two = sent(b"abc").repeat(2);
        let mut compressed = sent(b"abc");
        compressed[0] = 1;
        let mut odd = sent(b"abc");
        odd[0] = 2;
        let long = sent(b"abcd");
        let cases: [(&[&[u8]], &str); 10] = [
            (&[], "no message"),
            (&[b""], "no message"),
            (&[b"\0"], "cut off after 1 bytes"),
            (&[b"\0\0\0", b"\0\x02a"], "cut off after 6 bytes"),
            (&[&long[..5], &long[5..]], "has 4 bytes; at most 3"),
            (&[&long[..5]], "has 4 bytes; at most 3"),
            (&[&two], "takes one message"),
            (&[&two[..8], &two[8..9]], "takes one message"),
            (&[&compressed], "marked as compressed"),
            (&[&odd], "begins with '\\u{2}'"),
        ];
        for (frames, text) in cases {
            let mut call = call(frames, 3, &admission);
            let status = call.receive().await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{frames:?}");
            assert!(
                call.source.frames.is_empty(),
                "refused too early: {frames:?}"
            );
            assert!(status.message().contains(text), "{frames:?}: {status}");
        }
    }

    #[tokio::test]
    async fn call_without_room_is_busy_once_its_message_has_arrived() {
        let admission = admission(4096, 1 << 20);
        let mut others = Charge::new(&admission, (&Share::default(), None), Kind::Append);
        others.grow(0, 4000).unwrap();
        let message = sent(&[7; 200]);
        let mut call = call(&[&message[..100], &message[100..]], 3000, &admission);
        let busy = call.receive().await.unwrap_err();
        assert_eq!(busy.code(), Code::ResourceExhausted);
        assert!(call.source.frames.is_empty() && used(&admission) == 4000);
        drop(others);
        assert_eq!(used(&admission), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn call_that_waits_for_its_client_is_charged_and_ends_in_time() {
        let admission = admission(1 << 20, 1 << 20);
        let mut call = call(&[&sent(&[7; 200_000])[..1000]], 1 << 20, &admission);
        call.source.closes = false;
        let begin = tokio::time::Instant::now();
        let mut receive = Box::pin(call.receive());
        assert!(
            tokio::time::timeout(Duration::from_secs(12), &mut receive)
                .await
                .is_err()
        );
        assert_eq!(used(&admission), 1000 + WAITING_BYTES);
        let late = receive.await.unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded);
        assert_eq!(begin.elapsed().as_secs(), 13);
    }
}
