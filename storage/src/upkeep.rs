//! Jobs that keep a store in order: indexes, sorting, retention, scrubbing, verification, the archive.
//!
//! Each job is one struct and sees no other job, except for the sorter: it asks the indexer for checkpoints and writes
//! the archive.

pub(crate) mod archive;
pub(crate) mod indexer;
pub(crate) mod retention;
pub(crate) mod sorter;
pub(crate) mod verify;

use std::time::Duration;

use crate::api::pace::Control;
use crate::base::sync::atomic::Ordering;
use crate::read::store::Store;

/// Pause between two checks for appends under way.
const LOOK: Duration = Duration::from_millis(5);

impl Store {
    /// Waits for appends that are under way, at most this long.
    pub(crate) fn give_way(&self, control: &Control, most: Duration) {
        let busy = || self.journal.inflight.load(Ordering::Relaxed) > 0;
        let mut waited = Duration::ZERO;
        while busy() && waited < most && !control.is_stopped() {
            control.wait(LOOK);
            waited += LOOK;
        }
    }
}
