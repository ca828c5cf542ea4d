//! Placing requests without records: creation, settings, deletion, trims.

use std::sync::Arc;

use super::tail::SegmentTail;
use super::{Committer, FrameFields, Placed, refused};
use crate::api::engine::LogTarget;
use crate::api::error::{AdminError, AppendError, TargetError, TrimError};
use crate::api::record::{LogConfig, LogConfigChange};
use crate::base::ids::{LogId, LogName, Lsn, Position};
use crate::format::body::{Created, MAX_CONFIG_LEN, TrimBody};
use crate::format::frame::{DirectoryBuilder, FrameKind, HEADER_BYTES};
use crate::journal::pool::Use;
use crate::logs::quotas::LogUsage;
use crate::logs::{Log, Logs, TrimBy};

/// Maximum size of the frame of a trim, in bytes.
pub(super) const TRIM_BYTES: usize = HEADER_BYTES + TrimBody::MAX_LEN.next_multiple_of(8);

/// Maximum number of logs deleted with one flush.
const MOST_DELETIONS: usize = 256;

impl<T: SegmentTail> Committer<T> {
    pub(super) fn create(&mut self, name: LogName, config: LogConfig) -> Placed<(), AdminError> {
        if let Some(log) = self.logs.by_name(name.as_str()) {
            self.finish_open();
            let reveals = log.state.read().created_end;
            let error = AdminError::LogExists {
                log: name,
                log_id: log.id,
            };
            return (Some(reveals), Err(error));
        }
        if self.settings.uncertain {
            let error = AppendError::TailUnproven {
                log: name,
                from: Lsn::ZERO,
            };
            return refused(error);
        }
        let frames = HEADER_BYTES + Created::max_len(name.as_str()).next_multiple_of(8);
        let directory = DirectoryBuilder::entry_len(Some(name.as_str()));
        if let Err(error) = self.secure(frames, directory, Use::Growth) {
            return refused(error);
        }
        if let Some(error) = self.no_room_for_log(&name) {
            return refused(error);
        }
        if let Err(error) = self.secure_keys(&[name.as_str()]) {
            return refused(error);
        }
        self.finish_open();
        self.push_created(&name, config, 0);
        (None, Ok(()))
    }

    pub(super) fn configure(
        &mut self,
        name: &LogName,
        change: &LogConfigChange,
    ) -> Placed<(), AdminError> {
        let Some(log) = self.logs.by_name(name.as_str()) else {
            let error = TargetError::NotFound { log: name.clone() };
            return (Some(Position::ZERO), Err(error.into()));
        };
        // A log that leaves `manual` must not keep records in memory. Without space for them the settings still change.
        if let Err(error) = self.write_buffered(&log)
            && error.shortage().is_none()
        {
            return refused(error);
        }
        let directory = DirectoryBuilder::entry_len(None);
        let size = HEADER_BYTES + MAX_CONFIG_LEN;
        if let Err(error) = self.secure(size, directory, Use::Reserve) {
            return refused(error);
        }
        self.finish_open();
        let (next, config) = {
            let state = log.state.read();
            (state.next, change.apply(&state.config))
        };
        let bounded = config.retention.is_some();
        let frame = self.push_frame(
            FrameFields::act(FrameKind::Configured, next),
            log.id,
            None,
            |out| {
                crate::format::body::put_config(out, &config);
            },
        );
        let start = self.tail.start();
        {
            let mut state = log.state.write();
            self.group.undo.note(start, &log, &state);
            let before = (Arc::clone(&state.config), state.update_time);
            let settings = (config.shared(), self.arrival);
            (state.config, state.update_time) = settings.clone();
            let extras = state.extras.get_or_insert_default();
            extras.configure(frame.end, (before, settings), self.journal.settled());
            state.ages_at = 0;
            state.last_end = frame.end;
        }
        self.touch(&log);
        if bounded {
            self.journal.note_retention();
        }
        (None, Ok(()))
    }

    /// Begins to delete a log. [`Committer::end_deletions`] completes the deletion; until then only
    /// other logs may be deleted.
    ///
    /// # Errors
    /// The position that the refusal reveals, and the reason.
    pub(super) fn delete(
        &mut self,
        target: &LogTarget,
    ) -> Result<(Arc<Log>, Position), (Position, AdminError)> {
        let name = target.name.as_str();
        let directory = DirectoryBuilder::entry_len(None);
        // The segment of the deletions must record them before it is left. This runs before the log is
        // looked up: a group that finds no space also takes back the logs that it created.
        if !self.has_room(HEADER_BYTES, directory) || self.group.deletions.len() >= MOST_DELETIONS {
            self.end_deletions();
        }
        let mut found = self.logs.by_name(name);
        let is_found = |(log, _): &(Arc<Log>, _)| found.as_ref().is_some_and(|f| f.id == log.id);
        if self.group.deletions.iter().any(is_found) {
            self.end_deletions();
            found = self.logs.by_name(name);
        }
        let Some(log) = found else {
            return Err((Position::ZERO, target.not_found().into()));
        };
        if let Err(error) = target.check(log.id) {
            self.finish_open();
            let reveals = log.state.read().created_end;
            return Err((reveals, error.into()));
        }
        if let Err(error) = self.secure(HEADER_BYTES, directory, Use::Reserve) {
            return Err((Position::ZERO, error.into()));
        }
        self.finish_open();
        // Records in memory only never get a place.
        let next = log.state.read().journaled_next();
        let frame = self.push_frame(
            FrameFields::act(FrameKind::Deleted, next),
            log.id,
            None,
            |_| {},
        );
        let start = self.tail.start();
        self.group.undo.note(start, &log, &log.state.read());
        self.discard_buffered(&log);
        self.touch(&log);
        Ok((log, frame.end))
    }

    /// Completes the pending deletions. Flushes at once, so that a name becomes free exactly when its
    /// log is gone for readers too.
    pub(super) fn end_deletions(&mut self) {
        if self.group.deletions.is_empty() {
            return;
        }
        let refused = self
            .write_out()
            .err()
            .filter(|error| error.shortage().is_some());
        if refused.is_none() {
            self.journal.flush();
        }
        let gone = refused.is_none() && self.journal.failure().is_none();
        for (log, mut pending) in std::mem::take(&mut self.group.deletions) {
            if let Some(error) = &refused {
                pending.need = Some(Position::ZERO);
                pending.reply.refuse(error.clone());
            }
            if gone {
                {
                    let mut state = log.state.write();
                    self.logs.leave_quota(&mut state);
                    state.deleted = true;
                    state.last_end = pending.need.unwrap_or(state.last_end);
                    state.stored_bytes = 0;
                    let load = LogUsage::of(state.extras.as_deref());
                    self.logs.take(None, load);
                    self.logs.change_producers(load.producers, 0);
                    state.extras = None;
                }
                self.logs.remove_name(&log);
                crate::api::watch::Watched::watch(&*log).wake();
            }
            self.group.pending.push(pending);
        }
    }

    /// Trims a log. `bytes` is the number of bytes before the trim, where the committer must not count them
    /// itself.
    pub(super) fn trim(
        &mut self,
        target: &LogTarget,
        before: Lsn,
        bytes: Option<(LogId, u64)>,
    ) -> Placed<Lsn, TrimError> {
        let Some(log) = self.logs.by_name(target.name.as_str()) else {
            return (Some(Position::ZERO), Err(target.not_found().into()));
        };
        self.finish_open();
        if let Err(error) = target.check(log.id) {
            return (Some(log.state.read().created_end), Err(error.into()));
        }
        // Records in memory are written first. Without space for them, a trim below them continues.
        let room = match self.write_buffered(&log) {
            Err(error)
                if error.shortage().is_some() && before <= log.state.read().journaled_next() =>
            {
                Ok(())
            }
            other => other,
        };
        let directory = DirectoryBuilder::entry_len(None);
        let room = room.and_then(|()| self.secure(TRIM_BYTES, directory, Use::Reserve));
        if let Err(error) = room {
            return refused(error);
        }
        self.finish_open();
        let (tail, first, last_end) = {
            let state = log.state.read();
            (state.next, state.coming_first(), state.last_end)
        };
        if before > tail {
            let error = TrimError::BeyondTail {
                log: target.name.clone(),
                tail,
                asked: before,
            };
            return (Some(last_end), Err(error));
        }
        if before <= first {
            return (Some(last_end), Ok(first));
        }
        let bytes = bytes.filter(|(of, _)| *of == log.id);
        let bytes = bytes.map(|(_, bytes)| bytes);
        self.push_trim(&log, (before, TrimBy::Somebody), bytes);
        (None, Ok(before))
    }

    /// Writes the frame of a trim, for which there is room.
    pub(super) fn push_trim(
        &mut self,
        log: &Arc<Log>,
        (before, by): (Lsn, TrimBy),
        bytes: Option<u64>,
    ) {
        let kept = {
            let state = log.state.read();
            let bytes = state.bytes_before(before).or(bytes).unwrap_or(0);
            let bytes = bytes.min(state.stored_bytes);
            state.coming_kept().trim(before, by, bytes)
        };
        let about = FrameFields {
            count: by.number(),
            ..FrameFields::act(FrameKind::Trim, before)
        };
        let body = TrimBody { bytes: kept.bytes };
        let frame = self.push_frame(about, log.id, None, |out| body.put(out));
        let start = self.tail.start();
        {
            let mut state = log.state.write();
            self.group.undo.note(start, log, &state);
            let before = Logs::bytes_now(&state);
            state.add_kept(frame.end, kept);
            self.logs.count_bytes(before, &state);
        }
        self.touch(log);
        self.journal.trimming(frame.end, Arc::clone(log));
    }

    pub(super) fn push_created(
        &mut self,
        name: &LogName,
        config: LogConfig,
        flags: u8,
    ) -> Arc<Log> {
        let id = LogId::compose(self.journal.recovery_epoch, self.next_log_counter);
        self.next_log_counter += 1;
        let time = self.arrival;
        let about = FrameFields {
            flags,
            ..FrameFields::act(FrameKind::Created, Lsn::ZERO)
        };
        let frame = self.push_frame(about, id, Some(name.as_str()), |out| {
            Created::put(out, name.as_str(), &config, time);
        });
        let bounded = config.retention.is_some();
        let log = Arc::new(Log::new(id, name.clone(), config, time, frame.end));
        log.state.write().created_in = self.tail.segment().life.id.into();
        self.group.undo.note_created(&log);
        self.logs.join_quota(&log);
        self.touch(&log);
        self.logs.insert(Arc::clone(&log));
        // Noted after the change: a pass that begins before the change is not the last one.
        if bounded {
            self.journal.note_retention();
        }
        log
    }
}
