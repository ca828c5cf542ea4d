//! Facts whose frames are damaged, while an index or a checkpoint still has them: no start, no reader
//! and no repair forgets them. Records of a log whose name is lost stay in reach.

use std::collections::BTreeMap;

use super::around_damage::bare;
use super::damage::without_indexes;
use super::damaged_files::{End, Store};
use super::faults::used_paths;
use super::*;
use crate::api::finding::{Finding, Severity};
use crate::api::pace::Control;
use crate::base::ids::Position;
use crate::disk::Disk;
use crate::engine::repair::{accept_loss, examine};
use crate::format::frame;
use crate::format::life::Life;
use crate::tools::verify::Offline;

const FIRST_FRAME: usize = 8192;

/// Facts about each log apart from its records, and its producers, by name.
type Facts = BTreeMap<String, (String, String)>;

fn facts(fixture: &Fixture) -> Facts {
    let core = &fixture.core;
    let durable = core.journal.durable();
    let fact = |log: Arc<crate::logs::Log>| {
        let info = log.info(core.tail(&log, Visibility::Durable), durable, durable);
        let extras = log.state.read().extras.clone().unwrap_or_default();
        let cursors: Vec<_> = extras
            .cursors
            .iter()
            .map(|(name, mark)| (name, *mark.newest()))
            .collect();
        let told = extras.producers.told(fixture.config.producer_window);
        let lsns = (info.first_lsn, info.expired, info.tail_lsn);
        let times = (info.create_time, info.update_time);
        let epoch = *extras.writer_epoch.newest();
        let id = (info.log_id, epoch);
        let fact = format!("{id:?} {:?} {lsns:?} {times:?} {cursors:?}", info.config);
        (log.name.as_str().to_owned(), (fact, format!("{told:?}")))
    };
    core.logs.all().into_iter().map(fact).collect()
}

/// Damages all frames of a segment but its link, and the next link's facts about them.
fn destroy(disk: &SimDisk, segment: usize) {
    let paths = used_paths(disk);
    let link = |bytes: &[u8]| {
        let life = Life::decode(bytes).unwrap();
        frame::decode_header(&bytes[FIRST_FRAME..], life.salt).unwrap()
    };
    let mut bytes = disk.contents(&paths[segment]).unwrap();
    let from = FIRST_FRAME + usize::try_from(link(&bytes).frame_len()).unwrap();
    let end = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    bytes[from..end].fill(0xA5);
    disk.replace(&paths[segment], bytes);
    if let Some(next) = paths.get(segment + 1) {
        let mut bytes = disk.contents(next).unwrap();
        let body = FIRST_FRAME + link(&bytes).header_len as usize;
        bytes[body] ^= 1;
        disk.replace(next, bytes);
    }
}

fn remove_indexes(disk: &SimDisk) {
    for name in disk.list("index").unwrap() {
        disk.remove(&format!("index/{name}")).unwrap();
    }
}

fn accept(store: &Store, disk: &SimDisk) -> crate::recovery::Loss {
    let disk: Arc<dyn Disk> = Arc::new(disk.clone());
    let (loss, _) = accept_loss(&disk, &store.config, TestClock::new(), "by a test").unwrap();
    loss
}

/// Starts a few times, and finds the same facts each time.
fn check(store: &Store, disk: &SimDisk, expected: &Facts, what: &str) {
    for start in 0..3 {
        let fixture = store.open(disk.clone());
        assert_eq!(&facts(&fixture), expected, "{what}, start {start}");
    }
}

#[test]
fn index_keeps_all_facts_of_a_segment_whose_frames_are_lost() {
    let store = Store::new(End::Killed);
    let expected = facts(&store.open(store.disk.copy()));
    for segment in 0..6 {
        let disk = store.disk.copy();
        destroy(&disk, segment);
        let loss = accept(&store, &disk);
        let what = format!("segment {segment} was accepted as lost");
        assert!(!loss.gaps.is_empty(), "{what}");
        assert!(
            loss.gaps.iter().all(|gap| gap.log.is_some()),
            "{what}: {loss:?}"
        );
        assert_eq!(
            (loss.unknown_logs, &loss.unproven[..]),
            (false, &[][..]),
            "{what}"
        );
        check(&store, &disk, &expected, &what);
    }
}

#[test]
fn reader_that_finds_damage_costs_the_next_start_no_fact() {
    let store = Store::new(End::Killed);
    let expected = facts(&store.open(store.disk.copy()));
    for segment in 0..6 {
        let disk = store.disk.copy();
        destroy(&disk, segment);
        let fixture = store.open(disk.clone());
        let mut scan = fixture.scan(Selector::All, ScanStart::First, false);
        while let Some(Ok(Some(_))) = next_chunk(&mut scan) {}
        let damages = &fixture.core.damages;
        let all = damages.between(Position::ZERO, Position::new(u64::MAX));
        assert!(!all.is_empty(), "segment {segment}");
        drop((scan, fixture));
        let what = format!("segment {segment} was found damaged");
        check(&store, &disk, &expected, &what);
        accept(&store, &disk);
        check(&store, &disk, &expected, &format!("{what}, and accepted"));
    }
}

#[test]
fn checkpoint_keeps_all_facts_where_the_indexes_are_gone_too() {
    let store = Store::new(End::Clean);
    let expected = facts(&store.open(store.disk.copy()));
    for segment in 0..6 {
        let disk = store.disk.copy();
        destroy(&disk, segment);
        remove_indexes(&disk);
        accept(&store, &disk);
        let what = format!("segment {segment} without indexes");
        check(&store, &disk, &expected, &what);
    }
}

#[test]
fn name_that_only_a_checkpoint_knows_stays_after_an_acceptance() {
    let store = Store::new(End::Clean);
    let expected = facts(&store.open(store.disk.copy()));
    for segment in 0..6 {
        let disk = store.disk.copy();
        destroy(&disk, segment);
        remove_indexes(&disk);
        let loss = accept(&store, &disk);
        assert_eq!(loss.unnamed, [], "segment {segment}");
        // No start begins with a checkpoint now. The link with the acceptance is read before it.
        remove_indexes(&disk);
        let what = format!("segment {segment}, accepted, without indexes");
        check(&store, &disk, &expected, &what);
    }
}

/// A copy without checkpoints, in which a segment is lost, with its index and the next one. Later indexes are good.
fn without_segment(disk: &SimDisk, segment: usize) -> SimDisk {
    let disk = disk.copy();
    for name in disk.list("checkpoint").unwrap() {
        disk.remove(&format!("checkpoint/{name}")).unwrap();
    }
    destroy(&disk, segment);
    remove_index(&disk, segment);
    remove_index(&disk, segment + 1);
    disk
}

fn remove_index(disk: &SimDisk, segment: usize) {
    let path = used_paths(disk)[segment].replace("journal/", "index/");
    disk.remove(&path.replace(".seg", ".idx")).unwrap();
}

/// All facts but those about producers: the index of a segment lists only their changes.
fn without_producers(facts: Facts) -> BTreeMap<String, String> {
    let facts = facts.into_iter();
    facts.map(|(name, (fact, _))| (name, fact)).collect()
}

#[test]
fn facts_that_only_a_later_index_has_stay_after_an_acceptance() {
    let store = Store::new(End::Killed);
    let expected = without_producers(facts(&store.open(store.disk.copy())));
    for segment in 0..4 {
        let disk = without_segment(&store.disk, segment);
        let loss = accept(&store, &disk);
        assert_eq!(loss.unnamed, [], "segment {segment}");
        for start in 0..3 {
            let found = without_producers(facts(&store.open(disk.clone())));
            assert_eq!(found, expected, "segment {segment}, start {start}");
        }
    }
}

#[test]
fn name_of_a_segment_between_missing_ones_stays_after_an_acceptance() {
    let store = Store::new(End::Killed);
    let disk = store.disk.copy();
    for name in disk.list("checkpoint").unwrap() {
        disk.remove(&format!("checkpoint/{name}")).unwrap();
    }
    // The link after the missing segments names only the last one.
    for path in &used_paths(&disk)[..2] {
        disk.remove(path).unwrap();
    }
    let mut indexes = disk.list("index").unwrap();
    indexes.sort_unstable();
    for name in &indexes[1..] {
        disk.remove(&format!("index/{name}")).unwrap();
    }
    let loss = accept(&store, &disk);
    assert_eq!(loss.unnamed, []);
    let fixture = store.open(disk);
    for name in ["a", "b", "c/1", "packed"] {
        assert!(fixture.core.logs.by_name(name).is_some(), "{name}");
    }
}

/// Appends to "a" in three segments, deletes it in a fourth, and creates it again in a fifth. The sixth is empty.
fn deleted_and_created_again() -> Fixture {
    let fixture = Fixture::new();
    fixture.append("a", b"first").unwrap();
    fixture.core.idle();
    let fixture = fixture.restart();
    fixture.append("a", b"second").unwrap();
    fixture.core.idle();
    let fixture = fixture.restart();
    fixture.append("a", b"third").unwrap();
    fixture.core.idle();
    let fixture = fixture.restart();
    fixture.append("b", b"other").unwrap();
    let deleted = fixture.core.delete_in_turn(target("a"));
    fixture.core.turn();
    drop(deleted);
    fixture.core.idle();
    let fixture = fixture.restart();
    fixture.append("a", b"new").unwrap();
    fixture.core.idle();
    let fixture = fixture.restart();
    fixture.core.turn();
    fixture
}

#[test]
fn deleted_log_whose_name_an_index_has_does_not_come_back() {
    let fixture = deleted_and_created_again();
    let id = fixture.core.logs.by_name("a").unwrap().id;
    let disk = without_segment(&fixture.disk, 0);
    drop(fixture);
    // Nothing tells of the deletion.
    destroy(&disk, 3);
    remove_index(&disk, 3);
    let store: Arc<dyn Disk> = Arc::new(disk.clone());
    let (loss, _) = accept_loss(&store, &small_config(), TestClock::new(), "by a test").unwrap();
    assert_eq!(loss.unnamed, []);
    for start in 0..3 {
        let fixture = Fixture::on(disk.clone());
        let names: Vec<_> = (fixture.core.logs.all().iter())
            .map(|log| log.name.as_str().to_owned())
            .collect();
        assert!(!names.iter().any(|n| n.starts_with("unnamed")), "{names:?}");
        let log = fixture.core.logs.by_name("a").unwrap();
        assert_eq!(log.id, id, "start {start}");
        assert_eq!(fixture.contents("a"), [b"new"], "start {start}");
    }
}

#[test]
fn deleted_log_of_a_file_behind_a_missing_one_does_not_come_back() {
    let fixture = deleted_and_created_again();
    let disk = without_segment(&fixture.disk, 0);
    let config = fixture.config.clone();
    drop(fixture);
    // Segments 3 and 4 are missing, and the next link names only the second.
    remove_index(&disk, 2);
    let paths = used_paths(&disk);
    disk.remove(&paths[3]).unwrap();
    disk.remove(&paths[4]).unwrap();
    let store: Arc<dyn Disk> = Arc::new(disk.clone());
    let (loss, _) = accept_loss(&store, &config, TestClock::new(), "by a test").unwrap();
    assert_eq!(loss.unnamed, []);
    let fixture = Fixture::on(disk);
    let names: Vec<_> = (fixture.core.logs.all().iter())
        .map(|log| log.name.as_str().to_owned())
        .collect();
    assert_eq!(names, ["a"], "the deletion is in the index of segment 3");
}

#[test]
fn index_with_a_trim_of_an_unproven_log_proves_no_tail() {
    let fixture = Fixture::new();
    fixture.append("a", b"kept").unwrap();
    fixture.core.idle();
    let fixture = fixture.restart();
    fixture.append("a", b"lost").unwrap();
    fixture.core.idle();
    let fixture = fixture.restart();
    fixture.core.turn();
    let disk = without_indexes(&fixture.disk);
    drop(fixture);
    destroy(&disk, 1);
    let refused = |fixture: &Fixture| {
        let refused = fixture.append("a", b"new");
        assert!(
            matches!(refused, Err(AppendError::TailUnproven { .. })),
            "{refused:?}"
        );
    };
    let fixture = Fixture::on(disk);
    refused(&fixture);
    fixture.trim("a", 1);
    fixture.core.idle();
    let fixture = fixture.restart();
    fixture.core.turn();
    let disk = fixture.disk.clone();
    drop(fixture);
    // The index of this segment was made without knowledge of the tail.
    destroy(&disk, 3);
    let index = used_paths(&disk)[3].replace("journal/", "index/");
    assert!(disk.contents(&index.replace(".seg", ".idx")).is_some());
    let fixture = Fixture::on(disk);
    let log = fixture.core.logs.by_name("a").unwrap();
    assert_eq!(
        log.state.read().coming_first(),
        Lsn::new(1),
        "the trim is known"
    );
    refused(&fixture);
}

#[test]
fn damaged_trim_below_the_tail_proves_no_tail() {
    let fixture = Fixture::new();
    fixture.append("a", b"kept").unwrap();
    let kept = usize::try_from(fixture.core.journal.written().get()).unwrap();
    fixture.append("a", b"trimmed").unwrap();
    fixture.append("a", b"lost").unwrap();
    fixture.trim("a", 2);
    let end = usize::try_from(fixture.core.journal.written().get()).unwrap();
    // The mark proves that all was flushed, and its directory names the trim.
    fixture.core.idle();
    let disk = fixture.disk.clone();
    drop(fixture);
    let path = used_paths(&disk)[0].clone();
    let mut bytes = disk.contents(&path).unwrap();
    bytes[kept..end].fill(0xA5);
    disk.replace(&path, bytes);
    let fixture = Fixture::on(disk);
    let refused = fixture.append("a", b"with the lsn of a lost record");
    assert!(
        matches!(refused, Err(AppendError::TailUnproven { .. })),
        "{refused:?}"
    );
}

#[test]
fn name_whose_loss_was_accepted_stays_lost_when_an_index_comes_back() {
    let fixture = Fixture::new();
    fixture.append("a", b"first").unwrap();
    fixture.core.idle();
    let fixture = fixture.restart();
    fixture.append("a", b"second").unwrap();
    fixture.core.idle();
    let id = fixture.core.logs.by_name("a").unwrap().id;
    let fixture = fixture.restart();
    fixture.core.turn();
    let whole = fixture.disk.copy();
    let disk = without_segment(&whole, 0);
    drop(fixture);
    let path = used_paths(&disk)[1].replace("journal/", "index/");
    let path = path.replace(".seg", ".old");
    let index = whole.contents(&path.replace(".old", ".idx")).unwrap();
    let store: Arc<dyn Disk> = Arc::new(disk.clone());
    let (loss, _) = accept_loss(&store, &small_config(), TestClock::new(), "by a test").unwrap();
    let unnamed = format!("unnamed/{id}");
    assert_eq!(loss.unnamed[0].name.as_str(), unnamed);
    let fixture = Fixture::on(disk);
    fixture.append("a", b"another log").unwrap();
    let disk = fixture.disk.clone();
    drop(fixture);
    for start in 0..3 {
        let disk = match start {
            1 => without_indexes(&disk),
            _ => disk.clone(),
        };
        disk.replace(&path, index.clone());
        let fixture = Fixture::on(disk);
        assert_eq!(fixture.contents("a"), [b"another log"], "start {start}");
        let page = fixture.read(&unnamed, 1).unwrap();
        assert_eq!(payloads(&page.batches[0]), [b"second"], "start {start}");
    }
}

#[test]
fn name_that_only_a_checkpoint_knows_stays_after_a_long_acceptance() {
    let fixture = Fixture::new();
    let names: Vec<String> = (0..1000).map(|number| format!("log/{number}")).collect();
    for name in &names {
        fixture.append(name, b"lost").unwrap();
    }
    let segments = used_paths(&fixture.disk).len();
    let fixture = fixture.restart_cleanly();
    for name in &names {
        fixture.append(name, b"kept").unwrap();
    }
    let (disk, config) = (fixture.disk.clone(), fixture.config.clone());
    fixture.core.close().unwrap();
    drop(fixture);
    (0..segments).for_each(|segment| destroy(&disk, segment));
    remove_indexes(&disk);
    let of_all: Arc<dyn Disk> = Arc::new(disk.clone());
    let (loss, _) = accept_loss(&of_all, &config, TestClock::new(), "by a test").unwrap();
    assert_eq!((loss.gaps.len(), loss.unnamed.len()), (names.len(), 0));
    remove_indexes(&disk);
    let fixture = Fixture::on(disk);
    assert_eq!(fixture.report.findings, Vec::<String>::new());
    assert!(
        fixture.core.damages.accepted().iter().any(|a| a.all),
        "the list of losses is too long for a link"
    );
    for name in &names {
        let page = fixture.read(name, 1).unwrap();
        assert_eq!(payloads(&page.batches[0]), [b"kept"], "{name}");
    }
}

#[test]
fn index_of_a_missing_segment_keeps_its_facts() {
    let store = Store::new(End::Killed);
    let expected = facts(&store.open(store.disk.copy()));
    for segment in 0..6 {
        let disk = store.disk.copy();
        disk.remove(&used_paths(&disk)[segment]).unwrap();
        accept(&store, &disk);
        check(
            &store,
            &disk,
            &expected,
            &format!("segment {segment} is missing"),
        );
    }
}

#[test]
fn log_whose_name_is_lost_keeps_its_records_under_another_name() {
    let store = Store::new(End::Killed);
    let disk = without_indexes(&store.disk);
    let whole = store.open(disk.copy());
    let tail = |name: &str| whole.core.logs.by_name(name).unwrap().state.read().next;
    let ids: BTreeMap<&str, _> = ["a", "b", "c/1", "packed"]
        .map(|name| (name, whole.core.logs.by_name(name).unwrap().id))
        .into();
    destroy(&disk, 0);
    let fixture = store.open(disk.copy());
    let told = fixture.report.findings.iter();
    let told = told.filter(|finding| finding.contains("records (")).count();
    assert_eq!(told, ids.len(), "{:?}", fixture.report.findings);
    drop(fixture);

    let loss = accept(&store, &disk);
    assert_eq!(loss.unnamed.len(), ids.len(), "{loss:?}");
    assert!(
        loss.unnamed
            .iter()
            .all(|log| log.records > 0 && log.bytes > 0)
    );
    let repairs = String::from_utf8(disk.contents("REPAIRS").unwrap()).unwrap();
    for start in 0..3_u64 {
        let fixture = store.open(disk.clone());
        for (name, id) in &ids {
            let new = format!("unnamed/{id}");
            assert!(repairs.contains(&format!("{new:?}")), "{repairs}");
            let mut good = 0;
            for (lsn, data) in &store.records[name] {
                match fixture.read(&new, *lsn) {
                    Ok(page) => {
                        let first = &page.batches[0];
                        let at = usize::try_from(lsn - first.first_lsn.get()).unwrap();
                        assert_eq!(&payloads(first)[at], data, "{name} {lsn}");
                        good += 1;
                    }
                    Err(ReadError::Quarantined { .. }) => {}
                    Err(error) => panic!("{name} {lsn}: {error}"),
                }
            }
            let told = loss.unnamed.iter().find(|log| log.log_id == *id).unwrap();
            assert_eq!(told.records, good, "{name}");
            let log = fixture.core.logs.by_name(&new).unwrap();
            assert_eq!(log.state.read().next.get(), tail(name).get() + start);
            assert!(fixture.core.logs.by_name(name).is_none());
            super::damaged_files::append_after(&fixture, &new);
        }
        assert_eq!(fixture.report.findings, Vec::<String>::new());
        fixture
            .append(&format!("new/{start}"), b"logs are created again")
            .unwrap();
    }
    let store_disk: Arc<dyn Disk> = Arc::new(disk.clone());
    assert!(examine(&store_disk, &store.config).unwrap().is_empty());

    // The names stay when the sorter has replaced the segments that record the acceptance.
    let fixture = Fixture::with(disk, sorting::config());
    fixture.fill_logs(1, 3);
    assert!(fixture.sort() > 0);
    let fixture = bare(fixture);
    assert_eq!(fixture.report.findings, Vec::<String>::new());
    for id in ids.values() {
        let name = format!("unnamed/{id}");
        assert!(fixture.core.logs.by_name(&name).is_some(), "{name}");
    }
    fixture
        .append("new/sorted", b"logs are created again")
        .unwrap();
}

#[test]
fn checkpoint_keeps_the_end_of_a_segment_whose_successor_has_a_bad_link() {
    let fixture = Fixture::with(SimDisk::seeded(1), small_config());
    fixture
        .append_batch(batch(&[("x", &[b"whole"]), ("y", &[b"damaged"])]))
        .unwrap();
    fixture.core.idle();
    let fixture = fixture.restart();
    fixture.append("z", b"later").unwrap();
    fixture.core.idle();
    let fixture = fixture.restart_cleanly();
    assert!(!fixture.disk.list("checkpoint").unwrap().is_empty());
    let disk = fixture.disk.copy();
    drop(fixture);

    let paths = used_paths(&disk);
    let mut bytes = disk.contents(&paths[0]).unwrap();
    let of_last = cipher::places_of(&bytes, b"damaged");
    // The header of the last frame: its unit looks as if it never ended.
    let length = frame::HEADER_BYTES;
    let header = (FIRST_FRAME..*of_last.last().unwrap()).rev().find(|at| {
        let life = Life::decode(&bytes).unwrap();
        at % 8 == 0 && frame::decode_header(&bytes[*at..], life.salt).is_some()
    });
    bytes[header.unwrap() + length / 2] ^= 1;
    disk.replace(&paths[0], bytes);
    let mut bytes = disk.contents(&paths[1]).unwrap();
    bytes[FIRST_FRAME + length / 2] ^= 1;
    disk.replace(&paths[1], bytes);
    remove_indexes(&disk);

    let fixture = Fixture::with(disk, small_config());
    let page = fixture.read("x", 0).unwrap();
    assert_eq!(payloads(&page.batches[0]), [b"whole".to_vec()]);
    let lost = fixture.read("y", 0);
    assert!(
        matches!(lost, Err(ReadError::Quarantined { to: Some(to), .. }) if to == Lsn::new(1)),
        "{lost:?}"
    );
}

#[test]
fn end_of_a_cut_segment_is_in_doubt_if_its_successor_is_gone() {
    let fixture = Fixture::with(SimDisk::seeded(1), small_config());
    fixture.append("kept", b"one").unwrap();
    let kept = usize::try_from(fixture.core.journal.written().get()).unwrap();
    fixture.append("lost", b"two").unwrap();
    fixture.core.idle();
    let fixture = fixture.restart().restart();
    let paths = used_paths(&fixture.disk);
    let whole = fixture.disk.copy();
    drop(fixture);
    remove_indexes(&whole);
    for name in whole.list("checkpoint").unwrap() {
        whole.remove(&format!("checkpoint/{name}")).unwrap();
    }
    whole.remove(&paths[1]).unwrap();

    let told = |damage: &dyn Fn(&mut Vec<u8>)| {
        let disk = whole.copy();
        let mut bytes = disk.contents(&paths[0]).unwrap();
        damage(&mut bytes);
        disk.replace(&paths[0], bytes);
        let fixture = Fixture::with(disk, small_config());
        let doubt = |finding: &String| finding.contains("ended is not known");
        (
            fixture.report.findings.iter().any(doubt),
            fixture.read("lost", 0).is_ok(),
        )
    };
    assert_eq!(told(&|_| {}), (false, true), "nothing is cut");
    let cut = |bytes: &mut Vec<u8>| bytes.truncate(kept + 24);
    assert_eq!(told(&cut), (true, false), "within a header");
    let cut = |bytes: &mut Vec<u8>| bytes.truncate(kept);
    assert_eq!(told(&cut), (true, false), "between two frames");
    let overwritten = |bytes: &mut Vec<u8>| bytes[kept..].fill(0xA5);
    assert_eq!(told(&overwritten), (true, false), "overwritten to the end");
}

#[test]
fn record_with_the_lsn_of_a_lost_one_stays_when_an_index_comes_back() {
    let store = Store::new(End::Killed);
    let disk = store.disk.copy();
    // The newest segment with an index: its records are the last ones of their logs.
    let paths = used_paths(&disk);
    let index = disk.list("index").unwrap().into_iter().max().unwrap();
    let path = format!("index/{index}");
    let bytes = disk.contents(&path).unwrap();
    disk.remove(&path).unwrap();
    destroy(&disk, 5);
    disk.remove(&paths[6]).unwrap();
    disk.remove("BEGUN").unwrap();
    accept(&store, &disk);
    let fixture = store.open(disk.clone());
    let first = super::damaged_files::append_after(&fixture, "a").appends[0].first_lsn;
    drop(fixture);
    let old = path.replace(".idx", ".old");
    disk.replace(&old, bytes);
    for _ in 0..2 {
        let fixture = store.open(disk.clone());
        assert_eq!(fixture.report.findings, Vec::<String>::new());
        let page = fixture.read("a", first.get()).unwrap();
        assert_eq!(payloads(&page.batches[0]), [b"after"]);
    }
}

/// Appends to "a", then changes the log in a segment of its own. Returns the store with 3 segments.
fn changed_in_second_segment(change: &str) -> SimDisk {
    let fixture = Fixture::new();
    fixture.append("a", b"kept").unwrap();
    fixture.core.idle();
    let fixture = fixture.restart();
    match change {
        "append" => drop(fixture.append("a", b"lost").unwrap()),
        "trim" => {
            fixture.append("a", b"lost").unwrap();
            fixture.trim("a", 2);
        }
        _ => {
            let deleted = fixture.core.delete_in_turn(target("a"));
            fixture.core.turn();
            drop(deleted);
        }
    }
    fixture.core.idle();
    let fixture = fixture.restart();
    without_indexes(&fixture.disk)
}

#[test]
fn frames_whose_loss_was_accepted_have_no_effect_when_they_come_back() {
    // With the second file, the link that names the logs of the segment is good again.
    for (change, files) in [
        ("append", 1),
        ("append", 2),
        ("trim", 1),
        ("trim", 2),
        ("deletion", 1),
        ("deletion", 2),
    ] {
        let disk = changed_in_second_segment(change);
        let paths = used_paths(&disk)[1..=files].to_vec();
        let whole: Vec<Vec<u8>> = (paths.iter())
            .map(|path| disk.contents(path).unwrap())
            .collect();
        destroy(&disk, 1);
        let store: Arc<dyn Disk> = Arc::new(disk.clone());
        let (loss, _) =
            accept_loss(&store, &small_config(), TestClock::new(), "by a test").unwrap();
        assert_eq!(loss.unproven.len(), 1, "{change}: {loss:?}");
        let fixture = Fixture::on(disk.clone());
        let first = fixture.append("a", b"new").unwrap().appends[0].first_lsn;
        assert_eq!(first, Lsn::new(1), "{change}");
        drop(fixture);
        for (path, bytes) in paths.iter().zip(whole) {
            disk.replace(path, bytes);
        }
        for start in 0..4 {
            let disk = match start % 2 {
                0 => without_indexes(&disk),
                _ => disk.clone(),
            };
            let what = format!("{change}, {files} files, start {start}");
            let offline = Offline::open(Arc::new(disk.copy())).unwrap();
            let report = offline.verify(&Control::new(0), &mut |_| {}).unwrap();
            // With one file, the link in the next segment is still damaged.
            let is_wrong = |finding: &Finding| {
                let is_back = (finding.file.as_ref()).is_none_or(|path| paths.contains(path));
                finding.severity > Severity::Note && (is_back || files == 2)
            };
            let wrong: Vec<_> = report.findings.iter().filter(|f| is_wrong(f)).collect();
            assert!(wrong.is_empty(), "{what}: {wrong:?}");
            let fixture = Fixture::on(disk);
            let mut findings = Vec::new();
            let verified = fixture
                .core
                .verifier
                .verify(None, &Control::new(0), &mut |progress| {
                    findings.append(&mut progress.findings);
                });
            assert!(verified.is_ok());
            let wrong: Vec<_> = findings.iter().filter(|f| is_wrong(f)).collect();
            assert!(wrong.is_empty(), "{what}, online: {wrong:?}");
            assert_eq!(fixture.report.findings, Vec::<String>::new(), "{what}");
            assert_eq!(fixture.report.damage, [], "{what}");
            let expected = [&b"kept"[..], &b"new"[..]];
            assert_eq!(fixture.contents("a"), expected, "{what}");
            let mut scan = fixture.scan(Selector::All, ScanStart::First, false);
            let mut found = Vec::new();
            while let Some(chunk) = next_chunk(&mut scan).unwrap().unwrap() {
                found.extend(chunk.batches.iter().flat_map(payloads));
            }
            assert_eq!(found, expected, "{what}, by a scan");
        }
    }
}
