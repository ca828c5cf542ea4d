//! A disk without space: refused requests leave no trace, acknowledged records stay, trims and deletions go
//! on, and appends resume automatically.

use std::io::ErrorKind::{Other, StorageFull};

use super::*;
use crate::api::engine::LogTarget;
use crate::api::error::{AdminError, FailedCheck, SyncError, TrimError};
use crate::api::record::{LogConfig, SyncMode};
use crate::base::ids::{LogId, Position};
use crate::base::promise::Awaited;
use crate::disk::{CallKind, Disk, DiskCall};
use crate::journal::committer::Expiry;

const ENOSPC: i32 = 28;

fn poll<T>(mut future: impl Future<Output = T> + Unpin) -> Option<T> {
    let mut context = Context::from_waker(Waker::noop());
    match Pin::new(&mut future).poll(&mut context) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

fn name(log: &str) -> LogName {
    LogName::new(log).unwrap()
}

/// A batch of the same record for several logs.
fn same(data: &[u8], logs: &[&str]) -> Batch {
    let records: &[&[u8]] = &[data];
    batch(&logs.iter().map(|log| (*log, records)).collect::<Vec<_>>())
}

/// A store in which every kind of request has an effect.
fn furnished() -> Fixture {
    let f = Fixture::new();
    for log in ["a", "d", "c"] {
        f.append(log, b"before").unwrap();
    }
    for _ in 0..5 {
        f.append("t", b"before").unwrap();
    }
    let manual = LogConfig {
        sync_mode: Some(SyncMode::Manual),
        ..LogConfig::default()
    };
    let mut created = f.core.create_in_turn(name("m"), manual);
    f.core.turn();
    poll(&mut created).unwrap().unwrap();
    let mut accepted = f
        .core
        .enqueue_by_mode(None, batch(&[("m", &[b"in memory" as &[u8]])]));
    f.core.turn();
    let answer = settled(&mut accepted).unwrap().unwrap();
    assert_eq!(answer.durability, Durability::Accepted);
    f
}

/// Requests of every kind, in one turn.
struct Load {
    /// Data of each append, and its logs.
    appends: Vec<(&'static [u8], &'static [&'static str], Ticket)>,
    trims: Vec<Awaited<Result<Lsn, TrimError>>>,
    creations: Vec<Awaited<Result<(), AdminError>>>,
    settings: Awaited<Result<(), AdminError>>,
    deletion: Awaited<Result<(), AdminError>>,
    sync: Awaited<Result<Position, SyncError>>,
}

impl Load {
    fn submit(f: &Fixture) -> Self {
        let mut appends = Vec::new();
        let mut append = |data: &'static [u8], logs: &'static [&'static str], at, level| {
            let mut batch = same(data, logs);
            batch.logs[0].guard.expected_lsn = at;
            appends.push((data, logs, f.core.enqueue(batch, level)));
        };
        let here = Some(Lsn::new(1));
        append(b"first", &["a"], here, Durability::Durable);
        append(b"too late", &["a"], here, Durability::Durable);
        append(b"batch", &["a", "new", "t"], None, Durability::Durable);
        append(b"written", &["w"], None, Durability::Written);
        let trim = || f.core.trim_in_turn(target("t"), Lsn::new(5));
        let trims = vec![trim(), trim()];
        let create = || f.core.create_in_turn(name("x"), LogConfig::default());
        let creations = vec![create(), create()];
        append(b"strong", &["m"], None, Durability::Durable);
        append(b"weak", &["m"], None, Durability::Accepted);
        let limited = LogConfig {
            max_record_bytes: Some(77),
            ..LogConfig::default()
        };
        let settings = f.core.configure_in_turn(name("c"), limited);
        append(b"of x", &["x"], None, Durability::Durable);
        let sync = f.core.sync_in_turn(Durability::Durable);
        let deletion = f.core.delete_in_turn(target("d"));
        append(b"new d", &["d"], None, Durability::Durable);
        append(b"last", &["a", "new"], None, Durability::Durable);
        Self {
            appends,
            trims,
            creations,
            settings,
            deletion,
            sync,
        }
    }
}

/// Outcome of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Done,
    NotDone,
    Unknown,
}

fn fate<T>(answer: &Result<T, AppendError>) -> Fate {
    match answer {
        Ok(_) => Fate::Done,
        Err(AppendError::Unknown(_)) => Fate::Unknown,
        Err(_) => Fate::NotDone,
    }
}

/// Outcomes of all requests. They determine the content of the store.
#[derive(Debug)]
struct Fates {
    appends: Vec<(&'static [u8], &'static [&'static str], Fate, Durability)>,
    trims: Vec<Fate>,
    creations: Vec<Fate>,
    settings: Fate,
    deletion: Fate,
    /// Number of requests that were refused for lack of space.
    full: usize,
}

impl Load {
    fn fates(self) -> Fates {
        let mut full = 0;
        let mut appends: Vec<(_, _, Fate, _)> = Vec::new();
        for (data, logs, mut ticket) in self.appends {
            let answer = settled(&mut ticket).expect("everyone is answered");
            full += usize::from(matches!(answer, Err(AppendError::DiskFull(_))));
            if let Err(AppendError::ConditionsFailed(failed)) = &answer {
                let actual = Lsn::new(2);
                let expected = Lsn::new(1);
                let check = FailedCheck::PositionMismatch { expected, actual };
                assert_eq!((data, &failed[0].check), (b"too late" as &[u8], &check));
                assert_eq!(appends[0].2, Fate::Done, "it rests on the first");
            }
            let level = answer
                .as_ref()
                .map_or(Durability::Durable, |a| a.durability);
            appends.push((data, logs, fate(&answer), level));
        }
        let mut admin = |answer: Awaited<Result<(), AdminError>>| {
            let answer = poll(answer).expect("everyone is answered");
            full += usize::from(matches!(
                answer,
                Err(AdminError::Append(AppendError::DiskFull(_)))
            ));
            match answer {
                Err(AdminError::Append(error)) => fate::<()>(&Err(error)),
                // The first of the two requests created the log.
                Err(AdminError::LogExists { .. }) => Fate::Done,
                other => fate(&other.map_err(|_| AppendError::Draining)),
            }
        };
        let creations = self.creations.into_iter().map(&mut admin).collect();
        let (settings, deletion) = (admin(self.settings), admin(self.deletion));
        let trims = self
            .trims
            .into_iter()
            .map(|trim| match poll(trim).expect("everyone is answered") {
                Ok(first) => {
                    assert_eq!(first, Lsn::new(5));
                    Fate::Done
                }
                Err(TrimError::Append(error)) => {
                    full += usize::from(matches!(error, AppendError::DiskFull(_)));
                    fate::<()>(&Err(error))
                }
                Err(error) => panic!("{error}"),
            })
            .collect();
        assert!(poll(self.sync).is_some());
        Fates {
            appends,
            trims,
            creations,
            settings,
            deletion,
            full,
        }
    }
}

/// Records of a log, or `None` if the log does not exist.
fn held(core: &Arc<Core>, log: &str, visibility: Visibility) -> Option<Vec<Vec<u8>>> {
    let durable = core.journal.durable();
    let from = core.logs.by_name(log)?.state.read().first(durable);
    let mut request = read_request(log, ReadStart::Lsn(from));
    request.visibility = Some(visibility);
    match read::page(&core.store, &request, read::Reach::Disk) {
        Ok(page) => Some(page.batches.iter().flat_map(payloads).collect()),
        Err(ReadError::Target(TargetError::NotFound { .. })) => None,
        Err(error) => panic!("{error}"),
    }
}

impl Fates {
    /// Compares the outcomes with the store. Acknowledged appends below `level` may be missing.
    fn compare(&self, core: &Arc<Core>, visibility: Visibility, level: Durability) {
        let held = |log: &str| held(core, log, visibility).unwrap_or_default();
        let mut by_creation = false;
        for (data, logs, fate, reached) in &self.appends {
            let there = |log: &&str| held(log).iter().filter(|d| d == data).count();
            let counts: Vec<usize> = logs.iter().map(there).collect();
            assert!(counts.iter().all(|c| *c == counts[0]), "all or nothing");
            match fate {
                Fate::Done if *reached >= level => assert_eq!(counts[0], 1, "{data:?}"),
                Fate::NotDone => assert_eq!(counts[0], 0, "{data:?}"),
                Fate::Done | Fate::Unknown => assert!(counts[0] <= 1),
            }
            by_creation |= logs.contains(&"x") && counts[0] == 1;
        }
        let durable = core.journal.durable();
        let trimmed = {
            let log = core.logs.by_name("t").unwrap();
            log.state.read().first(durable) == Lsn::new(5)
        };
        judge(&self.trims, trimmed);
        if !by_creation {
            let x = core.logs.by_name("x");
            judge(&self.creations, x.is_some());
        }
        let limit = core.logs.by_name("c").unwrap();
        let limited = limit.state.read().config.max_record_bytes == Some(77);
        judge(&[self.settings], limited);
        judge(&[self.deletion], !held("d").contains(&b"before".to_vec()));
        assert_eq!(held("a")[0], b"before");
    }
}

fn judge(fates: &[Fate], is_so: bool) {
    if fates.contains(&Fate::Done) {
        assert!(is_so);
    } else if !fates.contains(&Fate::Unknown) {
        assert!(!is_so);
    }
}

fn is_spotless(report: &RecoveryReport) {
    assert_eq!(report.findings, Vec::<String>::new());
    assert_eq!(report.damage, []);
}

/// Number of writes that the load takes without faults.
fn writes_of_load() -> u64 {
    let f = furnished();
    let before = f.disk.writes();
    let load = Load::submit(&f);
    f.core.turn();
    let fates = load.fates();
    assert_eq!(fates.full, 0);
    let not_done = |fate: &&(_, _, Fate, _)| fate.2 != Fate::Done;
    assert_eq!(fates.appends.iter().filter(not_done).count(), 1);
    fates.compare(&f.core, Visibility::Accepted, Durability::Accepted);
    f.disk.writes() - before
}

const PARTS: [usize; 6] = [0, 1, 64, 100, 513, 1 << 20];

#[test]
fn a_group_without_space_leaves_no_trace_and_retries_succeed_later() {
    let writes = writes_of_load();
    assert!(writes >= 3, "the load is several groups");
    for nth in 1..=writes {
        for part in PARTS {
            let f = furnished();
            f.disk.fail_write(nth, StorageFull, part);
            let load = Load::submit(&f);
            f.core.turn();
            let fates = load.fates();
            assert!(fates.full > 0, "write {nth} carries something");
            assert!(f.core.journal.failure().is_none());
            fates.compare(&f.core, Visibility::Accepted, Durability::Accepted);
            let kept = ["a", "m", "t", "new", "w", "x", "d"]
                .map(|log| held(&f.core, log, Visibility::Accepted));
            // This sync writes the records that were in memory only.
            let mut sync = f.core.sync_in_turn(Durability::Durable);
            f.core.turn();
            poll(&mut sync).unwrap().unwrap();
            let f = f.restart();
            is_spotless(&f.report);
            fates.compare(&f.core, Visibility::Durable, Durability::Accepted);
            let again = ["a", "m", "t", "new", "w", "x", "d"]
                .map(|log| held(&f.core, log, Visibility::Durable));
            assert_eq!(kept, again, "write {nth}, {part} bytes of it");
            assert!(again[1].as_ref().unwrap().contains(&b"in memory".to_vec()));
            for (data, logs, fate, _) in &fates.appends {
                if *fate == Fate::NotDone {
                    f.append_batch(same(data, logs)).unwrap();
                }
            }
            // Reading also asserts that lsns are dense.
            assert!(f.contents("a").len() >= 4);
        }
    }
}

#[test]
fn a_power_cut_around_a_void_group_keeps_its_answers_true() {
    let writes = writes_of_load();
    let mut cuts = 0;
    for nth in 1..=writes {
        for part in [0, 100, 513, 1 << 20] {
            for cut in 1.. {
                let f = furnished();
                f.disk.fail_write(nth, StorageFull, part);
                f.disk.crash_after(cut);
                let load = Load::submit(&f);
                f.core.turn();
                let fates = load.fates();
                let crashed = f.disk.is_crashed();
                let Fixture {
                    disk,
                    clock,
                    config,
                    core,
                    ..
                } = f;
                drop(core);
                for seed in 0..4 {
                    let disk = disk.copy_with_unflushed();
                    disk.crash(cut * 4 + seed);
                    let (core, report) = open(&disk, &config, &clock).unwrap();
                    is_spotless(&report);
                    fates.compare(&core, Visibility::Durable, Durability::Durable);
                }
                cuts += 1;
                if !crashed {
                    break;
                }
            }
        }
    }
    assert!(cuts > 50, "{cuts}");
}

#[test]
fn a_group_that_cannot_be_voided_fails_the_journal_and_stays_unknown() {
    for flush in [false, true] {
        let f = furnished();
        f.disk.fail_write(1, StorageFull, 100);
        if flush {
            f.disk.fail_sync(1);
        } else {
            // The first write is short, the second has no space, the third writes zeros.
            f.disk.fail_write(3, Other, 0);
        }
        let load = Load::submit(&f);
        f.core.turn();
        assert!(f.core.journal.failure().is_some());
        let fates = load.fates();
        assert_eq!(fates.appends[0].2, Fate::Unknown);
        assert_eq!(fates.full, 0);
        assert!(matches!(
            f.append("a", b"later"),
            Err(AppendError::JournalFailed(_))
        ));
        let f = f.restart();
        is_spotless(&f.report);
        fates.compare(&f.core, Visibility::Durable, Durability::Durable);
    }
}

#[test]
fn a_void_group_of_the_same_bytes_leaves_nothing_behind_a_shorter_one() {
    // The clock stands still, so that the first frame of both groups is the same.
    let f = Fixture::new();
    f.append("a", b"0").unwrap();
    f.append("b", b"0").unwrap();
    f.disk.fail_write(1, StorageFull, 1 << 20);
    let mut both = [
        f.submit(batch(&[("a", &[b"1"])])),
        f.submit(batch(&[("b", &[b"1"])])),
    ];
    f.core.turn();
    for ticket in &mut both {
        assert!(matches!(
            settled(ticket),
            Some(Err(AppendError::DiskFull(_)))
        ));
    }
    f.append("a", b"1").unwrap();
    let f = f.restart();
    assert_eq!(f.contents("a"), [b"0", b"1"]);
    assert_eq!(f.contents("b"), [b"0"]);
    assert_eq!(f.report.torn_bytes, 0);
}

#[test]
fn a_roll_without_space_is_done_later() {
    let data = vec![1; 12_000];
    let segments = |f: &Fixture| f.core.journal.segments.read().len();
    // The next append rolls.
    let about_to_roll = || {
        let f = Fixture::new();
        f.append("a", &data).unwrap();
        let fits = (f.config.segment_bytes - crate::base::bounds::LIFE_BYTES) / 12_200;
        (1..fits).for_each(|_| drop(f.append("a", &data).unwrap()));
        // After this, the roll has nothing to prepare.
        f.core.pool_in_turn().unwrap();
        f
    };
    let f = about_to_roll();
    let before = segments(&f);
    f.append("a", &data).unwrap();
    assert_eq!(segments(&f), before + 1);
    // The first write is the seal, the second the group that begins with the link.
    for nth in 1..=2 {
        for part in PARTS {
            let f = about_to_roll();
            let records = f.contents("a").len();
            f.disk.fail_write(nth, StorageFull, part);
            assert!(matches!(
                f.append("a", &data),
                Err(AppendError::DiskFull(_))
            ));
            assert_eq!(f.contents("a").len(), records);
            f.append("a", &data).unwrap();
            assert_eq!(segments(&f), before + 1);
            let f = f.restart();
            is_spotless(&f.report);
            assert_eq!(f.contents("a").len(), records + 1);
        }
    }
}

/// Appends until the disk is full. Returns the number of appends.
fn fill(f: &Fixture, data: &[u8]) -> usize {
    for appended in 0..100 {
        match f.append("a", data) {
            Ok(_) => {}
            Err(AppendError::DiskFull(_)) => return appended,
            Err(error) => panic!("{error}"),
        }
    }
    panic!("the disk is never full");
}

fn trim(f: &Fixture, log: &str, before: u64) -> Result<Lsn, TrimError> {
    let mut trim = f.core.trim_in_turn(target(log), Lsn::new(before));
    f.core.turn();
    poll(&mut trim).unwrap()
}

fn delete(f: &Fixture, log: LogTarget) -> Result<(), AdminError> {
    let mut deletion = f.core.delete_in_turn(log);
    f.core.turn();
    poll(&mut deletion).unwrap()
}

/// A store with a full reserve.
fn with_reserve() -> Fixture {
    let f = Fixture::new();
    while f.core.statistics().ready_segments < 2 {
        f.append("a", &[1; 12_000]).unwrap();
    }
    f
}

#[test]
fn trims_and_deletions_go_on_and_appends_stay_refused_on_a_full_disk() {
    let f = with_reserve();
    for n in 0..400 {
        f.append("t", &[0]).unwrap();
        f.append(&format!("d/{n}"), &[0]).unwrap();
    }
    f.disk.set_full(true);
    fill(&f, &[1; 4000]);
    fill(&f, &[1]);
    let segments = f.core.journal.segments.read().len();
    for n in 0..400 {
        assert_eq!(trim(&f, "t", n + 1).unwrap(), Lsn::new(n + 1));
        delete(&f, target(&format!("d/{n}"))).unwrap();
        f.clock.advance(10_000);
        assert!(matches!(f.append("a", &[1]), Err(AppendError::DiskFull(_))));
        let mut created = f.core.create_in_turn(name("x"), LogConfig::default());
        f.core.turn();
        assert!(matches!(
            poll(&mut created).unwrap(),
            Err(AdminError::Append(AppendError::DiskFull(_)))
        ));
    }
    assert!(
        f.core.journal.segments.read().len() > segments,
        "they rolled"
    );
    f.disk.set_full(false);
    f.clock.advance(1_000_000);
    f.append("a", b"again").unwrap();
    assert_eq!(
        f.core.statistics().ready_segments,
        2,
        "the reserve is whole"
    );
    let f = f.restart();
    is_spotless(&f.report);
    assert_eq!(f.contents("a").last().unwrap(), b"again");
    assert_eq!(f.core.logs.len(), 2);
}

#[test]
fn a_deletion_drops_records_in_memory_and_a_void_one_returns_them() {
    for void in [true, false] {
        let f = furnished();
        let log = f.core.logs.by_name("m").unwrap();
        if void {
            f.disk.fail_write(1, StorageFull, 0);
        }
        let refused = delete(&f, target("m")).is_err();
        assert_eq!(refused, void);
        let (image, next) = {
            let state = log.state.read();
            (state.image(log.id, None), state.next)
        };
        assert_eq!(image.next, Lsn::ZERO, "nothing of it is in the journal");
        assert_eq!(next, Lsn::new(u64::from(void)));
        let mut sync = f.core.sync_in_turn(Durability::Durable);
        f.core.turn();
        poll(&mut sync).unwrap().unwrap();
        let f = f.restart();
        is_spotless(&f.report);
        let left = f.core.logs.by_name("m");
        assert_eq!(left.is_some(), void);
        if void {
            assert_eq!(f.contents("m"), [b"in memory"]);
        }
    }
}

#[test]
fn trims_by_retention_go_on_and_leave_some_of_the_reserve_to_people() {
    let f = with_reserve();
    let records: Vec<&[u8]> = vec![b"r"; 1000];
    for _ in 0..3 {
        f.append_batch(batch(&[("old", &records)])).unwrap();
    }
    for n in 0..200 {
        f.append("t", &[0]).unwrap();
        f.append(&format!("d/{n}"), &[0]).unwrap();
    }
    f.disk.set_full(true);
    fill(&f, &[1; 4000]);
    fill(&f, &[1]);
    let log = f.core.logs.by_name("old").unwrap();
    let expire = |before| {
        let expiry = Expiry {
            log: Arc::clone(&log),
            before: Lsn::new(before),
            bytes: None,
            config: Arc::clone(&log.state.read().config),
            respect_cursors: false,
        };
        let mut expired = f.core.retainer.expire(vec![expiry]);
        f.core.turn();
        poll(&mut expired).unwrap()
    };
    let refused = (1..3000).find_map(|before| Some((before, expire(before).err()?)));
    let (before, error) = refused.expect("there is room for so many trims");
    assert!(matches!(error, AppendError::DiskFull(_)), "{error}");
    assert!(before > 300, "{before} went on");
    for n in 0..200 {
        assert_eq!(trim(&f, "t", n + 1).unwrap(), Lsn::new(n + 1));
        delete(&f, target(&format!("d/{n}"))).unwrap();
    }
    f.disk.set_full(false);
    f.clock.advance(1_000_000);
    expire(before).unwrap();
    let f = f.restart();
    is_spotless(&f.report);
    let old = f.core.logs.by_name("old").unwrap();
    assert_eq!(old.state.read().coming_first(), Lsn::new(before));
}

#[test]
fn a_restart_on_a_full_disk_serves_reads_and_trims_and_refuses_appends() {
    let mut f = with_reserve();
    for _ in 0..3 {
        f.append("t", &[0]).unwrap();
    }
    f.disk.set_full(true);
    fill(&f, &[1; 4000]);
    let records = f.contents("a").len();
    for round in 1..=2 {
        f = f.restart();
        is_spotless(&f.report);
        assert_eq!(f.contents("a").len(), records);
        assert_eq!(trim(&f, "t", round).unwrap(), Lsn::new(round));
        assert!(matches!(f.append("a", &[1]), Err(AppendError::DiskFull(_))));
    }
    f.disk.set_full(false);
    f.clock.advance(1_000_000);
    f.append("a", b"again").unwrap();
    assert_eq!(f.restart().contents("a").len(), records + 1);
}

#[test]
fn a_start_without_space_for_a_segment_gives_up_spare_files() {
    let mut f = Fixture::new();
    for number in 0..200u32 {
        f.append(&format!("log-{}", number % 7), &[1; 3000])
            .unwrap();
    }
    f.core.idle();
    let before: Vec<_> = (0..7)
        .map(|log| f.contents(&format!("log-{log}")))
        .collect();
    let disk = f.disk.clone();
    let count = || disk.list("index").unwrap().len() + disk.list("checkpoint").unwrap().len();
    let spare = count();
    assert!(spare > 6, "{spare}");
    drop(f);
    let used = faults::used_paths(&disk);
    for directory in ["pool", "journal"] {
        for name in disk.list(directory).unwrap() {
            let path = format!("{directory}/{name}");
            if !used.contains(&path) {
                disk.remove(&path).unwrap();
            }
        }
    }
    // A segment of the usual size finds no space, and is not tried again so soon. A small one fails twice.
    for nth in 1..=3 {
        let makes =
            |call: &DiskCall<'_>| call.kind == CallKind::Create && call.path.starts_with("pool/");
        disk.fail_call(makes, nth, ENOSPC);
    }
    f = Fixture::on(disk.clone());
    is_spotless(&f.report);
    assert_eq!(count(), spare - 3);
    for (log, records) in before.iter().enumerate() {
        assert_eq!(f.contents(&format!("log-{log}")), *records);
    }
    f.clock.advance(1_000_000);
    f.append("log-0", b"goes on").unwrap();
}

#[test]
fn a_trim_of_written_records_needs_no_space_for_records_in_memory() {
    let f = with_reserve();
    let manual = LogConfig {
        sync_mode: Some(SyncMode::Manual),
        ..LogConfig::default()
    };
    let mut created = f.core.create_in_turn(name("m"), manual);
    f.core.turn();
    poll(&mut created).unwrap().unwrap();
    f.append("m", b"written").unwrap();
    f.disk.set_full(true);
    fill(&f, &[1; 4000]);
    fill(&f, &[1]);
    let data = vec![2; 4000];
    let mut accepted = f.core.enqueue_by_mode(None, batch(&[("m", &[&data])]));
    f.core.turn();
    settled(&mut accepted).unwrap().unwrap();
    assert_eq!(trim(&f, "m", 1).unwrap(), Lsn::new(1));
    assert!(matches!(
        trim(&f, "m", 2),
        Err(TrimError::Append(AppendError::DiskFull(_)))
    ));
    f.disk.set_full(false);
    f.clock.advance(1_000_000);
    let mut sync = f.core.sync_in_turn(Durability::Durable);
    f.core.turn();
    poll(&mut sync).unwrap().unwrap();
    let f = f.restart();
    assert_eq!(held(&f.core, "m", Visibility::Durable).unwrap(), [data]);
}

#[test]
fn a_clean_end_looks_for_space_once_more_for_records_in_memory() {
    let f = with_reserve();
    let manual = LogConfig {
        sync_mode: Some(SyncMode::Manual),
        ..LogConfig::default()
    };
    let mut created = f.core.create_in_turn(name("m"), manual);
    f.core.turn();
    poll(&mut created).unwrap().unwrap();
    f.disk.set_full(true);
    fill(&f, &[1; 4000]);
    fill(&f, &[1]);
    let data = vec![2; 4000];
    let mut accepted = f.core.enqueue_by_mode(None, batch(&[("m", &[&data])]));
    f.core.turn();
    settled(&mut accepted).unwrap().unwrap();
    assert!(matches!(f.append("a", &[1]), Err(AppendError::DiskFull(_))));
    // Space is back, but no request would look for it so soon.
    f.disk.set_full(false);
    let f = f.restart_cleanly();
    assert_eq!(held(&f.core, "m", Visibility::Durable).unwrap(), [data]);
}

#[test]
fn a_log_of_a_void_creation_is_unknown_and_its_id_is_not_given_again() {
    let f = Fixture::new();
    f.disk.fail_write(1, StorageFull, 100);
    let mut first = f.submit(batch(&[("a", &[b"x"])]));
    f.core.turn();
    assert!(matches!(
        settled(&mut first),
        Some(Err(AppendError::DiskFull(_)))
    ));
    let epoch = f.core.journal.recovery_epoch;
    let store = crate::disk::directory::read_format(&f.disk).unwrap();
    let id = LogId::compose(epoch, LogId::first_counter(store, epoch));
    assert!(f.core.logs.by_name("a").is_none() && f.core.logs.by_id(id).is_none());
    let answer = f.append("a", b"y").unwrap();
    assert_ne!(answer.appends[0].log_id, id);
    assert_eq!(f.restart().contents("a"), [b"y"]);
}
