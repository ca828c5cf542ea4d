//! The local engine: one journal in one directory.
//!
//! [`Core`] is all of it without threads, so that tests and simulations drive it step
//! by step; [`LocalEngine`] adds the threads and is what the service holds.

mod admin;
mod conditions;
mod cursors;
mod drive;
mod extras;
mod logs;
mod producers;
pub(crate) mod retention;
pub(crate) mod submit;
mod versions;

use std::collections::HashSet;
use std::io;
use std::sync::Arc;

pub(crate) use self::conditions::{Allowed, Checked, Creation, check, check_cursor};
use self::drive::{By, Intake};
pub(crate) use self::extras::{ExtrasImage, Mark, Missing};
pub(crate) use self::logs::{Buffered, Kept, Log, LogState, Logs, Standing, TrimBy};
pub(crate) use self::producers::{Before as ProducerBefore, Recall, Remembered};
use self::retention::Retainer;
use crate::archive::Archive;
use crate::backup::{self, Backups};
use crate::clock::Clock;
use crate::config::{Limits, StorageConfig};
use crate::directory;
use crate::disk::{Disk, DiskLock};
use crate::engine::{
    Backup, BoxFuture, DurabilityTruth, Fenced, LogEngine, LogStat, LogTarget, Page, Profile,
    ReadRequest, Scan, ScanRequest, SegmentInfo, Statistics, SyncTarget,
};
use crate::error::{
    AdminError, AppendError, BackupError, CursorError, FenceError, OpenError, ReadError, SyncError,
    TrimError, VerifyError,
};
use crate::ids::{LogName, Lsn, Name, Position, RecoveryEpoch};
use crate::index::Indexes;
use crate::indexer::{Indexer, Wanted};
use crate::journal::committer::{Committer, Operation, Submission};
use crate::journal::pool::Pool;
use crate::journal::{Answer, Journal};
use crate::metrics::Observer;
use crate::quarantine::Damages;
use crate::read::{self, OpenSegments};
use crate::record::{
    Batch, Cursor, CursorCommit, Durability, LogConfig, LogConfigChange, LogInfo, SyncMode,
    Visibility,
};
use crate::recovery::{self, RecoveryReport};
use crate::session::Session;
use crate::sorted::Sorter;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{JoinHandle, Mutex};
use crate::threads::{self, Workers};
use crate::ticket::{Promise, Ticket};
use crate::verify::online::{Mailbox, Told};
use crate::verify::pace::Stop;
use crate::verify::scrub::Scrub;
use crate::verify::{Control, Verification};
use crate::watch::Until;

/// What the indexing thread does, for whoever is told that it failed.
const INDEXING: &str = "writing an index or a checkpoint";

/// Why a request was not taken into the queue.
enum NotTaken {
    /// There is no room for it now.
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
    pub(crate) open_segments: OpenSegments,
    pub(crate) indexes: Indexes,
    pub(crate) store_id: u128,
    /// For each unclean start: the epoch that ended, and where what survived of it ends.
    pub(crate) history: Vec<(RecoveryEpoch, Position)>,
    pub(crate) followers: AtomicU64,
    pub(crate) quarantine_bytes: u64,
    committer: Mutex<Committer>,
    intake: Intake,
    pool: Arc<Pool>,
    pub(crate) indexer: Arc<Indexer>,
    pub(crate) backups: Arc<Backups>,
    truth: DurabilityTruth,
    /// Faults that were told of.
    pub(crate) told: Told,
    pub(crate) scrub: Scrub,
    pub(crate) retainer: Retainer,
    pub(crate) sorter: Sorter,
    /// Where what retention took is kept, if it is.
    pub(crate) archive: Option<Archive>,
    _lock: Box<dyn DiskLock>,
}

/// What a store is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    Serve,
    /// What is lost is accepted, so that everything goes on.
    AcceptLoss,
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

    /// The same, to serve or to accept what is lost; with an archive or without.
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
        let (lock, store) = directory::open(&*disk)?;
        let archive = match archive {
            Some(archive) => Some(Archive::open(archive, store.id)?),
            None => None,
        };
        let seams = (&*clock, &*observer);
        let mut recovered = match start {
            Start::Serve => recovery::recover(&disk, store, &config, seams)?,
            Start::AcceptLoss => recovery::recover_from_frames(&disk, store, &config, seams)?,
        };
        directory::complete(&*disk)?;
        if matches!(start, Start::AcceptLoss) {
            recovered
                .forget_indexes(&disk)
                .map_err(OpenError::io("removing indexes"))?;
            recovered.accept_loss();
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
        let core = Arc::new(Self {
            limits: config.limits(),
            config,
            disk,
            journal: begun.journal,
            logs: begun.logs,
            damages: begun.damages,
            open_segments,
            indexes: begun.indexes,
            store_id: store.id,
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
            _lock: lock,
        });
        Ok((core, report))
    }

    /// Where files wait for a new life.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Takes a request of a session into the queue, to be answered as its logs' sync modes say
    /// if it does not. If it is refused here, the session has ended, unless there is only no
    /// room for it now.
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
        let digests = submit::digests(&batch);
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
            operation: Operation::Append { batch, digests },
            level,
            answer: Answer::Ticket(answer),
            cost,
            submitted: self.journal.clock.monotonic(),
            session: session.cloned(),
        };
        self.intake.push(submission, by);
        Ok(ticket)
    }

    /// Queues what costs nothing of the budget.
    fn push(&self, operation: Operation, level: Durability, answer: Answer) {
        let submission = Submission {
            operation,
            level,
            answer,
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

    /// One turn without threads: writes all that is queued, then flushes if somebody
    /// waits for it.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn turn(&self) {
        self.committer.lock().commit(self.intake.take());
        if self.journal.wants_flush() {
            self.journal.flush();
        }
        self.index();
    }

    /// The write stage of a turn, without its flush.
    #[cfg(test)]
    pub(crate) fn write_in_turn(&self) {
        self.committer.lock().commit(self.intake.take());
    }

    /// Indexes what was sealed, without a thread.
    #[cfg(any(test, feature = "fuzzing"))]
    fn index(&self) {
        if let Err(error) = self.indexer.work(self, Wanted::WhenDue) {
            self.journal.fail(INDEXING, &error);
        }
    }

    /// What the passing of time does, without threads: flush, then mark.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn idle(&self) {
        self.journal.flush();
        self.committer.lock().mark();
        self.journal.flush();
    }

    /// Trims a log in a later turn.
    #[cfg(test)]
    pub(crate) fn trim_in_turn(
        &self,
        target: LogTarget,
        before: Lsn,
    ) -> crate::ticket::Awaited<Result<Lsn, TrimError>> {
        self.trim(target, before)
    }

    /// Creates a log in a later turn.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn create_in_turn(
        &self,
        name: LogName,
        config: LogConfig,
    ) -> crate::ticket::Awaited<Result<(), AdminError>> {
        self.administer(Operation::Create { name, config })
    }

    /// Takes a request of no session into the queue.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn enqueue(&self, batch: Batch, level: Durability) -> Ticket {
        self.accept(None, batch, Some(level), By::Driver)
    }

    /// One of a session.
    #[cfg(test)]
    pub(crate) fn enqueue_of(&self, session: &Session, batch: Batch, level: Durability) -> Ticket {
        self.accept(Some(session), batch, Some(level), By::Driver)
    }

    /// One that is to be answered as its logs' sync modes say.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn enqueue_by_mode(&self, session: Option<&Session>, batch: Batch) -> Ticket {
        self.accept(session, batch, None, By::Driver)
    }

    /// One step of the sorter, as its thread would do it. Tells whether there was one to do.
    #[cfg(test)]
    pub(crate) fn sort_in_turn(&self) -> io::Result<bool> {
        use crate::sorted::{Load, Of};
        let step = |of| self.sort_step(of, Load::AtRest, &mut |_| Ok(()));
        match step(Of::Segments).and_then(|done| Ok(done || step(Of::Runs)?)) {
            Ok(done) => Ok(done),
            Err(Stop::Stopped) => Ok(false),
            Err(Stop::Io(error)) => Err(error),
        }
    }

    /// Fills the pool, as its thread would.
    #[cfg(test)]
    pub(crate) fn pool_in_turn(&self) -> io::Result<()> {
        self.pool.fill()
    }

    /// Changes a log's settings in a later turn.
    #[cfg(test)]
    pub(crate) fn configure_in_turn(
        &self,
        name: LogName,
        change: impl Into<LogConfigChange>,
    ) -> crate::ticket::Awaited<Result<(), AdminError>> {
        let change = change.into();
        self.administer(Operation::Configure { name, change })
    }

    /// Waits, in a later turn, for everything before to be as safe.
    #[cfg(test)]
    pub(crate) fn sync_in_turn(
        &self,
        level: Durability,
    ) -> crate::ticket::Awaited<Result<Position, SyncError>> {
        self.barrier(level)
    }

    /// Deletes a log in a later turn.
    #[cfg(test)]
    pub(crate) fn delete_in_turn(
        &self,
        target: LogTarget,
    ) -> crate::ticket::Awaited<Result<(), AdminError>> {
        self.administer(Operation::Delete(target))
    }

    /// Commits what still queues, then writes the clean seal.
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
        if let Err(error) = self.indexer.work(self, ends) {
            tracing::warn!(%error, "no checkpoint was written; the next start takes longer");
        }
        Ok(())
    }

    /// Leaves the segment that is being written: what is safe is in finished ones then.
    pub(crate) fn leave_segment(&self) -> crate::ticket::Awaited<Result<Position, SyncError>> {
        self.ask(Operation::Leave, Durability::Durable)
    }

    pub(crate) fn barrier(
        &self,
        level: Durability,
    ) -> crate::ticket::Awaited<Result<Position, SyncError>> {
        self.ask(Operation::Barrier, level)
    }

    fn ask(
        &self,
        operation: Operation,
        level: Durability,
    ) -> crate::ticket::Awaited<Result<Position, SyncError>> {
        let (promise, awaited) = Promise::new();
        match self.journal.failure() {
            Some(error) => promise.keep(Err(SyncError::JournalFailed(error))),
            None => self.push(operation, level, Answer::Sync(promise)),
        }
        awaited
    }

    /// The sync mode that holds for a log.
    fn mode(&self, log: Option<&Log>) -> SyncMode {
        log.and_then(|log| log.state.read().config.sync_mode)
            .unwrap_or(self.config.sync_mode)
    }

    /// What an append is answered after that does not say: the strongest that one of
    /// its logs asks for.
    fn level(&self, batch: &Batch) -> Durability {
        if !batch.cursors.is_empty() {
            // A cursor says what is done: that is to be as safe as by itself.
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

    /// What a reader sees who does not say: what a plain append of this log promises.
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

    /// The log, if a reader of this visibility may know of it.
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

    /// Where what was written in an epoch stopped surviving; `None` for the current.
    pub(crate) fn survived(&self, epoch: RecoveryEpoch) -> Option<Position> {
        self.history
            .iter()
            .find(|(ended, _)| *ended >= epoch)
            .map(|(_, end)| *end)
    }
}

/// The tail of a log for a reader of this visibility who sees all below `published`.
pub(crate) fn tail_at(log: &Log, visibility: Visibility, published: Position) -> Lsn {
    let state = log.state.read();
    match visibility {
        Visibility::Accepted => state.accepted_tail(published),
        Visibility::Written | Visibility::Durable => state.tail(published),
    }
}

/// The local engine: one journal in one directory.
pub struct LocalEngine {
    pub(crate) core: Arc<Core>,
    workers: Arc<Workers>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Ended before those that it waits for.
    retention: Mutex<Option<JoinHandle<()>>>,
    verifying: Mutex<Vec<Verifying>>,
}

/// A verification that runs: what stops it, what it told, its thread.
type Verifying = (Arc<Control>, Arc<Mailbox>, JoinHandle<()>);

/// Verifications that may run at a time: each has a thread and reads the disk.
const VERIFICATIONS: usize = 4;

impl LocalEngine {
    /// Opens the store on `disk`, creating it if there is none, and recovers it.
    ///
    /// # Errors
    /// If another process has it, if it is not a store, or not one this version can
    /// read, or if the file system says no. Damage is no error, unless `on_damage` says
    /// so: see the report.
    pub fn open(
        disk: Arc<dyn Disk>,
        config: StorageConfig,
        clock: Arc<dyn Clock>,
        observer: Arc<dyn Observer>,
    ) -> Result<(Arc<Self>, RecoveryReport), OpenError> {
        Self::open_with_archive(disk, None, config, clock, observer)
    }

    /// The same, and what retention takes is kept in `archive`, if there is one.
    ///
    /// # Errors
    /// Also if the archive cannot be used, or another process writes there for this store.
    pub fn open_with_archive(
        disk: Arc<dyn Disk>,
        archive: Option<Arc<dyn Disk>>,
        config: StorageConfig,
        clock: Arc<dyn Clock>,
        observer: Arc<dyn Observer>,
    ) -> Result<(Arc<Self>, RecoveryReport), OpenError> {
        let disks = (disk, archive);
        let (core, report) = Core::open_as(Start::Serve, disks, config, clock, observer)?;
        let engine = Self {
            workers: Arc::default(),
            threads: Mutex::default(),
            retention: Mutex::default(),
            verifying: Mutex::default(),
            core,
        };
        engine
            .start()
            .map_err(OpenError::io("starting the engine's threads"))?;
        Ok((Arc::new(engine), report))
    }

    fn start(&self) -> io::Result<()> {
        let mut handles = self.threads.lock();
        handles.extend(self.workers.start(self.core.config.reader_threads)?);
        for index in 0..drive::DRIVERS {
            let core = Arc::clone(&self.core);
            handles.push(threads::start(&format!("commit-{index}"), move || {
                drive::drive(&core)
            })?);
        }
        let core = Arc::clone(&self.core);
        handles.push(threads::start("index", move || {
            let run = std::panic::AssertUnwindSafe(|| core.indexer.run(&core));
            let failed = match std::panic::catch_unwind(run) {
                Ok(result) => result.err(),
                Err(_) => Some(io::Error::other("its thread panicked")),
            };
            if let Some(error) = failed {
                core.journal.fail(INDEXING, &error);
            }
        })?);
        let core = Arc::clone(&self.core);
        handles.push(threads::start("pool", move || {
            if let Err(error) = core.pool.keep_filled() {
                core.journal.fail("making a segment ready", &error);
            }
        })?);
        if self.core.config.scrub_bytes_per_second > 0 {
            let core = Arc::clone(&self.core);
            handles.push(threads::start_behind("scrub", move || core.scrub())?);
        }
        let core = Arc::clone(&self.core);
        *self.retention.lock() = Some(threads::start("retention", move || core.retain())?);
        if self.core.config.sorter_enabled {
            let core = Arc::clone(&self.core);
            handles.push(threads::start_behind("sort", move || {
                let run = std::panic::AssertUnwindSafe(|| core.sort());
                if std::panic::catch_unwind(run).is_err() {
                    let error = io::Error::other("its thread panicked");
                    core.journal.fail("sorting", &error);
                }
            })?);
        }
        Ok(())
    }
}

impl Drop for LocalEngine {
    /// Stops the threads. Without a [`LogEngine::drain`] before, the next start counts
    /// as unclean, but everyone who waits is answered.
    fn drop(&mut self) {
        self.core.journal.stopping.drain();
        self.core.retainer.control.stop();
        let retention = self.retention.lock().take();
        if retention.is_some_and(|handle| handle.join().is_err()) {
            tracing::error!("retention had panicked");
        }
        self.core.pool.stop();
        self.core.intake.stop();
        self.core.indexer.stop();
        self.core.scrub.control.stop();
        self.core.sorter.control.stop();
        self.workers.stop();
        for (control, _, handle) in self.verifying.lock().drain(..) {
            control.stop();
            if handle.join().is_err() {
                tracing::error!("a verification had panicked");
            }
        }
        for handle in self.threads.lock().drain(..) {
            if handle.join().is_err() {
                tracing::error!("an engine thread had panicked");
            }
        }
    }
}

impl LogEngine for LocalEngine {
    fn profile(&self) -> Profile {
        Profile {
            kind: "local",
            strongest: Durability::Durable,
            ordered_across_logs: true,
            limits: self.core.limits,
            store_id: self.core.store_id,
            recovery_epoch: self.core.journal.recovery_epoch,
        }
    }

    fn submit(
        &self,
        session: Option<&Session>,
        batch: Batch,
        durability: Option<Durability>,
    ) -> Ticket {
        let by = By::Driver;
        self.core.accept(session, batch, durability, by)
    }

    fn gather(
        &self,
        session: Option<&Session>,
        batch: Batch,
        durability: Option<Durability>,
    ) -> Ticket {
        let by = By::Caller;
        self.core.accept(session, batch, durability, by)
    }

    fn join(&self, batch: &mut Batch, next: Batch) -> Result<(), Batch> {
        self.core.join(batch, next)
    }

    fn write_gathered(&self) {
        self.core.write_gathered();
    }

    fn sync(
        &self,
        target: SyncTarget,
        log: Option<&LogName>,
    ) -> BoxFuture<'_, Result<Position, SyncError>> {
        if let Some(log) = log
            && self.core.logs.by_name(log.as_str()).is_none()
        {
            let log = log.clone();
            return Box::pin(async move { Err(SyncError::LogNotFound { log }) });
        }
        Box::pin(self.core.barrier(match target {
            SyncTarget::Os => Durability::Written,
            SyncTarget::Device => Durability::Durable,
        }))
    }

    fn read(&self, request: ReadRequest) -> BoxFuture<'_, Result<Page, ReadError>> {
        let core = Arc::clone(&self.core);
        let near = read::near(&request);
        Box::pin(read::near_or_far(&self.workers, near, move |reach| {
            read::page(&core, &request, reach)
        }))
    }

    fn tail_beyond(
        &self,
        target: LogTarget,
        lsn: Lsn,
        visibility: Option<Visibility>,
    ) -> BoxFuture<'_, Result<(), ReadError>> {
        let visibility = self.core.visibility(visibility, Some(&target.name));
        let log = match self.core.resolve(&target, visibility) {
            Ok(log) => log,
            Err(error) => return Box::pin(async move { Err(error) }),
        };
        let core = Arc::clone(&self.core);
        let stopping: Arc<dyn crate::watch::Watched> = Arc::clone(&core.journal.stopping) as _;
        Box::pin(Until::new(
            vec![Arc::clone(&log) as _, stopping],
            visibility,
            move || read::tail_is_beyond(&core, &log, lsn, visibility),
        ))
    }

    fn scan(&self, request: ScanRequest) -> Result<Box<dyn Scan>, ReadError> {
        read::scan::begin(&self.core, &self.workers, request)
    }

    fn stat(
        &self,
        target: LogTarget,
        visibility: Option<Visibility>,
        of_epoch: Option<RecoveryEpoch>,
    ) -> Result<LogStat, ReadError> {
        let visibility = self.core.visibility(visibility, Some(&target.name));
        let log = self.core.resolve(&target, visibility)?;
        if let Some(error) = self
            .core
            .journal
            .failure()
            .filter(|_| visibility != Visibility::Durable)
        {
            return Err(ReadError::JournalFailed(error));
        }
        let info = log.info(
            self.core.tail(&log, visibility),
            self.core.journal.durable(),
            self.core.journal.published(visibility),
        );
        let survived_position = of_epoch.and_then(|epoch| self.core.survived(epoch));
        Ok(LogStat {
            info,
            survived_position,
        })
    }

    fn create_log(
        &self,
        name: LogName,
        config: LogConfig,
    ) -> BoxFuture<'_, Result<LogInfo, AdminError>> {
        Box::pin(self.core.create_log(name, config))
    }

    fn update_log(
        &self,
        name: LogName,
        change: LogConfigChange,
    ) -> BoxFuture<'_, Result<LogInfo, AdminError>> {
        Box::pin(self.core.update_log(name, change))
    }

    fn delete_log(&self, log: LogTarget) -> BoxFuture<'_, Result<(), AdminError>> {
        Box::pin(self.core.administer(Operation::Delete(log)))
    }

    fn trim(&self, log: LogTarget, before: Lsn) -> BoxFuture<'_, Result<Lsn, TrimError>> {
        Box::pin(self.core.trim(log, before))
    }

    fn fence(
        &self,
        log: LogTarget,
        epoch: Option<u64>,
    ) -> BoxFuture<'_, Result<Fenced, FenceError>> {
        Box::pin(self.core.fence(log, epoch))
    }

    fn commit_cursor(&self, commit: CursorCommit) -> BoxFuture<'_, Result<Cursor, CursorError>> {
        Box::pin(self.core.commit_cursor(commit))
    }

    fn delete_cursor(
        &self,
        log: LogTarget,
        cursor: Name,
    ) -> BoxFuture<'_, Result<(), CursorError>> {
        Box::pin(self.core.delete_cursor(log, cursor))
    }

    fn cursor(&self, log: LogTarget, cursor: &Name) -> Result<Cursor, CursorError> {
        self.core.cursor(&log, cursor)
    }

    fn list_cursors(
        &self,
        log: LogTarget,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<Cursor>, CursorError> {
        self.core.list_cursors(&log, after, limit)
    }

    fn list_logs(&self, prefix: &str, after: Option<&str>, limit: usize) -> Vec<LogInfo> {
        self.core.list_logs(prefix, after, limit)
    }

    fn statistics(&self) -> Statistics {
        self.core.statistics()
    }

    fn segments(&self) -> Vec<SegmentInfo> {
        self.core.segments()
    }

    fn backup(&self, known: HashSet<u128>) -> BoxFuture<'_, Result<Box<dyn Backup>, BackupError>> {
        Box::pin(backup::begin(&self.core, &self.workers, known))
    }

    fn describe_segments(
        &self,
        after: Option<Position>,
        limit: usize,
    ) -> BoxFuture<'_, Vec<SegmentInfo>> {
        let core = Arc::clone(&self.core);
        Box::pin(
            self.workers
                .run(move || core.describe_segments(after, limit)),
        )
    }

    fn verify(
        &self,
        segment: Option<u64>,
        max_bytes_per_second: u64,
    ) -> Result<Verification, VerifyError> {
        let only = match segment {
            None => None,
            Some(id) => Some(self.core.files_of(id)?),
        };
        let mut verifying = self.verifying.lock();
        verifying.retain(|(_, mailbox, _)| !mailbox.has_ended());
        if verifying.len() >= VERIFICATIONS {
            return Err(VerifyError::Busy {
                running: verifying.len(),
            });
        }
        let control = Arc::new(Control::new(max_bytes_per_second));
        let mailbox = Arc::new(Mailbox::default());
        let verification = Verification {
            control: Arc::clone(&control),
            mailbox: Arc::clone(&mailbox),
        };
        let (core, steered) = (Arc::clone(&self.core), Arc::clone(&control));
        let told = Arc::clone(&mailbox);
        let run = move || {
            let check = std::panic::AssertUnwindSafe(|| {
                core.verify(only, &steered, &mut |progress| mailbox.say(progress))
            });
            mailbox.end(match std::panic::catch_unwind(check) {
                Ok(Ok(()) | Err(Stop::Stopped)) => Ok(()),
                Ok(Err(Stop::Io(error))) => Err(error),
                Err(_) => Err(io::Error::other("the verification panicked; this is a bug")),
            });
        };
        let handle = threads::start("verify", run).map_err(VerifyError::Io)?;
        verifying.push((control, told, handle));
        Ok(verification)
    }

    fn durability_truth(&self) -> DurabilityTruth {
        self.core.truth.clone()
    }

    fn failed(&self) -> BoxFuture<'_, Arc<io::Error>> {
        let journal = Arc::clone(&self.core.journal);
        let stopping: Arc<dyn crate::watch::Watched> = Arc::clone(&journal.stopping) as _;
        let failure = move || journal.failure();
        Box::pin(Until::new(vec![stopping], Visibility::Durable, failure))
    }

    fn drain(&self) -> BoxFuture<'_, Result<(), SyncError>> {
        self.core.journal.stopping.drain();
        let core = Arc::clone(&self.core);
        Box::pin(async move {
            core.barrier(Durability::Durable).await?;
            self.workers.run(move || core.close()).await
        })
    }
}
