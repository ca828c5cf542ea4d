//! Ids, clocks, synchronisation, threads, checksums and bounds.
//!
//! This room imports no other room.

pub(crate) mod crc;
pub(crate) mod promise;

pub(crate) mod bounds;
pub(crate) mod clock;
pub(crate) mod ids;
pub(crate) mod metrics;
pub(crate) mod sync;
pub(crate) mod threads;
pub(crate) mod wire;
pub(crate) mod zeros;
