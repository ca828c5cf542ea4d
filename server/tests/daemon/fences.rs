//! Fences and cursors over the wire.

use crate::support::{Daemon, SessionClient, Told, append, part};
use wald_proto::v1;

fn fence(writer_epoch: Option<u64>) -> v1::FenceRequest {
    v1::FenceRequest {
        log: "a".to_owned(),
        writer_epoch,
        log_id: None,
    }
}

fn by_writer(epoch: u64, payload: &str) -> v1::AppendRequest {
    v1::AppendRequest {
        condition: Some(v1::AppendCondition {
            writer_epoch: Some(epoch),
            ..v1::AppendCondition::default()
        }),
        ..append("a", payload)
    }
}

fn commit(cursor: &str, lsn: u64) -> v1::CursorCommit {
    v1::CursorCommit {
        log: "a".to_owned(),
        cursor: cursor.to_owned(),
        lsn,
        ..v1::CursorCommit::default()
    }
}

fn get(cursor: &str) -> v1::GetCursorRequest {
    v1::GetCursorRequest {
        log: "a".to_owned(),
        cursor: cursor.to_owned(),
        log_id: None,
    }
}

#[tokio::test]
async fn fence_shuts_out_older_writers_and_survives_restarts() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut wal = daemon.wal().await;
    wal.append(append("a", "old")).await.unwrap();
    wal.append(by_writer(0, "old")).await.unwrap();
    let fenced = wal.fence(fence(None)).await.unwrap().into_inner();
    assert_eq!((fenced.tail_lsn, fenced.writer_epoch), (Some(2), Some(1)));
    for request in [append("a", "x"), by_writer(0, "x"), by_writer(2, "x")] {
        let told = Told::of(&wal.append(request).await.unwrap_err());
        assert_eq!(told.reason, "FENCED");
        assert_eq!(told.fact("writer_epoch"), "1");
    }
    let new = wal.append(by_writer(1, "new")).await.unwrap().into_inner();
    assert_eq!(new.lsn, fenced.tail_lsn);
    assert_eq!(new.log_id, fenced.log_id);
    let fenced = wal.fence(fence(Some(9))).await.unwrap().into_inner();
    assert_eq!((fenced.tail_lsn, fenced.writer_epoch), (Some(3), Some(9)));
    assert_eq!(
        daemon.metric(r#"wald_condition_failures_total{reason="FENCED"}"#),
        3.0
    );
    drop(daemon);
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut wal = daemon.wal().await;
    let tail = v1::GetTailRequest {
        log: "a".to_owned(),
        ..v1::GetTailRequest::default()
    };
    let tail = wal.get_tail(tail).await.unwrap().into_inner();
    assert_eq!((tail.tail_lsn, tail.writer_epoch), (Some(3), Some(9)));
    let log = v1::GetLogRequest {
        log: "a".to_owned(),
    };
    let log = daemon.logs().await.get_log(log).await.unwrap().into_inner();
    assert_eq!(log.log.unwrap().writer_epoch, Some(9));
    let told = Told::of(&wal.append(by_writer(1, "x")).await.unwrap_err());
    assert_eq!(told.fact("writer_epoch"), "9");
    wal.append(by_writer(9, "newer")).await.unwrap();
}

#[tokio::test]
async fn fence_makes_a_log_that_is_not_there() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    let fenced = wal.fence(fence(None)).await.unwrap().into_inner();
    assert_eq!((fenced.tail_lsn, fenced.writer_epoch), (Some(0), Some(1)));
    let first = wal.append(by_writer(1, "x")).await.unwrap().into_inner();
    assert_eq!((first.lsn, first.log_id), (Some(0), fenced.log_id));
}

/// A writer that continues while another takes over: its acked records lie below the fence, and
/// none above.
#[tokio::test]
async fn session_of_a_fenced_writer_ends_at_the_tail_that_the_fence_told() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    let mut session = SessionClient::open(&mut wal).await;
    let requests = session.requests.clone();
    tokio::spawn(async move {
        for request_id in 0.. {
            let old = v1::LogBatch {
                condition: Some(v1::AppendCondition {
                    writer_epoch: Some(0),
                    ..v1::AppendCondition::default()
                }),
                ..part("a", &["old"])
            };
            let batch = Some(v1::AppendBatchRequest {
                batches: vec![old],
                ..v1::AppendBatchRequest::default()
            });
            let request = v1::AppendSessionRequest {
                request_id,
                batch,
                ..v1::AppendSessionRequest::default()
            };
            if requests.send(request).await.is_err() {
                return;
            }
        }
    });
    for _ in 0..20 {
        session.answers.message().await.unwrap().unwrap();
    }
    let fenced = wal.fence(fence(None)).await.unwrap().into_inner();
    let new = wal.append(by_writer(1, "new")).await.unwrap().into_inner();
    assert_eq!(new.lsn, fenced.tail_lsn);
    let (acked, end) = session.rest().await;
    let told = Told::of(&end.unwrap_err());
    assert_eq!(told.reason, "FENCED");
    let acked = 20 + acked.len() as u64;
    assert_eq!(told.fact("request_id"), acked.to_string());
    assert_eq!(fenced.tail_lsn, Some(acked));
}

#[tokio::test]
async fn cursor_is_made_moved_back_and_forth_and_forgotten() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut wal = daemon.wal().await;
    let mut cursors = daemon.cursors().await;
    let batch = v1::AppendBatchRequest {
        batches: vec![part("a", &["0", "1", "2"])],
        ..v1::AppendBatchRequest::default()
    };
    let log_id = wal.append_batch(batch).await.unwrap().into_inner().appends[0].log_id;
    for (lsn, expected_lsn) in [(2, Some(0)), (3, Some(2)), (1, None)] {
        let commit = v1::CursorCommit {
            expected_lsn,
            log_id: Some(log_id),
            ..commit("c", lsn)
        };
        let request = v1::CommitCursorRequest {
            commit: Some(commit),
        };
        let moved = cursors.commit_cursor(request).await.unwrap().into_inner();
        let moved = moved.cursor.unwrap();
        assert_eq!((moved.log.as_str(), moved.name.as_str()), ("a", "c"));
        assert_eq!((moved.lsn, moved.log_id), (Some(lsn), log_id));
        assert!(moved.update_time.unwrap().seconds > 0);
        let shown = cursors.get_cursor(get("c")).await.unwrap().into_inner();
        assert_eq!(shown.cursor.unwrap(), moved);
    }
    drop(daemon);
    let daemon = Daemon::start_in(directory.path(), &[]);
    let mut cursors = daemon.cursors().await;
    let shown = cursors.get_cursor(get("c")).await.unwrap().into_inner();
    assert_eq!(shown.cursor.unwrap().lsn, Some(1));
    let delete = v1::DeleteCursorRequest {
        log: "a".to_owned(),
        cursor: "c".to_owned(),
        log_id: Some(log_id),
    };
    cursors.delete_cursor(delete).await.unwrap();
    let told = Told::of(&cursors.get_cursor(get("c")).await.unwrap_err());
    assert_eq!(told.reason, "CURSOR_NOT_FOUND");
}

#[tokio::test]
async fn cursor_moves_with_the_batch_or_not_at_all() {
    let daemon = Daemon::start(&[]);
    let mut wal = daemon.wal().await;
    let mut cursors = daemon.cursors().await;
    wal.append(append("a", "read me")).await.unwrap();
    let step = |expected_lsn| v1::AppendBatchRequest {
        batches: vec![part("results", &["done"])],
        cursors: vec![v1::CursorCommit {
            expected_lsn: Some(expected_lsn),
            ..commit("worker", 1)
        }],
        ..v1::AppendBatchRequest::default()
    };
    wal.append_batch(step(0)).await.unwrap();
    let shown = cursors.get_cursor(get("worker")).await.unwrap();
    assert_eq!(shown.into_inner().cursor.unwrap().lsn, Some(1));
    let told = Told::of(&wal.append_batch(step(0)).await.unwrap_err());
    assert_eq!(told.reason, "POSITION_MISMATCH");
    assert_eq!(told.fact("actual_lsn"), "1");
    let tail = v1::GetTailRequest {
        log: "results".to_owned(),
        ..v1::GetTailRequest::default()
    };
    let tail = wal.get_tail(tail).await.unwrap().into_inner();
    assert_eq!(tail.tail_lsn, Some(1));
}

#[tokio::test]
async fn cursors_are_listed_in_pages_by_name() {
    let daemon = Daemon::start(&[]);
    daemon.wal().await.append(append("a", "x")).await.unwrap();
    let mut cursors = daemon.cursors().await;
    for name in ["d", "a", "c", "ä", "b"] {
        let request = v1::CommitCursorRequest {
            commit: Some(commit(name, 1)),
        };
        cursors.commit_cursor(request).await.unwrap();
    }
    let (mut pages, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = v1::ListCursorsRequest {
            page_size: 2,
            page_token,
            log: "a".to_owned(),
            log_id: None,
        };
        let page = cursors.list_cursors(request).await.unwrap().into_inner();
        let names = page.cursors.into_iter().map(|cursor| cursor.name);
        pages.push(names.collect::<Vec<_>>());
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(pages, [vec!["a", "b"], vec!["c", "d"], vec!["ä"]]);
}
