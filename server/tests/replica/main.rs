//! Two daemons and one bucket: acks that survive a machine, take-overs, and a bucket that gives no answer.

#![cfg(feature = "object")]
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

#[allow(dead_code, reason = "the tests of the daemon use the rest")]
#[path = "../daemon/tls/certificates.rs"]
mod certificates;
#[allow(dead_code, reason = "the tests of the daemon use the rest")]
#[path = "../daemon/tls/client.rs"]
mod client;
mod encrypted;
mod forward;
mod objects;
mod peers;
mod reads;
mod signed;
mod stand_by;
#[path = "../support/mod.rs"]
mod support;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use objects::{Mood, Store};
use rustix::process::Signal;
use support::{Daemon, Told, append, part, private_directory, records, wald};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use wald_proto::v1;
use wald_proto::v1::wal_service_client::WalServiceClient;

/// Maximum time for a daemon to see that another one owns its store, on a slow machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Arguments of a node with a replica. Only requests for REPLICATED make it ship.
fn arguments(store: &Store, node: &str, more: &[&str]) -> Vec<String> {
    let endpoint = store.endpoint();
    let own = [
        "--bucket-url",
        "s3://wald/orders",
        "--bucket-endpoint",
        &endpoint,
        "--bucket-insecure",
        "--replica-interval",
        "1h",
        "--node-id",
        node,
    ];
    own.iter()
        .chain(more)
        .map(|&word| word.to_owned())
        .collect()
}

/// The variables that let a client in. The daemon inherits them.
const CREDENTIALS: [(&str, &str); 2] = [
    ("AWS_ACCESS_KEY_ID", "test1234"),
    ("AWS_SECRET_ACCESS_KEY", "test12345678"),
];

fn start(store: &Store, directory: &Path, node: &str, more: &[&str]) -> Daemon {
    let arguments = arguments(store, node, more);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    Daemon::start_with(directory, &arguments, &CREDENTIALS)
}

/// Runs a command that must end by itself.
fn ends(command: &mut Command) -> Output {
    support::output(command.envs(CREDENTIALS))
}

/// A start that must be refused: its exit code and its log.
fn refused(store: &Store, directory: &Path, node: &str, more: &[&str]) -> (Option<i32>, String) {
    let output = ends(
        wald()
            .arg("--data-dir")
            .arg(directory)
            .args(["--listen", ":0", "--http-listen", ":0"])
            .args(arguments(store, node, more)),
    );
    let log = String::from_utf8(output.stderr).unwrap();
    (output.status.code(), log)
}

fn request(payload: &str, durability: v1::Durability) -> v1::AppendRequest {
    v1::AppendRequest {
        durability: durability.into(),
        ..append("a", payload)
    }
}

async fn replicated(
    wal: &mut WalServiceClient<Channel>,
    payload: &str,
) -> Result<v1::AppendResponse, Status> {
    let answer = wal.append(request(payload, v1::Durability::Replicated));
    Ok(answer.await?.into_inner())
}

async fn payloads(wal: &mut WalServiceClient<Channel>) -> Vec<String> {
    let scan = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::Log("a".to_owned())),
        ..v1::ScanRequest::default()
    };
    let mut stream = wal.scan(scan).await.unwrap().into_inner();
    let mut found = Vec::new();
    while let Some(message) = stream.message().await.unwrap() {
        found.extend(records(&message.batches).into_iter().map(|record| record.2));
    }
    found
}

fn numbered(count: usize) -> Vec<String> {
    (0..count).map(|number| number.to_string()).collect()
}

#[tokio::test]
async fn second_node_takes_over_with_every_replicated_ack_and_the_first_ends() {
    let store = Store::start();
    let (one, two) = (private_directory(), private_directory());
    let first = start(&store, one.path(), "one", &[]);
    let mut wal = first.wal().await;
    let mut acked = Vec::new();
    for payload in numbered(20) {
        let answer = replicated(&mut wal, &payload).await.unwrap();
        assert_eq!(answer.durability(), v1::Durability::Replicated);
        assert_eq!(answer.replicated_lsn, answer.lsn.map(|lsn| lsn + 1));
        acked.push(answer.position.unwrap());
    }
    let mut lost = Vec::new();
    for number in 0..3 {
        let late = request(&format!("late {number}"), v1::Durability::Durable);
        let answer = wal.append(late).await.unwrap().into_inner();
        assert_eq!(answer.durability(), v1::Durability::Durable);
        lost.push((answer.position.unwrap(), answer.recovery_epoch));
    }
    let (code, log) = refused(&store, two.path(), "two", &[]);
    assert_eq!(code, Some(78), "{log}");
    assert!(
        log.contains("--take-over=1") && log.contains("wald restore"),
        "{log}"
    );
    // A volume that lost its store is refused with the same words.
    let (code, again) = refused(&store, two.path(), "two", &["--create-store=false"]);
    assert_eq!(code, Some(78), "{again}");
    assert!(again.contains("--take-over=1"), "{again}");
    // The word for another term takes nothing from the owner.
    let (code, log) = refused(&store, two.path(), "two", &["--take-over=2"]);
    assert_eq!(code, Some(78), "{log}");
    assert!(
        log.contains("\\\"one\\\"")
            && log.contains("owns in term 1 (--take-over names the term 2)"),
        "{log}"
    );
    assert_eq!(std::fs::read_dir(two.path()).unwrap().count(), 0);

    let second = start(&store, two.path(), "two", &["--take-over=1"]);
    let address = second.start["grpc"].as_str().unwrap();
    let mut next = second.wal().await;
    assert_eq!(payloads(&mut next).await, numbered(20));
    let tail = v1::GetTailRequest {
        log: "a".to_owned(),
        recovery_epoch: Some(lost[0].1),
        ..v1::GetTailRequest::default()
    };
    let tail = next.get_tail(tail).await.unwrap().into_inner();
    let survived = tail.survived_position.unwrap();
    assert!(acked.iter().all(|position| *position < survived));
    assert!(lost.iter().all(|(position, _)| *position >= survived));

    let owned = ["wald_term", "wald_takeovers_total", "wald_fenced_total"];
    assert_eq!(owned.map(|name| second.metric(name)), [2.0, 1.0, 0.0]);

    // The first node learns it, refuses changes and ends.
    let late = replicated(&mut wal, "too late").await.unwrap_err();
    let has_ended = late.code() == Code::Unavailable;
    assert!(
        has_ended || Told::of(&late).reason == "REPLICATION_UNKNOWN",
        "{late:?}"
    );
    drop(wal);
    let line = first.wait_for_log("owns the store in term");
    assert!(
        line.contains("\\\"two\\\"") && line.contains(address),
        "{line}"
    );
    let status = tokio::time::timeout(PATIENCE, first.ended()).await.unwrap();
    assert_eq!(status.code(), Some(78));

    // Its directory lacks the records of the second node.
    for more in [&[][..], &["--take-over"]] {
        let (code, log) = refused(&store, one.path(), "one", more);
        assert_eq!(code, Some(78), "{log}");
        assert!(
            log.contains("two") && log.contains(address) && log.contains("term 2"),
            "{log}"
        );
    }
    replicated(&mut next, "20").await.unwrap();
    assert_eq!(payloads(&mut next).await, numbered(21));

    // The command of the second node is started again, as an orchestrator does: there is nothing to take over.
    second.signal(Signal::KILL);
    drop(next);
    second.ended().await;
    let second = start(&store, two.path(), "two", &["--take-over=1"]);
    let owned = ["wald_term", "wald_takeovers_total"];
    assert_eq!(owned.map(|name| second.metric(name)), [3.0, 0.0]);
    assert_eq!(payloads(&mut second.wal().await).await, numbered(21));
}

#[tokio::test]
async fn take_over_that_cannot_keep_its_term_leaves_no_store_behind() {
    let store = Store::start();
    let (one, two) = (private_directory(), private_directory());
    let node = start(&store, one.path(), "one", &[]);
    replicated(&mut node.wal().await, "0").await.unwrap();
    node.signal(Signal::KILL);
    node.ended().await;
    // TERM cannot be written.
    let in_the_way = two.path().join("TERM.new");
    std::fs::create_dir(&in_the_way).unwrap();
    let (code, log) = refused(&store, two.path(), "two", &["--take-over"]);
    assert_eq!(code, Some(74), "{log}");
    assert!(log.contains("TERM"), "{log}");
    assert!(!two.path().join("FORMAT").exists());
    std::fs::remove_dir(in_the_way).unwrap();
    let node = start(&store, two.path(), "two", &["--take-over"]);
    assert_eq!(payloads(&mut node.wal().await).await, numbered(1));
    assert!(two.path().join("TERM").exists());
}

/// A busy machine can lose its store to another node while it stops.
#[tokio::test]
async fn node_that_loses_its_store_while_it_stops_names_the_new_owner() {
    let store = Store::start();
    let (one, two) = (private_directory(), private_directory());
    let first = start(&store, one.path(), "one", &["--drain-delay", "1h"]);
    let mut wal = first.wal().await;
    replicated(&mut wal, "0").await.unwrap();
    first.signal(Signal::TERM);
    first.wait_for_log("stopping: not ready any more");
    let second = start(&store, two.path(), "two", &["--take-over=1"]);
    drop(wal);
    let line = first.wait_for_log("owns the store in term");
    assert!(line.contains("\\\"two\\\""), "{line}");
    let status = tokio::time::timeout(PATIENCE, first.ended()).await.unwrap();
    assert_eq!(status.code(), Some(78));
    assert_eq!(payloads(&mut second.wal().await).await, numbered(1));
}

#[tokio::test]
async fn node_that_ends_ships_everything_and_goes_on_after_a_restart() {
    let store = Store::start();
    let directory = private_directory();
    let node = start(
        &store,
        directory.path(),
        "one",
        &["--sync-mode", "replicated"],
    );
    let mut wal = node.wal().await;
    let answer = wal.append(append("a", "0")).await.unwrap().into_inner();
    assert_eq!(answer.durability(), v1::Durability::Replicated);
    let info = v1::GetServerInfoRequest {};
    let info = node.ops().await.get_server_info(info).await.unwrap();
    let metrics = node.http("/metrics").1;
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src/metrics.md");
    let page = std::fs::read_to_string(page).unwrap();
    for name in metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
    {
        let name = format!("| `{}` |", name.split(' ').next().unwrap());
        assert!(page.contains(&name), "{name} is not in docs/src/metrics.md");
    }
    let stored = "wald_replica_uploads_total{kind=\"rows\",result=\"ok\"}";
    assert!(node.metric(stored) >= 1.0 && node.metric("wald_tail_rows") >= 1.0);
    let modes: Vec<_> = info.get_ref().sync_modes().collect();
    assert!(modes.contains(&v1::SyncMode::Replicated), "{modes:?}");
    let durable = request("1", v1::Durability::Durable);
    wal.append(durable).await.unwrap();
    node.signal(Signal::TERM);
    drop(wal);
    node.wait_for_log("the bucket has everything");
    assert!(node.ended().await.success());
    let record = store.text("wald/orders/shards/0/owner");
    assert!(record.contains("\"released\""), "{record}");

    let copy = private_directory();
    let restored = ends(
        wald()
            .args(["restore", "s3://wald/orders", "--bucket-endpoint"])
            .arg(store.endpoint())
            .args(["--bucket-insecure", "--output", "json", "--data-dir"])
            .arg(copy.path()),
    );
    assert!(restored.status.success(), "{restored:?}");
    let restored: serde_json::Value = serde_json::from_slice(&restored.stdout).unwrap();
    assert_eq!(
        (&restored["replica"], &restored["records"]),
        (&"s3://wald/orders".into(), &2.into())
    );
    let copied = Daemon::start_in(copy.path(), &[]);
    assert_eq!(payloads(&mut copied.wal().await).await, numbered(2));

    let node = start(&store, directory.path(), "one", &[]);
    let mut wal = node.wal().await;
    replicated(&mut wal, "2").await.unwrap();
    // A node that is killed names itself in the record, and knows its own claim.
    node.signal(Signal::KILL);
    node.ended().await;
    let node = start(&store, directory.path(), "one", &[]);
    let mut wal = node.wal().await;
    replicated(&mut wal, "3").await.unwrap();
    assert_eq!(payloads(&mut wal).await, numbered(4));
    // Another store does not fit the bucket, and takes nothing from its owner.
    let other = private_directory();
    drop(Daemon::start_in(other.path(), &[]));
    let (code, log) = refused(&store, other.path(), "other", &["--take-over"]);
    assert_eq!(code, Some(78), "{log}");
    assert!(log.contains("has the replica of the store"), "{log}");
    replicated(&mut wal, "4").await.unwrap();
}

#[tokio::test]
async fn without_an_answer_of_the_bucket_durable_goes_on_up_to_the_lag() {
    let store = Store::start();
    let directory = private_directory();
    let node = start(
        &store,
        directory.path(),
        "one",
        &["--replica-max-lag", "1MiB"],
    );
    let mut wal = node.wal().await;
    replicated(&mut wal, "begin").await.unwrap();
    wal.append(append("b", "the log is made")).await.unwrap();
    store.enter(Mood::Hangs);
    let hung = Instant::now();
    let mut waiting = node.wal().await;
    let waiting = tokio::spawn(async move { replicated(&mut waiting, "waits").await });
    let large = "x".repeat(100_000);
    let refusal = loop {
        let batch = v1::AppendBatchRequest {
            batches: vec![part("b", &[&large])],
            durability: v1::Durability::Durable.into(),
            ..v1::AppendBatchRequest::default()
        };
        match wal.append_batch(batch).await {
            Ok(answer) => {
                assert_eq!(answer.get_ref().durability(), v1::Durability::Durable);
            }
            Err(refusal) => break refusal,
        }
    };
    let told = Told::of(&refusal);
    assert_eq!(
        (told.code, &*told.reason),
        (Code::ResourceExhausted, "BUSY")
    );
    assert_eq!(told.facts["resource"], "replica lag");
    let lag = ["wald_replica_lag_bytes", "wald_replica_lag_limit_bytes"];
    let [lag, limit] = lag.map(|name| node.metric(name));
    assert!(limit == 1_048_576.0 && lag > limit, "{lag} of {limit}");
    // It waits as long as the bucket may be slow.
    assert!(!waiting.is_finished() || hung.elapsed() > Duration::from_secs(10));
    store.enter(Mood::Answers);
    let waited = waiting.await.unwrap();
    match waited {
        Ok(answer) => assert_eq!(answer.durability(), v1::Durability::Replicated),
        Err(unknown) => {
            assert_eq!(Told::of(&unknown).reason, "REPLICATION_UNKNOWN");
            assert!(hung.elapsed() > Duration::from_secs(10), "{unknown:?}");
        }
    }
    let resumed = Instant::now();
    while let Err(refusal) = replicated(&mut wal, "end").await {
        let reason = Told::of(&refusal).reason;
        assert!(["BUSY", "BUCKET_DOWN"].contains(&&*reason), "{refusal:?}");
        assert!(resumed.elapsed() < PATIENCE, "{refusal:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(payloads(&mut wal).await, ["begin", "waits", "end"]);
}

/// The replica as GetServerInfo has it.
async fn shown(node: &Daemon) -> v1::ReplicaStatus {
    let info = v1::GetServerInfoRequest {};
    let info = node.ops().await.get_server_info(info).await.unwrap();
    info.into_inner().replica.unwrap()
}

/// Waits until the replica is as it should be.
async fn shown_as(node: &Daemon, holds: impl Fn(&v1::ReplicaStatus) -> bool) -> v1::ReplicaStatus {
    let since = Instant::now();
    loop {
        let now = shown(node).await;
        if holds(&now) {
            return now;
        }
        assert!(since.elapsed() < PATIENCE, "{now:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn server_and_console_show_the_replica_its_lag_and_its_state() {
    let store = Store::start();
    let directory = private_directory();
    // A marker of the idle journal would be lag, too.
    let more = ["--console", "on", "--marker-delay", "1h"];
    let node = start(&store, directory.path(), "one", &more);
    let mut wal = node.wal().await;
    replicated(&mut wal, "0").await.unwrap();
    // The write is measured right after its answer.
    let settled = shown_as(&node, |now| now.put_p50.is_some()).await;
    assert_eq!(settled.bucket_url, "s3://wald/orders");
    assert_eq!((&*settled.node_id, settled.term), ("one", 1));
    assert_eq!(settled.state(), v1::ReplicaState::Serving);
    assert_eq!((settled.lag_bytes, settled.lag_records), (0, 0));
    assert_eq!(settled.max_lag_bytes, 64 << 20);
    assert!(settled.replicated_position > 0 && settled.put_p99.is_some());

    store.enter(Mood::Hangs);
    let batch = v1::AppendBatchRequest {
        batches: vec![part("a", &["1", "2"]), part("b", &["3"])],
        durability: v1::Durability::Durable.into(),
        ..v1::AppendBatchRequest::default()
    };
    wal.append_batch(batch).await.unwrap();
    let behind = shown(&node).await;
    assert_eq!(behind.replicated_position, settled.replicated_position);
    assert!(behind.lag_bytes > 0);
    assert_eq!(behind.lag_records, 3);
    assert_eq!(node.metric("wald_replica_lag_records"), 3.0);
    let console: serde_json::Value =
        serde_json::from_str(&node.http("/console/api/server").1).unwrap();
    let place = &console["store"]["replica"];
    assert_eq!(
        (&place["bucket_url"], &place["node_id"]),
        (&"s3://wald/orders".into(), &"one".into())
    );
    let live = &console["state"]["replica"];
    assert_eq!(
        (&live["state"], &live["term"]),
        (&"serving".into(), &1.into())
    );
    assert_eq!(live["lag_records"], 3);
    assert_eq!(live["lag_bytes"], behind.lag_bytes);

    // A request makes the shipper send them, and the bucket gives no answer.
    let mut waiting = node.wal().await;
    let waiting = tokio::spawn(async move { replicated(&mut waiting, "4").await });
    let down = shown_as(&node, |now| now.state() == v1::ReplicaState::BucketDown).await;
    assert!(down.lag_age.unwrap().seconds >= 5, "{down:?}");
    let unknown = waiting.await.unwrap().unwrap_err();
    assert_eq!(Told::of(&unknown).reason, "REPLICATION_UNKNOWN");
    store.enter(Mood::Answers);
    let up = shown_as(&node, |now| now.state() == v1::ReplicaState::Serving).await;
    let done = shown_as(&node, |now| now.lag_bytes == 0).await;
    assert_eq!((done.lag_records, done.term), (0, up.term));
    assert!(done.replicated_position > behind.replicated_position);
}

#[tokio::test]
async fn callers_without_the_right_ops_see_no_bucket() {
    let store = Store::start();
    let (directory, rules) = (private_directory(), private_directory());
    let file = rules.path().join("auth.toml");
    let text = "[principal.reader]\nallow = [{ do = [\"read\"], logs = \"\" }]\n\
                [principal.operator]\nallow = [{ do = [\"ops\"] }]\n";
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    let file = file.to_str().unwrap();
    let [reader, operator] = ["reader", "operator"].map(|principal| {
        let made = ends(
            wald()
                .args(["token", "create", "--auth-file", file, "--principal"])
                .arg(principal),
        );
        String::from_utf8(made.stdout).unwrap().trim().to_owned()
    });
    let node = start(&store, directory.path(), "one", &["--auth-file", file]);
    let seen_by = async |token: &str| {
        let mut request = Request::new(v1::GetServerInfoRequest {});
        let value = format!("Bearer {token}").parse().unwrap();
        request.metadata_mut().insert("authorization", value);
        let info = node.ops().await.get_server_info(request).await.unwrap();
        info.into_inner()
    };
    let hidden = seen_by(&reader).await;
    assert!(hidden.replica.is_none());
    // The level is known to everybody.
    let mut modes = hidden.sync_modes();
    assert!(modes.any(|mode| mode == v1::SyncMode::Replicated));
    let place = seen_by(&operator).await.replica.unwrap().bucket_url;
    assert_eq!(place, "s3://wald/orders");
}

#[tokio::test]
async fn full_segments_go_to_the_bucket_as_files_and_come_back() {
    let store = Store::start();
    let (one, two) = (private_directory(), private_directory());
    let first = start(&store, one.path(), "one", &[]);
    let mut wal = first.wal().await;
    let large = "x".repeat(60_000);
    for number in 0..100 {
        replicated(&mut wal, &format!("{number} {large}"))
            .await
            .unwrap();
    }
    let since = Instant::now();
    while store.names("wald/orders/shards/0/manifests/").is_empty() {
        assert!(since.elapsed() < PATIENCE, "no manifest");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    first.signal(Signal::KILL);
    first.ended().await;
    let second = start(&store, two.path(), "two", &["--take-over"]);
    let found = payloads(&mut second.wal().await).await;
    let numbers: Vec<_> = found.iter().map(|text| text.split(' ').next()).collect();
    assert_eq!(numbers.len(), 100);
    assert!(
        numbers
            .iter()
            .zip(numbered(100))
            .all(|(a, b)| *a == Some(&*b))
    );
}

#[tokio::test]
async fn refused_take_over_of_an_old_directory_ends_no_healthy_owner() {
    let store = Store::start();
    let (one, old) = (private_directory(), private_directory());
    let node = start(&store, one.path(), "one", &[]);
    replicated(&mut node.wal().await, "0").await.unwrap();
    node.signal(Signal::TERM);
    assert!(node.ended().await.success());
    copy(one.path(), old.path());
    let term = old.path().join("TERM");
    std::fs::remove_file(&term).unwrap();
    let node = start(&store, one.path(), "one", &[]);
    let mut wal = node.wal().await;
    replicated(&mut wal, "1").await.unwrap();
    let (code, log) = refused(&store, old.path(), "two", &["--take-over"]);
    assert_eq!(code, Some(78), "{log}");
    assert!(log.contains("lacks a part of the journal"), "{log}");
    replicated(&mut wal, "2").await.unwrap();
    // A term that cannot be read is neither none nor a reason to claim.
    std::fs::write(&term, "wald term\n").unwrap();
    let (code, log) = refused(&store, old.path(), "two", &["--take-over"]);
    assert_eq!(code, Some(74), "{log}");
    assert!(
        log.contains(term.to_str().unwrap()) && log.contains("damaged"),
        "{log}"
    );
    assert_eq!(std::fs::read(&term).unwrap(), b"wald term\n");
    // A directory that no restore takes is refused before the claim, too.
    let used = private_directory();
    std::fs::write(used.path().join("BACKUP"), "").unwrap();
    let (code, log) = refused(&store, used.path(), "three", &["--take-over"]);
    assert_eq!(code, Some(78), "{log}");
    assert!(log.contains("is not empty"), "{log}");
    replicated(&mut wal, "3").await.unwrap();
    assert_eq!(payloads(&mut wal).await, numbered(4));
    assert_eq!(node.metric("wald_term"), 2.0);
}

/// Arguments of a node whose files are uploaded after few records, and leave the bucket at once.
const SMALL: [&str; 8] = [
    "--segment-bytes",
    "128KiB",
    "--max-batch-bytes",
    "32KiB",
    "--max-record-bytes",
    "16KiB",
    "--replica-keep",
    "1ms",
];

const CONTENT: &str = "wald/orders/shards/0/content/";
const MANIFESTS: &str = "wald/orders/shards/0/manifests/";

/// Number of records of 10 kB that fill two segments, and not four more: the next upload is a minute away, so that an owner that is
/// killed leaves no manifest that does not count.
const FILES_ONCE: usize = 30;

/// Appends this number of records of 10 kB, which begin with their number.
async fn fill(wal: &mut WalServiceClient<Channel>, from: usize, count: usize) {
    let large = "x".repeat(10_000);
    for number in from..from + count {
        replicated(wal, &format!("{number} {large}")).await.unwrap();
    }
}

/// The numbers of records that [`fill`] made.
async fn filled(wal: &mut WalServiceClient<Channel>) -> Vec<String> {
    let found = payloads(wal).await;
    let number = |text: &String| text.split(' ').next().unwrap().to_owned();
    found.iter().map(number).collect()
}

#[tokio::test]
async fn take_over_that_was_cut_off_goes_on_at_the_next_start() {
    let store = Store::start();
    let (one, two) = (private_directory(), private_directory());
    let node = start(&store, one.path(), "one", &SMALL);
    fill(&mut node.wal().await, 0, 60).await;
    until_store("a manifest", || !store.names(MANIFESTS).is_empty()).await;
    node.signal(Signal::KILL);
    node.ended().await;
    // A kill in the middle of the fetch leaves these files.
    let mark = two.path().join("RESTORING");
    std::fs::write(&mark, "a take-over is not finished\n").unwrap();
    std::fs::write(two.path().join("LOCK"), "").unwrap();
    std::fs::create_dir(two.path().join("journal")).unwrap();
    let half = two.path().join("journal/0000000000000001.seg");
    std::fs::write(half, [7; 5000]).unwrap();
    let taken = [&SMALL[..], &["--take-over=1"]].concat();
    // Without the option it is refused, as an empty directory is.
    let (code, log) = refused(&store, two.path(), "two", &SMALL);
    assert_eq!(code, Some(78), "{log}");
    let next = start(&store, two.path(), "two", &taken);
    assert_eq!(filled(&mut next.wal().await).await, numbered(60));
    assert!(!mark.exists());
    // The files of a copy are a person's: nothing removes them.
    let copy = private_directory();
    std::fs::write(copy.path().join("RESTORING"), "a restore is not finished\n").unwrap();
    let (code, log) = refused(&store, copy.path(), "three", &["--take-over"]);
    assert_eq!(code, Some(78), "{log}");
    assert!(log.contains("is not empty: RESTORING is there"), "{log}");
    assert!(copy.path().join("RESTORING").exists());
}

/// Waits until this holds.
async fn until_store(what: &str, mut holds: impl FnMut() -> bool) {
    let since = Instant::now();
    while !holds() {
        assert!(since.elapsed() < PATIENCE, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Names of the content that the newest manifest lists. The bucket also has files that wait for their removal.
fn listed(store: &Store) -> Vec<String> {
    let newest = store.names(MANIFESTS).pop().unwrap();
    let mut files = Vec::new();
    store.change(&newest, |bytes| {
        files = wald_proto::backup::decode(&bytes).unwrap().manifest.files;
        Some(bytes)
    });
    let is_listed = |name: &String| {
        let (_, digest) = name.rsplit_once('/').unwrap();
        let digest = wald_storage::ContentDigest::from_name(digest).unwrap();
        files.iter().any(|file| file.digest == digest.to_bytes())
    };
    let mut names = store.names(CONTENT);
    names.retain(is_listed);
    assert!(!names.is_empty(), "{newest} lists no content");
    names
}

/// Runs a command of `wald` on the bucket: its exit code, stdout and stderr.
fn command(store: &Store, words: &[&str]) -> (Option<i32>, String, String) {
    let output = ends(
        wald()
            .arg(words[0])
            .arg("s3://wald/orders")
            .args(["--bucket-insecure", "--bucket-endpoint"])
            .arg(store.endpoint())
            .args(&words[1..]),
    );
    let [out, log] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    (output.status.code(), out, log)
}

#[tokio::test]
async fn copy_begins_again_when_the_owner_removes_files_meanwhile() {
    let store = Arc::new(Store::start());
    let one = private_directory();
    let node = start(&store, one.path(), "one", &SMALL);
    let mut wal = node.wal().await;
    fill(&mut wal, 0, 60).await;
    until_store("a manifest", || !store.names(MANIFESTS).is_empty()).await;
    store.hold(vec!["/content/".to_owned()]);
    let copy = private_directory();
    let (server, target) = (Arc::clone(&store), copy.path().to_str().unwrap().to_owned());
    let restoring =
        tokio::task::spawn_blocking(move || command(&server, &["restore", "--data-dir", &target]));
    until_store("the copy reads files", || !store.held().is_empty()).await;
    // The owner goes on until it has removed a file of the manifest that the copy reads.
    let first = listed(&store);
    let (mut next, begun) = (60, Instant::now());
    loop {
        let there = store.names(CONTENT);
        if first.iter().any(|name| !there.contains(name)) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "no file is removed");
        fill(&mut wal, next, 10).await;
        next += 10;
    }
    store.hold(Vec::new());
    let (code, out, log) = restoring.await.unwrap();
    assert_eq!(code, Some(0), "{out} {log}");
    assert!(log.contains("the copy begins again"), "{log}");
    let copied = Daemon::start_in(copy.path(), &[]);
    assert_eq!(filled(&mut copied.wal().await).await, numbered(next));
}

#[tokio::test]
async fn replica_is_verified_and_its_faults_are_named() {
    let store = Store::start();
    let one = private_directory();
    let node = start(&store, one.path(), "one", &SMALL);
    let mut wal = node.wal().await;
    fill(&mut wal, 0, FILES_ONCE).await;
    until_store("a manifest", || !store.names(MANIFESTS).is_empty()).await;
    fill(&mut wal, FILES_ONCE, 5).await;
    node.signal(Signal::KILL);
    node.ended().await;
    let (code, out, log) = command(&store, &["verify"]);
    assert_eq!(code, Some(0), "{out} {log}");
    assert!(out.contains("nothing is wrong"), "{out}");
    let (_, out, _) = command(&store, &["verify", "--output", "json"]);
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(found["whole"], true, "{found}");
    assert_eq!(found["replica"], "s3://wald/orders", "{found}");
    let row_bytes = found["row_bytes"].as_u64().unwrap();
    assert!(row_bytes >= 50_000, "{found}");

    let damage = |name: &String| {
        store.change(name, |mut content| {
            content[9] ^= 1;
            Some(content)
        });
    };
    let bad = listed(&store).remove(0);
    damage(&bad);
    let (code, out, log) = command(&store, &["verify"]);
    assert_eq!(code, Some(5), "{out} {log}");
    let shown = bad.strip_prefix("wald/orders/").unwrap();
    assert!(
        out.contains("1 files are bad") && log.contains(shown),
        "{out} {log}"
    );
    damage(&bad);
    assert_eq!(command(&store, &["verify"]).0, Some(0));
}

#[tokio::test]
async fn missing_row_of_a_replica_is_found_by_verify() {
    let store = Store::start();
    let one = private_directory();
    let node = start(&store, one.path(), "one", &[]);
    let mut wal = node.wal().await;
    for payload in numbered(9) {
        replicated(&mut wal, &payload).await.unwrap();
    }
    node.signal(Signal::KILL);
    node.ended().await;
    let (code, out, log) = command(&store, &["verify"]);
    assert_eq!(code, Some(0), "{out} {log}");
    let rows = store.names("wald/orders/shards/0/db/wal/");
    store.change(&rows[rows.len() - 4], |_| None);
    let (code, out, log) = command(&store, &["verify"]);
    assert_eq!(code, Some(5), "{out} {log}");
    assert!(log.contains("hole"), "{log}");
}

#[tokio::test]
async fn copy_as_of_a_position_has_records_producers_and_fences_of_then() {
    let store = Store::start();
    let one = private_directory();
    let node = start(&store, one.path(), "one", &SMALL[..6]);
    let mut wal = node.wal().await;
    let by = |sequence: u64| v1::AppendRequest {
        condition: Some(v1::AppendCondition {
            writer_epoch: Some(sequence),
            producer: Some(v1::Producer {
                id: "p".to_owned(),
                sequence,
                ..v1::Producer::default()
            }),
            ..v1::AppendCondition::default()
        }),
        ..request(&sequence.to_string(), v1::Durability::Replicated)
    };
    let mut positions = Vec::new();
    for sequence in 0..6 {
        wal.append(by(sequence)).await.unwrap();
        let fence = v1::FenceRequest {
            log: "a".to_owned(),
            ..v1::FenceRequest::default()
        };
        let fenced = wal.fence(fence).await.unwrap().into_inner();
        assert_eq!(fenced.writer_epoch, Some(sequence + 1));
        let synced = wal.sync(v1::SyncRequest::default()).await.unwrap();
        positions.push(synced.into_inner().durable_position.unwrap());
        // Files hold a part of the store, rows the rest.
        for _ in 0..20 {
            let filler = v1::AppendRequest {
                log: "filler".to_owned(),
                ..request(&"x".repeat(10_000), v1::Durability::Replicated)
            };
            wal.append(filler).await.unwrap();
        }
    }
    until_store("a manifest", || !store.names(MANIFESTS).is_empty()).await;
    for (done, position) in positions.iter().enumerate() {
        let copy = private_directory();
        let at = position.to_string();
        let directory = copy.path().to_str().unwrap();
        let words = ["restore", "--at-position", &at, "--data-dir", directory];
        let (code, out, log) = command(&store, &words);
        assert_eq!(code, Some(0), "{out} {log}");
        let copied = Daemon::start_in(copy.path(), &[]);
        let mut wal = copied.wal().await;
        assert_eq!(payloads(&mut wal).await, numbered(done + 1));
        for sequence in 0..=done as u64 {
            let mut again = by(sequence);
            again.durability = v1::Durability::Durable.into();
            let again = wal.append(again).await.unwrap().into_inner();
            assert!(again.deduplicated, "{sequence} at {at}");
        }
        let of_epoch = |epoch| v1::AppendRequest {
            condition: Some(v1::AppendCondition {
                writer_epoch: Some(epoch),
                ..v1::AppendCondition::default()
            }),
            ..append("a", "new")
        };
        let fences = done as u64 + 1;
        let stale = wal.append(of_epoch(fences - 1)).await.unwrap_err();
        assert_eq!(Told::of(&stale).reason, "FENCED", "{stale:?}");
        wal.append(of_epoch(fences)).await.unwrap();
    }
    // Positions outside: the error names the range, and its ends can be had.
    let mut range = None;
    for outside in ["8", "4000000000000"] {
        let copy = private_directory();
        let directory = copy.path().to_str().unwrap();
        let words = ["restore", "--at-position", outside, "--data-dir", directory];
        let (code, _, log) = command(&store, &words);
        assert_eq!(code, Some(2), "{log}");
        let (_, rest) = log.split_once("as of the positions ").unwrap();
        let mut words = rest.split([' ', ';']);
        let found = [words.next(), words.nth(1)].map(|word| word.unwrap().to_owned());
        assert_eq!(*range.get_or_insert(found.clone()), found, "{log}");
        assert_eq!(
            std::fs::read_dir(copy.path().join("journal")).map_or(0, Iterator::count),
            0
        );
    }
    for end in range.unwrap() {
        let copy = private_directory();
        let directory = copy.path().to_str().unwrap();
        let words = ["restore", "--at-position", &end, "--data-dir", directory];
        let (code, out, log) = command(&store, &words);
        assert_eq!(code, Some(0), "{end}: {out} {log}");
    }
}

#[tokio::test]
async fn credentials_are_read_again_on_sighup_and_after_a_refusal() {
    let store = Store::start();
    let (directory, secrets) = (private_directory(), private_directory());
    let file = secrets.path().join("credentials");
    let give = |key: &str| {
        let text = format!("aws_access_key_id = {key}\naws_secret_access_key = s\n");
        std::fs::write(&file, text).unwrap();
        let owner = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&file, owner).unwrap();
    };
    give("first");
    store.accept(&["first"]);
    let path = file.to_str().unwrap();
    let node = start(
        &store,
        directory.path(),
        "one",
        &["--bucket-credentials-file", path],
    );
    let mut wal = node.wal().await;
    replicated(&mut wal, "0").await.unwrap();
    // The file has the new key when the old one is refused.
    give("second");
    store.accept(&["second"]);
    replicated(&mut wal, "1").await.unwrap();
    let refusals = store.refusals();
    assert!(refusals > 0);
    // A signal changes the key before the old one is refused.
    give("third");
    store.accept(&["second", "third"]);
    node.signal(Signal::HUP);
    node.wait_for_log("the credentials of the bucket were read again");
    replicated(&mut wal, "2").await.unwrap();
    store.accept(&["third"]);
    replicated(&mut wal, "3").await.unwrap();
    assert_eq!(store.refusals(), refusals);
    // A file that cannot be used changes nothing.
    std::fs::write(&file, "nonsense").unwrap();
    node.signal(Signal::HUP);
    node.wait_for_log("the earlier ones stay");
    replicated(&mut wal, "4").await.unwrap();
    // The old key is refused for a while before the file has the new one.
    store.accept(&["fourth"]);
    until_store("the old key is refused", || store.refusals() > refusals).await;
    give("fourth");
    let begun = Instant::now();
    while let Err(refusal) = replicated(&mut wal, "5").await {
        let reason = Told::of(&refusal).reason;
        let waits = ["REPLICATION_UNKNOWN", "BUCKET_DOWN"];
        assert!(waits.contains(&&*reason), "{refusal:?}");
        assert!(begun.elapsed() < PATIENCE, "{refusal:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let found = payloads(&mut wal).await;
    assert_eq!(found[..5], numbered(5));
    assert!(found.len() >= 6);
}

/// Copies a data directory that nobody uses.
fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp")
        .arg("-a")
        .arg(from.join("."))
        .arg(to)
        .status();
    assert!(copied.unwrap().success());
}

#[test]
fn start_is_refused_without_a_bucket_or_an_answer_of_it() {
    let directory = private_directory();
    let command = |arguments: &[&str]| {
        let output = ends(
            wald()
                .arg("--data-dir")
                .arg(directory.path())
                .args(arguments),
        );
        let log = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), log)
    };
    let (code, log) = command(&["--take-over", "--listen", ":0", "--http-listen", ":0"]);
    assert_eq!(code, Some(78), "{log}");
    assert!(log.contains("bucket_url"), "{log}");
    let (code, log) = command(&["--take-over", "verify"]);
    assert_eq!(code, Some(2), "{log}");
    let store = Store::start();
    let (code, log) = refused(&store, directory.path(), "one", &["--take-over"]);
    assert_eq!(code, Some(78), "{log}");
    assert!(log.contains("without --take-over"), "{log}");
    let (code, log) = refused(&store, directory.path(), "one", &["--create-store=false"]);
    assert_eq!(code, Some(65), "{log}");
    assert!(log.contains("create_store is false"), "{log}");
    let (code, log) = command(&["--take-over=", "--listen", ":0", "--http-listen", ":0"]);
    assert_eq!(code, Some(2), "{log}");
    assert!(log.contains("number of the term"), "{log}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}
