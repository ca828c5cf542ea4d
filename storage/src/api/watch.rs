//! Waits for published state to change, in any runtime or none.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::api::record::Visibility;
use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicU32, Ordering};

/// Waiters for one thing. An empty watch takes two words, since every log has one.
#[derive(Default)]
pub struct Watch {
    waiting: Mutex<Option<Box<WatchWaiters>>>,
    /// Number of waiters.
    count: AtomicU32,
    /// Number of followers, waiting or not.
    followers: AtomicU32,
}

#[derive(Default)]
struct WatchWaiters {
    next: u64,
    /// Wakers of the waiters that see only records on another machine.
    replicated: BTreeMap<u64, Waker>,
    /// Wakers of the waiters that see only records on the device.
    durable: BTreeMap<u64, Waker>,
    /// Wakers of the waiters that see more.
    written: BTreeMap<u64, Waker>,
}

impl WatchWaiters {
    /// Wakers of the waiters that see publications at a level.
    fn of(&mut self, visibility: Visibility) -> &mut BTreeMap<u64, Waker> {
        match visibility {
            Visibility::Replicated => &mut self.replicated,
            Visibility::Durable => &mut self.durable,
            Visibility::Written | Visibility::Accepted => &mut self.written,
        }
    }

    fn len(&self) -> usize {
        self.replicated.len() + self.durable.len() + self.written.len()
    }
}

impl Watch {
    /// Wakes all waiters. Call this after the change is visible.
    pub fn wake(&self) {
        self.wake_those(|waiting| {
            let mut wakers = std::mem::take(&mut waiting.durable);
            wakers.append(&mut waiting.written);
            wakers.append(&mut waiting.replicated);
            wakers
        });
    }

    /// Wakes the waiters that see publications at this level. A flush is no news to waiters that see written
    /// records, and a write is no news to waiters that see flushed records.
    pub fn wake_at(&self, visibility: Visibility) {
        self.wake_those(|waiting| std::mem::take(waiting.of(visibility)));
    }

    fn wake_those(&self, take: impl FnOnce(&mut WatchWaiters) -> BTreeMap<u64, Waker>) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let wakers = {
            let mut waiting = self.waiting.lock();
            let taken = waiting.as_mut().map(|waiting| take(waiting));
            self.settle(&mut waiting);
            taken
        };
        for waker in wakers.into_iter().flat_map(BTreeMap::into_values) {
            waker.wake();
        }
    }

    fn add(&self, waker: Waker, visibility: Visibility) -> u64 {
        let mut waiting = self.waiting.lock();
        let inner = waiting.get_or_insert_default();
        let key = inner.next;
        inner.next += 1;
        inner.of(visibility).insert(key, waker);
        self.settle(&mut waiting);
        key
    }

    fn remove(&self, key: u64, visibility: Visibility) {
        let mut waiting = self.waiting.lock();
        if let Some(inner) = waiting.as_mut() {
            inner.of(visibility).remove(&key);
        }
        self.settle(&mut waiting);
    }

    fn settle(&self, waiting: &mut Option<Box<WatchWaiters>>) {
        let count = waiting.as_ref().map_or(0, |inner| inner.len());
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        self.count.store(count, Ordering::SeqCst);
    }
}

/// Something that holds a [`Watch`] and can be shared.
pub trait Watched: Send + Sync {
    /// The watch of this thing.
    fn watch(&self) -> &Watch;
}

/// One follower of a thing, until it is dropped.
pub struct WatchFollower(Arc<dyn Watched>);

impl WatchFollower {
    /// Counts one more follower of this thing.
    pub fn new(watched: Arc<dyn Watched>) -> Self {
        watched.watch().followers.fetch_add(1, Ordering::SeqCst);
        Self(watched)
    }

    /// Number of followers of this thing.
    pub fn count(&self) -> usize {
        self.0.watch().followers.load(Ordering::SeqCst) as usize
    }
}

impl Drop for WatchFollower {
    fn drop(&mut self) {
        self.0.watch().followers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Resolves as soon as `check` returns a value. Checks again whenever one of the watches wakes waiters of
/// this visibility. Leaves nothing behind when dropped.
pub struct Until<F> {
    watched: Vec<Arc<dyn Watched>>,
    visibility: Visibility,
    keys: Vec<u64>,
    check: F,
}

impl<F> Until<F> {
    /// Waits on these things. `check` runs once at each poll before the wait, and once after it began, so
    /// that no change between the two is missed.
    pub fn new<T>(watched: Vec<Arc<dyn Watched>>, visibility: Visibility, check: F) -> Self
    where
        F: FnMut() -> Option<T>,
    {
        Self {
            watched,
            visibility,
            keys: Vec::new(),
            check,
        }
    }

    fn leave(&mut self) {
        for (watched, key) in self.watched.iter().zip(self.keys.drain(..)) {
            watched.watch().remove(key, self.visibility);
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
        let visibility = this.visibility;
        let add = |watched: &Arc<dyn Watched>| watched.watch().add(waker.clone(), visibility);
        this.keys.extend(this.watched.iter().map(add));
        // A change between the first check and the registration has woken no waiter.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    #[derive(Default)]
    struct Thing(Watch);

    impl Watched for Thing {
        fn watch(&self) -> &Watch {
            &self.0
        }
    }

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn only_waiters_that_see_a_publication_are_woken() {
        let thing = Arc::new(Thing::default());
        let levels = [
            Visibility::Replicated,
            Visibility::Durable,
            Visibility::Written,
            Visibility::Accepted,
        ];
        let mut waiting: Vec<_> = levels
            .into_iter()
            .map(|level| {
                let watched: Arc<dyn Watched> = Arc::clone(&thing) as _;
                let until = Box::pin(Until::new(vec![watched], level, || None::<()>));
                (until, Arc::new(Count::default()))
            })
            .collect();
        let poll = |waiting: &mut Vec<(Pin<Box<Until<_>>>, Arc<Count>)>| {
            for (until, count) in waiting {
                let waker = Waker::from(Arc::clone(count));
                let mut context = Context::from_waker(&waker);
                assert!(until.as_mut().poll(&mut context).is_pending());
            }
        };
        let counts = |waiting: &Vec<(Pin<Box<Until<_>>>, Arc<Count>)>| -> Vec<usize> {
            let count = |(_, count): &(_, Arc<Count>)| count.0.load(Ordering::SeqCst);
            waiting.iter().map(count).collect()
        };
        poll(&mut waiting);
        thing.0.wake_at(Visibility::Written);
        assert_eq!(counts(&waiting), [0, 0, 1, 1]);
        thing.0.wake_at(Visibility::Written);
        assert_eq!(counts(&waiting), [0, 0, 1, 1], "woken once for each wait");
        thing.0.wake_at(Visibility::Durable);
        assert_eq!(counts(&waiting), [0, 1, 1, 1]);
        thing.0.wake_at(Visibility::Replicated);
        assert_eq!(counts(&waiting), [1, 1, 1, 1]);
        poll(&mut waiting);
        thing.0.wake();
        assert_eq!(counts(&waiting), [2, 2, 2, 2]);
        poll(&mut waiting);
        assert_eq!(thing.0.count.load(Ordering::SeqCst), 4);
        drop(waiting);
        assert_eq!(thing.0.count.load(Ordering::SeqCst), 0);
    }
}
