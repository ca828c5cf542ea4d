//! Choice of the sorter's next step.
//!
//! Beyond the live bytes, a store takes at most this space of the disk for sorting:
//!
//! | use | bound |
//! |---|---|
//! | segments that wait | 1/8 of the step, and the bytes that arrive while such a part is sorted |
//! | the run that is made of them | 1/8 of the step |
//! | dead bytes in runs | 1/8 of the live bytes, and the bytes that die until the next check |
//! | a run that is made of others | 1/4 of the step, or 1/10 of the live bytes |
//! | the same, where descriptions of logs take more than 1/4 of the live bytes | 1 GiB, or all runs |
//! | one that forgets many deleted logs | 1/2 of the step, or 1/10 of the live bytes |
//! | any run | 1/10 of the volume, and the free space of the moment |
//!
//! Neighbouring runs become one if none of them is much larger than the rest. A byte is rewritten only when its
//! run becomes nearly twice as large at least. A single run is rewritten when most of it is dead. If all runs
//! together have more dead bytes than the bound, the run with the largest dead part is rewritten. The oldest
//! runs, up to one that saw many deletions, become one when their descriptions of deleted logs take much space.
//!
//! **A full disk gives space back as long as more than a segment is dead.** The pool keeps enough space free to
//! rewrite any run (`room.rs`). At least half of the dead bytes lie in segments, or in runs:
//!
//! - Segments are sorted oldest first, as many as fit, including segments without dead bytes before the dead
//!   ones. Each step turns at least one segment into a run of about its size.
//! - The run that gives back most for its bytes is rewritten. Wholly dead runs come first: they leave only
//!   images. A run with dead bytes is always found, and each step leaves fewer.
//! - The newest finished segment is left for backups. If much of it is dead, the journal leaves its current
//!   segment for one of the reserve, so that another one is the newest finished segment.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use super::build::{SortSource, StateAfterLoss, fate};
use super::sort::CheckBasis;
use super::sort::Sorter;
use crate::api::config::MIN_SEGMENT_BYTES;
use crate::api::config::{LARGEST_RUN, MOST_SOURCES};
use crate::base::ids::{LogId, Lsn, RecoveryEpoch, SegmentId};
use crate::base::sync::atomic::Ordering;
use crate::format::body::{AcceptedLosses, Link};
use crate::format::frame;
use crate::format::frame::{FrameKind, HEADER_BYTES};
use crate::format::run_head::RunHead;
use crate::index::checkpoint;
use crate::index::{Row, SealedIndex};
use crate::journal::run::Run;
use crate::journal::segment::Segment;
use crate::journal::volume::bytes_of_run;
use crate::read::held_back::UnusablePart;
use crate::recovery;
use crate::upkeep::indexer::Wanted;

/// Runs are rewritten when their dead bytes exceed this part of the live bytes (1/8).
const DEAD_PART: u64 = 8;

/// A run is cheap to rewrite when at most this part of it is live (1/8).
const MOSTLY_DEAD_PART: u64 = 8;

/// Shortly before the disk is full, a run is rewritten if this part of it is dead (1/16).
const SOME_DEAD_PART: u64 = 16;

/// The oldest runs are rewritten when their descriptions of deleted logs exceed this part of their live bytes
/// (1/8): every start reads all of these descriptions.
const FORGOTTEN_PART: u64 = 8;

/// Larger runs are worth it when descriptions of logs exceed this part of the live bytes (1/4).
const OF_LOGS_PART: u64 = 4;

/// A piece takes at least 5 bytes in the order of a run, and grows by less than 60 when it is encrypted.
const SEALED_GROWTH: u64 = 12;

/// The largest range of lsns of one log that a run may hold: its index counts lsns in 32 bits.
const MOST_LSNS: u64 = u32::MAX as u64;

/// Maximum number of pieces of a run, and maximum bytes of its order frames. Making a run takes 24 bytes of
/// memory for each piece, and a piece takes about 11 bytes in the order. Without this bound small records in a
/// long history would take gigabytes.
const MOST_PIECES: u64 = 8 << 20;
const MOST_ORDER_BYTES: u64 = 11 * MOST_PIECES;

/// Whether a run of several segments would exceed a bound: the segments may be large.
fn is_too_large(records: u64, pieces: u64, live_bytes: u64) -> bool {
    records > MOST_LSNS || pieces > MOST_PIECES || live_bytes > LARGEST_RUN
}

/// The largest range of lsns of one log in a segment or run. A log without kept records has an empty row.
fn lsns(index: &SealedIndex) -> u64 {
    let lsns = index.rows().map(|row| row.next_lsn.since(row.first_lsn));
    lsns.max().unwrap_or(0)
}

/// Runs that together are no larger than this become one, whatever the size of each (bytes).
const SMALL: u64 = 1 << 20;

/// The sources and the head of the next run.
pub(super) struct SortTask {
    pub(super) sources: Vec<SortSource>,
    pub(super) head: RunHead,
    /// Number of runs before it.
    pub(super) earlier: usize,
    /// Number of runs that it replaces.
    pub(super) replaced: usize,
    /// The last segment that earlier runs replace.
    after: Option<SegmentId>,
    /// Maximum bytes of the run and its index.
    pub(super) bytes: u64,
    /// Whether the run is made to encrypt its records with the newest keys.
    pub(super) renews: bool,
    /// Links behind missing segments: the number of the source, and its own link. `None` if the link is damaged.
    gaps: Vec<(usize, Option<Link>)>,
}

impl SortTask {
    /// Whether a segment is missing that the run will replace.
    fn lacks(&self, id: SegmentId) -> bool {
        let mut sources = self.sources.iter();
        Some(id) > self.after && id < self.head.last && !sources.any(|s| s.segment.life.id == id)
    }

    /// State of the logs at the end of missing segments. Once the links are gone, no other file records it.
    pub(super) fn gone(&self, sorter: &Sorter) -> BTreeMap<LogId, StateAfterLoss> {
        let mut gone = BTreeMap::new();
        if let Some((last, _)) = self.gaps.last() {
            // The start also read the indexes of missing segments, and checkpoints.
            for log in sorter.logs.all_known() {
                let state = log.state.read();
                let touched_in = state.touched_in.get().filter(|id| self.lacks(*id));
                let limit = self.head.limit;
                let stood = touched_in
                    .and_then(|segment| StateAfterLoss::of((&log, &state), segment, *last, limit));
                gone.extend(stood.map(|stood| (log.id, stood)));
            }
        }
        for (number, link) in &self.gaps {
            let Some(link) = link else {
                continue;
            };
            let Some(segment) = link.predecessor else {
                continue;
            };
            for closing in link.closings.iter().flatten() {
                let of_log = StateAfterLoss {
                    closing: closing.clone(),
                    segment,
                    end: link.predecessor_end,
                    before: *number,
                    newest: None,
                };
                gone.entry(closing.log_id).or_insert(of_log);
            }
        }
        gone
    }
}

/// The kind of sources of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunSources {
    Segments,
    Runs,
}

/// Whether segments were sorted lately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activity {
    Busy,
    /// No segments were sorted for a while. A run may be rewritten for less.
    AtRest,
}

/// Sizes and content of a run.
#[derive(Debug, Clone, Copy)]
struct RunSizes {
    /// Bytes of packs with records that are kept.
    live: u64,
    /// The remaining bytes of its packs, and images of logs that were deleted long ago.
    dead: u64,
    /// Bytes of a new run made of this run alone.
    left: u64,
    /// Bytes that the run adds to a new run made of it and others. That run has images of deleted logs once, or
    /// not at all.
    merged: u64,
    /// Bytes that describe deleted logs, in images and in the index.
    told: u64,
    /// Bytes that describe its logs, including its index.
    of_logs: u64,
    /// The largest range of lsns of one log.
    lsns: u64,
    /// Whether most of its logs are deleted, in this run or later.
    mostly_gone: bool,
    /// Bytes of packs.
    packs: u64,
    /// Bytes of its order frames.
    order: u64,
}

impl RunSizes {
    /// Bytes of a new run made of this run alone, and of its index, while this run still exists.
    fn bytes_again(&self) -> u64 {
        bytes_of_run(self.live, self.left.saturating_sub(self.live))
    }
}

/// Bounds of a run that is made of other runs.
#[derive(Debug, Clone, Copy)]
struct MergeBounds {
    /// Bytes of the run.
    most: u64,
    /// Bytes of the run and its index that the volume has room for.
    room: u64,
    /// Bytes of packs of its sources. An archive may get all of them in one file.
    archived: u64,
}

impl MergeBounds {
    /// Whether one run may be made of all of these.
    fn allow(&self, sources: &[RunSizes]) -> bool {
        let sum = |of: fn(&RunSizes) -> u64| sources.iter().map(of).sum::<u64>();
        sources.len() as u64 <= MOST_SOURCES
            && sum(|share| share.merged) <= self.most
            && sum(|share| share.lsns) <= MOST_LSNS
            && (sources.len() == 1 || sum(|share| share.order) <= MOST_ORDER_BYTES)
            && sum(RunSizes::bytes_again) <= self.room
            && (sources.len() == 1 || sum(|share| share.packs) <= self.archived)
    }
}

impl Sorter {
    /// The sealed segments that may be sorted, oldest first, and the segment behind them.
    fn unsorted(&self) -> (Vec<Arc<Segment>>, Option<Arc<Segment>>) {
        let current = self.journal.current().base;
        let segments = self.journal.segments.read();
        let mut sealed: Vec<Arc<Segment>> = segments
            .range(..current)
            .map(|(_, segment)| Arc::clone(segment))
            .collect();
        // The newest is left: a backup ends with a segment. So are those that the replica has no file of.
        let mut newest = sealed.pop();
        let held = sealed
            .iter()
            .position(|segment| !self.journal.is_released(segment));
        if let Some(first) = held {
            newest = sealed.drain(first..).next();
        }
        (sealed, newest)
    }

    /// Bytes of segments that may be sorted, in units of one sorting step. Counting stops at two units: callers
    /// ask often, and there may be many small segments.
    pub(super) fn backlog(&self) -> u64 {
        let part = self.sorter_part();
        let current = self.journal.current().base;
        let segments = self.journal.segments.read();
        let mut bytes = 0;
        for (_, segment) in segments.range(..current).rev().skip(1) {
            bytes += segment.file_bytes();
            if bytes >= 2 * part {
                break;
            }
        }
        bytes / part
    }

    /// Whether deleted logs must be forgotten, however little there is to sort.
    pub(super) fn is_crowded(&self) -> bool {
        (self.config.bounds()).is_crowded(&self.logs.holdings()) && !self.is_in_doubt()
    }

    /// Whether the segment with the newest deletion is still written, or is the newest finished segment, which
    /// stays unsorted.
    pub(super) fn must_leave(&self) -> bool {
        let (_, newest) = self.unsorted();
        let last = self.logs.last_deletion();
        last.is_some_and(|last| newest.is_none_or(|newest| last > newest.base))
    }

    /// The oldest unsorted segments, if they are enough to be worth a step. If deleted logs must be forgotten,
    /// any number is enough. On a full disk it takes as many as fit the free space, if enough is dead in them
    /// or in later segments.
    pub(super) fn next_segments(
        &self,
        runs: &[Arc<Run>],
        load: Activity,
    ) -> io::Result<Option<SortTask>> {
        let short = self.pool.is_short();
        let crowded = self.is_crowded();
        let most = self.sorter_part();
        let step = if short || crowded { 1 } else { most };
        let (sealed, newest) = self.unsorted();
        let bytes: u64 = sealed.iter().map(|segment| segment.file_bytes()).sum();
        if bytes < step || sealed.is_empty() || self.is_in_doubt() {
            return Ok(None);
        }
        // Nothing is sorted while the current segment lacks the mark of runs: an older version would take the
        // segments without it for the whole store.
        if self.journal.current().life.id < self.pool.mark() {
            return Ok(None);
        }
        let mut covered = self.indexing.covered();
        let enough = |covered: Option<SegmentId>| {
            let below = |segment: &&Arc<Segment>| Some(segment.life.id) <= covered;
            let bytes = sealed.iter().take_while(below).map(|s| s.file_bytes());
            bytes.sum::<u64>() >= step
        };
        let all = sealed.last().map(|segment| segment.life.id);
        if !enough(covered) || (short && covered < all) {
            let wanted = match load {
                Activity::Busy if !crowded && !short => Wanted::ForBackup,
                Activity::Busy | Activity::AtRest => Wanted::AtRest,
            };
            self.indexer.work(wanted);
            covered = self.indexing.covered();
        }
        if !enough(covered) {
            return Ok(None);
        }
        let room = self.room_without_growth(self.room_for_run(short));
        let standing = CheckBasis {
            settled: self.journal.settled(),
            covered,
            room: room / self.config.segment_bytes,
        };
        if short && *self.idle_at.lock() == Some(standing) {
            return Ok(None);
        }
        let mut sources = Vec::new();
        let (mut bytes, mut live, mut images, mut dead) = (0, 0, 0, 0);
        let (mut records, mut pieces) = (0, 0);
        let mut successor = None;
        for segment in sealed.iter().map(Arc::clone) {
            if Some(segment.life.id) > covered {
                successor.get_or_insert(segment);
                break;
            }
            let full = bytes >= most || sources.len() as u64 >= MOST_SOURCES;
            // On a full disk it matters whether enough is dead behind those that fit.
            if full || successor.is_some() {
                successor.get_or_insert(Arc::clone(&segment));
                if !short || dead >= self.worth_when_short() {
                    break;
                }
            }
            let Some(index) = self.sound_index(&segment)? else {
                // The segments before it can be sorted.
                successor.get_or_insert(segment);
                break;
            };
            let of_logs = index.file_bytes();
            let kept = self.live_bytes(&index);
            records += lsns(&index);
            pieces += index.entries_len() as u64;
            index.check_reads()?;
            dead += segment.file_bytes().saturating_sub(kept + of_logs);
            if successor.is_some() {
                continue;
            }
            if is_too_large(records, pieces, live + kept) && !sources.is_empty() {
                successor = Some(segment);
                continue;
            }
            // The index also describes places, and few of those are left.
            if bytes_of_run(live + kept, (images + of_logs) / 2) > room {
                successor = Some(segment);
                continue;
            }
            live += kept;
            images += of_logs;
            bytes += segment.file_bytes();
            sources.push(SortSource { segment, index });
        }
        let worth = !short || dead >= self.worth_when_short();
        if short && (sources.is_empty() || !worth) {
            *self.idle_at.lock() = Some(standing);
        }
        if sources.is_empty() || !worth {
            return Ok(None);
        }
        let mut behind = sealed.into_iter().skip(sources.len()).chain(newest);
        let Some(mut successor) = behind.next() else {
            return Ok(None);
        };
        let head = loop {
            if let Some(head) = self.head_of(&sources, &successor, runs)? {
                break head;
            }
            // A link is damaged, or a segment missing: the run ends behind it.
            let Some(next) = behind.next() else {
                return Ok(None);
            };
            if Some(successor.life.id) > covered {
                self.indexer.work(Wanted::AtRest);
                covered = self.indexing.covered();
            }
            if Some(successor.life.id) > covered {
                return Ok(None);
            }
            let Some(index) = self.sound_index(&successor)? else {
                return Ok(None);
            };
            live += self.live_bytes(&index);
            images += index.file_bytes();
            records += lsns(&index);
            pieces += index.entries_len() as u64;
            index.check_reads()?;
            if is_too_large(records, pieces, live) || bytes_of_run(live, images / 2) > room {
                self.unusable.stop_at(
                    successor.life.id,
                    UnusablePart::Link,
                    format!(
                        "the first frame of {} is damaged, and a run that ends behind it would be too large; \
                         make space, or delete logs",
                        successor.path()
                    ),
                );
                return Ok(None);
            }
            let segment = std::mem::replace(&mut successor, next);
            sources.push(SortSource { segment, index });
        };
        let gaps = self.gaps_between(&sources, runs)?;
        Ok(Some(SortTask {
            renews: false,
            sources,
            after: runs.last().map(|run| run.head.last),
            head,
            earlier: runs.len(),
            replaced: 0,
            bytes: bytes_of_run(live, images / 2),
            gaps,
        }))
    }

    /// Links of the sources behind a missing segment, each with the number of its source.
    fn gaps_between(
        &self,
        sources: &[SortSource],
        runs: &[Arc<Run>],
    ) -> io::Result<Vec<(usize, Option<Link>)>> {
        let mut before = runs.last().map_or(0, |run| run.head.last.get());
        let mut gaps = Vec::new();
        for (number, SortSource { segment, .. }) in sources.iter().enumerate() {
            let first = segment.first();
            let head = self.read_link(segment, HEADER_BYTES as u64)?;
            let header = frame::decode_header(&head, segment.life.salt);
            let follows = header.is_some_and(|header| {
                let whole = header.kind == FrameKind::Link && header.position == first;
                whole && header.log_id.get() == before
            });
            if !follows {
                let link = self.link_of(segment)?;
                gaps.push((number, link.map(|(_, link)| link)));
            }
            before = segment.life.id.get();
        }
        Ok(gaps)
    }

    /// Whether the newest finished segment has enough dead bytes to be worth a segment of the reserve. Its run
    /// must also fit the free space without that segment. Only frames count: a segment that was left early must
    /// not lead to the next one.
    pub(super) fn hides_dead(&self) -> io::Result<bool> {
        let (_, Some(newest)) = self.unsorted() else {
            return Ok(false);
        };
        if self.is_in_doubt() {
            return Ok(false);
        }
        let Some(index) = self.sound_index(&newest)? else {
            return Ok(false);
        };
        let frames = index.end.since(newest.first());
        let (live, of_logs) = (self.live_bytes(&index), index.file_bytes());
        index.check_reads()?;
        let room = self.pool.room_for_sorting();
        let room = room.map_or(self.config.segment_bytes, |free| {
            free.saturating_sub(MIN_SEGMENT_BYTES)
        });
        let fits = bytes_of_run(live, of_logs / 2) <= room;
        Ok(fits && frames.saturating_sub(live + of_logs) >= self.worth_when_short())
    }

    /// Dead bytes in segments, or in runs, that are worth a step on a full disk.
    fn worth_when_short(&self) -> u64 {
        self.config.segment_bytes / 4
    }

    /// The head of the run of these segments. `None` if their links do not describe it.
    fn head_of(
        &self,
        sources: &[SortSource],
        successor: &Arc<Segment>,
        runs: &[Arc<Run>],
    ) -> io::Result<Option<RunHead>> {
        let (Some(first), Some(last)) = (sources.first(), sources.last()) else {
            return Ok(None);
        };
        let (Some((_, own)), Some((header, link))) =
            (self.link_of(&last.segment)?, self.link_of(successor)?)
        else {
            return Ok(None);
        };
        let before = runs.last().map(|run| &run.head);
        let told = link.predecessor == Some(last.segment.life.id)
            && link.predecessor_end == last.index.end
            && link.predecessor_chain == last.index.chain;
        if !told {
            return Ok(None);
        }
        let since = before.map_or(RecoveryEpoch::new(0), |head| head.epoch);
        let ended =
            |(epoch, _): &&(RecoveryEpoch, _)| *epoch >= since && *epoch < own.recovery_epoch;
        Ok(Some(RunHead {
            first: first.segment.life.id,
            before_first: before.map(|head| head.last),
            first_base: before.map_or(first.segment.base, |head| head.limit),
            last: last.segment.life.id,
            before_last: link.second,
            end: last.index.end,
            limit: last.segment.limit(),
            chain: last.index.chain,
            next_log_counter: match link.recovery_epoch == own.recovery_epoch {
                true => link.next_log_counter,
                false => 1,
            },
            // Arrival of a later frame. The writer adds the pieces, which may have arrived later.
            arrival: header.arrival,
            epoch: own.recovery_epoch,
            history: self.history.iter().filter(ended).copied().collect(),
            accepted: self.accepted_in(sources),
            ..RunHead::empty()
        }))
    }

    /// Accepted losses that the links of these segments list, as far as they may still matter.
    fn accepted_in(&self, sources: &[SortSource]) -> Vec<AcceptedLosses> {
        let of_source = |before| sources.iter().any(|source| source.segment.base == before);
        let accepted = self.damages.accepted().iter();
        let accepted = accepted.filter(|accepted| of_source(accepted.before));
        accepted
            .map(|accepted| self.still_matters(accepted))
            .collect()
    }

    /// An acceptance, reduced to the records that some log still misses, and to lost names.
    fn still_matters(&self, accepted: &AcceptedLosses) -> AcceptedLosses {
        let missed = |(log, from, to): &&(LogId, Lsn, Lsn)| {
            let log = self.logs.by_id(*log);
            log.is_none_or(|log| {
                let state = log.state.read();
                let is_name = from == to;
                !state.deleted && (is_name || *to > state.first(self.journal.settled()))
            })
        };
        AcceptedLosses {
            lost: accepted.lost.iter().filter(missed).copied().collect(),
            ..accepted.clone()
        }
    }

    /// The next runs that are worth rewriting.
    pub(super) fn next_runs(
        &self,
        runs: &[Arc<Run>],
        load: Activity,
    ) -> io::Result<Option<SortTask>> {
        if self.is_in_doubt() {
            return Ok(None);
        }
        let mut shares = Vec::with_capacity(runs.len());
        // Number of oldest runs whose descriptions of deleted logs may be dropped.
        let mut forgets = 0;
        for (at, run) in (1..).zip(runs) {
            let Some(index) = self.sound_index(&run.segment)? else {
                return Ok(None);
            };
            let mut share = self.share(run, &index);
            if at == 1 || share.mostly_gone {
                let count = self.forgettable(&index)?;
                if count > index.len() / 2 {
                    forgets = at;
                }
                if at == 1 {
                    let forgotten = part_of(run.image_bytes(), count, index.len());
                    share.dead += forgotten;
                    share.left -= forgotten.min(share.left);
                    share.merged = share.merged.min(share.left);
                }
            }
            index.check_reads()?;
            shares.push(share);
        }
        let live = shares.iter().map(|share| share.live).sum();
        let dead: u64 = shares.iter().map(|share| share.dead).sum();
        let of_logs: u64 = shares.iter().map(|share| share.of_logs).sum();
        let logs_dominate = of_logs > live / OF_LOGS_PART;
        self.live.store(live, Ordering::Relaxed);
        self.dead.store(dead, Ordering::Relaxed);
        let short = self.pool.is_short();
        let room = self.room_for_run(short);
        if short {
            if dead < self.worth_when_short() {
                return Ok(None);
            }
            return match worst(&shares, room, DeadPart::Anything) {
                Some(at) => self.task_of_runs(runs, at, &shares[at..=at]),
                None => {
                    self.warn_of_stuck(&shares, dead, room);
                    Ok(None)
                }
            };
        }
        // A damaged run becomes a whole one that lists the lost records.
        let damaged = |at: &usize| !runs[*at].segment.holes.read().is_empty();
        let fits = |at: &usize| shares[*at].bytes_again() <= room;
        if let Some(at) = (0..runs.len()).find(|at| damaged(at) && fits(at)) {
            return self.task_of_runs(runs, at, &shares[at..=at]);
        }
        let largest = self.largest_run.load(Ordering::Relaxed);
        let merges = self.room_without_growth(room);
        let bounds = |most: u64| MergeBounds {
            most: most.min(largest),
            room: merges,
            archived: match self.archive {
                Some(_) => LARGEST_RUN,
                None => u64::MAX,
            },
        };
        let forgetting = bounds(self.config.sorter_forgetting_run(live));
        if is_worth_forgetting(&shares[..forgets], forgetting) {
            return self.task_of_runs(runs, 0, &shares[..forgets]);
        }
        // Before the disk is full, a smaller gain is worth it. Appends then need not wait for space.
        let soon_full = dead > self.config.segment_bytes && self.pool.is_nearly_short();
        let least = match (dead > live / DEAD_PART, soon_full) {
            (true, _) => DeadPart::Anything,
            (false, true) => DeadPart::Some,
            (false, false) => DeadPart::Most,
        };
        if let Some(at) = worst(&shares, room, least) {
            return self.task_of_runs(runs, at, &shares[at..=at]);
        }
        // Three runs of similar size, or two, or two where one is much larger.
        let fifths = match load {
            Activity::Busy => 2,
            Activity::AtRest if logs_dominate => 4,
            Activity::AtRest => 3,
        };
        let described = if logs_dominate { live + of_logs } else { 0 };
        let merging = bounds(self.config.sorter_run(live, described));
        if let Some((at, count)) = alike(&shares, merging, fifths) {
            return self.task_of_runs(runs, at, &shares[at..at + count]);
        }
        // Last, records that are not under the newest keys: a damaged or dead run above gets them anyway.
        let grows = |at: usize| shares[at].order * SEALED_GROWTH;
        let renewable = |at: &usize| {
            shares[*at].bytes_again() + grows(*at) <= merges
                && shares[*at].packs + grows(*at) <= LARGEST_RUN
                && self.may_renew(&runs[*at])
        };
        let Some(at) = (0..runs.len()).find(renewable) else {
            return Ok(None);
        };
        let task = self.task_of_runs(runs, at, &shares[at..=at])?;
        Ok(task.map(|task| SortTask {
            bytes: task.bytes + grows(at),
            renews: true,
            ..task
        }))
    }

    /// Whether a run has records that are not under the newest keys, and was not made to renew them: records whose
    /// key is missing stay as they are.
    fn may_renew(&self, run: &Run) -> bool {
        let Some((floor, _)) = self.config.cipher.as_ref().map(|cipher| cipher.renewed()) else {
            return false;
        };
        let (at, renewed) = &*self.renewed.lock();
        run.has_keys_below(floor) && !(*at == floor && renewed.contains(&run.id()))
    }

    /// Warns once that a full disk needs help: nothing of the dead bytes can be given back.
    fn warn_of_stuck(&self, shares: &[RunSizes], dead: u64, room: u64) {
        let with_dead = shares.iter().filter(|share| share.dead > 0);
        let Some(least) = with_dead.map(RunSizes::bytes_again).min() else {
            return;
        };
        if !self.is_stuck.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                dead_bytes = dead,
                free_bytes = room,
                needed_bytes = least,
                "the disk is full, and no sorted run fits the free space; free needed_bytes on the volume, then dead_bytes come back"
            );
        }
    }

    fn share(&self, run: &Run, index: &SealedIndex) -> RunSizes {
        let packs = run.head.pack_bytes;
        let (live, gone) = self.live_and_gone(index);
        let live = (live + run.straddling).min(packs);
        let images = run.image_bytes();
        let told = part_of(images, gone, index.len());
        RunSizes {
            live,
            dead: packs - live,
            left: images + live,
            merged: images - images.min(told) + live,
            told: told + part_of(index.file_bytes(), gone, index.len()),
            of_logs: images + index.file_bytes(),
            lsns: lsns(index),
            mostly_gone: gone > index.len() / 2,
            packs,
            order: run.head.order_bytes(),
        }
    }

    /// Number of images of deleted logs that no reader needs any more, if no older run has them.
    fn forgettable(&self, index: &SealedIndex) -> io::Result<usize> {
        let known_deleted = checkpoint::list(&*self.disk)?.first().copied();
        let forgettable = |row: &Row| {
            let image = || index.image(row);
            let gone = self.logs.by_id(row.log_id).is_none();
            gone && image().is_some_and(|image| image.deleted && image.touched_in <= known_deleted)
        };
        Ok(index.rows().filter(forgettable).count())
    }

    /// Bytes of packs with kept records. A pack that also has other records counts in part.
    pub(crate) fn live_bytes(&self, index: &SealedIndex) -> u64 {
        self.live_and_gone(index).0
    }

    /// The result of [`Sorter::live_bytes`], and the number of deleted logs.
    fn live_and_gone(&self, index: &SealedIndex) -> (u64, usize) {
        let (mut live, mut of_gone) = (0, 0);
        for row in index.rows() {
            let log = self.logs.by_id(row.log_id);
            let (gone, kept) = fate(self, log.as_deref());
            if gone {
                of_gone += 1;
                continue;
            }
            let entries = index.entries(&row);
            let from = entries.partition_point(|place| place.next_lsn() <= kept.first);
            for place in entries.from(from) {
                let bytes = u64::from(place.frame_len);
                let dead = kept.first.since(place.first_lsn.min(kept.first));
                // A rebuilt index may hold any numbers.
                let dead = bytes.saturating_mul(dead) / u64::from(place.count.max(1));
                live += bytes.saturating_sub(dead);
            }
        }
        (live, of_gone)
    }

    fn task_of_runs(
        &self,
        runs: &[Arc<Run>],
        at: usize,
        shares: &[RunSizes],
    ) -> io::Result<Option<SortTask>> {
        let count = shares.len();
        let chosen = &runs[at..at + count];
        let (Some(first), Some(last)) = (chosen.first(), chosen.last()) else {
            return Ok(None);
        };
        let mut sources = Vec::with_capacity(count);
        for run in chosen {
            let Some(index) = self.sound_index(&run.segment)? else {
                return Ok(None);
            };
            let segment = Arc::clone(&run.segment);
            sources.push(SortSource { segment, index });
        }
        let history = chosen.iter().flat_map(|run| run.head.history.clone());
        let mut history: Vec<_> = history.collect();
        recovery::bound_ends(&mut history);
        let accepted = chosen.iter().flat_map(|run| &run.head.accepted);
        let head = RunHead {
            first: first.head.first,
            before_first: first.head.before_first,
            first_base: first.head.first_base,
            history,
            order: Vec::new(),
            forgotten: chosen.iter().filter_map(|run| run.head.forgotten).max(),
            accepted: accepted.map(|a| self.still_matters(a)).collect(),
            ..last.head.clone()
        };
        Ok(Some(SortTask {
            sources,
            head,
            renews: false,
            after: None,
            earlier: at,
            replaced: count,
            bytes: shares.iter().map(RunSizes::bytes_again).sum(),
            gaps: Vec::new(),
        }))
    }
}

/// About the bytes that `count` of `all` entries take.
fn part_of(bytes: u64, count: usize, all: usize) -> u64 {
    bytes / (all as u64).max(1) * count as u64
}

/// The run that gives back most for its bytes, if it fits the room when it is rewritten and is worth it.
fn worst(shares: &[RunSizes], room: u64, least: DeadPart) -> Option<usize> {
    let (at, _) = (0..)
        .zip(shares)
        .filter(|(_, share)| share.dead > 0 && share.bytes_again() <= room)
        .filter(|(_, share)| least.allows(share))
        .max_by_key(|(_, share)| {
            u128::from(share.dead) * 1_000_000 / u128::from(share.live + share.dead)
        })?;
    Some(at)
}

/// The dead part that a run must have before it is rewritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DeadPart {
    Anything,
    /// At least one part in [`SOME_DEAD_PART`].
    Some,
    /// All but one part in [`MOSTLY_DEAD_PART`].
    Most,
}

impl DeadPart {
    fn allows(self, share: &RunSizes) -> bool {
        let all = share.live + share.dead;
        match self {
            Self::Anything => true,
            Self::Some => share.dead >= all / SOME_DEAD_PART,
            Self::Most => share.live <= all / MOSTLY_DEAD_PART,
        }
    }
}

/// Whether the oldest runs must become one run within the bounds, because their descriptions of deleted logs
/// take much space.
fn is_worth_forgetting(oldest: &[RunSizes], bounds: MergeBounds) -> bool {
    let sum = |of: fn(&RunSizes) -> u64| oldest.iter().map(of).sum::<u64>();
    sum(|share| share.told) > sum(|share| share.live) / FORGOTTEN_PART && bounds.allow(oldest)
}

/// The largest number of neighbouring runs that fit one run. None is larger than `fifths` / 5 of their sum.
/// Returns the index of the first, and their number.
fn alike(shares: &[RunSizes], bounds: MergeBounds, fifths: u64) -> Option<(usize, usize)> {
    let largest_part = |sum: u64| sum / 5 * fifths;
    let mut best = None;
    for from in 0..shares.len() {
        let (mut sum, mut largest) = (0, 0);
        for (count, share) in (1..).zip(&shares[from..]) {
            sum += share.merged;
            largest = largest.max(share.merged);
            if !bounds.allow(&shares[from..from + count]) {
                break;
            }
            let worth = largest <= largest_part(sum) || sum <= SMALL;
            if count > 1 && worth && best.is_none_or(|(_, found)| count > found) {
                best = Some((from, count));
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const UNBOUNDED: MergeBounds = MergeBounds {
        most: u64::MAX,
        room: u64::MAX,
        archived: u64::MAX,
    };

    /// A run with live and dead MiB.
    fn share(live: u64, dead: u64) -> RunSizes {
        RunSizes {
            live: live * MIB,
            dead: dead * MIB,
            left: live * MIB + 1000,
            merged: live * MIB + 1000,
            told: 0,
            of_logs: 0,
            lsns: 0,
            mostly_gone: live == 0,
            packs: (live + dead) * MIB,
            order: 0,
        }
    }

    #[test]
    fn segments_of_several_gib_are_not_put_together() {
        let gib = 1 << 30;
        assert!(!is_too_large(0, 0, 2 * gib));
        // The offsets in a file of 4 GiB no longer have 32 bits.
        assert!(is_too_large(0, 0, 2 * gib + 2 * gib));
        assert!(is_too_large(MOST_LSNS + 1, 0, 0) && is_too_large(0, MOST_PIECES + 1, 0));
    }

    #[test]
    fn run_that_fits_is_chosen_though_a_deader_one_does_not() {
        let shares = [share(100, 400), share(40, 2), share(0, 10), share(30, 9)];
        let worst = |room: u64| worst(&shares, room * MIB, DeadPart::Anything);
        assert_eq!(worst(1000), Some(2), "a wholly dead one comes first");
        let shares = [share(100, 400), share(40, 2), share(30, 0), share(30, 9)];
        let worst = |room: u64| super::worst(&shares, room * MIB, DeadPart::Anything);
        assert_eq!(worst(1000), Some(0));
        assert_eq!(worst(60), Some(3));
        assert_eq!(worst(20), None);
        assert_eq!(super::worst(&shares, 60 * MIB, DeadPart::Some), Some(3));
        assert_eq!(super::worst(&shares, 60 * MIB, DeadPart::Most), None);
    }

    #[test]
    fn merge_takes_no_more_than_volume_and_archive_have_room_for() {
        let shares = vec![share(10, 90); 40];
        let count = |bounds| alike(&shares, bounds, 3).map(|(_, count)| count);
        assert_eq!(count(UNBOUNDED), Some(40));
        let room = MergeBounds {
            room: 105 * MIB,
            ..UNBOUNDED
        };
        assert_eq!(count(room), Some(10));
        let archived = MergeBounds {
            archived: 3000 * MIB,
            ..UNBOUNDED
        };
        assert_eq!(count(archived), Some(30));
        assert_eq!(
            count(MergeBounds {
                most: 15 * MIB,
                ..UNBOUNDED
            }),
            None
        );
        let many = vec![share(1, 0); 1000];
        let (_, count) = alike(&many, UNBOUNDED, 3).unwrap();
        assert_eq!(count as u64, MOST_SOURCES);
    }

    #[test]
    fn runs_become_one_only_while_its_index_can_count_their_lsns() {
        let chosen = |lsns: [u64; 4]| {
            let shares = lsns.map(|lsns| RunSizes {
                lsns,
                ..share(10, 0)
            });
            alike(&shares, UNBOUNDED, 3)
        };
        assert_eq!(chosen([1; 4]), Some((0, 4)));
        assert_eq!(chosen([1 << 31, 1 << 30, 1 << 31, 1 << 30]), Some((0, 2)));
        assert_eq!(chosen([MOST_LSNS, 1, MOST_LSNS, 1]), None);
        assert_eq!(chosen([MOST_LSNS - 1, 1, MOST_LSNS, 1]), Some((0, 2)));
    }

    #[test]
    fn runs_become_one_only_while_the_order_of_their_pieces_fits_memory() {
        let chosen = |order: [u64; 4]| {
            let shares = order.map(|order| RunSizes {
                order,
                ..share(10, 0)
            });
            alike(&shares, UNBOUNDED, 3)
        };
        let half = MOST_ORDER_BYTES / 2;
        assert_eq!(chosen([half / 2; 4]), Some((0, 4)));
        assert_eq!(chosen([half; 4]), Some((0, 2)));
        assert_eq!(chosen([half + 1; 4]), None);
    }
}
