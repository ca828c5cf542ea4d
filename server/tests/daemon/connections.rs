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

/// Nobody needs a credential for them.
#[tokio::test]
async fn streams_of_health_take_nothing_of_max_calls() {
    const OWN: usize = 40;
    let daemon = Daemon::start(&["--max-calls=2"]);
    let (client, _ended) = connect(&daemon).await;
    let mut watches = Vec::new();
    for _ in 0..OWN {
        let watch = call(&client, "/grpc.health.v1.Health/Watch").await.unwrap();
        let mut watch = watch.into_body();
        assert!(watch.data().await.unwrap().is_ok());
        watches.push(watch);
    }
    let code = async |path| {
        let answer = call(&client, path).await.unwrap();
        let head = answer.headers().get("grpc-status").cloned();
        let mut body = answer.into_body();
        while let Some(data) = body.data().await {
            data.unwrap();
        }
        let status = match head {
            Some(status) => status,
            None => body.trailers().await.unwrap().unwrap()["grpc-status"].clone(),
        };
        status.to_str().unwrap().to_owned()
    };
    assert_eq!(code("/grpc.health.v1.Health/Check").await, "0");
    assert_eq!(code("/wald.v1.OpsService/GetServerInfo").await, "0");
    watches.pop();
    // The server learns that the client has gone when it reads the reset, which came before the next call.
    assert_eq!(code("/wald.v1.OpsService/GetServerInfo").await, "0");
    let again = call(&client, "/grpc.health.v1.Health/Watch").await.unwrap();
    assert!(again.into_body().data().await.unwrap().is_ok());
}

/// Clients that take no byte of their answers: at most `MOST` answers wait for them, and one for each connection.
#[tokio::test]
async fn calls_without_a_credential_have_a_bound() {
    const CONNECTIONS: usize = 9;
    const STREAMS: usize = 256;
    const MOST: usize = 2048;
    let daemon = Daemon::start(&["--max-calls=64"]);
    let address = daemon.start["grpc"].as_str().unwrap();
    let (mut connections, mut answers) = (Vec::new(), Vec::new());
    let (mut waiting, mut bare) = (0, 0);
    for number in 0..CONNECTIONS {
        let socket = TcpStream::connect(address).await.unwrap();
        let mut builder = h2::client::Builder::new();
        let handshake = builder.initial_window_size(0).handshake(socket);
        let (mut client, connection) = handshake.await.unwrap();
        connections.push(tokio::spawn(connection));
        // Streams of health, and requests of browsers.
        for stream in 0..STREAMS {
            client = client.ready().await.unwrap();
            let request = match number % 2 == 0 {
                true => http::Request::get(format!("http://wald/{stream}")),
                false => http::Request::post("http://wald/grpc.health.v1.Health/Watch")
                    .header("content-type", "application/grpc")
                    .header("te", "trailers"),
            };
            let request = request.body(()).unwrap();
            let is_get = request.method() == http::Method::GET;
            let (answer, mut body) = client.send_request(request, is_get).unwrap();
            if !is_get {
                body.send_data(Bytes::from_static(&[0; 5]), true).unwrap();
            }
            let answer = answer.await.unwrap().into_body();
            match answer.is_end_stream() {
                true => bare += 1,
                false => waiting += 1,
            }
            answers.push(answer);
        }
        // The last connection is not kept out.
        assert!(waiting > number);
    }
    assert!(waiting <= MOST + CONNECTIONS, "{waiting} wait");
    assert_eq!(waiting + bare, CONNECTIONS * STREAMS);
    assert!(bare > 0 && waiting > MOST / 2);
    let (client, _ended) = connect(&daemon).await;
    for path in [
        "/grpc.health.v1.Health/Watch",
        "/wald.v1.OpsService/GetServerInfo",
    ] {
        let answer = call(&client, path).await.unwrap();
        assert!(answer.into_body().data().await.unwrap().is_ok(), "{path}");
    }
}

#[tokio::test]
async fn connection_with_nothing_but_streams_of_health_gives_way() {
    let daemon = Daemon::start(&["--max-connections=1"]);
    let (client, _ended) = connect(&daemon).await;
    let watch = call(&client, "/grpc.health.v1.Health/Watch").await.unwrap();
    let mut watch = watch.into_body();
    assert!(watch.data().await.unwrap().is_ok());
    let (other, _other) = connect(&daemon).await;
    let answer = call(&other, "/grpc.health.v1.Health/Check");
    let answer = tokio::time::timeout(Duration::from_secs(30), answer).await;
    assert_eq!(answer.unwrap().unwrap().status(), 200);
    assert!(watch.data().await.is_none_or(|data| data.is_err()));
}

#[tokio::test]
async fn calls_of_the_http_port_end_no_silent_connection() {
    let daemon = Daemon::start(&["--max-silent-connections=4"]);
    for _ in 0..6 {
        assert_eq!(daemon.http("/v1/logs").0, 200);
    }
    let address = daemon.start["grpc"].as_str().unwrap();
    let mut silent = Vec::new();
    for _ in 0..4 {
        silent.push(std::net::TcpStream::connect(address).unwrap());
    }
    // Accepted behind them: the first of them may give way.
    let (client, _ended) = connect(&daemon).await;
    let check = call(&client, "/grpc.health.v1.Health/Check").await;
    assert_eq!(check.unwrap().status(), 200);
    for socket in &silent[1..] {
        socket.set_nonblocking(true).unwrap();
        let read = socket.peek(&mut [0]);
        assert!(
            read.as_ref()
                .is_err_and(|why| why.kind() == std::io::ErrorKind::WouldBlock),
            "{read:?}"
        );
    }
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
