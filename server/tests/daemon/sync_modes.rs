//! The sync modes over the wire: the meaning of an ack, and the loss of a kill.

use crate::support::{Daemon, append, part, records};
use tonic::transport::Channel;
use wald_proto::v1;
use wald_proto::v1::Durability::{Accepted, Durable, Written};
use wald_proto::v1::wal_service_client::WalServiceClient;

const MODES: [(&str, v1::SyncMode, v1::Durability, v1::Durability); 5] = [
    ("strict", v1::SyncMode::Strict, Durable, Durable),
    ("batch", v1::SyncMode::Batch, Written, Durable),
    ("interval", v1::SyncMode::Interval, Written, Written),
    ("async", v1::SyncMode::Async, Written, Written),
    ("manual", v1::SyncMode::Manual, Accepted, Accepted),
];

fn batch(log: &str) -> v1::AppendBatchRequest {
    v1::AppendBatchRequest {
        batches: vec![part(log, &["x"])],
        ..v1::AppendBatchRequest::default()
    }
}

async fn tail(
    wal: &mut WalServiceClient<Channel>,
    log: &str,
    visibility: v1::Visibility,
    epoch: u64,
) -> v1::GetTailResponse {
    let request = v1::GetTailRequest {
        log: log.to_owned(),
        visibility: visibility.into(),
        recovery_epoch: Some(epoch),
        ..v1::GetTailRequest::default()
    };
    wal.get_tail(request).await.unwrap().into_inner()
}

/// The whole log as a program sees it: records and gaps.
async fn scan(
    wal: &mut WalServiceClient<Channel>,
    start: Option<v1::scan_request::Start>,
) -> (Vec<String>, Vec<v1::Gap>) {
    let request = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::Log("a".to_owned())),
        start,
        ..v1::ScanRequest::default()
    };
    let mut stream = wal.scan(request).await.unwrap().into_inner();
    let (mut payloads, mut gaps) = (Vec::new(), Vec::new());
    while let Some(message) = stream.message().await.unwrap() {
        payloads.extend(records(&message.batches).into_iter().map(|r| r.2));
        gaps.extend(message.gaps);
    }
    (payloads, gaps)
}

#[tokio::test]
async fn every_mode_acks_at_the_level_of_the_table_and_is_seen_by_plain_readers() {
    for (name, mode, single, batched) in MODES {
        let daemon = Daemon::start(&["--sync-mode", name, "--sync-interval", "1h"]);
        assert_eq!(daemon.start["sync_mode"], name);
        let info = daemon
            .ops()
            .await
            .get_server_info(v1::GetServerInfoRequest {})
            .await
            .unwrap()
            .into_inner();
        assert_eq!(info.default_sync_mode(), mode);
        assert!(info.sync_modes().eq(MODES.map(|mode| mode.1)));
        let mut wal = daemon.wal().await;
        wal.append(append("a", "the log is made")).await.unwrap();
        let answer = wal.append(append("a", "x")).await.unwrap().into_inner();
        assert!(answer.durability() >= single, "{name}");
        if single != Durable {
            assert_eq!(answer.durability(), single, "{name}");
        }
        assert_eq!(answer.position.is_none(), single == Accepted, "{name}");
        let answer = wal.append_batch(batch("a")).await.unwrap().into_inner();
        assert_eq!(answer.durability(), batched, "{name}");
        let epoch = answer.recovery_epoch;
        let seen = tail(&mut wal, "a", v1::Visibility::Unspecified, epoch).await;
        assert_eq!(seen.tail_lsn, Some(3), "{name}");
        let label = match batched {
            Accepted => "accepted",
            Written => "written",
            _ => "durable",
        };
        let count = format!("wald_append_duration_seconds_count{{durability=\"{label}\"}}");
        assert!(daemon.metric(&count) >= 1.0, "{name}");
    }
}

#[tokio::test]
async fn request_for_durable_is_flushed_in_every_mode() {
    for (name, ..) in MODES {
        let daemon = Daemon::start(&["--sync-mode", name, "--sync-interval", "1h"]);
        let mut wal = daemon.wal().await;
        for _ in 0..3 {
            wal.append(append("a", "weak")).await.unwrap();
        }
        let request = v1::AppendRequest {
            durability: Durable.into(),
            ..append("a", "strong")
        };
        let answer = wal.append(request).await.unwrap().into_inner();
        assert_eq!(answer.durability(), Durable, "{name}");
        assert_eq!(
            (answer.lsn, answer.durable_lsn),
            (Some(3), Some(4)),
            "{name}"
        );
    }
}

#[tokio::test]
async fn weaker_default_is_warned_of_with_what_can_be_lost() {
    let daemon = Daemon::start(&["--sync-mode", "manual", "--buffer-bytes", "3MiB"]);
    let line = daemon.wait_for_log("acks are weaker than durable");
    let event: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(
        (&event["level"], &event["sync_mode"]),
        (&"WARN".into(), &"manual".into())
    );
    let warning = event["warning"].as_str().unwrap();
    assert!(warning.contains("crash of the process") && warning.contains("3MiB"));
}

#[tokio::test]
async fn trickle_in_interval_mode_becomes_durable_unasked() {
    let daemon = Daemon::start(&["--sync-mode", "interval", "--sync-interval", "20ms"]);
    let create = v1::CreateLogRequest {
        log: "a".to_owned(),
        config: None,
    };
    daemon.logs().await.create_log(create).await.unwrap();
    let mut wal = daemon.wal().await;
    for lsn in 0..5 {
        wal.append(append("a", "x")).await.unwrap();
        let request = v1::ReadRequest {
            log: "a".to_owned(),
            start: Some(v1::read_request::Start::Lsn(lsn)),
            visibility: v1::Visibility::Durable.into(),
            wait: Some(prost_types::Duration {
                seconds: 30,
                nanos: 0,
            }),
            ..v1::ReadRequest::default()
        };
        let page = wal.read(request).await.unwrap().into_inner();
        assert_eq!(page.next_lsn, Some(lsn + 1));
    }
}

#[tokio::test]
async fn log_has_a_mode_of_its_own_which_is_shown_changed_and_kept() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &["--sync-interval", "1h"]);
    let mut logs = daemon.logs().await;
    let create = v1::CreateLogRequest {
        log: "a".to_owned(),
        config: Some(v1::LogConfig {
            sync_mode: v1::SyncMode::Manual.into(),
            ..v1::LogConfig::default()
        }),
    };
    let made = logs.create_log(create).await.unwrap().into_inner();
    assert_eq!(
        made.log.unwrap().config.unwrap().sync_mode(),
        v1::SyncMode::Manual
    );
    let mut wal = daemon.wal().await;
    let answer = wal.append(append("a", "x")).await.unwrap().into_inner();
    assert_eq!(answer.durability(), Accepted);
    let answer = wal.append(append("b", "x")).await.unwrap().into_inner();
    assert_eq!(answer.durability(), Durable);
    let mut update = v1::UpdateLogRequest {
        log: "a".to_owned(),
        config: Some(v1::LogConfig {
            sync_mode: v1::SyncMode::Async.into(),
            ..v1::LogConfig::default()
        }),
        update_mask: None,
    };
    logs.update_log(update.clone()).await.unwrap();
    drop(daemon);
    let daemon = Daemon::start_in(directory.path(), &["--sync-interval", "1h"]);
    let mut logs = daemon.logs().await;
    let listed = logs
        .list_logs(v1::ListLogsRequest::default())
        .await
        .unwrap()
        .into_inner()
        .logs;
    let modes: Vec<_> = listed
        .iter()
        .map(|log| log.config.unwrap().sync_mode())
        .collect();
    assert_eq!(modes, [v1::SyncMode::Async, v1::SyncMode::Unspecified]);
    let mut wal = daemon.wal().await;
    let answer = wal.append(append("a", "x")).await.unwrap().into_inner();
    assert_eq!(answer.durability(), Written);
    update.config = None;
    update.update_mask = Some(prost_types::FieldMask {
        paths: vec!["sync_mode".to_owned()],
    });
    let log = logs.update_log(update).await.unwrap().into_inner().log;
    assert_eq!(
        log.unwrap().config.unwrap().sync_mode(),
        v1::SyncMode::Unspecified
    );
    let answer = wal.append(append("a", "x")).await.unwrap().into_inner();
    assert_eq!(answer.durability(), Durable);
}

#[tokio::test]
async fn kill_in_async_mode_loses_nothing_that_was_written_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let arguments = ["--sync-mode", "async"];
    let daemon = Daemon::start_in(directory.path(), &arguments);
    let mut wal = daemon.wal().await;
    let mut positions = Vec::new();
    for number in 0..50 {
        let answer = wal.append(append("a", &number.to_string())).await.unwrap();
        let answer = answer.into_inner();
        assert!(answer.durability() >= Written);
        positions.push(answer.position.unwrap());
    }
    let epoch = daemon.start["recovery_epoch"].as_u64().unwrap();
    drop(daemon);
    let daemon = Daemon::start_in(directory.path(), &arguments);
    let mut wal = daemon.wal().await;
    let found = tail(&mut wal, "a", v1::Visibility::Unspecified, epoch).await;
    assert_eq!(
        (found.recovery_epoch, found.tail_lsn),
        (epoch + 1, Some(50))
    );
    let survived = found.survived_position.unwrap();
    assert!(positions.iter().all(|position| *position < survived));
    let (payloads, gaps) = scan(&mut wal, None).await;
    assert_eq!(payloads.len(), 50);
    assert_eq!(gaps, []);
    // A position of the new life is beyond: the two are never taken for one another.
    let answer = wal.append(append("a", "new")).await.unwrap().into_inner();
    assert!(answer.position.unwrap() >= survived);
}

#[tokio::test]
async fn kill_in_manual_mode_loses_exactly_what_was_not_synced_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let arguments = ["--sync-mode", "manual"];
    let daemon = Daemon::start_in(directory.path(), &arguments);
    let mut wal = daemon.wal().await;
    wal.append_batch(batch("a")).await.unwrap();
    for number in 1..10 {
        wal.append(append("a", &number.to_string())).await.unwrap();
    }
    let synced = wal.sync(v1::SyncRequest::default()).await.unwrap();
    let synced = synced.into_inner().durable_position.unwrap();
    for number in 10..15 {
        let answer = wal.append(append("a", &number.to_string())).await.unwrap();
        let answer = answer.into_inner();
        assert_eq!(answer.durability(), Accepted);
        assert_eq!(
            answer.position, None,
            "it is in memory, and has no place yet"
        );
    }
    let epoch = daemon.start["recovery_epoch"].as_u64().unwrap();
    let seen = tail(&mut wal, "a", v1::Visibility::Unspecified, epoch).await;
    assert_eq!((seen.tail_lsn, seen.durable_lsn), (Some(15), Some(10)));
    assert_eq!(
        seen.survived_position, None,
        "that epoch is the current one"
    );
    // A reader who has seen all of it keeps a cursor.
    let request = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::Log("a".to_owned())),
        ..v1::ScanRequest::default()
    };
    let mut stream = wal.scan(request).await.unwrap().into_inner();
    let mut cursor = None;
    while let Some(message) = stream.message().await.unwrap() {
        cursor = Some(message.cursor);
    }
    drop(daemon);
    let daemon = Daemon::start_in(directory.path(), &arguments);
    let mut wal = daemon.wal().await;
    let found = tail(&mut wal, "a", v1::Visibility::Unspecified, epoch).await;
    assert_eq!(
        (found.recovery_epoch, found.tail_lsn),
        (epoch + 1, Some(10))
    );
    assert!(found.survived_position.unwrap() >= synced);
    let (payloads, gaps) = scan(&mut wal, None).await;
    assert_eq!(payloads.last().unwrap(), "9");
    assert_eq!(gaps, []);
    let request = v1::AppendRequest {
        durability: Durable.into(),
        ..append("a", "new")
    };
    wal.append(request).await.unwrap();
    let start = v1::scan_request::Start::Cursor(cursor.unwrap());
    let (payloads, gaps) = scan(&mut wal, Some(start)).await;
    assert_eq!(payloads, ["new"]);
    let lost = &gaps[0];
    assert_eq!(
        (lost.reason(), lost.from_lsn),
        (v1::GapReason::Lost, Some(10))
    );
}

#[tokio::test]
async fn stopping_in_manual_mode_writes_what_is_buffered() {
    let directory = tempfile::tempdir().unwrap();
    let arguments = ["--sync-mode", "manual"];
    let daemon = Daemon::start_in(directory.path(), &arguments);
    let mut wal = daemon.wal().await;
    for number in 0..5 {
        wal.append(append("a", &number.to_string())).await.unwrap();
    }
    daemon.signal(rustix::process::Signal::TERM);
    assert_eq!(daemon.ended().await.code(), Some(0));
    let daemon = Daemon::start_in(directory.path(), &arguments);
    assert_eq!(daemon.start["recovery"], "clean");
    let (payloads, _) = scan(&mut daemon.wal().await, None).await;
    assert_eq!(payloads, ["0", "1", "2", "3", "4"]);
}
