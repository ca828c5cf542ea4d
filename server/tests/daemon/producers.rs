//! Producers over the wire: a repeat is answered and never applied again.

use crate::support::{Daemon, SessionClient, append, part};
use wald_proto::v1;

fn by(sequence: u64) -> Option<v1::AppendCondition> {
    Some(v1::AppendCondition {
        producer: Some(v1::Producer {
            id: "booking".to_owned(),
            epoch: 1,
            sequence,
        }),
        ..v1::AppendCondition::default()
    })
}

fn produced(log: &str, sequence: u64) -> v1::AppendRequest {
    v1::AppendRequest {
        condition: by(sequence),
        ..append(log, &sequence.to_string())
    }
}

fn produced_batch(sequence: u64) -> v1::AppendBatchRequest {
    let part = |log| v1::LogBatch {
        condition: by(sequence),
        ..part(log, &[sequence.to_string().as_str(), "more"])
    };
    v1::AppendBatchRequest {
        batches: vec![part("a"), part("b")],
        ..v1::AppendBatchRequest::default()
    }
}

async fn tail(daemon: &Daemon, log: &str) -> u64 {
    let request = v1::GetTailRequest {
        log: log.to_owned(),
        ..v1::GetTailRequest::default()
    };
    let answer = daemon.wal().await.get_tail(request).await.unwrap();
    answer.into_inner().tail_lsn.unwrap()
}

#[tokio::test]
async fn repeat_gets_the_first_answer_also_after_restarts() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "before")).await.unwrap();
    let first = wal.append(produced("a", 0)).await.unwrap().into_inner();
    assert_eq!((first.lsn, first.deduplicated), (Some(1), false));
    wal.append(append("a", "behind")).await.unwrap();
    let repeated = |answer: v1::AppendResponse| {
        assert!(answer.deduplicated);
        assert_eq!(answer.lsn, first.lsn);
        assert_eq!(answer.timestamp_us, first.timestamp_us);
        assert_eq!(answer.position, first.position);
        assert_eq!(answer.log_id, first.log_id);
    };
    repeated(wal.append(produced("a", 0)).await.unwrap().into_inner());
    assert_eq!(daemon.metric("wald_deduplicated_total"), 1.0);
    assert_eq!(daemon.metric("wald_appended_records_total"), 3.0);
    // Killed, so that it is the journal that knows.
    drop(daemon);
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut wal = daemon.wal().await;
    repeated(wal.append(produced("a", 0)).await.unwrap().into_inner());
    let next = wal.append(produced("a", 1)).await.unwrap().into_inner();
    assert_eq!((next.lsn, next.deduplicated), (Some(3), false));
    assert_eq!(tail(&daemon, "a").await, 4);
}

#[tokio::test]
async fn repeats_sent_while_the_first_is_in_flight_are_one_append() {
    let daemon = Daemon::start(&[]);
    let wal = daemon.wal().await;
    for sequence in 0..20 {
        let repeats: Vec<_> = (0..10)
            .map(|_| {
                let mut wal = wal.clone();
                tokio::spawn(async move { wal.append(produced("a", sequence)).await })
            })
            .collect();
        let mut first_times = 0;
        for repeat in repeats {
            let answer = repeat.await.unwrap().unwrap().into_inner();
            assert_eq!(answer.lsn, Some(sequence));
            assert_eq!(answer.durability(), v1::Durability::Durable);
            first_times += u32::from(!answer.deduplicated);
        }
        assert_eq!(first_times, 1, "{sequence}");
    }
    assert_eq!(tail(&daemon, "a").await, 20);
    assert_eq!(daemon.metric("wald_deduplicated_total"), 180.0);
    assert_eq!(daemon.metric("wald_appended_records_total"), 20.0);
}

#[tokio::test]
async fn batch_over_two_logs_is_repeated_as_a_whole() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    let first = wal.append_batch(produced_batch(0)).await.unwrap();
    let first = first.into_inner();
    assert!(first.appends.iter().all(|log| !log.deduplicated));
    let again = wal.append_batch(produced_batch(0)).await.unwrap();
    let again = again.into_inner();
    assert!(again.appends.iter().all(|log| log.deduplicated));
    assert_eq!(again.position, first.position);
    let lsns = |answer: &v1::AppendBatchResponse| {
        let appends = answer.appends.iter();
        appends
            .map(|log| (log.log.clone(), log.first_lsn, log.next_lsn))
            .collect::<Vec<_>>()
    };
    assert_eq!(lsns(&again), lsns(&first));
    assert_eq!((tail(&daemon, "a").await, tail(&daemon, "b").await), (2, 2));
}

/// A client that lost its connection opens another session and sends everything again that has
/// no ack, and more.
#[tokio::test]
async fn session_that_begins_again_where_it_likes_appends_nothing_twice() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    for (from, to) in [(0, 40), (25, 60), (0, 80)] {
        let mut session = SessionClient::open(&mut wal).await;
        let requests = session.requests.clone();
        let sender = tokio::spawn(async move {
            for request_id in from..to {
                let batch = Some(produced_batch(request_id));
                let request = v1::AppendSessionRequest {
                    request_id,
                    batch,
                    ..v1::AppendSessionRequest::default()
                };
                requests.send(request).await.unwrap();
            }
        });
        session.requests = tokio::sync::mpsc::channel(1).0;
        let applied = match from {
            25 => 40,
            _ if to == 80 => 60,
            _ => 0,
        };
        for request_id in from..to {
            let answer = session.answers.message().await.unwrap().unwrap();
            assert_eq!(answer.request_id, request_id);
            for log in answer.ack.unwrap().appends {
                assert_eq!(log.first_lsn, Some(2 * request_id));
                assert_eq!(log.deduplicated, request_id < applied);
            }
        }
        sender.await.unwrap();
        assert!(session.answers.message().await.unwrap().is_none());
    }
    let tails = (tail(&daemon, "a").await, tail(&daemon, "b").await);
    assert_eq!(tails, (160, 160));
}
