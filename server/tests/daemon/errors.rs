//! The error table of the contract, through gRPC: each situation that has a source comes out
//! with its code, reason, facts, outcome, retry and details.
//!
//! Elsewhere, because they take an `auth_file`: NO_CREDENTIAL, BAD_CREDENTIAL, NOT_ALLOWED, RATE, and
//! QUOTA of a tenant, in `auth`. Elsewhere, because they take a fault or a moment: JOURNAL_FAILED, DISK_FULL and
//! STARTING in `src/rpc/tests.rs`, BUSY and DEADLINE_EXCEEDED in `pressure.rs`, DRAINING in
//! `session.rs` and `read.rs`.

use std::path::{Path, PathBuf};

use crate::support::{Daemon, SessionClient, Told, append, part, records, text};
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;
use v1::cursor_service_client::CursorServiceClient;
use v1::log_service_client::LogServiceClient;
use v1::wal_service_client::WalServiceClient;
use wald_proto::v1;

/// A write that is refused for good: sent again, it fails again.
const NEVER: Option<(&str, &str)> = Some(("NOT_APPLIED", "NEVER"));
/// Sent again, it may succeed.
const SAFE: Option<(&str, &str)> = Some(("NOT_APPLIED", "SAFE"));
/// A read has no outcome.
const READ: Option<(&str, &str)> = None;

type Facts<'a> = &'a [(&'a str, &'a str)];

/// Compares an error with the expected code, reason, outcome, retry and facts.
fn expect(
    situation: &str,
    status: &Status,
    (code, reason): (Code, &str),
    effect: Option<(&str, &str)>,
    facts: Facts<'_>,
) {
    let told = Told::of(status);
    assert_eq!(
        (told.code, told.reason.as_str()),
        (code, reason),
        "{situation}: {status:?}"
    );
    for (fact, value) in facts {
        assert_eq!(told.fact(fact), *value, "{situation}: {fact}");
    }
    let details = status.get_error_details();
    let metadata = &details.error_info().unwrap().metadata;
    let said = |key: &str| metadata.get(key).map(String::as_str);
    assert_eq!(
        said("outcome").zip(said("retry")),
        effect,
        "{situation}: outcome and retry"
    );
    assert_eq!(
        details.has_bad_request_violations(),
        code == Code::InvalidArgument,
        "{situation}: BadRequest"
    );
    let precondition = matches!(
        reason,
        "POSITION_MISMATCH" | "LOG_MISSING" | "LOG_REPLACED" | "FENCED"
    ) || (code, reason) == (Code::FailedPrecondition, "LOG_EXISTS");
    assert_eq!(
        told.violations > 0,
        precondition,
        "{situation}: PreconditionFailure"
    );
    let pause = details.retry_info().and_then(|info| info.retry_delay);
    let waits = matches!(code, Code::ResourceExhausted | Code::Unavailable);
    assert_eq!(pause.is_some(), waits, "{situation}: RetryInfo");
}

struct Clients {
    wal: WalServiceClient<Channel>,
    logs: LogServiceClient<Channel>,
    cursors: CursorServiceClient<Channel>,
}

impl Clients {
    async fn of(daemon: &Daemon) -> Self {
        Self {
            wal: daemon.wal().await,
            logs: daemon.logs().await,
            cursors: daemon.cursors().await,
        }
    }

    async fn refused(&mut self, log: &str, condition: v1::AppendCondition) -> Status {
        self.wal.append(on(log, condition)).await.unwrap_err()
    }

    /// The end of a scan, at once or with its first message.
    async fn scan_refused(&mut self, request: v1::ScanRequest) -> Status {
        match self.wal.scan(request).await {
            Ok(stream) => stream.into_inner().message().await.unwrap_err(),
            Err(status) => status,
        }
    }

    async fn batch_refused(&mut self, request: v1::AppendBatchRequest) -> Status {
        self.wal.append_batch(request).await.unwrap_err()
    }

    /// Fails as the batch does alone, and with the number of the request.
    async fn session_refused(&mut self, batch: v1::AppendBatchRequest) -> Status {
        let mut session = SessionClient::open(&mut self.wal).await;
        session.send_batch(77, batch).await;
        let (acked, end) = session.rest().await;
        assert!(acked.is_empty());
        let status = end.unwrap_err();
        assert_eq!(Told::of(&status).fact("request_id"), "77");
        status
    }
}

/// An append under a condition.
fn on(log: &str, condition: v1::AppendCondition) -> v1::AppendRequest {
    v1::AppendRequest {
        condition: Some(condition),
        ..append(log, "x")
    }
}

fn batches(batches: Vec<v1::LogBatch>) -> v1::AppendBatchRequest {
    v1::AppendBatchRequest {
        batches,
        ..v1::AppendBatchRequest::default()
    }
}

fn condition() -> v1::AppendCondition {
    v1::AppendCondition::default()
}

fn by(id: &str, epoch: u64, sequence: u64) -> v1::AppendCondition {
    let id = id.to_owned();
    v1::AppendCondition {
        producer: Some(v1::Producer {
            id,
            epoch,
            sequence,
        }),
        ..condition()
    }
}

fn commit(log: &str, cursor: &str, lsn: u64) -> v1::CursorCommit {
    v1::CursorCommit {
        log: log.to_owned(),
        cursor: cursor.to_owned(),
        lsn,
        ..v1::CursorCommit::default()
    }
}

fn commit_request(commit: v1::CursorCommit) -> v1::CommitCursorRequest {
    v1::CommitCursorRequest {
        commit: Some(commit),
    }
}

fn fence(log: &str) -> v1::FenceRequest {
    v1::FenceRequest {
        log: log.to_owned(),
        ..v1::FenceRequest::default()
    }
}

fn read_at(log: &str, lsn: u64) -> v1::ReadRequest {
    v1::ReadRequest {
        log: log.to_owned(),
        start: Some(v1::read_request::Start::Lsn(lsn)),
        ..v1::ReadRequest::default()
    }
}

fn scan(selector: v1::scan_request::Selector, lsn: u64) -> v1::ScanRequest {
    v1::ScanRequest {
        selector: Some(selector),
        start: Some(v1::scan_request::Start::Lsn(lsn)),
        ..v1::ScanRequest::default()
    }
}

#[tokio::test]
async fn wrong_requests_are_invalid_arguments_and_name_the_field() {
    let daemon = Daemon::start(&["--max-record-bytes", "1KiB", "--max-batch-bytes", "4KiB"]);
    let mut clients = Clients::of(&daemon).await;
    let invalid = |reason| (Code::InvalidArgument, reason);
    let unsound = |record| v1::AppendRequest {
        record: Some(record),
        ..append("a", "")
    };
    let appends: Vec<(v1::AppendRequest, &str, Facts<'_>)> = vec![
        (append("$a", "x"), "INVALID_LOG_NAME", &[]),
        (
            append("a", &"x".repeat(1025)),
            "RECORD_TOO_LARGE",
            &[("bytes", "1025"), ("limit_bytes", "1024"), ("index", "0")],
        ),
        (
            unsound(v1::Record {
                crc32c: Some(1),
                ..text("123456789")
            }),
            "CHECKSUM_MISMATCH",
            &[("given_crc32c", "1"), ("actual_crc32c", "3808858755")],
        ),
        (
            unsound(v1::Record {
                timestamp_us: i64::MAX,
                ..text("x")
            }),
            "TIMESTAMP_IN_FUTURE",
            &[("limit_us", "60000000")],
        ),
        (on("a", by("", 0, 0)), "INVALID_PRODUCER", &[]),
        (on("a", by("a\nb", 0, 0)), "INVALID_PRODUCER", &[]),
    ];
    for (request, reason, facts) in appends {
        let status = clients.wal.append(request).await.unwrap_err();
        expect(reason, &status, invalid(reason), NEVER, facts);
    }
    let produced = v1::LogBatch {
        condition: Some(by("p", 0, 0)),
        ..part("a", &["x"])
    };
    let moved = |cursors| v1::AppendBatchRequest {
        cursors,
        ..batches(vec![part("a", &["x"])])
    };
    let thousand = "x".repeat(1000);
    let requests: Vec<(v1::AppendBatchRequest, &str, Facts<'_>)> = vec![
        (batches(vec![]), "EMPTY_BATCH", &[]),
        (
            batches(vec![part("a", &[])]),
            "EMPTY_BATCH",
            &[("log", "a")],
        ),
        (
            batches(vec![part("a", &["x"]), part("a", &["y"])]),
            "DUPLICATE_LOG",
            &[("log", "a")],
        ),
        (
            batches(vec![part("a", &[thousand.as_str(); 5])]),
            "REQUEST_TOO_LARGE",
            &[("records", "5"), ("limit_bytes", "4096")],
        ),
        (
            batches(vec![produced, part("b", &["x"])]),
            "INVALID_PRODUCER",
            &[("log", "b")],
        ),
        (
            moved(vec![commit("a", "", 0)]),
            "INVALID_CURSOR_NAME",
            &[("field", "cursors[0].cursor")],
        ),
        (
            moved(vec![commit("a", "c", 0), commit("a", "c", 1)]),
            "DUPLICATE_CURSOR",
            &[("log", "a"), ("cursor", "c")],
        ),
    ];
    for (request, reason, facts) in requests {
        let status = clients.batch_refused(request.clone()).await;
        expect(reason, &status, invalid(reason), NEVER, facts);
        let status = clients.session_refused(request).await;
        expect(reason, &status, invalid(reason), NEVER, facts);
    }
    let status = clients.wal.fence(fence("")).await.unwrap_err();
    expect("fence", &status, invalid("INVALID_LOG_NAME"), NEVER, &[]);
    let request = commit_request(commit("a", "", 0));
    let status = clients.cursors.commit_cursor(request).await.unwrap_err();
    let facts = [("field", "commit.cursor")];
    expect(
        "cursor",
        &status,
        invalid("INVALID_CURSOR_NAME"),
        NEVER,
        &facts,
    );
    let all = v1::scan_request::Selector::All(v1::AllLogs {});
    let status = clients.scan_refused(scan(all, 1)).await;
    expect("scan", &status, invalid("INVALID_SCAN"), READ, &[]);
    clients.wal.append(append("a", "x")).await.unwrap();
    let request = v1::ListCursorsRequest {
        log: "a".to_owned(),
        page_token: "zz".to_owned(),
        ..v1::ListCursorsRequest::default()
    };
    let status = clients.cursors.list_cursors(request).await.unwrap_err();
    expect("list", &status, invalid("INVALID_PAGE_TOKEN"), READ, &[]);
}

#[tokio::test]
async fn failed_conditions_are_failed_preconditions_with_the_actual_values() {
    let daemon = Daemon::start(&[]);
    let mut clients = Clients::of(&daemon).await;
    let first = clients.wal.append(append("a", "x")).await.unwrap();
    let log_id = first.into_inner().log_id.to_string();
    clients.wal.fence(fence("fenced")).await.unwrap();
    let failed = |reason| (Code::FailedPrecondition, reason);
    let expected_lsn = v1::AppendCondition {
        expected_lsn: Some(9),
        ..condition()
    };
    let must_exist = v1::AppendCondition {
        must_exist: true,
        ..condition()
    };
    let must_not_exist = v1::AppendCondition {
        must_not_exist: true,
        ..condition()
    };
    let other_log = v1::AppendCondition {
        log_id: Some(u64::MAX),
        ..condition()
    };
    let epoch = |epoch| v1::AppendCondition {
        writer_epoch: Some(epoch),
        ..condition()
    };
    // All conditions at once: the reason must explain the others.
    let everything = v1::AppendCondition {
        must_not_exist: true,
        writer_epoch: Some(5),
        ..expected_lsn.clone()
    };
    let replaced = v1::AppendCondition {
        log_id: Some(u64::MAX),
        ..everything.clone()
    };
    let none_exist = everything.clone();
    let fenced_and_elsewhere = v1::AppendCondition {
        must_not_exist: false,
        ..everything.clone()
    };
    let existing = [("log_id", log_id.as_str())];
    let replacing = [("actual_log_id", log_id.as_str())];
    let cases: Vec<(&str, v1::AppendCondition, &str, usize, Facts<'_>)> = vec![
        (
            "a",
            expected_lsn,
            "POSITION_MISMATCH",
            1,
            &[("log", "a"), ("expected_lsn", "9"), ("actual_lsn", "1")],
        ),
        ("none", must_exist, "LOG_MISSING", 1, &[("log", "none")]),
        ("a", must_not_exist, "LOG_EXISTS", 1, &existing),
        ("a", other_log.clone(), "LOG_REPLACED", 1, &replacing),
        ("none", other_log, "LOG_REPLACED", 1, &[("log", "none")]),
        ("a", epoch(3), "FENCED", 1, &[("writer_epoch", "0")]),
        ("fenced", epoch(0), "FENCED", 1, &[("writer_epoch", "1")]),
        ("fenced", condition(), "FENCED", 1, &[("writer_epoch", "1")]),
        ("a", replaced, "LOG_REPLACED", 4, &[("failed_checks", "4")]),
        ("a", none_exist, "LOG_EXISTS", 3, &[("failed_checks", "3")]),
        (
            "a",
            fenced_and_elsewhere,
            "FENCED",
            2,
            &[("writer_epoch", "0"), ("failed_checks", "2")],
        ),
    ];
    for (log, condition, reason, violations, facts) in cases {
        let situation = format!("{reason} of {log}");
        let batch = v1::LogBatch {
            condition: Some(condition.clone()),
            ..part(log, &["x"])
        };
        for status in [
            clients.refused(log, condition).await,
            clients.batch_refused(batches(vec![batch.clone()])).await,
            clients.session_refused(batches(vec![batch])).await,
        ] {
            expect(&situation, &status, failed(reason), NEVER, facts);
            assert_eq!(Told::of(&status).violations, violations, "{situation}");
        }
    }
    // A log that is only checked.
    let status = clients
        .batch_refused(v1::AppendBatchRequest {
            checks: vec![v1::LogCheck {
                log: "a".to_owned(),
                expected_lsn: Some(4),
                ..v1::LogCheck::default()
            }],
            ..batches(vec![part("b", &["x"])])
        })
        .await;
    let facts = [("log", "a"), ("actual_lsn", "1")];
    expect("check", &status, failed("POSITION_MISMATCH"), NEVER, &facts);
    // A cursor, alone and in a batch.
    let elsewhere = v1::CursorCommit {
        expected_lsn: Some(1),
        ..commit("a", "c", 1)
    };
    let request = commit_request(elsewhere.clone());
    let facts = [("cursor", "c"), ("expected_lsn", "1"), ("actual_lsn", "0")];
    for status in [
        clients.cursors.commit_cursor(request).await.unwrap_err(),
        clients
            .batch_refused(v1::AppendBatchRequest {
                cursors: vec![elsewhere],
                ..batches(vec![part("b", &["x"])])
            })
            .await,
    ] {
        expect(
            "cursor",
            &status,
            failed("POSITION_MISMATCH"),
            NEVER,
            &facts,
        );
    }
    // A fence that is not above the last.
    let request = v1::FenceRequest {
        writer_epoch: Some(1),
        ..fence("fenced")
    };
    let status = clients.wal.fence(request).await.unwrap_err();
    let facts = [("log", "fenced"), ("writer_epoch", "1")];
    expect("fence", &status, failed("FENCED"), NEVER, &facts);
    // Nothing of all that was written.
    let tail = clients.wal.get_tail(v1::GetTailRequest {
        log: "b".to_owned(),
        ..v1::GetTailRequest::default()
    });
    assert_eq!(tail.await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn producers_out_of_turn_are_told_where_they_stand() {
    let daemon = Daemon::start(&["--producer-window", "2", "--max-producers-per-log", "1"]);
    let mut clients = Clients::of(&daemon).await;
    for sequence in 0..4 {
        let request = on("a", by("p", 5, sequence));
        clients.wal.append(request).await.unwrap();
    }
    type Case<'a> = (v1::AppendCondition, (Code, &'a str), Facts<'a>);
    let other = v1::AppendRequest {
        record: Some(text("other")),
        ..on("a", by("p", 5, 3))
    };
    let status = clients.wal.append(other).await.unwrap_err();
    let facts = [("log", "a"), ("producer", "p"), ("sequence", "3")];
    let conflict = (Code::AlreadyExists, "PRODUCER_CONFLICT");
    expect("other records", &status, conflict, NEVER, &facts);
    let cases: Vec<Case<'_>> = vec![
        (
            by("p", 5, 6),
            (Code::Aborted, "PRODUCER_GAP"),
            &[("expected", "4"), ("sequence", "6"), ("producer", "p")],
        ),
        (
            by("p", 6, 1),
            (Code::Aborted, "PRODUCER_GAP"),
            &[("expected", "0")],
        ),
        (
            by("p", 4, 0),
            (Code::FailedPrecondition, "PRODUCER_FENCED"),
            &[("producer_epoch", "5"), ("log", "a")],
        ),
        (
            by("p", 5, 1),
            (Code::FailedPrecondition, "PRODUCER_EXPIRED"),
            &[("oldest", "2"), ("sequence", "1")],
        ),
        // Before every other condition.
        (
            v1::AppendCondition {
                expected_lsn: Some(99),
                writer_epoch: Some(9),
                ..by("p", 5, 6)
            },
            (Code::Aborted, "PRODUCER_GAP"),
            &[("expected", "4")],
        ),
    ];
    for (condition, told, facts) in cases {
        let batch = v1::LogBatch {
            condition: Some(condition.clone()),
            ..part("a", &["x"])
        };
        for status in [
            clients.refused("a", condition).await,
            clients.session_refused(batches(vec![batch])).await,
        ] {
            expect(told.1, &status, told, NEVER, facts);
        }
    }
    // One more than a log may have.
    let status = clients.refused("a", by("q", 0, 0)).await;
    let facts = [
        ("log", "a"),
        ("quota", "producers"),
        ("setting", "max_producers_per_log"),
        ("used", "1"),
        ("limit", "1"),
    ];
    let quota = (Code::ResourceExhausted, "QUOTA");
    expect("producers", &status, quota, SAFE, &facts);
    let gaps = r#"wald_condition_failures_total{reason="PRODUCER_GAP"}"#;
    assert_eq!(daemon.metric(gaps), 6.0);
    assert_eq!(
        daemon.metric(r#"wald_rejected_total{operation="write",reason="QUOTA"}"#),
        1.0
    );
}

#[tokio::test]
async fn what_is_not_there_is_not_found_or_out_of_range() {
    let daemon = Daemon::start(&["--auto-create=false", "--max-cursors-per-log", "1"]);
    let mut clients = Clients::of(&daemon).await;
    let create = |log: &str| v1::CreateLogRequest {
        log: log.to_owned(),
        config: None,
    };
    clients.logs.create_log(create("a")).await.unwrap();
    let request = batches(vec![part("a", &["0", "1", "2"])]);
    clients.wal.append_batch(request).await.unwrap();
    let trim = |before_lsn| v1::TrimRequest {
        log: "a".to_owned(),
        before_lsn,
        log_id: None,
    };
    clients.wal.trim(trim(1)).await.unwrap();

    let exists = clients.logs.create_log(create("a")).await.unwrap_err();
    let told = (Code::AlreadyExists, "LOG_EXISTS");
    expect("create", &exists, told, NEVER, &[("log", "a")]);

    let missing = (Code::NotFound, "LOG_NOT_FOUND");
    let none = || "none".to_owned();
    let request = commit_request(commit("none", "c", 0));
    let delete_log = v1::DeleteLogRequest {
        shred: false,
        log: none(),
        log_id: None,
    };
    let delete_cursor = |log: &str| v1::DeleteCursorRequest {
        log: log.to_owned(),
        cursor: "c".to_owned(),
        log_id: None,
    };
    let trim_none = v1::TrimRequest {
        log: none(),
        ..trim(1)
    };
    for status in [
        clients.wal.append(append("none", "x")).await.unwrap_err(),
        clients
            .session_refused(batches(vec![part("none", &["x"])]))
            .await,
        clients.wal.fence(fence("none")).await.unwrap_err(),
        clients.wal.trim(trim_none).await.unwrap_err(),
        clients.logs.delete_log(delete_log).await.unwrap_err(),
        clients.cursors.commit_cursor(request).await.unwrap_err(),
        clients
            .cursors
            .delete_cursor(delete_cursor("none"))
            .await
            .unwrap_err(),
    ] {
        expect("write", &status, missing, NEVER, &[("log", "none")]);
    }
    let get_cursor = |log: &str| v1::GetCursorRequest {
        log: log.to_owned(),
        cursor: "c".to_owned(),
        log_id: None,
    };
    let tail = v1::GetTailRequest {
        log: none(),
        ..v1::GetTailRequest::default()
    };
    let list = v1::ListCursorsRequest {
        log: none(),
        ..v1::ListCursorsRequest::default()
    };
    let one = v1::scan_request::Selector::Log;
    for status in [
        clients.wal.read(read_at("none", 0)).await.unwrap_err(),
        clients.scan_refused(scan(one(none()), 0)).await,
        clients.wal.get_tail(tail).await.unwrap_err(),
        clients
            .cursors
            .get_cursor(get_cursor("none"))
            .await
            .unwrap_err(),
        clients.cursors.list_cursors(list).await.unwrap_err(),
    ] {
        expect("read", &status, missing, READ, &[("log", "none")]);
    }

    let no_cursor = (Code::NotFound, "CURSOR_NOT_FOUND");
    let facts = [("log", "a"), ("cursor", "c")];
    let status = clients.cursors.get_cursor(get_cursor("a")).await;
    expect("get", &status.unwrap_err(), no_cursor, READ, &facts);
    let status = clients.cursors.delete_cursor(delete_cursor("a")).await;
    expect("delete", &status.unwrap_err(), no_cursor, NEVER, &facts);

    let status = clients.wal.read(read_at("a", 0)).await.unwrap_err();
    let trimmed = (Code::OutOfRange, "TRIMMED");
    let facts = [("first_lsn", "1"), ("lsn", "0"), ("log", "a")];
    expect("read", &status, trimmed, READ, &facts);
    let beyond = (Code::OutOfRange, "BEYOND_TAIL");
    let facts = [("tail_lsn", "3"), ("lsn", "9"), ("log", "a")];
    for status in [
        clients.wal.read(read_at("a", 9)).await.unwrap_err(),
        clients.scan_refused(scan(one("a".to_owned()), 9)).await,
    ] {
        expect("read", &status, beyond, READ, &facts);
    }
    let moved = v1::AppendBatchRequest {
        cursors: vec![commit("a", "c", 9)],
        ..v1::AppendBatchRequest::default()
    };
    let request = commit_request(commit("a", "c", 9));
    for status in [
        clients.wal.trim(trim(9)).await.unwrap_err(),
        clients.cursors.commit_cursor(request).await.unwrap_err(),
        clients.batch_refused(moved).await,
    ] {
        expect("write", &status, beyond, NEVER, &facts);
    }

    let request = |cursor| commit_request(commit("a", cursor, 1));
    clients.cursors.commit_cursor(request("c")).await.unwrap();
    let status = clients.cursors.commit_cursor(request("d")).await;
    let facts = [
        ("log", "a"),
        ("quota", "cursors"),
        ("setting", "max_cursors_per_log"),
        ("used", "1"),
        ("limit", "1"),
    ];
    let quota = (Code::ResourceExhausted, "QUOTA");
    expect("cursors", &status.unwrap_err(), quota, SAFE, &facts);
}

#[tokio::test]
async fn what_is_not_built_is_named_and_never_ignored() {
    let daemon = Daemon::start(&[]);
    let mut clients = Clients::of(&daemon).await;
    let unbuilt = (Code::Unimplemented, "NOT_SUPPORTED");
    let replicated = v1::AppendRequest {
        durability: v1::Durability::Replicated.into(),
        ..append("a", "x")
    };
    let status = clients.wal.append(replicated).await.unwrap_err();
    expect("level", &status, unbuilt, NEVER, &[("field", "durability")]);
    assert_eq!(
        status.message(),
        "durability: this server has no replica, so it refuses REPLICATED; its safest level is DURABLE"
    );
    let to_replica = v1::SyncRequest {
        target: v1::SyncTarget::Replicated.into(),
        ..v1::SyncRequest::default()
    };
    let status = clients.wal.sync(to_replica).await.unwrap_err();
    expect("target", &status, unbuilt, NEVER, &[("field", "target")]);
    let of_mode = v1::CreateLogRequest {
        log: "a".to_owned(),
        config: Some(v1::LogConfig {
            sync_mode: v1::SyncMode::Replicated.into(),
            ..v1::LogConfig::default()
        }),
    };
    let status = clients.logs.create_log(of_mode).await.unwrap_err();
    let mode = [("field", "config.sync_mode")];
    expect("mode", &status, unbuilt, NEVER, &mode);
    let visible = v1::ReadRequest {
        visibility: v1::Visibility::Replicated.into(),
        ..read_at("a", 0)
    };
    let status = clients.wal.read(visible).await.unwrap_err();
    let visibility = [("field", "visibility")];
    expect("visibility", &status, unbuilt, None, &visibility);
    let missing = clients.wal.read(read_at("a", 0)).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
}

/// The file below `directory` that holds `bytes`, and where.
fn find(directory: &Path, bytes: &[u8]) -> Option<(PathBuf, usize)> {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if let Some(found) = find(&path, bytes) {
                return Some(found);
            }
            continue;
        }
        let held = std::fs::read(&path).unwrap();
        if let Some(at) = held.windows(bytes.len()).position(|part| part == bytes) {
            return Some((path, at));
        }
    }
    None
}

#[tokio::test]
async fn damage_is_data_loss_with_the_range_to_go_on_behind() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut clients = Clients::of(&daemon).await;
    for payload in ["first", "an unmistakable payload", "third"] {
        clients.wal.append(append("a", payload)).await.unwrap();
    }
    drop(daemon);
    let (path, at) = find(directory.path(), b"an unmistakable payload").unwrap();
    let mut held = std::fs::read(&path).unwrap();
    held[at] ^= 1;
    std::fs::write(&path, held).unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut clients = Clients::of(&daemon).await;
    let status = clients.wal.read(read_at("a", 1)).await.unwrap_err();
    let damaged = (Code::DataLoss, "QUARANTINED");
    let facts = [("log", "a"), ("from_lsn", "1"), ("to_lsn", "2")];
    expect("read", &status, damaged, READ, &facts);
    let page = clients
        .wal
        .read(read_at("a", 2))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(records(&[page.batch.unwrap()])[0].2, "third");
}

/// Whatever names the number of a log that is gone reaches nothing of the log that has its
/// name now.
#[tokio::test]
async fn log_is_never_reached_by_the_number_of_its_predecessor() {
    let daemon = Daemon::start(&[]);
    let mut clients = Clients::of(&daemon).await;
    let old = clients.wal.append(append("a", "old")).await.unwrap();
    let old = old.into_inner().log_id;
    // A session and a producer that know it, and a cursor in it.
    let produced = |sequence| v1::AppendCondition {
        log_id: Some(old),
        ..by("p", 0, sequence)
    };
    let request = on("a", produced(0));
    clients.wal.append(request).await.unwrap();
    let request = commit_request(commit("a", "c", 1));
    clients.cursors.commit_cursor(request).await.unwrap();
    let mut session = SessionClient::open(&mut clients.wal).await;
    let known = |condition| {
        batches(vec![v1::LogBatch {
            condition: Some(condition),
            ..part("a", &["session"])
        }])
    };
    let of_old = || v1::AppendCondition {
        log_id: Some(old),
        ..condition()
    };
    session.send_batch(1, known(of_old())).await;
    session.answers.message().await.unwrap().unwrap();

    let delete = v1::DeleteLogRequest {
        shred: false,
        log: "a".to_owned(),
        log_id: Some(old),
    };
    clients.logs.delete_log(delete.clone()).await.unwrap();
    let replaced = (Code::FailedPrecondition, "LOG_REPLACED");
    // While no log has the name, none is made under it.
    let status = clients.refused("a", of_old()).await;
    expect("append to none", &status, replaced, NEVER, &[]);
    let fence_old = || v1::FenceRequest {
        log_id: Some(old),
        ..fence("a")
    };
    let status = clients.wal.fence(fence_old()).await.unwrap_err();
    expect("fence of none", &status, replaced, NEVER, &[]);
    let missing = clients.wal.read(read_at("a", 0)).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);

    let new = clients.wal.append(append("a", "new")).await.unwrap();
    let new = new.into_inner().log_id;
    assert_ne!(new, old);
    let check = v1::AppendBatchRequest {
        checks: vec![v1::LogCheck {
            log: "a".to_owned(),
            log_id: Some(old),
            ..v1::LogCheck::default()
        }],
        ..batches(vec![part("b", &["x"])])
    };
    let moved = v1::CursorCommit {
        log_id: Some(old),
        ..commit("a", "c", 1)
    };
    let moved_in_batch = v1::AppendBatchRequest {
        cursors: vec![moved.clone()],
        ..batches(vec![part("b", &["x"])])
    };
    let trim = v1::TrimRequest {
        log: "a".to_owned(),
        before_lsn: 1,
        log_id: Some(old),
    };
    let delete_cursor = v1::DeleteCursorRequest {
        log: "a".to_owned(),
        cursor: "c".to_owned(),
        log_id: Some(old),
    };
    session.send_batch(2, known(of_old())).await;
    let (acked, end) = session.rest().await;
    assert!(acked.is_empty());
    let (expected, actual) = (old.to_string(), new.to_string());
    let facts = [
        ("expected_log_id", expected.as_str()),
        ("actual_log_id", actual.as_str()),
    ];
    let writes = [
        ("session", end.unwrap_err()),
        ("append", clients.refused("a", of_old()).await),
        ("producer, repeat", clients.refused("a", produced(0)).await),
        ("producer, next", clients.refused("a", produced(1)).await),
        ("batch", clients.batch_refused(known(of_old())).await),
        ("check", clients.batch_refused(check).await),
        ("batch, cursor", clients.batch_refused(moved_in_batch).await),
        ("trim", clients.wal.trim(trim).await.unwrap_err()),
        ("fence", clients.wal.fence(fence_old()).await.unwrap_err()),
        ("delete", clients.logs.delete_log(delete).await.unwrap_err()),
        (
            "cursor",
            clients
                .cursors
                .commit_cursor(commit_request(moved))
                .await
                .unwrap_err(),
        ),
        (
            "delete cursor",
            clients
                .cursors
                .delete_cursor(delete_cursor)
                .await
                .unwrap_err(),
        ),
    ];
    for (situation, status) in writes {
        expect(situation, &status, replaced, NEVER, &facts);
    }
    let read = v1::ReadRequest {
        log_id: Some(old),
        ..read_at("a", 0)
    };
    let one = v1::scan_request::Selector::Log("a".to_owned());
    let scan = v1::ScanRequest {
        log_id: Some(old),
        ..scan(one, 0)
    };
    let tail = v1::GetTailRequest {
        log: "a".to_owned(),
        log_id: Some(old),
        ..v1::GetTailRequest::default()
    };
    let get_cursor = v1::GetCursorRequest {
        log: "a".to_owned(),
        cursor: "c".to_owned(),
        log_id: Some(old),
    };
    let list = v1::ListCursorsRequest {
        log: "a".to_owned(),
        log_id: Some(old),
        ..v1::ListCursorsRequest::default()
    };
    let reads = [
        ("read", clients.wal.read(read).await.unwrap_err()),
        ("scan", clients.scan_refused(scan).await),
        ("tail", clients.wal.get_tail(tail).await.unwrap_err()),
        (
            "get cursor",
            clients.cursors.get_cursor(get_cursor).await.unwrap_err(),
        ),
        (
            "list",
            clients.cursors.list_cursors(list).await.unwrap_err(),
        ),
    ];
    for (situation, status) in reads {
        expect(situation, &status, replaced, READ, &facts);
    }

    // The new log is unchanged, and has no cursors or producers of the old one.
    let page = clients
        .wal
        .read(read_at("a", 0))
        .await
        .unwrap()
        .into_inner();
    let found = records(&[page.batch.unwrap()]);
    assert_eq!(found, [("a".to_owned(), 0, "new".to_owned())]);
    let get = v1::GetLogRequest {
        log: "a".to_owned(),
    };
    let shown = clients.logs.get_log(get).await.unwrap().into_inner();
    assert_eq!(shown.log.unwrap().writer_epoch, Some(0));
    let cursor = v1::GetCursorRequest {
        log: "a".to_owned(),
        cursor: "c".to_owned(),
        log_id: None,
    };
    let gone = clients.cursors.get_cursor(cursor).await.unwrap_err();
    assert_eq!(Told::of(&gone).reason, "CURSOR_NOT_FOUND");
    let first = clients.wal.append(on("a", by("p", 0, 0))).await.unwrap();
    let first = first.into_inner();
    assert_eq!((first.lsn, first.deduplicated), (Some(1), false));
    let missing = clients.wal.read(read_at("b", 0)).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
}

/// A status travels in HTTP/2 headers, which clients bound.
#[tokio::test]
async fn refusal_for_many_reasons_is_told_and_ends_no_connection() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    let mut session = SessionClient::open(&mut wal).await;
    for count in [1, 100, 1000] {
        let check = |number: usize| v1::LogCheck {
            log: format!("{number:ü>120}"),
            must_exist: true,
            ..v1::LogCheck::default()
        };
        let batch = v1::AppendBatchRequest {
            batches: vec![part("a", &["x"])],
            checks: (0..count).map(check).collect(),
            ..v1::AppendBatchRequest::default()
        };
        let told = Told::of(&wal.append_batch(batch).await.unwrap_err());
        assert_eq!(
            (told.code, told.reason.as_str()),
            (Code::FailedPrecondition, "LOG_MISSING")
        );
        assert_eq!(told.fact("failed_checks"), count.to_string());
        assert_eq!(told.fact("outcome"), "NOT_APPLIED");
        assert!((1..=100).contains(&told.violations));
        // On the same connection.
        session.send(7, vec![part("b", &["x"])]).await;
        let answer = session.answers.message().await.unwrap().unwrap();
        assert_eq!(answer.request_id, 7);
    }
}
