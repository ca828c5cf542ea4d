//! Errors of the tail, by the caller's next step.

use slatedb::{CloseReason, ErrorKind};

use crate::error::store_words;

/// Class of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TailErrorKind {
    /// Another owner has opened the tail. This one stores nothing any more.
    Fenced,
    /// The bucket gave no answer in time. A row on its way may or may not be stored. The same call may be repeated.
    Unreachable,
    /// The database of this owner has stopped. The tail must be opened again, with the next term.
    Stopped,
    /// The owner has removed rows during the read. The read must begin again.
    Changed,
    /// The stored rows are not the expected ones.
    Damaged,
    /// The caller asked for something that the tail does not store. Nothing was stored.
    Refused,
}

/// An error of the tail.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {what}")]
pub struct TailError {
    kind: TailErrorKind,
    place: String,
    what: String,
}

impl TailError {
    pub(super) fn new(kind: TailErrorKind, place: &str, what: impl Into<String>) -> Self {
        Self {
            kind,
            place: place.to_owned(),
            what: what.into(),
        }
    }

    /// The class.
    pub fn kind(&self) -> TailErrorKind {
        self.kind
    }

    /// An error of the database during `action`. `closed` is its state, which lasts once it is set.
    pub(super) fn of(
        place: &str,
        action: &str,
        error: &slatedb::Error,
        closed: Option<CloseReason>,
    ) -> Self {
        let kind = match (closed, error.kind()) {
            (Some(CloseReason::Fenced), _) | (_, ErrorKind::Closed(CloseReason::Fenced)) => {
                TailErrorKind::Fenced
            }
            (_, ErrorKind::Data) => TailErrorKind::Damaged,
            (None, ErrorKind::Unavailable) => TailErrorKind::Unreachable,
            _ => TailErrorKind::Stopped,
        };
        match kind {
            TailErrorKind::Fenced => Self::fenced(place, action),
            _ => Self::new(
                kind,
                place,
                format!("cannot {action}: {}", store_words(error)),
            ),
        }
    }

    pub(crate) fn fenced(place: &str, action: &str) -> Self {
        let what = format!("cannot {action}: another owner has opened the tail of this store");
        Self::new(TailErrorKind::Fenced, place, what)
    }

    pub(super) fn late(place: &str, action: &str) -> Self {
        let what = format!("cannot {action}: the bucket gave no answer in time");
        Self::new(TailErrorKind::Unreachable, place, what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_database_that_has_stopped_is_opened_again() {
        let unavailable = slatedb::Error::unavailable("503".to_owned());
        let kind = |closed| TailError::of("b", "store a row", &unavailable, closed).kind();
        assert_eq!(kind(None), TailErrorKind::Unreachable);
        assert_eq!(kind(Some(CloseReason::Panic)), TailErrorKind::Stopped);
        assert_eq!(kind(Some(CloseReason::Fenced)), TailErrorKind::Fenced);
        let fenced = slatedb::Error::closed("x".to_owned(), CloseReason::Fenced);
        assert_eq!(
            TailError::of("b", "open", &fenced, None).kind(),
            TailErrorKind::Fenced
        );
        let data = slatedb::Error::data("checksum".to_owned());
        assert_eq!(
            TailError::of("b", "read", &data, None).kind(),
            TailErrorKind::Damaged
        );
    }
}
