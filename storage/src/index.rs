//! Where records are.

mod active;

pub(crate) use active::{Place, Places};
