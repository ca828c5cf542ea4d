//! The state of a store that readers and jobs share.
//!
//! A [`Store`] holds no committer: it reads files, records damage, and submits nothing.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::Arc;

use crate::api::config::StorageConfig;
use crate::api::engine::LogTarget;
use crate::api::error::{ReadError, TargetError};
use crate::api::record::{SyncMode, Visibility};
use crate::base::ids::SegmentId;
use crate::base::ids::{LogId, LogName, Lsn, Position, RecoveryEpoch};
use crate::base::sync::Mutex;
use crate::base::sync::atomic::AtomicU64;
use crate::disk::Disk;
use crate::disk::held_files::Backups;
use crate::format::address;
use crate::index::Indexes;
use crate::index::SealedIndex;
use crate::index::checkpoint;
use crate::index::queue::IndexProgress;
use crate::index::queue::IndexQueue;
use crate::journal::Journal;
use crate::journal::segment::Segment;
use crate::logs::Lost;
use crate::logs::damages::Damages;
use crate::logs::{Log, Logs, tail_at};
use crate::read::OpenSegments;
use crate::read::held_back::Unusable;

/// The parts of an engine that read. They may read every file and record damage. They submit no operations and
/// start no threads.
pub(crate) struct Store {
    pub(crate) config: StorageConfig,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) journal: Arc<Journal>,
    pub(crate) logs: Arc<Logs>,
    pub(crate) damages: Damages,
    /// Why the start holds back checkpoints and sorting, in sentences.
    pub(crate) held_back: Vec<String>,
    pub(crate) open_segments: OpenSegments,
    pub(crate) indexes: Indexes,
    pub(crate) store_id: u128,
    /// For each unclean start: the epoch that ended, and the end of its surviving records.
    pub(crate) history: Vec<(RecoveryEpoch, Position)>,
    pub(crate) followers: AtomicU64,
    /// Segments that wait for their index, and the state of checkpoints.
    pub(crate) indexing: Arc<IndexQueue>,
    /// Files that running backups need.
    pub(crate) held_files: Arc<Backups>,
    /// Rebuilt indexes of segments, until the segments are sorted.
    pub(crate) made: Mutex<HashMap<SegmentId, Arc<SealedIndex>>>,
    /// Files that the sorter cannot use.
    pub(crate) unusable: Unusable,
}

impl Store {
    /// The sync mode that holds for a log.
    pub(crate) fn mode(&self, log: Option<&Log>) -> SyncMode {
        log.and_then(|log| log.state.read().config.sync_mode)
            .unwrap_or(self.config.sync_mode)
    }

    /// Visibility for a reader that names none: the visibility that matches a plain append of this log.
    ///
    /// # Errors
    /// If a reader asks for replicated records, and there is no replica.
    pub(crate) fn visibility(
        &self,
        asked: Option<Visibility>,
        name: Option<&LogName>,
    ) -> Result<Visibility, ReadError> {
        let by_mode = || {
            let log = name.and_then(|name| self.logs.by_name(name.as_str()));
            self.mode(log.as_deref()).visibility()
        };
        match (asked, self.journal.replication().is_some()) {
            (Some(asked @ Visibility::Replicated), false) => Err(ReadError::NotSupported(asked)),
            (asked, true) => Ok(asked.unwrap_or_else(by_mode)),
            (Some(asked), false) => Ok(asked),
            (None, false) => Ok(match by_mode() {
                Visibility::Replicated => Visibility::Durable,
                visibility => visibility,
            }),
        }
    }

    /// The tail of a log for a reader of this visibility.
    pub(crate) fn tail(&self, log: &Log, visibility: Visibility) -> Lsn {
        tail_at(log, visibility, self.journal.published(visibility))
    }

    /// The lsn below which a log is replicated; `None` without a replica.
    pub(crate) fn replicated_lsn(&self, log: &Log) -> Option<Lsn> {
        let replication = self.journal.replication()?;
        Some(log.state.read().tail(replication.replicated()))
    }

    /// Makes sure that no other node could have had newer records when an answer was read. Call after the read.
    ///
    /// # Errors
    /// `LeaseLost` if one could.
    pub(crate) fn check_lease(&self) -> Result<(), ReadError> {
        match self.journal.replication() {
            Some(replication) if !replication.may_answer() => Err(ReadError::LeaseLost),
            _ => Ok(()),
        }
    }

    /// The log, if it exists for a reader of this visibility.
    pub(crate) fn resolve(
        &self,
        target: &LogTarget,
        visibility: Visibility,
    ) -> Result<Arc<Log>, TargetError> {
        let published = self.journal.published(visibility);
        let log = self.logs.by_name(target.name.as_str());
        let is_there = |log: &Arc<Log>| log.state.read().created_end <= published;
        let log = log.filter(is_there).ok_or_else(|| target.not_found())?;
        target.check(log.id)?;
        Ok(log)
    }

    /// End of the records of an epoch that survived; `None` for the current epoch. A later epoch belongs to
    /// another store, whose records are not here.
    pub(crate) fn survived(&self, epoch: RecoveryEpoch) -> Option<Position> {
        if epoch > self.journal.recovery_epoch {
            return Some(Position::ZERO);
        }
        self.history
            .iter()
            .find(|(ended, _)| *ended >= epoch)
            .map(|(_, end)| *end)
    }

    /// Whether damage that nothing attributes to logs holds back checkpoints and sorting.
    pub(crate) fn is_in_doubt(&self) -> bool {
        !self.held_back.is_empty() || self.damages.first_doubt().is_some()
    }

    /// Forgets damage between these positions whose records are all trimmed or deleted, and harmless damage
    /// of no log. A sorted run has replaced the files there.
    pub(crate) fn forget_damage(&self, from: Position, to: Position) {
        let settled = self.journal.settled();
        let within = |position: Position| from <= position && position < to;
        let hit = self.damages.between(from, to).into_iter();
        let hit = hit.filter_map(|damage| Some((damage.log.as_ref()?.id, damage.log?)));
        let hit: BTreeMap<LogId, Arc<Log>> = hit.collect();
        // Per log: records below this lsn are trimmed or deleted, so no reader misses them.
        let mut kept_from = BTreeMap::new();
        for (id, log) in hit {
            let mut state = log.state.write();
            let kept = match state.deleted {
                true => Lsn::new(u64::MAX),
                false => state.first(settled),
            };
            state.forget_damage(|lost| within(lost.position) && lost.to <= kept);
            kept_from.insert(id, kept);
        }
        self.damages.forget(|damage| {
            let gone = |log: &Arc<Log>| {
                kept_from
                    .get(&log.id)
                    .is_some_and(|kept| damage.to <= *kept)
            };
            within(damage.position) && damage.log.as_ref().map_or(damage.harmless, gone)
        });
    }

    /// Makes the next start read a damaged segment, and find the damage too, by removing its index and
    /// all checkpoints. The index stays in memory, up to `MOST_DAMAGED_BYTES` of all, and is written
    /// again with the damage before the next checkpoint.
    pub(crate) fn let_next_start_find(&self, segment: &Segment) {
        // An index that is being written now is removed too, and later ones include the damage.
        let mut progress = self.indexing.progress.lock();
        if !segment.is_indexed() {
            return;
        }
        progress.damaged.entry(segment.base).or_insert(0);
        let index = self.indexes.get(segment).map(|index| {
            let index = index.filter(|index| !index.is_partial());
            let bytes = index.as_ref().map_or(0, |index| index.file_bytes());
            match index {
                Some(index) if progress.note_damaged(segment.base, bytes) => {
                    self.indexes.pin(index);
                }
                _ => self.indexes.close(segment.life.id),
            }
        });
        let forget = || index.and_then(|()| self.set_index_aside(segment));
        if let Err(error) = forget() {
            tracing::warn!(segment = %segment.life.id, %error, "the next start may not find this damage before it is read again");
        }
        self.forget_checkpoints(&mut progress);
    }

    /// Invalidates the checkpoints, because they list other losses than there are. No start begins with
    /// them, and another is written soon.
    pub(crate) fn forget_checkpoints(&self, progress: &mut IndexProgress) {
        progress.covered = None;
        // A start after a crash has to read everything now.
        progress.since_checkpoint = u64::MAX / 2;
        if let Err(error) = checkpoint::set_aside(&*self.disk, &self.held_files) {
            tracing::warn!(%error, "the next start may begin with a checkpoint that does not know of all damage");
        }
        self.indexing.wake();
    }

    /// Records of a log that damage removed in a segment or run.
    pub(crate) fn lost_within(&self, log: LogId, segment: &Segment) -> Vec<Lost> {
        let Some(log) = self.logs.by_id(log) else {
            return Vec::new();
        };
        let (from, to) = self.reach_of(segment);
        log.state.read().lost_between(from, to)
    }

    /// Positions that a segment covers. A run also covers missing segments directly before it.
    pub(crate) fn reach_of(&self, segment: &Segment) -> (Position, Position) {
        if !address::is_address(segment.base) {
            return (segment.base, segment.limit());
        }
        let runs = self.journal.runs();
        let at = runs.iter().position(|run| run.segment.base == segment.base);
        let Some(at) = at else {
            return (Position::ZERO, Position::ZERO);
        };
        let before = at.checked_sub(1).and_then(|before| runs.get(before));
        let from = before.map_or(Position::ZERO, |run| run.head.limit);
        (from, runs[at].head.limit)
    }

    /// Why no checkpoint is written and nothing sorted, in sentences; nothing if both go on.
    /// Damage whose records are known holds back nothing.
    pub(crate) fn held_back(&self) -> Vec<String> {
        let mut reasons = self.held_back.clone();
        if let Some(position) = self.damages.first_doubt().filter(|_| reasons.is_empty()) {
            reasons.push(format!(
                "records at position {position} cannot be read, and nothing tells whose they were; restart the daemon"
            ));
        }
        reasons.extend(self.unusable.reasons());
        reasons
    }
}
