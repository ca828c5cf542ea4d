//! Fuzzes the start of a store whose files were changed, and all reads from it.
//!
//! An input is a list of changes to one store, which is the same in every process except for its salts. There
//! are two sorts of changes. After damage, as a device causes it, all served records must be right and all
//! missing ones named. After forgery, with checksums that match, no forged fact may crash the process.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use arbitrary::Unstructured;

use super::frames;
use super::{number, tables};
use crate::api::config::StorageConfig;
use crate::api::engine::{LogTarget, ReadRequest, ReadStart, ScanRequest, ScanStart, Selector};
use crate::api::error::{AppendError, OpenError, ReadError};
use crate::api::record::{
    Batch, Compression, CursorCommit, Durability, LogConfig, LogRecords, Producer, Record,
    StoredBatch, Visibility,
};
use crate::base::clock::Clock;
use crate::base::ids::{LogName, Lsn, Name, Position, RecoveryEpoch, SegmentId, Timestamp};
use crate::base::metrics::NoObserver;
use crate::base::wire;
use crate::base::wire::Value;
use crate::disk::directory::LastBegun;
use crate::disk::{Disk, SimDisk};
use crate::engine::Core;
use crate::format::frame;
use crate::format::life::Life;
use crate::read::scan;
use crate::read::{self, Reach};

/// A clock that stands still.
struct Still(Instant);

impl Clock for Still {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(1_700_000_000_000_000)
    }

    fn monotonic(&self) -> Instant {
        self.0
    }
}

pub(super) struct File {
    pub(super) path: String,
    /// Bytes up to the last that is not zero.
    used: usize,
    /// Salt of a segment; 0 for another file.
    pub(super) salt: u64,
}

pub(super) struct Frame {
    pub(super) file: usize,
    pub(super) offset: usize,
    pub(super) len: usize,
}

/// The store to change, and its content.
pub(super) struct Store {
    pub(super) disk: SimDisk,
    pub(super) files: Vec<File>,
    pub(super) frames: Vec<Frame>,
    model: BTreeMap<String, Vec<Vec<u8>>>,
}

pub(super) fn config() -> StorageConfig {
    StorageConfig {
        segment_bytes: 64 << 10,
        pool_segments: 1,
        reserve_segments: 1,
        marker_delay: Duration::from_secs(3600),
        ..StorageConfig::default()
    }
}

pub(super) fn open(disk: &SimDisk) -> Result<Arc<Core>, OpenError> {
    #[allow(clippy::disallowed_methods, reason = "an arbitrary beginning")]
    static BEGINNING: LazyLock<Instant> = LazyLock::new(Instant::now);
    let clock = Arc::new(Still(*BEGINNING));
    let (core, _) = Core::open(
        Arc::new(disk.clone()),
        config(),
        clock,
        Arc::new(NoObserver),
    )?;
    Ok(core)
}

fn log_name(name: &str) -> LogName {
    LogName::new(name).expect("a good name")
}

pub(super) fn target(name: &str) -> LogTarget {
    LogTarget {
        name: log_name(name),
        log_id: None,
    }
}

/// The result of a future that has nothing to wait for: without threads every call is done immediately.
pub(super) fn at_once<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut context = Context::from_waker(Waker::noop());
    match std::pin::pin!(future).poll(&mut context) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

pub(super) fn append(core: &Arc<Core>, batch: Batch) -> Result<(), AppendError> {
    let ticket = core.enqueue(batch, Durability::Durable);
    core.turn();
    at_once(ticket)
        .expect("a turn settles what wants the device")
        .map(drop)
}

pub(super) fn batch(log: &str, data: &[Vec<u8>], producer: Option<u64>) -> Batch {
    let record = |data: &Vec<u8>| Record {
        data: data.clone().into(),
        ..Record::default()
    };
    let records = LogRecords {
        log: log_name(log),
        records: data.iter().map(record).collect(),
        guard: Default::default(),
        producer: producer.map(|sequence| Producer {
            id: Name::new("p").expect("a good name"),
            epoch: 1,
            sequence,
        }),
    };
    Batch {
        logs: vec![records],
        ..Batch::default()
    }
}

/// Makes a store with several segments, an index, a checkpoint, unclean ends, and each kind of frame.
fn make() -> Store {
    let disk = SimDisk::new();
    let mut model: BTreeMap<String, Vec<Vec<u8>>> = BTreeMap::new();
    for run in 0..4u8 {
        let core = open(&disk).expect("it can be opened");
        if run == 0 {
            let config = LogConfig {
                compression: Some(Compression::Lz4),
                ..LogConfig::default()
            };
            let created = core.create_in_turn(log_name("packed"), config);
            core.turn();
            at_once(created).expect("done").expect("the store is whole");
        }
        for step in 0..24u8 {
            let data = |size: usize| vec![run * 32 + step; size];
            let sequence = u64::from(run) * 4 + u64::from(step / 6);
            let (log, data, producer) = match step % 6 {
                0 => ("a".to_owned(), vec![data(300)], None),
                1 => ("b".to_owned(), vec![data(20), data(0), data(7)], None),
                2 => ("producers".to_owned(), vec![data(9)], Some(sequence)),
                3 => ("packed".to_owned(), vec![data(900), data(100)], None),
                4 => (format!("log-{run}-{step}"), vec![data(50)], None),
                _ => ("a".to_owned(), vec![data(4000)], None),
            };
            append(&core, batch(&log, &data, producer)).expect("the store is whole");
            model.entry(log).or_default().extend(data);
        }
        let mut moved = batch("b", &[vec![run]], None);
        moved.cursors.push(CursorCommit {
            log: log_name("a"),
            cursor: Name::new("c").expect("a good name"),
            lsn: Lsn::new(u64::from(run)),
            expected_lsn: None,
            log_id: None,
        });
        append(&core, moved).expect("the store is whole");
        model.entry("b".to_owned()).or_default().push(vec![run]);
        core.idle();
        if run == 1 {
            core.close().expect("the store is whole");
        }
    }
    let (files, frames) = explore(&disk);
    Store {
        disk,
        files,
        frames,
        model,
    }
}

/// Lists the files and frames to change. Files of the pool are removed: they hold nothing, and a start makes new ones.
fn explore(disk: &SimDisk) -> (Vec<File>, Vec<Frame>) {
    let (mut files, mut frames) = (Vec::new(), Vec::new());
    for directory in ["", "journal", "index", "checkpoint"] {
        for name in disk.list(directory).expect("the disk works") {
            let path = match directory {
                "" if name == "FORMAT" || name == "LOCK" => continue,
                "" => name,
                _ => format!("{directory}/{name}"),
            };
            let bytes = disk.contents(&path).expect("it was listed");
            let used = bytes
                .iter()
                .rposition(|byte| *byte != 0)
                .map_or(0, |at| at + 1);
            let mut salt = 0;
            if directory == "journal" {
                if bytes[8192..].iter().all(|byte| *byte == 0) {
                    disk.remove(&path).expect("the disk works");
                    continue;
                }
                salt = Life::decode(&bytes).expect("it is whole").salt;
                let mut offset = 8192;
                while let Some(header) = frame::decode_header(&bytes[offset..], salt) {
                    let len = usize::try_from(header.frame_len()).expect("it is small");
                    let file = files.len();
                    frames.push(Frame { file, offset, len });
                    offset += len;
                }
            }
            files.push(File { path, used, salt });
        }
    }
    for name in disk.list("pool").expect("the disk works") {
        disk.remove(&format!("pool/{name}"))
            .expect("the disk works");
    }
    (files, frames)
}

pub(super) fn store() -> &'static Store {
    static STORE: LazyLock<Store> = LazyLock::new(make);
    &STORE
}

/// Makes one change. Returns whether it is a forgery.
fn change(store: &Store, disk: &SimDisk, input: &mut Unstructured<'_>) -> bool {
    let (what, which, at): (u8, u8, u16) = (number(input), number(input), number(input));
    let file = &store.files[usize::from(which) % store.files.len()];
    let Some(mut bytes) = disk.contents(&file.path) else {
        return false;
    };
    let place = usize::from(at) % file.used.max(1).min(bytes.len().max(1));
    let piece = |input: &mut Unstructured<'_>, most: usize| -> Vec<u8> {
        let count = usize::from(number::<u8>(input)).min(most).min(input.len());
        input.bytes(count).map(<[u8]>::to_vec).unwrap_or_default()
    };
    let put = |bytes: &mut Vec<u8>, at: usize, piece: &[u8]| {
        let end = (at + piece.len()).min(bytes.len());
        bytes[at.min(end)..end].copy_from_slice(&piece[..end - at.min(end)]);
    };
    if bytes.is_empty() {
        return false;
    }
    let mut forged = false;
    match what % 12 {
        0 | 1 => bytes[place] ^= 1 << (number::<u8>(input) % 8),
        2 => put(&mut bytes, place, &piece(input, 64)),
        3 => {
            let from = place / 512 * 512;
            let to = (from + 512 * (1 + usize::from(number::<u8>(input)) % 32)).min(bytes.len());
            bytes[from..to].fill(0);
        }
        4 => bytes.truncate(place),
        5 => {
            disk.remove(&file.path).expect("it is there");
            return false;
        }
        6 => {
            let other = &store.files[usize::from(number::<u8>(input)) % store.files.len()];
            let other = disk.contents(&other.path).unwrap_or_default();
            let to = (place + 4096).min(other.len());
            put(&mut bytes, place, &other[place.min(to)..to]);
        }
        7 => {
            let other = &store.files[usize::from(number::<u8>(input)) % store.files.len()];
            if let Some(other) = disk.contents(&other.path) {
                bytes = other;
            }
        }
        _ => {
            forged = true;
            let frame = &store.frames[usize::from(at) % store.frames.len()];
            match file.path.as_str() {
                // A table, with another checksum.
                path if path.starts_with("index/") || path.starts_with("checkpoint/") => {
                    put(&mut bytes, place, &piece(input, 16));
                    tables::sign(&mut bytes);
                }
                "BEGUN" => {
                    let mut number = || number::<u64>(input);
                    let begun = LastBegun {
                        epoch: RecoveryEpoch::new(number()),
                        segment: SegmentId::new(number()),
                        base: Position::new(number()),
                    };
                    bytes = begun.encode().into_bytes();
                }
                _ => {
                    let file = &store.files[frame.file];
                    let Some(mut bytes) = disk.contents(&file.path) else {
                        return false;
                    };
                    let Some(old) = bytes.get_mut(frame.offset..frame.offset + frame.len) else {
                        return false;
                    };
                    // Any part of the frame, its numbers first.
                    let place = match number::<u8>(input) {
                        place @ 0..64 => usize::from(place),
                        _ => usize::from(number::<u16>(input)),
                    };
                    let piece = piece(input, 32);
                    let mut new = old.to_vec();
                    put(&mut new, place.min(frame.len), &piece);
                    frames::sign(&mut new, file.salt, what & 1 == 0);
                    old.copy_from_slice(&new);
                    disk.replace(&file.path, bytes);
                    return true;
                }
            }
        }
    }
    disk.replace(&file.path, bytes);
    forged
}

/// Fuzzes a store: makes changes, then starts and reads twice, with appends in between.
pub fn recovery(data: &[u8]) {
    let store = store();
    let disk = store.disk.copy();
    let mut input = Unstructured::new(data);
    let mut forged = false;
    for _ in 0..32 {
        if input.is_empty() {
            break;
        }
        forged |= change(store, &disk, &mut input);
    }
    for round in 0..2u8 {
        let core = match open(&disk) {
            Ok(core) => core,
            // A start may refuse changes that no device makes.
            Err(error) => return assert!(forged, "refused: {error}"),
        };
        let model = (!forged).then_some(&store.model);
        let after = format!("after-{round}");
        for log in store.model.keys().chain([&after]) {
            read_log(&core, log, model);
        }
        scan_all(&core, model);
        for log in [after.as_str(), "a", "b"] {
            let done = append(&core, batch(log, &[b"AFTER".to_vec()], None));
            let proven = !matches!(done, Err(AppendError::TailUnproven { .. }));
            assert!(done.is_ok() || !proven || forged, "{log}: {done:?}");
        }
        core.idle();
    }
}

/// The data of the records of a batch.
fn payloads(batch: &StoredBatch) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    for field in wire::fields(&batch.body) {
        let Some((3, Value::Bytes(message))) = field else {
            continue;
        };
        let data = wire::fields(message).find_map(|field| match field {
            Some((1, Value::Bytes(data))) => Some(data.to_vec()),
            _ => None,
        });
        found.push(data.unwrap_or_default());
    }
    found
}

fn check(batch: &StoredBatch, records: Option<&Vec<Vec<u8>>>) {
    for (lsn, data) in (batch.first_lsn.get()..).zip(payloads(batch)) {
        if data != b"AFTER" {
            let index = usize::try_from(lsn).expect("a small store");
            let right = records.and_then(|records| records.get(index));
            assert_eq!(right, Some(&data), "record {lsn} of {}", batch.log);
        }
    }
}

fn read_log(core: &Arc<Core>, log: &str, model: Option<&BTreeMap<String, Vec<Vec<u8>>>>) {
    let mut next = Lsn::ZERO;
    for _ in 0..10_000 {
        let request = ReadRequest {
            log: target(log),
            start: ReadStart::Lsn(next),
            max_records: 1000,
            max_bytes: 1 << 20,
            visibility: Some(Visibility::Durable),
        };
        let before = next;
        match read::page(&core.store, &request, Reach::Disk) {
            Ok(page) => {
                for batch in &page.batches {
                    assert!(batch.first_lsn >= next, "lsns go up");
                    next = batch.next_lsn();
                    if let Some(model) = model {
                        check(batch, model.get(log));
                    }
                }
                next = page.next_lsn;
                if next >= page.tail_lsn {
                    return;
                }
            }
            Err(ReadError::Quarantined { to: Some(to), .. }) => next = to,
            Err(_) => return,
        }
        if next <= before {
            // A forged index may hide existing records.
            return assert!(model.is_none(), "a page goes on: {log} at {next}");
        }
    }
    panic!("no end of {log}");
}

fn scan_all(core: &Arc<Core>, model: Option<&BTreeMap<String, Vec<Vec<u8>>>>) {
    let request = ScanRequest {
        selector: Selector::All,
        start: ScanStart::First,
        until_lsn: None,
        max_records: 0,
        follow: false,
        visibility: Some(Visibility::Durable),
        chunk_bytes: 64 << 10,
    };
    let Ok(mut scan) = scan::begin(&core.store, &Arc::default(), request) else {
        return;
    };
    for _ in 0..10_000 {
        match at_once(scan.next()).expect("without threads nothing waits") {
            Ok(Some(chunk)) => {
                for batch in &chunk.batches {
                    if let Some(model) = model {
                        check(batch, model.get(batch.log.as_str()));
                    }
                }
            }
            Ok(None) | Err(_) => return,
        }
    }
    panic!("the scan has no end");
}

/// Inputs of [`recovery`]: each sort of change once.
pub fn recovery_seeds() -> Vec<(String, Vec<u8>)> {
    let change = |what: u8, file: u8, at: u16| {
        let mut seed = vec![what, file];
        seed.extend_from_slice(&at.to_le_bytes());
        seed.extend_from_slice(&[5, 9, 1, 2, 3, 4, 5, 6, 7, 8]);
        seed
    };
    let mut seeds = vec![("nothing".to_owned(), Vec::new())];
    for what in 0..12 {
        for (number, (file, at)) in [(1, 8200), (2, 9000), (7, 64), (9, 300)]
            .into_iter()
            .enumerate()
        {
            seeds.push((format!("change-{what}-{number}"), change(what, file, at)));
        }
    }
    seeds.extend(crafted_seeds());
    seeds
}

/// Numbers that no store reaches, behind checksums that match: in BEGUN, and in each number of the headers of
/// the first frames, including a link.
fn crafted_seeds() -> Vec<(String, Vec<u8>)> {
    let files = &store().files;
    let mut seeds = Vec::new();
    let begun = files.iter().position(|file| file.path == "BEGUN");
    let (most, begun) = (u64::MAX, begun.and_then(|file| u8::try_from(file).ok()));
    for (number, numbers) in [
        [most, 1, 0],
        [1 << 24, 1, 0],
        [(1 << 23) - 1, 1, 0],
        [1, most, 0],
        [1, 1, most],
        [1, 1, most - 4095],
        [1, 1, 1 << 63],
        [1, 1, 1 << 62],
    ]
    .into_iter()
    .enumerate()
    {
        let mut seed = vec![8, begun.unwrap_or(0), 0, 0];
        seed.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        seeds.push((format!("begun-{number}"), seed));
    }
    let segment = files.iter().position(|file| file.salt != 0);
    let segment = segment.and_then(|file| u8::try_from(file).ok());
    for frame in 0..6u16 {
        for (place, bytes) in [(8u8, 4u8), (16, 4), (24, 8), (32, 8), (40, 8), (48, 8)] {
            let mut seed = vec![8, segment.unwrap_or(0)];
            seed.extend_from_slice(&frame.to_le_bytes());
            seed.extend_from_slice(&[place, bytes]);
            seed.extend(std::iter::repeat_n(0xFF, usize::from(bytes)));
            seeds.push((format!("header-{frame}-{place}"), seed));
        }
    }
    seeds
}
