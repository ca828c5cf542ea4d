//! Which service answers a call, and what is around all of them.

use std::convert::Infallible;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use http::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::Service;

use super::{Incoming, Peer};
use crate::admission::{Admission, AdmittedCall, RequestBody};
use crate::metrics::{CallCounter, CallFuture};

/// What comes of a call: refusals are answers, too.
pub(crate) type HttpResult = Result<Response<Body>, Infallible>;

/// A call on its way to its answer.
pub(crate) type HttpAnswer = BoxFuture<'static, HttpResult>;

/// A service, as tonic has generated it or in front of that.
pub(crate) trait Serve: Send + Sync {
    /// Answers one call.
    fn serve(&self, request: Request<RequestBody>) -> HttpAnswer;
}

impl<S> Serve for S
where
    S: Service<
            Request<RequestBody>,
            Response = Response<Body>,
            Error = Infallible,
            Future = HttpAnswer,
        > + Clone
        + Send
        + Sync,
{
    /// Generated services are always ready.
    fn serve(&self, request: Request<RequestBody>) -> HttpAnswer {
        self.clone().call(request)
    }
}

/// The services of a daemon, the most wanted first.
#[derive(Default)]
pub(crate) struct Routes {
    services: Vec<(&'static str, Box<dyn Serve>)>,
}

impl Routes {
    /// Answers calls of this service, too.
    pub(crate) fn add<S>(&mut self, service: S)
    where
        S: Serve + NamedService + 'static,
    {
        self.services.push((S::NAME, Box::new(service)));
    }

    fn serve(&self, request: Request<RequestBody>) -> HttpAnswer {
        let name = service_name(request.uri().path());
        match self.services.iter().find(|(known, _)| name == Some(known)) {
            Some((_, service)) => service.serve(request),
            None => {
                let status = Status::unimplemented("the server has no such service");
                Box::pin(std::future::ready(Ok(status.into_http())))
            }
        }
    }
}

/// Of a path `/package.Service/Method`.
fn service_name(path: &str) -> Option<&str> {
    Some(path.strip_prefix('/')?.split_once('/')?.0)
}

/// All that a call passes on its way to its service.
pub(crate) struct Calls {
    pub(crate) counter: CallCounter,
    pub(crate) admission: Arc<Admission>,
    pub(crate) routes: Routes,
}

/// The calls of one connection.
pub(super) struct ConnectionCalls {
    pub(super) calls: Arc<Calls>,
    pub(super) peer: Peer,
}

impl ConnectionCalls {
    /// The call that a request begins.
    pub(super) fn call(&self, request: Request<Incoming>) -> CallFuture<AdmittedCall> {
        let Calls {
            counter,
            admission,
            routes,
        } = &*self.calls;
        counter.call(request, |request| {
            admission.call(&self.peer, request, |request| routes.serve(request))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_is_what_stands_before_the_method() {
        assert_eq!(service_name("/a.v1.B/C"), Some("a.v1.B"));
        for none in ["", "/", "/a.v1.B", "a.v1.B/C", "*"] {
            assert_eq!(service_name(none), None, "{none}");
        }
    }
}
