//! Tools for archives: list their records, and restore a store from them.

pub(crate) mod list;
pub(crate) mod restore;
