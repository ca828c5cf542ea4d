//! The local engine: one journal in one directory.
//!
//! [`Core`] is the engine without threads, so that tests and simulations drive it step by step.
//! [`LocalEngine`] adds the threads; the service holds it.

mod admin;
mod callers;
pub(crate) mod copy;
mod cursors;
mod drive;
pub(crate) mod expiry_clock;
mod guard;
#[cfg(any(test, feature = "fuzzing"))]
mod in_turn;
pub(crate) mod local;
pub(crate) mod repair;
mod replica;
pub(crate) mod submit;

use std::ops::Deref;
use std::sync::Arc;

use self::drive::Intake;
use crate::api::config::{Limits, StorageConfig};
use crate::api::error::{AppendError, OpenError, SyncError};
use crate::api::record::{Batch, Durability};
use crate::api::session::Session;
use crate::api::ticket::Ticket;
use crate::base::bounds;
use crate::base::clock::Clock;
use crate::base::ids::LogName;
use crate::base::metrics::Observer;
use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::disk::directory;
use crate::disk::held_files::Backups;
use crate::disk::{Disk, DiskLock, FileSystem};
pub use crate::engine::local::LocalEngine;
use crate::format::digest::Secret;
use crate::journal::committer::{Committer, Operation, Submission};
use crate::journal::inbox::Inbox;
use crate::journal::pool::Pool;
use crate::read::OpenSegments;
use crate::read::held_back::Unusable;
use crate::read::store::Store;
use crate::recovery::{self, Purpose, RecoveryReport};
use crate::upkeep::archive::Archive;
use crate::upkeep::indexer::{Indexer, Wanted};
use crate::upkeep::retention::Retainer;
use crate::upkeep::sorter::Sorter;
use crate::upkeep::verify::online::Verifier;
use crate::upkeep::verify::scrub::Scrubber;

/// The local engine without its threads.
pub(crate) struct Core {
    pub(crate) store: Arc<Store>,
    pub(crate) limits: Limits,
    pub(crate) quarantine_bytes: u64,
    committer: Mutex<Committer>,
    intake: Arc<Intake>,
    pub(crate) inbox: Inbox,
    pub(crate) pool: Arc<Pool>,
    pub(crate) indexer: Arc<Indexer>,
    /// Keys the digests of producers' batches.
    pub(crate) secret: Secret,
    pub(crate) verifier: Arc<Verifier>,
    pub(crate) scrubber: Scrubber,
    pub(crate) retainer: Retainer,
    pub(crate) sorter: Sorter,
    /// As it was when the store was opened.
    pub(crate) file_system: FileSystem,
    lock: Box<dyn DiskLock>,
}

/// The engine is its store, and the parts that change it.
impl Deref for Core {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.store
    }
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
        #[cfg(any(test, feature = "known-bad"))]
        let disk = crate::disk::known_bad::on(disk);
        config.check()?;
        config.sync_interval = config.sync_interval.min(drive::MAX_DELAY);
        config.marker_delay = config.marker_delay.min(drive::MAX_DELAY);
        let started = clock.monotonic();
        let (lock, store) = directory::open(&*disk, config.create_store)?;
        let archive = match archive {
            Some(archive) => Some(Archive::open(archive, store.id)?),
            None => None,
        };
        if let Some(cipher) = config.cipher.as_ref().filter(|_| start == Start::Serve) {
            cipher.load().map_err(OpenError::Keys)?;
        }
        // A body of the largest size that the settings allow does not count as damage.
        bounds::allow_body(config.largest_body());
        let seams = (&*clock, &*observer);
        let mut recovered = match start {
            Start::Serve | Start::ResetClock => {
                recovery::recover(&disk, store, &config, seams, Purpose::Serve)?
            }
            Start::AcceptLoss => {
                recovery::recover_from_frames(&disk, store, &config, seams, Purpose::Serve)?
            }
        };
        recovered.check_room()?;
        if matches!(start, Start::Serve) {
            recovered.check_keys(&*disk, config.cipher.as_ref())?;
        }
        if let Some(cipher) = config.cipher.as_ref().filter(|_| start == Start::Serve) {
            cipher
                .begin(recovered.next_base())
                .map_err(OpenError::io("making the first keys"))?;
        }
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
        let file_system = disk.file_system();
        let open_segments = OpenSegments::new(
            Arc::clone(&disk),
            config.read_strategy,
            config.max_open_segments,
        );
        let mut report = begun.report;
        report.duration = begun.journal.clock.monotonic().duration_since(started);
        let backups = Backups::new(Arc::clone(&disk));
        backups.take_over(&begun.left);
        let store = Arc::new(Store {
            config,
            disk,
            journal: begun.journal,
            logs: begun.logs,
            damages: begun.damages,
            held_back: begun.held_back,
            open_segments,
            indexes: begun.indexes,
            store_id: store.id,
            history: begun.history,
            followers: AtomicU64::new(0),
            indexing: begun.indexing,
            held_files: backups,
            made: Mutex::default(),
            unusable: Unusable::default(),
        });
        let indexer = Arc::new(Indexer::new(&store));
        let verifier = Verifier::new(&store);
        let intake = Arc::new(Intake::default());
        let inbox = Inbox::new(&store.journal, Arc::clone(&intake) as _);
        let sorter = Sorter::new(
            &store,
            Arc::clone(&begun.pool),
            inbox.clone(),
            Arc::clone(&indexer),
            archive,
        );
        let core = Arc::new(Self {
            limits: store.config.limits(),
            secret: begun.secret,
            quarantine_bytes: begun.quarantine_bytes,
            committer: Mutex::new(begun.committer),
            intake,
            pool: begun.pool,
            indexer,
            retainer: Retainer::new(&store, inbox.clone()),
            scrubber: Scrubber::new(Arc::clone(&verifier)),
            verifier,
            inbox,
            sorter,
            store,
            file_system,
            lock,
        });
        for why in &core.held_back {
            tracing::error!("{why}; until then no checkpoint is written and nothing is sorted");
        }
        Ok((core, report))
    }

    /// Takes a request, perhaps of a session, into the queue. Without a `level`, the sync modes of its logs
    /// decide when it is answered. A refusal here ends the session, unless only room is missing now. `gathered`: the
    /// caller calls [`Core::write_gathered`] next.
    fn accept(
        &self,
        session: Option<&Session>,
        batch: Batch,
        level: Option<Durability>,
        gathered: bool,
    ) -> Ticket {
        if session.is_some_and(Session::has_ended_at_intake) {
            return Ticket::refused(AppendError::SessionEnded);
        }
        let level = level.unwrap_or_else(|| self.level(&batch));
        let cost = match self.cost(&batch, level) {
            Ok(cost) => cost,
            Err(error) => {
                if let Some(session) = session {
                    session.end_at_intake();
                }
                return Ticket::refused(error);
            }
        };
        if let Some(error) = self.journal.replica_is_behind() {
            return Ticket::turned_away(error, Box::new(batch));
        }
        let inflight = self.journal.inflight.fetch_add(cost, Ordering::SeqCst) + cost;
        let limit = self.limits.max_inflight_bytes;
        // A request larger than the whole budget passes when it is alone.
        if inflight > limit && inflight > cost {
            self.journal.inflight.fetch_sub(cost, Ordering::SeqCst);
            let error = AppendError::Busy {
                inflight: inflight - cost,
                limit,
            };
            return Ticket::turned_away(error, Box::new(batch));
        }
        let (ticket, answer) = Ticket::new();
        let submission = Submission {
            requests: batch.requests(),
            operation: Operation::Append {
                digests: submit::digests(&batch, &self.secret),
                batch,
                ticket: answer,
            },
            level,
            cost,
            submitted: self.journal.clock.monotonic(),
            session: session.cloned(),
            gathered,
        };
        self.inbox.hand_over(submission);
        ticket
    }

    fn max_future_micros(&self) -> i64 {
        i64::try_from(self.config.max_timestamp_ahead.as_micros()).unwrap_or(i64::MAX)
    }

    /// As [`Append::join`].
    ///
    /// [`Append::join`]: crate::api::engine::Append::join
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

    /// Checks a request. Returns its cost to the budget of requests in flight, in bytes.
    fn cost(&self, batch: &Batch, level: Durability) -> Result<u64, AppendError> {
        let now = self.journal.clock.now();
        let cost = submit::validate(batch, &self.limits, now, self.max_future_micros())?;
        let refusal = self.journal.refusal();
        let refusal = refusal.or_else(|| self.refuses_level(level));
        refusal.map_or(Ok(cost), Err)
    }

    /// Why requests of this level are refused, if they are.
    pub(crate) fn refuses_level(&self, level: Durability) -> Option<AppendError> {
        match self.journal.replication() {
            None if level < Durability::Replicated => None,
            None => Some(AppendError::NotSupported(level)),
            Some(replication) => replication.unreachable(level),
        }
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
        self.indexer.work(ends);
        Ok(())
    }

    /// Closes an engine that was opened for one change.
    pub(crate) fn close_opened(&self) -> Result<(), OpenError> {
        let failed = |error: SyncError| std::io::Error::other(error.to_string());
        self.close()
            .map_err(|error| OpenError::io("closing the store")(failed(error)))
    }

    /// Level of an append that names none: the strongest level that the sync modes of its logs ask for.
    fn level(&self, batch: &Batch) -> Durability {
        // A cursor records finished work, so it must be as safe as a cursor committed alone.
        let least = (!batch.cursors.is_empty()).then_some(Durability::Durable);
        let named = batch
            .logs
            .iter()
            .map(|l| &l.log)
            .chain(batch.checks.iter().map(|c| &c.log));
        named
            .map(|name| self.mode(self.logs.by_name(name.as_str()).as_deref()))
            .map(|mode| mode.durability(batch.single))
            .chain(least)
            .max()
            .unwrap_or(Durability::Durable)
    }
}
