//! The shipper: takes the journal of an engine into the bucket.
//!
//! ```text
//! changed ─▶ pace ─▶ read_part ─▶ row of the tail ─▶ publish: requests for REPLICATED are answered
//!
//! sealed segments ─▶ backup ─▶ content ─▶ manifest ─▶ its row ─▶ drain, release: they may be sorted
//! ```
//!
//! - Only durable bytes are stored, one PUT at a time. The journal never waits for the shipper.
//! - A part stays in memory until it is stored, and only one is: at most 8 MiB, or one larger group.
//! - A bucket that gives no answer for [`DOWN_AFTER`] is reported to the engine, and a journal that cannot be read for so long.
//!   The shipper goes on with the same part.
//! - An owner that was fenced stores nothing any more. The shipper tells the engine which node owns the store.

mod cluster;
mod copy;
mod error;
mod files;
mod keeper;
mod keys;
mod nodes;
mod owner;
mod pace;
mod resume;
mod shipped;
mod standby;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use wald_storage::{BackupManifest, JournalPart, Operate, Position, Replica, Unreplicated};

use self::files::ReplicaFiles;
use self::keys::ShippedKeys;
use self::pace::{ShipPace, ShipTurn};
use self::resume::SeenRows;
use self::shipped::Shipped;
use crate::bucket::Bucket;
use crate::known_bad;
use crate::known_bad::ShipMistake;
use crate::tail::{LARGEST_PART, ReplicaTail, TailError, TailErrorKind, TailPart};

pub use self::copy::{ReplicaCopy, ReplicaFile};
pub use self::error::{OwnerError, ShipError};
pub use self::keeper::{FencedStore, FencedTail, ReplicaOwner, ReplicaParts};
pub use self::keys::{KeyRingVersion, ShippedRing, read_key_ring};
pub use self::nodes::{Membership, NodeLease, NodeRecord, NodeState, NodeWatch, SeenNode};
pub use self::owner::{OwnerClaim, OwnerRecord, OwnerState};
pub use self::pace::ShipGap;
pub use self::standby::{StandByTurn, StandByWatch};

/// Time without an answer after which requests hear that the bucket is unreachable.
pub const DOWN_AFTER: Duration = Duration::from_secs(10);
/// Pause before a request to the bucket or a read of the journal is repeated.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Maximum time to find out which node has fenced this one.
const OWNER_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes that are read at once: a life block and whole groups of this length are one row.
const PART_BYTES: usize = LARGEST_PART - (64 << 10);

/// The engine that is shipped.
pub trait ShipSource: Replica + Operate {}

impl<T: Replica + Operate> ShipSource for T {}

/// The encoding of manifests. The bucket has the same manifests as backups.
pub trait ManifestFormat: Send + Sync + 'static {
    /// The bytes of a manifest.
    fn encode(&self, manifest: &BackupManifest) -> Vec<u8>;

    /// Reads the bytes of a manifest.
    ///
    /// # Errors
    /// If they are damaged, or of a newer version.
    fn decode(&self, bytes: &[u8]) -> Result<BackupManifest, String>;
}

/// Settings of a shipper.
#[derive(Debug, Clone, Copy)]
pub struct ShipSettings {
    /// Minimum time between the starts of two PUTs.
    pub gap: ShipGap,
    /// Maximum time that durable bytes wait if no request waits for them.
    pub interval: Duration,
    /// Bound of the engine on the bytes that are durable and not stored.
    pub max_lag: u64,
    /// Time for which content stays after the last manifest that names it was replaced.
    pub keep: Duration,
}

/// An event, for messages and metrics.
#[derive(Debug)]
pub enum ShipEvent<'a> {
    /// A part of the journal is in the bucket.
    Stored {
        /// Its size.
        bytes: u64,
        /// Time of the PUT.
        took: Duration,
        /// Rows that no file holds yet.
        tail_rows: u64,
    },
    /// The bucket has given no answer for [`DOWN_AFTER`], or the journal could not be read for so long.
    Down,
    /// A part is stored again.
    Up,
    /// Durable bytes cannot be read. The shipper tries again.
    Unread(&'a io::Error),
    /// A manifest counts.
    Named {
        /// Files of the manifest.
        files: u64,
        /// Bytes of content that were sent for it.
        sent_bytes: u64,
        /// Files hold the journal below.
        position: Position,
        /// Rows that no file holds yet.
        tail_rows: u64,
    },
    /// The newest manifest names damage of the store, and the one before did not, or was of another owner. Nothing is removed from
    /// the bucket while it does.
    Damaged {
        /// Number of damaged places.
        places: u64,
    },
    /// Files were not uploaded, or old ones not removed. The shipper tries again.
    Failed(&'a ShipError),
    /// A tail that had stopped was not opened again. The next attempt follows.
    NotOpened(&'a OwnerError),
    /// The nodes of the store were looked at.
    Nodes {
        /// The record of this node.
        owner: &'a OwnerRecord,
        /// The nodes, by name.
        nodes: &'a [SeenNode],
    },
    /// This node owns the store, and everything durable is stored.
    Owns {
        /// Number of its term.
        term: u64,
    },
}

/// Takes the events of a shipper. Must return at once.
pub trait ShipObserver: Send + Sync + 'static {
    /// An event.
    fn event(&self, event: &ShipEvent<'_>);
}

/// The reason why a shipper has ended.
#[derive(Debug)]
pub enum ShipEnd {
    /// Another node owns the store. The engine knows it.
    Fenced {
        /// Its record; `None` if the bucket did not name it in time.
        owner: Option<OwnerRecord>,
    },
    /// The tail has stopped. The caller opens it again, with the next term.
    Stopped(TailError),
    /// The journal has failed, or the engine knows another owner. All that could be shipped is in the bucket.
    Journal,
    /// The caller asked for the end. Everything durable is in the bucket.
    Shipped,
}

/// The parts that both halves of the shipper use.
struct Ship {
    source: Arc<dyn ShipSource>,
    bucket: Bucket,
    settings: ShipSettings,
    observer: Arc<dyn ShipObserver>,
    shipped: watch::Sender<Shipped>,
    down: AtomicBool,
    /// `None`: the records are plain.
    keys: Option<ShippedKeys>,
}

/// Ships one engine, as the owner of one term.
pub struct Shipper {
    ship: Ship,
    files: ReplicaFiles,
    tail: Arc<ReplicaTail>,
}

impl Shipper {
    /// Compares the bucket with the engine, and stores everything that is durable now. Only then may the engine serve. `seen`: the
    /// rows of the tail, if this owner has read them already.
    ///
    /// # Errors
    /// `OtherStore` if the bucket belongs to another store, `Diverged` if the engine lacks something that the bucket has;
    /// others if the bucket or the journal fails.
    async fn begin(
        parts: &ReplicaParts,
        tail: Arc<ReplicaTail>,
        seen: Option<SeenRows>,
    ) -> Result<Self, ShipError> {
        let (source, bucket) = (Arc::clone(&parts.source), &parts.bucket);
        let format = Arc::clone(&parts.format);
        // Nothing is stored before: a row may need its keys.
        let keys = match &parts.keys {
            Some(keys) => Some(ShippedKeys::claim(Arc::clone(keys), bucket, tail.term()).await?),
            None => None,
        };
        let claims = cluster::claim(bucket, source.profile().store_id);
        let (claimed, files) = tokio::join!(claims, ReplicaFiles::open(bucket, &tail, format));
        claimed?;
        let files = files?;
        let ship = Ship {
            source,
            bucket: bucket.clone(),
            settings: parts.settings,
            observer: Arc::clone(&parts.observer),
            shipped: watch::Sender::new(Shipped::default()),
            down: AtomicBool::new(false),
            keys,
        };
        let mut shipper = Self { ship, files, tail };
        shipper.resume(seen).await?;
        Ok(shipper)
    }

    /// Ships until the tail or the journal ends, or until `stop` is true or its sender is gone and everything is shipped.
    pub async fn run(&mut self, stop: watch::Receiver<bool>) -> ShipEnd {
        let (ship, tail) = (&self.ship, &*self.tail);
        let error = tokio::select! {
            end = ship.rows(tail, stop) => match end {
                Ok(end) => return end,
                Err(error) => error,
            },
            error = self.files.run(ship, tail) => error,
            error = ship.keys_change() => error,
            error = tail.ended(), if !known_bad::makes(ShipMistake::FenceIgnored) => error,
        };
        match error.kind() {
            TailErrorKind::Fenced => ShipEnd::Fenced {
                owner: ship.moved(tail.term()).await,
            },
            _ => ShipEnd::Stopped(error),
        }
    }

    /// Tells the engine that another node takes the store over, and returns its record if there is one.
    async fn moved(&self) -> Option<OwnerRecord> {
        self.ship.moved(self.tail.term()).await
    }
}

impl Ship {
    /// Stores the durable bytes as rows. Returns the end that is no failure of the tail.
    async fn rows(
        &self,
        tail: &ReplicaTail,
        mut stop: watch::Receiver<bool>,
    ) -> Result<ShipEnd, TailError> {
        let ShipSettings {
            gap,
            interval,
            max_lag,
            ..
        } = self.settings;
        let mut pace = ShipPace::new(gap, interval, max_lag);
        let mut unread_since = None;
        loop {
            let last = self.due(&mut pace, &mut stop).await;
            let durable = self.source.progress().durable;
            let from = self.shipped.borrow().end;
            let read = self.source.read_part(from, PART_BYTES).await;
            if read.is_ok() {
                unread_since = None;
            }
            match read {
                Ok(Some(part)) => {
                    let started = Instant::now();
                    pace.starts(started, self.source.progress().waiting);
                    if known_bad::makes(ShipMistake::AckBeforePut) {
                        self.source.publish(part.end);
                    }
                    self.store_part(tail, &part).await?;
                    let took = started.elapsed();
                    let waited = self.source.progress().waiting;
                    self.publish(&part, took);
                    if known_bad::makes(ShipMistake::PublishDurable) {
                        self.source.publish(self.source.progress().durable);
                    }
                    pace.ends(started + took, waited);
                }
                Ok(None) => match last {
                    Some(end) => return Ok(end),
                    // The rest of a segment may be unused.
                    None => self
                        .shipped
                        .send_modify(|shipped| shipped.empty_to(durable)),
                },
                Err(error) => {
                    self.observer.event(&ShipEvent::Unread(&error));
                    // Requests for REPLICATED must not wait without a bound for a disk either.
                    if unread_since.get_or_insert_with(Instant::now).elapsed() >= DOWN_AFTER {
                        self.is_down();
                    }
                    sleep(RETRY_PAUSE).await;
                    // A caller that asked for the end gives up by itself. The store is not released without the rest.
                    if let Some(ShipEnd::Journal) = last {
                        return Ok(ShipEnd::Journal);
                    }
                }
            }
        }
    }

    /// Waits until the next part may be stored. Returns the reason of the end if no bytes come after those that are
    /// durable now.
    async fn due(&self, pace: &mut ShipPace, stop: &mut watch::Receiver<bool>) -> Option<ShipEnd> {
        loop {
            let progress = self.source.progress();
            if progress.ended {
                return Some(ShipEnd::Journal);
            }
            if *stop.borrow_and_update() || stop.has_changed().is_err() {
                return Some(ShipEnd::Shipped);
            }
            let reached = self.shipped.borrow().reached();
            let waiting_bytes = progress.durable.since(reached);
            match pace.next(Instant::now(), waiting_bytes, progress.waiting) {
                ShipTurn::Now => return None,
                ShipTurn::Idle => tokio::select! {
                    () = self.source.changed(progress.durable, true) => {}
                    _ = stop.changed() => {}
                },
                // No request waits. Fewer bytes than these wake nobody, so that a busy log costs the shipper nothing.
                ShipTurn::Gathering(until) => tokio::select! {
                    () = self.source.changed(reached.advance(pace.soon_bytes() - 1), false) => {}
                    () = sleep_until(until) => {}
                    _ = stop.changed() => {}
                },
                ShipTurn::Spaced(until) => tokio::select! {
                    () = sleep_until(until) => {}
                    _ = stop.changed() => {}
                },
                ShipTurn::Lingering(until) => tokio::select! {
                    () = self.source.changed(progress.durable, true) => {}
                    () = sleep_until(until) => {}
                    _ = stop.changed() => {}
                },
            }
        }
    }

    /// Stores the key ring whenever it changes. Returns when a later owner has written it.
    async fn keys_change(&self) -> TailError {
        match &self.keys {
            Some(keys) => keys.run().await,
            None => std::future::pending().await,
        }
    }

    /// Generation of the key ring in the bucket; `None` if the records are plain.
    fn stored_keys(&self) -> Option<watch::Receiver<u64>> {
        self.keys.as_ref().map(ShippedKeys::stored)
    }

    /// Stores a part. All rows of a part but the last one have the largest size. They are stored together: nobody can go on behind
    /// a part of a group.
    async fn store_part(&self, tail: &ReplicaTail, part: &JournalPart) -> Result<(), TailError> {
        if known_bad::makes(ShipMistake::SkipRow) && (part.end.get() / 8).is_multiple_of(5) {
            return Ok(());
        }
        let starts = (0..part.bytes.len()).step_by(LARGEST_PART);
        let rows = starts.map(|at| TailPart {
            segment: part.segment.get(),
            position: part.position.get() + at as u64,
            bytes: (part.bytes).slice(at..part.bytes.len().min(at + LARGEST_PART)),
        });
        let rows: Vec<TailPart> = rows.collect();
        if rows.is_empty() {
            return Ok(());
        }
        let rows = &rows;
        let patience = DOWN_AFTER * u32::try_from(rows.len()).unwrap_or(1);
        self.store(patience, || async {
            if let Some(keys) = &self.keys {
                keys.before_row().await?;
            }
            tail.put_all(rows).await
        })
        .await
    }

    /// Stores something. Repeats the same until the bucket answers, however long that takes. After `patience` requests hear that
    /// the bucket is unreachable.
    async fn store<F>(&self, patience: Duration, store: impl Fn() -> F) -> Result<(), TailError>
    where
        F: Future<Output = Result<(), TailError>>,
    {
        let down_at = Instant::now() + patience;
        loop {
            let row = store();
            tokio::pin!(row);
            let stored = match timeout_at(down_at, &mut row).await {
                Ok(stored) => stored,
                Err(_) => {
                    self.is_down();
                    row.await
                }
            };
            match stored {
                Err(error) if error.kind() == TailErrorKind::Unreachable => {
                    sleep(RETRY_PAUSE).await;
                }
                Err(error)
                    if error.kind() == TailErrorKind::Fenced
                        && known_bad::makes(ShipMistake::FenceIgnored) =>
                {
                    return Ok(());
                }
                stored => return stored,
            }
        }
    }

    /// Publishes a part that is in the bucket.
    fn publish(&self, part: &JournalPart, took: Duration) {
        self.note(part);
        self.source.publish(part.end);
        self.is_up();
        self.observer.event(&ShipEvent::Stored {
            bytes: part.bytes.len() as u64,
            took,
            tail_rows: self.shipped.borrow().rows(),
        });
    }

    fn note(&self, part: &JournalPart) {
        let rows = part.bytes.len().div_ceil(LARGEST_PART) as u64;
        self.shipped
            .send_modify(|shipped| shipped.note(part.segment, part.end, rows));
    }

    fn is_down(&self) {
        if !self.down.swap(true, Ordering::Relaxed) {
            self.source.stop(Unreplicated::BucketDown);
            self.observer.event(&ShipEvent::Down);
        }
    }

    fn is_up(&self) {
        if self.down.swap(false, Ordering::Relaxed) {
            self.source.resume();
            self.observer.event(&ShipEvent::Up);
        }
    }

    /// Tells the engine which node owns the store, and returns its record. A request that waits does not wait long for
    /// the name.
    async fn moved(&self, term: u64) -> Option<OwnerRecord> {
        let found = timeout(OWNER_TIMEOUT, OwnerRecord::read(&self.bucket)).await;
        let newer = match found {
            Ok(Ok(Some(record))) => Some(record.value).filter(|record| record.term > term),
            _ => None,
        };
        let (owner, term) = match &newer {
            None => (String::new(), term + 1),
            Some(record) => (record.endpoint.clone(), record.term),
        };
        self.source.stop(Unreplicated::Moved { owner, term });
        newer
    }

    /// Waits until everything below a position is shipped.
    async fn reach(&self, position: Position) {
        let mut shipped = self.shipped.subscribe();
        // The sender lives as long as this future.
        let _ = shipped
            .wait_for(|shipped| shipped.reached() >= position)
            .await;
    }
}

/// The rest of a part from a position on.
fn rest_of(part: &JournalPart, from: Position) -> JournalPart {
    let skipped = usize::try_from(from.since(part.position)).unwrap_or(usize::MAX);
    let bytes: Bytes = part.bytes.slice(skipped.min(part.bytes.len())..);
    JournalPart {
        position: part.position.advance(skipped as u64),
        bytes,
        ..part.clone()
    }
}
