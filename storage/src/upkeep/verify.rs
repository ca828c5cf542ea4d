//! Checks of stored data, online and by the scrubber.

pub(crate) mod files;
pub(crate) mod online;
pub(crate) mod reader;
pub(crate) mod scrub;
pub(crate) mod segment;
