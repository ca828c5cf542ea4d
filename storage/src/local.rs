//! The local engine: one journal in one directory.
//!
//! [`Core`] is the engine without threads, so that tests and simulations drive it step by step.
//! [`LocalEngine`] adds the threads; the service holds it.

mod admin;
mod bounds;
mod conditions;
mod cursors;
mod drive;
mod engine;
mod extras;
mod guard;
#[cfg(any(test, feature = "fuzzing"))]
mod in_turn;
mod logs;
mod producers;
pub(crate) mod retention;
pub(crate) mod submit;
mod versions;

use std::collections::BTreeMap;
use std::sync::Arc;

pub(crate) use self::bounds::{Bounds, Load, Wanted as Adds};
pub(crate) use self::conditions::{Allowed, Checked, Creation, check, check_cursor};
use self::drive::{By, Intake};
pub use self::engine::LocalEngine;
pub(crate) use self::extras::{Extras, ExtrasImage, Mark, Missing, producers_in};
pub(crate) use self::logs::{
    Buffered, Kept, Log, LogState, Logs, Lost, Standing, TrimBy, cut, without,
};
pub(crate) use self::producers::{
    Before as ProducerBefore, BeforeForgotten, Forgotten, MAX_EPOCH_RISE, MAX_GONE, Producers,
    Recall, Remembered,
};
use self::retention::Retainer;
use crate::archive::Archive;
use crate::backup::Backups;
use crate::clock::Clock;
use crate::config::{Limits, StorageConfig};
use crate::digest::Secret;
use crate::directory;
use crate::disk::{Disk, DiskLock};
use crate::engine::{DurabilityTruth, LogTarget};
use crate::error::{AppendError, OpenError, ReadError, SyncError};
use crate::ids::{LogId, LogName, Lsn, Position, RecoveryEpoch};
use crate::index::Indexes;
use crate::indexer::{Indexer, Wanted};
use crate::journal::Journal;
use crate::journal::committer::{Barrier, Committer, Operation, Submission};
use crate::journal::compress;
use crate::journal::pool::{Pool, Use};
use crate::metrics::Observer;
use crate::quarantine::Damages;
use crate::read::OpenSegments;
use crate::record::{Batch, Durability, SyncMode, Visibility};
use crate::recovery::{self, RecoveryReport};
use crate::session::Session;
use crate::sorted::Sorter;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::ticket::{Awaited, Promise, Ticket};
use crate::verify::online::Told;
use crate::verify::scrub::Scrub;

/// Why the queue did not take a request.
enum NotTaken {
    /// The queue has no room for it now.
    Busy(AppendError, Box<Batch>),
    Refused(AppendError),
}

/// The local engine without its threads.
pub(crate) struct Core {
    pub(crate) config: StorageConfig,
    pub(crate) limits: Limits,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) journal: Arc<Journal>,
    pub(crate) logs: Arc<Logs>,
    pub(crate) damages: Damages,
    /// Why the start holds back checkpoints and sorting, in sentences.
    held_back: Vec<String>,
    pub(crate) open_segments: OpenSegments,
    pub(crate) indexes: Indexes,
    pub(crate) store_id: u128,
    /// For each unclean start: the epoch that ended, and the end of its surviving records.
    pub(crate) history: Vec<(RecoveryEpoch, Position)>,
    pub(crate) followers: AtomicU64,
    pub(crate) quarantine_bytes: u64,
    committer: Mutex<Committer>,
    intake: Intake,
    pool: Arc<Pool>,
    pub(crate) indexer: Arc<Indexer>,
    pub(crate) backups: Arc<Backups>,
    truth: DurabilityTruth,
    /// Keys the digests of producers' batches.
    pub(crate) secret: Secret,
    /// Faults that were reported already.
    pub(crate) told: Told,
    pub(crate) scrub: Scrub,
    pub(crate) retainer: Retainer,
    pub(crate) sorter: Sorter,
    /// Archive of expired records, if there is one.
    pub(crate) archive: Option<Archive>,
    lock: Box<dyn DiskLock>,
}

/// Purpose for which a store is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    Serve,
    /// The loss of records is accepted, so that checkpoints and sorting go on.
    AcceptLoss,
    /// The clock of retention begins at the system's clock.
    ResetClock,
}

impl Core {
    /// Locks, recovers, and begins a fresh segment.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn open(
        disk: Arc<dyn Disk>,
        config: StorageConfig,
        clock: Arc<dyn Clock>,
        observer: Arc<dyn Observer>,
    ) -> Result<(Arc<Self>, RecoveryReport), OpenError> {
        Self::open_as(Start::Serve, (disk, None), config, clock, observer)
    }

    /// Locks, recovers, and begins a fresh segment, for the purpose `start`, with an archive or without.
    pub(crate) fn open_as(
        start: Start,
        (disk, archive): (Arc<dyn Disk>, Option<Arc<dyn Disk>>),
        mut config: StorageConfig,
        clock: Arc<dyn Clock>,
        observer: Arc<dyn Observer>,
    ) -> Result<(Arc<Self>, RecoveryReport), OpenError> {
        #[cfg(feature = "known-bad")]
        let disk = crate::known_bad::on(disk);
        config.check()?;
        config.sync_interval = config.sync_interval.min(drive::MAX_DELAY);
        config.marker_delay = config.marker_delay.min(drive::MAX_DELAY);
        let started = clock.monotonic();
        let (lock, store) = directory::open(&*disk, config.create_store)?;
        let archive = match archive {
            Some(archive) => Some(Archive::open(archive, store.id)?),
            None => None,
        };
        // A body of the largest size that the settings allow does not count as damage.
        compress::allow(config.largest_body());
        let seams = (&*clock, &*observer);
        let mut recovered = match start {
            Start::Serve | Start::ResetClock => recovery::recover(&disk, store, &config, seams)?,
            Start::AcceptLoss => recovery::recover_from_frames(&disk, store, &config, seams)?,
        };
        recovered.check_room()?;
        directory::complete(&*disk)?;
        directory::allow(&*disk, config.largest_body())?;
        if matches!(start, Start::AcceptLoss) {
            recovered
                .forget_indexes(&disk)
                .map_err(OpenError::io("removing indexes"))?;
            recovered
                .set_bad_runs_aside(&*disk)
                .map_err(OpenError::io("moving a run that cannot be used"))?;
            recovered.accept_loss();
        }
        if matches!(start, Start::ResetClock) {
            recovered.set_expiry(clock.now());
        }
        let begun = recovered.begin(&disk, &config, clock, observer)?;
        let probing = begun.journal.clock.monotonic();
        let truth = directory::measure(&*disk, &*begun.journal.clock)?;
        let open_segments = OpenSegments::new(
            Arc::clone(&disk),
            config.read_strategy,
            config.max_open_segments,
        );
        let retainer = Retainer::new(begun.journal.expiry_now());
        let scrub = Scrub::new(config.scrub_bytes_per_second);
        let sorter = Sorter::new(config.sorter_bytes_per_second);
        let mut report = begun.report;
        let now = begun.journal.clock.monotonic();
        report.duration = now.duration_since(started);
        report.times.probe = now.duration_since(probing);
        let backups = Backups::new(Arc::clone(&disk));
        backups.take_over(&begun.left);
        let core = Arc::new(Self {
            limits: config.limits(),
            config,
            disk,
            journal: begun.journal,
            logs: begun.logs,
            damages: begun.damages,
            held_back: begun.held_back,
            open_segments,
            indexes: begun.indexes,
            store_id: store.id,
            secret: begun.secret,
            history: begun.history,
            followers: AtomicU64::new(0),
            quarantine_bytes: begun.quarantine_bytes,
            committer: Mutex::new(begun.committer),
            intake: Intake::default(),
            pool: begun.pool,
            indexer: begun.indexer,
            backups,
            truth,
            told: Told::default(),
            scrub,
            retainer,
            sorter,
            archive,
            lock,
        });
        for why in &core.held_back {
            tracing::error!("{why}; until then no checkpoint is written and nothing is sorted");
        }
        Ok((core, report))
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
        reasons.extend(self.sorter.stuck());
        reasons
    }

    /// Whether damage that nothing attributes to logs holds back checkpoints and sorting.
    pub(crate) fn is_in_doubt(&self) -> bool {
        !self.held_back.is_empty() || self.damages.first_doubt().is_some()
    }

    /// Forgets damage between these positions whose records are all trimmed or deleted, and harmless damage
    /// of no log. A sorted run has replaced the files there.
    pub(crate) fn forget_damage(&self, from: Position, to: Position) {
        let durable = self.journal.durable();
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
                false => state.first(durable),
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

    /// The segment files that are ready for reuse.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Takes a request, perhaps of a session, into the queue. Without a `level`, the sync modes of its logs
    /// decide when it is answered. A refusal here ends the session, unless only room is missing now.
    fn accept(
        &self,
        session: Option<&Session>,
        batch: Batch,
        level: Option<Durability>,
        by: By,
    ) -> Ticket {
        if session.is_some_and(Session::has_ended_at_intake) {
            return Ticket::refused(AppendError::SessionEnded);
        }
        let level = level.unwrap_or_else(|| self.level(&batch));
        match self.take_in(session, batch, level, by) {
            Ok(ticket) => ticket,
            Err(NotTaken::Busy(error, batch)) => Ticket::turned_away(error, batch),
            Err(NotTaken::Refused(error)) => {
                if let Some(session) = session {
                    session.end_at_intake();
                }
                Ticket::refused(error)
            }
        }
    }

    fn max_future_micros(&self) -> i64 {
        i64::try_from(self.config.max_future.as_micros()).unwrap_or(i64::MAX)
    }

    /// As [`LogEngine::join`].
    ///
    /// [`LogEngine::join`]: crate::engine::LogEngine::join
    pub(crate) fn join(&self, batch: &mut Batch, next: Batch) -> Result<(), Batch> {
        let (now, future) = (self.journal.clock.now(), self.max_future_micros());
        let most = |log: &LogName| {
            let log = self.logs.by_name(log.as_str())?;
            let most = log.state.read().config.max_record_bytes;
            most.map(u64::from)
        };
        match submit::join(batch, &next, &self.limits, most, now, future) {
            true => Ok(()),
            false => Err(next),
        }
    }

    /// Takes a request into the queue, unless its bytes are over the budget.
    fn take_in(
        &self,
        session: Option<&Session>,
        batch: Batch,
        level: Durability,
        by: By,
    ) -> Result<Ticket, NotTaken> {
        let now = self.journal.clock.now();
        let cost = submit::validate(&batch, &self.limits, now, self.max_future_micros())
            .map_err(|error| NotTaken::Refused(error.into()))?;
        if let Some(error) = self.refusal() {
            return Err(NotTaken::Refused(error));
        }
        let digests = submit::digests(&batch, &self.secret);
        let inflight = self.journal.inflight.fetch_add(cost, Ordering::SeqCst) + cost;
        let limit = self.limits.max_inflight_bytes;
        // A request larger than the whole budget passes when it is alone.
        if inflight > limit && inflight > cost {
            self.journal.inflight.fetch_sub(cost, Ordering::SeqCst);
            let error = AppendError::Busy {
                inflight: inflight - cost,
                limit,
            };
            return Err(NotTaken::Busy(error, Box::new(batch)));
        }
        let (ticket, answer) = Ticket::new();
        let submission = Submission {
            requests: batch.requests(),
            operation: Operation::Append {
                batch,
                digests,
                ticket: answer,
            },
            level,
            cost,
            submitted: self.journal.clock.monotonic(),
            session: session.cloned(),
        };
        self.intake.push(submission, by);
        Ok(ticket)
    }

    /// Queues an operation that costs nothing of the budget.
    fn push(&self, operation: Operation, level: Durability) {
        let submission = Submission {
            operation,
            level,
            cost: 0,
            requests: 1,
            submitted: self.journal.clock.monotonic(),
            session: None,
        };
        self.intake.push(submission, By::Driver);
    }

    fn refusal(&self) -> Option<AppendError> {
        if let Some(error) = self.journal.failure() {
            return Some(AppendError::JournalFailed(error));
        }
        self.journal
            .stopping
            .is_draining()
            .then_some(AppendError::Draining)
    }

    /// Commits the queue, then writes the clean seal.
    pub(crate) fn close(&self) -> Result<(), SyncError> {
        let rest = self.intake.take();
        let mut committer = self.committer.lock();
        committer.commit(rest);
        let ended = committer.close();
        drop(committer);
        if let Some(error) = self.journal.failure() {
            return Err(SyncError::JournalFailed(error));
        }
        let ends = match ended {
            true => Wanted::AtEnd,
            false => Wanted::WhenDue,
        };
        // The journal is sealed: without a checkpoint the next start reads it.
        self.indexer.work(self, ends);
        Ok(())
    }

    /// Leaves the segment that is being written, so that all safe records are in finished segments.
    pub(crate) fn leave_segment(&self) -> Awaited<Result<Position, SyncError>> {
        self.leave(false, Use::Growth)
    }

    /// Leaves the segment that is being written, twice. The sorter does not take the newest finished segment,
    /// so this way it reaches all records that are safe now.
    pub(crate) fn leave_to_sorter(&self) {
        for always in [false, true] {
            // Nobody waits for the answer: the sorter looks again.
            drop(self.leave(always, Use::Growth));
        }
    }

    /// Leaves the segment that is being written, for one of the reserve or a small one. The sorter can then
    /// take the segment left, whose dead bytes are enough to fill the reserve again.
    pub(crate) fn leave_on_reserve(&self) {
        drop(self.leave(true, Use::Leave));
    }

    fn leave(&self, always: bool, purpose: Use) -> Awaited<Result<Position, SyncError>> {
        self.ask(Barrier::Leave { always, purpose }, Durability::Durable)
    }

    pub(crate) fn barrier(&self, level: Durability) -> Awaited<Result<Position, SyncError>> {
        self.ask(Barrier::Plain, level)
    }

    fn ask(&self, barrier: Barrier, level: Durability) -> Awaited<Result<Position, SyncError>> {
        let (promise, awaited) = Promise::new();
        match self.journal.failure() {
            Some(error) => promise.keep(Err(SyncError::JournalFailed(error))),
            None => self.push(Operation::Barrier(barrier, promise), level),
        }
        awaited
    }

    /// The sync mode that holds for a log.
    fn mode(&self, log: Option<&Log>) -> SyncMode {
        log.and_then(|log| log.state.read().config.sync_mode)
            .unwrap_or(self.config.sync_mode)
    }

    /// Level of an append that names none: the strongest level that the sync modes of its logs ask for.
    fn level(&self, batch: &Batch) -> Durability {
        if !batch.cursors.is_empty() {
            // A cursor records finished work, so it must be as safe as a cursor committed alone.
            return Durability::Durable;
        }
        let named = batch
            .logs
            .iter()
            .map(|l| &l.log)
            .chain(batch.checks.iter().map(|c| &c.log));
        named
            .map(|name| self.mode(self.logs.by_name(name.as_str()).as_deref()))
            .map(|mode| mode.durability(batch.single))
            .max()
            .unwrap_or(Durability::Durable)
    }

    /// Visibility for a reader that names none: the visibility that matches a plain append of this log.
    pub(crate) fn visibility(
        &self,
        asked: Option<Visibility>,
        name: Option<&LogName>,
    ) -> Visibility {
        asked.unwrap_or_else(|| {
            let log = name.and_then(|name| self.logs.by_name(name.as_str()));
            self.mode(log.as_deref()).visibility()
        })
    }

    /// The tail of a log for a reader of this visibility.
    pub(crate) fn tail(&self, log: &Log, visibility: Visibility) -> Lsn {
        tail_at(log, visibility, self.journal.published(visibility))
    }

    /// The log, if it exists for a reader of this visibility.
    pub(crate) fn resolve(
        &self,
        target: &LogTarget,
        visibility: Visibility,
    ) -> Result<Arc<Log>, ReadError> {
        let published = self.journal.published(visibility);
        let unknown = || ReadError::LogNotFound {
            log: target.name.clone(),
        };
        let log = self
            .logs
            .by_name(target.name.as_str())
            .ok_or_else(unknown)?;
        if log.state.read().created_end > published {
            return Err(unknown());
        }
        match target.log_id {
            Some(expected) if expected != log.id => Err(ReadError::LogReplaced {
                log: target.name.clone(),
                expected,
                actual: log.id,
            }),
            _ => Ok(log),
        }
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
}

/// The tail of a log for a reader of this visibility to whom everything below `published` is visible.
pub(crate) fn tail_at(log: &Log, visibility: Visibility, published: Position) -> Lsn {
    let state = log.state.read();
    match visibility {
        Visibility::Accepted => state.accepted_tail(published),
        Visibility::Written | Visibility::Durable => state.tail(published),
    }
}
