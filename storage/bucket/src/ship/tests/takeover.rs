//! Nodes that wait for the store, and owners that die, sleep, or hand it over.

use super::*;
use crate::faults::paused_clock;

const TTL: Duration = Duration::from_secs(10);

/// A node that owns the store, and its engine.
struct OwnerNode {
    engine: Arc<LocalEngine>,
    /// Ends with the process.
    _membership: Arc<Membership>,
    stop: watch::Sender<bool>,
    ends: watch::Sender<bool>,
    runs: JoinHandle<ShipEnd>,
    _machine: TempDir,
}

/// A node that waits for the store.
struct Waiting {
    name: String,
    membership: Membership,
    watch: StandByWatch,
}

async fn join(remote: &Remote, name: &str) -> Membership {
    let endpoint = format!("{name}:6925");
    Membership::join_by(&remote.bucket, name, &endpoint, TTL, paused_clock)
        .await
        .unwrap()
}

/// Starts an owner in an empty bucket.
async fn owner(remote: &Remote, name: &str) -> OwnerNode {
    let membership = Arc::new(join(remote, name).await);
    owner_as(remote, name, membership).await
}

async fn owner_as(remote: &Remote, name: &str, membership: Arc<Membership>) -> OwnerNode {
    let machine = tempfile::tempdir().unwrap();
    let engine = open(machine.path(), config(true));
    let mut parts = parts(remote, Arc::clone(&engine), None);
    parts.claim.node = name.to_owned();
    parts.claim.process = membership.incarnation().to_owned();
    parts.membership = Some(Arc::clone(&membership));
    let owner = ReplicaOwner::begin(parts, None).await.unwrap();
    let (stop, stopped) = watch::channel(false);
    let (ends, announced) = watch::channel(false);
    OwnerNode {
        engine,
        _membership: membership,
        stop,
        ends,
        runs: tokio::spawn(owner.run(stopped, announced)),
        _machine: machine,
    }
}

impl OwnerNode {
    async fn append(&self, number: usize, level: Durability) -> Result<Durability, AppendError> {
        append(&self.engine, data(number, 100), level).await
    }

    /// The paused clock waits for the engine's threads: a busy machine lets no lease end meanwhile.
    async fn append_durable(&self, number: usize) -> Result<Durability, AppendError> {
        let engine = Arc::clone(&self.engine);
        let appended = move || block_on(append(&engine, data(number, 100), Durability::Durable));
        tokio::task::spawn_blocking(appended).await.unwrap()
    }

    /// The process is killed: no beat, and no PUT.
    async fn kill(self) {
        self.runs.abort();
        let _ = self.runs.await;
    }
}

/// A claim of this node by this process, which owns and takes nothing yet.
fn claim(node: &str, process: &str) -> OwnerClaim {
    OwnerClaim {
        node: node.to_owned(),
        endpoint: String::new(),
        kept_term: None,
        take_over: None,
        inherits: None,
        process: process.to_owned(),
    }
}

impl Waiting {
    async fn new(remote: &Remote, name: &str) -> Self {
        let membership = join(remote, name).await;
        membership.enter(NodeState::StandBy);
        Self {
            name: name.to_owned(),
            membership,
            watch: StandByWatch::by(&remote.bucket, name, TTL, paused_clock),
        }
    }

    /// Looks twice a second until it may claim, or for a time at most.
    async fn claims(&mut self, most: Duration) -> Option<Option<u64>> {
        let until = Instant::now() + most;
        while Instant::now() < until {
            if let Ok(StandByTurn::Claim(_, inherits)) = self.watch.look().await {
                return Some(inherits);
            }
            sleep(Duration::from_millis(500)).await;
        }
        None
    }

    async fn take(&self, remote: &Remote, inherits: Option<u64>) -> Result<u64, OwnerError> {
        let claim = OwnerClaim {
            inherits,
            ..claim(&self.name, self.membership.incarnation())
        };
        let fenced = ReplicaOwner::fence(&remote.bucket, &claim).await;
        fenced.map(|fenced| fenced.term())
    }
}

async fn record(remote: &Remote) -> OwnerRecord {
    let found = OwnerRecord::read(&remote.bucket).await.unwrap();
    found.unwrap().value
}

async fn until_named(remote: &Remote, names: &[&str]) {
    until("the record names the stand-bys", async || {
        record(remote).await.stand_bys == names
    })
    .await;
}

/// Waits for a condition that asks the bucket.
async fn until(what: &str, holds: impl AsyncFn() -> bool) {
    let from = Instant::now();
    while !holds().await {
        sleep(Duration::from_millis(100)).await;
        assert!(from.elapsed() < Duration::from_secs(600), "never: {what}");
    }
}

#[tokio::test(start_paused = true)]
async fn announced_end_is_in_the_record_while_the_owner_serves() {
    paused_clock();
    let remote = remote();
    let a = owner(&remote, "a").await;
    let mut b = Waiting::new(&remote, "b").await;
    until_named(&remote, &["b"]).await;
    let began = Instant::now();
    a.ends.send(true).unwrap();
    until("the record shows it", async || record(&remote).await.ends).await;
    assert!(began.elapsed() <= Duration::from_millis(200));
    assert_eq!(record(&remote).await.state, OwnerState::Serving);
    a.append(0, Durability::Replicated).await.unwrap();
    assert_eq!(b.claims(2 * TTL).await, None, "the owner serves");
    a.stop.send(true).unwrap();
    assert!(matches!(a.runs.await.unwrap(), ShipEnd::Shipped));
    assert_eq!(b.claims(TTL).await, Some(None));
    b.take(&remote, None).await.unwrap();
    assert!(!record(&remote).await.ends);
}

#[tokio::test(start_paused = true)]
async fn starts_are_counted_until_one_of_them_has_served_for_a_ttl() {
    paused_clock();
    let remote = remote();
    let membership = Arc::new(join(&remote, "a").await);
    let reserved = claim("a", membership.incarnation());
    assert!(reserved.reserve(&remote.bucket).await.unwrap());
    let found = OwnerRecord::read(&remote.bucket).await.unwrap().unwrap();
    let third = OwnerRecord {
        starts: 2,
        ..found.value.clone()
    };
    let written = third.write(&remote.bucket, Some(&found)).await.unwrap();
    assert!(written.is_some());
    let began = Instant::now();
    let a = owner_as(&remote, "a", membership).await;
    assert_eq!(record(&remote).await.starts, 2, "it may die at once");
    until("the start counts as a good one", async || {
        record(&remote).await.starts == 0
    })
    .await;
    assert!(began.elapsed() >= TTL);
    a.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_named_stand_by_follows_an_owner_that_died_and_nobody_else_does() {
    paused_clock();
    let remote = remote();
    let a = owner(&remote, "a").await;
    let mut b = Waiting::new(&remote, "b").await;
    until_named(&remote, &["b"]).await;
    // This one is not caught up, so the owner does not name it.
    let c = join(&remote, "c").await;
    let mut c = Waiting {
        name: "c".to_owned(),
        membership: c,
        watch: StandByWatch::by(&remote.bucket, "c", TTL, paused_clock),
    };
    for number in 0..20 {
        a.append(number, Durability::Replicated).await.unwrap();
    }
    assert_eq!(b.claims(3 * TTL).await, None, "the owner lives");
    let died = Instant::now();
    a.kill().await;
    assert_eq!(b.claims(3 * TTL).await, Some(Some(1)));
    assert!(died.elapsed() <= TTL + Duration::from_secs(2));
    assert_eq!(c.claims(3 * TTL).await, None);
    let refused = c.take(&remote, Some(1)).await.unwrap_err();
    assert!(matches!(refused, OwnerError::Owned { .. }), "{refused}");
    assert_eq!(b.take(&remote, Some(1)).await.unwrap(), 2);
    assert_eq!(remote.restored().await, numbered(20, 100));
    // A second contender comes too late.
    let refused = c.take(&remote, Some(1)).await.unwrap_err();
    assert!(matches!(refused, OwnerError::Owned { .. }), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_is_cut_off_stops_to_answer_before_another_node_begins() {
    paused_clock();
    let inner = Arc::default();
    let (remote, others) = (remote_over(Arc::clone(&inner)), remote_over(inner));
    let a = owner(&remote, "a").await;
    let mut b = Waiting::new(&others, "b").await;
    until_named(&others, &["b"]).await;
    a.append(0, Durability::Replicated).await.unwrap();
    assert_eq!(b.claims(TTL / 2).await, None);
    // The network between the owner and the bucket is cut. The owner lives.
    remote.faults.next_puts([StoreFault::Unavailable; 100_000]);
    let (mut acks, cut) = (0, Instant::now());
    let begins = loop {
        acks += usize::from(a.append_durable(1).await.is_ok());
        if let Some(inherits) = b.claims(Duration::from_millis(500)).await {
            break inherits;
        }
        assert!(cut.elapsed() < 3 * TTL);
    };
    assert_eq!(begins, Some(1));
    assert!(acks > 0, "a short cut refuses nothing");
    let refused = a.append_durable(2).await.unwrap_err();
    assert!(matches!(refused, AppendError::BucketDown), "{refused}");
    assert_eq!(b.take(&others, begins).await.unwrap(), 2);
    // The network is back: the old owner ends, and names the new one.
    remote.faults.puts.lock().unwrap().clear();
    let end = a.runs.await.unwrap();
    let ShipEnd::Fenced { owner: Some(owner) } = end else {
        panic!("{end:?}");
    };
    assert_eq!((&*owner.node, owner.term), ("b", 2));
    let refused = append(&a.engine, data(3, 100), Durability::Durable).await;
    assert!(matches!(refused, Err(AppendError::Moved { term: 2, .. })));
    assert_eq!(remote.restored().await[..1], numbered(1, 100));
}

#[tokio::test(start_paused = true)]
async fn an_owner_without_stand_bys_goes_on_while_the_bucket_is_down() {
    paused_clock();
    let remote = remote();
    let a = owner(&remote, "a").await;
    let b = Waiting::new(&remote, "b").await;
    until_named(&remote, &["b"]).await;
    b.membership.leave().await.unwrap();
    until_named(&remote, &[]).await;
    remote.faults.next_puts([StoreFault::Unavailable; 100_000]);
    for number in 0..10 {
        sleep(TTL).await;
        a.append(number, Durability::Durable).await.unwrap();
    }
    remote.faults.puts.lock().unwrap().clear();
    let answers = async || a.append(10, Durability::Replicated).await.is_ok();
    until("the bucket answers", answers).await;
    a.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_handed_over_goes_to_the_successor_at_once() {
    paused_clock();
    let remote = remote();
    let a = owner(&remote, "a").await;
    let mut b = Waiting::new(&remote, "b").await;
    let mut c = Waiting::new(&remote, "c").await;
    until_named(&remote, &["b", "c"]).await;
    a.append(0, Durability::Durable).await.unwrap();
    a.stop.send(true).unwrap();
    assert!(matches!(a.runs.await.unwrap(), ShipEnd::Shipped));
    let released = Instant::now();
    assert_eq!(c.claims(TTL / 2).await, None);
    assert_eq!(b.claims(TTL).await, Some(None));
    assert_eq!(remote.restored().await, numbered(1, 100));
    // The successor does not come, so any other may after a while.
    assert_eq!(c.claims(2 * TTL).await, Some(None));
    assert!(released.elapsed() >= TTL);
    assert_eq!(c.take(&remote, None).await.unwrap(), 2);
    let refused = b.take(&remote, None).await.unwrap_err();
    assert!(matches!(refused, OwnerError::Owned { .. }), "{refused}");
}

/// Number of reads of files of rows by a node.
fn reads_of_rows(remote: &Remote) -> u64 {
    let read = remote.faults.read.lock().unwrap();
    let files = read
        .iter()
        .filter(|(directory, _)| directory.ends_with("/compacted"));
    files.map(|(_, reads)| reads).sum()
}

#[tokio::test(start_paused = true)]
async fn a_take_over_reads_each_row_once() {
    paused_clock();
    let inner = Arc::default();
    let (remote, others) = (remote_over(Arc::clone(&inner)), remote_over(inner));
    let a = owner(&remote, "a").await;
    let mut b = Waiting::new(&others, "b").await;
    until_named(&others, &["b"]).await;
    for number in 0..300 {
        a.append(number, Durability::Replicated).await.unwrap();
    }
    a.stop.send(true).unwrap();
    assert!(matches!(a.runs.await.unwrap(), ShipEnd::Shipped));
    assert_eq!(b.claims(TTL).await, Some(None));
    let claim = claim("b", b.membership.incarnation());
    let fenced = ReplicaOwner::fence(&others.bucket, &claim).await.unwrap();
    let claimed = reads_of_rows(&others);
    let copy = ReplicaCopy::of_fenced(&others.bucket, &Lines, fenced.tail()).await;
    let copy = copy.unwrap().unwrap();
    let config = config(true);
    let machine = others.made(copy, &config, RestoredAs::Store, None).await;
    let fetched = reads_of_rows(&others);
    let engine = open(machine.path(), config);
    let mut parts = parts(&others, Arc::clone(&engine), Some(fenced.term()));
    parts.claim = claim;
    let owner = ReplicaOwner::begin(parts, Some(fenced)).await.unwrap();
    let begun = reads_of_rows(&others);
    println!(
        "{} reads of rows, then {}",
        fetched - claimed,
        begun - fetched
    );
    // The row of the manifest is looked for again.
    assert!(begun - fetched <= 3 && fetched - claimed > 5);
    assert_eq!(owner.term(), 2);
    assert_eq!(records(&engine), numbered(300, 100));
    let (stop, stopped) = watch::channel(false);
    let runs = tokio::spawn(owner.run(stopped, watch::channel(false).1));
    let last = append(&engine, data(300, 100), Durability::Replicated).await;
    last.unwrap();
    stop.send(true).unwrap();
    assert!(matches!(runs.await.unwrap(), ShipEnd::Shipped));
    assert_eq!(remote.restored().await, numbered(301, 100));
}

#[tokio::test(start_paused = true)]
async fn a_process_that_replaces_the_owner_waits_behind_stand_bys() {
    paused_clock();
    let remote = remote();
    let a = owner(&remote, "a").await;
    let mut b = Waiting::new(&remote, "b").await;
    until_named(&remote, &["b"]).await;
    a.append(0, Durability::Replicated).await.unwrap();
    a.kill().await;
    // The machine starts again with an empty disk, at once. It lives, but it is not the owner.
    let mut again = Waiting::new(&remote, "a").await;
    let from = Instant::now();
    let (of_b, of_a) = tokio::join!(b.claims(3 * TTL), again.claims(TTL * 3 / 2));
    assert_eq!((of_b, of_a), (Some(Some(1)), None));
    assert!(from.elapsed() >= TTL, "the old process may be alive");
    // The stand-by does not claim the store, so it goes on itself.
    assert_eq!(again.claims(TTL).await, Some(Some(1)));
    assert_eq!(again.take(&remote, Some(1)).await.unwrap(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_outage_of_the_bucket_for_all_nodes_kills_no_owner() {
    paused_clock();
    let inner = Arc::default();
    let (remote, others) = (remote_over(Arc::clone(&inner)), remote_over(inner));
    let a = owner(&remote, "a").await;
    let mut b = Waiting::new(&others, "b").await;
    until_named(&others, &["b"]).await;
    a.append(0, Durability::Durable).await.unwrap();
    for outage in [TTL / 4, TTL / 2, TTL, 5 * TTL] {
        assert_eq!(b.claims(TTL).await, None, "before an outage of {outage:?}");
        // The stand-by reads nothing, and the owner writes nothing.
        remote.faults.next_puts([StoreFault::Unavailable; 100_000]);
        sleep(outage).await;
        remote.faults.puts.lock().unwrap().clear();
        assert_eq!(
            b.claims(2 * TTL).await,
            None,
            "after an outage of {outage:?}"
        );
        let answers = async || a.append_durable(1).await.is_ok();
        until("the owner answers", answers).await;
    }
    a.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_beat_that_hangs_does_not_end_the_lease() {
    paused_clock();
    let remote = remote();
    let a = owner(&remote, "a").await;
    let mut b = Waiting::new(&remote, "b").await;
    until_named(&remote, &["b"]).await;
    for _ in 0..5 {
        remote.faults.next_puts([StoreFault::Slow]);
        assert_eq!(b.claims(2 * TTL).await, None);
        let answers = async || a.append_durable(1).await.is_ok();
        until("the owner answers", answers).await;
    }
    a.kill().await;
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_shows_no_signs_of_life_is_followed_by_nobody() {
    paused_clock();
    let remote = remote();
    let a = owner(&remote, "a").await;
    let mut b = Waiting::new(&remote, "b").await;
    until_named(&remote, &["b"]).await;
    a.stop.send(true).unwrap();
    assert!(matches!(a.runs.await.unwrap(), ShipEnd::Shipped));
    // A node without `stand_by` owns the store now. It has no lease.
    let claim = claim("old", "");
    assert_eq!(
        ReplicaOwner::fence(&remote.bucket, &claim)
            .await
            .unwrap()
            .term(),
        2
    );
    let owner = record(&remote).await;
    assert_eq!((&*owner.process, owner.stand_bys.len()), ("", 0));
    assert_eq!(b.claims(5 * TTL).await, None);
}

#[tokio::test(start_paused = true)]
async fn a_valid_lease_confirms_nothing_without_the_bucket() {
    paused_clock();
    let inner = Arc::default();
    let (remote, others) = (remote_over(Arc::clone(&inner)), remote_over(inner));
    let a = owner(&remote, "a").await;
    let _b = Waiting::new(&others, "b").await;
    until_named(&others, &["b"]).await;
    a.append(0, Durability::Replicated).await.unwrap();
    // Beats reach the bucket, so that the lease holds. Rows do not.
    *remote.faults.only_in.lock().unwrap() = "/db/";
    remote.faults.next_puts([StoreFault::Unavailable; 100_000]);
    let engine = Arc::clone(&a.engine);
    let waits =
        tokio::spawn(async move { append(&engine, data(1, 100), Durability::Replicated).await });
    a.append(2, Durability::Durable).await.unwrap();
    // A person takes the store from this node, which works.
    let claim = OwnerClaim {
        take_over: Some(TakeOver::Any),
        ..claim("c", "")
    };
    let fenced = ReplicaOwner::fence(&others.bucket, &claim).await;
    assert_eq!(fenced.unwrap().term(), 2);
    waits.await.unwrap().unwrap_err();
    let late = a.append(3, Durability::Replicated).await;
    late.unwrap_err();
    assert_eq!(others.restored().await, numbered(1, 100));
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_recovers_for_longer_than_the_ttl_is_not_followed() {
    paused_clock();
    let remote = remote();
    let a = owner(&remote, "a").await;
    let mut b = Waiting::new(&remote, "b").await;
    until_named(&remote, &["b"]).await;
    a.append(0, Durability::Replicated).await.unwrap();
    a.kill().await;
    // It begins again in its directory, and recovers.
    let again = join(&remote, "a").await;
    let mut claim = OwnerClaim {
        kept_term: Some(1),
        ..claim("a", again.incarnation())
    };
    assert!(claim.goes_on(&remote.bucket).await.unwrap());
    assert_eq!(b.claims(5 * TTL).await, None, "it lives");
    // Another directory with the same name shows nothing.
    claim.kept_term = None;
    claim.process = "other".to_owned();
    assert!(!claim.goes_on(&remote.bucket).await.unwrap());
    // It dies before it has recovered.
    drop(again);
    assert_eq!(b.claims(2 * TTL).await, Some(Some(1)));
}
