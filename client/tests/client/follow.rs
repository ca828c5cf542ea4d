//! A follow survives its connections: nothing comes twice, nothing is skipped.

use std::time::Duration;

use crate::fake::Fake;
use wald_client::proto::scan_request::Start;
use wald_client::{ScanEvent, ScanStream};

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
