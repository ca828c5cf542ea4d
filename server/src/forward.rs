//! A stand-by takes calls and forwards them to the owner of the store.
//!
//! ```text
//! client ──▶ head checked, caller known ──▶ messages bounded and admitted ──▶ owner, over a link of this event loop
//! client ◀── pieces as the client takes them ◀── window of the stream ◀────────────────┘
//! ```
//!
//! No message is decoded, except that a stand-by with a copy looks whether any node may answer a read. The owner gets the caller's token, and checks it again. The certificate of a stand-by is no
//! credential of its callers: a forwarded call without a token has no caller at an owner with `auth_file`. A call goes on once: it carries
//! the term in which the receiver should own the store, and a receiver that does not own it in that term answers MOVED.
//!
//! **Bounds**: messages of requests stay in the budgets of [`crate::admission`] until the link has them. A client that
//! reads slowly leaves the window of its stream closed. At most [`MOST_CALLS`] calls are forwarded at a time; further
//! ones get MOVED, as all calls do whose owner is out of reach. A caller has at most as many as it leaves free
//! ([`ForwardPlaces`]).
//!
//! | file | purpose |
//! |---|---|
//! | `link.rs` | connections to the owner |
//! | `stream.rs` | the messages of one call, in both directions |

mod link;
mod stream;

use std::future::{Future as _, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use http::header::{CONTENT_LENGTH, HOST, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Request, Response, Uri};
use prost::Message as _;
use tonic::Status;
use tonic::body::Body;
use wald_proto::{Method, v1};

use crate::admission::{GroupShare, Share};
use crate::answers::{AnswerShare, Counted, may_be_hurried};
use crate::audit::ShownCredential;
use crate::auth::Caller;
use crate::config::Config;
use crate::drain::bound;
use crate::grpc::{OneMessage, RequestBody, receive};
use crate::known_bad;
use crate::methods::{self, Rpc};
use crate::metrics::{Deadline, ForwardMetrics, ForwardResult};
use crate::rpc::Node;
use crate::serve::{Exit, StoreOwner};
use crate::status::{self, Access};
use crate::tls::PeerTls;
use crate::transport::HttpAnswer;
pub(crate) use link::ForwardPool;
use link::OpenOwnerLink;
use stream::{ForwardedAnswer, ForwardedRequest, UploadEnd};

/// Term in which the receiver of a forwarded call should own the store.
static FORWARDED: HeaderName = HeaderName::from_static("wald-forwarded");
/// Address of the owner, which has answered.
static OWNER: HeaderName = HeaderName::from_static("wald-owner");
static GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
static GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// Maximum number of calls that are forwarded at a time. Each has a window of [`link::STREAM_WINDOW`] bytes.
const MOST_CALLS: u64 = 1024;
/// Places that sessions and scans leave to calls of one answer, which are soon over.
const FOR_ONE_ANSWER: u64 = MOST_CALLS / 8;

/// Knows the owner of the store, and the way to it.
pub(crate) struct Forwarder {
    node: Arc<Node>,
    /// `None`: plaintext.
    tls: Option<Arc<PeerTls>>,
    metrics: ForwardMetrics,
    places: Arc<ForwardPlaces>,
    /// `None`: the owner is never asked whether it is there.
    keepalive_interval: Option<Duration>,
    keepalive_timeout: Duration,
}

/// The node that answers a call.
pub(crate) enum CallRoute {
    /// This one.
    Here,
    /// The owner of the store.
    Owner(StoreOwner),
    /// None: another node than its sender expects owns the store, or the caller is not known.
    Refused(Status),
}

/// Counts the calls that are forwarded. A tenant, a principal without one, or a connection without either may have as
/// many as it leaves free: sessions and scans last as long as their callers want, and one caller must not keep all
/// others from the owner.
#[derive(Default)]
struct ForwardPlaces(AtomicU64);

/// The caller of a forwarded call.
struct ForwardHolder {
    connection: Share,
    /// `None` without `auth_file`.
    group: Option<Arc<GroupShare>>,
}

impl ForwardHolder {
    fn calls(&self) -> &AtomicU64 {
        match &self.group {
            Some(group) => group.forwarded(),
            None => self.connection.forwarded(),
        }
    }
}

/// A place among the calls that are forwarded.
struct ForwardSlot {
    places: Arc<ForwardPlaces>,
    holder: ForwardHolder,
}

impl ForwardPlaces {
    /// A place for one more call, if there is one.
    fn take(self: &Arc<Self>, holder: ForwardHolder, is_stream: bool) -> Option<ForwardSlot> {
        let own = holder.calls().fetch_add(1, Ordering::Relaxed) + 1;
        let all = self.0.fetch_add(1, Ordering::Relaxed) + 1;
        let slot = ForwardSlot {
            places: Arc::clone(self),
            holder,
        };
        let most = match is_stream {
            true => MOST_CALLS - FOR_ONE_ANSWER,
            false => MOST_CALLS,
        };
        (own + all <= most || (own == 1 && all <= most)).then_some(slot)
    }
}

impl Drop for ForwardSlot {
    fn drop(&mut self) {
        self.holder.calls().fetch_sub(1, Ordering::Relaxed);
        self.places.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Forwarder {
    /// Forwards calls of this node. `None` without a replica: then there is no other owner.
    ///
    /// # Errors
    /// If the files of TLS for connections to other nodes cannot be used.
    pub(crate) fn new(node: &Arc<Node>, config: &Config) -> Result<Option<Arc<Self>>, Exit> {
        if !config.has_replica() {
            return Ok(None);
        }
        let tls = PeerTls::new(config).filter(|_| config.stand_by);
        if let Some(tls) = &tls {
            tls.terms().map_err(|why| Exit::new(Exit::CONFIG, why))?;
        }
        let metrics = node.metrics.forwards().map_err(|error| {
            let text = format!("metrics cannot be registered: {error}");
            Exit::new(Exit::SYSTEM, text)
        })?;
        Ok(Some(Arc::new(Self {
            node: Arc::clone(node),
            tls: tls.map(Arc::new),
            metrics,
            places: Arc::default(),
            keepalive_interval: bound(config.keepalive_interval),
            keepalive_timeout: config.keepalive_timeout,
        })))
    }

    /// Connections of one event loop.
    pub(crate) fn pool(self: &Arc<Self>) -> Arc<ForwardPool> {
        ForwardPool::new(self)
    }

    /// Decides which node answers a call with this head.
    fn route(&self, rpc: Rpc, headers: &HeaderMap, caller: &Caller) -> CallRoute {
        if !rpc.is_of_store {
            return CallRoute::Here;
        }
        let term = headers.get(&FORWARDED);
        let is_by_certificate = (caller.identity())
            .is_some_and(|known| matches!(known.credential(), ShownCredential::Certificate));
        if term.is_some() && is_by_certificate {
            return CallRoute::Refused(status::forwarded_without_token(rpc.access));
        }
        if self.node.store.get().is_some() {
            return match (term, self.node.replica()) {
                (Some(term), Some(replica)) => {
                    let own = replica.owner();
                    let is_own_term = term.as_bytes() == own.term.to_string().as_bytes();
                    match is_own_term || known_bad::ignores_term() {
                        true => CallRoute::Here,
                        false => CallRoute::Refused(moved(rpc.access, &own)),
                    }
                }
                _ => CallRoute::Here,
            };
        }
        // The owner could not know a caller by a certificate of another connection.
        if term.is_some() || is_by_certificate {
            return CallRoute::Here;
        }
        let owner = self.node.owner.borrow().clone();
        let owner = owner.filter(|owner| !owner.endpoint.is_empty());
        owner.map_or(CallRoute::Here, CallRoute::Owner)
    }
}

impl ForwardPool {
    /// Whether a stand-by has forwarded the call of this head.
    pub(crate) fn is_forwarded(&self, headers: &HeaderMap) -> bool {
        headers.contains_key(&FORWARDED)
    }

    /// Decides which node answers a call with this head.
    pub(crate) fn route(&self, rpc: Rpc, headers: &HeaderMap, caller: &Caller) -> CallRoute {
        self.forwarder.route(rpc, headers, caller)
    }

    /// Answers a call with the answer of the owner, or `here` if any node may answer and this one has a copy of the store.
    pub(crate) fn forward(
        self: &Arc<Self>,
        owner: StoreOwner,
        mut request: Request<RequestBody>,
        rpc: Rpc,
        (connection, group): (Share, Option<Arc<GroupShare>>),
        here: impl FnOnce(Request<RequestBody>) -> HttpAnswer + Send + 'static,
    ) -> HttpAnswer {
        let pool = Arc::clone(self);
        let holder = ForwardHolder { connection, group };
        Box::pin(async move {
            let answer = match pool.may_answer(&mut request, rpc).await {
                Ok(true) => return here(request).await,
                Ok(false) => Box::pin(pool.call(owner, request, rpc, holder)).await,
                Err(status) => Err(status),
            };
            Ok(answer.unwrap_or_else(Status::into_http))
        })
    }

    /// Whether this node may answer a call instead of the owner. Only reads are looked into, and only if there is a copy.
    async fn may_answer(
        &self,
        request: &mut Request<RequestBody>,
        rpc: Rpc,
    ) -> Result<bool, Status> {
        let is_read = rpc.name == methods::of(Method::Read).name;
        let is_scan = rpc.name == methods::of(Method::Scan).name;
        if !(is_read || is_scan) || !self.forwarder.node.has_copy() {
            return Ok(false);
        }
        let RequestBody::One(body) = request.body_mut() else {
            return Ok(false);
        };
        let message = body.receive().await?;
        let payload = message.clone().payload();
        // The owner refuses a message that is none.
        let is_for_any = match is_scan {
            true => v1::ScanRequest::decode(payload).is_ok_and(|request| request.any_node),
            false => v1::ReadRequest::decode(payload).is_ok_and(|request| request.any_node),
        };
        body.put_back(message);
        Ok(is_for_any)
    }

    async fn call(
        self: &Arc<Self>,
        owner: StoreOwner,
        request: Request<RequestBody>,
        rpc: Rpc,
        holder: ForwardHolder,
    ) -> Result<Response<Body>, Status> {
        let access = rpc.access;
        let (mut head, body) = request.into_parts();
        let share = head.extensions.get::<AnswerShare>().cloned();
        // The message stays charged until the owner answers.
        let is_session = matches!(body, RequestBody::Many(_));
        let (_charged, messages): (Option<OneMessage>, _) = match body {
            RequestBody::One(mut one) => {
                let message = receive(&head, &mut one, access).await?;
                (Some(one), ForwardedRequest::one(message))
            }
            RequestBody::Many(messages) => (None, ForwardedRequest::many(messages)),
            RequestBody::Unbounded(_) => return Err(status::unknown_method(head.uri.path())),
        };
        let mut counted = self.forwarder.metrics.begin(rpc);
        let is_scan = rpc.name == methods::of(Method::Scan).name;
        let slot = self.forwarder.places.take(holder, is_session || is_scan);
        let Some(slot) = slot else {
            counted.ended(ForwardResult::Unreachable);
            return Err(unforwarded(access, &owner));
        };
        let sent = self.send(&mut head, &owner).await?;
        let Some((link, mut response, sender)) = sent else {
            counted.ended(ForwardResult::Unreachable);
            return Err(unforwarded(access, &owner));
        };
        let (mut upload, mut cut) = (Some(messages.to(sender)), None);
        let answer = poll_fn(|context| {
            if let Some(sending) = &mut upload
                && let Poll::Ready(end) = sending.poll(context)
            {
                upload = None;
                if let UploadEnd::Refused(status) = end {
                    cut = Some(status);
                }
            }
            Pin::new(&mut response).poll(context)
        });
        let answer = match answer.await {
            Ok(answer) => answer,
            // The owner has made nothing of it.
            Err(error) if error.reason() == Some(h2::Reason::REFUSED_STREAM) => {
                counted.ended(ForwardResult::Unreachable);
                return Err(unforwarded(access, &owner));
            }
            Err(error) => {
                counted.ended(ForwardResult::Broken);
                return Err(broken(&owner, &error));
            }
        };
        counted.ended(ForwardResult::Answered);
        let (mut parts, received) = answer.into_parts();
        let code = parts.headers.get(&GRPC_STATUS);
        // A node that is not available is not named as the owner.
        if code.is_none_or(|code| code != "14")
            && let Ok(endpoint) = HeaderValue::from_str(&owner.endpoint)
        {
            parts.headers.insert(&OWNER, endpoint);
        }
        if received.is_end_stream() {
            let is_good = parts
                .headers
                .get(&GRPC_STATUS)
                .is_none_or(|code| code == "0");
            return match cut.filter(|_| is_good) {
                Some(status) => Err(status),
                None => Ok(Response::from_parts(parts, Body::empty())),
            };
        }
        let ends_at_drain = is_session || is_scan;
        let phase = ends_at_drain.then(|| self.forwarder.node.phase.clone());
        let body = ForwardedAnswer::new(
            upload,
            cut,
            is_session,
            received,
            owner,
            phase,
            (link, slot),
        );
        let answer = Response::from_parts(parts, Body::new(body));
        let answer = Counted::answer(answer, share, None);
        Ok(match access {
            Access::Read => may_be_hurried(answer),
            // It tells its client whether the write was applied, and is never cut off.
            Access::Write => answer,
        })
    }

    /// Sends the head of a call. `None` if the owner is out of reach: then it has got nothing.
    ///
    /// # Errors
    /// If nobody waits for the answer any more.
    async fn send(
        self: &Arc<Self>,
        head: &mut Parts,
        owner: &StoreOwner,
    ) -> Result<
        Option<(
            OpenOwnerLink,
            h2::client::ResponseFuture,
            h2::SendStream<stream::ForwardedPiece>,
        )>,
        Status,
    > {
        let Some(uri) = self.uri(owner, &head.uri) else {
            return Ok(None);
        };
        let deadline = head.extensions.get::<Deadline>().cloned();
        let headers = &mut head.headers;
        headers.remove(HOST);
        headers.remove(CONTENT_LENGTH);
        headers.insert(&FORWARDED, owner.term.into());
        // A link that its owner closes is found out when it is used.
        for _ in 0..2 {
            let Some(link) = self.link(owner).await else {
                break;
            };
            let Ok(mut requests) = link.requests().ready().await else {
                self.remove(&link);
                continue;
            };
            if let Some(deadline) = &deadline {
                if !deadline.begin() {
                    return Err(status::deadline_before_start());
                }
                headers.insert(&GRPC_TIMEOUT, left(deadline.at));
            }
            let mut request = Request::post(uri.clone()).version(http::Version::HTTP_2);
            if let Some(to) = request.headers_mut() {
                to.clone_from(headers);
            }
            let Ok(request) = request.body(()) else {
                break;
            };
            match requests.send_request(request, false) {
                Ok((response, sender)) => return Ok(Some((link, response, sender))),
                Err(_) => self.remove(&link),
            }
        }
        Ok(None)
    }

    fn uri(&self, owner: &StoreOwner, uri: &Uri) -> Option<Uri> {
        let scheme = match self.forwarder.tls {
            Some(_) => "https",
            None => "http",
        };
        Uri::builder()
            .scheme(scheme)
            .authority(&*owner.endpoint)
            .path_and_query(uri.path())
            .build()
            .ok()
    }
}

/// The answer to a call that belongs to another node.
fn moved(access: Access, owner: &StoreOwner) -> Status {
    status::moved(access, &owner.endpoint, owner.term)
}

/// The answer to a call that has not gone on.
fn unforwarded(access: Access, owner: &StoreOwner) -> Status {
    status::unforwarded(access, &owner.endpoint, owner.term)
}

/// The answer to a call that may have reached the owner, as a broken connection gives it to a client.
fn broken(owner: &StoreOwner, error: &h2::Error) -> Status {
    Status::unavailable(format!(
        "the connection to the owner of the store at {} broke: {error}",
        owner.endpoint
    ))
}

/// The time until `at`, as `grpc-timeout` has it: at most 8 digits.
fn left(at: Instant) -> HeaderValue {
    let left = at.saturating_duration_since(Instant::now());
    let text = match left.as_micros() {
        micros @ ..=99_999_999 => format!("{micros}u"),
        micros => format!("{}S", (micros / 1_000_000).min(99_999_999)),
    };
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("0u"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Places that a new caller of this group, or of a connection of its own, gets one after the other.
    fn taken(
        places: &Arc<ForwardPlaces>,
        group: Option<&Arc<GroupShare>>,
        is_stream: bool,
    ) -> Vec<ForwardSlot> {
        let connection = Share::default();
        let holder = || ForwardHolder {
            connection: connection.clone(),
            group: group.cloned(),
        };
        std::iter::from_fn(|| places.take(holder(), is_stream)).collect()
    }

    #[test]
    fn caller_with_idle_sessions_leaves_places_for_others() {
        let places = Arc::default();
        let group = |name: &str| Arc::new(GroupShare::new(name.to_owned()));
        let greedy = group("tenant a");
        let sessions = taken(&places, Some(&greedy), true);
        assert_eq!(sessions.len() as u64, (MOST_CALLS - FOR_ONE_ANSWER) / 2);
        // Another connection of the tenant gets no more.
        assert!(taken(&places, Some(&greedy), true).is_empty());
        let other = taken(&places, Some(&group("tenant b")), true);
        assert_eq!(other.len(), sessions.len() / 2);
        let open: Vec<_> = (0..MOST_CALLS)
            .map(|_| taken(&places, None, true))
            .collect();
        let all = sessions.len() + other.len() + open.iter().flatten().count();
        assert_eq!(all as u64, MOST_CALLS - FOR_ONE_ANSWER);
        assert!(taken(&places, None, true).is_empty());
        assert!(!taken(&places, None, false).is_empty());
        drop((sessions, other, open));
        assert_eq!(taken(&places, None, false).len() as u64, MOST_CALLS / 2);
    }

    #[test]
    fn time_that_is_left_has_at_most_eight_digits_and_is_never_longer() {
        for (seconds, digits) in [(0, 2), (1, 7), (99, 9), (101, 4), (1 << 40, 9)] {
            let Some(at) = Instant::now().checked_add(Duration::from_secs(seconds)) else {
                continue;
            };
            let text = left(at);
            let text = text.to_str().unwrap();
            let (number, unit) = text.split_at(text.len() - 1);
            let each = if unit == "u" { 1 } else { 1_000_000 };
            let micros = number.parse::<u64>().unwrap() * each;
            assert!(
                text.len() <= digits && micros <= seconds * 1_000_000,
                "{text}"
            );
            assert!(
                micros + 2_000_000 >= seconds.min(99_999_999) * 1_000_000,
                "{text}"
            );
        }
    }
}
