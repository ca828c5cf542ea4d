//! One call: awaits its answer, and sends the answer as fast as its client takes it.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, SendStream};
use http::Response;
use http_body::Body;
use tokio::sync::watch;

use super::patience::{Hurry, Patience};
use super::peer::{AnswerPiece, OpenCall, Peer, Turn};
use crate::answers::MayBeHurried;
use crate::drain::Phase;

/// Time in which an answer must move when others wait for its room. The kernel and the queue of a
/// connection take its bytes in pieces of 128 KiB.
const HURRY_SECONDS: u64 = 4;

/// Conditions for all calls of a connection.
pub(super) struct Terms {
    pub(super) peer: Peer,
    pub(super) phase: watch::Receiver<Phase>,
    /// Longest time in which a client takes no byte of an answer that waits for it.
    pub(super) progress_timeout: Duration,
}

/// The reason why an answer was not sent whole.
enum Broken {
    /// The client has reset the stream, or is gone.
    ByClient,
    /// The client took nothing for too long.
    Stalled,
    /// The body failed.
    ByServer,
}

/// Serves a call until its answer has left or its client has given up.
///
/// The call and the body are used where they are: moved, they would take their place twice in a future that is
/// allocated for each call.
#[expect(
    clippy::manual_async_fn,
    reason = "an async fn moves its arguments, which would take their place twice"
)]
pub(super) fn serve<F, B>(
    mut call: F,
    mut respond: SendResponse<AnswerPiece>,
    terms: Arc<Terms>,
    open: OpenCall,
) -> impl Future<Output = ()>
where
    F: Future<Output = Result<Response<B>, Infallible>> + Unpin,
    B: Body<Data = Bytes> + Unpin,
{
    async move {
        let _open = &open;
        let answer = poll_fn(|context| {
            if let Poll::Ready(Ok(answer)) = Pin::new(&mut call).poll(context) {
                return Poll::Ready(Some(answer));
            }
            respond.poll_reset(context).map(|_| None)
        });
        let Some(answer) = answer.await else {
            return terms.peer.call_was_cancelled();
        };
        let (mut head, mut body) = answer.into_parts();
        let may_be_hurried = head.extensions.remove::<MayBeHurried>().is_some();
        let head = Response::from_parts(head, ());
        if body.is_end_stream() {
            // Fails only on a stream that the client has reset.
            let _ = respond.send_response(head, true);
            return;
        }
        let Ok(sender) = respond.send_response(head, false) else {
            return terms.peer.call_was_cancelled();
        };
        let mut sending = Sending {
            sender,
            data: Bytes::new(),
            patience: None,
            hurry: may_be_hurried.then(Hurry::default),
            turn: None,
            sent: 0,
            terms: &terms,
        };
        match poll_fn(|context| sending.poll(&mut body, context)).await {
            Ok(()) => {}
            Err(Broken::ByClient) => terms.peer.call_was_cancelled(),
            Err(Broken::Stalled) => sending.sender.send_reset(Reason::CANCEL),
            Err(Broken::ByServer) => sending.sender.send_reset(Reason::INTERNAL_ERROR),
        }
    }
}

/// An answer under way.
struct Sending<'a> {
    sender: SendStream<AnswerPiece>,
    /// Bytes of the body that are not handed over yet.
    data: Bytes,
    /// Made by the first wait for the client.
    patience: Option<Patience>,
    /// `None`: it holds nothing that others wait for.
    hurry: Option<Hurry>,
    /// Held while it waits for the queue of the connection.
    turn: Option<Turn>,
    /// Bytes that the connection had sent when this call found its queue full last.
    sent: u64,
    terms: &'a Terms,
}

impl Sending<'_> {
    /// Resolves when all of the answer was handed over.
    ///
    /// An async function would keep each frame and its own copies of the data in the future, which is
    /// allocated for each call.
    fn poll(
        &mut self,
        body: &mut (impl Body<Data = Bytes> + Unpin),
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Broken>> {
        loop {
            ready!(self.poll_data(context))?;
            let Poll::Ready(frame) = Pin::new(&mut *body).poll_frame(context) else {
                return (self.sender.poll_reset(context)).map(|_| Err(Broken::ByClient));
            };
            let Some(frame) = frame else {
                let nothing = self.terms.peer.piece(Bytes::new());
                return Poll::Ready(self.hand_over(nothing, true));
            };
            let frame = frame.map_err(|_| Broken::ByServer)?;
            match frame.into_data() {
                Ok(data) => {
                    if let Some(hurry) = &mut self.hurry {
                        hurry.begin();
                    }
                    self.data = data;
                }
                Err(frame) => {
                    let Ok(trailers) = frame.into_trailers() else {
                        continue;
                    };
                    let sent = self.sender.send_trailers(trailers);
                    return Poll::Ready(sent.map_err(|_| Broken::ByClient));
                }
            }
        }
    }

    /// Hands over the data as the client's windows and the queue of the connection take it, so that
    /// no more of it than fits there waits in the HTTP/2 layer.
    fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        while !self.data.is_empty() {
            let room = ready!(self.poll_room(self.data.len(), context))?;
            let part = self.data.split_to(room.min(self.data.len()));
            if let Some(hurry) = &mut self.hurry {
                hurry.moved(part.len() as u64);
            }
            let part = self.terms.peer.piece(part);
            self.hand_over(part, false)?;
        }
        Poll::Ready(Ok(()))
    }

    fn hand_over(&mut self, part: AnswerPiece, is_last: bool) -> Result<(), Broken> {
        (self.sender.send_data(part, is_last)).map_err(|_| Broken::ByClient)
    }

    /// Resolves with the number of the `wanted` bytes that may be handed over.
    fn poll_room(
        &mut self,
        wanted: usize,
        context: &mut Context<'_>,
    ) -> Poll<Result<usize, Broken>> {
        let polled = self.poll_windows(wanted, context);
        if polled.is_ready() {
            if let Some(patience) = &mut self.patience {
                patience.moved();
            }
            return polled;
        }
        let Terms {
            peer,
            phase,
            progress_timeout,
        } = self.terms;
        let patience = (self.patience).get_or_insert_with(|| Patience::new(phase));
        // Behind answers of other calls, which the client takes.
        let sent = peer.sent_so_far();
        if peer.has_full_queue() && std::mem::replace(&mut self.sent, sent) != sent {
            patience.moved();
        }
        let is_over = patience.poll_over(context, *progress_timeout).is_ready();
        let is_late = self.hurry.as_mut().is_some_and(|hurry| {
            (hurry.poll_late(context, HURRY_SECONDS, || peer.answers.must_hurry())).is_ready()
        });
        match is_over || is_late {
            true => Poll::Ready(Err(Broken::Stalled)),
            false => Poll::Pending,
        }
    }

    fn poll_windows(
        &mut self,
        wanted: usize,
        context: &mut Context<'_>,
    ) -> Poll<Result<usize, Broken>> {
        let Poll::Ready(room) = self.terms.peer.poll_room(&mut self.turn, context) else {
            // Nothing else would show that the client has given up.
            return (self.sender.poll_reset(context)).map(|_| Err(Broken::ByClient));
        };
        let wanted = wanted.min(room);
        self.sender.reserve_capacity(wanted);
        loop {
            let capacity = self.sender.capacity();
            if capacity > 0 {
                return Poll::Ready(Ok(capacity.min(wanted)));
            }
            match ready!(Pin::new(&mut self.sender).get_mut().poll_capacity(context)) {
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return Poll::Ready(Err(Broken::ByClient)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::sync::Arc;

    use http::Request;
    use tokio::time::Instant;

    use super::super::peer::QUEUE_BYTES;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn call_given_up_while_the_queue_is_full_ends_at_once() {
        const PATIENCE: Duration = Duration::from_secs(30);
        let (near, far) = tokio::io::duplex(1 << 20);
        let client = tokio::spawn(h2::client::handshake(near));
        let server = h2::server::Builder::new().handshake::<_, AnswerPiece>(far);
        let mut server = server.await.unwrap();
        let (client, connection) = client.await.unwrap().unwrap();
        let client_side = tokio::spawn(connection);
        let (answer, _) = client
            .ready()
            .await
            .unwrap()
            .send_request(Request::new(()), true)
            .unwrap();
        let (_request, respond) = server.accept().await.unwrap().unwrap();
        let peer = Peer::new(&Arc::default());
        let _full = peer.piece(Bytes::from(vec![0; QUEUE_BYTES]));
        let (_phase, phase) = watch::channel(Phase::Serving);
        let open = peer.begin_call();
        let terms = Arc::new(Terms {
            peer: peer.clone(),
            phase,
            progress_timeout: PATIENCE,
        });
        let response = Response::new(axum::body::Body::from("answer"));
        let began = Instant::now();
        let call = tokio::spawn(serve(ready(Ok(response)), respond, terms, open));
        let server_side = tokio::spawn(async move { while server.accept().await.is_some() {} });
        let body = answer.await.unwrap();
        drop(body);
        call.await.unwrap();
        assert!(began.elapsed() < PATIENCE / 2, "{:?}", began.elapsed());
        assert_eq!(peer.cancelled_so_far(), 1);
        client_side.abort();
        server_side.abort();
    }
}
