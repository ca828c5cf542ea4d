//! Scans: ranges, prefixes, everything; following, resuming, gaps.

use std::pin::pin;

use super::replica::Woken;
use super::*;
use crate::api::engine::BoxFuture;
use crate::api::record::{GapReason, SyncMode};
use crate::base::metrics::{NoObserver, Observer};
use crate::base::threads::Workers;
use crate::read::scan::begin_without_blocking;

/// A record as a scan gave it: log, lsn, payload.
type Seen = (String, u64, Vec<u8>);

/// Every record of a chunk.
fn records(chunk: &ScanChunk) -> Vec<Seen> {
    let mut records = Vec::new();
    for batch in &chunk.batches {
        for (lsn, data) in (batch.first_lsn.get()..).zip(payloads(batch)) {
            records.push((batch.log.as_str().to_owned(), lsn, data));
        }
    }
    records
}

/// Reads a scan up to its end, or until it waits. Returns all records and chunks.
fn drain(scan: &mut Box<dyn Scan>) -> (Vec<Seen>, Vec<ScanChunk>) {
    let (mut found, mut chunks) = (Vec::new(), Vec::new());
    while let Some(chunk) = next_chunk(scan) {
        let Some(chunk) = chunk.unwrap() else { break };
        found.extend(records(&chunk));
        chunks.push(chunk);
    }
    (found, chunks)
}

fn lsns(found: &[Seen]) -> Vec<u64> {
    found.iter().map(|(_, lsn, _)| *lsn).collect()
}

fn mixed() -> Fixture {
    let fixture = Fixture::new();
    for index in 0..40u8 {
        let log = ["p/1", "p/2", "q"][usize::from(index) % 3];
        fixture
            .append_batch(batch(&[(log, &[&[index], &[index, index]])]))
            .unwrap();
    }
    fixture
}

#[test]
fn a_scan_of_everything_is_in_commit_order_and_each_log_in_lsn_order() {
    let fixture = mixed().restart();
    let mut scan = fixture.scan(Selector::All, ScanStart::First, false);
    let (found, chunks) = drain(&mut scan);
    let order: Vec<u8> = found.iter().map(|(_, _, data)| data[0]).collect();
    assert!(order.is_sorted() && order.len() == 80);
    assert!(chunks.last().unwrap().caught_up);
    let mut scan = fixture.scan(Selector::Prefix("p/".to_owned()), ScanStart::First, false);
    let (found, _) = drain(&mut scan);
    assert!(found.iter().all(|(log, _, _)| log.starts_with("p/")));
    assert_eq!(found.len(), 54);
}

/// A scan that gives one record in each chunk, and does not follow.
fn slow_scan(fixture: &Fixture, selector: Selector) -> Box<dyn Scan> {
    let request = ScanRequest {
        selector,
        start: ScanStart::First,
        until_lsn: None,
        max_records: 0,
        follow: false,
        visibility: None,
        chunk_bytes: 1,
    };
    fixture.begin(request).unwrap()
}

#[test]
fn plain_scan_ends_at_the_tail_of_its_beginning() {
    for selector in [one("p/1"), Selector::Prefix("p/".to_owned()), Selector::All] {
        let fixture = mixed();
        let mut whole = fixture.scan(selector.clone(), ScanStart::First, false);
        let (expected, _) = drain(&mut whole);
        let mut scan = slow_scan(&fixture, selector.clone());
        let (mut found, mut appended, mut caught_up) = (Vec::new(), 0, false);
        // A reader that appends each record to a log that it reads.
        while let Some(chunk) = next_chunk(&mut scan).expect("it does not wait").unwrap() {
            found.extend(records(&chunk));
            caught_up = chunk.caught_up;
            fixture.append("p/1", b"later").unwrap();
            appended += 1;
            assert!(found.len() <= expected.len(), "it reads later records");
        }
        assert_eq!(found, expected);
        assert!(caught_up, "the last chunk reaches the end of the scan");
        // Its cursor goes on with the records that came later.
        let start = ScanStart::Cursor(scan.cursor());
        let (later, _) = drain(&mut fixture.scan(selector, start, false));
        assert_eq!(later.len(), appended);
        assert!(later.iter().all(|(_, _, data)| data == b"later"));
    }
}

#[test]
fn a_cursor_resumes_between_any_two_records() {
    let fixture = mixed();
    for selector in [Selector::All, Selector::Prefix("p/".to_owned()), one("p/1")] {
        let mut whole = fixture.scan(selector.clone(), ScanStart::First, false);
        let (expected, _) = drain(&mut whole);
        for size in 1..5 {
            let mut found = Vec::new();
            let mut start = ScanStart::First;
            while found.len() < expected.len() {
                let request = ScanRequest {
                    selector: selector.clone(),
                    start: start.clone(),
                    until_lsn: None,
                    max_records: size,
                    follow: false,
                    visibility: None,
                    chunk_bytes: 1,
                };
                let mut scan = fixture.begin(request).unwrap();
                let (part, chunks) = drain(&mut scan);
                assert!(!part.is_empty() && part.len() as u64 <= size);
                found.extend(part);
                start = ScanStart::Cursor(chunks.last().unwrap().cursor.clone());
            }
            assert_eq!(found, expected, "{selector:?} in steps of {size}");
        }
    }
}

#[test]
fn a_following_scan_sees_a_later_append_and_says_when_it_caught_up() {
    let fixture = mixed();
    for selector in [Selector::All, one("q")] {
        let start = ScanStart::TailOffset(0);
        let mut scan = fixture.scan(selector, start, true);
        let (found, chunks) = drain(&mut scan);
        assert!(found.is_empty() && chunks.len() == 1 && chunks[0].caught_up);
        fixture.append("q", b"new").unwrap();
        let (found, _) = drain(&mut scan);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].2, b"new");
    }
}

#[test]
fn a_plain_scan_of_a_missing_log_is_refused() {
    let fixture = Fixture::new();
    let refused = fixture.try_scan(one("later"), ScanStart::First, false);
    assert!(matches!(
        refused,
        Err(ReadError::Target(TargetError::NotFound { .. }))
    ));
}

/// A follower's first chunk: it has caught up and given nothing.
fn caught_up_with_nothing(scan: &mut Box<dyn Scan>) -> ScanStart {
    let chunk = next_chunk(scan).expect("at once").unwrap().unwrap();
    assert!(chunk.caught_up && chunk.batches.is_empty() && chunk.gaps.is_empty());
    assert!(!chunk.cursor.is_empty());
    assert_eq!(scan.cursor(), chunk.cursor, "heartbeats carry it too");
    assert!(next_chunk(scan).is_none(), "said once");
    ScanStart::Cursor(chunk.cursor)
}

#[test]
fn a_follower_of_a_missing_log_gets_all_of_it() {
    let later = Fixture::new().clock.now().saturating_add_micros(1 << 40);
    for start in [
        ScanStart::First,
        ScanStart::Lsn(Lsn::ZERO),
        ScanStart::TailOffset(0),
        ScanStart::TailOffset(1),
        ScanStart::Time(later),
    ] {
        for count in [1, 3] {
            let fixture = Fixture::new();
            fixture.append("other", b"0").unwrap();
            let mut scan = fixture.scan(one("later"), start.clone(), true);
            let cursor = caught_up_with_nothing(&mut scan);
            let mut resumed = fixture.scan(one("later"), cursor.clone(), true);
            let cursor_again = caught_up_with_nothing(&mut resumed);
            let records: Vec<&[u8]> = vec![b"x"; count];
            fixture.append_batch(batch(&[("later", &records)])).unwrap();
            fixture.append("later", b"y").unwrap();
            let expected: Vec<u64> = (0..=count as u64).collect();
            for scan in [&mut scan, &mut resumed] {
                assert_eq!(lsns(&drain(scan).0), expected, "{start:?}");
            }
            drop((scan, resumed));
            let fixture = fixture.restart();
            for cursor in [cursor, cursor_again] {
                let mut resumed = fixture.scan(one("later"), cursor, true);
                assert_eq!(lsns(&drain(&mut resumed).0), expected, "{start:?}");
            }
        }
    }
}

#[test]
fn a_follower_of_a_missing_prefix_gets_all_of_it() {
    for start in [ScanStart::First, ScanStart::TailOffset(0)] {
        let fixture = Fixture::new();
        for selector in [Selector::Prefix("later/".to_owned()), Selector::All] {
            let mut scan = fixture.scan(selector.clone(), start.clone(), true);
            let cursor = caught_up_with_nothing(&mut scan);
            let name = format!("later/{selector:?}");
            let records: &[&[u8]] = &[b"1", b"2"];
            fixture.append_batch(batch(&[(&name, records)])).unwrap();
            assert_eq!(lsns(&drain(&mut scan).0), [0, 1]);
            let mut resumed = fixture.scan(selector, cursor, true);
            assert_eq!(lsns(&drain(&mut resumed).0), [0, 1]);
            if start == ScanStart::First {
                break;
            }
        }
    }
}

#[test]
fn an_lsn_beyond_a_missing_log_is_refused_at_once() {
    let fixture = Fixture::new();
    let refused = fixture.try_scan(one("later"), ScanStart::Lsn(Lsn::new(1)), true);
    assert!(matches!(
        refused,
        Err(ReadError::BeyondTail {
            tail: Lsn::ZERO,
            ..
        })
    ));
}

#[test]
fn a_cursor_from_before_its_log_names_trimmed_records() {
    let fixture = Fixture::new();
    let mut scan = fixture.scan(one("later"), ScanStart::TailOffset(0), true);
    let cursor = caught_up_with_nothing(&mut scan);
    let records: &[&[u8]] = &[b"1", b"2", b"3"];
    fixture.append_batch(batch(&[("later", records)])).unwrap();
    let trimmed = fixture.core.trim_in_turn(target("later"), Lsn::new(2));
    fixture.core.turn();
    crate::api::ticket::block_on(trimmed).unwrap();
    for scan in [&mut scan, &mut fixture.scan(one("later"), cursor, true)] {
        let (found, chunks) = drain(scan);
        let gap = &chunks[0].gaps[0];
        assert_eq!((gap.from, gap.to), (Some(Lsn::ZERO), Some(Lsn::new(2))));
        assert_eq!(gap.reason, GapReason::Trimmed);
        assert_eq!(lsns(&found), [2]);
    }
}

#[test]
fn a_log_that_came_and_went_while_awaited_is_named() {
    for again in [false, true] {
        let fixture = Fixture::new();
        let mut scan = fixture.scan(one("later"), ScanStart::First, true);
        let cursor = caught_up_with_nothing(&mut scan);
        fixture.append("later", b"1").unwrap();
        let deleted = fixture.core.delete_in_turn(target("later"));
        fixture.core.turn();
        crate::api::ticket::block_on(deleted).unwrap();
        let mut scans = vec![fixture.scan(one("later"), cursor, true)];
        if again {
            fixture.append("later", b"2").unwrap();
            // This scan begins only now, and finds the second log.
            scans.push(scan);
        }
        for scan in &mut scans {
            let chunk = next_chunk(scan).unwrap().unwrap().unwrap();
            let gap = &chunk.gaps[0];
            assert_eq!((gap.from, gap.to), (Some(Lsn::ZERO), Some(Lsn::new(1))));
            assert_eq!(gap.reason, GapReason::Deleted);
            let ended = next_chunk(scan).unwrap();
            assert!(matches!(
                ended,
                Err(ReadError::Target(TargetError::NotFound { .. }))
            ));
        }
    }
}

#[test]
fn a_log_made_with_its_own_sync_mode_is_followed_by_that() {
    let fixture = Fixture::new();
    let mut scan = fixture.scan(one("later"), ScanStart::First, true);
    caught_up_with_nothing(&mut scan);
    let config = LogConfig {
        sync_mode: Some(SyncMode::Manual),
        ..LogConfig::default()
    };
    let created = fixture
        .core
        .create_in_turn(LogName::new("later").unwrap(), config);
    fixture.core.turn();
    crate::api::ticket::block_on(created).unwrap();
    assert!(next_chunk(&mut scan).is_none());
    let mut ticket = fixture
        .core
        .enqueue(batch(&[("later", &[b"in memory"])]), Durability::Accepted);
    fixture.core.turn();
    assert!(settled(&mut ticket).unwrap().is_ok());
    assert_eq!(lsns(&drain(&mut scan).0), [0]);
}

#[test]
fn a_scan_from_the_tail_begins_when_it_is_asked_for() {
    let fixture = mixed();
    for follow in [false, true] {
        let tail = fixture.contents("q").len() as u64;
        let mut scan = fixture.scan(one("q"), ScanStart::TailOffset(1), follow);
        fixture.append("q", b"new").unwrap();
        let expected: &[u64] = match follow {
            true => &[tail - 1, tail],
            false => &[tail - 1],
        };
        assert_eq!(lsns(&drain(&mut scan).0), expected);
    }
}

#[test]
fn a_dropped_wait_leaves_no_waiter_behind() {
    let fixture = mixed();
    let mut scan = fixture.scan(one("q"), ScanStart::TailOffset(0), true);
    drain(&mut scan);
    for _ in 0..1000 {
        assert!(next_chunk(&mut scan).is_none());
    }
    drop(scan);
    assert_eq!(
        fixture
            .core
            .followers
            .load(std::sync::atomic::Ordering::SeqCst),
        0
    );
}

#[test]
fn reads_begin_by_time_and_from_the_tail() {
    let fixture = Fixture::new();
    let start = fixture.clock.now();
    for index in 0..50u8 {
        fixture.clock.advance(1000);
        fixture.append("a", &[index]).unwrap();
    }
    let at = |micros| ReadStart::Time(start.saturating_add_micros(micros));
    let first = |start| {
        fixture
            .read_from("a", start)
            .unwrap()
            .batches
            .first()
            .map(|b| b.first_lsn)
    };
    assert_eq!(first(at(0)), Some(Lsn::ZERO));
    assert_eq!(first(at(10_000)), Some(Lsn::new(9)));
    assert_eq!(first(at(10_001)), Some(Lsn::new(10)));
    assert_eq!(first(at(50_001)), None);
    assert_eq!(first(ReadStart::TailOffset(3)), Some(Lsn::new(47)));
    assert_eq!(first(ReadStart::TailOffset(1000)), Some(Lsn::ZERO));
    let time = start.saturating_add_micros(30_000);
    let mut scan = fixture.scan(Selector::All, ScanStart::Time(time), false);
    assert_eq!(lsns(&drain(&mut scan).0), (29..50).collect::<Vec<u64>>());
}

#[test]
fn cursor_of_a_scan_by_time_leaves_out_the_same_records() {
    let fixture = Fixture::new();
    fixture.append("live", b"now").unwrap();
    let time = ScanStart::Time(fixture.clock.now());
    let mut scan = fixture.scan(Selector::All, time, true);
    assert_eq!(drain(&mut scan).0.len(), 1);
    let cursor = ScanStart::Cursor(scan.cursor());
    let mut old = batch(&[("import", &[b"old"])]);
    set_time(&mut old.logs[0].records, Timestamp::from_micros(1));
    fixture.append_batch(old).unwrap();
    fixture.append("live", b"later").unwrap();
    let resumed = fixture.scan(Selector::All, cursor, true);
    for mut scan in [scan, resumed] {
        let later = ("live".to_owned(), 1, b"later".to_vec());
        assert_eq!(drain(&mut scan).0, [later]);
    }
}

#[test]
fn scan_of_many_logs_by_time_begins_on_a_reader_thread() {
    let fixture = Fixture::new();
    fixture.append("a", b"x").unwrap();
    let request = |selector, start| ScanRequest {
        selector,
        start,
        until_lsn: None,
        max_records: 0,
        follow: false,
        visibility: None,
        chunk_bytes: 1 << 20,
    };
    // No thread takes the work, so it stays with them if the caller did not do it.
    let workers = Arc::<Workers>::default();
    let observer: Arc<dyn Observer> = Arc::new(NoObserver);
    assert!(workers.start(0, &observer).unwrap().is_empty());
    let begins_at_once = |request| {
        let begun = pin!(begin_without_blocking(
            &fixture.core.store,
            &workers,
            request
        ));
        begun
            .poll(&mut Context::from_waker(Waker::noop()))
            .is_ready()
    };
    let time = ScanStart::Time(fixture.clock.now());
    assert!(!begins_at_once(request(Selector::All, time.clone())));
    assert!(!begins_at_once(request(
        Selector::Prefix("a".to_owned()),
        time.clone()
    )));
    assert!(begins_at_once(request(one("a"), time)));
    assert!(begins_at_once(request(Selector::All, ScanStart::First)));
}

#[test]
fn a_cursor_beyond_a_loss_names_lost_records_and_goes_on_with_later_ones() {
    let fixture = Fixture::new();
    fixture.append("a", b"kept").unwrap();
    let mut ticket = fixture
        .core
        .enqueue(batch(&[("a", &[b"lost"])]), Durability::Written);
    fixture.core.turn();
    assert!(settled(&mut ticket).unwrap().is_ok());
    let cursor = |selector: Selector| {
        let request = ScanRequest {
            selector,
            start: ScanStart::First,
            until_lsn: None,
            max_records: 0,
            follow: false,
            visibility: Some(Visibility::Written),
            chunk_bytes: 1 << 20,
        };
        let mut scan = fixture.begin(request).unwrap();
        let (found, chunks) = drain(&mut scan);
        assert_eq!(found.len(), 2);
        ScanStart::Cursor(chunks.last().unwrap().cursor.clone())
    };
    let (of_one, of_all) = (cursor(one("a")), cursor(Selector::All));
    let Fixture { disk, core, .. } = fixture;
    drop(core);
    // Some seed loses all unflushed records.
    let seed = (0..100)
        .find(|seed| {
            let disk = disk.copy_with_unflushed();
            disk.crash(*seed);
            Fixture::on(disk).contents("a").len() == 1
        })
        .unwrap();
    disk.crash(seed);
    let fixture = Fixture::on(disk);
    fixture.append("a", b"after").unwrap();
    let mut scan = fixture.scan(one("a"), of_one, false);
    let (found, chunks) = drain(&mut scan);
    let gap = &chunks[0].gaps[0];
    assert_eq!((gap.from, gap.to), (Some(Lsn::new(1)), Some(Lsn::new(2))));
    assert_eq!(gap.reason, GapReason::Lost);
    assert_eq!(found, [("a".to_owned(), 1, b"after".to_vec())]);
    let mut scan = fixture.scan(Selector::All, of_all, false);
    let (found, chunks) = drain(&mut scan);
    assert_eq!(chunks[0].gaps[0].reason, GapReason::Lost);
    assert_eq!(found, [("a".to_owned(), 1, b"after".to_vec())]);
}

#[test]
fn records_of_a_deleted_log_are_a_gap_in_a_scan_of_all() {
    let fixture = mixed();
    let mut following = fixture.scan(one("q"), ScanStart::First, true);
    drain(&mut following);
    let awaited = fixture.core.delete_in_turn(target("q"));
    fixture.core.turn();
    crate::api::ticket::block_on(awaited).unwrap();
    let mut scan = fixture.scan(Selector::All, ScanStart::First, false);
    let (found, chunks) = drain(&mut scan);
    assert!(found.iter().all(|(log, _, _)| log != "q"));
    let gap = &chunks[0].gaps[0];
    assert_eq!((gap.from, gap.to), (Some(Lsn::ZERO), Some(Lsn::new(26))));
    assert_eq!(gap.reason, GapReason::Deleted);
    // A follower of the log had read everything: it learns that nothing more comes.
    let told = next_chunk(&mut following).unwrap().unwrap().unwrap();
    let gap = &told.gaps[0];
    assert_eq!((gap.from, gap.to), (Some(Lsn::new(26)), None));
    assert_eq!(gap.reason, GapReason::Deleted);
    let ended = next_chunk(&mut following).unwrap();
    assert!(
        matches!(ended, Err(ReadError::Target(TargetError::NotFound { .. }))),
        "{ended:?}"
    );
}

#[test]
fn a_start_that_means_nothing_over_many_logs_is_refused() {
    let fixture = mixed();
    for start in [ScanStart::Lsn(Lsn::ZERO), ScanStart::TailOffset(1)] {
        let refused = fixture.try_scan(Selector::All, start, false);
        assert!(matches!(refused, Err(ReadError::InvalidScan(_))));
    }
    let beyond = fixture.scan(one("q"), ScanStart::Lsn(Lsn::new(99)), true);
    let mut beyond = beyond;
    assert!(matches!(
        next_chunk(&mut beyond),
        Some(Err(ReadError::BeyondTail { .. }))
    ));
}

/// Whether each of these is ready.
fn poll_each<T>(waits: &mut [BoxFuture<'_, T>], waker: &Waker) -> Vec<bool> {
    let mut context = Context::from_waker(waker);
    let waits = waits.iter_mut();
    waits
        .map(|wait| wait.as_mut().poll(&mut context).is_ready())
        .collect()
}

#[test]
fn followers_of_missing_logs_sleep_until_a_log_is_created() {
    let f = Fixture::new();
    f.append("other", b"0").unwrap();
    let follow = |n| f.scan(one(&format!("missing/{n}")), ScanStart::First, true);
    let mut scans: Vec<_> = (0..100).map(follow).collect();
    for scan in &mut scans {
        while next_chunk(scan).is_some() {}
    }
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    let count = || woken.0.load(std::sync::atomic::Ordering::SeqCst);
    let mut waits: Vec<_> = scans.iter_mut().map(|scan| scan.next()).collect();
    assert!(!poll_each(&mut waits, &waker).contains(&true));
    for _ in 0..100 {
        f.append("other", b"1").unwrap();
    }
    assert_eq!(count(), 0);
    f.append("missing/7", b"first").unwrap();
    assert_eq!(count(), 100);
    let ready = poll_each(&mut waits, &waker);
    assert_eq!(ready.iter().position(|ready| *ready), Some(7));
    assert_eq!(ready.iter().filter(|ready| **ready).count(), 1);
    drop(waits.remove(7));
    for _ in 0..100 {
        f.append("other", b"2").unwrap();
    }
    assert_eq!(count(), 100);
    f.append("missing/8", b"first").unwrap();
    assert_eq!(count(), 199);
}
