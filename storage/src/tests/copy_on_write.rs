//! File systems that copy on write: each overwrite needs new space, so a full volume refuses writes
//! to segments that were allocated long ago.

use super::*;
use crate::disk::Disk;

const BLOCK: usize = 4096;

/// Appends records of many sizes until all are refused. Returns the acknowledged records, and one whose
/// outcome is unknown.
fn fill(fixture: &Fixture) -> (Vec<Vec<u8>>, Option<Vec<u8>>) {
    let mut acked = Vec::new();
    let mut refused = 0;
    for number in 0_u64..400 {
        let mut data = number.to_le_bytes().to_vec();
        let sizes = [20_000, 5000, 100, 9000];
        data.resize(sizes[usize::try_from(number % 4).unwrap()], 7);
        match fixture.append("a", &data) {
            Ok(_) => acked.push(data),
            Err(AppendError::DiskFull(_)) => refused += 1,
            Err(AppendError::Unknown(_)) => return (acked, Some(data)),
            Err(AppendError::JournalFailed(_)) => return (acked, None),
            Err(error) => panic!("{error}"),
        }
        fixture.clock.advance(1_000_000);
        if refused > 8 {
            return (acked, None);
        }
    }
    panic!("the disk never gets full");
}

/// Checks that all acknowledged records are there, and no refused one.
fn compare(fixture: &Fixture, acked: &[Vec<u8>], unknown: Option<&Vec<u8>>, what: &str) {
    let found = fixture.contents("a");
    let whole = found == acked;
    let more = unknown.is_some_and(|last| found.split_last() == Some((last, acked)));
    assert!(
        whole || more,
        "{what}: {} of {} records",
        found.len(),
        acked.len()
    );
}

/// A store with some history, on a disk with `blocks` blocks left.
fn store(blocks: usize, reserve: usize) -> (Fixture, Vec<Vec<u8>>) {
    let config = StorageConfig {
        reserve_segments: reserve,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    let before: Vec<Vec<u8>> = (0..40_u8).map(|n| vec![n; 5000]).collect();
    for data in &before {
        fixture.append("a", data).unwrap();
    }
    fixture.core.pool.fill().unwrap();
    fixture.disk.set_copy_on_write(blocks * BLOCK);
    (fixture, before)
}

#[test]
fn a_full_disk_that_copies_refuses_and_its_next_start_works() {
    let (mut failed, mut started, mut without_space) = (0, 0, 0);
    for blocks in 0..60 {
        for reserve in [1, 2] {
            for cut in [false, true] {
                let what = format!("{blocks} blocks, reserve {reserve}, cut {cut}");
                let (mut fixture, mut acked) = store(blocks, reserve);
                let (more, unknown) = fill(&fixture);
                acked.extend(more);
                failed += u32::from(fixture.core.journal.failure().is_some());
                if fixture.core.journal.failure().is_none() {
                    compare(&fixture, &acked, None, &what);
                }
                for round in 0..3 {
                    let Fixture {
                        disk,
                        clock,
                        config,
                        core,
                        ..
                    } = fixture;
                    drop(core);
                    if cut {
                        disk.crash(u64::try_from(blocks).unwrap());
                    }
                    let mut opened = open(&disk, &config, &clock);
                    let full = |error: &OpenError| matches!(error, OpenError::Io { source, .. } if crate::disk::is_out_of_space(source));
                    if round > 0 && opened.as_ref().err().is_some_and(full) {
                        // Each start takes a file, and earlier starts took the last space.
                        without_space += 1;
                        disk.set_copy_on_write(100 << 20);
                        opened = open(&disk, &config, &clock);
                    }
                    let (core, report) =
                        opened.unwrap_or_else(|error| panic!("{what}, start {round}: {error}"));
                    fixture = Fixture {
                        disk,
                        clock,
                        config,
                        core,
                        report,
                    };
                    assert_eq!(fixture.report.damage, [], "{what}");
                    compare(&fixture, &acked, unknown.as_ref(), &what);
                    started += 1;
                }
                // There is space again.
                fixture.disk.set_copy_on_write(100 << 20);
                fixture.clock.advance(1_000_000);
                fixture.append("a", b"goes on").unwrap();
            }
        }
    }
    println!(
        "{failed} journals failed, {started} starts, {without_space} of them for want of space"
    );
    assert!(failed < 20, "{failed} journals failed for want of space");
}

#[test]
fn a_group_in_a_full_copy_is_taken_back_with_the_space_of_the_pool() {
    let (fixture, before) = store(3, 1);
    let ready = fixture.core.pool.counts().0;
    assert!(ready > 0);
    // The first blocks of the group find space. The other blocks, and zeros over the first, find none.
    let refused = fixture.append("a", &[1; 20_000]);
    assert!(
        matches!(refused, Err(AppendError::DiskFull(_))),
        "{refused:?}"
    );
    assert!(fixture.core.journal.failure().is_none());
    assert!(fixture.core.pool.counts().0 < ready);
    // Requests of operators may use the space that was given up; records may not.
    assert!(matches!(
        fixture.append("a", &[1; 10]),
        Err(AppendError::DiskFull(_))
    ));
    let trimmed = fixture.core.trim_in_turn(target("a"), Lsn::new(1));
    fixture.core.turn();
    drop(trimmed);
    assert!(fixture.read("a", 0).is_err(), "the trim took effect");
    assert_eq!(
        fixture.read("a", 1).unwrap().tail_lsn.get(),
        before.len() as u64
    );
    fixture.disk.set_copy_on_write(100 << 20);
    fixture.clock.advance(1_000_000);
    fixture.append("a", b"goes on").unwrap();
}

#[test]
fn a_full_disk_without_direct_reads_starts_after_a_kill() {
    for copies in [false, true] {
        let (fixture, mut acked) = store(1000, 3);
        fixture.disk.set_cached_only();
        match copies {
            true => fixture.disk.set_copy_on_write(2 * BLOCK),
            false => fixture.disk.set_full(true),
        }
        let (more, unknown) = fill(&fixture);
        acked.extend(more);
        let fixture = fixture.restart().restart();
        compare(
            &fixture,
            &acked,
            unknown.as_ref(),
            &format!("copies: {copies}"),
        );
    }
}

#[test]
fn a_tail_that_only_the_page_cache_has_is_written_again_before_serving() {
    for seed in 0..20 {
        let fixture = Fixture::new();
        fixture.disk.set_cached_only();
        fixture.append("a", b"0").unwrap();
        fixture.core.idle();
        fixture.append("a", &[1; 9000]).unwrap();
        // The cache keeps the record, and the device has none of it.
        fixture.disk.fail_sync(1);
        assert!(fixture.append("a", &[2; 9000]).is_err());
        let fixture = fixture.restart();
        let served = fixture.contents("a");
        assert!(served.len() >= 2);
        fixture.disk.crash(seed);
        assert_eq!(fixture.restart().contents("a"), served, "seed {seed}");
    }
}

#[test]
fn a_power_cut_while_a_tail_is_written_again_loses_nothing() {
    let mut cuts = 0;
    for after in 1..40 {
        for seed in 0..4 {
            let fixture = Fixture::new();
            fixture.disk.set_cached_only();
            for n in 0..4_u8 {
                fixture.append("a", &[n; 3000]).unwrap();
            }
            let acked = fixture.contents("a");
            let Fixture {
                disk,
                clock,
                config,
                core,
                ..
            } = fixture;
            drop(core);
            disk.crash_after(after);
            drop(open(&disk, &config, &clock));
            cuts += u32::from(disk.is_crashed());
            disk.crash(seed);
            let (core, report) = open(&disk, &config, &clock).unwrap();
            assert_eq!(report.damage, []);
            assert_eq!(contents(&core, "a", Visibility::Durable).unwrap(), acked);
        }
    }
    assert!(cuts > 20, "{cuts}");
}

#[test]
fn indexes_that_a_full_disk_cannot_hold_are_written_later() {
    let (fixture, _) = store(0, 1);
    assert!(fixture.append("a", &[1; 20_000]).is_err());
    fixture.core.turn();
    fixture.disk.set_copy_on_write(100 << 20);
    fixture.clock.advance(1_000_000);
    for n in 0..40_u8 {
        fixture.append("a", &[n; 5000]).unwrap();
    }
    assert!(fixture.core.indexing.trouble().is_none());
    assert!(!fixture.disk.list("index").unwrap().is_empty());
}
