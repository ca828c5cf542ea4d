//! gRPC by the book, and the answers to clients that speak something else.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use crate::support::Daemon;
use bytes::Bytes;
use http::{HeaderMap, Method, Request};

const APPEND: &str = "/wald.v1.WalService/Append";

/// Status of HTTP and headers of the answer, with its trailers.
async fn answer(
    daemon: &Daemon,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> (u16, HeaderMap) {
    let socket = tokio::net::TcpStream::connect(("127.0.0.1", daemon.port()))
        .await
        .unwrap();
    let (mut client, connection) = h2::client::handshake(socket).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut request = Request::builder()
        .method(method)
        .uri(format!("http://wald{path}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let (response, mut sender) = client
        .send_request(request.body(()).unwrap(), false)
        .unwrap();
    sender
        .send_data(Bytes::copy_from_slice(body), true)
        .unwrap();
    let (head, mut body) = response.await.unwrap().into_parts();
    while let Some(data) = body.data().await {
        let data = data.unwrap();
        body.flow_control().release_capacity(data.len()).unwrap();
    }
    let mut headers = head.headers;
    headers.extend(body.trailers().await.unwrap().unwrap_or_default());
    connection.abort();
    (head.status.as_u16(), headers)
}

const GRPC: (&str, &str) = ("content-type", "application/grpc");

#[tokio::test]
async fn request_that_is_not_grpc_is_refused_before_anything_is_applied() {
    let daemon = Daemon::start(&[]);
    // One record "x" for the log "a".
    let append = b"\0\0\0\0\x08\x0a\x01a\x12\x03\x0a\x01x";
    let web = ("content-type", "application/grpc-web+proto");
    let json = ("content-type", "application/json");
    for (method, headers, code) in [
        (Method::POST, vec![web], 415),
        (Method::POST, vec![json], 415),
        (Method::POST, vec![], 415),
        (Method::GET, vec![GRPC], 405),
        (Method::PUT, vec![GRPC], 405),
    ] {
        let (status, told) = answer(&daemon, method.clone(), APPEND, &headers, append).await;
        assert_eq!(status, code, "{method} {headers:?}");
        assert_eq!(told.contains_key("allow"), code == 405);
        assert_eq!(told["grpc-status"], "3");
    }
    for timeout in ["abc", "123456789S", "5", "", "-1S"] {
        let headers = [GRPC, ("grpc-timeout", timeout)];
        let (_, told) = answer(&daemon, Method::POST, APPEND, &headers, append).await;
        assert_eq!(told["grpc-status"], "3", "{timeout:?}");
        let text = told["grpc-message"].to_str().unwrap();
        assert!(text.contains("grpc-timeout"), "{text}");
    }
    assert!(daemon.metric("wald_appended_records_total") < 1.0);
    let headers = [GRPC, ("grpc-timeout", "99999999H")];
    let (status, told) = answer(&daemon, Method::POST, APPEND, &headers, append).await;
    assert_eq!((status, told["grpc-status"].as_bytes()), (200, &b"0"[..]));
}

#[tokio::test]
async fn message_that_cannot_be_read_is_invalid_in_every_rpc() {
    let daemon = Daemon::start(&[]);
    let paths = [
        APPEND,
        "/wald.v1.WalService/AppendBatch",
        "/wald.v1.WalService/AppendSession",
        "/wald.v1.WalService/Read",
        "/wald.v1.WalService/Scan",
        "/wald.v1.WalService/Sync",
        "/wald.v1.WalService/GetTail",
        "/wald.v1.WalService/Trim",
        "/wald.v1.WalService/Fence",
        "/wald.v1.LogService/CreateLog",
        "/wald.v1.LogService/ListLogs",
        "/wald.v1.CursorService/CommitCursor",
        "/wald.v1.OpsService/GetServerInfo",
        "/wald.v1.OpsService/Verify",
        "/wald.v1.OpsService/Backup",
        "/grpc.health.v1.Health/Check",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ];
    let bodies: [&[u8]; 5] = [
        // A field that is longer than its message, a flag that does not exist, a flag without an
        // encoding, less than was announced, and part of a prefix.
        b"\0\0\0\0\x02\x0a\xff",
        b"\x02\0\0\0\0",
        b"\x01\0\0\0\0",
        b"\0\0\0\0\x05\x0a",
        b"\0\0\0",
    ];
    for path in paths {
        for body in bodies {
            let (_, told) = answer(&daemon, Method::POST, path, &[GRPC], body).await;
            assert_eq!(told["grpc-status"], "3", "{path} {body:?}: {told:?}");
        }
    }
    // JSON with the content type of gRPC: its first bytes are no length.
    for path in paths {
        let (_, told) = answer(&daemon, Method::POST, path, &[GRPC], br#"{"log":"x"}"#).await;
        assert_eq!(told["grpc-status"], "3", "{path}");
        let text = told["grpc-message"].to_str().unwrap();
        assert!(text.contains("grpcurl"), "{path}: {text}");
    }
    let unknown = answer(
        &daemon,
        Method::POST,
        "/wald.v1.WalService/Nothing",
        &[GRPC],
        b"",
    );
    assert_eq!(unknown.await.1["grpc-status"], "12");
    let encoded = [GRPC, ("grpc-encoding", "gzip")];
    let (_, told) = answer(&daemon, Method::POST, APPEND, &encoded, b"\x01\0\0\0\0").await;
    assert_eq!(told["grpc-status"], "12");
    assert_eq!(told["grpc-accept-encoding"], "identity");
}

/// The answer to bytes of another protocol.
fn told(daemon: &Daemon, bytes: &[u8]) -> String {
    let mut socket = TcpStream::connect(("127.0.0.1", daemon.port())).unwrap();
    socket.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn other_protocols_are_told_the_right_port() {
    let daemon = Daemon::start(&[]);
    let http = daemon.start["http"].as_str().unwrap().to_owned();
    let get = told(&daemon, b"GET /metrics HTTP/1.1\r\nhost: wald\r\n\r\n");
    assert!(get.starts_with("HTTP/1.1 400"), "{get}");
    assert!(get.contains(&http) && get.contains("grpcurl"), "{get}");
    let tls = told(&daemon, b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03");
    assert!(tls.contains("TLS"), "{tls}");
}
