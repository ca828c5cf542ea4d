//! Where records are: in memory for the segment that is written, in index files for
//! sealed ones.

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
pub(crate) use self::indexes::{Found, Indexes, read as read_index};
pub(crate) use self::sealed::{
    IndexBuilder, IndexFile, NewRow, Row, SealedIndex, decode_index, index_id, index_path,
};
