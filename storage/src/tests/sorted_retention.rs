//! Retention of records in sorted runs: as exact as in the journal, except that bytes are bytes of packs.

use super::retention::{HOUR, by_age, by_bytes, by_records};
use super::*;
use crate::api::record::{Gap, GapReason};
use crate::base::ids::Position;

const RECORDS: u64 = 400;

/// A log with one record a minute, mostly in runs, and another log.
fn minutes() -> Fixture {
    let mut fixture = Fixture::with(SimDisk::new(), sorting::config());
    for minute in 0..RECORDS {
        let size = 300 + usize::try_from(minute * 37 % 900).unwrap();
        fixture.append("a", &vec![7; size]).unwrap();
        fixture.append("other", &[1; 500]).unwrap();
        fixture.clock.advance(HOUR / 60);
        if minute == RECORDS / 3 {
            assert!(fixture.sort() > 0);
        }
    }
    assert!(fixture.sort() > 0);
    // Makes one run. Behind a run, retention counts bytes of frames, and packs are no frames.
    fixture.config.sorter_step_bytes = 4 << 20;
    let fixture = fixture.restart_cleanly();
    fixture.sort();
    assert!(fixture.runs() == 1 && in_runs(&fixture) > RECORDS / 2);
    fixture
}

/// The lsn behind the newest record of the log in a run.
fn in_runs(fixture: &Fixture) -> u64 {
    let id = fixture.core.logs.by_name("a").unwrap().id;
    let runs = fixture.core.journal.runs();
    let row = |run: &Arc<crate::journal::run::Run>| {
        fixture.core.indexes.get(&run.segment).unwrap()?.row(id)
    };
    let next = runs.iter().filter_map(row).map(|row| row.next_lsn.get());
    next.max().unwrap()
}

/// Bytes of the packs and frames that hold kept records of the log, in order.
fn kept_bytes(fixture: &Fixture) -> Vec<u64> {
    let log = fixture.core.logs.by_name("a").unwrap();
    let first = Lsn::new(fixture.first("a"));
    let (runs, segments) = fixture.core.journal.runs_and_segments();
    let runs = runs.iter().map(|run| &run.segment);
    let mut found = Vec::new();
    for segment in runs.chain(&segments) {
        let Some(index) = fixture.core.indexes.get(segment).unwrap() else {
            continue;
        };
        for row in index.rows().filter(|row| row.log_id == log.id) {
            found.extend(index.entries(&row).from(0));
        }
    }
    let state = log.state.read();
    found.extend(state.places.from(0));
    found.retain(|place| place.next_lsn() > first);
    // A segment that has an index may be in memory too.
    found.sort_by_key(|place| place.first_lsn);
    found.dedup_by_key(|place| place.first_lsn);
    found
        .iter()
        .map(|place| u64::from(place.frame_len))
        .collect()
}

/// The gaps that a reader gets.
fn gaps(fixture: &Fixture) -> Vec<Gap> {
    let selector = Selector::Log(target("a"));
    let mut scan = fixture.scan(selector, ScanStart::Lsn(Lsn::ZERO), false);
    let mut gaps = Vec::new();
    while let Some(Ok(Some(chunk))) = next_chunk(&mut scan) {
        gaps.extend(chunk.gaps);
    }
    gaps
}

/// Checks that the log begins with this record, and that all earlier ones expired.
fn assert_begins(fixture: &Fixture, first: u64) {
    assert_eq!(fixture.first("a"), first);
    let gaps = gaps(fixture);
    let gone: u64 = gaps
        .iter()
        .map(|gap| gap.to.unwrap().since(gap.from.unwrap()))
        .sum();
    assert_eq!(gone, first, "{gaps:?}");
    assert!(gaps.iter().all(|gap| gap.reason == GapReason::Expired));
    let page = fixture.read("a", first).unwrap();
    assert_eq!(page.batches[0].first_lsn, Lsn::new(first));
    assert!(matches!(
        fixture.read("a", first - 1),
        Err(ReadError::Trimmed { first: told, .. }) if told == Lsn::new(first)
    ));
}

#[test]
fn exactly_so_many_records_are_kept_where_they_lie_in_runs() {
    let mut fixture = minutes();
    let borders = [1, 7, in_runs(&fixture) / 2, in_runs(&fixture) - 1];
    for first in borders {
        fixture.retain("a", Some(by_records(RECORDS - first)));
        fixture.pass();
        assert_begins(&fixture, first);
        // The run is written again without the expired records.
        fixture.sort();
        assert_begins(&fixture, first);
        fixture = fixture.restart();
        assert_begins(&fixture, first);
    }
}

#[test]
fn older_records_in_runs_expire_to_the_minute() {
    let fixture = minutes();
    let border = in_runs(&fixture) / 4;
    let age = i64::try_from(RECORDS - border).unwrap() * (HOUR / 60);
    fixture.retain("a", Some(by_age(age)));
    fixture.pass();
    // The record of minute `border` is exactly as old as the bound.
    for first in border + 1..in_runs(&fixture) {
        assert_eq!(fixture.first("a"), first);
        fixture.clock.advance(HOUR / 60 - 1);
        fixture.pass();
        assert_eq!(fixture.first("a"), first, "a microsecond too young");
        fixture.clock.advance(1);
        fixture.pass();
        if first % 50 == 0 {
            fixture.sort();
        }
    }
    assert_begins(&fixture, in_runs(&fixture));
}

#[test]
fn as_few_packs_are_kept_as_take_the_bytes_or_more() {
    for part in [8, 5, 2] {
        let fixture = minutes();
        let all: u64 = kept_bytes(&fixture).iter().sum();
        let bytes = all * part / 10;
        fixture.retain("a", Some(by_bytes(bytes)));
        fixture.pass();
        let kept = kept_bytes(&fixture);
        let sum: u64 = kept.iter().sum();
        assert!(fixture.first("a") > 0, "{bytes} of {all}");
        assert!(sum >= bytes, "{sum} of {bytes} bytes are kept");
        assert!(sum - kept[0] < bytes, "{sum} bytes are more than need be");
        let first = fixture.first("a");
        assert_begins(&fixture, first);
        // After the run is written again, the kept bytes still reach the bound.
        fixture.sort();
        fixture.pass();
        assert_eq!(fixture.first("a"), first);
        let fixture = fixture.restart();
        fixture.pass();
        assert_eq!(fixture.first("a"), first);
        assert!(fixture.core.journal.sorted_end() > Position::ZERO);
    }
}
