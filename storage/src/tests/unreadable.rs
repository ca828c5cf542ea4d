//! Sectors that the device cannot read (EIO): every path passes them, serves all other records, and
//! names the stretch and the records in it exactly.
//!
//! `WALD_DAMAGE=all` tries every page of every file; otherwise every page of segments, and some of
//! the others.

use std::collections::{BTreeMap, BTreeSet};

use super::backups::Shelf;
use super::damage::{Known, Sample, all, read_around};
use super::verifying::{lost, online, verify};
use super::*;
use crate::disk::Disk;
use crate::disk::directory::FORMAT;
use crate::engine::repair::{accept_loss, examine};
use crate::format::frame::FrameKind;

const PAGE: usize = 4096;
const FIRST_FRAME: usize = 8192;

/// Records of the sample are larger than a page: no page holds a frame and the directory that
/// describes it.
const RECORD_BYTES: usize = 5000;

/// Makes a sector of a page unreadable.
fn lose_sector(disk: &SimDisk, path: &str, page: usize) {
    disk.set_unreadable(path, page + 512..page + 1024);
}

/// Whether a frame cannot be read without this page of the device.
fn hits(page: usize, known: &Known) -> bool {
    known.from < page + PAGE && page < known.covered
}

/// Pages of a segment of the sample that hold frames or life blocks. They exclude the page of the link and
/// the marker that repeats the link. The last segment has only pages whose loss a later frame proves.
fn pages(sample: &Sample, segment: usize) -> impl Iterator<Item = usize> {
    let proofs = sample.frames.iter().filter(|f| f.segment == segment);
    let last = proofs
        .filter(|f| f.kind == FrameKind::Marker)
        .map(|f| f.from)
        .max();
    let end = match segment + 1 == sample.paths.len() {
        true => last.unwrap() / PAGE * PAGE,
        false => sample.end_of(segment),
    };
    (0..end).step_by(PAGE).filter(|page| *page != FIRST_FRAME)
}

#[test]
fn an_unreadable_page_costs_a_start_exactly_its_records() {
    let sample = Sample::with(RECORD_BYTES);
    let mut tried = 0;
    for segment in 0..sample.paths.len() {
        for page in pages(&sample, segment) {
            let disk = sample.disk.copy();
            lose_sector(&disk, &sample.paths[segment], page);
            let hit = |known: &Known| known.segment == segment && hits(page, known);
            let what = format!("segment {segment}, page {page}");
            sample.check(disk, &sample.lsns(hit), &what);
            tried += 1;
        }
    }
    assert!(tried > 20, "{tried} pages");
}

#[test]
fn a_running_engine_passes_an_unreadable_page_and_names_it() {
    let sample = Sample::with(RECORD_BYTES);
    for page in pages(&sample, 0).filter(|page| *page > FIRST_FRAME) {
        let path = &sample.paths[0];
        let fixture = Fixture::on(sample.disk.copy());
        lose_sector(&fixture.disk, path, page);
        let hit = |known: &Known| known.segment == 0 && hits(page, known);
        let missing = sample.lsns(hit);
        sample.check_scan_of_all_before_appends(&fixture, &missing);
        for log in ["a", "b", "c/1", "d"] {
            let (_, named) = read_around(&fixture, log);
            assert_eq!(
                named,
                missing.get(log).cloned().unwrap_or_default(),
                "page {page}, {log}"
            );
        }
        let known = fixture.disk.unreadable().of(path);
        let whole = page as u64..(page + PAGE) as u64;
        assert_eq!(known, std::slice::from_ref(&whole));
        let findings = online(&fixture);
        let stretch = format!("cannot read bytes {page} to {}", page + PAGE);
        let names_it = findings
            .iter()
            .any(|finding| finding.detail.contains(&stretch));
        assert!(names_it, "page {page}: {findings:#?}");
        let fixture = fixture.restart_cleanly();
        assert_eq!(
            !fixture.report.damage.is_empty(),
            !missing.is_empty(),
            "page {page}"
        );
    }
}

#[test]
fn online_verification_passes_an_unreadable_page_and_names_its_records() {
    let sample = Sample::with(RECORD_BYTES);
    for page in pages(&sample, 1).filter(|page| *page > FIRST_FRAME) {
        let fixture = Fixture::on(sample.disk.copy());
        lose_sector(&fixture.disk, &sample.paths[1], page);
        let hit = |known: &Known| known.segment == 1 && hits(page, known);
        let mut named: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
        for finding in online(&fixture) {
            if let (Some(log), Some((from, to))) = (finding.log, finding.lsns) {
                let lsns = named.entry(log.as_str().to_owned()).or_default();
                lsns.extend(from.get()..to.get());
            }
        }
        assert_eq!(named, by_name(sample.lsns(hit)), "page {page}");
    }
}

fn by_name(lsns: BTreeMap<&str, BTreeSet<u64>>) -> BTreeMap<String, BTreeSet<u64>> {
    let own = |(log, lsns): (&str, _)| (log.to_owned(), lsns);
    lsns.into_iter().map(own).collect()
}

#[test]
fn offline_verification_names_an_unreadable_page_and_its_records() {
    let sample = Sample::with(RECORD_BYTES);
    for segment in 0..sample.paths.len() {
        for page in pages(&sample, segment) {
            let disk = sample.disk.copy();
            lose_sector(&disk, &sample.paths[segment], page);
            let report = verify(&disk);
            let hit = |known: &Known| known.segment == segment && hits(page, known);
            let expected = by_name(sample.lsns(hit));
            assert_eq!(lost(&report), expected, "segment {segment}, page {page}");
            let stretch = format!("cannot read bytes {page} to {}", page + PAGE);
            let named: Vec<_> = report
                .findings
                .iter()
                .filter(|finding| finding.detail.contains(&stretch))
                .collect();
            assert_eq!(named.len(), 1, "{:#?}", report.findings);
            assert_eq!(named[0].file.as_ref(), Some(&sample.paths[segment]));
        }
    }
}

#[test]
fn repair_backup_and_restore_pass_an_unreadable_page() {
    let sample = Sample::with(RECORD_BYTES);
    let known = sample
        .frames
        .iter()
        .find(|f| f.segment == 0 && f.log == Some("b"))
        .unwrap();
    let page = known.header_end.next_multiple_of(PAGE);
    let missing = sample.lsns(|other| other.segment == 0 && hits(page, other));
    let disk = sample.disk.copy();
    lose_sector(&disk, &sample.paths[0], page);

    let fixture = Fixture::on(disk.copy());
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    assert!(
        !manifest.damage.is_empty(),
        "the backup says that it holds damage"
    );
    drop(fixture);

    let store: Arc<dyn Disk> = Arc::new(disk.clone());
    let clock = TestClock::new();
    accept_loss(&store, &small_config(), clock, "by a test").unwrap();
    let left = examine(&store, &small_config()).unwrap();
    assert!(left.is_empty(), "{left:?}");
    sample.check(disk, &missing, "after a repair");
}

/// A store whose newest record is acknowledged, and that no later frame proves flushed. Returns the
/// last segment, and the offsets of the record's frame in it.
fn unproven_tail(sample: &Sample) -> (SimDisk, String, usize, usize) {
    let fixture = Fixture::on(sample.disk.copy());
    fixture.append("e", &[1; 5000]).unwrap();
    let from = fixture.core.journal.written();
    fixture.append("e", &[2; 20_000]).unwrap();
    let current = fixture.core.journal.current();
    let offset = |position| usize::try_from(current.offset(position)).unwrap();
    let (from, to) = (offset(from), offset(fixture.core.journal.written()));
    (fixture.disk.clone(), current.path(), from, to)
}

/// Accepts the loss, if a start cannot read the end of the journal. Returns whether that was the case.
pub(super) fn give_up_unread_end(disk: &SimDisk) -> bool {
    let config = small_config();
    let opened = open(&disk.copy(), &config, &TestClock::new());
    let refused = matches!(opened, Err(OpenError::UnreadEnd { .. }));
    if refused {
        let store: Arc<dyn Disk> = Arc::new(disk.clone());
        accept_loss(&store, &config, TestClock::new(), "by a test").unwrap();
    }
    refused
}

fn is_unread_end(opened: Result<(Arc<Core>, RecoveryReport), OpenError>, file: &str) -> bool {
    match opened {
        Err(OpenError::UnreadEnd { file: named, .. }) => named == file,
        Err(error) => panic!("{error}"),
        Ok(_) => false,
    }
}

#[test]
fn a_start_that_cannot_read_the_end_of_the_journal_is_refused() {
    let sample = Sample::with(RECORD_BYTES);
    let (disk, path, from, to) = unproven_tail(&sample);
    let whole = disk.contents(&path).unwrap();
    let start = from / PAGE * PAGE;
    let mut tried = 0;
    for page in (start..to + 3 * PAGE).step_by(PAGE) {
        let what = format!("page {page} of {from} to {to}");
        let disk = disk.copy();
        lose_sector(&disk, &path, page);
        let before = disk.fingerprint();
        let refused = is_unread_end(open(&disk, &small_config(), &TestClock::new()), &path);
        assert_eq!(refused, page <= to, "{what}");
        tried += 1;
        if !refused {
            continue;
        }
        assert_eq!(disk.fingerprint(), before, "{what}: nothing was changed");
        // The error passes, and nothing is lost.
        let passed = disk.copy();
        passed.replace(&path, whole.clone());
        assert_eq!(Fixture::on(passed).contents("e").len(), 2, "{what}");
        // An operator gives the record up.
        let store: Arc<dyn Disk> = Arc::new(disk.clone());
        let loss = examine(&store, &small_config()).unwrap();
        assert!(loss.findings[0].contains("cannot read"), "{loss:?}");
        accept_loss(&store, &small_config(), TestClock::new(), "by a test").unwrap();
        let repairs = String::from_utf8(disk.contents("REPAIRS").unwrap()).unwrap();
        assert!(repairs.contains("where the journal ends"), "{repairs}");
        let fixture = Fixture::on(disk);
        // The frame that creates the log may lie before the first record.
        let is_there = fixture.core.logs.by_name("e").is_some();
        let found = if is_there {
            fixture.contents("e")
        } else {
            Vec::new()
        };
        let left = usize::from(page >= from);
        assert_eq!(found.len(), left, "{what}");
        assert!(found.iter().all(|data| *data == [1; 5000]), "{what}");
        fixture.append("e", b"goes on").unwrap();
        let fixture = fixture.restart();
        assert_eq!(fixture.contents("e").len(), left + 1, "{what}");
        assert_eq!(fixture.contents("a").len(), sample.count("a"), "{what}");
    }
    assert!(tried > 6, "{tried} pages");
}

#[test]
fn an_unread_end_refuses_a_start_behind_thousands_of_bad_sectors() {
    let sample = Sample::with(RECORD_BYTES);
    let (disk, path, from, _) = unproven_tail(&sample);
    // The disk met them in another file before.
    let pages = 2500;
    disk.replace("other", vec![1; pages * PAGE]);
    for page in (0..pages).step_by(2) {
        lose_sector(&disk, "other", page * PAGE);
    }
    let mut read = vec![0; pages * PAGE];
    disk.open("other")
        .unwrap()
        .read_full_at(&mut read, 0)
        .unwrap();
    lose_sector(&disk, &path, (from + PAGE) / PAGE * PAGE);
    let opened = open(&disk, &small_config(), &TestClock::new());
    assert!(
        is_unread_end(opened, &path),
        "acknowledged records are not cut"
    );
}

#[test]
fn an_error_at_the_end_of_the_journal_that_passes_costs_nothing() {
    let sample = Sample::with(RECORD_BYTES);
    let (disk, path, from, to) = unproven_tail(&sample);
    assert!((from..to).contains(&PASSING), "{from} to {to}");
    // The long read, the same read again, and the read of the page fail.
    for nth in 1..=3 {
        disk.fail_call(reads_passing, nth, rustix::io::Errno::IO.raw_os_error());
    }
    let fixture = Fixture::on(disk.clone());
    assert_eq!(disk.faults_left(), 0, "the errors came: {path}");
    assert_eq!(fixture.report.damage, []);
    assert_eq!(fixture.report.torn_bytes, 0);
    assert_eq!(fixture.contents("e").len(), 2);
}

#[test]
fn records_of_an_unproven_tail_come_back_with_their_lsns() {
    let fixture = Fixture::new();
    fixture.append("a", b"kept").unwrap();
    fixture.append("b", &[1; 2 * PAGE]).unwrap();
    fixture.append("a", b"comes back").unwrap();
    fixture.append("b", &[2; 2 * PAGE]).unwrap();
    fixture.append("b", b"proves the others").unwrap();
    let (disk, path) = (fixture.disk.clone(), fixture.core.journal.current().path());
    drop(fixture);
    let bytes = disk.contents(&path).unwrap();
    let at = cipher::places_of(&bytes, b"comes back")[0];
    lose_sector(&disk, &path, at / PAGE * PAGE);
    let mut fixture = Fixture::on(disk);
    for start in 0..2 {
        let page = fixture.read("a", 0).unwrap();
        assert_eq!(page.next_lsn, Lsn::new(1), "start {start}");
        assert!(page.next_lsn < page.tail_lsn, "a reader stops at the tail");
        let behind = fixture.read("a", 1);
        assert!(
            matches!(&behind, Err(ReadError::Quarantined { to: None, .. })),
            "start {start}: {behind:?}"
        );
        for log in ["a", "new"] {
            let refused = fixture.append(log, b"another");
            assert!(
                matches!(refused, Err(AppendError::TailUnproven { .. })),
                "start {start}: {log}"
            );
        }
        fixture.append("b", b"goes on").unwrap();
        fixture = fixture.restart();
    }
    // The device can read the page again.
    let bytes = fixture.disk.contents(&path).unwrap();
    fixture.disk.replace(&path, bytes);
    let fixture = fixture.restart();
    assert_eq!(fixture.report.damage, []);
    assert_eq!(fixture.contents("a"), [&b"kept"[..], b"comes back"]);
    assert_eq!(fixture.contents("b").len(), 5);
    let appended = fixture.append("a", b"next").unwrap();
    assert_eq!(appended.appends[0].first_lsn, Lsn::new(2));
}

/// A byte of the newest record of [`unproven_tail`].
const PASSING: usize = 20_000;

fn reads_passing(call: &crate::disk::DiskCall<'_>) -> bool {
    let at = PASSING as u64;
    let reads = call.kind == crate::disk::CallKind::ReadFromDevice;
    reads && call.offset <= at && at < call.offset + call.length
}

#[test]
fn a_last_segment_whose_first_page_is_unreadable_refuses_the_start() {
    let fixture = Fixture::new();
    let path = loop {
        fixture.append("a", &[7; PAGE]).unwrap();
        fixture.core.pool.fill().unwrap();
        if super::faults::used_paths(&fixture.disk).len() == 2 {
            break super::faults::used_paths(&fixture.disk).pop().unwrap();
        }
    };
    let count = fixture.contents("a").len();
    let disk = fixture.disk.clone();
    drop(fixture);
    // All frames of the segment lie in these pages.
    for page in [FIRST_FRAME, FIRST_FRAME + PAGE] {
        lose_sector(&disk, &path, page);
    }
    let refused = open(&disk, &small_config(), &TestClock::new());
    assert!(is_unread_end(refused, &path));
    let store: Arc<dyn Disk> = Arc::new(disk.clone());
    accept_loss(&store, &small_config(), TestClock::new(), "by a test").unwrap();
    let fixture = Fixture::on(disk);
    assert_eq!(fixture.contents("a").len(), count - 1);
    fixture.append("a", b"goes on").unwrap();
    assert_eq!(fixture.restart().contents("a").len(), count);
}

#[test]
fn an_unreadable_index_or_checkpoint_costs_no_record() {
    let sample = Sample::with(RECORD_BYTES);
    let disk = sample.disk.copy();
    Fixture::on(disk.clone()).core.close().unwrap();
    let mut tried = 0;
    for directory in ["index", "checkpoint"] {
        for name in disk.list(directory).unwrap() {
            let path = format!("{directory}/{name}");
            let bytes = disk.contents(&path).unwrap().len();
            for page in (0..bytes)
                .step_by(PAGE)
                .filter(|page| all() || page % 3 == 0)
            {
                let disk = disk.copy();
                disk.set_unreadable(&path, page..page + 1);
                let fixture = Fixture::on(disk);
                for log in ["a", "b", "c/1", "d"] {
                    let (_, named) = read_around(&fixture, log);
                    assert!(named.is_empty(), "{path}: {log} {named:?}");
                }
                assert!(fixture.report.damage.is_empty());
                tried += 1;
            }
        }
    }
    assert!(tried >= 3, "{tried} pages");
}

#[test]
fn an_unreadable_format_refuses_and_a_repair_writes_it_again() {
    let sample = Sample::new();
    let disk = sample.disk.copy();
    disk.set_unreadable(FORMAT, 0..1);
    let refused = open(&disk, &small_config(), &TestClock::new());
    let Err(OpenError::NotAStore { what }) = refused.map(drop) else {
        panic!("a store without its id opens");
    };
    assert!(what.contains("repair"), "{what}");
    let store: Arc<dyn Disk> = Arc::new(disk.clone());
    accept_loss(&store, &small_config(), TestClock::new(), "by a test").unwrap();
    sample.check(disk, &BTreeMap::new(), "after a repair");
}

#[test]
fn a_file_with_an_unreadable_page_gets_no_new_life() {
    let fixture = Fixture::new();
    let fixture = (0..2).fold(fixture, |fixture, _| fixture.restart());
    let disk = fixture.disk.clone();
    let unused = disk.list("journal").unwrap().into_iter().max().unwrap();
    let path = format!("journal/{unused}");
    drop(fixture);
    // A page in the middle of a file without frames.
    disk.set_unreadable(&path, 40_000..40_001);
    let mut fixture = Fixture::on(disk.clone());
    for round in 0..40_u8 {
        fixture.append("a", &[round; 3000]).unwrap();
        fixture.core.pool.fill().unwrap();
    }
    fixture = fixture.restart();
    assert_eq!(fixture.contents("a").len(), 40);
}

#[test]
fn an_unreadable_link_names_possible_losses_and_a_repair_ends_the_doubt() {
    let sample = Sample::with(RECORD_BYTES);
    for path in &sample.paths {
        let disk = sample.disk.copy();
        lose_sector(&disk, path, FIRST_FRAME);
        let fixture = Fixture::on(disk.copy());
        for log in ["a", "b", "c/1"] {
            let mut next = 0;
            loop {
                match fixture.read(log, next) {
                    Ok(page) if page.batches.is_empty() => break,
                    Ok(page) => {
                        let found = page.batches.iter().flat_map(payloads);
                        for data in found {
                            assert!(
                                data.len() >= RECORD_BYTES && data.iter().all(|b| *b == data[0])
                            );
                        }
                        next = page.next_lsn.get();
                    }
                    Err(ReadError::Quarantined { to: Some(to), .. }) => next = to.get(),
                    Err(ReadError::Quarantined { to: None, .. }) => break,
                    Err(error) => panic!("{path}: {error}"),
                }
            }
        }
        drop(fixture);
        let store: Arc<dyn Disk> = Arc::new(disk.clone());
        accept_loss(&store, &small_config(), TestClock::new(), "by a test").unwrap();
        let fixture = Fixture::on(disk);
        for log in ["a", "b", "c/1", "new"] {
            fixture.append(log, b"goes on").unwrap();
        }
    }
}
