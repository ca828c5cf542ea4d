//! Drives the engine step by step, for callers without threads: tests and simulations.

use super::Core;
use crate::api::error::AdminError;
use crate::api::record::{Batch, Durability, LogConfig};
use crate::api::ticket::Ticket;
use crate::base::ids::LogName;
use crate::base::promise::Awaited;
use crate::journal::committer::AdminChange;
use crate::upkeep::indexer::Wanted;

impl Core {
    /// One turn without threads: writes the queue, then flushes if a request waits for a flush.
    pub(crate) fn turn(&self) {
        self.committer.lock().commit(self.intake.take());
        if self.journal.wants_flush() {
            self.journal.flush();
        }
        self.index();
    }

    /// Indexes sealed segments, without a thread.
    fn index(&self) {
        self.indexer.work(Wanted::WhenDue);
    }

    /// The effect of passing time, without threads: flush, then mark.
    pub(crate) fn idle(&self) {
        self.journal.flush();
        self.committer.lock().mark();
        self.journal.flush();
    }

    /// Creates a log in a later turn.
    pub(crate) fn create_in_turn(
        &self,
        name: LogName,
        config: LogConfig,
    ) -> Awaited<Result<(), AdminError>> {
        self.inbox.administer(AdminChange::Create { name, config })
    }

    /// Takes a request of no session into the queue.
    pub(crate) fn enqueue(&self, batch: Batch, level: Durability) -> Ticket {
        self.accept(None, batch, Some(level), false)
    }
}

#[cfg(test)]
mod of_tests {
    use std::io;

    use super::*;
    use crate::api::engine::LogTarget;
    use crate::api::error::{SyncError, TrimError};
    use crate::api::pace::Stop;
    use crate::api::record::LogConfigChange;
    use crate::api::session::Session;
    use crate::base::ids::{Lsn, Position};
    use crate::upkeep::sorter::{Activity, RunSources};

    impl Core {
        /// The write stage of a turn, without its flush.
        pub(crate) fn write_in_turn(&self) {
            self.committer.lock().commit(self.intake.take());
        }

        /// As if the segment at hand held this number of records already.
        pub(crate) fn pretend_records(&self, records: u64) {
            self.committer.lock().pretend_records(records);
        }

        /// Trims a log in a later turn.
        pub(crate) fn trim_in_turn(
            &self,
            target: LogTarget,
            before: Lsn,
        ) -> Awaited<Result<Lsn, TrimError>> {
            let far = self.is_far_trim(&target, before);
            let bytes = far.then(|| self.bytes_before(&target, before));
            self.trim(target, before, bytes.flatten())
        }

        /// Queues a request of a session.
        pub(crate) fn enqueue_of(
            &self,
            session: &Session,
            batch: Batch,
            level: Durability,
        ) -> Ticket {
            self.accept(Some(session), batch, Some(level), false)
        }

        /// Does one step of the sorter, as its thread would. Returns whether there was work.
        pub(crate) fn sort_in_turn(&self) -> io::Result<bool> {
            let step = |of| self.sorter.sort_step(of, Activity::AtRest, &mut |_| Ok(()));
            match step(RunSources::Segments).and_then(|done| Ok(done || step(RunSources::Runs)?)) {
                Ok(done) => Ok(done),
                Err(Stop::Stopped) => Ok(false),
                Err(Stop::Io(error)) => Err(error),
            }
        }

        /// Fills the pool, as its thread would.
        pub(crate) fn pool_in_turn(&self) -> io::Result<()> {
            self.pool.fill()
        }

        /// Changes a log's settings in a later turn.
        pub(crate) fn configure_in_turn(
            &self,
            name: LogName,
            change: impl Into<LogConfigChange>,
        ) -> Awaited<Result<(), AdminError>> {
            let change = change.into();
            self.inbox
                .administer(AdminChange::Configure { name, change })
        }

        /// Makes everything before as safe as `level`, in a later turn.
        pub(crate) fn sync_in_turn(
            &self,
            level: Durability,
        ) -> Awaited<Result<Position, SyncError>> {
            self.inbox.barrier(level)
        }

        /// Deletes a log in a later turn.
        pub(crate) fn delete_in_turn(&self, target: LogTarget) -> Awaited<Result<(), AdminError>> {
            self.inbox.administer(AdminChange::Delete(target))
        }

        /// Queues a request that is answered after the event that the sync modes of its logs name.
        pub(crate) fn enqueue_by_mode(&self, session: Option<&Session>, batch: Batch) -> Ticket {
            self.accept(session, batch, None, false)
        }
    }
}
