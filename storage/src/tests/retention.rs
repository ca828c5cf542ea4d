//! Retention: records beyond a bound expire and no others do, whatever the clock does. Readers learn whether
//! records were trimmed or expired.

use super::*;
use crate::api::record::{GapReason, Retention, RetentionBounds, SyncMode};
use crate::api::ticket::block_on;
use crate::base::metrics::RetentionPass;
use crate::journal::committer::Expiry;
use crate::upkeep::retention::Ends;

pub(super) const HOUR: i64 = 3600 * 1_000_000;
const DAY: i64 = 24 * HOUR;

pub(super) fn by_records(records: u64) -> Retention {
    Retention {
        max_records: Some(records),
        ..Retention::default()
    }
}

pub(super) fn by_bytes(bytes: u64) -> Retention {
    Retention {
        max_bytes: Some(bytes),
        ..Retention::default()
    }
}

pub(super) fn by_age(micros: i64) -> Retention {
    Retention {
        max_age: Some(Duration::from_micros(micros.unsigned_abs())),
        ..Retention::default()
    }
}

impl Fixture {
    /// Changes the retention of a log; `None` = the server's settings.
    pub(super) fn retain(&self, log: &str, retention: Option<Retention>) {
        let config = LogConfig {
            retention: retention.map(Box::new),
            ..LogConfig::default()
        };
        let name = LogName::new(log).unwrap();
        let done = match self.core.logs.by_name(log) {
            Some(_) => self.core.configure_in_turn(name, config),
            None => self.core.create_in_turn(name, config),
        };
        self.core.turn();
        block_on(done).unwrap();
    }

    /// Runs a whole pass, as the thread would; `None` if there was no need.
    pub(super) fn pass(&self) -> Option<RetentionPass> {
        let mut pass = self.core.retainer.begin_pass()?;
        while !pass.is_through() {
            let portion = self.core.retainer.look(&mut pass);
            if portion.is_empty() {
                continue;
            }
            let ends: Vec<Ends> = portion.iter().map(Ends::of).collect();
            let expired = self.core.retainer.expire(portion);
            self.core.turn();
            self.core
                .retainer
                .count(&mut pass, &ends, &block_on(expired));
        }
        let came_to = pass.came_to;
        self.core.retainer.end_pass(pass);
        Some(came_to)
    }

    /// Records the time of the expiry clock if that is due, as the thread would.
    fn pass_told(&self) {
        if let Some(told) = self.core.retainer.tell_clock() {
            self.core.turn();
            block_on(told).unwrap();
        }
    }

    fn contents_from(&self, log: &str, from: u64) -> Vec<Vec<u8>> {
        let page = self.read(log, from).unwrap();
        assert_eq!(page.next_lsn, page.tail_lsn);
        page.batches.iter().flat_map(payloads).collect()
    }

    /// Expiries that are due, not handed in yet.
    fn look(&self) -> Vec<Expiry> {
        let mut pass = self.core.retainer.begin_pass().unwrap();
        self.core.retainer.look(&mut pass)
    }

    pub(super) fn first(&self, log: &str) -> u64 {
        let log = self.core.logs.by_name(log).unwrap();
        log.state.read().first(self.core.journal.durable()).get()
    }

    /// Appends `records` batches of one record with `bytes` bytes.
    fn fill(&self, log: &str, records: u64, bytes: usize) {
        for _ in 0..records {
            self.append(log, &vec![7; bytes]).unwrap();
        }
    }

    /// Bytes of each frame of a log that holds a kept record, as a dump reports them.
    fn kept_bytes(&self, log: &str) -> Vec<u64> {
        let id = self.core.logs.by_name(log).unwrap().id;
        let first = Lsn::new(self.first(log));
        let mut found = Vec::new();
        for segment in self.core.journal.segments.read().values() {
            let end = segment.end.read().unwrap_or(self.core.journal.durable());
            let mut at = segment.first();
            while at < end {
                let bytes = self.core.open_segments.read(segment, at, 64 << 10).unwrap();
                let header =
                    crate::format::frame::decode_header(&bytes, segment.life.salt).unwrap();
                let batch = header.kind == crate::format::frame::FrameKind::Batch;
                if batch && header.log_id == id && header.next_lsn() > Some(first) {
                    found.push(header.frame_len());
                }
                at = header.end();
            }
        }
        found
    }

    fn gaps(&self, selector: Selector, start: ScanStart) -> Vec<(u64, u64, GapReason)> {
        let mut scan = self.scan(selector, start, false);
        let mut gaps = Vec::new();
        while let Some(Ok(Some(chunk))) = next_chunk(&mut scan) {
            for gap in chunk.gaps {
                gaps.push((gap.from.unwrap().get(), gap.to.unwrap().get(), gap.reason));
            }
        }
        gaps
    }

    fn trim_below(&self, log: &str, before: u64) {
        let awaited = self.core.trim_in_turn(target(log), Lsn::new(before));
        self.core.turn();
        block_on(awaited).unwrap();
    }

    /// Moves a cursor, or deletes it.
    fn cursor(&self, log: &str, cursor: &str, lsn: Option<u64>) {
        use crate::journal::committer::CursorChange;
        let cursor = crate::base::ids::Name::new(cursor).unwrap();
        let operation = match lsn {
            Some(lsn) => CursorChange::Commit(crate::api::record::CursorCommit {
                log: LogName::new(log).unwrap(),
                cursor,
                lsn: Lsn::new(lsn),
                expected_lsn: None,
                log_id: None,
            }),
            None => CursorChange::Delete {
                target: target(log),
                cursor,
            },
        };
        let moved = self.core.move_cursor(operation);
        self.core.turn();
        block_on(moved).unwrap();
    }
}

#[test]
fn exactly_so_many_records_are_kept_also_from_the_middle_of_a_batch() {
    let fixture = Fixture::new();
    fixture.retain("a", Some(by_records(10)));
    let three: &[&[u8]] = &[b"1", b"2", b"3"];
    for _ in 0..5 {
        fixture
            .append_batch(batch(&[("a", three), ("b", three)]))
            .unwrap();
    }
    let came_to = fixture.pass().unwrap();
    assert_eq!((came_to.trims, came_to.records), (1, 5));
    assert_eq!((fixture.first("a"), fixture.first("b")), (5, 0));
    fixture.pass();
    assert_eq!(fixture.first("a"), 5);
    let fixture = fixture.restart();
    assert_eq!(fixture.contents_from("a", 5).len(), 10);
    assert!(matches!(
        fixture.read("a", 4),
        Err(ReadError::Trimmed { first, .. }) if first == Lsn::new(5)
    ));
}

#[test]
fn as_few_of_the_newest_batches_are_kept_as_take_the_bytes_or_more() {
    for bytes in [1, 2000, 100_000, 250_000] {
        let fixture = Fixture::new();
        fixture.retain("a", Some(by_bytes(bytes)));
        for round in 0..60 {
            fixture.fill("a", 2, 500 + round * 90);
            fixture.fill("b", 1, 900);
        }
        let before = fixture.kept_bytes("a");
        let came_to = fixture.pass().unwrap();
        let kept = fixture.kept_bytes("a");
        assert!(before.len() > kept.len(), "{bytes}");
        let sum: u64 = kept.iter().sum();
        assert!(sum >= bytes, "{sum} of {bytes} bytes are kept");
        assert!(sum - kept[0] < bytes, "{sum} bytes are more than need be");
        let gone: u64 = before.iter().sum::<u64>() - sum;
        assert_eq!(came_to.bytes, gone);
        assert_eq!(came_to.records, before.len() as u64 - kept.len() as u64);
        // A start has the same facts of a sealed segment.
        let first = fixture.first("a");
        let fixture = fixture.restart();
        fixture.pass();
        assert_eq!(fixture.first("a"), first);
        fixture.fill("a", 1, 60);
        fixture.pass();
        assert!(fixture.kept_bytes("a").iter().sum::<u64>() >= bytes);
    }
}

#[test]
fn a_log_within_its_bounds_or_without_bounds_forgets_nothing() {
    let fixture = Fixture::new();
    fixture.retain(
        "a",
        Some(Retention {
            max_age: Some(Duration::from_secs(3600)),
            max_bytes: Some(1 << 20),
            max_records: Some(5),
            respect_cursors: false,
        }),
    );
    fixture.fill("a", 5, 100);
    fixture.fill("b", 50, 1000);
    fixture.clock.advance(HOUR - 1);
    fixture.pass();
    assert_eq!((fixture.first("a"), fixture.first("b")), (0, 0));
    fixture.clock.advance(1000 * DAY);
    fixture.pass();
    assert_eq!((fixture.first("a"), fixture.first("b")), (5, 0));
}

#[test]
fn records_older_than_the_age_go_and_the_next_frame_does_not() {
    let fixture = Fixture::new();
    fixture.retain("a", Some(by_age(HOUR)));
    // One record a minute, some in sealed segments, some in memory, with records of another log between them.
    for minute in 0..120 {
        fixture.append("a", &[minute; 1500]).unwrap();
        fixture.append("b", &[minute; 300]).unwrap();
        fixture.clock.advance(HOUR / 60);
    }
    assert!(fixture.core.journal.segments.read().len() > 3);
    for minute in 0..60 {
        fixture.pass();
        // The record of this minute is an hour old.
        assert_eq!(fixture.first("a"), 61 + minute);
        fixture.clock.advance(HOUR / 60 - 1);
        fixture.pass();
        assert_eq!(fixture.first("a"), 61 + minute, "a microsecond too young");
        fixture.clock.advance(1);
    }
    let fixture = fixture.restart();
    fixture.pass();
    assert_eq!(fixture.first("a"), 120);
    assert_eq!(fixture.contents("b").len(), 120);
}

#[test]
fn the_producers_times_do_not_matter() {
    let fixture = Fixture::new();
    fixture.retain("a", Some(by_age(HOUR)));
    let mut old = batch(&[("a", &[b"old" as &[u8]])]);
    set_time(&mut old.logs[0].records, Timestamp::from_micros(0));
    fixture.append_batch(old).unwrap();
    fixture.pass();
    assert_eq!(fixture.first("a"), 0);
    fixture.clock.advance(HOUR);
    fixture.pass();
    assert_eq!(fixture.first("a"), 1);
}

#[test]
fn a_clock_that_jumps_ahead_a_year_expires_nothing_before_half_its_age() {
    for restart in [false, true] {
        let mut fixture = Fixture::new();
        fixture.retain("a", Some(by_age(10 * DAY)));
        fixture.fill("a", 3, 10);
        fixture.clock.jump(365 * DAY);
        fixture.fill("a", 3, 10);
        for _ in 0..5 {
            fixture.pass();
            if restart {
                fixture.pass_told();
                fixture = fixture.restart();
            }
            assert_eq!(fixture.first("a"), 0);
            fixture.clock.advance(DAY - 1);
        }
        fixture.clock.advance(DAY);
        fixture.pass();
        assert!(fixture.first("a") >= 3, "{restart}");
    }
}

#[test]
fn a_clock_that_jumps_back_makes_nothing_go_early() {
    let fixture = Fixture::new();
    fixture.retain("a", Some(by_age(2 * DAY)));
    fixture.retain("b", Some(by_age(2 * DAY)));
    fixture.fill("a", 1, 10);
    fixture.clock.advance(HOUR);
    fixture.pass();
    // The clock was three days ahead, there were no appends, and the clock is corrected.
    fixture.clock.advance(3 * DAY);
    fixture.pass();
    assert_eq!(fixture.first("a"), 1);
    fixture.clock.jump(-3 * DAY);
    fixture.fill("a", 1, 10);
    fixture.fill("b", 1, 10);
    for _ in 0..48 {
        fixture.pass();
        assert_eq!((fixture.first("a"), fixture.first("b")), (1, 0));
        fixture.clock.advance(HOUR);
    }
    // The clock shows its former time; two days later the records are old enough.
    fixture.clock.advance(DAY);
    fixture.pass();
    assert_eq!((fixture.first("a"), fixture.first("b")), (1, 0));
    fixture.clock.advance(2 * DAY);
    fixture.pass();
    assert_eq!((fixture.first("a"), fixture.first("b")), (2, 1));
}

#[test]
fn records_of_a_clock_a_year_ahead_do_not_hold_up_others_for_long() {
    let fixture = Fixture::new();
    fixture.retain("a", Some(by_age(DAY)));
    fixture.clock.jump(365 * DAY);
    fixture.fill("a", 2, 10);
    fixture.clock.jump(-365 * DAY);
    for _ in 0..24 {
        fixture.fill("a", 1, 10);
        fixture.clock.advance(HOUR);
    }
    let mut went = None;
    for hour in 0..48 {
        fixture.pass();
        if fixture.first("a") > 2 {
            went = went.or(Some(hour));
        }
        fixture.clock.advance(HOUR);
    }
    assert!(went.is_some_and(|hour| hour <= 12), "{went:?}");
    assert_eq!(fixture.first("a"), 26);
}

/// A store whose clock was years ahead when it was created.
fn began_ahead(years: i64) -> Fixture {
    let clock = TestClock::new();
    clock.jump(years * 365 * DAY);
    let (disk, config) = (SimDisk::new(), small_config());
    let (core, report) = open(&disk, &config, &clock).unwrap();
    Fixture {
        disk,
        clock,
        config,
        core,
        report,
    }
}

#[test]
fn records_of_a_first_clock_years_ahead_expire_with_later_ones() {
    let fixture = began_ahead(33);
    fixture.retain("a", Some(by_age(DAY)));
    fixture.fill("a", 50, 10);
    // The clock is corrected, and believed after 10 minutes.
    fixture.clock.jump(-30 * 365 * DAY);
    for _ in 0..3 {
        fixture.pass();
        fixture.clock.advance(HOUR / 4);
    }
    fixture.fill("a", 3, 10);
    fixture.pass();
    assert_eq!(fixture.first("a"), 0);
    fixture.clock.advance(3 * DAY);
    fixture.fill("a", 1, 10);
    fixture.pass();
    assert_eq!(fixture.first("a"), 53);
}

#[test]
fn clock_that_began_years_ahead_is_reset() {
    // The clock of the machine shows 2023: no daemon believes that it went back.
    let fixture = began_ahead(30);
    fixture.retain("a", Some(by_age(DAY)));
    fixture.fill("a", 1, 10);
    fixture.clock.jump(-30 * 365 * DAY);
    fixture.clock.advance(DAY);
    let ahead = |fixture: &Fixture| -fixture.core.journal.expiry_lag_micros() / DAY;
    assert!(ahead(&fixture) > 29 * 365);
    let Fixture {
        disk,
        clock,
        config,
        core,
        ..
    } = fixture;
    core.close().unwrap();
    drop(core);
    let shared: Arc<dyn crate::disk::Disk> = Arc::new(disk.clone());
    let shown = crate::expiry_clock(&shared, &config).unwrap().unwrap();
    assert!((shown.micros() - clock.now().micros()) / DAY > 29 * 365);
    crate::reset_expiry_clock(&shared, &config, Arc::clone(&clock) as Arc<dyn Clock>).unwrap();
    let shown = crate::expiry_clock(&shared, &config).unwrap();
    assert_eq!(shown, Some(clock.now()));
    // The next start goes on from there, and records expire again.
    let (core, report) = open(&disk, &config, &clock).unwrap();
    let fixture = Fixture {
        disk,
        clock,
        config,
        core,
        report,
    };
    assert!(fixture.report.clean && fixture.report.findings.is_empty());
    assert_eq!(ahead(&fixture), 0);
    fixture.retain("b", Some(by_age(DAY)));
    fixture.fill("b", 1, 10);
    fixture.clock.advance(2 * DAY);
    fixture.fill("b", 1, 10);
    fixture.pass();
    assert_eq!(fixture.first("b"), 1);
}

#[test]
fn time_without_a_process_counts_once_it_is_made_up_for() {
    let fixture = Fixture::new();
    fixture.retain("a", Some(by_age(DAY)));
    fixture.fill("a", 1, 10);
    fixture.clock.jump(30 * DAY);
    let fixture = fixture.restart_cleanly();
    fixture.pass();
    assert_eq!(fixture.first("a"), 0);
    fixture.clock.advance(DAY / 2);
    fixture.pass();
    assert_eq!(fixture.first("a"), 1, "at twice the pace");
}

#[test]
fn the_time_of_the_expiry_clock_survives_kills_of_an_idle_store() {
    let mut fixture = Fixture::new();
    fixture.retain("a", Some(by_age(DAY)));
    fixture.fill("a", 1, 10);
    let mut passed = 0;
    while fixture.first("a") == 0 {
        fixture.clock.advance(HOUR);
        passed += 1;
        assert!(passed < 100, "it stands still");
        fixture.pass();
        fixture.pass_told();
        fixture = fixture.restart();
    }
    assert!((24..=29).contains(&passed), "after {passed} hours");
}

#[test]
fn only_records_below_the_lowest_cursor_go_if_cursors_are_respected() {
    let fixture = Fixture::new();
    let respecting = Retention {
        respect_cursors: true,
        ..by_records(2)
    };
    fixture.retain("a", Some(respecting));
    fixture.fill("a", 10, 10);
    fixture.pass();
    assert_eq!(fixture.first("a"), 0, "nobody has read any of it");
    fixture.cursor("a", "slow", Some(3));
    fixture.cursor("a", "fast", Some(9));
    fixture.pass();
    assert_eq!(fixture.first("a"), 3);
    fixture.cursor("a", "slow", Some(10));
    fixture.pass();
    assert_eq!(fixture.first("a"), 8);
    fixture.fill("a", 5, 10);
    fixture.cursor("a", "fast", None);
    fixture.pass();
    assert_eq!(fixture.first("a"), 10);
    fixture.cursor("a", "slow", None);
    fixture.pass();
    assert_eq!(fixture.first("a"), 10, "without cursors nothing goes");
    fixture.retain("a", Some(by_records(2)));
    fixture.pass();
    assert_eq!(fixture.first("a"), 13);
}

#[test]
fn statistics_show_logs_bytes_and_age_that_cursors_hold_back() {
    let respecting = Retention {
        respect_cursors: true,
        ..by_records(2)
    };
    let fixture = Fixture::new();
    fixture.retain("a", Some(respecting));
    fixture.retain("b", Some(respecting));
    for log in ["a", "b"] {
        fixture.fill(log, 10, 100);
    }
    fixture.cursor("a", "abandoned", Some(3));
    fixture.cursor("b", "lively", Some(10));
    fixture.pass();
    fixture.clock.advance(HOUR);
    let now = fixture.core.statistics();
    assert_eq!((fixture.first("a"), fixture.first("b")), (3, 8));
    // Records 3 to 7 of "a": five of them, a frame each.
    assert_eq!(now.held_logs, 1);
    assert!((500..2_000).contains(&now.held_bytes), "{}", now.held_bytes);
    assert!(
        now.held_age >= Duration::from_secs(3600),
        "{:?}",
        now.held_age
    );
    fixture.cursor("a", "abandoned", None);
    fixture.cursor("a", "lively", Some(10));
    fixture.pass();
    let now = fixture.core.statistics();
    assert_eq!(
        (now.held_logs, now.held_bytes, now.held_age),
        (0, 0, Duration::ZERO)
    );
    assert_eq!(fixture.first("a"), 8);
}

#[test]
fn statistics_do_not_show_logs_that_hold_nothing_any_more() {
    let respecting = Retention {
        respect_cursors: true,
        ..by_records(2)
    };
    let fixture = Fixture::new();
    for log in ["deleted", "changed"] {
        fixture.retain(log, Some(respecting));
        fixture.fill(log, 10, 100);
    }
    fixture.pass();
    assert_eq!(fixture.core.statistics().held_logs, 2);
    let deletion = fixture.core.delete_in_turn(target("deleted"));
    fixture.core.turn();
    block_on(deletion).unwrap();
    fixture.retain("changed", None);
    fixture.pass();
    assert_eq!(fixture.core.statistics().held_logs, 0);
}

#[test]
fn cursors_hold_back_no_more_than_they_may() {
    let respecting = Retention {
        respect_cursors: true,
        ..by_records(2)
    };
    let config = StorageConfig {
        cursor_hold_bytes: 3_000,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    fixture.retain("a", Some(respecting));
    fixture.cursor("a", "abandoned", Some(0));
    for _ in 0..10 {
        fixture.fill("a", 10, 100);
        fixture.pass();
        let held = fixture.core.statistics().held_bytes;
        // One more frame may stay.
        assert!(held < 3_000 + 500, "{held}");
    }
    let first = fixture.first("a");
    assert!((60..95).contains(&first), "{first}");
    // A log whose cursors hold less keeps it.
    fixture.retain("b", Some(respecting));
    fixture.fill("b", 10, 100);
    fixture.pass();
    assert_eq!(fixture.first("b"), 0);
}

#[test]
fn the_servers_bounds_hold_for_logs_without_any_of_their_own() {
    let config = StorageConfig {
        retention_max_records: 4,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    // There is no log yet.
    fixture.pass();
    fixture.fill("first", 5, 10);
    fixture.pass();
    assert_eq!(fixture.first("first"), 1);
    fixture.retain("own", Some(by_records(6)));
    fixture.retain("none", Some(Retention::default()));
    for log in ["own", "none", "servers"] {
        fixture.fill(log, 10, 10);
    }
    fixture.pass();
    let firsts = |fixture: &Fixture| ["own", "none", "servers"].map(|log| fixture.first(log));
    assert_eq!(firsts(&fixture), [4, 0, 6]);
    let fixture = fixture.restart();
    fixture.retain("none", None);
    fixture.pass();
    assert_eq!(firsts(&fixture), [4, 6, 6]);
}

#[test]
fn settings_that_change_at_a_time_leave_each_others_as_they_are() {
    let fixture = Fixture::new();
    let of_log = |log: &str| {
        let log = fixture.core.logs.by_name(log).unwrap();
        Arc::clone(&log.state.read().config)
    };
    let bounds = |bounds| LogConfigChange {
        retention: Some(RetentionChange::Bounds(bounds)),
        ..LogConfigChange::default()
    };
    fixture.retain("a", Some(by_records(1)));
    fixture.fill("a", 5, 10);
    // All changes are handed in before any is applied, so that none depends on another.
    let changes = [
        bounds(RetentionBounds {
            max_records: Some(None),
            ..RetentionBounds::default()
        }),
        LogConfigChange {
            sync_mode: Some(Some(SyncMode::Batch)),
            ..LogConfigChange::default()
        },
        bounds(RetentionBounds {
            max_bytes: Some(Some(1 << 20)),
            ..RetentionBounds::default()
        }),
        LogConfigChange {
            max_record_bytes: Some(Some(100)),
            ..LogConfigChange::default()
        },
    ];
    let name = LogName::new("a").unwrap();
    let asked = changes.map(|change| fixture.core.configure_in_turn(name.clone(), change));
    fixture.core.turn();
    for done in asked {
        block_on(done).unwrap();
    }
    let expected = LogConfig {
        sync_mode: Some(SyncMode::Batch),
        retention: Some(Box::new(by_bytes(1 << 20))),
        max_record_bytes: Some(100),
        ..LogConfig::default()
    };
    assert_eq!(*of_log("a"), expected);
    fixture.pass();
    assert_eq!(
        fixture.first("a"),
        0,
        "the bound that would take it is gone"
    );
    let fixture = fixture.restart();
    let log = fixture.core.logs.by_name("a").unwrap();
    assert_eq!(*log.state.read().config, expected);
}

#[test]
fn logs_that_lie_together_are_looked_at_together_and_the_oldest_first() {
    let fixture = Fixture::new();
    let names: Vec<String> = (0..60).map(|number| format!("{}", 99 - number)).collect();
    for name in &names {
        fixture.retain(name, Some(by_age(HOUR)));
        fixture.fill(name, 1, 6000);
    }
    assert!(fixture.core.journal.segments.read().len() > 3);
    let fixture = fixture.restart();
    fixture.clock.advance(2 * HOUR);
    let due = fixture.look();
    let due: Vec<&str> = due.iter().map(|expiry| expiry.log.name.as_str()).collect();
    assert_eq!(due, names);
}

#[test]
fn a_look_ends_when_it_is_to_stop_and_loses_nothing() {
    let fixture = Fixture::new();
    for name in ["a", "b", "c"] {
        fixture.retain(name, Some(by_records(1)));
        fixture.fill(name, 3, 10);
    }
    let mut pass = fixture.core.retainer.begin_pass().unwrap();
    let control = &fixture.core.retainer.control;
    control.stop();
    assert!(fixture.core.retainer.look(&mut pass).is_empty());
    assert!(!pass.is_through());
    fixture.core.retainer.end_pass(pass);
    let fixture = fixture.restart();
    assert_eq!(fixture.pass().unwrap().trims, 3);
}

#[test]
fn trims_of_retention_respect_changes_after_the_look() {
    let fixture = Fixture::new();
    let respecting = Retention {
        respect_cursors: true,
        ..by_records(2)
    };
    for log in ["changed", "deleted", "again", "trimmed", "same"] {
        fixture.retain(log, Some(by_records(2)));
        fixture.fill(log, 10, 10);
    }
    fixture.retain("cursor", Some(respecting));
    fixture.fill("cursor", 10, 10);
    fixture.cursor("cursor", "c", Some(7));
    let mut portion = fixture.look();
    portion.sort_unstable_by(|a, b| a.log.name.cmp(&b.log.name));
    assert_eq!(portion.len(), 6);
    fixture.retain("changed", Some(by_records(9)));
    fixture.cursor("cursor", "c", Some(5));
    fixture.trim_below("trimmed", 9);
    for log in ["deleted", "again"] {
        let deleted = fixture.core.delete_in_turn(target(log));
        fixture.core.turn();
        block_on(deleted).unwrap();
    }
    fixture.fill("again", 9, 10);
    let expired = fixture.core.retainer.expire(portion);
    fixture.core.turn();
    let expired = block_on(expired).unwrap();
    assert_eq!(expired, [None, None, None, None, Some(Lsn::ZERO), None]);
    let firsts = ["changed", "cursor", "again", "trimmed", "same"].map(|log| fixture.first(log));
    assert_eq!(firsts, [0, 0, 0, 9, 8]);
    // The next pass handles all of these logs.
    fixture.pass();
    let firsts = ["changed", "cursor", "again", "trimmed", "same"].map(|log| fixture.first(log));
    assert_eq!(firsts, [1, 5, 0, 9, 8]);
}

#[test]
fn scans_distinguish_trimmed_from_expired_records() {
    use GapReason::{Expired, Trimmed};
    let mut fixture = Fixture::new();
    fixture.retain("a", Some(by_records(10)));
    fixture.fill("a", 10, 10);
    fixture.trim_below("a", 4);
    fixture.fill("a", 6, 10);
    fixture.pass();
    assert_eq!(fixture.first("a"), 6);
    for start in 0..4 {
        // The facts come from frames, from indexes and the checkpoint, and from links.
        fixture = match start {
            0 => fixture,
            1 => fixture.restart(),
            2 => fixture.restart_cleanly(),
            _ => {
                for directory in ["index", "checkpoint"] {
                    for name in crate::disk::Disk::list(&fixture.disk, directory).unwrap() {
                        let path = format!("{directory}/{name}");
                        crate::disk::Disk::remove(&fixture.disk, &path).unwrap();
                    }
                }
                fixture.restart()
            }
        };
        let expected = [(0, 4, Trimmed), (4, 6, Expired)];
        let from = |lsn| ScanStart::Lsn(Lsn::new(lsn));
        assert_eq!(fixture.gaps(one("a"), from(0)), expected);
        assert_eq!(
            fixture.gaps(one("a"), from(2)),
            [(2, 4, Trimmed), (4, 6, Expired)]
        );
        assert_eq!(fixture.gaps(one("a"), from(4)), [(4, 6, Expired)]);
        assert_eq!(fixture.gaps(one("a"), from(6)), []);
        assert_eq!(fixture.gaps(Selector::All, ScanStart::First), expected);
    }
    // A trim covers all records below it, expired ones included.
    fixture.fill("a", 4, 10);
    fixture.pass();
    assert_eq!(
        fixture.gaps(one("a"), ScanStart::Lsn(Lsn::ZERO)),
        [(0, 4, Trimmed), (4, 10, Expired)]
    );
    fixture.trim_below("a", 8);
    fixture.trim_below("a", 12);
    assert_eq!(
        fixture.gaps(one("a"), ScanStart::Lsn(Lsn::ZERO)),
        [(0, 12, Trimmed)]
    );
}

#[test]
fn scans_of_all_name_both_reasons_for_a_batch_trimmed_and_expired() {
    let fixture = Fixture::new();
    fixture.retain("a", Some(by_records(2)));
    let six: &[&[u8]] = &[b"0", b"1", b"2", b"3", b"4", b"5"];
    fixture.append_batch(batch(&[("a", six)])).unwrap();
    fixture.trim_below("a", 1);
    fixture.pass();
    assert_eq!(
        fixture.gaps(Selector::All, ScanStart::First),
        [(0, 1, GapReason::Trimmed), (1, 4, GapReason::Expired)]
    );
    let contents = fixture.contents_from("a", 4);
    assert_eq!(contents, [b"4", b"5"]);
}

#[test]
fn a_pass_over_idle_logs_looks_at_none_and_ends_at_once() {
    let fixture = Fixture::new();
    for log in 0..300 {
        fixture.retain(&format!("l{log}"), Some(by_records(3)));
        fixture.fill(&format!("l{log}"), 4, 5);
    }
    let first = fixture.pass().unwrap();
    assert_eq!((first.trims, first.records), (300, 300));
    // This pass looks at the trims of the last pass; then nothing has moved.
    assert_eq!(fixture.pass().unwrap().trims, 0);
    assert_eq!(fixture.pass(), None);
    fixture.fill("l7", 1, 5);
    assert_eq!(fixture.pass().unwrap().trims, 1);
}

#[test]
fn without_any_bound_there_is_no_pass_until_a_log_gets_one() {
    let fixture = Fixture::new();
    fixture.fill("a", 9, 5);
    assert!(fixture.pass().is_some(), "nothing is known at first");
    fixture.fill("a", 1, 5);
    assert_eq!(fixture.pass(), None);
    fixture.retain("a", Some(by_records(3)));
    assert_eq!(fixture.pass().unwrap().records, 7);
}

#[test]
fn a_pass_cut_off_by_a_failed_flush_takes_nothing_until_the_next_start() {
    let fixture = Fixture::new();
    fixture.retain("a", Some(by_records(3)));
    fixture.fill("a", 10, 5);
    let mut pass = fixture.core.retainer.begin_pass().unwrap();
    let portion = fixture.core.retainer.look(&mut pass);
    let ends: Vec<Ends> = portion.iter().map(Ends::of).collect();
    fixture.disk.fail_sync(1);
    let expired = fixture.core.retainer.expire(portion);
    fixture.core.turn();
    fixture
        .core
        .retainer
        .count(&mut pass, &ends, &block_on(expired));
    fixture.core.retainer.end_pass(pass);
    assert_eq!(fixture.first("a"), 0);
    assert_eq!(fixture.pass(), None, "a journal that failed takes no trims");
    fixture.disk.crash(3);
    let fixture = fixture.restart();
    fixture.pass();
    assert_eq!(fixture.first("a"), 7);
}

#[test]
fn a_lower_age_holds_from_the_next_pass_on() {
    let fixture = Fixture::new();
    fixture.retain("a", Some(by_age(10 * DAY)));
    fixture.fill("a", 1, 10);
    fixture.clock.advance(2 * HOUR);
    fixture.pass();
    assert_eq!(fixture.first("a"), 0);
    fixture.retain("a", Some(by_age(HOUR)));
    fixture.pass();
    assert_eq!(fixture.first("a"), 1);
}

#[test]
fn records_that_are_not_on_the_device_do_not_count() {
    let fixture = Fixture::new();
    fixture.retain("a", Some(by_records(3)));
    fixture.retain("b", Some(by_bytes(70)));
    fixture.fill("a", 3, 10);
    fixture.fill("b", 1, 10);
    for log in ["a", "b"] {
        let batch = batch(&[(log, &[b"1", b"2"])]);
        drop(fixture.core.enqueue(batch, Durability::Written));
    }
    fixture.core.write_in_turn();
    assert!(fixture.look().is_empty());
    fixture.core.turn();
    fixture.core.idle();
    fixture.pass();
    assert_eq!((fixture.first("a"), fixture.first("b")), (2, 1));
}

#[test]
fn the_next_link_names_records_that_expired_in_a_lost_segment() {
    let fixture = Fixture::new();
    fixture.retain("a", Some(by_records(2)));
    fixture.fill("a", 6, 10);
    fixture.trim_below("a", 1);
    fixture.pass();
    fixture.fill("b", 40, 2000);
    assert!(fixture.core.journal.segments.read().len() > 1);
    let first = fixture
        .core
        .journal
        .segments
        .read()
        .values()
        .next()
        .cloned();
    let mut lost = vec![first.unwrap().path()];
    for directory in ["index", "checkpoint"] {
        let names = crate::disk::Disk::list(&fixture.disk, directory).unwrap();
        lost.extend(names.iter().map(|name| format!("{directory}/{name}")));
    }
    for path in lost {
        crate::disk::Disk::remove(&fixture.disk, &path).unwrap();
    }
    let fixture = fixture.restart();
    assert_eq!(
        fixture.gaps(one("a"), ScanStart::Lsn(Lsn::ZERO)),
        [
            (0, 1, GapReason::Trimmed),
            (1, 4, GapReason::Expired),
            (4, 6, GapReason::Quarantined)
        ]
    );
}

#[test]
fn on_a_full_disk_retention_goes_on() {
    let fixture = Fixture::new();
    fixture.retain("a", Some(by_records(3)));
    fixture.fill("a", 10, 2000);
    fixture.core.pool_in_turn().unwrap();
    fixture.disk.set_full(true);
    while fixture.append("a", &[1; 4000]).is_ok() {}
    fixture.pass();
    assert_eq!(fixture.contents_from("a", fixture.first("a")).len(), 3);
}

#[test]
fn indexes_that_cannot_be_read_do_not_end_retention_by_records() {
    let fixture = Fixture::new();
    fixture.retain("a", Some(by_records(100)));
    fixture.fill("a", 200, 2000);
    let fixture = fixture.restart_cleanly();
    let reads: crate::disk::Filter =
        |call| call.kind == crate::disk::CallKind::Read && call.path.starts_with("index/");
    fixture.disk.fail_all(reads, 24);
    let before = fixture
        .core
        .retainer
        .stored_before(&fixture.core.logs.by_name("a").unwrap(), Lsn::new(100));
    assert!(before.is_err(), "{before:?}");
    fixture.pass();
    assert_eq!(fixture.first("a"), 100);
}

#[test]
fn records_that_waited_in_memory_keep_their_age_when_written() {
    let fixture = Fixture::new();
    let config = LogConfig {
        sync_mode: Some(SyncMode::Manual),
        retention: Some(Box::new(by_age(HOUR))),
        ..LogConfig::default()
    };
    let created = fixture
        .core
        .create_in_turn(LogName::new("a").unwrap(), config);
    fixture.core.turn();
    block_on(created).unwrap();
    for _ in 0..3 {
        drop(
            fixture
                .core
                .enqueue(batch(&[("a", &[b"1"])]), Durability::Accepted),
        );
        fixture.core.turn();
        fixture.clock.advance(HOUR - 1);
    }
    let synced = fixture.core.sync_in_turn(Durability::Durable);
    fixture.core.turn();
    block_on(synced).unwrap();
    fixture.pass();
    assert_eq!(fixture.first("a"), 0, "the newest is not an hour old");
    let page = fixture.read("a", 0).unwrap();
    let own = crate::api::codec::own_times(&page.batches[0].body);
    let own: Vec<_> = own.collect::<Option<_>>().unwrap();
    assert!(
        own.windows(2)
            .all(|two| two[1].micros() - two[0].micros() == HOUR - 1)
    );
    fixture.clock.advance(1);
    fixture.pass();
    assert_eq!(fixture.first("a"), 3);
}

#[test]
fn ages_found_under_older_settings_do_not_hold_for_newer_ones() {
    let fixture = Fixture::new();
    fixture.retain("a", Some(by_age(10 * DAY)));
    fixture.fill("a", 1, 10);
    let log = fixture.core.logs.by_name("a").unwrap();
    let older = Arc::clone(&log.state.read().config);
    fixture.retain("a", Some(by_age(HOUR)));
    // An older pass comes to its end.
    log.state.write().note_ages_at(u32::MAX, &older);
    fixture.clock.advance(2 * HOUR);
    fixture.pass();
    assert_eq!(fixture.first("a"), 1);
}
