//! Appends over the wire: acks, conditions, refusals.

use crate::support::{Daemon, Told, append, part, payload, records};
use tonic::Code;
use wald_proto::v1;

fn read(log: &str) -> v1::ReadRequest {
    v1::ReadRequest {
        log: log.to_owned(),
        ..v1::ReadRequest::default()
    }
}

#[tokio::test]
async fn append_answers_lsn_position_and_that_it_is_durable() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    let first = wal.append(append("a", "one")).await.unwrap().into_inner();
    assert_eq!(first.lsn, Some(0));
    assert_eq!(first.durable_lsn, Some(1));
    assert_eq!(first.durability(), v1::Durability::Durable);
    assert!(first.timestamp_us > 0 && first.log_id > 0 && first.recovery_epoch > 0);
    let second = wal.append(append("a", "two")).await.unwrap().into_inner();
    assert_eq!(second.lsn, Some(1));
    assert!(second.position > first.position);
    let page = wal.read(read("a")).await.unwrap().into_inner();
    let batch = page.batch.unwrap();
    assert_eq!(batch.first_lsn, Some(0));
    let payloads: Vec<String> = batch.records.iter().map(payload).collect();
    assert_eq!(payloads, ["one", "two"]);
    assert_eq!((page.next_lsn, page.tail_lsn), (Some(2), Some(2)));
}

#[tokio::test]
async fn record_comes_back_with_its_headers_time_and_checksum() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    let record = v1::Record {
        payload: Some(v1::record::Payload::Data("123456789".into())),
        headers: vec![v1::Header {
            key: "k".to_owned(),
            value: "v".into(),
        }],
        timestamp_us: 1_000_000,
        crc32c: Some(0xe306_9283),
        ..v1::Record::default()
    };
    let request = v1::AppendRequest {
        record: Some(record.clone()),
        ..append("a", "")
    };
    wal.append(request.clone()).await.unwrap();
    let page = wal.read(read("a")).await.unwrap().into_inner();
    assert_eq!(page.batch.unwrap().records, std::slice::from_ref(&record));
    let refused = wal
        .append(v1::AppendRequest {
            record: Some(v1::Record {
                crc32c: Some(1),
                ..record
            }),
            ..request
        })
        .await
        .unwrap_err();
    assert_eq!(Told::of(&refused).reason, "CHECKSUM_MISMATCH");
}

#[tokio::test]
async fn batch_over_two_logs_is_applied_as_one() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    let answer = wal
        .append_batch(v1::AppendBatchRequest {
            batches: vec![part("b", &["1", "2"]), part("a", &["3"])],
            checks: vec![v1::LogCheck {
                log: "c".to_owned(),
                expected_lsn: Some(0),
                ..v1::LogCheck::default()
            }],
            ..v1::AppendBatchRequest::default()
        })
        .await
        .unwrap()
        .into_inner();
    let lsns: Vec<_> = answer
        .appends
        .iter()
        .map(|log| (log.log.as_str(), log.first_lsn, log.next_lsn))
        .collect();
    assert_eq!(lsns, [("b", Some(0), Some(2)), ("a", Some(0), Some(1))]);
    assert_ne!(answer.appends[0].log_id, answer.appends[1].log_id);
    assert!(answer.position.is_some());
}

#[tokio::test]
async fn failed_conditions_are_all_named_and_nothing_is_written() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "one")).await.unwrap();
    let refused = wal
        .append_batch(v1::AppendBatchRequest {
            batches: vec![
                v1::LogBatch {
                    condition: Some(v1::AppendCondition {
                        expected_lsn: Some(5),
                        ..v1::AppendCondition::default()
                    }),
                    ..part("a", &["x"])
                },
                part("b", &["y"]),
            ],
            checks: vec![v1::LogCheck {
                log: "c".to_owned(),
                must_exist: true,
                ..v1::LogCheck::default()
            }],
            ..v1::AppendBatchRequest::default()
        })
        .await
        .unwrap_err();
    let told = Told::of(&refused);
    assert_eq!(told.code, Code::FailedPrecondition);
    assert_eq!(told.reason, "POSITION_MISMATCH");
    assert_eq!(told.fact("actual_lsn"), "1");
    assert_eq!(told.fact("outcome"), "NOT_APPLIED");
    assert_eq!(told.fact("retry"), "NEVER");
    assert_eq!(told.violations, 2);
    let page = wal.read(read("a")).await.unwrap().into_inner();
    assert_eq!(page.tail_lsn, Some(1));
    let missing = wal.read(read("b")).await.unwrap_err();
    assert_eq!(Told::of(&missing).reason, "LOG_NOT_FOUND");
    assert_eq!(
        daemon.metric(r#"wald_condition_failures_total{reason="LOG_MISSING"}"#),
        1.0
    );
}

#[tokio::test]
async fn too_large_is_said_by_wald_and_not_by_the_transport() {
    let daemon = Daemon::start(&["--max-record-bytes", "1KiB", "--max-batch-bytes", "8KiB"]);
    let mut wal = daemon.wal().await;
    let refused = wal
        .append(append("a", &"x".repeat(2048)))
        .await
        .unwrap_err();
    let told = Told::of(&refused);
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::InvalidArgument, "RECORD_TOO_LARGE")
    );
    assert_eq!(told.fact("limit_bytes"), "1024");
    let line = "x".repeat(1000);
    let lines = vec![line.as_str(); 14];
    let refused = wal
        .append_batch(v1::AppendBatchRequest {
            batches: vec![part("a", &lines)],
            ..v1::AppendBatchRequest::default()
        })
        .await
        .unwrap_err();
    assert_eq!(Told::of(&refused).reason, "REQUEST_TOO_LARGE");
    // So large that they are not even decoded; a connection outlives any number of them.
    let megabyte = "x".repeat(1 << 20);
    for _ in 0..200 {
        let one = wal.append(append("a", &megabyte)).await.unwrap_err();
        let batch = v1::AppendBatchRequest {
            batches: vec![part("a", &[&megabyte])],
            ..v1::AppendBatchRequest::default()
        };
        let batch = wal.append_batch(batch).await.unwrap_err();
        for refused in [one, batch] {
            let told = Told::of(&refused);
            assert_eq!(
                (told.code, told.reason.as_str()),
                (Code::InvalidArgument, "REQUEST_TOO_LARGE")
            );
            assert_eq!(told.fact("outcome"), "NOT_APPLIED");
        }
    }
    wal.append(append("a", "x")).await.unwrap();
}

/// How often the threads that commit went to sleep.
fn sleeps(daemon: &Daemon) -> u64 {
    let tasks = format!("/proc/{}/task", daemon.pid().as_raw_nonzero());
    let tasks = std::fs::read_dir(tasks).unwrap();
    let status = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.unwrap().path().join("status")).unwrap_or_default()
    };
    let committing = tasks.map(status).filter(|text| text.contains("commit-"));
    let of = |text: String| {
        let line = text
            .lines()
            .find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
        line.unwrap().trim().parse::<u64>().unwrap()
    };
    committing.map(of).sum()
}

#[tokio::test]
async fn what_waits_for_no_flush_wakes_no_thread() {
    let daemon = Daemon::start(&["--sync-interval", "1h", "--marker-delay", "1h"]);
    let mut wal = daemon.wal().await;
    let written = || v1::AppendRequest {
        durability: v1::Durability::Written.into(),
        ..append("a", "x")
    };
    let mut fewest = u64::MAX;
    // A write that took long, on a machine that has other things to do, leaves the next ones to
    // those threads for a second.
    for _ in 0..100 {
        let before = sleeps(&daemon);
        for _ in 0..200 {
            wal.append(written()).await.unwrap();
        }
        fewest = fewest.min(sleeps(&daemon) - before);
        if fewest < 20 {
            return;
        }
    }
    panic!("200 appends woke them {fewest} times");
}

#[tokio::test]
async fn written_is_acked_as_written_and_sync_makes_it_durable() {
    let daemon = Daemon::start(&["--sync-interval", "1h"]);
    let mut wal = daemon.wal().await;
    let answer = wal
        .append(v1::AppendRequest {
            durability: v1::Durability::Written.into(),
            ..append("a", "x")
        })
        .await
        .unwrap()
        .into_inner();
    assert!(answer.durability() >= v1::Durability::Written);
    let synced = wal
        .sync(v1::SyncRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert!(synced.durable_position > answer.position);
    let tail = wal
        .get_tail(v1::GetTailRequest {
            log: "a".to_owned(),
            visibility: v1::Visibility::Durable.into(),
            ..v1::GetTailRequest::default()
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!((tail.tail_lsn, tail.durable_lsn), (Some(1), Some(1)));
    assert_eq!((tail.first_lsn, tail.writer_epoch), (Some(0), Some(0)));
}

#[tokio::test]
async fn many_writers_on_one_connection_all_get_their_own_lsn() {
    let daemon = Daemon::start(&[]);
    let wal = daemon.wal().await;
    let writers: Vec<_> = (0..300)
        .map(|writer| {
            let mut wal = wal.clone();
            tokio::spawn(async move { wal.append(append("a", &writer.to_string())).await })
        })
        .collect();
    let mut lsns = Vec::new();
    for writer in writers {
        lsns.push(writer.await.unwrap().unwrap().into_inner().lsn.unwrap());
    }
    lsns.sort_unstable();
    assert_eq!(lsns, (0..300).collect::<Vec<u64>>());
    let mut wal = wal;
    let page = wal
        .read(v1::ReadRequest {
            max_records: 1000,
            ..read("a")
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(records(&[page.batch.unwrap()]).len(), 300);
}
