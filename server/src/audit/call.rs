//! The part of a call that its lines need: its origin from the head of the request, facts that handlers add, its end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use http::{HeaderMap, HeaderName};
use parking_lot::Mutex;
use tonic::Status;
use tonic_types::StatusExt as _;

use super::AuditLog;
use super::facts::CallFacts;
use super::line::{AuditLine, DENIED, FAILED, OK, UNAUTHENTICATED, UNKNOWN, shortened};
use crate::auth::{Identity, Right, TokenId, VerifiedJwt};
use crate::methods::{Recorded, Rpc};
use crate::metrics::{code_in, code_name};

/// The header of W3C Trace Context.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The audit log as the calls of one connection see it.
pub(crate) struct AuditedPeer {
    pub(super) log: Arc<AuditLog>,
    pub(super) address: Option<SocketAddr>,
}

/// The trace that a call belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RequestId(u128);

impl RequestId {
    /// Reads `00-<trace id, 32>-<parent id, 16>-<flags, 2>`.
    fn of(headers: &HeaderMap) -> Option<Self> {
        let value = headers.get(&TRACEPARENT)?.to_str().ok()?;
        let id = value.split('-').nth(1)?;
        let is_hex = id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        let id = u128::from_str_radix(id, 16).ok()?;
        (is_hex && id != 0).then_some(Self(id))
    }

    fn shown(self) -> String {
        format!("{:032x}", self.0)
    }
}

/// The credential with which a call came, without its secret.
#[derive(Debug, Clone)]
pub(crate) enum ShownCredential {
    None,
    /// One whose form or signature is wrong: it says nothing about the caller.
    Unverified,
    Certificate,
    Token(TokenId),
    /// Its signature is right.
    Jwt(Arc<VerifiedJwt>),
}

impl ShownCredential {
    fn kind(&self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Unverified => "unverified",
            Self::Certificate => "certificate",
            Self::Token(_) => "token",
            Self::Jwt(_) => "jwt",
        }
    }

    /// The public id of a token.
    pub(crate) fn id(&self) -> Option<&str> {
        match self {
            Self::None | Self::Unverified | Self::Certificate => None,
            Self::Token(id) => Some(id.as_str()),
            Self::Jwt(jwt) => Some(jwt.id()),
        }
    }
}

/// The trail of one call. Without an audit log it is empty, and costs nothing.
#[derive(Clone, Default)]
pub(crate) struct Trail {
    peer: Option<Arc<AuditedPeer>>,
    request_id: Option<RequestId>,
    /// `None`: only refusals of the call are recorded.
    call: Option<Arc<RecordedCall>>,
}

/// A call whose beginning or end is recorded.
pub(crate) struct RecordedCall {
    peer: Arc<AuditedPeer>,
    request_id: Option<RequestId>,
    rpc: Rpc,
    /// `None` without `auth_file`.
    identity: Option<Arc<Identity>>,
    facts: Mutex<CallFacts>,
    /// Whether a line of its own tells that a right was missing.
    was_denied: AtomicBool,
    has_begun: AtomicBool,
}

impl Trail {
    /// The trail of a call with this head. `peer`: `None` without an audit log.
    pub(crate) fn of(peer: Option<&Arc<AuditedPeer>>, headers: &HeaderMap) -> Self {
        let Some(peer) = peer else {
            return Self::default();
        };
        Self {
            peer: Some(Arc::clone(peer)),
            request_id: RequestId::of(headers),
            call: None,
        }
    }

    /// The caller is known: the call is recorded, if the settings say so.
    pub(crate) fn begin(&mut self, rpc: Rpc, identity: Option<&Arc<Identity>>) {
        let Some(peer) = &self.peer else {
            return;
        };
        let is_recorded = match rpc.recorded {
            Recorded::Never => false,
            Recorded::Data => peer.log.records_data,
            Recorded::Change => true,
        };
        if is_recorded {
            self.call = Some(Arc::new(RecordedCall {
                peer: Arc::clone(peer),
                request_id: self.request_id,
                rpc,
                identity: identity.cloned(),
                facts: Mutex::default(),
                was_denied: AtomicBool::new(false),
                has_begun: AtomicBool::new(false),
            }));
        }
    }

    /// The call, if it is recorded.
    pub(crate) fn call(&self) -> Option<&Arc<RecordedCall>> {
        self.call.as_ref()
    }

    /// Adds facts to the lines of the call, if it is recorded.
    pub(crate) fn note(&self, add: impl FnOnce(&mut CallFacts)) {
        if let Some(call) = &self.call {
            add(&mut call.facts.lock());
        }
    }

    /// Records that the caller lacks a right. `asked`: the field of the request, and its value.
    pub(crate) fn denied(
        &self,
        identity: &Identity,
        rpc: Rpc,
        right: Right,
        asked: Option<(&str, &str)>,
    ) {
        if let Some(call) = &self.call {
            call.was_denied.store(true, Ordering::Relaxed);
        }
        let Some(peer) = &self.peer else {
            return;
        };
        let principal = identity.principal().name.as_str();
        peer.log
            .refused(peer.address, Some(principal), DENIED, |log| {
                let mut facts = CallFacts::default();
                if let Some((field, value)) = asked {
                    facts.asked(field, value);
                }
                log.write(AuditLine {
                    event: "call",
                    request_id: self.request_id.map(RequestId::shown),
                    peer: peer.shown(),
                    rpc: Some(rpc.name),
                    op: Some(right.name()),
                    facts: Some(facts.shown()),
                    outcome: DENIED,
                    reason: Some("NOT_ALLOWED".to_owned()),
                    ..of_identity(identity)
                });
            });
    }

    /// Records that a credential does not count, with the reason for clients and the words for operators. `identity`: the principal for which it counted before.
    pub(crate) fn unauthenticated(
        &self,
        rpc: Rpc,
        sent: &ShownCredential,
        (reason, why): (&'static str, Option<&str>),
        identity: Option<&Identity>,
    ) {
        if let Some(call) = &self.call {
            call.was_denied.store(true, Ordering::Relaxed);
        }
        let Some(peer) = &self.peer else {
            return;
        };
        let principal = identity.map(|identity| identity.principal().name.as_str());
        peer.log
            .refused(peer.address, principal, UNAUTHENTICATED, |log| {
                log.write(AuditLine {
                    event: "call",
                    request_id: self.request_id.map(RequestId::shown),
                    peer: peer.shown(),
                    principal: Some(principal.unwrap_or_default()),
                    credential: Some(sent.kind()),
                    token_id: sent.id(),
                    rpc: Some(rpc.name),
                    op: rpc.need.right().map(Right::name),
                    outcome: UNAUTHENTICATED,
                    reason: Some(reason.to_owned()),
                    why: why.map(shortened),
                    ..AuditLine::default()
                });
            });
    }
}

impl AuditedPeer {
    fn shown(&self) -> Option<String> {
        self.address.map(|address| address.to_string())
    }
}

/// The fields of a known caller.
fn of_identity(identity: &Identity) -> AuditLine<'_> {
    let credential = identity.credential();
    AuditLine {
        principal: Some(&identity.principal().name),
        credential: Some(credential.kind()),
        token_id: credential.id(),
        ..AuditLine::default()
    }
}

impl RecordedCall {
    /// A stream has begun: its caller has the rights, and messages follow.
    pub(crate) fn began(&self) {
        if !self.has_begun.swap(true, Ordering::Relaxed) {
            self.write("begin", OK, None);
        }
    }

    /// The call has ended with this code and these trailers. A refusal has its line already.
    pub(crate) fn ended(&self, code: usize, trailers: Option<&HeaderMap>) {
        let has_begun = self.has_begun.load(Ordering::Relaxed);
        let was_denied = self.was_denied.load(Ordering::Relaxed);
        if was_denied && !has_begun {
            return;
        }
        let event = if has_begun { "end" } else { "call" };
        let outcome = match code {
            0 => OK,
            _ if was_denied && code == tonic::Code::Unauthenticated as usize => UNAUTHENTICATED,
            _ if was_denied && code == tonic::Code::PermissionDenied as usize => DENIED,
            _ => FAILED,
        };
        let (reason, _) = reason_of(code, trailers);
        if outcome == FAILED && !has_begun {
            // A caller can make a call fail as often as it likes.
            let principal = self
                .identity
                .as_deref()
                .map(|identity| &*identity.principal().name);
            let log = Arc::clone(&self.peer.log);
            return log.refused(self.peer.address, principal, FAILED, |_| {
                self.write(event, outcome, reason);
            });
        }
        self.write(event, outcome, reason);
    }

    /// A request to the HTTP port has been answered with this status.
    pub(crate) fn answered(&self, status: http::StatusCode) {
        let outcome = match status.is_client_error() || status.is_server_error() {
            false => OK,
            true if self.was_denied.load(Ordering::Relaxed) => return,
            true => FAILED,
        };
        let reason = (outcome != OK).then(|| status.as_str().to_owned());
        self.write("call", outcome, reason);
    }

    fn write(&self, event: &'static str, outcome: &'static str, reason: Option<String>) {
        let facts = self.facts.lock();
        let caller = match self.identity.as_deref() {
            Some(identity) => of_identity(identity),
            None => AuditLine {
                principal: Some(""),
                ..AuditLine::default()
            },
        };
        self.peer.log.write(AuditLine {
            event,
            request_id: self.request_id.map(RequestId::shown),
            peer: self.peer.shown(),
            rpc: Some(self.rpc.name),
            op: self.rpc.need.right().map(Right::name),
            facts: Some(facts.shown()),
            outcome,
            reason,
            ..caller
        });
    }
}

/// The reason of an end with this code, and whether a change may have been applied nevertheless.
fn reason_of(code: usize, trailers: Option<&HeaderMap>) -> (Option<String>, bool) {
    let status = trailers
        .filter(|_| code != 0)
        .and_then(Status::from_header_map);
    match status.and_then(|status| status.get_details_error_info()) {
        Some(info) => {
            let outcome = info.metadata.get("outcome");
            let is_unknown = outcome.is_some_and(|outcome| outcome == "UNKNOWN");
            (Some(info.reason), is_unknown)
        }
        None => ((code != 0).then(|| code_name(code).to_owned()), false),
    }
}

/// A change under way. Its line is written at its real end, whether or not its client waits for the answer: a client
/// that leaves early must not leave a change without a line.
pub(crate) struct ChangeEnd(Option<Arc<RecordedCall>>);

impl ChangeEnd {
    pub(crate) fn new(call: Arc<RecordedCall>) -> Self {
        Self(Some(call))
    }

    /// The change has this answer.
    pub(crate) fn answered(mut self, head: &HeaderMap) {
        if let Some(call) = self.0.take() {
            let code = code_in(head).unwrap_or(0);
            // It is never limited: a caller cannot bring it about.
            if let (reason, true) = reason_of(code, Some(head)) {
                return call.write("call", UNKNOWN, reason);
            }
            call.ended(code, Some(head));
        }
    }
}

impl Drop for ChangeEnd {
    /// The process ends before the change does, or it has panicked.
    fn drop(&mut self) {
        if let Some(call) = self.0.take() {
            call.write("call", UNKNOWN, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn request_id_is_the_trace_id_of_a_valid_traceparent() {
        let id = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(TRACEPARENT, HeaderValue::from_static(value));
            RequestId::of(&headers).map(RequestId::shown)
        };
        let trace = "0af7651916cd43dd8448eb211c80319c";
        let whole = id("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
        assert_eq!(whole.as_deref(), Some(trace));
        for bad in [
            "",
            "00",
            "00-0af7-b7ad6b7169203331-01",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319cff-b7ad6b7169203331-01",
        ] {
            assert_eq!(id(bad), None, "{bad}");
        }
        assert_eq!(RequestId::of(&HeaderMap::new()), None);
    }

    #[test]
    fn append_costs_no_record_unless_all_calls_are_recorded() {
        let metrics = crate::metrics::Metrics::new().unwrap();
        let of = |records_data| {
            Arc::new(AuditLog {
                queue: super::super::Queue::new(metrics.audit.clone()),
                callers: super::super::RefusalLimits::default(),
                records_data,
                refuses: false,
            })
        };
        let is_recorded = |records_data, method| {
            let peer = of(records_data).peer(None);
            let mut trail = Trail::of(Some(&peer), &HeaderMap::new());
            trail.begin(crate::methods::of(method), None);
            trail.call().is_some()
        };
        for method in [wald_proto::Method::Append, wald_proto::Method::CommitCursor] {
            assert!(!is_recorded(false, method) && is_recorded(true, method));
        }
        assert!(is_recorded(false, wald_proto::Method::DeleteCursor));
        let mut off = Trail::of(None, &HeaderMap::new());
        off.begin(crate::methods::of(wald_proto::Method::DeleteLog), None);
        assert!(off.call().is_none());
    }
}
