//! The tail over a store in memory whose answers are lost, late or 503. Time is paused: each wait ends at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt as _;
use object_store::memory::InMemory;
use object_store::{ObjectStore as _, ObjectStoreExt as _};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use super::settings::{MERGE_AT, PUT_TIMEOUT, ROWS_PER_FILE};
use super::*;
use crate::faults::{StoreFault, StoreFaults, Weather, faulty_over};
use crate::observe::{Op, Tally};

/// One node with its own way to the store.
struct Node {
    bucket: Bucket,
    faults: Arc<StoreFaults>,
    tally: Arc<Tally>,
}

fn node(store: &Arc<InMemory>) -> Node {
    let (bucket, faults, tally) = faulty_over(Arc::clone(store), StoreFaults::default());
    Node {
        bucket,
        faults,
        tally,
    }
}

impl Node {
    /// Opens the tail as the next owner.
    async fn own(&self) -> ReplicaTail {
        let newest = ReplicaTail::newest_term(&self.bucket).await.unwrap();
        ReplicaTail::open(&self.bucket, newest).await.unwrap()
    }

    fn requests(&self) -> u64 {
        self.tally.requests().iter().map(|(.., count)| count).sum()
    }
}

fn part(segment: u64, position: u64, bytes: impl Into<bytes::Bytes>) -> TailPart {
    let bytes = bytes.into();
    TailPart {
        segment,
        position,
        bytes,
    }
}

async fn all(tail: &ReplicaTail) -> Vec<TailPart> {
    let mut rows = tail.rows().await.unwrap();
    let mut parts = Vec::new();
    while let Some(part) = rows.next().await.unwrap() {
        parts.push(part);
    }
    parts
}

/// Sizes of the objects of the write-ahead log: fences have 0 bytes.
async fn logged(store: &InMemory) -> Vec<u64> {
    let mut sizes = Vec::new();
    let mut objects = store.list(None);
    while let Some(object) = objects.next().await {
        let object = object.unwrap();
        if object.location.as_ref().contains("/wal/") {
            sizes.push(object.size);
        }
    }
    sizes
}

#[tokio::test(start_paused = true)]
async fn an_open_replays_all_rows_and_the_newest_manifest() {
    let store = Arc::new(InMemory::new());
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut expected = Vec::new();
    let mut position = 77;
    for term in 1..=4 {
        let node = node(&store);
        assert_eq!(
            ReplicaTail::newest_term(&node.bucket).await.unwrap(),
            term - 1
        );
        let tail = node.own().await;
        assert_eq!(tail.term(), term);
        assert_eq!(all(&tail).await, expected);
        if term > 1 {
            let manifest = tail.manifest().await.unwrap().unwrap();
            assert_eq!(
                (manifest.name, manifest.position),
                (format!("{}-x", term - 1), term)
            );
        }
        // More rows than an open may replay, so that files come into it.
        for _ in 0..300 {
            let mut bytes = vec![0; random.random_range(1..3_000)];
            random.fill(&mut bytes[..]);
            let part = part(term, position, bytes);
            position += part.bytes.len() as u64;
            tail.put(&part).await.unwrap();
            expected.push(part);
        }
        let largest = part(term, position, vec![7; LARGEST_PART]);
        position += LARGEST_PART as u64 + 5;
        tail.put(&largest).await.unwrap();
        expected.push(largest);
        tail.put_manifest("older", 1).await.unwrap();
        tail.put_manifest(&format!("{term}-x"), term + 1)
            .await
            .unwrap();
        // The next open replays what no file has.
        sleep(Duration::from_secs(2)).await;
        let replayed_from = tail.db.manifest().replay_after_wal_id();
        assert!(replayed_from + u64::from(ROWS_PER_FILE) > term * 303);
        // Half of the owners die.
        if term % 2 == 0 {
            tail.close().await.unwrap();
        }
    }
    assert_eq!(all(&node(&store).own().await).await, expected);
}

#[tokio::test(start_paused = true)]
async fn of_two_owners_that_open_at_once_one_is_fenced() {
    for seed in 0..20 {
        println!("seed {seed}");
        let store = Arc::new(InMemory::new());
        let nodes = [node(&store), node(&store)];
        for (number, node) in (0..).zip(&nodes) {
            let weather = Weather::new(seed * 2 + number, 0.2, 0.3);
            *node.faults.weather.lock().unwrap() = Some(weather);
        }
        let open = |node: &Node| {
            let bucket = node.bucket.clone();
            tokio::spawn(async move { ReplicaTail::open(&bucket, 0).await })
        };
        let opened = [open(&nodes[0]), open(&nodes[1])];
        let mut owners = Vec::new();
        for opened in opened {
            match opened.await.unwrap() {
                Ok(tail) => owners.push(tail),
                Err(error) => assert_eq!(error.kind(), TailErrorKind::Fenced, "{error}"),
            }
        }
        assert_eq!(owners.len(), 1);
        owners[0].put(&part(1, 0, "x")).await.unwrap();
        assert_eq!(ReplicaTail::newest_term(&nodes[0].bucket).await.unwrap(), 1);
    }
}

/// Number of objects of the write-ahead log that lists of a node have named.
fn listed_rows(node: &Node) -> u64 {
    let listed = node.faults.listed.lock().unwrap();
    let logs = listed
        .iter()
        .filter(|(directory, _)| directory.ends_with("/wal"));
    logs.map(|(_, objects)| objects).sum()
}

#[tokio::test(start_paused = true)]
async fn a_claim_lists_only_the_rows_that_no_file_has() {
    for is_planned in [true, false] {
        let store = Arc::new(InMemory::new());
        let tail = node(&store).own().await;
        for position in 0..3_000 {
            tail.put(&part(1, position, "x")).await.unwrap();
        }
        if is_planned {
            tail.close().await.unwrap();
        }
        drop(tail);
        let rows = logged(&store).await.len();
        assert!(rows > 3_000, "{rows} objects of the log");
        let next = node(&store);
        let tail = next.own().await;
        let mut copy = TailCopy::open(&next.bucket).await.unwrap().unwrap();
        while copy.next().await.unwrap().is_some() {}
        tail.put(&part(1, 3_000, "x")).await.unwrap();
        // Removals of old rows begin once the take-over has ended.
        sleep(Duration::from_secs(5)).await;
        let listed = listed_rows(&next);
        println!("planned: {is_planned}; {listed} rows listed");
        let most = if is_planned {
            10
        } else {
            4 * u64::from(ROWS_PER_FILE)
        };
        assert!(
            listed <= most,
            "{listed} rows listed, at most {most} are right"
        );
        assert_eq!(all(&tail).await.len(), 3_001);
    }
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_ends_does_not_wait_for_removals() {
    let store = Arc::new(InMemory::new());
    let slow = StoreFaults {
        slow_removals: true,
        ..StoreFaults::default()
    };
    let (bucket, ..) = faulty_over(Arc::clone(&store), slow);
    let tail = ReplicaTail::open(&bucket, 0).await.unwrap();
    for position in 0..600 {
        tail.put(&part(1, position, "x")).await.unwrap();
    }
    // A pass has begun, and its removals take an hour.
    sleep(Duration::from_secs(150)).await;
    let began = Instant::now();
    tail.close().await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(1));
}

/// An owner that is stopped with a row on its way, and wakes when the next has begun. Returns its answer, and the rows
/// that the next owner of all has.
async fn zombie(keep_fences: bool) -> (Result<(), TailErrorKind>, Vec<TailPart>) {
    let store = Arc::new(InMemory::new());
    let old = node(&store);
    let tail = Arc::new(old.own().await);
    tail.put(&part(1, 0, "a")).await.unwrap();
    *old.faults.hangs_in.lock().unwrap() = Some("");
    let late = tokio::spawn({
        let tail = Arc::clone(&tail);
        async move { tail.put(&part(1, 1, "old")).await }
    });
    sleep(Duration::from_secs(1)).await;
    let new = node(&store);
    let next = new.own().await;
    next.put(&part(1, 1, "new")).await.unwrap();
    if !keep_fences {
        let mut objects = store.list(None);
        while let Some(object) = objects.next().await {
            let object = object.unwrap();
            if object.size == 0 && object.location.as_ref().contains("/wal/") {
                store.delete(&object.location).await.unwrap();
            }
        }
    }
    *old.faults.hangs_in.lock().unwrap() = None;
    let late = late.await.unwrap().map_err(|error| error.kind());
    if keep_fences {
        for _ in 0..3 {
            let refused = tail.put(&part(1, 4, "b")).await.unwrap_err();
            assert_eq!(refused.kind(), TailErrorKind::Fenced);
            let refused = tail.put_manifest("b", 4).await.unwrap_err();
            assert_eq!(refused.kind(), TailErrorKind::Fenced);
        }
        assert_eq!(tail.ended().await.kind(), TailErrorKind::Fenced);
        next.put(&part(1, 4, "c")).await.unwrap();
    }
    (late, all(&node(&store).own().await).await)
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_wakes_late_acknowledges_nothing() {
    let (late, rows) = zombie(true).await;
    assert_eq!(late, Err(TailErrorKind::Fenced));
    assert_eq!(rows, [part(1, 0, "a"), part(1, 1, "new"), part(1, 4, "c")]);
}

#[tokio::test(start_paused = true)]
async fn without_fences_an_acknowledged_row_is_lost() {
    // The control of the test above: it would see the loss.
    let (late, rows) = zombie(false).await;
    assert_eq!(late, Ok(()));
    assert!(!rows.contains(&part(1, 1, "old")), "{rows:?}");
}

#[tokio::test(start_paused = true)]
async fn lost_answers_fence_nobody_and_double_no_row() {
    for seed in 0..10 {
        println!("seed {seed}");
        let store = Arc::new(InMemory::new());
        let node = node(&store);
        *node.faults.weather.lock().unwrap() = Some(Weather::new(seed, 0.3, 0.3));
        let tail = node.own().await;
        let mut expected = Vec::new();
        for position in 0..50 {
            let part = part(1, position, "x");
            tail.put(&part).await.unwrap();
            expected.push(part);
        }
        assert_eq!(all(&tail).await, expected);
        let mut sizes = logged(&store).await;
        sizes.retain(|size| *size > 0);
        assert_eq!(sizes.len(), 50);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_without_metadata_is_refused() {
    let store = Arc::new(InMemory::new());
    probe_metadata(&node(&store).bucket).await.unwrap();
    let faults = StoreFaults {
        drops_metadata: true,
        ..StoreFaults::default()
    };
    let (bucket, faults, _) = faulty_over(Arc::clone(&store), faults);
    let refused = probe_metadata(&bucket).await.unwrap_err();
    assert_eq!(refused.kind(), TailErrorKind::Refused, "{refused}");
    assert!(store.list(None).next().await.is_none(), "nothing stays");
    // The reason: an owner takes its own row for another's.
    let tail = ReplicaTail::open(&bucket, 0).await.unwrap();
    *faults.only_in.lock().unwrap() = "/wal/";
    faults.next_puts([StoreFault::AnswerLost]);
    let fenced = tail.put(&part(1, 0, "x")).await.unwrap_err();
    assert_eq!(fenced.kind(), TailErrorKind::Fenced);
    faults.down.store(true, Ordering::Relaxed);
    let down = probe_metadata(&bucket).await.unwrap_err();
    assert_eq!(down.kind(), TailErrorKind::Unreachable);
}

#[tokio::test(start_paused = true)]
async fn an_undecided_write_fences_nobody() {
    let store = Arc::new(InMemory::new());
    let node = node(&store);
    let tail = node.own().await;
    for position in 0..4 {
        *node.faults.only_in.lock().unwrap() = "/wal/";
        node.faults
            .next_puts([StoreFault::Conflict, StoreFault::AnswerLost]);
        tail.put(&part(1, position, "x")).await.unwrap();
    }
    assert_eq!(all(&tail).await.len(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_row_on_its_way_is_awaited_and_stored_once() {
    let store = Arc::new(InMemory::new());
    let node = node(&store);
    let tail = node.own().await;
    tail.put(&part(1, 0, "a")).await.unwrap();
    *node.faults.hangs_in.lock().unwrap() = Some("/wal/");
    let kind = |result: Result<(), TailError>| result.unwrap_err().kind();
    for _ in 0..3 {
        let began = Instant::now();
        let put = tail.put(&part(1, 1, "b")).await;
        assert_eq!(kind(put), TailErrorKind::Unreachable);
        assert_eq!(began.elapsed().as_secs(), PUT_TIMEOUT.as_secs());
    }
    // Another row does not pass the one on its way, and takes no memory.
    assert_eq!(
        kind(tail.put(&part(1, 2, "c")).await),
        TailErrorKind::Unreachable
    );
    assert_eq!(
        kind(tail.put_manifest("m", 1).await),
        TailErrorKind::Unreachable
    );
    // Nobody sees a row that is not stored.
    assert_eq!(all(&tail).await, [part(1, 0, "a")]);
    *node.faults.hangs_in.lock().unwrap() = None;
    tail.put(&part(1, 1, "b")).await.unwrap();
    assert_eq!(all(&tail).await, [part(1, 0, "a"), part(1, 1, "b")]);
    assert_eq!(tail.manifest().await.unwrap(), None);
    let mut sizes = logged(&store).await;
    sizes.retain(|size| *size > 0);
    assert_eq!(sizes.len(), 2, "one object for each row");
    // A caller that went away leaves its row on the way, too.
    *node.faults.hangs_in.lock().unwrap() = Some("/wal/");
    let gone = tokio::time::timeout(Duration::from_secs(1), tail.put(&part(1, 2, "d"))).await;
    assert!(gone.is_err());
    *node.faults.hangs_in.lock().unwrap() = None;
    tail.put(&part(1, 2, "de")).await.unwrap();
    assert_eq!(all(&tail).await.last(), Some(&part(1, 2, "de")));
}

#[tokio::test(start_paused = true)]
async fn a_row_that_the_network_swallows_is_sent_again() {
    let store = Arc::new(InMemory::new());
    let node = node(&store);
    let tail = node.own().await;
    *node.faults.only_in.lock().unwrap() = "/wal/";
    node.faults.next_puts([StoreFault::Slow]);
    let began = Instant::now();
    tail.put(&part(1, 0, "a")).await.unwrap();
    let waited = began.elapsed().as_secs();
    assert!((10..12).contains(&waited), "{waited} s");
    assert_eq!(all(&tail).await, [part(1, 0, "a")]);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_needs_20_s_for_each_row_takes_them() {
    let store = Arc::new(InMemory::new());
    let node = node(&store);
    let tail = node.own().await;
    *node.faults.only_in.lock().unwrap() = "/wal/";
    node.faults.next_puts([StoreFault::Late; 100]);
    let began = Instant::now();
    while let Err(error) = tail.put(&part(1, 0, "a")).await {
        assert_eq!(error.kind(), TailErrorKind::Unreachable);
        assert!(began.elapsed() < Duration::from_secs(90), "{error}");
    }
    assert_eq!(all(&tail).await, [part(1, 0, "a")]);
}

#[tokio::test(start_paused = true)]
async fn an_outage_of_an_hour_stops_nobody() {
    let store = Arc::new(InMemory::new());
    let node = node(&store);
    let tail = node.own().await;
    tail.put(&part(1, 0, "a")).await.unwrap();
    node.faults.down.store(true, Ordering::Relaxed);
    tail.drain(0);
    let down = Instant::now();
    while down.elapsed() < Duration::from_secs(3600) {
        let refused = tail.put(&part(1, 1, "b")).await.unwrap_err();
        assert_eq!(refused.kind(), TailErrorKind::Unreachable);
    }
    node.faults.down.store(false, Ordering::Relaxed);
    tail.put(&part(1, 1, "b")).await.unwrap();
    assert_eq!(all(&tail).await.len(), 2);
    tail.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_drained_segment_is_gone_and_others_stay() {
    let store = Arc::new(InMemory::new());
    let node_1 = node(&store);
    let tail = node_1.own().await;
    for segment in 1..=4 {
        for row in 0..5 {
            let bytes = vec![7; 1_000];
            let position = segment * 10_000 + row * 1_000;
            tail.put(&part(segment, position, bytes)).await.unwrap();
        }
    }
    tail.put_manifest("1-1", 30_000).await.unwrap();
    tail.drain(2);
    let began = Instant::now();
    while all(&tail).await.first().unwrap().segment < 3 {
        assert!(began.elapsed() < Duration::from_secs(30), "nothing leaves");
        sleep(Duration::from_secs(1)).await;
    }
    println!("drained after {:?}", began.elapsed());
    let left = all(&tail).await;
    assert_eq!(left.len(), 10);
    // The machine dies; the next owner has the same rows.
    drop(tail);
    let node_2 = node(&store);
    let tail = node_2.own().await;
    assert_eq!(all(&tail).await, left);
    assert_eq!(tail.manifest().await.unwrap().unwrap().position, 30_000);
    // The row of the manifest is in no segment of the journal.
    tail.drain(u64::MAX);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(all(&tail).await, []);
    assert_eq!(tail.manifest().await.unwrap().unwrap().position, 30_000);
    // The objects are removed, too, but fences never.
    sleep(Duration::from_secs(1_800)).await;
    let (fences, others): (Vec<_>, Vec<_>) = logged(&store)
        .await
        .into_iter()
        .partition(|size| *size == 0);
    assert_eq!(fences.len(), 2);
    assert!(others.len() <= 1, "{others:?}");
}

#[tokio::test(start_paused = true)]
async fn a_slow_log_does_not_fill_the_files() {
    let store = Arc::new(InMemory::new());
    let node = node(&store);
    let tail = node.own().await;
    let (mut files, mut runs) = (0, 0);
    for position in 0..100 {
        tail.put(&part(1, position, "x")).await.unwrap();
        tail.put_manifest("m", position).await.unwrap();
        tail.drain(0);
        sleep(Duration::from_secs(10)).await;
        for segment in tail.db.manifest().segments() {
            files = files.max(segment.l0().len());
            runs = runs.max(segment.compacted().len());
        }
    }
    println!("at most {files} files and {runs} runs in a segment");
    assert!(files <= 2 * MERGE_AT && runs <= 2 * MERGE_AT && runs > 0);
    assert_eq!(all(&tail).await.len(), 100);
    assert_eq!(tail.manifest().await.unwrap().unwrap().position, 99);
}

#[tokio::test(start_paused = true)]
async fn an_owner_whose_clock_is_behind_goes_on_at_once() {
    let store = Arc::new(InMemory::new());
    let old = node(&store);
    let tail = old.own().await;
    // The paused time passes, and that of the machine does not: the next owner is an hour behind.
    sleep(Duration::from_secs(3_600)).await;
    for position in 0..5 {
        tail.put(&part(1, position, "x")).await.unwrap();
        tail.drain(0);
        sleep(Duration::from_secs(10)).await;
    }
    tail.put(&part(1, 5, "x")).await.unwrap();
    drop(tail);
    let new = node(&store);
    let tail = new.own().await;
    let began = Instant::now();
    for position in 6..12 {
        tail.put(&part(1, position, "x")).await.unwrap();
    }
    assert!(began.elapsed() < Duration::from_secs(1));
    for position in 12..20 {
        tail.put(&part(1, position, "x")).await.unwrap();
        tail.drain(0);
        sleep(Duration::from_secs(10)).await;
    }
    assert!(
        tail.db.manifest().replay_after_wal_id() > 15,
        "files are written"
    );
    let runs = |tail: &ReplicaTail| {
        let manifest = tail.db.manifest();
        let runs = manifest.segments().iter().map(|one| one.compacted().len());
        runs.sum::<usize>()
    };
    assert!(runs(&tail) > 1, "files are merged");
    assert_eq!(all(&tail).await.len(), 20);
    assert_eq!(tail.db.status().close_reason, None);
}

#[tokio::test(start_paused = true)]
async fn rows_that_came_during_the_open_count_for_the_clock() {
    let store = Arc::new(InMemory::new());
    let old = node(&store);
    let tail = old.own().await;
    tail.put(&part(1, 0, "x")).await.unwrap();
    // No row tells that the clock of the owner is ahead.
    sleep(Duration::from_secs(3_600)).await;
    let new = node(&store);
    // The new owner reads the newest time, and its claim is late.
    *new.faults.only_in.lock().unwrap() = "/manifest/";
    new.faults.next_puts([StoreFault::Late]);
    let open = tokio::spawn({
        let bucket = new.bucket.clone();
        async move { ReplicaTail::open(&bucket, 1).await }
    });
    for position in 1..=19 {
        sleep(Duration::from_secs(1)).await;
        tail.put(&part(1, position, "x")).await.unwrap();
    }
    let next = open.await.unwrap().unwrap();
    let began = Instant::now();
    next.put(&part(1, 20, "x")).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(1));
    assert_eq!(all(&next).await.len(), 21);
}

#[tokio::test(start_paused = true)]
async fn a_late_compactor_of_an_earlier_owner_ends_no_merges() {
    let store = Arc::new(InMemory::new());
    let node = node(&store);
    let tail = node.own().await;
    tail.put(&part(1, 0, "x")).await.unwrap();
    sleep(Duration::from_secs(10)).await;
    let late = slatedb::CompactorBuilder::new(DATABASE, undecided(&node.bucket)).build();
    let claimed = tokio::time::timeout(Duration::from_secs(10), late.run()).await;
    assert!(claimed.is_err(), "it runs");
    late.stop().await.unwrap();
    tail.drain(1);
    sleep(Duration::from_secs(30)).await;
    assert_eq!(all(&tail).await, []);
}

#[tokio::test(start_paused = true)]
async fn an_idle_owner_sends_at_most_5_requests_a_second() {
    let store = Arc::new(InMemory::new());
    let node = node(&store);
    let tail = node.own().await;
    tail.put(&part(1, 0, "x")).await.unwrap();
    sleep(Duration::from_secs(60)).await;
    let before = node.requests();
    sleep(Duration::from_secs(3_600)).await;
    let sent = node.requests() - before;
    println!("{sent} requests an hour: {:?}", node.tally.requests());
    assert!(sent > 3_600, "the owner looks whether it is fenced");
    assert!(sent <= 5 * 3_600);
    let failed = node.tally.requests();
    assert!(failed.iter().all(|(_, result, _)| *result != "failed"));
    // An owner that is dropped sends none.
    drop(tail);
    sleep(Duration::from_secs(60)).await;
    let before = node.requests();
    sleep(Duration::from_secs(600)).await;
    assert_eq!(node.requests(), before);
}

#[tokio::test(start_paused = true)]
async fn a_copy_has_all_rows_and_disturbs_nobody() {
    let store = Arc::new(InMemory::new());
    let reader = node(&store);
    assert!(TailCopy::open(&reader.bucket).await.unwrap().is_none());
    let owner = node(&store);
    let tail = owner.own().await;
    let copy = TailCopy::open(&reader.bucket).await.unwrap().unwrap();
    assert!(copy.manifest().is_none());
    for segment in 1..=3 {
        for row in 0..150 {
            tail.put(&part(segment, segment * 1_000 + row, "x"))
                .await
                .unwrap();
        }
        tail.put_manifest(&format!("1-{segment}"), segment)
            .await
            .unwrap();
    }
    let before = reader.tally.requests();
    let mut copy = TailCopy::open(&reader.bucket).await.unwrap().unwrap();
    // Later rows are not in it.
    tail.put(&part(3, 3_150, "later")).await.unwrap();
    assert_eq!(copy.term(), 1);
    assert_eq!(copy.manifest().unwrap().name, "1-3");
    let mut parts = Vec::new();
    while let Some(part) = copy.next().await.unwrap() {
        parts.push(part);
    }
    let mut owned = all(&tail).await;
    owned.pop();
    assert_eq!(parts, owned);
    assert!(before.len() < reader.tally.requests().len() + 1);
    for (op, ..) in reader.tally.requests() {
        assert!(matches!(op, Op::Get | Op::Head | Op::List), "{op:?}");
    }
    assert_eq!(ReplicaTail::newest_term(&reader.bucket).await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_copy_never_misses_rows_that_move_meanwhile() {
    let store = Arc::new(InMemory::new());
    let owner = node(&store);
    let tail = owner.own().await;
    for position in 0..10 {
        tail.put(&part(1, position, "x")).await.unwrap();
    }
    // The passes over the log begin after 10, 70 and 130 s.
    sleep(Duration::from_secs(115)).await;
    let reader = node(&store);
    *reader.faults.hangs_in.lock().unwrap() = Some("/wal");
    let copy = tokio::spawn({
        let bucket = reader.bucket.clone();
        async move { TailCopy::open(&bucket).await }
    });
    sleep(Duration::from_secs(1)).await;
    tail.drain(0);
    tail.put(&part(1, 10, "y")).await.unwrap();
    sleep(Duration::from_secs(20)).await;
    let mut sizes = logged(&store).await;
    sizes.retain(|size| *size > 0);
    assert!(sizes.len() <= 2, "the collector has run: {sizes:?}");
    *reader.faults.hangs_in.lock().unwrap() = None;
    let mut copy = copy.await.unwrap().unwrap().unwrap();
    let mut count = 0;
    while copy.next().await.unwrap().is_some() {
        count += 1;
    }
    assert_eq!(count, 11);
}

#[tokio::test(start_paused = true)]
async fn a_hole_and_a_part_without_bytes_are_refused() {
    let store = Arc::new(InMemory::new());
    let node = node(&store);
    let tail = node.own().await;
    for bytes in [0, LARGEST_PART + 1] {
        let refused = tail.put(&part(1, 0, vec![0; bytes])).await.unwrap_err();
        assert_eq!(refused.kind(), TailErrorKind::Refused);
    }
    let refused = tail.put_manifest("", 0).await.unwrap_err();
    assert_eq!(refused.kind(), TailErrorKind::Refused);
    tail.put(&part(1, 0, "abc")).await.unwrap();
    tail.put(&part(1, 4, "d")).await.unwrap();
    let mut rows = tail.rows().await.unwrap();
    rows.next().await.unwrap().unwrap();
    let hole = rows.next().await.unwrap_err();
    assert_eq!(hole.kind(), TailErrorKind::Damaged, "{hole}");
    let mut copy = TailCopy::open(&node.bucket).await.unwrap().unwrap();
    copy.next().await.unwrap().unwrap();
    assert_eq!(
        copy.next().await.unwrap_err().kind(),
        TailErrorKind::Damaged
    );
}

/// An acknowledged row: position, and the term of its owner.
type Acknowledged = (u64, u64);

/// Opens the tail, and appends rows of one byte, the term, until another owner comes.
async fn append(node: Node, acknowledged: mpsc::UnboundedSender<Acknowledged>) {
    let tail = loop {
        let Ok(newest) = ReplicaTail::newest_term(&node.bucket).await else {
            continue;
        };
        match ReplicaTail::open(&node.bucket, newest).await {
            Ok(tail) => break tail,
            Err(error) => assert_ne!(error.kind(), TailErrorKind::Damaged, "{error}"),
        }
    };
    let term = u8::try_from(tail.term()).unwrap();
    let fenced = |error: TailError| assert_eq!(error.kind(), TailErrorKind::Fenced, "{error}");
    let mut rows = match tail.rows().await {
        Ok(rows) => rows,
        Err(error) => return fenced(error),
    };
    let mut position = 0;
    loop {
        match rows.next().await {
            Ok(Some(part)) => position = part.position + 1,
            Ok(None) => break,
            Err(error) => return fenced(error),
        }
    }
    loop {
        match tail.put(&part(1, position, vec![term])).await {
            Ok(()) => {
                acknowledged.send((position, tail.term())).unwrap();
                position += 1;
                // Files, and merges of them.
                if position % 16 == 0 {
                    tail.drain(0);
                }
            }
            Err(error) if error.kind() == TailErrorKind::Unreachable => {}
            Err(error) => return fenced(error),
        }
        sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_last_owner_has_every_acknowledged_row() {
    let seed: u64 =
        std::env::var("WALD_SEED").map_or_else(|_| rand::random(), |seed| seed.parse().unwrap());
    for seed in seed..seed.saturating_add(5) {
        println!("WALD_SEED={seed}");
        let mut random = StdRng::seed_from_u64(seed);
        let store = Arc::new(InMemory::new());
        let (acknowledge, mut acknowledged) = mpsc::unbounded_channel();
        let mut owners = Vec::new();
        for _ in 0..6 {
            let node = node(&store);
            let weather = Weather::new(random.random(), 0.2, 0.3);
            *node.faults.weather.lock().unwrap() = Some(weather);
            let faults = Arc::clone(&node.faults);
            owners.push(tokio::spawn(append(node, acknowledge.clone())));
            sleep(Duration::from_millis(random.random_range(0..20_000))).await;
            // Some owners are stopped while the next begins.
            if random.random_bool(0.5) {
                *faults.hangs_in.lock().unwrap() = Some("");
                tokio::spawn(async move {
                    sleep(Duration::from_secs(15)).await;
                    *faults.hangs_in.lock().unwrap() = None;
                });
            }
        }
        // All have opened the tail by then, and all that were stopped are awake.
        sleep(Duration::from_secs(120)).await;
        let last = node(&store).own().await;
        sleep(Duration::from_secs(30)).await;
        let rows = all(&last).await;
        for owner in owners {
            owner.await.unwrap();
        }
        drop(acknowledge);
        let rows: BTreeMap<_, _> = rows
            .into_iter()
            .map(|row| (row.position, u64::from(row.bytes[0])))
            .collect();
        let mut count = 0;
        while let Some((position, term)) = acknowledged.recv().await {
            assert_eq!(rows.get(&position), Some(&term), "position {position}");
            count += 1;
        }
        println!("{count} acknowledged rows of {}", rows.len());
        assert!(count > 0 && count <= rows.len());
    }
}

/// All parts that have come, once the newest one is this.
async fn until_followed(follower: &mut TailFollower, newest: &TailPart) -> Vec<TailPart> {
    let mut parts = Vec::new();
    for _ in 0..600 {
        while let Some(part) = follower.next().await.unwrap() {
            parts.push(part);
        }
        if parts.last() == Some(newest) {
            return parts;
        }
        sleep(Duration::from_millis(100)).await;
    }
    panic!("the follower never has {newest:?}");
}

#[tokio::test(start_paused = true)]
async fn follower_gets_each_part_once_over_owners_drains_and_files() {
    let store = Arc::new(InMemory::new());
    let reads = node(&store);
    assert!(TailFollower::open(&reads.bucket).await.unwrap().is_none());
    let owns = node(&store);
    let mut tail = owns.own().await;
    tail.put(&part(1, 0, "first")).await.unwrap();
    let mut follower = TailFollower::open(&reads.bucket).await.unwrap().unwrap();
    let mut sent = vec![part(1, 0, "first")];
    let mut got = until_followed(&mut follower, &sent[0]).await;
    assert_eq!(follower.manifest().await.unwrap(), None);
    let mut position = 5;
    for segment in 1..6 {
        // More rows than one file of the database has.
        for number in 0..300_u64 {
            let next = part(segment, position, number.to_le_bytes().to_vec());
            tail.put(&next).await.unwrap();
            position += 8;
            sent.push(next);
        }
        if segment == 3 {
            tail.close().await.unwrap();
            tail = node(&store).own().await;
        }
        got.extend(until_followed(&mut follower, sent.last().unwrap()).await);
        let name = format!("1-{segment}");
        tail.put_manifest(&name, position).await.unwrap();
        tail.drain(segment);
        for _ in 0..600 {
            let newest = follower.manifest().await.unwrap();
            if newest.is_some_and(|newest| newest.name == name && newest.position == position) {
                break;
            }
            sleep(Duration::from_millis(100)).await;
        }
        let newest = follower.manifest().await.unwrap().unwrap();
        assert_eq!(newest.name, name);
    }
    assert_eq!(got, sent);
    // An idle follower sends few requests.
    let before = reads.requests();
    sleep(Duration::from_secs(100)).await;
    let rate = (reads.requests() - before) / 100;
    assert!((2..=3).contains(&rate), "{rate} requests a second");
}

#[tokio::test(start_paused = true)]
async fn follower_that_was_away_too_long_reports_a_hole() {
    let store = Arc::new(InMemory::new());
    let tail = node(&store).own().await;
    tail.put(&part(1, 0, "a")).await.unwrap();
    let reads = node(&store);
    let mut follower = TailFollower::open(&reads.bucket).await.unwrap().unwrap();
    until_followed(&mut follower, &part(1, 0, "a")).await;
    // Rows come and leave with their segment while it does not look.
    tail.put(&part(1, 1, "b")).await.unwrap();
    tail.put_manifest("1-1", 2).await.unwrap();
    tail.drain(1);
    let late = part(1, 3, "late");
    tail.put(&late).await.unwrap();
    let error = loop {
        match follower.next().await {
            Ok(_) => sleep(Duration::from_millis(100)).await,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), TailErrorKind::Damaged);
}
