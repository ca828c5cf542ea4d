//! Principals, tokens and rights, over the built daemon.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod commands;
mod http;
mod issuer;
mod jwt;
mod limits;
mod matrix;
mod principals;
mod quotas;
mod raw;
mod rights;
mod signer;
mod streams;
#[path = "../support/mod.rs"]
mod support;
mod tokens;
