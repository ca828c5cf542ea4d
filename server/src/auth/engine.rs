//! The engine behind the check of rights: it takes only requests that their caller may make.

use std::collections::HashSet;
use std::sync::Arc;

use wald_storage::{
    AdminError, Backup, BackupError, Batch, ContentDigest, CursorCommit, CursorError, Durability,
    DurabilityTruth, FenceError, Fenced, LogConfig, LogConfigChange, LogEngine, LogId, LogInfo,
    LogName, LogStat, LogTarget, Lsn, Name, NamedCursor, Page, Position, ProducerInfo, Profile,
    ReadError, ReadLogs, ReadRequest, ReadStart, RecoveryEpoch, Scan, ScanRequest, SegmentInfo,
    Selector, Session, Statistics, SyncError, SyncTarget, Ticket, TrimError, Verification,
    VerifyError, Visibility,
};

use tonic::Status;

use super::Caller;
use super::permitted::{ListScopes, Permitted};
use super::right::{LogRight, Scope, ServerRight};
use crate::encryption::{KeyRing, Shredding};
use crate::metrics::Deadline;
use crate::status;
use crate::status::ShredError;
use crate::wakes;

/// The engine of RPCs and console.
#[derive(Clone)]
pub(crate) struct Engine(Arc<dyn LogEngine>);

/// The reads of an engine, or of a copy of a store, behind the check of rights.
#[derive(Clone, Copy)]
pub(crate) struct ReadEngine<'a>(&'a dyn ReadLogs);

impl<'a> ReadEngine<'a> {
    pub(crate) fn new(reads: &'a dyn ReadLogs) -> Self {
        Self(reads)
    }

    pub(crate) async fn read(&self, request: &Permitted<ReadRequest>) -> Result<Page, ReadError> {
        self.0.read(request.get().clone()).await
    }

    /// Waits for records behind `lsn` in the log of the request.
    pub(crate) async fn tail_beyond(
        &self,
        request: &Permitted<ReadRequest>,
        lsn: Lsn,
    ) -> Result<(), ReadError> {
        let request = request.get();
        (self.0)
            .tail_beyond(request.log.clone(), lsn, request.visibility)
            .await
    }

    pub(crate) async fn scan(
        &self,
        request: Permitted<ScanRequest>,
    ) -> Result<Box<dyn Scan>, ReadError> {
        self.0.scan(request.into_inner()).await
    }
}

/// Passes requests on to the engine, without their wrapper.
impl Engine {
    pub(crate) fn new(engine: Arc<dyn LogEngine>) -> Self {
        Self(engine)
    }

    // Numbers that name no log.

    pub(crate) fn profile(&self) -> Profile {
        self.0.profile()
    }

    pub(crate) fn statistics(&self) -> Statistics {
        self.0.statistics()
    }

    pub(crate) fn durability_truth(&self) -> DurabilityTruth {
        self.0.durability_truth()
    }

    /// The engine for the server's own work: metrics.
    pub(crate) fn unchecked(&self) -> &Arc<dyn LogEngine> {
        &self.0
    }

    // Appends.

    pub(crate) fn submit(
        &self,
        session: Option<&Session>,
        batch: Permitted<Batch>,
        durability: Option<Durability>,
    ) -> Ticket {
        wakes::submit(&self.0, session, batch.into_inner(), durability)
    }

    /// The batch of a ticket that the engine had no room for.
    pub(crate) fn take_back(ticket: &mut Ticket) -> Option<Permitted<Batch>> {
        ticket.take_back().map(Permitted::assumed)
    }

    pub(crate) fn join(
        &self,
        batch: &mut Permitted<Batch>,
        next: Permitted<Batch>,
    ) -> Result<(), Permitted<Batch>> {
        let joined = self.0.join(batch.get_mut(), next.into_inner());
        joined.map_err(Permitted::assumed)
    }

    pub(crate) async fn sync(
        &self,
        target: SyncTarget,
        log: Permitted<Option<LogName>>,
    ) -> Result<Position, SyncError> {
        self.0.sync(target, log.get().as_ref()).await
    }

    // Reads.

    pub(crate) fn reads(&self) -> ReadEngine<'_> {
        ReadEngine::new(&*self.0)
    }

    /// Waits for records behind `lsn` in the log.
    pub(crate) async fn log_tail_beyond(
        &self,
        log: &Permitted<LogTarget>,
        lsn: Lsn,
    ) -> Result<(), ReadError> {
        self.0.tail_beyond(log.get().clone(), lsn, None).await
    }

    pub(crate) async fn scan(
        &self,
        request: Permitted<ScanRequest>,
    ) -> Result<Box<dyn Scan>, ReadError> {
        self.reads().scan(request).await
    }

    pub(crate) async fn stat(
        &self,
        log: &Permitted<LogTarget>,
        visibility: Option<Visibility>,
        of_epoch: Option<RecoveryEpoch>,
    ) -> Result<LogStat, ReadError> {
        self.0.stat(log.get().clone(), visibility, of_epoch).await
    }

    // Administration.

    pub(crate) async fn create_log(
        &self,
        name: Permitted<LogName>,
        config: LogConfig,
    ) -> Result<LogInfo, AdminError> {
        self.0.create_log(name.into_inner(), config).await
    }

    pub(crate) async fn update_log(
        &self,
        name: Permitted<LogName>,
        change: LogConfigChange,
    ) -> Result<LogInfo, AdminError> {
        self.0.update_log(name.into_inner(), change).await
    }

    pub(crate) async fn delete_log(&self, log: Permitted<LogTarget>) -> Result<(), AdminError> {
        self.0.delete_log(log.into_inner()).await
    }

    /// Deletes a log, and destroys its keys before this returns. Returns the number of the log. Erasures wait for each other.
    /// If its deadline passes meanwhile, or its caller loses the right, an erasure does nothing.
    ///
    /// # Errors
    /// NO_OWN_KEY and the others of a deletion: nothing was deleted. If the keys cannot be destroyed after the deletion,
    /// `encryption::keep_up` destroys them later.
    pub(crate) async fn shred_log(
        &self,
        log: Permitted<LogTarget>,
        caller: &Caller,
        keys: Option<&Arc<KeyRing>>,
        deadline: Option<Deadline>,
    ) -> Result<LogId, Status> {
        let target = log.into_inner();
        let name = target.name.clone();
        let Some(keys) = keys else {
            let plain =
                ShredError::NoOwnKey("the records of this server are not encrypted".to_owned());
            return Err(status::shred(&name, &plain));
        };
        // A caller that goes away leaves no keys of a deleted log behind.
        let (caller, keys) = (caller.clone(), Arc::clone(keys));
        let work = self.clone().shred(target, caller, keys, deadline);
        let done = tokio::spawn(work).await;
        done.unwrap_or_else(|ended| {
            let ended = ShredError::Io(std::io::Error::other(ended));
            Err(status::shred_unended(&name, &ended))
        })
    }

    async fn shred(
        self,
        mut target: LogTarget,
        caller: Caller,
        keys: Arc<KeyRing>,
        deadline: Option<Deadline>,
    ) -> Result<LogId, Status> {
        let (name, keys) = (target.name.clone(), &keys);
        // A log that gets the name while this call waits is another one.
        let found = self.0.stat(target.clone(), None, None).await;
        let found = found.map(|stat| stat.info.log_id);
        target.log_id = found.as_ref().ok().copied().or(target.log_id);
        // Two calls for one log would undo each other's notes.
        let _alone = keys.erasing.lock().await;
        caller.check_again(LogRight::Delete, &name)?;
        if deadline.is_some_and(|deadline| !deadline.begin()) {
            return Err(status::deadline_before_start());
        }
        let found = match found {
            // An erasure before this one may have deleted it.
            Ok(_) => {
                let stat = self.0.stat(target.clone(), None, None).await;
                stat.map(|stat| stat.info.log_id)
            }
            missing => missing,
        };
        let (id, begun) = match found {
            Ok(id) => (id, vec![self.delete_to_shred(id, &name, keys).await?]),
            // A call that was cut off after the deletion is repeated.
            Err(error) => {
                let begun = match &error {
                    ReadError::Target(_) => self.deleted_to_shred(&target, keys).await,
                    _ => Vec::new(),
                };
                // Ids rise: the newest log of the name is the last.
                match begun.last().map(Shredding::id) {
                    Some(newest) => (newest, begun),
                    None => return Err(status::read_before_write(&error)),
                }
            }
        };
        let unended = |error: ShredError| status::shred_unended(&name, &error);
        if keys.is_shared() {
            // Otherwise a lost machine could bring the log back, without its keys.
            let replicated = self.0.sync(SyncTarget::Replica, None).await;
            replicated.map_err(|error| unended(ShredError::NotStored(error.to_string())))?;
        }
        let begun = Arc::new(begun);
        let destroyed = on_thread(keys, {
            let begun = Arc::clone(&begun);
            move |keys| {
                for log in begun.iter() {
                    keys.destroy(log)?;
                }
                Ok(())
            }
        });
        destroyed.await.map_err(unended)?;
        let stored = keys.is_stored().await;
        stored.map_err(|error| unended(ShredError::NotStored(error.to_string())))?;
        let ended = on_thread(keys, move |keys| {
            for log in begun.iter() {
                keys.ended(log)?;
            }
            Ok(())
        });
        if let Err(error) = ended.await {
            tracing::warn!(%error, log = %name, "the keys of this log are destroyed; the next start removes its name from the key ring");
        }
        Ok(id)
    }

    /// Deleted logs of this target whose keys are to be destroyed.
    async fn deleted_to_shred(&self, target: &LogTarget, keys: &KeyRing) -> Vec<Shredding> {
        let mut deleted = Vec::new();
        for begun in keys.unended(target.name.as_str(), target.log_id) {
            let target = LogTarget {
                name: target.name.clone(),
                log_id: Some(begun.id()),
            };
            // A deletion that nothing proves destroys no key: the name of the log may be lost with other records.
            if let Err(ReadError::Target(_)) = self.0.stat(target, None, None).await
                && self.statistics().held_back.is_empty()
            {
                deleted.push(begun);
            }
        }
        deleted
    }

    /// Notes that the keys of a log are to be destroyed, and deletes it.
    async fn delete_to_shred(
        &self,
        id: LogId,
        name: &LogName,
        keys: &Arc<KeyRing>,
    ) -> Result<Shredding, Status> {
        let begun = on_thread(keys, {
            let name = name.clone();
            move |keys| keys.shred(id, name.as_str())
        });
        let begun = begun.await.map_err(|error| status::shred(name, &error))?;
        // The next owner must know it, too: it destroys the keys if this node is lost after the deletion.
        if let Err(error) = keys.is_stored().await {
            self.keep_keys(name, keys, begun).await;
            let error = ShredError::NotStored(error.to_string());
            return Err(status::shred(name, &error));
        }
        let target = LogTarget {
            name: name.clone(),
            log_id: Some(id),
        };
        if let Err(error) = self.0.delete_log(target).await {
            // Another call has deleted it meanwhile.
            if let AdminError::Target(_) = error {
                return Ok(begun);
            }
            // The deletion may have happened if the journal failed: then the next start decides.
            if status::is_unapplied(&error) {
                self.keep_keys(name, keys, begun).await;
            }
            return Err(status::admin(&error));
        }
        Ok(begun)
    }

    async fn keep_keys(&self, name: &LogName, keys: &Arc<KeyRing>, begun: Shredding) {
        let kept = on_thread(keys, move |keys| Ok(keys.keep(&begun)?)).await;
        if let Err(error) = kept {
            tracing::warn!(%error, log = %name, "the next start decides about the keys of this log");
        }
    }

    /// At most `limit` logs of the scopes after `after`, in the order of their names.
    pub(crate) async fn list_logs(
        &self,
        scopes: Permitted<ListScopes>,
        after: Option<String>,
        limit: usize,
    ) -> Result<Vec<LogInfo>, ReadError> {
        let mut found = Vec::new();
        for scope in scopes.get().iter() {
            let rest = match scope {
                Scope::Prefix(_) => limit - found.len(),
                Scope::Exact(_) => 1,
            };
            let after = match scope {
                Scope::Prefix(_) => after.clone(),
                Scope::Exact(name) if after.as_deref().is_some_and(|after| after >= &**name) => {
                    continue;
                }
                Scope::Exact(_) => None,
            };
            let some = self.0.list_logs(scope.text().to_owned(), after, rest);
            let some = some.await?.into_iter();
            found.extend(some.filter(|log| scope.covers(log.name.as_str())));
            if found.len() >= limit {
                break;
            }
        }
        Ok(found)
    }

    pub(crate) async fn trim(
        &self,
        log: Permitted<LogTarget>,
        before: Lsn,
    ) -> Result<Lsn, TrimError> {
        self.0.trim(log.into_inner(), before).await
    }

    pub(crate) async fn fence(
        &self,
        log: Permitted<LogTarget>,
        epoch: Option<u64>,
    ) -> Result<Fenced, FenceError> {
        self.0.fence(log.into_inner(), epoch).await
    }

    pub(crate) async fn commit_cursor(
        &self,
        commit: Permitted<CursorCommit>,
    ) -> Result<NamedCursor, CursorError> {
        self.0.commit_cursor(commit.into_inner()).await
    }

    pub(crate) async fn delete_cursor(
        &self,
        log: Permitted<LogTarget>,
        cursor: Name,
    ) -> Result<(), CursorError> {
        self.0.delete_cursor(log.into_inner(), cursor).await
    }

    pub(crate) async fn cursor(
        &self,
        log: Permitted<LogTarget>,
        cursor: Name,
    ) -> Result<NamedCursor, CursorError> {
        self.0.cursor(log.into_inner(), cursor).await
    }

    pub(crate) async fn list_cursors(
        &self,
        log: &Permitted<LogTarget>,
        after: Option<String>,
        limit: usize,
    ) -> Result<Vec<NamedCursor>, CursorError> {
        self.0.list_cursors(log.get().clone(), after, limit).await
    }

    pub(crate) async fn list_producers(
        &self,
        log: Permitted<LogTarget>,
        after: Option<String>,
        limit: usize,
    ) -> Result<Vec<ProducerInfo>, ReadError> {
        self.0.list_producers(log.into_inner(), after, limit).await
    }

    pub(crate) async fn forget_producer(
        &self,
        log: Permitted<LogTarget>,
        producer: Name,
    ) -> Result<(), AdminError> {
        self.0.forget_producer(log.into_inner(), producer).await
    }

    // The server as a whole.

    /// Segments and runs without their contents.
    pub(crate) fn segments(&self, _: &Permitted<ServerCall>) -> Vec<SegmentInfo> {
        self.0.segments()
    }

    pub(crate) async fn describe_segments(
        &self,
        _: &Permitted<ServerCall>,
        after: Option<Position>,
        limit: usize,
    ) -> Vec<SegmentInfo> {
        self.0.describe_segments(after, limit).await
    }

    pub(crate) async fn backup(
        &self,
        _: &Permitted<ServerCall>,
        known: HashSet<ContentDigest>,
    ) -> Result<Box<dyn Backup>, BackupError> {
        self.0.backup(known).await
    }

    pub(crate) fn verify(
        &self,
        _: &Permitted<ServerCall>,
        segment: Option<u64>,
        max_bytes_per_second: u64,
    ) -> Result<Verification, VerifyError> {
        self.0.verify(segment, max_bytes_per_second)
    }
}

/// A request to the server as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ServerCall;

impl Caller {
    /// Checks a right to operate the server.
    ///
    /// # Errors
    /// NOT_ALLOWED.
    pub(crate) fn allow_server(
        &self,
        right: ServerRight,
    ) -> Result<Permitted<ServerCall>, tonic::Status> {
        self.current()?.check_server(right)?;
        Ok(Permitted::assumed(ServerCall))
    }
}

impl Permitted<ReadRequest> {
    /// Lets the request go on with the log of this identity alone.
    pub(crate) fn pin_log(&mut self, log: wald_storage::LogId) {
        self.get_mut().log.log_id = Some(log);
    }

    /// Lets the request begin at another place.
    pub(crate) fn start_at(&mut self, start: ReadStart) {
        self.get_mut().start = start;
    }
}

impl Permitted<LogTarget> {
    /// Names the log by its identity too, so that no later log of the name is meant.
    pub(crate) fn pinned(self, log: wald_storage::LogId) -> Self {
        let mut target = self;
        target.get_mut().log_id.get_or_insert(log);
        target
    }

    /// A scan of this log.
    pub(crate) fn scanned(
        &self,
        scan: impl FnOnce(Selector) -> ScanRequest,
    ) -> Permitted<ScanRequest> {
        let selector = Selector::Log(self.get().clone());
        let request = scan(selector.clone());
        Permitted::assumed(ScanRequest {
            selector,
            ..request
        })
    }
}

/// Runs a change of the key ring, which waits for the device, outside of the event loops.
async fn on_thread<T: Send + 'static>(
    keys: &Arc<KeyRing>,
    change: impl FnOnce(&KeyRing) -> Result<T, ShredError> + Send + 'static,
) -> Result<T, ShredError> {
    let keys = Arc::clone(keys);
    let changed = tokio::task::spawn_blocking(move || change(&keys)).await;
    changed.unwrap_or_else(|error| Err(ShredError::Io(std::io::Error::other(error))))
}
