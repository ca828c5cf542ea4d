//! Administration of logs, and numbers for operators.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Core;
use crate::api::engine::{LogStat, LogTarget, SegmentContents, SegmentInfo, Statistics};
use crate::api::error::{AdminError, AppendError, ReadError, SyncError, TargetError, TrimError};
use crate::api::quota::{Quota, QuotaError, QuotaUse};
use crate::api::record::{
    Durability, LogConfig, LogConfigChange, LogInfo, ProducerInfo, SyncMode, Visibility,
};
use crate::base::ids::{LogId, LogName, Lsn, Name, Position, RecoveryEpoch};
use crate::base::promise::Awaited;
use crate::format::frame;
use crate::index::SealedIndex;
use crate::journal::committer::{AdminChange, Operation};
use crate::journal::run::Run;
use crate::journal::segment::Segment;
use crate::logs::Log;
use crate::logs::extras::Extras;
use crate::read::store::Store;
use crate::upkeep::archive::Archive;

impl Core {
    /// Faults of the device and the file system, in sentences.
    pub(crate) fn caveats(&self) -> impl Iterator<Item = String> {
        let trouble = self.indexing.trouble().map(|error| {
            format!("an index or a checkpoint cannot be written, so a start takes longer: {error}")
        });
        let stretches = self.disk.unreadable().all();
        let unreadable = stretches.first().map(|(path, bytes)| {
            let (more, from, to) = (stretches.len() - 1, bytes.start, bytes.end);
            format!(
                "the device cannot read bytes {from} to {to} of {path}, and {more} other stretches of files: take a backup, and move the store to another device"
            )
        });
        let refused = self.pool.refusal().map(|space| {
            format!(
                "the disk is full, so appends are refused{space}; free space on the volume, or delete or trim logs"
            )
        });
        trouble.into_iter().chain(unreadable).chain(refused)
    }

    pub(super) async fn create_log(
        &self,
        name: LogName,
        config: LogConfig,
    ) -> Result<LogInfo, AdminError> {
        self.check_mode(config.sync_mode)?;
        self.inbox
            .administer(AdminChange::Create {
                name: name.clone(),
                config,
            })
            .await?;
        self.info(name)
    }

    pub(super) async fn update_log(
        &self,
        name: LogName,
        change: LogConfigChange,
    ) -> Result<LogInfo, AdminError> {
        self.check_mode(change.sync_mode.flatten())?;
        self.inbox
            .administer(AdminChange::Configure {
                name: name.clone(),
                change,
            })
            .await?;
        self.info(name)
    }

    /// Refuses a sync mode whose appends would all be refused.
    fn check_mode(&self, mode: Option<SyncMode>) -> Result<(), AppendError> {
        match (mode, self.journal.replication()) {
            (Some(SyncMode::Replicated), None) => {
                Err(AppendError::NotSupported(Durability::Replicated))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn forget_producer(
        &self,
        target: LogTarget,
        producer: Name,
    ) -> Awaited<Result<(), AdminError>> {
        self.inbox
            .administer(AdminChange::ForgetProducer { target, producer })
    }

    /// Lists producers, and first makes the listed state as safe as the appends of the log.
    pub(crate) async fn list_producers(
        &self,
        target: LogTarget,
        after: Option<String>,
        limit: usize,
    ) -> Result<Vec<ProducerInfo>, ReadError> {
        let log = self.resolve(&target, Visibility::Durable)?;
        let (found, last_end) = {
            let state = log.state.read();
            let extras = state.extras.as_deref();
            let page = |extras: &Extras| extras.producers.page(after.as_deref(), limit);
            (extras.map(page).unwrap_or_default(), state.last_end)
        };
        let safety = self.safety_of(Some(&log));
        let safe = match safety {
            Durability::Replicated => self.journal.settled(),
            _ => self.journal.durable(),
        };
        if last_end > safe {
            self.inbox
                .barrier(safety)
                .await
                .map_err(|error| match error {
                    SyncError::JournalFailed(error) => ReadError::JournalFailed(error),
                    SyncError::Refused(error) => ReadError::Refused(error),
                    SyncError::LogNotFound { log } => TargetError::NotFound { log }.into(),
                })?;
        }
        Ok(found)
    }

    fn info(&self, name: LogName) -> Result<LogInfo, AdminError> {
        let durable = self.journal.durable();
        match self.logs.by_name(name.as_str()) {
            Some(log) => {
                let tail = log.state.read().tail(durable);
                Ok(self.info_of(&log, tail, durable))
            }
            None => Err(TargetError::NotFound { log: name }.into()),
        }
    }

    /// Trims a log. `bytes` is the result of [`Core::bytes_before`].
    pub(super) fn trim(
        &self,
        target: LogTarget,
        before: Lsn,
        bytes: Option<(LogId, u64)>,
    ) -> Awaited<Result<Lsn, TrimError>> {
        self.inbox.request(|answer| Operation::Trim {
            target,
            before,
            bytes,
            answer,
        })
    }

    /// Whether the bytes before a record must be looked up before the committer trims there.
    pub(super) fn is_far_trim(&self, target: &LogTarget, before: Lsn) -> bool {
        let log = self.logs.by_name(target.name.as_str());
        log.is_some_and(|log| {
            let state = log.state.read();
            // Records that are not written may still be taken back.
            let written = state.tail(self.journal.written());
            before > state.coming_first()
                && before < written
                && state.bytes_before(before).is_none()
        })
    }

    /// The log of that name, and the bytes of its frames before the one that holds `before`; `None` if they are not
    /// known.
    pub(super) fn bytes_before(&self, target: &LogTarget, before: Lsn) -> Option<(LogId, u64)> {
        let log = self.logs.by_name(target.name.as_str())?;
        let bytes = self.retainer.known_before(&log, before)?;
        Some((log.id, bytes))
    }

    /// Replaces the quotas of all tenants. Waits for the committer.
    pub(crate) fn set_quotas(&self, quotas: Vec<Quota>) -> Result<Vec<QuotaUse>, QuotaError> {
        self.committer.lock().set_quotas(quotas)
    }

    pub(crate) fn list_logs(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Vec<LogInfo> {
        let durable = self.journal.published(Visibility::Durable);
        self.logs
            .page(prefix, after, limit, |log| {
                log.state.read().created_end <= durable
            })
            .iter()
            .map(|log| {
                let tail = log.state.read().tail(durable);
                self.info_of(log, tail, durable)
            })
            .collect()
    }

    /// Bytes of files with records that are not under the newest key of their log.
    fn unrenewed_bytes(
        &self,
        segments: &BTreeMap<Position, Arc<Segment>>,
        runs: &[Arc<Run>],
    ) -> u64 {
        let Some(cipher) = &self.config.cipher else {
            return 0;
        };
        let (floor, renewed_from) = cipher.renewed();
        let segments = segments.range(..renewed_from);
        let segments: u64 = segments.map(|(_, segment)| segment.file_bytes()).sum();
        let runs = runs.iter().filter(|run| run.has_keys_below(floor));
        segments + runs.map(|run| run.segment.file_bytes()).sum::<u64>()
    }

    pub(crate) fn statistics(&self) -> Statistics {
        let (ready, free) = self.pool.counts();
        let runs = self.journal.runs();
        let segments = self.journal.segments.read();
        let (open_segments, segment_evictions) = self.open_segments.counts();
        let (durable_lag_bytes, durable_lag) = self.journal.durable_lag();
        let (damaged_logs, unattributed_damages) = self.damages.logs();
        let archive = self.sorter.archive.as_ref();
        let holdings = self.logs.holdings();
        let jumps = self.journal.clock_jumps();
        let held = self.retainer.held_back(self.journal.expiry_now());
        Statistics {
            logs: holdings.logs,
            deleted_logs: holdings.deleted,
            producers: holdings.producers,
            producers_of_log: holdings.producers_of_log,
            cursors: holdings.cursors,
            name_bytes: holdings.name_bytes,
            max_logs: self.config.max_logs,
            max_producers: self.config.max_producers,
            max_producers_per_log: self.config.max_producers_per_log,
            max_cursors: self.config.max_cursors,
            max_name_bytes: self.config.max_name_bytes,
            inflight_bytes: self.journal.inflight.load(Ordering::SeqCst),
            buffered_bytes: self.journal.buffered.load(Ordering::Relaxed),
            durable_lag_bytes,
            durable_lag,
            journal_segments: segments.len() as u64,
            ready_segments: ready,
            open_segments,
            segment_evictions,
            journal_bytes: segments.values().map(|segment| segment.file_bytes()).sum(),
            pool_bytes: (ready + free) * self.config.segment_bytes,
            quarantine_bytes: self.quarantine_bytes,
            free_bytes: self.pool.free_for_appends(),
            quarantined_records: self.damages.records(),
            unreadable_bytes: {
                let stretches = self.disk.unreadable().all();
                stretches
                    .iter()
                    .map(|(_, bytes)| bytes.end - bytes.start)
                    .sum()
            },
            indexing_failed: self.indexing.trouble().is_some(),
            damaged_logs,
            unattributed_damages,
            held_back: self.held_back(),
            scrubbed_bytes: self.scrubber.bytes.load(Ordering::Relaxed),
            last_scrub: self.scrubber.last_pass(),
            held_logs: held.logs,
            held_bytes: held.bytes,
            held_age: held.age,
            last_backup: self.held_files.last_ended(),
            expiry_lag_micros: self.journal.expiry_lag_micros(),
            clock_jumps_ahead: jumps.ahead,
            clock_jumps_back: jumps.back,
            last_clock_jump_micros: jumps.last,
            sorted_runs: runs.len() as u64,
            sorted_bytes: runs.iter().map(|run| run.segment.file_bytes()).sum(),
            sorter_read_bytes: self.sorter.read.load(Ordering::Relaxed),
            sorter_written_bytes: self.sorter.written.load(Ordering::Relaxed),
            sorter_freed_bytes: self.sorter.freed.load(Ordering::Relaxed),
            sorted_live_bytes: self.sorter.live.load(Ordering::Relaxed),
            sorted_dead_bytes: self.sorter.dead.load(Ordering::Relaxed),
            unrenewed_bytes: self.unrenewed_bytes(&segments, &runs),
            sorter_part_bytes: match self.config.sorter_enabled {
                true => self.sorter.sorter_part(),
                false => 0,
            },
            unsorted_bytes: segments
                .values()
                .filter(|segment| segment.writer().is_none())
                .map(|segment| segment.file_bytes())
                .sum(),
            archive_written_bytes: archive.map_or(0, |a| a.written.load(Ordering::Relaxed)),
            archive_failures: archive.map_or(0, |a| a.failures.load(Ordering::Relaxed)),
            archive_failing: archive.and_then(Archive::failing),
            followers: self.followers.load(Ordering::SeqCst),
            quotas: self.logs.quotas(),
            journal_failed: self.journal.failure().is_some(),
        }
    }

    pub(super) fn segments(&self) -> Vec<SegmentInfo> {
        let (runs, segments) = self.journal.runs_and_segments();
        let sorted = runs.iter().map(|run| SegmentInfo {
            id: run.id().get(),
            base: run.head.first_base,
            bytes: run.segment.file_bytes(),
            end: run.head.end,
            sealed: true,
            damaged: !run.segment.holes.read().is_empty(),
            sorted: Some((run.head.first.get(), run.head.last.get())),
            contents: None,
        });
        sorted
            .chain(segments.iter().map(|segment| SegmentInfo {
                id: segment.life.id.get(),
                base: segment.base,
                bytes: segment.file_bytes(),
                end: segment.end.read().unwrap_or_else(|| self.journal.written()),
                sealed: segment.end.read().is_some(),
                damaged: !segment.holes.read().is_empty(),
                sorted: None,
                contents: segment.contents.get().copied(),
            }))
            .collect()
    }

    /// Runs and segments with contents from their indexes. Contents of a segment are kept.
    pub(crate) fn describe_segments(
        &self,
        after: Option<Position>,
        limit: usize,
    ) -> Vec<SegmentInfo> {
        let mut infos = self.segments();
        infos.retain(|info| after.is_none_or(|after| info.end > after));
        infos.truncate(limit);
        for info in &mut infos {
            if info.sorted.is_some() {
                let run = self.journal.run_at(info.base);
                // Unless another took its place meanwhile.
                let run = run.filter(|run| run.id().get() == info.id);
                info.contents = run.and_then(|run| self.contents_of_run(&run.segment));
            } else if info.contents.is_none()
                && let Some(segment) = self.journal.segment_at(info.base)
            {
                info.contents = self.contents(&segment);
            }
        }
        infos
    }

    fn contents_of_run(&self, segment: &Segment) -> Option<SegmentContents> {
        let index = self.indexes.get(segment).ok()??;
        Some(SegmentContents {
            live_bytes: Some(self.sorter.live_bytes(&index)),
            ..told_by(&index)
        })
    }

    fn contents(&self, segment: &Segment) -> Option<SegmentContents> {
        let index = Some(segment).filter(|segment| segment.is_indexed());
        let index = index.and_then(|segment| self.indexes.get(segment).ok()?)?;
        let mut contents = told_by(&index);
        let next = {
            let segments = self.journal.segments.read();
            let behind = segments.range(segment.base.advance(1)..).next();
            behind.map(|(_, next)| Arc::clone(next))
        };
        if let Some(next) = next {
            let header = self
                .open_segments
                .read(&next, next.first(), frame::HEADER_BYTES as u64)
                .ok()
                .and_then(|bytes| frame::decode_header(&bytes, next.life.salt));
            contents.left = header.map(|header| header.arrival);
            // Nothing of it changes any more.
            let _first = segment.contents.set(contents);
        }
        Some(contents)
    }
}

/// Number of logs and of records in an index.
fn told_by(index: &SealedIndex) -> SegmentContents {
    let mut contents = SegmentContents {
        records: 0,
        logs: 0,
        left: None,
        live_bytes: None,
    };
    for row in index.rows() {
        contents.logs += 1;
        let places = index.entries(&row);
        let counts = places.from(0).map(|place| u64::from(place.count));
        contents.records += counts.sum::<u64>();
    }
    contents
}

impl Store {
    /// A log with this tail, for a reader that sees everything below `published`.
    pub(super) fn info_of(&self, log: &Log, tail: Lsn, published: Position) -> LogInfo {
        LogInfo {
            replicated_lsn: self.replicated_lsn(log),
            ..log.info(tail, self.journal.durable(), published)
        }
    }

    pub(crate) fn stat(
        &self,
        target: &LogTarget,
        visibility: Option<Visibility>,
        of_epoch: Option<RecoveryEpoch>,
    ) -> Result<LogStat, ReadError> {
        let stat = self.stat_now(target, visibility, of_epoch);
        self.check_lease()?;
        stat
    }

    fn stat_now(
        &self,
        target: &LogTarget,
        visibility: Option<Visibility>,
        of_epoch: Option<RecoveryEpoch>,
    ) -> Result<LogStat, ReadError> {
        let visibility = self.visibility(visibility, Some(&target.name))?;
        let log = self.resolve(target, visibility)?;
        if visibility.sees_unflushed()
            && let Some(error) = self.journal.failure()
        {
            return Err(ReadError::JournalFailed(error));
        }
        Ok(LogStat {
            info: self.info_of(
                &log,
                self.tail(&log, visibility),
                self.journal.published(visibility),
            ),
            survived_position: of_epoch.and_then(|epoch| self.survived(epoch)),
        })
    }
}
