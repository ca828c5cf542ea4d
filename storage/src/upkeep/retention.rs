//! Retention: logs forget records by age, by bytes and by number of records.
//!
//! A pass visits all logs. For most of them, state in memory shows that nothing must go. A pass examines the
//! logs that may exceed a bound (`border.rs`). It takes the logs of the oldest segments first, so that logs
//! whose records lie together are examined together. The records to forget become trims through the
//! committer, like trims of clients. A step of a pass hands in one portion of trims. So they take one
//! group and one flush, and appends wait for few of them. A step examines at most `STEP` logs, and the pass
//! then rests as long as the step took: the first pass after a start may have to examine all logs.
//!
//! A pass counts only records on the device, not those that a power cut or a void group could take back. It
//! keeps nothing but the position of the journal: a crash in the middle of a pass takes nothing back, and the
//! next pass does the rest.

mod border;

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::api::error::{AdminError, AppendError};
use crate::api::pace::Control;
use crate::api::record::{Durability, LogConfig, Retention};
use crate::api::ticket::block_on;
use crate::base::ids::{LogId, LogName, Lsn, Position, Timestamp};
use crate::base::metrics::RetentionPass;
use crate::base::promise::Awaited;
use crate::base::sync::Mutex;
use crate::disk::known_bad;
use crate::disk::known_bad::Mistake;
use crate::journal::committer::{AdminChange, Barrier, Expiry, Idle, Operation};
use crate::journal::expiry::micros;
use crate::journal::inbox::Inbox;
use crate::logs::Log;
use crate::read::store::Store;

/// Logs visited in one go, while no log can be created.
const LOOK_LOGS: usize = 256;
/// Logs gathered before they are examined in order: some 2 MB, even with a million logs.
const GATHERED: usize = 1 << 16;
/// Maximum number of logs examined in a step of a pass.
const STEP: usize = 1024;
/// Maximum number of trims in one group: they delay waiting appends by a fraction of a millisecond.
const PORTION: usize = 128;
/// Maximum time between two records of the expiry clock in the journal, so that an unclean end sets the clock
/// back by no more.
const TELL_AFTER: Duration = Duration::from_secs(600);

/// Minimum time between two examinations of a log that cursors hold as a whole, by the expiry clock. Each
/// examination reads headers.
const LOOK_AT_HELD_AFTER: Duration = Duration::from_secs(60);

/// Progress of retention.
pub(crate) struct Retainer {
    store: Arc<Store>,
    inbox: Inbox,
    pub(crate) control: Control,
    state: Mutex<RetentionState>,
    /// Logs whose cursors hold back records that exceed a bound.
    held: Mutex<HashMap<LogId, HeldByCursors>>,
}

/// Records of one log that only cursors keep.
#[derive(Clone, Copy)]
struct HeldByCursors {
    bytes: u64,
    /// Arrival of the oldest of these records; `None` if it cannot be read.
    arrival: Option<Timestamp>,
    /// Time at which the log was examined.
    looked_at: Timestamp,
}

/// Totals of the records that cursors hold back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct HeldBack {
    /// Logs with such records.
    pub(crate) logs: u64,
    /// Bytes of their frames.
    pub(crate) bytes: u64,
    /// Age of the oldest of them, by the expiry clock.
    pub(crate) age: Duration,
}

struct RetentionState {
    /// A whole pass has covered everything below.
    seen: Position,
    /// No record of any log is too old before the expiry clock shows this, in seconds.
    ages_at: u32,
    /// Time of the expiry clock at the last whole pass. If the clock shows less now, it went back,
    /// and `ages_at` means nothing.
    passed_at: Timestamp,
    /// Number of changes to settings of logs when no log had a bound.
    unbounded_at: Option<u64>,
    /// Whether any log had a bound of age.
    by_age: bool,
    /// Time of the expiry clock when it was last recorded in the journal.
    told: Timestamp,
    /// Whether any log had producers that may expire.
    producers: bool,
    /// No producer has been idle for too long before the expiry clock shows this.
    producers_at: Timestamp,
}

/// A pass under way.
pub(crate) struct RunningPass {
    began: Instant,
    /// End of the durable journal, and time of the expiry clock, when the pass began.
    durable: Position,
    now: Timestamp,
    seen: Position,
    settings: u64,
    /// The last log visited.
    after: Option<LogName>,
    /// Logs to examine, the last first. Unordered while they are gathered.
    candidates: Vec<Candidate>,
    /// All logs were passed.
    over: bool,
    /// Whether work is left for the next pass.
    left: bool,
    ages_at: u32,
    bounded: bool,
    bounded_by_age: bool,
    /// Whether cursors held back records before.
    holds: bool,
    pub(crate) came_to: RetentionPass,
}

/// A log that may exceed a bound.
struct Candidate {
    /// The oldest segment in which the log is known to lie, and the log's id. This order puts logs that lie
    /// together next to each other.
    oldest: (Position, LogId),
    log: Arc<Log>,
}

/// Trims that were handed in, and the first record that each log kept before them.
pub(crate) type Expiring = Awaited<Result<Vec<Option<Lsn>>, AppendError>>;

impl Deref for Retainer {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.store
    }
}

impl RunningPass {
    /// Whether no log is left to examine.
    pub(crate) fn is_through(&self) -> bool {
        self.over && self.candidates.is_empty()
    }
}

impl Retainer {
    pub(crate) fn new(store: &Arc<Store>, inbox: Inbox) -> Self {
        let told = store.journal.expiry_now();
        Self {
            store: Arc::clone(store),
            inbox,
            control: Control::default(),
            state: Mutex::new(RetentionState {
                seen: Position::ZERO,
                ages_at: 0,
                passed_at: Timestamp::default(),
                unbounded_at: None,
                by_age: false,
                told,
                producers: false,
                producers_at: Timestamp::from_micros(i64::MIN),
            }),
            held: Mutex::new(HashMap::new()),
        }
    }

    /// Totals of the records that cursors hold back, as the last pass found them.
    pub(crate) fn held_back(&self, now: Timestamp) -> HeldBack {
        let held = self.held.lock();
        let oldest = held.values().filter_map(|held| held.arrival).min();
        let age = oldest.map_or(0, |arrival| now.micros().saturating_sub(arrival.micros()));
        HeldBack {
            logs: held.len() as u64,
            bytes: held.values().map(|held| held.bytes).sum(),
            age: Duration::from_micros(u64::try_from(age).unwrap_or(0)),
        }
    }

    fn logs_held(&self) -> Vec<LogId> {
        self.held.lock().keys().copied().collect()
    }

    /// Notes the records that the cursors of a log hold back; `None`: none.
    fn note_held(&self, log: LogId, held: Option<HeldByCursors>) {
        let mut all = self.held.lock();
        match held {
            Some(held) => drop(all.insert(log, held)),
            None => drop(all.remove(&log)),
        }
    }
}

/// A time in whole seconds, as far as they fit; times before 1970 count as 1970.
fn seconds(time: Timestamp) -> u32 {
    let seconds = time.micros().div_euclid(1_000_000).max(0);
    u32::try_from(seconds).unwrap_or(u32::MAX)
}

impl Retainer {
    /// Body of the thread, until it is stopped.
    pub(crate) fn retain(&self) {
        let control = &self.control;
        control.wait(self.config.retention_interval);
        while !control.is_stopped() {
            self.retain_once();
            control.wait(self.config.retention_interval);
        }
    }

    /// Runs one pass, if it can find work.
    fn retain_once(&self) {
        if let Some(mut pass) = self.begin_pass() {
            while !self.control.is_stopped() && !pass.is_through() {
                let began = self.journal.clock.monotonic();
                let portion = self.look(&mut pass);
                let took = self.journal.clock.monotonic() - began;
                self.control.wait(took);
                if !portion.is_empty() {
                    let ends: Vec<Ends> = portion.iter().map(Ends::of).collect();
                    let expired = block_on(self.expire(portion));
                    self.count(&mut pass, &ends, &expired);
                }
            }
            self.end_pass(pass);
        }
        for portion in self.idle_producers() {
            if self.control.is_stopped() {
                break;
            }
            if let Err(error) = block_on(self.forget_idle(portion)) {
                tracing::warn!(%error, "idle producers could not be forgotten; the next pass retries");
                self.retry_producers();
                break;
            }
        }
        if let Some(told) = self.tell_clock()
            && block_on(told).is_err()
        {
            // The next pass records the clock.
            self.state.lock().told = Timestamp::from_micros(i64::MIN);
        }
    }

    /// Producers that have been idle for `producer_max_idle`, in portions of one group each.
    pub(crate) fn idle_producers(&self) -> Vec<Vec<Idle>> {
        let max_idle = self.config.producer_max_idle;
        let now = self.journal.expiry_now();
        if max_idle.is_zero()
            || now < self.state.lock().producers_at
            || self.must_wait()
            || known_bad::makes(Mistake::ProducersNeverExpire)
        {
            return Vec::new();
        }
        let idle_since = now.saturating_add_micros(-micros(max_idle));
        // A producer that begins later is idle for too long even later than this.
        let mut at = now.saturating_add_micros(micros(max_idle));
        let mut portions: Vec<Vec<Idle>> = Vec::new();
        let mut in_portion = 0;
        let mut found = false;
        let arrivals = self.arrivals_behind_wrong_clock(now);
        self.look_at_all(|log| {
            let state = log.state.read();
            let Some(extras) = state.extras.as_deref().filter(|_| !state.unproven) else {
                return;
            };
            let mut idle = Vec::new();
            for (id, epoch, newest) in extras.producers.newest() {
                found = true;
                let mut arrival = newest.arrival;
                if arrival > now {
                    let later = arrivals.partition_point(|(other, _)| *other <= newest.position);
                    arrival = arrivals
                        .get(later)
                        .map_or(arrival, |(_, earliest)| *earliest);
                }
                match arrival <= idle_since {
                    true => idle.push((id.clone(), epoch, newest.arrival)),
                    false => at = at.min(arrival.saturating_add_micros(micros(max_idle))),
                }
            }
            for producers in idle.chunks(PORTION) {
                if in_portion + producers.len() > PORTION || portions.is_empty() {
                    portions.push(Vec::new());
                    in_portion = 0;
                }
                in_portion += producers.len();
                if let Some(portion) = portions.last_mut() {
                    portion.push(Idle {
                        log: Arc::clone(log),
                        producers: producers.to_vec(),
                    });
                }
            }
        });
        let mut state = self.state.lock();
        state.producers_at = at;
        state.producers = found;
        portions
    }

    /// Batches that seem to have arrived later than `now` came while the clock was ahead. They are no
    /// younger than any batch at a later position. Returns these later positions in order, each with
    /// the earliest arrival from there on; nothing if no clock was ahead.
    fn arrivals_behind_wrong_clock(&self, now: Timestamp) -> Vec<(Position, Timestamp)> {
        let newest = |each: &mut dyn FnMut(Position, Timestamp)| {
            self.look_at_all(|log| {
                let state = log.state.read();
                let producers = state
                    .extras
                    .iter()
                    .flat_map(|extras| extras.producers.newest());
                producers.for_each(|(_, _, newest)| each(newest.position, newest.arrival));
            });
        };
        let mut was_ahead = false;
        newest(&mut |_, arrival| was_ahead |= arrival > now);
        let mut arrivals = Vec::new();
        if was_ahead {
            newest(&mut |position, arrival| {
                if arrival <= now {
                    arrivals.push((position, arrival));
                }
            });
        }
        arrivals.sort_unstable();
        let mut earliest = now;
        for (_, arrival) in arrivals.iter_mut().rev() {
            earliest = earliest.min(*arrival);
            *arrival = earliest;
        }
        arrivals
    }

    /// Calls `each` with every log, until retention must stop.
    fn look_at_all(&self, mut each: impl FnMut(&Arc<Log>)) {
        let mut after = None;
        loop {
            after = self.logs.look_over(after.as_ref(), LOOK_LOGS, &mut each);
            if after.is_none() || self.control.is_stopped() {
                return;
            }
        }
    }

    /// Hands in a portion.
    pub(crate) fn forget_idle(&self, portion: Vec<Idle>) -> Awaited<Result<(), AdminError>> {
        let change = AdminChange::ForgetIdle(portion);
        // Nobody waits for the replica: the change is repeated after a loss.
        (self.inbox).request_at(Durability::Durable, |answer| {
            Operation::Admin(change, answer)
        })
    }

    /// Whether the journal would refuse trims.
    fn must_wait(&self) -> bool {
        self.journal.refusal().is_some() || self.journal.replica_is_behind().is_some()
    }

    /// The next pass looks at all producers again.
    pub(crate) fn retry_producers(&self) {
        self.state.lock().producers_at = Timestamp::from_micros(i64::MIN);
    }

    /// The retention that holds for a log with these settings.
    pub(crate) fn retention_of(&self, config: &LogConfig) -> Retention {
        let own = config.retention.as_deref().copied();
        own.unwrap_or_else(|| self.config.retention())
    }

    /// Begins a pass; `None` if it would find nothing to do.
    pub(crate) fn begin_pass(&self) -> Option<RunningPass> {
        let settings = self.journal.retention_settings();
        // The position comes first: later records are for the next pass.
        let durable = self.journal.durable();
        let now = self.journal.expiry_now();
        let state = self.state.lock();
        let default = self.config.retention().is_bounded();
        let unbounded = !default && state.unbounded_at == Some(settings);
        let young = seconds(now) < state.ages_at && now >= state.passed_at;
        let idle = state.seen == durable && young;
        if unbounded || idle || self.must_wait() {
            return None;
        }
        Some(RunningPass {
            began: self.journal.clock.monotonic(),
            durable,
            now,
            seen: state.seen,
            settings,
            after: None,
            candidates: Vec::new(),
            over: false,
            left: false,
            ages_at: u32::MAX,
            bounded: false,
            bounded_by_age: false,
            holds: !self.logs_held().is_empty(),
            came_to: RetentionPass::default(),
        })
    }

    /// Goes on until a portion is full, the logs of one step or all logs are examined, or the pass must stop.
    pub(crate) fn look(&self, pass: &mut RunningPass) -> Vec<Expiry> {
        let mut portion = Vec::new();
        if pass.candidates.is_empty() {
            self.gather(pass);
        }
        for _ in 0..STEP {
            if portion.len() == PORTION || self.control.is_stopped() {
                break;
            }
            let Some(Candidate { log, .. }) = pass.candidates.pop() else {
                break;
            };
            match self.expiry_of(&log, pass) {
                Ok(expiry) => portion.extend(expiry),
                Err(error) => {
                    pass.left = true;
                    tracing::warn!(log = log.name.as_str(), %error, "what a log is to forget by itself could not be looked up; it is tried again");
                }
            }
        }
        portion
    }

    /// Finds the next logs to examine.
    fn gather(&self, pass: &mut RunningPass) {
        while !pass.over && pass.candidates.len() < GATHERED && !self.control.is_stopped() {
            let after = pass.after.take();
            pass.after = self
                .logs
                .look_over(after.as_ref(), LOOK_LOGS, |log| self.glance(log, pass));
            pass.over = pass.after.is_none();
        }
        let oldest = |candidate: &Candidate| std::cmp::Reverse(candidate.oldest);
        pass.candidates.sort_unstable_by_key(oldest);
    }

    /// Adds a log to the candidates if state in memory shows that it may exceed a bound.
    fn glance(&self, log: &Arc<Log>, pass: &mut RunningPass) {
        let state = log.state.read();
        let retention = self.retention_of(&state.config);
        if pass.holds && !(retention.is_bounded() && retention.respect_cursors) {
            self.note_held(log.id, None);
        }
        if !retention.is_bounded() {
            return;
        }
        pass.bounded = true;
        pass.bounded_by_age |= retention.age().is_some();
        let kept = state.next.since(state.coming_first());
        // After damage that leaves records in doubt, people decide.
        if kept == 0 || state.unproven {
            return;
        }
        let changed = state.last_end > pass.seen;
        let many = retention.records().is_some_and(|most| kept > most);
        let large = retention
            .bytes()
            .is_some_and(|most| state.stored_bytes > most);
        // A time beyond the whole age from now was found before the clock went back.
        let aged = retention.age().is_some_and(|age| {
            let latest = seconds(pass.now.saturating_add_micros(micros(age))).saturating_add(1);
            state.ages_at <= seconds(pass.now) || state.ages_at > latest
        });
        if retention.age().is_some() && !aged {
            pass.ages_at = pass.ages_at.min(state.ages_at);
        }
        if changed && (many || large) || aged {
            let sealed = state.chain.roots().first();
            let oldest = sealed.map_or(Position::new(u64::MAX), |node| node.base);
            pass.candidates.push(Candidate {
                oldest: (oldest, log.id),
                log: Arc::clone(log),
            });
        }
    }

    /// The records that a log must forget.
    fn expiry_of(&self, log: &Arc<Log>, pass: &mut RunningPass) -> std::io::Result<Option<Expiry>> {
        let (config, created, first, tail, cursor) = {
            let state = log.state.read();
            let first = state.coming_first();
            let cursor = state.lowest_cursor().unwrap_or(first);
            let config = Arc::clone(&state.config);
            let tail = state.tail(pass.durable);
            (config, state.create_time, first, tail, cursor)
        };
        let retention = self.retention_of(&config);
        // Cursors allow to forget up to here. Without any cursor they allow nothing.
        let free = match retention.respect_cursors {
            true => cursor.min(tail),
            false => tail,
        };
        let unbounded = self.config.cursor_hold_bytes == 0;
        let waits = unbounded && free <= first && self.was_looked_at(log.id, pass.now);
        if first >= tail || waits {
            return Ok(None);
        }
        let mut before = first;
        if let Some(most) = retention.records() {
            let kept = tail.get().saturating_sub(most);
            before = before.max(Lsn::new(kept));
        }
        if let Some(most) = retention.bytes() {
            let border = self.border_by_bytes(log, most, pass.durable)?;
            before = before.max(border.unwrap_or(first));
        }
        if let Some(age) = retention.age() {
            let young = self.age_at_least(log, (first, created), (age, &config), pass.now)?;
            match young {
                Some(ages_at) => pass.ages_at = pass.ages_at.min(ages_at),
                None => {
                    let newest = pass.now.saturating_add_micros(-micros(age));
                    let border = self.border_by_age(log, (first, tail), (newest, pass.now))?;
                    before = before.max(border);
                    // The next pass examines the rest of the log, unless no record was found to be old.
                    let mut ages_at = 0;
                    if border == first {
                        ages_at = seconds(pass.now.saturating_add_micros(micros(age / 8)));
                        log.state.write().note_ages_at(ages_at, &config);
                    }
                    pass.ages_at = pass.ages_at.min(ages_at);
                }
            }
        }
        let before = before.min(tail);
        let limit = match before > free {
            true => self.hold(log, (first, free, before), pass)?,
            false => {
                self.note_held(log.id, None);
                free
            }
        };
        let before = before.min(limit);
        if before <= first {
            return Ok(None);
        }
        Ok(Some(Expiry {
            log: Arc::clone(log),
            before,
            // A border by number or age needs no lookup: an index that cannot be read does not end retention.
            bytes: self.known_before(log, before),
            config,
            // Beyond the bytes that cursors may hold, cursors do not count.
            respect_cursors: retention.respect_cursors && before <= free,
        }))
    }

    /// Whether a log that cursors hold as a whole was examined lately.
    fn was_looked_at(&self, log: LogId, now: Timestamp) -> bool {
        let held = self.held.lock();
        held.get(&log).is_some_and(|held| {
            let again = held
                .looked_at
                .saturating_add_micros(micros(LOOK_AT_HELD_AFTER));
            held.looked_at <= now && now < again
        })
    }

    /// Notes the records from `free` on, below `before`, which only cursors keep. Returns the lsn up to which
    /// the log may forget. It exceeds `free` if these records take more bytes than cursors may hold.
    fn hold(
        &self,
        log: &Arc<Log>,
        (first, free, before): (Lsn, Lsn, Lsn),
        pass: &RunningPass,
    ) -> std::io::Result<Lsn> {
        let stored = |lsn| self.stored_before(log, lsn);
        let mut from = free.max(first);
        let end = stored(before)?.unwrap_or(0);
        let most = self.config.cursor_hold_bytes;
        if most > 0 && end.saturating_sub(stored(from)?.unwrap_or(end)) > most {
            let total = log.state.read().stored_bytes;
            let kept = total.saturating_sub(end).saturating_add(most);
            if let Some(border) = self.border_by_bytes(log, kept, pass.durable)? {
                from = from.max(border.min(before));
            }
        }
        let held = HeldByCursors {
            bytes: end.saturating_sub(stored(from)?.unwrap_or(end)),
            arrival: self.arrival(log, from)?,
            looked_at: pass.now,
        };
        self.note_held(log.id, (from < before).then_some(held));
        Ok(from)
    }

    /// The second up to which no record of the log is too old; `None` if a record may be too old now.
    fn age_at_least(
        &self,
        log: &Log,
        (first, created): (Lsn, Timestamp),
        (age, config): (Duration, &Arc<LogConfig>),
        now: Timestamp,
    ) -> std::io::Result<Option<u32>> {
        let grown = |since: Timestamp| since.saturating_add_micros(micros(age));
        let mut oldest = created;
        // A creation time in the future says nothing about later records: the system's clock may have been
        // put back.
        if created > now || grown(created) <= now {
            oldest = match self.arrival(log, first)? {
                Some(arrival) if arrival <= now => arrival,
                _ => return Ok(None),
            };
        }
        if grown(oldest) <= now {
            return Ok(None);
        }
        let ages_at = seconds(grown(oldest));
        log.state.write().note_ages_at(ages_at, config);
        Ok(Some(ages_at))
    }

    /// Hands in a portion.
    pub(crate) fn expire(&self, portion: Vec<Expiry>) -> Expiring {
        (self.inbox).request_at(Durability::Durable, |answer| {
            Operation::Expire(portion, answer)
        })
    }

    /// Counts the result of a portion.
    pub(crate) fn count(
        &self,
        pass: &mut RunningPass,
        portion: &[Ends],
        expired: &Result<Vec<Option<Lsn>>, AppendError>,
    ) {
        let Ok(expired) = expired else {
            pass.left = true;
            return;
        };
        for (ends, first) in portion.iter().zip(expired) {
            let Some(first) = *first else {
                pass.left = true;
                continue;
            };
            pass.came_to.trims += 1;
            pass.came_to.records += ends.before.since(first);
            let stored = |lsn| self.stored_before(&ends.log, lsn).ok().flatten();
            if let (Some(from), Some(to)) = (stored(first), ends.bytes) {
                pass.came_to.bytes += to.saturating_sub(from);
            }
        }
    }

    /// Ends a pass.
    pub(crate) fn end_pass(&self, mut pass: RunningPass) {
        let took = self.journal.clock.monotonic() - pass.began;
        pass.came_to.time = took;
        self.journal.observer.retention(&pass.came_to);
        let mut state = self.state.lock();
        if !pass.is_through() {
            return;
        }
        for log in self.logs_held() {
            let there = self.logs.by_id(log);
            if there.is_none_or(|there| there.state.read().deleted) {
                self.note_held(log, None);
            }
        }
        state.unbounded_at = (!pass.bounded).then_some(pass.settings);
        if !pass.left {
            state.seen = pass.durable;
            state.ages_at = pass.ages_at;
            state.passed_at = pass.now;
        }
        state.by_age = pass.bounded_by_age;
    }

    /// Records the time of the expiry clock in the journal, if that is due.
    pub(crate) fn tell_clock(
        &self,
    ) -> Option<Awaited<Result<Position, crate::api::error::SyncError>>> {
        let now = self.journal.expiry_now();
        let mut state = self.state.lock();
        let told = state.told.saturating_add_micros(micros(TELL_AFTER));
        let due = now >= told || now < state.told;
        if !(state.by_age || state.producers) || !due || self.journal.refusal().is_some() {
            return None;
        }
        state.told = now;
        drop(state);
        Some(self.inbox.ask(Barrier::TellClock, Durability::Durable))
    }
}

/// End of a trim, used to count the records that the trim removed.
pub(crate) struct Ends {
    pub(crate) log: Arc<Log>,
    pub(crate) before: Lsn,
    /// Bytes of the log's frames before the one that holds `before`, if they are known.
    bytes: Option<u64>,
}

impl Ends {
    pub(crate) fn of(expiry: &Expiry) -> Self {
        Self {
            log: Arc::clone(&expiry.log),
            before: expiry.before,
            bytes: expiry.bytes,
        }
    }
}
