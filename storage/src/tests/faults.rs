//! Faults that once went wrong, each in the smallest case that shows it.

#![allow(clippy::disallowed_methods, reason = "threads and time of a test")]

use super::*;
use crate::api::error::SyncError;
use crate::api::record::{GapReason, LogCheck};
use crate::base::ids::Position;
use crate::disk::{CallKind, Disk};

/// Segments with frames in them, in order.
pub(super) fn used_paths(disk: &SimDisk) -> Vec<String> {
    disk.list("journal")
        .unwrap()
        .iter()
        .map(|n| format!("journal/{n}"))
        .filter(|p| disk.contents(p).unwrap()[8192..].iter().any(|b| *b != 0))
        .collect()
}

#[test]
fn a_batch_of_checks_only_is_answered() {
    let f = Fixture::new();
    let b = Batch {
        checks: vec![LogCheck {
            log: LogName::new("x").unwrap(),
            guard: Guard {
                must_not_exist: true,
                ..Guard::default()
            },
        }],
        ..Batch::default()
    };
    let mut t = f.submit(b);
    f.core.turn();
    assert!(settled(&mut t).unwrap().is_ok());
}

#[test]
fn records_of_a_failed_flush_in_the_page_cache_are_not_served_as_durable() {
    let f = Fixture::new();
    f.append("a", b"0").unwrap();
    f.disk.fail_sync(1);
    assert!(matches!(f.append("a", b"1"), Err(AppendError::Unknown(_))));
    let f = f.restart(); // same cache, no power cut
    let seen = f.contents("a"); // Visibility::Durable
    f.append("b", b"x").unwrap();
    let Fixture {
        disk,
        clock,
        config,
        core,
        ..
    } = f;
    drop(core);
    disk.crash(0);
    let (core, _) = open(&disk, &config, &clock).unwrap();
    let now = contents(&core, "a", Visibility::Durable);
    assert_eq!(now.ok(), Some(seen), "what was shown as durable is gone");
}

#[test]
fn a_clean_seal_that_never_reached_the_device_is_not_believed() {
    let f = Fixture::new();
    f.append("a", b"0").unwrap();
    f.disk.fail_sync(1);
    let _ = f.core.close(); // seal is in the cache, flush failed (or: killed before it)
    let f = f.restart();
    assert!(
        !f.report.clean,
        "taken for a clean shutdown although the seal never reached the device"
    );
}

#[test]
fn a_seal_that_was_lost_damages_nothing_after_a_power_cut() {
    let f = Fixture::new();
    f.append("a", b"0").unwrap();
    f.disk.fail_sync(1);
    let _ = f.core.close();
    let f = f.restart();
    f.append("a", b"1").unwrap();
    let Fixture {
        disk,
        clock,
        mut config,
        core,
        ..
    } = f;
    drop(core);
    disk.crash(3);
    config.on_damage = crate::api::config::OnDamage::Refuse;
    let r = open(&disk, &config, &clock);
    assert!(r.is_ok(), "{:?}", r.err().map(|e| e.to_string()));
}

#[test]
fn positions_are_not_reused_when_recovery_is_cut_off() {
    let mut bad = Vec::new();
    for cut in 1..40u64 {
        for seed in 0..64u64 {
            let mut f = Fixture::new();
            f.append("a", b"0").unwrap();
            let n = f.core.journal.segments.read().len();
            let mut highest = Position::ZERO;
            // WRITTEN appends until the journal has rolled
            while f.core.journal.segments.read().len() == n {
                let mut t = f
                    .core
                    .enqueue(batch(&[("a", &[&[7u8; 4000]])]), Durability::Written);
                f.core.turn();
                highest = settled(&mut t).unwrap().unwrap().position.unwrap();
            }
            for _ in 0..3 {
                let mut t = f
                    .core
                    .enqueue(batch(&[("a", &[&[7u8; 4000]])]), Durability::Written);
                f.core.turn();
                highest = settled(&mut t).unwrap().unwrap().position.unwrap();
            }
            let Fixture {
                disk,
                clock,
                config,
                core,
                ..
            } = f;
            drop(core);
            disk.crash(seed / 8);
            disk.crash_after(cut);
            drop(open(&disk, &config, &clock));
            disk.crash(seed % 8);
            let (core, report) = open(&disk, &config, &clock).unwrap();
            f = Fixture {
                disk,
                clock,
                config,
                core,
                report,
            };
            let p = f.append("a", b"n").unwrap().position.unwrap();
            if p <= highest {
                bad.push((
                    cut,
                    seed,
                    p.get(),
                    highest.get(),
                    f.report.recovery_epoch.get(),
                ));
            }
        }
    }
    assert!(bad.is_empty(), "{bad:?}");
}

#[test]
fn losing_the_life_blocks_of_the_last_segment_reuses_no_durable_lsn() {
    let f = Fixture::new();
    f.append("a", b"0").unwrap();
    let f = f.restart();
    f.append("a", b"1").unwrap();
    let c = f.append("new", b"0").unwrap();
    f.core.idle();
    let Fixture { disk, core, .. } = f;
    let epoch = core.journal.recovery_epoch;
    drop(core);
    let path = used_paths(&disk).last().unwrap().clone();
    let mut bytes = disk.contents(&path).unwrap();
    bytes[..8192].fill(0xFF);
    disk.replace(&path, bytes);
    let f = Fixture::on(disk);
    let again = f.append("a", b"other");
    assert!(matches!(
        f.append("another", b"0"),
        Err(AppendError::TailUnproven { .. })
    ));
    let _ = c;
    assert!(f.core.journal.recovery_epoch > epoch);
    assert!(again.is_err(), "durable lsn 1 of a is given out again");
}

#[test]
fn one_bad_sector_under_link_and_marker_reuses_no_log_id() {
    let f = Fixture::new();
    f.append("a", b"0").unwrap();
    let f = f.restart();
    let pad = vec![1u8; 600];
    f.append("a", &pad).unwrap();
    let c = f.append("b", b"of b").unwrap();
    f.append("b", b"of b").unwrap();
    f.core.idle();
    let epoch = f.core.journal.recovery_epoch;
    let Fixture { disk, core, .. } = f;
    drop(core);
    let path = used_paths(&disk).last().unwrap().clone();
    let mut bytes = disk.contents(&path).unwrap();
    bytes[8192..8192 + 512].fill(0);
    disk.replace(&path, bytes);
    let f = Fixture::on(disk);
    assert!(matches!(
        f.append("c", b"of c"),
        Err(AppendError::TailUnproven { .. })
    ));
    let _ = c;
    assert!(f.core.journal.recovery_epoch > epoch);
    assert_eq!(f.restart().contents("b").len(), 2);
}

#[test]
fn a_scan_of_all_names_the_records_of_two_missing_segments() {
    let f = Fixture::new();
    f.append("a", b"0").unwrap();
    let f = f.restart();
    f.append("a", b"1").unwrap();
    f.append("c", b"0").unwrap();
    let f = f.restart();
    f.append("b", b"0").unwrap();
    let f = f.restart();
    f.append("a", b"2").unwrap();
    f.core.idle();
    let Fixture { disk, core, .. } = f;
    drop(core);
    let paths = used_paths(&disk);
    assert_eq!(paths.len(), 4);
    disk.remove(&paths[1]).unwrap();
    disk.remove(&paths[2]).unwrap();
    let f = Fixture::on(disk);
    let mut scan = f.scan(Selector::All, ScanStart::First, false);
    let mut gaps = Vec::new();
    while let Some(chunk) = next_chunk(&mut scan).unwrap().unwrap() {
        gaps.extend(chunk.gaps);
    }
    assert!(
        gaps.iter()
            .any(|g| g.log.as_ref().is_some_and(|l| l.as_str() == "a")
                && g.reason == GapReason::Quarantined),
        "lsn 1 of a skipped in silence"
    );
}

#[test]
fn after_a_failure_nothing_beyond_the_durable_lsn_is_read() {
    let f = Fixture::new();
    f.append("a", b"0").unwrap();
    let mut t = f
        .core
        .enqueue(batch(&[("a", &[b"1"])]), Durability::Written);
    f.core.turn();
    settled(&mut t).unwrap().unwrap();
    f.disk.fail_sync(1);
    f.core.journal.flush();
    assert!(f.core.journal.failure().is_some());
    let mut request = read_request("a", ReadStart::First);
    request.visibility = Some(Visibility::Written);
    let page = read::page(&f.core.store, &request, Reach::Disk);
    let mut many = f
        .begin(ScanRequest {
            selector: Selector::All,
            start: ScanStart::First,
            until_lsn: None,
            max_records: 0,
            follow: false,
            visibility: Some(Visibility::Written),
            chunk_bytes: 1000,
        })
        .unwrap();
    let mut n = 0;
    while let Some(Ok(Some(chunk))) = next_chunk(&mut many) {
        for b in chunk.batches {
            n += b.count;
        }
    }
    assert!(page.map_or(true, |p| p.next_lsn <= Lsn::new(1)));
    assert!(n <= 1);
}

fn threaded(disk: &SimDisk, config: StorageConfig) -> Arc<crate::engine::LocalEngine> {
    crate::engine::LocalEngine::open(
        Arc::new(disk.clone()),
        config,
        Arc::new(crate::base::clock::SystemClock),
        Arc::new(NoObserver),
    )
    .unwrap()
    .0
}

/// Waits until an idle journal has written its marker and flushed it.
fn until_marked(engine: &crate::engine::LocalEngine) {
    use crate::api::engine::Operate as _;
    let end = || engine.segments().last().map(|segment| segment.end);
    let before = end();
    while end() == before || engine.statistics().durable_lag_bytes > 0 {
        std::thread::yield_now();
    }
}

/// A marker proves flushes of the interval, as it proves flushes for requests.
#[test]
fn a_marker_proves_flushes_of_the_interval() {
    use crate::api::engine::{Append as _, ReadLogs as _};
    for level in [Durability::Durable, Durability::Written] {
        let disk = SimDisk::new();
        let engine = threaded(&disk, small_config());
        engine
            .submit(None, batch(&[("a", &[b"0"])]), Some(Durability::Durable))
            .wait()
            .unwrap();
        until_marked(&engine);
        let ticket = engine.submit(None, batch(&[("a", &[b"hello-1"])]), Some(level));
        engine.write_gathered();
        ticket.wait().unwrap();
        until_marked(&engine);
        let stat = crate::api::ticket::block_on(engine.stat(target("a"), None, None)).unwrap();
        assert_eq!(stat.info.durable_lsn, Lsn::new(2), "told to be durable");
        drop(engine);
        let path = used_paths(&disk).last().unwrap().clone();
        let mut bytes = disk.contents(&path).unwrap();
        let at = cipher::places_of(&bytes, b"hello-1")[0];
        bytes[at] ^= 1;
        disk.replace(&path, bytes);
        let f = Fixture::on(disk);
        assert_eq!(
            f.report.damage.len(),
            1,
            "{level:?}: a durable record is cut off as torn, its lsn given out again"
        );
    }
}

/// A store with a bad sector over several groups, with an index of the segment and without.
fn one_bad_sector() -> [Fixture; 2] {
    let f = Fixture::new();
    f.append("z", b"0").unwrap();
    let positions: Vec<Position> = (0..7u8)
        .map(|n| f.append("a", &[n; 4]).unwrap().position.unwrap())
        .collect();
    for n in 0..8u8 {
        f.append("z", &[n; 4]).unwrap();
    }
    f.core.idle();
    let f = f.restart();
    f.core.idle();
    let Fixture { disk, core, .. } = f;
    let bytes_of = |d: &SimDisk, p: &str| d.contents(p).unwrap();
    drop(core);
    let path = used_paths(&disk)[0].clone();
    let mut bytes = bytes_of(&disk, &path);
    // One 512-byte sector, aligned, that covers several frames.
    let at = usize::try_from(positions[1].get()).unwrap() / 512 * 512 + 512;
    bytes[at..at + 512].fill(0);
    disk.replace(&path, bytes);
    let bare = damage::without_indexes(&disk);
    [Fixture::on(disk), Fixture::on(bare)]
}

#[test]
fn one_bad_sector_over_several_groups_is_named_whole() {
    for f in one_bad_sector() {
        is_named_whole(&f);
    }
}

fn is_named_whole(f: &Fixture) {
    let mut next = 0;
    while next < 7 {
        match f.read("a", next) {
            Ok(page) => {
                assert!(
                    page.next_lsn.get() > next,
                    "an empty page below the tail: lsn {next} is neither served nor named"
                );
                next = page.next_lsn.get();
            }
            Err(ReadError::Quarantined { to, .. }) => next = to.unwrap().get(),
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn a_scan_over_one_bad_sector_ends() {
    let (tx, rx) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for f in one_bad_sector() {
            let mut scan = f.scan(one("a"), ScanStart::First, false);
            while let Some(Ok(Some(_))) = next_chunk(&mut scan) {}
        }
        let _ = tx.send(());
    });
    assert!(
        rx.recv_timeout(Duration::from_secs(5)).is_ok(),
        "the scan spins for ever"
    );
}

#[test]
fn gaps_of_deleted_logs_are_merged() {
    let f = Fixture::with(
        SimDisk::new(),
        StorageConfig {
            segment_bytes: 8 << 20,
            ..small_config()
        },
    );
    for _ in 0..2000 {
        f.append("a", b"x").unwrap();
        f.append("b", b"x").unwrap();
    }
    for l in ["a", "b"] {
        let mut d = f.core.delete_in_turn(target(l));
        f.core.turn();
        let mut context = Context::from_waker(Waker::noop());
        assert!(Future::poll(Pin::new(&mut d), &mut context).is_ready());
    }
    let mut scan = f.scan(Selector::All, ScanStart::First, false);
    let c = next_chunk(&mut scan).unwrap().unwrap().unwrap();
    assert!(c.gaps.len() <= 100);
}

#[test]
fn followers_are_woken_by_the_flush() {
    use crate::api::engine::{Append as _, ReadLogs as _};
    let disk = SimDisk::new();
    let config = StorageConfig {
        sync_interval: Duration::from_secs(3600),
        marker_delay: Duration::from_secs(3600),
        segment_bytes: 64 << 20,
        ..small_config()
    };
    let engine = threaded(&disk, config);
    for l in ["x", "y"] {
        engine
            .submit(None, batch(&[(l, &[b"0"])]), None)
            .wait()
            .unwrap();
    }
    let (tx, rx) = std::sync::mpsc::channel();
    let followers = ["x", "y"].map(|l| {
        let (engine, tx) = (Arc::clone(&engine), tx.clone());
        std::thread::spawn(move || {
            let mut next = 1;
            loop {
                crate::api::ticket::block_on(engine.tail_beyond(target(l), Lsn::new(next), None))
                    .unwrap();
                next += 1;
                if tx.send(l).is_err() {
                    return;
                }
            }
        })
    });
    #[allow(clippy::disallowed_methods)]
    let begun = Instant::now();
    let mut rounds = 0u64;
    while begun.elapsed() < Duration::from_secs(1) {
        let a = engine.submit(None, batch(&[("x", &[b"1"])]), None);
        for _ in 0..(rounds % 200) {
            std::hint::spin_loop();
        }
        let b = engine.submit(None, batch(&[("y", &[b"1"])]), None);
        a.wait().unwrap();
        b.wait().unwrap();
        for _ in 0..2 {
            assert!(
                rx.recv_timeout(Duration::from_secs(2)).is_ok(),
                "round {rounds}: durable and answered, but its follower sleeps"
            );
        }
        rounds += 1;
    }
    // One more record ends each follower.
    drop(rx);
    for (l, follower) in ["x", "y"].into_iter().zip(followers) {
        let last = engine.submit(None, batch(&[(l, &[b"2"])]), None);
        last.wait().unwrap();
        follower.join().unwrap();
    }
}

#[test]
fn a_damaged_frame_under_a_damaged_index_is_named_and_not_skipped() {
    let f = Fixture::new();
    for n in 0..3u8 {
        f.append("a", &[n; 40]).unwrap();
        f.append("b", &[n; 40]).unwrap();
    }
    let f = f.restart_cleanly();
    let Fixture { disk, core, .. } = f;
    drop(core);
    let journal = used_paths(&disk)[0].clone();
    let mut bytes = disk.contents(&journal).unwrap();
    let at = cipher::places_of(&bytes, &[1; 40])[0];
    bytes[at] ^= 1;
    disk.replace(&journal, bytes);
    let index = format!("index/{}", disk.list("index").unwrap()[0]);
    let mut bytes = disk.contents(&index).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    disk.replace(&index, bytes);
    let f = Fixture::on(disk);
    let page = f.read("a", 0).unwrap();
    assert_eq!(page.next_lsn, Lsn::new(1), "lsn 1 is skipped in silence");
    assert!(matches!(
        f.read("a", 1),
        Err(ReadError::Quarantined { to: Some(to), .. }) if to == Lsn::new(2)
    ));
    assert_eq!(f.read("a", 2).unwrap().next_lsn, Lsn::new(3));
}

/// Fills segments until the store has rolled since its last start. Returns all segments with frames.
fn rolled(f: &Fixture) -> Vec<String> {
    while f.core.journal.segments.read().len() < 4 {
        f.append("a", &[1; 9000]).unwrap();
    }
    used_paths(&f.disk)
}

#[test]
fn lost_last_segments_are_missed_although_no_start_began_them() {
    for lost in 1..=3 {
        let f = Fixture::new();
        f.append("a", b"0").unwrap();
        let f = f.restart();
        let paths = rolled(&f);
        let (disk, clock, config) = (f.disk.clone(), Arc::clone(&f.clock), f.config.clone());
        drop(f);
        for path in paths.iter().rev().take(lost) {
            disk.remove(path).unwrap();
        }
        let (core, report) = open(&disk, &config, &clock).unwrap();
        assert!(!report.findings.is_empty(), "{lost} lost");
        let f = Fixture {
            disk,
            clock,
            config,
            core,
            report,
        };
        let refused = f.append("a", b"x");
        assert!(
            matches!(refused, Err(AppendError::TailUnproven { .. })),
            "{lost} lost"
        );
        // Later starts miss the segments too.
        let f = f.restart().restart_cleanly();
        assert!(f.append("a", b"x").is_err());
    }
}

#[test]
fn the_last_segments_are_missed_behind_a_checkpoint_too() {
    let f = Fixture::new();
    while crate::index::checkpoint::list(&f.disk).unwrap().is_empty() {
        f.append("a", &[1; 9000]).unwrap();
    }
    let told = crate::index::checkpoint::list(&f.disk).unwrap();
    let (disk, clock, config) = (f.disk.clone(), Arc::clone(&f.clock), f.config.clone());
    drop(f);
    let newest = format!("journal/{}.seg", told.last().unwrap());
    let behind: Vec<String> = used_paths(&disk)
        .into_iter()
        .filter(|path| *path > newest)
        .collect();
    assert!(!behind.is_empty(), "the one that is written");
    for path in behind {
        disk.remove(&path).unwrap();
    }
    let (_, report) = open(&disk, &config, &clock).unwrap();
    assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
}

#[test]
fn a_torn_successor_is_not_missed_when_the_next_start_is_cut_off() {
    const SECOND: &str = "journal/0000000000000002.seg";
    for seed in 0..8 {
        let f = Fixture::new();
        while f.core.journal.segments.read().len() < 2 {
            f.append("a", &[1; 20_000]).unwrap();
        }
        assert_eq!(used_paths(&f.disk).last().unwrap(), SECOND);
        let (disk, clock, config) = (f.disk.clone(), Arc::clone(&f.clock), f.config.clone());
        drop(f);
        // The device has only the first bytes of its only group, so the link is not whole.
        let mut bytes = disk.contents(SECOND).unwrap();
        bytes[8192 + 72..].fill(0);
        disk.replace(SECOND, bytes);
        // The start has begun another segment, and is about to give the file to the pool.
        disk.crash_when(
            |call| call.kind == CallKind::Rename && call.path == SECOND,
            1,
            0,
        );
        assert!(open(&disk, &config, &clock).is_err());
        disk.crash(seed);
        let (_, report) = open(&disk, &config, &clock).unwrap();
        assert_eq!(report.findings, Vec::<String>::new());
    }
}

#[test]
fn a_segment_that_was_missing_and_comes_back_is_read_again() {
    for starts in 1..3 {
        let f = Fixture::new();
        f.append("a", b"0").unwrap();
        let f = f.restart();
        let paths = rolled(&f);
        f.core.idle();
        let before = f.contents("a");
        let mut disk = f.disk.clone();
        drop(f);
        let path = paths.last().unwrap();
        let bytes = disk.contents(path).unwrap();
        disk.remove(path).unwrap();
        for _ in 0..starts {
            let f = Fixture::on(disk);
            assert!(damage::read_up_to_doubt(&f, "a").0.len() < before.len());
            disk = f.disk.clone();
        }
        disk.replace(path, bytes);
        for _ in 0..2 {
            let f = Fixture::on(disk);
            assert!(!f.report.findings.is_empty());
            assert_eq!(damage::read_up_to_doubt(&f, "a").0, before);
            disk = f.disk.clone();
        }
    }
}

#[test]
fn sync_behind_the_end_of_the_journal_is_refused() {
    let f = Fixture::new();
    f.core.close().unwrap();
    let mut sync = f.core.sync_in_turn(Durability::Durable);
    f.core.turn();
    let mut context = Context::from_waker(Waker::noop());
    let Poll::Ready(answer) = Pin::new(&mut sync).poll(&mut context) else {
        panic!("a turn answers everything");
    };
    assert!(
        matches!(answer, Err(SyncError::Refused(AppendError::Draining))),
        "{answer:?}"
    );
}
