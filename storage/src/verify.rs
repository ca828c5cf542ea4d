//! Checking all that is stored: every checksum, chain, index and digest, and whether
//! anything is there that nobody owns or gone that somebody needs. Nothing is changed.
//!
//! ```text
//!                     ┌── offline: a directory that nobody serves (`offline.rs`)
//!  frames (frames.rs) │
//!   one segment, in ──┼── online: the store of a running engine (`online.rs`)
//!   steps of 1 MiB    │
//!                     └── scrub: the same, for ever and slowly (`scrub.rs`)
//! ```
//!
//! One piece of code looks at a segment for all three ([`segment`]). What is damaged is
//! found by it; whose records that are is told by recovery itself where nobody serves the
//! store, so that a start says the same, and by the engine's indexes where somebody does.

pub(crate) mod files;
pub(crate) mod frames;
mod offline;
pub(crate) mod online;
pub(crate) mod pace;
pub(crate) mod scrub;
pub(crate) mod segment;

use std::fmt;

use crate::ids::{LogId, LogName, Lsn, Position, SegmentId, records_in_words};

pub(crate) use self::offline::Reader;
pub use self::offline::{Offline, OfflineReport};
pub use self::online::Verification;
pub use self::pace::{Control, Progress};

/// What kind of fault was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FindingKind {
    /// Bytes do not match their checksum.
    Checksum,
    /// A frame does not follow from the one before it, or says something else than others
    /// say of it.
    Chain,
    /// An index or a checkpoint does not match its segments.
    Index,
    /// A segment does not match the digest or the counts in its seal.
    Digest,
    /// A file, a part of one, or records are missing.
    Missing,
    /// A file that does not belong to the store.
    Unowned,
}

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// Nothing is wrong with the store; people should know all the same.
    Note,
    /// Something is broken and no record is lost by it: a second copy, an index.
    Damage,
    /// Records that were stored cannot be read, or whether some are gone cannot be told.
    Loss,
}

/// One fault, named as exactly as it can be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What kind of fault.
    pub kind: FindingKind,
    /// How bad it is.
    pub severity: Severity,
    /// The file, by its path in the data directory.
    pub file: Option<String>,
    /// The segment.
    pub segment: Option<u64>,
    /// The stretch of positions touched, its end exclusive.
    pub positions: Option<(Position, Position)>,
    /// The log touched.
    pub log: Option<LogName>,
    /// Its id, known also where the name is not.
    pub log_id: Option<LogId>,
    /// The records touched, the end exclusive.
    pub lsns: Option<(Lsn, Lsn)>,
    /// The fault in a sentence.
    pub detail: String,
    /// What to do, in a sentence.
    pub advice: &'static str,
}

impl Finding {
    /// A fault of a file, of which nothing else is known yet.
    pub(crate) fn of_file(
        kind: FindingKind,
        severity: Severity,
        file: impl Into<String>,
        detail: impl Into<String>,
        advice: &'static str,
    ) -> Self {
        Self {
            kind,
            severity,
            file: Some(file.into()),
            segment: None,
            positions: None,
            log: None,
            log_id: None,
            lsns: None,
            detail: detail.into(),
            advice,
        }
    }

    pub(crate) fn in_segment(self, id: SegmentId) -> Self {
        Self {
            segment: Some(id.get()),
            ..self
        }
    }

    pub(crate) fn at(self, from: Position, to: Position) -> Self {
        Self {
            positions: Some((from, to)),
            ..self
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.log, self.log_id, self.lsns) {
            (Some(log), _, Some((from, to))) => {
                write!(f, "log {log:?}, {}: ", records_in_words(from, to))?;
            }
            (Some(log), _, None) => write!(f, "log {log:?}: ")?,
            (None, Some(id), Some((from, to))) => {
                write!(f, "log {id}, {}: ", records_in_words(from, to))?;
            }
            _ => {}
        }
        f.write_str(&self.detail)
    }
}

/// What to do about faults.
pub(crate) mod advice {
    /// Records are gone.
    pub(crate) const LOST: &str = "everything else is served; put the file back from a restored backup, which loses nothing (`wald repair --help`), or accept the loss with `wald repair --accept-loss`";
    /// It is not known which.
    pub(crate) const UNPROVEN: &str = "logs without later records refuse appends; restore from a backup, or accept the loss with `wald repair --accept-loss`";
    /// Somebody said so.
    pub(crate) const ACCEPTED: &str = "nothing to do; readers are told of the gap";
    /// A second copy is gone.
    pub(crate) const COPY: &str =
        "nothing is lost; the device may be failing: look at its health, and keep a backup";
    /// A sector is bad.
    pub(crate) const DEVICE: &str =
        "the device is failing: take a backup, and move the store to another device";
    /// It is made anew.
    pub(crate) const REMADE: &str = "nothing is lost; it is made anew from the segments when it is needed. The device may be failing: look at its health";
    /// It was repaired by others.
    pub(crate) const TOLD: &str =
        "no record is lost; the device may be failing: look at its health, and keep a backup";
    /// It may be a witness.
    pub(crate) const INDEX_ALONE: &str = "leave it there: it may tell what a missing segment held";
    /// Somebody put it there.
    pub(crate) const UNOWNED: &str = "it is never read; move it elsewhere";
    /// It goes by itself.
    pub(crate) const LEFTOVER: &str =
        "nothing to do; the next start or the next file of its kind takes it away";
}
