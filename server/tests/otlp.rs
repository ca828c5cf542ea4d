//! Traces, as a collector gets them, of a daemon that was built with the feature `otlp`:
//!
//! ```text
//! cargo test -p wald-server --features otlp --test otlp -- --ignored
//! ```
//!
//! or, with `WALD_BINARY`, of one that was built elsewhere.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod support;

use bytes::Bytes;
use rustix::process::Signal;
use support::{Daemon, append};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use wald_proto::v1;

const TRACE: [u8; 16] = *b"one trace of us!";
const CALLER: [u8; 8] = *b"callspan";

/// A collector that takes every request and hands on its body.
async fn collector() -> (String, mpsc::UnboundedReceiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (sender, bodies) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            tokio::spawn(collect(socket, sender.clone()));
        }
    });
    (endpoint, bodies)
}

async fn collect(socket: tokio::net::TcpStream, bodies: mpsc::UnboundedSender<Vec<u8>>) {
    let mut connection = h2::server::handshake(socket).await.unwrap();
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        let bodies = bodies.clone();
        tokio::spawn(async move {
            let path = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
            assert_eq!(request.uri().path(), path);
            let mut stream = request.into_body();
            let mut body = Vec::new();
            while let Some(data) = stream.data().await {
                let data = data.unwrap();
                stream.flow_control().release_capacity(data.len()).unwrap();
                body.extend_from_slice(&data);
            }
            let head = http::Response::builder()
                .header("content-type", "application/grpc")
                .body(())
                .unwrap();
            let mut answer = respond.send_response(head, false).unwrap();
            // An empty message: nothing is compressed, and it has no bytes.
            answer
                .send_data(Bytes::from_static(&[0; 5]), false)
                .unwrap();
            let mut trailers = http::HeaderMap::new();
            trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
            answer.send_trailers(trailers).unwrap();
            let _ = bodies.send(body);
        });
    }
}

fn contains(body: &[u8], part: &[u8]) -> bool {
    body.windows(part.len()).any(|window| window == part)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn traced<T>(message: T, sampled: bool) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    let flags = if sampled { "01" } else { "00" };
    let parent = format!("00-{}-{}-{flags}", hex(&TRACE), hex(&CALLER));
    let metadata = request.metadata_mut();
    metadata.insert("traceparent", parent.parse().unwrap());
    metadata.insert("authorization", "Bearer wald1_secret".parse().unwrap());
    request
}

/// Everything that the collector got until the daemon had ended.
async fn end(daemon: Daemon, mut bodies: mpsc::UnboundedReceiver<Vec<u8>>) -> Vec<u8> {
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended().await.code(), Some(0));
    let mut all = Vec::new();
    while let Ok(body) = bodies.try_recv() {
        all.extend(body);
    }
    all
}

#[tokio::test]
#[ignore = "needs a daemon with the feature otlp"]
async fn call_becomes_a_span_below_its_callers() {
    let (endpoint, bodies) = collector().await;
    // Nothing but the callers' own decisions.
    let arguments = ["--otlp-sample-percent", "0", "--otlp-endpoint", &endpoint];
    let daemon = Daemon::start(&arguments);
    let mut wal = daemon.wal().await;
    wal.append(traced(append("a", "secret"), true))
        .await
        .unwrap();
    let unknown = v1::ReadRequest {
        log: "b".to_owned(),
        ..v1::ReadRequest::default()
    };
    wal.read(traced(unknown, false)).await.unwrap_err();
    wal.get_tail(v1::GetTailRequest {
        log: "a".to_owned(),
        ..v1::GetTailRequest::default()
    })
    .await
    .unwrap();
    let got = end(daemon, bodies).await;
    for part in [
        &TRACE[..],
        &CALLER,
        b"wald.v1.WalService/Append",
        b"rpc.system.name",
        b"rpc.response.status_code",
        b"service.name",
        b"wald.queue_us",
        b"wald.encode_us",
        b"wald.write_us",
        b"wald.flush_us",
    ] {
        assert!(contains(&got, part), "{:?}", String::from_utf8_lossy(part));
    }
    for part in ["wald.v1.WalService/Read", "GetTail", "secret"] {
        assert!(!contains(&got, part.as_bytes()), "{part}");
    }
}

#[tokio::test]
#[ignore = "needs a daemon with the feature otlp"]
async fn variables_of_open_telemetry_are_enough() {
    let (endpoint, bodies) = collector().await;
    let directory = support::private_directory();
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "none"),
        ("OTEL_SERVICE_NAME", "shop-log"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment=blue"),
    ];
    let daemon = Daemon::start_with(directory.path(), &[], &variables);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "x")).await.unwrap();
    let got = end(daemon, bodies).await;
    for part in ["wald.v1.WalService/Append", "shop-log", "blue"] {
        assert!(contains(&got, part.as_bytes()), "{part}");
    }
}

#[tokio::test]
#[ignore = "needs a daemon with the feature otlp"]
async fn traces_do_not_depend_on_the_filter_of_the_log() {
    let (endpoint, bodies) = collector().await;
    let daemon = Daemon::start(&[
        "--otlp-endpoint",
        &endpoint,
        "--log-filter",
        "off,wald=info",
    ]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "x")).await.unwrap();
    let got = end(daemon, bodies).await;
    assert!(contains(&got, b"wald.v1.WalService/Append"));
}

#[tokio::test]
#[ignore = "needs a daemon with the feature otlp"]
async fn collector_that_is_away_stops_nothing() {
    let daemon = Daemon::start(&["--otlp-endpoint", "http://127.0.0.1:1"]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "x")).await.unwrap();
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended().await.code(), Some(0));
}
