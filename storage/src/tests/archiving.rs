//! The archive: at every moment, each record that retention takes is in the store or in the archive. A
//! restore returns the records unchanged.

use std::collections::BTreeMap;

use super::exactly_once::of;
use super::*;
use crate::api::error::RestoreError;
use crate::api::record::{Gap, GapReason, LogConfig, Retention};
use crate::api::ticket::block_on;
use crate::disk::{Disk, DiskFile, DiskLock, FileSystem, Unreadable};
use crate::engine::Start;
use crate::format::frame::HEADER_BYTES;
use crate::index::run_file;
use crate::tools::archive::list;
use crate::tools::archive::list::{ArchiveFilter, ArchiveListing};
use crate::tools::archive::restore;

const LOGS: [&str; 4] = ["a", "b/1", "b/2", "c"];

fn config() -> StorageConfig {
    StorageConfig {
        reserve_segments: 1,
        sorter_enabled: true,
        sorter_step_bytes: 1 << 20,
        ..small_config()
    }
}

/// A directory of a simulated disk as a separate disk. A power cut hits both.
struct Under(SimDisk);

struct NoLock;

impl DiskLock for NoLock {}

fn under(path: &str) -> String {
    match path {
        "" => "archive".to_owned(),
        path => format!("archive/{path}"),
    }
}

impl Disk for Under {
    fn location(&self) -> String {
        "archive".to_owned()
    }

    fn lock(&self, _: &str, _: &str) -> std::io::Result<Result<Box<dyn DiskLock>, String>> {
        Ok(Ok(Box::new(NoLock)))
    }

    fn lock_shared(&self, _: &str) -> std::io::Result<Result<Option<Box<dyn DiskLock>>, String>> {
        Ok(Ok(None))
    }

    fn create_directory(&self, path: &str) -> std::io::Result<()> {
        self.0.create_directory(&under(path))
    }

    fn visit(&self, directory: &str, each: &mut dyn FnMut(&str)) -> std::io::Result<()> {
        self.0.visit(&under(directory), each)
    }

    fn create(&self, path: &str) -> std::io::Result<Arc<dyn DiskFile>> {
        self.0.create(&under(path))
    }

    fn open(&self, path: &str) -> std::io::Result<Arc<dyn DiskFile>> {
        self.0.open(&under(path))
    }

    fn read_direct(&self, path: &str, from: u64, bytes: u64) -> std::io::Result<Option<Bytes>> {
        self.0.read_direct(&under(path), from, bytes)
    }

    fn unreadable(&self) -> &Unreadable {
        self.0.unreadable()
    }

    fn rename(&self, from: &str, to: &str) -> std::io::Result<()> {
        self.0.rename(&under(from), &under(to))
    }

    fn remove(&self, path: &str) -> std::io::Result<()> {
        self.0.remove(&under(path))
    }

    fn sync_directory(&self, directory: &str) -> std::io::Result<()> {
        self.0.sync_directory(&under(directory))
    }

    fn free_bytes(&self) -> std::io::Result<Option<u64>> {
        self.0.free_bytes()
    }

    fn file_system(&self) -> FileSystem {
        self.0.file_system()
    }

    fn draw(&self, bytes: &mut [u8]) -> std::io::Result<()> {
        self.0.draw(bytes)
    }
}

fn archive_of(disk: &SimDisk) -> Arc<dyn Disk> {
    disk.create_directory("archive").unwrap();
    Arc::new(Under(disk.clone()))
}

fn start(
    disk: &SimDisk,
    archive: Option<Arc<dyn Disk>>,
    clock: &Arc<TestClock>,
) -> Result<Fixture, OpenError> {
    let (core, report) = Core::open_as(
        Start::Serve,
        (Arc::new(disk.clone()), archive),
        config(),
        Arc::clone(clock) as Arc<dyn Clock>,
        Arc::new(NoObserver),
    )?;
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

fn archiving(disk: &SimDisk, clock: &Arc<TestClock>) -> Result<Fixture, OpenError> {
    start(disk, Some(archive_of(disk)), clock)
}

/// A batch: number of records, arrival in microseconds, length and checksum of its body.
type Stored = (u32, i64, usize, u32);

/// Batches of each log, by their first lsn.
type Told = BTreeMap<String, BTreeMap<u64, Stored>>;

impl Fixture {
    fn keep_newest(&self, log: &str, records: u64) {
        let retention = Retention {
            max_records: Some(records),
            ..Retention::default()
        };
        let config = LogConfig {
            retention: Some(Box::new(retention)),
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

    /// Appends to all logs over some segments, and notes the appended batches.
    fn fill_noted(&self, segments: u64, told: &mut Told) {
        let begun = self.core.journal.current().base;
        let mut number = 0_u64;
        while self.core.journal.current().base.since(begun) < segments * (64 << 10) {
            number += 1;
            for (at, log) in LOGS.iter().enumerate() {
                if !number.is_multiple_of(at as u64 + 1) {
                    continue;
                }
                let size = usize::try_from(number * 7919 % 1200).unwrap();
                let mut data = (begun.get() + number).to_le_bytes().to_vec();
                data.resize(8 + size, u8::try_from(at).unwrap());
                let records: Vec<&[u8]> = vec![&data; 1 + at % 3];
                self.append_batch(batch(&[(log, records.as_slice())]))
                    .unwrap();
                self.clock.advance(1000);
            }
        }
        for log in LOGS {
            let of_log = told.entry(log.to_owned()).or_default();
            let end = of_log
                .last_key_value()
                .map_or(0, |(first, stored)| first + u64::from(stored.0));
            // After a trim within a batch, only a part of the batch can be read.
            let mut new = batches(self, log).unwrap_or_default();
            new.retain(|first, _| *first >= end);
            of_log.extend(new);
        }
    }

    /// Expires all records beyond the retention of their logs.
    fn expire_all(&self) {
        let mut pass = self.core.retainer.begin_pass().unwrap();
        while !pass.is_through() {
            let portion = self.core.retainer.look(&mut pass);
            if !portion.is_empty() {
                let expired = self.core.retainer.expire(portion);
                self.core.turn();
                block_on(expired).unwrap();
            }
        }
        self.core.retainer.end_pass(pass);
    }

    fn drop_below(&self, log: &str, before: u64) {
        let trimmed = self.core.trim_in_turn(target(log), Lsn::new(before));
        self.core.turn();
        block_on(trimmed).unwrap();
    }

    fn first_kept(&self, log: &str) -> u64 {
        let log = self.core.logs.by_name(log).unwrap();
        let first = log.state.read().first(self.core.journal.durable());
        first.get()
    }

    fn sort_all(&self) {
        for _ in 0..60 {
            if !self.core.sort_in_turn().unwrap() {
                return;
            }
        }
        panic!("sorting comes to an end");
    }

    /// Lsns of a log that lie in files of the store, readable or not.
    fn in_files(&self, log: &str) -> Vec<(u64, u64)> {
        let log = self.core.logs.by_name(log).unwrap();
        let mut found: Vec<(u64, u64)> = Vec::new();
        let segments = self
            .core
            .journal
            .segments
            .read()
            .values()
            .cloned()
            .collect::<Vec<_>>();
        let runs = self.core.journal.runs();
        let runs = runs.iter().map(|run| Arc::clone(&run.segment));
        for segment in runs.chain(segments) {
            let Some(index) = self.core.sealed_index(&segment).unwrap() else {
                continue;
            };
            if let Some(row) = index.row(log.id) {
                let entries = index.entries(&row);
                let entries = entries.from(0);
                found.extend(entries.map(|p| (p.first_lsn.get(), p.next_lsn().get())));
            }
        }
        let places = log.state.read().places.clone();
        found.extend((0..places.len()).filter_map(|at| {
            let place = places.get(at)?;
            Some((place.first_lsn.get(), place.next_lsn().get()))
        }));
        found.sort_unstable();
        found
    }
}

/// All batches of a log that can be read, by pages.
fn batches(fixture: &Fixture, log: &str) -> Option<BTreeMap<u64, Stored>> {
    let mut found = BTreeMap::new();
    let page = fixture.read_from(log, ReadStart::First).ok()?;
    let mut next = page.first_lsn;
    while next < page.tail_lsn {
        match fixture.read(log, next.get()) {
            Ok(page) => {
                for batch in &page.batches {
                    let crc = crate::base::crc::crc32c(&batch.body);
                    let (arrival, length) = (batch.arrival.micros(), batch.body.len());
                    let stored = (batch.count, arrival, length, crc);
                    found.insert(batch.first_lsn.get(), stored);
                }
                next = page.next_lsn;
            }
            Err(ReadError::Trimmed { first, .. }) => next = first,
            Err(ReadError::Quarantined { to: Some(to), .. }) => next = to,
            Err(error) => panic!("{log}: {error}"),
        }
    }
    Some(found)
}

fn listed(disk: &dyn Disk) -> ArchiveListing {
    let listing = list::list(disk, &ArchiveFilter::default(), true, &mut |_| {}).unwrap();
    assert_eq!(listing.findings, []);
    listing
}

/// Lsns of a log in an archive, by file.
fn archived(listing: &ArchiveListing, log: &str) -> Vec<(u64, u64)> {
    let logs = listing.files.iter().flat_map(|file| &file.logs);
    let of_log = logs.filter(|l| l.name.as_ref().is_some_and(|name| name.as_str() == log));
    let mut found: Vec<_> = of_log
        .map(|l| (l.lsns.start.get(), l.lsns.end.get()))
        .collect();
    found.sort_unstable();
    found
}

/// Joins ranges that touch or overlap.
fn joined(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (from, to) in ranges {
        match joined.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(to),
            _ => joined.push((from, to)),
        }
    }
    joined
}

/// Restores an archive to a new store, and opens it.
fn restored(archive: &Arc<dyn Disk>, filter: &ArchiveFilter) -> (Fixture, u64) {
    let disk = SimDisk::new();
    let target: Arc<dyn Disk> = Arc::new(disk.clone());
    let restored = restore::restore(archive, &target, filter, &config(), &mut |_| {}).unwrap();
    assert_eq!(restored.findings, []);
    assert_eq!(restored.report.findings, Vec::<String>::new());
    assert_eq!(restored.report.damage, []);
    let offline = crate::tools::verify::Offline::open(Arc::new(disk.copy())).unwrap();
    let control = crate::api::pace::Control::new(0);
    let report = offline.verify(&control, &mut |_| {}).unwrap();
    assert_eq!(report.findings, []);
    assert!(report.records > 0);
    let fixture = start(&disk, None, &TestClock::new()).unwrap();
    (fixture, restored.duplicates)
}

/// The batches of a log that lie in these ranges.
fn within(of_log: &BTreeMap<u64, Stored>, ranges: &[(u64, u64)]) -> BTreeMap<u64, Stored> {
    let held = |first: u64| {
        ranges
            .iter()
            .any(|(from, to)| *from <= first && first < *to)
    };
    let kept = of_log.iter().filter(|(first, _)| held(**first));
    kept.map(|(first, stored)| (*first, *stored)).collect()
}

#[test]
fn expired_records_are_archived_and_restored_unchanged() {
    let (disk, clock) = (SimDisk::new(), TestClock::new());
    let fixture = archiving(&disk, &clock).unwrap();
    for (log, records) in [("a", 40), ("b/1", 9), ("c", 1)] {
        fixture.keep_newest(log, records);
    }
    let mut told = Told::new();
    for _ in 0..4 {
        fixture.fill_noted(3, &mut told);
        fixture.expire_all();
        fixture.core.sort_in_turn().unwrap();
        fixture.fill_noted(2, &mut told);
    }
    fixture.expire_all();
    fixture.fill_noted(5, &mut told);
    fixture.sort_all();
    let archive = archive_of(&disk);
    let listing = listed(&*archive);
    assert!(listing.files.len() > 2, "{}", listing.files.len());
    assert!(listing.unfinished.is_empty() && listing.strangers.is_empty());
    assert!(listing.files.iter().all(|file| !file.pending));
    assert_eq!(archived(&listing, "b/2"), [], "it forgets nothing");
    let quick = list::list(&*archive, &ArchiveFilter::default(), false, &mut |_| {}).unwrap();
    assert_eq!(
        quick, listing,
        "what is told without reading all is the same"
    );
    let (other, duplicates) = restored(&archive, &ArchiveFilter::default());
    assert_eq!(duplicates, 0);
    let mut found = Told::new();
    for log in ["a", "b/1", "c"] {
        let ranges = joined(archived(&listing, log));
        assert_eq!(ranges.len(), 1, "{log}: {ranges:?}");
        assert_eq!(ranges[0].0, 0, "{log}");
        assert!(ranges[0].1 > 30 && ranges[0].1 <= fixture.first_kept(log));
        found.insert(log.to_owned(), batches(&other, log).unwrap());
        assert_eq!(found[log], within(&told[log], &ranges), "{log}");
    }
    // The restored store works like any other.
    let other = other.restart();
    other.fill_noted(6, &mut Told::new());
    other.sort_all();
    for (log, expected) in &found {
        let mut now = batches(&other, log).unwrap();
        now.retain(|first, _| expected.contains_key(first));
        assert_eq!(&now, expected, "{log}");
    }
}

#[test]
fn gaps_of_a_restored_archive_name_why_records_went() {
    let (disk, clock) = (SimDisk::new(), TestClock::new());
    let fixture = archiving(&disk, &clock).unwrap();
    let mut told = Told::new();
    fixture.fill_noted(6, &mut told);
    fixture.sort_all();
    fixture.fill_noted(6, &mut told);
    fixture.keep_newest("a", 20);
    fixture.expire_all();
    fixture.sort_all();
    let archive = archive_of(&disk);
    let first = joined(archived(&listed(&*archive), "a"));
    fixture.fill_noted(6, &mut told);
    let trimmed = fixture.first_kept("a") + 90;
    fixture.drop_below("a", trimmed);
    fixture.fill_noted(6, &mut told);
    fixture.expire_all();
    fixture.sort_all();
    // This run has no archive.
    drop(fixture);
    let fixture = start(&disk, None, &clock).unwrap();
    fixture.fill_noted(6, &mut told);
    let expired = fixture.first_kept("a");
    fixture.expire_all();
    fixture.sort_all();
    let not_kept = fixture.first_kept("a");
    drop(fixture);
    let fixture = archiving(&disk, &clock).unwrap();
    fixture.fill_noted(6, &mut told);
    fixture.expire_all();
    fixture.sort_all();
    let ranges = joined(archived(&listed(&*archive), "a"));
    assert_eq!(ranges.len(), 3, "{ranges:?}");
    assert_eq!(ranges[0], first[0]);
    assert!(ranges[1].0 <= trimmed && ranges[1].1 <= expired && ranges[2].0 <= not_kept);
    let (other, _) = restored(&archive, &ArchiveFilter::default());
    assert_eq!(batches(&other, "a").unwrap(), within(&told["a"], &ranges));
    let gaps_from = |fixture: &Fixture, selector: Selector, start: ScanStart| {
        let mut scan = fixture.scan(selector, start, false);
        let mut gaps: Vec<Gap> = Vec::new();
        while let Some(chunk) = next_chunk(&mut scan).unwrap().unwrap() {
            for gap in chunk.gaps {
                match gaps.last_mut() {
                    Some(last) if last.to == gap.from && last.reason == gap.reason => {
                        last.to = gap.to;
                    }
                    _ => gaps.push(gap),
                }
            }
        }
        gaps
    };
    let gaps = |fixture: &Fixture, selector| gaps_from(fixture, selector, ScanStart::First);
    let expected = [
        (ranges[0].1, ranges[1].0, GapReason::Trimmed),
        (ranges[1].1, ranges[2].0, GapReason::Expired),
    ];
    let expected = expected.map(|(from, to, reason)| Gap {
        log: Some(LogName::new("a").unwrap()),
        from: Some(Lsn::new(from)),
        to: Some(Lsn::new(to)),
        reason,
    });
    let mut other = other;
    for when in ["at first", "after a start", "when it was sorted again"] {
        assert_eq!(gaps(&other, one("a")), expected, "{when}");
        assert_eq!(gaps(&other, Selector::All), expected, "{when}");
        let asked = Lsn::new(ranges[0].1 + 1);
        match other.read("a", asked.get()) {
            Err(ReadError::Trimmed { first, .. }) => assert_eq!(first.get(), ranges[1].0),
            other => panic!("{when}: {other:?}"),
        }
        let mut found = Vec::new();
        let control = crate::api::pace::Control::new(0);
        let tell = &mut |progress: &mut crate::api::pace::VerifyProgress| {
            found.append(&mut progress.findings)
        };
        other.core.verifier.verify(None, &control, tell).unwrap();
        assert_eq!(found, [], "{when}");
        other = match when {
            "at first" => other.restart(),
            _ => {
                for log in ["b/1", "c"] {
                    other.append(log, b"x").unwrap();
                }
                let filler = vec![7; 20 << 10];
                for _ in 0..30 {
                    other.append("filler", &filler).unwrap();
                }
                other.sort_all();
                other
            }
        };
    }
    // Without the older files, earlier records count as expired.
    let newest = listed(&*archive).files.pop().unwrap();
    let alone = SimDisk::new();
    alone.replace(&newest.path, disk.contents(&under(&newest.path)).unwrap());
    let alone: Arc<dyn Disk> = Arc::new(alone);
    let (other, _) = restored(&alone, &ArchiveFilter::default());
    let of_a = joined(archived(&listed(&*alone), "a"));
    let told = gaps_from(&other, one("a"), ScanStart::Lsn(Lsn::ZERO));
    assert_eq!(told[0].reason, GapReason::Trimmed);
    assert_eq!(told[0].to, told[1].from);
    assert_eq!(told[1].reason, GapReason::Expired);
    assert_eq!(told[1].to, Some(Lsn::new(of_a[0].0)));
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

/// A store with many records to archive, from segments and from runs; ended by a kill.
fn unarchived() -> (SimDisk, Arc<TestClock>, Told) {
    let (disk, clock) = (SimDisk::new(), TestClock::new());
    let fixture = archiving(&disk, &clock).unwrap();
    let mut told = Told::new();
    fixture.fill_noted(6, &mut told);
    fixture.core.sort_in_turn().unwrap();
    fixture.fill_noted(3, &mut told);
    fixture.core.sort_in_turn().unwrap();
    fixture.keep_newest("a", 60);
    fixture.keep_newest("b/1", 7);
    fixture.expire_all();
    fixture.core.sort_in_turn().unwrap();
    fixture.fill_noted(4, &mut told);
    fixture.expire_all();
    fixture.drop_below("c", 20);
    fixture.keep_newest("c", 4);
    fixture.fill_noted(3, &mut told);
    fixture.expire_all();
    fixture.fill_noted(1, &mut told);
    drop(fixture);
    (disk, clock, told)
}

/// Checks that every record that nobody trimmed is in the store or in the archive. Once `settled`, it must be
/// in only one of them. Archived records come back unchanged.
fn assert_all_there(fixture: &Fixture, told: &Told, settled: bool, what: &str) {
    let archive = archive_of(&fixture.disk);
    let listing = listed(&*archive);
    assert!(listing.strangers.is_empty(), "{what}");
    if settled {
        assert!(listing.unfinished.is_empty(), "{what}: {listing:?}");
        assert!(listing.files.iter().all(|file| !file.pending), "{what}");
    }
    let mut any = false;
    for (log, of_log) in told {
        let known = fixture.core.logs.by_name(log).unwrap();
        let kept = known.state.read().kept(fixture.core.journal.durable());
        let next = known.state.read().next.get();
        let (archived, stored) = (archived(&listing, log), fixture.in_files(log));
        any |= !archived.is_empty();
        let all = [archived.clone(), stored.clone()].concat();
        let there = joined(all.clone());
        let trimmed = kept.trimmed().get();
        let whole = there
            .iter()
            .any(|(from, to)| *from <= trimmed && *to == next);
        assert!(whole, "{what}: {log}: {there:?} of {trimmed} to {next}");
        let read: u64 = of_log.values().map(|stored| u64::from(stored.0)).sum();
        assert_eq!(read, next, "{what}: {log}");
        if settled {
            let sum = |ranges: &[(u64, u64)]| ranges.iter().map(|(f, t)| t - f).sum::<u64>();
            assert_eq!(sum(&all), sum(&there), "{what}: {log}: twice");
        }
    }
    if !any {
        return;
    }
    let (other, duplicates) = restored(&archive, &ArchiveFilter::default());
    assert!(!settled || duplicates == 0, "{what}: {duplicates} twice");
    for (log, of_log) in told {
        let ranges = joined(archived(&listing, log));
        let found = batches(&other, log).unwrap_or_default();
        assert_eq!(found, within(of_log, &ranges), "{what}: {log}");
    }
}

#[test]
fn wherever_a_crash_comes_nothing_that_expired_is_lost_or_twice() {
    let (disk, clock, told) = unarchived();
    let mut points = 0;
    for nth in (1..).step_by(step()) {
        let disk = disk.copy();
        let fixture = archiving(&disk, &clock).unwrap();
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
        for then in [0, nth % 31 + 1] {
            let disk = disk.copy();
            if then > 0 {
                disk.crash_after(then);
                if let Ok(fixture) = archiving(&disk, &clock) {
                    sort_on(&fixture);
                    drop(fixture);
                }
                disk.crash(then);
            }
            let what = format!("cut in call {nth}, then {then}");
            let fixture = archiving(&disk, &clock).unwrap();
            super::simulation::assert_no_leftovers(&disk, &fixture.core);
            assert_all_there(&fixture, &told, false, &what);
            fixture.sort_all();
            assert_all_there(&fixture, &told, true, &format!("{what}, then sorted"));
            // A start without the archive comes after starts with it.
            drop(fixture);
            let fixture = start(&disk, None, &clock).unwrap();
            assert_all_there(&fixture, &told, true, &format!("{what}, then without"));
        }
    }
    println!("the power went in each of {points} calls");
    assert!(points * step() > 60, "{points}");
}

#[test]
fn whichever_call_fails_nothing_that_expired_is_lost_or_twice() {
    let (disk, clock, told) = unarchived();
    let (mut points, mut failures) = (0, 0);
    for nth in (1..).step_by(step()) {
        let disk = disk.copy();
        let fixture = archiving(&disk, &clock).unwrap();
        disk.fail_call(|_| true, nth, if nth % 2 == 0 { 5 } else { 28 });
        sort_on(&fixture);
        if disk.faults_left() > 0 {
            break;
        }
        points += 1;
        let what = format!("call {nth} failed");
        failures += fixture.core.statistics().archive_failures;
        if fixture.core.journal.failure().is_none() {
            assert_all_there(&fixture, &told, false, &what);
            fixture.sort_all();
            assert_eq!(fixture.core.statistics().archive_failing, None, "{what}");
            assert_all_there(&fixture, &told, true, &format!("{what}, then sorted"));
        }
        drop(fixture);
        disk.crash(nth);
        let fixture = archiving(&disk, &clock).unwrap();
        super::simulation::assert_no_leftovers(&disk, &fixture.core);
        assert_all_there(&fixture, &told, false, &format!("{what}, then a start"));
        fixture.sort_all();
        assert_all_there(&fixture, &told, true, &format!("{what}, then all"));
    }
    println!("each of {points} calls failed once, {failures} of the archive");
    assert!(points * step() > 60 && failures > 5, "{points}, {failures}");
}

#[test]
fn a_full_archive_delays_dropping_expired_records_and_nothing_else() {
    let (disk, archive, clock) = (SimDisk::new(), SimDisk::new(), TestClock::new());
    let archive_disk = || Arc::new(archive.clone()) as Arc<dyn Disk>;
    let fixture = start(&disk, Some(archive_disk()), &clock).unwrap();
    // Only one store may write to an archive.
    let locked = start(&disk.copy(), Some(archive_disk()), &clock);
    assert!(matches!(locked, Err(OpenError::Locked { .. })));
    let mut told = Told::new();
    fixture.fill_noted(6, &mut told);
    fixture.sort_all();
    fixture.fill_noted(6, &mut told);
    fixture.keep_newest("a", 20);
    fixture.expire_all();
    let before = fixture.in_files("a");
    archive.set_full(true);
    for failures in 1..4 {
        let error = fixture.core.sort_in_turn().unwrap_err();
        assert!(crate::disk::is_out_of_space(&error), "{error}");
        let now = fixture.core.statistics();
        assert_eq!(
            (now.archive_failures, now.archive_written_bytes),
            (failures, 0)
        );
        assert!(now.archive_failing.unwrap().starts_with("archive memory: "));
        assert_eq!(fixture.in_files("a"), before, "nothing is dropped");
    }
    fixture.append("b/1", b"goes on").unwrap();
    assert_eq!(
        disk.list("sorted").unwrap().len(),
        fixture.core.journal.runs().len()
    );
    archive.set_full(false);
    fixture.sort_all();
    let now = fixture.core.statistics();
    assert_eq!(now.archive_failing, None);
    assert!(now.archive_written_bytes > 0);
    let ranges = joined(archived(&listed(&archive), "a"));
    assert_eq!(ranges.len(), 1);
    assert!(ranges[0].0 == 0 && ranges[0].1 > 100, "{ranges:?}");
    let (other, _) = restored(&archive_disk(), &ArchiveFilter::default());
    assert_eq!(batches(&other, "a").unwrap(), within(&told["a"], &ranges));
}

#[test]
fn damage_in_an_archive_is_named_and_all_else_is_restored() {
    let (disk, clock, told) = unarchived();
    let fixture = archiving(&disk, &clock).unwrap();
    fixture.sort_all();
    drop(fixture);
    let archive = archive_of(&disk);
    let listing = listed(&*archive);
    let count = |file: &crate::tools::archive::list::ArchiveFile| {
        file.logs.iter().map(|log| log.records).sum::<u64>()
    };
    let all: u64 = listing.files.iter().map(count).sum();
    let file = listing.files.iter().max_by_key(|file| file.bytes).unwrap();
    let path = under(&file.path);
    let bytes = disk.contents(&path).unwrap();
    let places = (0..68).step_by(9).chain((8192..bytes.len()).step_by(1511));
    let (mut lost_some, mut exact) = (0, 0);
    for at in places {
        let what = format!("byte {at}");
        let disk = disk.copy();
        let mut damaged = bytes.clone();
        damaged[at] ^= 4;
        disk.replace(&path, damaged);
        let archive = archive_of(&disk);
        let filter = ArchiveFilter::default();
        let found = list::list(&*archive, &filter, true, &mut |_| {}).unwrap();
        let target = SimDisk::new();
        let target_disk: Arc<dyn Disk> = Arc::new(target.clone());
        let restored =
            restore::restore(&archive, &target_disk, &filter, &config(), &mut |_| {}).unwrap();
        // A restore also names the records of logs that no file describes.
        let (faults, unnamed) = restored.findings.split_at(found.findings.len());
        assert_eq!(faults, found.findings, "{what}");
        assert!(
            unnamed.iter().all(|finding| finding.log.is_none()),
            "{what}: {unnamed:?}"
        );
        assert_eq!(restored.report.findings, Vec::<String>::new(), "{what}");
        assert_eq!(restored.report.damage, [], "{what}");
        let missing = all - restored.report.records;
        let lsns = found
            .findings
            .iter()
            .filter_map(|finding| finding.lsns.clone());
        let named: u64 = lsns.map(|lsns| lsns.end.since(lsns.start)).sum();
        let wholly = found.findings.iter().any(|f| f.log_id.is_none());
        assert!(missing == 0 || !found.findings.is_empty(), "{what}");
        if !wholly {
            assert_eq!(named, missing, "{what}: {:?}", found.findings);
            exact += 1;
        }
        lost_some += u64::from(missing > 0);
        let other = start(&target, None, &TestClock::new()).unwrap();
        for (log, of_log) in &told {
            for (first, stored) in batches(&other, log).unwrap_or_default() {
                assert_eq!(of_log.get(&first), Some(&stored), "{what}: {log} {first}");
            }
        }
    }
    assert!(lost_some > 10 && exact > 10, "{lost_some}, {exact}");
}

#[test]
fn of_two_logs_of_a_name_the_newer_is_restored_and_the_other_by_its_id() {
    let (disk, clock) = (SimDisk::new(), TestClock::new());
    let fixture = archiving(&disk, &clock).unwrap();
    let mut told = Told::new();
    fixture.fill_noted(6, &mut told);
    fixture.sort_all();
    let old = fixture.core.logs.by_name("a").unwrap().id;
    fixture.fill_noted(4, &mut told);
    fixture.keep_newest("a", 5);
    fixture.expire_all();
    fixture.sort_all();
    let deleted = fixture.core.delete_in_turn(target("a"));
    fixture.core.turn();
    block_on(deleted).unwrap();
    let mut newer = Told::new();
    fixture.keep_newest("a", 5);
    fixture.fill_noted(8, &mut newer);
    fixture.expire_all();
    fixture.fill_noted(4, &mut newer);
    fixture.sort_all();
    let new = fixture.core.logs.by_name("a").unwrap().id;
    let archive = archive_of(&disk);
    for (id, skipped, told) in [(None, vec![old], &newer), (Some(old), vec![], &told)] {
        let filter = ArchiveFilter {
            log_id: id,
            ..ArchiveFilter::default()
        };
        let target = SimDisk::new();
        let target_disk: Arc<dyn Disk> = Arc::new(target.clone());
        let restored =
            restore::restore(&archive, &target_disk, &filter, &config(), &mut |_| {}).unwrap();
        let ids: Vec<_> = restored.skipped.iter().map(|log| log.log_id).collect();
        assert_eq!(ids, skipped);
        let other = start(&target, None, &TestClock::new()).unwrap();
        let log = other.core.logs.by_name("a").unwrap();
        assert_eq!(log.id, id.unwrap_or(new));
        // The restored log has no retention, so nothing expires again.
        let retention = log.state.read().config.retention.clone();
        assert_eq!(retention.as_deref(), Some(&Retention::default()));
        let found = batches(&other, "a").unwrap();
        assert!(found.len() > 20);
        for (first, stored) in found {
            assert_eq!(told["a"].get(&first), Some(&stored));
        }
        drop(other);
        // A restore does not write over a store.
        let again = restore::restore(&archive, &target_disk, &filter, &config(), &mut |_| {});
        assert!(matches!(again, Err(RestoreError::NotEmpty { .. })));
    }
    let nothing = ArchiveFilter {
        prefix: "z".to_owned(),
        ..ArchiveFilter::default()
    };
    let target: Arc<dyn Disk> = Arc::new(SimDisk::new());
    let restored = restore::restore(&archive, &target, &nothing, &config(), &mut |_| {});
    assert!(matches!(
        restored,
        Err(RestoreError::NothingArchived { .. })
    ));
}

#[test]
fn an_archive_has_records_of_producers_and_not_the_key_of_their_digests() {
    let (disk, clock) = (SimDisk::new(), TestClock::new());
    let f = archiving(&disk, &clock).unwrap();
    for sequence in 0_u64..30 {
        let batch = of(&["a"], &[7; 9000], 1, sequence);
        f.append_batch(batch).unwrap();
    }
    f.keep_newest("a", 1);
    let mut told = Told::new();
    f.fill_noted(3, &mut told);
    f.expire_all();
    f.core.close().unwrap();
    drop(f);
    let f = archiving(&disk, &clock).unwrap();
    f.sort_all();
    let key = f.core.secret.to_bytes();
    let archive = archive_of(&disk);
    let mut files = 0;
    for name in archive.list("").unwrap() {
        let Some(bytes) = disk.contents(&under(&name)) else {
            continue;
        };
        files += usize::from(bytes.len() > 9000);
        assert!(!bytes.windows(8).any(|part| part == &key[..8]), "{name}");
    }
    assert!(files > 0);
}

#[test]
fn log_that_only_a_later_file_describes_keeps_its_earlier_records() {
    let (disk, clock) = (SimDisk::new(), TestClock::new());
    let fixture = archiving(&disk, &clock).unwrap();
    let mut told = Told::new();
    let mut archive_more = || {
        fixture.fill_noted(6, &mut told);
        fixture.expire_all();
        fixture.fill_noted(4, &mut told);
        fixture.sort_all();
    };
    fixture.keep_newest("a", 5);
    fixture.keep_newest("c", 5);
    archive_more();
    fixture.keep_newest("c", 1 << 40);
    archive_more();
    let nameless = fixture.core.logs.by_name("c").unwrap().id;
    drop(fixture);
    let archive = archive_of(&disk);
    let listing = listed(&*archive);
    // No file describes "c" any more, and some files do not describe "a".
    let has = |file: &list::ArchiveFile, log: &str| {
        let mut names = file.logs.iter().filter_map(|log| log.name.as_ref());
        names.any(|name| name.as_str() == log)
    };
    let (damaged, whole): (Vec<_>, Vec<_>) = listing.files.iter().partition(|file| has(file, "c"));
    assert!(damaged.iter().any(|file| has(file, "a")));
    assert!(whole.iter().any(|file| has(file, "a")));
    for file in &damaged {
        let Ok(opened) = run_file::open_archived(&*archive, &file.path) else {
            panic!("{} is whole", file.path);
        };
        let at = usize::try_from(opened.head.images_at).unwrap();
        let mut bytes = disk.contents(&under(&file.path)).unwrap();
        bytes[at + HEADER_BYTES + 8] ^= 1;
        disk.replace(&under(&file.path), bytes);
    }
    let target = SimDisk::new();
    let target_disk: Arc<dyn Disk> = Arc::new(target.clone());
    let filter = ArchiveFilter::default();
    let restored =
        restore::restore(&archive, &target_disk, &filter, &config(), &mut |_| {}).unwrap();
    let lost = restored.findings.iter().filter_map(|finding| {
        let lsns = finding.lsns.clone()?;
        assert_eq!(finding.log_id, Some(nameless));
        Some((lsns.start.get(), lsns.end.get()))
    });
    assert_eq!(lost.collect::<Vec<_>>(), archived(&listing, "c"));
    assert_eq!(restored.findings.len(), 2 * damaged.len());
    let other = start(&target, None, &TestClock::new()).unwrap();
    let ranges = joined(archived(&listing, "a"));
    assert_eq!(batches(&other, "a").unwrap(), within(&told["a"], &ranges));
}

#[test]
fn store_that_comes_while_the_archive_is_read_is_not_touched() {
    let (disk, clock, _) = unarchived();
    let fixture = archiving(&disk, &clock).unwrap();
    fixture.sort_all();
    drop(fixture);
    let archive = archive_of(&disk);
    let target = SimDisk::new();
    let target_disk: Arc<dyn Disk> = Arc::new(target.clone());
    let filter = ArchiveFilter::default();
    let mut is_there = false;
    let refused = restore::restore(&archive, &target_disk, &filter, &config(), &mut |_| {
        if !std::mem::replace(&mut is_there, true) {
            drop(start(&target, None, &TestClock::new()).unwrap());
        }
    });
    assert!(matches!(refused, Err(RestoreError::NotEmpty { .. })));
    assert!(target.contents("RESTORING").is_none());
    let served = start(&target, None, &TestClock::new()).unwrap();
    // Its directory may be free later.
    let refused = restore::restore(&archive, &target_disk, &filter, &config(), &mut |_| {});
    assert!(matches!(
        refused,
        Err(RestoreError::Open(OpenError::Locked { .. }))
    ));
    drop(served);
}
