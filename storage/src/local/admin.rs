//! Administration of logs, and numbers for operators.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Core;
use crate::engine::{LogTarget, SegmentContents, SegmentInfo, Statistics};
use crate::error::{AdminError, TrimError};
use crate::ids::{LogName, Lsn};
use crate::journal::Answer;
use crate::journal::committer::Operation;
use crate::journal::frame;
use crate::journal::segment::Segment;
use crate::record::{Durability, LogConfig, LogInfo, Visibility};
use crate::ticket::{Awaited, Promise};

impl Core {
    /// Asks the committer; answered when the change is on the device.
    pub(super) fn administer(&self, operation: Operation) -> Awaited<Result<(), AdminError>> {
        let (promise, awaited) = Promise::new();
        match self.refusal() {
            Some(error) => promise.keep(Err(error.into())),
            None => self.push(operation, Durability::Durable, Answer::Admin(promise)),
        }
        awaited
    }

    pub(super) async fn create_log(
        &self,
        name: LogName,
        config: LogConfig,
    ) -> Result<LogInfo, AdminError> {
        self.administer(Operation::Create {
            name: name.clone(),
            config,
        })
        .await?;
        self.info(name)
    }

    pub(super) async fn update_log(
        &self,
        name: LogName,
        config: LogConfig,
    ) -> Result<LogInfo, AdminError> {
        self.administer(Operation::Configure {
            name: name.clone(),
            config,
        })
        .await?;
        self.info(name)
    }

    fn info(&self, name: LogName) -> Result<LogInfo, AdminError> {
        let durable = self.journal.durable();
        match self.logs.by_name(name.as_str()) {
            Some(log) => {
                let tail = log.state.read().tail(durable);
                Ok(log.info(tail, durable, durable))
            }
            None => Err(AdminError::LogNotFound { log: name }),
        }
    }

    pub(super) fn trim(&self, target: LogTarget, before: Lsn) -> Awaited<Result<Lsn, TrimError>> {
        let (promise, awaited) = Promise::new();
        let answer = match self.refusal() {
            Some(error) => {
                promise.keep(Err(error.into()));
                return awaited;
            }
            None => Answer::Trim(promise),
        };
        self.push(
            Operation::Trim { target, before },
            Durability::Durable,
            answer,
        );
        awaited
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
                log.info(tail, durable, durable)
            })
            .collect()
    }

    pub(crate) fn statistics(&self) -> Statistics {
        let (ready, free) = self.pool.counts();
        let runs = self.journal.runs();
        let segments = self.journal.segments.read();
        let (open_segments, segment_evictions) = self.open_segments.counts();
        let (durable_lag_bytes, durable_lag) = self.journal.durable_lag();
        let (damaged_logs, unattributed_damages) = self.damages.logs();
        Statistics {
            logs: self.logs.len() as u64,
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
            free_bytes: self.disk.free_bytes().ok().flatten(),
            quarantined_records: self.damages.records(),
            damaged_logs,
            unattributed_damages,
            scrubbed_bytes: self.scrub.bytes.load(Ordering::Relaxed),
            last_scrub: self.scrub.last_pass(),
            expiry_lag_micros: self.journal.expiry_lag_micros(),
            sorted_runs: runs.len() as u64,
            sorted_bytes: runs.iter().map(|run| run.segment.file_bytes()).sum(),
            sorter_read_bytes: self.sorter.read.load(Ordering::Relaxed),
            sorter_written_bytes: self.sorter.written.load(Ordering::Relaxed),
            unsorted_bytes: segments
                .values()
                .filter(|segment| segment.writer().is_none())
                .map(|segment| segment.file_bytes())
                .sum(),
            followers: self.followers.load(Ordering::SeqCst),
            journal_failed: self.journal.failure().is_some(),
        }
    }

    pub(super) fn segments(&self) -> Vec<SegmentInfo> {
        let segments: Vec<_> = self
            .journal
            .segments
            .read()
            .values()
            .map(Arc::clone)
            .collect();
        segments
            .iter()
            .map(|segment| SegmentInfo {
                id: segment.life.id.get(),
                base: segment.base,
                bytes: segment.file_bytes(),
                end: segment.end.read().unwrap_or_else(|| self.journal.written()),
                sealed: segment.end.read().is_some(),
                damaged: !segment.holes.read().is_empty(),
                contents: segment.contents.get().copied(),
            })
            .collect()
    }

    /// Segments with what their indexes tell; each is looked up once.
    pub(crate) fn describe_segments(&self, after: Option<u64>, limit: usize) -> Vec<SegmentInfo> {
        let mut infos = self.segments();
        infos.retain(|info| after.is_none_or(|after| info.id > after));
        infos.truncate(limit);
        for info in &mut infos {
            if info.contents.is_none()
                && let Some(segment) = self.journal.segment_at(info.base)
            {
                info.contents = self.contents(&segment);
            }
        }
        infos
    }

    fn contents(&self, segment: &Segment) -> Option<SegmentContents> {
        let index = Some(segment).filter(|segment| segment.is_indexed());
        let index = index.and_then(|segment| self.indexes.get(segment))?;
        let mut contents = SegmentContents {
            records: 0,
            logs: 0,
            left: None,
        };
        for row in index.rows() {
            contents.logs += 1;
            let counts = index.entries(&row);
            contents.records += counts
                .from(0)
                .map(|place| u64::from(place.count))
                .sum::<u64>();
        }
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
