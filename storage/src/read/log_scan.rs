//! A scan of one log: over places, in lsn order.

use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::cursor::{self, ScanCursor};
use super::reach::{far, is_retired, retired};
use super::scan::{Common, Following};
use super::{Reach, ReadStep, StepBounds, check_journal, near_or_far, start_lsn, step};
use crate::api::engine::{BoxFuture, LogTarget, ReadStart, Room, Scan, ScanChunk, ScanStart};
use crate::api::error::{ReadError, TargetError};
use crate::api::record::{Gap, GapReason, Visibility};
use crate::api::watch::{Until, WatchFollower, Watched};
use crate::base::ids::{LogId, Lsn, Position, RecoveryEpoch};
use crate::format::active::Place;
use crate::format::address;
use crate::format::frame;
use crate::format::pack;
use crate::format::pack::Piece;
use crate::index::{Row, SealedIndex};
use crate::logs::tail_at;
use crate::logs::{FirstKept, Log};
use crate::read::store::Store;

/// The place of the scan.
#[derive(Clone, Copy)]
enum LogScanPlace {
    /// Not begun.
    Start(ReadStart),
    /// No log of the name was visible when the journal was published up to `position`. The first
    /// one that comes is read from its first record on.
    Before { position: Position },
    /// Resumes after a cursor of an earlier time.
    Resumed {
        epoch: RecoveryEpoch,
        position: Position,
        log_id: LogId,
        next: Lsn,
    },
    /// Under way in this log. Every record below `next` lies below `position`.
    Next {
        log_id: LogId,
        next: Lsn,
        position: Position,
    },
}

pub(super) struct LogScan {
    common: Common,
    target: LogTarget,
    at: LogScanPlace,
    /// The log that the scan reads. Meanwhile it may be deleted, and the sorter may drop its records.
    log: Option<Arc<Log>>,
    until: Lsn,
    /// The tail at the moment the scan began; the maximum for a scan that follows. Records that
    /// are appended later do not keep a plain scan from its end.
    end: Lsn,
    /// Whether the scan has reported that the log is gone.
    told_deleted: bool,
}

/// Result of one read of the log.
struct LogReadResult {
    step: ReadStep,
    tail: Lsn,
    durable: Lsn,
    replicated: Option<Lsn>,
    published: Position,
    lost: Option<(Lsn, Lsn)>,
    /// The lsn from which records are gone, and the records that the log keeps.
    gone: Option<(Lsn, FirstKept)>,
    deleted: bool,
    unproven: bool,
}

/// The input of one read, which may run on a reader thread.
struct LogReadStep {
    store: Arc<Store>,
    log: Arc<Log>,
    at: LogScanPlace,
    visibility: Visibility,
    until: Lsn,
    records: u64,
    bytes: usize,
}

impl LogReadStep {
    fn run(&self, reach: Reach) -> Result<LogReadResult, ReadError> {
        let (store, log) = (&self.store, &self.log);
        let published = store.journal.published(self.visibility);
        // The tail belongs to the same moment: every record below it lies below `published`.
        let tail = tail_at(log, self.visibility, published);
        let (deleted, unproven, kept) = {
            let state = log.state.read();
            (
                state.deleted,
                state.unproven,
                state.kept(store.journal.trims_seen(self.visibility)),
            )
        };
        let replicated = store.replicated_lsn(log);
        let durable = log.state.read().tail(store.journal.durable());
        let (from, lost) = match self.at {
            LogScanPlace::Start(start) => {
                let bounds = (kept.first, tail);
                (start_lsn(store, log, start, bounds, reach)?, None)
            }
            LogScanPlace::Before { .. } => (Lsn::ZERO, None),
            LogScanPlace::Next { next, .. } => (next, None),
            // Index files show which records survived.
            LogScanPlace::Resumed { .. } if reach != Reach::Disk => return Err(far().into()),
            LogScanPlace::Resumed {
                epoch,
                position,
                next,
                ..
            } => {
                let from = survivors(store, log, epoch, position, next)?;
                (from, (from < next).then_some((from, next)))
            }
        };
        let gone = (from < kept.first && !deleted).then_some((from, kept));
        let from = gone.map_or(from, |(_, kept)| kept.first);
        let step = if deleted {
            ReadStep {
                batches: Vec::new(),
                next: from,
                damage: None,
            }
        } else {
            check_journal(store, from, log)?;
            let bounds = StepBounds {
                until: self.until.min(tail),
                records: self.records,
                bytes: self.bytes,
                reach,
            };
            step(store, log, from, bounds)?
        };
        Ok(LogReadResult {
            step,
            tail,
            durable,
            replicated,
            published,
            lost,
            gone,
            deleted,
            unproven,
        })
    }
}

/// The lsn up to which the records before an older cursor survived; `next` if all of them did.
fn survivors(
    store: &Store,
    log: &Log,
    epoch: RecoveryEpoch,
    seen: Position,
    next: Lsn,
) -> Result<Lsn, ReadError> {
    let Some(end) = store.survived(epoch).filter(|end| seen >= *end) else {
        return Ok(next);
    };
    let (chain, in_memory) = {
        let state = log.state.read();
        // The first lsn after the loss: of a written frame, of records in memory, or of the next append.
        let first = state
            .places
            .first_beyond(end)
            .map_or(state.journaled_next(), |place| place.first_lsn);
        (state.chain.clone(), first)
    };
    loop {
        let ends_beyond = |index: &SealedIndex| store.journal_end_of(index) > end;
        let sealed =
            store.sealed_row(log.id, &chain, Reach::Disk, |index, _| ends_beyond(index))?;
        let first = match sealed {
            None => in_memory,
            Some((index, row)) if address::is_address(index.base) => {
                match first_piece_beyond(store, &index, &row, end) {
                    Err(error) if is_retired(&error) => continue,
                    found => found?,
                }
            }
            Some((index, row)) => {
                let entries = index.entries(&row);
                let beyond = entries.partition_point(|place| place.end() <= end);
                entries
                    .get(beyond)
                    .map_or(row.next_lsn, |place| place.first_lsn)
            }
        };
        return Ok(first.min(next));
    }
}

/// The first lsn of a log in a run whose piece was at or beyond `end` in the journal. Without such a piece: the log's
/// next lsn after the run.
fn first_piece_beyond(
    store: &Store,
    index: &SealedIndex,
    row: &Row,
    end: Position,
) -> io::Result<Lsn> {
    let entries = index.entries(row);
    let (mut low, mut high) = (0, entries.len());
    let mut found = row.next_lsn;
    while low < high {
        let middle = low + (high - low) / 2;
        let Some(place) = entries.get(middle) else {
            break;
        };
        let beyond = store
            .pieces_at(&place)?
            .iter()
            .find(|piece| piece.position >= end)
            .map(|piece| piece.first_lsn);
        match beyond {
            Some(lsn) => {
                found = lsn;
                high = middle;
            }
            None => low = middle + 1,
        }
    }
    Ok(found)
}

impl Store {
    /// Position in the journal at which the content of an index ends.
    fn journal_end_of(&self, index: &SealedIndex) -> Position {
        let runs = self.journal.runs();
        let run = runs.iter().find(|run| run.segment.base == index.base);
        run.map_or(index.end, |run| run.head.end)
    }

    /// The pieces of the pack at a place; none if it is damaged.
    pub(crate) fn pieces_at(&self, place: &Place) -> io::Result<Vec<Piece>> {
        let segment = self.journal.segment_at(place.position);
        let segment = segment.ok_or_else(retired)?;
        let length = u64::from(place.frame_len);
        let bytes = self.bytes(&segment, place.position, length, Reach::Disk)?;
        if segment.is_retired() {
            return Err(retired());
        }
        let header = frame::decode_header(&bytes, segment.life.salt);
        let header = header.filter(|header| header.position == place.position);
        let pieces = header.and_then(|header| pack::pieces(&bytes, &header));
        Ok(pieces.unwrap_or_default())
    }
}

impl LogScan {
    pub(super) fn begin(
        common: Common,
        target: LogTarget,
        start: ScanStart,
        cursor: Option<ScanCursor>,
        until: Option<Lsn>,
    ) -> Result<Self, ReadError> {
        let resumes = cursor.is_some();
        let at = match (start, cursor) {
            (
                _,
                Some(ScanCursor::OneLog {
                    position,
                    log_id: cursor::NO_LOG,
                    ..
                }),
            ) => LogScanPlace::Before { position },
            (
                _,
                Some(ScanCursor::OneLog {
                    epoch,
                    position,
                    log_id,
                    next,
                }),
            ) => LogScanPlace::Resumed {
                epoch,
                position,
                log_id,
                next,
            },
            (_, Some(ScanCursor::ManyLogs { .. })) => {
                return Err(ReadError::BadCursor("it belongs to a scan of many logs"));
            }
            (ScanStart::First | ScanStart::Cursor(_), None) => {
                LogScanPlace::Start(ReadStart::First)
            }
            (ScanStart::Lsn(lsn), None) => LogScanPlace::Start(ReadStart::Lsn(lsn)),
            (ScanStart::Time(time), None) => LogScanPlace::Start(ReadStart::Time(time)),
            (ScanStart::TailOffset(back), None) => LogScanPlace::Start(ReadStart::TailOffset(back)),
        };
        let until = until.unwrap_or(Lsn::new(u64::MAX));
        let mut scan = Self {
            common,
            target,
            at,
            log: None,
            until,
            end: Lsn::new(u64::MAX),
            told_deleted: false,
        };
        // The position comes before the lookup: a log that is created meanwhile lies above it.
        let position = scan.published();
        let log = scan.locate()?;
        if let Some(log) = log.as_ref().filter(|_| !scan.common.follow) {
            scan.end = tail_at(log, scan.common.visibility, scan.published());
        }
        match (log, scan.at) {
            (Some(log), LogScanPlace::Start(ReadStart::TailOffset(back))) => scan.pin(log, back),
            (None, LogScanPlace::Start(ReadStart::Lsn(asked))) if asked > Lsn::ZERO => {
                return Err(ReadError::BeyondTail {
                    log: scan.target.name,
                    tail: Lsn::ZERO,
                    asked,
                });
            }
            (None, LogScanPlace::Start(_)) => scan.at = LogScanPlace::Before { position },
            // A log that came and went since the cursor was made is named at once.
            (None, LogScanPlace::Before { position }) if resumes => {
                if let Some(log) = scan.deleted_since(position) {
                    scan.enter(log, position);
                }
            }
            _ => {}
        }
        Ok(scan)
    }

    fn published(&self) -> Position {
        self.common.store.journal.published(self.common.visibility)
    }

    /// Begins at the current tail, or `back` records before it.
    fn pin(&mut self, log: Arc<Log>, back: u64) {
        let store = &self.common.store;
        let position = store.journal.published(self.common.visibility);
        let tail = tail_at(&log, self.common.visibility, position);
        let seen = store.journal.trims_seen(self.common.visibility);
        let first = log.state.read().first(seen);
        self.at = LogScanPlace::Next {
            log_id: log.id,
            next: Lsn::new(tail.get().saturating_sub(back)).max(first),
            position,
        };
        self.log = Some(log);
    }

    /// Begins at the first record that the log ever had.
    fn enter(&mut self, log: Arc<Log>, position: Position) {
        self.at = LogScanPlace::Next {
            log_id: log.id,
            next: Lsn::ZERO,
            position,
        };
        self.log = Some(log);
    }

    /// The oldest deleted log of the name that was created above `position`, if it is known.
    fn deleted_since(&self, position: Position) -> Option<Arc<Log>> {
        let is_later = |log: &Log| log.state.read().created_end > position;
        let logs = &self.common.store.logs;
        logs.deleted_by_name(&self.target.name, is_later)
    }

    /// The log, if there is one by now; `None` = a following scan waits for it.
    fn locate(&mut self) -> Result<Option<Arc<Log>>, ReadError> {
        let store = &self.common.store;
        let known = match self.at {
            LogScanPlace::Next { .. } => return Ok(self.log.clone()),
            LogScanPlace::Resumed { log_id, .. } => Some(log_id),
            LogScanPlace::Start(_) => self.target.log_id,
            LogScanPlace::Before { .. } => {
                // A log that is created with a sync mode of its own has its own visibility.
                let name = Some(&self.target.name);
                self.common.visibility = store.visibility(self.common.asked, name)?;
                self.target.log_id
            }
        };
        let target = LogTarget {
            name: self.target.name.clone(),
            log_id: known,
        };
        match (store.resolve(&target, self.common.visibility), self.at) {
            (Ok(log), LogScanPlace::Before { position }) => {
                // A log that came and went meanwhile is named first.
                let first = self.deleted_since(position).unwrap_or(log);
                self.enter(Arc::clone(&first), position);
                Ok(Some(first))
            }
            (Ok(log), _) => Ok(Some(log)),
            (Err(TargetError::NotFound { .. }), _) if self.common.follow && known.is_none() => {
                Ok(None)
            }
            (Err(error), _) => Err(error.into()),
        }
    }

    /// Reports once that no log exists yet: the scan has caught up.
    fn report_no_log(&mut self) -> Option<ScanChunk> {
        if std::mem::replace(&mut self.common.caught_up, true) {
            return None;
        }
        Some(ScanChunk {
            gaps: Vec::new(),
            batches: Vec::new(),
            caught_up: true,
            cursor: self.encode_cursor(),
            tail_lsn: None,
            durable_lsn: None,
            replicated_lsn: None,
        })
    }

    async fn advance(&mut self) -> Result<Option<ScanChunk>, ReadError> {
        loop {
            if self.common.done {
                return Ok(None);
            }
            let Some(log) = self.locate()? else {
                if let LogScanPlace::Start(_) = self.at {
                    // The log was deleted before it was read.
                    self.at = LogScanPlace::Before {
                        position: self.published(),
                    };
                    continue;
                }
                if let Some(chunk) = self.report_no_log() {
                    return Ok(Some(chunk));
                }
                if self.wait_for_log().await? {
                    continue;
                }
                return Ok(None);
            };
            self.common.reserve().await;
            let work = LogReadStep {
                store: Arc::clone(&self.common.store),
                log: Arc::clone(&log),
                at: self.at,
                visibility: self.common.visibility,
                until: self.until.min(self.end),
                records: self.common.remaining,
                bytes: self.common.chunk_bytes,
            };
            let at_work = self.common.at_work();
            let read = move |reach| {
                let _at_work = &at_work;
                work.run(reach)
            };
            let found = near_or_far(&self.common.workers, Reach::Memory, read).await?;
            // No wait follows, so a chunk that is taken is also returned.
            if let Some(chunk) = self.accept(&log, found)? {
                return Ok(Some(chunk));
            }
            self.common.give_back();
            if !self.common.done && !self.wait_for_records(&log).await? {
                return Ok(None);
            }
        }
    }

    fn accept(
        &mut self,
        log: &Arc<Log>,
        found: LogReadResult,
    ) -> Result<Option<ScanChunk>, ReadError> {
        let LogReadResult {
            step,
            tail,
            durable,
            replicated,
            published,
            lost,
            gone,
            deleted,
            unproven,
        } = found;
        let mut next = step.next;
        let mut gaps = Vec::new();
        let gap = |from, to, reason| Gap {
            log: Some(log.name.clone()),
            from,
            to,
            reason,
        };
        if let Some((from, to)) = lost {
            gaps.push(gap(Some(from), Some(to), GapReason::Lost));
        }
        if let Some((from, kept)) = gone {
            let border = kept.trimmed().max(from);
            for (from, to, reason) in [
                (from, border, GapReason::Trimmed),
                (border, kept.first, GapReason::Expired),
            ] {
                if from < to {
                    gaps.push(gap(Some(from), Some(to), reason));
                }
            }
        }
        if let Some((from, to)) = step.damage.filter(|_| step.batches.is_empty()) {
            let (to, reason) = log.state.read().gap_from(from, to);
            gaps.push(gap(Some(from), Some(to), reason));
            next = to;
        }
        if deleted {
            if self.told_deleted {
                let log = log.name.clone();
                return Err(TargetError::NotFound { log }.into());
            }
            self.told_deleted = true;
            let end = log.state.read().next;
            // A reader of all records gets the gap, too: no more records come.
            let to = (next < end).then_some(end);
            gaps.push(gap(Some(next), to, GapReason::Deleted));
            next = next.max(end);
        }
        let given: u64 = step
            .batches
            .iter()
            .map(|batch| u64::from(batch.count))
            .sum();
        if self.common.remaining != u64::MAX {
            self.common.remaining -= given;
        }
        self.at = LogScanPlace::Next {
            log_id: log.id,
            next,
            position: published,
        };
        self.log = Some(Arc::clone(log));
        let at_tail = next >= tail.min(self.end);
        if at_tail && unproven && !self.common.caught_up {
            gaps.push(gap(Some(next), None, GapReason::Quarantined));
        }
        let ended = next >= self.until || self.common.remaining == 0;
        self.common.done = ended || (at_tail && !self.common.follow && !self.common.in_doubt());
        let news = at_tail && !self.common.caught_up;
        if step.batches.is_empty() && gaps.is_empty() && !news {
            return Ok(None);
        }
        self.common.caught_up = at_tail;
        Ok(Some(ScanChunk {
            gaps,
            batches: step.batches,
            caught_up: at_tail,
            cursor: self.encode_cursor(),
            tail_lsn: Some(tail),
            durable_lsn: Some(durable),
            replicated_lsn: replicated,
        }))
    }

    fn encode_cursor(&self) -> Bytes {
        let epoch = self.common.store.journal.recovery_epoch;
        let cursor = match self.at {
            LogScanPlace::Next {
                log_id,
                next,
                position,
            } => ScanCursor::OneLog {
                epoch,
                position,
                log_id,
                next,
            },
            LogScanPlace::Resumed {
                epoch,
                position,
                log_id,
                next,
            } => ScanCursor::OneLog {
                epoch,
                position,
                log_id,
                next,
            },
            LogScanPlace::Before { position } => ScanCursor::OneLog {
                epoch,
                position,
                log_id: cursor::NO_LOG,
                next: Lsn::ZERO,
            },
            // Nothing was returned yet, so there is no place to resume after.
            LogScanPlace::Start(_) => return Bytes::new(),
        };
        cursor.encode(self.common.selection)
    }

    /// Waits until a log of this name is visible; `false` = the engine drains.
    async fn wait_for_log(&self) -> Result<bool, ReadError> {
        let _following = Following::new(&self.common.store);
        let store = Arc::clone(&self.common.store);
        let (target, visibility) = (self.target.clone(), self.common.visibility);
        let asked = self.common.asked;
        let watched: Vec<Arc<dyn Watched>> = vec![
            Arc::clone(&store.journal) as _,
            Arc::clone(&store.journal.stopping) as _,
        ];
        Until::new(watched, visibility, move || {
            if store.journal.stopping.is_draining() {
                return Some(Ok(false));
            }
            // A log with a visibility of its own wakes other waiters than these.
            let now = store.visibility(asked, Some(&target.name));
            let other = now.is_ok_and(|now| now != visibility);
            if other || store.resolve(&target, visibility).is_ok() {
                return Some(Ok(true));
            }
            let failure = store.journal.failure();
            failure.map(|error| Err(ReadError::JournalFailed(error)))
        })
        .await
    }

    /// Waits until the log has more records; `false` = the engine drains.
    async fn wait_for_records(&mut self, log: &Arc<Log>) -> Result<bool, ReadError> {
        let LogScanPlace::Next { next, .. } = self.at else {
            return Ok(true);
        };
        let follower = || WatchFollower::new(Arc::clone(log) as _);
        self.common.follower.get_or_insert_with(follower);
        let _following = Following::new(&self.common.store);
        let store = Arc::clone(&self.common.store);
        let visibility = self.common.visibility;
        let watched: Vec<Arc<dyn Watched>> = vec![
            Arc::clone(log) as _,
            Arc::clone(&store.journal.stopping) as _,
        ];
        let log = Arc::clone(log);
        Until::new(watched, visibility, move || {
            if store.journal.stopping.is_draining() {
                return Some(Ok(false));
            }
            match super::tail_is_beyond(&store, &log, next, visibility) {
                Some(Err(ReadError::Target(_))) => Some(Ok(true)),
                other => other.map(|beyond| beyond.map(|()| true)),
            }
        })
        .await
    }
}

impl Scan for LogScan {
    fn next(&mut self) -> BoxFuture<'_, Result<Option<ScanChunk>, ReadError>> {
        Box::pin(async {
            let chunk = self.advance().await;
            // The end of the records, and a log that is missing, are answers, too.
            self.common.store.check_lease()?;
            chunk
        })
    }

    fn read_in(&mut self, room: Arc<dyn Room>) {
        self.common.room = Some(room);
    }

    fn cursor(&self) -> Bytes {
        self.encode_cursor()
    }

    fn followers(&self) -> usize {
        self.common.followers()
    }
}
