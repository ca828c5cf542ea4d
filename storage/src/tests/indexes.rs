//! Index files and checkpoints: reads through them, and starts with these files missing, damaged or of
//! another time.

#![allow(clippy::disallowed_methods, reason = "threads of a test")]

use super::*;
use crate::api::config::OnDamage;
use crate::api::engine::{LogEngine, ReadLogs as _};
use crate::api::record::{LogConfig, SyncMode};
use crate::api::ticket::block_on;
use crate::base::ids::SegmentId;
use crate::disk::{CallKind, Disk, Filter};
use crate::engine::LocalEngine;
use crate::engine::repair::accept_loss;
use crate::index::checkpoint;

impl Fixture {
    fn segments(&self) -> usize {
        self.core.journal.segments.read().len()
    }

    /// Appends to a log until the journal has rolled `times` times.
    fn roll(&self, log: &str, times: usize) {
        let before = self.segments();
        while self.segments() < before + times {
            self.clock.advance(1000);
            self.append(log, &[7; 6000]).unwrap();
        }
    }

    pub(super) fn configure(&self, log: &str, config: LogConfig) {
        let name = LogName::new(log).unwrap();
        let awaited = self.core.configure_in_turn(name, config);
        self.core.turn();
        block_on(awaited).unwrap();
    }

    pub(super) fn trim(&self, log: &str, before: u64) {
        let awaited = self.core.trim_in_turn(target(log), Lsn::new(before));
        self.core.turn();
        block_on(awaited).unwrap();
    }

    /// Appends one record with its own time. It may stay in memory where the log's mode says so.
    fn append_at(&self, log: &str, micros: i64, level: Durability) {
        let mut batch = batch(&[(log, &[b"timed"])]);
        set_time(&mut batch.logs[0].records, Timestamp::from_micros(micros));
        let mut ticket = self.core.enqueue(batch, level);
        self.core.turn();
        settled(&mut ticket).unwrap().unwrap();
    }

    fn lsn_at(&self, log: &str, micros: i64) -> u64 {
        let mut request = read_request(log, ReadStart::Time(Timestamp::from_micros(micros)));
        request.max_records = 1;
        let page = read::page(&self.core.store, &request, Reach::Disk).unwrap();
        page.batches
            .first()
            .map_or(page.tail_lsn, |b| b.first_lsn)
            .get()
    }
}

fn manual() -> LogConfig {
    LogConfig {
        sync_mode: Some(SyncMode::Manual),
        ..LogConfig::default()
    }
}

fn now(fixture: &Fixture) -> i64 {
    fixture.clock.now().micros()
}

#[test]
fn a_read_by_time_passes_a_segment_that_was_trimmed_before_indexing() {
    let fixture = Fixture::new();
    let time = now(&fixture) + 10;
    fixture.append_at("a", time, Durability::Durable);
    fixture.append_at("a", time + 10, Durability::Durable);
    fixture.trim("a", 2);
    fixture.roll("other", 1);
    fixture.append_at("a", time + 20, Durability::Durable);
    fixture.roll("other", 1);
    fixture.append_at("a", time + 30, Durability::Durable);
    assert_eq!(fixture.lsn_at("a", time + 5), 2);
}

#[test]
fn a_read_by_time_finds_a_record_that_was_in_memory_during_a_roll() {
    let fixture = Fixture::new();
    let time = now(&fixture) + 10;
    fixture.append_at("a", time, Durability::Durable);
    fixture.configure("a", manual());
    fixture.append_at("a", time + 10_000_000, Durability::Accepted);
    fixture.roll("other", 1);
    fixture.append_at("a", time + 20_000_000, Durability::Durable);
    fixture.roll("other", 1);
    fixture.append_at("a", time + 30_000_000, Durability::Durable);
    assert_eq!(fixture.lsn_at("a", time + 9_000_000), 1);
}

#[test]
fn a_read_by_time_finds_records_that_are_in_memory() {
    let fixture = Fixture::new();
    let time = now(&fixture) + 10;
    fixture.append_at("a", time, Durability::Durable);
    fixture.configure("a", manual());
    for later in [10, 20] {
        fixture.append_at("a", time + later, Durability::Accepted);
    }
    for (asked, lsn) in [(0, 0), (5, 1), (10, 1), (15, 2), (25, 3)] {
        assert_eq!(fixture.lsn_at("a", time + asked), lsn, "{asked}");
    }
}

/// Starts the store once more: the calls that read a file meanwhile, and their bytes.
fn reads_of_a_start(fixture: Fixture, clean: bool) -> (Fixture, [u64; 2]) {
    let disk = fixture.disk.clone();
    if clean {
        fixture.core.close().unwrap();
    }
    let before = disk.reads();
    let fixture = fixture.restart();
    let after = disk.reads();
    (fixture, [after.0 - before.0, after.1 - before.1])
}

#[test]
fn start_reads_no_more_with_more_sealed_segments() {
    for clean in [true, false] {
        let fixture = Fixture::new();
        fixture.roll("a", 4);
        let (fixture, few) = reads_of_a_start(fixture, clean);
        fixture.roll("a", 60);
        let (fixture, many) = reads_of_a_start(fixture, clean);
        assert_eq!(fixture.report.clean, clean);
        // The active segment has more or less in it.
        assert!(many[0] <= few[0] + 10, "{many:?} reads and bytes, {few:?}");
        assert!(many[1] <= few[1] + (64 << 10), "{many:?}, {few:?}");
    }
}

#[test]
fn start_after_a_clean_end_reads_no_space_that_is_ready() {
    let config = StorageConfig {
        segment_bytes: 12 << 20,
        pool_segments: 3,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    fixture.append("a", b"0").unwrap();
    fixture.core.pool.fill().unwrap();
    let (fixture, [_, clean]) = reads_of_a_start(fixture, true);
    assert!(clean < 1 << 20, "{clean} bytes");
    assert_eq!(fixture.contents("a"), [b"0"]);
    // After a kill the next file may have been begun, and have lost its first frame.
    fixture.core.pool.fill().unwrap();
    let (_, [_, killed]) = reads_of_a_start(fixture, false);
    assert!(killed > 3 << 20, "{killed} bytes");
}

#[test]
fn a_record_that_was_lost_from_memory_leaves_no_time_behind() {
    let fixture = Fixture::new();
    fixture.append("a", b"0").unwrap();
    fixture.configure("a", manual());
    fixture.append_at("a", now(&fixture) + 50_000_000, Durability::Accepted);
    fixture.roll("other", 1);
    let fixture = fixture.restart();
    let appended = fixture.append("a", b"1").unwrap();
    assert_eq!(appended.appends[0].first_lsn, Lsn::new(1));
    assert_eq!(appended.appends[0].timestamp.micros(), now(&fixture));
}

#[test]
fn a_checkpoint_takes_nothing_from_an_index_that_was_made_anew() {
    let fixture = Fixture::new();
    fixture.append("a", b"0").unwrap();
    fixture.append("a", b"1").unwrap();
    fixture.configure(
        "a",
        LogConfig {
            max_record_bytes: Some(77),
            ..LogConfig::default()
        },
    );
    fixture.roll("other", 1);
    fixture.append("a", b"2").unwrap();
    let fixture = fixture.restart_cleanly();
    let index = crate::index::index_path(SegmentId::new(
        fixture
            .core
            .journal
            .segments
            .read()
            .values()
            .nth(1)
            .unwrap()
            .life
            .id
            .get(),
    ));
    let mut bytes = fixture.disk.contents(&index).unwrap();
    bytes[70] ^= 1;
    fixture.disk.replace(&index, bytes);
    assert_eq!(fixture.contents("a").len(), 3);
    let before = checkpoint::list(&fixture.disk).unwrap();
    // In one turn, so that the log has moved on when the segment before is indexed.
    let mut tickets = Vec::new();
    for _ in 0..100 {
        tickets.push(fixture.submit(batch(&[("other", &[&[7; 6000]])])));
    }
    for _ in 0..9 {
        tickets.push(fixture.submit(batch(&[("a", &[b"3"])])));
    }
    fixture.core.turn();
    let after = checkpoint::list(&fixture.disk).unwrap();
    println!("{before:?} {after:?}");
    let fixture = fixture.restart();
    assert_eq!(fixture.report.findings, Vec::<String>::new());
    assert_eq!(fixture.contents("a").len(), 12);
    let info = fixture.core.logs.by_name("a").unwrap();
    assert_eq!(info.state.read().config.max_record_bytes, Some(77));
}

/// The ids of segments whose files hold frames, in order.
fn used(disk: &SimDisk) -> Vec<String> {
    super::faults::used_paths(disk)
}

#[test]
fn a_lost_last_segment_is_missed_if_a_checkpoint_names_it() {
    let fixture = Fixture::new();
    fixture.append("a", b"0").unwrap();
    let fixture = fixture.restart_cleanly();
    fixture.roll("other", 2);
    fixture.append("a", b"1").unwrap();
    fixture.core.close().unwrap();
    let disk = fixture.disk.clone();
    disk.remove(used(&disk).last().unwrap()).unwrap();
    let fixture = fixture.restart();
    assert!(!fixture.report.clean);
    assert!(
        !fixture.report.findings.is_empty(),
        "nothing is said of what is gone"
    );
    assert!(
        fixture.append("a", b"2").is_err(),
        "an lsn is given out twice"
    );
}

#[test]
fn later_starts_remember_the_records_of_a_lost_segment() {
    let fixture = Fixture::new();
    fixture.append("a", b"0").unwrap();
    let fixture = fixture.restart_cleanly();
    fixture.append("a", b"1").unwrap();
    let disk = fixture.disk.clone();
    disk.remove(used(&disk).last().unwrap()).unwrap();
    let mut fixture = fixture.restart();
    for _ in 0..3 {
        assert!(
            fixture.append("a", b"2").is_err(),
            "an lsn is given out twice"
        );
        fixture = fixture.restart_cleanly();
    }
}

#[test]
fn a_trim_or_a_change_of_settings_proves_no_tail() {
    let fixture = Fixture::new();
    fixture
        .append_batch(batch(&[("a", &[b"0"]), ("b", &[b"0"])]))
        .unwrap();
    let fixture = fixture.restart_cleanly();
    fixture
        .append_batch(batch(&[("a", &[b"1"]), ("b", &[b"1"])]))
        .unwrap();
    let disk = fixture.disk.clone();
    disk.remove(used(&disk).last().unwrap()).unwrap();
    let fixture = fixture.restart();
    fixture.trim("a", 1);
    fixture.configure("b", manual());
    let fixture = fixture.restart();
    for log in ["a", "b"] {
        let appended = fixture.append(log, b"2");
        assert!(appended.is_err(), "an lsn of {log} is given out twice");
    }
}

#[test]
fn a_shutdown_without_a_seal_is_not_clean_by_its_checkpoint() {
    for nth in 1..4 {
        let fixture = Fixture::new();
        fixture.append("a", b"0").unwrap();
        fixture.roll("other", 2);
        fixture.append("a", b"1").unwrap();
        fixture
            .disk
            .fail_write(nth, std::io::ErrorKind::StorageFull, 0);
        fixture.core.close().unwrap();
        let disk = fixture.disk.clone();
        disk.remove(used(&disk).last().unwrap()).unwrap();
        let fixture = fixture.restart();
        assert!(!fixture.report.clean, "write {nth} failed");
    }
}

#[test]
fn no_segment_gets_the_id_of_one_that_a_checkpoint_names() {
    let fixture = Fixture::new();
    fixture.append("a", b"0").unwrap();
    let fixture = fixture.restart_cleanly();
    fixture.roll("other", 1);
    fixture.core.close().unwrap();
    let disk = fixture.disk.clone();
    // The newest files are gone, ready segments included.
    let gone = used(&disk).pop().unwrap();
    for name in disk.list("journal").unwrap() {
        let path = format!("journal/{name}");
        if path >= gone {
            disk.remove(&path).unwrap();
        }
    }
    let fixture = fixture.restart();
    let begun = fixture.core.journal.segments.read();
    let begun = begun.values().next_back().unwrap().path();
    assert!(
        begun > gone,
        "{begun} has a new life under the name of a lost one"
    );
}

#[test]
fn no_segment_gets_the_id_of_a_lost_one_that_a_seal_or_begun_names() {
    for is_clean in [true, false] {
        let fixture = Fixture::new();
        fixture.append("a", b"0").unwrap();
        let fixture = match is_clean {
            true => fixture.restart_cleanly(),
            false => fixture.restart(),
        };
        fixture.append("a", b"1").unwrap();
        // Without checkpoints only BEGUN and the seal name the last segment.
        let disk = super::damage::without_indexes(&fixture.disk);
        drop(fixture);
        let gone = used(&disk).pop().unwrap();
        for directory in ["journal", "pool"] {
            for name in disk.list(directory).unwrap() {
                if format!("journal/{name}") >= gone {
                    disk.remove(&format!("{directory}/{name}")).unwrap();
                }
            }
        }
        let store: Arc<dyn Disk> = Arc::new(disk.clone());
        let clock = TestClock::new();
        accept_loss(&store, &small_config(), clock, "by a test").unwrap();
        let fixture = Fixture::on(disk);
        let segments = fixture.core.journal.segments.read();
        let paths: Vec<String> = segments.values().map(|segment| segment.path()).collect();
        assert!(!paths.contains(&gone), "{gone} has another life: {paths:?}");
        assert!(paths.iter().any(|path| *path > gone));
    }
}

#[test]
fn files_of_a_checkpoint_that_was_cut_short_are_removed() {
    let fixture = Fixture::new();
    fixture.append("a", b"0").unwrap();
    fixture
        .disk
        .replace("checkpoint/0000000000000000.new", vec![1; 10]);
    let fixture = fixture.restart_cleanly();
    let names = fixture.disk.list("checkpoint").unwrap();
    assert!(names.iter().all(|name| name.ends_with(".ckp")), "{names:?}");
}

#[test]
fn a_segment_whose_beginning_is_lost_is_not_taken_for_a_ready_one() {
    let config = StorageConfig {
        segment_bytes: 12 << 20,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    while fixture.segments() < 2 {
        fixture.append("a", &[7; 500_000]).unwrap();
    }
    fixture.append("a", b"last").unwrap();
    let records = fixture.contents("a").len();
    let disk = fixture.disk.clone();
    let first = used(&disk).remove(0);
    let mut bytes = disk.contents(&first).unwrap();
    bytes[8192..8 << 20].fill(0);
    disk.replace(&first, bytes);
    let index = first.replace("journal", "index").replace(".seg", ".idx");
    disk.remove(&index).unwrap();
    let fixture = fixture.restart();
    // The next link names logs created in the lost stretch; all other records are served.
    let mut readable = 0;
    let mut next = 0;
    loop {
        match fixture.read("a", next) {
            Ok(page) => {
                readable += page.batches.iter().map(|b| b.count as usize).sum::<usize>();
                next = page.next_lsn.get();
                if page.next_lsn == page.tail_lsn {
                    break;
                }
            }
            Err(ReadError::Quarantined { to: Some(to), .. }) => next = to.get(),
            Err(error) => panic!("{error}"),
        }
    }
    assert!(readable > 5, "{readable} of {records} are left");
}

#[test]
fn a_last_segment_whose_beginning_is_lost_is_not_taken_for_a_ready_one() {
    for rolled in [true, false] {
        let config = StorageConfig {
            segment_bytes: 12 << 20,
            ..small_config()
        };
        let fixture = Fixture::with(SimDisk::new(), config);
        while rolled && fixture.segments() < 2 {
            fixture.append("a", &[7; 500_000]).unwrap();
        }
        for _ in 0..20 {
            fixture.append("a", &[8; 500_000]).unwrap();
        }
        let disk = fixture.disk.clone();
        let last = used(&disk).pop().unwrap();
        let mut bytes = disk.contents(&last).unwrap();
        bytes[8192..8 << 20].fill(0);
        disk.replace(&last, bytes);
        let fixture = fixture.restart();
        assert!(!fixture.report.findings.is_empty());
        assert!(
            disk.contents(&last).is_some(),
            "recycled with what it holds"
        );
        if rolled {
            let tail = fixture.core.logs.by_name("a").unwrap();
            let tail = tail.state.read().next;
            let page = fixture.read("a", tail.get() - 1).unwrap();
            assert_eq!(
                payloads(&page.batches[0])[0][0],
                8,
                "the newest record is there"
            );
        }
    }
}

#[test]
fn a_scan_of_all_names_damage_where_the_index_is_damaged_too() {
    let fixture = Fixture::new();
    fixture.append("a", b"0").unwrap();
    let position = fixture.append("a", b"1").unwrap().position.unwrap();
    fixture.append("a", b"2").unwrap();
    let fixture = fixture.restart_cleanly();
    let segment = fixture.core.journal.segment_at(position).unwrap();
    for (path, at) in [
        (crate::index::index_path(segment.life.id), 70),
        (segment.path(), segment.offset(position) + 8),
    ] {
        let mut bytes = fixture.disk.contents(&path).unwrap();
        bytes[usize::try_from(at).unwrap()] ^= 1;
        fixture.disk.replace(&path, bytes);
    }
    let mut scan = fixture.scan(Selector::All, ScanStart::First, false);
    let (mut gaps, mut records) = (0, 0);
    while let Some(Ok(Some(chunk))) = next_chunk(&mut scan) {
        gaps += chunk.gaps.len();
        records += chunk.batches.len();
    }
    assert_eq!((gaps, records), (1, 2));
}

#[test]
fn an_index_made_anew_loses_nothing_that_an_old_cursor_has_seen() {
    let fixture = Fixture::new();
    for _ in 0..3 {
        fixture.append("a", b"seen").unwrap();
    }
    let mut scan = fixture.scan(one("a"), ScanStart::First, false);
    while let Some(Ok(Some(_))) = next_chunk(&mut scan) {}
    let cursor = scan.cursor();
    drop(scan);
    let fixture = fixture.restart();
    fixture.configure("a", manual());
    let fixture = fixture.restart_cleanly().restart_cleanly();
    let configured = fixture.core.journal.segments.read();
    let id = configured.values().nth(1).unwrap().life.id;
    drop(configured);
    let path = crate::index::index_path(id);
    let mut bytes = fixture.disk.contents(&path).unwrap();
    bytes[9] ^= 1;
    fixture.disk.replace(&path, bytes);
    let mut scan = fixture.scan(one("a"), ScanStart::Cursor(cursor), false);
    let chunk = next_chunk(&mut scan).unwrap().unwrap().unwrap();
    assert_eq!((chunk.gaps, chunk.batches), (vec![], vec![]));
}

/// Works on a log from one thread. Returns its first lsn and its records.
fn work_on(engine: &Arc<dyn LogEngine>, log: &str, rounds: u32) -> (u64, Vec<Vec<u8>>) {
    let mut records: Vec<Vec<u8>> = Vec::new();
    let mut first = 0;
    for round in 0..rounds {
        let data = [round.to_le_bytes().as_slice(), &[9; 900]].concat();
        let level = [Durability::Written, Durability::Durable][round as usize % 2];
        let ticket = engine.submit(None, batch(&[(log, &[&data])]), Some(level));
        engine.write_gathered();
        let appended = block_on(ticket).unwrap();
        assert_eq!(appended.appends[0].first_lsn.get(), records.len() as u64);
        records.push(data);
        if round % 40 == 39 {
            first = u64::from(round / 2);
            block_on(engine.trim(target(log), Lsn::new(first))).unwrap();
        }
        if round % 25 == 24 {
            let lsn = first + (records.len() as u64 - first) * u64::from(round % 7) / 7;
            let mut request = read_request(log, ReadStart::Lsn(Lsn::new(lsn)));
            request.visibility = Some(Visibility::Written);
            let page = block_on(engine.read(request)).unwrap();
            let mut next = lsn;
            for data in page.batches.iter().flat_map(payloads) {
                assert_eq!(data, records[usize::try_from(next).unwrap()]);
                next += 1;
            }
            assert!(next > lsn);
        }
        if round % 60 == 59 {
            let other = format!("{log}-short");
            block_on(engine.submit(None, batch(&[(&other, &[b"x"])]), None)).unwrap();
            block_on(engine.delete_log(target(&other))).unwrap();
        }
    }
    (first, records)
}

#[test]
fn writers_trims_deletions_and_reads_go_on_while_segments_are_indexed() {
    let disk = SimDisk::new();
    let config = StorageConfig {
        segment_bytes: 64 << 10,
        ..StorageConfig::default()
    };
    let open = |disk: &SimDisk| {
        let clock = Arc::new(crate::base::clock::SystemClock);
        let disk = Arc::new(disk.clone());
        LocalEngine::open(disk, config.clone(), clock, Arc::new(NoObserver)).unwrap()
    };
    let (engine, _) = open(&disk);
    let engine: Arc<dyn LogEngine> = engine;
    let logs = ["a", "b", "c", "d"];
    let done: Vec<_> = std::thread::scope(|scope| {
        let work = |log| {
            let engine = Arc::clone(&engine);
            scope.spawn(move || work_on(&engine, log, 400))
        };
        let threads: Vec<_> = logs.map(work).into_iter().collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    drop(engine);
    // Without a drain, the newest checkpoint is from the run.
    assert!(!checkpoint::list(&disk).unwrap().is_empty());
    let bare = disk.copy();
    for directory in ["journal", "checkpoint"] {
        for name in bare.list(directory).unwrap() {
            if !name.ends_with(".seg") {
                bare.remove(&format!("{directory}/{name}")).unwrap();
            }
        }
    }
    for disk in [&disk, &bare] {
        let (engine, report) = open(disk);
        assert_eq!(report.findings, Vec::<String>::new());
        assert_eq!(report.logs, 4);
        for (log, (first, records)) in logs.iter().zip(&done) {
            let info = block_on(engine.stat(target(log), None, None)).unwrap().info;
            assert_eq!(
                (info.first_lsn.get(), info.tail_lsn.get()),
                (*first, records.len() as u64)
            );
            let mut next = *first;
            while next < records.len() as u64 {
                let page = block_on(engine.read(read_request(log, ReadStart::Lsn(Lsn::new(next)))))
                    .unwrap();
                for data in page.batches.iter().flat_map(payloads) {
                    assert_eq!(data, records[usize::try_from(next).unwrap()]);
                    next += 1;
                }
            }
        }
    }
}

#[test]
fn an_old_cursor_gets_a_loss_although_later_records_were_trimmed() {
    for restarts in 0..2 {
        let fixture = Fixture::new();
        fixture.append("a", b"kept").unwrap();
        fixture.disk.fail_sync(1);
        let written = batch(&[("a", &[b"lost", b"lost"])]);
        let mut ticket = fixture.core.enqueue(written, Durability::Written);
        fixture.core.turn();
        settled(&mut ticket).unwrap().unwrap();
        let mut request = ScanRequest {
            selector: one("a"),
            start: ScanStart::First,
            until_lsn: None,
            max_records: 0,
            follow: false,
            visibility: Some(Visibility::Written),
            chunk_bytes: 64 << 10,
        };
        let mut scan = fixture.begin(request.clone()).unwrap();
        while let Some(Ok(Some(_))) = next_chunk(&mut scan) {}
        request.start = ScanStart::Cursor(scan.cursor());
        drop(scan);
        fixture.core.journal.flush();
        let mut fixture = fixture.restart();
        assert_eq!(fixture.contents("a").len(), 1);
        for _ in 0..4 {
            fixture.append("a", b"new").unwrap();
        }
        fixture.trim("a", 4);
        fixture.roll("other", 1);
        for _ in 0..restarts {
            fixture = fixture.restart_cleanly();
        }
        let mut scan = fixture.begin(request).unwrap();
        let chunk = next_chunk(&mut scan).unwrap().unwrap().unwrap();
        let lost = &chunk.gaps[0];
        assert_eq!(lost.reason, crate::api::record::GapReason::Lost);
        assert_eq!((lost.from, lost.to), (Some(Lsn::new(1)), Some(Lsn::new(3))));
    }
}

#[test]
fn a_segment_ends_before_its_records_pass_32_bits() {
    let f = Fixture::new();
    f.append("a", b"1").unwrap();
    for with_producer in [false, true] {
        let before = f.segments();
        f.core.pool_in_turn().unwrap();
        let most = u64::from(u32::MAX);
        f.core.pretend_records(most - 2);
        f.append("a", b"2").unwrap();
        f.append("a", b"3").unwrap();
        assert_eq!(f.segments(), before, "{with_producer}");
        f.append_batch(match with_producer {
            true => super::exactly_once::of(&["a"], b"4", 0, 0),
            false => batch(&[("a", &[b"4"])]),
        })
        .unwrap();
        assert_eq!(f.segments(), before + 1, "{with_producer}");
    }
    // Appends that meet in one frame, and one with two records.
    f.core.pool_in_turn().unwrap();
    let before = f.segments();
    f.core.pretend_records(u64::from(u32::MAX) - 3);
    let batches = [
        batch(&[("a", &[b"5"])]),
        batch(&[("a", &[b"6"])]),
        batch(&[("a", &[b"7", b"8"])]),
    ];
    let tickets: Vec<Ticket> = batches.map(|batch| f.submit(batch)).into();
    f.core.turn();
    for mut ticket in tickets {
        settled(&mut ticket).unwrap().unwrap();
    }
    assert_eq!(f.segments(), before + 1);
    assert_eq!(f.contents("a").len(), 11);
}

/// A store with many small logs in each of many segments, and the number of records of each log.
fn with_large_indexes() -> (Fixture, usize) {
    let fixture = Fixture::new();
    let names: Vec<String> = (0..200).map(|number| format!("log/{number}")).collect();
    let mut rounds = 0;
    while fixture.segments() < 24 {
        let data = format!("record {rounds}");
        let data = [data.as_bytes()];
        for names in names.chunks(50) {
            let parts = names.iter().map(|log| (&**log, &data[..]));
            let parts: Vec<(&str, &[&[u8]])> = parts.collect();
            fixture.append_batch(batch(&parts)).unwrap();
        }
        rounds += 1;
    }
    (fixture, rounds)
}

fn remove_indexes(disk: &SimDisk) {
    for name in disk.list("index").unwrap() {
        disk.remove(&format!("index/{name}")).unwrap();
    }
    disk.sync_directory("index").unwrap();
}

/// Each log has its records, and none more.
fn check_rounds(fixture: &Fixture, rounds: usize) {
    for log in ["log/0", "log/77", "log/199"] {
        let expected = (0..rounds).map(|round| format!("record {round}").into_bytes());
        assert_eq!(fixture.contents(log), expected.collect::<Vec<_>>(), "{log}");
    }
}

#[test]
fn a_start_without_indexes_keeps_few_of_them_in_memory() {
    let (fixture, rounds) = with_large_indexes();
    remove_indexes(&fixture.disk);
    let fixture = fixture.restart();
    let all: usize = (fixture.disk.list("index").unwrap().iter())
        .map(|name| {
            fixture
                .disk
                .contents(&format!("index/{name}"))
                .unwrap()
                .len()
        })
        .sum();
    let pinned = fixture.core.indexes.pinned_bytes();
    let (most, all) = (fixture.config.segment_bytes, all as u64 + pinned);
    assert!(all > 4 * most, "{all} bytes of indexes show nothing");
    assert!(pinned <= most, "{pinned} bytes of indexes are in memory");
    check_rounds(&fixture, rounds);
}

/// Lets all these calls fail.
fn fail_all(disk: &SimDisk, filter: Filter, error: i32) {
    for nth in 1..1000 {
        disk.fail_call(filter, nth, error);
    }
}

const WRITES_INDEX: Filter = |call| call.path.starts_with("index/") && call.kind.takes_space();
const REMOVES_INDEX: Filter =
    |call| call.path.starts_with("index/") && call.kind == CallKind::Remove;

#[test]
fn a_start_that_cannot_write_indexes_serves_and_writes_them_later() {
    const ENOSPC: i32 = 28;
    let (fixture, rounds) = with_large_indexes();
    remove_indexes(&fixture.disk);
    let Fixture {
        disk, config, core, ..
    } = fixture;
    drop(core);
    fail_all(&disk, WRITES_INDEX, ENOSPC);
    let fixture = Fixture::with(disk, config);
    fixture.core.turn();
    let indexes = || fixture.disk.list("index").unwrap();
    let sealed = fixture.segments() - 1;
    assert_eq!(indexes(), Vec::<String>::new());
    check_rounds(&fixture, rounds);
    fixture.disk.forget_faults();
    fixture.core.turn();
    assert_eq!(indexes().len(), sealed, "{:?}", indexes());
    check_rounds(&fixture, rounds);
    let fixture = fixture.restart();
    check_rounds(&fixture, rounds);
}

#[test]
fn a_start_that_drops_indexes_serves_all_records_without_them() {
    const EMFILE: i32 = 24;
    let (fixture, rounds) = with_large_indexes();
    remove_indexes(&fixture.disk);
    let Fixture {
        disk, config, core, ..
    } = fixture;
    drop(core);
    fail_all(&disk, WRITES_INDEX, EMFILE);
    let fixture = Fixture::with(disk, config);
    // As if all of them were beyond the bound.
    let segments = fixture.core.journal.runs_and_segments().1;
    let ids = segments.iter().map(|segment| segment.life.id);
    fixture.core.indexes.forget(ids);
    check_rounds(&fixture, rounds);
    fixture.disk.forget_faults();
    let fixture = fixture.restart();
    let listed = fixture.disk.list("index").unwrap();
    assert!(listed.len() > 20, "the next start writes them: {listed:?}");
    check_rounds(&fixture, rounds);
}

#[test]
fn unfinished_indexes_of_a_refused_start_go_with_the_next_one() {
    const EIO: i32 = 5;
    let (fixture, rounds) = with_large_indexes();
    let mut names = fixture.disk.list("index").unwrap();
    names.retain(|name| name.ends_with(".idx"));
    let finished: Vec<_> = (names.iter())
        .map(|name| {
            let path = format!("index/{name}");
            let contents = fixture.disk.contents(&path).unwrap();
            (path, contents)
        })
        .collect();
    remove_indexes(&fixture.disk);
    let Fixture {
        disk,
        clock,
        config,
        core,
        ..
    } = fixture;
    drop(core);
    let refuses = StorageConfig {
        on_damage: OnDamage::Refuse,
        ..config.clone()
    };
    let path = used(&disk)[0].clone();
    let bytes = disk.contents(&path).unwrap();
    let at = cipher::places_of(&bytes, b"record 0")[0];
    let unfinished = |disk: &SimDisk| {
        let mut names = disk.list("index").unwrap();
        names.retain(|name| name.ends_with(".new"));
        names
    };
    for removals_fail in [false, true] {
        flip(&disk, &path, at);
        if removals_fail {
            fail_all(&disk, REMOVES_INDEX, EIO);
        }
        let refused = open(&disk, &refuses, &clock);
        assert!(matches!(refused, Err(OpenError::Damaged(_))));
        let left = unfinished(&disk);
        assert_eq!(left.len() > 4, removals_fail, "{left:?}");
        flip(&disk, &path, at);
        disk.forget_faults();
    }
    // With its indexes the next start makes none, so it replaces no unfinished file: it has to remove them.
    for (path, contents) in finished {
        disk.replace(&path, contents);
    }
    let fixture = Fixture::with(disk, config);
    assert_eq!(unfinished(&fixture.disk), Vec::<String>::new());
    check_rounds(&fixture, rounds);
}

#[test]
fn a_start_that_writes_indexes_survives_a_cut_at_each_step() {
    let (fixture, rounds) = with_large_indexes();
    remove_indexes(&fixture.disk);
    let Fixture {
        disk,
        clock,
        config,
        core,
        ..
    } = fixture;
    drop(core);
    let mut cut = 0;
    for calls in (1..).step_by(17) {
        let disk = disk.copy();
        disk.crash_after(calls);
        let opened = open(&disk, &config, &clock);
        let is_crashed = disk.is_crashed();
        drop(opened);
        disk.crash(calls);
        let fixture = Fixture::with(disk, config.clone());
        assert_eq!(fixture.report.findings, Vec::<String>::new());
        check_rounds(&fixture, rounds);
        if !is_crashed {
            break;
        }
        cut += 1;
    }
    assert!(cut > 2, "{cut} cuts");
}

#[test]
fn a_start_on_a_full_disk_gives_up_indexes_that_it_wrote() {
    let (fixture, rounds) = with_large_indexes();
    remove_indexes(&fixture.disk);
    fixture.disk.crash(1);
    for room in 3..12 {
        let disk = fixture.disk.copy();
        for path in disk.list("pool").unwrap() {
            disk.remove(&format!("pool/{path}")).unwrap();
        }
        disk.set_capacity(1 << 40);
        let used = (1 << 40) - disk.free_bytes().unwrap().unwrap();
        disk.set_capacity(used + room * (32 << 10));
        match open(&disk, &fixture.config, &fixture.clock) {
            Ok((core, report)) => {
                assert_eq!(report.findings, Vec::<String>::new());
                let fixture = Fixture {
                    disk,
                    clock: Arc::clone(&fixture.clock),
                    config: fixture.config.clone(),
                    core,
                    report,
                };
                check_rounds(&fixture, rounds);
            }
            Err(error) => panic!("{room}: {error}"),
        }
    }
}

#[test]
fn a_look_at_a_store_without_indexes_writes_none() {
    let (fixture, _) = with_large_indexes();
    remove_indexes(&fixture.disk);
    let Fixture {
        disk, config, core, ..
    } = fixture;
    drop(core);
    let store: Arc<dyn Disk> = Arc::new(disk.clone());
    let logs = crate::engine::repair::logs(&store, &config, "log/").unwrap();
    assert_eq!(logs.len(), 200);
    assert_eq!(disk.list("index").unwrap(), Vec::<String>::new());
}
