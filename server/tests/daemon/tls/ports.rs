//! Protocols and versions that each port accepts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::HandshakeKind;
use rustls::version::{TLS12, TLS13};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::certificates::Files;
use super::client::{connect, grpc, http, settings, wal};
use super::start;
use crate::support::append;

const HANDSHAKES: &str = "wald_tls_handshakes_total";

#[tokio::test]
async fn grpc_is_served_over_both_versions() {
    let files = Files::new();
    let daemon = start(&files.arguments());
    for version in [&TLS12, &TLS13] {
        let config = files.client_with(version, &["h2"], None);
        let mut wal = wal(&grpc(&daemon), config).await;
        wal.append(append("a", "over TLS")).await.unwrap();
    }
    assert_eq!(
        daemon.metric(&format!("{HANDSHAKES}{{result=\"ok\"}}")),
        2.0
    );
    assert_eq!(daemon.metric("wald_tls_handshake_seconds_count"), 2.0);
}

#[tokio::test]
async fn version_below_the_oldest_is_refused() {
    let files = Files::new();
    let mut arguments = files.arguments();
    arguments.push("--tls-min-version=1.3".to_owned());
    let daemon = start(&arguments);
    let address = grpc(&daemon);
    let old = files.client_with(&TLS12, &["h2"], None);
    let refused = connect(&address, old).await.unwrap_err();
    assert!(refused.to_string().contains("ProtocolVersion"), "{refused}");
    connect(&address, files.client(&["h2"], None))
        .await
        .unwrap();
}

#[tokio::test]
async fn cipher_suite_that_is_not_listed_is_refused() {
    let files = Files::new();
    let mut arguments = files.arguments();
    arguments.push("--tls-cipher-suites=TLS_AES_256_GCM_SHA384".to_owned());
    let daemon = start(&arguments);
    let address = grpc(&daemon);
    let config = files.client(&["h2"], None);
    let stream = connect(&address, config).await.unwrap();
    let suite = stream.get_ref().1.negotiated_cipher_suite().unwrap();
    assert_eq!(suite.suite(), rustls::CipherSuite::TLS13_AES_256_GCM_SHA384);
    let old = files.client_with(&TLS12, &["h2"], None);
    assert!(connect(&address, old).await.is_err());
}

#[tokio::test]
async fn grpc_port_refuses_clients_that_do_not_offer_h2() {
    let files = Files::new();
    let daemon = start(&files.arguments());
    let address = grpc(&daemon);
    for alpn in [&[][..], &["http/1.1"]] {
        let refused = connect(&address, files.client(alpn, None))
            .await
            .unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("NoApplicationProtocol"), "{alpn:?}: {text}");
    }
    let alpn = format!("{HANDSHAKES}{{result=\"alpn\"}}");
    assert_eq!(daemon.metric(&alpn), 2.0);
}

#[tokio::test]
async fn plaintext_on_the_grpc_port_is_answered_and_closed() {
    let files = Files::new();
    let daemon = start(&files.arguments());
    let began = Instant::now();
    for request in [
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
        "GET / HTTP/1.1\r\nHost: wald\r\n\r\n",
        "get lost",
    ] {
        let mut socket = TcpStream::connect(grpc(&daemon)).await.unwrap();
        socket.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer).await;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let expected = if request.starts_with("get") {
            ""
        } else {
            "over TLS"
        };
        assert!(answer.contains(expected), "{request:?}: {answer}");
    }
    assert!(began.elapsed() < Duration::from_secs(10));
}

/// Status line of the answer to a GET.
async fn get(daemon: &super::Daemon, config: rustls::ClientConfig) -> std::io::Result<String> {
    let mut stream = connect(&http(daemon), config).await?;
    stream
        .write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .await?;
    let mut answer = String::new();
    // Without close_notify this is an error.
    stream.read_to_string(&mut answer).await?;
    Ok(answer.lines().next().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn http_port_speaks_http_1_over_tls_and_requires_no_certificate() {
    let files = Files::new();
    let mut arguments = files.arguments_with_clients("require");
    arguments.push("--http-tls".to_owned());
    let daemon = start(&arguments);
    for alpn in [&["http/1.1"][..], &["h2", "http/1.1"], &[]] {
        let status = get(&daemon, files.client(alpn, None)).await.unwrap();
        assert_eq!(status, "HTTP/1.1 200 OK", "{alpn:?}");
    }
    assert!(get(&daemon, files.client(&["h2"], None)).await.is_err());
    let mut socket = TcpStream::connect(http(&daemon)).await.unwrap();
    socket.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    assert!(answer.contains("use https://"), "{answer}");
}

#[tokio::test]
async fn http_port_serves_no_records_where_grpc_requires_a_certificate() {
    let files = Files::new();
    let daemon = start(&files.arguments_with_clients("require"));
    for (path, setting) in [("/v1/logs", "http_api"), ("/console/", "console")] {
        let (status, text) = daemon.http(path);
        assert!(status == 404 && text.contains(setting), "{path}: {text}");
    }
    assert_eq!(daemon.http("/livez").0, 200);
}

#[tokio::test]
async fn sessions_resume_and_no_data_is_accepted_early() {
    let files = Files::new();
    let daemon = start(&files.arguments());
    let address = grpc(&daemon);
    for version in [&TLS12, &TLS13] {
        let mut config = files.client_with(version, &["h2"], None);
        config.enable_early_data = true;
        let config = Arc::new(config);
        for kind in [HandshakeKind::Full, HandshakeKind::Resumed] {
            let mut stream = connect(&address, Arc::clone(&config)).await.unwrap();
            settings(&mut stream).await.unwrap();
            let (_, session) = stream.get_ref();
            assert_eq!(session.handshake_kind(), Some(kind), "{version:?}");
            assert!(!session.is_early_data_accepted());
        }
    }
}
