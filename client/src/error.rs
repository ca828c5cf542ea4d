//! Errors: the outcome for the data, the reason, and whether a repeat is safe.
//!
//! Errors have three sources. An answer of Wald carries ErrorInfo, and its facts are believed.
//! A status without it comes from a proxy or the transport, and does not report the server's
//! work. Other failures never left this process.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::StatusExt;
use wald_proto::v1::Reason;

use crate::connect::TLS_PAUSE;
use crate::scan::Gap;
use crate::tls::{TlsFailure, TlsProblem};

pub(crate) const DOMAIN: &str = "wald.dev";

/// The reason why a call failed. [`Error::outcome`] reports whether a write was applied,
/// [`Error::retry`] whether to repeat it. Cheap to clone.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    /// An earlier attempt of the same call may have been applied, so whatever the last
    /// one says about itself, the outcome of the call is unknown.
    earlier_unknown: bool,
    /// The call writes nothing.
    reads: bool,
    /// The message of the last attempt never left this program.
    unsent: bool,
}

/// The place at which a call failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The endpoint is not a URI such as `http://127.0.0.1:6925`; nothing was sent.
    #[error("`{endpoint}` is not an endpoint such as http://127.0.0.1:6925{why}")]
    InvalidEndpoint {
        /// The endpoint that was given, or the wrong part of a list, without a password.
        endpoint: String,
        /// The part that is wrong, as the end of the message; may be empty.
        why: &'static str,
    },
    /// There is no TLS connection, or the server wants TLS; nothing was applied. `failure` tells a
    /// wrong CA, a wrong name and other reasons apart.
    #[error("no TLS connection to {endpoint}: {detail}")]
    Tls {
        /// The endpoint.
        endpoint: String,
        /// The reason.
        failure: TlsFailure,
        /// The reason for people, with names and dates of the certificate.
        detail: String,
    },
    /// The token cannot be used, or must not be sent over plaintext; nothing was sent.
    #[error("{detail}")]
    Token {
        /// The reason, with the path of the file.
        detail: String,
    },
    /// The system gave no random numbers to name a producer with; nothing was sent.
    #[error("no random numbers: {detail}")]
    Random {
        /// The system's message.
        detail: String,
    },
    /// No connection could be made; nothing was sent.
    #[error("cannot connect to {endpoint}: {detail}")]
    Connect {
        /// The endpoint.
        endpoint: String,
        /// The transport's message.
        detail: String,
    },
    /// The connection ended before the call was sent on it, for example because the server
    /// drains; nothing was sent.
    #[error("the connection ended before the call was sent: {0}")]
    NotSent(String),
    /// The connection broke underway; a write may have been applied.
    #[error("the connection was lost: {0}")]
    ConnectionLost(String),
    /// The deadline passed. A write may have been applied, or still be, unless it never left the program: see
    /// [`Error::outcome`].
    #[error("no answer from {endpoint} within {after:?}")]
    Timeout {
        /// The server.
        endpoint: String,
        /// The deadline.
        after: Duration,
    },
    /// The server answered with an error.
    #[error(transparent)]
    Server(ServerError),
    /// Something between client and server answered with an error, or the server is not
    /// Wald: there is no ErrorInfo of Wald's.
    #[error("{code:?}: {message}")]
    Foreign {
        /// The status code.
        code: Code,
        /// The status message.
        message: String,
    },
    /// The answer lacks a field that the contract promises.
    #[error("the answer breaks the contract: {0} is missing")]
    Contract(&'static str),
    /// An earlier batch of the same appender or producer failed, and everything after it
    /// with it. Code, reason and facts are the earlier one's; the outcome is this one's.
    #[error("an earlier batch failed: {first}")]
    Behind {
        /// The failure of the earlier one.
        first: Error,
        /// Outcome of this batch.
        outcome: Outcome,
    },
    /// The state of a producer or follower cannot be read, is not its state, or cannot be kept. A batch whose state
    /// could not be kept was not sent, and may be sent by the next start of the program.
    #[error("state: {detail}")]
    State {
        /// The reason.
        detail: String,
    },
    /// A batch without records. It was neither kept nor sent: the server refuses it, and would do so after every start.
    #[error("a batch needs a record")]
    EmptyBatch,
    /// A durable follower has come upon records that are missing. Its next call goes on behind them.
    #[error("records are missing: {0:?}")]
    Missing(Gap),
    /// The appender or producer is gone: its runtime was shut down; a write that was sent
    /// may have been applied.
    #[error("the appender is gone")]
    Gone,
}

/// An error that the server answered with.
#[derive(Debug, Clone)]
pub struct ServerError {
    code: Code,
    message: String,
    reason: String,
    facts: BTreeMap<String, String>,
    failed_checks: Vec<FailedCheck>,
    retry_delay: Option<Duration>,
}

/// A condition that did not hold. Several may fail at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedCheck {
    /// The reason of the failure as the server spells it, such as `LOG_MISSING`.
    pub reason: String,
    /// The log it was about.
    pub log: String,
    /// The server's message, with the actual value, for people.
    pub description: String,
}

/// Outcome of a write that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing was written, and nothing will be.
    NotApplied,
    /// It may or may not have been applied.
    Unknown,
}

/// Whether the same request may be sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// Yes; with backoff.
    Safe,
    /// Only if it cannot be applied twice: with the same expected lsn or producer. Reads
    /// always may.
    SafeWithCondition,
    /// It would fail again.
    Never,
}

impl ServerError {
    /// The status code.
    pub fn code(&self) -> Code {
        self.code
    }

    /// The reason. [`Reason::Unspecified`] if this version of the client does not know it.
    pub fn reason(&self) -> Reason {
        Reason::from_text(&self.reason)
    }

    /// The reason as the server spells it, such as `POSITION_MISMATCH`.
    pub fn reason_text(&self) -> &str {
        &self.reason
    }

    /// The server's message, for people.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Every fact that the server gave, by name.
    pub fn facts(&self) -> &BTreeMap<String, String> {
        &self.facts
    }

    /// Every condition that did not hold.
    pub fn failed_checks(&self) -> &[FailedCheck] {
        &self.failed_checks
    }

    fn outcome(&self) -> Outcome {
        match (self.facts.get("outcome").map(String::as_str), self.code) {
            (Some("NOT_APPLIED"), _) => Outcome::NotApplied,
            // The server's promise, whatever the facts say.
            (None, Code::Unavailable) => Outcome::NotApplied,
            _ => Outcome::Unknown,
        }
    }

    fn retry(&self) -> Retry {
        match (self.facts.get("retry").map(String::as_str), self.code) {
            (Some("SAFE"), _) => Retry::Safe,
            (Some("SAFE_WITH_CONDITION"), _) => Retry::SafeWithCondition,
            // Errors of reads do not say; these two pass by themselves.
            (None, Code::Unavailable | Code::ResourceExhausted) => Retry::Safe,
            _ => Retry::Never,
        }
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason, self.message)
    }
}

impl std::error::Error for ServerError {}

impl Error {
    /// The place at which the call failed.
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// The status code; of failures that never left this process, the one that fits.
    pub fn code(&self) -> Code {
        match self.kind() {
            ErrorKind::InvalidEndpoint { .. }
            | ErrorKind::Token { .. }
            | ErrorKind::Tls {
                failure: TlsFailure::Settings,
                ..
            } => Code::InvalidArgument,
            ErrorKind::Tls { .. }
            | ErrorKind::Connect { .. }
            | ErrorKind::NotSent(_)
            | ErrorKind::ConnectionLost(_) => Code::Unavailable,
            ErrorKind::Timeout { .. } => Code::DeadlineExceeded,
            ErrorKind::Server(error) => error.code,
            ErrorKind::Foreign { code, .. } => *code,
            ErrorKind::Contract(_) => Code::Internal,
            ErrorKind::Behind { first, .. } => first.code(),
            ErrorKind::Random { .. } | ErrorKind::State { .. } => Code::Internal,
            ErrorKind::Missing(_) => Code::DataLoss,
            ErrorKind::EmptyBatch => Code::InvalidArgument,
            ErrorKind::Gone => Code::Cancelled,
        }
    }

    /// The server's error, if it answered.
    fn server(&self) -> Option<&ServerError> {
        match self.kind() {
            ErrorKind::Server(error) => Some(error),
            ErrorKind::Behind { first, .. } => first.server(),
            _ => None,
        }
    }

    /// The server's reason, if the server answered. [`Reason::Unspecified`] if this version of the
    /// client does not know it; [`Error::reason_text`] has it then.
    pub fn reason(&self) -> Option<Reason> {
        self.server().map(ServerError::reason)
    }

    /// The reason as the server spells it, such as `POSITION_MISMATCH`, if the server answered.
    pub fn reason_text(&self) -> Option<&str> {
        self.server().map(ServerError::reason_text)
    }

    /// One fact that the server gave, such as `first_lsn`.
    pub fn fact(&self, name: &str) -> Option<&str> {
        self.server()?.facts.get(name).map(String::as_str)
    }

    /// Every fact that the server gave, by name, if the server answered.
    pub fn facts(&self) -> Option<&BTreeMap<String, String>> {
        self.server().map(ServerError::facts)
    }

    /// Every condition that did not hold.
    pub fn failed_checks(&self) -> &[FailedCheck] {
        self.server().map_or(&[], ServerError::failed_checks)
    }

    /// One fact that is a number, such as `first_lsn`.
    pub fn fact_number(&self, name: &str) -> Option<u64> {
        self.fact(name)?.parse().ok()
    }

    /// The outcome of a write. A read has nothing to apply: [`Outcome::NotApplied`].
    ///
    /// If an earlier attempt of the same call may have been applied, the outcome is unknown
    /// even if the last attempt was refused: a POSITION_MISMATCH after a lost connection
    /// can be the echo of one's own success.
    pub fn outcome(&self) -> Outcome {
        if self.0.reads {
            return Outcome::NotApplied;
        }
        if self.0.earlier_unknown {
            return Outcome::Unknown;
        }
        if self.0.unsent {
            return Outcome::NotApplied;
        }
        match self.kind() {
            ErrorKind::InvalidEndpoint { .. }
            | ErrorKind::Tls { .. }
            | ErrorKind::Token { .. }
            | ErrorKind::Random { .. }
            | ErrorKind::Connect { .. }
            | ErrorKind::Missing(_)
            | ErrorKind::EmptyBatch
            | ErrorKind::NotSent(_) => Outcome::NotApplied,
            ErrorKind::Server(error) => error.outcome(),
            // The method was not even found.
            ErrorKind::Foreign {
                code: Code::Unimplemented,
                ..
            } => Outcome::NotApplied,
            ErrorKind::Behind { outcome, .. } => *outcome,
            ErrorKind::ConnectionLost(_)
            | ErrorKind::Timeout { .. }
            | ErrorKind::Foreign { .. }
            | ErrorKind::Contract(_)
            | ErrorKind::State { .. }
            | ErrorKind::Gone => Outcome::Unknown,
        }
    }

    /// Whether the same request may be sent again. The client has done so already, as far
    /// as its policy and deadline go.
    pub fn retry(&self) -> Retry {
        let retry = match self.kind() {
            // The same settings fail again.
            ErrorKind::Tls {
                failure: TlsFailure::Settings,
                ..
            } => Retry::Never,
            // Certificates are replaced while both sides run.
            ErrorKind::Tls { .. } => Retry::Safe,
            ErrorKind::Connect { .. } | ErrorKind::NotSent(_) => Retry::Safe,
            ErrorKind::ConnectionLost(_)
            | ErrorKind::Timeout { .. }
            | ErrorKind::Foreign {
                code: Code::Unavailable,
                ..
            } => match self.0.unsent {
                true => Retry::Safe,
                false => Retry::SafeWithCondition,
            },
            ErrorKind::Server(error) => error.retry(),
            ErrorKind::Behind { outcome, .. } => match outcome {
                Outcome::NotApplied => Retry::Safe,
                Outcome::Unknown => Retry::SafeWithCondition,
            },
            ErrorKind::Gone => Retry::SafeWithCondition,
            ErrorKind::InvalidEndpoint { .. }
            | ErrorKind::Token { .. }
            | ErrorKind::Random { .. }
            | ErrorKind::State { .. }
            | ErrorKind::Missing(_)
            | ErrorKind::EmptyBatch
            | ErrorKind::Foreign { .. }
            | ErrorKind::Contract(_) => Retry::Never,
        };
        match retry {
            Retry::Safe if self.0.earlier_unknown => Retry::SafeWithCondition,
            retry => retry,
        }
    }

    /// Minimum time before the next attempt: as the server asks, or 1 s after a failure of TLS.
    pub fn retry_delay(&self) -> Option<Duration> {
        match self.kind() {
            ErrorKind::Tls { .. } => Some(TLS_PAUSE),
            _ => self.server()?.retry_delay,
        }
    }

    pub(crate) fn new(kind: ErrorKind) -> Self {
        Self(Arc::new(Inner {
            kind,
            earlier_unknown: false,
            reads: false,
            unsent: false,
        }))
    }

    pub(crate) fn of_tls(problem: TlsProblem, endpoint: &str) -> Self {
        Self::new(no_tls(problem, endpoint))
    }

    pub(crate) fn contract(field: &'static str) -> Self {
        Self::new(ErrorKind::Contract(field))
    }

    pub(crate) fn after_unknown(mut self) -> Self {
        Arc::make_mut(&mut self.0).earlier_unknown = true;
        self
    }

    /// The error of a call that writes nothing.
    pub(crate) fn of_read(mut self) -> Self {
        Arc::make_mut(&mut self.0).reads = true;
        self
    }

    /// The error of an attempt whose message never left this program.
    pub(crate) fn of_unsent(mut self) -> Self {
        Arc::make_mut(&mut self.0).unsent = true;
        self
    }

    /// Reads a status. `endpoint` and `deadline` are named in the message.
    pub(crate) fn from_status(status: &Status, endpoint: &str, deadline: Duration) -> Self {
        if let Some(info) = status
            .get_details_error_info()
            .filter(|info| info.domain == DOMAIN)
        {
            return Self::new(ErrorKind::Server(ServerError {
                code: status.code(),
                message: status.message().to_owned(),
                reason: info.reason,
                facts: info.metadata.into_iter().collect(),
                failed_checks: status
                    .get_details_precondition_failure()
                    .map(|failure| failure.violations.into_iter().map(failed_check).collect())
                    .unwrap_or_default(),
                retry_delay: status
                    .get_details_retry_info()
                    .and_then(|info| info.retry_delay),
            }));
        }
        Self::new(foreign(status, endpoint, deadline))
    }
}

fn failed_check(violation: tonic_types::PreconditionViolation) -> FailedCheck {
    FailedCheck {
        reason: violation.r#type,
        log: violation.subject,
        description: violation.description,
    }
}

/// Reads a status without ErrorInfo of Wald's.
fn foreign(status: &Status, endpoint: &str, deadline: Duration) -> ErrorKind {
    let timeout = || ErrorKind::Timeout {
        endpoint: endpoint.to_owned(),
        after: deadline,
    };
    let mut innermost = None;
    let mut source = status.source();
    while let Some(error) = source {
        if error.is::<tonic::TimeoutExpired>() {
            return timeout();
        }
        if let Some(error) = error.downcast_ref::<tonic::ConnectError>() {
            return match error.source() {
                Some(source) => not_connected(source, endpoint),
                None => ErrorKind::Connect {
                    endpoint: endpoint.to_owned(),
                    detail: error.to_string(),
                },
            };
        }
        if error.is::<crate::shared::NeverSent>() {
            return ErrorKind::NotSent(error.to_string());
        }
        // On HTTP/2 hyper says "canceled" of a request only while it still holds it, because
        // the connection took no more (hyper 1.12, client/dispatch.rs and conn/http2.rs).
        if let Some(error) = error.downcast_ref::<hyper::Error>()
            && error.is_canceled()
        {
            return ErrorKind::NotSent(innermost_text(error));
        }
        innermost = Some(error.to_string());
        source = error.source();
    }
    if let Some(detail) = innermost {
        return ErrorKind::ConnectionLost(detail);
    }
    // The transport on the other side calls its timer's end CANCELLED.
    let timed_out = status.code() == Code::Cancelled && status.message() == "Timeout expired";
    if timed_out || status.code() == Code::DeadlineExceeded {
        return timeout();
    }
    if has_no_status(status) {
        return ErrorKind::ConnectionLost(status.message().to_owned());
    }
    ErrorKind::Foreign {
        code: status.code(),
        message: status.message().to_owned(),
    }
}

/// Whether tonic made the status up, because the stream ended without one. A proxy ends streams so when it loses the server
/// behind it (RST_STREAM with NO_ERROR). The texts are of tonic 0.14, status.rs and codec/decode.rs.
fn has_no_status(status: &Status) -> bool {
    let message = status.message();
    match status.code() {
        Code::Unknown => message.starts_with("protocol error: missing grpc-status trailer"),
        Code::Internal => message == "Unexpected EOF decoding stream.",
        _ => false,
    }
}

fn no_tls(problem: TlsProblem, endpoint: &str) -> ErrorKind {
    ErrorKind::Tls {
        endpoint: endpoint.to_owned(),
        failure: problem.failure,
        detail: problem.detail,
    }
}

/// Reads the error of an attempt to connect.
pub(crate) fn not_connected(
    error: &(dyn std::error::Error + 'static),
    endpoint: &str,
) -> ErrorKind {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(problem) = error.downcast_ref::<TlsProblem>() {
            return no_tls(problem.clone(), endpoint);
        }
        next = error.source();
    }
    ErrorKind::Connect {
        endpoint: endpoint.to_owned(),
        detail: innermost_text(error),
    }
}

/// The text of the last error in a chain: in "transport error: connect error: connection
/// refused" only the last part helps people.
fn innermost_text(error: &(dyn std::error::Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", self.kind())
            .field("outcome", &self.outcome())
            .field("retry", &self.retry())
            .finish()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind().fmt(f)?;
        if self.0.earlier_unknown {
            f.write_str(" (an earlier attempt of this call may have been applied)")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tonic_types::{ErrorDetails, StatusExt};

    use super::*;

    fn read(status: &Status) -> Error {
        Error::from_status(status, "http://here", Duration::from_secs(1))
    }

    #[test]
    fn status_of_wald_gives_reason_facts_and_delay() {
        let facts = HashMap::from([("first_lsn".to_owned(), "12".to_owned())]);
        let mut details = ErrorDetails::with_error_info("TRIMMED", DOMAIN, facts);
        details.set_retry_info(Some(Duration::from_millis(30)));
        let error = read(&Status::with_error_details(
            Code::OutOfRange,
            "gone",
            details,
        ));
        assert_eq!(error.code(), Code::OutOfRange);
        assert_eq!(error.reason(), Some(Reason::Trimmed));
        assert_eq!(error.fact_number("first_lsn"), Some(12));
        assert_eq!(error.retry_delay(), Some(Duration::from_millis(30)));
        assert_eq!(error.to_string(), "TRIMMED: gone");
    }

    #[test]
    fn stream_without_a_status_is_a_lost_connection() {
        let missing = "protocol error: missing grpc-status trailer, stream was terminated";
        for status in [
            Status::unknown(missing),
            Status::internal("Unexpected EOF decoding stream."),
        ] {
            let error = read(&status);
            let is_lost = matches!(error.kind(), ErrorKind::ConnectionLost(_));
            assert!(is_lost, "{error:?}");
            assert_eq!(error.retry(), Retry::SafeWithCondition);
        }
        let said = read(&Status::unknown("no such thing"));
        assert_eq!(said.retry(), Retry::Never);
    }

    #[test]
    fn reason_of_a_newer_server_is_kept() {
        let details = ErrorDetails::with_error_info("MOON_PHASE", DOMAIN, HashMap::new());
        let error = read(&Status::with_error_details(Code::Aborted, "", details));
        assert_eq!(error.reason(), Some(Reason::Unspecified));
        assert_eq!(error.reason_text(), Some("MOON_PHASE"));
        assert_eq!(error.outcome(), Outcome::Unknown);
    }

    #[test]
    fn error_info_of_another_domain_is_not_believed() {
        let facts = HashMap::from([("outcome".to_owned(), "NOT_APPLIED".to_owned())]);
        let details = ErrorDetails::with_error_info("STARTING", "mesh.example", facts);
        let error = read(&Status::with_error_details(Code::Unavailable, "", details));
        assert_eq!(error.reason(), None);
        assert_eq!(error.outcome(), Outcome::Unknown);
    }

    #[test]
    fn failed_journal_is_unknown_if_internal_and_not_applied_if_unavailable() {
        let facts = |outcome: &str, retry: &str| {
            HashMap::from([
                ("outcome".to_owned(), outcome.to_owned()),
                ("retry".to_owned(), retry.to_owned()),
            ])
        };
        let status = |code, facts| {
            let details = ErrorDetails::with_error_info("JOURNAL_FAILED", DOMAIN, facts);
            Status::with_error_details(code, "", details)
        };
        let underway = read(&status(
            Code::Internal,
            facts("UNKNOWN", "SAFE_WITH_CONDITION"),
        ));
        assert_eq!(underway.outcome(), Outcome::Unknown);
        assert_eq!(underway.retry(), Retry::SafeWithCondition);
        let before = read(&status(Code::Unavailable, facts("NOT_APPLIED", "SAFE")));
        assert_eq!(before.outcome(), Outcome::NotApplied);
        assert_eq!(before.retry(), Retry::Safe);
    }
}
