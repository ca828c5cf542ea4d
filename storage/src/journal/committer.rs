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
mod cursors;
mod fence;
mod forget;
mod frames;
mod group;
mod memory;
mod producers;
mod retention;
mod room;
mod tail;
#[cfg(test)]
mod tests;
mod void;

use std::io;
use std::sync::Arc;
use std::time::Instant;

pub(crate) use self::forget::Idle;
use self::group::{Group, PendingAnswer};
use self::memory::Memory;
pub(crate) use self::retention::Expiry;
use self::room::Entered;
pub(crate) use self::tail::FileTail;
use self::tail::SegmentTail;
use self::void::Undo;
use super::pool::Use;
use crate::api::cipher::{Cipher, LogsExist};
use crate::api::config::Bounds;
use crate::api::engine::{AppendTimes, Fenced, LogTarget};
use crate::api::error::{
    AdminError, AppendError, CursorError, FenceError, FreeSpace, SyncError, TrimError,
};
use crate::api::quota::{Quota, QuotaError, QuotaUse};
use crate::api::record::{
    Batch, CursorCommit, Durability, LogConfig, LogConfigChange, NamedCursor, SyncMode,
};
use crate::api::session::Session;
use crate::api::ticket::TicketAnswer;
use crate::base::ids::{LogId, LogName, Lsn, Name, Position, Timestamp};
use crate::base::metrics::AppendPhase;
use crate::disk::is_out_of_space;
use crate::format::body::Link;
use crate::format::frame;
use crate::format::frame::{DirectoryBuilder, FrameKind, HEADER_BYTES};
use crate::format::sealed::SEALED_BYTES;
use crate::journal::seal::SealSink;
use crate::journal::{AnswerPromise, Journal, Waiter, WaitingAnswer};
use crate::logs::conditions::{Allowed, Creation};
use crate::logs::quotas::QuotaRequest as Adds;
use crate::logs::quotas::tenants::Additions;
use crate::logs::{Log, Logs};

/// Size at which a group is written, in bytes.
const GROUP_BYTES: usize = 4 << 20;
/// Maximum size of a group's directory, in bytes, so that the directory fits a frame's extensions.
const DIRECTORY_BYTES: usize = 128 << 10;
/// Maximum number of bytes that a unit adds to a directory.
const UNIT_DIRECTORY_BYTES: usize = frame::MAX_HEADER_BYTES - DIRECTORY_BYTES - 4096;
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
        answer: AnswerPromise<Fenced, FenceError>,
    },
    Cursor(
        CursorChange,
        AnswerPromise<Option<NamedCursor>, CursorError>,
    ),
    Admin(AdminChange, AnswerPromise<(), AdminError>),
    Trim {
        target: LogTarget,
        before: Lsn,
        /// Bytes of the frames before the one that holds `before`, and their log, if the caller looked that up. The name
        /// may be that of a later log now.
        bytes: Option<(LogId, u64)>,
        answer: AnswerPromise<Lsn, TrimError>,
    },
    /// Trims by retention. Each applies only if its conditions still hold.
    Expire(Vec<Expiry>, AnswerPromise<Vec<Option<Lsn>>, AppendError>),
    Barrier(Barrier, AnswerPromise<Position, SyncError>),
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
    fn refused(self, error: AppendError) -> WaitingAnswer {
        match self {
            Self::Append { ticket, .. } => WaitingAnswer::Append(ticket, Err(error)),
            Self::Fence { answer, .. } => WaitingAnswer::Fence(answer, Err(error.into())),
            Self::Cursor(_, answer) => WaitingAnswer::Cursor(answer, Err(error.into())),
            Self::Admin(_, answer) => WaitingAnswer::Admin(answer, Err(error.into())),
            Self::Trim { answer, .. } => WaitingAnswer::Trim(answer, Err(error.into())),
            Self::Expire(_, answer) => WaitingAnswer::Expire(answer, Err(error)),
            Self::Barrier(_, answer) => WaitingAnswer::Sync(answer, Err(error.into())),
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
    /// Whether its caller looks after the queue next (`Append::write_gathered`), so that no thread need be woken now.
    pub(crate) gathered: bool,
}

impl Submission {
    /// Answers the request after the journal failed. Nothing of it was done.
    pub(crate) fn answer_failed(self, journal: &Journal) {
        journal.answer_failed(self.refused());
    }

    fn refused(self) -> Waiter {
        Waiter {
            need: Position::ZERO,
            level: self.level,
            reply: self.operation.refused(AppendError::Draining),
            cost: self.cost,
            requests: self.requests,
            since: self.submitted,
            times: AppendTimes::default(),
        }
    }
}

/// Fields of a frame that do not follow from its log and its place.
#[derive(Clone, Copy)]
struct FrameFields {
    kind: FrameKind,
    flags: u8,
    first_lsn: Lsn,
    count: u32,
    /// `None`: the arrival time of the turn.
    arrival: Option<Timestamp>,
}

/// Beyond every position. Appends that stay in memory wait for it, and are answered with their group.
const NEVER: Position = Position::new(u64::MAX);

impl FrameFields {
    /// A frame without records, about the log (if any) in its present state.
    fn act(kind: FrameKind, first_lsn: Lsn) -> Self {
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

/// Outcome of placing one request: the position that must be safe before the answer (`None`: the end of
/// the group), and the answer.
type Placed<T, E> = (Option<Position>, Result<T, E>);

/// A refusal that reveals nothing about the store.
fn refused<T, E: From<AppendError>>(error: AppendError) -> Placed<T, E> {
    (Some(Position::ZERO), Err(error.into()))
}

pub(crate) struct Committer<T = FileTail> {
    journal: Arc<Journal>,
    logs: Arc<Logs>,
    seals: Arc<dyn SealSink>,
    settings: CommitterSettings,
    tail: T,
    entered: Entered,
    group: Group,
    memory: Memory,
    /// Whether the last write found no space.
    without_space: bool,
    next_log_counter: u64,
    arrival: Timestamp,
    /// Expiry clock in this turn.
    expiry: Timestamp,
    /// Whether no later frame proves yet that the last bytes are durable.
    needs_marker: bool,
    closed: bool,
}

#[cfg(test)]
impl<T: SegmentTail> Committer<T> {
    /// Pretends that the current segment holds this number of records already.
    pub(crate) fn pretend_records(&mut self, records: u64) {
        self.entered.records = records;
    }
}

/// The settings that the committer needs.
#[derive(Debug, Clone)]
pub(crate) struct CommitterSettings {
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
    /// The keys of bodies. `None`: bodies are plain.
    pub(crate) cipher: Option<Cipher>,
}

/// The place where the committer continues.
pub(crate) struct Resume<T> {
    /// The tail in a segment without frames.
    pub(crate) tail: T,
    pub(crate) link: Link,
    pub(crate) next_log_counter: u64,
    pub(crate) arrival: Timestamp,
}

impl<T: SegmentTail> Committer<T> {
    /// A committer that begins a fresh segment with its link; nothing is written yet.
    pub(crate) fn new(
        journal: Arc<Journal>,
        logs: Arc<Logs>,
        seals: Arc<dyn SealSink>,
        settings: CommitterSettings,
        resume: Resume<T>,
    ) -> Self {
        let turn_began = journal.clock.monotonic();
        let expiry = journal.expiry_now();
        let mut committer = Self {
            tail: resume.tail,
            group: Group::new(turn_began),
            memory: Memory::new(Arc::clone(&journal)),
            journal,
            logs,
            seals,
            settings,
            entered: Entered {
                before: resume.link.predecessor,
                first_of_run: true,
                // The size of the reserve is not known yet.
                on_reserve: true,
                ..Entered::default()
            },
            without_space: false,
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
        self.group.turn_began = started;
        self.look_at_clock();
        for submission in submissions {
            let queued = started.saturating_duration_since(submission.submitted);
            let observer = &self.journal.observer;
            observer.phase(AppendPhase::Queue, queued, submission.requests);
            self.place(submission);
        }
        self.end_deletions();
        let encoded = self.journal.clock.monotonic();
        let observer = &self.journal.observer;
        observer.phase(AppendPhase::Encode, encoded.duration_since(started), 1);
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
        self.push_frame(
            FrameFields::act(FrameKind::Marker, Lsn::ZERO),
            NO_LOG,
            None,
            |_| {},
        );
        self.needs_marker = self.write_out().is_err();
    }

    /// Ends the journal for this run: flushes everything written, and writes a seal that declares a
    /// clean end. Returns whether the seal was written.
    pub(crate) fn close(&mut self) -> bool {
        let mut ended = false;
        self.look_at_clock();
        // Records that cannot be written for lack of space were never promised to survive. Space may
        // have become available since the last attempt.
        self.tail.try_again();
        let _unwritten = self.write_all_buffered();
        let _told = self.write_out();
        self.journal.flush();
        if self.journal.failure().is_none() && !self.closed {
            // Without a seal the next start is unclean, but nothing is lost.
            let sealed = self.seal();
            self.journal.flush();
            if sealed.is_ok() && self.journal.failure().is_none() {
                let (_, sealed) = self.leave_segment();
                self.tail.segment().close();
                self.seals.take_over(sealed);
                ended = true;
            }
        }
        self.closed = true;
        ended
    }

    fn place(&mut self, submission: Submission) {
        if !matches!(
            submission.operation,
            Operation::Admin(AdminChange::Delete(_), _)
        ) {
            self.end_deletions();
        }
        if self.journal.failure().is_some() {
            return submission.answer_failed(&self.journal);
        }
        if self.closed {
            return (self.journal).answer(submission.refused(), Durability::Durable);
        }
        let Submission {
            operation,
            level,
            cost,
            requests,
            submitted,
            session,
            gathered: _,
        } = submission;
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
                (need, WaitingAnswer::Append(ticket, result))
            }
            Operation::Fence {
                target,
                epoch,
                answer,
            } => {
                let (need, result) = self.fence(&target, epoch);
                (need, WaitingAnswer::Fence(answer, result))
            }
            Operation::Cursor(change, answer) => {
                let (need, result) = match change {
                    CursorChange::Commit(commit) => self.commit_cursor(&commit),
                    CursorChange::Delete { target, cursor } => self.delete_cursor(&target, &cursor),
                };
                (need, WaitingAnswer::Cursor(answer, result))
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
                (need, WaitingAnswer::Admin(answer, result))
            }
            Operation::Trim {
                target,
                before,
                bytes,
                answer,
            } => {
                let (need, result) = self.trim(&target, before, bytes);
                (need, WaitingAnswer::Trim(answer, result))
            }
            Operation::Expire(expiries, answer) => {
                let (need, result) = self.expire(&expiries);
                (need, WaitingAnswer::Expire(answer, result))
            }
            Operation::Barrier(barrier, answer) => {
                let (need, result) = match barrier {
                    Barrier::Plain => self.barrier(),
                    Barrier::TellClock => self.tell_clock(),
                    Barrier::Leave { always, purpose } => self.leave(always, purpose),
                };
                (need, WaitingAnswer::Sync(answer, result))
            }
        };
        match (&reply, &session) {
            (WaitingAnswer::Append(_, Err(_)), Some(session)) => session.end_in_turn(),
            // A request that waits for its group shares the group's outcome.
            (_, Some(session)) if need.is_none() => session.enter(self.tail.start()),
            _ => {}
        }
        let pending = PendingAnswer {
            level,
            need,
            reply,
            cost,
            requests,
            buffered: need == Some(NEVER),
            queue: self.group.turn_began.saturating_duration_since(submitted),
            session,
        };
        match deleted {
            Some(log) => self.group.deletions.push((log, pending)),
            None => self.group.pending.push(pending),
        }
    }

    fn barrier(&mut self) -> Placed<(), SyncError> {
        let written = self.write_all_buffered();
        self.finish_open();
        (Some(self.tail.end()), written.map_err(Into::into))
    }

    /// Leaves the segment, so that everything before lies in finished, flushed segments. A segment that
    /// touches no log stays, unless it is the first of this run, which alone describes the run before.
    fn leave(&mut self, always: bool, purpose: Use) -> Placed<(), SyncError> {
        let left = self.write_all_buffered().and_then(|()| {
            if !always && self.entered.touched.is_empty() && !self.entered.first_of_run {
                return Ok(());
            }
            self.finish_open();
            self.roll_now(purpose)
        });
        let need = match purpose {
            // The sorter frees the unused end of the segment before once this link is flushed.
            Use::Leave => self.tail.end(),
            // The roll has flushed everything.
            _ => Position::ZERO,
        };
        (Some(need), left.map_err(Into::into))
    }

    /// Maximum bytes that encryption adds to the frame of a batch.
    fn sealed_bytes(&self) -> usize {
        match self.settings.cipher {
            Some(_) => SEALED_BYTES.next_multiple_of(8),
            None => 0,
        }
    }

    /// Makes the keys of logs with these names, which the request creates next, in this order.
    ///
    /// # Errors
    /// If the keys cannot be made durable.
    fn secure_keys(&self, names: &[&str]) -> Result<(), AppendError> {
        let Some(cipher) = self.settings.cipher.as_ref().filter(|_| !names.is_empty()) else {
            return Ok(());
        };
        let ids = (self.next_log_counter..)
            .map(|counter| LogId::compose(self.journal.recovery_epoch, counter));
        let logs: Vec<(LogId, &str)> = ids.zip(names.iter().copied()).collect();
        self.spared(cipher.prepare(&logs, LogsExist::Next), Use::Growth, false)
    }

    fn allowed(&self) -> Allowed {
        Allowed {
            creation: self.creation(),
            max_producers: self.settings.max_producers,
            max_cursors: self.settings.max_cursors,
            bounds: self.settings.bounds,
            directory_bytes: self.tail.directory_before() as u64,
            sealed_bytes: self.sealed_bytes(),
        }
    }

    /// Why a request that adds this much is refused, with `log` as the first log; `None` if the store and
    /// the tenants have room for the request.
    fn no_room(
        &self,
        adds: &Adds,
        of_tenants: &Additions<'_>,
        log: &LogName,
    ) -> Option<AppendError> {
        let holdings = || self.logs.holdings();
        let store = adds
            .is_something()
            .then(|| self.settings.bounds.refuse(&holdings(), adds, log));
        store.flatten().or_else(|| self.logs.over_quota(of_tenants))
    }

    /// Why a new log is refused; `None` if the store and its tenant have room for it.
    fn no_room_for_log(&self, name: &LogName) -> Option<AppendError> {
        let mut of_tenant = Additions::default();
        if let Some(quota) = self.logs.quota_of(name) {
            of_tenant.of(quota, name).logs += 1;
        }
        self.no_room(&Adds::log(name), &of_tenant, name)
    }

    /// Replaces the quotas of all tenants.
    ///
    /// # Errors
    /// As [`Logs::set_quotas`].
    pub(crate) fn set_quotas(&mut self, quotas: Vec<Quota>) -> Result<Vec<QuotaUse>, QuotaError> {
        self.logs.set_quotas(quotas)
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
        self.group.readers.push(Arc::clone(log));
        self.group.scheduled |= self.mode(log).flushes_by_itself();
        let segment = self.tail.segment().life.id.into();
        let mut state = log.state.write();
        if state.touched_in != segment {
            state.touched_in = segment;
            drop(state);
            self.entered.touched.push(Arc::clone(log));
        }
    }

    /// Writes the group, publishes it, and answers its requests or leaves them to the flush.
    ///
    /// # Errors
    /// If there was no space, the group is void and everything stands as before; or if the journal has
    /// failed. The requests of the group get their own answers.
    fn write_out(&mut self) -> Result<(), AppendError> {
        self.finish_open();
        self.memory.check();
        let mut void = false;
        if self.tail.len() > 0 && self.journal.failure().is_none() {
            // The segments before are on the device.
            debug_assert!(
                self.entered.link.is_none() || self.journal.durable() >= self.journal.written()
            );
            let started = self.journal.clock.monotonic();
            match self.tail.write() {
                Ok(()) => self.written(started),
                Err((written, error)) if is_out_of_space(&error) => {
                    void = true;
                    self.void(written, &error);
                }
                Err((_, error)) => {
                    let action = format!("writing {}", self.tail.segment().path());
                    self.journal.fail(action, &error);
                }
            }
        }
        let failure = self.journal.failure();
        debug_assert!(void || failure.is_some() || (self.tail.len() == 0 && self.group.is_empty()));
        self.group.answer(&self.journal);
        match failure {
            Some(error) => Err(AppendError::JournalFailed(error)),
            None if void => Err(AppendError::DiskFull(FreeSpace::default())),
            None => Ok(()),
        }
    }

    /// Publishes the group, which was written since `started`.
    fn written(&mut self, started: Instant) {
        let journal = &self.journal;
        let took = journal.clock.monotonic().duration_since(started);
        let group = &mut self.group;
        group.write_took = took;
        let requests = group.pending.iter().map(|one| u64::from(one.requests));
        journal.observer.phase(AppendPhase::Write, took, 1);
        let start = self.tail.start();
        let written = self.tail.advance();
        let bytes = written.len() as u64;
        let records = std::mem::take(&mut group.records);
        journal.observer.group(requests.sum(), records, bytes);
        // Before the publication: readers that wake must find it.
        journal.recent.push(start, written);
        let readers = std::mem::take(&mut group.readers);
        let scheduled = std::mem::take(&mut group.scheduled);
        let creates = group.undo.creates();
        journal.publish_written(start, bytes, (readers, records), creates, scheduled);
        group.undo = Undo::default();
        self.needs_marker = true;
        self.entered.link = None;
        if std::mem::take(&mut self.without_space) {
            tracing::info!("the journal can be written again");
        }
    }
}
