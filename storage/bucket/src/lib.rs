//! Object stores for Wald: backups use this crate, and so will the replica of a store.
//!
//! ```text
//! BucketUrl ─▶ Bucket ──▶ Observed (count, seconds, bytes) ──▶ S3, GCS, Azure
//!               ├ probe     which buckets are refused
//!               ├ record    small JSON objects, changed by conditional writes
//!               ├ hold      the one writer of a prefix: a record with a lease
//!               ├ upload    files named by their digest, in bounded pieces
//!               ├ tail      the journal's newest bytes, with the feature `replica`
//!               └ ship      takes an engine's journal into the tail, and its files into content
//! ```
//!
//! Without the feature `object` the crate only recognises URLs and take-overs, so that a program can refuse them in one sentence.

mod takeover;
mod url;

#[cfg(feature = "object")]
mod beat;
#[cfg(feature = "object")]
mod bucket;
#[cfg(feature = "object")]
mod client;
#[cfg(feature = "object")]
mod error;
#[cfg(test)]
#[cfg(feature = "object")]
mod faults;
#[cfg(feature = "object")]
mod hold;
#[cfg(feature = "replica")]
mod known_bad;
#[cfg(feature = "object")]
mod observe;
#[cfg(feature = "object")]
mod probe;
#[cfg(feature = "object")]
mod record;
#[cfg(feature = "object")]
mod renew;
#[cfg(feature = "object")]
mod settings;
#[cfg(feature = "replica")]
mod ship;
#[cfg(feature = "replica")]
mod tail;
#[cfg(feature = "object")]
mod upload;

pub use takeover::{BadTakeOver, TakeOver};
pub use url::{BadUrl, BucketUrl, NOT_BUILT, Scheme, is_url};

#[cfg(feature = "object")]
pub use {
    bucket::{Bucket, BucketEntry, Put, Tag, WriteCondition},
    error::{BucketError, BucketErrorKind},
    hold::{Hold, Taken},
    observe::{BucketRequest, Direction, Op, RequestObserver, Tally},
    probe::{NEW_ENDPOINT_ROUNDS, ProbeError, ROUNDS, probe},
    record::{BucketRecord, LARGEST_RECORD},
    settings::BucketSettings,
    upload::{PART_BYTES, SLOTS, Upload, Uploads},
};

#[cfg(all(feature = "replica", feature = "known-bad"))]
pub use known_bad::ignores_term;
#[cfg(feature = "replica")]
pub use ship::{
    DOWN_AFTER, FencedStore, FencedTail, KeyRingVersion, ManifestFormat, Membership, NodeLease,
    NodeRecord, NodeState, NodeWatch, OwnerClaim, OwnerError, OwnerRecord, OwnerState, ReplicaCopy,
    ReplicaFile, ReplicaOwner, ReplicaParts, SeenNode, ShipEnd, ShipError, ShipEvent, ShipGap,
    ShipObserver, ShipSettings, ShipSource, ShippedRing, Shipper, StandByTurn, StandByWatch,
    read_key_ring,
};
#[cfg(feature = "replica")]
pub use tail::{
    LARGEST_PART, LONGEST_MANIFEST_NAME, ReplicaTail, TailCopy, TailError, TailErrorKind,
    TailFollower, TailManifest, TailPart, TailRows, probe_metadata,
};
