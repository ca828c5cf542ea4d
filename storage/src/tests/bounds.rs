//! Bounds of the whole store, and of the steps of epochs.

use std::io::ErrorKind::StorageFull;

use super::*;
use crate::api::error::{AdminError, Bounded, CursorError, FenceError, Named};
use crate::api::record::{CursorCommit, Producer};
use crate::api::ticket::block_on;
use crate::base::ids::Name;
use crate::upkeep::sorter::Turns;

const RISE: u64 = 1 << 32;

fn bounded(logs: u64, producers: u64, cursors: u64, name_bytes: u64) -> StorageConfig {
    StorageConfig {
        max_logs: logs,
        max_producers: producers,
        max_cursors: cursors,
        max_name_bytes: name_bytes,
        ..small_config()
    }
}

fn with(config: StorageConfig) -> Fixture {
    Fixture::with(SimDisk::new(), config)
}

pub(super) fn names(logs: &[&str]) -> Batch {
    let records: &[&[u8]] = &[b"x"];
    batch(&logs.iter().map(|log| (*log, records)).collect::<Vec<_>>())
}

pub(super) fn by(log: &str, id: &str, epoch: u64, sequence: u64) -> Batch {
    let mut batch = names(&[log]);
    batch.logs[0].producer = Some(Producer {
        id: Name::new(id).unwrap(),
        epoch,
        sequence,
    });
    batch
}

pub(super) fn cursor(log: &str, cursor: &str) -> CursorCommit {
    CursorCommit {
        log: LogName::new(log).unwrap(),
        cursor: Name::new(cursor).unwrap(),
        lsn: Lsn::ZERO,
        expected_lsn: None,
        log_id: None,
    }
}

fn cursors(log: &str, cursors: &[&str]) -> Batch {
    let mut batch = batch(&[]);
    batch.cursors = cursors.iter().map(|name| self::cursor(log, name)).collect();
    batch
}

fn quota(error: AppendError) -> (Bounded, u64, u64) {
    match error {
        AppendError::Quota {
            what, used, limit, ..
        } => (what, used, limit),
        other => panic!("{other}"),
    }
}

impl Fixture {
    fn full(&self, batch: Batch) -> (Bounded, u64, u64) {
        let found = quota(self.append_batch(batch).unwrap_err());
        self.count();
        found
    }

    /// Checks that the counters equal a recount.
    fn count(&self) {
        assert_eq!(self.core.logs.holdings(), self.core.logs.recount());
    }

    fn drop_log(&self, log: &str) {
        let deletion = self.core.delete_in_turn(target(log));
        self.core.turn();
        block_on(deletion).unwrap();
        self.count();
    }

    fn moved(&self, commit: CursorCommit) -> Result<(), CursorError> {
        let operation = crate::journal::committer::CursorChange::Commit(commit);
        let moved = self.core.move_cursor(operation);
        self.core.turn();
        block_on(moved).map(drop)
    }

    fn forgotten(&self, log: &str, cursor: &str) {
        let operation = crate::journal::committer::CursorChange::Delete {
            target: target(log),
            cursor: Name::new(cursor).unwrap(),
        };
        let moved = self.core.move_cursor(operation);
        self.core.turn();
        block_on(moved).unwrap();
        self.count();
    }

    fn raise(&self, log: &str, epoch: Option<u64>) -> Result<u64, FenceError> {
        let fenced = self.core.fence(target(log), epoch);
        self.core.turn();
        block_on(fenced).map(|fenced| fenced.writer_epoch)
    }
}

#[test]
fn every_way_to_a_log_ends_at_the_bound_of_logs() {
    let f = with(bounded(3, 9, 9, 999));
    f.append_batch(names(&["a"])).unwrap();
    // Each log fits alone, but not all together: none is created.
    let over = (Bounded::Logs, 1, 3);
    assert_eq!(f.full(names(&["b", "c", "d"])), over);
    f.append_batch(names(&["a", "b", "c"])).unwrap();
    let full = (Bounded::Logs, 3, 3);
    assert_eq!(f.full(names(&["d"])), full);
    assert_eq!(f.full(names(&["a", "d"])), full);
    assert_eq!(f.full(by("d", "p", 0, 0)), full);
    match f.raise("d", None) {
        Err(FenceError::Append(error)) => assert_eq!(quota(error), full),
        other => panic!("{other:?}"),
    }
    let name = LogName::new("d").unwrap();
    let created = f.core.create_in_turn(name, LogConfig::default());
    f.core.turn();
    match block_on(created) {
        Err(AdminError::Append(error)) => assert_eq!(quota(error), full),
        other => panic!("{other:?}"),
    }
    assert!(f.read("d", 0).is_err());
    // Existing logs go on, and a deletion makes room at once.
    f.append_batch(names(&["a", "b", "c"])).unwrap();
    f.raise("a", None).unwrap();
    f.drop_log("b");
    f.raise("d", None).unwrap();
    assert_eq!(f.full(names(&["b"])), full);
    // A start counts again.
    let f = f.restart();
    f.count();
    assert_eq!(f.full(names(&["b"])), full);
    let f = f.restart_cleanly();
    assert_eq!(f.full(names(&["b"])), full);
}

#[test]
fn producers_of_all_logs_are_bounded_together() {
    let f = with(bounded(99, 2, 9, 999));
    f.append_batch(by("a", "p", 0, 0)).unwrap();
    f.append_batch(by("b", "p", 0, 0)).unwrap();
    let full = (Bounded::Producers, 2, 2);
    assert_eq!(f.full(by("a", "q", 0, 0)), full);
    assert_eq!(f.full(by("c", "p", 0, 0)), full);
    assert!(f.read("c", 0).is_err(), "a refusal makes no log");
    // The next batch, a repeat and a higher epoch come from known producers.
    f.append_batch(by("a", "p", 0, 1)).unwrap();
    assert!(f.append_batch(by("a", "p", 0, 1)).unwrap().appends[0].deduplicated);
    f.append_batch(by("a", "p", 1, 0)).unwrap();
    let f = f.restart();
    assert_eq!(f.full(by("a", "q", 0, 0)), full);
    f.drop_log("b");
    f.append_batch(by("a", "q", 0, 0)).unwrap();
    assert_eq!(f.full(by("a", "r", 0, 0)), full);
}

#[test]
fn cursors_of_all_logs_are_bounded_together() {
    let f = with(bounded(99, 9, 3, 999));
    f.append_batch(names(&["a", "b"])).unwrap();
    f.moved(cursor("a", "one")).unwrap();
    let over = (Bounded::Cursors, 1, 3);
    assert_eq!(f.full(cursors("b", &["one", "two", "three"])), over);
    f.append_batch(cursors("b", &["one", "two"])).unwrap();
    let full = (Bounded::Cursors, 3, 3);
    assert_eq!(f.full(cursors("a", &["two"])), full);
    match f.moved(cursor("a", "two")) {
        Err(CursorError::Append(error)) => assert_eq!(quota(error), full),
        other => panic!("{other:?}"),
    }
    f.moved(cursor("a", "one")).unwrap();
    let f = f.restart();
    assert_eq!(f.full(cursors("a", &["two"])), full);
    f.forgotten("b", "one");
    f.moved(cursor("a", "two")).unwrap();
    f.drop_log("b");
    f.append_batch(cursors("a", &["three"])).unwrap();
    assert_eq!(f.full(cursors("a", &["four"])), full);
}

#[test]
fn bytes_of_all_names_are_bounded_together() {
    let f = with(bounded(99, 99, 99, 10));
    f.append_batch(names(&["abcd"])).unwrap();
    let over = (Bounded::NameBytes, 4, 10);
    assert_eq!(f.full(names(&["abc", "defg"])), over);
    assert_eq!(f.full(by("abcd", "producer", 0, 0)), over);
    f.append_batch(by("abcd", "pro", 0, 0)).unwrap();
    f.append_batch(cursors("abcd", &["cur"])).unwrap();
    let full = (Bounded::NameBytes, 10, 10);
    assert_eq!(f.full(cursors("abcd", &["d"])), full);
    assert_eq!(f.full(names(&["e"])), full);
    f.forgotten("abcd", "cur");
    f.append_batch(names(&["efg"])).unwrap();
    let f = f.restart();
    assert_eq!(f.full(names(&["h"])), full);
}

#[test]
fn a_store_beyond_its_bounds_opens_and_takes_appends_to_existing_logs() {
    let f = Fixture::new();
    let logs: Vec<String> = (0..20).map(|number| format!("log-{number}")).collect();
    for log in &logs {
        f.append_batch(by(log, "p", 0, 0)).unwrap();
        f.append_batch(cursors(log, &["c"])).unwrap();
    }
    let f = Fixture {
        config: bounded(5, 5, 5, 5),
        ..f
    };
    let f = f.restart();
    for log in &logs {
        f.append_batch(by(log, "p", 0, 1)).unwrap();
        f.append_batch(cursors(log, &["c"])).unwrap();
    }
    assert_eq!(f.full(names(&["new"])), (Bounded::Logs, 20, 5));
    let producers = f.full(by("log-1", "q", 0, 0));
    assert_eq!(producers, (Bounded::Producers, 20, 5));
    assert_eq!(f.full(cursors("log-1", &["d"])), (Bounded::Cursors, 20, 5));
}

#[test]
fn deleted_logs_that_are_not_sorted_are_bounded_too() {
    let f = with(bounded(1, 9, 9, 1 << 20));
    // 1 log, 1/4 of that number, and 1,024 more.
    let most = 1 + 1024;
    for number in 0..most {
        let log = format!("log-{number}");
        f.core.pool_in_turn().unwrap();
        f.append_batch(names(&[&log])).unwrap();
        f.drop_log(&log);
    }
    let full = (Bounded::DeletedLogs, most, most);
    assert_eq!(f.full(names(&["one more"])), full);
    let f = f.restart();
    f.count();
    assert_eq!(f.full(names(&["one more"])), full);
}

#[test]
fn deleted_logs_at_their_bound_are_forgotten_with_little_to_sort() {
    let f = with(bounded(1, 9, 9, 1 << 20));
    for number in 0..1025 {
        let log = format!("log-{number}");
        f.core.pool_in_turn().unwrap();
        f.append_batch(names(&[&log])).unwrap();
        f.drop_log(&log);
    }
    assert_eq!(f.full(names(&["kept"])).0, Bounded::DeletedLogs);
    let sort = |f: &Fixture| {
        let mut turns = Turns::default();
        for _ in 0..20 {
            f.core.pool_in_turn().unwrap();
            f.core
                .sorter
                .sort_turn(&mut turns, &mut |_| Ok(()))
                .unwrap();
            f.core.turn();
        }
    };
    sort(&f);
    let waiting = f.core.logs.holdings().deleted;
    assert!(waiting <= 512, "{waiting}");
    f.append_batch(names(&["kept"])).unwrap();
    // Few deleted logs remain, so the current segment is not left before it is full.
    let segments = f.core.journal.segments.read().len();
    sort(&f);
    assert_eq!(f.core.journal.segments.read().len(), segments);
    let f = f.restart();
    f.count();
    assert!(f.read("kept", 0).is_ok());
    assert_eq!(f.full(names(&["one more"])), (Bounded::Logs, 1, 1));
}

#[test]
fn a_void_group_counts_nothing() {
    let f = with(bounded(5, 3, 3, 100));
    f.append_batch(by("a", "p", 0, 0)).unwrap();
    f.append_batch(cursors("a", &["c"])).unwrap();
    let before = f.core.logs.holdings();
    let mut refused = Vec::new();
    f.disk.fail_write(1, StorageFull, 100);
    for batch in [
        names(&["b", "c"]),
        by("a", "q", 0, 0),
        by("d", "p", 0, 0),
        by("a", "p", 1, 0),
        cursors("a", &["d"]),
        cursors("b", &["c"]),
    ] {
        refused.push(f.submit(batch));
    }
    f.core.turn();
    for ticket in &mut refused {
        let answer = settled(ticket).unwrap();
        assert!(
            matches!(answer, Err(AppendError::DiskFull(_))),
            "{answer:?}"
        );
    }
    assert_eq!(f.core.logs.holdings(), before);
    f.count();
    // All of it fits once more.
    f.append_batch(names(&["b", "c"])).unwrap();
    f.append_batch(by("a", "q", 0, 0)).unwrap();
    f.append_batch(by("d", "p", 0, 0)).unwrap();
    f.append_batch(cursors("b", &["c", "d"])).unwrap();
    f.count();
}

#[test]
fn an_epoch_rises_by_two_to_the_32_at_a_time_and_no_more() {
    let f = Fixture::new();
    let jump = |result: Result<Appended, AppendError>| match result {
        Err(AppendError::EpochJump { given, current, .. }) => (given, current),
        other => panic!("{other:?}"),
    };
    // Epoch of a producer. For a new producer it counts from 0.
    assert_eq!(
        jump(f.append_batch(by("a", "p", u64::MAX, 0))),
        (u64::MAX, 0)
    );
    assert_eq!(
        jump(f.append_batch(by("a", "p", RISE + 1, 0))),
        (RISE + 1, 0)
    );
    assert!(f.read("a", 0).is_err(), "a refusal makes no log");
    f.append_batch(by("a", "p", RISE, 0)).unwrap();
    let beyond = 2 * RISE + 1;
    assert_eq!(
        jump(f.append_batch(by("a", "p", beyond, 0))),
        (beyond, RISE)
    );
    // The current owner goes on.
    f.append_batch(by("a", "p", RISE, 1)).unwrap();
    f.append_batch(by("a", "p", beyond - 1, 0)).unwrap();
    // Epoch of a writer.
    let jump = |result: Result<u64, FenceError>| match result {
        Err(FenceError::Append(AppendError::EpochJump { given, current, .. })) => (given, current),
        other => panic!("{other:?}"),
    };
    assert_eq!(jump(f.raise("new", Some(u64::MAX))), (u64::MAX, 0));
    assert_eq!(jump(f.raise("new", Some(RISE + 1))), (RISE + 1, 0));
    assert!(f.read("new", 0).is_err(), "a refusal makes no log");
    assert_eq!(jump(f.raise("a", Some(u64::MAX))), (u64::MAX, 0));
    assert_eq!(f.raise("a", Some(RISE)).unwrap(), RISE);
    assert_eq!(jump(f.raise("a", Some(beyond))), (beyond, RISE));
    assert_eq!(f.raise("a", None).unwrap(), RISE + 1);
    assert_eq!(f.raise("new", Some(RISE)).unwrap(), RISE);
}

/// Kind and name that were refused, and the refused character.
fn unseen(error: AppendError) -> (Named, String, char) {
    match error {
        AppendError::InvisibleName {
            what,
            name,
            character,
            ..
        } => (what, name.into(), character),
        other => panic!("{other}"),
    }
}

#[test]
fn new_names_that_people_cannot_see_are_refused_on_every_way() {
    let f = with(bounded(9, 9, 9, 999));
    f.append_batch(names(&["a", "日本", "plain name"])).unwrap();
    for odd in [
        "pay\u{202e}lla",
        "a\u{200b}",
        "a\u{a0}b",
        "\u{feff}a",
        "a\u{e0041}",
    ] {
        let character = odd.chars().find(|c| !c.is_ascii()).unwrap();
        let log = (Named::Log, odd.to_owned(), character);
        // The whole batch is refused, logs with plain names included.
        let refused = f.append_batch(names(&["a", "b", odd])).unwrap_err();
        assert_eq!(unseen(refused), log);
        assert!(f.read("b", 0).is_err());
        match f.raise(odd, None) {
            Err(FenceError::Append(error)) => assert_eq!(unseen(error), log),
            other => panic!("{other:?}"),
        }
        let created = f
            .core
            .create_in_turn(LogName::new(odd).unwrap(), LogConfig::default());
        f.core.turn();
        match block_on(created) {
            Err(AdminError::Append(error)) => assert_eq!(unseen(error), log),
            other => panic!("{other:?}"),
        }
        let refused = f.append_batch(by("a", odd, 0, 0)).unwrap_err();
        assert_eq!(unseen(refused).0, Named::Producer);
        match f.moved(cursor("a", odd)) {
            Err(CursorError::Append(error)) => assert_eq!(unseen(error).0, Named::Cursor),
            other => panic!("{other:?}"),
        }
        let refused = f.append_batch(cursors("a", &["plain", odd])).unwrap_err();
        assert_eq!(unseen(refused).0, Named::Cursor);
        f.count();
    }
}

#[test]
fn names_that_people_cannot_see_stay_usable_where_they_exist() {
    let odd = "pay\u{202e}lla";
    let mut config = bounded(9, 9, 9, 999);
    config.allow_invisible_names = true;
    let f = with(config.clone());
    f.append_batch(by(odd, odd, 0, 0)).unwrap();
    f.moved(cursor(odd, odd)).unwrap();
    let disk = f.disk.clone();
    drop(f);
    config.allow_invisible_names = false;
    let f = Fixture::with(disk, config);
    f.append_batch(by(odd, odd, 0, 1)).unwrap();
    f.moved(cursor(odd, odd)).unwrap();
    f.raise(odd, None).unwrap();
    assert_eq!(f.read(odd, 0).unwrap().tail_lsn, Lsn::new(2));
    f.forgotten(odd, odd);
    f.drop_log(odd);
    assert_eq!(
        unseen(f.append_batch(names(&[odd])).unwrap_err()).0,
        Named::Log
    );
}
