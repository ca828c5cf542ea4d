//! Deletions: one flush takes many of them, in the order of their requests.

use super::*;
use crate::api::error::AdminError;
use crate::api::ticket::block_on;
use crate::base::promise::Awaited;

fn name(number: usize) -> String {
    format!("log/{number:05}")
}

fn with_logs(count: usize) -> Fixture {
    // No roll comes between the deletions, not even with encrypted records.
    let config = StorageConfig {
        segment_bytes: 256 << 10,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    for number in 0..count {
        drop(fixture.submit(batch(&[(&name(number), &[b"x"])])));
    }
    fixture.core.turn();
    fixture
}

type Deletion = Awaited<Result<(), AdminError>>;

fn delete(fixture: &Fixture, log: &str) -> Deletion {
    fixture.core.delete_in_turn(target(log))
}

#[test]
fn many_are_flushed_together() {
    let fixture = with_logs(200);
    // The second flush would fail.
    fixture.disk.fail_sync(2);
    let deletions: Vec<Deletion> = (0..200).map(|at| delete(&fixture, &name(at))).collect();
    fixture.core.turn();
    for deletion in deletions {
        block_on(deletion).unwrap();
    }
    assert_eq!(fixture.core.logs.len(), 0);
    assert_eq!(fixture.disk.faults_left(), 1);
}

#[test]
fn a_second_deletion_finds_no_log_and_later_requests_find_a_free_name() {
    let fixture = with_logs(3);
    let first = delete(&fixture, &name(0));
    let other = delete(&fixture, &name(1));
    let again = delete(&fixture, &name(0));
    let mut appended = fixture.submit(batch(&[(&name(1), &[b"new", b"log"])]));
    let once_more = delete(&fixture, &name(1));
    let replaced = LogTarget {
        log_id: Some(crate::base::ids::LogId::new(7_000_000)),
        ..target(&name(2))
    };
    let replaced = fixture.core.delete_in_turn(replaced);
    fixture.core.turn();
    block_on(first).unwrap();
    block_on(other).unwrap();
    assert!(matches!(
        block_on(again),
        Err(AdminError::Target(TargetError::NotFound { .. }))
    ));
    let appended = settled(&mut appended).unwrap().unwrap();
    assert_eq!(appended.appends[0].first_lsn, Lsn::ZERO);
    block_on(once_more).unwrap();
    assert!(matches!(
        block_on(replaced),
        Err(AdminError::Target(TargetError::Replaced { .. }))
    ));
    assert_eq!(fixture.core.logs.len(), 1);
    assert_eq!(fixture.restart().core.logs.len(), 1);
}

#[test]
fn a_flush_that_fails_deletes_none_of_them() {
    let fixture = with_logs(20);
    fixture.disk.fail_sync(1);
    let deletions: Vec<Deletion> = (0..20).map(|at| delete(&fixture, &name(at))).collect();
    fixture.core.turn();
    for deletion in deletions {
        assert!(block_on(deletion).is_err());
    }
    assert_eq!(fixture.core.logs.len(), 20);
}

#[test]
fn a_segment_that_is_left_on_the_way_knows_of_all_that_it_holds() {
    const LOGS: usize = 4000;
    for cleanly in [false, true] {
        let fixture = with_logs(LOGS);
        let before = fixture.core.journal.current().base;
        let kept = LOGS - 5;
        let deletions: Vec<Deletion> = (0..kept).map(|at| delete(&fixture, &name(at))).collect();
        fixture.core.turn();
        assert!(
            fixture.core.journal.current().base > before,
            "it is one turn"
        );
        for deletion in deletions {
            block_on(deletion).unwrap();
        }
        let fixture = match cleanly {
            true => fixture.restart_cleanly(),
            false => fixture.restart(),
        };
        assert_eq!(fixture.core.logs.len(), 5);
        assert!(fixture.contents(&name(kept)).len() == 1);
    }
}

#[test]
fn deleting_a_log_whose_creation_was_taken_back_finds_no_log() {
    // The group that creates "new" ends with the 256th deletion, and finds no space.
    let config = StorageConfig {
        segment_bytes: 1 << 20,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    for number in 0..256 {
        fixture.append(&name(number), b"x").unwrap();
    }
    let new = LogName::new("new").unwrap();
    let created = fixture.core.create_in_turn(new, LogConfig::default());
    let deletions: Vec<Deletion> = (0..256).map(|at| delete(&fixture, &name(at))).collect();
    let deleted = delete(&fixture, "new");
    fixture
        .disk
        .fail_write(1, std::io::ErrorKind::StorageFull, 0);
    fixture.core.turn();
    assert!(block_on(created).is_err());
    for deletion in deletions {
        assert!(block_on(deletion).is_err());
    }
    let not_found = block_on(deleted);
    assert!(
        matches!(
            not_found,
            Err(AdminError::Target(TargetError::NotFound { .. }))
        ),
        "{not_found:?}"
    );
    let mut fixture = fixture;
    for _ in 0..2 {
        fixture = fixture.restart();
        assert_eq!(fixture.report.logs, 256);
        assert!(fixture.report.findings.is_empty(), "{:?}", fixture.report);
        assert!(fixture.report.damage.is_empty(), "{:?}", fixture.report);
    }
}
