//! One wake-up of an event loop for all that is settled together, and one write for all that
//! it takes in together.
//!
//! ```text
//! engine's thread: a flush settles 40 tickets ─▶ mailbox ─ the first one wakes ─▶ postman
//! event loop:      postman wakes the 40 tasks ─▶ their answers leave in one write
//! event loop:      40 tasks gather appends ─ the first one wakes ─▶ postman
//!                  it writes those that wait for no flush ─▶ their tickets are settled
//! ```
//!
//! Woken from another thread, a task costs its event loop a lock and a write to an eventfd;
//! woken by the loop's own thread, next to nothing. The postman comes behind the tasks that
//! are ready when it is woken.

use std::cell::{Cell, OnceCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use wald_storage::{Batch, Durability, LogEngine, Session, Ticket};

thread_local! {
    /// That of the event loop that this thread runs.
    static MAILBOX: OnceCell<Arc<Mailbox>> = const { OnceCell::new() };

    /// The engine that tasks of this thread's event loop have gathered requests for.
    static GATHERED: Cell<Option<Arc<dyn LogEngine>>> = const { Cell::new(None) };
}

/// Tasks of one event loop that other threads have woken.
#[derive(Default)]
struct Mailbox {
    woken: Mutex<Vec<Waker>>,
    postman: AtomicWaker,
}

/// Wakes a task by its event loop's mailbox.
struct Letter {
    mailbox: Arc<Mailbox>,
    task: Waker,
}

impl Wake for Letter {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut woken = self.mailbox.woken.lock();
        woken.push(self.task.clone());
        let first = woken.len() == 1;
        drop(woken);
        if first {
            self.mailbox.postman.wake();
        }
    }
}

/// Submits a batch, as [`Append::submit`](wald_storage::Append::submit). The event loop itself writes appends that need no
/// flush, once it has taken in everything that has arrived.
pub(crate) fn submit(
    engine: &Arc<dyn LogEngine>,
    session: Option<&Session>,
    batch: Batch,
    durability: Option<Durability>,
) -> Ticket {
    let ticket = engine.submit(session, batch, durability);
    MAILBOX.with(|here| match here.get() {
        Some(mailbox) => {
            if GATHERED.replace(Some(Arc::clone(engine))).is_none() {
                mailbox.postman.wake();
            }
        }
        // No event loop: a test.
        None => engine.write_gathered(),
    });
    ticket
}

/// Runs for ever as a task of this thread's event loop: writes the gathered appends, and wakes
/// the tasks in the thread's mailbox.
pub(crate) async fn deliver() {
    let mailbox = MAILBOX.with(|here| Arc::clone(here.get_or_init(Arc::default)));
    let mut woken = Vec::new();
    poll_fn(|context| {
        if let Some(engine) = GATHERED.take() {
            engine.write_gathered();
        }
        // Registers before it takes the list, so that no wake-up in between is lost.
        mailbox.postman.register(context.waker());
        std::mem::swap(&mut woken, &mut *mailbox.woken.lock());
        woken.drain(..).for_each(Waker::wake);
        Poll::Pending
    })
    .await
}

/// The result of a future that another thread settles, often with many others.
pub(crate) async fn together<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut letter: Option<(Waker, Waker)> = None;
    poll_fn(|context| {
        let task = context.waker();
        if !letter.as_ref().is_some_and(|(of, _)| of.will_wake(task)) {
            letter = MAILBOX.with(|here| {
                let mailbox = Arc::clone(here.get()?);
                let task = task.clone();
                let letter = Letter {
                    mailbox,
                    task: task.clone(),
                };
                Some((task, Waker::from(Arc::new(letter))))
            });
        }
        match &letter {
            Some((_, letter)) => future.as_mut().poll(&mut Context::from_waker(letter)),
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
    fn whoever_is_woken_by_another_thread_goes_on() {
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
        runtime.spawn(deliver());
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
