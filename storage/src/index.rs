//! Places of records: in memory for the segment that is being written, in index files for sealed
//! segments.

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
    Found, Indexes, base_of as base_of_index, read as read_index, read_at as read_index_at,
    set_aside,
};
pub(crate) use self::sealed::{
    IndexBuilder, IndexFile, NewRow, Row, SealedIndex, decode_index, index_id, index_path, old_id,
    old_path,
};
