//! Memory that requests may take before they are answered, shared fairly by connections.
//!
//! Three budgets: for appends, for health checks, and for all other requests. A request is charged for the bytes that
//! have **arrived**, not for the length that it announces. The announced length only decides whether the request could
//! be admitted now. Announced lengths therefore hold nothing, and a connection that sends faster than the disk takes
//! fills its own share.
//!
//! **The share**: a connection may have under way as much as is still free for others. Alone it gets half of the
//! budget; two greedy connections get a third each; a connection with nothing under way finds room. The engine's own
//! budget stands behind.
//!
//! Appends take from the same budget in calls of one message and in sessions. Sessions have a [`Window`] in addition,
//! and wait for room. [`crate::grpc`] decides when a request is charged, and refuses or waits.

mod window;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::watch;

use crate::drain::Phase;
use crate::shortage::Shortage;
pub(crate) use window::{Entry, Passage, Window};

/// Bytes of all health checks together. They have a budget of their own, so that other requests cannot make a
/// healthy server look ill.
pub(crate) const HEALTH_BYTES: u64 = 1 << 20;

/// Bytes of all requests without records together, health checks aside.
pub(crate) const OTHERS_BYTES: u64 = 8 << 20;

/// Bytes that one connection has under way.
#[derive(Debug, Clone, Default)]
pub(crate) struct Share(Arc<OwnRequests>);

#[derive(Debug, Default)]
struct OwnRequests {
    appends: AtomicU64,
    others: AtomicU64,
    health: AtomicU64,
}

/// The budget that a request is charged to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `max_inflight_bytes`.
    Append,
    /// [`HEALTH_BYTES`].
    Health,
    /// [`OTHERS_BYTES`].
    Other,
}

/// A budget has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Busy {
    /// The budget without room.
    pub(crate) kind: Kind,
    /// Bytes that all connections have under way.
    pub(crate) inflight: u64,
    /// Bytes of the budget.
    pub(crate) limit: u64,
}

/// Bytes that all connections have under way, of one kind.
struct Budget {
    kind: Kind,
    limit: u64,
    total: AtomicU64,
    shortage: Shortage,
}

impl Budget {
    fn new(kind: Kind, limit: u64) -> Self {
        Self {
            kind,
            limit,
            total: AtomicU64::new(0),
            shortage: Shortage::new(),
        }
    }

    /// Whether a request may have `bytes` more, if it has `has` and its connection `own` in all.
    fn allows(&self, own: u64, total: u64, has: u64, bytes: u64) -> bool {
        let (request, own, total) = (has + bytes, own + bytes, total + bytes);
        // A request larger than the whole budget passes when it is alone.
        let is_first = own == request && (total <= self.limit || total == request);
        is_first || own <= self.limit.saturating_sub(total)
    }

    /// Whether a request that has `has` already could be admitted with `bytes` more. Takes nothing.
    fn look(&self, own: &AtomicU64, has: u64, bytes: u64) -> Result<(), Busy> {
        let (own, total) = (
            own.load(Ordering::Relaxed),
            self.total.load(Ordering::Relaxed),
        );
        match self.allows(own, total, has, bytes) {
            true => Ok(()),
            false => Err(self.refused(total)),
        }
    }

    /// Takes `bytes` more for a request that has `has` already. Takes nothing if there is no room.
    fn take(&self, own: &AtomicU64, has: u64, bytes: u64) -> Result<(), Busy> {
        let total = self.total.fetch_add(bytes, Ordering::Relaxed);
        let own_before = own.fetch_add(bytes, Ordering::Relaxed);
        if self.allows(own_before, total, has, bytes) {
            return Ok(());
        }
        self.give_back(own, bytes);
        Err(self.refused(total))
    }

    fn refused(&self, inflight: u64) -> Busy {
        self.shortage.refused(self.limit, inflight);
        Busy {
            kind: self.kind,
            inflight,
            limit: self.limit,
        }
    }

    /// Takes more, whatever is free.
    fn take_more(&self, own: &AtomicU64, bytes: u64) {
        own.fetch_add(bytes, Ordering::Relaxed);
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    fn give_back(&self, own: &AtomicU64, bytes: u64) {
        own.fetch_sub(bytes, Ordering::Relaxed);
        self.total.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The budgets of a server, and the bounds of its requests.
pub(crate) struct Admission {
    appends: Budget,
    others: Budget,
    health: Budget,
    session_window: u64,
    /// Largest message of an append, in bytes.
    pub(crate) largest_append: u64,
    pub(crate) phase: watch::Receiver<Phase>,
}

impl Admission {
    /// A budget of `limit` bytes for appends, each of at most `largest_append` bytes. A session may have
    /// `session_window` bytes under way.
    pub(crate) fn new(
        limit: u64,
        session_window: u64,
        largest_append: u64,
        phase: watch::Receiver<Phase>,
    ) -> Arc<Self> {
        Arc::new(Self {
            appends: Budget::new(Kind::Append, limit),
            others: Budget::new(Kind::Other, OTHERS_BYTES),
            health: Budget::new(Kind::Health, HEALTH_BYTES),
            session_window,
            largest_append,
            phase,
        })
    }

    /// Bytes of appends and of other requests that are under way.
    pub(crate) fn admitted_bytes(&self) -> (u64, u64) {
        let total = |budget: &Budget| budget.total.load(Ordering::Relaxed);
        (
            total(&self.appends),
            total(&self.others) + total(&self.health),
        )
    }
}

/// Bytes charged to a request, given back when it is dropped.
pub(crate) struct Charge {
    admission: Arc<Admission>,
    share: Share,
    kind: Kind,
    bytes: u64,
}

impl Charge {
    /// Nothing yet, of the budget of that kind and of the share of a connection.
    pub(crate) fn new(admission: &Arc<Admission>, share: &Share, kind: Kind) -> Self {
        Self {
            admission: Arc::clone(admission),
            share: share.clone(),
            kind,
            bytes: 0,
        }
    }

    fn budget(&self) -> (&Budget, &AtomicU64) {
        let (all, own) = (&self.admission, &self.share.0);
        match self.kind {
            Kind::Append => (&all.appends, &own.appends),
            Kind::Health => (&all.health, &own.health),
            Kind::Other => (&all.others, &own.others),
        }
    }

    /// Whether a request that is charged `has` bytes could be admitted with `bytes` more. Takes nothing.
    ///
    /// # Errors
    /// If there is no room.
    pub(crate) fn look(&self, has: u64, bytes: u64) -> Result<(), Busy> {
        let (budget, own) = self.budget();
        budget.look(own, has, bytes)
    }

    /// Charges `bytes` more to a request that is charged `has` bytes.
    ///
    /// # Errors
    /// If there is no room. Nothing is charged then.
    pub(crate) fn grow(&mut self, has: u64, bytes: u64) -> Result<(), Busy> {
        let (budget, own) = self.budget();
        budget.take(own, has, bytes)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Charges `bytes` more, whatever is free.
    fn enlarge(&mut self, bytes: u64) {
        let (budget, own) = self.budget();
        budget.take_more(own, bytes);
        self.bytes += bytes;
    }

    /// Gives back `bytes` of the charge.
    pub(crate) fn shrink(&mut self, bytes: u64) {
        let (budget, own) = self.budget();
        budget.give_back(own, bytes);
        self.bytes -= bytes;
    }

    /// Bytes that are charged.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether others find no room now.
    pub(crate) fn is_short(&self) -> bool {
        self.budget().0.shortage.is_now()
    }

    /// The bounds of the server's requests.
    pub(crate) fn admission(&self) -> &Admission {
        &self.admission
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 1024;

    /// Admits requests until none fits; returns their bytes.
    fn fill(budget: &Budget, own: &AtomicU64) -> u64 {
        std::iter::from_fn(|| budget.take(own, 0, BYTES).ok())
            .map(|()| BYTES)
            .sum()
    }

    #[test]
    fn greedy_connections_leave_as_much_as_each_of_them_has() {
        let budget = Budget::new(Kind::Append, 64 << 10);
        let [first, second, small] = [const { AtomicU64::new(0) }; 3];
        let held = fill(&budget, &first);
        assert_eq!(held, 32 << 10);
        let more = fill(&budget, &second);
        assert_eq!(more, 16 << 10);
        assert_eq!(fill(&budget, &first), 0);
        assert!(budget.take(&small, 0, BYTES).is_ok());
        budget.give_back(&small, BYTES);
        budget.give_back(&first, held);
        budget.give_back(&second, more);
        assert_eq!(budget.total.load(Ordering::Relaxed), 0);
        assert_eq!(fill(&budget, &first), 32 << 10);
    }

    #[test]
    fn request_larger_than_the_budget_passes_alone() {
        let budget = Budget::new(Kind::Other, 4096);
        let [large, other] = [const { AtomicU64::new(0) }; 2];
        // In parts, as it arrives.
        for part in 0..16 {
            assert_eq!(budget.look(&large, 0, 64 << 10).is_ok(), part == 0);
            assert!(budget.take(&large, part << 16, 1 << 16).is_ok());
        }
        assert_eq!(budget.take(&other, 0, 1).unwrap_err().inflight, 1 << 20);
        budget.give_back(&large, 1 << 20);
        assert!(budget.take(&other, 0, 1).is_ok());
    }
}
