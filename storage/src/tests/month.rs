//! A month of a store. Logs, producers and cursors come and go each day, and the same number stays.
//!
//! ```text
//! day:     appends, trims, settings, sorting, retention │ jumping clocks, full disk, failing calls,
//!                                                       │ kills, power cuts, flipped bits
//! evening: faults end ─▶ loss is accepted ─▶ retention, sorting, scrub ─▶ compare ─▶ kill, start: measure
//! ```
//!
//! Files, reads of a start and memory of the engine must not grow from the first days to the last.
//! Even seeds kill the process many times a day. With odd seeds one process runs from the fourth
//! evening to the last.
//!
//! `WALD_MONTH` sets the number of months, `WALD_DAYS` the days of each. `WALD_SEED` starts at
//! another seed, and alone runs it only.

use std::collections::{BTreeMap, BTreeSet};

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use super::combined::{DERIVED, poll, setting};
use super::retention::{HOUR, by_age, by_bytes, by_records};
use super::*;
use crate::api::record::{CursorCommit, Producer, Retention};
use crate::base::ids::Name;
use crate::disk::counted::held_bytes;
use crate::disk::{Disk, is_out_of_space};
use crate::engine::repair::accept_loss;
use crate::journal::committer::CursorChange;
use crate::logs::damages::QUARANTINE_FILES;
use crate::upkeep::retention::Ends;
use crate::upkeep::sorter::Turns;

const KIB: u64 = 1 << 10;
const SECOND: i64 = 1_000_000;
const DAY: i64 = 24 * HOUR;
const SEGMENT: u64 = 64 * KIB;
/// Capacity in bytes, far above the live data.
const ENOUGH: u64 = 64 << 20;
/// A month begins here, since earlier clocks count as wrong.
const BEGINNING: i64 = 1_780_000_000_000_000;
/// 2000-01-01 in microseconds. A clock that lost its time shows this.
const LOST_TIME: i64 = 946_684_800_000_000;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// The days that later days are compared with. The first day fills the logs.
const FIRST: std::ops::RangeInclusive<u64> = 3..=6;
/// The number of last days that are compared.
const LAST: u64 = 4;
/// Evenings on which the memory of a process that is not killed in between is measured at first.
const BEGINS: u64 = 2;
const SETTLED: u64 = 4;
/// Maximum figure of the last days, in tenths of the first days' highest one.
const GROWTH: u64 = 15;

/// Logs that stay all the time, and their retention.
fn kept() -> Vec<(String, Retention)> {
    let mut logs = vec![
        ("cursor/0".to_owned(), Retention::default()),
        ("fixed/0".to_owned(), Retention::default()),
    ];
    for number in 0..2 {
        logs.push((format!("age/{number}"), by_age(2 * DAY)));
        logs.push((format!("bytes/{number}"), by_bytes(60 * KIB)));
        logs.push((format!("records/{number}"), by_records(40)));
    }
    logs
}

/// The record of a log with this lsn.
fn text(log: &str, lsn: u64) -> Vec<u8> {
    let mut data = format!("{log} {lsn} ").into_bytes();
    let mixed = (lsn + log.len() as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 52;
    let bytes = 100 + usize::try_from(mixed).expect("12 bits");
    data.resize(
        bytes.max(data.len()),
        b'a' + u8::try_from(lsn % 26).unwrap(),
    );
    data
}

/// A log as the test knows it.
#[derive(Default)]
struct Known {
    /// Records that were acknowledged, trimmed ones included.
    tail: u64,
    /// Records of the last append, if its outcome is not known.
    maybe: u64,
}

/// One thing to do in a day.
#[derive(Debug, Clone)]
enum Step {
    Append(String),
    /// The next batch of a producer.
    Produce(String),
    /// Moves the cursor to the tail, and trims the log there.
    Consume,
    /// Creates a cursor for a reader, and deletes yesterday's.
    Reader,
    Configure(String, Retention),
    Retention,
    Sort,
    Idle,
}

#[derive(Default)]
struct Counts {
    kills: u64,
    cuts: u64,
    clean: u64,
    jumps: u64,
    full: u64,
    failures: u64,
    damaged: u64,
    accepted: u64,
    refused: u64,
    skipped: u64,
}

type Figures = BTreeMap<String, u64>;

struct Month {
    random: StdRng,
    disk: SimDisk,
    clock: Arc<TestClock>,
    config: StorageConfig,
    core: Option<Arc<Core>>,
    turns: Turns,
    logs: BTreeMap<String, Known>,
    /// Epoch and next sequence of each producer.
    producers: BTreeMap<String, (u64, u64)>,
    day: u64,
    /// How far the system's clock is ahead, in microseconds.
    skew: i64,
    /// Whether the process may end now.
    restarts: bool,
    /// Whether bytes were flipped since a loss was accepted, and whether any ever were.
    damaged: bool,
    lossy: bool,
    counts: Counts,
}

impl Month {
    fn new(seed: u64) -> Self {
        let random = StdRng::seed_from_u64(seed);
        let disk = SimDisk::seeded(seed);
        disk.set_capacity(ENOUGH);
        let clock = TestClock::new();
        clock.jump(BEGINNING - clock.now().micros());
        let config = StorageConfig {
            sorter_step_bytes: 16 * SEGMENT,
            producer_max_idle: Duration::from_secs(2 * 24 * 3600),
            producer_window: 16,
            ..small_config()
        };
        let mut month = Self {
            random,
            disk,
            clock,
            config,
            core: None,
            turns: Turns::default(),
            logs: BTreeMap::new(),
            producers: BTreeMap::new(),
            day: 0,
            skew: 0,
            restarts: true,
            damaged: false,
            lossy: false,
            counts: Counts::default(),
        };
        month.start();
        month
    }

    fn core(&self) -> Arc<Core> {
        Arc::clone(self.core.as_ref().expect("a process runs"))
    }

    /// Whether the process can do nothing more.
    fn is_over(&self) -> bool {
        self.disk.is_crashed() || self.core().journal.failure().is_some()
    }

    /// Ends the process, by a kill unless it was closed. Returns the memory that it held, in bytes.
    fn end(&mut self) -> u64 {
        let before = held_bytes();
        self.turns = Turns::default();
        drop(self.core.take());
        u64::try_from(before - held_bytes()).expect("the engine takes memory")
    }

    fn start(&mut self) {
        let opened = match open(&self.disk, &self.config, &self.clock) {
            Err(OpenError::Io { source, .. }) if is_out_of_space(&source) => {
                self.disk.set_capacity(ENOUGH);
                open(&self.disk, &self.config, &self.clock)
            }
            opened => opened,
        };
        let (core, report) = opened.unwrap_or_else(|error| panic!("a start fails: {error}"));
        if !self.lossy {
            let mut findings = report.findings;
            // A torn tail on a full disk is cut off and not kept.
            findings.retain(|finding| !finding.starts_with("no space to keep"));
            assert_eq!(findings, Vec::<String>::new());
            assert_eq!(report.damage, []);
        }
        self.settle(&core);
        self.core = Some(core);
    }

    /// Learns the outcome of requests that had no answer.
    fn settle(&mut self, core: &Arc<Core>) {
        let lossy = self.lossy;
        self.logs.retain(|name, known| {
            let Some(log) = core.logs.by_name(name) else {
                assert!(known.tail == 0 || lossy, "{name} is gone");
                return false;
            };
            let tail = log.state.read().tail(core.journal.durable()).get();
            let expected = [known.tail, known.tail + known.maybe];
            assert!(expected.contains(&tail) || lossy, "{name} ends at {tail}");
            *known = Known { tail, maybe: 0 };
            true
        });
    }

    fn restart(&mut self) {
        self.end();
        self.disk.set_out_of_descriptors(false);
        if self.disk.is_crashed() || self.random.random_bool(0.3) {
            self.disk.crash(self.random.random());
            self.counts.cuts += 1;
        } else {
            self.disk.forget_faults();
            self.counts.kills += 1;
        }
        self.start();
    }

    /// An operator accepts the loss.
    fn accept(&mut self) {
        self.end();
        let disk: Arc<dyn Disk> = Arc::new(self.disk.clone());
        let clock = Arc::clone(&self.clock) as Arc<dyn Clock>;
        let (loss, _) = accept_loss(&disk, &self.config, clock, "by a test").unwrap();
        self.counts.accepted += u64::from(!loss.is_empty());
        self.start();
        self.damaged = false;
    }

    // ---- a day

    fn steps(&mut self) -> Vec<Step> {
        let mut steps = Vec::new();
        let day = self.day;
        let logs = (0..4).map(|number| format!("day/{day}/{number}"));
        let again = (0..2).map(|number| format!("again/{}/{number}", day % 2));
        let mut append = |log: String, times: usize| {
            steps.extend(std::iter::repeat_n(Step::Append(log), times));
        };
        for log in logs.chain(again) {
            append(log, 6);
        }
        for (log, _) in kept() {
            if log != "fixed/0" {
                append(log, 12);
            } else if day == 1 {
                append(log, 40);
            }
        }
        let mut ids = vec!["always".to_owned()];
        ids.extend((0..4).map(|number| format!("{day}/{number}")));
        for id in ids {
            self.producers.entry(id.clone()).or_default();
            steps.extend(std::iter::repeat_n(Step::Produce(id), 3));
        }
        steps.extend(std::iter::repeat_n(Step::Consume, 3));
        steps.push(Step::Reader);
        steps.extend(std::iter::repeat_n(Step::Retention, 10));
        steps.extend(std::iter::repeat_n(Step::Sort, 20));
        steps.extend(std::iter::repeat_n(Step::Idle, 10));
        steps.shuffle(&mut self.random);
        let settings = kept().into_iter();
        let settings = settings.map(|(log, retention)| Step::Configure(log, retention));
        settings.chain(steps).collect()
    }

    fn live_a_day(&mut self, damages: bool) {
        self.day += 1;
        let steps = self.steps();
        let faults: BTreeSet<usize> = (0..8)
            .map(|_| self.random.random_range(0..steps.len()))
            .collect();
        let pause = 20 * HOUR / i64::try_from(steps.len()).expect("few");
        for (number, step) in steps.iter().enumerate() {
            self.clock.advance(pause);
            // The first day creates the logs.
            if self.day > 1 && faults.contains(&number) {
                self.fault(damages);
            }
            let mut tries = 0;
            while !self.perform(step) {
                tries += 1;
                self.counts.refused += 1;
                if self.is_over() {
                    let failure = self.core().journal.failure();
                    assert!(self.restarts, "no fault fails the journal: {failure:?}");
                    self.restart();
                } else {
                    self.disk.set_out_of_descriptors(false);
                    self.clock.advance(2 * SECOND);
                    self.sort();
                }
                match tries {
                    // An operator makes room.
                    4 => self.disk.set_capacity(ENOUGH),
                    // Damage prevents the step until the evening.
                    8 => {
                        assert!(self.lossy, "{step:?} never succeeds");
                        self.counts.skipped += 1;
                        break;
                    }
                    _ => {}
                }
            }
        }
    }

    fn fault(&mut self, damages: bool) {
        let kinds = if self.restarts { 12 } else { 8 };
        match self.random.random_range(0..kinds) {
            0 | 1 => {
                // A clock that is behind is believed after 10 minutes, if it shows 2026. Retention
                // would then be late by as much, so it is behind by little or lost its time.
                let (little, far) = ([60 * SECOND, 3 * HOUR], [DAY, 40 * DAY, 365 * DAY]);
                let by = match self.random.random_range(0..6) {
                    0 | 1 => little[self.random.random_range(0..2)],
                    2 | 3 => far[self.random.random_range(0..3)],
                    4 => -little[self.random.random_range(0..2)],
                    _ => LOST_TIME - self.clock.now().micros(),
                };
                self.clock.jump(by);
                self.skew += by;
                self.counts.jumps += 1;
            }
            2 => self.mend_clock(),
            3 | 4 => {
                self.disk.set_capacity(ENOUGH);
                if let Ok(Some(free)) = self.disk.free_bytes() {
                    let left = self.random.random_range(0..3 * SEGMENT);
                    self.disk.set_capacity(ENOUGH - free + left);
                    self.counts.full += 1;
                }
            }
            5 => self.disk.set_capacity(ENOUGH),
            // Two failing reads in a row count as an unreadable sector.
            6 if self.disk.faults_left() > 0 => {}
            6 => {
                // The last one is the pool, whose errors end the process.
                let most = DERIVED.len() - usize::from(!self.restarts);
                let filter = DERIVED[self.random.random_range(0..most)];
                let error = [EIO, ENOSPC][self.random.random_range(0..2)];
                self.disk
                    .fail_call(filter, self.random.random_range(1..20), error);
                self.counts.failures += 1;
            }
            7 => self.disk.set_out_of_descriptors(true),
            8 => self.restart(),
            9 => self.disk.crash_after(self.random.random_range(1..200)),
            10 => {
                if !self.is_over() && self.core().close().is_ok() {
                    self.counts.clean += 1;
                }
                self.restart();
            }
            _ if damages => self.flip(),
            _ => {}
        }
    }

    fn mend_clock(&mut self) {
        self.clock.jump(-self.skew);
        self.skew = 0;
    }

    /// Flips a bit of a file that is not written any more.
    fn flip(&mut self) {
        let mut paths = Vec::new();
        for directory in ["journal", "sorted", "index", "checkpoint"] {
            let mut names = self.disk.list(directory).unwrap_or_default();
            names.sort_unstable();
            if directory == "journal" {
                names.truncate(names.len().saturating_sub(2));
            }
            paths.extend(names.iter().map(|name| format!("{directory}/{name}")));
        }
        if paths.is_empty() {
            return;
        }
        let path = &paths[self.random.random_range(0..paths.len())];
        let mut bytes = self.disk.contents(path).expect("it is listed");
        if let Some(end) = bytes.iter().rposition(|byte| *byte != 0) {
            let at = self.random.random_range(0..=end);
            bytes[at] ^= 1 << self.random.random_range(0..8);
            self.disk.replace(path, bytes);
            self.counts.damaged += 1;
            (self.damaged, self.lossy) = (true, true);
        }
    }

    // ---- steps

    /// Performs a step. Returns whether nothing of it is left to do.
    fn perform(&mut self, step: &Step) -> bool {
        if self.is_over() {
            return false;
        }
        match step {
            Step::Append(log) => self.append(log, None),
            Step::Produce(id) => self.append("records/0", Some(id)),
            Step::Consume => self.consume(),
            Step::Reader => self.change_reader(),
            Step::Configure(log, retention) => self.configure(log, *retention),
            Step::Retention => {
                self.retain();
                true
            }
            Step::Sort => {
                self.sort();
                true
            }
            Step::Idle => {
                self.core().idle();
                true
            }
        }
    }

    fn append(&mut self, name: &str, producer: Option<&String>) -> bool {
        let core = self.core();
        let known = self.logs.entry(name.to_owned()).or_default();
        let count = 1 + known.tail % 3;
        let data: Vec<Vec<u8>> = (known.tail..known.tail + count)
            .map(|lsn| text(name, lsn))
            .collect();
        let data: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
        let mut sent = batch(&[(name, &data)]);
        if let Some(id) = producer {
            let (epoch, sequence) = self.producers[id];
            sent.logs[0].producer = Some(Producer {
                id: Name::new(id).unwrap(),
                epoch,
                sequence,
            });
        }
        let mut ticket = core.enqueue(sent, Durability::Durable);
        core.turn();
        let applied = match settled(&mut ticket) {
            Some(Ok(done)) => {
                if !done.appends[0].deduplicated {
                    known.tail += count;
                }
                true
            }
            // The first try was applied, and a start gave the log more records since.
            Some(Err(AppendError::ProducerConflict { .. })) => true,
            // Idle for a day, which may be two by an expiry clock that runs twice as fast.
            Some(Err(AppendError::ProducerForgotten { first_epoch, .. })) => {
                let id = producer.expect("it sent the batch");
                self.producers.insert(id.clone(), (first_epoch, 0));
                false
            }
            Some(Err(AppendError::Unknown(_))) | None => {
                known.maybe = count;
                false
            }
            Some(Err(_)) => false,
        };
        if let Some(id) = producer.filter(|_| applied) {
            self.producers.get_mut(id).expect("it is known").1 += 1;
        }
        applied
    }

    fn consume(&mut self) -> bool {
        let core = self.core();
        let name = "cursor/0";
        let tail = Lsn::new(self.logs.get(name).map_or(0, |known| known.tail));
        let moved = core.move_cursor(CursorChange::Commit(CursorCommit {
            log: LogName::new(name).unwrap(),
            cursor: Name::new("consumer").unwrap(),
            lsn: tail,
            expected_lsn: None,
            log_id: None,
        }));
        core.turn();
        let trimmed = core.trim_in_turn(target(name), tail);
        core.turn();
        matches!(poll(moved), Some(Ok(_))) && matches!(poll(trimmed), Some(Ok(_)))
    }

    fn change_reader(&mut self) -> bool {
        let core = self.core();
        let name = |day: u64| Name::new(&format!("reader/{day}")).unwrap();
        let moved = core.move_cursor(CursorChange::Commit(CursorCommit {
            log: LogName::new("age/0").unwrap(),
            cursor: name(self.day),
            lsn: Lsn::ZERO,
            expected_lsn: None,
            log_id: None,
        }));
        core.turn();
        // All cursors of the last days go, since a try may have had no answer.
        for day in self.day.saturating_sub(3)..self.day {
            let removed = core.move_cursor(CursorChange::Delete {
                target: target("age/0"),
                cursor: name(day),
            });
            core.turn();
            drop(poll(removed));
        }
        matches!(poll(moved), Some(Ok(_)))
    }

    fn configure(&mut self, log: &str, retention: Retention) -> bool {
        let core = self.core();
        let config = LogConfig {
            retention: Some(Box::new(retention)),
            ..LogConfig::default()
        };
        let name = LogName::new(log).unwrap();
        let done = match core.logs.by_name(log) {
            Some(_) => core.configure_in_turn(name, config),
            None => core.create_in_turn(name, config),
        };
        core.turn();
        let done = matches!(poll(done), Some(Ok(())));
        if done {
            self.logs.entry(log.to_owned()).or_default();
        }
        done
    }

    /// A pass of retention, as its thread does it.
    fn retain(&mut self) {
        let core = self.core();
        if let Some(mut pass) = core.retainer.begin_pass() {
            while !pass.is_through() {
                let portion = core.retainer.look(&mut pass);
                if portion.is_empty() {
                    continue;
                }
                let ends: Vec<Ends> = portion.iter().map(Ends::of).collect();
                let expired = core.retainer.expire(portion);
                core.turn();
                let Some(expired) = poll(expired) else { return };
                core.retainer.count(&mut pass, &ends, &expired);
            }
            core.retainer.end_pass(pass);
        }
        for portion in core.retainer.idle_producers() {
            let forgotten = core.retainer.forget_idle(portion);
            core.turn();
            if !matches!(poll(forgotten), Some(Ok(()))) {
                core.retainer.retry_producers();
            }
        }
        let written = core.retainer.tell_clock();
        core.turn();
        drop(written.map(poll));
    }

    fn sort(&mut self) {
        // The sorter would wait for a descriptor.
        self.disk.set_out_of_descriptors(false);
        let core = self.core();
        // All its errors are planned faults.
        let _sorted = core.sorter.sort_turn(&mut self.turns, &mut |_| Ok(()));
        core.turn();
    }

    fn delete(&mut self, name: &str) {
        let core = self.core();
        let deleted = core.delete_in_turn(target(name));
        core.turn();
        match poll(deleted) {
            Some(Ok(())) => drop(self.logs.remove(name)),
            other => panic!("without faults {name} is deleted: {other:?}"),
        }
    }

    // ---- an evening

    /// Ends the faults, accepts the loss as an operator, and does all waiting work.
    fn rest(&mut self) {
        self.disk.set_capacity(ENOUGH);
        self.mend_clock();
        self.disk.set_out_of_descriptors(false);
        match self.restarts {
            true => self.restart(),
            false => self.disk.forget_faults(),
        }
        if self.damaged {
            self.accept();
        }
        let (day, again) = (
            format!("day/{}/", self.day),
            format!("again/{}/", self.day % 2),
        );
        let old = |name: &&String| {
            let daily = name.starts_with("day/") || name.starts_with("again/");
            daily && !name.starts_with(&day) && !name.starts_with(&again)
        };
        for name in self.logs.keys().filter(old).cloned().collect::<Vec<_>>() {
            self.delete(&name);
        }
        for (log, retention) in kept() {
            assert!(self.configure(&log, retention), "{log} has its settings");
            if log != "fixed/0" {
                assert!(self.append(&log, None), "{log} takes records");
            }
        }
        let core = self.core();
        for _ in 0..24 {
            self.clock.advance(HOUR / 6);
            self.retain();
            core.idle();
            let mut steps = 0;
            while core
                .sorter
                .sort_turn(&mut self.turns, &mut |_| Ok(()))
                .unwrap()
            {
                core.turn();
                steps += 1;
                assert!(steps < 200, "sorting comes to an end");
            }
            core.turn();
        }
        assert!(core.scrubber.scrub_once().is_ok());
        self.compare(&core);
        let shown = core.statistics();
        println!(
            "day {}: {} logs, {} producers, {} segments, {} runs of {} KiB, expiry late by {} s",
            self.day,
            shown.logs,
            shown.producers,
            shown.journal_segments,
            shown.sorted_runs,
            shown.sorted_bytes / KIB,
            shown.expiry_lag_micros / SECOND
        );
    }

    /// Every log has the acknowledged records that are kept and not damaged.
    fn compare(&self, core: &Arc<Core>) {
        for (name, known) in &self.logs {
            let log = core.logs.by_name(name).expect("a start knows it");
            let mut next = log.state.read().first(core.journal.durable());
            if let Some((_, retention)) = kept().iter().find(|(log, _)| log == name)
                && let Some(most) = retention.max_records
            {
                assert_eq!(next.get(), known.tail.saturating_sub(most), "{name}");
            }
            while next.get() < known.tail {
                match read::page(
                    &core.store,
                    &read_request(name, ReadStart::Lsn(next)),
                    Reach::Disk,
                ) {
                    Ok(page) => {
                        for stored in &page.batches {
                            for (lsn, data) in (stored.first_lsn.get()..).zip(payloads(stored)) {
                                assert!(data == text(name, lsn), "{name}: record {lsn}");
                            }
                        }
                        assert!(page.next_lsn > next, "{name}: no progress at {next}");
                        next = page.next_lsn;
                    }
                    Err(ReadError::Quarantined { to, .. }) if self.lossy => {
                        next = to.unwrap_or(Lsn::new(known.tail));
                    }
                    Err(error) => panic!("{name}, lsn {next}: {error}"),
                }
            }
        }
    }

    /// Kills the process, and measures its memory, the files, the next start and its memory.
    fn measure(&mut self) -> Figures {
        let mut figures = Figures::new();
        let shown = self.core().statistics();
        self.core().journal.recent.clear();
        let running = self.end();
        self.disk.forget_faults();
        for directory in [
            "",
            "journal",
            "sorted",
            "index",
            "checkpoint",
            "pool",
            "quarantine",
        ] {
            let names = self.disk.list(directory).unwrap();
            let path = |name: &String| match directory {
                "" => name.clone(),
                _ => format!("{directory}/{name}"),
            };
            let size = |name| {
                self.disk
                    .contents(&path(name))
                    .map_or(0, |all| all.len() as u64)
            };
            let bytes: u64 = names.iter().map(size).sum();
            figures.insert(format!("files in {directory}/"), names.len() as u64);
            figures.insert(format!("bytes in {directory}/"), bytes);
        }
        let before = self.disk.reads();
        self.start();
        let after = self.disk.reads();
        let started = self.end();
        self.start();
        figures.extend(
            [
                ("reads of a start", after.0 - before.0),
                ("bytes that a start reads", after.1 - before.1),
                ("memory after a start", started),
                ("memory of a process", running),
                ("logs", shown.logs),
                ("deleted logs", shown.deleted_logs),
                ("producers", shown.producers),
                ("cursors", shown.cursors),
            ]
            .map(|(name, figure)| (name.to_owned(), figure)),
        );
        figures
    }

    fn summary(&self) -> String {
        let Counts {
            kills,
            cuts,
            clean,
            jumps,
            full,
            failures,
            damaged,
            accepted,
            refused,
            skipped,
        } = self.counts;
        format!(
            "{} days: {kills} kills, {cuts} power cuts, {clean} clean ends, {jumps} jumps of the clock, \
             {full} times full, {failures} failing calls, {damaged} flipped bits, {accepted} losses \
             accepted, {refused} requests tried again, {skipped} given up",
            self.day
        )
    }
}

/// Bytes of forgotten producers and of unclean ends, for each day. Both have separate bounds.
const REMEMBERED: u64 = 400;

/// Allowed growth of a figure: chance, and `REMEMBERED` bytes a day where they count.
fn slack(name: &str, days: u64) -> u64 {
    if name.starts_with("bytes in index") || name.starts_with("bytes in checkpoint") {
        16 * KIB + days * REMEMBERED
    } else if name.starts_with("bytes") {
        4 * SEGMENT
    } else if name.starts_with("memory") {
        24 * KIB + days * REMEMBERED
    } else if name.starts_with("reads") {
        40
    } else if name == "producers" {
        // Producers of 4 days with clocks a year ahead go with the producers of the next day.
        16
    } else {
        6
    }
}

/// The value of each figure in some days: the highest, or for a figure in `lowest` the lowest.
fn over(days: &[&Figures], lowest: &[&str]) -> Figures {
    let mut over = Figures::new();
    for (name, figure) in days.iter().flat_map(|day| day.iter()) {
        let value = over.entry(name.clone()).or_insert(*figure);
        *value = match lowest.contains(&name.as_str()) {
            true => (*value).min(*figure),
            false => (*value).max(*figure),
        };
    }
    over
}

/// Figures of a start. They depend on the number of segments since the last checkpoint, which is chance. On a day with
/// damage, a start may begin without a checkpoint. Growth raises them on each of the last days, so the lowest counts.
const OF_A_START: [&str; 2] = ["reads of a start", "bytes that a start reads"];

/// Compares the last days with the first, and returns the figures that grew.
fn grown(first: &[&Figures], last: &[&Figures], days: u64, runs_on: bool) -> Vec<String> {
    let (first, last) = (over(first, &[]), over(last, &OF_A_START));
    let mut grown = Vec::new();
    for (name, now) in &last {
        let before = first[name];
        let most = match name.as_str() {
            // Torn tails in quarantine are kept for operators.
            "files in quarantine/" => QUARANTINE_FILES as u64,
            "bytes in quarantine/" => QUARANTINE_FILES as u64 * SEGMENT,
            // Memory of a process that was just started is less.
            "memory of a process" if !runs_on => u64::MAX,
            _ => before * GROWTH / 10 + slack(name, days),
        };
        let line = format!("{name}: {before} at first, {now} at last, at most {most}");
        println!("  {line}");
        if *now > most {
            grown.push(line);
        }
    }
    grown
}

/// Lives the days, and returns the figures that grew.
fn live(seed: u64, days: u64) -> Vec<String> {
    let mut month = Month::new(seed);
    let runs_on = seed % 2 == 1;
    // Bits flip in every fourth month.
    let damages = seed % 4 == 2;
    let mut measured: BTreeMap<u64, Figures> = BTreeMap::new();
    while month.day < days {
        month.live_a_day(damages);
        month.rest();
        if month.restarts || [SETTLED, days].contains(&month.day) {
            let figures = month.measure();
            measured.insert(month.day, figures);
        }
        month.restarts = !runs_on || month.day < BEGINS;
    }
    println!("seed {seed}, {}", month.summary());
    let first: Vec<&Figures> = measured.range(FIRST).map(|(_, day)| day).collect();
    let last: Vec<&Figures> = measured
        .range(days - LAST + 1..)
        .map(|(_, day)| day)
        .collect();
    grown(&first, &last, days, runs_on)
}

#[test]
fn growth_of_a_start_is_told_from_one_expensive_start() {
    let name = OF_A_START[1];
    let days = |bytes: [u64; 4]| bytes.map(|bytes| Figures::from([(name.to_owned(), bytes)]));
    let told = |last: [u64; 4]| {
        let (first, last) = (days([100, 200, 100, 200].map(|n| n * KIB)), days(last));
        !grown(&first.each_ref(), &last.each_ref(), 30, false).is_empty()
    };
    let most = 300 * KIB + slack(name, 30);
    assert!(!told([KIB, most + 1, most + 1, most + 1]), "one is cheap");
    assert!(told([most + 1; 4]), "each start reads more");
}

#[test]
fn store_needs_no_more_after_a_month_than_after_some_days() {
    let (months, seed) = (setting("WALD_MONTH"), setting("WALD_SEED"));
    let days = setting("WALD_DAYS").unwrap_or(30).max(FIRST.end() + LAST);
    let number = months.unwrap_or(if seed.is_some() { 1 } else { 8 });
    let first = seed.unwrap_or(0);
    let mut failed = Vec::new();
    for seed in first..first + number {
        let lived = std::panic::catch_unwind(|| live(seed, days));
        if lived.as_ref().is_ok_and(Vec::is_empty) {
            continue;
        }
        eprintln!(
            "repeat with: WALD_SEED={seed} WALD_DAYS={days} cargo test -p wald-storage month"
        );
        failed.push((seed, lived.unwrap_or_default()));
    }
    assert!(failed.is_empty(), "seeds that failed: {failed:#?}");
}
