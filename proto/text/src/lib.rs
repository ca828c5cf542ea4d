//! Text that `wald` and `walctl` read and show alike.
//!
//! | module | purpose |
//! |---|---|
//! | [`units`] | sizes (`1GiB`) and spans of time (`1h30m`), read and shown |
//! | [`shown`] | characters that people do not see, escaped before they reach a terminal |
//! | [`pem`] | blocks of PEM files, and the place of a fault |
//!
//! Both commands use this crate, so that an option and a setting take the same words. It has no
//! dependencies and knows nothing of logs.

pub mod pem;
pub mod shown;
pub mod units;

/// Version of the programs, as `--version` prints it: that of the workspace. `deploy/release` adds commit and date.
pub const VERSION: &str = match option_env!("WALD_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};
