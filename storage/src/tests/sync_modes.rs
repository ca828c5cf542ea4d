//! Sync modes: the promise of an ack in each mode, and the records that a crash takes.

use super::*;
use crate::api::record::{LogConfig, SyncMode};
use crate::api::ticket::block_on;

fn with_mode(mode: SyncMode) -> Fixture {
    let config = StorageConfig {
        sync_mode: mode,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    // The log's creation is durable in every mode.
    let created = fixture
        .core
        .create_in_turn(LogName::new("a").unwrap(), LogConfig::default());
    fixture.core.turn();
    block_on(created).unwrap();
    fixture
}

impl Fixture {
    /// Appends as the log's mode says.
    fn append_by_mode(&self, data: &[u8], single: bool) -> Appended {
        let batch = Batch {
            single,
            ..batch(&[("a", &[data])])
        };
        let mut ticket = self.core.enqueue_by_mode(None, batch);
        self.core.turn();
        settled(&mut ticket).unwrap().unwrap()
    }

    fn tail(&self, visibility: Visibility) -> u64 {
        let log = self.core.logs.by_name("a").unwrap();
        self.core.tail(&log, visibility).get()
    }
}

#[test]
fn each_mode_answers_at_its_level_and_a_plain_read_sees_every_plain_ack() {
    use Durability::{Accepted, Durable, Written};
    for (mode, single, grouped) in [
        (SyncMode::Strict, Durable, Durable),
        (SyncMode::Batch, Written, Durable),
        (SyncMode::Interval, Written, Written),
        (SyncMode::Async, Written, Written),
        (SyncMode::Manual, Accepted, Accepted),
    ] {
        let fixture = with_mode(mode);
        assert_eq!(
            fixture.append_by_mode(b"1", true).durability,
            single,
            "{mode:?}"
        );
        let page = fixture.read("a", 0).unwrap();
        assert_eq!(payloads(&page.batches[0]), [b"1"], "{mode:?}");
        assert_eq!(
            fixture.append_by_mode(b"2", false).durability,
            grouped,
            "{mode:?}"
        );
        assert_eq!(
            fixture.read("a", 0).unwrap().tail_lsn,
            Lsn::new(2),
            "{mode:?}"
        );
    }
}

#[test]
fn only_modes_that_promise_it_are_flushed_unasked() {
    for mode in [SyncMode::Batch, SyncMode::Interval, SyncMode::Async] {
        let fixture = with_mode(mode);
        fixture.append_by_mode(b"1", true);
        assert_eq!(
            fixture.core.journal.scheduled().is_some(),
            mode.flushes_by_itself()
        );
        assert!(fixture.core.journal.unflushed_since().is_some());
    }
}

#[test]
fn a_batch_in_batch_mode_makes_every_earlier_append_durable() {
    let fixture = with_mode(SyncMode::Batch);
    fixture.append_by_mode(b"1", true);
    assert_eq!(fixture.tail(Visibility::Durable), 0);
    fixture.append_by_mode(b"2", false);
    assert_eq!(fixture.tail(Visibility::Durable), 2);
}

#[test]
fn a_request_for_more_than_the_mode_flushes_earlier_records_too() {
    for mode in [SyncMode::Async, SyncMode::Manual] {
        let fixture = with_mode(mode);
        fixture.append_by_mode(b"1", true);
        let answer = fixture.append("a", b"2").unwrap();
        assert_eq!(answer.durability, Durability::Durable);
        assert_eq!(answer.appends[0].first_lsn, Lsn::new(1));
        assert_eq!(fixture.contents("a"), [b"1", b"2"]);
    }
}

#[test]
fn manual_loses_on_a_kill_exactly_unsynced_records_and_says_so() {
    let fixture = with_mode(SyncMode::Manual);
    let epoch = fixture.core.journal.recovery_epoch;
    for index in 0..10u8 {
        let answer = fixture.append_by_mode(&[index], true);
        assert_eq!(answer.durability, Durability::Accepted);
        assert_eq!(
            answer.position, None,
            "what is in memory only has no place yet"
        );
    }
    let synced = fixture.core.sync_in_turn(Durability::Durable);
    fixture.core.turn();
    let position = block_on(synced).unwrap();
    for index in 10..15u8 {
        fixture.append_by_mode(&[index], true);
    }
    assert_eq!(fixture.tail(Visibility::Accepted), 15);
    assert_eq!(fixture.tail(Visibility::Durable), 10);
    let fixture = fixture.restart();
    assert_eq!(fixture.contents("a").len(), 10);
    let survived = fixture.core.survived(epoch).unwrap();
    assert!(survived >= position);
}

#[test]
fn a_cursor_beyond_a_kill_names_records_lost_from_memory_and_goes_on() {
    let fixture = with_mode(SyncMode::Manual);
    fixture.append("a", b"kept").unwrap();
    fixture.append_by_mode(b"lost", true);
    fixture.append_by_mode(b"lost too", true);
    let mut scan = fixture.scan(one("a"), ScanStart::First, true);
    let mut cursor = Bytes::new();
    while let Some(chunk) = next_chunk(&mut scan) {
        cursor = chunk.unwrap().unwrap().cursor;
    }
    drop(scan);
    let fixture = fixture.restart();
    fixture.append_by_mode(b"new", true);
    let mut scan = fixture.scan(one("a"), ScanStart::Cursor(cursor), true);
    let chunk = next_chunk(&mut scan).unwrap().unwrap().unwrap();
    let gap = &chunk.gaps[0];
    assert_eq!((gap.from, gap.to), (Some(Lsn::new(1)), Some(Lsn::new(3))));
    assert_eq!(payloads(&chunk.batches[0]), [b"new"]);
}

#[test]
fn records_of_a_deleted_log_in_memory_go_with_it() {
    let fixture = with_mode(SyncMode::Manual);
    fixture.append_by_mode(b"gone", true);
    let deleted = fixture.core.delete_in_turn(target("a"));
    fixture.core.turn();
    block_on(deleted).unwrap();
    let end = fixture.core.journal.written();
    let synced = fixture.core.sync_in_turn(Durability::Durable);
    fixture.core.turn();
    block_on(synced).unwrap();
    assert_eq!(
        fixture.core.journal.written(),
        end,
        "no frame follows the deletion"
    );
    assert_eq!(
        fixture.append("a", b"new").unwrap().appends[0].first_lsn,
        Lsn::ZERO
    );
    assert_eq!(fixture.restart().contents("a"), [b"new"]);
}

#[test]
fn a_full_buffer_is_written_and_other_logs_do_not_touch_it() {
    let config = StorageConfig {
        sync_mode: SyncMode::Manual,
        buffer_bytes: 4000,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    fixture.append("a", b"first").unwrap();
    fixture.append_by_mode(&[1; 1000], true);
    fixture.append("other", b"x").unwrap();
    assert_eq!(
        fixture.tail(Visibility::Written),
        1,
        "another log's request leaves it alone"
    );
    for _ in 0..4 {
        fixture.append_by_mode(&[1; 1000], true);
    }
    assert!(fixture.tail(Visibility::Written) >= 4);
    assert_eq!(
        contents(&fixture.core, "a", Visibility::Accepted)
            .unwrap()
            .len(),
        6
    );
    fixture.core.close().unwrap();
    assert_eq!(
        fixture.restart().contents("a").len(),
        6,
        "shutdown writes what is left"
    );
}

#[test]
fn log_that_leaves_manual_has_no_record_in_memory() {
    let fixture = with_mode(SyncMode::Manual);
    fixture.append_by_mode(b"x", true);
    assert_eq!(fixture.tail(Visibility::Durable), 0);
    let strict = LogConfig {
        sync_mode: Some(SyncMode::Strict),
        ..LogConfig::default()
    };
    let name = LogName::new("a").unwrap();
    let configured = fixture.core.configure_in_turn(name, strict);
    fixture.core.turn();
    block_on(configured).unwrap();
    assert_eq!(fixture.tail(Visibility::Durable), 1);
    assert_eq!(fixture.restart().contents("a"), [b"x"]);
}

#[test]
fn scan_of_many_logs_gets_accepted_records_once_they_are_written() {
    let fixture = with_mode(SyncMode::Manual);
    fixture.append_by_mode(b"x", true);
    let count = || {
        let mut scan = fixture.scan(Selector::All, ScanStart::First, false);
        let chunk = next_chunk(&mut scan).unwrap().unwrap();
        let batches = chunk.map(|chunk| chunk.batches).unwrap_or_default();
        batches.iter().map(|batch| batch.count).sum::<u32>()
    };
    assert_eq!(count(), 0);
    fixture.append("a", b"y").unwrap();
    assert_eq!(count(), 2);
}

#[test]
fn buffered_records_keep_their_times_and_are_read_part_by_part() {
    let fixture = with_mode(SyncMode::Manual);
    for index in 0..5u8 {
        fixture.clock.advance(1000);
        fixture.append_by_mode(&[index], true);
    }
    let mut request = read_request("a", ReadStart::Lsn(Lsn::new(2)));
    request.max_records = 2;
    let page = read::page(&fixture.core.store, &request, Reach::Disk).unwrap();
    assert_eq!(payloads(&page.batches[0]), [[2], [3]]);
    let before = read::page(
        &fixture.core.store,
        &read_request("a", ReadStart::First),
        Reach::Disk,
    )
    .unwrap();
    fixture.append("a", b"x").unwrap();
    let after = fixture.read("a", 0).unwrap();
    assert_eq!(
        before.batches[0].body, after.batches[0].body,
        "the same bytes once written"
    );
    assert_eq!(before.batches[0].arrival, after.batches[0].arrival);
}
