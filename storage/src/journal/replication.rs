//! The third published position, and the requests that wait for it.
//!
//! ```text
//!  flush ──▶ durable ──▶ shipper ──▶ publish_replicated ──▶ answers REPLICATED
//!     └── requests for REPLICATED move here when their flush is done
//! ```
//!
//! Without a replica a journal has no [`Replication`], and its requests pass one branch.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use super::Journal;
use super::lag::ReplicaLag;
use super::segment::Segment;
use super::waiting::{UnflushedGroup, Waiter};
use crate::api::error::AppendError;
use crate::api::record::{Durability, Visibility};
use crate::api::replica::{
    MAX_REPLICA_LAG, MOST_UNRELEASED, OwnerLease, ReplicaBounds, ReplicaProgress, ReplicaState,
    Unreplicated,
};
use crate::api::watch::{Watch, Watched};
use crate::base::ids::Position;
use crate::base::metrics::AppendPhase;
use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Maximum number of entries of groups whose readers wait for the replica. When there are more groups, each entry holds several,
/// and names each log once.
const MOST_ENTRIES: usize = 256;
/// With fewer entries than these, new ones hold fewer groups again.
const FEW_ENTRIES: usize = MOST_ENTRIES / 4;

/// State of a journal that is shipped to a replica.
pub(crate) struct Replication {
    bounds: ReplicaBounds,
    /// Everything below is replicated.
    replicated: AtomicU64,
    /// The replica has files of all segments that end at or below.
    released: AtomicU64,
    /// Number of sealed segments beyond `released`.
    unreleased: AtomicU64,
    state: Mutex<ReplicationState>,
    lag: Mutex<ReplicaLag>,
    /// Set if other nodes may take the store over.
    lease: OnceLock<Arc<dyn OwnerLease>>,
    /// Whether another node owns the store.
    has_moved: AtomicBool,
    /// The shipper waits here.
    shipper: Arc<ShipperWatch>,
}

#[derive(Default)]
struct ReplicationState {
    /// Requests whose position is durable and not replicated.
    waiters: Vec<Waiter>,
    /// Durable groups that are not replicated, in order. An entry holds one or several: end, and logs whose readers must wake.
    groups: VecDeque<UnflushedGroup>,
    /// Number of groups that a new entry may hold, less one.
    more: usize,
    /// Number of groups in the last entry.
    in_last: usize,
    stopped: Option<Unreplicated>,
}

/// Wakes the shipper.
#[derive(Default)]
pub(crate) struct ShipperWatch(Watch);

impl Watched for ShipperWatch {
    fn watch(&self) -> &Watch {
        &self.0
    }
}

impl From<Unreplicated> for AppendError {
    fn from(reason: Unreplicated) -> Self {
        match reason {
            Unreplicated::BucketDown => Self::BucketDown,
            Unreplicated::Moved { owner, term } => Self::Moved { owner, term },
        }
    }
}

impl Replication {
    pub(super) fn new(bounds: ReplicaBounds) -> Self {
        Self {
            bounds,
            replicated: AtomicU64::new(0),
            released: AtomicU64::new(0),
            unreleased: AtomicU64::new(0),
            state: Mutex::default(),
            lag: Mutex::default(),
            lease: OnceLock::new(),
            has_moved: AtomicBool::new(false),
            shipper: Arc::default(),
        }
    }

    /// Everything below is replicated.
    pub(crate) fn replicated(&self) -> Position {
        Position::new(self.replicated.load(Ordering::SeqCst))
    }

    /// The replica has files of all segments that end at or below.
    pub(crate) fn released(&self) -> Position {
        Position::new(self.released.load(Ordering::SeqCst))
    }

    /// The refusal of every change, if another node owns the store.
    pub(super) fn moved(&self) -> Option<AppendError> {
        let state = self.state.lock();
        let moved = |reason: &&Unreplicated| matches!(reason, Unreplicated::Moved { .. });
        state
            .stopped
            .as_ref()
            .filter(moved)
            .cloned()
            .map(Into::into)
    }

    /// Sets the lease, unless there is one.
    pub(crate) fn hold_lease(&self, lease: Arc<dyn OwnerLease>) {
        let _ = self.lease.set(lease);
    }

    /// Whether this node may answer although the replica does not confirm it.
    pub(crate) fn may_answer(&self) -> bool {
        let has_moved = self.has_moved.load(Ordering::SeqCst);
        !has_moved && self.lease.get().is_none_or(|lease| lease.holds())
    }

    /// A group with this number of records was written.
    pub(super) fn wrote(&self, group: (Position, Position), records: u64) {
        if records > 0 {
            self.lag.lock().add(group, records);
        }
    }

    /// The watch of the shipper.
    pub(crate) fn shipper(&self) -> &Arc<ShipperWatch> {
        &self.shipper
    }

    /// Why nothing of this level can be done while the replica is in this state, if that is so.
    pub(crate) fn unreachable(&self, level: Durability) -> Option<AppendError> {
        match self.state.lock().stopped.clone() {
            Some(Unreplicated::BucketDown) if level < Durability::Replicated => {}
            Some(reason) => return Some(reason.into()),
            None => {}
        }
        (!self.may_answer()).then_some(AppendError::BucketDown)
    }

    /// Makes an answer an unknown outcome. A refusal did nothing, and stays one.
    pub(super) fn refuse(&self, waiter: &mut Waiter) {
        let stopped = self.state.lock().stopped.clone();
        let stopped = stopped.unwrap_or(Unreplicated::BucketDown);
        waiter.reply.refuse(match waiter.reply.is_refusal() {
            true => stopped.into(),
            false => AppendError::ReplicationUnknown,
        });
    }

    /// Requests and groups that wait for the replica.
    pub(super) fn take_all(&self) -> (Vec<Waiter>, VecDeque<UnflushedGroup>) {
        let mut state = self.state.lock();
        (
            std::mem::take(&mut state.waiters),
            std::mem::take(&mut state.groups),
        )
    }
}

impl ReplicationState {
    fn shown(&self) -> ReplicaState {
        match self.stopped {
            None => ReplicaState::Serving,
            Some(Unreplicated::BucketDown) => ReplicaState::BucketDown,
            Some(Unreplicated::Moved { .. }) => ReplicaState::Fenced,
        }
    }

    /// Adds durable groups, whose readers wake when the replica has them. All entries are about equally large: one for everything
    /// would end later with each group, and its readers would never wake while the replica is a little behind.
    fn add_groups(&mut self, groups: Vec<UnflushedGroup>) {
        for (end, logs) in groups {
            if self.groups.len() < FEW_ENTRIES {
                self.more /= 2;
            }
            match self.groups.back_mut() {
                Some(last) if self.in_last <= self.more => {
                    join(last, (end, logs));
                    self.in_last += 1;
                }
                _ => {
                    if self.groups.len() == MOST_ENTRIES {
                        self.merge_groups();
                    }
                    self.groups.push_back((end, logs));
                    self.in_last = 1;
                }
            }
        }
    }

    /// Merges neighbours, so that half of the entries are free.
    fn merge_groups(&mut self) {
        self.more = self.more * 2 + 1;
        let mut groups = std::mem::take(&mut self.groups).into_iter();
        while let Some(mut first) = groups.next() {
            if let Some(second) = groups.next() {
                join(&mut first, second);
            }
            self.groups.push_back(first);
        }
    }
}

/// Adds the groups of a later entry.
fn join(entry: &mut UnflushedGroup, (end, logs): UnflushedGroup) {
    entry.0 = end;
    entry.1.extend(logs);
    // Both halves are in order already, after the first time: this sort takes them as they are.
    entry.1.sort_by_key(|log| log.id);
    entry.1.dedup_by_key(|log| log.id);
}

impl Journal {
    /// The replication, if the journal has a replica.
    pub(crate) fn replication(&self) -> Option<&Replication> {
        self.replication.as_ref()
    }

    /// Everything below is as safe as this journal makes it: replicated, or durable without a replica. No reader
    /// compares with a lower position, and no loss of the machine takes it back.
    pub(crate) fn settled(&self) -> Position {
        match &self.replication {
            None => self.durable(),
            Some(replication) => replication.replicated(),
        }
    }

    /// Level of a fence, a trim, and of administration.
    pub(crate) fn safest(&self) -> Durability {
        match &self.replication {
            None => Durability::Durable,
            Some(_) => Durability::Replicated,
        }
    }

    /// Everything below this is on the device and visible to readers of this visibility, so trims there show.
    pub(crate) fn trims_seen(&self, visibility: Visibility) -> Position {
        self.published(visibility).min(self.durable())
    }

    /// Keeps requests whose position is durable until it is replicated, and groups until their readers can be woken.
    pub(super) fn await_replica(
        &self,
        replication: &Replication,
        waiters: Vec<Waiter>,
        groups: Vec<UnflushedGroup>,
    ) {
        let (ready, readers) = {
            let mut state = replication.state.lock();
            state.waiters.extend(waiters);
            state.add_groups(groups);
            // The replica may have been faster than this thread.
            self.take_replicated(replication, &mut state)
        };
        self.settle_replicated(replication, ready, &readers);
        // The shipper has new durable bytes, or a request that waits.
        replication.shipper.0.wake();
    }

    /// Publishes that everything below `end` is replicated, and answers the requests that waited for it.
    pub(crate) fn publish_replicated(&self, end: Position) {
        let Some(replication) = &self.replication else {
            return;
        };
        assert!(
            end <= self.durable(),
            "only durable bytes are replicated: {end} is beyond {}",
            self.durable()
        );
        let before = replication
            .replicated
            .fetch_max(end.get(), Ordering::SeqCst);
        if before >= end.get() {
            return;
        }
        replication.lag.lock().forget_below(end);
        self.waiting.lock().apply_trims(end);
        let (ready, readers) = {
            let mut state = replication.state.lock();
            self.take_replicated(replication, &mut state)
        };
        self.settle_replicated(replication, ready, &readers);
    }

    /// Takes requests and groups that the replica has now. Takes all requests if nothing is replicated any more.
    fn take_replicated(
        &self,
        replication: &Replication,
        state: &mut ReplicationState,
    ) -> (Vec<Waiter>, Vec<UnflushedGroup>) {
        let replicated = replication.replicated();
        let all = state.stopped.is_some() || self.failure().is_some();
        let ready = state
            .waiters
            .extract_if(.., |waiter| all || waiter.need <= replicated)
            .collect();
        let count = state.groups.partition_point(|(end, _)| *end <= replicated);
        (ready, state.groups.drain(..count).collect())
    }

    fn settle_replicated(
        &self,
        replication: &Replication,
        ready: Vec<Waiter>,
        readers: &[UnflushedGroup],
    ) {
        let now = self.clock.monotonic();
        for mut waiter in ready {
            if waiter.need > replication.replicated() {
                self.answer_unreplicated(replication, waiter);
                continue;
            }
            let took = now.saturating_duration_since(waiter.since);
            waiter.times.replicate = took;
            self.observer
                .phase(AppendPhase::Replicate, took, waiter.requests);
            self.answer_anyway(waiter, Durability::Replicated);
        }
        for (_, logs) in readers {
            self.wake_at(Visibility::Replicated, logs);
        }
    }

    /// Answers a request that the replica will not confirm. A refusal did nothing. Anything else is durable here, and
    /// may or may not survive the loss of this machine.
    fn answer_unreplicated(&self, replication: &Replication, mut waiter: Waiter) {
        if self.failure().is_some() {
            return self.answer_failed(waiter);
        }
        replication.refuse(&mut waiter);
        self.answer_anyway(waiter, Durability::Durable);
    }

    /// Ends replication, for now or for good. Every request that waits is answered.
    pub(crate) fn stop_replication(&self, reason: Unreplicated) {
        let Some(replication) = &self.replication else {
            return;
        };
        let (ready, readers) = {
            let mut state = replication.state.lock();
            if matches!(reason, Unreplicated::Moved { .. }) {
                replication.has_moved.store(true, Ordering::SeqCst);
            }
            // A store that moved does not come back to this process.
            if !matches!(state.stopped, Some(Unreplicated::Moved { .. })) {
                state.stopped = Some(reason);
            }
            self.take_replicated(replication, &mut state)
        };
        self.settle_replicated(replication, ready, &readers);
        replication.shipper.0.wake();
    }

    /// The bucket is reachable again.
    pub(crate) fn resume_replication(&self) {
        let Some(replication) = &self.replication else {
            return;
        };
        let mut state = replication.state.lock();
        state
            .stopped
            .take_if(|reason| *reason == Unreplicated::BucketDown);
    }

    /// Notes that the replica has files of all segments that end at or below `end`.
    pub(crate) fn release(&self, end: Position) {
        if let Some(replication) = &self.replication {
            replication.released.fetch_max(end.get(), Ordering::SeqCst);
            self.count_unreleased();
        }
    }

    /// Whether a sealed segment may be sorted and recycled.
    pub(crate) fn is_released(&self, segment: &Segment) -> bool {
        let has_file = |replication: &Replication| {
            let end = *segment.end.read();
            end.is_some_and(|end| end <= replication.released())
        };
        self.replication.as_ref().is_none_or(has_file)
    }

    /// The refusal of an append because the replica is too far behind, if it is.
    pub(crate) fn replica_is_behind(&self) -> Option<AppendError> {
        let replication = self.replication.as_ref()?;
        let (replicated, durable) = (replication.replicated(), self.durable());
        let limit = replication.bounds.max_lag;
        let mut behind = durable.since(replicated.min(durable));
        // No append of a replica that keeps up looks at the segments.
        if behind > limit && behind <= MAX_REPLICA_LAG {
            behind = self.used_between(replicated, durable);
        }
        let segments = replication.unreleased.load(Ordering::SeqCst);
        let too_far = behind > limit || segments > MOST_UNRELEASED;
        too_far.then_some(AppendError::ReplicaBehind {
            behind,
            limit,
            segments,
        })
    }

    /// Bytes between two positions, without the rest of each segment that the journal has left.
    fn used_between(&self, from: Position, to: Position) -> u64 {
        let from = from.min(to);
        let mut used = to.since(from);
        let segments = self.segments.read();
        let holding = segments.range(..=from).next_back();
        let behind = segments.range(from..to).filter(|(base, _)| **base > from);
        for segment in holding.into_iter().chain(behind).map(|(_, found)| found) {
            let (end, limit) = (*segment.end.read(), segment.limit().min(to));
            if let Some(end) = end {
                used = used.saturating_sub(limit.since(end.max(from).min(limit)));
            }
        }
        used
    }

    /// Counts the sealed segments that wait for their release.
    pub(super) fn count_unreleased(&self) {
        let Some(replication) = &self.replication else {
            return;
        };
        let current = self.current().base;
        let segments = self.segments.read();
        let released = replication.released();
        let sealed = segments.values().rev().filter(|s| s.base != current);
        let unreleased =
            |segment: &&Arc<Segment>| segment.end.read().is_none_or(|end| end > released);
        let waiting = sealed.take_while(unreleased);
        replication
            .unreleased
            .store(waiting.count() as u64, Ordering::SeqCst);
    }

    /// The state of the replica, if there is one.
    pub(crate) fn replica_progress(&self) -> ReplicaProgress {
        let Some(replication) = &self.replication else {
            return ReplicaProgress::default();
        };
        let (waiting, state) = {
            let state = replication.state.lock();
            (state.waiters.len(), state.shown())
        };
        let (replicated, durable) = (replication.replicated(), self.durable());
        ReplicaProgress {
            replicated,
            durable,
            behind: self.used_between(replicated, durable),
            released: replication.released(),
            waiting,
            unreleased: replication.unreleased.load(Ordering::SeqCst),
            state,
            ended: self.failure().is_some() || state == ReplicaState::Fenced,
        }
    }

    /// Number of records that are durable and not replicated, as [`Replica::lag_records`](crate::Replica::lag_records)
    /// has it. 0 without a replica.
    pub(crate) fn lag_records(&self) -> u64 {
        let durable = self.durable();
        let replication = self.replication.as_ref();
        replication.map_or(0, |replication| replication.lag.lock().below(durable))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_waiting_groups_have_a_bound_and_are_equally_large() {
        let at = |group: u64| Position::new(group * 64);
        let mut state = ReplicationState::default();
        let (mut added, mut replicated) = (0, 0);
        // The replica is always this number of groups behind.
        for behind in [10, 100, 5_000, 100_000, 3] {
            for _ in 0..3 * behind + 2_000 {
                added += 1;
                state.add_groups(vec![(at(added), Vec::new())]);
                assert!(state.groups.len() <= MOST_ENTRIES);
                replicated = replicated.max(added.saturating_sub(behind));
                let woken = state
                    .groups
                    .partition_point(|(end, _)| *end <= at(replicated));
                state.groups.drain(..woken);
            }
            let first = state.groups.front().unwrap().0;
            let late = first.since(at(replicated)) / 64;
            assert!(late <= 1 + behind / 16, "{late} of {behind}");
        }
    }
}
