//! Several servers share a store: the client finds the owner, and loses nothing on the way.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::fake::{Fake, Step, refusal};
use crate::memory::{Fault, Memory, moved};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::Notify;
use tonic::{Code, Status};
use wald_client::{Client, ClientBuilder, ErrorKind, Lsn, Outcome, Reason, RetryPolicy, ScanEvent};

/// A port at which nothing listens. The socket keeps it from others.
fn dead() -> (TcpSocket, String) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, format!("http://{address}"))
}

/// A client with pauses that outlast every deadline: it repeats only at once.
fn without_pauses(endpoint: impl Into<String>) -> ClientBuilder {
    let hour = Duration::from_secs(3600);
    Client::builder(endpoint).retry(RetryPolicy {
        first_pause: hour,
        max_pause: hour,
        ..RetryPolicy::default()
    })
}

fn quick(endpoint: impl Into<String>) -> ClientBuilder {
    Client::builder(endpoint).retry(RetryPolicy {
        first_pause: Duration::from_millis(1),
        max_pause: Duration::from_millis(5),
        ..RetryPolicy::default()
    })
}

/// Waits until the client has gone to a server.
async fn goes_to(client: &Client, endpoint: &str) {
    let there = async {
        while client.endpoint() != endpoint {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), there)
        .await
        .unwrap();
}

fn draining() -> Status {
    let facts = [("outcome", "NOT_APPLIED"), ("retry", "SAFE")];
    refusal(Code::Unavailable, "DRAINING", &facts)
}

fn without_bucket() -> Status {
    let facts = [("outcome", "NOT_APPLIED"), ("retry", "SAFE")];
    refusal(Code::Unavailable, "BUCKET_DOWN", &facts)
}

fn numbers(range: std::ops::Range<u64>) -> Vec<String> {
    range.map(|number| number.to_string()).collect()
}

#[tokio::test]
async fn hint_is_followed_at_once_and_remembered() {
    let (old, endpoint) = Fake::serve(0, 0).await;
    let (owner, at_owner) = Fake::serve(0, 0).await;
    old.script([Step::Fail(moved(&at_owner))]);
    owner.script([Step::Ack(7), Step::Ack(8)]);
    let client = without_pauses(&endpoint).connect().await.unwrap();
    assert_eq!(client.endpoint(), endpoint);
    // A plain append: MOVED says that nothing was applied.
    assert_eq!(client.append("log", "x").await.unwrap().lsn, Lsn::new(7));
    assert_eq!(client.endpoint(), at_owner);
    assert_eq!(client.append("log", "y").await.unwrap().lsn, Lsn::new(8));
    assert_eq!((old.attempts(), owner.attempts()), (1, 2));
}

#[tokio::test]
async fn two_servers_that_name_each_other_do_not_spin() {
    let (one, at_one) = Fake::serve(0, 0).await;
    let (other, at_other) = Fake::serve(0, 0).await;
    one.script((0..4).map(|_| Step::Fail(moved(&at_other))));
    other.script((0..4).map(|_| Step::Fail(moved(&at_one))));
    let client = without_pauses(&at_one).connect().await.unwrap();
    let error = client.append("log", "x").await.unwrap_err();
    assert_eq!(error.reason(), Some(Reason::Moved));
    assert_eq!(error.outcome(), Outcome::NotApplied);
    assert_eq!((one.attempts(), other.attempts()), (1, 1));

    // A pause after each second attempt: of the 2nd and the 4th failure, at least half of each.
    let client = Client::builder(&at_one).retry(RetryPolicy {
        max_attempts: 6,
        first_pause: Duration::from_millis(20),
        ..RetryPolicy::default()
    });
    let client = client.connect().await.unwrap();
    let begun = Instant::now();
    client.append("log", "x").await.unwrap_err();
    assert!(begun.elapsed() >= Duration::from_millis(20 + 80));
    assert_eq!((one.attempts(), other.attempts()), (4, 4));
}

#[tokio::test]
async fn servers_of_a_list_are_tried_in_a_ring() {
    let (_dead, nobody) = dead();
    let (second, at_second) = Fake::serve(0, 0).await;
    let (third, at_third) = Fake::serve(0, 0).await;
    second.script([Step::Fail(moved("")), Step::Ack(8)]);
    third.script([Step::Ack(7), Step::Fail(without_bucket())]);
    let list = format!("{nobody},{at_second},{at_third}");
    let client = quick(list).connect_lazy().unwrap();
    assert_eq!(client.endpoint(), nobody);
    assert_eq!(client.append("log", "x").await.unwrap().lsn, Lsn::new(7));
    assert_eq!(client.endpoint(), at_third);
    // After the last one the first one is next, and nobody answers there.
    assert_eq!(client.append("log", "y").await.unwrap().lsn, Lsn::new(8));
    assert_eq!(client.endpoint(), at_second);
    assert_eq!((second.attempts(), third.attempts()), (2, 2));
}

#[tokio::test]
async fn error_that_is_not_repeated_moves_the_next_call() {
    let (first, at_first) = Fake::serve(0, 0).await;
    let (second, at_second) = Fake::serve(0, 0).await;
    first.script([Step::Cut]);
    second.script([Step::Ack(0)]);
    let client = quick(format!("{at_first},{at_second}"));
    let client = client.connect().await.unwrap();
    let error = client.append("log", "x").await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    client.append("log", "x").await.unwrap();
    assert_eq!((first.attempts(), second.attempts()), (1, 1));
}

#[tokio::test]
async fn server_that_refuses_a_request_is_not_left() {
    let (first, at_first) = Fake::serve(0, 0).await;
    let (second, at_second) = Fake::serve(0, 0).await;
    let facts = [("outcome", "NOT_APPLIED"), ("retry", "SAFE")];
    let busy = refusal(Code::ResourceExhausted, "BUSY", &facts);
    let failed = refusal(Code::Unavailable, "JOURNAL_FAILED", &facts);
    first.script([Step::Fail(busy), Step::Fail(failed), Step::Ack(0)]);
    let client = quick(format!("{at_first},{at_second}"));
    let client = client.connect().await.unwrap();
    client.append("log", "x").await.unwrap();
    assert_eq!(client.endpoint(), at_first);
    assert_eq!((first.attempts(), second.attempts()), (3, 0));
}

#[tokio::test]
async fn owner_outside_of_the_list_is_left_for_its_first_server() {
    let (first, at_first) = Fake::serve(0, 0).await;
    let (second, at_second) = Fake::serve(0, 0).await;
    let (owner, at_owner) = Fake::serve(0, 0).await;
    first.script([Step::Fail(draining()), Step::Ack(1)]);
    second.script([Step::Fail(moved(&at_owner))]);
    owner.script([Step::Ack(0), Step::Fail(draining())]);
    let client = quick(format!("{at_first},{at_second}"));
    let client = client.connect().await.unwrap();
    client.append("log", "x").await.unwrap();
    assert_eq!(client.endpoint(), at_owner);
    client.append("log", "y").await.unwrap();
    assert_eq!(client.endpoint(), at_first);
    assert_eq!((first.attempts(), second.attempts()), (2, 1));
}

#[tokio::test]
async fn late_failure_of_an_old_server_moves_nothing() {
    let (old, at_old) = Fake::serve(0, 0).await;
    let (owner, at_owner) = Fake::serve(0, 0).await;
    let (third, at_third) = Fake::serve(0, 0).await;
    let release = Arc::new(Notify::new());
    old.script([
        Step::Late(Arc::clone(&release), draining()),
        Step::Fail(moved(&at_owner)),
    ]);
    owner.script([Step::Ack(0), Step::Ack(1)]);
    let client = quick(format!("{at_old},{at_third},{at_owner}"));
    let client = client.connect().await.unwrap();
    let late = tokio::spawn(client.append("log", "x").into_future());
    while old.attempts() == 0 {
        tokio::task::yield_now().await;
    }
    client.append("log", "y").await.unwrap();
    assert_eq!(client.endpoint(), at_owner);
    release.notify_one();
    assert_eq!(late.await.unwrap().unwrap().lsn, Lsn::new(1));
    assert_eq!(client.endpoint(), at_owner);
    assert_eq!((owner.attempts(), third.attempts()), (2, 0));
}

#[tokio::test]
async fn connect_takes_the_first_server_that_accepts() {
    let (_first, nobody) = dead();
    let (_second, nobody_else) = dead();
    let (_memory, endpoint) = Memory::start().await;
    let client = Client::connect(format!("{nobody},{endpoint}"));
    assert_eq!(client.await.unwrap().endpoint(), endpoint);
    let error = Client::connect(format!("{nobody},{nobody_else}"));
    let error = error.await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Connect { endpoint, .. } if *endpoint == nobody_else),
        "{error}"
    );
}

#[tokio::test]
async fn list_with_a_wrong_part_is_refused_before_a_connection() {
    for (list, part) in [
        ("localhost,localhost:0", "`localhost:0`"),
        ("localhost,", "`localhost,`"),
        ("localhost,https://localhost", "`https://localhost`"),
    ] {
        let error = Client::builder(list).connect_lazy().unwrap_err();
        let is_invalid = matches!(error.kind(), ErrorKind::InvalidEndpoint { .. });
        assert!(is_invalid && error.to_string().contains(part), "{error}");
    }
    let error = Client::builder("localhost,127.0.0.1").dialer().unwrap_err();
    assert!(error.to_string().contains("one server"), "{error}");
}

#[tokio::test]
async fn producer_appends_once_while_its_store_moves_to_and_fro() {
    let (one, at_one) = Memory::start().await;
    let (other, at_other) = one.start_beside().await;
    // Each server acks some batches, keeps the acks of two to itself, and names the other one.
    for (memory, next) in [(&one, &at_other), (&other, &at_one)] {
        memory.script((0..30).map(|step| match step % 10 {
            7 | 8 => Fault::Withhold,
            9 => Fault::Fail(moved(next)),
            _ => Fault::None,
        }));
    }
    let client = without_pauses(&at_one).connect().await.unwrap();
    let producer = client.producer("log").open().await.unwrap();
    let mut acks = Vec::new();
    for number in numbers(0..100) {
        acks.push(producer.append_batch([number]).await.unwrap());
    }
    let mut again = 0;
    for (lsn, ack) in (0..).zip(acks) {
        let ack = ack.await.unwrap();
        assert_eq!(ack.first_lsn, Lsn::new(lsn));
        again += usize::from(ack.deduplicated);
    }
    producer.close().await.unwrap();
    assert_eq!(one.payloads("log"), numbers(0..100));
    assert_eq!(again, 12);
    assert_eq!(one.sessions.load(Ordering::Relaxed), 4);
    assert_eq!(other.sessions.load(Ordering::Relaxed), 3);
}

#[tokio::test]
async fn producer_that_waits_for_work_goes_on_at_the_owner() {
    let (old, at_old) = Memory::start().await;
    let (owner, at_owner) = old.start_beside().await;
    let client = without_pauses(&at_old).connect().await.unwrap();
    let producer = client.producer("log").open().await.unwrap();
    producer.append("0").await.unwrap().await.unwrap();
    *old.owner.lock().unwrap() = Some(at_owner.clone());
    // Another call of the client finds the owner. The open session lasts until it fails.
    client.server_info().await.unwrap();
    old.script([Fault::Fail(moved(&at_owner))]);
    producer.append("1").await.unwrap().await.unwrap();
    producer.close().await.unwrap();
    assert_eq!(owner.payloads("log"), ["0", "1"]);
    assert_eq!(owner.sessions.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn appender_fails_at_the_old_server_and_the_next_one_finds_the_owner() {
    let (old, at_old) = Memory::start().await;
    let (owner, at_owner) = old.start_beside().await;
    *old.owner.lock().unwrap() = Some(at_owner);
    let client = without_pauses(&at_old).connect().await.unwrap();
    let appender = client.appender().open();
    let error = appender
        .append("log", "0")
        .await
        .unwrap()
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Some(Reason::Moved));
    assert_eq!(error.outcome(), Outcome::NotApplied);
    let appender = client.appender().open();
    appender.append("log", "0").await.unwrap().await.unwrap();
    appender.close().await.unwrap();
    assert_eq!(owner.payloads("log"), ["0"]);
}

#[tokio::test]
async fn follower_delivers_each_record_once_while_its_store_moves() {
    let (one, at_one) = Fake::serve(60, 2).await;
    let (other, at_other) = Fake::serve(60, 2).await;
    *one.scan_end.lock().unwrap() = Some(moved(&at_other));
    *other.scan_end.lock().unwrap() = Some(moved(&at_one));
    let client = without_pauses(&at_one).connect().await.unwrap();
    let mut stream = client.follow("log").last(60).open();
    let mut lsns = Vec::new();
    let mut interruptions = 0;
    while lsns.len() < 60 {
        let event = tokio::time::timeout(Duration::from_secs(20), stream.next());
        match event.await.unwrap().unwrap().unwrap() {
            ScanEvent::Batch(batch) => lsns.extend(batch.records.iter().map(|r| r.lsn.get())),
            ScanEvent::Interrupted(error) => {
                assert_eq!(error.reason(), Some(Reason::Moved));
                interruptions += 1;
            }
            _ => {}
        }
    }
    assert_eq!(lsns, (0..60).collect::<Vec<_>>());
    let scans = |fake: &Fake| fake.scan_requests.lock().unwrap().len();
    assert_eq!(scans(&one) + scans(&other), interruptions + 1);
    assert!(scans(&one).abs_diff(scans(&other)) <= 1 && interruptions >= 10);
}

#[tokio::test]
async fn each_kind_of_call_follows_the_hint() {
    let (old, at_old) = Memory::start().await;
    let (owner, at_owner) = old.start_beside().await;
    owner.state.lock().unwrap().log("log");
    *old.owner.lock().unwrap() = Some(at_owner.clone());
    let (_dead, nobody) = dead();
    for list in [at_old.clone(), format!("{nobody},{at_old}")] {
        let client = || quick(list.clone()).connect_lazy().unwrap();
        client().get_log("log").await.unwrap();
        client().list_cursors("log", 0, None, None).await.unwrap();
        client().list_segments(1, None).await.unwrap();
        client()
            .create_log("log", Default::default())
            .await
            .unwrap_err();
        let mut scan = client().scan("log").open();
        while let Some(event) = scan.next().await {
            event.unwrap();
        }
        owner.backups.lock().unwrap().push_back(Default::default());
        let mut backup = client().backup(Vec::new(), 0).await.unwrap();
        assert!(backup.next().await.unwrap().is_some());
        // The server in memory verifies nothing, and says so.
        let error = client().verify(None, 0).await.unwrap_err();
        assert_eq!(error.code(), Code::Unimplemented);
    }
    assert_eq!(old.calls(), owner.calls());
    assert_eq!(owner.calls(), 14);
}

#[tokio::test]
async fn owner_that_answers_through_another_server_is_called_itself() {
    let (old, at_old) = Memory::start().await;
    let (owner, at_owner) = old.start_beside().await;
    *old.speaks_for.lock().unwrap() = Some(at_owner.clone());
    for list in [at_old.clone(), format!("{at_old},{at_owner}")] {
        let client = without_pauses(list).connect().await.unwrap();
        client.append("log", "x").await.unwrap();
        goes_to(&client, &at_owner).await;
        let before = (old.calls(), owner.calls());
        client.append("log", "x").await.unwrap();
        assert_eq!((old.calls(), owner.calls()), (before.0, before.1 + 1));
        // The store moves, and is back at once.
        *old.speaks_for.lock().unwrap() = None;
        *owner.owner.lock().unwrap() = Some(at_old.clone());
        client.append("log", "x").await.unwrap();
        assert_eq!(client.endpoint(), at_old);
        *owner.owner.lock().unwrap() = None;
        *old.speaks_for.lock().unwrap() = Some(at_owner.clone());
        client.append("log", "x").await.unwrap();
        goes_to(&client, &at_owner).await;
    }
}

#[tokio::test]
async fn stream_through_another_server_stays_and_the_next_is_direct() {
    let (old, at_old) = Memory::start().await;
    let (owner, at_owner) = old.start_beside().await;
    *old.speaks_for.lock().unwrap() = Some(at_owner.clone());
    let client = without_pauses(&at_old).connect().await.unwrap();
    let first = client.appender().open();
    first.append("log", "0").await.unwrap().await.unwrap();
    goes_to(&client, &at_owner).await;
    first.append("log", "1").await.unwrap().await.unwrap();
    first.close().await.unwrap();
    let sessions = || [&old, &owner].map(|memory| memory.sessions.load(Ordering::Relaxed));
    assert_eq!(sessions(), [1, 0]);
    let second = client.appender().open();
    second.append("log", "2").await.unwrap().await.unwrap();
    second.close().await.unwrap();
    assert_eq!(sessions(), [1, 1]);
    let client = without_pauses(&at_old).connect().await.unwrap();
    let mut scan = client.scan("log").open();
    while let Some(event) = scan.next().await {
        event.unwrap();
    }
    goes_to(&client, &at_owner).await;
}

#[tokio::test]
async fn owner_out_of_reach_keeps_the_client_where_it_is_answered() {
    let (old, at_old) = Memory::start().await;
    let (_dead, nobody) = dead();
    // An address that must not get the token in plaintext.
    let (_exposed, at_exposed) = old.start_beside().await;
    let at_exposed = at_exposed.replace("127.0.0.1", "0.0.0.0");
    // It takes connections and answers nothing, as a filter of packets in between.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at_silent = format!("http://{}", silent.local_addr().unwrap());
    for owner in [&at_silent, &nobody, &at_exposed, "http://a/b", ""] {
        *old.speaks_for.lock().unwrap() = Some(owner.to_owned());
        let client = without_pauses(&at_old).token("k7Qp2mXa");
        let client = client.timeout(Duration::from_secs(2));
        let client = client.connect().await.unwrap();
        for _ in 0..20 {
            client.append("log", "x").await.unwrap();
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        assert_eq!(client.endpoint(), at_old, "{owner}");
    }
    // All of these answers lead to one attempt.
    silent.accept().await.unwrap();
    let second = tokio::time::timeout(Duration::from_millis(100), silent.accept());
    second.await.unwrap_err();
}

#[tokio::test]
async fn drain_means_the_current_server_and_no_other_one() {
    let (old, at_old) = Memory::start().await;
    let (owner, at_owner) = old.start_beside().await;
    *old.owner.lock().unwrap() = Some(at_owner.clone());
    let client = Client::builder(format!("{at_old},{at_owner}")).retry(RetryPolicy {
        max_attempts: 3,
        first_pause: Duration::from_millis(1),
        ..RetryPolicy::default()
    });
    let client = client.connect().await.unwrap();
    let error = client.drain(None).await.unwrap_err();
    assert_eq!(error.reason(), Some(Reason::Moved));
    assert_eq!((old.calls(), owner.calls()), (3, 0));
}

#[tokio::test]
async fn channel_of_ones_own_is_not_left() {
    let (old, at_old) = Fake::serve(0, 0).await;
    let (owner, at_owner) = Fake::serve(0, 0).await;
    let channel = tonic::transport::Endpoint::from_shared(at_old.clone());
    let channel = channel.unwrap().connect_lazy();
    old.script([Step::Fail(moved(&at_owner)), Step::Ack(3)]);
    let own = quick(&at_old).over(channel.clone()).unwrap();
    assert_eq!(own.append("log", "x").await.unwrap().lsn, Lsn::new(3));
    assert_eq!(own.endpoint(), at_old);
    assert_eq!((old.attempts(), owner.attempts()), (2, 0));
    // Not at once: the pause does not fit the deadline.
    old.script([Step::Fail(moved(&at_owner))]);
    let own = without_pauses(&at_old).over(channel).unwrap();
    let error = own.append("log", "x").await.unwrap_err();
    assert_eq!(error.reason(), Some(Reason::Moved));
    let (other, at_other) = Memory::start().await;
    let (owner, at_owner) = other.start_beside().await;
    *other.speaks_for.lock().unwrap() = Some(at_owner.clone());
    let through = tonic::transport::Endpoint::from_shared(at_other.clone());
    let through = quick(&at_other).over(through.unwrap().connect_lazy());
    through.unwrap().append("log", "x").await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!((other.calls(), owner.calls()), (1, 0));
}

#[tokio::test]
async fn owner_that_must_not_get_the_token_is_not_called() {
    // None is an address, or all would get the token in plaintext.
    for owner in [
        "192.0.2.1:6925",
        "wald.internal:6925",
        "",
        "a/b",
        "me@localhost:1",
        ":6925",
    ] {
        let (fake, endpoint) = Fake::serve(0, 0).await;
        fake.script([Step::Fail(moved(owner))]);
        let client = without_pauses(&endpoint).token("k7Qp2mXa");
        let client = client.connect().await.unwrap();
        let error = client.append("log", "x").await.unwrap_err();
        assert_eq!(error.reason(), Some(Reason::Moved), "{owner}: {error:?}");
        assert_eq!(error.fact("owner"), Some(owner));
        assert_eq!(client.endpoint(), endpoint);
    }
    let list = "localhost,192.0.2.1";
    let error = Client::builder(list).token("k7Qp2mXa").connect_lazy();
    let error = error.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Token { .. }), "{error}");
}

#[tokio::test]
async fn token_goes_to_the_owner_too() {
    let (old, at_old) = Memory::start().await;
    let (owner, at_owner) = old.start_beside().await;
    *old.owner.lock().unwrap() = Some(at_owner);
    *owner.door.lock().unwrap() = Some(("k7Qp2mXa", "BAD_CREDENTIAL"));
    let client = without_pauses(&at_old).token("k7Qp2mXa");
    client
        .connect()
        .await
        .unwrap()
        .append("log", "x")
        .await
        .unwrap();
    assert_eq!(*owner.tokens.lock().unwrap(), ["Bearer k7Qp2mXa"]);
}
