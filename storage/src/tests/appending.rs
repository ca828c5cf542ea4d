//! Appending, conditions, durability, failure.

use std::collections::{HashMap, HashSet};

use super::*;
use crate::api::error::{FailedCheck, InvalidBatch};
use crate::api::record::LogCheck;
use crate::base::ids::{LogId, Position};

#[test]
fn records_come_back_in_order_after_kill_and_after_clean_shutdown() {
    let fixture = Fixture::new();
    for index in 0..300u32 {
        let appended = fixture.append("a", &index.to_le_bytes()).unwrap();
        assert_eq!(appended.appends[0].first_lsn, Lsn::new(u64::from(index)));
        assert_eq!(appended.durability, Durability::Durable);
        assert_eq!(appended.durable_lsns[..], [Lsn::new(u64::from(index) + 1)]);
    }
    let expected: Vec<Vec<u8>> = (0..300u32).map(|i| i.to_le_bytes().to_vec()).collect();
    assert_eq!(fixture.contents("a"), expected);
    let first = fixture.report.recovery_epoch;
    let fixture = fixture.restart();
    assert!(!fixture.report.clean);
    assert_eq!(fixture.report.recovery_epoch, first.next());
    assert_eq!(fixture.contents("a"), expected);
    let fixture = fixture.restart_cleanly();
    assert!(fixture.report.clean);
    assert_eq!(fixture.report.recovery_epoch, first.next());
    assert_eq!(fixture.report.findings, Vec::<String>::new());
    assert_eq!(fixture.contents("a"), expected);
}

#[test]
fn names_that_look_alike_stay_distinct_across_a_restart() {
    let long = "n".repeat(255);
    let names = [
        "a/b",
        "a:b",
        "a_b",
        "ü",
        "u\u{308}",
        long.as_str(),
        "A/b",
        "a/b ",
    ];
    let fixture = Fixture::new();
    for name in names {
        fixture.append(name, name.as_bytes()).unwrap();
    }
    let fixture = fixture.restart();
    assert_eq!(fixture.report.logs, names.len() as u64);
    for name in names {
        assert_eq!(fixture.contents(name), [name.as_bytes()]);
    }
}

#[test]
fn a_journal_of_many_segments_reads_back() {
    let fixture = Fixture::new();
    let data = vec![7; 3000];
    for _ in 0..200 {
        fixture.append("a", &data).unwrap();
    }
    assert!(fixture.core.journal.segments.read().len() > 8);
    let fixture = fixture.restart();
    assert_eq!(fixture.contents("a").len(), 200);
    assert_eq!(fixture.report.damage, []);
    assert_eq!(fixture.report.findings, Vec::<String>::new());
}

#[test]
fn appends_of_one_log_in_one_group_share_a_frame_and_keep_their_answers() {
    let fixture = Fixture::new();
    fixture.append("a", b"first").unwrap();
    let mut tickets: Vec<Ticket> = (0..10u8)
        .map(|i| fixture.submit(batch(&[("a", &[&[i]])])))
        .collect();
    fixture.core.turn();
    let answers: Vec<Appended> = tickets
        .iter_mut()
        .map(|ticket| settled(ticket).unwrap().unwrap())
        .collect();
    let positions: Vec<Position> = answers.iter().map(|a| a.position.unwrap()).collect();
    assert!(positions.is_sorted_by(|a, b| a < b), "{positions:?}");
    for (lsn, answer) in (1u64..).zip(&answers) {
        assert_eq!(answer.appends[0].first_lsn, Lsn::new(lsn));
    }
    let page = fixture.read("a", 1).unwrap();
    assert_eq!(page.batches.len(), 1, "one frame");
    assert_eq!(fixture.restart().contents("a").len(), 11);
}

#[test]
fn a_batch_over_several_logs_is_refused_whole_with_every_failed_condition() {
    let fixture = Fixture::new();
    fixture.append("a", b"x").unwrap();
    let mut both = batch(&[("a", &[b"1"]), ("b", &[b"2"])]);
    both.logs[0].guard.expected_lsn = Some(Lsn::new(5));
    both.logs[1].guard.must_exist = true;
    let guard = Guard {
        log_id: Some(LogId::new(99)),
        ..Guard::default()
    };
    both.checks.push(LogCheck {
        log: LogName::new("c").unwrap(),
        guard,
    });
    let Err(AppendError::ConditionsFailed(failed)) = fixture.append_batch(both) else {
        panic!("refused");
    };
    let checks: Vec<FailedCheck> = failed.iter().map(|f| f.check.clone()).collect();
    assert_eq!(
        checks,
        [
            FailedCheck::PositionMismatch {
                expected: Lsn::new(5),
                actual: Lsn::new(1)
            },
            FailedCheck::LogMissing,
            FailedCheck::LogReplaced {
                expected: LogId::new(99),
                actual: None
            },
        ]
    );
    assert_eq!(fixture.contents("a").len(), 1);
    assert!(matches!(
        fixture.read("b", 0),
        Err(ReadError::Target(TargetError::NotFound { .. }))
    ));
}

#[test]
fn expected_lsn_lets_exactly_one_of_two_through() {
    let fixture = Fixture::new();
    let mut first = batch(&[("a", &[b"1"])]);
    first.logs[0].guard.expected_lsn = Some(Lsn::ZERO);
    let mut tickets = [fixture.submit(first.clone()), fixture.submit(first)];
    fixture.core.turn();
    let answers: Vec<bool> = tickets
        .iter_mut()
        .map(|t| settled(t).unwrap().is_ok())
        .collect();
    assert_eq!(answers, [true, false]);
}

#[test]
fn a_refusal_that_reveals_unflushed_state_is_answered_after_the_flush() {
    let fixture = Fixture::new();
    let mut written = fixture
        .core
        .enqueue(batch(&[("a", &[b"1"])]), Durability::Written);
    fixture.core.turn();
    let answer = settled(&mut written).unwrap().unwrap();
    assert_eq!(answer.durability, Durability::Written);
    assert_eq!(answer.durable_lsns[..], [Lsn::ZERO]);
    let mut wrong = batch(&[("a", &[b"2"])]);
    wrong.logs[0].guard.expected_lsn = Some(Lsn::new(7));
    fixture.disk.fail_sync(1);
    let mut refused = fixture.submit(wrong);
    fixture.core.turn();
    // The flush that the refusal needed failed, so the refusal reveals nothing.
    assert!(matches!(
        settled(&mut refused),
        Some(Err(AppendError::JournalFailed(_)))
    ));
}

#[test]
fn a_reader_sees_nothing_that_is_not_durable_unless_it_asks() {
    let fixture = Fixture::new();
    let mut ticket = fixture
        .core
        .enqueue(batch(&[("a", &[b"1"])]), Durability::Written);
    fixture.core.turn();
    assert!(settled(&mut ticket).is_some());
    assert!(matches!(
        fixture.read("a", 0),
        Err(ReadError::Target(TargetError::NotFound { .. }))
    ));
    assert_eq!(
        contents(&fixture.core, "a", Visibility::Written).unwrap(),
        [b"1"]
    );
    fixture.core.idle();
    assert_eq!(fixture.contents("a"), [b"1"]);
}

#[test]
fn append_after_failed_sync_is_refused_even_if_sync_would_now_succeed() {
    let fixture = Fixture::new();
    fixture.append("a", b"before").unwrap();
    fixture.disk.fail_sync(1);
    assert!(matches!(
        fixture.append("a", b"x"),
        Err(AppendError::Unknown(_))
    ));
    assert!(matches!(
        fixture.append("a", b"y"),
        Err(AppendError::JournalFailed(_))
    ));
    assert_eq!(fixture.contents("a"), [b"before"]);
    let mut request = read_request("a", ReadStart::Lsn(Lsn::new(1)));
    request.visibility = Some(Visibility::Written);
    assert!(matches!(
        read::page(&fixture.core.store, &request, Reach::Disk),
        Err(ReadError::JournalFailed(_))
    ));
    let Fixture { disk, core, .. } = fixture;
    drop(core);
    disk.crash(0);
    assert_eq!(Fixture::on(disk).contents("a")[0], b"before");
}

#[test]
fn a_full_disk_refuses_before_anything_moved_and_resumes_by_itself() {
    let fixture = Fixture::new();
    fixture.disk.set_full(true);
    let data = vec![1; 20_000];
    let mut accepted = 0;
    let refused = loop {
        match fixture.append("a", &data) {
            Ok(_) => accepted += 1,
            Err(error) => break error,
        }
        assert!(accepted < 20, "the pool has an end");
    };
    assert!(matches!(refused, AppendError::DiskFull(_)), "{refused}");
    assert_eq!(fixture.contents("a").len(), accepted);
    fixture.disk.set_full(false);
    fixture.clock.advance(1_000_000);
    let appended = fixture.append("a", &data).unwrap();
    assert_eq!(appended.appends[0].first_lsn, Lsn::new(accepted as u64));
    assert_eq!(fixture.restart().contents("a").len(), accepted + 1);
}

#[test]
fn a_batch_that_does_not_fit_half_a_segment_is_refused_by_its_size() {
    let fixture = Fixture::new();
    let data = vec![1; 24_000];
    assert!(matches!(
        fixture.append_batch(batch(&[("a", &[&data, &data])])),
        Err(AppendError::Invalid(InvalidBatch::RequestTooLarge { .. }))
    ));
    fixture.append("a", &data).unwrap();
}

#[test]
fn more_in_flight_than_the_budget_is_busy_and_leaves_no_trace() {
    let config = StorageConfig {
        max_inflight_bytes: 10_000,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    let data = vec![1; 4000];
    let mut first = fixture.submit(batch(&[("a", &[&data])]));
    let mut second = fixture.submit(batch(&[("a", &[&data])]));
    let mut third = fixture.submit(batch(&[("a", &[&data])]));
    assert!(matches!(
        settled(&mut third),
        Some(Err(AppendError::Busy { limit: 10_000, .. }))
    ));
    fixture.core.turn();
    assert!(settled(&mut first).unwrap().is_ok() && settled(&mut second).unwrap().is_ok());
    assert!(fixture.append("a", &data).is_ok());
}

#[test]
fn stored_time_never_goes_back_within_a_log() {
    let fixture = Fixture::new();
    fixture.append("a", b"1").unwrap();
    fixture.clock.advance(-5_000_000);
    let later = fixture.append("a", b"2").unwrap().appends[0].timestamp;
    // The clock jumped back by 10 seconds while 5 passed: stored times follow the 5 seconds.
    assert_eq!(later, Timestamp::from_micros(1_700_000_005_000_000));
    let fixture = fixture.restart();
    fixture.clock.advance(-5_000_000);
    let after = fixture.append("a", b"3").unwrap().appends[0].timestamp;
    assert!(after >= later, "also across a restart");
}

#[test]
fn a_deleted_log_is_gone_and_its_name_makes_another_log() {
    let fixture = Fixture::new();
    let old = fixture.append("a", b"old").unwrap().appends[0].log_id;
    let awaited = fixture.core.delete_in_turn(target("a"));
    fixture.core.turn();
    assert!(crate::api::ticket::block_on(awaited).is_ok());
    assert!(matches!(
        fixture.read("a", 0),
        Err(ReadError::Target(TargetError::NotFound { .. }))
    ));
    let fixture = fixture.restart();
    assert!(matches!(
        fixture.read("a", 0),
        Err(ReadError::Target(TargetError::NotFound { .. }))
    ));
    let mut old_handle = batch(&[("a", &[b"?"])]);
    old_handle.logs[0].guard.log_id = Some(old);
    assert!(matches!(
        fixture.append_batch(old_handle),
        Err(AppendError::ConditionsFailed(_))
    ));
    let new = fixture.append("a", b"new").unwrap();
    assert_ne!(new.appends[0].log_id, old);
    assert_eq!(new.appends[0].first_lsn, Lsn::ZERO);
    assert_eq!(fixture.restart().contents("a"), [b"new"]);
}

#[test]
fn a_second_engine_on_the_same_directory_is_refused_with_the_holder() {
    let fixture = Fixture::new();
    match open(&fixture.disk, &fixture.config, &fixture.clock) {
        Err(OpenError::Locked { holder, .. }) => {
            assert!(holder.contains(&std::process::id().to_string()), "{holder}");
        }
        _ => panic!("locked"),
    }
}

#[test]
fn an_idle_journal_proves_its_flushes() {
    let fixture = Fixture::new();
    fixture.append("a", b"1").unwrap();
    fixture.core.idle();
    let before = fixture.disk.calls();
    fixture.core.idle();
    assert_eq!(fixture.disk.calls(), before, "one marker is enough");
}

/// A partial write reads the block from the device first, if the page cache no longer has that block.
#[test]
fn no_write_to_the_journal_enters_a_block_without_covering_it() {
    const BLOCK: u64 = 4096;
    let disk = SimDisk::new();
    disk.trace_calls(true);
    let fixture = Fixture::on(disk);
    let mut state = 1_u64;
    for _ in 0..300 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let data = vec![7; (state >> 33) as usize % 3_000];
        fixture.append("a", &data).unwrap();
    }
    let (_, calls) = fixture.disk.trace();
    let mut covered: HashMap<String, HashSet<u64>> = HashMap::new();
    let mut entered = 0;
    for call in &calls {
        let words: Vec<&str> = call.split(' ').collect();
        let ["Write", path, _, offset, _, length, _] = words[..] else {
            continue;
        };
        if !path.starts_with("journal/") {
            continue;
        }
        let [offset, length] = [offset, length].map(|number| number.parse::<u64>().unwrap());
        let covered = covered.entry(path.to_owned()).or_default();
        for block in offset / BLOCK..(offset + length).div_ceil(BLOCK) {
            let (start, end) = (block * BLOCK, (block + 1) * BLOCK);
            if covered.insert(block) {
                entered += 1;
                assert!(offset <= start && end <= offset + length, "{call}");
            }
        }
    }
    assert!(entered > 100, "{entered} blocks");
}
