//! Appends are repeated when that is safe, and never otherwise.

use crate::fake::{Fake, Step, refusal};
use tonic::{Code, Status};
use wald_client::{ErrorKind, Lsn, Outcome, Reason, Retry, RetryPolicy};

const DRAINING: &[(&str, &str)] = &[("outcome", "NOT_APPLIED"), ("retry", "SAFE")];

#[tokio::test]
async fn plain_append_is_repeated_if_the_server_says_not_applied() {
    let (fake, client) = Fake::start(0, 0).await;
    fake.script([
        Step::Fail(refusal(Code::Unavailable, "DRAINING", DRAINING)),
        Step::Fail(refusal(Code::ResourceExhausted, "BUSY", DRAINING)),
        Step::Ack(7),
    ]);
    assert_eq!(client.append("log", "x").await.unwrap().lsn, Lsn::new(7));
    assert_eq!(fake.attempts(), 3);
}

#[tokio::test]
async fn plain_append_is_not_repeated_after_a_lost_connection() {
    let (fake, client) = Fake::start(0, 0).await;
    fake.script([Step::Cut]);
    let error = client.append("log", "x").await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::ConnectionLost(_)),
        "{error:?}"
    );
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert_eq!(fake.attempts(), 1);
}

#[tokio::test]
async fn plain_append_is_not_repeated_if_something_in_between_says_unavailable() {
    let (fake, client) = Fake::start(0, 0).await;
    fake.script([Step::Fail(Status::unavailable("no healthy upstream"))]);
    let error = client.append("log", "x").await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert_eq!(error.retry(), Retry::SafeWithCondition);
    assert_eq!(fake.attempts(), 1);
}

#[tokio::test]
async fn append_with_expected_lsn_is_repeated_after_a_lost_connection() {
    let (fake, client) = Fake::start(0, 0).await;
    fake.script([Step::Cut, Step::Ack(3)]);
    let ack = client.append("log", "x").expected_lsn(3).await.unwrap();
    assert_eq!(ack.lsn, Lsn::new(3));
    let requests = fake.append_requests.lock().unwrap();
    assert_eq!(requests[0], requests[1]);
}

#[tokio::test]
async fn append_of_a_producer_is_repeated_after_a_lost_connection() {
    let (fake, client) = Fake::start(0, 0).await;
    fake.script([Step::Cut, Step::Ack(3)]);
    let ack = client.append("log", "x").producer("p", 0, 0).await.unwrap();
    assert_eq!(ack.lsn, Lsn::new(3));
    let requests = fake.append_requests.lock().unwrap();
    assert_eq!(requests[0], requests[1]);
}

#[tokio::test]
async fn refusal_after_a_lost_connection_leaves_the_outcome_unknown() {
    let (fake, client) = Fake::start(0, 0).await;
    let facts = [
        ("outcome", "NOT_APPLIED"),
        ("retry", "NEVER"),
        ("actual_lsn", "4"),
    ];
    let mismatch = refusal(Code::FailedPrecondition, "POSITION_MISMATCH", &facts);
    fake.script([
        Step::Cut,
        Step::Fail(mismatch.clone()),
        Step::Fail(mismatch),
    ]);
    let echo = client.append("log", "x").expected_lsn(3).await.unwrap_err();
    assert_eq!(echo.outcome(), Outcome::Unknown);
    let first = client.append("log", "x").expected_lsn(3).await.unwrap_err();
    assert_eq!(first.outcome(), Outcome::NotApplied);
    assert_eq!(first.reason(), Some(Reason::PositionMismatch));
    assert_eq!(first.fact_number("actual_lsn"), Some(4));
}

#[tokio::test]
async fn append_gives_up_after_the_attempts_of_its_policy() {
    let (fake, client) = Fake::start(0, 0).await;
    fake.script((0..5).map(|_| Step::Fail(refusal(Code::Unavailable, "STARTING", DRAINING))));
    let error = client.append("log", "x").await.unwrap_err();
    assert_eq!(error.reason(), Some(Reason::Starting));
    assert_eq!(fake.attempts(), 5);
}

#[tokio::test]
async fn connection_that_was_never_made_means_not_applied() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let client = wald_client::Client::builder(endpoint)
        .retry(RetryPolicy {
            max_attempts: 2,
            ..RetryPolicy::default()
        })
        .connect_lazy()
        .unwrap();
    let error = client.append("log", "x").await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Connect { .. }),
        "{error:?}"
    );
    assert_eq!(
        (error.outcome(), error.retry()),
        (Outcome::NotApplied, Retry::Safe)
    );
}

#[tokio::test]
async fn deadline_leaves_the_outcome_of_an_append_unknown() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let client = wald_client::Client::builder(endpoint)
        .connect_lazy()
        .unwrap();
    let timeout = std::time::Duration::from_millis(50);
    let error = client
        .append("log", "x")
        .timeout(timeout)
        .await
        .unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Timeout { .. }),
        "{error:?}"
    );
    assert_eq!(error.outcome(), Outcome::Unknown);
}
