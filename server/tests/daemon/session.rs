//! Append sessions: order, flow control, and all the ways they end.

use std::time::{Duration, Instant};

use crate::support::{Daemon, SessionClient, Told, append, part, text, until};
use rustix::process::Signal;
use tonic::transport::Channel;
use tonic::{Code, Status};
use wald_proto::v1;
use wald_proto::v1::wal_service_client::WalServiceClient;

async fn tail(daemon: &Daemon, log: &str) -> Result<u64, Status> {
    let request = v1::GetTailRequest {
        log: log.to_owned(),
        visibility: v1::Visibility::Accepted.into(),
        ..v1::GetTailRequest::default()
    };
    let answer = daemon.wal().await.get_tail(request).await?;
    Ok(answer.into_inner().tail_lsn.unwrap())
}

fn large(log: &str, bytes: usize) -> Vec<v1::LogBatch> {
    vec![part(log, &["x".repeat(bytes).as_str()])]
}

#[tokio::test]
async fn acks_come_in_the_order_of_the_requests_and_as_append_batch_gives_them() {
    let daemon = Daemon::start(&[]);
    let mut session = SessionClient::open(&mut daemon.wal().await).await;
    let requests = session.requests.clone();
    let sender = tokio::spawn(async move {
        for number in 0..500 {
            let log = format!("log-{}", number % 3);
            let request = v1::AppendSessionRequest {
                request_id: 1000 - number,
                batch: Some(v1::AppendBatchRequest {
                    batches: vec![part(&log, &["a", "b"])],
                    ..v1::AppendBatchRequest::default()
                }),
                ..v1::AppendSessionRequest::default()
            };
            requests.send(request).await.unwrap();
        }
    });
    let mut position = None;
    for number in 0..500 {
        let answer = session.answers.message().await.unwrap().unwrap();
        assert_eq!(answer.request_id, 1000 - number);
        let ack = answer.ack.unwrap();
        let first = number / 3 * 2;
        let append = &ack.appends[0];
        assert_eq!(append.log, format!("log-{}", number % 3));
        assert_eq!(
            (append.first_lsn, append.next_lsn),
            (Some(first), Some(first + 2))
        );
        assert_eq!(ack.durability(), v1::Durability::Durable);
        assert!(ack.position > position);
        position = ack.position;
    }
    sender.await.unwrap();
    assert_eq!(daemon.metric("wald_append_sessions"), 1.0);
    assert_eq!(daemon.metric("wald_appended_records_total"), 1000.0);
    drop(session.requests);
    assert!(session.answers.message().await.unwrap().is_none());
    until(&daemon, "wald_append_sessions", |open| open == 0.0).await;
}

/// The engine gets requests that arrive together as one if no client can see it; each gets its
/// own answer.
#[tokio::test]
async fn requests_that_are_joined_are_acked_as_if_they_were_not() {
    let daemon = Daemon::start(&[]);
    let mut session = SessionClient::open(&mut daemon.wal().await).await;
    let conditional = |log: &str, records: &[&str], lsn: u64| v1::LogBatch {
        condition: Some(v1::AppendCondition {
            expected_lsn: Some(lsn),
            ..v1::AppendCondition::default()
        }),
        ..part(log, records)
    };
    // Runs of one log, of each of three kinds, of requests of one to three records.
    let mut sent = Vec::new();
    let mut tails = [0_u64; 2];
    for number in 0_u64..3000 {
        let log = usize::from(number / 100 % 2 == 1);
        let records = &["a", "b", "c"][..1 + usize::try_from(number % 3).unwrap()];
        let name = ["x", "y"][log];
        let batch = match number / 50 % 3 {
            0 => part(name, records),
            1 => conditional(name, records, tails[log]),
            _ => v1::LogBatch {
                condition: Some(v1::AppendCondition::default()),
                ..part(name, records)
            },
        };
        let first = tails[log];
        tails[log] += records.len() as u64;
        let durability = match number / 70 % 2 {
            0 => v1::Durability::Unspecified,
            _ => v1::Durability::Written,
        };
        let request = v1::AppendSessionRequest {
            request_id: number,
            batch: Some(v1::AppendBatchRequest {
                batches: vec![batch],
                durability: durability.into(),
                ..v1::AppendBatchRequest::default()
            }),
            ..v1::AppendSessionRequest::default()
        };
        sent.push((request, name, first, tails[log]));
    }
    let requests = session.requests.clone();
    let all: Vec<_> = sent.iter().map(|(request, ..)| request.clone()).collect();
    let wrong = v1::AppendSessionRequest {
        request_id: 3000,
        batch: Some(v1::AppendBatchRequest {
            batches: vec![conditional("x", &["d"], tails[0] + 1)],
            ..v1::AppendBatchRequest::default()
        }),
        ..v1::AppendSessionRequest::default()
    };
    let behind = all[0].clone();
    let sender = tokio::spawn(async move {
        for request in all.into_iter().chain([wrong, behind]) {
            // The last may find the session ended.
            let _sent = requests.send(request).await;
        }
    });
    let mut position = None;
    let mut joined = 0;
    for (request, log, first, next) in sent {
        let answer = session.answers.message().await.unwrap().unwrap();
        assert_eq!(answer.request_id, request.request_id);
        let ack = answer.ack.unwrap();
        let [append] = ack.appends.as_slice() else {
            panic!("one log was appended to");
        };
        assert_eq!(append.log, log);
        let lsns = (append.first_lsn, append.next_lsn);
        assert_eq!(lsns, (Some(first), Some(next)), "{}", answer.request_id);
        assert!(ack.position > position);
        // Requests of their own are farther apart than their records are long.
        joined += u32::from(ack.position == position.map(|before| before + 1));
        position = ack.position;
        if request.batch.unwrap().durability == 0 {
            assert_eq!(ack.durability(), v1::Durability::Durable);
            assert!(append.durable_lsn >= Some(next));
        }
    }
    let refused = session.answers.message().await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("3000"), "{refused}");
    sender.await.unwrap();
    for (log, expected) in ["x", "y"].into_iter().zip(tails) {
        assert_eq!(tail(&daemon, log).await.unwrap(), expected);
    }
    assert_eq!(daemon.metric("wald_appended_records_total"), 6000.0);
    let acked = r#"wald_append_duration_seconds_count{durability="durable"}"#;
    let written = r#"wald_append_duration_seconds_count{durability="written"}"#;
    assert_eq!(daemon.metric(acked) + daemon.metric(written), 3000.0);
    for each in [
        "wald_group_requests_sum",
        r#"wald_append_phase_seconds_count{phase="queue"}"#,
        r#"wald_append_phase_seconds_count{phase="reply"}"#,
    ] {
        assert!(daemon.metric(each) >= 3000.0, "{each}");
    }
    assert!(joined > 0);
}

#[tokio::test]
async fn ack_is_sent_when_it_is_due_and_not_with_the_next() {
    let daemon = Daemon::start(&[]);
    let mut session = SessionClient::open(&mut daemon.wal().await).await;
    for number in 0..3 {
        session.send(number, vec![part("a", &["x"])]).await;
        let answer = session.answers.message().await.unwrap().unwrap();
        assert_eq!(answer.request_id, number);
    }
}

#[tokio::test]
async fn half_closed_session_acks_everything_and_ends_ok() {
    let daemon = Daemon::start(&[]);
    let mut session = SessionClient::open(&mut daemon.wal().await).await;
    for number in 0..50 {
        session.send(number, vec![part("a", &["x"])]).await;
    }
    drop(std::mem::replace(
        &mut session.requests,
        tokio::sync::mpsc::channel(1).0,
    ));
    let (acked, end) = session.rest().await;
    assert_eq!(acked, (0..50).collect::<Vec<_>>());
    end.unwrap();
    assert_eq!(tail(&daemon, "a").await.unwrap(), 50);
    // One without a request ends the same way.
    let mut session = SessionClient::open(&mut daemon.wal().await).await;
    session.requests = tokio::sync::mpsc::channel(1).0;
    let (acked, end) = session.rest().await;
    assert!(acked.is_empty());
    end.unwrap();
}

/// Faults of a request, and the error that ends its session.
pub(crate) fn wrong_requests() -> Vec<(v1::AppendBatchRequest, Code, &'static str)> {
    let batch = |batches| v1::AppendBatchRequest {
        batches,
        ..v1::AppendBatchRequest::default()
    };
    let conditional = v1::LogBatch {
        condition: Some(v1::AppendCondition {
            expected_lsn: Some(7),
            ..v1::AppendCondition::default()
        }),
        ..part("a", &["x"])
    };
    let unsound = v1::LogBatch {
        records: vec![v1::Record {
            crc32c: Some(1),
            ..text("x")
        }],
        ..part("a", &[])
    };
    vec![
        // Known in its turn only.
        (
            batch(vec![conditional]),
            Code::FailedPrecondition,
            "POSITION_MISMATCH",
        ),
        // Known before it queues.
        (
            batch(vec![unsound]),
            Code::InvalidArgument,
            "CHECKSUM_MISMATCH",
        ),
        (batch(vec![]), Code::InvalidArgument, "EMPTY_BATCH"),
        // Known before the engine has it.
        (
            batch(vec![part("$a", &["x"])]),
            Code::InvalidArgument,
            "INVALID_LOG_NAME",
        ),
    ]
}

#[tokio::test]
async fn failure_in_the_middle_leaves_exactly_the_requests_before_it() {
    for (wrong, code, reason) in wrong_requests() {
        let daemon = Daemon::start(&[]);
        let mut session = SessionClient::open(&mut daemon.wal().await).await;
        let requests = session.requests.clone();
        tokio::spawn(async move {
            for number in 0..300 {
                let batch = match number {
                    100 => wrong.clone(),
                    _ => v1::AppendBatchRequest {
                        batches: vec![part("a", &["x"])],
                        ..v1::AppendBatchRequest::default()
                    },
                };
                let request = v1::AppendSessionRequest {
                    request_id: 7 * number,
                    batch: Some(batch),
                    ..v1::AppendSessionRequest::default()
                };
                if requests.send(request).await.is_err() {
                    return;
                }
            }
        });
        let (acked, end) = session.rest().await;
        assert_eq!(acked, (0..100).map(|n| 7 * n).collect::<Vec<_>>());
        let told = Told::of(&end.unwrap_err());
        assert_eq!((told.code, told.reason.as_str()), (code, reason));
        assert_eq!(told.fact("request_id"), "700", "{reason}");
        assert_eq!(told.fact("outcome"), "NOT_APPLIED", "{reason}");
        assert_eq!(told.fact("retry"), "NEVER", "{reason}");
        assert_eq!(tail(&daemon, "a").await.unwrap(), 100, "{reason}");
    }
}

#[tokio::test]
async fn message_beyond_every_limit_is_refused_by_wald_not_by_the_transport() {
    let daemon = Daemon::start(&["--max-record-bytes", "4KiB", "--max-batch-bytes", "8KiB"]);
    let mut session = SessionClient::open(&mut daemon.wal().await).await;
    session.send(1, vec![part("a", &["x"])]).await;
    session.send(2, large("a", 200 << 10)).await;
    let (acked, end) = session.rest().await;
    assert_eq!(acked, [1]);
    let told = Told::of(&end.unwrap_err());
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::InvalidArgument, "REQUEST_TOO_LARGE")
    );
    assert_eq!(told.fact("outcome"), "NOT_APPLIED");
}

/// A client on a connection of its own with almost no receive window.
pub(crate) async fn reluctant(daemon: &Daemon) -> WalServiceClient<Channel> {
    let address = daemon.start["grpc"].as_str().unwrap();
    let channel = Channel::from_shared(format!("http://{address}"))
        .unwrap()
        .initial_stream_window_size(256)
        .connect()
        .await
        .unwrap();
    WalServiceClient::new(channel)
}

/// Sends requests of 16 KiB until one does not get through for a second; how many did.
async fn send_until_stuck(session: &SessionClient, most: u64) -> u64 {
    for number in 0..most {
        let send = session.send(number, large("a", 16 << 10));
        if tokio::time::timeout(Duration::from_secs(1), send)
            .await
            .is_err()
        {
            return number;
        }
    }
    panic!("the server reads on and on");
}

#[tokio::test]
async fn client_that_reads_no_acks_is_not_read_either() {
    let arguments = [
        "--session-window-bytes",
        "128KiB",
        "--stream-window-bytes",
        "64KiB",
    ];
    let daemon = Daemon::start(&arguments);
    let mut wal = reluctant(&daemon).await;
    let mut session = SessionClient::open(&mut wal).await;
    let sent = send_until_stuck(&session, 2000).await;
    // Applied: the window, and the acks that fit the client's own; far less than all requests.
    let applied = tail(&daemon, "a").await.unwrap();
    assert!((1..=30).contains(&applied), "{applied} of {sent}");
    assert!(sent <= applied + 20, "{applied} of {sent}");
    // Others on the same connection go on meanwhile.
    wal.append(append("b", "x")).await.unwrap();
    // A client that reads after all gets everything.
    session.requests = tokio::sync::mpsc::channel(1).0;
    let (acked, end) = session.rest().await;
    end.unwrap();
    assert!(acked.len() as u64 >= sent);
    assert!(acked.iter().copied().eq(0..acked.len() as u64));
    assert_eq!(tail(&daemon, "a").await.unwrap(), acked.len() as u64);
}

#[tokio::test]
async fn request_larger_than_the_window_passes_alone() {
    let daemon = Daemon::start(&["--session-window-bytes", "1KiB"]);
    let mut session = SessionClient::open(&mut daemon.wal().await).await;
    for number in 0..5 {
        session.send(number, large("a", 100 << 10)).await;
    }
    session.requests = tokio::sync::mpsc::channel(1).0;
    let (acked, end) = session.rest().await;
    end.unwrap();
    assert_eq!(acked, [0, 1, 2, 3, 4]);
}

#[tokio::test]
async fn sessions_wait_where_an_append_would_be_busy() {
    let daemon = Daemon::start(&["--max-inflight-bytes", "8KiB"]);
    let mut sessions = Vec::new();
    for log in 0..8 {
        let mut wal = daemon.wal().await;
        sessions.push(tokio::spawn(async move {
            let mut session = SessionClient::open(&mut wal).await;
            let requests = session.requests.clone();
            let sender = tokio::spawn(async move {
                for request_id in 0..100 {
                    let batch = Some(v1::AppendBatchRequest {
                        batches: large(&log.to_string(), 1000),
                        ..v1::AppendBatchRequest::default()
                    });
                    let request = v1::AppendSessionRequest {
                        request_id,
                        batch,
                        ..v1::AppendSessionRequest::default()
                    };
                    requests.send(request).await.unwrap();
                }
            });
            session.requests = tokio::sync::mpsc::channel(1).0;
            let (acked, end) = session.rest().await;
            sender.await.unwrap();
            end.unwrap();
            acked
        }));
    }
    for session in sessions {
        assert_eq!(session.await.unwrap(), (0..100).collect::<Vec<_>>());
    }
    assert_eq!(
        daemon.metric(r#"wald_rejected_total{operation="write",reason="BUSY"}"#),
        0.0,
        "a session is not turned away"
    );
    until(&daemon, "wald_inflight_bytes", |bytes| bytes == 0.0).await;
}

#[tokio::test]
async fn leaving_server_acks_what_it_has_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut session = SessionClient::open(&mut daemon.wal().await).await;
    let requests = session.requests.clone();
    tokio::spawn(async move {
        for request_id in 0.. {
            let batch = Some(v1::AppendBatchRequest {
                batches: vec![part("a", &["x"])],
                ..v1::AppendBatchRequest::default()
            });
            let request = v1::AppendSessionRequest {
                request_id,
                batch,
                ..v1::AppendSessionRequest::default()
            };
            if requests.send(request).await.is_err() {
                return;
            }
        }
    });
    until(&daemon, "wald_appended_records_total", |n| n > 50.0).await;
    daemon.signal(Signal::TERM);
    let (acked, end) = session.rest().await;
    let told = Told::of(&end.unwrap_err());
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::Unavailable, "DRAINING")
    );
    assert_eq!(
        (told.fact("outcome"), told.fact("retry")),
        ("NOT_APPLIED", "SAFE")
    );
    assert_eq!(daemon.ended().await.code(), Some(0));
    let daemon = Daemon::start_in(directory.path(), &[]);
    assert_eq!(daemon.start["recovery"], "clean");
    assert_eq!(tail(&daemon, "a").await.unwrap(), acked.len() as u64);
}

#[tokio::test]
async fn idle_session_ends_when_the_server_leaves() {
    let daemon = Daemon::start(&[]);
    let mut session = SessionClient::open(&mut daemon.wal().await).await;
    daemon.signal(Signal::TERM);
    let (acked, end) = session.rest().await;
    assert!(acked.is_empty());
    assert_eq!(Told::of(&end.unwrap_err()).reason, "DRAINING");
    assert_eq!(daemon.ended().await.code(), Some(0));
}

#[tokio::test]
async fn client_that_reads_no_acks_does_not_hold_up_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let arguments = [
        "--session-window-bytes",
        "128KiB",
        "--shutdown-timeout",
        "5m",
    ];
    let daemon = Daemon::start_in(directory.path(), &arguments);
    let mut wal = reluctant(&daemon).await;
    let session = SessionClient::open(&mut wal).await;
    send_until_stuck(&session, 2000).await;
    let applied = tail(&daemon, "a").await.unwrap();
    let begun = Instant::now();
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended().await.code(), Some(0));
    assert!(begun.elapsed() < Duration::from_secs(60));
    drop(session);
    let daemon = Daemon::start_in(directory.path(), &arguments);
    assert_eq!(daemon.start["recovery"], "clean");
    assert!(tail(&daemon, "a").await.unwrap() >= applied);
}

#[tokio::test]
async fn client_that_dies_leaves_what_was_read_and_nothing_open() {
    let daemon = Daemon::start(&[]);
    let address = daemon.start["grpc"].as_str().unwrap().to_owned();
    // A runtime of its own: dropping it closes its sockets in the middle of their work, like a
    // process that is killed.
    let dying = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    dying.spawn(async move {
        let channel = Channel::from_shared(format!("http://{address}"));
        let channel = channel.unwrap().connect().await.unwrap();
        let mut wal = WalServiceClient::new(channel);
        let mut sessions = Vec::new();
        for _ in 0..5 {
            sessions.push(SessionClient::open(&mut wal).await);
        }
        for number in 0.. {
            for session in &sessions {
                session.send(number, vec![part("a", &["x"])]).await;
            }
        }
    });
    until(&daemon, "wald_append_sessions", |open| open == 5.0).await;
    until(&daemon, "wald_appended_records_total", |n| n > 50.0).await;
    dying.shutdown_background();
    until(&daemon, "wald_append_sessions", |open| open == 0.0).await;
    until(&daemon, "wald_inflight_bytes", |bytes| bytes == 0.0).await;
    // Acked or not: requests that were read are applied, and the log continues.
    let applied = tail(&daemon, "a").await.unwrap();
    let next = daemon.wal().await.append(append("a", "y")).await.unwrap();
    assert_eq!(next.into_inner().lsn, Some(applied));
}

#[tokio::test]
async fn deadline_is_that_of_the_whole_stream() {
    let daemon = Daemon::start(&[]);
    let timeout = Some(Duration::from_millis(300));
    let mut session = SessionClient::open_with(&mut daemon.wal().await, timeout).await;
    session.send(1, vec![part("a", &["x"])]).await;
    let begun = Instant::now();
    let (acked, end) = session.rest().await;
    assert!(begun.elapsed() >= Duration::from_millis(100));
    assert_eq!(acked, [1]);
    let told = Told::of(&end.unwrap_err());
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::DeadlineExceeded, "DEADLINE_EXCEEDED")
    );
    // Nothing was under way.
    assert_eq!(told.fact("outcome"), "NOT_APPLIED");
}

/// Requests that a client had under way when its session failed are no reason to end its
/// connection.
#[tokio::test]
async fn sessions_that_fail_with_data_under_way_leave_their_connection_alone() {
    let daemon = Daemon::start(&["--max-local-resets", "20"]);
    let mut wal = daemon.wal().await;
    let mut healthy = SessionClient::open(&mut wal).await;
    let failing: Vec<_> = (0..60)
        .map(|_| {
            let mut wal = wal.clone();
            tokio::spawn(async move {
                let mut session = SessionClient::open(&mut wal).await;
                let requests = session.requests.clone();
                let sender = tokio::spawn(async move {
                    for request_id in 0..50 {
                        let batch = match request_id {
                            1 => v1::AppendBatchRequest::default(),
                            _ => v1::AppendBatchRequest {
                                batches: large("a", 64 << 10),
                                ..v1::AppendBatchRequest::default()
                            },
                        };
                        let batch = Some(batch);
                        let request = v1::AppendSessionRequest {
                            request_id,
                            batch,
                            ..v1::AppendSessionRequest::default()
                        };
                        if requests.send(request).await.is_err() {
                            return;
                        }
                    }
                });
                let rest = session.rest().await;
                // A client that gets the error stops sending.
                sender.abort();
                rest
            })
        })
        .collect();
    for (number, session) in (0..).zip(failing) {
        let (acked, end) = session.await.unwrap();
        assert_eq!(acked, [0]);
        assert_eq!(Told::of(&end.unwrap_err()).reason, "EMPTY_BATCH");
        healthy.send(number, vec![part("b", &["x"])]).await;
        let answer = healthy.answers.message().await.unwrap().unwrap();
        assert_eq!(answer.request_id, number);
    }
}
