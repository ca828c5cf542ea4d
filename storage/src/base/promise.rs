//! A value that one thread will deliver to another, which awaits it.
//!
//! A waiter never waits for ever: dropping a promise without a value wakes it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::base::sync::Mutex;

/// One answer to come, for an operation that is not an append.
pub(crate) struct Promise<T>(Arc<Mutex<Promised<T>>>);

/// The waiting side of a [`Promise`].
pub(crate) struct Awaited<T>(Arc<Mutex<Promised<T>>>);

pub(crate) struct Promised<T> {
    value: Option<T>,
    abandoned: bool,
    waker: Option<Waker>,
}

impl<T> Drop for Promise<T> {
    /// Wakes the waiter, also after a panic of the thread that should answer: no waiter waits for ever.
    fn drop(&mut self) {
        let waker = {
            let mut promised = self.0.lock();
            promised.abandoned = true;
            promised.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Promise<T> {
    pub(crate) fn new() -> (Self, Awaited<T>) {
        let cell = Arc::new(Mutex::new(Promised {
            value: None,
            abandoned: false,
            waker: None,
        }));
        (Self(Arc::clone(&cell)), Awaited(cell))
    }

    /// Whether a waiter is there.
    pub(crate) fn is_awaited(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Answers. The promise is dropped right after, which wakes the waiter.
    pub(crate) fn keep(self, value: T) {
        self.0.lock().value = Some(value);
    }
}

impl<T> Future for Awaited<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut promised = self.0.lock();
        match promised.value.take() {
            Some(value) => Poll::Ready(value),
            None if promised.abandoned => panic!("the engine's thread that was to answer panicked"),
            None => {
                promised.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}
