//! Valid bytes that are not ours: another history of the same store left them in the same place. A disk that
//! lost a write shows such bytes, and so does a snapshot that was restored in part.

use std::collections::BTreeMap;

use super::faults::used_paths;
use super::*;
use crate::api::record::GapReason;
use crate::disk::Disk;
use crate::format::frame;
use crate::format::frame::{FrameHead, FrameKind};

const RECORDS: u8 = 40;

/// Data of a newest record, which differs between the histories.
fn data(history: u8, record: u8) -> Vec<u8> {
    let mut data = vec![history; 300];
    data.push(record);
    data
}

/// Two histories of one store that differ only in their records, each as its process left it.
fn two_histories() -> [SimDisk; 2] {
    let fixture = Fixture::new();
    fixture.append("a", b"common").unwrap();
    fixture.core.close().unwrap();
    let disk = fixture.disk.clone();
    drop(fixture);
    [1, 2].map(|history| {
        let copy = disk.copy();
        // Without this draw both copies would use the same salts.
        copy.draw(&mut vec![0; 8 * usize::from(history)]).unwrap();
        let fixture = Fixture::on(copy);
        for record in 0..RECORDS {
            fixture.append("a", &data(history, record)).unwrap();
        }
        fixture.core.idle();
        fixture.disk.copy()
    })
}

#[test]
fn blocks_of_another_history_are_damage_and_not_records() {
    let [ours, other] = two_histories();
    let paths = used_paths(&ours);
    assert_eq!(paths, used_paths(&other));
    let path = paths.last().unwrap();
    let (bytes, foreign) = (ours.contents(path).unwrap(), other.contents(path).unwrap());
    let mut damaged = 0;
    for block in 2..4 {
        let disk = ours.copy();
        let mut mixed = bytes.clone();
        let range = block * 4096..(block + 1) * 4096;
        assert_ne!(mixed[range.clone()], foreign[range.clone()]);
        mixed[range.clone()].copy_from_slice(&foreign[range]);
        disk.replace(path, mixed);
        let fixture = Fixture::on(disk);
        let mut seen: BTreeMap<u64, bool> = BTreeMap::new();
        let mut scan = fixture.scan(one("a"), ScanStart::First, false);
        while let Some(chunk) = next_chunk(&mut scan).unwrap().unwrap() {
            for gap in chunk.gaps {
                assert_eq!(gap.reason, GapReason::Quarantined);
                let range = gap.from.unwrap().get()..gap.to.unwrap().get();
                seen.extend(range.map(|lsn| (lsn, false)));
            }
            for batch in chunk.batches {
                for (lsn, found) in (batch.first_lsn.get()..).zip(payloads(&batch)) {
                    let record = lsn.checked_sub(1).map(|n| u8::try_from(n).unwrap());
                    let ours = record.map_or(b"common".to_vec(), |n| data(1, n));
                    assert_eq!(found, ours, "a record of another history, at lsn {lsn}");
                    seen.insert(lsn, true);
                }
            }
        }
        let all: Vec<u64> = (0..=u64::from(RECORDS)).collect();
        assert_eq!(seen.keys().copied().collect::<Vec<_>>(), all);
        damaged += seen.values().filter(|good| !**good).count();
    }
    assert!(damaged > 0, "the blocks hold records");
}

#[test]
fn a_frame_that_does_not_follow_the_one_before_is_not_in_the_journal() {
    // If a group is taken back, the zeros over its second frame may not reach the device. The next group then
    // ends where that frame begins. The frame is of this life, and stands at the position that it names.
    let fixture = Fixture::new();
    fixture.append("b", b"0").unwrap();
    fixture.append("a", b"1").unwrap();
    let life = fixture
        .core
        .journal
        .segments
        .read()
        .values()
        .next_back()
        .unwrap()
        .life;
    let end = fixture.core.journal.written();
    let disk = fixture.disk.clone();
    drop(fixture);
    let path = used_paths(&disk).pop().unwrap();
    let mut bytes = disk.contents(&path).unwrap();
    let mut frames = Vec::new();
    let mut at = 8192;
    while let Some(header) = frame::decode_header(&bytes[at..], life.salt) {
        frames.push((at, header));
        at += usize::try_from(header.frame_len()).unwrap();
    }
    let (from, appended) = frames
        .into_iter()
        .find(|(_, h)| h.kind == FrameKind::Batch)
        .unwrap();
    let body = frame::verified_body(&bytes[from..], &appended).unwrap();
    let mut stale = Vec::new();
    let start = frame::begin(&mut stale, &[]);
    stale.extend_from_slice(body);
    let head = FrameHead {
        kind: FrameKind::Batch,
        flags: 0,
        count: 1,
        position: end,
        log_id: appended.log_id,
        first_lsn: appended.next_lsn().unwrap(),
        arrival: appended.arrival,
        durable_mark: end,
        chain: 4711,
    };
    frame::finish(&mut stale, start, frame::HEADER_BYTES, life.salt, &head);
    assert!(bytes[at..].iter().all(|byte| *byte == 0));
    bytes[at..at + stale.len()].copy_from_slice(&stale);
    disk.replace(&path, bytes);
    let fixture = Fixture::on(disk);
    assert_eq!(fixture.contents("b"), [b"0"]);
    assert_eq!(fixture.contents("a"), [b"1"]);
    assert_eq!(fixture.report.damage, []);
    assert!(
        fixture.report.torn_bytes > 0,
        "it is cut off like any torn tail"
    );
}
