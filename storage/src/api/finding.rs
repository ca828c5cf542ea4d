//! Findings of a verification, offline or online: kind, severity and place of each fault.

use std::fmt;

use crate::base::ids::{LogId, LogName, Lsn, Position, SegmentId, records_in_words};

/// Kind of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FindingKind {
    /// Bytes do not match their checksum.
    Checksum,
    /// A frame does not follow from the one before it, or contradicts other frames.
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

/// Severity of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// Nothing is wrong with the store, but an operator should know.
    Note,
    /// A second copy or an index is broken. No record is lost by it.
    Damage,
    /// Stored records cannot be read, or it is unknown whether some are gone.
    Loss,
}

/// One fault, located as exactly as possible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Kind of the fault.
    pub kind: FindingKind,
    /// Severity of the fault.
    pub severity: Severity,
    /// The file, by its path in the data directory.
    pub file: Option<String>,
    /// Id of the segment.
    pub segment: Option<u64>,
    /// The affected range of positions, its end exclusive.
    pub positions: Option<(Position, Position)>,
    /// The affected log.
    pub log: Option<LogName>,
    /// Id of the log, known even if its name is not.
    pub log_id: Option<LogId>,
    /// The affected records, the end exclusive.
    pub lsns: Option<(Lsn, Lsn)>,
    /// The fault in a sentence.
    pub detail: String,
    /// The remedy, in a sentence.
    pub advice: &'static str,
}

impl Finding {
    /// A fault of a file, without further facts.
    pub(crate) fn of_file(
        kind: FindingKind,
        severity: Severity,
        file: impl Into<String>,
        detail: impl Into<String>,
        advice: &'static str,
    ) -> Self {
        Self {
            file: Some(file.into()),
            ..Self::new(kind, severity, detail, advice)
        }
    }

    /// A fault without further facts.
    pub(crate) fn new(
        kind: FindingKind,
        severity: Severity,
        detail: impl Into<String>,
        advice: &'static str,
    ) -> Self {
        Self {
            kind,
            severity,
            file: None,
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

/// Remedies for faults.
pub(crate) mod advice {
    /// Records are gone.
    pub(crate) const LOST: &str = "everything else is served; put the file back from a restored backup, which loses nothing (`wald repair --help`), or accept the loss with `wald repair --accept-loss`";
    /// It is unknown which records are gone.
    pub(crate) const UNPROVEN: &str = "logs without later records refuse appends; restore from a backup, or accept the loss with `wald repair --accept-loss`";
    /// An operator accepted the loss.
    pub(crate) const ACCEPTED: &str = "nothing to do; readers are told of the gap";
    /// A second copy is gone.
    pub(crate) const COPY: &str =
        "nothing is lost; the device may be failing: look at its health, and keep a backup";
    /// A sector is bad.
    pub(crate) const DEVICE: &str =
        "the device is failing: take a backup, and move the store to another device";
    /// The file is rebuilt.
    pub(crate) const REMADE: &str = "nothing is lost; it is made anew from the segments when it is needed. The device may be failing: look at its health";
    /// Another copy repaired the damage.
    pub(crate) const TOLD: &str =
        "no record is lost; the device may be failing: look at its health, and keep a backup";
    /// The index may hold facts of a missing segment.
    pub(crate) const INDEX_ALONE: &str = "leave it there: it may tell what a missing segment held";
    /// The file is unknown to the store.
    pub(crate) const UNOWNED: &str = "it is never read; move it elsewhere";
    /// The file is removed automatically.
    pub(crate) const LEFTOVER: &str =
        "nothing to do; the next start or the next file of its kind takes it away";
}
