//! A process without file descriptors: the journal does not fail, and no record is lost or stored twice.
//! No file counts as damaged, and all work resumes when descriptors are back.

use super::*;
use crate::api::engine::{Administer as _, Append as _, Operate as _};
use crate::api::error::{BackupError, SyncError, TrimError};
use crate::api::pace::Control;
use crate::api::record::SyncMode;
use crate::disk::{CallKind, Disk, is_out_of_descriptors};
use crate::engine::LocalEngine;

const EMFILE: i32 = 24;
const ENFILE: i32 = 23;

/// Logs and the payloads of every acknowledged record, in order.
type Acked = Vec<(&'static str, Vec<Vec<u8>>)>;

/// Repeats a step while it reports that descriptors are missing. Returns its result, and the number
/// of times that it was repeated.
fn repeated<T, E: std::fmt::Debug>(
    fixture: &Fixture,
    mut step: impl FnMut() -> Result<T, E>,
    passes: impl Fn(&E) -> bool,
) -> (T, usize) {
    for times in 0..5 {
        assert!(fixture.core.journal.failure().is_none());
        match step() {
            Ok(done) => return (done, times),
            Err(error) => assert!(passes(&error), "{error:?}"),
        }
        fixture.clock.advance(1_000_000);
    }
    panic!("it succeeds once there are descriptors");
}

fn is_missing(error: &std::io::Error) -> bool {
    is_out_of_descriptors(error)
}

fn unread(error: &ReadError) -> bool {
    matches!(error, ReadError::Io(error) if is_missing(error))
}

/// Starts until the start finds its descriptors.
fn start(disk: &SimDisk, config: &StorageConfig, clock: &Arc<TestClock>) -> Fixture {
    let mut last = None;
    for _ in 0..3 {
        match open(disk, config, clock) {
            Ok((core, report)) => {
                return Fixture {
                    disk: disk.clone(),
                    clock: Arc::clone(clock),
                    config: config.clone(),
                    core,
                    report,
                };
            }
            Err(error) => last = Some(error),
        }
    }
    panic!("a start succeeds once there are descriptors: {last:?}");
}

fn config() -> StorageConfig {
    StorageConfig {
        reserve_segments: 1,
        sorter_enabled: true,
        sorter_step_bytes: 1 << 20,
        max_open_segments: 2,
        ..small_config()
    }
}

/// Appends some segments, and notes all that is acknowledged. Returns the number of refusals.
fn fill(fixture: &Fixture, acked: &mut Acked, segments: u64) -> usize {
    let begun = fixture.core.journal.current().base;
    let mut refused = 0;
    for number in 0u64.. {
        for (at, (log, kept)) in acked.iter_mut().enumerate() {
            let mut data = number.to_le_bytes().to_vec();
            data.resize(1500 + 700 * at, 7);
            let no_descriptor = |error: &AppendError| matches!(error, AppendError::NoDescriptors);
            let append = || fixture.append(log, &data);
            refused += repeated(fixture, append, no_descriptor).1;
            kept.push(data);
            fixture.clock.advance(1000);
        }
        if fixture.core.journal.current().base.since(begun) >= segments * (64 << 10) {
            return refused;
        }
    }
    refused
}

/// Everything is there once, from first to last, and nothing counts as damaged.
fn compare(fixture: &Fixture, acked: &Acked, first: u64) -> usize {
    let mut unreadable = 0;
    for (log, payloads) in acked {
        let from = if *log == "a" { first } else { 0 };
        let mut found = Vec::new();
        let mut next = from;
        while next < payloads.len() as u64 {
            let (page, times) = repeated(fixture, || fixture.read(log, next), unread);
            unreadable += times;
            found.extend(page.batches.iter().flat_map(super::payloads));
            next = page.next_lsn.get();
        }
        let from = usize::try_from(from).unwrap();
        assert!(found == payloads[from..], "log {log}");
    }
    assert!(fixture.core.damages.logs() == (0, 0));
    unreadable
}

/// Number of refusals by kind of step in a run.
#[derive(Default, Debug)]
struct Met {
    appends: usize,
    reads: usize,
    sorts: usize,
    pools: usize,
    backups: usize,
    verified: usize,
}

/// Does everything that opens files: segments, indexes, checkpoints, runs, a backup, a verification, starts.
/// Returns the refusals of its steps, and whether the planned fault occurred.
fn live(disk: &SimDisk) -> (Met, bool) {
    let clock = TestClock::new();
    let mut met = Met::default();
    let mut acked: Acked = vec![("a", Vec::new()), ("b", Vec::new()), ("c", Vec::new())];
    let fixture = start(disk, &config(), &clock);
    met.appends += fill(&fixture, &mut acked, 14);
    let (_, times) = repeated(&fixture, || fixture.core.pool_in_turn(), is_missing);
    met.pools += times;
    // A trim removes most of one log, so that there is something to sort.
    let before = acked[0].1.len() as u64 - 3;
    let trimmed = fixture.core.trim_in_turn(target("a"), Lsn::new(before));
    fixture.core.turn();
    let trimmed = poll_now(trimmed).expect("a trim takes the reserve");
    assert_eq!(trimmed.unwrap(), Lsn::new(before));
    loop {
        let (more, times) = repeated(&fixture, || fixture.core.sort_in_turn(), is_missing);
        met.sorts += times;
        if !more {
            break;
        }
    }
    assert!(
        !fixture.core.journal.runs().is_empty(),
        "something is sorted"
    );
    met.reads += compare(&fixture, &acked, before);
    met.appends += fill(&fixture, &mut acked, 3);
    let saved = repeated(
        &fixture,
        || saved(&fixture),
        |error| matches!(error, BackupError::Io { source, .. } if is_missing(source)),
    );
    met.backups += saved.1;
    let verify = || {
        let mut findings = Vec::new();
        let mut tell = |progress: &mut crate::api::pace::VerifyProgress| {
            findings.append(&mut progress.findings);
        };
        let checked = fixture
            .core
            .verifier
            .verify(None, &Control::new(0), &mut tell);
        checked.map(|()| findings)
    };
    let (findings, times) = repeated(
        &fixture,
        verify,
        |stop| matches!(stop, crate::api::pace::Stop::Io(error) if error.to_string().contains("Too many open files")),
    );
    assert_eq!(findings, []);
    met.verified += times;
    met.reads += compare(&fixture, &acked, before);
    fixture.core.close().unwrap();
    drop(fixture);
    let fixture = start(disk, &config(), &clock);
    assert_eq!(fixture.report.damage, []);
    met.reads += compare(&fixture, &acked, before);
    met.appends += fill(&fixture, &mut acked, 2);
    drop(fixture);
    let ended = disk.faults_left() == 0;
    disk.crash(7);
    let fixture = start(disk, &config(), &clock);
    assert_eq!(fixture.report.damage, []);
    compare(&fixture, &acked, before);
    super::simulation::assert_no_leftovers(disk, &fixture.core);
    (met, ended)
}

fn poll_now<T>(mut future: impl Future<Output = T> + Unpin) -> Option<T> {
    let mut context = Context::from_waker(Waker::noop());
    match Pin::new(&mut future).poll(&mut context) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

/// Takes a whole backup. The step that leaves the segment needs a turn of its own.
fn saved(fixture: &Fixture) -> Result<(), BackupError> {
    let workers = Arc::default();
    let begun = crate::tools::backup::begin(
        &fixture.core.store,
        &fixture.core.inbox,
        &fixture.core.indexer,
        &workers,
        std::collections::HashSet::new(),
    );
    let mut begun = Box::pin(begun);
    let mut context = Context::from_waker(Waker::noop());
    let mut backup = loop {
        match begun.as_mut().poll(&mut context) {
            Poll::Ready(backup) => break backup?,
            Poll::Pending => fixture.core.turn(),
        }
    };
    while poll_now(backup.next())
        .expect("without threads a step is done at once")?
        .is_some()
    {}
    Ok(())
}

/// Distance between the calls that fail, one in each run. 1 = every call.
fn step() -> u64 {
    let given = std::env::var("WALD_DESCRIPTORS").ok();
    given.and_then(|text| text.parse().ok()).unwrap_or(5)
}

#[test]
fn whichever_call_finds_no_descriptor_all_goes_on() {
    let (mut calls, mut met) = (0, Met::default());
    for nth in (1..).step_by(usize::try_from(step()).unwrap()) {
        let disk = SimDisk::seeded(9);
        let error = if nth % 2 == 0 { EMFILE } else { ENFILE };
        disk.fail_call(|call| call.kind.takes_descriptor(), nth, error);
        let (one, occurred) = live(&disk);
        if !occurred {
            break;
        }
        calls += 1;
        met.appends += one.appends;
        met.reads += one.reads;
        met.sorts += one.sorts;
        met.pools += one.pools;
        met.backups += one.backups;
        met.verified += one.verified;
    }
    println!("{calls} calls failed once: {met:?}");
    assert!(calls * step() > 400, "{calls}");
    let each = [met.appends, met.reads, met.sorts, met.backups, met.verified];
    assert!(each.iter().all(|times| *times > 0), "{met:?}");
}

#[test]
fn without_descriptors_appends_are_refused_and_trims_go_on() {
    let disk = SimDisk::new();
    let clock = TestClock::new();
    let fixture = start(&disk, &config(), &clock);
    let mut acked: Acked = vec![("a", Vec::new()), ("b", Vec::new())];
    fill(&fixture, &mut acked, 3);
    let manual = LogConfig {
        sync_mode: Some(SyncMode::Manual),
        ..LogConfig::default()
    };
    let created = fixture
        .core
        .create_in_turn(LogName::new("m").unwrap(), manual);
    fixture.core.turn();
    poll_now(created).unwrap().unwrap();
    fixture.core.pool_in_turn().unwrap();
    disk.set_out_of_descriptors(true);
    let data = vec![1; 4000];
    let error = loop {
        match fixture.append("a", &data) {
            Ok(_) => acked[0].1.push(data.clone()),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, AppendError::NoDescriptors), "{error}");
    for _ in 0..3 {
        clock.advance(1_000_000);
        let again = fixture.append("b", &data).unwrap_err();
        assert!(matches!(again, AppendError::NoDescriptors), "{again}");
    }
    // The records of a log in manual mode stay in memory.
    let mut kept = fixture
        .core
        .enqueue_by_mode(None, batch(&[("m", &[&[7u8; 8000] as &[u8]])]));
    fixture.core.turn();
    settled(&mut kept).unwrap().unwrap();
    let sync = fixture.core.sync_in_turn(Durability::Durable);
    fixture.core.turn();
    let sync = poll_now(sync).unwrap();
    assert!(
        matches!(sync, Err(SyncError::Refused(AppendError::NoDescriptors))),
        "{sync:?}"
    );
    // Trims and deletions may use the reserve.
    let trimmed = fixture.core.trim_in_turn(target("a"), Lsn::new(2));
    fixture.core.turn();
    match poll_now(trimmed).unwrap() {
        Ok(first) => assert_eq!(first, Lsn::new(2)),
        Err(TrimError::Append(error)) => panic!("the reserve is for trims: {error}"),
        Err(error) => panic!("{error}"),
    }
    // Old records can be read if their file is open, and do not count as damaged.
    match fixture.read("b", 0) {
        Ok(page) => assert!(!page.batches.is_empty()),
        Err(ReadError::Io(error)) => assert!(is_missing(&error), "{error}"),
        Err(error) => panic!("{error}"),
    }
    let mut scan = fixture.scan(Selector::All, ScanStart::First, false);
    match next_chunk(&mut scan).unwrap() {
        Ok(_) => {}
        Err(ReadError::Io(error)) => assert!(is_missing(&error), "{error}"),
        Err(error) => panic!("{error}"),
    }
    drop(scan);
    assert!(fixture.core.damages.logs() == (0, 0));
    assert!(fixture.core.journal.failure().is_none());

    disk.set_out_of_descriptors(false);
    clock.advance(1_000_000);
    fixture.append("b", &data).unwrap();
    acked[1].1.push(data.clone());
    let sync = fixture.core.sync_in_turn(Durability::Durable);
    fixture.core.turn();
    poll_now(sync).unwrap().unwrap();
    compare(&fixture, &acked, 2);
    assert_eq!(fixture.contents("m"), [vec![7; 8000]]);
    let fixture = fixture.restart_cleanly();
    assert_eq!(fixture.report.findings, Vec::<String>::new());
    compare(&fixture, &acked, 2);
}

/// Runs all threads. Descriptors run out while segments roll and are sorted, and come back.
#[test]
#[allow(clippy::disallowed_methods, reason = "threads and time of a test")]
fn threads_wait_for_descriptors_and_go_on() {
    let disk = SimDisk::new();
    let (engine, _) = LocalEngine::open(
        Arc::new(disk.clone()),
        config(),
        Arc::new(crate::base::clock::SystemClock),
        Arc::new(NoObserver),
    )
    .unwrap();
    let append = || {
        engine
            .submit(
                None,
                batch(&[("a", &[&[5u8; 8000] as &[u8]])]),
                Some(Durability::Durable),
            )
            .wait()
    };
    let until = Instant::now() + Duration::from_secs(60);
    let mut acked = 0;
    let mut refused = 0;
    for _ in 0..3 {
        let outage = acked + 100;
        while acked < outage {
            append().unwrap();
            acked += 1;
        }
        disk.set_out_of_descriptors(true);
        while refused < 3 {
            match append() {
                Ok(_) => acked += 1,
                Err(AppendError::NoDescriptors) => refused += 1,
                Err(error) => panic!("{error}"),
            }
            assert!(Instant::now() < until);
        }
        disk.set_out_of_descriptors(false);
        refused = 0;
        while append().is_err() {
            assert!(Instant::now() < until, "appends go on without a restart");
        }
        acked += 1;
    }
    let trimmed = crate::api::ticket::block_on(engine.trim(target("a"), Lsn::new(acked - 1)));
    assert_eq!(trimmed.unwrap(), Lsn::new(acked - 1));
    disk.set_out_of_descriptors(true);
    disk.set_out_of_descriptors(false);
    let held = || disk.list("sorted").unwrap().len();
    while held() == 0 {
        append().unwrap();
        assert!(Instant::now() < until, "the sorter goes on");
    }
    crate::api::ticket::block_on(engine.drain()).unwrap();
    assert!(engine.core.journal.failure().is_none());
    assert!(engine.core.damages.logs() == (0, 0));
}

/// Another error of a file that is only derived does not fail the journal either.
#[test]
fn an_index_or_checkpoint_that_cannot_be_written_is_written_later() {
    let derived: [crate::disk::Filter; 11] = [
        |call| call.kind == CallKind::Create && call.path.starts_with("index/"),
        |call| call.kind == CallKind::Write && call.path.starts_with("index/"),
        |call| call.kind == CallKind::Rename && call.path.starts_with("index/"),
        |call| call.kind == CallKind::Create && call.path.starts_with("checkpoint/"),
        |call| call.kind == CallKind::Write && call.path.starts_with("checkpoint/"),
        |call| call.kind == CallKind::Sync && call.path.starts_with("index/"),
        |call| call.kind == CallKind::Sync && call.path.starts_with("checkpoint/"),
        |call| call.kind == CallKind::Rename && call.path.starts_with("checkpoint/"),
        |call| call.kind == CallKind::SyncDirectory && call.path == "index",
        |call| call.kind == CallKind::SyncDirectory && call.path == "checkpoint",
        |call| call.kind == CallKind::List && call.path == "checkpoint",
    ];
    for (at, filter) in derived.into_iter().enumerate() {
        for error in [5, 13, 28, EMFILE] {
            let fixture = Fixture::new();
            fixture.disk.fail_call(filter, 1, error);
            let mut acked: Acked = vec![("a", Vec::new())];
            fill(&fixture, &mut acked, 12);
            assert_eq!(fixture.disk.faults_left(), 0, "fault {at} is met");
            assert!(fixture.core.journal.failure().is_none());
            compare(&fixture, &acked, 0);
            assert!(!fixture.disk.list("checkpoint").unwrap().is_empty());
            assert_eq!(fixture.core.indexing.trouble(), None);
            let fixture = fixture.restart();
            assert_eq!(fixture.report.damage, []);
            compare(&fixture, &acked, 0);
        }
    }
}

/// The flush of a directory fails: a later one may succeed although the names are gone.
#[test]
fn an_index_whose_name_may_be_gone_stays_in_memory_and_is_written_again() {
    let fixture = Fixture::new();
    let flush: crate::disk::Filter =
        |call| call.kind == CallKind::SyncDirectory && call.path == "index";
    fixture.disk.fail_call(flush, 1, 5);
    let mut acked: Acked = vec![("a", Vec::new())];
    while fixture.disk.faults_left() > 0 {
        fill(&fixture, &mut acked, 1);
    }
    assert!(fixture.core.indexing.trouble().is_some());
    // The cache loses the names too.
    for name in fixture.disk.list("index").unwrap() {
        fixture.disk.remove(&format!("index/{name}")).unwrap();
    }
    compare(&fixture, &acked, 0);
    fixture.core.turn();
    assert!(!fixture.disk.list("index").unwrap().is_empty());
    assert!(fixture.core.indexing.trouble().is_none());
}

/// No index can be written for long: memory has a bound, and nothing but new records waits.
#[test]
fn indexes_that_cannot_be_written_take_a_bounded_amount_of_memory() {
    let fixture = Fixture::new();
    let create: crate::disk::Filter =
        |call| call.kind == CallKind::Create && call.path.starts_with("index/");
    fixture.disk.fail_all(create, 5);
    let mut acked = 0_u64;
    let small = vec![7_u8; 40];
    let refused = loop {
        match fixture.append("a", &small) {
            Ok(_) => acked += 1,
            Err(refused) => break refused,
        }
        assert!(acked < 100_000, "appends go on without a bound");
    };
    assert!(matches!(refused, AppendError::DiskFull(_)), "{refused}");
    assert!(fixture.core.indexing.trouble().is_some());
    // More than one segment was begun since, and trims go on.
    assert!(fixture.core.journal.segments.read().len() > 3);
    let trimmed = fixture.core.trim_in_turn(target("a"), Lsn::new(1));
    fixture.core.turn();
    assert!(poll_now(trimmed).is_some_and(|trimmed| trimmed.is_ok()));
    assert!(fixture.core.journal.failure().is_none());
    assert_eq!(fixture.read("a", 1).unwrap().first_lsn, Lsn::new(1));
    // Work goes on automatically.
    fixture.disk.forget_faults();
    fixture.core.turn();
    fixture.append("a", &small).unwrap();
    assert!(fixture.core.indexing.trouble().is_none());
}

#[test]
fn sort_step_has_few_files_open_whatever_the_number_of_indexes() {
    // 16 segments become a run. Each has an index of some 400 KiB.
    let config = StorageConfig {
        segment_bytes: 512 << 10,
        sorter_step_bytes: 64 << 20,
        ..config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    let names: Vec<String> = (0..2500).map(|number| format!("log/{number}")).collect();
    let begun = fixture.core.journal.current().base;
    while fixture.core.journal.current().base.since(begun) < 35 * (512 << 10) {
        for names in names.chunks(500) {
            let data: &[&[u8]] = &[&[7; 120]];
            let parts: Vec<_> = names.iter().map(|name| (name.as_str(), data)).collect();
            fixture.append_batch(batch(&parts)).unwrap();
        }
    }
    // After this restart no index is in memory.
    let fixture = fixture.restart_cleanly();
    // Open files: the segment that is written, and segments that are read.
    let (_, before) = fixture.disk.most_open_files();
    let steps = fixture.sort();
    let (most, _) = fixture.disk.most_open_files();
    assert!(steps > 1 && fixture.runs() > 0, "{steps} steps");
    let of_sorter = 7 + fixture.config.max_open_segments;
    assert!(
        most - before <= of_sorter,
        "{most} files are open, {before} before"
    );
}
