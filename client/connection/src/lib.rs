//! The connection of a command to its server: options, variables and contexts.
//!
//! ```text
//! option ▶ variable ▶ context ▶ default ──▶ ConnectionChoice ──▶ ClientBuilder
//!                        │
//!          config.toml: paths of files, never a token
//! ```
//!
//! Each value comes from the first source that has one. The current context counts only if neither an option nor a
//! variable gives the endpoint, so a command with an endpoint never reads the file. Nothing of a context goes to
//! another server: its token and certificate belong to its endpoint.

mod args;
mod choice;
mod contexts;
mod edit;

pub use args::{ConnectionArgs, HEADING};
pub use choice::{ConnectionChoice, UsedContext};
pub use contexts::{Context, ContextFile};
pub use edit::{add, remove, select};

/// The settings of the connection cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConnectionFault(String);

impl ConnectionFault {
    fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}
