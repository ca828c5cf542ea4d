//! The console's endpoints: a browser's requests, and the refusals.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::support::{Daemon, append, part, text, until};
use serde_json::Value;
use wald_proto::v1;

/// The answer to an HTTP request.
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        serde_json::from_str(&self.body).unwrap()
    }

    fn has(&self, header: &str) -> bool {
        self.head
            .lines()
            .any(|line| line.eq_ignore_ascii_case(header))
    }
}

fn request(daemon: &Daemon, line: &str, headers: &str) -> Answer {
    let mut stream = TcpStream::connect(daemon.start["http"].as_str().unwrap()).unwrap();
    write!(
        stream,
        "{line} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    Answer {
        status: head.split(' ').nth(1).unwrap().parse().unwrap(),
        head: head.to_owned(),
        body: body.to_owned(),
    }
}

fn get(daemon: &Daemon, path: &str) -> Answer {
    request(daemon, &format!("GET {path}"), "Host: 127.0.0.1\r\n")
}

fn api(daemon: &Daemon, path: &str) -> Value {
    get(daemon, &format!("/console/api/{path}")).json()
}

/// A stream of events, one after the other.
struct Events(BufReader<TcpStream>);

impl Events {
    fn open(daemon: &Daemon, query: &str) -> Self {
        let mut stream = TcpStream::connect(daemon.start["http"].as_str().unwrap()).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        write!(
            stream,
            "GET /console/api/live?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        .unwrap();
        let mut events = Self(BufReader::new(stream));
        assert!(events.line().starts_with("HTTP/1.1 200"));
        events
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.0.read_line(&mut line).unwrap() > 0, "the stream ended");
        line
    }

    /// The next event of this name.
    fn next(&mut self, name: &str) -> Value {
        let wanted = format!("event: {name}");
        while self.line().trim_end() != wanted {}
        let data = self.line();
        serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap()
    }
}

/// Lsns and gaps of a page, in order.
fn items(page: &Value) -> Vec<String> {
    let items = page["items"].as_array().unwrap().iter();
    items
        .map(|item| match &item["gap"] {
            Value::Null => item["lsn"].to_string(),
            gap => format!(
                "{} {}..{}",
                gap["reason"].as_str().unwrap(),
                gap["from_lsn"],
                gap["to_lsn"]
            ),
        })
        .collect()
}

async fn fill(daemon: &Daemon, log: &str, from: u64, to: u64) {
    let payloads: Vec<String> = (from..to)
        .map(|number| format!("record {number}"))
        .collect();
    let payloads: Vec<&str> = payloads.iter().map(String::as_str).collect();
    let request = v1::AppendBatchRequest {
        batches: vec![part(log, &payloads)],
        ..v1::AppendBatchRequest::default()
    };
    daemon.wal().await.append_batch(request).await.unwrap();
}

#[tokio::test]
async fn page_is_served_with_a_policy_that_trusts_nothing_else() {
    let daemon = Daemon::start(&[]);
    let page = get(&daemon, "/console/");
    assert_eq!(page.status, 200);
    assert!(page.has("content-type: text/html; charset=utf-8"));
    assert!(page.has("x-content-type-options: nosniff"));
    let policy = "content-security-policy: default-src 'none'; script-src 'self';";
    assert!(page.head.contains(policy));
    assert!(!page.head.contains("unsafe-inline"));
    assert!(!page.body.contains("<style") && !page.body.contains("//"));
    for file in page
        .body
        .split(['"', '\''])
        .filter(|part| part.ends_with(".js") || part.ends_with(".css") || part.ends_with(".svg"))
    {
        assert_eq!(get(&daemon, &format!("/console/{file}")).status, 200);
    }
    assert!(get(&daemon, "/").has("location: /console/"));
    assert_eq!(get(&daemon, "/console/nothing.js").status, 404);
    assert_eq!(get(&daemon, "/console/../Cargo.toml").status, 404);
}

#[tokio::test]
async fn console_reads_only() {
    let daemon = Daemon::start(&[]);
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        for path in ["/console/", "/console/api/logs", "/console/api/live"] {
            let answer = request(
                &daemon,
                &format!("{method} {path}"),
                "Host: 127.0.0.1\r\nContent-Length: 0\r\n",
            );
            assert_eq!(answer.status, 405, "{method} {path}");
        }
    }
}

#[tokio::test]
async fn strangers_names_and_pages_are_refused() {
    let daemon = Daemon::start(&["--console-hosts", "wald.example"]);
    let path = "GET /console/api/logs";
    for (headers, status) in [
        ("Host: 127.0.0.1:1\r\n", 200),
        ("Host: localhost\r\n", 200),
        ("Host: [::1]:6926\r\n", 200),
        ("Host: wald.example:6926\r\n", 200),
        ("Host: evil.example\r\n", 403),
        ("Host: 127.0.0.1.evil.example\r\n", 403),
        ("Host: localhost\r\nHost: evil.example\r\n", 400),
        ("Host: localhost\r\nOrigin: http://localhost\r\n", 200),
        ("Host: localhost\r\nOrigin: http://evil.example\r\n", 403),
        ("Host: localhost\r\nOrigin: http://localhost:8000\r\n", 403),
        ("Host: localhost\r\nSec-Fetch-Site: cross-site\r\n", 403),
        ("Host: localhost\r\nSec-Fetch-Site: same-origin\r\n", 200),
    ] {
        assert_eq!(request(&daemon, path, headers).status, status, "{headers}");
    }
    // The page has no records: a link to it may be anywhere, but not under any name.
    let page = |headers| request(&daemon, "GET /console/", headers).status;
    assert_eq!(
        page("Host: localhost\r\nSec-Fetch-Site: cross-site\r\n"),
        200
    );
    assert_eq!(page("Host: evil.example\r\n"), 403);
    // A name without a dot, as of a service in a compose file, is enough for /metrics only.
    let metrics = |headers| request(&daemon, "GET /metrics", headers).status;
    assert_eq!(metrics("Host: evil.example\r\n"), 403);
    assert_eq!(metrics("Host: wald.example\r\n"), 200);
    assert_eq!(metrics("Host: wald:6926\r\n"), 200);
    assert_eq!(page("Host: wald:6926\r\n"), 403);
    // Probes name the pod as they like.
    let probe = request(&daemon, "GET /readyz", "Host: evil.example\r\n");
    assert_eq!(probe.status, 200);
}

#[tokio::test]
async fn console_is_off_where_others_could_reach_it_unless_it_is_asked_for() {
    let everywhere = ["--http-listen", "0.0.0.0:0"];
    for (more, status) in [
        (&[][..], 404),
        (&["--console", "on", "--insecure-listen"][..], 200),
        (&["--console", "off"][..], 404),
    ] {
        let arguments: Vec<&str> = everywhere.iter().chain(more).copied().collect();
        let daemon = Daemon::start(&arguments);
        for path in ["/console/", "/console/api/logs"] {
            assert_eq!(get(&daemon, path).status, status, "{more:?} {path}");
        }
        assert_eq!(get(&daemon, "/livez").status, 200);
    }
    assert_eq!(
        get(&Daemon::start(&["--console", "off"]), "/console/").status,
        404
    );
}

#[tokio::test]
async fn logs_come_in_pages_by_prefix() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    for name in ["a/1", "a/2", "a/3", "b", "ü <b>"] {
        wal.append(append(name, "x")).await.unwrap();
    }
    let names = |page: &Value| -> Vec<String> {
        let logs = page["logs"].as_array().unwrap().iter();
        logs.map(|log| log["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let page = api(&daemon, "logs?prefix=a/&limit=2");
    assert_eq!(names(&page), ["a/1", "a/2"]);
    assert_eq!(page["next_after"], "a/2");
    assert_eq!(page["total"], 5);
    assert_eq!(page["logs"][0]["tail_lsn"], 1);
    assert!(page["logs"][0]["log_id"].is_string());
    let page = api(&daemon, "logs?prefix=a/&limit=2&after=a/2");
    assert_eq!(names(&page), ["a/3"]);
    assert_eq!(page["next_after"], Value::Null);
    assert_eq!(names(&api(&daemon, "logs?prefix=%C3%BC")), ["ü <b>"]);
    assert_eq!(names(&api(&daemon, "logs?prefix=zzz")).len(), 0);
    assert_eq!(api(&daemon, "log?log=%C3%BC%20%3Cb%3E")["name"], "ü <b>");
    let unknown = get(&daemon, "/console/api/log?log=none");
    assert_eq!(unknown.status, 404);
    assert!(unknown.body.contains("does not exist"));
}

/// Appends batch `sequence` of a producer.
async fn produce(daemon: &Daemon, id: &str, epoch: u64, sequence: u64) {
    let producer = v1::Producer {
        id: id.to_owned(),
        epoch,
        sequence,
    };
    let request = v1::AppendRequest {
        condition: Some(v1::AppendCondition {
            producer: Some(producer),
            ..v1::AppendCondition::default()
        }),
        ..append("l", "x")
    };
    daemon.wal().await.append(request).await.unwrap();
}

#[tokio::test]
async fn producers_of_a_log_are_listed_with_their_expiry() {
    const WEEK_MICROS: i64 = 7 * 24 * 3600 * 1_000_000;
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    assert_eq!(get(&daemon, "/console/api/producers?log=l").status, 404);
    produce(&daemon, "<b>&", 1 << 32, 0).await;
    produce(&daemon, "<b>&", 1 << 32, 1).await;
    let producers = api(&daemon, "producers?log=l");
    assert_eq!(producers["more_producers"], false);
    let one = &producers["producers"][0];
    assert_eq!(
        (&one["id"], &one["epoch"]),
        (&"<b>&".into(), &"4294967296".into())
    );
    assert_eq!(one["last_sequence"], "1");
    let used = one["last_append_us"].as_i64().unwrap();
    assert_eq!(one["expires_us"], used + WEEK_MICROS);
    for number in 0..25 {
        produce(&daemon, &format!("p{number:02}"), 0, 0).await;
    }
    let producers = api(&daemon, "producers?log=l");
    let shown = producers["producers"].as_array().unwrap();
    assert_eq!(
        (shown.len(), &producers["more_producers"]),
        (20, &true.into())
    );
    assert_eq!(shown[19]["id"], "p18");
    drop(daemon);
    let daemon = Daemon::start_in(directory.path(), &["--producer-max-idle", "0"]);
    let one = &api(&daemon, "producers?log=l")["producers"][0];
    assert_eq!(one["expires_us"], Value::Null);
}

#[tokio::test]
async fn records_come_in_pages_in_both_directions_with_gaps_named() {
    let daemon = Daemon::start(&["--retention-interval", "5ms"]);
    fill(&daemon, "l", 0, 10).await;
    let page = |query: &str| items(&api(&daemon, &format!("records?log=l&{query}")));
    assert_eq!(page("limit=3"), ["7", "8", "9"]);
    assert_eq!(page("before=7&limit=3"), ["4", "5", "6"]);
    assert_eq!(page("before=1&limit=3"), ["0"]);
    assert_eq!(page("lsn=8&limit=3"), ["8", "9"]);
    assert_eq!(page("lsn=10"), [""; 0]);
    assert_eq!(page("time_us=0&limit=1"), ["0"]);
    let beyond = get(&daemon, "/console/api/records?log=l&lsn=11");
    assert_eq!(beyond.status, 400);
    assert!(beyond.body.contains("beyond the tail"));

    let trim = v1::TrimRequest {
        log: "l".to_owned(),
        before_lsn: 4,
        log_id: None,
    };
    daemon.wal().await.trim(trim).await.unwrap();
    assert_eq!(page("lsn=0&limit=2"), ["TRIMMED 0..4", "4", "5"]);
    assert_eq!(page("before=6&limit=9"), ["TRIMMED 0..4", "4", "5"]);
    assert_eq!(page("before=6&limit=1"), ["5"]);
    let one = api(&daemon, "record?log=l&lsn=2");
    assert_eq!(one["gap"]["reason"], "TRIMMED");

    let bounded = v1::UpdateLogRequest {
        log: "l".to_owned(),
        config: Some(v1::LogConfig {
            retention: Some(v1::Retention {
                max_records: 4,
                ..v1::Retention::default()
            }),
            ..v1::LogConfig::default()
        }),
        update_mask: None,
    };
    daemon.logs().await.update_log(bounded).await.unwrap();
    let trims = "wald_retention_trims_total";
    until(&daemon, trims, |trims| trims == 1.0).await;
    let gone = ["TRIMMED 0..4", "EXPIRED 4..6", "6"];
    assert_eq!(page("lsn=0&limit=1"), gone);
    assert_eq!(page("before=7&limit=9"), gone);
}

#[tokio::test]
async fn record_has_all_that_was_appended_and_long_ones_are_cut_in_lists() {
    let daemon = Daemon::start(&[]);
    let long = "x".repeat(100_000);
    let record = v1::Record {
        headers: vec![v1::Header {
            key: "kind".to_owned(),
            value: vec![0xff, 0].into(),
        }],
        timestamp_us: 1_000_000,
        ..text(&long)
    };
    let request = v1::AppendRequest {
        record: Some(record),
        ..append("l", "")
    };
    daemon.wal().await.append(request).await.unwrap();
    let line = &api(&daemon, "records?log=l")["items"][0];
    assert_eq!(line["size"], 100_000);
    assert_eq!(line["cut"], true);
    assert!(line["data"].as_str().unwrap().len() < 2000);
    assert_eq!(line["time_us"], 1_000_000);
    let whole = api(&daemon, "record?log=l&lsn=0");
    assert_eq!(whole["cut"], false);
    assert_eq!(whole["data"].as_str().unwrap().len(), 133_336);
    assert_eq!(whole["headers"][0]["key"], "kind");
    assert_eq!(whole["headers"][0]["data"], "/wA=");
    assert!(whole["arrival_us"].as_i64().unwrap() > 1_000_000);
}

/// A browser that does not read holds memory that the server counts.
#[tokio::test]
async fn record_that_a_browser_does_not_take_counts_as_an_answer() {
    const HELD: &str = "wald_admitted_bytes{part=\"answers\"}";
    let bounds = [
        "--max-record-bytes=8MiB",
        "--max-batch-bytes=8MiB",
        "--segment-bytes=64MiB",
    ];
    let daemon = Daemon::start(&bounds);
    let large = append("l", &"x".repeat(7 << 20));
    let mut wal = daemon.wal().await;
    wal = wal.max_encoding_message_size(16 << 20);
    wal.append(large).await.unwrap();
    let mut stream = TcpStream::connect(daemon.start["http"].as_str().unwrap()).unwrap();
    stream
        .write_all(b"GET /console/api/record?log=l&lsn=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .unwrap();
    // 4 MiB of it are shown, in base64.
    crate::support::until(&daemon, HELD, |held| held > 5e6).await;
    drop(stream);
    crate::support::until(&daemon, HELD, |held| held == 0.0).await;
}

#[tokio::test]
async fn page_of_large_records_is_shorter_and_still_reaches_the_end() {
    let daemon = Daemon::start(&["--segment-bytes", "16MiB"]);
    let mut wal = daemon.wal().await;
    for _ in 0..40 {
        wal.append(append("l", &"x".repeat(900_000))).await.unwrap();
    }
    let newest = api(&daemon, "records?log=l&limit=100");
    assert_eq!(newest["next_lsn"], 40);
    let lsns = items(&newest);
    assert!((2..40).contains(&lsns.len()));
    assert_eq!(lsns.last().unwrap(), "39");
    let oldest = api(&daemon, "records?log=l&lsn=0&limit=100");
    let read = items(&oldest).len();
    assert!(read < 40);
    assert_eq!(oldest["next_lsn"], read);
}

#[tokio::test]
async fn server_says_what_durable_means_and_what_the_start_found() {
    let daemon = Daemon::start(&["--sync-mode", "async"]);
    let server = api(&daemon, "server");
    assert_eq!(server["settings"]["sync_mode"], "async");
    assert_eq!(server["state"]["phase"], "serving");
    assert_eq!(server["store"]["recovery"]["result"], "new store");
    assert_eq!(server["store"]["durability"]["sync_primitive"], "fdatasync");
    let warnings = server["warnings"].as_array().unwrap();
    let told = |part: &str| warnings.iter().any(|w| w.as_str().unwrap().contains(part));
    assert!(told("a power cut can take everything acked"));
    assert!(!told("plaintext"));
    fill(&daemon, "l", 0, 10).await;
    let segments = api(&daemon, "segments");
    assert_eq!(segments["total"], 1);
    assert_eq!(segments["segments"][0]["sealed"], false);
    assert_eq!(segments["next_before"], Value::Null);
}

#[tokio::test]
async fn segments_come_newest_first_in_pages() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    for _ in 0..10 {
        wal.append(append("l", &"x".repeat(300_000))).await.unwrap();
    }
    let first = api(&daemon, "segments?limit=2");
    let total = first["total"].as_u64().unwrap();
    assert!(total >= 4);
    assert_eq!(first["segments"][0]["segment_id"], total);
    // By position: numbers of sorted runs are in another order.
    let before = first["next_before"].as_u64().unwrap();
    assert!(before > 0);
    let rest = api(&daemon, &format!("segments?before={before}"));
    assert_eq!(rest["segments"][0]["segment_id"], total - 2);
    assert_eq!(rest["segments"].as_array().unwrap().len() as u64, total - 2);
    assert_eq!(rest["next_before"], Value::Null);
}

#[tokio::test]
async fn live_stream_begins_with_the_history_and_goes_on_with_samples() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    let mut events = Events::open(&daemon, "");
    let hello = events.next("hello");
    let columns = hello["columns"].as_array().unwrap();
    let column = |name: &str| columns.iter().position(|c| c == name).unwrap();
    let (acks, p99) = (column("durable_acks"), column("durable_p99"));
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        wal.append(append("l", "x")).await.unwrap();
        let sample = events.next("sample");
        assert_eq!(sample["point"].as_array().unwrap().len(), columns.len());
        if sample["point"][acks].as_f64().unwrap() > 0.0 {
            assert!(sample["point"][p99].as_f64().unwrap() > 0.0);
            assert_eq!(sample["state"]["logs"], 1);
            break;
        }
        assert!(Instant::now() < deadline, "the appends never showed");
    }
    let again = Events::open(&daemon, "").next("hello");
    assert!(!again["points"].as_array().unwrap().is_empty());
}

#[tokio::test]
async fn live_records_come_once_each_and_the_end_of_the_log_is_told() {
    let daemon = Daemon::start(&[]);
    fill(&daemon, "l", 0, 5).await;
    let mut events = Events::open(&daemon, "log=l&from=3");
    assert_eq!(items(&events.next("records")), ["3", "4"]);
    let mut seen = Vec::new();
    for from in [5, 10, 15] {
        fill(&daemon, "l", from, from + 5).await;
    }
    while seen.len() < 15 {
        seen.extend(items(&events.next("records")));
    }
    let expected: Vec<String> = (5..20).map(|lsn: u64| lsn.to_string()).collect();
    assert_eq!(seen, expected);
    let delete = v1::DeleteLogRequest {
        shred: false,
        log: "l".to_owned(),
        log_id: None,
    };
    daemon.logs().await.delete_log(delete).await.unwrap();
    let ended = events.next("ended");
    assert!(
        ended["message"]
            .as_str()
            .unwrap()
            .contains("does not exist")
    );
    // The samples go on.
    events.next("sample");
}

#[tokio::test]
async fn live_page_that_is_behind_is_told_what_it_was_passed_by() {
    let daemon = Daemon::start(&[]);
    fill(&daemon, "l", 0, 1000).await;
    fill(&daemon, "l", 1000, 1700).await;
    let seen = items(&Events::open(&daemon, "log=l&from=0").next("records"));
    assert_eq!(seen.len(), 1001);
    assert_eq!(seen[0], "PASSED 0..700");
    assert_eq!(seen[1000], "1699");
    // Records that a crash took back are reported as well: the page has seen more than there
    // is.
    let seen = items(&Events::open(&daemon, "log=l&from=1800").next("records"));
    assert_eq!(seen, ["LOST 1700..1800"]);
    let told = |query: &str| {
        let ended = Events::open(&daemon, query).next("ended");
        ended["message"].as_str().unwrap().to_owned()
    };
    assert!(told("log=l&log_id=77").contains("an earlier log of this name"));
    assert!(told("log=none").contains("does not exist"));
}

#[tokio::test]
async fn streams_are_bounded_and_a_closed_one_gives_its_place_back() {
    let daemon = Daemon::start(&[]);
    let open: Vec<Events> = (0..32).map(|_| Events::open(&daemon, "")).collect();
    let path = "/console/api/live";
    let refused = get(&daemon, path);
    assert_eq!(refused.status, 503);
    assert!(refused.body.contains("too many pages"));
    drop(open);
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let mut stream = TcpStream::connect(daemon.start["http"].as_str().unwrap()).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        if line.starts_with("HTTP/1.1 200") {
            break;
        }
        assert!(Instant::now() < deadline, "no place came free");
    }
}
