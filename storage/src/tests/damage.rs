//! Bytes flipped, files cut, files removed: served records must be right, and missing records must be named,
//! exactly.
//!
//! `WALD_DAMAGE=all` tries every byte; otherwise every header byte of the sample and a
//! part of the rest.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::api::record::GapReason;
use crate::disk::Disk;
use crate::format::frame;
use crate::format::frame::FrameKind;
use crate::format::life::Life;

const LOGS: [&str; 4] = ["a", "b", "c/1", "d"];
const FIRST_FRAME: usize = 8192;

/// A store of three segments, as it was written and as it must be read.
pub(super) struct Sample {
    pub(super) disk: SimDisk,
    /// Path of each segment, in order.
    pub(super) paths: Vec<String>,
    records: BTreeMap<&'static str, Vec<Vec<u8>>>,
    pub(super) frames: Vec<Known>,
}

/// One frame of the sample.
pub(super) struct Known {
    pub(super) segment: usize,
    pub(super) from: usize,
    /// End of the bytes that checksums cover, without padding.
    pub(super) covered: usize,
    pub(super) to: usize,
    pub(super) header_end: usize,
    pub(super) kind: FrameKind,
    pub(super) log: Option<&'static str>,
    pub(super) lsns: std::ops::Range<u64>,
}

impl Sample {
    pub(super) fn new() -> Self {
        Self::with(5)
    }

    /// The sample with records of at least this many bytes.
    pub(super) fn with(bytes: usize) -> Self {
        let mut fixture = Fixture::new();
        let mut records: BTreeMap<&'static str, Vec<Vec<u8>>> = BTreeMap::new();
        for round in 0..3u8 {
            for step in 0..6u8 {
                let first = LOGS[usize::from(step) % LOGS.len()];
                // The last log is created in the second segment.
                let first = if round == 0 && first == "d" {
                    "a"
                } else {
                    first
                };
                let second = LOGS[usize::from(step + 1) % 3];
                let data = |part: u8| vec![round * 16 + step * 2 + part; bytes + usize::from(step)];
                let mut parts: Vec<(&str, Vec<u8>)> = vec![(first, data(0))];
                if step % 3 == 0 && second != first {
                    parts.push((second, data(1)));
                }
                let logs: Vec<(&str, Vec<&[u8]>)> = parts
                    .iter()
                    .map(|(log, data)| (*log, vec![data.as_slice()]))
                    .collect();
                let logs: Vec<(&str, &[&[u8]])> = logs
                    .iter()
                    .map(|(log, data)| (*log, data.as_slice()))
                    .collect();
                fixture.append_batch(batch(&logs)).unwrap();
                for (log, data) in parts {
                    let log = LOGS.into_iter().find(|known| *known == log).unwrap();
                    records.entry(log).or_default().push(data);
                }
            }
            fixture.core.idle();
            if round < 2 {
                fixture = fixture.restart();
            }
        }
        drop(fixture.core);
        let disk = fixture.disk;
        let paths = faults::used_paths(&disk);
        assert_eq!(paths.len(), 3);
        let frames = Self::frames(&disk, &paths);
        Self {
            disk,
            paths,
            records,
            frames,
        }
    }

    fn frames(disk: &SimDisk, paths: &[String]) -> Vec<Known> {
        let mut ids = BTreeMap::new();
        let mut frames = Vec::new();
        for (segment, path) in paths.iter().enumerate() {
            let bytes = disk.contents(path).unwrap();
            let life = Life::decode(&bytes).unwrap();
            let mut from = FIRST_FRAME;
            while let Some(header) = bytes
                .get(from..)
                .and_then(|b| frame::decode_header(b, life.salt))
            {
                if header.kind == FrameKind::Created {
                    let body = frame::verified_body(&bytes[from..], &header).unwrap();
                    let created = crate::format::body::Created::decode(body).unwrap();
                    let log = LOGS.into_iter().find(|log| *log == created.name).unwrap();
                    ids.insert(header.log_id, log);
                }
                let header_end = from + header.header_len as usize;
                let to = from + usize::try_from(header.frame_len()).unwrap();
                let batch = header.kind == FrameKind::Batch;
                let first = header.first_lsn.get();
                frames.push(Known {
                    segment,
                    from,
                    covered: header_end + header.body_len as usize,
                    to,
                    header_end,
                    kind: header.kind,
                    log: if batch {
                        ids.get(&header.log_id).copied()
                    } else {
                        None
                    },
                    lsns: if batch {
                        first..first + u64::from(header.count)
                    } else {
                        0..0
                    },
                });
                from = to;
            }
        }
        frames
    }

    pub(super) fn end_of(&self, segment: usize) -> usize {
        self.frames
            .iter()
            .filter(|f| f.segment == segment)
            .map(|f| f.to)
            .max()
            .unwrap()
    }

    pub(super) fn bytes(&self, segment: usize) -> Vec<u8> {
        self.disk.contents(&self.paths[segment]).unwrap()
    }

    /// Lsns of the records in frames that `hit` picks.
    pub(super) fn lsns(
        &self,
        hit: impl Fn(&Known) -> bool,
    ) -> BTreeMap<&'static str, BTreeSet<u64>> {
        let mut lsns: BTreeMap<&'static str, BTreeSet<u64>> = BTreeMap::new();
        for known in self.frames.iter().filter(|known| hit(known)) {
            if let Some(log) = known.log {
                lsns.entry(log).or_default().extend(known.lsns.clone());
            }
        }
        lsns
    }

    /// Number of records of a log.
    pub(super) fn count(&self, log: &str) -> usize {
        self.records[log].len()
    }

    /// Opens a changed copy, with its indexes and without. Served records must be right, exactly `missing` is
    /// missing and named, and every log must go on where it was.
    pub(super) fn check(
        &self,
        disk: SimDisk,
        missing: &BTreeMap<&'static str, BTreeSet<u64>>,
        what: &str,
    ) {
        let bare = without_indexes(&disk);
        self.check_start(Fixture::on(bare), missing, &format!("{what}, no indexes"));
        self.check_start(Fixture::on(disk), missing, what);
    }

    fn check_start(
        &self,
        fixture: Fixture,
        missing: &BTreeMap<&'static str, BTreeSet<u64>>,
        what: &str,
    ) {
        for (log, records) in &self.records {
            let (found, named) = read_around(&fixture, log);
            for (lsn, data) in &found {
                let index = usize::try_from(*lsn).unwrap();
                assert_eq!(
                    records.get(index),
                    Some(data),
                    "{what}: wrong record {log} {lsn}"
                );
            }
            let empty = BTreeSet::new();
            let expected = missing.get(log).unwrap_or(&empty);
            assert_eq!(&named, expected, "{what}: named as missing of {log}");
            assert_eq!(
                found.len() + named.len(),
                records.len(),
                "{what}: all of {log}"
            );
            let appended = fixture.append(log, b"after").unwrap();
            assert_eq!(
                appended.appends[0].first_lsn.get(),
                records.len() as u64,
                "{what}: {log}"
            );
        }
        self.check_scan_of_all(&fixture, missing, what);
    }

    /// Checks that a scan of all logs reports the same.
    fn check_scan_of_all(
        &self,
        fixture: &Fixture,
        missing: &BTreeMap<&'static str, BTreeSet<u64>>,
        what: &str,
    ) {
        let mut scan = fixture.scan(Selector::All, ScanStart::First, false);
        let mut named: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
        let mut found: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
        while let Some(chunk) = next_chunk(&mut scan).unwrap().unwrap() {
            for gap in chunk.gaps {
                assert_eq!(gap.reason, GapReason::Quarantined);
                let to = gap.to.unwrap_or_else(|| panic!("{what}: {gap:?}"));
                let range = gap.from.unwrap().get()..to.get();
                named
                    .entry(gap.log.unwrap().as_str().to_owned())
                    .or_default()
                    .extend(range);
            }
            for batch in chunk.batches {
                let range = batch.first_lsn.get()..batch.next_lsn().get();
                found
                    .entry(batch.log.as_str().to_owned())
                    .or_default()
                    .extend(range);
            }
        }
        for (log, records) in &self.records {
            let expected = missing.get(log).cloned().unwrap_or_default();
            let got = named.remove(*log).unwrap_or_default();
            assert_eq!(got, expected, "{what}: gaps of {log} in a scan of all");
            let whole: BTreeSet<u64> = (0..=records.len() as u64).collect();
            let rest: BTreeSet<u64> = whole.difference(&expected).copied().collect();
            assert_eq!(
                found.remove(*log).unwrap_or_default(),
                rest,
                "{what}: scan of {log}"
            );
        }
    }
}

/// A copy of the store without the files of its indexer.
pub(super) fn without_indexes(disk: &SimDisk) -> SimDisk {
    let disk = disk.copy();
    for directory in ["index", "checkpoint"] {
        for name in disk.list(directory).unwrap() {
            disk.remove(&format!("{directory}/{name}")).unwrap();
        }
    }
    disk
}

/// Reads a log up to the lsn where its tail cannot be proven. Returns the records and that lsn.
pub(super) fn read_up_to_doubt(fixture: &Fixture, log: &str) -> (Vec<Vec<u8>>, u64) {
    let mut found = Vec::new();
    loop {
        match fixture.read(log, found.len() as u64) {
            Ok(page) if page.batches.is_empty() => return (found, page.tail_lsn.get()),
            Ok(page) => found.extend(page.batches.iter().flat_map(payloads)),
            Err(ReadError::Quarantined { from, to: None, .. }) => return (found, from.get()),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Readable records of a log, and the lsns that are named as damaged.
pub(super) fn read_around(fixture: &Fixture, log: &str) -> (BTreeMap<u64, Vec<u8>>, BTreeSet<u64>) {
    let mut found = BTreeMap::new();
    let mut named = BTreeSet::new();
    let mut next = 0;
    loop {
        match fixture.read(log, next) {
            Ok(page) => {
                for batch in &page.batches {
                    for (lsn, data) in (batch.first_lsn.get()..).zip(payloads(batch)) {
                        found.insert(lsn, data);
                    }
                }
                if page.next_lsn == page.tail_lsn {
                    return (found, named);
                }
                next = page.next_lsn.get();
            }
            Err(ReadError::Quarantined { from, to, .. }) => {
                let to = to.expect("a known end").get();
                named.extend(from.get()..to);
                next = to;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

pub(super) fn all() -> bool {
    std::env::var("WALD_DAMAGE").is_ok_and(|value| value == "all")
}

#[test]
fn every_flipped_byte_is_noticed_and_its_records_are_named_exactly() {
    let sample = Sample::new();
    let mut tried = 0;
    for segment in 0..sample.paths.len() {
        let bytes = sample.bytes(segment);
        // Only zeros follow the last frame of the last segment.
        let end = (sample.end_of(segment) + 256).min(bytes.len());
        for at in (0..end).filter(|at| all() || at % 11 == 0) {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x40;
            let disk = sample.disk.copy();
            disk.replace(&sample.paths[segment], flipped);
            let hit =
                |known: &Known| known.segment == segment && known.from <= at && at < known.covered;
            sample.check(
                disk,
                &sample.lsns(hit),
                &format!("segment {segment}, byte {at}"),
            );
            tried += 1;
        }
    }
    println!("{tried} bytes flipped, one at a time");
}

#[test]
fn a_file_cut_at_any_offset_loses_exactly_the_records_cut_off() {
    let sample = Sample::new();
    let mut tried = 0;
    for segment in 0..sample.paths.len() {
        let bytes = sample.bytes(segment);
        let end = sample.end_of(segment);
        for at in (0..end).filter(|at| all() || at % 23 == 0) {
            let disk = sample.disk.copy();
            disk.replace(&sample.paths[segment], bytes[..at].to_vec());
            let what = format!("segment {segment} cut at {at}");
            if segment + 1 < sample.paths.len() {
                let hit = |known: &Known| known.segment == segment && known.covered > at;
                // Without a life block nothing in the file can be verified.
                let hit_all = |known: &Known| known.segment == segment;
                let missing = if at < 68 {
                    sample.lsns(hit_all)
                } else {
                    sample.lsns(hit)
                };
                sample.check(disk, &missing, &what);
            } else {
                check_prefix(&sample, disk, at, &what);
            }
            tried += 1;
        }
    }
    println!("{tried} cuts, one at a time");
}

/// Checks a last segment cut at an offset: the rest is a prefix of whole units, and is served. Without its
/// link the segment counts as gone, and no tail can be proven.
fn check_prefix(sample: &Sample, disk: SimDisk, at: usize, what: &str) {
    let link = sample
        .frames
        .iter()
        .find(|f| f.segment == 2 && f.kind == FrameKind::Link)
        .unwrap();
    let fixture = Fixture::on(disk);
    for (log, records) in &sample.records {
        if at < link.covered {
            let (found, _) = read_up_to_doubt(&fixture, log);
            assert!(records.starts_with(&found), "{what}: {log}");
            continue;
        }
        let found = fixture.contents(log);
        assert!(records.starts_with(&found), "{what}: {log}");
        let appended = fixture.append(log, b"after").unwrap();
        assert_eq!(
            appended.appends[0].first_lsn.get(),
            found.len() as u64,
            "{what}: {log}"
        );
    }
}

#[test]
fn a_segment_removed_loses_exactly_its_records() {
    let sample = Sample::new();
    for segment in 0..2 {
        let disk = sample.disk.copy();
        disk.remove(&sample.paths[segment]).unwrap();
        let missing = sample.lsns(|known| known.segment == segment);
        sample.check(disk, &missing, &format!("segment {segment} removed"));
    }
    let disk = sample.disk.copy();
    disk.remove(&sample.paths[2]).unwrap();
    let fixture = Fixture::on(disk);
    assert!(!fixture.report.findings.is_empty());
    for (log, records) in &sample.records {
        // The newest records of any log may have been in that segment, so no log takes appends.
        let (found, _) = read_up_to_doubt(&fixture, log);
        assert!(records.starts_with(&found), "{log}");
        let refused = fixture.append(log, b"after");
        assert!(
            matches!(refused, Err(AppendError::TailUnproven { .. })),
            "{log}"
        );
    }
}

#[test]
fn swapped_files_are_recognised_by_the_identity_in_them() {
    let sample = Sample::new();
    let disk = sample.disk.copy();
    let (first, second) = (sample.bytes(0), sample.bytes(1));
    disk.replace(&sample.paths[0], second);
    disk.replace(&sample.paths[1], first);
    assert_eq!(Fixture::on(disk.copy()).report.findings.len(), 2);
    sample.check(disk, &BTreeMap::new(), "two files swapped");
}

#[test]
fn a_file_of_another_store_is_not_used() {
    let (sample, other) = (Sample::new(), Sample::new());
    let disk = sample.disk.copy();
    disk.replace(&sample.paths[1], other.bytes(1));
    let missing = sample.lsns(|known| known.segment == 1);
    sample.check(disk, &missing, "a foreign segment");
}

#[test]
fn a_segment_without_a_good_life_block_is_damage_of_exactly_its_records() {
    let sample = Sample::new();
    let first = sample.bytes(0);
    let disk = sample.disk.copy();
    let mut without_life = first;
    without_life[..FIRST_FRAME].fill(0);
    disk.replace(&sample.paths[0], without_life);
    let missing = sample.lsns(|known| known.segment == 0);
    sample.check(disk, &missing, "both life blocks gone");
}

#[test]
fn damage_found_while_serving_is_named_from_then_on_and_after_a_restart() {
    for in_header in [true, false] {
        let sample = Sample::new();
        let fixture = Fixture::on(sample.disk.copy());
        let known = sample
            .frames
            .iter()
            .find(|known| {
                known.segment == 0 && known.kind == FrameKind::Batch && known.log == Some("a")
            })
            .unwrap();
        let mut bytes = sample.bytes(0);
        bytes[if in_header {
            known.from + 40
        } else {
            known.header_end + 2
        }] ^= 1;
        fixture.disk.replace(&sample.paths[0], bytes);
        let missing = sample.lsns(|other| other.segment == 0 && other.from == known.from);
        sample.check_scan_of_all_before_appends(&fixture, &missing);
        let (_, named) = read_around(&fixture, "a");
        assert_eq!(Some(&named), missing.get("a"));
        fixture.append("a", b"x").unwrap();
        let mut fixture = fixture;
        for clean in [true, false, true] {
            fixture = match clean {
                true => fixture.restart_cleanly(),
                false => fixture.restart(),
            };
            assert!(!fixture.report.damage.is_empty(), "a start finds it again");
            let (_, named) = read_around(&fixture, "a");
            assert_eq!(Some(&named), missing.get("a"));
        }
    }
}

impl Sample {
    pub(super) fn check_scan_of_all_before_appends(
        &self,
        fixture: &Fixture,
        missing: &BTreeMap<&'static str, BTreeSet<u64>>,
    ) {
        let mut scan = fixture.scan(Selector::All, ScanStart::First, false);
        let mut named: BTreeMap<&str, BTreeSet<u64>> = BTreeMap::new();
        while let Some(chunk) = next_chunk(&mut scan).unwrap().unwrap() {
            for gap in chunk.gaps {
                let name = gap.log.unwrap();
                let log = LOGS.into_iter().find(|log| *log == name.as_str()).unwrap();
                let range = gap.from.unwrap().get()..gap.to.unwrap().get();
                named.entry(log).or_default().extend(range);
            }
        }
        assert_eq!(&named, missing);
    }
}
