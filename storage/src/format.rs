//! The formats of frames, life blocks, packs and runs: bytes in, values out.
//!
//! No file access, no locks and no panics. Every decoder is a fuzz target. The image of a log lies in
//! [`crate::logs::image`], next to the state that it stores.

pub(crate) mod compress;

pub(crate) mod active;
pub(crate) mod address;
pub(crate) mod body;
pub(crate) mod chain;
pub(crate) mod content;
pub(crate) mod digest;
pub(crate) mod frame;
pub(crate) mod life;
pub(crate) mod pack;
pub(crate) mod run_head;
pub(crate) mod sealed;
pub(crate) mod stream;
pub(crate) mod walk;
