//! Checks all stored data: every checksum, chain, index and digest, unknown files, and missing files. An offline
//! check changes nothing.
//!
//! ```text
//!                  ┌── offline: a directory that nobody serves (`tools/verify.rs`)
//!  one segment, in │
//!   steps of 1 MiB ┼── online: the store of a running engine (`online.rs`)
//!   (`segment.rs`) │
//!                  └── scrub: the segments again and again, slowly (`scrub.rs`)
//! ```
//!
//! The same code checks a segment for all three ([`segment`]). It finds the damage. For a store that nobody
//! serves, recovery identifies the lost records, so that a start reports the same. For a running engine, the
//! indexes identify them.

pub(crate) mod files;
pub(crate) mod online;
pub(crate) mod reader;
pub(crate) mod scrub;
pub(crate) mod segment;
