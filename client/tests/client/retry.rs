//! Appends are repeated when that is safe, and never otherwise.

use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::timeout;
use tonic::{Code, Request, Status};
use wald_client::{Client, ClientBuilder, ErrorKind, Lsn, Outcome, Reason, Retry, RetryPolicy};

use crate::fake::{Fake, Step, refusal};

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

/// The outcome of an append with a deadline of 50 ms, and whether to repeat it.
async fn late(builder: &ClientBuilder) -> (Outcome, Retry) {
    let client = builder.clone().connect_lazy().unwrap();
    let append = client.append("log", "x").timeout(Duration::from_millis(50));
    let error = append.await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Timeout { .. }),
        "{error:?}"
    );
    (error.outcome(), error.retry())
}

#[tokio::test]
async fn deadline_leaves_the_outcome_of_an_append_unknown() {
    // The system accepts the connection, and nobody answers on it.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let builder = Client::builder(format!("http://{}", listener.local_addr().unwrap()));
    for builder in [
        builder.clone(),
        builder.clone().share_appends(false),
        builder.interceptor(|_| Ok(Request::new(()))),
    ] {
        let late = late(&builder).await;
        assert_eq!(late, (Outcome::Unknown, Retry::SafeWithCondition));
    }
}

#[tokio::test]
async fn append_without_a_connection_is_not_applied_at_its_deadline() {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    // The system accepts a few connections, and drops the packets of further ones.
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let mut accepted = Vec::new();
    while let Ok(stream) = timeout(Duration::from_millis(50), TcpStream::connect(address)).await {
        accepted.push(stream.unwrap());
    }
    let builder = Client::builder(format!("http://{address}"));
    for builder in [builder.clone(), builder.share_appends(false)] {
        assert_eq!(late(&builder).await, (Outcome::NotApplied, Retry::Safe));
    }
}

#[tokio::test]
async fn append_that_an_interceptor_refuses_is_not_applied() {
    let (fake, endpoint) = Fake::serve(0, 0).await;
    for (status, retry) in [
        (Status::internal("no trace"), Retry::Never),
        // The next attempt may succeed.
        (Status::unavailable("no trace"), Retry::Safe),
    ] {
        let refuses = move |_| Err(status.clone());
        let builder = Client::builder(endpoint.clone()).interceptor(refuses);
        let client = builder.connect_lazy().unwrap();
        let append = client.append("log", "x").timeout(Duration::from_millis(50));
        let error = append.await.unwrap_err();
        let outcome = (error.outcome(), error.retry());
        assert_eq!(outcome, (Outcome::NotApplied, retry));
    }
    assert_eq!(fake.attempts(), 0);
}
