//! Memory that requests may take before they are answered, shared fairly by tenants and connections.
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
//! With `auth_file` the rule holds twice: for each tenant, or principal without a tenant, within the budget
//! ([`GroupShare`]), and for each of its connections within that share. Many connections give a tenant no more than one.
//! `inflight_bytes` of a tenant makes its share of appends smaller.
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
    /// Calls that a stand-by forwards (`forward.rs`).
    #[cfg(feature = "object")]
    forwarded: AtomicU64,
}

#[cfg(feature = "object")]
impl Share {
    /// Calls of the connection that are forwarded.
    pub(crate) fn forwarded(&self) -> &AtomicU64 {
        &self.0.forwarded
    }
}

impl OwnRequests {
    fn of(&self, kind: Kind) -> &AtomicU64 {
        match kind {
            Kind::Append => &self.appends,
            Kind::Health => &self.health,
            Kind::Other => &self.others,
        }
    }
}

/// Bytes that all connections of a tenant, or of a principal without one, have under way.
#[derive(Debug)]
pub(crate) struct GroupShare {
    /// Kind and name of the holder, such as `tenant payments`.
    holder: String,
    /// Most bytes of appends.
    limit: AtomicU64,
    own: OwnRequests,
}

impl GroupShare {
    /// A holder with nothing under way, and without a limit of its own.
    pub(crate) fn new(holder: String) -> Self {
        Self {
            holder,
            limit: AtomicU64::new(u64::MAX),
            own: OwnRequests::default(),
        }
    }

    /// Lets it have at most that many bytes of appends. `None`: no limit of its own.
    pub(crate) fn limit(&self, bytes: Option<u64>) {
        self.limit
            .store(bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Bytes of its appends that are under way.
    pub(crate) fn append_bytes(&self) -> u64 {
        self.own.appends.load(Ordering::Relaxed)
    }

    /// Calls of the holder that are forwarded.
    #[cfg(feature = "object")]
    pub(crate) fn forwarded(&self) -> &AtomicU64 {
        &self.own.forwarded
    }

    fn most(&self, kind: Kind) -> u64 {
        match kind {
            Kind::Append => self.limit.load(Ordering::Relaxed),
            Kind::Health | Kind::Other => u64::MAX,
        }
    }
}

/// The counters of a connection, and of the holder whose request it carries.
#[derive(Clone, Copy)]
struct Counters<'a> {
    own: &'a AtomicU64,
    group: Option<&'a GroupShare>,
}

/// Bytes that were under way before a request asked for more.
#[derive(Clone, Copy)]
struct Before {
    own: u64,
    group: u64,
    total: u64,
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Busy {
    /// The budget without room.
    pub(crate) kind: Kind,
    /// The holder whose share is used up, such as `tenant payments`. `None`: the share of a connection, or all of the
    /// budget.
    pub(crate) holder: Option<String>,
    /// Bytes that the holder has under way, or all connections.
    pub(crate) inflight: u64,
    /// Bytes of the share of the holder, or of the budget.
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

    /// Whether a request may have `bytes` more, if it has `has` already.
    fn allows(&self, group: Option<&GroupShare>, before: Before, has: u64, bytes: u64) -> bool {
        let (request, own, total) = (has + bytes, before.own + bytes, before.total + bytes);
        // A request larger than the whole budget passes when it is alone.
        let fits = total <= self.limit || total == request;
        let Some(group) = group else {
            return (own == request && fits) || own <= self.limit.saturating_sub(total);
        };
        let used = before.group + bytes;
        let share = self.share_of(group, total - used.min(total));
        // Like the budget, the share passes a larger request when it is alone.
        (used == request && fits)
            || (own == request && used <= share)
            || own <= share.saturating_sub(used)
    }

    /// Most bytes of a holder while others have `others` bytes: as many as it leaves free.
    fn share_of(&self, group: &GroupShare, others: u64) -> u64 {
        (self.limit.saturating_sub(others) / 2).min(group.most(self.kind))
    }

    /// Whether a request that has `has` already could be admitted with `bytes` more. Takes nothing.
    fn look(&self, counters: Counters<'_>, has: u64, bytes: u64) -> Result<(), Busy> {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let group = counters.group;
        let before = Before {
            own: load(counters.own),
            group: group.map_or(0, |group| load(group.own.of(self.kind))),
            total: load(&self.total),
        };
        match self.allows(group, before, has, bytes) {
            true => Ok(()),
            false => Err(self.refused(group, before, bytes)),
        }
    }

    /// Takes `bytes` more for a request that has `has` already. Takes nothing if there is no room.
    fn take(&self, counters: Counters<'_>, has: u64, bytes: u64) -> Result<(), Busy> {
        let before = self.take_more(counters, bytes);
        if self.allows(counters.group, before, has, bytes) {
            return Ok(());
        }
        self.give_back(counters, bytes);
        Err(self.refused(counters.group, before, bytes))
    }

    fn refused(&self, group: Option<&GroupShare>, before: Before, bytes: u64) -> Busy {
        self.shortage.refused(self.limit, before.total);
        let group = group.filter(|_| before.total + bytes <= self.limit);
        let others = before.total.saturating_sub(before.group);
        Busy {
            kind: self.kind,
            holder: group.map(|group| group.holder.clone()),
            inflight: group.map_or(before.total, |_| before.group),
            limit: group.map_or(self.limit, |group| self.share_of(group, others)),
        }
    }

    /// Takes more, whatever is free.
    fn take_more(&self, counters: Counters<'_>, bytes: u64) -> Before {
        let add = |counter: &AtomicU64| counter.fetch_add(bytes, Ordering::Relaxed);
        Before {
            total: add(&self.total),
            group: (counters.group).map_or(0, |group| add(group.own.of(self.kind))),
            own: add(counters.own),
        }
    }

    fn give_back(&self, counters: Counters<'_>, bytes: u64) {
        let group = counters.group.map(|group| group.own.of(self.kind));
        for counter in [Some(counters.own), group, Some(&self.total)]
            .into_iter()
            .flatten()
        {
            counter.fetch_sub(bytes, Ordering::Relaxed);
        }
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
    group: Option<Arc<GroupShare>>,
    kind: Kind,
    bytes: u64,
}

impl Charge {
    /// Nothing yet, of the budget of that kind and of the share of a connection and of the holder whose request it is.
    pub(crate) fn new(
        admission: &Arc<Admission>,
        (share, group): (&Share, Option<&Arc<GroupShare>>),
        kind: Kind,
    ) -> Self {
        Self {
            admission: Arc::clone(admission),
            share: share.clone(),
            group: group.cloned(),
            kind,
            bytes: 0,
        }
    }

    fn budget(&self) -> (&Budget, Counters<'_>) {
        let all = &self.admission;
        let budget = match self.kind {
            Kind::Append => &all.appends,
            Kind::Health => &all.health,
            Kind::Other => &all.others,
        };
        let counters = Counters {
            own: self.share.0.of(self.kind),
            group: self.group.as_deref(),
        };
        (budget, counters)
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

    /// A connection without a holder.
    fn alone(own: &AtomicU64) -> Counters<'_> {
        Counters { own, group: None }
    }

    fn of_group<'a>(own: &'a AtomicU64, group: &'a GroupShare) -> Counters<'a> {
        let group = Some(group);
        Counters { own, group }
    }

    fn group() -> GroupShare {
        GroupShare::new("tenant a".to_owned())
    }

    /// Admits requests until none fits; returns their bytes.
    fn fill(budget: &Budget, counters: Counters<'_>) -> u64 {
        std::iter::from_fn(|| budget.take(counters, 0, BYTES).ok())
            .map(|()| BYTES)
            .sum()
    }

    #[test]
    fn greedy_connections_leave_as_much_as_each_of_them_has() {
        let budget = Budget::new(Kind::Append, 64 << 10);
        let [first, second, small] = [const { AtomicU64::new(0) }; 3];
        let held = fill(&budget, alone(&first));
        assert_eq!(held, 32 << 10);
        let more = fill(&budget, alone(&second));
        assert_eq!(more, 16 << 10);
        assert_eq!(fill(&budget, alone(&first)), 0);
        assert!(budget.take(alone(&small), 0, BYTES).is_ok());
        budget.give_back(alone(&small), BYTES);
        budget.give_back(alone(&first), held);
        budget.give_back(alone(&second), more);
        assert_eq!(budget.total.load(Ordering::Relaxed), 0);
        assert_eq!(fill(&budget, alone(&first)), 32 << 10);
    }

    #[test]
    fn request_larger_than_the_budget_passes_alone() {
        let budget = Budget::new(Kind::Other, 4096);
        let [large, other] = [const { AtomicU64::new(0) }; 2];
        // In parts, as it arrives.
        for part in 0..16 {
            assert_eq!(budget.look(alone(&large), 0, 64 << 10).is_ok(), part == 0);
            assert!(budget.take(alone(&large), part << 16, 1 << 16).is_ok());
        }
        assert_eq!(
            budget.take(alone(&other), 0, 1).unwrap_err().inflight,
            1 << 20
        );
        budget.give_back(alone(&large), 1 << 20);
        assert!(budget.take(alone(&other), 0, 1).is_ok());
    }

    #[test]
    fn many_connections_of_a_tenant_get_no_more_than_half_of_the_budget() {
        let budget = Budget::new(Kind::Append, 64 << 10);
        let (greedy, other) = (group(), group());
        let connections: Vec<_> = (0..1000).map(|_| AtomicU64::new(0)).collect();
        let held: u64 = (connections.iter())
            .map(|own| fill(&budget, of_group(own, &greedy)))
            .sum();
        assert_eq!((held, greedy.append_bytes()), (32 << 10, 32 << 10));
        let own = AtomicU64::new(0);
        let busy = budget.take(of_group(&own, &greedy), 0, BYTES).unwrap_err();
        assert_eq!(busy.holder.as_deref(), Some("tenant a"));
        assert_eq!((busy.inflight, busy.limit), (32 << 10, 32 << 10));
        // Another tenant finds as much as is free for a third one.
        let others: Vec<_> = (0..1000).map(|_| AtomicU64::new(0)).collect();
        let more: u64 = (others.iter())
            .map(|own| fill(&budget, of_group(own, &other)))
            .sum();
        assert_eq!(more, 16 << 10);
        for (all, group) in [(connections, &greedy), (others, &other)] {
            for own in &all {
                budget.give_back(of_group(own, group), own.load(Ordering::Relaxed));
            }
            assert_eq!(group.append_bytes(), 0);
        }
        assert_eq!(budget.total.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn greedy_connection_leaves_room_to_the_others_of_its_tenant() {
        let budget = Budget::new(Kind::Append, 64 << 10);
        let tenant = group();
        let [greedy, second, small] = [const { AtomicU64::new(0) }; 3];
        assert_eq!(fill(&budget, of_group(&greedy, &tenant)), 16 << 10);
        assert_eq!(fill(&budget, of_group(&second, &tenant)), 8 << 10);
        assert!(budget.take(of_group(&small, &tenant), 0, BYTES).is_ok());
    }

    #[test]
    fn limit_of_a_tenant_holds_for_its_appends_and_a_larger_one_passes_alone() {
        let budget = Budget::new(Kind::Append, 64 << 10);
        let tenant = group();
        tenant.limit(Some(8 << 10));
        let connections: Vec<_> = (0..100).map(|_| AtomicU64::new(0)).collect();
        let held: u64 = (connections.iter())
            .map(|own| fill(&budget, of_group(own, &tenant)))
            .sum();
        assert_eq!(held, 8 << 10);
        for own in &connections {
            budget.give_back(of_group(own, &tenant), own.load(Ordering::Relaxed));
        }
        let [large, second] = [const { AtomicU64::new(0) }; 2];
        assert!(budget.take(of_group(&large, &tenant), 0, 40 << 10).is_ok());
        let busy = budget.take(of_group(&second, &tenant), 0, 1).unwrap_err();
        assert_eq!((busy.inflight, busy.limit), (40 << 10, 8 << 10));
        tenant.limit(None);
        budget.give_back(of_group(&large, &tenant), 40 << 10);
        assert_eq!(fill(&budget, of_group(&second, &tenant)), 16 << 10);
    }
}
