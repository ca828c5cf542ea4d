//! Tools for a store or an archive that no engine writes, and backups.
//!
//! No tool holds a committer.

pub(crate) mod archive;
pub(crate) mod backup;
pub(crate) mod dump;
pub(crate) mod verify;
