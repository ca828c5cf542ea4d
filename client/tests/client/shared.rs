//! Appends that are made at the same time share a stream, and are answered each for itself.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinSet;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};
use wald_client::{Client, ClientBuilder, ErrorKind, Lsn, Outcome, RetryPolicy};

use crate::fake::refusal;
use crate::memory::{Fault, Memory};

const NOT_APPLIED: &[(&str, &str)] = &[("outcome", "NOT_APPLIED"), ("retry", "SAFE")];
const REFUSED: &[(&str, &str)] = &[("outcome", "NOT_APPLIED"), ("retry", "NEVER")];
const UNKNOWN: &[(&str, &str)] = &[("outcome", "UNKNOWN"), ("retry", "NEVER")];

fn builder(endpoint: String) -> ClientBuilder {
    Client::builder(endpoint).retry(RetryPolicy {
        first_pause: Duration::from_millis(1),
        ..RetryPolicy::default()
    })
}

async fn start() -> (Arc<Memory>, Client) {
    let (memory, endpoint) = Memory::start().await;
    (memory, builder(endpoint).connect().await.unwrap())
}

fn script(memory: &Memory, faults: impl IntoIterator<Item = Fault>) {
    memory.faults.lock().unwrap().extend(faults);
}

fn streams(memory: &Memory) -> usize {
    memory.sessions.load(Ordering::Relaxed)
}

/// Appends made at the same time; returns the lsns in order.
async fn append_all(client: &Client, count: u64) -> Vec<Lsn> {
    let mut appends = JoinSet::new();
    for number in 0..count {
        let append = client.append("log", number.to_string());
        appends.spawn(async move { append.await.unwrap().lsn });
    }
    let mut lsns = appends.join_all().await;
    lsns.sort_unstable();
    lsns
}

#[tokio::test]
async fn concurrent_appends_of_all_clones_are_one_stream() {
    let (memory, client) = start().await;
    assert_eq!(
        append_all(&client, 500).await,
        (0..500).map(Lsn::new).collect::<Vec<_>>()
    );
    let batch = client.clone().append_batch().log("other", ["a", "b"]);
    assert_eq!(batch.await.unwrap().appends[0].next_lsn, Lsn::new(2));
    assert_eq!((streams(&memory), memory.calls()), (1, 1));
}

#[tokio::test]
async fn refused_append_gets_its_error_and_others_their_acks() {
    let (memory, client) = start().await;
    let not_found = refusal(Code::NotFound, "LOG_NOT_FOUND", REFUSED);
    script(&memory, [Fault::None, Fault::Fail(not_found), Fault::None]);
    let ask = |text: &'static str| client.append("log", text).into_future();
    let (first, second, third) = tokio::join!(ask("1"), ask("2"), ask("3"));
    assert_eq!(
        (first.unwrap().lsn, third.unwrap().lsn),
        (Lsn::new(0), Lsn::new(1))
    );
    let error = second.unwrap_err();
    assert_eq!(
        (error.code(), error.outcome()),
        (Code::NotFound, Outcome::NotApplied)
    );
    assert_eq!(streams(&memory), 1);
}

#[tokio::test]
async fn late_answer_of_one_append_holds_up_no_other() {
    let (memory, client) = start().await;
    let go = Arc::new(Notify::new());
    script(&memory, [Fault::Wait(Arc::clone(&go))]);
    let slow = tokio::spawn(client.append("log", "slow").into_future());
    while streams(&memory) == 0 || !memory.faults.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    assert_eq!(append_all(&client, 20).await.len(), 20);
    assert!(!slow.is_finished());
    go.notify_one();
    assert_eq!(slow.await.unwrap().unwrap().lsn, Lsn::new(20));
}

#[tokio::test]
async fn lost_connection_leaves_plain_appends_unknown_and_repeats_guarded_ones() {
    let (memory, endpoint) = Memory::start_behind_proxy().await;
    let client = builder(endpoint).connect().await.unwrap();
    script(&memory, [Fault::Withhold, Fault::Withhold, Fault::Cut]);
    let guarded = client.append("log", "b").expected_lsn(1).into_future();
    let plain = client.append("log", "a").into_future();
    let cut = client.append("log", "c").into_future();
    let (plain, guarded, cut) = tokio::join!(plain, guarded, cut);
    assert_eq!(plain.unwrap_err().outcome(), Outcome::Unknown);
    let error = cut.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::ConnectionLost(_)),
        "{error:?}"
    );
    // Its repeat met the record of its first attempt.
    let error = guarded.unwrap_err();
    assert_eq!(error.reason().unwrap().as_str(), "POSITION_MISMATCH");
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert_eq!(client.append("log", "d").await.unwrap().lsn, Lsn::new(2));
    assert_eq!(streams(&memory), 2);
}

#[tokio::test]
async fn server_that_leaves_ends_the_stream_and_appends_go_on_with_another() {
    let (memory, client) = start().await;
    let draining = refusal(Code::Unavailable, "DRAINING", NOT_APPLIED);
    script(&memory, [Fault::None, Fault::End(draining)]);
    assert_eq!(
        append_all(&client, 100).await,
        (0..100).map(Lsn::new).collect::<Vec<_>>()
    );
    assert_eq!(streams(&memory), 2);
}

#[tokio::test]
async fn message_that_ends_the_stream_costs_no_other_append_its_answer() {
    let (memory, client) = start().await;
    let bad = refusal(Code::InvalidArgument, "REQUEST_TOO_LARGE", REFUSED);
    script(&memory, [Fault::None, Fault::End(bad)]);
    assert_eq!(
        append_all(&client, 100).await,
        (0..100).map(Lsn::new).collect::<Vec<_>>()
    );
    // Each is a call of its own now.
    let calls = memory.calls();
    append_all(&client, 10).await;
    assert_eq!((streams(&memory), memory.calls()), (1, calls + 10));
}

/// A proxy does not know which requests the server has applied.
#[tokio::test]
async fn end_of_the_stream_without_walds_word_leaves_appends_unknown() {
    let foreign = |code| {
        let facts: HashMap<String, String> = REFUSED
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_string()))
            .collect();
        let details = ErrorDetails::with_error_info("NO", "mesh.example", facts);
        Status::with_error_details(code, "refused by a proxy", details)
    };
    for status in [
        Status::invalid_argument("no"),
        foreign(Code::InvalidArgument),
        foreign(Code::Aborted),
        refusal(Code::InvalidArgument, "NEW_REASON", UNKNOWN),
    ] {
        let (memory, client) = start().await;
        let code = status.code();
        script(&memory, [Fault::Withhold, Fault::End(status)]);
        let ask = |text: &'static str| client.append("log", text).into_future();
        let (first, second) = tokio::join!(ask("1"), ask("2"));
        for error in [first.unwrap_err(), second.unwrap_err()] {
            assert_eq!((error.code(), error.outcome()), (code, Outcome::Unknown));
        }
        // Nothing was sent again.
        assert_eq!((streams(&memory), memory.calls()), (1, 1));
    }
}

/// A server of an earlier version takes no independent requests: it ends the stream at the first refusal.
#[tokio::test]
async fn refusal_that_ends_the_stream_is_given_to_nobody_else() {
    let (memory, client) = start().await;
    let facts = [REFUSED, &[("request_id", "1")]].concat();
    let mismatch = refusal(Code::FailedPrecondition, "POSITION_MISMATCH", &facts);
    script(&memory, [Fault::None, Fault::End(mismatch)]);
    assert_eq!(
        append_all(&client, 100).await,
        (0..100).map(Lsn::new).collect::<Vec<_>>()
    );
    assert_eq!(streams(&memory), 1);
}

#[tokio::test]
async fn append_that_timed_out_leaves_no_trace_in_the_stream() {
    let (memory, client) = start().await;
    let go = Arc::new(Notify::new());
    script(&memory, [Fault::Wait(Arc::clone(&go))]);
    let late = client
        .append("log", "late")
        .timeout(Duration::from_millis(50));
    let error = late.await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Timeout { .. }),
        "{error:?}"
    );
    assert_eq!(error.outcome(), Outcome::Unknown);
    go.notify_one();
    assert_eq!(append_all(&client, 10).await.len(), 10);
    assert_eq!(streams(&memory), 1);
}

#[tokio::test]
async fn some_appends_are_calls_of_their_own() {
    let (memory, endpoint) = Memory::start().await;
    let shared = builder(endpoint.clone()).connect().await.unwrap();
    shared.append("log", vec![0; 65 << 10]).await.unwrap();
    let off = builder(endpoint.clone()).share_appends(false);
    off.connect()
        .await
        .unwrap()
        .append("log", "x")
        .await
        .unwrap();
    let intercepted = builder(endpoint).interceptor(Ok);
    intercepted
        .connect()
        .await
        .unwrap()
        .append("log", "x")
        .await
        .unwrap();
    assert_eq!((streams(&memory), memory.calls()), (0, 3));
}

#[tokio::test]
async fn idle_stream_is_closed_and_the_next_append_opens_another() {
    let (memory, client) = start().await;
    client.append("log", "x").await.unwrap();
    assert_eq!(memory.open_sessions(), 1);
    tokio::time::timeout(Duration::from_secs(20), async {
        while memory.open_sessions() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("it is closed");
    client.append("log", "y").await.unwrap();
    assert_eq!(streams(&memory), 2);
}

#[tokio::test]
async fn stream_ends_with_the_last_clone_of_the_client() {
    let (memory, client) = start().await;
    let clone = client.clone();
    client.append("log", "x").await.unwrap();
    drop(client);
    clone.append("log", "y").await.unwrap();
    assert_eq!((streams(&memory), memory.open_sessions()), (1, 1));
    drop(clone);
    tokio::time::timeout(Duration::from_millis(900), async {
        while memory.open_sessions() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("it ends at once");
}
