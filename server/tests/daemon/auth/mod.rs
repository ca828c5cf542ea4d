//! Principals, tokens and rights, over the built daemon.

mod commands;
mod http;
mod issuer;
mod jwt;
mod limits;
mod matrix;
pub(crate) mod principals;
mod quotas;
mod raw;
mod rights;
mod signer;
mod streams;
mod tokens;
