//! Too many requests at once, and requests that are too late: they are refused, and not
//! written.

use crate::support::{Daemon, Told, append};
use bytes::Bytes;
use h2::SendStream;
use h2::client::{ResponseFuture, SendRequest};
use tonic::{Code, Status};
use tonic_types::StatusExt;
use wald_proto::v1;

const APPEND: &str = "/wald.v1.WalService/Append";

async fn tail(daemon: &Daemon, log: &str) -> Result<u64, Status> {
    let request = v1::GetTailRequest {
        log: log.to_owned(),
        ..v1::GetTailRequest::default()
    };
    let answer = daemon.wal().await.get_tail(request).await?;
    Ok(answer.into_inner().tail_lsn.unwrap())
}

#[tokio::test]
async fn more_than_the_budget_is_busy_with_a_time_to_come_back_and_not_written() {
    let daemon = Daemon::start(&["--max-inflight-bytes", "4KiB"]);
    let wal = daemon.wal().await;
    let payload = "x".repeat(1000);
    let (mut acked, mut busy) = (0, Vec::new());
    // How many are in flight at a time is up to the machine; some round has enough.
    while busy.is_empty() {
        let writers: Vec<_> = (0..200)
            .map(|_| {
                let (mut wal, request) = (wal.clone(), append("a", &payload));
                tokio::spawn(async move { wal.append(request).await })
            })
            .collect();
        for writer in writers {
            match writer.await.unwrap() {
                Ok(_) => acked += 1,
                Err(status) => busy.push(status),
            }
        }
    }
    for status in &busy {
        let told = Told::of(status);
        assert_eq!(
            (told.code, told.reason.as_str()),
            (Code::ResourceExhausted, "BUSY")
        );
        assert_eq!(
            (told.fact("outcome"), told.fact("retry")),
            ("NOT_APPLIED", "SAFE")
        );
        assert_eq!(told.fact("limit_bytes"), "4096");
        let details = status.get_error_details();
        let pause = details.retry_info().unwrap().retry_delay.unwrap();
        assert!(!pause.is_zero());
    }
    assert_eq!(tail(&daemon, "a").await.unwrap(), acked);
    let rejected = daemon.metric(r#"wald_rejected_total{operation="write",reason="BUSY"}"#);
    assert_eq!(rejected, f64::from(u32::try_from(busy.len()).unwrap()));
    assert_eq!(daemon.metric("wald_inflight_bytes"), 0.0);
    // Nothing is left of the pressure.
    daemon
        .wal()
        .await
        .append(append("a", &payload))
        .await
        .unwrap();
}

/// A connection of its own.
async fn connect(daemon: &Daemon) -> SendRequest<Bytes> {
    let address = daemon.start["grpc"].as_str().unwrap();
    let socket = tokio::net::TcpStream::connect(address).await.unwrap();
    let (client, connection) = h2::client::handshake(socket).await.unwrap();
    tokio::spawn(connection);
    client
}

/// Opens a call, with a header more if one is given, and sends none of its body.
async fn open(
    client: &SendRequest<Bytes>,
    path: &str,
    header: Option<(&str, &str)>,
) -> (ResponseFuture, SendStream<Bytes>) {
    let request = http::Request::post(format!("http://wald{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    let request = match header {
        Some((name, value)) => request.header(name, value),
        None => request,
    };
    let mut client = client.clone().ready().await.unwrap();
    client
        .send_request(request.body(()).unwrap(), false)
        .unwrap()
}

/// Opens an Append with a deadline and sends none of its body; the status. (tonic's client
/// would give up by itself before the server answers.)
async fn append_without_a_body(daemon: &Daemon, timeout: &str) -> Status {
    let client = connect(daemon).await;
    let (answer, mut body) = open(&client, APPEND, Some(("grpc-timeout", timeout))).await;
    let answer = answer.await.unwrap();
    // Too late now, whatever it is.
    let _ = body.send_data(Bytes::from_static(&[0; 5]), true);
    Status::from_header_map(answer.headers()).unwrap()
}

/// Sends a request that must be refused; its reason, and the bytes by which the daemon's memory rises at most meanwhile.
async fn refused_with_peak<T: std::fmt::Debug>(
    daemon: &Daemon,
    answer: impl Future<Output = Result<T, Status>>,
) -> (String, u64) {
    let file = |name: &str| format!("/proc/{}/{name}", daemon.pid().as_raw_nonzero());
    let kilobytes = |key: &str| {
        let status = std::fs::read_to_string(file("status")).unwrap();
        let line = status.lines().find(|line| line.starts_with(key)).unwrap();
        let number = line.split_whitespace().nth(1).unwrap();
        number.parse::<u64>().unwrap()
    };
    // The peak begins again at the memory of now.
    std::fs::write(file("clear_refs"), "5").unwrap();
    let before = kilobytes("VmHWM:");
    let refused = answer.await.unwrap_err();
    let peak = kilobytes("VmHWM:") - before;
    (Told::of(&refused).reason, peak << 10)
}

/// An empty field takes two bytes in a message, and its object many more.
#[tokio::test]
async fn message_of_empty_fields_takes_little_more_memory_than_its_bytes() {
    const FIELDS: usize = 1 << 20;
    // The message, its copy in the buffers of the connection, and the allocator's.
    const MOST: u64 = 10 * 2 * FIELDS as u64;
    let daemon = Daemon::start(&["--max-batch-bytes", "4MiB", "--segment-bytes", "16MiB"]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "x")).await.unwrap();
    let single = v1::AppendRequest {
        record: Some(v1::Record {
            headers: vec![v1::Header::default(); FIELDS],
            ..v1::Record::default()
        }),
        ..append("a", "x")
    };
    // Text is not stored as text, so the record is decoded.
    let decoded = v1::Record {
        payload: Some(v1::record::Payload::Text("x".to_owned())),
        ..single.record.clone().unwrap()
    };
    let records = v1::AppendBatchRequest {
        batches: vec![v1::LogBatch {
            log: "a".to_owned(),
            records: vec![decoded],
            ..v1::LogBatch::default()
        }],
        ..v1::AppendBatchRequest::default()
    };
    let logs = v1::AppendBatchRequest {
        batches: vec![v1::LogBatch::default(); FIELDS],
        ..v1::AppendBatchRequest::default()
    };
    let checks = v1::AppendBatchRequest {
        checks: vec![v1::LogCheck::default(); FIELDS],
        ..v1::AppendBatchRequest::default()
    };
    let found = refused_with_peak(&daemon, wal.append(single)).await;
    assert_eq!(found.0, "RECORD_TOO_LARGE");
    assert!(found.1 < MOST, "{} bytes", found.1);
    for (batch, reason) in [
        (records, "RECORD_TOO_LARGE"),
        (logs, "REQUEST_TOO_LARGE"),
        (checks, "REQUEST_TOO_LARGE"),
    ] {
        let found = refused_with_peak(&daemon, wal.append_batch(batch)).await;
        assert_eq!(found.0, reason, "{found:?}");
        assert!(found.1 < MOST, "{reason}: {} bytes", found.1);
    }
}

/// A message that will not be kept waits for no room.
#[tokio::test]
async fn message_too_large_to_be_decoded_takes_no_room_while_it_comes() {
    let daemon = Daemon::start(&[]);
    let client = connect(&daemon).await;
    let mut wal = daemon.wal().await;
    let mut answers = Vec::new();
    for header in [None, Some(("grpc-encoding", "identity"))] {
        let (answer, mut body) = open(&client, APPEND, header).await;
        body.send_data(Bytes::from_static(&[0, 255, 255, 255, 255, 1]), false)
            .unwrap();
        answers.push((answer, body));
    }
    // They have come as far as that when this one, behind them, has an answer.
    let (answer, mut body) = open(&client, "/grpc.health.v1.Health/Check", None).await;
    body.send_data(Bytes::from_static(&[0; 5]), true).unwrap();
    assert_eq!(answer.await.unwrap().status(), 200);
    wal.append(append("a", "x")).await.unwrap();
    for (answer, mut body) in answers {
        body.send_data(Bytes::new(), true).unwrap();
        let answer = answer.await.unwrap();
        let told = Told::of(&Status::from_header_map(answer.headers()).unwrap());
        assert_eq!(
            (told.code, told.reason.as_str()),
            (Code::InvalidArgument, "REQUEST_TOO_LARGE")
        );
        assert_eq!(told.fact("outcome"), "NOT_APPLIED");
    }
}

#[tokio::test]
async fn request_that_is_not_there_by_its_deadline_was_provably_not_written() {
    let daemon = Daemon::start(&[]);
    let status = append_without_a_body(&daemon, "50m").await;
    let told = Told::of(&status);
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::DeadlineExceeded, "DEADLINE_EXCEEDED")
    );
    assert_eq!(
        (told.fact("outcome"), told.fact("retry")),
        ("NOT_APPLIED", "SAFE")
    );
    let missing = tail(&daemon, "a").await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
}

#[tokio::test]
async fn ceiling_of_the_server_holds_where_the_client_has_no_deadline() {
    let daemon = Daemon::start(&["--request-timeout", "50ms"]);
    let status = append_without_a_body(&daemon, "1H").await;
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert_eq!(Told::of(&status).fact("outcome"), "NOT_APPLIED");
}

/// A gRPC message with its prefix.
fn framed(message: &impl prost::Message) -> Bytes {
    let mut bytes = vec![0];
    bytes.extend(u32::try_from(message.encoded_len()).unwrap().to_be_bytes());
    message.encode(&mut bytes).unwrap();
    bytes.into()
}

/// An answer that becomes BUSY says that nothing was applied: that of a write must not.
#[tokio::test]
async fn unread_answers_make_reads_busy_and_never_writes() {
    const LOGS: usize = 100;
    let daemon = Daemon::start(&["--segment-bytes", "64MiB"]);
    daemon
        .wal()
        .await
        .append(append("big", &"x".repeat(900_000)))
        .await
        .unwrap();
    let small = append("small", &"x".repeat(6_000));
    daemon.wal().await.append(small).await.unwrap();
    let socket = tokio::net::TcpStream::connect(("127.0.0.1", daemon.port()))
        .await
        .unwrap();
    let (client, connection) = h2::client::Builder::new()
        .initial_window_size(0)
        .handshake(socket)
        .await
        .unwrap();
    tokio::spawn(connection);
    let read = |log: &str| v1::ReadRequest {
        log: log.to_owned(),
        max_bytes: 1 << 20,
        ..v1::ReadRequest::default()
    };
    let mut held = Vec::new();
    // The small ones leave no room for anything that is counted.
    for log in ["big", "small"] {
        let mut busy = None;
        while busy.is_none() {
            let (answer, mut body) = open(&client, "/wald.v1.WalService/Read", None).await;
            body.send_data(framed(&read(log)), true).unwrap();
            let answer = answer.await.unwrap();
            busy = Status::from_header_map(answer.headers());
            held.push(answer);
            assert!(held.len() < 240, "unread answers have no bound");
        }
        let busy = Told::of(&busy.unwrap());
        assert_eq!(
            (busy.code, busy.reason.as_str()),
            (Code::ResourceExhausted, "BUSY")
        );
    }
    let rejected = r#"wald_rejected_total{operation="read",reason="BUSY"}"#;
    assert_eq!(daemon.metric(rejected), 2.0);
    // Its answer names all logs, and is as large as the reads that are counted.
    let names: Vec<_> = (0..LOGS)
        .map(|log| format!("{log}-{}", "n".repeat(200)))
        .collect();
    let batch = v1::AppendBatchRequest {
        batches: names
            .iter()
            .map(|name| crate::support::part(name, &["x"]))
            .collect(),
        ..v1::AppendBatchRequest::default()
    };
    let (answer, mut body) = open(&client, "/wald.v1.WalService/AppendBatch", None).await;
    body.send_data(framed(&batch), true).unwrap();
    let answer = answer.await.unwrap();
    assert!(
        !answer.headers().contains_key("grpc-status"),
        "{:?}",
        answer.headers()
    );
    assert_eq!(tail(&daemon, &names[0]).await.unwrap(), 1);
    // A client that reads has its answers again.
    drop(held);
    drop(client);
    let page = daemon
        .wal()
        .await
        .read(read("big"))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(page.batch.unwrap().records.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scans_that_nobody_reads_leave_room_for_those_who_read() {
    const CONNECTIONS: usize = 16;
    const SCANS: usize = 16;
    const LIMIT: f64 = (64 << 20) as f64;
    let daemon = Daemon::start(&["--segment-bytes", "64MiB"]);
    let large = "x".repeat(900_000);
    for _ in 0..8 {
        daemon
            .wal()
            .await
            .append(append("big", &large))
            .await
            .unwrap();
    }
    let scan = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::Log("big".to_owned())),
        ..v1::ScanRequest::default()
    };
    // Its answer will wait for the window of its connection, as the scans beside it do.
    let mut applied = None;
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        let socket = tokio::net::TcpStream::connect(("127.0.0.1", daemon.port()))
            .await
            .unwrap();
        let (client, connection) = h2::client::Builder::new()
            .initial_window_size(1)
            .handshake(socket)
            .await
            .unwrap();
        tokio::spawn(connection);
        let mut answers = Vec::new();
        for _ in 0..SCANS {
            let (answer, mut body) = open(&client, "/wald.v1.WalService/Scan", None).await;
            body.send_data(framed(&scan), true).unwrap();
            answers.push(answer);
        }
        if applied.is_none() {
            let (answer, mut body) = open(&client, APPEND, None).await;
            body.send_data(framed(&append("small", "x")), true).unwrap();
            applied = Some(answer);
        }
        connections.push((client, answers));
    }
    const HELD: &str = "wald_admitted_bytes{part=\"answers\"}";
    crate::support::until(&daemon, HELD, |held| held > LIMIT * 0.8).await;
    // All of them, at once, would have 230 MB.
    let read = v1::ReadRequest {
        log: "big".to_owned(),
        ..v1::ReadRequest::default()
    };
    let mut busy = 0;
    let mut wal = daemon.wal().await;
    let mut most = 0.0_f64;
    for _ in 0..20 {
        most = most.max(daemon.metric(HELD));
        match wal.read(read.clone()).await {
            Ok(page) => assert_eq!(page.into_inner().batch.unwrap().records.len(), 1),
            Err(status) => {
                assert_eq!(Told::of(&status).reason, "BUSY");
                busy += 1;
            }
        }
    }
    assert!(most <= LIMIT, "{most}");
    assert!(busy <= 5, "{busy} of 20 reads were busy");
    // A client that holds room that others need is cut off.
    let (_client, answers) = connections.swap_remove(0);
    let mut scan = answers
        .into_iter()
        .next()
        .unwrap()
        .await
        .unwrap()
        .into_body();
    // The scans that wait for room keep it short.
    let end = loop {
        match scan.data().await {
            Some(Ok(_)) => {}
            Some(Err(error)) => break error.reason(),
            None => break None,
        }
    };
    assert_eq!(end, Some(h2::Reason::CANCEL));
    // An applied write is not: its client would write again.
    let mut body = applied.unwrap().await.unwrap().into_body();
    while let Some(data) = body.data().await {
        let data = data.unwrap();
        body.flow_control().release_capacity(data.len()).unwrap();
    }
    assert_eq!(body.trailers().await.unwrap().unwrap()["grpc-status"], "0");
    // Others go on.
    assert_eq!(
        wal.append(append("big", "x"))
            .await
            .unwrap()
            .into_inner()
            .lsn,
        Some(8)
    );
}
