//! The engine with its threads, as the service holds it.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use super::drive;
use super::{Core, Start};
use crate::api::config::StorageConfig;
use crate::api::content::ContentDigest;
use crate::api::engine::{
    Administer, Append, Backup, BoxFuture, DurabilityTruth, EngineKind, Fenced, LogStat, LogTarget,
    Operate, Page, Profile, ReadLogs, ReadRequest, Scan, ScanRequest, SegmentInfo, Statistics,
    SyncTarget,
};
use crate::api::error::{
    AdminError, BackupError, CursorError, FenceError, OpenError, ReadError, SyncError, TrimError,
    VerifyError,
};
use crate::api::pace::Control;
use crate::api::pace::Stop;
use crate::api::quota::{Quota, QuotaError, QuotaUse};
use crate::api::record::{
    Batch, CursorCommit, Durability, LogConfig, LogConfigChange, LogInfo, NamedCursor,
    ProducerInfo, Visibility,
};
use crate::api::replica::Unreplicated;
use crate::api::session::Session;
use crate::api::ticket::Ticket;
use crate::api::verification::{Reports, Verification};
use crate::api::watch::Until;
use crate::base::clock::Clock;
use crate::base::ids::{LogName, Lsn, Name, Position, RecoveryEpoch};
use crate::base::metrics::{Observer, Worker};
use crate::base::sync::{JoinHandle, Mutex};
use crate::base::threads;
use crate::base::threads::Workers;
use crate::disk::Disk;
use crate::journal::committer::AdminChange;
use crate::journal::vital;
use crate::read;
use crate::read::scan;
use crate::recovery::RecoveryReport;
use crate::tools::backup;

/// The local engine: one journal in one directory.
pub struct LocalEngine {
    pub(crate) core: Arc<Core>,
    pub(super) workers: Arc<Workers>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Ended before the threads that it waits for.
    retention: Mutex<Option<JoinHandle<()>>>,
    verifying: Mutex<Vec<Verifying>>,
    /// Stops the checks of the data directory.
    guarding: Arc<Control>,
}

/// A running verification: its control, the reports of its findings, its thread.
type Verifying = (Arc<Control>, Arc<Reports>, JoinHandle<()>);

/// Verifications that may run at a time: each has a thread and reads the disk.
const VERIFICATIONS: usize = 4;

impl LocalEngine {
    /// Opens the store on `disk`, creating it if there is none, and recovers it.
    ///
    /// # Errors
    /// If another process has the store, if the directory holds no store that this version can read, or if the
    /// file system returns an error. Damage is no error, unless `on_damage` says so: see the report.
    pub fn open(
        disk: Arc<dyn Disk>,
        config: StorageConfig,
        clock: Arc<dyn Clock>,
        observer: Arc<dyn Observer>,
    ) -> Result<(Arc<Self>, RecoveryReport), OpenError> {
        Self::open_with_archive(disk, None, config, clock, observer)
    }

    /// As [`LocalEngine::open`]; keeps expired records in `archive`, if there is one.
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
            guarding: Arc::default(),
            core,
        };
        engine
            .start()
            .map_err(OpenError::io("starting the engine's threads"))?;
        Ok((Arc::new(engine), report))
    }

    fn start(&self) -> io::Result<()> {
        let journal = &self.core.journal;
        let vital = |worker: Worker, name: &str, body: fn(&Arc<Core>)| {
            let core = Arc::clone(&self.core);
            vital::start(journal, worker, name, move || body(&core))
        };
        let mut handles = self.threads.lock();
        let readers = self.core.config.reader_threads;
        handles.extend(self.workers.start(readers, &journal.observer)?);
        for index in 0..drive::DRIVERS {
            let name = format!("commit-{index}");
            handles.push(vital(Worker::Commit, &name, drive::drive)?);
        }
        handles.push(vital(Worker::Index, "index", |core| core.indexer.run())?);
        handles.push(vital(Worker::Pool, "pool", |core| {
            if let Err(error) = core.pool.keep_filled() {
                core.journal.fail("making a segment ready", &error);
            }
        })?);
        if self.core.config.scrub_bytes_per_second > 0 {
            handles.push(vital(Worker::Scrub, "scrub", |core| core.scrubber.scrub())?);
        }
        let (core, control) = (Arc::clone(&self.core), Arc::clone(&self.guarding));
        let guard = move || core.guard(&control);
        handles.push(vital::start(journal, Worker::Guard, "guard", guard)?);
        let retention = vital(Worker::Retention, "retention", |core| {
            core.retainer.retain()
        })?;
        *self.retention.lock() = Some(retention);
        if self.core.config.sorter_enabled {
            handles.push(vital(Worker::Sort, "sort", |core| core.sorter.sort())?);
        }
        Ok(())
    }
}

impl Drop for LocalEngine {
    /// Stops the threads. Without an earlier [`Operate::drain`] the next start counts as unclean, but every
    /// waiting call is answered.
    fn drop(&mut self) {
        self.core.journal.stopping.drain();
        self.core.retainer.control.stop();
        // Panics are caught on the threads, and reported there.
        if let Some(retention) = self.retention.lock().take() {
            let _ = retention.join();
        }
        self.guarding.stop();
        self.core.pool.stop();
        self.core.intake.stop();
        self.core.indexing.stop();
        self.core.scrubber.control.stop();
        self.core.sorter.control.stop();
        self.workers.stop();
        for (control, _, handle) in self.verifying.lock().drain(..) {
            control.stop();
            let _ = handle.join();
        }
        for handle in self.threads.lock().drain(..) {
            let _ = handle.join();
        }
        // Requests that wait for the replica wait in vain.
        self.core.journal.stop_replication(Unreplicated::BucketDown);
    }
}

impl Append for LocalEngine {
    fn submit(
        &self,
        session: Option<&Session>,
        batch: Batch,
        durability: Option<Durability>,
    ) -> Ticket {
        self.core.accept(session, batch, durability, false)
    }

    fn gather(
        &self,
        session: Option<&Session>,
        batch: Batch,
        durability: Option<Durability>,
    ) -> Ticket {
        self.core.accept(session, batch, durability, true)
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
        let level = match target {
            SyncTarget::Os => Durability::Written,
            SyncTarget::Device => Durability::Durable,
            SyncTarget::Replica => Durability::Replicated,
        };
        match self.core.refuses_level(level) {
            Some(error) => Box::pin(async move { Err(error.into()) }),
            None => Box::pin(self.core.inbox.barrier(level)),
        }
    }
}

impl ReadLogs for LocalEngine {
    fn read(&self, request: ReadRequest) -> BoxFuture<'_, Result<Page, ReadError>> {
        let store = Arc::clone(&self.core.store);
        let near = read::near(&request);
        Box::pin(read::near_or_far(&self.workers, near, move |reach| {
            read::page(&store, &request, reach)
        }))
    }

    fn tail_beyond(
        &self,
        target: LogTarget,
        lsn: Lsn,
        visibility: Option<Visibility>,
    ) -> BoxFuture<'_, Result<(), ReadError>> {
        let seen = self.core.visibility(visibility, Some(&target.name));
        let found = seen.and_then(|seen| Ok((self.core.resolve(&target, seen)?, seen)));
        let (log, visibility) = match found {
            Ok(found) => found,
            Err(error) => return Box::pin(async move { Err(error) }),
        };
        let core = Arc::clone(&self.core);
        let stopping: Arc<dyn crate::api::watch::Watched> = Arc::clone(&core.journal.stopping) as _;
        Box::pin(Until::new(
            vec![Arc::clone(&log) as _, stopping],
            visibility,
            move || read::tail_is_beyond(&core, &log, lsn, visibility),
        ))
    }

    fn scan(&self, request: ScanRequest) -> BoxFuture<'_, Result<Box<dyn Scan>, ReadError>> {
        Box::pin(scan::begin_without_blocking(
            &self.core.store,
            &self.workers,
            request,
        ))
    }

    fn stat(
        &self,
        target: LogTarget,
        visibility: Option<Visibility>,
        of_epoch: Option<RecoveryEpoch>,
    ) -> BoxFuture<'_, Result<LogStat, ReadError>> {
        Box::pin(async move { self.core.stat(&target, visibility, of_epoch) })
    }
}

impl Administer for LocalEngine {
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
        Box::pin(self.core.inbox.administer(AdminChange::Delete(log)))
    }

    fn list_logs(
        &self,
        prefix: String,
        after: Option<String>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<LogInfo>, ReadError>> {
        Box::pin(async move {
            let logs = self.core.list_logs(&prefix, after.as_deref(), limit);
            self.core.check_lease()?;
            Ok(logs)
        })
    }

    fn trim(&self, log: LogTarget, before: Lsn) -> BoxFuture<'_, Result<Lsn, TrimError>> {
        if !self.core.is_far_trim(&log, before) {
            return Box::pin(self.core.trim(log, before, None));
        }
        let (core, target) = (Arc::clone(&self.core), log.clone());
        let bytes = self.workers.run(move || core.bytes_before(&target, before));
        Box::pin(async move { self.core.trim(log, before, bytes.await).await })
    }

    fn fence(
        &self,
        log: LogTarget,
        epoch: Option<u64>,
    ) -> BoxFuture<'_, Result<Fenced, FenceError>> {
        Box::pin(self.core.fence(log, epoch))
    }

    fn commit_cursor(
        &self,
        commit: CursorCommit,
    ) -> BoxFuture<'_, Result<NamedCursor, CursorError>> {
        Box::pin(self.core.commit_cursor(commit))
    }

    fn delete_cursor(
        &self,
        log: LogTarget,
        cursor: Name,
    ) -> BoxFuture<'_, Result<(), CursorError>> {
        Box::pin(self.core.delete_cursor(log, cursor))
    }

    fn cursor(
        &self,
        log: LogTarget,
        cursor: Name,
    ) -> BoxFuture<'_, Result<NamedCursor, CursorError>> {
        Box::pin(async move { self.core.cursor(&log, &cursor) })
    }

    fn list_cursors(
        &self,
        log: LogTarget,
        after: Option<String>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<NamedCursor>, CursorError>> {
        Box::pin(async move { self.core.list_cursors(&log, after.as_deref(), limit) })
    }

    fn list_producers(
        &self,
        log: LogTarget,
        after: Option<String>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<ProducerInfo>, ReadError>> {
        Box::pin(async move {
            let producers = self.core.list_producers(log, after, limit).await;
            self.core.check_lease()?;
            producers
        })
    }

    fn forget_producer(
        &self,
        log: LogTarget,
        producer: Name,
    ) -> BoxFuture<'_, Result<(), AdminError>> {
        Box::pin(self.core.forget_producer(log, producer))
    }
}

impl Operate for LocalEngine {
    fn profile(&self) -> Profile {
        Profile {
            kind: EngineKind::Local,
            limits: self.core.limits,
            store_id: self.core.store_id,
            recovery_epoch: self.core.journal.recovery_epoch,
        }
    }

    fn statistics(&self) -> Statistics {
        self.core.statistics()
    }

    fn set_quotas(&self, quotas: Vec<Quota>) -> BoxFuture<'_, Result<Vec<QuotaUse>, QuotaError>> {
        let core = Arc::clone(&self.core);
        Box::pin(self.workers.run(move || core.set_quotas(quotas)))
    }

    fn segments(&self) -> Vec<SegmentInfo> {
        self.core.segments()
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

    fn backup(
        &self,
        known: HashSet<ContentDigest>,
    ) -> BoxFuture<'_, Result<Box<dyn Backup>, BackupError>> {
        Box::pin(backup::begin(
            &self.core.store,
            &self.core.inbox,
            &self.core.indexer,
            &self.workers,
            known,
        ))
    }

    fn verify(
        &self,
        segment: Option<u64>,
        max_bytes_per_second: u64,
    ) -> Result<Verification, VerifyError> {
        let only = match segment {
            None => None,
            Some(id) => Some(self.core.verifier.files_of(id)?),
        };
        let mut verifying = self.verifying.lock();
        verifying.retain(|(_, reports, _)| !reports.has_ended());
        if verifying.len() >= VERIFICATIONS {
            return Err(VerifyError::Busy {
                running: verifying.len(),
            });
        }
        let control = Arc::new(Control::new(max_bytes_per_second));
        let reports = Arc::new(Reports::default());
        let verification = Verification::new(Arc::clone(&control), Arc::clone(&reports));
        let (core, steered) = (Arc::clone(&self.core), Arc::clone(&control));
        let told = Arc::clone(&reports);
        let run = move || {
            let check = std::panic::AssertUnwindSafe(|| {
                core.verifier.verify(only, &steered, &mut |progress| {
                    reports.say(progress, &steered);
                })
            });
            reports.end(match std::panic::catch_unwind(check) {
                Ok(Ok(()) | Err(Stop::Stopped)) => Ok(()),
                Ok(Err(Stop::Io(error))) => Err(error),
                Err(panic) => Err(threads::note_panic(
                    &*core.journal.observer,
                    Worker::Verify,
                    &*panic,
                )),
            });
        };
        let handle = threads::start("verify", run).map_err(VerifyError::Io)?;
        verifying.push((control, told, handle));
        Ok(verification)
    }

    fn durability_truth(&self) -> DurabilityTruth {
        let (flush_p50, flush_p99) = self.core.journal.flush_percentiles();
        let file_system = self.core.file_system.clone();
        let mut caveats = file_system.caveats;
        caveats.extend(self.core.caveats());
        DurabilityTruth {
            file_system: file_system.name,
            sync_primitive: "fdatasync",
            flush_p50,
            flush_p99,
            volatile: file_system.volatile,
            caveats,
        }
    }

    fn failed(&self) -> BoxFuture<'_, Arc<io::Error>> {
        let journal = Arc::clone(&self.core.journal);
        let stopping: Arc<dyn crate::api::watch::Watched> = Arc::clone(&journal.stopping) as _;
        let failure = move || journal.failure();
        Box::pin(Until::new(vec![stopping], Visibility::Durable, failure))
    }

    fn drain(&self) -> BoxFuture<'_, Result<(), SyncError>> {
        self.core.journal.stopping.drain();
        let core = Arc::clone(&self.core);
        Box::pin(async move {
            core.inbox.barrier(Durability::Durable).await?;
            self.workers.run(move || core.close()).await
        })
    }
}
