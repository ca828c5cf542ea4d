//! Appenders and producers: order, outcomes after a failure, and repeats.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::memory::{Fault, Memory, refuse};
use futures_util::FutureExt;
use tokio::sync::Notify;
use tonic::Code;
use wald_client::{
    Client, Condition, ErrorKind, Lsn, Outcome, Producer, Reason, Retry, RetryPolicy,
};

pub(crate) async fn start() -> (Arc<Memory>, Client) {
    let (memory, endpoint) = Memory::start_behind_proxy().await;
    let client = Client::builder(endpoint).retry(RetryPolicy {
        first_pause: Duration::from_millis(1),
        max_pause: Duration::from_millis(5),
        ..RetryPolicy::default()
    });
    (memory, client.connect().await.unwrap())
}

fn busy() -> Fault {
    let facts = [("retry", "SAFE".to_owned())];
    Fault::Fail(refuse(Code::ResourceExhausted, "BUSY", &facts))
}

fn too_large() -> Fault {
    Fault::Fail(refuse(Code::InvalidArgument, "RECORD_TOO_LARGE", &[]))
}

pub(crate) fn numbers(range: std::ops::Range<u64>) -> Vec<String> {
    range.map(|number| number.to_string()).collect()
}

/// Appends the numbers as batches of one, all in flight together, and waits for all acks.
async fn produce(producer: &Producer, range: std::ops::Range<u64>) {
    let mut acks = Vec::new();
    for number in numbers(range.clone()) {
        acks.push(producer.append_batch([number]).await.unwrap());
    }
    for (number, ack) in range.zip(acks) {
        assert_eq!(ack.await.unwrap().first_lsn, Lsn::new(number));
    }
}

#[tokio::test]
async fn producer_appends_once_and_in_order_whatever_is_lost() {
    let (memory, client) = start().await;
    memory.script((0..60).map(|step| match step % 6 {
        1 => Fault::Withhold,
        2 | 5 => Fault::Cut,
        3 => busy(),
        _ => Fault::None,
    }));
    let producer = client.producer("log").open().await.unwrap();
    produce(&producer, 0..100).await;
    assert!(memory.faults.lock().unwrap().is_empty());
    assert!(memory.sessions.load(Ordering::Relaxed) > 30);
    assert_eq!(memory.payloads("log"), numbers(0..100));
    producer.close().await.unwrap();
}

#[tokio::test]
async fn producer_is_told_of_the_original_if_only_the_answer_was_lost() {
    let (memory, client) = start().await;
    memory.script([Fault::Withhold, Fault::Cut]);
    let producer = client.producer("log").open().await.unwrap();
    let first = producer.append_batch(["0"]).await.unwrap();
    let second = producer.append_batch(["1"]).await.unwrap();
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    assert!(first.deduplicated);
    assert!(!second.deduplicated);
    assert_eq!(
        (first.first_lsn, second.first_lsn),
        (Lsn::new(0), Lsn::new(1))
    );
    assert_eq!(memory.payloads("log"), ["0", "1"]);
}

#[tokio::test]
async fn producer_goes_on_after_a_session_that_falls_silent() {
    let (memory, client) = start().await;
    memory.script([Fault::Withhold]);
    let producer = client.producer("log").retry_for(Duration::from_secs(6));
    let producer = producer.open().await.unwrap();
    let ack = producer.append_batch(["0"]).await.unwrap().await.unwrap();
    assert!(ack.deduplicated);
    assert_eq!(memory.payloads("log"), ["0"]);
}

#[tokio::test]
async fn spans_beyond_the_clock_count_as_never() {
    let (memory, client) = start().await;
    let producer = client.producer("log").id("p", 0).retry_for(Duration::MAX);
    let producer = producer.linger(Duration::MAX).open().await.unwrap();
    let ack = producer.append_batch(["0"]).await.unwrap();
    assert!(!ack.await.unwrap().deduplicated);
    let slow = client.append("log", "1").timeout(Duration::MAX);
    assert_eq!(slow.await.unwrap().lsn, Lsn::new(1));
    assert_eq!(memory.payloads("log"), ["0", "1"]);
}

#[tokio::test]
async fn a_closed_producer_leaves_no_random_id_behind() {
    let (memory, client) = start().await;
    for _ in 0..3 {
        let drawn = client.producer("log").open().await.unwrap();
        drawn.append_batch(["0"]).await.unwrap().await.unwrap();
        drawn.close().await.unwrap();
    }
    let named = client.producer("log").id("p", 0).open().await.unwrap();
    named.append_batch(["0"]).await.unwrap().await.unwrap();
    named.close().await.unwrap();
    let page = client.list_producers("log", 0, None, None).await.unwrap();
    let ids: Vec<String> = page.producers.into_iter().map(|p| p.id).collect();
    assert_eq!(ids, ["p"]);
    assert_eq!(memory.payloads("log").len(), 4);
}

#[tokio::test]
async fn a_random_id_begins_at_the_lowest_epoch_of_the_log() {
    let (memory, client) = start().await;
    memory.state.lock().unwrap().log("log").first_producer_epoch = 7;
    let log_id = memory.state.lock().unwrap().log("log").log_id;
    let drawn = client.producer("log").open().await.unwrap();
    let bound = client.producer("log").log_id(log_id).open().await.unwrap();
    let named = client.producer("log").id("p", 0).open().await.unwrap();
    assert_eq!([drawn.epoch(), bound.epoch(), named.epoch()], [7, 7, 0]);
}

#[tokio::test]
async fn a_producer_reports_a_quota_at_once() {
    let (memory, client) = start().await;
    let facts = [("retry", "SAFE".to_owned())];
    let quota = || Fault::Fail(refuse(Code::ResourceExhausted, "QUOTA", &facts));
    memory.script([quota(), quota()]);
    let producer = client.producer("log").open().await.unwrap();
    let refused = producer.append_batch(["0"]).await.unwrap().await;
    let error = refused.unwrap_err();
    assert_eq!(error.reason(), Some(Reason::Quota));
    assert_eq!(error.outcome(), Outcome::NotApplied);
    assert_eq!(memory.faults.lock().unwrap().len(), 1, "asked once");
}

#[tokio::test]
async fn producer_that_goes_on_after_a_restart_repeats_nothing() {
    let (memory, client) = start().await;
    let before = client.producer("log").id("p", 7).open().await.unwrap();
    let log_id = before.log_id();
    produce(&before, 0..3).await;
    drop(before);
    // Its program has seen the ack of the first only.
    let after = client.producer("log").id("p", 7).log_id(log_id);
    let after = after.first_sequence(1).open().await.unwrap();
    let mut deduplicated = Vec::new();
    for number in 1..5 {
        let ack = after.append_batch([number.to_string()]).await.unwrap();
        deduplicated.push(ack.await.unwrap().deduplicated);
    }
    assert_eq!(deduplicated, [true, true, false, false]);
    assert_eq!(memory.payloads("log"), numbers(0..5));
}

#[tokio::test]
async fn higher_epoch_shuts_out_the_old_producer_and_all_it_still_has() {
    let (memory, client) = start().await;
    let old = client.producer("log").id("p", 0).open().await.unwrap();
    produce(&old, 0..1).await;
    let new = client.producer("log").id("p", 1).open().await.unwrap();
    produce(&new, 1..2).await;
    let late = old.append_batch(["late"]).await.unwrap();
    let later = old.append_batch(["later"]).await;
    let error = late.await.unwrap_err();
    assert_eq!(error.reason(), Some(Reason::ProducerFenced));
    assert_eq!(error.outcome(), Outcome::NotApplied);
    // It was in flight already, or refused at once.
    let error = match later {
        Ok(later) => later.await.unwrap_err(),
        Err(error) => error,
    };
    assert!(matches!(error.kind(), ErrorKind::Behind { .. }));
    assert_eq!(error.reason(), Some(Reason::ProducerFenced));
    assert_eq!(error.outcome(), Outcome::NotApplied);
    let closed = old.close().await.unwrap_err();
    assert_eq!(closed.reason(), Some(Reason::ProducerFenced));
    assert_eq!(memory.payloads("log"), ["0", "1"]);
}

#[tokio::test]
async fn repeat_never_brings_a_deleted_log_back() {
    let (memory, client) = start().await;
    let producer = client.producer("log").open().await.unwrap();
    produce(&producer, 0..1).await;
    client.delete_log("log", None).await.unwrap();
    let error = producer.append_batch(["1"]).await.unwrap().await;
    assert_eq!(error.unwrap_err().reason(), Some(Reason::LogReplaced));
    assert!(memory.state.lock().unwrap().logs.is_empty());
}

#[tokio::test]
async fn producer_names_its_writer_epoch_and_what_a_batch_expects() {
    let (_memory, client) = start().await;
    client.fence("log", Some(4), None).await.unwrap();
    let producer = client.producer("log").writer_epoch(4).open().await.unwrap();
    produce(&producer, 0..1).await;
    let expects = |lsn: u64| Condition::new().expected_lsn(lsn);
    let ack = producer.append_batch_if(expects(1), ["1"]).await.unwrap();
    assert_eq!(ack.await.unwrap().first_lsn, Lsn::new(1));
    client.fence("log", None, None).await.unwrap();
    let error = producer.append_batch(["2"]).await.unwrap().await;
    assert_eq!(error.unwrap_err().reason(), Some(Reason::Fenced));
}

#[tokio::test]
async fn refusal_of_what_was_on_a_lost_connection_leaves_its_outcome_unknown() {
    let (memory, client) = start().await;
    memory.script([Fault::Withhold, Fault::Cut, too_large()]);
    let producer = client.producer("log").open().await.unwrap();
    let first = producer.append_batch(["0"]).await.unwrap();
    let second = producer.append_batch(["1"]).await.unwrap();
    let first = first.await.unwrap_err();
    assert_eq!(first.reason(), Some(Reason::RecordTooLarge));
    assert_eq!(first.outcome(), Outcome::Unknown);
    let second = second.await.unwrap_err();
    assert!(matches!(second.kind(), ErrorKind::Behind { .. }));
    assert_eq!(second.outcome(), Outcome::Unknown);
}

#[tokio::test]
async fn producer_gives_up_when_the_next_attempt_would_come_too_late() {
    let (memory, endpoint) = Memory::start_behind_proxy().await;
    let client = Client::builder(endpoint).retry(RetryPolicy {
        first_pause: Duration::from_secs(60),
        max_pause: Duration::from_secs(60),
        ..RetryPolicy::default()
    });
    let client = client.connect().await.unwrap();
    memory.script([busy()]);
    let producer = client.producer("log").retry_for(Duration::from_secs(30));
    let producer = producer.open().await.unwrap();
    let error = producer.append("0").await.unwrap().await.unwrap_err();
    assert_eq!(error.reason(), Some(Reason::Busy));
    assert_eq!(error.outcome(), Outcome::NotApplied);
    let error = producer.append("1").await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Behind { .. }),
        "{error:?}"
    );
}

#[tokio::test]
async fn batches_in_flight_stay_within_what_the_server_recognises() {
    let (memory, client) = start().await;
    memory.script((0..10).map(|_| Fault::Withhold));
    let producer = client.producer("log").window_batches(3);
    let producer = producer.retry_for(Duration::from_secs(2));
    let producer = producer.open().await.unwrap();
    let mut acks = Vec::new();
    for number in numbers(0..10) {
        acks.push(producer.append_batch([number]).await.unwrap());
    }
    let mut outcomes = Vec::new();
    for ack in acks {
        outcomes.push(ack.await.unwrap_err().outcome());
    }
    assert_eq!(outcomes[..3], [Outcome::Unknown; 3]);
    assert_eq!(outcomes[3..], [Outcome::NotApplied; 7]);
    assert_eq!(memory.payloads("log"), numbers(0..3));
}

#[tokio::test]
async fn appender_gathers_neighbours_of_one_log_and_acks_in_order() {
    let (memory, client) = start().await;
    let gate = Arc::new(Notify::new());
    memory.script([Fault::Wait(Arc::clone(&gate))]);
    let appender = client.appender().linger(Duration::from_secs(60));
    let appender = appender.batch_records(3).open();
    let mut acks = Vec::new();
    for (log, record) in [("a", "0"), ("a", "1"), ("b", "0"), ("a", "2"), ("a", "3")] {
        acks.push((log, appender.append(log, record).await.unwrap()));
    }
    for record in ["4", "5"] {
        acks.push(("a", appender.append("a", record).await.unwrap()));
    }
    assert!((&mut acks[0].1).now_or_never().is_none());
    gate.notify_one();
    appender.close().await.unwrap();
    let mut lsns = Vec::new();
    for (log, ack) in acks {
        lsns.push((log, ack.now_or_never().unwrap().unwrap().lsn.get()));
    }
    let a = |lsn| ("a", lsn);
    assert_eq!(lsns, [a(0), a(1), ("b", 0), a(2), a(3), a(4), a(5)]);
    assert_eq!(*memory.requests.lock().unwrap(), [2, 1, 3, 1]);
    assert_eq!(memory.sessions.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn first_failure_ends_an_appender_and_every_ack_gets_its_outcome() {
    let (memory, client) = start().await;
    memory.script([Fault::None, too_large()]);
    let appender = client.appender().open();
    let mut acks = Vec::new();
    for number in numbers(0..4) {
        let batch = client.append_batch().log("log", [number]);
        acks.push(appender.append_batch(batch).await.unwrap());
    }
    let mut told = Vec::new();
    for ack in acks {
        told.push(ack.await);
    }
    assert_eq!(told[0].as_ref().unwrap().appends[0].first_lsn, Lsn::new(0));
    let failed = told[1].as_ref().unwrap_err();
    assert!(matches!(failed.kind(), ErrorKind::Server(_)));
    assert_eq!(failed.fact_number("request_id"), Some(1));
    for behind in &told[2..] {
        let behind = behind.as_ref().unwrap_err();
        assert!(matches!(behind.kind(), ErrorKind::Behind { .. }));
        assert_eq!(behind.outcome(), Outcome::NotApplied);
        assert_eq!(behind.retry(), Retry::Safe);
    }
    let closed = appender.close().await.unwrap_err();
    assert_eq!(closed.reason(), Some(Reason::RecordTooLarge));
    assert_eq!(memory.payloads("log"), ["0"]);
}

#[tokio::test]
async fn close_does_not_wait_for_a_server_that_never_ends_the_session() {
    let (memory, client) = start().await;
    memory.lingers.store(true, Ordering::Relaxed);
    let patience = Duration::from_millis(200);
    let appender = client.appender().ack_timeout(patience).open();
    appender.append("log", "0").await.unwrap().await.unwrap();
    let closed = tokio::time::timeout(Duration::from_secs(20), appender.close());
    closed.await.unwrap().unwrap();
    let producer = client.producer("log").retry_for(patience);
    let producer = producer.open().await.unwrap();
    produce(&producer, 1..2).await;
    let closed = tokio::time::timeout(Duration::from_secs(20), producer.close());
    closed.await.unwrap().unwrap();
    assert_eq!(memory.payloads("log"), numbers(0..2));
}

#[tokio::test]
async fn appender_whose_connection_is_lost_leaves_what_was_in_flight_unknown() {
    let (memory, client) = start().await;
    memory.script([Fault::None, Fault::Withhold, Fault::Cut]);
    let appender = client.appender().linger(Duration::ZERO).open();
    appender.append("log", "0").await.unwrap().await.unwrap();
    let mut acks = Vec::new();
    for number in numbers(1..3) {
        let batch = client.append_batch().log("log", [number]);
        acks.push(appender.append_batch(batch).await.unwrap());
    }
    let mut told = Vec::new();
    for ack in acks {
        told.push(ack.await.unwrap_err());
    }
    assert!(matches!(told[0].kind(), ErrorKind::ConnectionLost(_)));
    assert!(matches!(told[1].kind(), ErrorKind::Behind { .. }));
    for error in &told {
        assert_eq!(error.outcome(), Outcome::Unknown);
        assert_eq!(error.retry(), Retry::SafeWithCondition);
    }
    // Later batches are not sent at all.
    let late = appender.append("log", "3").await.unwrap_err();
    assert_eq!(late.outcome(), Outcome::NotApplied);
    assert_eq!(memory.payloads("log"), ["0", "1"]);
}

#[tokio::test]
async fn append_waits_while_the_window_is_full() {
    let (memory, client) = start().await;
    let gate = Arc::new(Notify::new());
    memory.script([Fault::Wait(Arc::clone(&gate))]);
    let appender = client.appender().linger(Duration::ZERO).window_bytes(2_500);
    let appender = appender.open();
    let record = || "x".repeat(1_000);
    let first = appender.append("log", record()).await.unwrap();
    let second = appender.append("log", record()).await.unwrap();
    let mut third = Box::pin(appender.append("log", record()));
    assert!((&mut third).now_or_never().is_none());
    gate.notify_one();
    let third = third.await.unwrap();
    for (lsn, ack) in [first, second, third].into_iter().enumerate() {
        assert_eq!(ack.await.unwrap().lsn, Lsn::new(lsn as u64));
    }
}

#[tokio::test]
async fn record_larger_than_the_window_goes_alone() {
    let (memory, client) = start().await;
    let appender = client.appender().window_bytes(100).open();
    let large = appender.append("log", "x".repeat(5_000)).await.unwrap();
    let small = appender.append("log", "0").await.unwrap();
    assert_eq!(large.await.unwrap().lsn, Lsn::new(0));
    assert_eq!(small.await.unwrap().lsn, Lsn::new(1));
    assert_eq!(*memory.requests.lock().unwrap(), [1, 1]);
}
