//! Retention over the wire: bounds of logs and of the server, gaps for readers, cursors.

use std::time::{Duration, Instant};

use crate::support::{Daemon, Told, append, part, until};
use tonic::Code;
use wald_proto::v1;

/// As soon as can be.
const EAGER: [&str; 2] = ["--retention-interval", "5ms"];

fn by_records(max_records: u64) -> v1::Retention {
    v1::Retention {
        max_records,
        ..v1::Retention::default()
    }
}

async fn create(daemon: &Daemon, log: &str, retention: v1::Retention) {
    let request = v1::CreateLogRequest {
        log: log.to_owned(),
        config: Some(v1::LogConfig {
            retention: Some(retention),
            ..v1::LogConfig::default()
        }),
    };
    let created = daemon.logs().await.create_log(request).await.unwrap();
    let config = created.into_inner().log.unwrap().config.unwrap();
    assert_eq!(config.retention, Some(retention));
}

async fn update(daemon: &Daemon, log: &str, paths: &[&str], retention: Option<v1::Retention>) {
    let request = v1::UpdateLogRequest {
        log: log.to_owned(),
        config: Some(v1::LogConfig {
            retention,
            ..v1::LogConfig::default()
        }),
        update_mask: Some(prost_types::FieldMask {
            paths: paths.iter().map(|&path| path.to_owned()).collect(),
        }),
    };
    daemon.logs().await.update_log(request).await.unwrap();
}

/// Ten records, each a batch of its own.
async fn fill(daemon: &Daemon, log: &str) {
    for index in 0..10 {
        let record = append(log, &format!("{index}"));
        daemon.wal().await.append(record).await.unwrap();
    }
}

async fn first(daemon: &Daemon, log: &str) -> u64 {
    let request = v1::GetLogRequest {
        log: log.to_owned(),
    };
    let log = daemon.logs().await.get_log(request).await.unwrap();
    log.into_inner().log.unwrap().first_lsn.unwrap()
}

/// Asks until the log begins there.
async fn begins_at(daemon: &Daemon, log: &str, lsn: u64) {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let first = first(daemon, log).await;
        if first == lsn {
            return;
        }
        assert!(first < lsn, "{log} forgot {first} records, not {lsn}");
        assert!(
            Instant::now() < deadline,
            "{log} begins at {first} for long"
        );
    }
}

async fn gaps(daemon: &Daemon, log: &str) -> Vec<(u64, u64, v1::GapReason)> {
    let request = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::Log(log.to_owned())),
        start: Some(v1::scan_request::Start::Lsn(0)),
        ..v1::ScanRequest::default()
    };
    let mut stream = daemon.wal().await.scan(request).await.unwrap().into_inner();
    let mut gaps = Vec::new();
    while let Some(message) = stream.message().await.unwrap() {
        let told = message.gaps.iter();
        gaps.extend(told.map(|gap| (gap.from_lsn.unwrap(), gap.to_lsn.unwrap(), gap.reason())));
    }
    gaps
}

#[tokio::test]
async fn what_goes_past_a_bound_expires_and_readers_are_told() {
    use v1::GapReason::{Expired, Trimmed};
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &EAGER);
    create(&daemon, "a", by_records(4)).await;
    fill(&daemon, "a").await;
    fill(&daemon, "b").await;
    begins_at(&daemon, "a", 6).await;
    let read = v1::ReadRequest {
        log: "a".to_owned(),
        start: Some(v1::read_request::Start::Lsn(5)),
        ..v1::ReadRequest::default()
    };
    let told = Told::of(&daemon.wal().await.read(read).await.unwrap_err());
    let code = (told.code, told.reason.as_str(), told.fact("first_lsn"));
    assert_eq!(code, (Code::OutOfRange, "TRIMMED", "6"));
    assert_eq!(gaps(&daemon, "a").await, [(0, 6, Expired)]);
    assert_eq!(gaps(&daemon, "b").await, []);
    let expired = "wald_retention_expired_records_total";
    until(&daemon, expired, |records| records == 6.0).await;
    assert!(daemon.metric("wald_retention_trims_total") >= 1.0);
    assert!(daemon.metric("wald_retention_expired_bytes_total") >= 6.0 * 64.0);
    assert!(daemon.metric("wald_retention_pass_duration_seconds_count") >= 1.0);
    assert!(daemon.metric("wald_retention_clock_lag_seconds") < 60.0);
    drop(daemon);
    let daemon = Daemon::start_in(directory.path(), &["--retention-interval", "1h"]);
    assert_eq!(gaps(&daemon, "a").await, [(0, 6, Expired)]);
    let trim = v1::TrimRequest {
        log: "a".to_owned(),
        before_lsn: 7,
        log_id: None,
    };
    daemon.wal().await.trim(trim).await.unwrap();
    assert_eq!(gaps(&daemon, "a").await, [(0, 7, Trimmed)]);
}

#[tokio::test]
async fn records_go_by_age_and_batches_by_bytes() {
    let daemon = Daemon::start(&EAGER);
    let aged = v1::Retention {
        max_age: Some(prost_types::Duration {
            seconds: 0,
            nanos: 1_000_000,
        }),
        ..v1::Retention::default()
    };
    create(&daemon, "aged", aged).await;
    fill(&daemon, "aged").await;
    begins_at(&daemon, "aged", 10).await;
    let small = v1::Retention {
        max_bytes: 1,
        ..v1::Retention::default()
    };
    create(&daemon, "small", small).await;
    let batch = v1::AppendBatchRequest {
        batches: vec![part("small", &["0", "1", "2"])],
        ..v1::AppendBatchRequest::default()
    };
    for _ in 0..2 {
        let batch = batch.clone();
        daemon.wal().await.append_batch(batch).await.unwrap();
    }
    // The newest batch takes more than a byte.
    begins_at(&daemon, "small", 3).await;
}

#[tokio::test]
async fn the_servers_bounds_hold_for_logs_that_have_none_of_their_own() {
    let bound = ["--retention-max-records", "3"];
    let daemon = Daemon::start(&[EAGER, bound].concat());
    create(&daemon, "all", v1::Retention::default()).await;
    fill(&daemon, "all").await;
    fill(&daemon, "plain").await;
    begins_at(&daemon, "plain", 7).await;
    assert_eq!(first(&daemon, "all").await, 0);
    let info = v1::GetServerInfoRequest {};
    let info = daemon.ops().await.get_server_info(info).await.unwrap();
    assert_eq!(info.into_inner().default_retention, Some(by_records(3)));
    // One bound of its own, and then the server's again.
    update(
        &daemon,
        "all",
        &["retention.max_records"],
        Some(by_records(8)),
    )
    .await;
    begins_at(&daemon, "all", 2).await;
    update(&daemon, "all", &["retention"], None).await;
    begins_at(&daemon, "all", 7).await;
}

#[tokio::test]
async fn a_log_that_respects_cursors_waits_for_them() {
    let daemon = Daemon::start(&EAGER);
    let held = v1::Retention {
        respect_cursors: true,
        ..by_records(1)
    };
    create(&daemon, "held", held).await;
    create(&daemon, "free", by_records(1)).await;
    fill(&daemon, "held").await;
    fill(&daemon, "free").await;
    begins_at(&daemon, "free", 9).await;
    assert_eq!(first(&daemon, "held").await, 0, "nobody has read it");
    for (lsn, begins) in [(4, 4), (10, 9)] {
        let commit = v1::CursorCommit {
            log: "held".to_owned(),
            cursor: "c".to_owned(),
            lsn,
            ..v1::CursorCommit::default()
        };
        let request = v1::CommitCursorRequest {
            commit: Some(commit),
        };
        daemon.cursors().await.commit_cursor(request).await.unwrap();
        begins_at(&daemon, "held", begins).await;
    }
}

/// The one that gives up a bound must not get it back from one that changes something else.
#[tokio::test]
async fn updates_at_a_time_change_what_they_name_and_nothing_else() {
    let daemon = Daemon::start(&["--retention-interval", "1h"]);
    create(&daemon, "a", v1::Retention::default()).await;
    for round in 1..=20 {
        let given = v1::Retention {
            max_bytes: round,
            max_records: 2 * round,
            max_age: None,
            respect_cursors: round % 2 == 0,
        };
        tokio::join!(
            update(&daemon, "a", &["retention.max_bytes"], Some(given)),
            update(&daemon, "a", &["retention.max_records"], Some(given)),
            update(&daemon, "a", &["retention.respect_cursors"], Some(given)),
        );
        let request = v1::GetLogRequest {
            log: "a".to_owned(),
        };
        let shown = daemon.logs().await.get_log(request).await.unwrap();
        let config = shown.into_inner().log.unwrap().config.unwrap();
        assert_eq!(config.retention, Some(given), "round {round}");
    }
}
