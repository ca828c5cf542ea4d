//! Damage costs only the damaged records: checkpoints are written, segments sorted and space given back
//! around it. The gap keeps its name until its records are trimmed or deleted, or until an operator accepts
//! the loss. After that the store works as if it had never been damaged.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::api::config::OnDamage;
use crate::api::finding::Severity;
use crate::api::pace::Control;
use crate::api::record::GapReason;
use crate::api::ticket::block_on;
use crate::base::crc;
use crate::base::ids::Position;
use crate::disk::Disk;
use crate::engine::repair::{accept_loss, examine};
use crate::format::active::Place;
use crate::journal::segment::Segment;
use crate::recovery::Loss;
use crate::tools::verify::Offline;
use crate::upkeep::sorter::{Activity, RunSources};

const LOGS: [&str; 4] = ["a", "b/1", "b/2", "c"];

type Lsns = BTreeMap<String, BTreeSet<u64>>;

/// Where the damage is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Segment,
    Run,
}

/// How the damage is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Read,
    Verify,
    /// A start that has to read all frames.
    Start,
    Sorter,
}

/// How the damage ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Trimmed,
    Deleted,
    Accepted,
}

/// A store, and the records that were appended to it.
struct Store {
    fixture: Fixture,
    records: BTreeMap<String, Vec<Vec<u8>>>,
    first: BTreeMap<String, u64>,
}

impl Store {
    fn new() -> Self {
        Self {
            fixture: Fixture::with(SimDisk::new(), sorting::config()),
            records: BTreeMap::new(),
            first: BTreeMap::new(),
        }
    }

    /// Appends to all logs until this number of segments is full.
    fn fill(&mut self, segments: u64) {
        let begun = self.fixture.core.journal.current().base;
        for number in 0u64.. {
            for (at, log) in LOGS.iter().enumerate() {
                let size = usize::try_from((number * 7919 + at as u64) % 900).unwrap();
                let mut data = number.to_le_bytes().to_vec();
                data.resize(500 + size, 7);
                self.append(log, &data);
            }
            let base = self.fixture.core.journal.current().base;
            if base.since(begun) >= segments * (64 << 10) {
                return;
            }
        }
    }

    fn append(&mut self, log: &str, data: &[u8]) {
        let appended = self.fixture.append(log, data).unwrap();
        let records = self.records.entry(log.to_owned()).or_default();
        let first = appended.appends[0].first_lsn.get();
        assert_eq!(
            first,
            records.len() as u64,
            "no lsn of {log} is given twice"
        );
        records.push(data.to_vec());
        self.fixture.clock.advance(1000);
    }

    fn trim(&mut self, log: &str, before: u64) {
        self.fixture.trim(log, before);
        self.first.insert(log.to_owned(), before);
    }

    fn restart(&mut self, how: impl FnOnce(Fixture) -> Fixture) {
        replace_with(&mut self.fixture, how);
    }

    /// Reads every log, then all logs by a scan. Every record must be right or named. Returns the named lsns.
    fn named(&self, what: &str) -> Lsns {
        let mut named = Lsns::new();
        for (log, records) in &self.records {
            let mut next = self.first.get(log).copied().unwrap_or(0);
            while next < records.len() as u64 {
                match self.fixture.read(log, next) {
                    Ok(page) => {
                        for batch in &page.batches {
                            for (lsn, data) in (batch.first_lsn.get()..).zip(payloads(batch)) {
                                let expected = &records[usize::try_from(lsn).unwrap()];
                                assert_eq!(&data, expected, "{what}: {log} {lsn}");
                            }
                        }
                        assert!(page.next_lsn.get() > next, "{what}: {log} at {next}");
                        next = page.next_lsn.get();
                    }
                    Err(ReadError::Quarantined { from, to, .. }) => {
                        let to = to.expect("a known end").get();
                        let of_log = named.entry(log.clone()).or_default();
                        of_log.extend(from.get()..to);
                        next = to;
                    }
                    Err(error) => panic!("{what}: {log} at {next}: {error}"),
                }
            }
        }
        assert_eq!(self.named_by_scan(what), named, "{what}: by a scan of all");
        named
    }

    fn named_by_scan(&self, what: &str) -> Lsns {
        let mut scan = self.fixture.scan(Selector::All, ScanStart::First, false);
        let (mut named, mut told, mut found) = (Lsns::new(), Lsns::new(), Lsns::new());
        while let Some(chunk) = next_chunk(&mut scan).unwrap().unwrap() {
            for gap in chunk.gaps {
                let log = gap.log.expect("a log").as_str().to_owned();
                let lsns = gap.from.unwrap().get()..gap.to.unwrap().get();
                let into = match gap.reason {
                    GapReason::Quarantined => &mut named,
                    _ => &mut told,
                };
                into.entry(log).or_default().extend(lsns);
            }
            for batch in chunk.batches {
                let lsns = batch.first_lsn.get()..batch.next_lsn().get();
                let of_log = found.entry(batch.log.as_str().to_owned()).or_default();
                of_log.extend(lsns);
            }
        }
        for (log, records) in &self.records {
            let all =
                [&named, &told, &found].map(|lsns| lsns.get(log).cloned().unwrap_or_default());
            let all: BTreeSet<u64> = all.into_iter().flatten().collect();
            let whole: BTreeSet<u64> = (0..records.len() as u64).collect();
            assert_eq!(all, whole, "{what}: nothing of {log} is skipped in silence");
        }
        named
    }

    /// Sorts everything, and checks that nothing holds the sorter back.
    fn sorts(&mut self, what: &str) {
        self.fill(3);
        let steps = self.fixture.sort();
        assert!(steps > 0, "{what}: something is sorted");
        let statistics = self.fixture.core.statistics();
        assert_eq!(statistics.held_back, Vec::<String>::new(), "{what}");
        let left = statistics.unsorted_bytes;
        assert!(
            left <= 2 * (64 << 10),
            "{what}: {left} bytes are not sorted"
        );
        let checkpoints = self.fixture.disk.list("checkpoint").unwrap();
        assert!(!checkpoints.is_empty(), "{what}: a checkpoint is written");
    }

    /// A frame or pack of a log with its file, in the middle of the finished files.
    fn place(&self, at: At, log: &str) -> (Arc<Segment>, Place) {
        let core = &self.fixture.core;
        let id = core.logs.by_name(log).unwrap().id;
        let (runs, segments) = core.journal.runs_and_segments();
        let files = match at {
            At::Run => runs.iter().map(|run| Arc::clone(&run.segment)).collect(),
            At::Segment => segments,
        };
        let file = Arc::clone(&files[files.len() / 2]);
        let index = core.indexes.get(&file).unwrap().unwrap();
        let entries = index.entries(&index.row(id).unwrap());
        let middle = entries.len() / 2;
        let place = entries.from(middle).find(|place| place.frame_len > 400);
        (file, place.unwrap())
    }

    fn flip(&self, file: &Segment, place: &Place, offset: u64) {
        let at = file.offset(place.position) + offset;
        super::flip(
            &self.fixture.disk,
            &file.path(),
            usize::try_from(at).unwrap(),
        );
    }

    /// Evicts the page with the flipped byte from the cache, if its file still exists: copies of the disk
    /// take the cache for the device.
    fn leaves_cache(&self, file: &Segment, at: usize) {
        let disk = &self.fixture.disk;
        if disk.contents(&file.path()).is_some() {
            disk.flip_cached(&file.path(), at, 1);
        }
    }

    /// Returns the worst severity of a verification, the number of lost records, and all findings as text.
    fn verify(&self) -> (Option<Severity>, u64, String) {
        let offline = Offline::open(Arc::new(self.fixture.disk.copy())).unwrap();
        let report = offline.verify(&Control::new(0), &mut |_| {}).unwrap();
        let losses = report.findings.iter();
        let losses = losses.filter(|finding| finding.severity == Severity::Loss);
        let lost = losses.filter_map(|finding| finding.lsns);
        let lost = lost.map(|(from, to)| to.since(from)).sum();
        let worst = report.severity();
        (worst, lost, format!("{:?}", report.findings))
    }

    fn examine(&self) -> Loss {
        let disk: Arc<dyn Disk> = Arc::new(self.fixture.disk.copy());
        examine(&disk, &self.fixture.config).unwrap()
    }

    /// Whether a start that refuses damage fails on a copy of the store.
    fn refuses(&self) -> bool {
        let config = StorageConfig {
            on_damage: OnDamage::Refuse,
            ..self.fixture.config.clone()
        };
        let opened = open(&self.fixture.disk.copy(), &config, &self.fixture.clock);
        matches!(opened, Err(OpenError::Damaged(_)))
    }

    /// Checks that every kind of start names and counts the same lsns.
    fn stays_named(&mut self, expected: &Lsns, what: &str) {
        let count: u64 = expected.values().map(|lsns| lsns.len() as u64).sum();
        for start in ["killed", "clean", "bare"] {
            let what = format!("{what}, {start}");
            self.restart(|fixture| match start {
                "killed" => fixture.restart(),
                "clean" => fixture.restart_cleanly(),
                _ => bare(fixture),
            });
            assert_eq!(&self.named(&what), expected, "{what}");
            let statistics = self.fixture.core.statistics();
            assert_eq!(statistics.quarantined_records, count, "{what}");
            let report = &self.fixture.report;
            let reported = report
                .damage
                .iter()
                .map(|gap| gap.to.unwrap().since(gap.from.unwrap()));
            assert_eq!(reported.sum::<u64>(), count, "{what}: {:?}", report.damage);
            assert_eq!(self.refuses(), count > 0, "{what}");
            let (_, lost, findings) = self.verify();
            assert_eq!(lost, count, "{what}: {findings}");
            let gaps = self.examine().gaps;
            let gaps = gaps
                .iter()
                .map(|gap| gap.to.unwrap().since(gap.from.unwrap()));
            assert_eq!(gaps.sum::<u64>(), count, "{what}");
        }
    }

    fn accept(&mut self) {
        self.restart(|fixture| {
            let Fixture {
                disk,
                config,
                clock,
                core,
                ..
            } = fixture;
            drop(core);
            let store: Arc<dyn Disk> = Arc::new(disk.clone());
            let by = "by a test";
            accept_loss(&store, &config, Arc::clone(&clock) as Arc<dyn Clock>, by).unwrap();
            let (core, report) = open(&disk, &config, &clock).unwrap();
            Fixture {
                disk,
                clock,
                config,
                core,
                report,
            }
        });
    }

    /// Checks that every kind of start reports no damage, and that work goes on.
    fn is_as_new(&mut self, named: &Lsns, what: &str) {
        for start in ["killed", "clean", "bare"] {
            let what = format!("{what}, {start}");
            self.sorts(&what);
            self.restart(|fixture| match start {
                "killed" => fixture.restart(),
                "clean" => fixture.restart_cleanly(),
                _ => bare(fixture),
            });
            assert_eq!(&self.named(&what), named, "{what}");
            assert_eq!(self.fixture.report.damage, [], "{what}");
            let statistics = self.fixture.core.statistics();
            assert_eq!(statistics.quarantined_records, 0, "{what}");
            assert_eq!(statistics.unattributed_damages, 0, "{what}");
            assert!(!self.refuses(), "{what}");
            assert_eq!(self.examine(), Loss::default(), "{what}");
            let (severity, _, findings) = self.verify();
            assert!(severity <= Some(Severity::Note), "{what}: {findings}");
        }
    }
}

/// Starts without derived files.
pub(super) fn bare(fixture: Fixture) -> Fixture {
    for directory in ["index", "checkpoint"] {
        for name in fixture.disk.list(directory).unwrap() {
            let path = format!("{directory}/{name}");
            fixture.disk.remove(&path).unwrap();
        }
    }
    fixture.restart()
}

fn replace_with(fixture: &mut Fixture, how: impl FnOnce(Fixture) -> Fixture) {
    let placeholder = Fixture::new();
    let old = std::mem::replace(fixture, placeholder);
    *fixture = how(old);
}

/// A store with one damaged frame or pack, which was found. Returns the lost lsns too.
fn damaged(at: At, by: By, offset: u64, what: &str) -> (Store, Lsns) {
    let mut store = Store::new();
    store.append("early", b"once");
    store.fill(5);
    if at == At::Run {
        store.fixture.sort();
        store.fill(3);
    }
    // After this restart no record is in memory.
    store.restart(Fixture::restart_cleanly);
    let (file, place) = store.place(at, "b/1");
    let offset = if offset == 0 {
        u64::from(place.frame_len) / 2
    } else {
        offset
    };
    store.flip(&file, &place, offset);
    match by {
        By::Read => {}
        By::Verify => {
            let core = Arc::clone(&store.fixture.core);
            core.verifier
                .verify(None, &Control::new(0), &mut |_| {})
                .unwrap();
        }
        By::Start => store.restart(bare),
        By::Sorter => store.sorts(what),
    }
    let named = store.named(what);
    let lost = &named["b/1"];
    assert!(named.len() == 1 && !lost.is_empty(), "{what}: {named:?}");
    assert!(lost.len() < 70, "{what}: one frame or one pack: {lost:?}");
    (store, named)
}

#[test]
fn checkpoints_and_sorting_go_on_around_damage_and_its_gap_stays_named() {
    for at in [At::Segment, At::Run] {
        for by in [By::Read, By::Verify, By::Start, By::Sorter] {
            // Offset 40 is in the header; 0 stands for the middle of the body.
            for offset in [40, 0] {
                let what = format!("{at:?}, found by {by:?}, offset {offset}");
                let (mut store, named) = damaged(at, by, offset, &what);
                store.stays_named(&named, &format!("{what}, before sorting"));
                store.sorts(&what);
                store.stays_named(&named, &format!("{what}, sorted"));
                store.sorts(&format!("{what}, again"));
                store.stays_named(&named, &format!("{what}, sorted twice"));
            }
        }
    }
}

#[test]
fn damage_that_is_trimmed_deleted_or_accepted_is_forgotten() {
    for at in [At::Segment, At::Run] {
        for (sorted, end) in [
            (false, End::Trimmed),
            (false, End::Deleted),
            (false, End::Accepted),
            (true, End::Trimmed),
            (true, End::Deleted),
            (true, End::Accepted),
        ] {
            let what = format!("{at:?}, sorted {sorted}, {end:?}");
            let (mut store, mut named) = damaged(at, By::Read, 0, &what);
            if sorted {
                store.sorts(&what);
                store.stays_named(&named, &what);
            }
            match end {
                End::Trimmed => {
                    let last = *named["b/1"].last().unwrap();
                    store.trim("b/1", last + 1);
                    named.clear();
                }
                End::Deleted => {
                    let deleted = store.fixture.core.delete_in_turn(target("b/1"));
                    store.fixture.core.turn();
                    drop(deleted);
                    store.records.remove("b/1");
                    named.clear();
                }
                End::Accepted => store.accept(),
            }
            store.is_as_new(&named, &what);
        }
    }
}

#[test]
fn sorter_keeps_records_that_only_the_page_cache_has_wrong() {
    // A run is written again only where damage is known.
    for (at, is_read) in [(At::Segment, false), (At::Segment, true), (At::Run, true)] {
        // Offset 40 is in the header; 0 stands for the middle of the body.
        for offset in [40, 0] {
            let what = format!("{at:?}, read before: {is_read}, offset {offset}");
            let mut store = Store::new();
            store.fill(5);
            if at == At::Run {
                store.fixture.sort();
                store.fill(3);
            }
            store.restart(Fixture::restart_cleanly);
            let (file, place) = store.place(at, "b/1");
            let offset = match offset {
                0 => u64::from(place.frame_len) / 2,
                offset => offset,
            };
            let offset = usize::try_from(file.offset(place.position) + offset).unwrap();
            store.fixture.disk.flip_cached(&file.path(), offset, 1);
            if is_read {
                assert_eq!(store.named(&what), Lsns::new(), "{what}");
            }
            store.sorts(&what);
            assert_eq!(store.named(&what), Lsns::new(), "{what}");
            store.leaves_cache(&file, offset);
            store.is_as_new(&Lsns::new(), &what);
        }
    }
}

/// Kind of reader that meets bytes that are wrong in the page cache only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meets {
    Read,
    Scan,
    Verify,
}

#[test]
fn nothing_counts_as_lost_that_only_the_page_cache_has_wrong() {
    for active in [true, false] {
        for meets in [Meets::Read, Meets::Scan, Meets::Verify] {
            // Offset 40 is in the header; 0 stands for the middle of the body.
            for offset in [40, 0] {
                let what = format!("active: {active}, {meets:?}, offset {offset}");
                let mut store = Store::new();
                store.fill(4);
                store.append("b/1", &[1; 900]);
                // No later write touches its pages.
                for _ in 0..3 {
                    store.append("a", &[2; 5000]);
                }
                store.fixture.core.idle();
                if !active {
                    store.fixture.sort();
                }
                let core = Arc::clone(&store.fixture.core);
                let (file, place) = match active {
                    true => {
                        let file = core.journal.current();
                        let log = core.logs.by_name("b/1").unwrap();
                        let state = log.state.read();
                        let places = state.places.within(file.base, file.limit());
                        (file, *places.last().unwrap())
                    }
                    false => store.place(At::Run, "b/1"),
                };
                let offset = match offset {
                    0 => u64::from(place.frame_len) / 2,
                    offset => offset,
                };
                let at = usize::try_from(file.offset(place.position) + offset).unwrap();
                store.fixture.disk.flip_cached(&file.path(), at, 1);
                core.journal.recent.clear();
                match meets {
                    Meets::Read => {
                        let page = store.fixture.read("b/1", place.first_lsn.get()).unwrap();
                        assert_eq!(page.batches[0].first_lsn, place.first_lsn, "{what}");
                    }
                    Meets::Scan => {
                        assert_eq!(store.named_by_scan(&what), Lsns::new(), "{what}");
                    }
                    Meets::Verify => {
                        core.verifier
                            .verify(None, &Control::new(0), &mut |progress| {
                                assert_eq!(progress.findings, [], "{what}");
                            })
                            .unwrap();
                    }
                }
                drop(core);
                assert_eq!(store.named(&what), Lsns::new(), "{what}");
                assert_eq!(store.fixture.core.statistics().quarantined_records, 0);
                store.sorts(&what);
                assert_eq!(store.named(&what), Lsns::new(), "{what}");
                store.leaves_cache(&file, at);
                store.is_as_new(&Lsns::new(), &what);
            }
        }
    }
}

#[test]
fn verification_believes_no_chain_that_only_the_page_cache_has_wrong() {
    use crate::format::frame;
    let mut store = Store::new();
    store.fill(4);
    store.append("b/1", &[1; 900]);
    // No later write touches its pages.
    for _ in 0..3 {
        store.append("a", &[2; 5000]);
    }
    store.fixture.core.idle();
    let core = Arc::clone(&store.fixture.core);
    let (file, disk) = (core.journal.current(), store.fixture.disk.clone());
    let log = core.logs.by_name("b/1").unwrap();
    let places = log
        .state
        .read()
        .places
        .within(file.base, file.limit())
        .to_vec();
    let place = places.last().unwrap();
    let at = usize::try_from(file.offset(place.position)).unwrap();
    // A frame that verifies, and that does not follow from the one before it.
    let bytes = disk.contents(&file.path()).unwrap();
    let header = frame::decode_header(&bytes[at..], file.life.salt).unwrap();
    let mut other = bytes[at..at + header.header_len as usize].to_vec();
    other[60] ^= 1;
    let crc = frame::salted_crc32c(file.life.salt, &other[4..]);
    other[..4].copy_from_slice(&crc.to_le_bytes());
    for (offset, byte) in (at..).zip(&other) {
        disk.flip_cached(&file.path(), offset, bytes[offset] ^ byte);
    }
    let cached = disk.contents(&file.path()).unwrap();
    assert!(frame::decode_header(&cached[at..], file.life.salt).is_some());
    core.journal.recent.clear();
    core.verifier
        .verify(None, &Control::new(0), &mut |progress| {
            assert_eq!(progress.findings, []);
        })
        .unwrap();
    assert_eq!(core.statistics().quarantined_records, 0);
    assert_eq!(store.named("a chain"), Lsns::new());
}

#[test]
fn backup_saves_no_bytes_that_only_the_page_cache_has_wrong() {
    for at in [At::Segment, At::Run] {
        let what = format!("{at:?}");
        let mut store = Store::new();
        store.fill(5);
        if at == At::Run {
            store.fixture.sort();
            store.fill(3);
        }
        store.restart(Fixture::restart_cleanly);
        let (file, place) = store.place(at, "b/1");
        let offset = file.offset(place.position) + u64::from(place.frame_len) / 2;
        let offset = usize::try_from(offset).unwrap();
        store.fixture.disk.flip_cached(&file.path(), offset, 1);
        let shelf = backups::Shelf::default();
        let (manifest, _) = shelf.save(&store.fixture, || {}).unwrap();
        assert_eq!(manifest.damage, [], "{what}");
        let disk = shelf.restore(&manifest, None);
        store.restart(|fixture| {
            drop(fixture);
            Fixture::with(disk, sorting::config())
        });
        assert_eq!(store.named(&what), Lsns::new(), "{what}");
        store.is_as_new(&Lsns::new(), &what);
    }
}

#[test]
fn a_frame_that_is_bad_on_the_device_is_read_from_there_once() {
    let mut store = Store::new();
    store.fill(1);
    store.append("b/1", &[1; 900]);
    for _ in 0..3 {
        store.append("a", &[2; 5000]);
    }
    let core = Arc::clone(&store.fixture.core);
    let file = core.journal.current();
    let log = core.logs.by_name("b/1").unwrap();
    let places = log
        .state
        .read()
        .places
        .within(file.base, file.limit())
        .to_vec();
    let place = places.last().unwrap();
    store.flip(&file, place, u64::from(place.frame_len) / 2);
    core.journal.recent.clear();
    let disk = store.fixture.disk.clone();
    let read_again = |store: &Store| {
        disk.trace_calls(true);
        let named = store.named("a bad frame");
        assert_eq!(named["b/1"], BTreeSet::from([place.first_lsn.get()]));
        let (_, calls) = disk.trace();
        let again = calls.iter().filter(|call| call.contains("ReadFromDevice"));
        again.count()
    };
    assert_eq!(read_again(&store), 1);
    assert_eq!(read_again(&store), 0);
}

#[test]
fn lsns_below_a_trim_or_a_cursor_are_never_given_out_again() {
    for by in ["trim", "cursor"] {
        for only_told in [false, true] {
            let what = format!("{by}, only a directory tells of it: {only_told}");
            let fixture = Fixture::new();
            fixture.append("other", b"first").unwrap();
            for _ in 0..9 {
                fixture.append("log", b"record").unwrap();
            }
            let place_of = |log: &str| {
                let log = fixture.core.logs.by_name(log).unwrap();
                let state = log.state.read();
                *state.places.from(0).last().unwrap()
            };
            let lost = place_of("log");
            assert_eq!(lost.first_lsn, Lsn::new(8));
            // The directory in this frame describes the lost record, and is lost too.
            fixture.append("other", b"lost").unwrap();
            let mut to = place_of("other").end();
            match by {
                "trim" => fixture.trim("log", 9),
                _ => drop(fixture.commit(cursors::to("log", "cursor", 9)).unwrap()),
            }
            if only_told {
                let log = fixture.core.logs.by_name("log").unwrap();
                to = log.state.read().last_end;
            }
            for _ in 0..3 {
                fixture
                    .append("other", b"proves that all of it was flushed")
                    .unwrap();
            }
            let file = fixture.core.journal.current();
            let range = [lost.position, to].map(|at| usize::try_from(file.offset(at)).unwrap());
            let path = file.path();
            drop(file);
            let Fixture {
                disk,
                core,
                config,
                clock,
                ..
            } = fixture;
            drop(core);
            let mut bytes = disk.contents(&path).unwrap();
            bytes[range[0]..range[1]].fill(7);
            disk.replace(&path, bytes);
            let store: Arc<dyn Disk> = Arc::new(disk.clone());
            let time = Arc::clone(&clock) as Arc<dyn Clock>;
            accept_loss(&store, &config, time, "by a test").unwrap();
            for _ in 0..2 {
                let mut fixture = Fixture::with(disk.clone(), config.clone());
                let appended = fixture.append("log", b"new").unwrap();
                let lsn = appended.appends[0].first_lsn;
                assert!(lsn >= Lsn::new(9), "{what}: {lsn}");
                fixture = bare(fixture);
                let page = fixture.read("log", lsn.get()).unwrap();
                assert_eq!(payloads(&page.batches[0]), [b"new"], "{what}");
                let before = fixture.read("log", 8);
                match by {
                    "trim" => assert!(matches!(before, Err(ReadError::Trimmed { .. }))),
                    _ => assert!(matches!(before, Err(ReadError::Quarantined { .. }))),
                }
            }
        }
    }
}

#[test]
fn a_deleted_log_is_made_again_although_damage_had_hit_it() {
    let (mut store, _) = damaged(At::Segment, By::Read, 0, "a deletion");
    let deleted = store.fixture.core.delete_in_turn(target("b/1"));
    store.fixture.core.turn();
    drop(deleted);
    store.records.remove("b/1");
    store.append("b/1", b"a new life");
    store.is_as_new(&Lsns::new(), "a deletion");
    assert_eq!(store.fixture.contents("b/1")[0], b"a new life");
}

#[test]
fn a_missing_segment_is_sorted_around_and_its_logs_stay_unchanged() {
    let mut store = Store::new();
    store.fill(2);
    store.append("gone", b"soon");
    store.fill(2);
    let before = store.fixture.core.journal.current();
    // One segment holds all facts of log `only`, and the deletion of log `gone`.
    let there = |fixture: &Fixture| fixture.core.journal.current().base == before.base;
    store.append("only", b"here");
    let deleted = store.fixture.core.delete_in_turn(target("gone"));
    store.fixture.core.turn();
    drop(deleted);
    store.records.remove("gone");
    assert!(there(&store.fixture), "in one segment");
    store.fill(3);
    store.restart(Fixture::restart_cleanly);
    store.fixture.disk.remove(&before.path()).unwrap();
    store.restart(bare);
    let named = store.named("gone");
    assert_eq!(named["only"], BTreeSet::from([0]));
    store.stays_named(&named, "before sorting");
    store.sorts("a missing segment");
    store.stays_named(&named, "sorted");
    store.append("only", b"there");
    let gone = store.fixture.read("gone", 0);
    assert!(
        matches!(gone, Err(ReadError::Target(TargetError::NotFound { .. }))),
        "{gone:?}"
    );
    store.sorts("appended");
    store.stays_named(&named, "appended");
    store.accept();
    store.is_as_new(&named, "accepted");
}

#[test]
fn log_of_a_missing_segment_takes_appends_while_a_run_is_built() {
    let mut store = Store::new();
    // One step takes the first 16 segments.
    let config = StorageConfig {
        sorter_step_bytes: 8 << 20,
        ..sorting::config()
    };
    store.fixture = Fixture::with(SimDisk::new(), config);
    store.fill(4);
    let before = store.fixture.core.journal.current();
    store.append("only", b"here");
    store.fill(16);
    store.restart(Fixture::restart_cleanly);
    store.fixture.disk.remove(&before.path()).unwrap();
    store.restart(bare);
    let named = store.named("gone");
    store.fill(3);
    let fixture = &store.fixture;
    let records = store.records.get_mut("only").unwrap();
    let step = fixture
        .core
        .sorter
        .sort_step(RunSources::Segments, Activity::AtRest, &mut |_| {
            let data = (records.len() as u64).to_le_bytes().to_vec();
            let appended = fixture.append("only", &data).unwrap();
            let first = appended.appends[0].first_lsn.get();
            assert_eq!(first, records.len() as u64);
            records.push(data);
            Ok(())
        });
    assert!(step.unwrap(), "something is sorted");
    assert!(records.len() > 2, "it took appends");
    assert_eq!(fixture.runs(), 1);
    assert!(fixture.core.journal.sorted_end() > before.base);
    store.stays_named(&named, "sorted while it was appended to");
    store.fill(16);
    assert!(store.fixture.sort() > 0);
    store.stays_named(&named, "sorted again");
}

#[test]
fn a_start_reads_life_blocks_and_links_from_the_device_too() {
    // Both life blocks, the header of the link, its body.
    for offsets in [&[10, 4106][..], &[8192 + 40], &[8192 + 70]] {
        let what = format!("{offsets:?}");
        let mut store = Store::new();
        store.fill(5);
        store.restart(Fixture::restart_cleanly);
        let (file, _) = store.place(At::Segment, "b/1");
        for offset in offsets {
            store.fixture.disk.flip_cached(&file.path(), *offset, 1);
        }
        store.restart(bare);
        assert_eq!(
            store.fixture.report.findings,
            Vec::<String>::new(),
            "{what}"
        );
        assert_eq!(store.named(&what), Lsns::new(), "{what}");
        store.sorts(&what);
        store.is_as_new(&Lsns::new(), &what);
    }
}

#[test]
fn no_run_is_made_while_the_file_of_a_source_is_gone() {
    for back in ["while it runs", "before a start", "never"] {
        let what = format!("back {back}");
        let mut store = Store::new();
        store.fill(5);
        store.restart(Fixture::restart_cleanly);
        let (file, _) = store.place(At::Segment, "b/1");
        let (id, path) = (file.life.id, file.path());
        drop(file);
        let bytes = store.fixture.disk.contents(&path).unwrap();
        store.fixture.disk.remove(&path).unwrap();
        store.fill(3);
        store.fixture.sort();
        let runs = store.fixture.core.journal.runs();
        assert!(runs.iter().all(|run| run.head.last < id), "{what}");
        drop(runs);
        let held_back = store.fixture.core.statistics().held_back;
        assert!(held_back[0].starts_with(&path), "{what}: {held_back:?}");
        if back != "never" {
            store.fixture.disk.replace(&path, bytes);
        }
        if back != "while it runs" {
            store.restart(Fixture::restart);
        }
        let named = store.named(&what);
        assert_eq!(named.is_empty(), back != "never", "{what}");
        store.sorts(&what);
        store.stays_named(&named, &what);
    }
}

#[test]
fn a_segment_that_is_put_back_after_a_run_was_made_is_kept() {
    // Behind an earlier run, and among the segments of one.
    for behind in [true, false] {
        let what = format!("behind a run: {behind}");
        let mut store = Store::new();
        store.fill(5);
        if behind {
            store.fixture.sort();
            store.fill(3);
        }
        store.restart(Fixture::restart_cleanly);
        let core = Arc::clone(&store.fixture.core);
        let (runs, segments) = core.journal.runs_and_segments();
        assert_eq!(runs.is_empty(), !behind, "{what}");
        let path = segments[usize::from(!behind)].path();
        drop((core, runs, segments));
        let bytes = store.fixture.disk.contents(&path).unwrap();
        store.fixture.disk.remove(&path).unwrap();
        store.restart(Fixture::restart);
        let named = store.named(&what);
        assert!(!named.is_empty(), "{what}");
        store.sorts(&what);
        store.stays_named(&named, &what);
        let kept = path.replace("journal/", "quarantine/");
        for start in ["killed", "bare"] {
            let what = format!("{what}, {start}");
            store.fixture.disk.replace(&path, bytes.clone());
            store.restart(|fixture| match start {
                "killed" => fixture.restart(),
                _ => bare(fixture),
            });
            let findings = &store.fixture.report.findings;
            assert!(
                findings.iter().any(|f| f.starts_with(&path)),
                "{what}: {findings:?}"
            );
            let disk = &store.fixture.disk;
            assert_eq!(disk.contents(&path), None, "{what}");
            assert_eq!(disk.contents(&kept).as_ref(), Some(&bytes), "{what}");
            store.stays_named(&named, &what);
        }
        let all = store.fixture.disk.list("quarantine").unwrap();
        let segments = all.iter().filter(|name| name.ends_with(".seg"));
        assert_eq!(segments.count(), 2, "{what}: {all:?}");
        store.accept();
        store.is_as_new(&named, &what);
    }
}

#[test]
fn damaged_links_seals_orders_and_images_hold_nothing_back() {
    use crate::format::frame;
    use crate::format::frame::FrameKind;
    for (at, kind) in [
        (At::Segment, FrameKind::Link),
        (At::Segment, FrameKind::Seal),
        (At::Run, FrameKind::Order),
        (At::Run, FrameKind::Images),
        (At::Run, FrameKind::Run),
    ] {
        let what = format!("{kind:?}");
        let mut store = Store::new();
        store.fill(5);
        if at == At::Run {
            store.fixture.sort();
            store.fill(3);
        }
        store.restart(Fixture::restart_cleanly);
        let (file, _) = store.place(at, "b/1");
        let path = file.path();
        let mut bytes = store.fixture.disk.contents(&path).unwrap();
        let mut offset = 8192;
        while let Some(header) = frame::decode_header(&bytes[offset..], file.life.salt) {
            if header.kind == kind {
                break;
            }
            offset += usize::try_from(header.frame_len()).unwrap();
        }
        bytes[offset + 70] ^= 1;
        store.fixture.disk.replace(&path, bytes);
        let core = &store.fixture.core;
        core.verifier
            .verify(None, &Control::new(0), &mut |_| {})
            .unwrap();
        store.sorts(&what);
        assert_eq!(store.named(&what), Lsns::new());
        store.is_as_new(&Lsns::new(), &what);
    }
}

#[test]
fn a_damaged_index_below_a_checkpoint_holds_nothing_back() {
    let mut store = Store::new();
    store.fill(5);
    store.restart(Fixture::restart_cleanly);
    let (file, _) = store.place(At::Segment, "b/1");
    let index = crate::index::index_path(file.life.id);
    flip(&store.fixture.disk, &index, 100);
    store.restart(Fixture::restart_cleanly);
    store.sorts("a damaged index");
    assert_eq!(store.named("a damaged index"), Lsns::new());
    store.is_as_new(&Lsns::new(), "a damaged index");
}

#[test]
fn damage_found_for_want_of_an_index_stays_named_when_the_index_is_back() {
    let what = "found for want of an index";
    let mut store = Store::new();
    store.fill(5);
    store.restart(Fixture::restart_cleanly);
    let (file, place) = store.place(At::Segment, "b/1");
    store.flip(&file, &place, u64::from(place.frame_len) / 2);
    let index = crate::index::index_path(file.life.id);
    store.fixture.disk.remove(&index).unwrap();
    store.restart(Fixture::restart);
    // Only this start reads the segment. It ends before a checkpoint is due.
    let core = &store.fixture.core;
    core.indexer.work(crate::upkeep::indexer::Wanted::WhenDue);
    assert!(store.fixture.disk.contents(&index).is_some(), "{what}");
    let count = core.statistics().quarantined_records;
    assert!(count > 0, "{what}");
    store.restart(Fixture::restart);
    assert_eq!(
        store.fixture.core.statistics().quarantined_records,
        count,
        "{what}"
    );
    let named = store.named(what);
    store.stays_named(&named, what);
    store.sorts(what);
    store.stays_named(&named, what);
}

#[test]
fn restored_store_goes_on_around_damage_until_it_is_trimmed() {
    for at in [At::Segment, At::Run] {
        let what = format!("{at:?}, restored");
        let (mut store, named) = damaged(at, By::Read, 0, &what);
        let shelf = backups::Shelf::default();
        let (manifest, _) = shelf.save(&store.fixture, || {}).unwrap();
        let disk = shelf.restore(&manifest, None);
        store.restart(|fixture| {
            drop(fixture);
            Fixture::with(disk, sorting::config())
        });
        assert_eq!(store.named(&what), named, "{what}");
        store.sorts(&what);
        store.stays_named(&named, &what);
        let last = *named["b/1"].last().unwrap();
        store.trim("b/1", last + 1);
        store.is_as_new(&Lsns::new(), &what);
    }
}

#[test]
fn loss_that_nothing_attributes_holds_back_until_it_is_accepted() {
    let mut store = Store::new();
    store.fill(2);
    let tails: Vec<usize> = LOGS.iter().map(|log| store.records[*log].len()).collect();
    store.restart(Fixture::restart);
    let last = store.fixture.core.journal.current();
    let lost: Vec<Vec<u8>> = LOGS.iter().map(|_| vec![1; 9000]).collect();
    for (log, data) in LOGS.iter().zip(&lost) {
        store.fixture.append(log, data).unwrap();
    }
    store.restart(|fixture| {
        let Fixture {
            disk,
            core,
            config,
            clock,
            ..
        } = fixture;
        drop(core);
        disk.remove(&last.path()).unwrap();
        let (core, report) = open(&disk, &config, &clock).unwrap();
        Fixture {
            disk,
            clock,
            config,
            core,
            report,
        }
    });
    let held_back = store.fixture.core.statistics().held_back;
    assert!(
        held_back[0].contains("wald repair --accept-loss"),
        "{held_back:?}"
    );
    assert_eq!(store.fixture.sort(), 0);
    store.accept();
    let now: Vec<usize> = LOGS.iter().map(|log| store.records[*log].len()).collect();
    assert_eq!(now, tails);
    store.is_as_new(&Lsns::new(), "accepted");
}

#[test]
fn a_run_that_cannot_be_used_holds_back_until_its_loss_is_accepted() {
    for gone in [true, false] {
        let what = format!("gone: {gone}");
        let mut store = Store::new();
        for _ in 0..3 {
            store.fill(4);
            store.fixture.core.sort_in_turn().unwrap();
        }
        let runs = store.fixture.core.journal.runs();
        assert!(runs.len() > 1, "{what}: {}", runs.len());
        let path = runs[runs.len() - 1].segment.path();
        drop(runs);
        store.restart(|fixture| {
            match gone {
                true => fixture.disk.remove(&path).unwrap(),
                false => fixture.disk.replace(&path, vec![7; 9000]),
            }
            bare(fixture)
        });
        let held_back = store.fixture.core.statistics().held_back;
        assert!(!held_back.is_empty(), "{what}");
        assert_eq!(store.fixture.sort(), 0, "{what}");
        store.accept();
        let named = store.named(&what);
        assert!(!named.is_empty(), "{what}");
        store.is_as_new(&named, &what);
    }
}

#[test]
fn space_comes_back_around_a_sector_that_cannot_be_read() {
    for is_wanted in [false, true] {
        let what = format!("its records are wanted: {is_wanted}");
        let mut store = Store::new();
        store.fill(5);
        store.restart(Fixture::restart_cleanly);
        let (file, place) = store.place(At::Segment, "b/1");
        let (path, at) = (file.path(), file.offset(place.position));
        drop(file);
        let at = usize::try_from(at + u64::from(place.frame_len) / 2).unwrap();
        let disk = store.fixture.disk.clone();
        disk.set_unreadable(&path, at..at + 1);
        let shelf = backups::Shelf::default();
        let (manifest, _) = shelf.save(&store.fixture, || {}).unwrap();
        assert!(!manifest.damage.is_empty(), "{what}: the backup names it");
        let trim_all = |store: &mut Store, logs: &[&str]| {
            for log in logs {
                let tail = store.records[*log].len() as u64;
                store.trim(log, tail);
            }
        };
        let mut named = Lsns::new();
        if is_wanted {
            named = store.named(&what);
            assert!(!named["b/1"].is_empty(), "{what}");
        } else {
            trim_all(&mut store, &LOGS);
        }
        store.sorts(&what);
        assert_eq!(disk.contents(&path), None, "{what}: the file is gone");
        let before = sorting::bytes_of(&disk);
        for round in 0..4 {
            for _ in 0..400 {
                store.append("dead", &[9; 2000]);
            }
            trim_all(&mut store, &["dead"]);
            store.fixture.sort();
            let now = sorting::bytes_of(&disk);
            // Two segments wait for a checkpoint, and the newest one is never sorted.
            let most = before + 4 * (64 << 10);
            assert!(now <= most, "{what}, round {round}: {before}, then {now}");
        }
        match is_wanted {
            true => store.stays_named(&named, &what),
            false => store.is_as_new(&named, &what),
        }
    }
}

#[test]
fn index_of_a_run_without_a_name_does_not_show_a_missing_segment() {
    use crate::format::frame;
    use crate::index::index_path;
    let what = "an index before its run";
    let mut store = Store::new();
    store.fill(5);
    store.fixture.sort();
    let core = Arc::clone(&store.fixture.core);
    let of_run = index_path(core.journal.runs()[0].id());
    let mut index = store.fixture.disk.contents(&of_run).unwrap();
    // The sorter begins another run, appends go on, and a kill comes before the run has its name.
    let id = core.pool.draw_id();
    store.fill(6);
    let (_, segments) = core.journal.runs_and_segments();
    let behind = segments.iter().find(|segment| segment.life.id > id);
    let behind = Arc::clone(behind.expect("a segment that began after the run"));
    drop((core, segments));
    index[16..24].copy_from_slice(&id.get().to_le_bytes());
    index[32..40].copy_from_slice(&crate::format::address::base_of(id).get().to_le_bytes());
    let end = index.len() - 4;
    let crc = crc::crc32c(&index[..end]);
    index[end..].copy_from_slice(&crc.to_le_bytes());
    let disk = store.fixture.disk.clone();
    disk.replace(&index_path(id), index);
    // The link is damaged, and the directory in one of the next frames, which repeats the link.
    let mut bytes = disk.contents(&behind.path()).unwrap();
    let mut offset = 8192;
    for _ in 0..3 {
        let header = frame::decode_header(&bytes[offset..], behind.life.salt).unwrap();
        bytes[offset + 40] ^= 1;
        offset += usize::try_from(header.frame_len()).unwrap();
    }
    disk.replace(&behind.path(), bytes);
    for name in disk.list("checkpoint").unwrap() {
        disk.remove(&format!("checkpoint/{name}")).unwrap();
    }
    store.restart(Fixture::restart);
    let report = &store.fixture.report;
    let broken = report.findings.iter();
    let broken = broken.filter(|finding| finding.contains("the link of segment"));
    assert_eq!(broken.count(), 1, "{what}: {:?}", report.findings);
    let held_back = store.fixture.core.statistics().held_back;
    assert_eq!(held_back, Vec::<String>::new(), "{:?}", report.findings);
    let named = store.named(what);
    store.sorts(what);
    store.stays_named(&named, what);
}

#[test]
#[allow(clippy::disallowed_methods, reason = "threads and time of a test")]
fn idle_store_gets_a_checkpoint_again_after_damage_was_read() {
    use crate::api::engine::ReadLogs as _;
    let what = "an idle store";
    let mut store = Store::new();
    store.fill(10);
    store.restart(Fixture::restart_cleanly);
    let (file, place) = store.place(At::Segment, "b/1");
    store.flip(&file, &place, u64::from(place.frame_len) / 2);
    let lost = place.first_lsn.get()..place.next_lsn().get();
    store.restart(|fixture| {
        let Fixture {
            disk, config, core, ..
        } = fixture;
        drop(core);
        // The indexing thread writes one as soon as it runs. Later only damage can end its rest.
        let checkpoints = || crate::index::checkpoint::list(&disk).unwrap();
        for id in checkpoints() {
            disk.remove(&crate::index::checkpoint::path(id)).unwrap();
        }
        let clock = Arc::new(crate::base::clock::SystemClock);
        let on: Arc<dyn Disk> = Arc::new(disk.clone());
        // The damage stays in its place.
        let idle = StorageConfig {
            sorter_enabled: false,
            ..config.clone()
        };
        let opened = crate::engine::LocalEngine::open(on, idle, clock, Arc::new(NoObserver));
        let (engine, _) = opened.unwrap();
        let wait_until = |is_done: &dyn Fn() -> bool| {
            let until = Instant::now() + Duration::from_secs(60);
            while !is_done() {
                assert!(Instant::now() < until, "no checkpoint within a minute");
                std::thread::yield_now();
            }
        };
        wait_until(&|| !checkpoints().is_empty());
        let request = read_request("b/1", ReadStart::Lsn(place.first_lsn));
        let read = block_on(engine.read(request));
        assert!(
            matches!(read, Err(ReadError::Quarantined { .. })),
            "{read:?}"
        );
        let index = crate::index::index_path(file.life.id);
        wait_until(&|| !checkpoints().is_empty() && disk.contents(&index).is_some());
        drop(engine);
        Fixture::with(disk, config)
    });
    let named = store.named(what);
    assert_eq!(named, Lsns::from([("b/1".to_owned(), lost.collect())]));
    store.stays_named(&named, what);
}

/// The segment of the journal with the first damage.
fn hit_segment(store: &Store) -> Arc<Segment> {
    let core = &store.fixture.core;
    let all = core
        .damages
        .between(Position::ZERO, Position::new(u64::MAX));
    core.journal.segment_at(all[0].position).unwrap()
}

#[test]
fn file_with_damage_that_an_index_names_gets_no_new_life() {
    let what = "a damaged file";
    let (mut store, named) = damaged(At::Segment, By::Read, 0, what);
    store.restart(Fixture::restart_cleanly);
    let hit = hit_segment(&store);
    assert_eq!(*hit.holes.read(), [], "the start went by the index");
    let disk = store.fixture.disk.clone();
    let (path, id) = (hit.path(), hit.life.id);
    let bytes = disk.contents(&path).unwrap();
    drop(hit);
    disk.trace_calls(true);
    store.sorts(what);
    assert!(disk.contents(&path).is_none());
    let begins_anew = |calls: &[String], id: &str| {
        let mut moves = calls.iter().filter(|call| call.contains("pool/"));
        moves.any(|call| call.contains(&format!("journal/{id}")))
    };
    let (_, calls) = disk.trace();
    assert!(begins_anew(&calls, ""), "others do: {calls:?}");
    assert!(!begins_anew(&calls, &id.to_string()), "{calls:?}");
    // A crash before the file was removed.
    disk.replace(&path, bytes);
    store.restart(Fixture::restart);
    assert!(disk.contents(&path).is_none());
    let (_, calls) = disk.trace();
    assert!(!begins_anew(&calls, &id.to_string()), "{calls:?}");
    store.stays_named(&named, what);
}

#[test]
fn scan_over_known_damage_leaves_index_and_checkpoints() {
    for at in [At::Segment, At::Run] {
        // The byte is in the header: a scan finds the next one.
        let what = format!("{at:?}");
        let (mut store, named) = damaged(at, By::Read, 40, &what);
        let derived = |store: &Store| {
            let disk = &store.fixture.disk;
            let of = |directory: &str| disk.list(directory).unwrap();
            let all = of("index").into_iter().chain(of("checkpoint"));
            let served = all.filter(|name| !name.ends_with(".old"));
            served.collect::<Vec<_>>()
        };
        for start in 0..3 {
            store.restart(Fixture::restart_cleanly);
            let before = derived(&store);
            assert_eq!(store.named_by_scan(&what), named, "{what}, start {start}");
            assert_eq!(derived(&store), before, "{what}, start {start}");
        }
    }
}

#[test]
fn scan_walks_a_damaged_run_once_and_remembers_its_losses() {
    let what = "a pack that no index lists";
    let (mut store, named) = damaged(At::Run, By::Start, 40, what);
    // This process remembers no walk.
    store.restart(bare);
    let core = Arc::clone(&store.fixture.core);
    let runs = core.journal.runs();
    let hit = runs.iter().find(|run| !run.segment.holes.read().is_empty());
    let bytes = hit.expect("a damaged run").segment.life.size;
    let read = || {
        let (_, before) = store.fixture.disk.reads();
        assert_eq!(store.named_by_scan(what), named);
        store.fixture.disk.reads().1 - before
    };
    let (first, second) = (read(), read());
    assert!(
        second + bytes <= first,
        "{first} bytes, then {second}; the run has {bytes}"
    );
}
