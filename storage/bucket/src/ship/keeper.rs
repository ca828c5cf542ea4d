//! An owner from its start to its end: the claim, the shipper, and new terms after the tail has stopped.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use wald_storage::Unreplicated;

use super::error::{OwnerError, ShipError};
use super::owner::{Owned, OwnerClaim, OwnerRecord, OwnerState};
use super::resume::compare;
use super::{
    ManifestFormat, ShipEnd, ShipEvent, ShipObserver, ShipSettings, ShipSource, Shipper, cluster,
};
use crate::bucket::Bucket;

/// First and longest pause before a tail that has stopped is opened again.
const REOPEN_PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The parts of a replica that the daemon gives.
#[derive(Clone)]
pub struct ReplicaParts {
    /// The engine.
    pub source: Arc<dyn ShipSource>,
    /// The bucket, which has passed its probe.
    pub bucket: Bucket,
    /// The settings.
    pub settings: ShipSettings,
    /// The encoding of manifests.
    pub format: Arc<dyn ManifestFormat>,
    /// Takes the events.
    pub observer: Arc<dyn ShipObserver>,
    /// The node.
    pub claim: OwnerClaim,
    /// Makes a term durable in the data directory, before it is claimed.
    pub keep_term: Arc<dyn Fn(u64) -> io::Result<()> + Send + Sync>,
}

/// The owner of a store.
pub struct ReplicaOwner {
    parts: ReplicaParts,
    owned: Owned,
    shipper: Shipper,
}

impl ReplicaOwner {
    /// Becomes the owner, and stores everything that is durable. Only then may the engine serve.
    ///
    /// # Errors
    /// `Owned` if another node is the owner; others if the bucket or the journal fails, or the directory is not the newest
    /// one of the store.
    pub async fn begin(mut parts: ReplicaParts) -> Result<Self, OwnerError> {
        let (owned, shipper) = Self::open(&mut parts).await?;
        // Later terms follow this one.
        parts.claim.take_over = None;
        Ok(Self {
            parts,
            owned,
            shipper,
        })
    }

    /// Becomes the owner of a store that this node does not have yet, so that it does not change while it is fetched.
    /// Returns the term, which the next claim of this node keeps, and the owner before.
    ///
    /// # Errors
    /// As [`ReplicaOwner::begin`].
    pub async fn fence(
        bucket: &Bucket,
        claim: &OwnerClaim,
    ) -> Result<(u64, Option<OwnerRecord>), OwnerError> {
        let owned = Owned::claim(bucket, &mut claim.clone(), &|_| Ok(())).await?;
        owned.tail.close().await?;
        Ok((owned.tail.term(), owned.before))
    }

    async fn open(parts: &mut ReplicaParts) -> Result<(Owned, Shipper), OwnerError> {
        // A store at the wrong bucket must not become its owner.
        cluster::claim(&parts.bucket, parts.source.profile().store_id).await?;
        // Nor must a directory that lacks a part of the store: its claim would end an owner that serves, or keep out the next one.
        if parts.claim.must_compare(&parts.bucket).await? {
            let has_all = compare(&*parts.source, &parts.bucket, &*parts.format);
            Box::pin(has_all).await?;
        }
        let claimed = Owned::claim(&parts.bucket, &mut parts.claim, &*parts.keep_term);
        let mut owned = claimed.await?;
        let tail = Arc::clone(&owned.tail);
        let shipper = Box::pin(Shipper::begin(
            Arc::clone(&parts.source),
            &parts.bucket,
            tail,
            parts.settings,
            Arc::clone(&parts.format),
            Arc::clone(&parts.observer),
        ));
        let shipper = shipper.await?;
        owned.enters(OwnerState::Serving).await?;
        let term = owned.tail.term();
        parts.observer.event(&ShipEvent::Owns { term });
        Ok((owned, shipper))
    }

    /// The owner before, if this node took the store from it because [`OwnerClaim::take_over`] names it.
    pub fn before(&self) -> Option<&OwnerRecord> {
        self.owned.before.as_ref()
    }

    /// Number of its term.
    pub fn term(&self) -> u64 {
        self.owned.tail.term()
    }

    /// Ships until another node owns the store, the journal ends, or `stop` is true and everything is shipped. In the last
    /// case any node may follow.
    pub async fn run(mut self, stop: watch::Receiver<bool>) -> ShipEnd {
        loop {
            let end = Box::pin(self.shipper.run(stop.clone())).await;
            let observer = Arc::clone(&self.parts.observer);
            match end {
                ShipEnd::Stopped(error) => {
                    observer.event(&ShipEvent::Failed(&ShipError::Tail(error)));
                    self.parts.source.stop(Unreplicated::BucketDown);
                    if let Some(end) = self.open_again(&stop).await {
                        return end;
                    }
                    self.parts.source.resume();
                }
                ShipEnd::Shipped => {
                    let closed = self.owned.tail.close().await;
                    let released = match closed {
                        Ok(()) => self.owned.enters(OwnerState::Released).await,
                        Err(error) => {
                            observer.event(&ShipEvent::Failed(&error.into()));
                            return ShipEnd::Shipped;
                        }
                    };
                    if let Err(error) = released {
                        observer.event(&ShipEvent::Failed(&error.into()));
                    }
                    return ShipEnd::Shipped;
                }
                end => return end,
            }
        }
    }

    /// Opens the tail in a new term, with pauses that grow. Returns the end, if this node must not or need not go on.
    async fn open_again(&mut self, stop: &watch::Receiver<bool>) -> Option<ShipEnd> {
        let mut pause = REOPEN_PAUSES.0;
        loop {
            sleep(pause).await;
            pause = (pause * 2).min(REOPEN_PAUSES.1);
            if self.parts.source.progress().ended || *stop.borrow() {
                return Some(ShipEnd::Journal);
            }
            match Self::open(&mut self.parts).await {
                Ok((owned, shipper)) => {
                    (self.owned, self.shipper) = (owned, shipper);
                    return None;
                }
                Err(OwnerError::Owned { owner, .. } | OwnerError::Superseded { owner, .. }) => {
                    self.parts.source.stop(Unreplicated::Moved {
                        owner: owner.endpoint.clone(),
                        term: owner.term,
                    });
                    return Some(ShipEnd::Fenced {
                        owner: Some(*owner),
                    });
                }
                Err(error) => self.parts.observer.event(&ShipEvent::NotOpened(&error)),
            }
        }
    }
}
