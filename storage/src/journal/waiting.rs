//! Requests that were carried out and wait for the safety that they asked for.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Journal;
use crate::api::engine::{AppendTimes, Appended, Fenced, LogAppended, OneOrMore};
use crate::api::error::{AdminError, AppendError, CursorError, FenceError, SyncError, TrimError};
use crate::api::record::{Durability, NamedCursor};
use crate::api::ticket::TicketAnswer;
use crate::base::ids::{Lsn, Position};
use crate::base::promise::Promise;
use crate::logs::Log;

/// The promise of an answer to a caller.
pub(crate) type AnswerPromise<T, E> = Promise<Result<T, E>>;

/// The places of an append.
pub(crate) struct Placement {
    pub(crate) appends: OneOrMore<LogAppended>,
    pub(crate) logs: OneOrMore<Arc<Log>>,
    /// `None` if the append has no frame, because it only checks, or if it is in memory only.
    pub(crate) position: Option<Position>,
}

/// A request's answer, with the caller that waits for it. Both have matching types, so that no request
/// gets the answer of another kind. A refusal waits too if it reveals state.
pub(crate) enum WaitingAnswer {
    Append(TicketAnswer, Result<Placement, AppendError>),
    Admin(AnswerPromise<(), AdminError>, Result<(), AdminError>),
    Trim(AnswerPromise<Lsn, TrimError>, Result<Lsn, TrimError>),
    Fence(
        AnswerPromise<Fenced, FenceError>,
        Result<Fenced, FenceError>,
    ),
    /// The cursor as it is now; `None` if it was deleted.
    Cursor(
        AnswerPromise<Option<NamedCursor>, CursorError>,
        Result<Option<NamedCursor>, CursorError>,
    ),
    /// The answer is the durable position at the time of the answer.
    Sync(AnswerPromise<Position, SyncError>, Result<(), SyncError>),
    /// For each trim by retention, the first record that was kept before; `None` if there was nothing left to do.
    Expire(
        AnswerPromise<Vec<Option<Lsn>>, AppendError>,
        Result<Vec<Option<Lsn>>, AppendError>,
    ),
}

impl WaitingAnswer {
    /// Turns the answer into a refusal.
    pub(super) fn refuse(&mut self, error: AppendError) {
        match self {
            Self::Append(_, result) => *result = Err(error),
            Self::Admin(_, result) => *result = Err(error.into()),
            Self::Trim(_, result) => *result = Err(error.into()),
            Self::Fence(_, result) => *result = Err(error.into()),
            Self::Cursor(_, result) => *result = Err(error.into()),
            Self::Sync(_, result) => *result = Err(error.into()),
            Self::Expire(_, result) => *result = Err(error),
        }
    }

    pub(super) fn is_refusal(&self) -> bool {
        match self {
            Self::Append(_, result) => result.is_err(),
            Self::Admin(_, result) => result.is_err(),
            Self::Trim(_, result) => result.is_err(),
            Self::Fence(_, result) => result.is_err(),
            Self::Cursor(_, result) => result.is_err(),
            Self::Sync(_, result) => result.is_err(),
            Self::Expire(_, result) => result.is_err(),
        }
    }
}

/// One request that waits.
pub(crate) struct Waiter {
    /// Everything below must have reached the level before the answer.
    pub(crate) need: Position,
    /// The level that was asked for.
    pub(crate) level: Durability,
    pub(crate) reply: WaitingAnswer,
    /// Bytes that the answer returns to the budget.
    pub(crate) cost: u64,
    pub(crate) requests: u32,
    /// When the request was written.
    pub(crate) since: Instant,
    /// Phases of the request's time until then.
    pub(crate) times: AppendTimes,
}

/// A written and not yet flushed group: its end, and the logs whose readers must wake.
pub(super) type UnflushedGroup = (Position, Vec<Arc<Log>>);

/// Unflushed groups that are kept apart. Further groups share one entry, which lists each log about
/// once: its size follows the number of logs, and not the number of groups in a segment.
const MOST_GROUPS: usize = 64;
/// Logs that an entry may list before duplicates are removed.
const FEW_LOGS: usize = 1024;

/// When a group was written.
struct Written {
    end: Position,
    at: Instant,
    /// Bytes whose flush is due within the sync interval without a request, if there are any, and when the first of them
    /// were written.
    scheduled: Option<(Instant, u64)>,
}

#[derive(Default)]
pub(super) struct Waiting {
    pub(super) waiters: Vec<Waiter>,
    groups: VecDeque<UnflushedGroup>,
    /// Logs of the last shared entry without duplicates, when these were removed last.
    distinct: usize,
    /// The newest flush covers all bytes below this position.
    flushing: Position,
    times: VecDeque<Written>,
    /// Logs with trims that take effect once everything below the position is settled, in order.
    trims: VecDeque<(Position, Arc<Log>)>,
}

impl Waiting {
    pub(super) fn written(
        &mut self,
        group: UnflushedGroup,
        bytes: u64,
        scheduled: bool,
        at: Instant,
    ) {
        let scheduled = scheduled.then_some((at, bytes));
        match self.times.back_mut() {
            // If no flush happens for long, old groups are counted together.
            Some(last) if self.groups.len() > MOST_GROUPS => {
                last.end = group.0;
                last.scheduled = match (last.scheduled, scheduled) {
                    (Some((at, before)), Some((_, more))) => Some((at, before + more)),
                    (before, more) => before.or(more),
                };
            }
            _ => self.times.push_back(Written {
                end: group.0,
                at,
                scheduled,
            }),
        }
        self.share_last();
        self.groups.push_back(group);
    }

    /// Merges the last two groups if there are many. Both are published, so every later flush covers
    /// both. The newest flush must not cover only the first: its readers would wait for another flush.
    fn share_last(&mut self) {
        if self.groups.len() <= MOST_GROUPS {
            return;
        }
        let Some((end, logs)) = self.groups.pop_back() else {
            return;
        };
        match self.groups.back_mut() {
            Some(before) if self.flushing < before.0 || end <= self.flushing => {
                before.0 = end;
                before.1.extend(logs);
                if before.1.len() > FEW_LOGS.max(2 * self.distinct) {
                    before.1.sort_unstable_by_key(|log| log.id);
                    before.1.dedup_by_key(|log| log.id);
                    self.distinct = before.1.len();
                }
            }
            _ => {
                self.groups.push_back((end, logs));
                self.distinct = 0;
            }
        }
    }

    /// Notes that a flush begins that covers all bytes below `target`.
    pub(super) fn begin_flush(&mut self, target: Position) {
        self.flushing = target;
    }

    /// Unflushed groups that are kept, and the logs that they list.
    #[cfg(test)]
    pub(super) fn kept(&self) -> (usize, usize) {
        let logs = self.groups.iter().map(|(_, logs)| logs.len());
        (self.groups.len(), logs.sum())
    }

    /// Time since which written bytes have been unflushed.
    pub(super) fn unflushed_since(&self) -> Option<Instant> {
        self.times.front().map(|written| written.at)
    }

    /// Time since which bytes wait for a scheduled flush, and their number.
    pub(super) fn scheduled(&self) -> Option<(Instant, u64)> {
        let scheduled = self.times.iter().filter_map(|written| written.scheduled);
        scheduled.reduce(|(at, before), (_, more)| (at, before + more))
    }

    pub(super) fn trimming(&mut self, end: Position, log: Arc<Log>) {
        self.trims.push_back((end, log));
    }

    /// Drops trims in frames beyond `position`, which were taken back.
    pub(super) fn forget_trims(&mut self, position: Position) {
        let kept = self.trims.partition_point(|(end, _)| *end <= position);
        self.trims.truncate(kept);
    }

    /// Applies the trims that are on the device, and in the replica if there is one.
    pub(super) fn apply_trims(&mut self, settled: Position) {
        // Without a visit to the others: many wait while the replica is behind.
        let through = self.trims.partition_point(|(end, _)| *end <= settled);
        for (_, log) in self.trims.drain(..through) {
            log.state.write().apply_trims(settled);
        }
    }

    pub(super) fn take_below(&mut self, durable: Position) -> (Vec<Waiter>, Vec<UnflushedGroup>) {
        let mut ready = Vec::with_capacity(self.waiters.len());
        let mut rest = Vec::new();
        for waiter in self.waiters.drain(..) {
            if waiter.need <= durable {
                ready.push(waiter);
            } else {
                rest.push(waiter);
            }
        }
        self.waiters = rest;
        let count = self.groups.partition_point(|(end, _)| *end <= durable);
        let groups = self.groups.drain(..count).collect();
        let count = self.times.partition_point(|written| written.end <= durable);
        self.times.drain(..count);
        (ready, groups)
    }

    pub(super) fn take_all(&mut self) -> (Vec<Waiter>, VecDeque<UnflushedGroup>) {
        (
            std::mem::take(&mut self.waiters),
            std::mem::take(&mut self.groups),
        )
    }
}

impl Journal {
    /// Answers one request. Everything that its answer rests on is as safe as `reached`. Without the lease of this node
    /// nobody knows whether another node owns the store by now.
    pub(crate) fn answer(&self, mut waiter: Waiter, reached: Durability) {
        if let Some(replication) = self.replication().filter(|it| !it.may_answer()) {
            replication.refuse(&mut waiter);
        }
        self.answer_anyway(waiter, reached);
    }

    /// Answers one request, also if another node owns the store.
    pub(super) fn answer_anyway(&self, waiter: Waiter, reached: Durability) {
        self.inflight.fetch_sub(waiter.cost, Ordering::SeqCst);
        match waiter.reply {
            WaitingAnswer::Append(ticket, Ok(placement)) => {
                let replicated_lsns = match self.replication() {
                    None => OneOrMore::new(),
                    Some(replication) => {
                        let replicated = replication.replicated();
                        let logs = placement.logs.iter();
                        logs.map(|log| log.state.read().tail(replicated)).collect()
                    }
                };
                let durable = self.durable();
                let logs = placement.logs.iter();
                let durable_lsns = logs.map(|log| log.state.read().tail(durable)).collect();
                let mut times = waiter.times;
                if reached == Durability::Durable {
                    times.flush = self.clock.monotonic().duration_since(waiter.since);
                }
                ticket.settle(Ok(Appended {
                    appends: placement.appends,
                    durable_lsns,
                    replicated_lsns,
                    durability: reached,
                    position: placement.position,
                    times,
                }));
            }
            WaitingAnswer::Append(ticket, Err(error)) => ticket.settle(Err(error)),
            WaitingAnswer::Admin(promise, result) => promise.keep(result),
            WaitingAnswer::Trim(promise, result) => promise.keep(result),
            WaitingAnswer::Fence(promise, result) => promise.keep(result),
            WaitingAnswer::Cursor(promise, result) => promise.keep(result),
            WaitingAnswer::Sync(promise, result) => promise.keep(result.map(|()| self.durable())),
            WaitingAnswer::Expire(promise, result) => promise.keep(result),
        }
    }

    /// Answers one request after the journal failed. A request that was handed to a write may or may
    /// not survive; a refused request certainly did nothing.
    pub(super) fn answer_failed(&self, mut waiter: Waiter) {
        let Some(error) = self.failure() else { return };
        waiter.reply.refuse(match waiter.reply.is_refusal() {
            true => AppendError::JournalFailed(error),
            false => AppendError::Unknown(error),
        });
        self.answer_anyway(waiter, Durability::Accepted);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;
    use crate::api::record::LogConfig;
    use crate::base::clock::{Clock, SystemClock};
    use crate::base::ids::{LogId, LogName, Timestamp};

    fn log(number: u64) -> Arc<Log> {
        let (id, name) = (LogId::new(number), LogName::new("a").unwrap());
        let zero = Timestamp::default();
        let config = LogConfig::default();
        Arc::new(Log::new(id, name, config, zero, Position::ZERO))
    }

    #[test]
    fn scheduled_bytes_are_counted_in_few_entries_beside_others() {
        let mut waiting = Waiting::default();
        let (mut end, log, began) = (Position::ZERO, log(1), SystemClock.monotonic());
        for n in 0..10_000 {
            end = end.advance(8);
            let (group, at) = (
                (end, vec![Arc::clone(&log)]),
                began + Duration::from_secs(n),
            );
            waiting.written(group, 8, n % 2 == 1, at);
            assert!(waiting.times.len() < MOST_GROUPS + 4);
        }
        let first = began + Duration::from_secs(1);
        assert_eq!(waiting.scheduled(), Some((first, 40_000)));
        assert_eq!(waiting.unflushed_since(), Some(began));
        drop(waiting.take_below(end));
        assert_eq!(waiting.scheduled(), None);
    }

    #[test]
    fn unflushed_groups_stay_few_and_each_flush_names_its_logs() {
        let logs: Vec<Arc<Log>> = (0..300).map(log).collect();
        for seed in 0..20 {
            let mut random = StdRng::seed_from_u64(seed);
            let mut waiting = Waiting::default();
            let mut unflushed: Vec<(Position, LogId)> = Vec::new();
            let mut end = Position::ZERO;
            let mut target = None;
            for _ in 0..30_000 {
                end = end.advance(8);
                let log = &logs[random.random_range(0..logs.len())];
                let group = (end, vec![Arc::clone(log)]);
                waiting.written(group, 8, false, SystemClock.monotonic());
                unflushed.push((end, log.id));
                let (groups, listed) = waiting.kept();
                assert!(groups < MOST_GROUPS + 4, "{groups} groups, seed {seed}");
                assert!(listed < 4 * FEW_LOGS, "{listed} logs, seed {seed}");
                match target {
                    None if random.random_range(0..1000) == 0 => {
                        waiting.begin_flush(end);
                        target = Some(end);
                    }
                    Some(durable) if random.random_range(0..500) == 0 => {
                        let (_, groups) = waiting.take_below(durable);
                        let woken: Vec<LogId> = groups
                            .iter()
                            .flat_map(|(_, logs)| logs.iter().map(|log| log.id))
                            .collect();
                        unflushed.retain(|(end, id)| {
                            let covered = *end <= durable;
                            assert!(!covered || woken.contains(id), "seed {seed}");
                            !covered
                        });
                        target = None;
                    }
                    _ => {}
                }
            }
        }
    }
}
