//! Places of records: in memory for the segment that is being written, in index files for sealed
//! segments.

mod active;
mod chain;
mod image;
mod indexes;
mod large;
mod pages;
mod sealed;

pub(crate) use self::active::{Place, Places};
pub(crate) use self::chain::{Below, Chain};
pub(crate) use self::image::Image;
pub(crate) use self::indexes::{
    Found, Indexes, base_of as base_of_index, read as read_index, read_at as read_index_at,
    set_aside,
};
pub(crate) use self::sealed::{
    IndexBuilder, IndexFile, NewRow, Row, SealedIndex, decode_index, index_id, index_path, old_id,
    old_path,
};
