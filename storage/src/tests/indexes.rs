//! Index files and checkpoints: reads through them, and starts from them whatever is
//! missing, damaged or of another time.

use super::*;
use crate::record::{LogConfig, SyncMode};
use crate::ticket::block_on;

impl Fixture {
    fn segments(&self) -> usize {
        self.core.journal.segments.read().len()
    }

    /// Appends to a log until the journal has rolled so many times.
    fn roll(&self, log: &str, times: usize) {
        let before = self.segments();
        while self.segments() < before + times {
            self.clock.advance(1000);
            self.append(log, &[7; 6000]).unwrap();
        }
    }

    fn configure(&self, log: &str, config: LogConfig) {
        let name = LogName::new(log).unwrap();
        let awaited = self.core.configure_in_turn(name, config);
        self.core.turn();
        block_on(awaited).unwrap();
    }

    fn trim(&self, log: &str, before: u64) {
        let awaited = self.core.trim_in_turn(target(log), Lsn::new(before));
        self.core.turn();
        block_on(awaited).unwrap();
    }

    /// Appends one record with a time of its own, to memory only where the log's mode says so.
    fn append_at(&self, log: &str, micros: i64, level: Durability) {
        let mut batch = batch(&[(log, &[b"timed"])]);
        batch.logs[0].records[0].timestamp = Some(Timestamp::from_micros(micros));
        let mut ticket = self.core.enqueue(batch, level);
        self.core.turn();
        settled(&mut ticket).unwrap().unwrap();
    }

    fn lsn_at(&self, log: &str, micros: i64) -> u64 {
        let mut request = read_request(log, ReadStart::Time(Timestamp::from_micros(micros)));
        request.max_records = 1;
        let page = read::page(&self.core, &request, Reach::Disk).unwrap();
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
fn a_read_by_time_passes_over_a_segment_whose_records_were_trimmed_before_it_was_indexed() {
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
fn a_read_by_time_finds_a_record_that_was_in_memory_only_when_a_segment_was_left() {
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
