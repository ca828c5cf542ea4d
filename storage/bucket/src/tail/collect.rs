//! Removes objects that no manifest of the database names.
//!
//! The database could do this itself. It then begins while it is opened, and lists and removes thousands of objects during a
//! take-over, and its close waits for the removals. These passes begin later, and stop at once.

use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;
use slatedb::config::GarbageCollectorOptions;
use slatedb::{DbStatus, GarbageCollectorBuilder};
use tokio::sync::watch;
use tokio::time::sleep;

use super::DATABASE;
use super::clock::TailClock;
use super::settings::{self, LOG_KEPT, OTHERS_KEPT};

/// Time from the open to the first pass: a take-over has ended by then. Owners that follow each other sooner remove nothing.
const FIRST_PASS: Duration = Duration::from_secs(10);

/// Removes objects until the owner ends or `stopped` is true. A pass that is cut off is repeated by the next owner.
pub(super) async fn run(
    store: Arc<dyn ObjectStore>,
    clock: Arc<TailClock>,
    mut owner: watch::Receiver<DbStatus>,
    mut stopped: watch::Receiver<bool>,
) {
    tokio::select! {
        () = passes(&store, &clock, settings::log_collector(), LOG_KEPT) => {}
        () = passes(&store, &clock, settings::collector(), OTHERS_KEPT) => {}
        _ = stopped.wait_for(|stop| *stop) => {}
        _ = owner.wait_for(|owner| owner.close_reason.is_some()) => {}
    }
}

async fn passes(
    store: &Arc<dyn ObjectStore>,
    clock: &Arc<TailClock>,
    options: GarbageCollectorOptions,
    every: Duration,
) {
    let collector = GarbageCollectorBuilder::new(DATABASE, Arc::clone(store))
        .with_system_clock(Arc::clone(clock) as _)
        .with_options(options)
        .build();
    sleep(FIRST_PASS).await;
    loop {
        // An error is logged; the next pass tries again.
        collector.run_gc_once().await;
        sleep(every).await;
    }
}
