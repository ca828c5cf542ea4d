//! A node with a deliberate mistake, for testing the tests. `storage/bucket/src/known_bad.rs` has its name, and the variable of
//! the environment that chooses it.

#[cfg(all(feature = "object", feature = "known-bad"))]
pub(crate) use wald_bucket::ignores_term;

/// Whether an owner does not check the term that a forwarded call names: never.
#[cfg(all(feature = "object", not(feature = "known-bad")))]
pub(crate) const fn ignores_term() -> bool {
    false
}

/// Spoils the nonce of an encrypted body: `WALD_KNOWN_BAD` is `nonce_reused`, or `key_in_frame`, with which a frame
/// shows a part of its key.
#[cfg(any(test, feature = "known-bad"))]
pub(crate) fn spoil_nonce(nonce: &mut [u8; wald_storage::NONCE_BYTES], key: &[u8]) {
    match std::env::var("WALD_KNOWN_BAD").as_deref() {
        Ok("nonce_reused") => nonce.fill(7),
        Ok("key_in_frame") => nonce.copy_from_slice(&key[..wald_storage::NONCE_BYTES]),
        _ => {}
    }
}
