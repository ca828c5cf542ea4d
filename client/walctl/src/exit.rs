//! Exit of walctl: exit codes, and errors in one line with the next step.

use tonic::Code;
use wald_client::{Error, ErrorKind, Outcome, Reason, TlsFailure};
use wald_connection::ConnectionFault;

use crate::args::{AppendArgs, Command};
use crate::output::{is_unread, say};

/// Exit codes; scripts rely on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExitKind {
    Ok = 0,
    Failed = 1,
    /// The value that clap uses for its own errors.
    Usage = 2,
    /// No such log, or nothing there to read.
    NotFound = 3,
    Unavailable = 4,
    DataLoss = 5,
    /// The server does not know the caller, or does not allow the call.
    Denied = 6,
    /// The settings cannot be used, or the object store lacks what Wald needs: EX_CONFIG.
    #[cfg(feature = "object")]
    Config = 78,
    /// 128 + SIGINT.
    Interrupted = 130,
}

/// The command line makes no sense, in a way that clap does not see.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(pub(crate) String);

/// Ctrl-C ended the command before its end.
#[derive(Debug, thiserror::Error)]
#[error("interrupted{0}")]
pub(crate) struct Interruption(&'static str);

impl Interruption {
    /// While nothing was sent.
    pub(crate) const BEFORE: Self = Self("");
    /// While a request that changes something may have been on its way.
    pub(crate) const UNDERWAY: Self = Self("; the request underway may have been carried out");
}

/// The content read here differs from the content that was written.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Damaged(pub(crate) String);

/// Parts of the user's request that the advice depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    Fence,
    /// To append with a command that has no --writer-epoch: it may be many logs, each with
    /// an epoch of its own.
    AppendToMany,
    /// To append to one log.
    Append,
    Else,
}

impl Asked {
    pub(crate) fn of(command: &Command) -> Self {
        match command {
            Command::Fence(_) => Self::Fence,
            Command::Batch(_) => Self::AppendToMany,
            Command::Append(args) => Self::of_append(args),
            _ => Self::Else,
        }
    }

    pub(crate) fn of_append(args: &AppendArgs) -> Self {
        match args.log_from_field.is_some() {
            true => Self::AppendToMany,
            false => Self::Append,
        }
    }
}

/// Reports the error and the next step on stderr.
pub(crate) fn report(error: &anyhow::Error, asked: Asked) -> ExitKind {
    let exit = exit_of(error);
    // A reader that closed the pipe has seen enough.
    if exit != ExitKind::Ok {
        say(&sentence(error, asked));
    }
    exit
}

fn sentence(error: &anyhow::Error, asked: Asked) -> String {
    let mut text = format!("{error:#}");
    if let Some(error) = find::<Error>(error) {
        if let Some(advice) = advice(error, asked).filter(|advice| !text.contains(advice.as_str()))
        {
            text = format!("{text}; {advice}");
        }
    } else if find::<Usage>(error).is_some() {
        text.push_str("; see --help");
    }
    if let Some(error) = find::<Error>(error)
        && error.outcome() == Outcome::Unknown
        && !text.contains("may or may not")
    {
        text.push_str("; the change may or may not be made");
    }
    // One line, whatever the server put into its message; [`say`] escapes the rest.
    text.replace(['\n', '\r'], " ")
}

fn find<E: std::error::Error + 'static>(error: &anyhow::Error) -> Option<&E> {
    error.chain().find_map(|cause| cause.downcast_ref())
}

fn exit_of(error: &anyhow::Error) -> ExitKind {
    if find::<Usage>(error).is_some() || find::<ConnectionFault>(error).is_some() {
        return ExitKind::Usage;
    }
    if find::<Interruption>(error).is_some() {
        return ExitKind::Interrupted;
    }
    if find::<Damaged>(error).is_some() {
        return ExitKind::DataLoss;
    }
    #[cfg(feature = "object")]
    if let Some(exit) = of_a_bucket(error) {
        return exit;
    }
    if is_unread(error) {
        return ExitKind::Ok;
    }
    let kind = find::<Error>(error).map(Error::kind);
    if let Some(
        ErrorKind::InvalidEndpoint { .. }
        | ErrorKind::Token { .. }
        | ErrorKind::Tls {
            failure: TlsFailure::Settings,
            ..
        },
    ) = kind
    {
        return ExitKind::Usage;
    }
    match find::<Error>(error).map(Error::code) {
        Some(Code::NotFound | Code::OutOfRange) => ExitKind::NotFound,
        Some(Code::Unavailable | Code::DeadlineExceeded) => ExitKind::Unavailable,
        Some(Code::DataLoss) => ExitKind::DataLoss,
        Some(Code::Unauthenticated | Code::PermissionDenied) => ExitKind::Denied,
        _ => ExitKind::Failed,
    }
}

#[cfg(feature = "object")]
fn of_a_bucket(error: &anyhow::Error) -> Option<ExitKind> {
    use wald_bucket::{BucketError, BucketErrorKind, ProbeError};
    let store = match find::<ProbeError>(error) {
        Some(ProbeError::Refused { .. }) => return Some(ExitKind::Config),
        Some(ProbeError::Store(error)) => Some(error),
        None => find::<BucketError>(error),
    };
    store.map(|error| match error.kind() {
        BucketErrorKind::Settings => ExitKind::Config,
        BucketErrorKind::NotFound => ExitKind::NotFound,
        BucketErrorKind::Denied | BucketErrorKind::Expired => ExitKind::Denied,
        BucketErrorKind::Unavailable => ExitKind::Unavailable,
        BucketErrorKind::Damaged => ExitKind::DataLoss,
    })
}

/// The next step, unless the server's message is enough.
fn advice(error: &Error, asked: Asked) -> Option<String> {
    let read_on = |fact| Some(format!("read on with --from {}", error.fact(fact)?));
    if let Some(reason) = error.reason() {
        return Some(match reason {
            Reason::LogNotFound => "`walctl logs` lists the logs".to_owned(),
            Reason::CursorNotFound => "`walctl cursor list` lists the cursors".to_owned(),
            Reason::ProducerNotFound => {
                "`walctl producer list` shows the producers that the log knows".to_owned()
            }
            Reason::LogExists => "`walctl log get` shows it, `walctl log update` changes it".to_owned(),
            Reason::Fenced => fenced(error, asked)?,
            Reason::PositionMismatch => match (error.fact("cursor"), error.fact("log")) {
                (Some(cursor), Some(log)) => cursor_mismatch(error, log, cursor),
                _ if error.outcome() == Outcome::Unknown => IN_DOUBT.to_owned(),
                _ => mismatch(error).to_owned(),
            },
            Reason::ProducerExpired if error.fact("first_epoch").is_some() => {
                "the server has forgotten this producer, so it cannot tell which records are there; see \
                 the end of the log (`walctl tail LOG`), and append the rest with another --producer"
                    .to_owned()
            }
            Reason::ProducerConflict => {
                "this producer appended other records here: the input, its format or the server's \
                 limits have changed; use another --producer for other input"
                    .to_owned()
            }
            Reason::ProducerGap => {
                "records of an earlier run were lost in a crash; run the load again from the start"
                    .to_owned()
            }
            Reason::ProducerFenced => {
                "a higher --producer-epoch has taken over; only that one may append now".to_owned()
            }
            Reason::InvalidLogName => {
                "a name has 1 to 255 bytes of UTF-8 without control or invisible characters, and does \
                 not begin with $"
                    .to_owned()
            }
            Reason::LogReplaced => {
                "`walctl log get` shows the --log-id of the log".to_owned()
            }
            Reason::BeyondTail => "`walctl log get` shows the next lsn".to_owned(),
            // The message of a tenant's limit has the remedy.
            Reason::Quota if error.fact("tenant").is_none() => {
                "delete something, or raise the setting that the message names".to_owned()
            }
            Reason::Trimmed => return read_on("first_lsn"),
            Reason::Quarantined => return read_on("to_lsn"),
            Reason::NoCredential | Reason::BadCredential => {
                "--token-file or WALD_TOKEN_FILE names the file with the token, --tls-cert and --tls-key the \
                 client certificate"
                    .to_owned()
            }
            Reason::DiskFull => "make space on the server's disk, then continue".to_owned(),
            Reason::Rate => "try again then, or wait for it with a longer --timeout".to_owned(),
            Reason::Starting => "try again in a moment".to_owned(),
            Reason::JournalFailed if error.outcome() == Outcome::Unknown => {
                "it may or may not be appended; read the tail once the server is back".to_owned()
            }
            Reason::JournalFailed => "the server's log says more".to_owned(),
            Reason::DeadlineExceeded => "--timeout allows more".to_owned(),
            Reason::RecordTooLarge if error.fact("limit_headers").is_some() => {
                "give it fewer or shorter headers".to_owned()
            }
            Reason::RecordTooLarge => {
                "split it, or raise max_record_bytes of the server or the log".to_owned()
            }
            Reason::RequestTooLarge => {
                format!("split it, or raise {} of the server", passed_limits(error))
            }
            _ => return None,
        });
    }
    match error.kind() {
        ErrorKind::Connect { detail, .. }
        | ErrorKind::ConnectionLost(detail)
        | ErrorKind::NotSent(detail)
            if speaks_no_http2(detail) =>
        {
            Some(NOT_WALD.to_owned())
        }
        ErrorKind::ConnectionLost(_) if asked == Asked::Append => Some(
            "compare the end of the log with the input (`walctl tail LOG`); --producer ID makes a load \
             safe to run again"
                .to_owned(),
        ),
        ErrorKind::InvalidEndpoint { .. } => {
            Some("write HOST:PORT, such as 127.0.0.1:6925".to_owned())
        }
        ErrorKind::Token { detail } if detail.contains("plaintext") => {
            Some("--allow-insecure-token sends it anyway".to_owned())
        }
        ErrorKind::Tls { failure, .. } => of_tls(*failure).map(str::to_owned),
        ErrorKind::Connect { .. } => {
            Some("is the server running? --endpoint or WALD_ENDPOINT gives its address".to_owned())
        }
        ErrorKind::Timeout { .. } => Some("--timeout allows more".to_owned()),
        ErrorKind::Foreign {
            code: Code::Unimplemented,
            ..
        } => Some("is this a Wald server, and as new as this walctl?".to_owned()),
        _ => None,
    }
}

/// The option that helps against a failure of TLS, unless the message names the remedy.
fn of_tls(failure: TlsFailure) -> Option<&'static str> {
    match failure {
        TlsFailure::UnknownCa => {
            Some("--tls-ca or WALD_TLS_CA names the file with the CA of the server")
        }
        TlsFailure::WrongName => {
            Some("--tls-server-name or WALD_TLS_SERVER_NAME gives the name to expect")
        }
        TlsFailure::ClientCertificateRequired => {
            Some("--tls-cert and --tls-key name the files of one")
        }
        _ => None,
    }
}

/// The advice for a server that answers in HTTP/1, or in no HTTP at all.
const NOT_WALD: &str = "that is no Wald server: it does not speak gRPC (HTTP/2). A Wald server has gRPC \
                        on port 6925, and metrics and the console on 6926";

/// Whether the transport failed because the peer's first bytes are no HTTP/2.
fn speaks_no_http2(detail: &str) -> bool {
    detail.contains("frame with invalid size") || detail.contains("malformed frame")
}

/// Advice where an earlier attempt of the same request may have been applied: then the log is
/// longer because of it.
const IN_DOUBT: &str = "an earlier attempt of this request may have been appended; compare the end of \
                        the log with the input (`walctl tail LOG`), and load with --producer ID";

/// The settings whose bound a request passes.
fn passed_limits(error: &Error) -> &'static str {
    let passes = |fact, limit| error.fact_number(fact) > error.fact_number(limit);
    match (
        passes("records", "limit_records"),
        passes("bytes", "limit_bytes"),
    ) {
        (true, true) => "max_batch_records and max_batch_bytes",
        (false, true) => "max_batch_bytes",
        // Logs, checks and cursors of a request have the bound of its records.
        (true, false) | (false, false) => "max_batch_records",
    }
}

/// The meaning of a failed --expected-lsn: only a log that is longer than expected was appended
/// to.
fn mismatch(error: &Error) -> &'static str {
    match (
        error.fact_number("expected_lsn"),
        error.fact_number("actual_lsn"),
    ) {
        (_, Some(0)) => "the log is empty, or there is none of this name",
        (Some(expected), Some(actual)) if actual > expected => {
            "someone else has appended; read on and decide again"
        }
        _ => "read the log and decide again",
    }
}

/// The meaning of a failed --expected-lsn of a cursor.
fn cursor_mismatch(error: &Error, log: &str, cursor: &str) -> String {
    match (
        error.fact_number("expected_lsn"),
        error.fact_number("actual_lsn"),
    ) {
        (_, Some(0)) => {
            "no such cursor has been set yet, or it is back at 0: --expected-lsn 0 matches both"
                .to_owned()
        }
        (Some(expected), Some(actual)) if actual > expected => format!(
            "someone else has moved the cursor on; `walctl cursor get {log} {cursor}`, and decide \
             again"
        ),
        _ => format!("`walctl cursor get {log} {cursor}` shows where it is; decide again"),
    }
}

/// Advice about a fence. An append must not simply take the epoch in force: a writer that was
/// shut out must not continue under the new writer's name.
fn fenced(error: &Error, asked: Asked) -> Option<String> {
    let current = error.fact_number("writer_epoch")?;
    let advice = match (asked, error.fact_number("given_writer_epoch")) {
        (Asked::Fence, _) => {
            return Some(format!(
                "--writer-epoch must exceed {current}; omit it to use {}",
                current.saturating_add(1)
            ));
        }
        (Asked::AppendToMany, _) => {
            "only the log's writer may append, with `walctl append LOG --writer-epoch`; this \
             command cannot write fenced logs"
        }
        (Asked::Append | Asked::Else, None) => {
            "a writer has taken the log over, and only that one may append, with --writer-epoch"
        }
        (Asked::Append | Asked::Else, Some(given)) if given < current => {
            "another writer has taken the log over; only that one may append now"
        }
        (Asked::Append | Asked::Else, Some(_)) => {
            "no fence has given that epoch out; name the one that yours printed"
        }
    };
    Some(advice.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_pipe_of_something_else_than_stdout_is_an_error() {
        let error = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        let error = anyhow::Error::from(error).context("connecting");
        assert_eq!(exit_of(&error), ExitKind::Failed);
    }

    #[test]
    fn usage_error_exits_with_2_and_points_to_help() {
        let error = anyhow::Error::from(Usage("no log".into()));
        assert_eq!(exit_of(&error), ExitKind::Usage);
        assert_eq!(sentence(&error, Asked::Else), "no log; see --help");
    }
}
