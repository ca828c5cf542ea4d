//! Locks, threads, and waiting under the scheduler `shuttle`, with the interfaces of `parking_lot`.
//!
//! Time does not pass automatically here. A timed wait sets a timer. [`run_timers`], on a thread of the test,
//! lets the nearest timer ring whenever the scheduler turns to it: at once, or after all other possible
//! steps. A delay of [`NEVER`] or more never rings. If every delay is that long, a missing wake-up is a
//! deadlock, which the scheduler finds.
//!
//! All tasks of one run share one thread of the machine and give way only at known steps. So they share the
//! contents of `thread_local!`, which need no order of their own.

#![cfg_attr(not(test), allow(dead_code, reason = "time passes in the test only"))]

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

pub(crate) use shuttle::future::block_on;
use shuttle::rand::Rng;
use shuttle::sync as theirs;
pub(crate) use shuttle::sync::atomic;
pub(crate) use shuttle::thread::{Builder as ThreadBuilder, JoinHandle};

/// A delay that never ends.
pub(crate) const NEVER: Duration = Duration::from_secs(3600);

thread_local! {
    /// Time that has passed in this run.
    static PASSED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    static TIMERS: RefCell<Timers> = RefCell::new(Timers::default());
}

#[derive(Default)]
struct Timers {
    waiting: Vec<(Duration, Arc<WaitingThread>)>,
    keeper: Option<Waker>,
    stopped: bool,
}

/// Time that has passed since [`begin`].
pub(crate) fn passed() -> Duration {
    PASSED.get()
}

/// Resets the time. Call this first in each run.
pub(crate) fn begin() {
    PASSED.set(Duration::ZERO);
    TIMERS.take();
}

/// Lets time pass until [`stop_timers`].
pub(crate) fn run_timers() {
    let next = || {
        poll_fn(|context| {
            TIMERS.with_borrow_mut(|timers| {
                if timers.stopped {
                    return Poll::Ready(None);
                }
                timers.keeper = Some(context.waker().clone());
                timers.waiting.retain(|(_, waiter)| !waiter.has_ended());
                let nearest = timers.waiting.iter().min_by_key(|(at, _)| *at);
                match nearest {
                    Some((at, waiter)) => Poll::Ready(Some((*at, Arc::clone(waiter)))),
                    None => Poll::Pending,
                }
            })
        })
    };
    while let Some((at, waiter)) = block_on(next()) {
        PASSED.set(PASSED.get().max(at));
        waiter.end(Woken::ByTime);
        // Other threads may run before the next timer, if the scheduler chooses.
        shuttle::thread::yield_now();
    }
}

/// Ends [`run_timers`].
pub(crate) fn stop_timers() {
    let keeper = TIMERS.with_borrow_mut(|timers| {
        timers.stopped = true;
        timers.keeper.take()
    });
    keeper.into_iter().for_each(Waker::wake);
}

fn set_timer(delay: Duration, waiter: &Arc<WaitingThread>) {
    if delay >= NEVER {
        return;
    }
    let keeper = TIMERS.with_borrow_mut(|timers| {
        let at = PASSED.get() + delay;
        timers.waiting.push((at, Arc::clone(waiter)));
        timers.keeper.take()
    });
    keeper.into_iter().for_each(Waker::wake);
}

#[derive(Clone, Copy)]
enum Woken {
    ByNotice,
    ByTime,
}

/// One thread in [`Condvar::wait`].
#[derive(Default)]
struct WaitingThread(std::sync::Mutex<(Option<Woken>, Option<Waker>)>);

impl WaitingThread {
    fn has_ended(&self) -> bool {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.0.is_some()
    }

    /// Wakes it, unless it was woken already.
    fn end(&self, how: Woken) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.0.is_none() {
            state.0 = Some(how);
            state.1.take().into_iter().for_each(Waker::wake);
        }
    }

    fn wait(&self) -> Woken {
        block_on(poll_fn(|context| {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match state.0 {
                Some(how) => Poll::Ready(how),
                None => {
                    state.1 = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        }))
    }
}

/// Whether a wait ended because its time was over.
pub(crate) struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    pub(crate) fn timed_out(&self) -> bool {
        self.0
    }
}

/// A condition variable with timed waits, which the one of `shuttle` lacks.
#[derive(Default)]
pub(crate) struct Condvar(std::sync::Mutex<Vec<Arc<WaitingThread>>>);

impl Condvar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Vec<Arc<WaitingThread>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sleep<T>(&self, guard: &mut MutexGuard<'_, T>, delay: Option<Duration>) -> Woken {
        let waiter = Arc::new(WaitingThread::default());
        // Waiting begins with the release of the lock, whichever thread notifies in between.
        self.waiting().push(Arc::clone(&waiter));
        if let Some(delay) = delay {
            set_timer(delay, &waiter);
        }
        let woken = MutexGuard::unlocked(guard, || waiter.wait());
        self.waiting().retain(|other| !Arc::ptr_eq(other, &waiter));
        woken
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.sleep(guard, None);
    }

    pub(crate) fn wait_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        delay: Duration,
    ) -> WaitTimeoutResult {
        let woken = self.sleep(guard, Some(delay));
        WaitTimeoutResult(matches!(woken, Woken::ByTime))
    }

    /// Wakes one of the waiters, which the scheduler chooses.
    pub(crate) fn notify_one(&self) {
        let mut waiting = self.waiting();
        waiting.retain(|waiter| !waiter.has_ended());
        if !waiting.is_empty() {
            let chosen = shuttle::rand::thread_rng().gen_range(0..waiting.len());
            waiting.swap_remove(chosen).end(Woken::ByNotice);
        }
    }

    pub(crate) fn notify_all(&self) {
        for waiter in self.waiting().drain(..) {
            waiter.end(Woken::ByNotice);
        }
    }
}

/// A lock that no panic poisons.
#[derive(Default)]
pub(crate) struct Mutex<T>(theirs::Mutex<T>);

pub(crate) struct MutexGuard<'a, T> {
    lock: &'a Mutex<T>,
    held: Option<theirs::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(theirs::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard {
            lock: self,
            held: Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }
}

impl<T> MutexGuard<'_, T> {
    /// Runs `task` without the lock.
    pub(crate) fn unlocked<U>(guard: &mut Self, task: impl FnOnce() -> U) -> U {
        guard.held = None;
        let value = task();
        guard.held = Some(guard.lock.0.lock().unwrap_or_else(PoisonError::into_inner));
        value
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.held.as_ref().expect("held outside `unlocked`")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.held.as_mut().expect("held outside `unlocked`")
    }
}

/// A lock for many readers that no panic poisons.
#[derive(Default)]
pub(crate) struct RwLock<T>(theirs::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(theirs::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> theirs::RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> theirs::RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> std::fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mutex")
    }
}

impl std::fmt::Debug for Condvar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Condvar")
    }
}
