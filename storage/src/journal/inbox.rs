//! The committer's inbox: operations of the engine and of jobs that cost nothing of the budget of appends.
//!
//! This is the seam from the jobs to the committer, which answers each queued operation.

use std::sync::Arc;

use crate::api::error::{AdminError, AppendError, SyncError};
use crate::api::record::Durability;
use crate::base::ids::Position;
use crate::base::promise::{Awaited, Promise};
use crate::journal::committer::{AdminChange, Barrier, Operation, Submission};
use crate::journal::pool::Use;
use crate::journal::{AnswerPromise, Journal};

/// The queue of the committer.
pub(crate) trait Accepts: Send + Sync {
    /// Adds an operation, which the committer answers. Returns it if a panic has ended every thread that commits: the
    /// journal has failed then.
    fn push(&self, submission: Submission) -> Option<Submission>;
}

/// Hands operations to the committer. Clones share one queue.
#[derive(Clone)]
pub(crate) struct Inbox {
    journal: Arc<Journal>,
    queue: Arc<dyn Accepts>,
}

impl Inbox {
    pub(crate) fn new(journal: &Arc<Journal>, queue: Arc<dyn Accepts>) -> Self {
        Self {
            journal: Arc::clone(journal),
            queue,
        }
    }

    /// Queues an operation that costs nothing of the budget.
    pub(crate) fn push(&self, operation: Operation, level: Durability) {
        let submission = Submission {
            operation,
            level,
            cost: 0,
            requests: 1,
            submitted: self.journal.clock.monotonic(),
            session: None,
            gathered: false,
        };
        self.hand_over(submission);
    }

    /// Queues a request.
    pub(crate) fn hand_over(&self, submission: Submission) {
        if let Some(late) = self.queue.push(submission) {
            late.answer_failed(&self.journal);
        }
    }

    /// Leaves the segment that is being written, so that all safe records are in finished segments.
    pub(crate) fn leave_segment(&self) -> Awaited<Result<Position, SyncError>> {
        self.leave(false, Use::Growth)
    }

    /// Leaves the segment that is being written, twice. The sorter does not take the newest finished segment,
    /// so this way it reaches all records that are safe now.
    pub(crate) fn leave_to_sorter(&self) {
        for always in [false, true] {
            // No caller waits for the answer: the sorter checks again.
            drop(self.leave(always, Use::Growth));
        }
    }

    /// Leaves the segment that is being written, for one of the reserve or a small one. The sorter can then
    /// take the segment left, whose dead bytes are enough to fill the reserve again.
    pub(crate) fn leave_on_reserve(&self) {
        drop(self.leave(true, Use::Leave));
    }

    fn leave(&self, always: bool, purpose: Use) -> Awaited<Result<Position, SyncError>> {
        // Uses up the positions of the rest of the segment, and the new one waits for its release.
        if let Some(error) = self.journal.replica_is_behind() {
            let (promise, awaited) = Promise::new();
            promise.keep(Err(error.into()));
            return awaited;
        }
        self.ask(Barrier::Leave { always, purpose }, Durability::Durable)
    }

    pub(crate) fn barrier(&self, level: Durability) -> Awaited<Result<Position, SyncError>> {
        self.ask(Barrier::Plain, level)
    }

    pub(crate) fn ask(
        &self,
        barrier: Barrier,
        level: Durability,
    ) -> Awaited<Result<Position, SyncError>> {
        let (promise, awaited) = Promise::new();
        match self.journal.failure() {
            Some(error) => promise.keep(Err(SyncError::JournalFailed(error))),
            None => self.push(Operation::Barrier(barrier, promise), level),
        }
        awaited
    }

    /// Asks the committer, as [`Inbox::request`].
    pub(crate) fn administer(&self, change: AdminChange) -> Awaited<Result<(), AdminError>> {
        self.request(|answer| Operation::Admin(change, answer))
    }

    /// Queues the operation that is made with a promise of its answer, unless the journal refuses all changes. The
    /// answer comes when the change is on the device, and in the replica if there is one.
    pub(crate) fn request<T, E: From<AppendError>>(
        &self,
        operation: impl FnOnce(AnswerPromise<T, E>) -> Operation,
    ) -> Awaited<Result<T, E>> {
        self.request_at(self.journal.safest(), operation)
    }

    /// As [`Inbox::request`], answered at `level`. Refused if the replica is too far behind, unless the answer waits for
    /// the replica anyway: others could add to the lag without bound.
    pub(crate) fn request_at<T, E: From<AppendError>>(
        &self,
        level: Durability,
        operation: impl FnOnce(AnswerPromise<T, E>) -> Operation,
    ) -> Awaited<Result<T, E>> {
        let (promise, awaited) = Promise::new();
        let replication = self.journal.replication();
        let unreachable = replication.and_then(|replication| replication.unreachable(level));
        let behind = || match level {
            Durability::Replicated => None,
            _ => self.journal.replica_is_behind(),
        };
        match self.journal.refusal().or(unreachable).or_else(behind) {
            Some(error) => promise.keep(Err(error.into())),
            None => self.push(operation(promise), level),
        }
        awaited
    }
}
