//! Drives the committer from two identical threads. Callers write appends that need no flush, and flush a lone one
//! that does (`callers.rs`).
//!
//! Each driver takes the next job: a flush, if a request waits for one and none runs; otherwise the write of
//! the queue. So the thread that a lone request wakes writes it and flushes it, with one wake-up in all.
//! Requests that arrive during this flush gather and become the next group. Meanwhile the other thread writes
//! the queue only if it holds at least `GATHER_BYTES`, or a request that waits for no flush.
//!
//! Callers come back soon after their answer. So after a flush that answered several requests, the next group
//! waits until as many requests have arrived. It waits at most twice as long as that flush took, and at most
//! `MOST_GATHERING`. A flush for the first few callers would make all others wait for one more flush.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Core;
use super::callers::Callers;
use crate::api::record::Durability;
use crate::base::ids::Position;
use crate::base::metrics::Worker;
use crate::base::sync::{Condvar, Mutex, MutexGuard};
use crate::journal::committer::{Operation, Submission};
use crate::journal::inbox::Accepts;
use crate::journal::vital;

/// Queued bytes that are written even while a flush runs.
const GATHER_BYTES: u64 = 256 << 10;

/// Maximum number of requests for which a new queue reserves room.
const MOST_EXPECTED: usize = 1024;

/// Maximum wait for the callers that the last flush answered, however long that flush took.
const MOST_GATHERING: Duration = Duration::from_millis(1);

/// Number of driver threads: one to flush, one to write.
pub(crate) const DRIVERS: usize = 2;

#[derive(Default)]
pub(crate) struct Intake {
    state: Mutex<DriverState>,
    changed: Condvar,
}

#[derive(Default)]
struct DriverState {
    queue: Vec<Submission>,
    /// Whether a request in the queue does not wait for a flush.
    urgent: bool,
    /// Whether an operation in the queue is not an append, so that it may take long.
    long: bool,
    /// Whether a caller looks after the queue, for which no driver was woken.
    gathered: bool,
    queued_bytes: u64,
    queued_requests: usize,
    callers: Callers,
    writing: bool,
    flushing: bool,
    /// Durable position when the queue was last written in order to join the coming flush.
    joined: Option<Position>,
    idle: usize,
    /// Number of drivers that a panic has ended.
    gone: usize,
    /// Latest time at which a sleeping driver looks again.
    looks_at: Option<Instant>,
    /// Number of requests that the last flush answered, and the end of the wait for their callers.
    answered: usize,
    gather_until: Option<Instant>,
    /// Time at which an idle journal gets a marker.
    mark_at: Option<Instant>,
    /// A marker was written and needs a flush.
    marked: bool,
    stopped: bool,
}

impl DriverState {
    /// Whether to write the queue now. While a flush runs, requests that wait for the next flush are left to
    /// gather: they become one group, for one wake-up and one write.
    fn wants_write(&self) -> bool {
        let more_comes =
            self.flushing || (self.gather_until.is_some() && self.queued_requests < self.answered);
        let gathers = more_comes && !self.urgent && self.queued_bytes < GATHER_BYTES;
        self.can_write() && !gathers
    }

    fn can_write(&self) -> bool {
        !self.writing && !self.queue.is_empty()
    }

    /// Whether the queue is one append that waits for a flush, and nothing else is under way.
    fn is_lone(&self) -> bool {
        let [only] = self.queue.as_slice() else {
            return false;
        };
        let is_append = only.requests == 1 && only.level == Durability::Durable && !self.long;
        is_append && !self.flushing && self.can_write() && self.gather_until.is_none()
    }

    fn take_queue(&mut self) -> Vec<Submission> {
        self.urgent = false;
        self.gathered = false;
        self.long = false;
        self.gather_until = None;
        self.queued_bytes = 0;
        self.queued_requests = 0;
        // Soon about as many requests are queued again.
        let next = Vec::with_capacity(self.queue.len().min(MOST_EXPECTED));
        std::mem::replace(&mut self.queue, next)
    }
}

/// State of the committer after a write.
struct AfterWrite {
    /// Time at which the journal gets a marker, if it is idle until then.
    mark_at: Option<Instant>,
    /// As [`Callers::room`].
    room: u64,
}

enum Job {
    Write(Vec<Submission>),
    Mark,
    Flush,
    Stop,
}

impl Accepts for Intake {
    /// Queues a request and wakes an idle driver to take it. An append that waits for no flush wakes no
    /// driver: its caller writes it.
    fn push(&self, submission: Submission) -> Option<Submission> {
        let mut state = self.state.lock();
        if state.gone == DRIVERS {
            return Some(submission);
        }
        let urgent = submission.level < Durability::Durable;
        let append = matches!(submission.operation, Operation::Append { .. });
        let is_gathered = submission.gathered;
        state.urgent |= urgent;
        state.long |= !append;
        state.queued_bytes += submission.cost;
        state.queued_requests += submission.requests as usize;
        state.queue.push(submission);
        state.gathered |= is_gathered;
        if !append || !(urgent || is_gathered) {
            self.hand_on(&state);
        }
        None
    }
}

impl Intake {
    /// Takes the queue for a caller that writes it. If a driver must write the queue instead, wakes one. `unflushed`: bytes
    /// that a flush makes durable besides.
    fn take_gathered(&self, now: Instant, unflushed: u64) -> Option<GatheredQueue> {
        let mut state = self.state.lock();
        // The thread that writes looks again.
        if !(state.urgent || state.gathered) || !state.can_write() {
            return None;
        }
        state.gather_until = state.gather_until.filter(|until| *until > now);
        let flushes = state.callers.may_flush(unflushed) && state.is_lone();
        let is_short = !state.long && state.callers.may_write(state.queued_bytes, now);
        if !is_short || !(state.urgent || flushes) {
            state.gathered = false;
            self.hand_on(&state);
            return None;
        }
        state.writing = true;
        state.flushing |= flushes;
        Some(GatheredQueue {
            submissions: state.take_queue(),
            flushes,
        })
    }

    /// Takes the whole queue, for a caller that drives without threads.
    pub(crate) fn take(&self) -> Vec<Submission> {
        self.state.lock().take_queue()
    }

    /// Ends the drivers when nothing is left to do.
    pub(crate) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }

    /// A write or a driver has ended by a panic. The drivers that are left answer all callers. Returns the queue if none is
    /// left.
    fn give_up(&self, ended_drivers: usize) -> Vec<Submission> {
        let mut state = self.state.lock();
        state.writing = false;
        state.flushing = false;
        state.gone += ended_drivers;
        self.changed.notify_all();
        match state.gone == DRIVERS {
            true => state.take_queue(),
            false => Vec::new(),
        }
    }

    fn next(&self, core: &Core) -> Job {
        let mut state = self.state.lock();
        loop {
            let now = core.journal.clock.monotonic();
            state.gather_until = state.gather_until.filter(|until| *until > now);
            let wanted = state.marked || core.journal.wants_flush() || core.flush_is_due(now);
            if !state.flushing && wanted {
                // Requests queued by now join this flush. Otherwise they would wait for it and for one more.
                // This happens once for each flush, or writes could put the flush off for ever.
                let durable = core.journal.durable();
                if state.can_write() && state.joined != Some(durable) {
                    state.joined = Some(durable);
                    state.writing = true;
                    return Job::Write(state.take_queue());
                }
                state.flushing = true;
                state.marked = false;
                // This driver leaves for the flush: the other one takes the queue.
                self.hand_on(&state);
                return Job::Flush;
            }
            if state.wants_write() {
                state.writing = true;
                return Job::Write(state.take_queue());
            }
            // A caller that writes may leave something to be flushed.
            if state.stopped && state.queue.is_empty() && !state.writing {
                // The other driver may sleep: it, too, has nothing left to do.
                self.changed.notify_all();
                return Job::Stop;
            }
            // Not idle while requests gather: they would wait for the marker's flush.
            let flushed = core.journal.durable() >= core.journal.written();
            let idle = flushed && !state.writing && state.queue.is_empty();
            if idle && state.mark_at.is_some_and(|at| at <= now) {
                state.mark_at = None;
                state.writing = true;
                return Job::Mark;
            }
            // Unflushed records cannot be marked. Their flush wakes this driver again.
            let mark_at = state.mark_at.filter(|_| idle);
            let flush_at = core.flush_due_at().filter(|_| !state.flushing);
            // Also while the queue is empty: a request that is queued to gather wakes no driver.
            let until = [flush_at, mark_at, state.gather_until];
            let until = until.into_iter().flatten().min();
            self.wait(&mut state, until, now);
        }
    }

    /// Sleeps until a request is queued, or until `until`.
    fn wait(&self, state: &mut MutexGuard<'_, DriverState>, until: Option<Instant>, now: Instant) {
        state.idle += 1;
        state.looks_at = until;
        match until {
            Some(at) => {
                self.changed
                    .wait_for(state, at.saturating_duration_since(now));
            }
            None => self.changed.wait(state),
        }
        // If the other driver sleeps, a caller may wake it in vain.
        state.looks_at = None;
        state.idle -= 1;
    }

    /// Wakes an idle driver to take the queue, if the queue can be written now.
    fn hand_on(&self, state: &DriverState) {
        if state.wants_write() && state.idle > 0 {
            self.changed.notify_one();
        }
    }

    fn wrote(&self, written: AfterWrite) -> MutexGuard<'_, DriverState> {
        let mut state = self.state.lock();
        state.writing = false;
        state.callers.room = written.room;
        state.mark_at = written.mark_at.or(state.mark_at);
        state
    }

    /// Notes the write of a caller, and wakes a driver for the work that is left, now or later.
    fn wrote_gathered(&self, written: AfterWrite, core: &Core, began: Instant) {
        let now = core.journal.clock.monotonic();
        let mut state = self.wrote(written);
        let took = now.saturating_duration_since(began);
        state.callers.wrote(took, now);
        self.look_again(&state, core, now);
    }

    /// Wakes a driver for the work that a caller has left, now or later.
    fn look_again(&self, state: &DriverState, core: &Core, now: Instant) {
        // The thread that flushes looks again.
        let flush_at = match core.journal.wants_flush() {
            true => Some(now),
            false => core.flush_due_at(),
        };
        let flush_at = flush_at.filter(|_| !state.flushing);
        let flushed = core.journal.durable() >= core.journal.written();
        let mark_at = state.mark_at.filter(|_| flushed);
        let due = [flush_at, mark_at].into_iter().flatten().min();
        let unseen = due.is_some_and(|due| state.looks_at.is_none_or(|at| due < at));
        if state.idle > 0 && (unseen || state.wants_write() || state.stopped) {
            self.changed.notify_one();
        }
    }

    fn marked(&self, room: u64) {
        let mut state = self.state.lock();
        state.writing = false;
        state.marked = true;
        state.callers.room = room;
    }

    /// Notes a flush that answered `answered` requests and ended at `now`, after `took`.
    fn flushed(
        &self,
        answered: usize,
        now: Instant,
        took: Duration,
    ) -> MutexGuard<'_, DriverState> {
        let mut state = self.state.lock();
        state.flushing = false;
        state.answered = answered;
        let most = took.saturating_mul(2).min(MOST_GATHERING);
        state.gather_until = (answered > 1).then(|| now + most);
        state
    }
}

/// The queue for a caller.
struct GatheredQueue {
    submissions: Vec<Submission>,
    /// Whether the caller also flushes: nothing else is under way.
    flushes: bool,
}

/// Body of one driver. If it panics, which would be a bug, the journal fails, so that no caller waits for
/// ever.
pub(crate) fn drive(core: &Arc<Core>) {
    let run = std::panic::AssertUnwindSafe(|| run(core));
    if let Err(panic) = std::panic::catch_unwind(run) {
        panicked(core, &*panic, 1);
    }
}

/// Fails the journal after a panic in a write, and answers all callers that wait.
fn panicked(core: &Core, panic: &(dyn std::any::Any + Send), ended_drivers: usize) {
    vital::panicked(&core.journal, Worker::Commit, panic);
    // Answers the requests under way, since the journal has failed. Requests whose answer panics again are
    // dropped, and the drop answers them.
    let answer = || core.committer.lock().commit(core.intake.take());
    let _panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(answer));
    end_drivers(core, ended_drivers);
}

/// Notes that drivers have ended. Answers the requests that no driver is left for.
fn end_drivers(core: &Core, ended: usize) {
    for late in core.intake.give_up(ended) {
        let answer = || late.answer_failed(&core.journal);
        let _panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(answer));
    }
}

fn run(core: &Arc<Core>) {
    loop {
        match core.intake.next(core) {
            Job::Write(submissions) => drop(core.intake.wrote(core.write(submissions))),
            Job::Mark => {
                let mut committer = core.committer.lock();
                committer.mark();
                let room = committer.room();
                drop(committer);
                core.intake.marked(room);
            }
            Job::Flush => drop(core.flush()),
            Job::Stop => return,
        }
    }
}

impl Core {
    fn write(&self, submissions: Vec<Submission>) -> AfterWrite {
        let mut committer = self.committer.lock();
        committer.commit(submissions);
        let mark = committer.needs_marker();
        let room = committer.room();
        drop(committer);
        let delay = self.config.marker_delay;
        AfterWrite {
            mark_at: mark.then(|| self.journal.clock.monotonic() + delay),
            room,
        }
    }

    /// Flushes, for the driver or caller that has taken this on.
    fn flush(&self) -> MutexGuard<'_, DriverState> {
        let (began, before) = (self.journal.clock.monotonic(), self.journal.durable());
        let answered = self.journal.flush();
        let now = self.journal.clock.monotonic();
        let took = now.saturating_duration_since(began);
        let mut state = self.intake.flushed(answered, now, took);
        // A roll may have flushed everything: then this took no time, and says nothing about the device.
        if self.journal.durable() > before {
            state.callers.flushed(took);
        }
        state
    }

    /// Writes the requests that callers have gathered, on this thread, unless they are for a driver. Also flushes a lone
    /// one.
    pub(crate) fn write_gathered(&self) {
        let began = self.journal.clock.monotonic();
        let unflushed = self.journal.written().since(self.journal.durable());
        let Some(gathered) = self.intake.take_gathered(began, unflushed) else {
            return;
        };
        let work = || {
            let written = self.write(gathered.submissions);
            self.intake.wrote_gathered(written, self, began);
            if gathered.flushes {
                let mut state = self.flush();
                // Only drivers wait for answered callers.
                state.gather_until = None;
                let now = self.journal.clock.monotonic();
                self.intake.look_again(&state, self, now);
            }
        };
        if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
            panicked(self, &*panic, 0);
        }
    }

    /// Time of the next flush of written records that no request waits for.
    fn flush_due_at(&self) -> Option<Instant> {
        if self.journal.failure().is_some() {
            return None;
        }
        let (since, bytes) = self.journal.scheduled()?;
        let full = bytes >= self.config.sync_bytes;
        Some(if full {
            since
        } else {
            since + self.config.sync_interval
        })
    }

    fn flush_is_due(&self, now: Instant) -> bool {
        self.flush_due_at().is_some_and(|at| at <= now)
    }
}

/// Longest time added to an instant; guards against settings that mean "never".
pub(crate) const MAX_DELAY: Duration = Duration::from_secs(365 * 24 * 3600);

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::sync::mpsc;
    use std::task::{Context, Poll, Waker};

    use super::super::callers::{MARGIN_BYTES, SHORT_BYTES};
    use super::*;
    use crate::api::config::StorageConfig;
    use crate::api::error::AppendError;
    use crate::api::record::{Batch, LogRecords, Record};
    use crate::api::ticket::Ticket;
    use crate::base::clock::SystemClock;
    use crate::base::ids::LogName;
    use crate::base::metrics::NoObserver;
    use crate::disk::SimDisk;

    fn core() -> Arc<Core> {
        core_of(StorageConfig::default())
    }

    fn core_of(config: StorageConfig) -> Arc<Core> {
        let (disk, clock) = (SimDisk::new(), Arc::new(SystemClock));
        let (core, _) = Core::open(Arc::new(disk), config, clock, Arc::new(NoObserver)).unwrap();
        core
    }

    fn queue(core: &Core, bytes: usize) {
        // Dropping the ticket cancels nothing.
        drop(core.enqueue(of(bytes), Durability::Durable));
    }

    /// A request that waits for no flush, for its caller to write.
    fn gather(core: &Core, bytes: usize) -> Ticket {
        core.enqueue(of(bytes), Durability::Written)
    }

    fn level_of(ticket: &mut Ticket) -> Option<Durability> {
        let mut context = Context::from_waker(Waker::noop());
        match Pin::new(ticket).poll(&mut context) {
            Poll::Ready(settled) => Some(settled.unwrap().durability),
            Poll::Pending => None,
        }
    }

    fn of(bytes: usize) -> Batch {
        let record = Record {
            data: vec![0; bytes].into(),
            ..Record::default()
        };
        let records = LogRecords {
            log: LogName::new("a").unwrap(),
            records: vec![record].into(),
            guard: Default::default(),
            producer: None,
        };
        Batch {
            logs: vec![records],
            ..Batch::default()
        }
    }

    fn wrote(core: &Core) {
        let (mark_at, room) = (None, core.committer.lock().room());
        drop(core.intake.wrote(AfterWrite { mark_at, room }));
    }

    fn write_next(core: &Core) -> usize {
        let Job::Write(submissions) = core.intake.next(core) else {
            panic!("there was something to write");
        };
        let count = submissions.len();
        core.committer.lock().commit(submissions);
        wrote(core);
        count
    }

    /// Two requests were answered, and their callers are waited for.
    fn gather_for_a_day(core: &Core) {
        let mut state = core.intake.state.lock();
        state.answered = 2;
        let day = Duration::from_secs(24 * 3600);
        state.gather_until = Some(core.journal.clock.monotonic() + day);
    }

    /// Whether the next job is a write, once there is a job.
    fn next_is_a_write(core: &Arc<Core>) -> mpsc::Receiver<bool> {
        let (sender, receiver) = mpsc::channel();
        let driver = Arc::clone(core);
        let (busy, at_it) = mpsc::channel::<()>();
        crate::base::threads::start("test", move || {
            let next = driver.intake.next(&driver);
            drop(busy);
            sender.send(matches!(next, Job::Write(_))).unwrap();
        })
        .unwrap();
        // Waits until the driver sleeps, or has found a job at once.
        while core.intake.state.lock().idle == 0
            && at_it.try_recv() == Err(mpsc::TryRecvError::Empty)
        {
            std::thread::yield_now();
        }
        receiver
    }

    #[test]
    fn a_caller_writes_gathered_requests_and_leaves_long_work_to_drivers() {
        let core = core_of(StorageConfig {
            sync_interval: MAX_DELAY,
            ..StorageConfig::default()
        });
        // The room is not known yet.
        let mut first = gather(&core, 1);
        core.write_gathered();
        assert_eq!(level_of(&mut first), None);
        assert_eq!(write_next(&core), 1);
        assert_eq!(level_of(&mut first), Some(Durability::Written));

        let mut both = [gather(&core, 1), gather(&core, 1)];
        let mut durable = core.enqueue(of(1), Durability::Durable);
        core.write_gathered();
        let levels = both.each_mut().map(level_of);
        assert_eq!(levels, [Some(Durability::Written); 2]);
        // A driver flushes the durable request that came along.
        assert_eq!(level_of(&mut durable), None);
        assert!(matches!(core.intake.next(&core), Job::Flush));
        core.journal.flush();
        let now = core.journal.clock.monotonic();
        drop(core.intake.flushed(0, now, Duration::ZERO));
        assert_eq!(level_of(&mut durable), Some(Durability::Durable));

        let left = |mut ticket: Ticket, requests: usize| {
            core.write_gathered();
            assert_eq!(level_of(&mut ticket), None);
            assert_eq!(write_next(&core), requests);
            assert_eq!(level_of(&mut ticket), Some(Durability::Written));
        };
        left(gather(&core, usize::try_from(SHORT_BYTES).unwrap()), 1);
        let name = LogName::new("b").unwrap();
        let made = core.create_in_turn(name, crate::api::record::LogConfig::default());
        left(gather(&core, 1), 2);
        core.journal.flush();
        drop(made);
        let now = core.journal.clock.monotonic();
        let day = Duration::from_secs(24 * 3600);
        core.intake.state.lock().callers.slow_until = Some(now + day);
        left(gather(&core, 1), 1);
        core.intake.state.lock().callers.slow_until = Some(now);
        // The segment has little room left.
        core.intake.state.lock().callers.room = MARGIN_BYTES;
        left(gather(&core, 1), 1);
        let mut last = gather(&core, 1);
        core.write_gathered();
        assert_eq!(level_of(&mut last), Some(Durability::Written));
    }

    #[test]
    fn a_caller_begins_no_segment_for_the_directory_of_the_last_group() {
        let core = core_of(StorageConfig {
            segment_bytes: 4 << 20,
            sync_interval: MAX_DELAY,
            sync_bytes: u64::MAX,
            ..StorageConfig::default()
        });
        let to = |log: &str, bytes: usize| {
            let mut batch = of(bytes);
            batch.logs[0].log = LogName::new(log).unwrap();
            drop(core.enqueue(batch, Durability::Written));
        };
        let left = || {
            let current = core.journal.current();
            current.limit().since(core.journal.written())
        };
        // Frames of two logs in turn, which share none.
        let many = || {
            for n in 0..5000 {
                to(["a", "b"][n % 2], 1);
            }
            assert_eq!(write_next(&core), 5000);
        };
        many();
        to("a", 1);
        assert_eq!(write_next(&core), 1);
        let before = core.journal.written();
        many();
        let of_many = core.journal.written().since(before);
        let append = 90 << 10;
        // Room for the append, and not for the directory of the frames before as well.
        let wanted = append + MARGIN_BYTES + (2 << 10);
        while left() > of_many + wanted + (200 << 10) {
            to("a", 100 << 10);
            assert_eq!(write_next(&core), 1);
        }
        let fill = left() - of_many - wanted;
        to("a", usize::try_from(fill).unwrap());
        assert_eq!(write_next(&core), 1);
        many();
        let (id, left) = (core.journal.current().life.id, left());
        assert!(left >= append + MARGIN_BYTES, "{left}");
        drop(gather(&core, usize::try_from(append).unwrap()));
        core.write_gathered();
        assert_eq!(core.journal.current().life.id, id);
        assert_eq!(write_next(&core), 1);
        assert!(core.journal.current().life.id > id);
    }

    /// A request for its caller to write, and to flush if it is alone.
    fn gather_durable(core: &Core) -> Ticket {
        core.accept(None, of(1), Some(Durability::Durable), true)
    }

    #[test]
    fn caller_flushes_a_lone_request_where_flushes_are_short() {
        let core = core();
        // Neither the room nor the time of a flush is known yet.
        let mut first = gather_durable(&core);
        core.write_gathered();
        assert_eq!(write_next(&core), 1);
        assert_eq!(level_of(&mut first), None);
        assert!(matches!(core.intake.next(&core), Job::Flush));
        drop(core.flush());
        assert_eq!(level_of(&mut first), Some(Durability::Durable));
        core.intake.state.lock().callers.flushes_are_short = true;

        let mut lone = gather_durable(&core);
        core.write_gathered();
        assert_eq!(level_of(&mut lone), Some(Durability::Durable));
        assert!(!core.intake.state.lock().flushing);
        core.intake.state.lock().callers.flushes_are_short = true;

        let left = |core: &Core, mut tickets: Vec<Ticket>| {
            core.write_gathered();
            for ticket in &mut tickets {
                assert_eq!(level_of(ticket), None);
            }
            assert_eq!(write_next(core), tickets.len());
            core.journal.flush();
            for ticket in &mut tickets {
                assert_eq!(level_of(ticket), Some(Durability::Durable));
            }
        };
        // Several are for a driver, where the next ones gather.
        left(&core, vec![gather_durable(&core), gather_durable(&core)]);
        // After a long flush, too.
        let long = Duration::from_millis(1);
        core.intake.state.lock().callers.flushed(long);
        left(&core, vec![gather_durable(&core)]);
        core.intake.state.lock().callers.flushes_are_short = true;
        // Where appends that need no flush have left many bytes.
        drop(gather(&core, usize::try_from(SHORT_BYTES).unwrap()));
        assert_eq!(write_next(&core), 1);
        left(&core, vec![gather_durable(&core)]);
        core.intake.state.lock().callers.flushes_are_short = true;
        // And while another thread flushes: the next group gathers for that one.
        core.intake.state.lock().flushing = true;
        let mut behind = gather_durable(&core);
        core.write_gathered();
        assert_eq!(level_of(&mut behind), None);
        let now = core.journal.clock.monotonic();
        let mut state = core.intake.flushed(1, now, long);
        state.callers.flushed(long);
        drop(state);
        left(&core, vec![behind]);
    }

    #[test]
    fn driver_takes_a_request_that_came_while_a_caller_flushed() {
        let core = core();
        drop(gather_durable(&core));
        assert_eq!(write_next(&core), 1);
        drop(core.flush());
        let next = next_is_a_write(&core);
        // As in the middle of a caller's flush.
        core.intake.state.lock().flushing = true;
        drop(gather_durable(&core));
        core.write_gathered();
        let state = core.flush();
        core.intake
            .look_again(&state, &core, core.journal.clock.monotonic());
        drop(state);
        assert_eq!(next.recv_timeout(Duration::from_secs(60)), Ok(true));
    }

    #[test]
    fn a_driver_flushes_the_writes_of_a_caller_in_time() {
        let core = core();
        drop(gather(&core, 1));
        assert_eq!(write_next(&core), 1);
        core.journal.flush();
        // The driver has nothing to wait for.
        let next = next_is_a_write(&core);
        drop(gather(&core, 1));
        core.write_gathered();
        assert!(core.journal.durable() < core.journal.written());
        assert_eq!(next.recv_timeout(Duration::from_secs(60)), Ok(false));
        core.journal.flush();
        assert_eq!(core.journal.durable(), core.journal.written());
    }

    #[test]
    fn requests_are_answered_when_no_driver_is_left() {
        let core = core();
        // Its caller asked whether the journal works before the drivers ended.
        let late = || {
            let (ticket, answer) = Ticket::new();
            core.inbox.hand_over(Submission {
                operation: Operation::Append {
                    batch: of(1),
                    digests: Vec::new(),
                    ticket: answer,
                },
                level: Durability::Durable,
                cost: 0,
                requests: 1,
                submitted: core.journal.clock.monotonic(),
                session: None,
                gathered: false,
            });
            ticket
        };
        let answer = |ticket: &mut Ticket| {
            let mut context = Context::from_waker(Waker::noop());
            Pin::new(ticket).poll(&mut context)
        };
        panicked(&core, &"a trap", DRIVERS - 1);
        let mut tickets = vec![late(), late()];
        for ticket in &mut tickets {
            assert!(answer(ticket).is_pending(), "a driver is left");
        }
        end_drivers(&core, 1);
        tickets.push(late());
        for ticket in &mut tickets {
            let refused = answer(ticket);
            assert!(
                matches!(refused, Poll::Ready(Err(AppendError::JournalFailed(_)))),
                "{refused:?}"
            );
        }
    }

    #[test]
    fn the_next_group_waits_for_answered_callers_but_not_for_long() {
        let core = core();
        // The wait ends only when as many requests are queued as were answered.
        gather_for_a_day(&core);
        let next = next_is_a_write(&core);
        queue(&core, 1);
        assert!(!core.intake.state.lock().wants_write());
        queue(&core, 1);
        assert_eq!(next.recv_timeout(Duration::from_secs(60)), Ok(true));
        wrote(&core);
        // One of three callers comes back. The flush took 1 s, but the wait is shorter.
        let now = core.journal.clock.monotonic();
        drop(core.intake.flushed(3, now, Duration::from_secs(1)));
        let next = next_is_a_write(&core);
        queue(&core, 1);
        assert_eq!(next.recv_timeout(Duration::from_secs(60)), Ok(true));
        assert!(core.journal.clock.monotonic() >= now + MOST_GATHERING);
    }

    #[test]
    fn no_marker_is_flushed_before_requests_that_gather() {
        let core = core();
        queue(&core, 1);
        assert_eq!(write_next(&core), 1);
        assert!(matches!(core.intake.next(&core), Job::Flush));
        core.journal.flush();
        let now = core.journal.clock.monotonic();
        drop(core.intake.flushed(0, now, Duration::ZERO));
        gather_for_a_day(&core);
        core.intake.state.lock().mark_at = Some(now);
        queue(&core, 1);
        let next = next_is_a_write(&core);
        queue(&core, 1);
        assert_eq!(next.recv_timeout(Duration::from_secs(60)), Ok(true));
    }

    #[test]
    fn requests_gathered_during_a_flush_are_in_the_next_one() {
        let core = core();
        queue(&core, 1);
        assert_eq!(write_next(&core), 1);
        assert!(matches!(core.intake.next(&core), Job::Flush));
        core.journal.flush();
        // Before the end of that flush is noted, many bytes that wait for the next flush are written.
        queue(&core, usize::try_from(GATHER_BYTES).unwrap());
        assert_eq!(write_next(&core), 1);
        // Few bytes gather.
        queue(&core, 1);
        assert!(!core.intake.state.lock().wants_write());
        let now = core.journal.clock.monotonic();
        drop(core.intake.flushed(0, now, Duration::ZERO));
        assert!(core.journal.wants_flush());
        // The next flush also takes a request that still waits for others to gather.
        gather_for_a_day(&core);
        assert_eq!(write_next(&core), 1);
        assert!(matches!(core.intake.next(&core), Job::Flush));
        core.journal.flush();
        assert_eq!(core.journal.durable(), core.journal.written());
    }
}
