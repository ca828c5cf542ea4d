//! Sync mode `manual`: records that are accepted and not yet written.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::smallvec;

use super::append::stored_bytes;
use super::{About, COALESCED_BYTES, Committer, NEVER, Placed, refused};
use crate::api::codec;
use crate::api::engine::LogAppended;
use crate::api::error::AppendError;
use crate::api::record::{Batch, Durability, SyncMode, Visibility};
use crate::api::records::Records;
use crate::api::session::Session;
use crate::api::watch::Watched;
use crate::format::active::Place;
use crate::format::frame::{DirectoryBuilder, HEADER_BYTES, Kind};
use crate::journal::Placement;
use crate::logs::conditions::{Checked, check};
use crate::logs::{Buffered, Log};

impl Committer {
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
        if self.buffered_bytes + size as u64 > self.settings.buffer_bytes {
            room = self.write_all_buffered();
        } else if held + size > self.largest_shared_frame() {
            room = self.write_buffered(&log);
        }
        // Records in memory must not depend on a group that could still be taken back, and must not
        // follow such a group in a session.
        let start = self.position(0);
        let behind = session.as_ref().is_some_and(|session| session.is_in(start));
        if room.is_ok() && (behind || self.is_in_group(&log)) {
            room = self.write_out();
        }
        if let Err(error) = room {
            return Some(refused(error));
        }
        let targets = [Some(Arc::clone(&log))];
        if let Checked::Refused { error, reveals } =
            check(&self.logs, batch, &targets, &self.allowed())
        {
            return Some((Some(reveals), Err(error)));
        }
        let append = self.buffer_records(&log, &records.records);
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

    pub(super) fn buffer_records(&mut self, log: &Arc<Log>, records: &Records) -> LogAppended {
        let arrival = self.arrival;
        let mut state = log.state.write();
        let (first_lsn, time_before) = (state.next, state.last_time);
        let mut buffered = state.buffered.take().unwrap_or_else(|| {
            self.buffered.push(Arc::clone(log));
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
        self.buffered_bytes += (buffered.body.len() - before) as u64;
        self.journal
            .buffered
            .store(self.buffered_bytes, Ordering::Relaxed);
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

    /// Writes a log's records in memory into the group.
    pub(super) fn write_buffered(&mut self, log: &Arc<Log>) -> Result<(), AppendError> {
        let size = |buffered: &Buffered| (buffered.body.len(), u64::from(buffered.count));
        let Some((length, records)) = log.state.read().buffered.as_deref().map(size) else {
            return Ok(());
        };
        let frames = HEADER_BYTES + length.next_multiple_of(8);
        self.secure_records(records, (frames, DirectoryBuilder::entry_len(None)))?;
        self.finish_open();
        let (start, header_len) = self.begin_frame();
        let start_of_group = self.position(0);
        let about = {
            let mut state = log.state.write();
            self.undo.note(start_of_group, log, &state);
            let Some(buffered) = state.buffered.take() else {
                return Ok(());
            };
            self.buffer.extend_from_slice(&buffered.body);
            let frame_len = (self.buffer.len() - start).next_multiple_of(8);
            let place = Place {
                position: self.position(start),
                first_lsn: buffered.first_lsn,
                count: buffered.count,
                frame_len: u32::try_from(frame_len).unwrap_or(u32::MAX),
            };
            state.set_newest(place, false);
            self.buffered_bytes -= buffered.body.len() as u64;
            self.journal
                .buffered
                .store(self.buffered_bytes, Ordering::Relaxed);
            let about = About {
                kind: Kind::Batch,
                flags: 0,
                first_lsn: buffered.first_lsn,
                count: buffered.count,
                arrival: Some(buffered.arrival),
            };
            self.undo.note_taken(log, buffered);
            about
        };
        self.group_records += u64::from(about.count);
        self.buffered.retain(|other| other.id != log.id);
        self.end_batch(start, header_len, about, log);
        Ok(())
    }

    /// Forgets a log's records in memory. They go with the log, and no frame of a deleted log follows
    /// its deletion.
    pub(super) fn discard_buffered(&mut self, log: &Arc<Log>) {
        let buffered = {
            let mut state = log.state.write();
            let Some(buffered) = state.buffered.take() else {
                return;
            };
            // Readers no longer count these records: if the deletion is taken back, a checkpoint would
            // otherwise list records that were never written.
            state.next = buffered.first_lsn;
            state.last_time = buffered.time_before;
            buffered
        };
        self.buffered.retain(|other| other.id != log.id);
        self.buffered_bytes -= buffered.body.len() as u64;
        self.journal
            .buffered
            .store(self.buffered_bytes, Ordering::Relaxed);
        self.undo.note_taken(log, buffered);
    }

    /// Returns to memory the records that a void group had taken.
    pub(super) fn put_back(&mut self, log: Arc<Log>, buffered: Box<Buffered>) {
        self.buffered_bytes += buffered.body.len() as u64;
        self.journal
            .buffered
            .store(self.buffered_bytes, Ordering::Relaxed);
        log.state.write().buffered = Some(buffered);
        self.buffered.push(log);
    }

    pub(super) fn write_all_buffered(&mut self) -> Result<(), AppendError> {
        while let Some(log) = self.buffered.first().map(Arc::clone) {
            self.write_buffered(&log)?;
        }
        Ok(())
    }
}
