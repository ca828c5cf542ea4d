//! The body of a request, read from its HTTP/2 stream, or made of a request to another port.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::{Reason, RecvStream};
use http_body::{Body, Frame};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use super::peer::LateBodies;
use crate::grpc::TranslatedBody;

/// Longest time that the rest of a body is received and dropped after its call has ended.
const FAREWELL: Duration = Duration::from_secs(2);

/// Silence after which nothing more of such a body is expected.
const SILENCE: Duration = Duration::from_millis(300);

/// The body of a request.
pub(crate) enum Incoming {
    /// The body that a gRPC client sends.
    Http2(Http2Body),
    /// One message, made of the text of a client that speaks no gRPC. Boxed: other bodies are moved often.
    Translated(Box<TranslatedBody>),
}

impl Incoming {
    /// Returns the next bytes, and leaves the client's flow-control window as it is. `None` marks the
    /// end of the data.
    pub(crate) fn poll_unreleased(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Status>>> {
        match self {
            Self::Http2(body) => {
                let data = ready!(body.poll_unreleased(context));
                Poll::Ready(data.map(|data| data.map_err(|why| Status::from_error(why.into()))))
            }
            Self::Translated(body) => body.poll_message(context),
        }
    }

    /// Gives the client room for `bytes` more.
    pub(crate) fn release(&mut self, bytes: usize) {
        if let Self::Http2(body) = self {
            body.release(bytes);
        }
    }

    /// Whether nothing more comes.
    pub(crate) fn has_ended(&self) -> bool {
        match self {
            Self::Http2(body) => body.has_ended(),
            Self::Translated(body) => body.has_ended(),
        }
    }
}

impl Body for Incoming {
    type Data = Bytes;
    type Error = Status;

    /// Gives the client room for more with each frame that it returns.
    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let data = ready!(self.poll_unreleased(context));
        if let Some(Ok(data)) = &data {
            self.release(data.len());
        }
        Poll::Ready(data.map(|data| data.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.has_ended()
    }
}

/// The body of a request on its HTTP/2 stream.
#[derive(Debug)]
pub(crate) struct Http2Body {
    /// `None` once the client has ended its half, or the stream has failed.
    stream: Option<RecvStream>,
    farewells: LateBodies,
}

impl Http2Body {
    pub(super) fn new(stream: RecvStream, farewells: LateBodies) -> Self {
        let stream = (!stream.is_end_stream()).then_some(stream);
        Self { stream, farewells }
    }

    fn poll_unreleased(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, h2::Error>>> {
        let Some(stream) = &mut self.stream else {
            return Poll::Ready(None);
        };
        let data = ready!(stream.poll_data(context));
        if data.is_none() {
            // Trailers of a request carry nothing for a gRPC server.
            self.stream = None;
        } else if let Some(Err(error)) = &data {
            // With NO_ERROR the client says that it needs no more of the answer.
            let is_end = error.reason() == Some(Reason::NO_ERROR);
            self.stream = None;
            if is_end {
                return Poll::Ready(None);
            }
        }
        Poll::Ready(data)
    }

    fn release(&mut self, bytes: usize) {
        if let Some(stream) = &mut self.stream {
            // Fails only for more than was received, or on a stream that has ended.
            let _ = stream.flow_control().release_capacity(bytes);
        }
    }

    fn has_ended(&self) -> bool {
        self.stream.as_ref().is_none_or(RecvStream::is_end_stream)
    }
}

impl Drop for Http2Body {
    /// A call may end before its client has sent everything. Data on a stream that was reset counts
    /// as an error of the client, and many errors end the connection. The rest is received and
    /// dropped for a short while instead, unless the connection has too many such calls.
    fn drop(&mut self) {
        // Most streams that end early were reset by the client: nothing more comes.
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(data)) = self.poll_unreleased(&mut context) {
            self.release(data.map_or(0, |data| data.len()));
        }
        let rest = self.stream.take().filter(|stream| !stream.is_end_stream());
        if let (Some(rest), Ok(event_loop)) = (rest, Handle::try_current())
            && let Some(farewell) = self.farewells.begin()
        {
            event_loop.spawn(async move {
                drop_rest(rest).await;
                drop(farewell);
            });
        }
    }
}

/// Receives and drops the rest of a body until nothing comes for a while.
async fn drop_rest(mut rest: RecvStream) {
    let end = Instant::now() + FAREWELL;
    loop {
        let until = end.min(Instant::now() + SILENCE);
        let next = poll_fn(|context| rest.poll_data(context));
        let Ok(Some(Ok(data))) = timeout_at(until, next).await else {
            return;
        };
        // Fails only on a stream that has ended.
        let _ = rest.flow_control().release_capacity(data.len());
    }
}
