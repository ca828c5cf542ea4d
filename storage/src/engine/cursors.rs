//! Cursors and fences, as callers ask for them.

use super::Core;
use crate::api::engine::{Fenced, LogTarget};
use crate::api::error::{AppendError, CursorError, FenceError};
use crate::api::record::{CursorCommit, Durability, NamedCursor, SyncMode, Visibility};
use crate::base::ids::{LogId, Name, Position};
use crate::base::promise::Awaited;
use crate::journal::committer::{CursorChange, Operation};
use crate::logs::Log;
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

    /// Asks the committer; answered when the change is on the device, and as safe as the appends of the log.
    pub(crate) fn move_cursor(
        &self,
        change: CursorChange,
    ) -> Awaited<Result<Option<NamedCursor>, CursorError>> {
        let name = match &change {
            CursorChange::Commit(commit) => &commit.log,
            CursorChange::Delete { target, .. } => &target.name,
        };
        let log = self.logs.by_name(name.as_str());
        self.inbox
            .request_at(self.safety_of(log.as_deref()), |answer| {
                Operation::Cursor(change, answer)
            })
    }

    /// DURABLE, or REPLICATED if that is the level of the log's appends.
    pub(super) fn safety_of(&self, log: Option<&Log>) -> Durability {
        match self.mode(log) {
            SyncMode::Replicated => self.journal.safest(),
            _ => Durability::Durable,
        }
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
            Self::safe_cursor(id, cursor, versions)
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
            let there = later.filter_map(|(name, versions)| Self::safe_cursor(id, name, versions));
            Some(there.take(limit).collect())
        })?;
        Ok(found.unwrap_or_default())
    }

    /// Passes the extras of a log, which hold its cursors, to `look`, if there are any. Also passes the position up to
    /// which moves show: those that are as safe as the appends of the log.
    fn look_at_cursors<T>(
        &self,
        target: &LogTarget,
        look: impl FnOnce((LogId, Position), &Extras) -> Option<T>,
    ) -> Result<Option<T>, CursorError> {
        let resolved = self.resolve(target, Visibility::Durable);
        let found = resolved.map(|log| {
            let safe = match self.safety_of(Some(&log)) {
                Durability::Replicated => self.journal.settled(),
                _ => self.journal.durable(),
            };
            let state = log.state.read();
            let extras = state.extras.as_deref();
            extras.and_then(|extras| look((log.id, safe), extras))
        });
        match self.check_lease() {
            Ok(()) => Ok(found?),
            // A log that is missing here may exist at the next owner.
            Err(_) => Err(AppendError::BucketDown.into()),
        }
    }

    fn safe_cursor(
        (log_id, safe): (LogId, Position),
        name: &Name,
        versions: &Versions<Option<Mark>>,
    ) -> Option<NamedCursor> {
        let mark = (*versions.at(safe))?;
        Some(NamedCursor {
            name: name.clone(),
            log_id,
            lsn: mark.lsn,
            update_time: mark.time,
        })
    }
}
