//! Errors of appends, and of whatever else goes through the journal.

use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::PreconditionViolation;
use wald_proto::v1::Reason;
use wald_storage::{
    AppendError, FailedCheck, FailedCondition, InvalidBatch, LogName, MAX_EPOCH_RISE, Name, Named,
    Timestamp,
};

use wald_text::units::shown_span;

use super::failure::{Failure, Retry};
use super::{RETRY_LATER, RETRY_SHORTLY, RETRY_SOON, no_replica};
use crate::convert::rfc3339;

/// Retry delay after a quota, which passes only if a client or operator makes room.
const RETRY_QUOTA: Duration = Duration::from_secs(10);

/// Answers an append that was not acknowledged.
pub(crate) fn append(error: &AppendError) -> Status {
    append_failure(error).status()
}

pub(super) fn append_failure(error: &AppendError) -> Failure {
    let message = error.to_string();
    match error {
        AppendError::Invalid(invalid) => invalid_batch(invalid, message),
        AppendError::ConditionsFailed(failed) => conditions(failed, message),
        AppendError::LogNotFound { log } => {
            Failure::new(Code::NotFound, Reason::LogNotFound, message)
                .fact("log", log)
                .refused(Retry::Never)
        }
        AppendError::ProducerGap {
            log,
            producer,
            given,
            expected,
        } => producer_failure(Code::Aborted, Reason::ProducerGap, message, (log, producer))
            .fact("sequence", given)
            .fact("expected", expected),
        AppendError::ProducerFenced {
            log,
            producer,
            given,
            current,
        } => producer_failure(
            Code::FailedPrecondition,
            Reason::ProducerFenced,
            message,
            (log, producer),
        )
        .fact("given_epoch", given)
        .fact("producer_epoch", current),
        AppendError::ProducerExpired {
            log,
            producer,
            given,
            oldest,
        } => producer_failure(
            Code::FailedPrecondition,
            Reason::ProducerExpired,
            message,
            (log, producer),
        )
        .fact("sequence", given)
        .fact("oldest", oldest),
        AppendError::ProducerForgotten {
            log,
            producer,
            given,
            first_epoch,
        } => producer_failure(
            Code::FailedPrecondition,
            Reason::ProducerExpired,
            message,
            (log, producer),
        )
        .fact("given_epoch", given)
        .fact("first_epoch", first_epoch),
        AppendError::ProducerConflict {
            log,
            producer,
            sequence,
            what: _,
        } => producer_failure(
            Code::AlreadyExists,
            Reason::ProducerConflict,
            message,
            (log, producer),
        )
        .fact("sequence", sequence),
        AppendError::EpochJump {
            log,
            producer,
            given,
            current,
        } => {
            let field = match producer {
                Some(_) => "condition.producer.epoch",
                None => "writer_epoch",
            };
            Failure::new(Code::InvalidArgument, Reason::EpochJump, message)
                .fact("log", log)
                .fact_if("producer", producer.as_ref())
                .fact("given_epoch", given)
                .fact("current_epoch", current)
                .fact("limit", MAX_EPOCH_RISE)
                .field(field)
                .refused(Retry::Never)
        }
        AppendError::Quota {
            log,
            what,
            used,
            limit,
            tenant,
        } => Failure::new(Code::ResourceExhausted, Reason::Quota, message)
            .fact("log", log)
            .fact("quota", what.name())
            .fact("setting", what.setting())
            .fact("used", used)
            .fact("limit", limit)
            .fact_if("tenant", tenant.as_ref())
            .refused(Retry::Safe)
            .retry_after(RETRY_QUOTA),
        AppendError::InvisibleName {
            log,
            what,
            name,
            character,
        } => {
            let (reason, field) = match what {
                Named::Log => (Reason::InvalidLogName, "log"),
                Named::Producer => (Reason::InvalidProducer, "condition.producer.id"),
                Named::Cursor => (Reason::InvalidCursorName, "cursor"),
            };
            Failure::new(Code::InvalidArgument, reason, message)
                .fact("log", log)
                .fact("name", name)
                .fact("character", format!("U+{:04X}", u32::from(*character)))
                .fact("setting", "allow_invisible_names")
                .field(field)
                .refused(Retry::Never)
        }
        AppendError::CursorBeyondTail {
            log,
            cursor,
            tail,
            asked,
        } => Failure::new(Code::OutOfRange, Reason::BeyondTail, message)
            .fact("log", log)
            .fact("cursor", cursor)
            .fact("tail_lsn", tail)
            .fact("lsn", asked)
            .refused(Retry::Never),
        AppendError::NotSupported(_) => no_replica("durability").refused(Retry::Never),
        // Only requests behind the one that ended the session get this. The stream ends with
        // that request's own failure.
        AppendError::SessionEnded => {
            Failure::new(Code::Aborted, Reason::SessionEnded, message).refused(Retry::Safe)
        }
        AppendError::TailUnproven { log, from } => {
            Failure::new(Code::DataLoss, Reason::Quarantined, message)
                .fact("log", log)
                .fact("from_lsn", from)
                .refused(Retry::Never)
        }
        AppendError::Busy { inflight, limit } => {
            Failure::new(Code::ResourceExhausted, Reason::Busy, message)
                .fact("inflight_bytes", inflight)
                .fact("limit_bytes", limit)
                .refused(Retry::Safe)
                .retry_after(RETRY_SOON)
        }
        AppendError::ReplicaBehind {
            behind,
            limit,
            segments,
        } => Failure::new(Code::ResourceExhausted, Reason::Busy, message)
            .fact("resource", "replica lag")
            .fact("waiting_bytes", behind)
            .fact("limit_bytes", limit)
            .fact("segments", segments)
            .refused(Retry::Safe)
            .retry_after(RETRY_SOON),
        AppendError::BucketDown => Failure::new(Code::Unavailable, Reason::BucketDown, message)
            .refused(Retry::Safe)
            .retry_after(RETRY_LATER),
        AppendError::Moved { owner, term } => {
            Failure::new(Code::Unavailable, Reason::Moved, message)
                .fact("owner", owner)
                .fact("term", term)
                .refused(Retry::Safe)
                .retry_after(RETRY_SOON)
        }
        AppendError::ReplicationUnknown => {
            Failure::new(Code::Internal, Reason::ReplicationUnknown, message).unknown()
        }
        AppendError::DiskFull(_) => {
            Failure::new(Code::ResourceExhausted, Reason::DiskFull, message)
                .refused(Retry::Safe)
                .retry_after(RETRY_LATER)
        }
        AppendError::NoDescriptors => Failure::new(Code::ResourceExhausted, Reason::Busy, message)
            .fact("resource", "file descriptors")
            .refused(Retry::Safe)
            .retry_after(RETRY_LATER),
        AppendError::Draining => Failure::new(Code::Unavailable, Reason::Draining, message)
            .refused(Retry::Safe)
            .retry_after(RETRY_SHORTLY),
        AppendError::JournalFailed(_) => {
            Failure::new(Code::Unavailable, Reason::JournalFailed, message)
                .refused(Retry::Safe)
                .retry_after(RETRY_LATER)
        }
        AppendError::Unknown(_) => {
            Failure::new(Code::Internal, Reason::JournalFailed, message).unknown()
        }
    }
}

/// A batch that does not follow the producer's last.
fn producer_failure(
    code: Code,
    reason: Reason,
    message: String,
    (log, producer): (&LogName, &Name),
) -> Failure {
    Failure::new(code, reason, message)
        .fact("log", log)
        .fact("producer", producer)
        .refused(Retry::Never)
}

fn invalid_batch(invalid: &InvalidBatch, message: String) -> Failure {
    let failure = |reason| Failure::new(Code::InvalidArgument, reason, message.clone());
    let failure = match invalid {
        InvalidBatch::Empty { log } => failure(Reason::EmptyBatch)
            .fact_if("log", log.as_ref())
            .field("batches"),
        InvalidBatch::DuplicateLog { log } => failure(Reason::DuplicateLog)
            .fact("log", log)
            .field("batches"),
        InvalidBatch::DuplicateCursor { log, cursor } => failure(Reason::DuplicateCursor)
            .fact("log", log)
            .fact("cursor", cursor)
            .field("cursors"),
        InvalidBatch::ProducerMissing { log } => failure(Reason::InvalidProducer)
            .fact("log", log)
            .field("batches"),
        InvalidBatch::RecordTooLarge {
            log,
            index,
            bytes,
            limit,
        } => failure(Reason::RecordTooLarge)
            .fact("log", log)
            .fact("index", index)
            .fact("bytes", bytes)
            .fact("limit_bytes", limit)
            .field(format!("records[{index}]")),
        InvalidBatch::HeadersTooLarge {
            log,
            index,
            headers,
            bytes,
            max_headers,
            max_bytes,
        } => failure(Reason::RecordTooLarge)
            .fact("log", log)
            .fact("index", index)
            .fact("headers", headers)
            .fact("bytes", bytes)
            .fact("limit_headers", max_headers)
            .fact("limit_bytes", max_bytes)
            .field(format!("records[{index}].headers")),
        InvalidBatch::RequestTooLarge {
            records,
            bytes,
            max_records,
            max_bytes,
        } => failure(Reason::RequestTooLarge)
            .fact("records", records)
            .fact("bytes", bytes)
            .fact("limit_records", max_records)
            .fact("limit_bytes", max_bytes)
            .field("batches"),
        InvalidBatch::TooMany { what, count, limit } => failure(Reason::RequestTooLarge)
            .fact(what, count)
            .fact("limit", limit)
            .field(*what),
        InvalidBatch::ChecksumMismatch {
            log,
            index,
            given,
            actual,
        } => failure(Reason::ChecksumMismatch)
            .fact("log", log)
            .fact("index", index)
            .fact("given_crc32c", given)
            .fact("actual_crc32c", actual)
            .field(format!("records[{index}].crc32c")),
        InvalidBatch::TimestampInFuture {
            log,
            index,
            timestamp,
            now,
            ahead_micros,
            max_micros,
        } => Failure::new(
            Code::InvalidArgument,
            Reason::TimestampInFuture,
            format!(
                "record {index} of log {log:?} has the time {}, and the server's clock shows {}; \
                 max_timestamp_ahead allows {} more",
                shown_time(*timestamp),
                shown_time(*now),
                shown_span(Duration::from_micros(max_micros.unsigned_abs())),
            ),
        )
        .fact("log", log)
        .fact("index", index)
        .fact("timestamp_us", timestamp.micros())
        .fact("now_us", now.micros())
        .fact("ahead_us", ahead_micros)
        .fact("limit_us", max_micros)
        .field(format!("records[{index}].timestamp_us")),
    };
    failure.refused(Retry::Never)
}

/// A time in RFC 3339; in microseconds if it is out of the calendar, as nanoseconds are that were
/// given for microseconds.
fn shown_time(time: Timestamp) -> String {
    match rfc3339(time) {
        text if text.is_empty() => format!("{} us", time.micros()),
        text => text,
    }
}

/// The reason of one failed condition; also a label of `wald_condition_failures_total`.
pub(crate) fn condition_reason(check: &FailedCheck) -> Reason {
    match check {
        FailedCheck::PositionMismatch { .. } | FailedCheck::CursorMismatch { .. } => {
            Reason::PositionMismatch
        }
        FailedCheck::Fenced { .. } => Reason::Fenced,
        FailedCheck::LogMissing => Reason::LogMissing,
        FailedCheck::LogExists { .. } => Reason::LogExists,
        FailedCheck::LogReplaced { .. } => Reason::LogReplaced,
    }
}

/// Which of several failed conditions of one log tells the most: that it is another log
/// explains why it stands elsewhere, and not the other way round.
fn rank(check: &FailedCheck) -> u8 {
    match check {
        FailedCheck::LogReplaced { .. } => 0,
        FailedCheck::LogMissing | FailedCheck::LogExists { .. } => 1,
        FailedCheck::Fenced { .. } => 2,
        FailedCheck::PositionMismatch { .. } => 3,
        FailedCheck::CursorMismatch { .. } => 4,
    }
}

/// One failed condition of the first log that has one gives reason and facts; all of them
/// are violations.
fn conditions(failed: &[FailedCondition], message: String) -> Failure {
    let told = failed
        .iter()
        .filter(|condition| condition.log == failed[0].log)
        .min_by_key(|condition| rank(&condition.check));
    let reason = told.map_or(Reason::PositionMismatch, |told| {
        condition_reason(&told.check)
    });
    let mut failure = Failure::new(Code::FailedPrecondition, reason, message).refused(Retry::Never);
    if let Some(told) = told {
        failure = failure
            .fact("log", &told.log)
            .fact("failed_checks", failed.len());
        failure = match &told.check {
            FailedCheck::PositionMismatch { expected, actual } => failure
                .fact("expected_lsn", expected)
                .fact("actual_lsn", actual),
            FailedCheck::Fenced { given, current } => failure
                .fact("writer_epoch", current)
                .fact_if("given_writer_epoch", *given),
            FailedCheck::CursorMismatch {
                cursor,
                expected,
                actual,
            } => failure
                .fact("cursor", cursor)
                .fact("expected_lsn", expected)
                .fact("actual_lsn", actual),
            FailedCheck::LogMissing => failure,
            FailedCheck::LogExists { log_id } => failure.fact("log_id", log_id),
            FailedCheck::LogReplaced { expected, actual } => failure
                .fact("expected_log_id", expected)
                .fact_if("actual_log_id", *actual),
        };
    }
    failure.preconditions = failed
        .iter()
        .map(|condition| {
            PreconditionViolation::new(
                condition_reason(&condition.check).as_str(),
                condition.log.as_str(),
                condition.check.to_string(),
            )
        })
        .collect();
    failure
}
