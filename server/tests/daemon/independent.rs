//! Append sessions whose requests are independent: answers as of calls of their own, on one stream.

use std::collections::HashMap;
use std::time::Duration;

use prost::Message as _;
use rustix::process::Signal;
use tonic::{Code, Status};
use wald_proto::v1;

use crate::auth::principals::{AuthFile, session, wal};
use crate::session::{reluctant, wrong_requests};
use crate::support::{Daemon, SessionClient, Told, append, part, text, until};

/// Longest time from the loss of a credential to the end of the session, on a busy machine.
const SOON: Duration = Duration::from_secs(20);

/// The status of a request that was not acked, as the client of a call gets it.
fn refusal(answer: &v1::AppendSessionResponse) -> Status {
    let status = tonic_types::pb::Status::decode(&answer.error[..]).unwrap();
    Status::with_details(status.code.into(), status.message, answer.error.clone())
}

fn record(request_id: u64, append: v1::AppendRequest) -> v1::AppendSessionRequest {
    v1::AppendSessionRequest {
        request_id,
        independent: true,
        append: Some(append),
        ..v1::AppendSessionRequest::default()
    }
}

fn batch(request_id: u64, batch: v1::AppendBatchRequest) -> v1::AppendSessionRequest {
    v1::AppendSessionRequest {
        request_id,
        independent: true,
        batch: Some(batch),
        ..v1::AppendSessionRequest::default()
    }
}

/// Sends the requests, half-closes, and returns the answers by their numbers, and the end.
async fn answers(
    session: SessionClient,
    requests: Vec<v1::AppendSessionRequest>,
) -> (HashMap<u64, v1::AppendSessionResponse>, Result<(), Status>) {
    let SessionClient {
        requests: sender,
        answers: mut stream,
    } = session;
    let sending = tokio::spawn(async move {
        for request in requests {
            if sender.send(request).await.is_err() {
                return;
            }
        }
    });
    let mut answers = HashMap::new();
    let end = loop {
        match stream.message().await {
            Ok(Some(answer)) => assert!(answers.insert(answer.request_id, answer).is_none()),
            Ok(None) => break Ok(()),
            Err(status) => break Err(status),
        }
    };
    sending.await.unwrap();
    (answers, end)
}

#[tokio::test]
async fn refused_request_gets_the_status_of_a_call_and_the_session_goes_on() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    let mut requests = Vec::new();
    let mut expected = Vec::new();
    for (wrong, code, reason) in wrong_requests() {
        let status = wal.append_batch(wrong.clone()).await.unwrap_err();
        assert_eq!(
            (status.code(), Told::of(&status).reason.as_str()),
            (code, reason)
        );
        requests.push(batch(requests.len() as u64, wrong));
        requests.push(record(requests.len() as u64, append("b", "x")));
        expected.push(status);
    }
    let session = SessionClient::open(&mut wal).await;
    let (answers, end) = answers(session, requests).await;
    end.unwrap();
    for (index, expected) in expected.iter().enumerate() {
        let at = 2 * index as u64;
        let refused = refusal(&answers[&at]);
        assert_eq!(
            (refused.code(), refused.message()),
            (expected.code(), expected.message())
        );
        let (refused, expected) = (Told::of(&refused), Told::of(expected));
        assert_eq!(
            (refused.reason, refused.facts, refused.violations),
            (expected.reason, expected.facts, expected.violations)
        );
        let ack = answers[&(at + 1)].append_ack.as_ref().unwrap();
        assert_eq!(ack.lsn, Some(index as u64));
        assert_eq!(ack.durability(), v1::Durability::Durable);
    }
    assert_eq!(
        daemon.metric("wald_appended_records_total"),
        expected.len() as f64
    );
}

/// The engine gets records that arrive together as one request; each gets its own answer.
#[tokio::test]
async fn records_get_the_answers_of_append_and_stay_in_order() {
    const RECORDS: u64 = 2_000;
    let daemon = Daemon::start(&[]);
    let session = SessionClient::open(&mut daemon.wal().await).await;
    let requests = (0..RECORDS).map(|number| {
        let mut append = append(["a", "b"][(number / 100 % 2) as usize], &number.to_string());
        // Some with a time of their own, which is in their answer.
        if number % 50 == 7 {
            append.record = Some(v1::Record {
                timestamp_us: 1_000 + i64::try_from(number).unwrap(),
                ..text(&number.to_string())
            });
        }
        record(number, append)
    });
    let (answers, end) = answers(session, requests.collect()).await;
    end.unwrap();
    let mut wal = daemon.wal().await;
    let mut tails = HashMap::<&str, u64>::new();
    for number in 0..RECORDS {
        let log = ["a", "b"][(number / 100 % 2) as usize];
        let lsn = tails.entry(log).or_default();
        let ack = answers[&number].append_ack.as_ref().unwrap();
        assert_eq!(ack.lsn, Some(*lsn), "{number}");
        let read = v1::ReadRequest {
            log: log.to_owned(),
            start: Some(v1::read_request::Start::Lsn(*lsn)),
            max_records: 1,
            ..v1::ReadRequest::default()
        };
        if number % 10 == 7 {
            let page = wal.read(read).await.unwrap().into_inner();
            let batch = page.batch.unwrap();
            let record = &batch.records[0];
            let stored = match record.timestamp_us {
                0 => batch.timestamp_us,
                own => own,
            };
            assert_eq!(stored, ack.timestamp_us, "{number}");
            assert_eq!(crate::support::payload(record), number.to_string());
        }
        *lsn += 1;
    }
    let flushes = daemon.metric("wald_flush_duration_seconds_count");
    assert!(flushes < RECORDS as f64 / 2.0, "{flushes} flushes");
}

/// Together they would be one request for the engine, which fails as its first does.
#[tokio::test]
async fn stale_condition_refuses_no_request_behind_it() {
    const PAIRS: u64 = 200;
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "first")).await.unwrap();
    let expects = |number, lsn| {
        let mut append = append("a", "x");
        append.condition = Some(v1::AppendCondition {
            expected_lsn: Some(lsn),
            ..v1::AppendCondition::default()
        });
        record(number, append)
    };
    // The lsn of each stale one is just below the next of the log.
    let requests =
        (0..PAIRS).flat_map(|pair| [expects(2 * pair, pair), expects(2 * pair + 1, pair + 1)]);
    let session = SessionClient::open(&mut wal).await;
    let (given, end) = answers(session, requests.collect()).await;
    end.unwrap();
    for pair in 0..PAIRS {
        let stale = Told::of(&refusal(&given[&(2 * pair)]));
        assert_eq!(stale.reason, "POSITION_MISMATCH");
        let ack = given[&(2 * pair + 1)].append_ack.as_ref();
        assert_eq!(ack.unwrap().lsn, Some(pair + 1));
    }
}

#[tokio::test]
async fn session_ends_when_its_requests_are_not_all_of_one_kind() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    let good = record(0, append("a", "x"));
    let mixed = v1::AppendSessionRequest {
        independent: false,
        ..record(1, append("a", "y"))
    };
    let session = SessionClient::open(&mut wal).await;
    let (given, end) = answers(session, vec![good.clone(), mixed]).await;
    assert!(given[&0].append_ack.is_some() && given.len() == 1);
    let told = Told::of(&end.unwrap_err());
    assert_eq!(
        (told.code, told.fact("request_id")),
        (Code::InvalidArgument, "1")
    );
    assert_eq!(told.fact("outcome"), "NOT_APPLIED");
    // Both kinds of content in one: only that request is refused.
    let both = v1::AppendSessionRequest {
        batch: Some(v1::AppendBatchRequest {
            batches: vec![part("a", &["y"])],
            ..v1::AppendBatchRequest::default()
        }),
        ..record(1, append("a", "y"))
    };
    let session = SessionClient::open(&mut wal).await;
    let (given, end) = answers(session, vec![both, good]).await;
    end.unwrap();
    assert_eq!(Told::of(&refusal(&given[&1])).reason, "MALFORMED_REQUEST");
    assert_eq!(given[&0].append_ack.as_ref().unwrap().lsn, Some(1));
}

#[tokio::test]
async fn client_that_reads_no_refusals_is_not_read_either() {
    let arguments = [
        "--session-window-bytes",
        "128KiB",
        "--stream-window-bytes",
        "64KiB",
    ];
    let daemon = Daemon::start(&arguments);
    let mut wal = reluctant(&daemon).await;
    let mut session = SessionClient::open(&mut wal).await;
    let payload = "x".repeat(4 << 10);
    let mut sent = 0;
    while sent < 3_000 {
        let send = session.requests.send(record(sent, append("$", &payload)));
        if tokio::time::timeout(Duration::from_secs(1), send)
            .await
            .is_err()
        {
            break;
        }
        sent += 1;
    }
    // Refusals that fit the client's windows, requests whose refusals wait, and requests in windows.
    assert!((30..1_500).contains(&sent), "{sent}");
    // A client that reads after all gets every answer.
    session.requests = tokio::sync::mpsc::channel(1).0;
    let mut answers = 0;
    while let Some(answer) = session.answers.message().await.unwrap() {
        assert_eq!(Told::of(&refusal(&answer)).reason, "INVALID_LOG_NAME");
        answers += 1;
    }
    assert!(answers >= sent, "{answers} of {sent}");
}

#[tokio::test]
async fn records_on_an_ordered_session_end_it_at_the_first_failure() {
    let daemon = Daemon::start(&[]);
    let session = SessionClient::open(&mut daemon.wal().await).await;
    let requests = (0..10).map(|number| v1::AppendSessionRequest {
        independent: false,
        ..record(number, append(if number == 6 { "$" } else { "a" }, "x"))
    });
    let (given, end) = answers(session, requests.collect()).await;
    assert_eq!(given.len(), 6);
    assert!(
        given
            .values()
            .all(|answer| answer.append_ack.as_ref().unwrap().lsn == Some(answer.request_id))
    );
    let told = Told::of(&end.unwrap_err());
    assert_eq!(
        (told.reason.as_str(), told.fact("request_id")),
        ("INVALID_LOG_NAME", "6")
    );
}

#[tokio::test]
async fn leaving_server_answers_all_that_it_has_read() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut session = SessionClient::open(&mut daemon.wal().await).await;
    let requests = session.requests.clone();
    tokio::spawn(async move {
        for number in 0.. {
            if requests
                .send(record(number, append("a", "x")))
                .await
                .is_err()
            {
                return;
            }
        }
    });
    until(&daemon, "wald_appended_records_total", |n| n > 50.0).await;
    daemon.signal(Signal::TERM);
    let mut acked = 0;
    let end = loop {
        match session.answers.message().await {
            Ok(Some(answer)) if answer.append_ack.is_some() => acked += 1,
            Ok(Some(answer)) => assert_eq!(Told::of(&refusal(&answer)).reason, "DRAINING"),
            Ok(None) => panic!("the server left without a word"),
            Err(status) => break status,
        }
    };
    assert_eq!(Told::of(&end).reason, "DRAINING");
    assert_eq!(daemon.ended().await.code(), Some(0));
    let daemon = Daemon::start_in(directory.path(), &[]);
    let tail = v1::GetTailRequest {
        log: "a".to_owned(),
        ..v1::GetTailRequest::default()
    };
    let tail = daemon
        .wal()
        .await
        .get_tail(tail)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(tail.tail_lsn, Some(acked));
}

#[tokio::test]
async fn missing_right_refuses_a_request_and_a_lost_credential_ends_the_session() {
    const RULES: &str = "[tenant.a]\nprefix = \"a/\"\n[tenant.b]\nprefix = \"b/\"\n\
        [principal.a]\ntenant = \"a\"\nallow = [{ do = [\"append\", \"create\"], logs = \"a/\" }]\n";
    let file = AuthFile::new(RULES);
    let token = file.token("a");
    let daemon = file.start(&["--metrics-open"]);
    let mut session = session(&daemon, &token).await;
    let ask = async |session: &mut SessionClient, number, log: &str| {
        session
            .requests
            .send(record(number, append(log, "x")))
            .await
            .unwrap();
        session.answers.message().await.map(Option::unwrap)
    };
    let refused = ask(&mut session, 1, "b/x").await.unwrap();
    let expected = wal(&daemon, &token)
        .await
        .append(append("b/x", "x"))
        .await
        .unwrap_err();
    let (told, expected) = (Told::of(&refusal(&refused)), Told::of(&expected));
    assert_eq!(
        (&told.reason, &told.facts),
        (&expected.reason, &expected.facts)
    );
    assert_eq!(told.reason, "NOT_ALLOWED");
    assert!(
        ask(&mut session, 2, "a/x")
            .await
            .unwrap()
            .append_ack
            .is_some()
    );
    assert!(file.command(&["revoke", &token[6..14]]).status.success());
    daemon.signal(Signal::HUP);
    let end = tokio::time::timeout(SOON, session.answers.message()).await;
    let status = end.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
}

#[tokio::test]
async fn rate_of_a_tenant_refuses_a_request_with_the_time_to_wait() {
    const RULES: &str = "[tenant.a]\nprefix = \"a/\"\nlimits = { appends_per_second = 20 }\n\
        [principal.a]\ntenant = \"a\"\nallow = [{ do = [\"append\", \"create\"], logs = \"a/\" }]\n";
    let file = AuthFile::new(RULES);
    let token = file.token("a");
    let daemon = file.start(&["--metrics-open"]);
    let session = session(&daemon, &token).await;
    let requests = (0..200).map(|number| record(number, append("a/x", "x")));
    let (given, end) = answers(session, requests.collect()).await;
    end.unwrap();
    let refused: Vec<_> = (given.values())
        .filter(|answer| answer.append_ack.is_none())
        .collect();
    assert!(
        given.len() == 200 && refused.len() > 100,
        "{}",
        refused.len()
    );
    for answer in &refused {
        let status = refusal(answer);
        assert_eq!(Told::of(&status).reason, "RATE");
        let details = tonic_types::StatusExt::get_error_details(&status);
        assert!(
            details
                .retry_info()
                .is_some_and(|info| info.retry_delay.is_some())
        );
    }
    let acked = (200 - refused.len()) as f64;
    assert_eq!(daemon.metric("wald_appended_records_total"), acked);
}
