//! Selects the service that answers a call, and wraps all of them.
//!
//! ```text
//! request ──▶ counted, its deadline ──▶ by the book? ──▶ its caller? ──▶ admitted ──▶ service
//!                                          │ no             │ unknown
//!                                          │                ▼ UNAUTHENTICATED, NOT_ALLOWED
//!                                          ▼ 405, 415, UNIMPLEMENTED, INVALID_ARGUMENT
//! ```
//!
//! Rule: a request that is not gRPC by the book ([`book`]) is refused before anything is made of it,
//! in every service. A client that cannot read the answer would send an append again that was applied.

mod book;

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use futures_util::future::BoxFuture;
use http::{Request, Response};
use http_body::Body as _;
use tokio::runtime::Handle;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::Service;

use super::peer::held_until_sent;
use super::{Incoming, Peer};
use crate::admission::Admission;
use crate::answers::{AnswerShare, Counted, may_be_hurried};
use crate::audit::{AuditLog, AuditedPeer, ChangeEnd, RecordedCall, Trail};
use crate::auth::{Authority, Caller, CertNames, ConnectionTenants, HeldRight, LastCaller};
use crate::forward::{CallRoute, ForwardPool, Forwarder};
use crate::grpc::{RequestBody, through_tonic};
use crate::methods::{Class, Need, Recorded, Rpc};
use crate::metrics::{CallCounter, CallFuture};
use crate::rpc::FirstFault;
use crate::status;

/// The result of a call: refusals are answers, too.
pub(crate) type HttpResult = Result<Response<Body>, Infallible>;

/// A call on its way to its answer.
pub(crate) type HttpAnswer = BoxFuture<'static, HttpResult>;

/// A service, as tonic has generated it or in front of that.
pub(crate) trait Serve: Send + Sync {
    /// Answers one call.
    fn serve(&self, request: Request<RequestBody>, rpc: Rpc, caller: Caller) -> HttpAnswer;
}

/// A service that tonic has generated.
pub(crate) struct Generated<S>(S);

impl<S> Serve for Generated<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future = HttpAnswer>
        + Clone
        + Send
        + Sync
        + 'static,
{
    /// Generated services are always ready.
    fn serve(&self, request: Request<RequestBody>, rpc: Rpc, caller: Caller) -> HttpAnswer {
        let mut service = self.0.clone();
        let (mut head, body) = request.into_parts();
        head.extensions.insert(caller);
        match body {
            RequestBody::One(body) => Box::pin(through_tonic(service, head, body, rpc.access)),
            RequestBody::Many(requests) => {
                let share = head.extensions.get::<AnswerShare>().cloned();
                let fault = FirstFault::default();
                let lease = head.extensions.get::<Caller>();
                let lease = lease.and_then(|caller| caller.lease(HeldRight::Principal));
                let body = fault.in_requests(requests);
                let answer = service.call(Request::from_parts(head, body));
                Box::pin(async move {
                    // Before the first answer is made.
                    let open = match &share {
                        Some(share) => match share.hold_for_stream().await {
                            Ok(open) => Some(open),
                            Err(busy) => return Ok(busy.into_http()),
                        },
                        None => None,
                    };
                    let answer = fault.in_answer(answer.await?, lease);
                    Ok(may_be_hurried(Counted::answer(answer, share, open)))
                })
            }
            RequestBody::Unbounded(body) => {
                service.call(Request::from_parts(head, Body::new(body)))
            }
        }
    }
}

/// A service that tonic has generated, made by its first call. A start has no time for one that few ask for.
struct MadeLate<S, F> {
    made: OnceLock<Result<Generated<S>, Status>>,
    make: F,
}

impl<S, F> Serve for MadeLate<S, F>
where
    S: Send + Sync,
    F: Fn() -> Result<S, Status> + Send + Sync,
    Generated<S>: Serve,
{
    fn serve(&self, request: Request<RequestBody>, rpc: Rpc, caller: Caller) -> HttpAnswer {
        match self.made.get_or_init(|| (self.make)().map(Generated)) {
            Ok(service) => service.serve(request, rpc, caller),
            Err(status) => Box::pin(std::future::ready(Ok(status.clone().into_http()))),
        }
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

    /// Answers calls of this service of tonic's, too.
    pub(crate) fn add_generated<S>(&mut self, service: S)
    where
        S: NamedService + Send + Sync + 'static,
        Generated<S>: Serve,
    {
        self.services.push((S::NAME, Box::new(Generated(service))));
    }

    /// Answers calls of a service of tonic's that `make` makes when the first comes.
    pub(crate) fn add_late<S>(
        &mut self,
        make: impl Fn() -> Result<S, Status> + Send + Sync + 'static,
    ) where
        S: NamedService + Send + Sync + 'static,
        Generated<S>: Serve,
    {
        let made = OnceLock::new();
        self.services
            .push((S::NAME, Box::new(MadeLate { made, make })));
    }

    fn serve(&self, request: Request<RequestBody>, rpc: Rpc, caller: Caller) -> HttpAnswer {
        let name = service_name(request.uri().path());
        match self.services.iter().find(|(known, _)| name == Some(known)) {
            Some((_, service)) => service.serve(request, rpc, caller),
            // A service that is switched off.
            None => {
                let status = status::unknown_method(request.uri().path());
                Box::pin(std::future::ready(Ok(status.into_http())))
            }
        }
    }
}

/// The service in a path `/package.Service/Method`.
fn service_name(path: &str) -> Option<&str> {
    Some(path.strip_prefix('/')?.split_once('/')?.0)
}

/// All that a call passes on its way to its service.
pub(crate) struct Calls {
    pub(crate) counter: CallCounter,
    pub(crate) authority: Authority,
    /// `None`: there is no audit log.
    pub(crate) audit: Option<Arc<AuditLog>>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) routes: Routes,
    /// Forwards calls while this node is a stand-by. `None` without a replica.
    pub(crate) forward: Option<Arc<Forwarder>>,
    /// The HTTP port, for clients that look for it here.
    pub(crate) http: Option<HttpUrl>,
}

/// The beginning of every URL of the HTTP port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HttpUrl {
    pub(crate) address: SocketAddr,
    pub(crate) has_tls: bool,
}

impl fmt::Display for HttpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.has_tls { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.address)
    }
}

/// The calls of one connection.
pub(super) struct ConnectionCalls {
    pub(super) calls: Arc<Calls>,
    pub(super) peer: Peer,
    /// The names in the certificate of the client, if it sent one.
    pub(super) names: Option<Arc<CertNames>>,
    pub(super) last: LastCaller,
    /// `None`: there is no audit log.
    pub(super) audited: Option<Arc<AuditedPeer>>,
    /// The tenants whose calls it has had.
    pub(super) tenants: ConnectionTenants,
    /// Forwards its calls; `None` without a replica.
    pub(super) forward: Option<Arc<ForwardPool>>,
}

impl ConnectionCalls {
    /// The call that a request begins.
    pub(super) fn call(&mut self, request: Request<Incoming>) -> CallFuture<CheckedCall> {
        let last = &mut self.last;
        let Calls {
            counter,
            authority,
            audit,
            admission,
            routes,
            forward: _,
            http,
        } = &*self.calls;
        counter.call(request, |mut request, head| {
            let free = match head.rpc {
                Some(rpc)
                    if matches!(rpc.class, Class::Probe | Class::Health)
                        && rpc.need == Need::Nothing =>
                {
                    match self.peer.free_call() {
                        Ok(free) => Some(free),
                        Err(calls) => {
                            return (CheckedCall::refused(status::free_calls_busy(&calls)), None);
                        }
                    }
                }
                Some(rpc) if rpc.class == Class::Probe => None,
                _ => match self.peer.check_calls() {
                    Ok(()) => None,
                    Err(calls) => return (CheckedCall::refused(status::calls_busy(&calls)), None),
                },
            };
            let rpc = match book::check(&request, head, *http) {
                Ok(rpc) => rpc,
                Err(refusal) => {
                    // Its text waits for the client. One too many has none.
                    let refusal = match free.map_or_else(|| self.peer.free_call(), Ok) {
                        Ok(free) => free.in_answer(*refusal),
                        Err(_) => refusal.map(|_| Body::empty()),
                    };
                    return (CheckedCall::Refused(Some(Box::new(refusal))), None);
                }
            };
            let names = self.names.as_ref();
            let trail = Trail::of(self.audited.as_ref(), request.headers());
            let headers = request.headers();
            let caller = match authority.identify_next(last, headers, names, rpc, trail) {
                Ok(caller) => caller,
                Err(refusal) => return (CheckedCall::refused(refusal), None),
            };
            let forward = self.forward.as_ref();
            let is_forwarded = forward.is_some_and(|forward| forward.is_forwarded(headers));
            let counted = match caller.tenant() {
                Some(tenant) if is_forwarded => self.tenants.count_forwarded(tenant).map(Some),
                Some(tenant) => self.tenants.count(tenant).map(|()| None),
                None => Ok(None),
            };
            let counted = match counted {
                Ok(counted) => counted,
                Err(refusal) => {
                    // It takes a slot of max_connections. That of a proxy may have callers of other tenants, and that of
                    // a stand-by has the calls of many.
                    if !is_forwarded && self.tenants.is_empty() {
                        self.peer.ask_to_leave();
                    }
                    return (CheckedCall::refused(refusal), None);
                }
            };
            let must_refuse = rpc.recorded == Recorded::Change
                && audit.as_ref().is_some_and(|audit| audit.refuses_changes());
            if must_refuse {
                return (CheckedCall::refused(status::audit_failed(rpc.access)), None);
            }
            let recorded = caller.trail().call().cloned();
            let route = forward.map(|forward| forward.route(rpc, request.headers(), &caller));
            if let Some(CallRoute::Refused(refusal)) = route {
                return (CheckedCall::refused(refusal), recorded);
            }
            // The answers of the others are small, or bounded by their own windows.
            if !matches!(
                rpc.class,
                Class::Append | Class::AppendSession | Class::Probe
            ) {
                request.extensions_mut().insert(self.peer.answers.clone());
            }
            let (head, incoming) = request.into_parts();
            let shares = (&self.peer.share, caller.share());
            let body = RequestBody::new(incoming, rpc, &head.headers, admission, shares);
            let body = match body {
                Ok(body) => body,
                Err(busy) => return (CheckedCall::refused(busy), recorded),
            };
            let is_uncharged = body.is_uncharged();
            let request = Request::from_parts(head, body);
            let (call, recorded) = match (route, forward) {
                (Some(CallRoute::Owner(owner)), Some(forward)) => {
                    let served = CheckedCall::Served {
                        is_uncharged,
                        // The owner decides, and its audit log has the end.
                        goes_on: false,
                        answer: Some({
                            let calls = Arc::clone(&self.calls);
                            let shares = (self.peer.share.clone(), caller.share().cloned());
                            let here = move |request| calls.routes.serve(request, rpc, caller);
                            forward.forward(owner, request, rpc, shares, here)
                        }),
                    };
                    (served, recorded)
                }
                _ => {
                    let answer: HttpAnswer = match free {
                        None => routes.serve(request, rpc, caller),
                        Some(free) => {
                            let answer = routes.serve(request, rpc, caller);
                            Box::pin(async move { Ok(free.in_answer(answer.await?)) })
                        }
                    };
                    let answer: HttpAnswer = match counted {
                        None => answer,
                        Some(counted) => {
                            Box::pin(async move { Ok(held_until_sent(answer.await?, counted)) })
                        }
                    };
                    let (answer, recorded) = match recorded {
                        Some(change) if rpc.goes_on() => (with_end(answer, change), None),
                        recorded => (answer, recorded),
                    };
                    let served = CheckedCall::Served {
                        is_uncharged,
                        goes_on: rpc.goes_on(),
                        answer: Some(answer),
                    };
                    (served, recorded)
                }
            };
            (call, recorded)
        })
    }
}

/// An answer whose change gets its line in the audit log when it is there.
fn with_end(answer: HttpAnswer, change: Arc<RecordedCall>) -> HttpAnswer {
    let end = ChangeEnd::new(change);
    Box::pin(async move {
        let answer = answer.await?;
        end.answered(answer.headers());
        Ok(answer)
    })
}

/// A call that is served, or the answer to a request that is refused by its head.
pub(super) enum CheckedCall {
    Served {
        /// `None` once the call is answered.
        answer: Option<HttpAnswer>,
        /// Whether its head is charged when it runs.
        is_uncharged: bool,
        /// Whether the call continues without its client: the engine has the change, which stays charged and is counted
        /// like all others.
        goes_on: bool,
    },
    Refused(Option<Box<Response<Body>>>),
}

impl CheckedCall {
    fn refused(why: Status) -> Self {
        Self::Refused(Some(Box::new(why.into_http())))
    }

    /// Whether its answer is there, and is a head alone.
    pub(super) fn is_refused(&self) -> bool {
        matches!(self, Self::Refused(Some(answer)) if answer.body().is_end_stream())
    }

    /// Whether it is charged when it runs.
    pub(super) fn is_uncharged(&self) -> bool {
        matches!(
            self,
            Self::Served {
                is_uncharged: true,
                ..
            }
        )
    }
}

impl Future for CheckedCall {
    type Output = HttpResult;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<HttpResult> {
        match self.get_mut() {
            Self::Served { answer, .. } => {
                // Nobody asks again once it was answered.
                let Some(serving) = answer else {
                    return Poll::Pending;
                };
                let result = ready!(serving.as_mut().poll(context));
                *answer = None;
                Poll::Ready(result)
            }
            Self::Refused(refusal) => match refusal.take() {
                Some(refusal) => Poll::Ready(Ok(*refusal)),
                None => Poll::Pending,
            },
        }
    }
}

impl Drop for CheckedCall {
    fn drop(&mut self) {
        if let Self::Served {
            answer,
            goes_on: true,
            ..
        } = self
            && let (Some(serving), Ok(event_loop)) = (answer.take(), Handle::try_current())
        {
            event_loop.spawn(serving);
        }
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
