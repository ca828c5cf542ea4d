//! Whether an attempt has left the program. One that has not was not applied, and its error says so.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use http_body::{Body as HttpBody, Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Bytes, Service, http};
use tonic::transport::Channel;

/// The gate of one attempt. The connection passes it before the first byte of the message, and the caller shuts it when it
/// gives up. The first of them decides: an attempt that counts as unsent is never sent later.
#[derive(Debug, Clone, Default)]
pub(crate) struct SendGate(Arc<OnceLock<bool>>);

impl SendGate {
    /// Whether the message may be sent. The gate then stays open.
    pub(crate) fn pass(&self) -> bool {
        *self.0.get_or_init(|| true)
    }

    /// Whether nothing was sent. The gate then stays shut.
    pub(crate) fn shut(&self) -> bool {
        !*self.0.get_or_init(|| false)
    }
}

/// A channel whose requests pass their gates.
#[derive(Debug, Clone)]
pub(crate) struct GatedChannel(pub(crate) Channel);

impl Service<http::Request<Body>> for GatedChannel {
    type Response = <Channel as Service<http::Request<Body>>>::Response;
    type Error = <Channel as Service<http::Request<Body>>>::Error;
    type Future = <Channel as Service<http::Request<Body>>>::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        // A stream has none.
        let request = match request.extensions().get::<SendGate>().cloned() {
            Some(gate) => request.map(|body| Body::new(GatedBody { gate, body })),
            None => request,
        };
        self.0.call(request)
    }
}

/// The body of a request with a gate.
struct GatedBody {
    gate: SendGate,
    body: Body,
}

impl HttpBody for GatedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if !self.gate.pass() {
            return Poll::Ready(Some(Err(Status::cancelled("the caller has given up"))));
        }
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
