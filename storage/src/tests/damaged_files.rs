//! Damage in the files that a start uses besides frames: indexes, checkpoints, BEGUN, FORMAT, REPAIRS. Each
//! byte is flipped; files are cut, emptied, removed, extended. Files are damaged alone, while the store is
//! open, and together with the segment that an index describes.
//!
//! Damage in derived files must not show: the store answers as if it were whole, to the position of the next
//! append. Without FORMAT the store is refused and left unchanged. Damaged frames cost exactly their own
//! records, whatever else is damaged.
//!
//! `WALD_DAMAGE=all` tries every byte. Otherwise tests try all of FORMAT and BEGUN, and of other files the
//! header and 1/100 of the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::damage::{all, without_indexes};
use super::faults::used_paths;
use super::*;
use crate::api::record::{Compression, CursorCommit, GapReason, LogConfig, Producer};
use crate::api::ticket::block_on;
use crate::base::ids::Name;
use crate::disk::Disk;
use crate::disk::directory::{DIRECTORIES, REPAIRS};
use crate::engine::repair::accept_loss;
use crate::format::frame;
use crate::format::frame::FrameKind;
use crate::format::life::Life;
use crate::journal::committer::CursorChange;

const LOGS: [&str; 5] = ["a", "b", "c/1", "gone", "packed"];
const FIRST_FRAME: usize = 8192;

/// Lsns by log.
type Lsns = BTreeMap<&'static str, BTreeSet<u64>>;

/// How a store's last run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Killed,
    Clean,
    /// An operator accepted damage, and another run followed.
    Repaired,
}

/// A store with data of every kind, and the answers that reads must give.
pub(super) struct Store {
    end: End,
    pub(super) disk: SimDisk,
    pub(super) config: StorageConfig,
    /// Records that were appended and neither trimmed nor deleted since.
    pub(super) records: BTreeMap<&'static str, BTreeMap<u64, Vec<u8>>>,
    /// Lsns that are missing already.
    missing: Lsns,
    frames: Vec<Frame>,
    /// All answers of the store.
    told: String,
}

/// A frame with records of an existing log.
struct Frame {
    path: String,
    from: usize,
    body: usize,
    /// End of the bytes that checksums cover, without padding.
    covered: usize,
    log: &'static str,
    lsns: std::ops::Range<u64>,
}

/// A store while it is written.
struct Writing {
    fixture: Fixture,
    records: BTreeMap<&'static str, BTreeMap<u64, Vec<u8>>>,
    ids: BTreeMap<crate::base::ids::LogId, &'static str>,
    written: u64,
}

impl Writing {
    fn append(&mut self, logs: &[&'static str], producer: Option<u64>) {
        self.written += 1;
        self.fixture.clock.advance(1000);
        let mut data = self.written.to_le_bytes().to_vec();
        let size = if logs == ["packed"] { 600 } else { 5 };
        data.resize(8 + size, 7);
        let parts: Vec<(&str, &[&[u8]])> = Vec::new();
        let mut batch = batch(&parts);
        for log in logs {
            batch.logs.push(LogRecords {
                log: LogName::new(log).unwrap(),
                records: vec![record(&data), record(&data[..9])].into(),
                guard: Guard {
                    writer_epoch: epoch_of(&self.fixture, log),
                    ..Guard::default()
                },
                producer: producer.map(|sequence| Producer {
                    id: Name::new("p").unwrap(),
                    epoch: 1,
                    sequence,
                }),
            });
        }
        let appended = self.fixture.append_batch(batch).unwrap();
        for (log, append) in logs.iter().zip(appended.appends) {
            self.ids.insert(append.log_id, log);
            let of_log = self.records.entry(log).or_default();
            let first = append.first_lsn.get();
            of_log.insert(first, data.clone());
            of_log.insert(first + 1, data[..9].to_vec());
        }
    }

    fn create(&mut self, log: &str, config: LogConfig) {
        let name = LogName::new(log).unwrap();
        let awaited = self.fixture.core.create_in_turn(name, config);
        self.fixture.core.turn();
        block_on(awaited).unwrap();
    }

    fn configure(&mut self, log: &str, config: LogConfig) {
        let name = LogName::new(log).unwrap();
        let awaited = self.fixture.core.configure_in_turn(name, config);
        self.fixture.core.turn();
        block_on(awaited).unwrap();
    }

    fn trim(&mut self, log: &'static str, before: u64) {
        let awaited = self
            .fixture
            .core
            .trim_in_turn(target(log), Lsn::new(before));
        self.fixture.core.turn();
        block_on(awaited).unwrap();
        let of_log = self.records.get_mut(log).unwrap();
        of_log.retain(|lsn, _| *lsn >= before);
    }

    fn delete(&mut self, log: &'static str) {
        let awaited = self.fixture.core.delete_in_turn(target(log));
        self.fixture.core.turn();
        block_on(awaited).unwrap();
        self.records.remove(log);
        self.ids.retain(|_, name| *name != log);
    }

    fn fence(&mut self, log: &str) {
        let awaited = self.fixture.core.fence(target(log), None);
        self.fixture.core.turn();
        block_on(awaited).unwrap();
    }

    fn move_cursor(&mut self, log: &str, lsn: u64) {
        let commit = CursorCommit {
            log: LogName::new(log).unwrap(),
            cursor: Name::new("x").unwrap(),
            lsn: Lsn::new(lsn),
            expected_lsn: None,
            log_id: None,
        };
        let operation = CursorChange::Commit(commit);
        let awaited = self.fixture.core.move_cursor(operation);
        self.fixture.core.turn();
        block_on(awaited).unwrap();
    }

    /// Leaves the segment, so that appends go on in the next one.
    fn leave(&mut self) {
        let awaited = self.fixture.core.inbox.leave_segment();
        self.fixture.core.turn();
        block_on(awaited).unwrap();
    }

    fn restart(self, clean: bool) -> Self {
        self.fixture.core.idle();
        Self {
            fixture: match clean {
                true => self.fixture.restart_cleanly(),
                false => self.fixture.restart(),
            },
            ..self
        }
    }
}

/// The epoch that the newest writer of the log sends.
fn epoch_of(fixture: &Fixture, log: &str) -> Option<u64> {
    let log = fixture.core.logs.by_name(log)?;
    let epoch = log.state.read().writer_epoch();
    (epoch > 0).then_some(epoch)
}

impl Store {
    /// Seven segments of six runs. A start begins at the checkpoint of the second run, and all segments but
    /// the last have indexes.
    pub(super) fn new(end: End) -> Self {
        let mut store = Writing {
            fixture: Fixture::new(),
            records: BTreeMap::new(),
            ids: BTreeMap::new(),
            written: 0,
        };
        let lz4 = LogConfig {
            compression: Some(Compression::Lz4),
            ..LogConfig::default()
        };
        store.create("packed", lz4);
        for run in 0..6u64 {
            store.append(&["a"], Some(run));
            store.append(&["packed"], None);
            store.append(&["b", "c/1"], None);
            store.move_cursor("b", run);
            match run {
                0 => store.append(&["gone"], None),
                1 => store.fence("c/1"),
                2 => {
                    store.trim("a", 3);
                    store.delete("gone");
                    store.leave();
                    store.append(&["a", "b"], None);
                }
                3 => store.append(&["gone"], None),
                4 => {
                    store.trim("b", 6);
                    let config = LogConfig {
                        max_record_bytes: Some(5000),
                        ..LogConfig::default()
                    };
                    store.configure("b", config);
                }
                _ => {}
            }
            store.append(&["packed"], None);
            if run < 5 {
                store = store.restart(run < 2);
            }
        }
        store.fixture.core.idle();
        if end == End::Clean {
            store.fixture.core.close().unwrap();
        }
        Self::of(store, end)
    }

    fn of(written: Writing, end: End) -> Self {
        let Writing {
            fixture,
            records,
            ids,
            ..
        } = written;
        let Fixture {
            disk, config, core, ..
        } = fixture;
        drop(core);
        let mut store = Self {
            end,
            frames: frames(&disk, &ids),
            disk,
            config,
            records,
            missing: Lsns::new(),
            told: String::new(),
        };
        assert_eq!(used_paths(&store.disk).len(), 7);
        if end == End::Repaired {
            store.repair();
        }
        let fixture = store.open(store.disk.copy());
        store.told = tell(&fixture, &LOGS);
        store.check(store.disk.copy(), &store.missing, "as it was written");
        store
    }

    /// Damages two frames, accepts the loss, and serves once more.
    fn repair(&mut self) {
        for frame in [3, self.frames.len() - 4] {
            let frame = &self.frames[frame];
            let mut bytes = self.disk.contents(&frame.path).unwrap();
            bytes[frame.body] ^= 1;
            self.disk.replace(&frame.path, bytes);
            let kept = self.kept(frame);
            self.missing.entry(frame.log).or_default().extend(kept);
        }
        let disk: Arc<dyn Disk> = Arc::new(self.disk.clone());
        let (loss, _) = accept_loss(&disk, &self.config, TestClock::new(), "by a test").unwrap();
        assert!(!loss.is_empty());
        drop(self.open(self.disk.clone()));
    }

    /// Lsns of a frame that must be readable.
    fn kept(&self, frame: &Frame) -> BTreeSet<u64> {
        let of_log = &self.records[frame.log];
        let kept = frame.lsns.clone().filter(|lsn| of_log.contains_key(lsn));
        kept.collect()
    }

    /// Lsns that are missing after damage to the byte at `at`.
    fn missing_with(&self, path: &str, at: usize) -> Lsns {
        let mut missing = self.missing.clone();
        let hit = |frame: &&Frame| frame.path == path && (frame.from..frame.covered).contains(&at);
        for frame in self.frames.iter().filter(hit) {
            let of_log = missing.entry(frame.log).or_default();
            of_log.extend(self.kept(frame));
        }
        missing.retain(|_, lsns| !lsns.is_empty());
        missing
    }

    pub(super) fn open(&self, disk: SimDisk) -> Fixture {
        let clock = TestClock::new();
        clock.advance(10_000_000);
        let (core, report) = open(&disk, &self.config, &clock).unwrap();
        Fixture {
            disk,
            clock,
            config: self.config.clone(),
            core,
            report,
        }
    }

    fn paths(&self, directory: &str) -> Vec<String> {
        let names = self.disk.list(directory).unwrap();
        names.iter().map(|n| format!("{directory}/{n}")).collect()
    }

    /// All derived files, BEGUN and REPAIRS.
    fn derived(&self) -> Vec<String> {
        let mut paths = [self.paths("index"), self.paths("checkpoint")].concat();
        let texts = ["BEGUN", REPAIRS].map(str::to_owned);
        paths.extend(
            texts
                .into_iter()
                .filter(|p| self.disk.contents(p).is_some()),
        );
        paths
    }

    /// A copy in which one file has other bytes, or is gone.
    fn with(&self, path: &str, bytes: Option<Vec<u8>>) -> SimDisk {
        let disk = self.disk.copy();
        match bytes {
            Some(bytes) => disk.replace(path, bytes),
            None => disk.remove(path).unwrap(),
        }
        disk
    }

    /// Opens a copy in which only derived files are damaged. All answers must be the same.
    fn check_whole(&self, disk: SimDisk, what: &str) {
        let fixture = self.open(disk);
        assert_eq!(tell(&fixture, &LOGS), self.told, "{:?}: {what}", self.end);
    }

    /// Opens a damaged copy. Pages and scans must serve right records, exactly `missing` is missing and
    /// named, and every log goes on where it was.
    fn check(&self, disk: SimDisk, missing: &Lsns, what: &str) {
        let what = &format!("{:?}: {what}", self.end);
        let fixture = self.open(disk);
        for (log, records) in &self.records {
            let none = BTreeSet::new();
            let missing = missing.get(log).unwrap_or(&none);
            let mut expected = records.clone();
            expected.retain(|lsn, _| !missing.contains(lsn));
            let first = *records.keys().next().unwrap();
            let (found, named) = by_pages(&fixture, log, first);
            assert_eq!(found, expected, "{what}: pages of {log}");
            assert_eq!(&named, missing, "{what}: named by pages of {log}");
            let scanned = by_scan(&fixture, one(log)).remove(*log).unwrap_or_default();
            assert_eq!(scanned.0, expected, "{what}: a scan of {log}");
            assert_eq!(&scanned.1, missing, "{what}: named by a scan of {log}");
        }
        let mut scanned = by_scan(&fixture, Selector::All);
        for (log, records) in &self.records {
            let (found, named) = scanned.remove(*log).unwrap_or_default();
            let missing = missing.get(log).cloned().unwrap_or_default();
            let mut expected = records.clone();
            expected.retain(|lsn, _| !missing.contains(lsn));
            assert_eq!(found, expected, "{what}: a scan of all, {log}");
            assert_eq!(named, missing, "{what}: named by a scan of all, {log}");
        }
        assert!(scanned.is_empty(), "{what}: of no log: {scanned:?}");
        for (log, records) in &self.records {
            let next = *records.keys().next_back().unwrap() + 1;
            let appended = append_after(&fixture, log);
            assert_eq!(appended.appends[0].first_lsn.get(), next, "{what}: {log}");
        }
    }
}

/// The frames that hold records of these logs.
fn frames(disk: &SimDisk, ids: &BTreeMap<crate::base::ids::LogId, &'static str>) -> Vec<Frame> {
    let mut frames = Vec::new();
    for path in used_paths(disk) {
        let bytes = disk.contents(&path).unwrap();
        let life = Life::decode(&bytes).unwrap();
        let mut from = FIRST_FRAME;
        while let Some(header) = bytes
            .get(from..)
            .and_then(|bytes| frame::decode_header(bytes, life.salt))
        {
            let body = from + header.header_len as usize;
            let first = header.first_lsn.get();
            if let (FrameKind::Batch, Some(log)) = (header.kind, ids.get(&header.log_id)) {
                frames.push(Frame {
                    path: path.clone(),
                    from,
                    body,
                    covered: body + header.body_len as usize,
                    log,
                    lsns: first..first + u64::from(header.count),
                });
            }
            from += usize::try_from(header.frame_len()).unwrap();
        }
    }
    frames
}

/// Offset behind the last frame of a segment.
fn end_of_frames(bytes: &[u8]) -> usize {
    let life = Life::decode(bytes).unwrap();
    let mut from = FIRST_FRAME;
    while let Some(header) = bytes
        .get(from..)
        .and_then(|bytes| frame::decode_header(bytes, life.salt))
    {
        from += usize::try_from(header.frame_len()).unwrap();
    }
    from
}

/// Records that were read, and lsns that were named as damaged.
type Seen = (BTreeMap<u64, Vec<u8>>, BTreeSet<u64>);

/// Reads a log by pages of three records.
fn by_pages(fixture: &Fixture, log: &str, mut next: u64) -> Seen {
    let (mut found, mut named) = Seen::default();
    loop {
        let mut request = read_request(log, ReadStart::Lsn(Lsn::new(next)));
        request.max_records = 3;
        match read::page(&fixture.core.store, &request, Reach::Disk) {
            Ok(page) => {
                for batch in &page.batches {
                    found.extend((batch.first_lsn.get()..).zip(payloads(batch)));
                }
                if page.next_lsn == page.tail_lsn {
                    return (found, named);
                }
                assert!(page.next_lsn.get() > next, "a page that gets nowhere");
                next = page.next_lsn.get();
            }
            Err(ReadError::Quarantined { from, to, .. }) => {
                let to = to.expect("a known end").get();
                named.extend(from.get()..to);
                next = to;
            }
            Err(error) => panic!("{log} from {next}: {error}"),
        }
    }
}

fn by_scan(fixture: &Fixture, selector: Selector) -> BTreeMap<String, Seen> {
    let mut scan = fixture.scan(selector, ScanStart::First, false);
    let mut seen: BTreeMap<String, Seen> = BTreeMap::new();
    while let Some(chunk) = next_chunk(&mut scan).unwrap().unwrap() {
        for gap in chunk.gaps {
            if gap.reason != GapReason::Quarantined {
                continue;
            }
            let range = gap.from.unwrap().get()..gap.to.unwrap().get();
            let log = gap.log.unwrap().as_str().to_owned();
            seen.entry(log).or_default().1.extend(range);
        }
        for batch in chunk.batches {
            let records = (batch.first_lsn.get()..).zip(payloads(&batch));
            let log = batch.log.as_str().to_owned();
            seen.entry(log).or_default().0.extend(records);
        }
    }
    seen
}

pub(super) fn append_after(fixture: &Fixture, log: &str) -> Appended {
    let mut batch = batch(&[(log, &[b"after"])]);
    batch.logs[0].guard.writer_epoch = epoch_of(fixture, log);
    fixture.append_batch(batch).unwrap()
}

/// All answers of a store: the report of the start, its logs and their facts, records by pages and by scans,
/// and the answers to the next appends.
fn tell(fixture: &Fixture, logs: &[&str]) -> String {
    let mut out = String::new();
    tell_what_is_there(fixture, &mut out);
    let report = &fixture.report;
    writeln!(out, "epoch {}", report.recovery_epoch).unwrap();
    writeln!(out, "{:?} {:?}", report.clean, report.findings).unwrap();
    writeln!(out, "{:?} {:?}", report.damage, report.accepted).unwrap();
    writeln!(out, "{:?}", fixture.core.history).unwrap();
    for log in logs.iter().chain(&["another"]) {
        let mut appended = append_after(fixture, log);
        appended.times = crate::api::engine::AppendTimes::default();
        writeln!(out, "{appended:?}").unwrap();
    }
    out
}

fn tell_what_is_there(fixture: &Fixture, out: &mut String) {
    let mut logs = fixture.core.logs.all();
    logs.sort_unstable_by(|one, other| one.name.cmp(&other.name));
    for log in logs {
        let core = &fixture.core;
        let durable = core.journal.durable();
        let info = log.info(core.tail(&log, Visibility::Durable), durable, durable);
        writeln!(out, "{info:?}").unwrap();
        let extras = log.state.read().extras.clone().unwrap_or_default();
        let cursors: Vec<_> = extras
            .cursors
            .iter()
            .map(|(name, mark)| (name, *mark.newest()))
            .collect();
        let told = extras.producers.told(fixture.config.producer_window);
        let gone = extras.producers.told_gone();
        writeln!(out, "{cursors:?} {told:?} {gone:?}").unwrap();
        let seen = by_pages(fixture, log.name.as_str(), info.first_lsn.get());
        writeln!(out, "{seen:?}").unwrap();
        let scanned = by_scan(fixture, one(log.name.as_str()));
        writeln!(out, "{scanned:?}").unwrap();
    }
    let scanned = by_scan(fixture, Selector::All);
    writeln!(out, "{scanned:?}").unwrap();
}

/// Whether a byte of a file is tried: its first `header` bytes, and 1/100 of the rest.
fn is_tried(at: usize, header: usize) -> bool {
    all() || at < header || at % 100 == 50
}

/// Number of bytes in the header of a file; all of a short text.
fn header_of(path: &str) -> usize {
    match path.rsplit('.').next() {
        Some("idx" | "old") => 64,
        Some("ckp") => 12,
        _ => 200,
    }
}

fn flipped(bytes: &[u8], at: usize, bit: u32) -> Vec<u8> {
    let mut flipped = bytes.to_vec();
    flipped[at] ^= 1 << (bit % 8);
    flipped
}

/// Lengths to which files are cut.
fn lengths(bytes: &[u8]) -> impl Iterator<Item = usize> {
    let length = bytes.len();
    let some = [0, 1, 8, 12, 63, 64, length / 2, length - 5, length - 1];
    let some = some.map(|at| at.min(length - 1));
    (0..length).filter(move |at| all() || some.contains(at))
}

/// Every file of a store but LOCK, which names its last holder.
fn everything(disk: &SimDisk) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for directory in DIRECTORIES.iter().chain(&[""]) {
        for name in disk.list(directory).unwrap() {
            let path = format!("{directory}/{name}");
            let path = path.trim_start_matches('/').to_owned();
            if let Some(bytes) = disk.contents(&path).filter(|_| path != "LOCK") {
                files.insert(path, bytes);
            }
        }
    }
    files
}

fn each(check: impl Fn(&Store) -> u64) {
    let mut tried = 0;
    for end in [End::Killed, End::Clean, End::Repaired] {
        let store = Store::new(end);
        assert!(store.paths("index").len() >= 5);
        assert!(!store.paths("checkpoint").is_empty());
        assert_eq!(store.disk.contents(REPAIRS).is_some(), end == End::Repaired);
        tried += check(&store);
    }
    println!("{tried} stores");
    assert!(tried > 0);
}

#[test]
fn no_flipped_byte_of_a_derived_file_changes_an_answer() {
    each(|store| {
        let mut tried = 0;
        for path in store.derived() {
            let bytes = store.disk.contents(&path).unwrap();
            let header = header_of(&path);
            for at in (0..bytes.len()).filter(|at| is_tried(*at, header)) {
                // The texts are short, so all their bits are tried.
                let bits = if header == 200 { 0..8 } else { 6..7 };
                for bit in bits {
                    let disk = store.with(&path, Some(flipped(&bytes, at, bit)));
                    store.check_whole(disk, &format!("{path}, byte {at}, bit {bit}"));
                    tried += 1;
                }
            }
        }
        tried
    });
}

#[test]
fn an_index_that_is_damaged_while_the_store_is_open_is_not_missed() {
    each(|store| {
        let mut tried = 0;
        let whole = store.open(store.disk.copy());
        let mut expected = String::new();
        tell_what_is_there(&whole, &mut expected);
        for path in store.paths("index") {
            let bytes = store.disk.contents(&path).unwrap();
            for at in (0..bytes.len()).filter(|at| is_tried(*at, 64)) {
                let fixture = store.open(store.disk.copy());
                fixture.disk.replace(&path, flipped(&bytes, at, 3));
                let mut told = String::new();
                tell_what_is_there(&fixture, &mut told);
                assert_eq!(told, expected, "{:?}: {path}, byte {at}", store.end);
                tried += 1;
            }
        }
        tried
    });
}

#[test]
fn cut_extended_swapped_or_missing_derived_files_change_no_answer() {
    each(|store| {
        let mut tried = 0;
        let mut check = |disk: SimDisk, what: String| {
            store.check_whole(disk, &what);
            tried += 1;
        };
        let derived = store.derived();
        for path in &derived {
            let bytes = store.disk.contents(path).unwrap();
            check(store.with(path, None), format!("{path} gone"));
            for at in lengths(&bytes) {
                let cut = Some(bytes[..at].to_vec());
                check(store.with(path, cut), format!("{path} cut at {at}"));
            }
            for more in [1, 4, 4096] {
                let mut grown = bytes.clone();
                grown.resize(bytes.len() + more, 0);
                check(
                    store.with(path, Some(grown)),
                    format!("{path}, {more} more"),
                );
            }
            for other in &derived {
                let bytes = store.disk.contents(other);
                check(store.with(path, bytes), format!("{path} is {other}"));
            }
        }
        for directory in ["index", "checkpoint"] {
            let disk = store.disk.copy();
            for path in store.paths(directory) {
                disk.remove(&path).unwrap();
            }
            check(disk.copy(), format!("no {directory}"));
            disk.remove("BEGUN").unwrap();
            check(disk, format!("no {directory}, no BEGUN"));
        }
        let bare = without_indexes(&store.disk);
        bare.remove("BEGUN").unwrap();
        check(bare, "the segments alone".to_owned());
        tried
    });
}

#[test]
fn two_derived_files_that_are_damaged_are_not_missed() {
    each(|store| {
        let mut tried = 0;
        let derived = store.derived();
        for (index, path) in derived.iter().enumerate() {
            let bytes = store.disk.contents(path).unwrap();
            for (at, other) in derived[index + 1..].iter().enumerate() {
                let step = if all() { 17 } else { 400 };
                for at in (at % step..bytes.len()).step_by(step) {
                    let disk = store.with(path, Some(flipped(&bytes, at, 1)));
                    let bytes = store.disk.contents(other).unwrap();
                    let there = at % bytes.len();
                    disk.replace(other, flipped(&bytes, there, 2));
                    store.check_whole(disk, &format!("{path} at {at}, {other} at {there}"));
                    tried += 1;
                }
            }
        }
        tried
    });
}

#[test]
fn a_store_without_a_whole_format_file_is_refused_and_left_unchanged() {
    each(|store| {
        let mut tried = 0;
        let bytes = store.disk.contents("FORMAT").unwrap();
        let mut files = vec![None];
        for at in 0..bytes.len() {
            files.push(Some(bytes[..at].to_vec()));
            files.extend((0..8).map(|bit| Some(flipped(&bytes, at, bit))));
        }
        files.push(Some([bytes.as_slice(), b"\n"].concat()));
        for file in files {
            let disk = store.with("FORMAT", file.clone());
            let before = everything(&disk);
            let refused = open(&disk, &store.config, &TestClock::new());
            let what = file.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            assert!(
                matches!(
                    refused,
                    Err(OpenError::NotAStore { .. } | OpenError::Version { .. })
                ),
                "{what:?}"
            );
            assert_eq!(everything(&disk), before, "{what:?}");
            tried += 1;
        }
        tried
    });
}

#[test]
fn a_damaged_frame_costs_exactly_its_records_with_any_index_damaged() {
    each(|store| {
        let mut tried = 0;
        for path in used_paths(&store.disk) {
            let index = path.replace("journal", "index").replace(".seg", ".idx");
            let Some(index_bytes) = store.disk.contents(&index) else {
                continue;
            };
            let bytes = store.disk.contents(&path).unwrap();
            let frames: Vec<&Frame> = store.frames.iter().filter(|f| f.path == path).collect();
            for at in (0..index_bytes.len()).filter(|at| is_tried(*at, 64)) {
                // Each index byte goes with another frame, and with another byte of its body.
                let Some(frame) = frames.get(at % frames.len().max(1)) else {
                    continue;
                };
                let hit = frame.body + at % (frame.covered - frame.body);
                let disk = store.with(&path, Some(flipped(&bytes, hit, 5)));
                disk.replace(&index, flipped(&index_bytes, at, 4));
                let missing = store.missing_with(&path, hit);
                store.check(
                    disk,
                    &missing,
                    &format!("{path} at {hit}, its index at {at}"),
                );
                tried += 1;
            }
        }
        tried
    });
}

#[test]
fn a_flipped_segment_byte_costs_exactly_its_records_with_any_indexes() {
    each(|store| {
        let mut tried = 0;
        for path in used_paths(&store.disk) {
            let bytes = store.disk.contents(&path).unwrap();
            let end = end_of_frames(&bytes);
            for at in 0..end {
                // Behind the first 104 bytes of a life block, little has a meaning.
                let in_life = at < FIRST_FRAME && at % 4096 >= 104;
                let step = match (all(), in_life) {
                    (true, false) => 1,
                    (true, true) => 256,
                    (false, _) => 101,
                };
                if at % step != 0 {
                    continue;
                }
                let missing = store.missing_with(&path, at);
                let disk = store.with(&path, Some(flipped(&bytes, at, 6)));
                let what = format!("{path}, byte {at}");
                if at % 2 == 0 || !all() {
                    let bare = without_indexes(&disk);
                    store.check(bare, &missing, &format!("{what}, no indexes"));
                }
                store.check(disk, &missing, &what);
                tried += 1;
            }
        }
        tried
    });
}

/// Batches of a producer, a checkpoint, and a clean end.
fn with_a_producer() -> SimDisk {
    let fixture = Fixture::new();
    for number in 0..40 {
        let data = vec![number; 4000];
        fixture.append("a", &data).unwrap();
    }
    fixture.restart_cleanly().disk
}

#[test]
fn store_without_its_journal_directory_reports_a_loss() {
    let disk = with_a_producer();
    for name in disk.list("journal").unwrap() {
        disk.remove(&format!("journal/{name}")).unwrap();
    }
    let copy: Arc<dyn Disk> = Arc::new(disk.copy());
    let loss = crate::engine::repair::examine(&copy, &small_config()).unwrap();
    assert!(loss.unknown_logs, "{loss:?}");
    let fixture = Fixture::on(disk);
    let findings = fixture.report.findings.join("; ");
    assert!(findings.contains("missing"), "{findings}");
    assert!(findings.contains("key of digests"), "{findings}");
    assert!(fixture.core.statistics().unattributed_damages > 0);
    assert!(matches!(
        fixture.append("new", b"x"),
        Err(AppendError::TailUnproven { .. })
    ));
    let fixture = fixture.restart();
    assert!(fixture.core.statistics().unattributed_damages > 0);
}

#[test]
fn a_lost_key_of_digests_is_reported_by_start_and_repair() {
    let disk = with_a_producer();
    for name in disk.list("journal").unwrap() {
        let path = format!("journal/{name}");
        let mut bytes = disk.contents(&path).unwrap();
        // The key in both copies of the life block.
        bytes[70] ^= 1;
        bytes[4096 + 70] ^= 1;
        disk.replace(&path, bytes);
    }
    let copy: Arc<dyn Disk> = Arc::new(disk.copy());
    let loss = crate::engine::repair::examine(&copy, &small_config()).unwrap();
    let told = |findings: &[String]| findings.iter().any(|f| f.contains("key of digests"));
    assert!(told(&loss.findings), "{loss:?}");
    let fixture = Fixture::on(disk);
    assert!(told(&fixture.report.findings), "{:?}", fixture.report);
    assert_eq!(fixture.contents("a").len(), 40);
    // The new segment has a new key.
    let fixture = fixture.restart();
    assert!(!told(&fixture.report.findings), "{:?}", fixture.report);
}
