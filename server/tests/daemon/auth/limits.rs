//! Tenants beyond their limits: rates, followers and connections.
//!
//! Rates are measured after the burst is used up. A caller that falls behind on a busy machine does not lose its rate: the
//! burst fills meanwhile. `WALD_RATE_SECONDS` makes the measurements longer, for example 30.

use std::time::{Duration, Instant};

use h2::SendStream;
use http::Request;
use rustix::process::Signal;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;
use wald_proto::v1;
use wald_proto::v1::scan_request::Selector;
use wald_proto::v1::wal_service_client::WalServiceClient;

use super::principals::{AuthFile, WithToken, cursors, session, wal};
use crate::support::{Daemon, SessionClient, Told, append, part, records, until};

/// Records of one append.
const RECORDS: u64 = 5;
/// Records per second of the tenant.
const RATE: u64 = 250;
/// Longest wait for an event that is due at once.
const SOON: Duration = Duration::from_secs(20);

fn seconds() -> Duration {
    let set = std::env::var("WALD_RATE_SECONDS").ok();
    Duration::from_secs(set.map_or(3, |text| text.parse().unwrap()))
}

/// A file with the tenants a, which has these limits, and b, which has none.
fn tenants(limits: &str) -> String {
    let all = r#"["append", "create", "read", "cursor", "trim", "fence", "configure", "delete"]"#;
    format!(
        "[tenant.a]\nprefix = \"a/\"\nlimits = {{ {limits} }}\n[tenant.b]\nprefix = \"b/\"\n\
         [principal.a]\ntenant = \"a\"\nallow = [{{ do = {all}, logs = \"a/\" }}]\n\
         [principal.a2]\ntenant = \"a\"\nallow = [{{ do = {all}, logs = \"a/\" }}]\n\
         [principal.b]\ntenant = \"b\"\nallow = [{{ do = {all}, logs = \"b/\" }}]\n"
    )
}

/// A file, the tokens of a, a2 and b, and the daemon.
fn started(limits: &str) -> (AuthFile, [String; 3], Daemon) {
    let file = AuthFile::new(&tenants(limits));
    let tokens = ["a", "a2", "b"].map(|principal| file.token(principal));
    let daemon = file.start(&["--metrics-open"]);
    (file, tokens, daemon)
}

/// Puts other limits of a in force, and keeps the tokens.
fn change(file: &AuthFile, daemon: &Daemon, from: &str, to: &str) {
    let text = file.text();
    let changed = text.replace(from, to);
    assert_ne!(changed, text);
    file.put_in_force(daemon, &changed);
}

fn batch(log: &str, records: u64, bytes: usize) -> v1::AppendBatchRequest {
    let payload = "x".repeat(bytes);
    let payloads: Vec<_> = (0..records).map(|_| payload.as_str()).collect();
    v1::AppendBatchRequest {
        batches: vec![part(log, &payloads)],
        durability: v1::Durability::Written.into(),
        ..v1::AppendBatchRequest::default()
    }
}

/// The wait that a refusal with RATE names.
fn wait_of(status: &Status, setting: &str, limit: u64) -> Duration {
    let told = Told::of(status);
    assert_eq!(
        (told.code, told.reason.as_str(), told.fact("tenant")),
        (Code::ResourceExhausted, "RATE", "a"),
        "{status:?}"
    );
    assert_eq!(told.fact("setting"), setting);
    assert_eq!(told.fact("limit"), limit.to_string());
    assert_eq!(
        (told.fact("outcome"), told.fact("retry")),
        ("NOT_APPLIED", "SAFE")
    );
    let retry = status.get_error_details();
    let wait = retry.retry_info().and_then(|info| info.retry_delay);
    wait.expect("it names the wait")
}

/// Appends as fast as the server lets the caller, until `end`. Returns the records that were appended.
async fn appends(mut client: WalServiceClient<WithToken>, log: String, end: Instant) -> u64 {
    let mut appended = 0;
    while Instant::now() < end {
        match client.append_batch(batch(&log, RECORDS, 10)).await {
            Ok(_) => appended += RECORDS,
            Err(status) => {
                let wait = wait_of(&status, "appends_per_second", RATE);
                tokio::time::sleep(wait.min(end.saturating_duration_since(Instant::now()))).await;
            }
        }
    }
    appended
}

fn assert_near_rate(appended: u64, time: Duration) {
    let rate = appended as f64 / time.as_secs_f64();
    let share = rate / RATE as f64;
    assert!(
        (0.9..=1.1).contains(&share),
        "{rate} records/s are {share} of the rate"
    );
}

/// Uses up the burst.
async fn use_up(client: &mut WalServiceClient<WithToken>) {
    while client.append_batch(batch("a/burst", 20, 10)).await.is_ok() {}
}

#[tokio::test]
async fn caller_that_obeys_the_named_wait_gets_its_rate() {
    let (_file, [a, a2, b], daemon) = started(&format!("appends_per_second = {RATE}"));
    let mut client = wal(&daemon, &a).await;
    use_up(&mut client).await;
    let (mut appended, begin) = (0, Instant::now());
    while begin.elapsed() < seconds() {
        let Err(status) = client.append_batch(batch("a/x", RECORDS, 10)).await else {
            appended += RECORDS;
            continue;
        };
        let wait = wait_of(&status, "appends_per_second", RATE);
        // One request beyond the burst is paid off in this time.
        let most = Duration::from_secs_f64(20.0 / RATE as f64);
        assert!(wait <= most.mul_f64(1.2), "{wait:?}");
        tokio::time::sleep(wait).await;
        client
            .append_batch(batch("a/x", RECORDS, 10))
            .await
            .unwrap();
        appended += RECORDS;
    }
    assert_near_rate(appended, begin.elapsed());
    // Another principal of the tenant shares the rate, and another tenant does not.
    let mut same = wal(&daemon, &a2).await;
    let refused = use_up_and_fail(&mut same).await;
    assert_eq!(Told::of(&refused).reason, "RATE");
    let mut other = wal(&daemon, &b).await;
    for _ in 0..200 {
        other.append_batch(batch("b/x", RECORDS, 10)).await.unwrap();
    }
    assert!(daemon.metric(r#"wald_tenant_rate_refusals_total{kind="append",tenant="a"}"#) >= 2.0);
    assert_eq!(
        daemon.metric(r#"wald_tenant_records_total{kind="append",tenant="b"}"#),
        1000.0
    );
}

async fn use_up_and_fail(client: &mut WalServiceClient<WithToken>) -> Status {
    loop {
        if let Err(status) = client.append_batch(batch("a/burst", 20, 10)).await {
            return status;
        }
    }
}

#[tokio::test]
async fn changes_without_records_count_for_the_rate_of_appends() {
    let (_file, [a, _, b], daemon) = started("appends_per_second = 1");
    let mut client = wal(&daemon, &a).await;
    client.append(append("a/x", "1")).await.unwrap();
    let mut positions = cursors(&daemon, &a).await;
    let mut last = Ok(());
    for _ in 0..10 {
        last = positions.commit_cursor(commit("a/x")).await.map(drop);
    }
    wait_of(&last.unwrap_err(), "appends_per_second", 1);
    let trim = v1::TrimRequest {
        log: "a/x".to_owned(),
        ..v1::TrimRequest::default()
    };
    let refused = client.trim(trim).await.unwrap_err();
    wait_of(&refused, "appends_per_second", 1);
    // A batch with a cursor alone.
    let committing = v1::AppendBatchRequest {
        cursors: commit("a/x").commit.into_iter().collect(),
        ..v1::AppendBatchRequest::default()
    };
    let refused = client.append_batch(committing).await.unwrap_err();
    wait_of(&refused, "appends_per_second", 1);
    let bytes = r#"wald_tenant_bytes_total{kind="append",tenant="a"}"#;
    assert!(daemon.metric(bytes) >= 65.0);
    wal(&daemon, &b)
        .await
        .append(append("b/x", "1"))
        .await
        .unwrap();
}

/// A caller without a right could use up the rate of the whole tenant.
#[tokio::test]
async fn change_without_its_right_does_not_count_for_the_rate() {
    let reader = "[principal.r]\ntenant = \"a\"\nallow = [{ do = [\"read\"], logs = \"a/\" }]\n";
    let file = AuthFile::new(&(tenants("appends_per_second = 1") + reader));
    let [a, reader] = ["a", "r"].map(|principal| file.token(principal));
    let daemon = file.start(&[]);
    let mut reader = wal(&daemon, &reader).await;
    for _ in 0..100 {
        let trim = v1::TrimRequest {
            log: "a/x".to_owned(),
            ..v1::TrimRequest::default()
        };
        let refused = reader.trim(trim).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{refused:?}");
    }
    let mut writer = wal(&daemon, &a).await;
    writer.append(append("a/x", "1")).await.unwrap();
}

fn commit(log: &str) -> v1::CommitCursorRequest {
    v1::CommitCursorRequest {
        commit: Some(v1::CursorCommit {
            log: log.to_owned(),
            cursor: "c".to_owned(),
            lsn: 1,
            ..v1::CursorCommit::default()
        }),
    }
}

#[tokio::test]
async fn many_connections_of_a_tenant_get_its_rate_together() {
    let (_file, [a, a2, b], daemon) = started(&format!("appends_per_second = {RATE}"));
    use_up(&mut wal(&daemon, &a).await).await;
    let mut clients = Vec::new();
    for number in 0..20 {
        let token = if number % 2 == 0 { &a } else { &a2 };
        clients.push((wal(&daemon, token).await, format!("a/{number}")));
    }
    use_up(&mut clients[0].0).await;
    let begin = Instant::now();
    let end = begin + seconds();
    let calls = clients
        .into_iter()
        .map(|(client, log)| tokio::spawn(appends(client, log, end)));
    let calls: Vec<_> = calls.collect();
    let mut other = wal(&daemon, &b).await;
    let mut served = 0;
    while Instant::now() < end {
        other.append_batch(batch("b/x", RECORDS, 10)).await.unwrap();
        served += RECORDS;
    }
    let mut appended = 0;
    for call in calls {
        appended += call.await.unwrap();
    }
    assert_near_rate(appended, begin.elapsed());
    assert!(served > 0);
}

/// Sends until the session ends or this is dropped.
fn pump(session: &SessionClient, log: &'static str, records: u64) -> tokio::task::JoinHandle<()> {
    let requests = session.requests.clone();
    tokio::spawn(async move {
        for request_id in 1.. {
            let batch = Some(batch(log, records, 10));
            let request = v1::AppendSessionRequest {
                request_id,
                batch,
                ..v1::AppendSessionRequest::default()
            };
            if requests.send(request).await.is_err() {
                return;
            }
        }
    })
}

#[tokio::test]
async fn session_beyond_the_rate_slows_down_and_does_not_fail() {
    let (_file, [a, _, b], daemon) = started(&format!("appends_per_second = {RATE}"));
    use_up(&mut wal(&daemon, &a).await).await;
    let mut slow = session(&daemon, &a).await;
    let sending = pump(&slow, "a/x", RECORDS);
    let mut other = wal(&daemon, &b).await;
    // The first acks are of the requests that fit.
    for _ in 0..5 {
        slow.answers.message().await.unwrap().unwrap();
    }
    let (mut acked, mut served, begin) = (0, 0, Instant::now());
    while begin.elapsed() < seconds() {
        tokio::select! {
            ack = slow.answers.message() => {
                ack.unwrap().unwrap();
                acked += RECORDS;
            }
            served_now = other.append_batch(batch("b/x", RECORDS, 10)) => {
                served_now.unwrap();
                served += RECORDS;
            }
        }
    }
    assert_near_rate(acked, begin.elapsed());
    assert!(served > 0);
    assert!(daemon.metric(r#"wald_tenant_rate_waits_total{kind="append",tenant="a"}"#) >= 1.0);
    sending.abort();
}

/// A session whose second request waits for its rate, and the task that sends the requests.
async fn waiting_session(
    daemon: &Daemon,
    token: &str,
) -> (SessionClient, tokio::task::JoinHandle<()>) {
    let mut session = session(daemon, token).await;
    let sending = pump(&session, "a/x", 1000);
    session.answers.message().await.unwrap().unwrap();
    let waits = r#"wald_tenant_rate_waits_total{kind="append",tenant="a"}"#;
    until(daemon, waits, |number| number > 0.0).await;
    (session, sending)
}

#[tokio::test]
async fn session_that_waits_for_its_rate_ends_with_its_token() {
    let (file, [a, ..], daemon) = started("appends_per_second = 1");
    let (mut slow, sending) = waiting_session(&daemon, &a).await;
    assert!(file.command(&["revoke", &a[6..14]]).status.success());
    daemon.signal(Signal::HUP);
    let (acked, end) = timeout(SOON, slow.rest()).await.unwrap();
    assert_eq!(acked, [0u64; 0]);
    let told = Told::of(&end.unwrap_err());
    // The request that waits was not applied.
    assert_eq!(
        (told.reason.as_str(), told.fact("request_id")),
        ("BAD_CREDENTIAL", "2")
    );
    sending.abort();
}

#[tokio::test]
async fn session_that_waits_for_its_rate_ends_with_its_right() {
    let (file, [a, ..], daemon) = started("appends_per_second = 1");
    let (mut slow, sending) = waiting_session(&daemon, &a).await;
    change(&file, &daemon, "[\"append\", ", "[");
    let (acked, end) = timeout(SOON, slow.rest()).await.unwrap();
    assert_eq!(acked, [0u64; 0]);
    let told = Told::of(&end.unwrap_err());
    assert_eq!(
        (
            told.reason.as_str(),
            told.fact("request_id"),
            told.fact("outcome")
        ),
        ("NOT_ALLOWED", "2", "NOT_APPLIED")
    );
    sending.abort();
}

#[tokio::test]
async fn session_that_waits_for_its_rate_does_not_hold_up_the_stop() {
    let (_file, [a, ..], daemon) = started("appends_per_second = 1");
    let (mut slow, sending) = waiting_session(&daemon, &a).await;
    daemon.signal(Signal::TERM);
    let (_, end) = timeout(SOON, slow.rest()).await.unwrap();
    assert_eq!(Told::of(&end.unwrap_err()).reason, "DRAINING");
    sending.abort();
    drop(slow);
    let ended = timeout(SOON, daemon.ended()).await.unwrap();
    assert!(ended.success());
}

#[tokio::test]
async fn reload_changes_the_rate_of_sessions_that_wait() {
    let (file, [a, ..], daemon) = started("appends_per_second = 1");
    let mut slow = session(&daemon, &a).await;
    let sending = pump(&slow, "a/x", 1000);
    slow.answers.message().await.unwrap().unwrap();
    let mut client = wal(&daemon, &a).await;
    let refused = client.append(append("a/y", "1")).await.unwrap_err();
    let wait = wait_of(&refused, "appends_per_second", 1);
    assert!(wait > Duration::from_secs(900), "{wait:?}");
    change(
        &file,
        &daemon,
        "appends_per_second = 1 ",
        "appends_per_second = 1000000 ",
    );
    for _ in 0..50 {
        timeout(SOON, slow.answers.message())
            .await
            .unwrap()
            .unwrap()
            .unwrap();
    }
    client.append(append("a/y", "1")).await.unwrap();
    sending.abort();
}

fn scan(log: &str, follow: bool) -> v1::ScanRequest {
    v1::ScanRequest {
        selector: Some(Selector::Log(log.to_owned())),
        follow,
        ..v1::ScanRequest::default()
    }
}

fn read(log: &str) -> v1::ReadRequest {
    v1::ReadRequest {
        log: log.to_owned(),
        max_bytes: 1 << 20,
        max_records: 1000,
        ..v1::ReadRequest::default()
    }
}

#[tokio::test]
async fn read_is_refused_until_earlier_ones_are_paid_off_and_a_scan_waits() {
    const BYTES: u64 = 100 << 10;
    let (_file, [a, ..], daemon) = started(&format!(
        "read_bytes_per_second = {BYTES}, append_bytes_per_second = \"1GiB\""
    ));
    let mut client = wal(&daemon, &a).await;
    // 50 KiB in each of 6 appends.
    for _ in 0..6 {
        // A scan ends at the durable tail of its begin.
        let durable = v1::AppendBatchRequest {
            durability: v1::Durability::Durable.into(),
            ..batch("a/x", 50, 1024)
        };
        client.append_batch(durable).await.unwrap();
    }
    let page = client.read(read("a/x")).await.unwrap().into_inner();
    let delivered = page.batch.unwrap().records.len();
    assert_eq!(delivered, 300);
    let refused = client.read(read("a/x")).await.unwrap_err();
    let wait = wait_of(&refused, "read_bytes_per_second", BYTES);
    // A second is the burst.
    let needed = delivered as f64 * 1024.0 / BYTES as f64 - 1.0;
    assert!(
        (needed * 0.8..=needed * 1.2).contains(&wait.as_secs_f64()),
        "{wait:?} for {needed} s"
    );
    let begin = Instant::now();
    let mut stream = client.scan(scan("a/x", false)).await.unwrap().into_inner();
    let first = stream.message().await.unwrap().unwrap();
    assert!(!first.batches.is_empty() || begin.elapsed() < wait);
    let mut seen = records(&first.batches).len();
    while let Some(message) = stream.message().await.unwrap() {
        seen += records(&message.batches).len();
    }
    assert_eq!(seen, 300);
    assert!(
        begin.elapsed() >= wait.mul_f64(0.8),
        "{:?}",
        begin.elapsed()
    );
    assert!(daemon.metric(r#"wald_tenant_rate_waits_total{kind="read",tenant="a"}"#) >= 1.0);
}

#[tokio::test]
async fn scan_that_waits_for_its_rate_does_not_hold_up_the_stop() {
    let (_file, [a, ..], daemon) = started("read_bytes_per_second = 1");
    let mut client = wal(&daemon, &a).await;
    client
        .append(append("a/x", &"x".repeat(1000)))
        .await
        .unwrap();
    client.read(read("a/x")).await.unwrap();
    let mut stream = client.scan(scan("a/x", false)).await.unwrap().into_inner();
    let waits = r#"wald_tenant_rate_waits_total{kind="read",tenant="a"}"#;
    let end = tokio::spawn(async move { stream.message().await });
    until(&daemon, waits, |number| number > 0.0).await;
    daemon.signal(Signal::TERM);
    let end = timeout(SOON, end).await.unwrap().unwrap();
    assert_eq!(Told::of(&end.unwrap_err()).reason, "DRAINING");
    drop(client);
    assert!(timeout(SOON, daemon.ended()).await.unwrap().success());
}

#[tokio::test]
async fn follower_beyond_the_limit_is_refused_until_another_ends() {
    let (_file, [a, a2, b], daemon) = started("followers = 2");
    let mut client = wal(&daemon, &a).await;
    client.append(append("a/x", "1")).await.unwrap();
    let mut followers = Vec::new();
    for _ in 0..2 {
        followers.push(client.scan(scan("a/x", true)).await.unwrap().into_inner());
    }
    let mut same = wal(&daemon, &a2).await;
    let told = Told::of(&same.scan(scan("a/x", true)).await.unwrap_err());
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::ResourceExhausted, "QUOTA")
    );
    for (fact, value) in [
        ("tenant", "a"),
        ("setting", "followers"),
        ("used", "2"),
        ("limit", "2"),
        ("outcome", "NOT_APPLIED"),
    ] {
        assert_eq!(told.fact(fact), value);
    }
    // A scan that does not follow does not count, and the other tenant has its own count.
    same.scan(scan("a/x", false)).await.unwrap();
    let mut other = wal(&daemon, &b).await;
    other.append(append("b/x", "1")).await.unwrap();
    let _others = other.scan(scan("b/x", true)).await.unwrap();
    drop(followers.pop());
    until(&daemon, r#"wald_tenant_followers{tenant="a"}"#, |number| {
        number == 1.0
    })
    .await;
    same.scan(scan("a/x", true)).await.unwrap();
}

#[tokio::test]
async fn connection_beyond_the_limit_is_refused_until_another_closes() {
    let (file, [a, a2, b], daemon) = started("connections = 2");
    let mut first = wal(&daemon, &a).await;
    let mut second = wal(&daemon, &a2).await;
    for client in [&mut first, &mut second] {
        for _ in 0..3 {
            client.append(append("a/x", "1")).await.unwrap();
        }
    }
    let mut third = wal(&daemon, &a).await;
    let told = Told::of(&third.append(append("a/x", "1")).await.unwrap_err());
    assert_eq!(
        (told.reason.as_str(), told.fact("setting")),
        ("QUOTA", "connections")
    );
    assert_eq!(
        (told.fact("used"), told.fact("limit"), told.fact("tenant")),
        ("2", "2", "a")
    );
    wal(&daemon, &b)
        .await
        .append(append("b/x", "1"))
        .await
        .unwrap();
    // The refused connection serves once another has closed.
    drop(second);
    until(
        &daemon,
        r#"wald_tenant_connections{tenant="a"}"#,
        |number| number == 1.0,
    )
    .await;
    third.append(append("a/x", "1")).await.unwrap();
    // A lower limit ends nothing that is counted already.
    change(&file, &daemon, "connections = 2", "connections = 1");
    first.append(append("a/x", "1")).await.unwrap();
    let mut fourth = wal(&daemon, &a).await;
    let told = Told::of(&fourth.append(append("a/x", "1")).await.unwrap_err());
    assert_eq!((told.fact("used"), told.fact("limit")), ("2", "1"));
}

/// Every limit that a tenant can have, with a value of its own, as the file and the metric have it.
const ALL_LIMITS: [(&str, &str, f64); 11] = [
    ("append_bytes_per_second", "'20MiB'", 20.0 * 1_048_576.0),
    ("appends_per_second", "5001", 5001.0),
    ("read_bytes_per_second", "'30MiB'", 30.0 * 1_048_576.0),
    ("reads_per_second", "5002", 5002.0),
    ("logs", "101", 101.0),
    ("producers", "102", 102.0),
    ("cursors", "103", 103.0),
    ("stored_bytes", "'40GiB'", 40.0 * 1_073_741_824.0),
    ("followers", "104", 104.0),
    ("connections", "105", 105.0),
    ("inflight_bytes", "'2MiB'", 2.0 * 1_048_576.0),
];

#[tokio::test]
async fn metric_shows_every_limit_and_follows_the_file() {
    let limits = ALL_LIMITS.map(|(key, value, _)| format!("{key} = {value}"));
    let (file, _, daemon) = started(&limits.join(", "));
    let shown = |key: &str| format!("wald_tenant_limit{{limit=\"{key}\",tenant=\"a\"}}");
    for (key, _, value) in ALL_LIMITS {
        assert_eq!(daemon.metric(&shown(key)), value, "{key}");
    }
    // The other tenant has none.
    let page = daemon.http("/metrics").1;
    let of_other = |line: &str| line.starts_with("wald_tenant_limit{") && line.contains("\"b\"");
    assert!(!page.lines().any(of_other), "{page}");
    // Changed and removed limits, of those that the engine checks and of the others.
    let changed = (file.text())
        .replace("followers = 104", "followers = 7")
        .replace("producers = 102", "producers = 8")
        .replace("appends_per_second = 5001, ", "");
    file.put_in_force(&daemon, &changed);
    until(&daemon, &shown("followers"), |limit| limit == 7.0).await;
    until(&daemon, &shown("producers"), |limit| limit == 8.0).await;
    let page = daemon.http("/metrics").1;
    assert!(!page.contains(&shown("appends_per_second")), "{page}");
}

#[tokio::test]
async fn connection_beyond_the_limit_is_closed() {
    let (_file, [a, ..], daemon) = started("connections = 1");
    let mut first = wal(&daemon, &a).await;
    first.append(append("a/x", "1")).await.unwrap();
    let (_body, second) = begun(&daemon, &a).await;
    timeout(SOON, second).await.unwrap().unwrap().unwrap();
    first.append(append("a/x", "1")).await.unwrap();
}

#[tokio::test]
async fn follower_whose_caller_gets_another_tenant_begins_again() {
    let (file, [a, ..], daemon) = started("followers = 2");
    let mut client = wal(&daemon, &a).await;
    client.append(append("a/x", "1")).await.unwrap();
    let mut follower = client.scan(scan("a/x", true)).await.unwrap().into_inner();
    follower.message().await.unwrap().unwrap();
    let text = file.text().replace("[tenant.a]", "[tenant.c]");
    file.put_in_force(&daemon, &text.replace("tenant = \"a\"", "tenant = \"c\""));
    let end = async {
        loop {
            if let Err(status) = follower.message().await.map(Option::unwrap) {
                return Told::of(&status);
            }
        }
    };
    let told = timeout(SOON, end).await.unwrap();
    assert_eq!((told.reason.as_str(), told.fact("retry")), ("BUSY", "SAFE"));
    let _again = client.scan(scan("a/x", true)).await.unwrap();
    until(&daemon, r#"wald_tenant_followers{tenant="c"}"#, |number| {
        number == 1.0
    })
    .await;
}

#[tokio::test]
async fn read_that_waits_for_records_counts_as_a_follower() {
    let (_file, [a, a2, _], daemon) = started("followers = 1");
    let mut client = wal(&daemon, &a).await;
    client.append(append("a/x", "1")).await.unwrap();
    let waiting = v1::ReadRequest {
        start: Some(v1::read_request::Start::Lsn(1)),
        wait: Some(prost_types::Duration {
            seconds: 60,
            nanos: 0,
        }),
        ..read("a/x")
    };
    let mut same = wal(&daemon, &a2).await;
    let first = tokio::spawn({
        let waiting = waiting.clone();
        async move { client.read(waiting).await }
    });
    let followers = r#"wald_tenant_followers{tenant="a"}"#;
    until(&daemon, followers, |number| number == 1.0).await;
    let told = Told::of(&same.read(waiting).await.unwrap_err());
    assert_eq!(
        (told.reason.as_str(), told.fact("setting")),
        ("QUOTA", "followers")
    );
    same.append(append("a/x", "2")).await.unwrap();
    let page = first.await.unwrap().unwrap().into_inner();
    assert_eq!(page.batch.unwrap().records.len(), 1);
    assert_eq!(daemon.metric(followers), 0.0);
}

type Closed = tokio::task::JoinHandle<Result<(), h2::Error>>;

/// An append of the caller without its message, on a connection of its own.
async fn begun(daemon: &Daemon, token: &str) -> (SendStream<bytes::Bytes>, Closed) {
    let socket = TcpStream::connect(("127.0.0.1", daemon.port()))
        .await
        .unwrap();
    let (client, connection) = h2::client::handshake(socket).await.unwrap();
    let closed = tokio::spawn(connection);
    let request = Request::post(format!(
        "http://127.0.0.1:{}/wald.v1.WalService/Append",
        daemon.port()
    ))
    .header("content-type", "application/grpc")
    .header("te", "trailers")
    .header("authorization", format!("Bearer {token}"))
    .body(())
    .unwrap();
    let (_answer, body) = client
        .ready()
        .await
        .unwrap()
        .send_request(request, false)
        .unwrap();
    (body, closed)
}

/// An append of the caller whose last bytes do not come, on a connection of its own.
async fn unfinished(daemon: &Daemon, token: &str, bytes: usize) -> SendStream<bytes::Bytes> {
    let (mut body, _) = begun(daemon, token).await;
    let mut sent = vec![0];
    sent.extend(u32::try_from(bytes + 100).unwrap().to_be_bytes());
    sent.resize(5 + bytes, 7);
    body.send_data(sent.into(), false).unwrap();
    body
}

#[tokio::test]
async fn tenant_with_its_bytes_in_flight_is_busy_and_its_session_waits() {
    const BYTES: usize = 50_000;
    let (_file, [a, a2, b], daemon) = started("inflight_bytes = \"96KiB\"");
    let mut held = unfinished(&daemon, &a, BYTES).await;
    let inflight = r#"wald_tenant_inflight_bytes{tenant="a"}"#;
    until(&daemon, inflight, |bytes| bytes >= BYTES as f64).await;
    let large = "x".repeat(BYTES);
    let mut same = wal(&daemon, &a2).await;
    let told = Told::of(&same.append(append("a/x", &large)).await.unwrap_err());
    assert_eq!((told.reason.as_str(), told.fact("tenant")), ("BUSY", "a"));
    assert_eq!(
        (told.fact("limit_bytes"), told.fact("outcome")),
        ("98304", "NOT_APPLIED")
    );
    // Others have room, and so has a small request of the tenant.
    let mut other = wal(&daemon, &b).await;
    other.append(append("b/x", &large)).await.unwrap();
    same.append(append("a/x", "1")).await.unwrap();
    let mut waiting = session(&daemon, &a2).await;
    waiting.send(1, vec![part("a/x", &[&large])]).await;
    same.append(append("a/x", "2")).await.unwrap();
    let early = timeout(Duration::from_millis(300), waiting.answers.message()).await;
    assert!(early.is_err(), "{early:?}");
    held.send_reset(h2::Reason::CANCEL);
    let ack = timeout(SOON, waiting.answers.message()).await.unwrap();
    assert_eq!(ack.unwrap().unwrap().request_id, 1);
    until(&daemon, inflight, |bytes| bytes == 0.0).await;
}

#[tokio::test]
async fn metrics_of_a_tenant_go_with_it() {
    let (file, [a, ..], daemon) = started("followers = 2");
    wal(&daemon, &a)
        .await
        .append(append("a/x", "12345"))
        .await
        .unwrap();
    assert_eq!(
        daemon.metric(r#"wald_tenant_bytes_total{kind="append",tenant="a"}"#),
        5.0
    );
    let text = file.text();
    let (_, without) = text.split_once("[tenant.b]").unwrap();
    let without = format!("[tenant.b]{without}").replace("tenant = \"a\"\n", "");
    file.put_in_force(&daemon, &without);
    // The engine drops the quota of the tenant a moment later.
    let deadline = Instant::now() + Duration::from_secs(20);
    while daemon.http("/metrics").1.contains("tenant=\"a\"") {
        assert!(Instant::now() < deadline, "the tenant keeps its metrics");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(daemon.http("/metrics").1.contains("tenant=\"b\""));
}
