//! Tests of the library against servers in memory. `cargo test -p wald-client --test client retry::` runs one file.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod administration;
mod durable;
mod fake;
mod follow;
#[path = "../memory/mod.rs"]
mod memory;
mod nodes;
mod pipeline;
mod retry;
mod shared;
mod silent;
mod tokens;
