//! Locks, atomics, threads, and waiting, from the machine.
//!
//! Under the feature `shuttle`, which only a test builds, they come from a scheduler. It runs one thread at a
//! time and chooses at each step which thread goes on. The rest of the engine does not see the difference.
//! The scheduler does not see other primitives: `OnceLock`, whose steps never wait, and the locks of
//! [`crate::disk`], which stand for the device's own order.

#[cfg(not(feature = "shuttle"))]
mod machine;
#[cfg(feature = "shuttle")]
pub(crate) mod scheduled;

#[cfg(not(feature = "shuttle"))]
pub(crate) use machine::{
    Condvar, JoinHandle, Mutex, MutexGuard, RwLock, ThreadBuilder, atomic, block_on,
};
#[cfg(feature = "shuttle")]
pub(crate) use scheduled::{
    Condvar, JoinHandle, Mutex, MutexGuard, RwLock, ThreadBuilder, atomic, block_on,
};
