//! The keys of an encrypted store in its bucket: one object, which its owner replaces.
//!
//! ```text
//! new key ─▶ ring of the owner ─▶ bodies have it ─▶ durable ─▶ keys/ring, if it changed ─▶ row or file
//! ```
//!
//! - The object has every key before a row or a file whose bodies need it leaves for the bucket.
//! - Each write has a condition: an owner that was fenced fails with it once the next one has written.
//! - It is in no manifest and has no digest in its name, so that a key that was destroyed is in no older state of the store.
//!
//! The ring is a text of the server, with a term and a generation. Its keys are wrapped.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{Mutex, watch};
use tokio::time::sleep;

use super::{OwnerRecord, RETRY_PAUSE, ShipError};
use crate::bucket::{Bucket, Put, Tag, WriteCondition};
use crate::error::BucketError;
use crate::known_bad;
use crate::known_bad::ShipMistake;
use crate::tail::TailError;

/// Path of the object.
const RING: &str = "keys/ring";
/// Maximum bytes of a ring: 4 million keys.
const LARGEST_RING: u64 = 1 << 30;

/// The keys of the engine, as the server has them.
pub trait ShippedRing: Send + Sync + 'static {
    /// The generation of the ring, which rises with each change. Bodies with a key of a ring come after its generation.
    fn generation(&self) -> watch::Receiver<u64>;

    /// The ring as it is now, and its generation.
    fn ring(&self) -> (u64, Bytes);

    /// Makes the ring the one of the owner of this term, and makes it durable. `found`: the ring in the bucket.
    ///
    /// # Errors
    /// In a sentence, if the bucket has a ring that this one cannot follow, or if the ring cannot be made durable.
    fn claim(&self, term: u64, found: Option<&[u8]>) -> Result<(), String>;

    /// The term of a ring.
    ///
    /// # Errors
    /// In words, if it is damaged.
    fn term_of(&self, ring: &[u8]) -> Result<u64, String>;

    /// Notes that the bucket has the ring of this generation.
    fn note_stored(&self, generation: u64);

    /// Notes why the ring cannot be written over the one that the bucket has. It is tried again.
    fn note_refused(&self, why: &ShipError);
}

/// Reads the ring in the bucket; `None` if the store is not encrypted.
///
/// # Errors
/// If the bucket fails, or the object is larger than 1 GiB.
pub async fn read_key_ring(bucket: &Bucket) -> Result<Option<Bytes>, BucketError> {
    Ok(read(bucket).await?.map(|(ring, _)| ring))
}

async fn read(bucket: &Bucket) -> Result<Option<(Bytes, Tag)>, BucketError> {
    bucket.read(RING, LARGEST_RING).await
}

/// The version of the ring in the bucket: the tag that it has; `None` if there is no ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRingVersion(Option<Tag>);

impl KeyRingVersion {
    /// Asks for the version, and reads nothing else.
    ///
    /// # Errors
    /// If the bucket fails.
    pub async fn now(bucket: &Bucket) -> Result<Self, BucketError> {
        Ok(Self(bucket.tag(RING).await?))
    }
}

/// Replaces the ring in the bucket by its successor, for a node that has fenced the owner before and has no ring of its own.
/// Returns the new one; `None` if the bucket has none.
///
/// # Errors
/// `Keys` if `next` refuses the ring; others if the bucket fails.
pub(super) async fn take(
    bucket: &Bucket,
    next: &(dyn Fn(&[u8]) -> Result<Bytes, String> + Sync),
) -> Result<Option<Bytes>, ShipError> {
    // The owner before may write until this node has.
    while let Some((found, tag)) = read(bucket).await? {
        let ring = next(&found).map_err(|what| refused(bucket, what))?;
        let put = bucket.put_if(RING, ring.clone(), WriteCondition::Is(&tag));
        if let Put::Done(_) = put.await? {
            return Ok(Some(ring));
        }
    }
    Ok(None)
}

fn refused(bucket: &Bucket, what: String) -> ShipError {
    let place = bucket.place().to_owned();
    ShipError::Keys { place, what }
}

/// The keys of one term.
pub(super) struct ShippedKeys {
    source: Arc<dyn ShippedRing>,
    bucket: Bucket,
    term: u64,
    /// Generation that the bucket has, for others.
    stored: watch::Sender<u64>,
    /// The version that this owner has read or written. Held during a write: there is one at a time.
    tag: Mutex<Option<Tag>>,
}

impl ShippedKeys {
    /// Makes the ring in the bucket the one of this term, so that no owner before writes it any more.
    pub(super) async fn claim(
        source: Arc<dyn ShippedRing>,
        bucket: &Bucket,
        term: u64,
    ) -> Result<Self, ShipError> {
        let found = read(bucket).await?;
        let ring = found.as_ref().map(|(ring, _)| &**ring);
        (source.claim(term, ring)).map_err(|what| refused(bucket, what))?;
        let keys = Self {
            source,
            bucket: bucket.clone(),
            term,
            stored: watch::Sender::new(0),
            tag: Mutex::new(found.map(|(_, tag)| tag)),
        };
        keys.store().await?;
        Ok(keys)
    }

    /// Generation that the bucket has.
    pub(super) fn stored(&self) -> watch::Receiver<u64> {
        self.stored.subscribe()
    }

    fn is_stored(&self) -> bool {
        *self.source.generation().borrow() <= *self.stored.borrow()
    }

    /// Makes sure that the bucket has every key of bodies that were read before this call. Sends nothing if it has.
    ///
    /// # Errors
    /// `Tail` with `Fenced` if a later owner has written the ring; others if the bucket fails.
    pub(super) async fn store(&self) -> Result<(), ShipError> {
        if self.is_stored() {
            return Ok(());
        }
        let mut tag = self.tag.lock().await;
        while !self.is_stored() {
            let (generation, ring) = self.source.ring();
            let condition = match &*tag {
                Some(tag) => WriteCondition::Is(tag),
                None => WriteCondition::Absent,
            };
            match self.bucket.put_if(RING, ring, condition).await? {
                Put::Done(now) => {
                    *tag = Some(now);
                    self.stored.send_replace(generation);
                    self.source.note_stored(generation);
                }
                Put::Lost => *tag = self.found().await?,
            }
        }
        Ok(())
    }

    /// The version of another ring in the bucket, which is to be replaced: an earlier write of this owner, whose answer was
    /// lost, or the last one of an owner before.
    async fn found(&self) -> Result<Option<Tag>, ShipError> {
        let Some((ring, tag)) = read(&self.bucket).await? else {
            return Ok(None);
        };
        let term = self.source.term_of(&ring);
        match term.map_err(|what| refused(&self.bucket, what))? {
            term if term > self.term && !known_bad::makes(ShipMistake::FenceIgnored) => {
                Err(TailError::fenced(self.bucket.place(), "write the key ring").into())
            }
            _ => Ok(Some(tag)),
        }
    }

    /// Stores the ring whenever it changes. Returns when a later owner has written it.
    pub(super) async fn run(&self) -> TailError {
        let mut generation = self.source.generation();
        loop {
            generation.borrow_and_update();
            match self.store().await {
                Ok(()) => {
                    if generation.changed().await.is_err() {
                        return std::future::pending().await;
                    }
                }
                Err(ShipError::Tail(error)) => return error,
                Err(error) => {
                    if let ShipError::Keys { .. } = error {
                        self.source.note_refused(&error);
                    }
                    sleep(RETRY_PAUSE).await;
                }
            }
        }
    }

    /// Makes sure that the bucket has the keys of a row, however long that takes.
    ///
    /// # Errors
    /// `Fenced` if a later owner has written the ring.
    pub(super) async fn before_row(&self) -> Result<(), TailError> {
        if known_bad::makes(ShipMistake::RingLate) {
            return Ok(());
        }
        loop {
            match self.store().await {
                Ok(()) => return Ok(()),
                Err(ShipError::Tail(error)) => return Err(error),
                Err(_) => sleep(RETRY_PAUSE).await,
            }
        }
    }
}

/// Shows the stand-bys that the ring has another generation.
pub(super) fn announce(record: &mut OwnerRecord, generation: u64) {
    record.keys = generation;
}
