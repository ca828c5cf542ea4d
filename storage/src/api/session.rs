//! Sessions: batches that are applied in order, and none after one that was refused.
//!
//! Pipelined batches queue before the first of them is answered. Only the committer knows which batch is
//! refused, so the committer refuses the batches after it.

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

    pub(crate) fn end_at_intake(&self) {
        self.0.at_intake.store(true, Ordering::SeqCst);
    }

    pub(crate) fn has_ended_at_intake(&self) -> bool {
        self.0.at_intake.load(Ordering::SeqCst)
    }

    pub(crate) fn end_in_turn(&self) {
        self.0.in_turn.store(true, Ordering::SeqCst);
    }

    pub(crate) fn has_ended_in_turn(&self) -> bool {
        self.0.in_turn.load(Ordering::SeqCst)
    }

    /// A batch is in the group that begins at `start`.
    pub(crate) fn enter(&self, start: Position) {
        self.0.group.store(start.get(), Ordering::Relaxed);
    }

    pub(crate) fn is_in(&self, start: Position) -> bool {
        self.0.group.load(Ordering::Relaxed) == start.get()
    }
}
