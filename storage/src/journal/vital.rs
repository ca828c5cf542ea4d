//! Threads of the engine whose panic fails the journal.
//!
//! Every thread that lives as long as the engine, and whose answers no caller awaits, starts here: its end would
//! otherwise go unnoticed.

use std::any::Any;
use std::io;
use std::panic::AssertUnwindSafe;
use std::panic::catch_unwind;
use std::sync::Arc;

use crate::base::metrics::Worker;
use crate::base::sync::JoinHandle;
use crate::base::threads;
use crate::journal::Journal;

/// Starts a thread that lives as long as the engine. If `body` panics, the journal fails.
///
/// # Errors
/// If the system has no room for another thread.
pub(crate) fn start(
    journal: &Arc<Journal>,
    worker: Worker,
    name: &str,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let journal = Arc::clone(journal);
    let watched = move || {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(body)) {
            panicked(&journal, worker, &*panic);
        }
    };
    match worker {
        Worker::Scrub | Worker::Sort => threads::start_behind(name, watched),
        _ => threads::start(name, watched),
    }
}

/// Fails the journal because a thread panicked.
pub(crate) fn panicked(journal: &Journal, worker: Worker, panic: &(dyn Any + Send)) {
    let error = threads::note_panic(&*journal.observer, worker, panic);
    journal.fail(format!("engine thread \"{}\"", worker.name()), &error);
}
