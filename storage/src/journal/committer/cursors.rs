//! Placing changes of consumers' cursors, alone or with a batch.

use std::sync::Arc;

use super::tail::SegmentTail;
use super::{Committer, FrameFields, Placed, refused};
use crate::api::engine::LogTarget;
use crate::api::error::{AppendError, CursorError, TargetError};
use crate::api::record::{CursorCommit, NamedCursor, SyncMode};
use crate::base::ids::{LogName, Lsn, Name, Position};
use crate::format::body::CursorBody;
use crate::format::frame::{DirectoryBuilder, FrameKind, HEADER_BYTES};
use crate::journal::pool::Use;
use crate::logs::Log;
use crate::logs::conditions::check_cursor;
use crate::logs::extras::Mark;
use crate::logs::quotas::tenants::Additions;
use crate::logs::quotas::{LogUsage, QuotaRequest as Adds};

impl<T: SegmentTail> Committer<T> {
    pub(super) fn commit_cursor(
        &mut self,
        commit: &CursorCommit,
    ) -> Placed<Option<NamedCursor>, CursorError> {
        self.finish_open();
        let Some(log) = self.logs.by_name(commit.log.as_str()) else {
            let log = commit.log.clone();
            let error = TargetError::NotFound { log };
            return (Some(Position::ZERO), Err(error.into()));
        };
        let room = self
            .write_buffered(&log)
            .and_then(|()| self.secure_cursor(&commit.cursor, Use::Growth));
        if let Err(error) = room {
            return refused(error);
        }
        self.finish_open();
        let reveals = log.state.read().last_end;
        let mut failed = Vec::new();
        let (mut adds, mut of_tenants) = (Adds::default(), Additions::default());
        let refused = check_cursor(
            Some(&log),
            commit,
            &self.allowed(),
            (&mut 0, &mut adds, &mut of_tenants),
            &mut failed,
        );
        let refused = refused.or_else(|| self.no_room(&adds, &of_tenants, &commit.log));
        if !failed.is_empty() {
            let error = AppendError::ConditionsFailed(failed);
            return (Some(reveals), Err(error.into()));
        }
        if let Some(error) = refused {
            return (Some(reveals), Err(error.into()));
        }
        self.push_cursor(&commit.log, &commit.cursor, Some(commit.lsn), 0);
        let cursor = NamedCursor {
            name: commit.cursor.clone(),
            log_id: log.id,
            lsn: commit.lsn,
            update_time: self.arrival,
        };
        (None, Ok(Some(cursor)))
    }

    pub(super) fn delete_cursor(
        &mut self,
        target: &LogTarget,
        cursor: &Name,
    ) -> Placed<Option<NamedCursor>, CursorError> {
        self.finish_open();
        let Some(log) = self.logs.by_name(target.name.as_str()) else {
            return (Some(Position::ZERO), Err(target.not_found().into()));
        };
        let reveals = log.state.read().last_end;
        if let Err(error) = target.check(log.id) {
            return (Some(reveals), Err(error.into()));
        }
        if cursor_of(&log, cursor).is_none() {
            let error = CursorError::NotFound {
                log: target.name.clone(),
                cursor: cursor.clone(),
            };
            return (Some(reveals), Err(error));
        }
        if let Err(error) = self.secure_cursor(cursor, Use::Reserve) {
            return refused(error);
        }
        self.finish_open();
        self.push_cursor(&target.name, cursor, None, 0);
        (None, Ok(None))
    }

    fn secure_cursor(&mut self, cursor: &Name, purpose: Use) -> Result<(), AppendError> {
        let frame = HEADER_BYTES + CursorBody::max_len(cursor).next_multiple_of(8);
        self.secure(frame, DirectoryBuilder::entry_len(None), purpose)
    }

    /// Writes the frame that moves or deletes a cursor. Does nothing if the log does not exist.
    pub(super) fn push_cursor(
        &mut self,
        log: &LogName,
        cursor: &Name,
        lsn: Option<Lsn>,
        flags: u8,
    ) {
        let Some(log) = self.logs.by_name(log.as_str()) else {
            return;
        };
        let about = FrameFields {
            flags,
            ..FrameFields::act(FrameKind::Cursor, lsn.unwrap_or(Lsn::ZERO))
        };
        let body = CursorBody {
            name: cursor.clone(),
            deleted: lsn.is_none(),
        };
        let frame = self.push_frame(about, log.id, None, |out| body.put(out));
        let start = self.tail.start();
        let mark = lsn.map(|lsn| Mark {
            lsn,
            time: self.arrival,
        });
        {
            let mut state = log.state.write();
            self.group.undo.note(start, &log, &state);
            state.last_end = frame.end;
            // Readers compare with this position, as `Core::safety_of` says.
            let safe = match state.config.sync_mode.unwrap_or(self.settings.sync_mode) {
                SyncMode::Replicated => self.journal.settled(),
                _ => self.journal.durable(),
            };
            let quota = state.quota;
            let extras = state.extras.get_or_insert_default();
            let was_there = extras.move_cursor(frame.end, cursor, mark, safe);
            match (was_there, mark) {
                (false, Some(_)) => self.logs.add(quota, LogUsage::cursor(cursor)),
                (true, None) => self.logs.take(quota, LogUsage::cursor(cursor)),
                (true, Some(_)) | (false, None) => {}
            }
        }
        self.touch(&log);
    }
}

fn cursor_of(log: &Arc<Log>, cursor: &Name) -> Option<Mark> {
    let state = log.state.read();
    let extras = state.extras.as_deref()?;
    *extras.cursors.get(cursor)?.newest()
}
