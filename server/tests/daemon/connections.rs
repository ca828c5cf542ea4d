//! HTTP/2 as clients see it: how connections end, and calls of services that do not exist.

use std::time::{Duration, Instant};

use crate::support::Daemon;
use bytes::Bytes;
use h2::RecvStream;
use h2::client::SendRequest;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

type Ended = JoinHandle<Result<(), h2::Error>>;

async fn connect(daemon: &Daemon) -> (SendRequest<Bytes>, Ended) {
    let address = daemon.start["grpc"].as_str().unwrap();
    let socket = TcpStream::connect(address).await.unwrap();
    let (client, connection) = h2::client::handshake(socket).await.unwrap();
    (client, tokio::spawn(connection))
}

/// Sends an empty message.
async fn call(
    client: &SendRequest<Bytes>,
    path: &str,
) -> Result<http::Response<RecvStream>, h2::Error> {
    let request = http::Request::post(format!("http://wald{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .unwrap();
    let (answer, mut body) = client.clone().ready().await?.send_request(request, false)?;
    body.send_data(Bytes::from_static(&[0; 5]), true)?;
    answer.await
}

#[tokio::test]
async fn old_connection_takes_no_more_calls_and_ends_after_its_grace() {
    const AGE: Duration = Duration::from_millis(300);
    const GRACE: Duration = Duration::from_millis(700);
    let age = format!("--max-connection-age={}ms", AGE.as_millis());
    let grace = format!("--max-connection-age-grace={}ms", GRACE.as_millis());
    let daemon = Daemon::start(&[&age, &grace]);
    let began = Instant::now();
    let (client, ended) = connect(&daemon).await;
    let watch = call(&client, "/grpc.health.v1.Health/Watch").await.unwrap();
    let mut watch = watch.into_body();
    assert!(watch.data().await.unwrap().is_ok());
    // Each call is answered, until there is a GOAWAY.
    let refused = loop {
        if let Err(error) = call(&client, "/grpc.health.v1.Health/Check").await {
            break error;
        }
    };
    assert!(refused.is_go_away(), "{refused}");
    assert!(began.elapsed() >= AGE);
    // Earlier calls continue.
    assert!(!ended.is_finished() && began.elapsed() < AGE + GRACE);
    let rest = watch.data().await;
    assert!(rest.is_none_or(|data| data.is_err()));
    assert!(began.elapsed() >= AGE + GRACE);
    let _how = ended.await.unwrap();
}

#[tokio::test]
async fn connection_that_waits_for_a_place_is_logged_and_counted() {
    let daemon = Daemon::start(&["--max-connections=1"]);
    let (client, _ended) = connect(&daemon).await;
    let watch = call(&client, "/grpc.health.v1.Health/Watch").await.unwrap();
    let mut watch = watch.into_body();
    assert!(watch.data().await.unwrap().is_ok());
    let address = daemon.start["grpc"].as_str().unwrap();
    let _waiting = TcpStream::connect(address).await.unwrap();
    let line = loop {
        let line = daemon.log.recv_timeout(Duration::from_secs(30)).unwrap();
        if line.contains("a new connection waits") {
            break line;
        }
    };
    assert!(line.contains("max_connections"), "{line}");
    // It counts while the connection waits.
    let waited = |port| {
        daemon.metric(&format!(
            "wald_accept_wait_seconds_total{{port=\"{port}\"}}"
        ))
    };
    assert!(waited("grpc") >= 0.1, "{}", waited("grpc"));
    assert_eq!(waited("http"), 0.0);
}

#[tokio::test]
async fn service_that_is_not_there_is_unimplemented() {
    let daemon = Daemon::start(&[]);
    let (client, _ended) = connect(&daemon).await;
    for path in ["/wald.v1.NoService/Append", "/wald.v1.WalService/No", "/"] {
        let answer = call(&client, path).await.unwrap();
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["grpc-status"], "12", "{path}");
    }
}
