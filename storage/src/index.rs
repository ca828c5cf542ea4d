//! Places of records in sealed segments and runs: index files, their cache, checkpoints, and the queue of segments
//! that wait for their index.
//!
//! Segments and runs can rebuild all of it. The places in the segment being written are in the state of the logs.

pub(crate) mod checkpoint;
pub(crate) mod drafts;
mod indexes;
mod large;
mod pages;
pub(crate) mod queue;
pub(crate) mod rebuild;
pub(crate) mod run_file;
mod sealed;

pub(crate) use self::indexes::{
    FoundRow, Indexes, base_of as base_of_index, read as read_index, read_at as read_index_at,
    set_aside,
};
pub(crate) use self::sealed::{
    IndexBuilder, IndexFile, NewRow, Row, SealedIndex, decode_index, index_id, index_path, old_id,
    old_path, unfinished_path,
};
