//! The nodes of a store, and which of them live.
//!
//! ```text
//! node      beat ─ ttl/3 ─ beat ─ ttl/3 ─ (dies)     its lease holds until its last beat + 4/5 ttl
//! other          sees the same version for ttl ──────────────▶ swaps it to `dead`: the next beat of the node fails
//! ```
//!
//! Each node measures with its own clock, and nobody compares clocks of two machines. A beat counts from its begin, and
//! others count from the moment at which they have seen it, so that the lease ends ttl/5 before another node may act.
//! The lease protects answers that the bucket does not confirm. The term of the tail protects the rest.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use wald_storage::OwnerLease;

use super::ShipSource;
use crate::beat::{BeatProgress, Beating, Beats, boottime};
use crate::bucket::Bucket;
use crate::error::{BucketError, BucketErrorKind};
use crate::record::{BucketRecord, random};

/// Directory of the records.
const NODES: &str = "nodes";
/// Maximum number of nodes of a store that are looked at: those that have written last. Operators run two or three.
const MOST_NODES: usize = 64;
/// Time without a beat after which the owner removes the record of a node that has ended. A name that never comes back, as of a
/// pod, does not fill the directory.
const FORGET_AFTER: Duration = Duration::from_secs(3600);
/// Maximum number of records that one pass changes or removes.
const FORGOTTEN_AT_ONCE: usize = 8;

/// State of a node, as it says itself, except for `Dead`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// It has no current copy of the store yet.
    Joining,
    /// It has a current copy, and may take the store over.
    StandBy,
    /// It owns the store, or opens it.
    Owner,
    /// It has ended.
    Left,
    /// Another node has seen no beat of it for its ttl.
    Dead,
}

/// The record of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Different for each process.
    pub incarnation: String,
    /// The address for clients; empty if it is unknown.
    pub endpoint: String,
    /// Counts up, so that each beat is another version.
    pub beat: u64,
    /// Time without a beat after which it is dead, in milliseconds.
    pub ttl_ms: u64,
    /// Its state.
    pub state: NodeState,
    /// Position of the journal below which the bucket has everything, if the node is the owner; 0: unknown.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub replicated: u64,
}

#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
pub(super) fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl NodeRecord {
    pub(super) fn ttl(&self) -> Duration {
        Duration::from_millis(self.ttl_ms)
    }
}

impl Beating for NodeRecord {
    /// A dead node does not come back: it begins again, with another incarnation.
    fn is_by_writer_of(&self, other: &Self) -> bool {
        self.incarnation == other.incarnation && other.state != NodeState::Dead
    }
}

/// This process among the nodes. Its record stays when it is dropped, until others see that it is dead.
pub struct Membership {
    bucket: Bucket,
    path: String,
    incarnation: String,
    state: watch::Sender<NodeState>,
    source: Arc<OnceLock<Weak<dyn ShipSource>>>,
    lease: Arc<NodeLease>,
    pause: Duration,
    beats: JoinHandle<()>,
}

/// The lease of a node: it holds as long as no other node can have seen the death of this one.
pub struct NodeLease {
    progress: watch::Receiver<BeatProgress>,
    /// Time for which a beat is good.
    good: Duration,
    clock: fn() -> Duration,
    /// Whether a node is named that may take the store over.
    named: AtomicBool,
}

impl NodeLease {
    /// Time since the last beat that succeeded began.
    pub fn age(&self) -> Duration {
        (self.clock)().saturating_sub(self.progress.borrow().began)
    }

    /// Notes whether a node is named that may take the store over. Call with `true` before the record names it, and with `false`
    /// once the record names none.
    pub(super) fn set_named(&self, named: bool) {
        self.named.store(named, Ordering::SeqCst);
    }
}

impl OwnerLease for NodeLease {
    fn holds(&self) -> bool {
        if !self.named.load(Ordering::SeqCst) {
            return true;
        }
        let lost = self.progress.borrow().lost;
        !lost && self.age() < self.good
    }
}

impl Membership {
    /// Joins the nodes of a store. A record of an earlier process with this name is replaced, and that process ends.
    ///
    /// # Errors
    /// If the bucket fails.
    pub async fn join(
        bucket: &Bucket,
        name: &str,
        endpoint: &str,
        ttl: Duration,
    ) -> Result<Self, BucketError> {
        Self::join_by(bucket, name, endpoint, ttl, boottime).await
    }

    pub(super) async fn join_by(
        bucket: &Bucket,
        name: &str,
        endpoint: &str,
        ttl: Duration,
        clock: fn() -> Duration,
    ) -> Result<Self, BucketError> {
        let path = format!("{NODES}/{name}");
        let mine = NodeRecord {
            incarnation: random(bucket.place())?,
            endpoint: endpoint.to_owned(),
            beat: 0,
            ttl_ms: u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX),
            state: NodeState::Joining,
            replicated: 0,
        };
        let (record, began) = loop {
            let began = clock();
            let found = BucketRecord::<NodeRecord>::read(bucket, &path).await?;
            let written = match found {
                None => BucketRecord::create(bucket, &path, mine.clone()).await?,
                Some(found) => found.swap(bucket, &path, mine.clone()).await?,
            };
            if let Some(record) = written {
                break (record, began);
            }
        };
        let (progress, seen) = watch::channel(BeatProgress { began, lost: false });
        let (state, states) = watch::channel(NodeState::Joining);
        let shown = states.clone();
        let beats = Beats {
            bucket: bucket.clone(),
            path: path.clone(),
            record,
            pause: ttl / 3,
            clock,
            progress,
        };
        let source: Arc<OnceLock<Weak<dyn ShipSource>>> = Arc::default();
        let shipped = Arc::clone(&source);
        let next = move |record: &mut NodeRecord| {
            record.beat += 1;
            record.state = *shown.borrow();
            let source = shipped.get().and_then(Weak::upgrade);
            let replicated = source.map(|source| source.progress().replicated.get());
            record.replicated = replicated.unwrap_or(0);
        };
        Ok(Self {
            bucket: bucket.clone(),
            path,
            incarnation: mine.incarnation,
            state,
            source,
            lease: Arc::new(NodeLease {
                progress: seen,
                good: ttl * 4 / 5,
                clock,
                named: AtomicBool::new(false),
            }),
            pause: ttl / 3,
            beats: tokio::spawn(beats.run(next, states)),
        })
    }

    pub(super) fn bucket(&self) -> &Bucket {
        &self.bucket
    }

    /// Time between two beats.
    pub(super) fn beat_pause(&self) -> Duration {
        self.pause
    }

    /// Shows a state from now on. The next beat comes at once.
    pub fn enter(&self, state: NodeState) {
        self.state.send_if_modified(|now| {
            let changed = *now != state;
            *now = state;
            changed
        });
    }

    /// Shows the replicated position of this engine in each beat.
    pub(super) fn show_position(&self, source: &Arc<dyn ShipSource>) {
        let _ = self.source.set(Arc::downgrade(source));
    }

    /// Identity of this process among the nodes.
    pub fn incarnation(&self) -> &str {
        &self.incarnation
    }

    /// The lease of this node.
    pub fn lease(&self) -> &Arc<NodeLease> {
        &self.lease
    }

    /// Whether another process has replaced the record, or has declared this node dead, as far as a beat has shown.
    pub fn is_lost(&self) -> bool {
        self.lease.progress.borrow().lost
    }

    /// The record of another process that has joined with the name of this one, if there is one.
    ///
    /// # Errors
    /// If the bucket fails.
    pub async fn replaced_by(&self) -> Result<Option<NodeRecord>, BucketError> {
        let found = BucketRecord::<NodeRecord>::read(&self.bucket, &self.path).await?;
        let is_other = |record: &NodeRecord| record.incarnation != self.incarnation;
        Ok(found.map(|found| found.value).filter(is_other))
    }

    /// Resolves when another process has replaced the record, or has declared this node dead.
    pub async fn lost(&self) {
        let mut progress = self.lease.progress.clone();
        if progress.wait_for(|progress| progress.lost).await.is_err() {
            std::future::pending().await
        }
    }

    /// Shows that the node has ended, so that nobody waits for it.
    ///
    /// # Errors
    /// If the bucket fails. Others then wait for the ttl.
    pub async fn leave(self) -> Result<(), BucketError> {
        self.beats.abort();
        // A beat may have ended after its task was stopped, so the version is read again.
        let is_own = |record: &NodeRecord| record.incarnation == self.incarnation;
        let leave = |record: &mut NodeRecord| record.state = NodeState::Left;
        BucketRecord::change(&self.bucket, &self.path, is_own, leave).await
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.beats.abort();
    }
}

/// A node, as this process sees it.
#[derive(Debug, Clone)]
pub struct SeenNode {
    /// Its name.
    pub name: String,
    /// Its record.
    pub record: NodeRecord,
    /// Time for which this process has seen the same version, by its own clock.
    pub unchanged: Duration,
}

impl NodeState {
    fn has_ended(self) -> bool {
        matches!(self, Self::Left | Self::Dead)
    }
}

impl SeenNode {
    /// Whether it beats, as far as this process can know.
    pub fn is_alive(&self) -> bool {
        !self.record.state.has_ended() && self.unchanged < self.record.ttl()
    }
}

/// Looks at the nodes of a store again and again.
pub struct NodeWatch {
    bucket: Bucket,
    /// Time from one look to the next.
    pause: Duration,
    clock: fn() -> Duration,
    /// End of the last look that succeeded.
    looked: Option<Duration>,
    /// The newest version of each, and the time at which it was seen first.
    seen: HashMap<String, (BucketRecord<NodeRecord>, Duration)>,
    /// Why a record could not be read at the last look.
    unread: Option<BucketError>,
}

impl NodeWatch {
    /// A watch that has seen nothing yet, and looks once in each `pause`.
    pub fn new(bucket: &Bucket, pause: Duration) -> Self {
        Self::by(bucket, pause, boottime)
    }

    pub(super) fn by(bucket: &Bucket, pause: Duration, clock: fn() -> Duration) -> Self {
        Self {
            bucket: bucket.clone(),
            pause,
            clock,
            looked: None,
            seen: HashMap::new(),
            unread: None,
        }
    }

    /// Forgets how long the nodes have been silent if this process could not see them: it has slept, or the bucket gave no
    /// answer. The nodes may have been in the same trouble.
    fn forget_blind_time(&mut self) {
        let now = (self.clock)();
        let is_blind = |looked: Duration| now.saturating_sub(looked) > 2 * self.pause;
        if self.looked.is_some_and(is_blind) {
            for (_, since) in self.seen.values_mut() {
                *since = now;
            }
        }
        self.looked = Some(now);
    }

    /// The nodes now, by name; 64 at most: those whose records were written last. A record that this version cannot read is
    /// left out: see [`NodeWatch::unread`].
    ///
    /// # Errors
    /// If the bucket fails. The nodes of the last look are still known then.
    pub async fn look(&mut self) -> Result<Vec<SeenNode>, BucketError> {
        let mut listed = self.bucket.list(NODES).await?;
        // Nodes that beat come before those that have ended. The clock of the bucket decides nothing else.
        listed.sort_by_key(|entry| std::cmp::Reverse(entry.written_us));
        listed.truncate(MOST_NODES);
        let mut names: Vec<String> = listed.into_iter().map(|entry| entry.name).collect();
        names.sort_unstable();
        self.seen.retain(|name, _| names.contains(name));
        self.unread = None;
        for name in &names {
            match self.look_at(name).await {
                // A newer version may have written it. The other nodes must still follow each other.
                Err(error) if error.kind() == BucketErrorKind::Damaged => {
                    self.seen.remove(name);
                    self.unread = Some(error);
                }
                looked => looked?,
            }
        }
        self.forget_blind_time();
        let now = (self.clock)();
        let seen = self.seen.iter().map(|(name, (record, since))| SeenNode {
            name: name.clone(),
            record: record.value.clone(),
            unchanged: now.saturating_sub(*since),
        });
        let mut nodes: Vec<SeenNode> = seen.collect();
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(nodes)
    }

    /// Why a record could not be read at the last look. The look left it out.
    pub(super) fn unread(&self) -> Option<&BucketError> {
        self.unread.as_ref()
    }

    async fn look_at(&mut self, name: &str) -> Result<(), BucketError> {
        let path = format!("{NODES}/{name}");
        let Some(found) = BucketRecord::<NodeRecord>::read(&self.bucket, &path).await? else {
            self.seen.remove(name);
            return Ok(());
        };
        let now = (self.clock)();
        match self.seen.get(name) {
            Some((seen, _)) if seen.is_same_version(&found) => {}
            _ => drop(self.seen.insert(name.to_owned(), (found, now))),
        }
        Ok(())
    }

    /// Declares a node dead whose beats have stopped for its ttl. Returns whether it has ended: it is dead now, or was
    /// before, or has left. A node that beats in the meantime stays alive.
    ///
    /// # Errors
    /// If the bucket fails.
    pub async fn bury(&mut self, name: &str) -> Result<bool, BucketError> {
        // A process that has slept looks again before it judges.
        self.look_at(name).await?;
        self.forget_blind_time();
        let Some((record, since)) = self.seen.get(name) else {
            return Ok(false);
        };
        if record.value.state.has_ended() {
            return Ok(true);
        }
        if (self.clock)().saturating_sub(*since) < record.value.ttl() {
            return Ok(false);
        }
        let dead = NodeRecord {
            state: NodeState::Dead,
            ..record.value.clone()
        };
        let path = format!("{NODES}/{name}");
        Ok(record.swap(&self.bucket, &path, dead).await?.is_some())
    }

    /// Removes the records of nodes that have ended, and have not changed for an hour. Declares nodes dead that are silent
    /// for so long. `own`: the name of this node, which stays. A process that joins with such a name at the same moment may lose
    /// its record: buckets have no conditional removal. Its next beat shows it, and it joins again.
    ///
    /// # Errors
    /// If the bucket fails.
    pub async fn tidy(&mut self, own: &str) -> Result<(), BucketError> {
        let old = self.seen.keys().filter(|name| *name != own);
        let old = old.filter(|name| self.is_old(name)).take(FORGOTTEN_AT_ONCE);
        let old: Vec<String> = old.cloned().collect();
        for name in &old {
            let has_ended = |seen: &Self| {
                let record = seen.seen.get(name).map(|(record, _)| &record.value);
                record.is_some_and(|record| record.state.has_ended())
            };
            let had_ended = has_ended(self);
            // Looks again.
            self.bury(name).await?;
            if had_ended && has_ended(self) && self.is_old(name) {
                self.bucket.remove(&[format!("{NODES}/{name}")]).await?;
                self.seen.remove(name);
            }
        }
        Ok(())
    }

    fn is_old(&self, name: &str) -> bool {
        let now = (self.clock)();
        self.seen.get(name).is_some_and(|(record, since)| {
            now.saturating_sub(*since) >= FORGET_AFTER.max(record.value.ttl())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::{StoreFault, faulty, paused_clock};

    const TTL: Duration = Duration::from_secs(30);

    async fn join(bucket: &Bucket, name: &str) -> Membership {
        let endpoint = format!("{name}:6925");
        Membership::join_by(bucket, name, &endpoint, TTL, paused_clock)
            .await
            .unwrap()
    }

    async fn sleep(time: Duration) {
        tokio::time::sleep(time).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_beats_is_alive_and_others_see_its_state() {
        paused_clock();
        let (bucket, faults, _) = faulty();
        let a = join(&bucket, "a").await;
        let mut watch = NodeWatch::by(&bucket, TTL / 6, paused_clock);
        watch.look().await.unwrap();
        a.enter(NodeState::StandBy);
        // Beats whose answers are lost, or that fail once, kill nobody.
        for _ in 0..10 {
            faults.next_puts([StoreFault::AnswerLost, StoreFault::Unavailable]);
            sleep(TTL * 2 / 3).await;
            let seen = watch.look().await.unwrap();
            assert!(seen[0].is_alive() && seen[0].record.state == NodeState::StandBy);
            assert!(!watch.bury("a").await.unwrap());
        }
        a.lease().set_named(true);
        assert!(a.lease().holds());
        a.leave().await.unwrap();
        let seen = watch.look().await.unwrap();
        assert!(!seen[0].is_alive() && watch.bury("a").await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_that_nobody_can_read_hides_no_other_node() {
        paused_clock();
        let (bucket, _, _) = faulty();
        let _nodes = (join(&bucket, "a").await, join(&bucket, "c").await);
        bucket.put("nodes/b", "{".into()).await.unwrap();
        let mut watch = NodeWatch::by(&bucket, TTL / 6, paused_clock);
        let seen = watch.look().await.unwrap();
        let names: Vec<&str> = seen.iter().map(|node| &*node.name).collect();
        assert_eq!(names, ["a", "c"]);
        let unread = watch.unread().unwrap().to_string();
        assert!(unread.contains("nodes/b is no record"), "{unread}");
        bucket.remove(&["nodes/b".to_owned()]).await.unwrap();
        watch.look().await.unwrap();
        assert!(watch.unread().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_ends_before_another_node_may_act() {
        paused_clock();
        let (bucket, _, _) = faulty();
        let a = join(&bucket, "a").await;
        let lease = Arc::clone(a.lease());
        lease.set_named(true);
        let mut watch = NodeWatch::by(&bucket, TTL / 6, paused_clock);
        sleep(TTL / 3 + TTL / 100).await;
        watch.look().await.unwrap();
        // The process dies, or its machine is cut off.
        drop(a);
        let (began, mut lease_ended) = (paused_clock(), None);
        let buried = loop {
            sleep(TTL / 50).await;
            if lease_ended.is_none() && !lease.holds() {
                lease_ended = Some(paused_clock());
            }
            if watch.bury("a").await.unwrap() {
                break paused_clock();
            }
        };
        assert!(buried - lease_ended.unwrap() >= TTL / 6);
        assert!(buried - began >= TTL && buried - began < TTL + TTL / 10);
        // Without a stand-by that is named, nobody takes over.
        lease.set_named(false);
        assert!(lease.holds());
    }

    #[tokio::test(start_paused = true)]
    async fn a_dead_node_hears_it_with_its_next_beat() {
        paused_clock();
        let (bucket, faults, _) = faulty();
        let a = join(&bucket, "a").await;
        a.lease().set_named(true);
        let mut watch = NodeWatch::by(&bucket, TTL / 6, paused_clock);
        watch.look().await.unwrap();
        // It lives, but its beats do not arrive.
        faults.next_puts([StoreFault::Unavailable; 100]);
        for _ in 0..8 {
            sleep(TTL / 6).await;
            watch.look().await.unwrap();
        }
        assert!(!a.lease().holds());
        faults.puts.lock().unwrap().clear();
        assert!(watch.bury("a").await.unwrap());
        let lost = tokio::time::timeout(TTL, a.lost()).await;
        lost.expect("the next beat says so");
        // It comes back as another incarnation, and the first one does not follow it.
        let again = join(&bucket, "a").await;
        again.enter(NodeState::StandBy);
        sleep(TTL).await;
        assert!(watch.look().await.unwrap()[0].is_alive());
        a.leave().await.unwrap();
        assert!(watch.look().await.unwrap()[0].is_alive());
    }

    #[tokio::test(start_paused = true)]
    async fn an_observer_that_has_slept_looks_again_before_it_judges() {
        paused_clock();
        let (bucket, _, _) = faulty();
        let a = join(&bucket, "a").await;
        let mut watch = NodeWatch::by(&bucket, TTL / 6, paused_clock);
        watch.look().await.unwrap();
        sleep(10 * TTL).await;
        assert!(!watch.bury("a").await.unwrap());
        assert!(!watch.bury("unknown").await.unwrap());
        assert!(a.lease().age() < TTL / 2);
    }

    #[tokio::test(start_paused = true)]
    async fn many_nodes_that_have_ended_hide_none_and_are_removed_later() {
        paused_clock();
        let (bucket, _, _) = faulty();
        let names = (0..MOST_NODES + 6).map(|number| format!("pod-{number:02}"));
        for name in names {
            join(&bucket, &name).await.leave().await.unwrap();
        }
        // It dies without a word.
        drop(join(&bucket, "silent").await);
        let own = join(&bucket, "z").await;
        let mut watch = NodeWatch::by(&bucket, TTL, paused_clock);
        let count = async || bucket.list(NODES).await.unwrap().len();
        let before = count().await;
        // The clock of the bucket goes on by itself.
        std::thread::sleep(Duration::from_millis(20));
        sleep(TTL / 2).await;
        let seen = watch.look().await.unwrap();
        assert!(seen.iter().any(|node| node.name == "z" && node.is_alive()));
        let mut look = async |time: Duration| {
            let until = paused_clock() + time;
            while paused_clock() < until {
                sleep(TTL).await;
                watch.look().await.unwrap();
                watch.tidy("z").await.unwrap();
            }
        };
        look(FORGET_AFTER - 2 * TTL).await;
        assert_eq!(count().await, before);
        look(12 * TTL).await;
        // Those that were seen for an hour are gone. A node that was silent is dead now.
        assert!(count().await <= before - (MOST_NODES - 2));
        let silent = BucketRecord::<NodeRecord>::read(&bucket, "nodes/silent").await;
        let silent = silent.unwrap().unwrap();
        assert_eq!(silent.value.state, NodeState::Dead);
        look(2 * FORGET_AFTER).await;
        assert_eq!(count().await, 1);
        assert!(!own.is_lost());
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_knows_that_another_one_has_its_name() {
        paused_clock();
        let (bucket, _, _) = faulty();
        let first = join(&bucket, "a").await;
        assert_eq!(first.replaced_by().await.unwrap(), None);
        let second = Membership::join_by(&bucket, "a", "elsewhere:1", TTL, paused_clock);
        let second = second.await.unwrap();
        tokio::time::timeout(TTL, first.lost()).await.unwrap();
        let other = first.replaced_by().await.unwrap().unwrap();
        assert_eq!(other.endpoint, "elsewhere:1");
        assert!(first.is_lost() && !second.is_lost());
        assert_eq!(second.replaced_by().await.unwrap(), None);
    }
}
