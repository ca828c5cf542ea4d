//! The interface between an engine and a replica: a copy of the journal on another machine.
//!
//! ```text
//!  flush ─▶ durable ─▶ read_part(from) ─▶ the shipper stores the bytes ─▶ publish(end) ─▶ answers REPLICATED
//!                                    the shipper stores the files ─▶ release(end) ─▶ segments may be sorted
//! ```
//!
//! The shipper is a task outside of the engine. It decides when bytes travel, and where to. The engine keeps three
//! positions: replicated ≤ durable ≤ written.
//!
//! Before the engine serves callers, the shipper stores everything below [`Replica::durable`] and publishes it. Until
//! then no position is known to be replicated.
//!
//! A manifest that names a new sorted run rests on the durable state from which the run was made. So the shipper reads
//! [`Replica::durable`] after it has seen the run, and names the run once that position is replicated.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use crate::api::content::ContentDigest;
use crate::api::engine::{Backup, BackupManifest, BoxFuture};
use crate::api::error::BackupError;
use crate::base::ids::{Position, SegmentId};

/// Maximum distance of a replica behind its journal. Beyond it, appends get BUSY.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaBounds {
    /// Maximum bytes that are durable and not replicated. At most [`MAX_REPLICA_LAG`].
    pub max_lag: u64,
}

/// Upper bound of [`ReplicaBounds::max_lag`]. The positions of the next owner begin 4 GiB beyond the replicated ones, so
/// it never assigns a position of a record that was lost. For the same reason it bounds all positions between replicated and
/// durable, also the unused ones.
pub const MAX_REPLICA_LAG: u64 = 1 << 30;

/// Number of sealed segments that may wait for their release.
pub const MOST_UNRELEASED: u64 = 16;

/// Consecutive bytes of one segment, as its file has them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalPart {
    /// The segment.
    pub segment: SegmentId,
    /// Position of the first byte. The first part of a segment begins at its base, with the life block.
    pub position: Position,
    /// The life block, if the part begins a segment, and whole groups of frames.
    pub bytes: Bytes,
    /// Position behind the last byte, where the next part begins, perhaps in the next segment.
    pub end: Position,
}

/// Reason for which nothing is replicated any more, or for now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unreplicated {
    /// The bucket is unreachable. Requests for less than REPLICATED go on.
    BucketDown,
    /// Another node owns the store. All changes are refused.
    Moved {
        /// The node that owns the store, as clients reach it.
        owner: String,
        /// Number of its term, which rises with each owner.
        term: u64,
    },
}

/// The right to answer without the replica, while other nodes may take the store over.
pub trait OwnerLease: Send + Sync + 'static {
    /// Whether no other node can own the store now. Called before each answer, so it must return at once.
    fn holds(&self) -> bool;
}

/// Whether the replica takes the journal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReplicaState {
    /// Requests for REPLICATED are accepted.
    #[default]
    Serving,
    /// The bucket is unreachable. Requests for REPLICATED are refused for now.
    BucketDown,
    /// Another node owns the store. All changes are refused for good.
    Fenced,
}

/// State of a replica, for its shipper and for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplicaProgress {
    /// Everything below is on the device, and may be shipped.
    pub durable: Position,
    /// Everything below is replicated.
    pub replicated: Position,
    /// Bytes that are durable and not replicated. Positions that segments left unused do not count.
    pub behind: u64,
    /// Segments whose last position is below are in files of the replica.
    pub released: Position,
    /// Number of requests that wait for the replicated position.
    pub waiting: usize,
    /// Number of sealed segments that wait for their release.
    pub unreleased: u64,
    /// Whether the replica takes the journal.
    pub state: ReplicaState,
    /// Whether the journal has failed, or another node owns the store: no more bytes become durable.
    pub ended: bool,
}

/// The engine's side of a replica. One shipper uses it.
pub trait Replica: Send + Sync + 'static {
    /// The positions and the number of waiting requests now.
    fn progress(&self) -> ReplicaProgress;

    /// Number of records that are durable and not replicated, of those that this process has written. Exact until
    /// they are in more than 1,024 groups, then an upper bound until those are replicated.
    fn lag_records(&self) -> u64;

    /// Resolves when bytes beyond `durable` became durable, or when a request that waits for the replicated position has
    /// arrived and `waiting` is false. Also resolves when the journal has failed or another node owns the store.
    fn changed(&self, durable: Position, waiting: bool) -> BoxFuture<'_, ()>;

    /// Durable bytes from `from` on: whole groups of one segment, at most `most` bytes. A larger group comes alone.
    /// `None` if nothing beyond `from` is durable. `from` is 0, or the end of the part before.
    ///
    /// # Errors
    /// If the bytes cannot be read, or if no segment has them any more.
    fn read_part(
        &self,
        from: Position,
        most: usize,
    ) -> BoxFuture<'_, io::Result<Option<JournalPart>>>;

    /// Notes that everything below `end` is replicated, and answers the requests that waited for it. `end` is the end of
    /// a part. A position that does not go up changes nothing.
    fn publish(&self, end: Position);

    /// Begins a backup for the replica: of everything in sorted runs and sealed segments that is durable. As
    /// [`Operate::backup`](crate::Operate::backup), but it needs none of the places of backups, and leaves no segment: a
    /// replica that tries again and again makes no small segments. The replica has the rest as parts of the journal.
    ///
    /// `earlier` is the manifest that counts now. A segment that has rotted since keeps the content that `earlier` names
    /// for it: the replica still has that content.
    ///
    /// # Errors
    /// If the journal has failed.
    fn files(
        &self,
        known: HashSet<ContentDigest>,
        earlier: Option<Arc<BackupManifest>>,
    ) -> BoxFuture<'_, Result<Box<dyn Backup>, BackupError>>;

    /// Notes that files of the replica hold all segments that end at or below `end`. Only these segments are
    /// sorted and recycled.
    fn release(&self, end: Position);

    /// Sets the lease of this node; later calls change nothing. While it does not hold, new requests and reads are refused, and
    /// requests in flight are answered with an unknown outcome unless they are replicated. Without a lease no other node
    /// takes the store over by itself.
    fn hold_lease(&self, lease: Arc<dyn OwnerLease>);

    /// Ends replication for a reason. Requests in flight are answered with an unknown outcome.
    fn stop(&self, reason: Unreplicated);

    /// The bucket is reachable again.
    fn resume(&self);
}
