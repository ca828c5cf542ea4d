//! The committer: takes what queued up, gives it lsns and places, writes it.
//!
//! One struct, one writer. Who drives it (a thread, a test, a simulation) is decided
//! elsewhere. The order is: secure space → check → assign → encode → write → publish →
//! answer, or leave to the flush. Space is secured first, so that a full disk refuses
//! before any state moved.
//!
//! A *group* is what one write carries. Its first frame tells the directory of the
//! group before; a segment's last group is told by the seal.

use std::sync::Arc;
use std::time::Instant;

use xxhash_rust::xxh3::Xxh3;

use super::body::{Closing, Created, Link, Seal};
use super::compress;
use super::frame::{self, CONTINUES, DirectoryBuilder, HEADER_BYTES, Head, Header, Kind};
use super::pool::{Pool, ReadySegment};
use super::segment::Segment;
use super::{Answer, Journal, LIFE_BYTES, Outcome, Waiter};
use crate::codec;
use crate::disk::{DiskFile, is_out_of_space};
use crate::engine::{LogAppended, LogTarget, Ordered};
use crate::error::{AdminError, AppendError, TrimError};
use crate::ids::{LogId, LogName, Lsn, Position, SegmentId, Timestamp};
use crate::index::Place;
use crate::local::{Buffered, Checked, Creation, Log, Logs, check};
use crate::metrics::Phase;
use crate::record::{Batch, Compression, Durability, LogConfig, LogRecords, Record, SyncMode};

/// A group is written when it has grown to this.
const GROUP_BYTES: usize = 4 << 20;
/// A group's directory is kept below this, so that it fits a frame's extensions.
const DIRECTORY_BYTES: usize = 128 << 10;
/// The most a unit may add to a directory.
const UNIT_DIRECTORY_BYTES: usize = frame::MAX_HEADER_BYTES - DIRECTORY_BYTES - 4096;
/// Appends of one log that meet in a group share a frame up to this.
const COALESCED_BYTES: usize = 256 << 10;

/// What is asked of the committer.
pub(crate) enum Operation {
    Append(Batch),
    Create {
        name: LogName,
        config: LogConfig,
    },
    Configure {
        name: LogName,
        config: LogConfig,
    },
    Delete(LogTarget),
    Trim {
        target: LogTarget,
        before: Lsn,
    },
    /// Nothing but to be answered when everything before it is safe.
    Barrier,
}

/// One request on its way.
pub(crate) struct Submission {
    pub(crate) operation: Operation,
    /// The level to answer at.
    pub(crate) level: Durability,
    pub(crate) answer: Answer,
    /// Bytes taken from the budget, given back by the answer.
    pub(crate) cost: u64,
    pub(crate) submitted: Instant,
}

/// A frame that still takes records of its log.
struct OpenFrame {
    start: usize,
    header_len: usize,
    log: Arc<Log>,
    first_lsn: Lsn,
    count: u32,
    /// Requests in it.
    requests: u64,
    compression: Compression,
}

/// What a frame is about, apart from its log and its place.
#[derive(Clone, Copy)]
struct About {
    kind: Kind,
    flags: u8,
    first_lsn: Lsn,
    count: u32,
    /// `None` = that of the turn.
    arrival: Option<Timestamp>,
}

/// Beyond every position: what waits for it is answered with its group.
const NEVER: Position = Position::new(u64::MAX);

impl About {
    /// A frame without records, about the log (if any) as it stands.
    fn act(kind: Kind, first_lsn: Lsn) -> Self {
        Self {
            kind,
            flags: 0,
            first_lsn,
            count: 0,
            arrival: None,
        }
    }
}

/// The log id of frames that are about no log.
const NO_LOG: LogId = LogId::new(0);

/// What is to be told when the group is written.
struct Pending {
    level: Durability,
    /// `None` = the end of the group.
    need: Option<Position>,
    answer: Answer,
    outcome: Outcome,
    cost: u64,
    /// In memory only: answered as accepted.
    buffered: bool,
}

/// What came of placing one request: the position that must be safe before the answer
/// (`None` = the end of the group), and the answer.
type Placed = (Option<Position>, Outcome);

pub(crate) struct Committer {
    journal: Arc<Journal>,
    logs: Arc<Logs>,
    pool: Arc<Pool>,
    settings: Settings,
    /// Logs with records in memory only, and how many bytes those take.
    buffered: Vec<Arc<Log>>,
    buffered_bytes: u64,
    segment: Arc<Segment>,
    file: Arc<dyn DiskFile>,
    /// The segment before.
    before: Option<SegmentId>,
    /// Offset in the segment where the group begins.
    offset: u64,
    /// Frames of the group so far.
    buffer: Vec<u8>,
    open: Option<OpenFrame>,
    chain: u32,
    directory: DirectoryBuilder,
    /// Directory of the group before, told by the first frame of this one.
    previous: DirectoryBuilder,
    spare: Option<ReadySegment>,
    pending: Vec<Pending>,
    /// Logs of the group, whose readers are woken.
    readers: Vec<Arc<Log>>,
    /// Logs of the segment, for the next link.
    touched: Vec<Arc<Log>>,
    digest: Xxh3,
    frames: u64,
    records: u64,
    group_records: u64,
    /// Whether something in the group is to be flushed unasked.
    group_scheduled: bool,
    next_log_counter: u64,
    arrival: Timestamp,
    /// Whether something durable is not yet proven by a later frame.
    needs_marker: bool,
    closed: bool,
}

/// What the committer needs of the configuration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) auto_create: bool,
    /// The most bytes of one unit.
    pub(crate) largest_unit: u64,
    /// Of logs that have none of their own.
    pub(crate) sync_mode: SyncMode,
    /// Bytes of records in memory only, at most.
    pub(crate) buffer_bytes: u64,
    /// After damage logs may be missing of which nothing is left: none is created then,
    /// lest one of them begins again at lsn 0.
    pub(crate) uncertain: bool,
}

/// Where the committer goes on.
pub(crate) struct Resume {
    pub(crate) segment: Arc<Segment>,
    pub(crate) file: Arc<dyn DiskFile>,
    pub(crate) link: Link,
    pub(crate) next_log_counter: u64,
    pub(crate) arrival: Timestamp,
}

impl Committer {
    /// A committer that begins a fresh segment with its link; nothing is written yet.
    pub(crate) fn new(
        journal: Arc<Journal>,
        logs: Arc<Logs>,
        pool: Arc<Pool>,
        settings: Settings,
        resume: Resume,
    ) -> Self {
        let mut committer = Self {
            journal,
            logs,
            pool,
            settings,
            buffered: Vec::new(),
            buffered_bytes: 0,
            segment: resume.segment,
            file: resume.file,
            before: resume.link.predecessor,
            offset: LIFE_BYTES,
            buffer: Vec::new(),
            open: None,
            chain: 0,
            directory: DirectoryBuilder::default(),
            previous: DirectoryBuilder::default(),
            spare: None,
            pending: Vec::new(),
            readers: Vec::new(),
            touched: Vec::new(),
            digest: Xxh3::new(),
            frames: 0,
            records: 0,
            group_records: 0,
            group_scheduled: false,
            next_log_counter: resume.next_log_counter,
            arrival: resume.arrival,
            needs_marker: false,
            closed: false,
        };
        committer.link(&resume.link);
        committer
    }

    /// Writes what a start begins with: the link, and a marker that tells it again.
    pub(crate) fn begin(&mut self) {
        self.write_out();
        self.journal.flush();
        self.mark();
        self.journal.flush();
    }

    /// The write stage for one turn: places every submission, writes, answers those
    /// that want no flush, leaves the others to [`Journal::flush`].
    pub(crate) fn commit(&mut self, submissions: impl IntoIterator<Item = Submission>) {
        let started = self.journal.clock.monotonic();
        self.arrival = self.journal.clock.now();
        for submission in submissions {
            let queued = started.saturating_duration_since(submission.submitted);
            self.journal.observer.phase(Phase::Queue, queued);
            self.place(submission);
        }
        let encoded = self.journal.clock.monotonic();
        self.journal
            .observer
            .phase(Phase::Encode, encoded.duration_since(started));
        self.write_out();
    }

    /// Whether an idle journal should be marked.
    pub(crate) fn needs_marker(&self) -> bool {
        self.needs_marker && !self.closed && self.journal.failure().is_none()
    }

    /// Writes a marker: the durable mark, and the directory of the last group. It is
    /// to be flushed like anything else.
    pub(crate) fn mark(&mut self) {
        if !self.needs_marker()
            || self
                .secure(HEADER_BYTES, DirectoryBuilder::entry_len(None))
                .is_err()
        {
            return;
        }
        self.push_frame(About::act(Kind::Marker, Lsn::ZERO), NO_LOG, None, |_| {});
        self.write_out();
        self.needs_marker = false;
    }

    /// Ends the journal for this run: everything written is flushed, and the seal says
    /// that nothing was left to do.
    pub(crate) fn close(&mut self) {
        // What cannot be written for want of space was never promised to survive.
        let _unwritten = self.write_all_buffered();
        self.write_out();
        self.journal.flush();
        if self.journal.failure().is_none() && !self.closed {
            self.seal(true);
            self.journal.flush();
        }
        self.closed = true;
    }

    fn place(&mut self, submission: Submission) {
        let Submission {
            operation,
            level,
            answer,
            cost,
            submitted,
        } = submission;
        if self.closed || self.journal.failure().is_some() {
            let outcome = Outcome::Refused(AppendError::Draining);
            let waiter = Waiter {
                need: Position::ZERO,
                answer,
                outcome,
                cost,
                since: submitted,
            };
            return match self.journal.failure() {
                Some(_) => self.journal.answer_failed(waiter),
                None => self.journal.answer(waiter, Durability::Durable),
            };
        }
        let mut buffered = false;
        let (need, outcome) = match operation {
            Operation::Append(batch) => match self.buffer(&batch, level) {
                Some(placed) => {
                    buffered = true;
                    placed
                }
                None => self.append(&batch, &answer),
            },
            Operation::Create { name, config } => self.create(name, config),
            Operation::Configure { name, config } => self.configure(&name, config),
            Operation::Delete(target) => self.delete(&target),
            Operation::Trim { target, before } => self.trim(&target, before),
            Operation::Barrier => self.barrier(),
        };
        self.pending.push(Pending {
            level,
            need,
            answer,
            outcome,
            cost,
            buffered,
        });
    }

    fn barrier(&mut self) -> Placed {
        let outcome = match self.write_all_buffered() {
            Ok(()) => Outcome::Done,
            Err(AppendError::DiskFull) => Outcome::SyncRefused,
            Err(error) => Outcome::Refused(error),
        };
        self.finish_open();
        (Some(self.end()), outcome)
    }

    fn creation(&self) -> Creation {
        match (self.settings.uncertain, self.settings.auto_create) {
            (true, _) => Creation::Unproven,
            (false, true) => Creation::ByAppend,
            (false, false) => Creation::ByRequest,
        }
    }

    fn mode(&self, log: &Log) -> SyncMode {
        log.state
            .read()
            .config
            .sync_mode
            .unwrap_or(self.settings.sync_mode)
    }

    /// Takes a plain append to a log of sync mode `manual` into memory, if that is all
    /// it asks for.
    fn buffer(&mut self, batch: &Batch, level: Durability) -> Option<Placed> {
        let [records] = batch.logs.as_slice() else {
            return None;
        };
        if level != Durability::Accepted || !batch.checks.is_empty() {
            return None;
        }
        let log = self.logs.by_name(records.log.as_str())?;
        if self.mode(&log) != SyncMode::Manual {
            return None;
        }
        let size: usize = records.records.iter().map(codec::encoded_len).sum();
        let held = log
            .state
            .read()
            .buffered
            .as_ref()
            .map_or(0, |b| b.body.len());
        let mut room = Ok(());
        if self.buffered_bytes + size as u64 > self.settings.buffer_bytes {
            room = self.write_all_buffered();
        } else if held + size > COALESCED_BYTES {
            room = self.write_buffered(&log);
        }
        if let Err(error) = room {
            return Some((Some(Position::ZERO), Outcome::Refused(error)));
        }
        let targets = [Some(Arc::clone(&log))];
        if let Checked::Refused { error, .. } = check(&self.logs, batch, &targets, self.creation())
        {
            return Some((Some(Position::ZERO), Outcome::Refused(error)));
        }
        let append = self.buffer_records(&log, &records.records);
        crate::watch::Watched::watch(&*log).wake();
        let outcome = Outcome::Appended {
            appends: vec![append],
            logs: vec![log],
            position: None,
        };
        Some((Some(NEVER), outcome))
    }

    fn buffer_records(&mut self, log: &Arc<Log>, records: &[Record]) -> LogAppended {
        let arrival = self.arrival;
        let mut state = log.state.write();
        let first_lsn = state.next;
        let mut buffered = state.buffered.take().unwrap_or_else(|| {
            self.buffered.push(Arc::clone(log));
            Box::new(Buffered {
                first_lsn,
                count: 0,
                arrival,
                body: Vec::new(),
            })
        });
        let before = buffered.body.len();
        let mut first_time = None;
        for record in records {
            let time = record.timestamp.unwrap_or(arrival).max(state.last_time);
            let own = (time != buffered.arrival).then_some(time);
            codec::put_record(&mut buffered.body, record, own);
            state.last_time = time;
            first_time.get_or_insert(time);
        }
        buffered.count += u32::try_from(records.len()).unwrap_or(u32::MAX);
        self.buffered_bytes += (buffered.body.len() - before) as u64;
        state.buffered = Some(buffered);
        state.next = first_lsn.advance(records.len() as u64);
        LogAppended {
            log_id: log.id,
            first_lsn,
            next_lsn: state.next,
            timestamp: first_time.unwrap_or(arrival),
            arrival,
        }
    }

    /// Writes what a log has in memory only into the group.
    fn write_buffered(&mut self, log: &Arc<Log>) -> Result<(), AppendError> {
        let Some(length) = log.state.read().buffered.as_ref().map(|b| b.body.len()) else {
            return Ok(());
        };
        let frames = HEADER_BYTES + length.next_multiple_of(8);
        self.secure(frames, DirectoryBuilder::entry_len(None))?;
        self.finish_open();
        let (start, header_len) = self.begin_frame();
        let about = {
            let mut state = log.state.write();
            let Some(buffered) = state.buffered.take() else {
                return Ok(());
            };
            self.buffer.extend_from_slice(&buffered.body);
            let frame_len = (self.buffer.len() - start).next_multiple_of(8);
            let place = Place {
                position: self.position(start),
                first_lsn: buffered.first_lsn,
                count: buffered.count,
                frame_len: u32::try_from(frame_len).unwrap_or(u32::MAX),
            };
            state.set_newest(place, false);
            self.buffered_bytes -= buffered.body.len() as u64;
            let (first_lsn, count) = (buffered.first_lsn, buffered.count);
            About {
                kind: Kind::Batch,
                flags: 0,
                first_lsn,
                count,
                arrival: Some(buffered.arrival),
            }
        };
        self.group_records += u64::from(about.count);
        self.buffered.retain(|other| other.id != log.id);
        self.end_batch(start, header_len, about, log);
        Ok(())
    }

    fn write_all_buffered(&mut self) -> Result<(), AppendError> {
        while let Some(log) = self.buffered.first().map(Arc::clone) {
            self.write_buffered(&log)?;
        }
        Ok(())
    }

    /// Checks and places one batch.
    fn append(&mut self, batch: &Batch, answer: &Answer) -> Placed {
        let targets: Vec<Option<Arc<Log>>> = batch
            .logs
            .iter()
            .map(|l| self.logs.by_name(l.log.as_str()))
            .collect();
        // What a log has in memory goes before anything stronger.
        for log in targets.iter().flatten() {
            if let Err(error) = self.write_buffered(log) {
                return (Some(Position::ZERO), Outcome::Refused(error));
            }
        }
        let size = match self.unit_size(batch, &targets) {
            Ok(size) => size,
            Err(error) => return (Some(Position::ZERO), Outcome::Refused(error)),
        };
        if let Err(error) = self.secure(size.0, size.1) {
            return (Some(Position::ZERO), Outcome::Refused(error));
        }
        match check(&self.logs, batch, &targets, self.creation()) {
            Checked::Refused { error, reveals } => {
                return (Some(reveals), Outcome::Refused(error));
            }
            Checked::Passed { reveals } if batch.logs.is_empty() => {
                let outcome = Outcome::Appended {
                    appends: Vec::new(),
                    logs: Vec::new(),
                    position: None,
                };
                return (Some(reveals), outcome);
            }
            Checked::Passed { .. } => {}
        }
        let (appends, logs, position) = match (batch.logs.as_slice(), targets.as_slice()) {
            ([one], [Some(log)]) => {
                let (append, position) = self.append_plain(one, log);
                (vec![append], vec![Arc::clone(log)], position)
            }
            _ => self.append_unit(batch, targets),
        };
        if let Answer::Ticket(ticket) = answer {
            ticket.order(Ordered {
                appends: appends.clone(),
                position: Some(position),
            });
        }
        (
            None,
            Outcome::Appended {
                appends,
                logs,
                position: Some(position),
            },
        )
    }

    /// The most bytes of frames and of directory entries that a batch can take.
    fn unit_size(
        &self,
        batch: &Batch,
        targets: &[Option<Arc<Log>>],
    ) -> Result<(usize, usize), AppendError> {
        let mut frames = 0;
        let mut directory = 0;
        for (records, target) in batch.logs.iter().zip(targets) {
            let body: usize = records.records.iter().map(codec::encoded_len).sum();
            frames += HEADER_BYTES + body.next_multiple_of(8);
            directory += DirectoryBuilder::entry_len(None);
            if target.is_none() {
                let name = records.log.as_str();
                frames += HEADER_BYTES + Created::max_len(name).next_multiple_of(8);
                directory += DirectoryBuilder::entry_len(Some(name));
            }
        }
        let limit = self.settings.largest_unit.min(largest_in(&self.segment));
        if (frames + directory) as u64 > limit || directory > UNIT_DIRECTORY_BYTES {
            let records = batch.logs.iter().map(|l| l.records.len() as u64).sum();
            return Err(AppendError::Invalid(
                crate::error::InvalidBatch::RequestTooLarge {
                    records,
                    bytes: (frames + directory) as u64,
                    max_records: records,
                    max_bytes: limit,
                },
            ));
        }
        Ok((frames, directory))
    }

    /// Records for one existing log: joins the open frame if that is of the same log.
    fn append_plain(&mut self, records: &LogRecords, log: &Arc<Log>) -> (LogAppended, Position) {
        let size: usize = records.records.iter().map(codec::encoded_len).sum();
        let joins = self.open.as_ref().is_some_and(|open| {
            // The body may shrink when the frame is finished: then only the header has
            // room for positions.
            let room = open.compression == Compression::None || open.requests < HEADER_BYTES as u64;
            let fits = self.buffer.len() - open.start + size <= COALESCED_BYTES;
            open.log.id == log.id && room && fits
        });
        let count = u32::try_from(records.records.len()).unwrap_or(u32::MAX);
        if joins && let Some(mut open) = self.open.take() {
            // A later request has a position of its own inside the frame, so that it
            // survives with it.
            let position = match open.compression {
                Compression::None => self.end(),
                _ => self.position(open.start).advance(open.requests),
            };
            let before = (open.first_lsn, open.count);
            let append = self.put_records(log, &records.records, open.start, Some(before));
            open.count += count;
            open.requests += 1;
            self.open = Some(open);
            return (append, position);
        }
        self.finish_open();
        let position = self.end();
        let (start, header_len) = self.begin_frame();
        let append = self.put_records(log, &records.records, start, None);
        let (log, first_lsn) = (Arc::clone(log), append.first_lsn);
        let compression = log.state.read().compression();
        self.open = Some(OpenFrame {
            start,
            header_len,
            log,
            first_lsn,
            count,
            requests: 1,
            compression,
        });
        (append, position)
    }

    /// Writes records into the frame begun at `start` (which holds `before` already),
    /// and moves the log's tail, time and place, all under one lock, so that no reader
    /// sees one without the other.
    fn put_records(
        &mut self,
        log: &Arc<Log>,
        records: &[Record],
        start: usize,
        before: Option<(Lsn, u32)>,
    ) -> LogAppended {
        let position = self.position(start);
        let mut state = log.state.write();
        let first_lsn = state.next;
        let mut first_time = None;
        for record in records {
            // Stored time never goes back within a log.
            let time = record
                .timestamp
                .unwrap_or(self.arrival)
                .max(state.last_time);
            let own = (time != self.arrival).then_some(time);
            codec::put_record(&mut self.buffer, record, own);
            state.last_time = time;
            first_time.get_or_insert(time);
        }
        let count = u32::try_from(records.len()).unwrap_or(u32::MAX);
        let frame_len = (self.buffer.len() - start).next_multiple_of(8);
        let (frame_first, frame_count) = before.unwrap_or((first_lsn, 0));
        let place = Place {
            position,
            first_lsn: frame_first,
            count: frame_count + count,
            frame_len: u32::try_from(frame_len).unwrap_or(u32::MAX),
        };
        state.set_newest(place, before.is_some());
        self.group_records += u64::from(count);
        LogAppended {
            log_id: log.id,
            first_lsn,
            next_lsn: state.next,
            timestamp: first_time.unwrap_or(self.arrival),
            arrival: self.arrival,
        }
    }

    /// A batch over several logs, or one that creates its log: a run of frames that
    /// recovery keeps together.
    fn append_unit(
        &mut self,
        batch: &Batch,
        targets: Vec<Option<Arc<Log>>>,
    ) -> (Vec<LogAppended>, Vec<Arc<Log>>, Position) {
        self.finish_open();
        let position = self.end();
        let mut appends = Vec::with_capacity(targets.len());
        let mut logs = Vec::with_capacity(targets.len());
        let last = targets.len() - 1;
        for (index, (records, target)) in batch.logs.iter().zip(targets).enumerate() {
            let log = match target {
                Some(log) => log,
                None => self.push_created(&records.log, LogConfig::default(), CONTINUES),
            };
            let (start, header_len) = self.begin_frame();
            let append = self.put_records(&log, &records.records, start, None);
            let count = u32::try_from(records.records.len()).unwrap_or(u32::MAX);
            let flags = if index == last { 0 } else { CONTINUES };
            let about = About {
                kind: Kind::Batch,
                flags,
                first_lsn: append.first_lsn,
                count,
                arrival: None,
            };
            self.end_batch(start, header_len, about, &log);
            appends.push(append);
            logs.push(log);
        }
        (appends, logs, position)
    }

    fn create(&mut self, name: LogName, config: LogConfig) -> Placed {
        if let Some(log) = self.logs.by_name(name.as_str()) {
            self.finish_open();
            let reveals = log.state.read().created_end;
            let error = AdminError::LogExists {
                log: name,
                log_id: log.id,
            };
            return (Some(reveals), Outcome::AdminRefused(error));
        }
        if self.settings.uncertain {
            let error = AppendError::TailUnproven {
                log: name,
                from: Lsn::ZERO,
            };
            return (Some(Position::ZERO), Outcome::Refused(error));
        }
        let frames = HEADER_BYTES + Created::max_len(name.as_str()).next_multiple_of(8);
        if let Err(error) = self.secure(frames, DirectoryBuilder::entry_len(Some(name.as_str()))) {
            return (Some(Position::ZERO), Outcome::Refused(error));
        }
        self.finish_open();
        self.push_created(&name, config, 0);
        (None, Outcome::Done)
    }

    fn configure(&mut self, name: &LogName, config: LogConfig) -> Placed {
        let Some(log) = self.logs.by_name(name.as_str()) else {
            let error = AdminError::LogNotFound { log: name.clone() };
            return (Some(Position::ZERO), Outcome::AdminRefused(error));
        };
        if let Err(error) = self.secure(HEADER_BYTES + 64, DirectoryBuilder::entry_len(None)) {
            return (Some(Position::ZERO), Outcome::Refused(error));
        }
        self.finish_open();
        let next = log.state.read().next;
        let header = self.push_frame(About::act(Kind::Configured, next), log.id, None, |out| {
            super::body::put_config(out, &config);
        });
        {
            let mut state = log.state.write();
            state.config = Arc::new(config);
            state.update_time = self.arrival;
            state.last_end = header.end();
        }
        self.touch(&log);
        (None, Outcome::Done)
    }

    /// Deletes a log. Flushed at once, so that the name is free the moment the log is
    /// gone for readers too, and not before.
    fn delete(&mut self, target: &LogTarget) -> Placed {
        let Some(log) = self.logs.by_name(target.name.as_str()) else {
            let error = AdminError::LogNotFound {
                log: target.name.clone(),
            };
            return (Some(Position::ZERO), Outcome::AdminRefused(error));
        };
        if let Some(expected) = target.log_id.filter(|expected| *expected != log.id) {
            let error = AdminError::LogReplaced {
                log: target.name.clone(),
                expected,
                actual: log.id,
            };
            self.finish_open();
            let reveals = log.state.read().created_end;
            return (Some(reveals), Outcome::AdminRefused(error));
        }
        if let Err(error) = self.secure(HEADER_BYTES, DirectoryBuilder::entry_len(None)) {
            return (Some(Position::ZERO), Outcome::Refused(error));
        }
        self.finish_open();
        let next = log.state.read().next;
        let header = self.push_frame(About::act(Kind::Deleted, next), log.id, None, |_| {});
        self.touch(&log);
        self.write_out();
        self.journal.flush();
        if self.journal.failure().is_none() {
            {
                let mut state = log.state.write();
                state.deleted = true;
                state.last_end = header.end();
                state.places = crate::index::Places::default();
                state.stored_bytes = 0;
            }
            self.logs.remove_name(&log);
            crate::watch::Watched::watch(&*log).wake();
        }
        (Some(header.end()), Outcome::Done)
    }

    fn trim(&mut self, target: &LogTarget, before: Lsn) -> Placed {
        let unknown = TrimError::LogNotFound {
            log: target.name.clone(),
        };
        let Some(log) = self.logs.by_name(target.name.as_str()) else {
            return (Some(Position::ZERO), Outcome::TrimRefused(unknown));
        };
        self.finish_open();
        if let Some(expected) = target.log_id.filter(|expected| *expected != log.id) {
            let error = TrimError::LogReplaced {
                log: target.name.clone(),
                expected,
                actual: log.id,
            };
            return (
                Some(log.state.read().created_end),
                Outcome::TrimRefused(error),
            );
        }
        let room = self
            .write_buffered(&log)
            .and_then(|()| self.secure(HEADER_BYTES, DirectoryBuilder::entry_len(None)));
        if let Err(error) = room {
            return (Some(Position::ZERO), Outcome::Refused(error));
        }
        self.finish_open();
        let (tail, first, last_end) = {
            let state = log.state.read();
            (state.next, state.coming_first(), state.last_end)
        };
        if before > tail {
            let error = TrimError::BeyondTail {
                log: target.name.clone(),
                tail,
                asked: before,
            };
            return (Some(last_end), Outcome::TrimRefused(error));
        }
        if before <= first {
            return (Some(last_end), Outcome::Trimmed(first));
        }
        let header = self.push_frame(About::act(Kind::Trim, before), log.id, None, |_| {});
        log.state.write().add_trim(header.end(), before);
        self.touch(&log);
        self.journal.trimming(header.end(), Arc::clone(&log));
        (None, Outcome::Trimmed(before))
    }

    fn push_created(&mut self, name: &LogName, config: LogConfig, flags: u8) -> Arc<Log> {
        let id = LogId::compose(self.journal.recovery_epoch, self.next_log_counter);
        self.next_log_counter += 1;
        let time = self.arrival;
        let about = About {
            flags,
            ..About::act(Kind::Created, Lsn::ZERO)
        };
        let header = self.push_frame(about, id, Some(name.as_str()), |out| {
            Created::put(out, name.as_str(), &config, time);
        });
        let log = Arc::new(Log::new(id, name.clone(), config, time, header.end()));
        log.state.write().created_in = Some(self.segment.life.id);
        self.touch(&log);
        self.logs.insert(Arc::clone(&log));
        log
    }

    /// Makes room for so many bytes of frames and directory entries, rolling if need
    /// be.
    fn secure(&mut self, frames: usize, directory: usize) -> Result<(), AppendError> {
        let full = self.buffer.len() + frames > GROUP_BYTES
            || self.directory.extension_len() + directory > DIRECTORY_BYTES;
        if full && !self.buffer.is_empty() {
            self.write_out();
        }
        if !self.fits(frames, directory) {
            if self.spare.is_none() {
                match self.pool.take() {
                    Ok(ready) => self.spare = Some(ready),
                    Err(error) if is_out_of_space(&error) => return Err(AppendError::DiskFull),
                    Err(error) => self.journal.fail(error),
                }
            }
            self.roll();
        }
        match self.journal.failure() {
            Some(error) => Err(AppendError::JournalFailed(error)),
            None => Ok(()),
        }
    }

    fn fits(&self, frames: usize, directory: usize) -> bool {
        let first = if self.buffer.is_empty() {
            self.previous.extension_len()
        } else {
            0
        };
        // An open frame's entry is not in the directory yet.
        let open = self
            .open
            .as_ref()
            .map_or(0, |_| DirectoryBuilder::entry_len(None));
        let told = match self.buffer.is_empty() {
            true => 0,
            false => self.directory.extension_len() + open,
        };
        let seal = HEADER_BYTES + Seal::MAX_LEN + 16 + told + directory + 32;
        let need = self.buffer.len().next_multiple_of(8) + first + frames + 8 + seal;
        self.offset + need as u64 <= self.segment.life.size
    }

    /// Goes on in the next segment: what is here is written, sealed and flushed first.
    fn roll(&mut self) {
        let Some(ready) = self.spare.take() else {
            return;
        };
        let started = self.journal.clock.monotonic();
        self.write_out();
        self.seal(false);
        self.journal.flush();
        if self.journal.failure().is_some() {
            return;
        }
        let closings = self.closings();
        let link = Link {
            predecessor: Some(self.segment.life.id),
            second: self.before,
            predecessor_end: self.end(),
            predecessor_chain: self.chain,
            recovery_epoch: self.journal.recovery_epoch,
            next_log_counter: self.next_log_counter,
            closings,
        };
        let segment = Arc::new(Segment::begun(
            ready.life,
            self.segment.limit(),
            Arc::clone(&ready.file),
        ));
        self.segment.close();
        self.journal.enter(Arc::clone(&segment));
        self.before = Some(self.segment.life.id);
        self.segment = segment;
        self.file = ready.file;
        self.offset = LIFE_BYTES;
        self.chain = 0;
        self.digest = Xxh3::new();
        self.frames = 0;
        self.records = 0;
        self.previous = DirectoryBuilder::default();
        self.link(&link);
        self.journal
            .observer
            .roll(self.journal.clock.monotonic().duration_since(started));
    }

    /// How the logs of this segment stand now, unless they are too many to tell.
    fn closings(&mut self) -> Option<Vec<Closing>> {
        let segment = self.segment.life.id;
        let mut bytes = 0;
        let mut closings = Vec::with_capacity(self.touched.len());
        for log in self.touched.drain(..) {
            let state = log.state.read();
            let name = (state.created_in == Some(segment)).then(|| log.name.as_str().to_owned());
            bytes += 32 + name.as_ref().map_or(0, String::len);
            closings.push(Closing {
                log_id: log.id,
                next_lsn: state.journaled_next(),
                name,
                deleted: state.deleted,
                first_lsn: state.coming_first(),
            });
        }
        (bytes as u64 <= self.segment.life.size / 8).then_some(closings)
    }

    /// The link tells in its header, and so in the next group's directory, what matters
    /// most: for log id the segment before, for first lsn its end, for count the epoch.
    fn link(&mut self, link: &Link) {
        let body = link.encode();
        let about = About {
            kind: Kind::Link,
            flags: 0,
            first_lsn: Lsn::new(link.predecessor_end.get()),
            count: u32::try_from(link.recovery_epoch.get()).unwrap_or(u32::MAX),
            arrival: None,
        };
        let before = LogId::new(link.predecessor.map_or(0, SegmentId::get));
        self.push_frame(about, before, None, |out| out.extend_from_slice(&body));
    }

    fn seal(&mut self, clean: bool) {
        let seal = Seal {
            frames: self.frames,
            records: self.records,
            digest: self.digest.digest128(),
            clean,
            next_log_counter: self.next_log_counter,
        };
        self.push_frame(About::act(Kind::Seal, Lsn::ZERO), NO_LOG, None, |out| {
            out.extend_from_slice(&seal.encode());
        });
        self.write_out();
        if self.journal.failure().is_none() {
            *self.segment.end.write() = Some(self.end());
        }
    }

    /// Position of an offset in the buffer.
    fn position(&self, at: usize) -> Position {
        self.segment.base.advance(self.offset + at as u64)
    }

    /// Position after the last finished frame.
    fn end(&self) -> Position {
        self.position(self.buffer.len())
    }

    fn begin_frame(&mut self) -> (usize, usize) {
        let extension = if self.buffer.is_empty() {
            self.directory.reset(self.end());
            self.previous.extension()
        } else {
            Vec::new()
        };
        (
            frame::begin(&mut self.buffer, &extension),
            HEADER_BYTES + extension.len(),
        )
    }

    fn end_batch(&mut self, start: usize, header_len: usize, mut about: About, log: &Arc<Log>) {
        let how = log.state.read().compression();
        let packed = compress::compress(&self.buffer[start + header_len..], how);
        if let Some((codec, packed)) = packed {
            about.flags |= codec;
            self.buffer.truncate(start + header_len);
            self.buffer.extend_from_slice(&packed);
            let frame_len = (self.buffer.len() - start).next_multiple_of(8);
            log.state
                .write()
                .resize_newest(u32::try_from(frame_len).unwrap_or(u32::MAX));
        }
        self.end_frame(start, header_len, about, log.id, None);
        self.records += u64::from(about.count);
        self.touch(log);
    }

    fn end_frame(
        &mut self,
        start: usize,
        header_len: usize,
        about: About,
        log_id: LogId,
        name: Option<&str>,
    ) -> Header {
        let head = Head {
            kind: about.kind,
            flags: about.flags,
            count: about.count,
            position: self.position(start),
            log_id,
            first_lsn: about.first_lsn,
            arrival: about.arrival.unwrap_or(self.arrival),
            durable_mark: self.journal.durable(),
            chain: self.chain,
        };
        let salt = self.segment.life.salt;
        let header = frame::finish(&mut self.buffer, start, header_len, salt, &head);
        self.chain = header.crc;
        self.frames += 1;
        self.directory.push(&header, name);
        header
    }

    /// A whole frame that holds no records.
    fn push_frame(
        &mut self,
        about: About,
        log_id: LogId,
        name: Option<&str>,
        body: impl FnOnce(&mut Vec<u8>),
    ) -> Header {
        let (start, header_len) = self.begin_frame();
        body(&mut self.buffer);
        self.end_frame(start, header_len, about, log_id, name)
    }

    fn finish_open(&mut self) {
        if let Some(open) = self.open.take() {
            let OpenFrame {
                start,
                header_len,
                log,
                first_lsn,
                count,
                ..
            } = open;
            let about = About {
                kind: Kind::Batch,
                flags: 0,
                first_lsn,
                count,
                arrival: None,
            };
            self.end_batch(start, header_len, about, &log);
        }
    }

    /// Counts a log among those of the group and of the segment.
    fn touch(&mut self, log: &Arc<Log>) {
        self.readers.push(Arc::clone(log));
        self.group_scheduled |= self.mode(log).flushes_by_itself();
        let segment = Some(self.segment.life.id);
        let mut state = log.state.write();
        if state.touched_in != segment {
            state.touched_in = segment;
            drop(state);
            self.touched.push(Arc::clone(log));
        }
    }

    /// Writes the group, publishes it, and answers or hands on whoever is in it.
    fn write_out(&mut self) {
        self.finish_open();
        if !self.buffer.is_empty() && self.journal.failure().is_none() {
            let started = self.journal.clock.monotonic();
            match self.file.write_all_at(&self.buffer, self.offset) {
                Ok(()) => self.written(started),
                Err(error) => self.journal.fail(error),
            }
        }
        self.buffer.clear();
        let (written, durable) = (self.journal.written(), self.journal.durable());
        let now = self.journal.clock.monotonic();
        let failed = self.journal.failure().is_some();
        let mut handed = Vec::new();
        for pending in self.pending.drain(..) {
            let Pending {
                level,
                need,
                answer,
                outcome,
                cost,
                buffered,
            } = pending;
            let need = need.unwrap_or(written);
            let waiter = Waiter {
                need,
                answer,
                outcome,
                cost,
                since: now,
            };
            if failed {
                self.journal.answer_failed(waiter);
            } else if need <= durable {
                self.journal.answer(waiter, Durability::Durable);
            } else if buffered {
                self.journal.answer(waiter, Durability::Accepted);
            } else if level < Durability::Durable {
                self.journal.answer(waiter, Durability::Written);
            } else {
                handed.push(waiter);
            }
        }
        self.journal.await_flush(handed);
    }

    fn written(&mut self, started: Instant) {
        let journal = &self.journal;
        let took = journal.clock.monotonic().duration_since(started);
        let requests = self.pending.len() as u64;
        journal.observer.phase(Phase::Write, took);
        journal
            .observer
            .group(requests, self.group_records, self.buffer.len() as u64);
        self.group_records = 0;
        self.digest.update(&self.buffer);
        self.offset += self.buffer.len() as u64;
        std::mem::swap(&mut self.previous, &mut self.directory);
        let end = self.segment.base.advance(self.offset);
        let readers = std::mem::take(&mut self.readers);
        journal.publish_written(end, self.buffer.len() as u64, readers, self.group_scheduled);
        self.group_scheduled = false;
        self.needs_marker = true;
    }
}

fn largest_in(segment: &Segment) -> u64 {
    super::largest_unit(segment.life.size)
}
