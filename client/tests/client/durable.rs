//! Durable producers and followers: the end of a program at any moment, and its next start.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use futures_util::FutureExt as _;
use tonic::Code;
use wald_client::proto::{self, ProducerState};
use wald_client::{Batch, Client, DurableProducer, ErrorKind, GapReason, Lsn, Outcome, State};

use super::fake::Fake;
use super::pipeline::{numbers, start};
use crate::memory::{Fault, refuse};

/// A state in memory, which the next start of the program finds.
#[derive(Debug, Clone, Default)]
struct Kept {
    state: Arc<Mutex<Option<Vec<u8>>>>,
    fails: Arc<AtomicBool>,
}

impl Kept {
    fn producer(&self) -> ProducerState {
        let state = self.state.lock().unwrap().clone().unwrap();
        prost::Message::decode(&state[..]).unwrap()
    }
}

impl State for Kept {
    fn load(&mut self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.state.lock().unwrap().clone())
    }

    fn save(&mut self, state: &[u8]) -> io::Result<()> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(io::Error::other("the disk is full"));
        }
        *self.state.lock().unwrap() = Some(state.to_vec());
        Ok(())
    }
}

/// The next start of the program.
async fn open(client: &Client, kept: &Kept) -> DurableProducer {
    let producer = client.producer("log");
    producer.open_durable(kept.clone()).await.unwrap()
}

#[tokio::test]
async fn batches_in_doubt_are_sent_again_by_the_next_start() {
    let (memory, client) = start().await;
    let kept = Kept::default();
    for round in 0..10 {
        // Each life ends without an ack that it has seen: the answers of its last batches are lost.
        memory.script([Fault::None, Fault::Withhold, Fault::Cut]);
        let mut producer = open(&client, &kept).await;
        assert_eq!(producer.next_sequence(), 5 * round);
        for number in numbers(5 * round..5 * round + 5) {
            producer.append_batch([number]).await.unwrap();
        }
        drop(producer);
        memory.faults.lock().unwrap().clear();
    }
    assert!(!kept.producer().batches.is_empty(), "nothing was in doubt");
    let producer = open(&client, &kept).await;
    let id = producer.id().to_owned();
    producer.close().await.unwrap();
    assert_eq!(memory.payloads("log"), numbers(0..50));
    let state = kept.producer();
    assert_eq!((state.sequence, state.batches.len(), state.id), (50, 0, id));
}

#[tokio::test]
async fn state_is_there_before_the_first_batch_and_bounded_afterwards() {
    let (memory, client) = start().await;
    let kept = Kept::default();
    let mut producer = open(&client, &kept).await;
    let state = kept.producer();
    assert_eq!(
        (state.log.as_str(), &*state.id, state.log_id),
        ("log", producer.id(), producer.log_id())
    );
    assert!(memory.payloads("log").is_empty());
    for number in numbers(0..500) {
        producer.append_batch([number]).await.unwrap();
        assert!(kept.producer().batches.len() <= 64);
    }
    producer.flush().await.unwrap();
    assert_eq!(
        (kept.producer().sequence, kept.producer().batches.len()),
        (500, 0)
    );
    assert_eq!(memory.payloads("log"), numbers(0..500));
}

#[tokio::test]
async fn state_of_another_log_is_refused() {
    let (_memory, client) = start().await;
    let kept = Kept::default();
    open(&client, &kept).await;
    let refused = client
        .producer("other")
        .open_durable(kept.clone())
        .await
        .unwrap_err();
    assert!(
        matches!(refused.kind(), ErrorKind::State { .. }),
        "{refused}"
    );
    assert!(refused.to_string().contains("\"log\""), "{refused}");
    // The state of a follower, one that was cut off, and none at all.
    let follower = proto::FollowerState {
        kind: proto::StateKind::Follower.into(),
        ..proto::FollowerState::default()
    };
    let whole = kept.state.lock().unwrap().clone().unwrap();
    let cut = whole[..whole.len() - 2].to_vec();
    for other in [prost::Message::encode_to_vec(&follower), cut, Vec::new()] {
        *kept.state.lock().unwrap() = Some(other);
        let refused = client
            .producer("log")
            .open_durable(kept.clone())
            .await
            .unwrap_err();
        assert!(
            refused.to_string().contains("not the state of a producer"),
            "{refused}"
        );
    }
    *kept.state.lock().unwrap() = Some(whole);
    let refused = client.scan("log").open_durable(kept.clone()).await;
    let refused = refused.err().unwrap();
    assert!(
        refused.to_string().contains("not the state of a"),
        "{refused}"
    );
    *kept.state.lock().unwrap() = Some(b"nonsense".to_vec());
    let refused = client.producer("log").open_durable(kept).await.unwrap_err();
    assert!(
        matches!(refused.kind(), ErrorKind::State { .. }),
        "{refused}"
    );
}

#[tokio::test]
async fn batch_that_cannot_be_kept_is_not_sent_and_ends_the_producer() {
    let (memory, client) = start().await;
    let kept = Kept::default();
    let mut producer = open(&client, &kept).await;
    producer.append_batch(["0"]).await.unwrap();
    kept.fails.store(true, Ordering::Relaxed);
    let failed = producer.append_batch(["1"]).await.unwrap_err();
    assert!(failed.to_string().contains("the disk is full"), "{failed}");
    kept.fails.store(false, Ordering::Relaxed);
    let behind = producer.append_batch(["2"]).await.unwrap_err();
    assert!(
        matches!(behind.kind(), ErrorKind::Behind { .. }),
        "{behind}"
    );
    drop(producer);
    // The program gives the batch again, since its sequence is the next one.
    let mut producer = open(&client, &kept).await;
    assert_eq!(producer.next_sequence(), 1);
    producer.append_batch(["1"]).await.unwrap();
    producer.close().await.unwrap();
    assert_eq!(memory.payloads("log"), ["0", "1"]);
}

/// Payloads of records.
fn payloads(batches: Vec<Batch>) -> Vec<String> {
    let records = batches.into_iter().flat_map(|batch| batch.records);
    records
        .map(|record| String::from_utf8(record.data.to_vec()).unwrap())
        .collect()
}

/// The outcome of a call is that of its own batch.
#[tokio::test]
async fn kept_batch_behind_a_failure_is_unknown_and_a_later_one_not_applied() {
    let (memory, client) = start().await;
    let too_large = refuse(Code::InvalidArgument, "RECORD_TOO_LARGE", &[]);
    memory.script([Fault::Fail(too_large)]);
    let kept = Kept::default();
    let mut producer = open(&client, &kept).await;
    let mut failed = None;
    while failed.is_none() {
        let before = producer.next_sequence();
        match producer.append_batch(["x"]).await {
            Ok(_) => assert!(before < 64, "it never fails"),
            Err(error) => failed = Some((error, before)),
        }
    }
    let (error, before) = failed.unwrap();
    assert_eq!(error.reason_text(), Some("RECORD_TOO_LARGE"));
    // Kept or not: the outcome says so.
    let state = kept.producer();
    let is_kept = state.sequence + state.batches.len() as u64 > before;
    let wanted = match is_kept {
        true => Outcome::Unknown,
        false => Outcome::NotApplied,
    };
    assert_eq!(error.outcome(), wanted);
    let later = producer.append_batch(["y"]).await.unwrap_err();
    assert_eq!(later.outcome(), Outcome::NotApplied);
    assert_eq!(kept.producer(), state);
    assert_eq!(
        producer.close().await.unwrap_err().reason_text(),
        Some("RECORD_TOO_LARGE")
    );
}

#[tokio::test]
async fn batch_without_records_is_refused_and_leaves_no_trace() {
    let (memory, client) = start().await;
    let kept = Kept::default();
    let mut producer = open(&client, &kept).await;
    let none: [&str; 0] = [];
    let refused = producer.append_batch(none).await.unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::EmptyBatch), "{refused}");
    producer.append_batch(["0"]).await.unwrap();
    producer.close().await.unwrap();
    assert_eq!(memory.payloads("log"), ["0"]);
    assert_eq!(kept.producer().sequence, 1);
}

/// The server forgets the producer of the log.
async fn forget(client: &Client, kept: &Kept) {
    let state = kept.producer();
    let forgotten = client.forget_producer(state.log, state.id, Some(state.log_id));
    forgotten.await.unwrap();
}

#[tokio::test]
async fn forgotten_producer_with_nothing_in_doubt_goes_on_in_a_new_epoch() {
    let (memory, client) = start().await;
    let kept = Kept::default();
    let mut producer = open(&client, &kept).await;
    for life in 0..3 {
        // In one run of the program, and over its restarts.
        for half in 0..2 {
            let first = 20 * life + 10 * half;
            assert_eq!(producer.next_sequence(), first);
            for number in numbers(first..first + 10) {
                let sequence = producer.append_batch([number]).await.unwrap();
                assert_eq!(sequence + 1, producer.next_sequence());
            }
            producer.flush().await.unwrap();
            forget(&client, &kept).await;
        }
        producer.close().await.unwrap();
        producer = open(&client, &kept).await;
    }
    producer.append_batch(["last"]).await.unwrap();
    producer.close().await.unwrap();
    let mut wanted = numbers(0..60);
    wanted.push("last".to_owned());
    assert_eq!(memory.payloads("log"), wanted);
    let state = kept.producer();
    assert_eq!(
        (state.earlier_batches, state.sequence, state.epoch),
        (60, 1, 6)
    );
}

/// The refusal of a batch by a server that has forgotten its producer.
fn forgotten(first_epoch: u64) -> Fault {
    let epoch = ("first_epoch", first_epoch.to_string());
    let refused = refuse(Code::FailedPrecondition, "PRODUCER_EXPIRED", &[epoch]);
    Fault::Fail(refused)
}

#[tokio::test]
async fn batches_behind_a_refused_one_follow_it_into_the_new_epoch() {
    let (memory, client) = start().await;
    let kept = Kept::default();
    let mut producer = open(&client, &kept).await;
    producer.append_batch(["0"]).await.unwrap();
    producer.flush().await.unwrap();
    // The refusal comes when many batches are under way.
    let gate = Arc::new(tokio::sync::Notify::new());
    memory.script([Fault::Wait(Arc::clone(&gate)), forgotten(1)]);
    for number in numbers(1..60) {
        producer.append_batch([number]).await.unwrap();
    }
    gate.notify_one();
    producer.flush().await.unwrap();
    assert_eq!(memory.payloads("log"), numbers(0..60));
    let state = kept.producer();
    assert_eq!(
        (state.earlier_batches, state.sequence, state.epoch),
        (2, 58, 1)
    );
    assert_eq!(producer.next_sequence(), 60);
}

#[tokio::test]
async fn forgotten_producer_with_a_batch_of_an_earlier_run_is_refused() {
    let (memory, client) = start().await;
    let kept = Kept::default();
    let mut producer = open(&client, &kept).await;
    memory.script([Fault::Withhold]);
    producer.append_batch(["0"]).await.unwrap();
    while memory.payloads("log").is_empty() {
        tokio::task::yield_now().await;
    }
    drop(producer);
    forget(&client, &kept).await;
    for _ in 0..2 {
        let mut producer = open(&client, &kept).await;
        let refused = producer.flush().await.unwrap_err();
        assert_eq!(refused.reason_text(), Some("PRODUCER_EXPIRED"), "{refused}");
        assert_eq!(memory.payloads("log"), ["0"]);
        let state = kept.producer();
        assert_eq!((state.epoch, state.batches.len()), (0, 1));
    }
}

#[tokio::test]
async fn forgotten_producer_with_a_batch_on_a_broken_connection_is_refused() {
    let (memory, client) = start().await;
    let kept = Kept::default();
    let mut producer = open(&client, &kept).await;
    memory.script([Fault::Cut, forgotten(7)]);
    producer.append_batch(["1"]).await.unwrap();
    let refused = producer.flush().await.unwrap_err();
    assert_eq!(refused.reason_text(), Some("PRODUCER_EXPIRED"), "{refused}");
    assert_eq!(
        (kept.producer().epoch, memory.payloads("log").len()),
        (0, 0)
    );
}

/// A save that takes its time, in which the program gives the call up.
#[tokio::test]
async fn cancelled_calls_leave_batches_that_the_next_one_sends() {
    let (memory, client) = start().await;
    let kept = Kept::default();
    let mut producer = open(&client, &kept).await;
    for number in numbers(0..200) {
        // Given up at once: the save may be under way.
        let _ = producer.append_batch([number]).now_or_never();
    }
    let given = producer.next_sequence();
    producer.append_batch(["last"]).await.unwrap();
    producer.close().await.unwrap();
    let got = memory.payloads("log");
    assert_eq!(got.len() as u64, given + 1);
    assert_eq!(got.last().unwrap(), "last");
    assert_eq!(kept.producer().sequence, given + 1);
}

#[tokio::test]
async fn follower_goes_on_behind_the_effects_that_it_has_kept() {
    let (_fake, client) = Fake::start(30, 0).await;
    let kept = Kept::default();
    let (mut effects, mut starts, mut again) = (Vec::<String>::new(), 0, 0);
    while effects.len() < 30 {
        starts += 1;
        let scan = client.scan("log");
        let mut follower = scan.open_durable(kept.clone()).await.unwrap();
        let text = follower
            .effects()
            .map(|text| String::from_utf8(text.to_vec()).unwrap());
        let before = text.map_or_else(Vec::new, |text| {
            text.split(' ').map(str::to_owned).collect()
        });
        again += effects.len() - before.len();
        effects = before;
        if starts % 3 == 0 {
            // It ends before any record: the place stays.
            follower.keep(effects.join(" ")).await.unwrap();
            continue;
        }
        // Each other start takes two steps, and keeps the effects of the first: the records of the second come again.
        for step in 0..2 {
            let Some(batches) = follower.next().await.unwrap() else {
                break;
            };
            effects.extend(payloads(batches));
            if step == 0 || effects.len() == 30 {
                follower.keep(effects.join(" ")).await.unwrap();
            }
        }
    }
    assert!(starts > 5 && again > 5, "{starts}, {again}");
    assert_eq!(effects, numbers(0..30));
}

#[tokio::test]
async fn gap_is_an_error_and_the_next_call_goes_on_behind_it() {
    let (memory, client) = start().await;
    let producer = client.producer("log").open().await.unwrap();
    producer.append_batch(["0"]).await.unwrap().await.unwrap();
    *memory.gap.lock().unwrap() = Some(proto::Gap {
        log: "log".to_owned(),
        from_lsn: Some(0),
        to_lsn: Some(7),
        reason: proto::GapReason::Expired.into(),
    });
    let scan = client.scan("log");
    let mut follower = scan.open_durable(Kept::default()).await.unwrap();
    let missing = follower.next().await.unwrap_err();
    let ErrorKind::Missing(gap) = missing.kind() else {
        panic!("{missing}");
    };
    assert_eq!(
        (gap.reason, gap.to_lsn),
        (GapReason::Expired, Some(Lsn::new(7)))
    );
    assert_eq!(payloads(follower.next().await.unwrap().unwrap()), ["0"]);
}
