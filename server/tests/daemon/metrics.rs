//! /metrics of a daemon at work: the gauges follow its state.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;

use crate::support::{Daemon, append};
use tokio::time::{Duration, sleep};
use wald_proto::v1;

/// Polls: a gauge reaches its value a moment after the answer.
async fn until(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..1000 {
        if holds() {
            return;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("{what} never came");
}

#[tokio::test]
async fn weak_acks_show_as_such_and_as_a_lag_until_the_flush() {
    let daemon = Daemon::start(&["--sync-mode", "async"]);
    let mut wal = daemon.wal().await;
    wal.sync(v1::SyncRequest::default()).await.unwrap();
    until("no lag", || daemon.metric("wald_durable_lag_bytes") == 0.0).await;
    let acks = r#"wald_append_duration_seconds_count{durability="written"}"#;
    let lag = ["wald_durable_lag_bytes", "wald_durable_lag_seconds"];
    // On a busy machine a flush of the background can come between an append and a look.
    let mut shown = false;
    for _ in 0..50 {
        wal.append(append("a", "weak")).await.unwrap();
        shown = daemon.metric(acks) >= 1.0 && lag.iter().all(|name| daemon.metric(name) > 0.0);
        if shown {
            break;
        }
    }
    assert!(shown, "no lag is shown");
    wal.sync(v1::SyncRequest::default()).await.unwrap();
    until("no lag", || daemon.metric("wald_durable_lag_bytes") == 0.0).await;
    assert_eq!(daemon.metric("wald_durable_lag_seconds"), 0.0);
}

#[test]
fn scraper_that_takes_gzip_gets_the_same_metrics_in_fewer_bytes() {
    let daemon = Daemon::start(&[]);
    let plain = daemon.http_bytes("GET", "/metrics", "", "");
    let answer = daemon.http_bytes(
        "GET",
        "/metrics",
        "Accept-Encoding: deflate, gzip;q=0.5\r\n",
        "",
    );

    let end = answer
        .windows(4)
        .position(|end| end == b"\r\n\r\n")
        .unwrap();
    let (head, body) = (String::from_utf8_lossy(&answer[..end]), &answer[end + 4..]);
    assert!(head.contains("content-encoding: gzip"), "{head}");
    assert!(
        body.len() * 3 < plain.len(),
        "{} of {}",
        body.len(),
        plain.len()
    );
    let mut text = String::new();
    flate2::read::GzDecoder::new(body)
        .read_to_string(&mut text)
        .unwrap();
    let names = |text: &str| {
        let lines = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let plain = String::from_utf8(plain).unwrap();
    assert!(names(&text).len() > 50);
    assert_eq!(names(&text), names(&plain));
    assert!(!plain.contains("content-encoding"), "{plain}");
}

#[tokio::test]
async fn segments_and_their_bytes_are_counted_by_what_they_do() {
    let daemon = Daemon::start(&["--pool-segments", "3"]);
    let mut wal = daemon.wal().await;
    let payload = "x".repeat(300_000);
    for _ in 0..20 {
        wal.append(append("a", &payload)).await.unwrap();
    }
    let segments = |state: &str| daemon.metric(&format!("wald_segments{{state=\"{state}\"}}"));
    let bytes = |kind: &str| daemon.metric(&format!("wald_disk_bytes{{kind=\"{kind}\"}}"));
    // Segments of the pool, and of the reserve for trims and deletions.
    until("a full pool", || segments("ready") == 5.0).await;
    assert_eq!(segments("active"), 1.0);
    assert!(segments("sealed") >= 3.0);
    assert!(bytes("journal") >= 4e6);
    assert_eq!(bytes("pool"), 5.0 * f64::from(1 << 20));
    assert_eq!(bytes("sorted"), 0.0);
    assert_eq!(bytes("quarantine"), 0.0);
    assert!(daemon.metric("wald_disk_free_bytes") > 0.0);
    assert!(daemon.metric("wald_segment_roll_duration_seconds_count") >= 3.0);
    assert_eq!(daemon.metric("wald_quarantined_records"), 0.0);
    assert_eq!(daemon.metric("wald_journal_failed"), 0.0);
    assert!(daemon.metric(r#"wald_recovery_duration_seconds{phase="total"}"#) > 0.0);
}

#[tokio::test]
async fn open_segments_are_bounded_whatever_is_scanned_by_either_strategy() {
    for strategy in ["pread", "mmap"] {
        let arguments = ["--max-open-segments", "2", "--read-strategy", strategy];
        let daemon = Daemon::start(&arguments);
        let mut wal = daemon.wal().await;
        let payload = "x".repeat(300_000);
        // More than the newest, which are read from memory.
        for _ in 0..60 {
            wal.append(append("a", &payload)).await.unwrap();
        }
        for _ in 0..2 {
            let request = v1::ScanRequest {
                selector: Some(v1::scan_request::Selector::Log("a".to_owned())),
                ..v1::ScanRequest::default()
            };
            let mut stream = wal.scan(request).await.unwrap().into_inner();
            let mut found = 0;
            while let Some(message) = stream.message().await.unwrap() {
                found += message
                    .batches
                    .iter()
                    .map(|b| b.records.len())
                    .sum::<usize>();
            }
            assert_eq!(found, 60, "{strategy}");
        }
        assert_eq!(daemon.metric("wald_open_segments"), 2.0, "{strategy}");
        assert!(daemon.metric("wald_segment_cache_evictions_total") >= 1.0);
    }
}

#[tokio::test]
async fn followers_are_counted_while_they_wait() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "0")).await.unwrap();
    let mut streams = Vec::new();
    for _ in 0..3 {
        let request = v1::ScanRequest {
            selector: Some(v1::scan_request::Selector::Log("a".to_owned())),
            follow: true,
            ..v1::ScanRequest::default()
        };
        let mut stream = wal.scan(request).await.unwrap().into_inner();
        stream.message().await.unwrap();
        streams.push(stream);
    }
    until("three followers", || daemon.metric("wald_followers") == 3.0).await;
    wal.append(append("a", "1")).await.unwrap();
    until("a delivery", || {
        daemon.metric("wald_scan_delivery_lag_seconds_count") > 0.0
    })
    .await;
    drop(streams);
    until("no follower", || daemon.metric("wald_followers") == 0.0).await;
}

/// The rows of docs/src/metrics.md: every metric that a new daemon shows.
fn table(exposed: &str) -> String {
    let described = |kind: &str| -> BTreeMap<String, String> {
        let lines = exposed.lines().filter_map(|line| line.strip_prefix(kind));
        let pairs = lines.filter_map(|line| line.trim_start().split_once(' '));
        pairs
            .map(|(name, text)| (name.to_owned(), text.replace('|', "\\|")))
            .collect()
    };
    let types = described("# TYPE");
    let mut table = "| metric | labels | type | meaning |\n|---|---|---|---|\n".to_owned();
    for (name, help) in described("# HELP") {
        let bucket = format!("{name}_bucket{{");
        let plain = format!("{name}{{");
        let samples = exposed.lines().filter_map(|line| {
            line.strip_prefix(&bucket)
                .or_else(|| line.strip_prefix(&plain))
        });
        let labels: BTreeSet<&str> = samples
            .flat_map(|sample| {
                sample
                    .split("=\"")
                    .map(|part| part.rsplit([',', '"']).next())
            })
            .flatten()
            .filter(|label| label.starts_with(|c: char| c.is_ascii_lowercase()) && *label != "le")
            .collect();
        let labels = Vec::from_iter(labels).join(", ");
        table += &format!("| `{name}` | {labels} | {} | {help} |\n", types[&name]);
    }
    table
}

#[tokio::test]
async fn page_of_metrics_matches_a_new_daemon() {
    const BEGIN: &str = "<!-- metrics: written by a test, see HACKING.md -->\n";
    const END: &str = "<!-- end of metrics -->";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src/metrics.md");
    let page = fs::read_to_string(path).unwrap();
    let (before, rest) = page.split_once(BEGIN).unwrap();
    let (shown, after) = rest.split_once(END).unwrap();
    // A tenant has metrics of its own.
    let directory = tempfile::tempdir().unwrap();
    let auth_file = directory.path().join("auth.toml");
    let tenant = "[tenant.a]\nprefix = \"a/\"\nlimits = { logs = 1 }";
    fs::write(&auth_file, tenant).unwrap();
    fs::set_permissions(&auth_file, fs::Permissions::from_mode(0o600)).unwrap();
    let auth_file = format!("--auth-file={}", auth_file.display());
    let daemon = Daemon::start(&[&auth_file, "--metrics-open"]);
    let table = table(&daemon.http("/metrics").1);
    if std::env::var_os("WALD_WRITE").is_some() {
        fs::write(path, format!("{before}{BEGIN}{table}{END}{after}")).unwrap();
    } else {
        let command = "WALD_WRITE=1 cargo test -p wald-server --test daemon metrics::page";
        assert_eq!(shown, table, "the page is stale; run: {command}");
    }
}

#[tokio::test]
async fn connections_and_their_bytes_are_counted_by_port() {
    let daemon = Daemon::start(&[]);
    let connections = |port: &str| daemon.metric(&format!("wald_connections{{port=\"{port}\"}}"));
    let bytes = |port: &str, direction: &str| {
        daemon.metric(&format!(
            "wald_network_bytes_total{{direction=\"{direction}\",port=\"{port}\"}}"
        ))
    };
    assert_eq!(bytes("grpc", "received"), 0.0);
    let payload = "x".repeat(100_000);
    let mut wal = daemon.wal().await;
    wal.append(append("a", &payload)).await.unwrap();
    assert_eq!(connections("grpc"), 1.0);
    assert!(bytes("grpc", "received") > 1e5 && bytes("grpc", "sent") < 1e5);
    let read = v1::ReadRequest {
        log: "a".to_owned(),
        ..v1::ReadRequest::default()
    };
    wal.read(read).await.unwrap();
    assert!(bytes("grpc", "sent") > 1e5);
    drop(wal);
    until("no connection", || connections("grpc") == 0.0).await;
    // The scrape itself.
    assert_eq!(connections("http"), 1.0);
    assert!(bytes("http", "sent") > 1e5, "of the scrapes before");
}

#[tokio::test]
async fn follower_that_takes_nothing_is_slow() {
    use std::io::{Read as _, Write as _};
    let daemon = Daemon::start(&[]);
    let payload = "x".repeat(500_000);
    let mut wal = daemon.wal().await;
    for _ in 0..20 {
        wal.append(append("a", &payload)).await.unwrap();
    }
    // 10 MB do not fit into the buffers between it and the daemon.
    let address = daemon.start["http"].as_str().unwrap();
    let mut client = std::net::TcpStream::connect(address).unwrap();
    let request = "GET /v1/scan?log=a&follow=true HTTP/1.0\r\nHost: localhost\r\n\r\n";
    client.write_all(request.as_bytes()).unwrap();
    let slow = || daemon.metric("wald_slow_followers");
    assert_eq!(slow(), 0.0);
    let begin = std::time::Instant::now();
    crate::support::until(&daemon, "wald_slow_followers", |number| number == 1.0).await;
    assert!(
        begin.elapsed() >= Duration::from_secs(9),
        "{:?}",
        begin.elapsed()
    );
    let taken = std::thread::spawn(move || {
        let mut taken = vec![0; 10_000_000];
        client.read_exact(&mut taken).unwrap();
        client
    });
    until("no slow follower", || slow() == 0.0).await;
    drop(taken.join().unwrap());
}
