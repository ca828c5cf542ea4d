//! A volume of a given size: dead bytes give their space back when it is full, and appends resume.

use std::collections::BTreeMap;

use super::*;
use crate::api::pace::Stop;
use crate::api::record::SyncMode;
use crate::disk::Disk;
use crate::format::life::journal_path;
use crate::journal::pool::Use;
use crate::upkeep::sorter::Turns;

const MIB: u64 = 1 << 20;
const SECOND: i64 = 1_000_000;
const LOGS: usize = 20;

/// Runs become larger than the last MiB that the pool leaves free in any case.
fn config() -> StorageConfig {
    StorageConfig {
        sorter_step_bytes: 16 * MIB,
        sync_mode: SyncMode::Strict,
        ..small_config()
    }
}

fn name(log: usize) -> String {
    format!("log/{log}")
}

/// A record unlike all others.
fn text(log: usize, number: u64, bytes: usize) -> Vec<u8> {
    let mut data = format!("{log} {number} ").into_bytes();
    data.resize(
        bytes.max(data.len()),
        b'0' + u8::try_from(number % 10).unwrap(),
    );
    data
}

#[test]
fn small_segment_that_was_not_begun_gets_no_records() {
    let config = StorageConfig {
        segment_bytes: 256 << 10,
        pool_segments: 1,
        reserve_segments: 1,
        ..config()
    };
    let f = Fixture::with(SimDisk::new(), config);
    let pool = &f.core.pool;
    while pool.counts().0 > 0 {
        drop(pool.take(Use::Reserve).unwrap());
    }
    // The space for a full segment is the sorter's.
    let small = pool.take(Use::Leave).unwrap();
    let id = small.life.id;
    assert_eq!(small.life.size, 64 << 10);
    pool.give_back(small);
    let again = pool.take(Use::Leave).unwrap();
    assert_eq!(again.life.id, id);
    pool.give_back(again);
    pool.fill().unwrap();
    let ready = pool.take(Use::Growth).unwrap();
    assert_eq!(ready.life.size, 256 << 10);
    assert!(ready.life.id > id);
    // It would come after a later one.
    assert!(f.disk.contents(&journal_path(id)).is_none());
    assert!(pool.take(Use::Leave).unwrap().life.id > ready.life.id);
}

#[test]
fn a_finished_segment_is_cut_where_nothing_reads_it_any_more() {
    let f = Fixture::with(SimDisk::new(), config());
    f.append("a", b"1").unwrap();
    let segment = f.core.journal.current();
    let left = f.core.inbox.leave_segment();
    f.core.turn();
    drop(left);
    f.append("a", b"2").unwrap();
    f.disk.trace_calls(true);
    assert!(f.core.store.link_of(&segment).unwrap().is_some());
    let (_, calls) = f.disk.trace();
    let end = segment.end.read().unwrap().since(segment.base);
    let reads = calls.iter().filter(|call| call.starts_with("Read "));
    let ends = reads.map(|call| {
        let numbers = call.split_whitespace().flat_map(str::parse::<u64>);
        numbers.take(2).sum::<u64>()
    });
    let ends: Vec<u64> = ends.collect();
    assert!(
        !ends.is_empty() && ends.iter().all(|at| *at <= end),
        "{ends:?}"
    );
    assert_eq!(f.core.open_segments.counts().0, 1);
    f.core.sorter.give_ends_back().unwrap();
    assert_eq!(segment.file_bytes(), end.next_multiple_of(4096));
    assert_eq!(f.core.open_segments.counts().0, 0);
    assert!(f.core.store.link_of(&segment).unwrap().is_some());
}

/// A store on a small volume, and the number of records of each log.
struct Store {
    f: Fixture,
    kept: BTreeMap<usize, u64>,
    record: usize,
    turns: Turns,
}

impl Store {
    fn new(volume: u64, config: StorageConfig, record: usize) -> Self {
        let disk = SimDisk::seeded(volume ^ record as u64);
        disk.set_capacity(volume);
        Self {
            f: Fixture::with(disk, config),
            kept: BTreeMap::new(),
            record,
            turns: Turns::default(),
        }
    }

    fn restart(self) -> Self {
        let f = self.f.restart();
        assert_eq!(f.report.findings, Vec::<String>::new());
        assert_eq!(f.report.damage, []);
        let turns = Turns::default();
        Self { f, turns, ..self }
    }

    /// Appends one record. False: the disk is full.
    fn append(&mut self, log: usize) -> bool {
        let next = self.kept.get(&log).copied().unwrap_or(0);
        match self.f.append(&name(log), &text(log, next, self.record)) {
            Ok(_) => {
                self.kept.insert(log, next + 1);
                true
            }
            Err(AppendError::DiskFull(_)) => false,
            Err(error) => panic!("{error}"),
        }
    }

    /// Sorts until there is nothing to do, as the thread does. No step finds too little space.
    fn sort(&mut self) -> usize {
        let mut steps = 0;
        let mut turn = || match self
            .f
            .core
            .sorter
            .sort_turn(&mut self.turns, &mut |_| Ok(()))
        {
            Ok(sorted) => sorted,
            Err(Stop::Io(error)) => panic!("a run fits when it is begun: {error}"),
            Err(Stop::Stopped) => panic!("nobody stops it"),
        };
        while turn() {
            steps += 1;
            assert!(steps < 500, "sorting comes to an end");
        }
        // The sorter may have asked for another segment.
        self.f.core.turn();
        steps
    }

    /// Appends to these logs in turn until the disk is full, with sorting or without. Returns the bytes.
    fn fill(&mut self, logs: &[usize], sorts: bool) -> u64 {
        let (mut appended, mut refused) = (0, 0);
        for turn in 0.. {
            if self.append(logs[turn % logs.len()]) {
                appended += self.record as u64;
                refused = 0;
            } else {
                refused += 1;
                // The pool tries again after some time.
                self.f.clock.advance(2 * SECOND);
            }
            if sorts && (refused > 0 || turn % 16 == 0) {
                self.sort();
            }
            if refused > 8 {
                return appended;
            }
        }
        unreachable!()
    }

    fn delete(&mut self, log: usize) -> u64 {
        let deleted = self.f.core.delete_in_turn(target(&name(log)));
        self.f.core.turn();
        drop(deleted);
        assert!(self.f.core.logs.by_name(&name(log)).is_none(), "it is gone");
        self.kept.remove(&log).unwrap_or(0) * self.record as u64
    }

    /// Checks that all acknowledged records are there, and no others.
    fn assert_whole(&self) {
        for (log, records) in &self.kept {
            let there = self.f.contents(&name(*log));
            assert_eq!(there.len() as u64, *records, "log {log}");
            for (number, data) in (0..).zip(there) {
                assert!(
                    data == text(*log, number, self.record),
                    "log {log}, {number}"
                );
            }
        }
    }

    /// Use of the space, for the message of a failing test.
    fn spread(&self) -> String {
        let shown = self.f.core.statistics();
        let runs = self.f.core.journal.runs();
        let runs: Vec<u64> = runs.iter().map(|run| run.segment.life.size >> 10).collect();
        format!(
            "{} segments, {} KiB of pool, {} KiB free for appends, {} KiB dead in runs of {runs:?} KiB",
            shown.journal_segments,
            shown.pool_bytes >> 10,
            shown.free_bytes.unwrap_or(0) >> 10,
            shown.sorted_dead_bytes >> 10,
        )
    }

    fn largest_run(&self) -> u64 {
        let runs = self.f.core.journal.runs();
        let sizes = runs.iter().map(|run| run.segment.life.size);
        sizes.max().unwrap_or(0)
    }
}

fn all() -> Vec<usize> {
    (0..LOGS).collect()
}

/// Fills the volume, deletes every log that is chosen, and appends again to one that is kept.
fn gives_back(volume: u64, record: usize, deleted: impl Fn(usize) -> bool, restarts: bool) {
    let what = format!("volume {volume}, records {record}, restart {restarts}");
    let mut store = Store::new(volume, config(), record);
    let filled = store.fill(&all(), true);
    assert!(filled > volume / 4, "{what}: {filled} bytes were appended");
    let least = MIB + 2 * store.f.config.segment_bytes;
    let largest = store.largest_run();
    assert!(
        largest > least,
        "{what}: the largest run has {largest} bytes"
    );
    let chosen: Vec<usize> = (0..LOGS).filter(|log| deleted(*log)).collect();
    let dead: u64 = chosen.iter().map(|log| store.delete(*log)).sum();
    if restarts {
        store = store.restart();
    }
    let kept = *store.kept.keys().next().unwrap();
    let (before, kept_before) = (store.spread(), store.f.core.pool.sorting_reserve());
    let again = store.fill(&[kept], true);
    let grown =
        store.f.core.pool.sorting_reserve() - kept_before.min(store.f.core.pool.sorting_reserve());
    // A segment may be left in each of: runs, segments, the reserve. Larger runs need more space.
    let segment = store.f.config.segment_bytes;
    assert!(
        again + grown + 5 * segment > dead / 10 * 9,
        "{what}: {dead} bytes are dead, and {again} came back, {grown} more are kept for sorting; \
         before: {before}; now: {}",
        store.spread()
    );
    assert!(again > segment, "{what}: {dead} dead, {again} came back");
    store.assert_whole();
    let store = store.restart();
    store.assert_whole();
}

#[test]
fn full_volume_gives_the_space_of_deleted_logs_back() {
    for volume in [18 * MIB, 24 * MIB, 36 * MIB] {
        gives_back(volume, 12_000, |log| log % 5 == 0, false);
        gives_back(volume, 12_000, |log| log % 10 != 3, false);
    }
    gives_back(18 * MIB, 2500, |log| log % 5 == 0, false);
    gives_back(24 * MIB, 12_000, |log| log < LOGS / 2, true);
}

#[test]
fn full_volume_gives_space_back_again_and_again() {
    let mut store = Store::new(24 * MIB, config(), 12_000);
    store.fill(&all(), true);
    for round in 0..12 {
        // Some segments less may come back, since most of each run lives.
        let dead = store.delete(round);
        let again = store.fill(&[LOGS + round], true);
        let segment = store.f.config.segment_bytes;
        assert!(
            again + 3 * segment > dead,
            "round {round}: {dead} bytes are dead, and {again} came back"
        );
        if round % 4 == 3 {
            store = store.restart();
        }
    }
    store.assert_whole();
}

#[test]
fn sorter_enabled_on_a_full_volume_gives_space_back() {
    for spared in [3, 10] {
        let off = StorageConfig {
            sorter_enabled: false,
            ..config()
        };
        let mut store = Store::new(24 * MIB, off, 12_000);
        // The oldest segments hold no dead records.
        let (kept, mixed): (Vec<usize>, Vec<usize>) = all().iter().partition(|log| **log < spared);
        for turn in 0..200 {
            assert!(store.append(kept[turn % kept.len()]));
        }
        store.fill(&[&kept[..1], &mixed[..]].concat(), false);
        let dead: u64 = mixed.iter().map(|log| store.delete(*log)).sum();
        assert!(dead > 2 * MIB, "{dead}");
        store.f.config.sorter_enabled = true;
        let mut store = store.restart();
        let again = store.fill(&[kept[0]], true);
        let spread = store.spread();
        assert!(
            again > dead / 10 * 8,
            "{dead} are dead, {again} came back; {spread}"
        );
        store.assert_whole();
    }
}

#[test]
fn space_of_old_logs_comes_back_behind_newer_live_data() {
    let volume = 24 * MIB;
    for restarts in [false, true] {
        let mut store = Store::new(volume, config(), 12_000);
        // The oldest runs hold all logs, the newer ones only logs that are kept.
        for turn in 0..700 {
            assert!(store.append(turn % LOGS));
            store.sort();
        }
        let kept: Vec<usize> = (LOGS / 2..LOGS).collect();
        store.fill(&kept, true);
        let dead: u64 = (0..LOGS / 2).map(|log| store.delete(log)).sum();
        if restarts {
            store = store.restart();
        }
        let before = store.spread();
        let again = store.fill(&kept, true);
        assert!(
            again > dead / 10 * 7,
            "restart {restarts}: {dead} bytes are dead, and {again} came back; before: {before}; \
             now: {}",
            store.spread()
        );
        store.assert_whole();
        store.restart().assert_whole();
    }
}

#[test]
fn requests_on_the_reserve_leave_the_space_that_sorting_needs() {
    let mut store = Store::new(24 * MIB, config(), 12_000);
    store.fill(&all(), true);
    // Settings may use the reserve as trims do, and each takes a frame.
    let set = |store: &Store, bytes: u32| {
        let config = LogConfig {
            max_record_bytes: Some(bytes),
            ..LogConfig::default()
        };
        let name = LogName::new(&name(1)).unwrap();
        let mut answer = store.f.core.configure_in_turn(name, config);
        store.f.core.turn();
        let mut context = Context::from_waker(Waker::noop());
        match Pin::new(&mut answer).poll(&mut context) {
            Poll::Ready(answer) => answer,
            Poll::Pending => panic!("a turn answers a change of settings"),
        }
    };
    let chosen: Vec<usize> = (4..LOGS).filter(|log| log % 4 == 0).collect();
    let dead: u64 = chosen.iter().map(|log| store.delete(*log)).sum();
    let refused = (10_000..60_000).find(|bytes| {
        store.f.clock.advance(SECOND);
        set(&store, *bytes).is_err()
    });
    let refused = refused.expect("the reserve has an end");
    assert!(refused > 10_100, "settings go on for a while: {refused}");
    let free = store.f.disk.free_bytes().unwrap().unwrap();
    assert!(
        free > store.largest_run(),
        "{free} bytes are free, a run has {}",
        store.largest_run()
    );
    let again = store.fill(&[LOGS], true);
    assert!(again > dead / 2, "{dead} are dead, and {again} came back");
}

#[test]
fn volume_of_few_segments_gives_their_space_back() {
    // Next to the reserve there is room for two segments, and none of them is sorted at first.
    let config = StorageConfig {
        segment_bytes: MIB,
        ..config()
    };
    let mut store = Store::new(6 * MIB + MIB / 2, config, 12_000);
    store.fill(&[0, 1, 2], false);
    let segments = store.f.core.journal.segments.read().len();
    assert_eq!(segments, 2, "segments");
    let dead = store.delete(0) + store.delete(1);
    let again = store.fill(&[2], true);
    assert!(again > MIB / 2, "{dead} are dead, and {again} came back");
    store.assert_whole();
    store.restart().assert_whole();
}

#[test]
fn run_that_finds_less_space_than_reported_is_not_tried_for_ever() {
    let volume = 24 * MIB;
    let mut store = Store::new(volume, config(), 12_000);
    for turn in 0..700 {
        assert!(store.append(turn % 10));
        store.sort();
    }
    let newer: Vec<usize> = (10..LOGS).collect();
    store.fill(&newer, true);
    // Of the older runs 1/10 is dead, of the newer ones 9/10.
    let dead: u64 = (9..LOGS - 1).map(|log| store.delete(log)).sum();
    let disk = store.f.disk.clone();
    let (mut capacity, mut refused, mut ended) = (volume, 0, false);
    for _ in 0..100 {
        // As with a quota, most of the reported free space cannot be used.
        disk.hide_capacity(false);
        capacity = capacity + MIB - disk.free_bytes().unwrap().unwrap();
        disk.set_capacity(capacity);
        disk.hide_capacity(true);
        match store.f.core.sort_in_turn() {
            Ok(true) => {}
            Ok(false) => {
                ended = true;
                break;
            }
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 0 && ended, "{refused} runs did not fit");
    disk.set_capacity(volume);
    let again = store.fill(&[0], false);
    assert!(again > dead / 2, "{dead} are dead, and {again} came back");
    store.assert_whole();
}

#[test]
fn pool_file_that_is_gone_hides_no_file_that_is_there() {
    let volume = 64 * MIB;
    let mut store = Store::new(volume, config(), 12_000);
    for turn in 0..400 {
        assert!(store.append(turn % 4));
    }
    store.delete(1);
    while store.f.core.sort_in_turn().unwrap() {}
    let disk = store.f.disk.clone();
    let mut waiting = disk.list("pool").unwrap();
    waiting.sort();
    assert!(waiting.len() > 1, "{waiting:?}");
    let newest = waiting.pop().unwrap();
    disk.remove(&format!("pool/{newest}")).unwrap();
    // There is no space for another file.
    let kept = MIB + store.f.core.pool.sorting_reserve();
    let used = volume - disk.free_bytes().unwrap().unwrap();
    disk.set_capacity(used + kept + (40 << 10));
    let segments = || store.f.core.journal.segments.read().len();
    let before = segments();
    for number in 0..40 {
        let _may_be_refused = store.f.append("more", &text(0, number, 12_000));
        store.f.clock.advance(SECOND);
    }
    let more = segments() - before;
    assert_eq!(more, waiting.len(), "files of the pool became segments");
}

#[test]
fn run_is_made_of_a_bounded_number_of_small_segments() {
    let config = StorageConfig {
        sorter_step_bytes: 512 * MIB,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    while fixture.core.journal.segments.read().len() < 300 {
        fixture.append("a", &[1; 12_000]).unwrap();
    }
    while fixture.core.sort_in_turn().unwrap() {}
    let runs = fixture.core.journal.runs();
    let segments = |run: &Arc<crate::journal::run::Run>| {
        let head = &run.head;
        head.limit.since(head.first_base) / fixture.config.segment_bytes
    };
    let covered: u64 = runs.iter().map(segments).sum();
    assert!(covered >= 256, "{covered} segments are sorted");
    assert!(runs.iter().all(|run| run.head.pack_bytes < 128 * MIB));
}

#[test]
fn space_of_a_deleted_log_comes_back_when_others_took_the_free_space() {
    // As a volume of 100 MiB at the defaults: there is room for five segments and a half.
    let (volume, segment) = (22 * MIB, 4 * MIB);
    let config = StorageConfig {
        segment_bytes: segment,
        ..config()
    };
    for taken in (0..).step_by(512 << 10) {
        let mut store = Store::new(volume, config.clone(), 60_000);
        store.fill(&[0], true);
        // Another program takes free bytes, up to the last MiB.
        if taken + MIB > store.f.disk.free_bytes().unwrap().unwrap() {
            assert!(taken > segment, "{taken} bytes were too many");
            break;
        }
        store.f.disk.set_capacity(volume - taken);
        store.delete(0);
        let again = store.fill(&[1], true);
        assert!(
            again > segment / 2,
            "{taken} bytes taken: {again} were appended; {}",
            store.spread()
        );
        store.assert_whole();
        let mut store = store.restart();
        store.assert_whole();
        let more = store.fill(&[1], true);
        assert!(
            more <= segment,
            "{taken} bytes taken: a start has room for {more} more"
        );
    }
}

#[test]
fn refusal_names_the_free_bytes_with_which_appends_go_on() {
    for record in [12_000, 3000] {
        let volume = 8 * MIB;
        let mut store = Store::new(volume, config(), record);
        store.fill(&all(), true);
        let refused = store.f.append(&name(0), &text(0, 0, record));
        let Err(AppendError::DiskFull(space)) = refused else {
            panic!("the disk is full: {refused:?}");
        };
        let (free, needed) = (space.free_bytes.unwrap(), space.needed_bytes.unwrap());
        assert!(free < needed, "{free} of {needed} bytes are free");
        let said = AppendError::DiskFull(space).to_string();
        assert!(
            said.contains(&format!("{needed} bytes must be free")),
            "{said}"
        );
        let caveat = |store: &Store| store.f.core.caveats().find(|said| said.contains("is full"));
        let shown = caveat(&store).expect("the status says that the disk is full");
        assert!(shown.contains(&needed.to_string()), "{shown}");
        store.f.disk.set_capacity(volume + needed - free - 1);
        store.f.clock.advance(2 * SECOND);
        assert!(!store.append(0), "a byte too few");
        store.f.disk.set_capacity(volume + needed - free);
        store.f.clock.advance(2 * SECOND);
        assert!(store.append(0), "the bytes are there");
        assert_eq!(caveat(&store), None);
    }
}
