//! A node that waits for the store: it looks at the owner until it may follow.
//!
//! ```text
//! the owner has released the store to it, or to nobody ────────────────────────────▶ it claims the store
//! the owner is dead, and its record names this node ───────────────────────────────▶ it claims the store
//! the record names this node as the owner, from a process that lost its directory ─▶ it claims the store after 2 ttl
//! ```

use std::time::Duration;

use super::nodes::{NodeState, NodeWatch, SeenNode};
use super::owner::{OwnerRecord, OwnerState};
use crate::beat::boottime;
use crate::bucket::Bucket;
use crate::error::BucketError;
use crate::record::BucketRecord;

/// Looks at the owner of a store for a node that does not own it.
pub struct StandByWatch {
    bucket: Bucket,
    name: String,
    ttl: Duration,
    clock: fn() -> Duration,
    nodes: NodeWatch,
    /// Time of the last look at the owner that succeeded.
    looked: Option<Duration>,
    /// The nodes at the last look at them, and its time.
    seen: Option<Since<Vec<SeenNode>>>,
    owner: Option<Since<BucketRecord<OwnerRecord>>>,
    /// The term whose process was seen to be replaced.
    replaced: Option<Since<u64>>,
}

/// Something, and the time at which it was seen first.
struct Since<T>(T, Duration);

/// Result of a look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StandByTurn {
    /// Another node owns the store, or may own it. `None`: the store has had no owner yet.
    Wait(Option<OwnerRecord>),
    /// This node may claim the store after this owner. It is dead, and its term has this number; `None`: it has released the
    /// store.
    Claim(OwnerRecord, Option<u64>),
}

impl StandByWatch {
    /// A watch for the node with this name. `ttl` is its own.
    pub fn new(bucket: &Bucket, name: &str, ttl: Duration) -> Self {
        Self::by(bucket, name, ttl, boottime)
    }

    pub(super) fn by(bucket: &Bucket, name: &str, ttl: Duration, clock: fn() -> Duration) -> Self {
        Self {
            bucket: bucket.clone(),
            name: name.to_owned(),
            ttl,
            clock,
            nodes: NodeWatch::by(bucket, ttl / 6, clock),
            looked: None,
            seen: None,
            owner: None,
            replaced: None,
        }
    }

    /// Looks at the owner now, and at its node each sixth of the ttl.
    ///
    /// # Errors
    /// If the bucket fails. A later look may succeed.
    pub async fn look(&mut self) -> Result<StandByTurn, BucketError> {
        let Some(found) = OwnerRecord::read(&self.bucket).await? else {
            self.owner = None;
            return Ok(StandByTurn::Wait(None));
        };
        let now = (self.clock)();
        // What this process could not see does not count.
        let is_blind = |looked: Duration| now.saturating_sub(looked) > self.ttl / 3;
        if self.looked.replace(now).is_some_and(is_blind) {
            (self.owner, self.replaced) = (None, None);
        }
        let since = match &self.owner {
            Some(Since(seen, since)) if seen.is_same_version(&found) => *since,
            _ => now,
        };
        let owner = found.value.clone();
        self.owner = Some(Since(found, since));
        let unchanged = now.saturating_sub(since);
        self.look_at_nodes().await?;
        let may_claim = match owner.state {
            OwnerState::Released => {
                let successor = owner.successor.as_ref();
                let is_mine = successor.is_none_or(|successor| *successor == self.name);
                is_mine || unchanged >= self.ttl
            }
            // An owner without stand-bys needs no lease, and may still serve elsewhere. One that opens serves nowhere.
            _ if owner.node == self.name => {
                let may_serve = owner.state == OwnerState::Serving && owner.stand_bys.is_empty();
                !may_serve && unchanged >= 2 * self.ttl
            }
            _ if owner.stand_bys.contains(&self.name) => self.is_gone(&owner).await?,
            _ => false,
        };
        Ok(match may_claim {
            false => StandByTurn::Wait(Some(owner)),
            true => {
                let is_free = owner.state == OwnerState::Released;
                let inherits = (!is_free).then_some(owner.term);
                StandByTurn::Claim(owner, inherits)
            }
        })
    }

    /// The nodes at the last look, by name.
    pub fn nodes(&self) -> &[SeenNode] {
        self.seen.as_ref().map_or(&[], |seen| &seen.0)
    }

    /// Why the record of a node could not be read at the last look. An owner with such a record counts as alive.
    pub fn unread(&self) -> Option<&BucketError> {
        self.nodes.unread()
    }

    async fn look_at_nodes(&mut self) -> Result<(), BucketError> {
        let now = (self.clock)();
        let is_due = |seen: &Since<_>| now.saturating_sub(seen.1) >= self.ttl / 6;
        if self.seen.as_ref().is_none_or(is_due) {
            self.seen = Some(Since(self.nodes.look().await?, (self.clock)()));
        }
        Ok(())
    }

    /// Whether the process of the owner is gone for good.
    async fn is_gone(&mut self, owner: &OwnerRecord) -> Result<bool, BucketError> {
        if owner.process.is_empty() {
            // It shows no signs of life.
            return Ok(false);
        }
        let now = (self.clock)();
        let Some(node) = self.nodes().iter().find(|node| node.name == owner.node) else {
            return Ok(false);
        };
        let node = node.clone();
        if node.record.incarnation == owner.process {
            self.replaced = None;
            let ended = matches!(node.record.state, NodeState::Left | NodeState::Dead);
            return Ok(ended || (!node.is_alive() && self.nodes.bury(&owner.node).await?));
        }
        // Another process has its name. The lease of the replaced one may hold for a while.
        let ttl = self.ttl.max(node.record.ttl());
        match &self.replaced {
            Some(Since(term, since)) if *term == owner.term => {
                Ok(now.saturating_sub(*since) >= ttl)
            }
            _ => {
                self.replaced = Some(Since(owner.term, now));
                Ok(false)
            }
        }
    }
}
