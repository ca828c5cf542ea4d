//! Stand-bys answer reads that any node may answer from their own copy.

use super::stand_by::owner;
use super::*;

/// An owner, and a stand-by that is ready. The owner has small segments, so that its files come to the bucket.
async fn pair(store: &Store, ttl: &str) -> [(Daemon, tempfile::TempDir); 2] {
    let begin = |name: &str| {
        let directory = private_directory();
        let more = ["--stand-by", "--lease-ttl", ttl, "--segment-bytes", "64KiB"];
        let more = [&more[..], &["--max-batch-bytes", "16KiB"]].concat();
        (start(store, directory.path(), name, &more), directory)
    };
    let first = begin("one");
    replicated(&mut first.0.wal().await, "0").await.unwrap();
    let second = begin("two");
    until("a stand-by that is ready", || {
        second.0.http("/readyz").0 == 200
    })
    .await;
    [first, second]
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "never: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn page_from(lsn: u64) -> v1::ReadRequest {
    v1::ReadRequest {
        log: "a".to_owned(),
        start: Some(v1::read_request::Start::Lsn(lsn)),
        wait: Some(prost_types::Duration {
            seconds: 20,
            nanos: 0,
        }),
        any_node: true,
        ..v1::ReadRequest::default()
    }
}

fn following(start: Option<v1::scan_request::Start>) -> v1::ScanRequest {
    v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::Log("a".to_owned())),
        start,
        follow: true,
        any_node: true,
        ..v1::ScanRequest::default()
    }
}

/// Payloads of the log as the copy of this node has them, from its own answers. A copy that fell behind begins again, and the
/// owner answers meanwhile.
async fn copied(wal: &mut WalServiceClient<Channel>, count: u64) -> Vec<String> {
    let begun = Instant::now();
    let mut found = Vec::new();
    while (found.len() as u64) < count {
        let answer = wal.read(page_from(found.len() as u64)).await.unwrap();
        if answer.metadata().get("wald-owner").is_some() {
            assert!(begun.elapsed() < PATIENCE, "the owner always answers");
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        }
        let page = answer.into_inner();
        assert_eq!(page.replicated_lsn, page.tail_lsn);
        let batch = page.batch.expect("records come in time");
        found.extend(records(&[batch]).into_iter().map(|record| record.2));
    }
    found
}

#[tokio::test]
async fn stand_by_reads_its_copy_while_the_owner_sleeps() {
    let store = Store::start();
    let [(one, _one), (two, _two)] = pair(&store, "10m").await;
    let mut wal = one.wal().await;
    let mut all = vec!["0".to_owned()];
    // Segments are sealed, uploaded and sorted meanwhile.
    for number in 1..120 {
        let payload = format!("{number} {}", "x".repeat(4_000));
        replicated(&mut wal, &payload).await.unwrap();
        all.push(payload);
    }
    let mut reader = two.wal().await;
    assert_eq!(copied(&mut reader, 120).await, all);
    until("a manifest", || {
        !store.names("wald/orders/shards/0/manifests/").is_empty()
    })
    .await;
    for number in 120..130 {
        replicated(&mut wal, &number.to_string()).await.unwrap();
        all.push(number.to_string());
    }
    let acked = Instant::now();
    assert_eq!(copied(&mut reader, 130).await, all);
    println!("the copy follows within {:?}", acked.elapsed());
    // The copy needs no owner. Another visibility does.
    one.signal(Signal::STOP);
    assert_eq!(copied(&mut reader, 130).await, all);
    let lower = v1::ReadRequest {
        visibility: v1::Visibility::Durable.into(),
        ..page_from(0)
    };
    let scan = following(None);
    let mut stream = reader.scan(scan).await.unwrap().into_inner();
    let mut scanned = Vec::new();
    while scanned.len() < all.len() {
        let message = stream.message().await.unwrap().unwrap();
        scanned.extend(records(&message.batches).into_iter().map(|record| record.2));
    }
    assert_eq!(scanned, all);
    one.signal(Signal::CONT);
    let refused = reader.read(lower).await.unwrap_err();
    assert_eq!(Told::of(&refused).reason, "NOT_SUPPORTED");
    // The same stream has the newest records, too.
    replicated(&mut wal, "last").await.unwrap();
    loop {
        let message = stream.message().await.unwrap().unwrap();
        if let Some(record) = records(&message.batches).pop() {
            assert_eq!(record.2, "last");
            break;
        }
    }
}

#[tokio::test]
async fn follower_of_a_copy_goes_on_by_its_cursor_after_a_take_over() {
    let store = Store::start();
    let [(one, _one), (two, _two)] = pair(&store, "2s").await;
    until("a named stand-by", || {
        owner(&store)["stand_bys"] == serde_json::json!(["two"])
    })
    .await;
    let mut wal = one.wal().await;
    for number in 1..10 {
        replicated(&mut wal, &number.to_string()).await.unwrap();
    }
    let mut reader = two.wal().await;
    let mut stream = reader.scan(following(None)).await.unwrap().into_inner();
    let (mut found, mut cursor) = (Vec::new(), bytes::Bytes::new());
    while found.len() < 10 {
        let message = stream.message().await.unwrap().unwrap();
        found.extend(records(&message.batches).into_iter().map(|record| record.2));
        cursor = message.cursor;
    }
    one.signal(Signal::KILL);
    drop(wal);
    one.ended().await;
    // The copy ends when this node takes the store over.
    let ended = loop {
        match stream.message().await {
            Ok(Some(message)) => cursor = message.cursor,
            Ok(None) => panic!("a stream that follows does not end"),
            Err(status) => break status,
        }
    };
    assert_eq!(ended.code(), Code::Unavailable, "{ended:?}");
    two.wait_for_log("wald is serving");
    replicated(&mut two.wal().await, "10").await.unwrap();
    let start = v1::scan_request::Start::Cursor(cursor);
    let again = following(Some(start));
    let mut stream = two.wal().await.scan(again).await.unwrap().into_inner();
    while found.len() < 11 {
        let message = stream.message().await.unwrap().unwrap();
        found.extend(records(&message.batches).into_iter().map(|record| record.2));
    }
    assert_eq!(found, numbered(11));
}
