//! Repeats of batches: recognised before any other check.

use std::sync::Arc;

use super::tail::SegmentTail;
use super::{Committer, Placed};
use crate::api::engine::LogAppended;
use crate::api::error::AppendError;
use crate::api::record::{Batch, Producer};
use crate::base::ids::{LogName, Position};
use crate::format::digest::{ArrivedBatch, Digest};
use crate::journal::Placement;
use crate::logs::Log;
use crate::logs::conditions::Creation;
use crate::logs::producers::{Producers, Recall, Remembered};
use crate::logs::quotas::LogUsage;

/// Kind of a batch.
pub(super) enum Recognised {
    /// A new batch, to be checked and placed.
    New,
    /// A batch that was applied before, with the same answer.
    Repeat(Placed<Placement, AppendError>),
    /// A batch that its producer may not send.
    Refused(Placed<Placement, AppendError>),
}

impl<T: SegmentTail> Committer<T> {
    /// Determines whether a batch was applied before. `targets[i]` is the log of `batch.logs[i]`.
    pub(super) fn recognise(
        &self,
        batch: &Batch,
        targets: &[Option<Arc<Log>>],
        digests: &[u128],
    ) -> Recognised {
        let mut repeats = Vec::new();
        let mut new = false;
        // A refusal reveals the state of every log checked until then.
        let mut reveals = Position::ZERO;
        for ((records, target), digest) in batch.logs.iter().zip(targets).zip(digests) {
            let Some(producer) = &records.producer else {
                return Recognised::New;
            };
            let sent = ArrivedBatch {
                records: &records.records,
                keyed: *digest,
            };
            let id = target.as_ref().map(|log| log.id);
            if records.guard.log_id.is_some_and(|given| Some(given) != id) {
                // The batch is meant for another log: the conditions will report that.
                return Recognised::New;
            }
            let (recall, last_end) = self.recall(target.as_deref(), producer, sent);
            reveals = reveals.max(last_end);
            match (recall, target) {
                (Recall::New, _) => new = true,
                (Recall::Repeat(batch), Some(log)) => repeats.push((log, producer, batch)),
                (recall, _) => {
                    let error = refusal(&records.log, producer, recall);
                    return Recognised::Refused((Some(reveals), Err(error)));
                }
            }
        }
        let Some((log, producer, _)) = repeats.first() else {
            return Recognised::New;
        };
        if new {
            let error = AppendError::ProducerConflict {
                log: log.name.clone(),
                producer: producer.id.clone(),
                sequence: producer.sequence,
                what: "it was part of a batch over other logs",
            };
            return Recognised::Refused((Some(reveals), Err(error)));
        }
        Recognised::Repeat(self.answer_again(&repeats))
    }

    fn recall(
        &self,
        log: Option<&Log>,
        producer: &Producer,
        sent: ArrivedBatch<'_>,
    ) -> (Recall, Position) {
        let window = self.settings.producer_window;
        let recall = |log: &Log| {
            let state = log.state.read();
            let extras = state.extras.as_deref();
            let known = extras.map(|extras| extras.producers.recall(producer, sent, window));
            (known, state.last_end)
        };
        let (known, reveals) = log.map_or((None, Position::ZERO), recall);
        let unknown = || match log {
            // The log cannot be created here: the conditions will report why.
            None if self.creation() != Creation::ByAppend => Recall::New,
            _ => Producers::recall_new(producer),
        };
        (known.unwrap_or_else(unknown), reveals)
    }

    fn answer_again(
        &self,
        repeats: &[(&Arc<Log>, &Producer, Remembered)],
    ) -> Placed<Placement, AppendError> {
        let appends = repeats
            .iter()
            .map(|(log, _, batch)| batch.answer(log.id))
            .collect();
        let newest = repeats.iter().map(|(_, _, batch)| batch.position).max();
        let position = newest.unwrap_or(Position::ZERO);
        let placement = Placement {
            appends,
            logs: repeats.iter().map(|(log, ..)| Arc::clone(log)).collect(),
            position: Some(position),
        };
        // A batch in the current group shares the group's outcome. An older batch is as safe as its own
        // group, which ends beyond the batch.
        let in_group = position >= self.tail.start();
        ((!in_group).then(|| position.advance(1)), Ok(placement))
    }

    /// Remembers the answer for repeats of a batch.
    pub(super) fn remember(
        &mut self,
        log: &Arc<Log>,
        producer: &Producer,
        digest: Digest,
        append: &LogAppended,
        position: Position,
    ) {
        let batch = Remembered {
            digest,
            first_lsn: append.first_lsn,
            count: u32::try_from(append.next_lsn.since(append.first_lsn)).unwrap_or(u32::MAX),
            arrival: append.arrival,
            timestamp: append.timestamp,
            position,
        };
        let window = self.settings.producer_window;
        let (before, there, quota) = {
            let mut state = log.state.write();
            let quota = state.quota;
            let extras = state.extras.get_or_insert_default();
            let producers = extras.change_producers(position);
            let before = producers.remember(producer, batch, window);
            (before, producers.len(), quota)
        };
        if let Some(id) = before.added() {
            self.logs.add(quota, LogUsage::producer(id));
            self.logs.change_producers(there - 1, there);
        }
        self.group.undo.note_remembered(log, before);
    }
}

fn refusal(log: &LogName, producer: &Producer, recall: Recall) -> AppendError {
    let (log, given) = (log.clone(), producer.sequence);
    let id = producer.id.clone();
    match recall {
        Recall::Gap { expected } => AppendError::ProducerGap {
            log,
            producer: id,
            given,
            expected,
        },
        Recall::Fenced { current } => AppendError::ProducerFenced {
            log,
            producer: id,
            given: producer.epoch,
            current,
        },
        Recall::EpochJump { current } => AppendError::EpochJump {
            log,
            producer: Some(id),
            given: producer.epoch,
            current,
        },
        Recall::Expired { oldest } => AppendError::ProducerExpired {
            log,
            producer: id,
            given,
            oldest,
        },
        Recall::Forgotten { first_epoch } => AppendError::ProducerForgotten {
            log,
            producer: id,
            given: producer.epoch,
            first_epoch,
        },
        Recall::Conflict | Recall::New | Recall::Repeat(_) => AppendError::ProducerConflict {
            log,
            producer: id,
            sequence: given,
            what: "the records differ",
        },
    }
}
