//! Sessions: batches that are applied in order, and none after one that was refused.
//!
//! Pipelined batches queue before the first of them is answered. Only the committer knows which batch is
//! refused, so the committer refuses the batches after it. A service makes sessions; an engine ends them.

use std::sync::Arc;

use crate::base::ids::Position;
use crate::base::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A run of batches in order. Cheap to clone; clones are the same session.
#[derive(Debug, Clone, Default)]
pub struct Session(Arc<Ended>);

#[derive(Debug, Default)]
struct Ended {
    /// A batch was refused before it queued. Batches that queue already come before it.
    at_intake: AtomicBool,
    /// A batch was refused in its turn. All batches from now on come after it.
    in_turn: AtomicBool,
    /// Start of the newest group that a batch was placed in; no group starts at 0.
    group: AtomicU64,
}

impl Session {
    /// A new session.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends the session: the engine refused a batch before it queued the batch. Batches that are queued
    /// already are not affected.
    pub fn end_at_intake(&self) {
        self.0.at_intake.store(true, Ordering::SeqCst);
    }

    /// Whether the engine refused a batch before it queued the batch.
    pub fn has_ended_at_intake(&self) -> bool {
        self.0.at_intake.load(Ordering::SeqCst)
    }

    /// Ends the session: the engine refused a batch in its turn. All batches after it are refused.
    pub fn end_in_turn(&self) {
        self.0.in_turn.store(true, Ordering::SeqCst);
    }

    /// Whether the engine refused a batch in its turn.
    pub fn has_ended_in_turn(&self) -> bool {
        self.0.in_turn.load(Ordering::SeqCst)
    }

    /// Notes that a batch of the session is in the group that begins at `start`, which is above 0.
    pub fn enter(&self, start: Position) {
        self.0.group.store(start.get(), Ordering::Relaxed);
    }

    /// Whether the newest batch that [`Session::enter`] noted is in the group that begins at `start`.
    pub fn is_in(&self, start: Position) -> bool {
        self.0.group.load(Ordering::Relaxed) == start.get()
    }
}
