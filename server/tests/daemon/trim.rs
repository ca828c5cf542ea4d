//! Trims over the wire: forgotten records, refusals, gaps for readers.

use crate::support::{Daemon, Told, append, part, records};
use tonic::Code;
use wald_proto::v1;

fn trim(before_lsn: u64) -> v1::TrimRequest {
    v1::TrimRequest {
        log: "a".to_owned(),
        before_lsn,
        log_id: None,
    }
}

fn read(lsn: u64) -> v1::ReadRequest {
    v1::ReadRequest {
        log: "a".to_owned(),
        start: Some(v1::read_request::Start::Lsn(lsn)),
        ..v1::ReadRequest::default()
    }
}

#[tokio::test]
async fn trimmed_records_are_gone_named_and_stay_gone() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut wal = daemon.wal().await;
    let batch = v1::AppendBatchRequest {
        batches: vec![part("a", &["0", "1", "2", "3", "4"])],
        ..v1::AppendBatchRequest::default()
    };
    wal.append_batch(batch).await.unwrap();
    // In the middle of a batch, below the trimmed lsn, and at once again.
    for (before, first) in [(3, 3), (1, 3), (3, 3)] {
        let answer = wal.trim(trim(before)).await.unwrap().into_inner();
        assert_eq!(answer.first_lsn, Some(first));
    }
    drop(daemon);
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut wal = daemon.wal().await;
    let told = Told::of(&wal.read(read(2)).await.unwrap_err());
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::OutOfRange, "TRIMMED")
    );
    assert_eq!(told.fact("first_lsn"), "3");
    let request = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::Log("a".to_owned())),
        start: Some(v1::scan_request::Start::Lsn(1)),
        ..v1::ScanRequest::default()
    };
    let mut stream = wal.scan(request).await.unwrap().into_inner();
    let (mut gaps, mut found) = (Vec::new(), Vec::new());
    while let Some(message) = stream.message().await.unwrap() {
        gaps.extend(message.gaps);
        found.extend(records(&message.batches).into_iter().map(|r| (r.1, r.2)));
    }
    assert_eq!(
        gaps,
        [v1::Gap {
            log: "a".to_owned(),
            from_lsn: Some(1),
            to_lsn: Some(3),
            reason: v1::GapReason::Trimmed.into(),
        }]
    );
    assert_eq!(found, [(3, "3".to_owned()), (4, "4".to_owned())]);
    // All of it: an empty log that goes on where it was.
    wal.trim(trim(5)).await.unwrap();
    let tail = wal
        .get_tail(v1::GetTailRequest {
            log: "a".to_owned(),
            ..v1::GetTailRequest::default()
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!((tail.first_lsn, tail.tail_lsn), (Some(5), Some(5)));
    let answer = wal.append(append("a", "5")).await.unwrap().into_inner();
    assert_eq!(answer.lsn, Some(5));
}

#[tokio::test]
async fn trim_that_cannot_be_is_refused_with_every_fact() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    let refused = |told: &Told| {
        assert_eq!(told.fact("outcome"), "NOT_APPLIED");
        assert_eq!(told.fact("retry"), "NEVER");
    };
    let told = Told::of(&wal.trim(trim(1)).await.unwrap_err());
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::NotFound, "LOG_NOT_FOUND")
    );
    refused(&told);
    let made = wal.append(append("a", "0")).await.unwrap().into_inner();
    let told = Told::of(&wal.trim(trim(2)).await.unwrap_err());
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::OutOfRange, "BEYOND_TAIL")
    );
    assert_eq!((told.fact("tail_lsn"), told.fact("lsn")), ("1", "2"));
    refused(&told);
    let other = v1::TrimRequest {
        log_id: Some(made.log_id + 1),
        ..trim(1)
    };
    let told = Told::of(&wal.trim(other).await.unwrap_err());
    assert_eq!(
        (told.code, told.reason.as_str()),
        (Code::FailedPrecondition, "LOG_REPLACED")
    );
    refused(&told);
    let reserved = v1::TrimRequest {
        log: "$x".to_owned(),
        ..trim(0)
    };
    let told = Told::of(&wal.trim(reserved).await.unwrap_err());
    assert_eq!(told.reason, "INVALID_LOG_NAME");
    let page = wal.read(read(0)).await.unwrap().into_inner();
    assert_eq!(page.first_lsn, Some(0));
}
