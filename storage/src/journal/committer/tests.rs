//! Tests of the committer's decisions, on a tail in memory: without encoding and without a disk.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;

use super::tail::Started;
use super::*;
use crate::api::config::StorageConfig;
use crate::api::engine::Appended;
use crate::api::error::HostShortage;
use crate::api::record::{Compression, LogRecords, Producer, Record};
use crate::api::records::Records;
use crate::api::ticket::Ticket;
use crate::base::bounds::{LIFE_BYTES, largest_unit};
use crate::base::clock::{Clock, SystemClock};
use crate::base::ids::{RecoveryEpoch, SegmentId};
use crate::base::metrics::NoObserver;
use crate::base::promise::Promise;
use crate::base::sync::Mutex;
use crate::format::body::Seal;
use crate::format::digest::Digest;
use crate::format::frame::{CONTINUES, FrameHead};
use crate::format::life::Life;
use crate::journal::expiry::Clocks;
use crate::journal::seal::Sealed;
use crate::journal::segment::Segment;

/// A finished frame: kind, whether its unit continues, first lsn, number of records.
type NotedFrame = (FrameKind, bool, Lsn, u32);

/// The record of a [`MemoryTail`], which tests read and change.
#[derive(Default)]
struct Notes {
    /// Written groups, each with its segment.
    groups: Vec<(SegmentId, Vec<NotedFrame>)>,
    /// Number of segments that are ready.
    ready: usize,
    /// The next write to this segment finds no space after this number of bytes.
    no_space: Option<(SegmentId, usize)>,
    zeroed: usize,
}

/// A tail that notes frames. A frame takes its header and the bytes of its records.
struct MemoryTail {
    notes: Arc<Mutex<Notes>>,
    segment: Arc<Segment>,
    next: Option<SegmentId>,
    offset: u64,
    bytes: usize,
    frames: Vec<NotedFrame>,
}

const SEAL_BYTES: usize = 256;

fn segment(id: SegmentId, size: u64) -> Arc<Segment> {
    let life = Life {
        id,
        size,
        salt: 0,
        store_id: 0,
    };
    let base = Position::new((id.get() - 1) * size);
    let segment = Segment::finished(life, base, None, size);
    *segment.end.write() = None;
    Arc::new(segment)
}

impl SegmentTail for MemoryTail {
    fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    fn position(&self, at: usize) -> Position {
        self.segment.base.advance(self.offset + at as u64)
    }

    fn len(&self) -> usize {
        self.bytes
    }

    fn directory_len(&self) -> usize {
        self.frames.len() * 8
    }

    fn directory_before(&self) -> usize {
        0
    }

    fn chain(&self) -> u32 {
        0
    }

    fn left(&self) -> u64 {
        self.segment.life.size - self.offset
    }

    fn fits(&self, frames: usize, _directory: usize, _open: bool) -> bool {
        (self.bytes + frames + SEAL_BYTES) as u64 <= self.left()
    }

    fn begin(&mut self, _producer: Option<(&Producer, Digest)>) -> Started {
        let (at, header_len) = (self.bytes, HEADER_BYTES);
        self.bytes += header_len;
        Started { at, header_len }
    }

    fn put(&mut self, _body: impl FnOnce(&mut Vec<u8>)) {}

    fn put_records(
        &mut self,
        records: &Records,
        arrival: Timestamp,
        last_time: &mut Timestamp,
    ) -> Option<Timestamp> {
        self.bytes += usize::try_from(records.stored_bytes()).unwrap();
        *last_time = arrival;
        None
    }

    fn finish(
        &mut self,
        frame: Started,
        head: FrameHead,
        _name: Option<&str>,
        _compression: Compression,
    ) -> Range<Position> {
        // Frames begin at multiples of 8, as on disk.
        self.bytes = self.bytes.next_multiple_of(8);
        let continues = head.flags & CONTINUES != 0;
        self.frames
            .push((head.kind, continues, head.first_lsn, head.count));
        self.position(frame.at)..self.end()
    }

    fn write(&mut self) -> Result<(), (usize, io::Error)> {
        let mut notes = self.notes.lock();
        let here = |(id, _): &mut (SegmentId, usize)| *id == self.segment.life.id;
        if let Some((_, written)) = notes.no_space.take_if(here) {
            return Err((written, io::ErrorKind::StorageFull.into()));
        }
        let frames = std::mem::take(&mut self.frames);
        notes.groups.push((self.segment.life.id, frames));
        Ok(())
    }

    fn advance(&mut self) -> Bytes {
        let group = vec![0; std::mem::take(&mut self.bytes)];
        self.offset += group.len() as u64;
        group.into()
    }

    fn take_back(&mut self, written: usize) -> io::Result<bool> {
        self.notes.lock().zeroed += written;
        self.frames.clear();
        self.bytes = 0;
        Ok(false)
    }

    fn seal(&self, records: u64, next_log_counter: u64, expiry: Timestamp) -> Seal {
        Seal {
            frames: 0,
            records,
            digest: 0,
            clean: self.next.is_none(),
            next_log_counter,
            successor: self.next,
            expiry: Some(expiry),
        }
    }

    fn take_next(&mut self, _purpose: Use) -> io::Result<()> {
        let mut notes = self.notes.lock();
        notes.ready = (notes.ready.checked_sub(1)).ok_or(io::ErrorKind::StorageFull)?;
        self.next = Some(self.segment.life.id.next());
        Ok(())
    }

    fn next_bytes(&self) -> u64 {
        self.segment.life.size
    }

    fn give_back_next(&mut self) {
        self.next = None;
        self.notes.lock().ready += 1;
    }

    fn roll(&mut self) {
        let next = self.next.take().unwrap();
        self.segment = segment(next, self.segment.life.size);
        self.offset = LIFE_BYTES;
    }

    fn restore_reserve(&self) -> io::Result<()> {
        Ok(())
    }

    fn is_starved(&self) -> bool {
        false
    }

    fn lacks(&self, _purpose: Use, _rolls: bool) -> FreeSpace {
        FreeSpace::default()
    }

    fn try_again(&self) {}
}

/// Notes the segments that the committer left.
#[derive(Default)]
struct Left(Mutex<Vec<SegmentId>>);

impl SealSink for Left {
    fn has_room(&self, _segment_bytes: u64) -> Result<(), HostShortage> {
        Ok(())
    }

    fn take_over(&self, sealed: Sealed) {
        self.0.lock().push(sealed.segment.life.id);
    }
}

struct Fixture {
    committer: Committer<MemoryTail>,
    notes: Arc<Mutex<Notes>>,
    left: Arc<Left>,
    logs: Arc<Logs>,
}

impl Fixture {
    /// A committer in its first segment, with one more segment ready. Its link is written.
    fn new(segment_bytes: u64) -> Self {
        let clock = Arc::new(SystemClock);
        let (now, at) = (clock.now(), clock.monotonic());
        let first = segment(SegmentId::FIRST, segment_bytes);
        let journal = Arc::new(Journal::new(
            clock,
            Arc::new(NoObserver),
            RecoveryEpoch::FIRST,
            BTreeMap::from([(first.base, Arc::clone(&first))]),
            Arc::clone(&first),
            first.base,
            Clocks::new(now, now, at),
        ));
        let config = StorageConfig::default();
        let settings = CommitterSettings {
            auto_create: true,
            largest_unit: largest_unit(segment_bytes),
            sync_mode: config.sync_mode,
            buffer_bytes: config.buffer_bytes,
            producer_window: config.producer_window,
            max_producers: config.max_producers_per_log,
            max_cursors: config.max_cursors_per_log,
            bounds: config.bounds(),
            uncertain: false,
            cipher: None,
        };
        let notes = Arc::new(Mutex::new(Notes {
            ready: 1,
            ..Notes::default()
        }));
        let tail = MemoryTail {
            notes: Arc::clone(&notes),
            segment: first,
            next: None,
            offset: LIFE_BYTES,
            bytes: 0,
            frames: Vec::new(),
        };
        let link = Link {
            predecessor: None,
            second: None,
            predecessor_end: Position::ZERO,
            predecessor_chain: 0,
            recovery_epoch: RecoveryEpoch::FIRST,
            next_log_counter: 1,
            closings: None,
            lost_before: None,
            accepted: None,
            expiry: None,
        };
        let resume = Resume {
            tail,
            link,
            next_log_counter: 1,
            arrival: now,
        };
        let left = Arc::new(Left::default());
        let logs = Arc::new(Logs::of(Vec::new()));
        let seals = Arc::clone(&left) as Arc<dyn SealSink>;
        let mut committer = Committer::new(journal, Arc::clone(&logs), seals, settings, resume);
        committer.write_out().unwrap();
        notes.lock().groups.clear();
        Self {
            committer,
            notes,
            left,
            logs,
        }
    }

    /// Commits these batches in one turn. Each lists the sizes of its records by log.
    fn commit(&mut self, batches: &[&[(&str, usize)]]) -> Vec<Result<Appended, AppendError>> {
        self.commit_as(Durability::Written, batches)
    }

    fn submission(&self, operation: Operation, level: Durability) -> Submission {
        Submission {
            operation,
            level,
            cost: 0,
            requests: 1,
            submitted: self.committer.journal.clock.monotonic(),
            session: None,
            gathered: false,
        }
    }

    fn commit_as(
        &mut self,
        level: Durability,
        batches: &[&[(&str, usize)]],
    ) -> Vec<Result<Appended, AppendError>> {
        let of = |(log, size): &(&str, usize)| LogRecords {
            log: LogName::new(log).unwrap(),
            records: Records::from(vec![Record {
                data: vec![0; *size].into(),
                ..Record::default()
            }]),
            guard: Default::default(),
            producer: None,
        };
        let mut submissions = Vec::new();
        let mut tickets = Vec::new();
        for logs in batches {
            let (ticket, answer) = Ticket::new();
            tickets.push(ticket);
            let append = Operation::Append {
                batch: logs.iter().map(of).collect::<Vec<_>>().into(),
                digests: Vec::new(),
                ticket: answer,
            };
            submissions.push(self.submission(append, level));
        }
        self.committer.commit(submissions);
        tickets.into_iter().map(Ticket::wait).collect()
    }

    fn groups(&self) -> Vec<(SegmentId, Vec<NotedFrame>)> {
        std::mem::take(&mut self.notes.lock().groups)
    }

    fn kinds(&self) -> Vec<(u64, Vec<FrameKind>)> {
        let kinds = |group: Vec<NotedFrame>| group.into_iter().map(|(kind, ..)| kind).collect();
        let groups = self.groups().into_iter();
        groups.map(|(id, group)| (id.get(), kinds(group))).collect()
    }
}

const BIG: u64 = 64 << 20;

#[test]
fn a_turn_beyond_the_size_of_a_group_is_written_in_groups() {
    let mut fixture = Fixture::new(BIG);
    fixture.commit(&[&[("a", 1)]]);
    fixture.groups();
    let third = GROUP_BYTES / 3;
    let batch: &[(&str, usize)] = &[("a", third)];
    let answers = fixture.commit(&[batch; 5]);
    assert!(answers.iter().all(Result::is_ok));
    let counts: Vec<usize> = fixture.groups().iter().map(|(_, g)| g.len()).collect();
    // Headers leave no room for a third record.
    assert_eq!(counts, [2, 2, 1]);
}

#[test]
fn appends_to_one_log_share_a_frame_until_another_log_comes() {
    let mut fixture = Fixture::new(BIG);
    fixture.commit(&[&[("a", 1)], &[("b", 1)]]);
    fixture.groups();
    fixture.commit(&[&[("a", 9)], &[("a", 9)], &[("b", 9)], &[("a", 9)]]);
    let groups = fixture.groups();
    let counts: Vec<u32> = groups[0].1.iter().map(|(.., count)| *count).collect();
    assert_eq!(counts, [2, 1, 1]);
    fixture.commit(&[&[("a", COALESCED_BYTES)], &[("a", 1)]]);
    assert_eq!(fixture.groups()[0].1.len(), 2);
}

#[test]
fn a_full_segment_is_sealed_before_the_link_of_the_next() {
    let size = LIFE_BYTES + 4096;
    let mut fixture = Fixture::new(size);
    fixture.commit(&[&[("a", 1)]]);
    fixture.groups();
    let answers = fixture.commit(&[&[("a", 1500)], &[("a", 1500)], &[("a", 1500)]]);
    let lsns = answers
        .iter()
        .map(|a| a.as_ref().unwrap().appends[0].first_lsn);
    assert!(lsns.eq((1..4).map(Lsn::new)));
    let (batch, seal, link) = (FrameKind::Batch, FrameKind::Seal, FrameKind::Link);
    assert_eq!(
        fixture.kinds(),
        [(1, vec![batch]), (1, vec![seal]), (2, vec![link, batch])]
    );
    let journal = &fixture.committer.journal;
    let first = journal.segment_at(Position::ZERO).unwrap();
    assert_eq!(*first.end.read(), Some(journal.durable()));
    assert!(journal.written() > Position::new(size));
    assert_eq!(fixture.left.0.lock().as_slice(), [SegmentId::FIRST]);
}

#[test]
fn without_another_segment_a_request_is_refused_and_changes_nothing() {
    let mut fixture = Fixture::new(LIFE_BYTES + 4096);
    fixture.commit(&[&[("a", 1)]]);
    fixture.notes.lock().ready = 0;
    fixture.groups();
    let end = fixture.committer.tail.end();
    let large: &[(&str, usize)] = &[("a", 1500)];
    let answers = fixture.commit(&[large, large, &[("b", 1500)], &[("a", 10)]]);
    assert!(answers[0].is_ok() && answers[1].is_ok());
    assert!(matches!(answers[2], Err(AppendError::DiskFull(_))));
    // A smaller request has room.
    assert!(answers[3].is_ok());
    assert!(fixture.logs.by_name("b").is_none());
    assert_eq!(fixture.kinds(), [(1, vec![FrameKind::Batch])]);
    assert!(fixture.committer.tail.end() > end);
    assert!(fixture.left.0.lock().is_empty());
}

#[test]
fn a_group_without_space_is_taken_back_and_gives_its_places_again() {
    let mut fixture = Fixture::new(BIG);
    fixture.commit(&[&[("a", 1)]]);
    let end = fixture.committer.tail.end();
    fixture.notes.lock().no_space = Some((SegmentId::FIRST, 100));
    fixture.groups();
    let answers = fixture.commit(&[&[("a", 9)], &[("b", 9)]]);
    let full = |answer: &Result<_, _>| matches!(answer, Err(AppendError::DiskFull(_)));
    assert!(answers.iter().all(full));
    assert_eq!(fixture.notes.lock().zeroed, 100);
    assert!(fixture.logs.by_name("b").is_none());
    assert_eq!(fixture.committer.tail.end(), end);
    assert_eq!(
        fixture.committer.room(),
        0,
        "drivers write until it succeeds"
    );
    let answers = fixture.commit(&[&[("a", 9)]]);
    let append = answers[0].as_ref().unwrap();
    assert_eq!(append.appends[0].first_lsn, Lsn::new(1));
    assert_eq!(append.position, Some(end));
    assert!(fixture.committer.room() > 0);
}

#[test]
fn a_link_without_space_begins_the_next_group_again() {
    let mut fixture = Fixture::new(LIFE_BYTES + 4096);
    let large: &[(&str, usize)] = &[("a", 1500)];
    assert!(fixture.commit(&[large, large]).iter().all(Result::is_ok));
    fixture.groups();
    let second = SegmentId::FIRST.next();
    fixture.notes.lock().no_space = Some((second, 0));
    let answers = fixture.commit(&[large]);
    assert!(matches!(answers[0], Err(AppendError::DiskFull(_))));
    let answers = fixture.commit(&[large]);
    assert_eq!(
        answers[0].as_ref().unwrap().appends[0].first_lsn,
        Lsn::new(2)
    );
    assert_eq!(
        fixture.kinds(),
        [
            (1, vec![FrameKind::Seal]),
            (2, vec![FrameKind::Link, FrameKind::Batch])
        ]
    );
}

#[test]
fn the_frames_of_a_unit_stay_in_one_group_and_segment() {
    let mut fixture = Fixture::new(LIFE_BYTES + 8192);
    let logs: &[(&str, usize)] = &[("a", 800), ("b", 800), ("c", 800)];
    fixture.commit(&[logs]);
    fixture.groups();
    let answers = fixture.commit(&[logs, logs]);
    assert!(answers.iter().all(Result::is_ok));
    let units: Vec<Vec<bool>> = fixture
        .groups()
        .into_iter()
        .map(|(_, group)| {
            let of =
                |(kind, continues, ..): NotedFrame| (kind == FrameKind::Batch).then_some(continues);
            group.into_iter().filter_map(of).collect()
        })
        .filter(|unit: &Vec<bool>| !unit.is_empty())
        .collect();
    assert_eq!(units, [[true, true, false], [true, true, false]]);
}

/// Accepts a record into `count` logs of sync mode `manual`, then writes all out. Returns the times of both.
fn accept_and_write_out(count: usize) -> (Duration, Duration) {
    let mut fixture = Fixture::new(BIG);
    fixture.committer.settings.sync_mode = SyncMode::Manual;
    let names: Vec<String> = (0..count).map(|n| n.to_string()).collect();
    let parts: Vec<[(&str, usize); 1]> = names.iter().map(|name| [(name.as_str(), 9)]).collect();
    let batches: Vec<&[(&str, usize)]> = parts.iter().map(|part| &part[..]).collect();
    fixture.commit(&batches);
    let clock = Arc::clone(&fixture.committer.journal.clock);
    let began = clock.monotonic();
    let answers = fixture.commit_as(Durability::Accepted, &batches);
    assert!(answers.iter().all(Result::is_ok));
    let accepted = clock.monotonic();
    assert!(!fixture.committer.memory.is_empty());
    fixture.groups();
    let (promise, _awaited) = Promise::new();
    let barrier = Operation::Barrier(Barrier::Plain, promise);
    let barrier = fixture.submission(barrier, Durability::Written);
    fixture.committer.commit([barrier]);
    let written = clock.monotonic();
    assert!(fixture.committer.memory.is_empty());
    let frames = fixture.groups().into_iter().map(|(_, group)| group.len());
    assert_eq!(frames.sum::<usize>(), count);
    (accepted - began, written - accepted)
}

#[test]
fn writing_out_takes_no_longer_per_log_where_there_are_many() {
    // Both do the same steps for each log. With a walk over all logs for each, the second takes 50 times as long.
    let mut rounds = (0..3).map(|_| accept_and_write_out(40_000));
    // The machine may be busy with something else in one of them.
    let is_linear = |(accept, write): (Duration, Duration)| write < 10 * accept;
    assert!(rounds.any(is_linear));
}
