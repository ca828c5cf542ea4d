//! Joins the wake-ups of an event loop: one for all tasks that other threads wake together, and one write for all
//! appends that the loop takes in together.
//!
//! ```text
//! engine's thread: a flush settles 40 tickets ─▶ `Wakes` lists their tasks ─ the first wakes `run`
//! event loop:      `run` wakes the 40 tasks ─▶ their answers leave in one write
//! event loop:      40 tasks gather appends ─ the first wakes `run`
//!                  `run` writes the appends that need no flush, or one that does ─▶ their tickets are settled
//! ```
//!
//! A wake-up from another thread costs the event loop a lock and a write to an eventfd. A wake-up by the loop's own
//! thread costs almost nothing. The event loop runs `run` after the tasks that are ready when `run` is woken.

use std::cell::{Cell, OnceCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use wald_storage::{Batch, Durability, LogEngine, Session, Ticket};

thread_local! {
    /// The wake-ups of the event loop that this thread runs.
    static HERE: OnceCell<Arc<Wakes>> = const { OnceCell::new() };

    /// The engine for which tasks of this thread's event loop have gathered requests.
    static GATHERED: Cell<Option<Arc<dyn LogEngine>>> = const { Cell::new(None) };
}

/// Tasks of one event loop that other threads have woken.
#[derive(Default)]
struct Wakes {
    tasks: Mutex<Vec<Waker>>,
    /// The task of [`run`].
    runner: AtomicWaker,
}

/// Wakes a task through the list of its event loop.
struct JoinedWaker {
    wakes: Arc<Wakes>,
    task: Waker,
}

impl Wake for JoinedWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut tasks = self.wakes.tasks.lock();
        tasks.push(self.task.clone());
        let first = tasks.len() == 1;
        drop(tasks);
        if first {
            self.wakes.runner.wake();
        }
    }
}

/// Submits a batch, as [`Append::gather`](wald_storage::Append::gather). The event loop itself writes appends that need no
/// flush, and flushes a lone one that does, once it has taken in everything that has arrived.
pub(crate) fn submit(
    engine: &Arc<dyn LogEngine>,
    session: Option<&Session>,
    batch: Batch,
    durability: Option<Durability>,
) -> Ticket {
    let ticket = engine.gather(session, batch, durability);
    HERE.with(|here| match here.get() {
        Some(wakes) => {
            if GATHERED.replace(Some(Arc::clone(engine))).is_none() {
                wakes.runner.wake();
            }
        }
        // No event loop: a test.
        None => engine.write_gathered(),
    });
    ticket
}

/// Runs for ever as a task of this thread's event loop. Writes the gathered appends, and wakes the tasks that other
/// threads have woken.
pub(crate) async fn run() {
    let wakes = HERE.with(|here| Arc::clone(here.get_or_init(Arc::default)));
    let mut tasks = Vec::new();
    poll_fn(|context| {
        if let Some(engine) = GATHERED.take() {
            engine.write_gathered();
        }
        // Registers before it takes the list, so that no wake-up in between is lost.
        wakes.runner.register(context.waker());
        std::mem::swap(&mut tasks, &mut *wakes.tasks.lock());
        tasks.drain(..).for_each(Waker::wake);
        Poll::Pending
    })
    .await
}

/// The result of a future that another thread settles, often with many others.
pub(crate) async fn together<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut joined: Option<(Waker, Waker)> = None;
    poll_fn(|context| {
        let task = context.waker();
        if !joined.as_ref().is_some_and(|(of, _)| of.will_wake(task)) {
            joined = HERE.with(|here| {
                let wakes = Arc::clone(here.get()?);
                let task = task.clone();
                let waker = JoinedWaker {
                    wakes,
                    task: task.clone(),
                };
                Some((task, Waker::from(Arc::new(waker))))
            });
        }
        match &joined {
            Some((_, waker)) => future.as_mut().poll(&mut Context::from_waker(waker)),
            // No event loop: a test.
            None => future.as_mut().poll(context),
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Two threads settle the futures of one event loop's tasks, over and over.
    #[test]
    fn task_that_another_thread_wakes_goes_on() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let (first, from_first) = std::sync::mpsc::channel();
        let (second, from_second) = std::sync::mpsc::channel();
        let settle = |waiting: std::sync::mpsc::Receiver<tokio::sync::oneshot::Sender<u32>>| {
            std::thread::spawn(move || {
                let settled = waiting.into_iter().map(|sender| sender.send(1));
                settled.filter(Result::is_ok).count()
            })
        };
        let threads = [settle(from_first), settle(from_second)];
        runtime.spawn(run());
        let sum = runtime.block_on(async {
            let tasks: Vec<_> = [first, second]
                .into_iter()
                .flat_map(|to| (0..20).map(move |_| to.clone()))
                .map(|to| {
                    tokio::spawn(async move {
                        let mut sum = 0;
                        for _ in 0..500 {
                            let (sender, receiver) = tokio::sync::oneshot::channel();
                            to.send(sender).unwrap();
                            sum += together(receiver).await.unwrap();
                        }
                        sum
                    })
                })
                .collect();
            let all = futures_util::future::join_all(tasks);
            let all = tokio::time::timeout(Duration::from_secs(60), all).await;
            all.unwrap().into_iter().map(Result::unwrap).sum::<u32>()
        });
        assert_eq!(sum, 20_000);
        let settled: usize = threads.map(|thread| thread.join().unwrap()).iter().sum();
        assert_eq!(settled, 20_000);
    }
}
