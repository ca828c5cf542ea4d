//! The HTTP API: JSON, records as they are, server-sent events; with the rights, limits and errors of gRPC.

use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use tonic::Code;
use wald_proto::v1;

use crate::auth::principals::{AuthFile, COMPANY};
use crate::support::{Daemon, Told, append, output, private_directory, records, until, wald};

const JSON: &str = "Content-Type: application/json\r\n";

/// Status and JSON of the answer to a request.
fn send(daemon: &Daemon, method: &str, path: &str, headers: &str, body: &str) -> (u16, Value) {
    let (status, head, body) = daemon.send_http(method, path, headers, body);
    assert!(
        head.contains("content-type: application/json"),
        "{head} {body}"
    );
    let body = serde_json::from_str(&body).unwrap_or_else(|why| panic!("{why}: {body}"));
    (status, body)
}

fn post(daemon: &Daemon, path: &str, body: &Value) -> (u16, Value) {
    send(daemon, "POST", path, JSON, &body.to_string())
}

fn get(daemon: &Daemon, path: &str) -> (u16, Value) {
    send(daemon, "GET", path, "", "")
}

/// The answer to a request that must succeed.
fn good((status, answer): (u16, Value)) -> Value {
    assert_eq!(status, 200, "{answer}");
    answer
}

/// Reason and metadata of an error.
fn facts(error: &Value) -> (String, Value) {
    let details = error["error"]["details"].as_array().unwrap();
    let info = details
        .iter()
        .find(|detail| detail["@type"] == "type.googleapis.com/google.rpc.ErrorInfo");
    let info = info.unwrap_or_else(|| panic!("{error}"));
    (
        info["reason"].as_str().unwrap().to_owned(),
        info["metadata"].clone(),
    )
}

/// Texts of the records of a batch, in order.
fn texts(batch: &Value) -> Vec<&str> {
    let records = batch["records"].as_array().unwrap().iter();
    records
        .map(|record| record["text"].as_str().unwrap())
        .collect()
}

/// A stream of the API, line after line.
struct Lines(BufReader<TcpStream>);

impl Lines {
    /// Sends the request, and reads the head of the answer.
    fn open(address: &str, path: &str, headers: &str) -> (Self, String) {
        let mut stream = TcpStream::connect(address).unwrap();
        let timeout = Some(Duration::from_secs(30));
        stream.set_read_timeout(timeout).unwrap();
        // HTTP/1.0: without pieces, lines are lines.
        let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut lines = Self(BufReader::new(stream));
        let mut head = String::new();
        loop {
            let line = lines.next().unwrap();
            if line.is_empty() {
                return (lines, head);
            }
            head += &format!("{line}\n");
        }
    }

    /// `None` at the end.
    fn next(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.0.read_line(&mut line);
        // A daemon that is killed resets its connections.
        (read.unwrap_or(0) > 0).then(|| line.trim_end_matches(['\r', '\n']).to_owned())
    }
}

/// One server-sent event.
#[derive(Debug, Default)]
struct Event {
    kind: String,
    id: Option<String>,
    data: Value,
}

impl Lines {
    /// The next event with data, as a browser makes it of lines: an event without its empty line does not count.
    fn event(&mut self) -> Option<Event> {
        let (mut event, mut data) = (Event::default(), None);
        loop {
            let line = self.next()?;
            match line.split_once(": ") {
                Some(("id", id)) => event.id = Some(id.to_owned()),
                Some(("event", kind)) => kind.clone_into(&mut event.kind),
                Some(("data", text)) => data = Some(text.to_owned()),
                Some(("retry", _)) => {}
                None if line.is_empty() => {
                    if let Some(data) = data.take() {
                        event.data = serde_json::from_str(&data).unwrap();
                        return Some(event);
                    }
                }
                _ => panic!("{line}"),
            }
        }
    }
}

fn follow(daemon: &Daemon, query: &str, last: Option<&str>) -> Lines {
    let accept = "Accept: text/event-stream\r\n";
    let headers = match last {
        Some(id) => format!("{accept}Last-Event-ID: {id}\r\n"),
        None => accept.to_owned(),
    };
    let path = format!("/v1/scan?follow=true&{query}");
    let (lines, head) = Lines::open(daemon.start["http"].as_str().unwrap(), &path, &headers);
    assert!(
        head.contains("200") && head.contains("content-type: text/event-stream"),
        "{head}"
    );
    lines
}

#[tokio::test]
async fn records_go_in_in_each_form_and_come_out_as_over_grpc() {
    let daemon = Daemon::start(&[]);
    let path = "/v1/logs/a%2Fb/records";
    let first = post(
        &daemon,
        path,
        &json!({ "records": [{ "text": "one" }, { "data": "dHdv" }] }),
    );
    let first = good(first);
    assert_eq!(first["appends"][0]["first_lsn"], "0");
    assert_eq!(first["durability"], "DURABILITY_DURABLE");
    let send = |kind: &str, body: &str| {
        let header = format!("Content-Type: {kind}\r\n");
        good(send(&daemon, "POST", path, &header, body))
    };
    send("text/plain", "three");
    let lines = send("application/x-ndjson", "{\"four\": 4}\nfive\n");
    assert_eq!(lines["appends"][0]["next_lsn"], "5");
    let wanted = ["one", "two", "three", "{\"four\": 4}", "five"];
    let page = good(get(&daemon, path));
    assert_eq!(texts(&page["batch"]), wanted);
    assert_eq!(page["tail_lsn"], "5");
    let request = v1::ReadRequest {
        log: "a/b".to_owned(),
        ..v1::ReadRequest::default()
    };
    let page = daemon.wal().await.read(request).await.unwrap().into_inner();
    let over_grpc: Vec<_> = records(&[page.batch.unwrap()])
        .into_iter()
        .map(|(.., text)| text)
        .collect();
    assert_eq!(over_grpc, wanted);
}

#[test]
fn batch_over_logs_is_whole_and_cursors_and_logs_have_their_requests() {
    let daemon = Daemon::start(&[]);
    let batch = |expected: u64| {
        json!({
            "batches": [
                { "log": "a", "records": [{ "text": "1" }] },
                { "log": "b", "records": [{ "text": "2" }], "condition": { "expected_lsn": expected } },
            ],
            "cursors": [{ "log": "a", "cursor": "done", "lsn": "0" }],
        })
    };
    let (status, refused) = post(&daemon, "/v1/batch", &batch(7));
    let (reason, metadata) = facts(&refused);
    assert_eq!((status, reason.as_str()), (400, "POSITION_MISMATCH"));
    assert_eq!(
        (&metadata["outcome"], &metadata["retry"]),
        (&json!("NOT_APPLIED"), &json!("NEVER"))
    );
    assert!(good(get(&daemon, "/v1/logs")).get("logs").is_none());
    good(post(&daemon, "/v1/logs", &json!({ "log": "a" })));
    good(post(&daemon, "/v1/batch", &batch(0)));
    let cursor = "/v1/logs/a/cursors/done";
    assert_eq!(good(get(&daemon, cursor))["cursor"]["lsn"], "0");
    good(send(
        &daemon,
        "PUT",
        cursor,
        JSON,
        "{\"lsn\": 1, \"expected_lsn\": 0}",
    ));
    assert_eq!(
        good(get(&daemon, "/v1/logs/a/cursors"))["cursors"][0]["name"],
        "done"
    );
    good(send(&daemon, "DELETE", cursor, "", ""));
    assert_eq!(get(&daemon, cursor).0, 404);
    let made = json!({ "log": "c", "config": { "retention": { "max_age": "3600s" } } });
    assert_eq!(good(post(&daemon, "/v1/logs", &made))["log"]["name"], "c");
    let path = "/v1/logs/c?update_mask=retention.max_records";
    let change = "{\"retention\": {\"max_records\": \"5\"}}";
    let changed = good(send(&daemon, "PATCH", path, JSON, change));
    let retention = &changed["log"]["config"]["retention"];
    assert_eq!(
        (&retention["max_age"], &retention["max_records"]),
        (&json!("3600s"), &json!("5"))
    );
    good(send(&daemon, "DELETE", "/v1/logs/c", "", ""));
    good(post(&daemon, "/v1/logs/a/fence", &json!({})));
    let tail = good(get(&daemon, "/v1/logs/a/tail"));
    assert_eq!(
        (&tail["tail_lsn"], &tail["writer_epoch"]),
        (&json!("1"), &json!("1"))
    );
    assert_eq!(
        good(post(
            &daemon,
            "/v1/logs/a/trim",
            &json!({ "before_lsn": 1 })
        ))["first_lsn"],
        "1"
    );
    good(post(&daemon, "/v1/sync", &json!({})));
    let names = good(get(&daemon, "/v1/logs?prefix=b"));
    assert_eq!(names["logs"].as_array().unwrap().len(), 1);
    assert!(good(get(&daemon, "/v1/server"))["version"].is_string());
}

/// The API and gRPC share producers: a repeat gets the first answer.
#[test]
fn repeat_of_a_producer_is_recognised() {
    let daemon = Daemon::start(&[]);
    let path = "/v1/logs/a/records?condition.producer.id=p&condition.producer.sequence=0";
    let header = "Content-Type: text/plain\r\n";
    let first = good(send(&daemon, "POST", path, header, "x"));
    let again = good(send(&daemon, "POST", path, header, "x"));
    assert_eq!(
        first["appends"][0]["first_lsn"],
        again["appends"][0]["first_lsn"]
    );
    assert_eq!(again["appends"][0]["deduplicated"], true);
    let (status, other) = send(&daemon, "POST", path, header, "y");
    assert_eq!(
        (status, facts(&other).0.as_str()),
        (409, "PRODUCER_CONFLICT")
    );
    let producers = good(get(&daemon, "/v1/logs/a/producers"));
    assert_eq!(producers["producers"][0]["id"], "p");
    good(send(&daemon, "DELETE", "/v1/logs/a/producers/p", "", ""));
}

#[tokio::test]
async fn errors_are_those_of_grpc() {
    let daemon = Daemon::start(&["--max-record-bytes", "1KiB"]);
    good(post(
        &daemon,
        "/v1/logs/a/records",
        &json!({ "records": [{ "text": "x" }] }),
    ));
    let large = "x".repeat(2000);
    let mut wal = daemon.wal().await;
    let grpc = [
        wal.append(append("", "x")).await.unwrap_err(),
        wal.append(append("a", &large)).await.unwrap_err(),
        wal.read(v1::ReadRequest {
            log: "none".to_owned(),
            ..v1::ReadRequest::default()
        })
        .await
        .unwrap_err(),
        wal.read(v1::ReadRequest {
            log: "a".to_owned(),
            start: Some(v1::read_request::Start::Lsn(9)),
            ..v1::ReadRequest::default()
        })
        .await
        .unwrap_err(),
    ];
    let record = |text: &str| json!({ "batches": [{ "log": "a", "records": [{ "text": text }] }] });
    let nameless = json!({ "batches": [{ "records": [{ "text": "x" }] }] });
    let http = [
        post(&daemon, "/v1/batch", &nameless),
        post(&daemon, "/v1/batch", &record(&large)),
        get(&daemon, "/v1/logs/none/records"),
        get(&daemon, "/v1/logs/a/records?lsn=9"),
    ];
    for (grpc, (status, http)) in grpc.iter().zip(&http) {
        let wanted = match grpc.code() {
            Code::NotFound => 404,
            _ => 400,
        };
        let (reason, metadata) = facts(http);
        let facts = Told::of(grpc);
        assert_eq!((*status, &reason), (wanted, &facts.reason));
        for name in ["outcome", "retry", "log", "tail_lsn", "limit_bytes"] {
            let over_grpc = facts.facts.get(name).map(String::as_str);
            assert_eq!(metadata[name].as_str(), over_grpc, "{name}: {http}");
        }
        assert_eq!(http["error"]["code"], *status);
    }
}

#[test]
fn scan_is_lines_that_end() {
    let daemon = Daemon::start(&[]);
    for log in ["x/a", "x/b", "y"] {
        let record = json!({ "records": [{ "text": log }] });
        good(post(
            &daemon,
            &format!("/v1/logs/{}/records", log.replace('/', "%2F")),
            &record,
        ));
    }
    let (_, head, body) =
        daemon.send_http("GET", "/v1/scan?prefix=x/", "Connection: close\r\n", "");
    assert!(
        head.contains("content-type: application/x-ndjson"),
        "{head}"
    );
    let message: Value =
        serde_json::from_str(body.lines().find(|line| line.starts_with('{')).unwrap()).unwrap();
    let names: Vec<_> = message["batches"]
        .as_array()
        .unwrap()
        .iter()
        .map(|batch| &batch["log"])
        .collect();
    assert_eq!(names, ["x/a", "x/b"]);
    assert_eq!(message["caught_up"], true);
}

/// A follower that goes on by the id of the last event gets each record once, whatever happens to the daemon.
#[test]
fn events_go_on_behind_a_restart_without_a_record_lost_or_twice() {
    let directory = private_directory();
    let (mut got, mut last): (Vec<String>, Option<String>) = (Vec::new(), None);
    let mut sent = 0;
    for round in 0..4 {
        let daemon = Daemon::start_in(directory.path(), &["--heartbeat-interval", "100ms"]);
        let mut events = follow(&daemon, "prefix=log", last.as_deref());
        let end = sent + 50;
        while sent < end {
            let records: Vec<_> = (0..5)
                .map(|more| json!({ "text": (sent + more).to_string() }))
                .collect();
            let path = format!("/v1/logs/log{}/records", sent % 2);
            good(post(&daemon, &path, &json!({ "records": records })));
            sent += 5;
        }
        // The first rounds leave records behind that no event has brought.
        let enough = if round == 3 { sent } else { sent - 20 };
        while got.len() < enough {
            let event = events.event().unwrap();
            last = event.id.or(last);
            for batch in event.data["batches"].as_array().into_iter().flatten() {
                got.extend(texts(batch).into_iter().map(str::to_owned));
            }
        }
        if round % 2 == 0 {
            daemon.signal(Signal::KILL);
        }
    }
    let wanted: Vec<_> = (0..sent).map(|number| number.to_string()).collect();
    let missing: Vec<_> = wanted
        .iter()
        .filter(|number| !got.contains(number))
        .collect();
    assert!(
        missing.is_empty() && got.len() == wanted.len(),
        "{missing:?} {}",
        got.len()
    );
}

#[tokio::test]
async fn stop_ends_followers_with_an_event_and_new_requests_with_an_error() {
    let daemon = Daemon::start(&[]);
    good(post(
        &daemon,
        "/v1/logs/a/records",
        &json!({ "records": [{ "text": "x" }] }),
    ));
    let mut events = follow(&daemon, "log=a", None);
    assert_eq!(texts(&events.event().unwrap().data["batches"][0]), ["x"]);
    daemon.signal(Signal::TERM);
    let last = events.event().unwrap();
    assert_eq!(
        (last.kind.as_str(), facts(&last.data).0.as_str()),
        ("failure", "DRAINING")
    );
    assert!(events.event().is_none());
    assert!(daemon.ended().await.success());
}

#[test]
fn rights_are_those_of_grpc() {
    let file = AuthFile::new(COMPANY);
    let tokens = ["root", "reader", "writer", "other"].map(|name| file.token(name));
    let daemon = file.start(&[]);
    let bearer = |token: &str| format!("Authorization: Bearer {token}\r\n");
    let append = |headers: &str| {
        let headers = format!("{headers}{JSON}");
        let record = "{\"records\": [{\"text\": \"secret\"}]}";
        send(
            &daemon,
            "POST",
            "/v1/logs/payments%2Fbilling%2Fa/records",
            &headers,
            record,
        )
    };
    let read = |headers: &str| {
        send(
            &daemon,
            "GET",
            "/v1/logs/payments%2Fbilling%2Fa/records",
            headers,
            "",
        )
    };
    let (status, head, _) = daemon.send_http("GET", "/v1/logs", "", "");
    assert!(
        status == 401 && head.contains("www-authenticate: Bearer"),
        "{head}"
    );
    assert_eq!(facts(&append("").1).0, "NO_CREDENTIAL");
    let codes = |token: &String| {
        let bearer = bearer(token);
        let (append, read) = (append(&bearer).0, read(&bearer).0);
        let logs = send(&daemon, "GET", "/v1/logs", &bearer, "").1;
        (append, read, logs["logs"].as_array().map_or(0, Vec::len))
    };
    let all: Vec<_> = tokens.iter().map(codes).collect();
    assert_eq!(
        all,
        [(200, 200, 1), (403, 200, 1), (200, 403, 0), (403, 403, 0)]
    );
    let caller = good(send(&daemon, "GET", "/v1/caller", &bearer(&tokens[1]), ""));
    assert_eq!(caller["principal"], "reader");
    // Events need the right as well, and a browser does not try again.
    let headers = format!("Accept: text/event-stream\r\n{}", bearer(&tokens[2]));
    let (status, refused) = send(
        &daemon,
        "GET",
        "/v1/scan?log=payments/billing/a&follow=true",
        &headers,
        "",
    );
    assert_eq!((status, facts(&refused).0.as_str()), (403, "NOT_ALLOWED"));
}

/// A right that ends, ends the stream of a follower.
#[test]
fn follower_whose_right_ends_is_refused() {
    let file = AuthFile::new(COMPANY);
    let token = file.token("reader");
    let daemon = file.start(&[]);
    let bearer = format!("Accept: text/event-stream\r\nAuthorization: Bearer {token}\r\n");
    let address = daemon.start["http"].as_str().unwrap();
    let (mut events, _) = Lines::open(address, "/v1/scan?prefix=payments/&follow=true", &bearer);
    assert!(events.event().unwrap().kind.is_empty());
    let text = file
        .text()
        .replace("do = [\"read\", \"list\"]", "do = [\"list\"]");
    file.put_in_force(&daemon, &text);
    let last = loop {
        let event = events.event().unwrap();
        if !event.kind.is_empty() {
            break event;
        }
    };
    assert_eq!(
        (last.kind.as_str(), facts(&last.data).0.as_str()),
        ("failure", "NOT_ALLOWED")
    );
}

#[test]
fn pages_of_strangers_are_refused_and_allowed_ones_are_answered() {
    let daemon = Daemon::start(&[
        "--http-api-origins",
        "https://app.example, http://b.example:8000",
    ]);
    let record = "{\"records\": [{\"text\": \"x\"}]}";
    let path = "/v1/logs/a/records";
    for (headers, wanted) in [
        ("Origin: http://evil.example\r\n", 403),
        ("Origin: null\r\n", 403),
        ("Sec-Fetch-Site: cross-site\r\n", 403),
        ("Origin: https://app.example.evil.example\r\n", 403),
        (
            "Origin: https://app.example\r\nSec-Fetch-Site: cross-site\r\n",
            200,
        ),
        ("Origin: http://b.example:8000\r\n", 200),
        ("", 200),
    ] {
        let all = format!("{headers}{JSON}");
        let (status, head, body) = daemon.send_http("POST", path, &all, record);
        assert_eq!(status, wanted, "{headers} {body}");
        let is_allowed = head.contains("access-control-allow-origin: http");
        assert_eq!(is_allowed, wanted == 200 && !headers.is_empty(), "{head}");
    }
    let asks = |origin: &str| {
        let headers = format!("Origin: {origin}\r\nAccess-Control-Request-Method: POST\r\n");
        daemon.send_http("OPTIONS", path, &headers, "")
    };
    let (status, head, _) = asks("https://app.example");
    assert!(
        status == 204 && head.contains("access-control-allow-headers: authorization"),
        "{head}"
    );
    assert_eq!(asks("http://evil.example").0, 403);
    let hosts = |host: &str| {
        let mut stream = TcpStream::connect(daemon.start["http"].as_str().unwrap()).unwrap();
        write!(
            stream,
            "GET /v1/logs HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    // Another name of this machine, by DNS rebinding.
    assert_eq!(
        ["localhost", "wald", "evil.example"].map(hosts),
        ["200", "200", "403"]
    );
}

#[test]
fn large_requests_are_refused_before_they_cost_memory() {
    let daemon = Daemon::start(&["--max-batch-bytes", "64KiB", "--max-record-bytes", "32KiB"]);
    let path = "/v1/logs/a/records";
    // Refused by its head: nothing of the body is sent.
    let answer = daemon.http_bytes(
        "POST",
        path,
        "Content-Type: application/json\r\nContent-Length: 1000000000\r\n",
        "",
    );
    let answer = String::from_utf8(answer).unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 400") && answer.contains("REQUEST_TOO_LARGE"),
        "{answer}"
    );
    // Without a length, at the bound.
    let mut chunked = String::new();
    for _ in 0..30 {
        chunked += &format!("4000\r\n{}\r\n", " ".repeat(0x4000));
    }
    chunked += "0\r\n\r\n";
    let mut stream = TcpStream::connect(daemon.start["http"].as_str().unwrap()).unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    // The daemon may close the connection before it has read all.
    let _ = stream.write_all(chunked.as_bytes());
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 400");
    let objects = "{},".repeat(70_000);
    let (status, refused) = send(
        &daemon,
        "POST",
        path,
        JSON,
        &format!("{{\"records\": [{objects}{{}}]}}"),
    );
    assert_eq!(status, 400, "{refused}");
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.contains("at most 65536 are read"), "{message}");
    assert_eq!(get(&daemon, "/v1/logs/a/records").0, 404);
}

/// The largest requests that gRPC takes.
#[test]
fn largest_legal_requests_pass_and_larger_ones_are_refused_for_good() {
    let daemon = Daemon::start(&[]);
    let path = "/v1/logs/a/records";
    let headers: Vec<_> = (0..32)
        .map(|number| json!({ "key": format!("k{number}"), "value": "dg==" }))
        .collect();
    let records: Vec<_> = (0..1000)
        .map(|_| json!({ "text": "x", "headers": headers }))
        .collect();
    good(post(&daemon, path, &json!({ "records": records })));
    for (kind, body) in [
        ("application/x-ndjson", "a\n".repeat(20_000)),
        ("application/x-ndjson", "a\n".repeat(100_000)),
        ("text/plain", "x".repeat(8_700_000)),
        ("text/plain", "x".repeat(2_000_000)),
    ] {
        let header = format!("Content-Type: {kind}\r\n");
        let (status, refused) = send(&daemon, "POST", path, &header, &body);
        let metadata = facts(&refused).1;
        assert_eq!(
            (status, &metadata["retry"]),
            (400, &json!("NEVER")),
            "{refused}"
        );
    }
    assert_eq!(good(get(&daemon, "/v1/logs/a/tail"))["tail_lsn"], "1000");
}

/// A client may send the head of a request, and its body once the server wants it.
#[test]
fn connection_stays_for_its_idle_time_after_a_body_that_came_late() {
    const HEAD: Duration = Duration::from_millis(200);
    let head = format!("--http-head-timeout={}ms", HEAD.as_millis());
    let daemon = Daemon::start(&[&head, "--http-idle-timeout=60s"]);
    let mut stream = TcpStream::connect(daemon.start["http"].as_str().unwrap()).unwrap();
    let mut answers = BufReader::new(stream.try_clone().unwrap());
    let mut answer = |stream: &mut TcpStream, request: &str| {
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let (mut code, mut length) = (String::new(), 0);
        answers.read_line(&mut code).unwrap();
        loop {
            let mut line = String::new();
            answers.read_line(&mut line).unwrap();
            if line.trim().is_empty() {
                break;
            }
            if let Some(bytes) = line.to_ascii_lowercase().strip_prefix("content-length: ") {
                length = bytes.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        answers.read_exact(&mut body).unwrap();
        code.split(' ').nth(1).unwrap_or_default().to_owned()
    };
    let head = "POST /v1/logs/a/records HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n\
                Content-Length: 1\r\nExpect: 100-continue\r\n\r\n";
    assert_eq!(answer(&mut stream, head), "100");
    assert_eq!(answer(&mut stream, "x"), "200");
    // Nothing comes, not even the end.
    stream.set_read_timeout(Some(5 * HEAD)).unwrap();
    let silence = stream.peek(&mut [0]).unwrap_err();
    assert_eq!(silence.kind(), std::io::ErrorKind::WouldBlock);
    let next = "GET /v1/logs HTTP/1.1\r\nHost: localhost\r\n\r\n";
    assert_eq!(answer(&mut stream, next), "200");
}

#[tokio::test]
async fn client_that_goes_away_gives_everything_back() {
    let daemon = Daemon::start(&[]);
    good(post(
        &daemon,
        "/v1/logs/a/records",
        &json!({ "records": [{ "text": "x" }] }),
    ));
    let mut all: Vec<_> = (0..20).map(|_| follow(&daemon, "log=a", None)).collect();
    for events in &mut all {
        assert_eq!(texts(&events.event().unwrap().data["batches"][0]), ["x"]);
    }
    let followers = "wald_followers";
    until(&daemon, followers, |number| number == 20.0).await;
    drop(all);
    until(&daemon, followers, |number| number == 0.0).await;
}

/// They take three eighths of the places, and never the places of probes and scrapes.
#[test]
fn followers_leave_room_for_probes_and_scrapes() {
    let daemon = Daemon::start(&["--http-max-connections", "16"]);
    let mut all: Vec<_> = (0..6).map(|_| follow(&daemon, "all=true", None)).collect();
    let (status, busy) = get(&daemon, "/v1/logs");
    assert_eq!((status, facts(&busy).0.as_str()), (429, "BUSY"));
    let (status, busy) = post(&daemon, "/v1/logs/a/records", &json!({}));
    assert_eq!(
        (status, &facts(&busy).1["outcome"]),
        (429, &json!("NOT_APPLIED"))
    );
    // A browser comes again.
    let mut refused = follow(&daemon, "all=true", None);
    let event = refused.event().unwrap();
    assert_eq!(
        (event.kind.as_str(), facts(&event.data).0.as_str()),
        ("failure", "BUSY")
    );
    assert!(refused.event().is_none());
    assert_eq!(daemon.http("/metrics").0, 200);
    assert_eq!(daemon.http("/readyz").0, 200);
    all.pop();
    let deadline = Instant::now() + Duration::from_secs(20);
    while daemon.send_http("GET", "/v1/logs", "", "").0 != 200 {
        assert!(Instant::now() < deadline, "the place stays taken");
    }
}

#[test]
fn api_is_off_where_others_could_reach_it_without_a_credential() {
    let off = Daemon::start(&["--http-api", "off"]);
    let (status, text) = off.http("/v1/logs");
    assert!(status == 404 && text.contains("http_api"), "{text}");
    let arguments = [
        "config",
        "check",
        "--http-listen",
        "0.0.0.0:0",
        "--http-api",
        "on",
    ];
    let refused = output(wald().args(arguments));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(
        !refused.status.success() && said.contains("http_api"),
        "{said}"
    );
    for origin in [
        "https://APP.example",
        "https://app.example:443",
        "app.example",
        "https://app.example/",
        "https://app.example/x",
        "*",
    ] {
        let refused = output(wald().args(["config", "check", "--http-api-origins", origin]));
        assert!(!refused.status.success(), "{origin}");
    }
}

#[test]
fn description_names_every_request_it_answers() {
    let daemon = Daemon::start(&[]);
    let document = good(get(&daemon, "/v1/openapi.json"));
    let mut asked = 0;
    for (path, operations) in document["paths"].as_object().unwrap() {
        let called = path
            .replace("{log}", "a")
            .replace("{cursor}", "c")
            .replace("{producer_id}", "p");
        for method in operations.as_object().unwrap().keys() {
            let (status, answer) = match path.as_str() {
                "/v1/scan" => get(&daemon, &format!("{called}?lsn=x")),
                _ => send(
                    &daemon,
                    &method.to_uppercase(),
                    &called,
                    JSON,
                    "{\"nonsense\": 1}",
                ),
            };
            assert_eq!(
                (status, facts(&answer).0.as_str()),
                (400, "MALFORMED_REQUEST"),
                "{method} {path}"
            );
            asked += 1;
        }
    }
    assert_eq!(asked, 21);
    let (status, unknown) = get(&daemon, "/v1/nothing");
    assert_eq!((status, facts(&unknown).0.as_str()), (404, "NOT_SUPPORTED"));
    assert_eq!(send(&daemon, "DELETE", "/v1/batch", "", "").0, 405);
}
