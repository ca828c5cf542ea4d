//! Tests of the built daemon over its two ports. They are one program, because each program of tests takes seconds to
//! build: `cargo test -p wald-server --test daemon session::` runs one file.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod administration;
mod append;
mod audit;
mod auth;
mod backups;
mod connections;
mod console;
mod echo;
mod encryption;
mod ephemeral;
mod errors;
mod fences;
mod flow;
mod http_api;
mod independent;
mod metrics;
mod mistakes;
mod pressure;
mod process;
mod producers;
mod protocol;
mod read;
mod repair;
mod retention;
mod session;
mod signed;
#[path = "../support/mod.rs"]
mod support;
mod sync_modes;
mod tls;
mod trim;
mod verify;
