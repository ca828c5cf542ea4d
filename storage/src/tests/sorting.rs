//! Sorted runs: every reader finds the same records in them, and dead bytes give their space back.

use std::cell::Cell;
use std::fmt::Write;

use super::retention::HOUR;
use super::*;
use crate::api::record::{Gap, GapReason};
use crate::disk::{CallKind, Disk, DiskCall};
use crate::index::{Row, SealedIndex};
use crate::read::Reach;
use crate::upkeep::sorter::Turns;

const LOGS: [&str; 5] = ["a", "b/1", "b/2", "c", "idle"];

pub(super) fn config() -> StorageConfig {
    StorageConfig {
        reserve_segments: 1,
        sorter_enabled: true,
        sorter_step_bytes: 1 << 20,
        ..small_config()
    }
}

impl Fixture {
    /// Appends records of many sizes to many logs, over some segments.
    pub(super) fn fill_logs(&self, seed: u64, segments: usize) {
        let begun = self.core.journal.current().base;
        let mut number = seed * 1000;
        loop {
            number += 1;
            for (at, log) in LOGS.iter().enumerate().take(4) {
                if !number.is_multiple_of(at as u64 + 1) {
                    continue;
                }
                let size = usize::try_from(number * 7919 % 1200).unwrap();
                let mut data = number.to_le_bytes().to_vec();
                data.resize(8 + size, 7);
                let records: Vec<&[u8]> = vec![&data; 1 + at % 2];
                self.append_batch(batch(&[(log, records.as_slice())]))
                    .unwrap();
                self.clock.advance(1000);
            }
            let base = self.core.journal.current().base;
            if base.since(begun) >= (segments as u64) * (64 << 10) {
                return;
            }
        }
    }

    /// Sorts everything. Returns the number of steps.
    pub(super) fn sort(&self) -> usize {
        let mut steps = 0;
        while self.core.sort_in_turn().unwrap() {
            steps += 1;
            assert!(steps < 100, "sorting comes to an end");
        }
        steps
    }

    pub(super) fn runs(&self) -> usize {
        self.core.journal.runs().len()
    }

    pub(super) fn trim_to(&self, log: &str, before: u64) {
        let trimmed = self.core.trim_in_turn(target(log), Lsn::new(before));
        self.core.turn();
        drop(trimmed);
    }

    fn delete(&self, log: &str) {
        let deleted = self.core.delete_in_turn(target(log));
        self.core.turn();
        drop(deleted);
    }

    /// All answers to reads of one log.
    fn told_of(&self, log: &str) -> String {
        let mut out = String::new();
        let info = match self.read_from(log, ReadStart::First) {
            Ok(page) => page,
            Err(error) => return format!("{error}"),
        };
        writeln!(out, "{} {} {}", info.first_lsn, info.tail_lsn, info.log_id).unwrap();
        let mut next = info.first_lsn;
        while next < info.tail_lsn {
            let page = self.read(log, next.get()).unwrap();
            for batch in &page.batches {
                writeln!(
                    out,
                    "{} {} {} {:?}",
                    batch.first_lsn,
                    batch.count,
                    batch.arrival.micros(),
                    payloads(batch).iter().map(Vec::len).collect::<Vec<_>>()
                )
                .unwrap();
            }
            next = page.next_lsn;
        }
        for lsn in (info.first_lsn.get()..info.tail_lsn.get()).step_by(7) {
            let page = self.read(log, lsn).unwrap();
            assert_eq!(page.batches[0].first_lsn, Lsn::new(lsn));
        }
        for time in (0..40).map(|n| 1_700_000_000_000_000 + n * 37_000) {
            let start = ReadStart::Time(Timestamp::from_micros(time));
            let page = self.read_from(log, start).unwrap();
            let first = page.batches.first().map(|batch| batch.first_lsn);
            write!(out, "{first:?} ").unwrap();
        }
        out
    }

    /// Result of a scan of many logs. Gaps of one log that touch are merged.
    fn told_of_many(&self, selector: &Selector, start: ScanStart) -> String {
        Self::told_by(&mut self.scan(selector.clone(), start, false))
    }

    /// All batches and gaps that a scan returns up to its end.
    fn told_by(scan: &mut Box<dyn Scan>) -> String {
        let mut out = String::new();
        let mut gaps: Vec<Gap> = Vec::new();
        while let Some(chunk) = next_chunk(scan).unwrap().unwrap() {
            for gap in chunk.gaps {
                if gap.reason == GapReason::Deleted {
                    // The sorter forgets deleted logs.
                    continue;
                }
                let same = gaps
                    .iter_mut()
                    .find(|g| g.log == gap.log && g.reason == gap.reason && g.to == gap.from);
                match same {
                    Some(known) => known.to = gap.to,
                    None => gaps.push(gap),
                }
            }
            for batch in chunk.batches {
                writeln!(out, "{} {} {}", batch.log, batch.first_lsn, batch.count).unwrap();
            }
        }
        gaps.sort_by_key(|gap| format!("{gap:?}"));
        for gap in gaps {
            writeln!(out, "{gap:?}").unwrap();
        }
        out
    }

    fn told(&self) -> Vec<String> {
        let mut told: Vec<String> = LOGS.iter().map(|log| self.told_of(log)).collect();
        for selector in [Selector::All, Selector::Prefix("b/".to_owned())] {
            told.push(self.told_of_many(&selector, ScanStart::First));
        }
        told
    }

    fn assert_told(&self, expected: &[String], when: &str) {
        for (told, expected) in self.told().iter().zip(expected) {
            for (told, expected) in told.lines().zip(expected.lines()) {
                assert_eq!(told, expected, "{when}");
            }
            let (told, expected) = (told.lines().count(), expected.lines().count());
            assert_eq!(told, expected, "{when}");
        }
    }

    /// Starts without derived files.
    fn restart_bare(self) -> Self {
        let names = |directory: &str| self.disk.list(directory).unwrap();
        for directory in ["index", "checkpoint"] {
            for name in names(directory) {
                self.disk.remove(&format!("{directory}/{name}")).unwrap();
            }
        }
        self.restart()
    }
}

#[test]
fn reads_are_the_same_after_sorting_and_after_starts() {
    let fixture = Fixture::with(SimDisk::new(), config());
    fixture.append("idle", b"once").unwrap();
    fixture.fill_logs(1, 3);
    fixture.core.sort_in_turn().unwrap();
    fixture.fill_logs(2, 6);
    fixture.trim_to("b/1", 20);
    let expected = fixture.told();
    assert!(fixture.sort() > 0, "there is something to sort");
    assert!(fixture.runs() > 0);
    fixture.assert_told(&expected, "after sorting");
    let fixture = fixture.restart();
    fixture.assert_told(&expected, "after a kill");
    let fixture = fixture.restart_cleanly();
    assert!(fixture.report.clean);
    fixture.assert_told(&expected, "after a clean end");
    let fixture = fixture.restart_bare();
    assert_eq!(fixture.report.findings, Vec::<String>::new());
    assert_eq!(fixture.report.damage, []);
    fixture.assert_told(&expected, "without indexes and checkpoints");
}

/// A store with records of a clock that showed a year too much, and of that clock after it was mended. Returns a time
/// between both. `leaves`: a segment begins by the wrong clock.
fn ahead_and_back(leaves: bool) -> (Fixture, Timestamp) {
    let clock = TestClock::new();
    // A clock that shows less than 2026 counts as wrong.
    clock.jump(1000 * 24 * HOUR);
    let now = clock.now();
    let year = 365 * 24 * HOUR;
    let (disk, config) = (SimDisk::new(), config());
    let (core, report) = open(&disk, &config, &clock).unwrap();
    let f = Fixture {
        disk,
        clock,
        config,
        core,
        report,
    };
    f.append("c", b"before").unwrap();
    // A start believes the system's clock.
    f.clock.jump(year);
    let f = f.restart();
    if leaves {
        let left = f.core.inbox.leave_segment();
        f.core.turn();
        drop(left);
    }
    for log in ["a", "b/1", "b/2"] {
        f.append(log, b"ahead").unwrap();
    }
    f.clock.jump(-year);
    for _ in 0..12 {
        f.clock.advance(HOUR / 12);
        f.append("c", b"now").unwrap();
    }
    (f, now.saturating_add_micros(year / 2))
}

#[test]
fn scans_by_time_find_records_of_a_clock_that_went_back() {
    for leaves in [true, false] {
        let (f, time) = ahead_and_back(leaves);
        f.fill_logs(1, 6);
        let found = |f: &Fixture| {
            let by_time = |selector| f.told_of_many(&selector, ScanStart::Time(time));
            [Selector::All, Selector::Prefix("b/".to_owned())].map(by_time)
        };
        let expected = found(&f);
        assert!(expected.iter().all(|told| told.contains("b/1 0 1")));
        f.sort();
        assert!(f.runs() > 0);
        assert_eq!(found(&f), expected);
        // Runs of runs.
        f.fill_logs(2, 6);
        let expected = found(&f);
        f.sort();
        assert_eq!(found(&f), expected);
        let f = f.restart();
        assert_eq!(found(&f), expected);
    }
}

/// No record has an earlier time than the one before it in its log.
#[test]
fn scans_by_time_find_later_records_of_a_log_that_was_ahead() {
    let (f, time) = ahead_and_back(false);
    for seed in 1..7 {
        f.fill_logs(seed, 2);
        f.append("idle", b"now").unwrap();
    }
    let found = |f: &Fixture| f.told_of_many(&Selector::All, ScanStart::Time(time));
    // The records of the clock that was wrong leave, and the file that has them begins with a later arrival.
    for log in ["a", "b/1", "b/2"] {
        f.trim_to(log, 1);
    }
    let expected = found(&f);
    for log in ["a", "b/1", "b/2"] {
        assert!(expected.contains(&format!("{log} 1 ")), "{log}: {expected}");
    }
    assert!(!expected.contains("idle 0"));
    f.sort();
    assert!(f.runs() > 0);
    assert_eq!(found(&f), expected);
    let f = f.restart();
    assert_eq!(found(&f), expected);
}

#[test]
fn scan_passes_a_run_with_many_logs_that_keep_nothing() {
    let f = Fixture::with(SimDisk::new(), config());
    let logs: Vec<String> = (0..20_000).map(|number| format!("l{number}")).collect();
    let data: &[&[u8]] = &[b"x"];
    for logs in logs.chunks(50) {
        let records = logs.iter().map(|log| (log.as_str(), data));
        let records: Vec<_> = records.collect();
        f.append_batch(batch(&records)).unwrap();
    }
    for log in &logs {
        f.trim_to(log, 1);
    }
    f.fill_logs(1, 3);
    f.sort();
    assert!(f.runs() > 0);
    for (selector, dropped) in [("none/", 0), ("l", logs.len())] {
        let selector = Selector::Prefix(selector.to_owned());
        let mut scan = f.scan(selector, ScanStart::First, false);
        let (mut chunks, mut gaps) = (0, 0);
        while let Some(chunk) = next_chunk(&mut scan).unwrap().unwrap() {
            chunks += 1;
            assert!(chunks < 50_000, "the scan comes to its end");
            gaps += chunk.gaps.len();
        }
        assert_eq!(gaps, dropped);
    }
}

#[test]
fn gaps_of_records_left_out_of_runs_come_once_in_chunks_of_any_size() {
    let fixture = Fixture::with(SimDisk::new(), config());
    fixture.fill_logs(1, 9);
    for (log, before) in [("a", 90), ("b/1", 41), ("c", 3)] {
        fixture.trim_to(log, before);
    }
    let fixture = fixture.restart();
    fixture.fill_logs(2, 4);
    fixture.sort();
    assert!(fixture.runs() > 0);
    for chunk_bytes in [1, 49, 60, 100, 150, 700, 1300, 5000, 64 << 10] {
        let request = ScanRequest {
            selector: Selector::All,
            start: ScanStart::First,
            until_lsn: None,
            max_records: 0,
            follow: false,
            visibility: None,
            chunk_bytes,
        };
        let mut scan = fixture.begin(request).unwrap();
        let mut next: std::collections::BTreeMap<LogName, Lsn> = Default::default();
        let mut dropped = 0;
        while let Some(chunk) = next_chunk(&mut scan).unwrap().unwrap() {
            for gap in chunk.gaps {
                let next = next.entry(gap.log.unwrap()).or_default();
                assert_eq!(gap.from, Some(*next), "in chunks of {chunk_bytes}");
                dropped += gap.to.unwrap().since(*next);
                *next = gap.to.unwrap();
            }
            for batch in chunk.batches {
                let next = next.entry(batch.log.clone()).or_default();
                assert_eq!(batch.first_lsn, *next, "in chunks of {chunk_bytes}");
                *next = next.advance(u64::from(batch.count));
            }
        }
        assert_eq!(dropped, 90 + 41 + 3);
    }
}

/// The cursor of a scan after every 7 records.
fn cursors(fixture: &Fixture, selector: &Selector) -> Vec<Bytes> {
    let mut cursors = Vec::new();
    let mut cursor = None;
    loop {
        let request = ScanRequest {
            selector: selector.clone(),
            start: cursor.clone().map_or(ScanStart::First, ScanStart::Cursor),
            until_lsn: None,
            max_records: 7,
            follow: false,
            visibility: None,
            chunk_bytes: 64 << 10,
        };
        let mut scan = fixture.begin(request).unwrap();
        let mut given = 0;
        while let Some(Ok(Some(chunk))) = next_chunk(&mut scan) {
            given += chunk.batches.len();
        }
        if given == 0 {
            return cursors;
        }
        cursors.push(scan.cursor());
        cursor = Some(scan.cursor());
    }
}

#[test]
fn a_scan_goes_on_behind_its_cursor_after_any_sorting() {
    let fixture = Fixture::with(SimDisk::new(), config());
    fixture.fill_logs(1, 9);
    let selectors = [Selector::All, Selector::Prefix("b/".to_owned()), one("c")];
    let mut asked = Vec::new();
    for selector in &selectors {
        for cursor in cursors(&fixture, selector).into_iter().step_by(5) {
            let start = ScanStart::Cursor(cursor);
            let told = fixture.told_of_many(selector, start.clone());
            asked.push((selector, start, told));
        }
    }
    assert!(asked.len() > 30, "{}", asked.len());
    let fixture = fixture.restart();
    fixture.fill_logs(2, 4);
    let tail: Vec<String> = selectors
        .iter()
        .map(|s| fixture.told_of_many(s, ScanStart::First))
        .collect();
    assert!(fixture.sort() > 1);
    for (selector, whole) in selectors.iter().zip(&tail) {
        assert_eq!(&fixture.told_of_many(selector, ScanStart::First), whole);
    }
    for (selector, start, told) in &asked {
        let now = fixture.told_of_many(selector, start.clone());
        assert!(now.starts_with(told.as_str()), "{told}---{now}");
    }
}

#[test]
fn plain_scan_ends_within_a_run_that_was_sorted_after_it_began() {
    for selector in [Selector::All, Selector::Prefix("b/".to_owned()), one("c")] {
        let fixture = Fixture::with(SimDisk::new(), config());
        fixture.fill_logs(1, 2);
        let expected = fixture.told_of_many(&selector, ScanStart::First);
        let mut scan = fixture.scan(selector, ScanStart::First, false);
        // The end of the scan lies in the middle of the segments that are sorted.
        fixture.fill_logs(2, 6);
        assert!(fixture.sort() > 0);
        assert_eq!(Fixture::told_by(&mut scan), expected);
    }
}

/// Bytes of all segments and runs.
pub(super) fn bytes_of(disk: &SimDisk) -> u64 {
    let mut bytes = 0;
    for directory in ["journal", "sorted", "pool"] {
        for name in disk.list(directory).unwrap() {
            bytes += disk
                .open(&format!("{directory}/{name}"))
                .unwrap()
                .size()
                .unwrap();
        }
    }
    bytes
}

#[test]
fn trims_and_deletions_give_space_back_and_an_idle_log_pins_nothing() {
    let fixture = Fixture::with(SimDisk::new(), config());
    fixture.append("idle", b"once").unwrap();
    let mut most = 0;
    for round in 0..12 {
        fixture.fill_logs(round, 6);
        for log in ["a", "b/1", "c"] {
            let tail = fixture.read_from(log, ReadStart::First).unwrap().tail_lsn;
            fixture.trim_to(log, tail.get());
        }
        fixture.delete("b/2");
        fixture.sort();
        most = most.max(bytes_of(&fixture.disk));
    }
    // 72 segments were written. The store holds the pool, segments not worth a step yet, the current one, and
    // almost nothing in runs.
    assert!(most < 16 * (64 << 10), "{most} bytes");
    assert_eq!(fixture.contents("idle"), [b"once"]);
    let known = fixture.core.logs.all_known().len();
    assert!(
        known <= 8,
        "{known} logs are known: deleted ones are forgotten"
    );
    let fixture = fixture.restart_bare();
    assert_eq!(fixture.report.findings, Vec::<String>::new());
    assert_eq!(fixture.contents("idle"), [b"once"]);
    let known = fixture.core.logs.all_known().len();
    assert!(known <= 8, "{known} logs are known after a start");
}

#[test]
fn dead_records_in_runs_give_space_back_however_fast_segments_come() {
    let fixture = Fixture::with(SimDisk::new(), config());
    let mut turns = Turns::default();
    let (mut most, mut most_runs) = (0, 0);
    for round in 0..60 {
        // Each round appends as much as one step sorts, so the sorter is never without segments.
        fixture.fill_logs(round, 4);
        for log in ["a", "b/1", "b/2", "c"] {
            let tail = fixture.read_from(log, ReadStart::First).unwrap().tail_lsn;
            fixture.trim_to(log, tail.get().saturating_sub(5));
        }
        assert!(
            fixture
                .core
                .sorter
                .sort_turn(&mut turns, &mut |_| Ok(()))
                .unwrap()
        );
        let runs = fixture.core.journal.runs();
        let bytes: u64 = runs.iter().map(|run| run.segment.life.size).sum();
        (most, most_runs) = (most.max(bytes), most_runs.max(runs.len()));
    }
    // 15 MiB were written, and almost nothing of it is kept.
    assert!(
        most < 1 << 20 && most_runs < 8,
        "{most} bytes in {most_runs} runs"
    );
}

#[test]
fn runs_are_merged_without_their_dead_records() {
    let config = StorageConfig {
        sorter_step_bytes: 2 << 20,
        ..config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    for round in 0..8 {
        fixture.fill_logs(round, 4);
        fixture.sort();
    }
    let live: u64 = fixture
        .core
        .journal
        .runs()
        .iter()
        .map(|run| run.head.pack_bytes)
        .sum();
    assert!(live > 1 << 20, "{live}");
    assert!(
        fixture.runs() < 6,
        "{} runs of {live} bytes",
        fixture.runs()
    );
    for log in ["a", "b/1"] {
        let tail = fixture.read_from(log, ReadStart::First).unwrap().tail_lsn;
        fixture.trim_to(log, tail.get() - 1);
    }
    let expected = fixture.told();
    fixture.sort();
    fixture.assert_told(&expected, "after merging");
    let left: u64 = fixture
        .core
        .journal
        .runs()
        .iter()
        .map(|run| run.head.pack_bytes)
        .sum();
    assert!(left < live / 2, "{left} of {live}");
    let fixture = fixture.restart();
    fixture.assert_told(&expected, "after merging and a kill");
    let fixture = fixture.restart_bare();
    fixture.assert_told(&expected, "after merging and without what is derived");
}

/// A store with much to sort: segments, small runs, a run that is mostly dead, a deleted log; ended by a
/// kill.
fn unsorted() -> (SimDisk, Arc<TestClock>, Vec<String>) {
    let fixture = Fixture::with(SimDisk::new(), config());
    fixture.append("idle", b"once").unwrap();
    for round in 0..3 {
        fixture.fill_logs(round, 4);
        fixture.core.sort_in_turn().unwrap();
    }
    assert!(fixture.runs() > 0);
    fixture.append("gone", b"soon").unwrap();
    fixture.delete("gone");
    fixture.fill_logs(4, 5);
    fixture.trim_to("a", 60);
    fixture.trim_to("b/2", 1_000_000);
    let expected = fixture.told();
    let Fixture {
        disk, clock, core, ..
    } = fixture;
    drop(core);
    (disk, clock, expected)
}

fn start(disk: &SimDisk, clock: &Arc<TestClock>) -> Result<Fixture, OpenError> {
    let (core, report) = open(disk, &config(), clock)?;
    assert_eq!(report.findings, Vec::<String>::new());
    assert_eq!(report.damage, []);
    Ok(Fixture {
        disk: disk.clone(),
        clock: Arc::clone(clock),
        config: config(),
        core,
        report,
    })
}

/// Distance between the tested calls; 1 if `WALD_EVERY` is set.
fn step() -> usize {
    match std::env::var("WALD_EVERY") {
        Ok(_) => 1,
        Err(_) => 5,
    }
}

/// Sorts until nothing is left to do, or something fails.
fn sort_on(fixture: &Fixture) {
    for _ in 0..50 {
        if !matches!(fixture.core.sort_in_turn(), Ok(true)) {
            return;
        }
    }
}

#[test]
fn a_crash_anywhere_in_sorting_loses_nothing_and_leaves_nothing_behind() {
    let (disk, clock, expected) = unsorted();
    let mut points = 0;
    for nth in (1..).step_by(step()) {
        let disk = disk.copy();
        let fixture = start(&disk, &clock).unwrap();
        disk.crash_after(nth);
        sort_on(&fixture);
        let came = disk.is_crashed();
        drop(fixture);
        disk.crash(nth);
        if !came {
            break;
        }
        points += 1;
        // A second crash comes in the start that follows.
        for then in [0, nth % 7 + 1, nth % 13 + 3] {
            let disk = disk.copy();
            if then > 0 {
                disk.crash_after(then);
                if let Ok(fixture) = start(&disk, &clock) {
                    drop(fixture);
                }
                disk.crash(then);
            }
            let fixture = start(&disk, &clock).unwrap();
            super::simulation::assert_no_leftovers(&disk, &fixture.core);
            fixture.assert_told(&expected, &format!("cut in call {nth}, then {then}"));
            sort_on(&fixture);
            fixture.assert_told(&expected, &format!("sorted after call {nth}, then {then}"));
        }
    }
    println!("the power went in each of {points} calls of sorting");
    assert!(points * step() > 40, "{points}");
}

#[test]
fn after_any_failed_call_of_the_sorter_all_is_served_and_sorted_later() {
    let (disk, clock, expected) = unsorted();
    let mut points = 0;
    for nth in (1..).step_by(step()) {
        let disk = disk.copy();
        let fixture = start(&disk, &clock).unwrap();
        disk.fail_call(|_| true, nth, if nth % 2 == 0 { 5 } else { 28 });
        sort_on(&fixture);
        if disk.faults_left() > 0 {
            break;
        }
        points += 1;
        if fixture.core.journal.failure().is_none() {
            fixture.assert_told(&expected, &format!("call {nth} failed"));
            sort_on(&fixture);
            fixture.assert_told(&expected, &format!("sorted after call {nth} failed"));
        }
        drop(fixture);
        disk.crash(nth);
        let fixture = start(&disk, &clock).unwrap();
        super::simulation::assert_no_leftovers(&disk, &fixture.core);
        fixture.assert_told(&expected, &format!("call {nth} failed, then a start"));
    }
    println!("each of {points} calls of sorting failed once");
    assert!(points * step() > 80, "{points}");
}

#[test]
fn name_that_finds_no_space_fails_no_journal() {
    let (disk, clock, expected) = unsorted();
    let is_name = |call: &DiskCall<'_>| matches!(call.kind, CallKind::Rename | CallKind::Remove);
    let mut names = 0;
    for nth in 1.. {
        let disk = disk.copy();
        let fixture = start(&disk, &clock).unwrap();
        disk.fail_call(is_name, nth, 28);
        sort_on(&fixture);
        if disk.faults_left() > 0 {
            break;
        }
        names += 1;
        assert!(fixture.core.journal.failure().is_none(), "name {nth}");
        sort_on(&fixture);
        fixture.assert_told(
            &expected,
            &format!("sorted after name {nth} found no space"),
        );
    }
    assert!(names > 5, "{names}");
}

/// Checks that a damaged store serves right records and names all others. Returns the number of missing ones.
fn assert_right(fixture: &Fixture, whole: &[(String, Vec<Vec<u8>>)], what: &str) -> usize {
    let mut missing = 0;
    for (log, records) in whole {
        let scan = fixture.try_scan(one(log), ScanStart::First, false);
        let Ok(mut scan) = scan else {
            // The name of the log is gone with the images, the index and the checkpoints.
            assert!(!fixture.report.findings.is_empty(), "{what}");
            missing += records.len();
            continue;
        };
        let mut next = 0;
        loop {
            let chunk = match next_chunk(&mut scan).unwrap() {
                Ok(Some(chunk)) => chunk,
                Ok(None) => break,
                Err(error) => panic!("{what}: {log}: {error}"),
            };
            for gap in &chunk.gaps {
                if let (Some(from), Some(to)) = (gap.from, gap.to) {
                    assert_eq!(from.get(), next, "{what}: {log}");
                    missing += usize::try_from(to.get() - from.get()).unwrap();
                    next = to.get();
                }
            }
            for batch in &chunk.batches {
                assert_eq!(batch.first_lsn.get(), next, "{what}: {log}");
                for data in payloads(batch) {
                    assert_eq!(
                        data,
                        records[usize::try_from(next).unwrap()],
                        "{what}: {log}"
                    );
                    next += 1;
                }
            }
        }
        assert_eq!(next, records.len() as u64, "{what}: {log}");
    }
    missing
}

#[test]
fn a_damaged_run_serves_good_records_and_names_the_rest_exactly() {
    let fixture = Fixture::with(SimDisk::new(), config());
    fixture.fill_logs(1, 4);
    fixture.sort();
    fixture.fill_logs(2, 4);
    fixture.sort();
    let whole: Vec<(String, Vec<Vec<u8>>)> = ["a", "b/1", "b/2", "c"]
        .iter()
        .map(|log| ((*log).to_owned(), fixture.contents(log)))
        .collect();
    let Fixture {
        disk, clock, core, ..
    } = fixture;
    core.close().unwrap();
    drop(core);
    let names = disk.list("sorted").unwrap();
    let path = format!("sorted/{}", names[0]);
    let bytes = disk.contents(&path).unwrap();
    let mut most = 0;
    for at in (8192..bytes.len())
        .step_by(2999)
        .chain(bytes.len() - 40..bytes.len())
    {
        let mut damaged = bytes.clone();
        damaged[at] ^= 16;
        for bare in [false, true] {
            let what = format!("byte {at}, bare {bare}");
            let disk = disk.copy();
            disk.replace(&path, damaged.clone());
            if bare {
                for directory in ["index", "checkpoint"] {
                    for name in disk.list(directory).unwrap() {
                        disk.remove(&format!("{directory}/{name}")).unwrap();
                    }
                }
            }
            let (core, report) = open(&disk, &config(), &clock).unwrap();
            let fixture = Fixture {
                disk,
                clock: Arc::clone(&clock),
                config: config(),
                core,
                report,
            };
            let missing = assert_right(&fixture, &whole, &what);
            let is_named =
                !fixture.report.findings.is_empty() || fixture.core.damages.logs() != (0, 0);
            assert!(missing == 0 || is_named, "{what}: {missing} are missing");
            if fixture.report.findings.is_empty() {
                most = most.max(missing);
            }
            // A start that finds the damage reports the same.
            let again = fixture.restart();
            assert_eq!(
                assert_right(&again, &whole, &what),
                missing,
                "{what}, again"
            );
        }
    }
    // The damage costs one frame of the journal, or one pack.
    assert!(most > 0 && most < 400, "{most}");
}

/// A store with runs and segments, trimmed and with a deleted log, ended cleanly.
pub(super) fn sorted_store() -> (SimDisk, Arc<TestClock>, Vec<String>) {
    let fixture = Fixture::with(SimDisk::new(), config());
    fixture.append("idle", b"once").unwrap();
    fixture.fill_logs(1, 3);
    fixture.core.sort_in_turn().unwrap();
    fixture.fill_logs(4, 3);
    fixture.append("gone", b"soon").unwrap();
    fixture.delete("gone");
    fixture.trim_to("b/1", 11);
    fixture.fill_logs(2, 5);
    fixture.sort();
    fixture.fill_logs(3, 4);
    fixture.core.sort_in_turn().unwrap();
    assert!(fixture.runs() > 1);
    let expected = fixture.told();
    let Fixture {
        disk, clock, core, ..
    } = fixture;
    core.close().unwrap();
    drop(core);
    (disk, clock, expected)
}

fn offline(disk: &SimDisk) -> crate::tools::verify::OfflineReport {
    let offline = crate::tools::verify::Offline::open(Arc::new(disk.copy())).unwrap();
    let control = crate::api::pace::Control::new(0);
    offline.verify(&control, &mut |_| {}).unwrap()
}

#[test]
fn verification_finds_nothing_in_sound_runs_and_every_flipped_byte() {
    let (disk, clock, _) = sorted_store();
    let report = offline(&disk);
    assert_eq!(report.findings, [], "offline");
    assert!(report.records > 0);
    let fixture = start(&disk.copy(), &clock).unwrap();
    let mut found = Vec::new();
    fixture
        .core
        .verifier
        .verify(None, &crate::api::pace::Control::new(0), &mut |progress| {
            found.append(&mut progress.findings);
        })
        .unwrap();
    assert_eq!(found, [], "online");
    let names = disk.list("sorted").unwrap();
    let path = format!("sorted/{}", names[0]);
    let bytes = disk.contents(&path).unwrap();
    let life = 68;
    let places = (0..life)
        .step_by(9)
        .chain((8192..bytes.len() - 8).step_by(1777));
    for at in places {
        let disk = disk.copy();
        let mut damaged = bytes.clone();
        damaged[at] ^= 2;
        disk.replace(&path, damaged);
        let report = offline(&disk);
        // Padding between frames means nothing.
        let padding = bytes[at] == 0 && report.findings.is_empty();
        assert!(padding || !report.findings.is_empty(), "byte {at}");
        let fixture = {
            let (core, report) = open(&disk, &config(), &clock).unwrap();
            let clock = Arc::clone(&clock);
            Fixture {
                disk,
                clock,
                config: config(),
                core,
                report,
            }
        };
        let mut found = Vec::new();
        let control = crate::api::pace::Control::new(0);
        let tell = &mut |progress: &mut crate::api::pace::VerifyProgress| {
            found.append(&mut progress.findings)
        };
        fixture.core.verifier.verify(None, &control, tell).unwrap();
        assert!(padding || !found.is_empty(), "byte {at}, online");
        let lost = |findings: &[crate::api::finding::Finding]| {
            let lsns = findings.iter().filter_map(|f| f.lsns);
            lsns.map(|(from, to)| to.since(from)).sum::<u64>()
        };
        assert_eq!(
            lost(&report.findings),
            lost(&found),
            "byte {at}: {found:?} {:?}",
            report.findings
        );
    }
}

#[test]
fn files_that_a_crash_of_the_sorter_left_are_named_and_removed() {
    let (disk, clock, expected) = sorted_store();
    let before = offline(&disk).findings;
    assert_eq!(before, []);
    let fixture = start(&disk, &clock).unwrap();
    disk.crash_when(|call| call.path.starts_with("sorted/"), 3, 0);
    sort_on(&fixture);
    drop(fixture);
    disk.crash(3);
    let leftovers = offline(&disk).findings;
    let notes = leftovers
        .iter()
        .all(|f| f.severity == crate::api::finding::Severity::Note);
    assert!(notes, "{leftovers:?}");
    let fixture = start(&disk, &clock).unwrap();
    fixture.assert_told(&expected, "after what was left was taken away");
}

#[test]
fn a_sorted_store_is_dumped_whole() {
    let (disk, _, _) = sorted_store();
    let mut offline = crate::tools::verify::Offline::open(Arc::new(disk)).unwrap();
    if let Some(keys) = cipher::of_environment() {
        offline = offline.with_keys(keys);
    }
    let mut records = std::collections::BTreeMap::<String, u64>::new();
    let mut damaged = 0;
    offline
        .dump_frames(&crate::tools::dump::DumpFilter::default(), &mut |piece| {
            match piece {
                crate::tools::dump::Dumped::Frame(frame) => {
                    if let crate::tools::dump::DumpedBody::Records(found) = &frame.body {
                        let log = frame.log.as_ref().map_or("?", LogName::as_str);
                        *records.entry(log.to_owned()).or_default() += found.len() as u64;
                    }
                    damaged += u64::from(frame.body == crate::tools::dump::DumpedBody::Damaged);
                }
                crate::tools::dump::Dumped::Damaged { .. } => damaged += 1,
                _ => {}
            }
            Ok(())
        })
        .unwrap();
    assert_eq!(damaged, 0);
    assert!(!records.contains_key("?"), "{records:?}");
    assert!(records["a"] > 100 && records["idle"] == 1, "{records:?}");
}

#[test]
fn accepted_damage_of_a_run_is_named_and_the_store_goes_on() {
    let (disk, clock, _) = sorted_store();
    let names = disk.list("sorted").unwrap();
    let path = format!("sorted/{}", names[0]);
    let mut bytes = disk.contents(&path).unwrap();
    bytes[9000] ^= 1;
    disk.replace(&path, bytes);
    for directory in ["index", "checkpoint"] {
        for name in disk.list(directory).unwrap() {
            disk.remove(&format!("{directory}/{name}")).unwrap();
        }
    }
    let disk_of = || Arc::new(disk.clone()) as Arc<dyn Disk>;
    let clock_of = Arc::clone(&clock) as Arc<dyn Clock>;
    let (loss, report) =
        crate::engine::repair::accept_loss(&disk_of(), &config(), clock_of, "by a test").unwrap();
    assert_eq!(loss.gaps.len(), 1, "{loss:?}");
    assert!(report.is_some());
    let again = crate::engine::repair::examine(&disk_of(), &config()).unwrap();
    assert!(again.is_empty(), "{again:?}");
    let (core, report) = open(&disk, &config(), &clock).unwrap();
    assert_eq!(report.findings, Vec::<String>::new());
    assert_eq!((report.damage.len(), report.accepted.len()), (0, 1));
    let fixture = Fixture {
        disk,
        clock,
        config: config(),
        core,
        report,
    };
    fixture.append("a", b"more").unwrap();
}

#[test]
fn images_of_deleted_logs_go_however_many_they_are() {
    let fixture = Fixture::with(SimDisk::new(), config());
    let name = |number: usize| format!("many/{number:06}");
    for number in 0..4000 {
        drop(fixture.submit(batch(&[(&name(number), &[b"x"])])));
    }
    fixture.core.turn();
    fixture.fill_logs(1, 3);
    fixture.sort();
    let images = |fixture: &Fixture| -> u64 {
        let runs = fixture.core.journal.runs();
        let of = |run: &Arc<crate::journal::run::Run>| run.segment.life.size - run.head.pack_bytes;
        runs.iter().map(of).sum()
    };
    // The images take more bytes than the limit for merging runs.
    let before = images(&fixture);
    assert!(before > fixture.config.sorter_step_bytes / 4, "{before}");
    for number in 0..4000 {
        drop(fixture.core.delete_in_turn(target(&name(number))));
    }
    fixture.core.turn();
    // Fills segments until both checkpoints know of the deletions.
    for seed in 2..6 {
        fixture.fill_logs(seed, 9);
        for log in LOGS.iter().take(4) {
            let tail = fixture.read_from(log, ReadStart::First).unwrap().tail_lsn;
            fixture.trim_to(log, tail.get());
        }
        fixture.sort();
    }
    let left = images(&fixture);
    assert!(left < before / 4, "{left} of {before}");
}

/// A store with a run and with segments. The sorter rewrites the run too, and removes its file.
fn to_be_sorted() -> Fixture {
    let fixture = Fixture::with(SimDisk::new(), config());
    fixture.fill_logs(1, 3);
    fixture.sort();
    fixture.fill_logs(2, 3);
    fixture.trim_to("a", 200);
    fixture.trim_to("b/1", 100);
    assert!(fixture.runs() > 0);
    fixture
}

#[test]
fn verification_goes_on_whenever_the_sorter_takes_its_files() {
    for nth in 0.. {
        let fixture = to_be_sorted();
        let mut told = 0;
        let mut sorted = false;
        let mut found = Vec::new();
        let control = crate::api::pace::Control::new(0);
        let verified = fixture
            .core
            .verifier
            .verify(None, &control, &mut |progress| {
                if told == nth {
                    fixture.sort();
                    sorted = true;
                }
                told += 1;
                found.append(&mut progress.findings);
            });
        assert!(verified.is_ok(), "sorted at step {nth}: {verified:?}");
        found.retain(|finding| finding.severity > crate::api::finding::Severity::Note);
        assert!(found.is_empty(), "sorted at step {nth}: {found:?}");
        if !sorted {
            assert!(nth > 8, "a verification of several files has several steps");
            return;
        }
    }
}

#[test]
fn lookup_finds_its_row_whenever_the_sorter_takes_its_files() {
    for (nth, has_chain) in (0..).flat_map(|nth| [(nth, true), (nth, false)]) {
        let fixture = Fixture::with(SimDisk::new(), config());
        for seed in 1..4 {
            fixture.fill_logs(seed, 3);
            fixture.sort();
        }
        fixture.fill_logs(4, 3);
        for log in ["b/1", "b/2", "c"] {
            fixture.trim_to(log, 100);
        }
        let store = &fixture.core.store;
        let log = store.logs.by_name("a").unwrap();
        let chain = log.state.read().chain.clone();
        // The first record in the newest run: the lookup passes the older ones.
        let runs = store.journal.runs();
        assert!(runs.len() > 1);
        let newest = store.indexes.find(&runs[runs.len() - 1].segment, log.id);
        let (index, row) = newest.unwrap().flatten().unwrap();
        let lsn = index.entries(&row).get(0).unwrap().first_lsn;
        let calls = Cell::new(0);
        let holds = |_: &SealedIndex, row: &Row| {
            if calls.get() == nth {
                fixture.sort();
            }
            calls.set(calls.get() + 1);
            row.next_lsn > lsn
        };
        let found = match has_chain {
            true => store.sealed_row(log.id, &chain, Reach::Disk, holds),
            false => store.sealed_row_without_chain(log.id, holds),
        };
        let (index, row) = found.unwrap().unwrap();
        let first = index.entries(&row).get(0).unwrap().first_lsn;
        assert!(
            first <= lsn && lsn < row.next_lsn,
            "sorted at row {nth}, chain {has_chain}: {first} for {lsn}"
        );
        if calls.get() <= nth && !has_chain {
            assert!(nth > 1, "a lookup looks at several rows");
            return;
        }
    }
}

#[test]
fn scrubbing_goes_on_whenever_the_sorter_takes_its_files() {
    for nth in 0.. {
        let fixture = to_be_sorted();
        let mut reads = 0;
        let mut sorted = false;
        let scrubbed = fixture.core.scrubber.scrub_with(&mut |_| {
            if reads == nth {
                fixture.sort();
                sorted = true;
            }
            reads += 1;
            Ok(())
        });
        assert!(scrubbed.is_ok(), "sorted at read {nth}: {scrubbed:?}");
        let shown = fixture.core.statistics();
        assert_eq!(shown.quarantined_records, 0, "sorted at read {nth}");
        assert!(shown.last_scrub.is_some());
        if !sorted {
            assert!(nth > 8, "a pass over several files has several reads");
            return;
        }
    }
}

/// Fails the removal of this number of indexes.
fn fail_removals(disk: &SimDisk, count: u64) {
    let removes = |call: &crate::disk::DiskCall<'_>| {
        call.kind == crate::disk::CallKind::Remove && call.path.starts_with("index/")
    };
    for nth in 1..=count {
        disk.fail_call(removes, nth, 5);
    }
}

/// Number of indexes of segments that are sorted.
fn orphans(fixture: &Fixture) -> usize {
    let runs = fixture.core.journal.runs();
    let last = runs.last().map(|run| run.head.last);
    let names = fixture.disk.list("index").unwrap();
    let ids = names.iter().filter_map(|name| crate::index::index_id(name));
    ids.filter(|id| Some(*id) <= last && runs.iter().all(|run| run.id() != *id))
        .count()
}

#[test]
fn index_whose_removal_fails_goes_with_a_later_step_or_start() {
    let fixture = Fixture::with(SimDisk::new(), config());
    fixture.fill_logs(1, 12);
    fail_removals(&fixture.disk, 2);
    assert!(fixture.core.sort_in_turn().unwrap());
    assert!(orphans(&fixture) > 0);
    let killed = fixture.disk.copy();
    fixture.core.sort_in_turn().unwrap();
    assert_eq!(orphans(&fixture), 0, "a later step removes them");

    let fixture = Fixture::with(killed.copy(), config());
    assert_eq!(orphans(&fixture), 0, "the next start removes them");

    // The start serves although it cannot remove them.
    fail_removals(&killed, 1);
    let fixture = Fixture::with(killed, config());
    assert_eq!(orphans(&fixture), 1);
    fixture.core.sort_in_turn().unwrap();
    assert_eq!(orphans(&fixture), 0);
}

/// A store that ended cleanly, with runs and with unsorted segments that a checkpoint covers.
fn covered() -> (SimDisk, Arc<TestClock>, Vec<String>) {
    let (disk, clock, expected) = unsorted();
    let fixture = start(&disk, &clock).unwrap();
    fixture.core.close().unwrap();
    (disk, clock, expected)
}

/// Sorts everything. Returns the number of segments that are left.
fn sort_all(fixture: &Fixture) -> usize {
    for _ in 0..5 {
        fixture.clock.advance(30_000_000);
        fixture.sort();
    }
    fixture.core.journal.segments.read().len()
}

#[test]
fn start_writes_an_index_that_is_gone_and_its_segment_is_sorted() {
    let (disk, clock, expected) = covered();
    let left = sort_all(&start(&disk.copy(), &clock).unwrap());
    let names = disk.list("index").unwrap();
    assert!(names.len() > 4, "{names:?}");
    for name in names {
        let disk = disk.copy();
        let path = format!("index/{name}");
        disk.remove(&path).unwrap();
        let fixture = start(&disk, &clock).unwrap();
        fixture.core.turn();
        assert!(disk.contents(&path).is_some(), "{path} is there again");
        assert_eq!(sort_all(&fixture), left, "{path} was lost");
        fixture.assert_told(&expected, &path);
    }
}

#[test]
fn damaged_index_is_written_by_the_start_after_it_is_found() {
    let (disk, clock, expected) = covered();
    let left = sort_all(&start(&disk.copy(), &clock).unwrap());
    for name in disk.list("index").unwrap() {
        let disk = disk.copy();
        let path = format!("index/{name}");
        let at = disk.contents(&path).unwrap().len() / 2;
        flip(&disk, &path, at);
        let fixture = start(&disk, &clock).unwrap();
        sort_all(&fixture);
        fixture.assert_told(&expected, &path);
        drop(fixture);
        let fixture = start(&disk, &clock).unwrap();
        assert!(sort_all(&fixture) <= left + 1, "{path} was damaged");
        fixture.assert_told(&expected, &path);
    }
}

#[test]
fn index_that_could_not_be_read_for_a_while_is_read_again() {
    let (disk, clock, expected) = covered();
    let left = sort_all(&start(&disk.copy(), &clock).unwrap());
    let fixture = start(&disk, &clock).unwrap();
    let reads = |call: &crate::disk::DiskCall<'_>| {
        call.kind == crate::disk::CallKind::Read && call.path.starts_with("index/")
    };
    // A read, the same read again, and the read of the page fail.
    for nth in 1..=2 {
        fixture.disk.fail_call(reads, nth, 5);
    }
    fixture.read("a", 61).unwrap();
    assert_eq!(fixture.disk.faults_left(), 0, "the errors came");
    assert_eq!(sort_all(&fixture), left);
    fixture.assert_told(&expected, "after errors of an index");
}
