//! Placing appends: lsns, times, frames.

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::group::OpenFrame;
use super::producers::Recognised;
use super::tail::{SegmentTail, Started};
use super::{Committer, FrameFields, Placed, UNIT_DIRECTORY_BYTES, refused};
use crate::api::engine::{LogAppended, OneOrMore};
use crate::api::error::AppendError;
use crate::api::record::{Batch, Compression, LogConfig, LogRecords};
use crate::api::records::Records;
use crate::base::ids::{Lsn, Position};
use crate::format::active::Place;
use crate::format::body::{Created, CursorBody};
use crate::format::digest::Digest;
use crate::format::frame::{CONTINUES, DirectoryBuilder, FrameKind, HEADER_BYTES};
use crate::journal::Placement;
use crate::logs::conditions::{CheckedBatch, check, most_frame_bytes};
use crate::logs::{Log, Logs};

/// Maximum number of bytes that the records of one log take in the body of a frame.
pub(super) fn stored_bytes(records: &LogRecords) -> usize {
    usize::try_from(records.records.stored_bytes()).unwrap_or(usize::MAX)
}

impl<T: SegmentTail> Committer<T> {
    /// Checks and places one batch.
    pub(super) fn append(
        &mut self,
        batch: &Batch,
        digests: &[u128],
    ) -> Placed<Placement, AppendError> {
        let targets: OneOrMore<Option<Arc<Log>>> = batch
            .logs
            .iter()
            .map(|l| self.logs.by_name(l.log.as_str()))
            .collect();
        match self.recognise(batch, &targets, digests) {
            Recognised::New => {}
            Recognised::Repeat(placed) | Recognised::Refused(placed) => return placed,
        }
        if let Err(error) = self.make_room(batch, &targets) {
            return refused(error);
        }
        match check(&self.logs, batch, &targets, &self.allowed()) {
            CheckedBatch::Refused { error, reveals } => {
                return (Some(reveals), Err(error));
            }
            CheckedBatch::Passed { reveals }
                if batch.logs.is_empty() && batch.cursors.is_empty() =>
            {
                let placement = Placement {
                    appends: OneOrMore::new(),
                    logs: OneOrMore::new(),
                    position: None,
                };
                return (Some(reveals), Ok(placement));
            }
            CheckedBatch::Passed { .. } => {}
        }
        let (appends, logs, position) = match (batch.logs.as_slice(), targets.as_slice()) {
            ([one], [Some(log)]) if one.producer.is_none() && batch.cursors.is_empty() => {
                let requests = batch.requests().into();
                let (append, position) = self.append_plain(one, requests, log);
                (smallvec![append], smallvec![Arc::clone(log)], position)
            }
            _ => self.append_unit(batch, targets, digests),
        };
        let placement = Placement {
            appends,
            logs,
            position: Some(position),
        };
        (None, Ok(placement))
    }

    /// Makes room for all of a batch. First writes the records that its logs have in memory only,
    /// because the answer depends on them.
    fn make_room(
        &mut self,
        batch: &Batch,
        targets: &[Option<Arc<Log>>],
    ) -> Result<(), AppendError> {
        let with_cursors = batch.cursors.iter().map(|commit| &commit.log);
        let checked = batch.checks.iter().map(|check| &check.log);
        let others = with_cursors
            .chain(checked)
            .filter_map(|log| self.logs.by_name(log.as_str()));
        let others: Vec<Arc<Log>> = others.collect();
        for log in targets.iter().flatten().chain(&others) {
            self.write_buffered(log)?;
        }
        let size = self.unit_size(batch, targets)?;
        let created = std::iter::zip(&batch.logs, targets).filter(|(_, target)| target.is_none());
        let created: SmallVec<[&str; 4]> = created.map(|(part, _)| part.log.as_str()).collect();
        self.secure_keys(&created)?;
        let records = batch.logs.iter().map(|part| part.records.len());
        self.secure_records(records.sum(), size)
    }

    /// Maximum number of bytes of frames, and of directory entries, that a batch can take.
    pub(super) fn unit_size(
        &self,
        batch: &Batch,
        targets: &[Option<Arc<Log>>],
    ) -> Result<(usize, usize), AppendError> {
        let mut frames = 0;
        let mut directory = 0;
        for (records, target) in batch.logs.iter().zip(targets) {
            frames += most_frame_bytes(records) + self.sealed_bytes();
            directory += DirectoryBuilder::entry_len(None);
            if target.is_none() {
                let name = records.log.as_str();
                frames += HEADER_BYTES + Created::max_len(name).next_multiple_of(8);
                directory += DirectoryBuilder::entry_len(Some(name));
            }
        }
        for commit in &batch.cursors {
            frames += HEADER_BYTES + CursorBody::max_len(&commit.cursor).next_multiple_of(8);
            directory += DirectoryBuilder::entry_len(None);
        }
        let limit = self.settings.largest_unit;
        if (frames + directory) as u64 > limit || directory > UNIT_DIRECTORY_BYTES {
            let records = batch.logs.iter().map(|l| l.records.len()).sum();
            return Err(AppendError::Invalid(
                crate::api::error::InvalidBatch::RequestTooLarge {
                    records,
                    bytes: (frames + directory) as u64,
                    max_records: records,
                    max_bytes: limit,
                },
            ));
        }
        Ok((frames, directory))
    }

    /// Appends records of `requests` requests to one existing log. They join the open frame if it
    /// belongs to the same log.
    pub(super) fn append_plain(
        &mut self,
        records: &LogRecords,
        requests: u64,
        log: &Arc<Log>,
    ) -> (LogAppended, Position) {
        let size = stored_bytes(records);
        let count = u32::try_from(records.records.len()).unwrap_or(u32::MAX);
        let end = self.tail.len();
        let joined = |open: &mut OpenFrame| open.accepts(log, size, requests, end);
        if let Some(mut open) = self.group.open.take_if(joined) {
            // A later request has its own position inside the frame, and survives with the frame.
            let position = match open.compression {
                Compression::None => self.tail.end(),
                _ => self.tail.position(open.frame.at).advance(open.requests),
            };
            let before = (open.first_lsn, open.count);
            let append = self.put_records(log, &records.records, open.frame, Some(before));
            open.count += count;
            open.requests += requests;
            self.group.open = Some(open);
            return (append, position);
        }
        self.finish_open();
        let position = self.tail.end();
        let frame = self.begin_frame(None);
        let append = self.put_records(log, &records.records, frame, None);
        let (log, first_lsn) = (Arc::clone(log), append.first_lsn);
        let compression = log.state.read().compression();
        self.group.open = Some(OpenFrame {
            frame,
            log,
            first_lsn,
            count,
            requests,
            compression,
        });
        (append, position)
    }

    /// Adds records to an unfinished frame, which already holds `before`. Moves the log's
    /// tail, time and place under one lock, so that no reader sees one without the others.
    pub(super) fn put_records(
        &mut self,
        log: &Arc<Log>,
        records: &Records,
        frame: Started,
        before: Option<(Lsn, u32)>,
    ) -> LogAppended {
        let position = self.tail.position(frame.at);
        let start_of_group = self.tail.start();
        let mut state = log.state.write();
        self.group.undo.note(start_of_group, log, &state);
        let (first_lsn, bytes) = (state.next, Logs::bytes_now(&state));
        let arrival = self.arrival;
        let first_time = self
            .tail
            .put_records(records, arrival, &mut state.last_time);
        let count = u32::try_from(records.len()).unwrap_or(u32::MAX);
        let (frame_first, frame_count) = before.unwrap_or((first_lsn, 0));
        let place = Place {
            position,
            first_lsn: frame_first,
            count: frame_count + count,
            frame_len: self.frame_len(frame),
        };
        state.set_newest(place, before.is_some());
        self.logs.count_bytes(bytes, &state);
        self.group.records += u64::from(count);
        LogAppended {
            log_id: log.id,
            first_lsn,
            next_lsn: state.next,
            timestamp: first_time.unwrap_or(arrival),
            arrival,
            deduplicated: false,
        }
    }

    /// Appends a batch over several logs, with a new log, with a producer, or with cursors, as a run of
    /// frames. Recovery keeps or drops the run as a whole.
    pub(super) fn append_unit(
        &mut self,
        batch: &Batch,
        targets: OneOrMore<Option<Arc<Log>>>,
        digests: &[u128],
    ) -> (OneOrMore<LogAppended>, OneOrMore<Arc<Log>>, Position) {
        self.finish_open();
        let position = self.tail.end();
        let mut appends = OneOrMore::with_capacity(targets.len());
        let mut logs = OneOrMore::with_capacity(targets.len());
        let last = targets.len() + batch.cursors.len() - 1;
        let flags = |index| if index == last { 0 } else { CONTINUES };
        let behind = targets.len();
        for (index, (records, target)) in batch.logs.iter().zip(targets).enumerate() {
            let log = match target {
                Some(log) => log,
                None => self.push_created(&records.log, LogConfig::default(), CONTINUES),
            };
            let producer = records.producer.as_ref();
            let producer = producer.zip(digests.get(index).copied().map(Digest::Keyed));
            let frame = self.begin_frame(producer);
            let append = self.put_records(&log, &records.records, frame, None);
            if let Some((producer, digest)) = producer {
                self.remember(&log, producer, digest, &append, position);
            }
            let count = u32::try_from(records.records.len()).unwrap_or(u32::MAX);
            let about = FrameFields {
                kind: FrameKind::Batch,
                flags: flags(index),
                first_lsn: append.first_lsn,
                count,
                arrival: None,
            };
            self.end_batch(frame, about, &log);
            appends.push(append);
            logs.push(log);
        }
        for (index, commit) in (behind..).zip(&batch.cursors) {
            self.push_cursor(&commit.log, &commit.cursor, Some(commit.lsn), flags(index));
        }
        (appends, logs, position)
    }
}
