//! Accepted losses: afterwards everything goes on, and lost records stay named.

use super::faults::used_paths;
use super::*;
use crate::api::config::OnDamage;
use crate::api::finding::{Finding, Severity};
use crate::api::pace::Control;
use crate::disk::Disk;
use crate::engine::repair::{accept_loss, examine};
use crate::recovery::Loss;
use crate::tools::verify::Offline;

const LOGS: [&str; 3] = ["a", "b", "c/1"];

/// Three runs of one store, ten records each of three logs.
fn store() -> Fixture {
    let mut fixture = Fixture::new();
    for run in 0..3u8 {
        for record in 0..10 {
            for log in LOGS {
                fixture.append(log, &[run, record]).unwrap();
            }
        }
        fixture.core.idle();
        if run < 2 {
            fixture = fixture.restart();
        }
    }
    fixture
}

/// A store whose last segment is gone.
fn without_its_end() -> Fixture {
    let Fixture { disk, core, .. } = store();
    drop(core);
    disk.remove(&used_paths(&disk)[2]).unwrap();
    Fixture::on(disk)
}

fn stop(fixture: Fixture) -> (Arc<dyn Disk>, StorageConfig, Arc<TestClock>) {
    let Fixture {
        disk,
        config,
        clock,
        core,
        ..
    } = fixture;
    drop(core);
    (Arc::new(disk), config, clock)
}

fn accept(fixture: Fixture) -> (Loss, Option<RecoveryReport>, Fixture) {
    let clock = Arc::clone(&fixture.clock);
    let sim = fixture.disk.clone();
    let (disk, config, _) = stop(fixture);
    let (loss, report) = accept_loss(&disk, &config, clock, "at noon, by a test").unwrap();
    (loss, report, Fixture::on(sim))
}

/// The worst severity of a verification, and its findings.
fn worst(disk: &SimDisk) -> (Option<Severity>, Vec<Finding>) {
    let offline = Offline::open(Arc::new(disk.copy())).unwrap();
    let report = offline.verify(&Control::new(0), &mut |_| {}).unwrap();
    (report.severity(), report.findings)
}

#[test]
fn verification_finds_a_loss_of_newest_segments_after_more_starts() {
    let mut fixture = without_its_end();
    for _ in 0..2 {
        let (severity, findings) = worst(&fixture.disk);
        assert_eq!(severity, Some(Severity::Loss), "{findings:#?}");
        fixture = fixture.restart();
    }
    let (_, _, fixture) = accept(fixture);
    let (severity, findings) = worst(&fixture.disk);
    assert!(severity <= Some(Severity::Note), "{findings:#?}");
}

#[test]
fn trimmed_and_deleted_damage_is_no_loss_to_repair_and_verify() {
    let fixture = Fixture::new();
    let records: &[&[u8]] = &[b"first", b"needle", b"third", b"last"];
    for log in ["a", "b"] {
        fixture.append_batch(batch(&[(log, records)])).unwrap();
    }
    fixture.core.idle();
    let fixture = fixture.restart();
    for log in ["a", "b"] {
        fixture.append(log, b"good").unwrap();
    }
    fixture.core.idle();
    let Fixture { disk, core, .. } = fixture;
    drop(core);
    let path = used_paths(&disk)[0].clone();
    let mut bytes = disk.contents(&path).unwrap();
    let needles = cipher::places_of(&bytes, b"needle");
    assert_eq!(needles.len(), 2);
    needles.iter().for_each(|at| bytes[*at] ^= 1);
    disk.replace(&path, bytes);
    let fixture = Fixture::on(disk);
    let deleted = fixture.core.delete_in_turn(target("b"));
    fixture.core.turn();
    drop(deleted);
    for (trim, lost) in [(0, Some((0, 4))), (2, Some((2, 4))), (4, None)] {
        fixture.trim_to("a", trim);
        let copy: Arc<dyn Disk> = Arc::new(fixture.disk.copy());
        let loss = examine(&copy, &fixture.config).unwrap();
        let range = |(from, to): (Lsn, Lsn)| (from.get(), to.get());
        let gaps = loss.gaps.iter().filter_map(|gap| gap.from.zip(gap.to));
        let repaired: Vec<_> = gaps.map(range).collect();
        assert_eq!(repaired, Vec::from_iter(lost), "repair after trim {trim}");
        assert_eq!(loss.is_empty(), lost.is_none(), "{loss:?}");
        let (_, findings) = worst(&fixture.disk);
        let losses = findings.iter().filter(|f| f.severity == Severity::Loss);
        let verified: Vec<_> = losses.filter_map(|found| found.lsns).map(range).collect();
        assert_eq!(verified, Vec::from_iter(lost), "verify after trim {trim}");
    }
}

#[test]
fn an_accepted_loss_is_only_a_note_in_a_verification() {
    for gone in [true, false] {
        let Fixture { disk, core, .. } = store();
        drop(core);
        let path = used_paths(&disk)[1].clone();
        if gone {
            disk.remove(&path).unwrap();
        } else {
            let mut bytes = disk.contents(&path).unwrap();
            bytes[9000..9100].fill(7);
            disk.replace(&path, bytes);
        }
        let (severity, findings) = worst(&disk);
        assert_eq!(severity, Some(Severity::Loss), "{findings:#?}");
        let (_, _, fixture) = accept(Fixture::on(disk));
        let (severity, findings) = worst(&fixture.disk);
        assert_eq!(
            severity,
            Some(Severity::Note),
            "gone: {gone}, {findings:#?}"
        );
        let findings = super::verifying::online(&fixture);
        assert!(findings.is_empty(), "gone: {gone}, {findings:#?}");
        assert_eq!(fixture.core.statistics().quarantined_records, 0);
    }
}

#[test]
fn logs_whose_tails_are_in_doubt_go_on_when_the_loss_is_accepted() {
    let fixture = without_its_end();
    for log in LOGS {
        let refused = fixture.append(log, b"x");
        assert!(matches!(refused, Err(AppendError::TailUnproven { .. })));
    }
    assert!(fixture.append("new", b"x").is_err());
    let epoch = fixture.report.recovery_epoch;
    let (loss, report, mut fixture) = accept(fixture);
    assert_eq!(loss.unproven.len(), 3);
    assert!(loss.unknown_logs && !loss.findings.is_empty());
    assert!(report.unwrap().recovery_epoch > epoch);
    for round in 0..4u64 {
        assert_eq!(fixture.report.findings, Vec::<String>::new());
        assert_eq!(fixture.report.damage, []);
        for log in LOGS {
            assert_eq!(fixture.contents(log).len() as u64, 20 + round);
            fixture.append(log, b"x").unwrap();
        }
        fixture.append(&format!("new{round}"), b"x").unwrap();
        fixture = match round % 2 {
            0 => fixture.restart_cleanly(),
            _ => fixture.restart(),
        };
    }
    // There is nothing more to accept.
    let sim = fixture.disk.clone();
    let (loss, report, _fixture) = accept(fixture);
    assert_eq!((loss, report.is_none()), (Loss::default(), true));
    let text = String::from_utf8(sim.contents("REPAIRS").unwrap()).unwrap();
    assert_eq!(text.matches("loss accepted at noon, by a test").count(), 1);
    assert!(text.contains("log \"c/1\"") && text.contains("done: recovery epoch"));
}

#[test]
fn lost_records_stay_named_without_alarm_once_the_loss_is_accepted() {
    let fixture = store();
    let path = used_paths(&fixture.disk)[1].clone();
    let (sim, clock) = (fixture.disk.clone(), Arc::clone(&fixture.clock));
    let (disk, config, _) = stop(fixture);
    let mut bytes = sim.contents(&path).unwrap();
    bytes[9000..9600].fill(0xA5);
    sim.replace(&path, bytes.clone());
    let bare = damage::without_indexes(&sim);
    let refuse = StorageConfig {
        on_damage: OnDamage::Refuse,
        ..config.clone()
    };
    assert!(matches!(
        open(&bare, &refuse, &clock),
        Err(OpenError::Damaged(_))
    ));
    let loss = examine(&disk, &config).unwrap();
    assert!(loss.gaps.iter().all(|gap| gap.log.is_some()) && !loss.gaps.is_empty());
    let lost: u64 = loss
        .gaps
        .iter()
        .map(|gap| gap.to.unwrap().since(gap.from.unwrap()))
        .sum();
    accept_loss(
        &disk,
        &refuse,
        Arc::clone(&clock) as Arc<dyn Clock>,
        "by a test",
    )
    .unwrap();
    for _ in 0..3 {
        let (core, report) = open(&sim, &refuse, &clock).unwrap();
        assert_eq!((report.damage.len(), core.damages.records()), (0, 0));
        assert_eq!(report.accepted, loss.gaps);
        let (first, last) = (&loss.gaps[0], loss.gaps.last().unwrap());
        for gap in [first, last] {
            let log = gap.log.as_ref().unwrap().as_str();
            let page = read::page(
                &core.store,
                &read_request(log, ReadStart::Lsn(gap.from.unwrap())),
                Reach::Disk,
            );
            assert!(matches!(page, Err(ReadError::Quarantined { .. })));
        }
        let request = ScanRequest {
            selector: Selector::All,
            start: ScanStart::First,
            until_lsn: None,
            max_records: 0,
            follow: false,
            visibility: None,
            chunk_bytes: 64 << 10,
        };
        let mut scan = read::scan::begin(&core.store, &Arc::default(), request).unwrap();
        let mut named = 0;
        while let Some(chunk) = next_chunk(&mut scan).unwrap().unwrap() {
            named += chunk
                .gaps
                .iter()
                .map(|gap| gap.to.unwrap().since(gap.from.unwrap()))
                .sum::<u64>();
        }
        assert_eq!(named, lost);
    }
    // Later damage was not accepted, wherever it lies.
    for path in used_paths(&sim) {
        let bytes = sim.contents(&path).unwrap();
        let Some(at) = bytes.windows(2).skip(9700).position(|pair| pair == [2, 5]) else {
            continue;
        };
        let mut flipped = bytes.clone();
        flipped[9700 + at] ^= 1;
        sim.replace(&path, flipped);
        assert_eq!(
            examine(&disk, &config).unwrap().gaps.len(),
            1,
            "{path} at {at}"
        );
        assert!(matches!(
            open(&damage::without_indexes(&sim), &refuse, &clock),
            Err(OpenError::Damaged(_))
        ));
        sim.replace(&path, bytes);
    }
}

#[test]
fn a_store_without_its_format_file_gets_it_back_from_its_segments() {
    let fixture = store();
    let sim = fixture.disk.clone();
    let (disk, config, clock) = stop(fixture);
    sim.remove("FORMAT").unwrap();
    assert!(matches!(
        open(&sim, &config, &clock),
        Err(OpenError::NotAStore { .. })
    ));
    let loss = examine(&disk, &config).unwrap();
    assert!(loss.format);
    assert_eq!((loss.gaps.len(), loss.unproven.len()), (0, 0));
    assert!(sim.contents("FORMAT").is_none(), "to look changes nothing");
    accept_loss(&disk, &config, clock, "by a test").unwrap();
    let fixture = Fixture::on(sim);
    assert!(!fixture.report.created);
    for log in LOGS {
        assert_eq!(fixture.contents(log).len(), 30);
    }
}

#[test]
fn store_without_format_and_journal_is_known_by_its_sorted_runs() {
    let config = StorageConfig {
        sorter_step_bytes: 256 << 10,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    while fixture.core.journal.segments.read().len() < 12 {
        fixture.append("a", &[1; 12_000]).unwrap();
    }
    while fixture.core.sort_in_turn().unwrap() {}
    let sim = fixture.disk.clone();
    let (disk, mut config, clock) = stop(fixture);
    assert!(!disk.list("sorted").unwrap().is_empty());
    sim.remove("FORMAT").unwrap();
    for name in sim.list("journal").unwrap() {
        sim.remove(&format!("journal/{name}")).unwrap();
    }
    // A new store would take the place of these records.
    for create_store in [true, false] {
        config.create_store = create_store;
        let refused = open(&sim, &config, &clock).map(drop);
        assert!(
            matches!(refused, Err(OpenError::NotAStore { .. })),
            "{refused:?}"
        );
    }
    let loss = examine(&disk, &config).unwrap();
    assert!(loss.format);
    accept_loss(&disk, &config, clock, "by a test").unwrap();
    let fixture = Fixture::on(sim);
    assert!(!fixture.report.created);
    assert!(fixture.contents("a").len() > 20);
}

#[test]
fn an_acceptance_that_is_cut_off_is_one_or_none_and_can_be_repeated() {
    let mut cuts = 0;
    for calls in 1.. {
        let fixture = without_its_end();
        let sim = fixture.disk.clone();
        let (disk, config, clock) = stop(fixture);
        sim.crash_after(calls);
        let by = "by a test";
        let done = accept_loss(&disk, &config, Arc::clone(&clock) as Arc<dyn Clock>, by).is_ok();
        let cut = sim.is_crashed();
        sim.crash(calls);
        if !done {
            accept_loss(&disk, &config, clock, by).unwrap();
        }
        let fixture = Fixture::on(sim);
        for log in LOGS {
            assert_eq!(fixture.contents(log).len(), 20);
            fixture.append(log, b"x").unwrap();
        }
        if !cut {
            break;
        }
        cuts += 1;
    }
    assert!(cuts > 20, "{cuts}");
}
