//! Shippers, and nodes of a store, with deliberate mistakes, for testing the tests: at least one test must catch each mistake. Otherwise the tests
//! prove nothing.
//!
//! Only in this crate's own tests, and with the feature `known-bad`, which no released build has. The environment variable
//! `WALD_KNOWN_BAD_REPLICA` names the mistake; without it the shipper is correct. In other builds this module does nothing.
//! Mistakes of the engine, such as shipping bytes that are only written, are in `storage/src/disk/known_bad.rs`.

/// A deliberate mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    not(any(test, feature = "known-bad")),
    allow(dead_code, reason = "never made")
)]
pub(crate) enum ShipMistake {
    /// A part is published before its PUT.
    AckBeforePut,
    /// Everything durable is published once a part is stored.
    PublishDurable,
    /// Rows leave the tail before their segment is uploaded.
    DrainBeforeUpload,
    /// Each fifth part is not stored.
    SkipRow,
    /// A manifest counts before its content is in the bucket.
    ManifestBeforeContent,
    /// A manifest counts before the tail has the trims on which its runs rest.
    ManifestBeforeTrims,
    /// An owner that was fenced goes on.
    FenceIgnored,
    /// Old content is removed although the newest manifest names it.
    NamedContentRemoved,
    /// An owner with a valid lease acks REPLICATED although no PUT under its fence has succeeded.
    LeaseForFence,
    /// Rows are stored before the key ring has their keys.
    RingLate,
    /// A take-over leaves out one row between the files and the end.
    StandBySkipsRow,
    /// An owner does not check the term that a forwarded call names. The server makes it.
    TermUnchecked,
}

#[cfg(not(any(test, feature = "known-bad")))]
pub(crate) const fn makes(_mistake: ShipMistake) -> bool {
    false
}

#[cfg(any(test, feature = "known-bad"))]
pub(crate) fn makes(mistake: ShipMistake) -> bool {
    /// Each mistake, by its name.
    const NAMES: [(&str, ShipMistake); 12] = [
        ("ack_before_put", ShipMistake::AckBeforePut),
        ("publish_durable", ShipMistake::PublishDurable),
        ("drain_before_upload", ShipMistake::DrainBeforeUpload),
        ("skip_part", ShipMistake::SkipRow),
        (
            "manifest_before_content",
            ShipMistake::ManifestBeforeContent,
        ),
        ("manifest_before_trims", ShipMistake::ManifestBeforeTrims),
        ("fence_ignored", ShipMistake::FenceIgnored),
        ("named_content_removed", ShipMistake::NamedContentRemoved),
        ("lease_for_fence", ShipMistake::LeaseForFence),
        ("ring_late", ShipMistake::RingLate),
        ("stand_by_skips_row", ShipMistake::StandBySkipsRow),
        ("term_unchecked", ShipMistake::TermUnchecked),
    ];
    static CHOSEN: std::sync::OnceLock<Option<ShipMistake>> = std::sync::OnceLock::new();
    let chosen = CHOSEN.get_or_init(|| {
        let name = std::env::var("WALD_KNOWN_BAD_REPLICA").ok()?;
        let known = NAMES.iter().find(|(known, _)| *known == name);
        let names = NAMES.map(|(name, _)| name).join(", ");
        let (_, mistake) =
            known.unwrap_or_else(|| panic!("WALD_KNOWN_BAD_REPLICA={name}: not one of {names}"));
        Some(*mistake)
    });
    *chosen == Some(mistake)
}

/// Whether the server makes its mistake: an owner does not check the term that a forwarded call names.
#[cfg(feature = "known-bad")]
pub fn ignores_term() -> bool {
    makes(ShipMistake::TermUnchecked)
}
