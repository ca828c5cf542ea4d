//! The group at hand: the requests that the next write answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::tail::Started;
use super::void::Undo;
use super::{COALESCED_BYTES, NEVER};
use crate::api::engine::AppendTimes;
use crate::api::error::{AppendError, FreeSpace};
use crate::api::record::{Compression, Durability};
use crate::api::session::Session;
use crate::base::ids::{Lsn, Position};
use crate::format::frame::HEADER_BYTES;
use crate::journal::{Journal, Waiter, WaitingAnswer};
use crate::logs::Log;

/// A frame that still accepts records of its log.
pub(super) struct OpenFrame {
    pub(super) frame: Started,
    pub(super) log: Arc<Log>,
    pub(super) first_lsn: Lsn,
    pub(super) count: u32,
    /// Requests in the frame.
    pub(super) requests: u64,
    pub(super) compression: Compression,
}

impl OpenFrame {
    /// Whether `size` bytes of records of `requests` requests may join the frame. `end`: offset in the group
    /// behind the frame so far.
    pub(super) fn accepts(&self, log: &Log, size: usize, requests: u64, end: usize) -> bool {
        // The body may shrink when the frame is finished. Then only the header has room for positions.
        let room = self.compression == Compression::None
            || self.requests + requests <= HEADER_BYTES as u64;
        let fits = end - self.frame.at + size <= COALESCED_BYTES;
        self.log.id == log.id && room && fits
    }
}

/// An answer to give when the group is written.
pub(super) struct PendingAnswer {
    pub(super) level: Durability,
    /// `None`: the end of the group.
    pub(super) need: Option<Position>,
    pub(super) reply: WaitingAnswer,
    pub(super) cost: u64,
    pub(super) requests: u32,
    /// In memory only: answered as accepted.
    pub(super) buffered: bool,
    /// Time that the request was queued.
    pub(super) queue: Duration,
    pub(super) session: Option<Session>,
}

/// The requests of the group at hand, and the way back.
///
/// Invariants:
/// - While the tail has no frame of the group, no frame is open, and `readers` and `records` are empty.
/// - `open` is the last frame in the tail.
/// - `undo` restores every log that the group changed.
/// - No request in `pending` or `deletions` is answered before the group is written or taken back.
/// - Every log in `deletions` has its deletion in this group, and no other frame follows in the group than
///   deletions of other logs.
pub(super) struct Group {
    pub(super) open: Option<OpenFrame>,
    pub(super) undo: Undo,
    pub(super) pending: Vec<PendingAnswer>,
    /// Logs whose deletion is in the group, and the answers to these deletions.
    pub(super) deletions: Vec<(Arc<Log>, PendingAnswer)>,
    /// Logs of the group, whose readers are woken.
    pub(super) readers: Vec<Arc<Log>>,
    pub(super) records: u64,
    /// Whether the group contains bytes whose flush is scheduled.
    pub(super) scheduled: bool,
    /// Start of the turn, and duration of the group's write.
    pub(super) turn_began: Instant,
    pub(super) write_took: Duration,
}

impl Group {
    pub(super) fn new(turn_began: Instant) -> Self {
        Self {
            open: None,
            undo: Undo::default(),
            pending: Vec::new(),
            deletions: Vec::new(),
            readers: Vec::new(),
            records: 0,
            scheduled: false,
            turn_began,
            write_took: Duration::ZERO,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_none() && self.readers.is_empty() && self.records == 0 && !self.scheduled
    }

    /// Answers requests whose position is reached, or leaves them to the flush.
    pub(super) fn answer(&mut self, journal: &Journal) {
        let (written, durable) = (journal.written(), journal.durable());
        let settled = journal.settled();
        let mut durable_only = Vec::new();
        let now = journal.clock.monotonic();
        let failed = journal.failure().is_some();
        let write = std::mem::take(&mut self.write_took);
        let encode = now
            .saturating_duration_since(self.turn_began)
            .saturating_sub(write);
        let mut handed = Vec::with_capacity(self.pending.len());
        for pending in self.pending.drain(..) {
            let PendingAnswer {
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
            let waiter = Waiter {
                need,
                level,
                reply,
                cost,
                requests,
                since: now,
                times: AppendTimes {
                    queue,
                    encode,
                    write,
                    flush: Duration::ZERO,
                    replicate: Duration::ZERO,
                },
            };
            if failed {
                journal.answer_failed(waiter);
            } else if need <= durable && (level < Durability::Replicated || need <= settled) {
                journal.answer(waiter, level.max(Durability::Durable));
            } else if need <= durable {
                durable_only.push(waiter);
            } else if buffered {
                journal.answer(waiter, Durability::Accepted);
            } else if level < Durability::Durable {
                journal.answer(waiter, Durability::Written);
            } else {
                handed.push(waiter);
            }
        }
        journal.await_flush(handed);
        if let Some(replication) = journal.replication().filter(|_| !durable_only.is_empty()) {
            journal.await_replica(replication, durable_only, Vec::new());
        }
    }
}

impl PendingAnswer {
    /// Whether the outcome depends on frames beyond `start`.
    pub(super) fn rests_beyond(&self, start: Position) -> bool {
        !self.buffered && self.need.is_none_or(|need| need > start)
    }

    /// Refuses the request. Nothing of it was done. `nothing_left`: no record is in memory only.
    pub(super) fn refuse(&mut self, start: Position, nothing_left: bool) {
        if let Some(session) = &self.session {
            session.end_in_turn();
        }
        self.need = Some(Position::ZERO);
        match &mut self.reply {
            // Everything before the barrier that was not refused is written.
            WaitingAnswer::Sync(_, result) if nothing_left => {
                self.need = Some(start);
                *result = Ok(());
            }
            reply => reply.refuse(AppendError::DiskFull(FreeSpace::default())),
        }
    }
}
