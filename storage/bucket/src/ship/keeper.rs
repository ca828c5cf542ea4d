//! An owner from its start to its end: the claim, the shipper, and new terms after the tail has stopped.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use wald_storage::{OwnerLease as _, Unreplicated};

use super::error::{OwnerError, ShipError};
use super::nodes::{Membership, NodeState, NodeWatch};
use super::owner::{Owned, OwnerClaim, OwnerRecord, OwnerState};
use super::resume::{SeenRows, compare};
use super::{
    ManifestFormat, ShipEnd, ShipEvent, ShipObserver, ShipSettings, ShipSource, ShippedRing,
    Shipper, cluster, keys,
};
use crate::bucket::Bucket;
use crate::error::BucketError;
use crate::known_bad;
use crate::known_bad::ShipMistake;
use crate::tail::ReplicaTail;

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
    /// The keys of the records; `None` if they are plain.
    pub keys: Option<Arc<dyn ShippedRing>>,
    /// The node.
    pub claim: OwnerClaim,
    /// This process among the nodes of the store; `None` if no other node takes the store over by itself.
    pub membership: Option<Arc<Membership>>,
    /// Makes a term durable in the data directory, before it is claimed.
    pub keep_term: Arc<dyn Fn(u64) -> io::Result<()> + Send + Sync>,
}

/// A store whose earlier owner stores nothing any more. This node owns it, and does not serve yet.
pub struct FencedStore {
    owned: Owned,
    tail: FencedTail,
}

/// The tail of a store that this node owns and does not serve yet, so that its rows stay as they are.
#[derive(Clone)]
pub struct FencedTail {
    pub(super) tail: Arc<ReplicaTail>,
    /// The rows, once they were all read. The start needs them again.
    seen: Arc<Mutex<Option<SeenRows>>>,
}

impl FencedStore {
    /// Number of this node's term.
    pub fn term(&self) -> u64 {
        self.owned.tail.term()
    }

    /// The owner before, if this node took the store from it.
    pub fn before(&self) -> Option<&OwnerRecord> {
        self.owned.before.as_ref()
    }

    /// Replaces the key ring in the bucket by its successor of this term, so that the owner before writes it no more. Returns
    /// the new one; `None` if the bucket has none.
    ///
    /// # Errors
    /// `Keys` if `next` refuses the ring; others if the bucket fails.
    pub async fn take_keys(
        &self,
        bucket: &Bucket,
        next: &(dyn Fn(&[u8]) -> Result<Bytes, String> + Sync),
    ) -> Result<Option<Bytes>, ShipError> {
        keys::take(bucket, next).await
    }

    /// The tail, from which this node fetches the store.
    pub fn tail(&self) -> &FencedTail {
        &self.tail
    }
}

impl FencedTail {
    /// Keeps all rows for the start.
    pub(super) fn note(&self, rows: SeenRows) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        *seen = Some(rows);
    }

    fn seen(&self) -> Option<SeenRows> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.take()
    }
}

/// The owner of a store.
pub struct ReplicaOwner {
    parts: ReplicaParts,
    owned: Owned,
    shipper: Shipper,
}

impl ReplicaOwner {
    /// Becomes the owner, unless this node has `fenced` the store before, and stores everything that is durable. Only then may
    /// the engine serve.
    ///
    /// # Errors
    /// `Owned` if another node is the owner; others if the bucket or the journal fails, or the directory is not the newest
    /// one of the store.
    pub async fn begin(
        mut parts: ReplicaParts,
        fenced: Option<FencedStore>,
    ) -> Result<Self, OwnerError> {
        let (owned, shipper) = Self::open(&mut parts, fenced, OwnerState::Opening).await?;
        // Later terms follow this one.
        (parts.claim.take_over, parts.claim.inherits) = (None, None);
        Ok(Self {
            parts,
            owned,
            shipper,
        })
    }

    /// Becomes the owner of a store that this node does not have yet, so that it does not change while it is fetched. The
    /// caller keeps the term in the directory when the directory has the store.
    ///
    /// # Errors
    /// As [`ReplicaOwner::begin`].
    pub async fn fence(bucket: &Bucket, claim: &OwnerClaim) -> Result<FencedStore, OwnerError> {
        let mut claim = claim.clone();
        let claims = Owned::claim(bucket, &mut claim, OwnerState::Opening, &|_| Ok(()));
        let owned = claims.await?;
        let tail = FencedTail {
            tail: Arc::clone(&owned.tail),
            seen: Arc::default(),
        };
        Ok(FencedStore { owned, tail })
    }

    /// `claimed`: the state in the record until everything is stored.
    async fn open(
        parts: &mut ReplicaParts,
        fenced: Option<FencedStore>,
        claimed: OwnerState,
    ) -> Result<(Owned, Shipper), OwnerError> {
        // A store at the wrong bucket must not become its owner.
        cluster::claim(&parts.bucket, parts.source.profile().store_id).await?;
        // Nor must a directory that lacks a part of the store: its claim would end an owner that serves, or keep out the next
        // one.
        if fenced.is_none() && parts.claim.must_compare(&parts.bucket).await? {
            let has_all = compare(&*parts.source, &parts.bucket, &*parts.format);
            Box::pin(has_all).await?;
        }
        if let Some(membership) = &parts.membership {
            parts.source.hold_lease(Arc::clone(membership.lease()) as _);
        }
        let (mut owned, seen) = match fenced {
            Some(fenced) => (fenced.owned, fenced.tail.seen()),
            None => {
                let keep = &*parts.keep_term;
                let claims = Owned::claim(&parts.bucket, &mut parts.claim, claimed, keep);
                (claims.await?, None)
            }
        };
        if let Some(membership) = &parts.membership {
            // Not before the claim: an owner that lives names no other owner as its stand-by.
            membership.show_position(&parts.source);
            membership.enter(NodeState::Owner);
            let is_named = !owned.record().stand_bys.is_empty();
            membership.lease().set_named(is_named);
        }
        let tail = Arc::clone(&owned.tail);
        let shipper = Box::pin(Shipper::begin(parts, tail, seen)).await?;
        let stored = shipper.ship.stored_keys();
        let generation = stored.map_or(0, |stored| *stored.borrow());
        let serves = |record: &mut OwnerRecord| {
            record.state = OwnerState::Serving;
            keys::announce(record, generation);
        };
        owned.change(serves).await?;
        let term = owned.tail.term();
        parts.observer.event(&ShipEvent::Owns { term });
        Ok((owned, shipper))
    }

    /// The owner before, if this node took the store from it because [`OwnerClaim::take_over`] names it.
    pub fn before(&self) -> Option<&OwnerRecord> {
        self.owned.before.as_ref()
    }

    /// The record of this node.
    pub fn record(&self) -> &OwnerRecord {
        self.owned.record()
    }

    #[cfg(test)]
    pub(super) fn tail(&self) -> Arc<ReplicaTail> {
        Arc::clone(&self.owned.tail)
    }

    /// Number of its term.
    pub fn term(&self) -> u64 {
        self.owned.tail.term()
    }

    /// Ships until another node owns the store, the journal ends, or `stop` is true and everything is shipped. In the last
    /// case any node may follow. Once `ends` is true, the stand-bys look often, so that one follows soon after `stop`.
    pub async fn run(
        mut self,
        stop: watch::Receiver<bool>,
        ends: watch::Receiver<bool>,
    ) -> ShipEnd {
        loop {
            let membership = self.parts.membership.clone();
            let stored = self.shipper.ship.stored_keys();
            let end = {
                let ships = Box::pin(self.shipper.run(stop.clone()));
                let names = name_stand_bys(
                    &mut self.owned,
                    membership.as_deref(),
                    &*self.parts.observer,
                    (ends.clone(), stored),
                );
                tokio::select! {
                    end = ships => Some(end),
                    () = names => None,
                    () = acks_on_lease(&self.parts), if known_bad::makes(ShipMistake::LeaseForFence) => None,
                }
            };
            let end = match end {
                Some(end) => end,
                None => ShipEnd::Fenced {
                    owner: self.shipper.moved().await,
                },
            };
            let observer = Arc::clone(&self.parts.observer);
            match end {
                ShipEnd::Stopped(error) => {
                    observer.event(&ShipEvent::Failed(&ShipError::Tail(error)));
                    self.parts.source.stop(Unreplicated::BucketDown);
                    if let Some(end) = self.open_again(stop.clone()).await {
                        return end;
                    }
                    self.parts.source.resume();
                }
                ShipEnd::Shipped => {
                    let closed = self.owned.tail.close().await;
                    let released = match closed {
                        Ok(()) => self.release().await,
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

    /// Lets the first stand-by follow, or any node if there is none.
    async fn release(&mut self) -> Result<(), BucketError> {
        let release = |record: &mut OwnerRecord| {
            record.state = OwnerState::Released;
            record.successor = record.stand_bys.first().cloned();
        };
        self.owned.change(release).await?;
        Ok(())
    }

    /// Opens the tail in a new term, with pauses that grow. A caller that asks for the end cuts the pause short, and the next
    /// attempt is the last. Returns the end, if this node must not or need not go on.
    async fn open_again(&mut self, mut stop: watch::Receiver<bool>) -> Option<ShipEnd> {
        let mut pause = REOPEN_PAUSES.0;
        loop {
            // A sender that is gone asks for the end, too.
            let stops = timeout(pause, stop.wait_for(|stop| *stop)).await.is_ok();
            pause = (pause * 2).min(REOPEN_PAUSES.1);
            if self.parts.source.progress().ended {
                return Some(ShipEnd::Journal);
            }
            // The engine serves meanwhile, so the record must not say that this owner may be followed.
            match Self::open(&mut self.parts, None, OwnerState::Serving).await {
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
            if stops {
                return Some(ShipEnd::Journal);
            }
        }
    }
}

/// A deliberate mistake: publishes everything durable while the lease holds. Never returns.
async fn acks_on_lease(parts: &ReplicaParts) {
    loop {
        sleep(Duration::from_millis(50)).await;
        let membership = parts.membership.as_ref();
        if membership.is_some_and(|membership| membership.lease().holds()) {
            parts.source.publish(parts.source.progress().durable);
        }
    }
}

/// Waits until it is true. Returns false if it never will be.
async fn is_true(seen: &mut watch::Receiver<bool>) -> bool {
    seen.wait_for(|it| *it).await.is_ok()
}

/// Waits until the bucket has another key ring. Returns its generation.
async fn another_ring(stored: &mut Option<watch::Receiver<u64>>) -> u64 {
    if let Some(stored) = stored
        && stored.changed().await.is_ok()
    {
        return *stored.borrow_and_update();
    }
    std::future::pending().await
}

/// Keeps the names of the stand-bys that live in the record of the owner. Returns when another node has declared this one
/// dead. Without a membership it does nothing, and never returns.
async fn name_stand_bys(
    owned: &mut Owned,
    membership: Option<&Membership>,
    observer: &dyn ShipObserver,
    (mut ends, mut stored): (watch::Receiver<bool>, Option<watch::Receiver<u64>>),
) {
    let Some(membership) = membership else {
        return std::future::pending().await;
    };
    let mut nodes = NodeWatch::new(membership.bucket(), membership.beat_pause());
    let mut has_announced = false;
    let serves_since = Instant::now();
    // Changes of the ring do not put the looks off.
    let mut look_at = Instant::now() + membership.beat_pause();
    loop {
        tokio::select! {
            () = membership.lost() => return,
            true = is_true(&mut ends), if !has_announced => {
                has_announced = true;
                // A failure costs time alone: the stand-bys look less often.
                let shows = owned.change(|record| record.ends = true);
                let _ = timeout(membership.beat_pause(), shows).await;
            }
            generation = another_ring(&mut stored) => {
                // After a failure the next look shows it.
                let shows = owned.change(|record| keys::announce(record, generation));
                let _ = timeout(membership.beat_pause(), shows).await;
                continue;
            }
            () = sleep_until(look_at) => {}
        }
        look_at = Instant::now() + membership.beat_pause();
        let generation = stored.as_ref().map(|stored| *stored.borrow());
        if let Some(generation) = generation.filter(|now| *now != owned.record().keys) {
            let shows = owned.change(|record| keys::announce(record, generation));
            let _ = timeout(membership.beat_pause(), shows).await;
        }
        // A ttl has three pauses.
        let has_served = serves_since.elapsed() >= membership.beat_pause() * 3;
        if has_served && owned.record().starts > 0 {
            let shows = owned.change(|record| record.starts = 0);
            let _ = timeout(membership.beat_pause(), shows).await;
        }
        let Ok(Ok(seen)) = timeout(membership.beat_pause(), nodes.look()).await else {
            continue;
        };
        observer.event(&ShipEvent::Nodes {
            owner: owned.record(),
            nodes: &seen,
        });
        // A failure shows at the next look.
        let tidies = nodes.tidy(&owned.record().node);
        let _ = timeout(membership.beat_pause(), tidies).await;
        let stand_bys = seen.into_iter().filter(|node| {
            let is_ready = node.record.state == NodeState::StandBy;
            is_ready && node.is_alive() && node.name != owned.record().node
        });
        let stand_bys: Vec<String> = stand_bys.map(|node| node.name).collect();
        // A stand-by would follow at once an owner whose own signs of life do not arrive.
        let is_late =
            !stand_bys.is_empty() && membership.lease().age() >= membership.beat_pause() * 2;
        if is_late || stand_bys == owned.record().stand_bys {
            continue;
        }
        // The lease counts before a node is named, and until none is.
        if !stand_bys.is_empty() {
            membership.lease().set_named(true);
        }
        let are_none = stand_bys.is_empty();
        let change = |record: &mut OwnerRecord| record.stand_bys.clone_from(&stand_bys);
        if let Ok(true) = owned.change(change).await
            && are_none
        {
            membership.lease().set_named(false);
        }
    }
}
