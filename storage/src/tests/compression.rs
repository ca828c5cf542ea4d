//! Compression: chosen per log, kept only where it helps, mixed in one log.

use super::*;
use crate::api::record::{Compression, LogConfig};
use crate::api::ticket::block_on;
use crate::base::ids::Position;

fn with(compression: Compression) -> Fixture {
    let fixture = Fixture::new();
    let config = LogConfig {
        compression: Some(compression),
        ..LogConfig::default()
    };
    let created = fixture
        .core
        .create_in_turn(LogName::new("a").unwrap(), config);
    fixture.core.turn();
    block_on(created).unwrap();
    fixture
}

fn stored_bytes(fixture: &Fixture, log: &str) -> u64 {
    fixture
        .core
        .logs
        .by_name(log)
        .unwrap()
        .state
        .read()
        .stored_bytes
}

#[test]
fn compressed_records_read_back_and_take_less_room() {
    for compression in [Compression::Lz4, Compression::Zstd] {
        if !compression.is_built() {
            continue;
        }
        let fixture = with(compression);
        let line =
            b"{\"delay\": 14, \"distance\": 405, \"time\": 1.5, \"origin\": \"SEA\"}".as_slice();
        let lines = vec![line; 100];
        for _ in 0..20 {
            fixture
                .append_batch(batch(&[("a", &lines), ("plain", &lines)]))
                .unwrap();
        }
        assert!(stored_bytes(&fixture, "a") * 5 < stored_bytes(&fixture, "plain"));
        let fixture = fixture.restart();
        for log in ["a", "plain"] {
            let found = fixture.contents(log);
            assert!(
                found.len() == 2000 && found.iter().all(|data| data == line),
                "{log}"
            );
        }
        let mut scan = fixture.scan(Selector::All, ScanStart::First, false);
        let mut count = 0;
        while let Some(chunk) = next_chunk(&mut scan).unwrap().unwrap() {
            assert!(chunk.gaps.is_empty());
            count += chunk
                .batches
                .iter()
                .flat_map(payloads)
                .filter(|data| data == line)
                .count();
        }
        assert_eq!(count, 4000);
    }
}

#[test]
fn records_that_do_not_get_smaller_are_stored_plain() {
    let fixture = with(Compression::Lz4);
    let mut noise = 1u64;
    let data: Vec<u8> = (0..2000)
        .map(|_| {
            noise = noise
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            noise.to_le_bytes()[7]
        })
        .collect();
    fixture.append("a", &data).unwrap();
    fixture.append("a", b"small").unwrap();
    assert_eq!(fixture.restart().contents("a"), [data, b"small".to_vec()]);
}

#[test]
fn positions_go_up_also_where_a_shared_frame_shrinks() {
    let fixture = with(Compression::Lz4);
    let data = [7; 500];
    let mut tickets: Vec<Ticket> = (0..200)
        .map(|_| fixture.submit(batch(&[("a", &[&data])])))
        .collect();
    fixture.core.turn();
    let answers = tickets
        .iter_mut()
        .map(|ticket| settled(ticket).unwrap().unwrap());
    let positions: Vec<_> = answers.map(|answer| answer.position.unwrap()).collect();
    assert!(positions.is_sorted_by(|a, b| a < b));
    assert!(stored_bytes(&fixture, "a") < 20_000);
    assert_eq!(fixture.contents("a").len(), 200);
}

/// Joins requests of one record each into one batch.
pub(super) fn joined(fixture: &Fixture, log: &str, records: &[&[u8]]) -> Batch {
    let mut requests = records.iter().map(|data| batch(&[(log, &[data])]));
    let mut joined = requests.next().unwrap();
    for next in requests {
        fixture.core.join(&mut joined, next).unwrap();
    }
    joined
}

#[test]
fn joined_requests_have_their_own_positions_in_the_shared_frame() {
    for compression in [Compression::None, Compression::Lz4] {
        let fixture = with(compression);
        let data: &[u8] = &[7; 100];
        let mut tickets = Vec::new();
        for count in [64, 1, 2, 40, 30, 64] {
            let joined = joined(&fixture, "a", &vec![data; count]);
            tickets.push((joined.requests(), fixture.submit(joined)));
        }
        fixture.core.turn();
        let mut end = Position::ZERO;
        for (requests, mut ticket) in tickets {
            let position = settled(&mut ticket).unwrap().unwrap().position.unwrap();
            assert!(position >= end, "{compression:?}");
            end = position.advance(requests.into());
        }
        assert!(fixture.core.journal.durable() >= end, "{compression:?}");
        assert_eq!(fixture.contents("a"), vec![data; 201], "{compression:?}");
        assert_eq!(fixture.restart().contents("a").len(), 201);
    }
}

#[test]
fn a_damaged_compressed_frame_is_named_and_the_rest_is_served() {
    let fixture = with(Compression::Lz4);
    for _ in 0..3 {
        fixture.append("a", &[7; 1000]).unwrap();
    }
    fixture.core.idle();
    let place = *fixture
        .core
        .logs
        .by_name("a")
        .unwrap()
        .state
        .read()
        .places
        .get(1)
        .unwrap();
    let segment = fixture.core.journal.segment_at(place.position).unwrap();
    let at = usize::try_from(segment.offset(place.position)).unwrap() + 66;
    // Without a restart, new records would be read from memory.
    let fixture = fixture.restart();
    let mut bytes = fixture.disk.contents(&segment.path()).unwrap();
    bytes[at] ^= 1;
    fixture.disk.replace(&segment.path(), bytes);
    let refused = fixture.read("a", 1);
    assert!(matches!(
        refused,
        Err(ReadError::Quarantined { from, to, .. })
            if (from, to) == (Lsn::new(1), Some(Lsn::new(2)))
    ));
    assert_eq!(fixture.read("a", 2).unwrap().next_lsn, Lsn::new(3));
}

#[test]
fn a_refusal_that_looked_at_a_frame_which_shrank_is_answered_by_the_flush() {
    let fixture = with(Compression::Lz4);
    let line = vec![7; 4000];
    let mut first = fixture.submit(batch(&[("a", &[&line])]));
    let mut wrong = batch(&[("a", &[b"x"])]);
    wrong.logs[0].guard.expected_lsn = Some(Lsn::new(9));
    let mut second = fixture.submit(wrong);
    fixture.core.turn();
    settled(&mut first).unwrap().unwrap();
    let refused = settled(&mut second).expect("nothing more is to come that it could wait for");
    assert!(matches!(refused, Err(AppendError::ConditionsFailed(_))));
    assert!(!fixture.core.journal.wants_flush());
}
