//! Errors of the shipper.

use std::io;

use wald_storage::BackupError;

use super::owner::OwnerRecord;
use crate::error::BucketError;
use crate::tail::TailError;

/// An error of the shipper.
#[derive(Debug, thiserror::Error)]
pub enum ShipError {
    /// The tail failed.
    #[error(transparent)]
    Tail(#[from] TailError),
    /// The bucket failed.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// The files of the store cannot be read.
    #[error("taking the files of the store: {0}")]
    Backup(#[from] BackupError),
    /// The key ring of the bucket and the one of the directory do not fit each other.
    #[error("{place}/keys/ring: {what}")]
    Keys {
        /// The bucket.
        place: String,
        /// The reason.
        what: String,
    },
    /// The journal cannot be read.
    #[error("reading the journal for the bucket: {0}")]
    Journal(#[source] io::Error),
    /// The manifest that counts cannot be used.
    #[error("{place}: the manifest {name}: {what}")]
    Manifest {
        /// The bucket.
        place: String,
        /// Its name.
        name: String,
        /// The fault.
        what: String,
    },
    /// The bucket belongs to another store.
    #[error(
        "{place} has the replica of the store {found:032x}, and the data directory has the store {own:032x}; name another \
         prefix, or the directory of that store"
    )]
    OtherStore {
        /// The bucket.
        place: String,
        /// Number that identifies its store.
        found: u128,
        /// Number that identifies the store of the directory.
        own: u128,
    },
    /// The first owner has not stored the files of the store yet. It has promised nothing.
    #[error(
        "{place}: the replica is incomplete: it has no files yet, and its rows begin with segment {segment}; start the \
         daemon that owns the store, which sends the rest"
    )]
    Incomplete {
        /// The bucket.
        place: String,
        /// Number of the first segment.
        segment: u64,
    },
    /// The directory lacks something that the bucket has.
    #[error(
        "{place}: the data directory lacks a part of the journal that the bucket has: {what}; this directory is not the \
         newest one of the store"
    )]
    Diverged {
        /// The bucket.
        place: String,
        /// The difference.
        what: String,
    },
}

/// An error of an owner.
#[derive(Debug, thiserror::Error)]
pub enum OwnerError {
    /// Another node owns the store.
    #[error(
        "{place}: the node {node:?} ({endpoint}) owns the store in term {term}; stop it, or start with \
         --take-over={term} if it is gone for good",
        node = .owner.node,
        endpoint = .owner.endpoint,
        term = .owner.term
    )]
    Owned {
        /// The bucket.
        place: String,
        /// The owner.
        owner: Box<OwnerRecord>,
    },
    /// Another node has served the store after this directory did.
    #[error(
        "{place}: the node {node:?} ({endpoint}) owns the store in term {term}, and has stored records that this data \
         directory lacks; keep the directory or remove it; to serve the store here again, stop that node and start with \
         --take-over={term} and an empty directory",
        node = .owner.node,
        endpoint = .owner.endpoint,
        term = .owner.term
    )]
    Superseded {
        /// The bucket.
        place: String,
        /// The last owner.
        owner: Box<OwnerRecord>,
    },
    /// Other nodes claim terms at the same time.
    #[error("{place}: other nodes claim the store at the same time; start only one of them")]
    Contended {
        /// The bucket.
        place: String,
    },
    /// The term cannot be kept in the data directory.
    #[error("writing the term to the data directory: {0}")]
    Kept(#[source] io::Error),
    /// The journal could not be shipped.
    #[error(transparent)]
    Ship(#[from] ShipError),
}

impl From<TailError> for OwnerError {
    fn from(error: TailError) -> Self {
        Self::Ship(error.into())
    }
}

impl From<BucketError> for OwnerError {
    fn from(error: BucketError) -> Self {
        Self::Ship(error.into())
    }
}
