//! Reads and scans over the wire.

use std::time::Duration;

use crate::support::{Daemon, Told, append, part, records};
use rustix::process::Signal;
use tonic::{Code, Streaming};
use wald_proto::v1;
use wald_proto::v1::scan_request::{Selector, Start};
use wald_proto::v1::{read_request, wal_service_client::WalServiceClient};

fn read(log: &str) -> v1::ReadRequest {
    v1::ReadRequest {
        log: log.to_owned(),
        ..v1::ReadRequest::default()
    }
}

fn scan(selector: Selector) -> v1::ScanRequest {
    v1::ScanRequest {
        selector: Some(selector),
        ..v1::ScanRequest::default()
    }
}

fn one(log: &str) -> v1::ScanRequest {
    scan(Selector::Log(log.to_owned()))
}

fn prefix(prefix: &str) -> v1::ScanRequest {
    scan(Selector::Prefix(prefix.to_owned()))
}

type Wal = WalServiceClient<tonic::transport::Channel>;

async fn batch(wal: &mut Wal, batches: Vec<v1::LogBatch>) {
    wal.append_batch(v1::AppendBatchRequest {
        batches,
        ..v1::AppendBatchRequest::default()
    })
    .await
    .unwrap();
}

/// Everything until the end of the stream.
async fn all(wal: &mut Wal, request: v1::ScanRequest) -> Vec<(String, u64, String)> {
    let mut stream = wal.scan(request).await.unwrap().into_inner();
    let mut found = Vec::new();
    while let Some(message) = stream.message().await.unwrap() {
        found.extend(records(&message.batches));
    }
    found
}

/// The next message that carries records.
async fn next_records(stream: &mut Streaming<v1::ScanResponse>) -> v1::ScanResponse {
    loop {
        let message = stream.message().await.unwrap().unwrap();
        if !message.batches.is_empty() {
            return message;
        }
    }
}

async fn caught_up(stream: &mut Streaming<v1::ScanResponse>) {
    while !stream.message().await.unwrap().unwrap().caught_up {}
}

fn record(log: &str, lsn: u64, payload: &str) -> (String, u64, String) {
    (log.to_owned(), lsn, payload.to_owned())
}

#[tokio::test]
async fn pages_follow_each_other_by_next_lsn() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    batch(&mut wal, vec![part("a", &["0", "1", "2", "3", "4"])]).await;
    let mut lsn = 0;
    let mut found = Vec::new();
    loop {
        let page = wal
            .read(v1::ReadRequest {
                start: Some(read_request::Start::Lsn(lsn)),
                max_records: 2,
                ..read("a")
            })
            .await
            .unwrap()
            .into_inner();
        let Some(batch) = page.batch else { break };
        assert!(batch.records.len() <= 2);
        found.extend(records(&[batch]));
        lsn = page.next_lsn.unwrap();
    }
    let payloads: Vec<&str> = found.iter().map(|(_, _, payload)| &**payload).collect();
    assert_eq!(payloads, ["0", "1", "2", "3", "4"]);
    let beyond = wal
        .read(v1::ReadRequest {
            start: Some(read_request::Start::Lsn(9)),
            ..read("a")
        })
        .await
        .unwrap_err();
    let told = Told::of(&beyond);
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::OutOfRange, "BEYOND_TAIL")
    );
    assert_eq!(told.fact("tail_lsn"), "5");
    let last = wal
        .read(v1::ReadRequest {
            start: Some(read_request::Start::TailOffset(2)),
            ..read("a")
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(last.batch.unwrap().first_lsn, Some(3));
}

#[tokio::test]
async fn text_view_shows_text_lsn_and_time() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "grüße")).await.unwrap();
    let page = wal
        .read(v1::ReadRequest {
            view: v1::RecordView::Text.into(),
            ..read("a")
        })
        .await
        .unwrap()
        .into_inner();
    let record = &page.batch.unwrap().records[0];
    assert_eq!(
        record.payload,
        Some(v1::record::Payload::Text("grüße".to_owned()))
    );
    assert_eq!(record.lsn, Some(0));
    assert!(record.time.starts_with("20") && record.time.ends_with('Z'));
}

#[tokio::test]
async fn waiting_read_is_answered_by_the_append_it_waits_for() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "0")).await.unwrap();
    let request = v1::ReadRequest {
        start: Some(read_request::Start::Lsn(1)),
        wait: Some(prost_types::Duration {
            seconds: 60,
            nanos: 0,
        }),
        ..read("a")
    };
    let mut reader = wal.clone();
    let waiting = tokio::spawn(async move { reader.read(request).await });
    wal.append(append("a", "1")).await.unwrap();
    let page = waiting.await.unwrap().unwrap().into_inner();
    assert_eq!(records(&[page.batch.unwrap()]), [record("a", 1, "1")]);
}

#[tokio::test]
async fn waiting_read_without_an_append_is_an_empty_page() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "0")).await.unwrap();
    let mut request = tonic::Request::new(v1::ReadRequest {
        start: Some(read_request::Start::Lsn(1)),
        wait: Some(prost_types::Duration {
            seconds: 3600,
            nanos: 0,
        }),
        ..read("a")
    });
    // The deadline is shorter than the wait, and still the page comes. The server keeps a tenth of the
    // deadline for its answer: of a shorter one a busy machine needs more.
    request.set_timeout(Duration::from_secs(3));
    let page = wal.read(request).await.unwrap().into_inner();
    assert_eq!((page.batch, page.next_lsn), (None, Some(1)));
}

#[tokio::test]
async fn scan_of_a_range_ends_where_it_was_told() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    batch(&mut wal, vec![part("a", &["0", "1", "2", "3"])]).await;
    batch(&mut wal, vec![part("a", &["4", "5"])]).await;
    let range = v1::ScanRequest {
        start: Some(Start::Lsn(1)),
        until_lsn: Some(5),
        ..one("a")
    };
    let lsns: Vec<u64> = all(&mut wal, range).await.iter().map(|r| r.1).collect();
    assert_eq!(lsns, [1, 2, 3, 4]);
    let bounded = v1::ScanRequest {
        max_records: 3,
        ..one("a")
    };
    assert_eq!(all(&mut wal, bounded).await.len(), 3);
    let unknown = wal.scan(one("b")).await.unwrap_err();
    assert_eq!(Told::of(&unknown).reason, "LOG_NOT_FOUND");
}

#[tokio::test]
async fn scan_by_prefix_has_its_logs_only_in_commit_order() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    batch(&mut wal, vec![part("x/a", &["0"])]).await;
    batch(&mut wal, vec![part("y", &["0"])]).await;
    batch(&mut wal, vec![part("x/b", &["0", "1"])]).await;
    batch(&mut wal, vec![part("x/a", &["1"])]).await;
    assert_eq!(
        all(&mut wal, prefix("x/")).await,
        [
            record("x/a", 0, "0"),
            record("x/b", 0, "0"),
            record("x/b", 1, "1"),
            record("x/a", 1, "1"),
        ]
    );
    assert_eq!(all(&mut wal, prefix("z/")).await, []);
    assert_eq!(
        all(&mut wal, scan(Selector::All(v1::AllLogs {})))
            .await
            .len(),
        5
    );
}

#[tokio::test]
async fn following_scan_sees_what_is_appended_later_also_to_new_logs() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    batch(&mut wal, vec![part("x/a", &["0"])]).await;
    let mut stream = wal
        .scan(v1::ScanRequest {
            follow: true,
            ..prefix("x/")
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        records(&next_records(&mut stream).await.batches),
        [record("x/a", 0, "0")]
    );
    batch(&mut wal, vec![part("x/new", &["n"])]).await;
    assert_eq!(
        records(&next_records(&mut stream).await.batches),
        [record("x/new", 0, "n")]
    );
}

#[tokio::test]
async fn scan_from_now_on_begins_with_the_next_append() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "before")).await.unwrap();
    let mut stream = wal
        .scan(v1::ScanRequest {
            start: Some(Start::TailOffset(0)),
            follow: true,
            ..scan(Selector::All(v1::AllLogs {}))
        })
        .await
        .unwrap()
        .into_inner();
    caught_up(&mut stream).await;
    wal.append(append("a", "after")).await.unwrap();
    assert_eq!(
        records(&next_records(&mut stream).await.batches),
        [record("a", 1, "after")]
    );
}

#[tokio::test]
async fn a_follower_of_what_is_missing_catches_up_and_misses_nothing() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    let missing = [
        scan(Selector::Log("m/a".to_owned())),
        prefix("m/"),
        scan(Selector::All(v1::AllLogs {})),
    ];
    let mut streams = Vec::new();
    for request in missing {
        let request = v1::ScanRequest {
            start: Some(Start::TailOffset(0)),
            follow: true,
            ..request
        };
        let mut stream = wal.scan(request.clone()).await.unwrap().into_inner();
        let first = stream.message().await.unwrap().unwrap();
        assert!(first.caught_up && first.batches.is_empty() && !first.cursor.is_empty());
        streams.push((request, first.cursor, stream));
    }
    batch(&mut wal, vec![part("m/a", &["0", "1", "2"])]).await;
    let expected: Vec<_> = (0..3)
        .map(|lsn| record("m/a", lsn, &lsn.to_string()))
        .collect();
    for (request, cursor, mut stream) in streams {
        assert_eq!(records(&next_records(&mut stream).await.batches), expected);
        let resumed = v1::ScanRequest {
            start: Some(Start::Cursor(cursor)),
            ..request
        };
        let mut stream = wal.scan(resumed).await.unwrap().into_inner();
        assert_eq!(records(&next_records(&mut stream).await.batches), expected);
    }
}

#[tokio::test]
async fn cursor_resumes_exactly_after_its_message() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    // Enough for several messages.
    let line = "x".repeat(1000);
    let lines = vec![line.as_str(); 200];
    for _ in 0..5 {
        batch(&mut wal, vec![part("a", &lines), part("b", &lines)]).await;
    }
    let whole = all(&mut wal, scan(Selector::All(v1::AllLogs {}))).await;
    assert_eq!(whole.len(), 2000);
    let mut found = Vec::new();
    let mut cursor = None;
    loop {
        let mut stream = wal
            .scan(v1::ScanRequest {
                start: cursor.map(Start::Cursor),
                ..scan(Selector::All(v1::AllLogs {}))
            })
            .await
            .unwrap()
            .into_inner();
        // One message of each scan, then on from its cursor.
        let Some(message) = stream.message().await.unwrap() else {
            break;
        };
        let some = records(&message.batches);
        cursor = Some(message.cursor);
        if some.is_empty() {
            break;
        }
        found.extend(some);
    }
    assert_eq!(found, whole);
    let refused = wal
        .scan(v1::ScanRequest {
            start: Some(Start::Cursor("nonsense".into())),
            ..one("a")
        })
        .await
        .unwrap_err();
    assert_eq!(Told::of(&refused).reason, "INVALID_SCAN");
}

#[tokio::test]
async fn selector_and_start_must_fit() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    for request in [
        v1::ScanRequest::default(),
        v1::ScanRequest {
            start: Some(Start::Lsn(1)),
            ..prefix("a")
        },
        v1::ScanRequest {
            start: Some(Start::TailOffset(3)),
            ..prefix("a")
        },
        v1::ScanRequest {
            until_lsn: Some(3),
            ..prefix("a")
        },
    ] {
        let told = Told::of(&wal.scan(request).await.unwrap_err());
        assert_eq!(
            (told.code, told.reason.as_str()),
            (Code::InvalidArgument, "INVALID_SCAN")
        );
    }
}

#[tokio::test]
async fn silent_scan_sends_heartbeats_that_can_be_resumed_from() {
    let daemon = Daemon::start(&["--heartbeat-interval", "20ms"]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "0")).await.unwrap();
    let follow = v1::ScanRequest {
        follow: true,
        ..one("a")
    };
    let mut stream = wal.scan(follow.clone()).await.unwrap().into_inner();
    next_records(&mut stream).await;
    let heartbeat = loop {
        let message = stream.message().await.unwrap().unwrap();
        if !message.caught_up {
            break message;
        }
    };
    assert!(heartbeat.batches.is_empty() && heartbeat.gaps.is_empty());
    assert!(heartbeat.recovery_epoch > 0);
    wal.append(append("a", "1")).await.unwrap();
    let mut resumed = wal
        .scan(v1::ScanRequest {
            start: Some(Start::Cursor(heartbeat.cursor)),
            ..follow
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        records(&next_records(&mut resumed).await.batches),
        [record("a", 1, "1")]
    );
}

#[tokio::test]
async fn following_scan_ends_with_draining_when_the_server_stops() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "0")).await.unwrap();
    let mut stream = wal
        .scan(v1::ScanRequest {
            follow: true,
            ..one("a")
        })
        .await
        .unwrap()
        .into_inner();
    next_records(&mut stream).await;
    daemon.signal(Signal::TERM);
    let ended = loop {
        match stream.message().await {
            Ok(message) => assert!(message.is_some(), "the stream must not just end"),
            Err(status) => break status,
        }
    };
    let told = Told::of(&ended);
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::Unavailable, "DRAINING")
    );
    assert!(daemon.ended().await.success());
}
