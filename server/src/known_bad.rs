//! A node with a deliberate mistake, for testing the tests. `storage/bucket/src/known_bad.rs` has its name, and the variable of
//! the environment that chooses it.

#[cfg(feature = "known-bad")]
pub(crate) use wald_bucket::ignores_term;

/// Whether an owner does not check the term that a forwarded call names: never.
#[cfg(not(feature = "known-bad"))]
pub(crate) const fn ignores_term() -> bool {
    false
}
