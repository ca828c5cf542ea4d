//! Quotas of tenants, and their use.
//!
//! ```text
//! name of a new log ── prefix ──▶ QuotaId, in the log's state ──▶ slot: limits and use
//! ```
//!
//! A log is assigned to its quota once, at its creation or when the quotas change, so that an append finds the
//! slot by an index. All changes of the use happen under the lock of the committer. So a check and the change that it
//! allows are one step, and no quota is exceeded. A use above its limit remains after a reload that lowers the limit:
//! existing logs stay usable.

use std::num::NonZeroU16;
use std::sync::Arc;

use smallvec::SmallVec;

use super::super::{Log, LogState, Logs, STEP};
use super::LogUsage;
use crate::api::error::{AppendError, Bounded};
use crate::api::quota::{Quota, QuotaCounts, QuotaError, QuotaUse};
use crate::base::ids::LogName;

/// Maximum number of quotas.
pub(crate) const MAX_QUOTAS: usize = u16::MAX as usize - 1;

/// Index of a quota. It stays while the quota exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QuotaId(NonZeroU16);

impl QuotaId {
    fn of_slot(at: usize) -> Option<Self> {
        let number = u16::try_from(at + 1).ok()?;
        NonZeroU16::new(number).map(Self)
    }

    fn slot(self) -> usize {
        usize::from(self.0.get()) - 1
    }
}

/// A slot that no quota has is free for the next one.
type QuotaSlot = Option<QuotaUse>;

/// All quotas.
#[derive(Debug, Default)]
pub(crate) struct TenantQuotas {
    slots: Vec<QuotaSlot>,
    /// Prefixes in order, each with its slot. No prefix begins with another one.
    prefixes: Vec<(Arc<str>, QuotaId)>,
}

/// Additions of a request to the use of one quota.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Addition<'a> {
    quota: QuotaId,
    /// First log of the tenant in the request.
    log: &'a LogName,
    adds: QuotaCounts,
}

/// Additions of a request, one entry for each quota.
#[derive(Debug, Default)]
pub(crate) struct Additions<'a>(SmallVec<[Addition<'a>; 1]>);

impl<'a> Additions<'a> {
    /// The additions to a quota, to be raised.
    pub(crate) fn of(&mut self, quota: QuotaId, log: &'a LogName) -> &mut QuotaCounts {
        let at = match self.0.iter().position(|other| other.quota == quota) {
            Some(at) => at,
            None => {
                self.0.push(Addition {
                    quota,
                    log,
                    adds: QuotaCounts::default(),
                });
                self.0.len() - 1
            }
        };
        &mut self.0[at].adds
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Quotas that are new, and ids of quotas that are over. Their logs must be assigned again.
#[derive(Debug, Default)]
pub(crate) struct Reassigned {
    pub(crate) new: Vec<(Arc<str>, QuotaId)>,
    pub(crate) over: Vec<Arc<str>>,
}

impl TenantQuotas {
    /// Replaces all quotas. A quota whose prefix stays keeps its id and its use.
    ///
    /// # Errors
    /// If a prefix begins with another one, or there are too many. Then nothing changes.
    pub(crate) fn replace(&mut self, mut quotas: Vec<Quota>) -> Result<Reassigned, QuotaError> {
        if quotas.len() > MAX_QUOTAS {
            return Err(QuotaError::TooMany {
                given: quotas.len(),
                max: MAX_QUOTAS,
            });
        }
        quotas.sort_unstable_by(|one, other| one.prefix.cmp(&other.prefix));
        // All names with a prefix follow it directly in this order.
        let nested = quotas
            .windows(2)
            .find(|pair| pair[1].prefix.starts_with(&*pair[0].prefix));
        if let Some([outer, inner]) = nested {
            return Err(QuotaError::Nested {
                inner: Arc::clone(&inner.prefix),
                of_inner: Arc::clone(&inner.tenant),
                outer: Arc::clone(&outer.prefix),
                of_outer: Arc::clone(&outer.tenant),
            });
        }
        let mut changed = Reassigned::default();
        let stays = |prefix: &Arc<str>| quotas.binary_search_by(|quota| quota.prefix.cmp(prefix));
        for (prefix, id) in std::mem::take(&mut self.prefixes) {
            match stays(&prefix) {
                Ok(_) => self.prefixes.push((prefix, id)),
                Err(_) => {
                    self.slots[id.slot()] = None;
                    changed.over.push(prefix);
                }
            }
        }
        let kept = std::mem::take(&mut self.prefixes);
        let mut free = 0;
        for quota in quotas {
            let prefix = Arc::clone(&quota.prefix);
            let known = kept.binary_search_by(|(other, _)| other.cmp(&prefix));
            let id = match known {
                Ok(at) => {
                    let id = kept[at].1;
                    if let Some(slot) = &mut self.slots[id.slot()] {
                        slot.quota = quota;
                    }
                    id
                }
                Err(_) => {
                    while self.slots.get(free).is_some_and(Option::is_some) {
                        free += 1;
                    }
                    if free == self.slots.len() {
                        self.slots.push(None);
                    }
                    self.slots[free] = Some(QuotaUse {
                        quota,
                        used: QuotaCounts::default(),
                    });
                    // There are at most `MAX_QUOTAS` slots.
                    let Some(id) = QuotaId::of_slot(free) else {
                        continue;
                    };
                    changed.new.push((Arc::clone(&prefix), id));
                    id
                }
            };
            self.prefixes.push((prefix, id));
        }
        Ok(changed)
    }

    /// The quota of a log with this name.
    pub(crate) fn of_name(&self, name: &str) -> Option<QuotaId> {
        let behind = self
            .prefixes
            .partition_point(|(prefix, _)| **prefix <= *name);
        let (prefix, id) = self.prefixes.get(behind.checked_sub(1)?)?;
        name.starts_with(&**prefix).then_some(*id)
    }

    /// The use of all quotas, in the order of their prefixes.
    pub(crate) fn all(&self) -> Vec<QuotaUse> {
        let slots = self.prefixes.iter();
        slots
            .filter_map(|(_, id)| self.slots[id.slot()].clone())
            .collect()
    }

    /// The use of a quota, to be changed.
    fn used(&mut self, id: QuotaId) -> Option<&mut QuotaCounts> {
        let slot = self.slots.get_mut(id.slot())?;
        slot.as_mut().map(|slot| &mut slot.used)
    }

    pub(crate) fn add(&mut self, id: QuotaId, more: QuotaCounts) {
        if let Some(used) = self.used(id) {
            used.add(more);
        }
    }

    pub(crate) fn take(&mut self, id: QuotaId, less: QuotaCounts) {
        if let Some(used) = self.used(id) {
            used.take(less);
        }
    }

    /// The error that refuses a request with these additions. `None` if all quotas have room.
    pub(crate) fn refuse(&self, wanted: &Additions<'_>) -> Option<AppendError> {
        wanted.0.iter().find_map(|wanted| {
            let slot = self.slots.get(wanted.quota.slot())?.as_ref()?;
            let (adds, used, limits) = (&wanted.adds, &slot.used, &slot.quota.limits);
            let bounds = [
                (Bounded::TenantLogs, adds.logs, used.logs, limits.logs),
                (
                    Bounded::TenantProducers,
                    adds.producers,
                    used.producers,
                    limits.producers,
                ),
                (
                    Bounded::TenantCursors,
                    adds.cursors,
                    used.cursors,
                    limits.cursors,
                ),
                (
                    Bounded::TenantBytes,
                    adds.stored_bytes,
                    used.stored_bytes,
                    limits.stored_bytes,
                ),
            ];
            let over = |(what, more, used, limit): (_, u64, u64, Option<u64>)| {
                let limit = limit?;
                let over = more > 0 && used.saturating_add(more) > limit;
                over.then_some((what, used, limit))
            };
            let (what, used, limit) = bounds.into_iter().find_map(over)?;
            Some(AppendError::Quota {
                log: wanted.log.clone(),
                what,
                used,
                limit,
                tenant: Some(Arc::clone(&slot.quota.tenant)),
            })
        })
    }
}

impl QuotaCounts {
    /// Nothing but these bytes.
    fn bytes(stored_bytes: u64) -> Self {
        Self {
            stored_bytes,
            ..Self::default()
        }
    }

    fn add(&mut self, more: Self) {
        self.logs += more.logs;
        self.producers += more.producers;
        self.cursors += more.cursors;
        self.stored_bytes += more.stored_bytes;
    }

    fn take(&mut self, less: Self) {
        self.logs = self.logs.saturating_sub(less.logs);
        self.producers = self.producers.saturating_sub(less.producers);
        self.cursors = self.cursors.saturating_sub(less.cursors);
        self.stored_bytes = self.stored_bytes.saturating_sub(less.stored_bytes);
    }
}

impl From<LogUsage> for QuotaCounts {
    fn from(usage: LogUsage) -> Self {
        Self {
            producers: usage.producers,
            cursors: usage.cursors,
            ..Self::default()
        }
    }
}

/// The bytes of a log before a change, and its quota.
pub(crate) type CountedBytes = Option<(QuotaId, u64)>;

impl QuotaCounts {
    /// The use that one existing log adds to its quota.
    fn of_log(state: &LogState) -> Self {
        Self {
            logs: 1,
            stored_bytes: state.kept_bytes(),
            ..LogUsage::of(state.extras.as_deref()).into()
        }
    }
}

/// The committer calls all of these, or a caller that holds the committer.
impl Logs {
    /// Replaces the quotas of all tenants, and counts the use of new ones. Returns the use of all.
    ///
    /// # Errors
    /// If a prefix begins with another one, or there are too many. Then nothing changes.
    pub(crate) fn set_quotas(&self, quotas: Vec<Quota>) -> Result<Vec<QuotaUse>, QuotaError> {
        let changed = self.quotas.lock().replace(quotas)?;
        for prefix in &changed.over {
            self.with_prefix(prefix, |state| state.quota = None);
        }
        for (prefix, id) in &changed.new {
            let mut used = QuotaCounts::default();
            self.with_prefix(prefix, |state| {
                state.quota = Some(*id);
                used.add(QuotaCounts::of_log(state));
            });
            self.quotas.lock().add(*id, used);
        }
        Ok(self.quotas())
    }

    /// Visits the state of all logs whose names begin with a prefix.
    fn with_prefix(&self, prefix: &str, mut visit: impl FnMut(&mut LogState)) {
        let mut after: Option<LogName> = None;
        loop {
            let step = self.step(prefix, after.as_ref().map(LogName::as_str), STEP);
            let Some(last) = step.last() else {
                return;
            };
            after = Some(last.name.clone());
            step.iter().for_each(|log| visit(&mut log.state.write()));
        }
    }

    /// The use of all quotas, in the order of their prefixes.
    pub(crate) fn quotas(&self) -> Vec<QuotaUse> {
        self.quotas.lock().all()
    }

    /// The quota of a log with this name.
    pub(crate) fn quota_of(&self, name: &LogName) -> Option<QuotaId> {
        self.quotas.lock().of_name(name.as_str())
    }

    /// The error that refuses a request with these additions. `None` if all quotas have room.
    pub(crate) fn over_quota(&self, wanted: &Additions<'_>) -> Option<AppendError> {
        match wanted.is_empty() {
            true => None,
            false => self.quotas.lock().refuse(wanted),
        }
    }

    /// Assigns a new log to the quota of its name.
    pub(crate) fn join_quota(&self, log: &Log) {
        if let Some(id) = self.quota_of(&log.name) {
            let mut state = log.state.write();
            state.quota = Some(id);
            self.quotas.lock().add(id, QuotaCounts::of_log(&state));
        }
    }

    /// Takes a log that ends from its quota.
    pub(crate) fn leave_quota(&self, state: &mut LogState) {
        if let Some(id) = state.quota.take() {
            self.quotas.lock().take(id, QuotaCounts::of_log(state));
        }
    }

    /// Notes the bytes of a log before a change. [`Logs::count_bytes`] counts the change.
    pub(crate) fn bytes_now(state: &LogState) -> CountedBytes {
        state.quota.map(|quota| (quota, state.kept_bytes()))
    }

    /// Counts a change of a log's bytes to its quota.
    pub(crate) fn count_bytes(&self, before: CountedBytes, state: &LogState) {
        if let Some((quota, before)) = before {
            let mut quotas = self.quotas.lock();
            quotas.take(quota, QuotaCounts::bytes(before));
            quotas.add(quota, QuotaCounts::bytes(state.kept_bytes()));
        }
    }

    /// The use of all quotas, counted again from the logs.
    #[cfg(test)]
    pub(crate) fn recount_quotas(&self) -> Vec<QuotaUse> {
        let mut quotas = self.quotas();
        for one in &mut quotas {
            one.used = QuotaCounts::default();
        }
        for log in self.all() {
            let name = log.name.as_str();
            let mut of = quotas
                .iter_mut()
                .filter(|one| name.starts_with(&*one.quota.prefix));
            if let Some(one) = of.next() {
                one.used.add(QuotaCounts::of_log(&log.state.read()));
            }
        }
        quotas
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::quota::QuotaLimits;

    fn quota(tenant: &str, prefix: &str) -> Quota {
        Quota {
            tenant: tenant.into(),
            prefix: prefix.into(),
            limits: QuotaLimits::default(),
        }
    }

    #[test]
    fn a_name_belongs_to_the_quota_with_its_prefix() {
        let mut quotas = TenantQuotas::default();
        assert_eq!(quotas.of_name("a/x"), None);
        let new = [quota("b", "b/"), quota("a", "a/"), quota("ab", "ab/")];
        let changed = quotas.replace(new.to_vec()).unwrap();
        assert_eq!(changed.new.len(), 3);
        let of = |quotas: &TenantQuotas, name: &str| {
            let id = quotas.of_name(name)?;
            let slot = quotas.slots[id.slot()].as_ref();
            slot.map(|slot| slot.quota.tenant.to_string())
        };
        for (name, tenant) in [
            ("a/", Some("a")),
            ("a/x", Some("a")),
            ("a/\u{10ffff}", Some("a")),
            ("a", None),
            ("a0", None),
            ("ab/x", Some("ab")),
            ("abc", None),
            ("b/x", Some("b")),
            ("B/x", None),
            ("c", None),
        ] {
            assert_eq!(of(&quotas, name).as_deref(), tenant, "{name:?}");
        }
    }

    #[test]
    fn a_quota_keeps_its_id_and_use_while_its_prefix_stays() {
        let mut quotas = TenantQuotas::default();
        quotas
            .replace(vec![quota("a", "a/"), quota("b", "b/")])
            .unwrap();
        let b = quotas.of_name("b/x").unwrap();
        let one = QuotaCounts {
            logs: 1,
            ..QuotaCounts::default()
        };
        quotas.add(b, one);
        let next = vec![quota("c", "c/"), quota("renamed", "b/"), quota("d", "d/")];
        let changed = quotas.replace(next).unwrap();
        assert_eq!(changed.over, ["a/".into()]);
        assert_eq!(changed.new.len(), 2);
        assert_eq!(quotas.of_name("b/x"), Some(b));
        let all = quotas.all();
        let told: Vec<_> = all
            .iter()
            .map(|one| (&*one.quota.tenant, one.used.logs))
            .collect();
        assert_eq!(told, [("renamed", 1), ("c", 0), ("d", 0)]);
        // The slot of the quota that is over was free.
        assert_eq!(quotas.slots.len(), 3);
    }

    #[test]
    fn nested_and_equal_prefixes_are_refused_and_change_nothing() {
        let mut quotas = TenantQuotas::default();
        quotas.replace(vec![quota("a", "a/")]).unwrap();
        for inner in ["a/b/", "a/"] {
            let both = vec![quota("b", inner), quota("x", "a!/"), quota("a", "a/")];
            let refused = quotas.replace(both).unwrap_err();
            assert!(matches!(refused, QuotaError::Nested { .. }), "{refused}");
        }
        assert_eq!(quotas.all().len(), 1);
    }
}
