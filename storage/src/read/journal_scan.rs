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
use crate::format::frame;
use crate::journal::prefixes::Followed;
use crate::journal::segment::Segment;
use crate::read::store::Store;

/// Records dated ahead of their arrival are at most this much ahead.
const MAX_AHEAD_MICROS: i64 = 24 * 3600 * 1_000_000;

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
                }),
            ) => {
                scan.at = position;
                scan.skip = skip;
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

/// The position at which a search for records of `time` and later begins: before the first segment that began when
/// one of them can already have arrived. The clock may have jumped, so segments are not sorted by time.
fn first_arriving(store: &Store, time: Timestamp) -> Position {
    let ahead = i64::try_from(store.config.max_timestamp_ahead.as_micros()).unwrap_or(i64::MAX);
    let before = time.saturating_add_micros(ahead.max(MAX_AHEAD_MICROS).saturating_neg());
    let (runs, segments) = store.journal.runs_and_segments();
    if let Some(run) = runs.iter().find(|run| run.head.arrival >= before) {
        return run.head.first_base.advance(LIFE_BYTES);
    }
    let sorted = runs.last().map_or(Position::ZERO, |run| run.head.limit);
    let begun = |segment: &Arc<Segment>| {
        let length = frame::HEADER_BYTES as u64;
        let bytes = store
            .open_segments
            .read(segment, segment.first(), length)
            .ok()?;
        frame::decode_header(&bytes, segment.life.salt).map(|header| header.arrival)
    };
    let late = |segment: &Arc<Segment>| begun(segment).is_none_or(|begun| begun >= before);
    let index = segments.iter().position(late).unwrap_or(segments.len());
    index
        .checked_sub(1)
        .map_or(sorted, |index| segments[index].first())
}
