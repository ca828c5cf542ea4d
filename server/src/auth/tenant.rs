//! The use of a tenant, and the limits that hold for it. The principals of a tenant share one [`TenantUsage`]. It
//! stays when `auth_file` changes, and takes over the new limits.
//!
//! | limit | beyond it |
//! |---|---|
//! | rates | a call of one answer fails with RATE; a session or a scan waits on its own |
//! | `followers`, `connections` | a call fails with QUOTA |
//! | `inflight_bytes` | [`crate::admission`] |
//!
//! Rule: a session or a scan that waits for its rate holds nothing that others wait for. A session has reserved its turn
//! ([`AppendTurn`]), and a scan takes a place only after the wait.

mod gcra;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tonic::Status;
use wald_storage::StoredBatch;

use super::Caller;
use super::limits::TenantLimits;
use crate::admission::GroupShare;
use crate::metrics::{RateFigures, TenantFigures};
use crate::status;
use gcra::{Gcra, RateClock};

/// The use of one tenant.
#[derive(Debug)]
pub(crate) struct TenantUsage {
    name: String,
    /// The limits in force.
    limits: RwLock<TenantLimits>,
    /// Wakes those who wait for a rate: the limits have changed.
    changed: Notify,
    appends: RateUsage,
    reads: RateUsage,
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

/// Bytes that a change without records counts: a frame of the journal without records.
const CHANGE_BYTES: u64 = 64;

impl Amount {
    /// Changes without records, such as commits of cursors. Each costs the journal a frame, like a small record.
    pub(crate) fn of_changes(number: u64) -> Self {
        Self {
            bytes: CHANGE_BYTES * number,
            records: number,
        }
    }

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

/// The tenants whose calls a connection has had. It counts for each of them until it ends, but for forwarded calls only
/// while there are any: the connection is of a stand-by, which has many callers and counts their own connections.
#[derive(Debug, Default)]
pub(crate) struct ConnectionTenants {
    own: Mutex<Vec<CountedUse>>,
    forwarded: Mutex<Vec<Weak<CountedUse>>>,
}

impl ConnectionTenants {
    /// Whether it counts for none as their own.
    pub(crate) fn is_empty(&self) -> bool {
        self.own.lock().is_empty()
    }

    /// Counts the connection for a tenant, if it is not counted yet.
    ///
    /// # Errors
    /// QUOTA.
    pub(crate) fn count(&self, tenant: &Arc<TenantUsage>) -> Result<(), Status> {
        let mut counted = self.own.lock();
        if !counted
            .iter()
            .any(|known| Arc::ptr_eq(&known.usage, tenant))
        {
            counted.push(tenant.connect()?);
        }
        Ok(())
    }

    /// Counts the connection for the tenant of a forwarded call, as long as one of its calls holds the value.
    ///
    /// # Errors
    /// QUOTA.
    pub(crate) fn count_forwarded(
        &self,
        tenant: &Arc<TenantUsage>,
    ) -> Result<Arc<CountedUse>, Status> {
        let mut counted = self.forwarded.lock();
        counted.retain(|known| known.strong_count() > 0);
        let mut live = counted.iter().filter_map(Weak::upgrade);
        if let Some(known) = live.find(|known| Arc::ptr_eq(&known.usage, tenant)) {
            return Ok(known);
        }
        let new = Arc::new(tenant.connect()?);
        counted.push(Arc::downgrade(&new));
        Ok(new)
    }
}

impl TenantUsage {
    /// A tenant that has nothing in use. At most `read_places` of its reads are at work at the same time.
    pub(crate) fn new(name: &str, read_places: usize) -> Self {
        Self {
            name: name.to_owned(),
            limits: RwLock::default(),
            changed: Notify::new(),
            appends: RateUsage::default(),
            reads: RateUsage::default(),
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
        drop(in_force);
        self.changed.notify_waiters();
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

    /// The limits that are checked here, by key; `None`: no limit. The engine checks the others ([`super::quotas`]).
    pub(crate) fn limits(&self) -> [(&'static str, Option<u64>); 7] {
        let limits = self.limits.read().clone();
        // All of them are named, so that a new one is not forgotten.
        let TenantLimits {
            append_bytes_per_second,
            appends_per_second,
            read_bytes_per_second,
            reads_per_second,
            logs: _,
            producers: _,
            cursors: _,
            stored_bytes: _,
            followers,
            connections,
            inflight_bytes,
        } = limits;
        [
            ("append_bytes_per_second", append_bytes_per_second),
            ("appends_per_second", appends_per_second),
            ("read_bytes_per_second", read_bytes_per_second),
            ("reads_per_second", reads_per_second),
            ("followers", followers),
            ("connections", connections),
            ("inflight_bytes", inflight_bytes),
        ]
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

    /// Takes an append of a session out of its rates. Returns its turn if it has to wait.
    pub(crate) fn append_in_turn(self: &Arc<Self>, amount: Amount) -> Option<AppendTurn> {
        let turn = AppendTurn::reserve(self, amount);
        if turn.wait(RateClock::now()).is_none() {
            turn.pass();
            return None;
        }
        self.appends.sums.waits.fetch_add(1, Ordering::Relaxed);
        Some(turn)
    }

    /// A place for a read at work. Reads wait in the order in which they came.
    async fn read_place(&self) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        Arc::clone(&self.read_places).acquire_owned().await.ok()
    }

    /// A place for a read at work, if earlier reads are paid off.
    ///
    /// # Errors
    /// RATE with the exact wait.
    pub(crate) async fn read_place_if_paid(&self) -> Result<Option<OwnedSemaphorePermit>, Status> {
        self.check_reads()?;
        let place = self.read_place().await;
        // Reads that had a place before may have used up the rate.
        self.check_reads()?;
        Ok(place)
    }

    /// Checks that earlier reads are paid off.
    ///
    /// # Errors
    /// RATE with the exact wait.
    fn check_reads(&self) -> Result<(), Status> {
        match self.reads.look(&self.read_rates(), RateClock::now()) {
            None => Ok(()),
            Some(over) => {
                self.reads.sums.refused.fetch_add(1, Ordering::Relaxed);
                Err(status::over_rate(&self.name, &over))
            }
        }
    }

    /// A place for a read at work, once earlier reads are paid off. The wait for them holds no place.
    pub(crate) async fn read_place_in_turn(&self) -> Option<OwnedSemaphorePermit> {
        let mut waits = false;
        loop {
            let place = self.read_place().await;
            // Made before the check, so that a change in between wakes it.
            let changed = self.changed.notified();
            // Reads that had a place before may have used up the rate.
            let Some(over) = self.reads.look(&self.read_rates(), RateClock::now()) else {
                return place;
            };
            drop(place);
            if !std::mem::replace(&mut waits, true) {
                self.reads.sums.waits.fetch_add(1, Ordering::Relaxed);
            }
            // Either way it looks again.
            let _ = tokio::time::timeout(over.wait, changed).await;
        }
    }

    /// Takes records that were read out of the rates of reads. Later reads wait until they are paid off.
    pub(crate) fn delivered(&self, amount: Amount) {
        self.reads.take_more(&self.read_rates(), amount);
    }

    /// Counts a scan that follows, or a read that waits for records.
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
        let limit = limit.unwrap_or(u64::MAX);
        let more = |used| (used < limit).then_some(used + 1);
        match count(self).fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(CountedUse {
                usage: Arc::clone(self),
                count,
            }),
            Err(used) => Err(status::over_count(&self.name, setting, used, limit)),
        }
    }
}

/// The reserved turn of an append of a session. Dropped before it has come, it gives its amount back.
#[derive(Debug)]
pub(crate) struct AppendTurn {
    usage: Arc<TenantUsage>,
    amount: Amount,
    /// The rates at which the times count.
    rates: RatePair,
    /// Times up to which those before it use up the rates.
    bytes_until: u64,
    records_until: u64,
    passed: bool,
}

impl AppendTurn {
    fn reserve(usage: &Arc<TenantUsage>, amount: Amount) -> Self {
        let (rates, now) = (usage.append_rates(), RateClock::now());
        let reserve = |gcra: &Gcra, amount, rate: Option<u64>| {
            rate.map_or(0, |rate| gcra.reserve(now, amount, rate))
        };
        Self {
            bytes_until: reserve(&usage.appends.bytes, amount.bytes, rates.bytes.1),
            records_until: reserve(&usage.appends.records, amount.records, rates.records.1),
            usage: Arc::clone(usage),
            amount,
            rates,
            passed: false,
        }
    }

    /// The wait until it comes. `None`: it has come.
    fn wait(&self, now: RateClock) -> Option<Duration> {
        gcra::wait(now, self.bytes_until.max(self.records_until))
    }

    /// Counts at the rates in force.
    fn follow_rates(&mut self, now: RateClock) {
        let to = self.usage.append_rates();
        let at_rate = |until, from: Option<u64>, to: Option<u64>| match from == to {
            true => until,
            false => gcra::at_rate(now, until, from, to),
        };
        let from = std::mem::replace(&mut self.rates, to);
        self.bytes_until = at_rate(self.bytes_until, from.bytes.1, to.bytes.1);
        self.records_until = at_rate(self.records_until, from.records.1, to.records.1);
    }

    /// Waits until it comes, and takes its amount out of the rates.
    pub(crate) async fn come(mut self) {
        let usage = Arc::clone(&self.usage);
        loop {
            // Made before the check, so that a change in between wakes it.
            let changed = usage.changed.notified();
            let now = RateClock::now();
            self.follow_rates(now);
            let Some(wait) = self.wait(now) else { break };
            // Either way it looks again.
            let _ = tokio::time::timeout(wait, changed).await;
        }
        self.pass();
    }

    fn pass(mut self) {
        self.passed = true;
        let rates = self.usage.append_rates();
        self.usage.appends.take_more(&rates, self.amount);
    }
}

impl Drop for AppendTurn {
    fn drop(&mut self) {
        if self.passed {
            return;
        }
        let (rates, appends) = (self.usage.append_rates(), &self.usage.appends);
        if let (_, Some(rate)) = rates.bytes {
            appends.bytes.cancel(self.amount.bytes, rate);
        }
        if let (_, Some(rate)) = rates.records {
            appends.records.cancel(self.amount.records, rate);
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

    /// A link of a stand-by lives longer than the connections of its callers.
    #[test]
    fn link_counts_for_a_tenant_only_while_it_has_calls() {
        let usage = usage(TenantLimits {
            connections: Some(1),
            ..TenantLimits::default()
        });
        let (first, second) = (ConnectionTenants::default(), ConnectionTenants::default());
        let calls = [(); 2].map(|()| first.count_forwarded(&usage).unwrap());
        assert!(second.count_forwarded(&usage).is_err());
        drop(calls);
        let call = second.count_forwarded(&usage).unwrap();
        assert!(first.count(&usage).is_err());
        drop(call);
        first.count(&usage).unwrap();
        assert!(second.count(&usage).is_err());
    }

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

    /// Uses up the burst of appends.
    fn use_up(usage: &TenantUsage) {
        while usage.append(records(1)).is_ok() {}
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
        use_up(&usage);
        let (sent, mut passed) = tokio::sync::mpsc::unbounded_channel();
        let begin = std::time::Instant::now();
        for number in 0..20 {
            let (usage, sent) = (Arc::clone(&usage), sent.clone());
            let turn = usage.append_in_turn(records(1)).unwrap();
            tokio::spawn(async move {
                turn.come().await;
                sent.send(number).unwrap();
            });
        }
        drop(sent);
        for number in 0..20 {
            assert_eq!(passed.recv().await, Some(number));
        }
        assert!(begin.elapsed() >= Duration::from_millis(190));
    }

    #[tokio::test]
    async fn session_that_goes_away_gives_its_turn_to_the_next() {
        let usage = usage(TenantLimits {
            appends_per_second: Some(1),
            ..TenantLimits::default()
        });
        use_up(&usage);
        let wait = |turn: &AppendTurn| turn.wait(RateClock::now()).unwrap();
        let gone = usage.append_in_turn(records(1000)).unwrap();
        let behind = usage.append_in_turn(records(1)).unwrap();
        assert!(wait(&behind) > Duration::from_secs(990));
        drop((gone, behind));
        let next = usage.append_in_turn(records(1)).unwrap();
        assert!(wait(&next) <= Duration::from_secs(1));
    }

    #[tokio::test]
    async fn session_that_is_not_polled_holds_up_no_other() {
        let usage = usage(TenantLimits {
            appends_per_second: Some(20),
            ..TenantLimits::default()
        });
        use_up(&usage);
        let mut stuck = Box::pin(usage.append_in_turn(records(10)).unwrap().come());
        assert!(waits(&mut stuck));
        let other = usage.append_in_turn(records(10)).unwrap().come();
        tokio::time::timeout(Duration::from_secs(20), other)
            .await
            .unwrap();
        stuck.await;
    }

    #[tokio::test]
    async fn changed_rate_wakes_sessions_that_wait() {
        let slow = TenantLimits {
            appends_per_second: Some(1),
            ..TenantLimits::default()
        };
        let fast = TenantLimits {
            appends_per_second: Some(1_000_000),
            ..TenantLimits::default()
        };
        for limits in [fast, TenantLimits::default()] {
            let usage = usage(slow.clone());
            use_up(&usage);
            assert!(usage.append_in_turn(records(10_000)).is_some());
            let _before = usage.append_in_turn(records(10_000)).unwrap();
            let mut turn = Box::pin(usage.append_in_turn(records(1)).unwrap().come());
            assert!(waits(&mut turn));
            usage.limit(&limits);
            tokio::time::timeout(Duration::from_secs(20), turn)
                .await
                .unwrap();
        }
    }

    #[tokio::test]
    async fn session_passes_though_a_caller_takes_all_that_is_left() {
        let usage = usage(TenantLimits {
            appends_per_second: Some(100),
            ..TenantLimits::default()
        });
        use_up(&usage);
        let turn = usage.append_in_turn(records(5)).unwrap();
        let begin = std::time::Instant::now();
        let greedy = async {
            let mut passed = 0;
            while begin.elapsed() < Duration::from_millis(500) {
                passed += usize::from(usage.append(records(1)).is_ok());
                tokio::task::yield_now().await;
            }
            passed
        };
        let session = async {
            turn.come().await;
            begin.elapsed()
        };
        let (passed, waited) = tokio::join!(greedy, session);
        assert!(waited < Duration::from_millis(200), "{waited:?}");
        assert!(passed > 0, "it keeps out no caller");
    }

    #[tokio::test]
    async fn scan_that_waits_for_its_rate_holds_no_place() {
        let usage = usage(TenantLimits {
            read_bytes_per_second: Some(1),
            ..TenantLimits::default()
        });
        usage.delivered(Amount {
            bytes: 1000,
            records: 1,
        });
        let mut scans: Vec<_> = (0..3)
            .map(|_| Box::pin(async { drop(usage.read_place_in_turn().await) }))
            .collect();
        assert!(scans.iter_mut().all(waits));
        assert_eq!(usage.read_places.available_permits(), 2);
        usage.limit(&TenantLimits::default());
        for scan in scans {
            scan.await;
        }
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
