//! Requests that have been carried out and wait to be as safe as they asked for.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Journal;
use crate::engine::{Appended, LogAppended};
use crate::error::{AdminError, AppendError, SyncError};
use crate::ids::Position;
use crate::local::Log;
use crate::record::Durability;
use crate::ticket::{Promise, TicketAnswer};

/// Who is to be told.
pub(crate) enum Answer {
    Ticket(TicketAnswer),
    Admin(Promise<Result<(), AdminError>>),
    Sync(Promise<Result<Position, SyncError>>),
}

/// What to tell, once it is safe to.
pub(crate) enum Outcome {
    Appended {
        appends: Vec<LogAppended>,
        logs: Vec<Arc<Log>>,
        position: Option<Position>,
    },
    /// A refusal: waits too, because it reveals state.
    Refused(AppendError),
    AdminRefused(AdminError),
    Done,
}

/// One request that waits.
pub(crate) struct Waiter {
    /// Everything below must have reached the level before the answer.
    pub(crate) need: Position,
    pub(crate) answer: Answer,
    pub(crate) outcome: Outcome,
    /// Bytes that the answer gives back to the budget.
    pub(crate) cost: u64,
    /// When the request was written.
    pub(crate) since: Instant,
}

/// A written and not yet flushed group: where it ends, and whose readers to wake.
type Group = (Position, Vec<Arc<Log>>);

#[derive(Default)]
pub(super) struct Waiting {
    pub(super) waiters: Vec<Waiter>,
    groups: VecDeque<Group>,
    times: VecDeque<(Position, Instant)>,
}

impl Waiting {
    pub(super) fn written(&mut self, end: Position, touched: Vec<Arc<Log>>, now: Instant) {
        self.groups.push_back((end, touched));
        self.times.push_back((end, now));
    }

    pub(super) fn unflushed_since(&self) -> Option<Instant> {
        self.times.front().map(|(_, at)| *at)
    }

    pub(super) fn take_below(&mut self, durable: Position) -> (Vec<Waiter>, Vec<Group>) {
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
        let count = self.times.partition_point(|(end, _)| *end <= durable);
        self.times.drain(..count);
        (ready, groups)
    }

    pub(super) fn take_all(&mut self) -> (Vec<Waiter>, VecDeque<Group>) {
        (
            std::mem::take(&mut self.waiters),
            std::mem::take(&mut self.groups),
        )
    }
}

impl Journal {
    /// Tells one request its outcome, `reached` being how safe everything it rests on
    /// is now.
    pub(crate) fn answer(&self, waiter: Waiter, reached: Durability) {
        self.inflight.fetch_sub(waiter.cost, Ordering::SeqCst);
        match (waiter.answer, waiter.outcome) {
            (
                Answer::Ticket(ticket),
                Outcome::Appended {
                    appends,
                    logs,
                    position,
                },
            ) => {
                let durable = self.durable();
                let durable_lsns = logs
                    .iter()
                    .map(|log| log.state.read().tail(durable))
                    .collect();
                ticket.settle(Ok(Appended {
                    appends,
                    durable_lsns,
                    durability: reached,
                    position,
                }));
            }
            (Answer::Ticket(ticket), Outcome::Refused(error)) => ticket.settle(Err(error)),
            (Answer::Ticket(ticket), Outcome::AdminRefused(_) | Outcome::Done) => {
                debug_assert!(false, "an append has an append's outcome");
                ticket.settle(Err(AppendError::Draining));
            }
            (Answer::Admin(promise), Outcome::AdminRefused(error)) => promise.keep(Err(error)),
            (Answer::Admin(promise), Outcome::Refused(error)) => promise.keep(Err(error.into())),
            (Answer::Admin(promise), _) => promise.keep(Ok(())),
            (Answer::Sync(promise), _) => promise.keep(Ok(self.durable())),
        }
    }

    /// Tells one request that the journal failed. An append that was handed to a write
    /// may or may not survive; a refusal certainly did nothing.
    pub(super) fn answer_failed(&self, waiter: Waiter) {
        let Some(error) = self.failure() else { return };
        self.inflight.fetch_sub(waiter.cost, Ordering::SeqCst);
        let refused = matches!(
            waiter.outcome,
            Outcome::Refused(_) | Outcome::AdminRefused(_)
        );
        let told = if refused {
            AppendError::JournalFailed(Arc::clone(&error))
        } else {
            AppendError::Unknown(Arc::clone(&error))
        };
        match waiter.answer {
            Answer::Ticket(ticket) => ticket.settle(Err(told)),
            Answer::Admin(promise) => promise.keep(Err(told.into())),
            Answer::Sync(promise) => promise.keep(Err(SyncError::JournalFailed(error))),
        }
    }
}
