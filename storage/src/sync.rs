//! Locks, atomics, threads, and waiting: those of the machine.
//!
//! Under the feature `shuttle`, which only a test builds, they are those of a scheduler
//! that runs one thread at a time and chooses at each of their steps who goes on. The
//! rest of the engine does not know which. What is not here is not seen by that
//! scheduler: `OnceLock`, whose steps never wait, and the locks of [`crate::disk`],
//! which stand for the device's own order.

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
