//! The library's calls without a builder, against a server in memory.

use crate::memory::Memory;
use wald_client::{Client, CursorCommit, Lsn, Outcome, Reason};

async fn client() -> Client {
    let (_, endpoint) = Memory::start().await;
    Client::connect(endpoint).await.unwrap()
}

#[tokio::test]
async fn what_survived_is_a_position_for_an_older_epoch_and_none_for_this() {
    let client = client().await;
    assert_eq!(
        client.survived_position("log", 7, None).await.unwrap(),
        Some(100)
    );
    assert_eq!(
        client.survived_position("log", 1, None).await.unwrap(),
        None
    );
}

#[tokio::test]
async fn trim_answers_the_first_lsn_kept_or_why_not() {
    let client = client().await;
    let missing = client.trim("log", Lsn::new(0), None).await.unwrap_err();
    assert_eq!(missing.reason(), Some(Reason::LogNotFound));
    client.append_batch().log("log", ["0", "1"]).await.unwrap();
    let first = client.trim("log", Lsn::new(1), None).await.unwrap();
    assert_eq!(first, Lsn::new(1));
    let beyond = client.trim("log", Lsn::new(3), None).await.unwrap_err();
    assert_eq!(beyond.reason(), Some(Reason::BeyondTail));
}

#[tokio::test]
async fn segments_come_in_pages() {
    let client = client().await;
    let page = client.list_segments(1, None).await.unwrap();
    assert_eq!(page.segments[0].segment_id, 0);
    let page = client.list_segments(1, page.next_page_token).await.unwrap();
    assert_eq!(page.segments[0].segment_id, 1);
    let page = client.list_segments(1, page.next_page_token).await.unwrap();
    assert_eq!(page.next_page_token, None);
}

#[tokio::test]
async fn fence_shuts_out_writers_without_its_epoch() {
    let client = client().await;
    client.append("log", "before").await.unwrap();
    let fenced = client.fence("log", None, None).await.unwrap();
    assert_eq!((fenced.tail_lsn, fenced.writer_epoch), (Lsn::new(1), 1));
    let old = client.append("log", "old").await.unwrap_err();
    assert_eq!(old.reason(), Some(Reason::Fenced));
    assert_eq!(old.fact_number("writer_epoch"), Some(1));
    assert_eq!(old.outcome(), Outcome::NotApplied);
    let new = client.append("log", "new").writer_epoch(1).await.unwrap();
    assert_eq!(new.lsn, fenced.tail_lsn);
    let again = client.fence("log", Some(1), None).await.unwrap_err();
    assert_eq!(again.reason(), Some(Reason::Fenced));
}

#[tokio::test]
async fn cursor_moves_with_the_records_that_result_from_what_was_read() {
    let client = client().await;
    client.append_batch().log("in", ["0", "1"]).await.unwrap();
    let step = |from: u64| {
        client
            .append_batch()
            .log("out", ["seen"])
            .cursor(CursorCommit::new("in", "copier", from + 1).expected_lsn(from))
    };
    step(0).await.unwrap();
    let stands = client.get_cursor("in", "copier", None).await.unwrap();
    assert_eq!(stands.lsn, Lsn::new(1));
    // Nobody does a step twice.
    let again = step(0).await.unwrap_err();
    assert_eq!(again.reason(), Some(Reason::PositionMismatch));
    let out = client.read("out").await.unwrap();
    assert_eq!(out.records.len(), 1);
}

#[tokio::test]
async fn cursors_are_listed_in_pages_and_forgotten() {
    let client = client().await;
    client.append_batch().log("log", ["0", "1"]).await.unwrap();
    for name in ["a", "b", "c"] {
        let moved = client.commit_cursor(CursorCommit::new("log", name, 2));
        assert_eq!(moved.await.unwrap().lsn, Lsn::new(2));
    }
    let mut names = Vec::new();
    let mut token = None;
    loop {
        let page = client.list_cursors("log", 0, token, None).await.unwrap();
        names.extend(page.cursors.into_iter().map(|cursor| cursor.name));
        token = page.next_page_token;
        if token.is_none() {
            break;
        }
    }
    assert_eq!(names, ["a", "b", "c"]);
    client.delete_cursor("log", "b", None).await.unwrap();
    let gone = client.get_cursor("log", "b", None).await.unwrap_err();
    assert_eq!(gone.reason(), Some(Reason::CursorNotFound));
    let other = client.get_cursor("log", "a", Some(99)).await.unwrap_err();
    assert_eq!(other.reason(), Some(Reason::LogReplaced));
}
