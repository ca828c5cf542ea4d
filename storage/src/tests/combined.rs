//! All faults at the same time: power cuts, damaged bytes, unreadable sectors, failing calls, no file
//! descriptors and a disk that fills up, while the sorter works.
//!
//! ```text
//! lives on a small disk, each with its faults ─▶ the disk gets space ─▶ restart: compare
//!                          ─▶ accept the loss ─▶ delete logs, sort: space comes back
//! ```
//!
//! `WALD_COMBINED` sets the number of runs. `WALD_SEED` starts at another seed, and alone runs it only.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::api::error::{AdminError, TrimError};
use crate::base::ids::{Position, RecoveryEpoch};
use crate::base::promise::Awaited;
use crate::disk::{CallKind, Disk, Filter, is_out_of_space};
use crate::engine::repair::accept_loss;
use crate::format::frame;
use crate::format::frame::FrameKind;
use crate::format::life::Life;
use crate::upkeep::sorter::Turns;

const KIB: u64 = 1 << 10;
const SECOND: i64 = 1_000_000;
/// Offset of the first frame of a segment.
const FIRST_FRAME: usize = 8192;
const SEGMENT: u64 = 64 * KIB;
/// Capacity in bytes that no run fills.
const ENOUGH: u64 = 64 << 20;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// Calls on files that the engine can write again.
pub(super) const DERIVED: [Filter; 5] = [
    |call| call.path.starts_with("index/"),
    |call| call.path.starts_with("checkpoint/"),
    |call| call.path.starts_with("sorted/") && call.kind == CallKind::Write,
    |call| call.path.starts_with("sorted/") && call.kind == CallKind::Read,
    |call| call.path.starts_with("pool/"),
];

/// A record names itself all over its bytes, so that a damaged file shows whose records it holds.
fn payload(number: u64, bytes: usize) -> Vec<u8> {
    let token = format!("<{number:08}>");
    token.bytes().cycle().take(bytes.max(token.len())).collect()
}

/// The records that have bytes in a file.
fn records_in(bytes: &[u8]) -> BTreeSet<u64> {
    let numbers = |bytes: &[u8]| {
        let tokens = bytes.windows(10).filter(|w| w[0] == b'<' && w[9] == b'>');
        let numbers =
            tokens.filter_map(|w| std::str::from_utf8(&w[1..9]).ok()?.parse::<u64>().ok());
        numbers.collect::<Vec<_>>()
    };
    let opened = cipher::opened_in(bytes);
    let opened = opened.iter().flat_map(|body| numbers(&body.plain));
    numbers(bytes).into_iter().chain(opened).collect()
}

pub(super) fn poll<T>(mut answer: Awaited<T>) -> Option<T> {
    let mut context = Context::from_waker(Waker::noop());
    match Pin::new(&mut answer).poll(&mut context) {
        Poll::Ready(answer) => Some(answer),
        Poll::Pending => None,
    }
}

/// A log as the test knows it.
#[derive(Default)]
struct Model {
    /// Number and bytes of each record, by lsn; all were acknowledged.
    records: Vec<(u64, usize)>,
    first: usize,
    /// Records of an append, and the end of a trim, whose outcome is not known.
    maybe: Vec<(u64, usize)>,
    maybe_first: Option<usize>,
    maybe_deleted: bool,
    /// Whether the engine cannot prove the tail of the log. Its newest records may be lost, and the engine
    /// gives out no lsn.
    unproven: bool,
}

#[derive(Default)]
struct Counts {
    runs: u64,
    cuts: u64,
    kills: u64,
    damaged: u64,
    failed_journals: u64,
    full: u64,
    sorted: u64,
    quarantined: u64,
    short_starts: u64,
    unread_ends: u64,
    /// Logs whose tail a start could not prove.
    unproven: u64,
}

struct Run {
    random: StdRng,
    /// Chooses the runs with damage of [`Run::damage_newest`]. All else stays the same for a seed.
    newest: StdRng,
    disk: SimDisk,
    clock: Arc<TestClock>,
    config: StorageConfig,
    logs: BTreeMap<String, Model>,
    /// Logs whose creation is damaged. They come back with the bytes.
    gone: BTreeMap<String, Model>,
    next_log: u64,
    next_record: u64,
    /// Records in files that were damaged, and these files with the damaged bytes.
    hit: BTreeSet<u64>,
    damaged: BTreeMap<String, Vec<Range<usize>>>,
    /// Files that were damaged where the journal may have ended, and the records that they had.
    ends: BTreeMap<String, BTreeSet<u64>>,
    /// Records whose lsns may be given out again: the journal may have ended before them, or their loss was
    /// accepted.
    given_up: BTreeSet<u64>,
    capacity: u64,
    /// Facts of the last report, and whether the process has ended cleanly since. `None`: a start was cut off since.
    epoch: RecoveryEpoch,
    closed: Option<bool>,
    accepted: bool,
    /// The journal is durable up to here.
    durable: Position,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let disk = SimDisk::seeded(seed);
        let capacity = random.random_range(3..8) << 20;
        disk.set_capacity(capacity);
        let config = StorageConfig {
            pool_segments: random.random_range(1..3),
            reserve_segments: random.random_range(1..3),
            sorter_step_bytes: random.random_range(4..64) * SEGMENT,
            ..small_config()
        };
        Self {
            random,
            newest: StdRng::seed_from_u64(!seed),
            disk,
            clock: TestClock::new(),
            config,
            logs: BTreeMap::new(),
            gone: BTreeMap::new(),
            next_log: 0,
            next_record: 0,
            hit: BTreeSet::new(),
            damaged: BTreeMap::new(),
            ends: BTreeMap::new(),
            given_up: BTreeSet::new(),
            capacity,
            epoch: RecoveryEpoch::FIRST,
            closed: None,
            accepted: false,
            durable: Position::ZERO,
        }
    }

    fn run(&mut self, counts: &mut Counts) {
        let damages = self.random.random_bool(0.5);
        for _ in 0..self.random.random_range(2..6) {
            let core = self.start(counts);
            self.work(&core, damages, counts);
            if damages && self.newest.random_bool(0.2) {
                self.damage_newest(&core, counts);
            }
            counts.failed_journals += u64::from(core.journal.failure().is_some());
            self.durable = self.durable.max(core.journal.durable());
            if core.journal.failure().is_none() && self.random.random_bool(0.2) {
                // A power cut may interrupt the shutdown.
                self.closed = core.close().is_ok().then_some(true);
            }
            drop(core);
            self.disk.set_out_of_descriptors(false);
            if self.disk.is_crashed() || self.random.random_bool(0.5) {
                self.disk.crash(self.random.random());
                counts.cuts += 1;
            } else {
                self.disk.forget_faults();
                counts.kills += 1;
            }
        }
        if !damages {
            let core = self.start(counts);
            self.give_back_on_full_disk(&core, counts);
        }
        self.capacity = ENOUGH;
        self.disk.set_capacity(ENOUGH);
        let core = self.start(counts);
        counts.quarantined += core.damages.records();
        drop(core);
        self.accept();
        let core = self.start(counts);
        let mut logs = core.logs.all().into_iter();
        let unproven = logs.find(|log| log.state.read().unproven);
        let unproven = unproven.map(|log| log.name.clone());
        assert_eq!(unproven, None, "it goes on after an acceptance");
        self.give_back_everything(&core);
        drop(core);
        self.disk.set_capacity(ENOUGH);
        drop(self.open().unwrap());
    }

    fn open(&mut self) -> Result<(Arc<Core>, RecoveryReport), OpenError> {
        self.note_ends();
        let opened = open(&self.disk, &self.config, &self.clock);
        if opened.is_err() {
            self.closed = None;
        }
        opened
    }

    /// Starts and compares. A start that finds no space finds it on a larger disk. If the device cannot read
    /// the end of the journal, an operator gives that end up.
    fn start(&mut self, counts: &mut Counts) -> Arc<Core> {
        if self.random.random_bool(0.2) {
            self.disk.crash_after(self.random.random_range(1..30));
            if let Ok((core, report)) = self.open() {
                self.disk.forget_faults();
                if !self.disk.is_crashed() {
                    self.compare(&core, &report, counts);
                    return core;
                }
                self.closed = None;
            }
            self.disk.crash(self.random.random());
            counts.cuts += 1;
        }
        let opened = match self.open() {
            Err(OpenError::Io { source, .. }) if is_out_of_space(&source) => {
                counts.short_starts += 1;
                self.disk.set_capacity(ENOUGH);
                let opened = self.open();
                self.disk.set_capacity(self.capacity);
                opened
            }
            Err(OpenError::UnreadEnd { file, .. }) => {
                assert!(self.damaged.contains_key(&file), "{file} can be read");
                counts.unread_ends += 1;
                self.accept();
                self.open()
            }
            opened => opened,
        };
        let (core, report) = opened.unwrap_or_else(|error| panic!("a start fails: {error}"));
        self.compare(&core, &report, counts);
        core
    }

    /// An operator accepts the loss.
    fn accept(&mut self) {
        self.note_hit();
        self.given_up.extend(&self.hit);
        (self.accepted, self.closed) = (true, None);
        let disk: Arc<dyn Disk> = Arc::new(self.disk.clone());
        let clock = Arc::clone(&self.clock) as Arc<dyn Clock>;
        self.disk.set_capacity(ENOUGH);
        accept_loss(&disk, &self.config, clock, "by a test").unwrap();
        self.disk.set_capacity(self.capacity);
    }

    /// Notes the records in damaged files.
    fn note_hit(&mut self) {
        for path in self.damaged.keys() {
            if let Some(bytes) = self.disk.contents(path) {
                let records = records_in(&bytes);
                if let Some(of_end) = self.ends.get_mut(path) {
                    of_end.extend(&records);
                }
                self.hit.extend(records);
            }
        }
    }

    /// Notes the records of a damaged end of the journal, unless a start finds proof that the damaged bytes were
    /// flushed: then the journal goes on behind them.
    fn note_ends(&mut self) {
        self.note_hit();
        for (path, records) in &self.ends {
            if !self.is_proven(path) {
                self.given_up.extend(records);
            }
        }
    }

    /// Whether a good header of a file shows that all damaged bytes of the file were flushed.
    fn is_proven(&self, path: &str) -> bool {
        let places = &self.damaged[path];
        let bytes = self.disk.contents(path).unwrap_or_default();
        let Ok(life) = Life::decode(&bytes) else {
            return false;
        };
        let header = |at: usize| {
            let header = frame::decode_header(bytes.get(at..)?, life.salt)?;
            let end = at + header.header_len as usize;
            let is_good = !places.iter().any(|bad| bad.start < end && at < bad.end);
            let mark = header.durable_mark.get() + at as u64;
            // The offset in the file up to which the header proves bytes.
            is_good.then(|| mark.saturating_sub(header.position.get()))
        };
        let proven = (FIRST_FRAME..bytes.len())
            .step_by(8)
            .filter_map(header)
            .max();
        let proven = usize::try_from(proven.unwrap_or(0)).expect("small");
        places.iter().all(|bad| bad.end <= proven)
    }

    /// Judges the facts of a report that do not follow from the records.
    fn judge(&mut self, core: &Arc<Core>, report: &RecoveryReport, damaged: bool) {
        assert!(report.recovery_epoch >= self.epoch, "epochs go up");
        if !report.clean && !report.created {
            let (new, old) = (report.recovery_epoch, self.epoch);
            assert!(new > old, "{new} follows {old} after an unclean end");
        }
        self.epoch = report.recovery_epoch;
        assert_eq!(report.logs, core.logs.len() as u64);
        assert!(self.accepted || report.accepted.is_empty());
        if damaged {
            return;
        }
        let closed = self.closed.replace(false);
        assert!(closed.is_none_or(|closed| report.clean == closed));
        assert!(!report.clean || report.torn_bytes == 0);
        let (end, durable) = (report.end, self.durable);
        assert!(end >= durable, "{end} is below {durable}");
        let kept = |model: &Model| (model.records.len() - model.first) as u64;
        assert_eq!(report.records, self.logs.values().map(kept).sum::<u64>());
    }

    /// Whether the journal may end in this file. A link may have been lost with its file, so the one before counts.
    fn is_end(&self, path: &str) -> bool {
        // A file that waits for its turn may have bytes of an earlier life.
        let begun = |path: &String| {
            let bytes = self.disk.contents(path).expect("it is listed");
            let life = Life::decode(&bytes).ok();
            let link =
                life.and_then(|life| frame::decode_header(bytes.get(FIRST_FRAME..)?, life.salt));
            link.is_some() || self.damaged.contains_key(path)
        };
        let names = self.disk.list("journal").unwrap_or_default();
        let mut paths: Vec<_> = (names.iter())
            .map(|name| format!("journal/{name}"))
            .filter(begun)
            .collect();
        paths.sort_unstable();
        paths.iter().rev().take(2).any(|end| end == path)
    }

    fn work(&mut self, core: &Arc<Core>, damages: bool, counts: &mut Counts) {
        if self.random.random_bool(0.5) {
            self.disk.crash_after(self.random.random_range(1..400));
        }
        for _ in 0..self.random.random_range(0..3) {
            let filter = DERIVED[self.random.random_range(0..DERIVED.len())];
            let error = [EIO, ENOSPC][self.random.random_range(0..2)];
            let nth = self.random.random_range(1..60);
            self.disk.fail_call(filter, nth, error);
        }
        let bulky = self.random.random_bool(0.6);
        let damages = damages && self.random.random_bool(0.6);
        for _ in 0..self.random.random_range(5..120) {
            self.turn(core, bulky, counts);
            if core.journal.failure().is_some() || self.disk.is_crashed() {
                break;
            }
        }
        if damages && !self.disk.is_crashed() {
            for _ in 0..self.random.random_range(1..3) {
                self.damage(counts);
            }
            for _ in 0..self.random.random_range(0..20) {
                self.turn(core, bulky, counts);
            }
        }
    }

    fn turn(&mut self, core: &Arc<Core>, bulky: bool, counts: &mut Counts) {
        match self.random.random_range(0..100) {
            0..60 => {
                let times = if bulky { 4 } else { 1 };
                for _ in 0..times {
                    self.append(core, bulky, counts);
                }
            }
            60..66 => self.trim(core),
            66..70 => self.delete(core),
            70..90 => {
                self.clock.advance(self.random.random_range(0..30) * SECOND);
                // The sorter would wait for a descriptor.
                self.disk.set_out_of_descriptors(false);
                self.sort(core, counts);
            }
            90..94 => core.idle(),
            94..96 => {
                let out = self.random.random_bool(0.3);
                self.disk.set_out_of_descriptors(out);
            }
            _ => self.clock.advance(2 * SECOND),
        }
        self.clock.advance(10_000);
    }

    /// A step of the sorter. All its errors must be planned faults.
    fn sort(&self, core: &Arc<Core>, counts: &mut Counts) -> bool {
        match core.sort_in_turn() {
            Ok(done) => {
                counts.sorted += u64::from(done);
                done
            }
            Err(_) => false,
        }
    }

    fn append(&mut self, core: &Arc<Core>, bulky: bool, counts: &mut Counts) {
        let name = match self.choose() {
            Some(name) if self.random.random_bool(0.95) && self.logs[&name].maybe.is_empty() => {
                name
            }
            _ => {
                self.next_log += 1;
                format!("log/{}", self.next_log)
            }
        };
        let mut added = Vec::new();
        for _ in 0..self.random.random_range(1..4) {
            self.next_record += 1;
            let most = if bulky { 9000 } else { 600 };
            added.push((self.next_record, self.random.random_range(10..most)));
        }
        let data: Vec<Vec<u8>> = added.iter().map(|(n, bytes)| payload(*n, *bytes)).collect();
        let data: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
        let mut ticket = core.enqueue(batch(&[(&name, &data)]), Durability::Durable);
        core.turn();
        match settled(&mut ticket) {
            Some(Ok(answer)) => {
                let first = answer.appends[0].first_lsn.get();
                let model = self.logs.entry(name.clone()).or_default();
                assert!(!model.unproven, "{name}: its tail is not proven");
                assert_eq!(first, model.records.len() as u64, "{name}: its next lsn");
                model.records.extend(added);
            }
            Some(Err(AppendError::Unknown(_))) | None => {
                self.logs.entry(name).or_default().maybe = added;
            }
            Some(Err(AppendError::DiskFull(_))) => counts.full += 1,
            Some(Err(AppendError::TailUnproven { .. })) => {
                // A new log could be one whose name is lost.
                let model = self.logs.get(&name);
                let unproven = model.map_or(!self.damaged.is_empty(), |model| model.unproven);
                assert!(unproven, "{name}: its tail is proven");
            }
            Some(Err(_)) => {}
        }
    }

    fn choose(&mut self) -> Option<String> {
        let at = self.random.random_range(0..self.logs.len().max(1));
        self.logs.keys().nth(at).cloned()
    }

    fn trim(&mut self, core: &Arc<Core>) {
        let Some(name) = self.choose() else { return };
        let model = &self.logs[&name];
        let (first, tail) = (model.first, model.records.len());
        let to = self.random.random_range(first..=tail);
        let answer = core.trim_in_turn(target(&name), Lsn::new(to as u64));
        core.turn();
        let model = self.logs.get_mut(&name).expect("it is known");
        match poll(answer) {
            // A trim whose outcome was unknown may have reached further.
            Some(Ok(first)) => {
                let first = usize::try_from(first.get()).expect("small");
                (model.first, model.maybe_first) = (first.max(to), None);
            }
            Some(Err(TrimError::Append(AppendError::Unknown(_)))) | None => {
                model.maybe_first = Some(to.max(model.maybe_first.unwrap_or(0)));
            }
            Some(Err(_)) => {}
        }
    }

    fn delete(&mut self, core: &Arc<Core>) {
        if let Some(name) = self.choose() {
            self.delete_log(core, &name);
        }
    }

    fn delete_log(&mut self, core: &Arc<Core>, name: &str) {
        let answer = core.delete_in_turn(target(name));
        core.turn();
        match poll(answer) {
            Some(Ok(())) => drop(self.logs.remove(name)),
            Some(Err(AdminError::Append(AppendError::Unknown(_)))) | None => {
                self.logs.get_mut(name).expect("it is known").maybe_deleted = true;
            }
            Some(Err(_)) => {}
        }
    }

    /// Flips a byte of a file, or makes a sector unreadable.
    fn damage(&mut self, counts: &mut Counts) {
        let mut paths = Vec::new();
        for directory in ["journal", "sorted", "index", "checkpoint"] {
            let names = self.disk.list(directory).unwrap_or_default();
            paths.extend(names.iter().map(|name| format!("{directory}/{name}")));
        }
        if paths.is_empty() {
            return;
        }
        let path = paths[self.random.random_range(0..paths.len())].clone();
        let mut bytes = self.disk.contents(&path).expect("it is listed");
        let Some(end) = bytes.iter().rposition(|byte| *byte != 0) else {
            return;
        };
        counts.damaged += 1;
        let at = self.random.random_range(0..=end);
        if self.is_end(&path) {
            self.ends.entry(path.clone()).or_default();
        }
        let is_unreadable = self.random.random_bool(0.5);
        // Real reads fail by the page: a small read before the bad byte fails, too.
        let page = at / 4096 * 4096;
        let place = match is_unreadable {
            true => page..page + 4096,
            false => at..at + 1,
        };
        self.damaged.entry(path.clone()).or_default().push(place);
        self.note_hit();
        if is_unreadable {
            self.disk.set_unreadable(&path, page..page + 4096);
        } else {
            bytes[at] ^= 1 << self.random.random_range(0..8);
            self.disk.replace(&path, bytes);
        }
    }

    /// Overwrites the newest frames in front of a mark that proves that they were flushed. No frame behind tells whose
    /// records they had, so that the tails of some logs are in doubt.
    fn damage_newest(&mut self, core: &Arc<Core>, counts: &mut Counts) {
        core.idle();
        if core.journal.failure().is_some() || self.disk.is_crashed() {
            return;
        }
        let Some(segment) = core.journal.segment_at(core.journal.durable()) else {
            return;
        };
        let path = segment.path();
        let bytes = self.disk.contents(&path).expect("it is written");
        let header = |at: &usize| frame::decode_header(bytes.get(*at..)?, segment.life.salt);
        let frames: Vec<usize> = (FIRST_FRAME..bytes.len())
            .step_by(8)
            .filter(|at| header(at).is_some())
            .collect();
        let Some((mark, before)) = frames.split_last() else {
            return;
        };
        if before.is_empty() || header(mark).is_none_or(|h| h.kind != FrameKind::Marker) {
            return;
        }
        let number = self.newest.random_range(1..=before.len().min(8));
        let place = before[before.len() - number]..*mark;
        counts.damaged += 1;
        self.ends.entry(path.clone()).or_default();
        self.damaged
            .entry(path.clone())
            .or_default()
            .push(place.clone());
        self.note_hit();
        let mut bytes = bytes.clone();
        bytes[place].fill(0xA5);
        self.disk.replace(&path, bytes);
    }

    /// Compares the store with the model: no record may be wrong, and only records in files that the run
    /// damaged may be missing.
    fn compare(&mut self, core: &Arc<Core>, report: &RecoveryReport, counts: &mut Counts) {
        self.note_hit();
        let damaged = !self.damaged.is_empty();
        if !damaged {
            assert_eq!(report.findings, Vec::<String>::new());
            assert_eq!(report.damage, []);
            super::simulation::assert_no_leftovers(&self.disk, core);
        }
        let hit = std::mem::take(&mut self.hit);
        let gone = std::mem::take(&mut self.gone).into_iter();
        let (back, gone): (BTreeMap<_, _>, _) =
            gone.partition(|(name, _)| core.logs.by_name(name).is_some());
        self.logs.extend(back);
        self.gone = gone;
        self.logs.retain(|name, model| {
            let Some(log) = core.logs.by_name(name) else {
                let all_hit = model.records.iter().all(|(number, _)| hit.contains(number));
                let may_be_gone = model.maybe_deleted || model.records.is_empty();
                // The frame that creates a log names none of its records.
                let is_named = !report.findings.is_empty() || !report.damage.is_empty();
                assert!(
                    may_be_gone || (damaged && (all_hit || is_named)),
                    "{name} is gone; the start cut off {} bytes, and knows of accepted losses {:?}; records hit: {} of {}",
                    report.torn_bytes,
                    report.accepted,
                    (model.records.iter()).filter(|(number, _)| hit.contains(number)).count(),
                    model.records.len(),
                );
                if !may_be_gone {
                    self.gone.insert(name.clone(), std::mem::take(model));
                }
                return false;
            };
            if damaged {
                // A damaged trim or deletion may have no effect, and a damaged tail may be short.
                compare_damaged(core, name, model, (&hit, &self.given_up));
                return true;
            }
            model.maybe_deleted = false;
            let first = log.state.read().first(core.journal.durable()).get();
            let first = usize::try_from(first).expect("small");
            let expected = [Some(model.first), model.maybe_first];
            assert!(expected.contains(&Some(first)), "{name} begins at {first}");
            (model.first, model.maybe_first) = (first, None);
            let found = read_from(core, name, first);
            let tail = first + found.len();
            let maybe = std::mem::take(&mut model.maybe);
            let acked = model.records.len();
            if tail != acked {
                assert_eq!(tail, acked + maybe.len(), "{name}: its tail");
                model.records.extend(maybe);
            }
            let expected = model.records[first..].iter();
            for ((number, bytes), data) in expected.zip(found) {
                assert!(data == payload(*number, *bytes), "{name}: record {number}");
            }
            true
        });
        self.hit = hit;
        counts.unproven += self.logs.values().filter(|model| model.unproven).count() as u64;
        self.judge(core, report, damaged);
    }

    /// Deletes every second log. A full disk gives space back, and appends go on.
    fn give_back_on_full_disk(&mut self, core: &Arc<Core>, counts: &mut Counts) {
        for round in 0..400 {
            let before = counts.full;
            self.append(core, true, counts);
            if counts.full > before && round > 20 {
                break;
            }
            if round % 8 == 0 {
                self.sort(core, counts);
            }
            self.clock.advance(SECOND);
        }
        let names: Vec<String> = self.logs.keys().step_by(2).cloned().collect();
        let mut dead = 0;
        for name in names {
            let model = &self.logs[&name];
            let kept = &model.records[model.first..];
            let bytes: u64 = kept.iter().map(|(_, bytes)| *bytes as u64).sum();
            self.delete_log(core, &name);
            dead += if self.logs.contains_key(&name) {
                0
            } else {
                bytes
            };
        }
        assert!(core.journal.failure().is_none(), "no fault is left");
        let mut turns = Turns::default();
        let mut steps = 0;
        for _ in 0..60 {
            self.clock.advance(30 * SECOND);
            let done = match core.sorter.sort_turn(&mut turns, &mut |_| Ok(())) {
                Ok(done) => done,
                Err(error) => panic!("sorting on a full disk: {error:?}"),
            };
            core.turn();
            steps += u64::from(done);
        }
        counts.sorted += steps;
        if dead < 8 * SEGMENT {
            return;
        }
        let refused = counts.full;
        for _ in 0..4 {
            self.clock.advance(2 * SECOND);
            self.append(core, true, counts);
        }
        assert!(
            steps > 0 && counts.full == refused,
            "{dead} bytes are dead on a disk of {}, {steps} steps were done, {} appends refused",
            self.capacity,
            counts.full - refused
        );
    }

    /// Deletes all logs. Nearly all space comes back.
    fn give_back_everything(&mut self, core: &Arc<Core>) {
        for log in core.logs.all() {
            let answer = core.delete_in_turn(target(log.name.as_str()));
            core.turn();
            poll(answer).expect("it is answered").unwrap();
        }
        self.logs.clear();
        let mut turns = Turns::default();
        let mut idle = 0;
        for _ in 0..300 {
            self.clock.advance(30 * SECOND);
            let done = core.sorter.sort_turn(&mut turns, &mut |_| Ok(()));
            core.turn();
            match done {
                Ok(true) => idle = 0,
                Ok(false) => idle += 1,
                Err(error) => panic!("sorting with free space: {error:?}"),
            }
            if idle > 3 {
                break;
            }
        }
        assert!(idle > 3, "sorting comes to an end");
        if !self.damaged.is_empty() {
            return;
        }
        let used = ENOUGH - self.disk.free_bytes().unwrap().unwrap_or(0);
        let kept = (self.config.pool_segments + self.config.reserve_segments) as u64;
        let most = (kept + 16) * SEGMENT + self.config.sorter_step_bytes / 2;
        let shown = core.statistics();
        assert!(
            used <= most,
            "{used} bytes are used, at most {most}: {} segments, {} of the pool, runs of {}, dead {}",
            shown.journal_segments,
            shown.pool_bytes,
            shown.sorted_bytes,
            shown.sorted_dead_bytes
        );
    }
}

/// Every record of a log from `next` on, where nothing is damaged.
fn read_from(core: &Arc<Core>, log: &str, next: usize) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    let mut next = Lsn::new(next as u64);
    loop {
        let page = read::page(
            &core.store,
            &read_request(log, ReadStart::Lsn(next)),
            Reach::Disk,
        )
        .unwrap_or_else(|error| panic!("{log}: {error}"));
        found.extend(page.batches.iter().flat_map(payloads));
        next = page.next_lsn;
        if next == page.tail_lsn {
            return found;
        }
        assert!(!page.batches.is_empty(), "{log}: no progress at {next}");
    }
}

/// Reads around damage. A record is right, or named as damaged and in a file that was damaged.
fn compare_damaged(
    core: &Arc<Core>,
    log: &str,
    model: &mut Model,
    (hit, given_up): (&BTreeSet<u64>, &BTreeSet<u64>),
) {
    let all: Vec<(u64, usize)> = [&model.records[..], &model.maybe[..]].concat();
    let acked = model.records.len();
    let check_gap = |from: u64, to: u64| {
        for lsn in from..to.min(acked as u64) {
            let lsn = usize::try_from(lsn).expect("small");
            let (number, _) = model.records[lsn];
            let trimmed = lsn < model.first.max(model.maybe_first.unwrap_or(0));
            assert!(
                trimmed || hit.contains(&number),
                "{log}: lsn {lsn} is missing, and nothing damaged it"
            );
        }
    };
    let mut next = 0;
    loop {
        let start = ReadStart::Lsn(Lsn::new(next));
        match read::page(&core.store, &read_request(log, start), Reach::Disk) {
            Ok(page) => {
                for stored in &page.batches {
                    for (lsn, data) in (stored.first_lsn.get()..).zip(payloads(stored)) {
                        let expected = usize::try_from(lsn).ok().and_then(|lsn| all.get(lsn));
                        let (number, bytes) = expected.expect("it was appended");
                        assert!(
                            data == payload(*number, *bytes),
                            "{log}: lsn {lsn} is wrong"
                        );
                    }
                }
                let began = next;
                next = page.next_lsn.get();
                let is_tail = page.next_lsn == page.tail_lsn;
                assert!(next > began || is_tail, "{log}: no progress at {next}");
                // Only a read at the tail shows whether the tail is proven.
                if is_tail && next == began {
                    check_gap(next, u64::MAX);
                    // Damage at an end that no marker proved looks like a torn tail: lsns go on there.
                    let tail = usize::try_from(next).expect("small");
                    assert!(tail <= all.len(), "{log}: nothing was appended at {tail}");
                    for (number, _) in model.records.iter().skip(tail) {
                        assert!(
                            given_up.contains(number),
                            "{log}: the lsn of record {number} is given out again"
                        );
                    }
                    model.records = all;
                    model.records.truncate(tail);
                    model.maybe.clear();
                    model.unproven = false;
                    // A trim at such an end goes with the records before it.
                    model.first = model.first.min(tail);
                    model.maybe_first = model.maybe_first.map(|first| first.min(tail));
                    return;
                }
            }
            Err(ReadError::Trimmed { first, .. }) => {
                let first = first.get();
                let most = model.first.max(model.maybe_first.unwrap_or(0));
                assert!(first > next && first <= most as u64, "{log}: {first}");
                next = first;
            }
            Err(ReadError::Quarantined { to: Some(to), .. }) => {
                check_gap(next, to.get());
                next = to.get();
            }
            Err(ReadError::Quarantined { to: None, .. }) => {
                check_gap(next, u64::MAX);
                // The records come back if the device can read them again, and no lsn is given out until then.
                model.unproven = true;
                break;
            }
            Err(error) => panic!("{log}: {error}"),
        }
    }
}

pub(super) fn setting(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    value.parse().ok()
}

#[test]
fn store_survives_all_faults_together_and_gives_space_back() {
    let (runs, seed) = (setting("WALD_COMBINED"), setting("WALD_SEED"));
    let number = runs.unwrap_or(if seed.is_some() { 1 } else { 60 });
    let first = seed.unwrap_or(0);
    let mut all = Counts::default();
    let mut failed = Vec::new();
    for seed in first..first + number {
        let run = std::panic::AssertUnwindSafe(|| Run::new(seed).run(&mut all));
        if std::panic::catch_unwind(run).is_err() {
            eprintln!("repeat with: WALD_SEED={seed} cargo test -p wald-storage combined");
            failed.push(seed);
        }
        all.runs += 1;
        if failed.len() >= 40 {
            break;
        }
    }
    println!(
        "{} runs: {} power cuts, {} kills, {} damaged places, {} records quarantined, {} failed journals, \
         {} appends on a full disk, {} steps of sorting, {} starts without space, {} ends that cannot be read, \
         {} tails that cannot be proven",
        all.runs,
        all.cuts,
        all.kills,
        all.damaged,
        all.quarantined,
        all.failed_journals,
        all.full,
        all.sorted,
        all.short_starts,
        all.unread_ends,
        all.unproven
    );
    assert_eq!(failed, Vec::<u64>::new(), "seeds that failed");
    let counted = [all.cuts, all.damaged, all.full, all.sorted, all.unproven];
    assert!(number < 50 || !counted.contains(&0), "{counted:?}");
}
