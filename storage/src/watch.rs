//! Waiting for something published to change, in any runtime or none.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

/// Who waits for one thing. Empty, it is a few words.
#[derive(Default)]
pub(crate) struct Watch {
    waiting: Mutex<Waiting>,
    count: AtomicUsize,
}

#[derive(Default)]
struct Waiting {
    next: u64,
    wakers: BTreeMap<u64, Waker>,
}

impl Watch {
    /// Wakes all who wait. To be called after the change is visible.
    pub(crate) fn wake(&self) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let wakers = {
            let mut waiting = self.waiting.lock();
            self.count.store(0, Ordering::SeqCst);
            std::mem::take(&mut waiting.wakers)
        };
        wakers.into_values().for_each(Waker::wake);
    }

    fn add(&self, waker: Waker) -> u64 {
        let mut waiting = self.waiting.lock();
        let key = waiting.next;
        waiting.next += 1;
        waiting.wakers.insert(key, waker);
        self.count.store(waiting.wakers.len(), Ordering::SeqCst);
        key
    }

    fn remove(&self, key: u64) {
        let mut waiting = self.waiting.lock();
        waiting.wakers.remove(&key);
        self.count.store(waiting.wakers.len(), Ordering::SeqCst);
    }
}

/// Something that holds a [`Watch`] and can be shared.
pub(crate) trait Watched: Send + Sync {
    fn watch(&self) -> &Watch;
}

/// Resolves as soon as `check` gives a value; looks again whenever one of the watches
/// wakes. Leaves nothing behind when dropped.
pub(crate) struct Until<F> {
    watched: Vec<Arc<dyn Watched>>,
    keys: Vec<u64>,
    check: F,
}

impl<F> Until<F> {
    pub(crate) fn new<T>(watched: Vec<Arc<dyn Watched>>, check: F) -> Self
    where
        F: FnMut() -> Option<T>,
    {
        Self {
            watched,
            keys: Vec::new(),
            check,
        }
    }

    fn leave(&mut self) {
        for (watched, key) in self.watched.iter().zip(self.keys.drain(..)) {
            watched.watch().remove(key);
        }
    }
}

impl<F, T> Future for Until<F>
where
    F: FnMut() -> Option<T> + Unpin,
{
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let this = &mut *self;
        this.leave();
        if let Some(value) = (this.check)() {
            return Poll::Ready(value);
        }
        let waker = context.waker();
        this.keys = this
            .watched
            .iter()
            .map(|w| w.watch().add(waker.clone()))
            .collect();
        // A change between the first look and the registration has woken nobody.
        match (this.check)() {
            Some(value) => {
                this.leave();
                Poll::Ready(value)
            }
            None => Poll::Pending,
        }
    }
}

impl<F> Drop for Until<F> {
    fn drop(&mut self) {
        self.leave();
    }
}
