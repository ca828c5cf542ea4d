//! Planned ends, and tails that stop, while something fails.

use std::io;

use wald_storage::{
    Backup, BackupError, BoxFuture, DurabilityTruth, OwnerLease, Profile, Quota, QuotaError,
    QuotaUse, ReplicaProgress, ReplicaState, SegmentInfo, Statistics, SyncError, Verification,
    VerifyError,
};

use super::*;

/// An engine whose journal cannot be read for a while.
struct Unreadable {
    engine: Arc<LocalEngine>,
    fails: AtomicBool,
}

impl Replica for Unreadable {
    fn progress(&self) -> ReplicaProgress {
        self.engine.progress()
    }

    fn lag_records(&self) -> u64 {
        self.engine.lag_records()
    }

    fn changed(&self, durable: Position, waiting: bool) -> BoxFuture<'_, ()> {
        self.engine.changed(durable, waiting)
    }

    fn read_part(
        &self,
        from: Position,
        most: usize,
    ) -> BoxFuture<'_, io::Result<Option<JournalPart>>> {
        match self.fails.load(Ordering::Relaxed) {
            true => Box::pin(async { Err(io::ErrorKind::UnexpectedEof.into()) }),
            false => self.engine.read_part(from, most),
        }
    }

    fn publish(&self, end: Position) {
        self.engine.publish(end);
    }

    fn files(
        &self,
        known: HashSet<ContentDigest>,
        earlier: Option<Arc<BackupManifest>>,
    ) -> BoxFuture<'_, Result<Box<dyn Backup>, BackupError>> {
        self.engine.files(known, earlier)
    }

    fn release(&self, end: Position) {
        self.engine.release(end);
    }

    fn hold_lease(&self, lease: Arc<dyn OwnerLease>) {
        self.engine.hold_lease(lease);
    }

    fn stop(&self, reason: Unreplicated) {
        self.engine.stop(reason);
    }

    fn resume(&self) {
        self.engine.resume();
    }
}

impl Operate for Unreadable {
    fn profile(&self) -> Profile {
        self.engine.profile()
    }

    fn statistics(&self) -> Statistics {
        self.engine.statistics()
    }

    fn set_quotas(&self, quotas: Vec<Quota>) -> BoxFuture<'_, Result<Vec<QuotaUse>, QuotaError>> {
        self.engine.set_quotas(quotas)
    }

    fn segments(&self) -> Vec<SegmentInfo> {
        self.engine.segments()
    }

    fn describe_segments(
        &self,
        after: Option<Position>,
        limit: usize,
    ) -> BoxFuture<'_, Vec<SegmentInfo>> {
        self.engine.describe_segments(after, limit)
    }

    fn backup(
        &self,
        known: HashSet<ContentDigest>,
    ) -> BoxFuture<'_, Result<Box<dyn Backup>, BackupError>> {
        self.engine.backup(known)
    }

    fn verify(&self, segment: Option<u64>, rate: u64) -> Result<Verification, VerifyError> {
        self.engine.verify(segment, rate)
    }

    fn durability_truth(&self) -> DurabilityTruth {
        self.engine.durability_truth()
    }

    fn failed(&self) -> BoxFuture<'_, Arc<io::Error>> {
        self.engine.failed()
    }

    fn drain(&self) -> BoxFuture<'_, Result<(), SyncError>> {
        self.engine.drain()
    }
}

/// An owner that runs.
struct Owner {
    source: Arc<Unreadable>,
    tail: Arc<ReplicaTail>,
    stop: watch::Sender<bool>,
    runs: JoinHandle<ShipEnd>,
    _machine: TempDir,
}

async fn owner(remote: &Remote) -> Owner {
    let machine = tempfile::tempdir().unwrap();
    let engine = open(machine.path(), config(true));
    let source = Arc::new(Unreadable {
        engine: Arc::clone(&engine),
        fails: AtomicBool::new(false),
    });
    let mut parts = parts(remote, engine, None);
    parts.source = Arc::clone(&source) as _;
    let owner = ReplicaOwner::begin(parts, None).await.unwrap();
    let (stop, stopped) = watch::channel(false);
    Owner {
        source,
        tail: owner.tail(),
        stop,
        runs: tokio::spawn(owner.run(stopped, watch::channel(false).1)),
        _machine: machine,
    }
}

impl Owner {
    async fn append(&self, number: usize, level: Durability) -> Result<Durability, AppendError> {
        append(&self.source.engine, data(number, 100), level).await
    }

    fn fail(&self, fails: bool) {
        self.source.fails.store(fails, Ordering::Relaxed);
    }
}

async fn record(remote: &Remote) -> OwnerRecord {
    let found = OwnerRecord::read(&remote.bucket).await.unwrap();
    found.unwrap().value
}

#[tokio::test(start_paused = true)]
async fn a_planned_end_releases_no_store_whose_rest_cannot_be_read() {
    let remote = remote();
    let a = owner(&remote).await;
    a.append(0, Durability::Replicated).await.unwrap();
    a.fail(true);
    a.append(1, Durability::Durable).await.unwrap();
    a.stop.send(true).unwrap();
    sleep(Duration::from_secs(30)).await;
    assert!(!a.runs.is_finished(), "the rest is not in the bucket");
    assert_eq!(record(&remote).await.state, OwnerState::Serving);
    a.fail(false);
    assert!(matches!(a.runs.await.unwrap(), ShipEnd::Shipped));
    assert_eq!(record(&remote).await.state, OwnerState::Released);
    assert_eq!(remote.restored().await, numbered(2, 100));
}

#[tokio::test(start_paused = true)]
async fn requests_do_not_wait_for_a_journal_that_cannot_be_read() {
    let remote = remote();
    let a = owner(&remote).await;
    a.fail(true);
    let begun = Instant::now();
    let engine = Arc::clone(&a.source.engine);
    let waits = async move { append(&engine, data(0, 100), Durability::Replicated).await };
    let waits = tokio::spawn(waits);
    until("it is answered", || waits.is_finished()).await;
    let unknown = waits.await.unwrap();
    assert!(
        matches!(unknown, Err(AppendError::ReplicationUnknown)),
        "{unknown:?}"
    );
    assert!(begun.elapsed() >= DOWN_AFTER);
    let refused = a.append(9, Durability::Replicated).await;
    assert!(
        matches!(refused, Err(AppendError::BucketDown)),
        "{refused:?}"
    );
    a.fail(false);
    let source = Arc::clone(&a.source);
    until("it ships again", || {
        source.progress().state == ReplicaState::Serving
    })
    .await;
    a.append(1, Durability::Replicated).await.unwrap();
    assert_eq!(remote.restored().await, numbered(2, 100));
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_opens_its_tail_again_shows_that_it_serves() {
    let remote = remote();
    let a = owner(&remote).await;
    a.append(0, Durability::Replicated).await.unwrap();
    // A list after the claim.
    *remote.faults.hangs_in.lock().unwrap() = Some("/content");
    a.tail.close().await.unwrap();
    let begun = Instant::now();
    let opening = loop {
        let record = record(&remote).await;
        if record.term > 1 {
            break record;
        }
        assert!(begun.elapsed() < Duration::from_secs(600));
        sleep(Duration::from_millis(100)).await;
    };
    assert_eq!(opening.state, OwnerState::Serving, "the engine serves");
    *remote.faults.hangs_in.lock().unwrap() = None;
    let source = Arc::clone(&a.source);
    until("the tail is open", || {
        source.progress().state == ReplicaState::Serving
    })
    .await;
    a.append(1, Durability::Replicated).await.unwrap();
    assert_eq!(remote.restored().await, numbered(2, 100));
}

#[tokio::test(start_paused = true)]
async fn a_planned_end_does_not_wait_for_the_pause_before_a_new_open() {
    for is_back in [false, true] {
        let remote = remote();
        let a = owner(&remote).await;
        a.append(0, Durability::Replicated).await.unwrap();
        remote.faults.down.store(true, Ordering::Relaxed);
        let _ = a.tail.close().await;
        // The pauses are long by then.
        until("attempts fail", || remote.events.count("NotOpened") >= 7).await;
        a.append(1, Durability::Durable).await.unwrap();
        remote.faults.down.store(!is_back, Ordering::Relaxed);
        let begun = Instant::now();
        a.stop.send(true).unwrap();
        let end = a.runs.await.unwrap();
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "{:?}",
            begun.elapsed()
        );
        remote.faults.down.store(false, Ordering::Relaxed);
        let state = record(&remote).await.state;
        match is_back {
            true => {
                assert!(matches!(end, ShipEnd::Shipped), "{end:?}");
                assert_eq!(state, OwnerState::Released);
                assert_eq!(remote.restored().await, numbered(2, 100));
            }
            false => {
                assert!(matches!(end, ShipEnd::Journal), "{end:?}");
                assert_eq!(state, OwnerState::Serving);
            }
        }
    }
}
