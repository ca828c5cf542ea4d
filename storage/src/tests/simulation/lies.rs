//! A device that lies: a lost write, a write in another place, bits that flip at rest, blocks of another day.
//! Flushed data may be gone, so not everything can be there; but served records are right, and missing
//! records are named.
//!
//! **Limits of detection.** A later frame proves that a frame existed: its durable mark says how far the
//! journal was flushed when it was written. If the newest group is lost, and no later frame exists or
//! survives, the journal seems to end earlier, as after a torn write. A silent loss is therefore a
//! whole end of the journal: no record of it or behind it is served. After one fault that end begins with the
//! last turn at the earliest. Only a write that landed in the journal, or several flips, can hit both a frame
//! and its proof.

use super::requests::digest;
use super::*;
use crate::disk::Lie;

/// One log as it is served: records by lsn, and ranges that are named as damaged.
struct Served {
    records: BTreeMap<u64, u64>,
    named: Vec<(u64, u64)>,
    /// Whether a log of that name exists.
    is_there: bool,
}

fn served(core: &Arc<Core>, log: &str) -> Served {
    let mut served = Served {
        records: BTreeMap::new(),
        named: Vec::new(),
        is_there: true,
    };
    let mut next = 0;
    loop {
        match read::page(
            &core.store,
            &read_request(log, ReadStart::Lsn(Lsn::new(next))),
            Reach::Disk,
        ) {
            Ok(page) => {
                for batch in &page.batches {
                    let lsns = batch.first_lsn.get()..;
                    let data = payloads(batch);
                    served
                        .records
                        .extend(lsns.zip(data.iter().map(|data| digest(data))));
                }
                // The error for a tail in doubt goes to readers at the tail.
                if page.batches.is_empty() && page.next_lsn == page.tail_lsn {
                    return served;
                }
                assert!(
                    page.next_lsn.get() > next,
                    "no page is empty below the tail"
                );
                next = page.next_lsn.get();
            }
            Err(ReadError::Quarantined { from, to, .. }) => {
                let to = to.map_or(u64::MAX, Lsn::get);
                served.named.push((from.get(), to));
                if to == u64::MAX {
                    return served;
                }
                assert!(to > next, "no progress");
                next = to;
            }
            Err(ReadError::Target(TargetError::NotFound { .. })) => {
                served.is_there = false;
                return served;
            }
            Err(error) => panic!("{log}: {error}"),
        }
    }
}

/// Outcome of one run, in records.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    told: u64,
    served: u64,
    named: u64,
    /// Missing in silence, where nothing can prove the loss.
    cut: u64,
    not_opened: u64,
}

impl Outcome {
    fn add(&mut self, other: &Self) {
        self.told += other.told;
        self.served += other.served;
        self.named += other.named;
        self.cut += other.cut;
        self.not_opened += other.not_opened;
    }
}

/// How the device fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Device {
    Loses,
    Misplaces,
    Flips,
    /// Blocks come from another history of the same store, as when a snapshot is restored in part.
    Returns,
}

impl Run {
    fn lied_to(&mut self, device: Device) -> Outcome {
        let mut outcome = Outcome::default();
        // For each turn: number of writes and of units before it.
        let mut turns = Vec::new();
        let lives = self.random.random_range(1..4u32);
        let mut other = None;
        for life in 1..=lives {
            if life == lives && device == Device::Returns {
                other = Some((self.disk.copy(), self.another_history()));
            }
            let core = self.start(0);
            let lies = matches!(device, Device::Loses | Device::Misplaces);
            if life == lives && lies {
                let nth = self.random.random_range(1..14);
                let seed = self.random.random();
                self.disk
                    .lie_about_write(nth, device == Device::Misplaces, seed);
            }
            self.bulky = self.random.random_range(0..100) < 40;
            for _ in 0..self.random.random_range(1..14u32) {
                turns.push((self.disk.writes(), self.units.len()));
                self.append_all(&core);
            }
            if self.random.random_range(0..100) < 50 {
                turns.push((self.disk.writes(), self.units.len()));
                self.idle(&core);
            }
            if self.random.random_range(0..100) < 30 {
                turns.push((self.disk.writes(), self.units.len()));
                core.close().unwrap();
            }
            drop(core);
        }
        turns.push((self.disk.writes(), self.units.len()));
        let lies = self.disk.lies();
        outcome.told = lies.len() as u64;
        // Drops the cache. Everything was flushed.
        self.disk.crash(1);
        let flips = match (device, other) {
            (Device::Flips, _) => self.flip(),
            (_, Some((before, other))) => self.put_back(&before, &other),
            _ => 0,
        };
        outcome.told += flips;
        // A block may hold both something and its proof.
        let blocks = device == Device::Returns && flips > 0;
        let earliest = match blocks {
            true => 0,
            false => self.earliest_silent(&turns, &lies, flips),
        };
        match open(&self.disk, &self.config, &self.clock) {
            Ok((core, report)) => self.compare(&core, &report, earliest, &mut outcome),
            Err(OpenError::NotAStore { .. }) => {
                let path = lies.iter().filter_map(|lie| lie.landed.as_ref());
                let format = path.filter(|(path, _)| path == "FORMAT").count();
                assert!(format > 0 || device == Device::Flips);
                outcome.not_opened = 1;
            }
            Err(error) => panic!("{error}"),
        }
        outcome
    }

    /// Appends some records, and flushes them.
    fn append_all(&mut self, core: &Arc<Core>) {
        let mut asked = Vec::new();
        for _ in 0..self.random.random_range(1..4u32) {
            let log = requests::LOGS[self.random.random_range(0..5usize)];
            let size = match self.bulky {
                true => self.random.random_range(1000..9000usize),
                false => self.random.random_range(0..300usize),
            };
            let mut logs = vec![(log, self.random.random_range(1..4usize), size / 3)];
            if log != "a" && self.random.random_range(0..3) == 0 {
                logs.push(("a", 1, size / 2));
            }
            let (batch, parts) = self.batch(&logs);
            let durable = Some(Durability::Durable);
            asked.push(self.enqueue(core, batch, (parts, Vec::new()), durable));
        }
        self.settle_all(core, asked);
        self.clock.advance(300_000);
    }

    fn settle_all(&mut self, core: &Arc<Core>, asked: Vec<Asked>) {
        core.turn();
        for asked in asked {
            let before = self.ledger.units.len();
            self.settle(asked);
            self.units.extend_from_slice(&self.ledger.units[before..]);
        }
    }

    /// Flips some bits of some files.
    fn flip(&mut self) -> u64 {
        let flips = self.random.random_range(1..4);
        for _ in 0..flips {
            let mut paths = vec!["BEGUN".to_owned()];
            for directory in ["journal", "index", "checkpoint", "pool"] {
                let names = crate::disk::Disk::list(&self.disk, directory).unwrap();
                paths.extend(names.iter().map(|name| format!("{directory}/{name}")));
            }
            let path = &paths[self.random.random_range(0..paths.len())];
            let mut bytes = self.disk.contents(path).unwrap();
            let used = bytes.iter().rposition(|byte| *byte != 0).unwrap_or(0) + 1;
            if used <= bytes.len() {
                let at = self.random.random_range(0..used);
                bytes[at] ^= 1 << self.random.random_range(0..8);
                self.disk.replace(path, bytes);
            }
        }
        flips
    }

    /// The disk as other appends from here on would leave it.
    fn another_history(&mut self) -> SimDisk {
        let disk = self.disk.copy();
        let (core, _) = open(&disk, &self.config, &self.clock).unwrap();
        for _ in 0..self.random.random_range(4..20u32) {
            let log = requests::LOGS[self.random.random_range(0..5usize)];
            let size = self.random.random_range(100..3000usize);
            let (batch, _) = self.batch(&[(log, 1, size)]);
            let mut ticket = core.enqueue(batch, Durability::Durable);
            core.turn();
            assert!(matches!(settled(&mut ticket), Some(Ok(_))));
        }
        drop(core);
        disk
    }

    /// Replaces some blocks of frames with blocks of the other history, in segments made after the histories
    /// parted: a segment that was ready before has the same salt in both.
    fn put_back(&mut self, before: &SimDisk, other: &SimDisk) -> u64 {
        const BLOCK: usize = 4096;
        let mut blocks = Vec::new();
        for name in crate::disk::Disk::list(other, "journal").unwrap() {
            let path = format!("journal/{name}");
            let ours = self.disk.contents(&path);
            if before.contents(&path).is_some() || ours.is_none() {
                continue;
            }
            let (ours, theirs) = (ours.unwrap(), other.contents(&path).unwrap());
            let pairs = ours.chunks_exact(BLOCK).zip(theirs.chunks_exact(BLOCK));
            for (number, (ours, theirs)) in pairs.enumerate().skip(2) {
                if theirs.iter().any(|byte| *byte != 0) && ours != theirs {
                    blocks.push((path.clone(), number * BLOCK, theirs.to_vec()));
                }
            }
        }
        let most = blocks.len().min(3);
        let chosen = self.random.random_range(most.min(1)..=most);
        for _ in 0..chosen {
            let index = self.random.random_range(0..blocks.len());
            let (path, at, theirs) = blocks.swap_remove(index);
            let mut bytes = self.disk.contents(&path).unwrap();
            bytes[at..at + BLOCK].copy_from_slice(&theirs);
            self.disk.replace(&path, bytes);
        }
        chosen as u64
    }

    /// Takes a group back for want of space. The zeros over it never reach the device, and the next group
    /// ends where one of its frames begins. Returns whether that frame is still on the device.
    fn taken_back(&mut self, size: usize) -> bool {
        let core = self.start(0);
        self.append_all(&core);
        let before = self.disk.writes();
        // One write of the group, as long as possible; one that fails; the zeros.
        self.disk
            .fail_write(1, std::io::ErrorKind::StorageFull, usize::MAX);
        self.disk.lie_about_write(3, false, before);
        let refused = self.counts.refused;
        self.append_each(&core, &[("a", 1, size), ("b", 1, 21)]);
        assert_eq!(self.counts.refused, refused + 2, "there was no space");
        let end = core.journal.written();
        // After this time the engine tries again to find space.
        self.clock.advance(2_000_000);
        self.append_each(&core, &[("a", 1, size)]);
        assert_eq!(self.counts.refused, refused + 2, "there is space again");
        let (life, base, path) = {
            let segments = core.journal.segments.read();
            let segment = segments.values().next_back().unwrap();
            (segment.life, segment.base, segment.path())
        };
        let next = core.journal.written();
        assert!(next > end);
        drop(core);
        assert_eq!(self.disk.lies().len(), 1);
        self.disk.crash(1);
        let bytes = self.disk.contents(&path).unwrap();
        let behind = &bytes[usize::try_from(next.since(base)).unwrap()..];
        let stale = crate::format::frame::decode_header(behind, life.salt);
        let (core, report) = open(&self.disk, &self.config, &self.clock).unwrap();
        let none = self.units.len();
        self.compare(&core, &report, none, &mut Outcome::default());
        assert_eq!(report.damage, [], "nothing that was acknowledged is hit");
        stale.is_some_and(|header| header.position == next)
    }

    /// Appends each record separately, all in one group.
    fn append_each(&mut self, core: &Arc<Core>, appends: &[(&'static str, usize, usize)]) {
        let mut asked = Vec::new();
        for append in appends {
            let (batch, parts) = self.batch(&[*append]);
            let durable = Some(Durability::Durable);
            asked.push(self.enqueue(core, batch, (parts, Vec::new()), durable));
        }
        self.settle_all(core, asked);
    }

    /// The first unit that may be missing in silence.
    fn earliest_silent(&self, turns: &[(u64, usize)], lies: &[Lie], flips: u64) -> usize {
        let landed = lies.iter().filter_map(|lie| lie.landed.as_ref());
        let places = landed.count() as u64 + flips;
        if places > 1 || lies.iter().any(|lie| lie.landed.is_some()) {
            return 0;
        }
        // Nothing was written after the last turn.
        turns[turns.len() - 2].1
    }

    fn compare(
        &mut self,
        core: &Arc<Core>,
        report: &RecoveryReport,
        earliest: usize,
        outcome: &mut Outcome,
    ) {
        let nobody = report.damage.iter().any(|gap| gap.log.is_none());
        let names: Vec<String> = self.ledger.live.keys().cloned().collect();
        let all: BTreeMap<String, Served> = names
            .iter()
            .map(|name| (name.clone(), served(core, name)))
            .collect();
        for (name, found) in &all {
            let state = &self.ledger.live[name];
            for (lsn, record) in &found.records {
                assert_eq!(
                    state.record(*lsn),
                    Some(*record),
                    "{name} {lsn}: wrong bytes"
                );
                outcome.served += 1;
            }
        }
        for log in core.logs.all() {
            assert!(all.contains_key(log.name.as_str()), "a log that never was");
        }
        // For a log whose name is lost, a start can report only that.
        let unnamed = nobody || !report.findings.is_empty();
        let mut end = None;
        for (index, unit) in self.units.iter().enumerate() {
            let (there, named, silent) = fate(unit, &all, unnamed);
            outcome.named += named;
            outcome.cut += silent;
            if silent > 0 {
                end.get_or_insert(index);
                assert!(
                    index >= earliest,
                    "unit {index} is missing without a word, {earliest}: {unit:?}"
                );
            }
            assert!(
                end.is_none() || there == 0,
                "unit {index} is served, and unit {end:?} is missing without a word"
            );
        }
    }
}

/// Number of records of a unit that are served, named as damaged, and neither.
fn fate(unit: &Unit, all: &BTreeMap<String, Served>, unnamed: bool) -> (u64, u64, u64) {
    let (mut there, mut named, mut silent) = (0, 0, 0);
    for effect in &unit.effects {
        let Effect::Append {
            log,
            first,
            records,
            ..
        } = effect
        else {
            continue;
        };
        let found = &all[*log];
        for lsn in *first..first + records.len() as u64 {
            let ranges = &mut found.named.iter();
            let is_named = ranges.any(|(from, to)| (*from..*to).contains(&lsn));
            match found.records.contains_key(&lsn) {
                true => {
                    assert!(!is_named, "{log} {lsn} is served and named as damaged");
                    there += 1;
                }
                false if is_named || unnamed && !found.is_there => named += 1,
                false => silent += 1,
            }
        }
    }
    (there, named, silent)
}

fn all(device: Device) -> Outcome {
    let setting = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let seeds = match setting("WALD_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..setting("WALD_LIES").unwrap_or(150),
    };
    let mut all = Outcome::default();
    let mut failed = Vec::new();
    for seed in seeds {
        let outcome =
            std::panic::catch_unwind(|| Run::new(seed, Faults::default()).lied_to(device));
        match outcome {
            Ok(outcome) => all.add(&outcome),
            Err(_) => {
                eprintln!(
                    "{device:?}: repeat with: WALD_SEED={seed} cargo test -p wald-storage lies"
                );
                failed.push(seed);
            }
        }
    }
    println!("{device:?}: {all:?}");
    assert_eq!(failed, Vec::<u64>::new(), "seeds that failed");
    all
}

#[test]
fn a_lost_write_is_named_as_soon_as_anything_was_written_after_it() {
    all(Device::Loses);
}

#[test]
fn a_misplaced_write_is_named_in_both_places() {
    all(Device::Misplaces);
}

#[test]
fn bits_that_turn_over_at_rest_are_named() {
    all(Device::Flips);
}

#[test]
fn blocks_of_another_history_are_named_and_not_served() {
    let all = all(Device::Returns);
    assert!(all.told > 0);
}

#[test]
fn a_group_taken_back_does_not_return_when_the_zeros_over_it_are_lost() {
    let mut stale = 0;
    for seed in 0..4 {
        // The device has whole sectors. With one of these sizes the next group ends at a sector's end.
        for size in 0..64 {
            let mut run = Run::new(seed, Faults::default());
            stale += u64::from(run.taken_back(8 * size));
        }
    }
    println!("{stale} frames of groups that were taken back stood right behind the journal's end");
    assert!(stale > 0);
}
