//! Files of a newer version: unknown features are ignored where that is allowed. Otherwise the start is
//! refused, and the directory does not change.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test, helpers included"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;
use wald_storage::{
    Append as _, Batch, Durability, Guard, LocalEngine, LogName, LogRecords, LogTarget, Lsn,
    NoObserver, OpenError, Operate as _, ReadLogs as _, ReadRequest, ReadStart, RealDisk, Record,
    StorageConfig, SystemClock, block_on,
};

const LIFE_BLOCK: usize = 4096;
const FIRST_FRAME: usize = 2 * LIFE_BLOCK;
const COMPATIBLE: usize = 12;
const READ_ONLY: usize = 16;
const INCOMPATIBLE: usize = 20;

fn open(directory: &Path) -> Result<Arc<LocalEngine>, OpenError> {
    let config = StorageConfig {
        segment_bytes: 64 << 10,
        ..StorageConfig::default()
    };
    let disk = RealDisk::open(directory).unwrap();
    let opened = LocalEngine::open(disk, config, Arc::new(SystemClock), Arc::new(NoObserver));
    opened.map(|(engine, _)| engine)
}

fn append(engine: &LocalEngine, log: &str, bytes: usize) {
    let batch = Batch::from(vec![LogRecords {
        log: LogName::new(log).unwrap(),
        records: vec![Record {
            data: vec![7; bytes].into(),
            ..Record::default()
        }]
        .into(),
        guard: Guard::default(),
        producer: None,
    }]);
    let ticket = engine.submit(None, batch, Some(Durability::Durable));
    ticket.wait().unwrap();
}

/// Number of readable records of a log.
fn records(engine: &LocalEngine, log: &str) -> u64 {
    let (mut next, mut found) = (Lsn::ZERO, 0);
    loop {
        let page = block_on(engine.read(ReadRequest {
            log: LogTarget {
                name: LogName::new(log).unwrap(),
                log_id: None,
            },
            start: ReadStart::Lsn(next),
            max_records: 1000,
            max_bytes: 1 << 20,
            visibility: None,
        }))
        .unwrap();
        found += page
            .batches
            .iter()
            .map(|batch| u64::from(batch.count))
            .sum::<u64>();
        next = page.next_lsn;
        if next == page.tail_lsn {
            return found;
        }
    }
}

const RECORDS: u64 = 12;

/// A store of three segments and more: as after a kill, or after a clean end.
fn store(clean: bool) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let engine = open(directory.path()).unwrap();
    for _ in 0..RECORDS {
        append(&engine, "a", 10 << 10);
    }
    if clean {
        block_on(engine.drain()).unwrap();
        return directory;
    }
    // The copy holds the files as the operating system has them after a kill.
    let killed = tempfile::tempdir().unwrap();
    copy(directory.path(), killed.path());
    killed
}

fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            fs::create_dir(&target).unwrap();
            copy(&entry.path(), &target);
        } else if fs::copy(entry.path(), target).is_err() {
            // The indexer moved this file meanwhile.
        }
    }
}

/// Everything in a directory but LOCK, which names its last holder.
fn contents(directory: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(contents(&path));
            found.insert(path, None);
        } else if path.file_name().unwrap() != "LOCK" {
            let bytes = fs::read(&path).unwrap();
            found.insert(path, Some(bytes));
        }
    }
    found
}

/// The segments in `journal/`, ready ones behind used ones.
fn segments(directory: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(directory.join("journal"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    found.sort();
    found
}

fn is_used(segment: &Path) -> bool {
    fs::read(segment).unwrap()[FIRST_FRAME..]
        .iter()
        .any(|byte| *byte != 0)
}

fn crc32c(bytes: &[u8]) -> u32 {
    let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes);
    u32::try_from(crc).unwrap()
}

/// A field of the first life block.
fn life(segment: &Path, offset: usize) -> u32 {
    let bytes = fs::read(segment).unwrap();
    u32::from_le_bytes(bytes[offset..offset + 4].try_into().unwrap())
}

/// Sets a field of both life blocks, checksums included.
fn set_life(segment: &Path, offset: usize, value: u32) {
    let mut bytes = fs::read(segment).unwrap();
    for block in bytes[..FIRST_FRAME].chunks_mut(LIFE_BLOCK) {
        block[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
        let crc = crc32c(&block[..64]);
        block[64..68].copy_from_slice(&crc.to_le_bytes());
        let crc = crc32c(&block[..100]);
        block[100..104].copy_from_slice(&crc.to_le_bytes());
    }
    fs::write(segment, bytes).unwrap();
}

/// Offsets of the frames of a segment.
fn frames(bytes: &[u8]) -> Vec<usize> {
    let number = |at: usize, length: usize| {
        let mut number = [0; 8];
        number[..length].copy_from_slice(&bytes[at..at + length]);
        usize::try_from(u64::from_le_bytes(number)).unwrap()
    };
    let (mut at, mut found) = (FIRST_FRAME, Vec::new());
    while at + 64 < bytes.len() && bytes[at + 6] == 1 {
        found.push(at);
        at += number(at + 4, 2) * 8 + number(at + 8, 4).next_multiple_of(8);
    }
    found
}

/// Changes one byte of a frame's header, checksum included.
fn set_header(segment: &Path, frame: usize, offset: usize, value: u8) {
    let mut bytes = fs::read(segment).unwrap();
    let salt = bytes[40..48].to_vec();
    bytes[frame + offset] = value;
    let units = u16::from_le_bytes([bytes[frame + 4], bytes[frame + 5]]);
    let end = frame + usize::from(units) * 8;
    let crc = crc32c(&[&salt, &bytes[frame + 4..end]].concat());
    bytes[frame..frame + 4].copy_from_slice(&crc.to_le_bytes());
    fs::write(segment, bytes).unwrap();
}

/// The start is refused, says all of `words`, and leaves the directory as it was.
fn assert_refused(directory: &Path, words: &[&str]) {
    let before = contents(directory);
    let said = match open(directory) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("the store was opened; expected a refusal with {words:?}"),
    };
    for word in words {
        assert!(said.contains(word), "{word:?} is not in {said:?}");
    }
    assert!(
        contents(directory) == before,
        "the directory changed: {said}"
    );
}

fn name(segment: &Path) -> &str {
    segment.file_name().unwrap().to_str().unwrap()
}

#[test]
fn unknown_compatible_features_are_ignored() {
    for clean in [true, false] {
        let store = store(clean);
        for segment in segments(store.path()) {
            set_life(&segment, COMPATIBLE, 1 << 31 | 1);
        }
        let engine = open(store.path()).unwrap();
        append(&engine, "a", 1);
        assert_eq!(records(&engine, "a"), RECORDS + 1);
    }
}

#[test]
fn unknown_features_refuse_the_start_in_whichever_segment_they_are() {
    let cases = [
        (READ_ONLY, "read-only-compatible features 2, 7"),
        (INCOMPATIBLE, "incompatible features 2, 7"),
    ];
    for (offset, words) in cases {
        let store = store(false);
        let segments = segments(store.path());
        assert!(segments.iter().filter(|segment| is_used(segment)).count() >= 3);
        assert!(segments.iter().any(|segment| !is_used(segment)));
        for segment in segments {
            let known = life(&segment, offset);
            set_life(&segment, offset, known | 1 << 7 | 1 << 2);
            let words = [words, name(&segment), "newer version", "nothing"];
            assert_refused(store.path(), &words);
            set_life(&segment, offset, known);
        }
        // Without unknown features the store opens, and has all records.
        let engine = open(store.path()).unwrap();
        assert_eq!(records(&engine, "a"), RECORDS);
    }
}

#[test]
fn unknown_features_refuse_the_start_also_from_a_checkpoint() {
    for offset in [READ_ONLY, INCOMPATIBLE] {
        let store = store(true);
        let segments = segments(store.path());
        let last = segments.iter().rfind(|segment| is_used(segment)).unwrap();
        set_life(last, offset, 1 << 2);
        assert_refused(store.path(), &["features 2", name(last)]);
    }
}

#[test]
fn newer_life_block_is_refused() {
    let store = store(false);
    for segment in segments(store.path()) {
        set_life(&segment, 8, 2);
        assert_refused(store.path(), &["format version 2", name(&segment)]);
        set_life(&segment, 8, 1);
    }
}

#[test]
fn newer_format_is_refused() {
    let store = store(true);
    let path = store.path().join("FORMAT");
    let text = fs::read_to_string(&path).unwrap();
    let text = text
        .split("crc ")
        .next()
        .unwrap()
        .replace("version 1\n", "version 3\n");
    fs::write(
        &path,
        format!("{text}crc {:08x}\n", crc32c(text.as_bytes())),
    )
    .unwrap();
    assert_refused(store.path(), &["format version 3", "reads 2"]);
}

#[test]
fn frames_that_are_not_known_are_neither_torn_nor_damaged() {
    // Offset in the header, value, words of the refusal.
    let cases = [
        (6, 2, "version 2"),
        (7, 200, "kind 200"),
        (7, 31, "kind 31"),
        (20, 3, "codec 3"),
        (20, 7, "codec 7"),
    ];
    for (offset, value, words) in cases {
        let original = store(false);
        let used: Vec<PathBuf> = segments(original.path())
            .into_iter()
            .filter(|segment| is_used(segment))
            .collect();
        for segment in [&used[0], used.last().unwrap()] {
            let bytes = fs::read(segment).unwrap();
            let frames = frames(&bytes);
            let batches: Vec<_> = frames.iter().filter(|at| bytes[**at + 7] == 1).collect();
            let (first, last) = (batches[0], batches[batches.len() - 1]);
            for frame in [first, last] {
                // With an index, the start would know the frame and not read the segment.
                drop(fs::remove_dir_all(original.path().join("index")));
                set_header(segment, *frame, offset, value);
                let place = format!("offset {frame}");
                assert_refused(original.path(), &[words, name(segment), &place]);
                fs::write(segment, &bytes).unwrap();
            }
        }
        let engine = open(original.path()).unwrap();
        assert_eq!(records(&engine, "a"), RECORDS);
    }
}

#[test]
fn first_frame_of_a_newer_version_is_not_a_ready_segment() {
    let store = store(false);
    let segments = segments(store.path());
    let last = segments.iter().rfind(|segment| is_used(segment)).unwrap();
    set_header(last, FIRST_FRAME, 6, 2);
    assert_refused(store.path(), &["version 2", name(last), "offset 8192"]);
}

#[test]
fn newer_index_files_and_checkpoints_are_made_again() {
    let store = store(true);
    let mut changed = 0;
    for directory in ["index", "checkpoint"] {
        for entry in fs::read_dir(store.path().join(directory)).unwrap() {
            let path = entry.unwrap().path();
            let mut bytes = fs::read(&path).unwrap();
            bytes[8..12].copy_from_slice(&2u32.to_le_bytes());
            let end = bytes.len() - 4;
            let crc = crc32c(&bytes[..end]);
            bytes[end..].copy_from_slice(&crc.to_le_bytes());
            fs::write(path, bytes).unwrap();
            changed += 1;
        }
    }
    assert!(changed >= 4);
    let engine = open(store.path()).unwrap();
    append(&engine, "a", 1);
    assert_eq!(records(&engine, "a"), RECORDS + 1);
    block_on(engine.drain()).unwrap();
    drop(engine);
    for entry in fs::read_dir(store.path().join("index")).unwrap() {
        assert_eq!(fs::read(entry.unwrap().path()).unwrap()[8], 1);
    }
    let engine = open(store.path()).unwrap();
    assert_eq!(records(&engine, "a"), RECORDS + 1);
}
