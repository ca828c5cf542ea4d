//! The types and traits that a server sees.
//!
//! A server holds a [`engine::LogEngine`] and knows no other room.

pub(crate) mod cipher;
pub(crate) mod codec;
pub(crate) mod config;
pub(crate) mod content;
pub(crate) mod engine;
pub(crate) mod error;
pub(crate) mod finding;
pub(crate) mod pace;
pub(crate) mod quota;
pub(crate) mod record;
pub(crate) mod records;
pub(crate) mod replica;
pub(crate) mod session;
pub(crate) mod ticket;
pub(crate) mod verification;
pub(crate) mod watch;
