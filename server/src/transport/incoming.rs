//! The body of a request, read from its HTTP/2 stream.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::{Reason, RecvStream};
use http_body::{Body, Frame};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout_at};

/// Longest time that the rest of a body is received and dropped after its call has ended.
const FAREWELL: Duration = Duration::from_secs(2);

/// Silence after which nothing more of such a body is expected.
const SILENCE: Duration = Duration::from_millis(300);

/// Most bodies of this process that are received after their call. Each takes up to 4 KiB. Further streams are
/// reset at once.
const MOST_FAREWELLS: usize = 4096;

/// Bodies that are received after their call.
static FAREWELLS: AtomicUsize = AtomicUsize::new(0);

/// The body of a request.
///
/// [`Body::poll_frame`] gives the client room for more with each frame that it returns. A caller
/// that must hold the client back uses [`Incoming::poll_unreleased`] and [`Incoming::release`].
#[derive(Debug)]
pub(crate) struct Incoming {
    /// `None` once the client has ended its half, or the stream has failed.
    stream: Option<RecvStream>,
}

impl Incoming {
    pub(super) fn new(stream: RecvStream) -> Self {
        let stream = (!stream.is_end_stream()).then_some(stream);
        Self { stream }
    }

    /// Returns the next bytes, and leaves the client's flow-control window as it is. `None` marks the
    /// end of the data.
    pub(crate) fn poll_unreleased(
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

    /// Gives the client room for `bytes` more.
    pub(crate) fn release(&mut self, bytes: usize) {
        if let Some(stream) = &mut self.stream {
            // Fails only for more than was received, or on a stream that has ended.
            let _ = stream.flow_control().release_capacity(bytes);
        }
    }

    /// Resets the stream unless all of the body has arrived. h2 ignores the late data of some such streams.
    pub(crate) fn give_up(&mut self) {
        self.stream = None;
    }

    /// Whether nothing more comes.
    pub(crate) fn has_ended(&self) -> bool {
        self.stream.as_ref().is_none_or(RecvStream::is_end_stream)
    }
}

impl Body for Incoming {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
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

impl Drop for Incoming {
    /// A call may end before its client has sent everything. Data on a stream that was reset counts
    /// as an error of the client, and many errors end the connection. The rest is received and
    /// dropped for a short while instead.
    fn drop(&mut self) {
        // Most streams that end early were reset by the client: nothing more comes.
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(_)) = Pin::new(&mut *self).poll_frame(&mut context) {}
        let rest = self.stream.take().filter(|stream| !stream.is_end_stream());
        if let (Some(rest), Ok(event_loop)) = (rest, Handle::try_current())
            && let Some(farewell) = Farewell::begin()
        {
            event_loop.spawn(async move {
                drop_rest(rest).await;
                drop(farewell);
            });
        }
    }
}

/// One of [`FAREWELLS`].
struct Farewell;

impl Farewell {
    /// `None` if there are too many.
    fn begin() -> Option<Self> {
        let begun = FAREWELLS.fetch_add(1, Ordering::Relaxed);
        let farewell = Self;
        (begun < MOST_FAREWELLS).then_some(farewell)
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        FAREWELLS.fetch_sub(1, Ordering::Relaxed);
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
