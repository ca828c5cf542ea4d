//! Known damage: the exact records lost, and the bytes cut off a torn tail.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use crate::api::record::{Gap, GapReason};
use crate::base::ids::{LogId, Lsn, Position, SegmentId};
use crate::base::sync::RwLock;
use crate::disk::Disk;
use crate::disk::directory;
use crate::disk::known_bad;
use crate::disk::known_bad::Mistake;
use crate::format::address::Hole;
use crate::format::body::AcceptedLosses;
use crate::logs::{Log, Lost, cut};

const DIRECTORY: &str = "quarantine";

/// Name suffixes of torn tails, of runs whose loss was accepted, and of segments that are kept.
const TORN: &str = ".torn";
const RUN: &str = ".run";
const SEGMENT: &str = ".seg";
const ALL: [&str; 3] = [TORN, RUN, SEGMENT];

/// Maximum bytes kept of one torn tail, for people to inspect.
pub(crate) const DEBRIS_BYTES: usize = 1 << 20;

/// Maximum bytes of all torn tails together. The oldest is removed first.
const QUARANTINE_BYTES: u64 = 64 << 20;

/// Maximum number of files of torn tails. A start opens each of them, and each takes a block.
pub(crate) const QUARANTINE_FILES: usize = 64;

/// Maximum number of remembered walks over damaged runs, and of entries of each: about 4 MiB.
const MOST_WALKS: usize = 4;
const MOST_LOST_IN_RUN: usize = 1 << 15;

/// Damage at one place of the journal.
#[derive(Clone)]
pub(crate) struct Damage {
    pub(crate) position: Position,
    /// The log whose records were lost, if known.
    pub(crate) log: Option<Arc<Log>>,
    pub(crate) from: Lsn,
    pub(crate) to: Lsn,
    /// Whether an operator has accepted the loss. It is still reported, but raises no alarm.
    pub(crate) accepted: bool,
    /// Whether no record is lost: only the commit order of records, or a second copy.
    pub(crate) harmless: bool,
}

impl Damage {
    /// Records of one log.
    pub(crate) fn of(log: Arc<Log>, lost: &Lost) -> Self {
        Self {
            position: lost.position,
            log: Some(log),
            from: lost.from,
            to: lost.to,
            accepted: lost.accepted,
            harmless: false,
        }
    }

    /// Damage that cannot be attributed to a log.
    pub(crate) fn of_nobody(position: Position, harmless: bool) -> Self {
        Self {
            position,
            log: None,
            from: Lsn::ZERO,
            to: Lsn::ZERO,
            accepted: false,
            harmless,
        }
    }

    /// The first record that is still missed; `None` if a trim or a deletion covers all of them.
    pub(crate) fn missed_from(&self) -> Option<Lsn> {
        let Some(log) = &self.log else {
            return Some(self.from);
        };
        let state = log.state.read();
        let from = self.from.max(state.coming_first());
        (!state.deleted && from < self.to).then_some(from)
    }

    /// Whether an operator must know of the damage: it is neither accepted nor trimmed or deleted.
    fn alarms(&self) -> bool {
        !self.accepted && self.missed_from().is_some()
    }

    /// The gap that a start and a repair report, without trimmed records.
    pub(crate) fn gap(&self) -> Gap {
        Gap {
            log: self.log.as_ref().map(|log| log.name.clone()),
            from: Some(self.missed_from().unwrap_or(self.from)),
            to: Some(self.to),
            reason: GapReason::Quarantined,
        }
    }
}

/// All damage known, in journal order.
#[derive(Default)]
pub(crate) struct Damages {
    known: RwLock<Vec<Damage>>,
    accepted: Vec<AcceptedLosses>,
    /// Records lost in damaged runs, from walks over all of a run. The newest walk is last.
    walks: RwLock<VecDeque<(SegmentId, Arc<LostInRun>)>>,
}

impl Damages {
    /// Damage that a start found, and the accepted losses.
    pub(crate) fn new(mut damages: Vec<Damage>, accepted: Vec<AcceptedLosses>) -> Self {
        damages.sort_by_key(|damage| damage.position);
        Self {
            known: RwLock::new(damages),
            accepted,
            walks: RwLock::default(),
        }
    }

    /// The newest walk over a run. `None` if no walk is remembered, or if it found no damage at
    /// `address`.
    pub(crate) fn walk_of(&self, run: SegmentId, address: Position) -> Option<Arc<LostInRun>> {
        let walks = self.walks.read();
        let (_, lost) = walks.iter().find(|(id, _)| *id == run)?;
        Some(Arc::clone(lost)).filter(|lost| lost.covers(address))
    }

    /// Remembers a walk over a run: [`MOST_WALKS`] of at most [`MOST_LOST_IN_RUN`] entries each.
    pub(crate) fn remember_walk(&self, run: SegmentId, lost: &Arc<LostInRun>) {
        let mut walks = self.walks.write();
        walks.retain(|(id, _)| *id != run);
        if lost.len() > MOST_LOST_IN_RUN {
            return;
        }
        walks.push_back((run, Arc::clone(lost)));
        if walks.len() > MOST_WALKS {
            walks.pop_front();
        }
    }

    /// Whether an operator has accepted that these bytes do not verify.
    pub(crate) fn is_accepted(&self, from: Position, to: Position) -> bool {
        self.accepted.iter().any(|a| a.covers(from, to))
    }

    /// Notes damage, unless it is known already.
    pub(crate) fn add(&self, damage: Damage) {
        let mut damages = self.known.write();
        let same = |other: &Damage| {
            other.position == damage.position
                && other.from == damage.from
                && other.log.as_ref().map(|log| log.id) == damage.log.as_ref().map(|log| log.id)
        };
        let first = damages.partition_point(|other| other.position < damage.position);
        let last = damages.partition_point(|other| other.position <= damage.position);
        if !damages.get(first..last).unwrap_or(&[]).iter().any(same) {
            damages.insert(last, damage);
        }
    }

    /// Damage at `from` or after, before `to`.
    pub(crate) fn between(&self, from: Position, to: Position) -> Vec<Damage> {
        let damages = self.known.read();
        let first = damages.partition_point(|damage| damage.position < from);
        let last = damages.partition_point(|damage| damage.position < to);
        damages.get(first..last).unwrap_or(&[]).to_vec()
    }

    /// Damage that covers this record.
    pub(crate) fn of_log(&self, log_id: LogId, lsn: Lsn) -> Vec<Damage> {
        let damages = self.known.read();
        let took = |damage: &&Damage| {
            let log = damage.log.as_ref();
            log.is_some_and(|log| log.id == log_id) && damage.from <= lsn && lsn < damage.to
        };
        damages.iter().filter(took).cloned().collect()
    }

    /// Removes records from the damage: they counted as lost, but can be read.
    pub(crate) fn find_again(&self, log: LogId, from: Lsn, to: Lsn) {
        let mut damages = self.known.write();
        let of_log = |damage: &Damage| damage.log.as_ref().is_some_and(|other| other.id == log);
        let mut left = Vec::with_capacity(damages.len() + 1);
        for damage in damages.drain(..) {
            if !of_log(&damage) {
                left.push(damage);
                continue;
            }
            let parts = cut((damage.from, damage.to), (from, to));
            left.extend(parts.map(|(from, to)| Damage {
                from,
                to,
                ..damage.clone()
            }));
        }
        *damages = left;
    }

    /// Forgets damage that `gone` selects.
    pub(crate) fn forget(&self, gone: impl Fn(&Damage) -> bool) {
        self.known.write().retain(|damage| !gone(damage));
    }

    /// Position of the first loss that cannot be attributed to a log; `None` if there is none.
    pub(crate) fn first_doubt(&self) -> Option<Position> {
        let damages = self.known.read();
        let stops_all = known_bad::makes(Mistake::DamageStopsCheckpoints);
        let is_doubt =
            |damage: &Damage| damage.log.is_none() && !damage.harmless && !damage.accepted;
        let doubt = damages.iter().find(|damage| stops_all || is_doubt(damage));
        doubt.map(|damage| damage.position)
    }

    /// Places between two positions whose bytes did not verify when their loss was accepted.
    pub(crate) fn accepted_between(
        &self,
        from: Position,
        to: Position,
    ) -> Vec<(Position, Position)> {
        let all = self.accepted.iter();
        all.flat_map(|accepted| accepted.places_between(from, to))
            .collect()
    }

    /// Losses that were accepted.
    pub(crate) fn accepted(&self) -> &[AcceptedLosses] {
        &self.accepted
    }

    /// Number of logs that lost records, and number of places in the journal with losses that cannot be
    /// attributed. Excludes losses that were accepted, trimmed or deleted.
    pub(crate) fn logs(&self) -> (u64, u64) {
        let damages = self.known.read();
        let new = || damages.iter().filter(|damage| damage.alarms());
        let known = new().filter_map(|damage| damage.log.as_ref());
        let mut ids: Vec<_> = known.map(|log| log.id).collect();
        let unknown = new().count() - ids.len();
        ids.sort_unstable();
        ids.dedup();
        (ids.len() as u64, unknown as u64)
    }

    /// Number of lost records of known logs. Excludes records whose loss was accepted, and trimmed and
    /// deleted records.
    pub(crate) fn records(&self) -> u64 {
        let damages = self.known.read();
        let new = damages.iter().filter(|damage| !damage.accepted);
        new.filter_map(|damage| Some(damage.to.since(damage.missed_from()?)))
            .fold(0, u64::saturating_add)
    }
}

/// Path of a sorted run whose loss was accepted. Only people remove such a file: it may hold the last
/// copy of its records.
pub(crate) fn run_path(id: SegmentId) -> String {
    format!("{DIRECTORY}/{id}{RUN}")
}

/// Keeps a file of `journal/` that the store cannot use. Nothing removes it from quarantine.
pub(crate) fn keep_file(disk: &dyn Disk, path: &str) -> io::Result<()> {
    let name = path.rsplit('/').next().unwrap_or(path);
    let name = name.strip_suffix(SEGMENT).unwrap_or(name);
    let there = directory::list(disk, DIRECTORY)?;
    let numbered = (2_u64..).map(|number| format!("{name}-{number}{SEGMENT}"));
    let mut names = std::iter::once(format!("{name}{SEGMENT}")).chain(numbered);
    // The same segment may have been kept before.
    let free = names.find(|name| !there.contains(name));
    disk.rename(path, &format!("{DIRECTORY}/{}", free.unwrap_or_default()))?;
    disk.sync_directory(DIRECTORY)?;
    disk.sync_directory("journal")
}

/// Keeps the cut-off bytes of a torn tail. Returns the number of bytes kept. Removes the oldest torn
/// tails if all together exceed [`QUARANTINE_BYTES`] or [`QUARANTINE_FILES`]. Runs do not count.
pub(crate) fn keep_debris(
    disk: &dyn Disk,
    segment: SegmentId,
    offset: u64,
    debris: &[u8],
) -> io::Result<u64> {
    let kept = &debris[..debris.len().min(DEBRIS_BYTES)];
    let path = format!("{DIRECTORY}/{segment}-{offset:08x}{TORN}");
    let mut files = sized(disk, debris_paths(disk)?)?;
    if let Some(index) = files.iter().position(|(other, _)| *other == path) {
        // An interrupted start had come this far.
        disk.remove(&path)?;
        files.remove(index);
    }
    let mut bytes = kept.len() as u64 + files.iter().map(|(_, bytes)| bytes).sum::<u64>();
    let mut left = files.len();
    for (oldest, size) in &files {
        if bytes <= QUARANTINE_BYTES && left < QUARANTINE_FILES {
            break;
        }
        disk.remove(oldest)?;
        bytes -= size;
        left -= 1;
    }
    let file = disk.create(&path)?;
    file.write_all_at(kept, 0)?;
    file.sync()?;
    disk.sync_directory(DIRECTORY)?;
    Ok(kept.len() as u64)
}

/// Size of all files in quarantine, in bytes.
pub(crate) fn bytes(disk: &dyn Disk) -> io::Result<u64> {
    Ok(files(disk)?.iter().map(|(_, bytes)| bytes).sum())
}

/// Whether a name in `quarantine/` is one of Wald's.
pub(crate) fn owns(name: &str) -> bool {
    ALL.iter().any(|end| name.ends_with(end))
}

/// All files of Wald by path, oldest first, with the size of each in bytes.
pub(crate) fn files(disk: &dyn Disk) -> io::Result<Vec<(String, u64)>> {
    sized(disk, paths(disk, &ALL)?)
}

fn sized(disk: &dyn Disk, paths: Vec<String>) -> io::Result<Vec<(String, u64)>> {
    let size = |path: String| {
        let bytes = disk.open(&path)?.size()?;
        Ok((path, bytes))
    };
    paths.into_iter().map(size).collect()
}

/// Paths of torn tails, oldest first. The engine may remove these files.
pub(crate) fn debris_paths(disk: &dyn Disk) -> io::Result<Vec<String>> {
    paths(disk, &[TORN])
}

/// Paths of files with these suffixes, oldest first: names begin with the number of the segment or run.
/// Foreign files are not listed.
fn paths(disk: &dyn Disk, ends: &[&str]) -> io::Result<Vec<String>> {
    let mut names = directory::list(disk, DIRECTORY)?;
    names.retain(|name| ends.iter().any(|end| name.ends_with(end)));
    names.sort_unstable();
    let path = |name| format!("{DIRECTORY}/{name}");
    Ok(names.into_iter().map(path).collect())
}

/// Records that were in a run and cannot be read.
pub(crate) struct LostInRun {
    /// Bytes that do not verify, as addresses.
    pub(crate) holes: Vec<Hole>,
    /// Logs with lost records: from, to.
    pub(crate) lost: BTreeMap<LogId, Vec<(Lsn, Lsn)>>,
    /// Logs whose images verify, if not all do.
    pub(crate) described: Option<BTreeSet<LogId>>,
}

impl LostInRun {
    /// Whether the walk found the frame at an address damaged.
    pub(crate) fn covers(&self, address: Position) -> bool {
        let mut holes = self.holes.iter();
        holes.any(|hole| hole.from <= address && address < hole.to)
    }

    /// Lost records of a log: from, to. `None` if its image is damaged.
    pub(crate) fn of(&self, log: LogId) -> Option<&[(Lsn, Lsn)]> {
        let lost = self.lost.get(&log).map(Vec::as_slice);
        let is_described = |logs: &BTreeSet<LogId>| logs.contains(&log);
        let none = self.described.as_ref().is_none_or(is_described);
        lost.or(none.then_some(&[]))
    }

    /// Number of holes, ranges and logs that it lists.
    pub(crate) fn len(&self) -> usize {
        let lost = self.lost.values().map(Vec::len).sum::<usize>();
        let described = self.described.as_ref().map_or(0, BTreeSet::len);
        self.holes.len() + lost + described
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::SimDisk;

    #[test]
    fn torn_tails_do_not_displace_runs_in_quarantine() {
        let disk = SimDisk::new();
        for id in 1..=3 {
            let run = disk.create(&run_path(SegmentId::new(id))).unwrap();
            run.write_all_at(&[3], QUARANTINE_BYTES).unwrap();
        }
        for id in 4..200 {
            let segment = SegmentId::new(id);
            keep_debris(&disk, segment, 8192, &[7; DEBRIS_BYTES]).unwrap();
        }
        let files = files(&disk).unwrap();
        let runs = files.iter().filter(|(path, _)| path.ends_with(RUN));
        assert_eq!(runs.count(), 3);
        // Runs do not use the room of torn tails.
        let torn = files.iter().filter(|(path, _)| path.ends_with(TORN));
        assert_eq!(torn.count(), QUARANTINE_FILES);
        let count = QUARANTINE_FILES as u64;
        let bytes = bytes(&disk).unwrap();
        assert_eq!(
            bytes,
            3 * (QUARANTINE_BYTES + 1) + count * DEBRIS_BYTES as u64
        );
        assert_eq!(debris_paths(&disk).unwrap().len(), QUARANTINE_FILES);
    }

    #[test]
    fn many_torn_tails_leave_a_bounded_number_of_files() {
        let disk = SimDisk::new();
        disk.create("quarantine/.nfs0001").unwrap();
        for id in 1..200 {
            for _ in 0..2 {
                // An interrupted start keeps the same bytes again.
                keep_debris(&disk, SegmentId::new(id), 8192, &[7; 100]).unwrap();
            }
        }
        let files = files(&disk).unwrap();
        assert_eq!(files.len(), QUARANTINE_FILES);
        assert!(files[63].0.contains("c7-"), "{files:?}");
        assert_eq!(bytes(&disk).unwrap(), 100 * QUARANTINE_FILES as u64);
        let all = disk.list("quarantine").unwrap();
        assert!(all.contains(&".nfs0001".to_owned()), "{all:?}");
        for id in 200..300 {
            keep_debris(&disk, SegmentId::new(id), 8192, &[7; 2 * DEBRIS_BYTES]).unwrap();
        }
        assert_eq!(bytes(&disk).unwrap(), QUARANTINE_BYTES);
    }

    #[test]
    fn a_segment_in_quarantine_outlives_all_torn_tails() {
        let disk = SimDisk::new();
        for _ in 0..2 {
            disk.replace("journal/0000000000000001.seg", vec![7; 2 * DEBRIS_BYTES]);
            keep_file(&disk, "journal/0000000000000001.seg").unwrap();
        }
        for id in 1..200 {
            keep_debris(&disk, SegmentId::new(id), 8192, &[7; DEBRIS_BYTES]).unwrap();
        }
        let kept = [
            "quarantine/0000000000000001.seg",
            "quarantine/0000000000000001-2.seg",
        ];
        for path in kept {
            assert_eq!(
                disk.contents(path),
                Some(vec![7; 2 * DEBRIS_BYTES]),
                "{path}"
            );
        }
        let bytes_of_kept = 4 * DEBRIS_BYTES as u64;
        assert_eq!(bytes(&disk).unwrap(), QUARANTINE_BYTES + bytes_of_kept);
    }
}
