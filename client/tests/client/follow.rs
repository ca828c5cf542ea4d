//! A follow survives its connections: nothing comes twice, nothing is skipped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prost::Message as _;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::Code;
use tonic::service::Routes;
use wald_client::proto::scan_request::Start;
use wald_client::{Client, Lsn, ScanEvent, ScanStream};

use crate::fake::{Fake, Step, message, refusal};

/// Records and interruptions up to the lsn before `until`, or the end.
async fn take(fake: &Fake, stream: &mut ScanStream, until: u64) -> (Vec<u64>, usize) {
    let mut lsns = Vec::new();
    let mut interruptions = 0;
    while lsns.last().is_none_or(|last| last + 1 < until) {
        let event = tokio::time::timeout(Duration::from_secs(10), stream.next())
            .await
            .unwrap();
        match event {
            Some(Ok(ScanEvent::Batch(batch))) => {
                for record in batch.records {
                    assert_eq!(record.data, record.lsn.to_string());
                    lsns.push(record.lsn.get());
                }
                fake.taken.send_replace(lsns.last().unwrap() + 1);
            }
            Some(Ok(ScanEvent::Interrupted(_))) => interruptions += 1,
            Some(Ok(_)) => {}
            Some(Err(error)) => panic!("{error:?}"),
            None => break,
        }
    }
    (lsns, interruptions)
}

#[tokio::test]
async fn follow_delivers_each_record_once_over_many_lost_connections() {
    let (fake, client) = Fake::start(60, 2).await;
    let mut stream = client.follow("log").open();
    let (lsns, interruptions) = take(&fake, &mut stream, 60).await;
    assert_eq!(lsns, (0..60).collect::<Vec<_>>());
    assert!(interruptions >= 10, "{interruptions}");
    let requests = fake.scan_requests.lock().unwrap();
    assert!(requests[0].start.is_none());
    assert!(matches!(
        requests.last().unwrap().start,
        Some(Start::Cursor(_))
    ));
}

#[tokio::test]
async fn follow_from_before_the_tail_is_pinned_to_an_lsn() {
    let (fake, client) = Fake::start(20, 0).await;
    let mut stream = client.follow("log").last(5).open();
    assert_eq!(
        take(&fake, &mut stream, 20).await.0,
        (15..20).collect::<Vec<_>>()
    );
    assert_eq!(
        fake.scan_requests.lock().unwrap()[0].start,
        Some(Start::Lsn(15))
    );
}

#[tokio::test]
async fn follow_that_got_only_heartbeats_begins_again_at_its_start() {
    let (fake, client) = Fake::start(20, 0).await;
    let facts = [("outcome", "NOT_APPLIED"), ("retry", "SAFE")];
    *fake.early_end.lock().unwrap() = Some(refusal(Code::Unavailable, "DRAINING", &facts));
    let mut stream = client.follow("log").from_lsn(4).open();
    let (lsns, interruptions) = take(&fake, &mut stream, 20).await;
    assert_eq!(lsns, (4..20).collect::<Vec<_>>());
    assert_eq!(interruptions, 1);
    let requests = fake.scan_requests.lock().unwrap();
    let starts: Vec<_> = requests.iter().map(|request| &request.start).collect();
    assert_eq!(starts, [&Some(Start::Lsn(4)), &Some(Start::Lsn(4))]);
}

#[tokio::test]
async fn bounded_scan_counts_what_came_over_earlier_connections() {
    let (fake, client) = Fake::start(60, 3).await;
    let mut stream = client.scan("log").max_records(20).open();
    assert_eq!(
        take(&fake, &mut stream, u64::MAX).await.0,
        (0..20).collect::<Vec<_>>()
    );
}

#[tokio::test]
async fn scan_of_everything_ends_at_the_tail() {
    let (fake, client) = Fake::start(10, 0).await;
    let mut stream = client.scan("log").from_lsn(4).open();
    assert_eq!(
        take(&fake, &mut stream, u64::MAX).await.0,
        (4..10).collect::<Vec<_>>()
    );
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn cursor_of_a_follower_resumes_after_what_was_taken() {
    let (fake, client) = Fake::start(30, 2).await;
    let mut stream = client.follow("log").open();
    assert!(stream.cursor().is_none());
    // Until the message that ends with lsn 10 or later is complete.
    let mut next = 0;
    loop {
        match stream.next().await.unwrap().unwrap() {
            ScanEvent::Batch(batch) => {
                next = batch.records.last().unwrap().lsn.get() + 1;
                fake.taken.send_replace(next);
            }
            ScanEvent::Progress(_) if next >= 10 => break,
            _ => {}
        }
    }
    let cursor = stream.cursor().unwrap().clone();
    drop(stream);
    let mut resumed = client.follow("log").after(cursor).open();
    assert_eq!(
        take(&fake, &mut resumed, 30).await.0,
        (next..30).collect::<Vec<_>>()
    );
}

#[tokio::test]
async fn streams_that_nobody_reads_leave_room_for_acks() {
    let (fake, client) = Fake::start(120, 0).await;
    // More than the window of a stream, and five of those are more than 16 MiB.
    *fake.padding.lock().unwrap() = 64 << 10;
    let mut unread = Vec::new();
    for _ in 0..5 {
        let mut stream = client.follow("log").open();
        stream.next().await.unwrap().unwrap();
        unread.push(stream);
    }
    for lsn in 0..20 {
        fake.script([Step::Ack(lsn)]);
        assert_eq!(client.append("log", "x").await.unwrap().lsn, Lsn::new(lsn));
    }
}

#[tokio::test]
async fn follow_from_now_on_any_node_asks_for_no_tail() {
    let (fake, client) = Fake::start(20, 0).await;
    let mut stream = client.follow("log").any_node().last(5).open();
    take(&fake, &mut stream, 20).await;
    assert_eq!(
        fake.scan_requests.lock().unwrap()[0].start,
        Some(Start::TailOffset(5))
    );
}

/// A proxy that loses the server behind it ends the streams so, with RST_STREAM and NO_ERROR.
#[tokio::test]
async fn follow_goes_on_after_a_stream_without_a_status() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let streams = Arc::new(AtomicU64::new(0));
    let routes = Routes::default().into_axum_router().fallback(move || {
        let lsn = streams.fetch_add(1, Ordering::Relaxed);
        let message = message(lsn, lsn + 1, u64::MAX, 0).encode_to_vec();
        let length = u32::try_from(message.len()).unwrap();
        let body = [&[0][..], &length.to_be_bytes(), &message].concat();
        async move { ([("content-type", "application/grpc")], body) }
    });
    let server = tonic::transport::Server::builder().add_routes(routes.into());
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let client = Client::builder(endpoint).connect_lazy().unwrap();
    let mut events = client.follow("log").open();
    let mut lsns = Vec::new();
    while lsns.len() < 3 {
        let event = tokio::time::timeout(Duration::from_secs(20), events.next());
        if let ScanEvent::Batch(batch) = event.await.unwrap().unwrap().unwrap() {
            lsns.extend(batch.records.iter().map(|record| record.lsn.get()));
        }
    }
    assert_eq!(lsns, [0, 1, 2]);
}
