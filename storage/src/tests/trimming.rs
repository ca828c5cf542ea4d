//! Trims: durable, shown only when they are durable, and never silent to a reader.

use super::*;
use crate::api::error::TrimError;
use crate::api::record::GapReason;
use crate::api::ticket::block_on;

fn ten() -> Fixture {
    let fixture = Fixture::new();
    for index in 0..10u8 {
        fixture
            .append_batch(batch(&[("a", &[&[index]]), ("b", &[&[index]])]))
            .unwrap();
    }
    fixture
}

fn trim(fixture: &Fixture, log: &str, before: u64) -> Result<u64, TrimError> {
    let awaited = fixture.core.trim_in_turn(target(log), Lsn::new(before));
    fixture.core.turn();
    block_on(awaited).map(Lsn::get)
}

#[test]
fn a_trim_forgets_earlier_records_and_survives_restarts() {
    let fixture = ten();
    assert_eq!(trim(&fixture, "a", 4).unwrap(), 4);
    let check = |fixture: &Fixture| {
        assert!(matches!(
            fixture.read("a", 3),
            Err(ReadError::Trimmed { first, asked, .. })
                if (first, asked) == (Lsn::new(4), Lsn::new(3))
        ));
        let page = fixture.read_from("a", ReadStart::First).unwrap();
        assert_eq!((page.first_lsn, page.next_lsn), (Lsn::new(4), Lsn::new(10)));
        assert_eq!(fixture.contents("b").len(), 10);
    };
    check(&fixture);
    assert_eq!(
        trim(&fixture, "a", 2).unwrap(),
        4,
        "a lower trim changes nothing"
    );
    let fixture = fixture.restart();
    check(&fixture);
    assert_eq!(trim(&fixture, "a", 10).unwrap(), 10);
    let appended = fixture.append("a", b"x").unwrap();
    assert_eq!(
        appended.appends[0].first_lsn,
        Lsn::new(10),
        "an lsn is never reused"
    );
}

#[test]
fn a_trim_past_the_tail_or_of_nothing_is_refused() {
    let fixture = ten();
    assert!(matches!(
        trim(&fixture, "a", 11),
        Err(TrimError::BeyondTail { .. })
    ));
    assert!(matches!(
        trim(&fixture, "nothing", 0),
        Err(TrimError::Target(TargetError::NotFound { .. }))
    ));
    assert_eq!(fixture.contents("a").len(), 10);
}

#[test]
fn a_trim_that_is_not_on_the_device_is_not_shown() {
    let fixture = ten();
    fixture.disk.fail_sync(1);
    assert!(trim(&fixture, "a", 5).is_err());
    assert_eq!(fixture.contents("a").len(), 10);
}

#[test]
fn scans_name_trimmed_records() {
    let fixture = ten();
    let request = |selector, start| ScanRequest {
        selector,
        start,
        until_lsn: None,
        max_records: 4,
        follow: false,
        visibility: None,
        chunk_bytes: 1 << 20,
    };
    let begin = |selector, start| fixture.begin(request(selector, start)).unwrap();
    let cursor = |selector: Selector| {
        let mut scan = begin(selector, ScanStart::First);
        ScanStart::Cursor(next_chunk(&mut scan).unwrap().unwrap().unwrap().cursor)
    };
    let (of_one, of_all) = (cursor(one("a")), cursor(Selector::All));
    trim(&fixture, "a", 6).unwrap();
    // A scan of all logs stops when it is full, after four records of the other log. It names the records
    // that it has passed by then.
    for (selector, start, from, to) in [
        (one("a"), ScanStart::Lsn(Lsn::new(1)), 1, 6),
        (one("a"), of_one, 4, 6),
        (Selector::All, of_all, 2, 6),
        (Selector::All, ScanStart::First, 0, 4),
    ] {
        let mut scan = begin(selector, start);
        let chunk = next_chunk(&mut scan).unwrap().unwrap().unwrap();
        let gap = &chunk.gaps[0];
        assert_eq!(gap.reason, GapReason::Trimmed);
        assert_eq!(
            (gap.from, gap.to),
            (Some(Lsn::new(from)), Some(Lsn::new(to)))
        );
        let first = chunk.batches.iter().find(|batch| batch.log.as_str() == "a");
        assert!(first.is_none_or(|batch| batch.first_lsn >= Lsn::new(6)));
    }
    let mut scan = begin(one("a"), ScanStart::First);
    let chunk = next_chunk(&mut scan).unwrap().unwrap().unwrap();
    assert!(
        chunk.gaps.is_empty(),
        "who asks for what is there misses nothing"
    );
}
