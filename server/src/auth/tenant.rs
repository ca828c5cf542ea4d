//! What a tenant has in use, and the limits that hold for it. The principals of a tenant share one [`TenantUsage`]. It
//! stays when `auth_file` changes, and takes over the new limits.
//!
//! | limit | beyond it |
//! |---|---|
//! | rates | a call of one answer fails with RATE; a session or a scan waits on its own |
//! | `followers`, `connections` | a call fails with QUOTA |
//! | `inflight_bytes` | [`crate::admission`] |
//!
//! Rule: only the first in the queue of a tenant waits by time. The others wait for their turn, so that a thousand
//! sessions cost one timer.

mod gcra;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;
use wald_storage::StoredBatch;

use super::Caller;
use super::limits::TenantLimits;
use crate::admission::GroupShare;
use crate::metrics::{RateFigures, TenantFigures};
use crate::status;
use gcra::{Gcra, RateClock};

/// Longest sleep before the limits are looked at again: a reload may have changed them.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// The use of one tenant.
#[derive(Debug)]
pub(crate) struct TenantUsage {
    name: String,
    /// The limits in force.
    limits: RwLock<TenantLimits>,
    appends: RateUsage,
    reads: RateUsage,
    /// Held by the session that waits for the rate of appends.
    append_turn: tokio::sync::Mutex<()>,
    /// Places for reads at work.
    read_places: Arc<Semaphore>,
    followers: AtomicU64,
    connections: AtomicU64,
    share: Arc<GroupShare>,
}

/// The use of two rates, and sums since the tenant was first read.
#[derive(Debug, Default)]
struct RateUsage {
    bytes: Gcra,
    records: Gcra,
    sums: RateSums,
}

/// Sums since the tenant was first read.
#[derive(Debug, Default)]
struct RateSums {
    bytes: AtomicU64,
    records: AtomicU64,
    refused: AtomicU64,
    waits: AtomicU64,
}

/// Records and their bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    pub(crate) bytes: u64,
    pub(crate) records: u64,
}

impl Amount {
    /// The records of a page or a chunk, and the bytes of their stored form.
    pub(crate) fn of(batches: &[StoredBatch]) -> Self {
        Self {
            bytes: batches.iter().map(|batch| batch.body.len() as u64).sum(),
            records: batches.iter().map(|batch| u64::from(batch.count)).sum(),
        }
    }
}

/// Two rates; `None`: no limit.
#[derive(Debug, Clone, Copy)]
struct RatePair {
    bytes: (&'static str, Option<u64>),
    records: (&'static str, Option<u64>),
}

/// A rate that is used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OverRate {
    /// The key in `limits`.
    pub(crate) setting: &'static str,
    pub(crate) limit: u64,
    /// The wait after which the request would pass if no other did meanwhile.
    pub(crate) wait: Duration,
}

impl RatePair {
    fn of_appends(limits: &TenantLimits) -> Self {
        Self {
            bytes: ("append_bytes_per_second", limits.append_bytes_per_second),
            records: ("appends_per_second", limits.appends_per_second),
        }
    }

    fn of_reads(limits: &TenantLimits) -> Self {
        Self {
            bytes: ("read_bytes_per_second", limits.read_bytes_per_second),
            records: ("reads_per_second", limits.reads_per_second),
        }
    }
}

impl RateUsage {
    /// Takes an amount, if both rates let it pass.
    fn take(&self, rates: &RatePair, amount: Amount) -> Result<(), OverRate> {
        let now = RateClock::now();
        if let (_, Some(rate)) = rates.bytes
            && self.bytes.take(now, amount.bytes, rate).is_err()
        {
            return Err(self.over(rates, now));
        }
        if let (_, Some(rate)) = rates.records
            && self.records.take(now, amount.records, rate).is_err()
        {
            if let (_, Some(rate)) = rates.bytes {
                self.bytes.give_back(amount.bytes, rate);
            }
            return Err(self.over(rates, now));
        }
        self.sums.add(amount);
        Ok(())
    }

    /// The rate that asks for the longer wait.
    fn over(&self, rates: &RatePair, now: RateClock) -> OverRate {
        let over = self.look(rates, now);
        over.unwrap_or(OverRate {
            setting: rates.bytes.0,
            limit: rates.bytes.1.unwrap_or_default(),
            wait: Duration::from_nanos(1),
        })
    }

    /// The rate that asks for the longer wait. `None`: a request would pass now.
    fn look(&self, rates: &RatePair, now: RateClock) -> Option<OverRate> {
        let both = [(rates.bytes, &self.bytes), (rates.records, &self.records)];
        let over = both.into_iter().filter_map(|((setting, limit), used)| {
            let limit = limit?;
            let wait = used.wait(now)?;
            Some(OverRate {
                setting,
                limit,
                wait,
            })
        });
        over.max_by_key(|over| over.wait)
    }

    /// Takes an amount, whatever is left.
    fn take_more(&self, rates: &RatePair, amount: Amount) {
        if rates.bytes.1.is_some() || rates.records.1.is_some() {
            let now = RateClock::now();
            if let (_, Some(rate)) = rates.bytes {
                self.bytes.take_more(now, amount.bytes, rate);
            }
            if let (_, Some(rate)) = rates.records {
                self.records.take_more(now, amount.records, rate);
            }
        }
        self.sums.add(amount);
    }

    fn change_rates(&self, from: &RatePair, to: &RatePair) {
        let now = RateClock::now();
        self.bytes.change_rate(now, from.bytes.1, to.bytes.1);
        self.records.change_rate(now, from.records.1, to.records.1);
    }
}

impl RateSums {
    fn add(&self, amount: Amount) {
        self.bytes.fetch_add(amount.bytes, Ordering::Relaxed);
        self.records.fetch_add(amount.records, Ordering::Relaxed);
    }
}

/// A follower or a connection of a tenant, until it is dropped.
#[derive(Debug)]
pub(crate) struct CountedUse {
    usage: Arc<TenantUsage>,
    count: fn(&TenantUsage) -> &AtomicU64,
}

impl Drop for CountedUse {
    fn drop(&mut self) {
        (self.count)(&self.usage).fetch_sub(1, Ordering::Relaxed);
    }
}

/// The tenants whose calls a connection has had. It counts for each of them until it ends.
#[derive(Debug, Default)]
pub(crate) struct ConnectionTenants(Mutex<Vec<CountedUse>>);

impl ConnectionTenants {
    /// Counts the connection for a tenant, if it is not counted yet.
    ///
    /// # Errors
    /// QUOTA.
    pub(crate) fn count(&self, tenant: &Arc<TenantUsage>) -> Result<(), Status> {
        let mut counted = self.0.lock();
        if !counted
            .iter()
            .any(|known| Arc::ptr_eq(&known.usage, tenant))
        {
            counted.push(tenant.connect()?);
        }
        Ok(())
    }
}

impl TenantUsage {
    /// A tenant that has nothing in use. At most `read_places` of its reads are at work at the same time.
    pub(crate) fn new(name: &str, read_places: usize) -> Self {
        Self {
            name: name.to_owned(),
            limits: RwLock::default(),
            appends: RateUsage::default(),
            reads: RateUsage::default(),
            append_turn: tokio::sync::Mutex::default(),
            read_places: Arc::new(Semaphore::new(read_places)),
            followers: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            share: Arc::new(GroupShare::new(format!("tenant {name}"))),
        }
    }

    /// Puts limits in force.
    pub(super) fn limit(&self, limits: &TenantLimits) {
        let mut in_force = self.limits.write();
        let pairs = [RatePair::of_appends, RatePair::of_reads];
        for (usage, pair) in [&self.appends, &self.reads].into_iter().zip(pairs) {
            let (from, to) = (pair(&in_force), pair(limits));
            if (from.bytes, from.records) != (to.bytes, to.records) {
                usage.change_rates(&from, &to);
            }
        }
        self.share.limit(limits.inflight_bytes);
        *in_force = limits.clone();
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Its share of the memory of requests.
    pub(crate) fn share(&self) -> &Arc<GroupShare> {
        &self.share
    }

    /// Figures for metrics.
    pub(crate) fn figures(&self) -> TenantFigures {
        let load = |number: &AtomicU64| number.load(Ordering::Relaxed);
        let rate = |usage: &RateUsage| RateFigures {
            bytes: load(&usage.sums.bytes),
            records: load(&usage.sums.records),
            refused: load(&usage.sums.refused),
            waits: load(&usage.sums.waits),
        };
        TenantFigures {
            appends: rate(&self.appends),
            reads: rate(&self.reads),
            inflight_bytes: self.share.append_bytes(),
            followers: load(&self.followers),
            connections: load(&self.connections),
        }
    }

    fn append_rates(&self) -> RatePair {
        RatePair::of_appends(&self.limits.read())
    }

    fn read_rates(&self) -> RatePair {
        RatePair::of_reads(&self.limits.read())
    }

    /// Takes an append out of its rates.
    ///
    /// # Errors
    /// RATE with the exact wait.
    pub(crate) fn append(&self, amount: Amount) -> Result<(), Status> {
        (self.appends.take(&self.append_rates(), amount)).map_err(|over| {
            self.appends.sums.refused.fetch_add(1, Ordering::Relaxed);
            status::over_rate(&self.name, &over)
        })
    }

    /// Takes an append of a session out of its rates, unless it has to wait.
    pub(crate) fn append_at_once(&self, amount: Amount) -> bool {
        // Behind those that wait already.
        let turn = self.append_turn.try_lock();
        turn.is_ok() && self.appends.take(&self.append_rates(), amount).is_ok()
    }

    /// Waits until the rates let an append of a session pass, and takes it out of them. Sessions wait in the order in
    /// which they came.
    pub(crate) async fn append_in_turn(self: Arc<Self>, amount: Amount) {
        self.appends.sums.waits.fetch_add(1, Ordering::Relaxed);
        let _turn = self.append_turn.lock().await;
        while let Err(over) = self.appends.take(&self.append_rates(), amount) {
            tokio::time::sleep(over.wait.min(LOOK_AGAIN)).await;
        }
    }

    /// A place for a read at work. Reads wait in the order in which they came.
    pub(crate) async fn read_place(&self) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        Arc::clone(&self.read_places).acquire_owned().await.ok()
    }

    /// Checks that earlier reads are paid off.
    ///
    /// # Errors
    /// RATE with the exact wait.
    pub(crate) fn check_reads(&self) -> Result<(), Status> {
        match self.reads.look(&self.read_rates(), RateClock::now()) {
            None => Ok(()),
            Some(over) => {
                self.reads.sums.refused.fetch_add(1, Ordering::Relaxed);
                Err(status::over_rate(&self.name, &over))
            }
        }
    }

    /// A place for a read at work, once earlier reads are paid off.
    pub(crate) async fn read_place_in_turn(&self) -> Option<OwnedSemaphorePermit> {
        let place = self.read_place().await;
        let mut waits = false;
        while let Some(over) = self.reads.look(&self.read_rates(), RateClock::now()) {
            if !std::mem::replace(&mut waits, true) {
                self.reads.sums.waits.fetch_add(1, Ordering::Relaxed);
            }
            tokio::time::sleep(over.wait.min(LOOK_AGAIN)).await;
        }
        place
    }

    /// Takes records that were read out of the rates of reads. Later reads wait until they are paid off.
    pub(crate) fn delivered(&self, amount: Amount) {
        self.reads.take_more(&self.read_rates(), amount);
    }

    /// Counts a scan that follows.
    ///
    /// # Errors
    /// QUOTA.
    pub(crate) fn follow(self: &Arc<Self>) -> Result<CountedUse, Status> {
        let limit = self.limits.read().followers;
        self.count("followers", limit, |usage| &usage.followers)
    }

    /// Counts a connection.
    ///
    /// # Errors
    /// QUOTA.
    fn connect(self: &Arc<Self>) -> Result<CountedUse, Status> {
        let limit = self.limits.read().connections;
        self.count("connections", limit, |usage| &usage.connections)
    }

    fn count(
        self: &Arc<Self>,
        setting: &'static str,
        limit: Option<u64>,
        count: fn(&Self) -> &AtomicU64,
    ) -> Result<CountedUse, Status> {
        let used = count(self).fetch_add(1, Ordering::Relaxed);
        let counted = CountedUse {
            usage: Arc::clone(self),
            count,
        };
        match limit {
            Some(limit) if used >= limit => {
                Err(status::over_count(&self.name, setting, used, limit))
            }
            _ => Ok(counted),
        }
    }
}

impl Caller {
    /// The use of its tenant, if it has one.
    pub(crate) fn tenant(&self) -> Option<&Arc<TenantUsage>> {
        let tenant = self.identity.as_ref()?.principal.tenant.as_ref()?;
        Some(&tenant.usage)
    }

    /// The share of its tenant in the memory of requests, or its own if it has no tenant. `None` without `auth_file`.
    pub(crate) fn share(&self) -> Option<&Arc<GroupShare>> {
        Some(&self.identity.as_ref()?.principal.share)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Waker};

    use super::*;

    fn usage(limits: TenantLimits) -> Arc<TenantUsage> {
        let usage = TenantUsage::new("a", 2);
        usage.limit(&limits);
        Arc::new(usage)
    }

    /// Polls once.
    fn waits(future: &mut (impl Future<Output = ()> + Unpin)) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        Pin::new(future).poll(&mut context).is_pending()
    }

    fn records(records: u64) -> Amount {
        Amount { bytes: 0, records }
    }

    #[test]
    fn append_is_refused_by_the_rate_that_asks_for_the_longer_wait() {
        let usage = usage(TenantLimits {
            append_bytes_per_second: Some(1000),
            appends_per_second: Some(10),
            ..TenantLimits::default()
        });
        let large = Amount {
            bytes: 5000,
            records: 100,
        };
        assert!(usage.append(large).is_ok());
        let over = usage
            .appends
            .take(&usage.append_rates(), large)
            .unwrap_err();
        assert_eq!((over.setting, over.limit), ("appends_per_second", 10));
        assert!(over.wait > Duration::from_millis(8900) && over.wait <= Duration::from_secs(9));
    }

    #[test]
    fn append_that_one_rate_refuses_is_not_taken_from_the_other() {
        let usage = usage(TenantLimits {
            append_bytes_per_second: Some(1000),
            appends_per_second: Some(1),
            ..TenantLimits::default()
        });
        assert!(usage.append(records(100)).is_ok());
        for _ in 0..100 {
            assert!(
                usage
                    .append(Amount {
                        bytes: 900,
                        records: 1
                    })
                    .is_err()
            );
        }
        assert!(usage.appends.bytes.wait(RateClock::now()).is_none());
    }

    #[tokio::test]
    async fn sessions_get_their_rate_in_the_order_in_which_they_came() {
        let usage = usage(TenantLimits {
            appends_per_second: Some(100),
            ..TenantLimits::default()
        });
        while usage.append_at_once(records(1)) {}
        let (sent, mut passed) = tokio::sync::mpsc::unbounded_channel();
        let begin = std::time::Instant::now();
        for number in 0..20 {
            let (usage, sent) = (Arc::clone(&usage), sent.clone());
            let mut session = Box::pin(usage.append_in_turn(records(1)));
            // Takes its place in the queue now.
            assert!(waits(&mut session));
            tokio::spawn(async move {
                session.await;
                sent.send(number).unwrap();
            });
        }
        drop(sent);
        assert!(!usage.append_at_once(records(1)), "others wait");
        for number in 0..20 {
            assert_eq!(passed.recv().await, Some(number));
        }
        assert!(begin.elapsed() >= Duration::from_millis(190));
    }

    #[tokio::test]
    async fn session_that_goes_away_leaves_its_turn_to_the_next() {
        let usage = usage(TenantLimits {
            appends_per_second: Some(1),
            ..TenantLimits::default()
        });
        while usage.append_at_once(records(1)) {}
        let mut first = Box::pin(Arc::clone(&usage).append_in_turn(records(1)));
        assert!(waits(&mut first));
        drop(first);
        // The new rate lets it pass.
        let second = tokio::spawn(Arc::clone(&usage).append_in_turn(records(1)));
        usage.limit(&TenantLimits::default());
        second.await.unwrap();
    }

    #[test]
    fn delivered_records_are_paid_off_before_the_next_read() {
        let usage = usage(TenantLimits {
            read_bytes_per_second: Some(1000),
            ..TenantLimits::default()
        });
        assert!(usage.check_reads().is_ok());
        usage.delivered(Amount {
            bytes: 61_000,
            records: 1,
        });
        assert!(usage.check_reads().is_err());
        let over = usage
            .reads
            .look(&usage.read_rates(), RateClock::now())
            .unwrap();
        assert!(over.wait > Duration::from_secs(59) && over.wait <= Duration::from_secs(60));
        usage.limit(&TenantLimits {
            read_bytes_per_second: Some(1_000_000),
            ..TenantLimits::default()
        });
        assert!(usage.check_reads().is_ok());
    }

    #[tokio::test]
    async fn reads_beyond_the_places_of_a_tenant_wait_for_one() {
        let usage = usage(TenantLimits::default());
        let (first, _second) = (usage.read_place().await, usage.read_place_in_turn().await);
        let mut third = Box::pin(async { drop(usage.read_place().await) });
        assert!(waits(&mut third));
        drop(first);
        third.await;
    }

    #[test]
    fn count_beyond_the_limit_is_refused_until_one_goes_away() {
        let usage = usage(TenantLimits {
            followers: Some(2),
            ..TenantLimits::default()
        });
        let both = [usage.follow().unwrap(), usage.follow().unwrap()];
        assert!(usage.follow().is_err());
        assert_eq!(usage.followers.load(Ordering::Relaxed), 2);
        drop(both);
        assert!(usage.follow().is_ok());
        let connections: Vec<_> = (0..100).map(|_| usage.connect().unwrap()).collect();
        assert_eq!(usage.connections.load(Ordering::Relaxed), 100);
        drop(connections);
    }
}
