//! Errors -> `tonic::Status`: the one place where a code is chosen.
//!
//! Every match is exhaustive and without wildcard, so that a new variant of the engine
//! does not compile until its code, reason, outcome and retry are decided here. The
//! comments of `errors.proto` list the same answers, and the tests compare each status with them.

mod batch;
mod failure;
mod shred;
mod tenant;

use std::error::Error as _;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::StatusExt as _;
use wald_proto::v1::Reason;
use wald_storage::{
    AdminError, AppendError, BackupError, CursorError, FenceError, InvalidLogName, InvalidName,
    MAX_LOG_NAME_BYTES, ReadError, SyncError, TargetError, TrimError, Unopened, VerifyError,
};

use batch::append_failure;
pub(crate) use batch::{append, condition_reason};
pub(crate) use failure::Access;
use failure::{Failure, Retry};
pub(crate) use shred::{ShredError, is_unapplied, shred, shred_unended};
pub(crate) use tenant::{over_count, over_rate, share_busy, tenant_changed};

/// Characters of an unknown method that its refusal repeats.
const MAX_SHOWN_PATH: usize = 200;
/// Retry delay after BUSY: long enough for a few commits, short enough to be unseen.
const RETRY_SOON: Duration = Duration::from_millis(50);
/// Least retry delay while a server starts or ends. A stand-by may own the store soon. If it takes longer, the pauses of clients grow by
/// themselves.
const RETRY_SHORTLY: Duration = Duration::from_millis(100);
/// Retry delay after a failure that takes a restart or an operator.
const RETRY_LATER: Duration = Duration::from_secs(1);

/// Answers a read, a scan or a question about a log that cannot be served.
pub(crate) fn read(error: &ReadError) -> Status {
    read_failure(error).status()
}

/// Answers a call that writes and could not read the state of its log first. Nothing was written.
pub(crate) fn read_before_write(error: &ReadError) -> Status {
    read_failure(error).of_unbegun_write().status()
}

fn read_failure(error: &ReadError) -> Failure {
    let message = error.to_string();
    match error {
        ReadError::Target(error) => target(error),
        ReadError::Trimmed { log, first, asked } => {
            Failure::new(Code::OutOfRange, Reason::Trimmed, message)
                .fact("log", log)
                .fact("first_lsn", first)
                .fact("lsn", asked)
        }
        ReadError::BeyondTail { log, tail, asked } => {
            Failure::new(Code::OutOfRange, Reason::BeyondTail, message)
                .fact("log", log)
                .fact("tail_lsn", tail)
                .fact("lsn", asked)
        }
        ReadError::Quarantined { log, from, to } => {
            Failure::new(Code::DataLoss, Reason::Quarantined, message)
                .fact("log", log)
                .fact("from_lsn", from)
                .fact_if("to_lsn", *to)
        }
        ReadError::BadCursor(_) => {
            Failure::new(Code::InvalidArgument, Reason::InvalidScan, message).field("cursor")
        }
        ReadError::InvalidScan(_) => {
            Failure::new(Code::InvalidArgument, Reason::InvalidScan, message).field("start")
        }
        ReadError::JournalFailed(_) => {
            Failure::new(Code::Unavailable, Reason::JournalFailed, message).retry_after(RETRY_LATER)
        }
        ReadError::NotSupported(_) => no_replica("visibility"),
        ReadError::LeaseLost => {
            Failure::new(Code::Unavailable, Reason::BucketDown, message).retry_after(RETRY_LATER)
        }
        ReadError::Refused(error) => append_failure(error).of_read(message),
        ReadError::Io(error) => {
            match unopened(error) {
                Some(unopened) => Failure::new(Code::DataLoss, Reason::KeyMissing, message)
                    .fact("key", unopened.key),
                None => Failure::new(Code::Unavailable, Reason::ReadFailed, message)
                    .retry_after(RETRY_SOON),
            }
        }
    }
}

/// Records whose key is missing, if they are the cause.
fn unopened(error: &std::io::Error) -> Option<&Unopened> {
    error.get_ref()?.downcast_ref()
}

fn target(error: &TargetError) -> Failure {
    let message = error.to_string();
    match error {
        TargetError::NotFound { log } => {
            Failure::new(Code::NotFound, Reason::LogNotFound, message).fact("log", log)
        }
        TargetError::Replaced {
            log,
            expected,
            actual,
        } => Failure::new(Code::FailedPrecondition, Reason::LogReplaced, message)
            .fact("log", log)
            .fact("expected_log_id", expected)
            .fact_if("actual_log_id", *actual)
            .precondition(log),
    }
}

/// Answers a verification that did not begin.
pub(crate) fn verify(error: &VerifyError) -> Status {
    let message = error.to_string();
    match error {
        VerifyError::SegmentNotFound { segment } => {
            Failure::new(Code::NotFound, Reason::SegmentNotFound, message)
                .fact("segment_id", segment)
        }
        VerifyError::SegmentSorted { segment, run } => {
            Failure::new(Code::NotFound, Reason::SegmentNotFound, message)
                .fact("segment_id", segment)
                .fact("run_id", run)
        }
        VerifyError::Busy { running } => {
            Failure::new(Code::ResourceExhausted, Reason::Busy, message)
                .fact("running", running)
                .retry_after(RETRY_LATER)
        }
        VerifyError::Io(_) => {
            Failure::new(Code::Unavailable, Reason::ReadFailed, message).retry_after(RETRY_LATER)
        }
    }
    .status()
}

/// Ends a verification that could not read the store.
pub(crate) fn verify_failed(error: &std::io::Error) -> Status {
    Failure::new(
        Code::Unavailable,
        Reason::ReadFailed,
        format!("the store could not be read: {error}"),
    )
    .retry_after(RETRY_LATER)
    .status()
}

/// Answers an administrative call that was not carried out.
pub(crate) fn admin(error: &AdminError) -> Status {
    let message = error.to_string();
    match error {
        AdminError::LogExists { log, log_id } => {
            Failure::new(Code::AlreadyExists, Reason::LogExists, message)
                .fact("log", log)
                .fact("log_id", log_id)
                .refused(Retry::Never)
        }
        AdminError::Target(error) => target(error).refused(Retry::Never),
        AdminError::ProducerNotFound { log, producer } => {
            Failure::new(Code::NotFound, Reason::ProducerNotFound, message)
                .fact("log", log)
                .fact("producer", producer)
                .refused(Retry::Never)
        }
        // Only the settings of a log name a level.
        AdminError::Append(AppendError::NotSupported(_)) => {
            no_replica("config.sync_mode").refused(Retry::Never)
        }
        AdminError::Append(error) => append_failure(error),
    }
    .status()
}

/// Answers a trim that was not carried out.
pub(crate) fn trim(error: &TrimError) -> Status {
    let message = error.to_string();
    match error {
        TrimError::Target(error) => target(error).refused(Retry::Never),
        TrimError::BeyondTail { log, tail, asked } => {
            Failure::new(Code::OutOfRange, Reason::BeyondTail, message)
                .fact("log", log)
                .fact("tail_lsn", tail)
                .fact("lsn", asked)
                .refused(Retry::Never)
        }
        TrimError::Append(error) => append_failure(error),
    }
    .status()
}

/// Answers a fence that was not raised.
pub(crate) fn fence(error: &FenceError) -> Status {
    let message = error.to_string();
    match error {
        FenceError::Target(error) => target(error).refused(Retry::Never),
        FenceError::Fenced {
            log,
            given,
            current,
        } => Failure::new(Code::FailedPrecondition, Reason::Fenced, message)
            .fact("log", log)
            .fact("writer_epoch", current)
            .fact("given_writer_epoch", given)
            .precondition(log)
            .refused(Retry::Never),
        FenceError::Append(error) => append_failure(error),
    }
    .status()
}

/// Answers a cursor that was not moved, forgotten or found.
pub(crate) fn cursor(error: &CursorError, access: Access) -> Status {
    let message = error.to_string();
    match error {
        CursorError::Target(error) => target(error).refused_if_write(access, Retry::Never),
        CursorError::NotFound { log, cursor } => {
            Failure::new(Code::NotFound, Reason::CursorNotFound, message)
                .fact("log", log)
                .fact("cursor", cursor)
                .refused_if_write(access, Retry::Never)
        }
        CursorError::Append(error) => append_failure(error),
    }
    .status()
}

/// The failure of one request of a session, with the number that the request carried.
pub(crate) fn in_session(status: &Status, request_id: u64) -> Status {
    let mut details = status.get_error_details();
    let Some(info) = details.error_info().cloned() else {
        return status.clone();
    };
    let mut metadata = info.metadata;
    metadata.insert("request_id".to_owned(), request_id.to_string());
    details.set_error_info(info.reason, info.domain, metadata);
    Status::with_error_details(status.code(), status.message(), details)
}

/// A message that is longer than any request may be.
pub(crate) fn message_too_large(bytes: u64, most: u64, access: Access) -> Status {
    Failure::new(
        Code::InvalidArgument,
        Reason::RequestTooLarge,
        format!("the request has {bytes} bytes; at most {most} are read"),
    )
    .fact("bytes", bytes)
    .fact("limit_bytes", most)
    .field("request")
    .refused_if_write(access, Retry::Never)
    .status()
}

/// The client took too long to send one message.
pub(crate) fn message_too_slow(access: Access) -> Status {
    Failure::new(
        Code::DeadlineExceeded,
        Reason::RequestTooSlow,
        "the request did not arrive in time: a message must arrive within 10 s and 1 s for each 64 KiB, and move 64 KiB in each second while the server has no room for others",
    )
    .refused_if_write(access, Retry::Safe)
    .status()
}

/// Requests without records use up the memory that they have together.
pub(crate) fn requests_busy(inflight: u64, limit: u64) -> Status {
    Failure::new(
        Code::ResourceExhausted,
        Reason::Busy,
        format!(
            "{inflight} bytes of requests are in flight, the limit is {limit}; retry with backoff"
        ),
    )
    .fact("inflight_bytes", inflight)
    .fact("limit_bytes", limit)
    .refused(Retry::Safe)
    .retry_after(RETRY_LATER)
    .status()
}

/// Calls when one was too many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooManyCalls {
    /// All that are open.
    pub(crate) open: usize,
    /// Calls of the connection.
    pub(crate) own: usize,
    pub(crate) limit: usize,
}

/// Too many requests of the HTTP API are at work.
pub(crate) fn api_busy(limit: usize, access: Access) -> Status {
    Failure::new(
        Code::ResourceExhausted,
        Reason::Busy,
        format!(
            "{limit} requests of the HTTP API are at work, followers included: three eighths of http_max_connections; end \
             some, raise it, or retry with backoff"
        ),
    )
    .fact("limit_calls", limit)
    .refused_if_write(access, Retry::Safe)
    .retry_after(RETRY_LATER)
    .status()
}

/// Too many calls are open.
pub(crate) fn calls_busy(calls: &TooManyCalls) -> Status {
    let TooManyCalls { open, own, limit } = calls;
    too_many(
        calls,
        format!(
            "{open} calls are open, {own} of them on this connection, which may have as many as are free for others; \
             max_calls is {limit}; end calls of this connection, or retry with backoff"
        ),
    )
}

/// Too many calls are open for which nobody needs a credential.
pub(crate) fn free_calls_busy(calls: &TooManyCalls) -> Status {
    let TooManyCalls { open, own, limit } = calls;
    too_many(
        calls,
        format!(
            "{open} calls of grpc.health.v1.Health are open, {own} of them on this connection, which may have as many as are \
             free for others; the limit is {limit}; end some, or call over another connection"
        ),
    )
}

fn too_many(calls: &TooManyCalls, text: String) -> Status {
    Failure::new(Code::ResourceExhausted, Reason::Busy, text)
        .fact("open_calls", calls.open)
        .fact("own_calls", calls.own)
        .fact("limit_calls", calls.limit)
        .refused(Retry::Safe)
        .retry_after(RETRY_LATER)
        .status()
}

/// Answers that their clients do not take use up the memory that they have together.
pub(crate) fn answers_busy(waiting: u64, limit: u64) -> Status {
    Failure::new(
        Code::ResourceExhausted,
        Reason::Busy,
        format!(
            "{waiting} bytes of answers wait for their clients, the limit is {limit}; take those of this \
             connection, then retry with backoff"
        ),
    )
    .fact("waiting_bytes", waiting)
    .fact("limit_bytes", limit)
    .refused(Retry::Safe)
    .retry_after(RETRY_LATER)
    .status()
}

/// A request whose bytes cannot be read as one of the call's messages, or whose headers break the
/// rules of gRPC. `field` is `request` or the name of a header.
pub(crate) fn malformed(field: &str, why: impl std::fmt::Display, access: Access) -> Status {
    Failure::new(
        Code::InvalidArgument,
        Reason::MalformedRequest,
        format!("{field}: {why}"),
    )
    .fact("field", field)
    .field(field)
    .refused_if_write(access, Retry::Never)
    .status()
}

/// An error of tonic's about the messages it has received, which it blames on the server: INTERNAL
/// without details. All others are the answer as they are.
pub(crate) fn received(status: Status, access: Access) -> Status {
    let is_tonics =
        status.code() == Code::Internal && status.details().is_empty() && status.source().is_none();
    match is_tonics {
        true => malformed("request", status.message(), access),
        false => status,
    }
}

/// A request in an encoding that is not spoken here.
pub(crate) fn encoding_not_supported(encoding: &str, access: Access) -> Status {
    let mut status = Failure::new(
        Code::Unimplemented,
        Reason::NotSupported,
        format!("grpc-encoding: {encoding:?} is not supported; send messages without compression"),
    )
    .fact("field", "grpc-encoding")
    .refused_if_write(access, Retry::Never)
    .status();
    let accepted = tonic::metadata::MetadataValue::from_static("identity");
    status
        .metadata_mut()
        .insert("grpc-accept-encoding", accepted);
    status
}

/// A call of a method that this server does not have.
pub(crate) fn unknown_method(path: &str) -> Status {
    let shown = shortened(path);
    Failure::new(
        Code::Unimplemented,
        Reason::NotSupported,
        format!("this server has no method {shown:?}"),
    )
    .fact("method", shown)
    .refused(Retry::Never)
    .status()
}

/// A request to the HTTP API that it does not have.
pub(crate) fn unknown_request(method: &http::Method, path: &str) -> Status {
    let shown = format!("{method} {}", shortened(path));
    let slash = match path.starts_with("/v1/logs/") {
        true => "; a slash in the name of a log is %2F",
        false => "",
    };
    Failure::new(
        Code::Unimplemented,
        Reason::NotSupported,
        format!("the HTTP API has no request {shown:?}; /v1/openapi.json describes all{slash}"),
    )
    .fact("method", shown)
    .refused(Retry::Never)
    .status()
}

/// The name of a code in `google/rpc/code.proto`.
pub(crate) fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

/// The part of a path that a message repeats.
fn shortened(path: &str) -> &str {
    let end = path.char_indices().nth(MAX_SHOWN_PATH);
    end.map_or(path, |(end, _)| &path[..end])
}

/// Answers a barrier that was not reached.
pub(crate) fn sync(error: &SyncError) -> Status {
    let message = error.to_string();
    match error {
        SyncError::LogNotFound { log } => {
            Failure::new(Code::NotFound, Reason::LogNotFound, message)
                .fact("log", log)
                .refused(Retry::Never)
        }
        SyncError::Refused(AppendError::NotSupported(_)) => {
            no_replica("target").refused(Retry::Never)
        }
        SyncError::Refused(error) => append_failure(error).with_message(message),
        SyncError::JournalFailed(_) => {
            Failure::new(Code::Internal, Reason::JournalFailed, message).unknown()
        }
    }
    .status()
}

/// Answers a backup that was not made, or not finished.
pub(crate) fn backup(error: &BackupError) -> Status {
    let message = error.to_string();
    match error {
        BackupError::Busy { running } => {
            Failure::new(Code::ResourceExhausted, Reason::Busy, message)
                .fact("running", running)
                .retry_after(RETRY_LATER)
        }
        BackupError::JournalFailed(_) => {
            Failure::new(Code::Unavailable, Reason::JournalFailed, message)
        }
        BackupError::Io { path, .. } => {
            Failure::new(Code::Unavailable, Reason::ReadFailed, message).fact("path", path)
        }
        BackupError::Unread { limit } => {
            Failure::new(Code::DeadlineExceeded, Reason::RequestTooSlow, message)
                .fact("limit_seconds", limit.as_secs())
        }
        BackupError::Changed { path } => {
            Failure::new(Code::DataLoss, Reason::Quarantined, message).fact("path", path)
        }
    }
    .status()
}

/// A log name that breaks a rule, in the request field `field`.
pub(crate) fn invalid_log_name(field: &str, error: InvalidLogName, access: Access) -> Status {
    let failure = Failure::new(
        Code::InvalidArgument,
        Reason::InvalidLogName,
        format!("{field}: {error}"),
    )
    .field(field);
    match error {
        InvalidLogName::Empty | InvalidLogName::Reserved => failure,
        InvalidLogName::TooLong { bytes } => failure
            .fact("bytes", bytes)
            .fact("limit_bytes", MAX_LOG_NAME_BYTES),
        InvalidLogName::ControlCharacter { character } => {
            failure.fact("character", format!("U+{:04X}", u32::from(character)))
        }
    }
    .refused_if_write(access, Retry::Never)
    .status()
}

/// The name of a producer that breaks a rule, in the request field `field`.
pub(crate) fn invalid_producer(field: &str, error: InvalidName) -> Status {
    invalid_field(
        Reason::InvalidProducer,
        field,
        &error.to_string(),
        Access::Write,
    )
}

/// The name of a cursor that breaks a rule, in the request field `field`.
pub(crate) fn invalid_cursor_name(field: &str, error: InvalidName, access: Access) -> Status {
    invalid_field(Reason::InvalidCursorName, field, &error.to_string(), access)
}

/// A field with a value that no state of the server would make right.
pub(crate) fn invalid_field(reason: Reason, field: &str, why: &str, access: Access) -> Status {
    Failure::new(Code::InvalidArgument, reason, format!("{field}: {why}"))
        .fact("field", field)
        .field(field)
        .refused_if_write(access, Retry::Never)
        .status()
}

/// A value of an enumeration that this version has not built, or does not know.
pub(crate) fn not_supported_value(
    field: &str,
    value: impl std::fmt::Display,
    access: Access,
) -> Status {
    unsupported(field, value)
        .refused_if_write(access, Retry::Never)
        .status()
}

fn unsupported(field: &str, value: impl std::fmt::Display) -> Failure {
    Failure::new(
        Code::Unimplemented,
        Reason::NotSupported,
        format!("{field}: {value} is not supported by this server"),
    )
    .fact("field", field)
}

/// A field that asks for REPLICATED. The server has no replica.
fn no_replica(field: &str) -> Failure {
    Failure::new(
        Code::Unimplemented,
        Reason::NotSupported,
        format!("{field}: this server has no replica, so it refuses REPLICATED; its safest level is DURABLE"),
    )
    .fact("field", field)
}

/// Answers a call that came to the HTTP port, whose caller knows no better.
pub(crate) fn wrong_port(grpc: u16) -> Status {
    Failure::new(
        Code::FailedPrecondition,
        Reason::NotSupported,
        format!("this is the HTTP port, which serves no gRPC; gRPC is on port {grpc}"),
    )
    .fact("grpc_port", grpc)
    .refused(Retry::Never)
    .status()
}

/// A page of another origin sent the request, or one under a name that is not known as this machine's.
pub(crate) fn foreign_origin(why: &str) -> Status {
    Failure::new(Code::PermissionDenied, Reason::NotAllowed, why)
        .field("origin")
        .refused(Retry::Never)
        .status()
}

/// The call needs a credential, and has none.
pub(crate) fn no_credential(access: Access) -> Status {
    Failure::new(
        Code::Unauthenticated,
        Reason::NoCredential,
        "this server requires a credential: send a client certificate that auth_file names, or the metadata \
         \"authorization: Bearer TOKEN\"",
    )
    .refused_if_write(access, Retry::Never)
    .status()
}

/// The call was forwarded without a token. The certificate is of the node that has forwarded it, and never its caller's.
#[cfg(feature = "object")]
pub(crate) fn forwarded_without_token(access: Access) -> Status {
    Failure::new(
        Code::Unauthenticated,
        Reason::NoCredential,
        "a stand-by has forwarded this call without a token, and the owner of the store does not see the caller's \
         certificate: send the metadata \"authorization: Bearer TOKEN\", or call the owner itself",
    )
    .refused_if_write(access, Retry::Never)
    .status()
}

/// The call has a client certificate and no token, and no principal has a name of the certificate. `names`: a sentence
/// with them.
pub(crate) fn unknown_certificate(names: &str, access: Access) -> Status {
    let message = format!(
        "this server requires a credential: {names}, and auth_file lists none of them as `cert` of a principal"
    );
    Failure::new(Code::Unauthenticated, Reason::NoCredential, message)
        .refused_if_write(access, Retry::Never)
        .status()
}

/// The credential is unknown, wrong or revoked. One text for all three tells a stranger nothing.
pub(crate) fn bad_credential(access: Access) -> Status {
    Failure::new(
        Code::Unauthenticated,
        Reason::BadCredential,
        "the credential is not valid; `wald token list` shows the ids of the valid tokens, and the audit log names \
         the fault of a JWT",
    )
    .refused_if_write(access, Retry::Never)
    .status()
}

/// The token is right, and the client certificate is not of its principal.
pub(crate) fn credentials_differ(access: Access) -> Status {
    Failure::new(
        Code::Unauthenticated,
        Reason::BadCredential,
        "the token and the client certificate are not of the same principal: send one of them, or add the name of the \
         certificate to cert of the token's principal. A node that passes on calls of others needs a principal with proxy = true",
    )
    .refused_if_write(access, Retry::Never)
    .status()
}

/// The credential was valid until the time `at`.
pub(crate) fn credential_expired(at: &str, access: Access) -> Status {
    Failure::new(
        Code::Unauthenticated,
        Reason::CredentialExpired,
        format!("the credential expired at {at}; renew it"),
    )
    .fact("expire_time", at)
    .refused_if_write(access, Retry::Safe)
    // A client that waits for its next token asks no more often.
    .retry_after(RETRY_LATER)
    .status()
}

/// No keys of the issuer of the token are in force: the server waits for them, as at its start.
pub(crate) fn no_keys(access: Access) -> Status {
    Failure::new(
        Code::Unavailable,
        Reason::Starting,
        "the server has no keys of the token's issuer yet; its log names the fault",
    )
    .refused_if_write(access, Retry::Safe)
    .retry_after(RETRY_LATER)
    .status()
}

/// A principal lacks a right. `asked`: the field of the request, and the value in it.
pub(crate) fn not_allowed(
    principal: &str,
    right: &str,
    asked: Option<(&str, &str)>,
    access: Access,
) -> Status {
    let lacks = format!("principal {principal} lacks the right {right}");
    let failure = |message| Failure::new(Code::PermissionDenied, Reason::NotAllowed, message);
    match asked {
        Some((field, value)) => failure(format!("{field}: {lacks} on {value:?}"))
            .fact("field", field)
            .field(field),
        None => failure(lacks),
    }
    .fact("right", right)
    .refused_if_write(access, Retry::Never)
    .status()
}

/// The store is still being recovered.
pub(crate) fn starting(access: Access) -> Status {
    Failure::new(
        Code::Unavailable,
        Reason::Starting,
        "the server is starting: the store is being recovered",
    )
    .refused_if_write(access, Retry::Safe)
    .retry_after(RETRY_SHORTLY)
    .status()
}

/// Another node owns the store, or none does for a moment: then `owner` is empty.
pub(crate) fn moved(access: Access, owner: &str, term: u64) -> Status {
    let message = match owner {
        "" => "no node owns the store at the moment; try again".to_owned(),
        owner => format!("the node at {owner} owns the store; send the request there"),
    };
    moved_saying(message, access, owner, term)
}

/// Another node owns the store, and this one has not sent the call there.
#[cfg(feature = "object")]
pub(crate) fn unforwarded(access: Access, owner: &str, term: u64) -> Status {
    let message = format!(
        "the node at {owner} owns the store, and this one cannot reach it now; send the request there"
    );
    moved_saying(message, access, owner, term)
}

fn moved_saying(message: String, access: Access, owner: &str, term: u64) -> Status {
    Failure::new(Code::Unavailable, Reason::Moved, message)
        .fact("owner", owner)
        .fact("term", term)
        .refused_if_write(access, Retry::Safe)
        .retry_after(RETRY_SOON)
        .status()
}

/// The audit log cannot be written, and the call must have a line there.
pub(crate) fn audit_failed(access: Access) -> Status {
    Failure::new(
        Code::Unavailable,
        Reason::AuditFailed,
        "the audit log cannot be written, and audit_on_failure is refuse; the server's log names the fault",
    )
    .refused_if_write(access, Retry::Safe)
    .retry_after(RETRY_LATER)
    .status()
}

/// The server is on its way out, and answers a stream so that has begun.
pub(crate) fn draining() -> Status {
    draining_call(Access::Read)
}

/// The server is on its way out, and takes no more calls.
pub(crate) fn draining_call(access: Access) -> Status {
    Failure::new(
        Code::Unavailable,
        Reason::Draining,
        "the server is shutting down; go on with another, or after the restart",
    )
    .refused_if_write(access, Retry::Safe)
    .retry_after(RETRY_SHORTLY)
    .status()
}

/// The deadline was over before anything was done.
pub(crate) fn deadline_before_start() -> Status {
    Failure::new(
        Code::DeadlineExceeded,
        Reason::DeadlineExceeded,
        "the deadline had passed before the request was queued; nothing was written",
    )
    .refused(Retry::Safe)
    .status()
}

/// The deadline came while the request was under way.
pub(crate) fn deadline_under_way(access: Access) -> Status {
    let failure = Failure::new(
        Code::DeadlineExceeded,
        Reason::DeadlineExceeded,
        "the deadline passed before the answer",
    );
    match access {
        Access::Write => failure.unknown(),
        Access::Read => failure,
    }
    .status()
}

#[cfg(test)]
mod tests;
