//! Random histories. After each run in them, the test asks: is every answer the same with any index files
//! and checkpoints?
//!
//! A history has records, batches, producers and their repeats, fences, cursors, trims, retention, settings,
//! deleted and created logs, records in memory only, rolls, full disks. Runs end cleanly, with a kill or with
//! a power cut. Then copies of the disk are started: with all files, with no file of the indexer, and with
//! some of these missing, damaged, or from earlier in the history. All copies must answer alike.
//!
//! `WALD_HISTORIES` sets the number of histories, `WALD_SEED` runs one seed only.

use std::collections::BTreeMap;
use std::fmt::Write;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::api::record::{Compression, CursorCommit, LogConfig, Producer, Retention, SyncMode};
use crate::base::ids::Name;
use crate::disk::Disk;
use crate::journal::committer::CursorChange;

const LOGS: [&str; 6] = ["a", "b", "c/1", "c/2", "d", "e"];

struct History {
    random: StdRng,
    disk: SimDisk,
    clock: Arc<TestClock>,
    config: StorageConfig,
    /// Contents of all files that the indexer wrote, at any time.
    written: BTreeMap<String, Vec<Vec<u8>>>,
    cursors: Vec<(Selector, Bytes)>,
    times: Vec<i64>,
    counts: Counts,
}

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    starts: u64,
    cut_starts: u64,
    segments: u64,
    checkpoints: u64,
    answers: u64,
    remembered: u64,
    cursors: u64,
    sorted: u64,
}

fn is_derived(path: &str) -> bool {
    path.ends_with(".idx") || path.ends_with(".ckp")
}

impl History {
    fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let config = StorageConfig {
            pool_segments: random.random_range(1..3),
            max_batch_bytes: 20_000,
            buffer_bytes: 9000,
            producer_window: random.random_range(1..90),
            sorter_enabled: true,
            sorter_step_bytes: random.random_range(1..6) * (100 << 10),
            ..small_config()
        };
        Self {
            random,
            disk: SimDisk::new(),
            clock: TestClock::new(),
            config,
            written: BTreeMap::new(),
            cursors: Vec::new(),
            times: Vec::new(),
            counts: Counts::default(),
        }
    }

    fn chance(&mut self, of_100: u32) -> bool {
        self.random.random_range(0..100) < of_100
    }

    fn any_log(&mut self) -> &'static str {
        // Some logs are rarely touched.
        let index = self.random.random_range(0..LOGS.len() * 3);
        LOGS[if index < LOGS.len() { index } else { index % 3 }]
    }

    fn derived(&self) -> Vec<String> {
        let of = |directory: &str| {
            let names = self.disk.list(directory).unwrap();
            let paths = names.into_iter().map(|name| format!("{directory}/{name}"));
            paths.filter(|path| is_derived(path)).collect::<Vec<_>>()
        };
        let mut paths = of("index");
        paths.extend(of("checkpoint"));
        paths
    }

    fn run(&mut self) {
        for _ in 0..self.random.random_range(2..6u32) {
            let core = self.start();
            if self.chance(20) {
                self.disk.crash_after(self.random.random_range(1..400));
            }
            self.work(&core);
            let mut sure = BTreeMap::new();
            if !self.disk.is_crashed() {
                self.take_cursors(&core);
                sure = self.durable_state(&core);
            }
            let ending = self.random.random_range(0..4);
            if ending < 2 {
                assert!(core.close().is_ok() || self.disk.is_crashed());
            }
            self.counts.segments += core.journal.segments.read().len() as u64;
            drop(core);
            if ending == 3 || self.disk.is_crashed() {
                self.disk.crash(self.random.random());
            }
            self.counts.checkpoints += self.disk.list("checkpoint").unwrap().len() as u64;
            for path in self.derived() {
                let bytes = self.disk.contents(&path).unwrap();
                let versions = self.written.entry(path).or_default();
                if versions.last() != Some(&bytes) {
                    versions.push(bytes);
                }
            }
            // The copy drops the planned cut that did not come.
            self.disk = self.disk.copy();
            self.compare(&sure);
        }
    }

    /// Starts. Sometimes a power cut comes meanwhile.
    fn start(&mut self) -> Arc<Core> {
        loop {
            self.counts.starts += 1;
            if self.chance(30) {
                self.disk.crash_after(self.random.random_range(1..60));
            }
            if let Ok((core, report)) = open(&self.disk, &self.config, &self.clock) {
                assert_eq!(report.findings, Vec::<String>::new());
                assert_eq!(report.damage, []);
                return core;
            }
            assert!(self.disk.is_crashed());
            self.counts.cut_starts += 1;
            self.disk.crash(self.random.random());
        }
    }

    /// The durable state, which no ending may change.
    fn durable_state(&self, core: &Arc<Core>) -> BTreeMap<String, (u64, u64, Vec<Vec<u8>>)> {
        let mut state = BTreeMap::new();
        for log in core.logs.all() {
            let durable = core.journal.durable();
            if log.state.read().created_end > durable {
                continue;
            }
            let name = log.name.as_str().to_owned();
            let first = log.state.read().first(durable);
            state.insert(
                name.clone(),
                (log.id.get(), first.get(), from(core, &name, first)),
            );
        }
        state
    }

    fn take_cursors(&mut self, core: &Arc<Core>) {
        for selector in [Selector::All, one(self.any_log())] {
            let request = ScanRequest {
                selector: selector.clone(),
                start: ScanStart::First,
                until_lsn: None,
                max_records: u64::from(self.random.random_range(1..60u32)),
                follow: false,
                visibility: Some(Visibility::Written),
                chunk_bytes: 64 << 10,
            };
            let Ok(mut scan) = read::scan::begin(&core.store, &Arc::default(), request) else {
                continue;
            };
            while let Some(Ok(Some(_))) = next_chunk(&mut scan) {}
            self.cursors.push((selector, scan.cursor()));
        }
        if self.cursors.len() > 8 {
            self.cursors.drain(..4);
        }
    }

    fn work(&mut self, core: &Arc<Core>) {
        let mut pending = Vec::new();
        for _ in 0..self.random.random_range(1..60u32) {
            for _ in 0..self.random.random_range(1..12u32) {
                self.request(core, &mut pending);
            }
            if self.chance(5) {
                let part = [0, 8, 512, 4000][self.random.random_range(0..4)];
                let nth = self.random.random_range(1..3u64);
                self.disk
                    .fail_write(nth, std::io::ErrorKind::StorageFull, part);
            }
            core.turn();
            if self.chance(10) {
                core.idle();
            }
            if self.chance(30) {
                match core.sort_in_turn() {
                    Ok(done) => self.counts.sorted += u64::from(done),
                    Err(error) => assert!(
                        self.disk.is_crashed() || crate::disk::is_out_of_space(&error),
                        "{error}"
                    ),
                }
            }
            self.clock.advance(self.random.random_range(0..3_000_000));
            self.times.push(self.clock.now().micros());
            if core.journal.failure().is_some() {
                return;
            }
        }
    }

    fn request(&mut self, core: &Arc<Core>, pending: &mut Vec<Ticket>) {
        let log = self.any_log();
        match self.random.random_range(0..100) {
            0..4 => {
                let awaited = core.delete_in_turn(target(log));
                drop(awaited);
            }
            4..8 => {
                let config = self.settings();
                drop(core.create_in_turn(LogName::new(log).unwrap(), config));
            }
            8..14 => {
                let config = self.settings();
                drop(core.configure_in_turn(LogName::new(log).unwrap(), config));
            }
            14..26 => {
                let Some(log) = core.logs.by_name(log) else {
                    return;
                };
                let next = log.state.read().next.get();
                let back = self.random.random_range(0..30);
                let before = Lsn::new(next.saturating_sub(back));
                drop(core.trim_in_turn(target(log.name.as_str()), before));
            }
            26..28 => drop(core.sync_in_turn(Durability::Durable)),
            37..43 => {
                if let Some(mut pass) = core.retainer.begin_pass() {
                    drop(core.retainer.expire(core.retainer.look(&mut pass)));
                }
            }
            43..46 => {
                let id = Name::new(["p", "q"][self.random.random_range(0..2)]).unwrap();
                drop(core.forget_producer(target(log), id));
            }
            28..31 => drop(core.fence(target(log), None)),
            31..37 => self.cursor(core, log),
            _ => {
                let count = self.random.random_range(1..4usize);
                let mut logs: Vec<&str> = vec![log];
                if self.chance(20) {
                    let other = self.any_log();
                    if other != log {
                        logs.push(other);
                    }
                }
                let size = match self.random.random_range(0..4) {
                    0 => self.random.random_range(1000..6000usize),
                    _ => self.random.random_range(0..100),
                };
                let data: Vec<Vec<u8>> = (0..count)
                    .map(|_| {
                        let mut data = self.random.random::<u64>().to_le_bytes().to_vec();
                        data.resize(8 + size / count, 3);
                        data
                    })
                    .collect();
                let slices: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
                let parts: Vec<(&str, &[&[u8]])> =
                    logs.iter().map(|log| (*log, slices.as_slice())).collect();
                let mut batch = batch(&parts);
                if self.chance(20) {
                    let ahead = self.random.random_range(0..30_000_000);
                    let time = Timestamp::from_micros(self.clock.now().micros() + ahead);
                    set_time(&mut batch.logs[0].records, time);
                }
                self.condition(core, &mut batch);
                batch.single = logs.len() == 1;
                let ticket = match self.random.random_range(0..3) {
                    0 => core.enqueue(batch, Durability::Written),
                    1 => core.enqueue(batch, Durability::Durable),
                    _ => core.enqueue_by_mode(None, batch),
                };
                pending.push(ticket);
            }
        }
    }

    /// Moves a cursor, or deletes it.
    fn cursor(&mut self, core: &Arc<Core>, log: &'static str) {
        let cursor = Name::new(["x", "y", "z"][self.random.random_range(0..3)]).unwrap();
        let operation = if self.chance(20) {
            let target = target(log);
            CursorChange::Delete { target, cursor }
        } else {
            CursorChange::Commit(CursorCommit {
                log: LogName::new(log).unwrap(),
                cursor,
                lsn: Lsn::new(self.random.random_range(0..20)),
                expected_lsn: None,
                log_id: None,
            })
        };
        drop(core.move_cursor(operation));
    }

    /// Most writers know the epoch; many are producers, and some of those repeat.
    fn condition(&mut self, core: &Arc<Core>, batch: &mut Batch) {
        let producer = self.chance(60);
        for part in &mut batch.logs {
            let log = core.logs.by_name(part.log.as_str());
            let extras = log
                .as_ref()
                .and_then(|log| log.state.read().extras.clone())
                .unwrap_or_default();
            if self.chance(90) {
                part.guard.writer_epoch = Some(*extras.writer_epoch.newest());
            }
            if !producer {
                continue;
            }
            let id = Name::new(["p", "q"][self.random.random_range(0..2)]).unwrap();
            let told = extras.producers.told(1);
            let known = told.iter().find(|(name, ..)| *name == id);
            let (epoch, next) = known.map_or_else(
                || (self.random.random_range(0..4), 0),
                |(_, epoch, next, _)| (*epoch, *next),
            );
            let (epoch, sequence) = match self.random.random_range(0..20) {
                0 => (epoch + 1, 0),
                1 => (epoch, next.saturating_sub(1)),
                _ => (epoch, next),
            };
            part.producer = Some(Producer {
                id,
                epoch,
                sequence,
            });
        }
        if self.chance(10) {
            batch.cursors.push(CursorCommit {
                log: batch.logs[0].log.clone(),
                cursor: Name::new("x").unwrap(),
                lsn: Lsn::ZERO,
                expected_lsn: None,
                log_id: None,
            });
        }
    }

    fn settings(&mut self) -> LogConfig {
        let modes = [None, Some(SyncMode::Manual), Some(SyncMode::Async)];
        let retention = self.retention();
        LogConfig {
            sync_mode: modes[self.random.random_range(0..3)],
            compression: self.chance(30).then_some(Compression::Lz4),
            max_record_bytes: self
                .chance(50)
                .then_some(self.random.random_range(7000..9000)),
            retention,
        }
    }

    fn retention(&mut self) -> Option<Box<Retention>> {
        self.chance(60).then(|| {
            Box::new(Retention {
                max_records: self.chance(50).then(|| self.random.random_range(1..30)),
                max_bytes: self.chance(30).then(|| self.random.random_range(1..20_000)),
                max_age: self
                    .chance(30)
                    .then(|| Duration::from_secs(self.random.random_range(1..60))),
                respect_cursors: self.chance(20),
            })
        })
    }

    /// Starts from copies of the disk; goes on with one of them.
    fn compare(&mut self, sure: &BTreeMap<String, (u64, u64, Vec<Vec<u8>>)>) {
        let bare = self.disk.copy();
        for path in self.derived() {
            bare.remove(&path).unwrap();
        }
        let expected = self.answers(&bare, sure);
        let all = self.answers(&self.disk.copy(), sure);
        same(&all, &expected, "with all files");
        assert_eq!(all.len(), expected.len());
        for _ in 0..2 {
            let some = self.disk.copy();
            let mut what = String::new();
            let paths: Vec<String> = self.written.keys().cloned().collect();
            for path in paths {
                if !self.chance(30) {
                    continue;
                }
                let versions = &self.written[&path];
                match self.random.random_range(0..4) {
                    0 => {
                        let version = self.random.random_range(0..versions.len());
                        some.replace(&path, versions[version].clone());
                        write!(what, "{path} of version {version}; ").unwrap();
                    }
                    1 => {
                        let mut bytes = versions[0].clone();
                        let at = self.random.random_range(0..bytes.len());
                        bytes[at] ^= 4;
                        some.replace(&path, bytes);
                        write!(what, "{path} damaged; ").unwrap();
                    }
                    _ if some.contents(&path).is_some() => {
                        some.remove(&path).unwrap();
                        write!(what, "{path} removed; ").unwrap();
                    }
                    _ => {}
                }
            }
            same(
                &self.answers(&some.copy(), sure),
                &expected,
                &format!("with {what}"),
            );
            if self.chance(20) {
                self.disk = some;
            }
        }
        // Then some indexes are damaged while the engine runs.
        let (core, _) = open(&self.disk, &self.config, &self.clock).unwrap();
        self.counts.starts += 1;
        for path in self.derived() {
            if path.ends_with(".idx") && self.chance(30) {
                let mut bytes = self.disk.contents(&path).unwrap();
                let at = self.random.random_range(0..bytes.len());
                bytes[at] ^= 4;
                self.disk.replace(&path, bytes);
            }
        }
        let mut answers = String::new();
        self.ask(&core, &mut answers);
        same(&answers, &expected, "damaged while it ran");
        if self.chance(50) {
            core.close().unwrap();
        }
    }

    /// All answers after a start, as text.
    fn answers(
        &mut self,
        disk: &SimDisk,
        sure: &BTreeMap<String, (u64, u64, Vec<Vec<u8>>)>,
    ) -> String {
        let (core, report) = open(disk, &self.config, &self.clock).unwrap();
        self.counts.starts += 1;
        assert_eq!(report.findings, Vec::<String>::new());
        assert_eq!(report.damage, []);
        for (name, (id, first, records)) in sure {
            // Logs that were not durable at the end may exist or not, and so may deletions and logs created
            // after these. Only sure logs are expected.
            let log = core.logs.by_name(name).expect(name);
            assert_eq!(log.id.get(), *id);
            // More may have been trimmed, more may have survived.
            let now = log.state.read().first(core.journal.durable()).get();
            let skip = usize::try_from(now - first).unwrap();
            let found = from(&core, name, Lsn::new(now));
            assert!(
                skip > records.len() || found.starts_with(&records[skip..]),
                "{name}"
            );
        }
        let mut answers = String::new();
        self.ask(&core, &mut answers);
        self.ask_for_more(&core, &report, &mut answers);
        answers
    }

    fn ask(&mut self, core: &Arc<Core>, out: &mut String) {
        for log in core.logs.all() {
            let name = log.name.as_str();
            let durable = core.journal.durable();
            let info = log.info(core.tail(&log, Visibility::Durable), durable, durable);
            writeln!(out, "{info:?} {}", log.state.read().records()).unwrap();
            let records = from(core, name, info.first_lsn);
            writeln!(out, "{} records, {:x}", records.len(), checksum(&records)).unwrap();
            self.ask_extras(&log, out);
            for time in self.times.iter().rev().step_by(3).take(30) {
                let start = ReadStart::Time(Timestamp::from_micros(*time));
                let mut request = read_request(name, start);
                request.max_records = 1;
                let page = read::page(&core.store, &request, Reach::Disk).unwrap();
                write!(out, "{} ", page.next_lsn).unwrap();
                self.counts.answers += 1;
            }
            writeln!(out).unwrap();
        }
        for (selector, cursor) in &self.cursors {
            for start in [ScanStart::Cursor(cursor.clone()), ScanStart::First] {
                let request = ScanRequest {
                    selector: selector.clone(),
                    start,
                    until_lsn: None,
                    max_records: 0,
                    follow: false,
                    visibility: None,
                    chunk_bytes: 64 << 10,
                };
                match read::scan::begin(&core.store, &Arc::default(), request) {
                    Ok(scan) => write_scan(scan, out),
                    Err(error) => writeln!(out, "{error}").unwrap(),
                }
                self.counts.answers += 1;
            }
        }
    }

    /// Facts that few logs have, as far as a client can ask.
    fn ask_extras(&mut self, log: &crate::logs::Log, out: &mut String) {
        let extras = log.state.read().extras.clone().unwrap_or_default();
        let there = extras
            .cursors
            .iter()
            .filter_map(|(name, mark)| Some((name, (*mark.newest())?)));
        let cursors: Vec<_> = there.collect();
        let told = extras.producers.told(self.config.producer_window);
        self.counts.remembered += told
            .iter()
            .map(|(.., newest)| newest.len() as u64)
            .sum::<u64>();
        self.counts.cursors += cursors.len() as u64;
        writeln!(out, "epoch {}, {cursors:?}", extras.writer_epoch.newest()).unwrap();
        writeln!(out, "{told:?} {:?}", extras.producers.told_gone()).unwrap();
    }

    /// Ids, lsns, times and positions of the next writes.
    fn ask_for_more(&mut self, core: &Arc<Core>, report: &RecoveryReport, out: &mut String) {
        let epoch = report.recovery_epoch;
        writeln!(
            out,
            "epoch {epoch}, {} logs, {} records, clean {}",
            report.logs, report.records, report.clean
        )
        .unwrap();
        writeln!(out, "{:?}", core.history).unwrap();
        for name in LOGS.iter().chain(&["another"]) {
            let mut batch = batch(&[(name, &[b"x"])]);
            let log = core.logs.by_name(name);
            let epoch = log.map(|log| log.state.read().writer_epoch());
            batch.logs[0].guard.writer_epoch = epoch;
            let mut ticket = core.enqueue(batch, Durability::Durable);
            core.turn();
            writeln!(out, "{:?}", settled(&mut ticket).unwrap().unwrap()).unwrap();
        }
    }
}

fn same(found: &str, expected: &str, what: &str) {
    for (found, expected) in found.lines().zip(expected.lines()) {
        assert_eq!(found, expected, "{what}");
    }
    assert!(found.lines().count() <= expected.lines().count(), "{what}");
}

fn checksum(records: &[Vec<u8>]) -> u64 {
    records.iter().flatten().fold(5, |sum: u64, byte| {
        sum.wrapping_mul(31).wrapping_add(u64::from(*byte))
    })
}

/// All records of a log from one lsn on.
fn from(core: &Arc<Core>, log: &str, mut next: Lsn) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    loop {
        let mut request = read_request(log, ReadStart::Lsn(next));
        request.visibility = Some(Visibility::Durable);
        let page = page_either_way(core, &request).unwrap();
        for batch in &page.batches {
            assert_eq!(batch.first_lsn, next, "lsns are dense");
            next = batch.next_lsn();
            found.extend(payloads(batch));
        }
        if next == page.tail_lsn {
            return found;
        }
        assert!(!page.batches.is_empty());
    }
}

fn write_scan(mut scan: Box<dyn Scan>, out: &mut String) {
    loop {
        match next_chunk(&mut scan).unwrap() {
            Ok(Some(chunk)) => {
                for gap in &chunk.gaps {
                    write!(out, "{gap:?} ").unwrap();
                }
                for batch in &chunk.batches {
                    let sum = checksum(&payloads(batch));
                    write!(
                        out,
                        "{} {} {} {sum:x}; ",
                        batch.log, batch.first_lsn, batch.count
                    )
                    .unwrap();
                }
            }
            Ok(None) => break,
            Err(error) => {
                write!(out, "{error}").unwrap();
                break;
            }
        }
    }
    writeln!(out).unwrap();
}

#[test]
fn a_start_answers_the_same_with_any_indexes_and_checkpoints() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let seeds = match number("WALD_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("WALD_HISTORIES").unwrap_or(60),
    };
    let mut all = Counts::default();
    for seed in seeds {
        let outcome = std::panic::catch_unwind(|| {
            let mut history = History::new(seed);
            history.run();
            history.counts
        });
        match outcome {
            Ok(counts) => {
                all.starts += counts.starts;
                all.cut_starts += counts.cut_starts;
                all.segments += counts.segments;
                all.checkpoints += counts.checkpoints;
                all.answers += counts.answers;
                all.remembered += counts.remembered;
                all.cursors += counts.cursors;
                all.sorted += counts.sorted;
            }
            Err(panic) => {
                eprintln!("repeat with: WALD_SEED={seed} cargo test -p wald-storage histories");
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("{all:?}");
    assert!(all.starts < 500 || (all.cut_starts > 0 && all.checkpoints > 0));
    assert!(all.starts < 500 || (all.remembered > 0 && all.cursors > 0));
    assert!(all.starts < 500 || all.sorted > 0);
}
