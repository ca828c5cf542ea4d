//! Producers that a log forgets: idle ones after a while, others by request. A late retry is
//! refused, and never appended twice. Indexes and runs store changes of producers.

use super::exactly_once::of;
use super::retention::HOUR;
use super::*;
use crate::api::error::AdminError;
use crate::api::record::{Producer, ProducerInfo};
use crate::api::ticket::block_on;
use crate::base::ids::Name;
use crate::disk::Disk;
use crate::logs::producers::{Forgotten, MAX_GONE};

const DAY: i64 = 24 * HOUR;

/// A batch of one record for log `a`.
fn by(id: &str, epoch: u64, sequence: u64) -> Batch {
    let mut batch = of(&["a"], b"x", epoch, sequence);
    batch.logs[0].producer = Some(Producer {
        id: Name::new(id).unwrap(),
        epoch,
        sequence,
    });
    batch
}

impl Fixture {
    fn forget_now(&self, id: &str) -> Result<(), AdminError> {
        let done = self
            .core
            .forget_producer(target("a"), Name::new(id).unwrap());
        self.core.turn();
        block_on(done)
    }

    /// Forgets idle producers as the thread of retention would.
    fn forget_idle(&self) {
        for portion in self.core.retainer.idle_producers() {
            let done = self.core.retainer.forget_idle(portion);
            self.core.turn();
            block_on(done).unwrap();
        }
    }

    /// The epoch that a refused producer must begin with.
    fn first_epoch(&self, batch: Batch) -> u64 {
        match self.append_batch(batch) {
            Err(AppendError::ProducerForgotten { first_epoch, .. }) => first_epoch,
            other => panic!("{other:?}"),
        }
    }

    /// All facts that the log remembers of producers.
    fn remembered(&self) -> String {
        let log = self.core.logs.by_name("a").unwrap();
        let extras = log.state.read().extras.clone().unwrap_or_default();
        let told = extras.producers.told(self.config.producer_window);
        format!("{told:?} {:?}", extras.producers.told_gone())
    }

    fn leave(&self) {
        let left = self.core.inbox.leave_segment();
        self.core.turn();
        block_on(left).unwrap();
    }

    fn bytes_in(&self, directory: &str) -> Vec<u64> {
        let mut names = self.disk.list(directory).unwrap();
        names.sort_unstable();
        let path = |name| format!("{directory}/{name}");
        let size = |name| self.disk.open(&path(name)).unwrap().size().unwrap();
        names.into_iter().map(size).collect()
    }
}

#[test]
fn producers_cost_only_the_indexes_of_segments_they_append_to() {
    let f = Fixture::new();
    for sequence in 0..50 {
        for producer in 0..20 {
            let id = format!("device-{producer}");
            f.append_batch(by(&id, 0, sequence)).unwrap();
        }
    }
    f.leave();
    for _ in 0..5 {
        f.append("a", b"plain").unwrap();
        f.leave();
    }
    let indexes = f.bytes_in("index");
    let (busy, quiet) = indexes.split_at(indexes.len() - 5);
    assert!(busy.iter().sum::<u64>() > 20 * 50 * 20, "{indexes:?}");
    assert!(quiet.iter().all(|bytes| *bytes < 600), "{indexes:?}");
}

#[test]
fn producers_read_back_from_frames_indexes_runs_and_checkpoints() {
    let config = StorageConfig {
        producer_window: 100,
        sorter_enabled: true,
        sorter_step_bytes: 1 << 20,
        reserve_segments: 1,
        ..small_config()
    };
    let mut f = Fixture::with(SimDisk::new(), config);
    let mut number = 0;
    let mut epochs = [0; 5];
    let mut sequences = [0; 5];
    for round in 0..60 {
        for step in 0..25 {
            if step == 12 && round % 2 == 0 {
                f.leave();
            }
            number += 1;
            let at = number * 7919 % 5;
            f.append_batch(by(&format!("p{at}"), epochs[at], sequences[at]))
                .unwrap();
            f.append("filler", &[7; 400]).unwrap();
            sequences[at] += 1;
        }
        let at = number % 5;
        if round % 7 == 3 {
            f.forget_now(&format!("p{at}")).unwrap();
        }
        if round % 7 == 3 || round % 5 == 1 {
            (epochs[at], sequences[at]) = (epochs[at] + 1, 0);
        }
        if round % 9 == 8 {
            while f.core.sort_in_turn().unwrap() {}
        }
        if round % 4 == 0 {
            f.core.pool_in_turn().unwrap();
        }
        let before = f.remembered();
        // A checkpoint while the log moves on.
        f.core.indexer.work(crate::upkeep::indexer::Wanted::AtRest);
        f = f.restart();
        assert_eq!(f.remembered(), before, "round {round}");
    }
    assert!(!f.core.journal.runs().is_empty());
    let before = f.remembered();
    // Runs and indexes alone, then runs and frames alone.
    for directory in ["checkpoint", "index"] {
        let disk = f.disk.copy();
        for name in disk.list(directory).unwrap() {
            disk.remove(&format!("{directory}/{name}")).unwrap();
        }
        if directory == "index" {
            for name in disk.list("checkpoint").unwrap() {
                disk.remove(&format!("checkpoint/{name}")).unwrap();
            }
        }
        let again = Fixture::with(disk, f.config.clone());
        assert_eq!(again.remembered(), before, "without {directory}");
    }
}

#[test]
fn an_idle_producer_is_forgotten_and_makes_room_for_another() {
    let config = StorageConfig {
        max_producers_per_log: 3,
        ..small_config()
    };
    let mut f = Fixture::with(SimDisk::new(), config);
    for run in 0..3 {
        f.append_batch(by(&format!("run-{run}"), 0, 0)).unwrap();
    }
    let refused = f.append_batch(by("run-3", 0, 0));
    assert!(matches!(refused, Err(AppendError::Quota { .. })));
    f.clock.advance(6 * DAY);
    f.append_batch(by("run-0", 0, 1)).unwrap();
    f.forget_idle();
    assert_eq!(f.core.statistics().producers, 3);
    f.clock.advance(DAY);
    f.forget_idle();
    assert_eq!(f.core.statistics().producers, 1);
    for _ in 0..3 {
        assert!(f.append_batch(by("run-0", 0, 1)).unwrap().appends[0].deduplicated);
        // No retry is appended twice: neither of the first batch nor of a later one.
        assert_eq!(f.first_epoch(by("run-1", 0, 0)), 1);
        assert_eq!(f.first_epoch(by("run-2", 0, 7)), 1);
        assert_eq!(f.read("a", 0).unwrap().tail_lsn, Lsn::new(4));
        f = f.restart();
    }
    assert_eq!(f.core.statistics().producers_of_log, 1);
    f.append_batch(by("run-3", 0, 0)).unwrap();
    assert_eq!(f.core.statistics().producers_of_log, 2);
    let again = f.append_batch(by("run-1", 1, 0)).unwrap();
    assert!(!again.appends[0].deduplicated);
    assert!(f.append_batch(by("run-1", 1, 0)).unwrap().appends[0].deduplicated);
    assert_eq!(f.core.logs.holdings(), f.core.logs.recount());
}

#[test]
fn idle_producers_stay_for_ever_where_the_setting_is_0() {
    let config = StorageConfig {
        producer_max_idle: Duration::ZERO,
        ..small_config()
    };
    let f = Fixture::with(SimDisk::new(), config);
    f.append_batch(by("p", 0, 0)).unwrap();
    f.clock.advance(10_000 * DAY);
    f.forget_idle();
    assert!(f.append_batch(by("p", 0, 0)).unwrap().appends[0].deduplicated);
}

#[test]
fn a_clock_that_jumps_ahead_forgets_no_producer_early() {
    let f = Fixture::new();
    f.append_batch(by("p", 0, 0)).unwrap();
    f.clock.jump(365 * DAY);
    f.clock.advance(3 * DAY);
    f.forget_idle();
    assert!(f.append_batch(by("p", 0, 0)).unwrap().appends[0].deduplicated);
}

#[test]
fn producers_of_a_moment_when_the_clock_was_a_year_ahead_expire() {
    let clock = TestClock::new();
    // A clock that shows less than 2026 counts as wrong.
    clock.jump(1000 * DAY);
    let (disk, config) = (SimDisk::new(), small_config());
    let (core, report) = open(&disk, &config, &clock).unwrap();
    let mut f = Fixture {
        disk,
        clock,
        config,
        core,
        report,
    };
    let passes = |f: &Fixture, time: i64| {
        for _ in 0..20 {
            f.clock.advance(time / 20);
            f.forget_idle();
        }
    };
    f.append_batch(by("before", 0, 0)).unwrap();
    f.clock.jump(365 * DAY);
    passes(&f, 2 * HOUR);
    for n in 0..10 {
        f.append_batch(by(&format!("ahead/{n}"), 0, 0)).unwrap();
    }
    f.clock.jump(-365 * DAY);
    passes(&f, 2 * HOUR);
    f = f.restart();
    f.append_batch(by("after", 0, 0)).unwrap();
    // A producer stays for at least half the time.
    passes(&f, 3 * DAY);
    assert_eq!(f.core.statistics().producers, 12);
    passes(&f, 5 * DAY);
    assert_eq!(f.core.statistics().producers, 0);
}

#[test]
fn a_producer_that_appends_before_it_is_forgotten_stays() {
    let f = Fixture::new();
    f.append_batch(by("p", 0, 0)).unwrap();
    f.append_batch(by("q", 0, 0)).unwrap();
    f.clock.advance(8 * DAY);
    let mut portions = f.core.retainer.idle_producers();
    f.append_batch(by("p", 0, 1)).unwrap();
    let done = f.core.retainer.forget_idle(portions.remove(0));
    f.core.turn();
    block_on(done).unwrap();
    assert!(f.append_batch(by("p", 0, 1)).unwrap().appends[0].deduplicated);
    assert_eq!(f.first_epoch(by("q", 0, 0)), 1);
}

#[test]
fn a_producer_is_forgotten_by_request_once_and_for_all() {
    let mut f = Fixture::new();
    let unknown = f.forget_now("p");
    assert!(matches!(
        unknown,
        Err(AdminError::Target(TargetError::NotFound { .. }))
    ));
    f.append_batch(by("p", 4, 0)).unwrap();
    f.append_batch(by("p", 4, 1)).unwrap();
    let unknown = f.forget_now("q");
    assert!(matches!(unknown, Err(AdminError::ProducerNotFound { .. })));
    f.forget_now("p").unwrap();
    let again = f.forget_now("p");
    assert!(matches!(again, Err(AdminError::ProducerNotFound { .. })));
    f.disk.crash(7);
    f.disk = f.disk.copy();
    f = f.restart();
    for batch in [by("p", 4, 2), by("p", 4, 0), by("p", 3, 0)] {
        assert_eq!(f.first_epoch(batch), 5);
    }
    let gap = f.append_batch(by("p", 5, 1));
    assert!(matches!(
        gap,
        Err(AppendError::ProducerGap { expected: 0, .. })
    ));
    f.append_batch(by("p", 5, 0)).unwrap();
    f.append_batch(by("q", 0, 0)).unwrap();
}

/// Producers of log `a`: id, epoch, next sequence.
fn listed(f: &Fixture, after: Option<&str>, limit: usize) -> Vec<(String, u64, u64)> {
    let page = f
        .core
        .list_producers(target("a"), after.map(str::to_owned), limit);
    let row = |info: ProducerInfo| (info.id.to_string(), info.epoch, info.next_sequence);
    block_on(page).unwrap().into_iter().map(row).collect()
}

#[test]
fn producers_are_listed_in_pages_by_id() {
    let mut f = Fixture::new();
    let mut ids: Vec<String> = (0..50).map(|n| format!("p{}", n * 37 % 50)).collect();
    for (index, id) in ids.iter().enumerate() {
        let epoch = index as u64 % 3;
        f.append_batch(by(id, epoch, 0)).unwrap();
        f.append_batch(by(id, epoch, 1)).unwrap();
    }
    f.forget_now("p7").unwrap();
    ids.retain(|id| id != "p7");
    ids.sort_unstable();
    for size in [1, 7, 49, 100] {
        let mut found: Vec<String> = Vec::new();
        loop {
            let page = listed(&f, found.last().map(String::as_str), size);
            assert!(page.len() <= size && page.iter().all(|(.., next)| *next == 2));
            if page.is_empty() {
                break;
            }
            found.extend(page.into_iter().map(|(id, ..)| id));
        }
        assert_eq!(found, ids, "pages of {size}");
    }
    f = f.restart();
    let all = listed(&f, None, 100);
    assert_eq!(all.len(), 49);
    for (id, epoch, _) in all {
        let index = (0..50).find(|n| format!("p{}", n * 37 % 50) == id);
        assert_eq!(Some(epoch), index.map(|index: u64| index % 3), "{id}");
    }
}

#[test]
fn a_list_of_producers_waits_for_the_flush_of_all_it_shows() {
    let f = Fixture::new();
    f.append_batch(by("p", 0, 0)).unwrap();
    let mut ticket = f.core.enqueue(by("p", 0, 1), Durability::Written);
    f.core.turn();
    assert!(settled(&mut ticket).unwrap().is_ok());
    let mut list = Box::pin(f.core.list_producers(target("a"), None, 10));
    let mut context = Context::from_waker(Waker::noop());
    assert!(list.as_mut().poll(&mut context).is_pending());
    f.core.turn();
    match list.as_mut().poll(&mut context) {
        Poll::Ready(Ok(found)) => assert_eq!(found[0].next_sequence, 2),
        other => panic!("{other:?}"),
    }
}

#[test]
fn producers_of_a_missing_log_are_not_found() {
    let f = Fixture::new();
    let missing = block_on(f.core.list_producers(target("a"), None, 10));
    assert!(matches!(
        missing,
        Err(ReadError::Target(TargetError::NotFound { .. }))
    ));
}

#[test]
fn a_void_group_forgets_no_producer() {
    let f = Fixture::new();
    f.append_batch(by("p", 0, 0)).unwrap();
    let before = f.remembered();
    let holdings = f.core.logs.holdings();
    f.disk.fail_write(1, std::io::ErrorKind::StorageFull, 0);
    assert!(f.forget_now("p").is_err());
    assert_eq!(f.remembered(), before);
    assert_eq!(f.core.logs.holdings(), holdings);
    assert!(f.append_batch(by("p", 0, 0)).unwrap().appends[0].deduplicated);
}

#[test]
fn one_epoch_stands_for_too_many_forgotten_producers() {
    let mut f = Fixture::new();
    f.append_batch(by("p", 2, 0)).unwrap();
    f.append_batch(by("stays", 0, 0)).unwrap();
    // One index has `p`, another one its end.
    f.leave();
    let log = f.core.logs.by_name("a").unwrap();
    let many = (0..MAX_GONE).map(|n| (Name::new(&n.to_string()).unwrap(), 0));
    let many = Forgotten {
        producers: many.collect(),
        first_epoch: 0,
    };
    {
        let mut state = log.state.write();
        let producers = &mut state.extras.as_mut().unwrap().producers;
        producers.forget(&many, crate::base::ids::Position::ZERO);
    }
    f.core
        .logs
        .add(None, crate::logs::quotas::LogUsage::gone(MAX_GONE));
    f.forget_now("p").unwrap();
    assert_eq!(f.core.logs.holdings().gone, 0);
    f.leave();
    for _ in 0..2 {
        // A log cannot distinguish new producers from forgotten ones any more.
        assert_eq!(f.first_epoch(by("p", 2, 0)), 3);
        assert_eq!(f.first_epoch(by("new", 0, 0)), 3);
        assert!(f.append_batch(by("stays", 0, 0)).unwrap().appends[0].deduplicated);
        f = f.restart();
    }
    f.append_batch(by("new", 3, 0)).unwrap();
}
