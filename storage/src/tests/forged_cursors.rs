//! Scan cursors that a client made up: none of them makes sound records unreadable, and none costs much.

use super::damage::read_around;
use super::*;
use crate::api::record::{Gap, GapReason};
use crate::base::crc::crc32c;
use crate::base::ids::Position;
use crate::format::active::Place;

const SELECTED: &str = "a/";
const OWN: &str = "a/1";
const FOREIGN: &str = "b/1";

/// Offset of the position in a cursor; the number of skipped records follows it.
const POSITION_AT: usize = 2 + 2 * 8;

/// `cursor` with another position and another number of skipped records, and with a good checksum.
fn forged(cursor: &Bytes, position: u64, skip: u64) -> Bytes {
    let mut bytes = cursor.to_vec();
    bytes[POSITION_AT..POSITION_AT + 8].copy_from_slice(&position.to_le_bytes());
    bytes[POSITION_AT + 8..POSITION_AT + 16].copy_from_slice(&skip.to_le_bytes());
    let end = bytes.len() - 4;
    let crc = crc32c(&bytes[..end]);
    bytes[end..].copy_from_slice(&crc.to_le_bytes());
    Bytes::from(bytes)
}

fn position_of(cursor: &Bytes) -> u64 {
    u64::from_le_bytes(cursor[POSITION_AT..POSITION_AT + 8].try_into().unwrap())
}

/// The records and gaps of a scan, or why it was refused.
type ResumedScan = Result<(Vec<Vec<u8>>, Vec<Gap>), ReadError>;

impl Fixture {
    /// Appends to both logs in turn, in frames of many sizes.
    fn fill_both(&self, rounds: u64) {
        for number in 0..rounds {
            let mut data = number.to_le_bytes().to_vec();
            data.resize(8 + usize::try_from(number * 7919 % 1500).unwrap(), 7);
            for log in [OWN, FOREIGN] {
                self.core.pool_in_turn().unwrap();
                self.append(log, &data).unwrap();
            }
        }
    }

    fn selected(&self, start: ScanStart, follow: bool) -> Result<Box<dyn Scan>, ReadError> {
        self.try_scan(Selector::Prefix(SELECTED.to_owned()), start, follow)
    }

    /// A cursor of a reader that may read one prefix.
    fn own_cursor(&self) -> Bytes {
        let mut scan = self.selected(ScanStart::First, false).unwrap();
        let chunk = next_chunk(&mut scan).unwrap().unwrap().unwrap();
        chunk.cursor
    }

    fn resume(&self, cursor: &Bytes) -> ResumedScan {
        let mut scan = self.selected(ScanStart::Cursor(cursor.clone()), false)?;
        let (mut records, mut gaps) = (Vec::new(), Vec::new());
        while let Some(chunk) = next_chunk(&mut scan).unwrap()? {
            records.extend(chunk.batches.iter().flat_map(payloads));
            gaps.extend(chunk.gaps);
        }
        Ok((records, gaps))
    }

    fn place(&self, log: &str, number: usize) -> Place {
        let log = self.core.logs.by_name(log).unwrap();
        let state = log.state.read();
        state.places.from(number)[0]
    }

    /// Every position where a scan of many logs may stand.
    fn borders(&self) -> Vec<u64> {
        let mut scan = self.scan(Selector::All, ScanStart::First, false);
        let mut found = Vec::new();
        while let Some(chunk) = next_chunk(&mut scan).unwrap().unwrap() {
            found.push(position_of(&chunk.cursor));
        }
        found
    }

    fn assert_sound(&self, expected: &[Vec<u8>], what: &str) {
        let all = Position::new(u64::MAX);
        let damages = self.core.store.damages.between(Position::ZERO, all);
        assert_eq!(damages.len(), 0, "{what}");
        for segment in self.core.journal.segments.read().values() {
            assert_eq!(*segment.holes.read(), [], "{what}");
        }
        for run in self.core.journal.runs() {
            assert_eq!(*run.segment.holes.read(), [], "{what}");
        }
        for log in [OWN, FOREIGN] {
            assert_eq!(self.contents(log), expected, "{what}: {log}");
        }
        let statistics = self.core.statistics();
        assert_eq!(statistics.quarantined_records, 0, "{what}");
        assert_eq!(statistics.unattributed_damages, 0, "{what}");
    }

    /// Scans from made-up positions near `around`. The answer must be a part of the records, or a refusal. It must
    /// leave no trace.
    fn attack(&self, around: &[u64], deltas: i64, what: &str) {
        let expected = self.contents(OWN);
        let cursor = self.own_cursor();
        let mut refused = 0;
        for around in around {
            for delta in -deltas..=deltas {
                let position = around.saturating_add_signed(delta);
                let skips: &[u64] = if delta % 8 == 0 { &[0, 1, 1000] } else { &[0] };
                for skip in skips {
                    match self.resume(&forged(&cursor, position, *skip)) {
                        Ok((records, gaps)) => {
                            assert!(expected.ends_with(&records), "{what}: {position}");
                            assert_eq!(gaps, [], "{what}: {position}");
                        }
                        Err(ReadError::BadCursor(_)) => refused += 1,
                        Err(error) => panic!("{what}: {position}: {error}"),
                    }
                }
            }
        }
        self.assert_sound(&expected, what);
        if self.runs() == 0 {
            assert!(refused > 0, "{what}: no position was refused");
        }
    }

    /// Borders of segments and their ends, positions above the tail, and places of the reader.
    fn interesting(&self) -> Vec<u64> {
        let mut found = vec![0, 64 << 10, position_of(&self.own_cursor())];
        for segment in self.core.journal.segments.read().values() {
            let end = segment.end.read().unwrap_or(segment.limit());
            let unused = end.get() + segment.limit().since(end) / 2;
            found.extend([segment.base.get(), segment.first().get(), end.get(), unused]);
        }
        let tail = self.core.journal.durable().get();
        found.extend([tail - 300, tail, tail + 4096, tail + (64 << 20)]);
        found
    }
}

#[test]
fn made_up_cursors_harm_no_record_of_the_open_segment() {
    let f = Fixture::new();
    f.fill_both(6);
    f.attack(&f.interesting(), 64, "in memory");
    let f = f.restart();
    f.fill_both(6);
    f.attack(&f.interesting(), 64, "after a start");
    let f = f.restart_cleanly();
    f.attack(&f.borders(), 16, "at every border");
}

#[test]
fn made_up_cursors_harm_no_record_of_a_sealed_segment() {
    let f = Fixture::new();
    f.fill_both(150);
    assert!(f.core.journal.segments.read().len() > 3);
    f.attack(&f.interesting(), 64, "sealed");
    let f = f.restart();
    f.attack(&f.interesting(), 64, "after a start");
    let f = super::around_damage::bare(f);
    f.attack(&f.interesting(), 16, "without indexes");
}

#[test]
fn made_up_cursors_harm_no_record_of_runs_and_recycled_files() {
    let f = Fixture::with(SimDisk::new(), sorting::config());
    f.fill_both(150);
    f.sort();
    assert!(f.runs() > 0);
    let first = f.core.journal.current().life.id;
    f.attack(&f.interesting(), 64, "sorted");
    f.fill_both(150);
    let files = f.core.journal.segments.read().len();
    assert!(files > 1 && f.core.journal.current().life.id > first);
    f.attack(&f.interesting(), 64, "recycled");
    let f = f.restart();
    f.attack(&f.interesting(), 64, "after a start");
}

#[test]
fn follower_from_a_made_up_place_above_the_tail_harms_nothing() {
    let f = Fixture::new();
    f.fill_both(3);
    let (cursor, tail) = (f.own_cursor(), f.core.journal.durable().get());
    let mut scans = Vec::new();
    for delta in 1..300 {
        let start = ScanStart::Cursor(forged(&cursor, tail + delta, 0));
        let mut scan = f.selected(start, true).unwrap();
        // It has caught up, and waits.
        let _first = next_chunk(&mut scan);
        scans.push(scan);
    }
    f.fill_both(3);
    let expected = f.contents(OWN);
    let mut refused = 0;
    for scan in &mut scans {
        while let Some(answer) = next_chunk(scan) {
            match answer {
                Ok(chunk) => assert_eq!(chunk.unwrap().gaps, []),
                Err(ReadError::BadCursor(_)) => {
                    refused += 1;
                    break;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert!(refused > 0);
    f.assert_sound(&expected, "above the tail");
}

/// Offset in its frame of the data of the record at `place`, which contains `data`.
fn data_offset(f: &Fixture, place: &Place, data: &[u8]) -> u64 {
    let segment = f.core.journal.segment_at(place.position).unwrap();
    let from = usize::try_from(segment.offset(place.position)).unwrap();
    let bytes = f.disk.contents(&segment.path()).unwrap();
    let frame = &bytes[from..from + place.frame_len as usize];
    let found = frame.windows(data.len()).position(|part| part == data);
    found.expect("it is stored plain") as u64
}

/// 4,000 bytes for a position. Each word of them is the position where a header of a frame would begin that has its
/// own position, at offset 16, in this word.
fn claiming(from: u64) -> Vec<u8> {
    let words = from.next_multiple_of(8);
    let mut data = vec![9; usize::try_from(words - from).unwrap()];
    for at in (words..words + 4000).step_by(8) {
        data.extend_from_slice(&(at - 16).to_le_bytes());
    }
    data.truncate(4000);
    data
}

#[test]
fn records_that_claim_to_be_frames_are_not_taken_for_damage() {
    let config = StorageConfig {
        cipher: None,
        ..small_config()
    };
    let f = Fixture::with(SimDisk::new(), config);
    let mut data = vec![1; 4000];
    f.append(OWN, &data).unwrap();
    // The header of a frame grows with the group before it, so the first guess of a place may be wrong.
    let place = (1..8).find_map(|number| {
        let before = f.place(OWN, number - 1);
        let (position, offset) = (before.end().get(), data_offset(&f, &before, &data));
        data = claiming(position + offset);
        f.append(OWN, &data).unwrap();
        let place = f.place(OWN, number);
        let is_right = place.position.get() == position && data_offset(&f, &place, &data) == offset;
        is_right.then_some(place)
    });
    let place = place.expect("a place was guessed");
    f.append(FOREIGN, b"behind").unwrap();
    let f = f.restart();
    let cursor = f.own_cursor();
    for position in (place.position.get() + 8..place.end().get()).step_by(8) {
        let answer = f.resume(&forged(&cursor, position, 0));
        assert!(matches!(answer, Err(ReadError::BadCursor(_))), "{position}");
    }
    assert_eq!(f.contents(FOREIGN), [b"behind"]);
    assert_eq!(f.core.statistics().quarantined_records, 0);
}

/// Damages the header of a frame, then scans from it with a good cursor.
fn rotted(f: &Fixture, place: Place) -> ResumedScan {
    let segment = f.core.journal.segment_at(place.position).unwrap();
    let at = usize::try_from(segment.offset(place.position)).unwrap();
    flip(&f.disk, &segment.path(), at + 20);
    f.resume(&forged(&f.own_cursor(), place.position.get(), 0))
}

#[test]
fn good_cursor_at_a_frame_that_rotted_still_gets_a_gap() {
    for sealed in [false, true] {
        let f = Fixture::new();
        f.fill_both(6);
        let (place, before) = (f.place(OWN, 3), f.contents(OWN));
        if sealed {
            f.fill_both(150);
        }
        let f = f.restart();
        let (records, gaps) = rotted(&f, place).unwrap();
        let lost = (Some(Lsn::new(3)), Some(Lsn::new(4)), GapReason::Quarantined);
        let told: Vec<_> = gaps
            .iter()
            .map(|gap| (gap.from, gap.to, gap.reason))
            .collect();
        assert_eq!(told, [lost], "sealed: {sealed}");
        assert_eq!(records[..2], before[4..], "sealed: {sealed}");
        let (_, missing) = read_around(&f, OWN);
        assert_eq!(missing.into_iter().collect::<Vec<_>>(), [3]);
        let (_, missing) = read_around(&f, FOREIGN);
        assert!(missing.is_empty(), "sealed: {sealed}");
    }
}

#[test]
fn damage_below_a_cursor_is_not_mistaken_for_its_place() {
    let f = Fixture::new();
    f.fill_both(8);
    let foreign = f.place(FOREIGN, 2);
    let own = f.place(OWN, 5);
    let f = f.restart();
    // The cursor stands inside of a frame that rotted: its own records are lost, and no others.
    let segment = f.core.journal.segment_at(foreign.position).unwrap();
    let at = usize::try_from(segment.offset(foreign.position)).unwrap();
    flip(&f.disk, &segment.path(), at + 20);
    let inside = forged(&f.own_cursor(), foreign.position.get() + 16, 0);
    let (records, gaps) = f.resume(&inside).unwrap();
    assert_eq!((records, gaps), (f.contents(OWN)[3..].to_vec(), Vec::new()));
    let (_, missing) = read_around(&f, FOREIGN);
    assert_eq!(missing.into_iter().collect::<Vec<_>>(), [2]);
    // Behind known damage, good frames still show where a frame begins, and a cursor at a frame that rotted gets a gap.
    let beside = forged(&f.own_cursor(), own.position.get() + 8, 0);
    assert!(matches!(f.resume(&beside), Err(ReadError::BadCursor(_))));
    let (_, gaps) = rotted(&f, own).unwrap();
    assert_eq!(gaps.len(), 1);
    assert_eq!(gaps[0].from, Some(Lsn::new(5)));
    assert_eq!(f.core.statistics().quarantined_records, 2);
}

#[test]
fn damaged_order_of_a_run_is_one_damage_from_wherever_it_is_read() {
    let f = Fixture::with(SimDisk::new(), sorting::config());
    f.fill_both(150);
    f.sort();
    let cursor = f.own_cursor();
    let run = Arc::clone(&f.core.journal.runs()[0]);
    let (first, offset) = run.head.order[0];
    let at = usize::try_from(offset).unwrap();
    flip(&f.disk, &run.segment.path(), at + 20);
    for delta in (0..4000).step_by(8) {
        let (_, gaps) = f.resume(&forged(&cursor, first.get() + delta, 0)).unwrap();
        let of_nobody = gaps.iter().filter(|gap| gap.log.is_none()).count();
        assert_eq!(of_nobody, 1, "{delta} behind the first frame");
    }
    let all = Position::new(u64::MAX);
    assert_eq!(f.core.store.damages.between(Position::ZERO, all).len(), 1);
}

#[test]
fn made_up_cursor_costs_a_few_short_reads() {
    let config = StorageConfig {
        segment_bytes: 8 << 20,
        ..small_config()
    };
    let f = Fixture::with(SimDisk::new(), config);
    f.append(OWN, b"first").unwrap();
    let data = vec![7; 30_000];
    for _ in 0..600 {
        f.core.pool_in_turn().unwrap();
        f.append(FOREIGN, &data).unwrap();
    }
    let log = f.core.logs.by_name(FOREIGN).unwrap();
    let places = log.state.read().places.from(0).to_vec();
    let f = f.restart();
    assert!(f.core.journal.segments.read().len() > 2);
    let cursor = f.own_cursor();
    let cost = |position: u64| {
        let before = f.disk.reads().1;
        let answer = f.resume(&forged(&cursor, position, 0));
        assert!(matches!(answer, Err(ReadError::BadCursor(_))), "{position}");
        f.disk.reads().1 - before
    };
    for number in [places.len() - 1, places.len() / 2] {
        let position = places[number].position.get() + 16;
        let first_walk = cost(position);
        assert!(first_walk <= 10 << 20, "{first_walk} bytes");
        let before = places[number - 3].position.get() + 16;
        for position in [position, position + 8, before, position + 1] {
            let again = cost(position);
            assert!(again <= 1 << 20, "{again} bytes at {position}");
        }
    }
}
