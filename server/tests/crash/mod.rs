//! The common part of the tests that crash the daemon: a ledger outside of it that knows every
//! attempt and every ack, the writers and readers of its load, and the contents after a start.

// Each of the tests uses its own part of this; a failure here fails the test.
#![allow(dead_code, clippy::unwrap_used)]

pub(crate) mod contents;
pub(crate) mod journal;
pub(crate) mod ledger;
pub(crate) mod life;
pub(crate) mod producer;
pub(crate) mod reader;
pub(crate) mod writer;

use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use wald_proto::v1::{Durability, SyncMode};

/// Every sync mode, with the name that its logs begin with.
pub(crate) const MODES: [(&str, SyncMode); 5] = [
    ("strict", SyncMode::Strict),
    ("batch", SyncMode::Batch),
    ("interval", SyncMode::Interval),
    ("async", SyncMode::Async),
    ("manual", SyncMode::Manual),
];

/// Flags that make the sorter sort each of the smallest segments alone, or not sort.
pub(crate) fn sorter(sorts: bool) -> &'static [&'static str] {
    match sorts {
        true => &["--sorter-step-bytes", "64KiB"],
        false => &["--sorter-enabled=false"],
    }
}

/// The sync mode of a log; those that nobody created have the daemon's.
pub(crate) fn mode(log: &str) -> SyncMode {
    let name = log.split('/').next().unwrap();
    let found = MODES.iter().find(|(prefix, _)| *prefix == name);
    found.map_or(SyncMode::Strict, |(_, mode)| *mode)
}

/// The least that an append to these logs is answered with.
pub(crate) fn promised<'a>(
    logs: impl Iterator<Item = &'a str>,
    single: bool,
    asked: Durability,
) -> Durability {
    if asked != Durability::Unspecified {
        return asked;
    }
    let promise = |log| match mode(log) {
        SyncMode::Batch if single => Durability::Written,
        SyncMode::Interval | SyncMode::Async => Durability::Written,
        SyncMode::Manual => Durability::Accepted,
        SyncMode::Unspecified | SyncMode::Strict | SyncMode::Batch => Durability::Durable,
        SyncMode::Replicated => Durability::Replicated,
    };
    logs.map(promise).max().unwrap()
}

/// A number out of the environment.
pub(crate) fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// The source of a test's choices: `WALD_SEED`, or a new seed.
pub(crate) fn seed() -> u64 {
    setting("WALD_SEED", RandomState::new().build_hasher().finish())
}
