//! The journal: one write path for all logs.
//!
//! ```text
//!  submissions ─▶ committer: check ─▶ assign ─▶ encode ─▶ write ─┬─▶ answer WRITTEN
//!                                                                └─▶ flush ─▶ answer DURABLE
//! ```
//!
//! Write and flush are separate stages: while one thread flushes, another checks, encodes and writes
//! the next group. Each stage *publishes* the position up to which it is done. Readers compare
//! positions, and never ask the committer.

pub(crate) mod committer;
pub(crate) mod expiry;
mod flush_times;
pub(crate) mod inbox;
mod lag;
pub(crate) mod pool;
pub(crate) mod prefixes;
pub(crate) mod recent;
pub(crate) mod replication;
pub(crate) mod run;
pub(crate) mod seal;
pub(crate) mod segment;
pub(crate) mod vital;
pub(crate) mod volume;
mod waiting;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use self::expiry::{ClockTimes, Clocks, Jumps};
use self::flush_times::FlushTimes;
use self::prefixes::Prefixes;
use self::recent::Recent;
use self::replication::Replication;
use self::waiting::Waiting;
pub(crate) use self::waiting::{AnswerPromise, Placement, Waiter, WaitingAnswer};
use crate::api::error::AppendError;
use crate::api::record::{Durability, Visibility};
use crate::api::replica::ReplicaBounds;
use crate::api::watch::{Watch, Watched};
use crate::base::bounds::LIFE_BYTES;
use crate::base::clock::Clock;
use crate::base::ids::{Position, RecoveryEpoch, Timestamp};
use crate::base::metrics::{AppendPhase, Observer};
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::base::sync::{Mutex, RwLock};
use crate::disk::known_bad;
use crate::disk::known_bad::Mistake;
use crate::format::address;
use crate::journal::run::Run;
use crate::logs::Log;
use segment::Segment;

/// The part of the journal that all threads share.
pub(crate) struct Journal {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) recovery_epoch: RecoveryEpoch,
    clocks: Mutex<Clocks>,
    /// Time of the last log message about a jump of the system's clock.
    jump_logged: Mutex<Option<Instant>>,
    /// Number of times that a log got its own retention.
    retention_settings: AtomicU64,
    /// Everything below was handed to the operating system.
    written: AtomicU64,
    /// Everything below is on the device.
    durable: AtomicU64,
    /// Segments that hold frames, by base position.
    pub(crate) segments: RwLock<BTreeMap<Position, Arc<Segment>>>,
    /// Sorted runs, oldest first. They replace the segments before `segments`.
    runs: RwLock<Vec<Arc<Run>>>,
    /// Everything below lies in sorted runs.
    sorted_end: AtomicU64,
    /// The segment that is being written.
    current: RwLock<Arc<Segment>>,
    /// The newest groups, shared from memory.
    pub(crate) recent: Recent,
    failure: OnceLock<Arc<io::Error>>,
    /// Held while flushing, so that only one thread flushes. The next thread sees a failure.
    flush_role: Mutex<()>,
    flush_times: Mutex<FlushTimes>,
    waiting: Mutex<Waiting>,
    /// The third published position, if there is a replica.
    replication: Option<Replication>,
    /// Bytes of appends between submit and answer.
    pub(crate) inflight: AtomicU64,
    /// Bytes of records in memory only.
    pub(crate) buffered: AtomicU64,
    /// Readers of many logs, by the prefix they follow.
    pub(crate) prefixes: Arc<Prefixes>,
    /// Readers that wait for a log to be created.
    watch: Watch,
    /// End of the newest written group that created a log; at first, of the journal before.
    newest_creation: AtomicU64,
    /// For each level of publication, the newest creation that its readers were woken for.
    creations_shown: [AtomicU64; 3],
    /// Tasks that must learn of a failure or of the drain.
    pub(crate) stopping: Arc<Stopping>,
}

/// Wakes when the journal fails or drains.
#[derive(Default)]
pub(crate) struct Stopping {
    watch: Watch,
    draining: crate::base::sync::atomic::AtomicBool,
}

impl Watched for Stopping {
    fn watch(&self) -> &Watch {
        &self.watch
    }
}

impl Stopping {
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        self.watch.wake();
    }
}

impl Watched for Journal {
    fn watch(&self) -> &Watch {
        &self.watch
    }
}

impl Journal {
    /// Why no operation is accepted, if none is.
    pub(crate) fn refusal(&self) -> Option<AppendError> {
        if let Some(error) = self.failure() {
            return Some(AppendError::JournalFailed(error));
        }
        if let Some(refusal) = self.replication.as_ref().and_then(Replication::moved) {
            return Some(refusal);
        }
        self.stopping.is_draining().then_some(AppendError::Draining)
    }

    /// A journal that continues in `current`; everything below `end` is durable. The expiry clock
    /// continues from the last stored value.
    pub(crate) fn new(
        clock: Arc<dyn Clock>,
        observer: Arc<dyn Observer>,
        recovery_epoch: RecoveryEpoch,
        segments: BTreeMap<Position, Arc<Segment>>,
        current: Arc<Segment>,
        end: Position,
        clocks: Clocks,
    ) -> Self {
        Self {
            clocks: Mutex::new(clocks),
            jump_logged: Mutex::default(),
            retention_settings: AtomicU64::new(0),
            clock,
            observer,
            recovery_epoch,
            written: AtomicU64::new(end.get()),
            durable: AtomicU64::new(end.get()),
            segments: RwLock::new(segments),
            runs: RwLock::default(),
            sorted_end: AtomicU64::new(0),
            current: RwLock::new(current),
            recent: Recent::default(),
            failure: OnceLock::new(),
            flush_role: Mutex::new(()),
            flush_times: Mutex::default(),
            waiting: Mutex::default(),
            replication: None,
            inflight: AtomicU64::new(0),
            buffered: AtomicU64::new(0),
            prefixes: Arc::new(Prefixes::new(end)),
            watch: Watch::default(),
            newest_creation: AtomicU64::new(end.get()),
            creations_shown: Default::default(),
            stopping: Arc::default(),
        }
    }

    /// The journal with a replica, if there is one.
    pub(crate) fn with_replica(mut self, bounds: Option<ReplicaBounds>) -> Self {
        self.replication = bounds.map(Replication::new);
        self
    }

    /// Number of times that a log got its own retention since the start.
    pub(crate) fn retention_settings(&self) -> u64 {
        self.retention_settings.load(Ordering::SeqCst)
    }

    /// Notes that a log got its own retention.
    pub(crate) fn note_retention(&self) {
        self.retention_settings.fetch_add(1, Ordering::SeqCst);
    }

    /// Current time of the expiry clock.
    pub(crate) fn expiry_now(&self) -> Timestamp {
        self.read_clocks().expiry
    }

    /// Reads both clocks. Logs a jump of the system's clock.
    pub(crate) fn read_clocks(&self) -> ClockTimes {
        let (now, progress) = (self.clock.now(), self.clock.monotonic());
        let shown = self.clocks.lock().advance(now, progress);
        if let Some(by) = shown.jumped {
            self.log_jump(by, progress);
        }
        shown
    }

    /// Logs a jump of `by` microseconds, at most once in 10 seconds. The metrics count every jump.
    pub(crate) fn log_jump(&self, by: i64, now: Instant) {
        let mut logged = self.jump_logged.lock();
        if logged.is_some_and(|at| now.saturating_duration_since(at) < Duration::from_secs(10)) {
            return;
        }
        *logged = Some(now);
        let seconds = by.unsigned_abs() / 1_000_000;
        let (direction, rule) = match by > 0 {
            true => (
                "ahead",
                "stored times do not follow it for an hour, retention by age at most twice as fast as time passes",
            ),
            false => ("back", "stored times do not follow it for 10 minutes"),
        };
        tracing::warn!(
            direction,
            seconds,
            rule,
            "the system's clock jumped; check its synchronisation"
        );
    }

    /// Jumps of the system's clock since the start.
    pub(crate) fn clock_jumps(&self) -> Jumps {
        self.clocks.lock().jumps()
    }

    /// Lag of the expiry clock behind the system's clock, in microseconds; below 0: ahead.
    pub(crate) fn expiry_lag_micros(&self) -> i64 {
        let shows = self.expiry_now();
        self.clock.now().micros().saturating_sub(shows.micros())
    }

    /// Everything below was handed to the operating system.
    pub(crate) fn written(&self) -> Position {
        Position::new(self.written.load(Ordering::SeqCst))
    }

    /// Everything below is on the device.
    pub(crate) fn durable(&self) -> Position {
        Position::new(self.durable.load(Ordering::SeqCst))
    }

    /// Readers of this visibility may see everything below.
    pub(crate) fn published(&self, visibility: Visibility) -> Position {
        match visibility {
            Visibility::Replicated => self.settled(),
            // Bytes beyond may be missing after a restart.
            _ if self.failure.get().is_some() => self.durable(),
            Visibility::Durable => self.durable(),
            // Positions count written bytes. Records in memory only have no position.
            Visibility::Written | Visibility::Accepted => self.written(),
        }
    }

    /// The reason why the journal failed, if it has.
    pub(crate) fn failure(&self) -> Option<Arc<io::Error>> {
        self.failure.get().cloned()
    }

    /// Fails the journal for good. Requests in flight end with an unknown outcome; later ones are refused
    /// with nothing done. `action` describes the failed call and its file, and is part of every error.
    pub(crate) fn fail(&self, action: impl Display, error: &io::Error) {
        let error = Arc::new(io::Error::new(error.kind(), format!("{action}: {error}")));
        if self.failure.set(Arc::clone(&error)).is_ok() {
            tracing::error!(
                error = %error,
                written = self.written().get(),
                durable = self.durable().get(),
                "journal failed; refusing appends until restart"
            );
        }
        // No reader may see bytes beyond the durable position any more. Readers find the bytes below in
        // the segments.
        self.recent.clear();
        let (waiters, groups) = self.waiting.lock().take_all();
        let shipping = self.replication.as_ref().map(Replication::take_all);
        let (shipped, durable) = shipping.unwrap_or_default();
        for waiter in waiters.into_iter().chain(shipped) {
            self.answer_failed(waiter);
        }
        for log in groups.into_iter().chain(durable).flat_map(|(_, logs)| logs) {
            log.watch().wake();
        }
        if let Some(replication) = &self.replication {
            replication.shipper().watch().wake();
        }
        self.watch.wake();
        self.stopping.watch.wake();
    }

    /// Publishes `bytes` from `start` on, which the operating system has taken, to the readers of the
    /// logs touched. `records`: their number in these bytes. `creates`: the bytes create a log. `scheduled`: a flush is due
    /// within the sync interval without a request.
    pub(crate) fn publish_written(
        &self,
        start: Position,
        bytes: u64,
        (touched, records): (Vec<Arc<Log>>, u64),
        creates: bool,
        scheduled: bool,
    ) {
        let now = self.clock.monotonic();
        let end = start.advance(bytes);
        if let Some(replication) = &self.replication {
            replication.wrote((start, end), records);
        }
        self.prefixes.announce(start, end, &touched);
        // The group enters before it is published: a flush that covers it must find its readers.
        let group = (end, touched.clone());
        self.waiting.lock().written(group, bytes, scheduled, now);
        if creates {
            self.newest_creation.store(end.get(), Ordering::SeqCst);
        }
        self.written.store(end.get(), Ordering::SeqCst);
        self.wake_at(Visibility::Written, &touched);
    }

    /// Wakes readers to whom bytes of these logs were published.
    fn wake_at(&self, visibility: Visibility, touched: &[Arc<Log>]) {
        for log in touched {
            log.watch().wake_at(visibility);
        }
        self.prefixes.wake_at(visibility, touched);
        self.show_creations(visibility);
    }

    /// Wakes readers that wait for a log to be created, if one was created. There may be many of them, so other groups
    /// wake none.
    fn show_creations(&self, visibility: Visibility) {
        let shown = match visibility {
            Visibility::Replicated => &self.creations_shown[2],
            Visibility::Durable => &self.creations_shown[1],
            Visibility::Written | Visibility::Accepted => &self.creations_shown[0],
        };
        let newest = self.newest_creation.load(Ordering::SeqCst);
        if newest <= shown.load(Ordering::SeqCst) {
            return;
        }
        // Read before the readers wake: those that begin to wait later see this much.
        let published = self.published(visibility).get();
        self.watch.wake_at(visibility);
        if newest <= published {
            shown.fetch_max(newest, Ordering::SeqCst);
        }
    }

    /// Notes a trim, which takes effect when its frame, ending at `end`, is on the device.
    pub(crate) fn trimming(&self, end: Position, log: Arc<Log>) {
        self.waiting.lock().trimming(end, log);
    }

    /// Drops the trims of frames beyond `position`, which were taken back.
    pub(crate) fn forget_trims(&self, position: Position) {
        self.waiting.lock().forget_trims(position);
    }

    /// Keeps requests until a flush covers their positions.
    pub(crate) fn await_flush(&self, waiters: impl IntoIterator<Item = Waiter>) {
        self.waiting.lock().waiters.extend(waiters);
        if self.failure().is_some() {
            // The journal failed after this group was written: no flush would answer these requests.
            let waiters = std::mem::take(&mut self.waiting.lock().waiters);
            waiters
                .into_iter()
                .for_each(|waiter| self.answer_failed(waiter));
        }
    }

    /// Whether a request waits for a flush.
    pub(crate) fn wants_flush(&self) -> bool {
        !self.waiting.lock().waiters.is_empty()
    }

    /// Time since which bytes wait for a scheduled flush, and their number.
    pub(crate) fn scheduled(&self) -> Option<(Instant, u64)> {
        self.waiting.lock().scheduled()
    }

    /// Time since which written bytes have been unflushed.
    pub(crate) fn unflushed_since(&self) -> Option<Instant> {
        self.waiting.lock().unflushed_since()
    }

    /// The flush stage: makes everything written before it durable, publishes the new position and
    /// answers the waiting requests. Returns their number.
    pub(crate) fn flush(&self) -> usize {
        self.flush_if(false)
    }

    /// Median and 99th percentile of the newest flushes.
    pub(crate) fn flush_percentiles(&self) -> (Duration, Duration) {
        self.flush_times.lock().percentiles()
    }

    /// Flushes even if no new position is published, because bytes below the durable position changed.
    pub(crate) fn flush_again(&self) {
        self.flush_if(true);
    }

    fn flush_if(&self, anyway: bool) -> usize {
        {
            let _role = self.flush_role.lock();
            if self.failure().is_some() {
                return 0;
            }
            // The position is read before the segment: if the journal rolls in between, the roll has
            // flushed the position's segment.
            let target = {
                let mut waiting = self.waiting.lock();
                let target = self.written();
                waiting.begin_flush(target);
                target
            };
            if anyway || target > self.durable() {
                let segment = Arc::clone(&*self.current.read());
                let started = self.clock.monotonic();
                if known_bad::makes(Mistake::AckBeforeFlush) {
                    self.durable.store(target.get(), Ordering::SeqCst);
                    self.settle();
                }
                // The journal flushed a closed segment when it left the segment.
                if let Some(file) = segment.writer()
                    && let Err(error) = file.sync()
                    && !known_bad::makes(Mistake::FlushResultIgnored)
                {
                    self.fail(format_args!("flushing {}", segment.path()), &error);
                    return 0;
                }
                let took = self.clock.monotonic().duration_since(started);
                self.flush_times.lock().add(took);
                self.observer.flush(took);
                self.durable.store(target.get(), Ordering::SeqCst);
            }
        }
        self.settle()
    }

    /// Answers requests whose position is durable now, and wakes readers. Returns the number answered.
    fn settle(&self) -> usize {
        let durable = self.durable();
        let (waiters, groups) = {
            let mut waiting = self.waiting.lock();
            waiting.apply_trims(self.settled());
            waiting.take_below(durable)
        };
        let now = self.clock.monotonic();
        let mut answered = 0;
        // Requests that were written together have waited equally long.
        let mut alike: (Option<Instant>, u32) = (None, 0);
        let told = |(since, requests): (Option<Instant>, u32)| {
            if let Some(since) = since {
                let time = now.saturating_duration_since(since);
                self.observer.phase(AppendPhase::Flush, time, requests);
            }
        };
        let mut unshipped = Vec::new();
        for mut waiter in waiters {
            if alike.0 != Some(waiter.since) {
                told(std::mem::replace(&mut alike, (Some(waiter.since), 0)));
            }
            alike.1 += waiter.requests;
            let ships = waiter.level == Durability::Replicated && self.replication.is_some();
            if ships && !known_bad::makes(Mistake::AckBeforeReplica) {
                waiter.times.flush = now.saturating_duration_since(waiter.since);
                waiter.since = now;
                unshipped.push(waiter);
                continue;
            }
            answered += waiter.requests as usize;
            let reached = waiter.level.max(Durability::Durable);
            self.answer(waiter, reached);
        }
        told(alike);
        for (_, logs) in &groups {
            self.wake_at(Visibility::Durable, logs);
        }
        if let Some(replication) = &self.replication {
            self.await_replica(replication, unshipped, groups);
        }
        answered
    }

    /// Continues in the next segment. The caller has flushed everything before.
    pub(crate) fn enter(&self, segment: Arc<Segment>) {
        debug_assert!(self.durable() >= self.written() || self.failure().is_some());
        self.segments
            .write()
            .insert(segment.base, Arc::clone(&segment));
        *self.current.write() = segment;
        self.count_unreleased();
    }

    /// The segment that is being written.
    pub(crate) fn current(&self) -> Arc<Segment> {
        Arc::clone(&*self.current.read())
    }

    /// Sorted runs, oldest first.
    pub(crate) fn runs(&self) -> Vec<Arc<Run>> {
        self.runs.read().clone()
    }

    /// Sorted runs and the segments after them, as of one moment.
    pub(crate) fn runs_and_segments(&self) -> (Vec<Arc<Run>>, Vec<Arc<Segment>>) {
        loop {
            let runs = self.runs();
            let segments = self.segments.read().values().cloned().collect();
            let end = runs.last().map_or(Position::ZERO, |run| run.head.limit);
            if end == self.sorted_end() {
                return (runs, segments);
            }
        }
    }

    /// Data below this position lies in sorted runs only; all other data lies in segments.
    pub(crate) fn sorted_end(&self) -> Position {
        Position::new(self.sorted_end.load(Ordering::SeqCst))
    }

    /// Replaces the sorted runs. Readers no longer use the segments and runs that the new ones replace,
    /// which are returned.
    pub(crate) fn enter_runs(&self, new: Vec<Arc<Run>>) -> Vec<Arc<Segment>> {
        let end = new.last().map_or(Position::ZERO, |run| run.head.limit);
        let mut segments = self.segments.write();
        let old = {
            let mut runs = self.runs.write();
            // Stored first: readers that miss data in a segment must find it in a run.
            self.sorted_end.store(end.get(), Ordering::SeqCst);
            std::mem::replace(&mut *runs, new)
        };
        let kept = self.runs();
        let gone = |run: &Arc<Run>| kept.iter().all(|kept| kept.id() != run.id());
        let mut retired: Vec<Arc<Segment>> = old
            .into_iter()
            .filter(gone)
            .map(|run| Arc::clone(&run.segment))
            .collect();
        let unsorted = segments.split_off(&end);
        let sorted = std::mem::replace(&mut *segments, unsorted);
        retired.extend(sorted.into_values());
        for segment in &retired {
            segment.retire();
        }
        retired
    }

    /// The run that holds the data formerly at `position` in the journal.
    pub(crate) fn run_at(&self, position: Position) -> Option<Arc<Run>> {
        let runs = self.runs.read();
        let at = runs.partition_point(|run| run.head.limit <= position);
        runs.get(at).cloned()
    }

    /// The first position of the segments that a run replaces.
    pub(crate) fn first_of_run(&self, segment: &Segment) -> Position {
        let runs = self.runs.read();
        let run = runs.iter().find(|run| run.segment.base == segment.base);
        run.map_or(Position::ZERO, |run| {
            run.head.first_base.advance(LIFE_BYTES)
        })
    }

    /// The segment or sorted run that holds the data at `position`.
    pub(crate) fn segment_at(&self, position: Position) -> Option<Arc<Segment>> {
        if address::is_address(position) {
            let runs = self.runs.read();
            let within =
                |run: &&Arc<Run>| run.segment.base <= position && position < run.segment.limit();
            return runs.iter().find(within).map(|run| Arc::clone(&run.segment));
        }
        let segments = self.segments.read();
        let (_, segment) = segments.range(..=position).next_back()?;
        (position < segment.limit()).then(|| Arc::clone(segment))
    }

    /// Number of bytes written and not flushed, and the age of the oldest.
    pub(crate) fn durable_lag(&self) -> (u64, Duration) {
        let bytes = self.written().since(self.durable());
        let age = self.unflushed_since().map_or(Duration::ZERO, |since| {
            self.clock.monotonic().saturating_duration_since(since)
        });
        (bytes, if bytes == 0 { Duration::ZERO } else { age })
    }
}
