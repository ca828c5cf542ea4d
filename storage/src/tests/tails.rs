//! The newest records: shared from memory, and from segments where memory has none.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::api::config::ReadStrategy;
use crate::api::engine::{Append as _, ReadLogs as _};
use crate::api::record::{Compression, LogConfig};
use crate::base::ids::Position;
use crate::engine::LocalEngine;
use crate::journal::recent::RECENT_BYTES;

/// Zeros all frames of all files, as if nothing had ever been written.
fn empty_files(disk: &SimDisk) {
    use crate::disk::Disk;
    let names = disk.list("journal").unwrap();
    for name in names.iter().filter(|name| name.ends_with(".seg")) {
        let path = format!("journal/{name}");
        let mut bytes = disk.contents(&path).unwrap();
        bytes[8192..].fill(0);
        disk.replace(&path, bytes);
    }
}

/// Payloads that a scan returns until it waits.
fn given(scan: &mut Box<dyn Scan>) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    while let Some(chunk) = next_chunk(scan) {
        let Some(chunk) = chunk.unwrap() else { break };
        assert!(chunk.gaps.is_empty(), "{:?}", chunk.gaps);
        found.extend(chunk.batches.iter().flat_map(payloads));
    }
    found
}

fn selectors() -> [Selector; 3] {
    [one("a"), Selector::Prefix("a".to_owned()), Selector::All]
}

#[test]
fn pages_and_scans_of_new_records_come_from_memory() {
    let fixture = Fixture::new();
    let expected: Vec<Vec<u8>> = (0..300u32).map(|n| n.to_le_bytes().repeat(200)).collect();
    for data in &expected {
        fixture.append("a", data).unwrap();
    }
    assert!(
        fixture.core.journal.segments.read().len() > 3,
        "the journal has rolled"
    );
    empty_files(&fixture.disk);
    assert_eq!(fixture.contents("a"), expected);
    let last = read_request("a", ReadStart::TailOffset(1));
    assert!(read::page(&fixture.core.store, &last, Reach::Memory).is_ok());
    for selector in selectors() {
        let mut scan = fixture.scan(selector, ScanStart::First, false);
        assert_eq!(given(&mut scan), expected);
    }
}

#[test]
fn followers_share_the_bytes_of_the_group() {
    // Each reader decrypts a body for itself.
    let config = StorageConfig {
        cipher: None,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    let mut scans: Vec<_> = (0..3)
        .flat_map(|_| selectors())
        .map(|selector| fixture.scan(selector, ScanStart::First, true))
        .collect();
    fixture.append("a", &[7; 5000]).unwrap();
    let bodies: Vec<Bytes> = scans
        .iter_mut()
        .map(|scan| {
            let chunk = next_chunk(scan).unwrap().unwrap().unwrap();
            chunk.batches[0].body.clone()
        })
        .collect();
    let places: std::collections::BTreeSet<_> = bodies.iter().map(|body| body.as_ptr()).collect();
    assert_eq!(places.len(), 1, "one copy for all");
}

#[test]
fn a_reader_too_slow_for_memory_goes_on_from_the_segments() {
    let config = StorageConfig {
        segment_bytes: 2 << 20,
        ..small_config()
    };
    for strategy in [ReadStrategy::Pread, ReadStrategy::Mmap] {
        let config = StorageConfig {
            read_strategy: strategy,
            ..config.clone()
        };
        let fixture = Fixture::with(SimDisk::new(), config);
        let mut slow: Vec<_> = selectors()
            .into_iter()
            .map(|selector| fixture.scan(selector, ScanStart::First, true))
            .collect();
        let count = u64::try_from(RECENT_BYTES / (100 << 10) + 20).unwrap();
        let expected: Vec<Vec<u8>> = (0..count)
            .map(|n| vec![n.to_le_bytes()[0]; 100 << 10])
            .collect();
        for data in &expected {
            fixture.append("a", data).unwrap();
        }
        let oldest = read_request("a", ReadStart::First);
        assert!(read::page(&fixture.core.store, &oldest, Reach::Memory).is_err());
        for scan in &mut slow {
            assert_eq!(given(scan), expected);
        }
        assert_eq!(fixture.contents("a"), expected);
    }
}

#[test]
fn a_group_whose_write_failed_is_not_in_memory() {
    let fixture = Fixture::new();
    fixture.append("a", b"kept").unwrap();
    let end = fixture.core.journal.written();
    let recent = |at: Position| fixture.core.journal.recent.at(at, 1);
    assert!(recent(Position::new(end.get() - 8)).is_some());
    let mut ticket = fixture
        .core
        .enqueue(batch(&[("a", &[b"lost"])]), Durability::Written);
    fixture.disk.crash_after(1);
    fixture.core.turn();
    assert!(matches!(
        settled(&mut ticket),
        Some(Err(AppendError::Unknown(_)))
    ));
    assert_eq!(recent(end), None);
    // Memory holds nothing else either: from now on readers see the records on the device.
    assert_eq!(recent(Position::new(end.get() - 8)), None);
}

#[test]
fn a_failed_flush_leaves_nothing_in_memory() {
    let fixture = Fixture::new();
    fixture.append("a", b"kept").unwrap();
    let durable = fixture.core.journal.durable();
    let mut scan = fixture.begin(ScanRequest {
        selector: one("a"),
        start: ScanStart::First,
        until_lsn: None,
        max_records: 0,
        follow: true,
        visibility: Some(Visibility::Written),
        chunk_bytes: 1000,
    });
    let scan = scan.as_mut().unwrap();
    assert_eq!(given(scan), [b"kept"]);
    let mut ticket = fixture
        .core
        .enqueue(batch(&[("a", &[b"lost"])]), Durability::Written);
    fixture.core.turn();
    assert!(settled(&mut ticket).unwrap().is_ok());
    assert!(fixture.core.journal.recent.at(durable, 1).is_some());
    fixture.disk.fail_sync(1);
    fixture.core.journal.flush();
    assert_eq!(fixture.core.journal.recent.at(durable, 1), None);
    assert!(matches!(
        next_chunk(scan),
        Some(Err(ReadError::JournalFailed(_)))
    ));
    assert_eq!(fixture.contents("a"), [b"kept"]);
}

#[test]
fn records_in_memory_are_read_at_once_and_others_by_a_reader_thread() {
    let disk = SimDisk::new();
    let config = StorageConfig {
        segment_bytes: 2 << 20,
        ..small_config()
    };
    let (engine, _) = LocalEngine::open(
        Arc::new(disk),
        config,
        TestClock::new(),
        Arc::new(NoObserver),
    )
    .unwrap();
    let count = RECENT_BYTES / (100 << 10) + 20;
    for _ in 0..count {
        let ticket = engine.submit(
            None,
            batch(&[("a", &[&[1; 100 << 10]])]),
            Some(Durability::Durable),
        );
        ticket.wait().unwrap();
    }
    let last = Lsn::new(count as u64 - 1);
    let mut context = Context::from_waker(Waker::noop());
    let mut near = engine.read(read_request("a", ReadStart::Lsn(last)));
    let Poll::Ready(page) = near.as_mut().poll(&mut context) else {
        panic!("the newest record is in memory");
    };
    assert_eq!(page.unwrap().next_lsn, last.advance(1));
    let mut empty = engine.read(read_request("a", ReadStart::Lsn(last.advance(1))));
    assert!(empty.as_mut().poll(&mut context).is_ready());
    let far = crate::api::ticket::block_on(engine.read(read_request("a", ReadStart::First)));
    let far = far.unwrap();
    assert_eq!(far.batches[0].first_lsn, Lsn::ZERO);
    // The first page took as much as its size allows, and not only records in memory.
    assert!(far.next_lsn >= Lsn::new(9));
}

/// A read that may not wait: its page, or `None` if another thread must read.
fn near(core: &Arc<Core>, request: &ReadRequest) -> Option<Page> {
    match read::page(&core.store, request, Reach::Cached) {
        Err(ReadError::Io(error)) if error.kind() == std::io::ErrorKind::WouldBlock => None,
        page => Some(page.unwrap()),
    }
}

#[test]
fn records_in_the_page_cache_are_read_at_once_if_nothing_needs_the_disk() {
    let fixture = Fixture::new();
    let expected: Vec<Vec<u8>> = (0..60u8).map(|n| vec![n; 3000]).collect();
    for data in &expected {
        fixture.append("a", data).unwrap();
    }
    let segments: Vec<_> = fixture
        .core
        .journal
        .segments
        .read()
        .keys()
        .copied()
        .collect();
    assert!(segments.len() > 3, "the journal has rolled");
    fixture.core.journal.recent.clear();
    let first = ReadRequest {
        max_records: 1,
        ..read_request("a", ReadStart::First)
    };
    let data = |page: Page| payloads(&page.batches[0]);
    assert!(
        near(&fixture.core, &first).is_none(),
        "its file is not open"
    );
    read::page(&fixture.core.store, &first, Reach::Disk).unwrap();
    assert_eq!(data(near(&fixture.core, &first).unwrap()), expected[..1]);
    // The segment that is written is open.
    let last = read_request("a", ReadStart::TailOffset(1));
    assert_eq!(data(near(&fixture.core, &last).unwrap()), expected[59..]);

    // Other threads read indexes.
    let id = fixture
        .core
        .journal
        .segments
        .read()
        .values()
        .next()
        .unwrap()
        .life
        .id;
    fixture.core.indexes.forget([id]);
    assert!(near(&fixture.core, &first).is_none());
    read::page(&fixture.core.store, &first, Reach::Disk).unwrap();
    assert!(near(&fixture.core, &first).is_some());

    // Another thread also reads damaged segments, since the damage must be named.
    empty_files(&fixture.disk);
    assert!(near(&fixture.core, &first).is_none());
    assert!(fixture.core.damages.logs() == (0, 0));
    let damaged = read::page(&fixture.core.store, &first, Reach::Disk);
    assert!(matches!(damaged, Err(ReadError::Quarantined { .. })));
}

#[test]
fn long_decompressing_is_for_a_reader_thread_even_of_few_stored_bytes() {
    let config = StorageConfig {
        segment_bytes: 4 << 20,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    let config = LogConfig {
        compression: Some(Compression::Lz4),
        ..LogConfig::default()
    };
    let created = fixture
        .core
        .create_in_turn(LogName::new("a").unwrap(), config);
    fixture.core.turn();
    crate::api::ticket::block_on(created).unwrap();
    for bytes in [100 << 10, 300 << 10, 100 << 10, 100 << 10] {
        fixture.append("a", &vec![7; bytes]).unwrap();
    }
    fixture.core.journal.recent.clear();
    let records = |lsn, max_records| {
        let request = ReadRequest {
            max_records,
            ..read_request("a", ReadStart::Lsn(Lsn::new(lsn)))
        };
        let page = near(&fixture.core, &request)?;
        Some(page.next_lsn.get() - lsn)
    };
    assert_eq!(records(0, 1), Some(1));
    assert_eq!(records(1, 1), None);
    // Two records were requested, and the first is given.
    assert_eq!(records(2, 2), Some(1));
    assert_eq!(records(3, 1), Some(1));
}

#[test]
fn few_records_are_read_at_once_and_many_or_long_ones_by_a_reader_thread() {
    let config = StorageConfig {
        segment_bytes: 2 << 20,
        ..small_config()
    };
    let disk = Arc::new(SimDisk::new());
    let (engine, _) =
        LocalEngine::open(disk, config, TestClock::new(), Arc::new(NoObserver)).unwrap();
    let append = |data: &[u8]| {
        let ticket = engine.submit(None, batch(&[("a", &[data])]), Some(Durability::Durable));
        ticket.wait().unwrap();
    };
    append(&[1; 1000]);
    append(&[2; 70 << 10]);
    for _ in 0..RECENT_BYTES / (100 << 10) + 20 {
        append(&[3; 100 << 10]);
    }
    let mut context = Context::from_waker(Waker::noop());
    let mut at_once = |lsn: u64, max_records: u32| {
        let request = ReadRequest {
            max_records,
            ..read_request("a", ReadStart::Lsn(Lsn::new(lsn)))
        };
        let mut read = engine.read(request.clone());
        let ready = read.as_mut().poll(&mut context).is_ready();
        if !ready {
            crate::api::ticket::block_on(read).unwrap();
        }
        ready
    };
    at_once(0, 1);
    assert!(at_once(0, 1));
    // Sometimes a reader thread answers before the first poll.
    assert!((0..100).any(|_| !at_once(0, 1000)));
    assert!((0..100).any(|_| !at_once(1, 1)));
}

#[derive(Default)]
struct Wakes(AtomicUsize);

impl std::task::Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

type Given = (Box<dyn Scan>, ScanChunk);

/// A scan that waits for its next chunk, and its number of wake-ups.
struct Follower {
    next: Pin<Box<dyn Future<Output = Given>>>,
    wakes: Arc<Wakes>,
}

async fn next_of(mut scan: Box<dyn Scan>) -> Given {
    let chunk = scan.next().await.unwrap().unwrap();
    (scan, chunk)
}

impl Follower {
    fn new(scan: Box<dyn Scan>) -> Self {
        Self {
            next: Box::pin(next_of(scan)),
            wakes: Arc::default(),
        }
    }

    /// The next chunk, and the cursor after it. Without a chunk, the scan is woken when there may be one.
    fn poll(&mut self) -> Option<(ScanChunk, Bytes)> {
        let waker = Waker::from(Arc::clone(&self.wakes));
        match self.next.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready((scan, chunk)) => {
                let cursor = scan.cursor();
                self.next = Box::pin(next_of(scan));
                Some((chunk, cursor))
            }
            Poll::Pending => None,
        }
    }

    fn wakes(&self) -> usize {
        self.wakes.0.load(Ordering::SeqCst)
    }
}

#[test]
fn a_follower_of_a_prefix_neither_wakes_for_other_logs_nor_reads_them() {
    let config = StorageConfig {
        segment_bytes: 2 << 20,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    fixture.append("p/0", b"0").unwrap();
    let prefix = || Selector::Prefix("p/".to_owned());
    let mut scan = fixture.scan(prefix(), ScanStart::First, true);
    assert_eq!(given(&mut scan), [b"0"]);
    let mut follower = Follower::new(scan);
    assert!(follower.poll().is_none());
    for _ in 0..RECENT_BYTES / (100 << 10) + 20 {
        fixture.append("q", &[1; 100 << 10]).unwrap();
    }
    assert_eq!(follower.wakes(), 0);
    // A reader of these frames would now name damage.
    empty_files(&fixture.disk);
    fixture.append("p/1", b"1").unwrap();
    assert_eq!(follower.wakes(), 1);
    let (chunk, _) = follower.poll().unwrap();
    assert!(chunk.gaps.is_empty() && chunk.caught_up);
    assert_eq!(payloads(&chunk.batches[0]), [b"1"]);
}

#[test]
fn followers_are_woken_by_records_that_they_may_see() {
    let fixture = Fixture::new();
    fixture.append("a", b"0").unwrap();
    let mut followers = Vec::new();
    for visibility in [Visibility::Durable, Visibility::Written] {
        for selector in selectors() {
            let request = ScanRequest {
                selector,
                start: ScanStart::TailOffset(0),
                until_lsn: None,
                max_records: 0,
                follow: true,
                visibility: Some(visibility),
                chunk_bytes: 1000,
            };
            let mut follower = Follower::new(fixture.begin(request).unwrap());
            assert!(follower.poll().unwrap().0.caught_up);
            assert!(follower.poll().is_none());
            followers.push((visibility, follower));
        }
    }
    let mut ticket = fixture
        .core
        .enqueue(batch(&[("a", &[b"1"])]), Durability::Written);
    fixture.core.turn();
    assert!(settled(&mut ticket).unwrap().is_ok());
    for (visibility, follower) in &mut followers {
        let sees = *visibility == Visibility::Written;
        assert_eq!(follower.wakes(), usize::from(sees));
        assert_eq!(follower.poll().is_some(), sees);
        assert!(follower.poll().is_none());
    }
    fixture.core.journal.flush();
    for (visibility, follower) in &mut followers {
        assert_eq!(follower.wakes(), 1, "each record wakes once");
        let sees = *visibility == Visibility::Durable;
        assert_eq!(follower.poll().is_some(), sees);
    }
}

#[test]
fn followers_of_the_same_log_are_counted() {
    let fixture = Fixture::new();
    fixture.append("a", b"0").unwrap();
    fixture.append("b", b"0").unwrap();
    let mut scans = Vec::new();
    for (selector, count) in [(one("a"), 3), (one("b"), 1), (Selector::All, 2)] {
        for _ in 0..count {
            let mut scan = fixture.scan(selector.clone(), ScanStart::First, true);
            assert_eq!(scan.followers(), 0, "it has not waited yet");
            given(&mut scan);
            scans.push((count, scan));
        }
    }
    for (count, scan) in &scans {
        assert_eq!(scan.followers(), *count);
    }
    // Followers count also while they do not wait.
    fixture.append("a", b"1").unwrap();
    assert_eq!(scans[0].1.followers(), 3);
    drop(scans.remove(1));
    assert_eq!(scans[0].1.followers(), 2);
    let mut whole = fixture.scan(one("a"), ScanStart::First, false);
    given(&mut whole);
    assert_eq!(whole.followers(), 0, "it does not follow");
    assert_eq!(scans[0].1.followers(), 2);
}

#[test]
fn a_cursor_of_a_follower_passes_over_records_of_other_logs() {
    let fixture = Fixture::new();
    let prefix = || Selector::Prefix("p/".to_owned());
    let mut scan = fixture.scan(prefix(), ScanStart::First, true);
    assert_eq!(given(&mut scan), Vec::<Vec<u8>>::new());
    let before = scan.cursor();
    fixture.append("q", b"of another").unwrap();
    let cursor = scan.cursor();
    assert_ne!(cursor, before);
    fixture.append("p/1", b"1").unwrap();
    assert_eq!(scan.cursor(), cursor, "not over what was not given");
    // Both cursors resume with the same record.
    for cursor in [before, cursor] {
        let mut resumed = fixture.scan(prefix(), ScanStart::Cursor(cursor), false);
        assert_eq!(given(&mut resumed), [b"1"]);
    }
}
