//! Merges and drains: the only compactions of the tail.
//!
//! ```text
//! segment at or below the drained one  ─▶ all its files leave, without a read
//! 4 files in a segment                 ─▶ one run, so that a slow log does not fill the 64 files
//! 4 runs in a segment                  ─▶ one run
//! ```
//!
//! At most one merge runs, and nothing else touches its segment.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use object_store::ObjectStore;
use slatedb::DbStatus;
use slatedb::compactor::{
    CompactionScheduler, CompactionSchedulerSupplier, CompactionSpec, CompactorBuilder,
    CompactorStateView, SourceId,
};
use slatedb::config::CompactorOptions;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::clock::TailClock;
use super::settings::{self, CLOSE_TIMEOUT, COMPACTOR_PAUSE, MERGE_AT};
use super::{DATABASE, collect, keys};

/// Segments of the journal below this number leave the tail.
#[derive(Debug, Clone, Default)]
pub(super) struct Drained(Arc<AtomicU64>);

impl Drained {
    /// Lets a segment and all before it leave.
    pub(super) fn through(&self, segment: u64) {
        self.0
            .fetch_max(segment.saturating_add(1), Ordering::Relaxed);
    }

    fn has(&self, prefix: &[u8]) -> bool {
        keys::segment_of(prefix).is_some_and(|segment| segment < self.0.load(Ordering::Relaxed))
    }
}

impl CompactionSchedulerSupplier for Drained {
    fn compaction_scheduler(
        &self,
        _: &CompactorOptions,
    ) -> Box<dyn CompactionScheduler + Send + Sync> {
        Box::new(self.clone())
    }
}

impl CompactionScheduler for Drained {
    fn propose(&self, state: &CompactorStateView) -> Vec<CompactionSpec> {
        let active: Vec<_> = state
            .compactions()
            .into_iter()
            .flat_map(|all| all.recent_compactions())
            .filter(|one| one.active())
            .map(|one| one.spec())
            .collect();
        let busy: BTreeSet<&[u8]> = active.iter().map(|spec| &spec.segment()[..]).collect();
        let segments = state.manifest().segments();
        let free = || {
            segments
                .iter()
                .filter(|one| !busy.contains(&one.prefix()[..]))
        };
        let mut proposed: Vec<_> = free()
            .filter(|segment| self.has(segment.prefix()))
            .map(|segment| {
                let files = segment.l0().iter().map(|file| SourceId::SstView(file.id));
                let runs = segment.compacted().iter();
                let runs = runs.map(|run| SourceId::SortedRun(run.id));
                CompactionSpec::drain_segment(segment.prefix().clone(), files.chain(runs).collect())
            })
            // A drained segment stays without files until the owner has seen it.
            .filter(|spec| !spec.sources().is_empty())
            .collect();
        if active.iter().any(|spec| !spec.is_drain()) {
            return proposed;
        }
        // Numbers of runs are unique in the whole database.
        let runs = segments.iter().flat_map(|segment| segment.compacted());
        let next = runs.map(|run| run.id + 1).max().unwrap_or(0);
        proposed.extend(
            free()
                .filter(|segment| !self.has(segment.prefix()))
                .find_map(|segment| {
                    let (files, runs) = (segment.l0(), segment.compacted());
                    let prefix = segment.prefix().clone();
                    if files.len() >= MERGE_AT {
                        let files = files.iter().map(|file| SourceId::SstView(file.id));
                        return Some(CompactionSpec::for_segment(prefix, files.collect(), next));
                    }
                    if runs.len() < MERGE_AT {
                        return None;
                    }
                    let into = runs.iter().map(|run| run.id).min()?;
                    let runs = runs.iter().map(|run| SourceId::SortedRun(run.id));
                    Some(CompactionSpec::for_segment(prefix, runs.collect(), into))
                }),
        );
        proposed
    }
}

/// The task that merges and drains for an owner, and removes its old objects.
#[derive(Debug)]
pub(super) struct Compaction {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Compaction {
    pub(super) fn start(
        store: Arc<dyn ObjectStore>,
        clock: Arc<TailClock>,
        drained: Drained,
        owner: watch::Receiver<DbStatus>,
    ) -> Self {
        let (stop, stopped) = watch::channel(false);
        let collector = collect::run(
            Arc::clone(&store),
            Arc::clone(&clock),
            owner.clone(),
            stopped.clone(),
        );
        let compactor = run(store, clock, drained, owner, stopped);
        let task = tokio::spawn(async move {
            tokio::join!(compactor, collector);
        });
        Self { stop, task }
    }

    /// Asks the task to end.
    pub(super) fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Waits until the task has ended.
    pub(super) async fn ended(&mut self) {
        if !self.task.is_finished() {
            let _ = (&mut self.task).await;
        }
    }
}

async fn run(
    store: Arc<dyn ObjectStore>,
    clock: Arc<TailClock>,
    drained: Drained,
    mut owner: watch::Receiver<DbStatus>,
    mut stopped: watch::Receiver<bool>,
) {
    loop {
        let compactor = CompactorBuilder::new(DATABASE, Arc::clone(&store))
            .with_system_clock(Arc::clone(&clock) as _)
            .with_options(settings::compactor())
            .with_scheduler_supplier(Arc::new(drained.clone()))
            .build();
        let ended = tokio::select! {
            _ = compactor.run() => false,
            _ = stopped.wait_for(|stop| *stop) => true,
            _ = owner.wait_for(|owner| owner.close_reason.is_some()) => true,
        };
        if ended {
            let _ = timeout(CLOSE_TIMEOUT, compactor.stop()).await;
            return;
        }
        // It may have been fenced by the compactor of the owner before, which was late. An owner that is itself fenced
        // knows it before the pause ends.
        tokio::select! {
            () = sleep(COMPACTOR_PAUSE) => {}
            _ = stopped.wait_for(|stop| *stop) => return,
            _ = owner.wait_for(|owner| owner.close_reason.is_some()) => return,
        }
    }
}
