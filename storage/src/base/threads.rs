//! The only place where the engine starts threads.
//!
//! ```text
//! thread              number            a panic
//! wald-commit-N       2                 fails the journal
//! wald-index          1                 fails the journal
//! wald-pool           1                 fails the journal
//! wald-guard          1                 fails the journal
//! wald-retention      1                 fails the journal
//! wald-scrub          1, if enabled     fails the journal
//! wald-sort           1, if enabled     fails the journal
//! wald-reader-N       reader_threads    fails the one request; the thread goes on
//! wald-verify         1 per call        ends the one verification with an error
//! wald-start          1 during a start  ends the start
//! ```
//!
//! A thread of the first seven rows lives as long as the engine, and no caller waits for its answers. Without
//! a failed journal its end would go unnoticed: the pool would run dry, or records would never expire. A
//! panic of any thread is logged and counted ([`Observer::panicked`]).

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::base::metrics::{Observer, Worker};
use crate::base::promise::{Awaited, Promise};
use crate::base::sync::atomic::{AtomicBool, Ordering};
use crate::base::sync::{Condvar, JoinHandle, Mutex, ThreadBuilder};

/// Increase of the niceness of threads whose work can wait.
const BEHIND: i32 = 10;

/// Starts a named thread.
///
/// # Errors
/// If the system has no room for another.
#[allow(clippy::disallowed_methods, reason = "this is the one place")]
pub(crate) fn start(
    name: &str,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    ThreadBuilder::new()
        .name(format!("wald-{name}"))
        .spawn(body)
}

/// Starts a named thread for work that can wait: all others come first where processors are scarce.
///
/// # Errors
/// As of [`start`].
pub(crate) fn start_behind(
    name: &str,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    start(name, || {
        // On Linux this affects only this thread. If it is not allowed, the thread keeps its priority.
        let _ = rustix::process::nice(BEHIND);
        body();
    })
}

/// Logs and counts a panic. Returns it as an error with the panic's text.
pub(crate) fn note_panic(
    observer: &dyn Observer,
    worker: Worker,
    panic: &(dyn Any + Send),
) -> io::Error {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no text");
    observer.panicked(worker);
    let thread = worker.name();
    tracing::error!(
        thread,
        panic = text,
        "an engine thread panicked; this is a bug"
    );
    io::Error::other(format!("the thread panicked: {text}"))
}

/// Runs two closures at a time, the second one on its own thread. Runs them one after the other if the system
/// has no room for another thread.
#[allow(clippy::disallowed_methods, reason = "this is the one place")]
pub(crate) fn both<A, B: Send>(
    first: impl FnOnce() -> A,
    second: impl FnOnce() -> B + Send,
) -> (A, B) {
    let second = Mutex::new(Some(second));
    let second = || {
        let work = second.lock().take().expect("it is done once");
        work()
    };
    std::thread::scope(|scope| {
        let name = "wald-start".to_owned();
        let there = std::thread::Builder::new()
            .name(name)
            .spawn_scoped(scope, second);
        let first = first();
        let second = match there.map(std::thread::ScopedJoinHandle::join) {
            Ok(Ok(done)) => done,
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
            Err(_no_thread) => second(),
        };
        (first, second)
    })
}

type Task = Box<dyn FnOnce() + Send>;

/// A bounded number of threads for work that may wait for the disk, so that event
/// loops never do.
#[derive(Default)]
pub(crate) struct Workers {
    queue: Mutex<TaskQueue>,
    changed: Condvar,
    started: AtomicBool,
}

#[derive(Default)]
struct TaskQueue {
    tasks: VecDeque<Task>,
    stopped: bool,
}

impl Workers {
    /// Starts `count` threads that work until [`Workers::stop`].
    pub(crate) fn start(
        self: &Arc<Self>,
        count: usize,
        observer: &Arc<dyn Observer>,
    ) -> io::Result<Vec<JoinHandle<()>>> {
        self.started.store(true, Ordering::SeqCst);
        (0..count)
            .map(|index| {
                let (workers, observer) = (Arc::clone(self), Arc::clone(observer));
                start(&format!("reader-{index}"), move || workers.work(&*observer))
            })
            .collect()
    }

    fn work(&self, observer: &dyn Observer) {
        let mut queue = self.queue.lock();
        loop {
            if let Some(task) = queue.tasks.pop_front() {
                drop(queue);
                // A task that panics drops its promise, which ends the caller's wait.
                if let Err(panic) = catch_unwind(AssertUnwindSafe(task)) {
                    note_panic(observer, Worker::Reader, &*panic);
                }
                queue = self.queue.lock();
            } else if queue.stopped {
                return;
            } else {
                self.changed.wait(&mut queue);
            }
        }
    }

    /// Runs `task` on one of the threads. Runs it here and at once if there are none, as in simulations and
    /// after the engine is gone.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        task: impl FnOnce() -> T + Send + 'static,
    ) -> Awaited<T> {
        self.submit(task, false)
    }

    /// Like [`Workers::run`], but drops the task if its caller has gone away before a thread is free.
    pub(crate) fn run_if_awaited<T: Send + 'static>(
        &self,
        task: impl FnOnce() -> T + Send + 'static,
    ) -> Awaited<T> {
        self.submit(task, true)
    }

    fn submit<T: Send + 'static>(
        &self,
        task: impl FnOnce() -> T + Send + 'static,
        if_awaited: bool,
    ) -> Awaited<T> {
        let (promise, awaited) = Promise::new();
        let mut queue = self.queue.lock();
        if queue.stopped || !self.started.load(Ordering::SeqCst) {
            drop(queue);
            promise.keep(task());
            return awaited;
        }
        queue.tasks.push_back(Box::new(move || {
            if !if_awaited || promise.is_awaited() {
                promise.keep(task());
            }
        }));
        drop(queue);
        self.changed.notify_one();
        awaited
    }

    /// Ends the threads once the queue is empty.
    pub(crate) fn stop(&self) {
        self.queue.lock().stopped = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::metrics::NoObserver;

    #[test]
    fn task_without_a_caller_is_dropped_before_it_runs() {
        let workers = Arc::new(Workers::default());
        // No thread works yet.
        workers.started.store(true, Ordering::SeqCst);
        let (ran, runs) = std::sync::mpsc::channel();
        let task = |number| {
            let ran = ran.clone();
            move || ran.send(number).unwrap()
        };
        drop(workers.run_if_awaited(task(1)));
        drop(workers.run(task(2)));
        let awaited = workers.run_if_awaited(task(3));
        drop(ran);
        let observer: Arc<dyn Observer> = Arc::new(NoObserver);
        let threads = workers.start(1, &observer).unwrap();
        workers.stop();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(runs.iter().collect::<Vec<_>>(), [2, 3]);
        drop(awaited);
    }
}
