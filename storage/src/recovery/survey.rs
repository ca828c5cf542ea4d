//! A read-only preview of a start: the place and the end of every segment and, after reading all of them, the
//! logs with missing records.

use std::sync::Arc;

use super::files::UsedSegment;
use super::{FoundRun, Recovered, Trust};
use crate::api::error::OpenError;
use crate::base::clock::Clock;
use crate::base::ids::{Position, SegmentId};
use crate::base::metrics::NoObserver;
use crate::disk::Disk;
use crate::disk::directory::{LastBegun, StoreIdentity};
use crate::format::body::Link;
use crate::format::life::Life;
use crate::logs::Logs;
use crate::logs::damages::Damage;

/// Batches of producers are not needed here, but the minimum is one.
const PRODUCER_WINDOW: u64 = 1;

/// A segment with frames in it.
#[derive(Debug, Clone)]
pub(crate) struct Surveyed {
    pub(crate) life: Life,
    pub(crate) path: String,
    pub(crate) base: Position,
    /// End of its frames, as its successor records it. For the last segment, as a walk finds it.
    pub(crate) end: Position,
    /// Its link if that is good, or the part of it that the next group records.
    pub(crate) link: Option<Link>,
}

/// The files of a store.
pub(crate) struct Survey {
    /// Sorted runs, in order.
    pub(crate) runs: Vec<FoundRun>,
    /// Runs that cannot be used, and why.
    pub(crate) bad_runs: Vec<(SegmentId, String)>,
    /// Files that the next start removes.
    pub(crate) leftovers: Vec<String>,
    /// Segments with frames, in order.
    pub(crate) segments: Vec<Surveyed>,
    /// Whether the last one ends with a seal.
    pub(crate) is_sealed: bool,
    /// Bytes behind the end of the last one that were never proven flushed.
    pub(crate) torn_bytes: u64,
    /// Files in `journal/` without frames.
    pub(crate) ready: Vec<SegmentId>,
    /// The segment that the last start began.
    pub(crate) last_begun: Option<LastBegun>,
    /// The segment that the seal of the last one names, if its file is gone.
    pub(crate) missing: Option<SegmentId>,
}

/// Lost records and other losses of a store.
pub(crate) struct Account {
    /// Damage, each with its place in the journal.
    pub(crate) damages: Vec<Damage>,
    /// Losses other than records, in sentences.
    pub(crate) consequences: Vec<String>,
    /// Findings that a start would report.
    pub(crate) findings: Vec<String>,
    /// Whether some findings were accepted.
    accepted: bool,
    /// The existing logs.
    pub(crate) logs: Logs,
}

impl Account {
    /// Whether something is lost, and the loss of all of it was accepted.
    pub(crate) fn is_all_accepted(&self) -> bool {
        let any = self.accepted || self.damages.iter().any(|damage| damage.accepted);
        any && self.findings.is_empty() && self.damages.iter().all(|damage| damage.accepted)
    }
}

impl Survey {
    /// Whether a run replaces this segment.
    pub(crate) fn is_sorted(&self, id: SegmentId) -> bool {
        let heads = self.runs.iter().map(|found| &found.run.head);
        heads
            .into_iter()
            .any(|head| head.first <= id && id <= head.last)
    }
}

/// Finds the place of all files. Reads the start of each segment, and the whole last one.
pub(crate) fn survey(disk: &Arc<dyn Disk>, store: StoreIdentity) -> Result<Survey, OpenError> {
    let mut recovered = Recovered::new(disk, store, PRODUCER_WINDOW);
    let mut ids = recovered.list_files(&**disk)?;
    recovered.list_runs(&**disk, &mut ids)?;
    let begun = LastBegun::read(&**disk).map_err(OpenError::io("reading BEGUN"))?;
    recovered.last_begun = begun.good();
    let mut used = recovered.sort_files(&**disk, &ids)?;
    let tail = recovered.drop_unwritten(&**disk, &mut used)?;
    let tail = recovered.look_behind_seal(&**disk, &mut used, tail)?;
    let mut segments = Vec::with_capacity(used.len());
    for (index, segment) in used.iter().enumerate() {
        let end = match (used.get(index + 1), &tail) {
            (Some(next), _) => end_before(&**disk, segment, next)?,
            (None, Some(tail)) => tail.walked.end,
            (None, None) => segment.base,
        };
        segments.push(Surveyed {
            life: segment.life,
            path: segment.path.clone(),
            base: segment.base,
            end,
            link: segment.link.clone(),
        });
    }
    let limit = used
        .last()
        .map_or(Position::ZERO, |last| last.base.advance(last.life.size));
    if let (Some(last), Some(tail)) = (used.last(), &tail) {
        let seal = last.as_bytes(&tail.content).seal(&tail.walked);
        last.check(&tail.content)?;
        recovered.expected = seal.and_then(|seal| seal.successor);
    }
    let missing = recovered.missing_successor(limit);
    recovered.unused.sort_unstable();
    let leftovers = recovered.runs.leftovers();
    Ok(Survey {
        runs: recovered.runs.found,
        bad_runs: recovered.runs.bad,
        leftovers,
        segments,
        is_sealed: tail.as_ref().is_some_and(|tail| tail.walked.is_sealed()),
        torn_bytes: tail.map_or(0, |tail| tail.walked.torn),
        ready: recovered.unused,
        last_begun: recovered.last_begun,
        missing,
    })
}

/// The end of a segment that has a successor.
fn end_before(
    disk: &dyn Disk,
    segment: &UsedSegment,
    next: &UsedSegment,
) -> Result<Position, OpenError> {
    let told = next
        .link
        .as_ref()
        .filter(|link| link.predecessor == Some(segment.life.id));
    if let Some(link) = told {
        return Ok(link.predecessor_end);
    }
    let content = segment.content(disk)?;
    let walked = segment.as_bytes(&content).walk_last();
    segment.check(&content)?;
    Ok(walked.end)
}

/// Reads all segments like a start without checkpoint and indexes, and returns the missing records. One segment
/// at a time is in memory.
pub(crate) fn account(
    disk: &Arc<dyn Disk>,
    store: StoreIdentity,
    clock: &dyn Clock,
) -> Result<Account, OpenError> {
    let mut recovered = Recovered::new(disk, store, PRODUCER_WINDOW);
    recovered.only_looks = true;
    let recovered = recovered.read_wholly(&**disk, (clock, &NoObserver), Trust::Frames)?;
    let mut consequences = Vec::new();
    let sorted_end = recovered.runs.end();
    let finished = recovered.drafts.finish(sorted_end, &mut consequences);
    Ok(Account {
        damages: finished.damages,
        consequences,
        findings: recovered.findings,
        accepted: !recovered.accepted.is_empty(),
        logs: finished.logs,
    })
}
