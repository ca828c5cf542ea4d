//! Deletions that destroy the keys of their log.

use std::fmt;
use std::io;

use tonic::{Code, Status};
use wald_proto::v1::Reason;
use wald_storage::{AdminError, AppendError, LogName};

use super::failure::{Failure, Retry};

/// Why the keys of a log were not destroyed.
#[derive(Debug)]
pub(crate) enum ShredError {
    /// Its records are, or were, under a key that other logs need: why, in words.
    NoOwnKey(String),
    /// The ring could not be written.
    Io(io::Error),
    /// The bucket of the replica did not take the deletion or the ring in time: why, in words.
    NotStored(String),
}

impl fmt::Display for ShredError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoOwnKey(why) | Self::NotStored(why) => f.write_str(why),
            Self::Io(error) => write!(f, "the key ring cannot be written: {error}"),
        }
    }
}

impl From<io::Error> for ShredError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Answers a deletion that was to destroy the keys of its log. Nothing was deleted.
pub(crate) fn shred(log: &LogName, error: &ShredError) -> Status {
    let message = error.to_string();
    match error {
        ShredError::NoOwnKey(_) => {
            Failure::new(Code::FailedPrecondition, Reason::NoOwnKey, message)
                .fact("log", log)
                .refused(Retry::Never)
        }
        ShredError::Io(_) => {
            Failure::new(Code::ResourceExhausted, Reason::DiskFull, message).refused(Retry::Safe)
        }
        ShredError::NotStored(_) => {
            Failure::new(Code::Unavailable, Reason::BucketDown, message).refused(Retry::Safe)
        }
    }
    .status()
}

/// Whether a deletion was certainly not applied.
pub(crate) fn is_unapplied(error: &AdminError) -> bool {
    !matches!(
        error,
        AdminError::Append(
            AppendError::Unknown(_)
                | AppendError::JournalFailed(_)
                | AppendError::ReplicationUnknown
        )
    )
}

/// Answers a deletion that was carried out, and whose keys were not destroyed yet.
pub(crate) fn shred_unended(log: &LogName, error: &ShredError) -> Status {
    let (reason, remedy) = match error {
        ShredError::NotStored(_) => (
            Reason::ReplicationUnknown,
            "the bucket may still have them: repeat the call once the bucket answers",
        ),
        _ => (
            Reason::JournalFailed,
            "the server tries it again each 10 s, and at its next start",
        ),
    };
    let message =
        format!("log {log:?} is deleted, and its keys are still there: {error}; {remedy}");
    Failure::new(Code::Internal, reason, message)
        .unknown()
        .status()
}
