//! Clients that stop in the middle of a handshake.

use std::time::{Duration, Instant};

use rustls::ClientConnection;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::certificates::Files;
use super::client::{connect, grpc, http, settings, wal};
use super::start;
use crate::support::append;

const STOPPED: usize = 200;
const SLOW: usize = 50;
const BOUND: Duration = Duration::from_secs(3);

/// Reads until the server closes the connection.
async fn closed(mut socket: TcpStream) -> Instant {
    let mut rest = Vec::new();
    let _ = socket.read_to_end(&mut rest).await;
    Instant::now()
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_stop_delay_no_other_handshake_and_are_gone_in_time() {
    let files = Files::new();
    let mut arguments = files.arguments();
    arguments.push(format!("--handshake-timeout={}s", BOUND.as_secs()));
    let daemon = start(&arguments);
    let address = grpc(&daemon);
    let config = std::sync::Arc::new(files.client(&["h2"], None));
    let hello = || {
        let name = ServerName::try_from("localhost").unwrap();
        let mut client = ClientConnection::new(std::sync::Arc::clone(&config), name).unwrap();
        let mut hello = Vec::new();
        client.write_tls(&mut hello).unwrap();
        hello
    };
    let began = Instant::now();
    let mut peers = tokio::task::JoinSet::new();
    for _ in 0..STOPPED {
        let mut socket = TcpStream::connect(&address).await.unwrap();
        socket.write_all(&hello()).await.unwrap();
        peers.spawn(closed(socket));
    }
    for _ in 0..SLOW {
        let socket = TcpStream::connect(&address).await.unwrap();
        let (mut reader, mut writer) = socket.into_split();
        let hello = hello();
        let sender = tokio::spawn(async move {
            for byte in hello {
                if writer.write_all(&[byte]).await.is_err() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        });
        peers.spawn(async move {
            let mut rest = Vec::new();
            let _ = reader.read_to_end(&mut rest).await;
            sender.abort();
            Instant::now()
        });
    }
    for _ in 0..20 {
        let begin = Instant::now();
        let mut stream = connect(&address, std::sync::Arc::clone(&config))
            .await
            .unwrap();
        settings(&mut stream).await.unwrap();
        assert!(
            begin.elapsed() < Duration::from_secs(1),
            "{:?}",
            begin.elapsed()
        );
    }
    while let Some(closed) = peers.join_next().await {
        let lasted = closed.unwrap() - began;
        assert!(lasted < BOUND + Duration::from_secs(5), "{lasted:?}");
    }
    let abandoned = "wald_tls_handshakes_total{result=\"abandoned\"}";
    assert_eq!(daemon.metric(abandoned), (STOPPED + SLOW) as f64);
    let mut wal = wal(&grpc(&daemon), files.client(&["h2"], None)).await;
    wal.append(append("a", "after all of them")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn handshakes_at_once_all_succeed() {
    const AT_ONCE: usize = 400;
    let files = Files::new();
    let mut arguments = files.arguments();
    // Clients that wait for the server do not count.
    arguments.push("--max-silent-connections=128".to_owned());
    arguments.push("--worker-threads=1".to_owned());
    let daemon = start(&arguments);
    let address = grpc(&daemon);
    let config = std::sync::Arc::new(files.client(&["h2"], None));
    let mut peers = tokio::task::JoinSet::new();
    for _ in 0..AT_ONCE {
        let (address, config) = (address.clone(), std::sync::Arc::clone(&config));
        peers.spawn(async move {
            let mut stream = connect(&address, config).await?;
            settings(&mut stream).await
        });
    }
    while let Some(peer) = peers.join_next().await {
        peer.unwrap().unwrap();
    }
    let done = daemon.metric("wald_tls_handshakes_total{result=\"ok\"}");
    assert_eq!(done, AT_ONCE as f64);
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_stop_on_the_http_port_leave_places_to_probes() {
    const PLACES: usize = 16;
    let files = Files::new();
    let mut arguments = files.arguments();
    arguments.push("--http-tls".to_owned());
    arguments.push("--http-head-timeout=2s".to_owned());
    arguments.push(format!("--http-max-connections={PLACES}"));
    let daemon = start(&arguments);
    let address = http(&daemon);
    let began = Instant::now();
    let mut peers = tokio::task::JoinSet::new();
    for first in [&b""[..], b"\x16", b"\x16\x03\x01\x02\0"] {
        for _ in 0..PLACES {
            let mut socket = TcpStream::connect(&address).await.unwrap();
            socket.write_all(first).await.unwrap();
            peers.spawn(closed(socket));
        }
    }
    let mut probe = connect(&address, files.client(&["http/1.1"], None))
        .await
        .unwrap();
    let request = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    probe.write_all(request).await.unwrap();
    let mut answer = String::new();
    probe.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert!(began.elapsed() < Duration::from_secs(2));
    while let Some(closed) = peers.join_next().await {
        let lasted = closed.unwrap() - began;
        assert!(lasted < Duration::from_secs(10), "{lasted:?}");
    }
}
