//! Who drives the committer: two threads that are alike.
//!
//! Each takes what is to do next: a flush, if somebody waits for one and none is
//! running; otherwise the write of what has queued. So a lone request is written and
//! flushed by the thread it woke, one wake-up in all. What comes in while that one
//! flushes gathers and becomes the next group; the other thread writes at once what does
//! not wait for a flush, or is much.
//!
//! Callers that wait for their answer come back soon after it. So after a flush that
//! answered several, the next group waits until as many are there, but no longer than twice
//! what the flush took: a flush for the first few who are back would make all others wait
//! for one more.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Core;
use crate::ids::Position;
use crate::journal::committer::Submission;
use crate::record::Durability;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// So much is worth writing while a flush still runs.
const GATHER_BYTES: u64 = 256 << 10;

/// Room is made at once for so many requests at most.
const MOST_EXPECTED: usize = 1024;

/// For how long, at most, those are waited for whom the last flush answered, however long it
/// took.
const MOST_GATHERING: Duration = Duration::from_millis(1);

/// How many threads drive: one to flush, one to write.
pub(crate) const DRIVERS: usize = 2;

#[derive(Default)]
pub(crate) struct Intake {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: Vec<Submission>,
    /// Whether something in it does not wait for a flush.
    urgent: bool,
    queued_bytes: u64,
    writing: bool,
    flushing: bool,
    /// What was durable when the queue was last written so that the coming flush has it.
    joined: Option<Position>,
    idle: usize,
    /// How many the last flush answered, and until when they are waited for to ask again.
    answered: usize,
    gather_until: Option<Instant>,
    /// When an idle journal is to be marked.
    mark_at: Option<Instant>,
    /// A marker was written and is to be flushed.
    marked: bool,
    stopped: bool,
}

impl State {
    /// Whether to write what is queued now. While a flush runs, what waits for the next
    /// one anyway is left to gather: it becomes one group, for one wake-up and one write.
    fn wants_write(&self) -> bool {
        let more_comes =
            self.flushing || (self.gather_until.is_some() && self.queue.len() < self.answered);
        let gathers = more_comes && !self.urgent && self.queued_bytes < GATHER_BYTES;
        self.can_write() && !gathers
    }

    fn can_write(&self) -> bool {
        !self.writing && !self.queue.is_empty()
    }

    fn take_queue(&mut self) -> Vec<Submission> {
        self.urgent = false;
        self.gather_until = None;
        self.queued_bytes = 0;
        // Soon there are about as many again.
        let next = Vec::with_capacity(self.queue.len().min(MOST_EXPECTED));
        std::mem::replace(&mut self.queue, next)
    }
}

enum Job {
    Write(Vec<Submission>),
    Mark,
    Flush,
    Stop,
}

impl Intake {
    /// Queues a request and wakes a driver if one is free to take it.
    pub(crate) fn push(&self, submission: Submission) {
        let mut state = self.state.lock();
        state.urgent |= submission.level < Durability::Durable;
        state.queued_bytes += submission.cost;
        state.queue.push(submission);
        if state.wants_write() && state.idle > 0 {
            self.changed.notify_one();
        }
    }

    /// Takes everything queued, for whoever drives without threads.
    pub(crate) fn take(&self) -> Vec<Submission> {
        self.state.lock().take_queue()
    }

    /// Ends the drivers when nothing is left to do.
    pub(crate) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }

    /// One driver is gone: the other must be able to answer everyone.
    fn give_up(&self) {
        let mut state = self.state.lock();
        state.writing = false;
        state.flushing = false;
        self.changed.notify_all();
    }

    fn next(&self, core: &Core) -> Job {
        let mut state = self.state.lock();
        loop {
            let now = core.journal.clock.monotonic();
            state.gather_until = state.gather_until.filter(|until| *until > now);
            let wanted = state.marked || core.journal.wants_flush() || core.flush_is_due(now);
            if !state.flushing && wanted {
                // What is queued by now goes with this flush: otherwise it waits for it and
                // for one more. Once for each flush, or writes could put it off for ever.
                let durable = core.journal.durable();
                if state.can_write() && state.joined != Some(durable) {
                    state.joined = Some(durable);
                    state.writing = true;
                    return Job::Write(state.take_queue());
                }
                state.flushing = true;
                state.marked = false;
                self.hand_on(&state);
                return Job::Flush;
            }
            if state.wants_write() {
                state.writing = true;
                return Job::Write(state.take_queue());
            }
            if state.stopped && state.queue.is_empty() {
                // The other may sleep: it, too, has nothing left to do.
                self.changed.notify_all();
                return Job::Stop;
            }
            // Not idle while something gathers: it would wait for the marker's flush.
            let flushed = core.journal.durable() >= core.journal.written();
            let idle = flushed && !state.writing && state.queue.is_empty();
            if idle && state.mark_at.is_some_and(|at| at <= now) {
                state.mark_at = None;
                state.writing = true;
                return Job::Mark;
            }
            // What is not flushed yet cannot be marked: the flush wakes us again.
            let mark_at = state.mark_at.filter(|_| idle);
            self.wait(&mut state, core.flush_due_at(), mark_at, now);
        }
    }

    /// Sleeps until something is queued or due.
    fn wait(
        &self,
        state: &mut MutexGuard<'_, State>,
        flush_at: Option<Instant>,
        mark_at: Option<Instant>,
        now: Instant,
    ) {
        let flush_at = flush_at.filter(|_| !state.flushing);
        // Also while nothing is queued: what is then wakes nobody.
        let gathered_at = state.gather_until;
        state.idle += 1;
        match [flush_at, mark_at, gathered_at].into_iter().flatten().min() {
            Some(at) => {
                self.changed
                    .wait_for(state, at.saturating_duration_since(now));
            }
            None => self.changed.wait(state),
        }
        state.idle -= 1;
    }

    /// Before one driver goes away to flush: the other takes what is queued.
    fn hand_on(&self, state: &State) {
        if state.wants_write() && state.idle > 0 {
            self.changed.notify_one();
        }
    }

    fn wrote(&self, mark_at: Option<Instant>) {
        let mut state = self.state.lock();
        state.writing = false;
        if mark_at.is_some() {
            state.mark_at = mark_at;
        }
    }

    fn marked(&self) {
        let mut state = self.state.lock();
        state.writing = false;
        state.marked = true;
    }

    /// A flush has answered so many, and ended then after so long.
    fn flushed(&self, answered: usize, now: Instant, took: Duration) {
        let mut state = self.state.lock();
        state.flushing = false;
        state.answered = answered;
        let most = took.saturating_mul(2).min(MOST_GATHERING);
        state.gather_until = (answered > 1).then(|| now + most);
    }
}

/// Body of one driver. If it panics, which would be a bug, the journal fails: nobody is
/// left waiting for an answer that does not come.
pub(crate) fn drive(core: &Arc<Core>) {
    let run = std::panic::AssertUnwindSafe(|| run(core));
    if std::panic::catch_unwind(run).is_err() {
        core.journal
            .fail("committing", &std::io::Error::other("its thread panicked"));
        // Answers what was under way: the journal has failed. What panics again is dropped,
        // which answers too.
        let answer = || core.committer.lock().commit(core.intake.take());
        let _panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(answer));
        core.intake.give_up();
    }
}

fn run(core: &Arc<Core>) {
    loop {
        match core.intake.next(core) {
            Job::Write(submissions) => {
                let mut committer = core.committer.lock();
                committer.commit(submissions);
                let mark = committer.needs_marker();
                drop(committer);
                let delay = core.config.marker_delay;
                core.intake
                    .wrote(mark.then(|| core.journal.clock.monotonic() + delay));
            }
            Job::Mark => {
                core.committer.lock().mark();
                core.intake.marked();
            }
            Job::Flush => {
                let began = core.journal.clock.monotonic();
                let answered = core.journal.flush();
                let now = core.journal.clock.monotonic();
                let took = now.saturating_duration_since(began);
                core.intake.flushed(answered, now, took);
            }
            Job::Stop => return,
        }
    }
}

impl Core {
    /// When what was written and nobody waits for is to be flushed.
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
    use std::sync::mpsc;

    use super::*;
    use crate::clock::SystemClock;
    use crate::config::StorageConfig;
    use crate::disk::SimDisk;
    use crate::ids::LogName;
    use crate::metrics::NoObserver;
    use crate::record::{Batch, LogRecords, Record};
    use crate::threads;

    fn core() -> Arc<Core> {
        let config = StorageConfig::default();
        let (disk, clock) = (SimDisk::new(), Arc::new(SystemClock));
        let (core, _) = Core::open(Arc::new(disk), config, clock, Arc::new(NoObserver)).unwrap();
        core
    }

    fn queue(core: &Core, bytes: usize) {
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
        let batch = Batch {
            logs: vec![records],
            ..Batch::default()
        };
        // Dropping the ticket cancels nothing.
        drop(core.enqueue(batch, Durability::Durable));
    }

    fn write_next(core: &Core) -> usize {
        let Job::Write(submissions) = core.intake.next(core) else {
            panic!("there was something to write");
        };
        let count = submissions.len();
        core.committer.lock().commit(submissions);
        core.intake.wrote(None);
        count
    }

    /// Two have been answered, and are waited for.
    fn gather_for_a_day(core: &Core) {
        let mut state = core.intake.state.lock();
        state.answered = 2;
        let day = Duration::from_secs(24 * 3600);
        state.gather_until = Some(core.journal.clock.monotonic() + day);
    }

    /// Whether the next thing to do is a write, when it has come to that.
    fn next_is_a_write(core: &Arc<Core>) -> mpsc::Receiver<bool> {
        let (sender, receiver) = mpsc::channel();
        let driver = Arc::clone(core);
        let (busy, at_it) = mpsc::channel::<()>();
        threads::start("test", move || {
            let next = driver.intake.next(&driver);
            drop(busy);
            sender.send(matches!(next, Job::Write(_))).unwrap();
        })
        .unwrap();
        // Until it sleeps, or has found something at once.
        while core.intake.state.lock().idle == 0
            && at_it.try_recv() == Err(mpsc::TryRecvError::Empty)
        {
            std::thread::yield_now();
        }
        receiver
    }

    #[test]
    fn as_many_as_were_answered_are_waited_for_and_fewer_not_for_long() {
        let core = core();
        // As many as were answered end the wait, nothing else.
        gather_for_a_day(&core);
        let next = next_is_a_write(&core);
        queue(&core, 1);
        assert!(!core.intake.state.lock().wants_write());
        queue(&core, 1);
        assert_eq!(next.recv_timeout(Duration::from_secs(60)), Ok(true));
        core.intake.wrote(None);
        // One of three comes back: the flush took a second, and is not waited for that long.
        let now = core.journal.clock.monotonic();
        core.intake.flushed(3, now, Duration::from_secs(1));
        let next = next_is_a_write(&core);
        queue(&core, 1);
        assert_eq!(next.recv_timeout(Duration::from_secs(60)), Ok(true));
        assert!(core.journal.clock.monotonic() >= now + MOST_GATHERING);
    }

    #[test]
    fn no_marker_is_flushed_before_those_who_wait_for_more() {
        let core = core();
        queue(&core, 1);
        assert_eq!(write_next(&core), 1);
        assert!(matches!(core.intake.next(&core), Job::Flush));
        core.journal.flush();
        let now = core.journal.clock.monotonic();
        core.intake.flushed(0, now, Duration::ZERO);
        gather_for_a_day(&core);
        core.intake.state.lock().mark_at = Some(now);
        queue(&core, 1);
        let next = next_is_a_write(&core);
        queue(&core, 1);
        assert_eq!(next.recv_timeout(Duration::from_secs(60)), Ok(true));
    }

    #[test]
    fn what_gathered_during_a_flush_is_in_the_next_one_whoever_waits_already() {
        let core = core();
        queue(&core, 1);
        assert_eq!(write_next(&core), 1);
        assert!(matches!(core.intake.next(&core), Job::Flush));
        core.journal.flush();
        // Before that one is known to have ended, much is written that waits for the next.
        queue(&core, usize::try_from(GATHER_BYTES).unwrap());
        assert_eq!(write_next(&core), 1);
        // Little gathers.
        queue(&core, 1);
        assert!(!core.intake.state.lock().wants_write());
        core.intake
            .flushed(0, core.journal.clock.monotonic(), Duration::ZERO);
        assert!(core.journal.wants_flush());
        // Nor is that flush without those who wait until more are there.
        gather_for_a_day(&core);
        assert_eq!(write_next(&core), 1);
        assert!(matches!(core.intake.next(&core), Job::Flush));
        core.journal.flush();
        assert_eq!(core.journal.durable(), core.journal.written());
    }
}
