//! Conditions of a batch, checked by the committer in the same step that assigns lsns.

use std::sync::Arc;

use super::{Log, Logs};
use crate::error::{AppendError, FailedCheck, FailedCondition, InvalidBatch};
use crate::ids::{LogName, Lsn, Position};
use crate::record::{Batch, Guard, LogRecords};

/// What came of checking a batch. `reveals`: the answer tells of state that is only
/// as safe as this position.
pub(crate) enum Checked {
    Passed {
        reveals: Position,
    },
    Refused {
        error: AppendError,
        reveals: Position,
    },
}

/// What happens to an append to a log that does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Creation {
    /// It creates the log.
    ByAppend,
    /// It is refused: logs are created by request only.
    ByRequest,
    /// It is refused: the log may have existed, and be lost to damage.
    Unproven,
}

/// Checks every condition of a batch. `targets[i]` is the log of `batch.logs[i]`, if
/// it exists. All conditions that fail are told, not only the first.
pub(crate) fn check(
    logs: &Logs,
    batch: &Batch,
    targets: &[Option<Arc<Log>>],
    creation: Creation,
) -> Checked {
    let mut reveals = Position::ZERO;
    let mut failed = Vec::new();
    let mut refused = None;
    for (records, target) in batch.logs.iter().zip(targets) {
        check_guard(
            &records.log,
            target.as_deref(),
            &records.guard,
            &mut reveals,
            &mut failed,
        );
        if refused.is_none() {
            refused = refuse(records, target.as_deref(), creation);
        }
    }
    for other in &batch.checks {
        let log = logs.by_name(other.log.as_str());
        check_guard(
            &other.log,
            log.as_deref(),
            &other.guard,
            &mut reveals,
            &mut failed,
        );
    }
    if !failed.is_empty() {
        return Checked::Refused {
            error: AppendError::ConditionsFailed(failed),
            reveals,
        };
    }
    match refused {
        Some(error) => Checked::Refused { error, reveals },
        None => Checked::Passed { reveals },
    }
}

fn check_guard(
    name: &LogName,
    log: Option<&Log>,
    guard: &Guard,
    reveals: &mut Position,
    failed: &mut Vec<FailedCondition>,
) {
    let tail = log.map_or(Lsn::ZERO, |log| {
        let state = log.state.read();
        *reveals = (*reveals).max(state.last_end);
        state.next
    });
    let mut fail = |check| {
        failed.push(FailedCondition {
            log: name.clone(),
            check,
        })
    };
    if guard.must_exist && log.is_none() {
        fail(FailedCheck::LogMissing);
    }
    if let Some(log) = log.filter(|_| guard.must_not_exist) {
        fail(FailedCheck::LogExists { log_id: log.id });
    }
    if let Some(expected) = guard.log_id
        && log.map(|log| log.id) != Some(expected)
    {
        fail(FailedCheck::LogReplaced {
            expected,
            actual: log.map(|log| log.id),
        });
    }
    if let Some(expected) = guard.expected_lsn
        && expected != tail
    {
        fail(FailedCheck::PositionMismatch {
            expected,
            actual: tail,
        });
    }
}

/// What the state of a log forbids, apart from conditions.
fn refuse(records: &LogRecords, log: Option<&Log>, creation: Creation) -> Option<AppendError> {
    let Some(log) = log else {
        let log = records.log.clone();
        return match creation {
            Creation::ByAppend => None,
            Creation::ByRequest => Some(AppendError::LogNotFound { log }),
            Creation::Unproven => Some(AppendError::TailUnproven {
                log,
                from: Lsn::ZERO,
            }),
        };
    };
    let state = log.state.read();
    if state.unproven {
        return Some(AppendError::TailUnproven {
            log: log.name.clone(),
            from: state.next,
        });
    }
    let limit = u64::from(state.config.max_record_bytes?);
    let (index, bytes) = (0..)
        .zip(records.records.iter().map(super::submit::record_bytes))
        .find(|(_, bytes)| *bytes > limit)?;
    let log = log.name.clone();
    Some(AppendError::Invalid(InvalidBatch::RecordTooLarge {
        log,
        index,
        bytes,
        limit,
    }))
}
