//! Stand-bys forward calls to the owner of the store.

use http::{HeaderMap, Response};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tonic_types::StatusExt as _;

use super::stand_by::owner;
use super::*;
use crate::support::SessionClient;

/// Long, so that no node takes over while another is dead.
const NEVER: [&str; 3] = ["--stand-by", "--lease-ttl", "10m"];

fn address(daemon: &Daemon) -> &str {
    daemon.start["grpc"].as_str().unwrap()
}

/// An owner with a record, and a stand-by that is ready.
async fn pair(store: &Store, more: &[&str]) -> [(Daemon, tempfile::TempDir); 2] {
    pair_of(
        store,
        &[&["--stand-by", "--lease-ttl", "2s"], more].concat(),
    )
    .await
}

async fn pair_of(store: &Store, arguments: &[&str]) -> [(Daemon, tempfile::TempDir); 2] {
    let begin = |name: &str| {
        let directory = private_directory();
        (start(store, directory.path(), name, arguments), directory)
    };
    let first = begin("one");
    replicated(&mut first.0.wal().await, "0").await.unwrap();
    let second = begin("two");
    assert_eq!(second.0.start["message"], "wald is standing by");
    until_store("a stand-by that is ready", || {
        second.0.http("/readyz").0 == 200
    })
    .await;
    [first, second]
}

/// The value of `wald-owner` in metadata.
pub(crate) fn named(metadata: &tonic::metadata::MetadataMap) -> &str {
    let owner = metadata.get("wald-owner");
    owner.map_or("", |owner| owner.to_str().unwrap())
}

/// A refusal that names the owner and its term.
pub(crate) fn assert_moved(refused: &Status, owner: &str, term: &str) {
    let told = Told::of(refused);
    assert_eq!((told.code, &*told.reason), (Code::Unavailable, "MOVED"));
    assert_eq!((told.fact("owner"), told.fact("term")), (owner, term));
}

/// Status and JSON of the answer of a node's HTTP API.
fn over_http(daemon: &Daemon, method: &str, path: &str, body: &str) -> (u16, serde_json::Value) {
    let headers = "Content-Type: application/json\r\n";
    let (status, _, body) = daemon.send_http(method, path, headers, body);
    (status, serde_json::from_str(&body).unwrap_or_default())
}

#[tokio::test]
async fn requests_over_http_reach_the_owner_through_a_stand_by() {
    let store = Store::start();
    let [(_one, _first), (two, _two)] = pair(&store, &[]).await;
    let path = "/v1/logs/a/records?durability=DURABILITY_REPLICATED";
    let (status, answer) = over_http(&two, "POST", path, r#"{"records": [{"text": "1"}]}"#);
    assert_eq!(
        (status, &answer["durability"]),
        (200, &"DURABILITY_REPLICATED".into())
    );
    assert_eq!(answer["appends"][0]["first_lsn"], "1");
    // The owner answers, and the copy of the stand-by does.
    for query in ["", "&any_node=true"] {
        let read = || over_http(&two, "GET", &format!("/v1/logs/a/records?lsn=1{query}"), "");
        until_store("the record", || {
            let (status, page) = read();
            status == 200 && page["batch"]["records"][0]["text"] == "1"
        })
        .await;
    }
    let (status, refused) = over_http(&two, "GET", "/v1/logs/none/tail", "");
    assert_eq!(
        (status, &refused["error"]["status"]),
        (404, &"NOT_FOUND".into())
    );
}

#[tokio::test]
async fn unary_calls_reach_the_owner_through_a_stand_by() {
    let store = Store::start();
    let [(one, _one), (two, _two)] = pair(&store, &["--segment-bytes", "8MiB"]).await;
    let mut wal = two.wal().await;
    let answer = wal.append(append("a", "1")).await.unwrap();
    assert_eq!(named(answer.metadata()), address(&one));
    assert_eq!(answer.get_ref().lsn, Some(1));
    replicated(&mut wal, "2").await.unwrap();
    let read = v1::ReadRequest {
        log: "a".to_owned(),
        ..v1::ReadRequest::default()
    };
    let read = wal.read(read).await.unwrap();
    assert_eq!(named(read.metadata()), address(&one));
    let batch = read.get_ref().batch.clone().unwrap();
    assert_eq!(batch.records.len(), 3);
    assert_eq!(payloads(&mut wal).await, numbered(3));
    // Refusals of the owner come with their details, and name it, too.
    let late = v1::AppendRequest {
        condition: Some(v1::AppendCondition {
            expected_lsn: Some(1),
            ..v1::AppendCondition::default()
        }),
        ..append("a", "no")
    };
    let refused = wal.append(late).await.unwrap_err();
    assert_eq!(Told::of(&refused).reason, "POSITION_MISMATCH");
    assert_eq!(named(refused.metadata()), address(&one));
    // A batch near the limit of a segment of 8 MiB, in many frames each way.
    let large = "x".repeat(900_000);
    let batch = v1::AppendBatchRequest {
        batches: vec![part("large", &[large.as_str(); 4])],
        ..v1::AppendBatchRequest::default()
    };
    wal.append_batch(batch).await.unwrap();
    let scan = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::Log("large".to_owned())),
        ..v1::ScanRequest::default()
    };
    let mut stream = wal.scan(scan).await.unwrap().into_inner();
    let mut bytes = 0;
    while let Some(message) = stream.message().await.unwrap() {
        bytes += records(&message.batches)
            .iter()
            .map(|record| record.2.len())
            .sum::<usize>();
    }
    assert_eq!(bytes, 4 * large.len());
    // Other services.
    let mut logs = two.logs().await;
    let listed = logs.list_logs(v1::ListLogsRequest::default());
    let listed = listed.await.unwrap().into_inner();
    assert_eq!(listed.logs.len(), 2);
    let commit = v1::CommitCursorRequest {
        commit: Some(v1::CursorCommit {
            log: "a".to_owned(),
            cursor: "c".to_owned(),
            ..v1::CursorCommit::default()
        }),
    };
    two.cursors().await.commit_cursor(commit).await.unwrap();
    two.ops()
        .await
        .get_caller(v1::GetCallerRequest {})
        .await
        .unwrap();
    let appended = r#"wald_forwarded_total{method="Append",result="answered"}"#;
    assert_eq!(two.metric(appended), 3.0);
    // A node that has no copy yet, or none that serves, is not ready.
    let health = two.http("/readyz");
    assert_eq!(health.0, 200, "{health:?}");
}

#[tokio::test]
async fn sessions_and_scans_are_piped_and_end_when_the_stand_by_does() {
    let store = Store::start();
    let [(one, _one), (two, _two)] = pair(&store, &[]).await;
    let mut wal = two.wal().await;
    let scan = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::Log("a".to_owned())),
        follow: true,
        ..v1::ScanRequest::default()
    };
    let answer = wal.scan(scan).await.unwrap();
    assert_eq!(named(answer.metadata()), address(&one));
    let mut follower = answer.into_inner();
    let mut session = SessionClient::open(&mut wal).await;
    let mut seen = Vec::new();
    for number in 1..50 {
        session
            .send(number, vec![part("a", &[&number.to_string()])])
            .await;
        let acked = session.answers.message().await.unwrap().unwrap();
        assert_eq!(acked.request_id, number);
        while seen.len() as u64 <= number {
            let message = follower.message().await.unwrap().unwrap();
            let found = records(&message.batches);
            seen.extend(found.into_iter().map(|record| record.2));
        }
    }
    assert_eq!(seen, numbered(50));
    // Requests under way are acked before the session ends.
    for number in 50..60 {
        session.send(number, vec![part("a", &["x"])]).await;
    }
    let first = session.answers.message().await.unwrap().unwrap();
    assert_eq!(first.request_id, 50);
    two.signal(Signal::TERM);
    let end = loop {
        match follower.message().await {
            Ok(message) => drop(message.unwrap()),
            Err(status) => break status,
        }
    };
    assert_eq!(end.code(), Code::Unavailable, "{end:?}");
    assert_eq!(Told::of(&end).reason, "DRAINING", "{end:?}");
    let (acked, end) = session.rest().await;
    assert_eq!(Told::of(&end.unwrap_err()).reason, "DRAINING");
    assert!(
        acked.iter().copied().eq(51..51 + acked.len() as u64),
        "{acked:?}"
    );
    drop((wal, follower, session));
    assert!(two.ended().await.success());
    let through = payloads(&mut one.wal().await).await;
    assert!(through.len() >= 51 + acked.len(), "{through:?}");
}

/// The owner applies a request that waits for the bucket, so nothing may say that it is not applied.
#[tokio::test]
async fn half_closed_session_gets_its_last_ack_while_the_stand_by_ends() {
    let store = Store::start();
    let [(one, _d1), (two, _d2)] = pair_of(&store, &NEVER).await;
    let mut session = SessionClient::open(&mut two.wal().await).await;
    let batch = |text: &str| v1::AppendBatchRequest {
        batches: vec![part("a", &[text])],
        durability: v1::Durability::Replicated.into(),
        ..v1::AppendBatchRequest::default()
    };
    session.send_batch(1, batch("before")).await;
    let acked = session.answers.message().await.unwrap().unwrap();
    assert_eq!(acked.request_id, 1);
    store.enter(Mood::Hangs);
    session.send_batch(2, batch("last")).await;
    let SessionClient {
        requests,
        mut answers,
    } = session;
    drop(requests);
    // Until the owner has it, the stand-by may refuse it.
    let arrived = v1::ReadRequest {
        log: "a".to_owned(),
        start: Some(v1::read_request::Start::Lsn(2)),
        wait: Some(prost_types::Duration {
            seconds: 20,
            nanos: 0,
        }),
        ..v1::ReadRequest::default()
    };
    let page = one.wal().await.read(arrived).await.unwrap().into_inner();
    assert_eq!(page.batch.unwrap().records.len(), 1);
    two.signal(Signal::TERM);
    until_store("a stand-by that ends", || two.http("/readyz").0 != 200).await;
    let early =
        tokio::time::timeout(std::time::Duration::from_millis(300), answers.message()).await;
    assert!(early.is_err(), "{early:?}");
    store.enter(Mood::Answers);
    let acked = answers.message().await.unwrap().unwrap();
    assert_eq!(acked.request_id, 2);
    assert!(answers.message().await.unwrap().is_none());
    assert!(two.ended().await.success());
}

#[tokio::test]
async fn call_goes_on_once_and_only_to_the_owner_of_the_term() {
    let store = Store::start();
    let [(one, _one), (two, _two)] = pair(&store, &[]).await;
    let of_term = |term: &str| {
        let mut request = Request::new(append("a", "x"));
        let term = term.parse().unwrap();
        request.metadata_mut().insert("wald-forwarded", term);
        request
    };
    let term = owner(&store)["term"].to_string();
    // A stand-by does not forward a call a second time.
    let refused = two.wal().await.append(of_term(&term)).await.unwrap_err();
    assert_moved(&refused, address(&one), &term);
    assert_eq!(Told::of(&refused).fact("outcome"), "NOT_APPLIED");
    let mut wal = one.wal().await;
    for other in ["0", "99", "x"] {
        let refused = wal.append(of_term(other)).await.unwrap_err();
        assert_moved(&refused, address(&one), &term);
    }
    wal.append(of_term(&term)).await.unwrap();
    // These describe the node itself.
    let mut ops = two.ops().await;
    let refused = ops.list_segments(v1::ListSegmentsRequest::default());
    assert_moved(&refused.await.unwrap_err(), address(&one), &term);
    assert_eq!(payloads(&mut wal).await, ["0", "x"]);
}

#[tokio::test]
async fn tokens_are_checked_here_and_by_the_owner() {
    let store = Store::start();
    let secrets = private_directory();
    let file = secrets.path().join("auth.toml");
    let rules =
        "[principal.writer]\nallow = [{ do = [\"append\", \"create\", \"read\"], logs = \"\" }]\n";
    std::fs::write(&file, rules).unwrap();
    std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    let made = ends(
        wald()
            .args(["token", "create", "--principal", "writer", "--auth-file"])
            .arg(&file),
    );
    assert!(made.status.success(), "{made:?}");
    let token = String::from_utf8(made.stdout).unwrap();
    let bearer = format!("Bearer {}", token.trim());
    let argument = format!("--auth-file={}", file.display());
    let (first, second) = (private_directory(), private_directory());
    let more = [
        "--stand-by",
        "--lease-ttl",
        "2s",
        "--metrics-open",
        &argument,
    ];
    let one = start(&store, first.path(), "one", &more);
    let two = start(&store, second.path(), "two", &more);
    let sent = |payload: &str, bearer: &str| {
        let mut request = Request::new(append("a", payload));
        let bearer = bearer.parse().unwrap();
        request.metadata_mut().insert("authorization", bearer);
        request
    };
    let mut wal = two.wal().await;
    let answer = wal.append(sent("0", &bearer)).await.unwrap();
    assert_eq!(named(answer.metadata()), address(&one));
    let stranger = wal.append(append("a", "1")).await.unwrap_err();
    assert_eq!(stranger.code(), Code::Unauthenticated);
    assert_eq!(named(stranger.metadata()), "");
    // The owner knows the caller: it lacks a right there.
    let mut request = Request::new(v1::TrimRequest {
        log: "a".to_owned(),
        ..v1::TrimRequest::default()
    });
    let bearer = bearer.parse().unwrap();
    request.metadata_mut().insert("authorization", bearer);
    let refused = wal.trim(request).await.unwrap_err();
    assert_eq!(Told::of(&refused).reason, "NOT_ALLOWED");
    assert_eq!(named(refused.metadata()), address(&one));
}

/// A tenant at its limit must not end the links on which the calls of others go.
#[tokio::test]
async fn tenant_at_its_limit_of_connections_ends_no_link_to_the_owner() {
    let store = Store::start();
    let secrets = private_directory();
    let file = secrets.path().join("auth.toml");
    let all = r#"["append", "create", "read"]"#;
    let rules = format!(
        "[tenant.t]\nprefix = \"t/\"\nlimits = {{ connections = 1 }}\n\
         [principal.t]\ntenant = \"t\"\nallow = [{{ do = {all}, logs = \"t/\" }}]\n\
         [principal.other]\nallow = [{{ do = {all}, logs = \"\" }}]\n"
    );
    std::fs::write(&file, rules).unwrap();
    std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    let [t, other] = ["t", "other"].map(|principal| {
        let mut command = wald();
        command.args(["token", "create", "--principal", principal, "--auth-file"]);
        let made = ends(command.arg(&file));
        format!("Bearer {}", String::from_utf8(made.stdout).unwrap().trim())
    });
    let argument = format!("--auth-file={}", file.display());
    let more = [&NEVER[..], &["--metrics-open", &argument]].concat();
    let (first, second) = (private_directory(), private_directory());
    let one = start(&store, first.path(), "one", &more);
    let two = start(&store, second.path(), "two", &more);
    let sent = |log: &str, bearer: &str| {
        let mut request = Request::new(append(log, "x"));
        let bearer = bearer.parse().unwrap();
        request.metadata_mut().insert("authorization", bearer);
        request
    };
    // The tenant has its one connection at the owner.
    let mut own = one.wal().await;
    own.append(sent("t/a", &t)).await.unwrap();
    let mut through = two.wal().await;
    through.append(sent("a", &other)).await.unwrap();
    // It keeps a link open that no longer takes calls.
    let mut scan = Request::new(v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::Log("a".to_owned())),
        follow: true,
        ..v1::ScanRequest::default()
    });
    let bearer = other.parse().unwrap();
    scan.metadata_mut().insert("authorization", bearer);
    let _follower = through.scan(scan).await.unwrap();
    let open = "wald_connections{port=\"grpc\"}";
    let before = one.metric(open);
    for _ in 0..100 {
        let refused = through.append(sent("t/a", &t)).await.unwrap_err();
        assert_eq!(Told::of(&refused).reason, "QUOTA", "{refused:?}");
        through.append(sent("a", &other)).await.unwrap();
    }
    assert_eq!(one.metric(open), before);
}

/// An owner in the test: the heads of its calls, each answered by `answer`.
struct FakeOwner {
    address: String,
    heads: mpsc::UnboundedReceiver<(String, HeaderMap)>,
    task: tokio::task::JoinHandle<()>,
}

/// Answers every call with this code, or breaks the connection.
async fn fake_owner(code: Option<&'static str>) -> FakeOwner {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (sender, heads) = mpsc::unbounded_channel();
    let task = tokio::spawn(async move {
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            let mut connection = h2::server::handshake(socket).await.unwrap();
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                let (head, _body) = request.into_parts();
                let _ = sender.send((head.uri.path().to_owned(), head.headers));
                let Some(code) = code else {
                    break;
                };
                let response = Response::builder()
                    .header("content-type", "application/grpc")
                    .header("grpc-status", code)
                    .header("of-the-owner", "kept")
                    .body(());
                respond.send_response(response.unwrap(), true).unwrap();
            }
        }
    });
    FakeOwner {
        address,
        heads,
        task,
    }
}

/// Replaces the address of the owner, which is dead.
fn readdress(store: &Store, address: &str) {
    store.change("wald/orders/shards/0/owner", |content| {
        let text = String::from_utf8(content).unwrap();
        let mut record: serde_json::Value = serde_json::from_str(&text).unwrap();
        record["value"]["endpoint"] = address.into();
        Some(record.to_string().into_bytes())
    });
}

/// Calls until the stand-by knows the owner with this address.
async fn refused_by(
    wal: &mut WalServiceClient<Channel>,
    is_known: impl Fn(&Status) -> bool,
) -> Status {
    let begun = Instant::now();
    loop {
        let mut request = Request::new(append("a", "x"));
        request.set_timeout(Duration::from_secs(50));
        let metadata = request.metadata_mut();
        let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        metadata.insert("traceparent", trace.parse().unwrap());
        metadata.insert("authorization", "Bearer some-token".parse().unwrap());
        metadata.insert_bin(
            "of-the-client-bin",
            tonic::metadata::MetadataValue::from_bytes(b"\0\xff"),
        );
        let refused = wal.append(request).await.unwrap_err();
        if is_known(&refused) {
            return refused;
        }
        assert!(begun.elapsed() < PATIENCE, "{refused:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn head_goes_on_as_it_is_and_an_owner_out_of_reach_is_named() {
    let store = Store::start();
    let (first, second) = (private_directory(), private_directory());
    let one = start(&store, first.path(), "one", &NEVER);
    replicated(&mut one.wal().await, "0").await.unwrap();
    let two = start(&store, second.path(), "two", &NEVER);
    let mut wal = two.wal().await;
    wal.append(append("a", "1")).await.unwrap();
    // Dead: nothing was sent.
    let dead = address(&one).to_owned();
    one.signal(Signal::KILL);
    one.ended().await;
    let has_reason = |status: &Status| status.get_error_details().error_info().is_some();
    let refused = refused_by(&mut wal, has_reason).await;
    assert_moved(&refused, &dead, "1");
    assert_eq!(Told::of(&refused).fact("outcome"), "NOT_APPLIED");
    assert_eq!(named(refused.metadata()), "");

    let mut fake = fake_owner(Some("7")).await;
    readdress(&store, &fake.address);
    let is_fake = |status: &Status| status.code() == Code::PermissionDenied;
    let refused = refused_by(&mut wal, is_fake).await;
    assert_eq!(named(refused.metadata()), fake.address);
    assert_eq!(refused.metadata().get("of-the-owner").unwrap(), "kept");
    let (path, head) = fake.heads.recv().await.unwrap();
    assert_eq!(path, "/wald.v1.WalService/Append");
    let text = |name: &str| head[name].to_str().unwrap();
    assert_eq!(text("wald-forwarded"), "1");
    assert_eq!(text("te"), "trailers");
    assert_eq!(text("authorization"), "Bearer some-token");
    assert!(text("traceparent").starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-"));
    assert_eq!(text("of-the-client-bin"), "AP8");
    // The time that is left.
    let micros: u64 = text("grpc-timeout")
        .strip_suffix('u')
        .unwrap()
        .parse()
        .unwrap();
    assert!((20_000_000..50_000_000).contains(&micros), "{micros}");

    // Sent, and without an answer: as a broken connection to the owner.
    fake.task.abort();
    let fake = fake_owner(None).await;
    readdress(&store, &fake.address);
    let refused = refused_by(&mut wal, |status| !has_reason(status)).await;
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    let broken = r#"wald_forwarded_total{method="Append",result="broken"}"#;
    assert!(two.metric(broken) >= 1.0);
    let unreachable = r#"wald_forwarded_total{method="Append",result="unreachable"}"#;
    assert!(two.metric(unreachable) >= 1.0);
}

/// An owner that takes one call on each connection cannot make a stand-by open one for each call.
#[tokio::test]
async fn number_of_links_to_the_owner_is_bounded() {
    const LINKS: usize = 8;
    let store = Store::start();
    let (first, second) = (private_directory(), private_directory());
    let few = [&NEVER[..], &["--max-concurrent-streams", "1"]].concat();
    let one = start(&store, first.path(), "one", &few);
    replicated(&mut one.wal().await, "0").await.unwrap();
    let two = start(&store, second.path(), "two", &NEVER);
    let mut wal = two.wal().await;
    let mut open = Vec::new();
    for number in 0..LINKS + 4 {
        let scan = v1::ScanRequest {
            selector: Some(v1::scan_request::Selector::Log("a".to_owned())),
            follow: true,
            ..v1::ScanRequest::default()
        };
        match wal.scan(scan).await {
            Ok(answer) => open.push(answer),
            Err(refused) => {
                assert!(number >= LINKS, "{refused:?}");
                assert_moved(&refused, address(&one), "1");
            }
        }
    }
    assert_eq!(open.len(), LINKS);
}

/// Median time of durable appends, after some that warm up.
async fn median(wal: &mut WalServiceClient<Channel>) -> Duration {
    let mut times = Vec::new();
    for _ in 0..220 {
        let begun = Instant::now();
        let durable = request("x", v1::Durability::Durable);
        wal.append(durable).await.unwrap();
        times.push(begun.elapsed());
    }
    let mut times = times.split_off(20);
    times.sort_unstable();
    times[times.len() / 2]
}

#[tokio::test]
async fn forwarded_append_takes_little_longer_than_a_direct_one() {
    let store = Store::start();
    let [(one, _one), (two, _two)] = pair(&store, &[]).await;
    let direct = median(&mut one.wal().await).await;
    let forwarded = median(&mut two.wal().await).await;
    println!("an append takes {direct:?}, and {forwarded:?} through a stand-by");
    // Loose: machines of tests are busy.
    assert!(forwarded < direct * 20 + Duration::from_millis(50));
}
