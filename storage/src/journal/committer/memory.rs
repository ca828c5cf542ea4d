//! Sync mode `manual`: records that are accepted and not yet written.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::smallvec;

use super::append::stored_bytes;
use super::tail::SegmentTail;
use super::{COALESCED_BYTES, Committer, FrameFields, NEVER, Placed, refused};
use crate::api::codec;
use crate::api::engine::LogAppended;
use crate::api::error::AppendError;
use crate::api::record::{Batch, Durability, SyncMode, Visibility};
use crate::api::records::Records;
use crate::api::session::Session;
use crate::api::watch::Watched;
use crate::base::ids::{LogId, Timestamp};
use crate::format::active::Place;
use crate::format::frame::{DirectoryBuilder, FrameKind, HEADER_BYTES};
use crate::journal::{Journal, Placement};
use crate::logs::conditions::{CheckedBatch, check};
use crate::logs::{Buffered, Log, LogState, Logs};

impl<T: SegmentTail> Committer<T> {
    /// Takes a plain append to a log of sync mode `manual` into memory, if the append asks for nothing
    /// more.
    pub(super) fn buffer(
        &mut self,
        batch: &Batch,
        level: Durability,
        session: &Option<Session>,
    ) -> Option<Placed<Placement, AppendError>> {
        let [records] = batch.logs.as_slice() else {
            return None;
        };
        // A producer's batch and a cursor need frames.
        let plain =
            batch.checks.is_empty() && batch.cursors.is_empty() && records.producer.is_none();
        if level != Durability::Accepted || !plain {
            return None;
        }
        let log = self.logs.by_name(records.log.as_str())?;
        if self.mode(&log) != SyncMode::Manual {
            return None;
        }
        let size = stored_bytes(records);
        let held = log
            .state
            .read()
            .buffered
            .as_ref()
            .map_or(0, |b| b.body.len());
        let mut room = Ok(());
        if self.memory.bytes + size as u64 > self.settings.buffer_bytes {
            room = self.write_all_buffered();
        } else if held + size > self.largest_shared_frame() {
            room = self.write_buffered(&log);
        }
        // Records in memory must not depend on a group that could still be taken back, and must not
        // follow such a group in a session.
        let start = self.tail.start();
        let behind = session.as_ref().is_some_and(|session| session.is_in(start));
        if room.is_ok() && (behind || self.is_in_group(&log)) {
            room = self.write_out();
        }
        if let Err(error) = room {
            return Some(refused(error));
        }
        let targets = [Some(Arc::clone(&log))];
        if let CheckedBatch::Refused { error, reveals } =
            check(&self.logs, batch, &targets, &self.allowed())
        {
            return Some((Some(reveals), Err(error)));
        }
        let bytes = Logs::bytes_now(&log.state.read());
        let append = self.memory.add(&log, &records.records, self.arrival);
        self.logs.count_bytes(bytes, &log.state.read());
        log.watch().wake_at(Visibility::Accepted);
        let placement = Placement {
            appends: smallvec![append],
            logs: smallvec![log],
            position: None,
        };
        Some((Some(NEVER), Ok(placement)))
    }

    /// Maximum size of the records in a frame that requests share, in bytes.
    fn largest_shared_frame(&self) -> usize {
        let unit = usize::try_from(self.settings.largest_unit).unwrap_or(usize::MAX);
        COALESCED_BYTES.min(unit / 2)
    }

    /// Writes a log's records in memory into the group.
    pub(super) fn write_buffered(&mut self, log: &Arc<Log>) -> Result<(), AppendError> {
        let size = |buffered: &Buffered| (buffered.body.len(), u64::from(buffered.count));
        let Some((length, records)) = log.state.read().buffered.as_deref().map(size) else {
            return Ok(());
        };
        let frames = HEADER_BYTES + length.next_multiple_of(8) + self.sealed_bytes();
        self.secure_records(records, (frames, DirectoryBuilder::entry_len(None)))?;
        self.finish_open();
        let frame = self.begin_frame(None);
        let start_of_group = self.tail.start();
        let about = {
            let mut state = log.state.write();
            self.group.undo.note(start_of_group, log, &state);
            let bytes = Logs::bytes_now(&state);
            let Some(buffered) = self.memory.take(log, &mut state) else {
                return Ok(());
            };
            self.tail.put(|out| out.extend_from_slice(&buffered.body));
            let place = Place {
                position: self.tail.position(frame.at),
                first_lsn: buffered.first_lsn,
                count: buffered.count,
                frame_len: self.frame_len(frame),
            };
            state.set_newest(place, false);
            self.logs.count_bytes(bytes, &state);
            let about = FrameFields {
                kind: FrameKind::Batch,
                flags: 0,
                first_lsn: buffered.first_lsn,
                count: buffered.count,
                arrival: Some(buffered.arrival),
            };
            self.group.undo.note_taken(log, buffered);
            about
        };
        self.group.records += u64::from(about.count);
        self.end_batch(frame, about, log);
        Ok(())
    }

    /// Forgets a log's records in memory. They go with the log, and no frame of a deleted log follows
    /// its deletion.
    pub(super) fn discard_buffered(&mut self, log: &Arc<Log>) {
        let mut state = log.state.write();
        let bytes = Logs::bytes_now(&state);
        let Some(buffered) = self.memory.take(log, &mut state) else {
            return;
        };
        self.logs.count_bytes(bytes, &state);
        // Readers no longer count these records: if the deletion is taken back, a checkpoint would
        // otherwise list records that were never written.
        state.next = buffered.first_lsn;
        state.last_time = buffered.time_before;
        self.group.undo.note_taken(log, buffered);
    }

    pub(super) fn write_all_buffered(&mut self) -> Result<(), AppendError> {
        while let Some(log) = self.memory.logs.values().next().map(Arc::clone) {
            self.write_buffered(&log)?;
        }
        Ok(())
    }
}

/// Records that are accepted and not yet in a group.
///
/// Invariants:
/// - `bytes` is the sum of the bodies. It is at most `buffer_bytes` of the settings plus one request.
/// - A log is listed exactly if it has such records, and once.
/// - These records have lsns and no positions. They are the newest of their log.
/// - No record here depends on a group that is not written.
pub(super) struct Memory {
    /// Shows `bytes`.
    journal: Arc<Journal>,
    /// By id: the time to remove one must not grow with their number, since appends of all logs wait meanwhile.
    logs: BTreeMap<LogId, Arc<Log>>,
    pub(super) bytes: u64,
}

impl Memory {
    pub(super) fn new(journal: Arc<Journal>) -> Self {
        Self {
            journal,
            logs: BTreeMap::new(),
            bytes: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.logs.is_empty()
    }

    /// Number of logs with records here.
    pub(super) fn logs(&self) -> u64 {
        self.logs.len() as u64
    }

    /// Asserts the invariants in debug builds.
    pub(super) fn check(&self) {
        let body = |log: &Arc<Log>| {
            let state = log.state.read();
            state.buffered.as_ref().map_or(0, |b| b.body.len() as u64)
        };
        debug_assert_eq!(self.bytes, self.logs.values().map(body).sum::<u64>());
    }

    fn count(&mut self, bytes: u64) {
        self.bytes = bytes;
        self.journal.buffered.store(bytes, Ordering::Relaxed);
    }

    /// Accepts records that arrived at `arrival`.
    fn add(&mut self, log: &Arc<Log>, records: &Records, arrival: Timestamp) -> LogAppended {
        let mut state = log.state.write();
        let (first_lsn, time_before) = (state.next, state.last_time);
        let mut buffered = state.buffered.take().unwrap_or_else(|| {
            self.logs.insert(log.id, Arc::clone(log));
            Box::new(Buffered {
                first_lsn,
                count: 0,
                arrival,
                time_before,
                body: Vec::new(),
            })
        });
        // Arrival of the newest records: otherwise they would be too old together with the first.
        buffered.arrival = arrival;
        let before = buffered.body.len();
        let mut first_time = None;
        for record in records.iter() {
            let time = record.timestamp.unwrap_or(arrival).max(state.last_time);
            // The frame's arrival time is not known yet: more records may come.
            codec::put_record(&mut buffered.body, &record, Some(time));
            state.last_time = time;
            first_time.get_or_insert(time);
        }
        buffered.count += u32::try_from(records.len()).unwrap_or(u32::MAX);
        self.count(self.bytes + (buffered.body.len() - before) as u64);
        state.buffered = Some(buffered);
        state.next = first_lsn.advance(records.len());
        LogAppended {
            log_id: log.id,
            first_lsn,
            next_lsn: state.next,
            timestamp: first_time.unwrap_or(arrival),
            arrival,
            deduplicated: false,
        }
    }

    /// Removes a log's records, if it has any here.
    fn take(&mut self, log: &Arc<Log>, state: &mut LogState) -> Option<Box<Buffered>> {
        let buffered = state.buffered.take()?;
        self.logs.remove(&log.id);
        self.count(self.bytes - buffered.body.len() as u64);
        Some(buffered)
    }

    /// Returns the records that a void group had taken.
    pub(super) fn put_back(&mut self, log: Arc<Log>, buffered: Box<Buffered>) {
        self.count(self.bytes + buffered.body.len() as u64);
        log.state.write().buffered = Some(buffered);
        self.logs.insert(log.id, log);
    }
}
