//! The committer: assigns lsns and places to queued requests, and writes them.
//!
//! One struct, one writer. Its caller (a thread, a test, a simulation) drives it. The order is: secure
//! space → check → assign → encode → write → publish → answer, or leave to the flush. Space is secured
//! first, so that a full disk refuses requests before any state changes.
//!
//! A *group* is the frames of one write. Its first frame stores the directory of the group before. The
//! seal stores the directory of a segment's last group.

mod admin;
mod append;
mod buffer;
mod cursors;
mod fence;
mod forget;
mod frames;
mod producers;
mod retention;
mod room;
mod void;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::Xxh3;

pub(crate) use self::forget::Idle;
pub(crate) use self::retention::Expiry;
use self::void::Undo;
use super::pool::{Pool, Use};
use super::recent::Keeper;
use super::segment::Segment;
use crate::api::config::Bounds;
use crate::api::engine::{AppendTimes, Fenced, LogTarget};
use crate::api::error::{
    AdminError, AppendError, CursorError, FenceError, FreeSpace, SyncError, TrimError,
};
use crate::api::record::{
    Batch, Compression, Cursor, CursorCommit, Durability, LogConfig, LogConfigChange, SyncMode,
};
use crate::api::session::Session;
use crate::api::ticket::TicketAnswer;
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::{LogId, LogName, Lsn, Name, Position, SegmentId, Timestamp};
use crate::base::metrics::Phase;
use crate::disk::{DiskFile, is_out_of_space};
use crate::format::body::Link;
use crate::format::frame;
use crate::format::frame::{DirectoryBuilder, HEADER_BYTES, Kind};
use crate::journal::seal::SealSink;
use crate::journal::{Answer, Journal, Reply, Waiter};
use crate::logs::conditions::{Allowed, Creation};
use crate::logs::quotas::Wanted as Adds;
use crate::logs::{Log, Logs};

/// Size at which a group is written, in bytes.
const GROUP_BYTES: usize = 4 << 20;
/// Maximum size of a group's directory, in bytes, so that the directory fits a frame's extensions.
const DIRECTORY_BYTES: usize = 128 << 10;
/// Maximum number of bytes that a unit adds to a directory.
const UNIT_DIRECTORY_BYTES: usize = frame::MAX_HEADER_BYTES - DIRECTORY_BYTES - 4096;
/// Bytes that the page cache reads at once when a write covers only a part of them.
const BLOCK_BYTES: usize = 4096;
/// Maximum size of a frame that appends of one log share, in bytes.
const COALESCED_BYTES: usize = 256 << 10;

/// A request to the committer, with its caller.
pub(crate) enum Operation {
    Append {
        batch: Batch,
        /// Digest of each log's records as they were sent, for logs that name a producer.
        digests: Vec<u128>,
        ticket: TicketAnswer,
    },
    Fence {
        target: LogTarget,
        epoch: Option<u64>,
        answer: Answer<Fenced, FenceError>,
    },
    Cursor(CursorChange, Answer<Option<Cursor>, CursorError>),
    Admin(AdminChange, Answer<(), AdminError>),
    Trim {
        target: LogTarget,
        before: Lsn,
        answer: Answer<Lsn, TrimError>,
    },
    /// Trims by retention. Each applies only if its conditions still hold.
    Expire(Vec<Expiry>, Answer<Vec<Option<Lsn>>, AppendError>),
    Barrier(Barrier, Answer<Position, SyncError>),
}

/// A change of a consumer's cursor.
pub(crate) enum CursorChange {
    Commit(CursorCommit),
    Delete { target: LogTarget, cursor: Name },
}

/// A change of a log, or of its producers. It is answered with success or an error.
pub(crate) enum AdminChange {
    Create {
        name: LogName,
        config: LogConfig,
    },
    Configure {
        name: LogName,
        change: LogConfigChange,
    },
    Delete(LogTarget),
    ForgetProducer {
        target: LogTarget,
        producer: Name,
    },
    /// Forgets the producers that have stayed idle.
    ForgetIdle(Vec<Idle>),
}

/// A request that waits until everything before it is safe.
pub(crate) enum Barrier {
    /// Does nothing.
    Plain,
    /// Writes a marker with the time of the expiry clock.
    TellClock,
    /// Leaves the segment, so that it can be copied: always, or only if it touches a log or is the
    /// first of this run. The next segment is taken for `purpose`.
    Leave { always: bool, purpose: Use },
}

impl Operation {
    /// Its reply if the operation is refused.
    fn refused(self, error: AppendError) -> Reply {
        match self {
            Self::Append { ticket, .. } => Reply::Append(ticket, Err(error)),
            Self::Fence { answer, .. } => Reply::Fence(answer, Err(error.into())),
            Self::Cursor(_, answer) => Reply::Cursor(answer, Err(error.into())),
            Self::Admin(_, answer) => Reply::Admin(answer, Err(error.into())),
            Self::Trim { answer, .. } => Reply::Trim(answer, Err(error.into())),
            Self::Expire(_, answer) => Reply::Expire(answer, Err(error)),
            Self::Barrier(_, answer) => Reply::Sync(answer, Err(error.into())),
        }
    }
}

/// One request on its way.
pub(crate) struct Submission {
    pub(crate) operation: Operation,
    /// Durability level at which the caller wants the answer.
    pub(crate) level: Durability,
    /// Bytes taken from the budget, given back by the answer.
    pub(crate) cost: u64,
    /// Number of requests: more than 1 if requests were joined.
    pub(crate) requests: u32,
    pub(crate) submitted: Instant,
    /// The session, whose earlier refusal also refuses this request.
    pub(crate) session: Option<Session>,
}

/// A frame that still accepts records of its log.
struct OpenFrame {
    start: usize,
    header_len: usize,
    log: Arc<Log>,
    first_lsn: Lsn,
    count: u32,
    /// Requests in the frame.
    requests: u64,
    compression: Compression,
}

/// Fields of a frame that do not follow from its log and its place.
#[derive(Clone, Copy)]
struct About {
    kind: Kind,
    flags: u8,
    first_lsn: Lsn,
    count: u32,
    /// `None`: the arrival time of the turn.
    arrival: Option<Timestamp>,
}

/// Beyond every position. Appends that stay in memory wait for it, and are answered with their group.
const NEVER: Position = Position::new(u64::MAX);

impl About {
    /// A frame without records, about the log (if any) in its present state.
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

/// The log id of frames that concern no log.
const NO_LOG: LogId = LogId::new(0);

/// An answer to give when the group is written.
struct Pending {
    level: Durability,
    /// `None`: the end of the group.
    need: Option<Position>,
    reply: Reply,
    cost: u64,
    requests: u32,
    /// In memory only: answered as accepted.
    buffered: bool,
    /// Time that the request was queued.
    queue: Duration,
    session: Option<Session>,
}

/// Outcome of placing one request: the position that must be safe before the answer (`None`: the end of
/// the group), and the answer.
type Placed<T, E> = (Option<Position>, Result<T, E>);

/// A refusal that reveals nothing about the store.
fn refused<T, E: From<AppendError>>(error: AppendError) -> Placed<T, E> {
    (Some(Position::ZERO), Err(error.into()))
}

pub(crate) struct Committer {
    journal: Arc<Journal>,
    logs: Arc<Logs>,
    pool: Arc<Pool>,
    seals: Arc<dyn SealSink>,
    settings: Settings,
    /// Logs with records in memory only, and the bytes of these records.
    buffered: Vec<Arc<Log>>,
    buffered_bytes: u64,
    segment: Arc<Segment>,
    file: Arc<dyn DiskFile>,
    /// The segment before.
    before: Option<SegmentId>,
    /// Offset in the segment where the group begins.
    offset: u64,
    /// Offset up to which the segment was written in whole blocks.
    whole: u64,
    /// Frames of the group so far.
    buffer: Vec<u8>,
    keeper: Keeper,
    open: Option<OpenFrame>,
    chain: u32,
    directory: DirectoryBuilder,
    /// Directory of the group before. The first frame of this group stores it.
    previous: DirectoryBuilder,
    /// The link, until it is written.
    link: Option<Link>,
    /// Whether this is the first segment of the run.
    first_of_run: bool,
    /// Whether the segment was taken from the reserve for trims and deletions.
    on_reserve: bool,
    /// Whether the last write found no space.
    without_space: bool,
    undo: Undo,
    pending: Vec<Pending>,
    /// Logs whose deletion is in the group, and the answers to these deletions.
    deletions: Vec<(Arc<Log>, Pending)>,
    /// Logs of the group, whose readers are woken.
    readers: Vec<Arc<Log>>,
    /// Logs of the segment, for the next link.
    touched: Vec<Arc<Log>>,
    digest: Xxh3,
    frames: u64,
    records: u64,
    group_records: u64,
    /// Start of the turn, and duration of the group's write.
    turn_began: Instant,
    write_took: Duration,
    /// Whether the group contains bytes whose flush is scheduled.
    group_scheduled: bool,
    next_log_counter: u64,
    arrival: Timestamp,
    /// Expiry clock in this turn.
    expiry: Timestamp,
    /// Whether no later frame proves yet that the last bytes are durable.
    needs_marker: bool,
    closed: bool,
}

#[cfg(test)]
impl Committer {
    /// Pretends that the current segment holds this number of records already.
    pub(crate) fn pretend_records(&mut self, records: u64) {
        self.records = records;
    }
}

/// The settings that the committer needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) auto_create: bool,
    /// Maximum size of one unit, in bytes.
    pub(crate) largest_unit: u64,
    /// Sync mode of logs that have none of their own.
    pub(crate) sync_mode: SyncMode,
    /// Maximum size of records in memory only, in bytes.
    pub(crate) buffer_bytes: u64,
    /// Number of batches remembered for each producer.
    pub(crate) producer_window: u64,
    /// Maximum number of producers, and of cursors, of one log.
    pub(crate) max_producers: u64,
    pub(crate) max_cursors: u64,
    /// Bounds of all logs together.
    pub(crate) bounds: Bounds,
    /// Damage may have removed every trace of some logs. No log is created then, so that none of them
    /// begins again at lsn 0.
    pub(crate) uncertain: bool,
}

/// The place where the committer continues.
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
        seals: Arc<dyn SealSink>,
        settings: Settings,
        resume: Resume,
    ) -> Self {
        let turn_began = journal.clock.monotonic();
        let expiry = journal.expiry_now();
        let mut committer = Self {
            journal,
            logs,
            pool,
            seals,
            settings,
            buffered: Vec::new(),
            buffered_bytes: 0,
            segment: resume.segment,
            file: resume.file,
            before: resume.link.predecessor,
            offset: LIFE_BYTES,
            whole: LIFE_BYTES,
            buffer: Vec::new(),
            keeper: Keeper::default(),
            open: None,
            chain: 0,
            directory: DirectoryBuilder::default(),
            previous: DirectoryBuilder::default(),
            link: None,
            first_of_run: true,
            // The size of the reserve is not known yet.
            on_reserve: true,
            without_space: false,
            undo: Undo::default(),
            pending: Vec::new(),
            deletions: Vec::new(),
            readers: Vec::new(),
            touched: Vec::new(),
            digest: Xxh3::new(),
            frames: 0,
            records: 0,
            group_records: 0,
            turn_began,
            write_took: Duration::ZERO,
            group_scheduled: false,
            next_log_counter: resume.next_log_counter,
            arrival: resume.arrival,
            expiry,
            needs_marker: false,
            closed: false,
        };
        let expiry = Some(committer.expiry);
        committer.begin_with(Link {
            expiry,
            ..resume.link
        });
        committer
    }

    /// Writes the first frames of a run: the link, and a marker whose directory repeats it.
    ///
    /// # Errors
    /// If the journal failed, or if there is no space. After a lack of space the caller may retry.
    pub(crate) fn begin(&mut self) -> io::Result<()> {
        let written = self.write_out();
        if matches!(written, Err(AppendError::DiskFull(_))) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.journal.flush();
        self.mark();
        self.journal.flush();
        match self.journal.failure() {
            Some(error) => Err(io::Error::new(error.kind(), error.to_string())),
            None => Ok(()),
        }
    }

    /// The write stage for one turn: places every submission, writes, answers requests that need no
    /// flush, and leaves the others to [`Journal::flush`].
    pub(crate) fn commit(&mut self, submissions: impl IntoIterator<Item = Submission>) {
        let started = self.journal.clock.monotonic();
        self.turn_began = started;
        self.look_at_clock();
        for submission in submissions {
            let queued = started.saturating_duration_since(submission.submitted);
            let observer = &self.journal.observer;
            observer.phase(Phase::Queue, queued, submission.requests);
            self.place(submission);
        }
        self.end_deletions();
        let encoded = self.journal.clock.monotonic();
        let observer = &self.journal.observer;
        observer.phase(Phase::Encode, encoded.duration_since(started), 1);
        // Every request in the group gets its own answer.
        let _told = self.write_out();
    }

    /// Sets the arrival time of all requests that this turn accepts.
    fn look_at_clock(&mut self) {
        let shown = self.journal.read_clocks();
        self.expiry = shown.expiry;
        self.arrival = shown.arrival;
    }

    /// Whether an idle journal should be marked.
    pub(crate) fn needs_marker(&self) -> bool {
        self.needs_marker && !self.closed && self.journal.failure().is_none()
    }

    /// Writes a marker: the durable mark, and the directory of the last group. The marker needs a flush
    /// like any other frame.
    pub(crate) fn mark(&mut self) {
        if !self.needs_marker()
            || self
                .secure(HEADER_BYTES, DirectoryBuilder::entry_len(None), Use::Growth)
                .is_err()
        {
            return;
        }
        self.push_frame(About::act(Kind::Marker, Lsn::ZERO), NO_LOG, None, |_| {});
        self.needs_marker = self.write_out().is_err();
    }

    /// Ends the journal for this run: flushes everything written, and writes a seal that declares a
    /// clean end. Returns whether the seal was written.
    pub(crate) fn close(&mut self) -> bool {
        let mut ended = false;
        self.look_at_clock();
        // Records that cannot be written for lack of space were never promised to survive. Space may
        // have become available since the last attempt.
        self.pool.try_again();
        let _unwritten = self.write_all_buffered();
        let _told = self.write_out();
        self.journal.flush();
        if self.journal.failure().is_none() && !self.closed {
            // Without a seal the next start is unclean, but nothing is lost.
            let sealed = self.seal(None);
            self.journal.flush();
            if sealed.is_ok() && self.journal.failure().is_none() {
                let (_, sealed) = self.leave_segment(0);
                self.segment.close();
                self.seals.take_over(sealed);
                ended = true;
            }
        }
        self.closed = true;
        ended
    }

    fn place(&mut self, submission: Submission) {
        let Submission {
            operation,
            level,
            cost,
            requests,
            submitted,
            session,
        } = submission;
        if !matches!(operation, Operation::Admin(AdminChange::Delete(_), _)) {
            self.end_deletions();
        }
        if self.closed || self.journal.failure().is_some() {
            let waiter = Waiter {
                need: Position::ZERO,
                reply: operation.refused(AppendError::Draining),
                cost,
                requests,
                since: submitted,
                times: AppendTimes::default(),
            };
            return match self.journal.failure() {
                Some(_) => self.journal.answer_failed(waiter),
                None => self.journal.answer(waiter, Durability::Durable),
            };
        }
        let ended = session.as_ref().is_some_and(Session::has_ended_in_turn);
        let mut deleted = None;
        let (need, reply) = match operation {
            operation if ended => {
                let reply = operation.refused(AppendError::SessionEnded);
                (Some(Position::ZERO), reply)
            }
            Operation::Append {
                batch,
                digests,
                ticket,
            } => {
                let buffered = self.buffer(&batch, level, &session);
                let (need, result) = buffered.unwrap_or_else(|| self.append(&batch, &digests));
                (need, Reply::Append(ticket, result))
            }
            Operation::Fence {
                target,
                epoch,
                answer,
            } => {
                let (need, result) = self.fence(&target, epoch);
                (need, Reply::Fence(answer, result))
            }
            Operation::Cursor(change, answer) => {
                let (need, result) = match change {
                    CursorChange::Commit(commit) => self.commit_cursor(&commit),
                    CursorChange::Delete { target, cursor } => self.delete_cursor(&target, &cursor),
                };
                (need, Reply::Cursor(answer, result))
            }
            Operation::Admin(change, answer) => {
                let (need, result) = match change {
                    AdminChange::Create { name, config } => self.create(name, config),
                    AdminChange::Configure { name, change } => self.configure(&name, &change),
                    AdminChange::Delete(target) => match self.delete(&target) {
                        Ok((log, end)) => {
                            deleted = Some(log);
                            (Some(end), Ok(()))
                        }
                        Err((reveals, error)) => (Some(reveals), Err(error)),
                    },
                    AdminChange::ForgetProducer { target, producer } => {
                        self.forget_producer(&target, &producer)
                    }
                    AdminChange::ForgetIdle(idle) => self.forget_idle(&idle),
                };
                (need, Reply::Admin(answer, result))
            }
            Operation::Trim {
                target,
                before,
                answer,
            } => {
                let (need, result) = self.trim(&target, before);
                (need, Reply::Trim(answer, result))
            }
            Operation::Expire(expiries, answer) => {
                let (need, result) = self.expire(&expiries);
                (need, Reply::Expire(answer, result))
            }
            Operation::Barrier(barrier, answer) => {
                let (need, result) = match barrier {
                    Barrier::Plain => self.barrier(),
                    Barrier::TellClock => self.tell_clock(),
                    Barrier::Leave { always, purpose } => self.leave(always, purpose),
                };
                (need, Reply::Sync(answer, result))
            }
        };
        match (&reply, &session) {
            (Reply::Append(_, Err(_)), Some(session)) => session.end_in_turn(),
            // A request that waits for its group shares the group's outcome.
            (_, Some(session)) if need.is_none() => session.enter(self.position(0)),
            _ => {}
        }
        let pending = Pending {
            level,
            need,
            reply,
            cost,
            requests,
            buffered: need == Some(NEVER),
            queue: self.turn_began.saturating_duration_since(submitted),
            session,
        };
        match deleted {
            Some(log) => self.deletions.push((log, pending)),
            None => self.pending.push(pending),
        }
    }

    fn barrier(&mut self) -> Placed<(), SyncError> {
        let written = self.write_all_buffered();
        self.finish_open();
        (Some(self.end()), written.map_err(Into::into))
    }

    /// Leaves the segment, so that everything before lies in finished, flushed segments. A segment that
    /// touches no log stays, unless it is the first of this run, which alone describes the run before.
    fn leave(&mut self, always: bool, purpose: Use) -> Placed<(), SyncError> {
        let left = self.write_all_buffered().and_then(|()| {
            if !always && self.touched.is_empty() && !self.first_of_run {
                return Ok(());
            }
            self.finish_open();
            self.roll_now(purpose)
        });
        let need = match purpose {
            // The sorter frees the unused end of the segment before once this link is flushed.
            Use::Leave => self.end(),
            // The roll has flushed everything.
            _ => Position::ZERO,
        };
        (Some(need), left.map_err(Into::into))
    }

    fn allowed(&self) -> Allowed {
        Allowed {
            creation: self.creation(),
            max_producers: self.settings.max_producers,
            max_cursors: self.settings.max_cursors,
            bounds: self.settings.bounds,
        }
    }

    /// Why a request that adds this much is refused, with `log` as the first log; `None` if the store
    /// has room for the request.
    fn no_room(&self, adds: &Adds, log: &LogName) -> Option<AppendError> {
        match adds.is_something() {
            true => self
                .settings
                .bounds
                .refuse(&self.logs.holdings(), adds, log),
            false => None,
        }
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

    /// Adds a log to the logs of the group and of the segment.
    fn touch(&mut self, log: &Arc<Log>) {
        self.readers.push(Arc::clone(log));
        self.group_scheduled |= self.mode(log).flushes_by_itself();
        let segment = self.segment.life.id.into();
        let mut state = log.state.write();
        if state.touched_in != segment {
            state.touched_in = segment;
            drop(state);
            self.touched.push(Arc::clone(log));
        }
    }

    /// Writes the group, publishes it, and answers its requests or leaves them to the flush.
    ///
    /// # Errors
    /// If there was no space, the group is void and everything stands as before; or if the journal has
    /// failed. The requests of the group get their own answers.
    fn write_out(&mut self) -> Result<(), AppendError> {
        self.finish_open();
        let mut void = false;
        if !self.buffer.is_empty() && self.journal.failure().is_none() {
            let started = self.journal.clock.monotonic();
            match self.write_group() {
                Ok(()) => self.written(started),
                Err((written, error)) if is_out_of_space(&error) => {
                    void = true;
                    self.void(written, &error);
                }
                Err((_, error)) => {
                    let action = format!("writing {}", self.segment.path());
                    self.journal.fail(action, &error);
                }
            }
        }
        if !void {
            self.buffer.clear();
        }
        self.answer_pending();
        match self.journal.failure() {
            Some(error) => Err(AppendError::JournalFailed(error)),
            None if void => Err(AppendError::DiskFull(FreeSpace::default())),
            None => Ok(()),
        }
    }

    /// Writes the group, with zeros up to the end of its last block if it enters a new block. A partial
    /// overwrite first reads the block from the device if the page cache has dropped it since the pool
    /// filled it. That read takes most of the time of such a write.
    fn write_group(&mut self) -> Result<(), (usize, io::Error)> {
        let group = self.buffer.len();
        let end = self.offset + group as u64;
        let size = self.segment.life.size;
        let whole = end.next_multiple_of(BLOCK_BYTES as u64).min(size).max(end);
        if end > self.whole {
            let zeros = usize::try_from(whole - end).unwrap_or_default();
            self.buffer.resize(group + zeros, 0);
        }
        let done = self.file.write_most_at(&self.buffer, self.offset);
        self.buffer.truncate(group);
        done?;
        self.whole = self.whole.max(whole);
        Ok(())
    }

    /// Answers requests whose position is reached, or leaves them to the flush.
    fn answer_pending(&mut self) {
        let (written, durable) = (self.journal.written(), self.journal.durable());
        let now = self.journal.clock.monotonic();
        let failed = self.journal.failure().is_some();
        let write = std::mem::take(&mut self.write_took);
        let encode = now
            .saturating_duration_since(self.turn_began)
            .saturating_sub(write);
        let mut handed = Vec::with_capacity(self.pending.len());
        for pending in self.pending.drain(..) {
            let Pending {
                level,
                need,
                reply,
                cost,
                requests,
                buffered,
                queue,
                session: _,
            } = pending;
            // A refusal may refer to a frame that became smaller when it was finished.
            let need = match buffered {
                true => NEVER,
                false => need.unwrap_or(written).min(written),
            };
            reply.tell_order();
            let waiter = Waiter {
                need,
                reply,
                cost,
                requests,
                since: now,
                times: AppendTimes {
                    queue,
                    encode,
                    write,
                    flush: Duration::ZERO,
                },
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
        self.write_took = took;
        let requests = self.pending.iter().map(|one| u64::from(one.requests)).sum();
        journal.observer.phase(Phase::Write, took, 1);
        journal
            .observer
            .group(requests, self.group_records, self.buffer.len() as u64);
        self.group_records = 0;
        self.digest.update(&self.buffer);
        let group = self.keeper.take(&mut self.buffer, BLOCK_BYTES);
        let bytes = group.len() as u64;
        let start = self.segment.base.advance(self.offset);
        self.offset += bytes;
        std::mem::swap(&mut self.previous, &mut self.directory);
        // Before the publication: readers that wake must find it.
        journal.recent.push(start, group);
        let readers = std::mem::take(&mut self.readers);
        journal.publish_written(start, bytes, readers, self.group_scheduled);
        self.group_scheduled = false;
        self.needs_marker = true;
        self.link = None;
        self.undo = Undo::default();
        if std::mem::take(&mut self.without_space) {
            tracing::info!("the journal can be written again");
        }
    }
}
