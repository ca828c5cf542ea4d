//! A scan of many logs: over the journal itself, in commit order.

mod look;

use std::sync::Arc;

use bytes::Bytes;

use self::look::JournalReadStep;
use super::cursor::ScanCursor;
use super::scan::{Common, Following};
use super::{Reach, near_or_far};
use crate::api::engine::{BoxFuture, Room, Scan, ScanChunk, ScanStart};
use crate::api::error::ReadError;
use crate::api::record::{Gap, GapReason};
use crate::api::watch::{Until, WatchFollower, Watched};
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::{Position, Timestamp};
use crate::journal::prefixes::Followed;
use crate::journal::segment::Segment;
use crate::read::store::Store;

pub(super) struct JournalScan {
    common: Common,
    prefix: Arc<str>,
    /// Tracks the positions of frames of the selected logs, for a scan that follows.
    followed: Option<Followed>,
    /// The frame to continue in, and the number of its records already returned.
    at: Position,
    skip: u64,
    not_before: Option<Timestamp>,
    /// The published position when the journal was last read.
    seen: Position,
    /// The published position at the moment the scan began; `None` for a scan that follows.
    /// Records that are appended later do not keep a plain scan from its end.
    end: Option<Position>,
    lost: bool,
}

impl JournalScan {
    pub(super) fn begin(
        common: Common,
        prefix: String,
        start: ScanStart,
        cursor: Option<ScanCursor>,
    ) -> Result<Self, ReadError> {
        let store = Arc::clone(&common.store);
        let follow = common.follow;
        let end = (!follow).then(|| store.journal.published(common.visibility));
        let mut scan = Self {
            common,
            followed: follow.then(|| store.journal.prefixes.follow(&prefix)),
            prefix: prefix.into(),
            at: Position::ZERO,
            skip: 0,
            not_before: None,
            seen: Position::ZERO,
            end,
            lost: false,
        };
        match (start, cursor) {
            (
                _,
                Some(ScanCursor::ManyLogs {
                    epoch,
                    position,
                    skip,
                    not_before,
                }),
            ) => {
                scan.at = position;
                scan.skip = skip;
                scan.not_before = not_before;
                if let Some(end) = store.survived(epoch)
                    && (position > end || (position == end && skip > 0))
                {
                    scan.lost = true;
                    scan.at = end;
                    scan.skip = 0;
                }
            }
            (_, Some(ScanCursor::OneLog { .. })) => {
                return Err(ReadError::BadCursor("it belongs to a scan of one log"));
            }
            (ScanStart::Time(time), None) => {
                scan.not_before = Some(time);
                scan.at = first_arriving(&store, time);
            }
            (ScanStart::TailOffset(_), None) => {
                scan.at = store.journal.published(scan.common.visibility);
            }
            (ScanStart::First | ScanStart::Lsn(_) | ScanStart::Cursor(_), None) => {}
        }
        Ok(scan)
    }

    async fn advance(&mut self) -> Result<Option<ScanChunk>, ReadError> {
        loop {
            if self.common.done {
                return Ok(None);
            }
            self.common.reserve().await;
            let store = Arc::clone(&self.common.store);
            let published = store.journal.published(self.common.visibility);
            let published = self.end.map_or(published, |end| published.min(end));
            (self.at, self.skip) = self.jump(published);
            let work = JournalReadStep {
                published,
                visibility: self.common.visibility,
                store: Arc::clone(&store),
                looked: 0,
                prefix: Arc::clone(&self.prefix),
                at: self.at,
                skip: self.skip,
                not_before: self.not_before,
                remaining: self.common.remaining,
                bytes: self.common.chunk_bytes,
                batches: Vec::new(),
                gaps: Vec::new(),
            };
            let at_work = self.common.at_work();
            let look = move |reach| {
                let _at_work = &at_work;
                work.clone().run(reach)
            };
            let looked = near_or_far(&self.common.workers, Reach::Memory, look);
            let (work, caught_up) = looked.await?;
            // No wait follows, so a chunk that is taken is also returned.
            if let Some(chunk) = self.accept(work, caught_up) {
                return Ok(Some(chunk));
            }
            if let Some(error) = store
                .journal
                .failure()
                .filter(|_| self.common.in_doubt() && caught_up)
            {
                return Err(ReadError::JournalFailed(error));
            }
            self.common.give_back();
            // Before the end, this part of the journal had nothing for the reader.
            if caught_up && !self.common.done && !self.wait().await? {
                return Ok(None);
            }
        }
    }

    fn accept(&mut self, work: JournalReadStep, caught_up: bool) -> Option<ScanChunk> {
        self.at = work.at;
        self.skip = work.skip;
        self.seen = work.published;
        self.common.remaining = work.remaining;
        let in_doubt = self.common.in_doubt();
        self.common.done = work.remaining == 0 || (caught_up && !self.common.follow && !in_doubt);
        let mut gaps = work.gaps;
        if std::mem::take(&mut self.lost) {
            let lost = Gap {
                log: None,
                from: None,
                to: None,
                reason: GapReason::Lost,
            };
            gaps.insert(0, lost);
        }
        let news = caught_up && !self.common.caught_up;
        if gaps.is_empty() && work.batches.is_empty() && !news {
            return None;
        }
        self.common.caught_up = caught_up;
        Some(ScanChunk {
            gaps,
            batches: work.batches,
            caught_up,
            cursor: self.encode_cursor(),
            tail_lsn: None,
            durable_lsn: None,
            replicated_lsn: None,
        })
    }

    /// The place to continue at, when everything below `published` is visible. A scan that follows skips frames of
    /// other logs.
    fn jump(&self, published: Position) -> (Position, u64) {
        let followed = self.followed.as_ref();
        let next = followed.map_or(self.at, |f| f.prefix.next(self.at, published));
        if next == self.at {
            (self.at, self.skip)
        } else {
            (next, 0)
        }
    }

    fn encode_cursor(&self) -> Bytes {
        let journal = &self.common.store.journal;
        let (position, skip) = self.jump(journal.published(self.common.visibility));
        ScanCursor::ManyLogs {
            epoch: journal.recovery_epoch,
            position,
            skip,
            not_before: self.not_before,
        }
        .encode(self.common.selection)
    }

    /// Waits until more is published; `false` = the engine drains.
    async fn wait(&mut self) -> Result<bool, ReadError> {
        let _following = Following::new(&self.common.store);
        let store = Arc::clone(&self.common.store);
        let (at, seen, visibility) = (self.at, self.seen, self.common.visibility);
        let Some(prefix) = self.followed.as_ref().map(|f| Arc::clone(&f.prefix)) else {
            return Ok(false);
        };
        let follower = || WatchFollower::new(Arc::clone(&prefix) as _);
        self.common.follower.get_or_insert_with(follower);
        let watched: Vec<Arc<dyn Watched>> = vec![
            Arc::clone(&prefix) as _,
            Arc::clone(&store.journal.stopping) as _,
        ];
        Until::new(watched, visibility, move || {
            if store.journal.stopping.is_draining() {
                return Some(Ok(false));
            }
            let published = store.journal.published(visibility);
            if published > seen && prefix.next(at, published) < published {
                return Some(Ok(true));
            }
            store
                .journal
                .failure()
                .map(|error| Err(ReadError::JournalFailed(error)))
        })
        .await
    }
}

impl Scan for JournalScan {
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

/// The first position at which a record of `time` or later can lie. Stored times of one log never go back, while clocks and
/// arrivals do: the index of each file gives the latest stored time in it.
fn first_arriving(store: &Store, time: Timestamp) -> Position {
    let (runs, segments) = store.journal.runs_and_segments();
    let of_runs = runs.iter().map(|run| {
        let first = run.head.first_base.advance(LIFE_BYTES);
        (&run.segment, first, run.head.latest)
    });
    let of_journal = segments.iter();
    let of_journal = of_journal.map(|segment| (segment, segment.first(), None));
    let files: Vec<_> = of_runs.chain(of_journal).collect();
    let late = files.iter().position(|(segment, _, latest)| {
        let latest = latest.or_else(|| latest_in(store, segment));
        latest.is_none_or(|latest| latest >= time)
    });
    // All files of a copy may have an index: then records that come next are late.
    let mut first = late.unwrap_or(files.len().saturating_sub(1));
    // Nobody knows the times of damaged records: they arrived before the file behind them.
    while let Some(before) = first.checked_sub(1)
        && !files[before].0.holes.read().is_empty()
    {
        first = before;
    }
    files
        .get(first)
        .map_or(Position::ZERO, |(_, first, _)| *first)
}

/// The latest stored time in a file; `None` while memory lists its frames, or if it has no good index.
fn latest_in(store: &Store, segment: &Segment) -> Option<Timestamp> {
    if let Some(latest) = segment.latest.get() {
        return Some(*latest);
    }
    if !segment.is_indexed() {
        return None;
    }
    let index = store.indexes.stream(segment).ok()??;
    let latest = index.rows().map(|row| row.last_time).max();
    // A row that was not read has no time.
    index.check_reads().ok()?;
    let latest = latest.unwrap_or(Timestamp::from_micros(i64::MIN));
    Some(*segment.latest.get_or_init(|| latest))
}
