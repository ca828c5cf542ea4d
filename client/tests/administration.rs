//! The library's calls without a builder, against a server in memory.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails where it stands"
)]
// Other tests use the rest of the fixture.
#![allow(dead_code)]

mod memory;

use memory::Memory;
use wald_client::{Client, Lsn, Reason};

async fn client() -> Client {
    let (_, endpoint) = Memory::start().await;
    Client::connect(endpoint).await.unwrap()
}

#[tokio::test]
async fn what_survived_is_a_position_for_an_older_epoch_and_none_for_this() {
    let client = client().await;
    assert_eq!(client.survived_position("log", 7, None).await.unwrap(), Some(100));
    assert_eq!(client.survived_position("log", 1, None).await.unwrap(), None);
}

#[tokio::test]
async fn trim_answers_the_first_lsn_kept_or_why_not() {
    let client = client().await;
    let missing = client.trim("log", Lsn::new(0), None).await.unwrap_err();
    assert_eq!(missing.reason(), Some(&Reason::LogNotFound));
    client.append_batch().log("log", ["0", "1"]).await.unwrap();
    let first = client.trim("log", Lsn::new(1), None).await.unwrap();
    assert_eq!(first, Lsn::new(1));
    let beyond = client.trim("log", Lsn::new(3), None).await.unwrap_err();
    assert_eq!(beyond.reason(), Some(&Reason::BeyondTail));
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
