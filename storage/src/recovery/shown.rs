//! Shows a store to readers alone: no segment begins, no epoch rises, and nothing is written.

use std::sync::Arc;

use super::{EpochEnd, Recovered};
use crate::api::config::StorageConfig;
use crate::api::error::OpenError;
use crate::base::clock::Clock;
use crate::base::metrics::Observer;
use crate::index::Indexes;
use crate::journal::Journal;
use crate::journal::expiry::Clocks;
use crate::logs::Logs;
use crate::logs::damages::Damages;

/// The parts of a store that readers need.
pub(crate) struct Shown {
    pub(crate) journal: Arc<Journal>,
    pub(crate) logs: Arc<Logs>,
    pub(crate) damages: Damages,
    pub(crate) history: Vec<EpochEnd>,
    pub(crate) indexes: Indexes,
}

impl Recovered {
    /// Everything that was read, all of it replicated.
    ///
    /// # Errors
    /// If there is no segment.
    pub(crate) fn show(
        mut self,
        config: &StorageConfig,
        clock: Arc<dyn Clock>,
        observer: Arc<dyn Observer>,
    ) -> Result<Shown, OpenError> {
        let newest = self.segments.values().next_back().map(Arc::clone);
        let (Some(newest), Some(tail)) = (newest, &self.tail) else {
            let none = std::io::ErrorKind::NotFound.into();
            return Err(OpenError::io("reading the newest segment")(none));
        };
        let (end, now) = (tail.end, clock.now());
        let clocks = Clocks::new(self.expiry.unwrap_or(now), now, clock.monotonic());
        let journal = Journal::new(
            clock,
            observer,
            self.epoch,
            self.segments,
            newest,
            end,
            clocks,
        );
        let journal = Arc::new(journal.with_replica(config.replica));
        let sorted_end = self.runs.end();
        let runs = self.runs.found.into_iter().map(|found| found.run);
        journal.enter_runs(runs.collect());
        journal.publish_replicated(end);
        let finished = self.drafts.finish(sorted_end, &mut self.findings);
        let logs = Arc::new(finished.logs);
        logs.forget_deleted(journal.sorted_end());
        Ok(Shown {
            journal,
            logs,
            damages: Damages::new(finished.damages, finished.accepted),
            history: self.history,
            indexes: self.indexes,
        })
    }
}
