//! The third published position: the requests that wait for it, the readers that it limits, and the shipped parts of the
//! journal.

use super::cursors::to;
use super::retention::HOUR;
use super::*;
use crate::api::error::{CursorError, RestoreError, SyncError};
use crate::api::record::{GapReason, Retention, SyncMode};
use crate::api::replica::{
    JournalPart, MOST_UNRELEASED, OwnerLease, ReplicaBounds, ReplicaState, Unreplicated,
};
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::{Name, Position};
use crate::base::promise::Awaited;
use crate::disk::Disk;
use crate::format::life::journal_path;
use crate::tools::backup::{ReplicaContent, RestoredAs, clear_unfinished_take_over};

const MAX_LAG: u64 = 1 << 20;

fn config() -> StorageConfig {
    StorageConfig {
        replica: Some(ReplicaBounds { max_lag: MAX_LAG }),
        ..small_config()
    }
}

/// Everything durable behind `from`, in parts of at most `most` bytes.
fn parts(core: &Core, mut from: Position, most: usize) -> Vec<JournalPart> {
    let mut parts = Vec::new();
    while let Some(part) = core.read_part(from, most, Reach::Disk).unwrap() {
        from = part.end;
        parts.push(part);
    }
    parts
}

impl Fixture {
    /// An engine with a replica that has everything so far.
    fn replicated() -> Self {
        let fixture = Self::with(SimDisk::new(), config());
        fixture.ship();
        fixture
    }

    /// Everything durable is replicated.
    pub(super) fn ship(&self) {
        self.core.publish_replicated(self.core.journal.durable());
    }

    /// An append at this level, after one turn.
    fn append_as(&self, log: &str, level: Durability) -> Ticket {
        let ticket = self.core.enqueue(batch(&[(log, &[b"data"])]), level);
        self.core.turn();
        ticket
    }
}

fn poll<T>(awaited: &mut Awaited<T>) -> Option<T> {
    let mut context = Context::from_waker(Waker::noop());
    match Future::poll(Pin::new(awaited), &mut context) {
        Poll::Ready(answer) => Some(answer),
        Poll::Pending => None,
    }
}

#[test]
fn an_ack_names_its_level_and_waits_for_it_alone() {
    let f = Fixture::replicated();
    let mut replicated = f.append_as("a", Durability::Replicated);
    let mut durable = f.append_as("a", Durability::Durable);
    assert!(settled(&mut replicated).is_none());
    let answer = settled(&mut durable).unwrap().unwrap();
    assert_eq!(answer.durability, Durability::Durable);
    assert_eq!(answer.durable_lsns[..], [Lsn::new(2)]);
    assert_eq!(answer.replicated_lsns[..], [Lsn::ZERO]);
    let first_part = parts(&f.core, f.core.journal.settled(), 1).remove(0);
    f.core.publish_replicated(first_part.end);
    let answer = settled(&mut replicated).unwrap().unwrap();
    assert_eq!(answer.durability, Durability::Replicated);
    assert_eq!(answer.replicated_lsns[..], [Lsn::new(1)]);
    assert_eq!(f.core.journal.replica_progress().waiting, 0);
}

#[test]
fn requests_wait_by_the_mode_of_their_log_and_administration_always() {
    let f = Fixture::replicated();
    let config = LogConfig {
        sync_mode: Some(SyncMode::Replicated),
        ..LogConfig::default()
    };
    let mut created = f.core.create_in_turn(LogName::new("r").unwrap(), config);
    f.core.turn();
    let mut append = f.core.enqueue_by_mode(None, batch(&[("r", &[b"1"])]));
    let mut plain = f.core.enqueue_by_mode(None, batch(&[("s", &[b"1"])]));
    let mut fenced = f.core.fence(target("s"), None);
    let mut trimmed = f.core.trim_in_turn(target("s"), Lsn::new(1));
    let mut sync = f.core.sync_in_turn(Durability::Replicated);
    let mut to_device = f.core.sync_in_turn(Durability::Durable);
    f.core.turn();
    assert!(settled(&mut plain).is_some() && poll(&mut to_device).is_some());
    assert!(settled(&mut append).is_none() && poll(&mut created).is_none());
    assert!(poll(&mut fenced).is_none() && poll(&mut trimmed).is_none());
    assert!(poll(&mut sync).is_none());
    f.ship();
    poll(&mut created).unwrap().unwrap();
    poll(&mut fenced).unwrap().unwrap();
    poll(&mut trimmed).unwrap().unwrap();
    poll(&mut sync).unwrap().unwrap();
    settled(&mut append).unwrap().unwrap();
}

#[test]
fn refusals_and_repeats_wait_for_the_state_that_they_reveal() {
    let f = Fixture::replicated();
    f.append("a", b"0").unwrap();
    let conditional = |level| {
        let mut batch = batch(&[("a", &[b"1"])]);
        batch.logs[0].guard.expected_lsn = Some(Lsn::new(7));
        let ticket = f.core.enqueue(batch, level);
        f.core.turn();
        ticket
    };
    let mut at_once = conditional(Durability::Durable);
    let mut later = conditional(Durability::Replicated);
    assert!(settled(&mut at_once).is_some() && settled(&mut later).is_none());
    let mut repeat = batch(&[("p", &[b"1"])]);
    repeat.logs[0].producer = Some(crate::api::record::Producer {
        id: crate::base::ids::Name::new("p").unwrap(),
        epoch: 0,
        sequence: 0,
    });
    f.append_batch(repeat.clone()).unwrap();
    let mut repeated = f.core.enqueue(repeat, Durability::Replicated);
    f.core.turn();
    assert!(settled(&mut repeated).is_none());
    f.ship();
    let refusal = settled(&mut later).unwrap();
    assert!(matches!(refusal, Err(AppendError::ConditionsFailed(_))));
    assert!(settled(&mut repeated).unwrap().unwrap().appends[0].deduplicated);
}

#[test]
fn readers_of_replicated_records_see_them_when_they_are_replicated() {
    let f = Fixture::replicated();
    f.append("a", b"1").unwrap();
    f.ship();
    f.append("a", b"2").unwrap();
    let shown = |visibility| contents(&f.core, "a", visibility).unwrap().len();
    assert_eq!(shown(Visibility::Replicated), 1);
    assert_eq!(shown(Visibility::Durable), 2);
    for selector in [one("a"), Selector::Prefix("a".to_owned())] {
        let request = ScanRequest {
            selector,
            start: ScanStart::First,
            until_lsn: None,
            max_records: 0,
            follow: true,
            visibility: Some(Visibility::Replicated),
            chunk_bytes: 64 << 10,
        };
        let mut scan = f.begin(request).unwrap();
        let records = |chunk: &ScanChunk| chunk.batches.iter().map(|b| b.count).sum::<u32>();
        let before = shown(Visibility::Replicated);
        let chunk = next_chunk(&mut scan).unwrap().unwrap().unwrap();
        assert_eq!(records(&chunk), u32::try_from(before).unwrap());
        // The follower waits, and only the replica wakes it.
        let mut waits = scan.next();
        let count = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&count));
        let mut context = Context::from_waker(&waker);
        assert!(waits.as_mut().poll(&mut context).is_pending());
        f.append("a", b"more").unwrap();
        assert_eq!(count.0.load(std::sync::atomic::Ordering::SeqCst), 0);
        f.ship();
        assert_eq!(count.0.load(std::sync::atomic::Ordering::SeqCst), 1);
        assert!(waits.as_mut().poll(&mut context).is_ready());
    }
}

/// Counts wake-ups.
#[derive(Default)]
pub(super) struct Woken(pub(super) std::sync::atomic::AtomicU32);

impl std::task::Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    }
}

#[test]
fn readers_of_replicated_records_see_no_trim_before_its_time() {
    let f = Fixture::replicated();
    f.append_batch(batch(&[("a", &[b"1", b"2", b"3"])]))
        .unwrap();
    f.ship();
    let mut trimmed = f.core.trim_in_turn(target("a"), Lsn::new(2));
    f.core.turn();
    let first = |visibility| {
        let mut request = read_request("a", ReadStart::First);
        request.visibility = Some(visibility);
        read::page(&f.core.store, &request, Reach::Disk)
            .unwrap()
            .first_lsn
    };
    assert_eq!(first(Visibility::Durable), Lsn::new(2));
    assert_eq!(first(Visibility::Replicated), Lsn::ZERO);
    f.ship();
    assert_eq!(first(Visibility::Replicated), Lsn::new(2));
    poll(&mut trimmed).unwrap().unwrap();
}

#[test]
fn without_a_replica_nothing_is_replicated() {
    let f = Fixture::new();
    let mut ticket = f.append_as("a", Durability::Replicated);
    let refused = AppendError::NotSupported(Durability::Replicated).to_string();
    let answer = settled(&mut ticket).unwrap().unwrap_err();
    assert_eq!(answer.to_string(), refused);
    f.append("a", b"1").unwrap();
    assert!(f.append("a", b"2").unwrap().replicated_lsns.is_empty());
    let asked = contents(&f.core, "a", Visibility::Replicated);
    assert!(matches!(asked, Err(ReadError::NotSupported(_))));
    // A log of that mode comes from a time with a replica.
    let config = LogConfig {
        sync_mode: Some(SyncMode::Replicated),
        ..LogConfig::default()
    };
    let name = LogName::new("a").unwrap();
    drop(f.core.configure_in_turn(name, config));
    f.core.turn();
    let page = f.read("a", 0).unwrap();
    assert_eq!((page.tail_lsn, page.replicated_lsn), (Lsn::new(2), None));
    let mut by_mode = f.core.enqueue_by_mode(None, batch(&[("a", &[b"3"])]));
    let answer = settled(&mut by_mode).unwrap().unwrap_err();
    assert_eq!(answer.to_string(), refused);
}

#[test]
fn appends_are_refused_while_the_replica_is_too_far_behind() {
    let f = Fixture::replicated();
    let large = vec![7; 20_000];
    let mut refused = None;
    for n in 0..200 {
        match f.append("a", &large) {
            Ok(_) => f.core.journal.release(f.core.journal.durable()),
            Err(error) => {
                refused = Some((n, error));
                break;
            }
        }
    }
    let (appended, error) = refused.expect("the lag has a bound");
    assert!(matches!(error, AppendError::ReplicaBehind { behind, .. } if behind > MAX_LAG));
    assert!((40..50).contains(&appended), "{appended}");
    f.ship();
    // Now segments wait for their files.
    let mut refused = None;
    for _ in 0..200 {
        match f.append("a", &large) {
            Ok(_) => f.ship(),
            Err(error) => {
                refused = Some(error);
                break;
            }
        }
    }
    let is_bound = |segments| segments == MOST_UNRELEASED + 1;
    let error = refused.expect("segments wait for their files");
    assert!(matches!(error, AppendError::ReplicaBehind { segments, .. } if is_bound(segments)));
    f.core.journal.release(f.core.journal.durable());
    f.append("a", b"again").unwrap();
}

#[test]
fn cursors_and_retention_wait_while_the_replica_is_too_far_behind() {
    let bound = LogConfig {
        retention: Some(Box::new(Retention {
            max_records: Some(1),
            ..Retention::default()
        })),
        ..LogConfig::default()
    };
    let f = Fixture::replicated();
    let mut created = f.core.create_in_turn(LogName::new("a").unwrap(), bound);
    f.core.turn();
    f.append_batch(batch(&[("a", &[b"1", b"2"])])).unwrap();
    f.ship();
    poll(&mut created).unwrap().unwrap();
    f.core.journal.stop_replication(Unreplicated::BucketDown);
    // The bucket is away, and a consumer moves its cursor on.
    let commit = || {
        let moved = to("a", "c", 1);
        let mut moved = Box::pin(f.core.commit_cursor(moved));
        let mut context = Context::from_waker(Waker::noop());
        if let Poll::Ready(refused) = moved.as_mut().poll(&mut context) {
            return refused;
        }
        f.core.turn();
        match moved.as_mut().poll(&mut context) {
            Poll::Ready(answer) => answer,
            Poll::Pending => panic!("DURABLE does not wait for the bucket"),
        }
    };
    let coming = || {
        let log = f.core.logs.by_name("a").unwrap();
        let state = log.state.read();
        let extras = state.extras.as_deref().unwrap();
        extras.cursors[&Name::new("c").unwrap()].coming()
    };
    let mut refused = None;
    for n in 0..20_000 {
        if let Err(error) = commit() {
            refused = Some((n, error));
            break;
        }
        assert!(coming() <= 2, "{}", coming());
    }
    let (moves, error) = refused.expect("the lag has a bound");
    assert!(moves > 1000, "{moves}");
    assert!(
        matches!(
            error,
            CursorError::Append(AppendError::ReplicaBehind { .. })
        ),
        "{error:?}"
    );
    let end = f.core.journal.written();
    assert!(f.core.retainer.begin_pass().is_none());
    f.clock.advance(30 * 24 * HOUR);
    assert!(f.core.retainer.idle_producers().is_empty());
    let left = poll(&mut f.core.inbox.leave_segment()).unwrap();
    assert!(matches!(
        left,
        Err(SyncError::Refused(AppendError::ReplicaBehind { .. }))
    ));
    assert_eq!(f.core.journal.written(), end);
    f.core.journal.resume_replication();
    f.ship();
    f.core.journal.release(f.core.journal.durable());
    commit().unwrap();
    assert!(f.core.retainer.begin_pass().is_some());
}

#[test]
fn positions_that_segments_left_unused_do_not_count_as_lag() {
    let f = Fixture::replicated();
    let leave = || {
        let left = f.core.inbox.leave_segment();
        f.core.turn();
        poll(&mut Box::pin(left)).unwrap().unwrap();
        f.core.journal.release(f.core.journal.durable());
    };
    let behind = || f.core.journal.replica_progress().behind;
    // The bytes that a shipper would store.
    let unshipped = || {
        let parts = parts(&f.core, f.core.journal.settled(), 1);
        parts
            .iter()
            .map(|part| part.bytes.len() as u64)
            .sum::<u64>()
    };
    f.append("a", b"0").unwrap();
    f.ship();
    assert_eq!(behind(), 0);
    for _ in 0..40 {
        leave();
        assert_eq!(behind(), unshipped());
        f.append("a", &[1; 1000]).unwrap();
        assert_eq!(behind(), unshipped());
    }
    let progress = f.core.journal.replica_progress();
    assert!(progress.durable.since(progress.replicated) > 2 * MAX_LAG);
    for part in parts(&f.core, progress.replicated, 1) {
        f.core.publish_replicated(part.end);
        assert_eq!(behind(), unshipped());
    }
    assert_eq!(behind(), 0);
}

#[test]
fn a_replica_that_is_a_little_behind_wakes_readers_after_many_flushes() {
    let f = Fixture::replicated();
    let request = ScanRequest {
        selector: one("a"),
        start: ScanStart::First,
        until_lsn: None,
        max_records: 0,
        follow: true,
        visibility: Some(Visibility::Replicated),
        chunk_bytes: 64 << 10,
    };
    f.append("a", b"0").unwrap();
    f.ship();
    let mut scan = f.begin(request).unwrap();
    next_chunk(&mut scan).unwrap().unwrap().unwrap();
    let mut waits = scan.next();
    let count = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&count));
    let mut context = Context::from_waker(&waker);
    assert!(waits.as_mut().poll(&mut context).is_pending());
    let mut ends = Vec::new();
    for _ in 0..1000 {
        f.append("b", b"1").unwrap();
        f.append("a", b"1").unwrap();
        ends.push(f.core.journal.durable());
    }
    f.core.publish_replicated(ends[500]);
    assert_eq!(count.0.load(std::sync::atomic::Ordering::SeqCst), 1);
    assert!(waits.as_mut().poll(&mut context).is_ready());
}

#[test]
fn a_lost_replica_leaves_an_unknown_outcome_and_refuses_the_rest() {
    let f = Fixture::replicated();
    f.append("a", b"0").unwrap();
    let mut in_flight = f.append_as("a", Durability::Replicated);
    let mut refusal = batch(&[("a", &[b"1"])]);
    refusal.logs[0].guard.expected_lsn = Some(Lsn::new(9));
    let mut refusal = f.core.enqueue(refusal, Durability::Replicated);
    let mut fence = f.core.fence(target("f"), None);
    f.core.turn();
    f.core.journal.stop_replication(Unreplicated::BucketDown);
    let unknown = |answer| matches!(answer, Some(Err(AppendError::ReplicationUnknown)));
    assert!(unknown(settled(&mut in_flight)));
    let answer = settled(&mut refusal).unwrap();
    assert!(
        matches!(answer, Err(AppendError::BucketDown)),
        "it did nothing"
    );
    assert!(poll(&mut fence).unwrap().is_err());
    let mut later = f.append_as("a", Durability::Replicated);
    assert!(matches!(
        settled(&mut later),
        Some(Err(AppendError::BucketDown))
    ));
    f.append("a", b"DURABLE goes on").unwrap();
    assert!(poll(&mut f.core.fence(target("f"), None)).unwrap().is_err());
    f.core.journal.resume_replication();
    let mut after = f.append_as("a", Durability::Replicated);
    f.ship();
    settled(&mut after).unwrap().unwrap();
    let moved = Unreplicated::Moved {
        owner: "other:1".to_owned(),
        term: 2,
    };
    f.core.journal.stop_replication(moved);
    f.core.journal.resume_replication();
    let answer = f.append("a", b"another node owns the store").unwrap_err();
    assert!(matches!(answer, AppendError::Moved { term: 2, .. }));
}

/// A lease that a test ends.
struct TestLease(std::sync::atomic::AtomicBool);

impl OwnerLease for TestLease {
    fn holds(&self) -> bool {
        self.0.load(std::sync::atomic::Ordering::SeqCst)
    }
}

#[test]
fn without_its_lease_a_node_answers_only_with_records_that_are_replicated() {
    let f = Fixture::replicated();
    let lease = Arc::new(TestLease(true.into()));
    let replication = f.core.journal.replication().unwrap();
    replication.hold_lease(Arc::clone(&lease) as Arc<dyn OwnerLease>);
    f.append("a", b"0").unwrap();
    f.ship();
    let holds = |holds| lease.0.store(holds, std::sync::atomic::Ordering::SeqCst);
    // Requests that were accepted before the lease ended.
    let mut replicated = f.append_as("a", Durability::Replicated);
    let mut durable = f
        .core
        .enqueue(batch(&[("a", &[b"d"])]), Durability::Durable);
    let mut written = f
        .core
        .enqueue(batch(&[("a", &[b"w"])]), Durability::Written);
    let mut wrong = batch(&[("a", &[b"1"])]);
    wrong.logs[0].guard.expected_lsn = Some(Lsn::new(99));
    let mut refusal = f.core.enqueue(wrong, Durability::Durable);
    holds(false);
    f.core.turn();
    for ticket in [&mut durable, &mut written] {
        let answer = settled(ticket).unwrap();
        assert!(
            matches!(answer, Err(AppendError::ReplicationUnknown)),
            "another node may have taken over: {answer:?}"
        );
    }
    let answer = settled(&mut refusal).unwrap();
    assert!(matches!(answer, Err(AppendError::BucketDown)), "{answer:?}");
    for level in [
        Durability::Written,
        Durability::Durable,
        Durability::Replicated,
    ] {
        let answer = settled(&mut f.append_as("a", level)).unwrap();
        assert!(matches!(answer, Err(AppendError::BucketDown)), "{answer:?}");
    }
    // The bucket confirms these: no other node owned the store then.
    f.ship();
    settled(&mut replicated).unwrap().unwrap();

    assert!(matches!(f.read("a", 0), Err(ReadError::LeaseLost)));
    let stat = || f.core.stat(&target("a"), None, None);
    assert!(matches!(stat(), Err(ReadError::LeaseLost)));
    // A refusal says something about the store, too.
    assert!(matches!(f.read("none", 0), Err(ReadError::LeaseLost)));
    let name = Name::new("c").unwrap();
    for log in ["a", "none"] {
        let cursor = f.core.cursor(&target(log), &name);
        assert!(
            matches!(cursor, Err(CursorError::Append(AppendError::BucketDown))),
            "{cursor:?}"
        );
    }
    let scan = || contents(&f.core, "a", Visibility::Written);
    assert!(matches!(scan(), Err(ReadError::LeaseLost)));
    holds(true);
    f.append("a", b"again").unwrap();
    f.read("a", 0).unwrap();
    stat().unwrap();
    // Another node owns the store, and the lease holds.
    f.core.journal.stop_replication(Unreplicated::Moved {
        owner: "other:1".to_owned(),
        term: 2,
    });
    assert!(matches!(f.read("a", 0), Err(ReadError::LeaseLost)));
}

#[test]
fn lag_counts_the_records_of_durable_groups_that_are_not_replicated() {
    let f = Fixture::replicated();
    let lag = || f.core.journal.lag_records();
    assert_eq!(lag(), 0);
    f.append("a", b"1").unwrap();
    f.append_batch(batch(&[("a", &[b"2", b"3"]), ("b", &[b"4"])]))
        .unwrap();
    assert_eq!(lag(), 4);
    // A fence is no record, and bytes that are not durable yet do not count.
    drop(f.core.fence(target("a"), None));
    f.core.turn();
    drop(f.append_as("b", Durability::Written));
    assert_eq!(lag(), 4);
    let first_part = parts(&f.core, f.core.journal.settled(), 1).remove(0);
    f.core.publish_replicated(first_part.end);
    assert_eq!(lag(), 3);
    f.core.journal.flush();
    assert_eq!(lag(), 4);
    let state = || f.core.journal.replica_progress().state;
    assert_eq!(state(), ReplicaState::Serving);
    f.core.journal.stop_replication(Unreplicated::BucketDown);
    assert_eq!(state(), ReplicaState::BucketDown);
    f.ship();
    assert_eq!(lag(), 0);
    f.core.journal.resume_replication();
    assert_eq!(state(), ReplicaState::Serving);
    f.core.journal.stop_replication(Unreplicated::Moved {
        owner: "other:1".to_owned(),
        term: 2,
    });
    assert_eq!(state(), ReplicaState::Fenced);
    assert!(f.core.journal.replica_progress().ended);
}

#[test]
fn parts_are_the_bytes_of_the_segments_in_whole_groups() {
    let f = Fixture::replicated();
    for n in 0..200usize {
        let data = vec![u8::try_from(n).unwrap(); n * 40];
        f.append(["a", "b"][n % 2], &data).unwrap();
        f.ship();
        f.core.journal.release(f.core.journal.durable());
    }
    let groups = parts(&f.core, Position::ZERO, 1);
    f.core.journal.recent.clear();
    let from_file = parts(&f.core, Position::ZERO, 1);
    assert!(groups == from_file, "one group in each part");
    let all = parts(&f.core, Position::ZERO, 1 << 20);
    let large = parts(&f.core, Position::ZERO, 5_000);
    assert!(groups.len() > 200 && all.len() > 3 && large.len() > all.len());
    for parts in [&groups, &large, &all] {
        let mut at = None;
        for part in parts {
            let segment = f.core.journal.segment_at(part.position).unwrap();
            let file = f.disk.contents(&journal_path(part.segment)).unwrap();
            let offset = usize::try_from(segment.offset(part.position)).unwrap();
            assert_eq!(part.bytes, file[offset..offset + part.bytes.len()]);
            assert!(at == Some(part.position) || part.position == segment.base);
            let begins = groups.iter().any(|group| group.position == part.position);
            let ends = groups.iter().any(|group| group.end == part.end);
            assert!(begins && ends, "whole groups");
            assert!(
                part.bytes.len() <= 5_000 + 8_192 + usize::try_from(LIFE_BYTES).unwrap()
                    || parts.len() == all.len()
            );
            at = Some(part.end);
        }
        assert_eq!(at, Some(f.core.journal.durable()));
    }
}

#[test]
fn segments_that_no_file_of_the_replica_holds_are_not_sorted() {
    let config = StorageConfig {
        sorter_step_bytes: 1,
        ..config()
    };
    let f = Fixture::with(SimDisk::new(), config);
    f.ship();
    let data = vec![1; 20_000];
    for _ in 0..20 {
        f.append("a", &data).unwrap();
        f.ship();
    }
    f.core.turn();
    while f.core.sort_in_turn().unwrap() {}
    assert!(f.core.journal.runs().is_empty());
    let third = f
        .core
        .journal
        .segments
        .read()
        .values()
        .nth(3)
        .cloned()
        .unwrap();
    f.core.journal.release(third.end.read().unwrap());
    while f.core.sort_in_turn().unwrap() {}
    let sorted = f.core.journal.sorted_end();
    assert!(
        sorted > Position::ZERO && sorted <= third.limit(),
        "{sorted}"
    );
    let gone = f
        .core
        .read_part(Position::ZERO, 1, Reach::Disk)
        .unwrap_err();
    assert_eq!(gone.kind(), std::io::ErrorKind::NotFound);
}

#[test]
fn a_segment_has_no_index_before_it_is_replicated() {
    let f = Fixture::replicated();
    let data = vec![1; 20_000];
    for _ in 0..6 {
        f.append("a", &data).unwrap();
    }
    // The records lie in finished segments, and memory still lists them.
    assert_eq!(contents(&f.core, "a", Visibility::Replicated).ok(), None);
    let first = f.core.journal.segment_at(Position::ZERO).unwrap();
    assert!(!first.is_indexed());
    f.ship();
    f.core.turn();
    assert!(first.is_indexed());
    assert_eq!(
        contents(&f.core, "a", Visibility::Replicated)
            .unwrap()
            .len(),
        6
    );
}

fn restored(
    f: &Fixture,
    parts: &[JournalPart],
    restored_as: RestoredAs,
) -> Result<SimDisk, RestoreError> {
    let disk = SimDisk::new();
    restored_on(&disk, f, parts, restored_as)?;
    Ok(disk)
}

fn restored_on(
    disk: &SimDisk,
    f: &Fixture,
    parts: &[JournalPart],
    restored_as: RestoredAs,
) -> Result<(), RestoreError> {
    let content = ReplicaContent {
        store_id: f.core.store_id,
        files: None,
        parts: &mut parts.iter().cloned().map(Ok),
        until: None,
    };
    let target: Arc<dyn Disk> = Arc::new(disk.clone());
    content.restore(&target, &f.config, restored_as, &mut |_| {})?;
    Ok(())
}

#[test]
fn a_take_over_that_is_cut_off_in_any_call_goes_on() {
    let f = Fixture::replicated();
    for number in 0..8_u8 {
        f.append("a", &[number; 9_000]).unwrap();
    }
    let shipped = parts(&f.core, Position::ZERO, 1 << 20);
    let mut again = 0;
    for nth in 1.. {
        let disk = SimDisk::seeded(nth);
        disk.crash_after(nth);
        let done = restored_on(&disk, &f, &shipped, RestoredAs::Store);
        if !disk.is_crashed() {
            done.unwrap();
            break;
        }
        disk.crash(nth);
        for then in [0, nth % 7 + 1] {
            let disk = disk.copy();
            if then > 0 {
                // The power goes while the files are removed, too.
                disk.crash_after(then);
                let _ = clear_unfinished_take_over(&disk);
                disk.crash(then);
            }
            clear_unfinished_take_over(&disk).unwrap();
            let has_store = disk.list("").unwrap().iter().any(|name| name == "FORMAT");
            if !has_store {
                again += 1;
                restored_on(&disk, &f, &shipped, RestoredAs::Store).unwrap();
            }
            let next = Fixture::with(disk, config());
            next.ship();
            assert_eq!(
                next.contents("a").len(),
                8,
                "cut in call {nth}, then {then}"
            );
        }
    }
    println!("fetched again after {again} cuts");
    assert!(again > 20, "{again}");
}

#[test]
fn files_of_a_copy_that_was_cut_off_stay() {
    let f = Fixture::replicated();
    f.append("a", b"1").unwrap();
    let shipped = parts(&f.core, Position::ZERO, 1 << 20);
    let disk = SimDisk::new();
    disk.crash_after(10);
    restored_on(&disk, &f, &shipped, RestoredAs::Copy).unwrap_err();
    disk.crash(1);
    let before = disk.fingerprint();
    assert!(!clear_unfinished_take_over(&disk).unwrap());
    assert_eq!(disk.fingerprint(), before);
    // A mark without a word says nothing about the records beside it.
    let f = Fixture::replicated();
    f.append("a", b"1").unwrap();
    let disk = f.disk.copy();
    disk.replace("RESTORING", Vec::new());
    let before = disk.fingerprint();
    assert!(!clear_unfinished_take_over(&disk).unwrap());
    assert_eq!(disk.fingerprint(), before);
}

#[test]
fn the_next_owner_names_what_was_lost_and_readers_beyond_get_a_gap() {
    let f = Fixture::replicated();
    f.append("a", b"kept").unwrap();
    let shipped = parts(&f.core, Position::ZERO, 1 << 20);
    let kept = f.core.journal.durable();
    let lost = f.append_batch(batch(&[("a", &[b"x", b"y"])])).unwrap();
    let mut scan = f.scan(one("a"), ScanStart::First, false);
    while next_chunk(&mut scan).unwrap().unwrap().is_some() {}
    let cursor = scan.cursor();
    let before = f.core.journal.recovery_epoch;

    let disk = restored(&f, &shipped, RestoredAs::Store).unwrap();
    let next = Fixture::with(disk, config());
    assert!(!next.report.clean);
    assert_eq!(next.report.recovery_epoch, before.next());
    assert_eq!(next.core.survived(before), Some(kept));
    assert!(lost.position.unwrap() >= kept);
    next.ship();
    assert_eq!(next.contents("a"), [b"kept"]);
    let again = next.append("a", b"new").unwrap();
    assert_eq!(
        again.appends[0].first_lsn,
        Lsn::new(1),
        "lsns of lost records"
    );
    assert!(again.position.unwrap() > lost.position.unwrap().advance(1 << 31));
    let mut resumed = next.scan(one("a"), ScanStart::Cursor(cursor), false);
    let chunk = next_chunk(&mut resumed).unwrap().unwrap().unwrap();
    let gap = &chunk.gaps[0];
    assert_eq!(gap.reason, GapReason::Lost);
    assert_eq!((gap.from, gap.to), (Some(Lsn::new(1)), Some(Lsn::new(3))));
}

#[test]
fn a_copy_of_a_replica_stays_apart_from_the_store() {
    let f = Fixture::replicated();
    f.append("a", b"1").unwrap();
    let shipped = parts(&f.core, Position::ZERO, 100);
    let disk = restored(&f, &shipped, RestoredAs::Copy).unwrap();
    let copy = Fixture::on(disk);
    assert_eq!(copy.contents("a"), [b"1"]);
    assert!(copy.report.recovery_epoch.get() > f.core.journal.recovery_epoch.get() + 1000);
    let position = copy.append("a", b"2").unwrap().position.unwrap();
    assert!(position.get() > 1 << 50);
}

#[test]
fn a_replica_with_a_missing_part_is_refused() {
    let f = Fixture::replicated();
    let data = vec![3; 9_000];
    for _ in 0..16 {
        f.append("a", &data).unwrap();
    }
    let whole = parts(&f.core, Position::ZERO, 1);
    restored(&f, &whole, RestoredAs::Store).unwrap();
    for missing in 0..whole.len() - 1 {
        let mut parts = whole.clone();
        parts.remove(missing);
        let refused = restored(&f, &parts, RestoredAs::Store);
        let found = matches!(refused, Err(RestoreError::Damaged { .. }));
        assert!(found, "part {missing} is missing");
    }
}
