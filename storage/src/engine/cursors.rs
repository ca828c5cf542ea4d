//! Cursors and fences, as callers ask for them.

use super::Core;
use crate::api::engine::{Fenced, LogTarget};
use crate::api::error::{CursorError, FenceError};
use crate::api::record::{CursorCommit, NamedCursor, Visibility};
use crate::base::ids::{LogId, Name};
use crate::base::promise::Awaited;
use crate::journal::committer::{CursorChange, Operation};
use crate::logs::extras::{Extras, Mark};
use crate::logs::versions::Versions;

impl Core {
    pub(crate) fn fence(
        &self,
        target: LogTarget,
        epoch: Option<u64>,
    ) -> Awaited<Result<Fenced, FenceError>> {
        self.inbox.request(|answer| Operation::Fence {
            target,
            epoch,
            answer,
        })
    }

    pub(crate) async fn commit_cursor(
        &self,
        commit: CursorCommit,
    ) -> Result<NamedCursor, CursorError> {
        let missing = CursorError::NotFound {
            log: commit.log.clone(),
            cursor: commit.cursor.clone(),
        };
        let moved = self.move_cursor(CursorChange::Commit(commit)).await?;
        moved.ok_or(missing)
    }

    pub(crate) async fn delete_cursor(
        &self,
        target: LogTarget,
        cursor: Name,
    ) -> Result<(), CursorError> {
        self.move_cursor(CursorChange::Delete { target, cursor })
            .await
            .map(drop)
    }

    /// Asks the committer; answered when the change is on the device.
    pub(crate) fn move_cursor(
        &self,
        change: CursorChange,
    ) -> Awaited<Result<Option<NamedCursor>, CursorError>> {
        self.inbox
            .request(|answer| Operation::Cursor(change, answer))
    }

    pub(crate) fn cursor(
        &self,
        target: &LogTarget,
        cursor: &Name,
    ) -> Result<NamedCursor, CursorError> {
        let missing = || CursorError::NotFound {
            log: target.name.clone(),
            cursor: cursor.clone(),
        };
        self.look_at_cursors(target, |id, extras| {
            let versions = extras.cursors.get(cursor)?;
            self.durable_cursor(id, cursor, versions)
        })?
        .ok_or_else(missing)
    }

    pub(crate) fn list_cursors(
        &self,
        target: &LogTarget,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<NamedCursor>, CursorError> {
        let found = self.look_at_cursors(target, |id, extras| {
            let from = match after {
                Some(after) => std::ops::Bound::Excluded(after),
                None => std::ops::Bound::Unbounded,
            };
            let later = extras
                .cursors
                .range::<str, _>((from, std::ops::Bound::Unbounded));
            let there =
                later.filter_map(|(name, versions)| self.durable_cursor(id, name, versions));
            Some(there.take(limit).collect())
        })?;
        Ok(found.unwrap_or_default())
    }

    /// Passes the extras of a log, which hold its cursors, to `look`, if there are any.
    fn look_at_cursors<T>(
        &self,
        target: &LogTarget,
        look: impl FnOnce(LogId, &Extras) -> Option<T>,
    ) -> Result<Option<T>, CursorError> {
        let log = self.resolve(target, Visibility::Durable)?;
        let state = log.state.read();
        Ok(state
            .extras
            .as_deref()
            .and_then(|extras| look(log.id, extras)))
    }

    fn durable_cursor(
        &self,
        log_id: LogId,
        name: &Name,
        versions: &Versions<Option<Mark>>,
    ) -> Option<NamedCursor> {
        let mark = (*versions.at(self.journal.durable()))?;
        Some(NamedCursor {
            name: name.clone(),
            log_id,
            lsn: mark.lsn,
            update_time: mark.time,
        })
    }
}
