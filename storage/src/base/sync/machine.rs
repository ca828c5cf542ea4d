//! Locks, threads, and waiting for every build without the feature `shuttle`.

use std::future::Future;
use std::sync::Arc;
pub(crate) use std::sync::atomic;
use std::task::{Context, Poll, Wake};
use std::thread::Thread;
pub(crate) use std::thread::{Builder as ThreadBuilder, JoinHandle};

pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Drives a future on the calling thread.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        std::thread::park();
    }
}
