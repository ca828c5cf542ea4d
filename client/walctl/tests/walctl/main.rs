//! Tests of the program `walctl` against a server in memory. `cargo test -p walctl --test walctl records::` runs one file.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod apply;
mod backups;
mod command;
mod contexts;
#[path = "../../../tests/memory/mod.rs"]
mod memory;
mod mistakes;
mod nodes;
mod overview;
mod producers;
mod records;
mod scripts;
mod state;
mod terminal;
mod tls;
mod tokens;
