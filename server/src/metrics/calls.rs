//! The wrapper around every gRPC call. It counts the call under the names that dashboards for
//! gRPC servers query, and enforces its deadline.
//!
//! The deadline is kept here and not by tonic because tonic answers CANCELLED without a detail,
//! and a writer must learn that the outcome is unknown.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use foldhash::{HashMap, HashMapExt as _};
use http::{HeaderMap, Request, Response};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use prometheus::{Error, Histogram, IntCounter, IntCounterVec, Opts};
use prost::Message;
use prost_types::FileDescriptorSet;
use tokio::time::Sleep;
use tonic::Status;
use tracing::Span;
use wald_proto::Method;

use super::Maker;
use super::deadline::{Deadline, MalformedTimeout, grpc_timeout};
use super::refusals::{AllRefusals, Refusals};
use crate::audit::RecordedCall;
use crate::methods::{self, Rpc};
use crate::status::Access;
use crate::trace;

/// The codes in the order of their numbers, as other servers spell them in metrics.
const CODES: [&str; 17] = [
    "OK",
    "Canceled",
    "Unknown",
    "InvalidArgument",
    "DeadlineExceeded",
    "NotFound",
    "AlreadyExists",
    "PermissionDenied",
    "ResourceExhausted",
    "FailedPrecondition",
    "Aborted",
    "OutOfRange",
    "Unimplemented",
    "Internal",
    "Unavailable",
    "DataLoss",
    "Unauthenticated",
];
const CANCELED: usize = 1;
const UNKNOWN: usize = 2;

/// The name of a code, as [`CODES`] spells it.
pub(crate) fn code_name(code: usize) -> &'static str {
    CODES.get(code).copied().unwrap_or(CODES[UNKNOWN])
}

/// The code in a head or in trailers. `None`: it is not there.
pub(crate) fn code_in(headers: &HeaderMap) -> Option<usize> {
    let code = headers.get(Status::GRPC_STATUS)?;
    let code = code.to_str().ok().and_then(|code| code.parse().ok());
    Some(code.unwrap_or(UNKNOWN))
}

/// Facts from the head of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestHead {
    /// `None`: no service that this server could have has such a method.
    pub(crate) rpc: Option<Rpc>,
    /// Whether `grpc-timeout` can be read, if it is there.
    pub(crate) timeout: Result<(), MalformedTimeout>,
}

/// Metrics of one RPC.
#[derive(Debug)]
struct MethodMetrics {
    access: Access,
    unary: bool,
    started: IntCounter,
    handled: Vec<IntCounter>,
    refused: Refusals,
    seconds: Histogram,
}

/// Each RPC with its metrics, by path. `None`: its calls are not counted, because they show the cost
/// of a call without that (echo).
type Methods = HashMap<String, (Rpc, Option<Arc<MethodMetrics>>)>;

/// Metrics of all RPCs.
pub(super) struct CallMetrics {
    methods: Arc<Methods>,
    unknown: Arc<MethodMetrics>,
    append: Arc<MethodMetrics>,
    append_batch: Arc<MethodMetrics>,
    refusals: AllRefusals,
}

impl CallMetrics {
    pub(super) fn new(make: &Maker<'_>) -> Result<Self, Error> {
        let refusals = AllRefusals::new(make)?;
        let labels = ["grpc_type", "grpc_service", "grpc_method"];
        let counters = |name: &str, help: &str, labels: &[&str]| {
            make.register(IntCounterVec::new(Opts::new(name, help), labels)?)
        };
        let started = counters(
            "grpc_server_started_total",
            "Calls that began, by kind, service and method. An answered independent request of an AppendSession counts as a call of Append or AppendBatch, too.",
            &labels,
        )?;
        let handled = counters(
            "grpc_server_handled_total",
            "Calls that ended, by kind, service, method and code. An answered independent request of an AppendSession counts as a call of Append or AppendBatch, too.",
            &["grpc_type", "grpc_service", "grpc_method", "grpc_code"],
        )?;
        let seconds = make.latencies(
            "grpc_server_handling_seconds",
            "Duration of calls in seconds, from the request's head to the answer's trailers. Independent requests of an AppendSession have none here: wald_append_duration_seconds has theirs.",
            &labels,
        )?;
        let method = |kind: &str, service: &str, name: &str, access: Access| {
            Arc::new(MethodMetrics {
                access,
                unary: kind == "unary",
                started: started.with_label_values(&[kind, service, name]),
                handled: CODES
                    .iter()
                    .map(|code| handled.with_label_values(&[kind, service, name, code]))
                    .collect(),
                refused: refusals.of(access).clone(),
                seconds: seconds.with_label_values(&[kind, service, name]),
            })
        };
        let mut methods = HashMap::new();
        // The descriptors of the contract are large: a start has no time to decode them.
        for rpc in Method::ALL {
            let (service, name) = rpc.service_and_name();
            let row = methods::of(*rpc);
            let counted = method(rpc.kind(), service, name, row.access);
            methods.insert(rpc.path().to_owned(), (row, Some(counted)));
        }
        for descriptors in [
            tonic_health::pb::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
        ] {
            for (kind, service, name) in rpcs(descriptors) {
                let path = format!("/{service}/{name}");
                let row = methods::foreign(&path);
                let counted = method(kind, &service, &name, row.access);
                methods.insert(path, (row, Some(counted)));
            }
        }
        for (_, service, name) in rpcs(wald_proto::ECHO_FILE_DESCRIPTOR_SET) {
            let path = format!("/{service}/{name}");
            let row = methods::foreign(&path);
            methods.insert(path, (row, None));
        }
        let unknown = method("unary", "unknown", "unknown", Access::Read);
        let counted = |method: Method| match methods.get(method.path()) {
            Some((_, Some(counted))) => Arc::clone(counted),
            _ => Arc::clone(&unknown),
        };
        let (append, append_batch) = (counted(Method::Append), counted(Method::AppendBatch));
        Ok(Self {
            methods: Arc::new(methods),
            unknown,
            append,
            append_batch,
            refusals,
        })
    }

    /// Writes that the state of the server refused since the process started.
    pub(super) fn refused_writes(&self) -> u64 {
        self.refusals.writes()
    }

    /// Counts `count` independent requests of a session that were answered with this status; `None`: with an ack. They count as
    /// calls of Append or AppendBatch, because programs make them as such.
    pub(super) fn requests_answered(&self, is_record: bool, refusal: Option<&Status>, count: u64) {
        let method = match is_record {
            true => &self.append,
            false => &self.append_batch,
        };
        method.started.inc_by(count);
        let code = refusal.map_or(tonic::Code::Ok, Status::code);
        if let Some(counter) = method.handled.get(code as usize) {
            counter.inc_by(count);
        }
        if let Some(status) = refusal.filter(|_| code != tonic::Code::Internal) {
            method.refused.count_status(status, count);
        }
    }

    pub(super) fn counter(&self, ceiling: Option<Duration>) -> CallCounter {
        CallCounter {
            methods: Arc::clone(&self.methods),
            unknown: Arc::clone(&self.unknown),
            ceiling,
        }
    }
}

/// Kind, service and name of every RPC in an encoded descriptor set. The sets are part of
/// the binary; one that does not decode would have failed the tests of its crate.
fn rpcs(descriptors: &[u8]) -> Vec<(&'static str, String, String)> {
    let set = FileDescriptorSet::decode(descriptors).unwrap_or_default();
    let mut found = Vec::new();
    for file in &set.file {
        for service in &file.service {
            for method in &service.method {
                let kind = match (method.client_streaming(), method.server_streaming()) {
                    (false, false) => "unary",
                    (true, false) => "client_stream",
                    (false, true) => "server_stream",
                    (true, true) => "bidi_stream",
                };
                let service = format!("{}.{}", file.package(), service.name());
                found.push((kind, service, method.name().to_owned()));
            }
        }
    }
    found
}

/// Counts calls, and ends them at their deadline.
#[derive(Debug)]
pub(crate) struct CallCounter {
    methods: Arc<Methods>,
    unknown: Arc<MethodMetrics>,
    /// Longest time of a unary call.
    ceiling: Option<Duration>,
}

impl CallCounter {
    /// Runs the call that `serve` makes of the request and the facts of its head. `serve` also returns the call as the
    /// audit log has it, if its line is to be written when the client gets its answer.
    pub(crate) fn call<B, F>(
        &self,
        mut request: Request<B>,
        serve: impl FnOnce(Request<B>, RequestHead) -> (F, Option<Arc<RecordedCall>>),
    ) -> CallFuture<F> {
        let known = self.methods.get(request.uri().path());
        let asked = grpc_timeout(request.headers());
        let head = RequestHead {
            rpc: known.map(|(rpc, _)| *rpc),
            timeout: asked.map(|_| ()),
        };
        let method = match known {
            Some((_, Some(method))) => method,
            Some((_, None)) => {
                return CallFuture {
                    call: None,
                    inner: serve(request, head).0,
                    sleep: None,
                    deadline: None,
                };
            }
            None => &self.unknown,
        };
        method.started.inc();
        let started = Instant::now();
        let ceiling = self.ceiling.filter(|_| method.unary);
        let timeout = match (asked.unwrap_or(None), ceiling) {
            (Some(asked), Some(ceiling)) => Some(asked.min(ceiling)),
            (asked, ceiling) => asked.or(ceiling),
        };
        // A time too far off to be represented is no deadline.
        let deadline = timeout
            .and_then(|timeout| started.checked_add(timeout))
            .map(Deadline::new);
        if let Some(deadline) = &deadline {
            request.extensions_mut().insert(deadline.clone());
        }
        let span = trace::call(request.uri().path(), known.is_some(), request.headers());
        let (inner, recorded) = serve(request, head);
        CallFuture {
            call: Some(Call {
                span,
                method: Arc::clone(method),
                started,
                counted: false,
                recorded,
            }),
            inner,
            sleep: None,
            deadline,
        }
    }
}

/// One call: counted once, also if it is dropped on the way because the client left.
struct Call {
    span: Span,
    method: Arc<MethodMetrics>,
    started: Instant,
    counted: bool,
    /// `None`: the audit log has no line for it.
    recorded: Option<Arc<RecordedCall>>,
}

impl Call {
    fn count(&mut self, code: usize, trailers: Option<&HeaderMap>) {
        if !std::mem::replace(&mut self.counted, true) {
            if let Some(recorded) = self.recorded.take() {
                recorded.ended(code, trailers);
            }
            let handled = &self.method.handled;
            if let Some(counter) = handled.get(code).or_else(|| handled.get(UNKNOWN)) {
                counter.inc();
            }
            trace::ended(&self.span, code);
            let seconds = self.started.elapsed().as_secs_f64();
            self.method.seconds.observe(seconds);
        }
    }

    /// Takes the code from a head (a call that failed at once) or from trailers.
    fn count_if_told(&mut self, headers: &HeaderMap) {
        if let Some(code) = code_in(headers) {
            if !self.counted {
                self.method.refused.count(code, headers);
            }
            self.count(code, Some(headers));
        }
    }

    /// The head of the answer is there. One without a code begins the messages of a stream.
    fn answered(&mut self, head: &HeaderMap) {
        self.count_if_told(head);
        if let Some(recorded) = &self.recorded
            && !self.method.unary
        {
            recorded.began();
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.count(CANCELED, None);
    }
}

pin_project! {
    /// A call until its head is sent.
    pub(crate) struct CallFuture<F> {
        call: Option<Call>,
        #[pin]
        inner: F,
        // Made by the first wait. Boxed: the future is allocated and moved for each call.
        sleep: Option<Pin<Box<Sleep>>>,
        deadline: Option<Deadline>,
    }
}

impl<F> CallFuture<F> {
    /// The call as it was given.
    pub(crate) fn inner(&self) -> &F {
        &self.inner
    }
}

impl<F, R, E> Future for CallFuture<F>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: Default,
{
    type Output = Result<Response<CallBody<R>>, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let polled = {
            let _entered = this.call.as_ref().map(|call| call.span.enter());
            this.inner.poll(context)
        };
        let response = match polled {
            Poll::Ready(response) => response?,
            Poll::Pending => {
                let Some(deadline) = this.deadline else {
                    return Poll::Pending;
                };
                let sleep = (this.sleep)
                    .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline.at.into())));
                ready!(sleep.as_mut().poll(context));
                let access = this
                    .call
                    .as_ref()
                    .map_or(Access::Read, |call| call.method.access);
                deadline.passed(access).into_http()
            }
        };
        let (head, body) = response.into_parts();
        let mut call = this.call.take();
        if let Some(call) = &mut call {
            call.answered(&head.headers);
        }
        Poll::Ready(Ok(Response::from_parts(
            head,
            CallBody { inner: body, call },
        )))
    }
}

pin_project! {
    /// The rest of a call: messages and trailers.
    pub(crate) struct CallBody<R> {
        #[pin]
        inner: R,
        call: Option<Call>,
    }
}

impl<R: Body<Data = Bytes>> Body for CallBody<R> {
    type Data = Bytes;
    type Error = R::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        let this = self.project();
        let frame = ready!(this.inner.poll_frame(context));
        if let (Some(Ok(frame)), Some(call)) = (&frame, this.call)
            && let Some(trailers) = frame.trailers_ref()
        {
            call.count_if_told(trailers);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rpc_of_the_contract_is_known_with_its_kind() {
        let found = rpcs(wald_proto::FILE_DESCRIPTOR_SET);
        let kind = |service: &str, method: &str| {
            let rpc = found
                .iter()
                .find(|(_, s, m)| s == service && m == method)
                .unwrap();
            rpc.0
        };
        assert_eq!(kind("wald.v1.WalService", "Append"), "unary");
        assert_eq!(kind("wald.v1.WalService", "Scan"), "server_stream");
        assert_eq!(kind("wald.v1.WalService", "AppendSession"), "bidi_stream");
        let known = Method::ALL.iter().map(|rpc| {
            let (service, name) = rpc.service_and_name();
            (rpc.kind(), service.to_owned(), name.to_owned())
        });
        assert_eq!(known.collect::<Vec<_>>(), found);
    }
}
