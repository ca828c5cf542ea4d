//! Conditions of a batch, checked by the committer in the same step that assigns lsns.

use std::collections::HashMap;
use std::sync::Arc;

use super::extras::Extras;
use super::{Log, Logs};
use crate::api::config::Bounds;
use crate::api::error::{AppendError, Bounded, FailedCheck, FailedCondition, InvalidBatch};
use crate::api::quota::QuotaCounts;
use crate::api::record::{Batch, CursorCommit, Guard, LogRecords};
use crate::base::ids::{LogName, Lsn, Position};
use crate::format::frame::{HEADER_BYTES, producer_len};
use crate::logs::quotas::QuotaRequest;
use crate::logs::quotas::tenants::{Additions, QuotaId};

/// Result of checking a batch. `reveals`: the answer reveals state that is only as safe as this position.
pub(crate) enum CheckedBatch {
    Passed {
        reveals: Position,
    },
    Refused {
        error: AppendError,
        reveals: Position,
    },
}

/// Effect of an append to a log that does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Creation {
    /// It creates the log.
    ByAppend,
    /// It is refused: logs are created by request only.
    ByRequest,
    /// It is refused: the log may have existed, and be lost to damage.
    Unproven,
}

/// Limits that the settings set for a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allowed {
    pub(crate) creation: Creation,
    /// Maximum number in one log.
    pub(crate) max_producers: u64,
    pub(crate) max_cursors: u64,
    /// Bounds on all logs together.
    pub(crate) bounds: Bounds,
    /// Bytes that the next frame takes for the directory of the group before.
    pub(crate) directory_bytes: u64,
    /// Bytes that encryption adds to the frame of each batch.
    pub(crate) sealed_bytes: usize,
}

/// Role in the batch of a log with a guard.
#[derive(Clone, Copy, PartialEq, Eq)]
enum GuardRole {
    /// The batch writes to the log: if the log was fenced, the batch must name the writer epoch.
    Written,
    /// The batch only checks the log.
    Other,
}

/// Checks every condition of a batch. `targets[i]` is the log of `batch.logs[i]`, if it exists. Reports all
/// conditions that fail, not only the first.
pub(crate) fn check(
    logs: &Logs,
    batch: &Batch,
    targets: &[Option<Arc<Log>>],
    allowed: &Allowed,
) -> CheckedBatch {
    let mut reveals = Position::ZERO;
    let mut failed = Vec::new();
    let mut refused = None;
    let mut wanted = QuotaRequest::default();
    let mut of_tenants = Additions::default();
    let mut first = true;
    for (records, target) in batch.logs.iter().zip(targets) {
        let mut quota = check_guard(
            &records.log,
            target.as_deref(),
            (&records.guard, GuardRole::Written),
            &mut reveals,
            &mut failed,
        );
        if refused.is_none() {
            refused = refuse(records, target.as_deref(), allowed, batch.joined > 0);
        }
        if target.is_none() {
            quota = logs.quota_of(&records.log);
        }
        let mut adds = quota.map(|quota| of_tenants.of(quota, &records.log));
        if let Some(adds) = &mut adds {
            let directory = if first { allowed.directory_bytes } else { 0 };
            let frame = most_frame_bytes(records).saturating_add(allowed.sealed_bytes);
            adds.stored_bytes += frame as u64 + directory;
        }
        first = false;
        add(records, target.as_deref(), &mut wanted, adds);
    }
    for other in &batch.checks {
        let log = logs.by_name(other.log.as_str());
        check_guard(
            &other.log,
            log.as_deref(),
            (&other.guard, GuardRole::Other),
            &mut reveals,
            &mut failed,
        );
    }
    // Number of cursors that the batch creates, by log: together they must find room.
    let mut made = HashMap::new();
    for commit in &batch.cursors {
        let log = logs.by_name(commit.log.as_str());
        if let Some(log) = &log {
            reveals = reveals.max(log.state.read().last_end);
        }
        let made = made.entry(&commit.log).or_default();
        let made = (made, &mut wanted, &mut of_tenants);
        let error = check_cursor(log.as_deref(), commit, allowed, made, &mut failed);
        refused = refused.or(error);
    }
    if !failed.is_empty() {
        return CheckedBatch::Refused {
            error: AppendError::ConditionsFailed(failed),
            reveals,
        };
    }
    if refused.is_none()
        && wanted.is_something()
        && let Some(log) = named_first(batch)
    {
        refused = allowed.bounds.refuse(&logs.holdings(), &wanted, log);
    }
    let refused = refused.or_else(|| logs.over_quota(&of_tenants));
    match refused {
        Some(error) => CheckedBatch::Refused { error, reveals },
        None => CheckedBatch::Passed { reveals },
    }
}

/// The log that a refusal of the whole batch names.
fn named_first(batch: &Batch) -> Option<&LogName> {
    let written = batch.logs.first().map(|records| &records.log);
    written.or_else(|| batch.cursors.first().map(|commit| &commit.log))
}

/// Counts the additions of one log's part of a batch to the totals of the store, and to its quota.
fn add(
    records: &LogRecords,
    log: Option<&Log>,
    wanted: &mut QuotaRequest,
    mut of_tenant: Option<&mut QuotaCounts>,
) {
    if log.is_none() {
        wanted.add_log(&records.log);
        if let Some(adds) = &mut of_tenant {
            adds.logs += 1;
        }
    }
    let Some(producer) = &records.producer else {
        return;
    };
    let known = log.is_some_and(|log| {
        let state = log.state.read();
        let extras = state.extras.as_deref();
        extras.is_some_and(|extras| extras.producers.knows(&producer.id))
    });
    if !known {
        wanted.add_producer(&producer.id);
        if let Some(adds) = of_tenant {
            adds.producers += 1;
        }
    }
}

/// Maximum number of bytes that the frame with the records of one log takes, without a directory.
pub(crate) fn most_frame_bytes(records: &LogRecords) -> usize {
    let body = usize::try_from(records.records.stored_bytes()).unwrap_or(usize::MAX);
    HEADER_BYTES
        .saturating_add(body.checked_next_multiple_of(8).unwrap_or(usize::MAX))
        .saturating_add(records.producer.as_ref().map_or(0, producer_len))
}

/// Checks the conditions of a batch on one log. Returns the quota of the log.
fn check_guard(
    name: &LogName,
    log: Option<&Log>,
    (guard, part): (&Guard, GuardRole),
    reveals: &mut Position,
    failed: &mut Vec<FailedCondition>,
) -> Option<QuotaId> {
    let (tail, epoch, quota) = log.map_or((Lsn::ZERO, 0, None), |log| {
        let state = log.state.read();
        *reveals = (*reveals).max(state.last_end);
        (state.next, state.writer_epoch(), state.quota)
    });
    let mut fail = |check| {
        failed.push(FailedCondition {
            log: name.clone(),
            check,
        })
    };
    if let Some(expected) = guard.log_id
        && log.map(|log| log.id) != Some(expected)
    {
        fail(FailedCheck::LogReplaced {
            expected,
            actual: log.map(|log| log.id),
        });
    }
    if guard.must_exist && log.is_none() {
        fail(FailedCheck::LogMissing);
    }
    if let Some(log) = log.filter(|_| guard.must_not_exist) {
        fail(FailedCheck::LogExists { log_id: log.id });
    }
    let unsaid = if part == GuardRole::Written { 0 } else { epoch };
    if guard.writer_epoch.unwrap_or(unsaid) != epoch {
        fail(FailedCheck::Fenced {
            given: guard.writer_epoch,
            current: epoch,
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
    quota
}

/// The error with which the state of a log refuses a request, apart from conditions.
fn refuse(
    records: &LogRecords,
    log: Option<&Log>,
    allowed: &Allowed,
    joined: bool,
) -> Option<AppendError> {
    let Some(log) = log else {
        let log = records.log.clone();
        return match allowed.creation {
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
    let limit = allowed.max_producers;
    if let Some((producer, extras)) = records.producer.as_ref().zip(state.extras.as_deref())
        && extras.producers.len() >= limit
        && !extras.producers.knows(&producer.id)
    {
        return Some(AppendError::Quota {
            log: log.name.clone(),
            what: Bounded::ProducersOfLog,
            used: extras.producers.len(),
            limit,
            tenant: None,
        });
    }
    let limit = u64::from(state.config.max_record_bytes?);
    // Joined records fitted the limit when they were joined; it may have been lowered since.
    if joined || records.records.largest() <= limit {
        return None;
    }
    let (index, bytes) = (0..)
        .zip(records.records.iter().map(|record| record.bytes()))
        .find(|(_, bytes)| *bytes > limit)?;
    let log = log.name.clone();
    Some(AppendError::Invalid(InvalidBatch::RecordTooLarge {
        log,
        index,
        bytes,
        limit,
    }))
}

/// Checks the conditions of a cursor commit, and counts a new cursor in `made`, `wanted` and `of_tenants`. Before,
/// `made` is the number of cursors that the request already creates in the log, `wanted` its additions to the store,
/// and `of_tenants` its additions to quotas.
pub(crate) fn check_cursor<'a>(
    log: Option<&Log>,
    commit: &'a CursorCommit,
    allowed: &Allowed,
    (made, wanted, of_tenants): (&mut u64, &mut QuotaRequest, &mut Additions<'a>),
    failed: &mut Vec<FailedCondition>,
) -> Option<AppendError> {
    let mut fail = |check| {
        failed.push(FailedCondition {
            log: commit.log.clone(),
            check,
        });
    };
    let id = log.map(|log| log.id);
    if let Some(expected) = commit.log_id.filter(|expected| Some(*expected) != id) {
        fail(FailedCheck::LogReplaced {
            expected,
            actual: id,
        });
    }
    let Some(log) = log else {
        return Some(AppendError::LogNotFound {
            log: commit.log.clone(),
        });
    };
    let state = log.state.read();
    let extras = state.extras.as_deref();
    let mark = extras.and_then(|extras| *extras.cursors.get(&commit.cursor)?.newest());
    let actual = mark.map_or(Lsn::ZERO, |mark| mark.lsn);
    if let Some(expected) = commit.expected_lsn.filter(|expected| *expected != actual) {
        fail(FailedCheck::CursorMismatch {
            cursor: commit.cursor.clone(),
            expected,
            actual,
        });
    }
    if commit.lsn > state.next {
        return Some(AppendError::CursorBeyondTail {
            log: commit.log.clone(),
            cursor: commit.cursor.clone(),
            tail: state.next,
            asked: commit.lsn,
        });
    }
    if mark.is_some() {
        return None;
    }
    let limit = allowed.max_cursors;
    let there = extras.map_or(0, Extras::cursor_count) + *made;
    *made += 1;
    wanted.add_cursor(&commit.cursor);
    if let Some(quota) = state.quota {
        of_tenants.of(quota, &commit.log).cursors += 1;
    }
    (there >= limit).then(|| AppendError::Quota {
        log: commit.log.clone(),
        what: Bounded::CursorsOfLog,
        used: there,
        limit,
        tenant: None,
    })
}
