//! The engine on a simulated disk, with a ledger outside of it.
//!
//! One [`Run`] starts an engine, sends random requests, ends the engine at any point, and compares the next
//! start with the ledger. It repeats this many times. Engine, disk and requests come from one seed.

mod ledger;
mod lies;
mod machine;
mod points;
mod requests;
mod script;

use std::collections::{BTreeMap, HashMap};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

pub(super) use self::ledger::Verdict;
use self::ledger::{Effect, Ledger, LogState, Logs, Loss, Unit};
use self::machine::Bucket;
pub(super) use self::points::Histogram;
use self::points::{Phase, STRETCHES};
use self::requests::Asked;
use super::*;
use crate::api::quota::{Quota, QuotaLimits};
use crate::base::ids::{LogId, Position};

/// Faults besides power cuts and kills.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Faults {
    /// Runs of the process with a call that fails with EIO, per cent.
    pub(super) failing_calls: u32,
    /// Runs of the process with a flush that fails once, per cent.
    pub(super) failing_flushes: u32,
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) starts: u64,
    pub(super) kills: u64,
    pub(super) clean: u64,
    pub(super) failures: u64,
    pub(super) requests: u64,
    pub(super) units: u64,
    pub(super) maybe: u64,
    pub(super) refused: u64,
    pub(super) repeats: u64,
    pub(super) expired: u64,
    pub(super) rolls: u64,
    pub(super) sorted: u64,
    pub(super) verdict: Verdict,
    pub(super) cuts: Histogram,
    pub(super) machines: u64,
    pub(super) parts: u64,
    pub(super) uploads: u64,
    pub(super) named_lost: u64,
    pub(super) shown: u64,
}

impl Counts {
    pub(super) fn add(&mut self, other: &Self) {
        self.starts += other.starts;
        self.kills += other.kills;
        self.clean += other.clean;
        self.failures += other.failures;
        self.requests += other.requests;
        self.units += other.units;
        self.maybe += other.maybe;
        self.refused += other.refused;
        self.repeats += other.repeats;
        self.expired += other.expired;
        self.rolls += other.rolls;
        self.sorted += other.sorted;
        self.verdict.add(&other.verdict);
        self.cuts.add(&other.cuts);
        self.machines += other.machines;
        self.parts += other.parts;
        self.uploads += other.uploads;
        self.named_lost += other.named_lost;
        self.shown += other.shown;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{}", self.cuts)?;
        writeln!(
            f,
            "{} starts, {} kills, {} clean ends, {} failed journals, {} rolls, {} steps of sorting; {} requests: {} refused, {} unknown, {} repeats; {} trims by retention",
            self.starts,
            self.kills,
            self.clean,
            self.failures,
            self.rolls,
            self.sorted,
            self.requests,
            self.refused,
            self.maybe,
            self.repeats,
            self.expired
        )?;
        writeln!(
            f,
            "{} lost machines, {} parts shipped, {} uploads; {} acks named as lost; {} reads of replicated records",
            self.machines, self.parts, self.uploads, self.named_lost, self.shown
        )?;
        write!(f, "{:?}", self.verdict)
    }
}

pub(super) struct Run {
    pub(super) random: StdRng,
    pub(super) disk: SimDisk,
    clock: Arc<TestClock>,
    pub(super) config: StorageConfig,
    faults: Faults,
    ledger: Ledger,
    /// Batches of producers that may be sent again.
    sent: Vec<(Batch, Vec<Part>, Vec<Move>)>,
    ids: BTreeMap<LogId, &'static str>,
    /// All units so far, for tests that do not compare after each start.
    units: Vec<Unit>,
    highest: Position,
    epoch: u64,
    payload: u64,
    /// Time of the last append of each record, and its bytes.
    born: HashMap<u64, (Instant, usize)>,
    /// Whether much is written, so that segments fill up.
    bulky: bool,
    without_space_until: u64,
    /// Whether the cache may hold data that the device does not have.
    distrusted: bool,
    /// The replica, if there is one.
    bucket: Option<Bucket>,
    /// Whether the machine was lost since the last start.
    lost_machine: bool,
    /// End of the journal in the replica, if the last process was lost with its machine.
    lost_at: Option<Position>,
    /// Appends since the last start: position, log, its id, lsns.
    acks: Vec<(Position, &'static str, u64, std::ops::Range<u64>)>,
    pub(super) counts: Counts,
}

/// One part of an append: log, digests of its records, producer with epoch and sequence.
type Part = (&'static str, Vec<u64>, Option<(&'static str, u64, u64)>);

/// Move of a cursor by a batch: log, cursor, lsn.
type Move = (&'static str, &'static str, u64);

impl Run {
    pub(super) fn new(seed: u64, faults: Faults) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut config = StorageConfig {
            pool_segments: random.random_range(1..3),
            reserve_segments: 1,
            max_batch_bytes: 20_000,
            buffer_bytes: 9000,
            producer_window: random.random_range(1..90),
            sorter_enabled: true,
            ..small_config()
        };
        if random.random_range(0..5) < 2
            && let Some(bounds) = requests::retention(&mut random)
        {
            config.retention_max_age = bounds.max_age.unwrap_or_default();
            config.retention_max_bytes = bounds.max_bytes.unwrap_or_default();
            config.retention_max_records = bounds.max_records.unwrap_or_default();
        }
        config.sorter_step_bytes = random.random_range(1..6) * (100 << 10);
        Self {
            random,
            disk: SimDisk::seeded(seed),
            clock: TestClock::new(),
            config,
            faults,
            ledger: Ledger::default(),
            sent: Vec::new(),
            ids: BTreeMap::new(),
            units: Vec::new(),
            highest: Position::ZERO,
            epoch: 0,
            payload: 0,
            born: HashMap::new(),
            bulky: false,
            without_space_until: 0,
            distrusted: false,
            bucket: None,
            lost_machine: false,
            lost_at: None,
            acks: Vec::new(),
            counts: Counts::default(),
        }
    }

    /// Runs `lives` lives of the process, and a last start.
    pub(super) fn run(&mut self, lives: u32) {
        for _ in 0..lives {
            let core = self.start(60);
            self.work(&core);
            self.end(core);
        }
        drop(self.start(0));
    }

    /// Starts and compares; in `cuts` of 100 cases a power cut comes meanwhile.
    fn start(&mut self, cuts: u32) -> Arc<Core> {
        loop {
            self.counts.starts += 1;
            if self.random.random_range(0..100) < cuts {
                // A start makes some thirty changing calls.
                self.disk.crash_after(self.random.random_range(1..34));
            }
            match open(&self.disk, &self.config, &self.clock) {
                Ok((core, report)) => {
                    if !self.ship_the_start(&core) {
                        drop(core);
                        self.lose_machine();
                        continue;
                    }
                    if self.bucket.is_some() && self.disk.is_crashed() {
                        drop(core);
                        self.cut(Phase::Start);
                        continue;
                    }
                    // A cut planned for a later call of the start comes while the engine serves.
                    self.started(&core, &report);
                    return core;
                }
                Err(error) => {
                    // Only a power cut may stop a start, since another try would get no further.
                    let cut = self.disk.is_crashed();
                    assert!(cut, "a start fails without a power cut: {error}");
                    self.cut(Phase::Start);
                }
            }
        }
    }

    fn started(&mut self, core: &Arc<Core>, report: &RecoveryReport) {
        let crashed = self.disk.is_crashed();
        assert!(!crashed, "a start that the power went in has failed");
        self.disk.forget_faults();
        self.found_by(core, report);
        self.distrusted = false;
        core.set_quotas(quotas()).unwrap();
        assert_counted(core);
        self.lost_machine = false;
        self.lost_at = None;
        self.acks.clear();
    }

    /// Compares the state after a start with the ledger.
    fn found_by(&mut self, core: &Arc<Core>, report: &RecoveryReport) {
        assert_eq!(report.findings, Vec::<String>::new());
        assert_eq!(report.damage, [], "a power cut damages nothing");
        let epoch = report.recovery_epoch.get();
        let before = std::mem::replace(&mut self.epoch, epoch);
        assert!(epoch > before || (report.clean && epoch == before));
        assert_no_leftovers(&self.disk, core);
        let found = found(core);
        if let Ok(found) = &found {
            self.check_named_losses(core, found, before);
        }
        let verdict = found.and_then(|found| self.ledger.judge(&found, self.loss()));
        if let Err((verdict, words)) = verdict {
            self.counts.verdict.add(&verdict);
            panic!("{verdict:?}: {words}");
        }
    }

    fn loss(&self) -> Loss {
        match (self.lost_machine, self.distrusted) {
            (true, _) => Loss::Machine,
            (false, true) => Loss::Power,
            (false, false) => Loss::Process,
        }
    }

    fn cut(&mut self, phase: Phase) {
        let point = self.disk.cut_point();
        self.counts.cuts.count(phase, point.as_ref());
        self.disk.crash(self.random.random());
        self.distrusted = true;
    }

    /// Plans a power cut.
    fn plan_cut(&mut self) {
        if self.random.random_range(0..100) < 35 {
            self.disk.crash_after(self.random.random_range(1..50));
            return;
        }
        let stretch = self.random.random_range(0..STRETCHES.len());
        self.bulky |= stretch < 5;
        let (nth, after) = (
            self.random.random_range(1..3),
            self.random.random_range(0..4),
        );
        self.disk.crash_when(STRETCHES[stretch], nth, after);
    }

    fn work(&mut self, core: &Arc<Core>) {
        self.bulky = self.random.random_range(0..100) < 20;
        if self.random.random_range(0..100) < 75 {
            self.plan_cut();
        }
        self.disk.set_short_writes(self.random.random_range(0..8));
        if self.random.random_range(0..100) < self.faults.failing_flushes {
            self.disk.fail_sync(self.random.random_range(1..20));
            self.distrusted = true;
        }
        if self.random.random_range(0..100) < self.faults.failing_calls {
            let nth = self.random.random_range(1..200);
            self.disk.fail_call(|_| true, nth, EIO);
            self.distrusted = true;
        }
        for _ in 0..self.random.random_range(1..16u32) {
            self.turn(core);
            if core.journal.failure().is_some() {
                break;
            }
        }
    }

    fn turn(&mut self, core: &Arc<Core>) {
        let mut asked: Vec<Asked> = Vec::new();
        self.run_out_of_space();
        for _ in 0..self.random.random_range(1..6u32) {
            asked.push(self.ask(core));
        }
        if self.random.random_range(0..8) == 0 {
            // These requests are written and not flushed, when more requests come.
            core.write_in_turn();
            asked.push(self.ask(core));
        }
        core.turn();
        self.ship(core);
        for asked in asked {
            self.settle(asked);
        }
        assert_counted(core);
        match self.random.random_range(0..20) {
            0 => self.idle(core),
            2..5 => self.sort(core),
            1 => {
                if let Err(error) = core.pool_in_turn()
                    && !crate::disk::is_out_of_space(&error)
                {
                    core.journal.fail("filling the pool", &error);
                }
            }
            _ => self.clock.advance(300_000),
        }
        if self.random.random_range(0..100) < 8 {
            // Nothing must depend on jumps of the clock.
            let far = [1_000_000, 3_600_000_000, 365 * 24 * 3_600_000_000];
            let far = far[self.random.random_range(0..3)];
            self.clock.jump(self.random.random_range(-far..far));
        }
    }

    /// A step of the sorter. If the step fails, nothing has changed, or the journal has failed.
    fn sort(&mut self, core: &Arc<Core>) {
        match core.sort_in_turn() {
            Ok(done) => self.counts.sorted += u64::from(done),
            Err(error) => {
                let faulty = self.distrusted || self.disk.is_crashed();
                assert!(faulty || crate::disk::is_out_of_space(&error), "{error}");
            }
        }
    }

    fn idle(&mut self, core: &Arc<Core>) {
        self.clock.advance(1000);
        core.idle();
        let journal = &core.journal;
        if journal.failure().is_none() && journal.durable() == journal.written() {
            self.ledger.all_written_durable();
        }
    }

    /// Sometimes one of the next writes finds no space, and later ones find some.
    fn run_out_of_space(&mut self) {
        // One failure at a time: if voiding fails too, the journal fails.
        let through = self.disk.writes() > self.without_space_until;
        if through && self.random.random_range(0..100) < 8 {
            let part = [0, 8, 511, 512, 4000, 1 << 20][self.random.random_range(0..6)];
            let nth = self.random.random_range(1..4);
            self.disk
                .fail_write(nth, std::io::ErrorKind::StorageFull, part);
            self.without_space_until = self.disk.writes() + nth + 1;
        }
    }

    /// Ends the process: cleanly or not, with the power or without.
    fn end(&mut self, core: Arc<Core>) {
        self.counts.rolls += core.journal.segments.read().len() as u64;
        let manner = self.random.random_range(0..100);
        let failed = core.journal.failure().is_some();
        self.counts.failures += u64::from(failed);
        let mut phase = Phase::Work;
        if !failed && manner < 45 {
            phase = Phase::Close;
            self.disk.forget_faults();
            if manner < 30 {
                self.disk.crash_after(self.random.random_range(1..22));
            }
            match core.close() {
                Ok(()) if !self.disk.is_crashed() => {
                    self.counts.clean += 1;
                    self.all_forced();
                }
                // A checkpoint that is cut off makes no end less clean.
                Ok(()) => self.all_forced(),
                Err(error) => assert!(self.disk.is_crashed() || self.distrusted, "{error}"),
            }
        }
        drop(core);
        if self.loses_machine() {
            self.lost_at = self.bucket.as_ref().map(Bucket::end);
            return self.lose_machine();
        }
        if self.disk.is_crashed() || (38..85).contains(&manner) {
            self.cut(phase);
        } else {
            self.counts.kills += 1;
            self.disk.forget_faults();
        }
    }

    /// Records that every accepted request is on the device.
    fn all_forced(&mut self) {
        self.ledger.all_durable();
        self.ledger.add(Unit {
            effects: vec![Effect::Force],
            written: true,
            durable: true,
            replicated: false,
        });
    }
}

const EIO: i32 = 5;

/// Checks that a start removes all that a crash of the sorter left.
pub(super) fn assert_no_leftovers(disk: &SimDisk, core: &Core) {
    use crate::disk::Disk;
    let runs = core.journal.runs();
    let mut expected: Vec<String> = runs.iter().map(|run| run.segment.path()).collect();
    expected.sort_unstable();
    let mut names = disk.list("sorted").unwrap();
    names.sort_unstable();
    let names: Vec<String> = names.iter().map(|name| format!("sorted/{name}")).collect();
    assert_eq!(names, expected);
    let last = runs.last().map(|run| run.head.last);
    for name in disk.list("journal").unwrap() {
        let id = crate::format::life::id_of(&name).unwrap();
        assert!(Some(id) > last, "journal/{name} is sorted");
    }
    for name in disk.list("index").unwrap() {
        let Some(id) = crate::index::index_id(&name) else {
            continue;
        };
        let of_run = runs.iter().any(|run| run.id() == id);
        assert!(
            of_run || Some(id) > last,
            "index/{name} is of what is sorted"
        );
    }
}

/// Quotas of some of the logs, without limits.
fn quotas() -> Vec<Quota> {
    let quota = |prefix: &str| Quota {
        tenant: prefix.into(),
        prefix: prefix.into(),
        limits: QuotaLimits::default(),
    };
    ["a", "c/", "manual"].map(quota).into()
}

/// Checks that the use of all quotas equals a recount.
fn assert_counted(core: &Core) {
    assert_eq!(core.logs.quotas(), core.logs.recount_quotas(), "the use");
}

/// All logs that a start serves.
///
/// # Errors
/// The record that cannot be read, in words.
fn found(core: &Arc<Core>) -> Result<Logs, (Verdict, String)> {
    let mut logs = Logs::new();
    assert_eq!(core.logs.holdings(), core.logs.recount(), "what is counted");
    for log in core.logs.all() {
        let name = log.name.as_str().to_owned();
        let durable = core.journal.durable();
        let kept = log.state.read().kept(durable);
        let first = kept.first;
        let records = digests(core, &name, first).map_err(|error| {
            let gap = Verdict {
                gap: 1,
                ..Verdict::default()
            };
            (gap, format!("{name}: {error}"))
        })?;
        let state = log.state.read();
        let extras = state.extras.clone().unwrap_or_default();
        let told = extras.producers.told(1);
        let cursors = extras.cursors.iter().filter_map(|(name, mark)| {
            let lsn = (*mark.newest())?.lsn.get();
            Some((name.as_str().to_owned(), lsn))
        });
        logs.insert(
            name,
            LogState {
                id: Some(log.id.get()),
                first: first.get(),
                expired: kept.expired,
                records,
                epoch: state.writer_epoch(),
                cursors: cursors.collect(),
                producers: told
                    .into_iter()
                    .map(|(name, epoch, next, _)| (name.as_str().to_owned(), (epoch, next)))
                    .collect(),
                config: (*state.config).clone(),
                pending: Vec::new(),
            },
        );
    }
    Ok(logs)
}

/// Digests of all records of a log from one lsn on.
fn digests(core: &Arc<Core>, log: &str, mut next: Lsn) -> Result<Vec<u64>, ReadError> {
    let mut found = Vec::new();
    loop {
        let mut request = read_request(log, ReadStart::Lsn(next));
        request.visibility = Some(Visibility::Durable);
        let page = page_either_way(core, &request)?;
        for batch in &page.batches {
            assert_eq!(batch.first_lsn, next, "lsns are dense");
            next = batch.next_lsn();
            found.extend(payloads(batch).iter().map(|data| requests::digest(data)));
        }
        assert_eq!(page.next_lsn, next);
        if next == page.tail_lsn {
            return Ok(found);
        }
        assert!(
            !page.batches.is_empty(),
            "a page below the tail has something"
        );
    }
}
