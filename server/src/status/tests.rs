#[path = "../../tests/support/contract.rs"]
mod contract;

use std::io;
use std::sync::Arc;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};
use wald_storage::{
    AdminError, AppendError, CursorError, FailedCheck, FailedCondition, FenceError, FreeSpace,
    InvalidBatch, InvalidLogName, LogId, LogName, Lsn, Name, ReadError, SyncError, TargetError,
    Timestamp, TrimError, Unopened,
};

pub(super) use contract::assert_in_contract;

use super::{
    Access, ShredError, admin, append, cursor, fence, in_session, invalid_log_name, is_unapplied,
    message_too_large, moved, not_supported_value, read, read_before_write, shred, shred_unended,
    starting, sync, trim,
};

fn log() -> LogName {
    LogName::new("flights").unwrap()
}

fn name() -> Name {
    Name::new("booking").unwrap()
}

fn eio() -> Arc<io::Error> {
    Arc::new(io::Error::other("EIO"))
}

struct Seen {
    code: Code,
    reason: String,
    effect: Option<(String, String)>,
    details: ErrorDetails,
}

impl Seen {
    fn fact(&self, key: &str) -> Option<&str> {
        let info = self.details.error_info().unwrap();
        info.metadata.get(key).map(String::as_str)
    }
}

fn seen(status: &Status) -> Seen {
    let details = status.get_error_details();
    let info = details.error_info().unwrap();
    assert_eq!(info.domain, "wald.dev");
    let fact = |key: &str| info.metadata.get(key).cloned();
    assert!(!status.message().is_empty());
    Seen {
        code: status.code(),
        reason: info.reason.clone(),
        effect: fact("outcome").zip(fact("retry")),
        details: details.clone(),
    }
}

fn effect(outcome: &str, retry: &str) -> Option<(String, String)> {
    Some((outcome.to_owned(), retry.to_owned()))
}

#[test]
fn append_errors_have_code_reason_outcome_and_retry_of_the_table() {
    let never = || effect("NOT_APPLIED", "NEVER");
    let safe = || effect("NOT_APPLIED", "SAFE");
    let cases = [
        (
            AppendError::LogNotFound { log: log() },
            (Code::NotFound, "LOG_NOT_FOUND", never()),
        ),
        (
            AppendError::TailUnproven {
                log: log(),
                from: Lsn::new(7),
            },
            (Code::DataLoss, "QUARANTINED", never()),
        ),
        (
            AppendError::Quota {
                log: log(),
                what: wald_storage::Bounded::ProducersOfLog,
                used: 1,
                limit: 1,
                tenant: None,
            },
            (Code::ResourceExhausted, "QUOTA", safe()),
        ),
        (
            AppendError::EpochJump {
                log: log(),
                producer: None,
                given: u64::MAX,
                current: 7,
            },
            (Code::InvalidArgument, "EPOCH_JUMP", never()),
        ),
        (
            AppendError::InvisibleName {
                log: log(),
                what: wald_storage::Named::Producer,
                name: "a\u{202e}b".into(),
                character: '\u{202e}',
            },
            (Code::InvalidArgument, "INVALID_PRODUCER", never()),
        ),
        (
            AppendError::CursorBeyondTail {
                log: log(),
                cursor: name(),
                tail: Lsn::new(5),
                asked: Lsn::new(9),
            },
            (Code::OutOfRange, "BEYOND_TAIL", never()),
        ),
        (
            AppendError::NotSupported(wald_storage::Durability::Replicated),
            (Code::Unimplemented, "NOT_SUPPORTED", never()),
        ),
        (
            AppendError::SessionEnded,
            (Code::Aborted, "SESSION_ENDED", safe()),
        ),
        (
            AppendError::Busy {
                inflight: 2,
                limit: 1,
            },
            (Code::ResourceExhausted, "BUSY", safe()),
        ),
        (
            AppendError::ReplicaBehind {
                behind: 2,
                limit: 1,
                segments: 3,
            },
            (Code::ResourceExhausted, "BUSY", safe()),
        ),
        (
            AppendError::BucketDown,
            (Code::Unavailable, "BUCKET_DOWN", safe()),
        ),
        (
            AppendError::Moved {
                owner: "other:7070".to_owned(),
                term: 2,
            },
            (Code::Unavailable, "MOVED", safe()),
        ),
        (
            AppendError::ReplicationUnknown,
            (
                Code::Internal,
                "REPLICATION_UNKNOWN",
                effect("UNKNOWN", "SAFE_WITH_CONDITION"),
            ),
        ),
        (
            AppendError::NoDescriptors,
            (Code::ResourceExhausted, "BUSY", safe()),
        ),
        (
            AppendError::DiskFull(FreeSpace::default()),
            (Code::ResourceExhausted, "DISK_FULL", safe()),
        ),
        (
            AppendError::Draining,
            (Code::Unavailable, "DRAINING", safe()),
        ),
        (
            AppendError::JournalFailed(eio()),
            (Code::Unavailable, "JOURNAL_FAILED", safe()),
        ),
        (
            AppendError::Unknown(eio()),
            (
                Code::Internal,
                "JOURNAL_FAILED",
                effect("UNKNOWN", "SAFE_WITH_CONDITION"),
            ),
        ),
    ];
    for (error, (code, reason, effect)) in cases {
        let got = seen(&append(&error));
        assert_eq!(
            (got.code, got.reason.as_str(), &got.effect),
            (code, reason, &effect)
        );
        let retryable = matches!(code, Code::ResourceExhausted | Code::Unavailable);
        assert_eq!(got.details.retry_info().is_some(), retryable, "{reason}");
    }
}

#[test]
fn producers_are_told_what_they_may_send() {
    let (log, producer) = (log(), name());
    let cases = [
        (
            AppendError::ProducerGap {
                log: log.clone(),
                producer: producer.clone(),
                given: 9,
                expected: 4,
            },
            (Code::Aborted, "PRODUCER_GAP"),
            ("expected", "4"),
        ),
        (
            AppendError::ProducerFenced {
                log: log.clone(),
                producer: producer.clone(),
                given: 1,
                current: 2,
            },
            (Code::FailedPrecondition, "PRODUCER_FENCED"),
            ("producer_epoch", "2"),
        ),
        (
            AppendError::ProducerExpired {
                log: log.clone(),
                producer: producer.clone(),
                given: 1,
                oldest: 7,
            },
            (Code::FailedPrecondition, "PRODUCER_EXPIRED"),
            ("oldest", "7"),
        ),
        (
            AppendError::ProducerForgotten {
                log: log.clone(),
                producer: producer.clone(),
                given: 1,
                first_epoch: 3,
            },
            (Code::FailedPrecondition, "PRODUCER_EXPIRED"),
            ("first_epoch", "3"),
        ),
        (
            AppendError::ProducerConflict {
                log,
                producer,
                sequence: 3,
                what: "other records",
            },
            (Code::AlreadyExists, "PRODUCER_CONFLICT"),
            ("sequence", "3"),
        ),
    ];
    for (error, told, (fact, value)) in cases {
        let got = seen(&append(&error));
        assert_eq!((got.code, got.reason.as_str()), told);
        assert_eq!(got.effect, effect("NOT_APPLIED", "NEVER"));
        assert_eq!(got.fact(fact), Some(value));
        assert_eq!(got.fact("log"), Some("flights"));
        assert_eq!(got.fact("producer"), Some("booking"));
    }
}

#[test]
fn invalid_batches_name_the_field_and_every_fact() {
    let cases = [
        (
            InvalidBatch::Empty { log: Some(log()) },
            "EMPTY_BATCH",
            "log",
        ),
        (
            InvalidBatch::DuplicateLog { log: log() },
            "DUPLICATE_LOG",
            "log",
        ),
        (
            InvalidBatch::DuplicateCursor {
                log: log(),
                cursor: name(),
            },
            "DUPLICATE_CURSOR",
            "cursor",
        ),
        (
            InvalidBatch::ProducerMissing { log: log() },
            "INVALID_PRODUCER",
            "log",
        ),
        (
            InvalidBatch::RecordTooLarge {
                log: log(),
                index: 3,
                bytes: 2,
                limit: 1,
            },
            "RECORD_TOO_LARGE",
            "limit_bytes",
        ),
        (
            InvalidBatch::HeadersTooLarge {
                log: log(),
                index: 0,
                headers: 33,
                bytes: 1,
                max_headers: 32,
                max_bytes: 9,
            },
            "RECORD_TOO_LARGE",
            "limit_headers",
        ),
        (
            InvalidBatch::RequestTooLarge {
                records: 1,
                bytes: 1,
                max_records: 1,
                max_bytes: 1,
            },
            "REQUEST_TOO_LARGE",
            "limit_records",
        ),
        (
            InvalidBatch::TooMany {
                what: "checks",
                count: 3,
                limit: 2,
            },
            "REQUEST_TOO_LARGE",
            "checks",
        ),
        (
            InvalidBatch::ChecksumMismatch {
                log: log(),
                index: 0,
                given: 1,
                actual: 2,
            },
            "CHECKSUM_MISMATCH",
            "actual_crc32c",
        ),
        (
            InvalidBatch::TimestampInFuture {
                log: log(),
                index: 0,
                timestamp: Timestamp::from_micros(9),
                now: Timestamp::from_micros(1),
                ahead_micros: 8,
                max_micros: 2,
            },
            "TIMESTAMP_IN_FUTURE",
            "ahead_us",
        ),
    ];
    for (invalid, reason, fact) in cases {
        let got = seen(&append(&AppendError::Invalid(invalid)));
        assert_eq!(
            (got.code, got.reason.as_str()),
            (Code::InvalidArgument, reason)
        );
        assert_eq!(got.effect, effect("NOT_APPLIED", "NEVER"));
        assert!(got.fact(fact).is_some(), "{reason} lacks {fact}");
        assert!(got.details.has_bad_request_violations(), "{reason}");
    }
}

#[test]
fn all_failed_conditions_are_violations_with_actual_values() {
    let condition = |check| FailedCondition { log: log(), check };
    let checks = [
        FailedCheck::PositionMismatch {
            expected: Lsn::new(4),
            actual: Lsn::new(5),
        },
        FailedCheck::Fenced {
            given: None,
            current: 3,
        },
        FailedCheck::CursorMismatch {
            cursor: name(),
            expected: Lsn::new(1),
            actual: Lsn::new(2),
        },
        FailedCheck::LogMissing,
        FailedCheck::LogExists {
            log_id: LogId::new(9),
        },
        FailedCheck::LogReplaced {
            expected: LogId::new(1),
            actual: None,
        },
    ];
    let reasons = [
        ("POSITION_MISMATCH", "actual_lsn"),
        ("FENCED", "writer_epoch"),
        ("POSITION_MISMATCH", "cursor"),
        ("LOG_MISSING", "log"),
        ("LOG_EXISTS", "log_id"),
        ("LOG_REPLACED", "expected_log_id"),
    ];
    for (check, (reason, fact)) in checks.iter().zip(reasons) {
        let failed = vec![condition(check.clone())];
        let got = seen(&append(&AppendError::ConditionsFailed(failed)));
        assert_eq!(
            (got.code, got.reason.as_str()),
            (Code::FailedPrecondition, reason)
        );
        assert_eq!(got.effect, effect("NOT_APPLIED", "NEVER"));
        assert!(got.fact(fact).is_some(), "{reason} lacks {fact}");
    }
    let got = seen(&append(&AppendError::ConditionsFailed(
        checks.map(condition).to_vec(),
    )));
    let violations = &got.details.precondition_failure().unwrap().violations;
    let types: Vec<&str> = violations.iter().map(|v| v.r#type.as_str()).collect();
    assert_eq!(types, reasons.map(|(reason, _)| reason));
    assert!(violations[0].description.contains("next is 5"));
    assert_eq!(got.fact("failed_checks"), Some("6"));
}

#[test]
fn most_telling_failed_condition_of_the_first_log_gives_the_reason() {
    let of = |log: &str, check| FailedCondition {
        log: LogName::new(log).unwrap(),
        check,
    };
    let position = || FailedCheck::PositionMismatch {
        expected: Lsn::new(4),
        actual: Lsn::new(5),
    };
    let fenced = || FailedCheck::Fenced {
        given: Some(1),
        current: 3,
    };
    let exists = || FailedCheck::LogExists {
        log_id: LogId::new(9),
    };
    let replaced = || FailedCheck::LogReplaced {
        expected: LogId::new(1),
        actual: Some(LogId::new(9)),
    };
    let reason = |failed| seen(&append(&AppendError::ConditionsFailed(failed))).reason;
    let mut failed = vec![
        of("a", position()),
        of("a", fenced()),
        of("a", exists()),
        of("a", replaced()),
        of("b", replaced()),
    ];
    for expected in ["LOG_REPLACED", "LOG_EXISTS", "FENCED", "POSITION_MISMATCH"] {
        assert_eq!(reason(failed.clone()), expected);
        failed.remove(failed.len() - 2);
    }
}

#[test]
fn read_errors_have_code_and_reason_of_the_table_and_no_outcome() {
    let cases = [
        (
            ReadError::Target(TargetError::NotFound { log: log() }),
            (Code::NotFound, "LOG_NOT_FOUND", "log"),
        ),
        (
            ReadError::Target(TargetError::Replaced {
                log: log(),
                expected: LogId::new(1),
                actual: Some(LogId::new(2)),
            }),
            (Code::FailedPrecondition, "LOG_REPLACED", "actual_log_id"),
        ),
        (
            ReadError::Trimmed {
                log: log(),
                first: Lsn::new(5),
                asked: Lsn::new(1),
            },
            (Code::OutOfRange, "TRIMMED", "first_lsn"),
        ),
        (
            ReadError::BeyondTail {
                log: log(),
                tail: Lsn::new(5),
                asked: Lsn::new(9),
            },
            (Code::OutOfRange, "BEYOND_TAIL", "tail_lsn"),
        ),
        (
            ReadError::Quarantined {
                log: log(),
                from: Lsn::new(5),
                to: Some(Lsn::new(6)),
            },
            (Code::DataLoss, "QUARANTINED", "to_lsn"),
        ),
    ];
    for (error, (code, reason, fact)) in cases {
        let got = seen(&read(&error));
        assert_eq!((got.code, got.reason.as_str()), (code, reason));
        assert_eq!(got.effect, None);
        assert!(got.fact(fact).is_some(), "{reason} lacks {fact}");
    }
    for (error, code, reason) in [
        (
            ReadError::BadCursor("it is cut short"),
            Code::InvalidArgument,
            "INVALID_SCAN",
        ),
        (
            ReadError::InvalidScan("lsn needs one log"),
            Code::InvalidArgument,
            "INVALID_SCAN",
        ),
        (
            ReadError::JournalFailed(eio()),
            Code::Unavailable,
            "JOURNAL_FAILED",
        ),
        (ReadError::Io(eio()), Code::Unavailable, "READ_FAILED"),
        (
            ReadError::Io(Arc::new(io::Error::other(Unopened {
                key: 7,
                text: "no key".to_owned(),
            }))),
            Code::DataLoss,
            "KEY_MISSING",
        ),
        (
            ReadError::NotSupported(wald_storage::Visibility::Replicated),
            Code::Unimplemented,
            "NOT_SUPPORTED",
        ),
        (ReadError::LeaseLost, Code::Unavailable, "BUCKET_DOWN"),
    ] {
        let got = seen(&read(&error));
        assert_eq!((got.code, got.reason.as_str()), (code, reason));
        assert_eq!(
            got.details.retry_info().is_some(),
            code == Code::Unavailable
        );
    }
}

#[test]
fn write_that_cannot_read_its_log_first_has_an_outcome() {
    let missing = TargetError::NotFound { log: log() };
    for (error, reason, retry) in [
        (ReadError::Target(missing), "LOG_NOT_FOUND", "NEVER"),
        (ReadError::LeaseLost, "BUCKET_DOWN", "SAFE"),
        (ReadError::JournalFailed(eio()), "JOURNAL_FAILED", "SAFE"),
        (
            ReadError::Refused(AppendError::Draining),
            "DRAINING",
            "SAFE",
        ),
    ] {
        let got = seen(&read_before_write(&error));
        assert_eq!(got.reason, reason);
        assert_eq!(got.effect, effect("NOT_APPLIED", retry), "{reason}");
    }
}

#[test]
fn administrative_errors_tell_outcome_and_retry() {
    let got = seen(&admin(&AdminError::LogExists {
        log: log(),
        log_id: LogId::new(1),
    }));
    assert_eq!(
        (got.code, got.reason.as_str()),
        (Code::AlreadyExists, "LOG_EXISTS")
    );
    assert_eq!(got.effect, effect("NOT_APPLIED", "NEVER"));
    let got = seen(&admin(&AdminError::Target(TargetError::NotFound {
        log: log(),
    })));
    assert_eq!(got.code, Code::NotFound);
    let got = seen(&admin(&AdminError::Target(TargetError::Replaced {
        log: log(),
        expected: LogId::new(1),
        actual: Some(LogId::new(2)),
    })));
    assert_eq!(got.code, Code::FailedPrecondition);
    assert_eq!(got.effect, effect("NOT_APPLIED", "NEVER"));
    let got = seen(&admin(&AdminError::Append(AppendError::Unknown(eio()))));
    assert_eq!(got.code, Code::Internal);
    assert_eq!(got.effect, effect("UNKNOWN", "SAFE_WITH_CONDITION"));
}

#[test]
fn a_trim_that_is_refused_forgot_nothing_and_says_where_the_tail_is() {
    let got = seen(&trim(&TrimError::BeyondTail {
        log: log(),
        tail: Lsn::new(5),
        asked: Lsn::new(9),
    }));
    assert_eq!(
        (got.code, got.reason.as_str()),
        (Code::OutOfRange, "BEYOND_TAIL")
    );
    assert_eq!(got.fact("tail_lsn"), Some("5"));
    assert_eq!(got.effect, effect("NOT_APPLIED", "NEVER"));
    let got = seen(&trim(&TrimError::Target(TargetError::NotFound {
        log: log(),
    })));
    assert_eq!(
        (got.code, got.reason.as_str()),
        (Code::NotFound, "LOG_NOT_FOUND")
    );
    assert_eq!(got.effect, effect("NOT_APPLIED", "NEVER"));
    let got = seen(&trim(&TrimError::Target(TargetError::Replaced {
        log: log(),
        expected: LogId::new(1),
        actual: Some(LogId::new(2)),
    })));
    assert_eq!(got.reason, "LOG_REPLACED");
    assert_eq!(got.effect, effect("NOT_APPLIED", "NEVER"));
    let got = seen(&trim(&TrimError::Append(AppendError::Unknown(eio()))));
    assert_eq!(
        (got.code, got.reason.as_str()),
        (Code::Internal, "JOURNAL_FAILED")
    );
    assert_eq!(got.effect, effect("UNKNOWN", "SAFE_WITH_CONDITION"));
}

#[test]
fn a_fence_that_is_not_raised_says_which_epoch_is() {
    let got = seen(&fence(&FenceError::Fenced {
        log: log(),
        given: 2,
        current: 3,
    }));
    assert_eq!(
        (got.code, got.reason.as_str()),
        (Code::FailedPrecondition, "FENCED")
    );
    assert_eq!(got.fact("writer_epoch"), Some("3"));
    assert_eq!(got.effect, effect("NOT_APPLIED", "NEVER"));
    assert!(got.details.precondition_failure().is_some());
    let got = seen(&fence(&FenceError::Target(TargetError::NotFound {
        log: log(),
    })));
    assert_eq!(
        (got.code, got.reason.as_str()),
        (Code::NotFound, "LOG_NOT_FOUND")
    );
    assert_eq!(got.effect, effect("NOT_APPLIED", "NEVER"));
    let got = seen(&fence(&FenceError::Target(TargetError::Replaced {
        log: log(),
        expected: LogId::new(1),
        actual: None,
    })));
    assert_eq!(
        (got.code, got.reason.as_str()),
        (Code::FailedPrecondition, "LOG_REPLACED")
    );
    assert_eq!(got.effect, effect("NOT_APPLIED", "NEVER"));
    let got = seen(&fence(&FenceError::Append(AppendError::Unknown(eio()))));
    assert_eq!(got.effect, effect("UNKNOWN", "SAFE_WITH_CONDITION"));
}

#[test]
fn errors_about_cursors_tell_an_outcome_only_for_writes() {
    let cases = [
        (
            CursorError::Target(TargetError::NotFound { log: log() }),
            (Code::NotFound, "LOG_NOT_FOUND"),
        ),
        (
            CursorError::Target(TargetError::Replaced {
                log: log(),
                expected: LogId::new(1),
                actual: Some(LogId::new(2)),
            }),
            (Code::FailedPrecondition, "LOG_REPLACED"),
        ),
        (
            CursorError::NotFound {
                log: log(),
                cursor: name(),
            },
            (Code::NotFound, "CURSOR_NOT_FOUND"),
        ),
    ];
    for (error, told) in cases {
        let got = seen(&cursor(&error, Access::Write));
        assert_eq!((got.code, got.reason.as_str()), told);
        assert_eq!(got.effect, effect("NOT_APPLIED", "NEVER"));
        assert_eq!(seen(&cursor(&error, Access::Read)).effect, None);
    }
    let error = CursorError::Append(AppendError::Unknown(eio()));
    let got = seen(&cursor(&error, Access::Write));
    assert_eq!(got.effect, effect("UNKNOWN", "SAFE_WITH_CONDITION"));
}

#[test]
fn failure_of_a_session_is_that_of_its_request_with_the_number() {
    let failed = FailedCondition {
        log: log(),
        check: FailedCheck::LogMissing,
    };
    let alone = append(&AppendError::ConditionsFailed(vec![failed]));
    let got = seen(&in_session(&alone, u64::MAX));
    assert_eq!(got.fact("request_id"), Some("18446744073709551615"));
    let alone = seen(&alone);
    assert_eq!(
        (got.code, got.reason, got.effect),
        (alone.code, alone.reason, alone.effect)
    );
    let violations =
        |details: &ErrorDetails| details.precondition_failure().unwrap().violations.len();
    assert_eq!(violations(&got.details), violations(&alone.details));
    let leaving = seen(&in_session(&append(&AppendError::Draining), 1));
    assert!(leaving.details.retry_info().is_some());
    // An error of the transport's has no details to add to.
    let foreign = in_session(&Status::cancelled("gone"), 1);
    assert_eq!(
        (foreign.code(), foreign.message()),
        (Code::Cancelled, "gone")
    );
}

#[test]
fn message_that_is_too_long_to_be_read_says_how_long_one_may_be() {
    let got = seen(&message_too_large(9, 8, Access::Write));
    assert_eq!(
        (got.code, got.reason.as_str()),
        (Code::InvalidArgument, "REQUEST_TOO_LARGE")
    );
    assert_eq!(got.fact("limit_bytes"), Some("8"));
    assert_eq!(got.effect, effect("NOT_APPLIED", "NEVER"));
    let got = seen(&message_too_large(9, 8, Access::Read));
    assert_eq!(got.effect, None);
}

#[test]
fn a_failed_barrier_is_internal_and_unknown() {
    let got = seen(&sync(&SyncError::JournalFailed(eio())));
    assert_eq!(
        (got.code, got.reason.as_str()),
        (Code::Internal, "JOURNAL_FAILED")
    );
    assert_eq!(got.effect, effect("UNKNOWN", "SAFE_WITH_CONDITION"));
    let got = seen(&sync(&SyncError::LogNotFound { log: log() }));
    assert_eq!(got.code, Code::NotFound);
    for (error, reason) in [
        (
            SyncError::Refused(AppendError::DiskFull(FreeSpace::default())),
            "DISK_FULL",
        ),
        (SyncError::Refused(AppendError::NoDescriptors), "BUSY"),
    ] {
        let got = seen(&sync(&error));
        assert_eq!(
            (got.code, got.reason.as_str()),
            (Code::ResourceExhausted, reason)
        );
        assert_eq!(got.effect, effect("NOT_APPLIED", "SAFE"));
        assert!(got.details.retry_info().is_some());
    }
}

#[test]
fn reads_that_need_a_flush_are_refused_as_appends_are_without_outcome() {
    for (error, reason) in [
        (AppendError::Draining, "DRAINING"),
        (AppendError::DiskFull(FreeSpace::default()), "DISK_FULL"),
    ] {
        let got = seen(&read(&ReadError::Refused(error)));
        assert_eq!((got.reason.as_str(), got.effect), (reason, None));
    }
}

#[test]
fn refusals_of_the_server_itself_tell_an_outcome_only_for_writes() {
    let name = |access| seen(&invalid_log_name("log", InvalidLogName::Empty, access));
    assert_eq!(name(Access::Write).effect, effect("NOT_APPLIED", "NEVER"));
    assert_eq!(name(Access::Read).effect, None);
    assert_eq!(name(Access::Read).reason, "INVALID_LOG_NAME");
    let got = seen(&not_supported_value(
        "delay",
        "a negative time",
        Access::Write,
    ));
    assert_eq!(
        (got.code, got.reason.as_str()),
        (Code::Unimplemented, "NOT_SUPPORTED")
    );
    assert_eq!(got.fact("field"), Some("delay"));
    let got = seen(&moved(Access::Write, "b:6925", 7));
    assert_eq!(
        (got.code, got.reason.as_str()),
        (Code::Unavailable, "MOVED")
    );
    assert_eq!(
        (got.fact("owner"), got.fact("term")),
        (Some("b:6925"), Some("7"))
    );
    assert_eq!(got.effect, effect("NOT_APPLIED", "SAFE"));
    assert_eq!(seen(&moved(Access::Read, "", 7)).effect, None);
    let got = seen(&starting(Access::Write));
    assert_eq!(
        (got.code, got.reason.as_str()),
        (Code::Unavailable, "STARTING")
    );
    assert_eq!(got.effect, effect("NOT_APPLIED", "SAFE"));
}

#[test]
fn future_time_is_refused_with_times_and_the_setting() {
    let refused = AppendError::Invalid(InvalidBatch::TimestampInFuture {
        log: log(),
        index: 0,
        timestamp: Timestamp::from_micros(1_800_000_000_000_000),
        now: Timestamp::from_micros(1_700_000_000_000_000),
        ahead_micros: 100_000_000_000_000,
        max_micros: 60_000_000,
    });
    let message = append(&refused).message().to_owned();
    for part in [
        "2027-01-15T08:00:00",
        "2023-11-14T22:13:20",
        "max_timestamp_ahead allows 1m",
    ] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn texts_of_refusals_do_not_contradict_their_outcome() {
    let expired = AppendError::ProducerExpired {
        log: log(),
        producer: wald_storage::Name::new("p").unwrap(),
        given: 3,
        oldest: 7,
    };
    let message = append(&expired).message().to_owned();
    assert!(
        message.contains("nothing was appended now, and the batch may have been appended before")
    );
    let wrong = AdminError::Target(TargetError::Replaced {
        log: log(),
        expected: wald_storage::LogId::new(5),
        actual: Some(wald_storage::LogId::new(4)),
    });
    assert!(!admin(&wrong).message().contains("created again"));
}

#[test]
fn deletions_that_cannot_destroy_keys_are_in_the_contract() {
    let no_key = ShredError::NoOwnKey("no key".to_owned());
    let full = ShredError::Io(io::Error::other("no space"));
    let answers = [
        (shred(&log(), &no_key), "NO_OWN_KEY", true),
        (shred(&log(), &full), "DISK_FULL", true),
        (shred_unended(&log(), &full), "JOURNAL_FAILED", false),
    ];
    for (status, reason, is_unapplied) in answers {
        assert_in_contract(&status);
        let seen = seen(&status);
        assert_eq!(seen.reason, reason);
        let outcome = if is_unapplied {
            "NOT_APPLIED"
        } else {
            "UNKNOWN"
        };
        assert_eq!(seen.effect.unwrap().0, outcome);
    }
    let failed = AdminError::Append(AppendError::Unknown(eio()));
    assert!(!is_unapplied(&failed));
    assert!(is_unapplied(&AdminError::Append(AppendError::Draining)));
}
