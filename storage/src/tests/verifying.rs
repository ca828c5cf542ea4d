//! Verification: a whole store has no findings, whatever it went through. Every fault is found and named
//! exactly, and nothing else is. Verification and a start report the same records.

use std::collections::{BTreeMap, BTreeSet};

use super::damage::{Sample, all};
use super::*;
use crate::api::finding::{Finding, FindingKind, Severity};
use crate::api::pace::Control;
use crate::api::record::{CursorCommit, Producer};
use crate::base::ids::Name;
use crate::disk::Disk;
use crate::tools::verify::{Offline, OfflineReport};

pub(super) fn verify(disk: &SimDisk) -> OfflineReport {
    let offline = Offline::open(Arc::new(disk.clone())).unwrap();
    let control = Control::new(0);
    offline.verify(&control, &mut |_| {}).unwrap()
}

/// Findings that are more than notes.
pub(super) fn faults(report: &OfflineReport) -> Vec<&Finding> {
    report
        .findings
        .iter()
        .filter(|finding| finding.severity > Severity::Note)
        .collect()
}

/// Records that are named as lost, by log.
pub(super) fn lost(report: &OfflineReport) -> BTreeMap<String, BTreeSet<u64>> {
    let mut lost: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
    for finding in &report.findings {
        if let (Some(log), Some((from, to)), Severity::Loss) =
            (&finding.log, finding.lsns, finding.severity)
        {
            lost.entry(log.as_str().to_owned())
                .or_default()
                .extend(from.get()..to.get());
        }
    }
    lost
}

fn names<'a>(
    lsns: impl IntoIterator<Item = (&'a &'static str, &'a BTreeSet<u64>)>,
) -> BTreeMap<String, BTreeSet<u64>> {
    lsns.into_iter()
        .map(|(log, lsns)| ((*log).to_owned(), lsns.clone()))
        .collect()
}

fn assert_clean(disk: &SimDisk, what: &str) {
    let report = verify(disk);
    assert!(faults(&report).is_empty(), "{what}: {:#?}", faults(&report));
}

#[test]
fn a_store_that_went_through_everything_has_no_findings() {
    let mut fixture = Fixture::new();
    for round in 0..6u64 {
        for step in 0..40u64 {
            let log = format!("log-{}", step % 7);
            let data = vec![b'x'; 700];
            fixture.append(&log, &data).unwrap();
            let mut part = batch(&[("produced", &[b"p"])]);
            part.logs[0].producer = Some(Producer {
                id: Name::new("p").unwrap(),
                epoch: round,
                sequence: step,
            });
            part.cursors.push(CursorCommit {
                log: LogName::new("log-0").unwrap(),
                cursor: Name::new("c").unwrap(),
                lsn: Lsn::new(1),
                expected_lsn: None,
                log_id: None,
            });
            fixture.append_batch(part).unwrap();
            fixture
                .append_batch(batch(&[
                    ("log-1", &[b"one", b"two"]),
                    ("log-2", &[b"three"]),
                ]))
                .unwrap();
        }
        let trimmed = fixture.core.trim_in_turn(target("log-1"), Lsn::new(3));
        fixture.core.turn();
        drop(trimmed);
        let deleted = fixture.core.delete_in_turn(target("log-6"));
        fixture.core.turn();
        drop(deleted);
        if round % 3 == 0 {
            fixture.core.idle();
        }
        let disk = fixture.disk.copy();
        assert_clean(&disk, &format!("killed in round {round}"));
        fixture = match round % 2 {
            0 => fixture.restart(),
            _ => {
                let fixture = fixture.restart_cleanly();
                assert_clean(&fixture.disk.copy(), &format!("restarted in round {round}"));
                fixture
            }
        };
    }
    fixture.core.close().unwrap();
    let report = verify(&fixture.disk.copy());
    assert!(faults(&report).is_empty(), "{:#?}", report.findings);
    assert!(report.segments > 5, "{} segments", report.segments);
    assert!(report.frames > 700, "{} frames", report.frames);
    assert!(report.records > 900, "{} records", report.records);
    assert!(report.checked_bytes > 200_000);
    assert!(!report.stopped);
}

#[test]
fn every_flipped_byte_is_found_and_exactly_its_records_are_named() {
    let sample = Sample::new();
    assert_clean(&sample.disk, "the sample");
    let mut tried = 0;
    for segment in 0..sample.paths.len() {
        let bytes = sample.bytes(segment);
        for at in (0..sample.end_of(segment)).filter(|at| all() || at % 7 == 0) {
            let what = format!("segment {segment}, byte {at}");
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x40;
            let disk = sample.disk.copy();
            disk.replace(&sample.paths[segment], flipped);
            let hit = |known: &super::damage::Known| {
                known.segment == segment && known.from <= at && at < known.covered
            };
            let expected = names(&sample.lsns(hit));
            let report = verify(&disk);
            assert_eq!(lost(&report), expected, "{what}: {:#?}", report.findings);
            // The last frame proves earlier ones flushed, and nothing proves the last one: its end is torn.
            let torn = segment == 2 && sample.frames.last().is_some_and(hit);
            let covered = !torn && (at < 8192 || sample.frames.iter().any(hit));
            assert_eq!(report.torn_bytes > 0, torn, "{what}");
            let faults = faults(&report);
            assert_eq!(!faults.is_empty(), covered, "{what}: {faults:#?}");
            for finding in faults {
                assert_eq!(
                    finding.segment,
                    Some(segment as u64 + 1),
                    "{what}: {finding:?}"
                );
                let kinds = match at < 8192 {
                    true => [FindingKind::Checksum; 2],
                    false => [FindingKind::Checksum, FindingKind::Chain],
                };
                assert!(kinds.contains(&finding.kind), "{what}: {finding:?}");
            }
            tried += 1;
        }
    }
    println!("{tried} bytes flipped, one at a time");
}

#[test]
fn verification_of_random_damage_names_the_same_as_a_start() {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};
    let seed: Option<u64> = std::env::var("WALD_SEED").ok().and_then(|n| n.parse().ok());
    for seed in seed.map_or(0..150, |seed| seed..seed + 1) {
        let mut random = StdRng::seed_from_u64(seed);
        let mut fixture = Fixture::new();
        for _ in 0..random.random_range(1..5u32) {
            for _ in 0..random.random_range(1..20u32) {
                let log = format!("l{}", random.random_range(0..5u32));
                let size = if random.random_bool(0.2) { 9000 } else { 100 };
                fixture.append(&log, &vec![7; size]).unwrap();
            }
            if random.random_bool(0.7) {
                fixture.core.idle();
            }
            fixture = match random.random_bool(0.3) {
                true => fixture.restart_cleanly(),
                false => fixture.restart(),
            };
        }
        let Fixture { disk, core, .. } = fixture;
        drop(core);
        let disk = disk.copy();
        let paths = faults::used_paths(&disk);
        for _ in 0..random.random_range(1..4u32) {
            let path = &paths[random.random_range(0..paths.len())];
            let Some(mut bytes) = disk.contents(path).filter(|bytes| !bytes.is_empty()) else {
                continue;
            };
            let end = bytes.iter().rposition(|b| *b != 0).unwrap_or(0) + 1;
            let at = random.random_range(0..end);
            match random.random_range(0..5u32) {
                0 => {
                    let end = (at + 512).min(bytes.len());
                    bytes[at / 512 * 512..end].fill(0);
                }
                1 => {
                    let end = (at + random.random_range(1..3000usize)).min(bytes.len());
                    random.fill(&mut bytes[at..end]);
                }
                2 => bytes.truncate(at),
                3 if random.random_bool(0.3) => {
                    disk.remove(path).unwrap();
                    continue;
                }
                _ => bytes[at] ^= 0x10,
            }
            disk.replace(path, bytes);
        }
        let report = verify(&disk);
        // A start sets these files aside after the damage was found.
        let set_aside = disk.copy();
        for (directory, suffix) in [("index", ".idx"), ("checkpoint", ".ckp")] {
            for name in disk.list(directory).unwrap() {
                let path = format!("{directory}/{name}");
                let old = path.replace(suffix, ".old");
                set_aside.rename(&path, &old).unwrap();
            }
        }
        let started = Fixture::on(set_aside).report;
        let mut expected: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
        let mut unknown = false;
        for gap in &started.damage {
            unknown |= gap.log.is_none();
            if let (Some(log), Some(from), Some(to)) = (&gap.log, gap.from, gap.to) {
                expected
                    .entry(log.as_str().to_owned())
                    .or_default()
                    .extend(from.get()..to.get());
            }
        }
        expected.retain(|_, lsns| !lsns.is_empty());
        assert_eq!(
            lost(&report),
            expected,
            "seed {seed}: {:#?}",
            report.findings
        );
        let told = !started.findings.is_empty() || !started.damage.is_empty();
        assert!(
            !told || !faults(&report).is_empty(),
            "seed {seed}: a start says {:?}",
            started.findings
        );
        let doubt = report
            .findings
            .iter()
            .any(|f| f.severity == Severity::Loss && f.log.is_none() && f.lsns.is_none());
        assert!(!unknown || doubt, "seed {seed}: {:#?}", report.findings);
    }
}

/// A store of some sealed segments with indexes and a checkpoint, ended cleanly.
fn rolled() -> (SimDisk, Vec<String>) {
    let mut fixture = Fixture::new();
    for number in 0..400u32 {
        let log = format!("log-{}", number % 10);
        fixture.append(&log, &vec![b'r'; 1001]).unwrap();
    }
    fixture = fixture.restart_cleanly();
    fixture.append("log-0", b"newest").unwrap();
    fixture.core.close().unwrap();
    let disk = fixture.disk.copy();
    let paths = faults::used_paths(&disk);
    assert!(paths.len() > 5, "{paths:?}");
    assert_clean(&disk, "the store");
    (disk, paths)
}

/// The only fault of a changed store.
fn the_fault(disk: &SimDisk) -> Finding {
    let report = verify(disk);
    let faults = faults(&report);
    assert_eq!(faults.len(), 1, "{faults:#?}");
    faults[0].clone()
}

fn change(disk: &SimDisk, path: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = disk.contents(path).unwrap();
    change(&mut bytes);
    disk.replace(path, bytes);
}

fn names_in(disk: &SimDisk, directory: &str) -> Vec<String> {
    let mut names = disk.list(directory).unwrap();
    names.sort_unstable();
    let path = |name| format!("{directory}/{name}");
    names.into_iter().map(path).collect()
}

#[test]
fn a_fault_of_every_kind_is_found_and_nothing_else() {
    let (disk, paths) = rolled();
    let check = |kind, severity, file: &str, plant: &dyn Fn(&SimDisk)| {
        let copy = disk.copy();
        plant(&copy);
        let fault = the_fault(&copy);
        assert_eq!((fault.kind, fault.severity), (kind, severity), "{fault:?}");
        assert_eq!(fault.file.as_deref(), Some(file), "{fault:?}");
        fault
    };
    let indexes = names_in(&disk, "index");
    let checkpoints = names_in(&disk, "checkpoint");
    let newest = checkpoints.last().unwrap();
    use FindingKind::{Checksum, Digest, Index, Missing};
    use Severity::Damage;

    for at in [20, 4096 + 33, 100, 5000] {
        let fault = check(Checksum, Damage, &paths[1], &|disk| {
            change(disk, &paths[1], |bytes| bytes[at] ^= 1);
        });
        let base = (at / 4096 * 4096) as u64;
        let offset = fault.positions.unwrap().0.get() % (64 << 10);
        assert_eq!(offset, base, "byte {at}: {fault:?}");
    }
    // The padding behind a body of 1,001 bytes is covered by the digest alone.
    let padding = {
        let bytes = disk.contents(&paths[1]).unwrap();
        let life = crate::format::life::Life::decode(&bytes).unwrap();
        let mut at = 8192;
        loop {
            let header = crate::format::frame::decode_header(&bytes[at..], life.salt).unwrap();
            let end = at + (header.header_len + header.body_len) as usize;
            at += usize::try_from(header.frame_len()).unwrap();
            if end < at {
                break end;
            }
        }
    };
    check(Digest, Damage, &paths[1], &|disk| {
        change(disk, &paths[1], |bytes| bytes[padding] = 9);
    });
    check(Checksum, Damage, &indexes[1], &|disk| {
        change(disk, &indexes[1], |bytes| bytes[200] ^= 1);
    });
    check(Index, Damage, &indexes[1], &|disk| {
        disk.replace(&indexes[1], disk.contents(&indexes[2]).unwrap());
    });
    check(Checksum, Damage, newest, &|disk| {
        change(disk, newest, |bytes| bytes[30] ^= 1);
    });
    check(Checksum, Damage, "BEGUN", &|disk| {
        change(disk, "BEGUN", |bytes| bytes[20] ^= 1);
    });
    check(Missing, Damage, "BEGUN", &|disk| {
        disk.remove("BEGUN").unwrap()
    });
    check(Missing, Damage, "FORMAT", &|disk| {
        disk.remove("FORMAT").unwrap()
    });
    check(Checksum, Damage, "FORMAT", &|disk| {
        change(disk, "FORMAT", |bytes| bytes[20] ^= 1);
    });
}

#[test]
fn unknown_files_are_noted_and_are_no_fault() {
    let (disk, _) = rolled();
    let stray = [
        "mine.txt",
        "journal/old.seg",
        "pool/x",
        "index/00000000000000ff.idx",
        "index/0000000000000001.idx.new",
        "checkpoint/0000000000000001.new",
        "sorted/old.seg",
        "sorted/00000000000000ff.new",
        "quarantine/notes",
        "FORMAT.new",
    ];
    for path in stray {
        disk.replace(path, b"something".to_vec());
    }
    disk.replace("quarantine/0000000000000001-00002000.torn", vec![1; 10]);
    let report = verify(&disk);
    let mut noted: Vec<&str> = report
        .findings
        .iter()
        .map(|finding| {
            assert_eq!(finding.severity, Severity::Note, "{finding:?}");
            assert_eq!(finding.kind, FindingKind::Unowned);
            finding.file.as_deref().unwrap()
        })
        .collect();
    noted.sort_unstable();
    let mut expected = stray;
    expected.sort_unstable();
    assert_eq!(noted, expected);
    let kept = [("quarantine/0000000000000001-00002000.torn".to_owned(), 10)];
    assert_eq!(report.quarantine, kept);
}

#[test]
fn a_segment_that_is_gone_is_missing_and_its_records_are_named() {
    let (disk, paths) = rolled();
    let whole = verify(&disk);
    disk.remove(&paths[2]).unwrap();
    let report = verify(&disk);
    let gone = faults(&report);
    let file = gone.iter().find(|f| f.file.as_deref() == Some(&paths[2]));
    let file = file.expect("the file is named");
    assert_eq!(
        (file.kind, file.severity),
        (FindingKind::Missing, Severity::Loss)
    );
    let records: usize = lost(&report).values().map(BTreeSet::len).sum();
    assert_eq!(records as u64, whole.records - report.records);
    assert!(records > 0);
}

#[test]
fn newest_segments_that_no_start_began_are_missed_too() {
    let fixture = Fixture::new();
    while fixture.core.journal.segments.read().len() < 5 {
        fixture.append("a", &[7; 3000]).unwrap();
        fixture.append("b", b"small").unwrap();
    }
    let (disk, config) = (fixture.disk.copy(), fixture.config.clone());
    drop(fixture);
    let paths = faults::used_paths(&disk);
    for lost in 1..4 {
        let disk = disk.copy();
        for path in &paths[paths.len() - lost..] {
            disk.remove(path).unwrap();
        }
        for start in 0..3 {
            let report = verify(&disk);
            assert_eq!(
                report.severity(),
                Some(Severity::Loss),
                "{lost} lost, {start} starts"
            );
            let examined: Arc<dyn Disk> = Arc::new(disk.copy());
            assert!(
                !crate::engine::repair::examine(&examined, &config)
                    .unwrap()
                    .is_empty()
            );
            let fixture = Fixture::on(disk.clone());
            let refused = fixture.append("a", b"x");
            assert!(matches!(refused, Err(AppendError::TailUnproven { .. })));
            let findings = online(&fixture);
            assert!(
                findings
                    .iter()
                    .any(|finding| finding.severity == Severity::Loss),
                "{lost} lost, {start} starts: {findings:#?}"
            );
        }
    }
}

#[test]
fn a_directory_in_use_is_not_opened_and_nothing_is_written_in_any() {
    let fixture = Fixture::new();
    fixture.append("a", b"x").unwrap();
    let refused = Offline::open(Arc::new(fixture.disk.clone())).map(|_| ());
    assert!(
        matches!(refused, Err(OpenError::Locked { .. })),
        "{refused:?}"
    );
    let disk = fixture.disk.copy();
    let calls = disk.calls();
    verify(&disk);
    assert_eq!(disk.calls(), calls, "nothing was changed");
    let empty = Offline::open(Arc::new(SimDisk::new())).map(|_| ());
    assert!(
        matches!(empty, Err(OpenError::NotAStore { .. })),
        "{empty:?}"
    );
}

#[test]
fn a_verification_that_is_stopped_says_so() {
    let (disk, _) = rolled();
    let offline = Offline::open(Arc::new(disk)).unwrap();
    let control = Control::new(0);
    let report = offline.verify(&control, &mut |_| control.stop()).unwrap();
    assert!(report.stopped && report.checked_bytes < 100_000);
}

/// A running engine with a flipped byte in a body of a sealed segment, and the log and lsn of that record.
fn running_with_damage() -> (Fixture, String, u64) {
    let fixture = Fixture::new();
    for number in 0..200u32 {
        let log = format!("log-{}", number % 10);
        fixture.append(&log, &vec![b'r'; 1000]).unwrap();
    }
    let path = faults::used_paths(&fixture.disk)[1].clone();
    let bytes = fixture.disk.contents(&path).unwrap();
    let life = crate::format::life::Life::decode(&bytes).unwrap();
    let mut at = 8192;
    let header = loop {
        let header = crate::format::frame::decode_header(&bytes[at..], life.salt).unwrap();
        if header.kind == crate::format::frame::FrameKind::Batch && at > 30_000 {
            break header;
        }
        at += usize::try_from(header.frame_len()).unwrap();
    };
    change(&fixture.disk, &path, |bytes| bytes[at + 300] ^= 1);
    let log = fixture.core.logs.by_id(header.log_id).unwrap();
    (
        fixture,
        log.name.as_str().to_owned(),
        header.first_lsn.get(),
    )
}

pub(super) fn online(fixture: &Fixture) -> Vec<Finding> {
    let mut findings = Vec::new();
    let tell = &mut |progress: &mut crate::api::pace::VerifyProgress| {
        findings.append(&mut progress.findings);
    };
    let control = Control::new(0);
    assert!(fixture.core.verifier.verify(None, &control, tell).is_ok());
    findings.retain(|finding| finding.severity > Severity::Note);
    findings
}

#[test]
fn damage_that_a_running_engine_finds_is_known_at_once_and_later() {
    let (fixture, log, lsn) = running_with_damage();
    assert_eq!(fixture.core.statistics().quarantined_records, 0);
    for _ in 0..2 {
        let findings = online(&fixture);
        assert_eq!(findings.len(), 1, "{findings:#?}");
        let finding = &findings[0];
        assert_eq!(finding.severity, Severity::Loss);
        assert_eq!(finding.log.as_ref().unwrap().as_str(), log);
        assert_eq!(finding.lsns, Some((Lsn::new(lsn), Lsn::new(lsn + 1))));
        let now = fixture.core.statistics();
        assert_eq!((now.quarantined_records, now.damaged_logs), (1, 1));
    }
    let segments = fixture.core.describe_segments(None, 100);
    assert!(segments[1].damaged && !segments[0].damaged);
    let contents = segments[0].contents.expect("it has an index");
    assert!(contents.records > 20 && contents.logs == 10 && contents.left.is_some());
    let refused = |fixture: &Fixture| match fixture.read(&log, lsn) {
        Err(ReadError::Quarantined { from, to, .. }) => (from, to),
        other => panic!("{other:?}"),
    };
    let expected = (Lsn::new(lsn), Some(Lsn::new(lsn + 1)));
    assert_eq!(refused(&fixture), expected);
    let fixture = fixture.restart();
    assert_eq!(fixture.report.damage.len(), 1);
    assert_eq!(refused(&fixture), expected);
    let findings = online(&fixture);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    assert_eq!(findings[0].severity, Severity::Loss);
    assert_eq!(findings[0].log.as_ref().unwrap().as_str(), log);
    assert_eq!(findings[0].lsns, Some((Lsn::new(lsn), Lsn::new(lsn + 1))));
    fixture.append(&log, b"goes on").unwrap();
}

#[test]
fn a_damaged_header_costs_a_running_engine_exactly_its_records() {
    let (fixture, _, _) = running_with_damage();
    let path = faults::used_paths(&fixture.disk)[0].clone();
    let bytes = fixture.disk.contents(&path).unwrap();
    let life = crate::format::life::Life::decode(&bytes).unwrap();
    let mut at = 8192;
    for _ in 0..25 {
        let header = crate::format::frame::decode_header(&bytes[at..], life.salt).unwrap();
        at += usize::try_from(header.frame_len()).unwrap();
    }
    let header = crate::format::frame::decode_header(&bytes[at..], life.salt).unwrap();
    assert_eq!(header.kind, crate::format::frame::FrameKind::Batch);
    change(&fixture.disk, &path, |bytes| bytes[at + 40] ^= 1);
    let findings = online(&fixture);
    assert_eq!(findings.len(), 2, "{findings:#?}");
    assert_eq!(findings[0].log_id, Some(header.log_id));
    assert_eq!(
        findings[0].lsns,
        Some((header.first_lsn, header.next_lsn().unwrap()))
    );
    assert_eq!(fixture.core.statistics().quarantined_records, 2);
}

#[test]
fn records_behind_a_missing_segment_are_not_blamed_for_it() {
    let (disk, paths) = rolled();
    let whole = verify(&disk);
    disk.remove(&paths[2]).unwrap();
    let fixture = Fixture::on(disk);
    let readable = || -> Vec<bool> {
        let read = |log: u64, lsn| fixture.read(&format!("log-{log}"), lsn).is_ok();
        (0..400).map(|n| read(n % 10, n / 10)).collect()
    };
    let before = readable();
    let quarantined = fixture.core.statistics().quarantined_records;
    let missing = before.iter().filter(|is_there| !**is_there).count() as u64;
    assert_eq!(missing, quarantined);
    assert!(missing > 0 && missing < whole.records / 2);
    let findings = online(&fixture);
    let ranges = findings.iter().filter_map(|finding| finding.lsns);
    let named: u64 = ranges.map(|(from, to)| to.since(from)).sum();
    assert_eq!(named, quarantined, "{findings:#?}");
    assert_eq!(fixture.core.statistics().quarantined_records, quarantined);
    assert_eq!(readable(), before);
}

#[test]
fn a_segment_that_goes_while_it_is_served_costs_its_records_only() {
    for who_finds in ["a scan", "reads", "a verification"] {
        let fixture = Fixture::new();
        for number in 0..200u64 {
            let log = format!("log-{}", number % 10);
            fixture.append(&log, &vec![b'r'; 1000]).unwrap();
        }
        fixture.core.idle();
        // Before a restart, new records are still in memory.
        let fixture = fixture.restart();
        let path = faults::used_paths(&fixture.disk)[1].clone();
        fixture.disk.remove(&path).unwrap();
        match who_finds {
            "a scan" => {
                let mut scan = fixture.scan(Selector::All, ScanStart::First, false);
                while next_chunk(&mut scan).unwrap().unwrap().is_some() {}
            }
            "a verification" => drop(online(&fixture)),
            _ => {}
        }
        let read = |number: u64| fixture.read(&format!("log-{}", number % 10), number / 10);
        let readable = (0..200).filter(|number| read(*number).is_ok()).count() as u64;
        let quarantined = fixture.core.statistics().quarantined_records;
        assert_eq!(readable + quarantined, 200, "{who_finds}");
        assert!(quarantined > 20 && readable > 100, "{who_finds}");
        let named = |findings: &[Finding]| -> u64 {
            let ranges = findings.iter().filter_map(|finding| finding.lsns);
            ranges.map(|(from, to)| to.since(from)).sum()
        };
        assert_eq!(named(&online(&fixture)), quarantined, "{who_finds}");
        let fixture = fixture.restart();
        let found = fixture.core.statistics().quarantined_records;
        assert_eq!(found, quarantined, "{who_finds}");
        fixture.append("log-0", b"goes on").unwrap();
    }
}

#[test]
fn a_whole_engine_has_no_findings_while_it_works() {
    let mut fixture = Fixture::new();
    for round in 0..3u8 {
        for number in 0..150u32 {
            let log = format!("log-{}", number % 10);
            fixture.append(&log, &vec![round; 900]).unwrap();
            if number % 40 == 0 {
                assert_eq!(online(&fixture), [], "round {round}, append {number}");
            }
        }
        fixture.core.idle();
        assert_eq!(online(&fixture), [], "round {round}");
        fixture = fixture.restart();
    }
}

#[test]
fn scrubbing_finds_data_that_a_device_lost_and_reports_its_end() {
    let (fixture, log, lsn) = running_with_damage();
    assert_eq!(fixture.core.statistics().last_scrub, None);
    assert!(fixture.core.scrubber.scrub_once().is_ok());
    let now = fixture.core.statistics();
    assert_eq!(now.quarantined_records, 1);
    assert!(now.last_scrub.is_some() && now.scrubbed_bytes > 100_000);
    assert!(matches!(
        fixture.read(&log, lsn),
        Err(ReadError::Quarantined { .. })
    ));
    fixture.core.scrubber.control.stop();
    assert!(
        fixture.core.scrubber.scrub_once().is_err(),
        "it stops when it is told to"
    );
}

#[test]
fn reading_keeps_to_the_rate() {
    let (disk, _) = rolled();
    let clock = crate::base::clock::SystemClock;
    let began = clock.monotonic();
    let offline = Offline::open(Arc::new(disk)).unwrap();
    let report = offline.verify(&Control::new(1 << 20), &mut |_| {}).unwrap();
    let took = clock.monotonic().duration_since(began);
    // The last step does not wait for the rate, since nothing follows it.
    let least = Duration::from_micros(((report.checked_bytes - (64 << 10)) * 1_000_000) >> 20);
    assert!(took >= least, "{took:?} for {} bytes", report.checked_bytes);
}
