//! Clients that do not read, and clients that die: their cost is bounded.

use crate::support::{Daemon, append, until};
use bytes::Bytes;
use tonic::transport::Channel;
use wald_proto::v1;
use wald_proto::v1::wal_service_client::WalServiceClient;

/// Bytes that clients of these tests take before they read.
const WINDOW_BYTES: u32 = 64 << 10;

/// Maximum bytes that a client without reads makes the server read for one scan: its window,
/// and two messages of 256 KiB and a record.
const AHEAD_BYTES: u32 = WINDOW_BYTES + 2 * ((256 + 64) << 10);

const RECORDS: usize = 256;

async fn fill(daemon: &Daemon, log: &str) {
    let mut wal = daemon.wal().await;
    let data = Bytes::from(vec![7; 64 << 10]);
    for _ in 0..RECORDS / 4 {
        let record = v1::Record {
            payload: Some(v1::record::Payload::Data(data.clone())),
            ..v1::Record::default()
        };
        let request = v1::AppendBatchRequest {
            batches: vec![v1::LogBatch {
                log: log.to_owned(),
                records: vec![record; 4],
                ..v1::LogBatch::default()
            }],
            durability: v1::Durability::Written.into(),
            ..v1::AppendBatchRequest::default()
        };
        wal.append_batch(request).await.unwrap();
    }
}

fn scan_of(selector: v1::scan_request::Selector, follow: bool) -> v1::ScanRequest {
    v1::ScanRequest {
        selector: Some(selector),
        follow,
        visibility: v1::Visibility::Written.into(),
        ..v1::ScanRequest::default()
    }
}

/// Reads a scan to its end; how many records it gave.
async fn read_all(mut scan: tonic::Streaming<v1::ScanResponse>) -> usize {
    let mut records = 0;
    while let Some(message) = scan.message().await.unwrap() {
        assert!(prost::Message::encoded_len(&message) <= 1 << 20);
        let batches = message.batches.iter();
        records += batches.map(|batch| batch.records.len()).sum::<usize>();
    }
    records
}

#[tokio::test]
async fn scan_whose_client_does_not_read_is_not_read_ahead() {
    let daemon = Daemon::start(&[]);
    fill(&daemon, "a").await;
    let selectors = [
        v1::scan_request::Selector::Log("a".to_owned()),
        v1::scan_request::Selector::All(v1::AllLogs {}),
    ];
    for selector in selectors {
        let address = daemon.start["grpc"].as_str().unwrap();
        let channel = Channel::from_shared(format!("http://{address}"))
            .unwrap()
            .initial_stream_window_size(WINDOW_BYTES)
            .connect()
            .await
            .unwrap();
        let mut wal = WalServiceClient::new(channel);
        let request = || scan_of(selector.clone(), false);
        let begun = daemon.metric("wald_read_bytes_total");
        let whole = wal.scan(request()).await.unwrap().into_inner();
        assert_eq!(read_all(whole).await, RECORDS);
        let before = daemon.metric("wald_read_bytes_total");
        let mut stalled = Vec::new();
        for _ in 0..4 {
            stalled.push(wal.scan(request()).await.unwrap().into_inner());
        }
        // While these stand still, another one on the same connection reads all of it.
        let whole = wal.scan(request()).await.unwrap().into_inner();
        assert_eq!(read_all(whole).await, RECORDS);
        let read = daemon.metric("wald_read_bytes_total") - before;
        let ahead = read - (before - begun);
        assert!(
            ahead > 0.0 && ahead <= f64::from(4 * AHEAD_BYTES),
            "{ahead} bytes"
        );
        // A client that begins to read after all gets all of it.
        for scan in stalled {
            assert_eq!(read_all(scan).await, RECORDS);
        }
    }
}

#[tokio::test]
async fn client_that_dies_leaves_nothing_behind() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "x")).await.unwrap();
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
        let mut open = Vec::new();
        for index in 0..20 {
            let selector = match index % 2 {
                0 => v1::scan_request::Selector::Log("a".to_owned()),
                _ => v1::scan_request::Selector::Prefix("a".to_owned()),
            };
            let scan = wal.scan(scan_of(selector, true)).await.unwrap();
            open.push(scan.into_inner());
        }
        for _ in 0..50 {
            let mut wal = wal.clone();
            tokio::spawn(async move { while wal.append(append("b", "x")).await.is_ok() {} });
        }
        std::future::pending::<()>().await;
    });
    until(&daemon, "wald_followers", |followers| followers == 20.0).await;
    until(&daemon, "wald_appended_records_total", |n| n > 100.0).await;
    dying.shutdown_background();
    until(&daemon, "wald_followers", |followers| followers == 0.0).await;
    until(&daemon, "wald_inflight_bytes", |bytes| bytes == 0.0).await;
    wal.append(append("a", "y")).await.unwrap();
}
