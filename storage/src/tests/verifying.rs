//! Verification: a store that is whole has no findings, whatever it went through; every
//! fault is found, named exactly, and nothing else is; and what it says of records is what
//! a start says.

use std::collections::{BTreeMap, BTreeSet};

use super::damage::{Sample, all, without_indexes};
use super::*;
use crate::disk::Disk;
use crate::ids::Name;
use crate::record::{CursorCommit, Producer};
use crate::verify::{Control, Finding, FindingKind, Offline, OfflineReport, Severity};

fn verify(disk: &SimDisk) -> OfflineReport {
    let offline = Offline::open(Arc::new(disk.clone())).unwrap();
    let control = Control::new(0);
    offline.verify(&control, &mut |_| {}).unwrap()
}

/// Findings that are more than notes.
fn faults(report: &OfflineReport) -> Vec<&Finding> {
    report
        .findings
        .iter()
        .filter(|finding| finding.severity > Severity::Note)
        .collect()
}

/// Records that are named as lost, by log.
fn lost(report: &OfflineReport) -> BTreeMap<String, BTreeSet<u64>> {
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
            // The last frame proves others flushed, and nothing proves it: its end is torn.
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
fn what_is_named_of_a_store_damaged_at_random_is_what_a_start_names() {
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
        let started = Fixture::on(without_indexes(&disk)).report;
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
