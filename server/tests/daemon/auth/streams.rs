//! Streams end with the right of their caller, and their cursor stays good.

use std::time::{Duration, Instant};

use tonic::{Status, Streaming};
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use wald_proto::v1;
use wald_proto::v1::scan_request::{Selector, Start};

use super::principals::{AuthFile, Bearer, COMPANY, WithToken, session, wal};
use crate::support::{Told, append, part, records, until};
use v1::wal_service_client::WalServiceClient;

const LOG: &str = "payments/billing/a";
/// Longest time from a change to the end of the streams. An idle machine needs less than 1 s, a busy one may need more; the
/// file is read by itself only after 10 s.
const SOON: Duration = Duration::from_secs(6);
/// Life of a token that expires: the daemon has to start in this time.
const LIFE: Duration = Duration::from_secs(6);

async fn follow(
    client: &mut WalServiceClient<WithToken>,
    start: Option<Start>,
) -> Result<Streaming<v1::ScanResponse>, Status> {
    let request = v1::ScanRequest {
        selector: Some(Selector::Log(LOG.to_owned())),
        follow: true,
        start,
        ..Default::default()
    };
    client.scan(request).await.map(tonic::Response::into_inner)
}

/// Takes messages up to one with records, and returns its cursor.
async fn take_records(stream: &mut Streaming<v1::ScanResponse>) -> (bytes::Bytes, usize) {
    loop {
        let message = stream.message().await.unwrap().expect("it follows");
        if !message.batches.is_empty() {
            return (message.cursor.clone(), records(&message.batches).len());
        }
    }
}

async fn end(stream: &mut Streaming<v1::ScanResponse>) -> Status {
    loop {
        match stream.message().await {
            Ok(Some(message)) => assert!(message.batches.is_empty()),
            Ok(None) => panic!("a follower does not end by itself"),
            Err(status) => return status,
        }
    }
}

#[tokio::test]
async fn follower_ends_with_its_token_and_goes_on_with_the_next() {
    let file = AuthFile::new(COMPANY);
    let (root, old) = (file.token("root"), file.token("reader"));
    let next = file.token("reader");
    let daemon = file.start(&[]);
    let mut own = wal(&daemon, &root).await;
    own.append(append(LOG, "1")).await.unwrap();
    let mut client = wal(&daemon, &old).await;
    let mut stream = follow(&mut client, None).await.unwrap();
    let (cursor, count) = take_records(&mut stream).await;
    assert_eq!(count, 1);
    assert!(file.command(&["revoke", &old[6..14]]).status.success());
    daemon.signal(rustix::process::Signal::HUP);
    let begin = Instant::now();
    let status = end(&mut stream).await;
    assert_eq!(Told::of(&status).reason, "BAD_CREDENTIAL");
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    own.append(append(LOG, "2")).await.unwrap();
    let mut client = wal(&daemon, &next).await;
    let mut stream = follow(&mut client, Some(Start::Cursor(cursor)))
        .await
        .unwrap();
    let message = loop {
        let message = stream.message().await.unwrap().unwrap();
        if !message.batches.is_empty() {
            break message;
        }
    };
    assert_eq!(
        records(&message.batches),
        [(LOG.to_owned(), 1, "2".to_owned())]
    );
}

/// A program that writes the file in place leaves it empty at first.
#[tokio::test]
async fn empty_file_ends_nothing() {
    let file = AuthFile::new(COMPANY);
    let root = file.token("root");
    let daemon = file.start(&["--metrics-open"]);
    let mut own = wal(&daemon, &root).await;
    own.append(append(LOG, "1")).await.unwrap();
    let mut stream = follow(&mut own, None).await.unwrap();
    take_records(&mut stream).await;
    file.write("");
    daemon.signal(rustix::process::Signal::HUP);
    let failures = "wald_reload_failures_total{kind=\"auth\"}";
    until(&daemon, failures, |count| count >= 1.0).await;
    own.append(append(LOG, "2")).await.unwrap();
    let (_, count) = take_records(&mut stream).await;
    assert_eq!(count, 1);
}

#[tokio::test]
async fn follower_ends_with_the_right_to_read() {
    let file = AuthFile::new(COMPANY);
    let (root, reader) = (file.token("root"), file.token("reader"));
    let daemon = file.start(&[]);
    let mut own = wal(&daemon, &root).await;
    own.append(append(LOG, "1")).await.unwrap();
    let mut client = wal(&daemon, &reader).await;
    let mut stream = follow(&mut client, None).await.unwrap();
    take_records(&mut stream).await;
    let text = file.text();
    let less = text.replace(r#"{ do = ["read", "list"], logs = "payments/" }"#, "");
    assert_ne!(less, text);
    // A change that keeps the right does not end it.
    file.put_in_force(&daemon, &format!("{text}\n# a comment\n"));
    own.append(append(LOG, "2")).await.unwrap();
    take_records(&mut stream).await;
    file.write(&less);
    daemon.signal(rustix::process::Signal::HUP);
    let begin = Instant::now();
    let told = Told::of(&end(&mut stream).await);
    assert_eq!(
        (told.reason.as_str(), told.fact("right")),
        ("NOT_ALLOWED", "read")
    );
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
}

#[tokio::test]
async fn read_that_waits_ends_with_the_right_to_read() {
    let file = AuthFile::new(COMPANY);
    let (root, reader) = (file.token("root"), file.token("reader"));
    let daemon = file.start(&[]);
    wal(&daemon, &root)
        .await
        .append(append(LOG, "1"))
        .await
        .unwrap();
    let mut client = wal(&daemon, &reader).await;
    let request = v1::ReadRequest {
        log: LOG.to_owned(),
        start: Some(v1::read_request::Start::Lsn(1)),
        wait: Some(prost_types::Duration {
            seconds: 50,
            nanos: 0,
        }),
        ..Default::default()
    };
    let waiting = tokio::spawn(async move { client.read(request).await });
    crate::support::until_as(
        &daemon,
        "grpc_server_started_total{grpc_method=\"Read\",grpc_service=\"wald.v1.WalService\",grpc_type=\"unary\"}",
        &root,
        |count| count == 1.0,
    )
    .await;
    let text = file.text();
    file.write(&text.replace(r#"{ do = ["read", "list"], logs = "payments/" }"#, ""));
    daemon.signal(rustix::process::Signal::HUP);
    let begin = Instant::now();
    let refused = waiting.await.unwrap().unwrap_err();
    assert_eq!(Told::of(&refused).reason, "NOT_ALLOWED");
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
}

#[tokio::test]
async fn session_ends_with_its_token_after_the_acks() {
    let file = AuthFile::new(COMPANY);
    let writer = file.token("writer");
    let daemon = file.start(&[]);
    let mut session = session(&daemon, &writer).await;
    session.send(1, vec![part(LOG, &["x"])]).await;
    let acked = session.answers.message().await.unwrap().unwrap();
    assert_eq!(acked.request_id, 1);
    // Silent, without a request under way.
    assert!(file.command(&["revoke", &writer[6..14]]).status.success());
    daemon.signal(rustix::process::Signal::HUP);
    let begin = Instant::now();
    let (acked, end) = session.rest().await;
    assert!(acked.is_empty());
    assert_eq!(Told::of(&end.unwrap_err()).reason, "BAD_CREDENTIAL");
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
}

#[tokio::test]
async fn reflection_ends_with_its_token() {
    let file = AuthFile::new(COMPANY);
    let token = file.token("reader");
    let daemon = file.start(&["--reflection"]);
    let channel = daemon.channel().await;
    let mut client = ServerReflectionClient::with_interceptor(channel, Bearer::new(&token));
    let (_requests, requests) = tokio::sync::mpsc::channel(1);
    let requests = tokio_stream::wrappers::ReceiverStream::new(requests);
    let answers = client.server_reflection_info(requests).await.unwrap();
    assert!(file.command(&["revoke", &token[6..14]]).status.success());
    daemon.signal(rustix::process::Signal::HUP);
    let mut answers = answers.into_inner();
    let end = tokio::time::timeout(Duration::from_secs(20), answers.message()).await;
    let told = Told::of(&end.unwrap().unwrap_err());
    assert_eq!(told.reason, "BAD_CREDENTIAL");
}

#[tokio::test]
async fn streams_end_when_their_token_expires() {
    let file = AuthFile::new(COMPANY);
    let made = file.command(&["create", "--principal", "root", "--expires", "6s"]);
    let begin = Instant::now();
    let token = String::from_utf8(made.stdout).unwrap().trim().to_owned();
    let daemon = file.start(&[]);
    let mut client = wal(&daemon, &token).await;
    client.append(append(LOG, "1")).await.unwrap();
    let mut stream = follow(&mut client, None).await.unwrap();
    take_records(&mut stream).await;
    let told = Told::of(&end(&mut stream).await);
    assert_eq!(told.reason, "CREDENTIAL_EXPIRED");
    // The file has whole seconds.
    assert!(begin.elapsed() < LIFE + SOON, "{:?}", begin.elapsed());
    let refused = client.append(append(LOG, "2")).await.unwrap_err();
    assert_eq!(Told::of(&refused).reason, "CREDENTIAL_EXPIRED");
}
