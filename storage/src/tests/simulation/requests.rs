//! Requests to the engine, at random or by name, and the meaning of their answers for the ledger.

use rand::RngExt;

use super::ledger::{Effect, Unit};
use super::*;
use crate::api::codec;
use crate::api::engine::Fenced;
use crate::api::error::{AdminError, CursorError, FailedCheck, FenceError, SyncError, TrimError};
use crate::api::record::{
    Compression, CursorCommit, LogConfig, NamedCursor, Producer, Retention, SyncMode,
};
use crate::base::ids::{LogId, Name, Position};
use crate::base::promise::Awaited;
use crate::journal::committer::CursorChange;
use crate::upkeep::retention;

pub(crate) const LOGS: [&str; 6] = ["a", "b", "c/1", "c/2", "d", "manual"];
const PRODUCERS: [&str; 2] = ["p", "q"];
const CURSORS: [&str; 2] = ["x", "y"];

/// A request that was handed in.
pub(crate) enum Asked {
    Append {
        ticket: Ticket,
        parts: Vec<Part>,
        cursors: Vec<Move>,
        level: Durability,
    },
    Admin(Awaited<Result<(), AdminError>>, Effect),
    Trim(Awaited<Result<Lsn, TrimError>>, &'static str, u64),
    Fence(Awaited<Result<Fenced, FenceError>>, &'static str),
    Cursor(Awaited<Result<Option<NamedCursor>, CursorError>>, Effect),
    Sync(Awaited<Result<Position, SyncError>>, Durability),
    Expire(Box<Expiring>),
    /// Record of the expiry clock's time, which changes no log.
    Told(Awaited<Result<Position, SyncError>>),
}

/// A pass of retention that was handed in.
pub(crate) struct Expiring {
    core: Arc<Core>,
    pass: retention::RunningPass,
    ends: Vec<retention::Ends>,
    configs: Vec<Arc<LogConfig>>,
    awaited: retention::Expiring,
}

/// Outcome of a request.
enum Came {
    Done,
    /// The outcome is unknown.
    Maybe,
    Refused,
}

fn poll<T>(awaited: &mut Awaited<T>) -> T {
    let mut context = Context::from_waker(Waker::noop());
    match Future::poll(Pin::new(awaited), &mut context) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("a turn settles everything"),
    }
}

/// Whether a failed request may have had an effect. An unexpected error is a fault of the engine.
fn came(error: &AppendError) -> Came {
    match error {
        AppendError::Unknown(_) | AppendError::ReplicationUnknown => Came::Maybe,
        AppendError::ConditionsFailed(_)
        | AppendError::ProducerGap { .. }
        | AppendError::ProducerFenced { .. }
        | AppendError::ProducerExpired { .. }
        | AppendError::ProducerConflict { .. }
        | AppendError::EpochJump { .. }
        | AppendError::CursorBeyondTail { .. }
        | AppendError::LogNotFound { .. }
        | AppendError::BucketDown
        | AppendError::ReplicaBehind { .. }
        | AppendError::DiskFull(_)
        | AppendError::JournalFailed(_)
        | AppendError::Invalid(_) => Came::Refused,
        error => panic!("{error}"),
    }
}

/// Data of the record with this number.
pub(crate) fn payload(number: u64, size: usize) -> Vec<u8> {
    let mut data = number.to_le_bytes().to_vec();
    data.resize(8 + size, u8::try_from(number % 251).unwrap());
    data
}

pub(crate) fn digest(data: &[u8]) -> u64 {
    let step = |sum: u64, word: u64| {
        (sum ^ word)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(29)
    };
    let (words, rest) = data.as_chunks::<8>();
    let sum = words.iter().fold(data.len() as u64, |sum, word| {
        step(sum, u64::from_le_bytes(*word))
    });
    rest.iter()
        .fold(sum, |sum, byte| step(sum, u64::from(*byte)))
}

/// Random bounds, or none.
pub(crate) fn retention(random: &mut StdRng) -> Option<Retention> {
    let mut retention = Retention {
        respect_cursors: random.random_range(0..100) < 15,
        ..Retention::default()
    };
    match random.random_range(0..7) {
        0 | 1 => retention.max_records = Some(random.random_range(1..20)),
        2 => retention.max_bytes = Some(random.random_range(1..30_000)),
        3 | 4 => {
            let millis = random.random_range(1..15_000);
            retention.max_age = Some(Duration::from_millis(millis));
        }
        _ => return None,
    }
    Some(retention)
}

impl Run {
    fn chance(&mut self, of_100: u32) -> bool {
        self.random.random_range(0..100) < of_100
    }

    fn any_log(&mut self) -> &'static str {
        LOGS[self.random.random_range(0..LOGS.len())]
    }

    /// Hands in a request of any kind.
    pub(crate) fn ask(&mut self, core: &Arc<Core>) -> Asked {
        let log = self.any_log();
        match self.random.random_range(0..100) {
            0..3 => self.delete(core, log),
            3..6 => {
                let config = self.settings(log);
                self.create(core, log, config)
            }
            6..9 => {
                let mut change: LogConfigChange = self.settings(log).into();
                if self.chance(50) {
                    change.sync_mode = None;
                }
                if self.chance(50) {
                    change.retention = None;
                }
                self.configure(core, log, change)
            }
            9..16 => {
                let state = self.ledger.live.get(log);
                let (first, next) = state.map_or((0, 0), |state| (state.first, state.next()));
                let before = self.random.random_range(first..next + 2);
                self.trim(core, log, before)
            }
            16..20 => self.fence(core, log),
            20..26 => {
                let cursor = CURSORS[self.random.random_range(0..2)];
                let next = self.ledger.live.get(log).map_or(0, |state| state.next());
                let lsn = self.random.random_range(0..next + 1);
                let lsn = (!self.chance(20)).then_some(lsn);
                self.cursor(core, log, cursor, lsn)
            }
            26..29 => {
                let level = self.strong();
                Asked::Sync(core.sync_in_turn(level), level)
            }
            29..32 => self.repeat(core),
            32..38 => match self.retain(core) {
                Some(asked) => asked,
                None => self.append_any(core, log),
            },
            _ => self.append_any(core, log),
        }
    }

    pub(crate) fn delete(&mut self, core: &Arc<Core>, log: &'static str) -> Asked {
        Asked::Admin(core.delete_in_turn(target(log)), Effect::Delete(log))
    }

    pub(crate) fn create(
        &mut self,
        core: &Arc<Core>,
        log: &'static str,
        config: LogConfig,
    ) -> Asked {
        let created = core.create_in_turn(LogName::new(log).unwrap(), config.clone());
        Asked::Admin(created, Effect::Create(log, config))
    }

    pub(crate) fn configure(
        &mut self,
        core: &Arc<Core>,
        log: &'static str,
        change: impl Into<LogConfigChange>,
    ) -> Asked {
        let change = change.into();
        let configured = core.configure_in_turn(LogName::new(log).unwrap(), change.clone());
        Asked::Admin(configured, Effect::Configure(log, change))
    }

    pub(crate) fn trim(&mut self, core: &Arc<Core>, log: &'static str, before: u64) -> Asked {
        let trimmed = core.trim_in_turn(target(log), Lsn::new(before));
        Asked::Trim(trimmed, log, before)
    }

    pub(crate) fn fence(&mut self, core: &Arc<Core>, log: &'static str) -> Asked {
        Asked::Fence(core.fence(target(log), None), log)
    }

    /// Moves a cursor, or deletes it.
    pub(crate) fn cursor(
        &mut self,
        core: &Arc<Core>,
        log: &'static str,
        cursor: &'static str,
        lsn: Option<u64>,
    ) -> Asked {
        let name = Name::new(cursor).unwrap();
        let operation = match lsn {
            Some(lsn) => CursorChange::Commit(commit(log, name, lsn)),
            None => CursorChange::Delete {
                target: target(log),
                cursor: name,
            },
        };
        Asked::Cursor(
            core.move_cursor(operation),
            Effect::Cursor(log, cursor, lsn),
        )
    }

    fn settings(&mut self, log: &str) -> LogConfig {
        let modes = [None, Some(SyncMode::Async), Some(SyncMode::Batch)];
        let sync_mode = match log {
            "manual" => Some(SyncMode::Manual),
            _ if self.bucket.is_some() && self.chance(25) => Some(SyncMode::Replicated),
            _ => modes[self.random.random_range(0..3)],
        };
        let retention = retention(&mut self.random).map(Box::new);
        LogConfig {
            sync_mode,
            compression: self.chance(30).then_some(Compression::Lz4),
            max_record_bytes: None,
            retention,
        }
    }

    /// A pass of retention, or a record of its clock; `None` if the pass would find nothing.
    pub(crate) fn retain(&mut self, core: &Arc<Core>) -> Option<Asked> {
        if self.chance(20)
            && let Some(told) = core.retainer.tell_clock()
        {
            return Some(Asked::Told(told));
        }
        let mut pass = core.retainer.begin_pass()?;
        let portion = core.retainer.look(&mut pass);
        assert!(pass.is_through(), "so few logs make one portion");
        let configs = portion.iter().map(|e| Arc::clone(&e.config)).collect();
        let ends = portion.iter().map(retention::Ends::of).collect();
        let awaited = core.retainer.expire(portion);
        Some(Asked::Expire(Box::new(Expiring {
            core: Arc::clone(core),
            pass,
            ends,
            configs,
            awaited,
        })))
    }

    /// Enters expired records into the ledger. Retention takes only records that their log must still forget
    /// when its turn comes.
    fn expired(&mut self, expiring: Expiring) {
        let Expiring {
            core,
            mut pass,
            ends,
            configs,
            mut awaited,
        } = expiring;
        let answer = poll(&mut awaited);
        core.retainer.count(&mut pass, &ends, &answer);
        core.retainer.end_pass(pass);
        let acknowledged = match &answer {
            Ok(_) => true,
            Err(error) => match came(error) {
                Came::Refused => {
                    self.counts.refused += 1;
                    return;
                }
                _ => {
                    self.counts.maybe += 1;
                    false
                }
            },
        };
        for (index, (ends, config)) in ends.iter().zip(configs).enumerate() {
            let before = ends.before.get();
            let name = LOGS.iter().find(|log| **log == ends.log.name.as_str());
            let log = *name.expect("retention knows the logs");
            let expected = self.is_to_expire(log, ends.log.id, before, &config);
            if let Ok(placed) = &answer {
                assert_eq!(placed[index].is_some(), expected, "{log} below {before}");
            }
            if expected {
                self.counts.expired += 1;
                let level = acknowledged.then_some(Durability::Durable);
                let effects = vec![Effect::Expire(log, before)];
                self.ledger.add(Unit::promised(effects, level));
            }
        }
    }

    /// Whether a log must forget the records below an lsn.
    ///
    /// # Panics
    /// If the log is as retention saw it, and no bound demands it.
    fn is_to_expire(&self, log: &str, id: LogId, before: u64, config: &LogConfig) -> bool {
        let Some(live) = self.ledger.live.get(log) else {
            return false;
        };
        let same = live.id.is_none_or(|live| live == id.get()) && live.next() >= before;
        if !same || live.config != *config || live.first >= before {
            return false;
        }
        let bounds = config.retention.as_deref().copied();
        let bounds = bounds.unwrap_or_else(|| self.config.retention());
        if bounds.respect_cursors && live.cursors.values().min().is_none_or(|c| *c < before) {
            return false;
        }
        let kept = live.next() - before;
        let many = bounds.max_records.is_some_and(|most| kept >= most);
        // Payloads and, for each record, more than a frame's header takes.
        let size: u64 = (before..live.next())
            .filter_map(|lsn| self.born.get(&live.record(lsn)?))
            .map(|(_, size)| *size as u64 + 200)
            .sum();
        let large = bounds.max_bytes.is_some_and(|most| size >= most);
        let newest = live.record(before - 1).and_then(|it| self.born.get(&it));
        let age = newest.map(|(born, _)| self.clock.monotonic().duration_since(*born));
        let old = bounds
            .max_age
            .zip(age)
            .is_some_and(|(most, age)| age * 2 >= most);
        assert!(
            many || large || old,
            "{log} forgets early what lies below {before}: {bounds:?}, {kept} kept, of {age:?}"
        );
        true
    }

    /// Sends an append of any form: to one log or several, with conditions, of a producer.
    fn append_any(&mut self, core: &Arc<Core>, log: &'static str) -> Asked {
        let mut logs = vec![log];
        if self.chance(25) {
            let other = self.any_log();
            if other != log {
                logs.push(other);
            }
        }
        let level = match self.random.random_range(0..6) {
            0 | 1 => Some(Durability::Written),
            2 => None,
            _ => Some(self.strong()),
        };
        let by_producer = self.chance(25);
        let mut parts = Vec::new();
        for log in logs {
            let records = self.random.random_range(1..5);
            let large = if self.bulky { 8 } else { 1 };
            let size = match self.random.random_range(0..12) < large {
                true => self.random.random_range(2000..9000usize),
                false => self.random.random_range(0..100),
            };
            parts.push((log, records, size / records));
        }
        let (mut batch, mut parts) = self.batch(&parts);
        for (part, told) in batch.logs.iter_mut().zip(&mut parts) {
            let live = self.ledger.live.get(told.0).cloned().unwrap_or_default();
            if self.random.random_range(0..100) < 97 {
                part.guard.writer_epoch = Some(live.epoch);
            }
            if self.random.random_range(0..100) < 15 {
                let wrong = u64::from(self.random.random_range(0..5) == 0);
                part.guard.expected_lsn = Some(Lsn::new(live.next() + wrong));
            }
            if by_producer {
                let id = PRODUCERS[self.random.random_range(0..2)];
                let (epoch, next) = live.producers.get(id).copied().unwrap_or_default();
                let (epoch, sequence) = match self.random.random_range(0..20) {
                    0 => (epoch + 1, 0),
                    _ => (epoch, next),
                };
                told.2 = Some((id, epoch, sequence));
                part.producer = Some(Producer {
                    id: Name::new(id).unwrap(),
                    epoch,
                    sequence,
                });
            }
        }
        let mut cursors = Vec::new();
        if self.chance(8) {
            let log = parts[0].0;
            cursors.push((log, CURSORS[0], 0));
            let cursor = Name::new(CURSORS[0]).unwrap();
            batch.cursors.push(commit(log, cursor, 0));
        }
        if by_producer && self.sent.len() < 8 {
            self.sent
                .push((batch.clone(), parts.clone(), cursors.clone()));
        }
        self.enqueue(core, batch, (parts, cursors), level)
    }

    /// Sends an earlier batch of a producer again, whatever its outcome was.
    fn repeat(&mut self, core: &Arc<Core>) -> Asked {
        if self.sent.is_empty() {
            return self.append_any(core, LOGS[0]);
        }
        let index = self.random.random_range(0..self.sent.len());
        let (batch, parts, cursors) = match self.chance(50) {
            true => self.sent.remove(index),
            false => self.sent[index].clone(),
        };
        let level = self.strong();
        self.enqueue(core, batch, (parts, cursors), Some(level))
    }

    /// DURABLE, or sometimes REPLICATED if there is a replica.
    fn strong(&mut self) -> Durability {
        match self.bucket.is_some() && self.chance(50) {
            true => Durability::Replicated,
            false => Durability::Durable,
        }
    }

    /// Builds records for some logs: log, number of records, and their size.
    pub(crate) fn batch(&mut self, logs: &[(&'static str, usize, usize)]) -> (Batch, Vec<Part>) {
        let mut parts = Vec::new();
        let mut told = Vec::new();
        for (log, count, size) in logs {
            let records: Vec<Vec<u8>> = (0..*count)
                .map(|_| {
                    self.payload += 1;
                    let data = payload(self.payload, *size);
                    let now = self.clock.monotonic();
                    self.born.insert(digest(&data), (now, data.len()));
                    data
                })
                .collect();
            told.push((
                *log,
                records.iter().map(|data| digest(data)).collect(),
                None,
            ));
            parts.push(LogRecords {
                log: LogName::new(log).unwrap(),
                records: records.iter().map(|data| record(data)).collect(),
                guard: Guard::default(),
                producer: None,
            });
        }
        let batch = Batch {
            single: parts.len() == 1,
            logs: parts,
            ..Batch::default()
        };
        (batch, told)
    }

    /// `level`: `None` = as the logs' sync modes say.
    pub(crate) fn enqueue(
        &mut self,
        core: &Arc<Core>,
        batch: Batch,
        (parts, cursors): (Vec<Part>, Vec<Move>),
        level: Option<Durability>,
    ) -> Asked {
        let batch = match self.chance(30) {
            true => in_requests(core, batch),
            false => batch,
        };
        let ticket = match level {
            Some(level) => core.enqueue(batch, level),
            None => core.enqueue_by_mode(None, batch),
        };
        Asked::Append {
            ticket,
            parts,
            cursors,
            level: level.unwrap_or(Durability::Accepted),
        }
    }

    /// Enters the outcome of a request into the ledger.
    pub(crate) fn settle(&mut self, asked: Asked) {
        self.counts.requests += 1;
        // Fences, trims and administration are as safe as the engine makes anything.
        let safest = match self.bucket {
            Some(_) => Durability::Replicated,
            None => Durability::Durable,
        };
        let (came, effects, level) = match asked {
            Asked::Expire(expiring) => return self.expired(*expiring),
            Asked::Told(mut awaited) => {
                let _told = poll(&mut awaited);
                return;
            }
            Asked::Append {
                ticket,
                parts,
                cursors,
                level,
            } => match self.appended(ticket, parts, cursors, level) {
                Some(settled) => settled,
                None => return,
            },
            Asked::Admin(mut awaited, effect) => {
                let came = match poll(&mut awaited) {
                    Ok(()) => Came::Done,
                    Err(AdminError::Append(error)) => came(&error),
                    Err(_) => Came::Refused,
                };
                (came, vec![effect], safest)
            }
            Asked::Trim(mut awaited, log, before) => {
                let first = self.ledger.live.get(log).map_or(0, |state| state.first);
                let came = match poll(&mut awaited) {
                    // There was nothing to trim: no frame exists that anything could rest on.
                    Ok(_) if before <= first => return,
                    Ok(_) => Came::Done,
                    Err(TrimError::Append(error)) => came(&error),
                    Err(TrimError::BeyondTail { tail, .. }) => {
                        self.ledger.revealed(log, tail.get(), safest);
                        Came::Refused
                    }
                    Err(_) => Came::Refused,
                };
                let effects = vec![Effect::Trim(log, before)];
                (came, effects, safest)
            }
            Asked::Fence(mut awaited, log) => {
                let live = self.ledger.live.get(log).map_or(0, |state| state.epoch);
                let came = match poll(&mut awaited) {
                    Ok(fenced) => {
                        assert_eq!(fenced.writer_epoch, live + 1, "no epoch is left out");
                        let tail = self.ledger.live.get(log).map_or(0, |state| state.next());
                        assert_eq!(fenced.tail_lsn.get(), tail, "the tail that a fence tells");
                        Came::Done
                    }
                    Err(FenceError::Append(error)) => came(&error),
                    Err(error) => panic!("{error}"),
                };
                let effects = vec![Effect::Fence(log, live + 1)];
                (came, effects, safest)
            }
            Asked::Cursor(mut awaited, effect) => {
                let came = match poll(&mut awaited) {
                    Ok(_) => Came::Done,
                    Err(CursorError::Append(error)) => came(&error),
                    Err(_) => Came::Refused,
                };
                (came, vec![effect], Durability::Durable)
            }
            Asked::Sync(mut awaited, level) => {
                let came = match poll(&mut awaited) {
                    Ok(_) => {
                        match level {
                            Durability::Replicated => self.ledger.all_replicated(),
                            _ => self.ledger.all_durable(),
                        }
                        Came::Done
                    }
                    Err(SyncError::Refused(AppendError::DiskFull(_))) => Came::Refused,
                    Err(_) => Came::Maybe,
                };
                (came, vec![Effect::Force], level)
            }
        };
        let acknowledged = match came {
            Came::Done => true,
            Came::Maybe => {
                self.counts.maybe += 1;
                false
            }
            Came::Refused => {
                self.counts.refused += 1;
                return;
            }
        };
        for effect in &effects {
            if let Effect::Append { records, .. } = effect {
                let now = self.clock.monotonic();
                for record in records {
                    if let Some(born) = self.born.get_mut(record) {
                        born.0 = now;
                    }
                }
            }
        }
        let promised = acknowledged.then_some(level);
        self.ledger.add(Unit::promised(effects, promised));
    }

    /// Outcome of an append; `None` if it is in the ledger already, or never will be.
    fn appended(
        &mut self,
        mut ticket: Ticket,
        parts: Vec<Part>,
        cursors: Vec<Move>,
        asked: Durability,
    ) -> Option<(Came, Vec<Effect>, Durability)> {
        let Some(answer) = settled(&mut ticket) else {
            panic!("a turn settles everything: {parts:?} {cursors:?} at {asked:?}");
        };
        let (came, level) = match &answer {
            Ok(answer) => {
                assert!(answer.durability >= asked, "less than was asked");
                (Came::Done, answer.durability)
            }
            Err(error) => (came(error), Durability::Accepted),
        };
        // A request for less than DURABLE is refused before the flush.
        if let Err(AppendError::ConditionsFailed(failed)) = &answer
            && asked >= Durability::Durable
        {
            for failed in failed {
                if let FailedCheck::PositionMismatch { actual, .. } = failed.check {
                    self.ledger
                        .revealed(failed.log.as_str(), actual.get(), asked);
                }
            }
        }
        if matches!(came, Came::Refused) {
            return Some((came, Vec::new(), level));
        }
        let mut effects = Vec::new();
        if let Ok(appended) = &answer {
            if appended.appends.iter().any(|append| append.deduplicated) {
                self.counts.repeats += 1;
                for ((log, records, _), append) in parts.iter().zip(&appended.appends) {
                    self.is_there(log, records, append.first_lsn.get());
                    if level >= Durability::Durable {
                        self.ledger.revealed(log, append.next_lsn.get(), level);
                    }
                }
                return None;
            }
            if let Some(position) = appended.position {
                assert!(
                    position > self.highest,
                    "positions only go up and are never reused"
                );
                self.highest = position;
            }
            for ((log, records, producer), append) in parts.into_iter().zip(&appended.appends) {
                self.is_new(log, append.log_id);
                if let Some(position) = appended.position {
                    let id = append.log_id.get();
                    let (first, next) = (append.first_lsn.get(), append.next_lsn.get());
                    self.acks.push((position, log, id, first..next));
                }
                effects.push(Effect::Append {
                    log,
                    id: Some(append.log_id.get()),
                    first: append.first_lsn.get(),
                    records,
                    producer,
                    buffered: appended.position.is_none(),
                });
            }
        } else {
            // An unknown outcome names no place. The batch repeats an earlier one, or comes after it.
            if parts
                .iter()
                .any(|(log, _, producer)| self.knows(log, *producer))
            {
                self.counts.repeats += 1;
                return None;
            }
            for (log, records, producer) in parts {
                effects.push(Effect::Append {
                    log,
                    id: None,
                    first: self.ledger.live.get(log).map_or(0, |state| state.next()),
                    records,
                    producer,
                    buffered: false,
                });
            }
        }
        let moved = cursors
            .into_iter()
            .map(|(log, cursor, lsn)| Effect::Cursor(log, cursor, Some(lsn)));
        effects.extend(moved);
        Some((came, effects, level))
    }

    /// Whether the ledger has this batch of a producer, or a later one.
    fn knows(&self, log: &str, producer: Option<(&'static str, u64, u64)>) -> bool {
        producer.is_some_and(|(id, epoch, sequence)| {
            let state = self.ledger.live.get(log);
            let known = state.and_then(|state| state.producers.get(id));
            known.is_some_and(|known| (epoch, sequence) < *known)
        })
    }

    /// Checks that the answer to a repeat names the records that were appended at first.
    fn is_there(&self, log: &str, records: &[u64], first: u64) {
        let state = &self.ledger.live[log];
        for (lsn, record) in (first..).zip(records) {
            let there = state.record(lsn);
            assert!(
                there == Some(*record) || lsn < state.first,
                "a repeat was answered with another batch"
            );
        }
    }

    /// Checks that an id is given to one log only.
    fn is_new(&mut self, log: &'static str, id: LogId) {
        let before = self.ids.insert(id, log);
        assert!(
            before.is_none_or(|before| before == log),
            "{id} given twice"
        );
    }
}

fn commit(log: &str, cursor: Name, lsn: u64) -> CursorCommit {
    CursorCommit {
        log: LogName::new(log).unwrap(),
        cursor,
        lsn: Lsn::new(lsn),
        expected_lsn: None,
        log_id: None,
    }
}

/// Splits a batch into joined requests of one record each, if that is possible.
fn in_requests(core: &Core, batch: Batch) -> Batch {
    let [all] = batch.logs.as_slice() else {
        return batch;
    };
    let mut body = Vec::new();
    all.records.put(&mut body);
    let mut requests = (0..)
        .zip(codec::records(&body).unwrap())
        .map(|(before, record)| {
            let mut request = batch.clone();
            request.single = false;
            request.logs[0].records = vec![record].into();
            let expected = &mut request.logs[0].guard.expected_lsn;
            *expected = expected.map(|lsn| lsn.advance(before));
            request
        });
    let mut joined = requests.next().unwrap();
    match requests.all(|next| core.join(&mut joined, next).is_ok()) {
        true => joined,
        // Batches with producers, cursors or limits of their log are not joined.
        false => batch,
    }
}
